# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a checkpoint's files hold: a manifest, whose digest is the same on every host that has the same files.

vLLM tells two checkpoints apart by the headers of their safetensors files, which do not cover the values. A manifest
does, by one of two methods:

``full``
    SHA-256 of every file. Finds any change.
``sample``
    Weight files in the safetensors format by their size, their header and blocks of every tensor (``tensors.blocks``),
    all other files as in ``full``. Finds another training, revision or quantisation, a swapped, truncated or exchanged
    file, and in a tensor every changed stretch that is longer than a quarter of it or than 32 MiB. It may miss a few
    changed values, so neither rot on a disk nor someone who knows the positions, which are no secret.

All files count, at any depth, but for names that begin with a dot (downloaders keep time stamps there, and no loader
looks there) and ``lost+found``. Links are followed. One that leads out of the checkpoint is part of the manifest, as
written; the store of a Hugging Face cache is no way out, so that a snapshot there equals its plain copy.

The digest is the SHA-256 of a text: ``vllm-weights 1 METHOD``, then for each file, in the order of its bytes, the line
that sha256sum prints for it, and for a link that leads out the line ``link TARGET`` after it.

A second run reads no content: what was hashed is kept by device, inode, size, mtime and ctime. A file whose ctime was
so young when it was read that a later write could have the same is not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import socket
import stat
import sys
import threading
import time
import typing as t
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import lease, process, store, tensors
from .deadline import Deadline
from .errors import DeadlineExceeded, Refused, UnknownState, UsageError

METHODS = ("full", "sample")
Report = t.Callable[[str], None]

SCHEMA = 1
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
NAMESPACE = "vllm-weights"  # of signatures by ssh-keygen
MAX_FILES = 10_000
BUFFER = 4 * 1024 * 1024
REPORT_EVERY = 5.0
SAVE_EVERY = 10.0
PROBE_TIMEOUT = 60.0
ATTEMPTS = 3
# A clock tick of a kernel is 10 ms, of some file systems 1 or 2 s.
YOUNG_NS = 2_500_000_000
# To hash less than this again takes less time than to wait until it is old enough to be kept.
WORTH_WAITING = 256 * 1024 * 1024

# Weight files in the order in which a loader prefers them, and what lies beside them and is not loaded.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"})

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


def silent(_message: str) -> None:
    """For callers without a place to show progress."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    ``digest`` is "sha256:" and 64 hex digits; ``bytes`` the size of the weight files that a loader reads; ``files``
    has for each name, relative to the checkpoint: ``size`` in bytes, ``digest`` (64 hex digits) and, for a link that
    leads out, ``link``. ``hashed`` counts the bytes that were read to take it, 0 when nothing had changed.
    """

    path: str
    method: str
    digest: str
    bytes: int
    files: dict[str, dict[str, t.Any]]
    hashed: int = field(default=0, compare=False)

    def summary(self) -> dict[str, t.Any]:
        return {"digest": self.digest, "method": self.method, "bytes": self.bytes}

    def asdict(self) -> dict[str, t.Any]:
        """For a JSON file; ``from_dict`` reads it."""
        value = asdict(self)
        del value["hashed"]
        return {"schema": SCHEMA, **value}

    @classmethod
    def from_dict(cls, value: t.Any, where: str) -> Manifest:
        """
        :param where: names the source in the error.
        :raises UsageError: this is no manifest, or its digest is not that of its files.
        """
        try:
            files = {
                str(name): {key: kind(one[key]) for key, kind in _FILE.items() if key in one or key != "link"}
                for name, one in value["files"].items()
            }
            manifest = cls(str(value["path"]), str(value["method"]), str(value["digest"]), int(value["bytes"]), files)
            intact = (
                manifest.method in METHODS
                and value["schema"] == SCHEMA
                and manifest.digest == digest_of(manifest.method, files)
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            intact = False
        if not intact:
            raise UsageError(
                f"{where} is no intact manifest of weights", next_step=f"remove {where} and record the weights again"
            )
        return manifest

    def compare(self, now: Manifest) -> list[str]:
        """How ``now`` differs from this one, a sentence for each difference; empty exactly when the digests agree."""
        if self.method != now.method:
            return [f"it was taken by the method {now.method}, not {self.method}, and the two cannot be compared"]
        return [f"{name} {how}" for name, how in self.differences(now).items()]

    def differences(self, now: Manifest) -> dict[str, str]:
        """How ``now`` differs, by the name of the file, for two manifests of one method."""
        owners = {one["digest"]: name for name, one in sorted(self.files.items(), reverse=True)}
        found = {}
        for name in sorted({*self.files, *now.files}):
            old, new = self.files.get(name), now.files.get(name)
            if old == new:
                continue
            if old is None or new is None:
                found[name] = "was added" if old is None else "is gone"
                continue
            said = []
            if old.get("link") != new.get("link"):
                said.append(
                    f"is a link to {new['link']}" if "link" in new else f"is no longer a link to {old.get('link')}"
                )
            if (old["size"], old["digest"]) != (new["size"], new["digest"]):
                size = f"{new['size']} bytes" + (f", not {old['size']}" if old["size"] != new["size"] else "")
                owner = owners.get(new["digest"])
                said.append(f"has the content of {owner}" if owner else f"has another content ({size})")
            found[name] = " and ".join(said)
        return found


_FILE: dict[str, t.Callable[[t.Any], t.Any]] = {"size": int, "digest": str, "link": str}


def digest_of(method: str, files: t.Mapping[str, t.Mapping[str, t.Any]]) -> str:
    """The digest of a manifest: "sha256:" and 64 hex digits. Pure."""
    whole = hashlib.sha256(f"vllm-weights {SCHEMA} {method}\n".encode())
    for name in sorted(files, key=os.fsencode):
        whole.update(_line(f"{files[name]['digest']}  ", name))
        if "link" in files[name]:
            whole.update(_line("link ", files[name]["link"]))
    return f"sha256:{whole.hexdigest()}"


def _line(prefix: str, name: str) -> bytes:
    """As sha256sum does: a name with a backslash or a line feed is escaped, and the line begins with a backslash."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return os.fsencode(f"{'' if escaped == name else chr(92)}{prefix}{escaped}\n")


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
        """Whether a write after ``began_ns`` could leave this stamp as it is."""
        return self.ctime_ns > began_ns - YOUNG_NS or abs(self.mtime_ns - began_ns) < YOUNG_NS


class Seen(t.NamedTuple):
    """A file of the checkpoint. ``link`` is the text of the link that leads out, or empty."""

    path: str
    stamp: Stamp
    link: str


# What was hashed of a file: all of it, or a sample.
Kind = t.Literal["whole", "sample"]
Hashes = dict[tuple[Stamp, Kind], str]


def take(
    path: str,
    *,
    method: str = "full",
    report: Report = silent,
    user: str = "",
    timeout: float = 3600.0,
    remember: bool = True,
) -> Manifest:
    """The manifest of a checkpoint: a directory, or a single file such as a GGUF.

    Hashes on all cores, but gives way to all other work, and holds no lock that an engine's change waits for. Says
    every few seconds how far it is.

    :param user: the service user, who must be able to read every file.
    :param timeout: seconds for all of it. What was hashed by then is kept for the next run.
    :param remember: False writes nothing: neither what was hashed, nor a lock file.
    :raises UsageError: names the user and the path that cannot be read, or a file that cannot be one of a checkpoint.
    :raises UnknownState: files change while they are read.
    :raises DeadlineExceeded: says how much is left.
    :raises Refused: another run hashes this checkpoint, until the time-out.
    """
    if method not in METHODS:
        raise UsageError(f"there is no method '{method}'", next_step=f"use one of: {', '.join(METHODS)}")
    deadline = Deadline(timeout)
    root = _root(path)
    cache = _Cache(root)
    hashes: Hashes = {}
    hashed = 0
    seen = _scan(path, root)
    _check_readable(path, seen, user)
    for _attempt in range(ATTEMPTS):
        hashes.update(cache.load())
        if _missing(seen, method, hashes):
            with lease.locked(f"weights-{_key(root)}", deadline) if remember else nullcontext():
                hashes.update(cache.load())  # another run may have done it while this one waited
                hashed += _Hashing(path, seen, method, hashes, cache if remember else None, deadline, report).run()
        again = _scan(path, root)
        if again == seen and not _missing(seen, method, hashes):
            break
        changed = sorted(name for name in {*seen, *again} if seen.get(name) != again.get(name))
        report(f"{path}: changed while it was read: {', '.join(changed[:5])}")
        seen = again
    else:
        raise UnknownState(
            f"host {socket.gethostname()}: the checkpoint {path} changes while it is read, {ATTEMPTS} times over: "
            + ", ".join(changed[:5]),
            next_step="wait until the copy or download is complete, then run this again",
            files=changed,
        )
    files = {name: _entry(one, hashes[one.stamp, _kind(name, method)]) for name, one in seen.items()}
    return Manifest(path, method, digest_of(method, files), _loaded_bytes(seen), files, hashed)


def _entry(one: Seen, digest: str) -> dict[str, t.Any]:
    return {"size": one.stamp.size, "digest": digest, **({"link": one.link} if one.link else {})}


def _kind(name: str, method: str) -> Kind:
    return "sample" if method == "sample" and name.endswith(".safetensors") else "whole"


def _missing(seen: dict[str, Seen], method: str, hashes: Hashes) -> list[str]:
    return [name for name, one in seen.items() if (one.stamp, _kind(name, method)) not in hashes]


def _root(path: str) -> Path:
    """The real place of a checkpoint."""
    if not os.path.isabs(path):
        raise UsageError(
            f"'{path}' is no absolute path: only a checkpoint on disk has a manifest of its files",
            next_step="give the directory that holds it, as an absolute path",
        )
    try:
        return Path(path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as exc:
        raise _unreadable(path, exc) from exc


def _me() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _unreadable(path: str, exc: Exception, user: str = "") -> UsageError:
    reason = getattr(exc, "strerror", None) or str(exc)
    if os.path.islink(path) and not os.path.exists(path):
        reason = f"it is a link to {os.readlink(path)}, where nothing is"
    return UsageError(
        f"host {socket.gethostname()}: user {user or _me()} cannot read {path}: {reason}",
        next_step=f"look at 'namei -l {path}', which shows owner and mode of the whole way, and correct them",
        path=path,
        user=user or _me(),
    )


def _scan(path: str, root: Path) -> dict[str, Seen]:
    """Every file that counts, by its name relative to the checkpoint.

    :raises UsageError: a place cannot be read, a link leads nowhere or in a circle, or this is no checkpoint.
    """
    inside = [str(root)]
    if root.parent.name == "snapshots":
        inside.append(str(root.parent.parent / "blobs"))
    found: dict[str, Seen] = {}
    if root.is_dir():
        _scan_directory(root, "", "", inside, (), found)
    else:
        found[os.path.basename(path)] = Seen(str(root), _stamp(str(root)), "")
    if not any(name.endswith(WEIGHTS) for name in found):
        raise UsageError(
            f"host {socket.gethostname()}: {path} holds no weight file ({', '.join(WEIGHTS)})",
            next_step="correct the path, or download the checkpoint",
        )
    return found


def _scan_directory(
    root: Path, prefix: str, link: str, inside: list[str], above: tuple[tuple[int, int], ...], found: dict[str, Seen]
) -> None:
    directory = str(root / prefix)
    try:
        here = os.stat(directory)
        names = os.listdir(directory)
    except OSError as exc:
        raise _unreadable(directory, exc) from exc
    if (here.st_dev, here.st_ino) in above:
        raise UsageError(
            f"host {socket.gethostname()}: {directory} leads back to a directory above it",
            next_step=f"remove the link (namei -l {directory})",
        )
    above = (*above, (here.st_dev, here.st_ino))
    for name in names:
        if name.startswith(".") or name == "lost+found":
            continue
        relative = f"{prefix}/{name}" if prefix else name
        full = f"{directory}/{name}"
        out = link or _way_out(full, inside)
        if os.path.isdir(full):
            _scan_directory(root, relative, out, inside, above, found)
            continue
        found[relative] = Seen(full, _stamp(full), out)
        if len(found) > MAX_FILES:
            raise UsageError(
                f"host {socket.gethostname()}: {root} holds more than {MAX_FILES} files, so it is no checkpoint",
                next_step="give the directory of one checkpoint",
            )


def _way_out(full: str, inside: list[str]) -> str:
    """The text of a link that leads to a place outside of the checkpoint, else nothing."""
    if not os.path.islink(full):
        return ""
    real = os.path.realpath(full)
    if any(real == one or real.startswith(f"{one}/") for one in inside):
        return ""
    return os.readlink(full)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)


def _stamp(path: str) -> Stamp:
    """Opened and not only looked at: it must be readable, and a network file system asks its server anew only then."""
    try:
        seen = os.stat(path)
        if stat.S_ISREG(seen.st_mode):
            descriptor = _open(path)
            try:
                seen = os.fstat(descriptor)
            finally:
                os.close(descriptor)
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    if not stat.S_ISREG(seen.st_mode):
        raise UsageError(
            f"host {socket.gethostname()}: {path} is neither a file nor a directory",
            next_step=f"remove it from the checkpoint (ls -l {path})",
        )
    return Stamp.of(seen)


def _check_readable(path: str, seen: dict[str, Seen], user: str) -> None:
    """
    :raises UsageError: the service user cannot read one of the files; that we can says nothing, root reads all.
    """
    if not user:
        return
    here = socket.gethostname()
    try:
        who = pwd.getpwnam(user)
    except KeyError:
        raise UsageError(
            f"host {here} has no user '{user}'", next_step="run the role baremetal.vllm.vllm_host"
        ) from None
    if who.pw_uid == os.geteuid():
        return
    if os.geteuid() != 0:
        raise UsageError(
            f"host {here}: only root can find out what user {user} can read, this runs as user {_me()}",
            next_step="use become: true, or sudo",
        )
    places = sorted({one.path for one in seen.values()} | {os.path.dirname(one.path) for one in seen.values()})
    groups = os.getgrouplist(user, who.pw_gid)
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        try:
            done = process.run(
                [python, "-I", "-S", "-c", _PROBE],
                PROBE_TIMEOUT,
                input=json.dumps(places),
                cwd="/",
                user=who.pw_uid,
                group=who.pw_gid,
                extra_groups=groups,
            )
            failed = json.loads(done.stdout)
            break
        except (OSError, ValueError):  # an interpreter that this user may not run
            continue
        except process.TimeoutExpired as exc:
            raise UsageError(
                f"host {here}: user {user} could not open the files of {path} within {PROBE_TIMEOUT:g} s",
                next_step="look at the file system, for instance with 'findmnt -T' and dmesg",
            ) from exc
    else:
        raise UsageError(
            f"host {here}: user {user} can run neither {sys.executable} nor /usr/bin/python3, so that it is not known "
            f"whether it can read {path}",
            next_step="run the role baremetal.vllm.vllm_host",
        )
    if failed:
        first, reason = failed[0]
        raise _unreadable(first, OSError(0, reason), user)


def _loaded_bytes(seen: dict[str, Seen]) -> int:
    """Bytes of the weight files that a loader takes: those of the index if there is one, else all of the first kind."""
    sizes = {name: one.stamp.size for name, one in seen.items()}
    if "model.safetensors.index.json" in seen:
        try:
            listed = set(
                json.loads(Path(seen["model.safetensors.index.json"].path).read_bytes())["weight_map"].values()
            )
            if listed and listed <= set(sizes):
                return sum(sizes[name] for name in listed)
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            pass  # a broken index is the loader's matter; its content is in the manifest
    top = [name for name in sizes if "/" not in name and name not in NO_WEIGHTS]
    for names in (top, list(sizes)):
        for suffix in WEIGHTS:
            chosen = [name for name in names if name.endswith(suffix)]
            plain = [name for name in chosen if not name.startswith("consolidated")]  # the same weights once more
            if chosen:
                return sum(sizes[name] for name in plain or chosen)
    return 0


def _key(path: Path | str) -> str:
    """A file name for a checkpoint: readable, and different for different paths."""
    text = str(path)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", os.path.basename(text))[:60].lstrip(".")
    return f"{name}-{hashlib.sha256(os.fsencode(text)).hexdigest()[:16]}"


def directory() -> Path:
    """Where manifests and what was hashed are kept, for root alone."""
    return store.root() / "var/lib/vllm/weights"


def _write(path: Path, value: dict[str, t.Any]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    store.write_json(path, value)


class _Cache:
    """The digests of a checkpoint's files as they were hashed before. A file that is not ours counts as none."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.path = directory() / f"{_key(root)}.cache.json"

    def load(self) -> Hashes:
        try:
            value = store.read_json(self.path) or {}
            if value.get("schema") != SCHEMA or value.get("root") != self.root:
                return {}
            return {
                (Stamp(*map(int, stamp)), kind): digest
                for *stamp, kind, digest in value["hashes"]
                if kind in ("whole", "sample") and re.fullmatch("[0-9a-f]{64}", digest)
            }
        except (UsageError, KeyError, TypeError, ValueError):
            return {}

    def save(self, hashes: Hashes) -> None:
        rows = sorted([*stamp, kind, digest] for (stamp, kind), digest in hashes.items())
        _write(self.path, {"schema": SCHEMA, "root": self.root, "hashes": rows})


class _Changed(Exception):
    """The file is not the one that was seen."""


class _Stopped(Exception):
    """The run ends before its work is done."""


class _Job(t.NamedTuple):
    name: str
    seen: Seen
    kind: Kind


def _give_way() -> None:
    """This thread runs when no other wants the CPU; Linux derives the class of its reads, idle as well, from that."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:  # some sandboxes forbid it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class _Hashing:
    """Hashes what is missing, on all cores, and puts it into ``hashes``."""

    def __init__(
        self,
        path: str,
        seen: dict[str, Seen],
        method: str,
        hashes: Hashes,
        cache: _Cache | None,
        deadline: Deadline,
        report: Report,
    ) -> None:
        self.path, self.seen, self.hashes, self.cache = path, seen, hashes, cache
        self.deadline, self.report = deadline, report
        jobs = {
            (seen[name].stamp, _kind(name, method)): _Job(name, seen[name], _kind(name, method))
            for name in _missing(seen, method, hashes)
        }
        now = time.time_ns()
        # The largest first, so that none is left alone at the end; young ones last, so that they age meanwhile.
        self.jobs = sorted(jobs.values(), key=lambda job: (job.seen.stamp.young(now), -job.seen.stamp.size))
        self.total = sum(job.seen.stamp.size for job in self.jobs if job.kind == "whole")
        self.kept: Hashes = {
            key: digest for key, digest in hashes.items() if key[0] in {s.stamp for s in seen.values()}
        }
        self.done = 0
        self.mutex = threading.Lock()
        self.stop = threading.Event()

    def run(self) -> int:
        """
        :returns: how many bytes were read.
        """
        if not self.jobs:
            return 0
        began = told = saved = time.monotonic()
        pool = ThreadPoolExecutor(min(len(self.jobs), len(os.sched_getaffinity(0))), "weights", initializer=_give_way)
        try:
            pending = {pool.submit(self._hash, job): job for job in self.jobs}
            waiting: set[Future[tuple[str, bool]]] = set(pending)
            while waiting:
                finished, waiting = wait(waiting, min(0.5, self.deadline.left), FIRST_COMPLETED)
                for future in finished:
                    self._finish(pending[future], future)
                now = time.monotonic()
                if waiting and now - told >= REPORT_EVERY:
                    told = now
                    self.report(self._progress(len(self.jobs) - len(waiting), now - began))
                if now - saved >= SAVE_EVERY:
                    saved = now
                    self._save()
                if waiting and not self.deadline.left:
                    raise DeadlineExceeded(
                        f"host {socket.gethostname()}: {self._progress(len(self.jobs) - len(waiting), now - began)}, "
                        f"when the time of {self.deadline.seconds:g} s was over",
                        next_step="raise the time-out; what was hashed is kept for the next run"
                        if self.cache
                        else "raise the time-out",
                        left={"files": sorted(pending[future].name for future in waiting)},
                    )
            if now - began >= REPORT_EVERY:
                self.report(self._progress(len(self.jobs), now - began))
        finally:
            self.stop.set()
            pool.shutdown(cancel_futures=True)
            self._save()
        return self.done

    def _progress(self, files: int, seconds: float) -> str:
        of = f" of {self.total / 2**30:.2f}" if self.total else ""
        rate = self.done / 2**30 / max(seconds, 1e-3)
        return (
            f"{self.path}: {self.done / 2**30:.2f}{of} GiB read, {files} of {len(self.jobs)} files hashed, "
            f"{rate:.2f} GiB/s"
        )

    def _save(self) -> None:
        if self.cache is not None:
            self.cache.save(self.kept)

    def _finish(self, job: _Job, future: Future[tuple[str, bool]]) -> None:
        try:
            digest, keep = future.result()
        except _Changed:
            return
        except OSError as exc:
            raise _unreadable(job.seen.path, exc) from exc
        except tensors.Malformed as exc:
            raise UsageError(
                f"host {socket.gethostname()}: {job.seen.path} is no whole safetensors file: {exc}",
                next_step="download this file again",
                files=[job.name],
            ) from exc
        self.hashes[job.seen.stamp, job.kind] = digest
        if keep:
            self.kept[job.seen.stamp, job.kind] = digest

    def _hash(self, job: _Job) -> tuple[str, bool]:
        """The digest, and whether the stamp would show every later change.

        :raises _Changed: the file was changed or exchanged.
        """
        stamp = job.seen.stamp
        if self.cache is not None and stamp.size >= WORTH_WAITING:
            self._let_age(stamp)
        began = time.time_ns()
        descriptor = _open(job.seen.path)
        try:
            if Stamp.of(os.fstat(descriptor)) != stamp:
                raise _Changed
            try:
                if job.kind == "sample":
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                    digest = tensors.sample(descriptor, stamp.size, self._count)
                else:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                    digest = self._whole(descriptor)
            finally:
                if Stamp.of(os.fstat(descriptor)) != stamp:
                    raise _Changed
        finally:
            os.close(descriptor)
        return digest, not stamp.young(began)

    def _let_age(self, stamp: Stamp) -> None:
        """A large file that was just written: wait until its digest may be kept, which is cheaper than a second run."""
        seconds = (stamp.ctime_ns + YOUNG_NS - time.time_ns()) / 1e9
        if 0 < seconds <= YOUNG_NS / 1e9:
            self.stop.wait(seconds + 0.01)

    def _whole(self, descriptor: int) -> str:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(BUFFER))
        while read := os.readv(descriptor, [buffer]):
            digest.update(buffer[:read])
            self._count(read)
        return digest.hexdigest()

    def _count(self, read: int) -> None:
        with self.mutex:
            self.done += read
        if self.stop.is_set():
            raise _Stopped


def record(manifest: Manifest) -> None:
    """Keep a manifest as the one that its path is to have."""
    _write(_record_path(manifest.path), {"at": round(time.time(), 3), **manifest.asdict()})


def recorded(path: str) -> Manifest | None:
    """The manifest that was recorded for this path.

    :raises UsageError: the file is not one that we wrote.
    """
    where = _record_path(path)
    value = store.read_json(where)
    return None if value is None else Manifest.from_dict(value, str(where))


def _record_path(path: str) -> Path:
    return directory() / f"{_key(os.path.normpath(path))}.json"


def allowed(
    manifest: Manifest, allowed: t.Sequence[str] = (), allowed_file: str = "", allowed_signers: str = ""
) -> None:
    """Return if the digest is on the list; without any list everything is.

    :param allowed: digests, "sha256:" and 64 hex digits each.
    :param allowed_file: a file with one digest a line, more words after it are a comment, as are lines with a #.
    :param allowed_signers: of ssh-keygen(1). ``allowed_file`` must then be signed by one of them, in the namespace
        ``vllm-weights``, with the signature in a file of that name and ``.sig``.
    :raises Refused: names the digest and the lists, or the signature is not good.
    :raises UsageError: a list cannot be read, is empty or holds no digests.
    """
    if allowed_signers and not allowed_file:
        raise UsageError("allowed_signers is given without allowed_file", next_step="name the file that they signed")
    if not allowed and not allowed_file:
        return
    pinned = [_pinned(one, "the list of allowed digests") for one in allowed]
    places = ["the given list"] if pinned else []
    if allowed_file:
        text = _read_list(allowed_file)
        if allowed_signers:
            _verify(text, allowed_file, allowed_signers)
        lines = [line.split("#")[0].split() for line in text.splitlines()]
        pinned += [_pinned(words[0], allowed_file) for words in lines if words]
        places.append(allowed_file)
    if manifest.digest not in pinned:
        raise Refused(
            f"host {socket.gethostname()}: the weights in {manifest.path} are {manifest.digest} (method "
            f"{manifest.method}), which is none of the {len(pinned)} allowed in {' and '.join(places)}: "
            + ", ".join(pinned[:3])
            + (", …" if len(pinned) > 3 else ""),
            next_step="put the right checkpoint there; or, once you know that these weights are wanted, add their "
            "digest (one taken by the other method never matches)",
            digest=manifest.digest,
            allowed=pinned,
        )


def _pinned(text: str, where: str) -> str:
    if not DIGEST.fullmatch(text.lower()):
        raise UsageError(
            f"{where}: '{text[:100]}' is no digest",
            next_step="write sha256: and 64 hex digits, as vllm_weights gives it",
        )
    return text.lower()


def _read_list(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise _unreadable(path, exc) from exc
    if not any(line.split("#")[0].split() for line in text.splitlines()):
        raise UsageError(f"{path} holds no digest", next_step="write one digest a line, or leave the file out")
    return text


def _verify(text: str, path: str, signers: str) -> None:
    """
    :raises Refused: nobody among the signers has signed this text.
    """
    here = socket.gethostname()
    signature = f"{path}.sig"
    for needed in (signature, signers):
        if not os.path.isfile(needed):
            raise UsageError(
                f"host {here}: {needed} is missing, so that the signature of {path} cannot be verified",
                next_step=f"sign it with 'ssh-keygen -Y sign -n {NAMESPACE} -f KEY {path}', and name the signers' keys",
            )
    try:
        found = process.run(
            ["ssh-keygen", "-Y", "find-principals", "-s", signature, "-f", signers], PROBE_TIMEOUT, encoding="utf-8"
        )
        names = found.stdout.splitlines() if found.returncode == 0 else []
        said = found.stderr
        for name in names:
            done = process.run(
                ["ssh-keygen", "-Y", "verify", "-f", signers, "-I", name, "-n", NAMESPACE, "-s", signature],
                PROBE_TIMEOUT,
                encoding="utf-8",
                input=text,
            )
            if done.returncode == 0:
                return
            said = done.stderr or done.stdout
    except (OSError, process.TimeoutExpired) as exc:
        raise UsageError(
            f"host {here}: ssh-keygen, which verifies the signature of {path}, cannot be run: {exc}",
            next_step="install the package openssh-client (openssh on Red Hat)",
        ) from exc
    raise Refused(
        f"host {here}: {path} has no good signature of anyone in {signers}: {' '.join(said.split())[:200]}",
        next_step=f"have it signed anew: ssh-keygen -Y sign -n {NAMESPACE} -f KEY {path}",
    )
