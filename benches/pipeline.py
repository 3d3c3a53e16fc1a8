#!/usr/bin/env python3
"""Two workers that hold the layers of a model together (--stages 2) against two workers that hold all of it, in turn.

SmolLM2-135M from its Q4_1 file, computed in f32, 16 microbatches of 256 tokens a step, one thread for each worker, over TCP on this machine.
Prints tokens per second of the steps after the first, the largest memory of a worker, and that of one process alone. The
adapters must have the same bytes.
With RATE each process is on a host of its own (a network namespace; needs root, ip and tc), and the line runs again with every
host behind a link of that rate (tbf), exactly, with --wire bf16, and with --wire bf16 --sum-bits 8.
usage: benches/pipeline.py [TURNS [RATE]]   (default 3; RATE as tc has it, 20mbit; builds nothing: target/release/finetune)
"""
import contextlib
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


NET = f"ftb{os.getpid()}"


def ip(command, *more):
    subprocess.run(["ip", *command.split(), *more], check=True)


@contextlib.contextmanager
def hosts(rate):
    """Three hosts behind a switch, 10.79.0.1 and so on, each with a link of this rate, if there is one."""
    try:
        ip(f"netns add {NET}-sw")
        ip(f"-n {NET}-sw link add br0 type bridge")
        ip(f"-n {NET}-sw link set br0 up")
        for i in (1, 2, 3):
            ip(f"netns add {NET}-h{i}")
            ip(f"link add v{i} netns {NET}-sw type veth peer name eth0 netns {NET}-h{i}")
            ip(f"-n {NET}-sw link set v{i} master br0 up")
            ip(f"-n {NET}-h{i} addr add 10.79.0.{i}/24 dev eth0")
            ip(f"-n {NET}-h{i} link set eth0 up")
            ip(f"-n {NET}-h{i} link set lo up")
            for space, card in ((f"h{i}", "eth0"), ("sw", f"v{i}")) if rate else ():
                ip(f"netns exec {NET}-{space} tc qdisc replace dev {card} root tbf rate {rate} burst 64kb latency 50ms")
        yield
    finally:
        for name in ("sw", "h1", "h2", "h3"):
            subprocess.run(["ip", "netns", "del", f"{NET}-{name}"], stderr=subprocess.DEVNULL)


def start(folder, *args, host=None):
    environment = {**os.environ, "FINETUNE_TOKEN": TOKEN, "XDG_CACHE_HOME": str(folder / "cache")}
    command = [str(a) for a in (FINETUNE, *args)]
    if host:
        command = ["ip", "netns", "exec", f"{NET}-h{host}", *command]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)


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


def team(folder, out, how, at="127.0.0.1"):
    far = at != "127.0.0.1"
    coordinator = start(folder, GGUF, *TRAIN, "--role", "coordinator", "--gpus", "none", "--bind", f"{at}:{PORT}", *how, "-o", out,
                        host=1 if far else None)
    worker = ["--role", "worker", "--coordinator", f"{at}:{PORT}", "--gpus", "cpu", "--threads", "1", "-q"]
    # Over a slow link a worker would fetch its layers for a minute.
    own = [GGUF] if far else []
    workers = [start(folder, *own, *worker, host=2 + i if far else None) for i in range(2)]
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
        if len(sys.argv) > 2:
            rates = {}
            for name, link, how in (("unshaped", None, []), (sys.argv[2], sys.argv[2], []), ("bf16", sys.argv[2], ["--wire", "bf16"]),
                                    ("bf16, 8 bits", sys.argv[2], ["--wire", "bf16", "--sum-bits", "8"])):
                with hosts(link):
                    rates[name], _ = team(work, "far", ["--stages", "2", *how], at="10.79.0.1")
            base = rates["unshaped"]
            print("a line over links, tokens/s: " + "; ".join(f"{name} {rate:.0f} (x {rate / base:.2f})" for name, rate in rates.items()), flush=True)
