# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The configurations that an engine has been proved with, so that a change that fails can be taken back.

A start puts what it reads aside as ``candidate``. When it is proved, that becomes ``proved``, and what was proved
before it stays as ``before``. Each is a directory with copies of the files that the roles wrote for the engine and the
version of its runtime, which is never changed in place.
"""

from __future__ import annotations

import os
import shutil
import socket
import typing as t
from pathlib import Path

from . import config, lease, store
from .config import EngineConfig
from .errors import LifecycleError, Refused, UsageError

CANDIDATE, PROVED, BEFORE = "candidate", "proved", "before"
# What vLLM itself reads at its start.
_READ = ("engine.yaml", "engine.env")


def _directory(engine: str, name: str) -> Path:
    return store.state_dir(engine) / "generations" / name


def _files(engine: EngineConfig) -> dict[str, Path]:
    return {
        "engine.yaml": Path(engine.config_file),
        "engine.env": Path(engine.env_file),
        "lifecycle.json": store.config_dir() / f"{engine.engine}.json",
    }


def _meta(engine: str, name: str) -> dict[str, t.Any] | None:
    return store.read_json(_directory(engine, name) / "meta.json")


def put_aside(engine: EngineConfig, report: t.Callable[[str], None]) -> None:
    """Copy what the start that begins now reads, whatever the files say when it is proved."""
    directory = _directory(engine.engine, CANDIDATE)
    shutil.rmtree(directory, ignore_errors=True)
    try:
        runtime = os.readlink(engine.runtime)
        for name, path in _files(engine).items():
            store.write_text(directory / name, path.read_text(encoding="utf-8"))
        # Last: a candidate without it is not whole.
        meta = {"schema": 1, "config_digest": engine.config_digest, "runtime_version": engine.runtime_version}
        store.write_json(directory / "meta.json", {**meta, "runtime": runtime})
    except (OSError, UnicodeDecodeError, LifecycleError) as exc:
        # No reason not to start: what is wrong with a file, vLLM or the probe says.
        report(f"{engine.engine}: its configuration is not put aside, so nothing can go back to it: {exc}")


def read_at_start(engine: EngineConfig) -> Path:
    """The environment file with what the process that runs has read, which may be a copy: the file itself may be newer.

    A key that the roles wrote since then is one that this process does not know.
    """
    read = (lease.last_preflight(engine.engine) or {}).get("config_digest")
    if read and read != engine.config_digest:
        for name in (CANDIDATE, PROVED, BEFORE):
            meta = _meta(engine.engine, name)
            if meta is not None and meta["config_digest"] == read:
                return _directory(engine.engine, name) / "engine.env"
    return Path(engine.env_file)


def unkept(engine: EngineConfig) -> bool:
    """Whether the last start was not proved, or not yet."""
    return _meta(engine.engine, CANDIDATE) is not None


def promote(engine: EngineConfig, speed: t.Mapping[str, t.Any] | None = None) -> None:
    """The start whose candidate was put aside is proved.

    :param speed: how fast it was found to be; see ``doors.ready``.
    """
    candidate = _meta(engine.engine, CANDIDATE)
    if candidate is None:
        return
    store.write_json(_directory(engine.engine, CANDIDATE) / "meta.json", {**candidate, "speed": speed})
    proved = _meta(engine.engine, PROVED)
    if proved is not None and proved["config_digest"] != candidate["config_digest"]:
        _replace(_directory(engine.engine, PROVED), _directory(engine.engine, BEFORE))
    _replace(_directory(engine.engine, CANDIDATE), _directory(engine.engine, PROVED))


def _replace(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    try:
        if source.exists():
            source.rename(target)
    except OSError as exc:
        raise store.unwritable(target, exc) from exc


def target(engine: EngineConfig) -> dict[str, t.Any] | None:
    """What going back leads to: the last proved configuration that is another than the one on disk; None for none.

    :returns: ``name`` of the generation, its ``config_digest`` and ``runtime_version``.
    """
    for name in (PROVED, BEFORE):
        meta = _meta(engine.engine, name)
        if meta is not None and (meta["config_digest"] != engine.config_digest or not _is_there(engine, name, meta)):
            return {"name": name, **meta}
    return None


def _is_there(engine: EngineConfig, name: str, meta: t.Mapping[str, t.Any]) -> bool:
    """Whether a process would read what this generation has. The roles write the declaration, with its digest, last: a
    run that ended before has left other options under it.
    """
    try:
        files = _files(engine)
        same = [files[one].read_bytes() == (_directory(engine.engine, name) / one).read_bytes() for one in _READ]
        return all(same) and os.readlink(engine.runtime) == meta["runtime"]
    except OSError:
        return False


def speeds(engine: EngineConfig) -> tuple[float, float] | None:
    """Tokens a second with the configuration proved last and with the one before it, where both were found alike."""
    found = [(_meta(engine.engine, name) or {}).get("speed") or {} for name in (PROVED, BEFORE)]
    if not found[0].get("shapes") or found[0]["shapes"] != found[1].get("shapes"):
        return None
    return float(found[0]["tokens_per_s"]), float(found[1]["tokens_per_s"])


def went_back(engine: EngineConfig) -> dict[str, t.Any] | None:
    """The ``run`` that went back last and the ``config_digest`` that it went back to."""
    return store.read_json(_directory(engine.engine, "went_back.json"))


def go_back(engine: EngineConfig, run: str) -> EngineConfig:
    """Put the files and the runtime of that generation in place again; the declaration as it is then.

    Starts once more from anywhere in the middle: the engine's declaration, whose digest decides, is written last.

    :raises Refused: there is none, it cannot be read, or its runtime is not on this host any more.
    :raises Unwritable: a file cannot be put in place; what was put so far is done again by the next one.
    """
    there = target(engine)
    here = f"engine '{engine.engine}' on {socket.gethostname()}"
    if there is None:
        raise Refused(
            f"{here} has no other configuration that was ever proved, so there is nothing to go back to",
            entry="nothing-to-go-back-to",
            next_step="correct the inventory and run baremetal.vllm.site",
        )
    runtime = Path(engine.runtime)
    wanted = runtime.parent / there["runtime"]
    if not wanted.is_dir():
        raise Refused(
            f"{here} was proved before with runtime {there['runtime_version']}, which is not on this host any more",
            entry="runtime-missing",
            next_step=f"run the role baremetal.vllm.vllm_runtime for version {there['runtime_version']}",
        )
    directory = _directory(engine.engine, there["name"])
    try:
        copies = {name: (directory / name).read_text(encoding="utf-8") for name in _files(engine)}
    except (OSError, UnicodeDecodeError) as exc:
        raise Refused(
            f"{here}: the configuration that it was proved with before cannot be read: {exc}",
            entry="nothing-to-go-back-to",
            next_step="correct the inventory and run baremetal.vllm.site",
        ) from exc
    mark = {"schema": 1, "run": run, "config_digest": there["config_digest"]}
    store.write_json(_directory(engine.engine, "went_back.json"), mark)
    fresh = runtime.with_name(f".{runtime.name}.new")
    try:
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(there["runtime"])
        fresh.replace(runtime)
    except OSError as exc:
        raise store.unwritable(runtime, exc) from exc
    for name, path in _files(engine).items():
        store.write_text(path, copies[name])
    try:
        return config.load(engine.engine)
    except UsageError as exc:
        raise Refused(
            f"{here}: {exc}",
            entry="declaration-broken",
            next_step="run baremetal.vllm.site, which writes its declaration",
        ) from exc
