# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Admission in role vllm_engine: what is refused, and what the library and the gate's role get."""

from __future__ import annotations

import json
import re

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import admission, config
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.config import AdmissionConfig
from ansible_collections.baremetal.vllm.tests.unit.roles.role import CHECKOUT, Role, load

HAPROXY = {"backend": "haproxy", "sockets": ["/run/haproxy/admin.sock", "10.0.0.2:9999"], "proxy": "pool_chat"}
COMMAND = {"backend": "command", "command": ["/usr/local/sbin/balance", "--pool", "chat"]}


def declare(own=None, default=None, **keys):
    value = {"vllm_engine_instances": [{"name": "chat", "model": "/srv/models/m", "admission": own, **keys}]}
    return value if default is None else {**value, "vllm_engine_admission": default}


REFUSED = {
    "another balancer": (declare({"backend": "nginx"}), "The backend is one of gate, haproxy, command, none"),
    "no socket": (declare({**HAPROXY, "server": "e1", "sockets": []}), "missing: sockets"),
    "no names": (declare({"backend": "haproxy", "sockets": ["/s"]}), "missing: proxy, server"),
    "no command": (declare({"backend": "command"}), "missing: command"),
    "command of HAProxy": (declare({**HAPROXY, "server": "e1", "command": ["/x"]}), "not of this backend: command"),
    "sockets of the gate": (declare({"sockets": ["/s"]}), "not of this backend: sockets"),
    "server of none": (declare({"backend": "none", "server": "e1"}), "not of this backend: server"),
    "a word of its own": (declare({"backend": "none", "weight": 1}), "not of this backend: weight"),
    "a socket twice": (declare({**HAPROXY, "server": "e1", "sockets": ["/s", "/s"]}), "no socket is named twice"),
    "no time": (declare({**COMMAND, "timeout": 0}), "timeout is above 0"),
    "too much time": (declare({**COMMAND, "timeout": 300}), "below the drain's 300 s"),
    "relative socket": (declare({**HAPROXY, "server": "e1", "sockets": ["run/s"]}), "admission: run/s"),
    "no port": (declare({**HAPROXY, "server": "e1", "sockets": ["10.0.0.2"]}), "admission: 10.0.0.2"),
    "two commands": (declare({**HAPROXY, "server": "e1; shutdown"}), "admission: e1; shutdown"),
    "relative command": (declare({"backend": "command", "command": ["balance"]}), "admission: balance"),
    "a secret": (declare({**COMMAND, "command": ["/x", "--api-key=hunter2"]}), "admission: --api-key=…"),
    "a secret of two words": (declare({**COMMAND, "command": ["/x", "--password", "hunter2"]}), "--password"),
    "a port": (declare({"backend": "none"}, port=8001), "A port is the gate's"),
    "in the default": (declare(default={"backend": "haproxy", "sockets": ["/s"], "proxy": "p"}), "missing: server"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    value, says = REFUSED[name]
    text = Role("vllm_engine", value, "host1").refusal()
    assert text, "was accepted"
    text = " ".join(text.split())
    assert text.startswith("host1: engine 'chat'") and "Next step: " in text
    assert re.search(re.escape(says), text), text
    assert "hunter2" not in text or name == "a secret of two words"


MADE = [
    (declare(), None),
    (declare(port=8001), None),
    (declare({"backend": "gate"}, HAPROXY, port=8001), None),
    (declare({**HAPROXY, "server": "e1"}), AdmissionConfig("haproxy", HAPROXY["sockets"], "pool_chat", "e1")),
    (declare({"server": "e1"}, HAPROXY), AdmissionConfig("haproxy", HAPROXY["sockets"], "pool_chat", "e1")),
    (
        declare({"server": "e1", "proxy": None, "timeout": 3}, HAPROXY),
        AdmissionConfig("haproxy", HAPROXY["sockets"], "pool_chat", "e1", timeout=3.0),
    ),
    (declare(COMMAND), AdmissionConfig("command", command=COMMAND["command"])),
    (declare(COMMAND, HAPROXY), AdmissionConfig("command", command=COMMAND["command"])),
    (declare({"backend": "none"}, {**HAPROXY, "server": "x"}), AdmissionConfig("none")),
    (declare(None, COMMAND), AdmissionConfig("command", command=COMMAND["command"])),
]


@pytest.mark.parametrize(("value", "made"), MADE)
def test_what_the_library_reads(value, made):
    role = Role("vllm_engine", value, "host1")
    assert role.refusal() is None
    built = config.build(config.EngineConfig, json.loads(role.render("lifecycle.json.j2", "chat")), "chat.json")
    assert built.admission == made
    assert (built.gate is not None) == (made is None and "port" in value["vllm_engine_instances"][0])
    admission.choose(built)


def test_another_admission_makes_no_running_engine_stale():
    digests = {
        json.loads(Role("vllm_engine", value, "host1").render("lifecycle.json.j2", "chat"))["config_digest"]
        for value, _unused in MADE
    }
    assert len(digests) == 1


def test_the_gate_is_for_those_that_it_admits():
    parts = [load(CHECKOUT / "roles/vllm_gate" / part) for part in ("vars/main.yml", "defaults/main.yml")]
    engines = [
        {"name": "plain", "port": 1},
        {"name": "null", "port": 2, "admission": None},
        {"name": "own", "port": 3, "admission": {"backend": "gate"}},
        {"name": "default", "admission": {"server": "e1"}},
        {"name": "none", "admission": {"backend": "none"}},
    ]
    for default, names in (
        ({}, ["plain", "null", "own", "default"]),
        ({"backend": "gate"}, ["plain", "null", "own", "default"]),
        (HAPROXY, ["own"]),
        ({"backend": "none"}, ["own"]),
    ):
        role = Role("vllm_engine", {"vllm_engine_instances": engines, "vllm_engine_admission": default}, "host1")
        facts = {**parts[0], **parts[1]}
        found = role.template(facts["vllm_gate_engines"], **facts)
        assert [one["name"] for one in found] == names
