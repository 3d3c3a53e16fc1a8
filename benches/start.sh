#!/usr/bin/env bash
# Time from the launch of a training run to its first microbatch, when all rows are read, tokenised and packed, taken
# from the run's log. Prints seconds by the clock and of the processor, the best and the median.
#
# usage: benches/start.sh MODEL [ROWS.jsonl]      FINETUNE=a release binary      TIMES=number of runs (5)
set -euo pipefail
[ $# -ge 1 ] || { sed -n '5s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
model=$(realpath "$1") rows=${2:+$(realpath "$2")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${FINETUNE:-}" ] || { cargo build --release --locked && FINETUNE=target/release/finetune; }
python3 - "$FINETUNE" "$model" "${rows:-recipes/rows/commands-train.jsonl}" "${TIMES:-5}" <<'P'
import json, os, statistics, subprocess, sys, tempfile, time
binary, model, rows, times = sys.argv[1:]
clock, cpu = [], []
for _ in range(int(times)):
    with tempfile.TemporaryDirectory() as out:
        began = time.monotonic()
        run = subprocess.Popen([binary, model, "--data", rows, "--max-steps", "1", "--gpus", "cpu", "-q",
                                "--log-json", "/dev/stdout", "-o", out + "/o"], stdout=subprocess.PIPE)
        for line in run.stdout:
            if json.loads(line)["event"] == "run":
                clock.append(time.monotonic() - began)
                fields = open(f"/proc/{run.pid}/stat").read().rsplit(")", 1)[1].split()
                cpu.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
                break
        run.kill()
        run.wait()
assert len(clock) == int(times), "a run ended before it began"
print(f"{times} starts: {min(clock):.2f} s at best, {statistics.median(clock):.2f} in the median; "
      f"of the processor {min(cpu):.2f} and {statistics.median(cpu):.2f}")
P
