# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One state from many signals: the truth table, and what is not seen is never guessed."""

from __future__ import annotations

import dataclasses

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.observe import STATES, derive
from ansible_collections.baremetal.vllm.tests.unit.plugins.module_utils.lifecycle_factory import (
    api_state,
    gate_state,
    sleep_record,
    unit_state,
)

ASLEEP_1 = api_state(paused=True, sleep="weights_offloaded")
TABLE = [
    # unit, api, gate -> state, level
    (unit_state("inactive", "dead"), None, gate_state(), "stopped", None),
    (unit_state("failed", "failed", "exit-code"), None, gate_state(), "failed", None),
    (unit_state("activating", "start-post"), None, gate_state(), "starting", None),
    (unit_state("activating", "auto-restart"), None, gate_state(), "starting", None),
    (unit_state("deactivating", "stop"), None, gate_state(), "draining", None),
    (unit_state("reloading", "reload"), api_state(), gate_state(), "unknown", None),
    (None, None, gate_state(), "unknown", None),
    (unit_state(), None, gate_state(), "unknown", None),
    (unit_state(), api_state(healthy=False), gate_state(), "unknown", None),
    (unit_state(), api_state(), None, "unknown", None),  # a gate that should be there and is silent
    (unit_state(), api_state(), gate_state(), "serving", None),
    (unit_state(), api_state(running=3), gate_state(sessions=3), "serving", None),
    (unit_state(), api_state(), gate_state(proved=False), "withdrawn", None),
    (unit_state(), api_state(), gate_state(up=False), "withdrawn", None),
    (unit_state(), api_state(), gate_state("withdrawn"), "withdrawn", None),
    (unit_state(), api_state(), gate_state("closed"), "withdrawn", None),  # the second lock is missing
    (unit_state(), api_state(running=1), gate_state("withdrawn"), "draining", None),
    (unit_state(), api_state(waiting=1), gate_state("closed"), "draining", None),
    (unit_state(), api_state(), gate_state("withdrawn", sessions=1), "draining", None),
    (unit_state(), api_state(paused=True), gate_state("closed"), "drained", None),
    (unit_state(), api_state(paused=True), gate_state("withdrawn"), "withdrawn", None),
    (unit_state(), api_state(paused=True, waiting=2), gate_state("closed"), "draining", None),
    (unit_state(), api_state(paused=True), gate_state("open"), "draining", None),  # requests hang: neither is true
    (unit_state(), api_state(dev_mode=False), gate_state("closed"), "drained", None),
    (unit_state(), api_state(dev_mode=False), gate_state("open"), "serving", None),
    (unit_state(), api_state(running=None), gate_state("closed"), "withdrawn", None),  # unseen is not idle
    (unit_state(), ASLEEP_1, gate_state("closed"), "asleep", 1),
    (unit_state(), api_state(paused=True, sleep="discard_all"), gate_state("closed"), "asleep", 2),
    (unit_state(), api_state(sleeping=False, sleep="discard_all"), gate_state(), "unknown", None),
    (unit_state(), api_state(paused=False, sleeping=True, sleep="weights_offloaded"), gate_state(), "unknown", None),
    (unit_state(), api_state(paused=False, sleeping=True), gate_state(), "unknown", None),
    (unit_state(), api_state(paused=True, sleep=None), gate_state("closed"), "unknown", None),  # paused, or asleep?
    (unit_state(), api_state(paused=True, sleep=("awake", "discard_all")), gate_state("closed"), "unknown", None),
]


@pytest.mark.parametrize(("unit", "api", "gate", "state", "level"), TABLE)
def test_state(unit, api, gate, state, level):
    found, found_level, reasons = derive(unit, api, gate, has_gate=True, unseen={})
    assert (found, found_level) == (state, level)
    assert state in STATES
    if state == "unknown":
        assert reasons, "unknown says why"


ASLEEP_2 = api_state(paused=True, sleep="discard_all")
RECORDS = [
    # what the engine says, our own record -> state, level
    (api_state(paused=True, sleep=("",)), None, "asleep", 0),
    (api_state(paused=True, sleep=("",)), sleep_record(0, kv_only=True), "asleep", 0),
    (ASLEEP_2, sleep_record(2), "asleep", 2),
    (ASLEEP_2, sleep_record(1), "unknown", None),  # /sleep?level=2 on a sleeper changes the gauge and nothing else
    (ASLEEP_2, sleep_record(2, ["weights"]), "waking", 2),
    (api_state(), sleep_record(2, ["weights"]), "unknown", None),  # woken as a whole before its weights were loaded
    (api_state(), sleep_record(2, ["weights", "reloaded"]), "waking", 2),
    (api_state(), sleep_record(2), "unknown", None),  # a plain wake: every answer would be garbage
    (api_state(), sleep_record(1), "serving", None),  # a plain wake from level 1 is a whole one
]


@pytest.mark.parametrize(("api", "record", "state", "level"), RECORDS)
def test_the_own_record_of_a_sleep_decides_with_the_gauge(api, record, state, level):
    gate = gate_state("open" if state == "serving" else "closed")
    found, found_level, reasons = derive(unit_state(), api, gate, record, has_gate=True, unseen={})
    assert (found, found_level) == (state, level)
    assert reasons or state != "unknown"


def test_an_engine_that_is_still_falling_asleep_is_not_awake():
    api = api_state()
    api = dataclasses.replace(api, metrics=dataclasses.replace(api.metrics, sleep_operations=1))
    state, _level, reasons = derive(unit_state(), api, gate_state("closed"), has_gate=True, unseen={})
    assert state == "unknown"
    assert "still under way" in reasons[0]


@pytest.mark.parametrize(
    ("api", "state"),
    [(api_state(), "serving"), (api_state(paused=True), "drained"), (api_state(paused=True, running=1), "draining")],
)
def test_state_without_a_gate(api, state):
    assert derive(unit_state(), api, None, has_gate=False, unseen={})[0] == state


@pytest.mark.parametrize("active", ["inactive", "failed", "activating", "deactivating", "active", "reloading"])
def test_of_a_headless_engine_the_unit_decides_and_it_never_serves(active):
    unit = unit_state(active)
    state = derive(unit, None, None, has_gate=False, unseen={}, headless=True)[0]
    if active == "active":
        assert state == "headless"
    else:
        assert state == derive(unit, None, None, has_gate=False, unseen={})[0] != "serving"
    assert derive(None, None, None, has_gate=False, unseen={"unit": "no answer"}, headless=True)[0] == "unknown"


@pytest.mark.parametrize("signal", ["api.sleeping", "api.metrics", "api.models", "api.version", "api.healthy"])
def test_an_engine_signal_that_fails_makes_the_state_unknown(signal):
    state, _level, reasons = derive(
        unit_state(), api_state(), gate_state(), has_gate=True, unseen={signal: "nothing came within 3 s"}
    )
    assert state == "unknown"
    assert reasons == [f"{signal[4:]}: nothing came within 3 s"]


def test_processes_left_in_the_group_of_an_inactive_unit_are_unknown():
    unit = unit_state("inactive", "dead")
    unit.pids.append(4711)
    state, _level, reasons = derive(unit, None, gate_state(), has_gate=True, unseen={})
    assert state == "unknown"
    assert "4711" in reasons[0]
