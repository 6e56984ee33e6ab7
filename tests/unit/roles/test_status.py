# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of status has a line for each engine, however Ansible shows results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.tests.unit.roles.role import CHECKOUT

ROW = r"gone +- +unreachable +- .* -  *\S.*nowhere\.invalid.*"


@pytest.mark.parametrize(("shown", "line"), [("yaml", rf" +{ROW}"), ("json", rf' +"{ROW}"')])
def test_a_row_is_a_line(tmp_path, shown, line):
    (tmp_path / "hosts.yml").write_text("vllm_engines: {hosts: {gone: {ansible_host: nowhere.invalid}}}\n")
    told = {"ANSIBLE_HOME": str(tmp_path), "ANSIBLE_NOCOLOR": "1", "ANSIBLE_CALLBACK_RESULT_FORMAT": shown}
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", f"--inventory={tmp_path}/hosts.yml",
         CHECKOUT / "playbooks/status.yml"],
        env={**os.environ, **told},
        cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert [one for one in done.stdout.splitlines() if re.fullmatch(line, one)], done.stdout
