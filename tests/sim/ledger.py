"""The one ledger of simulated GPU memory: a text file that engines, daemons, tests and the NVML stand-in share.

One line is one fact; nvml/nvml.c reads the same lines:

    driver VERSION
    gpu    UUID TOTAL_MIB RESERVED_MIB NAME          in index order
    alloc  UUID PID START MIB TAG                    memory of a process; START 0: do not ask whether it lives
    map    UUID PID START MIB OWNER_PID OWNER_START  memory of OWNER that PID maps; charged to PID once OWNER is gone
    hold   UUID UNTIL MIB LABEL                      memory without a process, until a wall-clock time (0: for ever)
    fault  NAME [ARG]                                what NVML itself does wrong

A process is (pid, start time), so a pid used again inherits nothing, and a zombie holds nothing.
Writers take a lock and replace the file; readers need no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import typing as t
from pathlib import Path

H200_MIB = 143771
RESERVED_MIB = 615
OVERHEAD_MIB = 43  # the driver's own, on a GPU that any process uses


class OutOfMemory(Exception):
    """What CUDA says when a GPU has not enough left."""


class Gpu(t.NamedTuple):
    uuid: str
    total: int
    reserved: int
    name: str


def start_time(pid: int) -> int:
    """Start time in clock ticks; 0 for a process that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def lives(pid: str, start: str) -> bool:
    return start == "0" or start_time(int(pid)) == int(start)


class Ledger:
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | os.PathLike[str], gpus: int = 1, total: int = H200_MIB) -> Ledger:
        ledger = cls(path)
        lines = [["driver", "580.105.08"]]
        for index in range(gpus):
            uuid = f"GPU-51e51e00-0000-4000-8000-{index:012x}"
            lines.append(["gpu", uuid, str(total), str(RESERVED_MIB), "NVIDIA H200"])
        ledger._write(lines)
        return ledger

    # reading

    def lines(self) -> list[list[str]]:
        return [line.split(None, 5) for line in self.path.read_text().splitlines() if line.strip()]

    def gpus(self) -> list[Gpu]:
        return [
            Gpu(line[1], int(line[2]), int(line[3]), " ".join(line[4:])) for line in self.lines() if line[0] == "gpu"
        ]

    def gpu(self, uuid: str) -> Gpu:
        for gpu in self.gpus():
            if gpu.uuid == uuid:
                return gpu
        raise KeyError(f"no GPU {uuid} in {self.path}")

    def processes(self, uuid: str) -> dict[int, int]:
        """MiB by process, as NVML lists them."""
        return _charged(self.lines(), uuid)

    def used(self, uuid: str) -> int:
        return _used(self.lines(), uuid)

    def free(self, uuid: str) -> int:
        gpu = self.gpu(uuid)
        return gpu.total - gpu.reserved - self.used(uuid)

    # writing

    def resize(self, uuid: str, pid: int, mib: int, tag: str = "engine") -> None:
        """Set what `pid` holds under `tag`; growth that does not fit raises OutOfMemory and changes nothing."""
        with self._changing() as lines:
            gpu = self.gpu(uuid)
            mine = [line for line in lines if line[0] == "alloc" and line[1:3] == [uuid, str(pid)] and line[5] == tag]
            held = sum(int(line[4]) for line in mine)
            free = gpu.total - gpu.reserved - _used(lines, uuid)
            if mib - held > free:
                raise OutOfMemory(f"CUDA out of memory: {uuid} has {free} MiB left, {mib - held} MiB more were wanted")
            lines[:] = [line for line in lines if line not in mine]
            if mib > 0:
                lines.append(["alloc", uuid, str(pid), str(start_time(pid)), str(mib), tag])

    def map(self, uuid: str, pid: int, mib: int, owner: int) -> None:
        entry = ["map", uuid, str(pid), str(start_time(pid)), str(mib), f"{owner} {start_time(owner)}"]
        with self._changing() as lines:
            lines.append(entry)

    def hold(self, uuid: str, mib: int, seconds: float = 0, label: str = "lingering") -> None:
        """Memory that no process answers for, like that of a process which the driver has not cleaned up yet."""
        until = time.time() + seconds if seconds else 0
        with self._changing() as lines:
            lines.append(["hold", uuid, f"{until:.3f}", str(mib), label])

    def foreign(self, uuid: str, mib: int, pid: int = 1) -> None:
        """Another program's memory; it stays until `release`."""
        with self._changing() as lines:
            lines.append(["alloc", uuid, str(pid), "0", str(mib), "foreign"])

    def release(self, tag: str = "foreign") -> None:
        """Forget the holds and allocations of this tag."""
        with self._changing() as lines:
            lines[:] = [line for line in lines if not (line[0] in ("hold", "alloc") and line[-1] == tag)]

    def fault(self, name: str, arg: str | int | None = "1") -> None:
        """Switch a fault of NVML on; `arg=None` switches it off."""
        with self._changing() as lines:
            lines[:] = [line for line in lines if line[:2] != ["fault", name]]
            if arg is not None:
                lines.append(["fault", name, str(arg)])

    @contextlib.contextmanager
    def _changing(self) -> t.Iterator[list[list[str]]]:
        with open(f"{self.path}.lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lines = [line for line in self.lines() if not _gone(line)]
            yield lines
            self._write(lines)

    def _write(self, lines: list[list[str]]) -> None:
        part = Path(f"{self.path}.new")
        part.write_text("".join(" ".join(line) + "\n" for line in lines))
        part.replace(self.path)


def _gone(line: list[str]) -> bool:
    if line[0] in ("alloc", "map"):
        return not lives(line[2], line[3])
    return line[0] == "hold" and 0 < float(line[2]) < time.time()


def _charged(lines: list[list[str]], uuid: str) -> dict[int, int]:
    by_pid: dict[int, int] = {}
    for line in lines:
        if line[0] not in ("alloc", "map") or line[1] != uuid or _gone(line):
            continue
        if line[0] == "map" and lives(*line[5].split()):
            continue  # its owner is charged
        by_pid[int(line[2])] = by_pid.get(int(line[2]), 0) + int(line[4])
    return by_pid


def _used(lines: list[list[str]], uuid: str) -> int:
    charged = _charged(lines, uuid)
    held = sum(int(line[3]) for line in lines if line[0] == "hold" and line[1] == uuid and not _gone(line))
    return sum(charged.values()) + held + (OVERHEAD_MIB if charged else 0)
