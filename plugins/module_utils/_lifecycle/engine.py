# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Speaks to one vLLM engine over its Unix socket. It asks and raises; it decides nothing.

What the endpoints really do was measured on vLLM 0.31 to 0.33: /health is 200 in nearly every state, /is_sleeping is
true for a paused engine, repeated calls answer 200 and do nothing. So callers judge by several signals together.
"""

from __future__ import annotations

import math
import re
import typing as t
from dataclasses import dataclass, field
from pathlib import Path

from . import generations
from .config import EngineConfig
from .errors import Answered, Surprise
from .http import Answer, Client, Params

# The label whose value is 1, and the level it stands for. At level 0 (scheduling or KV cache only) none is.
SLEEP_STATES = {"awake": None, "": 0, "weights_offloaded": 1, "discard_all": 2}
# Routes that depend on version and settings.
ROUTES = {
    "pause": "/pause",
    "sleep": "/sleep",
    "kv_release": "/release_kv_cache_memory",
    "reload": "/collective_rpc",
    "lora_update": "/v1/load_lora_adapter",
}
# Histograms of all that the engine has served, and our names for them.
LATENCIES = {
    "vllm:time_to_first_token_seconds": "first_token",
    "vllm:request_time_per_output_token_seconds": "per_token",
}
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Metrics:
    """What /metrics says, by data-parallel engine index; a series that is not there is None, never 0."""

    running: dict[str, int] | None = None
    waiting: dict[str, int] | None = None
    deferred: int | None = None
    sleep_state: dict[str, str] | None = None
    sleep_operations: int | None = None
    tokens: int | None = None
    finished: dict[str, int] = field(default_factory=dict)
    # Seconds and numbers of what the engine has timed since its start, by name; see LATENCIES.
    latencies: dict[str, tuple[float, int]] = field(default_factory=dict)
    # Names of LoRA adapters with requests when the engine's scheduler last ran; of one engine index only.
    busy_adapters: list[str] | None = None

    @property
    def in_flight(self) -> int | None:
        if self.running is None or self.waiting is None:
            return None
        return sum(self.running.values()) + sum(self.waiting.values())


def parse_metrics(text: str) -> Metrics:
    """Metrics from the Prometheus text format.

    Names match exactly (``vllm:num_requests_waiting_by_reason`` also begins with ``vllm:num_requests_waiting``). With
    several API servers a gauge can appear once per process (label ``pid``): the highest value of an index counts.

    :raises Surprise: a value that is no count.
    """
    gauges: dict[str, dict[str, int]] = {}
    states: dict[str, list[str]] = {}
    finished: dict[str, int] = {}
    tokens: int | None = None
    deferred: int | None = None
    operations: int | None = None
    busy: tuple[float, list[str]] | None = None
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if line.startswith("#") or not match:
            continue
        name, raw, value = match.groups()
        if not name.startswith("vllm:"):
            continue
        labels = dict(_LABEL.findall(raw or ""))
        index = labels.get("engine", "0")
        if name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            found = gauges.setdefault(name, {})
            found[index] = max(found.get(index, 0), _count(name, value))
        elif name == "vllm:num_requests_waiting_by_reason" and labels.get("reason") == "deferred":
            deferred = (deferred or 0) + _count(name, value)
        elif name == "vllm:engine_sleep_state":
            named = states.setdefault(index, [])
            if _count(name, value):
                named.append(labels.get("sleep_state", "?"))
        elif name == "vllm:sleep_mode_operations_in_flight":
            operations = (operations or 0) + _count(name, value)
        elif name == "vllm:request_success_total":
            reason = labels.get("finished_reason", "")
            finished[reason] = finished.get(reason, 0) + _count(name, value)
        elif name == "vllm:generation_tokens_total":
            tokens = (tokens or 0) + _count(name, value)
        elif name.endswith("_sum") and (latency := LATENCIES.get(name[: -len("_sum")])):
            sums[latency] = sums.get(latency, 0.0) + _number(name, value)
        elif name.endswith("_count") and (latency := LATENCIES.get(name[: -len("_count")])):
            counts[latency] = counts.get(latency, 0) + _count(name, value)
        elif name == "vllm:lora_requests_info":
            # Every set of names stays listed for ever; the value is the time when it was the present one.
            both = f"{labels.get('running_lora_adapters', '')},{labels.get('waiting_lora_adapters', '')}"
            busy = max(busy or (0.0, []), (_number(name, value), sorted({*both.split(",")} - {""})))
    for index, named in states.items():
        if len(set(named)) > 1 or (named and named[0] not in SLEEP_STATES):
            raise Surprise(
                f"vllm:engine_sleep_state of engine index {index} says {' and '.join(sorted(set(named)))}",
                entry="answer-unusable",
            )
    return Metrics(
        running=gauges.get("vllm:num_requests_running"),
        waiting=gauges.get("vllm:num_requests_waiting"),
        deferred=deferred,
        sleep_state={index: named[0] if named else "" for index, named in states.items()} or None,
        sleep_operations=operations,
        tokens=tokens,
        finished=finished,
        latencies={latency: (sums[latency], counts[latency]) for latency in sums if latency in counts},
        busy_adapters=busy[1] if busy else None,
    )


def _count(name: str, value: str) -> int:
    return int(_number(name, value))


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise Surprise(f"metric {name} has the value {value!r}, which is no count", entry="answer-unusable")
    return number


class Completion(t.NamedTuple):
    """A finished completion: what was owed and what came."""

    finish_reason: str
    tokens: int
    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Served:
    """A name in /v1/models. ``parent`` is the model that an adapter belongs to, "" for a model itself."""

    name: str
    root: str
    parent: str


class Engine:
    """One engine's HTTP interface. Every call takes its own time-out in seconds."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        key = api_key(config)
        self._client = Client(
            "http://engine", uds=config.socket, headers={"Authorization": f"Bearer {key}"} if key else None
        )

    def close(self) -> None:
        self._client.close()

    def call(
        self, method: str, path: str, *, timeout: float, params: Params | None = None, body: t.Any = None
    ) -> Answer:
        return self._client.request(method, path, timeout=timeout, params=params, body=body)

    def _post(self, path: str, *, timeout: float, params: Params | None = None, body: t.Any = None) -> None:
        """A control call. Bodies differ between versions (empty on 0.31), so only the status is judged here."""
        answer = self.call("POST", path, timeout=timeout, params=params, body=body)
        if not answer.ok:
            raise Answered(answer.url, answer.status, answer.text)

    def healthy(self, timeout: float) -> bool:
        """Whether /health is 200. True of a paused, a sleeping and often a hung engine, too."""
        return self.call("GET", "/health", timeout=timeout).status == 200

    def version(self, timeout: float) -> str:
        answer = self.call("GET", "/version", timeout=timeout)
        version = answer.json_object().get("version")
        if not isinstance(version, str) or not version:
            raise Surprise(f"{answer.url} names no version", entry="answer-unusable")
        return version

    def models(self, timeout: float) -> list[str]:
        return [one.name for one in self.served(timeout)]

    def served(self, timeout: float) -> list[Served]:
        """The names that requests may ask for: those of the model itself, and its LoRA adapters."""
        answer = self.call("GET", "/v1/models", timeout=timeout)
        data = answer.json_object().get("data")
        if not isinstance(data, list) or not all(isinstance(m, dict) and isinstance(m.get("id"), str) for m in data):
            raise Surprise(f"{answer.url} lists no models", entry="answer-unusable")
        return [Served(m["id"], str(m.get("root") or ""), str(m.get("parent") or "")) for m in data]

    def load_adapter(self, name: str, path: str, timeout: float) -> None:
        """Load a LoRA adapter. That it answers 200 does not prove that the adapter has an effect."""
        self._post("/v1/load_lora_adapter", timeout=timeout, body={"lora_name": name, "lora_path": path})

    def unload_adapter(self, name: str, timeout: float) -> None:
        """Take a LoRA adapter out of /v1/models. Requests that use it go on to their end.

        :raises Answered: with status 404 where there is none of that name.
        """
        self._post("/v1/unload_lora_adapter", timeout=timeout, body={"lora_name": name})

    def flag(self, path: str, key: str, timeout: float) -> bool | None:
        """A yes-or-no of a development endpoint; None where the engine has no such route (404)."""
        answer = self.call("GET", path, timeout=timeout)
        if answer.status == 404:
            return None
        value = answer.json_object().get(key)
        if not isinstance(value, bool):
            raise Surprise(
                f"{answer.url} answered {key}={value!r}, which is neither true nor false", entry="answer-unusable"
            )
        return value

    def is_paused(self, timeout: float) -> bool | None:
        return self.flag("/is_paused", "is_paused", timeout)

    def is_sleeping(self, timeout: float) -> bool | None:
        return self.flag("/is_sleeping", "is_sleeping", timeout)

    def capabilities(self, timeout: float) -> list[str]:
        """What this engine can be asked to do, by its routes: a GET of one that takes POST is 405, of none 404."""
        return [name for name, path in ROUTES.items() if self.has_route(path, timeout)]

    def has_route(self, path: str, timeout: float) -> bool:
        """Whether it has an endpoint that takes POST: a GET of it is 405, of none 404."""
        answer = self.call("GET", path, timeout=timeout)
        if answer.status not in (404, 405):
            raise Surprise(
                f"{answer.url} answered HTTP {answer.status} to a GET, which is neither 404 nor 405",
                entry="answer-unusable",
            )
        return answer.status == 405

    def metrics(self, timeout: float) -> Metrics:
        answer = self.call("GET", "/metrics", timeout=timeout)
        if answer.status != 200:
            raise Answered(answer.url, answer.status, answer.text)
        return parse_metrics(answer.text)

    def pause(self, mode: str, timeout: float) -> None:
        """Stop taking requests. ``wait`` returns when the running ones have finished, ``abort`` cuts them, ``keep``
        freezes them until /resume.
        """
        self._post("/pause", timeout=timeout, params={"mode": mode})

    def resume(self, timeout: float) -> None:
        self._post("/resume", timeout=timeout)

    def sleep(self, level: int, timeout: float, mode: str = "wait") -> None:
        """Fall asleep, with ``wait`` after running requests have finished. Nothing in the answer proves that it did.

        The level travels in the query: a JSON body is ignored, and the engine would sleep at level 1.
        """
        self._post("/sleep", timeout=timeout, params={"level": level, "mode": mode})

    def release_kv_cache(self, timeout: float) -> None:
        """Free the KV cache of an engine that sleeps at level 0; the weights stay."""
        self._post("/release_kv_cache_memory", timeout=timeout)

    def wake(self, tag: str, timeout: float) -> None:
        """Wake everything, or with a tag (weights, kv_cache) that part. Also un-pauses when nothing is left asleep."""
        self._post("/wake_up", timeout=timeout, params={"tags": tag} if tag else None)

    def reload_weights(self, timeout: float) -> int:
        """Load the weights anew from disk on every rank; the number of ranks that did.

        :raises Surprise: the answer lists no ranks.
        """
        answer = self.call("POST", "/collective_rpc", timeout=timeout, body={"method": "reload_weights"})
        results = answer.json_object().get("results")
        if not isinstance(results, list):
            raise Surprise(f"{answer.url} lists no results by rank", entry="answer-unusable")
        return len(results)

    def reset_prefix_cache(self, timeout: float) -> None:
        """Forget every cached prefix.

        :raises Surprise: it answers 200 and says that it did not, as it does while blocks are in use.
        """
        answer = self.call("POST", "/reset_prefix_cache", timeout=timeout)
        if (answer.text or not answer.ok) and answer.json_object().get("success") is not True:
            raise Surprise(
                f"{answer.url} did not reset the prefix cache: {answer.text[:120]!r}", entry="answer-unusable"
            )

    def complete(self, *, prompt_tokens: int, max_tokens: int, timeout: float, salt: str = "") -> Completion:
        """One completion of a given shape, at temperature 0. With a new ``salt`` nothing of it is in the prefix cache.

        The prompt is made of token ids, so that the shape is exact whatever the tokenizer; a stop token is ignored, so
        exactly ``max_tokens`` tokens are owed.

        :raises Surprise: a 200 that carries no completion.
        """
        body = {
            "model": self.config.served_model_name,
            "prompt": [1 + position % 97 for position in range(prompt_tokens)],
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **({"cache_salt": salt} if salt else {}),
        }
        answer = self.call("POST", "/v1/completions", timeout=timeout, body=body)
        value = answer.json_object()
        try:
            choice = value["choices"][0]
            ids = choice.get("token_ids") or []
            completion = Completion(
                str(choice["finish_reason"]), int(value["usage"]["completion_tokens"]), str(choice["text"]), list(ids)
            )
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError) as exc:
            raise Surprise(
                f"{answer.url} answered 200 without a completion: {answer.text[:120]!r}", entry="answer-unusable"
            ) from exc
        return completion


def api_key(config: EngineConfig) -> str:
    """The API key with which its process runs, or nothing; the files are 0600, read by root."""
    return environment(generations.read_at_start(config), "VLLM_API_KEY")


def environment(file: Path, variable: str) -> str:
    """A variable from an environment file, or nothing."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        name, value = line.strip().partition("=")[::2]
        if name == variable:
            if value.startswith('"') and value.endswith('"'):
                return re.sub(r'\\(["\\`$])', r"\1", value[1:-1])  # as systemd reads an EnvironmentFile
            return value.strip("'")
    return ""
