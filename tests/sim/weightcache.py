"""What engine and preload daemon say to each other: a length, then JSON, over the daemon's private socket.

The real pair sends pickles; the commands, the states and the texts are the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import time
import typing as t
from pathlib import Path

from . import model


class WeightCacheUnavailableError(Exception):
    """Nobody answers, or nobody who can be trusted."""


class CacheConfigMismatchError(Exception):
    """The daemon has other weights, by its fingerprint."""


class UnsupportedQuantForIPCError(Exception):
    """Weights of this quantisation cannot be handed over."""


def socket_path(folder: str | os.PathLike[str], uuid: str) -> Path:
    return Path(folder) / f"vllm_weight_cache_{hashlib.md5(uuid.encode(), usedforsecurity=False).hexdigest()}.sock"


def key(options: t.Any, weights: model.Weights) -> dict[str, t.Any]:
    """The fingerprint: shapes, types, sizes and versions, but no value of any tensor."""
    return {
        "checkpoint": weights.headers,
        "tp_size": options.tensor_parallel_size,
        "dtype": options.dtype,
        "quantization": options.quantization,
        "revision": options.revision,
        "vllm_version": options.version,
    }


def check_owner(folder: Path, sock: Path | None = None) -> None:
    """An explicit directory is checked for its owner and for being no symbolic link; its mode is not looked at."""
    try:
        if folder.is_symlink():
            raise WeightCacheUnavailableError(f"Refusing to use symlinked socket directory {folder}")
        if folder.lstat().st_uid != os.getuid():
            raise WeightCacheUnavailableError(f"Socket directory {folder} is not owned by the current user")
        if sock is not None and sock.lstat().st_uid != os.getuid():
            raise WeightCacheUnavailableError(f"Socket {sock} is not owned by the current user")
    except OSError as error:
        raise WeightCacheUnavailableError(f"Weight cache socket {sock} is unavailable: {error}") from error


def send(conn: socket.socket, message: dict[str, t.Any]) -> None:
    data = json.dumps(message).encode()
    conn.sendall(struct.pack("!Q", len(data)) + data)


def receive(conn: socket.socket) -> dict[str, t.Any]:
    data = b""
    while len(data) < 8 or len(data) < 8 + struct.unpack("!Q", data[:8])[0]:
        if not (more := conn.recv(65536)):
            raise ConnectionError("the weight cache daemon closed the connection")
        data += more
    message: dict[str, t.Any] = json.loads(data[8:])
    return message


def connect(path: Path, timeout: float) -> socket.socket:
    check_owner(path.parent, path)
    conn = socket.socket(socket.AF_UNIX)
    conn.settimeout(timeout)
    try:
        conn.connect(str(path))
    except OSError as error:
        conn.close()
        raise WeightCacheUnavailableError(f"Cannot connect to weight cache daemon at {path}: {error}") from error
    return conn


def ask(path: Path, timeout: float, message: dict[str, t.Any]) -> dict[str, t.Any]:
    with connect(path, timeout) as conn:
        send(conn, message)
        return receive(conn)


class Source:
    """Where an engine gets its weights when it is started with --load-format ipc_cache."""

    def __init__(self, config: dict[str, t.Any], uuid: str, say: t.Callable[[str], None]) -> None:
        config = dict(config)
        self.folder = config.pop("socket_dir", f"/tmp/vllm_weight_cache_{os.getuid()}")
        self.path = Path(config.pop("socket_path", None) or socket_path(self.folder, uuid))
        self.mode = config.pop("mode", "zero_copy")
        self.fallback = config.pop("fallback", True)
        self.connect_timeout = float(config.pop("connect_timeout_s", 5))
        self.state_timeout = float(config.pop("state_timeout_s", 300))
        self.say = say
        if self.mode not in ("zero_copy", "copy"):
            raise ValueError(f"Invalid weight cache mode {self.mode!r}, expected 'zero_copy' or 'copy'")
        if config:
            raise ValueError(f"Unexpected extra config keys for load format ipc_cache: {sorted(config)}")

    def memory(self) -> int:
        """MiB that the daemon says it holds for this engine; 0 in copy mode and when nobody answers."""
        if self.mode == "copy":
            return 0
        try:
            return int(ask(self.path, self.connect_timeout, {"cmd": "get_memory"})["memory_mib"])
        except (WeightCacheUnavailableError, OSError):
            return 0

    def fetch(self, wanted: dict[str, t.Any]) -> dict[str, t.Any] | None:
        """The daemon's state, or None after a logged fall-back to disk; without fallback the error goes on."""
        deadline = time.monotonic() + (0 if self.fallback else self.state_timeout)
        while True:
            try:
                return self._request(wanted)
            except (WeightCacheUnavailableError, OSError) as error:
                if self.fallback:
                    return self._fall_back(error)
                if time.monotonic() >= deadline:
                    text = f"Weight cache daemon did not become ready within {self.state_timeout:.1f}s: {error}"
                    raise WeightCacheUnavailableError(text) from error
                time.sleep(0.02)
            except CacheConfigMismatchError as error:
                if self.fallback:
                    return self._fall_back(error)
                raise

    def _request(self, wanted: dict[str, t.Any]) -> dict[str, t.Any]:
        reply = ask(self.path, self.state_timeout, {"cmd": "get_state", "cache_key": wanted})
        if reply["status"] == "mismatch":
            raise CacheConfigMismatchError(f"WeightCacheKey mismatch on fields: {reply['fields']}")
        if reply["status"] != "ok":
            raise WeightCacheUnavailableError(f"Weight cache daemon error: {reply['message']}")
        if self.mode == "copy":
            ask(self.path, self.connect_timeout, {"cmd": "release"})
        return reply

    def _fall_back(self, error: Exception) -> None:
        self.say(f"Weight cache unusable ({error}); falling back to disk loading")
