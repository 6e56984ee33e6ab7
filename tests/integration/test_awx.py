# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The job templates of awx/, run by ansible-runner as AWX runs them, on simulated hosts."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.tests.unit.awx import controller
from ansible_collections.baremetal.vllm.tests.unit.awx.job import Job
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.conftest import builder
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import wait_for

pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # as for the lifecycle tests


class Fleet:
    """Two hosts. On the first one, two engines take turns on a GPU."""

    def __init__(self, hosts: dict, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.templates = {
            one["name"]: one for one in controller.variables(vllm_awx_engines=["chat", "code"])["controller_templates"]
        }
        declared = {name: self._declare(name, host) for name, host in hosts.items()}
        values = {"ansible_connection": "local", "ansible_become": False, "vllm_gate_address": "127.0.0.1"}
        self.inventory = {"all": {"children": {"vllm_engines": {"hosts": declared, "vars": values}}}}

    def _declare(self, name: str, host) -> dict:
        key = "{{ lookup('ansible.builtin.file', lookup('ansible.builtin.env', 'VLLM_API_KEY_FILE')) }}"
        instances = [
            {"name": engine, "model": "/srv/models/tiny", "gpus": [f"{name}-gpu"], "port": host.gate.ports[engine],
             "secret_env": {"VLLM_API_KEY": key}}
            for engine in host.engines
        ]  # fmt: skip
        return {"vllm_host_control_python": host.python(), "vllm_engine_instances": instances}

    def launch(self, template: str, **answers) -> Job:
        return Job(self.folder, self.inventory, self.templates[f"vLLM {template}"], answers)

    def run(self, template: str, **answers) -> Job:
        job = self.launch(template, **answers)
        job.judge()
        return job

    def seen(self, host: str, engine: str = "chat") -> dict:
        return self.hosts[host].engines[engine].seen()

    def pid(self, host: str) -> int:
        return self.hosts[host].chat.truth()["pid"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch, builder(monkeypatch) as build:
        first = build(gate=True, gpus=1, engines=("chat", "code"), start=False, gpu_memory_utilization=0.9)
        second = build(gate=True, gpus=1, max_model_len=65536)
        started = first.systemd.ctl("start", first.chat.unit)
        assert started.returncode == 0, started.stderr
        first.gate.start()
        wait_for(lambda: first._is_ready("chat"), "the gate's first 200")
        yield Fleet({"h1": first, "h2": second}, tmp_path_factory.mktemp("awx"))


@pytest.fixture(autouse=True)
def _all_serve(fleet):
    """Each test begins and ends so."""
    yield
    for host in fleet.hosts:
        seen = fleet.seen(host)
        assert (seen["ready"], seen["lease"]) == (True, None), f"{host}: {seen}"


def test_status(fleet):
    assert "h1" in fleet.run("status").said()


def test_a_roll_that_is_cancelled_is_gone_on_with(fleet):
    """The second host cannot drain until its client has gone, and the job is cancelled while it waits."""
    before = {host: fleet.pid(host) for host in fleet.hosts}
    with fleet.hosts["h2"].gate.client("chat", tokens=60000):
        job = fleet.launch(
            "rolling restart", vllm_hosts="vllm_engines", vllm_roll_engines=["chat"], vllm_roll_min_serving="1"
        )
        wait_for(fleet.hosts["h2"].chat.lease, f"h2 is withdrawn: {job.said()}", 180)
        done = fleet.pid("h1")
        assert done != before["h1"]
        job.cancel()
    assert job.ended() == "canceled"
    job.keep_secrets()
    held = fleet.hosts["h2"].chat.lease()
    assert held["owner"] == "rolling_restart"
    assert fleet.pid("h2") == before["h2"]
    assert not fleet.seen("h2")["ready"]

    again = fleet.run(
        "rolling restart", vllm_hosts="vllm_engines", vllm_roll_engines=["chat"], vllm_roll_min_serving="1"
    )
    assert f"{held['run']}: 1 host(s) not serving come first" in again.said()
    assert fleet.pid("h1") == done, "what was done is left alone"
    assert fleet.pid("h2") != before["h2"]


def test_drain_and_back(fleet):
    fleet.run("drain", vllm_hosts="h2", vllm_drain_reason="a new fan")
    assert fleet.hosts["h2"].chat.lease()["reason"] == "a new fan"
    assert not fleet.seen("h2")["ready"]
    fleet.run("drain", vllm_hosts="h2", vllm_drain_state="serving")


def test_night_and_morning(fleet):
    extra = {one["name"]: one["extra_data"] for one in controller.variables()["controller_schedules"]}
    hosts = {"vllm_hosts": "h2"}
    fleet.run("sleep", **{**extra["vLLM night sleep"], **hosts, "vllm_sleep_level": "2"})
    seen = fleet.seen("h2")
    assert (seen["level"], seen["lease"], seen["ready"]) == (2, "night", False)
    fleet.run("wake", **{**extra["vLLM morning wake"], **hosts})
    assert fleet.seen("h2")["level"] == 0


def test_switch_and_the_calendar_back(fleet):
    fleet.run("switch", vllm_hosts="h1", vllm_switch_engine="code")
    assert fleet.seen("h1", "code")["ready"]
    assert fleet.seen("h1")["asleep"]
    day = [{"name": "day", "from": "00:00", "to": "24:00", "awake": ["chat"], "asleep": ["code"]}]
    fleet.inventory["all"]["children"]["vllm_engines"]["hosts"]["h1"]["vllm_schedule"] = day
    fleet.run("calendar", vllm_hosts="h1", vllm_schedule_force="true")
    assert fleet.seen("h1", "code")["asleep"]


def test_measure(fleet):
    before = fleet.pid("h2")
    assert "warm start" in fleet.run("measure", vllm_hosts="h2", vllm_measure_min_serving="0").said()
    assert fleet.pid("h2") != before


def test_reconcile(fleet):
    fleet.run("drain", vllm_hosts="h2", vllm_drain_lease_ttl=1)
    time.sleep(1)
    assert not fleet.seen("h2")["ready"]
    fleet.run("reconcile", vllm_hosts="h2")


def test_each_template_is_run():
    """Those that install need real hosts, which the scenario upgrading has."""
    files = (Path(__file__), Path(__file__).parents[1] / "upgrading/test_upgrading.py")
    run = [
        re.findall(r"(?:fleet\.(?:run|launch)|run_job)\(\s*(?:fleet, tmp_path, )?\"([^\"]+)\"", path.read_text())
        for path in files
    ]
    templates = {one["name"] for one in controller.variables()["controller_templates"]}
    assert {f"vLLM {name}" for names in run for name in names} == templates


def test_answers_that_awx_would_not_take():
    templates = {one["name"]: one for one in controller.variables()["controller_templates"]}
    survey = templates["vLLM sleep"]["survey_spec"]
    for answer in ({"vllm_sleep_level": 1}, {"vllm_sleep_level": "3"}, {"vllm_hosts": ""}, {"vllm_sleep_timeout": 0},
                   {"vllm_sleep_engines": "chat"}, {"vllm_sleep_run": "mine"}):  # fmt: skip
        with pytest.raises(AssertionError):
            controller.extra_vars(survey, answer)
