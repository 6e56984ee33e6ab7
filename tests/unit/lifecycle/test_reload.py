# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""New weights at the same path: loaded on all ranks or by a restart, and served only then."""

from __future__ import annotations

import json
import os
import signal

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.transition import Transition
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.weights import take
from ansible_collections.baremetal.vllm.plugins.modules import vllm_drain, vllm_engine, vllm_reload, vllm_sleep
from ansible_collections.baremetal.vllm.tests.sim import model
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import OWNER


def new_weights(host) -> str:
    """Other values at the same path; what the simulator then calls their content."""
    model.write(host.root / "srv/models/tiny", "trained further")
    return model.read(host.root / "srv/models/tiny").content


def test_four_runs(world):
    host = world(gate=True, gpus=1)
    old = host.chat.seen()["weights"]
    new = new_weights(host)
    assert new != old
    seen = host.chat.seen()
    predicted = host.done(vllm_reload, check_mode=True)
    assert predicted["changed"]
    assert (host.chat.seen(), host.chat.mutations()) == (seen, [])
    real = host.done(vllm_reload)
    assert real["changed"]
    assert (predicted["before"], predicted["after"]) == (real["before"], real["after"])
    assert predicted["actions"] == real["actions"]
    assert real["weights"] == {"before": "", "after": take(str(host.root / "srv/models/tiny")).digest}
    reached = host.chat.seen()
    assert (reached["weights"], reached["ready"], reached["lease"]) == (new, True, None)
    host.chat.forget_requests()
    for check_mode in (False, True):
        again = host.done(vllm_reload, check_mode=check_mode)
        assert (again["changed"], again["actions"]) == (False, [])
    assert host.chat.mutations() == []
    assert host.chat.seen() == reached


def test_a_start_says_what_it_has_loaded_when_the_manifest_is_known(world):
    host = world(doors=True)
    digest = take(str(host.root / "srv/models/tiny")).digest
    host.done(vllm_engine, state="restarted", run="roll-7")
    assert host.info()["weights_digest"] == digest
    assert not host.done(vllm_reload)["changed"], "a start has loaded it"
    new_weights(host)
    result = host.done(vllm_reload)
    assert result["weights"]["before"] == digest != result["weights"]["after"]
    assert host.info()["weights_digest"] == result["weights"]["after"]


@pytest.mark.parametrize("fault", [{"reload_few_ranks": 1}, {"reload_5xx": True}])
def test_what_not_all_ranks_have_loaded_is_restarted(world, fault):
    host = world(gate=True, gpus=2, tensor_parallel_size=2, declared={"ranks": 2})
    new = new_weights(host)
    pid = host.chat.truth()["pid"]
    for name, value in fault.items():
        host.chat.set_fault(name, value)
    result = host.done(vllm_reload)
    assert "'chat' on" in result["recovered_from"] or "HTTP 5" in result["recovered_from"]
    assert "chat: stop the unit" in result["actions"]
    seen = host.chat.seen()
    assert (seen["weights"], seen["ready"], seen["lease"]) == (new, True, None)
    assert host.chat.truth()["pid"] != pid


def test_files_that_change_while_they_are_loaded_are_not_served(world):
    host = world(gate=True)
    new_weights(host)
    before = Transition._reload

    def spoil():
        def reload(self):
            model.write(host.root / "srv/models/tiny", "written at this moment")
            before(self)

        Transition._reload = reload

    running = host.begin(vllm_reload, spoil)
    result = running.result()
    assert not result.get("failed") and "changed while it was loaded" in result["recovered_from"]
    assert host.chat.seen()["weights"] == model.read(host.root / "srv/models/tiny").content


@pytest.mark.parametrize("step", ["pause", "reload", "reset_cache", "resume", "prove", "admit"])
def test_killed_after_a_step(world, step):
    host = world(gate=True, gpus=1)
    new = new_weights(host)

    def spoil():
        before = getattr(Transition, f"_{step}")

        def deadly(self):
            before(self)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(Transition, f"_{step}", deadly)

    assert os.WIFSIGNALED(host.begin(vllm_reload, spoil).wait())
    seen = host.chat.seen()
    assert seen["ready"] or seen["lease"] == OWNER
    host.done(vllm_reload)
    seen = host.chat.seen()
    assert (seen["weights"], seen["ready"], seen["lease"], seen["paused"]) == (new, True, None, False)
    assert not host.run(vllm_reload, check_mode=True)["changed"]


def test_what_was_drained_on_purpose_stays_out(world):
    host = world(gate=True)
    host.done(vllm_drain)
    new = new_weights(host)
    host.done(vllm_reload)
    seen = host.chat.seen()
    assert (seen["weights"], seen["admission"], seen["lease"]) == (new, "closed", OWNER)


def test_a_sleeper_is_told_to_wake_first(world):
    host = world(gpus=1)
    host.done(vllm_sleep)
    host.chat.forget_requests()
    assert "wake it first" in host.run(vllm_reload)["msg"]
    assert host.chat.mutations() == []


def test_an_unreadable_checkpoint_is_told_before_the_drain(world):
    host = world(gate=True)
    (host.root / "srv/models/tiny/model.safetensors").rename(host.root / "srv/models/tiny/gone")
    refused = host.run(vllm_reload)
    assert "holds no weight file" in refused["msg"]
    assert (host.chat.mutations(), host.gate.ready("chat"), host.chat.lease()) == ([], 200, None)
    json.dumps(refused)
