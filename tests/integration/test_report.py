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

from ansible_collections.baremetal.vllm.plugins.filter.report import vllm_report_page

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
  document.title = "measured";
  document.body.dataset.measured = JSON.stringify({{
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
