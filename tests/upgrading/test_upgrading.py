# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Upgrades of real vLLM under load, in this order: to a version that is good, and then to some that are broken.

On a lab of three engine hosts and a router: VLLM_LAB=NAME python -m pytest tests/upgrading
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from ansible_collections.baremetal.vllm.tests.rolling.fleet import CHECKOUT
from ansible_collections.baremetal.vllm.tests.unit.awx import controller
from ansible_collections.baremetal.vllm.tests.unit.awx.job import Job
from ansible_collections.baremetal.vllm.tests.upgrading import broken, older

LOAD = CHECKOUT / "tests/load/load.py"
NEW = "0.32.0"
# Three engines and their clients share the processors of this machine, so that a start beside them is timed at random.
RATIO = 0.3


class Load:
    """Eight clients that stream from the router all the while; at the end each request has been judged."""

    def __init__(self, fleet, tmp_path) -> None:
        self.stop, self.running, self.report = tmp_path / "stop", tmp_path / "running", tmp_path / "load.json"
        command = [sys.executable, str(LOAD), "--url", fleet.router, "--model", "tiny", "--streams", "8"]
        command += ["--out", str(self.report), "--until-file", str(self.stop), "--running-file", str(self.running)]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        fleet.wait("every client has had a token", self.running.exists, 60)

    def end(self) -> dict:
        self.stop.touch()
        self.process.wait(180)
        return json.loads(self.report.read_text())


@pytest.fixture
def load(fleet, tmp_path):
    clients = Load(fleet, tmp_path)
    yield clients
    seen = clients.end()
    print({key: seen["counts"][key] for key in ("requests", "ok", "lost", "cut")})
    assert (seen["counts"]["lost"], seen["counts"]["cut"]) == (0, 0), seen["failures"]
    assert seen["counts"]["ok"] > 50


def version(fleet, host: str) -> str:
    """The engine's own word."""
    return fleet.engine_get(host, "/version")["version"].partition("+")[0]


def upgrade(fleet, tmp_path, to: str, rc: int = 0, **variables) -> tuple[str, dict, float]:
    report = tmp_path / f"{to}.json"
    begun = time.monotonic()
    given = {"vllm_runtime_version": to, "vllm_upgrade_min_speed_ratio": RATIO, **variables}
    output = fleet.play("rolling_upgrade.yml", rc=rc, vllm_report_path=str(report), **given)
    return output, json.loads(report.read_text()), time.monotonic() - begun


def test_to_the_next_version_under_load(older_fleet, fleet, tmp_path, load):
    assert {version(fleet, host) for host in fleet.engines} == {older.VERSION}
    output, report, seconds = upgrade(fleet, tmp_path, NEW, vllm_upgrade_soak=30, vllm_upgrade_soak_interval=10)
    assert {version(fleet, host) for host in fleet.engines} == {NEW}
    assert (report["schema"], report["version"], report["good"]) == ("baremetal.vllm/upgrade", 1, True)
    for row in report["hosts"]:
        assert (row["from"], row["to"], row["runs"], row["outcome"]) == (older.VERSION, NEW, NEW, "upgraded"), row
        assert min(row["seconds"], row["speed_before"], row["speed_after"]) > 0
        print(row)
    print(report["soak"], f"{seconds:.0f} s")
    assert "request(s) in" in report["soak"][0]
    assert "time to the first token of 'chat'" in " ".join(report["soak"])
    assert f"vLLM {older.VERSION} -> {NEW}, upgraded" in output


def test_again_changes_nothing(fleet, tmp_path):
    before = {host: fleet.main_pid(host) for host in fleet.engines}
    output, report, _seconds = upgrade(fleet, tmp_path, NEW)
    recap = [line for line in output.splitlines() if "unreachable=" in line and "localhost" not in line]
    # Not even a file on a host; the report is written on the controller.
    assert sum("changed=0" in line for line in recap) >= len(fleet.engines) - 1, recap
    assert {host: fleet.main_pid(host) for host in fleet.engines} == before
    assert {row["outcome"] for row in report["hosts"]} == {"unchanged"}


def run_job(fleet, tmp_path, template: str, **answers) -> Job:
    """A job template, as AWX runs it."""
    templates = {one["name"]: one for one in controller.variables()["controller_templates"]}
    job = Job(tmp_path, fleet.inventories(), templates[f"vLLM {template}"], answers)
    job.judge()
    return job


def test_the_templates_of_awx_that_install_run_on_real_hosts(fleet, tmp_path):
    before = {host: fleet.main_pid(host) for host in fleet.engines}
    for job in (
        run_job(fleet, tmp_path, "site, dry run"),
        run_job(fleet, tmp_path, "site"),
        run_job(fleet, tmp_path, "rolling upgrade", vllm_upgrade_soak=0),
    ):
        changed = job.events()[-1]["event_data"]["changed"]
        assert not {host: count for host, count in changed.items() if host in fleet.address}, changed
    assert {host: fleet.main_pid(host) for host in fleet.engines} == before


@pytest.mark.parametrize(
    ("kind", "to", "says"),
    [
        ("crash", "0.32.91", "did not start"),
        ("garbage", "0.32.92", "does not compute what golden"),
        ("hang", "0.32.93", "did not start"),
        ("slow", "0.32.94", "min_speed_ratio is 0.3"),
    ],
)
def test_a_broken_version_stops_at_the_first_host_which_goes_back(fleet, tmp_path, load, kind, to, says):
    broken.make(fleet, to, kind)
    before = {host: fleet.main_pid(host) for host in fleet.engines}
    output, report, seconds = upgrade(fleet, tmp_path, to, rc=2, vllm_engine_start_timeout=120)
    assert says in output
    assert "It went back to what it ran before, was proved with it and serves." in output
    assert {version(fleet, host) for host in fleet.engines} == {NEW}
    assert [fleet.main_pid(host) for host in ("e2", "e3")] == [before["e2"], before["e3"]], "no other host is touched"
    assert fleet.ssh("e1", "readlink /opt/vllm/engines/chat").strip().endswith(NEW)
    rows = {row["name"]: row for row in report["hosts"]}
    assert {host: row["outcome"] for host, row in rows.items()} == {
        "e1": "rolled_back",
        "e2": "waiting",
        "e3": "waiting",
    }
    assert rows["e1"]["reason"]
    assert report["good"] is False
    print(kind, rows["e1"]["reason"][:300], f"{seconds:.0f} s")
