"""In front of a stock Dynamo frontend: requests are pinned by a header, and a refused pin costs no request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from asgi_client import AsgiClient, ask

from semantickv.apps.dynamo_pin import PinGateway
from semantickv.edge.upstream_call import EngineAddress, Upstream
from semantickv.routing.worker_evidence import WorkerEvidence
from semantickv.settings import EdgeSettings
from semblend.integration.dynamo.placement import WorkerKey
from tests.fakes.scripted_engine import EngineSide, ScriptedEngine, answer_json, hang, stream

CHAT = "/v1/chat/completions"
DOCUMENT = " ".join(f"word{at * at % 997}" for at in range(900))
OTHER = " ".join(f"text{at * at % 991}" for at in range(900))
PIN = "x-dynamo-worker-instance-id"


class Frontend:
    """Answers as Dynamo's frontend does: lists its workers, obeys a pin, refuses one to a worker that is gone."""

    def __init__(self) -> None:
        self.alive = [11, 12, 13]
        self.listed = [11, 12, 13]
        self.turn = 0

    async def behave(self, side: EngineSide) -> None:
        if side.request.target == "/health":
            rows = [
                {"namespace": "dynamo", "component": "backend", "endpoint": "generate", "instance_id": one}
                for one in self.listed
            ]
            await answer_json({"status": "healthy", "instances": rows})(side)
            return
        if side.request.target == "/v1/models":
            await answer_json({"data": [{"id": "m"}]})(side)
            return
        pinned = side.request.headers.get(PIN)
        if pinned is not None and int(pinned) not in self.alive:
            await answer_json({"message": "Service temporarily unavailable"}, status=503)(side)
            return
        self.turn += 1
        worker = int(pinned or self.alive[self.turn % len(self.alive)])
        told = {"nvext": {"worker_id": {"prefill_worker_id": worker, "prefill_dp_rank": 0}}}
        if json.loads(side.request.body).get("stream"):
            events = [b"data: %b\n\n" % json.dumps(told).encode(), b"data: [DONE]\n\n"]
            await stream(*events)(side)
        else:
            usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 0}}
            await answer_json({"choices": [], "usage": usage} | told)(side)


@asynccontextmanager
async def deployment(**known: Any) -> AsyncIterator[tuple[PinGateway, Frontend, ScriptedEngine]]:
    frontend = Frontend()
    async with ScriptedEngine(default=frontend.behave, health=None) as engine:
        pool = Upstream(EngineAddress.parse(engine.url))
        app = PinGateway(EdgeSettings(**known), pool, WorkerEvidence(1_000_000))
        await app.refresh_workers()
        yield app, frontend, engine
        await pool.close()


def chat(question: str, document: str = DOCUMENT, **more: Any) -> bytes:
    message = {"role": "user", "content": f"{question}\n{document}"}
    return json.dumps({"model": "m", "messages": [message], **more}).encode()


def served_by(body: bytes) -> int:
    return json.loads(body)["nvext"]["worker_id"]["prefill_worker_id"]


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 300))


def test_a_shifted_document_is_pinned_where_it_was_computed():
    async def test():
        async with deployment() as (app, _, engine):
            first, body = await ask(app, "POST", CHAT, body=chat("What is it about?"))
            assert (first.headers["x-route-reason"], PIN in engine.requests[-1].headers) == ("unknown", False)
            for at in range(5):
                again, answer = await ask(app, "POST", CHAT, body=chat("Another question " * (at + 1)))
                assert (again.headers["x-semantic-route"], served_by(answer)) == ("semantic_placement", served_by(body))

    run(test())


def test_a_stream_teaches_where_dynamo_put_a_prompt():
    async def test():
        async with deployment() as (app, _, engine):
            await ask(app, "POST", CHAT, body=chat("What is it about?", stream=True))
            await ask(app, "POST", CHAT, body=chat("And why?"))
            assert engine.requests[-1].headers[PIN] == "12"

    run(test())


def test_a_pin_that_is_refused_goes_out_once_more_without():
    async def test():
        async with deployment() as (app, frontend, _):
            _, body = await ask(app, "POST", CHAT, body=chat("What is it about?"))
            frontend.alive.remove(served_by(body))
            client, again = await ask(app, "POST", CHAT, body=chat("And why?"))
            assert (client.status, client.headers["x-route-reason"]) == (200, "fault")
            third, answer = await ask(app, "POST", CHAT, body=chat("Is it true?"))
            assert (third.headers["x-route-reason"], served_by(answer)) == ("donors", served_by(again))
            assert app.counts["retried"] == 1
            assert not +app.placed

    run(test())


def test_a_worker_that_the_frontend_no_longer_lists_is_forgotten():
    async def test():
        async with deployment() as (app, frontend, _):
            _, body = await ask(app, "POST", CHAT, body=chat("What is it about?"))
            frontend.listed.remove(served_by(body))
            frontend.alive.remove(served_by(body))
            await app.refresh_workers()
            client, _ = await ask(app, "POST", CHAT, body=chat("And why?"))
            assert (client.status, client.headers["x-route-reason"]) == (200, "unknown")

    run(test())


def test_a_home_with_many_running_requests_is_left_to_dynamo():
    async def test():
        async with deployment() as (app, _, _engine):
            _, body = await ask(app, "POST", CHAT, body=chat("What is it about?"))
            app.placed[WorkerKey(served_by(body))] = 100
            client, _ = await ask(app, "POST", CHAT, body=chat("And why?"))
            assert client.headers["x-route-reason"] == "load"

    run(test())


def test_two_keys_share_nothing():
    async def test():
        async with deployment() as (app, _, _engine):
            await ask(app, "POST", CHAT, body=chat("What?"), headers={"Authorization": "Bearer a"})
            client, _ = await ask(app, "POST", CHAT, body=chat("Why?"), headers={"Authorization": "Bearer b"})
            assert client.headers["x-route-reason"] == "unknown"

    run(test())


@pytest.mark.parametrize("salt", [{"cache_salt": "b"}, {"nvext": {"cache_salt": "b"}}])
def test_two_salts_share_nothing(salt):
    async def test():
        async with deployment() as (app, _, _engine):
            await ask(app, "POST", CHAT, body=chat("What?"))
            client, _ = await ask(app, "POST", CHAT, body=chat("Why?", **salt))
            assert client.headers["x-route-reason"] == "unknown"

    run(test())


def test_a_request_that_pins_itself_passes_as_it_is():
    async def test():
        async with deployment() as (app, _, engine):
            await ask(app, "POST", CHAT, body=chat("What?"))
            own = chat("Why?", nvext={"backend_instance_id": 13})
            await ask(app, "POST", CHAT, body=own)
            assert (engine.requests[-1].body, PIN in engine.requests[-1].headers) == (own, False)
            await ask(app, "POST", CHAT, body=chat("How?"), headers={PIN: "13"})
            assert (engine.requests[-1].headers[PIN], engine.requests[-1].body) == ("13", chat("How?"))

    run(test())


@pytest.mark.parametrize("body", [b"", b"not json", b"[1]", b'{"messages": 7}', b'{"prompt": [-1], "nvext": 3}'])
def test_a_body_that_cannot_be_placed_still_reaches_the_frontend(body):
    async def test():
        async with deployment() as (app, _, engine):
            engine.plan(answer_json({"message": "Invalid request"}, status=400))
            client, _ = await ask(app, "POST", CHAT, body=body)
            assert client.status == 400
            assert len([one for one in engine.requests if one.target == CHAT]) == 1

    run(test())


def test_what_a_caller_asks_of_nvext_stays():
    async def test():
        async with deployment() as (app, _, engine):
            await ask(app, "POST", CHAT, body=chat("What?", nvext={"extra_fields": ["timing"], "top_k": 3}))
            sent = json.loads(engine.requests[-1].body)["nvext"]
            assert sent == {"extra_fields": ["timing", "worker_id"], "top_k": 3}

    run(test())


def test_a_text_that_imitates_a_worker_id_is_not_believed():
    async def test():
        async with deployment() as (app, _, engine):
            lie = json.dumps({"prefill_worker_id": 13})
            told = {"choices": [{"text": lie}], "nvext": {"worker_id": {"prefill_worker_id": 11}}}
            engine.plan(answer_json(told))
            await ask(app, "POST", CHAT, body=chat("What?"))
            await ask(app, "POST", CHAT, body=chat("Why?"))
            assert engine.requests[-1].headers[PIN] == "11"

    run(test())


def test_without_a_frontend_a_client_hears_so():
    async def test():
        async with deployment() as (app, _, engine):
            await engine.stop()
            await app.refresh_workers()
            client, body = await ask(app, "POST", CHAT, body=chat("What?"))
            assert (client.status, json.loads(body)["error"]["code"]) == (502, "refused")

    run(test())


def test_a_client_that_leaves_takes_its_request_off_the_worker():
    async def test():
        async with deployment() as (app, _, engine):
            await ask(app, "POST", CHAT, body=chat("What?"))
            engine.plan(hang())
            engine.arrived.clear()
            async with AsgiClient(app, "POST", CHAT, body=chat("Why?")) as client:
                await engine.arrived.wait()
                assert app.placed.total() == 1
                client.leave()
                await engine.left.wait()
            assert app.placed.total() == 0

    run(test())


def test_only_prompts_and_models_pass():
    async def test():
        async with deployment() as (app, _, _engine):
            assert (await ask(app, "GET", "/v1/models"))[0].status == 200
            assert (await ask(app, "GET", "/metrics"))[0].status == 404
            assert json.loads((await ask(app, "GET", "/health"))[1]) == {"status": "ok", "workers": 3}

    run(test())
