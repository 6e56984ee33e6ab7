# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What playbook measure measures, in which order, and what came of it. Pure.

A *path* is a way by which an engine comes to serve: sleep1 and sleep2 are wakes from these levels, the others starts.
"""

from __future__ import annotations

import statistics
import typing as t

from ansible_collections.baremetal.vllm.plugins.filter.report import MEASURED
from ansible_collections.baremetal.vllm.plugins.plugin_utils._spans import BOOT, span

LEVELS = {"sleep1": 1, "sleep2": 2}
# Where the way into service begins, among the phases of a time out of it.
BEGINS = ("prepare", "boot", *BOOT, "start", "wake")
FIGURES = ("ready_s", "first_token_s", "sleep_s")

Row = t.Mapping[str, t.Any]


def vllm_measure_plan(
    engines: Row, names: t.Sequence[str], asked: t.Iterable[Row], rounds: int = 1, cold: bool = False
) -> dict[str, list[dict[str, t.Any]]]:
    """What is measured, one after the other, and what is not and why.

    Sleeps come first and starts last: a process that has slept at level 1 keeps the copy of its weights, and none is
    to be left behind.

    :param engines: of vllm_info.
    :param asked: the results of vllm_sleep in check mode, each with its ``item`` of engine and level.
    """
    refused = {(str(one["item"][0]), int(one["item"][1])): one.get("msg") for one in asked}
    todo: list[dict[str, t.Any]] = []
    skipped: list[dict[str, t.Any]] = []
    for name in sorted(names):
        daemon = (engines[name].get("preload") or {}).get("daemon")
        paths = ["sleep1", "sleep2", *(["cold"] if cold else []), "preload" if daemon else "warm"]
        for path in paths:
            why = refused.get((name, LEVELS.get(path, 0)))
            if path == "cold" and daemon:
                why = f"its weights come from preload daemon '{daemon}', which has read them already"
            one = {"engine": name, "path": path, "level": LEVELS.get(path, 0), "says": f"{name}: {MEASURED[path]}"}
            if why:
                skipped.append({**one, "reason": str(why)})
                continue
            for number in range(1, rounds + 1):
                of = f", round {number} of {rounds}" if rounds > 1 else ""
                todo.append({**one, "round": number, "says": one["says"] + of})
    return {"todo": todo, "skipped": skipped}


def vllm_measure_row(one: Row, host: str, results: Row) -> dict[str, t.Any]:
    """What came of one measurement. A number that was not seen is null.

    :param one: of the ``todo`` of vllm_measure_plan.
    :param results: of the modules, ``cache``, ``started``, ``slept`` and ``woken``; those that had no part are skipped.
    """
    name = str(one["engine"])
    change = _engine(results["woken"] if one["level"] else results["started"], name)
    slept = _engine(results["slept"], name)
    cache = {} if results["cache"].get("skipped") else results["cache"]
    measured = change.get("measured") or {}
    out = change.get("out_of_service") or {}
    spans = [span(out)] if out else []
    started = change.get("started") or {}
    held = out.get("gpu_mib") or {}
    outcome, reason = _judge(one, cache, started)
    return {
        "name": host,
        "engine": name,
        "path": one["path"],
        "round": one["round"],
        "outcome": outcome,
        "reason": reason,
        **_ready(spans),
        "first_token_s": measured.get("first_token_s"),
        "prompt_tokens": measured.get("prompt_tokens"),
        "gpu_peak_mib": _sum(measured.get("gpu_peak_mib"), held),
        "gpu_mib": _sum(held),
        "sleep_s": (slept.get("timings") or {}).get("sleep"),
        "gpu_asleep_mib": _sum(slept.get("resident_mib")),
        "cached_share": cache.get("cached_share"),
        "compiled": started.get("path") in ("warm", "preload") if started.get("path") else None,
        "proof": (change.get("proof") or {}).get("by"),
        "spans": spans,
    }


def _judge(one: Row, cache: Row, started: Row) -> tuple[str, str]:
    """Whether it is what it was meant to be."""
    if one["path"] == "cold" and "cached_share" not in cache:
        return "skipped", str(cache.get("msg") or "the page cache was not dropped")
    if one["path"] == "preload" and started.get("path") != "preload":
        return "skipped", "it did not take its weights from its preload daemon"
    return "measured", ""


def _engine(result: Row, name: str) -> Row:
    return t.cast(Row, (result.get("engines") or {}).get(name) or {})


def _ready(spans: t.Sequence[Row]) -> dict[str, t.Any]:
    """From the beginning of the start or the wake until the engine is proved, and the phases of that."""
    phases = list(spans[0]["phases"]) if spans else []
    first = next((place for place, one in enumerate(phases) if one["phase"] in BEGINS), None)
    last = max((place for place, one in enumerate(phases) if one["phase"] == "prove"), default=None)
    if first is None or last is None or last < first:
        return {"ready_s": None, "phases": []}
    part = phases[first : last + 1]
    seconds = part[-1]["at"] + part[-1]["seconds"] - part[0]["at"]
    shown = [{"phase": one["phase"], "seconds": one["seconds"]} for one in part]
    return {"ready_s": round(seconds, 3), "phases": shown}


def _sum(by_gpu: t.Any, expected: t.Any = ()) -> int | None:
    """Over all GPUs of the engine; None where one of them was not seen."""
    if not by_gpu or not set(expected or ()) <= set(by_gpu):
        return None
    return sum(int(mib) for mib in by_gpu.values())


def vllm_measure_rows(hosts: t.Iterable[str], hostvars: Row) -> list[dict[str, t.Any]]:
    """The rows of all hosts: what was measured, what was not and why, what failed and what has not begun."""
    rows: list[dict[str, t.Any]] = []
    for host in hosts:
        values = hostvars[host]
        plan = values.get("__vllm_measure_plan") or {"todo": [], "skipped": []}
        done = list(values.get("__vllm_measure_rows") or ())
        failed = values.get("__vllm_switch_said")
        rows += done
        left = plan["todo"][len(done) :]
        for place, one in enumerate(left):
            broken = bool(failed) and place == 0
            rows.append(_unmeasured(host, one, "failed" if broken else "waiting", str(failed or "") if broken else ""))
        rows += [_unmeasured(host, one, "skipped", one["reason"]) for one in plan["skipped"]]
    return rows


def _unmeasured(host: str, one: Row, outcome: str, reason: str) -> dict[str, t.Any]:
    kept = {"engine": one["engine"], "path": one["path"], "round": one.get("round")}
    return {"name": host, **kept, "outcome": outcome, "reason": reason, "spans": []}


def vllm_measure_summary(rows: t.Sequence[Row]) -> list[dict[str, t.Any]]:
    """For each engine and path the rounds together: the median, and the least and the most where there are several."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["outcome"] == "measured" and row.get("ready_s") is not None:
            groups.setdefault((row["name"], row["engine"], row["path"]), []).append(row)
    found = []
    order = {path: place for place, path in enumerate(MEASURED)}
    for (host, engine, path), rounds in sorted(groups.items(), key=lambda one: (*one[0][:2], order[one[0][2]])):
        # The phases of a median do not exist; those of the round in the middle do.
        middle = sorted(rounds, key=lambda row: float(row["ready_s"]))[(len(rounds) - 1) // 2]
        figures = {name: _spread([row[name] for row in rounds]) for name in FIGURES}
        memory = {name: _most([row[name] for row in rounds]) for name in ("gpu_peak_mib", "gpu_asleep_mib", "gpu_mib")}
        ready, token = t.cast("dict[str, float]", figures["ready_s"]), figures["first_token_s"]
        says = f"{host} {engine}, {MEASURED[path]}: proved after {ready['median']:.1f} s"
        says += f", first token {1000 * token['median']:.0f} ms later" if token else ""
        says += f", peak {memory['gpu_peak_mib']} MiB" if memory["gpu_peak_mib"] is not None else ""
        found.append(
            {
                "name": host,
                "engine": engine,
                "path": path,
                "rounds": len(rounds),
                **figures,
                **memory,
                "cached_share": _least([row["cached_share"] for row in rounds]),
                "phases": middle["phases"],
                "says": says,
            }
        )
    return found


def _spread(values: t.Sequence[t.Any]) -> dict[str, float] | None:
    """None where a round has no number."""
    if None in values:
        return None
    return {"median": round(statistics.median(values), 4), "min": min(values), "max": max(values)}


def _most(values: t.Sequence[t.Any]) -> int | None:
    return None if None in values else max(values)


def _least(values: t.Sequence[t.Any]) -> float | None:
    return None if None in values else min(values)


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "vllm_measure_plan": vllm_measure_plan,
            "vllm_measure_row": vllm_measure_row,
            "vllm_measure_rows": vllm_measure_rows,
            "vllm_measure_summary": vllm_measure_summary,
        }
