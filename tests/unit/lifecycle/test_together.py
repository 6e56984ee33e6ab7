# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two calls at once: on one engine, and on two engines of one GPU. One after the other, and both right."""

from __future__ import annotations

import json
import time

import pytest

from ansible_collections.baremetal.vllm.plugins.modules import vllm_drain, vllm_engine, vllm_sleep, vllm_wake
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import OWNER, RESIDUE_MIB, wait_for

SLOW = 0.7  # seconds that the engine itself takes for a sleep or a wake
SHARE = {"gpu_memory_utilization": 0.4}
RESIDUE = RESIDUE_MIB - 43  # without the driver's own
RESIDENT = 2048


def changes(*engines) -> list[tuple[float, str]]:
    """When each changing request came, and what it was, of all engines in order of time."""
    return sorted(
        (one["t"], f"{engine.name} {one['path']}") for engine in engines for one in engine.requests() if one["mutating"]
    )


def never_overlap(requests: list[tuple[float, str]]) -> None:
    """While a slow one is under way, nobody sends another."""
    slow = [at for at, path in requests if "/sleep?" in path or "/wake_up" in path]
    for begun in slow:
        others = [path for at, path in requests if begun < at < begun + SLOW - 0.05]
        assert not others, f"{others} while another was under way, in {requests}"


def slow_down(*engines) -> None:
    for engine in engines:
        engine.set_fault("sleep_slow", SLOW)
        engine.set_fault("wake_slow", SLOW)
        engine.forget_requests()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((vllm_sleep, {"level": 1}), (vllm_sleep, {"level": 1})),
        ((vllm_sleep, {"level": 1}), (vllm_sleep, {"level": 2})),
        ((vllm_sleep, {"level": 1}), (vllm_wake, {})),
        ((vllm_drain, {}), (vllm_sleep, {})),
        ((vllm_drain, {}), (vllm_engine, {"state": "restarted", "run": "roll-7"})),
    ],
    ids=["sleep sleep", "sleep deeper", "sleep wake", "drain sleep", "drain restart"],
)
def test_two_calls_on_one_engine(world, first, second):
    host = world(gate=True, gpus=1)
    slow_down(host.chat)
    running = [host.begin(module, **options) for module, options in (first, second)]
    results = [one.result() for one in running]
    assert [one.get("msg") for one in results if one.get("failed")] == []
    never_overlap(changes(host.chat))
    seen = host.chat.seen()
    assert seen["lease"] == OWNER or seen["ready"]
    # One of the two came second, and found what the first had left.
    orders = [(one, two) for one, two in (results, results[::-1]) if one["after"] == two["before"]]
    assert orders, f"neither began where the other ended: {results}"
    last = orders[0][1]["after"]
    assert (last["admission"], last["lease"], bool(last["paused"])) == (
        seen["admission"],
        seen["lease"],
        seen["paused"],
    )
    if first == second:
        assert sorted(one["changed"] for one in results) == [False, True]
        assert len([path for _unused, path in changes(host.chat) if "/sleep?" in path]) == 1


def test_two_engines_of_one_gpu_sleep_and_wake_one_after_the_other(world):
    host = world(gpus=1, engines=("chat", "code"), **SHARE)
    chat, code = host.engines.values()
    slow_down(chat, code)
    own = host.gpu.processes()
    for module, residue in ((vllm_sleep, RESIDUE), (vllm_wake, None)):
        running = [host.begin(module, engine=name) for name in host.engines]
        results = [one.result() for one in running]
        assert [one.get("msg") for one in results if one.get("failed")] == []
        never_overlap(changes(chat, code))
        if residue:
            for result, engine in zip(results, host.engines.values()):
                held = own[engine.core_pids()[0]]
                assert list(result["resident_mib"].values()) == [residue]
                assert list(result["freed_mib"].values()) == [held - residue], (
                    "its own memory, and nothing of the other's"
                )
    assert host.gpu.processes() == own


def test_a_gpu_may_be_declared_by_its_index(world):
    """It is the same for locks, and it is measured."""
    host = world(gpus=1, engines=("chat", "code"), declared={"gpus": ["0"]}, **SHARE)
    result = host.done(vllm_sleep, max_resident_mib=RESIDENT)
    assert result["resident_mib"] == {host.gpu.uuids[0]: RESIDUE}
    assert (host.root / f"run/vllm-lifecycle/gpu-{host.gpu.uuids[0]}.lock").exists()
    host.engines["code"].set_fault("sleep_keeps", 20000)
    assert "MiB, more than" in host.run(vllm_sleep, engine="code", max_resident_mib=RESIDENT)["msg"]


def test_two_engines_of_one_gpu_in_one_call(world):
    host = world(gpus=1, engines=("chat", "code"), **SHARE)
    slow_down(*host.engines.values())
    result = host.done(vllm_sleep, engines=["chat", "code"])
    assert {name: one["after"]["state"] for name, one in result["engines"].items()} == {
        "chat": "asleep",
        "code": "asleep",
    }
    never_overlap(changes(*host.engines.values()))
    assert host.gpu.used() == 2 * RESIDUE + 43


def test_engines_of_two_gpus_do_not_wait_for_each_other(world):
    host = world(gpus=2, engines=("chat", "code"), spread=True)
    for engine in host.engines.values():
        engine.set_fault("sleep_slow", 3)
    running = [host.begin(vllm_sleep, engine=name) for name in host.engines]
    assert not [one for one in running if one.result().get("failed")]
    (first, _unused), (second, _unused) = [one for one in changes(*host.engines.values()) if "/sleep" in one[1]]
    assert second - first < 3
    assert [host.gpu.used(index) for index in range(2)] == [RESIDUE_MIB, RESIDUE_MIB]


def test_two_engines_of_one_gpu_start_one_after_the_other(world):
    """Each would count the other's weights while it measures what is free."""
    host = world(gpus=1, engines=("chat", "code"), start=False, start_delay=0.5, **SHARE)
    result = host.done(vllm_engine, engines=["chat", "code"], state="started")
    assert {one["after"]["state"] for one in result["engines"].values()} == {"serving"}
    (_unused, ready), (begun, _unused) = started(host)
    assert begun > ready, "the second began when the first was ready"


def started(host) -> list[tuple[int, int]]:
    """When each engine's process began and when it was ready, in order of time."""
    shown = [host.systemd.show(engine.unit) for engine in host.engines.values()]
    return sorted(
        (int(one["ExecMainStartTimestampMonotonic"]), int(one["ActiveEnterTimestampMonotonic"])) for one in shown
    )


def test_two_engines_of_one_gpu_that_systemd_starts_at_once(world):
    """As at boot: nobody holds a lock for them."""
    host = world(gpus=1, engines=("chat", "code"), start=False, start_delay=0.5, doors=True, **SHARE)
    for engine in host.engines.values():
        assert host.systemd.ctl("start", "--no-block", engine.unit).returncode == 0
    for engine in host.engines.values():
        wait_for(lambda engine=engine: engine.active() == "active", f"{engine.name} is active")
    (_unused, ready), (begun, _unused) = started(host)
    assert begun > ready, "the second began when the first was ready"
    journals = [host.systemd.journal(engine.unit) for engine in host.engines.values()]
    assert sum("waits for engine" in journal for journal in journals) == 1


def test_a_sleep_waits_for_a_neighbours_start_that_systemd_makes(world):
    host = world(gpus=1, engines=("chat", "code"), start_delay=1, doors=True, **SHARE)
    chat, code = host.engines.values()
    assert host.systemd.ctl("stop", code.unit).returncode == 0
    assert host.systemd.ctl("start", "--no-block", code.unit).returncode == 0
    ticket = host.root / f"run/vllm-lifecycle/gpu-{host.gpu.uuids[0]}.start"
    wait_for(ticket.exists, "the start of code")
    result = host.done(vllm_sleep)
    assert code.active() == "active", "it has waited"
    assert list(result["resident_mib"].values()) == [RESIDUE]
    assert not ticket.exists()
    # The other way round: a start waits for a sleep that is under way.
    host.done(vllm_wake)
    chat.set_fault("sleep_slow", 5)
    chat.forget_requests()
    assert host.systemd.ctl("stop", code.unit).returncode == 0
    running = host.begin(vllm_sleep)
    wait_for(lambda: any("/sleep" in path for path in chat.mutations()), "the sleep")
    assert host.systemd.ctl("start", code.unit).returncode == 0
    assert "code: waits for engine chat" in host.systemd.journal(code.unit)
    assert running.result()["after"]["state"] == "asleep"


def test_a_ticket_of_a_start_that_is_over_stops_nobody(world):
    host = world(gpus=1, engines=("chat", "code"), **SHARE)
    ticket = host.root / f"run/vllm-lifecycle/gpu-{host.gpu.uuids[0]}.start"
    ticket.parent.mkdir(parents=True, exist_ok=True)
    for engine, unit in (("code", host.engines["code"].unit), ("gone", "vllm-engine@gone.service")):
        ticket.write_text(json.dumps({"engine": engine, "unit": unit, "invocation": "0123"}))
        host.done(vllm_sleep)
        host.done(vllm_wake)


def test_who_waits_for_a_start_too_long_is_told_whose(world):
    host = world(gpus=1, engines=("chat", "code"), start_delay=1, doors=True, **SHARE)
    code = host.engines["code"]
    code.set_fault("start_hang")
    assert host.systemd.ctl("stop", code.unit).returncode == 0
    assert host.systemd.ctl("start", "--no-block", code.unit).returncode == 0
    ticket = host.root / f"run/vllm-lifecycle/gpu-{host.gpu.uuids[0]}.start"
    wait_for(ticket.exists, "the start of code")
    result = host.run(vllm_sleep, timeout=0.5)
    assert "waited 0.5 s for engine 'code', which is still being changed on GPU-" in result["msg"]
    assert host.chat.mutations() == []


def test_who_waits_too_long_is_told_who_is_at_work(world):
    host = world(gpus=1, engines=("chat", "code"), **SHARE)
    host.chat.set_fault("sleep_slow", 3)
    running = host.begin(vllm_sleep)
    wait_for(lambda: any("/sleep" in path for path in host.chat.mutations()), "the first call")
    begun = time.monotonic()
    same = host.run(vllm_drain, timeout=0.5)
    assert "'chat' on host" in same["msg"]
    assert f"being changed by process {running.pid}" in same["msg"]
    neighbour = host.run(vllm_sleep, engine="code", timeout=0.5)
    assert f"'gpu-{host.gpu.uuids[0]}' on host" in neighbour["msg"]
    assert time.monotonic() - begun < 3
    assert not same["changed"] and not neighbour["changed"]
    assert host.engines["code"].mutations() == []
    assert not running.result().get("failed")
