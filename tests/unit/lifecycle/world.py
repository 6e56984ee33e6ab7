# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host in a directory: simulated engines under a simulated systemd, real pynvml on simulated GPUs, a real HAProxy.

Tests read it by its own means (the simulator's truth, the ledger, the gate's port, files), never by the product's.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import grp
import hashlib
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import jinja2
import pynvml
import yaml
from ansible.module_utils import basic

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import (
    cli,
    config,
    gpu,
    observe,
    store,
    transition,
    unit,
)
from ansible_collections.baremetal.vllm.plugins.modules import vllm_info
from ansible_collections.baremetal.vllm.tests.sim import model, weightcache
from ansible_collections.baremetal.vllm.tests.sim.harness import (
    HERE,
    SimDaemon,
    SimEngine,
    SimGpu,
    SimSystemd,
    command_line,
    nvml_library,
)
from ansible_collections.baremetal.vllm.tests.sim.systemd import Unit

GATE_ROLE = HERE.parents[1] / "roles/vllm_gate"
HAPROXY = shutil.which("haproxy", path=os.environ["PATH"] + ":/usr/sbin")
CHECKOUT = Path(__file__).parents[3]
OWNER = "tests"
AWAKE_MIB = 71928  # of the simulated engine, with the driver's own 43
RESIDUE_MIB = 1545  # what is left of it at level 1 and 2
# Where the unit's doors are not what is tested: their records and their word at the gate, in a tenth of the time.
QUICK_DOOR = """
import json, os, socket, sys, time
door, record, engine, table, master = sys.argv[1:]
def tell(path, text):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(text.encode())
        if path == master:
            client.shutdown(socket.SHUT_WR)
        return client.recv(9)
while door == "ready":
    time.sleep(0.01)
    os.kill(int(os.environ["MAINPID"]), 0)
    try:
        if tell(engine, "GET /version HTTP/1.1\\r\\nx-sim: quiet\\r\\n\\r\\n"):
            break
    except OSError:
        pass
if door == "ready":
    os.makedirs(os.path.dirname(record), exist_ok=True)
    with open(record, "w") as stream:
        pid = int(os.environ["MAINPID"])
        found = {"schema": 1, "main_pid": pid, "boot_s": 0, "warm_s": 0, "config_digest": "0", "pids": []}
        json.dump({**found, "weights_mib": 13294}, stream)
if table:
    proved = int(door == "ready")
    with open(table) as stream:
        lines = [line for line in stream if not line.startswith("proved")]
    with open(table, "w") as stream:
        stream.write("".join(lines) + f"proved {proved}\\n")
    if os.path.exists(master):
        tell(master, f"@1 set map {table} proved {proved}\\n")
"""


def begin_playbook(
    book: str,
    engines: dict,
    folder: Path,
    *arguments: str,
    routers: dict | None = None,
    collections: Path | None = None,
    **variables,
) -> subprocess.Popen[str]:
    """ansible-playbook at work. ``engines`` and ``routers`` are hosts of these groups, with their variables.

    ``collections`` is where this collection is to be found, instead of in the checkout.
    """
    inventory = folder / "hosts.json"
    groups = {"vllm_engines": {"hosts": engines}, "vllm_routers": {"hosts": routers or {}}}
    here = {"ansible_connection": "local", "ansible_become": False}
    inventory.write_text(json.dumps({"all": {"children": groups, "vars": here}}))
    elsewhere = {"ANSIBLE_COLLECTIONS_PATH": str(collections)} if collections else {}
    return subprocess.Popen(
        [
            str(Path(sys.executable).parent / "ansible-playbook"),
            f"--inventory={inventory}",
            f"--extra-vars={json.dumps(variables)}",
            *arguments,
            str(CHECKOUT / "playbooks" / book),
        ],
        cwd=CHECKOUT,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_HOME": str(folder / ".ansible"), **elsewhere},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_playbook(book: str, engines: dict, folder: Path, *arguments: str, rc: int = 0, **variables) -> str:
    """What it printed."""
    with begin_playbook(book, engines, folder, *arguments, **variables) as running:
        try:
            output = running.communicate(timeout=600)[0]
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == rc, output[-6000:]
    return output


def lasting(files: dict, check_mode: bool) -> dict:
    """Without locks; and, but in check mode, without hashes, which of a young file are kept when it is read again."""
    kept = {name: value for name, value in files.items() if not name.startswith("run/")}
    return {name: value for name, value in kept.items() if check_mode or not name.endswith(".hashes.json")}


def wait_for(look, what: str, seconds: float = 60.0):
    """The first true value of look()."""
    end = time.monotonic() + seconds
    while not (value := look()):
        assert time.monotonic() < end, f"waited {seconds} s in vain: {what}"
        time.sleep(0.02)
    return value


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Stream:
    """What a client gets of a streamed completion."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.response = response
        self.choices: list[dict] = []

    def _next(self) -> bool:
        while (line := self.response.readline()) and not line.startswith(b"data: [DONE]"):
            if line.startswith(b"data: "):
                self.choices += json.loads(line[6:])["choices"]
                return True
        return False

    def first(self) -> None:
        """Wait until it has begun."""
        assert self._next()

    def rest(self) -> tuple[int, str]:
        """How many tokens came in all, and why it ended."""
        while self._next():
            pass
        return sum(1 for choice in self.choices if choice["text"]), self.choices[-1]["finish_reason"]


class Gate:
    """The gate as its role writes it."""

    def __init__(self, root: Path, ports: dict[str, int]) -> None:
        self.root = root
        self.ports = ports
        self.maps = root / "var/lib/vllm/gate"
        self.master = root / "run/vllm-gate/master.sock"
        self.maps.mkdir(parents=True)
        self.master.parent.mkdir(parents=True)
        self.file = root / "haproxy.cfg"
        self.file.write_text(self._render())
        for name in ports:
            self.admit(name)
        self.process: subprocess.Popen[bytes] | None = None

    def _render(self) -> str:
        settings = yaml.safe_load((GATE_ROLE / "defaults/main.yml").read_text())
        settings.update(
            vllm_gate_engines=[{"name": name, "port": port} for name, port in self.ports.items()],
            vllm_gate_address="127.0.0.1",
            vllm_gate_user=getpass.getuser(),
            vllm_gate_group=grp.getgrgid(os.getgid()).gr_name,
            vllm_gate_maxconn=200,
            __vllm_gate_map_dir=self.maps,
            __vllm_gate_socket_dir=self.root / "run/vllm",
            __vllm_gate_runtime_dir=self.master.parent,
            __vllm_gate_stamp="tested",
            __vllm_gate_metrics=False,
        )
        language = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, autoescape=False)
        language.filters["to_json"] = json.dumps
        text = language.from_string((GATE_ROLE / "templates/haproxy.cfg.j2").read_text()).render(settings)
        return text.replace("inter 500ms", "inter 100ms")

    def admit(self, name: str) -> None:
        (self.maps / f"{name}.map").write_text("admission open\nproved 1\n")

    def start(self) -> None:
        argv = [HAPROXY, "-W", "-f", str(self.file), "-S", f"{self.master},mode,600"]
        with (self.root / "haproxy.log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)

    def close(self) -> None:
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def ready(self, name: str) -> int:
        """What a router is told."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[name], timeout=60)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status
        finally:
            connection.close()

    @contextlib.contextmanager
    def stream(self, name: str):
        """A streaming client; the beginning of what it got. It leaves with the block."""
        body = b'{"prompt": "a long story", "max_tokens": 1000, "stream": true}'
        with socket.create_connection(("127.0.0.1", self.ports[name]), timeout=60) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\n"
                + f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            yield client.recv(65536)

    @contextlib.contextmanager
    def client(self, name: str, tokens: int, **more):
        """A streaming client that reads to the end. ``more`` goes into the body of its request."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.ports[name], timeout=60)) as connection:
            body = {"prompt": "a long story", "max_tokens": tokens, "stream": True, "ignore_eos": True, **more}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            yield Stream(connection.getresponse())

    def stored(self, name: str) -> dict[str, str]:
        return dict(line.split() for line in (self.maps / f"{name}.map").read_text().splitlines())


class Engine(SimEngine):
    """A declared engine, whose unit runs the simulator: what SimEngine knows of it, and what the host knows."""

    def __init__(self, host: World, name: str) -> None:
        super().__init__(host.root / "sim" / name, host.root / "run/vllm" / name / "engine.sock", [], {})
        self.host = host
        self.name = name
        self.unit = f"vllm-engine@{name}.service"
        self.declared = host.root / f"etc/vllm/lifecycle/{name}.json"

    @property
    def config(self) -> config.EngineConfig:
        return config.load(self.name)

    def lease(self) -> dict | None:
        return store.read_json(store.state_dir(self.name) / "lease.json")

    def active(self) -> str:
        written = Unit(self.host.systemd.units, self.unit).written()
        return written.get("ActiveState", "inactive")

    def busy(self) -> int:
        """Requests that it really has."""
        return sum(core["running"] + core["waiting"] for core in self.truth()["cores"])

    def asleep(self) -> int | None:
        """The level at which it really sleeps."""
        levels = {core["level"] if core["asleep"] else None for core in self.truth()["cores"]}
        assert len(levels) == 1, f"its cores differ: {self.truth()}"
        return levels.pop()

    def seen(self) -> dict:
        """What is so, by signals of the tests' own."""
        active = self.active()
        time.sleep(0.035)  # the simulator writes its truth that often
        core = self.truth()["cores"][0] if active == "active" else {}
        lease = self.lease()
        return {
            "unit": active,
            "paused": core.get("pause") is not None,
            "asleep": "+".join(core.get("asleep", [])),
            "level": core.get("level", 0),
            "weights": core.get("weights"),
            "used": [self.host.gpu.used(index) for index in range(self.host.gpus)],
            "lease": lease and lease["owner"],
            "ready": self.host.gate.ready(self.name) == 200 if self.host.gate else None,
            "admission": self.host.gate.stored(self.name)["admission"] if self.host.gate else None,
        }


class Running:
    """A module in a process of its own."""

    def __init__(self, pid: int, output: Path) -> None:
        self.pid = pid
        self.output = output

    def wait(self) -> int:
        """How it ended, as os.waitpid says it."""
        return os.waitpid(self.pid, 0)[1]

    def result(self) -> dict:
        self.wait()
        return json.loads(self.output.read_text())


class World:
    """A host. ``chat`` is its first engine; ``run`` calls a module on it."""

    def __init__(self, root: Path, gate: bool, gpus: int, engines: tuple[str, ...], total: int) -> None:
        self.root = root
        self.gpus = gpus
        self.systemd = SimSystemd(root)
        self.gpu = SimGpu(root / "ledger", gpus, total)
        self.gate = Gate(root, {name: free_port() for name in engines}) if gate else None
        self.engines = {name: Engine(self, name) for name in engines}
        self.chat = next(iter(self.engines.values()))
        self.run_module = None
        self.doors = False
        (root / "run/systemd/system").mkdir(parents=True)
        (root / "sys/fs").mkdir(parents=True)
        (root / "sys/fs/cgroup").symlink_to(self.systemd.cgroup_root)
        (root / "sim").mkdir()
        (root / "proc").mkdir()
        self.set_available(200 * 1024)
        self.command = self._script(
            "bin/vllm-lifecycle",
            f"#!{sys.executable}\nfrom {cli.__name__} import main\nraise SystemExit(main())\n",
        )

    def set_available(self, mib: int) -> None:
        """The host's free memory."""
        text = f"MemTotal: {512 * 1024 * 1024} kB\nMemAvailable: {mib * 1024} kB\n"
        (self.root / "proc/meminfo").write_text(text)

    def _script(self, where: str, text: str) -> Path:
        path = self.root / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    @property
    def environment(self) -> dict[str, str]:
        given = {**self.systemd.env, **self.gpu.env, store.ROOT_VARIABLE: str(self.root), "SIM_ARGS": ""}
        return given if self.gpus else {**given, "SIM_LEDGER": ""}

    def declare(
        self,
        engine: Engine,
        *,
        version: str,
        doors: bool | tuple[str, ...],
        dev_mode: bool,
        fault: list[str],
        declared: dict,
        unit: dict,
        uuids: list[str],
        **options,
    ) -> None:
        """The files that the roles write. ``doors``, or those of it that are named, are the product's command."""
        name, root = engine.name, self.root
        self.doors = self.doors or bool(doors)
        weights = model.write(root / "srv/models/tiny", "tiny")
        (weights / "tokenizer.json").write_text("{}")
        self._script(f"opt/vllm/runtimes/{version}/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        runtime = root / "opt/vllm/engines" / name
        runtime.parent.mkdir(parents=True, exist_ok=True)
        runtime.symlink_to(f"../runtimes/{version}")
        engine.socket.parent.mkdir(parents=True)
        engine.state_dir.mkdir()
        names = {"model": str(weights), "served-model-name": "tiny", "uds": str(engine.socket)}
        for key, value in {**names, "enable-sleep-mode": True, **options}.items():
            names[key.replace("_", "-")] = value
        files = {
            f"etc/vllm/engines/{name}.yaml": yaml.safe_dump(names),
            f"etc/vllm/engines/{name}.env": f"VLLM_SERVER_DEV_MODE={int(dev_mode)}\n"
            f"VLLM_CACHE_ROOT={root}/{self._cache(name, version)}/vllm\n",
            f"etc/vllm/lifecycle/{name}.json": json.dumps(
                self._declaration(engine, runtime, version, uuids) | declared
            ),
        }
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        simulator = {"version": version, "state": engine.state_dir, "fault": fault, "speed": 1000}
        if self.gpus:
            simulator.update(ledger=self.gpu.ledger.path, gpu=uuids)
        record = root / f"var/lib/vllm/{name}/ready.json"
        at_gate = [self.gate.maps / f"{name}.map", self.gate.master] if self.gate else ["", ""]

        def quick(door: str) -> str:
            words = [sys.executable, "-I", "-S", "-c", QUICK_DOOR, door, record, engine.socket, *at_gate]
            return shlex.join(map(str, words))

        commands = {
            "ExecStartPre": f"rm -f {engine.socket}",
            "ExecStartPost": quick("ready"),
            "ExecStopPost": quick("settle"),
        }
        doors_of = {
            "wanted": "ExecCondition",
            "preflight": "ExecStartPre",
            "ready": "ExecStartPost",
            "drain": "ExecStop",
            "settle": "ExecStopPost",
        }
        for door in doors_of if doors is True else doors or ():
            commands[doors_of[door]] = f"+{self.command} {door} %i"
        self.systemd.add(
            engine.unit,
            ExecStart=[
                sys.executable,
                "-I",
                "-S",
                str(HERE / "engine.py"),
                "serve",
                "--config",
                f"{root}/etc/vllm/engines/{name}.yaml",
            ],
            Environment={"SIM_ARGS": shlex.join(command_line(simulator))},
            EnvironmentFile=f"{root}/etc/vllm/engines/%i.env",
            KillMode="mixed",
            **{"TimeoutStopSec": 60, **commands, **unit},
        )

    @staticmethod
    def _cache(name: str, version: str) -> str:
        return f"var/cache/vllm/{name}/{version}"

    def _declaration(self, engine: Engine, runtime: Path, version: str, uuids: list[str]) -> dict:
        name = engine.name
        gate = self.gate and {
            "master_socket": str(self.gate.master),
            "map": str(self.gate.maps / f"{name}.map"),
            "proxy": f"engine_{name}",
            "address": "127.0.0.1",
            "port": self.gate.ports[name],
        }
        return {
            "schema": 1,
            "engine": name,
            "unit": engine.unit,
            "user": getpass.getuser(),
            "config_file": f"{self.root}/etc/vllm/engines/{name}.yaml",
            "env_file": f"{self.root}/etc/vllm/engines/{name}.env",
            "socket": str(engine.socket),
            "runtime": str(runtime),
            "runtime_version": version,
            "model": f"{self.root}/srv/models/tiny",
            "served_model_name": "tiny",
            "gpus": uuids,
            "gate": gate,
            "router_detection": 0.05,
            "drain_timeout": 60,
            "shutdown_timeout": 5,
            "stop_timeout": 120,
            "start_timeout": 120,
            "compile_cache": f"/{self._cache(name, version)}",
            "config_digest": "0",
        }

    def daemon(
        self, name="base", *, fault=(), engines=(), doors=False, declared=None, unit=None, gpus=None, **options
    ) -> SimDaemon:
        """A declared preload daemon that nobody has started.

        With ``doors`` its unit calls the product's command; without, it is one as an older role wrote it. ``declared``
        changes its declaration, ``unit`` its unit.
        """
        sockets = self.root / "run/vllm" / name
        sockets.mkdir(parents=True, mode=0o700)
        state = self.root / "sim" / name
        state.mkdir()
        daemon = SimDaemon(state, sockets, free_port(), [], {})
        uuids = self.gpu.uuids if gpus is None else gpus
        given = {
            "model": f"{self.root}/srv/models/tiny",
            "ledger": self.gpu.ledger.path,
            "gpu": uuids,
            "fault": list(fault),
            "speed": 1000,
            **options,
        }
        health = ["--weight-cache-health-port", str(daemon.port), "--weight-cache-health-host", "127.0.0.1"]
        words = [*command_line(given), "--weight-cache-socket-dir", str(sockets), *health, "--state", str(state)]
        doors_of = {"preflight": "ExecStartPre", "ready": "ExecStartPost", "settle": "ExecStopPost"}
        commands = {where: f"+{self.command} preload-{door} %i" for door, where in doors_of.items() if doors}
        directives = {
            "KillMode": "mixed",
            "SuccessExitStatus": [241],
            "TimeoutStopSec": 60,
            **commands,
            **(unit or {}),
        }
        self.systemd.add(
            f"vllm-preload@{name}.service",
            ExecStart=[sys.executable, "-I", "-S", str(HERE / "daemon.py"), *words],
            **directives,
        )
        value = {
            "schema": 1,
            "daemon": name,
            "unit": f"vllm-preload@{name}.service",
            "socket_dir": str(sockets),
            "sockets": [weightcache.socket_path(sockets, uuid).name for uuid in uuids],
            "health_port": daemon.port,
            "start_timeout": 60,
            "gpus": uuids,
            "engines": list(engines),
            "weights_mib": 13294 // options.get("tensor_parallel_size", 1),
        }
        if doors:
            runtime = self._script(f"opt/vllm/preload/{name}/bin/vllm", "#!/bin/sh\n")
            value.update(
                user=getpass.getuser(),
                runtime=str(runtime.parents[1]),
                runtime_version=options.get("version", "0.33.0"),
                model=given["model"],
                traits={"tensor_parallel": options.get("tensor_parallel_size", 1)},
                config_digest="0",
            )
        self.write(f"etc/vllm/preload/{name}.json", value | (declared or {}))
        return daemon

    def write(self, where: str, value: dict) -> None:
        path = self.root / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))

    def change(self, where: str, **changes) -> None:
        """Change keys of one of the JSON files that the roles write."""
        self.write(where, json.loads((self.root / where).read_text()) | changes)

    def takes_from(self, engine: Engine, daemon: str = "base", *, mode="zero_copy", fallback=False, **use) -> None:
        """Let an engine that was built with ``start=False`` take its weights from a daemon, as its role does."""
        source = {
            "socket_dir": f"{self.root}/run/vllm/{daemon}",
            "mode": mode,
            "fallback": fallback,
            "state_timeout_s": 2,
        }
        path = self.root / f"etc/vllm/engines/{engine.name}.yaml"
        options = yaml.safe_load(path.read_text())
        options.update({"load-format": "ipc_cache", "model-loader-extra-config": json.dumps(source)})
        # Sleep mode beside zero copy is for those who opt in.
        asleep = mode == "copy" or use.get("allow_zero_copy_sleep", False)
        options["enable-sleep-mode"] = asleep
        path.write_text(yaml.safe_dump(options, width=10000))
        self.change(
            f"etc/vllm/lifecycle/{engine.name}.json",
            preload={"daemon": daemon, "mode": mode, "fallback": fallback, "wait": 60, **use},
            sleep_mode=asleep,
        )

    def start(self) -> None:
        """Everything serves."""
        if self.gate and self.doors:
            self.gate.start()  # the doors of the unit speak to it, and have patience
        for engine in self.engines.values():
            started = self.systemd.ctl("start", engine.unit)
            assert started.returncode == 0, started.stderr + self.systemd.journal(engine.unit)
        if self.gate and not self.doors:
            self.gate.start()  # after the engines, so that its first look finds them up
        for name in self.engines if self.gate else ():
            wait_for(lambda name=name: self._is_ready(name), "the gate's first 200")

    def _is_ready(self, name: str) -> bool:
        """The worker answers, and the master too, which at first refuses for a moment."""
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(self.gate.master))
            return self.gate.ready(name) == 200
        except OSError:
            return False

    def python(self) -> str:
        """An interpreter for modules that a play runs on this host."""
        path = self.root / "bin/python"
        given = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in self.environment.items())
        path.write_text(f'#!/bin/sh\n{given}exec {sys.executable} "$@"\n')
        path.chmod(0o755)
        return str(path)

    def run(self, module, check_mode: bool = False, **options) -> dict:
        """A module's result. Without names the first engine; with a time-out that a busy machine does not reach."""
        names = {} if {"engine", "engines", "daemon"} & set(options) else {"engine": self.chat.name}
        lease = {} if "daemon" in options else {"lease": {"owner": OWNER}}
        given = {"timeout": 120, **names, **lease, **options}
        return self.run_module(module.main, check_mode=check_mode, **given)

    def done(self, module, **options) -> dict:
        """The same, for a call that must succeed."""
        result = self.run(module, **options)
        assert not result.get("failed"), result["msg"]
        return result

    def begin(self, module, spoil=None, **options) -> Running:
        """The same in a process of its own, which does not wait. ``spoil`` is called there before the module."""
        given = {"timeout": 120, "lease": {"owner": OWNER}, **options}
        if not {"engine", "engines"} & set(options):
            given["engine"] = self.chat.name
        output = self.root / f"output{time.monotonic_ns()}"
        child = os.fork()
        if not child:
            try:
                sys.stdout = output.open("w")
                basic._ANSIBLE_ARGS = json.dumps({"ANSIBLE_MODULE_ARGS": given}).encode()
                basic._ANSIBLE_PROFILE = "legacy"
                if spoil:
                    spoil()
                module.main()
            except SystemExit:
                pass
            except BaseException:  # noqa: BLE001 - whatever happens, the child must not go on with the tests
                traceback.print_exc(file=sys.__stderr__)
            finally:
                sys.stdout.flush()
                os._exit(0)
        return Running(child, output)

    def info(self, name: str = "") -> dict:
        """What the product sees of an engine."""
        name = name or self.chat.name
        return self.run_module(vllm_info.main, engine=name)["engines"][name]

    def files(self) -> dict[str, tuple[int, str]]:
        """Every file that the product writes to, with its time and content."""
        found = {}
        for top in ("etc", "var", "run/vllm-lifecycle"):
            for path in sorted((self.root / top).rglob("*")):
                if path.is_file():
                    text = hashlib.sha256(path.read_bytes()).hexdigest()
                    found[str(path.relative_to(self.root))] = (path.stat().st_mtime_ns, text)
        return found

    def close(self) -> None:
        for engine in self.engines.values():
            engine.cleanup()
        if self.gate:
            self.gate.close()
        self.systemd.cleanup()
        shutil.rmtree(self.root, ignore_errors=True)


def use(monkeypatch, host: World) -> None:
    """Let this process be on that host."""
    for name, value in host.environment.items():
        monkeypatch.setenv(name, value)
    # pynvml finds its library through the loader, which reads LD_LIBRARY_PATH when a process starts.
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(nvml_library() / "libnvidia-ml.so.1")))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    gpu._opened.clear()
    # Time-outs that a busy machine does not reach; tests of silence set their own.
    monkeypatch.setattr(observe, "PROBE_TIMEOUT", 30.0)
    monkeypatch.setattr(transition, "CALL_TIMEOUT", 30.0)
    monkeypatch.setattr(unit, "QUERY_TIMEOUT", 120.0)
    monkeypatch.setattr(transition, "QUIET_INTERVAL", 0.02)
