# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A job of a template of awx/, run by ansible-runner as AWX runs it.

A private data directory for each job, extra variables from the answers to its survey, the injected file of the API key,
JSON events.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing as t
from pathlib import Path

import jinja2
import yaml

from ansible_collections.baremetal.vllm.tests.unit.awx import controller

CHECKOUT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
KEY = "sk-only-for-this-test"


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
    """One run of a job template, which ``folder`` keeps; ``inventory`` is written there, or says where it lies."""

    number = 0

    def __init__(self, folder: Path, inventory: dict | t.Sequence[Path], template: dict, answers: dict) -> None:
        Job.number += 1
        self.ident = str(Job.number)
        self.folder = folder / f"job{self.ident}"
        self.artifacts = self.folder / "artifacts" / self.ident
        (self.folder / "env").mkdir(parents=True)
        (self.folder / "project").symlink_to(CHECKOUT)
        more = ""
        if isinstance(inventory, dict):
            (self.folder / "inventory").mkdir()
            (self.folder / "inventory/hosts.json").write_text(json.dumps(inventory))
        else:
            more = "".join(f" --inventory={path}" for path in inventory)
        given = controller.extra_vars(template["survey_spec"], answers)
        given = {**given, "awx_job_id": Job.number, "awx_job_template_name": template["name"]}
        text = yaml.dump({name: unsafe(value) for name, value in given.items()}, Dumper=Dumper)
        self._write("env/extravars", text)
        self._write("env/settings", yaml.safe_dump({"idle_timeout": 0, "job_timeout": template["timeout"]}))
        self._write("env/cmdline", ("--check" if template["job_type"] == "check" else "--forks=5") + more)
        self._write("env/envvars", yaml.safe_dump({**self._credential(), "ANSIBLE_HOME": f"{self.folder}/.ansible"}))
        self.process = subprocess.Popen(
            [BIN / "ansible-runner", "run", self.folder, "--playbook", template["playbook"], "--ident", self.ident,
             "--json", "--quiet"],
            env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}, cwd=folder,
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
