#!/usr/bin/env bash
# The guarantee of tests/cluster_runs on a real model: the choice, number and death of workers do not change the bytes
# of the adapter. Each part ends with a comparison of bytes:
#   workers  2, 3 and 7 workers over TCP, of 1 and 2 threads
#   kills    KILLS runs (5) with three workers, of which one is killed -9 at a random moment and restarted
#   frozen   one of two workers is stopped for the rest of the run
#   thaws    the same, but the worker continues after its timeout, and rejoins
#   joins    a second worker joins in the middle of the run
#   resumes  the coordinator is killed -9 and resumed
# At the end, `workers` prints the summary of its last run: time besides computing, bytes in each direction, idle
# devices.
#
# usage: [STEPS=4] [KILLS=5] tests/cluster_smollm2.sh MODEL_DIR [PART ...] [-- finetune options ...]
#   MODEL_DIR  SmolLM2-135M-Instruct (or another model) as a Hugging Face directory
# cost: all parts about 12 minutes on 2 quiet cores, 7 GB (7 workers: each maps the model, and shares its pages).
# Not part of CI, which does not have the model.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '13,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
model=$(realpath "$1")
shift
parts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do parts+=("$1"); shift; done
[ $# -eq 0 ] || shift
[ ${#parts[@]} -gt 0 ] || parts=(workers kills frozen thaws joins resumes)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
binary=${FINETUNE_BINARY:-$here/target/release/finetune}
# A worker is slow by an injected fault, which only a build with the feature `faults` has.
[ -n "${FINETUNE_BINARY:-}" ] || cargo build --release --locked --features faults --manifest-path "$here/Cargo.toml"
work=$(mktemp -d)
cd "$work"
trap 'kill -9 $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
FINETUNE_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
export FINETUNE_TOKEN
port=${PORT:-19000}
run=("$model" --data "$here/recipes/rows/commands-train.jsonl" --max-steps "${STEPS:-4}" --batch-size 8 --micro-batch-tokens 128 --rank 16
  --save-steps 1 --eval-steps 0 --dtype f32 "$@")

steps() { cat "$1/metrics.jsonl" 2>/dev/null | grep -c '"event":"step"' || true; }
until_step() { while [ "$(steps "$1")" -lt "$2" ]; do kill -0 "$c" || ended "$1"; sleep 0.05; done; }
until_said() { until grep -qs "$2" "$1.log"; do kill -0 "$c" || ended "$1"; sleep 0.05; done; }
ended() { echo "--- the coordinator of $1 ended early:" >&2; cat "$1.log" >&2; exit 1; }
# coordinator OUT WORKERS [options]
coordinator() {
  local out=$1 expect=$2
  shift 2
  "$binary" "${run[@]}" --role coordinator --bind "127.0.0.1:$port" --expect-workers "$expect" -o "$out" "$@" >>"$out.log" 2>&1 &
  c=$!
}
# worker NAME [threads]
worker() {
  "$binary" --role worker "$model" --coordinator "127.0.0.1:$port" --threads "${2:-1}" --dtype f32 --join-timeout 60s \
    >>"worker-$1.log" 2>&1 &
  last=$!
}
# finished OUT: the run ends with success and the bytes of one process.
finished() {
  wait "$c" || ended "$1"
  cmp alone/adapter_model.safetensors "$1/adapter_model.safetensors"
  kill -9 $(jobs -p) 2>/dev/null || true
  wait 2>/dev/null || true
  port=$((port + 1))
  echo "$1: the same bytes"
}

"$binary" "${run[@]}" -q -o alone
for part in "${parts[@]}"; do
  case $part in
  workers)
    for n in 2 3 7; do
      coordinator "workers-$n" "$n"
      for i in $(seq "$n"); do worker "$n-$i" $((1 + i % 2)); done
      finished "workers-$n"
    done
    tail -n 9 workers-7.log ;;
  kills)
    for k in $(seq "${KILLS:-5}"); do
      coordinator "kill-$k" 3
      worker a; worker b; worker victim; victim=$last
      until_step "kill-$k" 1
      sleep "$((RANDOM % 4)).$((RANDOM % 10))"
      kill -9 "$victim" 2>/dev/null || true
      worker victim
      finished "kill-$k"
    done ;;
  frozen | thaws)
    coordinator "$part" 2
    # Slow, so that the run does not end before the other worker times out.
    FINETUNE_INJECT=slow=6 worker a; worker victim; victim=$last
    until_step "$part" 1
    kill -STOP "$victim"
    if [ "$part" = thaws ]; then until_said "$part" "nothing was heard"; kill -CONT "$victim"; fi
    finished "$part" ;;
  joins)
    coordinator joins 1
    worker a
    until_step joins 2
    worker b
    finished joins ;;
  resumes)
    coordinator resumes 3
    worker a; worker b; worker c
    until_step resumes 2
    sleep 0.3
    kill -9 "$c"
    wait "$c" 2>/dev/null || true
    coordinator resumes 3 --resume
    finished resumes ;;
  *) echo "tests/cluster_smollm2.sh: no part $part" >&2; exit 2 ;;
  esac
done
echo "the same bytes as one process: ${parts[*]}"
