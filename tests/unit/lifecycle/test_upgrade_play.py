# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Playbook rolling_upgrade on several hosts: its batches, what it does when a host fails, and a second run."""

from __future__ import annotations

import os

import pytest

from ansible_collections.baremetal.vllm.tests.unit.lifecycle.fleets import Fleet, changes, went_together

pytestmark = pytest.mark.long

GIVEN = {"vllm_upgrade_soak": 0, "vllm_upgrade_min_speed_ratio": 0, "vllm_upgrade_capacity_timeout": 5}


class Site(Fleet):
    """Three hosts with an engine each, which serve with runtime 0.33.0."""

    def __init__(self, world) -> None:
        hosts = {name: {"chat": "chat"} for name in ("h1", "h2", "h3")}
        super().__init__(world, hosts, doors=True, unit={"Restart": "no"})

    def upgrade(self, *arguments: str, rc: int = 0, **variables) -> str:
        return self.play("rolling_upgrade.yml", *arguments, rc=rc, **{**GIVEN, **variables})

    def all_want(self, digest: str, version: str, broken: str = "") -> None:
        for name in self.hosts:
            self.want(name, digest, version, **({"fault": "start_crash"} if name == broken else {}))

    def serve(self) -> dict[str, str]:
        """The runtimes with which they serve."""
        found = {}
        for name, host in self.hosts.items():
            assert host.gate.ready("chat") == 200, name
            assert host.chat.lease() is None, name
            found[name] = os.readlink(host.root / "opt/vllm/engines/chat").rpartition("/")[2]
        return found


@pytest.fixture
def site(world):
    return Site(world)


def test_a_ramp_and_a_second_run(site):
    site.all_want("b", "0.33.1")
    before = site.everything()
    site.upgrade("--check")
    assert site.everything() == before
    said = site.upgrade(vllm_upgrade_canary=0, vllm_upgrade_batch=[1, "67%"])
    assert went_together(said, "Withdraw, and let the requests in flight finish") == [["h1"], ["h2", "h3"]]
    assert site.serve() == dict.fromkeys(site.hosts, "0.33.1")
    before = site.everything()
    assert changes(site.upgrade()) == dict.fromkeys(site.hosts, 0)
    assert site.everything() == before


def test_as_many_hosts_may_fail_but_none_of_the_first(site):
    site.all_want("b", "0.33.1", broken="h2")
    said = site.upgrade(rc=2, vllm_upgrade_max_failed=1)
    assert "1 of at most 1 host(s) have failed: the run goes on without them" in said
    assert site.serve() == {"h1": "0.33.1", "h2": "0.33.0", "h3": "0.33.1"}
    end = said[said.rindex("Fail for the hosts that were left behind") :]
    assert 'h2: "Start, and wait until each engine is proved ready and fast enough" failed' in end
    assert "It went back to what it ran before, was proved with it and serves." in end
    assert "Engine core initialization failed" in end, "what the start that failed has said"
    # The module itself has gone back before it failed, so what the host shows afterwards is the old version at work.
    assert "chat is withdrawn" in end
    assert "unit: active/running, result success" in end
    assert "end of its journal:" in end
    # No host may fail: it stops there.
    site.want("h3", "c", "0.33.1")
    before = site.pids()
    said = site.upgrade(rc=2, vllm_upgrade_canary=0)
    assert "No further host is touched" in said
    assert site.pids()["h3/chat"] == before["h3/chat"]
    # What the first host shows is true of all.
    site.all_want("d", "0.33.2", broken="h1")
    before = site.pids()
    said = site.upgrade(rc=2, vllm_upgrade_max_failed=3)
    assert "No further host is touched" in said
    assert site.serve() == {"h1": "0.33.1", "h2": "0.33.0", "h3": "0.33.1"}
    assert {name: site.pids()[name] for name in ("h2/chat", "h3/chat")} == {
        name: before[name] for name in ("h2/chat", "h3/chat")
    }
