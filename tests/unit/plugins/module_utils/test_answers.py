# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Questions, answers and their comparison: truth tables. The JSON is as vLLM 0.32.0 gave it."""

from __future__ import annotations

import math

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import answers
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.answers import Answer, Question, Tolerance
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import Surprise

ALLOWED = Tolerance(logprobs=0.1, vectors=0.02)
IDS = Question("completion", [1, 2, 3, 4])


def told(tokens, logprobs=(), top=()):
    return Answer(list(tokens), list(logprobs), [list(map(list, entry)) for entry in top])


# As recorded: the second choice was between two tokens that were as likely as each other, the others were clear.
RECORDED = told(
    [50, 58, 292],
    [-2.9, -3.2, -3.3],
    [[(50, -2.9), (51, -4.0)], [(58, -3.2), (60, -3.25)], [(292, -3.3), (293, -3.6)]],
)
CASES = [
    # found, same, by, positions, tie, where it differs
    ("the same", RECORDED, True, "logprobs", 3, False, None),
    ("within the tolerance", told([50, 58, 292], [-2.95, -3.25, -3.21]), True, "logprobs", 3, False, None),
    ("another log probability", told([50, 58, 292], [-2.9, -3.31, -3.3]), False, "logprobs", 1, False, 1),
    ("one that is no number", told([50, 58, 292], [-2.9, math.nan, -3.3]), False, "logprobs", 1, False, 1),
    ("the runner-up of a near tie", told([50, 60, 7], [-2.9, -3.25, -9.0]), True, "logprobs", 1, True, None),
    ("that runner-up, less likely now", told([50, 60, 7], [-2.9, -3.5, -9.0]), False, "logprobs", 1, False, 1),
    ("a third token in a near tie", told([50, 61, 7], [-2.9, -3.25, -9.0]), False, "logprobs", 1, False, 1),
    ("the runner-up of a clear choice", told([50, 58, 293], [-2.9, -3.2, -3.6]), False, "logprobs", 2, False, 2),
    ("another first token", told([7, 58, 292], [-2.9, -3.2, -3.3]), False, "logprobs", 0, False, 0),
    ("token ids alone", told([50, 58, 292]), True, "tokens", 3, False, None),
    ("token ids alone, in a near tie", told([50, 60, 292]), False, "tokens", 1, False, 1),
    ("too few", told([50, 58], [-2.9, -3.2]), False, "logprobs", 2, False, 2),
    ("too many", told([50, 58, 292, 1], [-2.9, -3.2, -3.3, -1.0]), False, "logprobs", 3, False, 3),
    ("none", told([]), False, "tokens", 0, False, 0),
    ("zeros", told([0, 0, 0], [-6.2, -6.2, -6.2]), False, "logprobs", 0, False, 0),
]


@pytest.mark.parametrize(
    ("found", "same", "by", "positions", "tie", "position"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_compare_tokens(found, same, by, positions, tie, position):
    verdict = answers.compare(RECORDED, found, ALLOWED)
    assert (not verdict.why, verdict.by, verdict.positions, verdict.tie) == (same, by, positions, tie)
    assert verdict.position == position
    if not same:
        assert verdict.recorded != verdict.found
        assert "was recorded" in verdict.why


def test_a_difference_names_both_values():
    verdict = answers.compare(RECORDED, told([50, 0, 0], [-2.9, -6.2383, -6.2383]), ALLOWED)
    assert verdict.recorded == {"token": 58, "logprob": -3.2}
    assert verdict.found == {"token": 0, "logprob": -6.2383}
    assert verdict.why == ("token 58 (log probability -3.2000) was recorded, token 0 (log probability -6.2383) came")


def test_without_recorded_log_probabilities_every_token_counts():
    plain = told(RECORDED.tokens)
    assert answers.compare(plain, RECORDED, ALLOWED).by == "tokens"
    assert answers.compare(plain, told([50, 60, 7], [-2.9, -3.25, -9.0]), ALLOWED).position == 1


def test_without_recorded_runners_up_there_are_no_near_ties():
    verdict = answers.compare(told(RECORDED.tokens, RECORDED.logprobs), told([50, 60, 7], [-2.9, -3.25, -9.0]), ALLOWED)
    assert verdict.position == 1


def test_the_largest_distance_is_told():
    verdict = answers.compare(RECORDED, told([50, 58, 292], [-2.92, -3.2, -3.37]), ALLOWED)
    assert verdict.distance == pytest.approx(0.07)


@pytest.mark.parametrize(
    ("recorded", "found", "same", "position"),
    [
        ([0.6, 0.8], [0.6, 0.8], True, None),
        ([0.6, 0.8], [0.6, 0.81], True, None),
        ([0.6, 0.8], [0.6, 0.83], False, 1),
        ([0.6, 0.8], [0.9, 0.8], False, 0),
        ([0.6, 0.8], [0.0, 0.0], False, 1),
        ([0.6, 0.8], [-0.6, -0.8], False, 1),
        ([0.6, 0.8], [0.6, math.nan], False, None),
        ([6e8, 8e8], [6e8, 8.1e8], True, None),
        ([0.6, 0.8], [0.6], False, 1),
        ([0.6, 0.8], [], False, 0),
        ([0.0], [0.0], True, None),
    ],
)
def test_compare_vectors(recorded, found, same, position):
    verdict = answers.compare(Answer(vector=recorded), Answer(vector=found), ALLOWED)
    assert verdict.by == "vectors"
    assert (not verdict.why) is same
    if position is not None:
        assert verdict.position == position


def completion(**changes):
    choice = {
        "index": 0,
        "text": " that",
        "token_ids": [360, 122],
        "finish_reason": "length",
        "logprobs": {
            "token_logprobs": [-5.6585, -5.6159],
            "tokens": ["token_id:360", "token_id:122"],
            "top_logprobs": [
                {"token_id:360": -5.6585, "token_id:308": -5.7054},
                {"token_id:122": -5.6159, "token_id:413": -5.6159},
            ],
        },
    }
    return {"model": "tiny", "choices": [{**choice, **changes}]}


def parse(value, asked=IDS, tokens=2):
    return answers.parse(asked, value, "tiny", tokens, "here")


def test_parse_a_completion():
    answer, wrong = parse(completion())
    assert wrong == ""
    assert answer == told(
        [360, 122], [-5.6585, -5.6159], [[(360, -5.6585), (308, -5.7054)], [(122, -5.6159), (413, -5.6159)]]
    )


def test_parse_a_chat():
    entries = [
        {"token": "token_id:457", "logprob": -5.6, "top_logprobs": [{"token": "token_id:457", "logprob": -5.6}] * 2},
        {"token": "token_id:22", "logprob": -5.5, "top_logprobs": [{"token": "token_id:22", "logprob": -5.5}] * 2},
    ]
    value = completion(token_ids=[457, 22], logprobs={"content": entries}, message={"content": "6"})
    answer, wrong = parse(value, Question("chat", {"messages": [{"role": "user", "content": "x"}]}))
    assert (answer.tokens, answer.logprobs, wrong) == ([457, 22], [-5.6, -5.5], "")
    assert answer.top[0] == [[457, -5.6], [457, -5.6]]


@pytest.mark.parametrize("found", [None, {}, {"token_logprobs": None}])
def test_parse_a_completion_without_log_probabilities(found):
    answer, wrong = parse(completion(logprobs=found))
    assert (answer, wrong) == (told([360, 122]), "")


def test_top_log_probabilities_of_one_token_are_no_margin():
    found = {"token_logprobs": [-1.0, -2.0], "top_logprobs": [{"token_id:360": -1.0}, {"token_id:122": -2.0}]}
    assert parse(completion(logprobs=found))[0] == told([360, 122], [-1.0, -2.0])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"finish_reason": "abort"}, "finish_reason 'abort'"),
        ({"finish_reason": "stop"}, "finish_reason 'stop'"),
        ({"finish_reason": None}, "finish_reason None"),
        ({"token_ids": [360], "logprobs": None}, "owed 2 token(s) and gave 1"),
        ({"token_ids": [], "logprobs": None}, "owed 2 token(s) and gave 0"),
        ({"logprobs": {"token_logprobs": [-1.0, None]}}, "NaN"),
        ({"logprobs": {"token_logprobs": [-1.0, math.nan]}}, "NaN"),
        ({"logprobs": {"token_logprobs": [-1.0, -math.inf]}}, "NaN"),
    ],
)
def test_an_answer_that_is_wrong_whatever_was_recorded(changes, says):
    assert says in parse(completion(**changes))[1]


def test_an_answer_of_another_model():
    assert parse({**completion(), "model": "other"})[1] == "model 'other' answers, not 'tiny'"
    assert parse({**completion(), "model": None})[1] == ""


VECTORS = [
    ("embedding", {"data": [{"index": 0, "object": "embedding", "embedding": [0.6, -0.8]}]}, [0.6, -0.8]),
    ("classification", {"data": [{"index": 0, "probs": [0.25, 0.75], "label": "x"}]}, [0.25, 0.75]),
    ("pooling", {"data": [{"index": 0, "data": [[1, 2], [3, 4]]}]}, [1, 2, 3, 4]),
    ("score", {"data": [{"index": 1, "score": 0.5}, {"index": 0, "score": 0.25}]}, [0.25, 0.5]),
    (
        "rerank",
        {"results": [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]},
        [0.1, 0.9],
    ),
]


@pytest.mark.parametrize(("kind", "value", "vector"), VECTORS, ids=[case[0] for case in VECTORS])
def test_parse_vectors(kind, value, vector):
    answer, wrong = parse({"model": "tiny", **value}, Question(kind, "x"))
    assert (answer, wrong) == (Answer(vector=vector), "")


@pytest.mark.parametrize(
    ("vector", "says"),
    [([0.0, 0], "all of its numbers are 0"), ([0.5, None], "NaN"), ([0.5, math.nan], "NaN"), ([math.inf], "NaN")],
)
def test_vectors_that_are_none(vector, says):
    assert says in parse({"data": [{"embedding": vector}]}, Question("embedding", "x"))[1]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("completion", {}),
        ("completion", {"choices": []}),
        ("completion", {"choices": None}),
        ("completion", {"choices": [None]}),
        ("completion", completion(token_ids=None)),
        ("completion", completion(token_ids=["360", "122"])),
        ("completion", completion(token_ids=[True, False])),
        ("completion", completion(logprobs={"token_logprobs": [-1.0]})),
        ("completion", completion(logprobs={"token_logprobs": ["a", "b"]})),
        ("completion", completion(logprobs={"token_logprobs": [-1.0, -1.0], "top_logprobs": [{" that": -1.0}]})),
        ("completion", completion(logprobs=[1])),
        ("chat", completion(logprobs={"content": [{"token": "x"}]})),
        ("embedding", {"data": []}),
        ("embedding", {"data": [{"embedding": []}]}),
        ("embedding", {"data": [{"embedding": "AAAA"}]}),
        ("embedding", {"data": [{"embedding": [True]}]}),
        ("rerank", {"results": [{"index": "0", "relevance_score": 1}]}),
        ("score", {"data": [{"index": 0}]}),
    ],
)
def test_what_is_no_answer(kind, value):
    with pytest.raises(Surprise, match="here answered 200 without a"):
        parse(value, Question(kind, "x"))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([RECORDED], ""),
        ([RECORDED, told([7, 8])], ""),
        ([told([0, 0]), told([7, 8])], "every token is id 0"),
        ([told([9, 9]), told([9, 9])], "every token of every answer is id 9"),
        ([told([9, 9]), told([9, 8])], ""),
        ([Answer(vector=[0.0, 0.0])], "all numbers of an answer are 0"),
        ([Answer(vector=[0.1]), Answer(vector=[0.1])], "different questions are the same"),
        ([Answer(vector=[0.1])], ""),
    ],
)
def test_nonsense(found, says):
    assert says in answers.nonsense(found)
    assert bool(answers.nonsense(found)) is bool(says)


@pytest.mark.parametrize(
    ("prompt", "kind", "wanted"),
    [
        ([1, 2], "completion", "completion"),
        ("text", "completion", "completion"),
        ({"messages": [{}]}, "completion", "chat"),
        ({"messages": [{}]}, "chat", "chat"),
        ([1, 2], "embedding", "embedding"),
        ("text", "pooling", "pooling"),
        ({"query": "a", "documents": ["b"]}, "rerank", "rerank"),
        ({"query": "a", "documents": ["b"]}, "score", "score"),
        ({"query": "a", "documents": ["b"]}, "embedding", "rerank"),
        ([], "completion", None),
        ("", "completion", None),
        (" ", "completion", None),
        ([-1], "completion", None),
        ([True], "completion", None),
        (["a"], "completion", None),
        ([[1, 2]], "embedding", None),
        (7, "completion", None),
        (None, "completion", None),
        ({}, "completion", None),
        ({"messages": []}, "completion", None),
        ({"messages": [{}], "model": "x"}, "completion", None),
        ({"messages": [{}]}, "embedding", None),
        ({"query": "a", "documents": []}, "rerank", None),
        ({"query": "a", "documents": [1]}, "rerank", None),
        ({"query": "a", "documents": ["b"]}, "completion", None),
        ("text", "rerank", None),
        ([1], "chat", None),
    ],
)
def test_questions(prompt, kind, wanted):
    if wanted is None:
        with pytest.raises(ValueError, match=r"prompt|engine|documents|list"):
            answers.question(prompt, kind)
    else:
        assert answers.question(prompt, kind) == Question(wanted, prompt)


@pytest.mark.parametrize("kind", answers.PATHS)
@pytest.mark.parametrize("room", [1, 20, 4000])
def test_default_prompts_are_right_ones(kind, room):
    prompts = answers.default_prompts(kind, room)
    assert len(prompts) == 2
    for prompt in prompts:
        assert answers.question(prompt, kind).kind == kind
    if isinstance(prompts[0], list):
        assert [len(one) for one in prompts] == [min(160, room), min(6, room)]
        assert room < 4000 or len(prompts[0]) > 128, "a block of the prefix cache on a CPU has 128"
    assert answers.question(answers.shaped_prompt(kind, 5), kind).kind == kind


@pytest.mark.parametrize("grade", answers.GRADES)
def test_bodies(grade):
    body = answers.body(IDS, "tiny", 4, grade)
    assert (body["prompt"], body["max_tokens"], body["temperature"], body["seed"]) == ([1, 2, 3, 4], 4, 0, 0)
    assert body["ignore_eos"] and body["return_token_ids"]
    assert body.get("logprobs") == grade
    chat = answers.body(Question("chat", {"messages": [1]}), "tiny", 4, grade)
    assert "prompt" not in chat
    assert (chat.get("logprobs"), chat.get("top_logprobs")) == ((None, None) if grade is None else (True, grade))
    assert answers.body(Question("score", {"query": "a", "documents": ["b"]}), "m", 1, None) == {
        "model": "m",
        "text_1": "a",
        "text_2": ["b"],
    }
    assert answers.body(Question("embedding", [1]), "m", 1, None) == {"model": "m", "input": [1]}
