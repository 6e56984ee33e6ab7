# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What `vllm-lifecycle metrics` tells of engines that start, sleep, hang and compute the wrong thing."""

from __future__ import annotations

import os
import re
import stat
import time

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import cli, exposition, lease, observe
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.lease import LeaseRequest
from ansible_collections.baremetal.vllm.plugins.modules import vllm_golden, vllm_sleep, vllm_wake
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import AWAKE_MIB, RESIDUE_MIB, wait_for

MIB = 1048576
DRIVER_MIB = 43


class Told:
    """The metrics of a host by their names and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = dict(re.findall(r"(?m)^vllm_lifecycle_(\S+) (\S+)$", text))

    def __getitem__(self, sample: str) -> float:
        return float(self.samples[sample])

    def __contains__(self, sample: str) -> bool:
        """Whether any sample begins like that."""
        return any(one.startswith(sample) for one in self.samples)

    def state(self, engine: str = "chat") -> str:
        states = re.findall(rf'(?m)^vllm_lifecycle_state{{engine="{engine}",state="(\w+)"}} 1$', self.text)
        assert len(states) == 1, states
        return states[0]


def golden(host, state: str) -> dict:
    return host.run_module(vllm_golden.main, engine=host.chat.name, state=state, timeout=120)


@pytest.fixture
def metrics(capfd):
    def run(*words: str, complains: str = "") -> Told:
        assert cli.main(["metrics", *words]) == 0
        said = capfd.readouterr()
        assert re.search(complains, said.err) if complains else not said.err, said.err
        return Told(said.out)

    return run


def test_a_day_of_an_engine(world, metrics):
    host = world(gate=True, gpus=1, doors=True)
    uuid = host.gpu.uuids[0]
    files = host.files()
    told = metrics()
    assert host.files() == files, "it only looks"
    assert told.state() == "serving"
    assert told['admitted{engine="chat"}'] == 1
    assert told['lease_held{engine="chat"}'] == 0
    assert told['ready_duration_seconds{engine="chat",path="cold"}'] > 0
    assert abs(told['ready_timestamp_seconds{engine="chat",path="cold"}'] - time.time()) < 60
    assert told[f'gpu_memory_bytes{{engine="chat",gpu="{uuid}"}}'] == (AWAKE_MIB - DRIVER_MIB) * MIB
    assert 'golden_match{engine="chat"' not in told, "never compared"
    assert 'signal_unseen{engine="chat"' not in told

    host.done(vllm_sleep, level=1)
    told = metrics()
    assert told.state() == "asleep"
    assert told['admitted{engine="chat"}'] == 0
    assert told['sleep_level{engine="chat"}'] == 1
    for family in ("sleep_resident_bytes", "gpu_memory_bytes"):
        assert told[f'{family}{{engine="chat",gpu="{uuid}"}}'] == (RESIDUE_MIB - DRIVER_MIB) * MIB
    assert 'lease_info{engine="chat",owner="tests",purpose="asleep",run=""}' in told
    assert told['lease_expiry_timestamp_seconds{engine="chat"}'] > time.time()
    assert told['last_transition_duration_seconds{engine="chat",wanted="asleep"}'] > 0

    host.done(vllm_wake)
    told = metrics()
    assert told.state() == "serving"
    assert told['ready_duration_seconds{engine="chat",path="wake"}'] > 0
    assert 'ready_duration_seconds{engine="chat",path="cold"}' in told, "what its process began with"
    assert 'sleep_level{engine="chat"' not in told

    # A start that finds what an earlier one has compiled.
    assert host.systemd.ctl("restart", host.chat.unit).returncode == 0
    told = metrics()
    assert 'ready_duration_seconds{engine="chat",path="warm"}' in told
    assert 'path="cold"' not in told.text


def test_wrong_answers_are_told_until_another_process_runs(world, metrics):
    host = world(gpus=1)
    assert golden(host, "recorded")["changed"]
    assert metrics()['golden_match{engine="chat"}'] == 1
    record = host.root / "var/lib/vllm/chat/comparison.json"
    record.write_text("{")
    told = metrics()
    assert 'golden_match{engine="chat"' not in told
    assert told['signal_unseen{engine="chat",signal="golden"}'] == 1
    assert not golden(host, "matching").get("failed"), "a broken record keeps nobody from being proved"
    assert metrics()['golden_match{engine="chat"}'] == 1
    host.chat.set_fault("garbage")
    assert golden(host, "matching")["failed"]
    assert metrics()['golden_match{engine="chat"}'] == 0
    host.systemd.ctl("stop", host.chat.unit)
    told = metrics()
    assert (told.state(), told['golden_match{engine="chat"}']) == ("stopped", 0)
    host.chat.set_fault("garbage", None)
    assert host.systemd.ctl("start", host.chat.unit).returncode == 0
    assert 'golden_match{engine="chat"' not in metrics(), "this one was not compared yet"
    assert not golden(host, "matching").get("failed")
    assert metrics()['golden_match{engine="chat"}'] == 1


def test_engines_that_hang_are_unknown_and_cost_their_own_time_only(world, metrics, monkeypatch):
    host = world(engines=("chat", "code", "tool"))
    monkeypatch.setattr(observe, "PROBE_TIMEOUT", 2.0)
    for name in ("chat", "code"):
        host.engines[name].set_fault("hung")
    begun = time.monotonic()
    told = metrics()
    took = time.monotonic() - begun
    assert [told.state(name) for name in host.engines] == ["unknown", "unknown", "serving"]
    assert told['signal_unseen{engine="chat",signal="api.sleeping"}'] == 1
    assert [told[f'collection_success{{engine="{name}"}}'] for name in host.engines] == [1, 1, 1]
    assert 2.0 < took < 4.0, "side by side: one time-out for both"


def test_what_cannot_be_looked_at_is_unknown_and_hides_no_other(world, metrics, monkeypatch):
    host = world(engines=("chat", "code"))
    host.chat.declared.write_text("{}")
    told = metrics(complains="engine 'chat': .*chat.json: .*missing.*baremetal\\.vllm\\.site")
    assert (told.state("chat"), told.state("code")) == ("unknown", "serving")
    assert (told['collection_success{engine="chat"}'], told['collection_success{engine="code"}']) == (0, 1)
    assert 'lease_held{engine="chat"' not in told

    # One whose look never ends, as at a file system that is gone.
    looks = exposition.observe

    def stuck(config):
        if config.engine == "code":
            time.sleep(30)
        return looks(config)

    monkeypatch.setattr(exposition, "observe", stuck)
    told = metrics("--timeout", "0.5", complains="engine 'code': no observation came of it within 0.5 s")
    assert told.state("code") == "unknown"
    assert told['collection_success{engine="code"}'] == 0


def test_the_file_is_whole_or_not_there_and_for_everybody_to_read(world, metrics):
    host = world()
    folder = host.root / "textfile"
    folder.mkdir()
    file = folder / "vllm_lifecycle.prom"
    lease.take("chat", LeaseRequest('o"1\n', run="back\\slash"), "drained", "open")
    old_umask = os.umask(0o077)
    try:
        printed = metrics("--textfile", str(file))
        first = file.stat()
        metrics("--textfile", str(file))
    finally:
        os.umask(old_umask)
    assert printed.text == ""
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert file.stat().st_ino != first.st_ino, "renamed over, not written into"
    assert [path.name for path in folder.iterdir()] == [file.name]
    told = Told(file.read_text())
    assert told['lease_info{engine="chat",owner="o\\"1\\n",purpose="drained",run="back\\\\slash"}'] == 1


def test_what_it_cannot_do_it_says(world, capfd):
    host = world(start=False)
    assert cli.main(["metrics", "--timeout", "0"]) == 2
    assert "--timeout must be above 0" in capfd.readouterr().err
    (host.root / "occupied").write_text("")
    assert cli.main(["metrics", "--textfile", str(host.root / "occupied/x.prom")]) == 1
    assert "x.prom cannot be written" in capfd.readouterr().err


def test_a_failed_start_by_a_golden_is_told(world, metrics):
    host = world(gpus=1, doors=True)
    assert golden(host, "recorded")["changed"]
    host.chat.set_fault("wrong_tokens")
    host.systemd.ctl("restart", host.chat.unit)
    told = wait_for(lambda: (now := metrics()).state() == "failed" and now, "a unit that gives up")
    assert told['golden_match{engine="chat"}'] == 0
