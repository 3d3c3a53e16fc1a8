#!/usr/bin/env bash
# A model eight times larger: steps of SmolLM2-135M's shape and of Llama 1B's (random weights, LoRA r 16 on seven
# projections) in turn, A B A B, in one run. Prints the larger model's tokens a second relative to the prediction of the
# arithmetic count (model::flops) from the smaller one, by the clock and by processor time.
#
# usage: benches/larger.sh
#   PAIRS  runs of each (2)     STEPS  measured steps, after 2 warm-up steps (2)     THREADS  (2)
#   ROWS, LENGTH  tokens of a step (1, 512)     DTYPE  f32 or bf16 (f32)     STEP  the built bench `step`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${STEP:-}" ]; then
  cargo build --release --locked --bench step
  STEP=$(ls -t target/release/deps/step-* | grep -v '\.d$' | head -n 1)
fi
rows=${ROWS:-1} length=${LENGTH:-512}
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
run() {
  "$STEP" --threads "${THREADS:-2}" --steps "${STEPS:-2}" --rows "$rows" --length "$length" \
    --micro $((rows * length)) --dtype "${DTYPE:-f32}" "$@" 2>/dev/null | tee -a "$lines"
}
for _ in $(seq "${PAIRS:-2}"); do
  run
  run --hidden 2048 --heads 32 --kv-heads 8 --feed-forward 8192 --layers 16 --vocab 128256
done
python3 - "$lines" <<'P'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
small = min(row["flops_token"] for row in rows)
more = max(row["flops_token"] for row in rows) / small
of = lambda this, what: [row[what] for row in rows if (row["flops_token"] == small) == this]
clock = max(of(False, "tok_s")) * more / max(of(True, "tok_s"))
cpu = min(of(True, "cpu_s")) * more / min(of(False, "cpu_s"))
print(f"{more:.2f} times the arithmetic a token; of the tokens/s that this predicts (asked: 0.85), best against best: "
      f"{clock:.3f} by the clock, {cpu:.3f} by processor time")
P
