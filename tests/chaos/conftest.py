# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json
import os

import pytest

from ansible_collections.baremetal.vllm.tests.rolling.fleet import CHECKOUT, Fleet

REPORT = CHECKOUT / "build/chaos-report.json"
COLUMNS = ("fault", "step", "ok", "lost", "cut", "said", "after", "seconds")
ROWS = pytest.StashKey[list]()


def pytest_configure(config):
    config.stash[ROWS] = []


@pytest.fixture(scope="session")
def fleet():
    """The lab named by VLLM_LAB, on which site.yml has run."""
    return Fleet(os.environ["VLLM_LAB"])


@pytest.fixture
def add_row(request):
    """What the tests add up to: a report, written after each of them, and a table at the end."""

    def add(row):
        rows = request.config.stash[ROWS]
        rows.append(row)
        REPORT.parent.mkdir(exist_ok=True)
        REPORT.write_text(json.dumps({"schema": "baremetal.vllm/chaos", "version": 1, "rows": rows}, indent=1) + "\n")

    return add


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash[ROWS]
    if not rows:
        return
    terminalreporter.section(str(REPORT))
    table = [dict(zip(COLUMNS, COLUMNS, strict=True)), *rows]
    widths = {name: max(len(str(row[name])) for row in table) for name in COLUMNS}
    for row in table:
        terminalreporter.write_line("  ".join(str(row[name]).ljust(widths[name]) for name in COLUMNS).rstrip())
