#!/usr/bin/env bash
# Bytes of memory of a run on the CPU for each trained value: the difference of the peaks of two runs that differ only
# in the rank, over the difference of their trained values. Rows have a few tokens, so that activations, which grow with
# the rank as well, are small in comparison. Prints each peak, and the estimate of `plan`.
#
# usage: benches/optimizer_memory.sh [BINARY]      MODEL=demo RANKS="256 1024" OPTIONS="--dtype f32"
set -euo pipefail
binary=$(realpath "${1:-$(dirname "${BASH_SOURCE[0]}")/../target/release/finetune}")
python3 - "$binary" "${MODEL:-demo}" "${RANKS:-256 1024}" "${OPTIONS:---gpus cpu --dtype f32}" <<'P'
import json, resource, subprocess, sys, tempfile
binary, model, ranks, options = sys.argv[1], sys.argv[2], sys.argv[3].split(), sys.argv[4].split()
seen = []
for rank in ranks:
    with tempfile.TemporaryDirectory() as out:
        rows = out + "/rows.jsonl"
        open(rows, "w").write('{"prompt":"a","completion":"b"}\n' * 8)
        run = [model, "--data", rows, "--rank", rank, "--batch-size", "1", "--micro-batch-tokens", "16",
               "--max-steps", "2", "--save-steps", "1", "-o", out + "/o", *options]
        planned = json.loads(subprocess.run([binary, "plan", *run, "--json"], check=True, capture_output=True).stdout)
        trained = planned["adapter"]["trained_values"]
        devices = [d["memory_bytes"] for d in planned["devices"] if d.get("memory_bytes")]
        # Each run is the only child of a process, because the system reports the largest peak of all children.
        peak = int(subprocess.run([sys.executable, "-c",
            "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=2); "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)",
            binary, *run, "-q"], check=True, capture_output=True, text=True).stdout)
        seen.append((trained, peak))
        print(f"rank {rank}: {trained} trained values, peak {peak / 1e6:.1f} MB, "
              f"planned {sum(d['total'] for d in devices) / 1e6:.1f} MB")
(a, first), (b, last) = seen[0], seen[-1]
print(f"{(last - first) / (b - a):.2f} bytes for each trained value")
P
