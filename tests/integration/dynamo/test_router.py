"""Requests go where their passages were computed; Dynamo chooses for the rest; a dead worker costs no request."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from fake_dynamo import FakeDynamo
from hypothesis import given, settings
from hypothesis import strategies as st

from semantickv.routing.worker_evidence import WorkerEvidence
from semblend.integration.dynamo.placement import WorkerKey
from semblend.integration.dynamo.requests import read_request, read_worker
from semblend.integration.dynamo.router import SemanticRouter

DOCUMENT = np.random.default_rng(7).integers(0, 30_000, 1200).tolist()
OTHER = np.random.default_rng(8).integers(0, 30_000, 1200).tolist()
ASKED = {"nvext": {"extra_fields": ["engine_data"]}}


def ask(*tokens: int, document: list[int] = DOCUMENT, **more: Any) -> dict[str, Any]:
    """A question in front of a document: no two of them begin alike."""
    return {"model": "m", "token_ids": [*tokens, *document], "extra_args": ASKED, **more}


class Deployment:
    """A router over fake workers; `serve` runs one request to its end."""

    def __init__(self, count: int = 3) -> None:
        self.dynamo = FakeDynamo(count)
        self.evidence = WorkerEvidence(1_000_000, clock=lambda: self.now)
        self.router = SemanticRouter(self.dynamo, self.evidence)
        self.now = 0.0

    async def serve(self, request: dict[str, Any]) -> list[Any]:
        return [chunk async for chunk in self.router.generate(request)]

    async def place(self, request: dict[str, Any]) -> tuple[WorkerKey, str]:
        """Who served a request, and why it went there."""
        chunks = await self.serve(request)
        worker = read_worker(chunks[0])
        assert worker is not None
        return worker, chunks[0]["engine_data"]["semblend"]["reason"]


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 300))


def test_a_shifted_document_goes_where_it_was_computed():
    async def test():
        one = Deployment()
        home, reason = await one.place(ask(1))
        assert reason == "unknown"
        one.dynamo.workers[home].busy = 3  # Dynamo itself would now send it elsewhere
        for shift in (5, 77, 200):
            assert await one.place(ask(*range(shift))) == (home, "donors")

    run(test())


def test_an_unknown_prompt_is_sent_without_a_pin_and_remembered_where_dynamo_put_it():
    async def test():
        one = Deployment()
        first, _ = await one.place(ask(1))
        second, reason = await one.place(ask(1, document=OTHER))
        assert reason == "unknown"
        assert all(request["routing"] is None for request in one.dynamo.requests)
        assert (await one.place(ask(9)), await one.place(ask(9, document=OTHER))) == (
            (first, "donors"),
            (second, "donors"),
        )

    run(test())


def test_a_busy_home_leaves_the_request_to_dynamo():
    async def test():
        one = Deployment()
        home, _ = await one.place(ask(1))
        one.dynamo.workers[home].busy = 100
        worker, reason = await one.place(ask(2))
        assert (worker != home, reason) == (True, "load")

    run(test())


def test_a_home_with_much_to_compute_leaves_the_request_to_dynamo():
    async def test():
        one = Deployment()
        home, _ = await one.place(ask(1))
        one.dynamo.workers[home].waiting_tokens = 100_000
        assert (await one.place(ask(2)))[1] == "load"

    run(test())


def test_a_dead_worker_is_gone_around_before_a_token_was_sent():
    async def test():
        one = Deployment()
        home, _ = await one.place(ask(1))
        one.dynamo.kill(home)
        worker, reason = await one.place(ask(2))
        assert (worker != home, reason) == (True, "fault")
        assert one.router.counts["worker_faults"] == 1
        # From now on its document lives elsewhere, and nobody asks the dead one again while Dynamo still lists it.
        assert await one.place(ask(3)) == (worker, "donors")
        assert one.router.counts["retried"] == 1

    run(test())


def test_a_worker_that_dynamo_no_longer_lists_is_forgotten():
    async def test():
        one = Deployment()
        home, _ = await one.place(ask(1))
        one.dynamo.remove(home)
        worker, reason = await one.place(ask(2))
        assert (worker != home, reason) == (True, "unknown")
        assert home not in one.evidence.tracked_tokens

    run(test())


def test_a_worker_that_comes_back_is_used_again_after_its_lease():
    async def test():
        one = Deployment(1)
        home, _ = await one.place(ask(1))
        one.dynamo.kill(home)
        with pytest.raises(Exception, match="Unavailable"):
            await one.serve(ask(2))
        one.dynamo.workers[home].is_alive = True
        assert (await one.place(ask(3)))[1] == "unknown"
        one.now = 11.0
        assert await one.place(ask(4)) == (home, "donors")

    run(test())


def test_an_answer_that_breaks_off_is_not_sent_again():
    """Half an answer is at the client already; Dynamo's frontend knows how to go on with it, and we do not."""

    async def test():
        one = Deployment()
        home, _ = await one.place(ask(1))
        one.dynamo.workers[home].dies_after = 2
        answer = one.router.generate(ask(2))
        assert len([await anext(answer), await anext(answer)]) == 2
        with pytest.raises(Exception, match="before its end"):
            await anext(answer)
        assert len(one.dynamo.requests) == 2

    run(test())


def test_a_pin_that_dynamo_refuses_costs_no_request():
    async def test():
        one = Deployment()
        home, _ = await one.place(ask(1))
        one.dynamo.refusal = Exception("ResourceExhausted: the pinned worker has no room")
        _, reason = await one.place(ask(2))
        assert reason == "fault"
        one.dynamo.refusal = None
        assert await one.place(ask(3)) == (home, "donors")  # a full worker is not a dead one: nothing was forgotten

    run(test())


def test_a_request_that_dynamo_refuses_is_refused_once():
    async def test():
        one = Deployment(1)
        bad = {"model": "m", "token_ids": [1]}

        async def refuse(request):
            raise Exception("InvalidRequest: too long")

        one.dynamo.send = refuse
        with pytest.raises(Exception, match="too long"):
            await one.serve(bad)
        assert one.router.counts["retried"] == 0

    run(test())


def test_a_burst_for_one_document_lands_on_one_worker():
    """Those behind the first come before its first token, so before any KV event; the pin remembers at once."""

    async def test():
        one = Deployment()
        home, _ = await one.place(ask(1))
        one.dynamo.release.clear()
        burst = [asyncio.ensure_future(one.place(ask(10 + at))) for at in range(5)]
        await asyncio.sleep(0.01)
        one.dynamo.release.set()
        assert {worker for worker, _ in await asyncio.gather(*burst)} == {home}

    run(test())


@pytest.mark.parametrize(
    "other",
    [{"model": "another"}, {"routing": {"cache_salt": "tenant-b"}}, {"routing": {"lora_name": "adapter"}}],
)
def test_nothing_crosses_a_namespace(other):
    async def test():
        one = Deployment()
        await one.place(ask(1))
        assert (await one.place(ask(*range(40), **other)))[1] == "unknown"

    run(test())


@pytest.mark.parametrize(
    "rule",
    [
        {"routing": {"routing_constraints": {"required_taints": ["eu"]}}},
        {"routing": {"priority": 5}},
        {"multi_modal_data": {"image_url": ["data:"]}},
        {"prefill_result": {"disaggregated_params": {}}},
    ],
)
def test_a_request_with_rules_of_its_own_is_dynamos(rule):
    async def test():
        one = Deployment()
        await one.place(ask(1))
        assert (await one.place(ask(2, **rule)))[1] == "constrained"
        sent = one.dynamo.requests[-1]["routing"] or {}
        assert "backend_instance_id" not in sent
        assert sent == rule.get("routing", {})

    run(test())


def test_hints_that_named_this_router_do_not_reach_a_worker():
    async def test():
        one = Deployment()
        await one.serve(ask(1, routing={"backend_instance_id": 999, "dp_rank": 0, "expected_output_tokens": 4}))
        assert one.dynamo.requests[-1]["routing"] == {"expected_output_tokens": 4}

    run(test())


@pytest.mark.parametrize("part", ["read", "choose", "note_placed", "note_answer", "note_workers"])
def test_a_fault_of_the_evidence_costs_no_request(part, monkeypatch, caplog):
    async def test():
        one = Deployment()
        await one.place(ask(1))

        def fail(*_: object) -> None:
            raise RuntimeError("evidence is broken")

        monkeypatch.setattr(one.evidence, part, fail)
        assert len(await one.serve(ask(2))) == 3

    run(test())
    assert "evidence is broken" in caplog.text


def test_a_dynamo_that_tells_nothing_still_serves(caplog):
    async def test():
        one = Deployment()
        one.dynamo.fault = RuntimeError("the indexer is gone")
        assert (await one.place(ask(1)))[1] == "fault"

    run(test())
    assert "Dynamo chooses" in caplog.text


def test_a_fault_that_lasts_does_not_fill_the_log(caplog):
    async def test():
        one = Deployment()
        one.dynamo.fault = RuntimeError("the indexer is gone")
        for at in range(100):
            await one.serve(ask(at))
        assert one.router.counts["evidence_faults"] == 100

    run(test())
    assert len(caplog.records) == 7


def test_an_answer_tells_of_its_placement_only_to_whoever_asked():
    async def test():
        one = Deployment()
        quiet = await one.serve(ask(1, extra_args=None))
        loud = await one.serve(ask(2))
        assert all("engine_data" not in chunk for chunk in quiet)
        assert loud[0]["engine_data"]["semblend"]["outcome"] == "semantic_placement"

    run(test())


def test_engine_data_of_a_worker_stays_beside_ours():
    async def test():
        one = Deployment()
        answer = one.dynamo._answer

        async def with_data(worker, tokens):
            async for chunk in answer(worker, tokens):
                yield chunk | {"engine_data": {"mine": 1}}

        one.dynamo._answer = with_data
        chunks = await one.serve(ask(1))
        assert chunks[0]["engine_data"]["mine"] == 1
        assert "semblend" in chunks[0]["engine_data"]

    run(test())


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["token_ids", "model", "routing", "extra_args", "multi_modal_data"]),
        st.one_of(st.none(), st.integers(), st.text(max_size=4), st.lists(st.integers(-(2**40), 2**40), max_size=4)),
    )
)
def test_whatever_a_request_looks_like_dynamo_gets_to_judge_it(fields):
    async def test():
        one = Deployment()

        async def take(request):
            one.dynamo.requests.append(request)
            return one.dynamo._answer(next(iter(one.dynamo.workers.values())), [1])

        one.dynamo.send = take
        await one.serve(fields)
        assert one.dynamo.requests[0].get("token_ids") == fields.get("token_ids")

    run(test())


def test_reading_a_request_takes_its_salt_as_namespace():
    read = read_request({"model": "m", "token_ids": [1], "routing": {"cache_salt": "s", "dp_rank": 0}})
    assert (read.cache_salt, read.lora_name, read.is_constrained) == ("s", None, False)
