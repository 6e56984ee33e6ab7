"""The machine: commands, the cgroup tree, network interfaces."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.plan import LabError

if TYPE_CHECKING:
    from collections.abc import Callable

CGROUPS = Path("/sys/fs/cgroup")
CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
# Ends a command with the process that started it, however that ends.
TIED = ["setpriv", "--pdeathsig", "KILL"]
LIBC = ctypes.CDLL(None, use_errno=True)


class Progress:
    def __init__(self) -> None:
        self.start = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:5.1f}s] {text}", file=sys.stderr, flush=True)


def call(command: list[str]) -> str:
    """Runs a command that must succeed; returns its output."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: exit {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def guarded(command: list[str], failure: str) -> None:
    """Runs a long command with namespaces of its own: nothing of it, and no mount, outlives this process."""
    own = [*TIED, "unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run(
        own + command,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"},
    )
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-30:]), file=sys.stderr)
        raise LabError(f"{failure} (exit {done.returncode})")


def _check(result: int, what: str) -> None:
    if result:
        error = ctypes.get_errno()
        raise LabError(f"{what}: {os.strerror(error)}; the lab needs a real root, with CAP_SYS_ADMIN")


def enter_own_mounts() -> None:
    """Gives this process mounts of its own, with the cgroup v2 tree at its usual place.

    The machine may have that tree elsewhere or nowhere; what is mounted here ends with this process.
    """
    _check(LIBC.unshare(CLONE_NEWNS), "no mount namespace of its own")
    _check(LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mounts not made private")
    _check(LIBC.mount(b"none", bytes(CGROUPS), b"cgroup2", 0, None), "cgroup v2 not mounted")


def make_cgroup(path: Path) -> None:
    """Makes a cgroup and passes on to it what controllers this machine has in its v2 tree."""
    for parent in reversed([parent for parent in path.parents if parent.is_relative_to(CGROUPS)]):
        parent.mkdir(exist_ok=True)
        for controller in (parent / "cgroup.controllers").read_text().split():
            with contextlib.suppress(OSError):  # busy in a tree that is not ours alone
                (parent / "cgroup.subtree_control").write_text(f"+{controller}")
    path.mkdir(exist_ok=True)


def cgroup_pids(path: Path) -> list[int]:
    pids = []
    for directory, _unused, _unused in os.walk(path):
        with contextlib.suppress(OSError):
            pids += map(int, (Path(directory) / "cgroup.procs").read_text().split())
    return pids


def kill_cgroup(path: Path) -> None:
    """Ends every process in a cgroup at once and removes it. Only processes put there can be hit."""
    if not path.is_dir():
        return
    with contextlib.suppress(FileNotFoundError):
        (path / "cgroup.kill").write_text("1")
    until(lambda: "populated 0" in (path / "cgroup.events").read_text(), 20, f"processes in {path} do not end")
    for directory, _unused, _unused in os.walk(path, topdown=False):
        os.rmdir(directory)


def until(met: Callable[[], object], seconds: float, failure: str, every: float = 0.02) -> None:
    end = time.monotonic() + seconds
    while not met():
        if time.monotonic() > end:
            raise LabError(f"{failure} within {seconds:.0f} s")
        time.sleep(every)


def links() -> list[dict]:
    return json.loads(call(["ip", "-json", "-details", "address", "show"]))


def link(name: str) -> dict | None:
    return next((found for found in links() if found["ifname"] == name), None)
