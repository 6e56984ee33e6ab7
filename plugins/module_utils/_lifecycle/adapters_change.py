# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Brings the LoRA adapters of a running engine to what is wanted: under its lock, with one deadline, verified.

To load an adapter disturbs nobody. To unload one takes a name away that clients may be using, also when it is loaded
again at once with other content; so that is done to an engine that is out of rotation, or by ``force``.
"""

from __future__ import annotations

import contextlib
import socket
import time
import typing as t

from . import adapters, lease
from .adapters import Action, EngineAdapters, Loaded, Wanted, digest_of, plan_adapters, read_record
from .adapters_apply import CALL_TIMEOUT, Hands
from .config import AdapterConfig, EngineConfig
from .deadline import Deadline
from .engine import Engine
from .errors import LifecycleError, Refused, Surprise, UnknownState
from .lease import LeaseRequest
from .observe import Observation, observe
from .plan import AWAKE
from .transition import Outcome, Report

STATES = ("present", "exact")
RESUME = Action("resume", "resume it behind its closed gate, to prove its adapters")
PAUSE = Action("pause", "pause it again")


class AdapterWish(t.NamedTuple):
    """What a caller wants. ``adapters`` None stands for those that the engine's role declares.

    ``state`` present leaves other adapters where they are, exact unloads them.
    """

    adapters: list[AdapterConfig] | None
    state: str
    lease: LeaseRequest
    timeout: float
    force: bool = False


def change_adapters(config: EngineConfig, wish: AdapterWish, check: bool, report: Report) -> Outcome:
    """Bring the adapters of one engine to what is wanted, or with ``check`` say what that would do.

    :raises LifecycleError: with the keys of an Outcome as far as they are known.
    """
    deadline = Deadline(wish.timeout)
    chosen = config.adapters if wish.adapters is None else wish.adapters
    adapters.check_declared(config, chosen)
    if chosen:
        adapters.check_enabled(config)
    for one in chosen:
        adapters.inspect(config, one)
    # Before the lock: whoever drains or stops the engine does not wait for hashing.
    wanted = [
        Wanted(one, digest_of(one.path, user=config.user, timeout=max(deadline.left, 0.1), remember=not check))
        for one in chosen
    ]
    if check:
        now = observe(config)
        actions = plan_change(now, config, wanted, wish)
        there = now.adapters.loaded if now.adapters else None
        after = _side(_predict(there or [], wanted, actions, wish.state))
        changed = any(action.mutates for action in actions)
        return Outcome(
            changed, _says(config, actions), _side(there), after, round(deadline.elapsed, 3), {}, _extra(config, after)
        )
    with lease.locked(config.engine, deadline, report=report):
        return _Change(config, wanted, wish, deadline, report).run()


def plan_change(now: Observation, config: EngineConfig, wanted: t.Sequence[Wanted], wish: AdapterWish) -> list[Action]:
    """The actions on an engine as it was seen; empty when all is there.

    :raises Refused: its state, someone else's lease, or who may be using an adapter forbids them.
    :raises UnknownState: what is loaded was not seen.
    """
    if now.state == "unknown" or now.adapters is None or now.adapters.loaded is None:
        _cannot(now)
    exact = wish.state == "exact"
    actions = plan_adapters(wanted, now.adapters.loaded, _cached(now, config), exact=exact)
    if not actions:
        return [PAUSE] if _left_unpaused(now, wish) else []
    held = now.lease
    if held is not None and held.held_against(wish.lease.owner, time.time()) and not wish.force:
        raise Refused(
            f"engine '{now.engine}' on {now.host} is held by {held.owner}",
            entry="lease-held",
            next_step="wait until that lease is released or expires, or use force: true",
            lease=held.owner,
        )
    if now.state not in AWAKE:
        _cannot(now)
    adapters.check_updating(config, now.api.capabilities if now.api else None)
    adapters.check_room(config, [one["name"] for one in _predict(now.adapters.loaded, wanted, actions, wish.state)])
    _may_unload(now, actions, wish.force)
    kinds = {action.kind for action in actions}
    if "reset_cache" in kinds and not (now.api and now.api.dev_mode):
        raise Refused(
            f"engine '{now.engine}' on {now.host} has had other content of an adapter under the same name and path, "
            "and without development endpoints its prefix cache cannot be reset: answers would mix old and new",
            entry="adapter-in-use",
            next_step="restart it with vllm_engine, or put the new content at a new path",
        )
    if now.paused and "prove" in kinds:
        _may_resume(now)
        return [RESUME, *actions, PAUSE]
    return [*actions, *([PAUSE] if _left_unpaused(now, wish) else [])]


def _cached(now: Observation, config: EngineConfig) -> list[list[str]]:
    return read_record(config.engine, now.unit).cached if now.unit else []


def _cannot(now: Observation) -> t.NoReturn:
    why = f" ({'; '.join(now.reasons)})" if now.reasons else ""
    hints = {
        "stopped": "start it with vllm_engine state=started, which loads the adapters that its role declares",
        "failed": f"read journalctl -u vllm-engine@{now.engine}.service, then start it with vllm_engine state=started",
        "asleep": "wake it with vllm_wake, which brings its adapters back",
        "waking": "wake it with vllm_wake, which brings its adapters back",
        "unknown": "look at vllm_info; restart it with vllm_engine state=restarted",
    }
    error = UnknownState if now.state == "unknown" else Refused
    raise error(
        f"engine '{now.engine}' on {now.host} is {now.state}{why}: its adapters cannot be changed",
        entry="state-unknown" if now.state == "unknown" else "wrong-state",
        next_step=hints.get(now.state, "wait until it has settled and run this again"),
        reasons=now.reasons,
        unseen=now.unseen,
    )


def _may_unload(now: Observation, actions: t.Sequence[Action], force: bool) -> None:
    """
    :raises Refused: clients may be using what would be unloaded.
    """
    unload = [action.name for action in actions if action.kind == "unload"]
    sessions = now.gate.sessions if now.gate else 0
    away = now.state in ("withdrawn", "drained") and now.in_flight == 0 and sessions == 0
    if not unload or force or away:
        return
    seen = now.api.metrics.busy_adapters if now.api and now.api.metrics else None
    busy = [name for name in unload if name in (seen or []) and now.in_flight]
    says = "; ".join(action.says for action in actions if action.kind == "unload")
    raise Refused(
        f"engine '{now.engine}' on {now.host} is {now.state}, and clients may be using what would go ({says}): their "
        "next requests for it would get 404" + (f"; requests for {', '.join(busy)} are in flight" if busy else ""),
        entry="adapter-in-use",
        next_step="drain it with vllm_drain, run this again, and put it back (state=serving); or use force: true",
        left={"in_flight": now.in_flight, "sessions": sessions, "in_use": busy},
    )


def _may_resume(now: Observation) -> None:
    """A paused engine answers nobody, so nothing could be proved.

    :raises Refused: requests would come, or go on, when it is resumed.
    """
    if now.state == "drained" and now.has_gate:
        return
    raise Refused(
        f"engine '{now.engine}' on {now.host} is {now.state} and paused, "
        + ("with requests that would go on" if now.has_gate else "and without a gate requests would reach it")
        + " if it were resumed to prove its adapters",
        entry="adapter-in-use",
        next_step="put it back with vllm_drain state=serving, then run this again",
    )


def _left_unpaused(now: Observation, wish: AdapterWish) -> bool:
    """An earlier run resumed a drained engine behind its gate, and was killed before it paused it again."""
    mine = now.lease is not None and now.lease.purpose == "drained" and now.lease.owner == wish.lease.owner
    closed = now.gate is not None and now.gate.admission == "closed"
    return mine and closed and now.state == "withdrawn" and bool(now.api and now.api.dev_mode)


def _predict(
    there: t.Sequence[Loaded], wanted: t.Sequence[Wanted], actions: t.Sequence[Action], state: str
) -> list[dict[str, t.Any]]:
    """What is loaded after those actions."""
    touched = {action.name for action in actions if action.kind in ("load", "prove")}
    names = {one.adapter.name for one in wanted}
    after = [_entry(one) for one in there if one.name not in touched and (state == "present" or one.name in names)]
    after += [
        {"name": one.adapter.name, "path": one.adapter.path, "digest": one.digest, "proved": one.adapter.prove}
        for one in wanted
        if one.adapter.name in touched
    ]
    return after


def _entry(one: Loaded) -> dict[str, t.Any]:
    return {"name": one.name, "path": one.path, "digest": one.digest, "proved": one.proved}


def _side(there: t.Sequence[Loaded] | t.Sequence[dict[str, t.Any]] | None) -> dict[str, t.Any]:
    """before and after: adapters by name; None where they were not seen."""
    if there is None:
        return {"adapters": None}
    rows = [_entry(one) if isinstance(one, Loaded) else one for one in there]
    return {"adapters": {row["name"]: {k: v for k, v in row.items() if k != "name"} for row in rows}}


def _extra(config: EngineConfig, after: dict[str, t.Any]) -> dict[str, t.Any]:
    declared = {one.name for one in config.adapters}
    return {"not_declared": sorted(set(after["adapters"] or {}) - declared)}


def _says(config: EngineConfig, actions: t.Sequence[Action]) -> list[str]:
    return [f"{config.engine}: {action.says}" for action in actions]


class _Change:
    def __init__(
        self, config: EngineConfig, wanted: list[Wanted], wish: AdapterWish, deadline: Deadline, report: Report
    ) -> None:
        self.config, self.wanted, self.wish, self.deadline, self.report = config, wanted, wish, deadline, report
        self.engine = Engine(config)
        self.done: list[Action] = []
        self.timings: dict[str, float] = {}

    def run(self) -> Outcome:
        before = observe(self.config)
        there = before.adapters.loaded if before.adapters else None
        try:
            actions = plan_change(before, self.config, self.wanted, self.wish)
            if actions and before.unit:
                hands = Hands(self.config, self.engine, read_record(self.config.engine, before.unit), self.deadline)
                hands.wanted = {one.adapter.name: one for one in self.wanted}
                self._perform(hands, actions)
            after = observe(self.config, before) if actions else before
            found = self._verify(after, actions)
        except LifecycleError as exc:
            exc.details.update(
                changed=any(action.mutates for action in self.done),
                actions=_says(self.config, self.done),
                before=_side(there),
                elapsed=round(self.deadline.elapsed, 3),
                timings=self.timings,
            )
            raise
        finally:
            self.engine.close()
        side = _side(found.loaded)
        return Outcome(
            any(action.mutates for action in self.done),
            _says(self.config, self.done),
            _side(there),
            side,
            round(self.deadline.elapsed, 3),
            self.timings,
            _extra(self.config, side),
        )

    def _perform(self, hands: Hands, actions: list[Action]) -> None:
        try:
            for action in actions:
                self._one(hands, action)
        except LifecycleError:
            if PAUSE in actions and PAUSE not in self.done:
                with contextlib.suppress(LifecycleError):  # the first error is the one to tell
                    self._one(hands, PAUSE)
            raise

    def _one(self, hands: Hands, action: Action) -> None:
        self.report(_says(self.config, [action])[0])
        begun = self.deadline.elapsed
        if action is RESUME:
            self._pause_or_resume(False)
        elif action is PAUSE:
            self._pause_or_resume(True)
        else:
            hands.perform(action)
        self.timings[action.kind] = round(self.timings.get(action.kind, 0.0) + self.deadline.elapsed - begun, 3)
        self.done.append(action)

    def _pause_or_resume(self, pause: bool) -> None:
        if pause:
            self.engine.pause("wait", max(CALL_TIMEOUT, self.deadline.left))
        else:
            self.engine.resume(CALL_TIMEOUT)
        if self.engine.is_paused(CALL_TIMEOUT) is not pause:
            raise Surprise(
                f"engine '{self.config.engine}' on {socket.gethostname()} is {'not' if pause else 'still'} paused "
                f"after {'/pause' if pause else '/resume'}",
                entry="pause-unproved",
                next_step="restart it with vllm_engine state=restarted",
            )

    def _verify(self, after: Observation, actions: list[Action]) -> EngineAdapters:
        """By what the engine lists and what we know of it, seen anew."""
        found = after.adapters
        if found is None or found.loaded is None:
            _cannot(after)
        there = {one.name: one for one in found.loaded}
        left = {
            one.adapter.name: why for one in self.wanted if (why := adapters.differs(one, there.get(one.adapter.name)))
        }
        names = {one.adapter.name for one in self.wanted}
        if self.wish.state == "exact":
            left.update({name: "it is still loaded" for name in there if name not in names})
        if left and actions:
            raise Surprise(
                f"engine '{self.config.engine}' on {after.host} has not the adapters that were wanted: "
                + "; ".join(f"'{name}': {why}" for name, why in left.items()),
                entry="not-converged",
                next_step="look at vllm_info; run this again to converge",
                left=left,
            )
        return found
