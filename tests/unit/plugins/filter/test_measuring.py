# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is measured of an engine, and what its numbers come to."""

from __future__ import annotations

import pytest

from ansible_collections.baremetal.vllm.plugins.filter import measuring, report

AT = 1796026200.0
ENGINES = {"chat": {"preload": None}, "code": {"preload": {"daemon": "base"}}}


def asked(**refused):
    """The answers of vllm_sleep for both levels of each engine; ``chat2="why"`` refuses level 2 of chat."""
    return [
        {"item": [name, level], **({"msg": refused[f"{name}{level}"]} if f"{name}{level}" in refused else {})}
        for name in ENGINES
        for level in (1, 2)
    ]


@pytest.mark.parametrize(
    ("names", "refused", "rounds", "cold", "todo", "skipped"),
    [
        (["chat"], {}, 1, False, ["sleep1", "sleep2", "warm"], {}),
        (["chat"], {}, 1, True, ["sleep1", "sleep2", "cold", "warm"], {}),
        (["chat"], {"chat2": "LoRA"}, 2, False, ["sleep1"] * 2 + ["warm"] * 2, {"sleep2": "LoRA"}),
        (["code"], {"code1": "no", "code2": "no"}, 1, False, ["preload"], {"sleep1": "no", "sleep2": "no"}),
        (
            ["code"],
            {},
            1,
            True,
            ["sleep1", "sleep2", "preload"],
            {"cold": "its weights come from preload daemon 'base', which has read them already"},
        ),
        ([], {}, 1, True, [], {}),
    ],
)
def test_what_is_measured(names, refused, rounds, cold, todo, skipped):
    plan = measuring.vllm_measure_plan(ENGINES, names, asked(**refused), rounds, cold)
    assert [one["path"] for one in plan["todo"]] == todo
    assert {one["path"]: one["reason"] for one in plan["skipped"]} == skipped
    assert [one["round"] for one in plan["todo"]] == [*range(1, rounds + 1)] * (len(todo) // rounds)


def step(name, begin, end):
    return {"step": name, "seconds": end - begin, "at": AT + end}


def out(*steps, started=None):
    return {
        "since": AT,
        "seconds": steps[-1]["at"] - AT + 1,
        "steps": list(steps),
        "started": started,
        "gpu_mib": {"A": 70, "B": 70},
    }


STARTED = {"at": AT + 60, "began": AT + 18, "boot_s": 38.0, "warm_s": 3.0, "path": "warm"}
SKIPPED = {"skipped": True}


def start(path="warm", measured=None, cache=None, **given):
    started = given.get("started", STARTED)
    change = {
        "measured": {"gpu_peak_mib": {"A": 90, "B": 71}, "first_token_s": 0.02, "prompt_tokens": 8}
        if measured is None
        else measured,
        "out_of_service": out(step("stop", 5, 10), step("start", 17, 60), step("prove", 60, 61), started=started),
        "started": started,
        "proof": {"by": "golden"},
    }
    results = {
        "cache": {"cached_share": 0.5} if cache is None else cache,
        "started": {"engines": {"chat": change}},
        "slept": SKIPPED,
        "woken": SKIPPED,
    }
    return measuring.vllm_measure_row({"engine": "chat", "path": path, "level": 0, "round": 1}, "h1", results)


def test_a_start():
    row = start()
    assert (row["outcome"], row["ready_s"], row["first_token_s"]) == ("measured", 44.0, 0.02)
    assert [(one["phase"], one["seconds"]) for one in row["phases"]] == [
        ("prepare", 1.0),
        ("boot", 38.0),
        ("warm", 3.0),
        ("prove", 2.0),
    ]
    assert (row["gpu_peak_mib"], row["gpu_mib"], row["gpu_asleep_mib"]) == (161, 140, None)
    assert (row["cached_share"], row["compiled"], row["proof"]) == (0.5, True, "golden")


@pytest.mark.parametrize(
    ("peaks", "sum_of_them"), [({}, None), ({"A": 90}, None), ({"A": 90, "B": 0}, 90), (None, None)]
)
def test_a_gpu_that_was_not_seen_makes_no_sum(peaks, sum_of_them):
    row = start(measured={} if peaks is None else {"gpu_peak_mib": peaks})
    assert row["gpu_peak_mib"] == sum_of_them
    assert row["first_token_s"] is None


@pytest.mark.parametrize(
    ("path", "more", "reason"),
    [
        ("cold", {"cache": {"msg": "12 of 13 MiB stay", "failed": False}}, "12 of 13 MiB stay"),
        ("cold", {"cache": SKIPPED}, "the page cache was not dropped"),
        ("preload", {}, "it did not take its weights from its preload daemon"),
    ],
)
def test_what_was_not_what_it_should_be_is_not_measured(path, more, reason):
    row = start(path, **more)
    assert (row["outcome"], row["reason"]) == ("skipped", reason)
    assert start("preload", started={**STARTED, "path": "preload"})["outcome"] == "measured"


def test_a_wake():
    woken = {
        "out_of_service": out(
            step("lease", 0, 1),
            step("sleep", 1, 3),
            step("wake", 20, 20.5),
            step("prove", 20.5, 21),
            step("admit", 21, 22),
        )
    }
    slept = {"timings": {"sleep": 2.0}, "resident_mib": {"A": 1, "B": 2}}
    results = {
        "cache": SKIPPED,
        "started": SKIPPED,
        "slept": {"engines": {"chat": slept}},
        "woken": {"engines": {"chat": woken}},
    }
    row = measuring.vllm_measure_row({"engine": "chat", "path": "sleep1", "level": 1, "round": 1}, "h1", results)
    assert (row["ready_s"], row["sleep_s"], row["gpu_asleep_mib"]) == (1.0, 2.0, 3)
    assert (row["gpu_peak_mib"], row["cached_share"], row["compiled"]) == (None, None, None)
    assert [one["phase"] for one in row["phases"]] == ["wake", "prove"]


def test_the_rows_of_a_run_that_stopped():
    plan = measuring.vllm_measure_plan(ENGINES, ["chat"], asked(chat2="LoRA"), 1, True)
    first = {"engine": "chat", "path": "sleep1", "outcome": "measured"}
    hosts = {
        "h1": {"__vllm_measure_plan": plan, "__vllm_measure_rows": [first], "__vllm_switch_said": "h1: it broke"},
        "h2": {"__vllm_measure_plan": plan, "__vllm_measure_rows": []},
        "h3": {},
    }
    rows = measuring.vllm_measure_rows(["h1", "h2", "h3"], hosts)
    assert [(row.get("name", "h1"), row["path"], row["outcome"]) for row in rows] == [
        ("h1", "sleep1", "measured"),
        ("h1", "cold", "failed"),
        ("h1", "warm", "waiting"),
        ("h1", "sleep2", "skipped"),
        ("h2", "sleep1", "waiting"),
        ("h2", "cold", "waiting"),
        ("h2", "warm", "waiting"),
        ("h2", "sleep2", "skipped"),
    ]
    assert [row["reason"] for row in rows[1:4]] == ["h1: it broke", "", "LoRA"]


def rounds(*seconds, **changes):
    return [{**start(), "ready_s": one, "phases": [{"phase": "boot", "seconds": one}], **changes} for one in seconds]


def test_rounds_come_to_a_median():
    broken = {**start("cold", cache=SKIPPED)}
    (found,) = measuring.vllm_measure_summary([*rounds(40.0, 60.0, 50.0), broken])
    assert (found["rounds"], found["ready_s"]) == (3, {"median": 50.0, "min": 40.0, "max": 60.0})
    assert found["phases"] == [{"phase": "boot", "seconds": 50.0}]
    assert found["says"] == "h1 chat, warm start: proved after 50.0 s, first token 20 ms later, peak 161 MiB"
    (found,) = measuring.vllm_measure_summary(rounds(40.0, 60.0, gpu_peak_mib=None, first_token_s=None))
    assert (found["gpu_peak_mib"], found["first_token_s"], found["sleep_s"]) == (None, None, None)
    assert found["ready_s"]["median"] == 50.0
    assert found["phases"] == [{"phase": "boot", "seconds": 40.0}]
    assert found["says"] == "h1 chat, warm start: proved after 50.0 s"


def test_the_page_of_it():
    plan = measuring.vllm_measure_plan(ENGINES, ["chat"], asked(chat2="LoRA is <on>"), 1, True)
    hosts = {"h1": {"__vllm_measure_plan": plan, "__vllm_measure_rows": [start(), start("cold"), start()]}}
    rows = measuring.vllm_measure_rows(["h1"], hosts)
    summary = measuring.vllm_measure_summary(rows)
    page = report.vllm_report_page({"schema": "baremetal.vllm/measure", "run": "m", "hosts": rows, "summary": summary})
    for words in (
        "Starts and wakes, measured",
        "✔ Complete: 3 of 3",
        "<span>44\N{NO-BREAK SPACE}s to 44\N{NO-BREAK SPACE}s, 2 rounds</span><span>first token 20 ms</span>",
        "weights in the page cache: 50 %",
        "161\N{NO-BREAK SPACE}MiB",
        "chat, cold start",
        "wake from level 2</b>: LoRA is &lt;on&gt;",
    ):
        assert words in page, words
    unseen = report.vllm_report_page(
        {
            "schema": "baremetal.vllm/measure",
            "run": "m",
            "hosts": [],
            "summary": [
                {**summary[0], "gpu_peak_mib": None, "first_token_s": None},
            ],
        }
    )
    assert "It was not seen: NVML gave no number." in unseen
