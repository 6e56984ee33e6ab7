# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filters of every playbook that takes engines out: which pools lose engines, and who has to go on serving there."""

from __future__ import annotations

import typing as t

from ansible_collections.baremetal.vllm.plugins.filter.fleet import admission_of, gate_addresses, vllm_gates

Values = t.Mapping[str, t.Any]
# In the place of a number: all others of the pool.
ALL = "all"


def vllm_models(engines: t.Mapping[str, t.Any]) -> dict[str, list[str]]:
    """By engine the names of the model that it really serves, of those that have answered; adapters are not models."""
    found = {}
    for name, engine in engines.items():
        served = (engine["api"] or {}).get("served")
        if served:
            found[name] = [one["name"] for one in served if not one["parent"]]
    return found


def vllm_staying(
    hosts: t.Iterable[str],
    hostvars: Values,
    batch: t.Iterable[str],
    min_serving: t.Any = None,
    default: t.Any = ALL,
    routers: t.Iterable[str] = (),
) -> list[dict[str, t.Any]]:
    """The pools that lose engines to the batch, for module vllm_capacity.

    A pool is the engines of one model, and of one pool of the routers or of one proxy where such are declared. A group
    that serves one replica across hosts counts as one, by its head.

    :param hosts: those whose engines count.
    :param batch: hosts that name in ``__vllm_going`` the engines that go. What vllm_models has seen of a host is in
        ``__vllm_models``; without it the declaration counts.
    :param min_serving: a number for each pool, or numbers by pool or model; ``default`` is for the others.
    """
    counting, changing = set(hosts), set(batch)
    known = {host: hostvars[host] for host in sorted(counting | changing)}
    gates = vllm_gates(known, known)
    counted, going = set(), set()
    members: dict[tuple[str, str], list[str]] = {}
    fronts = _fronts(routers, hostvars)
    for host, values in known.items():
        leaving = set(values.get("__vllm_going") or ()) - _headless(values) if host in changing else set()
        seen = values.get("__vllm_models") or {}
        for name in sorted(leaving - {engine["name"] for engine in _instances(values)}):
            # Not in the inventory, so nobody can say where to ask about it.
            going.add(f"{host}/{name}")
            gates[f"{host}/{name}"] = "uncounted:undeclared"
            for model in seen.get(name) or ():
                members.setdefault((model, ""), []).append(f"{host}/{name}")
        for engine in _instances(values):
            key = f"{host}/{engine['name']}"
            if host in counting:
                counted.add(key)
            if engine["name"] in leaving:
                going.add(key)
            for model in _models(engine, seen.get(engine["name"])):
                for pool in _pools(host, values, engine, fronts):
                    members.setdefault((model, pool), []).append(key)
    found = []
    for (model, pool), keys in sorted(members.items()):
        others = [key for key in keys if key in counted and key not in going]
        wanted = _wanted(min_serving, default, model, pool)
        if going.intersection(keys):
            found.append(
                {
                    "name": f"model '{model}'" + (f" in pool '{pool}'" if pool else ""),
                    "min_serving": len(others) if wanted == ALL else int(wanted),
                    "going": {key: gates[key] for key in keys if key in going},
                    "others": {key: gates[key] for key in others},
                }
            )
    return found


def vllm_min_serving_faults(
    min_serving: t.Any, hosts: t.Iterable[str], hostvars: Values, routers: t.Iterable[str] = ()
) -> list[str]:
    """What is wrong with a ``min_serving``: nothing, or sentences."""
    known = set()
    if isinstance(min_serving, t.Mapping):
        fronts = _fronts(routers, hostvars)
        for host in hosts:
            for engine in _instances(hostvars[host]):
                known.update([_model(engine), *_pools(host, hostvars[host], engine, fronts)])
    numbers = min_serving if isinstance(min_serving, t.Mapping) else {"": min_serving}
    faults = [
        f"{value!r} is no number of engines" + (f" ('{name}')" if name else "")
        for name, value in numbers.items()
        if not str(value).isdigit()
    ]
    strange = sorted(str(name) for name in numbers if name and str(name) not in known)
    if strange:
        names = ", ".join(sorted(known - {""})) or "none"
        faults.append(f"{', '.join(strange)} is neither a model nor a pool of these engines, which have {names}")
    return faults


def _wanted(min_serving: t.Any, default: t.Any, model: str, pool: str) -> t.Any:
    if isinstance(min_serving, t.Mapping):
        return min_serving.get(pool, min_serving.get(model, default)) if pool else min_serving.get(model, default)
    return default if min_serving is None else min_serving


def _instances(values: Values) -> list[Values]:
    """The engines of a host that requests can come to."""
    return [engine for engine in values.get("vllm_engine_instances") or [] if not engine.get("headless")]


def _headless(values: Values) -> set[str]:
    return {engine["name"] for engine in values.get("vllm_engine_instances") or [] if engine.get("headless")}


def _model(instance: Values) -> str:
    """The name that clients use, as the role vllm_engine has it."""
    return str(instance.get("served_model_name") or str(instance["model"]).rpartition("/")[2])


def _models(instance: Values, seen: t.Sequence[str] | None) -> list[str]:
    """What it serves: by its own word, where it gave one that differs from the declaration."""
    declared = _model(instance)
    return [declared] if not seen or declared in seen else list(seen)


def _fronts(routers: t.Iterable[str], hostvars: Values) -> dict[tuple[str, int], set[str]]:
    """Names of the pools that are declared for the routers, by address and port of their servers."""
    fronts: dict[tuple[str, int], set[str]] = {}
    for host in routers:
        for pool in hostvars[host].get("vllm_router_pools") or []:
            for server in pool["servers"]:
                fronts.setdefault((str(server["address"]), int(server["port"])), set()).add(str(pool["name"]))
    return fronts


def _pools(host: str, values: Values, engine: Values, fronts: t.Mapping[tuple[str, int], set[str]]) -> list[str]:
    """The pools that an engine is in; [""] for none."""
    admission = admission_of(values, engine)
    if admission["backend"] == "haproxy":
        return [str(admission.get("proxy") or "")]
    places = [(address, int(engine["port"])) for address in gate_addresses(host, values) if engine.get("port")]
    return sorted({name for place in places for name in fronts.get(place, ())}) or [""]


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "vllm_min_serving_faults": vllm_min_serving_faults,
            "vllm_models": vllm_models,
            "vllm_staying": vllm_staying,
        }
