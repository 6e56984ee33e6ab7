# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A group of two simulated hosts and a host of its own beside it, changed by ansible-playbook."""

from __future__ import annotations

import contextlib
import json
import os
import signal

import pytest

from ansible_collections.baremetal.vllm.tests.sim.systemd import Unit
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.fleets import Upgradable, changes
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import begin_playbook, run_playbook, wait_for

pytestmark = pytest.mark.long

MODEL = {"name": "chat", "model": "/srv/models/tiny"}


class Fleet(Upgradable):
    """h1 is the head of a group, h2 its headless part, h3 serves alone."""

    def __init__(self, world, **settings) -> None:
        group = {"group": "large"}
        # The headless one first: the last one that was made is where modules of this process would run.
        self.hosts = {
            "h2": world(gpus=1, headless=True, declared={**group, "headless": True}, **{"doors": True, **settings}),
            "h1": world(gate=True, gpus=1, declared=group, **settings),
            "h3": world(gate=True, gpus=1, **settings),
        }
        self.declared = {
            "h1": self.host("h1", **group),
            "h2": self.host("h2", **group, headless=True),
            "h3": self.host("h3"),
        }
        self.folder = self.hosts["h1"].root

    def host(self, name: str, **keys) -> dict:
        host = self.hosts[name]
        port = {"port": host.gate.ports["chat"]} if host.gate else {}
        variables = {"vllm_host_control_python": host.python(), "vllm_gate_address": "127.0.0.1"}
        variables["ansible_python_interpreter"] = host.python()
        return {**variables, "sim_root": str(host.root), "vllm_engine_instances": [{**MODEL, **port, **keys}]}

    def play(self, book: str, *arguments: str, rc: int = 0, **variables) -> str:
        collections = self.stand_in() if book == "rolling_upgrade.yml" else None
        return run_playbook(book, self.declared, self.folder, *arguments, rc=rc, collections=collections, **variables)

    def upgrade(self, *arguments: str, rc: int = 0, **variables) -> str:
        given = {"vllm_upgrade_soak": 0, "vllm_upgrade_min_speed_ratio": 0, "vllm_upgrade_capacity_timeout": 5}
        return flat(self.play("rolling_upgrade.yml", *arguments, rc=rc, **given, **variables))

    def runtimes(self) -> dict[str, str]:
        """Those that the processes were started with."""
        found = {}
        for name, host in self.hosts.items():
            ready = json.loads((host.root / "var/lib/vllm/chat/ready.json").read_text())
            assert str(ready["main_pid"]) == self.unit(name)["MainPID"]
            found[name] = ready["runtime_version"]
        return dict(sorted(found.items()))

    def unit(self, name: str) -> dict[str, str]:
        host = self.hosts[name]
        return Unit(host.systemd.units, host.chat.unit).written()

    def pids(self) -> dict[str, str]:
        return {name: self.unit(name)["MainPID"] for name in sorted(self.hosts)}

    def lease(self, name: str) -> dict | None:
        path = self.hosts[name].root / "var/lib/vllm/chat/lease.json"
        return json.loads(path.read_text()) if path.exists() else None

    def leases(self) -> dict[str, str]:
        return {name: held["owner"] for name in sorted(self.hosts) if (held := self.lease(name))}

    def serve(self) -> list[str]:
        return [name for name in ("h1", "h3") if self.hosts[name].gate.ready("chat") == 200]


@pytest.fixture
def fleet(world):
    return Fleet(world)


@pytest.fixture
def upgradable(world):
    """Its starts are those of the units, so that each has a configuration to go back to."""
    return Fleet(world, doors=True, unit={"Restart": "no"})


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_group_is_restarted_as_one(fleet):
    before, files = fleet.pids(), {name: host.files() for name, host in fleet.hosts.items()}
    fleet.play("rolling_restart.yml", "--check")
    assert fleet.pids() == before
    assert {name: host.files() for name, host in fleet.hosts.items()} == files
    report = fleet.folder / "report.json"
    output = fleet.play("rolling_restart.yml", vllm_report_path=str(report))
    after = fleet.pids()
    assert all(after[name] != before[name] for name in before), (before, after)
    assert fleet.serve() == ["h1", "h3"]
    assert fleet.leases() == {}
    head, part = fleet.unit("h1"), fleet.unit("h2")

    def order(*moments: tuple[dict, str]) -> list[int]:
        return [int(unit[f"{moment}TimestampMonotonic"]) for unit, moment in moments]

    went = order((head, "InactiveEnter"), (part, "InactiveEnter"), (part, "ActiveEnter"), (head, "ActiveEnter"))
    assert went == sorted(went), "the head stops while its group is whole, and starts last"
    assert "0 host(s) not serving come first, 2 follow, 0 are done" in flat(output)
    rows = json.loads(report.read_text())["hosts"]
    assert [(row["name"], row.get("headless")) for row in rows] == [("h1", ["h2/chat"]), ("h3", None)]

    run = json.loads(report.read_text())["run"]
    again = fleet.play("rolling_restart.yml", vllm_roll_run=run)
    assert fleet.pids() == after
    assert "0 follow, 2 are done" in flat(again)

    lines = fleet.play("status.yml").splitlines()
    line = next(line for line in lines if line.strip().startswith("h2 ") and " chat " in line)
    assert " headless " in line and "of group large" in line
    assert "unknown" not in line and "?" not in line


TORN = [
    # what is played and with which arguments, and why it refuses
    ("rolling_restart.yml", "--limit=h1,h3", "group 'large' changes as one, and this run leaves out h2/chat"),
    ("rolling_restart.yml", "--limit=h2", "this run leaves out h1/chat"),
    ("sleep.yml", "--limit=h1,h2", "chat cannot sleep, being of group large"),
]


def test_a_group_that_cannot_be_changed_as_one_is_not_touched(fleet):
    before, files = fleet.pids(), {name: host.files() for name, host in fleet.hosts.items()}
    for book, limit, says in TORN:
        output = flat(fleet.play(book, limit, rc=2))
        assert says in output
        assert "No host was touched" in output
    held = {"owner": "night-shift", "reason": "memory test", "run": "", "purpose": "stopped", "restore": ""}
    path = fleet.hosts["h2"].root / "var/lib/vllm/chat/lease.json"
    path.write_text(json.dumps({"schema": 1, **held, "since": 1.0, "expires": 9e9, "steps": []}))
    output = flat(fleet.play("rolling_restart.yml", rc=2))
    assert "h2 is held by night-shift (memory test). No host was touched" in output
    path.unlink()
    assert fleet.pids() == before
    assert {name: host.files() for name, host in fleet.hosts.items()} == files


def test_a_part_that_dies_keeps_its_head_out_and_the_next_run_goes_on(fleet):
    part = fleet.hosts["h2"]
    alone = fleet.pids()["h3"]
    part.chat.set_fault("start_crash")
    output = flat(fleet.play("rolling_restart.yml", rc=2, vllm_roll_run="roll-1"))
    assert "did not start" in output or "cannot be brought to serving" in output
    assert "No further host is touched" in output
    assert "Engine core initialization failed" in output, "the headless one's own journal"
    assert fleet.serve() == ["h3"]
    assert fleet.leases() == {"h1": "rolling_restart", "h2": "rolling_restart"}
    assert fleet.pids()["h3"] == alone

    part.chat.clear_faults()
    output = flat(fleet.play("rolling_restart.yml"))
    assert "roll-1: 1 host(s) not serving come first, 1 follow" in output
    assert fleet.serve() == ["h1", "h3"]
    assert fleet.leases() == {}
    assert fleet.pids()["h3"] != alone


def test_a_run_that_is_killed_between_the_stops_is_gone_on_with(fleet):
    before = fleet.pids()
    running = begin_playbook("rolling_restart.yml", fleet.declared, fleet.folder, vllm_roll_run="roll-2")
    wait_for(lambda: fleet.unit("h1")["ActiveState"] == "inactive", "the head is stopped")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.communicate(timeout=60)
    assert fleet.serve() == ["h3"]
    assert fleet.leases()["h1"] == "rolling_restart"
    output = flat(fleet.play("rolling_restart.yml"))
    assert "roll-2: 1 host(s) not serving come first, 1 follow" in output
    assert fleet.serve() == ["h1", "h3"]
    assert fleet.leases() == {}
    assert all(before[name] != pid for name, pid in fleet.pids().items())


def test_a_drain_of_the_head_is_one_of_the_group_and_reconcile_brings_back_no_part_of_it(fleet):
    before = fleet.pids()
    fleet.play("drain.yml", "--limit=h1,h2")
    assert fleet.serve() == ["h3"]
    assert fleet.leases() == {"h1": "operator"}
    fleet.play("drain.yml", "--limit=h1,h2", vllm_drain_state="serving")
    assert fleet.serve() == ["h1", "h3"]
    assert fleet.leases() == {}
    assert fleet.pids() == before
    for name in ("h1", "h2"):
        host = fleet.hosts[name]
        assert host.systemd.ctl("stop", host.chat.unit).returncode == 0
    output = flat(fleet.play("reconcile.yml"))
    assert output.count("alone: false") == 2, output
    assert {name: fleet.unit(name)["ActiveState"] for name in ("h1", "h2")} == {"h1": "inactive", "h2": "inactive"}


def test_a_group_counts_as_one_where_engines_are_taken_out(fleet):
    before = fleet.pids()
    output = flat(fleet.play("drain.yml", "--limit=h3", rc=2, vllm_drain_min_serving=2))
    assert "model 'tiny' without h3/chat: min_serving is 2, yet 1 engine(s) are left to serve" in output
    fleet.play("drain.yml", "--limit=h3", vllm_drain_min_serving=1)
    assert fleet.serve() == ["h1"]
    output = flat(fleet.play("drain.yml", "--limit=h1,h2", rc=2, vllm_drain_capacity_timeout=1))
    assert "model 'tiny' without h1/chat: 0 of 1 other engine(s) serve, 1 must: h3/chat: /ready is 503" in output
    output = flat(fleet.play("rolling_restart.yml", "--limit=h1,h2", rc=2, vllm_roll_capacity_timeout=1))
    assert "model 'tiny' without h1/chat: 0 of 1 other engine(s) serve, 1 must" in output
    assert fleet.serve() == ["h1"]
    fleet.play("drain.yml", "--limit=h2")  # a part is nothing that requests come to
    assert fleet.leases() == {"h3": "operator"}
    assert fleet.pids() == before


OLD = dict.fromkeys(("h1", "h2", "h3"), "0.33.0")


def test_a_group_is_upgraded_as_one(upgradable):
    for name in upgradable.hosts:
        upgradable.want(name, "b", "0.33.1")
    before, files = upgradable.pids(), {name: host.files() for name, host in upgradable.hosts.items()}
    upgradable.upgrade("--check")
    assert (upgradable.pids(), {name: host.files() for name, host in upgradable.hosts.items()}) == (before, files)
    assert "this run leaves out h2/chat. No engine was touched" in upgradable.upgrade("--limit=h1,h3", rc=2)
    said = upgradable.upgrade()
    assert "3 of 3 host(s) have engines to change; first h1, h2, then h3." in said
    assert upgradable.runtimes() == dict.fromkeys(OLD, "0.33.1")
    assert (upgradable.serve(), upgradable.leases()) == (["h1", "h3"], {})
    head, part, alone = upgradable.unit("h1"), upgradable.unit("h2"), upgradable.unit("h3")

    def order(*moments: tuple[dict, str]) -> list[int]:
        return [int(unit[f"{moment}TimestampMonotonic"]) for unit, moment in moments]

    went = order(
        (head, "InactiveEnter"), (part, "InactiveEnter"), (part, "ActiveEnter"), (head, "ActiveEnter"),
        (alone, "InactiveEnter"),
    )  # fmt: skip
    assert went == sorted(went)
    before, files = upgradable.pids(), {name: host.files() for name, host in upgradable.hosts.items()}
    assert changes(upgradable.upgrade()) == dict.fromkeys(upgradable.hosts, 0)
    assert (upgradable.pids(), {name: host.files() for name, host in upgradable.hosts.items()}) == (before, files)


@pytest.mark.parametrize("broken", ["h1", "h2"])
def test_a_group_goes_back_as_one(upgradable, broken):
    before = upgradable.pids()
    for name in upgradable.hosts:
        upgradable.want(name, "b", "0.33.1", **({"fault": "start_crash"} if name == broken else {}))
    said = upgradable.upgrade(rc=2)
    assert "No further host is touched" in said
    assert "Engine core initialization failed" in said
    other = {"h1": "h2", "h2": "h1"}[broken]
    assert f"{broken}, with which it has a group, has failed" in said, other
    assert said.count("It went back to what it ran before, was proved with it and serves.") >= 2
    assert upgradable.runtimes() == OLD
    assert (upgradable.serve(), upgradable.leases()) == (["h1", "h3"], {})
    assert upgradable.pids()["h3"] == before["h3"]
    assert upgradable.pids()["h2"] != before["h2"]
    # Corrected, the same command brings it there.
    for name in upgradable.hosts:
        upgradable.want(name, "c", "0.33.2")
    upgradable.upgrade()
    assert upgradable.runtimes() == dict.fromkeys(OLD, "0.33.2")


@pytest.mark.parametrize("fault", ["", "start_crash"])
def test_settings_of_the_head_alone_restart_all_of_its_group(upgradable, fault):
    before = upgradable.pids()
    was = {name: json.loads(host.chat.declared.read_text())["config_digest"] for name, host in upgradable.hosts.items()}
    upgradable.want("h1", "b", "0.33.0", **({"fault": fault} if fault else {}))
    for name in ("h2", "h3"):
        upgradable.want(name, was[name], "0.33.0")
    said = upgradable.upgrade(rc=2 if fault else 0)
    assert "2 of 3 host(s) have engines to change; first h1, h2, then none." in said
    now = {name: json.loads(host.chat.declared.read_text())["config_digest"] for name, host in upgradable.hosts.items()}
    assert now == {**was, "h1": was["h1"] if fault else "b"}
    assert (upgradable.serve(), upgradable.leases()) == (["h1", "h3"], {})
    assert [name for name, pid in upgradable.pids().items() if pid == before[name]] == ["h3"]


def test_an_upgrade_of_a_group_that_is_killed_is_gone_on_with(upgradable):
    for name in upgradable.hosts:
        upgradable.want(name, "b", "0.33.1")
    running = begin_playbook(
        "rolling_upgrade.yml",
        upgradable.declared,
        upgradable.folder,
        collections=upgradable.stand_in(),
        vllm_upgrade_soak=0,
    )
    wait_for(lambda: upgradable.unit("h2")["ActiveState"] == "inactive", "the headless engine is stopped")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.communicate(timeout=60)
    assert upgradable.serve() == ["h3"]
    said = upgradable.upgrade()
    assert "first h1, h2, then h3" in said
    assert upgradable.runtimes() == dict.fromkeys(OLD, "0.33.1")
    assert (upgradable.serve(), upgradable.leases()) == (["h1", "h3"], {})
