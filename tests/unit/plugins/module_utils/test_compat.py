# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Truth tables of what is decided about preload daemons: nothing here reads a file, a log or a GPU."""

from __future__ import annotations

import dataclasses
import os

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import compat
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.compat import Loaded, Model
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.config import (
    EngineConfig,
    PreloadConfig,
    PreloadUse,
    Traits,
)
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import Refused, UnknownState
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.pairing import EnginePreload
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.plan import Options, plan
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.preload import (
    PreloadState,
    Signals,
    derive_preload,
)
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.preload_change import plan_preload
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.source import (
    COPY,
    DISK,
    ZERO_COPY,
    identity,
    judge_source,
    lost,
    read_log,
)
from ansible_collections.baremetal.vllm.tests.unit.plugins.module_utils import lifecycle_factory as made
from ansible_collections.baremetal.vllm.tests.unit.plugins.module_utils.test_parts import DECLARED

GPUS = ["GPU-1", "GPU-2"]
QWEN = Model("Qwen3ForCausalLM", "", "bfloat16")
LOADED = Loaded(10, "boot", 5, 1.0, [10, 11], "0.33.0", "d1", "580.1", "sha256:aa", "full", 1024 * compat.MIB, {})


def engine(preload=None, traits=None, **changes):
    declared = {key: value for key, value in DECLARED.items() if key not in ("schema", "gate")}
    use = PreloadUse(daemon="base", **(preload or {}))
    config = EngineConfig(gate=None, **{**declared, "runtime_version": "0.33.0", "gpus": GPUS})
    return dataclasses.replace(config, preload=use, traits=Traits(**(traits or {})), **changes)


def daemon(traits=None, **changes):
    config = PreloadConfig(
        daemon="base",
        unit="vllm-preload@base.service",
        socket_dir="/run/vllm/b",
        sockets=["a.sock"],
        health_port=8101,
        start_timeout=900,
        user="vllm",
        runtime_version="0.33.0",
        model="/srv/models/tiny",
        gpus=GPUS,
        config_digest="d1",
    )
    return dataclasses.replace(config, traits=Traits(**(traits or {})), **changes)


FALL = {"fallback": True}
TABLE = [
    # engine, daemon, other arguments, start, a reason
    ({}, {}, {}, "zero-copy", None),
    ({"preload": {"mode": "copy"}}, {}, {}, "copy", None),
    # What vLLM compares, and what lies beside it.
    ({"traits": {"dtype": "float16"}}, {}, {}, "refused", "dtype differs: 'float16' for the engine, 'bfloat16'"),
    ({"traits": {"dtype": "float16"}, "preload": FALL}, {}, {}, "cold", "dtype differs"),
    ({"traits": {"dtype": "bfloat16"}}, {}, {}, "zero-copy", None),  # auto is what the checkpoint says
    ({"traits": {"dtype": "half"}}, {"traits": {"dtype": "float16"}}, {}, "zero-copy", None),
    ({"traits": {"dtype": "bfloat16"}}, {}, {"model": None}, "refused", "dtype differs: 'bfloat16'"),
    ({"traits": {"revision": "v2"}}, {}, {}, "refused", "revision differs"),
    ({"traits": {"kv_cache_dtype": "fp8"}}, {}, {}, "refused", "kv_cache_dtype differs: 'fp8'"),
    ({"traits": {"lora": True}}, {}, {}, "refused", "lora differs: True for the engine, False"),
    ({"traits": {"tensor_parallel": 2}}, {}, {}, "refused", "tensor_parallel differs: 2"),
    ({"traits": {"pipeline_parallel": 2}}, {}, {}, "refused", "pipeline_parallel differs"),
    ({"traits": {"data_parallel": 2}}, {}, {}, "refused", "data_parallel differs"),
    ({"traits": {"expert_parallel": True}}, {}, {}, "refused", "expert_parallel differs"),
    ({"traits": {"load_format": "ipc_cache"}}, {}, {}, "zero-copy", None),  # the way, not the weights
    ({"user": "root"}, {}, {}, "refused", "user differs: 'root' for the engine, 'vllm'"),
    ({"runtime_version": "0.34.0"}, {}, {}, "refused", "runtime version differs: '0.34.0'"),
    ({"gpus": GPUS[::-1]}, {}, {}, "refused", "GPUs, in this order, differs: 'GPU-2, GPU-1'"),
    ({"gpus": []}, {}, {}, "refused", "'all' for the engine"),
    ({}, {}, {"gpus": ["GPU-1"]}, "refused", "the driver shows no GPU GPU-2"),
    ({}, {}, {"gpus": None}, "zero-copy", None),  # not seen is not gone; its start finds out
    ({}, {}, {"lent": QWEN._replace(architecture="LlamaForCausalLM")}, "refused", "architecture differs: 'Qwen3ForC"),
    (
        {},
        {},
        {"lent": QWEN._replace(dtype="float16")},
        "refused",
        "dtype differs: 'bfloat16' for the engine, 'float16'",
    ),
    # Quantisation that cannot be handed over, by the checkpoint or by the options.
    ({}, {}, {"model": QWEN._replace(quantization="awq")}, "refused", "does not take the quantisation awq"),
    ({}, {}, {"model": QWEN._replace(quantization="gptq")}, "refused", "gptq"),
    ({"preload": FALL}, {}, {"model": QWEN._replace(quantization="compressed-tensors")}, "cold", "compressed-tensors"),
    ({}, {}, {"model": QWEN._replace(quantization="fp8")}, "zero-copy", None),
    ({"traits": {"quantization": "fp8"}}, {}, {"model": QWEN._replace(quantization="fp8")}, "zero-copy", None),
    (
        {"traits": {"quantization": "awq_marlin"}},
        {"traits": {"quantization": "awq_marlin"}},
        {},
        "refused",
        "awq_marlin",
    ),
    (
        {"traits": {"quantization": "fp8"}},
        {"traits": {"quantization": "fp8"}},
        {},
        "refused",
        "does not quantise while it loads (fp8)",
    ),
    (
        {"traits": {"pipeline_parallel": 2}, "runtime_version": "0.31.0"},
        {"traits": {"pipeline_parallel": 2}, "runtime_version": "0.31.0"},
        {},
        "refused",
        "0.31.0 has no pipeline parallelism",
    ),
    (
        {"traits": {"pipeline_parallel": 2}, "runtime_version": "0.32.0"},
        {"traits": {"pipeline_parallel": 2}, "runtime_version": "0.32.0"},
        {"loaded": LOADED._replace(runtime_version="0.32.0")},
        "zero-copy",
        None,
    ),
    # What no fall-back makes good.
    ({"sleep_mode": True}, {}, {}, "refused", "sleep mode and zero copy together"),
    ({"sleep_mode": True, "preload": FALL}, {}, {}, "refused", "sleep mode and zero copy together"),
    ({"sleep_mode": True, "preload": {"allow_zero_copy_sleep": True}}, {}, {}, "zero-copy", None),
    ({"sleep_mode": True, "preload": {"mode": "copy"}}, {}, {}, "copy", None),
    ({"preload": FALL}, {}, {"modes": {"chat": "zero_copy", "code": "copy"}}, "refused", "engines of both modes"),
    ({}, {}, {"modes": {"chat": "zero_copy", "code": "zero_copy"}}, "zero-copy", None),
    ({"preload": FALL}, {}, {"never": ["other weights"]}, "refused", "other weights"),
    # What a daemon that only has to load once more makes of it.
    ({}, {"runtime_version": "0.34.0"}, {}, "refused", "runtime version differs"),
    (
        {"runtime_version": "0.34.0"},
        {"runtime_version": "0.34.0"},
        {},
        "cold",
        "the daemon has loaded with vLLM 0.33.0, its next start is with 0.34.0: the weights come from disk",
    ),
    ({}, {"config_digest": "d2"}, {}, "cold", "the daemon's settings have changed"),
    ({}, {}, {"driver": "590.2"}, "cold", "the driver was 580.1 when the daemon loaded, it is 590.2 now"),
    ({}, {}, {"driver": None}, "zero-copy", None),
    ({}, {}, {"loaded": None, "news": ["the daemon is absent"]}, "cold", "the daemon is absent"),
    ({}, {}, {"blocked": ["a rank is gone"]}, "refused", "a rank is gone"),
    ({"preload": FALL}, {}, {"blocked": ["a rank is gone"]}, "cold", "a rank is gone"),
]


@pytest.mark.parametrize(("of_engine", "of_daemon", "others", "start", "reason"), TABLE)
def test_what_the_next_start_will_be(of_engine, of_daemon, others, start, reason):
    given = {"loaded": LOADED, "model": QWEN, "gpus": GPUS, "driver": "580.1", **others}
    verdict = compat.judge(engine(**of_engine), daemon(**of_daemon), **given)
    assert verdict.start == start, verdict.reasons
    assert verdict.start in compat.STARTS
    assert (reason or "") in "; ".join(verdict.reasons)
    assert bool(verdict.reasons) is (reason is not None)


def test_without_a_daemon():
    assert compat.judge(engine(), None, None, QWEN, GPUS, None).start == "refused"
    assert compat.judge(engine(preload=FALL), None, None, QWEN, GPUS, None).start == "cold"
    plain = dataclasses.replace(engine(), preload=None)
    assert compat.judge(plain, None, None, QWEN, GPUS, None).start == "cold"


@pytest.mark.parametrize(
    ("traits", "model", "share"),
    [
        ({}, QWEN, 13250),
        ({"tensor_parallel": 2}, QWEN, 6625),
        ({"tensor_parallel": 2, "pipeline_parallel": 5}, QWEN, 1325),
        ({"data_parallel": 4}, QWEN, 13250),  # each replica has them whole
        ({"data_parallel": 4, "expert_parallel": True}, QWEN, 3312),
        ({}, QWEN._replace(dtype="float32"), 6625),
        ({"dtype": "float32"}, QWEN._replace(dtype="float32"), 13250),
        ({"quantization": "fp8"}, QWEN, 0),
        ({"quantization": "fp8"}, QWEN._replace(quantization="fp8"), 13250),
        ({}, None, 13250),
    ],
)
def test_what_a_rank_holds_at_least(traits, model, share):
    assert compat.share_mib(13250 * compat.MIB, Traits(**traits), model) == share


@pytest.mark.parametrize(("version", "minor"), [("0.33.0", 33), ("0.31.2rc1", 31), ("1.2", 1000), ("dev", 1000)])
def test_minor_versions(version, minor):
    assert compat.minor(version) == minor


# Where an engine has its weights from.

MAPPED = "(EngineCore pid=7) INFO 11-29 [ipc_loader.py:321] Mapped 435 tensors from the weight cache daemon (%s mode)"
FELL = "WARNING Weight cache unusable (WeightCacheKey mismatch on fields: ['dtype']); falling back to disk loading"
LATE = "ERROR Weight cache IPC loading failed; falling back to disk loading"
PLAIN = "INFO [default_loader.py:506] Loading weights took 2.27 seconds"


@pytest.mark.parametrize(
    ("lines", "source", "spent", "why"),
    [
        ([MAPPED % "zero_copy"], ZERO_COPY, False, ""),
        ([MAPPED % "zero_copy"] * 4, ZERO_COPY, False, ""),
        ([MAPPED % "copy"], COPY, True, ""),
        ([MAPPED % "zero_copy", PLAIN], ZERO_COPY, False, ""),  # a draft model comes from disk
        ([FELL, PLAIN], DISK, False, "mismatch on fields: ['dtype']"),
        ([LATE, PLAIN], DISK, True, "IPC loading failed"),
        ([PLAIN], DISK, False, ""),
        ([MAPPED % "zero_copy", FELL], None, False, "says both, mapped and fallen back"),
        ([MAPPED % "zero_copy", MAPPED % "copy"], None, True, "says both, zero_copy and copy"),
        ([], None, False, "does not say"),
        (["Mapped nothing of note"], None, False, "does not say"),
        (None, None, False, "cannot be read"),
    ],
)
def test_what_a_log_says(lines, source, spent, why):
    word = read_log(lines)
    assert (word.source, word.spent) == (source, spent)
    assert why in word.why


@pytest.mark.parametrize(
    ("said", "own", "lent", "awake", "source"),
    [
        (ZERO_COPY, {"a": 58000}, {"a": 13882}, True, ZERO_COPY),
        (ZERO_COPY, {"a": 1500}, {"a": 13882}, False, ZERO_COPY),  # asleep
        (ZERO_COPY, {"a": 58000}, {"a": 3362}, True, None),  # the daemon cannot have lent them
        (ZERO_COPY, {"a": 58000}, {}, True, None),
        (ZERO_COPY, {"a": 71000}, None, True, ZERO_COPY),  # lost: charged to the engine
        (ZERO_COPY, {"a": 1500}, None, True, None),
        (ZERO_COPY, {"a": 0}, {"a": 13882}, True, None),
        (ZERO_COPY, {"a": 58000, "b": 58000}, {"a": 13882}, True, None),  # one rank's is missing
        (DISK, {"a": 71000}, {"a": 13882}, True, DISK),
        (DISK, {"a": 9000}, {}, True, None),
        (DISK, {"a": 1500}, {}, False, DISK),
        (COPY, {"a": 71000}, {"a": 3362}, True, COPY),
        (COPY, {"a": 9000}, {"a": 13882}, True, None),
        (COPY, {}, {"a": 13882}, True, None),
        (COPY, None, {"a": 13882}, True, None),
        (None, {"a": 71000}, {"a": 13882}, True, None),
    ],
)
def test_what_memory_makes_of_it(said, own, lent, awake, source):
    found, why = judge_source(said, own, lent, 13250, awake=awake)
    assert found == source
    assert bool(why) is (source is None)


@pytest.mark.parametrize(
    ("said", "of_daemon", "gone"),
    [
        ({}, {}, False),
        ({}, {"started_at": 101.0}, True),  # younger than its engine
        ({}, {"active_state": "inactive", "main_pid": 0}, True),
        ({}, {"active_state": "failed", "main_pid": 0}, True),
        ({}, {"active_state": "activating", "main_pid": 0}, True),  # it comes anew
        ({"daemon_process": {"main_pid": 10, "boot": "another", "start": 1}}, {}, True),
        ({"daemon_process": identity(os.getpid())}, {"main_pid": os.getpid()}, False),
        ({"daemon_process": identity(os.getpid())}, {"active_state": "inactive", "main_pid": 0}, True),
        ({}, None, False),  # not seen is not lost
    ],
)
def test_whether_an_engine_has_lost_its_daemon(said, of_daemon, gone):
    seen = None if of_daemon is None else dataclasses.replace(made.unit_state(), **of_daemon)
    assert lost(said, made.unit_state(), seen) is gone


# The state of a daemon.

HELD = {"GPU-1": 700, "GPU-2": 700}
GOOD = Signals(made.unit_state(), 200, (), HELD, 512, LOADED)


def unit(active, **changes):
    return dataclasses.replace(made.unit_state(active=active), **changes)


@pytest.mark.parametrize(
    ("changes", "unseen", "state", "reason"),
    [
        ({}, {}, "ready", None),
        ({"unit": None}, {"unit": "no bus"}, "unknown", "no bus"),
        ({"unit": unit("inactive")}, {}, "absent", None),
        ({"unit": unit("inactive", pids=[7])}, {}, "unknown", "processes are left"),
        ({"unit": unit("failed", result="exit-code", main_status=1)}, {}, "failed", "exit-code, status 1"),
        ({"unit": unit("failed", result="exit-code", main_status=241)}, {}, "absent", None),
        ({"unit": unit("failed", result="timeout", main_status=241)}, {}, "failed", "timeout"),
        ({"unit": unit("activating"), "health": 503}, {}, "starting", "health 503"),
        ({"unit": unit("activating")}, {}, "starting", "its door has not proved it yet"),
        ({"unit": unit("deactivating")}, {}, "unknown", "deactivating"),
        ({"health": None}, {"health": "refused"}, "unknown", "refused"),
        ({"health": 503}, {}, "unusable", "health 503"),
        ({"refused": ["a.sock"]}, {}, "unusable", "nobody accepts on a.sock"),
        ({"held": {"GPU-1": 700, "GPU-2": 400}}, {}, "unusable", "it holds 400 MiB on GPU-2, its weights are 512 MiB"),
        ({"held": {"GPU-1": 700}}, {}, "unusable", "the driver shows no GPU GPU-2"),
        ({"held": {}}, {}, "unusable", "holds no GPU memory"),
        ({"held": None}, {"gpu": "NVML: Driver Not Loaded"}, "unknown", "Driver Not Loaded"),
        ({"used_by": "chat"}, {}, "unusable", "its weights were given to chat"),
        ({"outdated": ["older"]}, {}, "unusable", "older"),
        ({"mismatch": "it has loaded a, while m is b now"}, {}, "unusable", "it has loaded a, while m is b now"),
        ({"mismatch": None}, {"weights": "not hashed"}, "unknown", "not hashed"),
        ({"loaded": None}, {}, "unusable", "is not on record"),
        ({"loaded": None}, {"loaded": "no record"}, "unknown", "no record"),
    ],
)
def test_the_state_of_a_daemon(changes, unseen, state, reason):
    found, reasons = derive_preload(daemon(), GOOD._replace(**changes), unseen)
    assert found == state
    assert (reason or "") in "; ".join(reasons)
    assert bool(reasons) is (reason is not None)


def test_stages_of_a_pipeline_are_judged_by_their_sum():
    staged = daemon(traits={"pipeline_parallel": 2})
    assert derive_preload(staged, GOOD._replace(held={"GPU-1": 300, "GPU-2": 800}), {})[0] == "ready"
    assert derive_preload(staged, GOOD._replace(held={"GPU-1": 300, "GPU-2": 700}), {})[0] == "unusable"


def state(name="ready", mapped_by=(), lost=(), unseen=None, **changes):
    return PreloadState("base", "e1", name, ["why"], unseen or {}, 10, {}, list(mapped_by), list(lost), **changes)


@pytest.mark.parametrize(
    ("wanted", "now", "force", "steps"),
    [
        ("ready", state(), False, []),
        ("ready", state(mapped_by=["chat"]), False, []),
        ("ready", state("absent"), False, ["start"]),
        ("ready", state("failed"), False, ["stop", "start"]),
        ("ready", state("unusable"), False, ["stop", "start"]),
        ("ready", state("starting"), False, ["start"]),
        ("ready", state("starting", mapped_by=["chat"]), False, ["start"]),
        ("ready", state("unusable", mapped_by=["chat"]), False, Refused),
        ("ready", state("unusable", mapped_by=["chat"]), True, ["stop", "start"]),
        ("ready", state("absent", mapped_by=["chat"], lost=["chat"]), False, Refused),
        ("ready", state("absent", mapped_by=["chat"], lost=["chat"]), True, ["start"]),
        ("ready", state("unknown", unseen={"unit": "no bus"}), False, UnknownState),
        ("ready", state("unknown", unseen={"gpu": "no driver"}), False, UnknownState),
        ("ready", state("absent", unseen={"engine chat": "no bus"}), False, UnknownState),
        ("ready", state("unknown"), False, ["stop", "start"]),
        ("absent", state("absent"), False, []),
        ("absent", state("absent", mapped_by=["chat"]), False, []),
        ("absent", state(), False, ["stop"]),
        ("absent", state(mapped_by=["chat"]), False, Refused),
        ("absent", state(mapped_by=["chat"]), True, ["stop"]),
        ("absent", state(mapped_by=["chat"], lost=["chat"]), False, ["stop"]),  # it maps an older one's
        ("absent", state(mapped_by=["chat", "code"], lost=["chat"]), False, Refused),
        ("absent", state("starting"), False, ["stop"]),
    ],
)
def test_plans_for_a_daemon(wanted, now, force, steps):
    if isinstance(steps, list):
        assert [step.name for step in plan_preload(wanted, now, force)] == steps
        return
    with pytest.raises(steps) as refused:
        plan_preload(wanted, now, force)
    assert refused.value.next_step


@pytest.mark.parametrize(
    ("now", "renewable"),
    [
        (state("unusable", used_by="chat"), False),
        (dataclasses.replace(state("unusable", used_by="chat"), reasons=["its weights were given to chat"]), True),
        (dataclasses.replace(state("unusable", outdated=["older"]), reasons=["older"]), True),
        (dataclasses.replace(state("unusable", outdated=["older"]), reasons=["health 503", "older"]), False),
        (dataclasses.replace(state("unusable", mismatch="other"), reasons=["other"]), True),
        (state("unusable"), False),
        (state("absent"), False),
    ],
)
def test_which_daemon_only_has_to_load_once_more(now, renewable):
    assert now.renewable is renewable


# Plans for an engine with a daemon.


def borrower(source=ZERO_COPY, mode="zero_copy", next_start="zero-copy", wrong="", may_sleep=False):
    return EnginePreload("base", mode, "ready", source, next_start, ["why"], wrong, may_sleep)


def planned(wanted, preload, options=None, **signals):
    now = dataclasses.replace(made.observation(**signals), preload=preload)
    return [step.name for step in plan(wanted, now, options or Options(owner=made.OURS))]


@pytest.mark.parametrize(
    ("preload", "level", "says"),
    [
        (borrower(), 1, "in zero copy"),
        (borrower(), 2, "in zero copy"),
        (borrower(source=None), 1, "in zero copy"),
        (borrower(may_sleep=True), 1, None),
        (borrower(may_sleep=True), 2, None),
        (borrower(source=None, may_sleep=True), 1, None),
        (borrower(source=None, may_sleep=True), 2, "where its weights come from"),
        (borrower(COPY, "copy"), 1, None),
        (borrower(COPY, "copy"), 2, "cannot load them anew"),
        (borrower(DISK), 1, None),
        (borrower(DISK), 2, "cannot load them anew"),
        (borrower(None, "copy"), 2, "where its weights come from"),
        (borrower(), 0, None),  # keeps all its memory
        (None, 2, None),
    ],
)
def test_which_engine_may_sleep(preload, level, says):
    options = Options(owner=made.OURS, level=level)
    if says is None:
        assert "sleep" in planned("asleep", preload, options)
        return
    with pytest.raises(Refused) as refused:
        planned("asleep", preload, options)
    assert says in str(refused.value) + refused.value.next_step


def asleep(level):
    api = made.api_state(paused=True, sleep={1: "weights_offloaded", 2: "discard_all"}[level])
    return {"api": api, "gate": made.gate_state(admission="closed"), "sleep": made.sleep_record(level)}


@pytest.mark.parametrize(
    ("preload", "level", "steps"),
    [
        (borrower(may_sleep=True), 2, ["wake", "reset_cache"]),
        (borrower(may_sleep=True), 1, ["wake", "reset_cache"]),
        (None, 2, ["wake_weights", "reload", "wake_kv", "reset_cache"]),
        (borrower(COPY, "copy"), 1, ["wake", "reset_cache"]),
    ],
)
def test_the_daemons_weights_need_no_reload(preload, level, steps):
    names = planned("awake", preload, **asleep(level))
    assert [name for name in names if name in ("wake", "wake_weights", "reload", "wake_kv", "reset_cache")] == steps
    assert "prove" in names


def test_an_engine_at_level_2_whose_source_is_not_known_is_not_woken():
    with pytest.raises(Refused):
        planned("awake", borrower(None, may_sleep=True), **asleep(2))


@pytest.mark.parametrize(
    ("wanted", "preload", "refused"),
    [
        ("restarted", borrower(next_start="refused"), True),
        ("restarted", borrower(next_start="cold"), False),
        ("stopped", borrower(next_start="refused"), False),
        ("drained", borrower(next_start="refused"), False),
        ("serving", borrower(next_start="refused"), False),
        ("serving", borrower(wrong="other weights"), True),
        ("restarted", borrower(wrong="other weights"), False),
        ("drained", borrower(wrong="other weights"), False),
    ],
)
def test_what_would_not_start_is_not_stopped_and_what_is_wrong_is_not_admitted(wanted, preload, refused):
    signals = {"gate": made.gate_state(admission="withdrawn")}
    if not refused:
        assert planned(wanted, preload, **signals)
        return
    with pytest.raises(Refused):
        planned(wanted, preload, **signals)


def test_a_start_that_would_be_refused():
    with pytest.raises(Refused, match="would not start"):
        planned("started", borrower(next_start="refused"), unit=made.unit_state(active="inactive"))
