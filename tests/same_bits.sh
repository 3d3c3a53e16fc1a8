#!/usr/bin/env bash
# Compares the adapters of two versions of the program byte for byte, for changes of structure that must move no bit.
# Runs: the demonstration in f32, in bf16 and with dropout, alone and with three workers; a classifier; a quantised
# base; SmolLM2 from its GGUF file (skipped without FINETUNE_SMOLLM2_GGUF or target/smollm2).
#
# usage: tests/same_bits.sh OLD [NEW]
#   OLD, NEW  a binary, or a commit, which is built in target/same_bits (about 9 minutes the first time on 2 cores);
#             NEW defaults to target/release/finetune
# cost: about 2 minutes on 2 cores. Not part of CI: there is no older binary.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '6,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# binary OLD|NEW: the path of an executable file
binary() {
  if [ -x "$1" ]; then realpath "$1"; return; fi
  local tree=$here/target/same_bits commit
  commit=$(git -C "$here" rev-parse --verify "$1^{commit}")
  if [ ! -x "$tree/$commit" ]; then
    rm -rf "$tree/source"
    git -C "$here" worktree prune
    git -C "$here" worktree add --quiet --detach "$tree/source" "$commit"
    cargo build --release --locked --quiet --manifest-path "$tree/source/Cargo.toml" --target-dir "$tree/build" --bin finetune
    cp "$tree/build/release/finetune" "$tree/$commit"
    git -C "$here" worktree remove --force "$tree/source"
  fi
  echo "$tree/$commit"
}

old=$(binary "$1")
new=$(binary "${2:-$here/target/release/finetune}")
smollm2=${FINETUNE_SMOLLM2_GGUF:-$here/target/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf}
work=$(mktemp -d)
cd "$work"
trap 'kill -9 $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
FINETUNE_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
export FINETUNE_TOKEN XDG_CACHE_HOME=$work/cache
port=${PORT:-19300}
data=$here/recipes/rows/commands-train.jsonl
awk 'BEGIN { for (i = 0; i < 64; i++) printf "{\"text\": \"row %d says %d\", \"label\": \"%s\"}\n", i, i * i % 7, i % 2 ? "odd" : "even" }' >labels.jsonl

# alone BINARY OUT options ...
alone() {
  local binary=$1 out=$2
  shift 2
  "$binary" "$@" --gpus cpu -q -o "$out" >"$out.log" 2>&1 || { cat "$out.log" >&2; exit 1; }
}

# workers BINARY OUT options ...: a coordinator and three workers of one thread each
workers() {
  local binary=$1 out=$2 c dtype
  shift 2
  dtype=$(grep -oE -- '--dtype [a-z0-9]+' <<<"$*")
  port=$((port + 1))
  "$binary" "$@" --role coordinator --bind "127.0.0.1:$port" --expect-workers 3 -o "$out" >"$out.log" 2>&1 &
  c=$!
  for i in 1 2 3; do
    "$binary" --role worker --coordinator "127.0.0.1:$port" --gpus cpu --threads 1 $dtype --join-timeout 60s >"$out-$i.log" 2>&1 &
  done
  wait "$c" || { tail -n 5 "$out"*.log >&2; exit 1; }
  wait
}

moved=0
# same NAME alone|workers options ...
same() {
  local name=$1 how=$2
  shift 2
  "$how" "$old" "$name-old" "$@"
  "$how" "$new" "$name-new" "$@"
  if cmp "$name-old/adapter_model.safetensors" "$name-new/adapter_model.safetensors"; then
    echo "same  $name: $(sha256sum <"$name-new/adapter_model.safetensors" | cut -c1-16)"
  else
    moved=1
  fi
}

demo=(demo --data "$data" --max-steps 12 --batch-size 16 --micro-batch-tokens 256)
same f32 alone "${demo[@]}" --dtype f32
same bf16 alone "${demo[@]}" --dtype bf16
same dropout alone "${demo[@]}" --dtype f32 --dropout 0.1
same f32-workers workers "${demo[@]}" --dtype f32
same bf16-workers workers "${demo[@]}" --dtype bf16
same dropout-workers workers "${demo[@]}" --dtype f32 --dropout 0.1
same nf4 alone "${demo[@]}" --dtype f32 --quantize nf4
same classes alone demo --data labels.jsonl --task classify --max-steps 12 --dtype f32
same classes-workers workers demo --data labels.jsonl --task classify --max-steps 12 --dtype f32
for pair in f32 bf16 dropout classes; do
  cmp "$pair-new/adapter_model.safetensors" "$pair-workers-new/adapter_model.safetensors" || moved=1
done
if [ -s "$smollm2" ]; then
  same smollm2 alone "$smollm2" --data "$data" --max-steps 3 --batch-size 4 --dtype f32
else
  echo "skipped: no SmolLM2 ($smollm2)"
fi
exit "$moved"
