# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A fleet's own HAProxy, as docs/admission.md has it, told by the library over its runtime sockets, under requests."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import (
    admission,
    capacity,
    config,
    script,
    store,
)
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.balancer import BalancerDown
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import Surprise
from ansible_collections.baremetal.vllm.tests.integration.test_gate import (
    Engine,
    HAProxy,
    Stream,
    clients,
    free_ports,
    request,
    wait_for,
)

GUIDE = Path(__file__).parents[2] / "docs/admission.md"
UNUSED = dict.fromkeys(("user", "config_file", "env_file", "socket", "runtime", "runtime_version", "model"), "")
TIMES = dict.fromkeys(("router_detection", "drain_timeout", "shutdown_timeout", "stop_timeout", "start_timeout"), 1.0)


@pytest.fixture
def home(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="adm-", dir="/tmp") as place:  # short: a socket's path is
        monkeypatch.setenv(store.ROOT_VARIABLE, place)
        yield Path(place)


@pytest.fixture
def engines(home):
    made = {}
    for name in ("one", "two"):
        (home / name / "chat").mkdir(parents=True)
        made[name] = Engine(home / name / "chat/engine.sock")
    yield made
    for engine in made.values():
        engine.close()


def guide() -> str:
    """The configuration that the guide shows."""
    return re.search(r"```haproxy\n(.*?)```", GUIDE.read_text(), re.S)[1]


class Central(HAProxy):
    """The guide's configuration, with this test's addresses and paths."""

    def __init__(self, home: Path, engines, remembers: bool) -> None:
        super().__init__(home)
        self.port, self.admin = free_ports(2)
        text = guide()
        for old, new in (
            ("ipv4@10.0.0.2:9999", f"ipv4@127.0.0.1:{self.admin}"),
            ("/run/haproxy/admin.sock mode 660", f"{home}/admin.sock mode 600"),
            ("/var/lib/haproxy/state", f"{home}/state"),
            ("bind :8000", f"bind 127.0.0.1:{self.port}"),
            ("server gpu1 10.0.0.11:8001", f"server gpu1 unix@{engines['one'].path}"),
            ("server gpu2 10.0.0.12:8001", f"server gpu2 unix@{engines['two'].path}"),
            ("inter 1s", "inter 100ms"),
        ):
            assert old in text, f"the guide does not have {old}"
            text = text.replace(old, new)
        if not remembers:
            text = text.replace("load-server-state-from-file global", "")
        (home / "haproxy.cfg").write_text(text)

    def start(self) -> None:
        super().start()
        wait_for(lambda: self.answers("gpu1") and self.answers("gpu2"))

    def answers(self, server: str) -> bool:
        return self.stat("chat", server)["check_status"] == "L7OK"

    def save(self) -> None:
        """What the guide lets its unit do before a reload."""
        (self.home / "state").write_text(self.ask("show servers state", "admin.sock"))


@pytest.fixture
def central(home, engines):
    with contextlib.ExitStack() as stack:

        def build(remembers=True):
            haproxy = Central(home, engines, remembers)
            stack.callback(haproxy.close)
            haproxy.start()
            return haproxy

        yield build


def door(haproxy: Central, name: str, tcp: bool = False):
    """The library's side of engine ``one`` or ``two``."""
    return chosen(
        name,
        config.AdmissionConfig(
            "haproxy",
            sockets=[f"127.0.0.1:{haproxy.admin}" if tcp else f"{haproxy.home}/admin.sock"],
            proxy="chat",
            server={"one": "gpu1", "two": "gpu2"}[name],
            timeout=5.0,
        ),
    )


def chosen(name: str, declared: config.AdmissionConfig):
    engine = config.EngineConfig(
        engine=name, unit="", served_model_name="", gate=None, config_digest="", admission=declared, **UNUSED, **TIMES
    )
    made = admission.choose(engine)
    (store.state_dir(name)).mkdir(parents=True, exist_ok=True)
    (store.state_dir(name) / "ready.json").write_text('{"main_pid": 1}')  # a proved start
    return made


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "TCP"])
def test_the_words_are_what_clients_see(central, engines, tcp):
    haproxy = central()
    one = door(haproxy, "one", tcp)
    assert one.observe().ready
    for word, answering in (("withdrawn", {"two"}), ("closed", {"two"}), ("open", {"one", "two"})):
        one.set("admission", word)
        seen = one.observe()
        assert (seen.admission, seen.told, seen.ready) == (word, "", word == "open")
        wait_for(lambda answering=answering: ask_all(haproxy) == answering)
    endpoint = f"haproxy://127.0.0.1:{haproxy.admin}/chat/gpu1"
    assert capacity.ask(endpoint) == capacity.Answer(True)
    one.set("admission", "withdrawn")
    assert (found := capacity.ask(endpoint)).serves is False
    assert found.why.endswith("has it withdrawn")
    one.set("admission", "open")
    engines["one"].stop()
    wait_for(lambda: not one.observe().ready)
    assert (found := capacity.ask(endpoint)).serves is False
    assert found.why.endswith("has it down")


def ask_all(haproxy: Central) -> set[str]:
    return {request(haproxy.port, "/v1/models").json()["engine"] for _unused in range(6)}


def test_a_stream_is_counted_and_goes_on(central, engines):
    haproxy = central()
    stream = Stream(haproxy.port, chunks=30, gap=0.1)
    busy = "one" if engines["one"].running else "two"
    busy_door = door(haproxy, busy)
    assert busy_door.observe().sessions == 1
    for word in ("withdrawn", "closed"):
        busy_door.set("admission", word)
        assert (busy_door.observe().sessions, engines[busy].running) == (1, 1)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", haproxy.port, timeout=10)) as kept:
        for _unused in range(4):
            assert request(0, "/v1/models", connection=kept).json()["engine"] != busy
    assert stream.whole()
    wait_for(lambda: busy_door.observe().sessions == 0)


def test_nothing_is_lost_while_engines_change_and_the_balancer_reloads(central, engines):
    haproxy = central()
    with clients(haproxy.port) as (kept, broken):
        for name in ("one", "two"):
            one, engine = door(haproxy, name), engines[name]
            one.set("admission", "withdrawn")
            wait_for(lambda one=one, engine=engine: one.observe().sessions == 0 and engine.running == 0)
            one.set("admission", "closed")
            before = len(engine.calls)
            haproxy.save()
            haproxy.reload()
            wait_for(lambda: "gpu1" in haproxy.ask("show servers state", "admin.sock"))
            assert one.observe().admission == "closed", "the state file outlives a reload"
            engine.stop()
            time.sleep(0.3)
            engine.start()
            assert len(engine.calls) == before
            one.set("admission", "open")
            wait_for(lambda engine=engine, before=before: len(engine.calls) > before)
    assert broken == []
    assert len(kept) > 40


def test_a_reload_without_a_state_file_forgets_and_is_told_again(central, engines):
    haproxy = central(remembers=False)
    one = door(haproxy, "one")
    one.set("admission", "closed")
    haproxy.reload()
    wait_for(lambda: one.observe().forgot)
    assert "a reload or restart has forgotten that" in one.observe().differs
    assert "one" in ask_all(haproxy)
    assert one.remind()
    wait_for(lambda: ask_all(haproxy) == {"two"})
    assert not one.remind()
    assert one.observe().admission == "closed"


def test_a_balancer_that_stands_still_is_a_doubt_and_not_0_sessions(central):
    haproxy = central()
    one = door(haproxy, "one", tcp=True)
    workers = haproxy.workers()
    haproxy.process.send_signal(signal.SIGSTOP)
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(BalancerDown, match="gives no answer"):
            one.observe()
        with pytest.raises(BalancerDown, match="gives no answer"):
            one.set("admission", "withdrawn")
    finally:
        for pid in [*workers, haproxy.process.pid]:
            os.kill(pid, signal.SIGCONT)
    # What it was to be is written down, and by now HAProxy has heard it, or is reminded.
    one.remind()
    assert one.observe().admission == "withdrawn"


STUBS = {
    "ssh": '[ "$1 $3 $5" = "-o -o root@lb1" ] || exit 9; [ ! -e HOME/gone ] || exit 255; shift 5; exec sh -c "$*"',
    "nginx": '[ "$1" != -T ] || cat HOME/engines/*.conf; [ ! -e HOME/frozen ] || exit 1; echo "$@" >> HOME/nginx',
    "ss": '[ "$5" = 10.0.0.11:8001 ] && cat HOME/connections',
}


def test_the_guides_command_keeps_the_contract(home, monkeypatch):
    """Real shell, and stand-ins for ssh, nginx and ss."""
    text = re.search(r"```sh\n(.*?)```", GUIDE.read_text(), re.S)[1].replace("/etc/nginx/engines", f"{home}/engines")
    (home / "bin").mkdir()
    (home / "engines").mkdir()
    (home / "connections").write_text("one\ntwo\n")
    for name, body in {**STUBS, "nginx-admission": text}.items():
        path = home / "bin" / name
        path.write_text(f"#!/bin/sh\n{body.replace('HOME', str(home))}\n")
        path.chmod(0o755)
    monkeypatch.setitem(script.ENVIRONMENT, "PATH", f"{home}/bin:/usr/bin:/bin:/usr/sbin:/sbin")
    command = [f"{home}/bin/nginx-admission", "lb1", "10.0.0.11:8001"]
    one = chosen("chat", config.AdmissionConfig("command", command=command, timeout=20.0))
    one.set("admission", "open")
    for word in ("withdrawn", "closed", "open"):
        one.set("admission", word)
        seen = one.observe()
        assert (seen.admission, seen.sessions, seen.told) == (word, 2, "")
        server = (home / "engines/chat-10.0.0.11:8001.conf").read_text()
        assert server.startswith("server 10.0.0.11:8001 ") and (" down;" in server) == (word != "open")
    assert (home / "nginx").read_text().splitlines().count("-s reload") == 4
    (home / "connections").write_text("")
    assert one.observe().sessions == 0
    (home / "connections").unlink()
    with pytest.raises(Surprise, match="sessions"):
        one.observe()
    (home / "connections").write_text("")
    (home / "frozen").touch()
    with pytest.raises(Surprise, match="ended with 1"):
        one.set("admission", "withdrawn")
    (home / "frozen").unlink()
    (home / "gone").touch()
    with pytest.raises(BalancerDown, match="ended with 3"):
        one.observe()
