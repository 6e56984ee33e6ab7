# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The page of a report in a real browser, as wide as a screen and as a phone. Its pictures lie in build/report."""

from __future__ import annotations

import html
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.plugins.filter.measuring import vllm_measure_summary
from ansible_collections.baremetal.vllm.plugins.filter.report import vllm_report_page
from ansible_collections.baremetal.vllm.plugins.filter.switching import vllm_switch_rows

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
PICTURES = Path(__file__).parents[2] / "build/report"
BEGAN = 1796026200.0  # 2026-11-30 08:10:00 UTC
HOSTILE = '<img src=x onerror="document.title=1">'
JOURNAL = "\n".join(
    f"Nov 30 08:1{n}:00 gpu10 vllm[81{n}]: torch.OutOfMemoryError: CUDA out of memory. {'x' * 40 * n}" for n in range(9)
)
# Around the page that is measured: how wide its content is where the page is WIDTH wide, and what sticks out.
FRAME = """<!doctype html><body style="margin:0">
<iframe id=f style="border:0;width:{width}px;height:900px" srcdoc="{page}"></iframe>
<script>
const f = document.getElementById("f");
f.onload = () => {{
  const d = f.contentDocument, out = [];
  for (const one of d.querySelectorAll("body *")) {{
    const box = one.getBoundingClientRect();
    const sticks = box.right > {width} + 0.5 || box.left < -0.5;
    if (sticks && !one.closest("svg")) out.push(one.tagName + "." + one.className);
  }}
  const text = [...d.querySelectorAll("h1, h2, .lane, .card")].filter((one) => one.getBoundingClientRect().height > 8);
  const bars = [...d.querySelectorAll(".bar rect")].filter((one) => one.getBoundingClientRect().height > 8);
  const words = [...d.querySelectorAll(".who, .what, .value")];
  document.title = "measured";
  document.body.dataset.measured = JSON.stringify({{
    narrow: words.filter((one) => one.offsetWidth && one.offsetWidth < 90).length,
    wide: d.documentElement.scrollWidth, out, shown: text.length, bars: bars.length,
    images: d.images.length, title: d.title,
  }});
}};
</script>"""


def span(since: float, *, boot: float, seconds: float | None = None, failed: bool = False) -> dict:
    lengths = [("withdraw", 3.1), ("drain", 4.2), ("stop", 6.3), ("prepare", 1.2), ("boot", boot), ("warm", 2.4)]
    lengths += [("prove", 1.9), ("admit", 1.1)]
    phases, at = [], since + 0.2
    for phase, length in lengths[:3] if failed else lengths:
        phases.append({"phase": phase, "at": at, "seconds": length})
        at += length + (0.7 if phase in ("drain", "stop", "prove") else 0)
    return {"since": since, "seconds": None if failed else round(at - since, 3), "phases": phases}


def engine(number: int, since: float, boot: float) -> dict:
    one = span(since, boot=boot)
    known = {
        "from": "0.32.0",
        "runs": "0.33.0" if number == 2 else "0.32.0",
        "weights_before": f"sha256:{'4f1c0a9b' * 8}",
    }
    after = known["weights_before"] if number != 3 else f"sha256:{'9b3d2e5f' * 8}"
    return {
        "name": f"gpu{number:02}.fleet.example.net", "engine": "chat", "outcome": "restarted",
        "out_of_rotation_s": one["seconds"], **known, "weights_after": after,
        "gpu_mib_before": 71928 + number, "gpu_mib_after": 71926, "changed": True,
        "requests_cut": None if number == 5 else 0, "proof": "golden" if number != 5 else "completion", "spans": [one],
    }  # fmt: skip


def report(hosts: int = 9) -> dict:
    """A roll of which most went well: one host has failed, with a journal, one is lost, one has a hostile name."""
    rows, at = [], BEGAN
    for number in range(1, hosts + 1):
        rows.append(engine(number, at, 48.0 + 7 * (number % 4)))
        at += rows[-1]["out_of_rotation_s"] + 6
    why = '"Restart, and wait until each engine is proved ready" failed: unit vllm-engine@chat.service failed to start'
    others = [
        {"name": f"gpu{hosts + 1:02}.fleet.example.net", "engine": "chat", "outcome": "failed", "state": "failed",
         "reason": f"gpu10: {why}\nWhat is left: {{}}\n{JOURNAL}", "spans": [span(at, boot=0, failed=True)],
         "from": "0.32.0", "weights_before": f"sha256:{'4f1c0a9b' * 8}", "gpu_mib_before": 71938},
        {"name": "gpu98", "engine": "chat", "outcome": "waiting", "state": "serving", "reason": "", "spans": []},
        {"name": HOSTILE, "engine": "</code>" + "w" * 90, "outcome": "waiting", "state": "serving", "reason": ""},
    ]  # fmt: skip
    return {
        "schema": "baremetal.vllm/roll", "version": 1, "run": "roll-20261130T081000Z",
        "written": "2026-11-30T08:25:30Z", "lost": ["gpu98"], "hosts": rows, "others": others,
    }  # fmt: skip


def browse(*arguments: str) -> str:
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=5000",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def measured(page: str, width: int, folder: Path) -> dict:
    frame = folder / "frame.html"
    # The frame's own script has to look into the page, whose policy forbids scripts; its own are none.
    frame.write_text(FRAME.format(width=width, page=html.escape(page)))
    found = re.search(r'data-measured="([^"]*)"', browse("--dump-dom", f"--window-size={width},900", frame.as_uri()))
    return json.loads(html.unescape(found[1]))


def measured_run() -> dict:
    """Two engines in three rounds: one has been measured whole, with a GPU that NVML does not see; the other failed."""
    ways = {"sleep1": 0.41, "sleep2": 2.9, "cold": 102.0, "warm": 61.0}
    rows, at = [], BEGAN
    for engine in ("chat", "code-with-a-long-name-of-its-own"):
        for way, seconds in ways.items():
            for number in (1, 2, 3):
                wake = way.startswith("sleep")
                ready = seconds * (1 + 0.07 * number)
                parts = [("wake", 0.9)] if wake else [("prepare", 0.03), ("boot", 0.8), ("warm", 0.07)]
                phases = [{"phase": one, "seconds": round(ready * share, 3)} for one, share in [*parts, ("prove", 0.1)]]
                spent, begin = [], at + 4
                for one in [{"phase": "drain", "seconds": 4}, *phases]:
                    spent.append({**one, "at": begin - 4})
                    begin += one["seconds"]
                rows.append({
                    "name": "gpu01.fleet.example.net", "engine": engine, "path": way, "round": number,
                    "outcome": "measured", "reason": "", "ready_s": ready, "phases": phases,
                    "first_token_s": 0.0314 * number, "prompt_tokens": 512, "gpu_mib": 71885,
                    "gpu_peak_mib": None if (engine, way) == ("chat", "cold") else 71885 + 900 * number,
                    "sleep_s": 8.57 if wake else None, "gpu_asleep_mib": 1502 if wake else None,
                    "cached_share": None if wake else 0.98, "compiled": not wake, "proof": "golden",
                    "spans": [{"since": at, "seconds": ready + 5, "phases": spent}],
                })  # fmt: skip
                at += ready + 8
    kept = [row for row in rows if row["engine"] == "chat"] + rows[12:16]
    left = {"name": "gpu01.fleet.example.net", "engine": rows[-1]["engine"], "spans": []}
    others = [
        {**left, "path": "cold", "round": 1, "outcome": "failed", "reason": f"gpu01: it did not start\n{JOURNAL}"},
        {**left, "path": "warm", "round": 1, "outcome": "waiting", "reason": ""},
        {**left, "path": "sleep2", "outcome": "skipped", "reason": f"engine 'code' {HOSTILE} has LoRA on: use level 1"},
    ]
    return {
        "schema": "baremetal.vllm/measure", "version": 1, "run": "measure-20261130T081000Z", "lost": [],
        "written": "2026-11-30T09:25:30Z", "hosts": kept + others, "summary": vllm_measure_summary(kept),
    }  # fmt: skip


def switch_that_failed() -> dict:
    """One host has changed, one went back to what served, one waits."""

    def call(began: float, state: str, steps: dict[str, float], **more) -> dict:
        found, at = [], began
        for name, seconds in steps.items():
            at += seconds
            found.append({"step": name, "seconds": seconds, "at": at})
        return {
            "changed": True,
            "timings": steps,
            "steps": found,
            "after": {"state": state},
            "elapsed": at - began,
            **more,
        }

    down = {"lease": 0.01, "withdraw": 0.02, "await_router": 3.0, "await_idle": 6.1, "close": 0.01, "sleep": 8.6}
    up = {"wake_weights": 0.1, "reload": 2.5, "wake_kv": 0.1, "prove": 0.9, "admit": 0.02, "await_ready": 0.3}
    plan = {"sleep": [{"level": 2, "engines": ["chat"]}], "wake": ["code"], "start": [], "admit": [], "held": []}
    broken = call(BEGAN + 60, "withdrawn", {"wake": 0.4, "prove": 0.9}, failed=True)
    why = '"Wake, prove and admit" failed: engine code gave other tokens than its golden'
    values = {
        "gpu01.fleet.example.net": {
            "__vllm_switch_slept": {"results": [{"engines": {"chat": call(BEGAN, "asleep", down)}}]},
            "__vllm_switch_woken": {"engines": {"code": call(BEGAN + 20, "serving", up)}},
            "__vllm_switch_begun": BEGAN, "__vllm_switch_ended": BEGAN + 30,
        },
        "gpu02.fleet.example.net": {
            "__vllm_switch_slept": {"results": [{"engines": {"chat": call(BEGAN + 40, "asleep", down)}}]},
            "__vllm_switch_woken": {"engines": {"code": broken}},
            "__vllm_switch_rewoken": {"engines": {"chat": call(BEGAN + 70, "serving", up)}},
            "__vllm_switch_said": f"gpu02: {why}\nchat serves again. {JOURNAL}",
        },
        "gpu03.fleet.example.net": {},
    }  # fmt: skip
    rows = vllm_switch_rows(values, {host: {"__vllm_switch_plan": plan, **one} for host, one in values.items()})
    return {
        "schema": "baremetal.vllm/switch", "version": 1, "run": "switch-20261130T081000Z", "lost": [],
        "written": "2026-11-30T08:12:30Z", "hosts": rows,
    }  # fmt: skip


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(
    ("kind", "given", "title", "bars"),
    [
        # In the charts a bar for each phase of 6 ways and for what was seen of memory; in the lanes one for each phase.
        ("measure", measured_run(), "Starts and wakes, measured measure-20261130T081000Z", 16 + 9 + 60),
        ("switch", switch_that_failed(), "Switch switch-20261130T081000Z", 14 + 1),
    ],
)
def test_pages_of_other_runs(kind, given, title, bars, width, tmp_path):
    page = vllm_report_page(given)
    path = tmp_path / "page.html"
    path.write_text(page)
    found = measured(page, width, tmp_path)
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = PICTURES / f"{kind}-{width}.png"
    browse(f"--screenshot={picture}", f"--window-size={width},3000", path.as_uri())
    assert found["wide"] == width, found
    assert found["out"] == []
    assert found["narrow"] == 0, "words stand upon each other, letter by letter"
    assert found["images"] == 0, "a name of a host has become part of the page"
    assert found["title"] == title
    assert found["bars"] == bars


@pytest.mark.parametrize(("kind", "width"), [("roll", 1280), ("roll", 390), ("fleet", 390), ("empty", 390)])
def test_nothing_sticks_out_and_all_is_shown(kind, width, tmp_path):
    assert BROWSER, "no Chromium: apt-get install chromium-headless-shell"
    given = {"roll": report(), "fleet": report(120), "empty": {**report(0), "others": [], "lost": []}}[kind]
    page = vllm_report_page(given)
    path = tmp_path / "page.html"
    path.write_text(page)
    found = measured(page, width, tmp_path)
    PICTURES.mkdir(parents=True, exist_ok=True)
    picture = PICTURES / f"{kind}-{width}.png"
    picture.unlink(missing_ok=True)
    height = {"roll": 3000, "fleet": 2400, "empty": 700}[kind]
    browse(f"--screenshot={picture}", f"--window-size={width},{height}", path.as_uri())

    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (width, height)
    assert found["wide"] == width, found
    assert found["out"] == []
    assert found["images"] == 0, "a name of a host has become part of the page"
    assert found["title"] == "Rolling restart roll-20261130T081000Z"
    lanes = sum(len(row.get("spans", [])) for row in given["hosts"] + given["others"])
    assert found["bars"] == sum(len(one["phases"]) for row in given["hosts"] for one in row["spans"]) + (
        4 if lanes else 0
    )
    assert found["shown"] == page.count("<h1") + page.count("<h2") + page.count("<article") + lanes
