"""Makes docs/measured.md from two GPU reports, one of them with GPU_HOST_RANKS=2.

document.py docs/measured/gpu-report.json docs/measured/gpu-report-two.json >docs/measured.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ansible_collections.baremetal.vllm.plugins.filter.report import MEASURED, MEASURED_SAYS

HEAD = """\
# Measured on a GPU

What this collection did on real vLLM {vllm} on one {gpu} (driver {driver}, {cores} cores, {systemd}),
seen by other signals than its own: GPU memory by NVML, the engine's metrics, what it answers, what systemd says.
Written by `tests/gpu_host/document.py` from [measured/gpu-report.json](measured/gpu-report.json), which has every
number; `tests/gpu_host/README.md` says how to make such a report.

*Task* is the whole Ansible task on the host itself, {start:.1f} s of which are the start of a module; *engine* is what
the engine says that its own operation took; GPU memory is that of the whole device, in MiB, before and after.
Of the three engines `chat` loads its own weights, `mapped` maps those of the preload daemon `base`, and `copied` takes
over those of `spare` ([preload.md](preload.md)).

| transition | task, s | engine, s | MiB before | MiB after | |
|---|---|---|---|---|---|
"""
SEVERAL = """\
## Two GPUs

The same on {gpus} of them ({cores} cores) with `tensor-parallel-size: 2`, each rank of engine and daemon on a GPU
of its own; times with one GPU, from above, beside them. Memory is that of both GPUs together; asleep at level 2,
`chat` left {left} MiB on each, against {left_alone} with one. Every number is in
[measured/gpu-report-two.json](measured/gpu-report-two.json).

| transition | task, s | with one | engine, s | with one | MiB before | MiB after | |
|---|---|---|---|---|---|---|---|"""
ASKED = (
    "This collection relies on these; each was asked of engine or daemon over its own door (`tests/gpu_host/facts.py`)."
)


def cell(value: float | str | None) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    # Not to be broken on a phone.
    return f"{value:,}".replace(",", "\N{NO-BREAK SPACE}") if isinstance(value, int) else value or ""


def host_memory(report: dict) -> list[str]:
    rows = []
    for one in report["transitions"]:
        if (taken := one.get("rss_change_mib") or 0) > 0 and one.get("weights_mib"):
            numbers = [one["weights_mib"], taken, -one["available_change_mib"], round(taken / one["weights_mib"], 2)]
            rows.append(f"| {one['transition']} | {' | '.join(map(cell, numbers))} |")
    head = "| | weights, MiB | resident in its processes | gone from the available | per MiB of weights |"
    return ["## Host memory of a first sleep at level 1", "", head, "|---|---|---|---|---|", *rows, ""]


def ways(report: dict) -> list[str]:
    """What playbook measure has seen of each way into service."""
    rows = []
    for one in sorted(report.get("measured", []), key=lambda one: -one["ready_s"]):
        parts = ", ".join(f"{part['phase']} {part['seconds']:.1f}" for part in one["phases"] if part["seconds"] >= 0.05)
        numbers = [one["ready_s"], parts, one["first_token_s"], one["gpu_peak_mib"], one["gpu_asleep_mib"]]
        way = ": ".join(word[one["path"]] for word in (MEASURED, MEASURED_SAYS) if one["path"] in word)
        rows.append(f"| {one['engine']}, {way} | {' | '.join(map(cell, numbers))} |")
    head = "| | proved after, s | of that, s | first token, s | peak, MiB | asleep, MiB |"
    says = "As `baremetal.vllm.measure` saw it, which measures your own engines in the same way."
    return ["## What dominates", "", says, "", head, "|---|---|---|---|---|---|", *rows] if rows else []


def verdict(one: dict, before: int = 0) -> str:
    """With the number of its note, ``before`` of which are another report's."""
    return one["verdict"] + (f" [{one['note'] + before}]" if "note" in one else "")


def several(report: dict, single: dict) -> str:
    """The transitions of engines that have several GPUs each, beside those with one."""
    alone = {one["transition"]: one for one in single["transitions"]}
    rows = []
    for one in report["transitions"]:
        other = alone.get(one["transition"], {})
        numbers = [side.get(key) for key in ("task_seconds", "engine_seconds") for side in (one, other)]
        numbers += [one["gpu_mib_before"], one["gpu_mib_after"]]
        told = verdict(one, len(single["notes"]))
        rows.append(f"| {one['transition']} | {' | '.join(map(cell, numbers))} | {told} |")
    left, left_alone = (
        max(one["resident_mib"].values())
        for side in (report, single)
        for one in side["transitions"]
        if one["transition"] == "sleep level 2"
    )
    return "\n".join([SEVERAL.format(**report["machine"], left=left, left_alone=left_alone), *rows])


def document(report: dict, two: dict) -> str:
    lines = []
    for one in report["transitions"]:
        numbers = [one["task_seconds"], one["engine_seconds"], one["gpu_mib_before"], one["gpu_mib_after"]]
        lines.append(f"| {one['transition']} | {' | '.join(map(cell, numbers))} | {verdict(one)} |")
    notes = [f"{number}. {text}" for number, text in enumerate([*report["notes"], *two["notes"]], 1)]
    facts = [f"- {one['fact']}{'' if one['holds'] else ' — **not so here**'}" for one in report.get("facts", [])]
    limits = [f"- {text}" for text in report.get("limits", [])]
    sections = [
        HEAD.format(**report["machine"]) + "\n".join(lines),
        several(two, report),
        "\n".join(ways(report)),
        "\n".join(host_memory(report)).rstrip(),
        "\n".join(["## What vLLM itself does", "", ASKED, "", *facts]),
        "\n".join(["## Notes", "", *notes]),
        "\n".join(["## What this does not show", "", *limits]),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.stdout.write(document(*(json.loads(Path(path).read_text()) for path in sys.argv[1:])))
