# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The product's main job on real parts: vLLM, systemd, HAProxy, sshd; and what it does when things go wrong."""

from __future__ import annotations

import json
import re
import signal
import time

import httpx
import pytest

from ansible_collections.baremetal.vllm.plugins.plugin_utils._spans import BOOT
from ansible_collections.baremetal.vllm.tests.rolling.fleet import CHECKOUT, Stream

LONG = 600  # tokens; some seconds of generation


def four_runs(fleet, host, module, **options):
    """Check, real, again, again in check."""
    return [fleet.module(host, module, check=check, **options) for check in (True, False, False, True)]


def judge_four(runs):
    assert [run["changed"] for run in runs] == [True, True, False, False], runs
    assert runs[0]["actions"] == runs[1]["actions"]
    assert runs[0]["before"] == runs[1]["before"], "check mode had touched nothing"
    assert runs[0]["after"] == runs[1]["after"], "the prediction came true"
    assert runs[2]["actions"] == runs[3]["actions"] == []


def states(status):
    """The third column of the table that playbook status prints."""
    return re.findall(r"\be[123] +chat +(\w+) ", status)


def prove_again(fleet, host):
    """preflight takes the proof away, as before a start; the engine never stopped, so it can be proved again."""
    fleet.ssh(host, "MAINPID=$(systemctl show --value -p MainPID vllm-engine@chat) vllm-lifecycle ready chat")


def test_the_states_of_vllm_drain_four_times_each(fleet):
    runs = four_runs(fleet, "e1", "vllm_drain", engine="chat", timeout=60)
    judge_four(runs)
    assert fleet.engine_get("e1", "/is_paused") == {"is_paused": True}
    assert fleet.ready("e1") == 503
    refused = httpx.get(f"{fleet.gate('e1')}/v1/models", trust_env=False)
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) > 0
    assert fleet.lease("e1")["owner"] == "ansible"
    runs = four_runs(fleet, "e1", "vllm_drain", engine="chat", state="serving", timeout=60)
    judge_four(runs)
    assert fleet.engine_get("e1", "/is_paused") == {"is_paused": False}
    assert fleet.ready("e1") == 200


@pytest.mark.long
def test_the_states_of_vllm_engine_four_times_each(fleet):
    judge_four(four_runs(fleet, "e1", "vllm_engine", engine="chat", state="stopped", timeout=90))
    assert fleet.active("e1") == "inactive"
    assert fleet.ready("e1") == 503
    judge_four(four_runs(fleet, "e1", "vllm_engine", engine="chat", state="started", timeout=300))
    assert fleet.active("e1") == "active"
    assert fleet.ready("e1") == 200


def test_wrong_names_are_told_with_the_known_ones(fleet):
    result = fleet.module("e1", "vllm_drain", engine="chta")
    assert "host e1 has no engine 'chta'; engines declared there: chat" in result["msg"]
    assert fleet.ready("e1") == 200


def test_only_allowed_routes_reach_the_network(fleet):
    routes = fleet.engine_get("e1", "/openapi.json")["paths"]
    assert "/pause" in routes
    assert "/collective_rpc" in routes, "the engine runs with its development endpoints"
    open_ones = set()
    for path, methods in routes.items():
        for method in methods:
            command = (
                f"curl -s -o /dev/null -w '%{{http_code}}' --max-time 10 -X {method.upper()} {fleet.gate('e1')}{path}"
            )
            if fleet.ssh("e2", command).strip() != "404":
                open_ones.add(path)
    assert open_ones, "the allow-list lets something through"
    assert all(path.startswith("/v1/") or path == "/health" for path in open_ones), open_ones
    assert not any("lora" in path for path in open_ones), open_ones
    assert fleet.engine_get("e1", "/is_paused") == {"is_paused": False}


def test_engines_listen_on_no_routable_address(fleet):
    group = fleet.ssh("e1", "systemctl show --value --property ControlGroup vllm-engine@chat.service").strip()
    pids = set(fleet.ssh("e1", f"cat '/sys/fs/cgroup{group}/cgroup.procs'").split())
    listeners = [
        line for line in fleet.ssh("e1", "ss -Hltnp").splitlines() if any(f"pid={pid}," in line for pid in pids)
    ]
    assert listeners, "the engine's ranks do listen somewhere"
    addresses = {line.split()[3].rpartition(":")[0] for line in listeners}
    assert addresses <= {"127.0.0.1", "[::1]"}, listeners


def test_a_drain_time_out_names_what_is_left_and_cuts_nothing(fleet):
    stream = Stream(fleet.gate("e1"), LONG)
    stream.first.wait(30)
    result = fleet.module("e1", "vllm_drain", engine="chat", timeout=4)
    assert result["failed"]
    assert result["left"]["chat"]["running"] == 1
    assert result["left"]["chat"]["sessions"] == 1
    assert "'chat' on e1 still has 1 running and 0 waiting request(s) and 1 session(s)" in result["msg"]
    assert "raise timeout" in result["next_step"]
    assert fleet.ready("e1") == 503, "it stays withdrawn"
    assert stream.whole(), stream
    assert fleet.module("e1", "vllm_drain", engine="chat", timeout=60)["after"]["state"] == "drained"
    fleet.module("e1", "vllm_drain", engine="chat", state="serving")


def test_a_drain_that_may_abort_counts_what_it_cut(fleet):
    stream = Stream(fleet.gate("e1"), 1500)
    stream.first.wait(30)
    result = fleet.module("e1", "vllm_drain", engine="chat", timeout=4, mode="abort")
    assert result["after"]["state"] == "drained", result
    assert result["requests_cut"] == 1
    assert not stream.whole(), "a cut stream is a cut stream"
    fleet.module("e1", "vllm_drain", engine="chat", state="serving")


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "options", "state"), [("vllm_drain", {}, "draining"), ("vllm_sleep", {"level": 0}, "asleep")]
)
def test_requests_that_are_kept_stand_still_and_go_on_afterwards(fleet, module, options, state):
    stream = Stream(fleet.gate("e1"), 1500)
    stream.first.wait(30)
    keep = {"engine": "chat", "mode": "keep", "timeout": 4, **options}
    result = fleet.module("e1", module, **keep)
    assert (result["failed"], result["changed"], result["requests_kept"]) == (False, True, 1), result
    assert result["after"]["state"] == state
    tokens = stream.tokens
    again = fleet.module("e1", module, **keep)
    assert (again["changed"], again["actions"]) == (False, []), again
    assert stream.tokens == tokens < 1500, "not a token came meanwhile"
    assert stream.is_alive()
    back = ("vllm_wake", {}) if state == "asleep" else ("vllm_drain", {"state": "serving"})
    assert fleet.module("e1", back[0], engine="chat", timeout=60, **back[1])["after"]["state"] == "serving"
    assert stream.whole(), stream


@pytest.mark.long
def test_reconcile_brings_back_what_nobody_holds_any_more(fleet):
    gone = {"owner": "gone", "reason": "its run was killed", "ttl": 1}
    fleet.module("e1", "vllm_drain", engine="chat", timeout=60, lease=gone)
    fleet.module("e2", "vllm_engine", engine="chat", state="stopped", timeout=90, lease=gone)
    night = {"owner": "night-shift", "reason": "a fan is replaced", "ttl": 600}
    fleet.module("e3", "vllm_drain", engine="chat", timeout=60, lease=night)
    for host in ("e1", "e2"):
        fleet.wait("the lease expires", lambda host=host: fleet.lease(host)["expires"] < time.time(), 10)
    before = [(fleet.active(host), fleet.ready(host), fleet.lease(host)) for host in fleet.engines]
    text = fleet.play("reconcile.yml", "--check")
    assert "gone: its run was killed (expired)" in text
    assert "night-shift" not in text
    assert [(fleet.active(host), fleet.ready(host), fleet.lease(host)) for host in fleet.engines] == before
    fleet.play("reconcile.yml")
    assert [fleet.ready(host) for host in fleet.engines] == [200, 200, 503]
    assert [fleet.lease(host) and fleet.lease(host)["owner"] for host in fleet.engines] == [None, None, "night-shift"]
    again = fleet.play("reconcile.yml")
    assert again.count("changed=0") == 3
    assert again.count("nothing to reconcile") == 3
    fleet.module("e3", "vllm_drain", engine="chat", state="serving", lease=night)


def test_a_gate_that_is_down_is_named(fleet):
    fleet.ssh("e1", "systemctl stop vllm-gate.service")
    result = fleet.module("e1", "vllm_drain", engine="chat", timeout=10)
    fleet.ssh("e1", "systemctl start vllm-gate.service")
    assert result["failed"]
    assert "the gate of engine 'chat' on host e1 gives no answer" in result["msg"]
    fleet.wait("the gate is back", lambda: fleet.ready("e1") == 200, 10)


def test_admission_survives_a_restart_of_the_gate(fleet):
    fleet.module("e1", "vllm_drain", engine="chat", timeout=60)
    fleet.ssh("e1", "systemctl reload vllm-gate.service")
    assert fleet.ready("e1") == 503
    fleet.ssh("e1", "systemctl restart vllm-gate.service")
    fleet.wait("the gate is back", lambda: fleet.ready("e1") != 0, 10)
    time.sleep(2)  # its health check is up by now: only the admission holds it back
    assert fleet.ready("e1") == 503
    fleet.module("e1", "vllm_drain", engine="chat", state="serving")


def test_systemctl_stop_drains_like_a_play(fleet):
    stream = Stream(fleet.router, LONG)
    stream.first.wait(30)
    busy = next(
        host for host in fleet.engines
        if 'vllm:num_requests_running{engine="0",model_name="tiny"} 1.0'
        in fleet.ssh(host, "curl -s --unix-socket /run/vllm/chat/engine.sock http://engine/metrics")
    )  # fmt: skip
    fleet.ssh(busy, "systemctl stop vllm-engine@chat.service")
    assert stream.whole(), stream
    assert fleet.active(busy) == "inactive"
    fleet.ssh(busy, "systemctl start vllm-engine@chat.service")
    assert fleet.active(busy) == "active", "and it comes back into rotation by itself"


def test_a_crash_in_the_start_ends_the_start_at_once(fleet):
    fleet.module("e1", "vllm_engine", engine="chat", state="stopped", timeout=60)
    fleet.ssh("e1", "systemctl start --no-block vllm-engine@chat.service")
    fleet.wait("the process is there", lambda: fleet.main_pid("e1") > 0, 20)
    fleet.ssh("e1", f"kill -9 {fleet.main_pid('e1')}")
    begun = time.monotonic()
    fleet.wait("the start has ended", lambda: "died before it was ready" in fleet.ssh(
        "e1", "journalctl -u vllm-engine@chat.service -n 20 -o cat"), 10)  # fmt: skip
    assert time.monotonic() - begun < 10
    fleet.ssh("e1", "systemctl stop vllm-engine@chat.service", check=False)
    fleet.ssh("e1", "systemctl reset-failed vllm-engine@chat.service", check=False)
    assert fleet.module("e1", "vllm_engine", engine="chat", state="started", timeout=300)["after"]["state"] == "serving"


@pytest.mark.parametrize(
    ("breaks", "mends", "says"),
    [
        (
            "echo '- no: [mapping' > /etc/vllm/engines/chat.yaml",
            "cp /root/chat.yaml /etc/vllm/engines/chat.yaml",
            "config file /etc/vllm/engines/chat.yaml",
        ),
        (
            "mv /etc/vllm/engines/chat.yaml /root/moved.yaml",
            "cp -a /root/moved.yaml /etc/vllm/engines/chat.yaml",
            "config file /etc/vllm/engines/chat.yaml: [Errno 2] No such file or directory",
        ),
        (
            "mount -t tmpfs -o mode=0700 none /srv/models/tiny",
            "umount /srv/models/tiny",
            "model file /srv/models/tiny: Permission denied",
        ),
    ],
    ids=["not-yaml", "missing", "unreadable-model"],
)
def test_preflight_says_what_is_wrong_before_the_engine_starts(fleet, breaks, mends, says):
    fleet.ssh("e1", "cp -a /etc/vllm/engines/chat.yaml /root/chat.yaml; " + breaks)
    said = fleet.ssh("e1", "vllm-lifecycle preflight chat 2>&1; echo exit $?")
    fleet.ssh("e1", mends)
    prove_again(fleet, "e1")
    assert "engine 'chat' on e1, as user vllm: " + says in said
    assert "exit 2" in said


def test_preflight_names_who_holds_the_socket(fleet):
    said = fleet.ssh("e1", "vllm-lifecycle preflight chat 2>&1; echo exit $?")
    prove_again(fleet, "e1")
    assert f"process {fleet.main_pid('e1')} (" in said
    assert "already listens on /run/vllm/chat/engine.sock" in said
    assert "exit 5" in said


def test_too_few_others_serving_refuses_the_drain(fleet):
    output = fleet.play("drain.yml", "--limit=e1", rc=2, vllm_drain_min_serving=3, vllm_drain_capacity_timeout=2)
    assert "min_serving is 3, yet 2 engine(s) are left to serve" in output
    fleet.play("drain.yml", "--limit=e2,e3", vllm_drain_min_serving=0, vllm_drain_reason="two of three")
    output = fleet.play("drain.yml", "--limit=e1", rc=2, vllm_drain_capacity_timeout=2)
    assert "0 of 2 other engine(s) serve, 1 must: e2/chat: /ready is 503; e3/chat: /ready is 503" in output
    assert fleet.ready("e1") == 200
    status = fleet.play("status.yml")
    assert states(status) == ["serving", "drained", "drained"]
    assert "operator" in status
    # a restart of the fleet respects what an operator holds
    assert "held by operator" in fleet.play("rolling_restart.yml", rc=2)
    fleet.play("drain.yml", "--limit=e2,e3", vllm_drain_state="serving")


def test_a_roll_stops_at_an_engine_that_never_gets_ready_and_goes_on_from_there(fleet):
    before = {host: fleet.main_pid(host) for host in fleet.engines}
    fleet.ssh(
        "e2", "cp -a /etc/vllm/engines/chat.yaml /root/; echo 'max-model-len: 1000000' >> /etc/vllm/engines/chat.yaml"
    )
    output = fleet.play("rolling_restart.yml", rc=2)
    fleet.ssh("e2", "cp -a /root/chat.yaml /etc/vllm/engines/chat.yaml")
    assert "unit vllm-engine@chat.service did not start" in output
    assert "The host stays out of rotation" in output
    assert "max_model_len" in output, "the engine's own last words are in the message"
    assert fleet.main_pid("e1") != before["e1"]
    assert fleet.main_pid("e3") == before["e3"], "later hosts are untouched"
    assert [fleet.ready(host) for host in fleet.engines] == [200, 503, 200]
    held = fleet.lease("e2")
    assert held["owner"] == "rolling_restart"
    first = fleet.main_pid("e1")
    output = fleet.play("rolling_restart.yml")
    assert held["run"] in output
    assert "1 host(s) not serving come first, 1 follow, 1 are done" in output
    assert fleet.main_pid("e1") == first, "a finished host is left alone"
    assert fleet.main_pid("e3") != before["e3"]


@pytest.mark.long
def test_a_roll_may_leave_as_many_behind_as_it_is_told(fleet):
    before = {host: fleet.main_pid(host) for host in fleet.engines}
    fleet.ssh("e1", "mv /etc/vllm/engines/chat.yaml /root/")
    try:
        output = fleet.play("rolling_restart.yml", rc=2, vllm_roll_max_failed=1)
    finally:
        fleet.ssh("e1", "cp -a /root/chat.yaml /etc/vllm/engines/")
    assert "1 of at most 1 host(s) have failed: the roll goes on without them." in " ".join(output.split())
    assert "unit: " in output, "the evidence is in the message"
    assert all(fleet.main_pid(host) != before[host] for host in ("e2", "e3"))
    assert [fleet.ready(host) for host in fleet.engines] == [503, 200, 200]
    run = fleet.lease("e1")["run"]
    after = {host: fleet.main_pid(host) for host in ("e2", "e3")}
    assert run in fleet.play("rolling_restart.yml")
    assert {host: fleet.main_pid(host) for host in ("e2", "e3")} == after, "the finished ones are left alone"


def test_a_host_that_dies_in_mid_roll_stops_it_and_is_picked_up_again(fleet):
    before = {host: fleet.main_pid(host) for host in fleet.engines}
    roll = fleet.begin("rolling_restart.yml", vllm_roll_connect_timeout=5)
    fleet.wait("e1 is being restarted", lambda: fleet.active("e1") == "activating", 120)
    fleet.kill("e1")
    output = roll.communicate(timeout=300)[0]
    assert roll.returncode not in (0, None), output[-3000:]
    assert [fleet.main_pid(host) for host in ("e2", "e3")] == [before["e2"], before["e3"]]
    assert "e1" in fleet.play("status.yml"), "the table has a line for the dead host"
    output = fleet.play("rolling_restart.yml", rc=2, vllm_roll_connect_timeout=5)
    assert [fleet.main_pid(host) for host in ("e2", "e3")] == [before["e2"], before["e3"]], "nor while it is dead"
    fleet.boot("e1")
    fleet.wait("e1 has its engine again", lambda: fleet.active("e1") == "active", 180)
    assert fleet.ready("e1") == 503, "what the roll took out, a reboot does not put back"
    held = fleet.lease("e1")
    assert held["owner"] == "rolling_restart"
    output = fleet.play("rolling_restart.yml")
    assert held["run"] in output
    assert all(fleet.main_pid(host) != before[host] for host in ("e2", "e3"))


def test_a_killed_play_is_picked_up_by_the_next(fleet):
    roll = fleet.begin("rolling_restart.yml")
    fleet.wait("e1 is drained", lambda: fleet.ready("e1") == 503, 60)
    roll.send_signal(signal.SIGKILL)
    roll.stdout.close()
    roll.wait()
    fleet.wait("e1 has a lease", lambda: fleet.lease("e1") is not None, 30)
    # the module on the host may go on by itself for a moment; the next run waits for its lock
    output = fleet.play("rolling_restart.yml", "--limit=e1")
    assert "1 host(s) not serving come first" in output


def test_a_reboot_drains_and_comes_back(fleet):
    stream = Stream(fleet.gate("e3"), LONG)
    stream.first.wait(30)
    fleet.ssh("e3", "nohup sh -c 'sleep 1; systemctl poweroff' > /dev/null 2>&1 &")
    assert stream.whole(), stream
    fleet.wait("e3 is off", lambda: not fleet.runs("e3"), 60)
    fleet.boot("e3")
    fleet.wait("e3 serves by itself", lambda: fleet.ready("e3") == 200, 180)


def test_the_report_of_a_roll_adds_up(fleet, tmp_path):
    report = tmp_path / "roll.json"
    fleet.play("rolling_restart.yml", "--limit=e1", vllm_report_path=str(report))
    rolled = json.loads(report.read_text())
    assert rolled["schema"] == "baremetal.vllm/roll"
    (row,) = rolled["hosts"]
    assert row["name"] == "e1"
    assert row["changed"] is True
    parts = sum(row[key] for key in ("drain_s", "stop_s", "boot_s", "warm_s", "overhead_s"))
    assert abs(parts - row["out_of_rotation_s"]) < 0.01
    assert min(row[key] for key in ("drain_s", "stop_s", "boot_s", "warm_s")) > 0
    (span,) = row["spans"]
    boot = {one["phase"]: one["seconds"] for one in span["phases"] if one["phase"] in BOOT}
    assert list(boot) == ["import", "load", "profile", "serve"], "a tiny model on a CPU compiles nothing"
    assert abs(sum(boot.values()) - row["boot_s"]) < 0.1


@pytest.mark.long
def test_the_oldest_supported_ansible_does_the_same(fleet, monkeypatch):
    monkeypatch.setattr(fleet, "bin", CHECKOUT / ".venv-2.16/bin")
    before = fleet.main_pid("e2")
    site = fleet.play("site.yml")
    assert site.count("changed=0") == 4, site[-2000:]
    fleet.play("rolling_restart.yml", "--limit=e2")
    assert fleet.main_pid("e2") != before
    assert states(fleet.play("status.yml")) == ["serving"] * 3
