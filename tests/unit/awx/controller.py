# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""awx/ as AWX would have it: its variables with all templates filled in, and what AWX itself demands of them."""

from __future__ import annotations

import json
import typing as t
from pathlib import Path

import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

HERE = Path(__file__).parent
DATA = HERE.parents[2] / "awx"
SCHEMA: dict[str, dict] = yaml.safe_load((HERE / "schema.yml").read_text())
OBJECTS = [name for name in SCHEMA if name.startswith("controller_")]
PYTHON = {"str": str, "int": int, "bool": bool, "list": list, "dict": dict, "float": float, "raw": object}
ANSWERS = {"text": str, "integer": int, "float": float, "multiplechoice": str, "multiselect": list}


def variables(**given: t.Any) -> dict[str, t.Any]:
    """All variables of the folder, as a play has them that includes it; ``given`` are its extra variables."""
    loader = DataLoader()
    found: dict[str, t.Any] = {}
    for path in sorted(DATA.glob("*.yml")):
        more = loader.load_from_file(str(path), trusted_as_template=True)
        assert not set(more) & set(found), f"{path.name} names again what another file names"
        found.update(more)
    found.update(given)
    filled = Templar(loader, variables=found).template({name: found[name] for name in found})
    return json.loads(json.dumps(filled))  # plain types, without Ansible's tags


def full(option: t.Any) -> dict[str, t.Any]:
    """An option of the schema, where a bare word is a type."""
    return {"type": option} if isinstance(option, str) else option


def faults(value: t.Any, option: t.Any, where: str) -> t.Iterator[str]:
    """What of a value is not as the schema has it. Types are exact: nothing is to depend on a conversion."""
    option = full(option)
    wanted = PYTHON[option["type"]]
    if wanted is not object and value.__class__ is not wanted:
        yield f"{where} is {type(value).__name__}, not {option['type']}"
        return
    if "choices" in option and value not in option["choices"]:
        yield f"{where} is {value!r}, none of {option['choices']}"
    if isinstance(value, list) and "elements" in option:
        for index, one in enumerate(value):
            yield from faults(one, {**option, "type": option["elements"]}, f"{where}[{index}]")
    if isinstance(value, dict) and "options" in option:
        yield from misfits(value, option["options"], where)


def misfits(values: dict[str, t.Any], options: dict[str, t.Any], where: str) -> t.Iterator[str]:
    for name, option in options.items():
        if full(option).get("required") and name not in values:
            yield f"{where} lacks {name}"
    for name, value in values.items():
        if name not in options:
            yield f"{where} has {name}, which is unknown there"
        else:
            yield from faults(value, options[name], f"{where}.{name}")


def refused(question: dict[str, t.Any], answer: t.Any) -> str:
    """Why AWX does not take this answer to a question, or nothing."""
    if answer.__class__ is not ANSWERS[question["type"]]:
        return f"{question['variable']}: {answer!r} is no answer to a question of type {question['type']}"
    size = answer if question["type"] in ("integer", "float") else len(answer)
    if size < question.get("min", size) or size > question.get("max", size):
        return f"{question['variable']}: {answer!r} is out of bounds"
    strange = set(answer if isinstance(answer, list) else [answer]) - set(choices(question))
    return f"{question['variable']}: {answer!r} is no choice" if choices(question) and strange else ""


def choices(question: dict[str, t.Any]) -> list[str]:
    return question.get("choices", "").splitlines()


def extra_vars(survey: dict[str, t.Any], answers: dict[str, t.Any]) -> dict[str, t.Any]:
    """What a job gets: the answers, and the defaults of what was not answered. Nothing that was not asked."""
    questions = {one["variable"]: one for one in survey["spec"]}
    assert set(answers) <= set(questions), f"not asked: {set(answers) - set(questions)}"
    missing = [name for name, one in questions.items() if one["required"] and name not in answers]
    assert not missing, f"not answered: {missing}"
    wrong = [why for name, answer in answers.items() if (why := refused(questions[name], answer))]
    assert not wrong, wrong
    return {**{name: one["default"] for name, one in questions.items() if "default" in one}, **answers}
