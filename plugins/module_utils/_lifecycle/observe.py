# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Every signal about one engine, joined into one Observation with one state."""

from __future__ import annotations

import socket
import time
import typing as t
from dataclasses import asdict, dataclass, field

from . import adapters, admission, footprint, generations, gpu, lease
from .adapters import EngineAdapters
from .config import EngineConfig
from .engine import SLEEP_STATES, Engine, Metrics, Served
from .errors import LifecycleError, Unreachable
from .gate import GateState
from .host import MemoryState, host_memory
from .lease import Lease, SleepRecord
from .source import ZERO_COPY, is_now
from .unit import Unit, UnitState

if t.TYPE_CHECKING:
    from .pairing import EnginePreload

STATES = (
    "stopped",
    "starting",
    "serving",
    "withdrawn",
    "draining",
    "drained",
    "headless",
    "asleep",
    "waking",
    "failed",
    "unknown",
)
# How long one question may take. A hung engine answers /health and lets /is_sleeping time out.
PROBE_TIMEOUT = 3.0


@dataclass(frozen=True)
class ApiState:
    """What the engine itself says. None is "not seen", never "no"."""

    healthy: bool
    version: str | None = None
    dev_mode: bool | None = None
    paused: bool | None = None
    sleeping: bool | None = None
    metrics: Metrics | None = None
    models: list[str] | None = None
    capabilities: list[str] | None = None
    served: list[Served] | None = None

    @property
    def in_flight(self) -> int | None:
        return self.metrics.in_flight if self.metrics else None


@dataclass(frozen=True)
class Observation:
    """One engine as seen now. ``reasons`` explain the state, ``unseen`` names signals that could not be read."""

    engine: str
    host: str
    state: str
    level: int | None
    reasons: list[str]
    unseen: dict[str, str]
    unit: UnitState | None
    api: ApiState | None
    gate: GateState | None
    has_gate: bool
    gpus: list[gpu.GpuState] | None
    memory: MemoryState | None
    lease: Lease | None
    started: dict[str, t.Any] | None
    last: dict[str, t.Any] | None
    sleep: SleepRecord | None
    runtime_version: str
    stale: bool | None
    preload: EnginePreload | None = None
    adapters: EngineAdapters | None = None
    # MiB that a sleep at level 1 would still take of the host, None where that is not known; what others were promised.
    host_copy_mib: int | None = None
    promised_mib: int = 0
    # The generation that going back leads to: its name, config_digest and runtime_version.
    goes_back: dict[str, t.Any] | None = None
    # Which run went back last, and to which configuration; the configuration that is on disk now.
    went_back: dict[str, t.Any] | None = None
    config_digest: str = ""
    # Of a headless engine: whether what its process was started with is not yet kept as proved, which its head decides.
    unkept: bool = False
    # The digest of the checkpoint that its process has loaded, "" where that is not on record.
    weights_digest: str = ""
    # Why its process is due for a restart: its sleeps have left too much memory behind.
    leak: str = ""
    # What came of the last comparison with a golden: matches, key, at; None where this process was not compared.
    golden: dict[str, t.Any] | None = None
    # Whose word ``gate`` is: gate, haproxy or command; with none there is nobody to ask.
    admission_backend: str = "gate"
    # The replica across hosts that it is a part of, "" for none; and whether another host's engine is its API server.
    group: str = ""
    headless: bool = False

    @property
    def in_flight(self) -> int | None:
        return self.api.in_flight if self.api else None

    @property
    def paused(self) -> bool | None:
        return self.api.paused if self.api else None

    @property
    def restarted_by(self) -> str:
        """The run that restarted the process which runs now, or nothing."""
        if not self.last or not self.unit or self.last.get("restarted_pid") != self.unit.main_pid:
            return ""
        return str(self.last.get("restarted_run") or "")

    @property
    def lora(self) -> bool:
        """Whether LoRA is on."""
        return self.adapters is not None and self.adapters.in_use

    def summary(self) -> dict[str, t.Any]:
        """The part of the state that a change is about: before, after and diff."""
        return {
            "state": self.state,
            "level": self.level,
            "admission": self.gate.admission if self.gate else None,
            "proved": self.gate.proved if self.gate else None,
            "paused": self.paused,
            "lease": self.lease.owner if self.lease else None,
        }

    def asdict(self) -> dict[str, t.Any]:
        value = asdict(self)
        value["summary"] = self.summary()
        value["restarted_by"] = self.restarted_by
        if self.gate is not None:
            value["gate"].update(ready=self.gate.ready, forgot=self.gate.forgot)
        if self.lease is not None:
            value["lease"]["expired"] = self.lease.expires <= time.time()
        return value


@dataclass
class _Looker:
    """Asks one thing after the other; what fails is named in ``unseen``."""

    unseen: dict[str, str] = field(default_factory=dict)

    def look(self, signal: str, ask: t.Callable[[], t.Any]) -> t.Any:
        try:
            return ask()
        except (LifecycleError, gpu.GpuUnseen) as exc:
            self.unseen[signal] = str(exc)
            return None


def observe(config: EngineConfig, before: Observation | None = None) -> Observation:
    """Look at everything, change nothing.

    :param before: an earlier look. A process that still runs is not asked for its routes again.
    """
    looker = _Looker()
    unit = looker.look("unit", Unit(config.unit).show)
    api = None
    if unit is not None and unit.active_state == "active" and not config.headless:
        same = before is not None and before.unit is not None and before.unit.main_pid == unit.main_pid
        api = _observe_api(config, looker, before.api.capabilities if same and before and before.api else None)
    has_gate = config.admission_backend != "none"
    gate = looker.look("gate", lambda: _observe_gate(config)) if has_gate else None
    held = looker.look("lease", lambda: lease.read(config.engine))
    started = looker.look("ready", lambda: lease.last_start(config.engine))
    last = looker.look("last_transition", lambda: lease.last_transition(config.engine))
    sleep = looker.look("sleep", lambda: lease.sleep_record(config.engine))
    if sleep is not None and (unit is None or sleep.main_pid != unit.main_pid):
        sleep = None  # the record of a process that has ended
    devices = looker.look("gpu", gpu.observe)
    awake = api is not None and (api.sleeping is False or api.dev_mode is False)
    preload = None
    if config.preload:
        # A third of the library, which most engines do not need: each call of a module reads what it imports.
        from . import pairing

        preload = looker.look("preload", lambda: pairing.engine_preload(config, unit, started, devices, awake=awake))
    cycles = looker.look("cycles", lambda: footprint.read(config.engine, unit.main_pid)) if unit else None
    lent = preload is not None and preload.weights_source == ZERO_COPY
    state, level, reasons = derive(
        unit,
        api,
        gate,
        sleep,
        has_gate=has_gate,
        unseen=looker.unseen,
        lent=lent,
        headless=config.headless,
    )
    served = api.served if api else None
    lora = looker.look("adapters", lambda: adapters.observe_adapters(config, unit, served))
    broken = [looker.unseen[name] for name in ("lease", "sleep", "adapters") if name in looker.unseen]
    if broken:
        state, reasons = "unknown", [*reasons, *broken]
    return Observation(
        engine=config.engine,
        host=socket.gethostname(),
        state=state,
        level=level,
        reasons=reasons,
        unseen=looker.unseen,
        unit=unit,
        api=api,
        gate=gate,
        has_gate=has_gate,
        gpus=devices,
        memory=looker.look("memory", lambda: host_memory(unit.control_group, unit.pids)) if unit else None,
        lease=held,
        started=started,
        last=last,
        sleep=sleep,
        runtime_version=config.runtime_version,
        stale=_stale(config, unit, started),
        preload=preload,
        adapters=lora,
        host_copy_mib=_host_copy(cycles, started, lent),
        promised_mib=looker.look("promises", lambda: footprint.promised_mib(config.engine)) or 0,
        goes_back=looker.look("generations", lambda: generations.target(config)),
        went_back=looker.look("generations", lambda: generations.went_back(config)),
        unkept=config.headless and bool(looker.look("generations", lambda: generations.unkept(config))),
        config_digest=config.config_digest,
        weights_digest=looker.look("weights", lambda: lease.loaded_weights(config.engine, unit.main_pid)) or ""
        if unit
        else "",
        leak=footprint.leak(cycles, config.leak_budget_gpu_mib, config.leak_budget_host_mib) if cycles else "",
        golden=looker.look("golden", lambda: _compared(config, unit)),
        admission_backend=config.admission_backend,
        group=config.group,
        headless=config.headless,
    )


def _observe_gate(config: EngineConfig) -> GateState | None:
    door = admission.choose(config)
    return door.observe() if door else None


def _compared(config: EngineConfig, unit: UnitState | None) -> dict[str, t.Any] | None:
    """The last comparison with a golden, unless another process runs by now. One that failed a start stays told."""
    found = lease.last_comparison(config.engine)
    if found is None or unit is None or (unit.main_pid and not is_now(found, unit.main_pid)):
        return None
    return {key: found.get(key) for key in ("matches", "key", "at")}


def _host_copy(cycles: footprint.Cycles | None, started: dict[str, t.Any] | None, lent: bool) -> int | None:
    """MiB that a sleep at level 1 would take of the host: nothing for weights that it has copied, or that are lent."""
    if lent or (cycles is not None and cycles.host_copy):
        return 0
    if cycles is None or not started or started.get("main_pid") != cycles.main_pid:
        return None
    weights = started.get("weights_mib")
    return round(weights * footprint.HOST_COPY_FACTOR) if isinstance(weights, int) else None


def _stale(config: EngineConfig, unit: UnitState | None, started: dict[str, t.Any] | None) -> bool | None:
    """Whether the running process is another one than is configured; None where no proved start is on record."""
    if unit is None or started is None or unit.main_pid == 0 or started.get("main_pid") != unit.main_pid:
        return None
    return bool(started.get("config_digest") != config.config_digest)


def _observe_api(config: EngineConfig, looker: _Looker, capabilities: list[str] | None = None) -> ApiState | None:
    engine = Engine(config)
    try:
        return _ask_api(engine, looker, capabilities)
    finally:
        engine.close()


def _ask_api(engine: Engine, looker: _Looker, capabilities: list[str] | None) -> ApiState | None:
    signals: dict[str, t.Any] = {}
    questions: list[tuple[str, t.Callable[[float], t.Any]]] = [
        ("healthy", engine.healthy),
        ("sleeping", engine.is_sleeping),
        ("paused", engine.is_paused),
        ("metrics", engine.metrics),
        ("version", engine.version),
        ("models", engine.served),
        ("capabilities", engine.capabilities if capabilities is None else lambda _timeout: capabilities),
    ]
    for signal, ask in questions:
        try:
            signals[signal] = ask(PROBE_TIMEOUT)
        except LifecycleError as exc:
            looker.unseen[f"api.{signal}"] = str(exc)
            # One silence is enough: each further question to a hung engine would cost its own time-out.
            if isinstance(exc, Unreachable):
                break
    if "healthy" not in signals:
        return None
    if "models" in signals:
        signals["served"] = signals["models"]
        signals["models"] = [one.name for one in signals["served"]]
    routes = [signals.get("sleeping", ...), signals.get("paused", ...)]
    dev_mode = None if ... in routes else routes != [None, None]
    if dev_mode is False:
        looker.unseen["api.dev_mode"] = "no development endpoints (404): VLLM_SERVER_DEV_MODE=1 is not set"
    return ApiState(dev_mode=dev_mode, **signals)


def derive(
    unit: UnitState | None,
    api: ApiState | None,
    gate: GateState | None,
    sleep: SleepRecord | None = None,
    *,
    has_gate: bool,
    unseen: t.Mapping[str, str],
    lent: bool = False,
    headless: bool = False,
) -> tuple[str, int | None, list[str]]:
    """(state, sleep level, reasons) from the signals. Pure; missing or contradicting signals are ``unknown``.

    Of a ``headless`` engine there is the unit alone: it has no API server, and its process may live while it does
    nothing for its head. So it is never ``serving``.

    A balancer that does something else than it was told is always among the reasons.

    ``sleep`` is our own record of the process that runs now: the engine repeats whatever level was asked of it last,
    and after a plain wake from level 2 it says awake while its weights are gone; unless they are ``lent`` by a preload
    daemon, and never slept.
    """
    if headless and unit is not None and unit.active_state == "active":
        return "headless", None, []
    state, level, reasons = _derive(unit, api, gate, sleep, has_gate=has_gate, unseen=unseen, lent=lent)
    return state, level, [*reasons, gate.differs] if gate is not None and gate.differs else reasons


def _derive(
    unit: UnitState | None,
    api: ApiState | None,
    gate: GateState | None,
    sleep: SleepRecord | None,
    *,
    has_gate: bool,
    unseen: t.Mapping[str, str],
    lent: bool,
) -> tuple[str, int | None, list[str]]:
    if unit is None:
        return "unknown", None, [unseen.get("unit", "systemd was not seen")]
    if unit.active_state == "inactive":
        if unit.pids:
            return "unknown", None, [f"the unit is inactive, yet processes are left in its group: {unit.pids}"]
        return "stopped", None, []
    if unit.active_state == "failed":
        return "failed", None, [f"systemd result {unit.result}"]
    if unit.active_state == "activating":
        return "starting", None, [f"systemd says {unit.sub_state}, {unit.n_restarts} restart(s)"]
    if unit.active_state == "deactivating":
        return "draining", None, [f"systemd says {unit.sub_state}"]
    if unit.active_state != "active":
        return "unknown", None, [f"systemd says {unit.active_state}/{unit.sub_state}"]

    doubts = [
        f"{name[4:]}: {why}"
        for name, why in unseen.items()
        if name.startswith("api.") and name not in ("api.dev_mode", "api.capabilities")
    ]
    if has_gate and gate is None:
        doubts.append(unseen.get("gate", "the gate was not seen"))
    if api is None or not api.healthy:
        return "unknown", None, doubts or ["/health is not 200"]
    if doubts:
        return "unknown", None, doubts
    if api.metrics and api.metrics.sleep_operations:
        # A client's time-out does not end the call: an engine that looks awake may fall asleep a moment later.
        return "unknown", None, ["a sleep or wake that was asked of it is still under way"]
    indexes = (api.metrics.sleep_state if api.metrics else None) or {}
    if api.sleeping and not indexes:
        return "unknown", None, ["/is_sleeping is true of paused engines too, and the metrics do not say which it is"]
    levels = {SLEEP_STATES[name] for name in indexes.values()}
    if len(levels) > 1:
        return "unknown", None, [f"engine indexes differ in their sleep state: {indexes}"]
    level = levels.pop() if levels else None
    if level is not None:
        if api.sleeping and api.paused is not False:
            return _derive_asleep(level, sleep)
        return "unknown", None, [f"the metrics say asleep at level {level}, /is_sleeping says {api.sleeping}"]
    if sleep is not None and sleep.level == 2 and not lent:
        if "reloaded" in sleep.awake:
            return _derive_asleep(2, sleep)  # a staged wake that was killed near its end
        why = "it was put to sleep at level 2 and says it is awake: someone woke it without reloading its weights"
        return "unknown", None, [why]
    if api.sleeping and not api.paused:
        return "unknown", None, ["/is_sleeping is true, yet the metrics say awake and /is_paused is false"]
    return _derive_awake(api, gate)


def _derive_asleep(level: int, sleep: SleepRecord | None) -> tuple[str, int | None, list[str]]:
    if sleep is not None and sleep.level != level:
        why = f"the engine says asleep at level {level}, yet it was put to sleep at level {sleep.level}"
        return "unknown", None, [why]
    if sleep is not None and sleep.awake:
        return "waking", level, [f"awake so far: {', '.join(sleep.awake)}"]
    return "asleep", level, []


def _derive_awake(api: ApiState, gate: GateState | None) -> tuple[str, int | None, list[str]]:
    """An engine that is not asleep: admission, pause and what is in flight decide."""
    reasons: list[str] = []
    busy = (api.in_flight or 0) + (gate.sessions if gate else 0)
    if api.in_flight is None:
        reasons.append("the engine does not report its requests (started with --disable-log-stats?)")
    locked = api.paused or (api.dev_mode is False and gate is not None)
    if api.paused and gate is not None and gate.admission == "open":
        return "draining", None, [*reasons, "paused while the gate still admits requests: they wait until it resumes"]
    if gate is not None and gate.forgot:
        return "draining", None, reasons  # somebody wants it out, and requests come
    out = gate is not None and gate.admission != "open"
    if api.paused or out:
        if busy:
            frozen = ", frozen while the engine is paused" if api.paused else ""
            return "draining", None, [*reasons, f"{busy} request(s) left{frozen}"]
        closed = gate is None or gate.admission == "closed"
        return ("drained" if locked and closed and api.in_flight is not None else "withdrawn"), None, reasons
    if gate is not None and not gate.ready:
        missing = [] if gate.proved else ["its start is not proved"]
        missing += [] if gate.backend_up else ["the gate's health check fails"]  # of a balancer, its own
        return "withdrawn", None, [*reasons, *missing]
    return "serving", None, reasons
