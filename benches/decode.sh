#!/usr/bin/env bash
# Greedy generation with one model, ours and a peer's in turn, A B A B, in one run: tokens a second, processor
# milliseconds a token, and the ratios of the best. The peer of a .gguf file is llama.cpp, that of a Hugging Face
# directory transformers in the same dtype. Ours is the difference of a long and a short answer to one prompt.
#
# usage: benches/decode.sh MODEL
#   PYTHON   an interpreter that has llama-cpp-python, or torch and transformers (python3)
#   FINETUNE a binary (a release build)      THREADS  of both ("2")      DTYPES  ("f32"; of a directory "f32 bf16")
#   PAIRS    how often (3)      TOKENS  that count (128)      PROMPT  what is continued, and does not end before
# Where others use the machine, compare processor time: waiting for a core is not in it.
set -euo pipefail
[ $# -eq 1 ] || { sed -n '6,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
model=$(realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
binary=${FINETUNE:-}
[ -n "$binary" ] || { cargo build --release --locked && binary=target/release/finetune; }
case $model in
  *.gguf) peer=llama dtypes=${DTYPES:-f32} ;;
  *) peer=transformers dtypes=${DTYPES:-f32 bf16} ;;
esac
python=${PYTHON:-python3} tokens=${TOKENS:-128} prompt=${PROMPT:-Once upon a time there was a small}
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
TIMEFORMAT='%R %U %S'

# Seconds by the clock, of the processor in user and in kernel mode, of an answer of $1 tokens.
answer() {
  { time "$binary" generate "$model" --prompt "$prompt" --max-new-tokens "$1" --temperature 0 --dtype "$dtype" \
      --gpus cpu --threads "$threads" >/dev/null 2>&1; } 2>&1
}
for threads in ${THREADS:-2}; do
  for dtype in $dtypes; do
    for _ in $(seq "${PAIRS:-3}"); do
      echo "$(answer 4) $(answer $((tokens + 4)))" | awk -v n="$tokens" -v kind="\"dtype\": \"$dtype\", \"threads\": $threads" \
        '{ printf "{\"who\": \"finetune\", %s, \"tokens_per_second\": %.2f, \"cpu_ms\": %.2f}\n", kind, n / ($4 - $1), 1e3 * ($5 + $6 - $2 - $3) / n }' | tee -a "$lines"
      "$python" "benches/${peer}_decode.py" "$model" "$prompt" "$tokens" "$threads" "$dtype" 2>/dev/null | tee -a "$lines"
    done
  done
done
"$python" - "$lines" <<'P'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
for kind in dict.fromkeys((r["dtype"], r["threads"]) for r in rows):
    of = lambda ours, what: [r[what] for r in rows if (r["dtype"], r["threads"]) == kind and (r["who"] == "finetune") == ours]
    fast = [max(of(ours, "tokens_per_second")) for ours in (True, False)]
    cpu = [min(of(ours, "cpu_ms")) for ours in (True, False)]
    print(f"{kind[0]}, {kind[1]} threads: {fast[0]:.1f} and {fast[1]:.1f} tokens/s, ratio {fast[0] / fast[1]:.2f}; "
          f"processor {cpu[0]:.2f} and {cpu[1]:.2f} ms a token, ratio {cpu[1] / cpu[0]:.2f}")
P
