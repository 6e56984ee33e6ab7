# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every state with every wish: the steps, the refusal, and that the predicted end needs no further step."""

from __future__ import annotations

import dataclasses

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import Refused, UnknownState
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.observe import STATES
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.plan import (
    STOPPED_FOR_SLEEP,
    WANTED,
    Options,
    plan,
    predict,
    recover,
)
from ansible_collections.baremetal.vllm.tests.unit.plugins.module_utils.lifecycle_factory import (
    OURS,
    api_state,
    gate_state,
    lease,
    observation,
    sleep_record,
    unit_state,
)

OPTIONS = Options(owner=OURS)
OUT = ["withdraw", "await_router", "await_idle", "close", "await_closed"]
OUT_AGAIN = OUT[1:]  # withdrawn already, perhaps a moment ago
BACK = ["prove", "admit", "await_ready", "release"]
NEW = ["reload", "reset_cache", "resume"]

SERVING = observation()
WITHDRAWN = observation(gate=gate_state("withdrawn"))
DRAINING = observation(gate=gate_state("withdrawn"), api=api_state(running=2))
DRAINED = observation(gate=gate_state("closed"), api=api_state(paused=True))
STOPPED = observation(unit=unit_state("inactive", "dead"), gate=gate_state("open", proved=False, up=False))
FAILED = observation(unit=unit_state("failed", "failed", "exit-code"), gate=gate_state("closed", False, False))
STARTING = observation(unit=unit_state("activating", "start-post"), gate=gate_state("open", False, False))
ASLEEP = observation(gate=gate_state("closed"), api=api_state(paused=True, sleep="weights_offloaded"))
UNKNOWN = observation(api=api_state(healthy=False))
WAKING = observation(
    gate=gate_state("closed"), api=api_state(paused=True, sleep="discard_all"), sleep=sleep_record(2, ["weights"])
)

HEADLESS = observation(headless=True)
HEADLESS_STOPPED = observation(unit=unit_state("inactive", "dead"), headless=True)

GENERATION = {"name": "proved", "config_digest": "old", "runtime_version": "0.32.0"}

TABLE = {
    ("stopped", "drained"): (STOPPED, ["lease", "close"]),
    ("stopped", "serving"): (STOPPED, Refused),
    ("stopped", "started"): (STOPPED, ["lease", "start", *BACK]),
    ("stopped", "stopped"): (STOPPED, []),
    ("stopped", "restarted"): (STOPPED, ["lease", "start", *BACK]),
    ("stopped", "asleep"): (STOPPED, Refused),
    ("stopped", "awake"): (STOPPED, Refused),
    ("failed", "drained"): (FAILED, ["lease"]),
    ("failed", "serving"): (FAILED, Refused),
    ("failed", "started"): (FAILED, ["lease", "start", "prove", "release"]),
    ("failed", "stopped"): (FAILED, ["lease", "stop"]),
    ("failed", "restarted"): (FAILED, ["lease", "stop", "start", "prove", "release"]),
    ("failed", "asleep"): (FAILED, Refused),
    ("failed", "awake"): (FAILED, Refused),
    ("starting", "drained"): (STARTING, Refused),
    ("starting", "serving"): (STARTING, Refused),
    ("starting", "started"): (STARTING, ["start"]),
    ("starting", "stopped"): (STARTING, ["lease", "withdraw", "await_router", "close", "stop"]),
    ("starting", "restarted"): (STARTING, ["lease", "withdraw", "await_router", "close", "stop", "start", *BACK]),
    ("starting", "asleep"): (STARTING, Refused),
    ("starting", "awake"): (STARTING, Refused),
    ("serving", "drained"): (SERVING, ["lease", *OUT, "pause"]),
    ("serving", "serving"): (SERVING, []),
    ("serving", "started"): (SERVING, []),
    ("serving", "stopped"): (SERVING, ["lease", *OUT, "stop"]),
    ("serving", "restarted"): (SERVING, ["lease", *OUT, "stop", "start", *BACK]),
    ("serving", "asleep"): (SERVING, ["lease", *OUT, "sleep"]),
    ("serving", "awake"): (SERVING, []),
    ("withdrawn", "drained"): (WITHDRAWN, ["lease", *OUT_AGAIN, "pause"]),
    ("withdrawn", "serving"): (WITHDRAWN, ["prove", "admit", "await_ready"]),
    ("withdrawn", "started"): (WITHDRAWN, []),
    ("withdrawn", "stopped"): (WITHDRAWN, ["lease", *OUT_AGAIN, "stop"]),
    ("withdrawn", "restarted"): (WITHDRAWN, ["lease", *OUT_AGAIN, "stop", "start", "prove", "release"]),
    ("withdrawn", "asleep"): (WITHDRAWN, ["lease", *OUT_AGAIN, "sleep"]),
    ("withdrawn", "awake"): (WITHDRAWN, []),
    ("draining", "drained"): (DRAINING, ["lease", *OUT_AGAIN, "pause"]),
    ("draining", "serving"): (DRAINING, ["prove", "admit", "await_ready"]),
    ("draining", "started"): (DRAINING, []),
    ("draining", "stopped"): (DRAINING, ["lease", *OUT_AGAIN, "stop"]),
    ("draining", "restarted"): (DRAINING, ["lease", *OUT_AGAIN, "stop", "start", "prove", "release"]),
    ("draining", "asleep"): (DRAINING, ["lease", *OUT_AGAIN, "sleep"]),
    ("draining", "awake"): (DRAINING, []),
    ("drained", "drained"): (DRAINED, ["lease"]),
    ("drained", "serving"): (DRAINED, ["resume", "prove", "admit", "await_ready"]),
    ("drained", "started"): (DRAINED, []),
    ("drained", "stopped"): (DRAINED, ["lease", "stop"]),
    ("drained", "restarted"): (DRAINED, ["lease", "stop", "start", "prove", "release"]),
    ("drained", "asleep"): (DRAINED, ["lease", "sleep"]),
    ("drained", "awake"): (DRAINED, []),
    ("asleep", "drained"): (ASLEEP, ["lease"]),
    ("asleep", "serving"): (ASLEEP, Refused),
    ("asleep", "started"): (ASLEEP, []),
    ("asleep", "stopped"): (ASLEEP, ["lease", "stop"]),
    ("asleep", "restarted"): (ASLEEP, ["lease", "stop", "start", "prove", "release"]),
    ("asleep", "asleep"): (ASLEEP, ["lease"]),
    ("asleep", "awake"): (ASLEEP, ["lease", "wake", "reset_cache", "prove", "release"]),
    ("waking", "drained"): (WAKING, Refused),
    ("waking", "serving"): (WAKING, Refused),
    ("waking", "started"): (WAKING, []),
    ("waking", "stopped"): (WAKING, ["lease", "stop"]),
    ("waking", "restarted"): (WAKING, ["lease", "stop", "start", "prove", "release"]),
    ("waking", "asleep"): (WAKING, ["lease", "reload", "wake_kv", "reset_cache", "sleep"]),
    ("waking", "awake"): (WAKING, ["lease", "reload", "wake_kv", "reset_cache", "prove", "release"]),
    ("unknown", "drained"): (UNKNOWN, UnknownState),
    ("unknown", "serving"): (UNKNOWN, UnknownState),
    ("unknown", "started"): (UNKNOWN, UnknownState),
    ("unknown", "stopped"): (UNKNOWN, ["lease", "withdraw", "await_router", "close", "stop"]),
    ("unknown", "restarted"): (UNKNOWN, ["lease", "withdraw", "await_router", "close", "stop", "start", *BACK]),
    ("unknown", "asleep"): (UNKNOWN, UnknownState),
    ("unknown", "awake"): (UNKNOWN, UnknownState),
    # to an older configuration: the way of a restart, and GOES_BACK in "now"
    **{
        (state, "rolled_back"): (
            dataclasses.replace(now, goes_back=GENERATION),
            [*before, "roll_back", "start", *after],
        )
        for state, now, before, after in [
            ("stopped", STOPPED, ["lease"], BACK),
            ("failed", FAILED, ["lease", "stop"], ["prove", "release"]),
            ("starting", STARTING, ["lease", "withdraw", "await_router", "close", "stop"], BACK),
            ("serving", SERVING, ["lease", *OUT, "stop"], BACK),
            ("withdrawn", WITHDRAWN, ["lease", *OUT_AGAIN, "stop"], ["prove", "release"]),
            ("draining", DRAINING, ["lease", *OUT_AGAIN, "stop"], ["prove", "release"]),
            ("drained", DRAINED, ["lease", "stop"], ["prove", "release"]),
            ("asleep", ASLEEP, ["lease", "stop"], ["prove", "release"]),
            ("waking", WAKING, ["lease", "stop"], ["prove", "release"]),
            ("unknown", UNKNOWN, ["lease", "withdraw", "await_router", "close", "stop"], BACK),
        ]
    },
    ("stopped", "reloaded"): (STOPPED, Refused),
    ("failed", "reloaded"): (FAILED, Refused),
    ("starting", "reloaded"): (STARTING, Refused),
    ("asleep", "reloaded"): (ASLEEP, Refused),
    ("waking", "reloaded"): (WAKING, Refused),
    ("unknown", "reloaded"): (UNKNOWN, UnknownState),
    ("serving", "reloaded"): (SERVING, ["lease", *OUT, "pause", *NEW, *BACK]),
    ("withdrawn", "reloaded"): (WITHDRAWN, ["lease", *OUT_AGAIN, "pause", *NEW, "prove", "release"]),
    ("draining", "reloaded"): (DRAINING, ["lease", *OUT_AGAIN, "pause", *NEW, "prove", "release"]),
    ("drained", "reloaded"): (DRAINED, ["lease", *NEW, "prove", "release"]),
    ("headless", "drained"): (HEADLESS, []),
    ("headless", "serving"): (HEADLESS, []),
    ("headless", "started"): (HEADLESS, []),
    ("headless", "stopped"): (HEADLESS, ["lease", "stop"]),
    ("headless", "restarted"): (HEADLESS, ["lease", "stop", "start"]),
    ("headless", "asleep"): (HEADLESS, Refused),
    ("headless", "awake"): (HEADLESS, []),
    ("headless", "reloaded"): (HEADLESS, Refused),
    ("headless", "rolled_back"): (
        dataclasses.replace(HEADLESS, goes_back=GENERATION),
        ["lease", "stop", "roll_back", "start"],
    ),
}


def names(steps):
    return [step.name for step in steps]


def test_the_table_is_complete():
    assert set(TABLE) == {(state, wanted) for state in STATES for wanted in WANTED}


@pytest.mark.parametrize(("state", "wanted"), TABLE, ids=str)
def test_steps(state, wanted):
    now, expected = TABLE[state, wanted]
    assert now.state == state
    if not isinstance(expected, list):
        with pytest.raises(expected, match=f"'chat' on e1 is {state}") as caught:
            plan(wanted, now, OPTIONS)
        assert caught.value.next_step
        return
    assert names(plan(wanted, now, OPTIONS)) == expected


@pytest.mark.parametrize(("state", "wanted"), TABLE, ids=str)
def test_someone_elses_lease_is_respected_unless_forced(state, wanted):
    now, expected = TABLE[state, wanted]
    if not isinstance(expected, list) or not expected:
        return  # refused anyway, or nothing to do
    against = Options(owner=OURS, lease_against="night-shift")
    with pytest.raises(Refused, match="held by night-shift"):
        plan(wanted, now, against)
    assert names(plan(wanted, now, against._replace(force=True))) == expected


AFTER_DRAIN = lease(purpose="drained")
LEASES = [
    # a change that was killed goes on; what was drained on purpose stays out
    (dataclasses.replace(DRAINED, lease=AFTER_DRAIN), "drained", []),
    (dataclasses.replace(DRAINED, lease=AFTER_DRAIN), "restarted", ["stop", "start", "prove"]),
    (dataclasses.replace(STOPPED, lease=AFTER_DRAIN), "restarted", ["start", "prove"]),
    (dataclasses.replace(STOPPED, lease=AFTER_DRAIN), "started", ["start", "prove"]),
    (dataclasses.replace(WITHDRAWN, lease=AFTER_DRAIN), "started", []),
    (dataclasses.replace(DRAINED, lease=AFTER_DRAIN), "serving", ["resume", *BACK]),
    (dataclasses.replace(STOPPED, lease=lease()), "restarted", ["start", *BACK]),
    (dataclasses.replace(WITHDRAWN, lease=lease()), "started", BACK),
    (dataclasses.replace(DRAINED, lease=lease()), "started", ["resume", *BACK]),
    (dataclasses.replace(WITHDRAWN, lease=lease(restore="withdrawn")), "started", ["prove", "release"]),
    (dataclasses.replace(SERVING, lease=lease()), "serving", ["release"]),
    (dataclasses.replace(WITHDRAWN, lease=lease(owner="night-shift")), "started", []),
]


@pytest.mark.parametrize(("now", "wanted", "expected"), LEASES)
def test_steps_under_a_lease(now, wanted, expected):
    assert names(plan(wanted, now, OPTIONS)) == expected


HEADLESS_FAILED = observation(unit=unit_state("failed", "failed", "exit-code"), headless=True)
HEADLESS_STARTING = observation(unit=unit_state("activating", "start-pre"), headless=True)
HEADLESS_UNKNOWN = observation(unit=None, headless=True, unseen={"unit": "no answer"})
HELD = dataclasses.replace(HEADLESS, lease=lease())
HEADLESS_TABLE = [
    # now, wanted, the steps, what is predicted of state and lease
    (HEADLESS_STOPPED, "started", ["lease", "start"], ("headless", OURS)),
    (HEADLESS_STOPPED, "restarted", ["lease", "start"], ("headless", OURS)),
    (HEADLESS_STOPPED, "stopped", [], ("stopped", None)),
    (HEADLESS_STOPPED, "drained", [], ("stopped", None)),
    (HEADLESS_STOPPED, "serving", Refused, None),
    (HEADLESS_FAILED, "started", ["lease", "start"], ("headless", OURS)),
    (HEADLESS_FAILED, "restarted", ["lease", "stop", "start"], ("headless", OURS)),
    (HEADLESS_FAILED, "serving", Refused, None),
    (HEADLESS_STARTING, "started", ["start"], ("headless", None)),
    (HEADLESS_STARTING, "stopped", ["lease", "stop"], ("stopped", OURS)),
    (HEADLESS_UNKNOWN, "started", UnknownState, None),
    (HEADLESS_UNKNOWN, "serving", UnknownState, None),
    (HEADLESS_UNKNOWN, "restarted", ["lease", "stop", "start"], ("headless", OURS)),
    (HEADLESS, "stopped", ["lease", "stop"], ("stopped", OURS)),
    (HELD, "restarted", ["stop", "start"], ("headless", OURS)),
    (HELD, "serving", ["release"], ("headless", None)),
]


@pytest.mark.parametrize(("now", "wanted", "expected", "after"), HEADLESS_TABLE)
def test_of_a_headless_engine_only_the_unit_changes(now, wanted, expected, after):
    if after is None:
        with pytest.raises(expected, match=f"cannot be brought to {wanted}") as caught:
            plan(wanted, now, OPTIONS)
        assert "restart" in caught.value.next_step
        return
    steps = plan(wanted, now, OPTIONS)
    assert names(steps) == expected
    end = predict(now, steps, OPTIONS)
    assert (end["state"], end["lease"]) == after


def test_a_headless_engine_is_restarted_once_for_each_run():
    done = observation(headless=True, last={"restarted_run": "r1", "restarted_pid": 10})
    assert plan("restarted", done, OPTIONS._replace(run="r1")) == []
    assert names(plan("restarted", done, OPTIONS._replace(run="r2"))) == ["lease", "stop", "start"]
    assert names(plan("restarted", done, OPTIONS)) == ["lease", "stop", "start"]


@pytest.mark.parametrize("wanted", WANTED)
def test_the_head_of_a_group_changes_as_any_engine_but_for_what_one_host_cannot_prove(wanted):
    head = dataclasses.replace(observation(group="large"), goes_back=GENERATION)
    if wanted in ("asleep", "reloaded"):
        with pytest.raises(Refused, match="'chat' on e1 is serving and of group 'large'"):
            plan(wanted, head, OPTIONS)
    else:
        assert names(plan(wanted, head, OPTIONS)) == TABLE["serving", wanted][1]


def test_a_group_does_not_go_back_on_one_host_alone():
    back = OPTIONS._replace(on_failure="rollback")
    head = dataclasses.replace(STOPPED, goes_back=GENERATION, group="large")
    (start,) = [step for step in plan("started", head, back) if step.name == "start"]
    assert recover("started", start, head, back) == []


def test_a_restart_is_done_once_for_each_run():
    done = {"restarted_run": "r1", "restarted_pid": 10}
    assert plan("restarted", observation(last=done), Options(owner=OURS, run="r1")) == []
    assert "stop" in names(plan("restarted", observation(last=done), Options(owner=OURS, run="r2")))
    other_process = {"restarted_run": "r1", "restarted_pid": 9}
    assert "stop" in names(plan("restarted", observation(last=other_process), Options(owner=OURS, run="r1")))
    killed = observation(last=done, held=lease(), gate=gate_state("closed"))
    assert names(plan("restarted", killed, Options(owner=OURS, run="r1"))) == BACK


def test_a_paused_engine_that_is_admitted_resumes_before_it_drains():
    now = observation(api=api_state(paused=True, waiting=3), gate=gate_state("open"))
    assert names(plan("drained", now, OPTIONS)) == ["lease", "resume", *OUT, "pause"]


def test_a_drain_that_cannot_be_counted_is_refused_before_it_begins():
    for wanted in ("drained", "stopped", "restarted"):
        with pytest.raises(Refused, match="does not report its requests"):
            plan(wanted, observation(api=api_state(running=None)), OPTIONS)


def test_without_development_endpoints_the_closed_gate_is_the_only_lock():
    now = observation(api=api_state(dev_mode=False))
    steps = plan("drained", now, OPTIONS)
    assert names(steps) == ["lease", *OUT]
    assert predict(now, steps, OPTIONS)["state"] == "drained"


def test_without_a_gate_the_engine_alone_is_drained_and_resumed():
    now = observation(has_gate=False)
    assert names(plan("drained", now, OPTIONS)) == ["lease", "await_idle", "pause"]
    drained = observation(has_gate=False, api=api_state(paused=True), held=AFTER_DRAIN)
    assert names(plan("serving", drained, OPTIONS)) == ["resume", "prove", "release"]


ASLEEP_2 = observation(
    gate=gate_state("closed"), api=api_state(paused=True, sleep="discard_all"), sleep=sleep_record(2)
)
KV_ONLY = observation(
    gate=gate_state("closed"), api=api_state(paused=True, sleep=("",)), sleep=sleep_record(0, kv_only=True)
)
UNPROVED = dataclasses.replace(ASLEEP, sleep=sleep_record(1, proved=False))
STAGED = ["wake_weights", "reload", "wake_kv", "reset_cache"]
SLEEPS = [
    # now, options, steps to asleep
    (ASLEEP, Options(owner=OURS, level=2), ["lease", "wake", "reset_cache", "sleep"]),
    (ASLEEP_2, Options(owner=OURS, level=1), ["lease", *STAGED, "sleep"]),
    (ASLEEP_2, Options(owner=OURS, level=2), ["lease"]),
    (KV_ONLY, Options(owner=OURS, kv_only=True), ["lease"]),
    (KV_ONLY, Options(owner=OURS, level=0), ["lease", "wake", "reset_cache", "sleep"]),
    (KV_ONLY, Options(owner=OURS, level=1), ["lease", "wake", "reset_cache", "sleep"]),
    (ASLEEP, Options(owner=OURS, level=2, deepen=False), Refused),
    # killed in the middle of the sleep, or nothing was freed
    (UNPROVED, Options(owner=OURS, level=1), ["lease", "wake", "reset_cache", "sleep"]),
    (UNPROVED, Options(owner=OURS, level=1, deepen=False), ["lease", "wake", "reset_cache", "sleep"]),
]


@pytest.mark.parametrize(("now", "options", "expected"), SLEEPS)
def test_another_level_is_reached_by_waking_first_or_refused(now, options, expected):
    if expected is Refused:
        with pytest.raises(Refused, match="sleep at level 2"):
            plan("asleep", now, options)
        return
    assert names(plan("asleep", now, options)) == expected


@pytest.mark.parametrize("done", [STAGED[:count] for count in range(4)], ids=len)
def test_a_wake_after_level_2_is_staged_and_goes_on_where_it_was_killed(done):
    parts = {"wake_weights": "weights", "reload": "reloaded", "wake_kv": "kv_cache", "reset_cache": "cache_reset"}
    record = sleep_record(2, [parts[step] for step in done])
    now = observation(
        gate=gate_state("closed"),
        api=api_state(paused=True, sleep="discard_all"),
        held=lease(purpose="awake"),
        sleep=record,
    )
    assert names(plan("awake", now, OPTIONS)) == [*STAGED[len(done) :], *BACK]


def test_a_prefix_cache_that_may_outlive_its_memory_is_reset_before_the_engine_serves():
    asleep_0 = dataclasses.replace(KV_ONLY, sleep=sleep_record(0))
    assert "reset_cache" not in names(plan("awake", asleep_0, OPTIONS)), "nothing was lost"
    killed = observation(gate=gate_state("closed"), held=lease(purpose="awake"), sleep=sleep_record(1))
    for wanted in ("awake", "serving"):
        assert names(plan(wanted, killed, OPTIONS)) == ["reset_cache", *BACK]


@pytest.mark.parametrize("wanted", WANTED)
def test_an_engine_whose_unit_stops_is_only_waited_for(wanted):
    """systemd calls it deactivating, we call it draining; nothing can be asked of it any more."""
    held = lease(purpose=wanted)
    now = observation(
        unit=unit_state("deactivating", "stop"), held=held, last={"restarted_run": "r1", "restarted_pid": 0}
    )
    assert now.state == "draining"
    now = dataclasses.replace(now, goes_back=GENERATION)
    if wanted not in ("stopped", "restarted", "rolled_back"):
        with pytest.raises(Refused, match=r"is draining .*cannot be brought to"):
            plan(wanted, now, OPTIONS)
        return
    steps = names(plan(wanted, now, Options(owner=OURS, run="r1")))
    back = ["roll_back"] if wanted == "rolled_back" else []
    assert steps == (["stop"] if wanted == "stopped" else ["stop", *back, "start", *BACK])


def test_a_start_under_way_is_finished_by_the_run_that_began_it():
    now = dataclasses.replace(STARTING, lease=lease())
    assert names(plan("started", now, OPTIONS)) == ["start", *BACK]
    assert names(plan("started", dataclasses.replace(STARTING, lease=lease("night-shift")), OPTIONS)) == ["start"]


def test_a_lease_says_what_it_is_for_now():
    """By its purpose the next run knows what a killed one was about, and what nobody but its owner puts back."""
    asleep = dataclasses.replace(ASLEEP, lease=lease(purpose="asleep"))
    assert names(plan("awake", asleep, OPTIONS))[0] == "lease"
    woken = dataclasses.replace(WITHDRAWN, lease=lease(purpose="awake"))
    assert names(plan("awake", woken, OPTIONS)) == BACK
    assert names(plan("drained", woken, OPTIONS))[0] == "lease"


def test_a_paused_engine_is_never_woken():
    for now in (DRAINED, dataclasses.replace(DRAINED, lease=lease(purpose="drained"))):
        assert plan("awake", now, OPTIONS) == []


def test_sleep_is_refused_without_development_endpoints():
    with pytest.raises(Refused, match="no development endpoints"):
        plan("asleep", observation(api=api_state(dev_mode=False)), OPTIONS)


KEEP = Options(owner=OURS, keep=True)
FROZEN = observation(gate=gate_state("closed", sessions=2), api=api_state(paused=True, running=2), held=AFTER_DRAIN)


def test_frozen_requests_stay_as_they_are_until_someone_wants_more():
    assert FROZEN.state == "draining"
    assert plan("drained", FROZEN, KEEP) == []
    killed = dataclasses.replace(FROZEN, gate=gate_state("withdrawn", sessions=2))
    assert names(plan("drained", killed, KEEP)) == ["close"]
    assert names(plan("drained", FROZEN, OPTIONS)) == ["resume", "await_idle", "pause"]
    assert names(plan("stopped", FROZEN, OPTIONS)) == ["resume", "await_idle", "stop"]
    assert names(plan("serving", FROZEN, OPTIONS)) == ["resume", *BACK]
    assert plan("awake", FROZEN, OPTIONS) == []
    assert names(plan("asleep", FROZEN, KEEP._replace(level=0))) == ["sleep"]
    assert names(plan("drained", SERVING, KEEP)) == ["lease", *OUT, "pause"]


@pytest.mark.parametrize("options", [KEEP, KEEP._replace(level=2), KEEP._replace(level=0, kv_only=True)])
def test_requests_cannot_be_kept_without_their_kv_cache(options):
    for now in (SERVING, FROZEN, ASLEEP):
        with pytest.raises(Refused, match="gives up the KV cache"):
            plan("asleep", now, options)


def test_requests_are_frozen_by_a_development_endpoint():
    with pytest.raises(Refused, match="cannot freeze"):
        plan("drained", observation(api=api_state(dev_mode=False)), KEEP)


WEIGHTS = OPTIONS._replace(tags=("weights",))
CACHE = OPTIONS._replace(tags=("kv_cache",))
ALL = OPTIONS._replace(tags=("weights", "kv_cache"))


def partly(level, *awake):
    gauge = {1: "weights_offloaded", 2: "discard_all"}[level]
    api = api_state(paused=True, sleep=gauge)
    held = lease(purpose="awake")
    return observation(gate=gate_state("closed"), api=api, held=held, sleep=sleep_record(level, list(awake)))


TAGS = [
    # now, options, steps to awake
    (ASLEEP, WEIGHTS, ["lease", "wake_weights"]),
    (ASLEEP_2, WEIGHTS, ["lease", "wake_weights", "reload"]),
    (partly(2, "weights"), WEIGHTS, ["reload"]),
    (partly(1, "weights"), WEIGHTS, []),
    (partly(2, "weights", "reloaded"), WEIGHTS, []),
    (partly(1, "weights"), CACHE, ["wake_kv", "reset_cache", *BACK]),
    (partly(1, "weights"), OPTIONS, ["wake_kv", "reset_cache", *BACK]),
    (partly(2, "weights", "reloaded"), ALL, ["wake_kv", "reset_cache", *BACK]),
    (ASLEEP_2, ALL, ["lease", *STAGED, "prove", "release"]),
    (ASLEEP, ALL, ["lease", "wake_weights", "wake_kv", "reset_cache", "prove", "release"]),
    (ASLEEP, CACHE, Refused),
    (ASLEEP_2, CACHE, Refused),
    (KV_ONLY, CACHE, ["lease", "wake", "reset_cache", "prove", "release"]),
    (SERVING, WEIGHTS, []),
    (DRAINED, WEIGHTS, []),
]


@pytest.mark.parametrize(("now", "options", "expected"), TAGS)
def test_a_wake_by_parts(now, options, expected):
    if expected is Refused:
        with pytest.raises(Refused, match="cannot be brought to awake"):
            plan("awake", now, options)
        return
    steps = plan("awake", now, options)
    assert names(steps) == expected
    if options == WEIGHTS and steps:
        after = predict(now, steps, options)
        assert (after["state"], after["admission"], after["lease"]) == ("waking", "closed", OURS)


def test_a_sleep_that_had_to_be_a_stop_is_there_and_is_woken_by_a_start():
    stopped = dataclasses.replace(STOPPED, lease=lease(purpose=STOPPED_FOR_SLEEP))
    assert plan("asleep", stopped, OPTIONS._replace(on_failure="stop")) == []
    with pytest.raises(Refused, match="is stopped"):
        plan("asleep", stopped, OPTIONS)
    with pytest.raises(Refused, match="is stopped"):
        plan("asleep", STOPPED, OPTIONS._replace(on_failure="stop"))
    assert names(plan("awake", stopped, OPTIONS)) == ["start", *BACK]
    killed = dataclasses.replace(WITHDRAWN, lease=lease(purpose=STOPPED_FOR_SLEEP))
    assert names(plan("awake", killed, OPTIONS)) == BACK
    theirs = lease(owner="night-shift", purpose=STOPPED_FOR_SLEEP)
    for other in (theirs, lease(purpose="asleep"), lease(purpose="stopped"), None):
        with pytest.raises(Refused, match="is stopped"):
            plan("awake", dataclasses.replace(STOPPED, lease=other), OPTIONS)


def test_only_a_failed_sleep_is_made_good_by_a_stop():
    stop = OPTIONS._replace(on_failure="stop")
    steps = plan("asleep", SERVING, stop)
    assert {step.name: names(recover("asleep", step, SERVING, stop)) for step in steps} == {
        **{name: [] for name in ["lease", *OUT]},
        "sleep": ["stop"],
    }
    assert all(recover("asleep", step, SERVING, OPTIONS) == [] for step in steps)


def test_going_back_is_done_once_for_each_run_and_needs_somewhere_to_go():
    with pytest.raises(Refused, match="nothing to go back to"):
        plan("rolled_back", SERVING, OPTIONS)
    mark = {"run": "r1", "config_digest": "old"}
    there = dataclasses.replace(SERVING, went_back=mark, config_digest="old", stale=False)
    assert plan("rolled_back", there, OPTIONS._replace(run="r1")) == []
    with pytest.raises(Refused, match="nothing to go back to"):
        plan("rolled_back", there, OPTIONS._replace(run="r2"))
    held = lease(purpose="rolled_back")
    killed = dataclasses.replace(there, gate=gate_state("closed"), state="withdrawn", lease=held)
    assert names(plan("rolled_back", killed, OPTIONS._replace(run="r1"))) == BACK
    earlier = dataclasses.replace(STOPPED, went_back=mark, config_digest="old", lease=held)
    assert names(plan("rolled_back", earlier, OPTIONS._replace(run="r1"))) == ["start", *BACK]


def test_what_a_headless_engine_was_started_with_is_kept_once_its_head_is_proved():
    started = dataclasses.replace(HEADLESS, unkept=True)
    assert names(plan("serving", started, OPTIONS)) == ["keep"]
    assert names(plan("serving", dataclasses.replace(started, lease=lease()), OPTIONS)) == ["keep", "release"]
    assert predict(started, plan("serving", started, OPTIONS), OPTIONS) == started.summary()
    assert names(plan("stopped", started, OPTIONS)) == ["lease", "stop"]


def test_a_headless_engine_goes_back_once_for_each_run():
    run = OPTIONS._replace(run="r1")
    with pytest.raises(Refused, match="nothing to go back to"):
        plan("rolled_back", HEADLESS, run)
    there = dataclasses.replace(
        HEADLESS, went_back={"run": "r1", "config_digest": "old"}, config_digest="old", stale=False
    )
    assert plan("rolled_back", there, run) == []
    assert names(plan("rolled_back", dataclasses.replace(there, stale=True), run)) == ["lease", "stop", "start"]
    assert names(plan("rolled_back", dataclasses.replace(there, state="stopped"), run)) == ["lease", "start"]


@pytest.mark.parametrize("wanted", ["started", "restarted"])
def test_a_start_that_fails_goes_back_where_that_is_allowed_and_possible(wanted):
    back = OPTIONS._replace(on_failure="rollback")
    now = dataclasses.replace(STOPPED, goes_back=GENERATION)
    steps = {step.name: step for step in plan(wanted, now, back)}
    back_again = ["stop", "roll_back", "start", *BACK]
    assert names(recover(wanted, steps["start"], now, back)) == back_again
    assert names(recover(wanted, steps["prove"], now, back)) == back_again, (
        "it started, and computes what it should not"
    )
    assert recover(wanted, steps["admit"], now, back) == []
    assert recover(wanted, steps["start"], STOPPED, back) == []
    assert recover(wanted, steps["start"], now, OPTIONS) == []


@pytest.mark.parametrize("wanted", ["started", "restarted"])
def test_a_start_is_compared_with_the_speed_before_when_that_is_asked_for(wanted):
    quick = OPTIONS._replace(compare_speed=True, on_failure="rollback")
    now = dataclasses.replace(STOPPED, goes_back=GENERATION)
    steps = plan(wanted, now, quick)
    assert names(steps) == ["lease", "start", "compare_speed", *BACK]
    assert names(recover(wanted, steps[2], now, quick)) == ["stop", "roll_back", "start", *BACK]
    assert recover(wanted, steps[2], now, quick._replace(on_failure="fail")) == []
    killed = dataclasses.replace(now, state="withdrawn", gate=gate_state("closed"), lease=lease(purpose=wanted))
    assert names(plan("started", killed, quick)) == ["compare_speed", *BACK], "the run before may not have come so far"
    assert plan("started", SERVING, quick) == []


NEWER = OPTIONS._replace(digest="sha256:new")


def test_weights_that_are_loaded_already_are_not_loaded_again():
    there = dataclasses.replace(SERVING, weights_digest="sha256:new")
    assert plan("reloaded", there, NEWER) == []
    killed = dataclasses.replace(there, gate=gate_state("closed"), lease=lease(purpose="reloaded"))
    killed = dataclasses.replace(killed, state="withdrawn")
    assert names(plan("reloaded", killed, NEWER)) == BACK
    older = dataclasses.replace(SERVING, weights_digest="sha256:old")
    assert "reload" in names(plan("reloaded", older, NEWER))
    assert "reload" in names(plan("reloaded", SERVING, NEWER)), "what is not known is loaded anew"


def test_a_wake_whose_answers_are_wrong_is_made_good_by_a_restart_where_that_is_wished():
    asleep = dataclasses.replace(ASLEEP, lease=lease(purpose="asleep"))
    wished = OPTIONS._replace(on_mismatch="restart")
    steps = {step.name: step for step in plan("awake", asleep, wished)}
    assert names(recover("awake", steps["prove"], asleep, wished, True)) == ["stop", "start", *BACK]
    assert recover("awake", steps["prove"], asleep, wished) == []
    assert recover("awake", steps["wake"], asleep, wished, True) == []
    assert recover("awake", steps["prove"], asleep, OPTIONS, True) == []
    assert recover("serving", steps["prove"], asleep, wished, True) == []


def test_a_reload_of_some_ranks_is_made_good_by_a_restart():
    steps = plan("reloaded", SERVING, NEWER)
    made_good = {step.name: names(recover("reloaded", step, SERVING, NEWER)) for step in steps}
    assert made_good.pop("reload") == ["stop", "start", *BACK]
    assert not any(made_good.values())


def test_an_engine_without_development_endpoints_cannot_reload():
    can = dataclasses.replace(api_state(), capabilities=["lora_update"])
    with pytest.raises(Refused, match="cannot reload"):
        plan("reloaded", observation(api=can), NEWER)


def test_a_process_that_leaks_is_restarted_instead_of_woken():
    leaks = dataclasses.replace(ASLEEP_2, leak="after 9 sleeps …")
    assert names(plan("awake", leaks, OPTIONS)) == ["lease", "stop", "start", "prove", "release"]
    assert names(plan("awake", leaks, WEIGHTS)) == ["lease", "wake_weights", "reload"]
    assert names(plan("awake", dataclasses.replace(SERVING, leak="after 9 sleeps …"), OPTIONS)) == []


@pytest.mark.parametrize(("options", "lacks"), [({}, "sleep"), ({"kv_only": True}, "kv_release")])
def test_a_sleep_that_the_engine_does_not_offer_is_refused(options, lacks):
    can = [name for name in ("pause", "sleep", "kv_release") if name != lacks]
    now = observation(api=dataclasses.replace(api_state(), capabilities=can))
    with pytest.raises(Refused, match=f"does not offer {lacks}"):
        plan("asleep", now, OPTIONS._replace(**options))


END = {
    "drained": observation(gate=gate_state("closed"), api=api_state(paused=True), held=AFTER_DRAIN),
    "serving": SERVING,
    "started": SERVING,
    "stopped": observation(
        unit=unit_state("inactive", "dead"), gate=gate_state("closed", False, False), held=lease(purpose="stopped")
    ),
    "restarted": SERVING,
    "asleep": dataclasses.replace(ASLEEP, lease=lease(purpose="asleep")),
    "awake": SERVING,
    "reloaded": dataclasses.replace(SERVING, weights_digest="sha256:new"),
    "rolled_back": SERVING,
}
START_FROM = {
    "rolled_back": dataclasses.replace(SERVING, goes_back=GENERATION),
    "serving": END["drained"],
    "awake": END["asleep"],
}


@pytest.mark.parametrize("wanted", WANTED)
def test_the_prediction_is_the_state_that_those_steps_end_in(wanted):
    """From a serving engine, and for serving from a drained one: prediction and observation have the same words."""
    now = START_FROM.get(wanted, SERVING)
    options = OPTIONS._replace(digest="sha256:new")
    assert predict(now, plan(wanted, now, options), options) == END[wanted].summary()
    if wanted not in ("restarted", "rolled_back"):
        assert plan(wanted, END[wanted], options) == []
