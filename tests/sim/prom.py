"""/metrics: names, labels and order as the real engine prints them."""

from __future__ import annotations

import typing as t

from .core import Core
from .faults import Switches

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
OPERATIONS = ("sleep", "wake", "release_kv_cache_memory")


class Counts:
    """What the API server itself counts."""

    def __init__(self) -> None:
        self.sleep_state = "awake"  # "" while asleep at level 0
        self.in_flight: dict[str, int] = {}  # by operation, from its first use
        self.durations: dict[str, list[float]] = {}


def text(cores: list[Core], counts: Counts, options: t.Any, faults: Switches) -> str:
    lines: list[str] = []
    missing = faults.get("gauge_missing")
    name = options.served_model_name

    def series(metric: str, kind: str, about: str, samples: t.Iterable[tuple[dict[str, str], float]]) -> None:
        hidden = missing is True and metric in ("vllm:num_requests_running", "vllm:num_requests_waiting")
        if hidden or missing == metric:
            return
        lines.append(f"# HELP {metric} {about}")
        lines.append(f"# TYPE {metric} {kind}")
        for labels, value in samples:
            inside = ",".join(f'{key}="{labels[key]}"' for key in sorted(labels))
            lines.append(f"{metric}{{{inside}}} {float(value)}" if inside else f"{metric} {float(value)}")

    def each(**more: str) -> t.Iterator[tuple[Core, dict[str, str]]]:
        for core in cores:
            yield core, {"engine": str(core.index), "model_name": name, **more}

    if not options.disable_log_stats:
        requests(series, each, faults)
        states = counts.sleep_state if faults.get("sleep_gauge_wrong") is None else faults.get("sleep_gauge_wrong")
        both = faults.get("sleep_gauge_twice") is not None
        series(
            "vllm:engine_sleep_state",
            "gauge",
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
            "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
            [
                (labels, state == states or (both and state != "discard_all"))
                for state in SLEEP_STATES
                for _core, labels in each(sleep_state=state)
            ],
        )
        series(
            "vllm:kv_cache_usage_perc",
            "gauge",
            "KV-cache usage. 1 means 100 percent usage.",
            [(labels, min(1.0, core.seen["running"] / 256)) for core, labels in each()],
        )
        tokens = (("vllm:prompt_tokens_total", "prefill"), ("vllm:generation_tokens_total", "generation"))
        for metric, what in tokens:
            series(
                metric,
                "counter",
                f"Number of {what} tokens processed.",
                [(labels, core.generated if what == "generation" else core.prompted) for core, labels in each()],
            )
        series(
            "vllm:request_success_total",
            "counter",
            "Count of successfully processed requests.",
            [
                (labels, core.finished[reason])
                for reason in cores[0].finished
                for core, labels in each(finished_reason=reason)
            ],
        )
        if options.enable_lora:
            rooms = {"max_lora": str(options.max_loras)}
            series(
                "vllm:lora_requests_info",
                "gauge",
                "Running stats on lora requests.",
                [
                    ({"running_lora_adapters": names, "waiting_lora_adapters": names, **rooms}, at)
                    for core in cores
                    for names, at in core.adapters_seen.items()
                ],
            )
    if options.minor >= 32:
        operations = [operation for operation in OPERATIONS if operation in counts.in_flight]
        if operations:
            series(
                "vllm:sleep_mode_operation_duration_seconds_count",
                "counter",
                "Duration of one sleep-mode operation.",
                [({"operation": operation}, len(counts.durations.get(operation, []))) for operation in operations],
            )
            series(
                "vllm:sleep_mode_operations_in_flight",
                "gauge",
                "Sleep-mode operations currently awaited.",
                [({"operation": operation}, counts.in_flight[operation]) for operation in operations],
            )
    return "\n".join(lines) + "\n"


def requests(series: t.Callable[..., None], each: t.Callable[..., t.Any], faults: Switches) -> None:
    """The gauges that a drain reads."""
    zero = faults.get("gauge_zero") is not None
    by_pid = faults.get("gauge_by_pid") is not None

    def gauge(metric: str, about: str, value: t.Callable[[Core], float], **more: str) -> None:
        samples = [(labels, 0 if zero else value(core)) for core, labels in each(**more)]
        if by_pid:  # several API servers: the same engine once by the living process, once left by a dead one
            samples = [({**labels, "pid": "100"}, number) for labels, number in samples]
            samples += [({**labels, "pid": "99"}, 3) for labels, _number in samples]
        series(metric, "gauge", about, samples)

    def running(core: Core) -> float:
        stale = faults.number("gauge_stale", 1)
        if faults.get("gauge_nan") is not None:
            return float("nan")
        return core.seen["running"] if stale is None or core.running else max(stale, core.seen["running"])

    gauge("vllm:num_requests_running", "Number of requests in model execution batches.", running)
    gauge(
        "vllm:num_requests_waiting",
        "Number of requests waiting to be processed.",
        lambda core: core.seen["capacity"] + core.seen["deferred"],
    )
    metric = "vllm:num_requests_waiting_by_reason"
    about = "Number of waiting requests by reason."
    zero_or = {"capacity": lambda core: core.seen["capacity"], "deferred": lambda core: core.seen["deferred"]}
    samples = [
        (labels, 0 if zero else zero_or[reason](core)) for reason in zero_or for core, labels in each(reason=reason)
    ]
    series(metric, "gauge", about, samples)
