# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an upgrade does with an engine, by truth tables."""

from __future__ import annotations

import pytest

from ansible_collections.baremetal.vllm.plugins.filter import upgrade

WANT = {"config_digest": "new", "runtime_version": "0.32.0", "preload": False, "start": True}
OURS = {"owner": "rolling_upgrade", "run": "u1"}
OPS = {"owner": "ops", "run": ""}


def seen(state="serving", runs="old", disk="old", lease=None, pid=7, by="golden", back=True, version="0.31.0"):
    """An engine of vllm_info whose process was proved with ``runs``."""
    started = {"main_pid": 7, "config_digest": runs, "runtime_version": version, "proof": {"by": by}}
    return {
        "state": state,
        "config_digest": disk,
        "runtime_version": version,
        "lease": lease,
        "unit": {"main_pid": pid},
        "started": started,
        "goes_back": {"name": "proved"} if back else None,
    }


CASES = [
    # what is seen of the engine, what the inventory says of it otherwise, its part of the plan
    (seen(), {}, "change"),
    (seen(runs="new", disk="new"), {}, None),
    (seen(runs="old", disk="new"), {}, "change"),  # its files were written, its process never read them
    (seen(runs="new", disk="old"), {}, "write"),
    (seen(runs="new", disk="new", pid=9), {}, "change"),  # what was proved is not what runs
    (seen(runs="new", disk="new", state="withdrawn", lease=OURS), {}, "finish"),
    (seen(runs="new", disk="new", state="drained", lease=OURS), {}, "finish"),
    (seen(runs="new", disk="new", state="drained", lease=OPS), {}, None),
    (seen(runs="old", disk="new", state="drained", lease=OURS), {}, "change"),
    (seen(state="stopped", pid=0), {}, "change"),
    (seen(state="stopped", pid=0), {"start": False}, "write"),  # parked: its next start reads the new files
    (seen(state="stopped", pid=0, disk="new"), {"start": False}, None),
    (seen(state="stopped", pid=0, lease=OURS), {"start": False}, "change"),
    (seen(state="stopped", pid=0, disk="new", lease=OURS), {}, "change"),
    (seen(state="failed", pid=0), {}, "change"),
    (seen(state="starting", pid=9, disk="new", lease=OURS), {}, "change"),
    (seen(state="unknown"), {}, "change"),
    (seen(state="unknown", runs="new", disk="new"), {}, "change"),
    (seen(state="asleep", runs="new", disk="new"), {}, None),
    (seen(state="asleep"), {}, "refused"),
    (seen(state="waking"), {}, "refused"),
    (seen(), {"preload": True}, "refused"),  # its daemon would have to change too
    (seen(version="0.32.0"), {"preload": True}, "change"),
]


@pytest.mark.parametrize(("engine", "want", "part"), CASES)
def test_what_becomes_of_an_engine(engine, want, part):
    plan = upgrade.vllm_upgrade_plan({"chat": engine}, {"chat": {**WANT, **want}})
    found = [name for name in ("change", "finish", "write", "refused") if plan[name]]
    assert found == ([part] if part else [])
    if part == "refused":
        assert "chat" in plan["refused"][0]
    assert plan["drain"] == (["chat"] if part == "change" and engine["state"] in upgrade.AWAKE else [])
    parts = {None: "done", "refused": "done", "write": "todo"}
    whole = "todo" if engine["state"] == "serving" else "first"
    assert plan["part"] == parts.get(part, whole)


def test_an_engine_that_is_not_there_is_refused_and_one_that_nobody_wants_is_left():
    plan = upgrade.vllm_upgrade_plan({"old": seen()}, {"chat": WANT})
    assert plan["refused"] == ["engine 'chat' is not on this host yet; run baremetal.vllm.site"]
    assert plan["change"] == []


@pytest.mark.parametrize(
    ("by", "golden", "unproved"),
    [
        ("golden", None, []),
        ("completion", None, ["chat"]),
        ("completion", {"matches": True}, []),  # recorded after its start
        ("completion", {"matches": False}, ["chat"]),
    ],
)
def test_engines_without_a_golden_are_named(by, golden, unproved):
    engine = {**seen(by=by), "golden": golden}
    assert upgrade.vllm_upgrade_plan({"chat": engine}, {"chat": WANT})["unproved"] == unproved


@pytest.mark.parametrize(
    ("canaries", "canary", "rest", "control"),
    [
        (0, [], ["e3", "e1", "e4"], []),
        (1, ["e3"], ["e1", "e4"], ["e1"]),  # the one that does not serve comes first
        (2, ["e3", "e1"], ["e4"], ["e4"]),
        (9, ["e3", "e1", "e4"], [], []),
    ],
)
def test_the_order_of_hosts(canaries, canary, rest, control):
    parts = {"e1": "todo", "e2": "done", "e3": "first", "e4": "todo"}
    found = upgrade.vllm_upgrade_order(list(parts), placed(parts), canaries)
    assert {key: found[key] for key in ("canary", "rest", "control")} == {
        "canary": canary,
        "rest": rest,
        "control": control,
    }
    assert found["peers"] == {host: [host] for host in ("e3", "e1", "e4")}


def placed(parts, groups=()):
    """Hosts with an engine each, which is of a group where ``groups`` says so."""
    return {
        host: {
            "__vllm_upgrade_plan": {"part": part, "drain": ["chat"] if part == "todo" else []},
            "__vllm_upgrade_seen": {"engines": {"chat": {"group": dict(groups).get(host, "")}}},
        }
        for host, part in parts.items()
    }


def test_the_hosts_of_a_group_follow_each_other_and_count_as_one():
    parts = {"e1": "todo", "e2": "todo", "e3": "done", "e4": "todo", "e5": "first", "e6": "done"}
    groups = {"e2": "large", "e4": "large", "e3": "wide", "e5": "wide"}
    hosts = list(parts)
    found = upgrade.vllm_upgrade_order(hosts, placed(parts, groups), 1, [1, "50%"])
    assert found == {
        "canary": ["e3", "e5"],  # the group that does not serve
        "rest": ["e1", "e2", "e4"],
        "control": ["e1"],
        "peers": {"e1": ["e1"], "e2": ["e2", "e4"], "e3": ["e3", "e5"], "e4": ["e2", "e4"], "e5": ["e3", "e5"]},
        "serial": {"canary": [2], "rest": [1, 2]},
    }


@pytest.mark.parametrize(
    ("batch", "serial"),
    [
        (1, [2, 1, 3, 1]),
        ("1", [2, 1, 3, 1]),
        (2, [3, 4]),
        ("25%", [2, 1, 3, 1]),
        ("50%", [3, 4]),
        ("1%", [2, 1, 3, 1]),
        ([1, "75%"], [2, 5]),
        ([1, 2], [2, 4, 1]),
        (9, [7]),
    ],
)
def test_a_batch_is_of_groups(batch, serial):
    parts = dict.fromkeys(("a1", "a2", "b", "c1", "c2", "c3", "d"), "todo")
    groups = {"a1": "a", "a2": "a", "c1": "c", "c2": "c", "c3": "c"}
    found = upgrade.vllm_upgrade_order(list(parts), placed(parts, groups), 0, batch)
    assert found["serial"] == {"canary": [1], "rest": serial}


def grouped(**changes):
    return {**seen(**changes), "group": "large"}


def headless(**changes):
    return {**grouped(**{"state": "headless", "by": None, **changes}), "headless": True}


def as_one(engines, wants):
    """The plans of the hosts, each with one engine, before and after the groups are looked at."""
    hostvars = {
        host: {
            "__vllm_upgrade_seen": {"engines": {"chat": engine}},
            "__vllm_upgrade_plan": upgrade.vllm_upgrade_plan(
                {"chat": engine}, {"chat": {**WANT, **wants.get(host, {})}}
            ),
        }
        for host, engine in engines.items()
    }
    return {
        host: upgrade.vllm_upgrade_together(values["__vllm_upgrade_plan"], list(hostvars), hostvars, host)
        for host, values in hostvars.items()
    }


NEW = {"runs": "new", "disk": "new"}


@pytest.mark.parametrize(
    ("head", "part", "parts"),
    [
        # the part of the plan that the head and the headless engine have, and which only goes along
        (grouped(), headless(), ["change", "change"]),
        (grouped(**NEW), headless(**NEW), [None, None]),
        (grouped(), headless(**NEW), ["change", "along"]),
        (grouped(**NEW), headless(), ["along", "change"]),
        (grouped(**NEW), headless(runs="new", disk="old"), [None, "write"]),
        (grouped(), headless(runs="new", disk="old"), ["change", "change"]),
        (grouped(**NEW, state="withdrawn", lease=OURS), headless(**NEW, lease=OURS), ["finish", "finish"]),
        (
            grouped(**NEW, state="withdrawn", lease=OURS),
            headless(**NEW, state="failed", lease=OURS),
            ["along", "change"],
        ),
        ({**grouped(), "group": "wide"}, headless(**NEW), ["change", None]),
        ({**grouped(), "group": ""}, headless(**NEW), ["change", None]),
    ],
)
def test_all_of_a_group_change_or_none(head, part, parts):
    plans = as_one({"h1": head, "h2": part}, {})
    found = []
    for plan in plans.values():
        names = [name for name in ("change", "finish", "write", "along") if plan[name]]
        found.append("along" if names == ["change", "along"] else names[0] if names else None)
    assert found == parts
    assert [plan["headless"] for plan in plans.values()] == [[], ["chat"]]
    assert plans["h2"]["drain"] == [], "its head drains for it"
    proved = plans["h2"]["change"] and (head["state"], head["group"], part["state"]) == ("serving", "large", "headless")
    assert plans["h2"]["keep"] == (["chat"] if proved else [])
    assert plans["h2"]["unproved"] == [], "its head is proved for it"


@pytest.mark.parametrize(
    ("left", "way"),
    [
        (seen(disk="new", state="failed", pid=0), {"back": ["chat"], "serve": ["chat"]}),
        (seen(disk="new", runs="new", state="withdrawn"), {"back": ["chat"], "serve": ["chat"]}),
        (seen(disk="new", state="failed", back=False), {"lost": ["chat"]}),
        (
            {**seen(state="stopped"), "goes_back": {"config_digest": "old"}},
            {"back": ["chat"], "serve": ["chat"]},
        ),  # torn
        (seen(state="withdrawn"), {"serve": ["chat"]}),  # it is back already
        (seen(state="draining"), {"serve": ["chat"]}),
        (seen(state="stopped", pid=0), {"restart": ["chat"], "serve": ["chat"]}),
        (seen(state="unknown"), {"restart": ["chat"], "serve": ["chat"]}),
    ],
)
def test_the_way_back(left, way):
    found = upgrade.vllm_upgrade_way({"chat": left}, {"chat": WANT}, {"change": ["chat"], "finish": [], "along": []})
    assert {name: engines for name, engines in found.items() if engines} == way


@pytest.mark.parametrize(
    ("head", "part", "along", "ways"),
    [
        # nothing was stopped yet
        (grouped(state="drained"), headless(), "", [["serve"], ["serve"]]),
        # the head is stopped, the headless engine not yet
        (grouped(state="stopped", pid=0), headless(), "", [["restart", "serve"], ["restart", "serve"]]),
        (grouped(state="stopped", pid=0), headless(disk="new"), "", [["restart", "serve"], ["back", "serve"]]),
        (grouped(state="failed", disk="new"), headless(**NEW), "", [["back", "serve"], ["back", "serve"]]),
        # the headless engine keeps its configuration, and was restarted with the others
        (grouped(state="failed", disk="new"), headless(**NEW), "h2", [["back", "serve"], ["restart", "serve"]]),
        (grouped(state="failed", disk="new"), headless(disk="new", back=False), "", [["lost"], ["lost"]]),
        (grouped(state="stopped"), headless(disk="new", back=False), "", [["lost"], ["lost"]]),
        (
            {**grouped(state="failed", disk="new"), "group": ""},
            headless(disk="new", back=False),
            "",
            [["back", "serve"], ["lost"]],
        ),
        ({**grouped(state="failed", disk="new"), "group": ""}, headless(), "", [["back", "serve"], ["serve"]]),
    ],
)
def test_all_of_a_group_go_back_or_none(head, part, along, ways):
    hostvars = {}
    for host, left in {"h1": head, "h2": part}.items():
        plan = {"change": ["chat"], "finish": [], "along": ["chat"] if host == along else []}
        hostvars[host] = {
            "__vllm_upgrade_left": {"engines": {"chat": left}},
            "__vllm_upgrade_way": upgrade.vllm_upgrade_way({"chat": left}, {"chat": WANT}, plan),
        }
    for host, way in zip(hostvars, ways, strict=True):
        found = upgrade.vllm_upgrade_way_together(hostvars[host]["__vllm_upgrade_way"], list(hostvars), hostvars, host)
        assert sorted(name for name, engines in found.items() if engines) == sorted(way)
        assert all(engines in ([], ["chat"]) for engines in found.values())


def watched(requests, errors=0, first=0.05, token=0.01):
    return {
        "seconds": 300.0,
        "requests": requests,
        "errors": errors,
        "latency": {"first_token": first, "per_token": token},
    }


def soak(canary, control=None, failed=""):
    looks = {"e1": canary, "e2": control}
    hostvars = {
        host: {
            "__vllm_upgrade_plan": {"change": ["chat"], "finish": []},
            "__vllm_upgrade_watch": {"results": [{"engines": {"chat": {"watched": look}}}] if look else []},
        }
        for host, look in looks.items()
    }
    hostvars["e1"]["__vllm_upgrade_watch_failed"] = failed
    return upgrade.vllm_upgrade_soak(["e1"], ["e2"] if control else [], hostvars, 2.0)


@pytest.mark.parametrize(
    ("canary", "control", "bad", "says"),
    [
        (watched(0), watched(100), "", "no request came"),
        (watched(100), None, "", "too few requests"),
        (watched(100), watched(9), "", "too few requests"),
        (watched(9, first=9.0), watched(100), "", "too few requests"),
        (watched(100), watched(100), "", "time to the first token of 'chat' 50.0 ms, 50.0 ms on e2"),
        (watched(100, first=0.1), watched(100), "", "100.0 ms"),
        (watched(100, first=0.11), watched(100), "time to the first token of 'chat' 110.0 ms", "2.20 times"),
        (watched(100, token=0.03), watched(100), "time per further token of 'chat' 30.0 ms", "where 2 is allowed"),
        (watched(100, first=None), watched(100), "", "time per further token"),
        (watched(100), watched(100, first=None), "", "time per further token"),
    ],
)
def test_latency_is_compared_with_a_host_that_has_the_old_version(canary, control, bad, says):
    found = soak(canary, control)
    assert list(found["failures"]) == (["e1"] if bad else [])
    assert bad in found["failures"].get("e1", "")
    assert says in " ".join([*found["notes"], *found["failures"].values()])


def test_what_the_watch_itself_has_found_is_a_failure():
    assert soak(watched(5, 5), failed="5 of 5 failed")["failures"] == {"e1": "5 of 5 failed"}


def test_rows_and_lines():
    plan = {"change": ["chat"], "finish": [], "write": []}
    before = {"started": {"runtime_version": "0.31.0", "speed": {"tokens_per_s": 100.0}}, "state": "serving"}
    after = {"started": {"runtime_version": "0.32.0", "speed": {"tokens_per_s": 110.0}}, "state": "serving"}
    base = {
        "__vllm_upgrade_plan": plan,
        "__vllm_engine_wants": {"chat": WANT},
        "__vllm_upgrade_seen": {"engines": {"chat": before}},
    }
    back = {**after, "started": before["started"]}
    hostvars = {
        "e1": {
            **base,
            "__vllm_upgrade_after": {"engines": {"chat": after}},
            "__vllm_upgrade_outcome": {"outcome": "upgraded", "seconds": 61.0},
        },
        "e2": {
            **base,
            "__vllm_upgrade_after": {"engines": {"chat": back}},
            "__vllm_upgrade_outcome": {"outcome": "rolled_back", "seconds": "90.0", "reason": "it is slow"},
            "__vllm_upgrade_start": {"engines": {"chat": {"speed": {"tokens_per_s": 9.0, "before": 100.0}}}},
        },
        "e3": base,
        "e4": {**base, "__vllm_upgrade_plan": {"change": [], "finish": [], "write": []}},
        "e5": {},  # not part of this run
    }
    rows = upgrade.vllm_upgrade_rows(list(hostvars), hostvars)
    assert [(row["outcome"], row["runs"], row["seconds"]) for row in rows] == [
        ("upgraded", "0.32.0", 61.0),
        ("rolled_back", "0.31.0", 90.0),
        ("waiting", "0.31.0", None),
        ("unchanged", "0.31.0", None),
    ]
    assert [(row["speed_before"], row["speed_after"]) for row in rows[:2]] == [(100.0, 110.0), (100.0, 9.0)]
    assert upgrade.vllm_upgrade_lines(rows) == [
        "e1 chat: vLLM 0.31.0 -> 0.32.0, upgraded, 61 s, 100 -> 110 tokens/s",
        "e2 chat: vLLM 0.31.0 -> 0.32.0, rolled_back, runs 0.31.0, 90 s, it is slow",
        "e3 chat: vLLM 0.31.0 -> 0.32.0, waiting",
        "e4 chat: vLLM 0.31.0 -> 0.32.0, unchanged",
    ]


def test_check_mode_says_what_would_be_and_nothing_that_it_has_not_seen():
    engine = {"started": {"runtime_version": "0.31.0", "speed": {"tokens_per_s": 100.0}}, "state": "serving"}
    values = {
        "__vllm_upgrade_plan": {"change": ["chat"], "finish": [], "write": []},
        "__vllm_engine_wants": {"chat": WANT},
        "__vllm_upgrade_seen": {"engines": {"chat": engine}},
        "__vllm_upgrade_after": {"engines": {"chat": engine}},
        "__vllm_upgrade_outcome": {"outcome": upgrade.WOULD, "seconds": "27.0"},
    }
    rows = upgrade.vllm_upgrade_rows(["e1"], {"e1": values})
    assert upgrade.vllm_upgrade_lines(rows) == ["e1 chat: vLLM 0.31.0 -> 0.32.0, would be upgraded"]
