#!/usr/bin/env bash
# Streamed layers against resident ones, in pairs of runs: seconds of the steps, and peak memory of the process.
# SmolLM2-135M with 10 of its 30 layers resident, f32, from f32 files; 4 microbatches of 1,024 and of 256 tokens a step.
# usage: benches/offload.sh [PAIRS]   (default 3; builds nothing: target/release/finetune)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pairs=${1:-3}
gguf=${FINETUNE_SMOLLM2_GGUF:-target/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf}
[ -s "$gguf" ] || recipes/fetch_smollm2.sh "$gguf"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
finetune=$PWD/target/release/finetune
rows=$PWD/recipes/rows/shell-train.jsonl

# Rows of 256 tokens and more, which are cut to 256.
python3 - "$rows" > "$work/rows.jsonl" <<'PYTHON'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
texts = [" ".join(str(value) for value in row.values()) for row in rows]
for at in range(32):
    print(json.dumps({"text": " ".join(texts[(at * 7 + i) % len(texts)] for i in range(90))}))
PYTHON

# The base as f32 safetensors: one step at rate 0 adds nothing to it.
"$finetune" "$gguf" --data "$rows" --gpus cpu --max-steps 1 --learning-rate 0 --save-steps 0 -q -o "$work/none"
"$finetune" merge "$work/none" --model "$gguf" --save-dtype f32 -o "$work/base" 2>&1 | tail -n 1

cat > "$work/run.py" <<'PYTHON'
import json, os, sys
tokens, offload, out = sys.argv[4], sys.argv[5], sys.argv[6]
line = [sys.argv[1], sys.argv[2], "--data", sys.argv[3], "--gpus", "cpu", "--dtype", "f32", "--packing", "--max-steps", "3",
        "--micro-batch-tokens", tokens, "--max-seq-len", "256", "--batch-size", str(int(tokens) // 64), "--save-steps", "0",
        "--offload", offload, "-q", "-o", out]
child = os.fork()
if child == 0:
    os.execv(line[0], line)
_, status, usage = os.wait4(child, 0)
assert status == 0, status
steps = [e for e in map(json.loads, open(out + "/metrics.jsonl")) if e["event"] == "step"]
print(sum(s["seconds"] for s in steps), usage.ru_maxrss, sum(s["tokens"] for s in steps))
PYTHON
for tokens in 1024 256; do
  for pair in $(seq "$pairs"); do
    read -r s0 m0 _ < <(python3 "$work/run.py" "$finetune" "$work/base" "$work/rows.jsonl" "$tokens" never "$work/r$tokens-$pair")
    read -r s1 m1 _ < <(python3 "$work/run.py" "$finetune" "$work/base" "$work/rows.jsonl" "$tokens" 20 "$work/s$tokens-$pair")
    cmp "$work/r$tokens-$pair/adapter_model.safetensors" "$work/s$tokens-$pair/adapter_model.safetensors"
    awk -v t="$tokens" -v a="$s0" -v b="$s1" -v c="$m0" -v d="$m1" 'BEGIN {
      printf "%5d tokens: resident %.2f s %.0f MB, streamed %.2f s %.0f MB: time x %.3f, memory x %.3f\n", t, a, c/1024, b, d/1024, b/a, d/c }'
  done
done
