# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Some simulated hosts in one inventory, for playbooks that ansible-playbook itself runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import CHECKOUT, run_playbook

# What stands for the roles on a simulated host, whose files are not under /etc.
ROLES = {
    "vllm_runtime/tasks/main.yml": "runtime",
    "vllm_engine/tasks/preflight.yml": "",
    "vllm_engine/tasks/look.yml": "",
    "vllm_engine/tasks/want.yml": "want",
    "vllm_engine/tasks/configure.yml": "configure",
}
ON_HOST = """
import json, os, sys, yaml
what, root, wanted = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
def put(path, text):
    with open(path) as stream:
        if stream.read() == text:
            return
    with open(path, "w") as stream:
        stream.write(text)
    print("changed")
new = f"{root}/opt/vllm/runtimes/{wanted['version']}"
if what == "runtime" and not os.path.exists(new):
    os.mkdir(new)
    os.symlink(f"{root}/opt/vllm/runtimes/0.33.0/bin", f"{new}/bin")
    print("changed")
if what == "configure":
    path, link = f"{root}/etc/vllm/engines/chat.yaml", f"{root}/opt/vllm/engines/chat"
    names = ("model", "served-model-name", "uds", "enable-sleep-mode")
    with open(path) as stream:
        kept = {name: value for name, value in yaml.safe_load(stream).items() if name in names}
    put(path, yaml.safe_dump({**kept, **wanted["options"]}))
    os.unlink(link)
    os.symlink(f"../runtimes/{wanted['version']}", link)
    path = f"{root}/etc/vllm/lifecycle/chat.json"
    with open(path) as stream:
        declared = json.load(stream)
    put(path, json.dumps({**declared, "config_digest": wanted["digest"], "runtime_version": wanted["version"]}))
"""

QUICK = {"vllm_roll_capacity_timeout": 1, "vllm_drain_capacity_timeout": 1, "vllm_sleep_capacity_timeout": 1}


class Upgradable:
    """What an upgrade needs of hosts that are in ``declared``, with an inventory in ``folder``."""

    folder: Path
    declared: dict[str, dict]

    def want(self, name: str, digest: str, version: str, **options) -> None:
        """What the inventory says of a host's engine chat; ``fault`` is among the options of the simulated vLLM."""
        engine = {"config_digest": digest, "runtime_version": version, "preload": False, "start": True}
        self.declared[name].update(
            sim_wants={"chat": engine}, sim_wanted={"digest": digest, "version": version, "options": options}
        )

    def stand_in(self) -> Path:
        """The collection with what stands for its roles."""
        top = self.folder / "collections"
        there = top / "ansible_collections/baremetal/vllm"
        if there.exists():
            return top
        there.mkdir(parents=True)
        for path in CHECKOUT.resolve().iterdir():
            if path.name not in ("roles", "build") and not path.name.startswith("."):
                (there / path.name).symlink_to(path)
        script = self.folder / "on_host.py"
        script.write_text(ON_HOST)
        for name, what in ROLES.items():
            tasks: list[dict] = []
            if what == "want":
                tasks = [{"name": what, "ansible.builtin.set_fact": {"__vllm_engine_wants": "{{ sim_wants }}"}}]
            elif what:
                argv = [sys.executable, str(script), what, "{{ sim_root }}", "{{ sim_wanted | to_json }}"]
                tasks = [
                    {
                        "name": what,
                        "ansible.builtin.command": {"argv": argv},
                        "register": "sim_done",
                        "changed_when": "'changed' in sim_done.stdout | default('')",
                    }
                ]
            path = there / "roles" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(tasks))
        return top


class Fleet(Upgradable):
    """Hosts of one inventory, each with its engines and the names under which these serve.

    ``settings`` are those of a host.
    """

    def __init__(self, world, engines: dict[str, dict[str, str]], **settings) -> None:
        self.hosts, self.declared = {}, {}
        for name, models in engines.items():
            self.hosts[name] = host = world(gate=True, engines=tuple(models), start=False, **settings)
            for engine, model in models.items():
                options = host.root / f"etc/vllm/engines/{engine}.yaml"
                options.write_text(
                    options.read_text().replace("served-model-name: tiny", f"served-model-name: {model}")
                )
                host.change(f"etc/vllm/lifecycle/{engine}.json", served_model_name=model)
            host.start()
            instances = [
                {
                    "name": engine,
                    "model": "/srv/models/tiny",
                    "served_model_name": model,
                    "port": host.gate.ports[engine],
                    "gpus": host.gpu.uuids,
                }
                for engine, model in models.items()
            ]
            self.declared[name] = {
                "vllm_host_control_python": host.python(),
                "ansible_python_interpreter": host.python(),
                "vllm_gate_address": "127.0.0.1",
                "sim_root": str(host.root),
                "vllm_engine_instances": instances,
            }
        self.folder = next(iter(self.hosts.values())).root / "inventory"
        self.folder.mkdir()

    def play(self, book: str, *arguments: str, rc: int = 0, routers: dict | None = None, **variables) -> str:
        collections = self.stand_in() if book == "rolling_upgrade.yml" else None
        given = {**QUICK, **variables}
        said = run_playbook(
            book, self.declared, self.folder, *arguments, rc=rc, routers=routers, collections=collections, **given
        )
        return " ".join(said.split()).replace("''", "'")  # Ansible 2.16 writes a message as YAML in quotes

    def pids(self) -> dict[str, int]:
        return {
            f"{name}/{engine.name}": engine.truth()["pid"]
            for name, host in self.hosts.items()
            for engine in host.engines.values()
        }

    def everything(self) -> dict[str, object]:
        """What a playbook could change: files, processes, admission, and what was asked of the engines."""
        found: dict[str, object] = {}
        for name, host in self.hosts.items():
            found[name] = host.files()
            for engine in host.engines.values():
                alive = engine.active() == "active"
                asked = (engine.truth()["pid"], engine.mutations()) if alive else None
                found[f"{name}/{engine.name}"] = (asked, host.gate.ready(engine.name), host.gate.stored(engine.name))
        return found

    def server(self, name: str, engine: str) -> dict:
        return {"name": f"{name}-{engine}", "address": "127.0.0.1", "port": self.hosts[name].gate.ports[engine]}


def went_together(said: str, task: str) -> list[list[str]]:
    """The hosts of each batch in which a task has changed something, by what ansible-playbook says."""
    parts = [part.partition("TASK [")[0] for part in said.split(f"TASK [{task}]")[1:]]
    return [sorted(re.findall(r"changed: \[(\w+)\]", part)) for part in parts]


def changes(said: str) -> dict[str, int]:
    """How many tasks have changed each host, by the recap."""
    recap = said[said.index("PLAY RECAP") :]
    return {host: int(count) for host, count in re.findall(r"(\w+) : ok=\d+ changed=(\d+)", recap)}
