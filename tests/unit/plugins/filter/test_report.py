# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a report says of time and memory, and the page of it."""

from __future__ import annotations

import html.parser
import re

import pytest

from ansible_collections.baremetal.vllm.plugins.filter import fleet, report, switching, upgrade
from ansible_collections.baremetal.vllm.plugins.plugin_utils import _spans

HOSTILE = "</code><script>alert(1)</script>\"'&<!-- {{ 7 * 7 }} \x1b[31m\u202egpj"
# 2026-11-30 08:10:00 UTC
AT = 1796026200.0


def step(name, begin, end):
    return {"step": name, "seconds": end - begin, "at": AT + end}


STEPS = [
    step("lease", 0, 0.1),
    step("withdraw", 0.1, 0.2),
    step("await_router", 0.2, 3),
    step("await_idle", 3, 5),
    step("close", 5, 5.1),
    step("await_closed", 5.1, 5.3),
    step("pause", 5.3, 5.4),
    step("stop", 7, 17),
    step("start", 17, 60),
    step("prove", 60, 60.5),
    step("resume", 62, 62.1),
    step("admit", 62.1, 62.2),
    step("await_ready", 62.2, 63),
]
STARTED = {"at": AT + 60, "began": AT + 18, "boot_s": 38.0, "warm_s": 3.0, "runtime_version": "0.33.0"}


def brief(phases):
    return [(one["phase"], round(one["at"] - AT, 2), round(one["seconds"], 2)) for one in phases]


@pytest.mark.parametrize(
    ("steps", "started", "shown"),
    [
        (
            STEPS,
            STARTED,
            [
                ("withdraw", 0, 3),
                ("drain", 3, 2.4),
                ("stop", 7, 10),
                ("prepare", 17, 1),
                ("boot", 18, 38),
                ("warm", 56, 3),
                ("prove", 59, 1.5),
                ("admit", 62, 1),
            ],
        ),
        # One who did not write when its process began: what else there was came before it.
        (
            STEPS[8:9],
            {**STARTED, "began": None},
            [("prepare", 17, 2), ("boot", 19, 38), ("warm", 57, 3)],
        ),
        # What its log said of its boot; one that says less than there was is not believed.
        (
            STEPS[8:9],
            {**STARTED, "boot": {"serve": 1.5, "load": 8.5, "profile": 18, "import": 10.0}},
            [
                ("prepare", 17, 1),
                ("import", 18, 10),
                ("load", 28, 8.5),
                ("profile", 36.5, 18),
                ("serve", 54.5, 1.5),
                ("warm", 56, 3),
                ("prove", 59, 1),
            ],
        ),
        (
            STEPS[8:9],
            {**STARTED, "boot": {"load": 8.5}},
            [("prepare", 17, 1), ("boot", 18, 38), ("warm", 56, 3), ("prove", 59, 1)],
        ),
        # However short it is, a boot of which no more is known is shown.
        (
            STEPS[8:9],
            {**STARTED, "began": AT + 55.5, "boot_s": 0.5, "boot": {}},
            [("prepare", 17, 38.5), ("boot", 55.5, 0.5), ("warm", 56, 3), ("prove", 59, 1)],
        ),
        (STEPS[8:9], {**STARTED, "at": AT - 900}, [("start", 17, 43)]),  # another start's
        (STEPS[8:9], None, [("start", 17, 43)]),
        ([step("stop", 1, 2), step("stop", 900, 901)], None, [("stop", 1, 1), ("stop", 900, 1)]),  # a killed run's, too
        ([step("dance", 1, 2)], None, [("dance", 1, 1)]),
        ([], STARTED, []),
    ],
)
def test_phases(steps, started, shown):
    assert brief(_spans.phases(steps, started)) == shown


@pytest.mark.parametrize(
    ("state", "results", "steps", "cut"),
    [
        ("serving", [{}, {}], STEPS, 0),
        ("serving", [{"requests_cut": 2}, {"requests_cut": 1}], STEPS, 3),
        ("stopped", [], [], 0),
        ("unknown", [], [step("stop", 0, 1)], None),
    ],
)
def test_requests_cut_are_none_only_where_that_was_seen(state, results, steps, cut):
    assert _spans.requests_cut(state, results, steps) == cut


def engine(**changes):
    gpus = [{"uuid": "G", "processes": {"7": 70000, "8": 1900, "99": 5}}]
    return {
        "state": "serving",
        "unit": {"pids": [7, 8]},
        "gpus": gpus,
        "weights_digest": "sha256:4f1c0a9b3d2e",
        "started": {"runtime_version": "0.32.0"},
        "lease": None,
        **changes,
    }


@pytest.mark.parametrize(
    ("seen", "mib"),
    [
        (engine(), 71900),
        (engine(gpus=None), None),
        (engine(unit=None), None),
        (engine(gpus=[{"processes": {"7": None}}]), None),
        (None, None),
    ],
)
def test_memory_that_was_not_seen_is_no_number(seen, mib):
    assert _spans.held_mib(seen) == mib


OUT = {
    "since": AT,
    "seconds": 63.0,
    "timings": {"stop": 10.0},
    "steps": STEPS,
    "started": STARTED,
    "gpu_mib": {"G": 71928},
}


def roll_hosts(name="e1"):
    """One that was brought back, one that failed, one that waits, one that is done, one of which nothing is known."""
    seen = {"__vllm_roll_seen": {"engines": {"chat": engine()}}}
    lease = {"since": AT + 70, "steps": [step("withdraw", 70, 73), step("await_idle", 73, 74), step("stop", 75, 80)]}
    return {
        name: {
            **seen,
            "__vllm_roll_serve": {"engines": {"chat": {"out_of_service": OUT, "proof": {"by": "golden"}}}},
            "__vllm_roll_restart": {"changed": True, "engines": {"chat": {}}},
        },
        "e2": {
            **seen,
            "__vllm_roll_failed": f"e2: it failed {HOSTILE}\nthe rest of it",
            "__vllm_evidence": {
                "engines": {"chat": engine(state="failed", lease=lease, started=STARTED, unit={"pids": []})}
            },
        },
        "e3": {**seen},
        "e4": {**seen},
        "e5": {},
    }


def roll(hosts, **changes):
    return {
        "schema": "baremetal.vllm/roll",
        "version": 1,
        "run": "roll-1",
        "written": "2026-11-30T08:15:00Z",
        "lost": [],
        "hosts": fleet.vllm_roll_rows(hosts, hosts),
        "others": fleet.vllm_roll_others(hosts, hosts, ["e4"]),
        **changes,
    }


class Reader(html.parser.HTMLParser):
    """What a browser makes of a page: its elements, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.texts))


def read(given):
    return Reader(report.vllm_report_page(given))


def test_rows_of_a_roll():
    given = roll(roll_hosts())
    (row,) = given["hosts"]
    assert (row["from"], row["runs"], row["weights_before"], row["weights_after"]) == (
        "0.32.0",
        "0.33.0",
        "sha256:4f1c0a9b3d2e",
        None,
    )
    assert (row["gpu_mib_before"], row["gpu_mib_after"], row["requests_cut"], row["proof"]) == (
        71900,
        71928,
        0,
        "golden",
    )
    assert [(one["name"], one["outcome"], one["state"], len(one["spans"])) for one in given["others"]] == [
        ("e2", "failed", "failed", 1),
        ("e3", "waiting", "serving", 0),
        ("e4", "done", "serving", 0),
    ]
    failed = given["others"][0]
    assert (failed["requests_cut"], failed["gpu_mib_before"], failed["gpu_mib_after"]) == (0, 71900, 0)
    (span,) = failed["spans"]
    assert span["seconds"] is None
    assert brief(span["phases"]) == [("withdraw", 70, 3), ("drain", 73, 1), ("stop", 75, 5)]


def test_a_roll_that_failed():
    page = read(roll(roll_hosts(), lost=["e3"]))
    assert "✖ Not complete: 1 failed, 1 lost; 2 of 4 done" in page.text
    assert "08:10:00 UTC: withdrawn 3.0 s · drain 2.4 s · stop 10 s" in page.text
    assert "boot 38 s · warm-up 3.0 s · proof 1.5 s · admitted 1.0 s · between 3.1 s" in page.text
    assert "It did not answer any more." in page.text
    assert "Bring back e3" in page.text
    assert "on e2: journalctl -u vllm-engine@chat" in page.text
    assert "baremetal.vllm.rolling_restart -e vllm_roll_run=roll-1" in page.text
    assert "71 900 MiB → 71 928 MiB" in page.text
    assert "0.32.0 → 0.33.0" in page.text
    assert "Done before, in this same run: 1" in page.text
    lanes = [attributes for tag, attributes in page.tags if attributes.get("class") == "lane"]
    assert len(lanes) == 2
    # 63 s of 63 s for the one, and 5 s of them and an open end for the other.
    bars = [
        attributes for tag, attributes in page.tags if tag == "rect" and "y" in attributes and attributes["y"] == "2"
    ]
    assert [(one["x"], one["width"]) for one in bars][2:5] == [
        ("11.111%", "15.873%"),
        ("26.984%", "1.587%"),
        ("28.571%", "60.317%"),
    ]
    assert (bars[-1]["class"], bars[-1]["x"], bars[-1]["width"]) == ("open", "15.873%", "84.127%")


def test_hostile_words_stay_words():
    hosts = roll_hosts(HOSTILE)
    given = roll(hosts, run=HOSTILE, lost=[HOSTILE], soak=[HOSTILE])
    given["hosts"][0].update(
        engine=HOSTILE, runs=HOSTILE, proof=HOSTILE, weights_after=f"sha256:{HOSTILE}", outcome=HOSTILE
    )
    given["hosts"][0]["spans"][0]["phases"][0]["phase"] = HOSTILE
    given["others"].append(
        {"name": HOSTILE, "engine": HOSTILE, "outcome": "waiting", "state": HOSTILE, "reason": HOSTILE}
    )
    page = read(given)
    # None that loads, runs, or leads anywhere.
    assert not {tag for tag, _attributes in page.tags} & {"script", "img", "a", "iframe", "link", "object", "form"}
    harmless = {tag for tag, _attributes in read(roll(roll_hosts(), soak=["a note"], lost=["e3"])).tags}
    assert {tag for tag, _attributes in page.tags} <= harmless | {"wbr"}
    wrong = [attributes for _tag, attributes in page.tags if any(key.startswith("on") for key in attributes)]
    assert wrong == []
    plain = HOSTILE.replace("\x1b", "\ufffd").replace("\u202e", "\ufffd")
    assert page.text.count("<script>alert(1)</script>") > 8
    assert plain in "".join(page.texts)
    text = report.vllm_report_page(given)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", text)
    assert "http:" not in text
    assert "https:" not in text
    assert "<script" not in text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "Nothing was changed: no engine is in this report"),
        ({"schema": "baremetal.vllm/roll", "run": "r", "hosts": [], "others": []}, "Nothing was changed"),
        ({"hosts": [{"name": "e1", "engine": "chat", "outcome": "unchanged"}]}, "= Nothing to do: all 1 are"),
        ({"hosts": [{"name": "e1", "engine": "chat", "outcome": "restarted"}]}, "✔ Complete: 1 of 1"),
        ({"hosts": [{"name": "e1", "engine": "chat", "outcome": "waiting"}], "lost": ["e1"]}, "1 lost; 0 of 1 done"),
        ({"hosts": [{"name": "e1", "engine": "c", "outcome": "waiting"}]}, "✖ Not complete: 1 waiting; 0 of 1"),
    ],
)
def test_the_verdict(given, says):
    assert says in read(given).text


def test_an_upgrade_that_went_back_has_two_lanes():
    later = {**OUT, "since": AT + 400, "steps": []}
    values = {
        "__vllm_upgrade_plan": {"change": ["chat"], "finish": [], "write": []},
        "__vllm_engine_wants": {"chat": {"runtime_version": "0.33.0"}},
        "__vllm_upgrade_seen": {"engines": {"chat": engine()}},
        "__vllm_upgrade_after": {"engines": {"chat": engine()}},
        "__vllm_upgrade_outcome": {"outcome": "rolled_back", "reason": "too slow", "seconds": 90},
        "__vllm_upgrade_serve": {"engines": {"chat": {"out_of_service": OUT}}},
        "__vllm_upgrade_served_again": {"engines": {"chat": {"out_of_service": later}}},
    }
    rows = upgrade.vllm_upgrade_rows(["e1"], {"e1": values})
    page = read({"schema": "baremetal.vllm/upgrade", "run": "up-1", "hosts": rows, "soak": ["e1: 3 requests"]})
    assert page.text.count("no finished step is on record") == 1
    assert "chat (again)" in page.text
    assert "0.32.0, unchanged" in page.text
    assert "too slow" in page.text
    assert "e1: 3 requests" in page.text
    assert "baremetal.vllm.rolling_upgrade -e vllm_upgrade_run=up-1" in page.text


def test_an_upgrade_that_is_stuck_is_still_out():
    lease = {"owner": "rolling_upgrade", "since": AT, "steps": STEPS[:8]}
    values = {
        "__vllm_upgrade_plan": {"change": ["chat"], "finish": [], "write": []},
        "__vllm_engine_wants": {"chat": {"runtime_version": "0.33.0"}},
        "__vllm_upgrade_seen": {"engines": {"chat": engine()}},
        "__vllm_upgrade_after": {"engines": {"chat": engine(state="failed", lease=lease)}},
        "__vllm_upgrade_outcome": {"outcome": "failed", "reason": "it did not start", "seconds": 90},
    }
    (row,) = upgrade.vllm_upgrade_rows(["e1"], {"e1": values})
    assert row["requests_cut"] == 0
    assert "still out" in read({"schema": "baremetal.vllm/upgrade", "run": "u", "hosts": [row]}).text


def test_a_switch():
    steps = [step("await_idle", 0, 2), step("sleep", 3, 8)]
    taken = {"timings": {"await_idle": 2.0, "sleep": 5.0}, "steps": steps, "elapsed": 8.0, "changed": True}
    values = {
        "__vllm_switch_plan": {
            "sleep": [{"engines": ["chat"], "level": 1}], "wake": ["code"], "start": [], "admit": [], "held": [],
        },
        "__vllm_switch_slept": {"results": [{"engines": {"chat": taken}}]},
        "__vllm_switch_begun": str(AT), "__vllm_switch_ended": str(AT + 12),
    }  # fmt: skip
    rows = switching.vllm_switch_rows(["e1"], {"e1": values})
    page = read({"schema": "baremetal.vllm/switch", "run": "s", "hosts": rows})
    assert "Switch" in page.text
    assert "chat asleep, code awake" in page.text
    assert "drain 2.0 s · sleep 5.0 s · between 1.0 s" in page.text


def test_a_switch_that_failed():
    plan = {"sleep": [{"engines": ["chat"], "level": 1}], "wake": ["code"], "start": [], "admit": [], "held": []}
    taken = {"failed": True, "steps": [step("sleep", 3, 8)], "after": {"state": "withdrawn"}}
    values = {
        "__vllm_switch_plan": plan,
        "__vllm_switch_said": "e1: it freed nothing\nmore of it",
        "__vllm_switch_slept": {"results": [{"engines": {"chat": taken}}]},
    }
    rows = switching.vllm_switch_rows(["e1", "e2"], {"e1": values, "e2": {"__vllm_switch_plan": plan}})
    page = read({"schema": "baremetal.vllm/switch", "run": "s", "hosts": rows, "lost": []})
    assert "Not complete: 1 failed, 1 waiting; 0 of 2 done" in page.text
    assert "Seen last: chat withdrawn" in page.text
    assert "e1: it freed nothing" in page.text
    assert "still out" in page.text
    assert "on e1: journalctl -u vllm-engine@chat" in page.text
    command = page.text.partition("ansible-playbook -i INVENTORY ")[2]
    assert command.startswith("baremetal.vllm.switch")
    assert not command.startswith("baremetal.vllm.switch -e")


def test_a_fleet_of_500_is_one_page_of_moderate_size():
    rows = roll(roll_hosts())["hosts"]
    many = [{**rows[0], "name": f"gpu{number:03}"} for number in range(500)]
    page = report.vllm_report_page({**roll({}), "hosts": many})
    assert page.count('class="lane"') == 500
    assert len(page) < 2_000_000


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0.04, "0.0 s"),
        (9.96, "10.0 s"),
        (12.4, "12 s"),
        (100, "1 min 40 s"),
        (3725, "62 min 05 s"),
        (7325, "2 h 02 min"),
    ],
)
def test_seconds_in_words(value, says):
    assert report._seconds(value) == says.replace(" ", "\xa0")
