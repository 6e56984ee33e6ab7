# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Brings a preload daemon to a state: ready, with the weights that its checkpoint now has, or absent, its memory free.

Neither is done to a daemon that a running engine maps. The engine would keep the memory, and the next daemon hold a
second copy beside it; so a daemon that such an engine has lost is reported, and comes back at that engine's restart.
"""

from __future__ import annotations

import socket
import time
import typing as t

from . import gpu, lease, weights
from .config import PreloadConfig
from .deadline import Deadline
from .errors import DeadlineExceeded, LifecycleError, Refused, Surprise, UnknownState
from .plan import Step
from .preload import PreloadState, observe_preload, record
from .source import held_by
from .transition import Outcome, Report
from .unit import Unit

START = Step("start", "start the daemon and wait until it is proved ready")
STOP = Step("stop", "stop the daemon and prove its memory free")
FORCED = "forced.json"


def plan_preload(wanted: str, now: PreloadState, force: bool) -> list[Step]:
    """The steps to ``ready`` or ``absent``. Pure.

    :raises Refused: an engine maps the daemon's memory; a daemon that is started anew would hold a second copy.
    :raises UnknownState: what matters cannot be seen.
    """
    if now.state == wanted:
        return []
    if wanted == "ready" and now.state == "starting":
        return [START]
    steps = [] if now.state == "absent" else [STOP]
    if wanted == "ready":
        steps.append(START)
    if force:
        return steps
    dark = {name: why for name, why in now.unseen.items() if name in ("unit", "gpu") or name.startswith("engine ")}
    if dark:
        raise UnknownState(
            f"preload daemon '{now.daemon}' on {now.host} is {now.state}, and what may map its memory cannot be seen: "
            + "; ".join(f"{name}: {why}" for name, why in dark.items()),
            entry="preload-unseen",
            next_step="repair what cannot be seen, then run this again",
            unseen=now.unseen,
        )
    # Of a daemon younger than an engine, that engine maps nothing: it may go, and its second copy with it.
    mapped_by = [name for name in now.mapped_by if wanted == "ready" or name not in now.lost]
    if mapped_by:
        names = ", ".join(mapped_by)
        why = f"; {'; '.join(now.reasons)}" if now.reasons else ""
        raise Refused(
            f"preload daemon '{now.daemon}' on {now.host} is {now.state}{why}. The running engine(s) {names} may map "
            + (
                f"its memory; {', '.join(now.lost)} has lost its daemon and keeps the weights until its next restart, "
                "for which the daemon is due"
                if now.lost
                else "its memory"
            ),
            entry="preload-mapped",
            next_step="stop these engines first (vllm_engine state=stopped), then change the daemon, then start them; "
            "or use force: true, and a second copy of the weights on the GPU",
            left={"mapped_by": now.mapped_by, "lost": now.lost},
        )
    return steps


def change_preload(
    wanted: PreloadConfig, state: str, timeout: float, force: bool, check: bool, report: Report
) -> Outcome:
    """Bring one daemon to ``ready`` or ``absent``, or with ``check`` say what that would do.

    :raises LifecycleError: with the keys of an Outcome as far as they are known.
    """
    deadline = Deadline(timeout)
    if check:
        now = _look(wanted, state, deadline, report, remember=False)
        steps = plan_preload(state, now, force)
        expected = {**now.summary(), "state": state} if steps else now.summary()
        return Outcome(
            bool(steps), _says(wanted, steps), now.summary(), expected, round(deadline.elapsed, 3), {}, _extra(now)
        )
    with lease.locked(f"preload-{wanted.daemon}", deadline, wanted.daemon, report):
        before = _look(wanted, state, deadline, report)
        done: list[Step] = []
        timings: dict[str, float] = {}
        try:
            steps = plan_preload(state, before, force)
            if force and START in steps:
                # The daemon's own door refuses, too, to put a second copy beside the one that an engine maps.
                record(wanted.daemon, FORCED, {"until": time.time() + deadline.left})
            for step in steps:
                report(_says(wanted, [step])[0])
                begun = deadline.elapsed
                if step is START:
                    _start(wanted, deadline, report)
                else:
                    _stop(wanted, deadline)
                timings[step.name] = round(deadline.elapsed - begun, 3)
                done.append(step)
            after = _look(wanted, state, deadline, report) if steps else before
            if after.state != state:
                error = UnknownState if after.state == "unknown" else Surprise
                raise error(
                    f"preload daemon '{wanted.daemon}' on {after.host} is {after.state}: {'; '.join(after.reasons)}",
                    entry="not-converged",
                    next_step=f"read journalctl -u {wanted.unit} and run this again",
                )
        except LifecycleError as exc:
            exc.details.update(
                changed=bool(done),
                actions=_says(wanted, done),
                before=before.summary(),
                timings=timings,
                elapsed=round(deadline.elapsed, 3),
                engines=before.sources,
            )
            raise
    return Outcome(
        bool(done),
        _says(wanted, done),
        before.summary(),
        after.summary(),
        round(deadline.elapsed, 3),
        timings,
        _extra(after),
    )


def _look(wanted: PreloadConfig, state: str, deadline: Deadline, report: Report, remember: bool = True) -> PreloadState:
    """For ``ready`` the checkpoint is hashed where that is not known yet, so that nothing old is called right."""
    now = None
    if state == "ready" and wanted.model:
        now = weights.take(
            wanted.model,
            method=wanted.weights.method,
            report=report,
            user=wanted.user,
            timeout=max(deadline.left, 0.1),
            remember=remember,
        )
    return observe_preload(wanted, now=now)


def _extra(now: PreloadState) -> dict[str, t.Any]:
    return {
        "held_mib": now.held_mib,
        "engines": now.sources,
        "lost": now.lost,
        "reasons": now.reasons,
        "digest": now.digest,
    }


def _says(wanted: PreloadConfig, steps: list[Step]) -> list[str]:
    return [f"{wanted.daemon}: {step.says}" for step in steps]


def _start(wanted: PreloadConfig, deadline: Deadline, report: Report) -> None:
    Unit(wanted.unit).start(deadline, lambda says: report(f"{wanted.daemon}: {says}"))
    while True:
        now = observe_preload(wanted, engines=False)
        if now.state == "ready":
            return
        if now.state in ("failed", "absent"):
            raise LifecycleError(
                f"preload daemon '{wanted.daemon}' on {now.host} ended before it was ready: {'; '.join(now.reasons)}",
                entry="unit-not-started",
                next_step=f"read journalctl -u {wanted.unit}",
                journal=Unit(wanted.unit).journal(40),
            )
        if not deadline.rest():
            raise DeadlineExceeded(
                f"preload daemon '{wanted.daemon}' on {now.host} is {now.state} after {deadline.seconds:g} s: "
                + "; ".join([*now.reasons, *now.unseen.values()]),
                entry="start-timeout",
                next_step=f"read journalctl -u {wanted.unit}; raise timeout when the model is only large",
                journal=Unit(wanted.unit).journal(40),
            )


def _stop(wanted: PreloadConfig, deadline: Deadline) -> None:
    pids = Unit(wanted.unit).show().pids
    Unit(wanted.unit).stop(deadline)
    here = socket.gethostname()
    while True:
        try:
            held = {uuid: mib for uuid, mib in held_by(gpu.observe(), wanted.gpus, pids).items() if mib}
        except gpu.GpuUnseen as exc:
            raise UnknownState(
                f"preload daemon '{wanted.daemon}' on {here} has stopped, but that its memory is free cannot be seen: "
                f"{exc}",
                entry="gpu-unseen",
                next_step="look at nvidia-smi and the driver's messages (journalctl -k), then run this again",
            ) from exc
        if not held:
            return
        if not deadline.rest():
            raise DeadlineExceeded(
                f"preload daemon '{wanted.daemon}' on {here} has stopped, yet {held} MiB stay charged to its "
                f"processes {pids}",
                entry="gpu-memory-held",
                next_step="look at nvidia-smi; what a dead process holds is the driver's to free",
                left={"held_mib": held},
            )
