"""Gate and router as the roles write them, with a real HAProxy between real sockets. Only the engine is a stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import grp
import http.client
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

ROLES = Path(__file__).parents[2] / "roles"
HAPROXY = shutil.which("haproxy", path=os.environ["PATH"] + ":/usr/sbin")
OPERATOR_PATHS = yaml.safe_load((ROLES / "vllm_gate/vars/main.yml").read_text())["__vllm_gate_operator_paths"]
TRICKS = [
    "/",
    "*",
    "sleep",
    "//sleep",
    "//v1/../sleep",
    "/v1/../sleep",
    "/v1/./../sleep",
    "/v1/%2e%2e/sleep",
    "/v1/%2E%2E/sleep",
    "/v1/..%2fsleep",
    "/v1/..%5csleep",
    "/v1\\..\\sleep",
    "/v1/..\\sleep",
    "/%2e%2e/sleep",
    "/%73leep",
    "/sleep%3f",
    "/sleep?/v1/",
    "/sleep?x=/v1/models",
    "/sleep#/v1/models",
    "/sleep;/v1/models",
    "/v1/;/../sleep",
    "/v1/..;/sleep",
    "/V1/models",
    "/SLEEP",
    "/v1",
    "/v1%2fmodels",
    "/v1/%00/../../sleep",
    "/v1//../sleep",
    "/health/../sleep",
    "/health%2f..%2fsleep",
    "/healthy",
    "/v1/load_lora_adapter",
    "/v1/load%5flora_adapter",
    "/v1//load_lora_adapter",
    "http://engine/sleep",
    "http://engine/v1/models",
    "http://engine/v1/../sleep",
    "http://engine/v1/@engine/../sleep",
    "http:///v1/models",
    "/ready/../sleep",
    "/ready%2f..%2fsleep",
]
DETECTION = 3.0  # vllm_router_detection by its defaults: an interval of 1 s and a time-out of 2 s
PLAY = """
- hosts: localhost
  gather_facts: false
  vars_files: [{roles}/{role}/defaults/main.yml, {roles}/{role}/vars/main.yml]
  tasks:
    - ansible.builtin.template: {{src: "{roles}/{role}/templates/haproxy.cfg.j2", dest: "{{{{ item.dest }}}}"}}
      loop: {cases}
      vars: {vars}
"""


def wait_for(look, seconds: float = 5.0):
    """The first true value of look(), which is asked until then."""
    end = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.02)
    return value


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _unused in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]


class Engine:
    """Answers on a Unix socket, decodes paths like a real one, and keeps account of what it was asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.calls: list[str] = []
        self.running = self.aborted = 0
        self.server: asyncio.Server | None = None
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.start()

    def _do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def start(self) -> None:
        async def start():
            self.server = await asyncio.start_unix_server(self._serve, self.path)
            os.chmod(self.path, 0o770)

        self._do(start())

    def stop(self) -> None:
        async def stop():
            self.server.close()
            self.path.unlink(missing_ok=True)

        self._do(stop())

    def close(self) -> None:
        async def cancel():
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.stop()
        self._do(cancel())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                target = head.split(b" ", 2)[1].decode("latin-1")
                length = re.search(rb"(?im)^content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                await self._answer(target, body, reader, writer)
                if b"\r\nconnection: close" in head.lower():
                    return
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    async def _answer(self, target: str, body: bytes, reader, writer) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(target).path)
        if path != "/health":
            self.calls.append(path)
        if path in ("/v1/stream", "/v1/slow"):
            self.running += 1
            try:
                await self._generate(path, json.loads(body), reader, writer)
            finally:
                self.running -= 1
            return
        text = json.dumps({"engine": self.path.parent.parent.name, "size": len(body)})
        if path == "/metrics":
            text = "vllm:num_requests_running 0\n"
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        await writer.drain()

    async def _generate(self, path: str, wish: dict, reader, writer) -> None:
        left = asyncio.ensure_future(reader.read(1))  # ends when the other side has gone
        if path == "/v1/stream":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in range(wish["chunks"]):
            done, _unused = await asyncio.wait({left}, timeout=wish["gap"])
            if done:
                self.aborted += 1
                raise ConnectionError
            if path == "/v1/stream":
                part = f"data: {number}\n\n".encode()
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
        writer.write(b"0\r\n\r\n" if path == "/v1/stream" else b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        left.cancel()


class HAProxy:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.maps = home / "maps"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        argv = [HAPROXY, "-W", "-f", str(self.home / "haproxy.cfg"), "-S", f"{self.home}/master.sock,mode,600"]
        with (self.home / "log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log)
        wait_for(self.workers)

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        workers = self.workers() + self.workers(old=True)
        self.process.send_signal(how)
        self.process.wait(10)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))

    def close(self) -> None:
        if self.process and self.process.poll() is None:
            self.stop()

    def ask(self, command: str, sock: str = "master.sock") -> str:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            client.connect(str(self.home / sock))
            client.sendall(f"{command}\n".encode())
            client.shutdown(socket.SHUT_WR)  # the master's socket would stay open for a next command
            return b"".join(iter(lambda: client.recv(65536), b"")).decode()

    def workers(self, old: bool = False) -> list[int]:
        try:
            now, _unused, before = self.ask("show proc").partition("# old workers")
        except OSError:
            return []
        return [int(pid) for pid in re.findall(r"(?m)^(\d+)\s+worker", before if old else now)]

    def reload(self) -> None:
        before = self.workers()
        self.process.send_signal(signal.SIGUSR2)
        wait_for(lambda: (now := self.workers()) and now != before)

    def stat(self, proxy: str, name: str, worker: str = "@1") -> dict[str, str]:
        lines = [line for line in self.ask(f"{worker} show stat").splitlines() if line]
        names = lines[0].removeprefix("# ").split(",")
        rows = [dict(zip(names, line.split(","))) for line in lines[1:]]
        return next(row for row in rows if (row["pxname"], row["svname"]) == (proxy, name))

    def set(self, engine: str = "chat", **values: str) -> None:
        """As whoever drains does it: the file, then every worker, then again if a reload came in between."""
        path = self.maps / f"{engine}.map"
        kept = dict(line.split() for line in path.read_text().splitlines()) | values
        path.with_suffix(".new").write_text("".join(f"{key} {value}\n" for key, value in kept.items()))
        path.with_suffix(".new").rename(path)
        for key, value in values.items():
            wait_for(lambda key=key, value=value: self.told(path, key, value))

    def told(self, path: Path, key: str, value: str) -> bool:
        """Not, when a reload has cut the conversation short."""
        with contextlib.suppress(OSError):
            self.ask(f"@1 set map {path} {key} {value}")
            return re.search(rf" {key} {value}$", self.ask(f"@1 show map {path}"), re.M) is not None
        return False


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    def json(self):
        return json.loads(self.body)


def request(port: int, path: str, body=None, connection: http.client.HTTPConnection | None = None) -> Answer:
    once = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        once.request("POST" if body is not None else "GET", path, json.dumps(body) if body is not None else None)
        return Answer(once.getresponse())
    finally:
        if connection is None:
            once.close()


def raw(port: int, text: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(text.encode("latin-1"))
        return b"".join(iter(lambda: client.recv(65536), b""))


class Stream:
    """One streaming request in a thread: when each part came, and whether all came."""

    def __init__(self, port: int, chunks: int, gap: float) -> None:
        self.chunks, self.arrivals, self.error = chunks, [], None
        self.port, self.gap = port, gap
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        wait_for(lambda: self.arrivals or self.error)

    def _run(self) -> None:
        try:
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
                connection.request("POST", "/v1/stream", json.dumps({"chunks": self.chunks, "gap": self.gap}))
                response = connection.getresponse()
                for line in response:
                    if line.startswith(b"data: "):
                        self.arrivals.append(time.monotonic())
        except Exception as error:  # noqa: BLE001 - shown by whole()
            self.error = error

    def whole(self) -> bool:
        self.thread.join(20)
        assert self.error is None
        return len(self.arrivals) == self.chunks


@pytest.fixture(scope="session")
def ports() -> dict[str, int]:
    names = ["one", "two", "one_metrics", "two_metrics", "router"]
    return dict(zip(names, free_ports(len(names))))


@pytest.fixture(scope="session")
def homes(ports):
    """Directories with rendered configurations: gates "one" and "two", a gate "bare" without metrics, and "router"."""
    top = Path(tempfile.mkdtemp(prefix="gate-", dir="/tmp"))  # short: a socket's path has 107 characters at most
    top.chmod(0o755)
    ours = {"user": pwd.getpwuid(os.getuid()).pw_name, "group": grp.getgrgid(os.getgid()).gr_name}
    gates = {"one": ["127.0.0.0/8"], "two": ["192.0.2.0/24"], "bare": []}
    for name in [*gates, "router"]:
        (top / name / "maps").mkdir(parents=True)
        (top / name / "chat").mkdir()
    roles = {
        "vllm_gate": [
            {
                "dest": f"{top}/{name}/haproxy.cfg",
                "home": f"{top}/{name}",
                "port": ports.get(name, 1),
                "metrics_port": ports.get(f"{name}_metrics", 1),
                "sources": sources,
            }
            for name, sources in gates.items()
        ],
        "vllm_router": [{"dest": f"{top}/router/haproxy.cfg", "home": f"{top}/router", "port": ports["router"]}],
    }
    settings = {
        "vllm_gate": {
            "vllm_gate_engines": [{"name": "chat", "port": "{{ item.port }}"}],
            "vllm_gate_metrics_port": "{{ item.metrics_port }}",
            "vllm_gate_metrics_sources": "{{ item.sources }}",
            "__vllm_gate_map_dir": "{{ item.home }}/maps",
            "__vllm_gate_socket_dir": "{{ item.home }}",
        },
        "vllm_router": {
            "vllm_router_pools": [
                {
                    "name": "engines",
                    "port": "{{ item.port }}",
                    "servers": [{"name": name, "address": "127.0.0.1", "port": ports[name]} for name in ("one", "two")],
                }
            ]
        },
    }
    plays = ""
    for role, cases in roles.items():
        values = settings[role] | {
            f"{role}_address": "127.0.0.1",
            f"{role}_user": ours["user"],
            f"{role}_group": ours["group"],
            f"{role}_maxconn": 500,
            f"__{role}_runtime_dir": "{{ item.home }}",
            f"__{role}_stamp": "tested",
        }
        plays += PLAY.format(roles=ROLES, role=role, cases=json.dumps(cases), vars=json.dumps(values))
    (top / "render.yml").write_text(plays)
    playbook = [sys.executable, "-m", "ansible", "playbook", "--inventory=localhost,", "--connection=local"]
    argv = [*playbook, f"--extra-vars=ansible_python_interpreter={sys.executable}", f"{top}/render.yml"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    yield {path.name: path for path in top.iterdir() if path.is_dir()}
    shutil.rmtree(top)


@pytest.fixture
def start(homes):
    with contextlib.ExitStack() as stack:

        def start_one(name: str) -> HAProxy:
            if name != "router":
                (homes[name] / "maps/chat.map").write_text("admission open\nproved 1\n")
            haproxy = HAProxy(homes[name])
            stack.callback(haproxy.close)
            haproxy.start()
            return haproxy

        yield start_one


@pytest.fixture
def engines(homes):
    both = {name: Engine(homes[name] / "chat/engine.sock") for name in ("one", "two")}
    yield both
    for engine in both.values():
        engine.close()


@pytest.fixture
def engine(engines) -> Engine:
    return engines["one"]


@pytest.fixture
def gate(engine, start) -> HAProxy:
    haproxy = start("one")
    wait_for(lambda: haproxy.stat("engine_chat", "engine")["check_status"] == "L7OK")
    return haproxy


@pytest.fixture
def fleet(engines, start) -> tuple[HAProxy, dict[str, HAProxy]]:
    gates = {name: start(name) for name in ("one", "two")}
    router = start("router")
    for name in gates:
        wait_for(lambda name=name: router.stat("pool_engines", name)["check_status"] == "L7OK")
    return router, gates


def test_configurations_are_valid_without_a_warning(homes):
    for home in homes.values():
        (home / "maps/chat.map").write_text("admission withdrawn\nproved 0\n")
        done = subprocess.run([HAPROXY, "-c", "-f", home / "haproxy.cfg"], capture_output=True, text=True, check=False)
        assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr


def test_only_listed_paths_reach_the_engine(engine, gate, ports):
    """The engine decodes what it gets, so whatever it could read as another path must end at the gate."""
    for target in [*OPERATOR_PATHS, *TRICKS]:
        for method in ("GET", "POST", "get", "CONNECT"):
            head = "HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            answer = raw(ports["one"], f"{method} {target} {head}")
            assert re.match(rb"HTTP/1.1 40[04] ", answer), f"{method} {target}: {answer!r}"  # 400: no HTTP at all
            if b" 404 " in answer[:13]:
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 404
    assert raw(ports["one"], "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").startswith(b"HTTP/1.1 40")  # HTTP/2 without asking
    assert engine.calls == []
    assert request(ports["one"], "/v1/models?a=%2e%2e/b").status == 200
    assert request(ports["one"], "/v1/responses/resp_1-2.3/cancel", {}).status == 200
    assert request(ports["one"], "/health").status == 200
    assert engine.calls == ["/v1/models", "/v1/responses/resp_1-2.3/cancel"]


def test_ready_is_admitted_and_proved_and_up(engine, gate, ports):
    seen = {}
    for up in ("1", "0"):
        if up == "0":
            engine.stop()
            wait_for(lambda: gate.stat("engine_chat", "engine")["status"] == "DOWN")
        for admission in ("open", "withdrawn", "closed"):
            for proved in ("1", "0"):
                gate.set(admission=admission, proved=proved)
                answer = request(ports["one"], "/ready")
                seen[up, admission, proved] = answer.status
                if answer.status == 503:
                    assert answer.json() == {"ready": False, "admission": admission, "proved": proved, "up": up}
                    assert answer.headers["Retry-After"] == "5"
    assert {key for key, status in seen.items() if status == 200} == {("1", "open", "1")}
    assert set(seen.values()) == {200, 503}


def test_a_missing_key_means_withdrawn_and_not_proved(engine, gate, ports):
    for key in ("admission", "proved"):
        gate.ask(f"@1 del map {gate.maps}/chat.map {key}")
        assert request(ports["one"], "/ready").status == 503
    seen = request(ports["one"], "/ready").json()
    assert seen == {"ready": False, "admission": "withdrawn", "proved": "0", "up": "1"}
    assert request(ports["one"], "/v1/models").status == 200


def test_closed_refuses_and_withdrawn_does_not(engine, gate, ports):
    for proved in ("0", "1"):
        gate.set(admission="withdrawn", proved=proved)
        assert request(ports["one"], "/v1/models").status == 200
    gate.set(admission="closed")
    for path in ("/v1/models", "/health"):
        answer = request(ports["one"], path)
        assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
        assert "chat is closed" in answer.json()["error"]["message"]
    assert request(ports["one"], "/sleep").status == 404
    gate.set(admission="open")
    assert request(ports["one"], "/v1/models").status == 200


def test_without_an_engine_the_answer_says_so_and_when_to_come_back(engine, gate, ports):
    engine.stop()
    for _unused in range(2):  # before and after the gate has noticed
        answer = request(ports["one"], "/v1/models")
        assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
        assert "chat is not running" in answer.json()["error"]["message"]
        wait_for(lambda: gate.stat("engine_chat", "engine")["status"] == "DOWN")
    engine.start()
    wait_for(lambda: request(ports["one"], "/ready").status == 200)


@pytest.mark.parametrize("admission", ["closed", "open"])
def test_admission_outlives_reload_restart_and_crash(engine, gate, ports, admission):
    (gate.maps / "chat.map").write_text("admission withdrawn\nproved 0\n")
    gate.set(admission=admission, proved="1")
    expected = 200 if admission == "open" else 503
    for upset in ("reload", "restart", "crash"):
        if upset == "reload":
            gate.reload()
        else:
            gate.stop(signal.SIGTERM if upset == "restart" else signal.SIGKILL)
            gate.start()
        wait_for(lambda: gate.stat("engine_chat", "engine")["check_status"] == "L7OK")
        assert request(ports["one"], "/v1/models").status == expected, upset
        assert request(ports["one"], "/ready").status == expected, upset


def test_admission_set_in_the_middle_of_a_reload_is_kept(engine, gate, ports):
    """Through the master's socket it reaches the worker to come; through admin.sock it could reach the last one."""
    for number in range(10):
        value = ("closed", "open")[number % 2]
        before = gate.workers()
        gate.process.send_signal(signal.SIGUSR2)
        time.sleep(number / 200)
        gate.set(admission=value)
        wait_for(lambda before=before: (now := gate.workers()) and now != before)
        assert request(ports["one"], "/v1/models").status == (200 if value == "open" else 503)


def test_parts_of_a_stream_arrive_when_they_are_sent(fleet, ports):
    for port in (ports["one"], ports["router"]):
        stream = Stream(port, chunks=8, gap=0.1)
        assert stream.whole()
        gaps = sorted(after - before for before, after in zip(stream.arrivals, stream.arrivals[1:]))
        assert gaps[len(gaps) // 2] > 0.05  # buffered parts would come together; on a busy machine a few do


def test_a_stream_survives_reload_withdraw_and_close(engine, gate, ports):
    stream = Stream(ports["one"], chunks=20, gap=0.1)
    first = gate.workers()[0]
    gate.reload()
    gate.set(admission="withdrawn")
    gate.set(admission="closed")
    # The new worker knows nothing of the stream: who counts sessions asks the old ones too.
    assert gate.workers(old=True) == [first]
    assert gate.stat("engine_chat", "BACKEND")["scur"] == "0"
    assert gate.stat("engine_chat", "BACKEND", worker=f"@!{first}")["scur"] == "1"
    assert request(ports["one"], "/v1/models").status == 503
    assert stream.whole()
    wait_for(lambda: gate.workers(old=True) == [])


def test_a_soft_stop_waits_for_the_stream_and_takes_no_more(engine, gate, ports):
    stream = Stream(ports["one"], chunks=10, gap=0.1)
    gate.process.send_signal(signal.SIGUSR1)  # what the unit's KillSignal is
    wait_for(lambda: refused(ports["one"]))
    assert gate.process.poll() is None
    assert stream.whole()
    assert gate.process.wait(5) in (0, 128 + signal.SIGUSR1, -signal.SIGUSR1)


def refused(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.parametrize("door", ["one", "router"])
def test_a_client_that_has_gone_ends_its_request(fleet, engines, ports, door):
    body = json.dumps({"chunks": 1, "gap": 8})
    with socket.create_connection(("127.0.0.1", ports[door])) as client:
        client.sendall(f"POST /v1/slow HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        wait_for(lambda: sum(engine.running for engine in engines.values()) == 1)
    wait_for(lambda: sum(engine.aborted for engine in engines.values()) == 1)


def test_metrics_are_for_the_monitoring_network_alone(fleet, homes, ports, engines):
    answer = request(ports["one_metrics"], "/metrics/chat")
    assert (answer.status, answer.body) == (200, b"vllm:num_requests_running 0\n")
    for path in ("/metrics", "/metrics/other", "/metrics/chat/", "/metrics/../sleep", "/v1/models", "/sleep"):
        assert request(ports["one_metrics"], path).status == 404
    assert engines["one"].calls == ["/metrics"]
    assert request(ports["two_metrics"], "/metrics/chat").status == 403  # its sources are another network
    assert engines["two"].calls == []
    assert "metrics" not in (homes["bare"] / "haproxy.cfg").read_text()


def test_the_router_follows_ready(fleet, engines, ports):
    router, gates = fleet
    gates["one"].set(admission="withdrawn")
    began = time.monotonic()
    wait_for(lambda: router.stat("pool_engines", "one")["status"] == "DOWN")
    assert time.monotonic() - began < DETECTION
    for _unused in range(10):
        assert request(ports["router"], "/v1/models").json()["engine"] == "two"
    assert engines["one"].calls == []
    gates["two"].set(admission="withdrawn")
    wait_for(lambda: request(ports["router"], "/ready").status == 503)
    answer = request(ports["router"], "/v1/models")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
    assert answer.json()["error"]["code"] == 503
    gates["one"].set(admission="open")
    began = time.monotonic()
    wait_for(lambda: request(ports["router"], "/ready").json() == {"ready": True, "engines": 1})
    assert time.monotonic() - began < DETECTION
    assert request(ports["router"], "/v1/models").json()["engine"] == "one"


def test_a_kept_connection_does_not_follow_a_withdrawn_engine_and_its_stream_goes_on(fleet, engines, ports):
    router, gates = fleet
    stream = Stream(ports["router"], chunks=30, gap=0.1)
    busy, idle = ("one", "two") if engines["one"].running else ("two", "one")
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", ports["router"], timeout=10)) as kept:
        for _unused in range(4):  # leastconn: the other engine, which is now what this connection was used for
            assert request(0, "/v1/models", connection=kept).json()["engine"] == idle
        gates[idle].set(admission="withdrawn")
        wait_for(lambda: router.stat("pool_engines", idle)["status"] == "DOWN")
        for _unused in range(4):
            assert request(0, "/v1/models", connection=kept).json()["engine"] == busy
        gates[idle].set(admission="open")
        wait_for(lambda: router.stat("pool_engines", idle)["status"] == "UP")
        gates[busy].set(admission="withdrawn")
        wait_for(lambda: router.stat("pool_engines", busy)["status"] == "DOWN")
        before = len(engines[busy].calls)
        for _unused in range(4):
            assert request(0, "/v1/models", connection=kept).json()["engine"] == idle
        assert engines[busy].running == 1
        assert len(engines[busy].calls) == before
    assert stream.whole()


@pytest.mark.parametrize("size", [10, 100_000])
def test_what_a_closed_gate_refuses_goes_to_another_engine(fleet, engines, ports, size):
    router, gates = fleet
    gates["one"].set(admission="closed")
    answers = [request(ports["router"], "/v1/completions", {"prompt": "x" * size}) for _unused in range(6)]
    assert router.stat("pool_engines", "one")["status"] == "UP"  # the router had not noticed yet
    assert int(router.stat("pool_engines", "one")["wredis"]) > 0
    assert [(answer.status, answer.json()["engine"]) for answer in answers] == [(200, "two")] * 6
    assert all(answer.json()["size"] > size for answer in answers)


def test_what_a_vanished_gate_refuses_goes_to_another_engine(fleet, engines, ports):
    _unused, gates = fleet
    gates["one"].stop()
    began = time.monotonic()
    assert {request(ports["router"], "/v1/models").json()["engine"] for _unused in range(6)} == {"two"}
    assert time.monotonic() - began < 1


def test_a_request_too_long_to_be_kept_is_passed_on_whole(fleet, ports):
    assert request(ports["router"], "/v1/completions", {"prompt": "x" * 3_000_000}).json()["size"] > 3_000_000


@contextlib.contextmanager
def clients(port: int):
    """Eight clients that stream, each over one kept connection: those that got all, and what the others got."""
    over = threading.Event()
    kept: list[int] = []
    broken: list[str] = []

    def client(number: int) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            while not over.is_set():
                chunks = 1 + (number * 7 + len(kept)) % 20
                try:
                    answer = request(0, "/v1/stream", {"chunks": chunks, "gap": 0.01}, connection=connection)
                except (OSError, http.client.HTTPException) as error:
                    broken.append(repr(error))
                    connection.close()
                    continue
                if answer.status == 200 and answer.body.count(b"data: ") == chunks:
                    kept.append(number)
                else:
                    broken.append(f"{answer.status} {answer.body!r}")

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(client, number) for number in range(8)]
        try:
            yield kept, broken
        finally:
            over.set()
        for done in running:
            done.result()


def test_nothing_is_lost_while_engines_change_and_all_doors_reload(fleet, engines, ports):
    router, gates = fleet
    with clients(ports["router"]) as (kept, broken):
        for name in ("one", "two"):
            gate, engine = gates[name], engines[name]
            gate.set(admission="withdrawn")
            time.sleep(DETECTION)
            wait_for(lambda engine=engine: engine.running == 0)
            before = len(engine.calls)
            time.sleep(0.3)
            assert len(engine.calls) == before  # the router sends nothing more
            gate.set(admission="closed", proved="0")
            engine.stop()
            gate.reload()
            router.reload()
            time.sleep(0.3)
            engine.start()
            gate.set(admission="open", proved="1")
            wait_for(lambda name=name: request(ports[name], "/ready").status == 200)
            wait_for(lambda name=name: router.stat("pool_engines", name)["status"] == "UP")
            time.sleep(0.3)
            assert len(engine.calls) > before
    assert broken == []
    assert len(kept) > 200
