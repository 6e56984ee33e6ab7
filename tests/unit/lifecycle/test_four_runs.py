# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each state of each module, four times: check, real, again, check again.

Between the runs the world is read by other means. Check mode sends nothing that changes the engine, asks for no
completion and writes no file; what it predicts is what the real run finds.
"""

from __future__ import annotations

import typing as t

import pytest

from ansible_collections.baremetal.vllm.plugins.modules import (
    vllm_drain,
    vllm_engine,
    vllm_info,
    vllm_preload,
    vllm_sleep,
    vllm_wake,
)
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import AWAKE_MIB, OWNER, RESIDUE_MIB, lasting

KV_FREED = 14839  # what is left when the KV cache alone is gone


class Case(t.NamedTuple):
    name: str
    before: list[tuple[t.Any, dict]]  # the way from a serving engine to the start of the case
    module: t.Any
    options: dict
    then: dict  # what the world is afterwards, by its own signals
    state: str
    doors: bool = False


OUT = {"unit": "active", "ready": False, "admission": "closed", "lease": OWNER}
SERVING = {
    "unit": "active",
    "ready": True,
    "admission": "open",
    "lease": None,
    "paused": False,
    "asleep": "",
    "used": [AWAKE_MIB],
}
SLEEP_1 = (vllm_sleep, {"level": 1})
SLEEP_2 = (vllm_sleep, {"level": 2})
DRAIN = (vllm_drain, {})
STOP = (vllm_engine, {"state": "stopped"})
BOTH = {**OUT, "asleep": "kv_cache+weights", "used": [RESIDUE_MIB]}
CASES = [
    Case("drained", [], *DRAIN, {**OUT, "paused": True, "asleep": "", "used": [AWAKE_MIB]}, "drained"),
    Case("serving", [DRAIN], vllm_drain, {"state": "serving"}, SERVING, "serving"),
    Case("sleep 0", [], vllm_sleep, {"level": 0}, {**OUT, "paused": True, "asleep": "", "used": [AWAKE_MIB]}, "asleep"),
    Case("sleep 1", [], *SLEEP_1, {**BOTH, "level": 1}, "asleep"),
    Case("sleep 2", [], *SLEEP_2, {**BOTH, "level": 2, "weights": "discarded"}, "asleep"),
    Case(
        "sleep of the KV cache",
        [],
        vllm_sleep,
        {"kv_only": True},
        {**OUT, "asleep": "kv_cache", "used": [KV_FREED]},
        "asleep",
    ),
    Case("sleep of a drained engine", [DRAIN], *SLEEP_1, {**BOTH, "level": 1}, "asleep"),
    Case("from sleep 1 to 2", [SLEEP_1], *SLEEP_2, {**BOTH, "level": 2, "weights": "discarded"}, "asleep"),
    Case("from sleep 2 to 1", [SLEEP_2], *SLEEP_1, {**BOTH, "level": 1}, "asleep"),
    Case("wake from 1", [SLEEP_1], vllm_wake, {}, SERVING, "serving"),
    Case("wake from 2", [SLEEP_2], vllm_wake, {}, SERVING, "serving"),
    Case("wake from 0", [(vllm_sleep, {"level": 0})], vllm_wake, {}, SERVING, "serving"),
    Case("wake of the KV cache", [(vllm_sleep, {"kv_only": True})], vllm_wake, {}, SERVING, "serving"),
    Case(
        "wake of the weights from 1",
        [SLEEP_1],
        vllm_wake,
        {"tags": ["weights"]},
        {**OUT, "asleep": "kv_cache", "used": [KV_FREED]},
        "waking",
    ),
    Case(
        "wake of the weights from 2",
        [SLEEP_2],
        vllm_wake,
        {"tags": ["weights"]},
        {**OUT, "asleep": "kv_cache", "used": [KV_FREED]},
        "waking",
    ),
    Case(
        "wake of the rest",
        [SLEEP_2, (vllm_wake, {"tags": ["weights"]})],
        vllm_wake,
        {"tags": ["kv_cache"]},
        SERVING,
        "serving",
    ),
    Case(
        "stopped",
        [],
        *STOP,
        {"unit": "inactive", "ready": False, "admission": "closed", "lease": OWNER, "used": [0]},
        "stopped",
    ),
    Case(
        "stopped from sleep",
        [SLEEP_1],
        *STOP,
        {"unit": "inactive", "ready": False, "lease": OWNER, "used": [0]},
        "stopped",
    ),
    Case("started", [STOP], vllm_engine, {"state": "started"}, SERVING, "serving"),
    Case("restarted", [], vllm_engine, {"state": "restarted", "run": "roll-7"}, SERVING, "serving", doors=True),
    Case(
        "restarted while drained on purpose",
        [DRAIN],
        vllm_engine,
        {"state": "restarted", "run": "roll-7"},
        {**OUT, "paused": False, "used": [AWAKE_MIB]},
        "withdrawn",
    ),
]


def cost(host) -> list[str]:
    """Everything that was asked of the engine and is no mere question."""
    return [one["path"] for one in host.chat.requests() if one["mutating"] or one["generation"]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_four_runs(world, case):
    host = world(gate=True, gpus=1, doors=case.doors)
    weights = host.chat.seen()["weights"]
    for module, options in case.before:
        host.done(module, **options)
    host.chat.forget_requests()
    seen, files = host.chat.seen(), host.files()

    predicted = host.done(case.module, check_mode=True, **case.options)
    assert predicted["changed"]
    assert cost(host) == []
    assert (host.chat.seen(), host.files()) == (seen, files), "check mode changed something"

    real = host.done(case.module, **case.options)
    assert real["changed"]
    assert real["after"]["state"] == case.state
    assert (predicted["before"], predicted["after"]) == (real["before"], real["after"])
    assert predicted["actions"] == real["actions"]
    reached = host.chat.seen()
    assert {key: reached[key] for key in case.then} == case.then
    if case.state == "serving":
        assert reached["weights"] == weights, "it serves with its own weights"

    host.chat.forget_requests()
    for check_mode in (False, True):
        files = host.files()
        again = host.done(case.module, check_mode=check_mode, **case.options)
        assert not again["changed"]
        assert again["actions"] == []
        assert (again["before"], again["after"]) == (real["after"], real["after"])
        assert cost(host) == []
        assert host.chat.seen() == reached
        assert lasting(host.files(), check_mode) == lasting(files, check_mode)
    assert host.info()["state"] == case.state


def test_four_runs_of_a_preload_daemon(world):
    host = world(gpus=1, start=False)
    daemon = host.daemon()
    for state, health, held in (("ready", 200, [13294 + 588 + 43]), ("absent", 0, [0])):
        seen, files = (daemon.health(), host.gpu.used()), host.files()
        predicted = host.done(vllm_preload, daemon="base", state=state, check_mode=True)
        assert predicted["changed"]
        assert (daemon.health(), host.gpu.used()) == seen
        assert host.files() == files
        real = host.done(vllm_preload, daemon="base", state=state)
        assert real["changed"]
        assert (predicted["before"], predicted["after"]) == (real["before"], real["after"])
        assert predicted["actions"] == real["actions"]
        assert (daemon.health(), [host.gpu.used()]) == (health, held)
        pids = host.systemd.procs("vllm-preload@base.service")
        for check_mode in (False, True):
            again = host.done(vllm_preload, daemon="base", state=state, check_mode=check_mode)
            assert (again["changed"], again["actions"]) == (False, [])
            assert again["after"] == real["after"]
            assert host.systemd.procs("vllm-preload@base.service") == pids


def test_info_changes_nothing_and_sees_every_engine(world):
    host = world(gate=True, gpus=1, engines=("chat", "code"), **{"gpu-memory-utilization": 0.4})
    files = host.files()
    for check_mode in (True, False):
        result = host.run_module(vllm_info.main, check_mode=check_mode)
        assert not result["changed"]
        assert {name: seen["state"] for name, seen in result["engines"].items()} == {
            "chat": "serving",
            "code": "serving",
        }
    assert all(seen["journal"] == [] for seen in result["engines"].values())
    last = host.run_module(vllm_info.main, engine="chat", journal=3)["engines"]["chat"]["journal"]
    assert len(last) == 3
    assert last == host.systemd.journal(host.chat.unit).splitlines()[-3:]
    assert "it is a number of lines" in host.run_module(vllm_info.main, journal=-1)["msg"]
    assert host.files() == files
    assert cost(host) == []


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0"])
def test_older_versions_go_the_same_ways(world, version):
    """0.31 answers /sleep and /wake_up with an empty body, and neither refuses a request while it is paused."""
    host = world(gpus=1, version=version)
    weights = host.chat.seen()["weights"]
    for module, options, state in [
        (*DRAIN, "drained"),
        (vllm_drain, {"state": "serving"}, "serving"),
        (*SLEEP_1, "asleep"),
        (vllm_wake, {}, "serving"),
        (*SLEEP_2, "asleep"),
        (vllm_wake, {}, "serving"),
        (vllm_sleep, {"kv_only": True}, "asleep"),
        (vllm_wake, {}, "serving"),
    ]:
        assert host.done(module, **options)["after"]["state"] == state
    assert host.chat.seen()["weights"] == weights
    api = host.info()["api"]
    assert api["version"] == version
    assert api["capabilities"] == ["pause", "sleep", "kv_release", "reload"]


@pytest.mark.parametrize(
    ("module", "options", "state", "back"),
    [
        (vllm_drain, {}, "draining", (vllm_drain, {"state": "serving"})),
        (vllm_sleep, {"level": 0}, "asleep", (vllm_wake, {})),
    ],
    ids=["drain", "sleep"],
)
def test_requests_that_are_kept_go_on_afterwards(world, module, options, state, back):
    host = world(gate=True, token_rate=100)
    keep = {"mode": "keep", "timeout": 0.3, **options}
    with host.gate.client("chat", tokens=1000) as stream:
        stream.first()
        predicted = host.done(module, check_mode=True, **keep)
        assert predicted["changed"] and host.chat.mutations() == []
        real = host.done(module, **keep)
        assert real["requests_kept"] == 1
        assert real["after"]["state"] == state
        assert "chat: froze 1 request(s) after 0.3 s" in real["actions"]
        frozen = host.chat.truth()
        assert frozen["cores"][0]["pause"] == "all" and host.chat.busy() == 1
        assert host.chat.lease()["owner"] == OWNER
        assert (host.gate.ready("chat"), host.gate.stored("chat")["admission"]) == (503, "closed")
        host.chat.forget_requests()
        for check_mode in (False, True):
            again = host.done(module, check_mode=check_mode, **keep)
            assert (again["changed"], again["actions"]) == (False, [])
        assert cost(host) == []
        assert host.chat.busy() == 1
        assert host.done(back[0], **back[1])["after"]["state"] == "serving"
        assert stream.rest() == (1000, "length")
    assert host.gate.ready("chat") == 200


def test_kept_requests_finish_before_a_stop(world):
    host = world(gate=True, token_rate=100)
    with host.gate.client("chat", tokens=600) as stream:
        stream.first()
        host.done(vllm_drain, mode="keep", timeout=0.3)
        assert host.done(vllm_engine, state="stopped")["after"]["state"] == "stopped"
        assert stream.rest() == (600, "length")


def test_without_development_endpoints_the_closed_gate_is_the_lock(world):
    host = world(gate=True, dev_mode=False)
    result = host.done(vllm_drain)
    assert result["after"]["state"] == "drained"
    assert result["after"]["paused"] is None, "a 404 is not 'not paused'"
    assert host.chat.mutations() == []
    assert host.info()["api"]["capabilities"] == []
    refused = host.run(vllm_sleep)
    assert "no development endpoints" in refused["msg"]
    assert host.done(vllm_drain, state="serving")["after"]["state"] == "serving"
    for state in ("restarted", "stopped", "started"):
        after = host.done(vllm_engine, state=state)["after"]
        assert (after["state"], after["paused"]) == ("stopped" if state == "stopped" else "serving", None)
