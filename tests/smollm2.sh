#!/usr/bin/env bash
# Comparison on a real model: 40 steps on SmolLM2-135M-Instruct by this program and by transformers + PEFT, with the
# same rows, the same initial adapter and the same order. Passes if our eval loss is within 1 % of PEFT's, and if PEFT
# computes, for the adapter that we wrote, the eval loss that we report, to 5e-3.
#
# usage: tests/smollm2.sh PYTHON MODEL_DIR TRAIN_JSONL EVAL_JSONL WORK [finetune options ...]
#   PYTHON     an interpreter with torch, transformers, peft
#   MODEL_DIR  SmolLM2-135M-Instruct as a Hugging Face directory
#   *_JSONL    rows with instruction, input, output (for example recipes/rows/commands-train.jsonl, recipes/rows/commands-eval.jsonl)
#   WORK       PEFT's results stay there and are used again
# DTYPE: the precision of our side (f32)
# cost: PEFT's side about 2 minutes on 2 quiet cores, ours about 1; 6 GB. Not part of CI, which does not install torch.
set -euo pipefail
[ $# -ge 5 ] || { sed -n '6,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
python=$1 model=$2 train=$3 eval=$4 work=$5
shift 5
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

[ -s "$work/expected.json" ] || "$python" "$here/tests/peft/make_real_case.py" "$model" "$train" "$eval" "$work"

cargo build --release --locked --quiet --manifest-path "$here/Cargo.toml"
binary=${CARGO_TARGET_DIR:-$here/target}/release/finetune
"$binary" "$model" --data "$work/train.jsonl" --eval-data "$work/eval.jsonl" --init-adapter "$work/adapter_init" \
  --max-steps 40 --batch-size 8 --learning-rate 5e-4 --lr-scheduler cosine --warmup-steps 4 --rank 16 --alpha 32 \
  --no-shuffle --dtype "${DTYPE:-f32}" -o "$work/ours" --overwrite "$@"

theirs=$("$python" "$here/tests/peft/eval_adapter.py" "$model" "$work/ours" "$work/eval.jsonl" | tail -n 1)
"$python" - "$work" "$theirs" <<'PY'
import json, sys
work, reread = sys.argv[1], float(sys.argv[2])
want = json.load(open(f"{work}/expected.json"))
lines = [json.loads(l) for l in open(f"{work}/ours/metrics.jsonl")]
evals = [l["eval_loss"] for l in lines if "eval_loss" in l]
steps = [l for l in lines if "grad_norm" in l]
assert len(steps) == len(want["log"]), f"{len(steps)} steps, PEFT made {len(want['log'])}"
worst = {k: max(abs(o[k] - w[k]) / abs(w[k]) for o, w in zip(steps, want["log"])) for k in ("loss", "grad_norm")}
assert all(o["tokens"] == w["tokens"] for o, w in zip(steps, want["log"])), "supervised tokens differ"
ours, peft = evals[-1], want["eval_after"]
print(f"eval loss: before {want['eval_before']:.6f}; after, ours {ours:.6f}, PEFT {peft:.6f} ({abs(ours - peft) / peft:.2e} relative)")
print(f"our adapter, read by PEFT: {reread:.6f} (off {abs(ours - reread):.2e})")
print(f"over {len(steps)} steps: loss within {worst['loss']:.2e}, gradient norm within {worst['grad_norm']:.2e} relative")
assert abs(ours - peft) <= 0.01 * peft, "eval loss is not within 1 % of PEFT's"
assert abs(ours - reread) <= 5e-3, "PEFT finds another loss for our adapter"
PY
