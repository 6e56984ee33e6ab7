# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import boot, unit
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.unit import Unit
from ansible_collections.baremetal.vllm.plugins.plugin_utils import _spans
from ansible_collections.baremetal.vllm.tests.unit.plugins.module_utils import lifecycle_factory as made

STARTED = "(EngineCore pid=7) INFO 11-29 14:15:39 [core.py:139] Initializing a V1 LLM engine (v0.33.0) with config: m"
BAR = "Loading safetensors checkpoint shards:   0%|\rLoading safetensors checkpoint shards:  45%|####  | 9/20 [00:04]\r"


@pytest.mark.parametrize(
    ("journal", "says"),
    [
        ([], ""),
        (["something else"], ""),
        ([STARTED], "loads the model"),
        ([STARTED, BAR], "loads the weights, 45 %"),
        ([STARTED, "x [default_loader.py:506] Loading weights took 2.27 seconds", "noise"], "has its weights"),
        (["x Mapped 435 tensors from the weight cache daemon (zero_copy mode)"], "has its weights"),
        (["x [model_runner.py:428] Model loading took 12.94 GiB memory and 5.93 seconds"],
         "has its weights, profiles and compiles"),
        (["x [monitor.py:62] [backbone] torch.compile took 0.42 s in total"], "compiles and profiles"),
        (["Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  63%|██████"], "captures graphs, 63 %"),
        (["x [model_runner.py:1163] Graph capturing finished in 6 secs, took 0.63 GiB"], "has captured graphs"),
        (["x [core.py:405] init engine (profile, create kv cache, warmup model) took 35.7 s"], "starts its API server"),
        (["x [launcher.py:195] Route: /v1/models, Methods: GET"] * 40, "starts its API server"),
        ([STARTED, "chat: not ready yet, 20 of 600 s: refused"], "loads the model"),
        ([STARTED, "chat: warming with 4 prompt and 1 new tokens"], "warming with 4 prompt and 1 new tokens"),
        ([STARTED, "code: warming with 4 prompt and 1 new tokens"], "loads the model"),
        (["chat: waits for engine code, which is being changed on GPU-1"],
         "waits for engine code, which is being changed on GPU-1"),
    ],
)  # fmt: skip
def test_how_far_a_start_has_come(journal, says):
    assert boot.phase(journal, "chat") == says


@pytest.mark.parametrize(
    ("sub", "journal", "says"),
    [
        ("start-pre", [], "checks what it needs"),
        ("start-post", [], "imports its libraries"),
        ("start-post", [STARTED], "loads the model"),
        ("auto-restart", [], "auto-restart"),
    ],
)
def test_before_its_log_says_anything_a_start_is_told_by_what_its_unit_does(monkeypatch, sub, journal, says):
    monkeypatch.setattr(Unit, "journal", lambda _self, _lines, _invocation: journal)
    state = replace(made.unit_state("activating", sub), invocation="this")
    assert Unit("vllm-engine@chat.service")._phase(state) == says


CORE = "(EngineCore pid=4374) INFO 11-30 13:44:13 [core.py:139] Initializing a V1 LLM engine (v0.33.0) with config: m"
LOADED = "(EngineCore pid=4374) INFO 11-30 13:44:21 [model_runner.py:428] Model loading took 12.95 GiB memory and 5.0 s"
COMPILED = "(EngineCore pid=4374) INFO 11-30 13:44:53 [monitor.py:62] [backbone] torch.compile took 31.15 s in total"
PROFILED = "(EngineCore pid=4374) INFO 11-30 13:45:27 [core.py:405] init engine (profile, create kv cache, warmup m"
LOG = [(13.5, "noise"), (25.0, CORE), (33.5, LOADED), (65.25, COMPILED), (99.0, PROFILED), (99.5, "noise")]


@pytest.mark.parametrize(
    ("log", "parts"),
    [
        (LOG, {"import": 15.0, "load": 8.5, "compile": 31.75, "profile": 33.75, "serve": 1.0}),
        # Nothing is compiled: eager, or on a CPU.
        ([LOG[1], LOG[2], LOG[4]], {"import": 15.0, "load": 8.5, "profile": 65.5, "serve": 1.0}),
        # As a CPU says it.
        ([LOG[1], (33.5, "x [default_loader.py:501] Loading weights took 0.01 seconds"), LOG[4]],
         {"import": 15.0, "load": 8.5, "profile": 65.5, "serve": 1.0}),
        # Two ranks: a part ends with the last of them.
        ([*LOG[:3], (40.0, LOADED), *LOG[3:]],
         {"import": 15.0, "load": 15.0, "compile": 25.25, "profile": 33.75, "serve": 1.0}),
        # A line of before its process began, or of after it answered, is of no part of it.
        ([(9.0, CORE), (33.0, LOADED), (101.0, PROFILED)], {"load": 23.0, "serve": 67.0}),
        ([(13.0, "noise")], {}),
        ([], {}),
    ],
)  # fmt: skip
def test_what_a_start_consisted_of(log, parts):
    found = boot.parts(log, 10.0, 100.0)
    assert found == parts
    assert sum(found.values()) in (0, 90.0)
    assert [one for one in _spans.BOOT if one in found] == list(found), "the report shows them, in this order"


def test_the_end_of_a_journal_is_not_what_the_gate_asks_each_second(monkeypatch):
    asked = 'INFO:      - "GET /health HTTP/1.1" 200 OK'
    sent = 'INFO:      - "POST /v1/completions HTTP/1.1" 500 Internal Server Error'
    written = "\n".join(["old", "RuntimeError: no memory", *[asked] * 30, sent, *[asked] * 30])
    done = subprocess.CompletedProcess([], 0, stdout=written, stderr="")
    monkeypatch.setattr(unit.process, "run", lambda *_words: done)
    assert Unit("vllm-engine@chat.service").journal(2) == ["RuntimeError: no memory", sent]


@pytest.mark.parametrize(
    ("journal", "why"),
    [
        ([], ""),
        (["chat: not ready yet", "vllm: error: no such option"], ""),
        (
            ["vllm-lifecycle: wrong (runbook: golden-mismatch)", "stopped"],
            ". Its start said: wrong (runbook: golden-mismatch)",
        ),
    ],
)
def test_a_start_that_fails_says_what_its_own_command_has_said(journal, why):
    assert unit._why(journal) == why
