#!/usr/bin/env bash
# On a real model what tests/cluster_runs holds on a small one: one process; a coordinator with three workers over
# TCP, of which one is killed -9 in the middle and comes back; and that coordinator killed -9 and resumed. All three
# adapters must have the same bytes. At the end stand the lines with which the second run described itself: time
# beside computing, bytes each way, idle devices.
#
# usage: tests/cluster_smollm2.sh MODEL_DIR [finetune options ...]
#   MODEL_DIR  SmolLM2-135M-Instruct (or another model) as a Hugging Face directory
# cost: about 3 minutes on 2 quiet cores, 5 GB. Not part of CI: the model is not there.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '7,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
model=$(realpath "$1")
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
binary=${FINETUNE_BINARY:-$here/target/release/finetune}
[ -x "$binary" ] || cargo build --release --locked --manifest-path "$here/Cargo.toml"
work=$(mktemp -d)
cd "$work"
trap 'kill -9 $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
FINETUNE_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
export FINETUNE_TOKEN
port=${PORT:-19000}
run=("$model" --data "$here/demo/train.jsonl" --max-steps 4 --batch-size 8 --micro-batch-tokens 256 --rank 16
  --save-steps 1 --eval-steps 0 --dtype f32 "$@")

steps() { cat "$1/metrics.jsonl" 2>/dev/null | grep -c '"event":"step"' || true; }
until_step() { while [ "$(steps "$1")" -lt "$2" ]; do kill -0 "$3" || ended "$1"; sleep 0.05; done; }
ended() { echo "--- the coordinator of $1 ended early:" >&2; cat "$1.log" >&2; exit 1; }
coordinator() {
  "$binary" "${run[@]}" --role coordinator --bind "127.0.0.1:$port" --expect-workers 3 -o "$@" >>"$1.log" 2>&1 &
  last=$!
}
worker() {
  "$binary" --role worker "$model" --coordinator "127.0.0.1:$port" --threads 1 --dtype f32 --join-timeout 60s \
    >>"worker-$1.log" 2>&1 &
  last=$!
}

"$binary" "${run[@]}" -q -o alone
coordinator cluster; c=$last
worker 1; worker 2; worker 3; victim=$last
until_step cluster 1 "$c"; sleep 0.7; kill -9 "$victim"; worker 3
until_step cluster 2 "$c"
wait "$c" || ended cluster
cmp alone/adapter_model.safetensors cluster/adapter_model.safetensors
port=$((port + 1))
coordinator resumed; c=$last
worker 4; worker 5; worker 6
until_step resumed 2 "$c"; sleep 0.3; kill -9 "$c"; wait "$c" 2>/dev/null || true
coordinator resumed --resume; c=$last
wait "$c" || ended resumed
cmp alone/adapter_model.safetensors resumed/adapter_model.safetensors
tail -n 9 cluster.log
echo "the same bytes: one process, three workers with one killed, a coordinator killed and resumed"
