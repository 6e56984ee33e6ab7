# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who goes on serving while playbooks take engines out: counted by model and pool on simulated hosts."""

from __future__ import annotations

import pytest

from ansible_collections.baremetal.vllm.tests.unit.lifecycle.fleets import Fleet, went_together
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.play import Play

pytestmark = pytest.mark.long


@pytest.fixture
def fleet(world):
    return Fleet(world, {"h1": {"chat": "chat"}, "h2": {"chat": "chat", "code": "code"}, "h3": {"code": "code"}})


def test_an_engine_of_another_model_stands_in_for_nobody(fleet):
    """Two of chat and two of code: with a chat out, a count of the whole fleet would let the other one go."""
    before = fleet.pids()
    said = fleet.play("drain.yml", "--limit=h1")
    assert fleet.hosts["h1"].gate.ready("chat") == 503
    said = fleet.play("drain.yml", "--limit=h2", rc=2)
    assert "model 'chat' without h2/chat: 0 of 1 other engine(s) serve, 1 must: h1/chat: /ready is 503" in said
    assert fleet.hosts["h2"].gate.ready("chat") == fleet.hosts["h2"].gate.ready("code") == 200
    said = fleet.play("sleep.yml", "--limit=h2", rc=2)
    assert "model 'chat' without h2/chat: 0 of 1 other engine(s) serve, 1 must" in said
    # By number for one model, and the default for the other.
    fleet.play("drain.yml", "--limit=h2", vllm_drain_min_serving={"chat": 0})
    said = fleet.play("drain.yml", "--limit=h3", rc=2, vllm_drain_min_serving={"chat": 0})
    assert "model 'code' without h3/code: 0 of 1 other engine(s) serve, 1 must: h2/code: /ready is 503" in said
    assert fleet.pids() == before


def test_a_drain_refuses_wrong_words_before_anything_else(fleet):
    for wrong in ({"vllm_drain_state": "serve"}, {"vllm_drain_mode": "kill"}, {"vllm_drain_timeout": 0}):
        said = fleet.play("drain.yml", rc=2, **wrong)
        assert "No host was touched. (runbook: playbook-variable)" in said
        assert "run-stopped" not in said
    assert {host.gate.ready(engine) for host in fleet.hosts.values() for engine in host.engines} == {200}


def test_a_roll_counts_each_model_and_repairs_what_is_out(fleet):
    """The chat of h1 was left out by this roll: bringing it back is not refused, and then everybody can go."""
    before = fleet.pids()
    fleet.play("drain.yml", "--limit=h1", vllm_drain_owner="rolling_restart")
    said = fleet.play("rolling_restart.yml", "--limit=h2", rc=2)
    assert "model 'chat' without h2/chat: 0 of 1 other engine(s) serve, 1 must: h1/chat: /ready is 503" in said
    assert fleet.pids() == before
    said = fleet.play("rolling_restart.yml")
    assert "1 host(s) not serving come first" in said
    assert not set(fleet.pids().values()) & set(before.values())
    assert {host.gate.ready(engine) for host in fleet.hosts.values() for engine in host.engines} == {200}


def test_what_an_engine_really_serves_counts(fleet):
    """The inventory has a new name for it, and its process was not yet restarted."""
    before = fleet.pids()
    fleet.declared["h1"]["vllm_engine_instances"][0]["served_model_name"] = "new"
    fleet.hosts["h1"].change("etc/vllm/lifecycle/chat.json", served_model_name="new")
    said = fleet.play("drain.yml", "--limit=h1", rc=2, vllm_drain_min_serving=2)
    assert "model 'chat' without h1/chat: min_serving is 2, yet 1 engine(s) are left to serve" in said
    assert fleet.pids() == before


def test_pools_of_the_routers_do_not_stand_in_for_each_other(fleet):
    day = [fleet.server("h1", "chat"), fleet.server("h2", "code"), fleet.server("h3", "code")]
    routers = {
        "r1": {
            "vllm_router_pools": [
                {"name": "day", "port": 8000, "servers": day},
                {"name": "night", "port": 8001, "servers": [fleet.server("h2", "chat")]},
            ]
        }
    }
    said = fleet.play("drain.yml", "--limit=h1", rc=2, routers=routers)
    assert "model 'chat' in pool 'day' without h1/chat: min_serving is 1, yet 0 engine(s) are left to serve" in said
    before = fleet.pids()
    said = fleet.play("rolling_restart.yml", "--limit=h1", routers=routers)
    assert "model 'chat' in pool 'day': no other engine serves it, so it is out while h1/chat is changed" in said
    assert fleet.pids()["h1/chat"] != before["h1/chat"]
    said = fleet.play("rolling_restart.yml", rc=2, routers=routers, vllm_roll_min_serving={"nigth": 1})
    assert (
        "vllm_roll_min_serving: nigth is neither a model nor a pool of these engines, which have chat, code, day"
        in said
    )


def test_a_ramp_and_percentages(fleet):
    for batch, together in (([1, "67%"], [["h1"], ["h2", "h3"]]), ("67%", [["h1", "h2"], ["h3"]])):
        before = fleet.pids()
        said = fleet.play("rolling_restart.yml", vllm_roll_batch=batch, vllm_roll_min_serving=0)
        assert not set(fleet.pids().values()) & set(before.values())
        assert went_together(said, "Withdraw, and let the requests in flight finish") == together


@pytest.mark.parametrize("batch", [0, "0", "many", [1, "half"], "-1", "10 %"])
def test_a_batch_that_is_none_is_refused(batch):
    play = Play("h1", lambda module, **options: {}, {"vllm_roll_batch": batch})
    assert "vllm_roll_batch is a number of hosts, a percentage" in play.run("rolling_restart.yml")
    assert play.calls == []
