"""Each fault switch does what its line in faults.py says."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import time

import pytest

from ansible_collections.baremetal.vllm.tests.sim import faults
from ansible_collections.baremetal.vllm.tests.sim.harness import HERE, Failed, sim_engine, sim_gpu

GOLDEN = {"prompt": "golden", "max_tokens": 8, "return_token_ids": True, "logprobs": 0}
BROKEN = (OSError, http.client.HTTPException, ValueError)


def test_every_switch_is_read_somewhere():
    code = "".join(
        path.read_text() for path in [*HERE.glob("*.py"), HERE / "nvml" / "nvml.c"] if path.name != "faults.py"
    )
    unread = [fault.name for fault in faults.TABLE if f'"{fault.name.removeprefix("nvml:")}"' not in code]
    assert unread == []


def test_the_table_has_each_name_once():
    assert len(faults.NAMES) == len(faults.TABLE) >= 40
    assert all(fault.did and fault.source for fault in faults.TABLE)


def test_an_unknown_fault_is_refused(tmp_path):
    with sim_engine(tmp_path, wait=False, fault=["no_such_fault"]) as engine:
        assert engine.wait() == 1
        assert "unknown fault no_such_fault" in engine.output()
        with pytest.raises(KeyError):
            engine.set_fault("no_such_fault")


class Lab:
    """An engine on a GPU, and the questions that the probes below ask."""

    def __init__(self, engine, gpu) -> None:
        self.engine, self.gpu = engine, gpu
        self.awake_mib = gpu.used()
        self.golden = engine.complete()

    def post(self, path, body=None, timeout=5.0):
        return self.engine.request("POST", path, body, timeout)

    def get(self, path, timeout=5.0):
        return self.engine.request("GET", path, None, timeout)

    def flag(self, name):
        return self.get(f"/is_{name}").json[f"is_{name}"]

    def truth(self):
        return self.engine.truth()["cores"][0]

    def gauge(self, name):
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(f"vllm:{name}{{")]
        return [float(line.rsplit(" ", 1)[1]) for line in lines]

    def state(self):
        return dict(zip(("awake", "weights_offloaded", "discard_all"), self.gauge("engine_sleep_state")))

    def ids(self):
        return self.engine.complete()

    def until(self, probe):
        deadline = time.monotonic() + 10
        while not probe():
            assert time.monotonic() < deadline, "did not happen in time"
            time.sleep(0.01)
        return True

    def hangs(self, call):
        try:
            call(0.3)
        except TimeoutError:
            return True
        return False

    def fails(self, call):
        try:
            call()
        except BROKEN:
            return True
        return False

    def dies(self):
        with contextlib.suppress(*BROKEN):
            self.engine.wait(10)
        return self.engine.popen.poll() is not None

    def slept(self, level=1):
        return self.post(f"/sleep?level={level}")

    def staged(self):
        self.slept(2)
        self.post("/wake_up?tags=weights")
        reload = self.post("/collective_rpc", {"method": "reload_weights"})
        self.post("/wake_up?tags=kv_cache")
        return reload

    def stream(self, tokens=1800):
        stream = self.engine.open_stream(tokens)
        self.until(lambda: self.truth()["running"] == 1)
        return stream

    def quiet_after_abort(self):
        stream = self.stream()
        self.post("/pause?mode=abort")
        stream.read()
        return self.gauge("num_requests_running")


def took(call) -> float:
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


# fault, its argument, and what must then be seen
PROBES = [
    ("pause_ignored", True, lambda lab: lab.post("/pause?mode=wait").status == 200 and not lab.flag("paused")),
    ("pause_lies", True, lambda lab: lab.flag("paused") and lab.truth()["pause"] is None),
    ("resume_ignored", True, lambda lab: [lab.post(p).status for p in ("/pause", "/resume")] and lab.flag("paused")),
    ("pause_wait_stuck", True, lambda lab: lab.hangs(lambda s: lab.post("/pause?mode=wait", timeout=s))),
    (
        "scheduler_stuck",
        True,
        lambda lab: (
            lab.hangs(lambda s: lab.post("/v1/completions", GOLDEN, s))
            and lab.engine.open_stream(5)
            and lab.until(lambda: lab.gauge("num_requests_waiting_by_reason")[1] >= 1)
        ),
    ),
    (
        "disconnect_hidden",
        True,
        lambda lab: lab.stream(900).close() is None and time.sleep(0.1) is None and lab.truth()["running"] == 1,
    ),
    ("sleep_level_ignored", 1, lambda lab: lab.slept(2).json["level"] == 2 and lab.truth()["level"] == 1),
    (
        "sleep_noop",
        True,
        lambda lab: lab.slept().status == 200 and not lab.truth()["asleep"] and not lab.state()["awake"],
    ),
    ("sleep_keeps", 16000, lambda lab: lab.slept().status == 200 and lab.gpu.used() > 16000),
    ("sleep_frees_nothing", True, lambda lab: lab.slept().status == 200 and lab.gpu.used() == lab.awake_mib),
    ("sleep_5xx_before", True, lambda lab: lab.slept().status == 500 and lab.gpu.used() == lab.awake_mib),
    ("sleep_5xx_after", True, lambda lab: lab.slept().status == 500 and lab.gpu.used() < 2000),
    ("sleep_slow", 0.4, lambda lab: took(lab.slept) > 0.4),
    ("sleep_hangs", True, lambda lab: lab.hangs(lambda s: lab.post("/sleep", timeout=s)) and not lab.truth()["asleep"]),
    (
        "sleep_residue_grows",
        500,
        lambda lab: [lab.slept(), lab.post("/wake_up"), lab.slept()] and lab.gpu.used() > 2500,
    ),
    ("sleep_host_oom", True, lambda lab: lab.slept(1).status == 500 and lab.dies()),
    ("dies_after_sleep", 0.2, lambda lab: lab.slept().status == 200 and lab.dies()),
    ("memory_taken", 90000, lambda lab: lab.slept().status == 200 and lab.post("/wake_up").status == 500),
    (
        "wake_noop",
        True,
        lambda lab: lab.slept() and lab.post("/wake_up").json["status"] == "awake" and lab.flag("sleeping"),
    ),
    (
        "wake_half",
        True,
        lambda lab: (
            lab.slept() and lab.post("/wake_up").json["status"] == "awake" and lab.truth()["asleep"] == ["kv_cache"]
        ),
    ),
    (
        "wake_5xx_after",
        True,
        lambda lab: lab.slept() and lab.post("/wake_up").status == 500 and not lab.flag("sleeping"),
    ),
    ("wake_kills", True, lambda lab: lab.slept() and lab.post("/wake_up").status == 500 and lab.dies()),
    ("wake_slow", 0.4, lambda lab: lab.slept() and took(lambda: lab.post("/wake_up")) > 0.4),
    ("wake_leaves_paused", True, lambda lab: lab.slept() and lab.post("/wake_up") and lab.flag("paused")),
    (
        "wake_hangs_output",
        True,
        lambda lab: (
            lab.slept()
            and lab.post("/wake_up")
            and lab.hangs(lambda s: lab.post("/v1/completions", GOLDEN, s))
            and lab.get("/health").status == 200
        ),
    ),
    ("dies_after_wake", 0.2, lambda lab: lab.slept() and lab.post("/wake_up").status == 200 and lab.dies()),
    ("reload_5xx", True, lambda lab: lab.staged().status == 500),
    ("reload_noop", True, lambda lab: lab.staged().status == 200 and set(lab.ids()) == {0}),
    (
        "reload_wrong",
        True,
        lambda lab: lab.staged().status == 200 and lab.ids() != lab.golden and set(lab.ids()) != {0},
    ),
    ("reload_few_ranks", 0, lambda lab: lab.staged().json == {"results": []}),
    ("reset_fails", True, lambda lab: lab.post("/reset_prefix_cache").json == {"success": False}),
    (
        "prefix_stale",
        True,
        lambda lab: (
            lab.slept()
            and lab.post("/wake_up")
            and set(lab.ids()) == {0}
            and set(lab.engine.complete("another")) != {0}
            and lab.post("/reset_prefix_cache").json["success"]
            and lab.ids() == lab.golden
        ),
    ),
    ("garbage", True, lambda lab: set(lab.ids()) == {0}),
    ("wrong_tokens", True, lambda lab: lab.ids() != lab.golden and 0 not in lab.ids()),
    (
        "logprobs_off",
        1.5,
        lambda lab: lab.post("/v1/completions", GOLDEN).json["choices"][0]["logprobs"]["token_logprobs"][0] < -3.6,
    ),
    (
        "hang_output",
        True,
        lambda lab: (
            lab.hangs(lambda s: lab.post("/v1/completions", GOLDEN, s))
            and [lab.get(path).status for path in ("/health", "/version", "/v1/models", "/is_paused")] == [200] * 4
        ),
    ),
    ("slow_tokens", 10, lambda lab: took(lab.ids) > 0.5),
    ("cut_streams", 5, lambda lab: lab.engine.open_stream(900).read().finish_reason == "abort"),
    ("short_answers", 2, lambda lab: len(lab.ids()) < 8),
    ("error_completions", 429, lambda lab: lab.post("/v1/completions", GOLDEN).status == 429),
    ("wrong_model", "other", lambda lab: lab.get("/v1/models").json["data"][0]["id"] == "other"),
    ("gauge_stale", 2, lambda lab: lab.quiet_after_abort() == [2]),
    ("gauge_zero", True, lambda lab: lab.stream() and lab.gauge("num_requests_running") == [0]),
    ("gauge_missing", "vllm:num_requests_waiting", lambda lab: lab.gauge("num_requests_waiting") == []),
    ("gauge_nan", True, lambda lab: "nan" in str(lab.gauge("num_requests_running"))),
    ("gauge_by_pid", True, lambda lab: lab.gauge("num_requests_running") == [0, 3]),
    ("sleep_gauge_wrong", "discard_all", lambda lab: lab.state()["discard_all"] == 1),
    ("sleep_gauge_twice", True, lambda lab: sum(lab.state().values()) == 2),
    ("metrics_500", True, lambda lab: lab.get("/metrics").status == 500),
    ("metrics_slow", 0.4, lambda lab: took(lambda: lab.get("/metrics")) > 0.4),
    ("health_slow", 0.4, lambda lab: took(lambda: lab.get("/health")) > 0.4),
    ("health_503", True, lambda lab: lab.get("/health").status == 503),
    (
        "hung",
        True,
        lambda lab: lab.get("/health").status == 200 and lab.hangs(lambda s: lab.get("/is_sleeping", timeout=s)),
    ),
    ("version_wrong", "0.99", lambda lab: lab.get("/version").json == {"version": "0.99"}),
    ("is_sleeping_lies", "true", lambda lab: lab.flag("sleeping") and lab.truth()["pause"] is None),
    ("http_500", "/pause", lambda lab: lab.post("/pause").status == 500 and not lab.flag("paused")),
    ("http_404", "/is_paused", lambda lab: lab.get("/is_paused").status == 404),
    (
        "http_slow",
        "/version:0.4",
        lambda lab: took(lambda: lab.get("/version")) > 0.4 > took(lambda: lab.get("/health")),
    ),
    ("http_hang", "/pause", lambda lab: lab.hangs(lambda s: lab.post("/pause", timeout=s)) and not lab.flag("paused")),
    ("http_lost", "/pause", lambda lab: lab.fails(lambda: lab.post("/pause")) and lab.flag("paused")),
    ("http_reset", "/pause", lambda lab: lab.fails(lambda: lab.post("/pause")) and not lab.flag("paused")),
    ("http_truncated", "/version", lambda lab: lab.fails(lambda: lab.get("/version"))),
    ("http_dribble", "/version", lambda lab: took(lambda: lab.get("/version")) > 0.8),
    ("http_empty", "/version", lambda lab: lab.get("/version") == (200, "")),
    ("http_html", "/version", lambda lab: lab.get("/version").text.startswith("<html>")),
    ("http_not_json", "/version", lambda lab: lab.fails(lambda: lab.get("/version").json)),
    ("http_wrong_types", "/is_paused", lambda lab: lab.get("/is_paused").json == {"is_paused": "False?"}),
    ("http_list", "/is_paused", lambda lab: lab.get("/is_paused").json == [{"is_paused": False}]),
    ("http_garbage", "/version", lambda lab: lab.fails(lambda: lab.get("/version"))),
]


@pytest.mark.parametrize(("name", "arg", "holds"), PROBES, ids=[probe[0] for probe in PROBES])
def test_switch_at_run_time(tmp_path, name, arg, holds):
    with (
        sim_gpu(tmp_path) as gpu,
        sim_engine(tmp_path, gpu=gpu, enable_sleep_mode=True, speed=500, token_rate=200) as engine,
    ):
        lab = Lab(engine, gpu)
        engine.set_fault(name, arg)
        assert holds(lab), engine.truth()


def test_reset_that_lies_keeps_old_blocks(tmp_path):
    with sim_engine(tmp_path, enable_sleep_mode=True, fault=["prefix_stale", "reset_lies"]) as engine:
        engine.complete()
        engine.request("POST", "/sleep")
        engine.request("POST", "/wake_up")
        assert engine.request("POST", "/reset_prefix_cache").json == {"success": True}
        assert set(engine.complete()) == {0}


def test_body_that_never_ends(tmp_path):
    with sim_engine(tmp_path) as engine:
        engine.set_fault("http_endless", "/version")
        conn = http.client.HTTPConnection("localhost")
        conn.sock = engine_socket(engine)
        conn.request("GET", "/version")
        assert len(conn.getresponse().read(200_000)) == 200_000
        conn.close()


def engine_socket(engine):
    import socket

    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(str(engine.socket))
    return sock


def test_one_rank_stays_awake(tmp_path):
    with (
        sim_gpu(tmp_path, count=2) as gpu,
        sim_engine(tmp_path, gpu=gpu, data_parallel_size=2, enable_sleep_mode=True) as engine,
    ):
        engine.set_fault("sleep_rank_awake", "1")
        assert engine.request("POST", "/sleep?level=1").status == 200
        assert gpu.used(0) < 2000
        assert gpu.used(1) > 70_000


def test_a_fault_wears_off(tmp_path):
    with sim_engine(tmp_path) as engine:
        engine.set_fault("http_500", "/is_paused", times=2)
        statuses = [engine.request("GET", "/is_paused").status for _unused in range(4)]
        assert statuses == [500, 500, 200, 200]
        engine.set_fault("http_500", "/is_paused")
        assert engine.request("GET", "/is_paused").status == 500
        engine.clear_faults()
        assert engine.request("GET", "/is_paused").status == 200


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("start_crash=0.1", "Engine core initialization failed"),
        ("start_unreadable", "PermissionError"),
        ("start_poisoned", "corrupted compilation artifact"),
        ("start_no_kv", "No available memory for the cache blocks"),
    ],
)
def test_a_start_that_fails(tmp_path, fault, said):
    with sim_gpu(tmp_path) as gpu, sim_engine(tmp_path, gpu=gpu, wait=False, fault=[fault]) as engine:
        assert engine.wait() == 1
        assert said in engine.output()
        assert gpu.used() == 0


@pytest.mark.parametrize("fault", ["start_hang", "start_refuse=60"])
def test_a_start_without_end(tmp_path, fault):
    with sim_engine(tmp_path, wait=False, fault=[fault]) as engine:
        engine.until(engine.socket.exists, "its socket")
        with pytest.raises(Failed):
            engine.until(engine.answers, "an answer", timeout=0.7)
        assert engine.popen.poll() is None
        assert engine.socket.exists()


def test_a_small_kv_cache(tmp_path):
    with sim_gpu(tmp_path) as gpu, sim_engine(tmp_path, gpu=gpu, fault=["start_small_kv=10"]):
        assert gpu.used() < 25_000


def test_term_ignored(tmp_path):
    with sim_engine(tmp_path, fault=["term_ignored"]) as engine:
        with pytest.raises(Failed):
            engine.terminate(timeout=1.0)
        assert engine.request("GET", "/health").status == 200


def test_term_stalls_streams(tmp_path):
    with sim_engine(tmp_path, token_rate=500, shutdown_timeout=1, fault=["term_stalls"]) as engine:
        stream = engine.open_stream(1800)
        while not engine.truth()["cores"][0]["running"]:
            time.sleep(0.01)
        with pytest.raises(Failed):
            engine.terminate(timeout=2.0)
        assert stream.thread.is_alive()
        before = len(stream.ids)
        time.sleep(0.2)
        assert len(stream.ids) == before


def test_term_slow_and_exit_code(tmp_path):
    with sim_engine(tmp_path, fault=["term_slow=0.5", "term_exit=3"]) as engine:
        begin = time.monotonic()
        assert engine.terminate() == 3
        assert time.monotonic() - begin > 0.5


def test_term_leaves_the_core_behind(tmp_path):
    with sim_gpu(tmp_path) as gpu, sim_engine(tmp_path, gpu=gpu, fault=["term_orphans"]) as engine:
        assert engine.terminate() == 0
        assert list(gpu.processes()) == engine.core_pids()


def test_memory_comes_back_late(tmp_path):
    with sim_gpu(tmp_path) as gpu, sim_engine(tmp_path, gpu=gpu, fault=["memory_lingers=1.5"]) as engine:
        assert engine.terminate() == 0
        assert gpu.used() > 70_000
        assert gpu.processes() == {}
        deadline = time.monotonic() + 10
        while gpu.used():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_killed_engine_leaves_shared_memory_files(tmp_path):
    with sim_engine(tmp_path, fault=["shm_left=64"]) as engine:
        folder = engine.state_dir / "shm"
        assert len(list(folder.iterdir())) == 1
        os.killpg(engine.pid, signal.SIGKILL)
        engine.wait()
        assert len(list(folder.iterdir())) == 1
        engine.start()
        engine.terminate()
        assert len(list(folder.iterdir())) == 1  # its own is gone, the killed one's stays


def test_probes_and_tests_cover_the_table():
    """Every switch has a probe above or a test by its name, here or beside."""
    texts = "".join(path.read_text() for path in HERE.parent.joinpath("unit", "sim").glob("test_*.py"))
    named = {name for name in faults.NAMES if re.search(f'"{name.removeprefix("nvml:")}["=]', texts)}
    assert sorted(faults.NAMES - named) == []
    json.dumps([probe[:2] for probe in PROBES])  # arguments are what faults.json can hold
