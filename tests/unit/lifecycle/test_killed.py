# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""SIGKILL of the module after each step of each transition, then the same call again.

The kill comes when a step has had its effect and has not yet been written down, which leaves the next run the least to
go by; and in the middle of those steps that have several effects. Whatever the moment: what is out of service has a
lease, and the second call ends where an undisturbed one does.
"""

from __future__ import annotations

import os
import signal
import typing as t

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.engine import Engine
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.gate import Gate
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.transition import Transition
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.unit import Unit
from ansible_collections.baremetal.vllm.plugins.modules import (
    vllm_drain,
    vllm_engine,
    vllm_sleep,
    vllm_wake,
)
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import AWAKE_MIB, OWNER, RESIDUE_MIB


class Change(t.NamedTuple):
    way: list[tuple[t.Any, dict]]
    call: tuple[t.Any, dict]
    steps: list[str]
    then: dict


DRAIN = (vllm_drain, {})
STOP = (vllm_engine, {"state": "stopped"})
SLEEP_1 = (vllm_sleep, {"level": 1})
SLEEP_2 = (vllm_sleep, {"level": 2})
SLEEP_KV = (vllm_sleep, {"kv_only": True})
WAKE_WEIGHTS = (vllm_wake, {"tags": ["weights"]})
OUT = ["lease", "withdraw", "await_router", "await_idle", "close", "await_closed"]
BACK = ["prove", "admit", "await_ready", "release"]
STAGED = ["wake_weights", "reload", "wake_kv", "reset_cache"]
HELD = {"unit": "active", "ready": False, "admission": "closed", "lease": OWNER}
SERVING = {
    "unit": "active",
    "ready": True,
    "admission": "open",
    "lease": None,
    "paused": False,
    "asleep": "",
    "used": [AWAKE_MIB],
}
ASLEEP = {**HELD, "asleep": "kv_cache+weights", "used": [RESIDUE_MIB]}
CHANGES = {
    "drain": Change([], DRAIN, [*OUT, "pause"], {**HELD, "paused": True, "asleep": ""}),
    "serve": Change([DRAIN], (vllm_drain, {"state": "serving"}), ["resume", *BACK], SERVING),
    "sleep": Change([], SLEEP_1, [*OUT, "sleep"], {**ASLEEP, "level": 1}),
    "sleep of the KV cache": Change([DRAIN], SLEEP_KV, ["sleep"], {**HELD, "asleep": "kv_cache"}),
    "deepen": Change([SLEEP_1], SLEEP_2, ["wake", "reset_cache", "sleep"], {**ASLEEP, "weights": "discarded"}),
    "from level 2 to 1": Change([SLEEP_2], SLEEP_1, [*STAGED, "sleep"], {**ASLEEP, "level": 1}),
    "wake": Change([SLEEP_1], (vllm_wake, {}), ["lease", "wake", "reset_cache", *BACK], SERVING),
    "wake from level 2": Change([SLEEP_2], (vllm_wake, {}), ["lease", *STAGED, *BACK], SERVING),
    "wake of the KV cache": Change([SLEEP_KV], (vllm_wake, {}), ["lease", "wake", "reset_cache", *BACK], SERVING),
    "wake of the weights": Change(
        [SLEEP_2], WAKE_WEIGHTS, ["lease", "wake_weights", "reload"], {**HELD, "asleep": "kv_cache"}
    ),
    "wake of the rest": Change(
        [SLEEP_2, WAKE_WEIGHTS], (vllm_wake, {"tags": ["kv_cache"]}), ["wake_kv", "reset_cache", *BACK], SERVING
    ),
    "stop": Change([], STOP, [*OUT, "stop"], {"unit": "inactive", "ready": False, "lease": OWNER, "used": [0]}),
    "start": Change([STOP], (vllm_engine, {"state": "started"}), ["lease", "start", *BACK], SERVING),
    "restart": Change(
        [], (vllm_engine, {"state": "restarted", "run": "roll-7"}), [*OUT, "stop", "start", *BACK], SERVING
    ),
}
# In the middle of a step: the method after whose call the process dies.
MIDDLE = [
    ("drain", Gate, "_record"),  # the map file is written, the running gate is not told
    ("drain", Engine, "pause"),
    ("serve", Engine, "resume"),
    ("sleep", Engine, "sleep"),
    ("sleep of the KV cache", Engine, "sleep"),
    ("sleep of the KV cache", Engine, "release_kv_cache"),
    ("from level 2 to 1", Engine, "sleep"),
    ("wake", Engine, "wake"),
    ("wake from level 2", Engine, "wake"),
    ("wake from level 2", Engine, "reload_weights"),
    ("wake of the KV cache", Engine, "wake"),
    ("stop", Unit, "_queue"),
    ("restart", Unit, "_queue"),
    ("start", Unit, "_queue"),
]


def kill_after(host, owner, method: str, call) -> None:
    """Call the module in a process that dies right after that method of the library has returned."""

    def spoil():
        before = getattr(owner, method)

        def deadly(*arguments, **keywords):
            before(*arguments, **keywords)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, method, deadly)

    module, options = call
    running = host.begin(module, spoil, **options)
    status = running.wait()
    assert os.WIFSIGNALED(status), f"it ended before {method} was called: {running.output.read_text()}"
    assert os.WTERMSIG(status) == signal.SIGKILL


def serves(seen: dict) -> bool:
    return seen["unit"] == "active" and seen["ready"] and not seen["paused"] and not seen["asleep"]


def prepare(world, change: Change):
    host = world(gate=True, gpus=1)
    host.weights = host.chat.seen()["weights"]
    for module, options in change.way:
        host.done(module, **options)
    return host


def converge(host, change: Change) -> None:
    seen = host.chat.seen()
    assert serves(seen) or seen["lease"] == OWNER, f"out of service, and nobody says why: {seen}"
    module, options = change.call
    host.done(module, **options)
    seen = host.chat.seen()
    assert {key: seen[key] for key in change.then} == change.then
    if serves(seen):
        assert seen["weights"] == host.weights
        assert not (host.root / "var/lib/vllm/chat/sleep.json").exists()
    again = host.run(module, check_mode=True, **options)
    assert not again["changed"], f"the third call would still do {again['actions']}"


@pytest.mark.parametrize("name", CHANGES)
def test_these_are_all_steps(world, name):
    change = CHANGES[name]
    host = prepare(world, change)
    module, options = change.call
    assert list(host.done(module, **options)["timings"]) == change.steps


@pytest.mark.parametrize(("name", "step"), [(name, step) for name, change in CHANGES.items() for step in change.steps])
def test_killed_after_a_step(world, name, step):
    change = CHANGES[name]
    host = prepare(world, change)
    kill_after(host, Transition, f"_{step}", change.call)
    converge(host, change)


@pytest.mark.parametrize(("name", "owner", "method"), MIDDLE, ids=lambda value: getattr(value, "__name__", value))
def test_killed_in_the_middle_of_a_step(world, name, owner, method):
    change = CHANGES[name]
    host = prepare(world, change)
    kill_after(host, owner, method, change.call)
    converge(host, change)


@pytest.mark.parametrize(
    ("owner", "method"),
    [(Engine, "pause"), (Transition, "_freeze"), (Transition, "_close")],
    ids=["pause", "freeze", "close"],
)
def test_killed_while_it_freezes_requests(world, owner, method):
    host = world(gate=True, token_rate=100)
    keep = (vllm_drain, {"mode": "keep", "timeout": 0.3})
    with host.gate.client("chat", tokens=900) as stream:
        stream.first()
        kill_after(host, owner, method, keep)
        assert host.chat.lease()["owner"] == OWNER
        again = host.done(keep[0], **keep[1])
        assert again["after"]["state"] == "draining"
        assert host.chat.busy() == 1
        assert not host.run(keep[0], check_mode=True, **keep[1])["changed"]
        host.done(vllm_drain, state="serving")
        assert stream.rest() == (900, "length")
    assert serves(host.chat.seen())
