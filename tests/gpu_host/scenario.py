"""Runs inside the GPU host: the roles, the modules and the units' doors on real engines, each with a second signal.

Usage: scenario.py site|destroy|scenario[:STEP,...]

Writes GPU_HOST_OUT/gpu-report.json, one entry a transition: what our task took, what the engine itself says it took,
GPU memory by NVML before and after, and whether it is proved; and the facts about vLLM that facts.py asks it for. A
step that fails is an entry like the others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import typing as t
from pathlib import Path

import facts
import pynvml
from world import (
    DEVICES,
    HERE,
    MIB,
    MODELS,
    OUT,
    RANKS,
    Result,
    Stream,
    Watch,
    ansible,
    ask,
    available,
    engine_seconds,
    entries,
    gate,
    health,
    holders,
    journal,
    listening,
    module,
    must,
    pids,
    resident,
    show,
    task,
    tokens,
    used,
)


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
    right = result.ok and result.checked is True and expect(result, seen)
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


def loaded(engine: str) -> int | None:
    """MiB of weights on the GPU, as the engine's log said at its start."""
    return json.loads(Path(f"/var/lib/vllm/{engine}/ready.json").read_text()).get("weights_mib")


# Steps

ENGINES = ["chat", "mapped", "copied"]


def site() -> None:
    """The roles, on a machine on which none of it is, as molecule/gpu has it."""
    status, _lines, text = ansible("playbook", [str(HERE.parent.parent / "molecule/gpu/create.yml")], 60)
    if status:
        raise RuntimeError(text[-1500:])
    entries.value["machine"] = {
        "gpu": pynvml.nvmlDeviceGetName(DEVICES[0]),
        "gpus": len(DEVICES),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "vllm": "0.33.0",
        "gpu_mib": pynvml.nvmlDeviceGetMemoryInfo(DEVICES[0]).total // MIB,
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


def again() -> None:
    begun = time.time()
    status, lines, text = ansible("playbook", [str(HERE / "site.yml")], 400)
    changed = [one["task"] for one in lines if one["result"].get("changed")]
    entries.add(
        "roles again: nothing changes",
        status == 0 and not changed,
        task=round(time.time() - begun, 1),
        changed=changed,
        error=text[-1000:] if status else None,
    )


def admit() -> None:
    found = {name: task(name).seconds for name in ("ansible.builtin.ping", "baremetal.vllm.vllm_info")}
    entries.value["machine"].update(ping=found["ansible.builtin.ping"], start=found["baremetal.vllm.vllm_info"])
    result = module("vllm_drain", engines=ENGINES, state="serving")
    seen = must(module("vllm_info"))["engines"]
    states = {name: one["state"] for name, one in seen.items()}
    entries.add(
        "admit all engines",
        result.ok and [states[name] for name in ENGINES] == ["serving"] * 3 and gate(8001) == 200,
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
    stream = Stream("large", 900, port=8001).begin()
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
            lambda: task("baremetal.vllm.vllm_sleep", engine="chat", level=1),
            lambda result, at: at["after"] < at["before"] - 30000 and gate(8001) == 503,
            expected_host_copy_mib=seen["host_copy_mib"],
            weights_mib=loaded("chat"),
        )
        if number == "second":
            again = module("vllm_sleep", engine="chat", level=1)
            entries.add("sleep level 1 again: nothing to do", again.ok and not again.changed, task=again.seconds)
        moved(
            f"wake from level 1, {number}",
            "chat",
            "large",
            lambda: task("baremetal.vllm.vllm_wake", engine="chat"),
            lambda result, at: gate(8001) == 200,
            same=right,
        )


def restart() -> None:
    """What a wake spares."""
    right, before = tokens("chat", "large"), used()
    result = module("vllm_engine", engine="chat", state="restarted", timeout=300)
    ready = json.loads(Path("/var/lib/vllm/chat/ready.json").read_text())
    module("vllm_drain", engine="chat", state="serving")
    entries.add(
        "restart of an idle engine, its compile cache there",
        result.ok and result.changed and tokens("chat", "large") == right and gate(8001) == 200,
        task=result.seconds,
        engine=ready.get("boot_s"),
        before=before,
        after=used(),
        timings=result.timings,
        error=(result.msg or "")[:500] or None,
    )


def sleep2() -> None:
    right = tokens("chat", "large")
    moved(
        "sleep level 2",
        "chat",
        "large",
        lambda: task("baremetal.vllm.vllm_sleep", engine="chat", level=2),
        lambda result, at: at["after"] < at["before"] - 30000 and gate(8001) == 503,
    )
    moved(
        "staged wake from level 2",
        "chat",
        "large",
        lambda: task("baremetal.vllm.vllm_wake", engine="chat"),
        lambda result, at: gate(8001) == 200,
        same=right,
    )


def kvonly() -> None:
    right = tokens("chat", "large")
    moved(
        "KV cache only: sleep",
        "chat",
        "large",
        lambda: task("baremetal.vllm.vllm_sleep", engine="chat", kv_only=True),
        lambda result, at: at["after"] < at["before"] - 15000 and gate(8001) == 503,
    )
    moved(
        "KV cache only: wake",
        "chat",
        "large",
        lambda: task("baremetal.vllm.vllm_wake", engine="chat"),
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


def negate(model: Path) -> None:
    """Another checkpoint of equal shapes at the same path: with other signs in its last layer. The old one stays."""
    for file in sorted(model.glob("*.safetensors")):
        with open(file, "rb") as source:
            length = struct.unpack("<Q", source.read(8))[0]
            header = json.loads(source.read(length))
        if "lm_head.weight" not in header:
            continue
        first, last = (8 + length + offset for offset in header["lm_head.weight"]["data_offsets"])
        shutil.copy(file, f"{file}.new")
        with open(f"{file}.new", "r+b") as target:
            target.seek(first)
            values = bytearray(target.read(last - first))
            values[1::2] = values[1::2].translate(
                bytes(byte ^ 0x80 for byte in range(256))
            )  # bfloat16: the sign is the highest bit
            target.seek(first)
            target.write(values)
        file.rename(f"{file}.old")
        Path(f"{file}.new").rename(file)


def reload() -> None:
    if show("vllm-engine@chat", "ActiveState")["ActiveState"] != "active":
        free = used()
        watch = Watch(lambda: listening("chat"))
        watch.start()
        started = module("vllm_engine", engine="chat", state="started", timeout=200)
        seen = watch.end()
        entries.fact(
            "the socket is there before the engine listens, and refuses",
            "refused" in seen[: seen.index("connected")],
            seen=seen,
        )
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
    negate(MODELS / "large")
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
        lambda: task("baremetal.vllm.vllm_sleep", engine="copied", level=1),
        lambda result, at: at["after"] < at["before"] - 5000,
        weights_mib=loaded("copied"),
    )
    moved(
        "copy mode: wake",
        "copied",
        "spare",
        lambda: task("baremetal.vllm.vllm_wake", engine="copied"),
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
    entries.fact("a preload daemon ends with status 241 after SIGTERM", state["ExecMainStatus"] == "241", unit=state)


def upgrade() -> None:
    """Another setting for one engine, by the playbook: it alone restarts, and its lost daemon comes back before it."""
    right = tokens("mapped", "base")
    before = {engine: show(f"vllm-engine@{engine}", "MainPID")["MainPID"] for engine in ENGINES}
    play = [str(HERE.parent.parent / "playbooks/rolling_upgrade.yml")]
    variables = {
        "vllm_hosts": "gpu_host",
        "vllm_upgrade_group": "gpu_host",
        "vllm_upgrade_min_serving": 0,
        "vllm_upgrade_canary": 0,
    }
    # Forced, since the engine that was refused is still held by whoever wanted it started.
    variables |= {
        "vllm_upgrade_force": True,
        "vllm_upgrade_soak": 0,
        "vllm_upgrade_drain_timeout": 60,
        "vllm_upgrade_start_timeout": 300,
    }
    play += ["-e", json.dumps({**variables, "mapped_more": {"max-num-seqs": 64}})]
    begun, watch = time.time(), Watch(lambda: health(8101))
    watch.start()
    status, _lines, text = ansible("playbook", play, 400)
    said = watch.end()
    seen = must(module("vllm_info", engine="mapped"))["engines"]["mapped"]
    after = {engine: show(f"vllm-engine@{engine}", "MainPID")["MainPID"] for engine in before}
    log = "\n".join(journal("vllm-engine@mapped.service", begun))
    entries.add(
        "another setting by rolling_upgrade: that engine alone restarts, its lost daemon first",
        status == 0
        and [engine for engine in before if after[engine] != before[engine]] == ["mapped"]
        and re.search(r"max_num_seqs'?[:=] ?64", log) is not None
        and seen["preload"]["weights_source"] == "preload_zero_copy"
        and seen["state"] == "serving"
        and tokens("mapped", "base") == right,
        task=round(time.time() - begun, 1),
        pids=[before, after],
        preload=seen["preload"],
        error=text[-1500:] if status else None,
    )
    entries.fact(
        "a daemon's health port refuses, then says 503 while it loads, then 200",
        said[-2:] == ["503", "200"] and said[0] == "refused",
        seen=said,
    )


def measure() -> None:
    """Every way into service, by the playbook that is there for it; what each consists of goes into the report."""
    must(module("vllm_drain", engines=["chat", "mapped"], state="serving"))
    path = OUT / "measure.json"
    variables = {
        "vllm_hosts": "gpu_host",
        "vllm_measure_group": "gpu_host",
        "vllm_measure_min_serving": 0,
        "vllm_measure_cold": True,
        "vllm_measure_engines": ["chat", "mapped"],
        "vllm_report_path": str(path),
    }
    playbook = str(HERE.parent.parent / "playbooks/measure.yml")
    begun = time.time()
    status, _lines, text = ansible("playbook", [playbook, "-e", json.dumps(variables)], 560)
    rows = [one for one in json.loads(path.read_text())["hosts"] if one["outcome"] == "measured"]
    entries.value["measured"] = [{key: value for key, value in one.items() if key != "spans"} for one in rows]
    ways = {(one["engine"], one["path"]) for one in rows}
    wanted = {("chat", "sleep1"), ("chat", "sleep2"), ("chat", "cold"), ("chat", "warm"), ("mapped", "preload")}
    entries.add(
        "measure: each way into service, proved by its golden",
        status == 0 and ways == wanted and {one["proof"] for one in rows} == {"golden"},
        task=round(time.time() - begun, 1),
        error=text[-1500:] if status else None,
    )


def absent() -> None:
    stopped = module("vllm_engine", engines=ENGINES, state="stopped", timeout=120)
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
        stopped.ok and used() < 1200 * RANKS and not holders(),
        before=before,
        after=used(),
        holders={str(k): v for k, v in holders().items()},
        error=(stopped.msg or "")[:400] or None,
    )


def destroy() -> None:
    status, _lines, _text = ansible("playbook", [str(HERE.parent.parent / "molecule/gpu/destroy.yml")], 120)
    units = subprocess.run(
        ["systemctl", "list-units", "--all", "--plain", "--no-legend", "vllm-*"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    left = [path for path in ("/etc/vllm", "/var/lib/vllm") if os.path.exists(path)]
    entries.add("all of it removed", status == 0 and not units and not left and not holders(), units=units, left=left)


STEPS = [
    admit,
    golden,
    drain,
    refuse_level1,
    facts.answers,
    facts.streams,
    facts.hang,
    sleep1,
    restart,
    sleep2,
    kvonly,
    preload,
    facts.cache,
    wrong,
    copied,
    again,
    kill,
    reload,
    weights,
    lost,
    upgrade,
    measure,
    facts.signals,
    absent,
]


def main(stage: str) -> int:
    kind, _unused, names = stage.partition(":")
    known = {one.__name__: one for one in (site, *STEPS, destroy)}
    wanted = [known[name] for name in names.split(",")] if names else STEPS if kind == "scenario" else [known[kind]]
    for step in wanted:
        begun = time.time()
        try:
            step()
        except Exception as exc:  # noqa: BLE001  the other steps are worth their time
            entries.add(step.__name__, False, error=f"{type(exc).__name__}: {exc}"[:1500])
        print(f"[{time.strftime('%H:%M:%S')}] {step.__name__}: {time.time() - begun:.0f} s", flush=True)
    found = [one["verdict"] == "proved" for one in entries.value["transitions"]]
    return 0 if all(found) and all(one["holds"] for one in entries.value.get("facts", [])) else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
