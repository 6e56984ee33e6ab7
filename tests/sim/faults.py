"""Every fault that the simulator can be told to have, and the switches that turn them on.

A fault is on when `--fault NAME[=ARG]` names it or when DIR/faults.json does: {"NAME": ARG}, read anew for every
request. The value null or false in the file switches a command-line fault off; {"arg": ARG, "times": N} is used up
after N times. `PATH` arguments name an endpoint such as /wake_up, or with its method "POST /wake_up"; true means every
endpoint.
"""

from __future__ import annotations

import json
import typing as t
from pathlib import Path


class Fault(t.NamedTuple):
    name: str
    where: str  # start, pause, sleep, wake, output, lora, metrics, http, health, process, stop, daemon, nvml
    arg: str  # what ARG means, "" for none
    did: str  # what vLLM, or the thing it runs on, did
    source: str  # case of cases.md, or the page of facts


TABLE = [
    # start
    Fault("start_crash", "start", "seconds", "exits 1 that long after the start, before it listens", "C10"),
    Fault("start_unreadable", "start", "", "exits 1 with a traceback: model files not readable", "facts: readiness"),
    Fault("start_poisoned", "start", "", "exits 1 as with a broken compile cache, also when it is empty", "#18956"),
    Fault("start_hang", "start", "", "never listens: host name does not resolve, distributed init hangs", "E03"),
    Fault("start_refuse", "start", "seconds", "the socket file is there and refuses for that long", "E09"),
    Fault("start_no_kv", "start", "", "exits 1: No available memory for the cache blocks", "A04"),
    Fault(
        "start_small_kv", "start", "percent", "counts a neighbour's weights: the KV cache gets that share only", "A04"
    ),
    # drain and admission
    Fault("pause_ignored", "pause", "", "/pause answers 200, nothing is paused", "A40"),
    Fault("pause_lies", "pause", "", "/is_paused says true whatever is so", "A14"),
    Fault("resume_ignored", "pause", "", "/resume answers 200 and the engine stays paused", "A40"),
    Fault("pause_wait_stuck", "pause", "", "/pause?mode=wait never returns", "D05"),
    Fault("scheduler_stuck", "pause", "", "admits nothing: waiting 'deferred' grows, tokens stand still", "D05"),
    Fault("disconnect_hidden", "pause", "", "requests of clients that have gone run on", "D09"),
    # sleep
    Fault("sleep_level_ignored", "sleep", "level", "sleeps at this level (1) whatever was asked", "A22"),
    Fault("sleep_noop", "sleep", "", "200 and the gauge changes; memory, tags and scheduler do not", "A40"),
    Fault("sleep_keeps", "sleep", "MiB", "frees all but this much", "A06 A07"),
    Fault("sleep_frees_nothing", "sleep", "", "everything says asleep, no memory is freed", "A40"),
    Fault("sleep_5xx_before", "sleep", "", "500, and nothing was done", "A42"),
    Fault("sleep_5xx_after", "sleep", "", "500 after the memory is gone", "A42"),
    Fault("sleep_slow", "sleep", "seconds", "takes that long, and goes on when the client has gone", "A42"),
    Fault("sleep_hangs", "sleep", "", "/sleep never returns and nothing happens", "A42"),
    Fault("sleep_residue_grows", "sleep", "MiB", "each cycle leaves this much more behind", "S02"),
    Fault("sleep_host_oom", "sleep", "", "the host copy of level 1 gets EngineCore killed", "A27"),
    Fault("dies_after_sleep", "sleep", "seconds", "EngineCore dies that long after the 200", "A18"),
    Fault("sleep_rank_awake", "sleep", "engine index", "one engine of a data-parallel group stays awake", "A18"),
    Fault("memory_taken", "sleep", "MiB", "another process takes this much as soon as the engine sleeps", "A01"),
    # wake
    Fault("wake_noop", "wake", "", "200 awake, and nothing was done", "A13"),
    Fault("wake_half", "wake", "", "a plain wake brings the weights only, and answers awake", "A11"),
    Fault("wake_5xx_after", "wake", "", "500 although it woke", "A42"),
    Fault("wake_kills", "wake", "", "500, and EngineCore dies", "A21"),
    Fault("wake_slow", "wake", "seconds", "takes that long", "A42"),
    Fault("wake_leaves_paused", "wake", "", "memory is back, the scheduler stays paused, the answer is awake", "A14"),
    Fault("wake_hangs_output", "wake", "", "after the wake no token comes, health stays 200", "A39"),
    Fault("dies_after_wake", "wake", "seconds", "EngineCore dies that long after the 200", "A33"),
    Fault("reload_5xx", "wake", "", "reload_weights gives 500: KeyError while loading", "A25"),
    Fault("reload_noop", "wake", "", "reload_weights gives 200, the weights stay discarded", "A26"),
    Fault("reload_wrong", "wake", "", "reload_weights gives 200 and other weights", "A26"),
    Fault("reload_few_ranks", "wake", "ranks", "the RPC answers for this many ranks only", "A26"),
    Fault("reset_fails", "wake", "", "/reset_prefix_cache answers success false", "A35"),
    Fault("reset_lies", "wake", "", "/reset_prefix_cache answers success true and keeps old blocks", "A35"),
    Fault(
        "prefix_stale", "wake", "", "prompts answered before the sleep give nonsense until the cache is reset", "A35"
    ),
    # output
    Fault("garbage", "output", "", "every token is id 0, whatever the state", "A38"),
    Fault("wrong_tokens", "output", "", "plausible tokens of other weights", "S01 A26"),
    Fault("logprobs_off", "output", "amount", "the tokens are right, logprobs differ by this much", "A26"),
    Fault(
        "near_tie", "output", "position", "two tokens are as likely as each other there, but for 0.02", "measured: bf16"
    ),
    Fault("tokens_flip", "output", "position", "the runner-up comes there, and what follows from it", "measured: bf16"),
    Fault(
        "prefix_rounds",
        "output",
        "position",
        "what is computed from cached blocks is rounded otherwise: logprobs 0.15 off, the other of a near tie there",
        "measured: bf16",
    ),
    Fault("logprobs_refused", "output", "", "400 for log probabilities of any number", "facts: --max-logprobs"),
    Fault("vectors_off", "output", "share", "vectors and scores are off by this share", "A26"),
    Fault("hang_output", "output", "", "completions never answer; health, version and models do", "E01"),
    Fault("slow_tokens", "output", "tokens a second", "tokens come that slowly", "D05"),
    Fault("cut_streams", "output", "tokens", "streams end after this many tokens with abort, 200 and [DONE]", "S06"),
    Fault("short_answers", "output", "tokens", "answers end early and say length", "S06"),
    Fault("error_completions", "output", "status", "completions answer this status", "E01"),
    Fault("wrong_model", "output", "name", "/v1/models lists another model", "E01"),
    # LoRA adapters
    Fault("lora_noop", "lora", "", "a load answers 200 and lists the adapter, which has no effect", "measured: zeros"),
    Fault("lora_unlisted", "lora", "", "a load answers 200, /v1/models does not list it", "A40"),
    Fault("lora_stays", "lora", "", "an unload answers 200, /v1/models still lists it", "A40"),
    Fault("lora_lost", "lora", "", "after a wake adapters are listed and have no effect until loaded again", "A25"),
    # metrics
    Fault("gauge_stale", "metrics", "number", "running stays at this number after aborts", "D10"),
    Fault("gauge_zero", "metrics", "", "running and waiting are 0 whatever runs", "D06"),
    Fault("gauge_missing", "metrics", "metric", "this series does not exist; true: running and waiting", "D08"),
    Fault("gauge_nan", "metrics", "", "running is NaN", "D07"),
    Fault(
        "gauge_by_pid", "metrics", "", "several API servers: series carry a pid, one of them dead and non-zero", "D07"
    ),
    Fault("sleep_gauge_wrong", "metrics", "awake|weights_offloaded|discard_all", "the gauge says this", "A40"),
    Fault("sleep_gauge_twice", "metrics", "", "two sleep states at once", "A40"),
    Fault("metrics_500", "metrics", "", "/metrics answers 500: multiprocess directory unusable", "D07"),
    Fault("metrics_slow", "metrics", "seconds", "/metrics takes that long", "D07"),
    # health and process
    Fault("health_slow", "health", "seconds", "/health takes that long", "E01"),
    Fault("health_503", "health", "", "/health answers 503", "E01"),
    Fault("hung", "process", "", "EngineCore hangs: health 200, gauges frozen, everything else never answers", "E01"),
    Fault("version_wrong", "process", "version", "/version says this", "A32"),
    Fault("is_sleeping_lies", "process", "true|false", "/is_sleeping says this", "A14"),
    Fault("shm_left", "process", "MiB", "a killed engine leaves DIR/shm/vllm_offload_ID.mmap behind", "C08"),
    # HTTP
    Fault("http_500", "http", "PATH", "answers 500 and does nothing", "A21"),
    Fault("http_404", "http", "PATH", "answers 404, as without development mode", "D11"),
    Fault("http_slow", "http", "seconds or PATH:seconds", "the answer comes that late", "A42"),
    Fault("http_hang", "http", "PATH", "accepts the request, never answers, does nothing", "A42"),
    Fault("http_lost", "http", "PATH", "does it, then closes the connection without an answer", "A42"),
    Fault("http_reset", "http", "PATH", "closes the connection, does nothing", "I05"),
    Fault("http_truncated", "http", "PATH", "does it; half a body under the full content-length", "I05"),
    Fault("http_dribble", "http", "PATH", "does it; the body comes byte by byte, 50 ms each", "I05"),
    Fault("http_empty", "http", "PATH", "does it; 200 with an empty body", "A32"),
    Fault("http_html", "http", "PATH", "does it; 200 with an HTML page", "I05"),
    Fault("http_not_json", "http", "PATH", "does it; 200 with broken JSON", "I05"),
    Fault("http_wrong_types", "http", "PATH", "does it; every JSON value becomes a string", "I05"),
    Fault("http_list", "http", "PATH", "does it; the JSON object comes inside a list", "I05"),
    Fault("http_endless", "http", "PATH", "does it; a body that never ends", "I05"),
    Fault("http_garbage", "http", "PATH", "no HTTP at all", "I05"),
    # stop
    Fault("term_ignored", "stop", "", "SIGTERM does nothing; SIGKILL ends it", "C03"),
    Fault("term_stalls", "stop", "", "after SIGTERM streams stand still, connections stay open", "C07"),
    Fault("term_slow", "stop", "seconds", "takes that long to exit after SIGTERM", "C13"),
    Fault("term_orphans", "stop", "", "the API server exits 0, EngineCore lives on with its memory", "C01"),
    Fault("term_exit", "stop", "code", "exits with this code", "C16"),
    Fault("memory_lingers", "stop", "seconds", "GPU memory comes back that long after the exit", "C15"),
    # an engine that takes its weights from a daemon
    Fault("preload_fails_late", "preload", "", "has the daemon let go of its weights, then loads from disk", "B06"),
    Fault("log_quiet", "preload", "", "logs warnings and errors only, so not where its weights come from", "B01"),
    # preload daemon
    Fault("daemon_crash", "daemon", "seconds", "exits 1 that long after the start", "B12"),
    Fault("daemon_never_ready", "daemon", "", "health 503 for ever", "B01"),
    Fault("daemon_health_lies", "daemon", "", "health 200 while it still loads", "B01"),
    Fault("daemon_health_503", "daemon", "", "a rank died after READY: health 503, the parent lives", "B19"),
    Fault("daemon_released", "daemon", "", "health 200, memory held, weights released", "B06"),
    Fault("daemon_exit", "daemon", "code", "exits with this code after SIGTERM", "B19"),
    Fault("daemon_cleans_files", "daemon", "", "removes socket and lock at its end, which vLLM does not do", "B19"),
    Fault("daemon_term_slow", "daemon", "seconds", "takes that long to exit after SIGTERM", "B19"),
    # NVML: lines `fault NAME ARG` of the ledger, set by Ledger.fault
    Fault("nvml:not_loaded", "nvml", "", "NVML does not start: driver not loaded", "A06"),
    Fault("nvml:mismatch", "nvml", "", "NVML does not start: driver and library differ", "A06"),
    Fault("nvml:no_permission", "nvml", "", "NVML does not start: no permission", "A06"),
    Fault("nvml:gpu_lost", "nvml", "UUID", "GPU is lost", "C13"),
    Fault("nvml:unknown_device", "nvml", "UUID", "no such device, by UUID", "B11"),
    Fault("nvml:memory_error", "nvml", "", "unknown error for memory", "A06"),
    Fault("nvml:memory_zero", "nvml", "", "memory used is 0, processes are listed", "A06"),
    Fault("nvml:hide_processes", "nvml", "", "no process is listed, memory is used", "B10"),
    Fault("nvml:unknown_process_memory", "nvml", "", "processes without their memory", "B10"),
    Fault("nvml:reverse_order", "nvml", "", "indexes in another order", "B11"),
    Fault("nvml:slow", "nvml", "milliseconds", "each call takes that long", "A06"),
]
NAMES = frozenset(fault.name for fault in TABLE)


class Switches:
    """The faults of one engine or daemon."""

    def __init__(self, command_line: list[str], state_dir: Path) -> None:
        self.path = state_dir / "faults.json"
        self.given: dict[str, t.Any] = {}
        self.used: dict[str, int] = {}
        self.stamp: tuple[int, int] | None = None
        self.file: dict[str, t.Any] = {}
        for text in command_line:
            name, equals, arg = text.partition("=")
            self.given[name] = arg if equals else True
        _known(self.given)

    def read(self) -> None:
        """Called once for every request."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            self.file = {}
            return
        if (stat.st_mtime_ns, stat.st_ino) != self.stamp:
            self.stamp = (stat.st_mtime_ns, stat.st_ino)
            self.file = json.loads(self.path.read_text())
            _known(self.file)

    def get(self, name: str) -> t.Any:
        """The fault's argument, True without one, None when it is off. Asking uses up one of `times`."""
        value = self.file.get(name, self.given.get(name))
        if isinstance(value, dict):
            key = f"{name} {value.get('id')}"
            self.used[key] = self.used.get(key, 0) + 1
            if self.used[key] > value.get("times", 1 << 62):
                return None
            value = value.get("arg", True)
        return None if value is None or value is False else value

    def number(self, name: str, default: float = 1.0) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        return default if value is True else float(value)

    def on_path(self, name: str, path: str, method: str) -> bool:
        """For faults whose argument is a PATH, or METHOD PATH."""
        value = self.file.get(name, self.given.get(name))
        wanted = value.get("arg", True) if isinstance(value, dict) else value
        return wanted in (True, path, f"{method} {path}") and self.get(name) is not None


def _known(names: dict[str, t.Any]) -> None:
    if unknown := sorted(set(names) - NAMES):
        raise ValueError(f"unknown fault {', '.join(unknown)}; tests/sim/faults.py lists them")
