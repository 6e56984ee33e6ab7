# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Typing errors in names of variables, and that names of this collection are none."""

from __future__ import annotations

import pytest

from ansible_collections.baremetal.vllm.plugins.filter import variables


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("vllm_drain_sate", ["vllm_drain_sate (vllm_drain_state?)"]),
        ("vllm_roll_bacth", ["vllm_roll_bacth (vllm_roll_batch?)"]),
        ("vllm_engine_drain_timout", ["vllm_engine_drain_timout (vllm_engine_drain_timeout?)"]),
        ("vllm_roll_timeout", ["vllm_roll_timeout"]),
        ("vllm_runtime_versoin", ["vllm_runtime_versoin (vllm_runtime_version?)"]),
        ("vllm_host", ["vllm_host (vllm_hosts?)"]),
        ("vllm_engine_defaults_of_ours", []),
        ("vllm_engine_instances_base", []),
        ("vllm_gate_of_heaven", []),
        ("vllm_drain_state", []),
        ("vllm_gate_metrics_sources", []),
        ("vllm_hosts", []),
        ("vllm_progress", []),
        ("vllm_api_key", []),  # somebody's own
        ("vllm_awx_image", []),
        ("vault_vllm_drain_key", []),
        ("vllm_engine_stale", []),
    ],
)
def test_what_is_none_of_the_collections_variables(name, found):
    assert variables.vllm_unknown_variables([name]) == found
