# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""An engine's compiled kernels: whose they are, and what happens when they keep it from starting.

vLLM takes what an earlier start has compiled. What another runtime, GPU or driver has compiled is of no use; and what a
kill cut off in the middle fails every later start, by an error that seldom names it. So the cache has a stamp, is
purged where that does not fit, and purged once when a start fails in the ways that are known of a broken cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import time
import typing as t
from pathlib import Path

from . import gpu, lease, store
from .config import EngineConfig
from .errors import LifecycleError, Refused

Report = t.Callable[[str], None]

# What vLLM, Inductor and Triton print when an artifact of an earlier start is broken.
_SAYS_SO = re.compile(
    r"corrupted compilation artifact|failed to get the hash of the compiled graph|Expected tensors only, but got:"
)
# A broken file, which names the cache only if the traceback came out of it.
_BROKEN_FILE = re.compile(
    r"\b(EOFError|UnpicklingError|JSONDecodeError|BadZipFile|pickle data was truncated|Ran out of input)\b"
)
_FROM_CACHE = re.compile(
    r"torch_compile_cache|torch_aot_compile|vllm/compilation/|torch/_inductor/|triton/runtime/cache"
)


def poisoned(lines: t.Sequence[str]) -> str:
    """The line of a failed start's journal that blames its compile cache, "" when none does. Pure."""
    from_cache = any(_FROM_CACHE.search(line) for line in lines)
    for line in reversed(lines):
        if _SAYS_SO.search(line) or (from_cache and _BROKEN_FILE.search(line)):
            return line.strip()
    return ""


def _read(config: EngineConfig) -> dict[str, t.Any]:
    return store.read_json(config.state_dir / "compile_cache.json") or {}


def _stamp(config: EngineConfig, old: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """What the kernels depend on. GPUs that cannot be seen now are taken as they were."""
    packages = sorted(path.name for path in Path(config.runtime).glob("lib/python*/site-packages/*.dist-info"))
    stamp = {
        "cache": config.compile_cache,
        "runtime_version": config.runtime_version,
        "packages": hashlib.sha256("\n".join(packages).encode()).hexdigest(),
    }
    try:
        wanted = [one for one in gpu.observe() if not config.gpus or one.uuid in config.gpus]
        return {**stamp, "gpus": sorted(one.name for one in wanted), "driver": gpu.driver_version()}
    except gpu.GpuUnseen:
        return {**stamp, "gpus": old.get("gpus", []), "driver": old.get("driver", "")}


def prepare(config: EngineConfig, report: Report) -> None:
    """Before a start: purge a cache whose stamp does not fit.

    :raises Refused: systemd starts again an engine that failed in the same way after its cache had been purged.
    """
    if not config.compile_cache:
        return
    record = _read(config)
    old = record.get("stamp") or {}
    stamp = _stamp(config, old)
    if stamp != old:
        if _purge(config):
            differs = ", ".join(name for name, value in stamp.items() if old.get(name) != value)
            report(f"{config.engine}: purged {config.compile_cache}, compiled under another {differs}")
        lease.record(config.engine, "compile_cache.json", {"stamp": stamp})
    elif record.get("repeated"):
        # Told once: a start that somebody asks for is tried again.
        lease.record(config.engine, "compile_cache.json", {"stamp": stamp})
        raise Refused(
            f"engine '{config.engine}' on {socket.gethostname()} failed again after {config.compile_cache} had been "
            f"purged, so the cache is not the cause: {record['repeated']}",
            entry="compile-cache",
            next_step=f"read journalctl -u {config.unit}, correct the cause, then start it again",
        )


def filled(config: EngineConfig) -> bool | None:
    """Whether an earlier start has left anything in it; None for an engine without one."""
    if not config.compile_cache:
        return None
    path = store.root() / config.compile_cache.lstrip("/")
    return any(files for _folder, _folders, files in os.walk(path))


def after_failure(config: EngineConfig, journal: t.Sequence[str], report: Report) -> None:
    """After a start that never got ready: purge the cache if its journal blames it, once until a start succeeds."""
    sign = poisoned(journal) if config.compile_cache else ""
    if not sign:
        return
    record = _read(config)
    if record.get("purged"):
        report(f"{config.engine}: it failed again with a purged compile cache, and is not started once more: {sign}")
        lease.record(config.engine, "compile_cache.json", {**record, "repeated": sign})
        return
    _purge(config)
    report(f"{config.engine}: purged {config.compile_cache}, which kept it from starting: {sign}")
    lease.record(config.engine, "compile_cache.json", {**record, "purged": {"sign": sign, "since": time.time()}})


def purged_since(config: EngineConfig, moment: float) -> str:
    """Why the cache was purged after a failed start since then (seconds since the epoch), "" if it was not."""
    purged = _read(config).get("purged") or {}
    return str(purged.get("sign")) if purged.get("since", 0) >= moment else ""


def proved(config: EngineConfig) -> None:
    """After a start that succeeded: the next failure may be the cache's again."""
    record = _read(config)
    if record.get("purged") or record.get("repeated"):
        lease.record(config.engine, "compile_cache.json", {"stamp": record.get("stamp")})


def _purge(config: EngineConfig) -> bool:
    """Remove the cache's directory; whether there was one. No symbolic link of the service user is followed."""
    path = store.root() / config.compile_cache.lstrip("/")
    if not path.exists() and not path.is_symlink():
        return False
    try:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as exc:
        raise LifecycleError(
            f"engine '{config.engine}' on {socket.gethostname()}: {path} cannot be removed: {exc}",
            entry="compile-cache",
            next_step=f"remove {path} by hand, then start the engine again",
        ) from exc
    return True
