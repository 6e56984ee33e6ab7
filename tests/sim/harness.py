"""For tests: start simulated engines and daemons, look at them, spoil them.

    with sim_gpu(tmp_path) as gpu, sim_engine(tmp_path, gpu=gpu, enable_sleep_mode=True) as engine:
        engine.set_fault("sleep_keeps", 16000)
        ...                                     # the product talks to engine.socket, NVML answers by gpu.env
        assert engine.mutations() == ["POST /sleep?level=1"]

Everything that these start ends with its block, whatever the test did to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import typing as t
from pathlib import Path

from . import faults
from .ledger import H200_MIB, Gpu, Ledger
from .systemd import Unit

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "sim"
PATIENCE = 30.0  # seconds for a process to start or end, on a machine with other work


class Failed(AssertionError):
    """A simulated process did not do what the test waits for."""


def nvml_library() -> Path:
    """Compile the stand-in for libnvidia-ml.so.1 unless it is there already; its folder goes to LD_LIBRARY_PATH."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "nvml.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-s", "-C", str(HERE / "nvml"), f"BUILD={BUILD}"], check=True)
    return BUILD


class SimGpu:
    """A ledger, and the environment in which pynvml reads it."""

    def __init__(self, path: Path, count: int, total: int) -> None:
        self.ledger = Ledger.create(path, count, total)
        self.env = {"SIM_LEDGER": str(path), "LD_LIBRARY_PATH": str(nvml_library())}

    @property
    def uuids(self) -> list[str]:
        return [gpu.uuid for gpu in self.ledger.gpus()]

    @property
    def first(self) -> Gpu:
        return self.ledger.gpus()[0]

    def used(self, index: int = 0) -> int:
        return self.ledger.used(self.uuids[index])

    def free(self, index: int = 0) -> int:
        return self.ledger.free(self.uuids[index])

    def processes(self, index: int = 0) -> dict[int, int]:
        return self.ledger.processes(self.uuids[index])


@contextlib.contextmanager
def sim_gpu(folder: Path, count: int = 1, total: int = H200_MIB) -> t.Iterator[SimGpu]:
    yield SimGpu(folder / "ledger", count, total)


class Process:
    """A started engine or daemon and its state directory."""

    script: str

    def __init__(self, state_dir: Path, argv: list[str], env: dict[str, str]) -> None:
        self.state_dir = state_dir
        self.log = state_dir / "log"
        self.argv = [sys.executable, "-I", "-S", str(HERE / self.script), "--state", str(state_dir), *argv]
        self.env = env
        self.popen: subprocess.Popen[bytes] | None = None
        self.others: set[int] = set()  # its children, which may outlive it

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    def launch(self) -> None:
        with open(self.log, "ab") as log:
            self.popen = subprocess.Popen(
                self.argv,
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def set_fault(self, name: str, arg: t.Any = True, times: int | None = None) -> None:
        """Switch a fault on from the next request on; `arg=None` switches it off, `times` lets it wear off."""
        if name not in faults.NAMES:
            raise KeyError(f"no fault {name}; tests/sim/faults.py lists them")
        path = self.state_dir / "faults.json"
        now = json.loads(path.read_text()) if path.exists() else {}
        now[name] = arg if times is None else {"arg": arg, "times": times, "id": time.monotonic_ns()}
        part = path.with_suffix(".new")
        part.write_text(json.dumps(now))
        part.replace(path)

    def clear_faults(self) -> None:
        (self.state_dir / "faults.json").unlink(missing_ok=True)

    def wait(self, timeout: float = PATIENCE) -> int:
        """Its exit code."""
        assert self.popen is not None
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Failed(f"process {self.pid} still runs after {timeout} s:\n{self.output()[-2000:]}") from None

    def terminate(self, timeout: float = PATIENCE) -> int:
        os.kill(self.pid, signal.SIGTERM)
        return self.wait(timeout)

    def kill(self) -> None:
        """SIGKILL for this process alone; its children live on, as vLLM's do."""
        self.remember_children()
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def remember_children(self) -> None:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
            self.others.update(int(pid) for pid in text.split())

    def cleanup(self) -> None:
        if self.popen is None:
            return
        self.remember_children()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # its own session, so this reaches its orphans too
        self.popen.wait(PATIENCE)

    def until(self, probe: t.Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
        deadline = time.monotonic() + timeout
        while not probe():
            assert self.popen is not None
            if self.popen.poll() is not None:
                raise Failed(f"exit {self.popen.returncode} before {what}:\n{self.output()[-3000:]}")
            if time.monotonic() > deadline:
                raise Failed(f"{what} not seen in {timeout} s:\n{self.output()[-3000:]}")
            time.sleep(0.01)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


class Reply(t.NamedTuple):
    status: int
    text: str

    @property
    def json(self) -> t.Any:
        return json.loads(self.text)


class SimEngine(Process):
    script = "engine.py"

    def __init__(self, state_dir: Path, sock: Path, argv: list[str], env: dict[str, str]) -> None:
        super().__init__(state_dir, ["--uds", str(sock), *argv], env)
        self.socket = sock
        self.streams: list[ClientStream] = []

    def start(self) -> None:
        """Start it (again) and wait until it answers. The left-over socket is removed, as systemd does."""
        self.socket.unlink(missing_ok=True)
        self.launch()
        self.until(self.answers, "an answer on its socket")
        self.remember_children()

    def answers(self) -> bool:
        try:
            return self.request("GET", "/version", record=False).status > 0
        except (OSError, http.client.HTTPException):
            return False

    def request(self, method: str, path: str, body: t.Any = None, timeout: float = 10, record: bool = True) -> Reply:
        """A client of the tests' own, independent of the product's. `record=False` leaves requests() as it was."""
        conn = UnixConnection(self.socket, timeout)
        headers = {"content-type": "application/json"} if record else {"x-sim": "quiet"}
        try:
            conn.request(method, path, None if body is None else json.dumps(body), headers)
            response = conn.getresponse()
            return Reply(response.status, response.read().decode("utf-8", "replace"))
        finally:
            conn.close()

    def complete(self, prompt: str = "golden", max_tokens: int = 8) -> list[int]:
        """Token ids of a completion."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
        ids: list[int] = self.request("POST", "/v1/completions", body).json["choices"][0]["token_ids"]
        return ids

    def open_stream(self, max_tokens: int, prompt: str = "a long story", **more: t.Any) -> ClientStream:
        self.streams.append(ClientStream(self.socket, prompt, max_tokens, **more))
        return self.streams[-1]

    def cleanup(self) -> None:
        super().cleanup()
        for stream in self.streams:
            stream.close()

    def truth(self) -> dict[str, t.Any]:
        """What is really so inside, whatever the endpoints say."""
        truth: dict[str, t.Any] = json.loads((self.state_dir / "engine.json").read_text())
        return truth

    def core_pids(self) -> list[int]:
        return [core["pid"] for core in self.truth()["cores"]]

    def requests(self) -> list[dict[str, t.Any]]:
        path = self.state_dir / "requests.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def mutations(self) -> list[str]:
        """`METHOD PATH?QUERY` of each request that changes the engine; completions are not among them."""
        return [f"{one['method']} {one['path']}" for one in self.requests() if one["mutating"]]

    def forget_requests(self) -> None:
        (self.state_dir / "requests.jsonl").unlink(missing_ok=True)


class ClientStream:
    """A streaming client that reads as it goes. `read` waits for the end; `close` walks away."""

    def __init__(self, sock: Path, prompt: str, max_tokens: int, **more: t.Any) -> None:
        self.conn = UnixConnection(sock, PATIENCE)
        self.body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "return_token_ids": True, **more}
        self.conn.request("POST", "/v1/completions", json.dumps(self.body))
        self.ids: list[int] = []
        self.finish_reason: str | None = None
        self.done = False
        self.error: str | None = None
        self.status = 0
        self.broken: str | None = None  # how the connection ended, if not well
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        try:
            with contextlib.closing(self.conn.getresponse()) as response:
                self.status = response.status
                for line in response:
                    self._take(line.strip())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.broken = f"{type(error).__name__}: {error}"

    def _take(self, line: bytes) -> None:
        if not line.startswith(b"data: "):
            return
        if line == b"data: [DONE]":
            self.done = True
            return
        event = json.loads(line[6:])
        if "error" in event:
            self.error = event["error"]["message"]
            return
        for choice in event["choices"]:
            self.ids += choice["token_ids"] or []
            self.finish_reason = choice["finish_reason"] or self.finish_reason

    def read(self) -> ClientStream:
        self.thread.join(PATIENCE)
        if self.thread.is_alive():
            raise Failed(f"the stream still runs after {PATIENCE} s, {len(self.ids)} tokens so far")
        self.conn.close()
        return self

    def close(self) -> None:
        if self.conn.sock is not None:
            with contextlib.suppress(OSError):
                self.conn.sock.shutdown(socket.SHUT_RDWR)
        self.thread.join(PATIENCE)
        self.conn.close()


class SimDaemon(Process):
    script = "daemon.py"

    def __init__(self, state_dir: Path, socket_dir: Path, port: int, argv: list[str], env: dict[str, str]) -> None:
        options = ["--weight-cache-socket-dir", str(socket_dir), "--weight-cache-health-port", str(port)]
        super().__init__(state_dir, [*options, "--weight-cache-health-host", "127.0.0.1", *argv], env)
        self.socket_dir = socket_dir
        self.port = port

    def health(self) -> int:
        """HTTP status; 0 while the port refuses."""
        conn = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            conn.request("GET", "/health")
            return conn.getresponse().status
        except OSError:
            return 0
        finally:
            conn.close()

    def start(self) -> None:
        self.launch()
        self.until(lambda: self.health() == 200, "health 200")
        self.remember_children()

    def ranks(self) -> list[int]:
        pids: list[int] = json.loads((self.state_dir / "daemon.json").read_text())["ranks"]
        return pids


def command_line(given: dict[str, t.Any]) -> list[str]:
    """enable_sleep_mode=True, max_num_seqs=1, fault=["a", "b=2"] → options."""
    words: list[str] = []
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif isinstance(value, (list, tuple)):
            words += [word for one in value for word in (option, str(one))]
        elif isinstance(value, dict):
            words += [option, json.dumps(value)]
        elif value is not None and value is not False:
            words += [option, str(value)]
    return words


@contextlib.contextmanager
def sim_engine(
    folder: Path,
    name: str = "engine",
    gpu: SimGpu | None = None,
    wait: bool = True,
    dev_mode: bool = True,
    sock: Path | None = None,
    env: dict[str, str] | None = None,
    **given: t.Any,
) -> t.Iterator[SimEngine]:
    """An engine that answers (`wait=False`: that was only started). Other keywords are its options."""
    state = folder / name
    state.mkdir(exist_ok=True)
    given.setdefault("served_model_name", "tiny")
    argv = command_line({**given, "ledger": gpu.ledger.path if gpu else given.get("ledger")})
    variables = {"VLLM_SERVER_DEV_MODE": "1" if dev_mode else "0", "SIM_LEDGER": "", "SIM_ARGS": "", **(env or {})}
    with tempfile.TemporaryDirectory(prefix="sim") as short:  # a test's own path may be too long for a socket
        engine = SimEngine(state, sock or Path(short) / "engine.sock", argv, variables)
        try:
            if wait:
                engine.start()
            else:
                engine.launch()
            yield engine
        finally:
            engine.cleanup()


@contextlib.contextmanager
def sim_daemon(
    folder: Path, gpu: SimGpu, name: str = "preload", socket_dir: Path | None = None, wait: bool = True, **given: t.Any
) -> t.Iterator[SimDaemon]:
    state = folder / name
    state.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = given.pop("port", None) or probe.getsockname()[1]
    argv = command_line({**given, "ledger": gpu.ledger.path})
    with tempfile.TemporaryDirectory(prefix="sim") as short:
        daemon = SimDaemon(state, socket_dir or Path(short), port, argv, {"SIM_ARGS": ""})
        try:
            if wait:
                daemon.start()
            else:
                daemon.launch()
            yield daemon
        finally:
            daemon.cleanup()


class SimSystemd:
    """Units as JSON, and an environment in which `systemctl` and `journalctl` are the stand-ins of systemd.py."""

    def __init__(self, folder: Path) -> None:
        self.units = folder / "units"
        self.units.mkdir()
        self.env = {
            "SIM_UNITS": str(self.units),
            "SIM_PYTHON": sys.executable,
            "PATH": f"{HERE / 'bin'}:{os.environ['PATH']}",
        }

    @property
    def cgroup_root(self) -> Path:
        """What stands for /sys/fs/cgroup."""
        return self.units / "cgroup"

    def add(self, name: str, **directives: t.Any) -> None:
        (self.units / f"{name}.json").write_text(json.dumps(directives))

    def override(self, name: str, **properties: str) -> None:
        """Replace what `show` says; `fail="text"` makes every call for the unit fail, no property ends it."""
        path = self.units / f"{name}.override.json"
        if properties:
            path.write_text(json.dumps(properties))
        else:
            path.unlink(missing_ok=True)

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(HERE / "bin" / "systemctl"), *words],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            check=False,
        )

    def journal(self, name: str, lines: int = 1000) -> str:
        argv = [str(HERE / "bin" / "journalctl"), "-u", name, "-n", str(lines), "-o", "cat", "--no-pager"]
        return subprocess.run(
            argv, env={**os.environ, **self.env}, capture_output=True, text=True, check=True
        ).stdout.strip()

    def show(self, name: str) -> dict[str, str]:
        lines = self.ctl("show", name).stdout.splitlines()
        return dict(line.split("=", 1) for line in lines)

    def procs(self, name: str) -> list[int]:
        path = self.cgroup_root / "system.slice" / name / "cgroup.procs"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def cleanup(self) -> None:
        for path in (self.units / "run").glob("*/supervisor"):
            # 0 when it has ended: its number may be another process's by now
            if supervisor := Unit(self.units, path.parent.name).supervisor():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(supervisor, signal.SIGKILL)  # its own session, with all that it started


@contextlib.contextmanager
def sim_systemd(folder: Path) -> t.Iterator[SimSystemd]:
    systemd = SimSystemd(folder)
    try:
        yield systemd
    finally:
        systemd.cleanup()
