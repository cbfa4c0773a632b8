"""The fleet page: who may see it, what it shows, and that it shows no text."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any

import pytest
from asgi_client import ask
from browser import in_a_browser, read_dom, read_text

from semantickv.apps.build import build_proxy, build_router
from semantickv.apps.gateway import PAGE_FILES
from semantickv.settings import EdgeSettings
from semantickv.telemetry.fleet_book import MOST_DECISIONS, MOST_DOCUMENTS
from tests.fakes.scripted_engine import ScriptedEngine, answer_json

CHAT = "/v1/chat/completions"
REPORT = {"usage": {"prompt_tokens": 3000, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1000}}}


def run(test: Any) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test

    asyncio.run(bounded())


def write_chat(name: str, question: str) -> bytes:
    text = " ".join(f"Clause {n} of {name}: pay {n * 37 % 1000} coins on day {n * 13 % 31}." for n in range(200))
    messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
    return json.dumps({"model": "m", "messages": messages}).encode()


async def read_fleet(app: Any) -> dict[str, Any]:
    client, body = await ask(app, "GET", "/v1/fleet")
    assert client.status == 200
    return json.loads(body)


def test_it_shows_where_documents_live_and_why_requests_went_there():
    async def test():
        async with ScriptedEngine() as one, ScriptedEngine() as two:
            one.default = two.default = answer_json(REPORT)
            app = build_router(EdgeSettings(replicas=(one.url, two.url), trace=False))
            for question in ("Who pays?", "When?"):
                await ask(app, "POST", CHAT, body=write_chat("deed", question), headers={"X-Request-ID": question})
            fleet = await read_fleet(app)
            (document,) = fleet["documents"]
            home = fleet["decisions"][0]["replica"]
            assert (document["requests"], document["held"][home]) == (2, 1.0)
            assert sum(document["held"].values()) == 1.0  # the other replica has nothing of it
            latest, first = fleet["decisions"]
            assert (latest["request_id"], latest["route"], latest["reason"]) == (
                "When?",
                "exact_prefix_route",
                "policy",
            )
            assert (first["route"], first["new_tokens"]) == ("cold_fallback", first["prompt_tokens"])
            known = {row["replica"]: row["known_tokens"] for row in latest["compared"]}
            assert sorted(known.values())[0] == 0
            assert known[home] > 2000
            assert latest["reuse"] == "exact_local"
            told = {row["id"]: row["reported"] for row in fleet["replicas"]}
            assert told[home] == {"requests": 2, "prompt_tokens": 6000, "reused_tokens": 2000}
            assert fleet["outcomes"] == {"cold_fallback": 1, "exact_prefix_route": 1}

    run(test())


def test_it_holds_no_text_and_is_bounded():
    async def test():
        async with ScriptedEngine() as one, ScriptedEngine() as two:
            app = build_router(EdgeSettings(replicas=(one.url, two.url), trace=False))
            for number in range(MOST_DECISIONS + 5):
                await ask(app, "POST", CHAT, body=write_chat(f"deed {number}", "Hm?"))
            _, body = await ask(app, "GET", "/v1/fleet")
            assert b"Clause" not in body
            assert b"coins" not in body
            fleet = json.loads(body)
            assert len(fleet["decisions"]) == MOST_DECISIONS
            assert len(fleet["documents"]) == 40
            assert len(app.fleet._documents) <= MOST_DOCUMENTS

    run(test())


def test_the_numbers_are_the_operators_and_the_page_asks_for_the_key():
    async def test():
        async with ScriptedEngine() as one, ScriptedEngine() as two:
            app = build_router(EdgeSettings(replicas=(one.url, two.url), trace=False, admin_key="k"))
            assert (await ask(app, "GET", "/v1/fleet"))[0].status == 403
            assert (await ask(app, "GET", "/v1/fleet", headers={"Authorization": "Bearer k"}))[0].status == 200
            for path in PAGE_FILES:
                client, _ = await ask(app, "GET", path)
                assert client.status == 200
                assert "default-src 'none'" in client.headers["content-security-policy"]

    run(test())


@pytest.mark.parametrize("path", ["/fleet", "/v1/fleet"])
def test_a_proxy_with_one_engine_has_no_fleet(path):
    async def test():
        async with ScriptedEngine() as engine:
            app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
            assert (await ask(app, "GET", path))[0].status == 404

    run(test())


@in_a_browser
@pytest.mark.parametrize(("key", "shown"), [("", 2), ("k", 0)])
def test_a_browser_shows_placements_to_the_operator_and_asks_others_for_the_key(key, shown, tmp_path):
    uvicorn = pytest.importorskip("uvicorn", reason="a real socket needs uvicorn")

    async def test():
        async with ScriptedEngine() as one, ScriptedEngine() as two:
            one.default = two.default = answer_json(REPORT)
            app = build_router(EdgeSettings(replicas=(one.url, two.url), trace=False, admin_key=key))
            for question in ("Who pays?", "When?"):
                await ask(app, "POST", CHAT, body=write_chat("deed", question))
            server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none", lifespan="on"))
            with socket.create_server(("127.0.0.1", 0)) as sock:
                serving = asyncio.create_task(server.serve([sock]))
                url = f"http://127.0.0.1:{sock.getsockname()[1]}/fleet"
                page = await asyncio.to_thread(read_dom, url, tmp_path)
                server.should_exit = True
                await serving
        form = re.search(r'<form id="key-form"[^>]*>', page)
        assert form
        assert ("hidden" in form[0]) is not bool(key)
        assert page.count('<details class="decision') == shown
        assert page.count('<article class="replica') == shown
        assert page.count("<dd>up</dd>") == shown  # in words: a colour alone tells not everybody
        if shown:
            placed = page.split('id="decisions"')[1]
            assert "nothing known<small>" in placed
            assert "same beginning<small>engine: exact local</small>" in placed
        assert read_text(page, "health") == ("a key is needed" if key else "live")

    run(test())
