# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whole plays on a simulated host: what is shown of a task that takes long, and what it gives in the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import (
    CHECKOUT,
    begin_playbook,
    run_playbook,
    wait_for,
)

DRAIN = {"baremetal.vllm.vllm_drain": {"engine": "chat", "timeout": 600}}
SERVE = {"baremetal.vllm.vllm_drain": {"engine": "chat", "state": "serving", "timeout": 600}}
PATIENCE = 300.0  # with a machine that others use too
# Reaches the host until the file AWAY is there. Only the way is cut, as by a network: what runs on the host goes on.
FLAKY = """
import os
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection import local
DOCUMENTATION = local.DOCUMENTATION.replace("name: local", "name: flaky")
class Connection(local.Connection):
    transport = "flaky"
    def exec_command(self, *arguments, **keywords):
        if os.path.exists({away!r}):
            raise AnsibleConnectionFailure("Connection timed out")
        return super().exec_command(*arguments, **keywords)
"""


class Player:
    """Plays of single tasks on one host."""

    def __init__(self, host, folder: Path) -> None:
        self.host = host
        self.folder = folder
        self.hosts = {"gpu1": {"ansible_python_interpreter": host.python()}}

    def book(self, *tasks: dict) -> str:
        """A playbook of these tasks, the results of which are kept."""
        written = []
        for number, task in enumerate(tasks):
            content = f"{{{{ found_{number} | to_json }}}}"
            keep = {"content": content, "dest": f"{self.folder}/result{number}.json", "mode": "0600"}
            written.append({"name": f"Task {number}", "register": f"found_{number}", **task})
            written.append({"name": "Keep it", "ansible.builtin.copy": keep, "check_mode": False, "no_log": False})
        path = self.folder / "book.yml"
        play = {"hosts": "vllm_engines", "gather_facts": False, "environment": {"TMPDIR": f"{self.folder}/payloads"}}
        path.write_text(yaml.safe_dump([{**play, "tasks": written}]))
        return str(path)

    def play(self, *tasks: dict, arguments: tuple[str, ...] = (), rc: int = 0, **variables) -> str:
        return run_playbook(self.book(*tasks), self.hosts, self.folder, *arguments, rc=rc, **variables)

    def begin(self, *tasks: dict, **variables) -> subprocess.Popen[str]:
        return begin_playbook(self.book(*tasks), self.hosts, self.folder, **variables)

    def result(self, number: int = 0) -> dict:
        return json.loads((self.folder / f"result{number}.json").read_text())

    @property
    def jobs(self) -> Path:
        return self.host.root / "run/vllm-lifecycle/jobs"

    def doing(self) -> dict:
        """What the only job on the host says, if there is one."""
        with contextlib.suppress(OSError, ValueError):
            (job,) = self.jobs.iterdir()
            return json.loads((job / "progress.json").read_text())
        return {}

    def withdrawn(self) -> bool:
        return self.host.gate.stored("chat")["admission"] != "open"

    def nothing_is_left(self) -> None:
        assert list(self.jobs.iterdir()) == []
        assert list((self.folder / "payloads").iterdir()) == [], "the archives that the modules were sent in"

    def kill_plays(self) -> None:
        """Workers, too, which have sessions of their own."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{self.folder}/book.yml".encode() in (process / "cmdline").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)

    def running(self) -> set[int]:
        """The processes that modules have left on the host, by what only they have in their environment."""
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                given = (process / "environ").read_bytes().split(b"\0")
                ours = f"TMPDIR={self.folder}/payloads".encode() in given
                if ours and any(one.startswith(b"VLLM_LIFECYCLE_ASIDE=") for one in given):
                    found.add(int(process.name))
        return found


@pytest.fixture
def player(world, tmp_path):
    (tmp_path / "payloads").mkdir()

    def build(**settings) -> Player:
        return Player(world(**{"gate": True, "token_rate": 100, **settings}), tmp_path)

    return build


@contextlib.contextmanager
def busy(on: Player):
    """A client whose stream comes slowly, and after the block ends as it should."""
    on.host.chat.set_fault("slow_tokens", 2)
    with on.host.gate.client("chat", tokens=600) as stream:
        stream.first()
        yield
        on.host.chat.clear_faults()
        assert stream.rest() == (600, "length")


def slow(on: Player, *tasks: dict, word: str = "draining", rc: int = 0, **variables) -> str:
    """What a play prints, when the client's stream ends after a line with that word."""
    with busy(on):
        running = on.begin(*tasks, **variables)
        printed = until(running, word)
    return printed + end(running, rc)


def until(running: subprocess.Popen[str], word: str) -> str:
    """What it prints until a line has that word."""
    printed = ""
    while word not in printed:
        line = running.stdout.readline()
        assert line, f"ended without {word!r}:\n{printed}"
        printed += line
    return printed


def end(running: subprocess.Popen[str], rc: int = 0) -> str:
    printed = running.communicate(timeout=PATIENCE)[0]
    assert running.returncode == rc, printed
    return printed


def told(output: str) -> list[str]:
    """The lines of progress among what a play has printed."""
    return [line for line in output.splitlines() if line.startswith("gpu1") and "ok=" not in line]


def shape(value):
    """A result without its figures."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in value.items()}
    if isinstance(value, list):
        return [shape(one) for one in value]
    return type(value).__name__ if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def test_a_slow_drain_is_shown_and_its_result_is_the_same(player):
    on = player()
    output = slow(on, DRAIN, vllm_progress=1)
    lines = told(output)
    (first, *_others) = [line for line in lines if "draining" in line]
    assert first.startswith("gpu1 chat: draining, 1 running, 0 waiting, 1 session(s) at "), lines
    assert first.endswith(" of 600 s")
    assert len(lines) == len(set(lines)), "a line that says nothing new"
    assert "\r" not in output
    assert "\x1b" not in output
    shown = on.result()
    on.nothing_is_left()
    wait_for(lambda: not on.running(), "the process ends when its result was taken")

    # The other way: Ansible's own, in one call.
    on.play(SERVE)
    with busy(on):
        running = on.begin(DRAIN, vllm_progress=False)
        wait_for(on.withdrawn, "the drain has begun", PATIENCE)
    output = end(running)
    assert told(output) == []
    assert shape(on.result()) == shape(shown)
    assert shown["changed"]
    on.nothing_is_left()


def test_a_slow_failure_is_the_same(player):
    on = player()
    drain = {"baremetal.vllm.vllm_drain": {"engine": "chat", "timeout": 7}, "ignore_errors": True, "diff": True}
    with busy(on):
        output = on.play(drain, SERVE, drain, vllm_progress=1)
        shown, again = on.result(), on.result(2)
        on.play(SERVE, drain, SERVE, vllm_progress=False)
        direct = on.result(1)
    assert shown["failed"]
    assert "still has 1 running and 0 waiting request(s)" in shown["msg"]
    assert shown["left"]["chat"]["running"] == 1
    assert shape(shown) == shape(again) == shape(direct)
    assert told(output)
    on.nothing_is_left()


def test_what_is_done_at_once_shows_nothing_and_is_one_call(player):
    on = player()
    output = on.play(DRAIN, DRAIN, SERVE, SERVE, arguments=("-vvv",), vllm_progress=60)
    assert told(output) == []
    assert [on.result(number)["changed"] for number in range(4)] == [True, False, True, False]
    assert "vllm_job" not in output
    on.nothing_is_left()


@pytest.mark.parametrize(
    ("task", "environment"),
    [
        ({"no_log": True}, {}),
        ({}, {"ANSIBLE_DISPLAY_OK_HOSTS": "false"}),
        ({}, {"ANSIBLE_STDOUT_CALLBACK": "oneline"}),
    ],
    ids=["no_log", "only what fails", "a line for each result"],
)
def test_who_wants_no_lines_gets_none(player, monkeypatch, task, environment):
    on = player()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with busy(on):
        running = on.begin({**DRAIN, **task}, vllm_progress=1)
        wait_for(lambda: "draining" in json.dumps(on.doing()), "the drain is in the background", PATIENCE)
    output = end(running)
    assert "draining" not in output
    assert "gpu1 chat: " not in output
    assert on.result()["changed"]
    on.nothing_is_left()


def test_a_word_of_no_sense_is_refused(player):
    on = player(start=False)
    output = on.play(DRAIN, rc=2, vllm_progress="often")
    assert "vllm_progress must be true, false or seconds from 0 to 60, not 'often'" in " ".join(output.split())


def test_check_mode_loops_and_defaults(player):
    on = player(engines=("chat", "code"))
    drain = {"baremetal.vllm.vllm_drain": {"engine": "{{ item }}"}, "loop": ["chat", "code"]}
    defaults = {"module_defaults": {"group/baremetal.vllm.vllm": {"lease": {"owner": "defaults"}}}}
    slow(on, {**drain, "check_mode": True}, {**drain, **defaults}, vllm_progress=1)
    assert [one["changed"] for one in on.result()["results"]] == [True, True]
    found = on.result(1)["results"]
    assert [list(one["engines"]) for one in found] == [["chat"], ["code"]]
    assert [one["after"]["state"] for one in found] == ["drained", "drained"]
    assert [one["after"]["lease"] for one in found] == ["defaults", "defaults"]
    assert not any("vllm_job" in one or "ansible_job_id" in one for one in found)
    on.nothing_is_left()


def test_of_several_engines_those_are_shown_that_work(player):
    on = player(engines=("chat", "code"))
    drain = {"baremetal.vllm.vllm_drain": {"engines": ["chat", "code"], "timeout": 600}}
    with busy(on):
        running = on.begin(drain, vllm_progress=1)
        wait_for(lambda: list(on.doing()) == ["chat"], "code is done", PATIENCE)
        output = until(running, "draining")
    output += end(running)
    assert "gpu1 code: draining" not in output
    assert {name: one["after"]["state"] for name, one in on.result()["engines"].items()} == {
        "chat": "drained",
        "code": "drained",
    }
    on.nothing_is_left()


def test_the_users_own_async_is_left_to_ansible(player):
    on = player()
    look = {
        "ansible.builtin.async_status": {"jid": "{{ found_0.ansible_job_id }}"},
        "until": "found_1 is finished",
        "retries": 300,
        "delay": 1,
    }
    with busy(on):
        running = on.begin(
            {**DRAIN, "async": 600, "poll": 0}, look, {**SERVE, "async": 600, "poll": 1}, vllm_progress=1
        )
        wait_for(on.withdrawn, "the drain has begun", PATIENCE)
    output = end(running)
    assert told(output) == []
    assert on.result(1)["after"]["state"] == "drained"
    assert on.result(2)["after"]["state"] == "serving"
    assert on.result(2)["ansible_job_id"]
    assert not on.jobs.exists()


def test_of_a_killed_play_the_host_ends_what_was_begun_and_the_next_play_waits_for_it(player):
    on = player()
    with busy(on):
        first = on.begin(DRAIN, vllm_progress=1)
        until(first, "draining")
        (process,) = on.running()
        on.kill_plays()
        first.communicate(timeout=60)
        assert on.host.chat.lease()["owner"] == "ansible"
        second = on.begin(SERVE, DRAIN, vllm_progress=1)
        output = until(second, "waits for")
    output += end(second)
    assert f"gpu1 chat: waits for process {process} (since " in output, output
    assert ", which works on 'chat', " in output
    assert on.result()["before"]["state"] == "drained", "the first one has come to its end"
    assert on.result()["after"]["state"] == "serving"
    assert on.result(1)["after"]["state"] == "drained"
    # Nobody has come for the first one's result.
    (left,) = on.jobs.iterdir()
    assert left.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in left.iterdir() if path.name != "progress.json"} == {0o600}
    assert on.running() == {process}
    os.kill(process, signal.SIGKILL)


def test_an_engine_that_is_being_changed_is_refused_by_name_of_the_process(player):
    on = player()
    with busy(on):
        first = on.begin(DRAIN, vllm_progress=1)
        until(first, "draining")
        (process,) = on.running()
        hasty = {"baremetal.vllm.vllm_drain": {"engine": "chat", "state": "serving", "timeout": 1}}
        output = on.play(hasty, rc=2, vllm_progress=False)
        assert f"is being changed by process {process} (since" in " ".join(output.split()), output
    end(first)


def test_a_connection_that_is_lost_in_between_loses_nothing(player):
    on = player()
    away = on.folder / "away"
    (on.folder / "connection_plugins").mkdir()
    (on.folder / "connection_plugins/flaky.py").write_text(FLAKY.format(away=str(away)))
    on.hosts["gpu1"]["ansible_connection"] = "flaky"
    with busy(on):
        running = on.begin(DRAIN, vllm_progress=1)
        output = until(running, "draining")
        away.touch()
        output += until(running, "no connection")
    wait_for(lambda: on.host.chat.seen()["paused"], "it goes on to its end")
    away.unlink()
    output += end(running)
    assert "gpu1: no connection, tries again: Connection timed out" in output
    assert on.result()["after"]["state"] == "drained"
    assert on.result()["changed"]
    on.nothing_is_left()


def test_a_process_that_was_killed_is_told_and_the_next_run_goes_on(player):
    on = player()
    with busy(on):
        running = on.begin(DRAIN, vllm_progress=1)
        until(running, "draining")
        (process,) = on.running()
        os.kill(process, signal.SIGKILL)
        output = " ".join(end(running, rc=2).split())
        assert "the process that worked on this task was killed and has left no result; the last that it did" in output
        assert "Next: read journalctl -k for a lack of memory" in output
    on.play(DRAIN, vllm_progress=1)
    assert on.result()["before"]["lease"] == "ansible"
    assert on.result()["after"]["state"] == "drained"


def test_a_start_is_shown_by_its_phases(player):
    on = player(gpus=1)
    on.host.chat.set_fault("start_refuse", 30)
    running = on.begin({"baremetal.vllm.vllm_engine": {"engine": "chat", "state": "restarted"}}, vllm_progress=2)
    output = until(running, "starting, ")
    on.host.chat.clear_faults()
    output += end(running)
    assert [line for line in told(output) if line.startswith("gpu1 chat: starting, has its weights, profiles")], output
    assert on.result()["after"]["state"] == "serving"
    on.nothing_is_left()


@pytest.mark.parametrize(
    ("fault", "task", "says"),
    [
        ("sleep_slow", {"baremetal.vllm.vllm_sleep": {"engine": "chat"}}, "put it to sleep"),
        ("wake_slow", {"baremetal.vllm.vllm_wake": {"engine": "chat"}}, "wake it"),
    ],
)
def test_a_step_that_is_one_call_to_the_engine_is_shown_with_its_time(player, fault, task, says):
    on = player(gpus=1)
    if fault == "wake_slow":
        on.play({"baremetal.vllm.vllm_sleep": {"engine": "chat"}})
    on.host.chat.set_fault(fault, 25)
    output = end(on.begin(task, vllm_progress=4))
    assert f"gpu1 chat: {says}" in told(output), output
    assert on.result()["changed"]
    on.nothing_is_left()


def test_hashing_is_shown(player):
    on = player(start=False)
    model = on.host.root / "srv/models/tiny"
    (model / "huge.bin").touch()
    os.truncate(model / "huge.bin", 2**40)  # hours
    weigh = {"baremetal.vllm.vllm_weights": {"path": str(model), "timeout": 15}, "ignore_errors": True}
    output = on.play(weigh, vllm_progress=2)
    assert [line for line in told(output) if line.startswith(f"gpu1 {model}: ") and " of 1024.00 GiB and " in line], (
        output
    )
    assert "the time-out of 15 s is over" in on.result()["msg"]
    on.nothing_is_left()


def test_a_preload_daemon_that_loads_is_shown(player):
    on = player(gpus=1, start=False)
    on.host.daemon(fault=["daemon_never_ready"])
    load = {"baremetal.vllm.vllm_preload": {"daemon": "base", "timeout": 15}, "ignore_errors": True}
    output = on.play(load, vllm_progress=2)
    assert "gpu1 base: start the daemon and wait until it is proved ready" in told(output), output
    assert "after 15 s" in on.result()["msg"]
    on.nothing_is_left()


def test_awx_has_the_lines_in_its_events(player):
    on = player()
    book = on.book(DRAIN)
    project = on.folder / "runner"
    for name in ("inventory", "env", "project"):
        (project / name).mkdir(parents=True)
    groups = {"vllm_engines": {"hosts": on.hosts}}
    given = {"ansible_connection": "local", "ansible_become": False, "vllm_progress": 1}
    (project / "inventory/hosts.json").write_text(json.dumps({"all": {"children": groups, "vars": given}}))
    # As from a checkout: the collection is found beside the interpreter's packages.
    (project / "project/ansible.cfg").write_text((CHECKOUT / "ansible.cfg").read_text())
    (project / "env/envvars").write_text(yaml.safe_dump({"ANSIBLE_HOME": f"{on.folder}/.ansible"}))
    commands = Path(sys.executable).parent
    artifacts = project / "artifacts/one"

    def events() -> list[dict]:
        found = []
        for path in artifacts.glob("job_events/*.json"):
            with contextlib.suppress(ValueError):  # being written
                found.append(json.loads(path.read_text()))
        return found

    def drained_so_far() -> list[dict]:
        return [one for one in events() if "gpu1 chat: draining, 1 running" in one.get("stdout", "")]

    with busy(on):
        running = subprocess.Popen(
            [commands / "ansible-runner", "run", project, "--playbook", book, "--ident", "one", "--quiet"],
            env={**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        wait_for(
            lambda: drained_so_far() or running.poll() is not None, "the line is an event while the task runs", 120
        )
    end(running)
    lines = drained_so_far()
    assert {one["event"] for one in lines} == {"verbose"}, events()
    assert all(one["stdout"].startswith("gpu1 chat: ") and one["stdout"].count("\n") == 0 for one in lines)
    assert "gpu1 chat: draining, 1 running" in (artifacts / "stdout").read_text()
