# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Whose a socket, a lock or a process is. Looks only: nothing is kept, sent or removed."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
from pathlib import Path

CONNECT_TIMEOUT = 2.0
_UNIT = re.compile(r"/([^/]+\.(?:service|scope))(?:/|$)")


def listener(path: str | os.PathLike[str]) -> int | None:
    """The process that listens on a Unix socket; None when nobody does, or there is no such file.

    :raises OSError: it cannot be told: no permission, no answer, or no socket.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_TIMEOUT)
        try:
            connection.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[0])


def lock_holder(path: str | os.PathLike[str]) -> int | None:
    """The process that has locked a file; None when nobody has, or there is no such file.

    0 when the kernel does not name it here: it belongs to another namespace.
    """
    try:
        seen = os.stat(path)
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    device = (os.major(seen.st_dev), os.minor(seen.st_dev), seen.st_ino)
    for line in lines:
        # 1: FLOCK  ADVISORY  WRITE 1234 fe:00:262656 0 EOF; one with an arrow only waits
        words = line.split()
        if len(words) < 6 or words[1] not in ("FLOCK", "POSIX", "OFDLCK"):
            continue
        major, minor, inode = words[5].split(":")
        if (int(major, 16), int(minor, 16), int(inode)) == device:
            return max(0, int(words[4]))
    return 0 if _is_locked(path) else None


def _is_locked(path: str | os.PathLike[str]) -> bool:
    """The list has other numbers for some file systems, and lacks other namespaces. A shared lock, for a moment."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def command(pid: int) -> str:
    """The beginning of a process's command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()[:120]
    except OSError:
        return "gone"


def unit_of(pid: int) -> str:
    """The systemd unit that a process belongs to, empty where its control group names none."""
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii")
    except OSError:
        return ""
    found = _UNIT.findall(groups)
    return str(found[-1]) if found else ""
