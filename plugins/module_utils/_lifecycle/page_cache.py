# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""How much of a checkpoint lies in the page cache of the host, and how to get it out of there.

Only files of the checkpoint are touched. To drop the page cache as a whole would slow down all else on the host.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import typing as t

from . import checkpoint
from .deadline import Deadline
from .errors import LifecycleError, Surprise, UsageError

MIB = 1024 * 1024
# What may be left after a drop: what someone reads again at this moment.
LEFT = 0.01
PATIENCE = 5.0


class Cached(t.NamedTuple):
    """Bytes of the checkpoint's files, and how many of them are in the page cache."""

    total: int
    cached: int

    @property
    def share(self) -> float:
        return round(self.cached / self.total, 4) if self.total else 0.0


def seen(model: str) -> Cached:
    """
    :raises UsageError: this is no checkpoint on disk, or a file cannot be read.
    """
    files = _files(model)
    return Cached(sum(size for _path, size in files), sum(_resident(path, size) for path, size in files))


def drop(model: str) -> Cached:
    """Take the checkpoint's files out of the page cache; what was there before.

    :raises UsageError: as of ``seen``.
    :raises Surprise: more than a rest stays, for example since another process maps the files.
    """
    before = seen(model)
    deadline = Deadline(PATIENCE)
    while True:
        for path, _size in _files(model):
            _forget(path)
        left = seen(model)
        if left.share <= LEFT:
            return before
        if not deadline.rest():
            raise Surprise(
                f"host {socket.gethostname()}: {left.cached // MIB} of {left.total // MIB} MiB of {model} stay in the "
                "page cache",
                entry="page-cache",
                next_step="see who maps its files (fuser -v), and whether they lie in memory by themselves (tmpfs)",
                left={"cached_mib": left.cached // MIB},
            )


def _files(model: str) -> list[tuple[str, int]]:
    """Each file once, however many links lead to it."""
    by_inode = {(one.stamp.device, one.stamp.inode): one for one in checkpoint.scan(model).values()}
    return [(one.path, one.stamp.size) for one in by_inode.values() if one.stamp.size]


def _forget(path: str) -> None:
    try:
        descriptor = checkpoint.open_file(path)
    except OSError as exc:
        raise checkpoint.unreadable(path, exc) from exc
    try:
        os.fsync(descriptor)  # what is not written yet would stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as exc:
        raise UsageError(
            f"host {socket.gethostname()}: {path} cannot be taken out of the page cache: {exc.strerror}",
            entry="page-cache",
            next_step="measure without a cold start on this file system",
        ) from exc
    finally:
        os.close(descriptor)


def _resident(path: str, size: int) -> int:
    """Bytes of a file that are in the page cache, by mincore(2), which reads none of it."""
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        descriptor = checkpoint.open_file(path)
        try:
            # A private mapping, of which nothing is written: only such a one tells ctypes its address.
            with mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) as mapped:
                first = ctypes.c_char.from_buffer(mapped)
                failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), found)
                error = ctypes.get_errno()
                del first  # else the mapping could not be closed
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as exc:
        raise LifecycleError(
            f"host {socket.gethostname()}: how much of {path} is in the page cache cannot be seen: {exc}",
            entry="page-cache",
            next_step=f"look at {path}; it must not change while it is looked at",
        ) from exc
    if failed:
        raise LifecycleError(
            f"host {socket.gethostname()}: how much of {path} is in the page cache cannot be seen: "
            + os.strerror(error),
            entry="page-cache",
            next_step=f"look at the file system of {path}",
        )
    return min(bytes(found).count(1) * mmap.PAGESIZE, size)
