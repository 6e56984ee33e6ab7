"""A simulated vLLM engine on a Unix socket. It stands where `vllm serve` stands: same options, endpoints, signals,
exit codes and processes, as far as they were measured or read; ../sim/README.md says how to use it.

    python tests/sim/engine.py --uds SOCK --version 0.33.0 --state DIR [--ledger FILE] [--fault NAME[=ARG]] …
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
import typing as t
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = "sim"

from sim import model, options, weightcache
from sim.faults import Switches
from sim.gpumem import Memory
from sim.ledger import Ledger

TEARDOWN_ABORT, TEARDOWN_DRAIN = 0.5, 6.0  # seconds between the last request and the exit, measured
NOTICE = 0.5  # seconds from EngineCore's death to the exit of the API server, measured


def log(text: str, source: str, level: str = "INFO", process: str = "EngineCore", pid: int = 0) -> None:
    now = time.strftime("%m-%d %H:%M:%S")
    print(f"({process} pid={pid or os.getpid()}) {level} {now} [{source}] {text}", flush=True)


def fork_core(name: str, sock: socket.socket | None) -> int:
    """The child that owns the GPU memory: it does nothing but live, and outlives a SIGKILL of its parent."""
    pid = os.fork()
    if pid:
        return pid
    if sock:
        sock.close()  # or connections to a dead engine would hang instead of being refused
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Path("/proc/self/comm").write_text(name)
    while True:
        signal.pause()


class Engine:
    def __init__(self, opts: t.Any) -> None:
        self.opts = opts
        opts.state = opts.state or opts.uds.parent
        opts.state.mkdir(parents=True, exist_ok=True)
        self.faults = Switches(opts.fault, opts.state)
        self.faults.read()
        self.ledger = Ledger(opts.ledger) if opts.ledger else None
        self.pids: list[int] = []
        self.cores: list[t.Any] = []
        self.scratch: Path | None = None
        self.ending = False
        self.published = ""

    # start

    def child(self, sock: socket.socket | None) -> int:
        return fork_core("VLLM::EngineCor", sock)

    def start(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(self.opts.uds))  # a left-over file is an error here as there; bound and not listening: refused
        self.begin(sock)
        for index, pid in enumerate(self.pids):
            self.cores.append(self.load(index, pid))
        if (megabytes := self.faults.number("shm_left", 16)) is not None:
            (self.opts.state / "shm").mkdir(exist_ok=True)
            self.scratch = self.opts.state / "shm" / f"vllm_offload_{os.getpid()}.mmap"
            self.scratch.write_bytes(b"\0" * int(megabytes * 1024))
        time.sleep(self.faults.number("start_refuse", 3600) or 0)
        return sock

    def begin(self, sock: socket.socket | None) -> None:
        self.pids = [self.child(sock) for _unused in range(self.opts.data_parallel_size)]
        self.start_faults()
        time.sleep(self.opts.start_delay)

    def start_faults(self) -> None:
        if self.faults.get("start_hang") is not None:
            while True:
                time.sleep(3600)
        if self.faults.get("start_unreadable") is not None:
            raise PermissionError(13, "Permission denied", f"{self.opts.model}/config.json")
        self.compile_cache()
        if (seconds := self.faults.number("start_crash", 0)) is not None:
            time.sleep(seconds)
            raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")

    def compile_cache(self) -> None:
        """What an earlier start has compiled is taken as it is; a broken artifact is told in vLLM's own words."""
        root = os.environ.get("VLLM_CACHE_ROOT")
        artifact = Path(root) / "torch_compile_cache/artifact" if root else None
        broken = artifact and artifact.exists() and artifact.read_text() != f"v{self.opts.version}"
        if broken or self.faults.get("start_poisoned") is not None:
            raise RuntimeError(
                "vLLM failed to compile the model. The most likely reason for this is that a previous compilation "
                "failed, leading to a corrupted compilation artifact."
            )
        if artifact:
            artifact.parent.mkdir(parents=True, exist_ok=True)
            artifact.write_text(f"v{self.opts.version}")

    def load(self, index: int, pid: int) -> t.Any:
        from sim.core import Core

        opts, width = self.opts, self.opts.tensor_parallel_size
        every = options.gpus_of(opts, self.ledger) if self.ledger else []
        uuids = every[index * width : (index + 1) * width] or every[:width]
        memory = Memory(self.ledger, uuids, opts, pid)
        core = Core(index, pid, opts, self.faults, memory)
        weights = model.read(opts.model)
        log(f"Initializing a V1 LLM engine (v{opts.version}) with config: model='{opts.model}'", "core.py:139", pid=pid)
        core.content, own, external = weights.content, True, 0
        if opts.load_format == "ipc_cache":
            own, external = self.load_from_daemon(core, weights, uuids[0])
        if own:
            self.info("Loading weights took 2.27 seconds", "default_loader.py:506", pid)
        if self.faults.get("start_no_kv") is not None:
            raise ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.")
        memory.start(external, own, (self.faults.number("start_small_kv", 10) or 100) / 100)
        size = memory.weights / 1024
        log(f"Model loading took {size:.2f} GiB memory and 5.93 seconds", "model_runner.py:428", pid=pid)
        log(f"Available KV cache memory: {memory.kv / 1024:.2f} GiB", "gpu_worker.py:772", pid=pid)
        return core

    def info(self, text: str, source: str, pid: int) -> None:
        if self.faults.get("log_quiet") is None:
            log(text, source, pid=pid)

    def load_from_daemon(self, core: t.Any, weights: model.Weights, uuid: str) -> tuple[bool, int]:
        """(the weights are ours, MiB that the daemon holds for us)"""

        def warn(text: str) -> None:
            log(text, "ipc_loader.py:217", "WARNING", pid=core.pid)

        source = weightcache.Source(self.opts.model_loader_extra_config, uuid, warn)
        state = source.fetch(weightcache.key(self.opts, weights))
        external = source.memory()  # asked for whether or not the weights are taken from there
        if state is None:
            return True, external
        if self.faults.get("preload_fails_late") is not None:
            warn("Weight cache IPC loading failed; falling back to disk loading")
            return True, external
        core.content = state["content"]  # the daemon's values, whatever lies on this engine's disk
        text = f"Mapped {state['tensors']} tensors from the weight cache daemon ({source.mode} mode)"
        self.info(text, "ipc_loader.py:321", core.pid)
        if source.mode == "copy":
            return True, 0
        core.zero_copy = True
        if self.ledger:
            self.ledger.map(uuid, core.pid, self.opts.weights_mib, state["pid"])
        self.watch_daemon(source.path, core.pid)
        return False, external

    def watch_daemon(self, path: Path, pid: int) -> None:
        """vLLM 0.33 keeps a connection open to learn that its daemon has gone; it does nothing but say so."""
        if self.opts.minor < 33:
            return
        import threading

        conn = weightcache.connect(path, 5)
        weightcache.send(conn, {"cmd": "watch"})
        weightcache.receive(conn)
        conn.settimeout(None)

        def wait() -> None:
            with contextlib.suppress(OSError):
                conn.recv(1)
            text = f"Weight cache daemon at {path} exited. This engine keeps serving: the CUDA driver keeps its mapped"
            log(f"{text} weights alive until the engine exits.", "ipc_loader.py:581", "WARNING", pid=pid)

        threading.Thread(target=wait, daemon=True).start()

    def stop_in_start(self, *_signal: t.Any) -> None:
        self.kill_cores()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def work(self) -> t.NoReturn:
        """Without an API server: what a head would have it do is not simulated."""
        signal.signal(signal.SIGTERM, lambda *_: self.exit(0))
        log("Launching 1 data parallel engine(s) in headless mode", "serve.py:230", process="MainProcess")
        for index, pid in enumerate(self.pids):
            self.cores.append(self.load(index, pid))
        while True:
            signal.pause()

    # serve

    def server(self) -> t.Any:
        from sim.api import Api
        from sim.httpd import Server

        api = Api(self.cores, self.opts, self.faults)

        async def handle(request: t.Any) -> t.Any:
            try:
                return await api.handle(request)
            finally:
                self.publish()

        return Server(handle, self.faults)

    async def serve(self, sock: socket.socket) -> None:
        import asyncio

        server = self.server()
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: stops.append(loop.create_task(self.shut_down(ended, server))))
        stops: list[asyncio.Task[None]] = []
        schedulers = [loop.create_task(core.schedule()) for core in self.cores]
        watch = loop.create_task(self.watch_cores(ended))
        await asyncio.start_unix_server(server.connection, sock=sock)
        log("Application startup complete.", "launcher.py:80", process="APIServer")
        code = await ended
        for task in [*schedulers, watch, *stops]:
            task.cancel()
        self.exit(code)

    async def watch_cores(self, ended: t.Any) -> None:
        import asyncio

        while True:
            for core in self.cores:
                core.check()
            if any(core.dead for core in self.cores) and not self.ending:
                await asyncio.sleep(NOTICE)
                if not ended.done():
                    ended.set_result(0)  # measured: the API server ends with 0 when its EngineCore was killed
            self.publish()
            await asyncio.sleep(0.03)

    def publish(self) -> None:
        now = json.dumps(self.truth())
        if now != self.published:
            part = self.opts.state / "engine.json.new"
            part.write_text(now)
            part.replace(self.opts.state / "engine.json")
            self.published = now

    def truth(self) -> dict[str, t.Any]:
        """What is really so, for tests: engine.json in the state directory."""
        return {
            "pid": os.getpid(),
            "cores": [
                {
                    "pid": core.pid,
                    "dead": core.dead,
                    "pause": core.pause,
                    "asleep": sorted(core.asleep),
                    "level": core.level if core.asleep else 0,
                    "mapped": sorted(core.memory.mapped),
                    "weights": core.content,
                    "host_copy": core.host_copy,
                    "running": len(core.running),
                    "waiting": len(core.waiting),
                }
                for core in self.cores
            ],
        }

    # stop

    async def shut_down(self, ended: t.Any, server: t.Any) -> None:
        import asyncio

        self.faults.read()
        if self.ending or self.faults.get("term_ignored") is not None:
            return
        self.ending = True
        drain = self.opts.shutdown_timeout > 0
        for core in self.cores:
            text = f"[shutdown] EngineCore: start mode={'drain' if drain else 'abort'}"
            log(f"{text} timeout={self.opts.shutdown_timeout:.0f}s", "core.py:1638", pid=core.pid)
            core.begin_shutdown(drain)
        deadline = time.monotonic() + self.opts.shutdown_timeout
        while any(core.running or core.waiting for core in self.cores):
            if self.faults.get("term_stalls") is not None:
                for core in self.cores:
                    core.stopping = "stalled"
            elif time.monotonic() > deadline:
                text = "[shutdown] Process manager: force killing remaining processes"
                log(text, "utils.py:648", "WARNING", "APIServer")
                for core in self.cores:
                    core.abort_all()
            await asyncio.sleep(0.01)
        await asyncio.sleep((TEARDOWN_DRAIN if drain else TEARDOWN_ABORT) / self.opts.speed)
        await asyncio.sleep(self.faults.number("term_slow", 5) or 0)
        flush = time.monotonic() + 0.5
        while server.streaming and time.monotonic() < flush:
            await asyncio.sleep(0.01)
        if not ended.done():
            ended.set_result(int(self.faults.number("term_exit", 1) or 0))

    def exit(self, code: int) -> t.NoReturn:
        """The socket file stays, as vLLM leaves it."""
        if (seconds := self.faults.number("memory_lingers", 2)) is not None:
            for core in self.cores:
                core.memory.linger(seconds)
        if self.scratch:
            self.scratch.unlink(missing_ok=True)
        if self.faults.get("term_orphans") is None:
            self.kill_cores()
        sys.stdout.flush()
        os._exit(code)

    def kill_cores(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def main() -> None:
    engine = Engine(options.parse(sys.argv[1:], "engine"))
    signal.signal(signal.SIGTERM, engine.stop_in_start)
    try:
        if engine.opts.headless:
            engine.begin(None)
            engine.work()
        sock = engine.start()
    except Exception:  # noqa: BLE001  any error in the start ends the real one alike: traceback, exit 1
        traceback.print_exc()
        engine.kill_cores()
        sys.exit(1)
    import asyncio

    asyncio.run(engine.serve(sock))


if __name__ == "__main__":
    main()
