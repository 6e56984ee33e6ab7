# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a playbook of this collection on one simulated host, without a process for each task.

Ansible's own templating and the collection's own filters and modules; the order of tasks is the playbook's. Only what
playbooks switch, schedule, measure and rolling_upgrade use is understood, so a task of another kind is an error.
"""

from __future__ import annotations

import importlib
import json
import typing as t
from pathlib import Path

from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from ansible_collections.baremetal.vllm.plugins.filter import (
    capacity,
    fleet,
    measuring,
    report,
    schedule,
    switching,
    upgrade,
)

try:
    from ansible.template import trust_as_template

    TRUSTED = {"trusted_as_template": True}
except ImportError:  # before 2.19
    TRUSTED = {}

    def trust_as_template(text: str) -> str:
        return text


PLAYBOOKS = Path(__file__).parents[3] / "playbooks"
MODULES = "ansible_collections.baremetal.vllm.plugins.modules"
OMIT = "__omit_place_holder__"
IGNORED = tuple(f"ansible.builtin.{name}" for name in ("debug", "setup", "systemd_service", "wait_for_connection"))
KEYWORDS = ("name", "when", "vars", "loop", "loop_control", "register", "run_once", "changed_when",
            "delegate_to", "become", "ignore_errors", "ignore_unreachable", "check_mode", "failed_when")  # fmt: skip
ROLES = ("ansible.builtin.import_role", "ansible.builtin.include_role")


class Failed(Exception):
    """A task failed, and no rescue has caught it."""


class Killed(Exception):
    """The run was ended between two tasks."""


class Play:
    """One run. ``call(module, **options)`` gives a module's result; ``calls`` lists what was called, in order.

    With ``kill_after`` the run ends after that many calls, as one that is killed does. ``role(name, tasks_from)``
    stands for a role: it does to the host what that would, and gives the facts that it sets.
    """

    def __init__(
        self,
        host: str,
        call: t.Callable[..., dict],
        variables: dict,
        kill_after: int | None = None,
        check: bool = False,
        role: t.Callable[[str, str], dict] | None = None,
    ) -> None:
        self.loader = DataLoader()
        self.role = role
        self.call = call
        self.calls: list[tuple[str, dict]] = []
        self.kill_after = kill_after
        self.here: list[Path] = []
        self.report: dict[str, t.Any] = {}
        self.page = ""
        self.facts: dict[str, t.Any] = dict(variables)
        self.facts.update(
            inventory_hostname=host,
            vllm_report_path="report.json",
            ansible_check_mode=check,
            groups={"vllm_engines": [host]},
            hostvars={host: self.facts},
            ansible_play_hosts=[host],
            ansible_play_hosts_all=[host],
            ansible_play_batch=[host],
            ansible_playbook_python="python",
            omit=OMIT,
        )

    def run(self, playbook: str) -> str:
        """Nothing, or why it failed."""
        path = PLAYBOOKS / playbook
        self.here = [path.parent]
        try:
            for play in self.loader.load_from_file(str(path), **TRUSTED):
                if self._is_of(play["hosts"]):
                    self._tasks(play["tasks"], play.get("vars") or {})
        except Failed as exc:
            return str(exc)
        return ""

    def _is_of(self, pattern: str) -> bool:
        """Whether the host is in one of these groups, which may have been made meanwhile."""
        groups = str(self._value(pattern, {})).split(":")
        return any(self.facts["inventory_hostname"] in self.facts["groups"].get(group, []) for group in groups)

    def rows(self) -> list[dict]:
        """The hosts of the report."""
        return self.report["hosts"]

    def _tasks(self, tasks: list[dict], outer: dict) -> None:
        for task in tasks:
            self._task(task, {**outer, **(task.get("vars") or {})})

    def _task(self, task: dict, own: dict) -> None:
        if "block" in task:
            if self._holds(task.get("when", []), own):
                self._block(task, own)
            return
        (action,) = [key for key in task if key not in KEYWORDS]
        if action in ("ansible.builtin.import_tasks", "ansible.builtin.include_tasks"):
            if not self._holds(task.get("when", []), own):
                return
            path = self.here[-1] / str(task[action])
            if path.name == "known_variables.yml":  # asks a lookup for all names; tests/unit/roles has Ansible do it
                return
            name = (task.get("loop_control") or {}).get("loop_var", "item")
            for one in self._value(task["loop"], own) if "loop" in task else [None]:
                self.here.append(path.parent)
                self._tasks(self.loader.load_from_file(str(path), **TRUSTED), {**own, name: one})
                self.here.pop()
            return
        if not self._holds(task.get("when", []), own):
            result: dict[str, t.Any] = {"changed": False, "skipped": True}
        elif "loop" in task:
            results = [
                {**self._once(task, action, {**own, "item": one}), "item": one}
                for one in self._value(task["loop"], own)
            ]
            result = {"results": results, "failed": any(one.get("failed") for one in results)}
        else:
            result = self._once(task, action, own)
        if task.get("failed_when") is False:
            result["failed"] = False
        if "register" in task:
            self.facts[task["register"]] = result
        if result.get("failed") and not task.get("ignore_errors"):
            self.facts.update(ansible_failed_task={"name": str(task["name"])}, ansible_failed_result=result)
            raise Failed(result.get("msg") or "; ".join(one["msg"] for one in result["results"] if one.get("failed")))

    def _block(self, task: dict, own: dict) -> None:
        depth = len(self.here)
        try:
            self._tasks(task["block"], own)
        except Failed:
            if "rescue" not in task:
                raise
            del self.here[depth:]
            self._tasks(task["rescue"], own)

    def _once(self, task: dict, action: str, own: dict) -> dict:
        if action in IGNORED:
            return {"changed": False}
        given = {key: value for key, value in (task[action] or {}).items() if key != "that"}
        arguments = self._value(given, own) if action != "ansible.builtin.assert" else given
        if action == "ansible.builtin.set_fact":
            self.facts.update(arguments)
            return {"changed": False}
        if action == "ansible.builtin.add_host":
            for group in arguments["groups"].split(","):
                self.facts["groups"].setdefault(group, []).append(arguments["name"])
            return {"changed": False}
        if action in ROLES:
            return self._role(arguments["name"].rpartition(".")[2], arguments.get("tasks_from", "main"))
        if action == "ansible.builtin.copy":  # of the report, to the controller
            if arguments["dest"].endswith(".html"):
                self.page = arguments["content"]
            else:
                self.report = json.loads(arguments["content"])
            return {"changed": True}
        if action == "ansible.builtin.fail":
            return {"failed": True, "msg": arguments["msg"]}
        if action == "ansible.builtin.assert":
            good = self._holds(task[action]["that"], own)
            return {"failed": not good, "msg": "" if good else self._value(given["fail_msg"], own)}
        collection, _dot, module = action.rpartition(".")
        assert collection == "baremetal.vllm", f"unknown action {action}"
        if task.get("check_mode"):
            arguments["check_mode"] = True
        self._note(module, arguments)
        return self.call(importlib.import_module(f"{MODULES}.{module}"), **arguments)

    def _role(self, name: str, tasks_from: str) -> dict:
        assert self.role is not None, f"role {name} is used, and nothing stands for it"
        self._note(f"{name}/{tasks_from}", {})
        try:
            self.facts.update(self.role(name, tasks_from))
        except Failed as exc:
            return {"failed": True, "msg": str(exc)}
        return {"changed": False}

    def _note(self, what: str, arguments: dict) -> None:
        if self.kill_after is not None and len(self.calls) >= self.kill_after:
            raise Killed
        self.calls.append((what, arguments))

    def _templar(self, own: dict) -> Templar:
        templar = Templar(self.loader, variables={**self.facts, **own})
        # Ansible's own way to them is through its loader of collections, which a test's imports have forestalled.
        filters = getattr(templar, "_engine", templar).environment.filters
        for plugins in (capacity, fleet, measuring, report, schedule, switching, upgrade):
            for name, function in plugins.FilterModule().filters().items():
                filters[f"baremetal.vllm.{name}"] = function
        return templar

    def _value(self, value: t.Any, own: dict) -> t.Any:
        found = self._templar(own).template(value)
        # Since 2.19 templating itself leaves them out.
        return {key: one for key, one in found.items() if one != OMIT} if isinstance(found, dict) else found

    def _holds(self, conditions: t.Any, own: dict) -> bool:
        templar = self._templar(own)
        every = conditions if isinstance(conditions, list) else [conditions]
        return all(templar.template(trust_as_template("{{ " + str(one) + " }}")) for one in every)
