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


HAPROXY = {"backend": "haproxy", "sockets": ["10.0.0.2:9999", "10.0.0.3:9999"], "proxy": "chat"}


@pytest.mark.parametrize(
    ("default", "engine", "values", "where"),
    [
        ({}, {"port": 8001, "admission": None}, {}, "http://e1:8001"),
        (HAPROXY, {"admission": {"server": "e1"}}, {}, "haproxy://10.0.0.2:9999,10.0.0.3:9999/chat/e1"),
        (HAPROXY, {"port": 8001, "admission": {"backend": "gate"}}, {}, "http://e1:8001"),
        (HAPROXY, {"admission": {"backend": "none"}}, {}, "uncounted:none"),
        (HAPROXY, {"admission": {"sockets": ["/run/haproxy.sock"], "server": "e1"}}, {}, "uncounted:haproxy"),
        ({"backend": "command", "command": ["/x"]}, {}, {}, "uncounted:command"),
        ({}, {}, {}, "uncounted:none"),  # no port, no gate
        ({}, {"port": 8001}, {"vllm_engine_gate": False}, "uncounted:none"),
    ],
)
def test_where_an_engine_without_our_gate_is_counted(default, engine, values, where):
    host = {**values, "vllm_engine_admission": default, "vllm_engine_instances": [{"name": "chat", **engine}]}
    assert fleet.vllm_gates(["e1"], {"e1": host}) == {"e1/chat": where}


def test_hosts_without_engines_have_no_gates():
    assert fleet.vllm_gates(["e1"], {"e1": {}}) == {}


def seen(**changes):
    """What vllm_info says of an engine, as far as the table needs it; the real thing is in the lab's tests."""
    gpu = {"uuid": "GPU-1", "processes": {"11": 1000, "12": 300, "77": 5000}}
    engine = {
        "state": "serving",
        "level": None,
        "reasons": [],
        "unit": {"pids": [10, 11, 12]},
        "api": {"version": "0.32.0+cpu", "metrics": {"running": {"0": 2, "1": 1}, "waiting": {"0": 0}}},
        "gate": {"sessions": 4},
        "has_gate": True,
        "gpus": [gpu],
        "memory": {"rss_mib": 3300},
        "started": {"boot_s": 21.5, "at": 1764460000.0},
        "last": {"wanted": "restarted", "run": "roll-1", "owner": "rolling_restart", "at": 1764460100.0},
        "runtime_version": "0.31.0",
        "weights_digest": "sha256:4f1c0a9b3d2e5f60",
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
    assert {key: row[key] for key in row if key.endswith("_s") or key in ("name", "engine", "changed")} == {
        "name": "e1", "engine": "chat", "out_of_rotation_s": 60.0, "drain_s": 5.5, "stop_s": 10.0, "boot_s": 38.0,
        "warm_s": 1.0, "overhead_s": 5.5, "changed": True,
    }  # fmt: skip


def test_an_engine_that_its_restart_has_brought_back_already_has_its_row():
    """It was unknown, and admitted: nothing was left for the last task to release."""
    out = {"seconds": 60.0, "timings": {"stop": 20.0}, "started": {"boot_s": 38.0}}
    hostvars = {
        "e1": {
            "__vllm_roll_seen": {"engines": {"chat": seen(state="unknown")}},
            "__vllm_roll_restart": {
                "changed": True,
                "engines": {"chat": {"out_of_service": out, "proof": {"by": "golden"}}},
            },
            "__vllm_roll_serve": {"engines": {"chat": {"changed": False}}},
        },
    }
    (row,) = fleet.vllm_roll_rows(["e1"], hostvars)
    assert (row["outcome"], row["stop_s"], row["proof"], row["out_of_rotation_s"]) == (
        "restarted",
        20.0,
        "golden",
        60.0,
    )
    assert fleet.vllm_roll_others(["e1"], hostvars) == []


def test_the_row_of_a_group_is_its_heads_and_names_what_was_changed_with_it():
    out = {"seconds": 60.0, "timings": {"stop": 10.0}, "started": {"boot_s": 38.0}}

    def saw(**groups):
        return {"engines": {name: {"group": group} for name, group in groups.items()}}

    followers = [{"host": "e2", "engines": ["chat", "code"]}, {"host": "e3", "engines": ["chat"]}]
    hostvars = {
        "e1": {
            "__vllm_roll_serve": {"engines": {one: {"out_of_service": out} for one in ("chat", "code", "alone")}},
            "__vllm_roll_seen": saw(chat="large", code="small", alone=""),
            "__vllm_roll_units": {"units": {"e1": {"followers": followers}}},
        },
        "e2": {"__vllm_roll_seen": saw(chat="large", code="small")},
        "e3": {"__vllm_roll_seen": saw(chat="large")},
    }
    rows = {row["engine"]: row.get("headless") for row in fleet.vllm_roll_rows(["e1", "e2", "e3"], hostvars)}
    assert rows == {"chat": ["e2/chat", "e3/chat"], "code": ["e2/code"], "alone": None}


def table(**engines):
    return fleet.vllm_status_rows(["e1"], {"e1": {"__vllm_status_seen": {"engines": engines}}})


def test_the_table_has_a_line_for_each_engine_and_for_each_silent_host():
    times = {"since": 1764470000.0, "expires": 1764473600.0}
    lease = {"owner": "me", "run": "r1", "reason": "a new fan", "expired": True, **times}
    hostvars = {
        "e1": {"__vllm_status_seen": {"engines": {"chat": seen(), "code": seen(state="asleep", level=1, lease=lease)}}},
        "e2": {"__vllm_status_seen": {"unreachable": True, "msg": "no route\nat all"}},
        "e3": {"__vllm_status_seen": {"failed": True, "msg": "httpx is missing"}},
        "e4": {},
    }
    lines = fleet.vllm_status_rows(["e1", "e2", "e3", "e4"], hostvars)
    assert len(lines) == 6
    words = ["e1", "chat", "serving", "11-29", "23:48", "0.32.0", "4f1c0a9b", "1300", "3300", "3", "4", "-"]
    assert lines[1].split() == [*words, "restarted", "roll-1"]
    assert "asleep 1" in lines[2]
    assert "11-30 02:33" in lines[2], "since its lease began"
    assert "me r1 (expired)" in lines[2]
    assert lines[2].endswith("held until 2025-11-30 03:33: a new fan")
    assert lines[3].split() == ["e2", "-", "unreachable", *["-"] * 9, "no", "route"]
    assert lines[4].endswith("httpx is missing")
    assert "it was not asked" in lines[5]
    assert lines[0].index("LAST") == lines[1].index("restarted") == lines[2].index("restarted")


@pytest.mark.parametrize(
    ("changes", "column", "says"),
    [
        ({"api": None}, 5, "0.31.0"),
        ({"api": None}, 9, "?"),
        ({"api": {"version": "0.32.0", "metrics": None}}, 9, "?"),
        ({"gate": None}, 10, "?"),
        ({"gate": None, "has_gate": False}, 10, "-"),
        ({"gpus": None}, 7, "-"),
        ({"gpus": [{"uuid": "GPU-1", "processes": {"11": None, "12": 5}}]}, 7, "?"),
        ({"unit": None}, 7, "?"),
        ({"memory": None}, 8, "-"),
        ({"weights_digest": ""}, 6, "-"),
        ({"last": None}, 12, "-"),
    ],
)
def test_what_was_not_seen_is_never_a_number(changes, column, says):
    assert table(chat=seen(**changes))[1].split()[column] == says


def test_an_engine_of_which_nothing_is_on_record_has_no_date():
    assert table(chat=seen(started=None, last=None))[1].split()[3] == "-"


def test_the_table_says_what_is_due():
    preload = {
        "daemon": "base",
        "state": "lost",
        "weights_source": "preload_zero_copy",
        "next_start": "cold",
        "why": ["daemon lost; scheduled for the next restart"],
    }
    engine = {**seen(), "leak": "after 9 sleeps it holds more", "preload": preload}
    assert table(chat=engine)[1].endswith(
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
        (seen(state="stopped", unit={"enabled": "enabled"}), True),
        (seen(state="stopped", unit={"enabled": "disabled"}), False),  # start: false, and not yet switched to
        (seen(state="failed", unit={"enabled": "disabled"}), True),
        (
            seen(
                state="stopped",
                unit={"enabled": "disabled"},
                lease={"owner": "me", "reason": "fan", "expired": True},
            ),
            True,
        ),
        (seen(lease={"owner": "me", "reason": "fan", "expired": True}), True),
    ],
)
def test_abandoned_is_out_of_service_without_a_valid_lease(engine, abandoned):
    assert [found["engine"] for found in fleet.vllm_abandoned({"chat": engine})] == (["chat"] if abandoned else [])


def held(by, expired=False):
    return {"owner": by, "reason": "code has its GPU", "expired": expired}


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (seen(), None),
        (seen(state="failed", unit={"enabled": "disabled"}), None),
        (seen(state="stopped", unit={"enabled": "enabled"}), None),
        (seen(state="stopped", unit={"enabled": "disabled"}), "stopped, and not enabled at boot"),
        (seen(state="stopped", unit={"enabled": "disabled"}, lease=held("rolling_restart")), None),  # half-way
        (seen(state="asleep", lease=held("switch")), "asleep, by switch: code has its GPU"),
        (seen(state="asleep", lease=held("schedule")), "asleep, by schedule: code has its GPU"),
        (seen(state="stopped", lease=held("switch")), "stopped, by switch: code has its GPU"),
        (seen(state="asleep", lease=held("switch", expired=True)), None),
        (seen(state="asleep", lease=held("operator")), None),
        (seen(state="asleep"), None),
        (seen(state="unknown", lease=held("switch")), None),
        (seen(state="drained", lease=held("switch")), None),  # in the middle of a switch
        (seen(state="asleep", lease=held("switch"), preload={"daemon": "base"}), None),
    ],
)
def test_a_roll_leaves_alone_whose_turn_it_is_not(engine, why):
    assert fleet.vllm_resting({"chat": engine}) == ({"chat": why} if why else {})


def test_the_evidence_of_a_failure_names_unit_processes_and_last_words():
    unit = {"active_state": "active", "sub_state": "running", "result": "success", "n_restarts": 2, "main_pid": 10}
    engine = seen(
        state="unknown",
        reasons=["/health gave no answer"],
        unit={**unit, "pids": [10, 11]},
        gpus=[{"uuid": "GPU-1", "used_mib": 1300, "total_mib": 5000, "processes": {"11": 1000, "77": None}}],
        unseen={"api.healthy": "no answer within 5 s"},
        journal=["INFO one", "ERROR two"],
    )
    assert fleet.vllm_evidence({"engines": {"chat": engine}}).splitlines() == [
        "chat is unknown; /health gave no answer",
        "  unit: active/running, result success, 2 restart(s) by itself, main process 10",
        "  GPU GPU-1: 1300 of 5000 MiB used; process 11 (its own) 1000 MiB, process 77 ? MiB",
        "  unseen: api.healthy: no answer within 5 s",
        "  end of its journal:",
        "    INFO one",
        "    ERROR two",
    ]


@pytest.mark.parametrize(
    ("failed", "says"),
    [
        ({"failed": True, "msg": "httpx is missing"}, "httpx is missing"),
        ({"unreachable": True, "msg": "no route"}, "no route"),
        ({}, "it did not answer"),
    ],
)
def test_a_host_that_shows_nothing_is_told(failed, says):
    assert fleet.vllm_evidence(failed) == f"Nothing more is known of it: {says}"
