# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Goldens: recorded answers that show whether an engine computes what it should, and the proof of an engine by them.

A golden is of a subject: the content of the weights, the runtime's version, the name of the model, the adapters that
the engine has, and the types it computes in. Only engines of equal subjects owe equal answers; the subject's key names
the golden's file, on every host alike.

Measured on vLLM 0.33.0 with bf16 on an H200: token ids and log probabilities were the same after every sleep, wake and
restart, with weights from disk or from a preload daemon. Other weights of equal shapes gave no token alike. A step of
bf16 in a logit between 8 and 16 is 0.0625; the default tolerance of 0.1 lies above one such step. But what was computed
from blocks of the prefix cache is rounded otherwise: log probabilities up to 0.09 apart, and another token after a
choice between two as likely ones. So questions are asked with a salt that no cached block has; see ``check``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import socket
import time
import typing as t
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from . import answers, checkpoint, config, lease, store, weights
from .answers import GENERATES, GRADES, PATHS, Answer, Question, Tolerance, Verdict
from .config import AdapterConfig, EngineConfig
from .deadline import Deadline
from .engine import Engine
from .errors import Answered, LifecycleError, Mismatch, Surprise, UsageError
from .source import identity, is_now
from .unit import Unit

Report = t.Callable[[str], None]

SCHEMA = 1
FILE = "golden.json"
# Each is a step of the engine in every proof. Other weights and lost ones differed in the first token; the others show
# that what is computed step by step holds.
MAX_TOKENS = 8
# Of the answer from the prefix cache, all tokens of which depend on what was cached.
CACHED_TOKENS = 2
MOST_TOKENS = 1024
# For each question of a proof; the first one after a start may compile.
ASK_TIMEOUT = 60.0
CALL_TIMEOUT = 10.0
NONE = "no golden is on record for it"
# What an answer from the prefix cache may differ more than one that is computed anew.
CACHED_SLACK = 3.0
# Other versions of vLLM have other kernels, which round otherwise: how much more tolerance the answers of another
# runtime get. Weights that are wrong, or gone, differ in the first token.
RUNTIME_SLACK = 5.0
# Tokens of a prompt where no warm-up says what is usual.
SHORT_PROMPT = 4
# A manifest that only explains an error is not worth waiting for.
PEEK_TIMEOUT = 0.5


@dataclass(frozen=True)
class Subject:
    """What a golden is of. ``method`` is that of the weights' manifest, of whose digest it is a part."""

    weights: str
    method: str
    runtime_version: str
    served_model: str
    adapters: list[str]
    dtype: str

    @property
    def key(self) -> str:
        """The golden's file name: readable, and another one for another subject."""
        five = [self.weights, self.runtime_version, self.served_model, self.adapters, self.dtype]
        digest = hashlib.sha256(json.dumps(five).encode()).hexdigest()
        return f"{_readable(self.served_model)}-{digest[:20]}"

    def differences(self, other: Subject) -> list[str]:
        """What ``other`` has differently, a clause for each."""
        mine, its = asdict(self), asdict(other)
        return [
            f"{name} {its[name]}, not {mine[name]}" for name in mine if name != "method" and mine[name] != its[name]
        ]

    def fits(self, other: Subject) -> bool:
        """Equal but for the weights, which cost most to know."""
        return replace(self, weights="", method="") == replace(other, weights="", method="")

    def of_runtime(self, version: str) -> Subject:
        return replace(self, runtime_version=version)


@dataclass(frozen=True)
class Golden:
    """Recorded answers. ``grade`` is how many top log probabilities were asked for; see answers.GRADES."""

    subject: Subject
    kind: str
    max_tokens: int
    grade: int | None
    tolerance: Tolerance
    questions: list[Question]
    answers: list[Answer]
    recorded: dict[str, t.Any] = field(default_factory=dict, compare=False)

    @property
    def key(self) -> str:
        return self.subject.key

    @property
    def compared_by(self) -> str:
        """What a comparison with it can go by."""
        if self.kind not in GENERATES:
            return "vectors"
        return "tokens" if self.grade is None else "logprobs"

    def asdict(self) -> dict[str, t.Any]:
        """For JSON; ``from_dict`` reads it."""
        return {
            "schema": SCHEMA,
            "key": self.key,
            "subject": asdict(self.subject),
            "kind": self.kind,
            "max_tokens": self.max_tokens,
            "grade": self.grade,
            "tolerance": asdict(self.tolerance),
            "answers": [
                {"kind": asked.kind, "prompt": asked.prompt, **_without_empty(asdict(one))}
                for asked, one in zip(self.questions, self.answers)
            ],
            "recorded": self.recorded,
        }

    def summary(self) -> dict[str, t.Any]:
        """What a diff shows."""
        return {
            "key": self.key,
            "kind": self.kind,
            "max_tokens": self.max_tokens,
            "compared_by": self.compared_by,
            "tolerance": asdict(self.tolerance),
            "prompts": [asked.prompt for asked in self.questions],
            "answers": [one.tokens or one.vector[:8] for one in self.answers],
        }

    @classmethod
    def from_dict(cls, value: t.Any, where: str) -> Golden:
        """
        :param where: names the source in the error.
        :raises UsageError: this is no golden, or its key is not that of its subject.
        """
        try:
            golden = cls._read(value)
            why = "" if golden.key == value["key"] else f"its key is not that of its subject ({golden.key})"
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError, UsageError) as exc:
            why = str(exc) or type(exc).__name__
        if why:
            raise UsageError(
                f"{where} is no intact golden: {why}",
                entry="record-broken",
                next_step=f"remove {where} and record it again (vllm_golden state=recorded)",
            )
        return golden

    @classmethod
    def _read(cls, value: t.Any) -> Golden:
        if value["schema"] != SCHEMA:
            raise ValueError(f"its schema is {value['schema']!r}, this library reads {SCHEMA}")
        subject = config.build(Subject, value["subject"], "its subject")
        if not weights.DIGEST.fullmatch(subject.weights) or subject.method not in weights.METHODS:
            raise ValueError("its weights have no digest of a manifest")
        kind, most, grade = value["kind"], value["max_tokens"], value["grade"]
        if kind not in PATHS or grade not in GRADES or isinstance(grade, (bool, float)):
            raise ValueError(f"its kind or grade is not known: {kind!r}, {grade!r}")
        if isinstance(most, bool) or not isinstance(most, int) or not 0 < most <= MOST_TOKENS:
            raise ValueError(f"max_tokens is {most!r}")
        found = value["answers"]
        if not isinstance(found, list) or not found:
            raise ValueError("it has no answers")
        asked = [answers.question(one["prompt"], kind) for one in found]
        if [one.kind for one in asked] != [one["kind"] for one in found]:
            raise ValueError(f"the kinds of its answers are not those of an engine for {kind}")
        given = [_read_answer(one, kind, most) for one in found]
        recorded = value.get("recorded")
        if not isinstance(recorded, dict):
            raise ValueError("who recorded it is not said")
        return cls(subject, kind, most, grade, tolerance(**value["tolerance"]), asked, given, recorded)


def _without_empty(value: dict[str, t.Any]) -> dict[str, t.Any]:
    return {name: one for name, one in value.items() if one}


def _read_answer(value: dict[str, t.Any], kind: str, most: int) -> Answer:
    answer = t.cast(Answer, config.build(Answer, value, "an answer"))
    numbers = [*answer.logprobs, *answer.vector, *(one for entry in answer.top for pair in entry for one in pair)]
    if not all(math.isfinite(one) for one in numbers):
        raise ValueError("an answer with numbers that are none")
    if kind not in GENERATES:
        if not answer.vector or answer.tokens:
            raise ValueError("an answer without a vector")
        return answer
    counts = {len(one) for one in (answer.logprobs, answer.top) if one}
    if len(answer.tokens) != most or not counts <= {most} or answer.vector:
        raise ValueError(f"an answer without its {most} token(s)")
    if any(len(pair) != 2 for entry in answer.top for pair in entry):
        raise ValueError("an answer whose top log probabilities are no pairs")
    return answer


class Proof(t.NamedTuple):
    """What proved an engine: ``by`` is golden or completion. ``why`` says why it was no golden.

    ``runtime`` is the version that the golden is of, where that is another than the engine's.
    """

    by: str
    key: str = ""
    compared_by: str = ""
    positions: int = 0
    distance: float = 0.0
    why: str = ""
    runtime: str = ""

    @property
    def says(self) -> str:
        of = f", of vLLM {self.runtime}" if self.runtime else ""
        return f"golden {self.key} ({self.compared_by}{of})" if self.by == "golden" else "a completion"

    def asdict(self) -> dict[str, t.Any]:
        """Without what is empty."""
        value = self._asdict()
        kept = (
            ("by", "key", "compared_by", "positions", "distance", "runtime") if self.by == "golden" else ("by", "why")
        )
        return {name: value[name] for name in kept if name in ("by", "positions", "distance") or value[name]}


def tolerance(logprobs: t.Any = None, vectors: t.Any = None) -> Tolerance:
    """
    :param logprobs: None for the default; so ``vectors``.
    :raises UsageError: no number from 0 to 10.
    """
    default = Tolerance()
    found = {"logprobs": default.logprobs, "vectors": default.vectors}
    for name, value in (("logprobs", logprobs), ("vectors", vectors)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 10:
            raise UsageError(
                f"tolerance.{name} must be from 0 to 10, not {value}", entry="option-value", next_step="correct it"
            )
        found[name] = float(value)
    return Tolerance(**found)


# The subject.


def _readable(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:60].lstrip(".-") or "model"


def cheap_subject(engine: EngineConfig, adapter: AdapterConfig | None = None) -> Subject:
    """The subject of an engine, or of one of its adapters, without its weights, which cost time to know."""
    traits = engine.traits
    also = {"quantization": traits.quantization, "kv_cache_dtype": traits.kv_cache_dtype.replace("auto", "")}
    return Subject(
        weights="",
        method="",
        runtime_version=engine.runtime_version,
        served_model=adapter.name if adapter else engine.served_model_name,
        adapters=sorted(one.name for one in engine.adapters),
        dtype=" ".join([traits.dtype, *(f"{name}={value}" for name, value in also.items() if value)]),
    )


@dataclass(frozen=True)
class Held:
    """What a running process is held to: the subject by which it was last proved, None when it was not.

    ``read_at`` is when it read weights other than at its start, in seconds since the epoch, or 0. ``main_pid``,
    ``boot`` and ``start`` are the process.
    """

    main_pid: int
    boot: str
    start: int
    subject: dict[str, t.Any]
    read_at: float = 0.0


def _held(engine: EngineConfig, main_pid: int) -> Held | None:
    """The record of the process that runs now."""
    path = store.state_dir(engine.engine) / FILE
    value = store.read_json(path)
    if value is None:
        return None
    held = t.cast(Held, config.build(Held, value, str(path)))
    return held if is_now(asdict(held), main_pid) else None


def held_subject(engine: EngineConfig, main_pid: int) -> Subject | None:
    """By what the process that runs now was last proved, None where by no golden."""
    held = _held(engine, main_pid)
    return _subject(held) if held and held.subject else None


def _subject(held: Held) -> Subject:
    return t.cast(Subject, config.build(Subject, held.subject, FILE))


def _hold(engine: EngineConfig, main_pid: int, subject: Subject | None, read_at: float) -> None:
    found = asdict(subject) if subject else {}
    lease.record(engine.engine, FILE, asdict(Held(**identity(main_pid), subject=found, read_at=read_at)))


def weights_read(engine: EngineConfig, *, anew: bool = False) -> None:
    """A running process has read its weights from disk again.

    :param anew: they may be other ones, so it is no longer held to the golden that proved it before.
    """
    if not directory().exists():
        return  # without goldens there is nothing to be held to
    main_pid = Unit(engine.unit).show().main_pid
    _hold(engine, main_pid, None if anew else held_subject(engine, main_pid), time.time())


def _changed_since(engine: EngineConfig, held: Held | None) -> list[str]:
    """The files of the checkpoint that were changed after the running process had read them."""
    started = time.time() - (time.monotonic() - Unit(engine.unit).show().started_at)
    read_at = max(started, held.read_at if held else 0.0)
    seen = checkpoint.scan(engine.model)
    return sorted(name for name, one in seen.items() if one.stamp.ctime_ns > read_at * 1e9)


def with_weights(
    subject: Subject, path: str, method: str, deadline: Deadline, report: Report, *, remember: bool = True
) -> Subject:
    """The subject with the content of its checkpoint, as it is now."""
    manifest = weights.take(path, method=method, timeout=max(deadline.left, 1), report=report, remember=remember)
    return replace(subject, weights=manifest.digest, method=method)


# Where goldens are kept.


def directory() -> Path:
    """For root alone: prompts may be confidential."""
    return store.root() / "var/lib/vllm/goldens"


def on_record(subject: Subject, *, any_runtime: bool = False) -> list[Golden]:
    """The goldens on this host of which the subject may be one, whatever the weights.

    :param any_runtime: also those of other versions of vLLM.

    :raises UsageError: a file of a model of this name is not one that we wrote.
    """
    pattern = re.compile(re.escape(_readable(subject.served_model)) + r"-[0-9a-f]{20}\.json")
    try:
        keys = sorted(name[:-5] for name in os.listdir(directory()) if pattern.fullmatch(name))
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise UsageError(
            f"host {socket.gethostname()}: {directory()} cannot be read: {exc}",
            entry="record-unwritable",
            next_step="correct owner and mode of that directory (root, 0700)",
        ) from exc
    found = [golden for golden in map(stored, keys) if golden is not None]
    return [
        golden
        for golden in found
        if golden.subject.fits(subject.of_runtime(golden.subject.runtime_version) if any_runtime else subject)
    ]


def stored(key: str) -> Golden | None:
    """The golden of this key on this host.

    :raises UsageError: the file is not one that we wrote.
    """
    path = directory() / f"{key}.json"
    value = store.read_json(path)
    if value is None:
        return None
    golden = Golden.from_dict(value, str(path))
    if golden.key != key:
        raise UsageError(
            f"{path} is the golden {golden.key}", entry="record-broken", next_step=f"remove {path} and record it again"
        )
    return golden


def write(golden: Golden) -> None:
    """Keep a golden on this host, in place of the one of its key.

    :raises Unwritable: it cannot be.
    """
    store.write_private(directory() / f"{golden.key}.json", golden.asdict())


# Asking.


def kind_of(engine: Engine, timeout: float) -> str:
    """What the engine is for, by its routes: the first of answers.PATHS that it has.

    :raises Surprise: it has none of them.
    """
    for kind, path in PATHS.items():
        if engine.has_route(path, timeout):
            return kind
    raise Surprise(
        f"engine '{engine.config.engine}' on {socket.gethostname()} has none of {', '.join(PATHS.values())}, so it "
        "cannot be asked anything that would prove it",
        entry="answer-unusable",
        next_step="look at /openapi.json on its socket, and at its task options (runner, convert)",
    )


def answer_shape(engine: Engine, shape: t.Mapping[str, int], deadline: Deadline) -> float:
    """A completion of a shape, whole and in time; of an engine that generates no text another answer, which is no
    nonsense. Seconds it took.

    :raises Surprise: an answer that is not the one that was owed.
    """
    begun = time.monotonic()
    timeout = max(deadline.left, 0.1)
    try:
        done = engine.complete(prompt_tokens=shape["prompt_tokens"], max_tokens=shape["max_tokens"], timeout=timeout)
    except Answered as exc:
        if exc.status != 404 or (kind := kind_of(engine, timeout)) == "completion":
            raise
        asked = Question(kind, answers.shaped_prompt(kind, shape["prompt_tokens"]))
        ask(engine, asked, engine.config.served_model_name, shape["max_tokens"], None, timeout)
        return time.monotonic() - begun
    if done.finish_reason != "length" or done.tokens != shape["max_tokens"]:
        raise Surprise(
            f"engine '{engine.config.engine}' on {socket.gethostname()} owed {shape['max_tokens']} token(s) and gave "
            f"{done.tokens} with finish_reason {done.finish_reason!r}",
            entry="proof-failed",
            next_step=f"read journalctl -u {engine.config.unit}; restart it with vllm_engine state=restarted",
        )
    return time.monotonic() - begun


def first_token(engine: Engine, prompt_tokens: int, deadline: Deadline) -> float | None:
    """Seconds until the first token of a prompt that the engine has not in its cache; None where it generates none."""
    begun = time.monotonic()
    timeout = max(deadline.left, 0.1)
    try:
        engine.complete(prompt_tokens=prompt_tokens, max_tokens=1, timeout=timeout, salt=new_salt())
    except Answered as exc:
        if exc.status != 404 or kind_of(engine, timeout) == "completion":
            raise
        return None
    return time.monotonic() - begun


def new_salt() -> str:
    """With it a request finds nothing in the prefix cache."""
    return os.urandom(16).hex()


def ask(
    engine: Engine, asked: Question, model: str, max_tokens: int, grade: int | None, timeout: float, salt: str = ""
) -> Answer:
    """One answer. ``salt``: of the prefix cache, see ``answers.body``.

    :raises Mismatch: it can be no right one, whatever was recorded: cut, of another model, zeros, NaN.
    :raises Answered: the engine refused the question; with 400 where it does not grant this grade.
    """
    path = PATHS[asked.kind]
    reply = engine.call("POST", path, timeout=timeout, body=answers.body(asked, model, max_tokens, grade, salt))
    answer, wrong = answers.parse(asked, reply.json_object(), model, max_tokens, reply.url)
    if wrong:
        raise Mismatch(
            f"{_here(engine.config)} gave no right answer at {path}: {wrong}",
            entry="proof-failed",
            next_step=_out(engine.config),
            found=answer.tokens or answer.vector[:8],
        )
    return answer


def ask_all(
    engine: Engine,
    asked: t.Sequence[Question],
    model: str,
    max_tokens: int,
    grades: t.Sequence[int | None],
    deadline: Deadline,
    salts: t.Sequence[str] = (),
) -> tuple[list[Answer], int | None]:
    """The answers, one after the other, and the first of the grades that the engine grants for all of them.

    :param salts: for each question its salt of the prefix cache; none for no question has one.
    """
    salted = list(zip(asked, salts or [""] * len(asked)))
    for place, grade in enumerate(grades):
        try:
            return [
                ask(engine, one, model, max_tokens, grade, _patience(deadline), salt) for one, salt in salted
            ], grade
        except Answered as exc:
            # "Requested sample logprobs of 2, which is greater than max allowed: 0"
            if exc.status != 400 or "logprob" not in str(exc) or place == len(grades) - 1:
                raise
    raise ValueError("no grades")


def _patience(deadline: Deadline) -> float:
    return max(min(ASK_TIMEOUT, deadline.left), 0.1)


def _here(engine: EngineConfig) -> str:
    return f"engine '{engine.engine}' on {socket.gethostname()}"


def _out(engine: EngineConfig) -> str:
    return (
        f"keep it out of rotation; read journalctl -u {engine.unit}, then restart it with vllm_engine state=restarted"
    )


def check(engine: Engine, golden: Golden, main_pid: int, deadline: Deadline, allowed: Tolerance | None = None) -> Proof:
    """Compare an engine's answers with a golden. They are computed anew; then the first question is asked once more, as
    at every check, for its first tokens and with more tolerance, so that what the prefix cache holds from before a
    sleep shows.

    What came out is written down for who watches the engine.

    :raises Mismatch: names the golden, the prompt, the first position that differs, and both values.
    """
    try:
        proof = _compare(engine, golden, deadline, allowed)
    except Mismatch:
        note(engine.config, golden.key, main_pid, matches=False)
        raise
    note(engine.config, golden.key, main_pid, matches=True)
    return proof


def note(engine: EngineConfig, key: str, main_pid: int, *, matches: bool) -> None:
    """Write down whether this process gives the answers of this golden; only what is new."""
    value = {**identity(main_pid), "key": key, "matches": matches}
    try:
        before = lease.last_comparison(engine.engine) or {}
    except UsageError:  # a file that somebody has broken keeps no engine from being proved
        before = {}
    if {name: before.get(name) for name in value} != value:
        lease.record(engine.engine, "comparison.json", value)


def _compare(engine: Engine, golden: Golden, deadline: Deadline, allowed: Tolerance | None) -> Proof:
    asked, model, most = golden.questions, golden.subject.served_model, golden.max_tokens
    grades = GRADES[GRADES.index(golden.grade) :] if golden.kind in GENERATES else (None,)
    found, grade = ask_all(engine, asked, model, most, grades, deadline, [new_salt()] * len(asked))
    few = min(CACHED_TOKENS, most)
    cached, _grade = ask_all(engine, asked[:1], model, few, (grade,), deadline, [golden.key])
    positions, distance, by = 0, 0.0, golden.compared_by
    exact = allowed or golden.tolerance
    slack = replace(exact, logprobs=exact.logprobs * CACHED_SLACK)
    owed = [(number, right, exact) for number, right in enumerate(golden.answers)]
    owed.append((0, answers.first_tokens(golden.answers[0], few), slack))
    for (number, right, within), answer in zip(owed, [*found, *cached]):
        verdict = answers.compare(right, answer, within)
        if verdict.why:
            raise _mismatch(engine.config, golden, number, verdict, answer)
        positions += verdict.positions
        distance = max(distance, verdict.distance)
        by = verdict.by
    return Proof("golden", golden.key, by, positions, distance)


def _mismatch(engine: EngineConfig, golden: Golden, number: int, verdict: Verdict, answer: Answer) -> Mismatch:
    who = golden.recorded
    origin = f" (recorded on {who.get('host', '?')} by engine '{who.get('engine', '?')}')"
    why = ". Every token is id 0, as from an engine whose weights are gone" if answers.is_zeros(answer.tokens) else ""
    next_step = _out(engine)
    if changed := _changed_on_disk(engine, golden.subject):
        why += f". {changed.rstrip('.')}"
        next_step = "put the right checkpoint back; or, if new weights are meant, reload or restart it for them"
    return Mismatch(
        f"{_here(engine)} does not compute what golden {golden.key}{origin} says: prompt {number}, position "
        f"{verdict.position}: {verdict.why}{why}",
        entry="golden-mismatch",
        next_step=next_step,
        mismatch={
            "key": golden.key,
            "prompt": number,
            "position": verdict.position,
            "recorded": verdict.recorded,
            "found": verdict.found,
            "compared_by": verdict.by,
        },
    )


def _changed_on_disk(engine: EngineConfig, subject: Subject) -> str:
    """That the checkpoint holds other weights than the golden is of, where that costs nothing to know."""
    try:
        now = weights.take(engine.model, method=subject.method, timeout=PEEK_TIMEOUT, remember=False)
    except LifecycleError:
        return ""
    if now.digest == subject.weights:
        return ""
    return f"Its checkpoint {engine.model} is {now.digest} now, the golden is of {subject.weights}."


# The proof.


def prove(engine: Engine, deadline: Deadline, report: Report, *, answered: bool = False) -> Proof:
    """Prove an engine by the golden of its subject; where none is on record, by a completion.

    A process that a golden has proved is held to that golden as long as it lives, so that a wake cannot bring other
    weights; see ``weights_read``. An engine without goldens costs no hashing. One whose runtime has no golden yet has
    to give the answers of the runtime before, with more tolerance.

    :param answered: it has just given completions, so that without a golden no other is asked for.
    :raises Mismatch: as of ``check``; or it has to be proved by a golden, and none is of what it runs.
    :raises Surprise: a completion that is not the one that was owed.
    """
    golden, why, main_pid, read_at = _owed(engine.config, deadline, report)
    if golden is None:
        if engine.config.golden_required:
            raise Mismatch(
                f"{_here(engine.config)} has to be proved by a golden (golden_required), and cannot be: {why}",
                entry="golden-missing",
                next_step="put the right model in its place; or, when this is the wanted one, take golden_required "
                "from one engine, run baremetal.vllm.site, start it, and have baremetal.vllm.golden record its golden",
            )
        if not answered:
            answer_shape(engine, {"prompt_tokens": SHORT_PROMPT, "max_tokens": 1}, deadline.sooner(ASK_TIMEOUT))
        if why != NONE:
            report(f"{engine.config.engine}: proved by a completion only: {why}")
        return Proof("completion", why=why)
    if (version := golden.subject.runtime_version) != engine.config.runtime_version:
        wide = Tolerance(golden.tolerance.logprobs * RUNTIME_SLACK, golden.tolerance.vectors * RUNTIME_SLACK)
        return check(engine, golden, main_pid, deadline, wide)._replace(runtime=version)
    proof = check(engine, golden, main_pid, deadline)
    hold(engine.config, golden.subject, main_pid, read_at)
    return proof


class Owed(t.NamedTuple):
    """The golden that a process has to match, or why there is none; and when it last read its weights, if again."""

    golden: Golden | None
    why: str
    main_pid: int = 0
    read_at: float = 0.0


def _owed(engine: EngineConfig, deadline: Deadline, report: Report) -> Owed:
    cheap = cheap_subject(engine)
    # Its own runtime's first; of the others the newest.
    known = sorted(
        on_record(cheap, any_runtime=True),
        key=lambda one: (not one.subject.fits(cheap), -float(one.recorded.get("at") or 0)),
    )
    if not known and not (store.state_dir(engine.engine) / FILE).exists():
        return Owed(None, NONE)
    main_pid = Unit(engine.unit).show().main_pid
    held = _held(engine, main_pid)
    read_at = held.read_at if held else 0.0
    if held and held.subject:
        key = _subject(held).key
        golden = stored(key)
        return Owed(golden, "" if golden else f"the golden {key}, which proved it before, is gone", main_pid, read_at)
    if not known:
        return Owed(None, NONE)
    if why := doubt(engine, main_pid, held):
        return Owed(None, why)
    subjects: dict[str, Subject] = {}
    for method in sorted({one.subject.method for one in known}):
        subjects[method] = with_weights(cheap, engine.model, method, deadline, report)
    for one in known:
        subject = subjects[one.subject.method].of_runtime(one.subject.runtime_version)
        if one.key == subject.key:
            return Owed(one, "", main_pid, read_at)
    return Owed(None, f"{len(known)} golden(s) of this model are on record, and none is of its weights")


def doubt(engine: EngineConfig, main_pid: int, held: Held | None = None) -> str:
    """Why the declaration and the checkpoint on disk do not say what the running process computes with."""
    if not os.path.isabs(engine.model):
        return f"'{engine.model}' is no checkpoint on disk, so its content is not known"
    started = lease.last_start(engine.engine) or {}
    if started.get("main_pid") != main_pid:
        started = lease.last_preflight(engine.engine) or {}
    digest = started.get("config_digest")
    if digest is not None and digest != engine.config_digest:
        return "it runs with another configuration than is declared now"
    if changed := _changed_since(engine, held or _held(engine, main_pid)):
        return f"its checkpoint has changed after it was read ({', '.join(changed[:3])})"
    return ""


def hold(engine: EngineConfig, subject: Subject, main_pid: int, read_at: float = 0.0) -> None:
    """From now on this process is held to this subject; writes only what is new."""
    held = _held(engine, main_pid)
    if held is None or held.subject != asdict(subject):
        _hold(engine, main_pid, subject, max(read_at, held.read_at if held else 0.0))
