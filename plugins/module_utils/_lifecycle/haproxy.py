# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Speaks to the runtime sockets of the fleet's own HAProxies: withdrawn is "drain", closed is "maint"."""

from __future__ import annotations

import re
import socket
import typing as t

from .balancer import Balancer, BalancerDown, Look
from .config import EngineConfig
from .errors import LifecycleError, Surprise, UsageError

# What "set server ... state" calls our words.
STATES = {"open": "ready", "withdrawn": "drain", "closed": "maint"}
# Bits of srv_admin_state, in HAProxy's management guide. Not 0x04: it says only that the configuration began so.
MAINT = 0x01 | 0x02 | 0x20 | 0x40
DRAIN = 0x08 | 0x10
NAME = re.compile(r"[A-Za-z0-9_.:-]+")


class HAProxies(Balancer):
    """All HAProxies that send to one engine."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        declared = self.config
        wrong = [one for one in declared.sockets if not is_address(one)]
        wrong += [one for one in (declared.proxy, declared.server) if not NAME.fullmatch(one)]
        if wrong or not declared.sockets:
            raise UsageError(
                f"engine '{config.engine}' has admission haproxy with sockets {declared.sockets}, proxy "
                f"'{declared.proxy}' and server '{declared.server}'",
                entry="admission-declared",
                next_step="name each socket by an absolute path or ADDRESS:PORT, and proxy and server as HAProxy does",
            )

    def look(self) -> list[Look]:
        declared = self.config
        return [look(address, declared.proxy, declared.server, declared.timeout) for address in declared.sockets]

    def tell(self, word: str) -> None:
        command = f"set server {self.config.proxy}/{self.config.server} state {STATES[word]}"
        errors: list[LifecycleError] = []
        for address in self.config.sockets:
            try:
                if answer := self._ask(address, command).strip():
                    raise Surprise(
                        f"HAProxy at {address} answered '{command}' with: {' '.join(answer.split())[:200]}",
                        entry="balancer-disagrees",
                        next_step="the socket needs 'level admin', and its configuration this proxy and server",
                    )
            except LifecycleError as exc:
                errors.append(exc)
        if errors:
            raise errors[0]

    def _ask(self, address: str, command: str) -> str:
        return ask(address, command, self.config.timeout)


def look(address: str, proxy: str, server: str, timeout: float) -> Look:
    """What one HAProxy does with a server.

    :raises BalancerDown: no answer.
    :raises Surprise: it does not know the server.
    """
    text = ask(address, f"show servers state {proxy};show stat {proxy} 4 -1", timeout)
    states: list[dict[str, str]] = []
    stats: list[dict[str, str]] = []
    header: list[str] = []
    for line in text.splitlines():
        if line.startswith("# pxname,"):
            header = line[2:].split(",")
        elif line.startswith("# be_id "):
            header = line[2:].split()
        elif header and line.strip():
            commas = header[0] == "pxname"
            (stats if commas else states).append(dict(zip(header, line.split("," if commas else None))))
    here = [one for one in states if (one.get("be_name"), one.get("srv_name")) == (proxy, server)]
    counts = [one for one in stats if (one.get("pxname"), one.get("svname")) == (proxy, server)]
    if not here or not counts:
        raise Surprise(
            f"HAProxy at {address} knows no server {proxy}/{server}: {' '.join(text.split())[:200]}",
            entry="balancer-disagrees",
            next_step="correct proxy and server in the engine's admission, or HAProxy's configuration",
        )
    return _read(f"HAProxy at {address}", here[0], counts[0])


def ask(address: str, command: str, timeout: float) -> str:
    """One line of commands, and the whole answer.

    :raises BalancerDown: no answer.
    """
    try:
        with _connect(address, timeout) as connection:
            connection.sendall(f"{command}\n".encode())
            chunks: list[bytes] = []
            while chunk := connection.recv(65536):
                chunks.append(chunk)
    except OSError as exc:
        raise BalancerDown(
            f"HAProxy at {address} gives no answer to {socket.gethostname()}: {exc}",
            entry="balancer-no-answer",
            next_step="see that it runs and that its stats socket is reached from this host, and run this again",
        ) from exc
    return b"".join(chunks).decode("utf-8", "replace")


def is_address(value: str) -> bool:
    if value.startswith("/"):
        return True
    host, _unused, port = value.rpartition(":")
    return bool(host.strip("[]")) and port.isdecimal() and 0 < int(port) < 65536


def _connect(address: str, timeout: float) -> socket.socket:
    if not address.startswith("/"):
        host, _unused, port = address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def _read(where: str, state: t.Mapping[str, str], stat: t.Mapping[str, str]) -> Look:
    """
    :raises Surprise: a number is missing; without it nothing can be said.
    """
    try:
        flags = int(state["srv_admin_state"])
        drains = flags & DRAIN or int(state["srv_uweight"]) == 0
        return Look(
            where=where,
            word="closed" if flags & MAINT else "withdrawn" if drains else "open",
            up=int(state["srv_op_state"]) != 0,
            sessions=int(stat["scur"]) + int(stat["qcur"]),
            total=int(stat["stot"]),
        )
    except (KeyError, ValueError) as exc:
        raise Surprise(
            f"{where} does not give its numbers for the server as HAProxy 2.4 and later do: {exc}",
            entry="balancer-disagrees",
        ) from exc
