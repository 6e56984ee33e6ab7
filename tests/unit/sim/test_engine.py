"""The simulated engine does what vLLM was measured to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from ansible_collections.baremetal.vllm.tests.sim.harness import HERE, SimEngine, sim_engine, sim_gpu

VERSIONS = ("0.31.0", "0.32.0", "0.33.0")


def series(server, name: str, **labels: str) -> list[float]:
    lines = server.request("GET", "/metrics").text.splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return [
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(f"{name}{{") and all(part in line for part in wanted)
    ]


def until(probe, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not probe():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


@pytest.mark.parametrize("version", VERSIONS)
def test_bodies_by_version(tmp_path, version):
    with sim_engine(tmp_path, version=version, enable_sleep_mode=True) as engine:
        assert engine.request("GET", "/version").json == {"version": version}
        slept = engine.request("POST", "/sleep?level=1")
        woke = engine.request("POST", "/wake_up")
        if version == "0.31.0":
            assert (slept, woke) == ((200, ""), (200, ""))
            assert engine.request("POST", "/sleep?level=9").status == 200
        else:
            assert slept.json == {"status": "sleeping", "level": 1}
            assert woke.json == {"status": "awake", "tags": None}
            refused = engine.request("POST", "/sleep?level=9")
            assert refused.status == 400
            assert refused.json["error"]["param"] == "query.level"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_new_request_while_paused(tmp_path, version, mode):
    with sim_engine(tmp_path, version=version) as engine:
        engine.request("POST", f"/pause?mode={mode}")
        if version == "0.33.0" and mode != "keep":
            reply = engine.request("POST", "/v1/completions", {"prompt": "x"})
            assert reply.status == 503
            assert reply.json["error"]["type"] == "ServiceUnavailableError"
        else:
            with pytest.raises(TimeoutError):
                engine.request("POST", "/v1/completions", {"prompt": "x"}, timeout=0.3)
            assert series(engine, "vllm:num_requests_waiting") == [0]  # no step, so no gauge shows it


def test_paused_looks_asleep_and_waking_undoes_the_pause(tmp_path):
    with sim_engine(tmp_path) as engine:
        engine.request("POST", "/pause?mode=wait")
        assert engine.request("GET", "/is_sleeping").json == {"is_sleeping": True}
        assert series(engine, "vllm:engine_sleep_state", sleep_state="awake") == [1]
        engine.request("POST", "/wake_up")
        assert engine.request("GET", "/is_paused").json == {"is_paused": False}


def test_plain_wake_from_level_2_is_garbage_until_reload(tmp_path):
    with sim_gpu(tmp_path) as gpu, sim_engine(tmp_path, gpu=gpu, enable_sleep_mode=True) as engine:
        golden = engine.complete()
        engine.request("POST", "/sleep?level=2")
        assert gpu.used() < 1700
        assert engine.request("POST", "/wake_up").json["status"] == "awake"
        assert set(engine.complete()) == {0}
        engine.request("POST", "/collective_rpc", {"method": "reload_weights"})
        assert engine.complete() == golden


def test_level_2_on_a_level_1_sleeper_changes_the_gauge_only(tmp_path):
    with sim_engine(tmp_path, enable_sleep_mode=True) as engine:
        golden = engine.complete()
        engine.request("POST", "/sleep?level=1")
        assert engine.request("POST", "/sleep?level=2").json == {"status": "sleeping", "level": 2}
        assert series(engine, "vllm:engine_sleep_state", sleep_state="discard_all") == [1]
        engine.request("POST", "/wake_up")
        assert engine.complete() == golden


def test_level_in_a_body_is_ignored(tmp_path):
    with sim_engine(tmp_path, enable_sleep_mode=True) as engine:
        assert engine.request("POST", "/sleep", {"level": 2}).json["level"] == 1


def test_sleep_without_sleep_mode_frees_nothing(tmp_path):
    with sim_gpu(tmp_path) as gpu, sim_engine(tmp_path, gpu=gpu) as engine:
        before = gpu.used()
        assert engine.request("POST", "/sleep?level=2").status == 200
        assert gpu.used() == before


def test_wake_without_room_fails_and_leaves_part_of_it_mapped(tmp_path):
    with sim_gpu(tmp_path) as gpu, sim_engine(tmp_path, gpu=gpu, enable_sleep_mode=True) as engine:
        engine.request("POST", "/sleep?level=1")
        gpu.ledger.foreign(gpu.uuids[0], 100_000)
        reply = engine.request("POST", "/wake_up")
        assert reply.status == 500
        assert "out of memory" in reply.text
        assert engine.truth()["cores"][0]["mapped"] == ["weights"]
        assert engine.request("GET", "/is_sleeping").json == {"is_sleeping": True}


def test_queue_that_outlives_a_waiting_pause(tmp_path):
    with sim_engine(tmp_path, max_num_seqs=1, token_rate=100) as engine:
        first, second = engine.open_stream(150), engine.open_stream(10)
        until(lambda: series(engine, "vllm:num_requests_waiting") == [1])
        assert engine.request("POST", "/pause?mode=wait").status == 200
        assert series(engine, "vllm:num_requests_running") == [0]
        assert series(engine, "vllm:num_requests_waiting") == [1]
        engine.request("POST", "/resume")
        assert first.read().finish_reason == second.read().finish_reason == "length"


@pytest.mark.parametrize("cut", ["/pause?mode=abort", "/sleep?level=1"])
def test_a_cut_stream_looks_complete(tmp_path, cut):
    with sim_engine(tmp_path, token_rate=100) as engine:
        stream = engine.open_stream(1800)
        until(lambda: series(engine, "vllm:generation_tokens_total")[0] > 20)
        engine.request("POST", cut)
        stream.read()
        assert (stream.status, stream.done, stream.finish_reason) == (200, True, "abort")
        assert 20 < len(stream.ids) < 1800
        assert series(engine, "vllm:request_success_total", finished_reason="abort") == [1]


def test_aborts_asked_for_are_in_no_counter(tmp_path):
    with sim_engine(tmp_path, token_rate=100) as engine:
        stream = engine.open_stream(1800)
        until(lambda: series(engine, "vllm:num_requests_running") == [1])
        assert engine.request("POST", "/abort_requests", {}).json == {"status": "aborted", "aborted": 1}
        assert stream.read().finish_reason == "abort"
        assert series(engine, "vllm:request_success_total", finished_reason="abort") == [0]


def test_sigterm_aborts_by_default_and_keeps_the_socket_file(tmp_path):
    with sim_engine(tmp_path, token_rate=100) as engine:
        stream = engine.open_stream(1800)
        until(lambda: series(engine, "vllm:num_requests_running") == [1])
        assert engine.terminate() == 0
        assert stream.read().finish_reason == "abort"
        assert engine.socket.exists()


def test_a_left_over_socket_ends_the_next_start(tmp_path):
    with sim_engine(tmp_path) as engine:
        engine.terminate()
        engine.launch()
        assert engine.wait() == 1
        assert "Address already in use" in engine.output()


def test_sigterm_with_a_timeout_lets_streams_finish_and_refuses_new_ones(tmp_path):
    with sim_engine(tmp_path, token_rate=100, shutdown_timeout=30) as engine:
        stream = engine.open_stream(300)
        until(lambda: series(engine, "vllm:num_requests_running") == [1])
        os.kill(engine.pid, signal.SIGTERM)
        until(lambda: engine.request("POST", "/v1/completions", {"prompt": "x"}).status == 500)
        assert engine.request("GET", "/health").status == 200
        assert engine.request("GET", "/is_sleeping").status == 500
        assert len(stream.read().ids) == 300
        assert stream.finish_reason == "length"
        assert engine.wait() == 0


def test_core_outlives_sigkill_of_its_parent_with_its_memory(tmp_path):
    with sim_gpu(tmp_path) as gpu, sim_engine(tmp_path, gpu=gpu) as engine:
        core = engine.core_pids()[0]
        held = gpu.processes()[core]
        engine.kill()
        with pytest.raises(ConnectionRefusedError):
            engine.request("GET", "/health")
        assert gpu.processes() == {core: held}
        os.kill(core, signal.SIGKILL)
        until(lambda: gpu.used() == 0)


def test_api_server_exits_0_when_its_core_is_killed(tmp_path):
    with sim_engine(tmp_path, token_rate=100) as engine:
        stream = engine.open_stream(1800)
        until(lambda: series(engine, "vllm:num_requests_running") == [1])
        os.kill(engine.core_pids()[0], signal.SIGKILL)
        assert engine.wait() == 0
        assert stream.read().done
        assert "EngineCore encountered an issue" in stream.error


def test_stopped_core_is_healthy_and_answers_nothing(tmp_path):
    with sim_engine(tmp_path) as engine:
        os.kill(engine.core_pids()[0], signal.SIGSTOP)
        assert engine.request("GET", "/health").status == 200
        assert series(engine, "vllm:num_requests_running") == [0]
        with pytest.raises(TimeoutError):
            engine.request("GET", "/is_sleeping", timeout=0.3)


def test_socket_refuses_before_it_listens(tmp_path):
    with sim_engine(tmp_path, wait=False, start_delay=0.5) as engine:
        until(engine.socket.exists)
        with pytest.raises(ConnectionRefusedError):
            engine.request("GET", "/health")
        until(engine.answers)


def test_one_series_for_each_engine_of_a_group(tmp_path):
    with sim_gpu(tmp_path, count=2) as gpu, sim_engine(tmp_path, gpu=gpu, data_parallel_size=2) as engine:
        assert len(set(engine.core_pids())) == 2
        assert gpu.used(0) == gpu.used(1) > 70_000
        assert series(engine, "vllm:num_requests_running", engine="1") == [0]
        reply = engine.request("POST", "/collective_rpc", {"method": "reload_weights"})
        assert reply.json == {"results": [None, None]}


def test_without_development_mode_the_control_endpoints_are_404(tmp_path):
    with sim_engine(tmp_path, dev_mode=False) as engine:
        assert engine.request("GET", "/is_paused").status == 404
        assert "/pause" not in engine.request("GET", "/openapi.json").json["paths"]
        assert engine.request("GET", "/health").status == 200


def test_api_key_guards_v1_only(tmp_path):
    with sim_engine(tmp_path, api_key="sesame") as engine:
        assert engine.request("GET", "/v1/models").status == 401
        assert engine.request("POST", "/pause").status == 200


def test_without_statistics_there_are_no_gauges(tmp_path):
    with sim_engine(tmp_path, disable_log_stats=True) as engine:
        assert "vllm:num_requests" not in engine.request("GET", "/metrics").text


def test_httpx_over_the_socket(tmp_path):
    with sim_engine(tmp_path) as engine:
        transport = httpx.HTTPTransport(uds=str(engine.socket))
        with httpx.Client(transport=transport, base_url="http://engine", trust_env=False) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
            ids = []
            body = {"prompt": "golden", "max_tokens": 8, "stream": True, "return_token_ids": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        ids += httpx.Response(200, text=line[6:]).json()["choices"][0]["token_ids"]
            assert ids == engine.complete()


def test_requests_are_recorded_with_what_they_change(tmp_path):
    with sim_engine(tmp_path) as engine:
        engine.request("GET", "/is_paused")
        engine.complete()
        engine.request("POST", "/pause?mode=wait")
        assert [one["path"] for one in engine.requests()] == ["/is_paused", "/v1/completions", "/pause?mode=wait"]
        assert engine.mutations() == ["POST /pause?mode=wait"]


def test_a_slow_sleep_goes_on_when_its_client_has_gone(tmp_path):
    with sim_engine(tmp_path, enable_sleep_mode=True) as engine:
        engine.set_fault("sleep_slow", 0.6)
        with pytest.raises(TimeoutError):
            engine.request("POST", "/sleep?level=1", timeout=0.2)
        assert engine.truth()["cores"][0]["asleep"] == []
        until(lambda: engine.truth()["cores"][0]["asleep"] == ["kv_cache", "weights"])


def test_two_calls_at_once_are_both_served(tmp_path):
    with sim_engine(tmp_path, enable_sleep_mode=True, speed=20) as engine:
        seen = []
        threads = [
            threading.Thread(target=lambda: seen.append(engine.request("POST", "/sleep?level=1").status))
            for _unused in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [200, 200]


def test_vllm_serve_with_a_configuration_file(tmp_path):
    config = tmp_path / "chat.yaml"
    config.write_text(f"model: /models/chat\nserved-model-name: chat\nuds: {tmp_path}/e.sock\nmax-num-seqs: 7\n")
    argv = [str(HERE / "bin" / "vllm"), "serve", "--config", str(config)]
    env = {**os.environ, "SIM_PYTHON": sys.executable, "SIM_ARGS": f"--version 0.32.0 --state {tmp_path}"}
    client = SimEngine(tmp_path, tmp_path / "e.sock", [], {})  # asks only: this one was started elsewhere
    with subprocess.Popen(argv, env=env) as process:
        until(client.answers)
        assert client.request("GET", "/version").json == {"version": "0.32.0"}
        assert client.request("GET", "/v1/models").json["data"][0]["id"] == "chat"
        process.terminate()
        assert process.wait(10) == 0


def test_the_simulated_command_says_its_version_and_what_it_does_not_know():
    command = str(HERE / "bin" / "vllm")
    env = {**os.environ, "SIM_VERSION": "0.32.0"}
    assert subprocess.run([command, "--version"], env=env, stdout=subprocess.PIPE, check=True).stdout == b"0.32.0\n"
    assert subprocess.run([command, "snapshot"], stderr=subprocess.PIPE, check=False).returncode == 2
