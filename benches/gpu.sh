#!/usr/bin/env bash
# For a machine with an NVIDIA GPU: every verb of every tier on the device against the CPU backend, by the same tests
# that run on the interpreter elsewhere.
#   benches/gpu.sh            builds here and runs here
#   benches/gpu.sh PROGRAM    runs the test program `ptx` that was built elsewhere
# It leaves gpu-report.txt: device, driver, one line per test. Timings are not in it yet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v nvidia-smi >/dev/null || { echo "skipped: no nvidia-smi, so no NVIDIA driver here"; exit 0; }
program=${1:-}
if [ -z "$program" ]; then
  program=$(cargo test --release --locked --test ptx --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*\/ptx-[^"]*\)".*/\1/p' | tail -1)
fi
{
  nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total --format=csv
  FINETUNE_PTX_DEVICE=0 "$program" --test-threads 1 products:: rows:: attention:: tensor::
} | tee gpu-report.txt
