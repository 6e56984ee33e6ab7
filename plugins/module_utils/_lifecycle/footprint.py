# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What an engine's sleeps cost: the host copy of its weights, and what each cycle leaves behind.

A sleep at level 1 copies the weights to pinned host memory, and the process keeps that memory for good: 12.94 GiB of
weights were measured to add 16.9 GiB. And some cycles leave GPU or host memory behind, until a wake fails for it.
"""

from __future__ import annotations

import os
import re
import socket
import typing as t
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from . import config, lease, store
from .config import EngineConfig
from .deadline import Deadline
from .errors import Refused
from .unit import process_start

# Pinned blocks are rounded up: 17,595 MiB for 13,261 and 3,658 for 2,693, measured; the smaller the model, the more.
HOST_COPY_FACTOR = 1.4
_LOADED = re.compile(r"Model loading took ([0-9.]+) GiB")


def loaded_mib(journal: t.Sequence[str]) -> int | None:
    """MiB of weights that the ranks of a start say they hold, in all; None where none says it."""
    sizes = [float(match[1]) for line in journal if (match := _LOADED.search(line))]
    return round(sum(sizes) * 1024) if sizes else None


@dataclass(frozen=True)
class Cycles:
    """The sleeps of one process. MiB by GPU UUID, after the first sleep and the last; host memory after wakes."""

    main_pid: int
    count: int = 0
    host_copy: bool = False
    first_gpu_mib: dict[str, int] = field(default_factory=dict)
    last_gpu_mib: dict[str, int] = field(default_factory=dict)
    first_host_mib: int = 0
    last_host_mib: int = 0


def read(engine: str, main_pid: int) -> Cycles:
    """
    :raises UsageError: the file is not one that we wrote.
    """
    path = store.state_dir(engine) / "cycles.json"
    value = store.read_json(path)
    if value is None or value.get("main_pid") != main_pid:
        return Cycles(main_pid)
    return t.cast(Cycles, config.build(Cycles, value, str(path)))


def begin_copy(engine: str, main_pid: int) -> None:
    """Before a sleep at level 1: whatever becomes of it, the copy may be there."""
    _write(engine, replace(read(engine, main_pid), host_copy=True))


def note_sleep(engine: str, main_pid: int, resident_mib: dict[str, int]) -> None:
    """After a proved sleep at level 1 or 2."""
    was = read(engine, main_pid)
    first = was.first_gpu_mib or resident_mib
    _write(engine, replace(was, count=was.count + 1, first_gpu_mib=first, last_gpu_mib=resident_mib))


def note_wake(engine: str, main_pid: int, host_mib: int) -> None:
    """After a proved wake; only of a process that has slept."""
    was = read(engine, main_pid)
    if was.count:
        _write(engine, replace(was, first_host_mib=was.first_host_mib or host_mib, last_host_mib=host_mib))


def _write(engine: str, cycles: Cycles) -> None:
    lease.record(engine, "cycles.json", asdict(cycles))


def leak(cycles: Cycles, gpu_budget_mib: int, host_budget_mib: int) -> str:
    """Why the process is due for a restart, "" when it is not. A budget of 0 is none. Pure."""
    found = []
    for uuid, mib in cycles.last_gpu_mib.items():
        grown = mib - cycles.first_gpu_mib.get(uuid, mib)
        if 0 < gpu_budget_mib < grown:
            found.append(f"asleep it holds {grown} MiB more on {uuid} than after its first sleep")
    grown = cycles.last_host_mib - cycles.first_host_mib
    if 0 < host_budget_mib < grown:
        found.append(f"awake it holds {grown} MiB more host memory than after its first wake")
    return f"after {cycles.count} sleeps {' and '.join(found)}" if found else ""


# Promises: two sleeps at once must not both count on the same free memory.


def _promises() -> dict[str, dict[str, int]]:
    found = store.read_json(store.lock_dir() / "host-memory.json") or {}
    return {
        engine: one
        for engine, one in found.items()
        if isinstance(one, dict) and process_start(int(one.get("pid", 0))) == one.get("start")
    }


def promised_mib(but: str) -> int:
    """MiB of host memory that sleeps of other engines are about to take."""
    return sum(one["mib"] for engine, one in _promises().items() if engine != but)


@contextmanager
def promised(
    engine: EngineConfig, mib: int, available_mib: t.Callable[[], int], deadline: Deadline
) -> t.Iterator[None]:
    """Have that much host memory promised to one engine for the time of its sleep.

    :raises Refused: others have been promised so much meanwhile that it is not there.
    """
    with lease.locked("host-memory", deadline, engine.engine):
        others, available = promised_mib(engine.engine), available_mib()
        if mib > available - others:
            raise Refused(
                f"engine '{engine.engine}' on {socket.gethostname()} needs {mib} MiB of host memory to sleep at level "
                f"1; {available} MiB are available, {others} MiB of them promised to other engines that fall asleep",
                entry="host-memory-short",
                next_step="run this again when they sleep, or use level 2, which keeps no copy",
            )
        _change_promises(engine.engine, mib)
    try:
        yield
    finally:
        with lease.locked("host-memory", Deadline(60), engine.engine):
            _change_promises(engine.engine, 0)


def _change_promises(engine: str, mib: int) -> None:
    promises: dict[str, t.Any] = {name: one for name, one in _promises().items() if name != engine}
    if mib:
        promises[engine] = {"pid": os.getpid(), "start": process_start(os.getpid()), "mib": mib}
    store.write_json(store.lock_dir() / "host-memory.json", promises)
