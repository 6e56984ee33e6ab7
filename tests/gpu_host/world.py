"""A host with a GPU as seen from outside our product, what acts on it, and the report, written anew at each entry.

Run inside that host. From the environment: GPU_HOST_OUT, where the report goes; GPU_HOST_MODELS, what make_models.py
has made; GPU_HOST_RANKS, how many GPUs each engine has, 1 if absent; GPU_HOST_ANSIBLE, more arguments for each run of
Ansible.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
import typing as t
import uuid
from pathlib import Path

import pynvml

HERE = Path(__file__).parent
MODELS = Path(os.environ["GPU_HOST_MODELS"])
OUT = Path(os.environ["GPU_HOST_OUT"])
REPORT = OUT / "gpu-report.json"
MIB = 1024 * 1024
CONTROL = "/opt/vllm/control/bin/python"
RANKS = int(os.environ.get("GPU_HOST_RANKS", "1"))
BASE = ["-i", str(HERE / "inventory.yml"), *shlex.split(os.environ.get("GPU_HOST_ANSIBLE", ""))]
ENVIRONMENT = {
    **os.environ,
    "ANSIBLE_CALLBACK_PLUGINS": str(HERE / "callback"),
    "ANSIBLE_CALLBACKS_ENABLED": "timed",
    "ANSIBLE_LOAD_CALLBACK_PLUGINS": "1",
    "ANSIBLE_PIPELINING": "1",
    "ANSIBLE_INJECT_FACT_VARS": "0",
    "ANSIBLE_LOCALHOST_WARNING": "0",
    "ANSIBLE_NOCOLOR": "1",
}

# Looking


pynvml.nvmlInit()
if pynvml.nvmlDeviceGetCount() < RANKS:
    sys.exit(f"GPU_HOST_RANKS is {RANKS}, and this machine has {pynvml.nvmlDeviceGetCount()} GPU(s)")
DEVICES = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(RANKS)]


def used() -> int:
    """MiB in use on the GPUs together."""
    return sum(pynvml.nvmlDeviceGetMemoryInfo(device).used for device in DEVICES) // MIB


def holders() -> dict[int, int]:
    """MiB by process, on the GPUs together."""
    found: dict[int, int] = {}
    for device in DEVICES:
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device):
            found[process.pid] = found.get(process.pid, 0) + (process.usedGpuMemory or 0) // MIB
    return found


def available() -> int:
    """MiB of host memory."""
    text = Path("/proc/meminfo").read_text()
    return int(re.search(r"MemAvailable:\s+(\d+)", text)[1]) // 1024


def show(unit: str, *names: str) -> dict[str, str]:
    done = subprocess.run(
        ["systemctl", "show", f"--property={','.join(names)}", unit], capture_output=True, text=True, check=True
    )
    return dict(line.partition("=")[::2] for line in done.stdout.splitlines())


def pids(unit: str) -> list[int]:
    group = show(unit, "ControlGroup")["ControlGroup"]
    path = Path(f"/sys/fs/cgroup{group}/cgroup.procs")
    return [int(word) for word in path.read_text().split()] if group and path.exists() else []


def resident(unit: str) -> int:
    """MiB of host memory that the unit's processes hold, shared and pinned pages included."""
    total = 0
    for pid in pids(unit):
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 // MIB
        except OSError:
            continue
    return total


def journal(unit: str, since: float) -> list[str]:
    done = subprocess.run(
        ["journalctl", "--no-pager", "-o", "cat", "-u", unit, f"--since=@{since:.3f}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.splitlines()


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def ask(engine: str, method: str, path: str, body: t.Any = None, timeout: float = 60) -> tuple[int, str]:
    connection = UnixConnection(f"/run/vllm/{engine}/engine.sock", timeout)
    connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def tokens(engine: str, model: str) -> list[t.Any]:
    """What the engine answers at temperature 0: token ids and the first log probabilities."""
    body = {"model": model, "prompt": "The engine answers", "max_tokens": 16, "temperature": 0, "seed": 0}
    body["cache_salt"] = uuid.uuid4().hex  # what is computed from cached blocks is rounded otherwise
    status, text = ask(engine, "POST", "/v1/completions", {**body, "logprobs": 0, "return_token_ids": True})
    if status != 200:
        raise RuntimeError(f"{engine}: {status} {text[:200]}")
    choice = json.loads(text)["choices"][0]
    return [choice.get("token_ids"), [round(one, 4) for one in choice["logprobs"]["token_logprobs"][:4]]]


def engine_seconds(engine: str) -> dict[str, float]:
    """What the engine's own metrics say that its sleeps and wakes have taken, by operation."""
    found: dict[str, float] = {}
    for line in ask(engine, "GET", "/metrics")[1].splitlines():
        if line.startswith("vllm:sleep_mode_operation_duration_seconds_sum"):
            labels, _unused, value = line.rpartition(" ")
            name = ",".join(re.findall(r'(?:operation|level|tags|op|type|kind)="([^"]*)"', labels)) or labels
            found[name] = found.get(name, 0.0) + float(value)
    return found


class Stream(threading.Thread):
    """One streaming completion; tells how it ended. ``port``: through a gate; ``engine``: straight to its socket."""

    def __init__(self, model: str, length: int, *, port: int = 0, engine: str = "") -> None:
        super().__init__(daemon=True)
        self.port, self.engine, self.model, self.length = port, engine, model, length
        self.status, self.received, self.finish, self.done, self.ended = 0, 0, "", False, 0.0
        self.flowing = threading.Event()

    def run(self) -> None:
        connection: http.client.HTTPConnection
        if self.engine:
            connection = UnixConnection(f"/run/vllm/{self.engine}/engine.sock", 120)
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = {
            "model": self.model,
            "prompt": "Count",
            "max_tokens": self.length,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "ignore_eos": True,
        }
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        self.status = answer.status
        for line in answer:
            self.done = self.done or line.startswith(b"data: [DONE]")
            if line.startswith(b"data: {"):
                part = json.loads(line[6:])
                self.received = (part.get("usage") or {}).get("completion_tokens", self.received)
                for choice in part.get("choices") or []:
                    self.finish = choice["finish_reason"] or self.finish
                self.flowing.set()
        self.ended = time.monotonic()

    def begin(self) -> Stream:
        self.start()
        if not self.flowing.wait(30):
            raise RuntimeError("no stream")
        return self


class Watch(threading.Thread):
    """What ``look`` has said, one after the other, until it is ended; the same twice in a row is one."""

    def __init__(self, look: t.Callable[[], str]) -> None:
        super().__init__(daemon=True)
        self.look, self.seen, self.over = look, [], threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.05):
            if (now := self.look()) not in self.seen[-1:]:
                self.seen.append(now)

    def end(self) -> list[str]:
        self.over.set()
        self.join()
        return self.seen


def health(port: int) -> str:
    """What a preload daemon's health port says: the status, or ``refused``."""
    try:
        return str(gate(port, "/health"))
    except OSError:
        return "refused"


def listening(engine: str) -> str:
    """What a client finds at an engine's socket."""
    path = f"/run/vllm/{engine}/engine.sock"
    if not os.path.exists(path):
        return "no socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(path)
        except OSError:
            return "refused"
    return "connected"


def gate(port: int, path: str = "/ready") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    return connection.getresponse().status


# Acting


def ansible(kind: str, arguments: list[str], limit: float) -> tuple[int, list[dict[str, t.Any]], str]:
    """A run of ansible or ansible-playbook: its exit status, its tasks, what it printed."""
    log = OUT / "tasks.jsonl"
    begin = log.stat().st_size if log.exists() else 0
    done = subprocess.run(
        [sys.executable, "-m", f"ansible.cli.{kind}", *BASE, *arguments],
        env={**ENVIRONMENT, "TIMED_LOG": str(log)},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
        cwd="/tmp",
    )
    with open(OUT / "ansible.log", "a") as file:
        file.write(f"\n$ {kind} {' '.join(arguments)}\n{done.stdout}{done.stderr}\n")
    with open(log) if log.exists() else open(os.devnull) as file:
        file.seek(begin)
        lines = [json.loads(line) for line in file]
    return done.returncode, lines, done.stdout + done.stderr


class Result(dict):
    """A module's result, with ``ok`` and ``seconds`` of the task."""

    ok: bool
    seconds: float

    def __getattr__(self, name: str) -> t.Any:
        return self.get(name)


def module(name: str, check: bool = False, limit: float = 300, **arguments: t.Any) -> Result:
    words = ["gpu-host", "-m", f"baremetal.vllm.{name}", *(["-a", json.dumps(arguments)] if arguments else [])]
    words += ["-e", f"ansible_python_interpreter={CONTROL}", *(["--check"] if check else [])]
    _status, lines, text = ansible("adhoc", words, limit)
    if not lines:
        raise RuntimeError(f"{name}: no result: {text[-1500:]}")
    result = Result(lines[-1]["result"])
    result.update(ok=lines[-1]["outcome"] == "ok", seconds=lines[-1]["seconds"])
    return result


def task(name: str, limit: float = 300, **arguments: t.Any) -> Result:
    """A task of a play, in check mode before: what Ansible sends is made already, as for a play's second host."""
    both = [{name: arguments, "check_mode": True}, {name: arguments}]
    play = {"hosts": "gpu_host", "gather_facts": False, "vars": {"ansible_python_interpreter": CONTROL}, "tasks": both}
    (OUT / "play.json").write_text(json.dumps([play]))
    _status, lines, text = ansible("playbook", [str(OUT / "play.json")], limit)
    if not lines:
        raise RuntimeError(f"{name}: no result: {text[-1500:]}")
    result = Result(lines[-1]["result"])
    checked = lines[0]["result"]
    result.update(ok=lines[-1]["outcome"] == "ok", seconds=lines[-1]["seconds"], checked=checked.get("changed"))
    return result


def must(result: Result) -> Result:
    if not result.ok:
        raise RuntimeError(f"failed: {result.msg} next step: {result.next_step}"[:1500])
    return result


class Entries:
    """The report, written anew after every entry."""

    def __init__(self) -> None:
        empty = {"schema": "baremetal.vllm/gpu-report", "version": 1, "machine": {}, "transitions": []}
        self.value = json.loads(REPORT.read_text()) if REPORT.exists() else empty

    def fact(self, text: str, holds: bool, **seen: t.Any) -> None:
        """One thing that vLLM itself does, and whether it did."""
        facts = [one for one in self.value.setdefault("facts", []) if one["fact"] != text]
        self.value["facts"] = [*facts, {"fact": text, "holds": holds, "seen": seen}]
        self.save()
        print(
            f"[{time.strftime('%H:%M:%S')}] {'holds' if holds else 'DIFFERS':10} {text}: {str(seen)[:600]}", flush=True
        )

    def save(self) -> None:
        REPORT.write_text(json.dumps(self.value, indent=1) + "\n")

    def add(
        self,
        name: str,
        proved: bool,
        *,
        task: float | None = None,
        engine: float | None = None,
        before: int | None = None,
        after: int | None = None,
        **more: t.Any,
    ) -> None:
        entry = {
            "transition": name,
            "verdict": "proved" if proved else "not proved",
            "task_seconds": task,
            "engine_seconds": engine,
            "gpu_mib_before": before,
            "gpu_mib_after": after,
            **more,
        }
        kept = [one for one in self.value["transitions"] if one["transition"] != name]
        self.value["transitions"] = [*kept, entry]
        self.save()
        numbers = ", ".join(
            f"{key} {value}"
            for key, value in entry.items()
            if key not in ("transition", "verdict") and value is not None
        )
        print(f"[{time.strftime('%H:%M:%S')}] {entry['verdict']:10} {name}: {numbers[:600]}", flush=True)


entries = Entries()
