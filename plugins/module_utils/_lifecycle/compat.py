# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Whether an engine can take its weights from its preload daemon, and what its next start will be. Pure.

vLLM finds out by itself, too, but late: with a fall-back it then loads from disk beside the daemon's copy, without one
it ends after a minute. And its own comparison covers no value of any tensor. So this is asked before anything stops.
"""

from __future__ import annotations

import typing as t

from .config import EngineConfig, PreloadConfig, Traits

STARTS = ("zero-copy", "copy", "cold", "refused")
# Ways of quantisation whose layout in memory `vllm preload` can hand over. It refuses every other one, among them
# AWQ, GPTQ, compressed-tensors and whatever is quantised while it loads.
_PRELOADABLE = ("fp8", "mxfp4", "mxfp8", "modelopt")
# What `auto` stands for where a checkpoint says it itself, and other names of the same type.
_DTYPES = {"half": "float16", "float": "float32"}
MIB = 1024 * 1024


class Model(t.NamedTuple):
    """What a checkpoint's config.json says: empty where it says nothing."""

    architecture: str = ""
    quantization: str = ""
    dtype: str = ""


class Loaded(t.NamedTuple):
    """What a daemon was seen to have loaded, by its own door. ``boot`` and ``start`` make ``main_pid`` an identity."""

    main_pid: int
    boot: str
    start: int
    at: float
    pids: list[int]
    runtime_version: str
    config_digest: str
    driver_version: str
    digest: str
    method: str
    bytes: int
    held_mib: dict[str, int]


class Verdict(t.NamedTuple):
    """``start`` is one of STARTS, ``reasons`` say why it is not what was asked for."""

    start: str
    reasons: list[str]


def judge(
    engine: EngineConfig,
    daemon: PreloadConfig | None,
    loaded: Loaded | None,
    model: Model | None,
    gpus: t.Collection[str] | None,
    driver: str | None,
    *,
    lent: Model | None = None,
    modes: t.Mapping[str, str] | None = None,
    never: t.Sequence[str] = (),
    blocked: t.Sequence[str] = (),
    news: t.Sequence[str] = (),
) -> Verdict:
    """What the next start of an engine will be.

    :param loaded: of the daemon that runs now; None where none has been proved ready.
    :param model: of the engine's checkpoint; None where its config.json could not be read.
    :param gpus: UUIDs that the driver shows; None where it shows none.
    :param driver: its version now; None where it is not known.
    :param lent: the same as ``model`` of the daemon's checkpoint, where that is another directory.
    :param modes: of all engines of this daemon, by name.
    :param never: why it must not start at all, a fall-back or not; found by the caller.
    :param blocked: why the daemon has nothing to give, and will not have by itself; found by the caller.
    :param news: why the daemon has to load once more before it can give anything; found by the caller.
    """
    use = engine.preload
    if use is None:
        return Verdict("cold", ["it has no preload daemon"])
    refused = [*never, *_unsafe(engine, modes or {})]
    if refused:
        return Verdict("refused", refused)
    if daemon is None:
        conflicts = [f"there is no preload daemon '{use.daemon}' on this host"]
        return Verdict("cold" if use.fallback else "refused", conflicts)
    lent = lent or model
    conflicts = [*_differences(engine, daemon, model, lent), *refusals(daemon, lent, gpus), *blocked]
    if conflicts:
        return Verdict("cold" if use.fallback else "refused", conflicts)
    again = [*news, *outdated(daemon, loaded, driver)]
    if again:
        return Verdict("cold", again)
    return Verdict("zero-copy" if use.mode == "zero_copy" else "copy", [])


def sleeps_with_the_daemons_weights(engine: EngineConfig) -> bool:
    """Zero copy and sleep mode in one engine, and nobody said that this is wanted."""
    use = engine.preload
    return use is not None and use.mode == "zero_copy" and engine.sleep_mode and not use.allow_zero_copy_sleep


def _unsafe(engine: EngineConfig, modes: t.Mapping[str, str]) -> list[str]:
    """What no fall-back makes good."""
    found = []
    if sleeps_with_the_daemons_weights(engine):
        found.append(
            "sleep mode and zero copy together: its weights are the daemon's, so that a sleep frees its KV cache only; "
            "set preload.allow_zero_copy_sleep: true if that is wanted"
        )
    if len(set(modes.values())) > 1:
        # The end of an engine in copy mode was seen to free memory that one in zero copy still maps.
        found.append(
            "its daemon has engines of both modes: " + ", ".join(f"{name} {modes[name]}" for name in sorted(modes))
        )
    return found


def _differences(engine: EngineConfig, daemon: PreloadConfig, model: Model | None, lent: Model | None) -> list[str]:
    """Options by which vLLM tells weights apart, and LoRA, which decides their layout."""
    ours, theirs = _comparable(engine.traits, model), _comparable(daemon.traits, lent)
    pairs = [(name, ours[name], theirs[name]) for name in ours]
    pairs += [
        ("user", engine.user, daemon.user),
        ("runtime version", engine.runtime_version, daemon.runtime_version),
        ("GPUs, in this order,", ", ".join(engine.gpus) or "all", ", ".join(daemon.gpus) or "all"),
    ]
    return [
        f"{name} differs: {mine!r} for the engine, {other!r} for the daemon"
        for name, mine, other in pairs
        if mine != other
    ]


def _comparable(traits: Traits, model: Model | None) -> dict[str, t.Any]:
    dtype = _DTYPES.get(traits.dtype, traits.dtype)
    if dtype == "auto" and model is not None and model.dtype in ("bfloat16", "float16"):
        dtype = model.dtype
    return {
        "architecture": model.architecture if model else "",
        "dtype": dtype,
        "quantization": traits.quantization or (model.quantization if model else ""),
        "revision": traits.revision,
        "kv_cache_dtype": traits.kv_cache_dtype,
        "lora": traits.lora,
        "tensor_parallel": traits.tensor_parallel,
        "pipeline_parallel": traits.pipeline_parallel,
        "data_parallel": traits.data_parallel,
        "expert_parallel": traits.expert_parallel,
    }


def _unpreloadable(daemon: PreloadConfig, model: Model | None) -> list[str]:
    found = []
    checkpoint = model.quantization if model else ""
    method = daemon.traits.quantization or checkpoint
    if method and not method.startswith(_PRELOADABLE):
        found.append(f"vllm preload does not take the quantisation {method}")
    elif daemon.traits.quantization and not checkpoint and model is not None:
        found.append(f"vllm preload does not quantise while it loads ({daemon.traits.quantization})")
    if daemon.traits.pipeline_parallel > 1 and minor(daemon.runtime_version) < 32:
        found.append(f"vllm preload {daemon.runtime_version} has no pipeline parallelism")
    return found


def refusals(daemon: PreloadConfig, model: Model | None, gpus: t.Collection[str] | None) -> list[str]:
    """Why a daemon cannot start at all, whichever engine wants it."""
    return [*_unpreloadable(daemon, model), *_missing(daemon, gpus)]


def _missing(daemon: PreloadConfig, gpus: t.Collection[str] | None) -> list[str]:
    if gpus is None:
        return []
    return [f"the driver shows no GPU {uuid}" for uuid in daemon.gpus if uuid not in gpus]


def outdated(daemon: PreloadConfig, loaded: Loaded | None, driver: str | None) -> list[str]:
    """Why a daemon that runs has to be started once more before an engine can take its weights."""
    if loaded is None:
        return []
    found = []
    if loaded.runtime_version != daemon.runtime_version:
        found.append(
            f"the daemon has loaded with vLLM {loaded.runtime_version}, its next start is with "
            f"{daemon.runtime_version}: the weights come from disk"
        )
    elif loaded.config_digest != daemon.config_digest:
        found.append("the daemon's settings have changed since it started")
    if driver is not None and loaded.driver_version not in ("", driver):
        found.append(f"the driver was {loaded.driver_version} when the daemon loaded, it is {driver} now")
    return found


def minor(version: str) -> int:
    """The 33 of 0.33.0; a large number where the version has another form."""
    parts = version.split(".")
    return int(parts[1]) if len(parts) > 1 and parts[0] == "0" and parts[1].isdigit() else 1000


def share_mib(size: int, traits: Traits, model: Model | None) -> int:
    """MiB that one rank holds at least, on average, when ``size`` bytes of weight files are loaded.

    Experts are spread over data parallel ranks as well. A checkpoint in float32 that is not asked for as such takes
    half of its size; what is quantised while it loads takes an unknown part of it.
    """
    if traits.quantization and not (model and model.quantization):
        return 0
    parts = traits.tensor_parallel * traits.pipeline_parallel
    parts *= traits.data_parallel if traits.expert_parallel else 1
    narrow = model is not None and model.dtype == "float32" and traits.dtype not in ("float32", "float")
    return size // (2 if narrow else 1) // max(1, parts) // MIB
