# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who admits requests: which backend, what several balancers do together, and what a change makes of it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import admission, config, haproxy
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.balancer import Look, effective, judge
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.config import AdmissionConfig, GateConfig
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import (
    Refused,
    Surprise,
    UnknownState,
    UsageError,
)
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.gate import ADMISSIONS, Gate
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.haproxy import HAProxies
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.plan import Options, plan, predict
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.script import Script
from ansible_collections.baremetal.vllm.tests.unit.plugins.module_utils.lifecycle_factory import (
    OURS,
    api_state,
    gate_state,
    lease,
    observation,
    unit_state,
)

GATE = GateConfig("/m", "/map", "engine_chat", "127.0.0.1", 8001)
HAPROXY = AdmissionConfig("haproxy", sockets=["/run/haproxy.sock", "[fd00::1]:9999"], proxy="pool", server="e1")
COMMAND = AdmissionConfig("command", command=["/usr/local/sbin/balance"])
ENGINE = {
    **dict.fromkeys(("unit", "user", "config_file", "env_file", "socket", "runtime", "runtime_version", "model"), "x"),
    **dict.fromkeys(("router_detection", "drain_timeout", "shutdown_timeout", "stop_timeout", "start_timeout"), 1.0),
}


def engine(gate=None, declared=None):
    return config.EngineConfig(
        engine="chat", served_model_name="x", config_digest="0", gate=gate, admission=declared, **ENGINE
    )


@pytest.mark.parametrize(
    ("gate", "declared", "backend", "kind"),
    [
        (GATE, None, "gate", Gate),
        (None, None, "none", None),
        (None, AdmissionConfig("gate"), "none", None),
        (GATE, AdmissionConfig("gate"), "gate", Gate),
        (None, HAPROXY, "haproxy", HAProxies),
        (GATE, HAPROXY, "haproxy", HAProxies),
        (None, COMMAND, "command", Script),
        (None, AdmissionConfig("none"), "none", None),
    ],
)
def test_the_declaration_chooses(gate, declared, backend, kind):
    one = engine(gate, declared)
    assert one.admission_backend == backend
    door = admission.choose(one)
    assert isinstance(door, kind or type(None))


@pytest.mark.parametrize(
    "declared",
    [
        dataclasses.replace(HAPROXY, sockets=[]),
        dataclasses.replace(HAPROXY, sockets=["run/haproxy.sock"]),
        dataclasses.replace(HAPROXY, sockets=["10.0.0.1"]),
        dataclasses.replace(HAPROXY, sockets=["10.0.0.1:99999"]),
        dataclasses.replace(HAPROXY, sockets=[":9999"]),
        dataclasses.replace(HAPROXY, proxy=""),
        dataclasses.replace(HAPROXY, server="e1; shutdown sessions server pool/e1"),
        dataclasses.replace(COMMAND, command=[]),
        dataclasses.replace(COMMAND, command=["balance"]),
    ],
)
def test_a_declaration_that_is_not_whole_is_refused(declared):
    with pytest.raises(UsageError, match="engine 'chat' has admission") as caught:
        admission.choose(engine(None, declared))
    assert caught.value.next_step


def test_a_file_with_another_backend_is_refused():
    with pytest.raises(UsageError, match="wrong type for backend"):
        config.build(AdmissionConfig, {"backend": "nginx"}, "chat.json")


@pytest.mark.parametrize(
    ("told", "proved", "word"),
    [
        ("open", True, "open"),
        ("open", False, "withdrawn"),
        ("withdrawn", True, "withdrawn"),
        ("withdrawn", False, "withdrawn"),
        ("closed", True, "closed"),
        ("closed", False, "closed"),
        ("", True, ""),
    ],
)
def test_what_a_balancer_is_to_do(told, proved, word):
    assert effective(told, proved) == word


def looks(*words, sessions=1, up=True):
    return [Look(f"HAProxy at {number}", word, up, sessions, 10) for number, word in enumerate(words)]


# (what they do, what was told, proved): the admission that is so, told where it differs, whether requests come that
# were to be kept away, and whether all of them send.
JUDGED = [
    (["open"], "open", True, "open", "", False, True),
    (["open"], "", True, "open", "", False, True),
    (["withdrawn"], "", True, "withdrawn", "", False, False),
    (["open"], "withdrawn", True, "open", "withdrawn", True, False),
    (["open"], "closed", True, "open", "closed", True, False),
    (["open"], "open", False, "open", "withdrawn", True, False),
    (["withdrawn"], "open", False, "open", "", False, False),
    (["closed"], "open", False, "open", "", False, False),
    (["withdrawn"], "open", True, "withdrawn", "open", False, False),
    (["closed"], "open", True, "closed", "open", False, False),
    (["withdrawn"], "withdrawn", True, "withdrawn", "", False, False),
    (["closed"], "withdrawn", True, "closed", "", False, False),
    (["withdrawn"], "closed", True, "withdrawn", "closed", False, False),
    (["closed"], "closed", True, "closed", "", False, False),
    (["open", "open"], "open", True, "open", "", False, True),
    (["open", "closed"], "open", True, "open", "open", False, False),
    (["open", "closed"], "closed", True, "open", "closed", True, False),
    (["closed", "withdrawn"], "closed", True, "withdrawn", "closed", False, False),
    (["closed", "withdrawn"], "withdrawn", True, "withdrawn", "", False, False),
    (["open", "withdrawn"], "", True, "open", "open", False, False),
]


@pytest.mark.parametrize(("words", "told", "proved", "admitted", "differs", "forgot", "ready"), JUDGED)
def test_what_balancers_do_together(words, told, proved, admitted, differs, forgot, ready):
    state = judge(looks(*words), told, proved)
    assert (state.admission, state.told, state.forgot, state.ready) == (admitted, differs, forgot, ready)
    assert bool(state.differs) == bool(differs)
    assert (state.sessions, state.total) == (len(words), 10 * len(words))


def test_every_case_of_one_and_two_balancers_is_judged_and_none_hides_that_requests_come():
    for count in (1, 2):
        for words in itertools.product(ADMISSIONS, repeat=count):
            for told, proved in itertools.product(("", *ADMISSIONS), (True, False)):
                state = judge(looks(*words), told, proved)
                if "open" in words:
                    assert state.admission == "open"
                    assert state.forgot == (effective(told, proved) in ("withdrawn", "closed"))
                assert not (state.ready and set(words) != {"open"})
    assert not judge(looks("open", up=False), "open", True).ready


STATE = {"srv_admin_state": "0", "srv_uweight": "1", "srv_op_state": "2"}
STAT = {"scur": "2", "qcur": "1", "stot": "9"}


@pytest.mark.parametrize(
    ("state", "word", "up"),
    [
        ({}, "open", True),
        ({"srv_admin_state": "4"}, "open", True),  # began disabled, and is ready since
        ({"srv_admin_state": "8"}, "withdrawn", True),
        ({"srv_admin_state": "16"}, "withdrawn", True),
        ({"srv_uweight": "0"}, "withdrawn", True),
        ({"srv_admin_state": "1"}, "closed", True),
        ({"srv_admin_state": "5", "srv_op_state": "0"}, "closed", False),
        ({"srv_admin_state": "9"}, "closed", True),
        ({"srv_admin_state": "32"}, "closed", True),
        ({"srv_op_state": "0"}, "open", False),
        ({"srv_op_state": "1"}, "open", True),
    ],
)
def test_what_haproxy_says_of_a_server(state, word, up):
    found = haproxy._read("HAProxy", {**STATE, **state}, STAT)
    assert (found.word, found.up, found.sessions, found.total) == (word, up, 3, 9)


@pytest.mark.parametrize("broken", [{"scur": ""}, {"qcur": "-"}, {"stot": None}])
def test_a_missing_number_is_never_0(broken):
    stat = {key: value for key, value in {**STAT, **broken}.items() if value is not None}
    with pytest.raises(Surprise, match="does not give its numbers"):
        haproxy._read("HAProxy", STATE, stat)


# What the planner makes of it.

OPTIONS = Options(owner=OURS)
OUT = ["withdraw", "await_router", "await_idle", "close", "await_closed"]
FORGOTTEN = gate_state("open", told="closed")
HELD = lease(purpose="drained")
ASLEEP = {"api": api_state(paused=True, sleep="weights_offloaded"), "held": lease(purpose="asleep")}
STOPPED = {"unit": unit_state("inactive", "dead"), "held": lease(purpose="stopped")}
PLANS = [
    # An engine under lease that is admitted again is withdrawn again by what wants it out.
    ({"gate": FORGOTTEN, "held": HELD}, "draining", "drained", [*OUT, "pause"]),
    (
        {"gate": FORGOTTEN, "held": HELD, "api": api_state(paused=True)},
        "draining",
        "drained",
        ["resume", *OUT, "pause"],
    ),
    ({"gate": FORGOTTEN, "held": HELD}, "draining", "serving", ["prove", "admit", "await_ready", "release"]),
    ({"gate": FORGOTTEN, **ASLEEP}, "asleep", "asleep", ["close"]),
    ({"gate": FORGOTTEN, **STOPPED}, "stopped", "stopped", ["close"]),
    ({"gate": gate_state("closed"), **ASLEEP}, "asleep", "asleep", []),
    ({"gate": gate_state("closed"), **STOPPED}, "stopped", "stopped", []),
    # One of two that does not send is no reason to take the engine out, and one to admit it again.
    (
        {"gate": gate_state("open", told="open")},
        "withdrawn",
        "serving",
        ["prove", "admit", "await_ready"],
    ),
    ({"gate": gate_state("open", told="open")}, "withdrawn", "drained", ["lease", *OUT, "pause"]),
]


@pytest.mark.parametrize(("signals", "state", "wanted", "steps"), PLANS)
def test_what_differs_is_put_right(signals, state, wanted, steps):
    now = observation(backend="haproxy", **signals)
    assert now.state == state
    assert (now.gate.differs in now.reasons) == bool(now.gate.differs)
    found = plan(wanted, now, OPTIONS)
    assert [step.name for step in found] == steps
    predicted = predict(now, found, OPTIONS)
    assert predicted["admission"] == ("open" if wanted == "serving" else "closed")


@pytest.mark.parametrize("wanted", ["stopped", "restarted"])
@pytest.mark.parametrize("backend", ["gate", "haproxy", "command"])
def test_what_a_silent_balancer_may_still_send_is_not_stopped(backend, wanted):
    now = observation(gate=None, backend=backend, unseen={"gate": "HAProxy at x gives no answer"})
    assert now.state == "unknown"
    if backend == "gate":  # one that is down lets nothing through
        assert "stop" in [step.name for step in plan(wanted, now, OPTIONS)]
        return
    with pytest.raises(UnknownState, match="HAProxy at x gives no answer"):
        plan(wanted, now, OPTIONS)
    assert "stop" in [step.name for step in plan(wanted, now, OPTIONS._replace(force=True))]


@pytest.mark.parametrize("wanted", ["drained", "serving", "asleep", "reloaded"])
def test_a_silent_balancer_forbids_what_needs_to_know(wanted):
    now = observation(gate=None, backend="haproxy", unseen={"gate": "no answer"})
    with pytest.raises(UnknownState, match="no answer"):
        plan(wanted, now, OPTIONS)


def test_none_and_no_development_endpoints_cannot_be_drained_but_stopped():
    now = observation(has_gate=False, api=api_state(dev_mode=False))
    with pytest.raises(Refused, match="neither admission"):
        plan("drained", now, OPTIONS)
    assert [step.name for step in plan("stopped", now, OPTIONS)] == ["lease", "await_idle", "stop"]
