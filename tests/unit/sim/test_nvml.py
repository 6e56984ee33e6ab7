"""The real pynvml against the stand-in for libnvidia-ml.so.1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from ansible_collections.baremetal.vllm.tests.sim.harness import sim_engine, sim_gpu

MIB = 1024 * 1024
# In a process of its own, since the library is found by LD_LIBRARY_PATH and loaded once.
READ = """
import json, sys, pynvml as n
try:
    n.nvmlInit()
    found = {"driver": n.nvmlSystemGetDriverVersion(), "gpus": []}
    for index in range(n.nvmlDeviceGetCount()):
        gpu = n.nvmlDeviceGetHandleByIndex(index)
        uuid = n.nvmlDeviceGetUUID(gpu)
        same = n.nvmlDeviceGetHandleByUUID(uuid)
        one, two = n.nvmlDeviceGetMemoryInfo(gpu), n.nvmlDeviceGetMemoryInfo(gpu, version=n.nvmlMemory_v2)
        found["gpus"].append({
            "uuid": uuid, "name": n.nvmlDeviceGetName(gpu), "index": n.nvmlDeviceGetIndex(same),
            "v1": [one.total, one.used, one.free], "v2": [two.total, two.reserved, two.used, two.free],
            "processes": [[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(gpu)],
            "graphics": len(n.nvmlDeviceGetGraphicsRunningProcesses(gpu)),
        })
    n.nvmlShutdown()
except n.NVMLError as error:
    found = {"error": type(error).__name__, "text": str(error)}
json.dump(found, sys.stdout)
"""


def read(gpu):
    env = {**os.environ, **gpu.env}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", READ], env=env, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def test_an_empty_gpu(tmp_path):
    with sim_gpu(tmp_path, count=2) as gpu:
        found = read(gpu)
        assert [one["uuid"] for one in found["gpus"]] == gpu.uuids
        assert [one["index"] for one in found["gpus"]] == [0, 1]
        first = found["gpus"][0]
        assert first["name"] == "NVIDIA H200"
        assert first["v2"] == [143771 * MIB, 615 * MIB, 0, 143156 * MIB]
        assert first["v1"] == [143771 * MIB, 615 * MIB, 143156 * MIB]
        assert (first["processes"], first["graphics"]) == ([], 0)


def test_it_agrees_with_the_ledger_through_an_engines_life(tmp_path):
    with sim_gpu(tmp_path) as gpu, sim_engine(tmp_path, gpu=gpu, enable_sleep_mode=True) as engine:
        for step in (None, "/sleep?level=1", "/wake_up?tags=weights"):
            if step:
                engine.request("POST", step)
            found = read(gpu)["gpus"][0]
            assert found["v2"][2] == gpu.used() * MIB
            assert found["v2"][3] == gpu.free() * MIB
            assert found["processes"] == [[engine.core_pids()[0], gpu.processes()[engine.core_pids()[0]] * MIB]]
        engine.terminate()
        assert read(gpu)["gpus"][0]["v2"][2] == 0


def test_memory_that_lingers_has_no_process(tmp_path):
    with sim_gpu(tmp_path) as gpu:
        gpu.ledger.hold(gpu.uuids[0], 5000, seconds=60)
        found = read(gpu)["gpus"][0]
        assert found["v2"][2] == gpu.used() * MIB == 5000 * MIB
        assert found["processes"] == []


def test_memory_held_until_a_time_comes_back(tmp_path):
    with sim_gpu(tmp_path) as gpu:
        gpu.ledger.hold(gpu.uuids[0], 5000, seconds=0.01)
        while gpu.used():
            pass
        assert read(gpu)["gpus"][0]["v2"][2] == 0


@pytest.mark.parametrize(
    ("fault", "arg", "error"),
    [
        ("not_loaded", "1", "NVMLError_DriverNotLoaded"),
        ("mismatch", "1", "NVMLError_LibRmVersionMismatch"),
        ("no_permission", "1", "NVMLError_NoPermission"),
        ("gpu_lost", "1", "NVMLError_GpuIsLost"),
        ("unknown_device", "1", "NVMLError_NotFound"),
        ("memory_error", "1", "NVMLError_Unknown"),
    ],
)
def test_faults_that_are_errors(tmp_path, fault, arg, error):
    with sim_gpu(tmp_path) as gpu:
        gpu.ledger.fault(fault, arg)
        assert read(gpu)["error"] == error
        gpu.ledger.fault(fault, None)
        assert "error" not in read(gpu)


def test_faults_that_are_wrong_numbers(tmp_path):
    with sim_gpu(tmp_path, count=2) as gpu:
        gpu.ledger.foreign(gpu.uuids[0], 1000)
        expected = {
            "memory_zero": lambda one: one["v2"][2] == 0 and one["processes"],
            "hide_processes": lambda one: one["v2"][2] > 0 and not one["processes"],
            "unknown_process_memory": lambda one: one["processes"] == [[1, None]],
        }
        for fault, holds in expected.items():
            gpu.ledger.fault(fault)
            assert holds(read(gpu)["gpus"][0]), fault
            gpu.ledger.fault(fault, None)
        gpu.ledger.fault("reverse_order")
        assert [one["uuid"] for one in read(gpu)["gpus"]] == gpu.uuids[::-1]


def test_slow_calls(tmp_path):
    with sim_gpu(tmp_path) as gpu:
        gpu.ledger.fault("slow", 100)
        begin = time.monotonic()
        assert "error" not in read(gpu)
        assert time.monotonic() - begin > 1


def test_without_a_ledger_there_is_no_driver(tmp_path):
    with sim_gpu(tmp_path) as gpu:
        gpu.ledger.path.unlink()
        assert read(gpu)["error"] == "NVMLError_DriverNotLoaded"
