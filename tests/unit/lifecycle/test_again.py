# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Each playbook in check mode, for real, and once more: check mode changes nothing, and so does the second run."""

from __future__ import annotations

import re

import pytest

from ansible_collections.baremetal.vllm.tests.unit.lifecycle.fleets import Fleet, changes
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import CHECKOUT

pytestmark = pytest.mark.long

# The first writes files under /etc, the next two have tests of their own (to measure changes each time), and the last
# only calls modules of awx.awx.
ELSEWHERE = {
    "site.yml": "molecule/rolling",
    "rolling_upgrade.yml": "test_upgrade_play",
    "measure.yml": "test_measure",
    "awx_apply.yml": "",
}
ALL_DAY = [{"name": "day", "from": "00:00", "to": "24:00", "awake": ["chat"], "asleep": ["code"], "level": 2}]
# By chapter, in order: book, hosts, whether the first run has something to do, and its variables.
BOOKS = {
    "look": [("status.yml", "h1,h2", False, {}), ("golden.yml", "h1,h2", True, {})],
    # The same run: a new one restarts again by its meaning, see below.
    "roll": [("rolling_restart.yml", "h1,h2", True, {"vllm_roll_run": "one", "vllm_roll_min_serving": 0})],
    "drain": [
        ("drain.yml", "h1", True, {"vllm_drain_engines": ["chat"]}),
        ("drain.yml", "h1", True, {"vllm_drain_engines": ["chat"], "vllm_drain_state": "serving"}),
        ("reconcile.yml", "h1,h2", True, {}),
    ],
    "sleep": [
        ("sleep.yml", "h1", True, {"vllm_sleep_engines": ["code"], "vllm_sleep_min_serving": 0}),
        ("wake.yml", "h1", True, {}),
    ],
    "turns": [
        ("switch.yml", "h1", True, {"vllm_switch_engine": "code", "vllm_switch_level": 2}),
        ("schedule.yml", "h1", True, {"vllm_schedule": ALL_DAY, "vllm_schedule_force": True}),
    ],
}


@pytest.fixture
def fleet(world):
    """Chat and code of h1 share a GPU on which, this once, both fit."""
    engines = {"h1": {"chat": "chat", "code": "code"}, "h2": {"chat": "chat"}}
    return Fleet(world, engines, gpus=1, gpu_memory_utilization=0.4)


def test_no_playbook_is_forgotten():
    books = {path.name for path in (CHECKOUT / "playbooks").glob("*.yml") if not path.name.endswith(".meta.yml")}
    assert {book for chapter in BOOKS.values() for book, *_others in chapter} | set(ELSEWHERE) == books


@pytest.mark.parametrize("chapter", BOOKS)
def test_a_second_run_changes_nothing_nor_does_check_mode(fleet, chapter):
    for book, hosts, changing, variables in BOOKS[chapter]:
        if book == "reconcile.yml":
            stopped = fleet.hosts["h2"].chat
            assert fleet.hosts["h2"].systemd.ctl("stop", stopped.unit).returncode == 0
        before = fleet.everything()
        fleet.play(book, f"--limit={hosts}", "--check", **variables)
        assert fleet.everything() == before, f"{book} {variables} --check"
        first = changes(fleet.play(book, f"--limit={hosts}", **variables))
        assert any(first.values()) is changing, f"{book} {variables}: {first}"
        before = fleet.everything()
        again = changes(fleet.play(book, f"--limit={hosts}", **variables))
        assert differ(before, fleet.everything()) == [], f"{book} {variables}, again"
        assert again == dict.fromkeys(hosts.split(","), 0), f"{book} {variables}"


def differ(before: dict, after: dict) -> list[str]:
    """What is different: names of files, and of engines.

    But for the files of the locks. Each says who has held it last, so that whoever waits can name them.
    """
    flat = [
        {
            name + (f": {path}" if path else ""): value
            for name, one in found.items()
            for path, value in (one.items() if isinstance(one, dict) else [("", one)])
        }
        for found in (before, after)
    ]
    differing = [name for name in {**flat[0], **flat[1]} if flat[0].get(name) != flat[1].get(name)]
    return sorted(name for name in differing if not re.fullmatch(r"h\d: run/vllm-lifecycle/[^/]+\.lock", name))


def test_a_new_roll_restarts_again(fleet):
    """The one exception: what a roll has done is known by the name of its run."""
    before = fleet.pids()
    for run in ("one", "two"):
        fleet.play("rolling_restart.yml", vllm_roll_run=run, vllm_roll_min_serving=0)
        now = fleet.pids()
        assert not set(now.values()) & set(before.values())
        before = now
