"""/v1/embeddings, /v1/rerank, /v1/score, /classify and /pooling of an engine that was started with --runner pooling.

Shapes as vLLM 0.32.0 gave them. A model that was converted to embed also ranks, by its embeddings; one that classifies
has one label here, and ranks by it.
"""

from __future__ import annotations

import json
import time
import typing as t
import uuid

from . import model
from .completions import ENGINE_DEAD, news, refuse
from .core import EngineDead, Paused, Sequence
from .httpd import Request, Response
from .httpd import answer as reply

if t.TYPE_CHECKING:
    from .api import Api

SIZE = 64
SHAPES = {
    "/v1/embeddings": "embed",
    "/classify": "classify",
    "/pooling": "pooling",
    "/score": "score",
    "/v1/score": "score",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
}


def paths(options: t.Any) -> list[str]:
    """The routes that such an engine has."""
    without = "classify" if options.convert != "classify" else "embed"
    return [path for path, shape in SHAPES.items() if shape != without]


class Wrong(Exception):
    """The body is not what this endpoint takes."""


def inputs(shape: str, body: dict[str, t.Any]) -> list[str]:
    """What is computed, one for each number or vector of the answer."""
    if shape in ("score", "rerank"):
        first, second = ("query", "documents") if shape == "rerank" else ("text_1", "text_2")
        if shape == "score" and "queries" in body:
            first, second = "queries", "documents"
        query, documents = body.get(first), body.get(second)
        documents = [documents] if isinstance(documents, str) else documents
        if not isinstance(query, str) or not isinstance(documents, list) or not documents:
            raise Wrong(f"Input should be a valid string, body.{first}")
        if not all(isinstance(one, str) for one in documents):
            raise Wrong(f"Input should be a valid string, body.{second}.0")
        return [f"{query}\n{one}" for one in documents]
    given = body.get("input")
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list) or not given:
        raise Wrong("Field required, body.input")
    return [json.dumps(given)] if isinstance(given[0], int) else [json.dumps(one) for one in given]


def shaped(shape: str, name: str, texts: list[str], computed: list[t.Any], off: float) -> dict[str, t.Any]:
    used = sum(len(model.encode(one)) or 1 for one in texts)
    usage = {"prompt_tokens": used, "total_tokens": used}
    number = uuid.uuid4().hex[:16]
    if shape in ("score", "rerank"):
        scores = [one * (1 - off) for one in computed]
        if shape == "score":
            data = [{"index": at, "object": "score", "score": one} for at, one in enumerate(scores)]
            return listed(f"score-{number}", name, data, usage)
        results = [
            {"index": at, "document": {"text": text.split("\n", 1)[1], "multi_modal": None}, "relevance_score": one}
            for at, (text, one) in enumerate(zip(texts, scores))
        ]
        results.sort(key=lambda one: -one["relevance_score"])
        return {"id": f"score-{number}", "model": name, "usage": usage, "results": results}
    data = []
    for at, vector in enumerate(computed):
        numbers = [vector[0] + off, *vector[1:]] if any(vector) else vector
        if shape == "embed":
            data.append({"index": at, "object": "embedding", "embedding": numbers})
        elif shape == "classify":
            data.append({"index": at, "label": "LABEL_0", "probs": [abs(numbers[0])], "num_classes": 1})
        else:
            data.append({"index": at, "object": "pooling", "data": [numbers]})
    kind = {"embed": "embd", "classify": "classify", "pooling": "pool"}[shape]
    return listed(f"{kind}-{number}", name, data, usage)


def listed(number: str, name: str, data: list[dict[str, t.Any]], usage: dict[str, int]) -> dict[str, t.Any]:
    usage = {**usage, "completion_tokens": 0}
    whole = {**usage, "prompt_tokens_details": None, "completion_tokens_details": None}
    return {"id": number, "object": "list", "created": int(time.time()), "model": name, "data": data, "usage": whole}


async def answer(api: Api, request: Request) -> Response:
    try:
        body = json.loads(request.body)
        name = body.get("model", api.options.served_model_name)
        texts = inputs(SHAPES[request.path], body)
    except (ValueError, AttributeError, Wrong) as failed:
        return refuse(f"1 validation error:\n  {failed}", 400, "Bad Request", "body")
    if name != api.options.served_model_name:
        text = f"The model `{name}` does not exist. Valid aliases: {api.options.served_model_name}."
        return refuse(text, 404, "NotFoundError", "model")
    shape = SHAPES[request.path]
    core = min(api.cores, key=lambda one: len(one.running) + len(one.waiting))
    computed: list[t.Any] = []
    try:
        for text in texts:
            sequence = Sequence(text, model.encode(text), 0)
            sequence.pools = True
            core.add(sequence)
            ended = await news(api, core, sequence, request)
            if ended == "gone":
                raise ConnectionAbortedError
            if ended == "dead":
                raise EngineDead
            content = core.content_for(sequence)
            scores = shape in ("score", "rerank")
            computed.append(model.score(content, text) if scores else model.vector(content, text, SIZE))
    except Paused:
        return refuse("Generation is paused. Please retry after it resumes.", 503, "ServiceUnavailableError")
    except EngineDead:
        return refuse(ENGINE_DEAD, 500, "InternalServerError")
    off = api.faults.number("vectors_off", 0.1) or 0.0
    return reply(shaped(shape, name, texts, computed, off))
