# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two engines that do not fit on their GPU together take turns, while things go wrong.

The playbooks themselves are run, task by task, by ``play``. A watcher looks at the GPU's ledger all the while.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import typing as t

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.transition import Transition
from ansible_collections.baremetal.vllm.plugins.modules import vllm_drain, vllm_engine, vllm_golden
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.play import Killed, Play
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import wait_for

pytestmark = pytest.mark.long

SWITCHES = 200
SHARE = 0.9  # of the GPU, for each engine
RESIDENT = 2048  # MiB that an engine may hold while asleep


class Fault(t.NamedTuple):
    """Who has it (the engine that goes or the one that comes), what it is, and how the switch ends.

    ``back``: it fails, and the engine that served serves. ``done``: it is done all the same. ``stuck``: it fails, and
    neither can serve before someone has mended what is wrong. ``killed``: the run, or a module of it, is ended.
    ``level`` is the one at which the engine that comes must sleep for that, if it matters.
    """

    side: str
    name: str
    arg: t.Any = True
    ends: str = "back"
    says: str = ""
    level: int | None = None


KILLED_IN = {
    "vllm_sleep": ("lease", "withdraw", "close", "sleep"),
    "vllm_wake": ("lease", "prove", "admit", "await_ready"),
}
FAULTS = [
    Fault("going", "sleep_noop", says="MiB, more than 2048 MiB"),
    Fault("going", "sleep_frees_nothing", says="MiB, more than 2048 MiB"),
    Fault("going", "sleep_keeps", 60000, says="MiB, more than 2048 MiB"),
    Fault("going", "sleep_5xx_before", says="/sleep?level="),
    Fault("going", "sleep_5xx_after", says="/sleep?level="),
    Fault("going", "sleep_slow", 0.2, "done"),
    Fault("going", "http_500", "/sleep", says="/sleep?level="),
    Fault("going", "http_lost", "/sleep", says="gave no answer"),
    Fault("going", "http_reset", "/sleep", says="gave no answer"),
    Fault("going", "http_not_json", "/sleep", "done"),
    Fault("going", "gauge_missing", says="does not report its requests in flight"),
    Fault("going", "metrics_500", says="No host was touched"),
    Fault("going", "dies_after_sleep", 0.01, says="is unknown after the change to asleep"),
    Fault("going", "memory_taken", 70000, "stuck", says="process 1 (70000 MiB)"),
    Fault("coming", "wake_noop"),
    Fault("coming", "wake_half", level=1),
    Fault("coming", "wake_5xx_after", says="/wake_up"),
    Fault("coming", "wake_kills", says="/wake_up"),
    Fault("coming", "wake_slow", 0.2, "done"),
    Fault("coming", "wake_leaves_paused"),
    Fault("coming", "dies_after_wake", 0.01),
    Fault("coming", "reset_fails", says="prefix cache"),
    Fault("coming", "reload_5xx", says="/collective_rpc", level=2),
    Fault("coming", "reload_few_ranks", 0, says="reloaded the weights of 0 rank(s)", level=2),
    Fault("coming", "error_completions", 500, says="/v1/completions"),
    Fault("coming", "http_500", "/wake_up", says="/wake_up"),
    Fault("coming", "http_lost", "/wake_up", says="gave no answer"),
    Fault("coming", "http_500", "/reset_prefix_cache", says="/reset_prefix_cache"),
    # What it answers is wrong, which its golden shows.
    Fault("coming", "garbage", says="golden"),
    Fault("coming", "wrong_tokens", says="golden"),
    Fault("coming", "reload_noop", says="golden", level=2),
    Fault("coming", "reload_wrong", says="golden", level=2),
    # The run itself: ended after so many calls of modules, or by SIGKILL within a module after one of its steps.
    *(Fault("run", "ended after", calls, "killed") for calls in (1, 2)),
    *(Fault("run", "killed in", (module, step), "killed") for module, steps in KILLED_IN.items() for step in steps),
    Fault("run", "killed in", ("vllm_wake", "wake"), "killed", level=1),
    Fault("run", "killed in", ("vllm_wake", "wake_weights"), "killed", level=2),
    Fault("run", "killed in", ("vllm_wake", "reload"), "killed", level=2),
]


class Watcher(threading.Thread):
    """Looks at the GPU: who holds how much of it, many times a second."""

    def __init__(self, host) -> None:
        super().__init__(daemon=True)
        self.host = host
        self.ends = threading.Event()
        self.looks = 0
        self.wrong: list[str] = []
        self.start()

    def run(self) -> None:
        total = self.host.gpu.first.total
        while True:  # at least once, however short the test is
            held = self.host.gpu.processes()
            self.looks += 1
            if sum(held.values()) > total:
                self.wrong.append(f"more than {total} MiB: {held}")
            if sum(mib > total / 2 for mib in held.values()) > 1:
                self.wrong.append(f"two awake: {held}")
            if self.ends.wait(0.01):
                return

    def judge(self) -> None:
        self.ends.set()
        self.join()
        assert self.wrong == []
        assert self.looks > 0


class Pair:
    """A host whose engines chat and code take turns. It begins with chat, and code has never been started."""

    def __init__(self, world, **settings) -> None:
        self.host = world(
            gate=True, gpus=1, engines=("chat", "code"), start=False, gpu_memory_utilization=SHARE, **settings
        )
        self.host.gate.start()
        wait_for(self._gate_answers, "the gate answers")
        gates = self.host.gate.ports
        self.instances = [
            {"name": name, "model": f"/srv/models/{name}", "gpus": self.host.gpu.uuids, "port": gates[name]}
            for name in self.host.engines
        ]
        for module, options in ((vllm_engine, {"state": "started"}), (vllm_drain, {"state": "serving"})):
            self.host.done(module, engine="chat", **options)
        recorded = self.host.run_module(vllm_golden.main, engine="chat")  # of code as well, which has the same model
        assert recorded["changed"], recorded
        self.weights: dict[str, str] = {}
        self.killer: tuple[str, str] | None = None
        self.watcher = Watcher(self.host)

    def _gate_answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(self.host.gate.master))
            return self.host.gate.ready("chat") == 503
        except OSError:
            return False

    def play(self, to: str, check: bool = False, kill_after: int | None = None, **variables) -> Play:
        given = {
            "vllm_engine_instances": self.instances,
            "vllm_gate_address": "127.0.0.1",
            "vllm_switch_engine": to,
            "vllm_switch_min_serving": 0,
            "vllm_switch_max_resident_mib": RESIDENT,
            "vllm_switch_drain_timeout": 60,
            "vllm_switch_wake_timeout": 60,
            **variables,
        }
        return Play("e1", lambda module, **options: self._call(module, check, options), given, kill_after, check)

    def _call(self, module, check: bool, options: dict) -> dict:
        name = module.__name__.rpartition(".")[2]
        if self.killer is None or self.killer[0] != name:
            return self.host.run_module(module.main, check_mode=check, **options)
        step = self.killer[1]

        def spoil():
            before = getattr(Transition, f"_{step}")

            def deadly(transition):
                before(transition)
                os.kill(os.getpid(), signal.SIGKILL)

            setattr(Transition, f"_{step}", deadly)

        status = self.host.begin(module, spoil, **options).wait()
        assert os.WIFSIGNALED(status), f"{name} ended before {step}"
        raise Killed

    def state(self, name: str) -> dict:
        return self.host.engines[name].seen()

    def serves(self, name: str) -> bool:
        """By the signals of the tests alone: in rotation, awake, with the weights that it had at first."""
        seen = self.state(name)
        if not (seen["ready"] and seen["unit"] == "active" and not seen["asleep"] and not seen["paused"]):
            return False
        assert seen["lease"] is None
        return seen["weights"] == self.weights.setdefault(name, seen["weights"])

    def is_out(self, name: str) -> bool:
        """Of the GPU, and of rotation."""
        seen = self.state(name)
        assert not seen["ready"]
        return seen["unit"] != "active" or seen["asleep"] == "kv_cache+weights"


@pytest.fixture
def pair(world):
    made = Pair(world)
    yield made
    made.watcher.judge()


def other(name: str) -> str:
    return "code" if name == "chat" else "chat"


def judge(pair: Pair, now: str) -> None:
    """One serves, the other has left the GPU."""
    assert pair.serves(now), f"{now} does not serve: {pair.state(now)}"
    assert pair.is_out(other(now)), f"{other(now)} is not out: {pair.state(other(now))}"


def changes_nothing(pair: Pair, to: str) -> None:
    """There is nothing to do, so nothing but a look is done."""
    again = pair.play(to)
    assert again.run("switch.yml") == ""
    assert [name for name, _options in again.calls] == ["vllm_info"]


def interrupt(pair: Pair, to: str, fault: Fault, level: int, dice: random.Random) -> str:
    """A run that ends in the middle, and the next one, which goes on or goes back."""
    play = pair.play(to, vllm_switch_level=level, kill_after=fault.arg if fault.name == "ended after" else None)
    pair.killer = fault.arg if fault.name == "killed in" else None
    with pytest.raises(Killed):
        play.run("switch.yml")
    pair.killer = None
    ready = [name for name in pair.host.engines if pair.host.gate.ready(name) == 200]
    assert len(ready) < 2
    held = [name for name in pair.host.engines if pair.state(name)["lease"] == "switch"]
    assert set(ready + held) == {"chat", "code"}, "what is out of service has a lease that says who works on it"
    wanted = dice.choice([to, to, other(to)])
    assert pair.play(wanted, vllm_switch_level=level).run("switch.yml") == ""
    return wanted


def switch(pair: Pair, to: str, fault: Fault | None, level: int) -> str:
    """Who serves after it."""
    going = other(to)
    engine = pair.host.engines[going if fault and fault.side == "going" else to]
    if fault:
        engine.set_fault(fault.name, fault.arg)
    said = pair.play(to, vllm_switch_level=level).run("switch.yml")
    engine.clear_faults()
    if fault is None or fault.ends == "done":
        assert said == ""
        return to
    assert engine.name in said
    assert fault.says in said
    if fault.ends == "stuck":
        assert pair.is_out(going)
        assert pair.is_out(to)
        pair.host.gpu.ledger.release()  # someone mends it, and runs the playbook again
        assert pair.play(to, vllm_switch_level=level).run("switch.yml") == ""
        return to
    return going


def test_two_hundred_switches(pair):
    dice = random.Random(7)
    left = [*FAULTS, *FAULTS]
    dice.shuffle(left)
    now = "chat"
    for number in range(SWITCHES):
        to, level = other(now), dice.choice((1, 2))
        seen = pair.state(to)
        asleep = seen["level"] if seen["asleep"] else None
        # Between two faults there is a good switch, and a longer good time at the end.
        fit = [one for one in left if number % 2 and asleep and one.level in (None, asleep)]
        fault = fit[0] if fit else None
        if fault:
            left.remove(fault)
        try:
            run = interrupt(pair, to, fault, level, dice) if fault and fault.side == "run" else None
            now = run or switch(pair, to, fault, level)
            judge(pair, now)
            if number % 10 == 0:
                changes_nothing(pair, now)
        except AssertionError as exc:
            raise AssertionError(
                f"switch {number} to {to} (asleep at {asleep}), level {level}, with {fault}: {exc}"
            ) from exc
    assert left == [], "every fault has come twice"


@pytest.mark.parametrize("turns", [(), ("code",), ("code", "chat")], ids=["never started", "code", "chat again"])
def test_a_roll_restarts_the_one_whose_turn_it_is(pair, turns):
    assert pair.host.systemd.ctl("disable", pair.host.engines["code"].unit).returncode == 0  # by start: false
    for to in turns:
        assert pair.play(to).run("switch.yml") == ""
    now = turns[-1] if turns else "chat"
    pids = {name: pair.host.info(name)["unit"]["main_pid"] for name in ("chat", "code")}
    roll = pair.play(now, vllm_roll_run="weekly", vllm_roll_min_serving=0)
    assert roll.run("rolling_restart.yml") == ""
    assert [row["engine"] for row in roll.rows()] == [now]
    judge(pair, now)
    after = {name: pair.host.info(name)["unit"]["main_pid"] for name in ("chat", "code")}
    assert (after[now] != pids[now], after[other(now)]) == (True, pids[other(now)])
    # Who is named is meant, and then the lease of the switch counts.
    if turns:
        said = pair.play(now, vllm_roll_engines=[other(now)]).run("rolling_restart.yml")
        assert "e1 is held by switch" in said
        judge(pair, now)
    # What is done with the same process later is told of by its own name, and the roll has restarted it all the same.
    assert pair.play(other(now), vllm_switch_run="late").run("switch.yml") == ""
    seen = pair.host.info(now)
    assert (seen["last"]["run"], seen["restarted_by"]) == ("late", "weekly")


def test_a_check_mode_run_says_it_all_and_changes_nothing(pair):
    before = pair.host.files()
    play = pair.play("code", check=True)
    assert play.run("switch.yml") == ""
    assert [name for name, _options in play.calls] == ["vllm_info", "vllm_sleep", "vllm_engine"]
    assert pair.host.files() == before
    assert pair.serves("chat")
    (row,) = play.rows()
    assert (row["slept"], row["woken"], row["changed"]) == (["chat"], ["code"], True)


def test_the_report_says_where_the_seconds_went(pair):
    assert pair.play("code").run("switch.yml") == ""
    play = pair.play("chat", vllm_switch_run="late shift")
    assert play.run("switch.yml") == ""
    assert (play.report["schema"], play.report["version"], play.report["run"]) == (
        "baremetal.vllm/switch",
        1,
        "late shift",
    )
    (row,) = play.rows()
    assert (row["name"], row["slept"], row["woken"], row["changed"]) == ("e1", ["code"], ["chat"], True)
    parts = [row[key] for key in ("drain_s", "sleep_s", "wake_s", "start_s", "prove_s", "overhead_s")]
    assert abs(sum(parts) - row["seconds"]) < 0.01
    assert min(row["drain_s"], row["sleep_s"], row["wake_s"], row["prove_s"]) > 0
    assert row["start_s"] == 0
    went, came = row["spans"]
    assert [went["engine"], *(one["phase"] for one in went["phases"])] == ["code", "withdraw", "drain", "sleep"]
    assert [came["engine"], *(one["phase"] for one in came["phases"])] == ["chat", "wake", "prove", "admit"]
    assert went["since"] + went["seconds"] <= came["since"]
    assert "code asleep, chat awake" in play.page
    assert pair.host.engines["code"].lease()["run"] == "late shift"


def test_the_last_of_a_model_does_not_go(pair):
    assert "min_serving is 1, yet 0 engine(s) are left to serve" in pair.play("code", vllm_switch_min_serving=1).run(
        "switch.yml"
    )
    assert pair.serves("chat")
    assert pair.host.engines["chat"].mutations() == []
    # another engine of the model that it really serves, which does not serve
    pair.instances.append({"name": "chat2", "model": "/srv/models/tiny", "gpus": ["9"], "port": 1})
    said = pair.play("code", vllm_switch_min_serving=1, vllm_switch_capacity_timeout=1).run("switch.yml")
    assert "0 of 1 other engine(s) serve, 1 must: e1/chat2" in said


def test_what_someone_else_holds_is_not_taken(pair):
    pair.host.done(vllm_drain, engine="chat", lease={"owner": "ops", "reason": "a fan is replaced"})
    said = pair.play("code").run("switch.yml")
    assert "'chat' is held by ops (a fan is replaced). No host was touched." in said
    assert pair.host.engines["chat"].lease()["owner"] == "ops"
    assert pair.play("code", vllm_switch_force=True).run("switch.yml") == ""
    assert pair.serves("code")


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"vllm_switch_engine": ""}, "vllm_switch_engine is the name of the engine to be awake"),
        ({"vllm_switch_engine": ["chat"]}, "vllm_switch_engine is the name of the engine to be awake"),
        ({"vllm_switch_level": 0}, "vllm_switch_level is 1 or 2"),
        ({"vllm_switch_mode": "keep"}, "vllm_switch_mode is wait or abort"),
        ({"vllm_switch_batch": 0}, "vllm_switch_batch a number of hosts"),
        ({"vllm_switch_engine": "cdoe"}, "there is no engine 'cdoe' here; engines of this host: chat, code"),
        ({"vllm_engine_instances": [{"name": "chat"}, {"name": "code"}]}, "which engines share a GPU with 'code'"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_before_anything_is_touched(pair, variables, says):
    play = pair.play("code", **variables)
    assert says in play.run("switch.yml")
    assert [name for name, _options in play.calls] in ([], ["vllm_info"])


DAY = {
    "name": "day",
    "from": "08:00",
    "to": "20:00",
    "timezone": "Europe/Berlin",
    "awake": ["chat"],
    "asleep": ["code"],
}
NIGHT = {**DAY, "name": "night", "from": "20:00", "to": "08:00", "awake": ["code"], "asleep": ["chat"], "level": 2}
SCHEDULE = {
    "vllm_schedule": [DAY, NIGHT],
    "vllm_schedule_max_resident_mib": RESIDENT,
    "vllm_schedule_drain_timeout": 60,
    "vllm_schedule_wake_timeout": 60,
}


def follow(pair: Pair, time: str, **variables) -> tuple[str, list[str], Play]:
    play = pair.play("", **{**SCHEDULE, "vllm_schedule_now": f"2026-06-10T{time}+02:00", **variables})
    said = play.run("schedule.yml")
    return said, [name for name, _options in play.calls], play


def test_the_calendar_is_followed_at_any_minute_and_twice_without_effect(pair):
    for time, engine in (
        ("20:00:00", "code"),
        ("23:59:59", "code"),
        ("07:59:59", "code"),
        ("08:00:00", "chat"),
        ("12:00:00", "chat"),
    ):
        before = pair.host.files()
        moved = not pair.serves(engine)
        said, calls, _play = follow(pair, time)
        assert said == ""
        judge(pair, engine)
        assert moved == (time in ("20:00:00", "08:00:00"))
        if not moved:
            assert calls == ["vllm_info"]
            assert pair.host.files() == before
        assert follow(pair, time)[:2] == ("", ["vllm_info"])
    assert pair.host.engines["code"].asleep() == 1
    follow(pair, "20:00:00")
    assert pair.host.engines["chat"].asleep() == 2
    assert pair.host.engines["chat"].lease()["reason"] == "window night"


def test_the_calendar_respects_what_someone_holds(pair):
    follow(pair, "21:00:00")
    ops = {"owner": "ops", "reason": "a long test"}
    pair.host.done(vllm_drain, engine="code", lease=ops)
    # code is out for a reason, and chat, which sleeps, is the calendar's own: neither is moved
    said, calls, play = follow(pair, "09:00:00")
    assert (said, calls) == ("", ["vllm_info"])
    (row,) = play.rows()
    assert row["held"] == ["'code' is held by ops (a long test)"]
    pair.host.done(vllm_drain, engine="code", state="serving", lease=ops)
    assert follow(pair, "09:00:00")[0] == ""
    judge(pair, "chat")


def test_a_switch_by_hand_holds_against_the_calendar_as_long_as_its_lease(pair):
    follow(pair, "21:00:00")
    follow(pair, "09:00:00")
    assert pair.play("code", vllm_switch_lease_ttl=1000).run("switch.yml") != "", (
        "it would take what the calendar holds"
    )
    assert pair.play("code", vllm_switch_force=True, vllm_switch_lease_ttl=1000).run("switch.yml") == ""
    assert follow(pair, "09:05:00")[:2] == ("", ["vllm_info"])
    assert pair.serves("code")
    pair.host.change("var/lib/vllm/chat/lease.json", expires=1.0)
    assert follow(pair, "09:10:00")[0] == ""
    judge(pair, "chat")


def test_a_calendar_that_cannot_be_is_refused_before_any_host_is_asked(pair):
    said, calls, _play = follow(pair, "09:00:00", vllm_schedule=[DAY, {**NIGHT, "to": "09:00"}])
    assert "windows 'day' and 'night' are both open at" in said
    assert calls == []
    said, calls, _play = follow(pair, "09:00:00", vllm_schedule_now="2026-06-10 09:00")
    assert "is no time with an offset" in said
    assert calls == []


def test_no_calendar_is_nothing_to_do(pair):
    assert follow(pair, "09:00:00", vllm_schedule=[])[:2] == ("", ["vllm_info"])
    assert pair.serves("chat")


def test_a_window_without_a_successor_leaves_things_as_they_are(pair):
    follow(pair, "21:00:00")
    assert follow(pair, "09:00:00", vllm_schedule=[NIGHT])[:2] == ("", ["vllm_info"])
    judge(pair, "code")


def test_sleep_and_wake_by_hand(pair):
    given = {"vllm_sleep_min_serving": 0, "vllm_sleep_max_resident_mib": RESIDENT, "vllm_sleep_level": 2}
    sleep = pair.play("", **given)
    assert sleep.run("sleep.yml") == ""
    assert pair.is_out("chat")
    assert pair.host.engines["chat"].asleep() == 2
    assert pair.host.engines["chat"].lease()["owner"] == "operator"
    assert sleep.rows()[0]["slept"] == ["chat"], "code has never been started, and is left alone"
    again = pair.play("", **given)
    assert again.run("sleep.yml") == ""
    assert not again.rows()[0]["changed"]
    assert "is held by operator" in pair.play("", vllm_wake_owner="me").run("wake.yml")
    wake = pair.play("")
    assert wake.run("wake.yml") == ""
    judge(pair, "chat")
    for play, phases in ((sleep, ["withdraw", "drain", "sleep"]), (wake, ["wake", "prove", "admit"])):
        (span,) = play.rows()[0]["spans"]
        assert [span["engine"], *(one["phase"] for one in span["phases"])] == ["chat", *phases]
    assert wake.rows()[0]["woken"] == ["chat"]
    again = pair.play("")
    assert again.run("wake.yml") == ""
    assert [name for name, _options in again.calls] == ["vllm_info"]


def shows(said: str) -> None:
    """What every failure brings along."""
    for words in ("unit: active/running, result success", "GPU GPU-", "(its own)", "end of its journal:"):
        assert words in said, said


def test_what_the_host_shows_is_in_the_message_of_each_failure(pair):
    chat = pair.host.engines["chat"]
    chat.set_fault("sleep_5xx_before")
    for book in ("switch.yml", "sleep.yml"):
        play = pair.play("code", vllm_sleep_min_serving=0)
        said = play.run(book)
        assert "Drain, put to sleep, and prove the memory free" in said
        shows(said)
        (row,) = play.rows()
        assert (row["outcome"], row["name"]) == ("failed", "e1")
        assert row["reason"].splitlines()[0] in said
        shows(row["reason"])
        assert "Not complete: 1 failed" in play.page
    chat.clear_faults()
    assert pair.play("chat").run("wake.yml") == ""
    assert pair.play("chat", vllm_sleep_min_serving=0).run("sleep.yml") == ""
    chat.set_fault("wake_5xx_after")
    said = pair.play("chat").run("wake.yml")
    assert "Wake, prove and admit" in said
    shows(said)


def test_what_the_host_shows_is_in_the_message_of_a_drain_that_fails(pair):
    pair.host.engines["chat"].set_fault("pause_wait_stuck")
    said = pair.play("", vllm_drain_engines=["chat"], vllm_drain_min_serving=0, vllm_drain_timeout=2).run("drain.yml")
    assert '"Drain, or put back" failed' in said
    assert not pair.serves("chat")
    shows(said)


def test_the_last_of_a_model_is_not_put_to_sleep(pair):
    assert "min_serving is 1, yet 0 engine(s) are left to serve" in pair.play("").run("sleep.yml")
    assert pair.serves("chat")


def test_of_a_group_one_is_awake_at_a_time(pair):
    assert pair.play("code").run("switch.yml") == ""
    given = {"vllm_wake_engines": ["chat"], "vllm_wake_owner": "switch"}
    said = pair.play("", vllm_switch_group=["chat", "code"], **given).run("wake.yml")
    assert "'chat' shares its GPU with code (serving). No host was touched. Name one of them with" in said
    # nobody has said that they exclude each other: the memory says so
    said = pair.play("", **given).run("wake.yml")
    assert "MiB are free; held by process" in said
    judge(pair, "code")


def test_a_sleeper_that_dies_leaves_the_gpu_to_the_one_that_is_awake(world):
    """systemd restarts what has died, and starts everything at boot."""
    pair = Pair(world, doors=("wanted",), unit={"Restart": "always", "RestartSec": 0.05})
    assert pair.play("code").run("switch.yml") == ""
    chat = pair.host.engines["chat"]
    os.kill(chat.truth()["pid"], signal.SIGKILL)
    wait_for(lambda: chat.active() == "inactive", "chat is down, and stays so")
    assert "is not started by itself: switch has put it to sleep (code has its GPU)" in pair.host.systemd.journal(
        chat.unit
    )
    assert pair.host.systemd.ctl("start", chat.unit).returncode == 0
    assert chat.active() == "inactive"
    judge(pair, "code")
    # One that is wanted is restarted.
    code = pair.host.engines["code"]
    old = code.truth()["pid"]
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: code.active() == "active" and code.truth()["pid"] != old, "code is back")
    # And who has its turn is started, whatever was.
    assert pair.play("chat").run("switch.yml") == ""
    judge(pair, "chat")
    pair.watcher.judge()


@pytest.mark.parametrize(
    ("lease", "starts"),
    [
        (None, True),
        ({"purpose": "asleep", "expires": 9e9}, False),
        ({"purpose": "asleep", "expires": 1.0}, True),
        ({"purpose": "started", "expires": 9e9}, True),
        ({"purpose": "awake", "expires": 9e9}, True),
        ({"purpose": "drained", "expires": 9e9}, True),
    ],
)
def test_what_may_start_by_itself(world, lease, starts):
    host = world(start=False, doors=("wanted",))
    if lease:
        full = {"schema": 1, "owner": "ops", "reason": "", "run": "", "restore": "open", "since": 1.0, "steps": []}
        host.write("var/lib/vllm/chat/lease.json", full | lease)
    assert host.systemd.ctl("start", host.chat.unit).returncode == 0
    assert host.chat.active() == ("active" if starts else "inactive")
