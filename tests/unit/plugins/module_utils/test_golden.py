# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Goldens as data: whole, read back as they were, and refused when they are not; from whom one may be recorded."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import answers, golden, golden_change
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.answers import Answer, Question, Tolerance
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import (
    Refused,
    Surprise,
    UnknownState,
    UsageError,
)
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.golden import Golden, Proof, Subject
from ansible_collections.baremetal.vllm.tests.unit.plugins.module_utils import lifecycle_factory as made

SUBJECT = Subject(f"sha256:{'a' * 64}", "full", "0.33.0", "org/Model 8B", ["sql"], "bfloat16")
TOP = [[[7, -1.0], [8, -2.0]], [[9, -1.5], [3, -1.51]]]
TOKENS = Golden(
    SUBJECT,
    "completion",
    2,
    2,
    Tolerance(),
    [Question("completion", [1, 2]), Question("chat", {"messages": [{"role": "user", "content": "x"}]})],
    [Answer([7, 9], [-1.0, -1.5], TOP), Answer([7, 3], [-1.0, -1.51], TOP)],
    {"at": 1.0, "host": "h1", "engine": "chat"},
)
VECTORS = Golden(
    SUBJECT,
    "embedding",
    16,
    None,
    Tolerance(vectors=0.5),
    [Question("embedding", [1]), Question("rerank", {"query": "a", "documents": ["b"]})],
    [Answer(vector=[0.5, -0.5]), Answer(vector=[0.25])],
    {},
)
WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@pytest.mark.parametrize("one", [TOKENS, VECTORS])
def test_a_golden_comes_back_as_it_was(one):
    value = json.loads(json.dumps(one.asdict()))
    again = Golden.from_dict(value, "here")
    assert again == one
    assert again.asdict() == one.asdict()
    assert one.key == value["key"] == f"org_Model_8B-{one.key[-20:]}"


def test_what_it_can_be_compared_by():
    assert TOKENS.compared_by == "logprobs"
    assert VECTORS.compared_by == "vectors"
    assert Golden(SUBJECT, "chat", 2, None, Tolerance(), [], []).compared_by == "tokens"


def test_another_subject_has_another_key():
    keys = {SUBJECT.key}
    for change in (
        {"weights": f"sha256:{'b' * 64}"},
        {"runtime_version": "0.33.1"},
        {"served_model": "org/Model 9B"},
        {"adapters": []},
        {"dtype": "float16"},
    ):
        other = SUBJECT.__class__(**{**SUBJECT.__dict__, **change})
        keys.add(other.key)
        (said,) = SUBJECT.differences(other)
        ((name, value),) = change.items()
        assert said == f"{name} {value}, not {getattr(SUBJECT, name)}"
        assert SUBJECT.fits(other) is (name == "weights")
    assert len(keys) == 6


SPOILED = [
    (("schema",), 2, "its schema is 2"),
    (("key",), "tiny-0", "its key is not that of its subject"),
    (("subject", "dtype"), "float16", "its key is not that of its subject"),
    (("subject", "weights"), "sha256:1", "no digest of a manifest"),
    (("subject", "method"), "half", "no digest of a manifest"),
    (("subject", "adapters"), "sql", "wrong type for adapters"),
    (("kind",), "poetry", "its kind or grade"),
    (("grade",), 1, "its kind or grade"),
    (("grade",), True, "its kind or grade"),
    (("grade",), 2.0, "its kind or grade"),
    (("max_tokens",), 0, "max_tokens is 0"),
    (("max_tokens",), True, "max_tokens is True"),
    (("max_tokens",), 3, "without its 3 token(s)"),
    (("tolerance", "logprobs"), "0.1", "tolerance.logprobs must be from 0 to 10"),
    (("tolerance", "logprobs"), math.nan, "tolerance.logprobs must be from 0 to 10"),
    (("tolerance", "colour"), 1, "colour"),
    (("answers",), [], "it has no answers"),
    (("answers",), {"a": 1}, "it has no answers"),
    (("answers", 0, "prompt"), [], "token ids"),
    (("answers", 0, "kind"), "chat", "the kinds of its answers"),
    (("answers", 0, "tokens"), [7], "without its 2 token(s)"),
    (("answers", 0, "tokens"), [7, "9"], "wrong type for tokens"),
    (("answers", 0, "logprobs"), [-1.0], "without its 2 token(s)"),
    (("answers", 0, "logprobs"), [-1.0, math.inf], "numbers that are none"),
    (("answers", 0, "top"), [[[7]], [[9]]], "no pairs"),
    (("answers", 0, "vector"), [0.5], "without its 2 token(s)"),
    (("recorded",), None, "who recorded it"),
]


@pytest.mark.parametrize(("path", "value", "says"), SPOILED, ids=[str(one[:2]) for one in SPOILED])
def test_a_spoiled_golden_is_none(path, value, says):
    spoiled = copy.deepcopy(TOKENS.asdict())
    place = spoiled
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(UsageError, match="here is no intact golden") as failed:
        Golden.from_dict(spoiled, "here")
    assert says in str(failed.value)
    assert "remove here" in failed.value.next_step


@pytest.mark.parametrize(("path", "value"), [((), []), ((), None), (("vector",), []), (("tokens",), [1])])
def test_a_spoiled_golden_of_vectors_is_none(path, value):
    spoiled = VECTORS.asdict()
    if path:
        spoiled["answers"][0][path[0]] = value
    with pytest.raises(UsageError, match="no intact golden"):
        Golden.from_dict(spoiled if path else value, "here")


@st.composite
def spoiled_goldens(draw):
    value = copy.deepcopy(draw(st.sampled_from([TOKENS, VECTORS])).asdict())
    for _unused in range(draw(st.integers(1, 3))):
        place = value
        while True:
            keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], (dict, list)) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            if draw(st.booleans()):
                place[key] = draw(WRONG)
            else:
                del place[key]
            break
    return value


@hypothesis.settings(max_examples=600, derandomize=True, database=None, deadline=None)
@hypothesis.given(spoiled_goldens())
def test_whatever_is_read_is_a_golden_or_refused(value):
    try:
        found = Golden.from_dict(value, "here")
    except UsageError as error:
        assert error.next_step
        return
    assert Golden.from_dict(found.asdict(), "again") == found
    for one in found.answers:
        assert not answers.compare(one, one, found.tolerance).why


@hypothesis.settings(max_examples=600, derandomize=True, database=None, deadline=None)
@hypothesis.given(
    st.sampled_from(list(answers.PATHS)),
    st.recursive(
        WRONG,
        lambda inner: st.one_of(
            st.lists(inner, max_size=2),
            st.dictionaries(
                st.sampled_from(
                    ["choices", "token_ids", "logprobs", "token_logprobs", "top_logprobs", "finish_reason", "data"]
                ),
                inner,
                max_size=4,
            ),
        ),
        max_leaves=12,
    ),
)
def test_whatever_is_answered_is_an_answer_or_a_surprise(kind, value):
    hypothesis.assume(isinstance(value, dict))
    try:
        answer, wrong = answers.parse(Question(kind, "x"), value, "tiny", 1, "here")
    except Surprise:
        return
    if not wrong:
        assert all(math.isfinite(one) for one in [*answer.logprobs, *answer.vector])
        assert (len(answer.tokens) == 1) if kind in answers.GENERATES else any(answer.vector)


def test_a_proof_says_what_it_is():
    by_golden = Proof("golden", "k", "tokens", 48)
    assert by_golden.says == "golden k (tokens)"
    assert by_golden.asdict() == {
        "by": "golden",
        "key": "k",
        "compared_by": "tokens",
        "positions": 48,
        "distance": 0.0,
    }
    by_completion = Proof("completion", why="none")
    assert (by_completion.says, by_completion.asdict()) == ("a completion", {"by": "completion", "why": "none"})


@pytest.mark.parametrize(
    ("logprobs", "vectors", "found"),
    [
        (None, None, Tolerance()),
        (0, 0, Tolerance(0.0, 0.0)),
        (0.5, None, Tolerance(0.5, Tolerance().vectors)),
        (11, None, None),
        (-0.1, None, None),
        (None, math.nan, None),
        ("1", None, None),
        (True, None, None),
    ],
)
def test_tolerances(logprobs, vectors, found):
    if found is None:
        with pytest.raises(UsageError, match="must be from 0 to 10"):
            golden.tolerance(logprobs, vectors)
    else:
        assert golden.tolerance(logprobs, vectors) == found


CLOSED = made.gate_state("closed")
STARTED = {"main_pid": 10}


@pytest.mark.parametrize(
    ("now", "error"),
    [
        ({}, None),
        ({"gate": made.gate_state("withdrawn")}, None),
        ({"gate": CLOSED, "api": made.api_state(dev_mode=False)}, None),
        ({"gate": CLOSED, "api": made.api_state(paused=True)}, Refused),
        ({"gate": made.gate_state("withdrawn"), "api": made.api_state(running=2)}, Refused),
        ({"gate": CLOSED, "api": made.api_state(paused=True, sleep="discard_all")}, Refused),
        ({"unit": made.unit_state("inactive", "dead")}, Refused),
        ({"unit": made.unit_state("activating", "start-post")}, Refused),
        ({"unit": made.unit_state("failed", "failed")}, Refused),
        ({"api": made.api_state(healthy=False)}, UnknownState),
        ({"api": None}, UnknownState),
    ],
)
def test_who_may_be_asked(now, error):
    seen = made.observation(**now)
    if error is None:
        golden_change.may_answer(seen)
    else:
        with pytest.raises(error, match=f"is {seen.state}") as refused:
            golden_change.may_answer(seen)
        assert refused.value.next_step


@pytest.mark.parametrize(
    ("now", "started", "says"),
    [
        ({}, STARTED, ""),
        ({}, None, "no proof of the process"),
        ({}, {"main_pid": 9}, "no proof of the process"),
        ({"gate": made.gate_state(proved=False)}, STARTED, "not proved at the gate"),
        ({"has_gate": False, "gate": None}, STARTED, ""),
        ({"sleep": made.sleep_record(1)}, STARTED, "put to sleep"),
        ({"sleep": made.sleep_record(0)}, STARTED, "put to sleep"),
    ],
)
def test_from_whom_a_golden_may_be_recorded(now, started, says):
    seen = dataclasses.replace(made.observation(**now), started=started)
    if not says:
        golden_change.may_record(seen)
        return
    with pytest.raises(Refused, match=says) as refused:
        golden_change.may_record(seen)
    assert refused.value.next_step
