"""Runs inside the GPU host: the roles, the modules and the units' doors on real engines, each with a second signal.

Usage: scenario.py OUT site|scenario[:STEP,...]

Appends to OUT/gpu-report.json, one entry a transition: what our task took, what the engine itself says it took, GPU
memory by NVML before and after, and whether it is proved. A step that fails is an entry like the others.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import typing as t
import uuid
from pathlib import Path

SRV = Path("/srv")
CHECKOUT = SRV / "checkout"
HERE = CHECKOUT / "ansible_collections/baremetal/vllm/tests/gpu_host"
MODELS = SRV / "models"
for wheel in (SRV / "kit/wheels").glob("nvidia_ml_py-*.whl"):
    sys.path.insert(0, str(wheel))
import pynvml

MIB = 1024 * 1024
PYTHON = os.environ["HOST_PYTHON"]
CONTROL = "/opt/vllm/control/bin/python"
OUT = Path(sys.argv[1])
REPORT = OUT / "gpu-report.json"
BASE = ["-i", str(HERE / "inventory.yml"), "-e", f"host_python={PYTHON}", "-e", f"gpu_uuid={os.environ['GPU_UUID']}"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(SRV / "kit/ansible"),
    "ANSIBLE_COLLECTIONS_PATH": str(CHECKOUT),
    "ANSIBLE_CALLBACK_PLUGINS": str(HERE / "callback"),
    "ANSIBLE_CALLBACKS_ENABLED": "timed",
    "ANSIBLE_LOAD_CALLBACK_PLUGINS": "1",
    "ANSIBLE_PIPELINING": "1",
    "ANSIBLE_INJECT_FACT_VARS": "0",
    "ANSIBLE_LOCALHOST_WARNING": "0",
    "ANSIBLE_NOCOLOR": "1",
    "ANSIBLE_HOME": "/tmp/ansible",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}

# Looking


pynvml.nvmlInit()
DEVICE = pynvml.nvmlDeviceGetHandleByIndex(0)


def used() -> int:
    """MiB in use on the GPU."""
    return pynvml.nvmlDeviceGetMemoryInfo(DEVICE).used // MIB


def holders() -> dict[int, int]:
    """MiB by process."""
    return {p.pid: (p.usedGpuMemory or 0) // MIB for p in pynvml.nvmlDeviceGetComputeRunningProcesses(DEVICE)}


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
    """One streaming completion through the gate; tells how it ended."""

    def __init__(self, port: int, model: str, length: int) -> None:
        super().__init__(daemon=True)
        self.port, self.model, self.length = port, model, length
        self.status, self.received, self.finish = 0, 0, ""
        self.flowing = threading.Event()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = {
            "model": self.model,
            "prompt": "Count",
            "max_tokens": self.length,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection.request(
            "POST", "/v1/completions", json.dumps({**body, "ignore_eos": True}), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        self.status = answer.status
        for line in answer:
            if line.startswith(b"data: {"):
                part = json.loads(line[6:])
                self.received = (part.get("usage") or {}).get("completion_tokens", self.received)
                for choice in part["choices"]:
                    self.finish = choice["finish_reason"] or self.finish
                self.flowing.set()


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
        [PYTHON, "-m", f"ansible.cli.{kind}", *BASE, *arguments],
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


def must(result: Result) -> Result:
    if not result.ok:
        raise RuntimeError(f"failed: {result.msg} next step: {result.next_step}"[:1500])
    return result


class Entries:
    """The report, written anew after every entry."""

    def __init__(self) -> None:
        empty = {"schema": "baremetal.vllm/gpu-report", "version": 1, "machine": {}, "transitions": []}
        self.value = json.loads(REPORT.read_text()) if REPORT.exists() else empty

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


def spent(engine: str, before: dict[str, float]) -> tuple[float, dict[str, float]]:
    after = engine_seconds(engine)
    parts = {
        name: round(value - before.get(name, 0.0), 3) for name, value in after.items() if value != before.get(name, 0.0)
    }
    return round(sum(parts.values()), 3), parts


def moved(
    name: str,
    engine: str,
    model: str,
    action: t.Callable[[], Result],
    expect: t.Callable[[Result, dict], bool],
    same: list[t.Any] | None = None,
    **more: t.Any,
) -> Result:
    """One sleep or wake: task against engine, memory by NVML, and the same answer where ``same`` is given."""
    unit = f"vllm-engine@{engine}.service"
    own, before, rss, free = engine_seconds(engine), used(), resident(unit), available()
    result = action()
    seconds, parts = spent(engine, own)
    seen = {"before": before, "after": used(), "rss": resident(unit) - rss, "free": available() - free}
    right = result.ok and expect(result, seen)
    if same is not None and result.ok:
        found = tokens(engine, model)
        right = right and found == same
        more["same_answer"] = found == same
    if result.ok:
        more["overhead"] = round((result.elapsed or result.seconds) - seconds, 3)
    else:
        more["error"] = (result.msg or "")[:500]
    entries.add(
        name,
        right,
        task=result.seconds,
        engine=seconds,
        before=before,
        after=seen["after"],
        module_seconds=result.elapsed,
        engine_parts=parts,
        timings=result.timings,
        rss_change_mib=seen["rss"],
        available_change_mib=seen["free"],
        freed_mib=result.freed_mib,
        resident_mib=result.resident_mib,
        **more,
    )
    return result


# Steps


def site() -> None:
    entries.value["machine"] = {
        "gpu": pynvml.nvmlDeviceGetName(DEVICE),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "vllm": "0.33.0",
        "gpu_mib": pynvml.nvmlDeviceGetMemoryInfo(DEVICE).total // MIB,
        "cores": os.cpu_count(),
        "host_available_mib": available(),
        "systemd": subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )[0],
    }
    begun, before = time.time(), used()
    status, lines, text = ansible("playbook", [str(HERE / "site.yml")], 560)
    slow = {one["task"]: one["seconds"] for one in lines if one["seconds"] > 4}
    if status:
        print(text[-4000:])
    states = {
        name: show(name, "ActiveState")["ActiveState"]
        for name in (
            "vllm-preload@base",
            "vllm-preload@spare",
            "vllm-gate",
            "vllm-engine@chat",
            "vllm-engine@mapped",
            "vllm-engine@copied",
        )
    }
    held = holders()
    ours = {pid for name in states for pid in pids(f"{name}.service")}
    entries.add(
        "roles: daemons, gate, engines",
        status == 0 and set(states.values()) == {"active"} and bool(held) and set(held) <= ours,
        task=round(time.time() - begun, 1),
        before=before,
        after=used(),
        states=states,
        slow_tasks=slow,
        held_mib={str(pid): mib for pid, mib in held.items()},
        pids_of_units_hold=sorted(set(held) & ours),
    )
    again_begun = time.time()
    if status == 0:
        status, lines, text = ansible("playbook", [str(HERE / "site.yml")], 200)
        changed = [one["task"] for one in lines if one["result"].get("changed")]
        entries.add(
            "roles again: nothing changes",
            status == 0 and not changed,
            task=round(time.time() - again_begun, 1),
            changed=changed,
        )
    for engine in ("chat", "mapped", "copied"):
        path = Path(f"/var/lib/vllm/{engine}/ready.json")
        ready = json.loads(path.read_text()) if path.exists() else {}
        entries.add(
            f"start of {engine}: ready",
            states[f"vllm-engine@{engine}"] == "active"
            and gate({"chat": 8001, "mapped": 8002, "copied": 8003}[engine], "/health") in (200, 503),
            engine=ready.get("boot_s"),
            after=sum(held.get(pid, 0) for pid in pids(f"vllm-engine@{engine}.service")),
            warm_seconds=ready.get("warm_s"),
            weights_mib=ready.get("weights_mib"),
            proof=ready.get("proof"),
            preload=ready.get("preload"),
        )


def admit() -> None:
    result = module("vllm_drain", engines=["chat", "mapped", "copied"], state="serving")
    seen = must(module("vllm_info"))["engines"]
    states = {name: one["state"] for name, one in seen.items()}
    entries.add(
        "admit all engines",
        result.ok and set(states.values()) == {"serving"} and gate(8001) == 200,
        task=result.seconds,
        states=states,
        error=(result.msg or "")[:500] if not result.ok else None,
        reasons={name: one["reasons"] + list(one["unseen"].values()) for name, one in seen.items()},
    )
    memory = {name: one["memory"] for name, one in seen.items()}
    gpus = {
        name: [dict(device, processes=device["processes"]) for device in one["gpus"] or []]
        for name, one in seen.items()
    }
    (OUT / "info.json").write_text(json.dumps({"memory": memory, "gpus": gpus, "engines": seen}, indent=1, default=str))


def golden() -> None:
    for engine in ("chat", "mapped"):
        first = module("vllm_golden", engine=engine, state="recorded")
        second = module("vllm_golden", engine=engine, state="recorded")
        third = module("vllm_golden", engine=engine, state="matching")
        entries.add(
            f"golden of {engine}: recorded, again, matching",
            first.ok and first.changed and second.ok and not second.changed and third.ok,
            task=first.seconds,
            again=second.seconds,
            matching=third.seconds,
            timings=first.timings,
            compared_by=third.compared_by,
            distance=third.distance,
            positions=third.positions,
            error=(first.msg or second.msg or third.msg or "")[:500] or None,
        )


def drain() -> None:
    stream = Stream(8001, "large", 900)
    stream.start()
    if not stream.flowing.wait(30):
        raise RuntimeError("no stream")
    result = module("vllm_drain", engine="chat", state="drained", timeout=60)
    ready = gate(8001)
    stream.join(60)
    whole = stream.finish == "length" and stream.received == 900
    again = module("vllm_drain", engine="chat", state="drained", timeout=60)
    _status, paused = ask("chat", "GET", "/is_paused")
    entries.add(
        "drain under a stream of 900 tokens",
        result.ok and result.changed and ready == 503 and whole and again.ok and not again.changed and "true" in paused,
        task=result.seconds,
        module_seconds=result.elapsed,
        timings=result.timings,
        stream=[stream.status, stream.received, stream.finish],
        again=again.seconds,
        error=(result.msg or "")[:500] if not result.ok else None,
    )
    result = module("vllm_drain", engine="chat", state="serving", timeout=60)
    entries.add(
        "serving again",
        result.ok and gate(8001) == 200,
        task=result.seconds,
        module_seconds=result.elapsed,
        timings=result.timings,
        error=(result.msg or "")[:500] if not result.ok else None,
    )


def refuse_level1() -> None:
    result = module("vllm_sleep", engine="chat", level=1, host_copy_mib=900000)
    entries.add(
        "level 1 refused for host memory",
        not result.ok and "900000" in (result.msg or ""),
        task=result.seconds,
        message=(result.msg or "")[:400],
        state=gate(8001),
    )


def sleep1() -> None:
    right = tokens("chat", "large")
    for number in ("first", "second"):
        seen = must(module("vllm_info", engine="chat"))["engines"]["chat"]
        moved(
            f"sleep level 1, {number}",
            "chat",
            "large",
            lambda: module("vllm_sleep", engine="chat", level=1),
            lambda result, at: at["after"] < at["before"] - 30000 and gate(8001) == 503,
            expected_host_copy_mib=seen["host_copy_mib"],
        )
        if number == "second":
            again = module("vllm_sleep", engine="chat", level=1)
            entries.add("sleep level 1 again: nothing to do", again.ok and not again.changed, task=again.seconds)
        moved(
            f"wake from level 1, {number}",
            "chat",
            "large",
            lambda: module("vllm_wake", engine="chat"),
            lambda result, at: gate(8001) == 200,
            same=right,
        )


def sleep2() -> None:
    right = tokens("chat", "large")
    moved(
        "sleep level 2",
        "chat",
        "large",
        lambda: module("vllm_sleep", engine="chat", level=2),
        lambda result, at: at["after"] < at["before"] - 30000 and gate(8001) == 503,
    )
    moved(
        "staged wake from level 2",
        "chat",
        "large",
        lambda: module("vllm_wake", engine="chat"),
        lambda result, at: gate(8001) == 200,
        same=right,
    )


def kvonly() -> None:
    right = tokens("chat", "large")
    moved(
        "KV cache only: sleep",
        "chat",
        "large",
        lambda: module("vllm_sleep", engine="chat", kv_only=True),
        lambda result, at: at["after"] < at["before"] - 15000 and gate(8001) == 503,
    )
    moved(
        "KV cache only: wake",
        "chat",
        "large",
        lambda: module("vllm_wake", engine="chat"),
        lambda result, at: gate(8001) == 200,
        same=right,
    )


def weights() -> None:
    for file in (MODELS / "large").iterdir():
        file.touch()  # so that what is remembered of it does not count; small files that young are not remembered
    for path, method in (("large", "full"), ("large", "sample")):
        first = module("vllm_weights", path=str(MODELS / path), method=method)
        again = module("vllm_weights", path=str(MODELS / path), method=method)
        seconds = first.elapsed or 0
        entries.add(
            f"manifest of {path}, {method}",
            first.ok and again.ok and not again.changed and again.hashed < MIB and again.digest == first.digest,
            task=first.seconds,
            module_seconds=seconds,
            hashed=first.hashed,
            gib_per_s=round((first.hashed or 0) / 2**30 / seconds, 2) if seconds else None,
            again=again.seconds,
            again_module=again.elapsed,
            error=(first.msg or again.msg or "")[:400] or None,
        )


NEGATE = """
import glob, os, sys
from safetensors import safe_open
from safetensors.torch import save_file
for file in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
    with safe_open(file, "pt") as source:
        if "lm_head.weight" not in source.keys():
            continue
        values = {name: source.get_tensor(name) for name in source.keys()}
        values["lm_head.weight"] = -values["lm_head.weight"]
        save_file(values, file + ".new", metadata={"format": "pt"})
        os.replace(file, file + ".old")
        os.chmod(file + ".new", 0o644)
        os.replace(file + ".new", file)
"""


def reload() -> None:
    if show("vllm-engine@chat", "ActiveState")["ActiveState"] != "active":
        free = used()
        started = module("vllm_engine", engine="chat", state="started", timeout=200)
        ready = json.loads(Path("/var/lib/vllm/chat/ready.json").read_text())
        entries.add(
            "start of chat with its compile cache",
            started.ok,
            task=started.seconds,
            engine=ready.get("boot_s"),
            before=free,
            after=used(),
            timings=started.timings,
            proof=ready.get("proof"),
            error=(started.msg or "")[:500] or None,
        )
        module("vllm_drain", engine="chat", state="serving")
    before = tokens("chat", "large")
    same = module("vllm_reload", engine="chat")
    entries.add(
        "reload of what it serves already",
        same.ok,
        task=same.seconds,
        changed=same.changed,
        actions=same.actions,
        error=(same.msg or "")[:400] or None,
    )
    subprocess.run([PYTHON, "-c", NEGATE, str(MODELS / "large")], check=True)
    gpu = used()
    result = module("vllm_reload", engine="chat")
    other = tokens("chat", "large")
    entries.add(
        "reload of new weights at the same path",
        result.ok and result.changed and other != before and gate(8001) == 200,
        task=result.seconds,
        module_seconds=result.elapsed,
        timings=result.timings,
        before=gpu,
        after=used(),
        weights=result.weights,
        actions=result.actions,
        recovered=result.recovered_from,
        error=(result.msg or "")[:600] or None,
    )
    for old in (MODELS / "large").glob("*.old"):
        old.rename(str(old)[:-4])
    result = module("vllm_reload", engine="chat")
    entries.add(
        "reload of the first weights: their golden matches",
        result.ok and tokens("chat", "large") == before,
        task=result.seconds,
        timings=result.timings,
        actions=result.actions,
        error=(result.msg or "")[:600] or None,
    )


def preload() -> None:
    seen = must(module("vllm_info"))["engines"]
    sources = {name: (one["preload"] or {}).get("weights_source") for name, one in seen.items()}
    entries.add(
        "weights_source by log and memory",
        sources.get("mapped") == "preload_zero_copy" and sources.get("copied") == "preload_copy",
        sources=sources,
        preload={name: one["preload"] for name, one in seen.items()},
    )
    first = module("vllm_preload", daemon="base")
    entries.add(
        "daemon ready again: nothing to do",
        first.ok and not first.changed,
        task=first.seconds,
        held_mib=first.held_mib,
        engines=first.engines,
        digest=first.digest,
        error=(first.msg or "")[:500] or None,
    )
    refused = module("vllm_preload", daemon="base", state="absent")
    entries.add(
        "daemon stop refused under its engine",
        not refused.ok and "mapped" in (refused.msg or ""),
        task=refused.seconds,
        message=(refused.msg or "")[:400],
        active=show("vllm-preload@base", "ActiveState")["ActiveState"],
    )
    spare = module("vllm_preload", daemon="spare", check=True)
    entries.add(
        "used-up daemon is known as such",
        spare.ok and any("given" in one or "copied" in one for one in spare.reasons or []),
        task=spare.seconds,
        reasons=spare.reasons,
        before_state=spare.get("before"),
        held_mib=spare.held_mib,
        error=(spare.msg or "")[:500] or None,
    )


def wrong() -> None:
    right = tokens("mapped", "base")
    (MODELS / "base").rename(MODELS / "base.first")
    (MODELS / "other").rename(MODELS / "base")
    try:
        if not Path("/etc/vllm/lifecycle/second.json").exists():
            status, _lines, text = ansible(
                "playbook",
                [
                    str(HERE / "site.yml"),
                    "--tags",
                    "vllm_engine_configure,vllm_preload_configure",
                    "-e",
                    '{"more_engines": "{{ second }}"}',
                ],
                200,
            )
            if status:
                raise RuntimeError(text[-1500:])
        subprocess.run(["systemctl", "enable", "vllm-engine@second.service"], check=False)
        begun, before = time.time(), used()
        result = module("vllm_engine", engine="second", state="started", timeout=60)
        said = "\n".join(journal("vllm-engine@second.service", begun))
        text = f"{result.msg} {said}"
        digests = sorted(set(re.findall(r"sha256:[0-9a-f]{8,}", text)))
        entries.add(
            "wrong weights refused (same path, same shapes)",
            not result.ok and len(digests) >= 2,
            task=result.seconds,
            before=before,
            after=used(),
            digests=digests,
            message=(result.msg or "")[:500],
            mapped_answers_as_before=tokens("mapped", "base") == right,
        )
        seen = must(module("vllm_info", engine="mapped"))["engines"]["mapped"]
        entries.add(
            "engine that maps other weights than on disk is told",
            bool(seen["preload"].get("wrong") or seen["preload"].get("why")),
            preload=seen["preload"],
        )
    finally:
        subprocess.run(["systemctl", "stop", "vllm-engine@second.service"], check=False)
        subprocess.run(["systemctl", "reset-failed", "vllm-engine@second.service"], check=False)
        (MODELS / "base").rename(MODELS / "other")
        (MODELS / "base.first").rename(MODELS / "base")


def copied() -> None:
    right = tokens("copied", "spare")
    moved(
        "copy mode: sleep level 1",
        "copied",
        "spare",
        lambda: module("vllm_sleep", engine="copied", level=1),
        lambda result, at: at["after"] < at["before"] - 5000,
    )
    moved(
        "copy mode: wake",
        "copied",
        "spare",
        lambda: module("vllm_wake", engine="copied"),
        lambda result, at: gate(8003) == 200,
        same=right,
    )
    refused = module("vllm_sleep", engine="copied", level=2)
    entries.add(
        "copy mode: level 2 refused, since it could not reload",
        not refused.ok and gate(8003) == 200,
        task=refused.seconds,
        message=(refused.msg or "")[:400],
    )


def kill() -> None:
    unit = "vllm-engine@chat.service"
    mine, before, begun = set(pids(unit)), used(), time.time()
    held = sum(mib for pid, mib in holders().items() if pid in mine)
    main = int(show(unit, "MainPID")["MainPID"])
    os.kill(main, 9)
    freed = None
    while time.time() - begun < 60:
        if not set(holders()) & mine:
            freed = round(time.time() - begun, 2)
            break
        time.sleep(0.1)
    after = used()
    stopped = module("vllm_engine", engine="chat", state="stopped", timeout=120)
    said = [line for line in journal(unit, begun - 1) if "stopped," in line or "still held" in line]
    survivors = [pid for pid in mine if Path(f"/proc/{pid}").exists()]
    entries.add(
        "SIGKILL of the API process",
        freed is not None
        and not survivors
        and any("stopped," in line for line in said)
        and after <= before - held + 64,
        before=before,
        after=after,
        held_before=held,
        freed_after_s=freed,
        survivors=survivors,
        settle=said[:4],
        stop_task=stopped.seconds,
        state_after=show(unit, "ActiveState", "Result"),
        error=(stopped.msg or "")[:400] or None,
    )


def lost() -> None:
    right, before, begun = tokens("mapped", "base"), used(), time.time()
    subprocess.run(["systemctl", "stop", "vllm-preload@base.service"], check=False, timeout=90)
    seconds, state = time.time() - begun, show("vllm-preload@base", "ActiveState", "Result", "ExecMainStatus")
    seen = must(module("vllm_info", engine="mapped"))["engines"]["mapped"]
    refused = module("vllm_preload", daemon="base")
    entries.add(
        "daemon stopped by hand under its engine",
        tokens("mapped", "base") == right
        and seen["preload"]["state"] == "lost"
        and not refused.ok
        and state["ActiveState"] == "inactive",
        task=refused.seconds,
        engine=round(seconds, 2),
        before=before,
        after=used(),
        unit=state,
        preload=seen["preload"],
        message=(refused.msg or "")[:400],
        settle=[line for line in journal("vllm-preload@base.service", begun - 1) if line.startswith("base:")],
    )


def renew() -> None:
    """The engine stops, its daemon comes back and is proved, the engine starts."""
    result = module("vllm_engine", engine="mapped", state="restarted", timeout=300, limit=320)
    seen = must(module("vllm_info", engine="mapped"))["engines"]["mapped"]
    entries.add(
        "restart of an engine brings its lost daemon back first",
        result.ok and seen["preload"]["weights_source"] == "preload_zero_copy" and seen["preload"]["state"] == "ready",
        task=result.seconds,
        timings=result.timings,
        preload=seen["preload"],
        error=(result.msg or "")[:500] or None,
    )


def absent() -> None:
    stopped = module("vllm_engine", engines=["mapped", "copied"], state="stopped", timeout=120)
    before = used()
    for daemon in ("base", "spare"):
        at = used()
        result = module("vllm_preload", daemon=daemon, state="absent", timeout=120)
        entries.add(
            f"daemon {daemon} absent, memory proved free",
            result.ok,
            task=result.seconds,
            before=at,
            after=used(),
            error=(result.msg or "")[:400] or None,
        )
    entries.add(
        "all stopped: GPU empty",
        stopped.ok and used() < 1200 and not holders(),
        before=before,
        after=used(),
        holders={str(k): v for k, v in holders().items()},
        error=(stopped.msg or "")[:400] or None,
    )


STEPS = [
    admit,
    golden,
    drain,
    refuse_level1,
    sleep1,
    sleep2,
    kvonly,
    preload,
    wrong,
    copied,
    reload,
    weights,
    kill,
    lost,
    renew,
    absent,
]


def main(stage: str) -> int:
    kind, _unused, names = stage.partition(":")
    wanted = [site] if kind == "site" else [one for one in STEPS if not names or one.__name__ in names.split(",")]
    for step in wanted:
        try:
            step()
        except Exception as exc:  # noqa: BLE001  the other steps are worth their time
            entries.add(step.__name__, False, error=f"{type(exc).__name__}: {exc}"[:1500])
    return 0 if all(one["verdict"] == "proved" for one in entries.value["transitions"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[2]))
