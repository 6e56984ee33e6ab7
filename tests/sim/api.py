"""The engine's HTTP endpoints, for vLLM 0.31, 0.32 and 0.33."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
import typing as t
import uuid

from . import completions, lora, pooling, prom
from .core import CallFailed, Core, EngineDead
from .faults import Switches
from .httpd import Request, Response, Stream, answer

GUARDED = ("/v1", "/v2", "/inference", "/cohere")
MODES = ("abort", "wait", "keep")
LEVELS = range(3)
# changes nothing; all else is recorded as mutating
READING = {"/tokenize", "/detokenize", "/collective_rpc/none"}
EMPTY_ON_31 = ("/sleep", "/wake_up", "/release_kv_cache_memory")

Call = t.Callable[[Request], t.Awaitable[t.Union[Response, Stream]]]


def error(message: str, status: int, kind: str = "InternalServerError", param: str | None = None) -> Response:
    return answer({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


def invalid(field: str, kind: str, text: str, given: str, **context: t.Any) -> Response:
    """What FastAPI's validation becomes at vLLM's error handler."""
    detail = {
        "type": kind,
        "loc": f"query.{field}",
        "msg": text,
        "input": given,
        **({"ctx": context} if context else {}),
    }
    return error(f"1 validation error:\n  {detail}", 400, "Bad Request", f"query.{field}")


class Api:
    def __init__(self, cores: list[Core], options: t.Any, faults: Switches) -> None:
        self.cores = cores
        self.options = options
        self.faults = faults
        self.counts = prom.Counts()
        self.loras: dict[str, lora.Adapter] = {}
        self.loads = 0
        self.load = 0
        self.started = int(time.time())
        self.routes: dict[str, dict[str, Call]] = {
            "/health": {"GET": self.health},
            "/version": {"GET": self.version},
            "/load": {"GET": self.server_load},
            "/metrics": {"GET": self.metrics},
            "/openapi.json": {"GET": self.openapi},
            "/ping": {"GET": self.health, "POST": self.health},
            "/tokenize": {"POST": self.tokenize},
            "/v1/models": {"GET": self.models},
            "/invocations": {"POST": self.completion},
        }
        if options.runner == "pooling":
            self.routes.update({path: {"POST": self.pooled} for path in pooling.paths(options)})
        else:
            self.routes.update({path: {"POST": self.completion} for path in completions.PATHS})
        if options.allow_lora_updates:
            self.routes["/v1/load_lora_adapter"] = {"POST": self.load_lora}
            self.routes["/v1/unload_lora_adapter"] = {"POST": self.unload_lora}
        if options.dev_mode:
            self.routes.update(
                {
                    "/server_info": {"GET": self.server_info},
                    "/sleep": {"POST": self.sleep},
                    "/wake_up": {"POST": self.wake_up},
                    "/is_sleeping": {"GET": self.is_sleeping},
                    "/release_kv_cache_memory": {"POST": self.release_kv},
                    "/pause": {"POST": self.pause},
                    "/resume": {"POST": self.resume},
                    "/is_paused": {"GET": self.is_paused},
                    "/abort_requests": {"POST": self.abort_requests},
                    "/collective_rpc": {"POST": self.collective_rpc},
                    "/reset_prefix_cache": {"POST": self.reset_prefix_cache},
                }
            )
            if options.minor >= 32:
                self.routes["/weight_checker"] = {"POST": self.weight_checker}

    async def handle(self, request: Request) -> Response | Stream:
        self.record(request)
        given = request.headers.get("authorization", "")
        if self.options.api_key and request.path.startswith(GUARDED) and given != f"Bearer {self.options.api_key}":
            return answer({"error": "Unauthorized"}, 401)
        methods = self.routes.get(request.path)
        if methods is None:
            return answer({"detail": "Not Found"}, 404)
        if request.method not in methods:
            reply = answer({"detail": "Method Not Allowed"}, 405)
            reply.headers["allow"] = ", ".join(methods)
            return reply
        try:
            reply = await methods[request.method](request)
        except CallFailed as failed:
            return error(str(failed), 500)
        except EngineDead:
            return error("EngineCore encountered an issue. See stack trace (above) for the root cause.", 500)
        if self.options.minor == 31 and request.path in EMPTY_ON_31 and isinstance(reply, Response):
            return reply if reply.status != 200 else Response(200)
        return reply

    def record(self, request: Request) -> None:
        """Every request is written down, so that a test can count what a product changed or asked."""
        if request.headers.get("x-sim") == "quiet":
            return  # the harness's own look
        mutating = request.method not in ("GET", "HEAD", "OPTIONS") and request.path not in READING
        paths = (*completions.PATHS, *pooling.SHAPES, "/invocations")
        generation = request.method == "POST" and request.path in paths
        line = {
            "t": round(time.time(), 4),
            "method": request.method,
            "path": request.target,
            "mutating": mutating and not generation,
            "generation": generation,
            "body": request.body.decode("utf-8", "replace"),
        }
        with open(self.options.state / "requests.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    # always there

    async def health(self, _request: Request) -> Response:
        slow = self.faults.number("health_slow", 5)
        if slow is not None:
            await asyncio.sleep(slow)
        if self.faults.get("health_503") is not None or any(core.dead for core in self.cores):
            return Response(503)
        return Response(200)

    async def version(self, _request: Request) -> Response:
        wrong = self.faults.get("version_wrong")
        return answer({"version": self.options.version if wrong is None else wrong})

    async def server_load(self, _request: Request) -> Response:
        return answer({"server_load": self.load if self.options.enable_server_load_tracking else 0})

    async def metrics(self, _request: Request) -> Response:
        slow = self.faults.number("metrics_slow", 5)
        if slow is not None:
            await asyncio.sleep(slow)
        if self.faults.get("metrics_500") is not None:
            return Response(500, b"Internal Server Error", "text/plain; charset=utf-8")
        body = prom.text(self.cores, self.counts, self.options, self.faults)
        return Response(200, body.encode(), "text/plain; version=1.0.0; charset=utf-8")

    async def openapi(self, _request: Request) -> Response:
        paths = {path: {method.lower(): {} for method in methods} for path, methods in self.routes.items()}
        paths.pop("/openapi.json")
        return answer({"openapi": "3.1.0", "info": {"title": "FastAPI", "version": "0.1.0"}, "paths": paths})

    async def models(self, _request: Request) -> Response:
        wrong = self.faults.get("wrong_model")
        name = self.options.served_model_name if wrong is None else wrong
        entries = [self.model_entry(name, self.options.model, None)]
        entries += [self.model_entry(one.name, one.path, name) for one in self.loras.values()]
        return answer({"object": "list", "data": entries})

    def model_entry(self, name: str, root: str, parent: str | None) -> dict[str, t.Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": self.options.max_model_len if parent is None else None,
            "permission": [{"id": f"modelperm-{uuid.uuid4().hex[:16]}", "object": "model_permission"}],
        }

    @staticmethod
    def lora_fields(request: Request, *wanted: str) -> list[str] | Response:
        if not request.headers.get("content-type", "").startswith("application/json"):
            text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
            return error(text, 400, "Bad Request")
        body = json.loads(request.body)
        missing = [name for name in wanted if not isinstance(body.get(name), str)]
        if missing:
            text = f"1 validation error:\n  {{'type': 'missing', 'loc': 'body.{missing[0]}', 'msg': 'Field required'}}"
            return error(text, 400, "Bad Request", f"body.{missing[0]}")
        return [body[name] for name in wanted]

    async def load_lora(self, request: Request) -> Response:
        fields = self.lora_fields(request, "lora_name", "lora_path")
        if isinstance(fields, Response):
            return fields
        name, path = fields
        wrong = ""
        if not name or not path:
            wrong = "Both 'lora_name' and 'lora_path' must be provided."
        elif name == self.options.served_model_name:
            wrong = f"The lora adapter '{name}' conflicts with a served base model."
        elif name in self.loras:
            wrong = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
        if wrong:
            return error(wrong, 400, "InvalidUserInput")
        self.loads += 1
        adapter = lora.Adapter(name, self.loads, path)
        try:
            await asyncio.gather(*(core.add_lora(adapter) for core in self.cores))
        except lora.NotFound as failed:
            return error(str(failed), 404, "NotFoundError")
        if self.faults.get("lora_unlisted") is None:
            self.loras[name] = adapter
        return Response(200, f"Success: LoRA adapter '{name}' added successfully.".encode(), "")

    async def unload_lora(self, request: Request) -> Response:
        fields = self.lora_fields(request, "lora_name")
        if isinstance(fields, Response):
            return fields
        (name,) = fields
        if not name:
            return error("'lora_name' needs to be provided to unload a LoRA adapter.", 400, "InvalidUserInput")
        if name not in self.loras:
            return error(f"The lora adapter '{name}' cannot be found.", 404, "NotFoundError")
        if self.faults.get("lora_stays") is None:
            del self.loras[name]
        return Response(200, f"Success: LoRA adapter '{name}' removed successfully.".encode(), "")

    async def tokenize(self, request: Request) -> Response:
        return completions.tokenize(request, self.options)

    async def completion(self, request: Request) -> Response | Stream:
        status = self.faults.number("error_completions", 500)
        if status is not None:
            return error("The server is broken", int(status))
        if any(core.stopping for core in self.cores):
            return error("cannot schedule new futures after shutdown", 500)
        return await completions.answer(self, request)

    async def pooled(self, request: Request) -> Response:
        status = self.faults.number("error_completions", 500)
        if status is not None:
            return error("The server is broken", int(status))
        if any(core.stopping for core in self.cores):
            return error("cannot schedule new futures after shutdown", 500)
        return await pooling.answer(self, request)

    # development mode

    async def server_info(self, request: Request) -> Response:
        config = {
            "model_config": {"model": self.options.model, "enable_sleep_mode": self.options.enable_sleep_mode},
            "parallel_config": {
                "tensor_parallel_size": self.options.tensor_parallel_size,
                "data_parallel_size": self.options.data_parallel_size,
            },
        }
        as_text = request.first("config_format", "text") == "text"
        envs = {name: value for name, value in os.environ.items() if name.startswith("VLLM_") and "KEY" not in name}
        return answer({"vllm_config": str(config) if as_text else config, "vllm_env": envs, "system_env": {}})

    @contextlib.contextmanager
    def operation(self, name: str) -> t.Iterator[None]:
        counts = self.counts
        counts.in_flight[name] = counts.in_flight.get(name, 0) + 1
        begin = time.monotonic()
        try:
            yield
        finally:
            counts.in_flight[name] -= 1
            counts.durations.setdefault(name, []).append(time.monotonic() - begin)

    def bad_mode(self, mode: str) -> Response | None:
        """Level and mode are validated from 0.32 on; 0.31 lets EngineCore stumble over them."""
        if mode in MODES:
            return None
        if self.options.minor == 31:
            return error(f"Call to sleep method failed: Invalid pause mode: {mode}", 500)
        expected = "'abort', 'wait' or 'keep'"
        return invalid("mode", "literal_error", f"Input should be {expected}", mode, expected=expected)

    async def sleep(self, request: Request) -> Response:
        level_text, mode = request.first("level", "1"), request.first("mode", "abort")
        try:
            level = int(level_text)
        except ValueError:
            if self.options.minor == 31:
                return Response(500, b"Internal Server Error", "text/plain; charset=utf-8")
            text = "Input should be a valid integer, unable to parse string as an integer"
            return invalid("level", "int_parsing", text, level_text)
        if level not in LEVELS and self.options.minor >= 32:
            kind, bound = ("greater_than_equal", {"ge": 0}) if level < 0 else ("less_than_equal", {"le": 2})
            word = "greater than or equal to 0" if level < 0 else "less than or equal to 2"
            return invalid("level", kind, f"Input should be {word}", level_text, **bound)
        if (refusal := self.bad_mode(mode)) is not None:
            return refusal
        if self.faults.get("sleep_5xx_before") is not None:
            return error("Call to sleep method failed: Worker failed with error ''", 500)
        # a client that goes away does not stop it, so it runs as a task of its own
        return await asyncio.shield(asyncio.ensure_future(self._sleep(level, mode, request)))

    async def _sleep(self, level: int, mode: str, request: Request) -> Response:
        with self.operation("sleep"):
            while self.faults.get("sleep_hangs") is not None:
                await asyncio.sleep(0.02)
            slow = self.faults.number("sleep_slow", 5)
            if slow is not None:
                await asyncio.sleep(slow)
            await asyncio.gather(*(core.sleep(level, mode) for core in self.cores))
        self.counts.sleep_state = {1: "weights_offloaded", 2: "discard_all"}.get(level, "")
        self.later("dies_after_sleep")
        if self.faults.get("sleep_5xx_after") is not None:
            return error("Call to sleep method failed: Worker failed with error 'Memory usage increased'", 500)
        return answer({"status": "sleeping", "level": level})

    async def wake_up(self, request: Request) -> Response:
        return await asyncio.shield(asyncio.ensure_future(self._wake_up(request.query.get("tags"))))

    async def _wake_up(self, tags: list[str] | None) -> Response:
        with self.operation("wake"):
            slow = self.faults.number("wake_slow", 5)
            if slow is not None:
                await asyncio.sleep(slow)
            if self.faults.get("wake_kills") is not None:
                for core in self.cores:
                    core.kill()
            results = await asyncio.gather(*(core.wake_up(tags) for core in self.cores))
        if all(results):
            self.counts.sleep_state = "awake"
        self.later("dies_after_wake")
        if self.faults.get("wake_5xx_after") is not None:
            return error("Call to wake_up method failed: Worker failed with error ''", 500)
        return answer({"status": "awake" if all(results) else "sleeping", "tags": tags})

    def later(self, fault: str) -> None:
        seconds = self.faults.number(fault, 8)
        if seconds is not None:
            for core in self.cores:
                asyncio.get_running_loop().call_later(seconds, core.kill)

    async def is_sleeping(self, _request: Request) -> Response:
        lie = self.faults.get("is_sleeping_lies")
        for core in self.cores:
            await core.call()
        truth = any(core.is_sleeping() for core in self.cores)
        return answer({"is_sleeping": truth if lie is None else str(lie).lower() == "true"})

    async def release_kv(self, _request: Request) -> Response:
        with self.operation("release_kv_cache_memory"):
            await asyncio.gather(*(core.release_kv() for core in self.cores))
        self.counts.sleep_state = ""
        return answer({"status": "kv_cache_released"})

    async def pause(self, request: Request) -> Response:
        mode = request.first("mode", "abort")
        if mode not in MODES:
            # validated in every version: 0.31 has the same query type here, unlike at /sleep
            expected = "'abort', 'wait' or 'keep'"
            return invalid("mode", "literal_error", f"Input should be {expected}", mode, expected=expected)
        if self.faults.get("pause_ignored") is None:
            try:
                await asyncio.gather(*(core.pause_scheduler(mode, by_user=True) for core in self.cores))
            except (CallFailed, EngineDead) as failed:
                return answer({"error": f"Failed to pause generation: {failed}"}, 500)
        return answer({"status": "paused"})

    async def resume(self, _request: Request) -> Response:
        try:
            for core in self.cores:
                await core.call()
        except (CallFailed, EngineDead) as failed:
            return answer({"error": f"Failed to resume generation: {failed}"}, 500)
        if self.faults.get("resume_ignored") is None:
            for core in self.cores:
                core.resume()
        return answer({"status": "resumed"})

    async def is_paused(self, _request: Request) -> Response:
        try:
            for core in self.cores:
                await core.call()
        except (CallFailed, EngineDead) as failed:
            return answer({"error": f"Failed to fetch pause status: {failed}"}, 500)
        lie = self.faults.get("pause_lies") is not None
        return answer({"is_paused": lie or any(core.pause is not None for core in self.cores)})

    async def abort_requests(self, request: Request) -> Response:
        try:
            body = json.loads(request.body)
        except ValueError:
            return error("Invalid JSON format", 400, "Bad Request")
        if not isinstance(body, dict):
            return error("Request body must be a JSON object", 400, "Bad Request")
        aborted = sum(core.abort_all(counted=False) for core in self.cores)
        return answer({"status": "aborted", "aborted": aborted})

    async def collective_rpc(self, request: Request) -> Response:
        try:
            body = json.loads(request.body)
        except ValueError as failed:
            return error(f"JSON decode error: {failed}", 400, "Bad Request")
        method = body.get("method") if isinstance(body, dict) else None
        if method is None:
            return error("Missing 'method' in request body", 400, "Bad Request")
        if method != "reload_weights":
            for core in self.cores:
                await core.call()
            text = f"Worker failed with error ''Worker' object has no attribute '{method}''"
            return error(f"Call to collective_rpc method failed: {text}, please check the stack trace above", 500)
        await asyncio.gather(*(core.reload_weights() for core in self.cores))
        ranks = self.options.tensor_parallel_size * len(self.cores)
        few = self.faults.number("reload_few_ranks", ranks - 1)
        return answer({"results": [None] * (ranks if few is None else int(few))})

    async def reset_prefix_cache(self, _request: Request) -> Response:
        results = [await core.reset_prefix_cache() for core in self.cores]
        return answer({"success": all(results)})

    async def weight_checker(self, request: Request) -> Response:
        action = json.loads(request.body or b"{}").get("action")
        for core in self.cores:
            await core.call()
        if action == "reset":
            for core in self.cores:
                core.content = "zeroed"
            return answer({"status": "reset"})
        sums = {f"dp{core.index}:pp0:pcp0:tp0:model.embed_tokens.weight": core.content for core in self.cores}
        return answer({"checksums": sums})
