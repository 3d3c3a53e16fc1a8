#!/usr/bin/env bash
# Exports of a real model in the programs that run them: the Python `gguf` package reads every file, llama.cpp's own
# converters and its quantiser give the same tensors, PEFT and transformers give the same logits, and llama.cpp gives the tokens of
# `finetune generate`: on an F32 base all of them, on a quantised one up to the first position where the two best logits
# are within 0.2 (llama.cpp rounds activations to 8 bits).
#
# usage: tests/runners.sh PYTHON LLAMA_CPP_DIR MODEL_DIR MODEL_GGUF TRAIN_JSONL WORK
#   PYTHON         an interpreter with gguf, torch, transformers, peft, sentencepiece, llama-cpp-python, cyllama
#   LLAMA_CPP_DIR  llama.cpp's sources (the source package of llama-cpp-python has them in vendor/)
#   MODEL_DIR      SmolLM2-135M-Instruct as a Hugging Face directory; MODEL_GGUF: the same quantised, a .gguf
#   WORK           a folder; an existing run in WORK/run is used again
# FINETUNE=BINARY replaces a release build.
# cost: about 5 minutes on 2 quiet cores; 6 GB of memory, 3 GB of disk. Not part of CI, which has none of these
# programs.
set -euo pipefail
[ $# -eq 6 ] || { sed -n '7,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
python=$1 llama=$2 model=$3 quantised=$4 rows=$5 work=$6
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${FINETUNE:-}" ]; then
  cargo build --release --locked --quiet --manifest-path "$here/Cargo.toml"
  FINETUNE=${CARGO_TARGET_DIR:-$here/target}/release/finetune
fi
export FINETUNE
mkdir -p "$work"
[ -s "$work/run/adapter_model.safetensors" ] || "$FINETUNE" "$model" --data "$rows" --max-steps 12 --rank 8 --alpha 16 \
  --learning-rate 1e-3 --batch-size 4 --max-seq-len 128 --dtype f32 -q -o "$work/run"

x() { "$FINETUNE" export "$work/run" --overwrite "$@"; }
x --model "$model" --to peft -o "$work/peft"
x --model "$model" --to merged --save-dtype f32 -o "$work/merged"
x --model "$model" --to gguf-lora -o "$work/lora.gguf"
x --model "$model" --to merged-gguf --outtype f32 -o "$work/merged-f32.gguf"
x --model "$quantised" --to merged-gguf -o "$work/merged-own.gguf"
x --model "$quantised" --to merged --save-dtype f32 -o "$work/merged-dequantised"
x --model "$quantised" --to ollama -o "$work/ollama"

convert() { "$python" "$llama/$1" --outtype f32 --outfile "$2" "${@:3}" 2> "$work/convert.log" || { cat "$work/convert.log" >&2; exit 1; }; }
convert convert_lora_to_gguf.py "$work/lora-theirs.gguf" --base "$model" "$work/run"
[ -s "$work/base-f32.gguf" ] || convert convert_hf_to_gguf.py "$work/base-f32.gguf" "$model"
[ -s "$work/merged-theirs.gguf" ] || convert convert_hf_to_gguf.py "$work/merged-theirs.gguf" "$work/merged"

compare() { "$python" "$here/tests/runners/compare.py" "$@"; }
compare same-tensors "$work/lora.gguf" "$work/lora-theirs.gguf"
compare same-tensors "$work/ollama/adapter.gguf" "$work/lora-theirs.gguf"
compare same-model "$work/merged-f32.gguf" "$work/merged-theirs.gguf"
compare readable "$work/merged-own.gguf" "$quantised"
for mix in q2_k:10 q3_k_l:13 q4_k_m:15 q5_k_s:16 q6_k:18; do
  x --model "$model" --to merged-gguf --outtype "${mix%:*}" -o "$work/mixed.gguf"
  compare mix "$work/mixed.gguf" "$work/merged-f32.gguf" "${mix#*:}"
done
compare logits "$model" "$work/peft" "$work/merged"
compare logits "$quantised" "$work/peft" "$work/merged-dequantised"
compare tokens "$model" "$work/run" "$work/base-f32.gguf" "$work/lora.gguf"
compare tokens "$model" "$work/run" "$work/merged-f32.gguf"
compare close "$quantised" "$work/run" "$work/merged-dequantised" "$quantised" "$work/ollama/adapter.gguf"
echo "all runners agree"
