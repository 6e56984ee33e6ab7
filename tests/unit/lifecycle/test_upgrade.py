# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Playbook rolling_upgrade on one host: new runtimes and settings, good ones, and those that are broken in each way.

The playbook itself is run, task by task, by ``play``. What the roles write, ``Site`` writes; the rest is real.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading

import pytest
import yaml

from ansible_collections.baremetal.vllm.plugins.modules import vllm_drain, vllm_engine, vllm_golden
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.play import Failed, Killed, Play

pytestmark = pytest.mark.long

WARMUP = [{"prompt_tokens": 16, "max_tokens": 32}]
MODULES = ["vllm_drain", "vllm_engine", "vllm_engine/configure", "vllm_engine", "vllm_drain"]


class Site:
    """A host whose engine chat serves with runtime 0.33.0 and is proved by a golden; and its inventory."""

    def __init__(self, world) -> None:
        self.host = world(gate=True, doors=True, unit={"Restart": "no"}, declared={"warmup": WARMUP})
        self.root = self.host.root
        recorded = self.host.run_module(vllm_golden.main, engine="chat")
        assert recorded["changed"], recorded
        self.version, self.digest, self.options, self.declared = "0.33.0", "0", {}, {}
        self.on_watch = None
        self.torn = False
        self.ready = []
        self.roles: list[str] = []

    def want(self, digest: str, version: str = "", declared: dict | None = None, **options) -> None:
        """What the inventory says from now on. ``fault`` is among the options of the simulated vLLM."""
        self.version, self.digest = version or self.version, digest
        self.options, self.declared = options, declared or {}

    def _role(self, name: str, tasks_from: str) -> dict:
        self.roles.append(f"{name}/{tasks_from}")
        if name == "vllm_runtime":
            new = self.root / f"opt/vllm/runtimes/{self.version}"
            new.mkdir(exist_ok=True)
            if not (new / "bin").exists():
                (new / "bin").symlink_to(self.root / "opt/vllm/runtimes/0.33.0/bin")
        if tasks_from == "want":
            want = {"config_digest": self.digest, "runtime_version": self.version, "preload": False, "start": True}
            return {"__vllm_engine_wants": {"chat": want}}
        if tasks_from == "configure" and not self.check:
            self._configure()
        return {}

    def _configure(self) -> None:
        names = ("model", "served-model-name", "uds", "enable-sleep-mode")
        path = self.root / "etc/vllm/engines/chat.yaml"
        kept = {name: value for name, value in yaml.safe_load(path.read_text()).items() if name in names}
        path.write_text(yaml.safe_dump({**kept, **self.options}))
        link = self.root / "opt/vllm/engines/chat"
        link.unlink()
        link.symlink_to(f"../runtimes/{self.version}")
        if self.torn:
            raise Failed("the disk is full")
        value = json.loads(self.host.chat.declared.read_text())
        value |= {"start_timeout": 120, "config_digest": self.digest, "runtime_version": self.version}
        self.host.chat.declared.write_text(json.dumps(value | self.declared))

    def play(self, check: bool = False, kill_after: int | None = None, **variables) -> Play:
        self.check = check
        given = {
            "vllm_engine_instances": [
                {"name": "chat", "model": "/srv/models/tiny", "port": self.host.gate.ports["chat"]}
            ],
            "vllm_gate_address": "127.0.0.1",
            "vllm_upgrade_soak": 0,
            **variables,
        }
        return Play("e1", self._call, given, kill_after, check, self._role)

    def _call(self, module, **options) -> dict:
        name = module.__name__.rpartition(".")[2]
        if name == "vllm_watch" and options.get("seconds") and self.on_watch:
            self.on_watch()
        try:
            return self.host.run_module(module.main, check_mode=self.check, **options)
        finally:
            if name == "vllm_watch":
                self.host.chat.clear_faults()

    def serves(self) -> dict:
        """It does, by the signals of the tests alone: with which options and which runtime."""
        seen = self.host.chat.seen()
        assert (seen["unit"], seen["ready"], seen["lease"], seen["paused"]) == ("active", True, None, False), seen
        assert self.ask()["finish_reason"] == "length"
        options = yaml.safe_load((self.root / "etc/vllm/engines/chat.yaml").read_text())
        return {
            "seqs": options.get("max-num-seqs"),
            "runtime": os.readlink(self.root / "opt/vllm/engines/chat").rpartition("/")[2],
            "digest": json.loads(self.host.chat.declared.read_text())["config_digest"],
        }

    def ask(self) -> dict:
        connection = http.client.HTTPConnection("127.0.0.1", self.host.gate.ports["chat"], timeout=60)
        try:
            body = json.dumps({"prompt": "a story", "max_tokens": 8, "ignore_eos": True})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            return json.loads(text)["choices"][0] if answer.status == 200 else {"status": answer.status}
        finally:
            connection.close()

    def pid(self) -> int:
        return self.host.chat.truth()["pid"]


@pytest.fixture
def site(world):
    return Site(world)


def calls(play: Play) -> list[str]:
    """Without what only looks."""
    looks = ("vllm_info", "vllm_capacity", "vllm_watch")
    return [name for name, _options in play.calls if name not in looks and (name in MODULES)]


def test_to_another_version_and_other_settings_and_again_without_effect(site):
    old = site.pid()
    site.want("b", "0.33.1", **{"max-num-seqs": 8})
    predicted = site.play(check=True)
    files = site.host.files()
    assert predicted.run("rolling_upgrade.yml") == ""
    assert site.host.files() == files
    assert site.pid() == old
    stream = threading.Thread(target=lambda: site.ready.append(site.ask()))
    stream.start()
    play = site.play()
    assert play.run("rolling_upgrade.yml") == ""
    stream.join()
    assert calls(play) == MODULES
    assert site.serves() == {"seqs": 8, "runtime": "0.33.1", "digest": "b"}
    assert site.pid() != old
    assert (play.report["schema"], play.report["version"], play.report["good"]) == ("baremetal.vllm/upgrade", 1, True)
    (row,) = play.rows()
    assert (row["from"], row["to"], row["runs"], row["outcome"], row["reason"]) == (
        "0.33.0", "0.33.1", "0.33.1", "upgraded", "",
    )  # fmt: skip
    assert row["seconds"] > 0
    assert row["speed_before"] > 0
    assert row["speed_after"] > 0
    (span,) = row["spans"]
    assert abs(sum(one["seconds"] for one in span["phases"]) - span["seconds"]) < row["seconds"]
    assert [one["phase"] for one in span["phases"]][:3] == ["withdraw", "drain", "stop"]
    assert "0.33.0 → 0.33.1" in play.page
    proof = site.host.info()["started"]["proof"]
    assert (proof["by"], proof["runtime"]) == ("golden", "0.33.0"), "the old one's answers prove the new one"
    # Nothing is left to do, and nothing is done.
    files, pid = site.host.files(), site.pid()
    again = site.play()
    assert again.run("rolling_upgrade.yml") == ""
    assert calls(again) == []
    assert (site.host.files(), site.pid()) == (files, pid)
    assert again.rows()[0]["outcome"] == "unchanged"
    # Settings alone.
    site.want("c", **{"max-num-seqs": 4})
    play = site.play()
    assert play.run("rolling_upgrade.yml") == ""
    assert site.serves() == {"seqs": 4, "runtime": "0.33.1", "digest": "c"}
    # Files that were written, and a process that never read them.
    site.want("d", **{"max-num-seqs": 2})
    site._configure()
    assert site.play().run("rolling_upgrade.yml") == ""
    assert site.pid() != pid
    assert site.serves()["seqs"] == 2


BROKEN = [
    ("start_crash", {}, "did not start"),
    ("wrong_tokens", {}, "does not compute what golden"),
    ("garbage", {}, "does not compute what golden"),
    ("hang_output", {"start_timeout": 12}, "did not start"),
    ("slow_tokens=40", {}, "min_speed_ratio is 0.7"),
]


def test_what_is_broken_goes_back_by_itself(site):
    for number, (fault, declared, says) in enumerate(BROKEN):
        site.want(f"broken{number}", "0.33.9", declared, fault=fault)
        play = site.play()
        said = play.run("rolling_upgrade.yml")
        assert says in said + str(play.facts.get("__vllm_upgrade_journal")), (fault, said)
        assert "It went back to what it ran before, was proved with it and serves." in said
        assert "e1 chat: vLLM 0.33.0 -> 0.33.9, rolled_back, runs 0.33.0" in said
        assert site.serves() == {"seqs": None, "runtime": "0.33.0", "digest": "0"}, fault
        (row,) = play.rows()
        assert (row["outcome"], row["runs"], row["state"]) == ("rolled_back", "0.33.0", "serving")
        assert row["reason"]
        assert play.report["good"] is False


def test_files_that_were_written_in_part_are_taken_back_as_well(site):
    """The options and the link are new, the declaration with the digest is not: no process may run with that."""
    site.want("b", "0.33.1", **{"max-num-seqs": 8})
    site.torn = True
    play = site.play()
    assert "It went back to what it ran before" in play.run("rolling_upgrade.yml")
    assert site.serves() == {"seqs": None, "runtime": "0.33.0", "digest": "0"}
    site.torn = False
    assert site.play().run("rolling_upgrade.yml") == ""
    assert site.serves() == {"seqs": 8, "runtime": "0.33.1", "digest": "b"}


def test_with_policy_stop_it_stays_out_of_rotation(site):
    site.want("broken", "0.33.9", fault="start_crash")
    said = site.play(vllm_upgrade_on_failure="stop").run("rolling_upgrade.yml")
    assert "The host stays out of rotation" in said
    seen = site.host.chat.seen()
    assert (seen["ready"], seen["lease"]) == (False, "rolling_upgrade")
    # Corrected, and run again: it goes on with the same run.
    run = site.host.chat.lease()["run"]
    site.want("good", "0.33.1")
    play = site.play()
    assert play.run("rolling_upgrade.yml") == ""
    assert play.report["run"] == run
    assert site.serves()["runtime"] == "0.33.1"


def test_killed_after_each_call_and_run_again(site):
    """SIGKILL between any two calls; the next run ends where an undisturbed one does."""
    number, whole = 0, None
    while whole is None or number < whole:
        number += 1
        site.want(f"{number}", "0.33.1" if number % 2 else "0.33.2")
        play = site.play(kill_after=number)
        try:
            assert play.run("rolling_upgrade.yml") == ""
            whole = number
        except Killed:
            pass
        seen = site.host.chat.seen()
        assert seen["ready"] or seen["lease"] == "rolling_upgrade", "what is out of service has a lease"
        again = site.play()
        assert again.run("rolling_upgrade.yml") == "", number
        assert site.serves()["digest"] == f"{number}"
        last = site.play()
        assert last.run("rolling_upgrade.yml") == ""
        assert calls(last) == []
    assert number > len(MODULES), "every call was the last of one run"


def answer_badly(site) -> None:
    site.host.chat.set_fault("error_completions", 500)
    assert [site.ask()["status"] for _unused in range(5)] == [500] * 5


def die(site) -> None:
    os.kill(site.pid(), signal.SIGKILL)


def compute_badly(site) -> None:
    site.host.chat.set_fault("wrong_tokens")


SOAKS = [
    (answer_badly, "failed 5 of 5 request(s)", 3),
    (die, "cannot be watched", 1),
    (compute_badly, "does not compute what golden", 1),
]


def test_a_soak_that_shows_something_brings_it_back(site):
    for number, (happens, says, seconds) in enumerate(SOAKS):
        site.want(f"soak{number}", "0.33.1")
        site.on_watch = lambda happens=happens: happens(site)
        play = site.play(vllm_upgrade_soak=seconds, vllm_upgrade_soak_interval=1)
        said = play.run("rolling_upgrade.yml")
        site.on_watch = None
        assert says in said, said
        assert f"Watched for {seconds} s, and not good enough: e1:" in said
        assert site.serves() == {"seqs": None, "runtime": "0.33.0", "digest": "0"}
        (row,) = play.rows()
        assert row["outcome"] == "rolled_back"


def test_a_quiet_soak_says_that_nothing_came(site):
    site.want("b", "0.33.1")
    play = site.play(vllm_upgrade_soak=2, vllm_upgrade_soak_interval=1)
    assert play.run("rolling_upgrade.yml") == ""
    assert "no request came to 'chat' in 2 s; its golden alone is proved" in play.report["soak"][0]
    site.want("c", "0.33.1")
    site.on_watch = lambda: [site.ask() for _unused in range(4)]
    play = site.play(vllm_upgrade_soak=2, vllm_upgrade_soak_interval=1)
    assert play.run("rolling_upgrade.yml") == ""
    assert "'chat' had 8 request(s) in 2 s, 0 failed" in play.report["soak"][0]


def test_what_someone_else_holds_is_not_taken(site):
    site.host.done(vllm_drain, engine="chat", lease={"owner": "ops", "reason": "a fan is replaced"})
    site.want("b", "0.33.1")
    said = site.play().run("rolling_upgrade.yml")
    assert "e1 is held by ops (a fan is replaced). No host was touched." in said
    assert "vllm_runtime/main" not in site.roles


@pytest.mark.parametrize(
    "variables",
    [
        {"vllm_upgrade_canary": -1},
        {"vllm_upgrade_batch": 0},
        {"vllm_upgrade_soak_max_error_share": 2},
        {"vllm_upgrade_on_failure": "ignore"},
        {"vllm_upgrade_start_timeout": 0},
    ],
)
def test_nonsense_is_refused_before_anything_is_touched(variables):
    play = Play("e1", lambda module, **options: {}, variables)
    assert "vllm_upgrade_batch is a number of hosts" in play.run("rolling_upgrade.yml")
    assert play.calls == []


def test_an_option_of_no_sense_is_refused(site):
    refused = site.host.run(vllm_engine, state="restarted", min_speed_ratio=-1)
    assert "min_speed_ratio is a share" in refused["msg"]
