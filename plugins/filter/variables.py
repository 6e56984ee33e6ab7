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
# How alike two names are of which one is a typing error of the other, from 0 to 1.
ALIKE = 0.9


@functools.lru_cache(maxsize=1)
def known() -> frozenset[str]:
    """The variables of all playbooks and roles, by their argument specifications, and the facts."""
    return FACTS | _options("playbooks/*.meta.yml") | _options("roles/*/meta/argument_specs.yml")


def _options(pattern: str) -> frozenset[str]:
    found: set[str] = set()
    for path in COLLECTION.glob(pattern):
        specs = yaml.safe_load(path.read_text(encoding="utf-8"))["argument_specs"]
        found |= {name for spec in specs.values() for name in spec.get("options") or ()}
    return frozenset(found)


@functools.lru_cache(maxsize=1)
def _of_playbooks() -> frozenset[str]:
    """The second words of their variables, but for those that roles have as well: drain, roll and so on."""
    roles = {path.name.removeprefix("vllm_") for path in COLLECTION.glob("roles/*")}
    return frozenset({_family(name) for name in _options("playbooks/*.meta.yml")} - roles - {""})


def _family(name: str) -> str:
    """The second word of vllm_drain_state, "" of a name that has only two."""
    words = name.split("_", 2)
    return words[1] if len(words) == 3 else ""


def vllm_unknown_variables(names: t.Iterable[str]) -> list[str]:
    """Those that are none of the collection's, and look like typing errors.

    Such is any that begins as a playbook's own do, with vllm_drain_ and the like. An inventory may have others of its
    own, and of these only what is all but equal to a known one counts.

    :returns: each in words, with the one that is nearest to it.
    """
    found = []
    ours = sorted(known())
    for name in sorted({str(one) for one in names}.difference(ours)):
        near = difflib.get_close_matches(name, ours, n=1, cutoff=ALIKE)
        if near or _family(name) in _of_playbooks():
            found.append(f"{name} ({near[0]}?)" if near else name)
    return found


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"vllm_unknown_variables": vllm_unknown_variables}
