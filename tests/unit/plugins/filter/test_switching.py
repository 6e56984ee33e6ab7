# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is decided about engines that share a GPU: truth tables of states and wishes."""

from __future__ import annotations

import pytest

from ansible_collections.baremetal.vllm.plugins.filter import switching

GPU0, GPU1 = "GPU-0", "GPU-1"
CHAT = {"name": "chat", "model": "/srv/models/chat", "gpus": [GPU0], "port": 8001}
CODE = {"name": "code", "model": "/srv/models/code", "gpus": [GPU0], "port": 8002}
EMBED = {"name": "embed", "model": "/srv/models/embed", "gpus": [GPU1], "port": 8003}
PAIR = [CHAT, CODE]
DEV = {"dev_mode": True}


def lease(owner="switch", *, expired=False, reason="why", purpose="asleep"):
    return {"owner": owner, "expired": expired, "reason": reason, "purpose": purpose}


def seen(state="serving", **changes):
    value = {
        "state": state,
        "level": 1 if state == "asleep" else None,
        "reasons": ["it is hung"] if state == "unknown" else [],
        "unseen": {},
        "unit": {"active_state": "active", "pids": []},
        "api": DEV,
        "gpus": None,
        "lease": None,
        "sleep": None,
    }
    return {**value, **changes}


def plan(engines, awake=("code",), asleep=None, instances=None, **options):
    return switching.vllm_switch_plan(engines, PAIR if instances is None else instances, list(awake), asleep, **options)


def work(found):
    """The part of a plan that changes something."""
    return {key: found[key] for key in ("sleep", "wake", "start", "admit") if found[key]}


def said(found):
    return "; ".join(found["held"] + found["settling"] + found["refused"])


AT_1 = [{"level": 1, "engines": ["chat"]}]


# What becomes of chat when code is to have the GPU, with code asleep.
@pytest.mark.parametrize(
    ("chat", "expected", "says"),
    [
        (seen("serving"), {"sleep": AT_1, "wake": ["code"]}, ""),
        (seen("withdrawn"), {"sleep": AT_1, "wake": ["code"]}, ""),
        (seen("draining"), {"sleep": AT_1, "wake": ["code"]}, ""),
        (seen("drained"), {"sleep": AT_1, "wake": ["code"]}, ""),
        (seen("drained", lease=lease()), {"sleep": AT_1, "wake": ["code"]}, ""),
        (seen("asleep"), {"wake": ["code"]}, ""),
        (seen("asleep", level=2), {"wake": ["code"]}, ""),
        (seen("asleep", sleep={"proved": True}), {"wake": ["code"]}, ""),
        # nobody has measured what it holds
        (seen("asleep", sleep={"proved": False}), {"sleep": AT_1, "wake": ["code"]}, ""),
        # it has its weights on the GPU
        (seen("asleep", level=0), {"sleep": AT_1, "wake": ["code"]}, ""),
        (seen("waking"), {"sleep": AT_1, "wake": ["code"]}, ""),
        (seen("stopped"), {"wake": ["code"]}, ""),
        (seen("failed"), {"wake": ["code"]}, ""),
        (seen("starting"), {}, "'chat' is starting: wait until it has settled"),
        (seen("draining", unit={"active_state": "deactivating", "pids": []}), {}, "'chat' is draining: wait"),
        (seen("unknown"), {}, "'chat' is unknown (it is hung): restart it with vllm_engine, or stop it"),
        (seen("serving", lease=lease("ops")), {}, "'chat' is held by ops (why)"),
        (seen("drained", lease=lease("ops", reason="")), {}, "'chat' is held by ops (no reason given)"),
        (seen("drained", lease=lease("ops", expired=True)), {"sleep": AT_1, "wake": ["code"]}, ""),
        # nothing is wanted of it that its holder would mind
        (seen("asleep", lease=lease("ops")), {"wake": ["code"]}, ""),
        (seen("serving", api={"dev_mode": False}), {}, "'chat' has no development endpoints"),
        (seen("serving", api={"dev_mode": None}), {"sleep": AT_1, "wake": ["code"]}, ""),
    ],
)
def test_who_has_to_go(chat, expected, says):
    found = plan({"chat": chat, "code": seen("asleep")})
    assert work(found) == expected
    assert says in said(found)
    assert bool(says) == bool(said(found))
    assert found["going"] == (["chat"] if "sleep" in expected and chat["state"] == "serving" else [])


# What becomes of code, with chat serving.
@pytest.mark.parametrize(
    ("code", "action", "says"),
    [
        (seen("asleep"), "wake", ""),
        (seen("asleep", level=0), "wake", ""),
        (seen("asleep", lease=lease()), "wake", ""),
        (seen("asleep", lease=lease("ops", expired=True)), "wake", ""),
        (seen("waking"), "wake", ""),
        (seen("stopped"), "start", ""),
        (seen("failed"), "start", ""),
        (seen("withdrawn"), "admit", ""),
        (seen("drained"), "admit", ""),
        (seen("draining"), "admit", ""),
        (seen("serving"), "", ""),
        # a run was killed after it had admitted it
        (seen("serving", lease=lease()), "admit", ""),
        (seen("serving", lease=lease("ops", expired=True)), "admit", ""),
        (seen("serving", lease=lease("ops")), "", ""),
        (seen("starting"), None, "'code' is starting: wait"),
        (seen("unknown"), None, "'code' is unknown"),
        (seen("asleep", lease=lease("ops")), None, "'code' is held by ops"),
        (seen("drained", lease=lease("ops")), None, "'code' is held by ops"),
    ],
)
def test_who_is_to_come(code, action, says):
    found = plan({"chat": seen("serving"), "code": code})
    expected = {} if action is None else {"sleep": AT_1} | ({action: ["code"]} if action else {})
    assert work(found) == expected
    assert says in said(found)
    assert bool(says) == bool(said(found))


@pytest.mark.parametrize(
    "chat",
    [seen("asleep"), seen("asleep", level=2), seen("asleep", level=0), seen("asleep", sleep={"proved": False}),
     seen("asleep", lease=lease("ops")), seen("asleep", lease=lease()), seen("stopped"), seen("failed")],
)  # fmt: skip
def test_done_is_done(chat):
    """Also where another level was wanted: it would have to wake beside the one that serves."""
    found = plan({"chat": chat, "code": seen("serving")}, level=2)
    assert work(found) == {}
    assert said(found) == ""


def test_what_is_half_awake_beside_one_that_serves_is_not_woken_to_be_put_to_sleep():
    found = plan({"chat": seen("waking"), "code": seen("serving")})
    assert work(found) == {}
    assert said(found) == "'chat' is half awake beside code: stop it with vllm_engine state=stopped"


def test_force_goes_over_leases():
    engines = {"chat": seen("serving", lease=lease("ops")), "code": seen("asleep", lease=lease("schedule"))}
    assert work(plan(engines, force=True)) == {"sleep": AT_1, "wake": ["code"]}
    assert work(plan(engines, owner="schedule")) == {}


def test_levels():
    engines = {name: seen("serving") for name in ("chat", "code", "embed")}
    found = plan(engines, ["code"], {"embed": 2}, [CHAT, CODE, EMBED], level=1)
    assert found["sleep"] == [{"level": 1, "engines": ["chat"]}, {"level": 2, "engines": ["embed"]}]
    found = plan(engines, ["code"], {"embed": 2, "chat": 2}, [CHAT, CODE, EMBED])
    assert found["sleep"] == [{"level": 2, "engines": ["chat", "embed"]}]


def test_nothing_wanted_is_nothing_done():
    assert work(plan({"chat": seen("drained"), "code": seen("unknown")}, [])) == {}
    assert said(plan({}, [], None, [])) == ""


@pytest.mark.parametrize(
    ("awake", "asleep", "says"),
    [
        (["cdoe"], None, "there is no engine 'cdoe' here; engines of this host: chat, code"),
        ([], {"cdoe": 1}, "there is no engine 'cdoe' here"),
        (["chat", "code"], None, "'chat' cannot be awake beside ['code']"),
        (["chat"], {"chat": 1}, "'chat' cannot be awake beside its own sleep"),
    ],
)
def test_wishes_that_cannot_be(awake, asleep, says):
    found = plan({"chat": seen(), "code": seen("asleep")}, awake, asleep)
    assert work(found) == {}
    assert says in said(found)


def test_one_part_of_a_host_does_not_wait_for_another():
    """Chat and code have one GPU, embed another: what someone holds keeps its own neighbours, and no others."""
    engines = {"chat": seen("serving", lease=lease("ops")), "code": seen("asleep"), "embed": seen("asleep")}
    found = plan(engines, ["code", "embed"], None, [CHAT, CODE, EMBED])
    assert work(found) == {"wake": ["embed"]}
    assert said(found) == "'chat' is held by ops (why)"


def test_engines_on_two_gpus_have_the_engines_of_both_as_neighbours():
    wide = {"name": "wide", "model": "/m", "gpus": [GPU0, GPU1]}
    instances = [CHAT, EMBED, wide]
    engines = {"chat": seen("serving"), "embed": seen("serving"), "wide": seen("stopped")}
    assert work(plan(engines, ["wide"], None, instances)) == {
        "sleep": [{"level": 1, "engines": ["chat", "embed"]}],
        "start": ["wide"],
    }
    engines["wide"] = seen("serving")
    assert work(plan(engines, ["chat"], None, instances)) == {"sleep": [{"level": 1, "engines": ["wide"]}]}
    # one that is held keeps all that are joined to it
    engines = {"chat": seen("serving"), "embed": seen("serving", lease=lease("ops")), "wide": seen("stopped")}
    assert work(plan(engines, ["wide"], None, instances)) == {}


TWO_AND_ONE = {"chat": {"code"}, "code": {"chat"}, "embed": set()}
DEVICES = [{"index": 0, "uuid": GPU0}, {"index": 1, "uuid": GPU1}]


@pytest.mark.parametrize(
    ("gpus", "group", "devices", "expected"),
    [
        ({"chat": [GPU0], "code": [GPU0], "embed": [GPU1]}, [], None, TWO_AND_ONE),
        ({"chat": ["0"], "code": [0], "embed": ["1"]}, [], None, TWO_AND_ONE),
        # an index and the UUID of the same GPU
        ({"chat": ["0"], "code": [GPU0], "embed": ["1"]}, [], DEVICES, TWO_AND_ONE),
        # nobody has said where one of them is, so it may be anywhere
        ({"chat": [GPU0], "code": [GPU0]}, [], None, {"chat": None, "code": None, "embed": None}),
        ({}, ["chat", "code"], None, {"chat": {"code"}, "code": {"chat"}, "embed": None}),
        ({}, [["chat", "code"], ["embed"]], None, TWO_AND_ONE),
        # the group leaves one out that fits beside both
        ({"chat": [GPU0], "code": [GPU0], "embed": [GPU0]}, ["chat", "code"], None, TWO_AND_ONE),
    ],
)
def test_who_shares(gpus, group, devices, expected):
    instances = [{"name": name, "gpus": gpus.get(name, [])} for name in ("chat", "code", "embed")]
    assert switching.sharing(instances, group, devices) == expected


def test_what_is_not_declared_is_not_guessed():
    free = [{**CHAT, "gpus": []}, {**CODE, "gpus": []}]
    engines = {"chat": seen(), "code": seen("asleep")}
    found = plan(engines, instances=free)
    assert work(found) == {}
    assert "which engines share a GPU with 'code' is not said" in said(found)
    assert work(plan(engines, instances=free, group=["chat", "code"])) == {"sleep": AT_1, "wake": ["code"]}
    assert work(plan({"code": seen("stopped")}, instances=[{**CODE, "gpus": []}])) == {"start": ["code"]}


def device(free, processes, total=140000):
    return [{"index": 0, "uuid": GPU0, "free_mib": free, "total_mib": total, "processes": processes}]


def on(pids, state="serving", gpus=None, **changes):
    return seen(state, unit={"active_state": "active", "pids": pids}, gpus=gpus, **changes)


@pytest.mark.parametrize(
    ("free", "processes", "freed", "says"),
    [
        (10000, {"11": 80000, "22": 1500}, 70000, ""),
        (10000, {11: 80000, 22: 1500}, 90000, ""),
        (10000, {"11": 80000, "22": 1500}, 90001, "'code' needs 90001 MiB on GPU-0 and could have 90000 MiB at most"),
        (10000, {"11": 50000, "33": 30000}, 70000, "with chat put to sleep; held by others: process 33 (30000 MiB)"),
        (10000, {"11": None}, 70000, "held by others: nothing that can be seen"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers(free, processes, freed, says):
    gpus = device(free, processes)
    code = on([22], "asleep", gpus, sleep={"proved": True, "freed_mib": {GPU0: freed}})
    found = plan({"chat": on([11], gpus=gpus), "code": code})
    assert says in said(found)
    assert work(found) == ({} if says else {"sleep": AT_1, "wake": ["code"]})


@pytest.mark.parametrize(("share", "fits"), [(None, True), (0.6, True), ("0.9", False)])
def test_what_is_to_start_needs_what_it_declares(share, fits):
    gpus = device(10000, {"11": 80000})
    code = {**CODE, "gpus": ["0"], "config": {} if share is None else {"gpu-memory-utilization": share}}
    found = plan({"chat": on([11], gpus=gpus), "code": seen("stopped", gpus=gpus)}, instances=[CHAT, code])
    assert work(found) == ({"sleep": AT_1, "start": ["code"]} if fits else {})
    assert fits or "'code' needs 126000 MiB on GPU-0" in said(found)


def test_a_gpu_that_cannot_be_seen_is_no_free_one():
    code = seen("asleep", sleep={"proved": True, "freed_mib": {GPU0: 70000}}, unseen={"gpu": "NVML: Driver Not Loaded"})
    found = plan({"chat": seen(), "code": code})
    assert work(found) == {}
    assert "no GPU can be seen: NVML: Driver Not Loaded" in said(found)


# The way back from a switch of chat (serving) to code (asleep), by what a failure has left.
@pytest.mark.parametrize(
    ("chat", "code", "way"),
    [
        ("draining", "asleep", {"admit": ["chat"]}),
        ("drained", "asleep", {"admit": ["chat"]}),
        ("withdrawn", "asleep", {"admit": ["chat"]}),
        ("serving", "asleep", {}),
        ("asleep", "asleep", {"wake": ["chat"]}),
        ("waking", "asleep", {"wake": ["chat"]}),
        ("stopped", "asleep", {"start": ["chat"]}),
        ("failed", "asleep", {"start": ["chat"]}),
        ("starting", "asleep", {"start": ["chat"]}),
        ("unknown", "asleep", {"restart": ["chat"]}),
        ("asleep", "failed", {"wake": ["chat"]}),
        ("asleep", "stopped", {"wake": ["chat"]}),
        ("asleep", "waking", {"stop": ["code"], "wake": ["chat"]}),
        ("asleep", "unknown", {"stop": ["code"], "wake": ["chat"]}),
        ("asleep", "starting", {"stop": ["code"], "wake": ["chat"]}),
        ("asleep", "withdrawn", {"stop": ["code"], "wake": ["chat"]}),
        ("asleep", "drained", {"stop": ["code"], "wake": ["chat"]}),
        ("asleep", "serving", {"sleep": ["code"], "wake": ["chat"]}),
        ("unknown", "unknown", {"stop": ["code"], "restart": ["chat"]}),
    ],
)
@pytest.mark.parametrize("was", ["asleep", "stopped"])
def test_the_way_back(chat, code, way, was):
    before = {"chat": seen("serving"), "code": seen(was)}
    found = switching.vllm_switch_return({"chat": seen(chat), "code": seen(code)}, before, plan(before))
    assert {key: names for key, names in found.items() if names} == way


@pytest.mark.parametrize(("now", "stops"), [(1500, False), (1700, False), (15000, True), (None, False)])
def test_what_says_that_it_sleeps_and_has_memory_again_is_stopped(now, stops):
    """A wake answered 500 after it had brought the weights back."""
    gpus = None if now is None else device(0, {"22": now, "11": 1500})
    code = on([22], "asleep", gpus, sleep={"proved": True, "resident_mib": {GPU0: 1500}})
    before = {"chat": seen("serving"), "code": seen("asleep")}
    way = switching.vllm_switch_return({"chat": seen("asleep"), "code": code}, before, plan(before))
    assert way["stop"] == (["code"] if stops else [])


def test_what_was_not_awake_does_not_come_back():
    """A run that was killed half-way had left chat half awake; nothing is known to have served."""
    before = {"chat": seen("waking"), "code": seen("asleep")}
    found = switching.vllm_switch_return({"chat": seen("asleep"), "code": seen("unknown")}, before, plan(before))
    assert {key: names for key, names in found.items() if names} == {"stop": ["code"]}


@pytest.mark.parametrize(
    ("state", "again"), [("serving", []), ("asleep", ["chat"]), ("stopped", ["chat"]), ("drained", ["chat"])]
)
def test_what_is_to_be_new_is_restarted_from_any_state(state, again):
    renew = {"sleep": [], "wake": [], "start": [], "renew": ["chat"]}
    way = switching.vllm_switch_return({"chat": seen(state)}, {"chat": seen()}, renew)
    assert {key: names for key, names in way.items() if names} == ({"restart": again} if again else {})


@pytest.mark.parametrize(
    ("states", "names", "group", "says"),
    [
        (["serving", "asleep"], ["code"], ["chat", "code"], ["'code' shares its GPU with chat (serving)"]),
        (["drained", "asleep"], ["code"], [["chat", "code"]], ["'code' shares its GPU with chat (drained)"]),
        (["starting", "asleep"], ["code"], ["chat", "code"], ["'code' shares its GPU with chat (starting)"]),
        (["asleep", "asleep"], ["code"], ["chat", "code"], []),
        (["stopped", "asleep"], ["code"], ["chat", "code"], []),
        (["serving", "asleep"], [], ["chat", "code"], []),
        (["serving", "asleep"], ["code"], [], []),
        (["serving", "asleep"], ["code"], [["chat", "embed"]], []),
        (["asleep", "asleep"], ["chat", "code"], ["chat", "code"],
         ["'chat' shares its GPU with code (asleep)", "'code' shares its GPU with chat (asleep)"]),
    ],
)  # fmt: skip
def test_rivals_of_a_wake(states, names, group, says):
    engines = dict(zip(["chat", "code"], map(seen, states)))
    assert switching.vllm_switch_rivals(engines, names, group) == says


@pytest.mark.parametrize(
    ("engine", "action"),
    [
        (seen("asleep"), "wake"),
        (seen("asleep", lease=lease("ops")), "wake"),
        (seen("waking", lease=lease()), "wake"),
        (seen("withdrawn", lease=lease(purpose="awake")), "wake"),
        (seen("serving", lease=lease(purpose="awake")), "wake"),
        (seen("stopped", lease=lease(purpose="stopped for sleep")), "wake"),
        # it died in its sleep, or its host was booted
        (seen("stopped", lease=lease()), "start"),
        (seen("failed", lease=lease()), "start"),
        # its sleep was interrupted
        (seen("drained", lease=lease()), "admit"),
        (seen("draining", lease=lease()), "admit"),
        # someone's wish
        (seen("drained", lease=lease(purpose="drained")), ""),
        (seen("stopped", lease=lease(purpose="stopped")), ""),
        (seen("stopped"), ""),
        (seen("serving"), ""),
        (seen("unknown", lease=lease()), ""),
    ],
)
def test_what_is_to_wake(engine, action):
    for names in ([], ["chat"]):
        found = switching.vllm_wake_plan({"chat": engine}, names)
        assert {key: one for key, one in found.items() if one} == ({action: ["chat"]} if action else {})
    assert not any(switching.vllm_wake_plan({"chat": engine, "code": seen()}, ["code"]).values())


def test_rows_say_where_the_seconds_went():
    steps = {"withdraw": 0.1, "await_router": 3.0, "await_idle": 0.5, "close": 0.1, "sleep": 0.4}
    slept = {"results": [{"engines": {"chat": done_by(steps, 1001.0, "asleep", elapsed=4.2)}}]}
    steps = {"lease": 0.1, "wake": 0.4, "reset_cache": 0.1, "prove": 0.2, "release": 0.1}
    woken = {"engines": {"code": done_by(steps, 1005.4, "serving", elapsed=0.8)}}
    done = {
        "__vllm_switch_plan": {"sleep": AT_1, "wake": ["code"], "start": [], "admit": [], "held": []},
        "__vllm_switch_slept": slept,
        "__vllm_switch_woken": woken,
        "__vllm_switch_started": {"skipped": True, "changed": False},
        "__vllm_switch_begun": "1000.0",
        "__vllm_switch_ended": "1006.5",
    }
    nothing = {
        "__vllm_switch_plan": {"sleep": [], "wake": [], "start": [], "admit": [], "held": ["'chat' is held by ops"]}
    }
    rows = switching.vllm_switch_rows(["e1", "e2", "e3"], {"e1": done, "e2": nothing, "e3": {}})
    assert [row["name"] for row in rows] == ["e1", "e2"], "nothing is known of the third"
    first, second = rows
    spans = first.pop("spans")
    assert [(one["engine"], one["since"], one["seconds"]) for one in spans] == [
        ("chat", 1001.0, 4.1),
        ("code", 1005.5, 0.7),
    ]
    phases = [(one["phase"], one["at"], one["seconds"]) for span in spans for one in span["phases"]]
    assert phases == [
        ("withdraw", 1001.0, 3.1),
        ("drain", 1004.1, 0.6),
        ("sleep", 1004.7, 0.4),
        ("wake", 1005.5, 0.5),
        ("prove", 1006.0, 0.2),
    ]
    assert {key: value for key, value in first.items() if not key.endswith("_s")} == {
        "name": "e1",
        "outcome": "changed",
        "reason": "",
        "engines": ["chat", "code"],
        "states": {"chat": "asleep", "code": "serving"},
        "changed": True,
        "slept": ["chat"],
        "woken": ["code"],
        "held": [],
        "seconds": 6.5,
    }
    parts = ("drain_s", "sleep_s", "wake_s", "start_s", "prove_s", "overhead_s")
    assert [first[key] for key in parts] == [3.7, 0.4, 0.5, 0.0, 0.2, 1.7]
    assert (second["changed"], second["seconds"], second["held"]) == (False, 0.0, ["'chat' is held by ops"])
    assert second["outcome"] == "unchanged"


def done_by(steps, began, state, **more):
    """The result of a call for one engine, whose steps followed each other."""
    found, at = [], began
    for step, seconds in steps.items():
        at += seconds
        found.append({"step": step, "seconds": seconds, "at": round(at, 3)})
    return {"changed": True, "timings": steps, "steps": found, "after": {"state": state}, **more}


@pytest.mark.parametrize(
    ("back", "state", "ended", "shown"),
    [
        # A way back that ends where it should; one that fails too; and none, as of sleep and wake.
        ({"wake": 1.0, "admit": 0.5}, "serving", 11.5, ["withdraw", "sleep", "wake", "admit"]),
        ({"wake": 1.0}, "unknown", None, ["withdraw", "sleep", "wake"]),
        ({}, "withdrawn", None, ["withdraw", "sleep"]),
    ],
)
def test_rows_of_a_run_that_failed(back, state, ended, shown):
    plan = {"sleep": AT_1, "wake": ["code"], "start": [], "admit": [], "held": []}
    slept = done_by({"withdraw": 0.1, "sleep": 2.0}, 1000.0, "withdrawn", failed=True)
    again = {"engines": {"chat": done_by(back, 1010.0, state, failed=ended is None)}}
    broken = {
        "__vllm_switch_plan": plan,
        "__vllm_switch_begun": "1000.0",
        "__vllm_switch_said": "e1: it freed nothing",
        "__vllm_switch_slept": {"failed": True, "results": [{"engines": {"chat": slept}}]},
        **({"__vllm_switch_rewoken": again} if back else {}),
    }
    first, second = switching.vllm_switch_rows(["e1", "e2"], {"e1": broken, "e2": {"__vllm_switch_plan": plan}})
    assert (first["outcome"], first["reason"], first["states"]) == ("failed", "e1: it freed nothing", {"chat": state})
    (span,) = first["spans"]
    assert (span["engine"], span["since"], span["seconds"]) == ("chat", 1000.0, ended)
    assert [one["phase"] for one in span["phases"]] == shown
    assert (second["outcome"], second["spans"], second["engines"]) == ("waiting", [], ["chat", "code"])
