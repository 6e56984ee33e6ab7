"""What hosts find under /srv, read-only: wheels and models, made once and kept under the hash of what they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from labkit import files, system

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
    for name, seed in MODELS.items():
        with files.made_whole(model(name)) as directory:
            if directory is not None:
                progress(f"model {name}")
                system.guarded([sys.executable, str(MAKER), str(directory), str(seed)], f"model {name} was not made")
    for name in HOUSES:
        with files.made_whole(house(name)) as directory:
            if directory is not None:
                progress(f"wheels: {name} (once)")
                download(name, directory)
    progress("wheels and models are there")


def download(name: str, directory: Path) -> None:
    """Fetches a list that is complete and pinned, by whatever index this machine's pip is configured for."""
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.11", "--implementation=cp"]
    options += ["--abi=cp311", "--abi=abi3", "--abi=none", *(f"--platform={tag}" for tag in TAGS)]
    wanted = files.HERE / "wheels" / f"{name}.txt"
    system.guarded(
        [sys.executable, "-m", "pip", "download", *options, f"--dest={directory}", f"--requirement={wanted}"],
        f"pip could not fetch {wanted}; for torch its configuration needs an index of CPU builds",
    )
