# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""LoRA adapters in role vllm_engine: what is refused, and what the unit and the library get."""

from __future__ import annotations

import json
import re

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import adapters, config
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.config import AdapterConfig, LoraLimits
from ansible_collections.baremetal.vllm.tests.unit.roles.role import Role

SQL = {"name": "sql", "path": "/srv/adapters/sql-7", "base": "Qwen/Qwen3-8B"}
LEGAL = {"name": "org/legal", "path": "/srv/adapters/legal", "prove": False}
LORA = {"enable-lora": True, "max-lora-rank": 32, "max-loras": 2}


def declare(*declared, options=None, **keys):
    """An engine with these adapters and options."""
    one = {"name": "chat", "model": "/srv/models/m", "config": {**LORA, **(options or {})}, "adapters": list(declared)}
    return {"vllm_engine_instances": [{**one, **keys}]}


PLAIN = {"vllm_engine_instances": [{"name": "chat", "model": "/srv/models/m"}]}


def refusal(value):
    return Role("vllm_engine", value, "host1").refusal()


REFUSED = {
    "two of a name": (declare(SQL, {**LEGAL, "name": "sql"}), "the adapters sql, sql"),
    "the model's name": (declare({**SQL, "name": "m"}), "none of them m, the model's"),
    "the served name": (declare({**SQL, "name": "chat-8b"}, served_model_name="chat-8b"), "none of them chat-8b"),
    "a blank": (declare({**SQL, "name": "s q l"}), "the adapters s q l"),
    "relative": (declare({**SQL, "path": "adapters/sql"}), "the adapters adapters/sql"),
    "slash": (declare({**SQL, "path": "/srv/adapters/sql/"}), "the adapters /srv/adapters/sql/"),
    "dots": (declare({**SQL, "path": "/srv/../etc"}), r"the adapters /srv/\.\./etc"),
    "dot at the end": (declare({**SQL, "path": "/srv/adapters/."}), r"the adapters /srv/adapters/\."),
    "home": (declare({**SQL, "path": "/home/me/sql"}), "the unit cannot see"),
    "no LoRA": (declare(SQL, options={"enable-lora": False}), "enable-lora: true"),
    "no room": (declare(SQL, LEGAL, options={"max-loras": 1}), "it has room for 1"),
    "no room in memory": (declare(SQL, LEGAL, options={"max-loras": 1, "max-cpu-loras": 1}), "it has room for 1"),
    "modules": (declare(SQL, options={"lora-modules": "x=/y"}), "lora-modules"),
    "API servers": (declare(SQL, options={"api-server-count": 2}), "api-server-count"),
    "switched off": (declare(SQL, env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0"}), "switch VLLM_ALLOW_RUNTIME"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    value, says = REFUSED[name]
    text = refusal(value)
    assert text, "was accepted"
    text = " ".join(text.split())
    assert text.startswith("host1: engine 'chat'") and "Next step: " in text
    assert re.search(says, text), text


@pytest.mark.parametrize(
    "value",
    [
        declare(),
        declare(SQL),
        declare(SQL, LEGAL),
        declare(SQL, LEGAL, options={"max-loras": 1, "max-cpu-loras": 2}),
        declare(SQL, env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true"}),
        declare({**SQL, "base": None, "prove": None}),
        declare(options={"enable-lora": False}),
    ],
)
def test_accepted(value):
    assert refusal(value) is None


def render(value, template):
    return Role("vllm_engine", value, "host1").render(template, "chat")


def test_what_the_library_reads():
    text = render(declare(SQL, LEGAL, {**SQL, "name": "x", "base": None, "prove": None}), "lifecycle.json.j2")
    built = config.build(config.EngineConfig, json.loads(text), "chat.json")
    assert built.adapters == [
        AdapterConfig("sql", "/srv/adapters/sql-7", "Qwen/Qwen3-8B", True),
        AdapterConfig("org/legal", "/srv/adapters/legal", "", False),
        AdapterConfig("x", "/srv/adapters/sql-7", "", True),
    ]
    assert built.lora == LoraLimits(max_rank=32, max_loras=2, max_cpu_loras=0)
    assert built.traits.lora is True
    adapters.check_declared(built, built.adapters[:2])
    none = config.build(config.EngineConfig, json.loads(render(PLAIN, "lifecycle.json.j2")), "chat.json")
    assert (none.adapters, none.lora) == ([], LoraLimits())


def test_the_role_and_the_library_know_the_same_names():
    pattern = Role("vllm_engine", PLAIN, "host1").facts["__vllm_engine_adapter_pattern"]
    assert pattern == f"^{adapters.NAME.pattern}$"


def test_the_environment_of_an_engine_with_adapters():
    assert 'VLLM_ALLOW_RUNTIME_LORA_UPDATING="1"' in render(declare(SQL), "engine.env.j2")
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in render(declare(), "engine.env.j2")


def test_the_unit_waits_for_the_file_systems_of_adapters():
    text = render(declare(SQL, LEGAL, model="org/name"), "instance.conf.j2")
    assert [line for line in text.splitlines() if line.startswith("RequiresMountsFor")] == [
        "RequiresMountsFor=/srv/adapters/sql-7",
        "RequiresMountsFor=/srv/adapters/legal",
    ]
    assert text.index("[Unit]") < text.index("RequiresMountsFor")


def test_another_adapter_makes_no_running_engine_stale():
    def digest(*declared):
        return json.loads(render(declare(*declared), "lifecycle.json.j2"))["config_digest"]

    assert digest(SQL) == digest(SQL, LEGAL) != digest()
