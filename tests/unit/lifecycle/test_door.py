# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The units' door: the command says what the modules say, and its exit codes mean what they are documented to mean."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import cli, doors, gate, lease
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.deadline import Deadline
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.lease import LeaseRequest
from ansible_collections.baremetal.vllm.plugins.modules import vllm_drain, vllm_engine, vllm_sleep
from ansible_collections.baremetal.vllm.tests.sim.harness import UnixConnection
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import OWNER, wait_for


@pytest.fixture
def command(capfd):
    """`command("set", "chat", "drained")` is (exit code, what it printed, what it complained about)."""

    def run(*words):
        try:
            code = cli.main(words)
        except SystemExit as ended:
            code = ended.code
        said = capfd.readouterr()
        return code, said.out, said.err

    return run


def call(command, *words):
    return command("set", "chat", *words, "--owner", OWNER)


# Each code, with the module's words.


def test_0_is_done_and_the_result_is_the_modules_own(world, command):
    host = world(gate=True)
    code, out, err = call(command, "drained", "--check")
    assert (code, err) == (0, "")
    assert json.loads(out)["actions"] == host.run(vllm_drain, check_mode=True)["actions"]
    code, out, err = call(command, "drained", "--reason", "a fan")
    assert (code, err) == (0, "")
    *told, _unused = out.partition("{")[0].splitlines(), ""
    result = json.loads(out[out.index("{") :])
    assert told[0] == result["actions"], "it says each step when it begins"
    assert result["after"]["state"] == "drained"
    assert host.chat.seen()["paused"]
    assert host.chat.lease()["reason"] == "a fan"
    code, out, _unused = command("info")
    assert code == 0
    assert {name: seen["state"] for name, seen in json.loads(out).items()} == {"chat": "drained"}
    assert not host.done(vllm_drain)["changed"], "the module finds done what the command did"


CODES = [
    # code, entry of the runbook, faults, words, the module's call
    (1, "requests-past-the-gate", {"pause_ignored": True}, ["drained"], (vllm_drain, {})),
    (2, "engine-unknown", {"gone": True}, ["drained"], (vllm_drain, {})),
    (3, "state-unknown", {"metrics_500": True}, ["drained"], (vllm_drain, {})),
    (3, "call-failed", {"sleep_5xx_before": True}, ["asleep"], (vllm_sleep, {})),
    (4, "drain-timeout", {"gauge_stale": 2}, ["drained", "--timeout", "0.5"], (vllm_drain, {"timeout": 0.5})),
    (5, "lease-held", {"lease": True}, ["drained"], (vllm_drain, {})),
    (5, "requests-unreported", {"gauge_missing": True}, ["stopped"], (vllm_engine, {"state": "stopped"})),
]


@pytest.mark.parametrize(("code", "entry", "faults", "words", "module_call"), CODES, ids=lambda value: str(value)[:30])
def test_a_failure_has_its_code_and_the_modules_message(world, command, code, entry, faults, words, module_call):
    host = world()
    if "gone" in faults:
        host.chat.declared.unlink()
    elif "lease" in faults:
        lease.take("chat", LeaseRequest("night-shift", ttl=600), "drained", "")
    else:
        for name, arg in faults.items():
            host.chat.set_fault(name, arg)
    found, out, err = call(command, *words)
    assert found == code
    module, options = module_call
    result = host.run(module, **options)
    assert err.splitlines()[0] == f"vllm-lifecycle: {result['msg']}"
    assert result["msg"].endswith(f" (runbook: {entry})")
    assert result["runbook"] == entry
    assert "Traceback" not in out + err
    if code != 2:
        assert json.loads(err.splitlines()[1])["elapsed"] >= 0


@pytest.mark.parametrize(
    "words", [(), ("set", "chat"), ("set", "chat", "asleep", "--level", "9"), ("resurrect", "chat")]
)
def test_2_is_bad_usage(world, command, words):
    world(start=False)
    code, _unused, err = command(*words)
    assert code == 2
    assert "usage: vllm-lifecycle" in err


def test_the_installed_command_sees_the_gpus_through_the_loader(world):
    """As systemd calls it: another process, which finds NVML by the loader's path."""
    host = world(gpus=1)
    done = subprocess.run([host.command, "info", "chat"], capture_output=True, text=True, check=True)
    (device,) = json.loads(done.stdout)["chat"]["gpus"]
    assert device["processes"] == {str(pid): mib for pid, mib in host.gpu.processes().items()}
    assert list(device["processes"]) == [str(host.chat.core_pids()[0])]


# The doors.


def stop_and_start(host) -> None:
    for verb in ("stop", "start"):
        done = host.systemd.ctl(verb, host.chat.unit)
        assert done.returncode == 0, host.systemd.journal(host.chat.unit)


def test_a_stop_by_systemd_drains_and_a_start_comes_back_by_itself(world):
    """As at a reboot: nobody but the unit knows of it, and no promised token is lost."""
    host = world(gate=True, doors=True, shutdown_timeout=30)
    host.chat.set_fault("slow_tokens", 400)
    stream = host.chat.open_stream(600)
    wait_for(host.chat.busy, "the stream to be seen")
    stop_and_start(host)
    assert (stream.read().finish_reason, len(stream.ids)) == ("length", 600)
    wait_for(lambda: host.gate.ready("chat") == 200, "the gate to see it up")
    assert host.gate.stored("chat") == {"admission": "open", "proved": "1"}
    assert host.chat.lease() is None
    journal = host.systemd.journal(host.chat.unit)
    for line in (
        "chat: withdrawn; the router has 0.05 s to notice",
        "chat: drained in",
        "chat: stopped, success (status 0)",
    ):
        assert line in journal
    assert "chat: ready after" in journal


def test_what_was_drained_on_purpose_stays_out_over_a_restart_of_its_unit(world):
    host = world(gate=True, doors=("ready", "drain", "settle"))
    host.done(vllm_drain)
    stop_and_start(host)
    assert host.gate.stored("chat") == {"admission": "closed", "proved": "1"}
    assert host.gate.ready("chat") == 503
    assert host.done(vllm_drain, state="serving")["after"]["state"] == "serving"


def test_a_drain_gives_up_at_its_own_time_out(world, command, monkeypatch):
    host = world(gate=True, declared={"drain_timeout": 1})
    monkeypatch.setenv("MAINPID", str(host.chat.truth()["pid"]))
    host.chat.set_fault("slow_tokens", 5)
    host.chat.open_stream(1000)
    wait_for(host.chat.busy, "the stream to be seen")
    code, _unused, err = command("drain", "chat")
    assert code == 4
    assert "still has 1 running and 0 waiting request(s)" in err
    assert host.gate.stored("chat") == {"admission": "open", "proved": "0"}, "the play's word is left alone"


def test_a_drain_without_anybody_to_drain(world, command, monkeypatch):
    host = world(gate=True)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    monkeypatch.setenv("MAINPID", str(ended.pid))
    code, out, _unused = command("drain", "chat")
    assert code == 0
    assert "its main process has ended already" in out
    assert host.gate.stored("chat")["proved"] == "0"
    monkeypatch.setenv("MAINPID", str(os.getpid()))
    host.chat.set_fault("http_reset")
    code, _unused, err = command("drain", "chat")
    assert code == 1
    assert "the unit is stopped without a drain" in err


def test_a_drain_without_its_gate_goes_by_the_engines_own_gauges(world, command, monkeypatch):
    monkeypatch.setattr(gate, "COMMAND_TIMEOUT", 0.2)
    host = world(gate=True, declared={"drain_timeout": 2})
    host.gate.close()
    monkeypatch.setenv("MAINPID", str(host.chat.truth()["pid"]))
    code, out, _unused = command("drain", "chat")
    assert code == 0
    assert "the engine's own gauges decide" in out
    assert host.gate.stored("chat")["proved"] == "0", "the gate reads it when it starts"
    host.chat.set_fault("gauge_stale", 1)
    assert command("drain", "chat")[0] == 4


def test_ready_watches_the_main_process(world, command, monkeypatch):
    """systemd does not end this wait when that process dies."""
    host = world(start=False)
    short = subprocess.Popen(["sleep", "0.5"])
    monkeypatch.setenv("MAINPID", str(short.pid))
    begun = time.monotonic()
    code, _unused, err = command("ready", "chat")
    short.wait()
    assert code == 1
    assert f"its main process {short.pid} died before it was ready" in err
    assert time.monotonic() - begun < host.chat.config.start_timeout / 4


def test_ready_warms_with_the_declared_shapes_and_writes_down_whose_start_it_proved(world):
    shapes = [{"prompt_tokens": 33, "max_tokens": 5}, {"prompt_tokens": 7, "max_tokens": 2}]
    host = world(gate=True, doors=("preflight", "ready"), declared={"warmup": shapes, "config_digest": "abc"})
    asked = [json.loads(one["body"]) for one in host.chat.requests() if one["generation"]]
    once = [(33, 5, "tiny"), (7, 2, "tiny")]
    timed = [(len(body["prompt"]), body["max_tokens"], body["model"]) for body in asked]
    assert timed == once * (1 + doors.SPEED_PASSES), "once to warm it, and then to time it"
    speed = host.info()["started"]["speed"]
    assert speed["shapes"] == shapes
    assert 0 < speed["tokens_per_s"] < 2000 * 2, "the simulated engine gives 2000 tokens/s"
    record = json.loads((host.root / "var/lib/vllm/chat/ready.json").read_text())
    assert record["main_pid"] == host.chat.truth()["pid"]
    assert record["config_digest"] == "abc"
    assert host.chat.core_pids()[0] in record["pids"]


@pytest.fixture
def bare(world):
    """A host whose engine has never run."""
    return world(start=False, gpus=1)


def test_preflight_passes_and_clears_the_way(bare, command):
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(bare.chat.socket))
    stale.close()
    assert command("preflight", "chat") == (0, "", "")
    assert not bare.chat.socket.exists(), "nobody listens there, and the engine could not"


def test_preflight_refuses_a_socket_on_which_somebody_listens(bare, command):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(bare.chat.socket))
        other.listen()
        code, _unused, err = command("preflight", "chat")
    assert code == 5
    assert f"process {os.getpid()} (" in err
    assert "already listens on" in err
    assert f"systemctl status {os.getpid()}" in err


BROKEN = [
    # what is done to the host, what preflight says
    (lambda root: (root / "opt/vllm/engines/chat/bin/python").unlink(), "has no bin/python"),
    (lambda root: (root / "srv/models/tiny/model.safetensors").unlink(), "lacks weight files"),
    (lambda root: (root / "srv/models/tiny/config.json").unlink(), "lacks config.json"),
    (lambda root: (root / "srv/models/tiny/tokenizer.json").unlink(), "lacks tokenizer"),
    (lambda root: (root / "srv/models/tiny/more.json").symlink_to("nowhere"), "more.json: No such file"),
    (lambda root: (root / "etc/vllm/engines/chat.yaml").write_text("a: [1"), "config file"),
    (lambda root: (root / "etc/vllm/engines/chat.yaml").unlink(), "No such file"),
    (lambda root: (root / "run/systemd/system").rmdir(), "was not booted with systemd"),
]


@pytest.mark.parametrize(("spoil", "says"), BROKEN, ids=lambda value: value if isinstance(value, str) else "")
def test_preflight_names_what_would_show_after_minutes(bare, command, spoil, says):
    spoil(bare.root)
    code, _unused, err = command("preflight", "chat")
    assert code == 2
    assert says in err
    assert "Next: " in err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can look as another user")
def test_preflight_reads_the_model_as_the_service_user(world, command):
    nobody = pwd.getpwuid(65534).pw_name
    host = world(start=False, declared={"user": nobody})
    host.root.chmod(0o755)
    # A Python that everybody may run, as a runtime's is; it gets PyYAML from a copy.
    shutil.copytree(Path(yaml.__file__).parent, host.root / "site/yaml")
    script = f'#!/bin/sh\nshift 2\nPYTHONPATH={host.root}/site exec /usr/bin/python3 -c "$@"\n'
    (host.root / "opt/vllm/engines/chat/bin/python").write_text(script)
    assert command("preflight", "chat") == (0, "", "")
    (host.root / "srv/models/tiny/model.safetensors").chmod(0o600)
    code, _unused, err = command("preflight", "chat")
    assert code == 2
    assert f"as user {nobody}: model file {host.root}/srv/models/tiny/model.safetensors: Permission denied" in err


def test_settle_waits_for_the_memory_of_the_last_start_and_names_who_keeps_it(bare, command, monkeypatch):
    monkeypatch.setattr(doors, "Deadline", lambda seconds: Deadline(min(seconds, 1)))
    monkeypatch.setenv("SERVICE_RESULT", "signal")
    lease.record("chat", "ready.json", {"main_pid": 1, "pids": [os.getpid()]})
    bare.gpu.ledger.foreign(bare.gpu.uuids[0], 5000, os.getpid())
    code, out, err = command("settle", "chat")
    assert code == 5
    assert f"process {os.getpid()} (" in err
    assert "5000 MiB" in err
    assert "chat: stopped, signal" in out
    bare.gpu.ledger.release("foreign")
    assert command("settle", "chat")[0] == 0
    stop = json.loads((bare.root / "var/lib/vllm/chat/last_stop.json").read_text())
    assert (stop["service_result"], stop["main_pid"]) == ("signal", 1)


def test_a_unit_that_systemd_has_not_loaded_has_no_failure_to_forget(world):
    """Not enabled and not running: measured, systemctl reset-failed fails for it."""
    host = world(start=False)
    assert host.systemd.ctl("disable", host.chat.unit).returncode == 0
    assert host.systemd.ctl("reset-failed", host.chat.unit).returncode == 1
    assert host.done(vllm_engine, state="started")["changed"]
    assert host.chat.active() == "active"


def test_a_key_that_is_newer_than_the_process_is_for_the_next_start(world):
    """The roles write it beside an engine that runs, which goes on with the one that it has read."""
    host = world(gate=True, doors=True, start=False)
    env = Path(host.chat.config.env_file)
    without = env.read_text()
    env.write_text(f"{without}VLLM_API_KEY=old\n")
    host.start()

    def takes(key: str) -> bool:
        with contextlib.closing(UnixConnection(host.chat.socket, 10)) as client:
            client.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
            return client.getresponse().status == 200

    assert (takes("old"), takes("new")) == (True, False)
    env.write_text(f"{without}VLLM_API_KEY=new\n")
    host.change("etc/vllm/lifecycle/chat.json", config_digest="1")
    seen = host.info()
    assert (seen["state"], seen["stale"]) == ("serving", True)
    host.done(vllm_drain)
    host.done(vllm_drain, state="serving")
    assert host.done(vllm_engine, state="restarted", run="new key")["after"]["state"] == "serving"
    assert (takes("old"), takes("new")) == (False, True)
    seen = host.info()
    assert (seen["state"], seen["stale"]) == ("serving", False)
