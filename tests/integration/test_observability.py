# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The metrics of an engine behind its gate, written by a real timer in its sandbox, on a real systemd host.

The tests follow one another on one host. Needs root and the packages of tests/lab/apt.txt; makes the lab's layer where
the cache has none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time

import pytest
import yaml

from ansible_collections.baremetal.vllm.tests.integration.test_preload import CHECKOUT, GPU, SIM, Host, booted

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root")

FOLDER = "/var/lib/prometheus/node-exporter"
FILE = f"{FOLDER}/vllm_lifecycle.prom"
ENGINE = "vllm-engine@chat.service"
SERVICE, TIMER = "vllm-metrics.service", "vllm-metrics.timer"
INTERVAL = 6
HOST = """
- hosts: vllm_engines
  gather_facts: true
  become: true
  roles: [baremetal.vllm.vllm_host, baremetal.vllm.vllm_gate, baremetal.vllm.vllm_engine]
"""
WATCH = """
- hosts: vllm_engines
  gather_facts: false
  become: true
  roles: [baremetal.vllm.vllm_observability]
"""


class Watched(Host):
    def watch(self, *arguments: str, rc: int = 0, **variables):
        fast = {"vllm_observability_interval": INTERVAL, "vllm_observability_timeout": 5}
        return self.play(*arguments, rc=rc, book="watch.yml", **{**fast, **variables})

    def metrics(self) -> dict[str, float]:
        text = self.ssh(f"runuser -u nobody -- cat {FILE}")
        return {name: float(value) for name, value in re.findall(r"(?m)^vllm_lifecycle_(\S+) (\S+)$", text)}

    def state(self) -> str:
        return next(one for one, value in self.metrics().items() if one.startswith("state{") and value == 1)

    def await_state(self, state: str) -> None:
        wanted = f'state{{engine="chat",state="{state}"}}'
        self.wait(f"{wanted} from the timer", lambda: self.state() == wanted, 4 * INTERVAL)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    one = Watched(tmp_path_factory.mktemp("watch"), "observe", "10.78.0.0/24")
    with booted(one):
        (one.top / "host.yml").write_text(HOST)
        (one.top / "watch.yml").write_text(WATCH)
        yield one


def test_without_the_host_it_says_what_comes_first_and_in_check_mode_what_it_would_do(host):
    host.ssh("mv /opt/vllm/control/bin/vllm-lifecycle /root/")  # the lab's layer has it already
    played = host.watch(rc=2)
    host.ssh("mv /root/vllm-lifecycle /opt/vllm/control/bin/")
    assert "vllm-lifecycle is missing or older than this role" in played.text
    assert "run the role baremetal.vllm.vllm_host" in played.text
    assert host.watch("--check").changed == 2, "the directory and the units"
    assert host.ssh(f"ls {FOLDER} /etc/systemd/system/{TIMER} 2>/dev/null", check=False) == ""


def test_the_timer_writes_what_the_engine_does(host):
    chat = {"name": "chat", "model": "/opt/models/m", "served_model_name": "m", "gpus": [GPU], "env": SIM, "port": 8001}
    # A driver's NVML needs no word of where its GPUs are; the simulated one does.
    host.ssh(
        f"mkdir -p /etc/systemd/system/{SERVICE}.d; printf '[Service]\\nEnvironment=SIM_LEDGER={SIM['SIM_LEDGER']}\\n'"
        f" > /etc/systemd/system/{SERVICE}.d/90-local.conf"
    )
    host.play(book="host.yml", vllm_preload_instances=[], vllm_engine_instances=[chat])
    assert host.watch().changed > 0
    assert host.ssh(f"stat -c '%U %a' {FILE}") == "root 644"
    found = host.metrics()
    assert found['collection_success{engine="chat"}'] == 1
    assert found['ready_duration_seconds{engine="chat",path="cold"}'] > 0
    assert found[f'gpu_memory_bytes{{engine="chat",gpu="{GPU}"}}'] > 2000 * 1048576
    assert found['sessions{engine="chat"}'] == 0, "the gate has answered"
    assert not [name for name in found if name.startswith("signal_unseen")]

    first = found["collection_timestamp_seconds"]
    host.wait("a second look of the timer's own", lambda: host.metrics()["collection_timestamp_seconds"] > first)
    second = host.metrics()["collection_timestamp_seconds"]
    assert INTERVAL <= second - first < 2 * INTERVAL
    assert host.ssh(f"ls -A {FOLDER}") == "vllm_lifecycle.prom"
    host.ssh("vllm-lifecycle set chat serving --owner test")
    host.await_state("serving")


def test_prometheus_own_judge_takes_the_file(host):
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: run make deps (Debian's package prometheus)"
    done = subprocess.run(
        [promtool, "check", "metrics"],
        input=host.ssh(f"cat {FILE}") + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_a_second_run_changes_nothing(host):
    before = host.entered(TIMER, "Active")
    assert host.watch().changed == 0
    assert host.watch("--check").changed == 0
    assert host.entered(TIMER, "Active") == before


def test_systemd_has_nothing_to_say_about_the_units(host):
    assert host.ssh(f"systemd-analyze verify {SERVICE} {TIMER} 2>&1") == ""
    rating = host.ssh(f"systemd-analyze security --no-pager {SERVICE} | tail -1")
    assert float(re.search(r"(\d+[.]\d+)", rating)[1]) <= 2.9
    assert host.ssh(f"journalctl --no-pager --output cat --unit {SERVICE} _PID=1") == "", "a line for each look"


def test_an_engine_that_hangs_is_unknown_and_the_timer_goes_on(host):
    pid = host.pid(ENGINE)
    host.ssh(f"kill -STOP {pid}")
    try:
        host.await_state("unknown")
        found = host.metrics()
        assert found['collection_success{engine="chat"}'] == 1
        assert found['signal_unseen{engine="chat",signal="api.healthy"}'] == 1
        first = found["collection_timestamp_seconds"]
        host.wait("another look", lambda: host.metrics()["collection_timestamp_seconds"] > first, 4 * INTERVAL)
    finally:
        host.ssh(f"kill -CONT {pid}")
    host.await_state("serving")
    assert host.pid(ENGINE) == pid, "looked at, and not touched"


def test_an_engine_that_is_stopped_is_told_as_that(host):
    host.ssh(f"systemctl stop {ENGINE}")
    host.await_state("stopped")
    assert not [name for name in host.metrics() if name.startswith(("gpu_memory_bytes", "golden_match"))]


def test_a_new_interval_takes_effect(host):
    assert host.watch(vllm_observability_interval=600).changed == 1
    assert "OnUnitInactiveUSec=10min" in host.show(TIMER, "TimersMonotonic")
    before = host.metrics()["collection_timestamp_seconds"]
    time.sleep(INTERVAL + 2)
    assert host.metrics()["collection_timestamp_seconds"] == before


def test_the_names_of_vllms_metrics_are_those_of_a_release(host):
    """Of the one in the lab; the dashboard is held to these names in tests/unit/roles."""
    source = host.ssh("cat /opt/vllm/runtimes/0.32.0/lib/python3*/site-packages/vllm/v1/metrics/loggers.py")
    found = set(re.findall(r'_(gauge|counter|histogram)_cls\(\s*name="(vllm:\w+)"', source))
    known = yaml.safe_load((CHECKOUT / "tests/unit/roles/vllm_metrics.yml").read_text())
    assert {(kind, name) for kind, names in known.items() for name in names} <= found


def test_absent_leaves_nothing_behind(host):
    gone = {"vllm_observability_state": "absent"}
    assert host.watch("--check", **gone).changed == 2
    assert host.watch(**gone).changed == 2, "the timer, and the files"
    assert host.ssh(f"ls -A {FOLDER}; ls /etc/systemd/system | grep 'vllm-metrics.*[re]$'; true") == ""
    assert host.show(TIMER, "LoadState") == "not-found"
    assert host.watch(**gone).changed == 0
    assert host.watch("--check", **gone).changed == 0
