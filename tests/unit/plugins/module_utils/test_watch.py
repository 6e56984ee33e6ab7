# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What happened between two readings of an engine at work."""

from __future__ import annotations

import dataclasses

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import engine, watch
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import UsageError

THEN = watch.Reading(100.0, 7, True, 50, 2, {"first_token": [5.0, 50], "per_token": [1.0, 50]})
# As vLLM 0.31 and 0.32 print them.
METRICS = """
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="tiny"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 4.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="tiny"} 0.5
vllm:time_to_first_token_seconds_count{engine="1",model_name="tiny"} 2.0
vllm:time_to_first_token_seconds_sum{engine="1",model_name="tiny"} 0.25
vllm:request_time_per_output_token_seconds_sum{engine="0",model_name="tiny"} 0.02
vllm:request_time_per_output_token_seconds_count{engine="0",model_name="tiny"} 4.0
vllm:time_to_first_token_seconds_created{engine="0",model_name="tiny"} 1.7e+09
vllm:inter_token_latency_seconds_sum{engine="0",model_name="tiny"} 9.0
"""


def test_the_engines_own_times_are_read():
    assert engine.parse_metrics(METRICS).latencies == {"first_token": (0.75, 6), "per_token": (0.02, 4)}
    assert engine.parse_metrics("").latencies == {}


def now(**changes):
    latencies = {"first_token": [6.0, 60], "per_token": [1.0, 50]}
    return dataclasses.replace(THEN, at=130.0, requests=60, errors=3, latencies=latencies, **changes)


def test_only_what_came_between_counts():
    seen = watch.between(THEN, now())
    assert (seen.seconds, seen.requests, seen.errors, seen.restarted_gate) == (30.0, 10, 1, False)
    assert seen.error_share == 0.1
    assert seen.latency == {"first_token": 0.1, "per_token": None}


def test_a_gate_that_was_restarted_counts_from_zero():
    seen = watch.between(THEN, dataclasses.replace(now(), requests=4, errors=1))
    assert (seen.requests, seen.errors, seen.restarted_gate) == (4, 1, True)


def test_no_request_is_no_share():
    assert watch.between(THEN, dataclasses.replace(THEN, at=130.0)).error_share == 0.0


def test_a_reading_comes_back_as_it_was_given():
    assert watch.read_back(dataclasses.asdict(THEN)) == THEN


WHOLE = dataclasses.asdict(THEN)


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        {**WHOLE, "requests": "50"},
        {**WHOLE, "latencies": {"first_token": ["a", 1]}},
        {**WHOLE, "latencies": {"first_token": [1.0]}},
    ],
)
def test_what_is_no_reading_is_refused(value):
    with pytest.raises(UsageError, match="a reading in since"):
        watch.read_back(value)
