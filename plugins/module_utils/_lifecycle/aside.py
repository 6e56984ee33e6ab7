# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A module's work in a process of its own, so that no connection has to last as long as the work.

The module waits for that process as long as it was told to. A short change is over by then, and its result is the
module's. Of a longer one the module says where its job lies, and ends; others look there for what is being done, and at
last for the result. A job is a directory that only its owner can read, in memory, and it goes with its process:

- ``lock`` is held by the process until the result is there, so the kernel says whether it lives,
- ``progress.json`` is what is being done,
- ``output`` and ``errors`` are what the module printed.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import typing as t
from pathlib import Path

from . import store
from .deadline import Deadline
from .errors import LifecycleError, UsageError

# Set by who is going to look: seconds after which a module that still works says where, and ends.
VARIABLE = "VLLM_LIFECYCLE_ASIDE"
# For how long a result is kept that nobody has come for.
KEPT = 900.0


class Progress:
    """What is being done, by the name of an engine, a daemon or a path. Without a file nobody can look."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.mutex = threading.Lock()
        self.said: dict[str, dict[str, t.Any]] = {}

    def about(self, name: str) -> t.Callable[[str], None]:
        """For what works on it: takes sentences, of which the last one counts."""

        def report(message: str) -> None:
            says = message.removeprefix(f"{name}: ")
            with self.mutex:
                if self.said.get(name, {}).get("says") != says:
                    self.said[name] = {"says": says, "at": time.monotonic()}
                    self._write()

        return report

    def done(self, name: str) -> None:
        """Nothing is being done for it any more."""
        with self.mutex:
            if self.said.pop(name, None):
                self._write()

    def _write(self) -> None:
        if self.file is None:
            return
        new = self.file.with_suffix(".new")
        with contextlib.suppress(OSError):  # no change fails because it cannot be watched
            new.write_text(json.dumps(self.said), encoding="utf-8")
            os.replace(new, self.file)


Work = t.Callable[[Progress], None]


def run(work: Work) -> None:
    """Do the work of a module, aside if it was told so and has the right to."""
    try:
        patience = float(os.environ.get(VARIABLE, ""))
        home = _make()
        lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except (ValueError, OSError):  # nobody looks, or this is a user who has no place for it
        work(Progress())
        return
    fcntl.flock(lock, fcntl.LOCK_EX)
    ended, end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        os.close(lock)
        os.close(end)
        _wait(home, child, ended, patience)
    os.close(ended)
    _detach(home)
    # Not after the work: what the interpreter does with an exception belongs to the result.
    atexit.register(_finish, home, lock, end)
    work(Progress(home / "progress.json"))


def _make() -> Path:
    jobs = store.lock_dir() / "jobs"
    jobs.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="", dir=jobs))


def _wait(home: Path, child: int, ended: int, patience: float) -> t.NoReturn:
    """The module's own process: give the result if it comes in time, else say where it will be."""
    over = select.select([ended], [], [], patience)[0]
    if not over:
        sys.stdout.write(json.dumps(_going_on(home)))
        sys.stdout.flush()
        # No clean-up here: the archive that this module was sent in is still needed, and the child removes it.
        os._exit(0)
    output, errors = _printed(home)
    shutil.rmtree(home, ignore_errors=True)
    os.kill(child, signal.SIGKILL)  # all that it still does is wait for that
    os.waitpid(child, 0)
    end_with(output, errors)


def end_with(output: bytes, errors: bytes) -> t.NoReturn:
    """Print what the module has printed. To take it apart and put it together again could only change it."""
    sys.stdout.buffer.write(output)
    sys.stderr.buffer.write(errors)
    raise SystemExit(0 if output else 1)


def _detach(home: Path) -> None:
    """Be no part of the connection: its end ends neither this process nor its output."""
    os.setsid()
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, home / "output", os.O_WRONLY | os.O_CREAT),
        (2, home / "errors", os.O_WRONLY | os.O_CREAT),
    ):
        file = os.open(name, flags, 0o600)
        os.dup2(file, number)
        os.close(file)


def _finish(home: Path, lock: int, end: int) -> None:
    """The result is there. Keep it until it was taken away, or nobody comes."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    fcntl.flock(lock, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):  # the module has not waited
        os.write(end, b".")
    kept = Deadline(KEPT)
    while home.exists() and kept.rest(0.5):
        pass
    shutil.rmtree(home, ignore_errors=True)


def _printed(home: Path) -> tuple[bytes, bytes]:
    found = []
    for name in ("output", "errors"):
        try:
            found.append((home / name).read_bytes())
        except FileNotFoundError:  # it was killed before it could open them
            found.append(b"")
    return found[0], found[1]


def _going_on(home: Path) -> dict[str, t.Any]:
    try:
        said = store.read_json(home / "progress.json") or {}
    except UsageError:
        said = {}
    now = time.monotonic()
    progress = {
        name: {"says": one["says"], "seconds": round(max(now - one["at"], 0.0), 1)} for name, one in said.items()
    }
    return {"changed": False, "vllm_job": str(home), "progress": progress}


def look(job: str, seconds: float) -> dict[str, t.Any] | tuple[bytes, bytes]:
    """What is being done when that many seconds are over, or what the module has printed as soon as it has ended.

    :raises UsageError: there is no such job.
    :raises LifecycleError: its process was killed, and has left nothing.
    """
    home = Path(job)
    deadline = Deadline(seconds)
    here = socket.gethostname()
    try:
        lock = os.open(home / "lock", os.O_RDONLY)
    except OSError as exc:
        raise UsageError(
            f"host {here} knows nothing of the job {job} ({exc.strerror}): it was restarted since, or nobody came for "
            f"the result within {KEPT:g} s",
            entry="task-lost",
            next_step="look at vllm_info, and run this again: it goes on with what was begun",
        ) from exc
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not deadline.rest(0.1):
                    return _going_on(home)
    finally:
        os.close(lock)
    output, errors = _printed(home)
    if not output and not errors:
        doing = "; ".join(f"{name}: {one['says']}" for name, one in _going_on(home)["progress"].items())
        raise LifecycleError(
            f"host {here}: the process that worked on this task was killed and has left no result"
            + (f"; the last that it did was {doing}" if doing else ""),
            entry="task-killed",
            next_step="read journalctl -k for a lack of memory, and journalctl -u systemd-logind where sessions are "
            "ended with their processes (KillUserProcesses); then run this again: it goes on with what was begun",
        )
    return output, errors
