#!/usr/bin/env bash
# For a machine with an NVIDIA GPU: every verb of every tier, and whole models, on the device against the CPU backend,
# by the tests that run on the interpreter elsewhere; then memcheck and racecheck, timings, and the peer.
#   benches/gpu.sh            builds here and runs here
#   benches/gpu.sh PROGRAM    runs the test program `ptx`, built elsewhere
# FINETUNE_GPU_PEER: the command of the peer, which times the same work in PyTorch (`--only products`, `attention`,
# `step`); default "python3 benches/gpu_peer.py", which needs torch, transformers and peft.
# FINETUNE_PTX_DEVICE: the device, default 0.
# FINETUNE_GPU_PARTS: parts of `tests timings step peer sanitizer`, default all; all parts may take longer than
# the machine is available.
# Writes gpu-report.txt: device, driver, one line per test, per check, per timing. Not run on a card yet; with a driver
# that computes nothing (tests/ptx/libcuda.c) it runs from start to end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
command -v nvidia-smi >/dev/null || { echo "skipped: no nvidia-smi, so no NVIDIA driver here"; exit 0; }
program=${1:-}
if [ -z "$program" ]; then
  program=$(cargo test --release --locked --test ptx --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*\/ptx-[^"]*\)".*/\1/p' | tail -1)
fi
export FINETUNE_PTX_DEVICE=${FINETUNE_PTX_DEVICE:-0}
verbs="cases:: attention_sm80:: tensor:: fused:: widen:: sm70:: sm90a::"
# Without the tests that need only the interpreter.
verbs="$verbs --skip mutations --skip opcodes --skip graphs --skip attention_grad_sm90a --skip sm70::it_is --skip sm70::one_that --skip sm70::a_trial"

# One of the sanitizer's tools over every verb; a failure does not stop the next tool, and each prints its result.
sanitized() {
  local tool=$1 sanitizer
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
  if [ -z "$sanitizer" ]; then
    echo "$tool: skipped: no compute-sanitizer (pip: nvidia-cuda-sanitizer-api)"
  # shellcheck disable=SC2086
  elif timeout 150 "$sanitizer" --tool "$tool" --error-exitcode 9 "$program" --test-threads 1 $verbs; then
    echo "$tool: clean"
  else
    echo "$tool: NOT clean, or did not end within 150 s (exit $?)"
    failed=1
  fi
}

# Whether a part is requested.
part() {
  case " ${FINETUNE_GPU_PARTS:-tests timings step peer sanitizer} " in *" $1 "*) ;; *) return 1 ;; esac
}

failed=0
{
  # Drivers before 510 do not support compute_cap.
  nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total --format=csv || nvidia-smi -L
  if part tests; then
    # shellcheck disable=SC2086
    timeout 200 "$program" --test-threads 1 $verbs model:: || failed=1
  fi
  for clock in timings::timings step::step; do
    part "${clock%%::*}" || continue
    timeout 120 "$program" --nocapture --exact "$clock" | grep -E '^(timing|skipped|test )' || failed=1
  done
  if part peer; then
    for what in products attention step; do
      # shellcheck disable=SC2086
      timeout 120 ${FINETUNE_GPU_PEER:-python3 benches/gpu_peer.py} --only $what || echo "peer: $what did not run"
    done
  fi
  if part sanitizer; then
    sanitized memcheck
    sanitized racecheck
  fi
} > >(tee gpu-report.txt) 2>&1
exit $failed
