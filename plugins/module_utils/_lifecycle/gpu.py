# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Speaks NVML (nvidia-ml-py): memory of each device and of each process on it."""

from __future__ import annotations

import threading
import typing as t
from contextlib import contextmanager
from dataclasses import dataclass, field

from .errors import LifecycleError

try:
    import pynvml
except ImportError:
    pynvml = None

MIB = 1024 * 1024
SAMPLE_INTERVAL = 0.2


class GpuUnseen(Exception):
    """NVML cannot be asked here; the message says why. Not a failure: a host may have no GPU."""


@dataclass(frozen=True)
class GpuState:
    """One device, in MiB. ``processes`` maps a pid to the memory it holds, None where NVML does not say."""

    uuid: str
    index: int
    name: str
    total_mib: int
    used_mib: int
    free_mib: int
    processes: dict[int, int | None] = field(default_factory=dict)


# NVML, in this process.
_opened = threading.Event()


@contextmanager
def _nvml() -> t.Iterator[None]:
    """NVML, opened for as long as this process lives, since that takes longer than to ask; after an error anew.

    :raises GpuUnseen: no library, no driver, or NVML says no.
    """
    if pynvml is None:
        raise GpuUnseen("the Python library nvidia-ml-py is not installed")
    try:
        if not _opened.is_set():
            pynvml.nvmlInit()
            _opened.set()
        yield
    except pynvml.NVMLError as exc:
        _opened.clear()
        raise GpuUnseen(f"NVML: {exc}") from exc


def observe() -> list[GpuState]:
    """Every device of this host.

    :raises GpuUnseen: no library, no driver, or NVML says no.
    """
    with _nvml():
        return [_device(index) for index in range(pynvml.nvmlDeviceGetCount())]


@contextmanager
def sampled(pids: t.Callable[[], t.Iterable[int]], wanted: t.Collection[str]) -> t.Iterator[dict[str, int]]:
    """The most MiB that these processes hold on each GPU while the block runs, by UUID; there when it has ended.

    A GPU is left out where a sample gave no number, or none of them was seen on it; so are all where NVML says no.

    :param pids: of the processes, asked at each sample.
    :param wanted: the GPUs that count, () for all.
    """
    peaks: dict[str, int] = {}
    unknown: set[str] = set()
    ended = threading.Event()
    whole = threading.Event()

    def sample() -> None:
        try:
            with _nvml():
                last = False
                while not last:
                    last = ended.is_set()  # with one more look after the end
                    own = set(pids())
                    for device in (_device(index) for index in range(pynvml.nvmlDeviceGetCount())):
                        held = [mib for pid, mib in device.processes.items() if pid in own]
                        if held and (not wanted or device.uuid in wanted):
                            unknown.update([device.uuid] if None in held else [])
                            peaks[device.uuid] = max(peaks.get(device.uuid, 0), sum(mib or 0 for mib in held))
                    ended.wait(SAMPLE_INTERVAL)
            whole.set()
        except (GpuUnseen, LifecycleError):
            pass  # what was seen until then may not have been the most

    found: dict[str, int] = {}
    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield found
    finally:
        ended.set()
        sampler.join()
        if whole.is_set():
            found.update({uuid: mib for uuid, mib in peaks.items() if uuid not in unknown})


def uuids(names: list[str]) -> list[str]:
    """GPUs that were declared by index or UUID, by UUID, as locks and measurements know them.

    An index that no device has, or where none can be seen, stays as it is: then nothing on it can be measured either.
    """
    if not any(name.isdigit() for name in names):
        return names
    try:
        known = {str(device.index): device.uuid for device in observe()}
    except GpuUnseen:
        known = {}
    return [known.get(name, name) for name in names]


def driver_version() -> str:
    """The driver's version.

    :raises GpuUnseen: no library, no driver, or NVML says no.
    """
    with _nvml():
        return _text(pynvml.nvmlSystemGetDriverVersion())


def _device(index: int) -> GpuState:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    processes = {
        process.pid: None if process.usedGpuMemory is None else process.usedGpuMemory // MIB
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    }
    return GpuState(
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        total_mib=memory.total // MIB,
        used_mib=memory.used // MIB,
        free_mib=memory.free // MIB,
        processes=processes,
    )


def _text(value: t.Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
