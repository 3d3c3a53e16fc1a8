"""Cost of observation for a run, by the processor time of its threads: separate threads serve the page and /metrics, so
that one run is enough to measure them. A client requests the page's body twice a second and /metrics once a second. Not
included: the run's own thread, which wakes the clients that wait for events, and writes TensorBoard's files.
benches/dashboard.sh measures both.

usage: watched.py FINETUNE MODEL ROWS.jsonl [STEPS]
"""
import glob, os, socket, subprocess, sys, tempfile, threading, time, urllib.error, urllib.request

binary, model, rows = sys.argv[1:4]
steps = sys.argv[4] if len(sys.argv) > 4 else "8"
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    port = s.getsockname()[1]
taken, answers = {}, {"/body": 0, "/metrics": 0}


def ask(path, every):
    while True:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept-Encoding": "gzip"})
        try:
            urllib.request.urlopen(request, timeout=5).read()
            answers[path] += 1
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(every)


with tempfile.TemporaryDirectory() as out:
    run = subprocess.Popen(
        [binary, model, "--data", rows, "--max-steps", steps, "--batch-size", "4", "--gpus", "cpu",
         f"--dashboard=127.0.0.1:{port}", "-o", f"{out}/run"],
        stderr=subprocess.DEVNULL)
    for path, every in (("/body", 0.5), ("/metrics", 1.0)):
        threading.Thread(target=ask, args=(path, every), daemon=True).start()
    while run.poll() is None:
        for task in glob.glob(f"/proc/{run.pid}/task/*"):
            try:
                name = open(f"{task}/comm").read().strip()
                # Processor time in nanoseconds; the ticks of `stat` are 10 ms, longer than a response.
                spent = int(open(f"{task}/schedstat").read().split()[0])
            except (OSError, IndexError):
                continue
            taken[os.path.basename(task)] = name, spent / 1e9
        time.sleep(0.1)
    if run.returncode:
        sys.exit(f"{binary} ended with {run.returncode}")
    assert all(answers.values()), f"no watcher read it: {answers}"
    by, total = {}, sum(seconds for _, seconds in taken.values())
    for name, seconds in taken.values():
        by[name] = by.get(name, 0) + seconds
    for name, seconds in sorted(by.items(), key=lambda pair: -pair[1]):
        print(f"{name:20} {seconds:9.3f} s {100 * seconds / total:6.2f} %")
    print(f"{answers['/body']} bodies, {answers['/metrics']} scrapes")
