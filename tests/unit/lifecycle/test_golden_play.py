# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""playbooks/golden.yml, run by ansible-playbook on two simulated hosts."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.tests.sim import model as sim
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import run_playbook

pytestmark = pytest.mark.long

CHECKOUT = Path(__file__).parents[3]


class Fleet:
    """Hosts of one inventory, whose modules run in the environment of their simulated host."""

    def __init__(self, hosts: dict) -> None:
        self.hosts = hosts
        self.folder = hosts["h1"].root / "inventory"
        self.folder.mkdir()
        self.declared = {name: {"vllm_host_control_python": host.python()} for name, host in hosts.items()}

    def run(self, *arguments: str, rc: int = 0, **variables) -> str:
        return run_playbook("golden.yml", self.declared, self.folder, *arguments, rc=rc, **variables)

    def changes(self, output: str) -> dict[str, int]:
        recap = output[output.index("PLAY RECAP") :]
        return {line.split()[0]: int(line.split("changed=")[1].split()[0]) for line in recap.splitlines()[1:] if line}

    def kept(self) -> dict[str, dict]:
        return {path.stem: json.loads(path.read_text()) for path in (self.folder / "goldens").glob("*.json")}

    def on(self, name: str) -> dict[str, dict]:
        folder = self.hosts[name].root / "var/lib/vllm/goldens"
        return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}

    def asked(self) -> int:
        return sum(one["generation"] for host in self.hosts.values() for one in host.chat.requests())


@pytest.fixture
def fleet(world):
    return Fleet({"h1": world(engines=("chat", "code")), "h2": world()})


def test_a_fleet_gets_one_golden_for_each_key(fleet):
    output = fleet.run("--check")
    assert fleet.kept() == fleet.on("h1") == fleet.on("h2") == {}
    assert fleet.asked() == 0
    assert not (fleet.folder / "goldens").exists()

    output = fleet.run()
    ((key, golden),) = fleet.kept().items()
    assert fleet.on("h1") == fleet.on("h2") == {key: golden}, "the very same, with who recorded it and when"
    assert fleet.changes(output) == {"h1": 3, "h2": 1}, output
    assert stat.S_IMODE((fleet.folder / f"goldens/{key}.json").stat().st_mode) == 0o600

    output = fleet.run()
    assert fleet.changes(output) == {"h1": 0, "h2": 0}, output
    assert fleet.kept() == fleet.on("h1") == fleet.on("h2") == {key: golden}


def test_a_host_whose_engine_computes_something_else_is_found(fleet):
    fleet.hosts["h2"].chat.set_fault("wrong_tokens")
    output = fleet.run(rc=2)
    assert len(fleet.kept()) == 1
    assert fleet.kept() == fleet.on("h1")
    assert fleet.on("h2") == {}
    assert "engine 'chat' on" in output
    assert "does not compute what golden" in output
    assert "prompt 0, position 0" in output


def test_each_key_has_its_own_and_who_does_not_serve_is_named(fleet):
    """Another model behind the same name, and an engine that is stopped."""
    other, stopped = fleet.hosts["h2"], fleet.hosts["h1"].engines["code"]
    sim.write(other.root / "srv/models/tiny", "other weights of equal shapes")
    other.systemd.ctl("restart", other.chat.unit)
    fleet.hosts["h1"].systemd.ctl("stop", stopped.unit)
    output = fleet.run()
    assert "h1: not asked, because it does not serve: code" in output
    assert len(fleet.kept()) == 2
    assert {**fleet.on("h1"), **fleet.on("h2")} == fleet.kept()
    assert len(fleet.on("h1")) == len(fleet.on("h2")) == 1


def test_wrong_variables_touch_nothing(fleet):
    output = fleet.run(rc=2, vllm_golden_timeout=0)
    assert "vllm_golden_timeout is in seconds above 0" in " ".join(output.split())
    assert fleet.asked() == 0
