# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every playbook refuses names with typing errors, and none that the collection itself sets."""

from __future__ import annotations

import re

import pytest

from ansible_collections.baremetal.vllm.plugins.filter import variables
from ansible_collections.baremetal.vllm.tests.unit.roles.role import CHECKOUT, load, run_playbook

# awx_apply takes the variables of awx/settings.yml; status is to be had whatever else is wrong.
PLAYBOOKS = sorted({path.stem for path in (CHECKOUT / "playbooks").glob("*.yml")} - {"awx_apply", "status"})
PLAYBOOKS = [name for name in PLAYBOOKS if not name.endswith(".meta")]


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_names_are_checked_first(playbook):
    first = load(CHECKOUT / f"playbooks/{playbook}.yml")[0]["tasks"][0]
    assert first["ansible.builtin.import_tasks"] == "tasks/known_variables.yml"


def test_facts_are_known():
    found = set()
    for path in [*CHECKOUT.glob("roles/*/tasks/*.yml"), *CHECKOUT.glob("playbooks/**/*.yml")]:
        for block in re.findall(r"(?m)^( *)ansible\.builtin\.set_fact:\n((?:\1 +.*\n)+)", path.read_text()):
            found |= set(re.findall(r"(?m)^ +(vllm_\w+):", block[1]))
    assert found == set(variables.FACTS)


def test_a_run_with_a_typing_error_ends_before_it_looks_at_a_host(tmp_path):
    done = run_playbook(
        "drain.yml",
        tmp_path,
        "--inventory=nowhere.invalid,",
        "--extra-vars=vllm_drain_sate=serving",
        "--extra-vars=vllm_hosts=all",
    )
    assert done.returncode != 0
    assert "vllm_drain_sate (vllm_drain_state?): no variable of this collection" in done.stdout
    assert "unreachable=0" in done.stdout
