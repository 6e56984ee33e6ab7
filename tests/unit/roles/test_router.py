# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What role vllm_router makes of the engines of the inventory: its default pool, and what it refuses."""

from __future__ import annotations

import pytest

from ansible_collections.baremetal.vllm.tests.unit.roles.role import CHECKOUT, Role, load

MODEL = "/srv/models/m"
GATED = {"name": "chat", "model": MODEL, "port": 8001}
DETECTION = "Have drains wait until this router has noticed"
ONE_MODEL = "Serve one model in the default pool"


def router(engines, **values):
    """``engines`` are hosts with their variables."""
    return Role("vllm_router", {"groups": {"vllm_engines": list(engines)}, "hostvars": engines, **values}, "router1")


def holds(role, name):
    (task,) = [task for task in role.tasks if task["name"] == name]
    return role.holds(task["ansible.builtin.assert"]["that"], {})


def test_the_default_pool_has_the_engines_with_a_gate():
    role = router(
        {
            "e1": {"ansible_host": "10.0.0.1", "vllm_engine_instances": [GATED, {"name": "own", "model": MODEL}]},
            "e2": {"vllm_gate_address": "10.9.0.2", "vllm_engine_instances": [GATED]},
            "e3": {"vllm_engine_instances": [{"name": "part", "model": MODEL, "group": "large", "headless": True}]},
            "e4": {},
        }
    )
    (pool,) = role.template(role.facts["vllm_router_pools"])
    assert pool["servers"] == [
        {"name": "e1-chat", "address": "10.0.0.1", "port": 8001},
        {"name": "e2-chat", "address": "10.9.0.2", "port": 8001},
    ]


@pytest.mark.parametrize(
    ("other", "accepted"),
    [
        ({"model": MODEL}, True),
        ({"model": "/mnt/m"}, True),
        ({"model": "/srv/models/other"}, False),
        ({"model": "/srv/models/other", "served_model_name": "m"}, True),
        ({"model": MODEL, "served_model_name": "other"}, False),
    ],
)
def test_the_default_pool_serves_one_model(other, accepted):
    engines = {host: {"vllm_engine_instances": [{**GATED, **own}]} for host, own in (("e1", {}), ("e2", other))}
    assert holds(router(engines), ONE_MODEL) is accepted


@pytest.mark.parametrize(
    ("given", "interval", "accepted"),
    [
        ({}, 1, True),
        ({}, 2, False),  # the drain's default is too short for it
        ({"vllm_engine_router_detection": 4}, 2, True),
        ({"vllm_engine_router_detection": 2}, 1, False),
    ],
)
def test_drains_wait_until_the_router_has_noticed(given, interval, accepted):
    engines = {"e1": {"vllm_engine_instances": [GATED], **given}, "e2": {}}
    assert holds(router(engines, vllm_router_check_interval=interval), DETECTION) is accepted


def test_the_drains_default_is_that_of_its_role():
    role = router({"e1": {"vllm_engine_instances": [GATED]}})
    default = load(CHECKOUT / "roles/vllm_engine/defaults/main.yml")["vllm_engine_router_detection"]
    assert role.template(role.facts["__vllm_router_drain_detection"]) == [default]
