# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A role of the collection by its variables alone: what its preflight says, and what its templates become."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from ansible_collections.baremetal.vllm.plugins.filter import groups

try:
    from ansible.template import trust_as_template
except ImportError:  # before 2.19
    trust_as_template = None

CHECKOUT = Path(__file__).resolve().parents[3]


def load(path):
    """A YAML file whose strings may be templates."""
    try:
        return DataLoader().load_from_file(str(path), trusted_as_template=True) or {}
    except TypeError:  # before 2.19 all were
        return DataLoader().load_from_file(str(path)) or {}


def run_playbook(book, folder, *arguments, **environment):
    """What Ansible's own command did with a playbook, on hosts of ``folder``/hosts.yml or those of ``arguments``."""
    inventory = folder / "hosts.yml"
    hosts = [f"--inventory={inventory}"] if inventory.exists() else []
    told = {"ANSIBLE_HOME": str(folder), "ANSIBLE_NOCOLOR": "1", **environment}
    return subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", *hosts, *arguments, CHECKOUT / "playbooks" / book],
        env={**os.environ, **told},
        cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
    )  # fmt: skip


FILES = {
    role: [
        load(CHECKOUT / "roles" / role / part) for part in ("defaults/main.yml", "vars/main.yml", "tasks/preflight.yml")
    ]
    for role in ("vllm_engine", "vllm_observability", "vllm_preload", "vllm_router", "vllm_runtime")
}
TEXT = trust_as_template if trust_as_template else str
TEMPLAR = Templar(loader=DataLoader(), variables={})
# Ansible's own way to them is through its loader of collections, which a test's imports have forestalled.
for filter_name, function in groups.FilterModule().filters().items():
    getattr(TEMPLAR, "_engine", TEMPLAR).environment.filters[f"baremetal.vllm.{filter_name}"] = function


class Role:
    """What Ansible does with a role's variables, and with the conditions of its preflight, without a process for each.

    ``test_a_real_run_says_the_same`` holds it to Ansible itself.
    """

    def __init__(self, name, value, host):
        defaults, private, self.tasks = FILES[name]
        self.facts = {
            **defaults,
            **private,
            "__vllm_engine_systemctl": {"stdout": "systemd 252 (252.1)"},
            **value,
            "inventory_hostname": host,
            "ansible_facts": value.get("ansible_facts", {}),
            "ansible_search_path": [str(CHECKOUT / "roles" / name)],
            "vllm_runtime_version": value.get("vllm_runtime_version", "0.33.0"),
        }

    def template(self, text, **scope):
        TEMPLAR.available_variables = {**self.facts, **scope}
        return TEMPLAR.template(text)

    def holds(self, conditions, scope):
        conditions = conditions if isinstance(conditions, list) else [conditions]
        return all(self.template(TEXT(f"{{{{ ({one}) | bool }}}}"), **scope) for one in conditions)

    def refusal(self):
        """The message of the first assertion that does not hold; None when all do."""
        for task in self.tasks:
            items = self.template(task["loop"]) if "loop" in task else [None]
            for item in items:
                scope = {**task.get("vars", {}), "item": item}
                if not self.holds(task.get("when", []), scope):
                    continue
                if "ansible.builtin.set_fact" in task:
                    self.facts.update(self.template(task["ansible.builtin.set_fact"], **scope))
                elif not self.holds(task["ansible.builtin.assert"]["that"], scope):
                    return self.template(task["ansible.builtin.assert"]["fail_msg"], **scope)
        return None

    def render(self, template, item):
        # What looks like JSON would not stay text before 2.19.
        option = "" if trust_as_template else ", convert_data=false"
        return self.template(
            TEXT(f"text:{{{{ lookup('ansible.builtin.template', '{template}'{option}) }}}}"), item=item
        )[5:]
