# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ten thousand malformed answers, files, observations and options: an error that says so, no traceback, never ok."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import socket
import tempfile
import threading
import typing as t
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import (
    adapters,
    cli,
    config,
    lease,
    observe,
    plan,
    store,
)
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.engine import (
    ROUTES,
    SLEEP_STATES,
    Completion,
    Engine,
    Metrics,
    Served,
    parse_metrics,
)
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import LifecycleError
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.gate import ADMISSIONS, Gate, GateState
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.preload import load
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.transition import Transition
from ansible_collections.baremetal.vllm.plugins.modules import (
    vllm_capacity,
    vllm_drain,
    vllm_engine,
    vllm_golden,
    vllm_info,
    vllm_lora,
    vllm_preload,
    vllm_sleep,
    vllm_wake,
    vllm_weights,
)
from ansible_collections.baremetal.vllm.tests.unit.plugins.module_utils import lifecycle_factory as made
from ansible_collections.baremetal.vllm.tests.unit.plugins.module_utils.test_parts import DECLARED

EXAMPLES = {
    "metrics": 2500,
    "answers": 3000,
    "observations": 500,
    "plans": 2500,
    "files": 800,
    "gates": 500,
    "options": 600,
    "words": 200,
}


def test_these_are_ten_thousand():
    assert sum(EXAMPLES.values()) >= 10_000


def examples(name: str):
    """The same ones in each run, without a limit of time for each."""
    return hypothesis.settings(
        max_examples=EXAMPLES[name],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


# What a JSON parser may meet: also numbers, depths and strings that Python's own gives or refuses.
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.sampled_from(["", "true", "0", "NaN"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)


# Metrics.

NAMES = st.sampled_from(
    [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:engine_sleep_state",
        "vllm:sleep_mode_operations_in_flight",
        "vllm:request_success_total",
        "vllm:generation_tokens_total",
        "vllm:lora_requests_info",
        "vllm:num_requests_running_",
        "num_requests_running",
        "# TYPE vllm:num_requests_running",
        "",
    ]
)
LABELS = st.dictionaries(
    st.sampled_from(["engine", "sleep_state", "reason", "finished_reason", "model_name", "pid"]),
    st.one_of(st.text(max_size=5), st.sampled_from(["0", "1", "awake", "discard_all", "deferred", "abort"])),
    max_size=3,
)
NUMBERS = st.one_of(
    st.sampled_from(["0.0", "1.0", "3", "1e3", "NaN", "Inf", "-1", "1e999", "0x10", "1_0", "", "1.0 1795961815"]),
    st.floats().map(str),
    st.text(max_size=4),
)


@st.composite
def samples(draw) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in draw(LABELS).items())
    brackets = draw(st.sampled_from(["{%s}", "{%s", "%s}", "{{%s}}", ""]))
    return f"{draw(NAMES)}{brackets.replace('%s', labels)}{draw(st.sampled_from([' ', '', chr(9)]))}{draw(NUMBERS)}"


METRICS = st.one_of(st.text(max_size=80), st.lists(samples(), max_size=6).map("\n".join))


def counts(values: dict | None) -> bool:
    return values is None or all(isinstance(value, int) and value >= 0 for value in values.values())


def check_metrics(seen: Metrics, text: str) -> None:
    assert counts(seen.running)
    assert counts(seen.waiting)
    assert counts(seen.finished)
    assert all(value is None or value >= 0 for value in (seen.deferred, seen.tokens, seen.sleep_operations))
    assert set((seen.sleep_state or {}).values()) <= set(SLEEP_STATES)
    for name, found in (("running", seen.running), ("waiting", seen.waiting)):
        if f"vllm:num_requests_{name}" not in text:
            assert found is None, "a series that is not there is not seen"
            assert seen.in_flight is None


@examples("metrics")
@hypothesis.given(METRICS)
def test_metrics(text):
    try:
        seen = parse_metrics(text)
    except LifecycleError:
        return
    check_metrics(seen, text)


# Answers of an engine.


class Raw:
    """A server on a Unix socket whose answers are bytes, by the path that was asked."""

    def __init__(self, path: Path) -> None:
        self.answers: dict[str, bytes] = {}
        self.default = b""
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while True:
            client, _unused = self.listener.accept()
            with client, contextlib.suppress(OSError):
                client.settimeout(5)
                if not (asked := client.recv(65536)):
                    return  # close() has connected
                path = asked.split(b" ", 2)[1].split(b"?")[0].decode("latin-1") if b" " in asked else ""
                client.sendall(self.answers.get(path, self.default))
                client.shutdown(socket.SHUT_WR)
                while client.recv(65536):  # a reset would take away what was sent
                    pass

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(self.listener.getsockname())
        self.thread.join(10)
        self.listener.close()


@pytest.fixture(scope="module")
def host():
    """A host in a directory with a declared engine, a raw server in its place, and no systemd."""
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        root = Path(folder)
        patch.setenv(store.ROOT_VARIABLE, str(root))
        patch.setenv("PATH", str(root))
        declared = {**DECLARED, "socket": str(root / "engine.sock"), "env_file": str(root / "chat.env")}
        declared["gate"] = {
            **DECLARED["gate"],
            "master_socket": str(root / "master.sock"),
            "map": str(root / "chat.map"),
        }
        (root / "etc/vllm/lifecycle").mkdir(parents=True)
        (root / "etc/vllm/lifecycle/chat.json").write_text(json.dumps(declared))
        yield root


@pytest.fixture(scope="module")
def raw(host):
    server = Raw(host / "engine.sock")
    yield server
    server.close()


BODIES = st.one_of(
    VALUES.map(json.dumps).map(str.encode),
    st.binary(max_size=40),
    METRICS.map(lambda text: text.encode("utf-8", "replace")),
    st.sampled_from(
        [
            b"",
            b"[" * 20000,
            b'{"a":' * 10000,
            b"1" * 5000,
            b"<html><body>502 Bad Gateway</body></html>",
            b'{"is_paused": "true"}',
            b'{"is_sleeping": 1}',
            b'{"version": null}',
            b'{"data": [{"id": 7}]}',
            b'{"data": {"id": "tiny"}}',
            b'{"results": 2}',
            b'{"success": "true"}',
            b'{"choices": []}',
            b'{"choices": [{"finish_reason": "length", "text": "x"}], "usage": {"completion_tokens": Infinity}}',
            b'{"choices": [{"finish_reason": "length", "text": "x"}], "usage": {"completion_tokens": "many"}}',
            b'{"choices": [{"finish_reason": "stop", "text": "", "token_ids": 5}], "usage": {"completion_tokens": 1}}',
            b'{"error": {"message": "x", "code": 500}}',
        ]
    ),
)
STATUSES = st.sampled_from([200, 200, 200, 201, 204, 301, 304, 400, 401, 404, 405, 429, 500, 503, 599, 100, 999])


class Reply(t.NamedTuple):
    """Bytes, and what an HTTP client may make of them: status 0 where they are no whole answer."""

    data: bytes
    status: int
    body: bytes


@st.composite
def replies(draw) -> Reply:
    status, body = draw(STATUSES), draw(BODIES)
    kind = draw(
        st.sampled_from(["whole", "whole", "whole", "short", "long", "no length", "chunked", "coded", "no http"])
    )
    if kind not in ("whole", "no length") and status in (100, 204, 304):
        status = 200  # those have no body that could be broken
    head = f"HTTP/1.1 {status} {draw(st.sampled_from(['OK', '', 'X' * 300]))}\r\n".encode()
    if kind == "whole" and status >= 200:
        bare = status in (204, 304)
        length = b"" if bare else b"Content-Length: %d\r\n" % len(body)
        return Reply(head + length + b"\r\n" + (b"" if bare else body), status, b"" if bare else body)
    if kind == "no length" and status not in (100, 204, 304):
        return Reply(head + b"\r\n" + body, status, body)  # until the connection ends
    broken = {
        "short": head + b"Content-Length: %d\r\n\r\n" % (len(body) + 7) + body,
        "long": head + b"Content-Length: -5\r\n\r\n" + body,
        "chunked": head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body,
        "coded": head + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\nno gzip" % (len(body) + 7) + body,
        "no http": draw(st.binary(max_size=60)),
    }
    data = broken.get(kind, b"HTTP/1.1 \r\n\r\n" + body)
    return Reply(data, 0, b"")


def one_of_ours(value: t.Any) -> bool:
    """What the calls return."""
    if isinstance(value, Completion):
        return isinstance(value.finish_reason, str) and isinstance(value.tokens, int)
    if isinstance(value, list):
        return all(isinstance(item, (str, Served)) for item in value)
    return isinstance(value, (bool, str, int, Metrics)) or value is None


CALLS = {
    "healthy": lambda engine: engine.healthy(5),
    "version": lambda engine: engine.version(5),
    "models": lambda engine: engine.models(5),
    "served": lambda engine: engine.served(5),
    "load": lambda engine: engine.load_adapter("sql", "/srv/sql", 5),
    "unload": lambda engine: engine.unload_adapter("sql", 5),
    "is_paused": lambda engine: engine.is_paused(5),
    "is_sleeping": lambda engine: engine.is_sleeping(5),
    "metrics": lambda engine: engine.metrics(5),
    "pause": lambda engine: engine.pause("wait", 5),
    "resume": lambda engine: engine.resume(5),
    "sleep": lambda engine: engine.sleep(1, 5),
    "release": lambda engine: engine.release_kv_cache(5),
    "wake": lambda engine: engine.wake("", 5),
    "reload": lambda engine: engine.reload_weights(5),
    "reset": lambda engine: engine.reset_prefix_cache(5),
    "complete": lambda engine: engine.complete(prompt_tokens=4, max_tokens=1, timeout=5),
}


@examples("answers")
@hypothesis.given(call=st.sampled_from(list(CALLS)), reply=replies())
def test_answers(raw, call, reply):
    raw.default = reply.data
    engine = Engine(config.load("chat"))
    try:
        value = CALLS[call](engine)
    except LifecycleError as error:
        assert str(error), "it says what was wrong"
        return
    finally:
        engine.close()
    assert one_of_ours(value)
    assert reply.status or reply.data.startswith(b"HTTP/1."), f"{value!r} was made out of no answer"
    if call == "healthy":
        assert value is (reply.status == 200)
    elif call in ("is_paused", "is_sleeping") and value is None:
        assert reply.status == 404
    else:
        assert 200 <= reply.status < 300, f"{call} was content with {reply.status}"
    if call == "complete":
        assert json.loads(reply.body)["choices"][0]["finish_reason"] == value.finish_reason


def answer(content: t.Any) -> bytes:
    body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


GOOD = {
    "/health": answer(""),
    "/is_sleeping": answer({"is_sleeping": False}),
    "/is_paused": answer({"is_paused": False}),
    "/version": answer({"version": "0.33.0"}),
    "/v1/models": answer({"data": [{"id": "tiny"}]}),
    "/metrics": answer(
        'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n'
        'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1\n'
    ),
}


# What the routes say of what it can do, which is no sign of its state.
CAN = dict.fromkeys(ROUTES.values(), b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n")


def state_of(engine_config: config.EngineConfig) -> tuple[str, t.Any, list[str]]:
    looker = observe._Looker()
    api = observe._observe_api(engine_config, looker)
    state, _level, reasons = observe.derive(
        made.unit_state(), api, made.gate_state(), has_gate=True, unseen=looker.unseen
    )
    return state, api, reasons


def test_the_good_answers_are_those_of_an_engine_that_serves(raw):
    raw.answers = {**GOOD, **CAN}
    state, api, _reasons = state_of(config.load("chat"))
    assert (state, api.capabilities) == ("serving", list(ROUTES))
    raw.answers = {}


@pytest.mark.parametrize("path", CAN)
def test_what_it_can_do_is_not_known_from_nonsense(raw, path):
    for reply in (b"", answer({}), b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n"):
        raw.answers = {**GOOD, **CAN, path: reply}
        state, api, _reasons = state_of(config.load("chat"))
        assert (state, api.capabilities) == ("serving", None)
    raw.answers = {}


@examples("observations")
@hypothesis.given(path=st.sampled_from(list(GOOD)), reply=replies())
def test_one_malformed_answer_among_good_ones(raw, path, reply):
    hypothesis.assume(reply.status != 404)  # says that there is no such route, which has tests of its own
    raw.answers = {**GOOD, **CAN, path: reply.data}
    try:
        state, api, reasons = state_of(config.load("chat"))
    finally:
        raw.answers = {}
    if path == "/health":
        assert state == ("serving" if reply.status == 200 else "unknown")
    elif state != "unknown":
        assert reply.status in (200, 201, 204), f"{state} with {reply}"
        assert path in ("/metrics", "/v1/models", "/version") or json.loads(reply.body)
        if path == "/metrics" and b"vllm:num_requests_running" not in reply.body:
            assert api.in_flight is None
    assert reasons or state == "serving"


# Observations and plans.

TEXTS = st.sampled_from(["", "x", "active", "success"])
UNITS = st.one_of(
    st.none(),
    st.builds(
        made.UnitState,
        load_state=st.just("loaded"),
        active_state=st.sampled_from(
            [
                "active",
                "active",
                "active",
                "inactive",
                "failed",
                "activating",
                "deactivating",
                "reloading",
                "maintenance",
            ]
        ),
        sub_state=TEXTS,
        result=TEXTS,
        n_restarts=st.integers(0, 3),
        main_pid=st.sampled_from([0, 10, 11]),
        control_group=TEXTS,
        started_at=st.floats(0, 9),
        need_daemon_reload=st.booleans(),
        enabled=TEXTS,
        job=TEXTS,
        pids=st.lists(st.integers(1, 20), max_size=2),
    ),
)
MAYBE = st.sampled_from([None, True, False])
INDEXED = st.one_of(st.none(), st.dictionaries(st.sampled_from(["0", "1"]), st.integers(0, 3), max_size=2))
APIS = st.one_of(
    st.none(),
    st.builds(
        made.ApiState,
        healthy=st.sampled_from([True, True, True, False]),
        version=st.sampled_from([None, "0.33.0"]),
        dev_mode=MAYBE,
        paused=MAYBE,
        sleeping=MAYBE,
        metrics=st.one_of(
            st.none(),
            st.builds(
                made.Metrics,
                running=INDEXED,
                waiting=INDEXED,
                sleep_state=st.one_of(
                    st.none(),
                    st.dictionaries(st.sampled_from(["0", "1"]), st.sampled_from(list(SLEEP_STATES)), max_size=2),
                ),
                sleep_operations=st.sampled_from([None, 0, 0, 1]),
            ),
        ),
    ),
)
GATES = st.one_of(
    st.none(),
    st.builds(
        GateState, st.sampled_from(ADMISSIONS), st.booleans(), st.booleans(), st.integers(0, 2), st.integers(0, 9)
    ),
)
RECORDS = st.one_of(
    st.none(),
    st.builds(
        made.SleepRecord,
        main_pid=st.just(10),
        level=st.integers(-1, 3),
        kv_only=st.booleans(),
        awake=st.lists(st.sampled_from(["weights", "reloaded", "kv_cache", "else"]), max_size=3),
        proved=st.booleans(),
    ),
)
LEASES = st.one_of(
    st.none(),
    st.builds(
        made.lease,
        owner=st.sampled_from(["ours", "theirs"]),
        purpose=st.sampled_from([*plan.WANTED, "else"]),
        restore=st.sampled_from([*ADMISSIONS, ""]),
        run=st.sampled_from(["", "r1"]),
    ),
)
UNSEEN = st.dictionaries(st.sampled_from(["unit", "gate", "gpu", "api.metrics", "api.healthy"]), TEXTS, max_size=2)
OPTIONS = st.builds(
    plan.Options,
    lease_against=st.sampled_from(["", "", "theirs"]),
    owner=st.sampled_from(["ours", "theirs", ""]),
    force=st.booleans(),
    run=st.sampled_from(["", "r1"]),
    level=st.integers(0, 2),
    kv_only=st.booleans(),
    deepen=st.booleans(),
)
LASTS = st.sampled_from(
    [None, {}, {"restarted_run": "r1", "restarted_pid": 10}, {"restarted_run": None, "restarted_pid": None}]
)


@examples("plans")
@hypothesis.given(
    UNITS, APIS, GATES, RECORDS, LEASES, UNSEEN, LASTS, st.booleans(), st.sampled_from(plan.WANTED), OPTIONS
)
def test_plans(unit, api, gate, record, held, unseen, last, has_gate, wanted, options):
    now = made.observation(
        unit=unit, api=api, gate=gate, sleep=record, held=held, unseen=unseen, last=last, has_gate=has_gate
    )
    assert now.state in observe.STATES
    assert now.reasons or now.state != "unknown"
    try:
        steps = plan.plan(wanted, now, options)
    except LifecycleError as error:
        assert error.next_step, "an error says what to do"
        return
    names = [step.name for step in steps]
    after = plan.predict(now, steps, options)
    assert after["state"] in observe.STATES
    assert all(hasattr(Transition, f"_{name}") for name in names)
    if now.state == "unknown" and steps:
        assert "stop" in names, "what is unknown is only ever stopped"
        assert not {"prove", "resume", "pause", "sleep", "wake"} & set(names[: names.index("stop")])
    if "admit" in names:
        assert "prove" in names[: names.index("admit")], "nothing is admitted that was not proved"
    if "sleep" in names and "wake" not in names and now.level == 2 and now.state == "asleep":
        assert names.index("reload") < names.index("sleep")
    if options.lease_against and not options.force:
        assert not steps, "someone else holds it"
    if now.state in ("serving", "withdrawn", "drained") and wanted == "awake":
        assert "wake" not in names, "what is not asleep is not woken"


# Files.

KINDS = [
    "etc/vllm/lifecycle/odd.json",
    "etc/vllm/preload/odd.json",
    "var/lib/vllm/odd/lease.json",
    "var/lib/vllm/odd/sleep.json",
    "var/lib/vllm/odd/adapters.json",
]
READERS: dict[str, t.Callable[[], t.Any]] = {
    KINDS[0]: lambda: config.load("odd"),
    KINDS[1]: lambda: load("odd"),
    KINDS[2]: lambda: lease.read("odd"),
    KINDS[3]: lambda: lease.sleep_record("odd"),
    KINDS[4]: lambda: adapters.read_record("odd", made.unit_state()),
}
RIGHT: dict[str, dict[str, t.Any]] = {
    KINDS[0]: DECLARED
    | {
        "preload": {"daemon": "odd", "mode": "copy", "fallback": True, "wait": 5},
        "traits": {"dtype": "bfloat16", "lora": True, "tensor_parallel": 2},
        "sleep_mode": True,
        "lora": {"max_rank": 8},
        "adapters": [{"name": "sql", "path": "/srv/sql", "prove": False}],
    },
    KINDS[1]: {
        "daemon": "odd",
        "unit": "u",
        "socket_dir": "/run",
        "sockets": ["a"],
        "health_port": 1,
        "start_timeout": 5,
        "gpus": ["GPU-1"],
        "engines": [],
        "weights_mib": 5,
        "model": "/srv/models/m",
        "weights": {"method": "sample", "allowed": ["sha256:00"], "allowed_file": ""},
        "traits": {"expert_parallel": True},
    },
    KINDS[2]: dataclasses.asdict(made.lease()) | {"steps": [{"step": "stop", "seconds": 1.5, "at": 5}]},
    KINDS[3]: dataclasses.asdict(made.sleep_record()) | {"freed_mib": {"GPU-1": 5}},
    KINDS[4]: {
        "main_pid": 10,
        "invocation": "",
        "adapters": {"sql": {"path": "/srv/sql", "digest": "d", "proved": True}},
        "cached": [["sql", "/srv/sql", "d"]],
    },
}


@st.composite
def files(draw) -> tuple[str, str]:
    """One of our files with values of other kinds in it, cut, or something else altogether."""
    kind = draw(st.sampled_from(KINDS))
    value = dict(RIGHT[kind])
    for key in draw(st.lists(st.sampled_from(sorted(value)), min_size=1, max_size=2)):
        if draw(st.booleans()):
            value[key] = draw(VALUES)
        else:
            value.pop(key, None)
    text = draw(st.one_of(st.just(json.dumps(value)), VALUES.map(json.dumps), st.text(max_size=20)))
    return kind, text[: draw(st.integers(0, len(text)))] if draw(st.booleans()) else text


@examples("files")
@hypothesis.given(files())
def test_files(host, file):
    kind, text = file
    path = host / kind
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        value = READERS[kind]()
    except LifecycleError as error:
        assert error.next_step
        return
    finally:
        path.unlink()
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        assert config.fits(found, str(field.type)), f"{field.name} is {found!r}"
    if kind == KINDS[2]:
        value.held_against("me", 5.0)
        value.timings()


# Gates.

ROW = "# pxname,svname,qcur,qmax,scur,smax,slim,stot,status,"
LINES = st.one_of(
    st.sampled_from(
        [
            ROW,
            "engine_chat,BACKEND,0,0,0,0,0,0,UP,",
            "engine_chat,engine,0,0,1,0,0,0,UP 1/2,",
            "engine_chat,engine,,,,,,,DOWN,",
            "engine_chat,BACKEND,x,0,y,0,0,,UP,",
            "engine_chat",
            "0x55 admission open",
            "0x55 admission ajar",
            "0x55 proved 1",
            "0x55 proved yes",
            "Unknown map identifier. Please use #<id> or <file>.",
            "#<PID>          <type>          <reloads>       <uptime>        <version>",
            "# old workers",
            "1234            worker          1               0d00h00m05s     2.6.12",
            "",
        ]
    ),
    st.text(max_size=12),
)


@pytest.fixture(scope="module")
def master(host):
    server = Raw(host / "master.sock")
    yield server
    server.close()


@examples("gates")
@hypothesis.given(st.lists(LINES, max_size=6))
def test_gates(master, lines):
    master.default = "\n".join(lines).encode("utf-8", "surrogatepass")
    try:
        seen = Gate(config.load("chat")).observe()
    except LifecycleError as error:
        assert str(error)
        return
    assert seen.admission in ADMISSIONS
    assert seen.sessions >= 0 or any("-" in line for line in lines)
    assert not seen.ready or ("0x55 proved 1" in lines and "0x55 admission open" in lines)


# Options and words.

MODULES = {
    vllm_drain: ["engine", "engines", "state", "mode", "timeout", "lease", "run", "force"],
    vllm_engine: ["engine", "engines", "state", "mode", "timeout", "lease", "run", "force"],
    vllm_sleep: ["engine", "engines", "level", "kv_only", "deepen", "max_resident_mib", "timeout", "lease"],
    vllm_wake: ["engine", "engines", "timeout", "lease", "force"],
    vllm_golden: ["engine", "engines", "state", "golden", "prompts", "max_tokens", "tolerance", "timeout", "force"],
    vllm_lora: ["engine", "engines", "adapters", "state", "timeout", "lease", "force"],
    vllm_preload: ["daemon", "state", "timeout", "force"],
    vllm_info: ["engine", "engines"],
    vllm_capacity: ["pools"],
    vllm_weights: ["path", "state", "method", "user", "allowed", "allowed_file", "allowed_signers", "timeout"],
}
USUAL = {
    "engine": ["chat", "no-such", "../chat"],
    "engines": [["chat"], ["chat", "chat"], []],
    "state": ["drained", "serving", "started", "stopped", "restarted", "ready", "absent", "matching"],
    "golden": [[], [{}], [{"schema": 1, "subject": {}}]],
    "prompts": [[], [[1, 2]], ["text"], [{"messages": []}], [None]],
    "max_tokens": [1, 0, 5000],
    "tolerance": [{}, {"logprobs": 0.1}, {"vectors": "nan"}, {"colour": 1}],
    "adapters": [[], [{"name": "sql", "path": "/etc"}], [{"name": "tiny", "path": "/x\0"}], [{"name": "sql"}]],
    "level": [0, 1, 2, 3],
    "timeout": [0.2, 0, -1, "nan", "inf", 1e12],
    "lease": [{"owner": "me", "ttl": 5}, {"ttl": "nan"}, {"colour": 1}],
    "pools": [
        [],
        [{"name": "chat", "min_serving": 0, "others": {}}],
        [{"name": "chat", "min_serving": -1, "others": {}}],
        [{"name": "chat", "min_serving": 1, "others": {"a": "http://127.0.0.1:1"}, "going": {"b": "http://[::"}}],
        [{"name": "chat", "min_serving": 1, "others": {"a": "no url"}, "going": {}}],
        [{"name": "chat"}],
    ],
    "daemon": ["base", ""],
    "path": ["/no/such/model", "org/model", "/etc/hostname"],
    "method": ["full", "sample", "half"],
    "allowed": [[], ["sha256:0"], [None]],
}


@st.composite
def option_sets(draw):
    module = draw(st.sampled_from(list(MODULES)))
    options = {}
    for name in draw(st.lists(st.sampled_from(MODULES[module]), unique=True)):
        options[name] = draw(st.one_of(st.sampled_from(USUAL[name]), VALUES) if name in USUAL else VALUES)
    return module, options


def writable(value: t.Any) -> bool:
    """What reaches a module: Ansible sends JSON in UTF-8."""
    with contextlib.suppress(UnicodeEncodeError):
        json.dumps(value, ensure_ascii=False).encode()
        return True
    return False


@examples("options")
@hypothesis.given(option_sets())
def test_option_sets(host, run_module, monkeypatch, chosen):
    """Nothing can be done on this host, which has no systemd: whatever is asked for, it fails and says why."""
    module, options = chosen
    hypothesis.assume(writable(options))
    # Ansible's own tracebacks: of suboptions that are no mapping, and of a whole number without an end.
    hypothesis.assume(all(isinstance(options.get(name, {}), (dict, type(None))) for name in ("lease", "tolerance")))
    hypothesis.assume(math.inf not in map(abs, (one for one in options.values() if isinstance(one, float))))
    monkeypatch.setenv(store.ROOT_VARIABLE, str(host))
    if module is vllm_capacity:
        options["timeout"] = 0.1
    result = run_module(module.main, check_mode=True, **options)
    assert not result["changed"] if "changed" in result else result["failed"]
    if not result.get("failed"):
        assert module in (vllm_info, vllm_capacity)
        assert {seen["state"] for seen in result.get("engines", {}).values()} <= {"unknown"}
    else:
        assert result["msg"]
        assert "Traceback" not in json.dumps(result)


WORDS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "info",
                "set",
                "chat",
                "preflight",
                "ready",
                "drain",
                "settle",
                "weights",
                "golden",
                "record",
                "match",
                "--golden",
                "--max-tokens",
                "/no/such",
                "drained",
                "asleep",
                "--level",
                "2",
                "--check",
            ]
        ),
        st.sampled_from(["--timeout", "nan", "-1", "0.1", "--force", "--mode", "abort", "--", "no-such"]),
        st.text(max_size=5),
    ),
    max_size=6,
)


@examples("words")
@hypothesis.given(WORDS)
def test_words(host, monkeypatch, capsys, words):
    hypothesis.assume(not {"preflight", "ready", "drain", "settle"} & set(words[:1]) or "chat" not in words[1:])
    monkeypatch.setenv(store.ROOT_VARIABLE, str(host))
    try:
        code = cli.main(words)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code in (0, 2, 3)
    assert said.out or said.err
    assert "Traceback" not in said.err
    assert not math.isnan(code)
