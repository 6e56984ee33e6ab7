# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""LoRA adapters of the simulated engine: statuses, messages and effects as vLLM 0.32.0 on CPU showed them."""

from __future__ import annotations

import shutil

import pytest

from ansible_collections.baremetal.vllm.tests.sim import lora
from ansible_collections.baremetal.vllm.tests.sim.harness import sim_engine

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = "a question"


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    for name in ("a", "b", "c"):
        lora.write(tmp_path / name, name)
    with sim_engine(tmp_path, served_model_name="m", enable_lora=True, max_loras=2, max_cpu_loras=2) as one:
        yield one


def load(engine, name, path) -> tuple[int, str]:
    reply = engine.request("POST", LOAD, {"lora_name": name, "lora_path": str(path)})
    return reply.status, reply.text if reply.status == 200 else reply.json["error"]["message"]


def unload(engine, name) -> int:
    return engine.request("POST", UNLOAD, {"lora_name": name}).status


def says(engine, name) -> list[int] | int:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 6, "return_token_ids": True}
    reply = engine.request("POST", "/v1/completions", body)
    return reply.json["choices"][0]["token_ids"] if reply.status == 200 else reply.status


def listed(engine) -> list[tuple]:
    data = engine.request("GET", "/v1/models").json["data"]
    return [(one["id"], one["root"], one["parent"], one["max_model_len"]) for one in data[1:]]


def test_a_life_of_an_adapter(engine, tmp_path):
    base = says(engine, "m")
    assert load(engine, "a", tmp_path / "a") == (200, "Success: LoRA adapter 'a' added successfully.")
    assert listed(engine) == [("a", str(tmp_path / "a"), "m", None)]
    assert says(engine, "a") not in (base, 404)
    assert says(engine, "m") == base
    status, message = load(engine, "a", tmp_path / "b")
    assert (status, message.split(".")[0]) == (400, "The lora adapter 'a' has already been loaded")
    assert unload(engine, "a") == 200
    assert listed(engine) == []
    assert says(engine, "a") == 404
    assert unload(engine, "a") == 404


@pytest.mark.parametrize(
    ("name", "path", "status", "message"),
    [
        ("m", "a", 400, "The lora adapter 'm' conflicts with a served base model."),
        ("", "a", 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ("x", "nothing", 404, "Loading lora x failed: No adapter found for <path>"),
        ("x", "large", 500, "LoRA rank 64 is greater than max_lora_rank 16."),
    ],
)
def test_refusals_of_a_load(engine, tmp_path, name, path, status, message):
    lora.write(tmp_path / "large", "large", rank=64)
    found, said = load(engine, name, tmp_path / path)
    assert found == status and message in said
    assert listed(engine) == []


def test_the_routes_depend_on_the_environment_and_the_effect_on_the_option(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    lora.write(tmp_path / "a", "a")
    with sim_engine(tmp_path) as engine:
        status, message = load(engine, "a", tmp_path / "a")
        assert status == 500 and "LoRA is not enabled. Use --enable-lora to enable LoRA." in message
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    with sim_engine(tmp_path, name="other", enable_lora=True) as engine:
        assert engine.request("GET", LOAD).status == 404


def test_zeros_have_no_effect(engine, tmp_path):
    lora.write(tmp_path / "zero", "")
    assert load(engine, "zero", tmp_path / "zero")[0] == 200
    assert says(engine, "zero") == says(engine, "m")


def test_the_prefix_cache_mixes_what_was_loaded_under_one_name_and_path(engine, tmp_path):
    load(engine, "a", tmp_path / "a")
    first = says(engine, "a")
    lora.write(tmp_path / "a", "b")
    assert says(engine, "a") == first, "what is on disk is read once"
    assert unload(engine, "a") == 200
    load(engine, "a", tmp_path / "a")
    mixed = says(engine, "a")
    assert engine.request("POST", "/reset_prefix_cache").json == {"success": True}
    load(engine, "b", tmp_path / "b")
    assert says(engine, "a") == says(engine, "b")
    assert mixed not in (first, says(engine, "b"))


def test_requests_in_flight_outlive_the_name(engine, tmp_path):
    load(engine, "a", tmp_path / "a")
    engine.set_fault("slow_tokens", 100)
    stream = engine.open_stream(40, model="a")
    engine.until(lambda: len(stream.ids) > 0, "its first token")
    names = 'running_lora_adapters="a",waiting_lora_adapters="a"'
    assert f'vllm:lora_requests_info{{max_lora="2",{names}}}' in engine.request("GET", "/metrics").text
    assert unload(engine, "a") == 200
    engine.set_fault("slow_tokens", None)
    assert stream.read().finish_reason == "length"


def test_what_was_dropped_from_memory_and_is_gone_kills_the_engine(engine, tmp_path):
    for name in ("a", "b", "c"):
        load(engine, name, tmp_path / name)
    shutil.rmtree(tmp_path / "c")
    assert says(engine, "c") != 500, "the last one used is in memory"
    shutil.rmtree(tmp_path / "a")
    assert says(engine, "a") == 500
    assert engine.truth()["cores"][0]["dead"]


def test_faults(engine, tmp_path):
    base = says(engine, "m")
    engine.set_fault("lora_noop", True)
    assert load(engine, "a", tmp_path / "a")[0] == 200
    assert says(engine, "a") == base
    engine.set_fault("lora_noop", None)
    engine.set_fault("lora_stays", True)
    assert unload(engine, "a") == 200 and len(listed(engine)) == 1
    engine.set_fault("lora_stays", None)
    assert unload(engine, "a") == 200
    engine.set_fault("lora_unlisted", True)
    assert load(engine, "b", tmp_path / "b")[0] == 200 and listed(engine) == []
    engine.set_fault("lora_unlisted", None)


@pytest.mark.parametrize("fault", [None, "lora_lost"])
def test_a_sleep_at_level_1_keeps_adapters_unless_told_otherwise(engine, tmp_path, fault):
    load(engine, "a", tmp_path / "a")
    own, base = says(engine, "a"), says(engine, "m")
    engine.set_fault("lora_lost", fault and True)
    engine.request("POST", "/sleep?level=1")
    engine.request("POST", "/wake_up")
    assert says(engine, "a") == (base if fault else own)


@pytest.mark.parametrize(("version", "status"), [("0.31.0", 500), ("0.32.0", 200), ("0.33.0", 200)])
def test_a_reload_with_lora(tmp_path, monkeypatch, version, status):
    """0.31 fails; later versions forget the adapters and read each one again for its next request."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    lora.write(tmp_path / "a", "a")
    with sim_engine(tmp_path, enable_lora=True, version=version, served_model_name="m") as engine:
        load(engine, "a", tmp_path / "a")
        own = says(engine, "a")
        assert engine.request("POST", "/collective_rpc", {"method": "reload_weights"}).status == status
        assert says(engine, "a") == own
