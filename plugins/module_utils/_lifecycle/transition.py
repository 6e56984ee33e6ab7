# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Carries out a plan on one engine: under its lock, with one deadline, and with a second look at the end."""

from __future__ import annotations

import socket
import time
import typing as t
from contextlib import ExitStack
from dataclasses import replace

from . import adapters_apply, admission, claim, compile_cache, footprint, generations, golden, gpu, lease, weights
from .config import EngineConfig
from .deadline import Deadline
from .engine import Engine, Metrics
from .errors import (
    AdmissionDown,
    DeadlineExceeded,
    LifecycleError,
    Mismatch,
    Refused,
    Surprise,
    UnknownState,
    Unreachable,
    Unwritable,
    UsageError,
)
from .gate import GateState
from .host import host_memory
from .lease import LeaseRequest, SleepRecord
from .observe import Observation, observe
from .plan import AWAKE, STOPPED_FOR_SLEEP, Options, Step, plan, predict, recover
from .unit import Unit, group_pids

# Readings in a row without work before an engine counts as idle, and the time between them.
QUIET_READINGS = 3
QUIET_INTERVAL = 0.15
CALL_TIMEOUT = 10.0
# How often a wait is told of.
TELL_EVERY = 5.0
# What an abort may take beyond the drain's own time.
ABORT_TIMEOUT = 30.0

# Steps in which an engine takes GPU memory.
TAKES_MEMORY = ("start", "wake", "wake_weights", "reload", "wake_kv")
# Changes that take or free GPU memory.
MOVES_MEMORY = ("asleep", "awake", "started", "stopped", "restarted", "reloaded", "rolled_back")

Report = t.Callable[[str], None]
T = t.TypeVar("T")


class Wish(t.NamedTuple):
    """What a caller wants of one engine.

    ``mode`` says what a drain does with the requests that it finds at its time-out: ``wait`` fails and lets them run,
    ``abort`` cuts and counts them, ``keep`` freezes and counts them. ``min_speed_ratio`` is the share of the speed of
    the configuration before that a start must reach, 0 for none. ``measure`` samples the GPU memory of a start or wake,
    and times a first token.
    """

    state: str
    lease: LeaseRequest
    timeout: float
    mode: str = "wait"
    force: bool = False
    level: int = 1
    kv_only: bool = False
    deepen: bool = True
    max_resident_mib: int | None = None
    host_copy_mib: int | None = None
    on_failure: str = "fail"
    on_mismatch: str = "fail"
    tags: tuple[str, ...] = ()
    min_speed_ratio: float = 0.0
    measure: bool = False


class Outcome(t.NamedTuple):
    """The keys of a module result, for one engine."""

    changed: bool
    actions: list[str]
    before: dict[str, t.Any]
    after: dict[str, t.Any]
    elapsed: float
    timings: dict[str, float]
    extra: dict[str, t.Any]

    def asdict(self) -> dict[str, t.Any]:
        value = self._asdict()
        return {**value.pop("extra"), **value}


def silent(_message: str) -> None:
    """For callers without a place to show progress."""


def change(config: EngineConfig, wish: Wish, *, check: bool = False, report: Report = silent) -> Outcome:
    """Bring one engine to the wanted state, or with ``check`` say what that would do.

    :raises LifecycleError: with the keys of an Outcome as far as they are known, and what is ``left``.
    """
    deadline = Deadline(wish.timeout)
    digest = ""
    if wish.state == "reloaded":
        _plan(observe(config), wish)  # what forbids it anyway is told first
        # Before any lock: to read a large checkpoint takes minutes, and nobody's drain waits for it.
        digest = _digest(config, deadline, report, remember=not check)
    if check:
        now = observe(config)
        steps, options = _plan(now, wish, digest)
        actions = [_sentence(config, step) for step in steps]
        after = predict(now, steps, options)
        changed = any(step.mutates for step in steps)
        extra = {"admission_backend": config.admission_backend}
        return Outcome(changed, actions, now.summary(), after, round(deadline.elapsed, 3), {}, extra)
    with ExitStack() as locks:
        locks.enter_context(lease.locked(config.engine, deadline, report=report))
        # Two engines of one GPU would measure, free and take each other's memory. In one order, so that none waits in
        # a circle.
        for uuid in sorted(config.gpus) if wish.state in MOVES_MEMORY else ():
            locks.enter_context(lease.locked(f"gpu-{uuid}", deadline, config.engine, report))
            claim.await_starts(uuid, config.engine, deadline, report)
        return Transition(config, wish, deadline, report, digest).run()


def _digest(config: EngineConfig, deadline: Deadline, report: Report, *, remember: bool = True) -> str:
    """Of the checkpoint as it lies on disk."""
    left = max(deadline.left, 1.0)
    return weights.take(config.model, report=report, user=config.user, timeout=left, remember=remember).digest


def _plan(now: Observation, wish: Wish, digest: str = "") -> tuple[list[Step], Options]:
    held = now.lease
    against = held.owner if held is not None and held.held_against(wish.lease.owner, time.time()) else ""
    options = Options(
        lease_against=against,
        owner=wish.lease.owner,
        force=wish.force,
        run=wish.lease.run,
        level=wish.level,
        kv_only=wish.kv_only,
        deepen=wish.deepen,
        keep=wish.mode == "keep",
        host_copy_mib=wish.host_copy_mib,
        on_failure=wish.on_failure,
        on_mismatch=wish.on_mismatch,
        digest=digest,
        tags=wish.tags,
        compare_speed=wish.min_speed_ratio > 0,
    )
    return plan(wish.state, now, options), options


def _sentence(config: EngineConfig, step: Step) -> str:
    return f"{config.engine}: {_says(config, step)}"


def _says(config: EngineConfig, step: Step) -> str:
    gated = config.admission_backend == "gate"
    return step.says.format(door=config.door, ready="/ready is 200" if gated else f"{config.door} sends to it")


class Transition:
    """One change of one engine. Each step is a method named like it."""

    # A gate or balancer that is restarted gives no answer for a while, which is no reason yet to give up a change.
    admission_patience = 15.0

    def __init__(self, config: EngineConfig, wish: Wish, deadline: Deadline, report: Report, digest: str = "") -> None:
        self.config = config
        self.digest = digest
        self.wish = wish
        self.deadline = deadline
        self.report = report
        self.engine = Engine(config)
        self.unit = Unit(config.unit)
        self.door = admission.choose(config)
        self.actions: list[str] = []
        self.timings: dict[str, float] = {}
        self.steps: list[dict[str, t.Any]] = []
        self.peaks: dict[str, int] | None = None
        self.group = ""
        self.extra: dict[str, t.Any] = {"admission_backend": config.admission_backend, "steps": self.steps}
        self.changed = False

    def run(self) -> Outcome:
        before = observe(self.config)
        self.before = before
        self.group = before.unit.control_group if before.unit else ""
        try:
            steps, options = _plan(before, self.wish, self.digest)
            if self.wish.state == "reloaded":
                self.extra["weights"] = {"before": before.weights_digest, "after": self.digest}
            steps = self._carry_out(steps, options)
            after = observe(self.config, before) if steps else before
            expected = predict(before, steps, options)
            if "requests_kept" in self.extra and expected["state"] == "drained":
                expected["state"] = "draining"  # a prediction cannot know that the time-out comes first
            if after.paused is None and after.api is not None and after.api.dev_mode is False:
                expected["paused"] = None  # an engine without development endpoints, which a stopped one did not show
            if after.summary() != expected:
                differs = {
                    key: {"expected": expected[key], "found": value}
                    for key, value in after.summary().items()
                    if value != expected[key]
                }
                raise Surprise(
                    f"engine '{self.config.engine}' on {after.host} is {after.state} after the change to "
                    f"{self.wish.state}: {differs}",
                    entry="not-converged",
                    next_step="look at vllm_info and the unit's journal; run this again to converge",
                    reasons=after.reasons,
                    unseen=after.unseen,
                )
            if self.changed:
                self._record(after)
            if "went_back_to" in self.extra and self.wish.state != "rolled_back":
                raise LifecycleError(
                    f"engine '{self.config.engine}' on {after.host} did not start with its new configuration, went "
                    f"back to the older one (vLLM {self.extra['went_back_to']['runtime_version']}) and is "
                    f"{after.state} with it: {self.extra['recovered_from']}",
                    entry="went-back",
                    next_step=f"read journalctl -u {self.config.unit}, correct what is new and run this again",
                )
            return Outcome(
                self.changed,
                self.actions,
                before.summary(),
                after.summary(),
                round(self.deadline.elapsed, 3),
                self.timings,
                self.extra,
            )
        except LifecycleError as exc:
            self._explain(exc, before)
            raise
        finally:
            self.engine.close()

    def _carry_out(self, steps: list[Step], options: Options) -> list[Step]:
        """Perform the steps; those that were, with what has made good for one that failed."""
        done: list[Step] = []
        for step in steps:
            try:
                self._perform(step)
            except LifecycleError as exc:
                rescue = recover(self.wish.state, step, self.before, options, isinstance(exc, Mismatch))
                if not rescue or isinstance(exc, Unwritable):
                    raise
                self.extra["recovered_from"] = str(exc)
                if "journal" in exc.details:
                    self.extra["journal"] = exc.details["journal"]
                on = ", ".join(_says(self.config, one) for one in rescue)
                self.report(f"{self.config.engine}: {exc}; goes on with: {on}")
                limits = self.config.stop_timeout + self.config.start_timeout
                self.deadline = Deadline(max(self.deadline.left, limits))
                for one in rescue:
                    self._perform(one)
                if self.wish.state == "asleep":
                    lease.take(self.config.engine, self.wish.lease, STOPPED_FOR_SLEEP, "")  # what a wake starts again
                return [*done, *rescue]
            done.append(step)
        return done

    def _perform(self, step: Step) -> None:
        self.report(_sentence(self.config, step))
        begun = time.monotonic()
        try:
            if self.wish.measure and step.name in TAKES_MEMORY:
                self._sampled(step.name)
            else:
                getattr(self, f"_{step.name}")()
        finally:
            seconds = time.monotonic() - begun
            self.timings[step.name] = round(self.timings.get(step.name, 0.0) + seconds, 3)
            self.steps.append({"step": step.name, "seconds": round(seconds, 3), "at": round(time.time(), 3)})
        # Only what was done and verified counts as changed; a step that failed is told by the error.
        self.actions.append(_sentence(self.config, step))
        self.changed = self.changed or step.mutates
        if step.name != "release":
            lease.note(self.config.engine, step.name, seconds)

    def _sampled(self, step: str) -> None:
        """The step, and the most GPU memory that the unit's processes hold meanwhile."""
        with gpu.sampled(self._pids, self.config.gpus) as peaks:
            getattr(self, f"_{step}")()
        # A GPU that was not seen in one of several steps may have held its most then.
        before = peaks if self.peaks is None else self.peaks
        self.peaks = {uuid: max(mib, before[uuid]) for uuid, mib in peaks.items() if uuid in before}
        self.extra["measured"] = {"gpu_peak_mib": self.peaks} if self.peaks else {}

    def _pids(self) -> list[int]:
        """Of the unit's processes now. While it runs they are of one group, so systemd is asked for it once."""
        self.group = self.group or self.unit.show().control_group
        return group_pids(self.group)

    def _record(self, after: Observation) -> None:
        if self.wish.state == "awake" and after.state in AWAKE and after.unit and after.memory:
            footprint.note_wake(self.config.engine, after.unit.main_pid, after.memory.rss_mib)
        last: dict[str, t.Any] = {
            "wanted": self.wish.state,
            "run": self.wish.lease.run,
            "owner": self.wish.lease.owner,
            "state": after.state,
            "timings": self.timings,
        }
        if self.wish.state == "restarted" and after.unit and "went_back_to" not in self.extra:
            last.update(restarted_pid=after.unit.main_pid, restarted_run=self.wish.lease.run)
        elif (
            self.before.restarted_by
            and after.unit
            and self.before.unit
            and after.unit.main_pid == self.before.unit.main_pid
        ):
            # A later transition of the same process does not undo that this run has restarted it.
            last.update(restarted_pid=after.unit.main_pid, restarted_run=self.before.restarted_by)
        lease.record(self.config.engine, "last_transition.json", last)

    def _explain(self, exc: LifecycleError, before: Observation) -> None:
        """Add what is known to an error: what was done, what was found, what is left. Never guesses: it looks again."""
        after = observe(self.config)
        left = {
            "running": after.api.metrics.running if after.api and after.api.metrics else None,
            "waiting": after.api.metrics.waiting if after.api and after.api.metrics else None,
            "sessions": after.gate.sessions if after.gate else None,
        }
        exc.details.setdefault("left", left)
        exc.details.update(
            changed=self.changed,
            actions=self.actions,
            before=before.summary(),
            after=after.summary(),
            elapsed=round(self.deadline.elapsed, 3),
            timings=self.timings,
            **self.extra,
        )

    # The steps.

    def _lease(self) -> None:
        gate = self.before.gate
        lease.take(self.config.engine, self.wish.lease, self.wish.state, gate.admission if gate else "")

    def _release(self) -> None:
        held = lease.read(self.config.engine)
        if held is not None:
            self.extra["out_of_service"] = {
                "since": held.since,
                "seconds": round(time.time() - held.since, 3),
                "owner": held.owner,
                "run": held.run,
                "timings": held.timings(),
                "steps": held.steps,
                "gpu_mib": self._gpu_mib(),
                "started": lease.last_start(self.config.engine),
            }
        lease.release(self.config.engine)

    def _withdraw(self) -> None:
        self._tell("withdrawn")

    def _close(self) -> None:
        self._tell("closed")

    def _admit(self) -> None:
        self._tell("open")

    def _tell(self, word: str) -> None:
        if self.door is None:
            raise UsageError(
                f"engine '{self.config.engine}' has admission none: nobody can be told '{word}'",
                entry="admission-declared",
            )
        door = self.door
        self._asked(lambda: door.set("admission", word), self.deadline)

    def _asked(self, call: t.Callable[[], T], deadline: Deadline) -> T:
        """Ask who admits requests, for a while also one that gives no answer.

        :raises AdmissionDown: it gave none all that time.
        """
        patience = deadline.sooner(self.admission_patience)
        told = False
        while True:
            try:
                return call()
            except AdmissionDown as exc:
                if not patience.rest():
                    raise
                if not told:
                    self.report(f"{self.config.engine}: {exc}; asked again for {patience.seconds:.0f} s")
                told = True

    def _await_router(self) -> None:
        ends = self.deadline.sooner(self.config.router_detection)
        while ends.rest():
            pass
        if self.deadline.left <= 0:
            raise DeadlineExceeded(
                f"the timeout of {self.deadline.seconds:g} s ended while the router of engine "
                f"'{self.config.engine}' on {socket.gethostname()} had {self.config.router_detection:g} s to notice",
                entry="drain-timeout",
                next_step=f"use a timeout well above {self.config.router_detection:g} s",
            )

    def _await_idle(self) -> None:
        # Once requests were cut, the drain's own time is over: what came since then has the time of an abort.
        deadline = Deadline(ABORT_TIMEOUT) if "requests_cut" in self.extra else self.deadline
        try:
            self._quiet(deadline)
        except DeadlineExceeded:
            if self.wish.mode == "wait":
                raise
            if self.wish.mode == "abort":
                self._abort()
            else:
                self._freeze()

    def _await_closed(self) -> None:
        if "requests_kept" in self.extra:
            return
        # Nothing can come in any more: what a last request started gets the same patience as the others had.
        self._await_idle()

    def _quiet(self, deadline: Deadline) -> None:
        """Until gate and engine are without work, several readings in a row, no request having passed between them.

        A balancer that has forgotten what it was told is told again: what it sent meanwhile is waited for as well.
        """
        quiet = 0
        total = -1
        told = time.monotonic()
        tokens: int | None = None
        progress = time.monotonic()
        while True:
            metrics, door = self._asked(self._reading, deadline)
            running, waiting = _counts(metrics, self.config.engine)
            sessions = door.sessions if door else 0
            passed = door.total if door else 0
            # Tokens, too: a balancer that says it sends nothing may still, and some answers are short.
            rests = passed == total and metrics.tokens == tokens and not (door and door.forgot)
            quiet = quiet + 1 if not running + waiting + sessions and rests else 0
            total = passed
            if metrics.tokens != tokens:
                tokens, progress = metrics.tokens, time.monotonic()
            if door and door.forgot and self.door and self._asked(self.door.remind, deadline):
                self.report(f"{self.config.engine}: {door.differs}; told it again")
                self.extra["withdrawn_again"] = self.extra.get("withdrawn_again", 0) + 1
            if quiet >= QUIET_READINGS:
                return
            if time.monotonic() - told > TELL_EVERY:
                told = time.monotonic()
                self.report(
                    f"{self.config.engine}: draining, {running} running, {waiting} waiting, {sessions} session(s) at "
                    f"{self.config.door}, {deadline.says}"
                )
            if not deadline.rest(QUIET_INTERVAL):
                still = time.monotonic() - progress
                raise DeadlineExceeded(
                    f"engine '{self.config.engine}' on {socket.gethostname()} still has {running} running and "
                    f"{waiting} waiting request(s) and {sessions} session(s) at {self.config.door} after "
                    f"{deadline.seconds:g} s" + (f"; no token came for {still:.0f} s" if still > 5 else ""),
                    entry="drain-timeout",
                    next_step="raise timeout, choose mode=abort and have the cut requests counted, or put it back with "
                    "vllm_drain state=serving",
                    left={
                        "running": running,
                        "waiting": waiting,
                        "deferred": metrics.deferred,
                        "sessions": sessions,
                        "seconds_without_a_token": round(still, 1),
                    },
                )

    def _reading(self) -> tuple[Metrics, GateState | None]:
        return self.engine.metrics(CALL_TIMEOUT), self.door.observe() if self.door else None

    def _abort(self) -> None:
        """Cut what is left, which the caller chose, and count it.

        What is in flight now is what is cut: the engine's own counter of aborts moves only with its next step, and an
        engine without work makes none.
        """
        cut = sum(_counts(self.engine.metrics(CALL_TIMEOUT), self.config.engine))
        self.engine.pause("abort", ABORT_TIMEOUT)
        self.changed = True
        self.extra["requests_cut"] = self.extra.get("requests_cut", 0) + cut
        self.actions.append(f"{self.config.engine}: cut {cut} request(s) after {self.deadline.seconds:g} s")
        self.engine.resume(CALL_TIMEOUT)
        self._quiet(Deadline(ABORT_TIMEOUT))

    def _freeze(self) -> None:
        """Keep what is left as it is until /resume, which the caller chose, and see that no token comes any more."""
        self.engine.pause("keep", ABORT_TIMEOUT)
        self.changed = True
        deadline = Deadline(ABORT_TIMEOUT)
        tokens: int | None = None
        still = 0
        while still < QUIET_READINGS:
            metrics = self.engine.metrics(CALL_TIMEOUT)
            still = still + 1 if metrics.tokens is not None and metrics.tokens == tokens else 0
            tokens = metrics.tokens
            if still < QUIET_READINGS and not deadline.rest(QUIET_INTERVAL):
                raise Surprise(
                    f"engine '{self.config.engine}' on {socket.gethostname()} answered 200 to a pause that keeps its "
                    f"requests, and whether they stand still cannot be seen (tokens so far: {tokens})",
                    entry="pause-unproved",
                    next_step="put it back with vllm_drain state=serving, or use mode wait",
                )
        kept = sum(_counts(metrics, self.config.engine))
        self.extra["requests_kept"] = kept
        self.actions.append(f"{self.config.engine}: froze {kept} request(s) after {self.deadline.seconds:g} s")

    def _pause(self) -> None:
        if "requests_kept" in self.extra:
            return
        self.engine.pause("wait", max(CALL_TIMEOUT, self.deadline.left))
        metrics = self.engine.metrics(CALL_TIMEOUT)
        running, waiting = _counts(metrics, self.config.engine)
        if self.engine.is_paused(CALL_TIMEOUT) is not True or running + waiting:
            # What waits in a paused engine would die with it; let it go on and say so.
            self.engine.resume(CALL_TIMEOUT)
            raise Surprise(
                f"engine '{self.config.engine}' on {socket.gethostname()} was paused with {running} running and "
                f"{waiting} waiting request(s); it was resumed",
                entry="requests-past-the-gate",
                next_step="nobody keeps requests away from an engine with admission none: drain it while no client asks"
                if self.door is None
                else f"something reaches the engine's socket past {self.config.door}: find it, and run this again",
            )

    def _resume(self) -> None:
        self.engine.resume(CALL_TIMEOUT)
        if self.engine.is_paused(CALL_TIMEOUT) is not False:
            raise Surprise(
                f"engine '{self.config.engine}' on {socket.gethostname()} is still paused after /resume",
                entry="pause-unproved",
                next_step="restart it with vllm_engine state=restarted",
            )

    def _adapters(self) -> None:
        for says in adapters_apply.after_wake(self.config, self.engine, self.unit.show(), self.deadline, self.report):
            self.changed = True
            self.actions.append(f"{self.config.engine}: {says}")

    def _compare_speed(self) -> None:
        found = generations.speeds(self.config)
        if found is None:
            self.extra["speed"] = {"why": "no start before this one was timed with the same warm-up"}
            return
        now, before = found
        self.extra["speed"] = {"tokens_per_s": now, "before": before}
        if now < before * self.wish.min_speed_ratio:
            raise Surprise(
                f"engine '{self.config.engine}' on {socket.gethostname()} gives {now:g} tokens/s, and gave {before:g} "
                f"with the configuration before: a share of {now / before:.2f}, where min_speed_ratio is "
                f"{self.wish.min_speed_ratio:g}",
                entry="slower-than-before",
                next_step="compare the options of both, and see what else works on the host; or lower min_speed_ratio",
            )

    def _prove(self) -> None:
        self.extra["proof"] = golden.prove(self.engine, self.deadline, self.report).asdict()
        if self.wish.measure:
            tokens = self.config.warmup[0]["prompt_tokens"] if self.config.warmup else golden.SHORT_PROMPT
            seconds = golden.first_token(self.engine, tokens, self.deadline)
            if seconds is not None:
                found = {"first_token_s": round(seconds, 4), "prompt_tokens": tokens}
                self.extra.setdefault("measured", {}).update(found)

    def _await_ready(self) -> None:
        """The router's own question, over the network; or, of a balancer, whether it sends."""
        told = time.monotonic()
        while self.door is not None:
            try:
                if self.door.ready(CALL_TIMEOUT):
                    return
                state = self.door.observe()
                why = f"admission {state.admission}, proved {state.proved}, engine up {state.backend_up}"
                why = f"not ready: {why}{f'; {state.differs}' if state.differs else ''}"
            except (Unreachable, AdmissionDown) as exc:
                why = str(exc)
            if time.monotonic() - told > TELL_EVERY:
                told = time.monotonic()
                self.report(f"{self.config.engine}: {self.config.door}: {why}, {self.deadline.says}")
            if not self.deadline.rest(0.1):
                raise DeadlineExceeded(
                    f"{self.config.door} of engine '{self.config.engine}' on {socket.gethostname()} does not show it "
                    f"ready: {why}",
                    entry="not-ready-at-the-door",
                    next_step="systemctl status vllm-gate.service; run this again"
                    if self.config.admission_backend == "gate"
                    else "see that its own health check reaches the engine, and run this again",
                )

    def _sleep(self) -> None:
        """Sleep at the wished level; what the GPUs say decides whether it happened."""
        level = 0 if self.wish.kv_only else self.wish.level
        pid = self.unit.show().main_pid
        need = self.wish.host_copy_mib if self.wish.host_copy_mib is not None else self.before.host_copy_mib
        if level != 1 or not need or self.before.gpus is None or self.before.host_copy_mib == 0:
            self._fall_asleep(level, pid)
            return
        with footprint.promised(self.config, need, lambda: host_memory("", []).available_mib, self.deadline):
            footprint.begin_copy(self.config.engine, pid)
            self._fall_asleep(level, pid)

    def _fall_asleep(self, level: int, pid: int) -> None:
        before = self._gpu_mib()
        # Before the call: if this run is killed now, the next one knows that the weights may be gone.
        lease.write_sleep_record(self.config.engine, SleepRecord(pid, level, self.wish.kv_only))
        mode = "keep" if self.wish.mode == "keep" else "wait"
        self._settle_call(lambda left: self.engine.sleep(level, left, mode), "sleep")
        if self.wish.kv_only:
            self._settle_call(self.engine.release_kv_cache, "release of the KV cache")
        after = self._gpu_mib()
        freed = {uuid: before[uuid] - mib for uuid, mib in after.items() if uuid in before}
        record = SleepRecord(pid, level, self.wish.kv_only, freed_mib=freed, resident_mib=after)
        lease.write_sleep_record(self.config.engine, record)
        self.extra.update(freed_mib=freed, resident_mib=after)
        limit = self.wish.max_resident_mib
        kept = {uuid: mib for uuid, mib in after.items() if limit is not None and mib > limit}
        # Level 0 without the KV cache keeps all memory, by its nature.
        idle = [uuid for uuid, mib in freed.items() if mib <= 0] if level or self.wish.kv_only else []
        if unseen := sorted(set(before) - set(after)):
            raise Surprise(
                f"engine '{self.config.engine}' on {socket.gethostname()} answered 200 to sleep at level {level}, yet "
                f"what it holds on {', '.join(unseen)} cannot be seen any more, so nothing is proved",
                entry="gpu-unseen",
                next_step="look at nvidia-smi and the driver's messages (journalctl -k), then run this again",
                left={"resident_mib": after},
            )
        if kept or idle:
            raise Surprise(
                f"engine '{self.config.engine}' on {socket.gethostname()} answered 200 to sleep at level {level}, yet "
                + (f"holds {kept} MiB, more than {limit} MiB" if kept else f"freed nothing on {', '.join(idle)}"),
                entry="sleep-residue",
                next_step="was it started with enable-sleep-mode? Restart it with vllm_engine to free its memory",
                left={"resident_mib": after, "freed_mib": freed},
            )

        lease.write_sleep_record(self.config.engine, replace(record, proved=True))
        if level and after:
            footprint.note_sleep(self.config.engine, pid, after)

    def _wake(self) -> None:
        self._room_to_wake()
        record = lease.sleep_record(self.config.engine)
        tag = "kv_cache" if record is not None and record.kv_only else ""
        self._settle_call(lambda left: self.engine.wake(tag, left), "wake")
        self._must_be_awake()
        if record is not None and record.level == 0 and not record.kv_only:
            lease.write_sleep_record(self.config.engine, None)  # else when its prefix cache is reset

    def _wake_weights(self) -> None:
        self._room_to_wake()
        self._settle_call(lambda left: self.engine.wake("weights", left), "wake of the weights")
        if self.engine.is_sleeping(CALL_TIMEOUT) is not True:
            raise Surprise(
                f"engine '{self.config.engine}' on {socket.gethostname()} is awake as a whole after its weights were "
                "to wake; what it computes is not proved",
                entry="wake-unproved",
                next_step="restart it with vllm_engine",
            )
        self._woken("weights")

    def _reload(self) -> None:
        anew = self.wish.state == "reloaded"
        if anew:  # whatever becomes of this call, what it computed with before is no measure any more
            golden.weights_read(self.config, anew=True)
        ranks = self.engine.reload_weights(max(CALL_TIMEOUT, self.deadline.left))
        if ranks != self.config.ranks:
            raise Surprise(
                f"engine '{self.config.engine}' on {socket.gethostname()} reloaded the weights of {ranks} rank(s), it "
                f"has {self.config.ranks}",
                entry="reload-unproved",
                next_step="restart it with vllm_engine",
            )
        golden.weights_read(self.config, anew=anew)
        if not anew:
            self._woken("reloaded")
        elif (now := _digest(self.config, self.deadline, self.report)) != self.digest:
            raise Surprise(
                f"engine '{self.config.engine}' on {socket.gethostname()}: the checkpoint {self.config.model} changed "
                f"while it was loaded: {self.digest} before, {now} after",
                entry="weights-changing",
                next_step="finish the copy, then run this again",
            )

    def _wake_kv(self) -> None:
        self._settle_call(lambda left: self.engine.wake("kv_cache", left), "wake of the KV cache")
        self._must_be_awake()
        self._woken("kv_cache")

    def _reset_cache(self) -> None:
        self.engine.reset_prefix_cache(max(CALL_TIMEOUT, self.deadline.left))
        lease.write_sleep_record(self.config.engine, None)
        if self.wish.state == "reloaded":
            record = {"main_pid": self.unit.show().main_pid, "weights": self.digest}
            lease.record(self.config.engine, "reload.json", record)

    def _woken(self, part: str) -> None:
        record = lease.sleep_record(self.config.engine) or SleepRecord(self.unit.show().main_pid, 2)
        lease.write_sleep_record(self.config.engine, replace(record, awake=[*record.awake, part]))

    def _must_be_awake(self) -> None:
        if self.engine.is_sleeping(CALL_TIMEOUT) is not False:
            raise Surprise(
                f"engine '{self.config.engine}' on {socket.gethostname()} answered 200 to wake and still sleeps",
                entry="wake-unproved",
                next_step="run this again; if it stays, restart it with vllm_engine",
            )

    def _settle_call(self, call: t.Callable[[float], None], what: str) -> None:
        """A call whose time-out does not end the work: wait until the engine answers questions again, then fail.

        :raises UnknownState: the call failed; whether it had an effect is not known.
        """
        try:
            call(max(CALL_TIMEOUT, self.deadline.left))
        except LifecycleError as exc:
            raise UnknownState(
                f"engine '{self.config.engine}' on {socket.gethostname()}: {what} failed, its state is unknown: {exc}",
                entry="call-failed",
                next_step="it stays withdrawn; look at vllm_info, then restart it with vllm_engine",
                **exc.details,
            ) from exc

    def _gpu_mib(self) -> dict[str, int]:
        """MiB that this unit's processes hold, by GPU UUID; empty where no GPU can be seen."""
        pids = set(self._pids())
        try:
            devices = gpu.observe()
        except gpu.GpuUnseen:
            return {}
        wanted = self.config.gpus or [device.uuid for device in devices]
        return {
            device.uuid: sum(mib or 0 for pid, mib in device.processes.items() if pid in pids)
            for device in devices
            if device.uuid in wanted
        }

    def _room_to_wake(self) -> None:
        """Refuse a wake that would run out of memory, and name who holds it."""
        record = lease.sleep_record(self.config.engine)
        if record is None or not record.freed_mib:
            return
        pids = set(self._pids())
        try:
            devices = gpu.observe()
        except gpu.GpuUnseen as exc:
            raise Refused(
                f"engine '{self.config.engine}' on {socket.gethostname()} needs {record.freed_mib} MiB to wake, and "
                f"whether they are free cannot be seen: {exc}",
                entry="gpu-unseen",
                next_step="look at nvidia-smi and the driver's messages (journalctl -k), then run this again",
            ) from exc
        for device in devices:
            needed = record.freed_mib.get(device.uuid, 0)
            if device.free_mib < needed:
                others = {pid: mib for pid, mib in device.processes.items() if pid not in pids}
                raise Refused(
                    f"engine '{self.config.engine}' on {socket.gethostname()} needs {needed} MiB on {device.uuid} to "
                    f"wake, {device.free_mib} MiB are free; held by "
                    + (", ".join(f"process {pid} ({mib} MiB)" for pid, mib in others.items()) or "no visible process"),
                    entry="gpu-memory-short",
                    next_step="stop or put to sleep what holds the memory, and run this again",
                    left={"holders": others, "needed_mib": needed, "free_mib": device.free_mib},
                )

    def _keep(self) -> None:
        generations.promote(self.config)

    def _roll_back(self) -> None:
        self.extra["went_back_to"] = generations.target(self.config)
        self.config = generations.go_back(self.config, self.wish.lease.run)
        self.door = admission.choose(self.config)
        self._ask_anew()

    def _ask_anew(self) -> None:
        """With the key that the process has read by now."""
        self.engine.close()
        self.engine = Engine(self.config)

    def _tell_of_start(self, says: str) -> None:
        self.report(f"{self.config.engine}: {says}")

    def _stop(self) -> None:
        ended = self.unit.stop(self.deadline)
        self.group = ""
        self.extra["stop_result"] = ended.result

    def _start(self) -> None:
        begun = time.time()
        try:
            state = self.unit.start(self.deadline, self._tell_of_start)
        except LifecycleError:
            # The unit has purged a compile cache that was to blame, which is worth one more start.
            if not (sign := compile_cache.purged_since(self.config, begun)):
                raise
            self.report(f"{self.config.engine}: starts once more with an empty compile cache ({sign})")
            self.actions.append(f"{self.config.engine}: purge its compile cache")
            state = self.unit.start(self.deadline, self._tell_of_start)
        started = lease.last_start(self.config.engine) or {}
        if started.get("main_pid") != state.main_pid:
            raise Surprise(
                f"unit {self.config.unit} on {socket.gethostname()} is active with pid {state.main_pid}, yet no "
                "proof of that process is on record",
                entry="unit-outdated",
                next_step="run the role baremetal.vllm.vllm_engine again: the unit lacks its ExecStartPost",
            )
        self.extra["started"] = started
        self._ask_anew()


def _counts(metrics: Metrics, name: str) -> tuple[int, int]:
    if metrics.running is None or metrics.waiting is None:
        raise Surprise(f"engine '{name}' does not report its requests any more", entry="requests-unreported")
    return sum(metrics.running.values()), sum(metrics.waiting.values())
