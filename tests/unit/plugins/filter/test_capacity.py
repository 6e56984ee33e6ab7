# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which pools lose engines, and who has to go on serving there."""

from __future__ import annotations

import pytest

from ansible_collections.baremetal.vllm.plugins.filter import capacity

CHAT = {"name": "chat", "model": "/srv/models/chat", "port": 8001}
CODE = {"name": "code", "model": "/srv/models/qwen-code", "port": 8002}
EMBED = {"name": "embed", "model": "/srv/models/embed", "port": 8003}


def host(number, *engines, going=(), **values):
    return {
        "ansible_host": f"10.0.0.{number}",
        "vllm_engine_instances": list(engines),
        "__vllm_going": list(going),
        **values,
    }


def staying(hosts, batch, *more, count=None, **given):
    return {
        one["name"]: (one["min_serving"], list(one["going"]), list(one["others"]))
        for one in capacity.vllm_staying(
            count or [name for name in hosts if name[0] == "e"], hosts, batch, *more, **given
        )
    }


def test_those_that_stay_are_counted_for_each_model_that_goes():
    second = {**CODE, "name": "chat2", "served_model_name": "chat", "port": 8009}
    hosts = {
        "e1": host(1, CHAT, EMBED, going=["chat", "embed"]),
        "e2": host(2, CHAT, second, going=["chat"]),
        "e3": host(3, CHAT, CODE, going=["chat", "code"]),
    }
    assert capacity.vllm_staying(["e1", "e2", "e3"], hosts, ["e1", "e2"]) == [
        {
            "name": "model 'chat'",
            "min_serving": 2,
            "going": {"e1/chat": "http://10.0.0.1:8001", "e2/chat": "http://10.0.0.2:8001"},
            "others": {"e2/chat2": "http://10.0.0.2:8009", "e3/chat": "http://10.0.0.3:8001"},
        },
        {"name": "model 'embed'", "min_serving": 0, "going": {"e1/embed": "http://10.0.0.1:8003"}, "others": {}},
    ]
    hosts["e3"]["__vllm_going"] = []
    assert capacity.vllm_staying(["e1", "e2", "e3"], hosts, ["e3"]) == []


@pytest.mark.parametrize(
    ("min_serving", "default", "chat", "code"),
    [
        (None, "all", 2, 0),
        ({}, "all", 2, 0),
        ({}, 1, 1, 1),
        (1, "all", 1, 1),
        ("1", "all", 1, 1),  # -e vllm_roll_min_serving=1
        (0, "all", 0, 0),
        ({"chat": 1}, "all", 1, 0),
        ({"chat": "1", "qwen-code": 3}, 1, 1, 3),
    ],
)
def test_how_many_must_serve(min_serving, default, chat, code):
    hosts = {"e1": host(1, CHAT, CODE, going=["chat", "code"]), "e2": host(2, CHAT), "e3": host(3, CHAT)}
    assert staying(hosts, ["e1"], min_serving, default) == {
        "model 'chat'": (chat, ["e1/chat"], ["e2/chat", "e3/chat"]),
        "model 'qwen-code'": (code, ["e1/code"], []),
    }


def pools(**servers):
    return {
        "vllm_router_pools": [
            {
                "name": name,
                "port": 8000,
                "servers": [{"name": f"s{number}", "address": f"10.0.0.{number}", "port": 8001} for number in numbers],
            }
            for name, numbers in servers.items()
        ]
    }


def test_pools_of_routers_part_the_engines_of_a_model():
    """Two routers say the same; e5 is in none of their pools, e4 in both."""
    hosts = {f"e{number}": host(number, CHAT, going=["chat"]) for number in range(1, 6)}
    hosts["r1"] = hosts["r2"] = pools(day=[1, 2, 4], night=[3, 4])
    given = {"routers": ["r1", "r2"]}
    assert staying(hosts, ["e1"], **given) == {
        "model 'chat' in pool 'day'": (2, ["e1/chat"], ["e2/chat", "e4/chat"]),
    }
    assert staying(hosts, ["e4"], {"night": 0, "chat": 2}, **given) == {
        "model 'chat' in pool 'day'": (2, ["e4/chat"], ["e1/chat", "e2/chat"]),
        "model 'chat' in pool 'night'": (0, ["e4/chat"], ["e3/chat"]),
    }
    assert staying(hosts, ["e5"], **given) == {"model 'chat'": (0, ["e5/chat"], [])}
    assert staying(hosts, ["e5"]) == {
        "model 'chat'": (4, ["e5/chat"], ["e1/chat", "e2/chat", "e3/chat", "e4/chat"]),
    }


@pytest.mark.parametrize(
    "values",
    [{"vllm_gate_address": "10.0.0.1", "ansible_host": "gpu1"}, {"vllm_gate_address": "0.0.0.0"}],
)
def test_an_engine_is_found_in_a_pool_by_each_of_its_addresses(values):
    hosts = {"e1": host(1, CHAT, going=["chat"]) | values, "e2": host(2, CHAT), "r1": pools(day=[1, 2])}
    assert list(staying(hosts, ["e1"], routers=["r1"])) == ["model 'chat' in pool 'day'"]


def test_a_proxy_is_a_pool_where_haproxies_admit():
    fleet = {"backend": "haproxy", "sockets": ["10.9.9.9:9999"], "proxy": "chat_pool"}
    hosts = {
        f"e{number}": host(number, {**CHAT, "admission": {"server": f"e{number}", **own}}, going=["chat"])
        | {"vllm_engine_admission": fleet}
        for number, own in ((1, {}), (2, {}), (3, {"proxy": "other"}))
    }
    assert staying(hosts, ["e1"], {"chat_pool": 1}) == {
        "model 'chat' in pool 'chat_pool'": (1, ["e1/chat"], ["e2/chat"]),
    }


def test_what_an_engine_really_serves_counts():
    """e2 runs with another model than is declared; e3 has not answered; e4 says what it is declared to be."""
    hosts = {
        "e1": host(1, CHAT, going=["chat"]),
        "e2": host(2, CHAT, going=["chat"], __vllm_models={"chat": ["old"]}),
        "e3": host(3, CHAT),
        "e4": host(4, CHAT, __vllm_models={"chat": ["alias", "chat"]}),
    }
    assert staying(hosts, ["e1"]) == {"model 'chat'": (2, ["e1/chat"], ["e3/chat", "e4/chat"])}
    assert staying(hosts, ["e2"]) == {"model 'old'": (0, ["e2/chat"], [])}


def test_hosts_that_do_not_count_and_engines_of_no_inventory():
    hosts = {"e1": host(1, CHAT, going=["chat", "strange"]), "e2": host(2, CHAT), "e3": host(3, CHAT), "e4": {}}
    hosts["e1"]["__vllm_models"] = {"strange": ["chat"]}
    (one,) = capacity.vllm_staying(["e2", "e4"], hosts, ["e1"])
    assert one["going"] == {"e1/strange": "uncounted:undeclared", "e1/chat": "http://10.0.0.1:8001"}
    assert list(one["others"]) == ["e2/chat"], "e3 has failed before, or is of another group"


HEAD = {**CHAT, "group": "large"}
PART = {"name": "chat", "model": "/srv/models/chat", "group": "large", "headless": True}


@pytest.mark.parametrize(
    ("batch", "min_serving", "says"),
    [
        # what changes, what must serve, what is counted: e1 and e2 are a group, e3 and e4 another, e5 is of none
        (["e1"], None, (2, ["e1/chat"], ["e3/chat", "e5/chat"])),
        (["e1", "e2"], None, (2, ["e1/chat"], ["e3/chat", "e5/chat"])),  # as with drain, which goes to all hosts
        (["e1", "e3"], None, (1, ["e1/chat", "e3/chat"], ["e5/chat"])),
        (["e5"], None, (2, ["e5/chat"], ["e1/chat", "e3/chat"])),
        (["e5"], {"chat": 3}, (3, ["e5/chat"], ["e1/chat", "e3/chat"])),  # parts do not make up for it
        (["e2"], None, None),  # a part is no loss: its head goes first
        (["e2", "e4"], 1, None),
    ],
)
@pytest.mark.parametrize("pool", ["", "day"])
def test_a_group_counts_as_one_by_its_head(batch, min_serving, says, pool):
    every = {"going": ["chat"], "__vllm_models": {"chat": ["chat"]}}
    part = {"going": ["chat"], "__vllm_models": {}}  # it says nothing of itself
    hosts = {
        "e1": host(1, HEAD, **every),
        "e2": host(2, PART, **part),
        "e3": host(3, {**HEAD, "group": "second"}, **every),
        "e4": host(4, {**PART, "group": "second"}, **part),
        "e5": host(5, CHAT, **every),
        "r1": pools(day=[1, 3, 5]),
    }
    routers = ["r1"] if pool else []
    name = "model 'chat' in pool 'day'" if pool else "model 'chat'"
    assert staying(hosts, batch, min_serving, routers=routers) == ({name: says} if says else {})


@pytest.mark.parametrize(
    ("min_serving", "says"),
    [
        (0, []),
        ("2", []),
        ({}, []),
        ({"chat": 1, "day": "0"}, []),
        ("many", ["'many' is no number of engines"]),
        (-1, ["-1 is no number of engines"]),
        ([1], ["[1] is no number of engines"]),
        ({"chat": "all"}, ["'all' is no number of engines ('chat')"]),
        ({"chatt": 1}, ["chatt is neither a model nor a pool of these engines, which have chat, day, qwen-code"]),
    ],
)
def test_what_is_no_min_serving(min_serving, says):
    hosts = {"e1": host(1, CHAT, CODE), "e2": {}, "r1": pools(day=[1])}
    assert capacity.vllm_min_serving_faults(min_serving, ["e1", "e2"], hosts, ["r1"]) == says


def test_models_are_what_engines_say_without_adapters():
    served = [{"name": "chat", "root": "/x", "parent": ""}, {"name": "sql", "root": "/y", "parent": "chat"}]
    engines = {"chat": {"api": {"served": served}}, "dead": {"api": None}, "mute": {"api": {"served": None}}}
    assert capacity.vllm_models(engines) == {"chat": ["chat"]}
