"""Two worlds that differ only in what one tenant sent: nothing that another tenant gets to see tells them apart."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from asgi_client import ask

from semantickv.apps.build import build_router
from semantickv.routing.policies import POLICIES
from semantickv.settings import EdgeSettings
from tests.fakes.scripted_engine import EngineSide, ScriptedEngine, answer_json

CHAT = "/v1/chat/completions"
SECRET = " ".join(f"Clause {n}: the tenant pays {n * 37 % 1000} coins on day {n * 13 % 31}." for n in range(200))
OTHER = " ".join(f"Recipe {n}: take {n * 41 % 900} grams of flour and wait {n * 17 % 29} hours." for n in range(200))
TIMES = ("first_byte_ms", "ttft_ms", "total_ms")


def chat(text: str, **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **more}).encode()


class CachingEngine:
    """Says how much of a prompt it had, as engines do: by the salt and the text of the prompts that it saw."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    async def answer(self, side: EngineSide) -> None:
        fields = json.loads(side.request.body)
        key = (fields.get("cache_salt", ""), fields["messages"][-1]["content"])
        details = {"cached_tokens": 900 if key in self.seen else 0}
        self.seen.add(key)
        usage = {"prompt_tokens": 1000, "completion_tokens": 1, "prompt_tokens_details": details}
        receipt = {"exact_tokens": details["cached_tokens"], "reused_tokens": 0, "reason": None}
        await answer_json({"ok": True, "usage": usage, "semblend": receipt})(side)


async def look(sent_by_a: str, *, caching: bool = False, replicas: int = 3, **settings: Any) -> dict[str, Any]:
    """Let A send a text several times; return all that B sees of asking for `SECRET`, and what B's engine gets.

    Of the times in B's record it is kept which of them there are, not how long they were.
    """
    engines = [
        ScriptedEngine(default=CachingEngine().answer if caching else answer_json({"ok": True}))
        for _ in range(replicas)
    ]
    for engine in engines:
        await engine.start()
    try:
        app = build_router(EdgeSettings(replicas=tuple(one.url for one in engines), trace=False, **settings))
        for number in range(4):
            headers = {"Authorization": "Bearer a", "X-Request-ID": f"a-{number}", "X-Session-ID": "shared"}
            await ask(app, "POST", CHAT, body=chat(sent_by_a), headers=headers)
        seen: dict[str, Any] = {"answers": [], "records": [], "foreign": [], "engine": []}
        before = [len(one.requests) for one in engines]
        for number in range(3):
            name = f"b-{number}"
            headers = {"Authorization": "Bearer b", "X-Request-ID": name, "X-Session-ID": "shared", "X-Tenant-ID": "a"}
            client, body = await ask(app, "POST", CHAT, body=chat(SECRET), headers=headers)
            seen["answers"].append((client.status, sorted(client.headers.items()), body))
            record = json.loads(
                (await ask(app, "GET", f"/v1/requests/{name}", headers={"Authorization": "Bearer b"}))[1]
            )
            seen["records"].append({key: value is None if key in TIMES else value for key, value in record.items()})
        for path in ("/v1/requests/a-0", "/metrics", "/v1/replicas", "/v1/traces/latest", "/v1/fleet"):
            client, body = await ask(app, "GET", path, headers={"Authorization": "Bearer b", "X-Tenant-ID": "a"})
            seen["foreign"].append((path, client.status, body))
        for engine, count in zip(engines, before, strict=True):
            seen["engine"].append([(one.body, sorted(one.headers.items())) for one in engine.requests[count:]])
            for request in seen["engine"][-1]:
                assert b"Recipe" not in request[0]
        return seen
    finally:
        for engine in engines:
            await engine.stop()


def strip_ports(seen: dict[str, Any]) -> str:
    """What was seen, without the ports that the system chose."""
    for requests in seen["engine"]:
        for at, (body, headers) in enumerate(requests):
            requests[at] = (body, [pair for pair in headers if pair[0] != "host"])
    return repr(seen)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("more", [{}, {"salt_secret": "s"}, {"engine_reuse": "prefix"}])
def test_what_another_tenant_sent_changes_nothing_that_a_tenant_sees(policy, more):
    async def test() -> None:
        async with asyncio.timeout(120):
            same = await look(SECRET, policy=policy, admin_key="operator", **more)
            other = await look(OTHER, policy=policy, admin_key="operator", **more)
        assert strip_ports(same) == strip_ports(other)
        assert [status for _, status, _ in same["foreign"]] == [404, 403, 403, 403, 403]
        first_headers = dict(same["answers"][0][1])
        assert first_headers["x-semantic-route"] == "cold_fallback"
        assert first_headers["x-semantic-score"] == "0.0000"

    asyncio.run(test())


def test_receipts_tell_nothing_of_another_tenant_where_keys_have_salts():
    async def test() -> None:
        async with asyncio.timeout(120):
            same, other = [
                await look(text, caching=True, salt_secret="s", admin_key="operator") for text in (SECRET, OTHER)
            ]
        assert strip_ports(same) == strip_ports(other)
        kept = [record["receipt"]["exact_tokens"] for record in same["records"]]
        assert (kept[0], kept[-1]) == (0, 900)  # B's own first request is known when it comes again

    asyncio.run(test())


def test_without_salts_it_is_the_engine_that_tells():
    """The test above can fail: one engine, no salts, and B's receipt says that somebody had sent the text."""

    async def test() -> None:
        async with asyncio.timeout(120):
            same, other = [await look(text, caching=True, replicas=1) for text in (SECRET, OTHER)]
        assert [seen["records"][0]["receipt"]["exact_tokens"] for seen in (same, other)] == [900, 0]

    asyncio.run(test())


def test_the_same_look_does_tell_when_the_tenant_is_the_same():
    """The test above can fail: with one key for both, B sees that the document is known."""

    async def test() -> None:
        engines = [ScriptedEngine() for _ in range(2)]
        for engine in engines:
            await engine.start()
        app = build_router(EdgeSettings(replicas=tuple(one.url for one in engines), trace=False))
        for wanted in ("0.0000", "1.0000"):
            client, _ = await ask(app, "POST", CHAT, body=chat(SECRET), headers={"Authorization": "Bearer b"})
            assert client.headers["x-semantic-score"] == wanted
        for engine in engines:
            await engine.stop()

    asyncio.run(test())
