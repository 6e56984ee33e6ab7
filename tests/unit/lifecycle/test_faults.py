# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every way in which the simulator can lie, and what the product makes of it: never what the lie says.

Four tables, by what the product does meanwhile: it only looks; it changes a running engine; it starts or stops the
unit; it looks after a preload daemon. The last table says what waits for later features, and why.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import typing as t
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import lease, observe, transition
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.deadline import Deadline
from ansible_collections.baremetal.vllm.plugins.modules import (
    vllm_drain,
    vllm_engine,
    vllm_preload,
    vllm_sleep,
    vllm_wake,
)
from ansible_collections.baremetal.vllm.tests.sim import faults
from ansible_collections.baremetal.vllm.tests.sim.ledger import start_time
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import AWAKE_MIB, OWNER, RESIDUE_MIB, wait_for

SERVE = (vllm_drain, {"state": "serving"})
DRAIN = (vllm_drain, {})
SLEEP_1 = (vllm_sleep, {"level": 1})
SLEEP_2 = (vllm_sleep, {"level": 2})
SLEEP_KV = (vllm_sleep, {"kv_only": True})
WAKE = (vllm_wake, {})
START = (vllm_engine, {"state": "started"})
STOP = (vllm_engine, {"state": "stopped"})
COVERED: set[str] = set()  # faults that a test of this module switches on
SILENT = 1.0  # seconds after which a question counts as unanswered, in tests of silence


def covers(*names):
    COVERED.update(names)
    return lambda test: test


@contextlib.contextmanager
def background(work):
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        yield
        future.result(60)


# 1. Looking.


class Look(t.NamedTuple):
    """A serving engine under a fault: the state that the product may name, and the reason it gives."""

    faults: dict
    reason: str
    state: str = "unknown"
    silent: bool = False


LOOKS = [
    Look({"pause_lies": True}, "paused while the gate still admits requests", "draining"),
    Look({"gauge_nan": True}, "metrics: .*'nan', which is no count"),
    Look({"gauge_missing": True}, "does not report its requests", "serving"),
    Look({"gauge_missing": "vllm:num_requests_waiting"}, "does not report its requests", "serving"),
    Look(
        {"gauge_missing": "vllm:engine_sleep_state", "pause_lies": True, "is_sleeping_lies": "true"}, "do not say which"
    ),
    Look({"metrics_500": True}, "metrics: .*HTTP 500"),
    Look({"metrics_slow": 3}, "metrics: .*timeout", silent=True),
    Look({"sleep_gauge_wrong": "discard_all"}, "the metrics say asleep at level 2, /is_sleeping says False"),
    Look({"sleep_gauge_wrong": "weights_offloaded"}, "the metrics say asleep at level 1"),
    Look({"sleep_gauge_wrong": "dreaming"}, "the metrics say asleep at level 0"),
    Look({"sleep_gauge_twice": True}, "says awake and weights_offloaded"),
    Look({"is_sleeping_lies": "true"}, "/is_sleeping is true, yet the metrics say awake"),
    Look({"health_503": True}, "/health is not 200"),
    Look({"health_slow": 3}, "healthy: .*timeout", silent=True),
    Look({"hung": True}, "sleeping: .*timeout", silent=True),
    Look({"version_wrong": ""}, "names no version"),
    Look({"version_wrong": 33}, "names no version"),
    Look({"http_500": True}, "sleeping: .*HTTP 500"),
    Look({"http_500": "/metrics"}, "metrics: .*HTTP 500"),
    Look({"http_500": "/is_paused"}, "paused: .*HTTP 500"),
    Look({"http_404": True}, "metrics: .*HTTP 404"),
    Look({"http_404": "/metrics"}, "metrics: .*HTTP 404"),
    Look({"http_slow": "/is_sleeping:3"}, "sleeping: .*timeout", silent=True),
    Look({"http_hang": "/is_paused"}, "paused: .*timeout", silent=True),
    Look({"http_lost": "/metrics"}, "metrics: .*dropped"),
    Look({"http_reset": "/is_sleeping"}, "sleeping: .*dropped"),
    Look({"http_truncated": "/metrics"}, "metrics: .*dropped"),
    Look({"http_dribble": "/metrics"}, "metrics: .*timeout", silent=True),
    Look({"http_empty": "/is_sleeping"}, "sleeping: .*no JSON object"),
    Look({"http_empty": "/metrics"}, "does not report its requests", "serving"),
    Look({"http_html": "/is_paused"}, "paused: .*no JSON object"),
    Look({"http_not_json": "/is_sleeping"}, "sleeping: .*no JSON object"),
    Look({"http_wrong_types": "/is_paused"}, "'False\\?', which is neither true nor false"),
    Look({"http_wrong_types": "/v1/models"}, "models: .*lists no models"),
    Look({"http_list": "/is_sleeping"}, "sleeping: .*no JSON object"),
    Look({"http_endless": "/metrics"}, "metrics: .*timeout", silent=True),
    Look({"http_garbage": "/is_paused"}, "paused: .*dropped"),
]


@pytest.fixture(scope="module")
def quiet_host(module_world):
    """One host for all looks: they change nothing."""
    return module_world(gate=True, gpus=1)


@pytest.mark.parametrize(
    "look", LOOKS, ids=lambda look: " ".join(f"{key}={value}" for key, value in look.faults.items())
)
def test_what_is_seen_is_never_what_the_fault_says(quiet_host, run_module, monkeypatch, look):
    host = quiet_host
    host.run_module = run_module
    wait_for(lambda: host.gate.ready("chat") == 200, "the gate to see the engine up again")
    if look.silent:
        monkeypatch.setattr(observe, "PROBE_TIMEOUT", SILENT)
    for name, arg in look.faults.items():
        host.chat.set_fault(name, arg)
    try:
        seen = host.info()
        refused = None if look.silent or look.state == "draining" else host.run(vllm_drain, check_mode=True)
    finally:
        host.chat.clear_faults()
    assert seen["state"] == look.state
    assert re.search(look.reason, "; ".join(seen["reasons"])), seen["reasons"]
    if refused is not None:
        assert refused["failed"], "a drain that cannot be proved is refused before it begins"
        assert not refused["changed"]
        assert refused["next_step"]
    assert host.chat.lease() is None
    assert host.chat.mutations() == []


@pytest.mark.parametrize("path", ["/is_paused", "/is_sleeping"])
@pytest.mark.parametrize("step", [DRAIN, SLEEP_1], ids=["drained", "asleep"])
def test_one_missing_route_never_makes_a_paused_or_sleeping_engine_serve(world, step, path):
    host = world(gpus=1)
    reached = host.done(step[0], **step[1])["after"]["state"]
    host.chat.set_fault("http_404", path)
    assert host.info()["state"] in ("unknown", reached)


@covers("nvml:gpu_lost")
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("not_loaded", "Driver Not Loaded"),
        ("mismatch", "version mismatch"),
        ("no_permission", "Insufficient Permissions"),
        ("gpu_lost", "GPU is lost"),
        ("memory_error", "Unknown Error"),
    ],
)
def test_gpus_that_cannot_be_seen_are_unseen_and_not_empty(quiet_host, run_module, fault, says):
    host = quiet_host
    host.run_module = run_module
    host.gpu.ledger.fault(fault, host.gpu.uuids[0])
    try:
        seen = host.info()
    finally:
        host.gpu.ledger.fault(fault, None)
    assert seen["gpus"] is None
    assert re.search(says, seen["unseen"]["gpu"], re.IGNORECASE)
    assert seen["state"] == "serving", "an engine serves without NVML"


# 2. Changing a running engine.


def lie(faults, call, says, *, way=(), state=None, then=None, nvml="", silent=False, stream=False, **world):
    """``way`` leads to the start of the case; then the faults are switched on and ``call`` is made.

    ``says`` is in the failure's message, ``state`` what the product itself sees afterwards (None where a fault that is
    still on decides), ``then`` what is so by other signals. ``nvml`` is a fault of the ledger, ``world`` the host.
    """
    on = [f"{name}={arg}" for name, arg in faults.items()] + ([f"nvml:{nvml}"] if nvml else [])
    module, options = call
    words = [*on, module.__name__.rpartition("_")[2], *(f"{key}={value}" for key, value in options.items()), *world]
    case = {"faults": faults, "call": call, "says": says, "way": way, "state": state, "then": then or {}, "nvml": nvml}
    COVERED.update(faults, [f"nvml:{nvml}"] if nvml else [])
    return pytest.param({**case, "silent": silent, "stream": stream, "world": world}, id=" ".join(words))


HELD = {"lease": OWNER}
OUT = {"lease": OWNER, "ready": False, "admission": "closed"}
SOON = {"timeout": 2}
DRAIN_SOON = (vllm_drain, SOON)
UNSETTLED = "failed, its state is unknown"
STILL = "still sleeps"
LIES = [
    # drain and admission
    lie({"pause_ignored": True}, DRAIN, "was paused with 0 running", state="serving", then={**HELD, "paused": False}),
    lie({"pause_ignored": True}, DRAIN, "was paused with 0 running", state="withdrawn", then=OUT, gate=True),
    lie({"pause_wait_stuck": True}, DRAIN_SOON, "pause.mode=wait gave no answer .timeout", then=HELD, silent=True),
    lie({"pause_lies": True}, SERVE, "still paused after /resume", way=[DRAIN], then=OUT, gate=True),
    lie(
        {"resume_ignored": True}, SERVE, "still paused after /resume", way=[DRAIN], state="drained", then=OUT, gate=True
    ),
    lie({"scheduler_stuck": True}, DRAIN_SOON, "0 running and 1 waiting", then={"paused": False}, stream=True),
    lie({"slow_tokens": 2}, DRAIN_SOON, "1 running and 0 waiting", then={"paused": False}, stream=True),
    lie({"gauge_by_pid": True}, DRAIN_SOON, "3 running", then={"paused": False}),
    lie({"gauge_stale": 1}, DRAIN_SOON, "1 running", then={"paused": False}),
    lie({"gauge_missing": True}, DRAIN, "does not report its requests", state="serving", then={"lease": None}),
    lie({"http_500": "/pause"}, DRAIN, "HTTP 500", state="withdrawn", then=OUT, gate=True),
    lie({"http_lost": "/pause"}, DRAIN, "dropped", state="drained", then=OUT, gate=True),
    lie({"http_truncated": "/pause"}, DRAIN, "dropped", state="drained", then=HELD),
    lie({"cut_streams": 1}, SERVE, "finish_reason 'abort'", way=[DRAIN], state="withdrawn", then=OUT, gate=True),
    lie({"error_completions": 500}, SERVE, "HTTP 500", way=[DRAIN], state="withdrawn", then=OUT, gate=True),
    lie({"hang_output": True}, (vllm_drain, {"state": "serving", **SOON}), "timeout", way=[DRAIN], then=OUT, gate=True),
    lie(
        {"http_empty": "/v1/completions"}, SERVE, "no JSON object", way=[DRAIN], state="withdrawn", then=OUT, gate=True
    ),
    lie({"http_wrong_types": "/v1/completions"}, SERVE, "without a completion", way=[DRAIN], then=HELD),
    # sleep
    lie({"sleep_level_ignored": 0}, SLEEP_1, "freed nothing", then=HELD, gpus=1),
    lie({"sleep_noop": True}, SLEEP_1, "freed nothing", state="unknown", then={**HELD, "paused": False}, gpus=1),
    lie({"sleep_noop": True}, SLEEP_2, "is unknown after the change", state="unknown", then=HELD),
    lie({"sleep_keeps": 16000}, (vllm_sleep, {"max_resident_mib": 2048}), "more than 2048", then=HELD, gpus=1),
    lie({"sleep_frees_nothing": True}, SLEEP_1, "freed nothing", then=HELD, gpus=1),
    lie({}, SLEEP_1, "freed nothing", then=HELD, gpus=1, enable_sleep_mode=False),
    lie({}, SLEEP_KV, "freed nothing", then=HELD, gpus=1, enable_sleep_mode=False),
    lie({"sleep_5xx_before": True}, SLEEP_1, UNSETTLED, state="withdrawn", then={**OUT, "asleep": ""}, gate=True),
    lie({"sleep_5xx_after": True}, SLEEP_1, UNSETTLED, state="asleep", then={**HELD, "level": 1}, gpus=1),
    lie({"sleep_slow": 4}, (vllm_sleep, SOON), UNSETTLED, state="unknown", then=HELD, silent=True),
    lie({"sleep_hangs": True}, (vllm_sleep, SOON), UNSETTLED, state="unknown", then=HELD, silent=True),
    lie({"sleep_host_oom": True}, SLEEP_1, UNSETTLED, then=HELD, gpus=1),
    lie({"dies_after_sleep": 0}, SLEEP_1, "", then=HELD, gpus=1),
    lie({"sleep_rank_awake": "1"}, SLEEP_1, "freed nothing on GPU-.*1", then=HELD, gpus=2, data_parallel_size=2),
    lie({"http_lost": "/sleep"}, SLEEP_1, UNSETTLED, state="asleep", then={**HELD, "level": 1}, gpus=1),
    lie({"http_500": "/release_kv_cache_memory"}, SLEEP_KV, "release of the KV cache failed", then=HELD, gpus=1),
    lie({"sleep_gauge_wrong": "awake"}, SLEEP_1, "after the change to asleep", then={**HELD, "level": 1}, gpus=1),
    lie({"gauge_missing": "vllm:engine_sleep_state"}, SLEEP_1, "is unknown after", state="unknown", then=HELD, gpus=1),
    lie({"is_sleeping_lies": "false"}, SLEEP_1, "is unknown after the change", state="unknown", then=HELD, gpus=1),
    lie({}, SLEEP_1, "freed nothing", then={"level": 1}, nvml="hide_processes", gpus=1),
    lie({}, SLEEP_1, "freed nothing", then={"level": 1}, nvml="unknown_process_memory", gpus=1),
    # wake
    lie({"wake_noop": True}, WAKE, STILL, way=[SLEEP_1], then={**HELD, "level": 1}, gpus=1),
    lie({"wake_half": True}, WAKE, STILL, way=[SLEEP_1], then={**HELD, "asleep": "kv_cache"}, gpus=1),
    lie({"wake_5xx_after": True}, WAKE, UNSETTLED, way=[SLEEP_1], state="withdrawn", then=OUT, gate=True, gpus=1),
    lie({"wake_kills": True}, WAKE, UNSETTLED, way=[SLEEP_1], then=HELD, gpus=1),
    lie({"wake_slow": 4}, (vllm_wake, SOON), UNSETTLED, way=[SLEEP_1], state="unknown", then=HELD, silent=True),
    lie({"wake_leaves_paused": True}, WAKE, STILL, way=[SLEEP_1], then={**HELD, "paused": True}, gpus=1),
    lie({"wake_hangs_output": True}, (vllm_wake, SOON), "timeout", way=[SLEEP_1], then=OUT, gate=True, gpus=1),
    lie({"dies_after_wake": 0}, WAKE, "", way=[SLEEP_1], then=HELD, gpus=1),
    lie({"reload_5xx": True}, WAKE, "HTTP 500", way=[SLEEP_2], state="waking", then={"weights": "discarded"}, gpus=1),
    lie(
        {"reset_fails": True}, WAKE, "did not reset the prefix cache", way=[SLEEP_2], state="waking", then=HELD, gpus=1
    ),
    lie({"reset_fails": True}, WAKE, "did not reset the prefix cache", way=[SLEEP_1], then=OUT, gate=True, gpus=1),
    lie({"http_500": "/wake_up"}, WAKE, "wake of the weights failed", way=[SLEEP_2], state="asleep", then=HELD, gpus=1),
    lie({"http_lost": "/wake_up"}, WAKE, UNSETTLED, way=[SLEEP_1], then=HELD, gpus=1),
    lie({"http_reset": "/collective_rpc"}, WAKE, "dropped", way=[SLEEP_2], state="waking", then=HELD, gpus=1),
    lie({"http_list": "/collective_rpc"}, WAKE, "no JSON object", way=[SLEEP_2], state="waking", then=HELD, gpus=1),
    lie(
        {"reload_few_ranks": 1},
        WAKE,
        "reloaded the weights of 1 rank.s., it has 2",
        way=[SLEEP_2],
        state="waking",
        then=HELD,
        gpus=2,
        tensor_parallel_size=2,
        declared={"ranks": 2},
    ),
    lie({}, WAKE, "whether they are free cannot be seen", way=[SLEEP_1], state="asleep", nvml="not_loaded", gpus=1),
    lie({}, WAKE, "whether they are free cannot be seen", way=[SLEEP_1], state="asleep", nvml="memory_error", gpus=1),
]


@pytest.mark.parametrize("case", LIES)
def test_a_change_never_believes_the_fault(world, monkeypatch, case):
    host = world(**case["world"])
    for module, options in case["way"]:
        host.done(module, **options)
    if case["silent"]:
        monkeypatch.setattr(transition, "CALL_TIMEOUT", SILENT)
        monkeypatch.setattr(observe, "PROBE_TIMEOUT", SILENT)
    for name, arg in case["faults"].items():
        host.chat.set_fault(name, arg)
    if case["nvml"]:
        host.gpu.ledger.fault(case["nvml"])
    if case["stream"]:
        host.chat.open_stream(1000)
        wait_for(host.chat.busy, "the stream to be seen")

    module, options = case["call"]
    result = host.run(module, **options)
    assert result.get("failed"), f"it believed the fault: {result}"
    assert re.search(case["says"], result["msg"]), result["msg"]
    found = host.chat.seen()
    assert {key: found[key] for key in case["then"]} == case["then"]
    assert found["lease"] or not result["changed"], "what was changed has a lease"
    if case["state"]:
        assert host.info()["state"] == case["state"]


@covers("slow_tokens")
def test_requests_that_a_drain_cuts_are_counted(world):
    host = world(gate=True)
    host.chat.set_fault("slow_tokens", 5)
    streams = [host.chat.open_stream(1000) for _unused in range(3)]
    wait_for(lambda: host.chat.busy() == 3, "the streams to be seen")
    result = host.done(vllm_drain, timeout=1, mode="abort")
    assert result["requests_cut"] == 3
    assert "cut 3 request(s)" in "; ".join(result["actions"])
    assert {stream.read().finish_reason for stream in streams} == {"abort"}
    assert host.chat.seen()["paused"]


@covers("gauge_stale")
def test_a_gauge_that_stays_up_after_an_abort_is_not_believed_to_be_idle(world, monkeypatch):
    monkeypatch.setattr(transition, "ABORT_TIMEOUT", 1.0)
    host = world()
    host.chat.set_fault("slow_tokens", 5)
    host.chat.open_stream(1000)
    wait_for(host.chat.busy, "the stream to be seen")
    host.chat.set_fault("gauge_stale", 1)
    result = host.run(vllm_drain, timeout=1, mode="abort")
    assert "still has 1 running" in result["msg"]
    assert result["requests_cut"] == 1
    assert not host.chat.seen()["paused"]


@covers("gauge_zero")
def test_gauges_at_zero_do_not_end_a_drain_while_the_gate_has_sessions(world):
    host = world(gate=True)
    host.chat.set_fault("slow_tokens", 5)
    host.chat.set_fault("gauge_zero")
    with host.gate.stream("chat") as first:
        assert first.startswith(b"HTTP/1.1 200")
        result = host.run(vllm_drain, timeout=1.5)
        assert "0 running and 0 waiting request(s) and 1 session(s) at the gate" in result["msg"]
        assert result["left"]["chat"]["sessions"] == 1
        assert host.chat.seen()["admission"] == "withdrawn", "the session may finish"


@covers("disconnect_hidden")
def test_requests_of_clients_that_have_gone_are_waited_for(world):
    host = world(gate=True)
    host.chat.set_fault("slow_tokens", 5)
    host.chat.set_fault("disconnect_hidden")
    with host.gate.stream("chat"):
        wait_for(host.chat.busy, "the stream to be seen")
    result = host.run(vllm_drain, timeout=1.5)
    assert "1 running" in result["msg"]
    assert "0 session(s)" in result["msg"]
    host.chat.set_fault("slow_tokens", 10000)
    assert host.done(vllm_drain)["after"]["state"] == "drained"
    assert host.chat.truth()["cores"][0]["running"] == 0


@covers("sleep_level_ignored")
def test_a_sleep_that_was_less_deep_than_asked_is_woken_as_if_it_was_not(world):
    """The engine sleeps at level 1 and says 2, as one whose level came in a JSON body: the reload does no harm."""
    host = world(gpus=1)
    weights = host.chat.seen()["weights"]
    host.chat.set_fault("sleep_level_ignored", 1)
    host.done(vllm_sleep, level=2)
    assert host.chat.seen()["weights"] == weights
    result = host.done(vllm_wake)
    assert "chat: load its weights anew on every rank" in result["actions"]
    assert host.chat.seen()["weights"] == weights


@covers("sleep_residue_grows")
def test_a_residue_that_grows_fails_at_the_limit_that_was_set(world):
    host = world(gpus=1)
    host.chat.set_fault("sleep_residue_grows", 700)
    limit = {"max_resident_mib": 2500}
    first = host.done(vllm_sleep, **limit)
    assert list(first["resident_mib"].values()) == [1502 + 700]
    host.done(vllm_wake)
    assert "holds {'" in host.run(vllm_sleep, **limit)["msg"]


@covers("sleep_frees_nothing")
def test_a_sleep_that_freed_nothing_is_not_there_when_it_is_asked_for_again(world):
    host = world(gpus=1)
    host.chat.set_fault("sleep_frees_nothing")
    for _unused in range(2):
        assert "freed nothing" in host.run(vllm_sleep)["msg"]
    host.chat.clear_faults()
    assert host.done(vllm_sleep)["changed"]
    assert host.gpu.used() == RESIDUE_MIB


@covers("memory_taken")
def test_a_wake_without_room_is_refused_and_names_who_holds_it(world):
    host = world(gpus=1)
    host.chat.set_fault("memory_taken", 100000)
    host.done(vllm_sleep)
    result = host.run(vllm_wake)
    assert re.search(
        r"needs 7\d{4} MiB on GPU-.* to wake, \d+ MiB are free; held by process 1 \(100000 MiB\)", result["msg"]
    )
    assert host.chat.mutations()[-1].startswith("POST /sleep"), "nothing was sent"
    assert host.chat.seen()["level"] == 1
    host.gpu.ledger.release("foreign")
    assert host.done(vllm_wake)["after"]["state"] == "serving"


@covers("memory_taken", "nvml:memory_zero")
def test_a_wake_that_runs_out_of_memory_is_never_called_awake(world):
    """NVML says that all is free, so only the engine itself can fail."""
    host = world(gate=True, gpus=1)
    host.chat.set_fault("memory_taken", 100000)
    host.done(vllm_sleep)
    host.gpu.ledger.fault("memory_zero")
    result = host.run(vllm_wake)
    assert "wake failed, its state is unknown" in result["msg"]
    assert host.chat.seen()["ready"] is False
    assert host.chat.lease()


@covers("dies_after_sleep")
def test_an_engine_that_dies_in_its_sleep_is_not_asleep_any_more(world):
    host = world(gpus=1)
    host.chat.set_fault("dies_after_sleep", 1.5)
    host.done(vllm_sleep)
    wait_for(lambda: host.chat.active() in ("inactive", "failed"), "the unit to have ended")
    seen = host.info()
    assert seen["state"] in ("stopped", "failed")
    assert seen["sleep"] is None, "the record is of a process that has ended"
    result = host.run(vllm_wake)
    assert f"is {seen['state']}" in result["msg"]
    assert "start or restart it" in result["next_step"]


@covers("sleep_slow")
def test_an_engine_that_falls_asleep_after_the_time_out_does_not_serve_meanwhile(world, monkeypatch):
    host = world(gate=True, gpus=1)
    host.chat.set_fault("sleep_slow", 4)
    monkeypatch.setattr(transition, "CALL_TIMEOUT", SILENT)
    assert host.run(vllm_sleep, timeout=1)["failed"]
    for module, options in (SERVE, WAKE, DRAIN):
        result = host.run(module, **options)
        assert "still under way" in result["msg"]
        assert host.chat.seen()["ready"] is False
    wait_for(lambda: host.chat.asleep() == 1, "its sleep")
    host.chat.clear_faults()
    assert host.info()["state"] == "asleep"
    assert host.done(vllm_wake)["after"]["state"] == "serving"


@covers("prefix_stale")
@pytest.mark.parametrize("sleep", [SLEEP_1, SLEEP_2, SLEEP_KV], ids=["1", "2", "kv"])
def test_a_prompt_that_was_cached_before_the_sleep_is_answered_anew(world, sleep):
    host = world(gpus=1)
    answer = host.chat.complete("a cached prompt")
    host.chat.set_fault("prefix_stale")
    host.done(sleep[0], **sleep[1])
    host.done(vllm_wake)
    assert host.chat.complete("a cached prompt") == answer


@covers("nvml:memory_error", "sleep_slow")
def test_gpus_that_go_blind_during_a_sleep_prove_nothing(world):
    host = world(gpus=1)
    host.chat.set_fault("sleep_slow", 1)

    def blind():
        wait_for(lambda: any(path.startswith("POST /sleep") for path in host.chat.mutations()), "the call")
        host.gpu.ledger.fault("memory_error")

    with background(blind):
        result = host.run(vllm_sleep)
    assert "cannot be seen any more, so nothing is proved" in result["msg"]


@covers("nvml:not_loaded", "nvml:mismatch", "nvml:no_permission")
@pytest.mark.parametrize("fault", ["not_loaded", "mismatch", "no_permission"])
def test_a_sleep_without_nvml_says_that_nothing_was_measured(world, fault):
    host = world(gpus=1)
    host.gpu.ledger.fault(fault)
    result = host.done(vllm_sleep)
    assert (result["freed_mib"], result["resident_mib"]) == ({}, {})
    assert host.chat.seen()["level"] == 1


@covers("nvml:reverse_order", "nvml:unknown_device", "nvml:slow")
def test_gpus_are_told_apart_by_uuid_whatever_their_order(world):
    host = world(gpus=2)
    first, second = host.gpu.uuids
    for name, arg in (("reverse_order", "1"), ("unknown_device", second), ("slow", "20")):
        host.gpu.ledger.fault(name, arg)
    result = host.run(vllm_sleep)
    assert f"freed nothing on {second}" in result["msg"], "the engine was declared on both and uses one"
    assert result["freed_mib"][first] > 70000
    assert result["freed_mib"][second] == 0


@covers("http_html", "http_lost")
def test_a_control_call_is_judged_by_what_it_did_and_not_by_its_body(world):
    host = world(gpus=1)
    host.chat.set_fault("http_html", "/pause")
    assert host.done(vllm_drain)["after"]["state"] == "drained"
    host.chat.clear_faults()
    host.chat.set_fault("http_lost", "POST /sleep", times=1)
    assert host.run(vllm_sleep)["failed"]
    again = host.done(vllm_sleep)
    assert (again["after"]["state"], again["after"]["level"]) == ("asleep", 1)
    assert list(again["freed_mib"].values()) == [AWAKE_MIB - RESIDUE_MIB]


# 3. Starting and stopping the unit.

SHAPE = {"warmup": [{"prompt_tokens": 16, "max_tokens": 8}]}
STARTS = [
    # fault, declaration -> what the journal or the message says
    ("start_crash=0.1", {}, "died before it was ready"),
    ("start_unreadable", {}, "Permission denied"),
    ("start_poisoned", {}, "corrupted compilation artifact"),
    ("start_hang", {"start_timeout": 2}, "is not ready after 2 s"),
    ("start_no_kv", {}, "No available memory for the cache blocks"),
    ("wrong_model=other", {}, r"serves \['other'\], not 'tiny'"),
    ("hang_output", {"start_timeout": 4}, "gave no answer .timeout"),
    ("cut_streams=3", SHAPE, "owed 8 token.s. and gave 3 with finish_reason 'abort'"),
    ("short_answers=1", SHAPE, "owed 8 token.s. and gave 1 with finish_reason 'length'"),
    ("error_completions=503", {}, "answered HTTP 503"),
    ("health_503", {"start_timeout": 3}, "/health is not 200"),
]
COVERED.update(fault.partition("=")[0] for fault, _unused, _unused in STARTS)


@pytest.mark.parametrize(
    ("fault", "declared", "says"), STARTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_start_is_proved_or_it_failed(world, fault, declared, says):
    host = world(start=False, doors=("ready",), fault=[fault], declared=declared)
    result = host.run(vllm_engine, state="started")
    assert "did not start" in result["msg"]
    assert re.search(says, "\n".join(result["journal"])), result["journal"]
    assert not (host.root / "var/lib/vllm/chat/ready.json").exists()
    assert host.chat.active() == "failed"
    assert host.chat.lease()["owner"] == OWNER
    assert host.info()["state"] == "failed"


@covers("start_refuse")
def test_a_socket_that_is_there_and_refuses_is_not_ready(world):
    host = world(start=False, doors=("ready",), fault=["start_refuse=1.5"])
    result = host.done(vllm_engine, state="started")
    assert result["started"]["boot_s"] >= 1.5
    assert result["after"]["state"] == "serving"


def test_a_start_that_nothing_proved_is_no_start(world):
    """An older unit without our ExecStartPost is active as soon as its process runs."""
    host = world(start=False, unit={"ExecStartPost": []})
    assert "no proof of that process is on record" in host.run(vllm_engine, state="started")["msg"]


@covers("term_ignored", "term_exit", "term_orphans")
@pytest.mark.parametrize(
    ("fault", "unit", "result"),
    [
        ("term_ignored", {"TimeoutStopSec": 0.5}, "timeout"),
        ("term_exit=3", {}, "exit-code"),
        ("term_orphans", {}, "success"),
    ],
)
def test_a_stop_leaves_no_process_and_no_memory_behind_and_says_how_it_ended(world, fault, unit, result):
    host = world(gpus=1, fault=[fault], unit=unit)
    pids = [host.chat.truth()["pid"], *host.chat.core_pids()]
    stopped = host.done(vllm_engine, state="stopped")
    assert stopped["stop_result"] == result
    assert host.gpu.used() == 0
    assert not [pid for pid in pids if start_time(pid)]
    assert host.chat.active() == "inactive"


@covers("term_slow")
def test_a_stop_that_outlasts_the_time_out_fails_and_is_gone_on_with(world):
    host = world(fault=["term_slow=2.5"])
    result = host.run(vllm_engine, state="stopped", timeout=1.5)
    assert "is still deactivating/stop-sigterm after 1.5 s" in result["msg"]
    assert result["left"]["chat"]["pids"]
    assert host.info()["state"] == "draining"
    assert host.done(vllm_engine, state="stopped")["after"]["state"] == "stopped"


@covers("metrics_500", "term_stalls")
def test_an_engine_whose_state_is_unknown_can_still_be_stopped(world):
    host = world(gate=True, fault=["term_stalls", "slow_tokens"], unit={"TimeoutStopSec": 1}, shutdown_timeout=60)
    stream = host.chat.open_stream(1000)
    wait_for(host.chat.busy, "the stream to be seen")
    host.chat.set_fault("metrics_500")
    for module, options in (DRAIN, SLEEP_1, WAKE):
        assert "is unknown" in host.run(module, **options)["msg"]
    result = host.run(vllm_engine, state="stopped")
    assert result["actions"][1:] == [
        "chat: withdraw it at the gate",
        "chat: wait until the router has seen it",
        "chat: close the gate for new requests",
        "chat: stop the unit",
    ]
    assert result["stop_result"] == "timeout"
    assert host.chat.active() == "inactive"
    assert stream.read().finish_reason != "length"


def test_an_engine_whose_main_process_is_killed_leaves_nothing(world):
    """SIGKILL of the API server alone: EngineCore would live on with all of its memory."""
    host = world(gpus=1)
    core = host.chat.core_pids()[0]
    os.kill(host.chat.truth()["pid"], signal.SIGKILL)
    wait_for(lambda: host.chat.active() == "failed", "the unit to notice")
    assert host.info()["state"] == "failed"
    assert host.gpu.used() == 0
    assert not start_time(core)
    assert host.done(vllm_engine, state="started")["after"]["state"] == "serving"


def test_processes_that_outlive_their_unit_are_unknown_until_it_is_stopped(world):
    host = world(gpus=1)
    host.systemd.override(host.chat.unit, ActiveState="inactive", SubState="dead", MainPID="0")
    seen = host.info()
    assert seen["state"] == "unknown"
    assert "processes are left in its group" in seen["reasons"][0]
    assert "is unknown" in host.run(vllm_engine, state="started")["msg"], "they hold memory that a start needs"
    assert host.done(vllm_engine, state="stopped")["after"]["state"] == "stopped"
    assert host.gpu.used() == 0


@pytest.mark.parametrize(
    ("properties", "says"),
    [
        ({"fail": "Failed to connect to bus: Connection refused"}, "cannot show .*Connection refused"),
        ({"LoadState": "masked"}, "is masked"),
        ({"MainPID": "none"}, "gave no usable answer"),
    ],
)
def test_a_system_manager_that_does_not_answer_makes_the_state_unknown(world, properties, says):
    host = world(start=False)
    host.systemd.override(host.chat.unit, **properties)
    seen = host.info()
    assert seen["state"] == "unknown"
    assert re.search(says, seen["unseen"]["unit"])
    for module, options in (DRAIN, START, SLEEP_1, WAKE, SERVE):
        result = host.run(module, **options)
        assert "is unknown" in result["msg"]
        assert not result["changed"]


# 4. A preload daemon.

READY = {"daemon": "base", "state": "ready"}
ABSENT = {"daemon": "base", "state": "absent"}


@covers("daemon_crash", "daemon_never_ready")
@pytest.mark.parametrize(
    ("fault", "timeout", "says"),
    [
        ("daemon_crash=0", 60, "did not start|ended before it was ready"),
        ("daemon_never_ready", 3, "is unusable after 3 s: health 503"),
    ],
)
def test_a_daemon_that_does_not_get_ready(world, fault, timeout, says):
    host = world(gpus=1, start=False)
    host.daemon(fault=[fault], load_time=0.6)
    result = host.run(vllm_preload, **READY, timeout=timeout)
    assert re.search(says, result["msg"]), result["msg"]


@covers("daemon_health_lies")
def test_a_daemon_that_says_200_while_it_loads_is_not_ready(world):
    host = world(gpus=1, start=False)
    host.daemon(fault=["daemon_health_lies"], load_time=1.5)
    result = host.done(vllm_preload, **READY)
    assert list(result["held_mib"].values()) == [13294 + 588]
    assert result["timings"]["start"] >= 1.5


@covers("daemon_health_503")
def test_a_daemon_that_lost_a_rank_is_unusable_and_started_anew(world):
    host = world(gpus=1, start=False)
    daemon = host.daemon()
    host.done(vllm_preload, **READY)
    daemon.set_fault("daemon_health_503")
    seen = host.run(vllm_preload, **READY, check_mode=True)
    assert (seen["before"]["state"], seen["changed"]) == ("unusable", True)
    daemon.clear_faults()
    rank = daemon.ranks()[0]
    os.kill(rank, signal.SIGKILL)
    wait_for(lambda: daemon.health() != 200, "the daemon to notice")
    host.done(vllm_preload, **READY)
    assert daemon.ranks() != [rank]
    assert host.gpu.used() == 13294 + 588 + 43


@covers("daemon_exit", "daemon_cleans_files")
@pytest.mark.parametrize("fault", ["daemon_exit=3", "daemon_cleans_files"])
def test_a_daemon_is_gone_when_its_memory_is_free_whatever_it_leaves(world, fault):
    host = world(gpus=1, start=False)
    host.daemon(fault=[fault])
    host.done(vllm_preload, **READY)
    assert host.done(vllm_preload, **ABSENT)["after"]["state"] == "absent"
    assert host.gpu.used() == 0
    assert host.done(vllm_preload, **READY)["after"]["state"] == "ready"


@covers("daemon_term_slow")
def test_a_daemon_that_stops_slowly(world):
    host = world(gpus=1, start=False)
    host.daemon(fault=["daemon_term_slow=2"])
    host.done(vllm_preload, **READY)
    assert "is still deactivating" in host.run(vllm_preload, **ABSENT, timeout=1)["msg"]
    assert host.done(vllm_preload, **ABSENT)["after"]["state"] == "absent"


def test_a_daemon_that_an_engine_maps_is_left_alone_unless_forced(world):
    host = world(gpus=1, start=False)
    daemon = host.daemon(engines=["chat", "not-declared-yet"])
    host.takes_from(host.chat)
    host.done(vllm_preload, **READY)
    host.systemd.ctl("start", host.chat.unit)
    result = host.run(vllm_preload, **ABSENT)
    assert "The running engine(s) chat may map its memory" in result["msg"]
    assert "vllm_engine state=stopped" in result["next_step"]
    assert daemon.health() == 200
    assert host.done(vllm_preload, **ABSENT, force=True)["after"]["state"] == "absent"


@covers("daemon_released", "preload_fails_late", "log_quiet")
@pytest.mark.parametrize(
    ("of_daemon", "of_engine", "fallback", "source", "says"),
    [
        ("daemon_released", "", True, "disk", "Weights were released"),
        ("daemon_released", "", False, None, "did not start"),
        ("", "preload_fails_late", True, "disk", "IPC loading failed"),
        ("", "preload_fails_late", False, None, "has loaded its weights from disk"),
        ("", "log_quiet", True, None, "its log of this start does not say"),
        ("", "log_quiet", False, None, "is not proved: its log of this start does not say"),
    ],
)
def test_an_engine_that_did_not_get_its_weights_from_the_daemon(world, of_daemon, of_engine, fallback, source, says):
    """Not what was asked for: told where a fall-back is allowed, a failed start where none is."""
    host = world(gpus=1, start=False, doors=("preflight", "ready"), fault=[of_engine] if of_engine else [])
    host.daemon(engines=["chat"], doors=True, fault=[of_daemon] if of_daemon else [])
    host.takes_from(host.chat, fallback=fallback)
    host.done(vllm_preload, **READY)
    result = host.run(vllm_engine, state="started")
    assert bool(result.get("failed")) is not fallback
    if fallback:
        seen = host.info()["preload"]
        assert seen["weights_source"] == source
        assert says in " ".join(seen["why"])
        assert host.done(vllm_preload, **READY)["engines"] == {"chat": source}
    else:
        assert says in "\n".join([result["msg"], *result["journal"]])
        assert host.chat.active() == "failed"


# 5. What is left.

LATER = {
    "start_small_kv": "the size of the KV cache belongs to the memory plan of a GPU",
    "memory_lingers": "free GPU memory before a start belongs to preflight's memory check",
    "shm_left": "left-over files in /dev/shm belong to preflight's clean-up",
}
# Answers are judged by goldens, and adapters by what they change in answers.
BESIDE = ("test_golden.py", "test_adapters.py")


def test_every_fault_has_a_test():
    for look in LOOKS:
        COVERED.update(look.faults)
    assert COVERED <= faults.NAMES, "faults that the simulator does not know"
    texts = "".join((Path(__file__).parent / name).read_text() for name in BESIDE)
    beside = {name for name in faults.NAMES if f'"{name}"' in texts}
    assert sorted(faults.NAMES - COVERED - beside) == sorted(LATER)
    assert len(COVERED) >= 40


# Not the simulator's: the disk under our own records.


def full(only=""):
    """For os.fsync: no room any more, for files of this name."""

    def fsync(handle):
        if only in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return fsync


@pytest.mark.parametrize("change", [DRAIN, SLEEP_1])
def test_a_full_disk_is_named_and_the_same_command_goes_on_once_there_is_room(world, monkeypatch, change):
    host = world(gate=True)
    module, options = change
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full())
        result = host.run(module, **options)
    path = host.root / "var/lib/vllm/chat/lease.json"
    assert f"host {socket.gethostname()}: {path} cannot be written: [Errno 28] No space left on device" in result["msg"]
    assert result["runbook"] == "record-unwritable"
    assert (result["changed"], result["actions"]) == (False, [])
    assert host.gate.ready("chat") == 200
    assert host.info()["state"] == "serving"
    assert not list(path.parent.glob(".*")), "what was half written is removed"
    host.done(module, **options)
    assert host.gate.ready("chat") == 503


def test_a_full_disk_is_no_reason_to_stop_an_engine(world, monkeypatch):
    host = world(gpus=1, gate=True)
    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full(".sleep.json."))
        result = host.run(vllm_sleep, on_failure="stop")
    assert "sleep.json cannot be written" in result["msg"]
    assert "recovered_from" not in result
    assert not [path for path in host.chat.mutations() if path.startswith("POST /sleep")], "it was not even asked"
    assert (host.gate.ready("chat"), host.info()["unit"]["active_state"]) == (503, "active")
    host.done(vllm_sleep)
    assert host.chat.seen()["level"] == 1


def test_a_lock_that_cannot_say_whose_it_is_holds(world, monkeypatch):
    host = world(gate=True)

    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "ftruncate", full)
        host.done(vllm_drain)
        with lease.locked("chat", Deadline(1)):
            refused = host.run(vllm_drain, state="serving", timeout=1)
    assert refused["runbook"] == "lock-held"
    host.done(vllm_drain, state="serving")
