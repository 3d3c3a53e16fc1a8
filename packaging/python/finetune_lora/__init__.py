"""Runs the `finetune` binary that this package carries. The standard library is all that this module needs."""

import json
import os
import subprocess
import sys
import sysconfig
import threading

__all__ = ["FinetuneError", "find_binary", "train"]


class FinetuneError(RuntimeError):
    """A run that failed: `status` is the exit code, the message is the last line on standard error."""

    def __init__(self, status, message):
        super().__init__(message or "finetune ended with exit code {}".format(status))
        self.status = status


def find_binary():
    """Path of the `finetune` binary of this installation; FileNotFoundError if there is none."""
    name = "finetune" + (sysconfig.get_config_var("EXE") or "")
    user = "nt_user" if os.name == "nt" else "posix_user"
    # `pip install --target DIR` puts scripts into DIR/bin, beside this package.
    beside = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folders = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", scheme=user), os.path.join(beside, "bin")]
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return path
    raise FileNotFoundError("{} is in none of {}".format(name, ", ".join(folders)))


def train(model=None, **options):
    """Trains, and yields the events of metrics.jsonl as dictionaries (`event` names the kind: run, step, eval, done ...).

    Options are those of the command line with underscores: `finetune --help` lists them. True and False are written as
    such, a list repeats the option, None leaves it out. Lines for people go to `sys.stderr`; `quiet=True` leaves errors only.
    A generator that is closed early stops the run. FinetuneError reports a run that failed.
    """
    command = [find_binary()]
    if model is not None:
        command.append(os.fspath(model))
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        values = value if isinstance(value, (list, tuple)) else [value]
        command += ["{}={}".format(flag, _text(v)) for v in values if v is not None]
    command.append("--log-json=-")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace")
    run = subprocess.Popen(command, **pipes)
    said = []
    listener = threading.Thread(target=_pass_on, args=(run.stderr, said), daemon=True)
    listener.start()
    ended = False
    try:
        for line in run.stdout:
            yield json.loads(line)
        ended = True
    finally:
        if not ended:
            run.terminate()
        run.stdout.close()
        status = run.wait()
        listener.join()
    if status != 0:
        raise FinetuneError(status, said[-1] if said else "")


def _pass_on(lines, said):
    """Writes each line to `sys.stderr`, which a notebook shows, and keeps the last one that is not empty."""
    for line in lines:
        sys.stderr.write(line)
        said[:] = [line.strip()] if line.strip() else said
    lines.close()


def _text(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
