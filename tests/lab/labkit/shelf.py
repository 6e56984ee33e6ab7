"""What hosts find under /srv, read-only: wheels and models, made once and kept under the hash of what they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import files
from labkit.plan import LabError

if TYPE_CHECKING:
    from labkit.system import Progress

HOUSES = ("control", "runtime")
MODELS = {"tiny": 0, "tiny-b": 1}
MAKER = files.HERE / "make_model.py"
# What a host with Debian 12 takes: Python 3.11 on glibc 2.36.
TAGS = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)]
TAGS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def house(name: str) -> Path:
    lines = files.listed(files.HERE / "wheels" / f"{name}.txt")
    return files.cache() / "wheelhouses" / f"{name}-{files.digest(lines)}"


def model(name: str) -> Path:
    return files.cache() / "models" / f"{name}-{files.digest([MAKER.read_bytes(), str(MODELS[name])])}"


def _all() -> list[tuple[Path, str]]:
    shelf = [(house(name), f"/srv/wheelhouse/{name}") for name in HOUSES]
    return shelf + [(model(name), f"/srv/models/{name}") for name in MODELS]


def ready() -> list[tuple[Path, str]]:
    """What is there to be bound in a host, and where."""
    return [(source, target) for source, target in _all() if source.is_dir()]


def missing() -> list[str]:
    return [target for source, target in _all() if not source.is_dir()]


def make(progress: Progress) -> None:
    for name in MODELS:
        with files.made_whole(model(name)) as directory:
            if directory is not None:
                progress(f"model {name}")
                _run([sys.executable, str(MAKER), str(directory), str(MODELS[name])], f"model {name} was not made")
    for name in HOUSES:
        with files.made_whole(house(name)) as directory:
            if directory is not None:
                progress(f"wheels: {name} (once)")
                download(name, directory)
    progress("wheels and models are there")


def download(name: str, directory: Path) -> None:
    """Fetches a list that is complete and pinned, by whatever index this machine's pip is configured for."""
    target = ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "abi3", "--abi", "none"]
    for tag in TAGS:
        target += ["--platform", tag]
    _run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *target]
        + ["--dest", str(directory), "--requirement", str(files.HERE / "wheels" / f"{name}.txt")],
        f"pip could not fetch tests/lab/wheels/{name}.txt; torch needs an index with its CPU builds in pip's configuration",
    )


def _run(command: list[str], failure: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-20:]), file=sys.stderr)
        raise LabError(f"{failure} (exit {done.returncode})")
