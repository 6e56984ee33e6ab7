# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a sleep takes of the host, what cycles leave behind, and a sleep that had to be a stop."""

from __future__ import annotations

import json

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.footprint import Cycles, leak, loaded_mib
from ansible_collections.baremetal.vllm.plugins.modules import vllm_engine, vllm_info, vllm_sleep, vllm_wake
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import AWAKE_MIB, OWNER, RESIDUE_MIB

WEIGHTS = 13294
COPY = 18612  # of these weights, with the two fifths that pinned memory takes more


def test_the_size_of_the_weights_is_the_sum_of_what_the_ranks_say():
    line = "(Worker_TP{} pid=7) INFO 11-29 [model_runner.py:428] Model loading took {} GiB memory and 5.93 seconds"
    assert loaded_mib([line.format(0, "6.5"), "x", line.format(1, "6.25")]) == 13056
    assert loaded_mib(["INFO Loading weights took 2.27 seconds"]) is None


LEAKS = [
    # first and last on the GPU, first and last of the host, budgets -> what is told
    ({"G": 1502}, {"G": 1502}, 900, 900, (1024, 4096), ""),
    ({"G": 1502}, {"G": 2526}, 900, 4996, (1024, 4096), ""),
    ({"G": 1502}, {"G": 2527}, 900, 900, (1024, 4096), "asleep it holds 1025 MiB more on G"),
    ({"G": 1502}, {"G": 1502}, 900, 4997, (1024, 4096), "awake it holds 4097 MiB more host memory"),
    ({"G": 1502}, {"G": 9999}, 900, 9999, (0, 0), ""),
    ({}, {"G": 9999}, 0, 0, (1024, 4096), ""),
]


@pytest.mark.parametrize(("first", "last", "began", "ended", "budgets", "says"), LEAKS)
def test_a_leak_is_growth_beyond_the_budget(first, last, began, ended, budgets, says):
    told = leak(Cycles(7, 3, True, first, last, began, ended), *budgets)
    assert says in told if says else told == ""


def test_without_host_memory_for_the_copy_level_1_is_refused_with_the_numbers(world):
    host = world(gate=True, gpus=1)
    seen = host.chat.seen()
    host.set_available(16000)
    for check_mode in (True, False):
        refused = host.run(vllm_sleep, check_mode=check_mode)
        assert refused["failed"] and not refused["changed"]
        assert f"needs {COPY} MiB of host memory to sleep at level 1" in refused["msg"]
        assert "16000 MiB are available (16000 MiB, 0 MiB of them promised" in refused["msg"]
        assert "use level 2" in refused["next_step"]
    assert host.chat.seen() == seen, "nothing was touched"
    assert host.done(vllm_sleep, level=2)["after"]["level"] == 2


def test_the_copy_is_kept_for_good_so_only_the_first_sleep_takes_it(world):
    host = world(gpus=1)
    host.done(vllm_sleep)
    host.done(vllm_wake)
    host.set_available(10)
    assert host.info()["host_copy_mib"] == 0
    assert host.done(vllm_sleep)["after"]["level"] == 1
    # Another process has no copy yet.
    host.done(vllm_engine, state="restarted", run="roll-7")
    assert host.info()["host_copy_mib"] == COPY
    assert host.run(vllm_sleep)["failed"]


@pytest.mark.parametrize(
    ("unit", "limit", "says"),
    [
        ({"LimitMEMLOCK": 8 * 1024 * 1024}, None, "8 MiB may be locked by its processes (LimitMEMLOCK)"),
        ({}, 15000, "MiB are left under the unit's limit of 15000 MiB (MemoryMax)"),
    ],
)
def test_the_units_own_limits_count(world, unit, limit, says):
    host = world(gpus=1, unit=unit)
    if limit:
        group = host.systemd.show(host.chat.unit)["ControlGroup"]
        (host.root / f"sys/fs/cgroup{group}/memory.max").write_text(f"{limit * 1024 * 1024}\n")
    refused = host.run(vllm_sleep)
    assert says in refused["msg"]
    assert host.chat.mutations() == []


def test_what_is_not_known_is_not_taken_for_enough(world):
    host = world(gpus=1)
    record = host.root / "var/lib/vllm/chat/ready.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "weights_mib": None}))
    assert "how much host memory a sleep at level 1 takes is not known" in host.run(vllm_sleep)["msg"]
    (host.root / "proc/meminfo").unlink()
    assert "how much host memory is free is not known" in host.run(vllm_sleep, host_copy_mib=COPY)["msg"]
    assert host.chat.mutations() == []
    host.set_available(20000)
    assert host.done(vllm_sleep, host_copy_mib=COPY)["after"]["state"] == "asleep"


def test_the_door_records_what_the_engine_says_of_its_weights(world):
    host = world(gpus=1, doors=True)
    record = json.loads((host.root / "var/lib/vllm/chat/ready.json").read_text())
    assert abs(record["weights_mib"] - WEIGHTS) < 11
    assert host.info()["host_copy_mib"] == round(record["weights_mib"] * 1.4)


def test_two_sleeps_at_once_do_not_count_on_the_same_memory(world):
    host = world(gpus=2, engines=("chat", "code"), spread=True)
    for engine in host.engines.values():
        engine.set_fault("sleep_slow", 1)
    host.set_available(COPY + 1000)
    running = [host.begin(vllm_sleep, engine=name) for name in host.engines]
    results = [one.result() for one in running]
    refused = [one for one in results if one.get("failed")]
    assert len(refused) == 1, results
    assert "promised to other" in refused[0]["msg"]
    assert sorted(host.gpu.used(index) for index in range(2)) == [RESIDUE_MIB, AWAKE_MIB]
    assert json.loads((host.root / "run/vllm-lifecycle/host-memory.json").read_text()) == {}


STOP = {"on_failure": "stop"}


@pytest.mark.parametrize("fault", [{"sleep_frees_nothing": True}, {"sleep_5xx_before": True}, {"sleep_hangs": True}])
def test_a_sleep_that_fails_may_be_made_good_by_a_stop(world, fault):
    host = world(gate=True, gpus=1)
    for name, value in fault.items():
        host.chat.set_fault(name, value)
    options = {**STOP, "timeout": 3} if "sleep_hangs" in fault else STOP
    predicted = host.done(vllm_sleep, check_mode=True, **options)
    assert predicted["after"]["state"] == "asleep"
    real = host.done(vllm_sleep, **options)
    assert real["changed"]
    assert real["after"]["state"] == "stopped"
    assert "'chat' on" in real["recovered_from"]
    seen = host.chat.seen()
    assert (seen["unit"], seen["used"], seen["lease"], seen["ready"]) == ("inactive", [0], OWNER, False)
    for check_mode in (False, True):
        again = host.done(vllm_sleep, check_mode=check_mode, **options)
        assert (again["changed"], again["actions"]) == (False, [])
    assert "stopped" in host.run(vllm_sleep)["msg"], "without that policy a stopped engine is not asleep"
    woken = host.done(vllm_wake)
    assert woken["after"]["state"] == "serving"
    assert host.chat.seen()["used"] == [AWAKE_MIB]


def test_an_engine_that_somebody_stopped_is_not_started_by_a_wake(world):
    host = world(gate=True, gpus=1)
    host.done(vllm_engine, state="stopped")
    assert host.run(vllm_wake)["failed"]
    assert host.chat.active() == "inactive"


def test_a_leak_beyond_the_budget_turns_the_next_wake_into_a_restart(world):
    host = world(gate=True, gpus=1, declared={"leak_budget_gpu_mib": 1000})
    host.chat.set_fault("sleep_residue_grows", 400)
    first = host.chat.truth()["pid"]
    for _unused in range(3):
        host.done(vllm_sleep)
        assert host.info()["leak"] == ""
        host.done(vllm_wake)
    assert host.chat.truth()["pid"] == first
    host.done(vllm_sleep)
    seen = host.run_module(vllm_info.main, engine="chat")["engines"]["chat"]
    assert "after 4 sleeps asleep it holds 1200 MiB more on GPU-" in seen["leak"]
    predicted = host.done(vllm_wake, check_mode=True)
    real = host.done(vllm_wake)
    assert predicted["actions"] == real["actions"]
    assert "chat: stop the unit" in real["actions"]
    assert host.chat.truth()["pid"] != first
    assert host.chat.seen()["ready"]
    assert host.info()["leak"] == ""


def test_host_memory_is_recorded_after_each_wake(world):
    host = world(gpus=1, declared={"leak_budget_host_mib": 50})
    host.done(vllm_sleep)
    host.done(vllm_wake)
    record = host.root / "var/lib/vllm/chat/cycles.json"
    cycles = json.loads(record.read_text())
    assert cycles["count"] == 1 and cycles["host_copy"]
    assert cycles["first_host_mib"] == cycles["last_host_mib"] > 0
    record.write_text(json.dumps({**cycles, "last_host_mib": cycles["first_host_mib"] + 51}))
    host.done(vllm_sleep)
    assert "51 MiB more host memory than after its first wake" in host.info()["leak"]
