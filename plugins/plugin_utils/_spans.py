# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a report says of a time out of rotation, of the requests that were cut and of GPU memory. Pure."""

from __future__ import annotations

import typing as t

# How the steps of a change are called in a report. Others keep their own name.
PHASE_OF = {
    "lease": "withdraw",
    "withdraw": "withdraw",
    "await_router": "withdraw",
    "await_idle": "drain",
    "close": "drain",
    "await_closed": "drain",
    "pause": "drain",
    "roll_back": "stop",
    "compare_speed": "prove",
    "resume": "admit",
    "await_ready": "admit",
    "wake_weights": "wake",
    "wake_kv": "wake",
    "reload": "wake",
    "reset_cache": "wake",
    "adapters": "wake",
}
IDLE_STEPS = ("await_idle", "await_closed")
DOWN = ("stopped", "failed")
# Less than that between two steps of one phase is our own time.
NO_GAP = 1.0
# What the boot of an engine consists of, where its log says so, as module_utils/_lifecycle/boot.py names it.
BOOT = ("import", "load", "compile", "profile", "serve")

Row = t.Mapping[str, t.Any]


def phases(steps: t.Iterable[Row], started: Row | None) -> list[dict[str, t.Any]]:
    """The steps under a lease as phases: ``at`` in seconds since the epoch, and ``seconds``.

    :param started: the record of the last proved start, which tells what the start of a unit consists of.
    """
    found: list[tuple[str, float, float]] = []
    for step in steps:
        end = float(step["at"])
        begin = end - float(step["seconds"])
        name = str(step["step"])
        if name == "start" and started and begin <= float(started.get("at") or 0) <= end + NO_GAP:
            found += _start(begin, end, started)
        else:
            found.append((PHASE_OF.get(name, name), begin, end))
    joined: list[tuple[str, float, float]] = []
    for phase, begin, end in found:
        if joined and joined[-1][0] == phase and begin - joined[-1][2] < NO_GAP:
            joined[-1] = (phase, joined[-1][1], end)
        else:
            joined.append((phase, begin, end))
    return [
        {"phase": phase, "at": round(begin, 3), "seconds": round(end - begin, 3)}
        for phase, begin, end in joined
        if end - begin >= 0.001
    ]


def _start(begin: float, end: float, started: Row) -> list[tuple[str, float, float]]:
    boot_s, warm_s = float(started.get("boot_s") or 0), float(started.get("warm_s") or 0)
    began = min(max(begin, float(started.get("began") or end - boot_s - warm_s)), end)
    served = min(began + boot_s, end)
    warmed = min(served + warm_s, end)
    said = started.get("boot") or {}
    boot, since = [], began
    for part in (one for one in BOOT if one in said):
        ends = min(since + float(said[part]), served)
        boot.append((part, since, ends))
        since = ends
    if not boot or abs(served - since) > NO_GAP:  # of more no more is known than that it booted
        boot = [("boot", began, served)]
    return [("prepare", begin, began), *boot, ("warm", served, warmed), ("prove", warmed, end)]


def span(out: Row) -> dict[str, t.Any]:
    """A time out of rotation that has ended: ``out_of_service`` of a module's result."""
    return {
        "since": out.get("since"),
        "seconds": round(float(out["seconds"]), 3),
        "phases": phases(out.get("steps") or (), out.get("started")),
    }


def span_of_lease(lease: Row, started: Row | None) -> dict[str, t.Any]:
    """One that has not: the lease as it was seen last."""
    return {"since": lease["since"], "seconds": None, "phases": phases(lease.get("steps") or (), started)}


def requests_cut(state: str, results: t.Iterable[Row], steps: t.Iterable[Row]) -> int | None:
    """How many requests a change has cut; none where the engine was seen idle, or down; None where that is not known.

    :param state: of the engine before the change.
    """
    counts = [int(one["requests_cut"]) for one in results if one.get("requests_cut") is not None]
    if counts:
        return sum(counts)
    return 0 if state in DOWN or any(step["step"] in IDLE_STEPS for step in steps) else None


def held_mib(engine: Row | None) -> int | None:
    """What the processes of an engine, as vllm_info saw it, hold on all devices; None where NVML does not say."""
    if not engine or not engine.get("gpus") or not engine.get("unit"):
        return None
    pids = {str(pid) for pid in engine["unit"]["pids"]}
    held = [mib for gpu in engine["gpus"] for pid, mib in gpu["processes"].items() if str(pid) in pids]
    return None if None in held else sum(held)
