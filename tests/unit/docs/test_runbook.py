# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every error that can be printed names an entry of docs/runbook.md, and every entry is of such errors."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import cli

ROOT = Path(__file__).resolve().parents[3]
RUNBOOK = ROOT / "docs/runbook.md"
PYTHON = sorted(path for path in ROOT.glob("plugins/**/*.py") if "doc_fragments" not in path.parts)
BOOKS = sorted(
    [*ROOT.glob("playbooks/**/*.yml"), *ROOT.glob("roles/*/tasks/*.yml"), *ROOT.glob("roles/*/handlers/*.yml")]
)
REFERENCE = re.compile(r" *\(runbook: ([a-z][a-z-]*[a-z])\)")
# In a template, what is filled in at run time; in a shape of the runbook it is written "…".
HOLE = "\N{REPLACEMENT CHARACTER}"
# What turns a message into a failure of Ansible's own kind.
OF_ANSIBLE = {"AnsibleFilterError", "AnsibleError", "AnsibleActionFail", "AnsibleRuntimeError", "AnsibleParserError"}


@dataclass(frozen=True)
class Message:
    """A template of a message, and the entries that it may name."""

    where: str
    template: str
    entries: frozenset[str]


def strings(node: ast.expr) -> frozenset[str]:
    """The words that an expression can be; empty where that cannot be told."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return frozenset([node.value])
    if isinstance(node, ast.IfExp):
        return strings(node.body) | strings(node.orelse)
    return frozenset()


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


@dataclass(frozen=True)
class Scope:
    """What the names stand for in a function: those of its variables, and of the module's one-line functions."""

    functions: Mapping[str, ast.expr]
    variables: Mapping[str, ast.expr] = field(default_factory=dict)

    def says(self, node: ast.expr) -> ast.expr | None:
        if isinstance(node, ast.Name):
            return self.variables.get(node.id)
        # here(…), self._here(…), self.here
        return self.functions.get(name_of(node.func if isinstance(node, ast.Call) else node))


def scopes(tree: ast.AST) -> dict[ast.Call, Scope]:
    """The scope of every call."""
    every = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    short = {
        one.name: one.body[-1].value for one in every if isinstance(one.body[-1], ast.Return) and len(one.body) < 3
    }
    functions = {name: value for name, value in short.items() if isinstance(value, ast.JoinedStr)}
    found = {call: Scope(functions) for call in calls(tree)}
    for function in every:
        variables: dict[str, ast.expr] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                variables[node.targets[0].id] = node.value
        variables = {name: value for name, value in variables.items() if isinstance(value, ast.JoinedStr)}
        found |= {call: Scope(functions, variables) for call in calls(function)}
    return found


def template(node: ast.expr, scope: Scope) -> str:
    """A message as far as it is written out, with what the function or its module puts in by a name of its own."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.FormattedValue):
        return template(node.value, scope) if scope.says(node.value) else HOLE
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part, scope) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left, scope) + template(node.right, scope)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
        return template(node.args[0], scope)
    if isinstance(node, ast.GeneratorExp):
        return template(node.elt, scope)
    said = scope.says(node)
    return template(said, Scope(scope.functions)) if said else HOLE


TREES = {path: ast.parse(path.read_text()) for path in PYTHON}


def error_classes() -> tuple[set[str], set[str]]:
    """All of the library, and those that name their entry themselves."""
    bases = {
        node.name: ({name_of(base) for base in node.bases}, node)
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"LifecycleError"}
    while more := {name for name, (parents, _node) in bases.items() if parents & found} - found:
        found |= more
    own = {
        name
        for name in found
        for call in ast.walk(bases[name][1])
        if isinstance(call, ast.Call) and any(keyword.arg == "entry" for keyword in call.keywords)
    }
    return found, own


ERRORS, NAMED = error_classes()


def is_error(call: ast.Call) -> bool:
    """Also one whose class is chosen at run time, as in error(…, next_step=…)."""
    if name_of(call.func) in NAMED:
        return False
    return name_of(call.func) in ERRORS or any(keyword.arg == "next_step" for keyword in call.keywords)


def of_python() -> tuple[list[Message], list[str]]:
    found, faults = [], []
    for path, tree in TREES.items():
        # A function may hand on what its callers name.
        parameters = {
            argument.arg
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef)
            for argument in [*node.args.args, *node.args.kwonlyargs]
        }
        for call, scope in scopes(tree).items():
            where = f"{path.relative_to(ROOT)}:{call.lineno}"
            text = HOLE.join(template(one, scope) for one in call.args)
            given = [keyword.value for keyword in call.keywords if keyword.arg == "entry"]
            if name_of(call.func) == "refuse_option":
                found.append(Message(where, text, frozenset(["option-value"])))
            elif given:
                entries = strings(given[0])
                if entries:
                    found.append(Message(where, text, entries))
                elif not (isinstance(given[0], ast.Name) and given[0].id in parameters):
                    faults.append(f"{where}: its entry cannot be told")
            elif is_error(call):
                faults.append(f"{where}: {name_of(call.func)} names no entry")
            elif name_of(call.func) in OF_ANSIBLE:
                named = REFERENCE.findall(text)
                found.append(Message(where, text, frozenset(named)))
                if not re.search(f"{REFERENCE.pattern}$", text):
                    faults.append(f"{where}: {name_of(call.func)} does not end with its entry")
            elif name_of(call.func) == "fail_json" and path.name != "_glue.py":
                faults.append(f"{where}: fail_json past _glue.fail, which names the entry")
    return found, faults


def tasks(value: object) -> list[dict]:
    if isinstance(value, list):
        return [task for one in value for task in tasks(one)]
    if not isinstance(value, dict):
        return []
    return [value, *(task for one in value.values() for task in tasks(one))]


def holes(text: str) -> str:
    text = re.sub(r"\{%.*?%\}", HOLE, re.sub(r"\{\{.*?\}\}", HOLE, text, flags=re.S), flags=re.S)
    return " ".join(text.split())


def of_books() -> tuple[list[Message], list[str]]:
    found, faults = [], []
    for path in BOOKS:
        for task in tasks(yaml.safe_load(path.read_text())):
            where = f"{path.relative_to(ROOT)}: {task.get('name')}"
            for module, key in (("assert", "fail_msg"), ("fail", "msg")):
                arguments = task.get(f"ansible.builtin.{module}")
                if arguments is None:
                    continue
                text = holes(str(arguments.get(key) or ""))
                found.append(Message(where, text, frozenset(REFERENCE.findall(text))))
                if not re.search(f"{REFERENCE.pattern}$", text):
                    faults.append(f"{where}: {key} does not end with its entry")
            # What a later task fails with.
            kept = [str(value) for value in (task.get("ansible.builtin.set_fact") or {}).values()]
            found += [
                Message(where, holes(one), frozenset(REFERENCE.findall(one))) for one in kept if "(runbook" in one
            ]
    return found, faults


def entries() -> dict[str, str]:
    """The text below each heading of the third level."""
    parts = re.split(r"(?m)^### (.+)$", RUNBOOK.read_text())
    return {head: re.split(r"(?m)^## ", body)[0] for head, body in zip(parts[1::2], parts[2::2])}


ENTRIES = entries()
MESSAGES = [*of_python()[0], *of_books()[0]]


def shapes(entry: str) -> list[str]:
    block = re.search(r"(?ms)^```text\n(.*?)\n```$", ENTRIES[entry])
    return block[1].splitlines() if block else []


def fits(shape: str, text: str) -> bool:
    """Whether a message of this template can look like that: what is written out comes in this order."""
    at = 0
    for part in filter(None, (" ".join(part.split()) for part in shape.split("…"))):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def test_every_error_of_the_library_and_the_plugins_names_its_entry():
    found, faults = of_python()
    assert len(found) > 250
    assert faults == []


def test_every_result_that_is_made_by_hand_has_the_key_too():
    found = 0
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Dict):
                continue
            keys = {name for key in node.keys if key for name in strings(key)}
            if {"failed", "msg"} <= keys:
                found += 1
                assert "runbook" in keys, f"{path.relative_to(ROOT)}:{node.lineno}"
    assert found > 1


def test_every_failure_of_a_playbook_or_role_ends_with_its_entry():
    found, faults = of_books()
    assert len(found) > 100
    assert faults == []


def test_the_runbook_has_every_entry_that_is_named_and_no_other():
    named = {entry for message in MESSAGES for entry in message.entries}
    # Errors that name it themselves.
    assert named == set(ENTRIES), f"missing {sorted(named - set(ENTRIES))}, unused {sorted(set(ENTRIES) - named)}"


def test_no_heading_comes_twice():
    heads = Counter(re.findall(r"(?m)^#+ +(.+?) *$", RUNBOOK.read_text()))
    assert [head for head, times in heads.items() if times > 1] == []
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", entry) for entry in ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_shows_messages_that_are_printed(entry):
    templates = [" ".join(message.template.split()) for message in MESSAGES if entry in message.entries]
    shown = shapes(entry)
    assert shown, "it shows no message"
    for shape in shown:
        if len(re.sub(r"[\W_]", "", shape)) < 8:  # the hole that a whole sentence fills
            continue
        assert any(fits(shape, text) for text in templates), f"{shape}\n" + "\n".join(templates)
    assert any(len(re.sub(r"[\W_]", "", shape)) >= 8 for shape in shown)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_says_what_is_so_or_why_and_what_to_do(entry):
    said = re.findall(r"(?m)^- \*\*(State|Cause|Do|Over)\b", ENTRIES[entry])
    assert said == sorted(set(said), key=["State", "Cause", "Do", "Over"].index), "each once, in this order"
    assert "Do" in said
    assert {"State", "Cause"} & set(said)


def test_the_commands_of_the_runbook_and_of_other_pages_are_taken():
    """By the command's own parser; those of Ansible are tried in test_docs."""
    text = "\n".join(page.read_text() for page in sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("roles/*/README.md")]))
    runs = re.findall(r"`(?:sudo )?(vllm-lifecycle [^`…]+)`", text)
    runs += re.findall(r"(?m)^(?:\$ )?(vllm-lifecycle .+)$", text)
    assert len(runs) > 15
    for run in runs:
        if re.search(r" (--help|--version)\b", run):
            continue
        words = shlex.split(run)[1:]
        try:
            cli._parser().parse_args(words)
        except SystemExit:
            pytest.fail(run)
