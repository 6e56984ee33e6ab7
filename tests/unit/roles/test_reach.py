# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A host that cannot be reached at the first look is told of with an entry of the runbook."""

from __future__ import annotations

import pytest

from ansible_collections.baremetal.vllm.tests.unit.roles.role import CHECKOUT, load, run_playbook

PLAYBOOKS = ("measure", "rolling_restart", "rolling_upgrade", "schedule", "sleep", "switch", "wake")


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_hosts_are_reached_by_the_same_tasks(playbook):
    tasks = load(CHECKOUT / f"playbooks/{playbook}.yml")[0]["tasks"]
    assert [one for one in tasks if one.get("ansible.builtin.import_tasks") == "tasks/reach.yml"]


def test_a_host_that_is_not_there(tmp_path):
    (tmp_path / "hosts.yml").write_text("vllm_engines: {hosts: {gone: {ansible_host: nowhere.invalid}}}\n")
    done = run_playbook("wake.yml", tmp_path, "--extra-vars=vllm_wake_connect_timeout=1")
    assert done.returncode != 0
    assert "gone cannot be reached: " in done.stdout
    assert "(runbook: host-lost)" in done.stdout
