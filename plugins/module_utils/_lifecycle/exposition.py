# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The observed states of a host's engines in the Prometheus text format, for node_exporter's textfile collector.

What is not known is absent, never 0. Times are points in time, so that a reader computes an age which still grows when
nobody writes any more.
"""

from __future__ import annotations

import math
import threading
import time
import typing as t

from . import config, store
from .deadline import Deadline
from .errors import LifecycleError
from .observe import STATES, Observation, observe

# Above what one hung engine costs its observer, and below the interval of the timer.
TIMEOUT = 45.0
MIB = 1024 * 1024
# Steps that only a wake has.
WAKES = ("wake", "wake_weights", "wake_kv")

PREFIX = "vllm_lifecycle_"
# All are gauges. One that is not in this table cannot be told.
FAMILIES = {
    "state": "1 for the state in which the engine was seen, 0 for the others.",
    "engine_info": "What the engine is declared to run, and who admits requests to it.",
    "signal_unseen": "1 for each signal of the engine that could not be read.",
    "admitted": "Whether requests come: it is admitted, proved and up.",
    "sessions": "Requests that its gate or balancer has open towards the engine.",
    "lease_held": "Whether somebody holds the engine out of service.",
    "lease_info": "Who holds the engine out of service, for what, and in which run.",
    "lease_taken_timestamp_seconds": "When the engine was taken out of service.",
    "lease_progress_timestamp_seconds": "When the last step under the lease ended, or the lease was taken.",
    "lease_expiry_timestamp_seconds": "When others may take the lease over.",
    "last_transition_timestamp_seconds": "When the last change to the engine ended that was made on purpose.",
    "last_transition_duration_seconds": "How long the steps of that change took.",
    "ready_timestamp_seconds": "When the engine last got ready in this way.",
    "ready_duration_seconds": "From the begin of that start or wake until the engine was warmed and proved.",
    "sleep_level": "The level at which the engine sleeps; absent while it is awake.",
    "sleep_resident_bytes": "GPU memory that the engine still held when it had fallen asleep.",
    "gpu_memory_bytes": "GPU memory that the engine's processes hold.",
    "golden_match": "Whether the engine gave the answers of its golden when it was last compared.",
    "golden_timestamp_seconds": "Since when that is known of the process that was compared.",
    "collection_success": "Whether the engine could be looked at. What was seen may still be unknown.",
    "collection_timestamp_seconds": "When these metrics were collected.",
    "collection_duration_seconds": "How long the collection took.",
}
# Family, labels, value.
Sample = tuple[str, dict[str, str], float]


class Look(t.NamedTuple):
    """One engine: what was seen of it, or why nothing could be."""

    engine: str
    seen: Observation | None
    why: str = ""


def collect(timeout: float = TIMEOUT) -> list[Look]:
    """Look at every engine of the host, side by side, so that one that hangs costs the others nothing.

    :raises UsageError: not root.
    """
    store.require_root()
    deadline = Deadline(timeout)
    found: dict[str, Look] = {}

    def look(name: str) -> None:
        try:
            found[name] = Look(name, observe(config.load(name)))
        except LifecycleError as exc:
            found[name] = Look(name, None, exc.text)

    # Not a pool: that would wait at its end for a thread that hangs.
    names = config.known_engines()
    threads = [threading.Thread(target=look, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline.left)
    late = f"no observation came of it within {timeout:g} s"
    return [found.get(name) or Look(name, None, late) for name in names]


def expose(looks: t.Sequence[Look], at: float, seconds: float) -> str:
    """The text for what was seen. Pure.

    :param at: when the collection ended, in seconds since the epoch.
    :param seconds: how long it took.
    """
    samples: list[Sample] = [("collection_timestamp_seconds", {}, at), ("collection_duration_seconds", {}, seconds)]
    for look in looks:
        own = [("collection_success", {}, look.seen is not None), *_state(look.seen)]
        if look.seen is not None:
            for part in (_identity, _lease, _journal, _memory, _golden):
                own += part(look.seen)
        samples += [(family, {"engine": look.engine, **labels}, value) for family, labels, value in own]
    lines: list[str] = []
    for family, text in FAMILIES.items():
        mine = [one for one in samples if one[0] == family]
        if mine:
            lines += [f"# HELP {PREFIX}{family} {text}", f"# TYPE {PREFIX}{family} gauge"]
            lines += [f"{PREFIX}{family}{_labels(labels)} {_number(value)}" for _family, labels, value in mine]
    return "\n".join([*lines, ""])


def run(timeout: float = TIMEOUT) -> tuple[str, list[str]]:
    """The text, and why engines could not be looked at."""
    begun = time.monotonic()
    looks = collect(timeout)
    text = expose(looks, round(time.time(), 3), round(time.monotonic() - begun, 3))
    return text, [f"engine '{look.engine}': {look.why}" for look in looks if look.why]


def _state(seen: Observation | None) -> list[Sample]:
    found = seen.state if seen is not None and seen.state in STATES else "unknown"
    return [("state", {"state": state}, state == found) for state in STATES]


def _identity(seen: Observation) -> list[Sample]:
    info = {"runtime_version": seen.runtime_version, "admission": seen.admission_backend}
    samples: list[Sample] = [("engine_info", info, 1)]
    samples += [("signal_unseen", {"signal": name}, 1) for name in sorted(seen.unseen)]
    if seen.gate is not None:
        samples += [("admitted", {}, seen.gate.ready), ("sessions", {}, seen.gate.sessions)]
    return samples


def _lease(seen: Observation) -> list[Sample]:
    held = seen.lease
    if held is None:
        return [] if "lease" in seen.unseen else [("lease_held", {}, 0)]
    ended = [at for step in held.steps if (at := _finite(step.get("at"))) is not None]
    return [
        ("lease_held", {}, 1),
        ("lease_info", {"owner": held.owner, "purpose": held.purpose, "run": held.run}, 1),
        *_known("lease_taken_timestamp_seconds", {}, held.since),
        *_known("lease_progress_timestamp_seconds", {}, max([held.since, *ended])),
        *_known("lease_expiry_timestamp_seconds", {}, held.expires),
    ]


def _journal(seen: Observation) -> list[Sample]:
    """What the unit's doors and the last change have written down."""
    samples: list[Sample] = []
    started, last = seen.started or {}, seen.last or {}
    path, boot, warm = started.get("path"), _finite(started.get("boot_s")), _finite(started.get("warm_s"))
    if path in ("preload", "warm", "cold"):
        samples += _known("ready_timestamp_seconds", {"path": path}, started.get("at"))
        if boot is not None and warm is not None:
            samples += _known("ready_duration_seconds", {"path": path}, round(boot + warm, 3))
    timings = last.get("timings")
    steps = {name: _finite(value) for name, value in timings.items()} if isinstance(timings, dict) else {}
    lasted = [seconds for seconds in steps.values() if seconds is not None]
    if isinstance(last.get("wanted"), str):
        wanted = {"wanted": last["wanted"]}
        samples += _known("last_transition_timestamp_seconds", wanted, last.get("at"))
        if lasted and len(lasted) == len(steps):
            samples += _known("last_transition_duration_seconds", wanted, round(sum(lasted), 3))
            if last["wanted"] == "awake" and any(name in steps for name in WAKES):
                samples += _known("ready_timestamp_seconds", {"path": "wake"}, last.get("at"))
                samples += _known("ready_duration_seconds", {"path": "wake"}, round(sum(lasted), 3))
    return samples


def _memory(seen: Observation) -> list[Sample]:
    samples: list[Sample] = []
    if seen.state in ("asleep", "waking") and seen.level is not None:
        samples.append(("sleep_level", {}, seen.level))
    for uuid, mib in sorted(seen.sleep.resident_mib.items()) if seen.sleep is not None else ():
        samples.append(("sleep_resident_bytes", {"gpu": uuid}, mib * MIB))
    pids = set(seen.unit.pids) if seen.unit is not None else set()
    for device in seen.gpus or ():
        held = [mib for pid, mib in device.processes.items() if pid in pids]
        known = [mib for mib in held if mib is not None]
        if known and len(known) == len(held):
            samples.append(("gpu_memory_bytes", {"gpu": device.uuid}, sum(known) * MIB))
    return samples


def _golden(seen: Observation) -> list[Sample]:
    found = seen.golden or {}
    if not isinstance(found.get("matches"), bool):
        return []
    return [("golden_match", {}, found["matches"]), *_known("golden_timestamp_seconds", {}, found.get("at"))]


def _known(family: str, labels: dict[str, str], value: t.Any) -> list[Sample]:
    number = _finite(value)
    return [] if number is None else [(family, labels, number)]


def _finite(value: t.Any) -> float | None:
    """A number of a state file, which may hold anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def _labels(labels: t.Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    # Half a surrogate pair, which JSON can carry, has no UTF-8.
    text = value.encode("utf-8", "replace").decode("utf-8")
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if isinstance(value, bool) else repr(value)
