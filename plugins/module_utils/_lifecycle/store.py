# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Where things lie on a host, and JSON files that are whole or not there."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import typing as t
from pathlib import Path

from .errors import Unwritable, UsageError

# A prefix for every path below, so that tests and fleets of simulated engines can live in a directory.
ROOT_VARIABLE = "VLLM_LIFECYCLE_ROOT"


def root() -> Path:
    return Path(os.environ.get(ROOT_VARIABLE, "/"))


def require_root() -> None:
    """
    :raises UsageError: not root. Sockets of gate and engine, and our state files, are root's.
    """
    if os.geteuid() != 0 and ROOT_VARIABLE not in os.environ:
        raise UsageError(
            f"host {socket.gethostname()}: engines are seen and changed as root only, this runs as user id "
            f"{os.geteuid()}",
            entry="not-root",
            next_step="use become: true, or sudo",
        )


def config_dir() -> Path:
    return root() / "etc/vllm/lifecycle"


def state_dir(engine: str) -> Path:
    return root() / "var/lib/vllm" / engine


def lock_dir() -> Path:
    return root() / "run/vllm-lifecycle"


def unwritable(path: Path, exc: OSError) -> Unwritable:
    """What a full or read-only file system is called."""
    return Unwritable(
        f"host {socket.gethostname()}: {path} cannot be written: {exc}",
        entry="record-unwritable",
        next_step="free space, or correct owner and mode of its directory; then run this again",
    )


def write_text(path: Path, text: str, mode: int = 0o600, directory_mode: int = 0o777) -> None:
    """Write atomically and durably; an existing file's owner and group are kept, since others may read it.

    :raises Unwritable: what was there before is there still.
    """
    try:
        _write(path, text, mode, directory_mode)
    except OSError as exc:
        raise unwritable(path, exc) from exc


def _write(path: Path, text: str, mode: int, directory_mode: int) -> None:
    path.parent.mkdir(mode=directory_mode, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            there = path.stat()
        except FileNotFoundError:
            os.chmod(name, mode)
        else:
            os.chmod(name, there.st_mode & 0o7777)
            os.chown(name, there.st_uid, there.st_gid)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: dict[str, t.Any], directory_mode: int = 0o777) -> None:
    """
    :raises Unwritable: as of write_text.
    """
    write_text(path, json.dumps(value, indent=1, sort_keys=True) + "\n", directory_mode=directory_mode)


def write_private(path: Path, value: dict[str, t.Any]) -> None:
    """As 0600 in a directory of 0700: who can write there decides which weights and which answers are right."""
    write_json(path, value, directory_mode=0o700)


def remove(path: Path) -> None:
    """No file is there afterwards.

    :raises Unwritable: it is there still.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        raise unwritable(path, exc) from exc


def read_json(path: Path) -> dict[str, t.Any] | None:
    """The object in a file, None when there is no file.

    :raises UsageError: the file cannot be read, or holds no JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            f"{path} cannot be read: {exc}", entry="record-broken", next_step="run as root, or repair the file"
        ) from exc
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise UsageError(
            f"{path} holds no JSON: {exc}", entry="record-broken", next_step=f"look at {path} and remove or repair it"
        ) from exc
    if not isinstance(value, dict):
        raise UsageError(
            f"{path} holds no JSON object", entry="record-broken", next_step=f"look at {path} and remove or repair it"
        )
    return value
