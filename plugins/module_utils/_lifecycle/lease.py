# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""State files of an engine: its lease, its last start, its last transition; and the lock on it.

A lease is written before a change and says who holds the engine out of service, why and until when. Its steps are a
journal of what was done under it, so that a killed run can be judged and gone on with.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import typing as t
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace

from . import config, store
from .deadline import Deadline
from .errors import Refused, UsageError

# How often somebody who waits for a lock is told for whom.
TELL_EVERY = 5.0


@dataclass(frozen=True)
class LeaseRequest:
    """Who wants to hold an engine. ``ttl`` in seconds; ``run`` names a run over many hosts."""

    owner: str
    reason: str = ""
    ttl: float = 4 * 3600
    run: str = ""


@dataclass(frozen=True)
class Lease:
    """Times are seconds since the epoch. ``restore`` is the admission that the change found."""

    owner: str
    reason: str
    run: str
    purpose: str
    restore: str
    since: float
    expires: float
    steps: list[dict[str, t.Any]] = field(default_factory=list)

    def held_against(self, owner: str, now: float) -> bool:
        """Whether someone else still holds it."""
        return self.owner != owner and now < self.expires

    def timings(self) -> dict[str, float]:
        """Seconds by step name, over all runs under this lease."""
        total: dict[str, float] = {}
        for step in self.steps:
            total[step["step"]] = round(total.get(step["step"], 0.0) + step["seconds"], 3)
        return total


def read(engine: str) -> Lease | None:
    """
    :raises UsageError: the file is not one that we wrote.
    """
    path = store.state_dir(engine) / "lease.json"
    value = store.read_json(path)
    if value is None:
        return None
    try:
        lease = t.cast(Lease, config.build(Lease, value, str(path)))
        lease.timings()
    except (UsageError, KeyError, TypeError) as exc:
        raise UsageError(
            f"{path} is no lease ({exc})",
            entry="record-broken",
            next_step=f"look at {path}; remove it when nobody works on '{engine}'",
        ) from exc
    return lease


def take(engine: str, request: LeaseRequest, purpose: str, restore: str) -> Lease:
    """Write the intent. An older lease is gone on with; whether another one's may be, the plan has judged.

    What was drained on purpose keeps that purpose, so that no later change admits it by the way.
    """
    now = time.time()
    old = read(engine)
    new = Lease(
        owner=request.owner,
        reason=request.reason,
        run=request.run,
        purpose=purpose,
        restore=restore,
        since=now,
        expires=now + request.ttl,
    )
    if old is not None:
        new = replace(
            new,
            reason=request.reason or old.reason,
            run=request.run or old.run,
            purpose="drained" if old.purpose == "drained" else purpose,
            restore=old.restore,
            since=old.since,
            steps=old.steps,
        )
    _write(engine, new)
    return new


def note(engine: str, step: str, seconds: float) -> None:
    """Add a finished step to the journal of the lease, if one is held."""
    lease = read(engine)
    if lease is not None:
        done = {"step": step, "seconds": round(seconds, 3), "at": round(time.time(), 3)}
        _write(engine, replace(lease, steps=[*lease.steps, done][-100:]))


def release(engine: str) -> None:
    store.remove(store.state_dir(engine) / "lease.json")


def _write(engine: str, lease: Lease) -> None:
    store.write_json(store.state_dir(engine) / "lease.json", {"schema": 1, **asdict(lease)})


def last_start(engine: str) -> dict[str, t.Any] | None:
    """What ``ready`` recorded of the last proved start: main_pid, began, boot_s, warm_s, at, path and more."""
    return store.read_json(store.state_dir(engine) / "ready.json")


def last_preflight(engine: str) -> dict[str, t.Any] | None:
    """The digest of the configuration that the last started process has read."""
    return store.read_json(store.state_dir(engine) / "preflight.json")


def last_transition(engine: str) -> dict[str, t.Any] | None:
    return store.read_json(store.state_dir(engine) / "last_transition.json")


def last_comparison(engine: str) -> dict[str, t.Any] | None:
    """Of an engine with a golden: main_pid, boot, start, at, key, matches."""
    return store.read_json(store.state_dir(engine) / "comparison.json")


def loaded_weights(engine: str, main_pid: int) -> str:
    """The digest of the checkpoint that this process has loaded, at its start or by a reload; "" where not known."""
    for file in ("reload.json", "ready.json"):
        value = store.read_json(store.state_dir(engine) / file)
        if value is not None and value.get("main_pid") == main_pid:
            return str(value.get("weights") or "")
    return ""


@dataclass(frozen=True)
class SleepRecord:
    """Our own word on an engine's sleep, since the engine's repeats whatever level was asked last.

    It is written before the engine is asked, and ``proved`` once the memory has been measured. ``awake`` lists the
    parts that a staged wake has brought back so far. ``freed_mib`` is by GPU UUID, and empty where no GPU was seen.
    """

    main_pid: int
    level: int
    kv_only: bool = False
    awake: list[str] = field(default_factory=list)
    freed_mib: dict[str, int] = field(default_factory=dict)
    resident_mib: dict[str, int] = field(default_factory=dict)
    proved: bool = False


def sleep_record(engine: str) -> SleepRecord | None:
    """
    :raises UsageError: the file is not one that we wrote.
    """
    path = store.state_dir(engine) / "sleep.json"
    value = store.read_json(path)
    if value is None:
        return None
    try:
        return t.cast(SleepRecord, config.build(SleepRecord, value, str(path)))
    except UsageError as exc:
        raise UsageError(str(exc), entry="record-broken", next_step="restart the engine with vllm_engine") from exc


def write_sleep_record(engine: str, value: SleepRecord | None) -> None:
    """Write the record, or remove it when the engine is awake again."""
    if value is None:
        store.remove(store.state_dir(engine) / "sleep.json")
    else:
        record(engine, "sleep.json", asdict(value))


def record(engine: str, file: str, value: dict[str, t.Any]) -> None:
    """Write one of the state files."""
    store.write_json(store.state_dir(engine) / file, {"schema": 1, "at": round(time.time(), 3), **value})


def holder(name: str) -> str:
    """On whose behalf a lock that was found taken is held: an engine's name, or words for one that did not say."""
    try:
        value = json.loads((store.lock_dir() / f"{name}.lock").read_text(encoding="utf-8"))
        return str(value["engine"])
    except (OSError, ValueError, KeyError, TypeError):
        return "(unknown)"


def _who(stream: t.TextIO) -> str:
    """Who holds a lock, by what it has written there."""
    stream.seek(0)
    try:
        value = json.loads(stream.read(300))
        return f"process {value['pid']} (since {time.time() - value['since']:.0f} s)"
    except (ValueError, KeyError, TypeError):
        return "a process that did not say who it is"


@contextmanager
def locked(
    name: str, deadline: Deadline, engine: str = "", report: t.Callable[[str], None] | None = None
) -> t.Iterator[None]:
    """One actor per engine (or GPU): held by the process, so the kernel frees it whatever ends the process.

    ``engine`` says on whose behalf a GPU is held. ``report`` hears for whom this waits.

    :raises Refused: another process still holds it at the deadline; names that process.
    """
    path = store.lock_dir() / f"{name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644), "a+", encoding="utf-8")
    except OSError as exc:
        raise store.unwritable(path, exc) from exc
    with opened as stream:
        told = 0.0
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if report and deadline.elapsed - told >= TELL_EVERY:
                    told = deadline.elapsed
                    report(f"{engine or name}: waits for {_who(stream)}, which works on '{name}', {deadline.says}")
                if deadline.rest(0.1):
                    continue
                raise Refused(
                    f"'{name}' on host {socket.gethostname()} is being changed by {_who(stream)}, still after "
                    f"{deadline.seconds:g} s",
                    entry="lock-held",
                    next_step="wait for that run to end, or end it, and run this again",
                ) from None
        says = json.dumps({"pid": os.getpid(), "since": round(time.time(), 1), "engine": engine or name})
        with suppress(OSError):  # on a full disk the lock holds, too, and only does not say whose it is
            os.ftruncate(stream.fileno(), 0)
            os.write(stream.fileno(), says.encode())
        yield
