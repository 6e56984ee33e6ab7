# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The files of a checkpoint as they lie on disk: which ones count, what would show a change, who can read them."""

from __future__ import annotations

import json
import os
import pwd
import socket
import stat
import sys
import typing as t
from pathlib import Path

from . import process
from .errors import UsageError

MAX_FILES = 10_000
PROBE_TIMEOUT = 60.0
# A clock tick is 10 ms in a kernel, 1 or 2 s on some file systems.
YOUNG_NS = 2_500_000_000

# Weight files in the order in which a loader prefers them, and what lies beside them and is not loaded.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})
INDEX = "model.safetensors.index.json"

# Run as the service user, by an interpreter that it may run.
_PROBE = """
import json, os, sys
failed = []
for path in json.load(sys.stdin):
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as exc:
        failed.append([path, exc.strerror])
json.dump(failed, sys.stdout)
"""


class Stamp(t.NamedTuple):
    """What changes when a file's content does."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, seen: os.stat_result) -> Stamp:
        return cls(seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)

    def young(self, began_ns: int) -> bool:
        """Whether a write after ``began_ns`` (ns since the epoch) could leave this stamp as it is."""
        return self.ctime_ns > began_ns - YOUNG_NS or abs(self.mtime_ns - began_ns) < YOUNG_NS


class Seen(t.NamedTuple):
    """A file of the checkpoint. ``link`` is the text of the link that leads out of it, or empty."""

    path: str
    stamp: Stamp
    link: str


def real(path: str) -> Path:
    """The place of a checkpoint, without links.

    :raises UsageError: the path is not absolute, or cannot be followed.
    """
    if not os.path.isabs(path):
        raise UsageError(
            f"'{path}' is no absolute path: only a checkpoint on disk has a manifest of its files",
            entry="checkpoint-broken",
            next_step="give the directory that holds it, as an absolute path",
        )
    try:
        return Path(path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as exc:
        raise unreadable(path, exc) from exc


def open_file(path: str) -> int:
    """A descriptor to read from; does not wait for whoever might have put a pipe there."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def scan(path: str) -> dict[str, Seen]:
    """Every file that counts, by its name relative to the checkpoint; of a single file, that one.

    :raises UsageError: a place cannot be read, a link leads nowhere or in a circle, or this is no checkpoint.
    """
    root = real(path)
    found: dict[str, Seen] = {}
    if root.is_dir():
        inside = [str(root)]
        if root.parent.name == "snapshots":  # of a Hugging Face cache, whose files are links to its blobs
            inside.append(str(root.parent.parent / "blobs"))
        _scan_directory(os.path.normpath(path), "", "", inside, (), found)
    else:
        found[os.path.basename(path)] = Seen(path, _stamp(path), "")
    if not any(name.endswith(WEIGHTS) for name in found):
        raise UsageError(
            f"host {socket.gethostname()}: {path} holds no weight file ({', '.join(WEIGHTS)})",
            entry="checkpoint-broken",
            next_step="correct the path, or download the checkpoint",
        )
    return found


def _scan_directory(
    top: str, prefix: str, link: str, inside: list[str], above: tuple[tuple[int, int], ...], found: dict[str, Seen]
) -> None:
    directory = os.path.join(top, prefix) if prefix else top
    try:
        here = os.stat(directory)
        names = os.listdir(directory)
    except OSError as exc:
        raise unreadable(directory, exc) from exc
    if (here.st_dev, here.st_ino) in above:
        raise UsageError(
            f"host {socket.gethostname()}: {directory} leads back to a directory above it",
            entry="checkpoint-broken",
            next_step=f"remove the link (namei -l {directory})",
        )
    above = (*above, (here.st_dev, here.st_ino))
    for name in names:
        if name.startswith(".") or name == "lost+found":
            continue
        relative = f"{prefix}/{name}" if prefix else name
        full = os.path.join(directory, name)
        out = link or _way_out(full, inside)
        if os.path.isdir(full):
            _scan_directory(top, relative, out, inside, above, found)
            continue
        found[relative] = Seen(full, _stamp(full), out)
        if len(found) > MAX_FILES:
            raise UsageError(
                f"host {socket.gethostname()}: {top} holds more than {MAX_FILES} files, so it is no checkpoint",
                entry="checkpoint-broken",
                next_step="give the directory of one checkpoint",
            )


def _way_out(full: str, inside: list[str]) -> str:
    """The text of a link that leads to a place outside of the checkpoint, else nothing."""
    if not os.path.islink(full):
        return ""
    place = os.path.realpath(full)
    if any(place == one or place.startswith(f"{one}/") for one in inside):
        return ""
    return os.readlink(full)


def _stamp(path: str) -> Stamp:
    """Opened and not only looked at: it must be readable, and a network file system asks its server anew only then."""
    try:
        seen = os.stat(path)
        if stat.S_ISREG(seen.st_mode):
            descriptor = open_file(path)
            try:
                seen = os.fstat(descriptor)
            finally:
                os.close(descriptor)
    except OSError as exc:
        raise unreadable(path, exc) from exc
    if not stat.S_ISREG(seen.st_mode):
        raise UsageError(
            f"host {socket.gethostname()}: {path} is neither a file nor a directory",
            entry="checkpoint-broken",
            next_step=f"remove it from the checkpoint (ls -l {path})",
        )
    return Stamp.of(seen)


def check_readable(path: str, seen: t.Mapping[str, Seen], user: str) -> None:
    """Have the service user open every file. That we can says nothing: root reads all.

    :raises UsageError: it cannot, and names the user and the first such path; or it cannot be found out.
    """
    if not user:
        return
    here = socket.gethostname()
    try:
        who = pwd.getpwnam(user)
    except (KeyError, ValueError):
        raise UsageError(
            f"host {here} has no user '{user}'", entry="service-user", next_step="run the role baremetal.vllm.vllm_host"
        ) from None
    if who.pw_uid == os.geteuid():
        return
    if os.geteuid() != 0:
        raise UsageError(
            f"host {here}: only root can find out what user {user} can read, this runs as user {_me()}",
            entry="not-root",
            next_step="use become: true, or sudo",
        )
    files = [one.path for one in seen.values()]
    failed = _as_user(user, who, sorted({os.path.dirname(one) for one in files if one != path}) + sorted(files))
    if failed is None:
        raise UsageError(
            f"host {here}: user {user} could run no Python within {PROBE_TIMEOUT:g} s ({sys.executable}, "
            f"{_SYSTEM_PYTHON}), so it is not known whether it can read {path}",
            entry="service-user",
            next_step="run the role baremetal.vllm.vllm_host; if the file system hangs, 'findmnt -T' names it",
        )
    if failed:
        first, reason = failed[0]
        raise unreadable(first, OSError(0, reason), user)


_SYSTEM_PYTHON = "/usr/bin/python3"


def _as_user(user: str, who: pwd.struct_passwd, places: list[str]) -> list[list[str]] | None:
    """Path and reason of each place that this user cannot open; None when no interpreter told us."""
    for python in dict.fromkeys([os.path.realpath(sys.executable), _SYSTEM_PYTHON]):
        try:
            done = process.run(
                [python, "-I", "-S", "-c", _PROBE],
                PROBE_TIMEOUT,
                input=json.dumps(places),
                cwd="/",
                user=who.pw_uid,
                group=who.pw_gid,
                extra_groups=os.getgrouplist(user, who.pw_gid),
            )
            return t.cast("list[list[str]]", json.loads(done.stdout))
        except (OSError, ValueError, process.TimeoutExpired):
            continue
    return None


def unreadable(path: str, exc: Exception, user: str = "") -> UsageError:
    """The error for a path that ``user`` (without it, whoever runs this) cannot read."""
    reason = getattr(exc, "strerror", None) or str(exc)
    if os.path.islink(path) and not os.path.exists(path):
        reason = f"it is a link to {os.readlink(path)}, where nothing can be reached"
    return UsageError(
        f"host {socket.gethostname()}: user {user or _me()} cannot read {path}: {reason}",
        entry="file-unreadable",
        next_step=f"look at 'namei -l {path}', which shows owner and mode of the whole way, and correct them",
        unreadable=path,
        user=user or _me(),
    )


def _me() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def weight_bytes(seen: t.Mapping[str, Seen]) -> int:
    """The size of the weight files that a loader takes: those of the index if there is one, else all of one kind."""
    sizes = {name: one.stamp.size for name, one in seen.items()}
    if INDEX in seen:
        try:
            listed = set(json.loads(Path(seen[INDEX].path).read_bytes())["weight_map"].values())
            if listed and listed <= set(sizes):
                return sum(sizes[name] for name in listed)
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            pass  # a broken index is the loader's matter; its content is in the manifest all the same
    top = [name for name in sizes if "/" not in name and name not in NO_WEIGHTS]
    for names in (top, list(sizes)):
        for suffix in WEIGHTS:
            chosen = [name for name in names if name.endswith(suffix)]
            plain = [name for name in chosen if not name.startswith("consolidated")]  # the same weights once more
            if chosen:
                return sum(sizes[name] for name in plain or chosen)
    return 0
