"""Replicas that hang, leave and join, and requests that make engines fail: what becomes of everybody else."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from asgi_client import AsgiClient, ask

from semantickv.apps.build import build_router
from semantickv.edge.upstream_call import Fault, FaultKind
from semantickv.routing.replica import Health
from semantickv.settings import EdgeSettings
from tests.fakes.scripted_engine import ScriptedEngine, answer_json, die_after, hang

CHAT = "/v1/chat/completions"


def chat(text: str = "Hi", **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **more}).encode()


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


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
        await app.close()
        for engine in engines:
            await engine.stop()


def test_a_replica_that_hangs_on_prompts_is_taken_out_and_its_requests_go_elsewhere():
    async def test():
        async with fleet(2, policy="round_robin", hang_s=0.05) as (app, engines):
            for _ in range(4):
                await ask(app, "POST", CHAT, body=chat())
            engines[0].default = hang()  # and /health still answers
            clients = [await AsgiClient(app, "POST", CHAT, body=chat()).__aenter__() for _ in range(4)]
            while sum(client.task.done() for client in clients) < 2:  # those of the other one
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            app.look_after_replicas(time.perf_counter())
            for client in clients:
                assert json.loads(await client.finish()) == {"served_by": 1}
            assert app.router.replicas[0].is_hung
            assert not app.router.replicas[0].can_serve

    run(test())


def test_requests_on_a_replica_that_goes_down_are_released_at_once():
    async def test():
        async with fleet(2, policy="round_robin") as (app, engines):
            engines[0].plan(hang())
            async with AsgiClient(app, "POST", CHAT, body=chat()) as client:
                await engines[0].arrived.wait()
                app.router.replicas[0].health = Health.DOWN
                app.look_after_replicas(time.perf_counter())
                assert json.loads(await client.finish()) == {"served_by": 1}

    run(test())


def test_a_client_that_leaves_counts_against_a_replica_only_if_it_waited_much_longer_than_others():
    async def test():
        async with fleet(2) as (app, _):
            router = app.router
            assert not router.is_overdue(100, 500, True)  # nothing was measured yet
            decision = router.choose(app.opener.open(_scope(), chat(), 0.0).route)
            router.note_speed(decision, 0.1, 1000, True)
            assert not router.is_overdue(1.1, 1000, True)
            assert router.is_overdue(1.3, 1000, True)
            assert not router.is_overdue(1.3, 10_000, True)
            replica = router.replicas[0]
            for _ in range(3):
                replica.note_left(True)
            assert not replica.can_serve

    run(test())


def _scope() -> dict[str, Any]:
    return {"path": CHAT, "method": "POST", "headers": [], "query_string": b"", "raw_path": CHAT.encode()}


def test_requests_that_make_engines_close_early_open_no_breaker():
    async def test():
        async with fleet(4, policy="round_robin") as (app, engines):
            for _ in range(6):
                for engine in engines:
                    engine.plan(die_after())
                client, _ = await ask(app, "POST", CHAT, body=chat("poison"))
                assert client.status == 502
                for engine in engines:
                    engine._plans.clear()
            assert all(one.can_serve for one in app.router.replicas)
            assert (await ask(app, "POST", CHAT, body=chat()))[0].status == 200

    run(test())


def test_an_engine_that_closes_early_on_what_others_answer_is_to_blame():
    async def test():
        async with fleet(2, policy="round_robin") as (app, engines):
            engines[0].default = die_after()
            for _ in range(6):
                assert (await ask(app, "POST", CHAT, body=chat()))[0].status == 200
            assert app.router.replicas[0].faults["closed_early"] >= 3
            assert not app.router.replicas[0].can_serve

    run(test())


def test_the_operator_adds_and_removes_replicas_while_requests_run():
    async def test():
        async with fleet(1, admin_key="k") as (app, _), ScriptedEngine() as joined:
            joined.default = answer_json({"served_by": "joined"})
            operator = {"Authorization": "Bearer k"}
            body = json.dumps({"url": joined.url}).encode()
            assert (await ask(app, "POST", "/v1/replicas", body=body))[0].status == 403
            client, told = await ask(app, "POST", "/v1/replicas", body=body, headers=operator)
            assert (client.status, json.loads(told)["id"]) == (201, "r1")
            assert (await ask(app, "POST", "/v1/replicas", body=body, headers=operator))[0].status == 400
            assert (await ask(app, "DELETE", "/v1/replicas/r7", headers=operator))[0].status == 404
            assert (await ask(app, "DELETE", "/v1/replicas/r0", headers=operator))[0].status == 200
            assert json.loads((await ask(app, "POST", CHAT, body=chat()))[1]) == {"served_by": "joined"}
            client, told = await ask(app, "DELETE", "/v1/replicas/r1", headers=operator)
            assert (client.status, "last" in json.loads(told)["error"]["message"]) == (400, True)

    run(test())


def test_a_file_of_replicas_is_followed(tmp_path: Path):
    async def test():
        async with ScriptedEngine() as one, ScriptedEngine() as two:
            file = tmp_path / "replicas"
            file.write_text(f"# ours\n{one.url}\n")
            app = build_router(EdgeSettings(replicas_file=str(file), trace=False))
            file.write_text(f"{two.url}\n")
            app.source.apply_file(app)
            assert [replica.pool.address.url for replica in app.router.replicas] == [two.url]
            await app.close()

    run(test())


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/tokenize", "/detokenize"])
def test_paths_beside_completions_are_forwarded(path: str):
    async def test():
        async with fleet(2) as (app, engines):
            client, _ = await ask(app, "POST", path, body=b"{}")
            assert client.status == 200
            assert [seen.target for engine in engines for seen in engine.requests] == [path]

    run(test())


def test_health_is_not_taken_from_an_old_check():
    async def test():
        async with fleet(2) as (app, engines):
            await app.health.look()
            for engine in engines:
                await engine.stop()
            app.health._checked_at -= 10
            client, body = await ask(app, "GET", "/health")
            assert (client.status, json.loads(body)["replicas_up"]) == (503, 0)

    run(test())


def test_a_fault_before_the_answer_may_be_the_requests_own_and_a_refusal_may_not():
    assert Fault(FaultKind.CLOSED_EARLY).may_be_the_request
    assert not Fault(FaultKind.REFUSED).may_be_the_request
