# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What playbooks sleep, wake, switch and schedule decide about the engines that share a GPU. Pure.

All of them work on ``engines`` of vllm_info, on ``vllm_engine_instances`` and ``vllm_switch_group`` of the host.
"""

from __future__ import annotations

import typing as t

from ansible_collections.baremetal.vllm.plugins.filter.fleet import DRAIN_STEPS
from ansible_collections.baremetal.vllm.plugins.plugin_utils._spans import phases

AWAKE = ("serving", "withdrawn", "draining", "drained")
# Nothing of such an engine is on a GPU.
DOWN = ("stopped", "failed")
# From which state by which way; from the others an engine is admitted.
COME = {"starting": "settling", "asleep": "wake", "waking": "wake", "stopped": "start", "failed": "start"}
RETURNING = {**COME, "starting": "start", "unknown": "restart"}
# MiB by which a sleeping engine's memory may differ between two looks.
GROWTH = 256
# What the calls of a run are registered as, in their order; the second are those of the way back after a failure.
CALLS = ("slept", "woken", "started", "admitted")
CALLS_BACK = ("reslept", "stopped", "rewoken", "restarted", "renewed", "readmitted")
# Steps of a moment, which no lane shows.
OUR_OWN = ("lease", "release")
WAKE_STEPS = ("wake", "wake_weights", "reload", "wake_kv", "reset_cache", "adapters")


def sharing(
    instances: t.Sequence[t.Mapping[str, t.Any]], group: t.Any = (), devices: t.Any = None
) -> dict[str, set[str] | None]:
    """Engine -> the engines of the host that cannot be awake beside it; None where nobody has said.

    A group, or a list of groups, is the inventory's own word and comes first. Else engines share whose ``gpus`` have
    one in common; with the ``devices`` of vllm_info an index and a UUID of the same one are told to be the same.
    """
    names = [str(one["name"]) for one in instances]
    if len(names) == 1:
        return {names[0]: set()}
    groups = _groups(group)
    uuids = {str(device["index"]): device["uuid"] for device in devices or ()}
    gpus = {str(one["name"]): {uuids.get(str(gpu), str(gpu)) for gpu in one.get("gpus") or ()} for one in instances}
    found: dict[str, set[str] | None] = {}
    for name in names:
        grouped = [one for one in groups if name in one]
        if grouped:
            found[name] = set().union(*grouped) - {name}
        elif gpus[name] and all(gpus.values()):
            # What a group has is settled there, for both sides.
            free = [other for other in names if other != name and not any(other in one for one in groups)]
            found[name] = {other for other in free if gpus[name] & gpus[other]}
        else:
            found[name] = None
    return found


def vllm_switch_plan(
    engines: t.Mapping[str, t.Any],
    instances: t.Sequence[t.Mapping[str, t.Any]],
    awake: t.Sequence[str],
    asleep: t.Mapping[str, int] | None = None,
    group: t.Any = (),
    owner: str = "switch",
    force: bool = False,
    level: int = 1,
) -> dict[str, t.Any]:
    """What is to be done on a host so that ``awake`` serve and ``asleep`` (engine -> level) sleep.

    The engines that share a GPU with one of ``awake`` sleep too, at ``level`` unless ``asleep`` says another.
    Engines that share are judged together, so one that may not be changed keeps its neighbours as they are, and no
    others. ``sleep`` is by level; ``wake``, ``start`` and ``admit`` are names; ``going`` those of ``sleep`` that serve
    now. ``held``, ``settling`` and ``refused`` say in sentences what is left as it is, and why.
    """
    devices = next((seen["gpus"] for seen in engines.values() if seen.get("gpus")), None)
    others = sharing(instances, group, devices)
    plan: dict[str, t.Any] = {"sleep": [], "wake": [], "start": [], "admit": [], "going": []}
    plan |= {"held": [], "settling": [], "refused": []}
    wanted: dict[str, int] = {}  # level, 0 for awake
    for name in awake:
        if name in others and others[name] is None:
            plan["refused"].append(
                f"which engines share a GPU with '{name}' is not said: give every engine of the host its gpus, or name "
                "those that share in vllm_switch_group"
            )
        wanted |= {other: int(level) for other in others.get(name) or () if other not in awake}
    wanted |= {name: int(one) for name, one in (asleep or {}).items()}
    for name in awake:
        rivals = sorted((others.get(name) or set()).intersection(awake))
        if name in (asleep or {}) or rivals:
            plan["refused"].append(f"'{name}' cannot be awake beside {rivals or 'its own sleep'}")
        wanted[name] = 0
    for name in sorted(wanted):
        if name not in engines or name not in others:
            there = ", ".join(sorted(set(engines) & set(others))) or "none"
            plan["refused"].append(f"there is no engine '{name}' here; engines of this host: {there}")
    if plan["refused"]:
        return plan
    levels: dict[int, list[str]] = {}
    for names in _together(sorted(wanted), others):
        part = _part(engines, {name: wanted[name] for name in names}, others, owner, force)
        if not (part["refused"] or part["held"] or part["settling"]):
            part["refused"] = _misfits(engines, instances, devices, part)
        plan["refused"] += part["refused"]
        plan["held"] += part["held"]
        plan["settling"] += part["settling"]
        if part["refused"] or part["held"] or part["settling"]:
            continue
        for key in ("wake", "start", "admit", "going"):
            plan[key] += part[key]
        for name in part["sleep"]:
            levels.setdefault(wanted[name], []).append(name)
    plan["sleep"] = [{"level": one, "engines": names} for one, names in sorted(levels.items())]
    return plan


def _together(names: t.Sequence[str], others: t.Mapping[str, t.Any]) -> list[list[str]]:
    """The names in heaps: those that share, directly or through others, in one."""
    heaps: list[list[str]] = []
    for name in names:
        near = others.get(name) or set()
        joined = [heap for heap in heaps if near.intersection(heap)]
        heaps = [heap for heap in heaps if heap not in joined]
        heaps.append(sorted([name, *(other for heap in joined for other in heap)]))
    return sorted(heaps)


def _part(
    engines: t.Mapping[str, t.Any],
    wanted: t.Mapping[str, int],
    others: t.Mapping[str, t.Any],
    owner: str,
    force: bool,
) -> dict[str, list[t.Any]]:
    """The plan for engines that share with each other."""
    part: dict[str, list[t.Any]] = {
        key: [] for key in ("sleep", "wake", "start", "admit", "going", "held", "settling", "refused")
    }
    for name, level in wanted.items():
        seen = engines[name]
        state = seen["state"]
        if seen.get("group") and (level or state not in AWAKE):
            part["refused"].append(
                f"'{name}' is of group '{seen['group']}', which neither sleeps nor wakes: use "
                "baremetal.vllm.rolling_restart, or leave it out of the engines that take turns"
            )
            continue
        if state == "unknown":
            why = "; ".join(seen["reasons"])
            part["refused"].append(f"'{name}' is unknown ({why}): restart it with vllm_engine, or stop it")
            continue
        beside = [other for other in others.get(name) or () if wanted.get(other) == 0 and _holds(engines[other])]
        if level:
            action = _to_sleep(name, seen, beside, part["refused"])
        else:
            action = COME.get(state, "admit" if state != "serving" or _open(seen, owner) else "")
        if not action:
            continue
        lease = seen["lease"]
        if action == "settling" or (seen.get("unit") or {}).get("active_state") == "deactivating":
            part["settling"].append(f"'{name}' is {state}: wait until it has settled")
        elif lease and not lease["expired"] and lease["owner"] != owner and not force:
            part["held"].append(f"'{name}' is held by {lease['owner']} ({lease['reason'] or 'no reason given'})")
        else:
            part[action].append(name)
            if action == "sleep" and state == "serving":
                part["going"].append(name)
    return part


def _to_sleep(name: str, seen: t.Mapping[str, t.Any], beside: t.Sequence[str], refused: list[str]) -> str:
    """What to do with an engine that is to sleep; ``beside`` are those that are awake in its place already."""
    state, record = seen["state"], seen.get("sleep") or {}
    if state in DOWN:
        return ""
    if state == "starting":
        return "settling"
    if state == "asleep":
        # Another level, or a sleep that was not proved, would take a wake first: not beside one that is awake.
        deep = (seen["level"] or 0) > 0
        return "" if beside or (deep and record.get("proved", True)) else "sleep"
    if state == "waking" and beside:
        refused.append(f"'{name}' is half awake beside {', '.join(beside)}: stop it with vllm_engine state=stopped")
        return ""
    if state in AWAKE and (seen.get("api") or {}).get("dev_mode") is False:
        refused.append(f"'{name}' has no development endpoints, so it cannot sleep: set dev_mode, and restart it")
        return ""
    return "sleep"


def _holds(seen: t.Mapping[str, t.Any]) -> bool:
    return seen["state"] in (*AWAKE, "starting")


def _open(seen: t.Mapping[str, t.Any], owner: str) -> bool:
    """It serves, and a lease is left of a run that was killed at its very end."""
    lease = seen["lease"]
    return bool(lease) and (lease["owner"] == owner or lease["expired"])


def _misfits(
    engines: t.Mapping[str, t.Any],
    instances: t.Sequence[t.Mapping[str, t.Any]],
    devices: t.Sequence[t.Mapping[str, t.Any]] | None,
    part: t.Mapping[str, list[t.Any]],
) -> list[str]:
    """Engines whose memory cannot be there even if those that go to sleep leave nothing behind, with the numbers."""
    found = []
    ours = {str(pid) for seen in engines.values() for pid in (seen.get("unit") or {}).get("pids") or ()}
    for name in [*part["wake"], *part["start"]]:
        needs = _needs(name, engines[name], instances, devices)
        if needs and not devices:
            found.append(f"'{name}' needs {needs} MiB, and no GPU can be seen: {engines[name]['unseen'].get('gpu')}")
        for device in devices or ():
            need = needs.get(device["uuid"], 0)
            held = {str(pid): mib or 0 for pid, mib in device["processes"].items()}
            going = {
                str(pid) for other in part["sleep"] for pid in (engines[other].get("unit") or {}).get("pids") or ()
            }
            room = device["free_mib"] + sum(mib for pid, mib in held.items() if pid in going)
            if need > room:
                strange = [f"process {pid} ({mib} MiB)" for pid, mib in held.items() if pid not in ours]
                found.append(
                    f"'{name}' needs {need} MiB on {device['uuid']} and could have {room} MiB at most, with "
                    f"{', '.join(part['sleep']) or 'nothing'} put to sleep; held by others: "
                    + (", ".join(strange) or "nothing that can be seen")
                )
    return found


def _needs(
    name: str,
    seen: t.Mapping[str, t.Any],
    instances: t.Sequence[t.Mapping[str, t.Any]],
    devices: t.Sequence[t.Mapping[str, t.Any]] | None,
) -> dict[str, int]:
    """MiB by GPU UUID, as far as it is known: what a sleep gave back, or what the declaration claims for a start."""
    if seen["state"] == "asleep":
        return {uuid: int(mib) for uuid, mib in ((seen.get("sleep") or {}).get("freed_mib") or {}).items()}
    declared = next(one for one in instances if one["name"] == name)
    share = (declared.get("config") or {}).get("gpu-memory-utilization")
    gpus = {str(gpu) for gpu in declared.get("gpus") or ()}
    if seen["state"] not in DOWN or share is None:
        return {}
    return {
        device["uuid"]: int(float(share) * device["total_mib"])
        for device in devices or ()
        if gpus & {device["uuid"], str(device["index"])}
    }


def vllm_wake_plan(engines: t.Mapping[str, t.Any], names: t.Sequence[str] = ()) -> dict[str, list[t.Any]]:
    """What is to be done so that ``names``, or all, are awake again that were put to sleep; others are left alone.

    ``start`` are those that have died or were stopped meanwhile, ``admit`` those whose sleep was interrupted.
    """
    plan: dict[str, list[t.Any]] = {"sleep": [], "wake": [], "start": [], "admit": [], "held": []}
    for name in names or sorted(engines):
        seen = engines[name]
        purpose = (seen["lease"] or {}).get("purpose")
        if seen["state"] in ("asleep", "waking") or purpose in ("awake", "stopped for sleep"):
            plan["wake"].append(name)
        elif purpose == "asleep" and seen["state"] in DOWN:
            plan["start"].append(name)
        elif purpose == "asleep" and seen["state"] in AWAKE:
            plan["admit"].append(name)
    return plan


def vllm_switch_rivals(engines: t.Mapping[str, t.Any], names: t.Sequence[str], group: t.Any = ()) -> list[str]:
    """Which of ``names`` cannot wake as things are, in sentences: of a group that is declared, one is awake at a time.

    Engines that merely have a GPU in common may both fit; whether they do, the memory says.
    """
    found = []
    for one in _groups(group):
        for name in sorted(one.intersection(names)):
            others = [
                f"{other} ({engines[other]['state']})"
                for other in sorted(one - {name})
                if other in names or (other in engines and _holds(engines[other]))
            ]
            if others:
                found.append(f"'{name}' shares its GPU with {', '.join(others)}")
    return found


def _groups(group: t.Any) -> list[set[str]]:
    """A list of names is one group, else it is a list of groups."""
    group = list(group or ())
    return [{str(name) for name in one} for one in ([group] if group and isinstance(group[0], str) else group)]


def vllm_switch_return(
    engines: t.Mapping[str, t.Any], before: t.Mapping[str, t.Any], plan: t.Mapping[str, t.Any]
) -> dict[str, list[str]]:
    """The way back after a change that failed: ``engines`` as they are now, ``before`` as they were, and its plan.

    What did not hold the GPU before must not hold it now: ``sleep`` for those that serve, ``stop`` for those of which
    nothing else is sure. Then those come back that were awake: ``wake``, ``start``, ``admit``, and ``restart`` where
    what they do is unknown; of those that the plan has under ``renew``, whatever state they are in.
    """
    way: dict[str, list[str]] = {key: [] for key in ("sleep", "stop", "wake", "start", "restart", "admit")}
    for name in [*plan["wake"], *plan["start"]]:
        state = engines[name]["state"]
        if state == "serving":
            way["sleep"].append(name)
        elif state not in ("asleep", *DOWN) or (state == "asleep" and _swollen(engines[name])):
            way["stop"].append(name)
    for name in [name for one in plan["sleep"] for name in one["engines"] if before[name]["state"] in AWAKE]:
        state = engines[name]["state"]
        if state != "serving":
            way[RETURNING.get(state, "admit")].append(name)
    way["restart"] += [name for name in plan.get("renew") or () if engines[name]["state"] != "serving"]
    return way


def _swollen(seen: t.Mapping[str, t.Any]) -> bool:
    """It says that it sleeps, and holds more than when it fell asleep: a wake that failed has left memory behind."""
    slept = (seen.get("sleep") or {}).get("resident_mib") or {}
    pids = {str(pid) for pid in (seen.get("unit") or {}).get("pids") or ()}
    return any(
        sum(mib or 0 for pid, mib in device["processes"].items() if str(pid) in pids) > slept[device["uuid"]] + GROWTH
        for device in seen.get("gpus") or ()
        if device["uuid"] in slept
    )


def vllm_switch_rows(hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """One row for each host that a run has looked at: what it changed, and where the seconds went; or why it failed.

    Engines of one call are handled side by side, so the slowest stands for all of them. ``overhead_s`` is Ansible's own
    time, and that of steps that have no column.
    """
    rows = []
    for host in hosts:
        values = hostvars[host]
        plan = values.get("__vllm_switch_plan")
        if plan is None:
            continue
        calls = [engines for key in CALLS for result in _called(values, key) if (engines := result.get("engines"))]
        slowest = [max(engines.values(), key=lambda one: one.get("elapsed") or 0.0) for engines in calls]
        begun, ended = values.get("__vllm_switch_begun"), values.get("__vllm_switch_ended")
        seconds = sum(one.get("elapsed") or 0.0 for one in slowest)
        if begun and ended:
            seconds = float(ended) - float(begun)
        spent: dict[str, float] = {}
        for one in slowest:
            for step, took in (one.get("timings") or {}).items():
                spent[step] = spent.get(step, 0.0) + took
        row = {
            "drain_s": sum(spent.get(step, 0.0) for step in DRAIN_STEPS),
            "sleep_s": spent.get("sleep", 0.0),
            "wake_s": sum(spent.get(step, 0.0) for step in WAKE_STEPS),
            "start_s": spent.get("stop", 0.0) + spent.get("start", 0.0),
            "prove_s": spent.get("prove", 0.0),
        }
        row["overhead_s"] = seconds - sum(row.values())
        changed = any(one.get("changed") for engines in calls for one in engines.values())
        failed = values.get("__vllm_switch_said")
        slept = [name for one in plan["sleep"] for name in one["engines"]]
        going = [*slept, *plan["wake"], *plan["start"], *plan["admit"]]
        waits = bool(going) and not ended
        rows.append(
            {
                "name": host,
                "outcome": "failed" if failed else "waiting" if waits else "changed" if changed else "unchanged",
                "reason": str(failed or ""),
                "engines": going,
                **_lanes(values),
                "changed": changed,
                "slept": slept,
                "woken": [*plan["wake"], *plan["start"]],
                "held": plan["held"],
                "seconds": round(seconds, 3),
                **{key: round(value, 3) for key, value in row.items()},
            }
        )
    return rows


def _lanes(values: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The states in which the calls of this run have left the engines, and when each of their steps was."""
    found: dict[str, list[t.Mapping[str, t.Any]]] = {}
    for key in (*CALLS, *CALLS_BACK):
        for result in _called(values, key):
            for name, one in (result.get("engines") or {}).items():
                found.setdefault(name, []).append(one)
    states = {name: (calls[-1].get("after") or {}).get("state") for name, calls in found.items()}
    spans = []
    for name, calls in found.items():
        steps = [step for one in calls for step in one.get("steps") or () if step["step"] not in OUR_OWN]
        if not steps:
            continue
        started = next((one["started"] for one in reversed(calls) if one.get("started")), None)
        since = float(steps[0]["at"]) - float(steps[0]["seconds"])
        ended = not calls[-1].get("failed") or states[name] == "serving"
        seconds = round(float(steps[-1]["at"]) - since, 3) if ended else None
        spans.append({"engine": name, "since": since, "seconds": seconds, "phases": phases(steps, started)})
    return {"states": states, "spans": spans}


def _called(values: t.Mapping[str, t.Any], key: str) -> list[t.Mapping[str, t.Any]]:
    return _results(values.get(f"__vllm_switch_{key}") or {})


def _results(registered: t.Mapping[str, t.Any]) -> list[t.Mapping[str, t.Any]]:
    """One result, or those of a loop."""
    return list(registered["results"]) if "results" in registered else [registered]


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "vllm_switch_plan": vllm_switch_plan,
            "vllm_switch_return": vllm_switch_return,
            "vllm_switch_rivals": vllm_switch_rivals,
            "vllm_switch_rows": vllm_switch_rows,
            "vllm_wake_plan": vllm_wake_plan,
        }
