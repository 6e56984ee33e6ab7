# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Preload daemons, looked at: the state of one, and the engines that may map its memory.

A daemon's health was measured to stay 200 after it has given its weights away, and its unit is active long before it
has any. So "ready" joins unit, health, a connection to each rank's socket, the GPU memory that its processes hold, what
its own door has seen it load, and the checkpoint as it is now. Its socket speaks pickle: we connect and say nothing.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import sys
import time
import typing as t
from dataclasses import dataclass, field
from pathlib import Path

from . import compat, config, gpu, lease, owners, process, store, weights
from .compat import Loaded
from .config import EngineConfig, PreloadConfig
from .errors import LifecycleError, UsageError
from .http import Client
from .source import COPY, DISK, ZERO_COPY, held_by, is_now, judge_source, lost, said_at_start
from .unit import Unit, UnitState

PROBE_TIMEOUT = 3.0
# Where nothing may be written and nobody waits: a checkpoint that is not hashed by then counts as unseen.
PEEK_TIMEOUT = 0.5
STATES = ("absent", "starting", "ready", "unusable", "failed", "unknown")
# What `vllm preload` ends with after SIGTERM: the -15 of its ranks as an exit status.
CLEAN_EXIT = 241
_CONNECT = """
import socket, sys
for path in sys.argv[1:]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2)
        print(int(not connection.connect_ex(path)), flush=True)
"""
CONNECT_TIMEOUT = 20.0

load = config.load_daemon


# What was recorded.


def state_dir(daemon: str) -> Path:
    return store.root() / "var/lib/vllm/preload" / daemon


def record(daemon: str, file: str, value: dict[str, t.Any]) -> None:
    """Write one of a daemon's state files."""
    store.write_json(state_dir(daemon) / file, {"schema": 1, "at": round(time.time(), 3), **value})


def last_loaded(daemon: str) -> Loaded | None:
    """What the daemon was last proved to have loaded.

    :raises UsageError: the file is not one that we wrote.
    """
    path = state_dir(daemon) / "loaded.json"
    value = store.read_json(path)
    if value is None:
        return None
    try:
        manifest = value["manifest"]
        return Loaded(
            main_pid=int(value["main_pid"]),
            boot=str(value["boot"]),
            start=int(value["start"]),
            at=float(value["at"]),
            pids=[int(pid) for pid in value["pids"]],
            runtime_version=str(value["runtime_version"]),
            config_digest=str(value["config_digest"]),
            driver_version=str(value["driver_version"]),
            digest=str(manifest["digest"]),
            method=str(manifest["method"]),
            bytes=int(manifest["bytes"]),
            held_mib={str(uuid): int(mib) for uuid, mib in value["held_mib"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise UsageError(
            f"{path} is no record of a daemon's start ({exc!r})",
            entry="record-broken",
            next_step="remove it and restart the daemon (vllm_preload) when no engine maps its memory",
        ) from exc


def current_loaded(daemon: str, unit: UnitState | None) -> Loaded | None:
    """The same, if it is of the process that runs now."""
    found = last_loaded(daemon)
    return found if found is not None and unit is not None and is_now(found._asdict(), unit.main_pid) else None


def used_by(daemon: str, unit: UnitState | None) -> str:
    """The engine that was given, or promised, the weights of the daemon that runs now; empty when it has them still."""
    value = store.read_json(state_dir(daemon) / "used.json")
    return str(value.get("engine")) if value and unit is not None and is_now(value, unit.main_pid) else ""


# A daemon.


@dataclass(frozen=True)
class PreloadState:
    """One daemon as seen now.

    ``mapped_by`` names the running engines that may map its memory, or that of its predecessor: those of which it is
    not proved that they have weights of their own. ``lost`` are those that map what an ended daemon left behind.
    ``sources`` has the source of weights of every running engine of this daemon.
    """

    daemon: str
    host: str
    state: str
    reasons: list[str]
    unseen: dict[str, str]
    main_pid: int
    held_mib: dict[str, int]
    mapped_by: list[str]
    lost: list[str] = field(default_factory=list)
    sources: dict[str, str | None] = field(default_factory=dict)
    digest: str = ""
    method: str = ""
    used_by: str = ""
    outdated: list[str] = field(default_factory=list)
    mismatch: str = ""

    @property
    def renewable(self) -> bool:
        """It has only to load once more: nothing else is wrong with it."""
        again = [*([given_to(self.used_by)] if self.used_by else []), *self.outdated, *filter(None, [self.mismatch])]
        return self.state == "unusable" and bool(again) and set(self.reasons) <= set(again)

    def summary(self) -> dict[str, t.Any]:
        return {"state": self.state, "mapped_by": self.mapped_by}


class Signals(t.NamedTuple):
    """What the state of a daemon is derived from. None is "not seen", never "no"."""

    unit: UnitState | None
    health: int | None = None
    refused: t.Sequence[str] = ()
    held: t.Mapping[str, int] | None = None
    need: int = 0
    loaded: Loaded | None = None
    used_by: str = ""
    outdated: t.Sequence[str] = ()
    driver: str | None = None
    mismatch: str | None = ""


def given_to(engine: str) -> str:
    return f"its weights were given to {engine}"


def observe_preload(
    wanted: PreloadConfig, *, now: weights.Manifest | None = None, connect: bool = True, engines: bool = True
) -> PreloadState:
    """Look at everything, change nothing.

    :param now: the manifest of its checkpoint, where it was just taken; else only what is known of it without hashing.
    :param connect: try each rank's socket. A real daemon logs every such call of another user, with a traceback.
    :param engines: look at the engines, too.
    """
    unseen: dict[str, str] = {}
    signals, devices = look_at(wanted, unseen, now, connect)
    state, reasons = derive_preload(wanted, signals, unseen)
    found = PreloadState(
        daemon=wanted.daemon,
        host=socket.gethostname(),
        state=state,
        reasons=reasons,
        unseen=unseen,
        main_pid=signals.unit.main_pid if signals.unit else 0,
        held_mib=dict(signals.held or {}),
        mapped_by=[],
        digest=signals.loaded.digest if signals.loaded else "",
        method=signals.loaded.method if signals.loaded else "",
        used_by=signals.used_by,
        outdated=list(signals.outdated),
        mismatch=signals.mismatch or "",
    )
    if engines:
        _look_at_engines(wanted, signals, devices, found)
    return found


def look_at(
    wanted: PreloadConfig, unseen: dict[str, str], now: weights.Manifest | None, connect: bool
) -> tuple[Signals, list[gpu.GpuState] | None]:
    def look(signal: str, ask: t.Callable[[], t.Any]) -> t.Any:
        try:
            return ask()
        except (LifecycleError, gpu.GpuUnseen) as exc:
            unseen[signal] = str(exc)
            return None

    unit = look("unit", Unit(wanted.unit).show)
    devices = look("gpu", gpu.observe)
    if unit is None or unit.active_state not in ("active", "activating"):
        return Signals(unit), devices
    health = look("health", lambda: _health(wanted))
    loaded = look("loaded", lambda: current_loaded(wanted.daemon, unit))
    driver = None if devices is None else look("driver", gpu.driver_version)
    mismatch: str | None = ""
    if loaded is not None:
        mismatch = look("weights", lambda: _mismatch(wanted, loaded, now))
    signals = Signals(
        unit=unit,
        health=health,
        refused=_refused(wanted) if connect and health == 200 else (),
        held=held_by(devices, wanted.gpus, unit.pids),
        need=need_mib(wanted, loaded.bytes if loaded else 0),
        loaded=loaded,
        used_by=look("used", lambda: used_by(wanted.daemon, unit)) or "",
        outdated=compat.outdated(wanted, loaded, driver),
        driver=driver,
        mismatch=mismatch,
    )
    return signals, devices


def _mismatch(wanted: PreloadConfig, loaded: Loaded, now: weights.Manifest | None) -> str | None:
    """How the checkpoint has changed since the daemon read it; None where that is not known."""
    known = now is not None and now.method == loaded.method
    found = now if known else peek(wanted.model, loaded.method)
    if found is None:
        raise UsageError(
            f"{wanted.model} has changed since it was hashed, and is not hashed anew for a look",
            entry="weights-changing",
        )
    same = found.digest == loaded.digest
    return "" if same else f"it has loaded {loaded.digest}, while {wanted.model} is {found.digest} now"


def faults(wanted: PreloadConfig, signals: Signals) -> list[str]:
    """Why a daemon whose process runs has nothing to give yet, or no more. Pure."""
    found = [] if signals.health == 200 else [f"health {signals.health or 'gives no answer'}"]
    found += [f"nobody accepts on {name}" for name in signals.refused]
    held = signals.held
    if held is None:
        return found
    found += [f"the driver shows no GPU {uuid}" for uuid in wanted.gpus if uuid not in held]
    need = max(signals.need, 1)
    if not held:
        found.append("it holds no GPU memory")
    elif wanted.traits.pipeline_parallel > 1:
        # Stages are of different sizes; only their sum is known.
        if sum(held.values()) < need * len(held):
            found.append(f"it holds {sum(held.values())} MiB in all, its weights are {need * len(held)} MiB")
    else:
        found += [
            f"it holds {mib} MiB on {uuid}, its weights are {need} MiB" for uuid, mib in held.items() if mib < need
        ]
    return found


def derive_preload(wanted: PreloadConfig, signals: Signals, unseen: t.Mapping[str, str]) -> tuple[str, list[str]]:
    """(state, reasons) from the signals. Pure."""
    unit = signals.unit
    if unit is None:
        return "unknown", [unseen.get("unit", "systemd was not seen")]
    if unit.active_state == "inactive":
        return ("unknown", [f"processes are left in its group: {unit.pids}"]) if unit.pids else ("absent", [])
    if unit.active_state == "failed":
        # A unit that does not know this status as a clean one.
        clean = unit.main_status == CLEAN_EXIT and unit.result == "exit-code"
        return ("absent", []) if clean else ("failed", [f"systemd result {unit.result}, status {unit.main_status}"])
    if unit.active_state == "activating":
        return "starting", faults(wanted, signals)[:1] or ["its door has not proved it yet"]
    if unit.active_state != "active":
        return "unknown", [f"systemd says {unit.active_state}/{unit.sub_state}"]
    if signals.health is None:
        return "unknown", [unseen.get("health", "its health was not seen")]
    reasons = faults(wanted, signals)
    if signals.used_by:
        reasons.append(given_to(signals.used_by))
    reasons += signals.outdated
    if signals.mismatch:
        reasons.append(signals.mismatch)
    if wanted.model and signals.loaded is None and "loaded" not in unseen:
        reasons.append("what it has loaded is not on record: its unit has not called preload-ready")
    if reasons:
        return "unusable", reasons
    doubts = [unseen[name] for name in ("gpu", "loaded", "weights", "used") if name in unseen]
    return ("unknown", doubts) if doubts else ("ready", [])


def need_mib(wanted: PreloadConfig, size: int) -> int:
    """MiB that each rank of a daemon holds at least, when its checkpoint has ``size`` bytes."""
    return max(wanted.weights_mib, compat.share_mib(size, wanted.traits, read_model(wanted.model)))


def read_model(path: str) -> compat.Model | None:
    """What the checkpoint's config.json says; None where there is none to read."""
    try:
        value = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        text = value.get("text_config") or {}
        how = value.get("quantization_config") or value.get("compression_config") or text.get("quantization_config")
        dtype = value.get("dtype") or value.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype") or ""
        return compat.Model(
            architecture=", ".join(map(str, value.get("architectures") or [])),
            quantization=str((how or {}).get("quant_method") or ("unnamed" if how else "")).lower(),
            dtype=str(dtype).removeprefix("torch."),
        )
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return None


def peek(path: str, method: str) -> weights.Manifest | None:
    """The manifest of a checkpoint if it costs nothing; writes nothing.

    :raises UsageError: it cannot be read.
    """
    try:
        return weights.take(path, method=method, timeout=PEEK_TIMEOUT, remember=False)
    except UsageError:
        raise
    except LifecycleError:
        return None


def _refused(wanted: PreloadConfig) -> list[str]:
    """The sockets on which nobody accepts connections.

    Asked as the service user: the daemon logs a traceback for every call of another one, root included.
    """
    paths = {name: f"{wanted.socket_dir}/{name}" for name in wanted.sockets}
    try:
        user = pwd.getpwnam(wanted.user)
    except KeyError:
        user = pwd.getpwuid(os.geteuid())
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        if os.geteuid() != 0 or user.pw_uid == 0:
            break
        try:
            done = process.run(
                [python, "-I", "-S", "-c", _CONNECT, *paths.values()],
                CONNECT_TIMEOUT,
                cwd="/",
                user=user.pw_uid,
                group=user.pw_gid,
                extra_groups=[],
            )
        except (OSError, process.TimeoutExpired):  # an interpreter that this user may not run
            continue
        if done.returncode == 0:
            return [name for name, word in zip(paths, done.stdout.split()) if word != "1"]
    return [name for name, path in paths.items() if not _accepts(path)]


def _accepts(path: str) -> bool:
    try:
        return owners.listener(path) is not None
    except OSError:
        return False


def _health(wanted: PreloadConfig) -> int:
    client = Client(f"http://127.0.0.1:{wanted.health_port}")
    try:
        return client.request("GET", "/health", timeout=PROBE_TIMEOUT).status
    finally:
        client.close()


# Its engines.


def _look_at_engines(
    wanted: PreloadConfig, signals: Signals, devices: list[gpu.GpuState] | None, found: PreloadState
) -> None:
    """Fill in who maps what: the engines declared for it, and any other that has memory on its GPUs from it."""
    for name in config.known_engines():
        try:
            engine = config.load(name)
            declared = name in wanted.engines or (engine.preload is not None and engine.preload.daemon == wanted.daemon)
            state = Unit(engine.unit).show()
            started = lease.last_start(name)
            if not runs(state) or not (declared or _took_from(wanted, engine, state, started, devices)):
                continue
            said = said_at_start(engine, state, started)
        except LifecycleError as exc:
            found.unseen[f"engine {name}"] = str(exc)
            continue
        gone = said["source"] == ZERO_COPY and lost(said, state, signals.unit)
        source, _why = judge_source(
            said["source"],
            held_by(devices, engine.gpus, state.pids),
            None if gone else held_by(devices, wanted.gpus, signals.unit.pids if signals.unit else []) or {},
            signals.need,
            awake=False,
        )
        found.sources[name] = source
        if source not in (DISK, COPY):
            found.mapped_by.append(name)
        if gone:
            found.lost.append(name)


def runs(state: UnitState) -> bool:
    """Whether it has processes of vLLM. One whose preflight still waits for its daemon has none."""
    return bool(state.main_pid) or (bool(state.pids) and state.active_state != "activating")


def _took_from(
    wanted: PreloadConfig,
    engine: EngineConfig,
    state: UnitState,
    started: dict[str, t.Any] | None,
    devices: list[gpu.GpuState] | None,
) -> bool:
    """An engine that is not declared for this daemon (any more), and yet has its weights."""
    held = held_by(devices, wanted.gpus, state.pids)
    if held is not None and not any(held.values()):
        return False
    said = said_at_start(engine, state, started)
    return said["source"] in (ZERO_COPY, COPY) and said.get("daemon", wanted.daemon) == wanted.daemon
