# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What a checkpoint's files hold: a manifest, whose digest is the same on every host that has the same files.

vLLM tells two checkpoints apart by the headers of their safetensors files, which do not cover the values. A manifest
does, by one of two methods:

``full``
    SHA-256 of every file. Finds any change.
``sample``
    Weight files in the safetensors format by their size, their header and blocks of every tensor (``tensors.blocks``);
    all other files as in ``full``. Finds another training, revision or quantisation, a swapped, exchanged or truncated
    file, and in a tensor every changed stretch that is longer than a quarter of it, or than 32 MiB. May miss a few
    changed values: it is no guard against rot on a disk, nor against someone who chooses what to change, since the
    places that are read are no secret.

All files count, at any depth, except names that begin with a dot (downloaders keep time stamps there, and no loader
looks there) and ``lost+found``. Links are followed. One that leads out of the checkpoint is part of the manifest, as
written; the blobs of a Hugging Face cache count as inside, so that a snapshot there equals its plain copy.

The digest is the SHA-256 of a text: ``vllm-weights 1 METHOD``, then for each file, in the order of the names' bytes,
the line that sha256sum prints for it (in ``sample`` with the sample's digest), and for a link that leads out the line
``link TARGET`` after it. Nothing of it depends on where the checkpoint lies.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
import typing as t
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import checkpoint, hashing, lease, process, store
from .deadline import Deadline
from .errors import LifecycleError, Refused, Surprise, UnknownState, UsageError
from .hashing import Report

METHODS = ("full", "sample")
STATES = ("recorded", "matching")
SCHEMA = 1
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
NAMESPACE = "vllm-weights"  # of signatures by ssh-keygen
VERIFY_TIMEOUT = 30.0
ATTEMPTS = 3


def silent(_message: str) -> None:
    """For callers without a place to show progress."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    ``digest`` is "sha256:" and 64 hex digits; ``bytes`` the size of the weight files that a loader reads; ``files``
    has for each name, relative to the checkpoint: ``size`` in bytes, ``digest`` (64 hex digits) and, for a link that
    leads out, ``link``. ``hashed`` counts the bytes that were read to take it: 0 when all of it was known.
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
                str(name): {
                    "size": int(one["size"]),
                    "digest": str(one["digest"]),
                    **({"link": str(one["link"])} if "link" in one else {}),
                }
                for name, one in value["files"].items()
            }
            manifest = cls(str(value["path"]), str(value["method"]), str(value["digest"]), int(value["bytes"]), files)
            whole = value["schema"] == SCHEMA and manifest.method in METHODS
            intact = whole and manifest.digest == digest_of(manifest.method, files)
        except (AttributeError, KeyError, TypeError, ValueError):
            intact = False
        if not intact:
            raise UsageError(
                f"{where} is no intact manifest of weights",
                entry="record-broken",
                next_step=f"remove {where} and record the weights again",
            )
        return manifest

    def compare(self, now: Manifest) -> list[str]:
        """How ``now`` differs from this one, a sentence for each difference; empty exactly when the digests agree."""
        if self.method != now.method:
            return [f"it was taken by the method {now.method}, not {self.method}: the two cannot be compared"]
        return [f"{name} {how}" for name, how in self.differences(now).items()]

    def differences(self, now: Manifest) -> dict[str, str]:
        """How ``now`` differs, by the name of the file, for two manifests of one method."""
        owners = {one["digest"]: name for name, one in sorted(self.files.items(), reverse=True)}
        found = {}
        for name in sorted({*self.files, *now.files}):
            old, new = self.files.get(name), now.files.get(name)
            if old is None or new is None:
                found[name] = "was added" if old is None else "is gone"
                continue
            said = []
            if old.get("link") != new.get("link"):
                said.append(f"is a link to {new['link']}" if "link" in new else f"is no link to {old['link']} any more")
            if old["digest"] != new["digest"]:
                size = f"{new['size']} bytes" + (f", not {old['size']}" if old["size"] != new["size"] else "")
                owner = owners.get(new["digest"])
                said.append(f"has the content of {owner}" if owner else f"has another content ({size})")
            if said:
                found[name] = " and ".join(said)
        return found


def digest_of(method: str, files: t.Mapping[str, t.Mapping[str, t.Any]]) -> str:
    """The digest of a manifest: "sha256:" and 64 hex digits. Pure."""
    whole = hashlib.sha256(f"vllm-weights {SCHEMA} {method}\n".encode())
    for name in sorted(files, key=os.fsencode):
        whole.update(_line(f"{files[name]['digest']}  ", name))
        if "link" in files[name]:
            whole.update(_line("link ", files[name]["link"]))
    return f"sha256:{whole.hexdigest()}"


def _line(prefix: str, name: str) -> bytes:
    """As sha256sum does: a line with a backslash or an end of line in its name begins with a backslash."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return os.fsencode(f"{'' if escaped == name else chr(92)}{prefix}{escaped}\n")


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

    Hashes on all cores, gives way to all other work, and holds no lock that an engine's change waits for. Says every
    few seconds how far it is. What it hashes is remembered, and read again only when the file has changed.

    :param user: the service user, who must be able to read every file.
    :param timeout: seconds for all of it.
    :param remember: False writes nothing: neither what was hashed, nor a lock's file.
    :raises UsageError: names user and path of what cannot be read, or a file that cannot be one of a checkpoint.
    :raises UnknownState: files change while they are read.
    :raises DeadlineExceeded: names the files that are left.
    :raises Refused: another run hashes this checkpoint, until the time-out.
    """
    if method not in METHODS:
        raise UsageError(
            f"there is no method '{method}' of a manifest",
            entry="option-value",
            next_step=f"use {' or '.join(METHODS)}",
        )
    if remember:
        store.require_root()
    deadline = Deadline(timeout)
    root = str(checkpoint.real(path))
    memory = hashing.Memory(directory() / f"{_key(root)}.hashes.json", root, remember)
    memory.load()
    hashed = 0
    for _attempt in range(ATTEMPTS):
        seen = checkpoint.scan(path)
        checkpoint.check_readable(path, seen, user)
        work = hashing.Hashing(path, seen, method, memory, deadline, report)
        with ExitStack() as stack:
            if work.jobs and remember:
                _lock(stack, f"weights-{_key(root)}", path, deadline, report)
                memory.load()  # another run may have done it meanwhile
                work = hashing.Hashing(path, seen, method, memory, deadline, report)
            digests = work.run()
        hashed += work.read
        again = checkpoint.scan(path)
        if again == seen and all(hashing.key(name, one, method) in digests for name, one in seen.items()):
            files = {
                name: {
                    "size": one.stamp.size,
                    "digest": digests[hashing.key(name, one, method)],
                    **({"link": one.link} if one.link else {}),
                }
                for name, one in seen.items()
            }
            return Manifest(path, method, digest_of(method, files), checkpoint.weight_bytes(seen), files, hashed)
        changed = sorted(name for name in {*seen, *again} if seen.get(name) != again.get(name))
        report(f"{path}: changed while it was read: {', '.join(changed[:5])}")
    raise UnknownState(
        f"host {socket.gethostname()}: the checkpoint {path} changes while it is read, {ATTEMPTS} times in a row: "
        + ", ".join(changed[:5]),
        entry="weights-changing",
        next_step="wait until the copy or the download is complete, then run this again",
        files=changed,
    )


def _lock(stack: ExitStack, name: str, path: str, deadline: Deadline, report: Report) -> None:
    try:
        stack.enter_context(lease.locked(name, Deadline(0)))
    except Refused:
        report(f"{path}: another run hashes it, and this one waits for that")
        stack.enter_context(lease.locked(name, deadline))


def _key(path: str) -> str:
    """A file name for a checkpoint: readable, and another one for another path."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", os.path.basename(path))[:60].lstrip(".")
    return f"{name}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:16]}"


def directory() -> Path:
    """Where manifests are recorded, and what was hashed is remembered. For root alone."""
    return store.root() / "var/lib/vllm/weights"


def _record_path(path: str) -> Path:
    return directory() / f"{_key(os.path.normpath(path))}.json"


def record(manifest: Manifest) -> None:
    """Write a manifest down as the one that its path is to have.

    :raises Unwritable: it cannot be.
    """
    where = _record_path(manifest.path)
    store.write_private(where, {"at": round(time.time(), 3), **manifest.asdict()})


def recorded(path: str) -> Manifest | None:
    """The manifest that was recorded for this path, None without one.

    :raises UsageError: the file is not one that we wrote.
    """
    where = _record_path(path)
    value = store.read_json(where)
    return None if value is None else Manifest.from_dict(value, str(where))


def bring(
    path: str,
    state: str,
    *,
    method: str = "",
    user: str = "",
    timeout: float = 3600.0,
    pinned: t.Sequence[str] = (),
    allowed_file: str = "",
    allowed_signers: str = "",
    check: bool = False,
    report: Report = silent,
) -> dict[str, t.Any]:
    """Record a checkpoint's manifest, or find out whether it still matches the recorded one and the allowed digests.

    :param method: without it that of the recorded manifest, else ``full``.
    :param check: change nothing, say what would be done.
    :returns: the keys of a module result: ``digest``, ``bytes`` and ``method`` of what is on disk, ``before`` and
        ``after`` of what is recorded; ``files`` says of each file that differs from the recorded manifest how.
    :raises Refused: it does not match, with both digests and ``files`` in the details.
    :raises LifecycleError: as of ``take``, ``recorded`` and ``allowed``.
    """
    store.require_root()
    deadline = Deadline(timeout)
    result: dict[str, t.Any] = {"checkpoint": path, "changed": False, "actions": [], "before": {}}
    try:
        known = recorded(path)
        result["before"] = known.summary() if known else {}
        wanted = method or (known.method if known else "full")
        pins = _pins(pinned, allowed_file, allowed_signers)  # before long hashing
        if state == "matching":
            _check_comparable(path, known, wanted, bool(pins.digests))
        now = take(path, method=wanted, report=report, user=user, timeout=timeout, remember=not check)
        result.update(now.summary(), hashed=now.hashed, elapsed=round(deadline.elapsed, 3))
        result["files"] = known.differences(now) if known and known.method == now.method else {}
        result["diff"] = {"before": _side(known, result["files"]), "after": _side(now, result["files"])}
        _check_pinned(now, pins)
        if state == "matching":
            _check_match(path, known, now)
        elif known is None or known.digest != now.digest:
            result["actions"] = [f"{path}: record {now.digest} ({wanted}, {len(now.files)} files)"]
            result["changed"] = True
            if not check:
                record(now)
                _check_recorded(path, now)
            known = now
        result["after"] = known.summary() if known else {}
    except LifecycleError as exc:
        exc.details.update({**result, **exc.details, "elapsed": round(deadline.elapsed, 3)})
        raise
    return result


def _side(manifest: Manifest | None, names: t.Iterable[str]) -> dict[str, t.Any]:
    """One side of a diff: of the files only those that differ."""
    if manifest is None:
        return {}
    return {**manifest.summary(), "files": {name: manifest.files[name] for name in names if name in manifest.files}}


def _check_comparable(path: str, known: Manifest | None, method: str, listed: bool) -> None:
    here = socket.gethostname()
    if known is None and not listed:
        raise UsageError(
            f"host {here}: no manifest was recorded for {path}, and no allowed digests are given: nothing to match",
            entry="weights-not-recorded",
            next_step="record it with vllm_weights state=recorded, or give allowed digests",
        )
    if known is not None and known.method != method:
        raise UsageError(
            f"host {here}: the manifest of {path} was recorded by the method {known.method}, so that one taken by "
            f"{method} cannot be compared with it",
            entry="weights-not-recorded",
            next_step=f"use method: {known.method}, or record it by {method}",
        )


def _check_match(path: str, known: Manifest | None, now: Manifest) -> None:
    differs = known.compare(now) if known else []
    if known and differs:
        more = f"; and {len(differs) - 5} more" if len(differs) > 5 else ""
        raise Refused(
            f"host {socket.gethostname()}: the weights in {path} are {now.digest}, recorded was {known.digest}: "
            + "; ".join(differs[:5])
            + more,
            entry="weights-mismatch",
            next_step="put the recorded files back; or, if the change is wanted, record it (vllm_weights "
            "state=recorded) and restart the daemon and the engines that use it",
            recorded=known.digest,
        )


def _check_recorded(path: str, now: Manifest) -> None:
    if recorded(path) != now:
        raise Surprise(
            f"host {socket.gethostname()}: {_record_path(path)} does not hold what was just written there",
            entry="record-overwritten",
            next_step="find out who else writes to that directory, then run this again",
        )


def allowed(
    manifest: Manifest, allowed: t.Sequence[str] = (), allowed_file: str = "", allowed_signers: str = ""
) -> None:
    """Return if the digest is on one of the lists; without any list everything is.

    :param allowed: digests, "sha256:" and 64 hex digits each.
    :param allowed_file: a file with one digest a line; more words after it are a comment, as is what follows a #.
    :param allowed_signers: a file of ssh-keygen(1). ``allowed_file`` must then be signed by one of those in it, in the
        namespace ``vllm-weights``, with the signature beside it in a file of the same name and ``.sig``.
    :raises Refused: names the digest and the lists, or the signature is not good.
    :raises UsageError: a list cannot be read, is empty or holds something else.
    """
    _check_pinned(manifest, _pins(allowed, allowed_file, allowed_signers))


class _Pins(t.NamedTuple):
    """Allowed digests, and the names of the lists that they are from. Without any, everything is allowed."""

    digests: list[str]
    places: list[str]


def _pins(allowed: t.Sequence[str], allowed_file: str, allowed_signers: str) -> _Pins:
    if allowed_signers and not allowed_file:
        raise UsageError(
            "allowed_signers is given without allowed_file",
            entry="option-value",
            next_step="name the file that they signed",
        )
    digests = [_pinned(one, "the list of allowed digests") for one in allowed]
    places = ["the given list"] if digests else []
    if allowed_file:
        text = _read_list(allowed_file)
        if allowed_signers:
            _verify(text, allowed_file, allowed_signers)
        lines = [line.partition("#")[0].split() for line in text.splitlines()]
        digests += [_pinned(words[0], allowed_file) for words in lines if words]
        places.append(allowed_file)
    return _Pins(digests, places)


def _check_pinned(manifest: Manifest, pins: _Pins) -> None:
    if pins.places and manifest.digest not in pins.digests:
        raise Refused(
            f"host {socket.gethostname()}: the weights in {manifest.path} are {manifest.digest} (method "
            f"{manifest.method}), which is none of the {len(pins.digests)} allowed in {' and '.join(pins.places)}: "
            + ", ".join(pins.digests[:3])
            + (f" and {len(pins.digests) - 3} more" if len(pins.digests) > 3 else ""),
            entry="weights-not-allowed",
            next_step="put the right checkpoint there; or, once you know that these weights are wanted, add their "
            "digest (one taken by the other method never matches)",
            digest=manifest.digest,
            allowed=pins.digests,
        )


def _pinned(text: str, where: str) -> str:
    if not isinstance(text, str) or not DIGEST.fullmatch(text.lower()):
        raise UsageError(
            f"{where}: '{str(text)[:100]}' is no digest",
            entry="weights-list",
            next_step="write sha256: and 64 hex digits, as vllm_weights returns it",
        )
    return text.lower()


def _read_list(path: str) -> str:
    try:
        text = Path(path).read_bytes().decode("utf-8")  # byte for byte what was signed
    except (OSError, ValueError) as exc:
        raise checkpoint.unreadable(path, exc) from exc
    if not any(line.partition("#")[0].strip() for line in text.splitlines()):
        raise UsageError(
            f"{path} holds no digest", entry="weights-list", next_step="write one digest a line, or leave the file out"
        )
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
                f"host {here}: there is no {needed}, so the signature of {path} cannot be verified",
                entry="weights-not-signed",
                next_step=f"sign it with 'ssh-keygen -Y sign -n {NAMESPACE} -f KEY {path}', and name the signers' file",
            )
    try:
        found = process.run(
            ["ssh-keygen", "-Y", "find-principals", "-s", signature, "-f", signers], VERIFY_TIMEOUT, encoding="utf-8"
        )
        said = found.stderr
        for name in found.stdout.splitlines() if found.returncode == 0 else []:
            done = process.run(
                ["ssh-keygen", "-Y", "verify", "-f", signers, "-I", name, "-n", NAMESPACE, "-s", signature],
                VERIFY_TIMEOUT,
                encoding="utf-8",
                input=text,
            )
            if done.returncode == 0:
                return
            said = done.stderr or done.stdout
    except (OSError, process.TimeoutExpired) as exc:
        raise UsageError(
            f"host {here}: ssh-keygen, which verifies the signature of {path}, cannot be run: {exc}",
            entry="weights-not-signed",
            next_step="install the package openssh-client (on Red Hat openssh)",
        ) from exc
    raise Refused(
        f"host {here}: {path} has no good signature of anyone in {signers}: {' '.join(said.split())[:200]}",
        entry="weights-not-signed",
        next_step=f"have it signed again: ssh-keygen -Y sign -n {NAMESPACE} -f KEY {path}",
    )
