# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where a report goes whose path is relative: Ansible itself would begin it in the folder of the playbook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
REPORT = {"schema": "baremetal.vllm/roll", "version": 1, "run": "roll-1", "hosts": [], "others": [], "lost": []}
WRITER = {
    "hosts": "localhost",
    "gather_facts": False,
    "vars": {"__vllm_report": REPORT},
    "tasks": [{"ansible.builtin.import_tasks": str(CHECKOUT / "playbooks/tasks/write_report.yml")}],
}


def play(book: Path, folder: Path, path: str) -> None:
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "ansible-playbook"),
            "--inventory=localhost,",
            "--connection=local",
            f"--extra-vars={json.dumps({'vllm_report_path': path, 'vllm_hosts': 'all', 'ansible_become': False})}",
            str(book),
        ],
        cwd=folder,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_HOME": str(folder / ".ansible"), "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", ["roll.json", "~/roll.json"])
def test_a_report_is_written_where_the_run_was_begun(tmp_path, path):
    (tmp_path / "plays").mkdir()
    (tmp_path / "plays/write.yml").write_text(json.dumps([WRITER]))
    play(tmp_path / "plays/write.yml", tmp_path, path)
    assert json.loads((tmp_path / "roll.json").read_text()) == REPORT
    assert "roll-1" in (tmp_path / "roll.html").read_text()


def test_so_is_that_of_status(tmp_path):
    play(CHECKOUT / "playbooks/status.yml", tmp_path, "fleet.json")
    assert list(json.loads((tmp_path / "fleet.json").read_text())["hosts"]) == ["localhost"]
