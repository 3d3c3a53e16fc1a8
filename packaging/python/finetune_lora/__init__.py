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
    """Starts a run, and returns an iterator over the events of its metrics.jsonl: dictionaries whose `event` names the
    kind (run, step, eval, done ...).

    Options are those of the command line with underscores: `finetune --help` lists them. True and False are written as
    such, a list repeats the option, None leaves it out. Lines for people go to `sys.stderr`; `quiet=True` leaves errors
    only. The run waits for a caller that stops to read events. `close()` stops the run, with a checkpoint except on
    Windows; so does the loss of the iterator. FinetuneError reports a run that failed.
    """
    command = [find_binary()]
    if model is not None:
        command.append(os.fspath(model))
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        values = value if isinstance(value, (list, tuple)) else [value]
        command += ["{}={}".format(flag, _text(v)) for v in values if v is not None]
    command.append("--log-json=-")
    return _Events(command)


class _Events:
    """The events of a run that has been started."""

    def __init__(self, command):
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace")
        self._run = subprocess.Popen(command, **pipes)
        self._said = []
        self._listener = threading.Thread(target=_pass_on, args=(self._run.stderr, self._said), daemon=True)
        self._listener.start()

    def __iter__(self):
        return self

    def __next__(self):
        line = "" if self._run.stdout.closed else self._run.stdout.readline()
        if line.endswith("\n"):  # without it, the run was killed while it wrote
            return json.loads(line)
        ended_before = self._run.stdout.closed
        self._run.stdout.close()
        status = self._run.wait()
        self._listener.join()
        if status != 0 and not ended_before:
            raise FinetuneError(status, self._said[-1] if self._said else "")
        raise StopIteration

    def close(self):
        """Stops the run if it goes on, and waits for its end."""
        if self._run.poll() is None:
            self._run.terminate()
        self._run.stdout.close()
        self._run.wait()
        # At the interpreter's end the thread is stopped already, and waiting for it would never end.
        if not sys.is_finalizing():
            self._listener.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        if hasattr(self, "_listener"):  # it started
            self.close()


def _pass_on(lines, said):
    """Writes each line to `sys.stderr`, which a notebook shows, and keeps the last one that is not empty."""
    for line in lines:
        said[:] = [line.strip()] if line.strip() else said
        try:
            sys.stderr.write(line)
        except Exception:  # no stderr, or a closed one: the pipe must be read all the same
            pass
    lines.close()


def _text(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
