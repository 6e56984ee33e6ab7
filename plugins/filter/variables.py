# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Which variables of an inventory or a command look like the collection's own and are none of them."""

from __future__ import annotations

import difflib
import functools
import typing as t
from pathlib import Path

import yaml

COLLECTION = Path(__file__).resolve().parents[2]
# Set by roles for whoever comes after them.
FACTS = frozenset({"vllm_engine_stale", "vllm_preload_lost", "vllm_preload_stale"})


@functools.lru_cache(maxsize=1)
def known() -> frozenset[str]:
    """The variables of all playbooks and roles, by their argument specifications, and the facts."""
    found = set(FACTS)
    for pattern in ("playbooks/*.meta.yml", "roles/*/meta/argument_specs.yml"):
        for path in sorted(COLLECTION.glob(pattern)):
            specs = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]
            found |= {name for spec in specs.values() for name in spec.get("options") or ()}
    return frozenset(found)


def _family(name: str) -> str:
    """The second word of vllm_drain_state, "" of a name that has only two."""
    words = name.split("_", 2)
    return words[1] if len(words) == 3 else ""


def vllm_unknown_variables(names: t.Iterable[str]) -> list[str]:
    """Those that begin as the collection's do, with vllm_drain_ and the like, and that it does not have.

    :returns: each in words, with the one that is nearest to it.
    """
    families = {_family(name) for name in known()} - {""}
    unknown = sorted({str(name) for name in names if _family(str(name)) in families} - known())
    found = []
    for name in unknown:
        near = difflib.get_close_matches(name, sorted(known()), n=1, cutoff=0.8)
        found.append(f"{name} ({near[0]}?)" if near else name)
    return found


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"vllm_unknown_variables": vllm_unknown_variables}
