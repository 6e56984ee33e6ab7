# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Where a running engine has its weights from: what its log of this start says, if its memory does not contradict.

An engine with a fall-back that finds no daemon loads from disk, and says so in one line among thousands; both copies
then stay on the GPU. So nothing is concluded from what was asked for.
"""

from __future__ import annotations

import re
import time
import typing as t

from . import gpu, host
from .config import EngineConfig
from .unit import Unit, UnitState, process_start

ZERO_COPY, COPY, DISK = "preload_zero_copy", "preload_copy", "disk"
MODES = {"zero_copy": ZERO_COPY, "copy": COPY}

_MAPPED = re.compile(r"Mapped \d+ tensors from the weight cache daemon \((zero_copy|copy) mode\)")
_FELL_BACK = "falling back to disk loading"
# In copy mode an engine that fails after it was given the weights tells the daemon to let go of them all the same.
_FAILED_LATE = "Weight cache IPC loading failed"
_FROM_DISK = "Loading weights took"
_EXTERNAL = "Externally held weights"


class LogWord(t.NamedTuple):
    """``source`` is None where the log does not say, ``why`` then says so. ``spent``: the daemon has let go."""

    source: str | None
    why: str = ""
    spent: bool = False


def read_log(lines: t.Sequence[str] | None) -> LogWord:
    """Where an engine has its weights from, by what it logged since it started. Pure."""
    if lines is None:
        return LogWord(None, "its log of this start cannot be read")
    modes = {found[1] for line in lines if (found := _MAPPED.search(line))}
    fell = [line for line in lines if _FELL_BACK in line]
    spent = "copy" in modes or any(_FAILED_LATE in line for line in fell)
    if fell and modes:
        return LogWord(None, f"its log says both, mapped and fallen back: {fell[0].strip()}", spent)
    if len(modes) > 1:
        return LogWord(None, "its log says both, zero_copy and copy", spent)
    if modes:
        return LogWord(MODES[modes.pop()], spent=spent)
    if fell:
        return LogWord(DISK, fell[0].strip(), spent)
    if any(_FROM_DISK in line for line in lines):
        return LogWord(DISK)
    return LogWord(None, "its log of this start does not say (is its log level above INFO?)")


def explain(lines: t.Sequence[str] | None) -> str:
    """What a line of vLLM's means for whoever uses a preload daemon; empty where there is none. Pure."""
    if any(_EXTERNAL in line for line in lines or ()):
        return (
            "its gpu-memory-utilization has to include the weights that the daemon holds: raise it to what it would be "
            "without a daemon"
        )
    return ""


def judge_source(
    said: str | None,
    own: t.Mapping[str, int] | None,
    lent: t.Mapping[str, int] | None,
    need: int,
    *,
    awake: bool,
) -> tuple[str | None, str]:
    """(source, why there is none) from what the log said and what the memory shows. Pure.

    :param own: MiB that the engine's processes hold, by GPU UUID; None where that cannot be seen.
    :param lent: the same of the daemon that it maps, None where that daemon has gone.
    :param need: MiB of weights on each GPU, 0 when not known.
    :param awake: whether it has all its memory, so that weights of its own must be there.
    """
    if said is None:
        return None, "its log does not say"
    if own is None:
        return None, f"its log says {said}, and the GPU memory that would show it cannot be seen"
    empty = [uuid for uuid, mib in own.items() if not mib]
    if empty or not own:
        return None, f"its log says {said}, yet its processes hold nothing on {', '.join(empty) or 'any GPU'}"
    if said == ZERO_COPY:
        for uuid in own:
            if lent is not None and lent.get(uuid, 0) < max(need, 1):
                return None, (
                    f"its log says that it maps its daemon's weights, yet the daemon holds {lent.get(uuid, 0)} MiB on "
                    f"{uuid}, and they are {need} MiB"
                )
        holders, what = (own, "it maps weights of a daemon that has gone") if lent is None else ({}, "")
    else:
        holders, what = (own, f"it has weights of its own ({said})") if awake else ({}, "")
    for uuid, mib in holders.items():
        if mib < need:
            return None, f"its log says that {what}, yet its processes hold {mib} MiB on {uuid}, and they are {need}"
    return said, ""


def said_at_start(engine: EngineConfig, unit: UnitState, started: dict[str, t.Any] | None) -> dict[str, t.Any]:
    """What the engine's ready door recorded of its weights; without such a record what the log still says."""
    if started is not None and started.get("main_pid") == unit.main_pid and "preload" in started:
        return dict(started["preload"] or {"source": DISK})
    ends = time.time() - (time.monotonic() - unit.started_at) + engine.start_timeout + 60
    word = read_log(Unit(engine.unit).log(unit.invocation, ends))
    return {"source": word.source, "why": word.why}


def held_by(devices: t.Sequence[gpu.GpuState] | None, uuids: t.Collection[str], pids: t.Collection[int]) -> t.Any:
    """MiB that processes hold, by UUID: on these GPUs, or where none are named on those where they hold any."""
    if devices is None:
        return None
    sums = {
        device.uuid: sum(mib or 0 for pid, mib in device.processes.items() if pid in pids)
        for device in devices
        if not uuids or device.uuid in uuids
    }
    return sums if uuids else {uuid: mib for uuid, mib in sums.items() if mib}


def identity(pid: int) -> dict[str, t.Any]:
    """A process, so that no later one with its number is taken for it."""
    return {"main_pid": pid, "boot": host.boot_id(), "start": process_start(pid) or 0}


def is_now(value: t.Mapping[str, t.Any], pid: int) -> bool:
    """Whether a record is of the process that has this number now."""
    return pid > 0 and {key: value.get(key) for key in ("main_pid", "boot", "start")} == identity(pid)


def lost(said: t.Mapping[str, t.Any], engine: UnitState, daemon: UnitState | None) -> bool:
    """Whether the daemon that an engine has mapped is another one than runs now, or none. Not seen is not lost."""
    if daemon is None:
        return False
    if daemon.active_state not in ("active", "activating", "deactivating") or not daemon.main_pid:
        return True
    if "daemon_process" in said:
        return not is_now(said["daemon_process"], daemon.main_pid)
    return daemon.started_at > engine.started_at
