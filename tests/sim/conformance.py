"""Replay what was recorded of a real engine (transcripts/) against the simulator, and compare.

    python tests/sim/conformance.py [--speed 60] [--fault NAME[=ARG]]   a fault must make it differ

Each recorded exchange is sent again, in its order. Compared are: status; every key and every state-carrying value of
JSON bodies; metric series and their values; token equality with the golden answer (same, or all ids 0); GPU memory of
the device and of the process to 5 %; how streams end and how many events they have (a cut one: that it was cut); exit
codes. Times are not compared, they are divided by the speed. Exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
import tempfile
import time
import typing as t
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    __package__ = "sim"

from sim import model
from sim.harness import ClientStream, Failed, Reply, SimDaemon, SimEngine, SimGpu, sim_daemon, sim_engine, sim_gpu

TRANSCRIPTS = Path(__file__).resolve().parent / "transcripts"
TOKENS_A_SECOND = 228  # of the recorded streams: 1800 in 7.9 s
GOLDEN = "golden prompt"
MEMORY_TOLERANCE = 0.05
SLACK_MIB = 64  # so that "nothing" compares with "a few MiB of the driver's own"


class Report:
    def __init__(self) -> None:
        self.compared = 0
        self.differing: list[str] = []

    def check(self, where: str, pairs: t.Iterable[tuple[str, t.Any, t.Any]]) -> None:
        """One exchange: each pair is (what, recorded, simulated)."""
        self.compared += 1
        wrong = [f"{what}: recorded {real!r}, simulated {ours!r}" for what, real, ours in pairs if real != ours]
        if wrong:
            self.differing.append(f"{where}: " + "; ".join(wrong))


def records(name: str) -> list[dict[str, t.Any]]:
    return [json.loads(line) for line in (TRANSCRIPTS / name).read_text().splitlines()]


def near(recorded: int, simulated: int) -> int:
    """The recorded value when the simulated one is within tolerance, so that pairs compare equal."""
    close = abs(recorded - simulated) <= max(SLACK_MIB, MEMORY_TOLERANCE * recorded)
    return recorded if close else simulated


def ask(engine: SimEngine, method: str, path: str, body: t.Any = None, timeout: float = 10) -> Reply | None:
    try:
        return engine.request(method, path, body, timeout)
    except TimeoutError:
        return None


class Replay:
    """One engine's life, record by record."""

    def __init__(self, report: Report, engine: SimEngine, gpu: SimGpu, name: str, drains: bool = False) -> None:
        self.report = report
        self.engine = engine
        self.gpu = gpu
        self.name = name
        self.drains = drains  # started with a --shutdown-timeout
        self.recorded_golden: list[int] = []
        self.golden: list[int] = []
        self.streams: list[ClientStream] = []

    def step(self, number: int, record: dict[str, t.Any], opens: bool = False) -> None:
        handler = getattr(self, f"on_{record['kind']}", None)
        if handler is None:
            raise KeyError(f"{self.name}:{number}: no comparison for records of kind {record['kind']}")
        where = f"{self.name}:{number} {record['kind']} {record.get('path', '')}".strip()
        try:
            if opens:
                self.open_stream()
            handler(where, record)
        except (OSError, http.client.HTTPException, Failed, AssertionError, LookupError, TypeError) as error:
            self.report.check(where, [("exchange", "as recorded", f"{type(error).__name__}: {error}")])

    # a client's exchanges

    def on_http(self, where: str, record: dict[str, t.Any]) -> None:
        if record["path"] in ("/pause?mode=wait", "/resume"):  # the steps that let the stream come to its end
            self.let_streams_run()
        body = {"method": "reload_weights"} if record["path"] == "/collective_rpc" else None
        reply = ask(self.engine, record["m"], record["path"], body)
        assert reply is not None, where
        pairs = [("status", record["status"], reply.status), ("body", parsed(record["body"]), parsed(reply.text))]
        self.report.check(where, pairs)

    def on_metrics(self, where: str, record: dict[str, t.Any]) -> None:
        """The recorded lines are a selection: each must be there, with this value."""
        prefixes = {line.partition("{")[0] for line in record["lines"]}
        ours = [
            line
            for line in self.engine.request("GET", "/metrics").text.splitlines()
            if line.partition("{")[0] in prefixes
        ]
        self.report.check(where, [("lines", record["lines"], ours)])

    def on_gen(self, where: str, record: dict[str, t.Any]) -> None:
        ids = record.get("ids")
        body = {"prompt": GOLDEN, "max_tokens": len(ids or [0] * 16), "temperature": 0, "seed": 0, "logprobs": 0}
        reply = ask(
            self.engine,
            "POST",
            "/v1/completions",
            {**body, "return_token_ids": True},
            timeout=10 if record["status"] else 0.3,
        )
        if record["status"] is None:
            self.report.check(where, [("answered", False, reply is not None)])
            return
        assert reply is not None, where
        pairs: list[tuple[str, t.Any, t.Any]] = [("status", record["status"], reply.status)]
        if reply.status != 200:
            pairs.append(("error", record["err"], reply.json["error"]))
        else:
            choice = reply.json["choices"][0]
            ours = choice["token_ids"]
            if len(ids) > len(self.recorded_golden) and not self.golden_is_whole():
                self.recorded_golden, self.golden = ids, ours
            pairs.append(("tokens", len(ids), len(ours)))
            pairs.append(("same as golden", ids == self.recorded_golden[: len(ids)], ours == self.golden[: len(ours)]))
            pairs.append(("garbage", set(ids) == {0}, set(ours) == {0}))
            pairs.append(("logprobs", len(record["lp"]) > 0, len(choice["logprobs"]["token_logprobs"]) > 0))
        self.report.check(where, pairs)

    def golden_is_whole(self) -> bool:
        return len(self.recorded_golden) >= 16

    def on_golden(self, where: str, record: dict[str, t.Any]) -> None:
        ours = self.engine.complete(GOLDEN, len(self.golden))
        self.report.check(where, [("same", record["same"], ours == self.golden)])

    def on_stream(self, where: str, record: dict[str, t.Any]) -> None:
        """A stream opened before the records that changed it; see `opens_stream`."""
        stream = self.streams.pop(0).read()
        events = len(stream.ids) + 1
        whole = record["chunks"] == 1801
        pairs = [
            ("status", record["status"], stream.status),
            ("last", record["last"], "data: [DONE]" if stream.done else None),
            ("whole", whole, events == 1801),
            ("finish_reason", "length" if whole else "abort", stream.finish_reason),
        ]
        self.report.check(where, pairs)

    def open_stream(self) -> None:
        """Open it slow, so that it still runs when the next record comes, however busy this machine is."""
        self.engine.set_fault("slow_tokens", 100)
        self.streams.append(self.engine.open_stream(1800, "a long story"))
        self.engine.until(lambda: len(self.streams[-1].ids) > 0, "the stream's first token")

    def let_streams_run(self) -> None:
        self.engine.set_fault("slow_tokens", None)

    # looks at the machine

    def memory(self, where: str, record: dict[str, t.Any]) -> None:
        used = int(record["gpu"].split(",")[0])
        pairs = [("device MiB", used, near(used, self.gpu.used()))]
        ours = list(self.gpu.processes().values())
        if "apps" in record:
            apps = [int(app.split(",")[1]) for app in record["apps"].split(";") if app]
            pairs.append(("processes", len(apps), len(ours)))
            ours += [0] * (len(apps) - len(ours))
            pairs += [("process MiB", real, near(real, mine)) for real, mine in zip(sorted(apps), sorted(ours))]
        self.report.check(where, pairs)

    on_awake = on_w = on_kv_released = on_left_in_group = memory

    def on_asleep(self, where: str, record: dict[str, t.Any]) -> None:
        self.memory(where, record)
        if "rss" in record:
            core = self.engine.truth()["cores"][0]
            self.report.check(f"{where} rss", [("host copy", float(record["rss"]) > 16, core["host_copy"])])

    def on_stopped(self, where: str, record: dict[str, t.Any]) -> None:
        if self.drains:
            self.let_streams_run()
        self.report.check(where, [("exit code", record["rc"], self.engine.terminate())])


def parsed(text: str) -> t.Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def opens_stream(at: int, all_records: list[dict[str, t.Any]]) -> bool:
    """The recorder opened its stream just before the gauge that shows it running, or the step that ends it."""
    record, before = all_records[at], all_records[at - 1] if at else {}
    if record["kind"] == "metrics" and "num_requests_running" in record["lines"][0] and "} 1.0" in record["lines"][0]:
        return before["kind"] in ("gen", "stream")
    if record["kind"] == "stopped":
        return True
    later = all_records[at + 1] if at + 1 < len(all_records) else {}
    return record.get("path") == "/sleep?level=1" and later.get("mode") == "sleep-abort"


def sleep_and_wake(report: Report, folder: Path, common: dict[str, t.Any]) -> None:
    """h200-0.33.0-sleepwake.jsonl: two lives of one engine, the second with the default --shutdown-timeout."""
    name = "h200-0.33.0-sleepwake.jsonl"
    rows = records(name)
    second = next(at for at, row in enumerate(rows) if row["kind"] == "ready_warm")
    lives = [("cold", rows[:second], 0, 30), ("warm", rows[second:], second, 0)]
    speed = common["speed"]
    common = {**common, "version": "0.33.0", "served_model_name": "m", "enable_sleep_mode": True, "max_model_len": 2048}
    for life, part, offset, timeout in lives:
        with sim_gpu(folder) as gpu:
            options = {**common, "shutdown_timeout": timeout, "token_rate": TOKENS_A_SECOND * speed}
            report_memory(report, f"{name}:1 smi0", part, gpu)
            with sim_engine(folder, name=life, gpu=gpu, **options) as engine:
                replay = Replay(report, engine, gpu, name, drains=timeout > 0)
                for at, record in enumerate(part):
                    if record["kind"] not in NOT_EXCHANGES:
                        replay.step(offset + at + 1, record, opens_stream(at, part))


# what the recorder wrote about itself or about time, and logs that are compared elsewhere
NOT_EXCHANGES = {"smi0", "ready_cold", "ready_warm", "startup_log", "rss_gib", "d3"}


def report_memory(report: Report, where: str, part: list[dict[str, t.Any]], gpu: SimGpu) -> None:
    if part[0]["kind"] == "smi0":
        used = int(part[0]["gpu"].split(",")[0])
        report.check(where, [("device MiB", used, gpu.used())])


def copy_and_wrong_weights(report: Report, folder: Path, common: dict[str, t.Any]) -> None:
    """h200-0.33.0-copy-wrongweights.jsonl: a daemon, another checkpoint of equal shapes, copy mode, a second daemon."""
    name = "h200-0.33.0-copy-wrongweights.jsonl"
    rows = records(name)
    right, wrong = model.write(folder / "ms1", "one", 339), model.write(folder / "ms2", "two", 339)
    speed = common["speed"]
    sizes = {"weights_mib": 2662, "residue_mib": 782, "speed": speed}
    options = {**common, "version": "0.33.0", "served_model_name": "m", "token_rate": TOKENS_A_SECOND * speed, **sizes}
    with (
        sim_gpu(folder) as gpu,
        sim_daemon(folder, gpu, model=right, daemon_extra_mib=700, **sizes) as daemon,
        contextlib.ExitStack() as engines,
    ):
        cache: dict[str, t.Any] = {"load_format": "ipc_cache"}
        starts: dict[str, dict[str, t.Any]] = {
            "ready_wrong": {**cache, "model": wrong, "config": "zero_copy"},
            "ready_ms2_disk": {"model": wrong},
            "ready_copy": {**cache, "model": right, "config": "copy", "enable_sleep_mode": True},
        }
        report_first = rows[0]
        used = int(report_first["gpu"].split(",")[0])
        report.check(f"{name}:1 d3", [("device MiB", used, near(used, gpu.used()))])
        replay: Replay | None = None
        by_daemon: list[int] | None = None
        for number, record in enumerate(rows[1:], 2):
            where = f"{name}:{number} {record['kind']}"
            if record["kind"] in starts:
                start = dict(starts[record["kind"]])
                if mode := start.pop("config", None):
                    start["model_loader_extra_config"] = {"socket_dir": str(daemon.socket_dir), "mode": mode}
                engine = engines.enter_context(sim_engine(folder, name=record["kind"], gpu=gpu, **{**options, **start}))
                replay = Replay(report, engine, gpu, name)
                report.check(where, [("ready", True, engine.answers())])
            elif record["kind"] == "gen":
                assert replay is not None
                ours = replay.engine.complete(GOLDEN, 16)
                by_daemon = by_daemon or ours  # the first answer is the daemon's, whatever the engine's own disk holds
                by_daemon_recorded = rows[2]["ids"]
                replay.golden = replay.golden or ours
                pairs = [("the daemon's weights", record["ids"] == by_daemon_recorded, ours == by_daemon)]
                report.check(where, pairs)
            elif record["kind"] in ("w", "copy"):
                assert replay is not None
                log_line(report, where, record["L"][0], replay.engine.output())
                if "gpu" in record:
                    replay.memory(where, record)
            elif record["kind"] == "dup":
                second_daemon(report, where, record, folder, gpu, daemon, right)
            elif record["kind"] == "kids":
                pids = [daemon.pid, *daemon.ranks()]
                report.check(
                    where, [("daemon's processes live", True, all(Path(f"/proc/{pid}").exists() for pid in pids))]
                )
            elif record["kind"] == "stopped" and record["name"] == "d3":
                report.check(where, [("exit code", record["rc"], daemon.terminate())])
            elif record["kind"] not in NOT_EXCHANGES:
                assert replay is not None
                replay.step(number, record)


def log_line(report: Report, where: str, recorded: str, ours: str) -> None:
    wanted = recorded.rpartition("] ")[2]
    report.check(where, [("log line", True, wanted in ours)])


def second_daemon(
    report: Report, where: str, record: dict[str, t.Any], folder: Path, gpu: SimGpu, first: SimDaemon, right: Path
) -> None:
    options = {"socket_dir": first.socket_dir, "model": right, "weights_mib": 2662, "daemon_extra_mib": 700}
    with sim_daemon(folder, gpu, name="second", wait=False, **options) as daemon:
        code = daemon.wait()
        output = daemon.output()
    report.check(
        where,
        [
            ("exit code", record["rc"], code),
            (
                "says who owns it",
                True,
                "WeightCacheUnavailableError: Another weight cache daemon already owns" in output,
            ),
            ("says that it shuts down", True, "exited during startup (exitcodes=[1]); shutting down." in output),
        ],
    )


def preload(report: Report, folder: Path, common: dict[str, t.Any]) -> None:
    """h200-0.33.0-preload.txt is prose with numbers; its statements, in its order."""
    name = "h200-0.33.0-preload.txt"
    speed = common["speed"]
    zero_copy = {**common, "load_format": "ipc_cache", "version": "0.33.0"}

    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(sim_gpu(folder))
        daemon = stack.enter_context(sim_daemon(folder, gpu, speed=speed))
        source = {"socket_dir": str(daemon.socket_dir), "mode": "zero_copy"}

        def memory(what: str, device: int) -> None:
            report.check(f"{name} {what}", [("device MiB", device, near(device, gpu.used()))])

        def engine(label: str, **more: t.Any) -> SimEngine:
            options = {**zero_copy, "model_loader_extra_config": source, **more}
            return stack.enter_context(sim_engine(folder, name=label, gpu=gpu, **options))

        memory("daemon_ready", 13891)
        files = {path.name.split(".", 1)[1]: path.stat().st_mode & 0o777 for path in daemon.socket_dir.iterdir()}
        report.check(f"{name} sockets", [("files and modes", {"sock": 0o600, "sock.lock": 0o600}, files)])

        first = engine("zc")
        golden = first.complete()
        log_line(
            report,
            f"{name} ready_zc",
            "x] Mapped 435 tensors from the weight cache daemon (zero_copy mode)",
            first.output(),
        )
        memory("ready_zc", 71941)
        first.kill()
        report.check(f"{name} SIGKILL", [("EngineCore lives", True, Path(f"/proc/{first.core_pids()[0]}").exists())])
        memory("SIGKILL of the API server", 71941)
        first.cleanup()

        second = engine("zc_restart")
        report.check(f"{name} ready_zc_restart", [("same output", True, second.complete() == golden)])
        code = daemon.terminate()
        left = sorted(path.name.split(".", 1)[1] for path in daemon.socket_dir.iterdir())
        report.check(f"{name} daemon SIGTERM", [("exit code", 241, code), ("files left", ["sock", "sock.lock"], left)])
        report.check(f"{name} engine without daemon", [("same output", True, second.complete() == golden)])
        memory("daemon gone, charged to the engine", 71323)
        says_so = "exited. This engine keeps serving"
        with contextlib.suppress(Failed):
            second.until(lambda: says_so in second.output(), says_so)
        report.check(f"{name} engine's log", [("says so", True, says_so in second.output())])
        again = stack.enter_context(sim_daemon(folder, gpu, name="again", socket_dir=daemon.socket_dir, speed=speed))
        memory("a second copy", 85211)
        report.check(f"{name} engine SIGTERM", [("exit code", 0, second.terminate())])
        memory("engine gone", 13891)

        sleeper = engine("zc_sleep", enable_sleep_mode=True)
        report.check(f"{name} sleep", [("status", 200, sleeper.request("POST", "/sleep?level=1").status)])
        memory("sleep of zero-copy frees the KV cache only", 15399)
        sleeper.request("POST", "/wake_up")
        report.check(f"{name} wake_up", [("same output", True, sleeper.complete() == golden)])
        sleeper.request("POST", "/sleep?level=2")
        sleeper.request("POST", "/wake_up")
        report.check(f"{name} level 2 and plain wake_up", [("same output", True, sleeper.complete() == golden)])
        sleeper.terminate()

        other = engine("mismatch", dtype="float16")
        text = "x] Weight cache unusable (WeightCacheKey mismatch on fields: ['dtype']); falling back to disk loading"
        log_line(report, f"{name} dtype mismatch", text, other.output())
        memory("dtype mismatch: both hold the weights", 71925)
        other.terminate()
        strict = {"socket_dir": str(again.socket_dir), "mode": "zero_copy", "fallback": False}
        options = {**zero_copy, "dtype": "float16", "model_loader_extra_config": strict}
        refused = stack.enter_context(sim_engine(folder, name="strict", gpu=gpu, wait=False, **options))
        pairs = [("exit code", 1, refused.wait()), ("error", True, "CacheConfigMismatchError" in refused.output())]
        report.check(f"{name} dtype mismatch without fallback", pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--speed", type=float, default=60)
    parser.add_argument("--fault", action="append", default=[], help="give every engine this fault")
    options = parser.parse_args()
    report = Report()
    begin = time.monotonic()
    for replay in (sleep_and_wake, copy_and_wrong_weights, preload):
        with tempfile.TemporaryDirectory(prefix="sim") as folder:
            replay(report, Path(folder), {"speed": options.speed, "fault": options.fault})
    for line in report.differing:
        print(f"differs: {line}")
    seconds = time.monotonic() - begin
    print(f"sim-conformance: {report.compared} exchanges compared, {len(report.differing)} differing ({seconds:.1f} s)")
    return 1 if report.differing else 0


if __name__ == "__main__":
    sys.exit(main())
