# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Speaks to the kernel: host memory, the limits of a unit's control group, which boot this is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import store
from .errors import Surprise

MIB = 1024 * 1024
# cgroup v2 and v1: where a group's memory limit stands. "max", or a number near 2**63, is no limit.
_LIMITS = ("sys/fs/cgroup{group}/memory.max", "sys/fs/cgroup/memory{group}/memory.limit_in_bytes")


@dataclass(frozen=True)
class MemoryState:
    """In MiB. ``limit_mib`` is the unit's own limit, None for none; ``rss_mib`` what its processes hold resident."""

    available_mib: int
    total_mib: int
    limit_mib: int | None
    rss_mib: int


def host_memory(control_group: str, pids: list[int]) -> MemoryState:
    """
    :raises Surprise: /proc/meminfo is not as Linux writes it.
    """
    try:
        lines = (store.root() / "proc/meminfo").read_text(encoding="ascii")
        values = {line.split(":")[0]: int(line.split()[1]) for line in lines.splitlines() if ":" in line}
        return MemoryState(
            available_mib=values["MemAvailable"] // 1024,
            total_mib=values["MemTotal"] // 1024,
            limit_mib=_limit(control_group),
            rss_mib=sum(_rss(pid) for pid in pids),
        )
    except (OSError, KeyError, ValueError, IndexError) as exc:
        raise Surprise(f"/proc/meminfo cannot be read: {exc!r}", entry="host-memory-short") from exc


def boot_id() -> str:
    """Another one after each boot; empty where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _limit(control_group: str) -> int | None:
    for pattern in _LIMITS if control_group else ():
        try:
            text = (store.root() / pattern.format(group=control_group)).read_text().strip()
        except OSError:
            continue
        return None if text == "max" or int(text) > 2**60 else int(text) // MIB
    return None


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * 4096 // MIB
    except (OSError, IndexError):  # it has ended
        return 0
