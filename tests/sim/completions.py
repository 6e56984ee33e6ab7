"""/v1/completions, /v1/chat/completions and /tokenize: shapes of answers and streams."""

from __future__ import annotations

import asyncio
import json
import time
import typing as t
import uuid

from . import model
from .core import Core, EngineDead, Paused, Sequence
from .httpd import Request, Response, Stream
from .httpd import answer as reply

if t.TYPE_CHECKING:
    from .api import Api

PATHS = ("/v1/completions", "/v1/chat/completions")
FINGERPRINT = "vllm-{version}-51e51e00"
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def refuse(message: str, status: int, kind: str, param: str | None = None) -> Response:
    return reply({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)


def tokenize(request: Request, options: t.Any) -> Response:
    ids = model.encode(str(json.loads(request.body or b"{}").get("prompt", "")))
    return reply({"count": len(ids), "max_model_len": options.max_model_len, "tokens": ids, "token_strs": None})


class Job:
    """A parsed request, and what the shapes of its answer need."""

    def __init__(self, body: dict[str, t.Any], chat: bool, options: t.Any) -> None:
        self.chat = chat
        self.options = options
        self.model = str(body.get("model", options.served_model_name))
        self.stream = bool(body.get("stream"))
        self.usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.ids = bool(body.get("return_token_ids"))
        wanted = body.get("logprobs")
        self.logprobs = wanted is not None and wanted is not False  # 0 is wanted: the chosen token's own
        self.top = int((body.get("top_logprobs") if chat else wanted) or 0) if self.logprobs else 0
        self.named_by_id = bool(body.get("return_tokens_as_token_ids"))
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex[:16]}"
        self.created = int(time.time())
        if chat:
            prompt = "\n".join(f"{message.get('role')}: {message.get('content')}" for message in body["messages"])
        else:
            prompt = body.get("prompt", "")
        self.prompt = prompt if isinstance(prompt, str) else json.dumps(prompt)
        self.salt = str(body.get("cache_salt") or "")
        flat = isinstance(prompt, list) and all(isinstance(item, int) for item in prompt)
        self.prompt_ids = prompt if flat else model.encode(self.prompt)
        room = options.max_model_len - len(self.prompt_ids)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or (room if chat else 16)
        self.max_tokens = min(int(limit), room)

    def head(self, kind: str) -> dict[str, t.Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    @property
    def fingerprint(self) -> str:
        return FINGERPRINT.format(version=self.options.version)

    def usage_of(self, made: int) -> dict[str, t.Any]:
        prompt = len(self.prompt_ids)
        return {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}

    def name(self, number: int) -> str:
        return f"token_id:{number}" if self.named_by_id else model.piece(number)

    def ranked(self, one: model.Token) -> list[tuple[str, float]]:
        """The likeliest tokens, of which two are known here, and the chosen one."""
        chosen, other = (one.logprob, one.id), (round(one.logprob - one.margin, 4), one.other)
        best = sorted([chosen, other], reverse=True)[: self.top]
        return [(self.name(number), logprob) for logprob, number in dict.fromkeys([chosen, *best])]

    def logprobs_of(self, tokens: list[model.Token], offset: int) -> dict[str, t.Any] | None:
        if not self.logprobs:
            return None
        if self.chat:
            content = [
                {
                    "token": self.name(one.id),
                    "logprob": one.logprob,
                    "bytes": list(one.text.encode()),
                    "top_logprobs": [
                        {"token": name, "logprob": logprob, "bytes": list(name.encode())}
                        for name, logprob in (self.ranked(one) if self.top else [])
                    ],
                }
                for one in tokens
            ]
            return {"content": content}
        offsets = []
        for one in tokens:
            offsets.append(offset)
            offset += len(self.name(one.id))
        return {
            "text_offset": offsets,
            "token_logprobs": [one.logprob for one in tokens],
            "tokens": [self.name(one.id) for one in tokens],
            "top_logprobs": [dict(self.ranked(one)) for one in tokens],
        }

    def whole(self, tokens: list[model.Token], reason: str) -> dict[str, t.Any]:
        text = "".join(one.text for one in tokens)
        ids = [one.id for one in tokens] if self.ids else None
        tail = {"finish_reason": reason, "stop_reason": None, "token_ids": ids}
        prompt_ids = self.prompt_ids if self.ids else None
        usage = {**self.usage_of(len(tokens)), "prompt_tokens_details": None, "completion_tokens_details": None}
        logprobs = self.logprobs_of(tokens, 0)
        if self.chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            choice = {"index": 0, "message": message, "logprobs": logprobs, **tail}
            more = {"prompt_logprobs": None, "prompt_token_ids": prompt_ids}
        else:
            choice = {"index": 0, "text": text, "logprobs": logprobs, **tail, "prompt_logprobs": None}
            choice["prompt_token_ids"] = prompt_ids
            more = {}
        return {
            **self.head("chat.completion" if self.chat else "text_completion"),
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": usage,
            **more,
            "kv_transfer_params": None,
        }

    def chunk(self, token: model.Token | None, offset: int, first: bool, reason: str | None) -> bytes:
        tokens = [token] if token else []
        ids = [one.id for one in tokens] if self.ids else None
        logprobs = self.logprobs_of(tokens, offset) if tokens else None
        text = token.text if token else ""
        if self.chat:
            choice: dict[str, t.Any] = {"index": 0, "delta": {"content": text}, "logprobs": logprobs}
            choice["finish_reason"] = reason
            if reason is not None:
                choice["stop_reason"] = None
            choice["token_ids"] = ids
        else:
            choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": None}
            choice["prompt_token_ids"] = self.prompt_ids if self.ids and first else None
            choice["token_ids"] = ids
        event = {**self.head("chat.completion.chunk" if self.chat else "text_completion"), "choices": [choice]}
        if reason is not None and not self.usage:
            event["system_fingerprint"] = self.fingerprint
        return sse(event)

    def opening(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        ids = self.prompt_ids if self.ids else None
        return sse({**self.head("chat.completion.chunk"), "choices": [choice], "prompt_token_ids": ids})


def sse(event: dict[str, t.Any]) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def parse(request: Request, options: t.Any, adapters: t.Container[str], refuse_logprobs: bool) -> Job | Response:
    try:
        body = json.loads(request.body)
        if not isinstance(body, dict):
            raise ValueError("not an object")
    except ValueError as failed:
        return refuse(f"1 validation error:\n  JSON decode error: {failed}", 400, "Bad Request", "body")
    chat = "messages" in body and request.path != "/v1/completions"
    if request.path == "/v1/chat/completions" and not isinstance(body.get("messages"), list):
        return refuse("1 validation error:\n  Field required", 400, "Bad Request", "body.messages")
    name = body.get("model", options.served_model_name)
    if name != options.served_model_name and name not in adapters:
        text = f"The model `{name}` does not exist. Valid aliases: {options.served_model_name}."
        return refuse(text, 404, "NotFoundError", "model")
    limit = body.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        return refuse(f"max_tokens must be at least 1, got {limit}.", 400, "BadRequestError", "max_tokens")
    if limit is not None and limit > options.max_model_len:
        text = f"max_tokens={limit} cannot be greater than max_model_len={options.max_model_len}."
        return refuse(text, 400, "BadRequestError", "max_tokens")
    job = Job(body, chat, options)
    if job.top > options.max_logprobs or (job.logprobs and refuse_logprobs):
        text = f"Requested sample logprobs of {job.top}, which is greater than max allowed: {options.max_logprobs}"
        return refuse(f"{text} (parameter=logprobs, value={job.top})", 400, "BadRequestError", "logprobs")
    return job


async def answer(api: Api, request: Request) -> Response | Stream:
    refuse_logprobs = api.faults.get("logprobs_refused") is not None
    job = parse(request, api.options, api.loras, refuse_logprobs)
    if isinstance(job, Response):
        return job
    core = min(api.cores, key=lambda one: len(one.running) + len(one.waiting))
    sequence = Sequence(job.prompt, job.prompt_ids, job.max_tokens, api.loras.get(job.model), job.salt)
    try:
        core.add(sequence)
        api.load += 1
        if not job.stream:
            return await whole(api, core, job, sequence, request)
    except Paused:
        return refuse("Generation is paused. Please retry after it resumes.", 503, "ServiceUnavailableError")
    except EngineDead:
        return refuse(ENGINE_DEAD, 500, "InternalServerError")
    return Stream(events(api, core, job, sequence, request))


async def news(api: Api, core: Core, sequence: Sequence, request: Request) -> list[model.Token] | str:
    """The next tokens or the finish reason; "gone" when the client has closed the connection."""
    arrival = asyncio.ensure_future(sequence.news.get())
    gone = asyncio.ensure_future(request.gone.wait())
    await asyncio.wait([arrival, gone], return_when=asyncio.FIRST_COMPLETED)
    if not arrival.done() and api.faults.get("disconnect_hidden") is not None:
        await asyncio.wait([arrival])
    gone.cancel()
    if arrival.done():
        return arrival.result()
    arrival.cancel()
    core.drop(sequence)
    return "gone"


async def whole(api: Api, core: Core, job: Job, sequence: Sequence, request: Request) -> Response:
    tokens: list[model.Token] = []
    try:
        while isinstance(piece := await news(api, core, sequence, request), list):
            tokens += piece
    finally:
        api.load -= 1
    if piece == "gone":
        raise ConnectionAbortedError
    if piece == "dead":
        return refuse(ENGINE_DEAD, 500, "InternalServerError")
    return reply(job.whole(tokens, piece))


async def events(api: Api, core: Core, job: Job, sequence: Sequence, request: Request) -> t.AsyncIterator[bytes]:
    """One event for a token. The last token waits for the finish reason, since both share an event."""
    held: list[model.Token] = []
    made = offset = 0
    ended = ""
    try:
        if job.chat:
            yield job.opening()
        while not ended:
            piece = await news(api, core, sequence, request)
            if isinstance(piece, str):
                ended = piece
            else:
                held += piece
            full = made + len(held) >= job.max_tokens and not ended
            ready, held = (held[:-1], held[-1:]) if full else (held, [])
            if ended and ended not in ("gone", "dead") and ready:
                ready, held = ready[:-1], ready[-1:]
            block = []
            for one in ready:
                block.append(job.chunk(one, offset, made == 0, None))
                made += 1
                offset += len(one.text)
            if block:
                yield b"".join(block)
    finally:
        api.load -= 1
        if not ended:
            core.drop(sequence)
    if ended == "gone":
        raise ConnectionAbortedError
    if ended == "dead":
        failure = {"message": ENGINE_DEAD, "type": "InternalServerError", "param": None, "code": 500}
        yield sse({"error": failure})
    else:
        yield job.chunk(held[0] if held else None, offset, made == 0, ended)
        if job.usage:
            total = made + len(held)
            head = job.head("chat.completion.chunk" if job.chat else "text_completion")
            yield sse({**head, "choices": [], "usage": job.usage_of(total), "system_fingerprint": job.fingerprint})
    yield b"data: [DONE]\n\n"
