# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The page that playbooks/rolling_restart.yml writes, beside what the tests have seen of the same run themselves."""

from __future__ import annotations

import html.parser
import json
import re
import threading
import time

import pytest

from ansible_collections.baremetal.vllm.tests.unit.lifecycle.fleets import Fleet, changes
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import AWAKE_MIB

pytestmark = pytest.mark.long


class Reader(html.parser.HTMLParser):
    """The text of a page by the first class or the tag that it stands in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.lanes: list[dict[str, list[str]]] = []
        self.rows: list[dict[str, str]] = []
        self.found: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag not in ("meta", "wbr", "path", "circle"):
            self.open.append((tag, (given.get("class") or "").partition(" ")[0] or given.get("data-of") or tag))
        if given.get("class") == "lane":
            self.lanes.append({})
        if tag == "tr":
            self.rows.append({})

    def handle_endtag(self, tag):
        if tag not in ("path", "circle"):
            assert self.open.pop()[0] == tag

    def handle_data(self, data):
        places = [place for _tag, place in self.open]
        for place in places:
            self.found.setdefault(place, []).append(data)
            if "lane" in places:
                self.lanes[-1].setdefault(place, []).append(data)
        cells = [place for tag, place in self.open if tag == "td"]
        if cells:
            self.rows[-1][cells[0]] = self.rows[-1].get(cells[0], "") + data

    def text(self, place: str) -> str:
        return "".join(self.found.get(place, []))


class Watch(threading.Thread):
    """When a gate did not say 200, by the clock: the first and the last time."""

    def __init__(self, host) -> None:
        super().__init__()
        self.host, self.out, self.ended = host, [], threading.Event()

    def run(self):
        while not self.ended.wait(0.05):
            try:
                ready = self.host.gate.ready("chat") == 200
            except OSError:
                ready = False
            if not ready:
                self.out.append(time.time())


class Rolled(Fleet):
    """Hosts with an engine each, and where the report of their roll lies."""

    def __init__(self, world, *names: str) -> None:
        super().__init__(world, {name: {"chat": "chat"} for name in names}, gpus=1, doors=("ready",))
        self.json, self.html = self.folder / "roll.json", self.folder / "roll.html"

    def roll(self, *arguments: str, rc: int = 0, **variables) -> str:
        return self.play("rolling_restart.yml", *arguments, rc=rc, vllm_report_path=str(self.json), **variables)

    def page(self) -> Reader:
        return Reader(self.html.read_text())


def seconds(text: str) -> float:
    minutes, rest = re.fullmatch(r"(?:(\d+)\xa0min\xa0)?([\d.]+)\xa0s", text).groups()
    return 60 * int(minutes or 0) + float(rest)


def test_the_page_says_what_was_seen(world):
    fleet = Rolled(world, "h1")
    fleet.roll("--check")
    assert not fleet.json.exists()
    assert not fleet.html.exists()

    watch = Watch(fleet.hosts["h1"])
    watch.start()
    fleet.roll()
    watch.ended.set()
    watch.join()
    page = fleet.page()
    assert page.text("verdict") == "✔ Complete: 1 of 1"
    (lane,) = page.lanes
    assert lane["who"] == ["h1", "chat "]
    shown = seconds(lane["took"][0])
    assert abs(shown - (watch.out[-1] - watch.out[0])) < 1.5
    hours, minutes, secs = re.match(r"(\d\d):(\d\d):(\d\d) UTC", lane["parts"][0]).groups()
    clock = int(hours) * 3600 + int(minutes) * 60 + int(secs)
    assert abs(clock - watch.out[0] % 86400) < 2.5
    phases = re.findall(r"([a-z-]+) ((?:\d+\xa0min\xa0)?[\d.]+\xa0s)", lane["parts"][0])
    assert [name for name, _seconds in phases if name != "between"][:3] == ["withdrawn", "drain", "stop"]
    assert {"boot", "warm-up", "admitted"} <= {name for name, _seconds in phases}
    assert sum(seconds(took) for _name, took in phases) == pytest.approx(shown, abs=1.0)
    (row,) = [row for row in page.rows if row]
    assert row == {
        "host": "h1",
        "engine": "chat",
        "outcome": "✔ restarted",
        "vLLM": "0.33.0, unchanged",
        "weights": "not on record",
        "GPU memory": f"{AWAKE_MIB - 43:,}".replace(",", "\xa0") + "\xa0MiB, unchanged",
        "requests cut": "0",
        "proved by": "completion",
    }
    run = json.loads(fleet.json.read_text())["run"]
    assert page.text("code") == run

    output = fleet.roll(vllm_roll_run=run)
    assert changes(output) == {"h1": 0}, output
    page = fleet.page()
    assert page.lanes == []
    assert page.text("names") == "h1 chat"


def test_an_engine_that_was_unknown_and_admitted_is_not_called_waiting(world):
    """Nobody has withdrawn it, so its restart brings it back, and the last task of the roll has nothing to release."""
    fleet = Rolled(world, "h1")
    host = fleet.hosts["h1"]
    before = fleet.pids()
    host.chat.set_fault("metrics_500")
    assert host.info()["state"] == "unknown"

    def heal() -> None:
        while fleet.pids() == before:
            time.sleep(0.05)
        host.chat.clear_faults()

    healer = threading.Thread(target=heal, daemon=True)
    healer.start()
    fleet.roll()
    healer.join(10)
    report = json.loads(fleet.json.read_text())
    (row,) = report["hosts"]
    assert (row["name"], row["outcome"], row["proof"]) == ("h1", "restarted", "completion")
    assert row["spans"][0]["seconds"] == row["out_of_rotation_s"] > 0
    assert report["others"] == []
    assert fleet.page().text("verdict") == "✔ Complete: 1 of 1"


def test_the_page_of_a_roll_that_stopped(world):
    """The first host does not start again; the second is not touched."""
    fleet = Rolled(world, "h1", "h2")
    fleet.hosts["h1"].chat.set_fault("start_crash", 0)
    said = fleet.roll(rc=2)
    # The cause first, and at the end what the run has left.
    last = said.rpartition("Leave this host out of rotation and stop the roll")[2]
    assert re.findall(r"\(runbook: ([a-z-]+)\)", last)[0] == "unit-not-started"
    assert re.search(r"leaves finished ones alone\.(\\n|\s)*\(runbook: run-stopped\)", last)
    page = fleet.page()
    report = json.loads(fleet.json.read_text())
    assert page.text("verdict") == "✖ Not complete: 1 failed, 1 waiting; 0 of 2 done"
    (lane,) = page.lanes
    assert lane["who"][0] == "h1"
    assert lane["took"] == ["still out"]
    assert "stop " in lane["parts"][0]
    assert '"Restart, and wait until each engine is proved ready" failed' in page.text("card")
    assert "(runbook: unit-not-started)" in page.text("card")
    assert "end of its journal" in page.text("details")
    assert f"baremetal.vllm.rolling_restart -e vllm_roll_run={report['run']}" in page.text("cmd")
    assert page.text("names") == "h2 chat"
    assert report["hosts"] == []
    assert [(row["name"], row["outcome"], row["state"]) for row in report["others"]] == [
        ("h1", "failed", fleet.hosts["h1"].chat.active()),
        ("h2", "waiting", "serving"),
    ]


def test_the_pages_of_a_sleep_and_a_wake_that_failed_and_of_those_that_did_not(world):
    fleet = Rolled(world, "h1")
    chat = fleet.hosts["h1"].chat
    given = {"vllm_report_path": str(fleet.json), "vllm_sleep_min_serving": 0}

    chat.set_fault("sleep_frees_nothing")
    fleet.play("sleep.yml", rc=2, **given)
    page, (row,) = fleet.page(), json.loads(fleet.json.read_text())["hosts"]
    assert page.text("verdict") == "✖ Not complete: 1 failed; 0 of 1 done"
    assert "freed nothing on" in page.text("card")
    (lane,) = page.lanes
    assert lane["took"] == ["still out"]
    assert [name for name in ("withdrawn", "drain", "sleep") if f"{name} " in lane["parts"][0]][-2:] == [
        "drain",
        "sleep",
    ]
    assert (row["outcome"], row["engines"]) == ("failed", ["chat"])
    chat.clear_faults()

    fleet.play("sleep.yml", **given)
    page, (row,) = fleet.page(), json.loads(fleet.json.read_text())["hosts"]
    assert page.text("verdict") == "✔ Complete: 1 of 1"
    assert (row["outcome"], row["states"]) == ("changed", {"chat": "asleep"})

    chat.set_fault("wake_noop")
    fleet.play("wake.yml", rc=2, **given)
    page, (row,) = fleet.page(), json.loads(fleet.json.read_text())["hosts"]
    assert page.text("verdict") == "✖ Not complete: 1 failed; 0 of 1 done"
    assert "still sleeps" in page.text("card")
    assert row["reason"].startswith('h1: "Wake, prove and admit" failed')
    chat.clear_faults()
