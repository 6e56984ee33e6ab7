# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A preload daemon and its engines: every way in which vLLM was seen to serve the wrong weights, to hold them twice, or
to say nothing, and what our doors and modules make of it.

The world is read by its own means: the ledger, the simulator's truth, completions, unit files, journals.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import struct
import tempfile
import time

import pytest
import yaml

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import cli, config, lease, preload, store
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.deadline import Deadline
from ansible_collections.baremetal.vllm.plugins.modules import (
    vllm_drain,
    vllm_engine,
    vllm_preload,
    vllm_sleep,
    vllm_wake,
)
from ansible_collections.baremetal.vllm.tests.sim import model, weightcache
from ansible_collections.baremetal.vllm.tests.sim.ledger import start_time
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import wait_for

DAEMON = "vllm-preload@base.service"
READY = {"daemon": "base", "state": "ready"}
ABSENT = {"daemon": "base", "state": "absent"}
START = (vllm_engine, {"state": "started"})
STOP = (vllm_engine, {"state": "stopped"})
RESTART = (vllm_engine, {"state": "restarted"})

# MiB of the simulated daemon, of an engine that maps its weights, of one that has its own; the driver's own share.
LENT, MAPS, OWN, DRIVER = 13882, 58591, 71885, 43
RESIDUE = 1502
ALONE, BOTH = LENT + DRIVER, LENT + MAPS + DRIVER


@pytest.fixture
def command(capfd):
    """`command("preload-preflight", "base")` is (exit code, all that it printed)."""

    def run(*words):
        code = cli.main(words)
        said = capfd.readouterr()
        return code, said.out + said.err

    return run


@pytest.fixture
def pair(world):
    """`pair()` is a host with the daemon ``base`` and the engine ``chat``, neither of them started.

    ``daemon`` are options of the daemon, ``use`` of the engine's use of it; others are those of a world.
    """

    def build(daemon=None, use=None, doors=True, **settings):
        host = world(**{"gpus": 1, "start": False, "doors": doors, **settings})
        host.base = host.daemon(**{"engines": ["chat"], "doors": True, **(daemon or {})})
        host.takes_from(host.chat, **(use or {}))
        return host

    return build


def start(host, unit: str) -> str:
    """As an operator does; the journal."""
    host.systemd.ctl("start", unit)
    return host.systemd.journal(unit)


def running(host):
    """Both of them serve."""
    host.done(vllm_preload, **READY)
    host.done(START[0], **START[1])
    return host


def other_values(host, name: str = "other") -> str:
    """A checkpoint that vLLM cannot tell from that of the daemon."""
    folder = model.write(host.root / "srv/models" / name, "other values")
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


def serves(host, path: str) -> None:
    """Let the engine's declaration and options name another checkpoint."""
    options = host.root / "etc/vllm/engines/chat.yaml"
    options.write_text(yaml.safe_dump(yaml.safe_load(options.read_text()) | {"model": path}, width=10000))
    host.change("etc/vllm/lifecycle/chat.json", model=path)


def digest(host, path: str, command) -> str:
    code, said = command("weights", path)
    assert code == 0, said
    return json.loads(said[said.index("{") :])["digest"]


def loads(host) -> int:
    """How often the daemon has loaded the model."""
    return host.systemd.journal(DAEMON).count("loaded model")


# 1. Ready and absent.


def test_four_runs_of_a_daemon_with_its_doors(pair):
    host = pair()

    def world_is():
        return host.base.health(), host.gpu.used(), host.systemd.procs(DAEMON)

    for state, health, used in (("ready", 200, ALONE), ("absent", 0, 0)):
        before, files = world_is(), host.files()
        predicted = host.done(vllm_preload, daemon="base", state=state, check_mode=True)
        assert predicted["changed"]
        assert (world_is(), host.files()) == (before, files), "check mode changed something"
        real = host.done(vllm_preload, daemon="base", state=state)
        assert real["changed"]
        assert (predicted["before"], predicted["after"]) == (real["before"], real["after"])
        assert predicted["actions"] == real["actions"]
        reached = world_is()
        assert reached[:2] == (health, used)
        assert bool(reached[2]) is (state == "ready")
        for check_mode in (False, True):
            again = host.done(vllm_preload, daemon="base", state=state, check_mode=check_mode)
            assert (again["changed"], again["actions"]) == (False, [])
            assert (again["before"], again["after"]) == (real["after"], real["after"])
            assert world_is() == reached
    assert loads(host) == 1


def test_what_was_loaded_is_on_record(pair, command):
    host = pair()
    real = host.done(vllm_preload, **READY)
    loaded = store.read_json(host.root / "var/lib/vllm/preload/base/loaded.json")
    wanted = digest(host, f"{host.root}/srv/models/tiny", command)
    assert real["digest"] == wanted == loaded["manifest"]["digest"]
    assert loaded["held_mib"] == {host.gpu.first.uuid: LENT}
    assert set(host.base.ranks()) <= set(loaded["pids"])
    assert (loaded["runtime_version"], loaded["driver_version"]) == ("0.33.0", "580.105.08")


def test_an_engine_without_a_daemon_has_no_preload(world):
    assert world().info()["preload"] is None


def test_a_daemon_whose_unit_calls_no_doors_is_not_called_ready(pair):
    host = pair(daemon={"unit": {"ExecStartPre": [], "ExecStartPost": []}})
    result = host.run(vllm_preload, **READY, timeout=5)
    assert "what it has loaded is not on record" in result["msg"]
    host.systemd.ctl("stop", DAEMON)


# 2. Other values, equal shapes.


def test_plain_vllm_serves_the_old_values_and_we_say_so(pair, command):
    """Without our doors nothing is noticed by anyone else: 200 everywhere, the daemon's values for the checkpoint's."""
    host = pair(doors=False)
    old = digest(host, f"{host.root}/srv/models/tiny", command)
    path = other_values(host)
    serves(host, path)
    new = digest(host, path, command)
    host.done(vllm_preload, **READY)
    start(host, host.chat.unit)
    assert host.chat.active() == "active"
    assert host.chat.request("GET", "/health").status == 200
    assert host.chat.truth()["cores"][0]["weights"] == model.read(f"{host.root}/srv/models/tiny").content
    assert host.chat.truth()["cores"][0]["weights"] != model.read(path).content

    seen = host.info()["preload"]
    assert old in seen["wrong"]
    assert new in seen["wrong"]
    assert seen["next_start"] == "refused"
    host.done(vllm_drain)
    result = host.run(vllm_drain, state="serving")
    assert old in result["msg"]
    assert new in result["msg"]
    assert host.info()["state"] == "drained", "what serves wrong weights is not admitted"


@pytest.mark.parametrize("fallback", [False, True])
def test_an_engine_with_other_values_does_not_start(pair, command, fallback):
    """With a fall-back neither: vLLM would map them, since it sees no reason to fall back."""
    host = pair(use={"fallback": fallback})
    path = other_values(host)
    serves(host, path)
    host.done(vllm_preload, **READY)
    journal = start(host, host.chat.unit)
    assert digest(host, path, command) in journal
    assert digest(host, f"{host.root}/srv/models/tiny", command) in journal
    assert "vLLM would not notice" in journal
    assert "Initializing" not in journal, "vLLM was not even started"
    assert host.gpu.used() == ALONE


def test_an_engine_that_mapped_other_values_past_preflight_does_not_get_ready(pair):
    host = pair(doors=("ready",))
    serves(host, other_values(host))
    host.done(vllm_preload, **READY)
    journal = start(host, host.chat.unit)
    assert "Mapped 4 tensors" in journal
    assert "serves other weights than its own" in journal
    assert host.chat.active() == "failed"


def test_a_restart_that_would_be_refused_stops_nothing(pair, command):
    host = running(pair())
    path = other_values(host)
    serves(host, path)
    pid = host.chat.truth()["pid"]
    for module, options in (RESTART, (vllm_engine, {"state": "restarted", "check_mode": True})):
        result = host.run(module, **options)
        assert digest(host, path, command) in result["msg"]
        assert "would not start again" in result["msg"]
        assert (host.chat.truth()["pid"], host.chat.active()) == (pid, "active")
    assert host.info()["preload"]["next_start"] == "refused"
    assert host.info()["preload"]["weights_source"] == "preload_zero_copy"


def test_a_checkpoint_that_changed_since_the_daemon_read_it(pair, command):
    """The daemon has to load it anew, which it does at once where nobody maps the old values."""
    host = running(pair())
    path = f"{host.root}/srv/models/tiny"
    old = digest(host, path, command)
    model.write(host.root / "srv/models/tiny", "new values")
    files = host.files()
    host.info()
    assert host.files() == files, "a look remembers nothing"
    new = digest(host, path, command)
    reason = f"it has loaded {old}, while {path} is {new} now"
    looked = host.run(vllm_preload, **READY)
    assert "The running engine(s) chat may map its memory" in looked["msg"]
    assert reason in looked["msg"]
    seen = host.info()["preload"]
    assert (seen["weights_source"], seen["next_start"]) == ("preload_zero_copy", "cold")
    assert reason in seen["why"]
    assert host.done(RESTART[0], **RESTART[1])["started"]["preload"]["digest"] == new
    assert reason in host.systemd.journal(host.chat.unit)
    assert host.chat.truth()["cores"][0]["weights"] == model.read(path).content
    assert loads(host) == 2

    host.done(STOP[0], **STOP[1])
    model.write(host.root / "srv/models/tiny", "newer values")
    looked = host.done(vllm_preload, **READY, check_mode=True)
    assert (looked["before"]["state"], looked["changed"]) == ("unusable", True), looked
    assert host.done(vllm_preload, **READY)["digest"] == digest(host, path, command)
    assert loads(host) == 3


def test_a_checkpoint_that_changes_while_it_is_read(pair):
    host = pair(daemon={"load_time": 2})
    host.systemd.ctl("start", "--no-block", DAEMON)
    wait_for(lambda: host.base.health() == 503, "the daemon to load")
    model.write(host.root / "srv/models/tiny", "new values")
    wait_for(lambda: host.systemd.show(DAEMON)["ActiveState"] == "failed", "the start to end")
    journal = host.systemd.journal(DAEMON)
    assert "has changed while it was read" in journal
    assert "model.safetensors has another content" in journal


def test_weights_that_are_not_allowed_are_not_loaded(pair):
    host = pair(daemon={"declared": {"weights": {"method": "full", "allowed": [f"sha256:{'0' * 64}"]}}})
    result = host.run(vllm_preload, **READY)
    assert "none of the 1 allowed" in "\n".join(result["journal"])
    assert loads(host) == 0


# 3. From disk after all.


def test_a_mismatch_with_a_fall_back_is_told(pair):
    """The declaration says equal, the options do not: both copies on the GPU, one line among thousands."""
    host = pair(use={"fallback": True}, dtype="float16")
    running(host)
    assert host.gpu.used() == BOTH, "vLLM makes its KV cache smaller by what the daemon holds"
    seen = host.info()["preload"]
    assert seen["weights_source"] == "disk"
    assert "its weights come from disk, not from the daemon (zero_copy)" in seen["why"][0]
    assert "mismatch on fields: ['dtype']" in seen["why"][0]
    result = host.done(vllm_preload, **ABSENT)
    assert result["after"]["state"] == "absent", "an engine with weights of its own does not hold the daemon back"
    assert host.gpu.used() == MAPS + DRIVER


def test_a_known_mismatch_is_judged_before_anything_stops(pair):
    host = running(pair())
    host.change("etc/vllm/lifecycle/chat.json", traits={"dtype": "float16"})
    result = host.run(*RESTART[:1], **RESTART[1])
    assert "dtype differs: 'float16' for the engine, 'bfloat16' for the daemon" in result["msg"]
    assert host.chat.active() == "active"
    host.takes_from(host.chat, fallback=True)
    seen = host.info()["preload"]
    assert (seen["next_start"], seen["weights_source"]) == ("cold", "preload_zero_copy")


def test_quantisation_that_the_daemon_refuses_is_found_before_it_loads(pair):
    host = pair()
    path = host.root / "srv/models/tiny/config.json"
    path.write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    result = host.run(vllm_preload, **READY)
    assert "vllm preload does not take the quantisation awq" in "\n".join(result["journal"])
    assert "pre-processed" not in host.systemd.journal(DAEMON), "vLLM was not even started"
    assert "does not take the quantisation awq" in host.run(START[0], **START[1])["msg"]
    host.takes_from(host.chat, fallback=True)
    assert host.done(START[0], **START[1])["started"]["preload"]["source"] == "disk"
    assert host.info()["preload"]["next_start"] == "cold"


def test_an_engine_that_leaves_no_room_for_the_daemons_weights_is_told_how(pair):
    host = pair(gpu_memory_utilization=0.05)
    host.done(vllm_preload, **READY)
    journal = start(host, host.chat.unit)
    assert "Externally held weights" in journal
    assert "chat: its gpu-memory-utilization has to include the weights that the daemon holds" in journal


# 4. Sleep.


def test_zero_copy_and_sleep_mode_need_an_opt_in(pair):
    host = pair(use={"allow_zero_copy_sleep": True})
    host.change("etc/vllm/lifecycle/chat.json", preload={"daemon": "base", "wait": 60})
    host.done(vllm_preload, **READY)
    result = host.run(START[0], **START[1])
    assert "sleep mode and zero copy together" in result["msg"]
    assert "allow_zero_copy_sleep" in result["msg"]
    assert "has sleep mode and takes its weights in zero copy" in start(host, host.chat.unit)
    assert host.chat.active() == "failed"


def test_an_engine_that_maps_weights_does_not_sleep_unasked(pair):
    host = running(pair())
    for options in ({"level": 1}, {"level": 2}, {"kv_only": True}):
        result = host.run(vllm_sleep, **options)
        assert "in zero copy: a sleep would free its KV cache only" in result["msg"]
    assert host.chat.mutations() == []


@pytest.mark.parametrize("level", [1, 2])
def test_with_an_opt_in_the_kv_cache_is_freed_and_a_plain_wake_brings_it_back(pair, level):
    host = running(pair(use={"allow_zero_copy_sleep": True}))
    before = host.chat.complete()
    result = host.done(vllm_sleep, level=level)
    assert result["freed_mib"] == {host.gpu.first.uuid: MAPS - RESIDUE}
    assert host.gpu.used() == LENT + RESIDUE + DRIVER
    assert host.info()["preload"]["weights_source"] == "preload_zero_copy"
    host.chat.forget_requests()
    assert host.done(vllm_wake)["after"]["state"] == "serving"
    assert [one for one in host.chat.mutations() if "wake" in one or "rpc" in one] == ["POST /wake_up"]
    assert host.chat.complete() == before
    assert host.gpu.used() == BOTH
    assert host.info()["state"] == "serving"


def test_a_wake_by_hand_from_level_2_is_right_where_the_weights_are_the_daemons(pair):
    host = running(pair(use={"allow_zero_copy_sleep": True}))
    before = host.chat.complete()
    host.done(vllm_sleep, level=2)
    host.chat.request("POST", "/wake_up")
    assert host.info()["state"] == "serving", "of an engine with weights of its own nothing would be known"
    assert host.chat.complete() == before


def test_an_engine_in_copy_mode_sleeps_at_level_1_only(pair):
    """Its loader, ipc_cache, does not know how to load weights anew."""
    host = running(pair(use={"mode": "copy"}))
    result = host.run(vllm_sleep, level=2)
    assert "cannot load them anew after level 2" in result["msg"]
    assert host.chat.mutations() == []
    before = host.chat.complete()
    host.done(vllm_sleep, level=1)
    assert host.gpu.used() == LENT + RESIDUE + DRIVER, "the daemon keeps what it gave away"
    host.done(vllm_wake)
    assert host.chat.complete() == before


# 5. Copy mode uses the daemon up.


def test_a_daemon_that_gave_its_weights_away_is_used_up_and_restarted_before_the_next_start(pair):
    host = running(pair(use={"mode": "copy"}))
    (rank,) = host.base.ranks()
    assert host.base.health() == 200
    assert host.gpu.processes()[rank] == LENT, "its memory is held, and not free"
    looked = host.run(vllm_preload, **READY, check_mode=True)
    assert (looked["before"]["state"], looked["engines"]) == ("unusable", {"chat": "preload_copy"})
    assert looked["reasons"] == ["its weights were given to chat"]
    seen = host.info()["preload"]
    assert (seen["weights_source"], seen["next_start"]) == ("preload_copy", "cold")
    assert "its weights were given to chat" in seen["why"]

    result = host.done(RESTART[0], **RESTART[1])
    assert result["started"]["preload"]["source"] == "preload_copy"
    assert "restarts preload daemon 'base': its weights were given to chat" in host.systemd.journal(host.chat.unit)
    assert host.base.ranks() != [rank]
    assert loads(host) == 2


def test_a_used_up_daemon_may_be_renewed_while_the_engine_runs_on_its_own_copy(pair):
    host = running(pair(use={"mode": "copy"}))
    assert host.done(vllm_preload, **READY)["changed"]
    assert host.info()["preload"]["next_start"] == "copy"
    assert host.gpu.used() == LENT + OWN + DRIVER


def test_a_promise_is_taken_back_when_the_engine_never_took_the_weights(pair):
    host = pair(use={"mode": "copy"}, fault=["start_crash=0"])
    host.done(vllm_preload, **READY)
    start(host, host.chat.unit)
    assert host.chat.active() == "failed"
    assert host.run(vllm_preload, **READY, check_mode=True)["before"]["state"] == "ready"
    assert loads(host) == 1


def test_an_engine_that_fails_after_it_took_the_weights_has_used_the_daemon_up(pair):
    """In copy mode vLLM has the daemon let go, also when it then falls back, or dies."""
    host = pair(use={"mode": "copy"}, fault=["preload_fails_late"])
    host.done(vllm_preload, **READY)
    start(host, host.chat.unit)
    assert host.chat.active() == "failed"
    assert host.run(vllm_preload, **READY, check_mode=True)["reasons"] == ["its weights were given to chat"]


def test_engines_of_one_daemon_have_one_mode(world):
    host = world(gpus=1, engines=("chat", "code"), start=False, doors=True)
    host.daemon(engines=["chat", "code"], doors=True)
    host.takes_from(host.chat)
    host.takes_from(host.engines["code"], mode="copy")
    assert "chat zero_copy, code copy" in "\n".join(host.run(vllm_preload, **READY)["journal"])
    assert "engines of both modes: chat zero_copy, code copy" in host.run(START[0], **START[1])["msg"]


# 6. A daemon that is lost.


def test_a_lost_daemon_is_reported_and_comes_back_with_the_engine(pair):
    host = running(pair())
    tokens = host.chat.complete()
    host.systemd.ctl("stop", DAEMON)
    assert host.systemd.show(DAEMON)["ActiveState"] == "inactive", "241 is a clean end"
    assert "as vLLM ends its daemon after SIGTERM" in host.systemd.journal(DAEMON)
    assert host.chat.complete() == tokens
    assert host.gpu.used() == MAPS + LENT - 588 + DRIVER, "charged to the engine now"

    seen = host.info()["preload"]
    assert (seen["state"], seen["weights_source"], seen["next_start"]) == ("lost", "preload_zero_copy", "cold")
    assert "daemon lost; scheduled for the next restart" in seen["why"]
    refused = host.run(vllm_preload, **READY)
    assert "chat has lost its daemon" in refused["msg"]
    assert refused["left"]["base"] == {"mapped_by": ["chat"], "lost": ["chat"]}
    assert "would hold a second copy" in start(host, DAEMON), "nor does systemd start it"
    assert loads(host) == 1

    host.done(STOP[0], **STOP[1])
    assert host.done(vllm_preload, **READY)["after"]["state"] == "ready"
    host.done(START[0], **START[1])
    assert host.gpu.used() == BOTH
    assert host.info()["preload"]["why"] == []


def test_a_daemon_younger_than_its_engine_is_lost_to_it(pair):
    host = running(pair())
    result = host.done(vllm_preload, **ABSENT, force=True)
    assert result["lost"] == ["chat"]
    forced = host.done(vllm_preload, **READY, force=True)
    assert forced["after"] == {"state": "ready", "mapped_by": ["chat"]}
    assert host.gpu.used() == BOTH + LENT - 588, "a second copy, as was asked for"
    seen = host.info()["preload"]
    assert (seen["state"], seen["next_start"]) == ("lost", "zero-copy")
    host.done(vllm_preload, **ABSENT)
    assert host.gpu.used() == BOTH - 588, "the second copy is nobody's, and may go"
    host.done(vllm_preload, **READY, force=True)
    host.done(RESTART[0], **RESTART[1])
    assert host.info()["preload"]["state"] == "ready"
    assert host.gpu.used() == BOTH


def test_an_unclean_end_with_241_of_an_old_unit_is_no_failure(pair):
    host = pair(daemon={"unit": {"SuccessExitStatus": []}})
    host.done(vllm_preload, **READY)
    host.systemd.ctl("stop", DAEMON)
    assert host.systemd.show(DAEMON)["ActiveState"] == "failed"
    assert not host.done(vllm_preload, **ABSENT)["changed"]


def test_left_over_sockets_are_no_error(pair):
    host = pair()
    host.done(vllm_preload, **READY)
    path = weightcache.socket_path(host.base.socket_dir, host.gpu.first.uuid)
    for pid in host.systemd.procs(DAEMON):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: host.systemd.show(DAEMON)["ActiveState"] == "failed", "the unit to notice")
    assert path.exists()
    assert path.with_name(f"{path.name}.lock").exists()
    assert host.done(vllm_preload, **READY)["after"]["state"] == "ready"


# 7. Who maps.


def test_an_engine_that_is_no_longer_declared_for_the_daemon_is_found_by_its_memory(pair):
    host = running(pair())
    host.change("etc/vllm/preload/base.json", engines=[])
    host.change("etc/vllm/lifecycle/chat.json", preload=None)
    result = host.run(vllm_preload, **ABSENT)
    assert result["left"]["base"]["mapped_by"] == ["chat"]
    assert result["engines"] == {"chat": "preload_zero_copy"}
    assert host.base.health() == 200


def test_an_engine_on_the_same_gpu_that_loads_from_disk_maps_nothing(world):
    host = world(gpus=1, engines=("chat", "code"), start=False, gpu_memory_utilization=0.4)
    host.daemon(engines=["chat"], doors=True)
    host.done(vllm_preload, **READY)
    host.systemd.ctl("start", host.engines["code"].unit)
    assert host.done(vllm_preload, **ABSENT)["after"]["state"] == "absent"


def test_what_cannot_be_seen_is_not_taken_for_free(pair):
    host = running(pair())
    host.systemd.override(host.chat.unit, fail="Failed to connect to bus: Connection refused")
    result = host.run(vllm_preload, **ABSENT)
    assert "what may map its memory cannot be seen: engine chat" in result["msg"]
    host.systemd.override(host.chat.unit)
    host.gpu.ledger.fault("not_loaded")
    result = host.run(vllm_preload, **ABSENT)
    assert "cannot be seen: gpu" in result["msg"]
    seen = host.info()["preload"]
    assert seen["weights_source"] is None
    assert "cannot be seen" in seen["why"][0]
    assert host.base.health() == 200


# 8. Before the daemon starts.


def test_a_second_daemon_on_the_same_sockets_is_named_before_it_loads(pair):
    host = pair()
    host.done(vllm_preload, **READY)
    (rank,) = host.base.ranks()
    old = json.loads((host.root / "etc/vllm/preload/base.json").read_text())
    second = host.daemon("renamed", doors=True, declared={"socket_dir": old["socket_dir"]})
    result = host.run(vllm_preload, daemon="renamed")
    said = "\n".join(result["journal"])
    assert f"process {rank}" in said
    assert DAEMON in said
    assert second.health() == 0
    assert host.base.health() == 200


def test_a_health_port_that_somebody_else_answers_on(pair):
    host = pair()
    host.done(vllm_preload, **READY)
    host.daemon("other", doors=True, declared={"health_port": host.base.port})
    assert "already listens on its health port" in "\n".join(host.run(vllm_preload, daemon="other")["journal"])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.rmdir(), "No such file or directory"),
        (lambda path: path.chmod(0o755), "has mode 0755, not 0700"),
        (lambda path: (path.rename(f"{path}2"), path.symlink_to(f"{path}2")), "is a symbolic link to"),
        (lambda path: (path.rmdir(), path.write_text("")), "is no directory"),
        (lambda path: os.chown(path, 12345, 12345), "belongs to user id 12345"),
    ],
)
def test_the_socket_directory(pair, command, spoil, says):
    host = pair()
    spoil(host.base.socket_dir)
    code, said = command("preload-preflight", "base")
    assert code == 2
    assert says in said


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"socket_dir": "/run/vllm/" + "d" * 90}, "No such file"),
        ({"sockets": ["s" * 100]}, "characters, 107 is the most"),
        ({"user": "nobody-of-that-name"}, "has no user 'nobody-of-that-name'"),
        ({"runtime": "/opt/vllm/preload/none"}, "has no bin/vllm"),
        ({"gpus": ["GPU-none"]}, "the driver shows no GPU GPU-none"),
        ({"model": "/srv/none"}, "/srv/none"),
    ],
)
def test_what_a_daemon_cannot_start_with(pair, command, declared, says):
    host = pair(daemon={"declared": declared})
    code, said = command("preload-preflight", "base")
    assert code == 2
    assert says in said
    assert "Next: " in said
    assert host.gpu.used() == 0


def test_a_daemon_without_room_names_who_has_it(pair):
    host = pair()
    host.gpu.ledger.foreign(host.gpu.first.uuid, 135000, pid=1)
    said = "\n".join(host.run(vllm_preload, **READY)["journal"])
    assert "needs 13294 MiB for its weights" in said
    assert "process 1 (" in said
    assert loads(host) == 0


def test_a_daemon_that_dies_while_it_loads_ends_the_wait(pair):
    host = pair(daemon={"load_time": 60, "fault": ["daemon_crash=0.5"]})
    begun = time.monotonic()
    said = "\n".join(host.run(vllm_preload, **READY, timeout=50)["journal"])
    assert "died before it was ready" in said
    assert time.monotonic() - begun < 40


def test_a_daemon_starts_alone_on_its_gpus_but_for_its_engines(pair):
    """What starts, sleeps or wakes measures memory; a play that starts the daemon's own engine waits for the daemon."""
    host = pair()
    with lease.locked(f"gpu-{host.gpu.first.uuid}", Deadline(0), "chat"):
        host.done(vllm_preload, **READY)
    host.done(vllm_preload, **ABSENT)
    with lease.locked(f"gpu-{host.gpu.first.uuid}", Deadline(0), "code"):
        host.systemd.ctl("start", "--no-block", DAEMON)
        wait_for(lambda: "waits for engine code" in host.systemd.journal(DAEMON), "the daemon to wait")
        assert loads(host) == 1
    wait_for(lambda: host.systemd.show(DAEMON)["ActiveState"] == "active", "the daemon to start")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_sockets_are_tried_as_the_service_user():
    """A daemon logs a traceback for each call of another user."""
    nobody = pwd.getpwnam("nobody")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as server:
        os.chmod(folder, 0o755)
        server.bind(f"{folder}/a.sock")
        os.chmod(f"{folder}/a.sock", 0o777)
        server.listen()
        wanted = config.PreloadConfig("base", "u", folder, ["a.sock", "b.sock"], 1, 1, user="nobody")
        assert preload._refused(wanted) == ["b.sock"]
        connection, _unused = server.accept()
        with connection:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    assert struct.unpack("3i", credentials)[1] == nobody.pw_uid


# 9. An engine waits for its daemon.


@pytest.mark.parametrize("fallback", [False, True])
def test_an_engine_waits_for_a_daemon_that_still_loads(pair, fallback):
    """With a fall-back, too: otherwise both would load, and the second copy stay for life."""
    host = pair(daemon={"load_time": 3}, use={"fallback": fallback})
    host.systemd.ctl("start", "--no-block", DAEMON)
    wait_for(lambda: host.base.health() == 503, "the daemon to load")
    journal = start(host, host.chat.unit)
    assert "chat: takes sha256:" in journal
    assert "loads from disk" not in journal
    assert host.info()["preload"]["weights_source"] == "preload_zero_copy"
    assert host.gpu.used() == BOTH, "one copy"


def test_an_engine_whose_daemon_is_not_ready_fails_with_its_state_and_its_last_words(pair):
    host = pair(daemon={"fault": ["daemon_never_ready"], "load_time": 0.1}, use={"wait": 3})
    host.systemd.ctl("start", "--no-block", DAEMON)
    wait_for(lambda: "serving on" in host.systemd.journal(DAEMON), "the daemon to load")
    begun = time.monotonic()
    journal = start(host, host.chat.unit)
    assert time.monotonic() - begun >= 3
    assert "its preload daemon 'base' is starting, not ready, after 3 s: health 503" in journal
    said = journal[: journal.index("Next: ")]
    assert f"last lines of {DAEMON}:" in said
    assert "Weight cache target daemon rank 0 serving on" in said
    assert host.chat.active() == "failed"
    assert "Initializing" not in journal


def test_an_engine_with_a_fall_back_starts_without_a_daemon_and_says_so(pair):
    host = pair(use={"fallback": True})
    result = host.done(START[0], **START[1])
    assert result["started"]["preload"]["source"] == "disk"
    journal = host.systemd.journal(host.chat.unit)
    assert "chat: loads from disk: preload daemon 'base' is absent" in journal
    assert "has loaded its weights from disk, not from preload daemon 'base'" in journal
    seen = host.info()["preload"]
    assert (seen["state"], seen["weights_source"]) == ("absent", "disk")


def test_an_engine_whose_daemon_is_not_declared(pair):
    host = pair()
    (host.root / "etc/vllm/preload/base.json").unlink()
    assert "there is no preload daemon 'base' on this host" in host.run(START[0], **START[1])["msg"]
    assert "there is no preload daemon 'base'" in start(host, host.chat.unit)
    assert host.info()["preload"]["next_start"] == "refused"


# 10. Versions and settings.


def test_an_upgrade_is_announced_as_cold_and_renews_the_daemon(pair):
    host = running(pair())
    (rank,) = host.base.ranks()
    for name in ("lifecycle/chat", "preload/base"):
        host.change(f"etc/vllm/{name}.json", runtime_version="0.33.1")
    seen = host.info()["preload"]
    assert seen["next_start"] == "cold"
    assert "the daemon has loaded with vLLM 0.33.0, its next start is with 0.33.1" in " ".join(seen["why"])
    assert "may map its memory" in host.run(vllm_preload, **READY)["msg"], "never under a mapping engine"
    result = host.done(RESTART[0], **RESTART[1])
    assert result["started"]["preload"]["source"] == "preload_zero_copy"
    assert not start_time(rank)
    assert host.info()["preload"]["next_start"] == "zero-copy"
    assert host.gpu.used() == BOTH


def test_a_record_that_is_none_is_named(pair):
    host = pair()
    host.done(vllm_preload, **READY)
    path = host.root / "var/lib/vllm/preload/base/loaded.json"
    path.write_text('{"main_pid": "x"}')
    result = host.run(vllm_preload, **READY, check_mode=True)
    assert result["before"]["state"] == "unknown"
    assert f"{path} is no record of a daemon's start" in result["reasons"][0]
