# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A playbook's argument specification is what its code does and what its documentation says."""

from __future__ import annotations

import json
import re

import pytest
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from ansible_collections.baremetal.vllm.tests.unit.awx import specs

EVERY = {"vllm_hosts", "vllm_host_control_python"}  # said once, for all playbooks
EMPTY = ("", [], {}, specs.NOT_LITERAL)  # what stands for "not given", and expressions


@pytest.fixture(params=specs.PLAYBOOKS)
def playbook(request) -> str:
    return request.param


@pytest.fixture
def options(playbook) -> dict:
    return specs.options(playbook)


def test_every_playbook_has_its_specification_and_the_other_way_round():
    found = sorted(path.name.removesuffix(".meta.yml") for path in specs.FOLDER.glob("*.meta.yml"))
    assert found == specs.PLAYBOOKS
    assert {"site", "rolling_restart", "switch"} <= set(found)


def test_it_lists_the_variables_that_the_playbook_reads(playbook, options):
    assert sorted(options) == sorted(specs.used(playbook))


def test_its_defaults_are_those_of_the_code(playbook, options):
    taken = specs.defaults(playbook)
    wrong = []
    for name, option in options.items():
        for value in taken.get(name, []):
            if "default" not in option:
                right = value in EMPTY
            elif option["type"] == "str":
                right = value is specs.NOT_LITERAL or str(value) == option["default"]
            else:
                right = value == option["default"] and type(value) is type(option["default"])
            if not right:
                wrong.append(f"{name}: {value!r}, not {option.get('default')!r}")
    assert wrong == []


def test_what_has_a_default_in_the_specification_has_it_in_the_code(playbook, options):
    taken = specs.defaults(playbook)
    unfounded = [name for name, option in options.items() if "default" in option and name not in taken]
    assert unfounded == []


def test_required_is_what_has_no_default_anywhere(playbook, options):
    taken = specs.defaults(playbook)
    guarded = {"vllm_report_path", "vllm_schedule_now", "vllm_schedule"}  # read only where they are given
    required = {name for name, option in options.items() if option.get("required")}
    assert required == {name for name in options if name not in taken} - guarded


def test_choices_are_those_that_the_playbook_checks(playbook, options):
    checked = {}
    for key, text in specs.expressions(playbook):
        if key == "that" and " in [" in text:
            name = specs.NAME.search(text)[0]
            checked[name] = json.loads(text.partition(" in ")[2].replace("'", '"'))
    asked = {name: [str(one) for one in options[name].get("choices", [])] for name in checked}
    assert asked == checked


def test_ansible_takes_it(options):
    given = {name: option.get("default") for name, option in options.items() if option.get("default") is not None}
    given.update({name: "chat" for name, option in options.items() if option.get("required")})
    result = ArgumentSpecValidator(options).validate(given)
    assert result.error_messages == []


def test_its_names_are_documented(playbook, options):
    rows = specs.documented(playbook)
    named = [name for row in rows for name in row.names]
    assert len(named) == len(set(named)), "documented twice"
    assert sorted(named) == sorted(set(options) - EVERY)


def test_what_all_take_is_documented_once():
    begin = (specs.ROOT / "docs/playbooks.md").read_text().partition("\n## ")[0]
    assert {name for name in EVERY if f"`{name}`" in begin} == EVERY


def test_its_defaults_are_documented(playbook, options):
    wrong = []
    for row in specs.documented(playbook):
        if len(row.names) > 1 or row.default.startswith("as "):
            continue  # several at a time are said in words
        default = options[row.names[0]].get("default")
        if isinstance(default, (bool, int)) or "choices" in options[row.names[0]]:
            said = json.dumps(default) if isinstance(default, bool) else str(default)
            if row.default != said:
                wrong.append(f"{row.names[0]}: {row.default}, not {said}")
    assert wrong == []


def test_numbers_that_only_its_words_have_are_documented(playbook, options):
    rows = {row.names[0]: row.default for row in specs.documented(playbook) if len(row.names) == 1}
    for name, option in options.items():
        said = re.search(r"([0-9.]+) when omitted", option["description"])
        if said and not rows.get(name, "as ").startswith("as "):
            assert rows[name] == said[1], name


def test_its_choices_are_documented(playbook, options):
    text = "\n".join(" | ".join([*row.names, row.default, row.meaning]) for row in specs.documented(playbook))
    for name, option in options.items():
        for choice in option.get("choices", []) if f"{name} |" in text else []:
            row = next(row for row in specs.documented(playbook) if name in row.names)
            if not row.default.startswith("as "):
                assert str(choice) in f"{row.default} {row.meaning}", f"{name}: {choice}"
