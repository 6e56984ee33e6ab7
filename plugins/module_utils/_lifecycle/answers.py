# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Questions whose answers show what an engine computes, and how two answers to one question are compared. Pure.

A question is a prompt and the kind of endpoint that it goes to. Prompts are token ids where the endpoint takes them, so
that a tokenizer makes no difference; a stop token is ignored, so that the number of tokens is known beforehand.
"""

from __future__ import annotations

import math
import typing as t
from dataclasses import dataclass, field, replace

from .errors import Surprise

# In the order in which an engine is asked for them: the first one that it has is the one that shows most.
PATHS = {
    "completion": "/v1/completions",
    "chat": "/v1/chat/completions",
    "embedding": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "score": "/v1/score",
    "classification": "/classify",
    "pooling": "/pooling",
}
GENERATES = ("completion", "chat")
PAIRS = ("rerank", "score")
# Top log probabilities that are asked for, until the engine grants them: with two the margin of each choice is known,
# with 0 only the chosen token's own, with None there are token ids alone.
GRADES: tuple[int | None, ...] = (2, 0, None)
# A block of the prefix cache has 16 tokens on most GPUs and 128 on a CPU, and only whole blocks are kept.
LONG_PROMPT = 160
SHORT_PROMPT = 6
_ID = "token_id:"
_WORDS = ["the", "engine", "answers", "what", "it", "was", "asked"]
_PASSAGE = "An engine that has woken with other weights answers as fast as ever, and what it says is wrong. "

# Token ids, a text, {"messages": […]}, or {"query": …, "documents": […]}.
Prompt = t.Union[str, list[int], dict[str, t.Any]]


class Question(t.NamedTuple):
    """A prompt and the kind of endpoint that it goes to, one of PATHS."""

    kind: str
    prompt: Prompt


@dataclass(frozen=True)
class Answer:
    """What came: token ids, their log probabilities and at each position the likeliest tokens; or a vector.

    ``logprobs`` and ``top`` are empty where the engine gives none. ``top`` has [id, log probability] pairs.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[list[float]]] = field(default_factory=list)
    vector: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Tolerance:
    """How far two right answers may lie apart.

    ``logprobs`` is a difference of log probabilities. ``vectors`` is the length of the difference of two vectors, as a
    share of the longer one's length.
    """

    logprobs: float = 0.1
    vectors: float = 0.02


class Verdict(t.NamedTuple):
    """How a comparison went. ``why`` is empty when the answers are the same.

    ``by`` is logprobs, tokens or vectors. ``positions`` counts the tokens (or components) that were compared;
    ``distance`` is the largest difference that was seen. ``tie`` says that the comparison ended early, where two tokens
    were as likely as each other. After a difference ``position`` is the first one, with what was recorded and found.
    """

    by: str
    positions: int
    distance: float = 0.0
    tie: bool = False
    why: str = ""
    position: int | None = None
    recorded: t.Any = None
    found: t.Any = None


def default_prompts(kind: str, room: int) -> list[Prompt]:
    """Two prompts: one that is long enough to be kept in a prefix cache, and one that is not.

    :param room: tokens that a prompt may have at most.
    """
    if kind in PAIRS:
        documents = ["The golden is a recorded answer.", "Rain is expected in the north.", "A lease has an owner."]
        return [
            {"query": "What proves an engine?", "documents": documents},
            {"query": "Who holds it?", "documents": documents[::-1]},
        ]
    if kind == "chat":
        texts = [_PASSAGE * 4, "Say what you are."]
        return [{"messages": [{"role": "user", "content": text}]} for text in texts]
    long = [1 + position * 7 % 97 for position in range(min(LONG_PROMPT, max(room, 1)))]
    return [long, [3 + position * 11 % 89 for position in range(min(SHORT_PROMPT, max(room, 1)))]]


def shaped_prompt(kind: str, tokens: int) -> Prompt:
    """A prompt of this many tokens, of about as many where the endpoint takes no token ids."""
    if kind in PAIRS or kind == "chat":
        text = " ".join(_WORDS[position % len(_WORDS)] for position in range(tokens))
        pair = {"query": "engine", "documents": [text]}
        return pair if kind in PAIRS else {"messages": [{"role": "user", "content": text}]}
    return [1 + position % 97 for position in range(tokens)]


def question(prompt: t.Any, kind: str) -> Question:
    """The question that a prompt is to an engine whose own kind is ``kind``.

    :raises ValueError: it is no prompt, or none that this kind of engine answers; says why.
    """
    if isinstance(prompt, dict):
        return _structured(prompt, kind)
    if isinstance(prompt, list):
        if not prompt or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in prompt):
            raise ValueError("a list of a prompt has token ids, whole numbers from 0 on")
    elif not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(
            "a prompt is a text, a list of token ids, or a mapping with messages, or with query and documents"
        )
    if kind in PAIRS:
        raise ValueError(f"an engine for {kind} takes prompts with query and documents")
    if kind == "chat":
        raise ValueError("an engine that only chats takes prompts with messages")
    return Question(kind, prompt)


def _structured(prompt: dict[str, t.Any], kind: str) -> Question:
    if set(prompt) == {"messages"} and isinstance(prompt["messages"], list) and prompt["messages"]:
        if kind not in GENERATES:
            raise ValueError(f"an engine for {kind} does not chat")
        return Question("chat", prompt)
    documents = prompt.get("documents")
    if set(prompt) == {"query", "documents"} and isinstance(prompt["query"], str) and isinstance(documents, list):
        if not documents or not all(isinstance(one, str) for one in documents):
            raise ValueError("documents of a prompt are a list of texts")
        if kind in GENERATES:
            raise ValueError("an engine that generates text ranks no documents")
        return Question(kind if kind in PAIRS else "rerank", prompt)
    raise ValueError("a mapping as a prompt has messages alone, or query and documents")


def body(asked: Question, model: str, max_tokens: int, grade: int | None, salt: str = "") -> dict[str, t.Any]:
    """What is posted to PATHS[asked.kind]. Generated text shares prefix cache only with requests of the same salt."""
    if asked.kind in GENERATES:
        value: dict[str, t.Any] = {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if salt:
            value["cache_salt"] = salt
        if grade is not None:
            value["return_tokens_as_token_ids"] = True
        if asked.kind == "chat":
            value.update(t.cast("dict[str, t.Any]", asked.prompt))
            return value if grade is None else {**value, "logprobs": True, "top_logprobs": grade}
        value["prompt"] = asked.prompt
        return value if grade is None else {**value, "logprobs": grade}
    if asked.kind == "rerank":
        return {"model": model, **t.cast("dict[str, t.Any]", asked.prompt)}
    if asked.kind == "score":
        pair = t.cast("dict[str, t.Any]", asked.prompt)
        return {"model": model, "text_1": pair["query"], "text_2": pair["documents"]}
    return {"model": model, "input": asked.prompt}


def parse(asked: Question, value: t.Mapping[str, t.Any], model: str, max_tokens: int, where: str) -> tuple[Answer, str]:
    """(answer, what is wrong with it whatever was recorded, "" for nothing) from the JSON of a 200.

    :param where: names the endpoint in the error.
    :raises Surprise: this is no such answer.
    """
    try:
        named = value.get("model")
        stranger = f"model '{named}' answers, not '{model}'" if named not in (None, model) else ""
        if asked.kind in GENERATES:
            answer, wrong = _parse_tokens(asked.kind, value["choices"][0], max_tokens)
        else:
            answer, wrong = _parse_vector(asked.kind, value)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as exc:
        what = "completion" if asked.kind in GENERATES else asked.kind
        raise Surprise(f"{where} answered 200 without a {what}: {str(value)[:120]!r}", entry="answer-unusable") from exc
    return answer, stranger or wrong


def _number(value: t.Any) -> float:
    if value is None:
        return math.nan  # what a JSON writer makes of NaN
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return round(float(value), 7)


def _whole(value: t.Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no token id")
    return value


def _parse_tokens(kind: str, choice: t.Mapping[str, t.Any], max_tokens: int) -> tuple[Answer, str]:
    tokens = [_whole(one) for one in choice["token_ids"]]
    found = choice.get("logprobs") or {}
    if kind == "chat":
        entries = found.get("content") or []
        logprobs = [_number(one["logprob"]) for one in entries]
        top = [[(one["token"], one["logprob"]) for one in entry["top_logprobs"]] for entry in entries]
    else:
        logprobs = [_number(one) for one in found.get("token_logprobs") or []]
        top = [list(one.items()) for one in found.get("top_logprobs") or []]
    if logprobs and len(logprobs) != len(tokens):
        raise ValueError("as many log probabilities as tokens are owed")
    ranked = [sorted(([_id_of(name), _number(one)] for name, one in entry), key=lambda pair: -pair[1]) for entry in top]
    usable = len(ranked) == len(tokens) and all(len(entry) > 1 for entry in ranked)
    answer = Answer(tokens, logprobs, [entry[:2] for entry in ranked] if usable else [])
    reason = choice["finish_reason"]
    if reason != "length" or len(tokens) != max_tokens:
        return answer, f"it owed {max_tokens} token(s) and gave {len(tokens)} with finish_reason {reason!r}"
    if not all(math.isfinite(one) for one in logprobs):
        return answer, "its log probabilities are no numbers (NaN)"
    return answer, ""


def _id_of(name: t.Any) -> int:
    if not isinstance(name, str) or not name.startswith(_ID):
        raise ValueError(f"{name!r} is no token id")
    return int(name[len(_ID) :])


def _parse_vector(kind: str, value: t.Mapping[str, t.Any]) -> tuple[Answer, str]:
    if kind == "rerank":
        numbers = [_number(one["relevance_score"]) for one in sorted(value["results"], key=_index)]
    elif kind == "score":
        numbers = [_number(one["score"]) for one in sorted(value["data"], key=_index)]
    else:
        name = {"embedding": "embedding", "classification": "probs", "pooling": "data"}[kind]
        numbers = list(_flat(value["data"][0][name]))
    if not numbers:
        raise ValueError("it has no number")
    answer = Answer(vector=numbers)
    if not all(math.isfinite(one) for one in numbers):
        return answer, "its numbers are none (NaN)"
    return answer, "" if any(numbers) else "all of its numbers are 0"


def _index(entry: t.Mapping[str, t.Any]) -> int:
    return _whole(entry["index"])


def _flat(value: t.Any) -> t.Iterator[float]:
    if not isinstance(value, list):
        yield _number(value)
        return
    for one in value:
        yield from _flat(one)


def is_zeros(tokens: t.Sequence[int]) -> bool:
    """What an engine says whose weights are gone."""
    return len(tokens) > 0 and not any(tokens)


def nonsense(answers: t.Sequence[Answer]) -> str:
    """Why these answers to different questions can be no golden, "" for no reason."""
    said = [one.tokens for one in answers if one.tokens]
    if any(is_zeros(one) for one in said):
        return "every token is id 0, as from an engine whose weights are gone"
    if said and len({token for one in said for token in one}) == 1:
        return f"every token of every answer is id {said[0][0]}"
    vectors = [one.vector for one in answers if one.vector]
    if any(not any(one) for one in vectors):
        return "all numbers of an answer are 0"
    if len(vectors) > 1 and all(one == vectors[0] for one in vectors):
        return "the answers to different questions are the same"
    return ""


def first_tokens(answer: Answer, count: int) -> Answer:
    """The answer that would have ended after so many tokens; a vector as it is."""
    return replace(answer, tokens=answer.tokens[:count], logprobs=answer.logprobs[:count], top=answer.top[:count])


def compare(recorded: Answer, found: Answer, tolerance: Tolerance) -> Verdict:
    """Whether an answer is the recorded one.

    Tokens: ids equal, and log probabilities within the tolerance. The same weights may choose another token where two
    are as likely as each other, since sums in bf16 depend on what else is in the batch. So a differing token is none
    where it was the recorded runner-up, with a margin and a log probability within the tolerance; what follows then
    answers another question, and is not compared. Without log probabilities on both sides every token counts.

    Vectors: by the length of their difference.
    """
    if recorded.vector or found.vector:
        return _compare_vectors(recorded.vector, found.vector, tolerance.vectors)
    by = "logprobs" if recorded.logprobs and found.logprobs else "tokens"
    distance = 0.0
    for position, token in enumerate(recorded.tokens):
        other = found.tokens[position] if position < len(found.tokens) else None
        values = _values(recorded, position), _values(found, position)
        if token != other:
            if by == "logprobs" and other is not None and _tied(recorded, found, position, tolerance.logprobs):
                return Verdict(by, position, distance, tie=True)
            return Verdict(by, position, distance, False, _say(*values), position, *values)
        if by == "logprobs":
            apart = abs(recorded.logprobs[position] - found.logprobs[position])
            if not apart <= tolerance.logprobs:  # also for NaN
                why = f"{_say(*values)}, {apart:.4g} apart where {tolerance.logprobs:g} is allowed"
                return Verdict(by, position, apart, False, why, position, *values)
            distance = max(distance, apart)
    if len(found.tokens) > len(recorded.tokens):
        position = len(recorded.tokens)
        values = None, _values(found, position)
        return Verdict(by, position, distance, False, _say(*values), position, *values)
    return Verdict(by, len(recorded.tokens), round(distance, 7))


def _values(answer: Answer, position: int) -> dict[str, t.Any] | None:
    if position >= len(answer.tokens):
        return None
    logprob = answer.logprobs[position] if position < len(answer.logprobs) else None
    return {"token": answer.tokens[position], "logprob": logprob}


def _say(recorded: dict[str, t.Any] | None, found: dict[str, t.Any] | None) -> str:
    def words(value: dict[str, t.Any] | None) -> str:
        if value is None:
            return "no token"
        return f"token {value['token']}" + (f" (log probability {value['logprob']:.4f})" if value["logprob"] else "")

    return f"{words(recorded)} was recorded, {words(found)} came"


def _tied(recorded: Answer, found: Answer, position: int, tolerance: float) -> bool:
    """Whether the token that came was the recorded runner-up, as likely then as the chosen one and as it is now."""
    chosen, now = recorded.logprobs[position], found.logprobs[position]
    ranked = recorded.top[position] if position < len(recorded.top) else []
    return any(
        token == found.tokens[position] and abs(chosen - logprob) <= tolerance and abs(now - logprob) <= tolerance
        for token, logprob in ranked
    )


def _compare_vectors(recorded: list[float], found: list[float], tolerance: float) -> Verdict:
    if len(recorded) != len(found):
        why = f"{len(recorded)} number(s) were recorded, {len(found)} came"
        return Verdict("vectors", 0, 0.0, False, why, min(len(recorded), len(found)), len(recorded), len(found))
    length = max(math.hypot(*recorded), math.hypot(*found))
    apart = math.hypot(*(one - other for one, other in zip(recorded, found))) / length if length else 0.0
    if apart <= tolerance:
        return Verdict("vectors", len(recorded), round(apart, 7))
    position = max(range(len(recorded)), key=lambda at: abs(recorded[at] - found[at]))
    why = (
        f"the vectors lie {apart:.4g} of their length apart where {tolerance:g} is allowed, most of all at {position}: "
        f"{recorded[position]:.6g} was recorded, {found[position]:.6g} came"
    )
    return Verdict("vectors", len(recorded), apart, False, why, position, recorded[position], found[position])
