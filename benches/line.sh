#!/usr/bin/env bash
# Devices that hold a model together against whole devices: tokens per second of the steps, in turn in one run.
# SmolLM2-135M in f32 on the CPU, 8 and 16 microbatches a step: one device of 2 threads, two devices of 1 thread each side by
# side (cpu,cpu), and the same two as a line (cpu+cpu). The adapters must have the same bytes.
# The first step is left out: a device is opened and measured during it.
# usage: benches/line.sh [TURNS]   (default 3; builds nothing: target/release/finetune)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
turns=${1:-3}
gguf=${FINETUNE_SMOLLM2_GGUF:-target/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf}
[ -s "$gguf" ] || recipes/fetch_smollm2.sh "$gguf"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
finetune=$PWD/target/release/finetune
for tokens in 256 128; do
  for turn in $(seq "$turns"); do
    for gpus in cpu cpu,cpu cpu+cpu; do
      "$finetune" "$gguf" --data "$PWD/recipes/rows/shell-train.jsonl" --gpus "$gpus" --threads 2 --dtype f32 --packing \
        --max-steps 3 --micro-batch-tokens "$tokens" --max-seq-len 256 --batch-size 246 --save-steps 0 \
        --overwrite -q -o "$work/$gpus"
      cmp "$work/cpu/adapter_model.safetensors" "$work/$gpus/adapter_model.safetensors"
    done
    python3 - "$work" "$tokens" <<'PYTHON'
import json, sys
work, tokens = sys.argv[1:]
def rate(gpus):
    steps = [e for e in map(json.loads, open(f"{work}/{gpus}/metrics.jsonl")) if e["event"] == "step"][1:]
    return sum(s["tokens"] for s in steps) / sum(s["seconds"] for s in steps)
one, side, line = (rate(gpus) for gpus in ["cpu", "cpu,cpu", "cpu+cpu"])
print(f"{tokens:>5} tokens: one of 2 threads {one:.0f}, two side by side {side:.0f}, a line {line:.0f} tokens/s: "
      f"line / side by side {line / side:.3f}")
PYTHON
  done
done
