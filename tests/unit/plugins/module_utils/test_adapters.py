# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Truth tables of LoRA adapters: what is done, what is refused, what counts as an effect."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import adapters, config, store
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.adapters import (
    EngineAdapters,
    Loaded,
    Record,
    Wanted,
    has_effect,
    join,
    plan_adapters,
    read_record,
    write_record,
)
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.adapters_change import AdapterWish, plan_change
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.answers import Answer
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.config import AdapterConfig
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.engine import Served, parse_metrics
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import (
    Refused,
    Surprise,
    UnknownState,
    UsageError,
)
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.lease import LeaseRequest
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.plan import Options, plan
from ansible_collections.baremetal.vllm.tests.unit.plugins.module_utils.lifecycle_factory import (
    OURS,
    api_state,
    gate_state,
    lease,
    observation,
    sleep_record,
    unit_state,
)
from ansible_collections.baremetal.vllm.tests.unit.plugins.module_utils.test_parts import DECLARED


def want(name="sql", digest="new", path="", prove=True):
    return Wanted(AdapterConfig(name, path or f"/a/{name}", prove=prove), digest)


def have(name="sql", digest="new", path="", proved=True):
    return Loaded(name, path or f"/a/{name}", "tiny", digest, proved)


def kinds(actions):
    return [f"{action.kind} {action.name}".strip() for action in actions]


TABLE = {
    # wanted, there, cached, exact, again, actions
    "nothing": ([], [], [], True, False, []),
    "missing": ([want()], [], [], False, False, ["load sql", "prove sql"]),
    "missing, not to be proved": ([want(prove=False)], [], [], False, False, ["load sql"]),
    "there": ([want()], [have()], [], False, False, []),
    "there, and once more": ([want()], [have()], [], False, True, ["prove sql"]),
    "there, not to be proved, once more": ([want(prove=False)], [have(proved=False)], [], False, True, []),
    "not proved": ([want()], [have(proved=False)], [], False, False, ["prove sql"]),
    "not proved and need not be": ([want(prove=False)], [have(proved=False)], [], False, False, []),
    "content not known now": ([want(digest=None)], [have()], [], False, False, []),
    "other path": (
        [want(path="/b")],
        [have()],
        [["sql", "/a/sql", "new"]],
        False,
        False,
        ["unload sql", "load sql", "prove sql"],
    ),
    "other content": (
        [want()],
        [have(digest="old")],
        [],
        False,
        False,
        ["unload sql", "reset_cache", "load sql", "prove sql"],
    ),
    "somebody else's": (
        [want()],
        [have(digest="")],
        [],
        False,
        False,
        ["unload sql", "reset_cache", "load sql", "prove sql"],
    ),
    "back again": ([want()], [], [["sql", "/a/sql", "new"]], False, False, ["load sql", "prove sql"]),
    "other content was there": (
        [want()],
        [],
        [["sql", "/a/sql", "old"], ["sql", "/a/sql", "new"]],
        False,
        False,
        ["reset_cache", "load sql", "prove sql"],
    ),
    "unknown content was there": (
        [want()],
        [],
        [["sql", "/a/sql", ""]],
        False,
        False,
        ["reset_cache", "load sql", "prove sql"],
    ),
    "elsewhere or another one": (
        [want()],
        [],
        [["sql", "/b", "old"], ["legal", "/a/sql", "old"]],
        False,
        False,
        ["load sql", "prove sql"],
    ),
    "others stay": ([want()], [have("legal")], [], False, False, ["load sql", "prove sql"]),
    "others go": ([want()], [have("legal")], [], True, False, ["unload legal", "load sql", "prove sql"]),
    "all go": ([], [have(), have("legal")], [], True, False, ["unload sql", "unload legal"]),
    "unload and reset before any load": (
        [want("one"), want("two"), want("three")],
        [have("three", digest="old"), have("four")],
        [],
        True,
        False,
        [
            "unload four",
            "unload three",
            "reset_cache",
            *(f"{do} {name}" for name in ("one", "two", "three") for do in ("load", "prove")),
        ],
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_plan_adapters(name):
    wanted, there, cached, exact, again, actions = TABLE[name]
    assert kinds(plan_adapters(wanted, there, cached, exact=exact, again=again)) == actions


@pytest.mark.parametrize("name", TABLE)
def test_what_was_done_needs_not_be_done_again(name):
    wanted, there, cached, exact, _again, _actions = TABLE[name]
    kept = [] if exact else [one for one in there if one.name not in {two.adapter.name for two in wanted}]
    after = [
        *kept,
        *(have(one.adapter.name, one.digest or "new", one.adapter.path, one.adapter.prove) for one in wanted),
    ]
    assert plan_adapters(wanted, after, cached, exact=exact) == []


# What may be done to an engine as it is.


@pytest.fixture(autouse=True)
def host(tmp_path, monkeypatch):
    monkeypatch.setenv(store.ROOT_VARIABLE, str(tmp_path))


ENGINE = config.build(
    config.EngineConfig,
    DECLARED | {"traits": {"lora": True}, "lora": {"max_rank": 16, "max_loras": 1, "max_cpu_loras": 3}},
    "test",
)


def engine(*loaded, can=("lora_update",), **signals):
    now = observation(**signals)
    api = now.api and dataclasses.replace(now.api, capabilities=None if can is None else list(can))
    seen = EngineAdapters(True, [], None if now.api is None else list(loaded), {})
    return dataclasses.replace(now, api=api, adapters=seen)


def judge(now, wanted, state="present", force=False, owner=OURS):
    return plan_change(now, ENGINE, wanted, AdapterWish(None, state, LeaseRequest(owner), 60, force))


PAUSED = {"gate": gate_state("closed"), "api": api_state(paused=True), "held": lease(purpose="drained")}
WITHDRAWN = {"gate": gate_state("withdrawn")}
LOAD, EXCHANGE = ["load sql", "prove sql"], ["unload sql", "reset_cache", "load sql", "prove sql"]
JUDGEMENTS = {
    # now, state of the wish, actions or refusal
    "serving, load": (engine(), "present", LOAD),
    "serving, there": (engine(have()), "exact", []),
    "serving, changed": (engine(have(digest="old")), "present", "clients may be using what would go"),
    "serving, exact": (engine(have(), have("legal")), "exact", "clients may be using what would go"),
    "withdrawn, idle": (engine(have(digest="old"), **WITHDRAWN), "present", EXCHANGE),
    "withdrawn, busy": (
        engine(have(digest="old"), gate=gate_state("withdrawn"), api=api_state(running=1)),
        "present",
        "clients may be using",
    ),
    "withdrawn, a session": (
        engine(have(digest="old"), gate=gate_state("withdrawn", sessions=1)),
        "present",
        "clients may be using",
    ),
    "withdrawn, not counted": (
        engine(have(digest="old"), gate=gate_state("withdrawn"), api=api_state(running=None)),
        "present",
        "clients may be using",
    ),
    "draining, load": (engine(gate=gate_state("withdrawn"), api=api_state(running=1)), "present", LOAD),
    "drained, changed": (engine(have(digest="old"), **PAUSED), "present", ["resume", *EXCHANGE, "pause"]),
    "drained, load": (engine(**PAUSED), "present", ["resume", *LOAD, "pause"]),
    "drained, nothing to prove": (engine(have(), have("legal"), **PAUSED), "exact", ["unload legal"]),
    "frozen": (
        engine(gate=gate_state("closed"), api=api_state(paused=True, running=2)),
        "present",
        "with requests that would go on",
    ),
    "paused while admitted": (engine(api=api_state(paused=True)), "present", "with requests that would go on"),
    "drained without a gate": (engine(has_gate=False, api=api_state(paused=True)), "present", "without a gate"),
    "killed before the pause": (
        engine(have(), gate=gate_state("closed"), held=lease(purpose="drained")),
        "present",
        ["pause"],
    ),
    "killed before the load": (
        engine(gate=gate_state("closed"), held=lease(purpose="drained")),
        "present",
        [*LOAD, "pause"],
    ),
    "closed by somebody else": (engine(have(), gate=gate_state("closed")), "present", []),
    "held": (engine(held=lease(owner="night-shift")), "present", "is held by night-shift"),
    "held, nothing to do": (engine(have(), held=lease(owner="night-shift")), "present", []),
    "asleep": (
        engine(gate=gate_state("closed"), api=api_state(paused=True, sleep="weights_offloaded")),
        "present",
        "is asleep",
    ),
    "asleep, nothing to do": (
        engine(have(), gate=gate_state("closed"), api=api_state(paused=True, sleep="weights_offloaded")),
        "present",
        [],
    ),
    "stopped": (engine(unit=unit_state("inactive", "dead")), "present", "is stopped"),
    "starting": (engine(unit=unit_state("activating", "start-post")), "present", "is starting"),
    "unknown": (engine(have(), api=api_state(healthy=False)), "present", UnknownState),
    "no route": (engine(can=()), "present", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 was not set"),
    "routes not seen": (engine(can=None), "present", UnknownState),
    "no room": (engine(have("one"), have("two"), have("three")), "present", "keeps 3 adapter(s) in memory"),
    "no development endpoints": (
        engine(have(digest="old"), gate=gate_state("closed"), api=api_state(dev_mode=False)),
        "present",
        "its prefix cache cannot be reset",
    ),
    "no development endpoints, load": (engine(api=api_state(dev_mode=False)), "present", LOAD),
}


@pytest.mark.parametrize("name", JUDGEMENTS)
def test_what_may_be_done(name):
    now, state, expected = JUDGEMENTS[name]
    if isinstance(expected, list):
        assert kinds(judge(now, [want()], state)) == expected
        return
    error, says = (expected, "") if isinstance(expected, type) else (Refused, expected)
    with pytest.raises(error) as caught:
        judge(now, [want()], state)
    assert caught.type is error
    assert says in str(caught.value)
    assert caught.value.next_step


@pytest.mark.parametrize("name", ["serving, changed", "serving, exact", "withdrawn, busy", "held"])
def test_what_force_is_for(name):
    now, state, _refusal = JUDGEMENTS[name]
    assert judge(now, [want()], state, force=True)


@pytest.mark.parametrize(
    "name", ["frozen", "drained without a gate", "no route", "no room", "no development endpoints"]
)
def test_what_force_is_not_for(name):
    now, state, _refusal = JUDGEMENTS[name]
    with pytest.raises(Refused):
        judge(now, [want()], state, force=True)


def test_who_is_seen_to_use_it_is_named():
    busy = dataclasses.replace(api_state(running=2).metrics, busy_adapters=["legal", "sql"])
    now = engine(have(digest="old"), api=dataclasses.replace(api_state(running=2), metrics=busy))
    with pytest.raises(Refused, match="requests for sql are in flight") as caught:
        judge(now, [want()])
    assert caught.value.details["left"] == {"in_flight": 2, "sessions": 0, "in_use": ["sql"]}


# Sleep and wake.

DECLARES = EngineAdapters(True, [AdapterConfig("sql", "/a/sql")], [], {})
BY_HAND = EngineAdapters(False, [], [have()], {})
SOMEBODY_ELSES = EngineAdapters(False, [], [have(digest="")], {})
NO_LORA = EngineAdapters(False, [], [], {})
ASLEEP = observation(
    gate=gate_state("closed"), api=api_state(paused=True, sleep="weights_offloaded"), held=lease(purpose="asleep")
)
WOKEN = observation(gate=gate_state("closed"), held=lease(purpose="awake"))
DROWSY = observation(gate=gate_state("closed"), held=lease(purpose="asleep"), sleep=sleep_record(1))


@pytest.mark.parametrize(
    ("now", "wanted", "adapters_", "there"),
    [
        (ASLEEP, "awake", DECLARES, True),
        (ASLEEP, "awake", BY_HAND, True),
        (ASLEEP, "awake", SOMEBODY_ELSES, False),
        (ASLEEP, "awake", NO_LORA, False),
        (WOKEN, "awake", DECLARES, True),
        (WOKEN, "serving", DECLARES, True),
        (DROWSY, "serving", DECLARES, True),
        (observation(gate=gate_state("withdrawn")), "serving", DECLARES, False),
        (observation(unit=unit_state("inactive", "dead")), "started", DECLARES, False),
    ],
)
def test_a_wake_looks_at_them_again_after_the_proof(now, wanted, adapters_, there):
    steps = [step.name for step in plan(wanted, dataclasses.replace(now, adapters=adapters_), Options(owner=OURS))]
    assert ("adapters" in steps) is there
    if there:
        assert steps[steps.index("adapters") - 1] == "prove", "first the model itself, then what is built on it"
        assert steps.index("adapters") < steps.index("admit")


@pytest.mark.parametrize("seen", [DECLARES, BY_HAND, SOMEBODY_ELSES], ids=["configured", "ours", "somebody else's"])
def test_level_2_is_refused_while_lora_is_on(seen):
    now = dataclasses.replace(observation(), adapters=seen)
    with pytest.raises(Refused, match="has LoRA on"):
        plan("asleep", now, Options(owner=OURS, level=2))
    assert plan("asleep", dataclasses.replace(now, gpus=None), Options(owner=OURS, level=1))
    assert plan("asleep", dataclasses.replace(now, adapters=NO_LORA), Options(owner=OURS, level=2))


@pytest.mark.parametrize("wanted", ["awake", "asleep"])
def test_after_level_2_it_is_restarted(wanted):
    gone = observation(
        gate=gate_state("closed"), api=api_state(paused=True, sleep="discard_all"), sleep=sleep_record(2)
    )
    now = dataclasses.replace(gone, adapters=DECLARES)
    with pytest.raises(Refused) as caught:
        plan(wanted, now, Options(owner=OURS, level=1))
    assert "restart it" in caught.value.next_step
    assert "stop" in [step.name for step in plan("restarted", now, Options(owner=OURS))]


# What counts as an effect.


def said(*tokens, logprobs=None, top=()):
    return Answer(
        list(tokens), [-1.0] * len(tokens) if logprobs is None else list(logprobs), [list(one) for one in top]
    )


EFFECTS = {
    # the model twice, the adapter, effect
    "the same": (said(1, 2), said(1, 2), said(1, 2), False),
    "another token": (said(1, 2), said(1, 2), said(1, 3), True),
    "another token, no log probabilities": (
        said(1, 2, logprobs=()),
        said(1, 2, logprobs=()),
        said(1, 3, logprobs=()),
        True,
    ),
    "another probability": (said(1, 2), said(1, 2), said(1, 2, logprobs=[-1.0, -1.01]), True),
    "rounding": (said(1, 2), said(1, 2), said(1, 2, logprobs=[-1.0, -1.0005]), False),
    "no more than the model's own noise": (
        said(1, 2),
        said(1, 2, logprobs=[-1.0, -1.02]),
        said(1, 2, logprobs=[-1.0, -1.05]),
        False,
    ),
    "more than the model's own noise": (
        said(1, 2),
        said(1, 2, logprobs=[-1.0, -1.02]),
        said(1, 2, logprobs=[-1.0, -1.2]),
        True,
    ),
    "a tie that fell otherwise": (
        said(1, 2, top=[[[1, -1.0], [9, -4.0]], [[2, -1.0], [3, -1.0]]]),
        said(1, 2, top=[[[1, -1.0], [9, -4.0]], [[2, -1.0], [3, -1.0]]]),
        said(1, 3, top=[[[1, -1.0], [9, -4.0]], [[3, -1.0], [2, -1.0]]]),
        False,
    ),
    "a model that is not stable shows nothing": (said(1, 2), said(1, 5), said(1, 3), False),
    "vectors": (Answer(vector=[1.0, 0.0]), Answer(vector=[1.0, 0.0]), Answer(vector=[1.0, 0.1]), True),
    "equal vectors": (Answer(vector=[1.0, 0.0]), Answer(vector=[1.0, 0.0]), Answer(vector=[1.0, 0.0001]), False),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_what_counts_as_an_effect(name):
    model, again, adapter, effect = EFFECTS[name]
    assert has_effect(model, again, adapter) is effect


# Reading.


def test_what_is_loaded_is_joined_with_what_we_know():
    record = Record(10, "i", {"sql": {"path": "/a/sql", "digest": "new", "proved": True}})
    served = [Served("tiny", "/m", ""), Served("sql", "/a/sql", "tiny"), Served("legal", "/a/legal", "tiny")]
    assert join(record, served) == [have(), have("legal", digest="", proved=False)]
    moved = [Served("sql", "/elsewhere", "tiny")]
    assert join(record, moved) == [have(path="/elsewhere", digest="", proved=False)]


def test_a_record_is_of_one_process_by_number_and_invocation():
    unit = dataclasses.replace(unit_state(), invocation="first")
    record = Record(
        unit.main_pid, "first", {"sql": {"path": "/a", "digest": "d", "proved": False}}, [["sql", "/a", "d"]]
    )
    write_record("chat", record)
    assert read_record("chat", unit) == record
    for other in (dataclasses.replace(unit, main_pid=11), dataclasses.replace(unit, invocation="second")):
        assert read_record("chat", other) == Record(other.main_pid, other.invocation)


@pytest.mark.parametrize(
    "spoilt",
    ["[]", "{", '{"schema": 1}', '{"schema": 1, "main_pid": true}', "adapters", "entry", "cached"],
)
def test_a_record_that_is_none(spoilt):
    value = {
        "schema": 1,
        "main_pid": 10,
        "adapters": {"sql": {"path": "/a", "digest": "d", "proved": True}},
        "cached": [],
    }
    broken = {
        "adapters": {**value, "adapters": ["sql"]},
        "entry": {**value, "adapters": {"sql": {"path": "/a"}}},
        "cached": {**value, "cached": [["sql", "/a"]]},
    }
    path = store.state_dir("chat") / "adapters.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(broken[spoilt]) if spoilt in broken else spoilt)
    with pytest.raises(UsageError) as caught:
        read_record("chat", unit_state())
    assert str(path) in str(caught.value) and str(path) in caught.value.next_step


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([{"name": "sql"}], "key adapters: "),
        ([{"name": "sql", "path": 5}], "wrong type for path"),
        (["sql"], "is no JSON object"),
        ({"sql": "/a"}, "wrong type for adapters"),
        ([{"name": "sql", "path": "/a", "prove": "yes"}], "wrong type for prove"),
    ],
)
def test_declarations_that_are_none(value, says):
    with pytest.raises(UsageError, match=says):
        config.build(config.EngineConfig, DECLARED | {"adapters": value}, "chat.json")


def test_declarations():
    value = {"adapters": [{"name": "sql", "path": "/a", "base": "m", "prove": False}], "lora": None}
    built = config.build(config.EngineConfig, DECLARED | value, "chat.json")
    assert built.adapters == [AdapterConfig("sql", "/a", "m", False)]
    assert built.lora is None
    adapters.check_room(built, ["a", "b"])  # what an older role did not write down is not judged


def test_room_is_that_of_max_loras_unless_told_otherwise():
    built = config.build(config.EngineConfig, DECLARED | {"lora": {"max_loras": 2}}, "chat.json")
    adapters.check_room(built, ["a", "b"])
    with pytest.raises(Refused, match="keeps 2 adapter"):
        adapters.check_room(built, ["a", "b", "c"])


SEEN = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="%s",waiting_lora_adapters="%s"} %s'


@pytest.mark.parametrize(
    ("lines", "busy"),
    [
        ([], None),
        ([SEEN % ("", "", "1.5")], []),
        ([SEEN % ("", "", "1.5"), SEEN % ("a", "b", "1.7")], ["a", "b"]),
        ([SEEN % ("", "", "1.7959867e+09"), SEEN % ("a", "a", "1.7959866e+09")], []),
        ([SEEN % ("a,b", "b", "2"), SEEN % ("c", "", "1")], ["a", "b"]),
    ],
)
def test_which_adapters_have_requests(lines, busy):
    assert parse_metrics("\n".join(lines)).busy_adapters == busy


def test_a_time_that_is_none():
    with pytest.raises(Surprise, match="lora_requests_info"):
        parse_metrics(SEEN % ("a", "a", "NaN"))
