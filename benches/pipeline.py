#!/usr/bin/env python3
"""Two workers that hold the layers of a model together (--stages 2) against two workers that hold all of it, in turn.

SmolLM2-135M from its Q4_1 file, computed in f32, 16 microbatches of 256 tokens a step, one thread for each worker, over TCP on this machine.
Prints tokens per second of the steps after the first, the largest memory of a worker, and that of one process alone. The
adapters must have the same bytes.
usage: benches/pipeline.py [TURNS]   (default 3; builds nothing: target/release/finetune)
"""
import json
import os
import pathlib
import secrets
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent.parent
FINETUNE = HERE / "target/release/finetune"
GGUF = pathlib.Path(os.environ.get("FINETUNE_SMOLLM2_GGUF", HERE / "target/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
TRAIN = ["--data", HERE / "recipes/rows/shell-train.jsonl", "--dtype", "f32", "--packing", "--max-steps", "3", "--micro-batch-tokens", "256",
         "--max-seq-len", "256", "--batch-size", "246", "--save-steps", "0", "--overwrite", "-q"]
PORT = 19400


def start(folder, *args):
    environment = {**os.environ, "FINETUNE_TOKEN": TOKEN, "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.Popen([str(a) for a in (FINETUNE, *args)], cwd=folder, env=environment, stdout=subprocess.DEVNULL)


def wait(process):
    """Waits, and returns the largest memory in MB."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, process.args
    return usage.ru_maxrss / 1024


def rate(folder, out):
    events = map(json.loads, open(folder / out / "metrics.jsonl"))
    steps = [e for e in events if e["event"] == "step"][1:]
    return sum(s["total_tokens"] for s in steps) / sum(s["seconds"] for s in steps)


def team(folder, out, how):
    coordinator = start(folder, GGUF, *TRAIN, "--role", "coordinator", "--gpus", "none", "--bind", f"127.0.0.1:{PORT}", *how, "-o", out)
    worker = ["--role", "worker", "--coordinator", f"127.0.0.1:{PORT}", "--gpus", "cpu", "--threads", "1", "-q"]
    workers = [start(folder, *worker) for _ in range(2)]
    peaks = [wait(worker) for worker in workers]
    wait(coordinator)
    return rate(folder, out), max(peaks)


TOKEN = secrets.token_hex(32)
for turn in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        alone = wait(start(work, GGUF, *TRAIN, "--gpus", "cpu", "--threads", "1", "-o", "alone"))
        whole, whole_peak = team(work, "whole", ["--expect-workers", "2"])
        line, line_peak = team(work, "line", ["--stages", "2"])
        files = {(work / out / "adapter_model.safetensors").read_bytes() for out in ("alone", "whole", "line")}
        assert len(files) == 1, "other bytes"
        print(f"two whole workers {whole:.0f} tokens/s, {whole_peak:.0f} MB; a line {line:.0f} tokens/s, {line_peak:.0f} MB; one process {alone:.0f} MB: "
              f"rate x {line / whole:.2f}, memory of a seat x {line_peak / alone:.2f} of one process", flush=True)
