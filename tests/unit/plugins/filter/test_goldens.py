# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who gives a fleet its goldens."""

from __future__ import annotations

import pytest

from ansible_collections.baremetal.vllm.plugins.filter.goldens import FilterModule, vllm_golden_firsts

HAS = {"key": "a"}
LACKS = {"key": "a", "failed": True, "missing": True}
OTHER = {"key": "b", "failed": True, "missing": True}
WRONG = {"key": "a", "failed": True, "mismatch": {}}
UNKNOWN = {"failed": True, "msg": "it is unknown"}


@pytest.mark.parametrize(
    ("fleet", "known", "firsts"),
    [
        ({}, [], {}),
        ({"h1": {"chat": HAS}}, [], {"h1": ["chat"]}),
        ({"h1": {"chat": HAS}}, ["a"], {}),
        ({"h1": {"chat": LACKS}, "h2": {"chat": LACKS}}, [], {"h1": ["chat"]}),
        ({"h1": {"chat": LACKS}, "h2": {"chat": HAS}}, [], {"h2": ["chat"]}),
        ({"h1": {"chat": WRONG}, "h2": {"chat": LACKS}}, [], {"h2": ["chat"]}),
        ({"h1": {"chat": UNKNOWN}}, [], {}),
        ({"h1": {"code": LACKS, "chat": LACKS}}, [], {"h1": ["chat"]}),
        ({"h1": {"chat": LACKS, "code": OTHER}, "h2": {"x": {"key": "b"}}}, [], {"h2": ["x"], "h1": ["chat"]}),
        ({"h1": {"chat": LACKS, "code": OTHER}}, ["a"], {"h1": ["code"]}),
    ],
)
def test_firsts(fleet, known, firsts):
    hostvars = {host: {"__vllm_golden_seen": {"engines": engines}} for host, engines in fleet.items()}
    hostvars["silent"] = {}
    assert FilterModule().filters() == {"vllm_golden_firsts": vllm_golden_firsts}
    assert vllm_golden_firsts(["silent", *fleet], hostvars, known) == firsts
