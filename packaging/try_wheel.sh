#!/usr/bin/env bash
# Installs the wheel of target/wheels into an empty virtual environment, trains the demonstration from the command line
# and from Python, and says how long it took. usage: packaging/try_wheel.sh [WHEEL]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

wheel=$(realpath "${1:-$(ls -t target/wheels/finetune_lora-*"$(uname -m)".whl | head -n 1)}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
# No HOME of the caller, no FINETUNE_ variables, no other programs than those of the system.
run() { env -i HOME="$work" PATH="$work/env/bin:/usr/bin:/bin" "$@"; }

began=$(date +%s%N)
python3 -m venv env
run env/bin/pip install -q --disable-pip-version-check --no-index "$wheel"
run finetune
took=$((($(date +%s%N) - began) / 1000000))
test -s runs/demo-1/adapter_model.safetensors

run HF_HUB_OFFLINE=1 env/bin/python - <<'PYTHON'
import fcntl
import time

import finetune_lora

events = list(finetune_lora.train(max_steps=3, output="out", quiet=True))
steps = [event for event in events if event["event"] == "step"]
assert [step["step"] for step in steps] == [1, 2, 3] and events[-1]["event"] == "done", events

try:
    list(finetune_lora.train("no/such/model", data="rows.jsonl", quiet=True))
except finetune_lora.FinetuneError as error:
    assert error.status != 0 and "no/such/model" in str(error), error
else:
    raise AssertionError("a missing model was accepted")

with finetune_lora.train(output="stopped", quiet=True) as events:
    for event in events:
        if event["event"] == "step" and event["step"] == 2:
            break

# The run writes into a full pipe when its iterator is lost.
events = finetune_lora.train(output="lost", quiet=True)
fcntl.fcntl(events._run.stdout, fcntl.F_SETPIPE_SZ, 4096)
run, began = events._run, time.monotonic()
time.sleep(2)
del events
assert run.poll() is not None and time.monotonic() - began < 60
assert finetune_lora.find_binary().endswith("finetune")
PYTHON
run env/bin/python -m finetune_lora --version
echo "wheel: installed, and the demonstration trained, in $took ms"
