#!/usr/bin/env bash
# Cost of observation for a run, in processor time (user and system, of the run's process alone): with --dashboard,
# whose page a client reads as a browser does (the stream of events, and the body after events, at most twice a second,
# gzip), with /metrics scraped every second and --tensorboard; against the same run without any of it. Pairs in the
# order A B B A. Prints every pair, then median and spread of the ratios, and whether they resolve 1 %.
#
# usage: benches/dashboard.sh [MODEL [ROWS.jsonl]]     FINETUNE=a release binary     PAIRS=8     STEPS=400
#        ARGS="--batch-size 8 ..." are passed to both
set -euo pipefail
model=${1:+$(realpath "$1")} rows=${2:+$(realpath "$2")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -n "${FINETUNE:-}" ] || { cargo build --release --locked && FINETUNE=target/release/finetune; }
python3 - "$FINETUNE" "$model" "$rows" "${PAIRS:-8}" "${STEPS:-400}" "${ARGS:-}" <<'P'
import http.client, json, os, pathlib, shlex, socket, statistics, subprocess, sys, tempfile, threading, time
binary, model, rows, pairs, steps, more = sys.argv[1:]

def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]

def get(port, path):
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    c.request("GET", path, headers={"Accept-Encoding": "gzip"})
    return len(c.getresponse().read())

class Reader:
    """As live.js: the body after news, then half a second of rest; and a scraper beside it."""
    def __init__(self, port):
        self.port, self.over, self.news = port, False, threading.Event()
        self.bodies = self.scrapes = 0
        for work in (self.listen, self.read, self.scrape):
            threading.Thread(target=work, daemon=True).start()
    def listen(self):
        while not self.over:
            try:
                c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
                c.request("GET", "/news")
                answer = c.getresponse()
                while (line := answer.readline()):
                    if line.startswith(b"data:"):
                        self.news.set()
            except (OSError, http.client.HTTPException):
                time.sleep(0.05)
    def each(self, path, count):
        try:
            get(self.port, path)
            setattr(self, count, getattr(self, count) + 1)
        except (OSError, http.client.HTTPException):
            pass
    def read(self):
        while not self.over:
            if self.news.wait(0.1):
                self.news.clear()
                self.each("/body", "bodies")
                time.sleep(0.5)
    def scrape(self):
        while not self.over:
            self.each("/metrics", "scrapes")
            time.sleep(1)

def once(watched):
    with tempfile.TemporaryDirectory() as out:
        named = ([model] if model else []) + (["--data", rows] if rows else [])
        args = [binary, *named, "--gpus", "cpu", "--max-steps", steps, "-q", "-o", out + "/o", *shlex.split(more)]
        port = free_port()
        if watched:
            args += [f"--dashboard=127.0.0.1:{port}", "--tensorboard", out + "/tb"]
        began = time.monotonic()
        run = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        reader = Reader(port) if watched else None
        said = run.stderr.read().decode()
        _, status, used = os.wait4(run.pid, 0)
        seconds = time.monotonic() - began
        if reader:
            reader.over = True
        assert status == 0, said
        events = [json.loads(line) for line in open(out + "/o/metrics.jsonl")]
        taken = sum(e["seconds"] for e in events if e["event"] == "step")
        if watched:
            assert reader.bodies >= min(3, int(seconds)) and reader.scrapes, "no watcher read it"
            assert any(pathlib.Path(out, "tb").rglob("*tfevents*")), "no TensorBoard file"
        looks = (reader.bodies, reader.scrapes) if reader else (0, 0)
        return used.ru_utime + used.ru_stime, seconds, taken, looks

once(False)
quotients = []
for pair in range(int(pairs)):
    order = (False, True) if pair % 2 == 0 else (True, False)
    got = {watched: once(watched) for watched in order}
    (alone, clock, taken, _), (seen, clock_seen, _, (bodies, scrapes)) = got[False], got[True]
    quotients.append(seen / alone)
    print(f"pair {pair + 1}: processor {alone:.2f} s alone, {seen:.2f} s watched: x {seen / alone:.4f}; "
          f"clock {clock:.1f} and {clock_seen:.1f} s, steps {taken:.1f} s; {bodies} bodies, {scrapes} scrapes", flush=True)
middle = statistics.median(quotients)
spread = statistics.quantiles(quotients, n=4) if len(quotients) > 1 else [quotients[0]] * 3
# One standard error of the median of n: 1.253 sigma / sqrt(n); quartiles of a normal distribution are 1.349 sigma
# apart.
wander = 0.93 * (spread[2] - spread[0]) / len(quotients) ** 0.5
print(f"watched / alone, processor time, {len(quotients)} pairs of {steps} steps: median x {middle:.4f}, "
      f"quartiles {spread[0]:.4f} and {spread[2]:.4f}, least {min(quotients):.4f}, most {max(quotients):.4f}")
verdict = "resolves 1 %" if wander < 0.005 else "does not resolve 1 %: more PAIRS or STEPS, or a quieter machine"
print(f"the median wanders by about {100 * wander:.2f} %: this {verdict}")
P
