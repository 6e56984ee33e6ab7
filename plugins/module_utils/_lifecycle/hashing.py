# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Hashes a checkpoint's files on all cores, behind all other work, and remembers what it hashed.

No file is hashed twice while its stamp stays the same. A stamp that was so young when its file was read that a later
write could leave it as it is, is not remembered.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
import typing as t
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from . import store, tensors
from .checkpoint import YOUNG_NS, Seen, Stamp, open_file, unreadable
from .deadline import Deadline
from .errors import DeadlineExceeded, UsageError

SCHEMA = 1
BUFFER = 4 * 1024 * 1024
REPORT_EVERY = 5.0
SAVE_EVERY = 10.0
# To hash less than this again takes less time than to wait until it is old enough to be remembered.
WORTH_WAITING = 256 * 1024 * 1024

Report = t.Callable[[str], None]
# What is hashed of a file: all of it, or a sample.
Key = tuple[Stamp, str]
WHOLE, SAMPLE = "whole", "sample"


def key(name: str, seen: Seen, method: str) -> Key:
    return seen.stamp, SAMPLE if method == "sample" and name.endswith(".safetensors") else WHOLE


class Memory:
    """What was hashed of one checkpoint, as ``known``: 64 hex digits by stamp and kind. A file that is not ours is as
    none. With ``writable`` False it only reads."""

    def __init__(self, path: Path, root: str, writable: bool) -> None:
        self.path, self.root, self.writable = path, root, writable
        self.known: dict[Key, str] = {}
        self.saved: dict[Key, str] = {}

    def load(self) -> None:
        try:
            value = store.read_json(self.path) or {}
            if value.get("schema") != SCHEMA or value.get("root") != self.root:
                return
            self.saved = {
                (Stamp(*map(int, stamp)), kind): digest
                for *stamp, kind, digest in value["hashes"]
                if kind in (WHOLE, SAMPLE) and re.fullmatch("[0-9a-f]{64}", digest)
            }
        except (UsageError, KeyError, TypeError, ValueError):
            return
        self.known.update(self.saved)

    def save(self, current: t.Iterable[Seen]) -> None:
        """Keep what is known of these files, and nothing of others.

        :raises Unwritable: it cannot be.
        """
        stamps = {one.stamp for one in current}
        wanted = {key: digest for key, digest in self.known.items() if key[0] in stamps}
        if not self.writable or wanted == self.saved:
            return
        rows = sorted([*stamp, kind, digest] for (stamp, kind), digest in wanted.items())
        store.write_private(self.path, {"schema": SCHEMA, "root": self.root, "hashes": rows})
        self.saved = wanted


class _Changed(Exception):
    """The file is not the one that was seen."""


class _Stopped(Exception):
    """The run ends before its work is done."""


class _Job(t.NamedTuple):
    name: str
    seen: Seen
    kind: str


def _give_way() -> None:
    """This thread runs when no other wants the CPU; Linux derives the class of its reads, idle as well, from that."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:  # some sandboxes forbid it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class Hashing:
    """Hashes those files whose digest is not in memory. ``read`` counts bytes."""

    def __init__(
        self, path: str, seen: t.Mapping[str, Seen], method: str, memory: Memory, deadline: Deadline, report: Report
    ) -> None:
        self.path, self.seen, self.memory, self.deadline, self.report = path, seen, memory, deadline, report
        self.digests = dict(memory.known)
        wanted = {key(name, one, method): _Job(name, one, key(name, one, method)[1]) for name, one in seen.items()}
        now = time.time_ns()
        # The largest first, so that none is left alone at the end; young ones last, so that they age meanwhile.
        self.jobs = sorted(
            (job for which, job in wanted.items() if which not in self.digests),
            key=lambda job: (job.seen.stamp.young(now), -job.seen.stamp.size),
        )
        self.total = sum(job.seen.stamp.size for job in self.jobs if job.kind == WHOLE)
        self.read = 0
        self.mutex = threading.Lock()
        self.stop = threading.Event()

    def run(self) -> dict[Key, str]:
        """The digests of all files; one that changed meanwhile has none.

        :raises UsageError: a file cannot be read, or is no safetensors file although it is named so.
        :raises DeadlineExceeded: names what is left. What is done by then is remembered.
        """
        if not self.jobs:
            return self.digests
        began = told = saved = time.monotonic()
        pool = ThreadPoolExecutor(min(len(self.jobs), len(os.sched_getaffinity(0))), "weights", initializer=_give_way)
        try:
            pending = {pool.submit(self._hash, job): job for job in self.jobs}
            waiting: set[Future[tuple[str, bool]]] = set(pending)
            while waiting:
                finished, waiting = wait(waiting, min(0.5, self.deadline.left), FIRST_COMPLETED)
                for future in finished:
                    self._finish(pending[future], future)
                now = time.monotonic()
                if now - told >= REPORT_EVERY:
                    told = now
                    self.report(self._progress(len(self.jobs) - len(waiting), now - began))
                if now - saved >= SAVE_EVERY:
                    saved = now
                    self.memory.save(self.seen.values())
                if waiting and not self.deadline.left:
                    raise DeadlineExceeded(
                        f"host {socket.gethostname()}: {self._progress(len(self.jobs) - len(waiting), now - began)}; "
                        f"the time-out of {self.deadline.seconds:g} s is over",
                        entry="hashing-timeout",
                        next_step="raise the time-out"
                        + ("; the next run goes on with the files that are left" if self.memory.writable else ""),
                        left={"files": sorted(pending[future].name for future in waiting)},
                    )
        finally:
            self.stop.set()
            pool.shutdown(cancel_futures=True)
            self.memory.save(self.seen.values())
        return self.digests

    def _progress(self, files: int, seconds: float) -> str:
        gib, of = self.read / 2**30, f" of {self.total / 2**30:.2f}" if self.total else ""
        rate = gib / max(seconds, 1e-3)
        return f"{self.path}: {gib:.2f}{of} GiB and {files} of {len(self.jobs)} files hashed, {rate:.2f} GiB/s"

    def _finish(self, job: _Job, future: Future[tuple[str, bool]]) -> None:
        try:
            digest, lasting = future.result()
        except _Changed:
            return
        except OSError as exc:
            raise unreadable(job.seen.path, exc) from exc
        except tensors.Malformed as exc:
            raise UsageError(
                f"host {socket.gethostname()}: {job.seen.path} is no whole safetensors file: {exc}",
                entry="checkpoint-broken",
                next_step="download this file again",
                files={job.name: str(exc)},
            ) from exc
        self.digests[job.seen.stamp, job.kind] = digest
        if lasting:
            self.memory.known[job.seen.stamp, job.kind] = digest

    def _hash(self, job: _Job) -> tuple[str, bool]:
        """The digest, and whether every later write will show in the file's stamp.

        :raises _Changed: the file was changed or exchanged.
        """
        stamp = job.seen.stamp
        if self.memory.writable and job.kind == WHOLE and stamp.size >= WORTH_WAITING:
            self._let_age(stamp)
        began = time.time_ns()
        try:
            descriptor = open_file(job.seen.path)
        except FileNotFoundError:
            raise _Changed from None
        try:
            try:
                if job.kind == SAMPLE:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                    digest = tensors.sample(descriptor, stamp.size, self._count)
                else:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                    digest = self._whole(descriptor)
            finally:
                if Stamp.of(os.fstat(descriptor)) != stamp:
                    raise _Changed
        finally:
            os.close(descriptor)
        return digest, not stamp.young(began)

    def _let_age(self, stamp: Stamp) -> None:
        """A large file that was just written: wait until its digest may be remembered."""
        seconds = (stamp.ctime_ns + YOUNG_NS - time.time_ns()) / 1e9
        if 0 < seconds <= YOUNG_NS / 1e9:
            self.stop.wait(seconds + 0.01)

    def _whole(self, descriptor: int) -> str:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(BUFFER))
        while read := os.readv(descriptor, [buffer]):
            digest.update(buffer[:read])
            self._count(read)
        return digest.hexdigest()

    def _count(self, read: int) -> None:
        with self.mutex:
            self.read += read
        if self.stop.is_set():
            raise _Stopped
