# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a playbook's argument specification, its own code and its documentation say of its variables."""

from __future__ import annotations

import ast
import re
import typing as t
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "playbooks"
SETTINGS = {"awx_apply"}  # what it takes is in awx/settings.yml
PLAYBOOKS = sorted({path.stem for path in FOLDER.glob("*.yml") if not path.name.endswith(".meta.yml")} - SETTINGS)
EXPRESSIONS = ("when", "that", "failed_when", "changed_when", "until")  # templates without braces
NAME = re.compile(r"(?<![\w.])vllm_[a-z_]+")  # neither private nor a plugin of the collection
NOT_LITERAL = object()


def load(path: Path) -> t.Any:
    return yaml.safe_load(path.read_text())


def options(playbook: str) -> dict[str, dict]:
    """The variables that are specified for this playbook."""
    return load(FOLDER / f"{playbook}.meta.yml")["argument_specs"]["main"]["options"]


def of_roles() -> set[str]:
    """The variables of roles, which have specifications of their own."""
    found: set[str] = set()
    for path in ROOT.glob("roles/*/meta/argument_specs.yml"):
        found.update(load(path)["argument_specs"]["main"].get("options", {}))
    return found


def _expressions(node: t.Any, key: str = "") -> t.Iterator[tuple[str, str]]:
    """Everything that Ansible evaluates in a playbook: (the keyword it belongs to, the expression)."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _expressions(value, name)
    elif isinstance(node, list):
        for value in node:
            yield from _expressions(value, key)
    elif isinstance(node, str):
        if key in EXPRESSIONS:
            yield key, node
        else:
            for braced in re.findall(r"\{\{(.*?)\}\}|\{%(.*?)%\}", node, re.S):
                yield key, "".join(braced)


def _files(path: Path) -> t.Iterator[Path]:
    yield path
    for name in re.findall(r"import_tasks: (\S+)", path.read_text()):
        yield from _files(path.parent / name)


def expressions(playbook: str) -> list[tuple[str, str]]:
    """Those of the playbook and of the task files that it imports."""
    return [one for path in _files(FOLDER / f"{playbook}.yml") for one in _expressions(load(path))]


def used(playbook: str) -> set[str]:
    """The variables that the playbook reads, but for those of roles."""
    bare = (re.sub(r"'[^']*'", "''", text) for _key, text in expressions(playbook))
    return {name for text in bare for name in NAME.findall(text)} - of_roles()


def defaults(playbook: str) -> dict[str, list[t.Any]]:
    """What the playbook takes where a variable is not given. Conditions of asserts put in what passes them."""
    found: dict[str, list[t.Any]] = {}
    for key, text in expressions(playbook):
        if key == "that":
            continue
        for match in re.finditer(rf"{NAME.pattern} \| default\(", text):
            name = match[0].split()[0]
            found.setdefault(name, []).append(_literal(_argument(text[match.end() :])))
    return found


def _argument(text: str) -> str:
    depth = 0
    for index, letter in enumerate(text):
        if depth == 0 and letter in ",)":
            return text[:index]
        depth += (letter in "([{") - (letter in ")]}")
    raise AssertionError(f"no end: {text}")


def _literal(text: str) -> t.Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (SyntaxError, ValueError):
        return NOT_LITERAL


class Row(t.NamedTuple):
    """A row of a table in docs/playbooks.md."""

    names: list[str]
    default: str
    meaning: str


def documented(playbook: str) -> list[Row]:
    """The rows of the playbook's section, names that are cut short written out."""
    text = (ROOT / "docs/playbooks.md").read_text()
    match = re.search(rf"^## {playbook}\n(.*?)(?=^## |\Z)", text, re.S | re.M)
    assert match, f"docs/playbooks.md has no section {playbook}"
    rows = []
    for table in re.findall(r"^\| variable \|.*?\n\|[-|]+\n(.*?)(?:\n\n|\Z)", match[1], re.S | re.M):
        for line in table.splitlines():
            first, default, meaning = (cell.strip() for cell in line.strip("|").split("|"))
            names = re.findall(r"`([^`]+)`", first)
            head = re.match(r"vllm_[a-z]+", names[0])
            assert head, line
            rows.append(Row([name.replace("…", head[0]) for name in names], default, meaning))
    return rows
