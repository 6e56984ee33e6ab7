# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Filters of the playbooks: what would be a thicket in Jinja is a few tested lines here."""

from __future__ import annotations

import typing as t

# Steps of a drain, whose time is the requests' and the router's, not ours.
DRAIN_STEPS = ("withdraw", "await_router", "await_idle", "close", "await_closed", "pause")
STATUS = "%-16s %-12s %-10s %8s %7s %-10s %-28s %s"


def vllm_gates(hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Any]) -> dict[str, str]:
    """HOST/ENGINE -> URL of its gate, for every engine that the inventory declares on these hosts."""
    gates = {}
    for host in sorted(hosts):  # from a set operation, in no order
        values = hostvars[host]
        address = values.get("vllm_gate_address") or values.get("ansible_host") or host
        if address in ("0.0.0.0", "::"):  # noqa: S104 - the default: listens on all, so ask the host's own address
            address = values.get("ansible_host") or host
        for engine in values.get("vllm_engine_instances") or []:
            gates[f"{host}/{engine['name']}"] = (
                f"http://{f'[{address}]' if ':' in address else address}:{engine['port']}"
            )
    return gates


def vllm_roll_rows(hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """One row for each engine that a roll has brought back: where the seconds out of rotation went."""
    rows = []
    for host in hosts:
        values = hostvars[host]
        served = values.get("__vllm_roll_serve") or {}
        restarted = values.get("__vllm_roll_restart") or {}
        for name, engine in (served.get("engines") or {}).items():
            out = engine.get("out_of_service")
            if not out:
                continue
            timings, started = out["timings"], out["started"] or {}
            row = {
                "drain_s": sum(timings.get(step, 0.0) for step in DRAIN_STEPS),
                "stop_s": timings.get("stop", 0.0),
                "boot_s": started.get("boot_s", 0.0),
                "warm_s": started.get("warm_s", 0.0),
            }
            row["overhead_s"] = out["seconds"] - sum(row.values())
            rows.append(
                {
                    "name": host,
                    "engine": name,
                    "out_of_rotation_s": round(out["seconds"], 3),
                    **{key: round(value, 3) for key, value in row.items()},
                    "changed": bool(restarted.get("changed")),
                }
            )
    return rows


def _notes(engine: t.Mapping[str, t.Any]) -> list[str]:
    """Why an engine is in its state, and what is due for it."""
    notes = list(engine["reasons"])
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


def vllm_status_rows(hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Any]) -> list[str]:
    """The fleet as a table, one line for each engine; a host that cannot say is a line, too."""
    lines = [STATUS % ("HOST", "ENGINE", "STATE", "REQUESTS", "BOOT_S", "RUNTIME", "LEASE", "NOTE")]
    for host in hosts:
        seen = hostvars[host].get("__vllm_status_seen") or {"unreachable": True, "msg": "it was not asked"}
        if seen.get("unreachable") or seen.get("failed"):
            state = "unreachable" if seen.get("unreachable") else "unknown"
            why = str(seen.get("msg") or "").strip().splitlines() or [""]
            lines.append(STATUS % (host, "-", state, "-", "-", "-", "-", why[0]))
        for name, engine in sorted((seen.get("engines") or {}).items()):
            metrics = (engine["api"] or {}).get("metrics") or {}
            counts = [metrics.get("running"), metrics.get("waiting")]
            busy = "?" if None in counts else sum(sum(count.values()) for count in counts if count)
            level = "" if engine["level"] is None else f" {engine['level']}"
            lease = engine["lease"]
            notes = _notes(engine)
            lines.append(
                STATUS
                % (
                    host,
                    name,
                    engine["state"] + level,
                    busy,
                    (engine["started"] or {}).get("boot_s", "-"),
                    engine["runtime_version"],
                    f"{lease['owner']} {lease['run']}{' (expired)' if lease['expired'] else ''}" if lease else "-",
                    "; ".join(notes),
                )
            )
    return [line.rstrip() for line in lines]


def vllm_abandoned(engines: t.Mapping[str, t.Any]) -> list[dict[str, t.Any]]:
    """The engines of vllm_info that are out of service, and that no valid lease holds there."""
    return [
        {
            "engine": name,
            "state": engine["state"],
            "reasons": engine["reasons"],
            "lease": f"{lease['owner']}: {lease['reason']} (expired)" if lease else "none",
        }
        for name, engine in sorted(engines.items())
        for lease in [engine["lease"]]
        if (lease["expired"] if lease else engine["state"] != "serving")
    ]


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {
            "vllm_abandoned": vllm_abandoned,
            "vllm_gates": vllm_gates,
            "vllm_roll_rows": vllm_roll_rows,
            "vllm_status_rows": vllm_status_rows,
        }
