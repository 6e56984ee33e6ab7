# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""An engine and its preload daemon: where its weights come from, and what its next start will be. Looks only."""

from __future__ import annotations

import typing as t
from dataclasses import dataclass

from . import compat, config, gpu
from .compat import Loaded
from .config import EngineConfig, PreloadConfig
from .errors import UsageError
from .preload import Signals, derive_preload, load, look_at, peek, read_model
from .source import COPY, MODES, ZERO_COPY, held_by, judge_source, lost, said_at_start
from .unit import UnitState


@dataclass(frozen=True)
class EnginePreload:
    """Where an engine has its weights from, and what its next start will be.

    ``state`` is that of its daemon, or "lost" where the engine maps what an ended daemon left behind. ``wrong`` says
    that it serves other weights than its checkpoint's. ``next_start`` is one of compat.STARTS. ``why`` explains what is
    not as it was asked for.
    """

    daemon: str
    mode: str
    state: str
    weights_source: str | None
    next_start: str
    why: list[str]
    wrong: str = ""
    may_sleep: bool = False

    @property
    def maps(self) -> bool:
        """Its weights are the daemon's, or may be."""
        return self.weights_source == ZERO_COPY or (self.weights_source is None and self.mode == "zero_copy")


def engine_preload(
    engine: EngineConfig,
    unit: UnitState | None,
    started: dict[str, t.Any] | None,
    devices: list[gpu.GpuState] | None,
    *,
    awake: bool,
) -> EnginePreload | None:
    """None for an engine without a daemon. Looks only."""
    use = engine.preload
    if use is None:
        return None
    daemon, missing = _declared(use.daemon)
    unseen: dict[str, str] = {}
    signals, _devices = look_at(daemon, unseen, None, False) if daemon else (Signals(None), None)
    state, reasons = derive_preload(daemon, signals, unseen) if daemon else ("unknown", [missing])
    source, why, wrong, shown = None, [], "", state
    if unit is not None and unit.main_pid:
        said = said_at_start(engine, unit, started)
        gone = said["source"] == ZERO_COPY and lost(said, unit, signals.unit)
        lent = held_by(devices, daemon.gpus if daemon else [], signals.unit.pids if signals.unit else [])
        own = held_by(devices, engine.gpus, unit.pids)
        source, doubt = judge_source(said["source"], own, None if gone else lent or {}, signals.need, awake=awake)
        why = _why_source(use.mode, source, doubt or "", str(said.get("why") or ""))
        if gone:
            shown = "lost"
            why.append("daemon lost; scheduled for the next restart")
        elif source in (ZERO_COPY, COPY) and "digest" not in said:
            wrong = _wrong(engine, signals.loaded)
    content = _judge_content(engine, daemon, signals, state, reasons) if daemon else {}
    verdict = compat.judge(
        engine,
        daemon,
        signals.loaded,
        read_model(engine.model),
        None if devices is None else [device.uuid for device in devices],
        signals.driver,
        lent=read_model(daemon.model) if daemon else None,
        modes=modes_of(daemon),
        **content,
    )
    return EnginePreload(
        daemon=use.daemon,
        mode=use.mode,
        state=shown,
        weights_source=source,
        next_start=verdict.start,
        why=[*([wrong] if wrong else []), *why, *verdict.reasons],
        wrong=wrong,
        may_sleep=use.allow_zero_copy_sleep,
    )


def _declared(name: str) -> tuple[PreloadConfig | None, str]:
    try:
        return load(name), ""
    except UsageError as exc:
        return None, str(exc)


def _why_source(mode: str, source: str | None, doubt: str, said: str) -> list[str]:
    if source is None:
        return [f"where its weights come from is not known: {said or doubt}"]
    if source != MODES[mode]:
        return [f"its weights come from {source}, not from the daemon ({mode})" + (f": {said}" if said else "")]
    return []


def _wrong(engine: EngineConfig, loaded: Loaded | None) -> str:
    """An engine whose door has not compared: what it maps against what it ought to serve."""
    if loaded is None:
        return ""
    try:
        now = peek(engine.model, loaded.method)
    except UsageError:
        return ""
    return different(engine, loaded.digest, now.digest) if now is not None and now.digest != loaded.digest else ""


def different(engine: EngineConfig, held: str, wanted: str) -> str:
    """The sentence for two checkpoints that vLLM cannot tell apart."""
    return (
        f"the daemon '{engine.preload.daemon if engine.preload else ''}' holds {held}, while the engine's checkpoint "
        f"{engine.model} is {wanted}: vLLM would not notice, and serve the daemon's"
    )


def _judge_content(
    engine: EngineConfig, daemon: PreloadConfig, signals: Signals, state: str, reasons: list[str]
) -> dict[str, list[str]]:
    """What compat.judge has to be told of the daemon's state, and of the content of both checkpoints."""
    # A daemon that starts anew holds what then lies in its own checkpoint, else it holds what it has loaded.
    again = state in ("absent", "starting", "failed")
    again = again or bool(signals.used_by or signals.outdated or signals.mismatch)
    also = [reason for reason in reasons if reason not in signals.outdated]
    news: list[str] = []
    blocked: list[str] = []
    if again:
        news = [f"the daemon is {state}: it loads from disk first", *also]
    elif state != "ready":
        (blocked if state == "unusable" else news).extend([f"the daemon is {state}", *also])
    loaded = signals.loaded
    found = {"news": news, "blocked": blocked}
    if (again and engine.model == daemon.model) or (loaded is None and not again):
        return found
    method = loaded.method if loaded else daemon.weights.method
    try:
        wanted = peek(engine.model, method)
        later = peek(daemon.model, method) if again else None
    except UsageError as exc:
        return {**found, "never": [str(exc)]}
    held = loaded.digest if loaded and not again else later.digest if later else ""
    if wanted is None or not held:
        news.append("its checkpoint has changed since it was hashed: the start compares it")
    elif held != wanted.digest:
        found["never"] = [different(engine, held, wanted.digest)]
    return found


def modes_of(daemon: PreloadConfig | None) -> dict[str, str]:
    """The mode of each engine that takes from this daemon."""
    modes = {}
    for name in config.known_engines() if daemon else ():
        try:
            use = config.load(name).preload
        except UsageError:
            continue
        if use is not None and daemon is not None and use.daemon == daemon.daemon:
            modes[name] = use.mode
    return modes
