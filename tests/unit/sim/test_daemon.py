"""The simulated preload daemon, and engines that take their weights from it."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ansible_collections.baremetal.vllm.tests.sim import model
from ansible_collections.baremetal.vllm.tests.sim.harness import sim_daemon, sim_engine, sim_gpu


@pytest.fixture
def gpu(tmp_path):
    with sim_gpu(tmp_path) as gpu:
        yield gpu


def from_daemon(daemon, **config):
    return {
        "load_format": "ipc_cache",
        "model_loader_extra_config": {"socket_dir": str(daemon.socket_dir), **config},
    }


def until(probe, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not probe():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def test_health_refuses_then_503_then_200(tmp_path, gpu):
    with sim_daemon(tmp_path, gpu, wait=False, load_time=1.0) as daemon:
        seen = [0]  # before it was started
        deadline = time.monotonic() + 20
        while seen[-1] != 200 and time.monotonic() < deadline:
            status = daemon.health()
            if status != seen[-1]:
                seen.append(status)
            time.sleep(0.005)
        assert seen == [0, 503, 200]


def test_an_engine_that_comes_too_early_loads_from_disk_and_both_hold_the_weights(tmp_path, gpu):
    with sim_daemon(tmp_path, gpu, wait=False, load_time=3.0) as daemon:
        until(lambda: daemon.health() == 503)
        with sim_engine(tmp_path, gpu=gpu, gpu_memory_utilization=0.3, **from_daemon(daemon)) as engine:
            assert "falling back to disk loading" in engine.output()
            until(lambda: daemon.health() == 200)
            assert len(gpu.processes()) == 2


def test_without_fallback_the_engine_waits_for_the_daemon(tmp_path, gpu):
    with (
        sim_daemon(tmp_path, gpu, wait=False, load_time=0.5) as daemon,
        sim_engine(tmp_path, gpu=gpu, **from_daemon(daemon, fallback=False, state_timeout_s=20)) as engine,
    ):
        assert "Mapped 435 tensors from the weight cache daemon (zero_copy mode)" in engine.output()


def test_the_fingerprint_does_not_cover_values(tmp_path, gpu):
    right, wrong = model.write(tmp_path / "right", "one"), model.write(tmp_path / "wrong", "two")
    with sim_daemon(tmp_path, gpu, model=right) as daemon:
        with sim_engine(tmp_path, name="a", gpu=gpu, model=wrong, **from_daemon(daemon)) as engine:
            assert "Mapped 4 tensors" in engine.output()
            served = engine.complete()
            engine.terminate()
        with sim_engine(tmp_path, name="b", gpu=gpu, model=wrong) as engine:
            assert engine.complete() != served


def test_other_shapes_are_noticed(tmp_path, gpu):
    right, wrong = model.write(tmp_path / "right", "one"), model.write(tmp_path / "wrong", "one", tensors=5)
    with (
        sim_daemon(tmp_path, gpu, model=right) as daemon,
        sim_engine(tmp_path, gpu=gpu, model=wrong, **from_daemon(daemon)) as engine,
    ):
        assert "mismatch on fields: ['checkpoint']); falling back to disk loading" in engine.output()


def test_copy_mode_uses_the_daemon_up_and_health_stays_200(tmp_path, gpu):
    with sim_daemon(tmp_path, gpu) as daemon:
        held = gpu.processes()[daemon.ranks()[0]]
        with sim_engine(tmp_path, name="a", gpu=gpu, **from_daemon(daemon, mode="copy")) as engine:
            assert "(copy mode)" in engine.output()
            assert daemon.health() == 200
            assert gpu.processes()[daemon.ranks()[0]] == held
            engine.terminate()
        config = from_daemon(daemon, mode="copy", fallback=False, state_timeout_s=0.2)
        with sim_engine(tmp_path, name="b", gpu=gpu, wait=False, **config) as engine:
            assert engine.wait() == 1
            assert "Weights were released" in engine.output()


def test_exit_after_sigterm_is_241(tmp_path, gpu):
    with sim_daemon(tmp_path, gpu) as daemon:
        assert daemon.terminate() == 241
        assert gpu.used() == 0


def test_a_killed_rank_turns_health_to_503(tmp_path, gpu):
    with sim_gpu(tmp_path, count=2) as two, sim_daemon(tmp_path, two, tensor_parallel_size=2) as daemon:
        os.kill(daemon.ranks()[0], signal.SIGKILL)
        until(lambda: daemon.health() == 503)
        assert daemon.popen.poll() is None


def test_an_engine_that_asks_for_too_little_memory(tmp_path, gpu):
    with sim_daemon(tmp_path, gpu) as daemon:
        options = {"gpu_memory_utilization": 0.05, **from_daemon(daemon)}
        with sim_engine(tmp_path, gpu=gpu, wait=False, **options) as engine:
            assert engine.wait() == 1
            assert "Externally held weights" in engine.output()


@pytest.mark.parametrize(
    ("fault", "arg", "health"),
    [("daemon_never_ready", True, 503), ("daemon_health_lies", True, 200), ("daemon_health_503", True, 503)],
)
def test_health_faults(tmp_path, gpu, fault, arg, health):
    with sim_daemon(tmp_path, gpu, wait=False, load_time=0.2, fault=[fault]) as daemon:
        until(lambda: daemon.health() == health)
        until(lambda: daemon.ranks()[0] in gpu.processes())
        assert daemon.health() == health


def test_stop_faults(tmp_path, gpu):
    with sim_daemon(tmp_path, gpu, fault=["daemon_exit=7", "daemon_cleans_files"]) as daemon:
        assert daemon.terminate() == 7
        assert not list(daemon.socket_dir.iterdir())
    with sim_daemon(tmp_path, gpu, name="b", fault=["daemon_term_slow=0.3"]) as daemon:
        begin = time.monotonic()
        daemon.terminate()
        assert time.monotonic() - begin > 0.3


def test_start_and_release_faults(tmp_path, gpu):
    with sim_daemon(tmp_path, gpu, wait=False, load_time=5, fault=["daemon_crash=0"]) as daemon:
        assert daemon.wait() == 1
    with (
        sim_daemon(tmp_path, gpu, name="b", fault=["daemon_released"]) as daemon,
        sim_engine(tmp_path, gpu=gpu, **from_daemon(daemon)) as engine,
    ):
        assert "Weights were released); falling back to disk loading" in engine.output()


def test_faults_of_an_engine_that_takes_its_weights_from_a_daemon(tmp_path, gpu):
    with sim_daemon(tmp_path, gpu) as daemon:
        source = from_daemon(daemon, mode="copy")
        with sim_engine(tmp_path, gpu=gpu, fault=["preload_fails_late"], **source) as engine:
            assert "Weight cache IPC loading failed; falling back to disk loading" in engine.output()
            assert "released cached weights" in daemon.output()
    with (
        sim_daemon(tmp_path, gpu, name="b") as daemon,
        sim_engine(tmp_path, name="b-engine", gpu=gpu, fault=["log_quiet"], **from_daemon(daemon)) as engine,
    ):
        assert "Mapped" not in engine.output()


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_a_daemon_refuses_what_it_cannot_hand_over(tmp_path, gpu, method):
    with sim_daemon(tmp_path, gpu, wait=False, quantization=method) as daemon:
        assert daemon.wait() == 1
        assert "does not support loading from pre-processed weights" in daemon.output()
    folder = model.write(tmp_path / "model", "one")
    (folder / "config.json").write_text(f'{{"quantization_config": {{"quant_method": "{method}"}}}}')
    with sim_daemon(tmp_path, gpu, name="b", wait=False, model=folder) as daemon:
        assert daemon.wait() == 1


@pytest.mark.parametrize("mode", ["copy", "zero_copy"])
def test_an_engine_that_was_started_for_a_daemon_cannot_reload(tmp_path, gpu, mode):
    with (
        sim_daemon(tmp_path, gpu) as daemon,
        sim_engine(tmp_path, gpu=gpu, enable_sleep_mode=True, **from_daemon(daemon, mode=mode)) as engine,
    ):
        assert engine.request("POST", "/collective_rpc", {"method": "reload_weights"}).status == 500
