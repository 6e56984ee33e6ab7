# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The routers of docs/examples, as they stand but for addresses, before real gates. Only the engine is a stand-in."""

from __future__ import annotations

import contextlib
import grp
import http.client
import os
import pwd
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.tests.integration import test_gate
from ansible_collections.baremetal.vllm.tests.integration.test_gate import (
    HAPROXY,
    Stream,
    free_ports,
    refused,
    request,
    wait_for,
)

# Fixtures.
engines, homes, ports, start = test_gate.engines, test_gate.homes, test_gate.ports, test_gate.start


EXAMPLES = Path(__file__).parents[2] / "docs/examples"
NGINX = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")
DETECTION = 3.0  # inter * fall + timeout check of the HAProxy example, and vllm_router_detection by its defaults
CONTENT = 256 * 1024  # above what the examples keep in memory
NGINX_CONF = """
{user}
daemon off;
worker_processes 2;
pid {home}/pid;
error_log {home}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {home}/body;
    proxy_temp_path {home}/proxy;
    fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi;
    scgi_temp_path {home}/scgi;
    include {home}/conf.d/vllm.conf;
}}
"""


class Proxy:
    """An example, running."""

    def __init__(self, argv: list[str], port: int, log: Path) -> None:
        self.port = port
        with log.open("ab") as output:
            self.process = subprocess.Popen(argv, stdout=output, stderr=output)
        try:
            wait_for(lambda: self.process.poll() is not None or not refused(port))
            assert self.process.poll() is None, log.read_text()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(10)


def replaced(text: str, changes: dict[str, str]) -> str:
    """Each of them stands in the example."""
    for old, new in changes.items():
        assert old in text, f"the example no longer has {old}"
        text = text.replace(old, new)
    return text


@pytest.fixture
def haproxy_example(tmp_path):
    """`haproxy_example(port, port)` starts the HAProxy of the examples before two gates."""
    with contextlib.ExitStack() as stack:

        def begin(one: int, two: int) -> Proxy:
            (port,) = free_ports(1)
            changes = {
                "user haproxy": f"user {pwd.getpwuid(os.getuid()).pw_name}",
                "group haproxy": f"group {grp.getgrgid(os.getgid()).gr_name}",
                "bind :8000": f"bind 127.0.0.1:{port}",
                "192.0.2.11:8001": f"127.0.0.1:{one}",
                "192.0.2.12:8001": f"127.0.0.1:{two}",
            }
            config = tmp_path / "haproxy.cfg"
            config.write_text(replaced((EXAMPLES / "haproxy.cfg").read_text(), changes))
            check = subprocess.run([HAPROXY, "-c", "-f", str(config)], capture_output=True, text=True, check=False)
            assert (check.returncode, "WARNING" in check.stderr) == (0, False), check.stderr
            proxy = Proxy([HAPROXY, "-f", str(config)], port, tmp_path / "haproxy.log")
            stack.callback(proxy.close)
            return proxy

        yield begin


@pytest.fixture
def nginx_example(tmp_path):
    """`nginx_example(port, port)` starts the nginx of the examples before two servers."""
    assert NGINX, "nginx is missing; `make deps` installs it"
    with contextlib.ExitStack() as stack:

        def begin(one: int, two: int) -> Proxy:
            (port,) = free_ports(1)
            changes = {
                "listen 80;": f"listen 127.0.0.1:{port};",
                "192.0.2.21:8000": f"127.0.0.1:{one}",
                "192.0.2.22:8000": f"127.0.0.1:{two}",
            }
            (tmp_path / "conf.d").mkdir()
            text = replaced((EXAMPLES / "nginx.conf").read_text(), changes)
            (tmp_path / "conf.d/vllm.conf").write_text(text)
            user = "user root;" if os.geteuid() == 0 else ""
            (tmp_path / "nginx.conf").write_text(NGINX_CONF.format(home=tmp_path, user=user))
            argv = [NGINX, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"), "-e", str(tmp_path / "error.log")]
            check = subprocess.run([*argv, "-t"], capture_output=True, text=True, check=False)
            assert (check.returncode, "[warn]" in check.stderr) == (0, False), check.stderr
            proxy = Proxy(argv, port, tmp_path / "nginx.log")
            stack.callback(proxy.close)
            return proxy

        yield begin


@pytest.fixture
def gates(engines, start):
    both = {name: start(name) for name in ("one", "two")}
    for gate in both.values():
        wait_for(lambda gate=gate: gate.stat("engine_chat", "engine")["check_status"] == "L7OK")
    return both


@pytest.fixture
def router(gates, start):
    """The router of the role, before both gates."""
    haproxy = start("router")
    for name in gates:
        wait_for(lambda name=name: haproxy.stat("pool_engines", name)["check_status"] == "L7OK")
    return haproxy


class Clients:
    """Asks again and again, on kept connections, and keeps what was not answered in full."""

    def __init__(self, port: int, count: int = 4) -> None:
        self.port = port
        self.over = threading.Event()
        self.answered = 0
        self.broken: list[str] = []
        self.threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(count)]

    def _ask(self, number: int) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as kept:
            while not self.over.is_set():
                chunks = 1 + (number + self.answered) % 5
                try:
                    answer = request(0, "/v1/stream", {"chunks": chunks, "gap": 0.02}, connection=kept)
                except (OSError, http.client.HTTPException) as error:
                    self.broken.append(repr(error))
                    kept.close()
                    continue
                if answer.status == 200 and answer.body.count(b"data: ") == chunks:
                    self.answered += 1
                else:
                    self.broken.append(f"{answer.status} {answer.body!r}")

    def __enter__(self) -> Clients:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join()


def follows_ready(port: int, gates: dict, engines: dict) -> None:
    """Under load: an engine that was withdrawn gets nothing new after the detection time, and what it has goes on."""
    with Clients(port) as clients:
        wait_for(lambda: all(engine.calls for engine in engines.values()))
        for name, engine in engines.items():
            streams = [Stream(port, chunks=60, gap=0.1) for _unused in range(4)]
            wait_for(lambda engine=engine: engine.running > 0)
            gates[name].set(admission="withdrawn")
            time.sleep(DETECTION)
            before, still = len(engine.calls), engine.running
            time.sleep(0.5)
            assert len(engine.calls) == before  # nothing new
            assert still > 0  # a stream was under way all the time
            assert all(stream.whole() for stream in streams)
            wait_for(lambda engine=engine: engine.running == 0)
            gates[name].set(admission="closed")
            gates[name].set(admission="open")
            wait_for(lambda engine=engine, before=before: len(engine.calls) > before, DETECTION)
    assert clients.broken == []
    assert clients.answered > 50
    assert [engine.aborted for engine in engines.values()] == [0, 0]


def arrives_in_parts(port: int) -> None:
    stream = Stream(port, chunks=8, gap=0.1)
    assert stream.whole()
    gaps = sorted(after - before for before, after in zip(stream.arrivals, stream.arrivals[1:]))
    assert gaps[len(gaps) // 2] > 0.05  # buffered parts would come together; on a busy machine a few do


def gone_client_ends_its_request(port: int, engines: dict) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/v1/slow", '{"chunks": 1, "gap": 8}')
    wait_for(lambda: sum(engine.running for engine in engines.values()) == 1)
    connection.close()
    wait_for(lambda: sum(engine.aborted for engine in engines.values()) == 1)


def test_haproxy_follows_ready_and_cuts_nothing(haproxy_example, gates, engines, ports):
    proxy = haproxy_example(ports["one"], ports["two"])
    arrives_in_parts(proxy.port)
    follows_ready(proxy.port, gates, engines)


def test_haproxy_sends_again_what_was_refused(haproxy_example, gates, engines, ports):
    proxy = haproxy_example(ports["one"], ports["two"])
    gates["one"].set(admission="closed")
    for size in (10, 100_000):  # at once: the router has not noticed yet
        answer = request(proxy.port, "/v1/completions", {"prompt": "x" * size})
        assert (answer.status, answer.json()["engine"]) == (200, "two")
    gates["one"].stop()
    assert request(proxy.port, "/v1/completions", {"prompt": "x" * CONTENT}).json()["engine"] == "two"
    gone_client_ends_its_request(proxy.port, engines)


def test_nginx_before_the_router_cuts_nothing(nginx_example, router, gates, engines, ports):
    """The second router is not there, which costs nobody a request."""
    proxy = nginx_example(ports["router"], free_ports(1)[0])
    arrives_in_parts(proxy.port)
    follows_ready(proxy.port, gates, engines)
    assert request(proxy.port, "/v1/completions", {"prompt": "x" * CONTENT}).json()["size"] > CONTENT
    gone_client_ends_its_request(proxy.port, engines)


def test_nginx_before_gates_tries_elsewhere_what_was_refused(nginx_example, gates, engines, ports):
    proxy = nginx_example(ports["one"], ports["two"])
    arrives_in_parts(proxy.port)
    with Clients(proxy.port) as clients:
        wait_for(lambda: all(engine.calls for engine in engines.values()))
        for name, engine in engines.items():
            stream = Stream(proxy.port, chunks=30, gap=0.1)
            gates[name].set(admission="closed")
            wait_for(lambda engine=engine: engine.running <= 1)
            before = len(engine.calls)
            time.sleep(1.5)  # beyond fail_timeout: tried again, refused again, and passed on again
            assert len(engine.calls) == before
            assert stream.whole()
            gates[name].stop()
            time.sleep(0.5)
            gates[name].start()
            gates[name].set(admission="open")
            wait_for(lambda engine=engine, before=before: len(engine.calls) > before)
    assert clients.broken == []
    assert clients.answered > 50
    assert request(proxy.port, "/v1/completions", {"prompt": "x" * CONTENT}).json()["size"] > CONTENT


def test_nginx_before_gates_does_not_see_a_withdrawal(nginx_example, gates, engines, ports):
    """What docs/routers.md warns of: /ready says 503, and nobody asks it."""
    proxy = nginx_example(ports["one"], ports["two"])
    gates["one"].set(admission="withdrawn")
    time.sleep(DETECTION)
    before = len(engines["one"].calls)
    for _unused in range(6):
        assert request(proxy.port, "/v1/models").status == 200
    assert len(engines["one"].calls) > before


def test_examples_say_the_detection_time_that_they_have():
    text = (EXAMPLES / "haproxy.cfg").read_text()
    inter, fall = (float(re.search(rf"\b{word} (\d+)", text)[1]) for word in ("inter", "fall"))
    assert inter * fall + float(re.search(r"timeout check (\d+)s", text)[1]) == DETECTION
