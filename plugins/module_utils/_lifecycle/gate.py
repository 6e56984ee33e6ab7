# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Speaks to the gate: HAProxy's master socket, and the map file in which an engine's admission outlives the gate.

The master socket, not a worker's own: around a reload a worker's socket may still be the old worker's, which confirms a
change that the new one never sees (34 of 60 tries on HAProxy 2.6).
"""

from __future__ import annotations

import socket
import typing as t
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import lease, store
from .config import EngineConfig, GateConfig
from .deadline import Deadline
from .errors import AdmissionDown, Surprise, UsageError
from .http import Client

ADMISSIONS = ("open", "withdrawn", "closed")
REFUSES_FOR = 0.5
COMMAND_TIMEOUT = 5.0
# The master's name for the worker that takes new connections.
CURRENT = "@1"


class GateDown(AdmissionDown):
    """The gate's master socket gave no answer."""


@dataclass(frozen=True)
class GateState:
    """What the gate, or a balancer in its place, does for one engine.

    ``sessions`` are requests in the gate now, in its running and its older, finishing workers; ``total`` is the number
    of requests that the running worker ever sent to the engine. ``told`` is what it was told last, where it does
    something else, and ``differs`` says so: a balancer may forget.
    """

    admission: str
    proved: bool
    backend_up: bool
    sessions: int
    total: int
    told: str = ""
    differs: str = ""

    @property
    def ready(self) -> bool:
        """What GET /ready tells the router."""
        return self.admission == "open" and self.proved and self.backend_up and not self.told

    @property
    def forgot(self) -> bool:
        """Whether requests come that were to be kept away."""
        return self.admission == "open" and self.told not in ("", "open")


class Gate:
    """The gate's side of one engine."""

    def __init__(self, config: EngineConfig) -> None:
        if config.gate is None:
            raise UsageError(f"engine '{config.engine}' has no gate", entry="declaration-broken")
        self.engine = config.engine
        self.config: GateConfig = config.gate

    def observe(self) -> GateState:
        """
        :raises GateDown: no answer.
        :raises Surprise: an answer without this engine, or values that only we write and did not.
        """
        values = self._map()
        admission = values.get("admission", "withdrawn")
        proved = values.get("proved", "0")
        if admission not in ADMISSIONS or proved not in ("0", "1"):
            raise Surprise(
                f"the gate's map {self.config.map} says admission={admission!r} proved={proved!r}",
                entry="gate-disagrees",
            )
        rows = self._stat(CURRENT)
        backend = rows.get("BACKEND")
        servers = {name: row for name, row in rows.items() if name != "BACKEND"}
        if backend is None or not servers:
            raise Surprise(
                f"the gate has no backend {self.config.proxy} for engine '{self.engine}'",
                entry="gate-disagrees",
                next_step="run the role baremetal.vllm.vllm_gate again",
            )
        sessions = _sessions(backend)
        for worker in self._older_workers():
            older = self._stat(worker).get("BACKEND")
            sessions += _sessions(older) if older else 0
        return GateState(
            admission=admission,
            proved=proved == "1",
            backend_up=any(row.get("status", "").startswith("UP") for row in servers.values()),
            sessions=sessions,
            total=_number(backend, "stot"),
        )

    def answered(self) -> tuple[int, int]:
        """Requests that the running worker ever sent to the engine, and how many of them ended in a 5xx.

        :raises GateDown: no answer.
        """
        backend = self._stat(CURRENT).get("BACKEND", {})
        return _number(backend, "stot"), _number(backend, "hrsp_5xx")

    def set(self, key: str, value: str) -> None:
        """Write to the file first, which a reload or restart reads, then to the running gate, and look.

        :raises GateDown: the file is written, the running gate could not be told.
        :raises Surprise: the gate was told and still says otherwise.
        """
        deadline = Deadline(COMMAND_TIMEOUT)
        # A play writes admission while the unit's doors write proved: one at a time, so that neither is lost.
        with lease.locked(f"gate-{self.engine}", deadline):
            self._record(key, value)
            while True:
                try:
                    self._set(CURRENT, key, value)
                    now = self._map().get(key)
                    break
                except GateDown:
                    if not deadline.rest():
                        raise
            if now != value:
                raise Surprise(
                    f"the gate was told {key}={value} for engine '{self.engine}' and says {now!r}",
                    entry="gate-disagrees",
                )
            # An older worker answers one more request on each connection that its client keeps.
            for worker in self._older_workers():
                with suppress(GateDown):  # it has ended meanwhile
                    self._set(worker, key, value)

    def remind(self) -> bool:
        """A gate reads its file when it starts, and so forgets nothing."""
        return False

    def _set(self, worker: str, key: str, value: str) -> None:
        entry = f"map {self.config.map} {key} {value}"
        # "set" wants the key to be there; a map that an older file filled may lack it.
        if "not found" in self._ask(f"{worker} set {entry}"):
            self._ask(f"{worker} add {entry}")

    def _record(self, key: str, value: str) -> None:
        """The file alone: what the gate reads when it starts."""
        path = Path(self.config.map)
        try:
            values = dict(line.split(None, 1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        except FileNotFoundError:
            values = {}
        except (OSError, ValueError) as exc:
            raise UsageError(
                f"the gate's map {path} cannot be read: {exc}",
                entry="gate-disagrees",
                next_step="run the role vllm_gate",
            ) from exc
        if values.get(key) != value:
            values[key] = value
            store.write_text(path, "".join(f"{name} {text}\n" for name, text in sorted(values.items())), 0o640)

    def ready(self, timeout: float) -> bool:
        """Ask /ready over the network, as the router does.

        :raises Unreachable: no answer.
        """
        host = f"[{self.config.address}]" if ":" in self.config.address else self.config.address
        client = Client(f"http://{host}:{self.config.port}")
        try:
            return client.request("GET", "/ready", timeout=timeout).status == 200
        finally:
            client.close()

    def _older_workers(self) -> list[str]:
        """Workers that a reload left to finish their streams, which the current worker's counters do not show."""
        workers = []
        old = False
        for line in self._ask("show proc").splitlines():
            if line.startswith("#"):
                old = line.strip("# ").startswith("old workers")
            elif old and line.split():
                workers.append(f"@!{line.split()[0]}")
        return workers

    def _stat(self, worker: str) -> dict[str, dict[str, str]]:
        """Rows of this engine's proxy by server name; nothing from an older worker that has ended meanwhile."""
        try:
            lines = self._ask(f"{worker} show stat").splitlines()
        except GateDown:
            if worker == CURRENT:
                raise
            return {}
        if not lines or not lines[0].startswith("# pxname,svname,"):
            if worker != CURRENT:
                return {}
            raise Surprise(
                f"{self.config.master_socket} answered 'show stat' with {lines[:1]!r}", entry="gate-disagrees"
            )
        header = lines[0].lstrip("# ").split(",")
        rows = (dict(zip(header, line.split(","))) for line in lines[1:] if line.startswith(f"{self.config.proxy},"))
        return {row["svname"]: row for row in rows if row["svname"] != "FRONTEND"}

    def _map(self) -> dict[str, str]:
        return self._parse_map(self._ask(f"{CURRENT} show map {self.config.map}"))

    def _parse_map(self, text: str) -> dict[str, str]:
        """Lines of ``show map``: an entry's address, its key, its value."""
        values: dict[str, str] = {}
        for line in text.splitlines():
            fields = line.split(None, 2)
            if len(fields) == 3 and fields[0].startswith("0x"):
                values[fields[1]] = fields[2].strip()
            elif line.strip():
                raise Surprise(
                    f"the gate does not know the map {self.config.map}: {line.strip()}",
                    entry="gate-disagrees",
                    next_step="run the role baremetal.vllm.vllm_gate again",
                )
        return values

    def _ask(self, command: str) -> str:
        """One command on the master socket, and the whole answer."""
        path = self.config.master_socket
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(COMMAND_TIMEOUT)
                _connect(connection, path)
                connection.sendall(f"{command}\n".encode())
                connection.shutdown(socket.SHUT_WR)  # the master keeps the connection open otherwise
                chunks: list[bytes] = []
                while True:
                    chunk = connection.recv(65536)
                    if not chunk:
                        return b"".join(chunks).decode("utf-8", "replace")
                    chunks.append(chunk)
        except OSError as exc:
            raise GateDown(
                f"the gate of engine '{self.engine}' on host {socket.gethostname()} gives no answer on {path}: {exc}",
                entry="gate-no-answer",
                next_step="systemctl status vllm-gate.service; start it and run this again",
            ) from exc


def _connect(connection: socket.socket, path: str) -> None:
    """A master that starts or reloads executes itself anew, and refuses for a moment."""
    patience = Deadline(REFUSES_FOR)
    while True:
        try:
            return connection.connect(path)
        except ConnectionRefusedError:
            if not patience.rest(0.02):
                raise


def _sessions(backend: t.Mapping[str, str]) -> int:
    return _number(backend, "scur") + _number(backend, "qcur")


def _number(row: t.Mapping[str, str], key: str) -> int:
    try:
        return int(row[key] or 0)
    except (KeyError, ValueError) as exc:
        raise Surprise(
            f"the gate's 'show stat' has no number {key} for {row.get('pxname')}", entry="gate-disagrees"
        ) from exc
