"""A simulated `vllm preload`: a parent with a health port, and one process that holds the weights for each GPU.

    python tests/sim/daemon.py --state DIR --ledger FILE --weight-cache-socket-dir DIR --weight-cache-health-port N …

Measured: the health port refuses until it listens, 503 while loading, 200 when ready; SIGTERM ends it with 241 and
leaves the socket and its lock file; a second daemon on a socket loads the model, then exits 1; after a copy-mode
engine has taken the weights the memory stays and so does the 200.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import json
import os
import signal
import socket
import sys
import threading
import time
import typing as t
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = "sim"

from sim import model, options, weightcache
from sim.faults import Switches
from sim.ledger import Ledger, OutOfMemory

TERM = 2.9  # seconds from SIGTERM to the exit, measured


def log(text: str, level: str = "INFO", process: str = "MainProcess") -> None:
    print(f"({process} pid={os.getpid()}) {level} {time.strftime('%m-%d %H:%M:%S')} {text}", flush=True)


class Rank:
    """The process that loads and lends the weights of one GPU."""

    def __init__(self, opts: t.Any, faults: Switches, ledger: Ledger, uuid: str) -> None:
        self.opts, self.faults, self.ledger, self.uuid = opts, faults, ledger, uuid
        self.folder = opts.weight_cache_socket_dir or Path(f"/tmp/vllm_weight_cache_{os.getuid()}")
        self.path = weightcache.socket_path(self.folder, uuid)
        self.watchers: list[socket.socket] = []
        self.released = False

    def run(self, ready: int) -> None:
        """Load, take the lock, serve. `ready` is a pipe's end."""
        if (how := self.opts.quantization or model.quantization(self.opts.model)).startswith(model.NOT_PRELOADED):
            text = f"{how} does not support loading from pre-processed weights."
            raise weightcache.UnsupportedQuantForIPCError(text)
        time.sleep(self.opts.load_time)
        self.weights = model.read(self.opts.model)
        size = self.opts.weights_mib // self.opts.tensor_parallel_size + self.opts.daemon_extra_mib
        self.ledger.resize(self.uuid, os.getpid(), size, "preload")
        log(f"Weight cache target daemon rank 0 loaded model ({self.opts.weights_mib / 1024:.2f} GiB allocated)")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        weightcache.check_owner(self.folder)
        lock = os.open(f"{self.path}.lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            text = f"Another weight cache daemon already owns {self.path}"
            raise weightcache.WeightCacheUnavailableError(text) from error
        self.path.unlink(missing_ok=True)
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(self.path))
        self.path.chmod(0o600)
        server.listen()
        os.write(ready, b"1")
        log(f"Weight cache target daemon rank 0 serving on {self.path}")
        while True:
            conn, _unused = server.accept()
            with contextlib.suppress(OSError, ValueError):
                self.serve(conn)

    def serve(self, conn: socket.socket) -> None:
        request = weightcache.receive(conn)
        self.faults.read()
        command = request.get("cmd")
        if command == "get_state":
            weightcache.send(conn, self.state(request["cache_key"]))
        elif command == "get_memory":
            weightcache.send(conn, {"status": "ok", "memory_mib": 0 if self.gone() else self.opts.weights_mib})
        elif command == "release":
            self.released = True
            log("Weight cache target daemon rank 0 released cached weights")  # it says so, and keeps the memory
            weightcache.send(conn, {"status": "ok"})
        elif command == "watch" and self.opts.minor >= 33:
            weightcache.send(conn, {"status": "ok"})
            self.watchers.append(conn)
            return
        else:
            weightcache.send(conn, {"status": "error", "message": f"Unknown command {command!r}"})
        conn.close()

    def gone(self) -> bool:
        return self.released or self.faults.get("daemon_released") is not None

    def state(self, wanted: dict[str, t.Any]) -> dict[str, t.Any]:
        mine = weightcache.key(self.opts, self.weights)
        if fields := [name for name in mine if mine[name] != wanted.get(name)]:
            log(f"WeightCacheKey mismatch on fields: {fields}", "WARNING")
            return {"status": "mismatch", "fields": fields}
        if self.gone():
            return {"status": "error", "message": "Weights were released"}
        weights = {"content": self.weights.content, "tensors": self.weights.tensors, "pid": os.getpid()}
        return {"status": "ok", **weights, "gpu_uuid": self.uuid}


def health_server(opts: t.Any, faults: Switches, healthy: t.Callable[[], bool]) -> None:
    class Health(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            faults.read()
            status = 404 if self.path != "/health" else 200 if healthy() else 503
            body = b"" if status != 404 else b'{"detail":"Not Found"}'
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_words: t.Any) -> None:
            """Quiet, as the real one."""

    address = (opts.weight_cache_health_host, opts.weight_cache_health_port)
    server = http.server.ThreadingHTTPServer(address, Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def fork_rank(rank: Rank, ready: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        rank.run(ready)
    except (
        weightcache.WeightCacheUnavailableError,
        weightcache.UnsupportedQuantForIPCError,
        OutOfMemory,
        OSError,
    ) as error:
        print(f"vllm.model_executor.model_loader.weight_cache.protocol.{type(error).__name__}: {error}", flush=True)
    os._exit(1)


class Parent:
    def __init__(self, opts: t.Any) -> None:
        self.opts = opts
        opts.state.mkdir(parents=True, exist_ok=True)
        self.faults = Switches(opts.fault, opts.state)
        self.faults.read()
        self.ledger = Ledger(opts.ledger)
        self.started = time.monotonic()
        self.exits: dict[int, int] = {}  # of the ranks, by pid
        self.is_ready = False
        uuids = options.gpus_of(opts, self.ledger)[: opts.tensor_parallel_size]
        self.ranks = [Rank(opts, self.faults, self.ledger, uuid) for uuid in uuids]

    def healthy(self) -> bool:
        if self.faults.get("daemon_health_lies") is not None:
            return True
        bad = ("daemon_never_ready", "daemon_health_503")
        return self.is_ready and not self.exits and all(self.faults.get(name) is None for name in bad)

    def run(self) -> int:
        read, write = os.pipe()
        os.set_blocking(read, False)
        pids = [fork_rank(rank, write) for rank in self.ranks]
        stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _frame: stop.append(number))
        signal.signal(signal.SIGINT, lambda number, _frame: stop.append(number))
        (self.opts.state / "daemon.json").write_text(json.dumps({"pid": os.getpid(), "ranks": pids}))
        if self.opts.weight_cache_health_port is not None:
            health_server(self.opts, self.faults, self.healthy)
        ready = 0
        while not stop:
            time.sleep(0.01)
            self.reap(pids)
            with contextlib.suppress(BlockingIOError):
                ready += len(os.read(read, 8))
            if ready == len(pids) and not self.is_ready and self.faults.get("daemon_never_ready") is None:
                self.is_ready = True
                log("===== Weight cache daemon READY: node 0/1 serving 1 local rank(s) x 1 role(s) =====")
            crash = self.faults.number("daemon_crash", 0)
            if (self.exits and ready < len(pids)) or (crash is not None and time.monotonic() > self.started + crash):
                codes = list(self.exits.values()) or [1]
                text = f"Weight cache daemon rank(s) exited during startup (exitcodes={codes}); shutting down."
                log(text, "ERROR")
                self.end(pids)
                return max(1, *codes) & 255
            if len(self.exits) == len(pids):
                return self.worst()
        self.faults.read()
        time.sleep(TERM / self.opts.speed + (self.faults.number("daemon_term_slow", 5) or 0))
        self.end(pids)
        if self.faults.get("daemon_cleans_files") is not None:
            for rank in self.ranks:
                rank.path.unlink(missing_ok=True)
                Path(f"{rank.path}.lock").unlink(missing_ok=True)
        return int(self.faults.number("daemon_exit", 1) or self.worst())

    def worst(self) -> int:
        """vLLM's `sys.exit(max(exit codes))`, where a signal counts as its negative number: 241 is -15, and one rank
        killed beside others that ended well gives 0."""
        return max(self.exits.values()) & 255

    def reap(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.exits[pid] = os.waitstatus_to_exitcode(status)

    def end(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if pid not in self.exits:
                    os.kill(pid, signal.SIGTERM)
                    self.exits[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    opts = options.parse(sys.argv[1:], "daemon")
    opts.state = opts.state or opts.weight_cache_socket_dir
    code = Parent(opts).run()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
