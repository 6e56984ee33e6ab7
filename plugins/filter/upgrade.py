# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filters of playbook rolling_upgrade: what is to be done on a host, the way back, and what came of it."""

from __future__ import annotations

import typing as t

from ansible_collections.baremetal.vllm.plugins.filter.groups import hosts_together
from ansible_collections.baremetal.vllm.plugins.plugin_utils._spans import held_mib, requests_cut, span, span_of_lease

OWNER = "rolling_upgrade"
WOULD = "would be upgraded"
AWAKE = ("serving", "withdrawn", "draining", "drained")
DOWN = ("stopped", "failed")
# Means of fewer requests than these say nothing about an engine.
FEW_REQUESTS = 10
LATENCIES = {"first_token": "time to the first token", "per_token": "time per further token"}

Engines = t.Mapping[str, t.Mapping[str, t.Any]]


def _runs_with(engine: t.Mapping[str, t.Any]) -> str:
    """The digest of the configuration that the running process was proved with, "" where none is on record."""
    unit, started = engine["unit"] or {}, engine["started"] or {}
    alive = unit.get("main_pid") and started.get("main_pid") == unit["main_pid"]
    return str(started.get("config_digest") or "") if alive else ""


def _by_golden(engine: t.Mapping[str, t.Any]) -> bool:
    """Whether a golden has proved the process that runs, at its start or since: goldens may be younger than it."""
    at_start = ((engine["started"] or {}).get("proof") or {}).get("by") == "golden"
    return at_start or bool((engine.get("golden") or {}).get("matches"))


def _ours(engine: t.Mapping[str, t.Any]) -> bool:
    return bool(engine["lease"]) and engine["lease"]["owner"] == OWNER


def _sort(name: str, engine: t.Mapping[str, t.Any], want: t.Mapping[str, t.Any]) -> tuple[str, str]:
    """(part, why): change, finish, write or leave; or refuse, and then why."""
    state, ours = engine["state"], _ours(engine)
    there = _runs_with(engine) == want["config_digest"]
    if state in ("asleep", "waking"):
        if there and not ours:
            return "leave", ""
        return "refuse", f"engine '{name}' is {state} with another configuration; wake it or stop it first"
    if state in DOWN and not want["start"] and not ours:
        part = "leave"
    elif there and state in (*AWAKE, "headless"):
        part = "finish" if ours else "leave"
    else:
        part = "change"
    running = (engine["started"] or {}).get("runtime_version") or engine["runtime_version"]
    if part == "change" and want["preload"] and running != want["runtime_version"]:
        return "refuse", (
            f"engine '{name}' takes its weights from a preload daemon, which would have to go to vLLM "
            f"{want['runtime_version']} with it and could not come back by itself; run baremetal.vllm.site with the "
            "new version and then baremetal.vllm.rolling_restart"
        )
    if part == "leave" and engine["config_digest"] != want["config_digest"]:
        part = "write"  # its files alone: the process is right, or there is none and there is to be none
    return part, ""


def vllm_upgrade_plan(engines: Engines, wants: Engines) -> dict[str, t.Any]:
    """What is to be done with the engines of one host.

    :param engines: of vllm_info.
    :param wants: of role vllm_engine, ``want``: what the inventory says.
    :returns: names under ``change`` (stop, write, start), ``finish`` (a run that was killed has only to prove and
        admit them), ``write`` (files alone); of those that change, ``drain`` those that can and ``unproved`` those that
        no golden has proved; ``headless`` are those of all that have no API server; ``refused`` says why; ``part`` of
        the fleet is first, todo or done.
    """
    plan: dict[str, t.Any] = {"change": [], "finish": [], "write": [], "refused": [], "along": [], "keep": []}
    for name, want in sorted(wants.items()):
        if name not in engines:
            plan["refused"].append(f"engine '{name}' is not on this host yet; run baremetal.vllm.site")
            continue
        part, why = _sort(name, engines[name], want)
        if part == "refuse":
            plan["refused"].append(why)
        elif part != "leave":
            plan[part].append(name)
    return _completed(plan, engines)


def _completed(plan: dict[str, t.Any], engines: Engines) -> dict[str, t.Any]:
    """With what follows from the parts that the engines have in it."""
    touched = plan["change"] + plan["finish"]
    headless = [name for name, engine in engines.items() if engine.get("headless")]
    well = all(engines[name]["state"] in ("serving", "headless") for name in touched)
    return {
        **plan,
        "headless": headless,
        "unproved": [name for name in plan["change"] if name not in headless and not _by_golden(engines[name])],
        "drain": [name for name in plan["change"] if engines[name]["state"] in AWAKE],
        "part": ("todo" if well else "first") if touched or plan["write"] else "done",
    }


def vllm_upgrade_together(
    plan: t.Mapping[str, t.Any], hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Any], host: str
) -> dict[str, t.Any]:
    """The plan of a host that has engines of groups: where one of a group changes, all of it do.

    :returns: the plan, with those that only change with the others under ``along``, too, whose configuration stays; and
        under ``keep`` the headless ones that are proved now, since their heads serve.
    """
    engines = hostvars[host]["__vllm_upgrade_seen"]["engines"]
    changing, serving = set(), set()
    for other in hosts:
        seen = hostvars[other]["__vllm_upgrade_seen"]["engines"]
        changing |= {seen[name].get("group") for name in hostvars[other]["__vllm_upgrade_plan"]["change"]}
        serving |= {one.get("group") for one in seen.values() if one["state"] == "serving"}
    more = [
        name
        for name, engine in engines.items()
        if engine.get("group") in changing - {None, ""} and name not in plan["change"]
    ]
    change = sorted([*plan["change"], *more])
    return _completed(
        {
            **plan,
            "change": change,
            "keep": [
                name for name in change if engines[name]["state"] == "headless" and engines[name]["group"] in serving
            ],
            "along": [name for name in more if name not in plan["write"]],
            **{part: [name for name in plan[part] if name not in more] for part in ("finish", "write")},
        },
        engines,
    )


def vllm_upgrade_order(
    hosts: t.Sequence[str], hostvars: t.Mapping[str, t.Any], canaries: int, batch: t.Any = 1
) -> dict[str, t.Any]:
    """The hosts with something to do, those that do not serve first, and those of a group side by side.

    :param canaries: how many come first; a group counts as one.
    :param batch: how many change at a time: a number, a percentage, or a list of both of which the last goes on.
    :returns: the first hosts under ``canary``, the others under ``rest``, and under ``control`` the one of these that
        serves with the old version while the canaries are watched; under ``peers`` by host those that change with it;
        and under ``serial``, for ``canary`` and ``rest``, how many hosts are changed at a time.
    """
    plans = {host: hostvars[host]["__vllm_upgrade_plan"] for host in hosts}
    groups = {host: _groups(hostvars[host]["__vllm_upgrade_seen"]["engines"]) for host in hosts}
    units: dict[str, list[list[str]]] = {"first": [], "todo": [], "done": []}
    for unit in hosts_together(hosts, groups):
        parts = {plans[host]["part"] for host in unit}
        units[next(part for part in units if part in parts)].append(unit)
    order = units["first"] + units["todo"]
    canary, rest = order[:canaries], order[canaries:]
    served = [host for unit in rest if unit in units["todo"] for host in unit if plans[host]["drain"]]
    return {
        "canary": [host for unit in canary for host in unit],
        "rest": [host for unit in rest for host in unit],
        "control": served[:1] if canary else [],
        "peers": {host: unit for unit in order for host in unit},
        "serial": {"canary": _serial(canary, batch), "rest": _serial(rest, batch)},
    }


def _groups(engines: Engines) -> list[str]:
    return [engine["group"] for engine in engines.values() if engine.get("group")]


def _serial(units: t.Sequence[t.Sequence[str]], batch: t.Any) -> list[int]:
    """What ``serial`` has to be for so many units at a time; a percentage is of all units, and one at least."""
    sizes = [str(size) for size in (batch if isinstance(batch, list) else [batch])]
    serial, done = [], 0
    while done < len(units):
        size = sizes[min(len(serial), len(sizes) - 1)]
        count = max(1, len(units) * int(size[:-1]) // 100) if size.endswith("%") else int(size)
        serial.append(sum(map(len, units[done : done + count])))
        done += count
    return serial or [1]


def vllm_upgrade_way(left: Engines, wants: Engines, plan: t.Mapping[str, t.Any]) -> dict[str, list[str]]:
    """After a failure on a host: how the engines that it touched get back to what was proved before.

    :param left: of vllm_info, after the failure.
    :returns: names under ``back`` (their new configuration is on disk), ``restart`` (their old one is, and nothing
        that is sure runs with it), ``serve`` (to be proved and admitted), ``lost`` (nothing was ever proved before).
    """
    way: dict[str, list[str]] = {"back": [], "restart": [], "serve": [], "lost": []}
    for name in [*plan["change"], *plan["finish"]]:
        engine = left[name]
        written = engine["config_digest"] == wants[name]["config_digest"]
        # Or in part: what was proved is under the digest on disk, and not what is there.
        torn = bool(engine["goes_back"]) and engine["goes_back"].get("config_digest") == engine["config_digest"]
        if (written or torn) and name not in plan["along"]:
            way["back" if engine["goes_back"] else "lost"].append(name)
        elif engine["state"] not in (*AWAKE, "headless"):
            way["restart"].append(name)
        if name not in way["lost"]:
            way["serve"].append(name)
    return way


def vllm_upgrade_way_together(
    way: t.Mapping[str, list[str]], peers: t.Iterable[str], hostvars: t.Mapping[str, t.Any], host: str
) -> dict[str, list[str]]:
    """The way back of a host that has engines of groups: where one of a group starts anew, all of it do.

    Without one that is lost, the others of its group cannot serve either.
    """
    lost, anew = set(), set()
    for peer in peers:
        left, others = hostvars[peer]["__vllm_upgrade_left"]["engines"], hostvars[peer]["__vllm_upgrade_way"]
        lost |= {left[name].get("group") for name in others["lost"]}
        anew |= {left[name].get("group") for name in others["back"] + others["restart"]}
    group = {name: one.get("group") for name, one in hostvars[host]["__vllm_upgrade_left"]["engines"].items()}
    gone = [name for name in way["serve"] if group[name] and group[name] in lost]
    found = {part: [name for name in names if name not in gone] for part, names in way.items()}
    stays = [name for name in found["serve"] if name not in found["back"] + found["restart"]]
    found["restart"] += [name for name in stays if group[name] and group[name] in anew]
    found["lost"] += gone
    return found


def _watched(values: t.Mapping[str, t.Any], name: str) -> t.Mapping[str, t.Any]:
    """What the last of a host's looks saw of an engine."""
    looks = (values.get("__vllm_upgrade_watch") or {}).get("results") or []
    seen = [one["engines"][name] for one in looks if name in (one.get("engines") or {})]
    return (seen[-1].get("watched") if seen else None) or {}


def vllm_upgrade_soak(
    canaries: t.Sequence[str], controls: t.Sequence[str], hostvars: t.Mapping[str, t.Any], max_latency_ratio: float
) -> dict[str, t.Any]:
    """What the soak has shown: ``failures`` by host, and ``notes`` on what it could not show.

    :param controls: hosts that were watched at the same time and are not upgraded: one, or none.
    """
    failures: dict[str, str] = {}
    notes: list[str] = []
    for host in canaries:
        values = hostvars[host]
        plan = values["__vllm_upgrade_plan"]
        bad = [values["__vllm_upgrade_watch_failed"]] if values.get("__vllm_upgrade_watch_failed") else []
        for name in [*plan["change"], *plan["finish"]]:
            seen = _watched(values, name)
            if not seen:
                continue
            if not seen["requests"]:
                notes.append(
                    f"{host}: no request came to '{name}' in {seen['seconds']:.0f} s; its golden alone is proved"
                )
                continue
            done = f"{seen['requests']} request(s) in {seen['seconds']:.0f} s, {seen['errors']} failed"
            notes.append(f"{host}: '{name}' had {done}")
            other = _watched(hostvars[controls[0]], name) if controls else {}
            if not other or min(seen["requests"], other["requests"]) < FEW_REQUESTS:
                notes.append(f"{host}: too few requests on it and on a host with the old version to compare latencies")
                continue
            for key, words in LATENCIES.items():
                now, old = seen["latency"].get(key), other["latency"].get(key)
                if now is None or not old:
                    continue
                old_says = f"{old * 1000:.1f} ms on {controls[0]} with the old version"
                says = f"{words} of '{name}' {now * 1000:.1f} ms, {old_says}"
                if now > old * max_latency_ratio:
                    bad.append(f"{says}: {now / old:.2f} times as long, where {max_latency_ratio:g} is allowed")
                else:
                    notes.append(f"{host}: {says}")
        if bad:
            failures[host] = "; ".join(bad)
    return {"failures": failures, "notes": notes}


def _speed(started: t.Any) -> float | None:
    return ((started or {}).get("speed") or {}).get("tokens_per_s")


def _timed(values: t.Mapping[str, t.Any], name: str) -> float | None:
    """How fast the start was that the run has made, also where the engine then went back."""
    started = (values.get("__vllm_upgrade_start") or {}).get("engines") or {}
    return ((started.get(name) or {}).get("speed") or {}).get("tokens_per_s")


def vllm_upgrade_rows(hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """A row for each engine that the inventory wants: from and to which version, how long, how fast, what came of it.

    ``outcome`` is unchanged, upgraded, rolled_back, failed, or waiting for a host that was not reached; in check mode
    it is WOULD.
    """
    rows = []
    for host in hosts:
        values = hostvars[host]
        plan, wants = values.get("__vllm_upgrade_plan"), values.get("__vllm_engine_wants")
        if not plan or not wants:
            continue
        seen = values["__vllm_upgrade_seen"]["engines"]
        after = (values.get("__vllm_upgrade_after") or {}).get("engines") or {}
        outcome = values.get("__vllm_upgrade_outcome") or {}
        for name, want in sorted(wants.items()):
            touched = name in plan["change"] + plan["finish"] + plan["write"]
            timed = touched and outcome.get("outcome", WOULD) != WOULD
            before = (seen.get(name) or {}).get("started")
            now = (after.get(name) or {}).get("started")
            rows.append(
                {
                    "name": host,
                    "engine": name,
                    "from": (before or {}).get("runtime_version"),
                    "to": want["runtime_version"],
                    "runs": ((now or {}).get("runtime_version") if after else (before or {}).get("runtime_version")),
                    "state": (after.get(name) or seen.get(name) or {}).get("state"),
                    "seconds": float(outcome["seconds"]) if timed else None,
                    "speed_before": _speed(before),
                    "speed_after": _timed(values, name) or _speed(now),
                    "outcome": (outcome.get("outcome") or "waiting") if touched else "unchanged",
                    "reason": outcome.get("reason") or "" if touched else "",
                    "weights_before": (seen.get(name) or {}).get("weights_digest") or None,
                    "weights_after": (after.get(name) or {}).get("weights_digest") or None,
                    "gpu_mib_before": held_mib(seen.get(name)),
                    "gpu_mib_after": held_mib(after.get(name)),
                    "proof": ((now or {}).get("proof") or {}).get("by"),
                    **_out(values, name),
                }
            )
    return rows


def _out(values: t.Mapping[str, t.Any], name: str) -> dict[str, t.Any]:
    """When an engine was out of rotation, and how many requests that has cut."""
    results = [
        (values.get(f"__vllm_upgrade_{key}") or {}).get("engines", {}).get(name) or {}
        for key in ("start", "serve", "served_again")
    ]
    outs = [one["out_of_service"] for one in results if one.get("out_of_service")]
    found = {"spans": [span(out) for out in outs]}
    steps = [step for out in outs for step in out.get("steps") or ()]
    now = ((values.get("__vllm_upgrade_after") or {}).get("engines") or {}).get(name) or {}
    if now.get("lease") and _ours(now):
        found["spans"].append(span_of_lease(now["lease"], now["started"]))
        steps += now["lease"]["steps"]
    before = values["__vllm_upgrade_seen"]["engines"].get(name) or {}
    cut = requests_cut(before.get("state") or "", results, steps) if found["spans"] else None
    return {**found, "requests_cut": cut}


def vllm_upgrade_lines(rows: t.Iterable[t.Mapping[str, t.Any]]) -> list[str]:
    """The rows in words, a line for each engine."""
    lines = []
    for row in rows:
        speeds = [row["speed_before"], row["speed_after"]]
        parts = [f"vLLM {row['from'] or '?'} -> {row['to']}", row["outcome"]]
        if row["outcome"] == "rolled_back":
            parts.append(f"runs {row['runs'] or '?'}")
        if row["seconds"] is not None:
            parts.append(f"{row['seconds']:.0f} s")
        if row["outcome"] == "upgraded" and None not in speeds:
            parts.append(f"{speeds[0]:g} -> {speeds[1]:g} tokens/s")
        if row["reason"]:
            parts.append(row["reason"])
        lines.append(f"{row['name']} {row['engine']}: {', '.join(parts)}")
    return lines


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "vllm_upgrade_lines": vllm_upgrade_lines,
            "vllm_upgrade_order": vllm_upgrade_order,
            "vllm_upgrade_plan": vllm_upgrade_plan,
            "vllm_upgrade_rows": vllm_upgrade_rows,
            "vllm_upgrade_soak": vllm_upgrade_soak,
            "vllm_upgrade_together": vllm_upgrade_together,
            "vllm_upgrade_way": vllm_upgrade_way,
            "vllm_upgrade_way_together": vllm_upgrade_way_together,
        }
