# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""docs/judges.md names the judges that the Makefile calls, with the versions that are pinned."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
MAKEFILE = (ROOT / "Makefile").read_text()
HEAD = "| judge | version | judges | run by |"


def tool(name):
    where = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / f"tools/{name}.py")
    module = importlib.util.module_from_spec(where)
    where.loader.exec_module(module)
    return module


VENVS = {venv: (lock, pythons[0]) for venv, lock, pythons in tool("deps").VENVS}


def pinned(venv):
    """What the newest Python that this venv takes would get."""
    lock, python = VENVS[venv]
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    environment |= {"platform_python_implementation": "CPython", "implementation_name": "cpython"}
    lines = [Requirement(line) for line in (ROOT / lock).read_text().splitlines() if "==" in line]
    return {
        line.name: str(line.specifier).removeprefix("==")
        for line in lines
        if line.marker is None or line.marker.evaluate(environment)
    }


def table():
    lines = (ROOT / "docs/judges.md").read_text().partition(f"{HEAD}\n")[2].splitlines()[1:]
    rows = [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines[: lines.index("")]]
    assert all(len(row) == 4 for row in rows)
    return rows


ROWS = table()


def recipe(target):
    return re.search(rf"(?m)^{target}:.*\n((?:\t.*\n)+)", MAKEFILE)[1]


def test_versions_are_those_that_are_pinned():
    named = {row[1] for row in ROWS if row[1] != "Debian's"}
    everything = {f"{name} {version}" for venv in VENVS for name, version in pinned(venv).items()}
    assert len(named) > 8
    assert named - everything == set()


@pytest.mark.parametrize("command", ["sanity", "units"])
def test_every_ansible_core_that_judges_is_named(command):
    venvs = tool("ansible_test").COMMANDS[command].venvs
    named = [row[1] for row in ROWS if row[0] == f"ansible-test {command}"]
    assert named == [f"ansible-core {pinned(venv)['ansible-core']}" for venv in venvs]


def test_every_step_of_lint_is_named():
    steps = re.findall(r"\bstep (?:env \S+ )?(?:python tools/)?([\w-]+)", recipe("lint"))
    named = {row[0].lower().replace("galaxy-importer", "galaxy") for row in ROWS if row[3] == "make lint"}
    assert set(steps) == named


def test_every_judge_is_called_by_make_test():
    called = re.search(r"(?m)^test: ((?:[a-z-]+ )+)##", MAKEFILE)[1].split()
    assert {row[3] for row in ROWS} <= {f"make {target}" for target in called}


def test_nothing_is_ignored():
    assert not list(ROOT.glob("tests/sanity/ignore*"))
