# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From observed states to the Prometheus text format: what is known is told, what is not is absent."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
import subprocess

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.exposition import (
    FAMILIES,
    PREFIX,
    Look,
    expose,
)
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.gpu import GpuState
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.lease import Lease, SleepRecord
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.observe import STATES
from ansible_collections.baremetal.vllm.tests.unit.plugins.module_utils.lifecycle_factory import (
    api_state,
    gate_state,
    observation,
    unit_state,
)

LABEL = re.compile(r'([a-z_]+)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
SAMPLE = re.compile(r"vllm_lifecycle_([a-z_]+)(?:\{(.*)\})? (\S+)")
GPU, OTHER = "GPU-1", "GPU-2"
ASLEEP = {"unit": unit_state(), "api": api_state(paused=True, sleeping=True, sleep="weights_offloaded")}
LEASE = Lease(owner="switch", reason="", run="r1", purpose="asleep", restore="open", since=100.0, expires=900.5)


def seen(**more):
    """An observation; keywords that the factory does not know replace what it has."""
    own = {field.name for field in dataclasses.fields(observation())} - {"unit", "api", "gate", "sleep", "unseen"}
    return dataclasses.replace(
        observation(**{name: value for name, value in more.items() if name not in own}),
        **{name: value for name, value in more.items() if name in own},
    )


def parsed(text):
    """{(family, labels): value}, by a reader that takes nothing else than the format."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        family, raw, value = SAMPLE.fullmatch(line).groups()
        labels = LABEL.findall(raw or "")
        assert "".join(f'{name}="{text}",' for name, text in labels).rstrip(",") == (raw or "")
        key = (family, frozenset(labels))
        assert key not in found, f"twice: {line}"
        found[key] = float(value)
    return found


def told(look, family):
    """Labels beside the engine's name, and value, of each sample of a family."""
    found = parsed(expose([Look("chat", look)], 5000.25, 0.5))
    return {
        tuple(sorted((name, text) for name, text in labels if name != "engine")): value
        for (name, labels), value in found.items()
        if name == family
    }


def step(at):
    return {"step": "drain", "seconds": 1.0, "at": at}


def device(uuid, processes):
    return GpuState(uuid, 0, "NVIDIA H200", 143771, 0, 0, processes)


START = {"at": 60.5, "boot_s": 70.25, "warm_s": 2.5, "path": "warm"}
WAKE = {"wanted": "awake", "at": 80.0, "timings": {"wake": 0.25, "prove": 0.5}}


@pytest.mark.parametrize(
    ("what", "family", "expected"),
    [
        # What it is declared to be, and what could not be read of it.
        ({}, "engine_info", {(("admission", "gate"), ("runtime_version", "0.32.0")): 1}),
        ({}, "signal_unseen", {}),
        ({"unseen": {"gpu": "NVML"}}, "signal_unseen", {(("signal", "gpu"),): 1}),
        # Its admission.
        ({}, "admitted", {(): 1}),
        ({"gate": gate_state(admission="withdrawn")}, "admitted", {(): 0}),
        ({"gate": gate_state(proved=False)}, "admitted", {(): 0}),
        ({"gate": None}, "admitted", {}),
        ({"gate": gate_state(sessions=3)}, "sessions", {(): 3}),
        ({"gate": None}, "sessions", {}),
        # Its lease: none is known to be none, an unreadable one is not.
        ({}, "lease_held", {(): 0}),
        ({"lease": LEASE}, "lease_held", {(): 1}),
        ({"unseen": {"lease": "no JSON"}}, "lease_held", {}),
        ({"lease": LEASE}, "lease_info", {(("owner", "switch"), ("purpose", "asleep"), ("run", "r1")): 1}),
        ({}, "lease_info", {}),
        ({"lease": LEASE}, "lease_taken_timestamp_seconds", {(): 100}),
        ({"lease": LEASE}, "lease_progress_timestamp_seconds", {(): 100}),
        (
            {"lease": dataclasses.replace(LEASE, steps=[step(120.0), step(140.5)])},
            "lease_progress_timestamp_seconds",
            {(): 140.5},
        ),
        (
            {"lease": dataclasses.replace(LEASE, steps=[step(120.0), step("late"), {}])},
            "lease_progress_timestamp_seconds",
            {(): 120},
        ),
        ({"lease": LEASE}, "lease_expiry_timestamp_seconds", {(): 900.5}),
        ({"lease": dataclasses.replace(LEASE, expires=math.inf)}, "lease_expiry_timestamp_seconds", {}),
        # How it got ready.
        ({}, "ready_duration_seconds", {}),
        ({"started": START}, "ready_duration_seconds", {(("path", "warm"),): 72.75}),
        ({"started": {**START, "path": "cold"}}, "ready_duration_seconds", {(("path", "cold"),): 72.75}),
        ({"started": {**START, "path": "preload"}}, "ready_timestamp_seconds", {(("path", "preload"),): 60.5}),
        ({"started": {**START, "path": ""}}, "ready_duration_seconds", {}),
        ({"started": {**START, "path": "magic"}}, "ready_timestamp_seconds", {}),
        ({"started": {**START, "boot_s": None}}, "ready_duration_seconds", {}),
        ({"started": {**START, "boot_s": None}}, "ready_timestamp_seconds", {(("path", "warm"),): 60.5}),
        ({"started": {**START, "warm_s": True}}, "ready_duration_seconds", {}),
        (
            {"started": START, "last": WAKE},
            "ready_duration_seconds",
            {(("path", "warm"),): 72.75, (("path", "wake"),): 0.75},
        ),
        ({"last": WAKE}, "ready_timestamp_seconds", {(("path", "wake"),): 80}),
        # One that was stopped for its sleep does not wake, it starts.
        ({"last": {**WAKE, "timings": {"start": 70.0, "prove": 0.5}}}, "ready_duration_seconds", {}),
        ({"last": {**WAKE, "wanted": "asleep", "timings": {"wake": 1.0}}}, "ready_duration_seconds", {}),
        # The last change.
        ({}, "last_transition_duration_seconds", {}),
        ({"last": WAKE}, "last_transition_duration_seconds", {(("wanted", "awake"),): 0.75}),
        ({"last": WAKE}, "last_transition_timestamp_seconds", {(("wanted", "awake"),): 80}),
        ({"last": {**WAKE, "timings": {"wake": 1.0, "prove": "x"}}}, "last_transition_duration_seconds", {}),
        ({"last": {**WAKE, "timings": None}}, "last_transition_duration_seconds", {}),
        ({"last": {**WAKE, "wanted": 7}}, "last_transition_timestamp_seconds", {}),
        # What it holds.
        ({}, "sleep_level", {}),
        (ASLEEP, "sleep_level", {(): 1}),
        (
            {**ASLEEP, "sleep": SleepRecord(10, 1, resident_mib={GPU: 1545}, proved=True)},
            "sleep_resident_bytes",
            {(("gpu", GPU),): 1545 * 1048576},
        ),
        (ASLEEP, "sleep_resident_bytes", {}),
        ({}, "gpu_memory_bytes", {}),
        (
            {"gpus": [device(GPU, {10: 1000, 11: 24, 99: 5000}), device(OTHER, {99: 1})]},
            "gpu_memory_bytes",
            {(("gpu", GPU),): 1024 * 1048576},
        ),
        ({"gpus": [device(GPU, {10: 1000, 11: None})]}, "gpu_memory_bytes", {}),
        # Whether it computes what it should.
        ({}, "golden_match", {}),
        ({"golden": {"matches": True, "key": "k", "at": 70.0}}, "golden_match", {(): 1}),
        ({"golden": {"matches": False, "key": "k", "at": 70.0}}, "golden_match", {(): 0}),
        ({"golden": {"matches": False, "key": "k", "at": 70.0}}, "golden_timestamp_seconds", {(): 70}),
        ({"golden": {"matches": None, "at": 70.0}}, "golden_match", {}),
        ({"golden": {"matches": None, "at": 70.0}}, "golden_timestamp_seconds", {}),
        # The collection itself.
        ({}, "collection_success", {(): 1}),
        ({}, "collection_timestamp_seconds", {(): 5000.25}),
        ({}, "collection_duration_seconds", {(): 0.5}),
    ],
)
def test_what_is_told(what, family, expected):
    assert told(seen(**what), family) == expected


@pytest.mark.parametrize(
    ("look", "state"),
    [
        (seen(), "serving"),
        (seen(gate=gate_state(admission="withdrawn")), "withdrawn"),
        (seen(unit=unit_state("failed", result="exit-code")), "failed"),
        (seen(unit=unit_state("inactive")), "stopped"),
        (seen(unit=unit_state("activating")), "starting"),
        (seen(**ASLEEP), "asleep"),
        (seen(unseen={"api.sleeping": "timeout"}), "unknown"),
        (None, "unknown"),
    ],
)
def test_one_state_of_all_is_1(look, state):
    assert told(look, "state") == {(("state", one),): float(one == state) for one in STATES}


def test_an_engine_that_could_not_be_looked_at_is_unknown_and_nothing_else():
    found = parsed(expose([Look("chat", None, "no observation")], 1.0, 0.0))
    of_engine = {family for family, labels in found if labels}
    assert of_engine == {"state", "collection_success"}
    assert found["collection_success", frozenset({("engine", "chat")})] == 0


def test_a_host_without_engines_still_says_when_it_was_looked_at():
    assert parsed(expose([], 7.0, 0.25)) == {
        ("collection_timestamp_seconds", frozenset()): 7,
        ("collection_duration_seconds", frozenset()): 0.25,
    }


HOSTILE = ['a"b', "back\\slash", "two\nlines", '\\"', 'x",state="serving', "}\nvllm_lifecycle_state 1", "\udcff", "é{}"]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_of_a_state_file_breaks_out_of_its_label(text):
    held = dataclasses.replace(LEASE, owner=text, run=text, purpose=text)
    printed = expose([Look("chat", seen(lease=held))], 1.0, 0.0)
    found = parsed(printed)
    labels = next(dict(labels) for family, labels in found if family == "lease_info")
    back = re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), labels["owner"])
    assert back == text.encode("utf-8", "replace").decode()
    assert labels["owner"] == labels["run"] == labels["purpose"]
    assert [value for (family, _labels), value in found.items() if family == "state"].count(1) == 1
    judged(printed)


def judged(text):
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: run make deps (Debian's package prometheus)"
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def everything():
    """Two engines that between them have every family."""
    one = seen(
        **ASLEEP,
        sleep=SleepRecord(10, 1, resident_mib={GPU: 1545, OTHER: 12}, proved=True),
        gpus=[device(GPU, {10: 1545})],
        started=START,
        last=WAKE,
        lease=LEASE,
        golden={"matches": True, "key": "k", "at": 70.0},
    )
    other = seen(unseen={"api.sleeping": "timeout"})
    return expose([Look("chat", one), Look("code", other)], 1754000000.123, 0.5)


def test_prometheus_own_judge_takes_all_of_it():
    text = everything()
    assert {family for family, _labels in parsed(text)} == set(FAMILIES)
    judged(text)
    bad = text.replace("# TYPE vllm_lifecycle_state gauge\n", "# TYPE vllm_lifecycle_state counter\n")
    with pytest.raises(AssertionError, match="3 != 0"):
        judged(bad)


def test_every_family_has_one_help_and_one_type_before_its_samples():
    order = []
    for line in everything().splitlines():
        name = line.split()[2] if line.startswith("#") else re.match(r"[a-z_]+", line)[0]
        kind = line[:6] if line.startswith("#") else "sample"
        if not order or order[-1] != (name, kind):
            order.append((name, kind))
    assert order == [(f"{PREFIX}{name}", kind) for name in FAMILIES for kind in ("# HELP", "# TYPE", "sample")]
