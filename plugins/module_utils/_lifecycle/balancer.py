# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""A balancer that is not ours, in the place of the gate: it is told what to do, and what it was told is kept here.

It may forget. So the words are written to the engine's state before it is told, and each look compares.
"""

from __future__ import annotations

import socket
import typing as t
from abc import ABC, abstractmethod
from dataclasses import dataclass

from . import lease, store
from .config import AdmissionConfig, EngineConfig
from .deadline import Deadline
from .errors import AdmissionDown, Surprise, UsageError
from .gate import ADMISSIONS, GateState

RECORD = "admission.json"
# Others that speak for the same engine hold the lock as long as a balancer takes to answer.
LOCK_TIMEOUT = 60.0


@dataclass(frozen=True)
class Look:
    """What one balancer does with the engine now. ``word`` is one of ADMISSIONS."""

    where: str
    word: str
    up: bool
    sessions: int
    total: int


class BalancerDown(AdmissionDown):
    """A balancer gave no answer."""


def effective(admission: str, proved: bool) -> str:
    """What the balancer is to do: an engine whose start is not proved gets no requests, whoever admits it. Pure."""
    return "withdrawn" if admission == "open" and not proved else admission


def judge(looks: t.Sequence[Look], admission: str, proved: bool) -> GateState:
    """What all balancers together do, and how that differs from what they were told. Pure.

    :param admission: what was told, "" where nothing ever was.
    """
    # One that sends is enough for requests to come; only all of them together keep them away.
    word = next(one for one in ADMISSIONS if one in {look.word for look in looks})
    told = effective(admission, proved)
    differs = []
    for look in looks:
        if told == "open" != look.word:
            differs.append(f"{look.where} sends it no new requests ({look.word}), though it is admitted")
        elif told not in ("", "open") and look.word == "open":
            differs.append(
                f"{look.where} sends it requests, though it was {told}: a reload or restart has forgotten that, or "
                "somebody has admitted it there"
            )
        elif told == "closed" and look.word != "closed":
            differs.append(f"{look.where} has it {look.word}, though it was closed")
        elif not told and look.word != word:
            differs.append(f"{look.where} has it {look.word}, others have it {word}")
    return GateState(
        admission="open" if admission == "open" and not proved else word,
        proved=proved,
        backend_up=all(look.up for look in looks),
        sessions=sum(look.sessions for look in looks),
        total=sum(look.total for look in looks),
        told=(told or word) if differs else "",
        differs="; ".join(differs),
    )


class Balancer(ABC):
    """The side of one engine of all balancers that send to it."""

    def __init__(self, config: EngineConfig) -> None:
        if config.admission is None:
            raise UsageError(f"engine '{config.engine}' names no balancer", entry="declaration-broken")
        self.engine = config.engine
        self.config: AdmissionConfig = config.admission

    @abstractmethod
    def look(self) -> list[Look]:
        """
        :raises BalancerDown: one of them gave no answer.
        :raises Surprise: one of them does not know the engine.
        """

    @abstractmethod
    def tell(self, word: str) -> None:
        """
        :raises BalancerDown: one of them gave no answer.
        :raises Surprise: one of them refuses.
        """

    def observe(self) -> GateState:
        words = self._words()
        return judge(self.look(), words.get("admission", ""), self._proved(words))

    def set(self, key: str, value: str) -> None:
        with lease.locked(f"admission-{self.engine}", Deadline(LOCK_TIMEOUT), self.engine):
            words = self._words()
            if words.get(key) != value:
                self._write({**words, key: value})
            if "admission" not in words and key != "admission":
                # Never told anything yet: what it does with the engine today is what somebody wanted.
                words["admission"] = self.observe().admission
                self._write({**words, key: value})
            words[key] = value
            self._tell(words["admission"], self._proved(words))

    def ready(self, timeout: float) -> bool:  # noqa: ARG002 - the protocol's; each question has its own here
        return self.observe().ready

    def remind(self) -> bool:
        with lease.locked(f"admission-{self.engine}", Deadline(LOCK_TIMEOUT), self.engine):
            words = self._words()
            state = judge(self.look(), words.get("admission", ""), self._proved(words))
            if "admission" not in words or not state.told:
                return False
            self._tell(words["admission"], self._proved(words))
            return True

    def _tell(self, admission: str, proved: bool) -> None:
        word = effective(admission, proved)
        # All hear it, also those after one that gives no answer.
        self.tell(word)
        state = judge(self.look(), admission, proved)
        if state.told:
            raise Surprise(
                f"engine '{self.engine}' on {socket.gethostname()} was to be {word}, and after that was told: "
                f"{state.differs}",
                entry="balancer-disagrees",
                next_step="look at the balancer's own state of that server (its weight counts as well), then run this "
                "again",
            )

    def _words(self) -> dict[str, str]:
        """What was told, as written down.

        :raises Surprise: values that we do not write.
        """
        path = store.state_dir(self.engine) / RECORD
        found = store.read_json(path) or {}
        words: dict[str, str] = {key: found[key] for key in ("admission", "proved") if key in found}
        if words.get("admission", "open") not in ADMISSIONS or words.get("proved", "0") not in ("0", "1"):
            raise Surprise(
                f"{path} says {words}",
                entry="record-broken",
                next_step=f"remove {path}, then admit or withdraw the engine again",
            )
        return words

    def _write(self, words: dict[str, str]) -> None:
        lease.record(self.engine, RECORD, words)

    def _proved(self, words: t.Mapping[str, str]) -> bool:
        """The doors' word; before they have ever said one, whether a proved start is on record."""
        if "proved" in words:
            return words["proved"] == "1"
        return lease.last_start(self.engine) is not None
