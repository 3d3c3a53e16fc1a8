#!/bin/sh
# A training step compared with transformers + PEFT: this program and the peer in turn, A B A B, in one run. Prints
# every line, and for every shape and number of threads a table with the ratios to the peer's best.
#
#   PYTHON   an interpreter with torch, transformers and peft
#   PAIRS    runs of each (2)                     STEPS    measured steps, after 2 warm-up steps (3)
#   SHAPES   rows x tokens ("4x256 1x1024")       THREADS  ("2"; "2 1" for both)
#   DTYPES   of this program ("f32 bf16")         MODES    of the peer ("f32 autocast bf16-autocast"; also bf16)
#   COMPILED=1  the peer under torch.compile too
#
# On a shared machine compare cpu_s, the processor time of a step over all threads: it does not include waiting.
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
cargo build --release --bench step
bench=$(ls -t target/release/deps/step-* | grep -v '\.d$' | head -n 1)
steps=${STEPS:-3}
for threads in ${THREADS:-2}; do
    for shape in ${SHAPES:-4x256 1x1024}; do
        rows=${shape%x*} tokens=${shape#*x}
        for _ in $(seq "${PAIRS:-2}"); do
            for dtype in ${DTYPES:-f32 bf16}; do
                "$bench" --threads "$threads" --rows "$rows" --length "$tokens" --micro $((rows * tokens)) \
                    --dtype "$dtype" --steps "$steps" 2>/dev/null | tee -a "$lines"
            done
            for mode in ${MODES:-f32 autocast bf16-autocast}; do
                "$python" benches/peft_step.py --threads "$threads" --batch "$rows" --seq "$tokens" --mode "$mode" \
                    --steps "$steps" 2>/dev/null | tee -a "$lines"
                [ -z "$COMPILED" ] || "$python" benches/peft_step.py --threads "$threads" --batch "$rows" \
                    --seq "$tokens" --mode "$mode" --compile --steps "$steps" 2>/dev/null | tee -a "$lines"
            done
        done
    done
done
"$python" - "$lines" <<'END'
import json, statistics, sys
groups = {}
for line in open(sys.argv[1]):
    r = json.loads(line)
    ours = r["trainer"] == "finetune"
    name = ("ours " + r["class"]) if ours else ("peft " + r["mode"])
    groups.setdefault((r["threads"], r["rows"], r["tokens"]), {}).setdefault((ours, name), []).append(r)
for (threads, rows, tokens), kinds in groups.items():
    mid = lambda runs, key: statistics.median(r[key] for r in runs)
    theirs = [runs for (ours, _), runs in kinds.items() if not ours]
    fast = max((mid(t, "tok_s") for t in theirs), default=float("nan"))
    lean = min((mid(t, "cpu_s") for t in theirs), default=float("nan"))
    print(f"\n{rows} x {tokens} tokens, {threads} threads; ratios to their best")
    print(f"{'':32} tokens/s   ratio   cpu s   ratio   peak MB")
    for (ours, name), runs in kinds.items():
        speed, cpu, rss = mid(runs, "tok_s"), mid(runs, "cpu_s"), max(r["rss_mb"] for r in runs)
        print(f"{name:32} {speed:8.0f} {speed / fast:7.2f} {cpu:7.2f} {lean / cpu:7.2f} {rss:9.0f}")
END
