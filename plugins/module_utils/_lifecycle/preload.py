# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Preload daemons: what is seen of one, what is to be done, and doing it.

A daemon's health was measured to stay 200 after it has given its weights away, and its unit is active long before it
has any. So "ready" joins unit, health, a connection to each rank's socket and the GPU memory that its processes hold.
Its socket speaks pickle: we connect and say nothing.
"""

from __future__ import annotations

import socket
import typing as t
from dataclasses import dataclass, field
from pathlib import Path

from . import config, gpu, lease, store
from .deadline import Deadline
from .errors import DeadlineExceeded, LifecycleError, Refused, Surprise, UnknownState, UsageError
from .http import Client
from .plan import Step
from .transition import Outcome, Report
from .unit import Unit, UnitState

PROBE_TIMEOUT = 3.0
STATES = ("absent", "starting", "ready", "unusable", "failed", "unknown")
START = Step("start", "start the daemon and wait until it is proved ready")
STOP = Step("stop", "stop the daemon and prove its memory free")


@dataclass(frozen=True)
class PreloadConfig:
    """One daemon, as the roles declared it. ``weights_mib`` is what each rank must hold at least, 0 when not known."""

    daemon: str
    unit: str
    socket_dir: str
    sockets: list[str]
    health_port: int
    start_timeout: float
    gpus: list[str] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    weights_mib: int = 0


@dataclass(frozen=True)
class PreloadState:
    """One daemon as seen now. ``mapped_by`` names the running engines that were declared to use it."""

    daemon: str
    host: str
    state: str
    reasons: list[str]
    unseen: dict[str, str]
    main_pid: int
    held_mib: dict[str, int]
    mapped_by: list[str]

    def summary(self) -> dict[str, t.Any]:
        return {"state": self.state, "mapped_by": self.mapped_by}


def config_dir() -> Path:
    return store.root() / "etc/vllm/preload"


def known_daemons() -> list[str]:
    return sorted(path.stem for path in config_dir().glob("*.json") if config.NAME.fullmatch(path.stem))


def load(daemon: str) -> PreloadConfig:
    """The declared daemon.

    :raises UsageError: not root, no such daemon (names the known ones), or its file is not what the roles write.
    """
    store.require_root()
    path = config_dir() / f"{daemon}.json"
    value = store.read_json(path) if config.NAME.fullmatch(daemon) else None
    if value is None:
        raise UsageError(
            f"host {socket.gethostname()} has no preload daemon '{daemon}'; daemons declared there: "
            + (", ".join(known_daemons()) or "none"),
            next_step="correct the name, or declare the daemon in the inventory and run playbooks/site.yml",
            known=known_daemons(),
        )
    return t.cast(PreloadConfig, config.build(PreloadConfig, value, str(path)))


def observe_preload(wanted: PreloadConfig) -> PreloadState:
    """Look at everything, change nothing."""
    unseen: dict[str, str] = {}
    unit: UnitState | None = None
    try:
        unit = Unit(wanted.unit).show()
    except LifecycleError as exc:
        unseen["unit"] = str(exc)
    health: int | None = None
    refused: list[str] = []
    if unit is not None and unit.active_state in ("active", "activating"):
        try:
            health = _health(wanted)
        except LifecycleError as exc:
            unseen["health"] = str(exc)
        refused = [name for name in wanted.sockets if not _accepts(Path(wanted.socket_dir) / name)]
    held: dict[str, int] | None = None
    try:
        held = _held(wanted, unit.pids if unit else [])
    except gpu.GpuUnseen as exc:
        unseen["gpu"] = str(exc)
    state, reasons = derive_preload(unit, health, refused, held, wanted.weights_mib, unseen)
    return PreloadState(
        daemon=wanted.daemon,
        host=socket.gethostname(),
        state=state,
        reasons=reasons,
        unseen=unseen,
        main_pid=unit.main_pid if unit else 0,
        held_mib=held or {},
        mapped_by=_running_engines(wanted),
    )


def derive_preload(
    unit: UnitState | None,
    health: int | None,
    refused: list[str],
    held: dict[str, int] | None,
    weights_mib: int,
    unseen: t.Mapping[str, str],
) -> tuple[str, list[str]]:
    """(state, reasons) from the signals. Pure."""
    if unit is None:
        return "unknown", [unseen.get("unit", "systemd was not seen")]
    if unit.active_state == "inactive":
        return ("unknown", [f"processes are left in its group: {unit.pids}"]) if unit.pids else ("absent", [])
    if unit.active_state == "failed":
        return "failed", [f"systemd result {unit.result}"]
    if unit.active_state == "activating":
        return "starting", [f"health {health or 'gives no answer'}"]
    if unit.active_state != "active":
        return "unknown", [f"systemd says {unit.active_state}/{unit.sub_state}"]
    if health is None:
        return "unknown", [unseen.get("health", "its health was not seen")]
    reasons = [] if health == 200 else [f"health is {health}: a rank is gone or was never there"]
    reasons += [f"nobody accepts on {name}" for name in refused]
    if held is not None and weights_mib:
        reasons += [
            f"it holds {mib} MiB on {uuid}, its weights are {weights_mib} MiB: it has given them away"
            for uuid, mib in held.items()
            if mib < weights_mib
        ]
    return ("unusable", reasons) if reasons else ("ready", [])


def plan_preload(wanted: str, now: PreloadState, force: bool) -> list[Step]:
    """The steps to ``ready`` or ``absent``. Pure.

    :raises Refused: an engine maps the daemon's memory; a daemon that is started anew would hold a second copy.
    """
    if wanted == "ready" and now.state == "ready":
        return []
    if wanted == "absent" and now.state == "absent":
        return []
    steps = [] if now.state == "absent" else [STOP]
    if wanted == "ready":
        steps = [START] if now.state == "starting" else [*steps, START]
    if now.mapped_by and not force:
        raise Refused(
            f"preload daemon '{now.daemon}' on {now.host} is {now.state} and the running engine(s) "
            f"{', '.join(now.mapped_by)} may map its memory",
            next_step="stop these engines first (vllm_engine state=stopped), then the daemon; or use force: true",
            left={"mapped_by": now.mapped_by},
        )
    return steps


def change_preload(
    wanted: PreloadConfig, state: str, timeout: float, force: bool, check: bool, report: Report
) -> Outcome:
    """Bring one daemon to ``ready`` or ``absent``, or with ``check`` say what that would do.

    :raises LifecycleError: with the keys of an Outcome as far as they are known.
    """
    deadline = Deadline(timeout)
    if check:
        now = observe_preload(wanted)
        steps = plan_preload(state, now, force)
        expected = {**now.summary(), "state": state} if steps else now.summary()
        return Outcome(bool(steps), _says(wanted, steps), now.summary(), expected, round(deadline.elapsed, 3), {}, {})
    with lease.locked(f"preload-{wanted.daemon}", deadline):
        before = observe_preload(wanted)
        done: list[Step] = []
        timings: dict[str, float] = {}
        try:
            for step in plan_preload(state, before, force):
                report(_says(wanted, [step])[0])
                begun = deadline.elapsed
                if step is START:
                    _start(wanted, deadline)
                else:
                    _stop(wanted, deadline)
                timings[step.name] = round(deadline.elapsed - begun, 3)
                done.append(step)
            after = observe_preload(wanted)
            if after.state != state:
                error = UnknownState if after.state == "unknown" else Surprise
                raise error(
                    f"preload daemon '{wanted.daemon}' on {after.host} is {after.state}: {'; '.join(after.reasons)}",
                    next_step=f"read journalctl -u {wanted.unit} and run this again",
                )
        except LifecycleError as exc:
            exc.details.update(
                changed=bool(done), actions=_says(wanted, done), before=before.summary(), timings=timings
            )
            raise
    extra = {"held_mib": after.held_mib}
    return Outcome(
        bool(done), _says(wanted, done), before.summary(), after.summary(), round(deadline.elapsed, 3), timings, extra
    )


def _says(wanted: PreloadConfig, steps: list[Step]) -> list[str]:
    return [f"{wanted.daemon}: {step.says}" for step in steps]


def _start(wanted: PreloadConfig, deadline: Deadline) -> None:
    Unit(wanted.unit).start(deadline)
    while True:
        now = observe_preload(wanted)
        if now.state == "ready":
            return
        if now.state in ("failed", "absent"):
            raise LifecycleError(
                f"preload daemon '{wanted.daemon}' on {now.host} ended before it was ready: {'; '.join(now.reasons)}",
                next_step=f"read journalctl -u {wanted.unit}",
                journal=Unit(wanted.unit).journal(40),
            )
        if not deadline.rest():
            raise DeadlineExceeded(
                f"preload daemon '{wanted.daemon}' on {now.host} is {now.state} after {deadline.seconds:g} s: "
                + "; ".join([*now.reasons, *now.unseen.values()]),
                next_step=f"read journalctl -u {wanted.unit}; raise timeout when the model is only large",
                journal=Unit(wanted.unit).journal(40),
            )


def _stop(wanted: PreloadConfig, deadline: Deadline) -> None:
    pids = Unit(wanted.unit).show().pids
    Unit(wanted.unit).stop(deadline)
    while True:
        try:
            held = {uuid: mib for uuid, mib in _held(wanted, pids).items() if mib}
        except gpu.GpuUnseen:
            return
        if not held:
            return
        if not deadline.rest():
            raise DeadlineExceeded(
                f"preload daemon '{wanted.daemon}' on {socket.gethostname()} has stopped, yet {held} MiB stay charged "
                f"to its processes {pids}",
                next_step="look at nvidia-smi; an engine that mapped this memory keeps it until it stops",
                left={"held_mib": held},
            )


def _health(wanted: PreloadConfig) -> int:
    client = Client(f"http://127.0.0.1:{wanted.health_port}")
    try:
        return client.request("GET", "/health", timeout=PROBE_TIMEOUT).status
    finally:
        client.close()


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(PROBE_TIMEOUT)
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True


def _held(wanted: PreloadConfig, pids: list[int]) -> dict[str, int]:
    """MiB that these processes hold, by GPU UUID."""
    return {
        device.uuid: sum(mib or 0 for pid, mib in device.processes.items() if pid in pids)
        for device in gpu.observe()
        if device.uuid in wanted.gpus
    }


def _running_engines(wanted: PreloadConfig) -> list[str]:
    running = []
    for name in wanted.engines:
        try:
            state = Unit(config.load(name).unit).show()
        except UsageError:  # declared for this daemon, not yet on this host
            continue
        if state.active_state not in ("inactive", "failed") or state.pids:
            running.append(name)
    return running
