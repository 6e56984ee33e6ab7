# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One start per GPU, also of those starts that systemd makes by itself.

vLLM measures what is free while it starts, so it would count a neighbour's start, sleep or wake as its own. A play
holds the GPU's lock. A start has no process that lives from its first to its last command, so it leaves a ticket, which
is valid as long as systemd says that this very start is under way.
"""

from __future__ import annotations

import functools
import socket
import typing as t
from pathlib import Path

from . import lease, store
from .config import EngineConfig, PreloadConfig
from .deadline import Deadline
from .errors import DeadlineExceeded, LifecycleError, Refused
from .unit import Unit

TELL_EVERY = 10.0


def _ticket(uuid: str) -> Path:
    return store.lock_dir() / f"gpu-{uuid}.start"


def starting(uuid: str, but: str) -> str:
    """The engine whose start on this GPU is under way, "" for none. ``but`` is not counted."""
    value = store.read_json(_ticket(uuid))
    if value is None or value.get("engine") == but:
        return ""
    try:
        state = Unit(str(value.get("unit"))).show()
    except LifecycleError:  # that unit is not on this host any more
        return ""
    under_way = state.active_state == "activating" and state.invocation == value.get("invocation")
    return str(value.get("engine")) if under_way else ""


def await_starts(uuid: str, engine: str, deadline: Deadline, report: t.Callable[[str], None]) -> None:
    """For who holds the lock of this GPU: wait until no other engine starts on it.

    :raises DeadlineExceeded: names the engine that still starts.
    """
    _wait(uuid, engine, deadline, report, functools.partial(starting, uuid, engine))


def begin(config: EngineConfig, invocation: str, deadline: Deadline, report: t.Callable[[str], None]) -> None:
    """For a start: wait until nobody else starts, sleeps or wakes on its GPUs, and leave tickets.

    A play that starts this engine holds the lock on its behalf, and is not waited for. GPUs are taken in one order, so
    that none waits in a circle.

    :raises DeadlineExceeded: names who is at work.
    """
    _begin(config.engine, config.unit, config.gpus, (), invocation, deadline, report)


def begin_daemon(config: PreloadConfig, invocation: str, deadline: Deadline, report: t.Callable[[str], None]) -> None:
    """The same for a preload daemon. Its own engines wait for it, so it does not wait for them.

    :raises DeadlineExceeded: names who is at work.
    """
    _begin(_lender(config), config.unit, config.gpus, config.engines, invocation, deadline, report)


def _lender(config: PreloadConfig) -> str:
    """No engine's name has a space."""
    return f"preload daemon {config.daemon}"


def _begin(
    name: str,
    unit: str,
    uuids: t.Sequence[str],
    kin: t.Collection[str],
    invocation: str,
    deadline: Deadline,
    report: t.Callable[[str], None],
) -> None:
    ticket = {"engine": name, "unit": unit, "invocation": invocation}
    for uuid in sorted(uuids):
        _wait(uuid, name, deadline, report, functools.partial(_take, ticket, uuid, kin))


def end(config: EngineConfig) -> None:
    """Take back the tickets of this engine."""
    _end(config.engine, config.gpus)


def end_daemon(config: PreloadConfig) -> None:
    _end(_lender(config), config.gpus)


def _end(name: str, uuids: t.Sequence[str]) -> None:
    for uuid in uuids:
        value = store.read_json(_ticket(uuid))
        if value is not None and value.get("engine") == name:
            store.remove(_ticket(uuid))


def _take(ticket: dict[str, str], uuid: str, kin: t.Collection[str]) -> str:
    """Leave the ticket, or say who is at work."""
    name = ticket["engine"]
    holder = ""
    try:
        with lease.locked(f"gpu-{uuid}", Deadline(0), name):
            other = starting(uuid, name)
            if other and other not in kin:
                return other
            store.write_json(_ticket(uuid), ticket)
            return ""
    except Refused:
        holder = lease.holder(f"gpu-{uuid}")
    if holder == name or holder in kin:
        store.write_json(_ticket(uuid), ticket)
        return ""
    return holder


def _wait(
    uuid: str, engine: str, deadline: Deadline, report: t.Callable[[str], None], look: t.Callable[[], str]
) -> None:
    told = -TELL_EVERY
    while other := look():
        if deadline.elapsed - told >= TELL_EVERY:
            told = deadline.elapsed
            report(f"{engine}: waits for engine {other}, which is being changed on {uuid}")
        if not deadline.rest():
            raise DeadlineExceeded(
                f"engine '{engine}' on {socket.gethostname()} waited {deadline.seconds:g} s for engine '{other}', "
                f"which is still being changed on {uuid}",
                entry="gpu-busy",
                next_step=f"read journalctl -u vllm-engine@{other}.service; run this again when it is done",
            )
