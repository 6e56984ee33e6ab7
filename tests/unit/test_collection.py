# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection's own metadata against its files."""

from __future__ import annotations

import pathlib
import re

import yaml

ROOT = pathlib.Path(__file__).parents[2]


def load(name):
    return yaml.safe_load((ROOT / name).read_text())


def test_action_group_names_every_module():
    modules = sorted(path.stem for path in (ROOT / "plugins/modules").glob("*.py"))
    assert load("meta/runtime.yml")["action_groups"]["vllm"] == modules


def test_what_may_take_minutes_says_so_and_has_an_action_plugin():
    texts = {path.stem: path.read_text() for path in (ROOT / "plugins/modules").glob("*.py")}
    actions = sorted(path.stem for path in (ROOT / "plugins/action").glob("*.py"))
    assert actions
    assert sorted(name for name, text in texts.items() if "aside.run(work)" in text) == actions
    assert sorted(name for name, text in texts.items() if "- baremetal.vllm._common.long\n" in text) == actions


def test_oldest_ansible_core_is_the_one_that_is_tested():
    floor = re.search(r"^ansible-core==(\d+\.\d+)\.", (ROOT / "requirements/floor.txt").read_text(), re.M)[1]
    assert load("meta/runtime.yml")["requires_ansible"] == f">={floor}.0"
