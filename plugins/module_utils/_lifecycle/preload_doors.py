# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a preload daemon's unit calls, and what the doors of its engines ask of it.

vLLM compares the headers of two checkpoints, not their values. So the daemon's doors take a manifest of what it reads,
before and after; and an engine's doors compare that with a manifest of its own checkpoint, before it may map and before
it may serve. Order in all: the engine stops, its daemon changes and is proved, the engine starts.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
import time
import typing as t
from contextlib import ExitStack
from pathlib import Path

from . import claim, compat, gpu, lease, owners, store, weights
from .config import EngineConfig, PreloadConfig, known_daemons
from .deadline import Deadline
from .errors import DeadlineExceeded, LifecycleError, Refused, Surprise, UnknownState, UsageError
from .pairing import different, modes_of
from .preload import (
    CLEAN_EXIT,
    PreloadState,
    current_loaded,
    faults,
    last_loaded,
    load,
    look_at,
    need_mib,
    observe_preload,
    read_model,
    record,
    state_dir,
)
from .preload_change import FORCED
from .source import DISK, MODES, LogWord, explain, held_by, identity, judge_source, read_log
from .unit import Unit, process_start

Report = t.Callable[[str], None]

POLL_INTERVAL = 0.2
# The time that a line of an engine which serves may take to reach the journal.
LOG_PATIENCE = 10.0
TELL_EVERY = 10.0
# Bytes of a Unix socket's address, without the one that ends it.
SOCKET_PATH_MAX = 107
SETTLE_TIMEOUT = 60.0
LAST_LINES = 8


# The daemon's own doors.


def preflight(wanted: PreloadConfig, report: Report) -> None:
    """Before the daemon starts: everything that would show after it has loaded the model, or never.

    :raises UsageError: names the file, the directory or the setting in the way.
    :raises Refused: another daemon has its sockets, an engine maps what its predecessor left, or its weights are not
        allowed.
    """
    user = _user(wanted)
    runtime = Path(wanted.runtime) / "bin"
    if wanted.runtime and not any((runtime / name).exists() for name in ("vllm", "python")):
        raise _wrong(
            wanted,
            f"its runtime {wanted.runtime} has no bin/vllm",
            f"run the role baremetal.vllm.vllm_runtime for version {wanted.runtime_version}",
            entry="runtime-missing",
        )
    _check_directory(wanted, user)
    _check_owners(wanted)
    _check_settings(wanted)
    _check_engines(wanted, report)
    manifest = take(wanted, report)
    weights.allowed(manifest, wanted.weights.allowed, wanted.weights.allowed_file, wanted.weights.allowed_signers)
    invocation = os.environ.get("INVOCATION_ID", "")
    claim.begin_daemon(wanted, invocation, Deadline(wanted.start_timeout), report)
    _check_room(wanted, manifest, report)
    record(
        wanted.daemon,
        "preflight.json",
        {
            "invocation": invocation,
            "runtime_version": wanted.runtime_version,
            "config_digest": wanted.config_digest,
            "manifest": manifest.asdict(),
        },
    )
    report(f"{wanted.daemon}: {wanted.model} is {manifest.digest} ({manifest.bytes / 2**30:.2f} GiB of weights)")


def ready(wanted: PreloadConfig, report: Report, main_pid: int) -> None:
    """After the process has started: wait until every rank has its weights, and write down what they are.

    Watches the main process: systemd does not end this wait when that process dies.

    :raises LifecycleError: the process died, or the checkpoint has changed while it was read.
    :raises DeadlineExceeded: not ready within the daemon's start_timeout.
    """
    deadline = Deadline(wanted.start_timeout)
    process = identity(main_pid)
    before, started = _before(wanted)
    unseen: dict[str, str] = {}
    told = time.monotonic()
    while True:
        if not process["start"] or process_start(main_pid) != process["start"]:
            raise LifecycleError(
                f"{_named(wanted)}: its main process {main_pid} died before it was ready",
                entry="unit-not-started",
                next_step=f"read journalctl -u {wanted.unit} above this line for the daemon's own last words",
            )
        unseen.clear()
        signals, _devices = look_at(wanted, unseen, None, True)
        signals = signals._replace(need=need_mib(wanted, before.bytes))
        why = faults(wanted, signals)
        if not why and signals.held is None:
            raise UnknownState(
                f"{_named(wanted)} says that it is ready, and the GPU memory that would show it cannot be seen: "
                + unseen.get("gpu", ""),
                entry="gpu-unseen",
                next_step="look at nvidia-smi and the driver's messages (journalctl -k)",
            )
        if not why:
            break
        if time.monotonic() - told > TELL_EVERY:
            told = time.monotonic()
            report(f"{wanted.daemon}: not ready, {deadline.says}: {'; '.join(why)}")
        if not deadline.rest(POLL_INTERVAL):
            raise DeadlineExceeded(
                f"{_named(wanted)} is not ready after {deadline.seconds:g} s: {'; '.join(why)}",
                entry="start-timeout",
                next_step=f"read journalctl -u {wanted.unit}; raise start_timeout when the model is only large",
            )
    after = take(wanted, report)
    if after.digest != before.digest:
        raise LifecycleError(
            f"{_named(wanted)}: {wanted.model} has changed while it was read, from {before.digest} to {after.digest}: "
            + "; ".join(before.compare(after)[:5]),
            entry="weights-changing",
            next_step="wait until the copy or download is complete, then start it again",
        )
    store.remove(state_dir(wanted.daemon) / "used.json")
    record(
        wanted.daemon,
        "loaded.json",
        {
            **process,
            "pids": Unit(wanted.unit).show().pids,
            # What the process was started with; the declaration may be a newer one by now.
            "runtime_version": started["runtime_version"],
            "config_digest": started["config_digest"],
            "driver_version": signals.driver or "",
            "manifest": after.summary(),
            "held_mib": dict(signals.held or {}),
        },
    )
    claim.end_daemon(wanted)
    report(f"{wanted.daemon}: ready after {deadline.elapsed:.1f} s with {after.digest}, holds {signals.held} MiB")


def settle(wanted: PreloadConfig, report: Report) -> None:
    """After its last process has ended: say how, and wait until the GPU memory of its processes is free.

    :raises Refused: they still hold some, after a minute.
    """
    end = {key: os.environ.get(key.upper(), "") for key in ("service_result", "exit_code", "exit_status")}
    record(wanted.daemon, "last_stop.json", end)
    note = ", as vLLM ends its daemon after SIGTERM" if end["exit_status"] == str(CLEAN_EXIT) else ""
    report(
        f"{wanted.daemon}: stopped, {end['service_result'] or 'result unknown'} (status {end['exit_status'] or '?'}"
        f"{note})"
    )
    found = observe_preload(wanted, connect=False)
    if found.lost or found.mapped_by:
        report(
            f"{wanted.daemon}: {', '.join(found.lost or found.mapped_by)} may map its memory, and keeps it until its "
            "own restart"
        )
    last = last_loaded(wanted.daemon)
    deadline = Deadline(SETTLE_TIMEOUT)
    while last is not None:
        try:
            held = {uuid: mib for uuid, mib in held_by(gpu.observe(), wanted.gpus, last.pids).items() if mib}
        except gpu.GpuUnseen as exc:
            report(f"{wanted.daemon}: that its memory is free cannot be seen: {exc}")
            break
        if not held:
            break
        if not deadline.rest(0.5):
            raise Refused(
                f"{_named(wanted)} has stopped, yet its processes still hold {held} MiB",
                entry="gpu-memory-held",
                next_step="look at nvidia-smi; what a dead process holds is the driver's to free",
                left={"held_mib": held},
            )
    claim.end_daemon(wanted)


def take(wanted: PreloadConfig, report: Report) -> weights.Manifest:
    return weights.take(
        wanted.model, method=wanted.weights.method, report=report, user=wanted.user, timeout=wanted.start_timeout
    )


def _before(wanted: PreloadConfig) -> tuple[weights.Manifest, dict[str, t.Any]]:
    """What preflight has written of this start."""
    path = state_dir(wanted.daemon) / "preflight.json"
    value = store.read_json(path)
    invocation = os.environ.get("INVOCATION_ID", "")
    if value is None or value.get("invocation") != invocation:
        raise UsageError(
            f"{_named(wanted)}: its unit has not called preload-preflight at this start, so what it reads is not known",
            entry="unit-outdated",
            next_step="run the role baremetal.vllm.vllm_preload again, which writes the unit",
        )
    return weights.Manifest.from_dict(value.get("manifest"), str(path)), value


def _named(wanted: PreloadConfig) -> str:
    return f"preload daemon '{wanted.daemon}' on {socket.gethostname()}"


def _wrong(wanted: PreloadConfig, text: str, next_step: str, entry: str) -> UsageError:
    return UsageError(f"{_named(wanted)}: {text}", entry=entry, next_step=next_step)


def _user(wanted: PreloadConfig) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(wanted.user)
    except KeyError:
        raise UsageError(
            f"host {socket.gethostname()} has no user '{wanted.user}'",
            entry="service-user",
            next_step="run the role baremetal.vllm.vllm_host",
        ) from None


def _check_directory(wanted: PreloadConfig, user: pwd.struct_passwd) -> None:
    """vLLM looks at owner and symbolic link of a directory that it was given, not at the mode."""
    where = wanted.socket_dir
    again = "run the role baremetal.vllm.vllm_preload again: its unit makes this directory (RuntimeDirectory=)"
    try:
        seen = os.lstat(where)
    except OSError as exc:
        raise _wrong(wanted, f"its socket directory {where}: {exc.strerror}", again, entry="preload-directory") from exc
    if stat.S_ISLNK(seen.st_mode):
        raise _wrong(
            wanted,
            f"its socket directory {where} is a symbolic link to {os.readlink(where)}",
            f"remove {where}",
            entry="preload-directory",
        )
    if not stat.S_ISDIR(seen.st_mode):
        raise _wrong(
            wanted, f"its socket directory {where} is no directory", f"remove {where}", entry="preload-directory"
        )
    if seen.st_uid != user.pw_uid:
        raise _wrong(
            wanted,
            f"its socket directory {where} belongs to user id {seen.st_uid}, not to {wanted.user} ({user.pw_uid})",
            f"chown {wanted.user} {where}",
            entry="preload-directory",
        )
    if stat.S_IMODE(seen.st_mode) != 0o700:
        raise _wrong(
            wanted,
            f"its socket directory {where} has mode {stat.S_IMODE(seen.st_mode):04o}, not 0700: whoever can reach a "
            "socket there can have code run by the daemon",
            f"chmod 0700 {where}",
            entry="preload-directory",
        )
    for name in wanted.sockets:
        path = os.fsencode(f"{where}/{name}")
        if "/" in name or len(path) > SOCKET_PATH_MAX:
            raise _wrong(
                wanted,
                f"the socket {where}/{name} has {len(path)} characters, {SOCKET_PATH_MAX} is the most",
                "choose a shorter name for the daemon",
                entry="preload-declared",
            )


def _check_owners(wanted: PreloadConfig) -> None:
    """A second daemon loads the whole model before it finds that it is the second. Left-over files are no error."""
    for name in wanted.sockets:
        path = Path(wanted.socket_dir) / name
        try:
            pid = owners.lock_holder(f"{path}.lock") or owners.listener(path)
        except OSError as exc:
            raise _wrong(wanted, f"its socket {path}: {exc}", f"look at {path}", entry="socket-held") from exc
        if pid is None and owners.lock_holder(f"{path}.lock") == 0:
            pid = 0
        if pid is not None:
            unit = _unit_of(pid)
            raise Refused(
                f"{_named(wanted)}: process {pid} ({owners.command(pid) if pid else 'of another namespace'})"
                + (f" of {unit}" if unit else "")
                + f" already owns {path}",
                entry="socket-held",
                next_step=f"stop {unit or 'what this process belongs to'} first"
                + ("" if unit or not pid else f" (systemctl status {pid})"),
                left={"pid": pid, "unit": unit},
            )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.settimeout(owners.CONNECT_TIMEOUT)
        if connection.connect_ex(("127.0.0.1", wanted.health_port)) == 0:
            raise Refused(
                f"{_named(wanted)}: something already listens on its health port 127.0.0.1:{wanted.health_port}, and "
                "would answer in its place",
                entry="port-taken",
                next_step=f"find it with 'ss -ltnp sport = :{wanted.health_port}', and stop it or choose another port",
            )


def _unit_of(pid: int) -> str:
    """A process's unit: one of our daemons, by what systemd lists for it, or what its control group names."""
    for name in known_daemons():
        try:
            other = load(name)
            if pid and pid in Unit(other.unit).show().pids:
                return other.unit
        except LifecycleError:
            continue
    return owners.unit_of(pid)


def _check_settings(wanted: PreloadConfig) -> None:
    modes = modes_of(wanted)
    if len(set(modes.values())) > 1:
        raise _wrong(
            wanted,
            "its engines do not all take its weights in the same mode, so that the end of one could free what another "
            "maps: " + ", ".join(f"{name} {modes[name]}" for name in sorted(modes)),
            "give them one mode, or daemons of their own",
            entry="preload-declared",
        )
    try:
        uuids = [device.uuid for device in gpu.observe()]
    except gpu.GpuUnseen as exc:
        raise _wrong(
            wanted, f"its GPUs cannot be seen: {exc}", "look at nvidia-smi and journalctl -k", entry="gpu-unseen"
        ) from exc
    refused = compat.refusals(wanted, read_model(wanted.model), uuids)
    if refused:
        raise _wrong(
            wanted,
            "; ".join(refused),
            "correct its settings, or let its engines load from disk",
            entry="preload-declared",
        )


def _check_engines(wanted: PreloadConfig, report: Report) -> None:
    """What an ended daemon lent stays mapped until its engine ends; a new daemon would hold a second copy beside it."""
    found = observe_preload(wanted, connect=False)
    path = state_dir(wanted.daemon) / FORCED
    forced = store.read_json(path)
    store.remove(path)
    if not found.mapped_by:
        return
    names = ", ".join(found.mapped_by)
    if forced is not None and time.time() < float(forced.get("until") or 0):
        report(f"{wanted.daemon}: {names} may map weights of its predecessor; started all the same, as was asked for")
        return
    raise Refused(
        f"{_named(wanted)}: {names} may still map the weights of a daemon that has ended; another one now would hold a "
        "second copy of them on the GPU",
        entry="preload-mapped",
        next_step="let it be: it comes back at that engine's next restart; or use vllm_preload with force: true",
        left={"mapped_by": found.mapped_by, "lost": found.lost},
    )


def _check_room(wanted: PreloadConfig, manifest: weights.Manifest, report: Report) -> None:
    need = need_mib(wanted, manifest.bytes)
    try:
        devices = [device for device in gpu.observe() if device.uuid in wanted.gpus]
    except gpu.GpuUnseen as exc:
        report(f"{wanted.daemon}: {exc}")
        return
    for device in devices:
        if wanted.traits.pipeline_parallel == 1 and device.free_mib < need:
            holders = ", ".join(
                f"process {pid} ({owners.unit_of(pid) or owners.command(pid)}, {mib} MiB)"
                for pid, mib in device.processes.items()
            )
            raise Refused(
                f"{_named(wanted)} needs {need} MiB for its weights on {device.uuid}, {device.free_mib} MiB are free; "
                f"held by {holders or 'no visible process'}",
                entry="gpu-memory-short",
                next_step="stop what holds the memory, and start it again",
                left={"needed_mib": need, "free_mib": device.free_mib, "holders": device.processes},
            )


# The doors of an engine.


def await_daemon(engine: EngineConfig, report: Report) -> None:
    """Before an engine starts: its daemon is ready, and holds the very weights of the engine's checkpoint.

    A daemon that only has to load once more, and that no engine maps, is restarted. In copy mode the weights are
    promised to this engine here, so that no other counts on them.

    :raises UsageError: the declaration cannot work.
    :raises Refused: other weights, or a daemon that this engine can never use, and no fall-back allowed.
    :raises DeadlineExceeded: not ready within preload.wait; names the daemon's state and its last log lines.
    """
    use = engine.preload
    if use is None:
        return
    here = f"engine '{engine.engine}' on {socket.gethostname()}"
    if compat.sleeps_with_the_daemons_weights(engine):
        raise UsageError(
            f"{here} has sleep mode and takes its weights in zero copy: a sleep would free its KV cache only, and "
            "vLLM's documentation forbids the two together",
            entry="sleep-with-zero-copy",
            next_step="switch enable-sleep-mode off, or set preload.allow_zero_copy_sleep: true",
        )
    daemon = _usable(engine, here, report)
    if daemon is None:
        return
    # Hashed while the daemon still loads; what is asked for again below is known by then.
    _own(engine, daemon.weights.method, report)
    deadline = Deadline(use.wait)
    renewed = 0
    told = -TELL_EVERY
    while True:
        with ExitStack() as stack:
            ours = _try_lock(stack, f"preload-{daemon.daemon}")
            found = observe_preload(daemon)
            may_renew = ours and found.renewable and not found.mapped_by
            if found.digest and not may_renew:
                _compare(engine, here, found, _own(engine, found.method, report))
            if ours and found.state == "ready":
                if use.mode == "copy":
                    promise(engine, daemon, identity(found.main_pid), promised=True)
                report(f"{engine.engine}: takes {found.digest} from preload daemon '{daemon.daemon}' ({use.mode})")
                return
            if may_renew and found.main_pid != renewed:
                renewed = found.main_pid
                report(f"{engine.engine}: restarts preload daemon '{daemon.daemon}': {'; '.join(found.reasons)}")
                Unit(daemon.unit).restart_soon()
        why = "; ".join([*found.reasons, *found.unseen.values(), *([] if ours else ["it is being changed"])])
        waits = not ours or found.state == "starting" or (renewed and renewed == found.main_pid)
        if use.fallback and (not waits or not deadline.left):
            report(f"{engine.engine}: loads from disk: preload daemon '{daemon.daemon}' is {found.state}: {why}")
            return
        if deadline.elapsed - told > TELL_EVERY:
            told = deadline.elapsed
            report(
                f"{engine.engine}: waits for preload daemon '{daemon.daemon}', {deadline.elapsed:.0f} of "
                f"{use.wait:g} s: it is {found.state}: {why}"
            )
        if not deadline.rest(POLL_INTERVAL) and not use.fallback:
            raise _not_ready(here, daemon, found, why, use.wait)


def _try_lock(stack: ExitStack, name: str) -> bool:
    """Whether nobody changes the daemon now; then nobody will, until the stack is left."""
    try:
        stack.enter_context(lease.locked(name, Deadline(0)))
    except Refused:
        return False
    return True


def _own(engine: EngineConfig, method: str, report: Report) -> weights.Manifest:
    return weights.take(engine.model, method=method, report=report, user=engine.user, timeout=engine.start_timeout)


def _usable(engine: EngineConfig, here: str, report: Report) -> PreloadConfig | None:
    """The engine's daemon; None where it loads from disk, as its fall-back allows."""
    use = engine.preload
    if use is None:
        return None
    try:
        daemon: PreloadConfig | None = load(use.daemon)
    except UsageError:
        daemon = None
    try:
        uuids = [device.uuid for device in gpu.observe()]
    except gpu.GpuUnseen:
        uuids = None
    lent = read_model(daemon.model) if daemon else None
    model = read_model(engine.model)
    verdict = compat.judge(engine, daemon, None, model, uuids, None, lent=lent, modes=modes_of(daemon))
    if verdict.start == "refused":
        raise Refused(
            f"{here} cannot take its weights from preload daemon '{use.daemon}': {'; '.join(verdict.reasons)}",
            entry="preload-refused",
            next_step="make the two agree (site.yml renders both from the inventory), or set preload.fallback: true",
            reasons=verdict.reasons,
        )
    if verdict.start == "cold":
        report(f"{engine.engine}: loads from disk: {'; '.join(verdict.reasons)}")
        return None
    return daemon


def _compare(engine: EngineConfig, here: str, found: PreloadState, wanted: weights.Manifest) -> None:
    if found.digest != wanted.digest:
        raise Refused(
            f"{here} may not start: {different(engine, found.digest, wanted.digest)}",
            entry="weights-mismatch",
            next_step=f"put the right checkpoint in place; or have the daemon load this one (vllm_preload daemon="
            f"{found.daemon}) while no engine maps it",
            digests={"daemon": found.digest, "engine": wanted.digest},
        )


def _not_ready(here: str, daemon: PreloadConfig, found: PreloadState, why: str, seconds: float) -> DeadlineExceeded:
    journal = Unit(daemon.unit).journal(40)
    last = "\n".join(f"  {line}" for line in journal[-LAST_LINES:])
    return DeadlineExceeded(
        f"{here}: its preload daemon '{daemon.daemon}' is {found.state}, not ready, after {seconds:g} s: "
        f"{why or 'no reason is known'}\nlast lines of {daemon.unit}:\n{last}\n",
        entry="preload-not-ready",
        next_step=f"read journalctl -u {daemon.unit}, correct the cause and start the engine again",
        daemon={"state": found.state, "reasons": found.reasons, "unseen": found.unseen},
        journal=journal,
    )


def promise(engine: EngineConfig, daemon: PreloadConfig, process: dict[str, t.Any], *, promised: bool) -> None:
    """Write down that the weights of this process of a daemon are, or will be, an engine's own."""
    record(daemon.daemon, "used.json", {"engine": engine.engine, "promised": promised, **process})


def confirm(engine: EngineConfig, report: Report) -> dict[str, t.Any] | None:
    """Of an engine that serves: where its weights have come from, as its log and its memory say; for ready.json.

    :raises Surprise: not what was asked for, or other weights than those of its checkpoint.
    """
    use = engine.preload
    if use is None:
        return None
    here = f"engine '{engine.engine}' on {socket.gethostname()}"
    unit = Unit(engine.unit).show()
    word = _await_word(engine, unit.invocation)
    daemon = _declared(use.daemon)
    lender = Unit(daemon.unit).show() if daemon else None
    loaded = current_loaded(daemon.daemon, lender) if daemon else None
    if daemon and lender and word.spent:
        promise(engine, daemon, identity(lender.main_pid), promised=False)
    try:
        devices: list[gpu.GpuState] | None = gpu.observe()
    except gpu.GpuUnseen:
        devices = None
    source, doubt = judge_source(
        word.source,
        held_by(devices, engine.gpus, unit.pids),
        held_by(devices, daemon.gpus, lender.pids) or {} if daemon and lender else {},
        need_mib(daemon, loaded.bytes) if daemon and loaded else 0,
        awake=True,
    )
    why = word.why or doubt
    found = {"daemon": use.daemon, "source": source, "why": why}
    if source is None or source == DISK:
        text = f"{here} " + (
            f"has loaded its weights from disk, not from preload daemon '{use.daemon}': {why}"
            if source
            else f"serves, and where its weights have come from is not proved: {why}"
        )
        if not use.fallback:
            raise Surprise(
                text,
                entry="preload-source",
                next_step=f"read journalctl -u {engine.unit}; preload.fallback: true would allow it, and both copies "
                "on the GPU",
            )
        report(text)
        return found
    if source != MODES[use.mode]:
        raise Surprise(
            f"{here} has its weights from {source}, while its declaration says {use.mode}",
            entry="preload-source",
            next_step="run baremetal.vllm.site again, which writes options and declaration alike",
        )
    if daemon is None or lender is None or loaded is None or lender.started_at > unit.started_at:
        raise Surprise(
            f"{here} has mapped weights of preload daemon '{use.daemon}', and what that daemon had loaded is not on "
            "record: it ended meanwhile, or its unit does not call preload-ready",
            entry="preload-source",
            next_step=f"read journalctl -u {daemon.unit if daemon else use.daemon}, then start the engine again",
        )
    wanted = _own(engine, loaded.method, report)
    if wanted.digest != loaded.digest:
        raise Surprise(
            f"{here} serves other weights than its own: {different(engine, loaded.digest, wanted.digest)}",
            entry="weights-mismatch",
            next_step="put the right checkpoint in place, restart the daemon (vllm_preload), then this engine",
            digests={"daemon": loaded.digest, "engine": wanted.digest},
        )
    report(f"{engine.engine}: its weights come from preload daemon '{use.daemon}' ({source}), {loaded.digest}")
    return {**found, "digest": loaded.digest, "daemon_process": identity(lender.main_pid)}


def _declared(name: str) -> PreloadConfig | None:
    try:
        return load(name)
    except UsageError:
        return None


def _await_word(engine: EngineConfig, invocation: str) -> LogWord:
    """The journal gets lines some time after they were written."""
    deadline = Deadline(LOG_PATIENCE)
    while True:
        word = read_log(Unit(engine.unit).log(invocation))
        if word.source or word.spent or not deadline.rest(POLL_INTERVAL):
            return word


def settle_engine(engine: EngineConfig, report: Report) -> None:
    """After an engine has ended: take back a promise of which it made no use, and explain what vLLM does not."""
    use = engine.preload
    if use is None:
        return
    lines = Unit(engine.unit).log(os.environ.get("INVOCATION_ID", ""))
    hint = explain(lines)
    if hint:
        report(f"{engine.engine}: {hint}")
    daemon = _declared(use.daemon) if use.mode == "copy" else None
    if daemon is None or lines is None:
        return  # what may have been used up has been
    path = state_dir(daemon.daemon) / "used.json"
    value = store.read_json(path)
    if value is None or value.get("engine") != engine.engine or not value.get("promised"):
        return
    if read_log(lines).spent:
        promise(engine, daemon, {key: value.get(key) for key in ("main_pid", "boot", "start")}, promised=False)
    else:
        store.remove(path)
