# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
r"""A \n in a template is a line break only where YAML has made it one: between double quotes."""

from __future__ import annotations

import pytest
import yaml

from ansible_collections.baremetal.vllm.tests.unit.roles.role import CHECKOUT

FILES = sorted({*CHECKOUT.glob("playbooks/**/*.yml"), *CHECKOUT.glob("roles/*/[dhtv]*/*.yml")})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CHECKOUT)))
def test_lines_are_joined_by_line_breaks(path):
    tokens = [one for one in yaml.scan(path.read_text()) if isinstance(one, yaml.ScalarToken) and "{{" in one.value]
    assert [one.value for one in tokens if r"join('\n')" in one.value] == []
