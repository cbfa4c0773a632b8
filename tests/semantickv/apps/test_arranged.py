"""Marked passages through the router: ordered for the replica that serves them; without a mark nothing moves."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import Any

import pytest
from asgi_client import ask
from hypothesis import given
from hypothesis import strategies as st

from semantickv.apps.build import build_router
from semantickv.routing.arranging import read_marked
from semantickv.routing.prompt_view import PromptView
from semantickv.settings import EdgeSettings
from semblend.arrange import Arranger
from semblend.prompt import Namespace
from tests.fakes.scripted_engine import ScriptedEngine, answer_json, die_after

CHAT = "/v1/chat/completions"
PASSAGES = {
    name: f"{name}: " + " ".join(f"The {name} of house {n} costs {n * 37 % 101} coins." for n in range(60))
    for name in ("roof", "door", "wall", "well", "barn", "gate")
}


def run(test: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test

    asyncio.run(bounded())


@asynccontextmanager
async def fleet(count: int, **settings: Any):
    engines = [ScriptedEngine() for _ in range(count)]
    for number, engine in enumerate(engines):
        engine.default = answer_json({"served_by": number})
        await engine.start()
    app = build_router(EdgeSettings(replicas=tuple(one.url for one in engines), trace=False, **settings))
    try:
        yield app, engines
    finally:
        for engine in engines:
            await engine.stop()


def mark(*names: str, system: str = "Be brief.", **semblend: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": PASSAGES[name], "semblend": {"commutes": "docs"}} for name in names
    ]
    parts.append({"type": "text", "text": "What costs most?"})
    messages = [{"role": "system", "content": system}, {"role": "user", "content": parts}]
    return {"model": "m", "messages": messages, **({"semblend": semblend} if semblend else {})}


def read_order(body: bytes) -> list[str]:
    """The names of the passages in the order in which an engine got them."""
    parts = json.loads(body)["messages"][-1]["content"]
    return [part["text"].split(":")[0] for part in parts if part["text"].split(":")[0] in PASSAGES]


async def send(app: Any, body: Any, **headers: str) -> Any:
    client, answer = await ask(app, "POST", CHAT, body=json.dumps(body).encode(), headers=headers)
    assert client.status == 200, answer
    return client, json.loads(answer)["served_by"]


def test_passages_are_put_in_the_order_of_the_replica_that_serves_them():
    async def test():
        async with fleet(2) as (app, engines):
            first, home = await send(app, mark("roof", "door", "wall"))
            assert json.loads(first.headers["x-semantic-order"]) == [
                {"message": 1, "group": "docs", "order": [0, 1, 2]}
            ]
            again, served_by = await send(app, mark("wall", "roof", "door"), **{"X-Request-ID": "me"})
            assert served_by == home
            assert json.loads(again.headers["x-semantic-order"])[0]["order"] == [1, 2, 0]
            seen = [read_order(one.body) for one in engines[home].requests]
            assert seen == [["roof", "door", "wall"], ["roof", "door", "wall"]]
            assert b"commutes" not in engines[home].requests[-1].body
            record = json.loads((await ask(app, "GET", "/v1/requests/me"))[1])
            assert record["arranged"] == [{"message": 1, "group": "docs", "order": [1, 2, 0]}]

    run(test())


@pytest.mark.parametrize("reuse", ["prefix", "spans"])
def test_each_set_of_passages_goes_where_it_lives_even_for_engines_that_reuse_prefixes_only(reuse):
    async def test():
        async with fleet(2, engine_reuse=reuse) as (app, _):
            _, first = await send(app, mark("roof", "door", "wall"))
            app.router.replicas[first].running = 9  # so the other set goes elsewhere
            _, second = await send(app, mark("well", "barn", "gate"))
            app.router.replicas[first].running = 0
            assert first != second
            for names, home in ((("wall", "door", "roof"), first), (("gate", "well", "barn"), second)):
                client, served_by = await send(app, mark(*names))
                assert served_by == home
                assert client.headers["x-semantic-route"] != "cold_fallback"

    run(test())


def test_listed_passages_become_parts_in_front_of_the_last_user_message():
    async def test():
        async with fleet(2) as (app, engines):
            body = {"model": "m", "messages": [{"role": "user", "content": "What costs most?"}]}
            body["semblend"] = {"passages": [PASSAGES["roof"], PASSAGES["door"]], "quality": "fast"}
            _, home = await send(app, body)
            body["semblend"]["passages"].reverse()
            client, served_by = await send(app, body)
            got = json.loads(engines[served_by].requests[-1].body)
            assert (served_by, read_order(engines[served_by].requests[-1].body)) == (home, ["roof", "door"])
            assert got["messages"][0]["content"][-1] == {"type": "text", "text": "What costs most?"}
            assert got["semblend"] == {"quality": "fast"}  # the engine's part of the wish
            assert json.loads(client.headers["x-semantic-order"])[0]["order"] == [1, 0]

    run(test())


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m",   "messages":[{"role":"user","content":"Hi"}]}',
        b'{"messages":[{"role":"user","content":[{"type":"text","text":"a"}, {"type":"text","text":"b"}]}]}',
        b'{"model":"m","semblend":{"quality":0.05},"messages":[{"role":"user","content":"Hi"}]}',
        b'{"model":"m","semblend":"theirs","messages":[{"role":"user","content":"Hi"}]}',
        b'{"prompt": "Hi", "semblend": {"reuse": false}}',
        b'{"messages": [7]}',
    ],
)
def test_without_a_mark_not_a_byte_moves(body):
    async def test():
        async with fleet(2) as (app, engines):
            client, _ = await ask(app, "POST", CHAT, body=body)
            assert client.status == 200
            assert [one.body for engine in engines for one in engine.requests] == [body]
            assert "x-semantic-order" not in client.headers

    run(test())


def test_the_marks_go_to_the_engine_where_the_router_shall_not_arrange():
    async def test():
        async with fleet(2, arrange=False) as (app, engines):
            body = json.dumps(mark("roof", "door")).encode()
            await ask(app, "POST", CHAT, body=body)
            assert [one.body for engine in engines for one in engine.requests] == [body]

    run(test())


def test_who_wants_no_reuse_keeps_the_order():
    async def test():
        async with fleet(2) as (app, engines):
            await send(app, mark("roof", "door"))
            _, home = await send(app, mark("door", "roof", reuse=False))
            assert read_order(engines[home].requests[-1].body) == ["door", "roof"]

    run(test())


@pytest.mark.parametrize(
    "change",
    [
        {"semblend": {"passages": ["a"], "unknown": 1}},
        {"semblend": {"passages": ["a"], "scores": [1, 2]}},
        {"semblend": {"passages": "a"}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "semblend": {"commute": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "semblend": {"commutes": "x"}}]}]},
        {"semblend": {"passages": ["a"]}, "messages": [{"role": "system", "content": "x"}]},
    ],
)
def test_a_mark_that_cannot_be_read_is_refused_and_never_dropped(change):
    async def test():
        async with fleet(2) as (app, engines):
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | change
            client, answer = await ask(app, "POST", CHAT, body=json.dumps(body).encode())
            assert client.status == 400
            assert json.loads(answer)["error"]["hint"]
            assert not any(engine.requests for engine in engines)
            assert app.intake.running == app.intake.held_bytes == 0

    run(test())


def test_a_retry_is_arranged_for_the_replica_that_gets_it():
    async def test():
        async with fleet(2) as (app, engines):
            _, home = await send(app, mark("roof", "door", "wall"))
            engines[home].plan(die_after(), die_after())  # a connection that served before is tried once more
            client, served_by = await send(app, mark("wall", "door", "roof"))
            assert served_by != home
            assert read_order(engines[home].requests[-1].body) == ["roof", "door", "wall"]
            assert read_order(engines[served_by].requests[-1].body) == ["wall", "door", "roof"]
            assert json.loads(client.headers["x-semantic-order"])[0]["order"] == [0, 1, 2]

    run(test())


def test_one_tenants_order_is_nothing_to_another_tenant():
    async def test():
        async with fleet(1) as (app, engines):
            await send(app, mark("roof", "door", "wall"), Authorization="Bearer a")
            client, _ = await send(app, mark("wall", "door", "roof"), Authorization="Bearer b")
            assert json.loads(client.headers["x-semantic-order"])[0]["order"] == [0, 1, 2]
            assert read_order(engines[0].requests[-1].body) == ["wall", "door", "roof"]

    run(test())


def test_with_salts_an_arranged_body_has_the_salt_too():
    async def test():
        async with fleet(2, salt_secret="s") as (app, engines):
            _, home = await send(app, mark("roof", "door"))
            assert len(json.loads(engines[home].requests[-1].body)["cache_salt"]) == 32

    run(test())


texts = st.text(max_size=20)


@given(st.lists(st.tuples(texts, st.sampled_from([None, "a", "b"])), min_size=1, max_size=8), st.randoms())
def test_what_is_sent_is_what_was_asked_in_another_order_within_its_groups(parts, rng):
    """Whatever the marks: every text arrives once, and what has no mark stays at its place."""
    content = [
        {"type": "text", "text": text} | ({"semblend": {"commutes": group}} if group else {}) for text, group in parts
    ]
    marked = read_marked(PromptView({"messages": [{"role": "user", "content": content}]}))
    if marked is None:
        assert not any(group for _, group in parts)
        return
    arranger = Arranger()
    shuffled = list(content)
    rng.shuffle(shuffled)
    earlier = read_marked(PromptView({"messages": [{"role": "user", "content": shuffled}]}))
    for sent in earlier.arrange(arranger, Namespace()).sent:
        arranger.record(sent)
    found = [part["text"] for part in marked.arrange(arranger, Namespace()).fields["messages"][0]["content"]]
    assert len(found) == len(parts)
    for group in ("a", "b"):
        places = [at for at, (_, name) in enumerate(parts) if name == group]
        assert sorted(found[at] for at in places) == sorted(parts[at][0] for at in places)
    assert all(found[at] == text for at, (text, group) in enumerate(parts) if group is None)
