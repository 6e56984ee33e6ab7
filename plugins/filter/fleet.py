# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filters of the playbooks: what would be a thicket in Jinja is a few tested lines here."""

from __future__ import annotations

import datetime
import typing as t

from ansible_collections.baremetal.vllm.plugins.plugin_utils._spans import held_mib, requests_cut, span, span_of_lease

# Steps of a drain, whose time is the requests' and the router's, not ours.
DRAIN_STEPS = ("withdraw", "await_router", "await_idle", "close", "await_closed", "pause")
# The states of an engine whose process does what it should, be it in service or not.
RUNNING = ("serving", "withdrawn", "draining", "drained", "headless")
# Owners of leases on engines whose turn it is not.
TAKE_TURNS = ("switch", "schedule")
STATUS = "%-16s %-12s %-11s %-12s %-9s %-8s %8s %8s %8s %8s %-26s %-26s %s"
HEAD = (
    *("HOST", "ENGINE", "STATE", "SINCE (UTC)", "VERSION", "WEIGHTS", "GPU_MIB", "HOST_MIB", "REQUESTS", "SESSIONS"),
    *("LEASE", "LAST", "NOTE"),
)


def vllm_gates(hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Any]) -> dict[str, str]:
    """HOST/ENGINE -> where to ask whether it serves, for every engine that the inventory declares on these hosts.

    Of a gate this is its URL, of HAProxies haproxy://ADDRESS:PORT,.../PROXY/SERVER where all are asked over TCP. About
    what is left, uncounted:BACKEND, only its own host can be asked, and vllm_capacity says so.
    """
    gates = {}
    for host in sorted(hosts):  # from a set operation, in no order
        values = hostvars[host]
        address = gate_addresses(host, values)[0]
        for engine in values.get("vllm_engine_instances") or []:
            if engine.get("headless"):
                continue  # requests come to the head of its group
            admission = admission_of(values, engine)
            if admission["backend"] == "gate" and engine.get("port") and values.get("vllm_engine_gate", True):
                where = f"http://{f'[{address}]' if ':' in address else address}:{engine['port']}"
            else:
                where = _balancers(admission)
            gates[f"{host}/{engine['name']}"] = where
    return gates


def gate_addresses(host: str, values: t.Mapping[str, t.Any]) -> list[str]:
    """Where a host's gate is asked, and by which other addresses the inventory may call it."""
    own = values.get("vllm_gate_address")
    named = [own] if own and own not in ("0.0.0.0", "::") else []  # noqa: S104 - the default: listens on all
    return [*named, *([values["ansible_host"]] if values.get("ansible_host") else []), host]


def admission_of(values: t.Mapping[str, t.Any], engine: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """A host's default and what is the engine's own, as the role vllm_engine joins the two."""
    fleet, own = values.get("vllm_engine_admission") or {}, engine.get("admission") or {}
    backend = own.get("backend") or fleet.get("backend") or "gate"
    default = fleet if backend == (fleet.get("backend") or "gate") else {}
    both = {**default, **{key: value for key, value in own.items() if value is not None}}
    return {**both, "backend": backend}


def _balancers(admission: t.Mapping[str, t.Any]) -> str:
    backend = "none" if admission["backend"] == "gate" else admission["backend"]
    sockets = admission.get("sockets") or []
    if backend != "haproxy" or not sockets or any(one.startswith("/") for one in sockets):
        return f"uncounted:{backend}"
    return f"haproxy://{','.join(sockets)}/{admission.get('proxy')}/{admission.get('server')}"


def vllm_roll_rows(hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """One row for each engine that a roll has brought back: where the seconds out of rotation went, what was before.

    A group has the row of its head, which names the headless engines that were changed with it.
    """
    rows = []
    for host in hosts:
        values = hostvars[host]
        restarted = values.get("__vllm_roll_restart") or {}
        seen = (values.get("__vllm_roll_seen") or {}).get("engines") or {}
        for name, engine in _brought_back(values).items():
            out = engine["out_of_service"]
            timings, started = out["timings"], out["started"] or {}
            row = {
                "drain_s": sum(timings.get(step, 0.0) for step in DRAIN_STEPS),
                "stop_s": timings.get("stop", 0.0),
                "boot_s": started.get("boot_s", 0.0),
                "warm_s": started.get("warm_s", 0.0),
            }
            row["overhead_s"] = out["seconds"] - sum(row.values())
            before = seen.get(name) or {}
            renewed = (restarted.get("engines") or {}).get(name) or {}
            rows.append(
                {
                    "name": host,
                    "engine": name,
                    "out_of_rotation_s": round(out["seconds"], 3),
                    **{key: round(value, 3) for key, value in row.items()},
                    "changed": bool(restarted.get("changed")),
                    "outcome": "restarted",
                    **_before(before),
                    "runs": started.get("runtime_version"),
                    "weights_after": started.get("weights") or None,
                    "gpu_mib_after": sum(out["gpu_mib"].values()) if out.get("gpu_mib") else None,
                    "requests_cut": requests_cut(before.get("state") or "", [engine, renewed], out.get("steps") or ()),
                    "proof": (engine.get("proof") or started.get("proof") or {}).get("by"),
                    "spans": [span(out)],
                    **_headless(host, name, hostvars),
                }
            )
    return rows


def _brought_back(values: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """What released the lease of each engine: the restart itself, where one was admitted all along, though unknown."""
    results = {**_engines(values, "__vllm_roll_restart")}
    for name, one in _engines(values, "__vllm_roll_serve").items():
        if one.get("out_of_service") or name not in results:
            results[name] = one
    return {name: one for name, one in results.items() if one.get("out_of_service")}


def _before(engine: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    return {
        "from": (engine.get("started") or {}).get("runtime_version"),
        "weights_before": engine.get("weights_digest") or None,
        "gpu_mib_before": held_mib(engine),
    }


def vllm_roll_others(
    hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Any], done: t.Collection[str] = ()
) -> list[dict[str, t.Any]]:
    """One row for each engine that a roll has not brought back: failed and why, waiting, or done before."""
    rows = []
    for host in hosts:
        values = hostvars[host]
        back = _brought_back(values)
        failed = values.get("__vllm_roll_failed")
        left = _engines(values, "__vllm_evidence") if failed else {}
        for name, engine in _engines(values, "__vllm_roll_seen").items():
            if name in back:
                continue
            now = left.get(name) or {}
            lease = now.get("lease") or {}
            rows.append(
                {
                    "name": host,
                    "engine": name,
                    "outcome": "failed" if failed else "done" if host in done else "waiting",
                    "reason": str(failed or ""),
                    "state": now.get("state") if failed else engine["state"],
                    **_before(engine),
                    "gpu_mib_after": held_mib(now),
                    "requests_cut": requests_cut(engine["state"], [], lease.get("steps") or ()) if failed else None,
                    "spans": [span_of_lease(lease, now.get("started"))] if lease else [],
                }
            )
    return rows


def _engines(values: t.Mapping[str, t.Any], registered: str) -> t.Mapping[str, t.Any]:
    return (values.get(registered) or {}).get("engines") or {}


def _headless(host: str, name: str, hostvars: t.Mapping[str, t.Any]) -> dict[str, list[str]]:
    """The engines that were changed with the head of a group; nothing for an engine of none."""

    def group(where: str, engine: str) -> t.Any:
        return (((hostvars[where].get("__vllm_roll_seen") or {}).get("engines") or {}).get(engine) or {}).get("group")

    own = group(host, name)
    if not own:
        return {}
    unit = hostvars[host]["__vllm_roll_units"]["units"][host]
    parts = [(part["host"], engine) for part in unit["followers"] for engine in part["engines"]]
    return {"headless": [f"{where}/{engine}" for where, engine in parts if group(where, engine) == own]}


def _notes(engine: t.Mapping[str, t.Any]) -> list[str]:
    """Why an engine is in its state, who has it there for what, and what is due for it."""
    notes = list(engine["reasons"])
    if (lease := engine["lease"]) and lease["reason"]:
        notes.append(f"held until {_moment(lease['expires'], '%Y-%m-%d %H:%M')}: {lease['reason']}")
    if engine.get("group"):
        notes.append(f"of group {engine['group']}")
    if engine["stale"]:
        notes.append("its configuration on disk is newer than its process: restart due")
    if engine.get("leak"):
        notes.append(f"{engine['leak']}: restart due")
    if preload := engine.get("preload"):
        source = preload["weights_source"] or "an unknown place"
        where = "" if engine["state"] in ("stopped", "failed", "starting") else f"weights from {source}, "
        notes.append(
            f"{where}preload daemon {preload['daemon']} {preload['state']}, next start {preload['next_start']}"
        )
        notes += preload["why"]
    return notes


def _requests(engine: t.Mapping[str, t.Any]) -> int | str:
    """Running and waiting, of all ranks; "?" where an engine that runs does not say."""
    if engine.get("headless"):
        return "-"
    metrics = (engine["api"] or {}).get("metrics") or {}
    counts = [metrics.get("running"), metrics.get("waiting")]
    return "?" if None in counts else sum(sum(count.values()) for count in counts if count)


def _gpu_mib(engine: t.Mapping[str, t.Any]) -> int | str:
    """What its processes hold on all devices; "?" where NVML does not say, "-" without a GPU."""
    held = held_mib(engine)
    return held if held is not None else "?" if engine["gpus"] else "-"


def _since(engine: t.Mapping[str, t.Any]) -> str:
    """When its process was proved, or when its last change ended or, with a lease, began: the latest of these."""
    times = [(engine[key] or {}).get(field) for key, field in (("started", "at"), ("last", "at"), ("lease", "since"))]
    known = [one for one in times if one]
    if not known:
        return "-"
    return _moment(max(known))


def _moment(seconds: float, shape: str = "%m-%d %H:%M") -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime(shape)


def _version(engine: t.Mapping[str, t.Any]) -> str:
    """What the process says it is, or else what is configured."""
    return str((engine["api"] or {}).get("version") or engine["runtime_version"]).partition("+")[0]


def _status_row(host: str, name: str, engine: t.Mapping[str, t.Any]) -> tuple[t.Any, ...]:
    lease, last = engine["lease"], engine["last"]
    return (
        host,
        name,
        engine["state"] + ("" if engine["level"] is None else f" {engine['level']}"),
        _since(engine),
        _version(engine),
        engine["weights_digest"].rpartition(":")[2][:8] or "-",
        _gpu_mib(engine),
        (engine["memory"] or {}).get("rss_mib", "-"),
        _requests(engine),
        engine["gate"]["sessions"] if engine["gate"] else "?" if engine["has_gate"] else "-",
        f"{lease['owner']} {lease['run']}{' (expired)' if lease['expired'] else ''}".strip() if lease else "-",
        f"{last.get('wanted')} {last.get('run') or last.get('owner') or ''}".strip() if last else "-",
        "; ".join(_notes(engine)),
    )


def vllm_status_rows(hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Any]) -> list[str]:
    """The fleet as a table, one line for each engine; a host that cannot say is a line, too."""
    lines = [STATUS % HEAD]
    for host in hosts:
        seen = hostvars[host].get("__vllm_status_seen") or {"unreachable": True, "msg": "it was not asked"}
        if seen.get("unreachable") or seen.get("failed"):
            state = "unreachable" if seen.get("unreachable") else "unknown"
            why = str(seen.get("msg") or "").strip().splitlines() or [""]
            lines.append(STATUS % (host, "-", state, *["-"] * 9, why[0]))
        lines += [STATUS % _status_row(host, *one) for one in sorted((seen.get("engines") or {}).items())]
    return [line.rstrip() for line in lines]


def vllm_evidence(seen: t.Mapping[str, t.Any]) -> str:
    """What a host shows after a failure: for each engine its state, its unit, who holds the GPUs, its journal's end."""
    lines = [] if seen.get("engines") else [f"Nothing more is known of it: {seen.get('msg') or 'it did not answer'}"]
    for name, engine in sorted((seen.get("engines") or {}).items()):
        lines.append(f"{name} is {engine['state']}" + "".join(f"; {reason}" for reason in engine["reasons"]))
        unit = engine["unit"]
        if unit:
            lines.append(
                f"  unit: {unit['active_state']}/{unit['sub_state']}, result {unit['result']}, "
                f"{unit['n_restarts']} restart(s) by itself, main process {unit['main_pid']}"
            )
        own = unit["pids"] if unit else []
        for gpu in engine["gpus"] or []:
            held = [
                f"process {pid}{' (its own)' if int(pid) in own else ''} {'?' if mib is None else mib} MiB"
                for pid, mib in gpu["processes"].items()
            ]
            used = f"{gpu['used_mib']} of {gpu['total_mib']} MiB used"
            lines.append(f"  GPU {gpu['uuid']}: {used}; {', '.join(held) or 'no process'}")
        lines += [f"  unseen: {signal}: {why}" for signal, why in engine["unseen"].items()]
        lines += ["  end of its journal:", *(f"    {line}" for line in engine["journal"])]
    return "\n".join(lines)


def vllm_abandoned(engines: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """The engines of vllm_info that are out of service, and that no valid lease holds there.

    ``alone`` tells whether one can be brought back by itself: of a group that does not run, no host can.
    """
    return [
        {
            "engine": name,
            "state": engine["state"],
            "reasons": engine["reasons"],
            "lease": f"{lease['owner']}: {lease['reason']} (expired)" if lease else "none",
            "alone": not engine.get("group") or engine["state"] in RUNNING,
        }
        for name, engine in sorted(engines.items())
        for lease in [engine["lease"]]
        if (lease["expired"] if lease else engine["state"] not in ("serving", "headless") and not _stays_down(engine))
    ]


def vllm_resting(engines: t.Mapping[str, t.Any]) -> dict[str, str]:
    """The engines of vllm_info that a roll leaves alone, with why: it is not their turn, or they stay stopped.

    One that sleeps on a preload daemon's memory is none of them: the daemon may not be changed under it.
    """
    resting = {}
    for name, engine in sorted(engines.items()):
        lease = engine["lease"]
        if not lease and _stays_down(engine):
            resting[name] = "stopped, and not enabled at boot"
        turns = lease and not lease["expired"] and lease["owner"] in TAKE_TURNS
        if turns and (engine["state"] == "stopped" or (engine["state"] == "asleep" and not engine.get("preload"))):
            resting[name] = f"{engine['state']}, by {lease['owner']}: {lease['reason']}"
    return resting


def _stays_down(engine: t.Mapping[str, t.Any]) -> bool:
    """Whether it is to stay stopped over a boot as well: ``start: false`` and never started, or disabled by hand."""
    return engine["state"] == "stopped" and (engine.get("unit") or {}).get("enabled") == "disabled"


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "vllm_abandoned": vllm_abandoned,
            "vllm_evidence": vllm_evidence,
            "vllm_resting": vllm_resting,
            "vllm_roll_others": vllm_roll_others,
            "vllm_roll_rows": vllm_roll_rows,
            "vllm_status_rows": vllm_status_rows,
        }
