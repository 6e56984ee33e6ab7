# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Groups across hosts in role vllm_engine: what is refused, and what the unit and the library get."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import config
from ansible_collections.baremetal.vllm.tests.unit.roles.role import Role

NET = {"VLLM_HOST_IP": "10.9.0.2", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
HEAD = {"name": "chat", "model": "/srv/models/m", "port": 8001, "group": "large", "env": NET}
PART = {"name": "chat", "model": "/srv/models/m", "group": "large", "headless": True, "env": NET}


def case(*, own=None, other=None, alone=False, **changes):
    """A host's variables, and those of the inventory as that host sees them."""
    mine = {"vllm_engine_instances": [{**(own or PART), **changes}]}
    both = {"host1": mine, "host2": {"vllm_engine_instances": [] if alone else [other or HEAD]}}
    return {**mine, "groups": {"all": list(both)}, "hostvars": both}


def refusal(value):
    return Role("vllm_engine", value, "host1").refusal()


def without(name):
    return {key: value for key, value in NET.items() if key != name}


REFUSED = {
    "headless alone": (case(group=""), "is headless and names no group"),
    "headless with a port": (case(port=8001), "is headless, of group large, and has port"),
    "headless with admission": (case(admission={"backend": "none"}), "has admission"),
    "headless with a daemon": (case(preload={"daemon": "base"}), "has preload"),
    "headless with adapters": (case(adapters=[{"name": "a", "path": "/a"}]), "has adapters"),
    "headless with a golden": (case(golden_required=True), "has golden_required"),
    "headless with API servers": (case(config={"api-server-count": 1}), "has api-server-count"),
    "headless as an option": (case(own=HEAD, other=PART, config={"headless": True}), "in its config: headless"),
    "no address": (case(env=without("VLLM_HOST_IP")), "in its env VLLM_HOST_IP is missing"),
    "no interface": (case(own=HEAD, other=PART, env=without("NCCL_SOCKET_IFNAME")), "NCCL_SOCKET_IFNAME is missing"),
    "nothing named": (case(env={}), "GLOO_SOCKET_IFNAME is missing, NCCL_SOCKET_IFNAME is missing, VLLM_HOST_IP is"),
    "loopback": (case(env={**NET, "VLLM_HOST_IP": "127.0.0.1"}), "VLLM_HOST_IP is loopback"),
    "lo": (case(env={**NET, "GLOO_SOCKET_IFNAME": "lo"}), "GLOO_SOCKET_IFNAME is loopback"),
    "a bad name": (case(own=HEAD, other={**PART, "group": "Large"}, group="Large"), "is of group 'Large'"),
    "two heads": (case(own=HEAD), "2 engines with an API server (host1/chat, host2/chat)"),
    "no head": (case(other=PART), "0 engines with an API server"),
    "another model": (case(own=HEAD, other={**PART, "model": "/x/m"}), "differ in model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    value, says = REFUSED[name]
    text = refusal(value)
    assert text, "was accepted"
    text = " ".join(text.split())
    assert text.startswith("host1: ") and "Next step: " in text
    assert re.search(re.escape(says), text), text


@pytest.mark.parametrize(
    "value",
    [
        case(),
        case(own=HEAD, other=PART),
        case(env={**NET, "GLOO_SOCKET_IFNAME": "lo0"}),
        case(port=None, admission={}, group="large"),
        case(vllm_engine_admission={"backend": "command", "command": ["/x"]}),
        case(own=HEAD, alone=True, group="", headless=False, env={}),  # of no group
    ],
)
def test_accepted(value):
    assert refusal(value) is None


def render(value, template):
    return Role("vllm_engine", value, "host1").render(template, "chat")


def test_what_vllm_reads():
    part = yaml.safe_load(render(case(config={"data-parallel-size": 2}), "engine.yaml.j2"))
    assert part["headless"] is True
    assert part["data-parallel-size"] == 2
    assert "uds" not in part
    head = yaml.safe_load(render(case(own=HEAD, other=PART), "engine.yaml.j2"))
    assert head["uds"] == "/run/vllm/chat/engine.sock"
    assert "headless" not in head


def test_ranks_of_a_group_meet_where_its_inventory_says():
    for value in (case(), case(own=HEAD, other=PART)):
        lines = render(value, "engine.env.j2").splitlines()
        assert {line for line in lines if line.startswith(tuple(NET))} == {f'{key}="{one}"' for key, one in NET.items()}
    alone = render(case(own=HEAD, alone=True, group="", env={}), "engine.env.j2")
    assert 'VLLM_HOST_IP="127.0.0.1"' in alone
    assert 'GLOO_SOCKET_IFNAME="lo"' in alone


@pytest.mark.parametrize("default", ["gate", "haproxy"])
def test_what_the_library_reads(default):
    fleet = {"vllm_engine_admission": {"backend": default, **({"sockets": ["/s"]} if default == "haproxy" else {})}}
    built = config.build(config.EngineConfig, json.loads(render({**case(), **fleet}, "lifecycle.json.j2")), "chat.json")
    assert (built.group, built.headless, built.gate, built.admission_backend) == ("large", True, None, "none")
    head = config.build(
        config.EngineConfig, json.loads(render(case(own=HEAD, other=PART), "lifecycle.json.j2")), "chat.json"
    )
    assert (head.group, head.headless, head.admission_backend) == ("large", False, "gate")
