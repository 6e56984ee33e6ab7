# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""benchmarks/fleet.py on three hosts: every host has its row, every engine serves, every one is restarted."""

from __future__ import annotations

import contextlib
import json

import pytest

from ansible_collections.baremetal.vllm.benchmarks import fleet

pytestmark = pytest.mark.long

NAMES = ["h001", "h002", "h003"]


@pytest.fixture(scope="module")
def hosts():
    with fleet.fleet_of(3) as built:
        yield built


def run(hosts, name, elsewhere=False):
    row = fleet.play(hosts, name, forks=3, batch="100%", elsewhere=elsewhere)
    return row, (hosts.folder / f"{name}.log").read_text()


def processes(hosts):
    """By the simulator's truth, what stands for each engine."""
    return {host.name: host.chat.core_pids() for host in hosts.hosts}


def test_status_has_a_row_for_every_host_and_its_engine_serves(hosts):
    row, output = run(hosts, "status")
    seen = json.loads((hosts.folder / "status.json").read_text())["hosts"]
    assert {name: one["engines"][name]["state"] for name, one in seen.items()} == dict.fromkeys(NAMES, "serving")
    assert all(f"{name}             {name}         serving" in output for name in NAMES)
    assert {name: [one["engines"][name]["unit"]["main_pid"]] for name, one in seen.items()} == processes(hosts)
    assert row["host_cpu_s_per_host"] > 0 < row["controller_cpu_s_per_host"]

    again, _output = run(hosts, "status", elsewhere=True)
    assert json.loads((hosts.folder / "status.json").read_text())["hosts"] == seen
    assert again["play"] == "status/elsewhere"
    assert again["host_cpu_s_per_host"] == 0


@pytest.mark.parametrize("name", ["rolling_restart", "uri_restart"])
def test_every_engine_is_restarted_and_serves_again(hosts, name):
    before = processes(hosts)
    _row, output = run(hosts, name)
    after = processes(hosts)
    assert set(before) == set(after) == set(NAMES)
    assert all(before[host] != after[host] for host in NAMES), output
    assert [host.gate.ready(host.name) for host in hosts.hosts] == [200] * 3
    assert [host.chat.active() for host in hosts.hosts] == ["active"] * 3
    if name == "rolling_restart":
        rows = json.loads((hosts.folder / f"{name}.json").read_text())["hosts"]
        assert [(row["name"], row["engine"], row["changed"]) for row in rows] == [(one, one, True) for one in NAMES]


def test_what_it_is_compared_with_runs_on_every_host(hosts):
    for name in ("ping", "uri"):
        _row, output = run(hosts, name)
        assert all(f"ok: [{host}]" in output for host in NAMES)


def test_growth_is_told_from_the_first_fleet_on(monkeypatch, capsys, tmp_path):
    def play(fleet_, name, _forks, _batch, elsewhere):
        seconds = {2: 1.0, 4: 1.5}[fleet_]
        return {"play": f"{name}/elsewhere" if elsewhere else name, "hosts": fleet_, "wall_s_per_host": seconds}

    monkeypatch.setattr(fleet, "fleet_of", contextlib.nullcontext)
    monkeypatch.setattr(fleet, "play", play)
    rows = fleet.measure([2, 4], ["raw", "status"], 1, "10%")
    assert [(row["play"], row["hosts"], row["growth"]) for row in rows] == [
        ("raw", 2, 1.0),
        ("status", 2, 1.0),
        ("status/elsewhere", 2, 1.0),
        ("raw", 4, 1.5),
        ("status", 4, 1.5),
        ("status/elsewhere", 4, 1.5),
    ]
