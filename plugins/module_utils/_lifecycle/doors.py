# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the engine's unit calls: preflight, ready, drain and settle. systemd serialises them, so none takes the lock.

``proved`` is these doors' word at the gate or balancer, ``admission`` is a play's or an operator's. So an engine that
an operator stops, or a host that reboots, leaves the router before its stop and comes back by itself once its start is
proved.
"""

from __future__ import annotations

import os
import pwd
import socket
import time
import typing as t
from pathlib import Path

from . import (
    adapters,
    adapters_apply,
    admission,
    boot,
    claim,
    compile_cache,
    footprint,
    generations,
    golden,
    gpu,
    lease,
    owners,
    preload_doors,
    process,
    store,
)
from .config import EngineConfig
from .deadline import Deadline
from .engine import Engine
from .errors import AdmissionDown, DeadlineExceeded, LifecycleError, Refused, Surprise, Unreachable, UsageError
from .lease import LeaseRequest
from .preload import peek
from .source import MODES
from .transition import Report, Transition, Wish
from .unit import Unit, process_start

# Run by the runtime's own Python as the service user: what it cannot read or import, the engine cannot either.
_PROBE = """
import json, os, sys
config, model = sys.argv[1:3]
import yaml
try:
    with open(config) as stream:
        value = yaml.safe_load(stream)
    if not isinstance(value, dict):
        raise ValueError("it holds no mapping")
except Exception as exc:
    sys.exit(f"config file {config}: " + " ".join(str(exc).split()))
if os.path.isabs(model):
    try:
        names = sorted(os.listdir(model))
        for name in names:
            path = os.path.join(model, name)
            if os.path.isfile(path) or os.path.islink(path):
                with open(path, "rb") as stream:
                    stream.read(1)
    except OSError as exc:
        sys.exit(f"model file {exc.filename}: {exc.strerror}")
    lacks = [w for w in ("config.json", "tokenizer") if not any(n.startswith(w) for n in names)]
    if lacks or not any(n.endswith((".safetensors", ".bin", ".gguf")) for n in names):
        sys.exit(f"model directory {model} lacks " + ", ".join(lacks or ["weight files"]))
"""
PROBE_TIMEOUT = 60
POLL_INTERVAL = 0.1
# One answer of a starting engine. The first completion of a shape compiles or warms kernels: it gets all that is left.
CALL_TIMEOUT = 5.0
# How often the warm-up is repeated to be timed, unless that takes longer. The best time counts, as with any benchmark
# on a machine that others use too.
SPEED_PASSES = 3
SPEED_SECONDS = 5.0


def wanted(config: EngineConfig) -> None:
    """Before anything of a start: an engine that was put to sleep is not started by itself, after a crash or at boot.

    Another one may have its place on the GPU by now. Who starts it on purpose takes its lease for that first.

    :raises Refused: names who holds it asleep.
    """
    held = lease.read(config.engine)
    if held is not None and held.purpose == "asleep" and time.time() < held.expires:
        raise Refused(
            f"engine '{config.engine}' on {socket.gethostname()} is not started by itself: {held.owner} has put it to "
            f"sleep ({held.reason or 'no reason given'})",
            entry="start-held-back",
            next_step="wake it (baremetal.vllm.wake), give it its place (baremetal.vllm.switch), or start it with "
            "vllm_engine state=started",
            lease=held.owner,
        )


def preflight(config: EngineConfig, report: Report) -> None:
    """Before the process starts: everything whose lack would otherwise show after minutes, or never.

    :raises UsageError: names the file, the user or the process in the way.
    """
    _unprove(config, report)
    # The process that starts now reads this configuration, whatever the files say when it is ready.
    invocation = os.environ.get("INVOCATION_ID", "")
    digest = config.config_digest
    record = {"config_digest": digest, "invocation": invocation, "weights": _digest_on_disk(config)}
    lease.record(config.engine, "preflight.json", record)
    here = socket.gethostname()
    if not (store.root() / "run/systemd/system").is_dir():
        raise UsageError(
            f"host {here} was not booted with systemd",
            entry="systemd-missing",
            next_step="use a host that was booted with systemd",
        )
    try:
        socket.getaddrinfo(here, None)
    except OSError as exc:
        raise UsageError(
            f"host {here} cannot resolve its own name ({exc}); the engine would hang without an error",
            entry="host-name",
            next_step=f"add {here} to /etc/hosts",
        ) from exc
    python = Path(config.runtime) / "bin/python"
    if not python.exists():
        raise UsageError(
            f"engine '{config.engine}' on {here}: its runtime {config.runtime} has no bin/python",
            entry="runtime-missing",
            next_step=f"run the role baremetal.vllm.vllm_runtime for version {config.runtime_version}",
        )
    _probe_as_user(config, python)
    adapters.preflight(config)
    _free_socket(config)
    compile_cache.prepare(config, report)
    lease.record(config.engine, "preflight.json", {**record, "caches": compile_cache.filled(config)})
    # Before the ticket for its GPUs: its daemon may have to start meanwhile.
    preload_doors.await_daemon(config, report)
    generations.put_aside(config, report)
    claim.begin(config, invocation, Deadline(config.start_timeout), report)


def _digest_on_disk(config: EngineConfig) -> str:
    """The checkpoint's digest where it is known without reading it, else ""."""
    try:
        manifest = peek(config.model, "full")
    except LifecycleError:  # not a checkpoint on disk; what is wrong with one, the probe tells
        return ""
    return manifest.digest if manifest else ""


def _digest_loaded(config: EngineConfig, invocation: str) -> str:
    """What this start has loaded: the digest that the files had before it and have now."""
    before = lease.last_preflight(config.engine) or {}
    digest = str(before.get("weights") or "")
    return digest if digest and before.get("invocation") == invocation and digest == _digest_on_disk(config) else ""


def _path(config: EngineConfig, invocation: str, lent: dict[str, t.Any] | None) -> str:
    """How this start came to its weights and kernels: preload, warm or cold; "" where that is not known."""
    if lent is not None and lent.get("source") in MODES.values():
        return "preload"
    before = lease.last_preflight(config.engine) or {}
    caches = before.get("caches") if before.get("invocation") == invocation else None
    return "" if caches is None else "warm" if caches else "cold"


def _probe_as_user(config: EngineConfig, python: Path) -> None:
    here = socket.gethostname()
    try:
        user = pwd.getpwnam(config.user)
    except KeyError:
        raise UsageError(
            f"host {here} has no user '{config.user}'",
            entry="service-user",
            next_step="run the role baremetal.vllm.vllm_host",
        ) from None
    identity: dict[str, t.Any] = {}
    if os.geteuid() == 0:
        identity = {
            "user": user.pw_uid,
            "group": user.pw_gid,
            "extra_groups": os.getgrouplist(user.pw_name, user.pw_gid),
        }
    try:
        done = process.run(
            [str(python), "-I", "-c", _PROBE, config.config_file, config.model], PROBE_TIMEOUT, cwd="/", **identity
        )
    except (OSError, process.TimeoutExpired) as exc:
        raise UsageError(
            f"engine '{config.engine}' on {here}: user {config.user} cannot run {python}: {exc}",
            entry="runtime-missing",
            next_step="run the role baremetal.vllm.vllm_runtime again",
        ) from exc
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise UsageError(
            f"engine '{config.engine}' on {here}, as user {config.user}: {reason[0]}",
            entry="file-unreadable",
            next_step="correct the file or its permissions (namei -l shows the whole path), then start it again",
        )


def _free_socket(config: EngineConfig) -> None:
    """Nobody may listen where the engine will; a socket file without a listener is removed."""
    path = Path(config.socket)
    try:
        pid = owners.listener(path)
    except OSError as exc:
        raise UsageError(
            f"engine '{config.engine}' on {socket.gethostname()}: socket {path}: {exc}",
            entry="socket-held",
            next_step=f"look at {path}",
        ) from exc
    if pid is None:
        store.remove(path)
        return
    raise Refused(
        f"engine '{config.engine}' on {socket.gethostname()}: process {pid} ({owners.command(pid)}) already "
        f"listens on {path}",
        entry="socket-held",
        next_step=f"find its unit with 'systemctl status {pid}' and stop that unit",
        pid=pid,
    )


def ready(config: EngineConfig, report: Report, main_pid: int) -> None:
    """After the process has started: wait until it serves, warm it with the configured shapes, and say so to the gate.

    Watches the main process: systemd does not end this wait when that process dies.

    :raises LifecycleError: the process died, or its answers are wrong.
    :raises DeadlineExceeded: not ready within the engine's start_timeout.
    """
    deadline = Deadline(config.start_timeout)
    identity = process_start(main_pid)
    invocation = os.environ.get("INVOCATION_ID", "")
    if config.headless:
        _headless(config, main_pid, identity, invocation, report)
        return
    begun = Unit(config.unit).show().started_at or time.monotonic()
    engine = Engine(config)
    try:
        _await_serving(config, engine, main_pid, identity, deadline, report)
        booted = time.monotonic() - begun
        lent = preload_doors.confirm(config, report)
        warm = 0.0
        shapes = config.warmup or [{"prompt_tokens": golden.SHORT_PROMPT, "max_tokens": 1}]
        for shape in shapes:
            _alive(config, main_pid, identity)
            report(
                f"{config.engine}: warming with {shape['prompt_tokens']} prompt and {shape['max_tokens']} new tokens"
            )
            try:
                warm += golden.answer_shape(engine, shape, deadline)
            except Unreachable:
                _alive(config, main_pid, identity)
                raise
        if config.adapters:
            adapters_apply.at_start(config, engine, Unit(config.unit).show(), deadline, report)
        proof = golden.prove(engine, deadline, report, answered=True)
        speed, again = _speed(engine, shapes, deadline)
        _alive(config, main_pid, identity)
    finally:
        engine.close()
    lease.record(
        config.engine,
        "ready.json",
        {
            "main_pid": main_pid,
            "began": round(time.time() - (time.monotonic() - begun), 3),
            "boot_s": round(booted, 3),
            "boot": boot.parts(Unit(config.unit).timed_log(invocation), begun, begun + booted),
            "warm_s": round(warm + again, 3),
            "speed": speed,
            "config_digest": (lease.last_preflight(config.engine) or {}).get("config_digest"),
            "pids": Unit(config.unit).show().pids,
            "runtime_version": config.runtime_version,
            "invocation": invocation,
            "preload": lent,
            "path": _path(config, invocation, lent),
            "proof": proof.asdict(),
            "weights": _digest_loaded(config, invocation),
            # What a sleep at level 1 has to copy; the engine itself says it once.
            "weights_mib": footprint.loaded_mib(Unit(config.unit).journal(5000, invocation)) if invocation else None,
        },
    )
    compile_cache.proved(config)
    generations.promote(config, speed)
    claim.end(config)
    _tell_gate(config, "1", report)
    report(
        f"{config.engine}: ready after {booted:.1f} s, warmed in {warm:.1f} s, proved by {proof.says}, "
        f"{speed['tokens_per_s']:g} tokens/s"
    )


def _headless(config: EngineConfig, main_pid: int, identity: int | None, invocation: str, report: Report) -> None:
    """An engine without an API server: its process lives, and waits for its head, which proves itself and this one."""
    _alive(config, main_pid, identity)
    started = {
        "main_pid": main_pid,
        "config_digest": (lease.last_preflight(config.engine) or {}).get("config_digest"),
        "pids": Unit(config.unit).show().pids,
        "runtime_version": config.runtime_version,
        "invocation": invocation,
        "weights": _digest_loaded(config, invocation),
    }
    lease.record(config.engine, "ready.json", started)
    claim.end(config)
    report(f"{config.engine}: its process runs, and waits for the head of group {config.group}, which proves it")


def _speed(
    engine: Engine, shapes: t.Sequence[t.Mapping[str, int]], deadline: Deadline
) -> tuple[dict[str, t.Any], float]:
    """How fast the warmed engine answers the shapes of its warm-up, one after the other, while it has no other work.

    Only speeds of the same shapes can be compared.

    :returns: the speed, and the seconds that it took to find it.
    """
    passes: list[float] = []
    while not passes or (len(passes) < SPEED_PASSES and sum(passes) < SPEED_SECONDS):
        passes.append(sum(golden.answer_shape(engine, shape, deadline) for shape in shapes))
    tokens = sum(shape["max_tokens"] for shape in shapes)
    speed = round(tokens / max(min(passes), 1e-6), 1)
    return {"tokens_per_s": speed, "shapes": [dict(shape) for shape in shapes]}, sum(passes)


def _await_serving(
    config: EngineConfig, engine: Engine, main_pid: int, identity: int | None, deadline: Deadline, report: Report
) -> None:
    told = time.monotonic()
    while True:
        _alive(config, main_pid, identity)
        try:
            if engine.healthy(CALL_TIMEOUT):
                models = engine.models(CALL_TIMEOUT)
                if config.served_model_name in models:
                    return
                raise Surprise(
                    f"engine '{config.engine}' on {socket.gethostname()} serves {models}, not "
                    f"'{config.served_model_name}'",
                    entry="wrong-model",
                    next_step=f"compare served-model-name in {config.config_file} with the engine's declaration",
                )
            why = "/health is not 200"
        except Unreachable as exc:  # not listening yet
            why = str(exc)
        if time.monotonic() - told > 10:
            told = time.monotonic()
            report(f"{config.engine}: not ready yet, {deadline.says}: {why}")
        if not deadline.rest(POLL_INTERVAL):
            raise DeadlineExceeded(
                f"engine '{config.engine}' on {socket.gethostname()} is not ready after {deadline.seconds:g} s: {why}",
                entry="start-timeout",
                next_step=f"read journalctl -u {config.unit}; raise start_timeout when the model is only large",
            )


def _alive(config: EngineConfig, main_pid: int, identity: int | None) -> None:
    if identity is None or process_start(main_pid) != identity:
        raise LifecycleError(
            f"engine '{config.engine}' on {socket.gethostname()}: its main process {main_pid} died before it was ready",
            entry="unit-not-started",
            next_step=f"read journalctl -u {config.unit} above this line for the engine's own last words",
        )


class _DoorDrain(Transition):
    """The drain of a stopping unit: the same steps as a play's, except that ``proved`` is withdrawn, not admission."""

    admission_patience = 0.0  # the engine's own gauges decide instead

    def drain(self) -> None:
        config = self.config
        routed = True
        try:
            routed = self.door.observe().ready if self.door else False
        except LifecycleError as exc:
            self.report(f"{config.engine}: {exc} {exc.reference}")
        _unprove(config, self.report)
        if routed:
            self.report(f"{config.engine}: withdrawn; the router has {config.router_detection:g} s to notice")
            self._await_router()
        try:
            self._quiet(self.deadline)
        except AdmissionDown as exc:
            self.report(f"{config.engine}: {exc}; the engine's own gauges decide {exc.reference}")
            self._quiet_without_gate()

    def _quiet_without_gate(self) -> None:
        while self.engine.metrics(CALL_TIMEOUT).in_flight:
            if not self.deadline.rest():
                raise DeadlineExceeded(
                    f"engine '{self.config.engine}' still works after {self.deadline.seconds:g} s",
                    entry="drain-timeout",
                )


def drain(config: EngineConfig, report: Report, main_pid: int) -> None:
    """Before the unit is stopped by anyone, a reboot included: let every request finish that a client was promised.

    :raises DeadlineExceeded: requests were left at the drain time-out; systemd goes on and cuts them.
    """
    if main_pid and process_start(main_pid) is None:
        _unprove(config, report)
        report(f"{config.engine}: its main process has ended already; nothing to drain")
        return
    if config.headless:
        # When it was recorded as started, it had not begun those that hold the GPUs' memory.
        started = lease.last_start(config.engine) or {}
        lease.record(config.engine, "ready.json", {**started, "pids": Unit(config.unit).show().pids})
        report(f"{config.engine}: the head of group {config.group} drains, and has to be drained before this one stops")
        return
    wish = Wish("drained", LeaseRequest(owner="systemd"), config.drain_timeout)
    job = _DoorDrain(config, wish, Deadline(config.drain_timeout), report)
    try:
        job.drain()
    except Unreachable as exc:
        _unprove(config, report)
        raise LifecycleError(
            f"engine '{config.engine}' on {socket.gethostname()} does not answer, so nothing can be drained: {exc}",
            entry="drain-impossible",
            next_step="the unit is stopped without a drain",
        ) from exc
    finally:
        job.engine.close()
    report(f"{config.engine}: drained in {job.deadline.elapsed:.1f} s")


def remind(config: EngineConfig, report: Report) -> None:
    """Between changes: what a reload of the balancer has forgotten. A change that runs tells it by itself.

    :raises AdmissionDown: the balancer gives no answer.
    """
    door = admission.choose(config)
    if door is not None and door.remind():
        report(f"{config.engine}: {config.door} had forgotten what it was told, and was told again")
    else:
        report(f"{config.engine}: {config.door} does as it was told" if door else f"{config.engine}: admission is none")


def settle(config: EngineConfig, report: Report) -> None:
    """After the last process has ended: withdraw the proof, record how it ended, wait until its GPU memory is free.

    :raises Refused: processes still hold memory on the engine's GPUs; names them.
    """
    _unprove(config, report)
    started = lease.last_start(config.engine) or {}
    end = {key: os.environ.get(key.upper(), "") for key in ("service_result", "exit_code", "exit_status")}
    lease.record(config.engine, "last_stop.json", {**end, "main_pid": started.get("main_pid")})
    preload_doors.settle_engine(config, report)
    report(
        f"{config.engine}: stopped, {end['service_result'] or 'result unknown'} (status {end['exit_status'] or '?'})"
    )
    _judge_start(config, started, report)
    deadline = Deadline(60)
    while True:
        holders = _holders(config)
        if not holders:
            claim.end(config)
            return
        if not deadline.rest(0.5):
            raise Refused(
                f"engine '{config.engine}' on {socket.gethostname()}: its GPU memory is still held by "
                + ", ".join(f"process {pid} ({owners.command(pid)}, {mib} MiB)" for pid, mib in holders.items()),
                entry="gpu-memory-held",
                next_step="stop what the processes belong to (systemctl status PID) before the next start",
                left={"processes": holders},
            )


def _judge_start(config: EngineConfig, ready: t.Mapping[str, t.Any], report: Report) -> None:
    """When the process that has ended was never ready, its journal may say that the compile cache is why."""
    invocation = os.environ.get("INVOCATION_ID", "")
    begun = (lease.last_preflight(config.engine) or {}).get("invocation")
    if invocation and begun == invocation and ready.get("invocation") != invocation:
        compile_cache.after_failure(config, Unit(config.unit).journal(400, invocation), report)


def _holders(config: EngineConfig) -> dict[int, int | None]:
    """Processes of this engine's last start that still hold memory on a GPU, dying ones included."""
    pids = set((lease.last_start(config.engine) or {}).get("pids", []))
    try:
        devices = gpu.observe()
    except gpu.GpuUnseen:
        return {}
    return {pid: mib for device in devices for pid, mib in device.processes.items() if pid in pids}


def _unprove(config: EngineConfig, report: Report) -> None:
    _tell_gate(config, "0", report)


def _tell_gate(config: EngineConfig, proved: str, report: Report) -> None:
    """A gate that is down reads the file when it starts, so that is no reason to fail.

    Nor is a balancer's silence or error: vllm_info shows that it differs, and who admits the engine tells it again.
    """
    door = admission.choose(config)
    if door is None:
        return
    try:
        door.set("proved", proved)
    except AdmissionDown as exc:
        when = f"read proved={proved} from {config.gate.map} when it starts" if config.gate else "be told again"
        report(f"{config.engine}: {exc}; it will {when} {exc.reference}")
    except Surprise as exc:
        if config.gate:
            raise
        report(f"{config.engine}: {exc}; it is to be told again {exc.reference}")
