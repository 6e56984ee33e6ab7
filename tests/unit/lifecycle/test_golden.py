# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Goldens: each state of the module four times, every proof by them, and every way in which answers go wrong."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import golden, weights
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.config import load
from ansible_collections.baremetal.vllm.plugins.modules import (
    vllm_drain,
    vllm_engine,
    vllm_golden,
    vllm_reload,
    vllm_sleep,
    vllm_wake,
)
from ansible_collections.baremetal.vllm.tests.sim import model as sim
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import OWNER

MATCH = {"state": "matching"}
KINDS = {
    "completion": {},
    "embedding": {"runner": "pooling", "convert": "embed"},
    "rerank": {"runner": "pooling", "convert": "classify"},
}
BY = {"completion": "logprobs", "embedding": "vectors", "rerank": "vectors"}


@pytest.fixture
def host(world):
    """A host whose engine chat serves and has a golden."""
    built = world(gate=True, gpus=1)
    record(built)
    return built


def call(host, check_mode=False, **options):
    names = {} if {"engine", "engines"} & set(options) else {"engine": host.chat.name}
    return host.run_module(vllm_golden.main, check_mode=check_mode, timeout=120, **names, **options)


def record(host, **options):
    result = call(host, **options)
    assert not result.get("failed"), result["msg"]
    return result


def goldens(host) -> dict[str, dict]:
    """What is on the host, read by other means."""
    return {path.stem: json.loads(path.read_text()) for path in (host.root / "var/lib/vllm/goldens").glob("*.json")}


def asked(host) -> list[dict]:
    """What generates, as the engine has got it."""
    return [json.loads(one["body"]) for one in host.chat.requests() if one["generation"]]


def kept(host) -> dict:
    return {name: value for name, value in host.files().items() if not name.startswith("run/")}


# The module, four times.


@pytest.mark.parametrize("kind", KINDS)
def test_four_runs_of_recorded(world, kind):
    host = world(gate=True, gpus=1, **KINDS[kind])
    host.chat.forget_requests()
    seen, files = host.chat.seen(), host.files()

    predicted = record(host, check_mode=True, diff=True)
    assert predicted["changed"]
    assert asked(host) == [], "check mode asks for no answer"
    assert (host.chat.seen(), host.files()) == (seen, files)
    assert predicted["diff"]["after"]["chat"]["answers"] == "(not asked in check mode)"

    real = record(host, diff=True)
    assert real["changed"]
    assert (real["actions"], real["before"], real["key"]) == (
        predicted["actions"],
        predicted["before"],
        predicted["key"],
    )
    assert real["actions"] == [f"chat: record golden {real['key']}"]
    ((key, stored),) = goldens(host).items()
    assert (key, stored) == (real["key"], real["golden"])
    assert (stored["kind"], real["compared_by"]) == (kind, BY[kind])
    salts = [one.get("cache_salt") for one in asked(host)]
    if kind in ("completion", "chat"):
        assert len(salts) == 5, "two prompts, twice, and one that stays in the prefix cache"
        assert salts[0] == salts[1] != salts[2] == salts[3], "no answer comes from the prefix cache"
        assert salts[4] == real["key"]
    else:
        assert salts == [None] * 4, "two prompts, twice"
    assert host.chat.seen() == seen
    path = host.root / f"var/lib/vllm/goldens/{key}.json"
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    if kind == "completion":
        tokens = [host.chat.request("POST", "/v1/completions", body).json["choices"][0] for body in asked(host)[:2]]
        assert [one["tokens"] for one in stored["answers"]] == [one["token_ids"] for one in tokens]

    for check_mode in (False, True):
        host.chat.forget_requests()
        files = kept(host)
        again = record(host, check_mode=check_mode)
        assert (again["changed"], again["actions"]) == (False, [])
        assert again["before"] == again["after"] == real["after"]
        assert again["golden"] == real["golden"]
        assert kept(host) == files
        assert len(asked(host)) == (0 if check_mode else 3), "the first prompt once more, from the prefix cache"


@pytest.mark.parametrize("kind", KINDS)
def test_four_runs_of_matching(world, kind):
    host = world(gate=True, gpus=1, **KINDS[kind])
    recorded = record(host)
    seen, files = host.chat.seen(), kept(host)
    for check_mode in (True, False, False, True):
        host.chat.forget_requests()
        result = record(host, check_mode=check_mode, **MATCH)
        assert (result["changed"], result["actions"]) == (False, [])
        assert result["before"] == result["after"] == recorded["after"]
        assert result["compared_by"] == BY[kind]
        assert (host.chat.seen(), kept(host)) == (seen, files)
        if check_mode:
            assert asked(host) == []
            assert result["would_compare"] == f"2 prompt(s) of golden {result['key']}, by {BY[kind]}"
        else:
            assert len(asked(host)) == 3
            assert result["distance"] == 0
            assert result["positions"] == {"completion": 18, "embedding": 192, "rerank": 9}[kind]


@pytest.mark.parametrize("state", ["recorded", "matching"])
def test_four_runs_with_a_golden_from_elsewhere(world, state):
    host = world(engines=("chat", "code"))
    given = record(host)["golden"]
    for path in (host.root / "var/lib/vllm/goldens").iterdir():
        path.unlink()
    changes = []
    for check_mode in (True, False, False, True):
        result = record(host, check_mode=check_mode, state=state, engine="code", golden=[given])
        changes.append(result["changed"])
        assert result["golden"] == given
        assert bool(result["actions"]) is result["changed"]
    if state == "recorded":
        assert changes == [True, True, False, False]
        assert goldens(host) == {given["key"]: given}, "with the word of who recorded it"
    else:
        assert changes == [False] * 4
        assert goldens(host) == {}


def test_a_given_golden_that_the_engine_does_not_match_is_not_kept(world):
    host = world()
    given = record(host)["golden"]
    (path,) = (host.root / "var/lib/vllm/goldens").iterdir()
    path.unlink()
    host.chat.set_fault("wrong_tokens")
    for force in (False, True):
        result = call(host, golden=[given], force=force)
        assert "does not compute what golden" in result["msg"]
        assert goldens(host) == {}


def test_two_engines_of_one_key_share_a_golden_and_have_to_agree(world):
    host = world(engines=("chat", "code"))
    result = record(host, engines=["chat", "code"])
    assert sum(one["changed"] for one in result["engines"].values()) == 1, "the second one matched"
    assert len(goldens(host)) == 1
    key = next(iter(goldens(host)))
    host.engines["code"].set_fault("wrong_tokens")
    before = goldens(host)
    failed = call(host, engines=["chat", "code"])
    assert failed["failed"]
    assert "failed" not in failed["engines"]["chat"]
    assert f"engine 'code' on {os.uname().nodename} does not compute what golden {key}" in failed["msg"]
    assert "by engine '" in failed["msg"]
    assert goldens(host) == before


# What is recorded, and from whom.


@pytest.mark.parametrize(
    ("way", "says", "code"),
    [
        ([(vllm_drain, {})], "is drained and cannot be asked", "a paused engine answers nobody"),
        ([(vllm_sleep, {})], "is asleep and cannot be asked", "wake it"),
        ([(vllm_engine, {"state": "stopped"})], "is stopped and cannot be asked", "start it"),
    ],
)
@pytest.mark.parametrize("state", ["recorded", "matching"])
def test_an_engine_that_cannot_answer_is_not_asked(world, way, says, code, state):
    host = world(gpus=1)
    for module, options in way:
        host.done(module, **options)
    host.chat.forget_requests()
    for check_mode in (True, False):
        result = call(host, check_mode=check_mode, state=state)
        assert says in result["msg"]
        assert code in result["next_step"]
        assert not result["changed"]
    assert asked(host) == []
    assert goldens(host) == {}


def test_an_unknown_engine_is_not_asked(host):
    host.chat.set_fault("metrics_500")
    before = goldens(host)
    for state in ("recorded", "matching"):
        assert "is unknown (metrics:" in call(host, state=state, force=True)["msg"]
    assert goldens(host) == before


def test_an_engine_that_was_withdrawn_or_drained_without_a_pause_is_asked(world):
    host = world(gate=True, dev_mode=False)
    assert host.done(vllm_drain)["after"]["state"] == "drained"
    assert record(host)["changed"]
    assert host.chat.seen()["admission"] == "closed"


def test_an_engine_without_a_proof_of_its_start_is_no_measure(world):
    host = world()
    (host.root / "var/lib/vllm/chat/ready.json").unlink()
    result = call(host)
    assert "is not proved, so no golden is recorded from it: no proof of the process" in result["msg"]
    assert "restart it" in result["next_step"]
    assert goldens(host) == {}


def test_an_engine_that_serves_something_else_than_is_declared_or_on_disk(world):
    host = world(gpus=1)
    host.change("etc/vllm/lifecycle/chat.json", config_digest="1")
    assert "another configuration than is declared now" in call(host)["msg"]
    host.change("etc/vllm/lifecycle/chat.json", config_digest="0")
    sim.write(host.root / "srv/models/tiny", "other weights of equal shapes")
    result = call(host, force=True)
    assert "its checkpoint has changed after it was read (config.json, model.safetensors)" in result["msg"]
    assert goldens(host) == {}
    host.done(vllm_engine, state="restarted")
    assert record(host)["changed"]


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ({"garbage": True}, "every token is id 0, as from an engine whose weights are gone"),
        ({"cut_streams": 3}, "it owed 8 token(s) and gave 3 with finish_reason 'abort'"),
        ({"short_answers": 3}, "it owed 8 token(s) and gave 3 with finish_reason 'length'"),
        ({"error_completions": 500}, "HTTP 500"),
        ({"http_wrong_types": "/v1/completions"}, "without a completion"),
        ({"http_empty": "/v1/completions"}, "with no JSON object"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_nonsense_is_never_recorded(world, faults, says):
    host = world()
    for name, arg in faults.items():
        host.chat.set_fault(name, arg)
    for force in (False, True):
        result = call(host, force=force)
        assert says in result["msg"]
        assert not result["changed"]
    assert goldens(host) == {}


def test_zeros_are_never_recorded(world):
    host = world(**KINDS["embedding"])
    host.chat.set_fault("garbage")
    assert "all of its numbers are 0" in call(host)["msg"]
    assert goldens(host) == {}


def test_two_answers_that_differ_are_no_golden(world):
    host = world()
    host.chat.set_fault("wrong_tokens", times=20)  # and then the right ones: within the second round
    result = call(host)
    assert "gives two answers to prompt" in result["msg"]
    assert "take it out of rotation" in result["next_step"]
    assert goldens(host) == {}


def test_a_golden_is_recorded_anew_only_by_force(host):
    before = goldens(host)
    host.chat.set_fault("wrong_tokens")
    refused = call(host)
    assert "does not compute what golden" in refused["msg"]
    assert "record it anew with force: true" in refused["next_step"]
    assert goldens(host) == before
    forced = record(host, force=True, diff=True)
    assert forced["changed"]
    assert forced["actions"] == [f"chat: record golden {forced['key']} anew"]
    sides = forced["diff"]["before"]["chat"]["answers"], forced["diff"]["after"]["chat"]["answers"]
    assert sides[0] != sides[1]
    assert goldens(host) != before
    assert not record(host, force=True)["changed"], "it matches now"


def test_other_prompts_are_recorded_by_an_engine_that_matches(host):
    prompts = [[5] * 140, "a text", {"messages": [{"role": "user", "content": "who are you"}]}]
    predicted = record(host, check_mode=True, prompts=prompts, max_tokens=4)
    result = record(host, prompts=prompts, max_tokens=4)
    assert predicted["changed"] and result["changed"]
    assert [one["kind"] for one in result["golden"]["answers"]] == ["completion", "completion", "chat"]
    assert [len(one["tokens"]) for one in result["golden"]["answers"]] == [4, 4, 4]
    assert all(one["logprobs"] and one["top"] for one in result["golden"]["answers"])
    assert not record(host, prompts=prompts, max_tokens=4)["changed"]
    assert not record(host)["changed"], "without options the golden's own"
    assert record(host, **MATCH)["positions"] == 14, "four tokens of three answers, two of the repeated one"
    assert record(host, tolerance={"logprobs": 0.3})["changed"]
    assert record(host)["golden"]["tolerance"] == {"logprobs": 0.3, "vectors": 0.02}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompts": [[]]}, "token ids, whole numbers"),
        ({"prompts": [{"query": "a", "documents": ["b"]}]}, "ranks no documents"),
        ({"prompts": [""]}, "a prompt is a text"),
        ({"max_tokens": 0}, "max_tokens must be from 1 to 1024"),
        ({"max_tokens": 2000}, "max_tokens must be from 1 to 1024"),
        ({"tolerance": {"logprobs": -1}}, "tolerance.logprobs must be from 0 to 10, not -1"),
        ({"tolerance": {"vectors": "nan"}}, "tolerance.vectors must be from 0 to 10, not nan"),
        ({"tolerance": {"scores": 1}}, "scores"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"golden": [{}]}, "golden[0] is no intact golden"),
        ({"golden": ["x"]}, "dict"),
    ],
)
def test_wrong_options(world, options, says):
    host = world()
    result = host.run_module(vllm_golden.main, **{"engine": "chat", "timeout": 60, **options})
    assert says in result["msg"]
    assert not result.get("changed")
    assert asked(host) == []


def test_a_prompt_longer_than_the_model_takes_says_so(world):
    host = world(**{"max-model-len": 100})
    assert [len(one["prompt"]) for one in record(host)["golden"]["answers"]] == [92, 6]


@pytest.mark.parametrize(("limit", "grade"), [(0, 0), (1, 0), (2, 2)])
def test_log_probabilities_without_a_margin(world, limit, grade):
    host = world(**{"max-logprobs": limit})
    result = record(host)
    assert (result["compared_by"], result["golden"]["grade"]) == ("logprobs", grade)
    assert ("top" in result["golden"]["answers"][0]) is (grade == 2)
    assert record(host, **MATCH)["compared_by"] == "logprobs"


def test_a_model_without_log_probabilities_is_judged_by_its_tokens_and_says_so(world):
    host = world(gate=True, gpus=1)
    host.chat.set_fault("logprobs_refused")
    result = record(host)
    assert (result["compared_by"], result["golden"]["grade"]) == ("tokens", None)
    assert set(result["golden"]["answers"][0]) == {"kind", "prompt", "tokens"}
    host.done(vllm_sleep, level=2)
    assert host.done(vllm_wake)["proof"]["compared_by"] == "tokens"
    host.done(vllm_sleep, level=2)
    host.chat.set_fault("reload_wrong")
    assert "prompt 0, position 0" in host.run(vllm_wake)["msg"]


def test_log_probabilities_that_are_refused_later_leave_the_tokens(host):
    host.chat.set_fault("logprobs_refused")
    assert record(host, **MATCH)["compared_by"] == "tokens"
    host.chat.set_fault("wrong_tokens")
    assert call(host, **MATCH)["mismatch"]["compared_by"] == "tokens"


# The key.


def test_the_key_is_of_weights_version_model_adapters_and_types(host):
    result = record(host, **MATCH)
    subject = result["subject"]
    assert subject["weights"] == weights.take(str(host.root / "srv/models/tiny")).digest
    assert subject == {**subject, "served_model": "tiny", "runtime_version": "0.33.0", "adapters": [], "dtype": "auto"}
    one = golden.cheap_subject(load("chat"))
    keys = {one.key}
    for change in (
        {"runtime_version": "0.32.0"},
        {"served_model_name": "other"},
        {"traits": {"dtype": "float16"}},
        {"traits": {"kv_cache_dtype": "fp8"}},
        {"traits": {"quantization": "awq"}},
        {"adapters": [{"name": "sql", "path": "/srv/adapters/sql"}]},
    ):
        host.change("etc/vllm/lifecycle/chat.json", **change)
        keys.add(golden.cheap_subject(load("chat")).key)
        host.change("etc/vllm/lifecycle/chat.json", runtime_version="0.33.0", served_model_name="tiny", traits={})
        host.change("etc/vllm/lifecycle/chat.json", adapters=[])
    assert len(keys) == 7
    assert golden.cheap_subject(load("chat")) == one


def test_nothing_to_compare_with(world):
    host = world()
    for check_mode in (True, False):
        result = call(host, check_mode=check_mode, **MATCH)
        assert "is on record, and none was given: nothing to compare with" in result["msg"]
        assert result["missing"] is True
        assert result["key"].startswith("tiny-")
    assert asked(host) == []


def test_another_model_behind_the_same_name_is_told_by_its_weights(host):
    """The engine restarts with other weights; the fleet's golden is of the old ones."""
    given = record(host)["golden"]
    sim.write(host.root / "srv/models/tiny", "other weights of equal shapes")
    restarted = host.done(vllm_engine, state="restarted")
    assert restarted["proof"]["by"] == "completion"
    assert "1 golden(s) of this model are on record, and none is of its weights" in restarted["proof"]["why"]
    host.chat.forget_requests()
    host.change("etc/vllm/lifecycle/chat.json", golden_required=True)
    refused = host.run(vllm_engine, state="restarted")
    assert "has to be proved by a golden (golden_required), and cannot be: 1 golden(s) of this model" in refused["msg"]
    assert host.info()["state"] != "serving"
    host.change("etc/vllm/lifecycle/chat.json", golden_required=False)
    host.done(vllm_engine, state="restarted")
    host.chat.forget_requests()
    result = call(host, golden=[given], **MATCH)
    now = weights.take(str(host.root / "srv/models/tiny")).digest
    assert f"it has weights {now}, not {given['subject']['weights']}" in result["msg"]
    assert asked(host) == []


# Every proof.


def test_without_a_golden_a_completion_is_the_proof_and_nothing_is_hashed(world, monkeypatch):
    host = world(gate=True, gpus=1, doors=("ready",))
    monkeypatch.setattr(weights, "take", lambda *_a, **_k: pytest.fail("it hashed"))
    host.done(vllm_drain)
    served = host.done(vllm_drain, state="serving")
    assert served["proof"] == {"by": "completion", "why": "no golden is on record for it"}
    assert host.info()["started"]["proof"]["by"] == "completion"
    assert not (host.root / "var/lib/vllm/goldens").exists()
    assert not (host.root / "var/lib/vllm/weights").exists()


def test_every_proof_is_by_the_golden_and_says_so(world):
    host = world(gate=True, gpus=1, doors=True)
    key = record(host)["key"]
    wanted = {"by": "golden", "key": key, "compared_by": "logprobs", "positions": 18, "distance": 0.0}
    restarted = host.done(vllm_engine, state="restarted")
    assert restarted["proof"] == wanted
    assert restarted["started"]["proof"] == wanted
    assert f"proved by golden {key}" in host.systemd.journal(host.chat.unit)
    host.done(vllm_drain)
    assert host.done(vllm_drain, state="serving")["proof"] == wanted
    for options in ({"level": 1}, {"level": 2}, {"kv_only": True}, {"level": 0}):
        host.done(vllm_sleep, **options)
        assert host.done(vllm_wake)["proof"] == wanted
    host.done(vllm_engine, state="stopped")
    assert host.done(vllm_engine, state="started")["proof"] == wanted


@pytest.mark.parametrize("kind", ["embedding", "rerank"])
def test_an_engine_that_generates_no_text_is_proved_by_what_it_answers(world, kind):
    shape = {"warmup": [{"prompt_tokens": 12, "max_tokens": 3}]}
    host = world(gate=True, gpus=1, doors=("ready",), declared=shape, **KINDS[kind])
    host.done(vllm_sleep, level=2)
    assert host.done(vllm_wake)["proof"]["by"] == "completion"
    record(host)
    host.done(vllm_sleep, level=2)
    assert host.done(vllm_wake)["proof"]["compared_by"] == "vectors"
    host.done(vllm_sleep, level=2)
    host.chat.set_fault("reload_noop")
    assert "all of its numbers are 0" in host.run(vllm_wake)["msg"]
    assert host.chat.seen()["ready"] is False


def test_a_pooling_engine_that_answers_zeros_does_not_get_ready(world):
    host = world(start=False, doors=("ready",), fault=["garbage"], **KINDS["embedding"])
    result = host.run(vllm_engine, state="started")
    assert result["failed"]
    assert any("all of its numbers are 0" in line for line in result["journal"])


@pytest.mark.parametrize(
    ("faults", "way", "says"),
    [
        ({"garbage": True}, {"level": 1}, "Every token is id 0, as from an engine whose weights are gone"),
        ({"reload_noop": True}, {"level": 2}, "Every token is id 0"),
        ({"reload_wrong": True}, {"level": 2}, r"prompt 0, position 0: token \d+ .* was recorded, token \d+ .* came"),
        ({"wrong_tokens": True}, {"level": 1}, "prompt 0, position 0"),
        ({"logprobs_off": 0.5}, {"level": 1}, "position 0: .*0.5 apart where 0.1 is allowed"),
        ({"prefix_stale": True, "reset_lies": True}, {"level": 1}, "prompt 0, position 0: .*token 0"),
        ({"prefix_stale": True, "reset_lies": True}, {"kv_only": True}, None),
        ({"cut_streams": 5}, {"level": 1}, "owed 8 token.s. and gave 5 with finish_reason 'abort'"),
        ({"short_answers": 5}, {"level": 1}, "owed 8 token.s. and gave 5 with finish_reason 'length'"),
        ({"tokens_flip": 5}, {"level": 1}, "prompt 0, position 5"),
        ({"near_tie": 5}, {"level": 1}, None),
        ({"logprobs_off": 0.05}, {"level": 1}, None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_wake_with_other_answers_is_never_admitted(host, faults, way, says):
    for name, arg in faults.items():
        if name == "prefix_stale":
            host.chat.set_fault(name, arg)
    host.done(vllm_sleep, **way)
    for name, arg in faults.items():
        host.chat.set_fault(name, arg)
    result = host.run(vllm_wake)
    if says is None:
        assert not result.get("failed"), result["msg"]
        return
    assert result["failed"]
    assert re.search(says, result["msg"]), result["msg"]
    assert "keep it out of rotation" in result["next_step"]
    seen = host.chat.seen()
    assert (seen["ready"], seen["admission"], seen["lease"]) == (False, "closed", OWNER)
    assert "chat: admit it at the gate" not in result["actions"]
    assert host.info()["state"] == "withdrawn"
    served = host.run(vllm_drain, state="serving")
    assert served["failed"], "nor is it by another way"
    assert host.chat.seen()["ready"] is False
    host.chat.clear_faults()
    restarted = host.done(vllm_engine, state="restarted")
    assert (restarted["proof"]["by"], restarted["after"]["state"]) == ("golden", "serving")


@pytest.mark.parametrize("fault", ["reload_noop", "reload_wrong"])
def test_a_mismatch_may_be_made_good_by_one_restart(world, fault):
    host = world(gate=True, gpus=1, doors=("ready",))
    record(host)
    host.done(vllm_sleep, level=2)
    host.chat.set_fault(fault)
    pid = host.chat.truth()["pid"]
    result = host.done(vllm_wake, on_mismatch="restart")
    assert "does not compute what golden" in result["recovered_from"]
    assert result["actions"][-6:] == [
        "chat: stop the unit",
        "chat: start the unit and wait until it is proved ready",
        "chat: prove it by a completion",
        "chat: admit it at the gate",
        "chat: wait until /ready is 200",
        "chat: release the lease",
    ]
    assert (result["after"]["state"], result["proof"]["by"]) == ("serving", "golden")
    assert host.chat.truth()["pid"] != pid
    assert host.chat.seen()["ready"]
    again = host.done(vllm_wake, on_mismatch="restart")
    assert (again["changed"], again["actions"]) == (False, [])


def test_a_wake_that_failed_may_be_made_good_later(host):
    host.done(vllm_sleep)
    host.chat.set_fault("wrong_tokens")
    assert host.run(vllm_wake)["failed"]
    assert host.run(vllm_wake)["failed"], "nothing is restarted unless that is wished"
    pid = host.chat.truth()["pid"]
    assert host.run(vllm_wake, on_mismatch="restart")["failed"], "the restarted one computes no better"
    assert host.chat.truth()["pid"] != pid, "it was restarted, once"
    assert host.chat.seen()["ready"] is False
    assert host.chat.lease()["owner"] == OWNER
    host.chat.clear_faults()
    assert host.done(vllm_wake)["after"]["state"] == "serving"


def test_what_is_no_mismatch_is_not_made_good_by_a_restart(host):
    host.done(vllm_sleep)
    host.chat.set_fault("error_completions", 503)
    pid = host.chat.truth()["pid"]
    assert "HTTP 503" in host.run(vllm_wake, on_mismatch="restart")["msg"]
    assert host.chat.truth()["pid"] == pid


def test_the_mismatch_is_told_in_keys_as_well(host):
    key = record(host)["key"]
    host.done(vllm_sleep)
    host.chat.set_fault("garbage")
    found = host.run(vllm_wake)["mismatch"]
    assert {name: found[name] for name in ("key", "prompt", "position", "compared_by")} == {
        "key": key,
        "prompt": 0,
        "position": 0,
        "compared_by": "logprobs",
    }
    assert found["found"] == {"token": 0, "logprob": -6.2383}
    assert found["recorded"]["token"] == goldens(host)[key]["answers"][0]["tokens"][0]


def test_a_plain_wake_from_level_2_by_someone_else_is_caught_by_the_golden_alone(host):
    """Without our record of the sleep nothing else would show it."""
    host.done(vllm_sleep, level=2)
    host.chat.request("POST", "/wake_up")
    (host.root / "var/lib/vllm/chat/sleep.json").unlink()
    result = host.run(vllm_drain, state="serving")
    assert "Every token is id 0" in result["msg"]
    assert host.chat.seen()["ready"] is False


def test_a_start_with_other_answers_fails(world):
    host = world(gate=True, gpus=1, doors=("ready", "settle"))
    record(host)
    host.done(vllm_engine, state="stopped")
    host.chat.set_fault("wrong_tokens")
    result = host.run(vllm_engine, state="started")
    assert any("does not compute what golden" in line for line in result["journal"])
    assert host.chat.active() == "failed"
    assert host.gate.stored("chat")["proved"] == "0"
    host.chat.clear_faults()
    assert host.done(vllm_engine, state="started")["after"]["state"] == "serving"


def test_a_token_that_flips_where_two_are_as_likely_is_no_mismatch(world):
    """bf16 sums depend on what else is in the batch."""
    host = world(gate=True, gpus=1, fault=["near_tie=5"])
    record(host)
    host.chat.set_fault("tokens_flip", 5)
    result = record(host, **MATCH)
    assert result["positions"] == 12, "five tokens of both answers, two of the repeated one"
    host.done(vllm_sleep)
    assert host.done(vllm_wake)["proof"]["positions"] == 12
    host.chat.set_fault("tokens_flip", 6)
    assert "prompt 0, position 6" in call(host, **MATCH)["msg"]


def test_what_is_computed_from_the_prefix_cache_is_rounded_otherwise_and_that_is_no_mismatch(world):
    """Measured on an H200: the second answer to a prompt is 0.09 off, and another one after a near tie."""
    host = world(gate=True, gpus=1, doors=("ready",))
    host.chat.set_fault("prefix_rounds", 1)
    assert record(host)["changed"]
    result = record(host, **MATCH)
    assert result["distance"] == pytest.approx(0.15), "of the one that is to come from the cache"
    assert result["positions"] == 17, "eight tokens of two, and one up to the near tie"
    host.done(vllm_sleep)
    assert host.done(vllm_wake)["proof"]["by"] == "golden"
    again = record(host, force=True, prompts=[[5, 6, 7] * 20])
    assert again["changed"], "recorded anew, and the answers agree"


def test_vectors_are_compared_by_their_distance(world):
    host = world(**KINDS["embedding"])
    record(host)
    host.chat.set_fault("vectors_off", 0.01)
    near = record(host, **MATCH)
    assert 0.009 < near["distance"] < 0.011
    host.chat.set_fault("vectors_off", 0.05)
    far = call(host, **MATCH)
    assert re.search(r"the vectors lie 0.049\d* of their length apart where 0.02 is allowed", far["msg"])
    assert far["mismatch"]["position"] == 0
    assert record(host, tolerance={"vectors": 0.1}, **MATCH)["compared_by"] == "vectors"


# Held to a golden.


def test_new_weights_under_a_sleeping_engine_do_not_wake_with_it(host):
    """Another checkpoint behind the same path: the reload of level 2 would serve it as if nothing had happened."""
    old = record(host)["subject"]["weights"]
    host.done(vllm_sleep, level=2)
    sim.write(host.root / "srv/models/tiny", "other weights of equal shapes")
    new = weights.take(str(host.root / "srv/models/tiny")).digest
    result = host.run(vllm_wake)
    assert "does not compute what golden" in result["msg"]
    assert f"is {new} now, the golden is of {old}" in result["msg"]
    assert "if new weights are meant, reload or restart it" in result["next_step"]
    assert host.chat.seen()["ready"] is False


def test_a_process_is_held_to_the_golden_that_proved_its_start(world):
    """Not only one from which the golden was recorded."""
    host = world(gate=True, gpus=1, doors=("ready",))
    record(host)
    assert host.done(vllm_engine, state="restarted")["proof"]["by"] == "golden"
    host.done(vllm_sleep, level=2)
    sim.write(host.root / "srv/models/tiny", "other weights of equal shapes")
    assert "does not compute what golden" in host.run(vllm_wake)["msg"]
    assert host.chat.seen()["ready"] is False


def test_new_files_do_not_disturb_an_engine_that_keeps_its_weights(host):
    sim.write(host.root / "srv/models/tiny", "other weights of equal shapes")
    host.done(vllm_drain)
    assert host.done(vllm_drain, state="serving")["proof"]["by"] == "golden"
    host.done(vllm_sleep, level=1)
    assert host.done(vllm_wake)["proof"]["by"] == "golden"


def test_a_reload_takes_new_weights_by_what_is_on_disk_then(host):
    old = record(host)["key"]
    sim.write(host.root / "srv/models/tiny", "other weights of equal shapes")
    result = host.done(vllm_reload)
    assert result["proof"]["by"] == "completion", "no golden of the new weights yet"
    new = record(host)["key"]
    assert new != old
    assert set(goldens(host)) == {old, new}
    sim.write(host.root / "srv/models/tiny", "tiny")
    assert host.done(vllm_reload)["proof"]["key"] == old


def test_a_golden_that_was_removed_proves_nothing_any_more(host):
    for path in (host.root / "var/lib/vllm/goldens").iterdir():
        path.unlink()
    host.done(vllm_drain)
    proof = host.done(vllm_drain, state="serving")["proof"]
    assert proof["by"] == "completion"
    assert "is gone" in proof["why"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda value: "{", "holds no JSON"),
        (lambda value: json.dumps([]), "holds no JSON object"),
        (lambda value: json.dumps({**value, "schema": 2}), "its schema is 2"),
        (lambda value: json.dumps({**value, "answers": []}), "it has no answers"),
        (lambda value: json.dumps({**value, "answers": [{**value["answers"][0], "tokens": [1]}]}), "without its 8"),
        (
            lambda value: json.dumps({**value, "subject": {**value["subject"], "dtype": "float16"}}),
            "its key is not that of its subject",
        ),
    ],
)
def test_a_broken_golden_proves_nothing_and_is_named(host, spoil, says):
    (path,) = (host.root / "var/lib/vllm/goldens").iterdir()
    path.write_text(spoil(json.loads(path.read_text())))
    host.done(vllm_drain)
    result = host.run(vllm_drain, state="serving")
    assert str(path) in result["msg"]
    assert says in result["msg"]
    assert host.chat.seen()["ready"] is False
    assert "remove" in result["next_step"]


def test_goldens_of_other_models_do_not_matter(host):
    folder = host.root / "var/lib/vllm/goldens"
    (folder / "other-0123456789abcdef0123.json").write_text("{")
    (folder / "README").write_text("mine")
    host.done(vllm_drain)
    assert host.done(vllm_drain, state="serving")["proof"]["by"] == "golden"


# The command.


def test_the_command_records_and_matches(world):
    host = world()

    def command(*words):
        done = subprocess.run([host.command, "golden", *map(str, words)], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    code, _out, err = command("chat", "match")
    assert (code, "nothing to compare with" in err) == (2, True)
    assert json.loads(command("chat", "record", "--check")[1])["changed"]
    assert goldens(host) == {}
    code, out, _err = command("chat", "record", "--max-tokens", "8")
    recorded = json.loads(out)
    assert (code, recorded["changed"], recorded["compared_by"]) == (0, True, "logprobs")
    path = host.root / "golden.json"
    path.write_text(json.dumps(recorded["golden"]))
    assert json.loads(command("chat", "match", "--golden", path)[1])["positions"] == 18
    host.chat.set_fault("wrong_tokens")
    code, out, err = command("chat", "match")
    assert (code, out) == (1, "")
    assert "does not compute what golden" in err
    assert command("chat", "record", "--force")[0] == 0
    assert command("chat", "record", "--max-tokens", "0")[0] == 2
    assert command("chat", "match", "--golden", host.root / "nothing")[0] == 2
    path.write_text("[]")
    assert command("chat", "match", "--golden", path)[0] == 2
