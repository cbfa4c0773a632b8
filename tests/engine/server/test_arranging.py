"""Passages that commute, over HTTP: what is marked moves, nothing else does, and the answer says how."""

from __future__ import annotations

import json
import random
from contextlib import contextmanager

import httpx
import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import run_server
from small_models import Characters, make_small_model

from semblend.arrange import Arranger
from semblend.config import SemBlendConfig
from semblend.engine.core.assemble import assemble
from semblend.engine.core.config import EngineConfig
from semblend.engine.server.local_engine import LocalEngine
from semblend.engine.server.service import PromptArranger
from semblend.engine.server.tenants import Tenants
from semblend.facade import SemBlend
from semblend.prompt import Namespace
from semblend.wire.chat import ChatRequest
from tests.fakes.fake_engine import FakeEngine

DOCS = [f"Document {number}. " + f"fact {number} stands here. " * 12 for number in range(8)]


def mark(text, group="docs", **more):
    return {"type": "text", "text": text, "semblend": {"commutes": group, **more}}


def write_body(passages, question, **more):
    content = [{"type": "text", "text": "Read:"}, *map(mark, passages), {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0} | more


@pytest.fixture(scope="module")
def server():
    with (
        SemBlend(SemBlendConfig(metrics=False)) as library,
        run_server(FakeEngine(library)) as live,
        httpx.Client(base_url=live.url, timeout=300) as client,
    ):
        client.live = live
        yield client


@pytest.fixture
def client(server):
    server.post("/flush_cache")
    return server


def ask(client, body, **kwargs):
    answer = client.post("/v1/chat/completions", json=body, **kwargs)
    assert answer.status_code == 200, answer.text
    return answer.json()["semblend"]


def test_marked_parts_follow_an_earlier_order_and_the_receipt_maps_citations_back(client):
    first = ask(client, write_body(DOCS[:4], "one?"))
    assert first["arranged"] == [{"message": 0, "group": "docs", "order": [0, 1, 2, 3]}]
    asked = [DOCS[5], DOCS[2], DOCS[0], DOCS[1]]
    second = ask(client, write_body(asked, "two?"))
    (told,) = second["arranged"]
    assert [asked[index] for index in told["order"]] == [DOCS[0], DOCS[1], DOCS[2], DOCS[5]]
    assert second["exact_tokens"] > 3 * len(DOCS[0]) // 8


def test_without_a_mark_nothing_moves_and_nothing_is_told(client):
    plain = {"messages": [{"role": "user", "content": [{"type": "text", "text": doc} for doc in DOCS[:3]]}]}
    assert "arranged" not in ask(client, plain | {"max_tokens": 1})
    turned = {"messages": [{"role": "user", "content": [{"type": "text", "text": doc} for doc in DOCS[2::-1]]}]}
    assert ask(client, turned | {"max_tokens": 1})["exact_tokens"] == 0


def test_listed_passages_stand_in_front_of_the_last_user_message(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is fact 2?"}]
    body = {"messages": messages, "max_tokens": 1}
    ask(client, body | {"semblend": {"passages": DOCS[:4]}})
    told = ask(client, body | {"semblend": {"passages": DOCS[3::-1], "scores": [1, 1, 1, 1]}})
    assert told["arranged"] == [{"message": 1, "group": "passages", "order": [3, 2, 1, 0]}]
    assert told["exact_tokens"] > len(DOCS[0])


def test_what_is_kept_stays_and_a_group_stays_in_its_message(client):
    ask(client, write_body(DOCS[:4], "one?"))
    kept = ask(client, write_body(DOCS[3::-1], "two?", semblend={"keep": {"first": 4}}))
    assert kept["arranged"][0]["order"] == [0, 1, 2, 3]
    two = {
        "messages": [
            {"role": "system", "content": [mark(DOCS[0], "tools"), mark(DOCS[1], "tools")]},
            {"role": "user", "content": [mark(DOCS[2], "tools"), mark(DOCS[3], "tools")]},
        ],
        "max_tokens": 1,
    }
    told = ask(client, two)["arranged"]
    assert [(group["message"], sorted(group["order"])) for group in told] == [(0, [0, 1]), (1, [0, 1])]


def test_a_request_that_wants_no_reuse_is_left_as_it_is(client):
    ask(client, write_body(DOCS[:4], "one?"))
    assert "arranged" not in ask(client, write_body(DOCS[3::-1], "two?", semblend={"reuse": False}))


def test_a_stream_carries_the_order_in_its_last_event(client):
    ask(client, write_body(DOCS[:3], "one?"))
    with client.stream("POST", "/v1/chat/completions", json=write_body(DOCS[2::-1], "two?", stream=True)) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert events[-1]["semblend"]["arranged"][0]["order"] == [2, 1, 0]


def test_an_order_never_crosses_a_tenant_or_a_salt():
    tenants = Tenants(keys={"one" * 8: "one", "two" * 8: "two"})
    with (
        SemBlend(SemBlendConfig(metrics=False)) as library,
        run_server(FakeEngine(library), tenants=tenants) as live,
        httpx.Client(base_url=live.url, timeout=300) as client,
    ):
        mine, theirs = ({"Authorization": f"Bearer {name * 8}", "X-Tenant-ID": "one"} for name in ("one", "two"))
        ask(client, write_body(DOCS[:3], "one?"), headers=mine)
        back = write_body(DOCS[2::-1], "two?")
        assert ask(client, back, headers=theirs)["arranged"][0]["order"] == [0, 1, 2]
        assert ask(client, back | {"cache_salt": "s"}, headers=mine)["arranged"][0]["order"] == [0, 1, 2]
        assert ask(client, back, headers=mine)["arranged"][0]["order"] == [2, 1, 0]


@pytest.mark.parametrize(
    ("marks", "ours", "where"),
    [
        ({"commutes": ""}, {}, "messages[0].content[0].semblend.commutes"),
        ({"commutes": 3}, {}, "commutes"),
        ({"commute": "docs"}, {}, "messages[0].content[0].semblend.commute"),
        ({}, {}, "commutes"),
        ("docs", {}, "semblend"),
        ({"commutes": "docs", "score": -1}, {}, "score"),
        ({"commutes": "x" * 65}, {}, "commutes"),
        ({"commutes": "docs"}, {"keep": {"displaced": 0.1}}, "messages[0].content"),
        ({"commutes": "docs"}, {"keep": {"first": -1}}, "semblend.keep.first"),
        ({"commutes": "docs"}, {"keep": {"frist": 1}}, "semblend.keep.frist"),
        ({"commutes": "docs"}, {"passages": "one text"}, "semblend.passages"),
        ({"commutes": "docs"}, {"passages": ["a", 1]}, "semblend.passages"),
        ({"commutes": "docs"}, {"passages": ["a"] * 1025}, "semblend.passages"),
        ({"commutes": "docs"}, {"passages": ["a"], "scores": []}, "semblend.scores"),
        ({"commutes": "docs"}, {"scores": [1]}, "semblend.scores"),
    ],
)
def test_malformed_marks_are_refused_with_a_way_out(client, marks, ours, where):
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "semblend": marks}]}]}
    answer = client.post("/v1/chat/completions", json=body | {"semblend": ours})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["hint"]
    assert where in (error["param"] or "") + error["message"]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", {"prompt": "Hi"}), ("/generate", {"text": "Hi"})])
def test_endpoints_without_messages_say_that_they_take_no_passages(client, path, body):
    answer = client.post(path, json=body | {"semblend": {"passages": ["a"]}})
    assert answer.status_code == 400
    assert "chat" in answer.json()["error"]["hint"]


def test_many_empty_equal_and_long_passages_are_answered(client):
    many = write_body([f"p{number}" for number in range(1000)], "?")
    assert len(ask(client, many)["arranged"][0]["order"]) == 1000
    for passages in ([""] * 50, ["same"] * 50, ["x" * 20_000], []):
        assert ask(client, write_body(passages, "?"))
    many_groups = [mark(f"p{number}", f"g{number}") for number in range(1000)]
    assert (
        len(ask(client, {"messages": [{"role": "user", "content": many_groups}], "max_tokens": 1})["arranged"]) == 1000
    )


def test_a_donor_that_the_engine_evicts_takes_its_order_along(client):
    service = client.live.app.state.service
    ask(client, write_body(DOCS[:3], "one?"))
    assert len(service.arranging.arranger) == 1
    for donor in service.engine.donors():
        service.engine.semblend.forget(donor.donor_id)
    assert len(service.arranging.arranger) == 0
    assert ask(client, write_body(DOCS[2::-1], "two?"))["arranged"][0]["order"] == [0, 1, 2]


def test_requests_are_followed_up_to_a_bound(monkeypatch):
    monkeypatch.setattr("semblend.engine.server.service.MAX_FOLLOWED", 10)
    arranging = PromptArranger(Arranger())
    for number in range(8):
        arranging.record(f"r{number}", [arranging.arranger.arrange([f"a{number}", "b", "c"])])
    assert list(arranging._donors) == ["r5", "r6", "r7"]
    arranging.forget("r6-0")
    arranging.forget("r0")
    assert (list(arranging._donors), arranging._followed, len(arranging.arranger)) == (["r5", "r7"], 6, 7)


MESSAGES = st.lists(
    st.lists(st.tuples(st.sampled_from("abcdefg"), st.sampled_from(["", "g", "h"])), min_size=1, max_size=7),
    min_size=1,
    max_size=3,
)


@given(st.lists(MESSAGES, min_size=1, max_size=4))
@settings(max_examples=100)
def test_every_text_stays_in_its_message_and_unmarked_ones_in_their_place(chats):
    arranging = PromptArranger(Arranger())
    for chat in chats:
        messages = [
            {"role": "user", "content": [mark(text, group) if group else {"text": text} for text, group in parts]}
            for parts in chat
        ]
        asked = ChatRequest.parse(json.dumps({"messages": messages}), most_n=1)
        found = arranging.arrange(asked, Namespace())
        arranging.record("r", found.sent)
        orders = {(told.message, told.name): told.order for told in found.groups}
        for at, parts in enumerate(chat):
            now = found.asked.messages[at]["content"].split("\n")
            assert [text for text, group in parts if not group] == [
                text for text, (_, group) in zip(now, parts, strict=True) if not group
            ]
            for name in {group for _, group in parts if group}:
                was = [text for text, group in parts if group == name]
                put = [text for text, (_, group) in zip(now, parts, strict=True) if group == name]
                assert put == [was[index] for index in orders[at, name]]


@contextmanager
def serve_small_model():
    library = SemBlend(SemBlendConfig(embedder="none", metrics=False))
    model = make_small_model(vocab_size=128)
    parts = {"semblend": library, "config": EngineConfig(model_name="tiny"), "detokenizer": Characters()}
    engine = LocalEngine(assemble(model, pool_tokens=8192, **parts), Characters())
    engine.start()
    try:
        with run_server(engine) as live, httpx.Client(base_url=live.url, timeout=300) as client:
            yield client
    finally:
        engine.close()


def test_the_real_engine_hits_its_exact_cache_more_often_on_a_stream_of_retrieval_prompts():
    rng = random.Random(4)
    corpus = [" ".join(f"w{rng.randrange(400)}" for _ in range(24)) for _ in range(12)]
    stream = []
    for number in range(24):
        asked = rng.sample(corpus[:6] if number % 2 else corpus, 4)
        stream.append((asked, f"question {number}?"))
    counted = {}
    for name, keep in (("as retrieved", {"first": 4}), ("arranged", {})):
        with serve_small_model() as client:
            receipts = [ask(client, write_body(asked, question, semblend={"keep": keep})) for asked, question in stream]
        counted[name] = sum(one["exact_tokens"] for one in receipts)
        orders = [one["arranged"][0]["order"] for one in receipts]
        assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
        assert (name == "arranged") == any(order != [0, 1, 2, 3] for order in orders)
    assert counted["arranged"] > 1.3 * counted["as retrieved"]
