# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One replica of real vLLM on two hosts (data parallel): what it is, and a roll of it under load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading

import httpx

from ansible_collections.baremetal.vllm.tests.rolling.fleet import CHECKOUT

LOAD = CHECKOUT / "tests/load/load.py"
HOSTS = ("e1", "e2", "e3")


def plain(output: str) -> str:
    """What Ansible printed, without the line breaks and doubled quotes of YAML."""
    return re.sub(r"\s+", " ", output).replace("''", "'")


def pids(fleet) -> dict[str, int]:
    return {host: fleet.main_pid(host) for host in HOSTS}


def moment(fleet, host: str, what: str) -> int:
    """Microseconds on the clock that all hosts of a lab share."""
    return int(fleet.ssh(host, f"systemctl show --value --property {what}TimestampMonotonic vllm-engine@chat.service"))


def generated(fleet) -> dict[str, float]:
    """Tokens that each rank has made, by the head's own metrics."""
    text = fleet.ssh("e1", "curl -s --max-time 10 --unix-socket /run/vllm/chat/engine.sock http://engine/metrics")
    return {
        rank: float(value)
        for rank, value in re.findall(r'vllm:generation_tokens_total\{engine="(\d+)".*?\} (\S+)', text)
    }


def test_the_head_serves_with_the_ranks_of_both_hosts(fleet):
    assert [fleet.active(host) for host in HOSTS] == ["active"] * 3
    assert (fleet.ready("e1"), fleet.ready("e2"), fleet.ready("e3")) == (200, 0, 200), "a headless engine has no gate"
    assert fleet.ssh("e2", "test -e /run/vllm/chat/engine.sock && echo there || true") == ""
    before = generated(fleet)
    assert set(before) == {"0", "1"}
    body = {"model": "tiny", "prompt": "The engine", "max_tokens": 40, "ignore_eos": True}
    for _unused in range(4):
        answer = httpx.post(f"{fleet.gate('e1')}/v1/completions", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
    after = generated(fleet)
    assert all(after[rank] > before[rank] for rank in before), (before, after)
    status = fleet.play("status.yml")
    assert re.search(r"\be2 +chat +headless ", status), status


class Load:
    """Eight clients at the router while the body runs; what they got is judged at its end."""

    def __init__(self, fleet, folder) -> None:
        self.fleet = fleet
        self.stop, self.running, self.out = folder / "stop", folder / "running", folder / "load.json"

    def __enter__(self) -> Load:
        command = [sys.executable, str(LOAD), "--url", self.fleet.router, "--model", "tiny", "--out", str(self.out)]
        command += ["--until-file", str(self.stop), "--running-file", str(self.running)]
        self.clients = subprocess.Popen(command)
        self.fleet.wait("every client has had a token", self.running.exists)
        return self

    def __exit__(self, kind, *_unused: object) -> None:
        self.stop.touch()
        self.clients.wait(180)
        if kind is None:
            seen = json.loads(self.out.read_text())
            print({key: seen[key] for key in ("wall_s", "counts", "latency_s", "first_token_s", "longest_gap_s")})
            assert (seen["counts"]["lost"], seen["counts"]["cut"]) == (0, 0), seen["failures"]
            assert seen["counts"]["ok"] > 100


class Readiness(threading.Thread):
    """What /ready of hosts answered in turn, as a router sees it."""

    def __init__(self, fleet, *hosts: str) -> None:
        super().__init__(daemon=True)
        self.fleet, self.ended = fleet, threading.Event()
        self.seen: dict[str, list[int]] = {host: [] for host in hosts}
        self.start()

    def run(self) -> None:
        while not self.ended.wait(0.2):
            for host, answers in self.seen.items():
                answer = self.fleet.ready(host)
                if not answers or answers[-1] != answer:
                    answers.append(answer)

    def end(self) -> dict[str, list[int]]:
        self.ended.set()
        self.join(30)
        return self.seen


def test_a_group_is_rolled_under_load_as_one_and_nothing_is_lost(fleet, tmp_path):
    before = pids(fleet)
    report = tmp_path / "roll.json"
    with Load(fleet, tmp_path):
        ready = Readiness(fleet, "e1", "e3")
        output = fleet.play("rolling_restart.yml", vllm_report_path=str(report))
        seen = ready.end()
    assert "0 host(s) not serving come first, 2 follow, 0 are done" in plain(output)
    after = pids(fleet)
    assert all(after[host] != before[host] for host in HOSTS)
    assert seen == {"e1": [200, 503, 200], "e3": [200, 503, 200]}, "each is withdrawn once"
    assert [fleet.lease(host) for host in HOSTS] == [None] * 3
    rows = json.loads(report.read_text())["hosts"]
    print(rows)
    assert [(row["name"], row.get("headless")) for row in rows] == [("e1", ["e2/chat"]), ("e3", None)]
    assert all(row["changed"] for row in rows)
    order = [moment(fleet, *one) for one in (("e2", "ExecMainStart"), ("e1", "ExecMainStart"), ("e1", "ActiveEnter"))]
    assert order == sorted(order), "the headless engine starts first, and the head is ready last"
    ended = {host: fleet.ssh(host, "stat -c %Y /var/lib/vllm/chat/last_stop.json").strip() for host in ("e1", "e2")}
    assert int(ended["e1"]) <= int(ended["e2"]), "the head stops while its group is whole"


NEW = {"lab_settings": {"max-num-seqs": 6}}
BROKEN = {"lab_settings": {"max-model-len": 1000000}}


def upgrade(fleet, rc: int = 0, **settings) -> str:
    given = {"vllm_upgrade_soak": 0, "vllm_upgrade_min_speed_ratio": 0, **settings}
    return plain(fleet.play("rolling_upgrade.yml", "--limit=e1,e2", rc=rc, **given))


def test_a_group_gets_other_settings_as_one_and_goes_back_as_one(fleet, tmp_path):
    before = pids(fleet)
    with Load(fleet, tmp_path):
        ready = Readiness(fleet, "e1", "e3")
        output = upgrade(fleet, **NEW)
        changed = pids(fleet)
        assert "2 of 2 host(s) have engines to change; first e1, e2, then none." in output
        assert [host for host in HOSTS if changed[host] != before[host]] == ["e1", "e2"]
        assert fleet.ready("e1") == 200
        output = upgrade(fleet, rc=2, **BROKEN)
        seen = ready.end()
    assert "It went back to what it ran before, was proved with it and serves." in output
    assert seen == {"e1": [200, 503, 200, 503, 200], "e3": [200]}, "withdrawn once for each change"
    assert [fleet.lease(host) for host in HOSTS] == [None] * 3
    for host in ("e1", "e2"):
        options = fleet.ssh(host, "cat /etc/vllm/engines/chat.yaml")
        assert "max-num-seqs: 6" in options and "1000000" not in options
    before = pids(fleet)
    assert before["e3"] == changed["e3"]
    assert "0 of 2 host(s) have engines to change" in upgrade(fleet, **NEW)
    upgrade(fleet)
    assert fleet.ready("e1") == 200
    assert [host for host, pid in pids(fleet).items() if pid == before[host]] == ["e3"]


def test_a_host_that_fails_keeps_its_group_out_and_the_same_command_goes_on(fleet):
    """The model of e2 is gone, as with storage that is not mounted."""
    before = pids(fleet)
    fleet.ssh("e2", "mount -t tmpfs none /srv/models/tiny")
    try:
        output = plain(fleet.play("rolling_restart.yml", "--limit=e1,e2", rc=2))
    finally:
        fleet.ssh("e2", "umount /srv/models/tiny")
    assert "No further host is touched" in output
    assert "/srv/models/tiny" in output, "the reason, from the host that failed"
    assert fleet.active("e1") == "inactive"
    assert (fleet.ready("e1"), fleet.ready("e3")) == (503, 200)
    assert {host: (fleet.lease(host) or {}).get("owner") for host in HOSTS} == {
        "e1": "rolling_restart",
        "e2": "rolling_restart",
        "e3": None,
    }
    output = plain(fleet.play("rolling_restart.yml", "--limit=e1,e2"))
    assert "1 host(s) not serving come first, 0 follow, 0 are done" in output
    assert (fleet.ready("e1"), fleet.ready("e3")) == (200, 200)
    assert [fleet.lease(host) for host in HOSTS] == [None] * 3
    after = pids(fleet)
    assert [host for host in HOSTS if after[host] != before[host]] == ["e1", "e2"]


def test_a_part_of_the_group_alone_is_refused(fleet):
    before = pids(fleet)
    output = " ".join(fleet.play("rolling_restart.yml", "--limit=e1,e3", rc=2).split())
    assert "this run leaves out e2/chat" in output
    assert pids(fleet) == before
