# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What playbooks/golden.yml decides. Pure."""

from __future__ import annotations

import typing as t


def vllm_golden_firsts(
    hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Any], known: t.Iterable[str] = ()
) -> dict[str, list[str]]:
    """Host -> its engines that are to give the fleet a golden: one for each key that is not known yet.

    An engine that has one on record goes before those that have none, and else the first in the order of hosts.
    """
    taken = set(known)
    found: list[tuple[bool, str, str, str]] = []
    for host in hosts:
        seen = hostvars[host].get("__vllm_golden_seen") or {}
        for name, engine in sorted((seen.get("engines") or {}).items()):
            if engine.get("key") and (engine.get("missing") or not engine.get("failed")):
                found.append((bool(engine.get("missing")), host, name, str(engine["key"])))
    firsts: dict[str, list[str]] = {}
    for _missing, host, name, key in sorted(found, key=lambda one: one[0]):
        if key not in taken:
            taken.add(key)
            firsts.setdefault(host, []).append(name)
    return firsts


class FilterModule:
    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"vllm_golden_firsts": vllm_golden_firsts}
