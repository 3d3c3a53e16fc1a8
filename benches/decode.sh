#!/usr/bin/env bash
# Greedy decoding of one GGUF, ours and llama.cpp's in turn, A B A B, in one run: tokens a second, processor
# milliseconds a token, and the ratios of the best. Ours is the difference of a long and a short answer to one prompt.
#
# usage: benches/decode.sh MODEL.gguf
#   PYTHON   an interpreter that has llama-cpp-python (python3)      FINETUNE  a binary (a release build)
#   THREADS  of both (2)      PAIRS  how often (3)      TOKENS  that count (128)      PROMPT  what is continued
# Where others use the machine, compare processor time: waiting for a core is not in it.
set -euo pipefail
[ $# -eq 1 ] || { sed -n '5,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
model=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
binary=${FINETUNE:-}
[ -n "$binary" ] || { cargo build --release --locked && binary=target/release/finetune; }
threads=${THREADS:-2} tokens=${TOKENS:-128} prompt=${PROMPT:-Once upon a time there was a small}
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
TIMEFORMAT='%R %U %S'

# Seconds by the clock, of the processor in user and in kernel mode, of an answer of $1 tokens.
answer() {
  { time "$binary" generate "$model" --prompt "$prompt" --max-new-tokens "$1" --temperature 0 --dtype f32 --gpus cpu \
      --threads "$threads" >/dev/null 2>&1; } 2>&1
}
for _ in $(seq "${PAIRS:-3}"); do
  echo "$(answer 4) $(answer $((tokens + 4)))" | awk -v n="$tokens" \
    '{ printf "{\"who\": \"finetune\", \"tokens_per_second\": %.2f, \"cpu_ms\": %.2f}\n", n / ($4 - $1), 1e3 * ($5 + $6 - $2 - $3) / n }' | tee -a "$lines"
  "${PYTHON:-python3}" benches/llama_decode.py "$model" "$prompt" "$tokens" "$threads" 2>/dev/null | tee -a "$lines"
done
"${PYTHON:-python3}" - "$lines" <<'P'
import json, sys
rows = [json.loads(l) for l in open(sys.argv[1])]
best = lambda who, what, of: of(r[what] for r in rows if r["who"] == who)
fast = [best(w, "tokens_per_second", max) for w in ("finetune", "llama.cpp")]
cpu = [best(w, "cpu_ms", min) for w in ("finetune", "llama.cpp")]
print(f"best: {fast[0]:.1f} and {fast[1]:.1f} tokens/s, ratio {fast[0] / fast[1]:.2f}; "
      f"processor {cpu[0]:.2f} and {cpu[1]:.2f} ms a token, ratio {cpu[1] / cpu[0]:.2f}")
P
