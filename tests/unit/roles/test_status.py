# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of status has a line for each engine, however Ansible shows results."""

from __future__ import annotations

import re

import pytest

from ansible_collections.baremetal.vllm.tests.unit.roles.role import run_playbook

ROW = r"gone +- +unreachable +- .* -  *\S.*nowhere\.invalid.*"


@pytest.mark.parametrize(("shown", "line"), [("yaml", rf" +{ROW}"), ("json", rf' +"{ROW}"')])
def test_a_row_is_a_line(tmp_path, shown, line):
    (tmp_path / "hosts.yml").write_text("vllm_engines: {hosts: {gone: {ansible_host: nowhere.invalid}}}\n")
    done = run_playbook("status.yml", tmp_path, ANSIBLE_CALLBACK_RESULT_FORMAT=shown)
    assert [one for one in done.stdout.splitlines() if re.fullmatch(line, one)], done.stdout
