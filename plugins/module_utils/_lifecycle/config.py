# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What the roles say about an engine, /etc/vllm/lifecycle/NAME.json, and about a preload daemon, /etc/vllm/preload."""

from __future__ import annotations

import re
import socket
import typing as t
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import gpu, store
from .errors import UsageError

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")


@dataclass(frozen=True)
class GateConfig:
    """The gate in front of an engine: HAProxy's master socket, its map file and the proxy of this engine."""

    master_socket: str
    map: str
    proxy: str
    address: str
    port: int


@dataclass(frozen=True)
class AdmissionConfig:
    """Who admits requests to an engine. ``timeout`` in seconds, for one question.

    ``sockets``, ``proxy`` and ``server`` are of backend haproxy: the runtime sockets of all HAProxies that send to the
    engine, each a path or ADDRESS:PORT, and the names that they know it by. ``command`` is of the backend of that name.
    """

    backend: str
    sockets: list[str] = field(default_factory=list)
    proxy: str = ""
    server: str = ""
    command: list[str] = field(default_factory=list)
    timeout: float = 10.0


@dataclass(frozen=True)
class Traits:
    """The options that decide what weights look like in GPU memory. Empty or "auto": vLLM's own choice."""

    dtype: str = "auto"
    quantization: str = ""
    load_format: str = "auto"
    revision: str = ""
    kv_cache_dtype: str = "auto"
    lora: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False


@dataclass(frozen=True)
class PreloadUse:
    """How an engine takes its weights from a daemon. ``mode`` is zero_copy or copy; ``wait`` in seconds.

    Without ``fallback`` an engine that would load from disk does not start.
    """

    daemon: str
    mode: str = "zero_copy"
    fallback: bool = False
    allow_zero_copy_sleep: bool = False
    wait: float = 900.0


@dataclass(frozen=True)
class AdapterConfig:
    """A LoRA adapter that an engine is to serve under ``name``.

    ``base``, unless empty, is what its adapter_config.json has to name as the base model. Without ``prove`` it may be
    one that changes nothing.
    """

    name: str
    path: str
    base: str = ""
    prove: bool = True


@dataclass(frozen=True)
class LoraLimits:
    """The engine's options for LoRA. ``max_cpu_loras`` 0: as many as ``max_loras``."""

    max_rank: int = 16
    max_loras: int = 1
    max_cpu_loras: int = 0


@dataclass(frozen=True)
class WeightsPolicy:
    """How the manifest of a daemon's checkpoint is taken, and which digests it may have; see ``weights``."""

    method: str = "full"
    allowed: list[str] = field(default_factory=list)
    allowed_file: str = ""
    allowed_signers: str = ""


@dataclass(frozen=True)
class EngineConfig:
    """One engine, as the roles declared it. Times in seconds."""

    engine: str
    unit: str
    user: str
    config_file: str
    env_file: str
    socket: str
    runtime: str
    runtime_version: str
    model: str
    served_model_name: str
    gate: GateConfig | None
    router_detection: float
    drain_timeout: float
    shutdown_timeout: float
    stop_timeout: float
    start_timeout: float
    config_digest: str
    compile_cache: str = ""
    ranks: int = 1
    gpus: list[str] = field(default_factory=list)
    warmup: list[dict[str, int]] = field(default_factory=list)
    preload: PreloadUse | None = None
    traits: Traits = field(default_factory=Traits)
    sleep_mode: bool = False
    lora: LoraLimits | None = None
    adapters: list[AdapterConfig] = field(default_factory=list)
    leak_budget_gpu_mib: int = 1024
    leak_budget_host_mib: int = 4096
    admission: AdmissionConfig | None = None
    # Whether only a golden proves it; else an engine of whose weights none is on record is proved by a completion.
    golden_required: bool = False
    # The replica across hosts that it is a part of, "" for none; and whether another host's engine is its API server.
    group: str = ""
    headless: bool = False

    @property
    def admission_backend(self) -> str:
        """gate, haproxy, command or none. An engine that was to have our gate, and no port for it, has none."""
        if self.admission is not None and self.admission.backend != "gate":
            return self.admission.backend
        return "gate" if self.gate else "none"

    @property
    def door(self) -> str:
        """What sentences call it."""
        return {"gate": "the gate", "haproxy": "HAProxy"}.get(self.admission_backend, "its balancer")

    @property
    def state_dir(self) -> Path:
        return store.state_dir(self.engine)


@dataclass(frozen=True)
class PreloadConfig:
    """One preload daemon, as the roles declared it. Times in seconds.

    ``sockets`` are file names, one for each local rank; ``weights_mib`` is what each rank must hold at least, where
    that is known better than from the size of the checkpoint.
    """

    daemon: str
    unit: str
    socket_dir: str
    sockets: list[str]
    health_port: int
    start_timeout: float
    user: str = ""
    runtime: str = ""
    runtime_version: str = ""
    model: str = ""
    gpus: list[str] = field(default_factory=list)
    engines: list[str] = field(default_factory=list)
    weights: WeightsPolicy = field(default_factory=WeightsPolicy)
    traits: Traits = field(default_factory=Traits)
    config_digest: str = ""
    weights_mib: int = 0


_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "float": (int, float), "int": (int,), "bool": (bool,)}
# Objects inside an object, by the name of their class; "| None" behind it says that null is right as well.
_PARTS: dict[str, type] = {
    "AdapterConfig": AdapterConfig,
    "AdmissionConfig": AdmissionConfig,
    "GateConfig": GateConfig,
    "LoraLimits": LoraLimits,
    "PreloadUse": PreloadUse,
    "Traits": Traits,
    "WeightsPolicy": WeightsPolicy,
}
_CHOICES = {
    (AdmissionConfig, "backend"): ("gate", "haproxy", "command", "none"),
    (PreloadUse, "mode"): ("zero_copy", "copy"),
    (WeightsPolicy, "method"): ("full", "sample"),
}


def fits(value: t.Any, annotation: str) -> bool:
    """Whether a value from a JSON file is what a dataclass says of it: the types above, lists and objects of them."""
    if annotation == "t.Any":
        return True
    kind, _unused, nullable = annotation.partition(" | ")
    if kind in _PARTS:
        return isinstance(value, _PARTS[kind]) or (value is None and bool(nullable))
    if annotation.startswith("list["):
        return isinstance(value, list) and all(fits(item, annotation[5:-1]) for item in value)
    if annotation.startswith("dict[str, "):
        return isinstance(value, dict) and all(fits(item, annotation[10:-1]) for item in value.values())
    return isinstance(value, _TYPES[annotation]) and (annotation == "bool" or not isinstance(value, bool))


def build(cls: type, value: t.Any, where: str) -> t.Any:
    """A dataclass from a JSON object, every complaint at once.

    :raises UsageError: a key is missing or has the wrong type.
    """
    if not isinstance(value, dict):
        raise UsageError(
            f"{where} is no JSON object",
            entry="declaration-broken",
            next_step="run baremetal.vllm.site again, which writes it",
        )
    if "schema" in value and value["schema"] != 1:
        raise UsageError(
            f"{where} has schema {value['schema']!r}, this library reads 1",
            entry="declaration-broken",
            next_step="run baremetal.vllm.site again, which brings files and library to one version",
        )
    fields = cls.__dataclass_fields__  # type: ignore[attr-defined]
    known = {name: value[name] for name in fields if name in value}
    wrong = []
    for name, item in known.items():
        kind, _unused, nullable = str(fields[name].type).partition(" | ")
        if kind.startswith("list[") and kind[5:-1] in _PARTS and isinstance(item, list):
            known[name] = [build(_PARTS[kind[5:-1]], one, f"{where}, key {name}") for one in item]
        elif kind not in _PARTS:
            right = fits(item, kind) and item in _CHOICES.get((cls, name), [item])
            wrong += [] if right else [name]
        elif isinstance(item, dict):
            known[name] = build(_PARTS[kind], item, f"{where}, key {name}")
        elif item is not None or not nullable:
            wrong.append(name)
    try:
        if not wrong:
            return cls(**known)
        complaint = f"wrong type for {', '.join(wrong)}"
    except TypeError as exc:
        complaint = str(exc).partition(" ")[2]
    raise UsageError(
        f"{where}: {complaint}", entry="declaration-broken", next_step="run baremetal.vllm.site again, which writes it"
    )


def known_engines() -> list[str]:
    """The engines that the roles declared on this host."""
    return sorted(path.stem for path in store.config_dir().glob("*.json") if NAME.fullmatch(path.stem))


def load(engine: str) -> EngineConfig:
    """The declared engine.

    :raises UsageError: not root, no such engine (names the known ones), or its file is not what the roles write.
    """
    store.require_root()
    path = store.config_dir() / f"{engine}.json"
    value = store.read_json(path) if NAME.fullmatch(engine) else None
    if value is None:
        there = ", ".join(known_engines()) or "none"
        raise UsageError(
            f"host {socket.gethostname()} has no engine '{engine}'; engines declared there: {there}",
            entry="engine-unknown",
            next_step="correct the name, or declare the engine in vllm_engine_instances and run baremetal.vllm.site",
            known=known_engines(),
        )
    declared = t.cast(EngineConfig, build(EngineConfig, value, str(path)))
    return replace(declared, gpus=gpu.uuids(declared.gpus))


def preload_dir() -> Path:
    return store.root() / "etc/vllm/preload"


def known_daemons() -> list[str]:
    """The preload daemons that the roles declared on this host."""
    return sorted(path.stem for path in preload_dir().glob("*.json") if NAME.fullmatch(path.stem))


def load_daemon(daemon: str) -> PreloadConfig:
    """The declared preload daemon.

    :raises UsageError: not root, no such daemon (names the known ones), or its file is not what the roles write.
    """
    store.require_root()
    path = preload_dir() / f"{daemon}.json"
    value = store.read_json(path) if NAME.fullmatch(daemon) else None
    if value is None:
        there = ", ".join(known_daemons()) or "none"
        raise UsageError(
            f"host {socket.gethostname()} has no preload daemon '{daemon}'; daemons declared there: {there}",
            entry="daemon-unknown",
            next_step="correct the name, or declare the daemon in vllm_preload_instances and run baremetal.vllm.site",
            known=known_daemons(),
        )
    declared = t.cast(PreloadConfig, build(PreloadConfig, value, str(path)))
    return replace(declared, gpus=gpu.uuids(declared.gpus))
