#!/bin/sh
# Training tokens per second next to transformers + PEFT: both in turn, A B A B, in one run; prints every line
# and the ratio of the medians. PYTHON names an interpreter that has torch, transformers and peft.
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
threads=${THREADS:-2}
pairs=${PAIRS:-2}
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
cargo build --release --bench step
bench=$(ls -t target/release/deps/step-* | grep -v '\.d$' | head -n 1)
for _ in $(seq "$pairs"); do
    for micro in 1024 256; do
        "$bench" --threads "$threads" --micro "$micro" 2>/dev/null | tee -a "$lines"
    done
    "$python" benches/peft_step.py --threads "$threads" 2>/dev/null | tee -a "$lines"
done
"$python" - "$lines" <<'END'
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
peer = statistics.median(r["tok_s"] for r in rows if r["trainer"] != "finetune")
for micro in (1024, 256):
    own = [r for r in rows if r.get("micro_batch_tokens") == micro]
    speed, rss = statistics.median(r["tok_s"] for r in own), max(r["rss_mb"] for r in own)
    print(f"micro-batch {micro}: {speed:.0f} tokens/s, peer {peer:.0f}, ratio {speed / peer:.2f}, peak {rss:.0f} MB")
END
