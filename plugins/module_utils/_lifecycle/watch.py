# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Watches an engine at work: how many requests its gate passed, how many failed, how long the answers took.

All of it is counted by gate and engine themselves, so what is watched is the real traffic and nothing is added to it.
"""

from __future__ import annotations

import socket
import time
import typing as t
from dataclasses import asdict, dataclass, field

from . import config, golden
from .config import EngineConfig
from .deadline import Deadline
from .engine import Engine
from .errors import LifecycleError, Surprise, UnknownState, UsageError
from .gate import Gate
from .observe import observe

LOOK_INTERVAL = 2.0
CALL_TIMEOUT = 10.0
PROOF_TIMEOUT = 300.0
TELL_EVERY = 5.0
# States in which an engine is watched. One that was withdrawn serves what it has.
WATCHED = ("serving", "withdrawn")


@dataclass(frozen=True)
class Reading:
    """Counters at one moment: the gate's, or without a ``gate`` the engine's, which tells of no errors.

    ``latencies`` holds seconds and numbers by name, see ``engine.LATENCIES``.
    """

    at: float
    main_pid: int
    gate: bool
    requests: int
    errors: int
    latencies: dict[str, list[t.Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Watched:
    """What happened between two readings. ``latency`` is the mean in seconds by name, None for one without a sample."""

    seconds: float
    requests: int
    errors: int
    latency: dict[str, float | None]
    restarted_gate: bool

    @property
    def error_share(self) -> float:
        return self.errors / self.requests if self.requests else 0.0

    def asdict(self) -> dict[str, t.Any]:
        return {**asdict(self), "error_share": round(self.error_share, 5)}


def read_back(value: t.Any) -> Reading:
    """A reading that an earlier call has returned.

    :raises UsageError: it is none.
    """
    reading = t.cast(Reading, config.build(Reading, value, "a reading in since"))
    for one in reading.latencies.values():
        if len(one) != 2 or not all(config.fits(number, "float") for number in one):
            raise UsageError(
                "a reading in since has latencies that are none",
                entry="option-value",
                next_step="give it as it was returned",
            )
    return reading


def between(then: Reading, now: Reading) -> Watched:
    """Pure. A gate whose counters went back was restarted: what it counts since then is all that is known."""
    restarted = now.requests < then.requests
    requests, errors = (0, 0) if restarted else (then.requests, then.errors)
    latency = {}
    for name, (total, count) in now.latencies.items():
        before = then.latencies.get(name, [0.0, 0])
        samples = count - before[1]
        latency[name] = round((total - before[0]) / samples, 6) if samples > 0 else None
    seconds = round(now.at - then.at, 3)
    return Watched(seconds, now.requests - requests, max(now.errors - errors, 0), latency, restarted)


def take(engine: EngineConfig) -> Reading:
    """
    :raises UnknownState: it cannot be watched: it does not serve, or its state is unknown.
    """
    now = observe(engine)
    if now.state not in WATCHED or now.unit is None or now.api is None or now.api.metrics is None:
        why = f" ({'; '.join(now.reasons)})" if now.reasons else ""
        raise UnknownState(
            f"engine '{engine.engine}' on {now.host} is {now.state}{why}, so its traffic cannot be watched",
            entry="soak-failed",
            next_step=f"read journalctl -u {engine.unit}",
            reasons=now.reasons,
            unseen=now.unseen,
        )
    metrics = now.api.metrics
    requests, errors = Gate(engine).answered() if engine.gate else (sum(metrics.finished.values()), 0)
    return Reading(
        at=round(time.time(), 3),
        main_pid=now.unit.main_pid,
        gate=engine.gate is not None,
        requests=requests,
        errors=errors,
        latencies={name: [round(total, 6), count] for name, (total, count) in metrics.latencies.items()},
    )


def watch(
    engine: EngineConfig,
    since: Reading | None,
    seconds: float,
    max_error_share: float,
    report: t.Callable[[str], None],
    *,
    prove: bool,
) -> dict[str, t.Any]:
    """Look again and again until ``seconds`` after ``since``, and say what happened in that time.

    :raises Surprise: more than that share of the requests failed, or the process is another one.
    :raises UnknownState: as of ``take``.
    :raises Mismatch: at the end, with ``prove``, it does not compute what it should.
    """
    begun = since or take(engine)
    # Not a deadline from now: calls that follow each other share one end.
    ends = Deadline(max(begun.at + seconds - time.time(), 0.0))
    now = begun
    told = time.monotonic()
    while True:
        more = ends.rest(LOOK_INTERVAL)
        try:
            now = take(engine)
            _judge(engine, begun, now, max_error_share)
        except LifecycleError as exc:
            exc.details["watched"] = between(begun, now).asdict()
            raise
        if not more:
            break
        if time.monotonic() - told >= TELL_EVERY:
            told = time.monotonic()
            seen = between(begun, now)
            report(
                f"{engine.engine}: watched, {seen.requests} request(s), {seen.errors} failed, {seen.seconds:.0f} of "
                f"{seconds:.0f} s"
            )
    found = {"reading": asdict(begun), "watched": between(begun, now).asdict()}
    if prove:
        asked = Engine(engine)
        try:
            found["proof"] = golden.prove(asked, Deadline(PROOF_TIMEOUT), report).asdict()
        except LifecycleError as exc:
            exc.details["watched"] = found["watched"]
            raise
        finally:
            asked.close()
    return found


def _judge(engine: EngineConfig, then: Reading, now: Reading, max_error_share: float) -> None:
    here = f"engine '{engine.engine}' on {socket.gethostname()}"
    if now.main_pid != then.main_pid:
        raise Surprise(
            f"{here} was process {then.main_pid} and is process {now.main_pid}: it ended while it was watched",
            entry="soak-failed",
            next_step=f"read journalctl -u {engine.unit}",
        )
    seen = between(then, now)
    if seen.error_share > max_error_share:
        raise Surprise(
            f"{here} failed {seen.errors} of {seen.requests} request(s) in {seen.seconds:.0f} s (HTTP 5xx at its "
            f"gate), a share of {seen.error_share:.4f} where {max_error_share:g} is allowed",
            entry="soak-failed",
            next_step=f"read journalctl -u {engine.unit} and the gate's log",
        )
