# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The job templates of awx/, run by ansible-runner as AWX runs them, on simulated hosts.

A private data directory for each job, extra variables from the answers to its survey, the injected file of the API key,
JSON events.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import typing as t
from pathlib import Path

import jinja2
import pytest
import yaml

from ansible_collections.baremetal.vllm.tests.unit.awx import controller
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.conftest import builder
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import wait_for

CHECKOUT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
KEY = "sk-only-for-this-test"
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # as for the lifecycle tests


class Unsafe(str):
    """Text that came from a person: AWX has Ansible take it as it is."""


class Dumper(yaml.SafeDumper):
    pass


Dumper.add_representer(Unsafe, lambda dumper, text: dumper.represent_scalar("!unsafe", str(text)))


def unsafe(value: t.Any) -> t.Any:
    if isinstance(value, list):
        return [unsafe(one) for one in value]
    return Unsafe(value) if isinstance(value, str) else value


class Job:
    """One run of a job template."""

    number = 0

    def __init__(self, fleet: Fleet, template: dict, answers: dict) -> None:
        Job.number += 1
        self.ident = str(Job.number)
        self.folder = fleet.folder / f"job{self.ident}"
        self.artifacts = self.folder / "artifacts" / self.ident
        for name in ("inventory", "env"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "project").symlink_to(CHECKOUT)
        (self.folder / "inventory/hosts.json").write_text(json.dumps(fleet.inventory))
        given = controller.extra_vars(template["survey_spec"], answers)
        given = {**given, "awx_job_id": Job.number, "awx_job_template_name": template["name"]}
        text = yaml.dump({name: unsafe(value) for name, value in given.items()}, Dumper=Dumper)
        self._write("env/extravars", text)
        self._write("env/settings", yaml.safe_dump({"idle_timeout": 0, "job_timeout": template["timeout"]}))
        self._write("env/cmdline", "--check" if template["job_type"] == "check" else "--forks=5")
        self._write("env/envvars", yaml.safe_dump({**self._credential(), "ANSIBLE_HOME": f"{self.folder}/.ansible"}))
        self.process = subprocess.Popen(
            [BIN / "ansible-runner", "run", self.folder, "--playbook", template["playbook"], "--ident", self.ident,
             "--json", "--quiet"],
            env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}, cwd=fleet.folder,
            stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o600)
        return path

    def _credential(self) -> dict[str, str]:
        """What the credential of the API key injects."""
        (kind,) = controller.variables()["controller_credential_types"]
        fill = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False).from_string
        path = self._write("env/tmp_api_key", fill(kind["injectors"]["file"]["template"]).render(api_key=KEY))
        tower = {"filename": str(path)}
        return {name: fill(text).render(tower=tower) for name, text in kind["injectors"]["env"].items()}

    def cancel(self) -> None:
        self.process.terminate()
        self.process.wait(60)

    def ended(self) -> str:
        """How it ended, as AWX shows it."""
        self.process.wait(600)
        return (self.artifacts / "status").read_text()

    def events(self) -> list[dict]:
        found = [json.loads(path.read_text()) for path in (self.artifacts / "job_events").glob("*-*.json")]
        return sorted(found, key=lambda event: event["counter"])

    def output(self) -> str:
        return (self.artifacts / "stdout").read_text() if (self.artifacts / "stdout").exists() else ""

    def judge(self) -> None:
        """It succeeded, its events are whole, and nothing that is kept of it has the key."""
        assert self.ended() == "successful", self.said()
        events = self.events()
        assert [event["counter"] for event in events] == list(range(1, len(events) + 1))
        assert events[-1]["event"] == "playbook_on_stats"
        assert not events[-1]["event_data"]["failures"]
        self.keep_secrets()

    def said(self) -> str:
        return "\n".join(event["stdout"] for event in self.events())[-6000:]

    def keep_secrets(self) -> None:
        kept = [path for path in self.artifacts.rglob("*") if path.is_file()]
        assert kept
        assert [path for path in kept if KEY.encode() in path.read_bytes()] == []


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
        return Job(self, self.templates[f"vLLM {template}"], answers)

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


def test_reconcile(fleet):
    fleet.run("drain", vllm_hosts="h2", vllm_drain_lease_ttl=1)
    time.sleep(1)
    assert not fleet.seen("h2")["ready"]
    fleet.run("reconcile", vllm_hosts="h2")


def test_each_template_is_run_here_but_those_that_install():
    """The roles need real hosts."""
    run = re.findall(r"fleet\.(?:run|launch)\(\s*\"([^\"]+)\"", Path(__file__).read_text())
    templates = {one["name"]: one["playbook"] for one in controller.variables()["controller_templates"]}
    install = {
        name for name, playbook in templates.items() if playbook.split("/")[1] in ("site.yml", "rolling_upgrade.yml")
    }
    assert {f"vLLM {name}" for name in run} == set(templates) - install


def test_answers_that_awx_would_not_take():
    templates = {one["name"]: one for one in controller.variables()["controller_templates"]}
    survey = templates["vLLM sleep"]["survey_spec"]
    for answer in ({"vllm_sleep_level": 1}, {"vllm_sleep_level": "3"}, {"vllm_hosts": ""}, {"vllm_sleep_timeout": 0},
                   {"vllm_sleep_engines": "chat"}, {"vllm_sleep_run": "mine"}):  # fmt: skip
        with pytest.raises(AssertionError):
            controller.extra_vars(survey, answer)
