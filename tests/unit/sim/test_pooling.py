"""Log probabilities, and engines that answer with vectors and scores, in the shapes that vLLM 0.32.0 gave."""

from __future__ import annotations

import math

import pytest

from ansible_collections.baremetal.vllm.tests.sim.harness import sim_engine

ASKED = {"prompt": [1, 2, 3, 4], "max_tokens": 4, "temperature": 0, "seed": 0, "return_token_ids": True}
BY_ID = {**ASKED, "logprobs": 2, "return_tokens_as_token_ids": True}
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/pooling", "/score", "/v1/score", "/rerank"]
PATHS += ["/v1/rerank", "/v2/rerank", "/classify"]


def routes(engine) -> list[str]:
    return [path for path in PATHS if engine.request("GET", path).status == 405]


def logprobs(engine, **body):
    return engine.request("POST", "/v1/completions", {**ASKED, **body}).json["choices"][0]["logprobs"]


def test_top_log_probabilities_are_named_as_they_were_asked_for(tmp_path):
    with sim_engine(tmp_path) as engine:
        choice = engine.request("POST", "/v1/completions", BY_ID).json["choices"][0]
        names = [f"token_id:{one}" for one in choice["token_ids"]]
        found = choice["logprobs"]
        assert found["tokens"] == names
        assert [next(iter(one)) for one in found["top_logprobs"]] == names, "the chosen one comes first"
        assert {len(one) for one in found["top_logprobs"]} == {2}
        for name, own, top in zip(names, found["token_logprobs"], found["top_logprobs"]):
            assert top[name] == own == max(top.values())
        assert found["text_offset"][1] == len(names[0])
        plain = logprobs(engine, logprobs=0)
        assert [len(one) for one in plain["top_logprobs"]] == [1] * 4
        assert not plain["tokens"][0].startswith("token_id:")
        assert logprobs(engine) is None


def test_top_log_probabilities_of_a_chat(tmp_path):
    body = {**BY_ID, "messages": [{"role": "user", "content": "hello engine"}], "logprobs": True, "top_logprobs": 2}
    del body["prompt"]
    with sim_engine(tmp_path) as engine:
        choice = engine.request("POST", "/v1/chat/completions", body).json["choices"][0]
        entries = choice["logprobs"]["content"]
        assert [one["token"] for one in entries] == [f"token_id:{one}" for one in choice["token_ids"]]
        assert [len(one["top_logprobs"]) for one in entries] == [2] * 4
        body["top_logprobs"] = 0
        again = engine.request("POST", "/v1/chat/completions", body).json["choices"][0]["logprobs"]["content"]
        assert [one["top_logprobs"] for one in again] == [[]] * 4


def test_more_log_probabilities_than_are_allowed(tmp_path):
    with sim_engine(tmp_path, max_logprobs=0) as engine:
        refused = engine.request("POST", "/v1/completions", BY_ID)
        assert refused.status == 400
        assert (
            "Requested sample logprobs of 2, which is greater than max allowed: 0" in refused.json["error"]["message"]
        )
        assert len(logprobs(engine, logprobs=0)["token_logprobs"]) == 4
        engine.set_fault("logprobs_refused")
        assert engine.request("POST", "/v1/completions", {**ASKED, "logprobs": 0}).status == 400
        assert logprobs(engine) is None


def test_two_tokens_that_are_as_likely_as_each_other(tmp_path):
    with sim_engine(tmp_path) as engine:

        def ask():
            choice = engine.request("POST", "/v1/completions", BY_ID).json["choices"][0]
            return choice["token_ids"], choice["logprobs"]["top_logprobs"]

        engine.set_fault("near_tie", 1)
        ids, top = ask()
        first, second = top[1].values()
        assert math.isclose(first - second, 0.02)
        engine.set_fault("tokens_flip", 1)
        flipped, other = ask()
        assert flipped[0] == ids[0]
        assert set(other[1]) == set(top[1]), "the same two"
        assert flipped[1] != ids[1]
        assert f"token_id:{flipped[1]}" == list(top[1])[1]
        assert flipped[2:] != ids[2:], "what follows another token is another text"


def test_what_comes_from_the_prefix_cache_is_rounded_otherwise(tmp_path):
    with sim_engine(tmp_path) as engine:
        engine.set_fault("prefix_rounds", 2)

        def ask(**more):
            choice = engine.request("POST", "/v1/completions", {**BY_ID, **more}).json["choices"][0]
            return choice["token_ids"], choice["logprobs"]["token_logprobs"]

        (ids, computed), (others, cached) = ask(), ask()
        assert [one == other for one, other in zip(ids, others)] == [True, True, False, True]
        assert math.isclose(computed[0] - cached[0], 0.15)
        assert ask(cache_salt="a") == ask(cache_salt="b") == (ids, computed), "a salt that no cached block has"
        assert ask(cache_salt="a") == (others, cached)


def test_routes_by_what_the_engine_is_for(tmp_path):
    scores = ["/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"]
    for name in "123":
        (tmp_path / name).mkdir()
    with sim_engine(tmp_path / "1") as engine:
        assert routes(engine) == ["/v1/completions", "/v1/chat/completions"]
    with sim_engine(tmp_path / "2", runner="pooling", convert="embed") as engine:
        assert routes(engine) == ["/v1/embeddings", "/pooling", *scores]
    with sim_engine(tmp_path / "3", runner="pooling", convert="classify") as engine:
        assert routes(engine) == ["/pooling", *scores, "/classify"]


def test_embeddings(tmp_path):
    with sim_engine(tmp_path, runner="pooling", convert="embed") as engine:

        def embed(given):
            return engine.request("POST", "/v1/embeddings", {"input": given}).json

        both = embed([[1, 2, 3], [4, 5]])
        assert [(one["index"], one["object"]) for one in both["data"]] == [(0, "embedding"), (1, "embedding")]
        first = both["data"][0]["embedding"]
        assert math.isclose(math.hypot(*first), 1)
        assert embed([1, 2, 3])["data"][0]["embedding"] == first
        assert embed("hello engine")["data"][0]["embedding"] != first
        assert both["usage"]["completion_tokens"] == 0
        engine.set_fault("vectors_off", 0.2)
        off = embed([1, 2, 3])["data"][0]["embedding"]
        assert math.isclose(off[0] - first[0], 0.2)
        engine.clear_faults()
        engine.set_fault("garbage")
        assert set(embed([1, 2, 3])["data"][0]["embedding"]) == {0.0}
        assert engine.request("POST", "/v1/embeddings", {"input": []}).status == 400
        assert engine.request("POST", "/v1/embeddings", {"input": "x", "model": "other"}).status == 404


@pytest.mark.parametrize("convert", ["embed", "classify"])
def test_ranks_and_scores_are_the_same_numbers(tmp_path, convert):
    documents = ["engine", "the world", "a b c"]
    with sim_engine(tmp_path, runner="pooling", convert=convert) as engine:
        ranked = engine.request("POST", "/v1/rerank", {"query": "hello", "documents": documents}).json["results"]
        assert sorted(one["relevance_score"] for one in ranked)[::-1] == [one["relevance_score"] for one in ranked]
        assert [documents[one["index"]] for one in ranked] == [one["document"]["text"] for one in ranked]
        scores = engine.request("POST", "/score", {"text_1": "hello", "text_2": documents}).json["data"]
        by_index = {one["index"]: one["relevance_score"] for one in ranked}
        assert [one["score"] for one in scores] == [by_index[at] for at in range(3)]
        other = {"queries": "hello", "documents": documents}
        assert engine.request("POST", "/v1/score", other).json["data"] == scores
        assert engine.request("POST", "/v1/rerank", {"query": [1, 2], "documents": documents}).status == 400


def test_classes_and_plain_pooling(tmp_path):
    with sim_engine(tmp_path, runner="pooling", convert="classify") as engine:
        found = engine.request("POST", "/classify", {"input": [[1, 2, 3]]}).json["data"][0]
        assert (found["label"], found["num_classes"], len(found["probs"])) == ("LABEL_0", 1, 1)
        assert len(engine.request("POST", "/pooling", {"input": "x"}).json["data"][0]["data"][0]) == 64


def test_a_paused_engine_embeds_nothing(tmp_path):
    with sim_engine(tmp_path, version="0.32.0", runner="pooling", convert="embed") as engine:
        engine.request("POST", "/pause?mode=wait")
        with pytest.raises(TimeoutError):
            engine.request("POST", "/v1/embeddings", {"input": "x"}, timeout=0.3)
