# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Record a golden from a proved engine, or find out whether an engine matches one."""

from __future__ import annotations

import os
import socket
import time
import typing as t
from contextlib import ExitStack
from dataclasses import asdict, replace

from . import answers, config, golden, lease, weights
from .answers import GENERATES, GRADES, Answer, Question, Tolerance
from .config import EngineConfig
from .deadline import Deadline
from .engine import Engine
from .errors import LifecycleError, Mismatch, Refused, Surprise, UnknownState, UsageError
from .golden import Golden, Report
from .observe import Observation, observe
from .transition import Outcome, silent

STATES = ("recorded", "matching")
# In place of answers that check mode has not asked for.
UNKNOWN = "(not asked in check mode)"


class Wanted(t.NamedTuple):
    """What a caller wants. ``None`` and () mean: as the golden on record has it, else the default.

    ``goldens`` are JSON objects from elsewhere, of which an engine takes the one of its own key.
    """

    state: str
    prompts: t.Sequence[t.Any] = ()
    max_tokens: int | None = None
    logprobs: float | None = None
    vectors: float | None = None
    goldens: t.Sequence[t.Mapping[str, t.Any]] = ()
    timeout: float = 900.0
    force: bool = False


def bring(engine: EngineConfig, wanted: Wanted, *, check: bool = False, report: Report = silent) -> Outcome:
    """Record, or compare. With ``check`` nothing is asked that generates, and nothing is written.

    :raises Mismatch: the engine's answers are not the golden's.
    :raises Refused: the engine is in no state to answer, or not proved; or its answers can be no golden.
    :raises UsageError: nothing is on record to compare with; ``missing`` is then true in the details.
    """
    deadline = Deadline(wanted.timeout)
    job = _Job(engine, wanted, deadline, report, check)
    try:
        with ExitStack() as locks:
            if not check:
                locks.enter_context(lease.locked(engine.engine, deadline, report=report))
            job.look()
            if not check:
                # Of two engines of one key the second has to equal the first.
                locks.enter_context(lease.locked(f"golden-{job.subject.key}", deadline, engine.engine))
            job.read()
            return job.match() if wanted.state == "matching" else job.record()
    except LifecycleError as exc:
        exc.details.update({**job.result(), **exc.details, "changed": False, "actions": []})
        raise
    finally:
        job.client.close()


class _Job:
    """One engine's golden, being recorded or compared."""

    def __init__(self, engine: EngineConfig, wanted: Wanted, deadline: Deadline, report: Report, check: bool) -> None:
        self.engine = engine
        self.wanted = wanted
        self.deadline = deadline
        self.report = report
        self.check = check
        self.given = [Golden.from_dict(one, f"golden[{place}]") for place, one in enumerate(wanted.goldens)]
        self.client = Engine(engine)
        self.subject = golden.cheap_subject(engine)
        self.known: Golden | None = None
        self.mine: Golden | None = None
        self.main_pid = 0
        self.timings: dict[str, float] = {}

    @property
    def here(self) -> str:
        return f"engine '{self.engine.engine}' on {socket.gethostname()}"

    def result(self) -> dict[str, t.Any]:
        """What is known so far."""
        known = {"key": self.subject.key} if self.subject.weights else {}
        return {
            **known,
            "subject": asdict(self.subject),
            "before": self.known.summary() if self.known else {},
            "elapsed": round(self.deadline.elapsed, 3),
            "timings": self.timings,
        }

    def _outcome(self, changed: bool, actions: list[str], after: dict[str, t.Any], **extra: t.Any) -> Outcome:
        known = self.result()
        before, elapsed, timings = known.pop("before"), known.pop("elapsed"), known.pop("timings")
        said = [f"{self.engine.engine}: {action}" for action in actions]
        return Outcome(changed, said, before, after, elapsed, timings, {**known, **extra})

    def look(self) -> None:
        """The engine's state, and what its weights are."""
        now = observe(self.engine)
        may_answer(now)
        self.main_pid = now.unit.main_pid if now.unit else 0
        if self.wanted.state == "recorded":
            may_record(now)
        if held := golden.held_subject(self.engine, self.main_pid):
            self.subject = held
            return
        if why := golden.doubt(self.engine, self.main_pid):
            raise Refused(
                f"{self.here} cannot be told by a golden: {why}",
                entry="golden-not-recorded",
                next_step="restart it with vllm_engine state=restarted, so that it serves what is declared and on disk",
            )
        begun = time.monotonic()
        self.subject = golden.with_weights(
            self.subject, self.engine.model, self._method(), self.deadline, self.report, remember=not self.check
        )
        self.timings["weights"] = round(time.monotonic() - begun, 3)
        lent = ((now.started or {}).get("preload") or {}).get("digest")
        if lent and self.subject.method == self._lender() and lent != self.subject.weights:
            raise Refused(
                f"{self.here} has mapped {lent} from its preload daemon, and its checkpoint is {self.subject.weights}",
                entry="weights-mismatch",
                next_step="bring daemon and checkpoint together (vllm_preload), and restart the engine",
            )

    def _method(self) -> str:
        """That of a golden that may be its own; else that of the checkpoint's or the daemon's manifest."""
        for one in [*self.given, *golden.on_record(self.subject)]:
            if one.subject.fits(self.subject):
                return one.subject.method
        recorded = weights.recorded(self.engine.model) if os.path.isabs(self.engine.model) else None
        return recorded.method if recorded else self._lender() or "full"

    def _lender(self) -> str:
        use = self.engine.preload
        try:
            return config.load_daemon(use.daemon).weights.method if use else ""
        except UsageError:
            return ""

    def read(self) -> None:
        """What is on record here, and what was given."""
        key = self.subject.key
        self.known = golden.stored(key)
        self.mine = next((one for one in self.given if one.key == key), None)

    def match(self) -> Outcome:
        target = self.mine or self.known
        if target is None:
            raise self._missing()
        allowed = replace(target.tolerance, **self._tolerances())
        told = {"golden": target.asdict(), "compared_by": target.compared_by, "tolerance": asdict(allowed)}
        after = self.known.summary() if self.known else {}
        if self.check:
            asked = f"{len(target.questions)} prompt(s) of golden {target.key}, by {target.compared_by}"
            return self._outcome(False, [], after, would_compare=asked, **told)
        proof = self._compare(target, allowed)
        return self._outcome(False, [], after, **{**told, **proof})

    def _compare(self, target: Golden, allowed: Tolerance) -> dict[str, t.Any]:
        self.report(f"{self.engine.engine}: compares {len(target.questions)} answer(s) with golden {target.key}")
        begun = time.monotonic()
        try:
            proof = golden.check(self.client, target, self.main_pid, self.deadline, allowed)
        finally:
            self.timings["ask"] = round(self.timings.get("ask", 0.0) + time.monotonic() - begun, 3)
        return {name: getattr(proof, name) for name in ("compared_by", "positions", "distance")}

    def _missing(self) -> LifecycleError:
        """Nothing to compare with; a golden of the same model with other weights is told as that."""
        key = self.subject.key
        others = [one for one in self.given if one.subject.served_model == self.subject.served_model]
        if others:
            differs = "; ".join(others[0].subject.differences(self.subject))
            return Refused(
                f"{self.here} is none that golden {others[0].key} is of: it has {differs}",
                entry="golden-missing",
                next_step="put the right checkpoint or runtime in place; or, if this is what is wanted, record it "
                "(vllm_golden state=recorded)",
                missing=True,
            )
        return UsageError(
            f"{self.here}: no golden {key} is on record, and none was given: nothing to compare with",
            entry="golden-missing",
            next_step="record it with vllm_golden state=recorded, from an engine that is known to be right",
            missing=True,
        )

    def _tolerances(self) -> dict[str, float]:
        wished = golden.tolerance(self.wanted.logprobs, self.wanted.vectors)
        named = {"logprobs": self.wanted.logprobs, "vectors": self.wanted.vectors}
        return {name: getattr(wished, name) for name, value in named.items() if value is not None}

    def record(self) -> Outcome:
        target = self.mine or self._as_known()
        if self.check:
            return self._predict(target)
        proof: dict[str, t.Any] = {}
        if self.known is not None:
            try:
                proof = self._compare(self.known, self.known.tolerance)
            except Mismatch as exc:
                if not self.wanted.force:
                    exc.next_step += "; or, if the golden is what is wrong, record it anew with force: true"
                    raise
                self.report(f"{exc} It is recorded anew.")
                target = self.mine
        if self.mine is not None and self.mine != self.known:
            proof = self._compare(self.mine, self.mine.tolerance)
        new = target or self._ask()
        changed = new != self.known
        if changed:
            golden.write(new)
            if golden.stored(new.key) != new:
                raise Surprise(
                    f"{self.here}: {golden.directory()} does not hold what was just written there",
                    entry="record-overwritten",
                    next_step="find out who else writes to that directory, then run this again",
                )
        golden.hold(self.engine, self.subject, self.main_pid)
        golden.note(self.engine, new.key, self.main_pid, matches=True)
        told = {"golden": new.asdict(), "compared_by": new.compared_by, "tolerance": asdict(new.tolerance)}
        return self._outcome(changed, self._says(new) if changed else [], new.summary(), **{**told, **proof})

    def _says(self, new: Golden | None) -> list[str]:
        if self.mine is not None and (new is None or new is self.mine):
            return [f"keep golden {self.subject.key} as given"]
        return [f"record golden {self.subject.key}" + (" anew" if self.known else "")]

    def _predict(self, target: Golden | None) -> Outcome:
        """What would be recorded, as far as that can be known without an answer."""
        changed = target != self.known or target is None
        after = target.summary() if target else {"key": self.subject.key, "answers": UNKNOWN}
        extra = {"golden": target.asdict()} if target else {}
        return self._outcome(changed, self._says(target) if changed else [], after, **extra)

    def _as_known(self) -> Golden | None:
        """What is on record, with another tolerance where one is wished; None where it has to be asked anew."""
        known, wanted = self.known, self.wanted
        if known is None or (wanted.max_tokens or known.max_tokens) != known.max_tokens:
            return None
        if wanted.prompts and self._questions(known.kind) != known.questions:
            return None
        wished = replace(known.tolerance, **self._tolerances())
        return known if wished == known.tolerance else replace(known, tolerance=wished)

    def _questions(self, kind: str) -> list[Question]:
        try:
            return [answers.question(one, kind) for one in self.wanted.prompts]
        except ValueError as exc:
            raise UsageError(f"{self.here}: {exc}", entry="option-value", next_step="correct prompts") from exc

    def _ask(self) -> Golden:
        """A golden from this engine: two answers to each question, which have to be one."""
        kind = golden.kind_of(self.client, golden.CALL_TIMEOUT)
        known = self.known
        most = self.wanted.max_tokens or (known.max_tokens if known else golden.MAX_TOKENS)
        asked = self._questions(kind)
        if not asked:
            room = self._context() - most
            asked = known.questions if known else [Question(kind, one) for one in answers.default_prompts(kind, room)]
        self.report(f"{self.engine.engine}: asks {len(asked)} prompt(s), each twice")
        begun = time.monotonic()
        model = self.subject.served_model
        grades = GRADES if kind in GENERATES else (None,)
        salts = [[golden.new_salt()] * len(asked) for _unused in range(2)]
        first, grade = golden.ask_all(self.client, asked, model, most, grades, self.deadline, salts[0])
        second, _grade = golden.ask_all(self.client, asked, model, most, (grade,), self.deadline, salts[1])
        if kind in GENERATES:  # for the prefix cache alone, see golden.check
            golden.ask_all(self.client, asked[:1], model, most, (grade,), self.deadline, [self.subject.key])
        self.timings["ask"] = round(self.timings.get("ask", 0.0) + time.monotonic() - begun, 3)
        tolerances = replace(known.tolerance if known else Tolerance(), **self._tolerances())
        self._must_agree(first, second, tolerances)
        if why := answers.nonsense(first):
            raise Refused(
                f"{self.here} gives nothing that could be a golden: {why}",
                entry="golden-not-recorded",
                next_step="restart it with vllm_engine state=restarted; give other prompts if it is right nevertheless",
            )
        recorded = {"at": round(time.time(), 3), "host": socket.gethostname(), "engine": self.engine.engine}
        return Golden(self.subject, kind, most, grade, tolerances, asked, first, recorded)

    def _must_agree(self, first: list[Answer], second: list[Answer], allowed: Tolerance) -> None:
        for number, (one, other) in enumerate(zip(first, second)):
            verdict = answers.compare(one, other, allowed)
            if verdict.why or verdict.tie:
                why = verdict.why or f"the tokens differ at position {verdict.positions}"
                raise Refused(
                    f"{self.here} gives two answers to prompt {number}, so none of them is a golden: {why}",
                    entry="golden-not-recorded",
                    next_step="take it out of rotation (vllm_drain), so that nothing else is in the batch; give other "
                    "prompts if two tokens are as likely as each other there",
                )

    def _context(self) -> int:
        """Tokens of prompt and answer together."""
        reply = self.client.call("GET", "/v1/models", timeout=golden.CALL_TIMEOUT)
        try:
            return int(reply.json_object()["data"][0]["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError) as exc:
            raise Surprise(f"{reply.url} does not say how long a prompt may be", entry="answer-unusable") from exc


def may_answer(now: Observation) -> None:
    """Pure.

    :raises UnknownState: what it is is not known.
    :raises Refused: it cannot answer in this state.
    """
    if now.state in ("serving", "withdrawn") or (now.state == "drained" and not now.paused):
        return
    why = f" ({'; '.join(now.reasons)})" if now.reasons else ""
    hint = {
        "drained": "serve again with vllm_drain state=serving; a paused engine answers nobody",
        "asleep": "wake it with vllm_wake",
        "waking": "wake it with vllm_wake",
        "stopped": "start it with vllm_engine state=started",
    }
    error = UnknownState if now.state == "unknown" else Refused
    raise error(
        f"engine '{now.engine}' on {now.host} is {now.state}{why} and cannot be asked for a golden",
        entry="state-unknown" if now.state == "unknown" else "wrong-state",
        next_step=hint.get(now.state, "wait until it has settled, or restart it with vllm_engine"),
        reasons=now.reasons,
    )


def may_record(now: Observation) -> None:
    """Whether it is proved, so that its answers may be what others are held to. Pure.

    :raises Refused: says what is missing.
    """
    why = ""
    if now.unit is None or not now.started or now.started.get("main_pid") != now.unit.main_pid:
        why = "no proof of the process that runs now is on record"
    elif now.gate is not None and not now.gate.proved:
        why = "its start is not proved at the gate"
    elif now.sleep is not None:
        why = "it was put to sleep, and its wake has not been finished"
    if why:
        raise Refused(
            f"engine '{now.engine}' on {now.host} is not proved, so no golden is recorded from it: {why}",
            entry="golden-not-recorded",
            next_step="restart it with vllm_engine state=restarted, or finish its wake (vllm_wake)",
        )
