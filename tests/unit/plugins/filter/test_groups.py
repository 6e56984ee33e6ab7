# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Groups of engines across hosts: what is wrong with them, and what changes as one."""

from __future__ import annotations

import pytest

from ansible_collections.baremetal.vllm.plugins.filter import fleet, groups, switching

HEAD = {"name": "chat", "model": "/srv/models/m", "port": 8001, "group": "large"}
PART = {"name": "chat", "model": "/srv/models/m", "group": "large", "headless": True}
PLAIN = {"name": "chat", "model": "/srv/models/m", "port": 8001}


def declared(**hosts):
    return {host: {"vllm_engine_instances": list(engines)} for host, engines in hosts.items()}


@pytest.mark.parametrize(
    ("inventory", "fault"),
    [
        (declared(e1=[HEAD], e2=[PART], e3=[PLAIN], r1=[]), None),
        (declared(e1=[HEAD, {**PART, "name": "more"}]), None),  # on one host, which is a lab's
        (declared(e1=[HEAD], e2=[HEAD]), "2 engines with an API server (e1/chat, e2/chat); exactly one"),
        (declared(e1=[PART], e2=[PART]), "0 engines with an API server (-); exactly one"),
        (declared(e1=[HEAD], e2=[PLAIN]), "group 'large' has no engine but e1/chat"),
        (declared(e1=[HEAD], e2=[{**PART, "model": "/x/m"}]), "differ in model: /srv/models/m at e1/chat, /x/m at"),
        (declared(e1=[HEAD], e2=[{**PART, "served_model_name": "n"}]), "differ in served_model_name: m at e1/chat, n"),
        (declared(e1=[HEAD], e2=[{**PART, "served_model_name": "m"}]), None),
        (declared(e1=[HEAD], e2=[{**PART, "runtime_version": "1"}]), "differ in runtime_version:  at e1/chat, 1 at e2"),
    ],
)
def test_groups_of_an_inventory(inventory, fault):
    found = groups.vllm_group_faults(inventory, inventory, ["large"])
    assert [fault in one for one in found] == ([True] if fault else []), found
    if fault is None:
        assert groups.vllm_group_faults(inventory, inventory, []) == []


@pytest.mark.parametrize("variable", ["vllm_engine_runtime_version", "vllm_runtime_version"])
def test_a_version_may_be_the_hosts(variable):
    inventory = declared(e1=[{**HEAD, "runtime_version": "1"}], e2=[PART])
    inventory["e2"][variable] = "1"
    assert groups.vllm_group_faults(inventory, inventory, ["large"]) == []
    inventory["e2"][variable] = "2"
    assert len(groups.vllm_group_faults(inventory, inventory, ["large"])) == 1


def seen(state="serving", group="", headless=False, run="", lease=None):
    return {"state": state, "group": group, "headless": headless, "lease": lease, "restarted_by": run}


def head(**more):
    return seen(**{"group": "large", **more})


def part(**more):
    return seen(**{"group": "large", "headless": True, "state": "headless", **more})


def fleet_of(*, inventory=None, **hosts):
    """hostvars of hosts on which vllm_info saw these engines; each engine's name is chat unless it is given."""
    variables = dict(inventory or {})
    for host, engines in hosts.items():
        found = engines if "state" not in engines else {"chat": engines}
        variables.setdefault(host, {"vllm_engine_instances": declaration(found)})
        variables[host]["seen"] = {"engines": found}
    return variables


def declaration(found):
    keys = ("group", "headless")
    return [{"name": name, "model": "/m", **{key: one[key] for key in keys}} for name, one in found.items()]


def units(hostvars, hosts=None, run="r1"):
    return groups.vllm_units(hosts or [host for host in hostvars if "seen" in hostvars[host]], hostvars, "seen", run)


LEASE = {"owner": "rolling_restart"}
PARTS = [
    # of the head, of the headless one, the part of their unit, whether the run has renewed it
    (head(), part(), "todo", False),
    (head(run="r0"), part(run="r0"), "todo", False),
    (head(run="r1"), part(run="r1"), "done", True),
    (head(run="r1"), part(run="r1", lease=LEASE), "first", True),
    (head(run="r1", state="drained"), part(run="r1", lease=LEASE), "first", True),
    (head(run="r1"), part(), "todo", False),
    (head(state="drained"), part(), "first", False),
    (head(), part(state="stopped"), "first", False),
    (head(), part(state="failed"), "first", False),
    (head(), part(state="unknown"), "first", False),
    (head(state="unknown"), part(), "first", False),
]


@pytest.mark.parametrize(("first", "second", "expected", "renewed"), PARTS)
def test_a_group_is_one_unit_that_of_its_head(first, second, expected, renewed):
    found = units(fleet_of(e1=second, e2=first))
    assert found["faults"] == []
    assert found["units"]["e1"]["part"] == "follows"
    unit = found["units"]["e2"]
    assert (unit["part"], unit["renewed"]) == (expected, renewed)
    assert (unit["engines"], unit["heads"]) == (["chat"], ["chat"])
    assert unit["followers"] == [{"host": "e1", "engines": ["chat"]}]


PLAINS = [
    (seen(), "todo", False),
    (seen(state="drained"), "first", False),
    (seen(run="r1"), "done", True),
    (seen(run="r1", state="withdrawn"), "first", True),
    (seen(run="r0"), "todo", False),
]


@pytest.mark.parametrize(("engine", "expected", "renewed"), PLAINS)
def test_a_host_without_groups_is_a_unit_of_its_own(engine, expected, renewed):
    found = units(fleet_of(e1={"chat": engine, "code": seen(run="r1")}))
    unit = {"part": expected, "engines": ["chat", "code"], "heads": [], "followers": [], "renewed": renewed}
    assert found == {"faults": [], "units": {"e1": unit}}


def test_a_host_with_engines_of_several_units():
    """A headless one of one group beside the head of another and an engine of no group."""
    other = {"group": "small"}
    hostvars = fleet_of(
        e1={"big": head(), "own": seen()},
        e2={"big": part(), "little": seen(**other), "own": seen()},
        e3={"little": part(**other), "more": part(**other)},
    )
    found = units(hostvars)
    assert found["faults"] == []
    assert found["units"]["e1"] | {"renewed": None} == {
        "part": "todo", "engines": ["big", "own"], "heads": ["big"],
        "followers": [{"host": "e2", "engines": ["big"]}], "renewed": None,
    }  # fmt: skip
    assert found["units"]["e2"]["engines"] == ["little", "own"]
    assert found["units"]["e2"]["followers"] == [{"host": "e3", "engines": ["little", "more"]}]
    assert found["units"]["e3"]["part"] == "follows"


TORN = [
    (["e1"], {}, "group 'large' changes as one, and this run leaves out e2/chat"),
    (["e2"], {}, "group 'large' changes as one, and this run leaves out e1/chat"),
    (["e1", "e2"], {"e2": {}}, "e2/chat of group 'large' are not chosen, or not of it on their hosts yet"),
    (["e1", "e2"], {"e2": {"chat": seen()}}, "e2/chat of group 'large' are not chosen, or not of it"),
    (["e1", "e2"], {"e2": {"chat": head()}}, "e2/chat of group 'large' are not so in the inventory"),
    (["e1", "e2", "e3"], {"e3": {"chat": part()}}, "e3/chat of group 'large' are not so in the inventory"),
]


@pytest.mark.parametrize(("hosts", "changes", "fault"), TORN)
def test_a_group_that_is_not_here_as_a_whole_is_not_changed(hosts, changes, fault):
    hostvars = fleet_of(e1=head(), e2=part(), e3=seen())
    for host, engines in changes.items():
        hostvars[host]["seen"] = {"engines": engines}
    found = groups.vllm_units(hosts, hostvars, "seen", "r1")["faults"]
    assert any(fault in one for one in found), found


def test_hosts_that_have_nothing_to_do_with_a_group_may_go_without_it():
    hostvars = fleet_of(e1=head(), e2=part(), e3=seen())
    found = units(hostvars, ["e3"])
    assert found["faults"] == []
    assert list(found["units"]) == ["e3"]


def test_only_heads_are_counted_as_engines_that_serve():
    inventory = declared(e1=[HEAD], e2=[PART], e3=[PLAIN])
    assert list(fleet.vllm_gates(inventory, inventory)) == ["e1/chat", "e3/chat"]


def abandoned(**changes):
    engine = {"state": "serving", "reasons": [], "lease": None, "group": "large", "headless": False, **changes}
    return fleet.vllm_abandoned({"chat": engine})


def test_reconcile_leaves_a_group_that_does_not_run_to_a_roll():
    expired = {"owner": "gone", "reason": "", "expired": True}
    assert abandoned() == abandoned(state="headless", headless=True) == []
    for state in ("stopped", "failed", "unknown", "starting"):
        assert [one["alone"] for one in abandoned(state=state)] == [False]
        assert [one["alone"] for one in abandoned(state=state, group="")] == [True]
    for state in ("withdrawn", "drained"):
        assert [one["alone"] for one in abandoned(state=state)] == [True]
    assert [one["alone"] for one in abandoned(state="headless", headless=True, lease=expired)] == [True]


def test_a_group_takes_no_turns():
    engine = {
        "state": "serving", "group": "large", "stale": False, "config_digest": "1", "lease": None, "started": None,
        "unit": None, "reasons": [], "gpus": None, "runtime_version": "0.32.0",
    }  # fmt: skip
    instances = [{"name": "chat", "gpus": [0]}, {"name": "code", "gpus": [0]}]
    both = {"chat": engine, "code": {**engine, "group": "", "state": "asleep", "level": 1, "sleep": None}}
    (why,) = switching.vllm_switch_plan(both, instances, ["code"])["refused"]
    assert "'chat' is of group 'large', which neither sleeps nor wakes" in why


@pytest.mark.parametrize(
    ("of", "together"),
    [
        ({"a": [], "b": [], "c": []}, [["a"], ["b"], ["c"]]),
        ({"a": ["g"], "b": [], "c": ["g"]}, [["a", "c"], ["b"]]),
        ({"a": [], "b": ["g"], "c": ["g"], "d": []}, [["a"], ["b", "c"], ["d"]]),
        (
            {"a": ["g"], "b": ["h"], "c": ["i"], "d": ["h", "g"]},
            [["a", "b", "d"], ["c"]],
        ),  # one host brings two together
        ({}, []),
    ],
)
def test_hosts_of_a_group_are_side_by_side(of, together):
    assert groups.hosts_together(list(of), of) == together
