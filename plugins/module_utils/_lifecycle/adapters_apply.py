# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Loads, unloads and proves the adapters of one running engine, and keeps the record of it."""

from __future__ import annotations

import contextlib
import socket
import typing as t
from dataclasses import replace

from . import adapters, answers, golden
from .adapters import Action, Loaded, Record, Wanted, digest_of, join, read_record, write_record
from .answers import GENERATES, GRADES, Answer, Question
from .config import AdapterConfig, EngineConfig
from .deadline import Deadline
from .engine import Engine, Served
from .errors import Answered, DeadlineExceeded, LifecycleError, Mismatch, Surprise, UnknownState, Unreachable
from .unit import UnitState

CALL_TIMEOUT = 30.0
MAX_TOKENS = 8
# Tokens of a prompt: an adapter that has an effect has it on any.
ROOM = 32
Report = t.Callable[[str], None]


class Hands:
    """What is done to the adapters of one engine. Each action is a method named like its kind.

    ``mend`` says that an adapter that was proved before and has lost its effect may be loaded once more, which is for
    an engine that is out of rotation.
    """

    def __init__(
        self, config: EngineConfig, engine: Engine, record: Record, deadline: Deadline, *, mend: bool = False
    ) -> None:
        self.config = config
        self.engine = engine
        self.deadline = deadline
        self.mend = mend
        self.record = record
        self.wanted: dict[str, Wanted] = {}
        self.mended: list[str] = []
        self._asked: list[Question] = []
        self._own: list[tuple[Answer, Answer]] = []
        self._grade: int | None = None

    def there(self) -> list[Loaded]:
        """What the engine lists now."""
        return join(self.record, self._served())

    def perform(self, action: Action) -> None:
        """
        :raises LifecycleError: it failed, or an independent look shows that it had no effect.
        """
        getattr(self, f"_{action.kind}")(action.name)

    def _here(self, name: str) -> str:
        return f"engine '{self.config.engine}' on {socket.gethostname()}: adapter '{name}'"

    def _served(self) -> list[Served]:
        return self.engine.served(CALL_TIMEOUT)

    def _left(self) -> float:
        return max(CALL_TIMEOUT, self.deadline.left)

    def _note(self, name: str, entry: dict[str, t.Any] | None, cached: list[list[str]] | None = None) -> None:
        known = {key: value for key, value in self.record.adapters.items() if key != name}
        if entry is not None:
            known[name] = entry
        self.record = replace(self.record, adapters=known, cached=self.record.cached if cached is None else cached)
        write_record(self.config.engine, self.record)

    def _load(self, name: str) -> None:
        one = self.wanted[name]
        path, digest = one.adapter.path, one.digest or ""
        before = self.record.cached
        row = [name, path, digest]
        # Before the call: a run that is killed now leaves word of what may be loaded, and is not proved.
        self._note(
            name, {"path": path, "digest": digest, "proved": False}, [*before, *([] if row in before else [row])]
        )
        try:
            self.engine.load_adapter(name, path, self._left())
        except Answered as exc:
            if all(seen.name != name for seen in self._served()):
                self._note(name, None, before)
            raise LifecycleError(
                f"{self._here(name)} was not loaded: {exc}",
                entry="adapter-not-changed",
                next_step=self._way_out(exc),
                **exc.details,
            ) from exc
        except Unreachable as exc:
            raise UnknownState(
                f"{self._here(name)}: whether it was loaded is not known: {exc}",
                entry="adapter-not-changed",
                next_step="run this again, which looks first; if the engine stays silent, restart it with vllm_engine",
            ) from exc
        self._must_be_listed(one.adapter)
        if digest and digest_of(path, timeout=self._left()) != digest:
            self._withdraw(name)
            raise Surprise(
                f"{self._here(name)}: the files in {path} changed while it was loaded; it was unloaded again",
                entry="adapter-unproved",
                next_step="wait until the copy is complete and run this again",
            )

    def _way_out(self, exc: Answered) -> str:
        if exc.status == 404 and "No adapter found" in str(exc):
            return "see that the directory holds adapter_config.json and adapter_model.safetensors, also for the engine"
        if exc.status == 404:
            return (
                f"set {adapters.VARIABLE}=1 for the engine (the role does, when adapters are declared) and restart it"
            )
        if exc.status == 400:
            return "someone else loads adapters into this engine; see vllm_info, and run this again"
        return f"read journalctl -u {self.config.unit}: rank, modules and shapes have to fit the engine's model"

    def _must_be_listed(self, adapter: AdapterConfig) -> None:
        seen = {one.name: one for one in self._served()}.get(adapter.name)
        if seen is None or seen.root != adapter.path or not seen.parent:
            raise Surprise(
                f"{self._here(adapter.name)} was loaded with status 200, yet /v1/models "
                + (
                    "does not list it" if seen is None else f"has it from '{seen.root}' with the parent '{seen.parent}'"
                ),
                entry="adapter-not-changed",
                next_step="run this again; if it stays so, restart the engine with vllm_engine",
            )

    def _unload(self, name: str) -> None:
        self._withdraw(name)

    def _withdraw(self, name: str) -> None:
        """Out of the engine's list. The prefix cache keeps what it has of it, and so does the record."""
        seen = next((one for one in self.there() if one.name == name), None)
        if seen is not None and not seen.digest:
            # Someone else's: from now on we know that its content is not known.
            self._note(name, None, [*self.record.cached, [name, seen.path, ""]])
        try:
            self.engine.unload_adapter(name, self._left())
        except Answered as exc:
            if exc.status != 404:
                raise LifecycleError(
                    f"{self._here(name)} was not unloaded: {exc}",
                    entry="adapter-not-changed",
                    next_step=f"read journalctl -u {self.config.unit} and run this again",
                    **exc.details,
                ) from exc
        if any(one.name == name for one in self._served()):
            raise Surprise(
                f"{self._here(name)} was unloaded with status 200, yet /v1/models still lists it",
                entry="adapter-not-changed",
                next_step="run this again; if it stays so, restart the engine with vllm_engine",
            )
        self._note(name, None)

    def _reset_cache(self, _name: str) -> None:
        """The engine does it only in a moment without requests."""
        while True:
            try:
                self.engine.reset_prefix_cache(self._left())
                break
            except Surprise as exc:
                if not self.deadline.rest(0.2):
                    raise DeadlineExceeded(
                        f"engine '{self.config.engine}' on {socket.gethostname()} did not reset its prefix cache "
                        f"within {self.deadline.seconds:g} s, which requests in flight prevent; its changed adapters "
                        "stay out",
                        entry="adapter-not-changed",
                        next_step="drain it with vllm_drain and run this again, or put changed content at a new path",
                    ) from exc
        kept = [[name, str(one["path"]), str(one["digest"])] for name, one in self.record.adapters.items()]
        self.record = replace(self.record, cached=kept)
        write_record(self.config.engine, self.record)

    def _prove(self, name: str) -> None:
        """An answer that is the adapter's own, not the model's."""
        known = self.record.adapters.get(name, {})
        if not self._differs(name):
            if not (self.mend and known.get("proved")):
                self._without_effect(name, unload=not known.get("proved"))
            self.mended.append(name)
            self._withdraw(name)
            self._reset_cache("")
            self._load(name)
            if not self._differs(name):
                self._without_effect(name, unload=True)
        known = self.record.adapters.get(name, {})
        if not known.get("proved"):
            self._note(name, {**known, "proved": True})

    def _differs(self, name: str) -> bool:
        self._ask_model()
        for asked, (own, again) in zip(self._asked, self._own):
            try:
                theirs = golden.ask(self.engine, asked, name, MAX_TOKENS, self._grade, self._patience(name))
            except (Mismatch, Answered) as exc:
                self._without_answer(name, exc)
            if adapters.has_effect(own, again, theirs):
                return True
        return False

    def _ask_model(self) -> None:
        """What the model itself says to each question, twice; asked for once, since no adapter changes it."""
        if self._own:
            return
        model = self.config.served_model_name
        kind = golden.kind_of(self.engine, self._patience(model))
        self._asked = [Question(kind, prompt) for prompt in answers.default_prompts(kind, ROOM)]
        grades = GRADES if kind in GENERATES else (None,)
        found, self._grade = golden.ask_all(
            self.engine, [*self._asked, *self._asked], model, MAX_TOKENS, grades, self.deadline
        )
        self._own = list(zip(found, found[len(self._asked) :]))

    def _patience(self, name: str) -> float:
        if self.deadline.left <= 0:
            raise DeadlineExceeded(
                f"{self._here(name)}: the timeout of {self.deadline.seconds:g} s ended before it was proved",
                entry="adapter-not-changed",
                next_step="run this again with a longer timeout; it goes on where this one ended",
            )
        return min(CALL_TIMEOUT, self.deadline.left)

    def _without_answer(self, name: str, exc: LifecycleError) -> t.NoReturn:
        """It fails where the model itself has just answered."""
        said = ""
        if not self.record.adapters.get(name, {}).get("proved"):
            with contextlib.suppress(LifecycleError):  # when the engine has died of it, that is the one to tell
                self._withdraw(name)
                said = "; it was unloaded again"
        raise Surprise(
            f"{self._here(name)} gives no right answer{said}: {exc}",
            entry="adapter-unproved",
            next_step=f"read journalctl -u {self.config.unit}; see whether the adapter was made for this model",
            **exc.details,
        ) from exc

    def _without_effect(self, name: str, *, unload: bool) -> t.NoReturn:
        """A name that answers like its model would serve clients something else than it says."""
        if unload:
            self._withdraw(name)
        raise Surprise(
            f"{self._here(name)} has no effect: it answers {len(self._asked)} prompts as the model "
            f"'{self.config.served_model_name}' itself does" + ("; it was unloaded again" if unload else ""),
            entry="adapter-unproved",
            next_step="see whether its files are the trained ones, and made for this model (vLLM skips tensors whose "
            "names it does not know); an adapter that is to change nothing needs prove: false",
        )


def bring(
    hands: Hands, wanted: t.Sequence[Wanted], actions: t.Sequence[Action], done: t.Callable[[Action], None]
) -> None:
    """Perform the actions; ``done`` is told of each one that was."""
    hands.wanted = {one.adapter.name: one for one in wanted}
    for action in actions:
        hands.perform(action)
        done(action)


def at_start(config: EngineConfig, engine: Engine, unit: UnitState, deadline: Deadline, report: Report) -> None:
    """Load what is declared into an engine that has just started and has served nobody.

    :raises LifecycleError: an adapter could not be loaded, or has no effect.
    """
    hands = Hands(config, engine, Record(unit.main_pid, unit.invocation), deadline)
    wanted = _declared(config, deadline)
    if wanted:
        adapters.check_updating(config, engine.capabilities(CALL_TIMEOUT))
    # No prompt of a client is in its prefix cache.
    actions = [one for one in adapters.plan_adapters(wanted, hands.there(), []) if one.kind != "reset_cache"]
    bring(hands, wanted, actions, lambda action: report(f"{config.engine}: {action.says}"))


def after_wake(config: EngineConfig, engine: Engine, unit: UnitState, deadline: Deadline, report: Report) -> list[str]:
    """Prove all adapters of an engine that was asleep and is out of rotation; what is missing is loaded again.

    An engine that was started before adapters were declared, and cannot load any, is left as it is.

    :returns: what was changed, in words.
    :raises LifecycleError: an adapter could not be brought back.
    """
    hands = Hands(config, engine, read_record(config.engine, unit), deadline, mend=True)
    there = hands.there()
    can = "lora_update" in engine.capabilities(CALL_TIMEOUT)
    wanted = _declared(config, deadline) if can else []
    names = {one.adapter.name for one in wanted}
    for name, known in hands.record.adapters.items():
        if name not in names:
            adapter = AdapterConfig(name, str(known["path"]), prove=bool(known["proved"]))
            wanted.append(Wanted(adapter, str(known["digest"])))
    changed: list[str] = []

    def done(action: Action) -> None:
        report(f"{config.engine}: {action.says}")
        if action.mutates:
            changed.append(action.says)

    bring(hands, wanted, adapters.plan_adapters(wanted, there, hands.record.cached, again=True), done)
    changed += [f"load adapter '{name}' again, which had lost its effect" for name in hands.mended]
    return changed


def _declared(config: EngineConfig, deadline: Deadline) -> list[Wanted]:
    for adapter in config.adapters:
        adapters.inspect(config, adapter)
    return [
        Wanted(one, digest_of(one.path, user=config.user, timeout=max(deadline.left, 0.1))) for one in config.adapters
    ]
