# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two engines of a host take turns: real vLLM, systemd, HAProxy, sshd, and clients that judge every answer.

The tests go on from each other: each says what it begins with. A CPU has no memory that a sleep would free, so what is
shown here is the order of things and what clients see of it.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import httpx
import pytest

from ansible_collections.baremetal.vllm.tests.rolling.fleet import CHECKOUT

LOAD = CHECKOUT / "tests/load/load.py"
MODEL = {"chat": "tiny", "code": "tiny-b"}
ALONE = {"vllm_switch_min_serving": 0, "vllm_schedule_min_serving": 0}


def pool(fleet, engine: str) -> str:
    """The router's port of a model."""
    ports = {"chat": 8000, "code": 8010}
    return f"http://{fleet.address['r1']}:{ports[engine]}"


def switch(fleet, to: str, *arguments: str, **variables) -> str:
    return fleet.play("switch.yml", "--limit=e1", *arguments, vllm_switch_engine=to, **variables)


def asleep(fleet, engine: str) -> bool:
    """By the engine's own words, past gate and product."""
    return fleet.engine_get("e1", "/is_sleeping", engine)["is_sleeping"]


def serves(fleet, engine: str) -> bool:
    return fleet.ready("e1", engine) == 200 and not asleep(fleet, engine) and fleet.lease("e1", engine) is None


def answer(url: str, engine: str) -> httpx.Response:
    body = {"model": MODEL[engine], "prompt": "The engine", "max_tokens": 8, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)


def plain(output: str) -> str:
    """What Ansible printed, without the line breaks and doubled quotes of YAML."""
    return re.sub(r"\s+", " ", output).replace("''", "'")


def changed(output: str) -> set[str]:
    return set(re.findall(r"(?m)^(\S+) +: ok=\d+ +changed=[1-9]", output))


def test_of_two_that_serve_one_is_put_to_sleep(fleet):
    """Begins with all engines serving, as site.yml leaves them."""
    assert serves(fleet, "chat")
    assert serves(fleet, "code")
    switch(fleet, "chat", **ALONE)
    assert serves(fleet, "chat")
    assert asleep(fleet, "code")
    assert fleet.lease("e1", "code")["owner"] == "switch"


def test_who_asks_for_the_model_that_sleeps_is_told_to_come_back(fleet):
    """Code sleeps, here and so everywhere."""
    for url, says in (
        (fleet.gate("e1", "code"), "Engine code is closed for maintenance."),
        (pool(fleet, "code"), "No engine is ready."),
    ):
        begun = time.monotonic()
        refused = answer(url, "code")
        assert refused.status_code == 503, refused.text
        assert refused.json()["error"]["message"] == says
        assert int(refused.headers["Retry-After"]) > 0
        assert time.monotonic() - begun < 10, "at once, not after vLLM has let it hang"


def test_a_second_run_changes_nothing(fleet):
    pids = {engine: fleet.main_pid("e1", engine) for engine in MODEL}
    output = switch(fleet, "chat", **ALONE)
    assert changed(output) == set(), output[-2000:]
    assert "1 are done" in output
    assert {engine: fleet.main_pid("e1", engine) for engine in MODEL} == pids


def test_a_switch_under_load_loses_nothing_of_the_model_that_stays(fleet, tmp_path):
    """From chat to code on e1, while clients stream from chat, which e2 has as well."""
    stop, running, report = tmp_path / "stop", tmp_path / "running", tmp_path / "load.json"
    rows = tmp_path / "switch.json"
    command = [sys.executable, str(LOAD), "--url", pool(fleet, "chat"), "--model", "tiny", "--streams", "4"]
    command += ["--mix", "short=8-40:3,long=150-300:1", "--out", str(report)]
    load = subprocess.Popen([*command, "--until-file", str(stop), "--running-file", str(running)])
    try:
        fleet.wait("every client has had a token", running.exists, 60)
        time.sleep(2)
        switch(fleet, "code", vllm_report_path=str(rows))
        time.sleep(2)
    finally:
        stop.touch()
        load.wait(120)
    seen = json.loads(report.read_text())
    assert (seen["counts"]["lost"], seen["counts"]["cut"]) == (0, 0), seen["failures"]
    assert seen["counts"]["ok"] > 20
    assert serves(fleet, "code")
    assert asleep(fleet, "chat")
    assert answer(pool(fleet, "code"), "code").status_code == 200
    switched = json.loads(rows.read_text())
    assert switched["schema"] == "baremetal.vllm/switch"
    (row,) = switched["hosts"]
    print(row)
    assert (row["name"], row["slept"], row["woken"], row["changed"]) == ("e1", ["chat"], ["code"], True)
    assert abs(sum(row[key] for key in row if key.endswith("_s")) - row["seconds"]) < 0.01
    assert min(row[key] for key in ("drain_s", "sleep_s", "wake_s", "prove_s")) > 0


def test_the_router_sends_nothing_to_the_one_that_sleeps(fleet):
    """Chat sleeps on e1 and serves on e2."""
    refused = answer(fleet.gate("e1", "chat"), "chat")
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, "Engine chat is closed for maintenance.")
    assert int(refused.headers["Retry-After"]) > 0
    assert [answer(pool(fleet, "chat"), "chat").status_code for _unused in range(4)] == [200] * 4


def test_the_site_playbook_leaves_a_sleeper_asleep(fleet):
    output = fleet.play("site.yml", "--limit=e1")
    assert changed(output) == set(), output[-2000:]
    assert serves(fleet, "code")
    assert asleep(fleet, "chat")
    assert fleet.ready("e1", "chat") == 503


CALENDAR = {
    "vllm_schedule": [
        {
            "name": "day",
            "from": "08:00",
            "to": "20:00",
            "timezone": "Europe/Berlin",
            "awake": ["chat"],
            "asleep": ["code"],
        },
        {
            "name": "night",
            "from": "20:00",
            "to": "08:00",
            "timezone": "Europe/Berlin",
            "awake": ["code"],
            "asleep": ["chat"],
        },
    ],
}


def follow(fleet, now: str, **variables) -> str:
    given = {**CALENDAR, "vllm_schedule_now": f"2026-06-10T{now}+02:00", **variables}
    return fleet.play("schedule.yml", "--limit=e1", **given)


def test_a_calendar_is_followed_twice_without_effect(fleet):
    """Begins with code, which is the night's."""
    output = follow(fleet, "21:00:00")
    assert changed(output) == set(), output[-2000:]
    assert "e1: night at 2026-06-10T19:00:00Z, until 2026-06-11T06:00:00Z; nothing to do" in plain(output)
    # chat was put to sleep by hand, and nobody has given it to the calendar
    output = follow(fleet, "08:00:00")
    assert changed(output) == set()
    assert "nothing to do; left alone: 'chat' is held by switch (code has its GPU)" in plain(output)
    output = follow(fleet, "08:00:00", vllm_schedule_force=True)
    assert changed(output) == {"e1"}
    assert serves(fleet, "chat")
    assert asleep(fleet, "code")
    assert fleet.lease("e1", "code")["reason"] == "window day"
    assert changed(follow(fleet, "19:59:59")) == set()
    assert changed(follow(fleet, "20:00:00")) == {"e1"}
    assert serves(fleet, "code")
    assert changed(follow(fleet, "20:05:00")) == set()


def test_a_calendar_that_contradicts_itself_is_refused(fleet):
    wrong = [{**CALENDAR["vllm_schedule"][0], "to": "21:00"}, CALENDAR["vllm_schedule"][1]]
    given = {"vllm_schedule": wrong, "vllm_schedule_now": "2026-06-10T21:00:00+02:00"}
    output = fleet.play("schedule.yml", "--limit=e1", rc=2, **given)
    assert "windows 'day' and 'night' are both open at" in plain(output)
    assert serves(fleet, "code")


def test_too_few_others_refuse_the_switch(fleet):
    """Code serves here and nowhere else."""
    output = fleet.play("switch.yml", "--limit=e1", rc=2, vllm_switch_engine="chat", vllm_switch_force=True)
    assert "min_serving is 1, yet 0 engine(s) are left to serve" in plain(output)
    assert serves(fleet, "code")


def test_a_wake_that_fails_returns_to_the_engine_that_served(fleet):
    """Code sleeps at level 2; when it is to wake, its weights cannot be read."""
    switch(fleet, "chat", vllm_switch_level=2, vllm_switch_force=True, **ALONE)
    fleet.ssh("e1", "mount -t tmpfs none /srv/models/tiny-b")
    try:
        output = fleet.play("switch.yml", "--limit=e1", rc=2, vllm_switch_engine="code")
    finally:
        fleet.ssh("e1", "umount /srv/models/tiny-b")
    assert "code was stopped. chat serves again." in plain(output)
    assert serves(fleet, "chat")
    assert fleet.active("e1", "code") == "inactive"
    assert fleet.ready("e1", "code") == 503


def test_a_killed_run_is_gone_on_with(fleet):
    """Chat serves and code is stopped: it is started in the place of chat, by a run that ends in the middle."""
    run = fleet.begin("switch.yml", "--limit=e1", vllm_switch_engine="code")
    fleet.wait("chat is out", lambda: fleet.ready("e1") == 503, 60)
    run.send_signal(signal.SIGKILL)
    run.stdout.close()
    run.wait()
    fleet.wait("chat has a lease", lambda: fleet.lease("e1") is not None, 30)
    switch(fleet, "code")
    assert serves(fleet, "code")
    assert asleep(fleet, "chat")


def test_sleep_and_wake_by_hand(fleet):
    """Code serves, chat sleeps by the switch; e2 is not asked."""
    given = {"vllm_sleep_engines": ["code"], "vllm_sleep_reason": "a long evening", **ALONE}
    fleet.play("sleep.yml", "--limit=e1", vllm_sleep_min_serving=0, **given)
    assert asleep(fleet, "code")
    assert fleet.lease("e1", "code")["reason"] == "a long evening"
    assert changed(fleet.play("sleep.yml", "--limit=e1", vllm_sleep_min_serving=0, **given)) == set()
    fleet.play("wake.yml", "--limit=e1", vllm_wake_engines=["code"])
    assert serves(fleet, "code")
    output = fleet.play("wake.yml", "--limit=e1", rc=2, vllm_wake_engines=["chat"], vllm_wake_owner="switch")
    assert "'chat' shares its GPU with code (serving)" in plain(output)


def test_a_wrong_model_behind_the_same_name_is_caught_before_admission(fleet, tmp_path):
    """On e2, whose chat needs its golden: another checkpoint of equal shapes comes in the place of its own."""
    fleet.play("golden.yml", "--limit=e2", vllm_golden_dir=str(tmp_path))
    fleet.play("site.yml", "--limit=e2", vllm_engine_golden_required=True)
    asked = {"engine": "chat", "timeout": 300}
    assert fleet.module("e2", "vllm_sleep", level=2, **asked)["after"]["state"] == "asleep"
    fleet.ssh("e2", "mount --bind /srv/models/tiny-b /srv/models/tiny")
    try:
        woken = fleet.module("e2", "vllm_wake", **asked)
        assert woken["failed"]
        assert "does not compute what golden" in woken["msg"]
        assert fleet.engine_get("e2", "/v1/models")["data"][0]["id"] == "tiny", "by its name it is the right one"
        assert fleet.ready("e2") == 503
        started = fleet.module("e2", "vllm_engine", state="restarted", **asked)
        assert started["failed"]
        assert "has to be proved by a golden (golden_required)" in json.dumps(started)
        assert fleet.ready("e2") == 503
    finally:
        fleet.ssh("e2", "umount /srv/models/tiny")
    mended = fleet.module("e2", "vllm_engine", state="restarted", **asked)
    assert mended["proof"]["by"] == "golden", mended
    if fleet.ready("e2") != 200:
        fleet.module("e2", "vllm_drain", state="serving", **asked)
    assert fleet.ready("e2") == 200
    assert answer(fleet.gate("e2"), "chat").status_code == 200


@pytest.mark.parametrize("check", [True, False])
def test_the_oldest_supported_ansible_does_the_same(fleet, monkeypatch, check):
    monkeypatch.setattr(fleet, "bin", CHECKOUT / ".venv-2.16/bin")
    output = switch(fleet, "chat", *(["--check"] if check else []), **ALONE)
    assert changed(output) == {"e1"}
    assert serves(fleet, "code" if check else "chat")
    assert asleep(fleet, "chat" if check else "code")
    if not check:
        assert changed(follow(fleet, "12:00:00", vllm_schedule_force=True)) == set()
