# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbooks' filters."""

from __future__ import annotations

import pytest

from ansible_collections.baremetal.vllm.plugins.filter import fleet

ENGINES = [{"name": "chat", "port": 8001}, {"name": "code", "port": 8002}]


@pytest.mark.parametrize(
    ("values", "address"),
    [
        ({"ansible_host": "10.0.0.1"}, "10.0.0.1"),
        ({"ansible_host": "10.0.0.1", "vllm_gate_address": "10.9.0.1"}, "10.9.0.1"),
        ({"ansible_host": "10.0.0.1", "vllm_gate_address": "0.0.0.0"}, "10.0.0.1"),
        ({"ansible_host": "fd00::1"}, "[fd00::1]"),
        ({}, "e1"),
    ],
)
def test_gates_of_a_host(values, address):
    gates = fleet.vllm_gates(["e1"], {"e1": {**values, "vllm_engine_instances": ENGINES}})
    assert gates == {"e1/chat": f"http://{address}:8001", "e1/code": f"http://{address}:8002"}


def test_hosts_without_engines_have_no_gates():
    assert fleet.vllm_gates(["e1"], {"e1": {}}) == {}


def seen(**changes):
    engine = {
        "state": "serving",
        "level": None,
        "reasons": [],
        "api": {"metrics": {"running": {"0": 2, "1": 1}, "waiting": {"0": 0}}},
        "started": {"boot_s": 21.5},
        "runtime_version": "0.32.0",
        "lease": None,
        "stale": False,
    }
    return {**engine, **changes}


def test_the_report_of_a_roll_says_where_the_seconds_went():
    out = {
        "seconds": 60.0,
        "timings": {"withdraw": 0.5, "await_router": 3.0, "await_idle": 2.0, "stop": 10.0, "start": 40.0, "admit": 1.0},
        "started": {"boot_s": 38.0, "warm_s": 1.0},
    }
    hostvars = {
        "e1": {
            "__vllm_roll_serve": {"engines": {"chat": {"out_of_service": out}}},
            "__vllm_roll_restart": {"changed": True},
        },
        "e2": {},  # never reached
    }
    (row,) = fleet.vllm_roll_rows(["e1", "e2"], hostvars)
    assert row == {
        "name": "e1", "engine": "chat", "out_of_rotation_s": 60.0, "drain_s": 5.5, "stop_s": 10.0, "boot_s": 38.0,
        "warm_s": 1.0, "overhead_s": 5.5, "changed": True,
    }  # fmt: skip


def test_the_table_has_a_line_for_each_engine_and_for_each_silent_host():
    lease = {"owner": "me", "run": "r1", "expired": True}
    hostvars = {
        "e1": {"__vllm_status_seen": {"engines": {"chat": seen(), "code": seen(state="asleep", level=1, lease=lease)}}},
        "e2": {"__vllm_status_seen": {"unreachable": True, "msg": "no route\nat all"}},
        "e3": {"__vllm_status_seen": {"failed": True, "msg": "httpx is missing"}},
        "e4": {},
    }
    lines = fleet.vllm_status_rows(["e1", "e2", "e3", "e4"], hostvars)
    assert len(lines) == 6
    assert lines[1].split() == ["e1", "chat", "serving", "3", "21.5", "0.32.0", "-"]
    assert "asleep 1" in lines[2]
    assert "me r1 (expired)" in lines[2]
    assert lines[3].split() == ["e2", "-", "unreachable", "-", "-", "-", "-", "no", "route"]
    assert lines[4].endswith("httpx is missing")
    assert "it was not asked" in lines[5]


def test_the_table_says_what_is_due():
    preload = {
        "daemon": "base",
        "state": "lost",
        "weights_source": "preload_zero_copy",
        "next_start": "cold",
        "why": ["daemon lost; scheduled for the next restart"],
    }
    engine = {**seen(), "leak": "after 9 sleeps it holds more", "preload": preload}
    lines = fleet.vllm_status_rows(["e1"], {"e1": {"__vllm_status_seen": {"engines": {"chat": engine}}}})
    assert lines[1].endswith(
        "after 9 sleeps it holds more: restart due; weights from preload_zero_copy, preload daemon base lost, "
        "next start cold; daemon lost; scheduled for the next restart"
    )


@pytest.mark.parametrize(
    ("engine", "abandoned"),
    [
        (seen(), False),
        (seen(state="drained", lease={"owner": "me", "reason": "fan", "expired": False}), False),
        (seen(state="drained", lease={"owner": "me", "reason": "fan", "expired": True}), True),
        (seen(state="withdrawn"), True),
        (seen(state="stopped"), True),
        (seen(lease={"owner": "me", "reason": "fan", "expired": True}), True),
    ],
)
def test_abandoned_is_out_of_service_without_a_valid_lease(engine, abandoned):
    assert [found["engine"] for found in fleet.vllm_abandoned({"chat": engine})] == (["chat"] if abandoned else [])
