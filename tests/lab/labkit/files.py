"""Files and directories: written whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.plan import LabError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HERE = Path(__file__).resolve().parent.parent


def cache() -> Path:
    """The directory of everything that is worth keeping between labs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(os.environ.get("VLLM_LAB_CACHE") or Path(home) / "baremetal-vllm-lab").absolute()
    if set(str(path)) & set(":,\\ "):
        raise LabError(f"cache {path}: overlayfs takes no colon, comma, backslash or space; set VLLM_LAB_CACHE")
    if path.is_relative_to("/run"):
        raise LabError(f"cache {path}: hosts get a /run of their own; set VLLM_LAB_CACHE to a directory elsewhere")
    return path


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Writes a file so that a reader, or a crash, sees the old text or the new."""
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def listed(path: Path) -> list[str]:
    """The lines of a list file, less comments."""
    lines = (line.split("#", 1)[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


def digest(parts: Iterable[str | bytes]) -> str:
    """A short name for content: changes when any part does, also when text moves from one part to the next."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(f"{len(data)}:".encode() + data)
    return total.hexdigest()[:16]


@contextlib.contextmanager
def locked(directory: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds a directory's lock; yields whether it was had. It ends with the process, however that ends."""
    descriptor = _lock(directory, wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(directory: Path, wait: bool) -> int | None:
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(descriptor), directory.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass  # whoever held the lock removed the directory: take the lock on its successor
        os.close(descriptor)


@contextlib.contextmanager
def made_whole(target: Path) -> Iterator[Path | None]:
    """Gives a directory to fill, which becomes `target` when the block ends well; None when `target` is there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        yield None
        return
    with locked(target.parent):
        if target.exists():  # made by the one we waited for
            yield None
            return
        sweep(target.parent)
        temporary = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
        try:
            yield temporary
            temporary.chmod(0o755)
            temporary.rename(target)
        finally:
            if temporary.exists():
                shutil.rmtree(temporary, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Removes what a killed maker left; the caller holds the lock, so no maker is at work."""
    for left in parent.glob(".making-*"):
        shutil.rmtree(left)


def sweep_idle(root: Path) -> None:
    for parent in sorted({left.parent for left in root.glob("*/.making-*")}):
        with locked(parent, wait=False) as held:
            if held:
                sweep(parent)
