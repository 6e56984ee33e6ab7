# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Balancers that are not ours, before the engine of a simulated host: real HAProxies, and an operator's command."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import store
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import HAPROXY, Gate, free_port, wait_for

CONFIG = """
global
    stats socket {socket} mode 600 level {level}
    stats socket ipv4@127.0.0.1:{admin} level {level}
    hard-stop-after 60s
defaults
    mode http
    timeout connect 2s
    timeout client 60s
    timeout server 60s
    option http-server-close
    http-reuse never
frontend front
    bind 127.0.0.1:{port}
    default_backend pool_chat
backend pool_chat
    option httpchk GET /health
    http-check expect status 200
    server host1 unix@{engine} check inter 100ms fall 1 rise 1
"""
# What an operator might write: it speaks to the first HAProxy. "mode" has what is wrong with it.
COMMAND = """
import json, pathlib, socket, sys, time
here = pathlib.Path(__file__).parent
mode = (here / "mode").read_text()
verb, engine = sys.argv[-2:]
assert engine == "chat", sys.argv
with (here / "calls").open("a") as calls:
    calls.write(verb + "\\n")
def ask(text):
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(here / "one.sock"))
        except OSError as exc:
            sys.stderr.write(f"no answer: {exc}")
            sys.exit(3)
        client.sendall(text.encode() + b"\\n")
        return b"".join(iter(lambda: client.recv(65536), b"")).decode()
if mode == "hang":
    time.sleep(60)
if mode == "refuses" and verb in ("withdraw", "close", "admit"):
    sys.exit("the balancer is frozen by its owner")
if mode == "no JSON" and verb in ("status", "sessions"):
    sys.exit(print("fine"))
told = here / "told"
if verb in ("withdraw", "close", "admit"):
    state = {"withdraw": "drain", "close": "maint", "admit": "ready"}[verb]
    told.write_text({"withdraw": "withdrawn", "close": "closed", "admit": "open"}[verb])
    if mode != "lies":
        assert not ask("set server pool_chat/host1 state " + state).strip()
elif mode == "lies":
    word = told.read_text() if told.exists() else "open"
    print(json.dumps({"sessions": 0} if verb == "sessions" else {"admission": word}))
elif verb == "status":
    row = ask("show servers state pool_chat").splitlines()[2].split()
    flags = int(row[6])
    word = "closed" if flags & 1 else "withdrawn" if flags & 8 else "open"
    print(json.dumps({"admission": word, "up": row[5] != "0"}))
else:
    lines = ask("show stat pool_chat 4 -1").splitlines()
    row = next(line for line in lines if line.startswith("pool_chat,")).split(",")
    print(json.dumps({"sessions": int(row[2]) + int(row[4]), "total": int(row[7])}))
"""


class Central(Gate):
    """A fleet's own HAProxy: what a gate's clients do, they do here."""

    def __init__(self, root: Path, name: str, engine: Path, level: str = "admin") -> None:
        self.root = root
        self.ports = {"chat": free_port()}
        self.socket = root / f"{name}.sock"
        self.admin = free_port()
        self.file = root / f"{name}.cfg"
        self.process: subprocess.Popen[bytes] | None = None
        self.level = level
        self.engine = engine

    def start(self) -> None:
        self.file.write_text(
            CONFIG.format(
                socket=self.socket, level=self.level, admin=self.admin, port=self.ports["chat"], engine=self.engine
            )
        )
        with self.file.with_suffix(".log").open("ab") as log:
            self.process = subprocess.Popen(
                [HAPROXY, "-f", str(self.file), "-db"], stdout=log, stderr=log, start_new_session=True
            )
        wait_for(lambda: self.process.poll() is not None or self._answers(), "HAProxy's runtime socket")

    def _answers(self) -> bool:
        try:
            return bool(self.ask("show info"))
        except OSError:
            return False

    def ask(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self.socket))
            client.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: client.recv(65536), b"")).decode()

    def restart(self) -> None:
        """Forgets all that it was told."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.start()

    def state(self) -> str:
        """Of the server, by HAProxy's own means: ready, drain or maint."""
        flags = int(self.ask("show servers state pool_chat").splitlines()[2].split()[6])
        return "maint" if flags & 1 else "drain" if flags & 8 else "ready"

    def sends(self) -> bool:
        """Whether a client's request gets an answer of the engine."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.ports["chat"], timeout=60)) as connection:
            connection.request("GET", "/v1/models")
            return connection.getresponse().status == 200


class Front:
    """All that stands before the engine ``chat``. ``first`` is where clients come."""

    def __init__(self, host, backend: str, **more) -> None:
        self.host = host
        self.backend = backend
        self.place = host.root / "balancer"
        self.place.mkdir()
        self.all: list[Central] = []
        if backend != "gate":
            names = ("one", "two") if backend == "haproxies" else ("one",)
            engine = host.chat.socket
            self.all = [Central(self.place, name, engine, more.get("level", "admin")) for name in names]
            host.change("etc/vllm/lifecycle/chat.json", admission=self.declaration())
        self.first = self.all[0] if self.all else host.gate

    def declaration(self) -> dict:
        if self.backend == "none":
            return {"backend": "none"}
        if self.backend == "command":
            self.mode("")
            script = self.place / "balance"
            script.write_text(f"#!{sys.executable} -IS\n{COMMAND}")
            script.chmod(0o755)
            return {"backend": "command", "command": [str(script), "--pool", "chat"], "timeout": 60.0}
        sockets = [str(self.all[0].socket), *(f"127.0.0.1:{one.admin}" for one in self.all[1:])]
        return {"backend": "haproxy", "sockets": sockets, "proxy": "pool_chat", "server": "host1", "timeout": 20.0}

    def declare(self, **changes) -> None:
        self.host.change("etc/vllm/lifecycle/chat.json", admission={**self.declaration(), **changes})

    def declared(self) -> dict:
        return json.loads((self.host.root / "etc/vllm/lifecycle/chat.json").read_text())["admission"]

    def mode(self, what: str) -> None:
        """What is wrong with the command from now on."""
        (self.place / "mode").write_text(what)

    def start(self) -> None:
        for one in self.all:
            one.start()
        self.host.start()
        wait_for(self.serves, "the first answer to a client")

    def close(self) -> None:
        for one in self.all:
            one.close()

    def serves(self) -> bool:
        """Whether all of them send requests to the engine, as a client sees it."""
        if self.backend == "gate":
            return self.first.ready("chat") == 200
        return all(one.sends() for one in self.all)

    def word(self) -> str:
        """What is told to clients' requests, by the balancer's own means."""
        if self.backend == "gate":
            stored = self.first.stored("chat")
            return stored["admission"] if stored["proved"] == "1" else "withdrawn"
        words = {{"ready": "open", "drain": "withdrawn", "maint": "closed"}[one.state()] for one in self.all}
        assert len(words) == 1, words
        return words.pop()


def recorded(engine: str = "chat") -> dict:
    return store.read_json(store.state_dir(engine) / "admission.json") or {}


def calls(front: Front) -> list[str]:
    path = front.place / "calls"
    return path.read_text().split() if path.exists() else []
