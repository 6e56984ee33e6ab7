# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The same contract for whoever admits requests: our gate, two HAProxies (one by path, one by TCP), a command.

Real HAProxies send real requests to the simulated engine; what they do is read at them, and by a client.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import cli, transition
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.balancer import Balancer
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.haproxy import HAProxies
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.script import Script
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.transition import Transition
from ansible_collections.baremetal.vllm.plugins.modules import vllm_drain, vllm_engine, vllm_sleep, vllm_wake
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.balancers import Front, calls, recorded
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.test_killed import kill_after
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import OWNER, run_playbook, wait_for

pytestmark = pytest.mark.long

BALANCERS = ["haproxies", "command"]
ALL = ["gate", *BALANCERS]
CHECKOUT = Path(__file__).parents[3]
OUT = ["lease", "withdraw", "await_router", "await_idle", "close", "await_closed"]
BACK = ["prove", "admit", "await_ready", "release"]


@pytest.fixture
def front(world):
    """`front("haproxy")` is a host whose engine serves behind that backend; ``level`` is its runtime socket's."""
    with contextlib.ExitStack() as stack:

        def build(backend, level="admin", **settings):
            host = world(gate=backend == "gate", start=False, **settings)
            made = Front(host, backend, level=level)
            stack.callback(made.close)
            made.start()
            return made

        yield build


@pytest.mark.parametrize("backend", ALL)
def test_four_runs_of_drain_and_serve(front, backend):
    door = front(backend)
    host = door.host
    for options, state, word in (({}, "drained", "closed"), ({"state": "serving"}, "serving", "open")):
        seen, files = door.word(), host.files()
        predicted = host.done(vllm_drain, check_mode=True, **options)
        assert predicted["changed"]
        assert (door.word(), host.files()) == (seen, files), "check mode changed something"
        real = host.done(vllm_drain, **options)
        assert real["changed"]
        assert real["after"]["state"] == state
        assert (predicted["after"], predicted["actions"]) == (real["after"], real["actions"])
        assert real["admission_backend"] == predicted["admission_backend"] == backend.replace("ies", "y")
        assert (door.word(), door.serves()) == (word, state == "serving")
        for check_mode in (False, True):
            again = host.done(vllm_drain, check_mode=check_mode, **options)
            assert (again["changed"], again["actions"], again["after"]) == (False, [], real["after"])
            assert door.word() == word
    assert host.chat.lease() is None


@pytest.mark.parametrize("backend", ALL)
def test_a_drain_lets_requests_finish_and_takes_no_new_ones(front, backend):
    door = front(backend, token_rate=100)
    host = door.host
    with door.first.client("chat", tokens=1000) as stream:
        stream.first()
        running = host.begin(vllm_drain)
        wait_for(lambda: door.word() != "open", "the withdrawal")
        assert host.chat.busy() == 1
        seen = host.info()
        assert (seen["state"], seen["gate"]["sessions"]) == ("draining", 1)
        assert stream.rest() == (1000, "length")
        result = running.result()
    assert not result.get("failed"), result
    assert result["after"]["state"] == "drained"
    assert not door.serves()


@pytest.mark.parametrize("backend", ALL)
def test_a_time_out_says_what_is_left(front, backend):
    door = front(backend, token_rate=100)
    with door.first.client("chat", tokens=1500) as stream:
        stream.first()
        failed = door.host.run(vllm_drain, timeout=3)
        assert failed["failed"]
        assert (failed["left"]["chat"]["running"], failed["left"]["chat"]["sessions"]) == (1, 1)
        assert door.word() == "withdrawn"
        assert door.host.chat.lease()["owner"] == OWNER


@pytest.mark.parametrize("backend", ALL)
def test_stop_start_and_restart_by_the_units_doors(front, backend):
    door = front(backend, doors=True)
    host = door.host
    assert door.word() == "open", "an engine that was in rotation when its balancer was named stays there"
    stopped = host.done(vllm_engine, state="stopped")
    assert (stopped["after"]["state"], stopped["after"]["proved"], door.word()) == ("stopped", False, "closed") or (
        backend == "gate" and stopped["after"]["admission"] == "closed"
    )
    assert host.done(vllm_engine, state="started")["after"]["state"] == "serving"
    assert (door.word(), door.serves()) == ("open", True)
    pid = host.info()["unit"]["main_pid"]
    restarted = host.done(vllm_engine, state="restarted", run="roll-7")
    assert restarted["after"]["state"] == "serving"
    assert host.info()["unit"]["main_pid"] != pid
    assert (door.word(), door.serves()) == ("open", True)


@pytest.mark.parametrize("backend", ALL)
def test_what_was_drained_stays_out_over_a_restart(front, backend):
    door = front(backend, doors=True)
    host = door.host
    host.done(vllm_drain)
    assert host.done(vllm_engine, state="restarted", run="roll-7")["after"]["state"] == "withdrawn"
    assert not door.serves()
    assert host.done(vllm_drain, state="serving")["after"]["state"] == "serving"
    assert door.serves()


@pytest.mark.parametrize("backend", BALANCERS)
def test_a_stop_by_an_operator_leaves_the_balancer_and_comes_back_proved(front, backend):
    door = front(backend, doors=True, token_rate=300)
    host = door.host
    unit = host.chat.unit
    with door.first.client("chat", tokens=300) as stream:
        stream.first()
        assert host.systemd.ctl("stop", unit).returncode == 0
        assert stream.rest() == (300, "length")
    assert door.word() == "withdrawn"
    assert host.info()["gate"]["admission"] == "open", "nobody but the unit's own doors has it out"
    assert host.systemd.ctl("start", unit).returncode == 0
    assert (door.word(), host.info()["state"]) == ("open", "serving")


@pytest.mark.parametrize("backend", BALANCERS)
def test_sleep_and_wake(front, backend):
    door = front(backend)
    host = door.host
    assert host.done(vllm_sleep, level=1)["after"]["state"] == "asleep"
    assert door.word() == "closed"
    assert host.done(vllm_wake)["after"]["state"] == "serving"
    assert door.serves()


# Killed.


@pytest.mark.parametrize("step", [*OUT, "pause"])
@pytest.mark.parametrize("backend", BALANCERS)
def test_a_drain_that_is_killed_after_a_step(front, backend, step):
    door = front(backend)
    host = door.host
    kill_after(host, Transition, f"_{step}", (vllm_drain, {}))
    assert door.serves() or host.chat.lease()["owner"] == OWNER, "out of service, and nobody says why"
    assert host.done(vllm_drain)["after"]["state"] == "drained"
    assert door.word() == "closed"
    assert not host.run(vllm_drain, check_mode=True)["changed"]


@pytest.mark.parametrize("step", ["resume", *BACK])
@pytest.mark.parametrize("backend", BALANCERS)
def test_a_return_that_is_killed_after_a_step(front, backend, step):
    door = front(backend)
    host = door.host
    host.done(vllm_drain)
    kill_after(host, Transition, f"_{step}", (vllm_drain, {"state": "serving"}))
    assert door.serves() or host.chat.lease()["owner"] == OWNER, "out of service, and nobody says why"
    assert host.done(vllm_drain, state="serving")["after"]["state"] == "serving"
    assert door.serves()
    assert host.chat.lease() is None


@pytest.mark.parametrize("back", [False, True], ids=["drain", "serve"])
@pytest.mark.parametrize(
    ("backend", "owner", "method"),
    [
        *[(backend, Balancer, "_write") for backend in BALANCERS],  # written down, and not told
        ("haproxies", HAProxies, "tell"),  # told, and not read back
        ("haproxies", HAProxies, "_ask"),  # before the second of two HAProxies
        ("command", Script, "_call"),
    ],
)
def test_killed_in_the_middle_of_a_word(front, backend, owner, method, back):
    door = front(backend)
    host = door.host
    if back:
        host.done(vllm_drain)
    wanted = {"state": "serving"} if back else {}
    kill_after(host, owner, method, (vllm_drain, wanted))
    assert host.done(vllm_drain, **wanted)["after"]["state"] == ("serving" if back else "drained")
    assert (door.word(), door.serves()) == (("open", True) if back else ("closed", False))


# Balancers that are wrong.


@contextlib.contextmanager
def requests_past(engine):
    """Short requests one after the other on the engine's own socket, which nobody withdraws."""
    over = threading.Event()

    def ask():
        while not over.is_set():
            engine.complete("x", 20)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("backend", [*ALL, "none"])
def test_an_engine_that_still_gets_requests_is_never_drained(front, backend):
    door = front(backend, token_rate=200)
    host = door.host
    with requests_past(host.chat):
        wait_for(host.chat.busy, "a request")
        failed = host.run(vllm_drain, timeout=3)
    assert failed["failed"]
    assert failed["after"]["state"] != "drained"
    assert host.chat.truth()["cores"][0]["pause"] is None, "what waits in a paused engine would never finish"


def test_a_command_that_lies_is_found_out_by_the_engine(front):
    """It says drained and closed, and clients still come through."""
    door = front("command", token_rate=50)
    host = door.host
    door.mode("lies")
    with door.first.client("chat", tokens=1500) as stream:
        stream.first()
        failed = host.run(vllm_drain, timeout=8)
    assert failed["failed"]
    assert "1 running" in failed["msg"] and "0 session(s) at its balancer" in failed["msg"]


@pytest.mark.parametrize(
    ("backend", "level", "mode", "says"),
    [
        ("haproxy", "operator", "", "Permission denied"),
        ("haproxies", "operator", "", "Permission denied"),
        ("command", "admin", "refuses", "ended with 1: the balancer is frozen by its owner"),
    ],
)
def test_a_balancer_that_refuses(front, backend, level, mode, says):
    door = front(backend, level=level)
    host = door.host
    if mode:
        door.mode(mode)
    assert host.info()["state"] == "serving", "to look is allowed"
    failed = host.run(vllm_drain)
    assert failed["failed"]
    assert says in failed["msg"]
    assert "level admin" in failed["msg"] if backend != "command" else "by hand" in failed["msg"]
    assert (door.word(), host.chat.mutations()) == ("open", [])
    assert host.chat.lease()["owner"] == OWNER
    assert "though it was withdrawn" in " ".join(host.info()["reasons"])
    back = host.run(vllm_drain, state="serving")
    assert back["failed"] and says in back["msg"], "nor is it believed to have been admitted"


@pytest.mark.parametrize(
    ("backend", "silence"),
    [
        ("haproxy", "stop"),
        ("haproxies", "one of two"),
        ("haproxy", "no such server"),
        ("command", "stop"),
        ("command", "hang"),
        ("command", "no JSON"),
        ("command", "no such file"),
    ],
)
def test_a_balancer_without_an_answer_is_a_doubt(front, backend, silence):
    door = front(backend)
    host = door.host
    pid = host.info()["unit"]["main_pid"]
    if silence in ("stop", "one of two"):
        door.all[-1].close()
    elif silence == "no such server":
        door.declare(server="host2")
    elif silence == "no such file":
        door.declare(command=["/nowhere/balance"])
    else:
        door.mode(silence)
        if silence == "hang":
            host.change("etc/vllm/lifecycle/chat.json", admission={**door.declaration(), "timeout": 0.5})
            door.mode("hang")
    seen = host.info()
    assert (seen["state"], seen["gate"]) == ("unknown", None), "no answer is not 0 sessions"
    assert seen["unseen"]["gate"] in seen["reasons"]
    for module, options in (
        (vllm_drain, {}),
        (vllm_drain, {"state": "serving"}),
        (vllm_engine, {"state": "stopped"}),
        (vllm_engine, {"state": "restarted"}),
    ):
        failed = host.run(module, **options)
        assert failed["failed"]
        assert seen["unseen"]["gate"] in failed["msg"]
    assert (host.chat.lease(), host.chat.mutations(), host.info()["unit"]["main_pid"]) == (None, [], pid)
    if silence == "stop":
        stopped = host.run(vllm_engine, state="stopped", force=True)
        assert host.chat.active() == "inactive", stopped


def test_a_stop_by_an_operator_does_not_wait_for_a_silent_balancer(front):
    door = front("haproxy", doors=True)
    door.all[0].close()
    assert door.host.systemd.ctl("stop", door.host.chat.unit).returncode == 0
    journal = door.host.systemd.journal(door.host.chat.unit)
    assert "gives no answer" in journal and "the engine's own gauges decide" in journal
    door.all[0].start()
    assert door.host.info()["state"] == "stopped"
    assert door.host.systemd.ctl("start", door.host.chat.unit).returncode == 0
    assert door.host.info()["state"] == "serving"


# Balancers that forget.


@pytest.mark.parametrize("backend", BALANCERS)
def test_a_restart_of_the_balancer_is_noticed_and_told_again(front, backend):
    door = front(backend)
    host = door.host
    host.done(vllm_drain)
    door.all[-1].restart()
    wait_for(door.all[-1].sends, "that it has forgotten")
    seen = host.info()
    assert seen["state"] == "draining"
    assert "sends it requests, though it was closed: a reload or restart has forgotten that" in " ".join(
        seen["reasons"]
    )
    assert seen["gate"]["forgot"]
    lease = host.chat.lease()
    assert host.run(vllm_drain, check_mode=True)["changed"]
    again = host.done(vllm_drain)
    assert (again["changed"], again["after"]["state"]) == (True, "drained")
    assert door.word() == "closed"
    assert host.chat.lease()["since"] == lease["since"]
    assert host.done(vllm_drain, state="serving")["after"]["state"] == "serving"


@pytest.mark.parametrize(
    ("module", "options", "state"),
    [(vllm_sleep, {"level": 1}, "asleep"), (vllm_engine, {"state": "stopped"}, "stopped")],
    ids=["asleep", "stopped"],
)
def test_an_engine_out_of_service_is_withdrawn_again_by_what_took_it_out(front, module, options, state):
    door = front("haproxy", doors=True)
    host = door.host
    host.done(module, **options)
    door.all[0].restart()
    seen = host.info()
    assert seen["state"] == state
    assert "though it was closed" in " ".join(seen["reasons"])
    predicted = host.run(module, check_mode=True, **options)
    again = host.done(module, **options)
    assert (predicted["actions"], again["actions"]) == (["chat: close HAProxy for new requests"],) * 2
    assert (again["after"]["state"], door.word()) == (state, "closed")
    assert not host.run(module, **options)["changed"]


def test_a_restart_in_the_middle_of_a_drain_is_told_again(front):
    door = front("haproxies", token_rate=200)
    host = door.host
    with door.first.client("chat", tokens=800) as stream:
        stream.first()
        running = host.begin(vllm_drain)
        wait_for(lambda: door.all[1].state() == "drain", "the withdrawal")
        door.all[1].restart()
        wait_for(lambda: door.all[1].state() == "drain", "that it was told again")
        assert stream.rest() == (800, "length")
        result = running.result()
    assert not result.get("failed"), result
    assert result["withdrawn_again"] >= 1
    assert (result["after"]["state"], door.word()) == ("drained", "closed")


@pytest.mark.parametrize("backend", ["gate", "haproxies"])
def test_a_drain_outlives_a_balancer_that_is_away_for_a_while(front, backend):
    door = front(backend, token_rate=200)
    host = door.host
    away = door.all[-1] if door.all else host.gate
    stream = host.chat.open_stream(800, ignore_eos=True)  # past the balancer, which would cut it
    wait_for(lambda: host.chat.busy() == 1, "the request")
    running = host.begin(vllm_drain)
    wait_for(lambda: door.word() == "withdrawn", "the withdrawal")
    away.close()
    time.sleep(2)
    away.start()
    stream.read()
    result = running.result()
    assert not result.get("failed"), result
    assert (result["after"]["state"], door.word()) == ("drained", "closed")
    assert (len(stream.ids), stream.finish_reason) == (800, "length")


@pytest.mark.parametrize("backend", ["gate", "haproxies"])
def test_a_balancer_that_stays_away_fails_the_drain_and_the_next_one_goes_on(front, monkeypatch, backend):
    monkeypatch.setattr(Transition, "admission_patience", 1.0)
    door = front(backend, token_rate=200)
    host = door.host
    away = door.all[-1] if door.all else host.gate
    stream = host.chat.open_stream(800, ignore_eos=True)
    wait_for(lambda: host.chat.busy() == 1, "the request")
    running = host.begin(vllm_drain)
    wait_for(lambda: door.word() == "withdrawn", "the withdrawal")
    away.close()
    failed = running.result()
    assert failed["failed"]
    assert "gives no answer" in failed["msg"] and "-no-answer)" in failed["msg"]
    assert host.chat.lease()["owner"] == OWNER
    away.start()
    stream.read()
    assert (len(stream.ids), stream.finish_reason) == (800, "length")
    assert host.done(vllm_drain)["after"]["state"] == "drained"


def test_a_wait_for_the_balancer_says_what_it_waits_for(front, monkeypatch, capfd):
    monkeypatch.setattr(transition, "TELL_EVERY", 0.2)
    door = front("haproxy")
    door.host.done(vllm_drain)
    looks = iter([False] * 10)
    monkeypatch.setattr(HAProxies, "ready", lambda self, _timeout: next(looks, True))
    assert cli.main(["set", "chat", "serving", "--force"]) == 0
    said = capfd.readouterr().out
    assert re.search(r"chat: HAProxy: not ready: admission open, .*engine up True, \d+ of \d+ s", said)


def test_an_operator_can_remind_a_balancer_without_touching_the_lease(front, capfd):
    door = front("haproxy")
    host = door.host
    host.done(vllm_drain)
    lease = host.chat.lease()
    door.all[0].restart()
    assert cli.main(["remind", "chat"]) == 0
    assert "told again" in capfd.readouterr().out
    assert (door.word(), host.chat.lease(), host.info()["state"]) == ("closed", lease, "drained")
    assert cli.main(["remind", "chat"]) == 0
    assert "does as it was told" in capfd.readouterr().out


def test_what_somebody_drained_at_one_of_two_balancers_is_seen_and_put_right(front):
    door = front("haproxies")
    host = door.host
    host.done(vllm_drain)
    host.done(vllm_drain, state="serving")
    door.all[1].ask("set server pool_chat/host1 state drain")
    seen = host.info()
    assert seen["state"] == "withdrawn"
    assert "sends it no new requests (withdrawn), though it is admitted" in " ".join(seen["reasons"])
    assert host.done(vllm_drain, state="serving")["changed"]
    assert door.serves()


def test_a_weight_of_zero_is_a_drain_that_our_word_does_not_end(front):
    door = front("haproxy")
    host = door.host
    host.done(vllm_drain)
    door.all[0].ask("set server pool_chat/host1 weight 0")
    failed = host.run(vllm_drain, state="serving")
    assert failed["failed"]
    assert "weight" in failed["msg"]


def test_a_crash_comes_back_to_the_balancer_only_when_it_is_proved(front):
    door = front("haproxy", doors=True, start_delay=1, unit={"Restart": "always"})
    host = door.host
    pid = host.info()["unit"]["main_pid"]
    words = set()
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 60
    while host.info()["state"] != "serving" or host.info()["unit"]["main_pid"] == pid:
        words.add((host.chat.active(), door.word()))
        assert time.monotonic() < end
    assert ("activating", "withdrawn") in words
    assert (door.word(), recorded()["proved"]) == ("open", "1")


# Playbooks.


def play(doors, book, *arguments, rc=0, **variables):
    """One of the collection's playbooks, by ansible-playbook, on these fronts' hosts."""
    declared = {}
    for number, door in enumerate(doors, 1):
        engine = {"name": "chat", "model": "/srv/models/tiny", "admission": door.declared()}
        declared[f"h{number}"] = {"vllm_host_control_python": door.host.python(), "vllm_engine_instances": [engine]}
    return run_playbook(book, declared, doors[0].host.root, *arguments, rc=rc, **variables)


def test_playbooks_count_at_haproxies_and_reconcile_reminds_them(front):
    doors = [front("haproxy"), front("haproxy")]
    one, two = doors
    for door in doors:
        door.declare(sockets=[f"127.0.0.1:{door.all[0].admin}"])
    play(doors, "drain.yml", "--limit=h1")
    assert (one.word(), two.word()) == ("closed", "open")
    refused = play(doors, "drain.yml", "--limit=h2", rc=2, vllm_drain_capacity_timeout=1)
    assert f"h1/chat: HAProxy at 127.0.0.1:{one.all[0].admin} has it closed" in refused
    assert two.word() == "open"

    one.all[0].restart()
    assert one.word() == "open"
    assert "changed=1 " in play(doors, "reconcile.yml", "--limit=h1")
    assert one.word() == "closed"
    lease = json.loads((one.host.root / "var/lib/vllm/chat/lease.json").read_text())
    assert lease["owner"] == "operator"
    assert "changed=0 " in play(doors, "reconcile.yml", "--limit=h1")


# None.


def test_without_admission_the_result_says_so(front):
    door = front("none")
    host = door.host
    result = host.done(vllm_drain)
    assert result["after"] == {**result["after"], "state": "drained", "admission": None}
    assert result["admission_backend"] == "none"
    assert "has admission none: nobody was told" in json.dumps(result["warnings"])
    assert result["actions"] == [
        "chat: take the lease",
        "chat: wait for the requests in flight",
        "chat: pause the engine",
    ]
    assert host.info()["admission_backend"] == "none"
    assert host.done(vllm_drain, state="serving")["after"]["state"] == "serving"


def test_without_admission_and_development_endpoints_nothing_could_be_drained(front):
    door = front("none", dev_mode=False)
    refused = door.host.run(vllm_drain)
    assert refused["failed"]
    assert "neither admission" in refused["msg"]
    assert door.host.chat.lease() is None


def test_the_command_is_called_as_documented(front):
    door = front("command")
    door.host.done(vllm_drain)
    door.host.done(vllm_drain, state="serving")
    acted = [verb for verb in calls(door) if verb not in ("status", "sessions")]
    assert acted == ["withdraw", "close", "admit"]
