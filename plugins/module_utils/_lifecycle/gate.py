# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Speaks to the gate: HAProxy's admin socket, and the map file in which an engine's admission outlives the gate."""

from __future__ import annotations

import socket
import typing as t
from dataclasses import dataclass
from pathlib import Path

from . import store
from .config import EngineConfig, GateConfig
from .errors import LifecycleError, Surprise, UsageError
from .http import Client

ADMISSIONS = ("open", "withdrawn", "closed")
COMMAND_TIMEOUT = 5.0


class GateDown(LifecycleError):
    """The gate's admin socket gave no answer."""


@dataclass(frozen=True)
class GateState:
    """What the gate does for one engine.

    ``sessions`` are requests in the gate now, in its running and its older, finishing workers; ``total`` is the number
    of requests that the running worker ever sent to the engine.
    """

    admission: str
    proved: bool
    backend_up: bool
    sessions: int
    total: int

    @property
    def ready(self) -> bool:
        """What GET /ready tells the router."""
        return self.admission == "open" and self.proved and self.backend_up


class Gate:
    """The gate's side of one engine."""

    def __init__(self, config: EngineConfig) -> None:
        if config.gate is None:
            raise UsageError(f"engine '{config.engine}' has no gate")
        self.engine = config.engine
        self.config: GateConfig = config.gate

    def observe(self) -> GateState:
        """
        :raises GateDown: no answer.
        :raises Surprise: an answer without this engine, or values that only we write and did not.
        """
        values = self._parse_map(self._ask(f"show map {self.config.map}"))
        admission = values.get("admission", "withdrawn")
        proved = values.get("proved", "0")
        if admission not in ADMISSIONS or proved not in ("0", "1"):
            raise Surprise(f"the gate's map {self.config.map} says admission={admission!r} proved={proved!r}")
        rows = self._stat(self.config.stats_socket, "")
        backend = rows.get("BACKEND")
        servers = {name: row for name, row in rows.items() if name not in ("FRONTEND", "BACKEND")}
        if backend is None or not servers:
            raise Surprise(
                f"the gate has no backend {self.config.proxy} for engine '{self.engine}'",
                next_step="run the role baremetal.vllm.vllm_gate again",
            )
        sessions = _number(backend, "scur") + _number(backend, "qcur")
        return GateState(
            admission=admission,
            proved=proved == "1",
            backend_up=any(row.get("status", "").startswith("UP") for row in servers.values()),
            sessions=sessions + self._older_sessions(),
            total=_number(backend, "stot"),
        )

    def set(self, key: str, value: str) -> None:
        """Write to the file first, which a reload or restart reads, then to the running gate, and look.

        :raises GateDown: the file is written, the running gate could not be told.
        :raises Surprise: the gate was told and still says otherwise.
        """
        self.record(key, value)
        path = self.config.map
        # "set" needs the key to be there; a map that an older file filled may lack it.
        if self._ask(f"set map {path} {key} {value}").strip():
            self._ask(f"add map {path} {key} {value}")
        now = self._parse_map(self._ask(f"show map {path}")).get(key)
        if now != value:
            raise Surprise(f"the gate was told {key}={value} for engine '{self.engine}' and says {now!r}")

    def record(self, key: str, value: str) -> None:
        """The file alone: what the gate reads when it starts."""
        path = Path(self.config.map)
        try:
            values = dict(line.split(None, 1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        except FileNotFoundError:
            values = {}
        except (OSError, ValueError) as exc:
            raise UsageError(
                f"the gate's map {path} cannot be read: {exc}", next_step="run the role vllm_gate"
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

    def _older_sessions(self) -> int:
        """Requests that a reload left with older workers, which the running worker's counters do not show."""
        if not self.config.master_socket:
            return 0
        sessions = 0
        old = False
        for line in self._ask("show proc", self.config.master_socket).splitlines():
            if line.startswith("#"):
                old = line.strip("# ").startswith("old workers")
            elif old and line.split():
                pid = line.split()[0]
                try:
                    row = self._stat(self.config.master_socket, f"@!{pid} ").get("BACKEND")
                except GateDown:  # it finished between the two questions
                    continue
                if row is not None:
                    sessions += _number(row, "scur") + _number(row, "qcur")
        return sessions

    def _stat(self, path: str, prefix: str) -> dict[str, dict[str, str]]:
        lines = self._ask(f"{prefix}show stat", path).splitlines()
        if not lines or not lines[0].startswith("# pxname,svname,"):
            if prefix:
                return {}
            raise Surprise(f"{path} answered 'show stat' with {lines[:1]!r}")
        header = lines[0].lstrip("# ").split(",")
        rows = (dict(zip(header, line.split(","))) for line in lines[1:] if line.startswith(f"{self.config.proxy},"))
        return {row["svname"]: row for row in rows if row["svname"] != "FRONTEND"}

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
                    next_step="run the role baremetal.vllm.vllm_gate again",
                )
        return values

    def _ask(self, command: str, path: str = "") -> str:
        """One command on an admin socket, and the whole answer."""
        path = path or self.config.stats_socket
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(COMMAND_TIMEOUT)
                connection.connect(path)
                connection.sendall(f"{command}\n".encode())
                chunks: list[bytes] = []
                while True:
                    chunk = connection.recv(65536)
                    if not chunk:
                        return b"".join(chunks).decode("utf-8", "replace")
                    chunks.append(chunk)
        except OSError as exc:
            raise GateDown(
                f"the gate of engine '{self.engine}' on host {socket.gethostname()} gives no answer on {path}: {exc}",
                next_step="systemctl status vllm-gate.service; start it and run this again",
            ) from exc


def _number(row: t.Mapping[str, str], key: str) -> int:
    try:
        return int(row[key] or 0)
    except (KeyError, ValueError) as exc:
        raise Surprise(f"the gate's 'show stat' has no number {key} for {row.get('pxname')}") from exc
