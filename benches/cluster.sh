#!/usr/bin/env bash
# Costs and gains of several workers on a real model, measured from the runs' own metrics.jsonl:
#   step    2 workers on loopback: time of a step beyond the busier device's computing
#   slow    one worker four times slower than the other (it sleeps three times as long as it computes): throughput
#           against the sum of both alone, the slow one's share, and the throughput of an equal split
#   gigabit 3 workers behind links of 1 Gbit/s (network namespaces, tbf; needs root, ip and tc): synchronisation
#           against the bytes through the coordinator's link divided by its rate
#   delay   2 workers behind links of 100 Mbit/s, with --delay 0 and 1: time of a step beyond the busier device's computing
#   relays  4 workers behind links of 100 Mbit/s, with --relays never and always, and of 10 Gbit/s: time of a step, how much of it
#           devices wait for sums and the first parameters, and bytes through the coordinator's link
#   join    a worker with a warm cache: from its launch to its first lease
#
# usage: benches/cluster.sh MODEL [step|slow|gigabit|delay|relays|join ...]
#   MODEL  SmolLM2-135M-Instruct as a Hugging Face directory or a GGUF file
# cost: about 12 minutes on 2 quiet cores, 4 GB. Results are valid on a quiet machine only.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '13,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
model=$(realpath "$1")
shift
[ $# -gt 0 ] || set -- step slow gigabit delay relays join
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
binary=${FINETUNE_BINARY:-$here/target/release/finetune}
# The slow worker is slow by an injected fault, which only a build with the feature `faults` has.
[ -n "${FINETUNE_BINARY:-}" ] || cargo build --release --locked --features faults --manifest-path "$here/Cargo.toml"
work=$(mktemp -d)
cd "$work"
net=ftb
tidy() {
  kill -9 $(jobs -p) 2>/dev/null || true
  for n in $(ip netns list 2>/dev/null | awk '{print $1}' | grep "^$net-"); do ip netns del "$n"; done
  rm -rf "$work"
}
trap tidy EXIT
FINETUNE_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')
export FINETUNE_TOKEN
port=${PORT:-19100}
rows=(--data "$here/recipes/rows/commands-train.jsonl" --rank 16 --dtype f32 --save-steps 0 --eval-steps 0)

# train NAME WORKERS STEPS: the coordinator, in the background; worker OPTIONS: a worker of one thread.
train() {
  port=$((port + 1))
  ${on_coordinator:-} "$binary" "$model" "${rows[@]}" "${size[@]}" --max-steps "$3" --role coordinator \
    --bind "${address:-127.0.0.1}:$port" --expect-workers "$2" -o "$1" >"$1.log" 2>&1 &
  coordinator=$!
}
worker() {
  ${on_worker:-} "$binary" --role worker "$model" --coordinator "${address:-127.0.0.1}:$port" --threads 1 --dtype f32 "$@" \
    >>worker.log 2>&1 &
}
finished() { wait "$coordinator" || { cat ./*.log >&2; exit 1; }; wait; }
# network RATE HOSTS: hosts with links of this rate.
network() {
  ip netns add $net-sw; ip -n $net-sw link add br0 type bridge; ip -n $net-sw link set br0 up
  for i in $(seq "$2"); do
    ip netns add $net-h$i; ip link add $net$i netns $net-sw type veth peer name eth0 netns $net-h$i
    ip -n $net-sw link set $net$i master br0 up; ip -n $net-h$i addr add 10.79.0.$i/24 dev eth0
    ip -n $net-h$i link set eth0 up; ip -n $net-h$i link set lo up
    ip netns exec $net-h$i tc qdisc replace dev eth0 root tbf rate "$1" burst 256kb latency 20ms
    ip netns exec $net-sw tc qdisc replace dev $net$i root tbf rate "$1" burst 256kb latency 20ms
  done
  address=10.79.0.1 on_coordinator="ip netns exec $net-h1"
}
# without_network: the hosts are removed.
without_network() {
  unset address on_coordinator on_worker
  for n in $(ip netns list | awk '{print $1}' | grep "^$net-"); do ip netns del "$n"; done
}

# Steps of a run without the first two, in which speeds are measured.
table() {
  python3 - "$@" <<'P'
import json, statistics as s, sys
def steps(run):
    lines = [json.loads(l) for l in open(f"{run}/metrics.jsonl")]
    return [l for l in lines if l["event"] == "step"][2:]
def speed(run): return sum(l["total_tokens"] for l in steps(run)) / sum(l["seconds"] for l in steps(run))
what = sys.argv[1]
if what in ("step", "delay0", "delay1"):
    t = steps(what)
    beyond = [1e3 * (l["seconds"] - max(d["busy"] for d in l["shared"]["devices"])) for l in t]
    sync = [1e3 * l["shared"]["sync_seconds"] for l in t]; hid = [1e3 * l["shared"]["hidden_seconds"] for l in t]
    print(f"{what:8} beyond the busier device's computing: median {s.median(beyond):.0f} ms, least {min(beyond):.0f}; "
          f"sync {s.median(sync):.0f} ms, {s.median(hid):.0f} of it hidden; a step {s.median(l['seconds'] for l in t):.2f} s")
elif what.startswith("relays-"):
    t = steps(what); mean = lambda k: sum(l["shared"][k] for l in t) / len(t)
    print(f"{what:13} devices wait {mean('sync_seconds') - mean('hidden_seconds'):.2f} s of a step of {s.mean(l['seconds'] for l in t):.2f} s; "
          f"{mean('bytes_in')/1e6:.1f} MB in, {mean('bytes_out')/1e6:.1f} MB out")
elif what == "slow":
    fast, slow, both = speed("fast"), speed("slow"), speed("both")
    parts = [sorted((d["busy"] / max(d["tokens"], 1), d["tokens"]) for d in l["shared"]["devices"]) for l in steps("both")]
    share = sum(p[-1][1] for p in parts) / sum(t for p in parts for _, t in p)
    print(f"slow     fast alone {fast:.0f} tokens/s, slow alone {slow:.0f}, together {both:.0f}: {both/(fast+slow):.2f} of the sum; "
          f"an equal split could reach {2*slow:.0f} ({2*slow/(fast+slow):.2f}); share of the slow one {share:.3f}, of its speed {slow/(fast+slow):.3f}")
else:
    t = steps("gigabit"); rate = 1e9 / 8
    mean = lambda k: sum(l["shared"][k] for l in t) / len(t)
    floor = (mean("bytes_in") + mean("bytes_out")) / rate
    print(f"gigabit  {mean('bytes_in')/1e6:.1f} MB in, {mean('bytes_out')/1e6:.1f} MB out a step: {floor:.2f} s at the link's rate; "
          f"sync {mean('sync_seconds'):.2f} s = {mean('sync_seconds')/floor:.2f} x, {mean('hidden_seconds'):.2f} s of it hidden; a step {s.median(l['seconds'] for l in t):.2f} s")
P
}

for part in "$@"; do
  size=(--batch-size 16 --micro-batch-tokens 128)
  rm -f worker.log
  case $part in
  step)
    train step 2 10; worker; worker; finished
    table step ;;
  slow)
    size=(--batch-size 20 --micro-batch-tokens 64) # about 20 microbatches a step; the default rule gives 16
    train fast 1 4; worker; finished
    train slow 1 3; FINETUNE_INJECT=slow=4 worker; finished
    train both 2 7; worker; FINETUNE_INJECT=slow=4 worker; finished
    table slow ;;
  gigabit)
    [ "$(id -u)" = 0 ] && command -v tc >/dev/null || { echo "gigabit  skipped: needs root, ip and tc"; continue; }
    network 1gbit 4
    size+=(--relays never)
    train gigabit 3 8
    for i in 2 3 4; do on_worker="ip netns exec $net-h$i" worker; done
    finished
    without_network
    table gigabit ;;
  delay)
    [ "$(id -u)" = 0 ] && command -v tc >/dev/null || { echo "delay    skipped: needs root, ip and tc"; continue; }
    network 100mbit 3
    for steps in 0 1; do
      size=(--batch-size 32 --micro-batch-tokens 128 --delay $steps)
      train delay$steps 2 10
      for i in 2 3; do on_worker="ip netns exec $net-h$i" worker; done
      finished
      table delay$steps
    done
    without_network ;;
  relays)
    [ "$(id -u)" = 0 ] && command -v tc >/dev/null || { echo "relays   skipped: needs root, ip and tc"; continue; }
    for use in never always unshaped; do
      [ $use = unshaped ] && network 10gbit 5 || network 100mbit 5
      size=(--batch-size 32 --micro-batch-tokens 128 --relays ${use/unshaped/never})
      train relays-$use 4 7
      for i in 2 3 4 5; do on_worker="ip netns exec $net-h$i" worker; done
      finished
      table relays-$use
      without_network
    done ;;
  join)
    train join 1 1
    until grep -qs "waiting" join.log; do sleep 0.05; done
    from=$(date +%s%N); worker
    until grep -qs "in run" worker.log; do sleep 0.005; done
    echo "join     launch to admitted: $(( ($(date +%s%N) - from) / 1000000 )) ms, loading the model and the self-test included"
    finished ;;
  *) echo "benches/cluster.sh: no part $part" >&2; exit 2 ;;
  esac
done
