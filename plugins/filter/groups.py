# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filters on groups: engines of several hosts that serve one replica, and change as one. Pure.

Exactly one engine of a group, its head, has an API server; the others are headless.
"""

from __future__ import annotations

import typing as t

# What all engines of a group have in common, and where a host has it for those that do not say.
SAME = {
    "model": (),
    "served_model_name": (),
    "runtime_version": ("vllm_engine_runtime_version", "vllm_runtime_version"),
}


class Member(t.NamedTuple):
    """An engine of a group."""

    host: str
    engine: str
    headless: bool

    def __str__(self) -> str:
        return f"{self.host}/{self.engine}"


def vllm_group_faults(hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Any], names: t.Iterable[str]) -> list[str]:
    """What is wrong with these groups as the inventory has them, in sentences.

    :param hosts: all hosts of the inventory; those without engines do not matter.
    """
    faults = []
    wanted = sorted(set(names))
    declared: dict[str, list[tuple[Member, dict[str, t.Any]]]] = {name: [] for name in wanted}
    for host in hosts:
        values = hostvars[host]
        for engine in values.get("vllm_engine_instances") or []:
            if engine.get("group") in declared:
                member = Member(host, engine["name"], bool(engine.get("headless")))
                declared[engine["group"]].append((member, {key: _own(engine, values, key) for key in SAME}))
    for name in wanted:
        faults += _crooked(name, [member for member, _unused in declared[name]])
        for key in SAME:
            found = {str(own[key]): str(member) for member, own in declared[name]}
            if len(found) > 1:
                differ = ", ".join(f"{value} at {where}" for value, where in sorted(found.items()))
                faults.append(f"the engines of group '{name}' differ in {key}: {differ}")
    return faults


def _own(engine: t.Mapping[str, t.Any], values: t.Mapping[str, t.Any], key: str) -> t.Any:
    if key == "served_model_name" and not engine.get(key):
        return str(engine.get("model")).rpartition("/")[2]
    return engine.get(key) or next((values[name] for name in SAME[key] if values.get(name)), "")


def _crooked(name: str, members: t.Sequence[Member]) -> list[str]:
    heads = [str(member) for member in members if not member.headless]
    if len(heads) != 1:
        has = f"{len(heads)} engines with an API server ({', '.join(heads) or '-'})"
        return [f"group '{name}' has {has}; exactly one is its head, and headless is true for the others"]
    return [] if len(members) > 1 else [f"group '{name}' has no engine but {heads[0]}"]


def vllm_units(
    hosts: t.Sequence[str], hostvars: t.Mapping[str, t.Any], seen: str, run: str = ""
) -> dict[str, dict[str, t.Any]]:
    """The units of change: a host's engines and, with the head of a group, the headless engines of other hosts.

    A headless engine belongs to the unit of its head, wherever it is; so a host that has no others is in no order of
    its own.

    :param hosts: those that the play changes.
    :param seen: the variable with the result of vllm_info on each.
    :param run: the run that may have restarted them.
    :returns: ``units`` by host, each with ``part`` (first, todo, done; follows for a host that has no unit of its own),
        ``engines``, the ``heads`` among them, ``followers`` (the headless engines of these heads, by host) and
        ``renewed`` (this run has restarted all of them); and ``faults``, for which nothing may be changed.
    """
    found = {host: (hostvars[host].get(seen) or {}).get("engines") or {} for host in hosts}
    members: dict[str, list[Member]] = {}
    for host, engines in found.items():
        for name, engine in engines.items():
            if engine.get("group"):
                members.setdefault(engine["group"], []).append(Member(host, name, bool(engine.get("headless"))))
    faults = _strange(members, hostvars, found) if _any_groups(hosts, hostvars, members) else []
    units = {}
    for host, engines in found.items():
        own = [name for name, engine in engines.items() if not engine.get("headless")]
        heads = [name for name in own if engines[name].get("group")]
        followers: dict[str, list[str]] = {}
        for name in heads:
            for member in members[engines[name]["group"]]:
                if member.headless:
                    followers.setdefault(member.host, []).append(member.engine)
        every = [engines[name] for name in own]
        every += [found[where][name] for where, names in followers.items() for name in names]
        well = all(map(_well, every))
        renewed = all(engine.get("restarted_by") == run for engine in every) if run else False
        part = "follows" if engines and not own else "first" if not well else "done" if renewed else "todo"
        units[host] = {
            "part": part,
            "engines": own,
            "heads": [name for name in heads if _has_followers(members[engines[name]["group"]])],
            "followers": [{"host": where, "engines": names} for where, names in sorted(followers.items())],
            "renewed": renewed,
        }
    return {"units": units, "faults": faults}


def hosts_together(hosts: t.Sequence[str], groups: t.Mapping[str, t.Iterable[str]]) -> list[list[str]]:
    """The hosts, those of a group side by side, in the order in which the first of each comes.

    :param groups: of which groups a host has engines; a host of two brings both together.
    """
    units: list[list[str]] = []
    for host in hosts:
        of = set(groups[host])
        near = [unit for unit in units if of and any(of & set(groups[other]) for other in unit)]
        units = [unit for unit in units if unit not in near]
        units.append([*(other for unit in near for other in unit), host])
    place = {host: number for number, host in enumerate(hosts)}
    return sorted((sorted(unit, key=place.__getitem__) for unit in units), key=lambda unit: place[unit[0]])


def _has_followers(members: t.Iterable[Member]) -> bool:
    return any(member.headless for member in members)


def _well(engine: t.Mapping[str, t.Any]) -> bool:
    """As a change leaves it. A headless one whose lease is still held waits for its head to be proved."""
    if engine.get("headless"):
        return engine["state"] == "headless" and not engine["lease"]
    return bool(engine["state"] == "serving")


def _any_groups(hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Any], members: t.Mapping[str, t.Any]) -> bool:
    return bool(members) or any(
        engine.get("group") for host in hosts for engine in hostvars[host].get("vllm_engine_instances") or []
    )


def _strange(
    members: t.Mapping[str, t.Sequence[Member]], hostvars: t.Mapping[str, t.Any], found: t.Mapping[str, t.Any]
) -> list[str]:
    """Groups that are not here as the inventory has them, which may have hosts that the play leaves out."""
    declared: dict[str, list[Member]] = {}
    for host in hostvars:
        for engine in hostvars[host].get("vllm_engine_instances") or []:
            if engine.get("group"):
                member = Member(host, engine["name"], bool(engine.get("headless")))
                declared.setdefault(engine["group"], []).append(member)
    here = set(members) | {name for name, every in declared.items() if any(one.host in found for one in every)}
    faults = []
    for name in sorted(here):
        want, seen = declared.get(name) or [], members.get(name) or []
        faults += _crooked(name, want)
        away = sorted({str(member) for member in want if member.host not in found})
        absent = sorted({str(one) for one in want if one.host in found} - {str(one) for one in seen})
        differs = sorted(str(one) for one in seen if one not in want)
        if away:
            faults.append(f"group '{name}' changes as one, and this run leaves out {', '.join(away)}")
        if absent:
            faults.append(f"{', '.join(absent)} of group '{name}' are not chosen, or not of it on their hosts yet")
        if differs:
            faults.append(
                f"{', '.join(differs)} of group '{name}' are not so in the inventory: run baremetal.vllm.site"
            )
    return faults


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"vllm_group_faults": vllm_group_faults, "vllm_units": vllm_units}
