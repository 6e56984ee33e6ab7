"""What this collection relies on that vLLM does, asked of vLLM over its own doors, with no module of ours in between.

Each function wants the engines of inventory.yml serving, and leaves them so.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import stat
import subprocess
import time
import typing as t
from pathlib import Path

import yaml
from world import MODELS, RANKS, Stream, ask, entries, gate, holders, module, must, pids, show, tokens, used

# Some seconds of one stream on a small model; within an engine's time-out for a stop at 60 tokens/s, too.
LONG = 300
LARGE = {"model": "large", "prompt": "The engine answers", "max_tokens": 4, "temperature": 0}
STAGES = ("/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache", "/reset_prefix_cache")
RELOAD = {"method": "reload_weights"}


def post(path: str, body: t.Any = None, timeout: float = 60) -> tuple[int, str]:
    return ask("chat", "POST", path, body, timeout)


def hangs(timeout: float = 3) -> bool:
    """Whether a request is left without an answer."""
    try:
        post("/v1/completions", LARGE, timeout)
    except TimeoutError:
        return True
    return False


def says(path: str) -> bool:
    """What /is_paused or /is_sleeping says."""
    return bool(next(iter(json.loads(ask("chat", "GET", path, timeout=5)[1]).values())))


def gauge() -> list[str]:
    """The sleep states whose gauge is 1."""
    lines = ask("chat", "GET", "/metrics")[1].splitlines()
    found = [
        line for line in lines if line.startswith("vllm:engine_sleep_state{") and float(line.rsplit(" ", 1)[1]) == 1
    ]
    return [line.partition('sleep_state="')[2].partition('"')[0] for line in found]


def counted(name: str) -> float:
    lines = ask("chat", "GET", "/metrics")[1].splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}" + "{"))


def alive() -> int:
    return ask("chat", "GET", "/health")[0]


@contextlib.contextmanager
def out_of_service() -> t.Iterator[None]:
    """``chat`` without clients; not paused, which draining has done."""
    must(module("vllm_drain", engine="chat", state="drained", timeout=60))
    post("/resume")
    try:
        yield
    finally:
        post("/resume")
        must(module("vllm_drain", engine="chat", state="serving", timeout=60))


def answers() -> None:
    """The endpoints' answers, and what is behind them."""
    right = tokens("chat", "large")
    with out_of_service():
        _pause(right)
        _asleep(right)
        _level2(right)
        _kv_only(right)


def _pause(right: list[t.Any]) -> None:
    fact = entries.fact
    routes = json.loads(ask("chat", "GET", "/openapi.json")[1])["paths"]
    wanted = {
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/pause",
        "/resume",
        "/is_paused",
        "/collective_rpc",
        "/release_kv_cache_memory",
    }
    fact(
        "the development endpoints are there, each listed", wanted <= set(routes), missing=sorted(wanted - set(routes))
    )
    bad = {path: post(path) for path in ("/sleep?level=7", "/pause?mode=nonsense")}
    fact("level and mode out of range are 400", [status for status, _text in bad.values()] == [400, 400], answers=bad)
    salted = [tokens("chat", "large") for _unused in range(4)]
    fact(
        "the same question with a new salt has the same answer, to the digit",
        salted == [right] * 4,
        answers=[salted, right],
    )

    post("/pause?mode=wait")
    seen = {"health": alive(), "is_paused": says("/is_paused"), "is_sleeping": says("/is_sleeping"), "gauge": gauge()}
    same = {"health": 200, "is_paused": True, "is_sleeping": True, "gauge": ["awake"]}
    fact("paused: health 200, is_sleeping true, the gauge awake", seen == same, seen=seen)
    status, text = post("/v1/completions", LARGE, 5)
    fact("a request while paused (wait) is 503", status == 503 and "paused" in text, answer=[status, text[:200]])
    status, _text = post("/wake_up")
    fact("/wake_up un-pauses", status == 200 and not says("/is_paused") and post("/v1/completions", LARGE)[0] == 200)
    post("/pause?mode=keep")
    fact("a request while paused (keep) has no answer", hangs())
    post("/resume")
    status, text = post("/wake_up?tags=nonsense")
    fact("/wake_up with tags that do not exist is 200", status == 200, answer=text)


def _asleep(right: list[t.Any]) -> None:
    fact = entries.fact
    awake = used()
    post("/sleep?level=1", timeout=120)
    asleep = used()
    held = sum(mib for pid, mib in holders().items() if pid in pids("vllm-engine@chat.service"))
    fact(
        "level 1 frees all but about 1.5 GiB",
        asleep < awake - 30000 and held < 2500 * RANKS,
        before=awake,
        after=asleep,
        residue=held,
    )
    seen = {"health": alive(), "gauge": gauge(), "is_sleeping": says("/is_sleeping")}
    fact("asleep: health 200", seen == {"health": 200, "gauge": ["weights_offloaded"], "is_sleeping": True}, seen=seen)
    fact("a request while asleep has no answer", hangs())
    status, text = post("/sleep?level=2")
    after = used()
    fact(
        "level 2 on an engine asleep at level 1 is 200 and frees nothing; the gauge says discard_all",
        status == 200 and json.loads(text)["level"] == 2 and gauge() == ["discard_all"] and abs(after - asleep) < 64,
        answer=text,
        mib=[asleep, after],
        gauge=gauge(),
    )
    post("/wake_up")
    fact("awake from that, the answer is the same: the copy was kept", tokens("chat", "large") == right)


def _level2(right: list[t.Any]) -> None:
    fact = entries.fact
    post("/sleep?level=2")
    status, text = post("/wake_up")
    ids = tokens("chat", "large")[0]
    fact(
        "a plain wake from level 2 is 200, healthy, and computes garbage",
        status == 200 and alive() == 200 and ids != right[0],
        answer=text,
        token_ids=ids,
    )
    post("/collective_rpc", RELOAD, 120)
    post("/reset_prefix_cache")
    fact("a reload of the weights repairs that", tokens("chat", "large") == right)

    post("/sleep?level=2")
    steps = []
    for path in STAGES:
        begun = time.monotonic()
        status, text = post(path, RELOAD if path == "/collective_rpc" else None, 120)
        steps.append([path, status, text[:80], round(time.monotonic() - begun, 3), says("/is_sleeping")])
    fact(
        "a staged wake from level 2 sleeps until the KV cache is back, and then answers the same",
        [step[1] for step in steps] == [200] * 4
        and "sleeping" in steps[0][2]
        and [step[4] for step in steps] == [True, True, False, False]
        and tokens("chat", "large") == right,
        steps=steps,
    )


def _kv_only(right: list[t.Any]) -> None:
    awake = used()
    first = [post("/sleep?level=0")[0], post("/release_kv_cache_memory")[0]]
    released, paused = used(), says("/is_paused")
    status, _text = post("/wake_up?tags=kv_cache")
    entries.fact(
        "level 0 and a release free the KV cache alone; its wake un-pauses",
        [*first, status] == [200] * 3
        and released < awake - 15000
        and paused
        and not says("/is_paused")
        and tokens("chat", "large") == right,
        mib=[awake, released, used()],
    )


def streams() -> None:
    """What becomes of a request in flight."""
    fact = entries.fact
    with out_of_service():
        stream = Stream("large", 1500, engine="chat").begin()
        post("/pause?mode=abort")
        stream.join(20)
        seen = [stream.status, stream.received, stream.finish, stream.done]
        fact(
            "a pause that aborts cuts a stream, with 200 and [DONE]",
            stream.status == 200 and stream.done and stream.finish == "abort" and stream.received < 1500,
            stream=seen,
        )
        post("/resume")

        stream = Stream("large", 600, engine="chat").begin()
        post("/pause?mode=keep")
        time.sleep(0.3)
        frozen = stream.received
        time.sleep(1.5)
        still = stream.received == frozen and not stream.ended
        post("/resume")
        stream.join(60)
        fact(
            "a pause that keeps freezes a stream, which ends whole after the resume",
            still and stream.finish == "length" and stream.received == 600,
            frozen_at=frozen,
            stream=[stream.status, stream.received, stream.finish],
        )

        stream = Stream("large", 600, engine="chat").begin()
        begun = time.monotonic()
        post("/pause?mode=wait", timeout=120)
        returned = time.monotonic()
        stream.join(60)
        fact(
            "a pause that waits returns when the stream is whole",
            stream.finish == "length" and stream.received == 600 and abs(stream.ended - returned) < 1,
            seconds=round(returned - begun, 2),
            after_the_stream=round(returned - stream.ended, 3),
        )


def hang() -> None:
    """An engine whose core does nothing."""
    cores = [pid for pid in pids("vllm-engine@chat.service") if "EngineCor" in Path(f"/proc/{pid}/comm").read_text()]
    for pid in cores:
        os.kill(pid, signal.SIGSTOP)
    try:
        seen = {
            "health": alive(),
            "running": counted("num_requests_running"),
            "waiting": counted("num_requests_waiting"),
        }
        try:
            seen["is_sleeping"] = says("/is_sleeping")
        except TimeoutError:
            seen["is_sleeping"] = "no answer"
        told = must(module("vllm_info", engine="chat"))["engines"]["chat"]["state"]
    finally:
        for pid in cores:
            os.kill(pid, signal.SIGCONT)
    same = {"health": 200, "running": 0, "waiting": 0, "is_sleeping": "no answer"}
    entries.fact("an engine whose core hangs is healthy, with nothing to do", bool(cores) and seen == same, seen=seen)
    entries.add("engine whose core hangs: unknown", told == "unknown", state=told)
    time.sleep(2)
    must(module("vllm_drain", engine="chat", state="serving", timeout=60))


def transient(name: str, command: list[str]) -> str:
    """Starts a process as a unit of its own, as the user and with the environment of an engine of ours."""
    unit = f"raw-{name}.service"
    words = ["systemd-run", f"--unit={unit}", "--uid=vllm", "--gid=vllm", "--quiet", "--property=RemainAfterExit=yes"]
    words += [
        f"--property=RuntimeDirectory=vllm/{name}",
        f"--property=CacheDirectory=vllm-{name}",
        "--property=LimitMEMLOCK=infinity",
    ]
    words += [
        "--property=EnvironmentFile=/etc/vllm/engines/mapped.env",
        f"--setenv=VLLM_CACHE_ROOT=/var/cache/vllm-{name}",
    ]
    subprocess.run([*words, *command], check=True)
    return unit


def ended(unit: str, limit: float) -> tuple[str, str]:
    """The exit status of a unit's process, and what it has said; "" while it runs."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        seen = show(unit, "SubState", "ExecMainStatus", "ExecMainPID")
        if seen["SubState"] in ("exited", "failed"):
            said = subprocess.run(
                ["journalctl", "--no-pager", "-o", "cat", "-u", unit], capture_output=True, text=True, check=False
            )
            return seen["ExecMainStatus"], said.stdout
        time.sleep(0.5)
    return "", ""


def cache() -> None:
    """What the preload daemon gives, and to whom.

    First the engine that is to start: beside the other two, of which one gives memory back, it has ended in its start.
    """
    fact = entries.fact
    gpu = json.loads(Path("/etc/vllm/lifecycle/mapped.json").read_text())["gpus"][0]
    name = f"vllm_weight_cache_{hashlib.md5(gpu.encode()).hexdigest()}.sock"
    daemon = json.loads(yaml.safe_load(Path("/etc/vllm/engines/mapped.yaml").read_text())["model-loader-extra-config"])
    sockets = Path(daemon["socket_dir"])
    modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in sockets.iterdir()}
    fact(
        "a daemon's socket is named by the MD5 of the GPU's UUID, for its user alone",
        modes.get(name) == "0o600",
        found=modes,
    )

    serve = ["/opt/vllm/engines/mapped/bin/vllm", "serve"]
    common = [
        f"--tensor-parallel-size={RANKS}",
        "--max-model-len=2048",
        "--enforce-eager",
        "--gpu-memory-utilization=0.05",
        "--load-format=ipc_cache",
    ]
    loader = json.dumps({**daemon, "mode": "zero_copy", "fallback": False})
    common += [f"--model-loader-extra-config={loader}"]
    other = transient(
        "other",
        [
            *serve,
            str(MODELS / "other"),
            "--served-model-name=other",
            "--dtype=bfloat16",
            "--uds=/run/vllm/other/engine.sock",
            *common,
        ],
    )
    units = [other]
    try:
        end = time.monotonic() + 150
        while time.monotonic() < end:
            if show(other, "SubState")["SubState"] in ("exited", "failed"):
                said = [line for line in ended(other, 1)[1].splitlines() if "Error" in line]
                raise RuntimeError(f"the engine with other weights ended: {said[:8]}")
            with contextlib.suppress(OSError):
                if ask("other", "GET", "/health", timeout=2)[0] == 200:
                    break
            time.sleep(0.5)
        given, right = tokens("other", "other"), tokens("mapped", "base")
        fact(
            "another checkpoint of equal shapes is served with the daemon's weights",
            given == right,
            answers=[given, right],
        )
        half = transient(
            "half", [*serve, str(MODELS / "base"), "--dtype=float16", "--uds=/run/vllm/half/engine.sock", *common]
        )
        second = ["/opt/vllm/preload/base/bin/vllm", "preload", f"--model={MODELS / 'base'}", "--dtype=bfloat16"]
        second += [f"--tensor-parallel-size={RANKS}"]
        again = transient("again", [*second, f"--weight-cache-socket-dir={sockets}"])
        units += [half, again]
        status, said = ended(half, 120)
        fact("another dtype without fallback ends with 1", status == "1", status=status, said=said[-300:])
        status, said = ended(again, 120)
        fact(
            "a second daemon on the same socket ends with 1",
            status == "1" and "already owns" in said,
            status=status,
            said=said[-300:],
        )
    finally:
        for unit in units:
            subprocess.run(["systemctl", "stop", unit], check=False, stderr=subprocess.DEVNULL)
            subprocess.run(["systemctl", "reset-failed", unit], check=False, stderr=subprocess.DEVNULL)


def signals() -> None:
    """SIGTERM to an engine with a stream; afterwards it is stopped."""
    unit = "vllm-engine@copied.service"
    stream = Stream("spare", LONG, engine="copied").begin()
    os.kill(int(show(unit, "MainPID")["MainPID"]), signal.SIGTERM)
    time.sleep(0.5)
    health = ask("copied", "GET", "/health", timeout=5)[0] if not stream.ended else 0
    refused = ask("copied", "POST", "/v1/completions", {**LARGE, "model": "spare"}, 5)[0] if not stream.ended else 0
    stream.join(30)
    while show(unit, "MainPID")["MainPID"] != "0":
        time.sleep(0.2)
    status = show(unit, "ExecMainStatus")["ExecMainStatus"]
    subprocess.run(["systemctl", "stop", unit], check=False)
    entries.fact(
        "after SIGTERM a stream ends whole within the time-out; new requests are 500, health is 200, the exit 0",
        stream.finish == "length" and stream.received == LONG and [health, refused, status] == [200, 500, "0"],
        stream=[stream.status, stream.received, stream.finish],
        health=health,
        refused=refused,
        status=status,
        ready=gate(8003),
    )
