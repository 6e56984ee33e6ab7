# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""LoRA adapters as declared state, on simulated engines that behave as vLLM was measured to behave.

Tests ask the engine themselves: what it lists, and what each name answers. A right answer is one that a fresh engine
gives with that adapter.
"""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle import golden, store
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.adapters_apply import Hands
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.engine import Engine
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.errors import Answered, Mismatch
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.gate import Gate
from ansible_collections.baremetal.vllm.plugins.module_utils._lifecycle.transition import Transition
from ansible_collections.baremetal.vllm.plugins.modules import (
    vllm_drain,
    vllm_engine,
    vllm_lora,
    vllm_reload,
    vllm_sleep,
    vllm_wake,
)
from ansible_collections.baremetal.vllm.tests.sim import lora, model
from ansible_collections.baremetal.vllm.tests.unit.lifecycle.world import OWNER, RESIDUE_MIB, lasting

PROMPT = "what does the table say"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Lora:
    """A host whose engine ``chat`` has LoRA on, and the adapters sql and legal on its disk."""

    def __init__(self, world, *, declared=(), updating=True, room=4, start=True, enabled=True, **settings):
        options = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": room} if enabled else {}
        self.host = world(start=False, **options, **settings)
        self.chat = self.host.chat
        self.top = self.host.root / "srv/adapters"
        for name in ("sql", "legal"):
            self.write(name, name)
        if updating:
            with (self.host.root / "etc/vllm/engines/chat.env").open("a") as stream:
                stream.write("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1\n")
        self.declare(*declared, traits={"lora": enabled}, lora={"max_rank": 16, "max_loras": 2, "max_cpu_loras": room})
        if start:
            self.host.start()

    def write(self, name: str, values: str, **more) -> str:
        return str(lora.write(self.top / name, values, **more))

    def one(self, name: str, **more) -> dict:
        return {"name": name, "path": str(self.top / name), **more}

    def declare(self, *adapters, **more) -> None:
        wanted = [one if isinstance(one, dict) else self.one(one) for one in adapters]
        self.host.change("etc/vllm/lifecycle/chat.json", adapters=wanted, **more)

    def wish(self, *names, state="present", **more) -> dict:
        return {
            "adapters": [name if isinstance(name, dict) else self.one(name) for name in names],
            "state": state,
            **more,
        }

    def run(self, *names, check_mode=False, **more) -> dict:
        return self.host.run(vllm_lora, check_mode=check_mode, **self.wish(*names, **more))

    def done(self, *names, **more) -> dict:
        result = self.run(*names, **more)
        assert not result.get("failed"), result["msg"]
        return result

    def listed(self) -> dict[str, str]:
        """What clients may ask for, beside the model: name and path."""
        models = self.chat.request("GET", "/v1/models").json["data"]
        return {one["id"]: one["root"] for one in models if one["parent"]}

    def says(self, name: str, prompt: str = PROMPT) -> tuple[int, ...] | int:
        """The tokens of an answer, or the status of a refusal."""
        body = {"model": name, "prompt": prompt, "max_tokens": 8, "return_token_ids": True}
        reply = self.chat.request("POST", "/v1/completions", body)
        return tuple(reply.json["choices"][0]["token_ids"]) if reply.status == 200 else reply.status

    def record(self) -> dict:
        return store.read_json(store.state_dir("chat") / "adapters.json") or {}

    def cost(self) -> list[str]:
        return [one["path"] for one in self.chat.requests() if one["mutating"] or one["generation"]]

    def by_hand(self, path: str, **body) -> None:
        assert self.chat.request("POST", path, body).status == 200


@pytest.fixture
def chat(world):
    def build(**settings) -> Lora:
        return Lora(world, **settings)

    return build


def expected(chat: Lora, values: str) -> tuple[int, ...]:
    """What an adapter of these values answers where nothing was before it: under a name and path of its own."""
    path = chat.write(f"fresh-{values}", values)
    name = f"fresh-{values}"
    chat.by_hand(LOAD, lora_name=name, lora_path=path)
    try:
        return chat.says(name)
    finally:
        chat.by_hand(UNLOAD, lora_name=name)


# Each state four times.

CASES = {
    # name: (adapters before, drained, wanted, state, listed afterwards)
    "load": ([], False, ["sql"], "present", ["sql"]),
    "load two": ([], False, ["sql", "legal"], "present", ["sql", "legal"]),
    "load beside": (["sql"], False, ["legal"], "present", ["sql", "legal"]),
    "load into a drained engine": ([], True, ["sql"], "present", ["sql"]),
    "exact loads": ([], False, ["sql"], "exact", ["sql"]),
    "exact unloads": (["sql", "legal"], True, ["sql"], "exact", ["sql"]),
    "exact unloads all": (["sql", "legal"], True, [], "exact", []),
    "exact exchanges": (["sql"], True, ["legal"], "exact", ["legal"]),
}


@pytest.mark.parametrize("name", CASES)
def test_four_runs(chat, name):
    before, drained, wanted, state, listed = CASES[name]
    chat = chat(gate=True, gpus=1)
    base = chat.says("tiny")
    if before:
        chat.done(*before)
    if drained:
        chat.host.done(vllm_drain)
    chat.chat.forget_requests()
    seen, files, there = chat.chat.seen(), chat.host.files(), chat.listed()

    predicted = chat.done(*wanted, state=state, check_mode=True)
    assert predicted["changed"]
    assert chat.cost() == []
    assert (chat.chat.seen(), chat.host.files(), chat.listed()) == (seen, files, there), "check mode changed something"

    real = chat.done(*wanted, state=state)
    assert real["changed"]
    assert (predicted["before"], predicted["after"]) == (real["before"], real["after"])
    assert predicted["actions"] == real["actions"]
    assert sorted(real["after"]["adapters"]) == sorted(listed)
    assert sorted(chat.listed()) == sorted(listed)
    reached = chat.chat.seen()
    assert {key: reached[key] for key in ("ready", "admission", "paused", "lease", "used")} == {
        key: seen[key] for key in ("ready", "admission", "paused", "lease", "used")
    }, "it is in service, or out of it, as before"

    chat.chat.forget_requests()
    for check_mode in (False, True):
        files = chat.host.files()
        again = chat.done(*wanted, state=state, check_mode=check_mode)
        assert (again["changed"], again["actions"]) == (False, [])
        assert (again["before"], again["after"]) == (real["after"], real["after"])
        assert chat.cost() == []
        assert lasting(chat.host.files(), check_mode) == lasting(files, check_mode)
    if drained:
        chat.host.done(vllm_drain, state="serving")
    answers = {name: chat.says(name) for name in ("tiny", *listed)}
    assert answers["tiny"] == base, "the model itself answers as before"
    assert len(set(answers.values())) == len(answers), "each name has an answer of its own"
    for gone in {"sql", "legal"} - set(listed):
        assert chat.says(gone) == 404


def test_clients_are_served_while_an_adapter_is_loaded(chat):
    chat = chat(gate=True, token_rate=100)
    with chat.host.gate.client("chat", tokens=200) as stream:
        stream.first()
        chat.done("sql")
        assert chat.chat.busy() == 1, "the stream runs on"
        assert chat.host.gate.ready("chat") == 200
        assert stream.rest() == (200, "length")


# The same name is not the same adapter.


def test_changed_files_are_loaded_anew_and_no_answer_mixes_old_and_new(chat):
    chat = chat(gate=True)
    chat.done("sql")
    old = chat.says("sql")
    chat.write("sql", "sql of today")
    refused = chat.run("sql")
    assert "its files have changed since it was loaded" in refused["msg"]
    assert "vllm_drain" in refused["next_step"]
    assert chat.says("sql") == old
    chat.host.done(vllm_drain)
    real = chat.done("sql")
    assert [line.partition("(")[0] for line in real["actions"]] == [
        "chat: resume it behind its closed gate, to prove its adapters",
        "chat: unload adapter 'sql': its files have changed since it was loaded ",
        "chat: reset its prefix cache, which may hold other content of an adapter",
        f"chat: load adapter 'sql' from {chat.top}/sql",
        "chat: prove adapter 'sql' by its answers",
        "chat: pause it again",
    ]
    chat.host.done(vllm_drain, state="serving")
    assert chat.says("sql") == expected(chat, "sql of today") != old


def test_another_path_is_another_adapter(chat):
    chat = chat(gate=True)
    chat.done("sql")
    elsewhere = {"name": "sql", "path": chat.write("sql-8", "eight")}
    assert f"it was loaded from {chat.top}/sql" in chat.run(elsewhere)["msg"]
    chat.host.done(vllm_drain)
    actions = chat.done(elsewhere)["actions"]
    assert not any("prefix cache" in line for line in actions), "blocks are told apart by the path"
    chat.host.done(vllm_drain, state="serving")
    assert chat.listed() == {"sql": str(chat.top / "sql-8")}
    assert chat.says("sql") == expected(chat, "eight")


def test_files_that_change_while_it_is_not_loaded(chat):
    """The prefix cache remembers what no list shows any more."""
    chat = chat()
    chat.done("sql")
    chat.says("sql")
    chat.done(state="exact", force=True)
    chat.write("sql", "sql of today")
    assert any("prefix cache" in line for line in chat.done("sql")["actions"])
    assert chat.says("sql") == expected(chat, "sql of today")


def test_a_file_beside_the_adapter_is_no_change(chat):
    chat = chat()
    chat.done("sql")
    (chat.top / "sql/README.md").write_text("trained on Monday")
    assert not chat.done("sql")["changed"]


def test_what_somebody_else_loaded_is_not_known(chat):
    chat = chat(gate=True)
    chat.by_hand(LOAD, lora_name="sql", lora_path=str(chat.top / "sql"))
    chat.says("sql")
    assert chat.host.info()["adapters"]["loaded"] == [
        {"name": "sql", "path": str(chat.top / "sql"), "parent": "tiny", "digest": "", "proved": False}
    ]
    assert "it was loaded by someone else, so what it holds is not known" in chat.run("sql")["msg"]
    assert not chat.done("legal", state="present", check_mode=True)["after"]["adapters"]["sql"]["proved"]
    chat.host.done(vllm_drain)
    actions = chat.done("sql")["actions"]
    assert any("prefix cache" in line for line in actions)
    assert chat.done("sql")["changed"] is False


def test_a_record_is_of_one_process(chat):
    chat = chat(doors=True)
    chat.done("sql")
    chat.host.done(vllm_engine, state="restarted")
    assert chat.listed() == {}
    assert "load adapter 'sql'" in chat.done("sql", check_mode=True)["actions"][0]


# Who may be using it.


@pytest.mark.parametrize("state", ["serving", "withdrawn and busy", "no gate, drained"])
def test_nothing_is_unloaded_that_clients_may_be_using(chat, state):
    chat = chat(gate=state != "no gate, drained", token_rate=100)
    chat.done("sql")
    if state == "no gate, drained":
        chat.host.done(vllm_drain)
        assert chat.done(state="exact")["changed"], "nobody can be using it, and nothing is to be proved"
        return
    with chat.host.gate.client("chat", tokens=100) as stream:
        stream.first()
        if state == "withdrawn and busy":
            Gate(chat.chat.config).set("admission", "withdrawn")
        refused = chat.run("legal", state="exact")
        assert "clients may be using what would go (unload adapter 'sql')" in refused["msg"]
        assert refused["left"]["chat"]["in_flight"] == 1
        assert not refused["changed"]
        assert list(chat.listed()) == ["sql"]
        assert stream.rest() == (100, "length")


def test_force_unloads_and_the_requests_in_flight_finish(chat):
    chat = chat(gate=True, token_rate=100)
    chat.done("sql")
    with chat.host.gate.client("chat", tokens=150, model="sql") as stream:
        stream.first()
        refused = chat.run(state="exact")
        assert "requests for sql are in flight" in refused["msg"]
        assert refused["left"]["chat"]["in_use"] == ["sql"]
        assert chat.done(state="exact", force=True)["changed"]
        assert chat.says("sql") == 404
        assert stream.rest() == (150, "length")


def test_a_busy_engine_does_not_reset_its_prefix_cache(chat):
    chat = chat(gate=True, token_rate=50)
    chat.done("sql")
    chat.write("sql", "sql of today")
    with chat.host.gate.client("chat", tokens=1000) as stream:
        stream.first()
        late = chat.run("sql", force=True, timeout=1.5)
        assert "did not reset its prefix cache within 1.5 s" in late["msg"]
        assert late["changed"] and chat.listed() == {}, "no answer is better than a mixed one"
        chat.chat.set_fault("slow_tokens", 100000)
    assert chat.done("sql")["changed"]
    assert chat.says("sql") == expected(chat, "sql of today")


def test_a_lease_is_respected(chat):
    chat = chat(gate=True)
    chat.host.done(vllm_drain, lease={"owner": "night-shift"})
    refused = chat.run("sql")
    assert "is held by night-shift" in refused["msg"]
    assert chat.listed() == {}
    assert chat.done("sql", force=True)["changed"]


@pytest.mark.parametrize(
    ("way", "state", "says"),
    [
        ((vllm_engine, {"state": "stopped"}), "stopped", "vllm_engine state=started"),
        ((vllm_sleep, {"level": 1}), "asleep", "vllm_wake"),
    ],
    ids=["stopped", "asleep"],
)
def test_states_in_which_adapters_cannot_be_changed(chat, way, state, says):
    chat = chat(gpus=1)
    chat.host.done(way[0], **way[1])
    refused = chat.run("sql")
    assert f"is {state}: its adapters cannot be changed" in refused["msg"]
    assert says in refused["next_step"]
    assert chat.cost() == [] or state == "asleep"


def test_without_a_gate_a_drained_engine_is_not_resumed(chat):
    chat = chat()
    chat.host.done(vllm_drain)
    refused = chat.run("sql")
    assert "without a gate requests would reach it" in refused["msg"]
    assert chat.chat.truth()["cores"][0]["pause"] is not None


# What cannot work is refused before anything is sent.


def refusals(chat: Lora) -> dict:
    gone = chat.one("gone")
    empty = chat.top / "empty"
    empty.mkdir()
    (chat.top / "bare").mkdir()
    shutil.copy(chat.top / "sql/adapter_model.safetensors", chat.top / "bare")
    chat.write("large", "large", rank=64)
    chat.write("foreign", "foreign", base="Other/Model")
    return {
        "two of a name": ([chat.one("sql"), {"name": "sql", "path": str(chat.top / "legal")}], "there are two of that"),
        "the model's name": ([{"name": "tiny", "path": str(chat.top / "sql")}], "name of the model itself"),
        "relative": ([{"name": "sql", "path": "adapters/sql"}], "is not absolute and plain"),
        "dots": ([{"name": "sql", "path": f"{chat.top}/x/../sql"}], "is not absolute and plain"),
        "slash": ([{"name": "sql", "path": f"{chat.top}/sql/"}], "is not absolute and plain"),
        "newline": ([{"name": "sql\n", "path": str(chat.top / "sql")}], "other characters"),
        "no directory": ([gone], "No such file"),
        "no weights": ([chat.one("empty")], "holds no weight file"),
        "no configuration": ([chat.one("bare")], "adapter_config.json is not one of a LoRA adapter"),
        "rank": ([chat.one("large")], "has rank 64, and the engine takes 16 at most"),
        "base": ([chat.one("foreign", base="tiny")], "was made for the base model 'Other/Model', not for 'tiny'"),
    }


def test_refusals_before_anything_is_sent(chat):
    chat = chat()
    for what, (wanted, says) in refusals(chat).items():
        for check_mode in (True, False):
            result = chat.run(*wanted, check_mode=check_mode)
            assert result.get("failed") and says in result["msg"], (what, result.get("msg"))
            assert result["next_step"], what
    assert chat.cost() == []
    assert chat.listed() == {}


def test_more_adapters_than_the_engine_keeps(chat):
    """Beyond that vLLM reads dropped ones again, and dies when they are gone; so the simulator, see below."""
    chat = chat(room=2)
    chat.done("sql", "legal")
    third = {"name": "third", "path": chat.write("third", "third")}
    refused = chat.run(third)
    assert "keeps 2 adapter(s) in memory (max-cpu-loras) and would have 3: legal, sql, third" in refused["msg"]
    chat.by_hand(LOAD, lora_name="third", lora_path=third["path"])
    shutil.rmtree(chat.top / "sql")
    assert chat.says("sql") == 500
    assert chat.chat.truth()["cores"][0]["dead"]


def test_without_runtime_updating(chat):
    chat = chat(updating=False)
    assert "lora_update" not in chat.host.info()["api"]["capabilities"]
    for check_mode in (True, False):
        refused = chat.run("sql", check_mode=check_mode)
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 was not set when it started" in refused["msg"]
        assert "declare the adapters in vllm_engine_instances" in refused["next_step"]
    assert chat.cost() == []


def test_without_lora(chat):
    chat = chat(enabled=False)
    assert "is configured without LoRA" in chat.run("sql")["msg"]
    # Where the declaration is wrong, the engine says it.
    chat.declare(traits={"lora": True})
    assert "LoRA is not enabled. Use --enable-lora" in chat.run("sql")["msg"]
    assert chat.listed() == {}


def test_without_development_endpoints_changed_content_needs_a_restart_or_a_new_path(chat):
    chat = chat(dev_mode=False, gate=True)
    chat.done("sql")
    chat.write("sql", "sql of today")
    chat.host.done(vllm_drain)
    refused = chat.run("sql")
    assert "its prefix cache cannot be reset" in refused["msg"]
    assert "new path" in refused["next_step"]
    assert list(chat.listed()) == ["sql"]


# 200 proves nothing.


def test_an_adapter_without_effect_is_unloaded_again(chat):
    chat = chat()
    chat.write("zero", "")
    result = chat.run("zero")
    assert "adapter 'zero' has no effect" in result["msg"] and "unloaded again" in result["msg"]
    assert "prove: false" in result["next_step"]
    assert result["changed"] and chat.listed() == {}
    assert chat.done(chat.one("zero", prove=False))["after"]["adapters"]["zero"]["proved"] is False
    assert chat.listed() == {"zero": str(chat.top / "zero")}
    assert not chat.done(chat.one("zero", prove=False))["changed"]
    # That it need not be proved was said of this declaration, not for ever.
    assert "it is not proved" in str(chat.run("zero", check_mode=True)["actions"]) or chat.run("zero")["failed"]


@pytest.mark.parametrize(
    ("fault", "arg", "says"),
    [
        ("lora_noop", True, "has no effect"),
        ("lora_unlisted", True, "was loaded with status 200, yet /v1/models does not list it"),
        ("http_500", f"POST {LOAD}", "was not loaded: "),
        ("http_lost", f"POST {LOAD}", "whether it was loaded is not known"),
        ("http_html", f"POST {LOAD}", ""),
    ],
)
def test_faults_of_a_load(chat, fault, arg, says):
    chat = chat(gate=True)
    base = chat.says("tiny")
    chat.chat.set_fault(fault, arg)
    result = chat.run("sql")
    assert bool(result.get("failed")) == bool(says)
    assert says in result.get("msg", "")
    if says:
        assert result["next_step"]
    if fault in ("lora_noop", "lora_unlisted", "http_500"):
        assert chat.listed() == {}, "no name is left that is not proved"
    assert chat.says("tiny") == base and chat.host.gate.ready("chat") == 200
    chat.chat.set_fault(fault, None)
    chat.done("sql")
    assert chat.says("sql") not in (base, 404)
    assert chat.host.info()["adapters"]["loaded"][0]["proved"]


@pytest.mark.parametrize(
    ("fault", "arg", "says"),
    [
        ("lora_stays", True, "was unloaded with status 200, yet /v1/models still lists it"),
        ("http_500", UNLOAD, "was not unloaded: "),
    ],
)
def test_faults_of_an_unload(chat, fault, arg, says):
    chat = chat(gate=True)
    chat.done("sql")
    chat.host.done(vllm_drain)
    chat.chat.set_fault(fault, arg)
    result = chat.run(state="exact")
    assert result["failed"] and says in result["msg"]
    assert list(chat.listed()) == ["sql"]
    chat.chat.set_fault(fault, None)
    assert chat.done(state="exact")["changed"]
    assert chat.listed() == {}


def test_a_prefix_cache_that_is_not_reset_leaves_the_adapter_out(chat):
    chat = chat(gate=True)
    chat.done("sql")
    chat.write("sql", "sql of today")
    chat.host.done(vllm_drain)
    chat.chat.set_fault("reset_fails", True)
    result = chat.run("sql", timeout=1)
    assert result["failed"] and "prefix cache" in result["msg"]
    assert chat.listed() == {}
    assert chat.chat.truth()["cores"][0]["pause"] is not None, "what was drained is paused again"
    chat.chat.set_fault("reset_fails", None)
    chat.done("sql")
    chat.host.done(vllm_drain, state="serving")
    assert chat.says("sql") == expected(chat, "sql of today")


def test_files_that_change_while_they_are_loaded(chat, monkeypatch):
    chat = chat()
    load = Engine.load_adapter

    def and_write(self, name, path, timeout):
        load(self, name, path, timeout)
        chat.write("sql", "half a copy")

    monkeypatch.setattr(Engine, "load_adapter", and_write)
    result = chat.run("sql")
    assert "changed while it was loaded; it was unloaded again" in result["msg"]
    assert chat.listed() == {}


@pytest.mark.parametrize(
    "error", [Mismatch("its log probabilities are no numbers (NaN)", entry="proof-failed"), Answered("url", 400, "no")]
)
def test_an_adapter_that_gives_no_right_answer_is_unloaded_again(chat, monkeypatch, error):
    chat = chat()
    ask = golden.ask

    def spoilt(engine, asked, model, *more):
        if model == "sql":
            raise error
        return ask(engine, asked, model, *more)

    monkeypatch.setattr(golden, "ask", spoilt)
    result = chat.run("sql")
    assert f"adapter 'sql' gives no right answer; it was unloaded again: {error}" in result["msg"]
    assert chat.listed() == {}


# Killed in the middle.

MIDDLE = [
    (Engine, "load_adapter"),
    (Engine, "unload_adapter"),
    (Engine, "reset_prefix_cache"),
    (Engine, "resume"),
    (Hands, "_load"),
    (Hands, "_unload"),
    (Hands, "_prove"),
    (Hands, "_note"),
]


@pytest.mark.parametrize(("owner", "method"), MIDDLE, ids=lambda value: getattr(value, "__name__", value))
def test_killed_in_the_middle(chat, owner, method):
    """A drained engine with another content of sql and with legal is to have the new sql alone."""
    chat = chat(gate=True)
    chat.done("sql", "legal")
    assert chat.says("sql") != chat.says("legal")
    chat.write("sql", "sql of today")
    chat.host.done(vllm_drain)

    def spoil():
        before = getattr(owner, method)

        def deadly(*arguments, **keywords):
            before(*arguments, **keywords)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, method, deadly)

    running = chat.host.begin(vllm_lora, spoil, **chat.wish("sql", state="exact"))
    status = running.wait()
    assert os.WIFSIGNALED(status), running.output.read_text()
    assert chat.host.gate.ready("chat") == 503 and chat.chat.lease()["owner"] == OWNER
    assert chat.done("sql", state="exact")["changed"]
    assert chat.chat.truth()["cores"][0]["pause"] is not None
    assert not chat.done("sql", state="exact", check_mode=True)["changed"]
    chat.host.done(vllm_drain, state="serving")
    assert list(chat.listed()) == ["sql"]
    assert chat.says("sql") == expected(chat, "sql of today")


# Start and wake.


def test_a_start_loads_and_proves_what_is_declared(chat):
    chat = chat(doors=True, gate=True, declared=["sql", "legal"])
    base = chat.says("tiny")
    assert sorted(chat.listed()) == ["legal", "sql"]
    assert len({base, chat.says("sql"), chat.says("legal")}) == 3
    seen = chat.host.info()["adapters"]
    assert seen["left"] == {} and all(one["proved"] for one in seen["loaded"])
    assert not chat.host.done(vllm_lora, state="exact")["changed"], "without names: those that are declared"
    chat.write("sql", "sql of today")
    assert "its files have changed" in chat.host.info()["adapters"]["left"]["sql"]
    chat.host.done(vllm_engine, state="restarted")
    assert chat.says("sql") == expected(chat, "sql of today")


@pytest.mark.parametrize(
    ("spoil", "says", "ran"),
    [
        (lambda chat: chat.write("sql", ""), "adapter 'sql' has no effect", True),
        (lambda chat: shutil.rmtree(chat.top / "sql"), "No such file", False),
        (lambda chat: chat.write("sql", "sql", rank=64), "has rank 64", False),
        (lambda chat: chat.host.change("etc/vllm/lifecycle/chat.json", traits={}), "is configured without LoRA", False),
        (
            lambda chat: (chat.host.root / "etc/vllm/engines/chat.env").write_text("VLLM_SERVER_DEV_MODE=1\n"),
            "does not set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
            False,
        ),
        (
            lambda chat: chat.chat.state_dir.joinpath("faults.json").write_text('{"lora_unlisted": true}'),
            "does not list",
            True,
        ),
    ],
    ids=["zeros", "gone", "rank", "no LoRA", "no variable", "not listed"],
)
def test_a_start_without_its_adapters_fails(chat, spoil, says, ran):
    chat = chat(doors=True, gate=True, declared=["sql"], start=False)
    spoil(chat)
    chat.host.gate.start()
    done = chat.host.systemd.ctl("start", chat.chat.unit)
    assert done.returncode != 0
    assert says in chat.host.systemd.journal(chat.chat.unit)
    assert chat.host.gate.stored("chat")["proved"] == "0"
    assert (chat.chat.state_dir / "engine.json").exists() is ran, "what can be known is known before minutes of loading"


def test_a_wake_proves_the_adapters_before_the_engine_serves(chat):
    chat = chat(gate=True, gpus=1)
    chat.done("sql")
    own = chat.says("sql")
    chat.host.done(vllm_sleep, level=1)
    chat.chat.forget_requests()
    result = chat.host.done(vllm_wake)
    assert list(result["timings"]) == [
        "lease",
        "wake",
        "reset_cache",
        "prove",
        "adapters",
        "admit",
        "await_ready",
        "release",
    ]
    assert "chat: bring its adapters back and prove them" in result["actions"]
    assert LOAD not in chat.cost(), "it was there and right"
    assert chat.says("sql") == own
    assert not chat.host.run(vllm_wake, check_mode=True)["changed"]


def test_an_adapter_that_lost_its_effect_is_loaded_again(chat):
    chat = chat(gate=True, gpus=1)
    chat.done("sql", "legal")
    answers = chat.says("sql"), chat.says("legal")
    chat.host.done(vllm_sleep, level=1)
    chat.chat.set_fault("lora_lost", True)
    result = chat.host.done(vllm_wake)
    assert "chat: load adapter 'sql' again, which had lost its effect" in result["actions"]
    assert (chat.says("sql"), chat.says("legal")) == answers


def test_an_adapter_that_stays_without_effect_keeps_the_engine_out(chat):
    chat = chat(gate=True, gpus=1)
    chat.done("sql")
    chat.host.done(vllm_sleep, level=1)
    for fault in ("lora_lost", "lora_noop"):
        chat.chat.set_fault(fault, True)
    result = chat.host.run(vllm_wake)
    assert result["failed"] and "adapter 'sql' has no effect" in result["msg"]
    assert chat.host.gate.ready("chat") == 503 and chat.chat.lease()["owner"] == OWNER
    for fault in ("lora_lost", "lora_noop"):
        chat.chat.set_fault(fault, None)
    chat.host.done(vllm_wake)
    assert chat.host.gate.ready("chat") == 200


def test_a_reload_of_the_weights_proves_the_adapters(chat):
    """vLLM drops them from memory then, and reads each one again for its next request."""
    chat = chat(gate=True, gpus=1)
    chat.done("sql")
    base, own = chat.says("tiny"), chat.says("sql")
    model.write(chat.host.root / "srv/models/tiny", "tiny of today")
    result = chat.host.done(vllm_reload)
    assert list(result["timings"])[-5:] == ["prove", "adapters", "admit", "await_ready", "release"]
    assert len({base, own, chat.says("tiny"), chat.says("sql")}) == 4


def test_a_wake_brings_back_what_is_declared(chat):
    """It was declared while the engine slept, its files changed, or someone unloaded it."""
    chat = chat(gate=True, gpus=1)
    chat.done("sql", "legal")
    chat.says("sql")
    chat.host.done(vllm_sleep, level=1)
    chat.write("third", "third")
    chat.write("sql", "sql of today")
    chat.declare("sql", "third")
    chat.by_hand(UNLOAD, lora_name="legal")
    result = chat.host.done(vllm_wake)
    assert f"chat: load adapter 'third' from {chat.top}/third" in result["actions"]
    assert sorted(chat.listed()) == ["legal", "sql", "third"]
    assert chat.says("sql") == expected(chat, "sql of today")
    assert chat.says("third") == expected(chat, "third")


def test_an_engine_that_cannot_load_adapters_yet_still_wakes(chat):
    """The role has declared some, and the engine has not been restarted since."""
    chat = chat(gate=True, gpus=1, updating=False)
    chat.host.done(vllm_sleep, level=1)
    chat.declare("sql")
    assert chat.host.done(vllm_wake)["after"]["state"] == "serving"
    assert chat.host.info()["adapters"]["left"] == {"sql": "it is not loaded"}


@pytest.mark.parametrize("method", ["_prove", "_adapters", "_reset_cache"])
def test_killed_while_it_wakes(chat, method):
    chat = chat(gate=True, gpus=1)
    chat.done("sql")
    own = chat.says("sql")
    chat.host.done(vllm_sleep, level=1)
    chat.chat.set_fault("lora_lost", True)

    def spoil():
        before = getattr(Transition, method)

        def deadly(*arguments, **keywords):
            before(*arguments, **keywords)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(Transition, method, deadly)

    running = chat.host.begin(vllm_wake, spoil)
    assert os.WIFSIGNALED(running.wait())
    assert chat.host.gate.ready("chat") == 503
    chat.host.done(vllm_wake)
    assert chat.says("sql") == own


def test_level_2_is_refused_with_lora(chat):
    chat = chat(gate=True, gpus=1)
    for check_mode in (True, False):
        refused = chat.host.run(vllm_sleep, level=2, check_mode=check_mode)
        assert "has LoRA on" in refused["msg"] and "level 1" in refused["next_step"]
    assert chat.host.gate.ready("chat") == 200
    chat.host.done(vllm_sleep, level=1)
    assert "has LoRA on" in chat.host.run(vllm_sleep, level=2)["msg"]
    assert chat.host.gpu.used() == RESIDUE_MIB
    # Somebody did it by hand.
    chat.host.done(vllm_wake)
    chat.by_hand("/sleep?level=2")
    refused = chat.host.run(vllm_wake)
    assert "its weights and adapters are gone" in refused.get("next_step", "") or "unknown" in refused["msg"]


def test_without_declaration_what_is_loaded_is_told_to_be_forgotten(chat):
    chat = chat(declared=["legal"])
    result = chat.done("sql", "legal")
    assert result["not_declared"] == ["sql"]


def test_a_broken_record_is_no_guess(chat):
    chat = chat(gate=True, doors=True)
    chat.done("sql")
    path = store.state_dir("chat") / "adapters.json"
    path.write_text('{"schema": 1, "main_pid": "one"}')
    seen = chat.host.info()
    assert seen["state"] == "unknown" and str(path) in seen["unseen"]["adapters"]
    assert chat.run("sql")["failed"]
    chat.host.done(vllm_engine, state="restarted")
    assert chat.host.info()["state"] == "serving"
