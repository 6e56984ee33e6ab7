# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a start or a wake is measured by: GPU memory while it runs, a first token after it, the page cache before it."""

from __future__ import annotations

import mmap
import threading
import time

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import gpu, page_cache
from ansible_collections.baremetal.vllm.plugins.modules import (
    vllm_drain,
    vllm_engine,
    vllm_page_cache,
    vllm_sleep,
    vllm_wake,
)
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.play import Killed, Play
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import AWAKE_MIB, RESIDUE_MIB, wait_for

OWN_MIB = AWAKE_MIB - 43  # of its process; the driver has the rest
SPIKE_MIB = 9000


def spike(host, uuid: str) -> threading.Thread:
    """More memory for a second, of the process that comes next on this GPU, as when kernels are compiled."""
    before = set(host.gpu.processes())

    def hold() -> None:
        pid = wait_for(lambda: next(iter(set(host.gpu.processes()) - before), None), "the engine has memory")
        host.gpu.ledger.resize(uuid, pid, SPIKE_MIB, "spike")
        time.sleep(1)
        host.gpu.ledger.release("spike")

    thread = threading.Thread(target=hold)
    thread.start()
    return thread


def test_the_peak_of_a_start_is_what_was_held_in_between(world):
    host = world(gate=True, gpus=2, spread=True, engines=("chat", "code"))
    first, _other = host.gpu.uuids
    host.chat.set_fault("start_refuse", 2)
    held = spike(host, first)
    result = host.done(vllm_engine, state="restarted", measure=True)
    held.join()
    assert host.gpu.used() == AWAKE_MIB
    assert result["measured"]["gpu_peak_mib"] == {first: OWN_MIB + SPIKE_MIB}
    assert 0 < result["measured"]["first_token_s"] < 20
    assert result["measured"]["prompt_tokens"] == 4

    slept = host.done(vllm_sleep, level=1)
    assert "measured" not in slept
    woken = host.done(vllm_wake, measure=True)
    assert woken["measured"]["gpu_peak_mib"] == {first: OWN_MIB}
    host.done(vllm_sleep, level=2)
    host.gpu.ledger.resize(first, next(iter(host.gpu.processes())), SPIKE_MIB, "spike")  # in all stages of the wake
    woken = host.done(vllm_wake, measure=True)
    host.gpu.ledger.release("spike")
    assert woken["measured"]["gpu_peak_mib"] == {first: OWN_MIB + SPIKE_MIB}
    again = host.done(vllm_engine, state="restarted")
    assert "measured" not in again, "nobody asked for it"


@pytest.mark.parametrize("fault", ["not_loaded", "gpu_lost", ""])
def test_memory_that_was_not_seen_is_no_number(world, fault):
    host = world(gpus=1 if fault else 0)
    if fault:
        host.gpu.ledger.fault(fault)
    measured = host.done(vllm_engine, state="restarted", measure=True)["measured"]
    assert "gpu_peak_mib" not in measured
    assert measured["first_token_s"] > 0


def test_a_gpu_that_is_lost_in_between_has_no_peak(world):
    host = world(gpus=1)
    pid = next(iter(host.gpu.processes()))
    with gpu.sampled(lambda: [pid], ()) as peaks:
        time.sleep(0.3)
        host.gpu.ledger.fault("gpu_lost")
    assert peaks == {}
    host.gpu.ledger.fault("gpu_lost", None)
    with gpu.sampled(lambda: [pid], ()) as peaks:
        assert peaks == {}, "it is not known before the end"
    assert peaks == {host.gpu.uuids[0]: OWN_MIB}
    with gpu.sampled(lambda: [pid], ["GPU-of-another-engine"]) as peaks:
        pass
    assert peaks == {}


def test_the_page_cache_of_a_checkpoint(world):
    host = world(start=False)
    model = host.root / "srv/models/tiny"
    for path in model.iterdir():
        path.read_bytes()
    (model / "again.json").symlink_to("config.json")  # counts once
    size = sum(path.stat().st_size for path in model.iterdir() if not path.is_symlink())
    look = host.run_module(vllm_page_cache.main, engine="chat")
    assert (look["changed"], look["cached_share"]) == (False, 1.0)
    assert page_cache.seen(str(model)) == page_cache.Cached(size, size)

    check = host.run_module(vllm_page_cache.main, engine="chat", state="dropped", check_mode=True)
    assert check["changed"] is True
    assert page_cache.seen(str(model)).cached == size
    first = host.run_module(vllm_page_cache.main, engine="chat", state="dropped")
    assert (first["changed"], first["cached_share"]) == (True, 1.0)
    assert page_cache.seen(str(model)).cached <= size * page_cache.LEFT
    again = host.run_module(vllm_page_cache.main, engine="chat", state="dropped")
    assert (again["changed"], again["model"]) == (False, str(model))


def test_what_another_process_maps_stays_and_is_told(world, monkeypatch):
    host = world(start=False)
    monkeypatch.setattr(page_cache, "PATIENCE", 0.3)
    (weights,) = (host.root / "srv/models/tiny").glob("*.safetensors")
    with weights.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert len(mapped[:]) > 0  # every page is there
        result = host.run_module(vllm_page_cache.main, engine="chat", state="dropped")
    assert result["failed"]
    assert f"of {host.root}/srv/models/tiny stay in the page cache" in result["msg"]
    assert "fuser -v" in result["next_step"]


def test_a_model_that_lies_not_on_disk_has_no_page_cache(world):
    host = world(start=False, declared={"model": "Qwen/Qwen3-0.6B"})
    result = host.run_module(vllm_page_cache.main, engine="chat", state="dropped")
    assert "'Qwen/Qwen3-0.6B' is no absolute path" in result["msg"]


class Measured:
    """A host of one engine, or two, on which the playbook runs task by task."""

    def __init__(self, host) -> None:
        self.host = host
        self.instances = [
            {"name": name, "model": f"/srv/models/{name}", "gpus": host.gpu.uuids, "port": host.gate.ports[name]}
            for name in host.engines
        ]

    def play(self, kill_after: int | None = None, check: bool = False, **variables) -> Play:
        given = {
            "vllm_engine_instances": self.instances,
            "vllm_gate_address": "127.0.0.1",
            "vllm_measure_min_serving": 0,
            "vllm_measure_capacity_timeout": 0.2,
            **variables,
        }

        def call(module, check_mode=check, **options):
            return self.host.run_module(module.main, check_mode=check_mode, **options)

        return Play("h1", call, given, kill_after, check)


def changing(calls) -> list[str]:
    """What was really changed, in order."""
    kinds = ("vllm_engine", "vllm_sleep", "vllm_wake", "vllm_page_cache", "vllm_drain")
    done = [(module, given) for module, given in calls if module in kinds and not given.get("check_mode")]
    return [f"{module[5:]} {given.get('state') or given.get('level') or ''}".strip() for module, given in done]


SLEEPS = ["sleep 1", "wake", "sleep 2", "wake"]
STARTS = ["engine stopped", "page_cache seen", "engine started"]


def test_an_engine_is_measured_and_serves_as_before(world):
    host = Measured(world(gate=True, gpus=1, doors=("preflight", "ready")))
    before = host.host.chat.seen()
    play = host.play(vllm_measure_cold=True)
    assert play.run("measure.yml") == ""
    assert host.host.chat.seen() == before
    cold = [one.replace("seen", "dropped") for one in STARTS]
    assert changing(play.calls) == [*SLEEPS, *cold, *STARTS]
    rows = {row["path"]: row for row in play.rows()}
    assert list(rows) == ["sleep1", "sleep2", "cold", "warm"]
    for row in rows.values():
        assert row["outcome"] == "measured"
        assert row["gpu_peak_mib"] == row["gpu_mib"] == OWN_MIB
        assert 0 < row["first_token_s"] < 10
        (span,) = row["spans"]
        assert 0 < row["ready_s"] < span["seconds"]
        assert row["phases"][-1]["phase"] == "prove"
        assert sum(one["seconds"] for one in row["phases"]) == pytest.approx(row["ready_s"], abs=0.3)
    assert [row["gpu_asleep_mib"] for row in rows.values()] == [RESIDUE_MIB - 43, RESIDUE_MIB - 43, None, None]
    assert [row["phases"][0]["phase"] for row in rows.values()] == ["wake", "wake", "prepare", "prepare"]
    assert [rows[path]["cached_share"] for path in ("sleep1", "cold", "warm")] == [None, 1.0, 1.0]
    assert rows["warm"]["compiled"] is True
    assert [one["path"] for one in play.report["summary"]] == ["cold", "warm", "sleep1", "sleep2"]
    assert "cold start" in play.page
    assert "✔ Complete: 4 of 4" in play.page


@pytest.mark.parametrize("fault", ["sleep_frees_nothing", "wake_noop"])
def test_a_failure_returns_to_an_engine_that_serves(world, fault):
    host = Measured(world(gate=True, gpus=1, doors=("preflight", "ready")))
    chat = host.host.chat
    chat.set_fault(fault)
    play = host.play()
    why = play.run("measure.yml")
    assert "chat serves again" in why, why
    assert changing(play.calls)[-1] == "engine restarted"
    assert chat.seen()["ready"] is True
    assert chat.seen()["asleep"] == ""
    assert chat.lease() is None
    rows = {row["path"]: row["outcome"] for row in play.rows()}
    assert rows == {"sleep1": "failed", "sleep2": "waiting", "warm": "waiting"}
    assert "Not complete: 1 failed, 2 waiting" in play.page


def test_an_engine_that_does_not_start_any_more_is_brought_back_by_the_next_run(world):
    host = Measured(world(gate=True, gpus=1, doors=("preflight", "ready")))
    chat = host.host.chat
    chat.set_fault("start_crash", 0)
    play = host.play()
    why = play.run("measure.yml")
    assert 'On the way back to what was awake before, "Restart it' in why, why
    assert {row["path"]: row["outcome"] for row in play.rows()} == {
        "sleep1": "measured",
        "sleep2": "measured",
        "warm": "failed",
    }
    assert chat.lease()["owner"] == "measure"
    chat.clear_faults()
    again = host.play()
    assert again.run("measure.yml") == ""
    assert changing(again.calls)[0] == "engine restarted"
    assert chat.lease() is None
    assert chat.seen()["ready"] is True


@pytest.mark.parametrize("calls", [6, 10])
def test_a_run_that_was_killed_is_gone_on_with(world, calls):
    """After the sleep, and after the stop."""
    host = Measured(world(gate=True, gpus=1, doors=("preflight", "ready")))
    killed = host.play(kill_after=calls)
    with pytest.raises(Killed):
        killed.run("measure.yml")
    assert host.host.chat.lease()["owner"] == "measure"
    assert host.host.gate.ready("chat") != 200
    play = host.play()
    assert play.run("measure.yml") == ""
    assert changing(play.calls)[0] == "engine restarted"
    assert changing(play.calls)[1:] == [*SLEEPS, *STARTS]
    assert host.host.chat.seen()["ready"] is True
    assert host.host.chat.lease() is None


def test_what_cannot_be_measured_is_left_out_or_refused_before_anything_is_touched(world):
    host = Measured(world(gate=True, gpus=1, dev_mode=False, doors=("preflight", "ready")))
    for variables, says in (
        ({"vllm_measure_rounds": 0}, "a number from 1 to 99"),
        ({"vllm_measure_engines": "chat"}, 'JSON such as {"vllm_measure_engines": ["chat"]}'),
        ({"vllm_measure_cold": "perhaps"}, "is true or false"),
        ({"vllm_measure_min_serving": {"chatt": 1}}, "chatt is neither a model nor a pool"),
    ):
        play = host.play(**variables)
        assert says in play.run("measure.yml")
        assert play.calls == []
    play = host.play(vllm_measure_min_serving=1)
    assert "min_serving" in play.run("measure.yml")
    assert changing(play.calls) == []
    play = host.play()
    assert play.run("measure.yml") == ""
    assert changing(play.calls) == STARTS
    reasons = {row["path"]: row["reason"] for row in play.rows() if row["outcome"] == "skipped"}
    assert set(reasons) == {"sleep1", "sleep2"}
    assert "has no development endpoints" in reasons["sleep1"]
    host.host.done(vllm_drain, state="drained", lease={"owner": "ops"})
    assert "is held by ops" in (why := host.play().run("measure.yml")), why
    assert "chat is drained; only engines that serve" in host.play(vllm_measure_force=True).run("measure.yml")


def test_a_check_changes_nothing(world):
    host = Measured(world(gate=True, gpus=1, doors=("preflight", "ready")))
    before = host.host.files()
    play = host.play(check=True)
    assert play.run("measure.yml") == ""
    assert changing(play.calls) == []
    assert host.host.files() == before


def test_an_engine_of_a_preload_daemon(world):
    host = world(gate=True, gpus=1, start=False, doors=True)
    host.daemon(engines=["chat"], doors=True)
    host.takes_from(host.chat, mode="copy")
    started = host.systemd.ctl("start", "vllm-preload@base.service")
    assert started.returncode == 0, host.systemd.journal("vllm-preload@base.service")
    host.start()
    play = Measured(host).play(vllm_measure_cold=True)
    assert play.run("measure.yml") == ""
    assert changing(play.calls) == ["sleep 1", "wake", *STARTS]
    rows = {row["path"]: row for row in play.rows()}
    assert {path: row["outcome"] for path, row in rows.items()} == {
        "sleep1": "measured",
        "preload": "measured",
        "sleep2": "skipped",
        "cold": "skipped",
    }
    assert "vLLM cannot load them anew after level 2" in rows["sleep2"]["reason"]
    assert "preload daemon 'base'" in rows["cold"]["reason"]
    assert rows["preload"]["gpu_peak_mib"] == rows["preload"]["gpu_mib"]
