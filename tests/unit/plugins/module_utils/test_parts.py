# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files, leases, locks, metrics and capacity: the parts that need no engine."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import capacity, config, lease, store
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.deadline import Deadline
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.engine import parse_metrics
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import Refused, Surprise, UsageError
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.lease import LeaseRequest

DECLARED = {
    "schema": 1,
    "engine": "chat",
    "unit": "vllm-engine@chat.service",
    "user": "vllm",
    "config_file": "/etc/vllm/engines/chat.yaml",
    "env_file": "/etc/vllm/engines/chat.env",
    "socket": "/run/vllm/chat/engine.sock",
    "runtime": "/opt/vllm/engines/chat",
    "runtime_version": "0.32.0",
    "model": "/srv/models/tiny",
    "served_model_name": "tiny",
    "gpus": [],
    "gate": {
        "master_socket": "/run/vllm-gate/master.sock",
        "map": "/var/lib/vllm/gate/chat.map",
        "proxy": "engine_chat",
        "address": "127.0.0.1",
        "port": 8001,
    },
    "router_detection": 3,
    "drain_timeout": 300,
    "shutdown_timeout": 30,
    "stop_timeout": 400,
    "start_timeout": 900,
    "warmup": [],
    "config_digest": "0",
}


@pytest.fixture
def host(tmp_path, monkeypatch):
    """An empty host in a directory."""
    monkeypatch.setenv(store.ROOT_VARIABLE, str(tmp_path))
    return tmp_path


def declare(host, **changes):
    path = host / "etc/vllm/lifecycle/chat.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**DECLARED, **changes}))


def test_a_declared_engine_is_read_whole(host):
    declare(host)
    engine = config.load("chat")
    assert engine.gate.proxy == "engine_chat"
    assert engine.drain_timeout == 300
    assert config.known_engines() == ["chat"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": 2}, "has schema 2, this library reads 1"),
        ({"drain_timeout": "300"}, "wrong type for drain_timeout"),
        ({"drain_timeout": True}, "wrong type for drain_timeout"),
        ({"gate": "yes"}, "wrong type for gate"),
        ({"gate": {"proxy": "p"}}, "missing 4 required positional arguments"),
    ],
)
def test_a_declaration_that_is_not_ours_is_refused(host, changes, says):
    declare(host, **changes)
    with pytest.raises(UsageError, match=says) as caught:
        config.load("chat")
    assert "baremetal.vllm.site" in caught.value.next_step


@pytest.mark.parametrize("name", ["nope", "../../etc/passwd", "", "a" * 40])
def test_an_unknown_engine_is_told_with_the_known_ones(host, name):
    declare(host)
    with pytest.raises(UsageError, match="engines declared there: chat"):
        config.load(name)


def test_files_are_private_and_keep_their_owner_and_mode(host):
    path = host / "x.json"
    store.write_json(path, {"a": 1})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    store.write_json(path, {"a": 2})
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert store.read_json(path) == {"a": 2}
    assert [item.name for item in host.iterdir()] == ["x.json"], "no temporary file stays behind"


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_broken_file_is_an_error_and_never_nothing(host, text):
    path = host / "x.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=r"x\.json"):
        store.read_json(path)


def test_a_lease_goes_on_with_its_beginning_and_its_journal(host):
    lease.take("chat", LeaseRequest("me", reason="fan", run="r1", ttl=50), "drained", "open")
    lease.note("chat", "withdraw", 1.5)
    lease.note("chat", "withdraw", 0.25)
    first = lease.read("chat")
    again = lease.take("chat", LeaseRequest("me", ttl=50), "restarted", "closed")
    assert (again.since, again.restore, again.reason, again.run) == (first.since, "open", "fan", "r1")
    assert again.purpose == "drained", "what was drained on purpose stays so"
    assert again.timings() == {"withdraw": 1.75}
    lease.release("chat")
    assert lease.read("chat") is None


def test_a_lease_is_held_against_others_until_it_expires(host):
    held = lease.take("chat", LeaseRequest("me", ttl=50), "drained", "open")
    assert not held.held_against("me", time.time())
    assert held.held_against("you", time.time())
    assert not held.held_against("you", time.time() + 51)


@pytest.mark.parametrize("value", [{"owner": "me"}, {"owner": "me", "expires": "soon"}])
def test_a_lease_file_that_is_no_lease_is_an_error(host, value):
    store.write_json(store.state_dir("chat") / "lease.json", value)
    with pytest.raises(UsageError, match="is no lease"):
        lease.read("chat")


def test_the_lock_is_held_by_one_process_and_freed_by_its_death(host):
    code = (
        "import time; from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import lease, deadline\n"
        "with lease.locked('chat', deadline.Deadline(5)): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(Refused, match=f"being changed by process {holder.pid} "),
            lease.locked("chat", Deadline(0.3)),
        ):
            pytest.fail("two held one lock")
        holder.kill()
        holder.wait()
    with lease.locked("chat", Deadline(1)):
        assert str(os.getpid()) in (store.lock_dir() / "chat.lock").read_text()


METRICS = """
# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 3.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="discard_all"} 0.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="a \\"quoted\\" name"} 5.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+03
"""


def test_metrics_are_read_by_exact_name_and_engine_index():
    seen = parse_metrics(METRICS)
    assert seen.running == {"0": 2, "1": 1}
    assert seen.waiting == {"0": 0, "1": 4}
    assert seen.in_flight == 7
    assert seen.deferred == 3
    assert seen.sleep_state == {"0": "awake"}
    assert seen.finished == {"abort": 5}
    assert seen.tokens == 1500


def test_a_series_that_is_not_there_is_unseen_and_not_zero():
    seen = parse_metrics('vllm:num_requests_running{engine="0"} 0.0\n')
    assert seen.waiting is None
    assert seen.in_flight is None
    assert seen.sleep_state is None


def test_one_engine_behind_several_api_servers_counts_once():
    text = "\n".join(
        f'vllm:num_requests_{kind}{{engine="0",pid="{pid}"}} {value}'
        for kind in ("running", "waiting")
        for pid, value in ((1, 3), (2, 0))
    )
    assert parse_metrics(text).in_flight == 6


def test_every_engine_behind_several_api_servers_counts():
    """Two ranks, and three servers of which one has seen the newest of each."""
    text = "\n".join(
        f'vllm:num_requests_{kind}{{engine="{rank}",pid="{pid}"}} {value}'
        for kind, rank, values in (
            ("running", 0, (0, 2, 0)),
            ("running", 1, (1, 0, 0)),
            ("waiting", 0, (0, 0, 0)),
            ("waiting", 1, (0, 0, 4)),
        )
        for pid, value in enumerate(values)
    )
    states = "\n".join(
        f'vllm:engine_sleep_state{{engine="{rank}",pid="{pid}",sleep_state="{state}"}} 1'
        for rank, state in ((0, "awake"), (1, "weights_offloaded"))
        for pid in range(3)
    )
    seen = parse_metrics(f"{text}\n{states}\n")
    assert seen.running == {"0": 2, "1": 1}
    assert seen.waiting == {"0": 0, "1": 4}
    assert seen.in_flight == 7
    assert seen.sleep_state == {"0": "awake", "1": "weights_offloaded"}, "which observe calls unknown"


@pytest.mark.parametrize("value", ["NaN", "-1", "Inf", "many"])
def test_a_gauge_that_is_no_count_is_no_answer(value):
    with pytest.raises(Surprise, match="is no count"):
        parse_metrics(f'vllm:num_requests_running{{engine="0"}} {value}')


@pytest.mark.parametrize(("first", "second"), [("awake", "discard_all"), ("dreaming", "dreaming")])
def test_sleep_states_that_contradict_are_no_answer(first, second):
    text = "\n".join(f'vllm:engine_sleep_state{{engine="0",sleep_state="{state}"}} 1' for state in (first, second))
    with pytest.raises(Surprise, match="sleep_state"):
        parse_metrics(text)


@pytest.fixture
def gates():
    """Three servers that answer /ready with a status each."""
    servers = {}
    for name, status in (("a", 200), ("b", 503), ("c", 200)):

        class Handler(BaseHTTPRequestHandler):
            answer = status

            def do_GET(self):
                self.send_response(self.answer if self.path == "/ready" else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_arguments):
                """Quiet."""

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers[name] = server
    yield {name: f"http://127.0.0.1:{server.server_port}" for name, server in servers.items()}
    for server in servers.values():
        server.shutdown()
        server.server_close()


def pool(others, min_serving, going=(), name="model 'chat'"):
    return capacity.Pool(name, min_serving, dict(going), others)


def test_capacity_counts_gates_as_a_router_does(gates, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    (row,) = capacity.await_serving([pool(gates, 2)], timeout=1)["pools"]
    assert row == {
        "name": "model 'chat'",
        "min_serving": 2,
        "serving": ["a", "c"],
        "left": {"b": "/ready is 503"},
    }


def test_capacity_that_does_not_come_is_refused_with_pools_numbers_and_names(gates):
    """One pool has enough, two have not: all are counted, and the message has both."""
    a, b, c = (gates[name] for name in "abc")
    nobody = "http://127.0.0.1:1"
    with pytest.raises(Refused) as caught:
        capacity.await_serving(
            [
                pool({"c": c}, 1, {"a": a}, "model 'small'"),
                pool({"b": b, "c": c, "d": nobody}, 3, {"a": a}),
                pool({"b": b}, 1, {"c": c}, "model 'code' in pool 'day'"),
            ],
            timeout=0.1,
        )
    assert re.fullmatch(
        r"model 'chat' without a: 1 of 3 other engine\(s\) serve, 3 must: b: /ready is 503; d: .*refused.*; and "
        r"model 'code' in pool 'day' without c: 0 of 1 other engine\(s\) serve, 1 must: b: /ready is 503\. Next: .*",
        caught.value.text,
    ), caught.value.text
    details = caught.value.details
    assert [row["serving"] for row in details["pools"]] == [["c"], ["c"], []]
    assert set(details["left"]) == {"b", "d"}
    assert "lower min_serving" in caught.value.next_step


def test_capacity_of_a_pool_that_loses_nothing_is_not_counted(gates):
    """What is out already may be changed. Of what gives no answer nobody knows that it is out."""
    a, b = gates["a"], gates["b"]
    assert capacity.await_serving([pool({"b": b}, 1, {"b2": b})], timeout=0)["pools"] == []
    assert capacity.await_serving([pool({}, 1, {"b2": b})], timeout=0)["pools"] == []
    for going in (a, "http://127.0.0.1:1", "uncounted:none"):
        with pytest.raises(Refused, match="0 of 1 other"):
            capacity.await_serving([pool({"b": b}, 1, {"b2": b, "going": going})], timeout=0)


def test_capacity_of_nothing_asks_nobody(gates, monkeypatch):
    monkeypatch.setattr(capacity, "ask", lambda url: pytest.fail(f"{url} was asked"))
    assert capacity.await_serving([pool(gates, 0, {"a": gates["a"]})], timeout=0)["pools"] == []
    assert capacity.await_serving([], timeout=0)["pools"] == []


def test_capacity_that_comes_is_waited_for(gates, monkeypatch):
    looks = []
    real = capacity.ask

    def ask(url):
        looks.append(url)
        return real(url) if len(looks) > 1 else capacity.Answer(False, "not yet")

    monkeypatch.setattr(capacity, "ask", ask)
    (row,) = capacity.await_serving([pool({"a": gates["a"]}, 1)], timeout=30)["pools"]
    assert (row["serving"], len(looks)) == (["a"], 2)


@pytest.mark.parametrize("url", ["gpu1:8001", "http://", "http://[::", "http://gpu1:port", "ftp://gpu1:21", 8001, None])
def test_capacity_of_what_is_no_url_fails_at_once(url):
    for one in (pool({"gpu1/chat": url}, 1), pool({}, 0, {"gpu1/chat": url})):
        with pytest.raises(UsageError, match=r"endpoint gpu1/chat is .* which is no URL"):
            capacity.await_serving([one], timeout=60)


@pytest.mark.parametrize(
    "url",
    [
        "haproxy://10.0.0.2:9999",
        "haproxy://10.0.0.2/pool/e1",
        "haproxy://10.0.0.2:9999/pool/e1; shutdown sessions server pool/e1",
        "haproxy:///run/haproxy.sock/pool/e1",
        "uncounted:",
    ],
)
def test_capacity_of_what_is_no_haproxy_fails_at_once(url):
    with pytest.raises(UsageError, match=r"gpu1/chat is .* no URL"):
        capacity.await_serving([pool({"gpu1/chat": url}, 1)], timeout=60)


def test_capacity_never_counts_an_engine_that_nobody_can_be_asked_about(gates, monkeypatch):
    monkeypatch.setattr(capacity.Deadline, "rest", lambda *_unused: pytest.fail("it waits in vain"))
    others = {**gates, "d": "uncounted:command"}
    (row,) = capacity.await_serving([pool(others, 2)], timeout=60)["pools"]
    assert "d" not in row["serving"]
    with pytest.raises(Refused, match="about d: it has admission command, so nobody but its own host") as caught:
        capacity.await_serving([pool(others, len(others))], timeout=60)
    assert caught.value.details["left"].keys() == {"d"}
    assert "lower min_serving" in caught.value.next_step


def test_capacity_of_a_haproxy_without_an_answer_does_not_count():
    with pytest.raises(Refused, match="0 of 1 other") as caught:
        capacity.await_serving([pool({"a": "haproxy://127.0.0.1:1/pool/e1"}, 1)], timeout=0)
    assert "gives no answer" in caught.value.details["left"]["a"]


def test_capacity_above_what_there_is_fails_at_once(gates):
    begun = time.monotonic()
    with pytest.raises(UsageError, match="model 'chat' without gone: min_serving is 4, yet 3"):
        capacity.await_serving([pool(gates, 4, {"gone": gates["a"]})], timeout=60)
    with pytest.raises(UsageError, match="min_serving is -1"):
        capacity.await_serving([pool(gates, -1)], timeout=60)
    assert time.monotonic() - begun < 30  # a busy machine takes seconds; waiting would take a minute
