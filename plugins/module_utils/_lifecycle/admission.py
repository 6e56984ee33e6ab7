# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Who admits requests to an engine, behind one protocol: our gate, a HAProxy of the fleet, an operator's command."""

from __future__ import annotations

import typing as t

from .balancer import Balancer
from .config import EngineConfig
from .gate import Gate, GateState
from .haproxy import HAProxies
from .script import Script


class Admission(t.Protocol):
    """Two words decide: ``admission`` (open, withdrawn, closed) is a play's, ``proved`` (0, 1) is the unit's doors'.

    Requests come while the first is open and the second is 1. Withdrawn takes no new ones from the router, closed takes
    none at all; what is in flight goes on in any case.
    """

    def observe(self) -> GateState:
        """What it does now.

        :raises AdmissionDown: no answer, which is a doubt and never "no requests".
        :raises Surprise: an answer that does not speak of this engine.
        """

    def set(self, key: str, value: str) -> None:
        """Write the word down, tell it, and read back what it does.

        :raises AdmissionDown: it is written down, and could not be told.
        :raises Surprise: it was told and does something else.
        """

    def ready(self, timeout: float) -> bool:
        """Whether it sends requests to the engine."""

    def remind(self) -> bool:
        """Tell it again what it was told, where it has forgotten; whether that was so."""


def choose(config: EngineConfig) -> Admission | None:
    """The one that the engine's declaration names; None where nothing but its own gauges can be asked.

    :raises UsageError: the declaration is not whole.
    """
    backends: dict[str, type[Gate] | type[Balancer]] = {"gate": Gate, "haproxy": HAProxies, "command": Script}
    backend = backends.get(config.admission_backend)
    return backend(config) if backend else None
