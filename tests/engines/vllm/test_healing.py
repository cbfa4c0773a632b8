"""Prefixes that many requests load, in a real vLLM: computed exactly once, then found in its own prefix cache."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter

import pytest
import torch
from vllm_world import worst

from semblend.integration.vllm.scheduler.scheduler_connector import PendingLoads

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BLOCK = 32
INSTRUCTION, DOCUMENT, QUESTION = 60, 600, 12
SHARED = (INSTRUCTION + DOCUMENT) // BLOCK * BLOCK
USERS = 14


@pytest.fixture
def healing(any_world):
    any_world.half.healing.on = True
    yield any_world
    assert any_world.half.healing.on, "it did not fail"
    any_world.half.healing.on = False
    any_world.scheduler.scheduler_config.long_prefill_token_threshold = 0


def make_tokens(rng, count):
    return [rng.randrange(10, 40_000) for _ in range(count)]


def make_prompts(seed, users=USERS):
    """A donor's prompt, and those of users with one other instruction, the same document and their own question."""
    rng = random.Random(seed)
    document, instruction = make_tokens(rng, DOCUMENT), make_tokens(rng, INSTRUCTION)
    prompts = [instruction + document + make_tokens(rng, QUESTION) for _ in range(users)]
    return make_tokens(rng, 20) + document + make_tokens(rng, QUESTION), prompts


def start_requests(world, prompts, tokens=4, name="user", **asked):
    from vllm import SamplingParams

    extra = {"kv_transfer_params": {"semblend": asked}} if asked else None
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra)
    for number, prompt in enumerate(prompts):
        world.llm.llm_engine.add_request(f"{name}-{number}", {"prompt_token_ids": prompt}, params)


def finish_requests(world):
    """Steps to the end; the answers by name, and how many blocks were held after each step."""
    outputs, held, free = {}, [], world.count_free_blocks()
    engine = world.llm.llm_engine
    while engine.has_unfinished_requests():
        outputs |= {one.request_id: one for one in engine.step() if one.finished}
        held.append(free - world.count_free_blocks())
    return outputs, held


def poison_everything(world):
    """No block holds what an earlier request has left there."""
    layout = world.worker._model.layout
    slots = torch.arange(layout.slots)
    for layer in range(layout.layers):
        k, v = layout.gather(layer, slots)
        layout.scatter(layer, slots, k.fill_(1000.0), v.fill_(1000.0))


def read_answer(output):
    return list(output.outputs[0].token_ids)


def test_after_one_prefill_the_rest_hit_exactly_and_answer_as_cold(healing):
    donor, prompts = make_prompts(1)
    cold = [read_answer(healing.cold(prompt)) for prompt in prompts]
    healing.ask(donor)
    answers = [healing.ask(prompt)[0] for prompt in prompts]
    receipts = [healing.receipt(answer) for answer in answers]
    reasons = [receipt["reason"] for receipt in receipts]
    assert reasons.count("shared_prefix") == 1
    bought = reasons.index("shared_prefix")
    assert 1 < bought < USERS - 3, "the first ones are loaded"
    assert {receipt["outcome"] for receipt in receipts[:bought]} == {"backend_materialized_reuse"}
    assert {receipt["exact_tokens"] for receipt in receipts[bought + 1 :]} == {SHARED}
    assert [read_answer(answer) for answer in answers[bought:]] == cold[bought:]
    assert len(healing.loads) == bought


def serve_burst(world, prompts, **asked):
    """All users at once: what became of their prompts, and what that took."""
    engine, free, started = world.llm.llm_engine, world.count_free_blocks(), time.perf_counter()
    start_requests(world, prompts, **asked)
    outputs, ttft, steps, blocks = {}, {}, 0, 0
    while engine.has_unfinished_requests():
        for one in engine.step():
            ttft.setdefault(one.request_id, (time.perf_counter() - started) * 1e3)
            if one.finished:
                outputs[one.request_id] = one
        steps, blocks = steps + 1, max(blocks, free - world.count_free_blocks())
    receipts = [world.receipt(one) for one in outputs.values()]
    kinds = [(one["reused_tokens"] > 0, one["exact_tokens"] == SHARED) for one in receipts]
    became = Counter("loaded" if reused else "found" if exact else "computed" for reused, exact in kinds)
    found = {**became, "steps": steps, "blocks": blocks, "TTFT p50 ms": round(statistics.median(ttft.values()))}
    return [read_answer(outputs[f"user-{number}"]) for number in range(len(prompts))], found


def test_users_of_one_document_who_come_at_once_are_served_as_by_stock_vllm(healing, monkeypatch):
    """``-s`` shows what each rule does; only the last two differ by more than times."""
    found, users = {}, 24
    for number, rule in enumerate(("stock", "as they wait", "as they are loaded")):
        donor, prompts = make_prompts(20 + number, users)
        healing.ask(donor)
        answers, found[rule] = serve_burst(healing, prompts, **({"opt_out": True} if rule == "stock" else {}))
        healing.settle()
        if rule == "as they wait":
            assert answers == [read_answer(healing.cold(prompt)) for prompt in prompts]
            monkeypatch.setattr(healing.half, "note_arrival", lambda _request: None)
        print(f"{rule}: {found[rule]}")
    stock, ours, before = found.values()
    assert (ours["computed"], ours["found"]) == (stock["computed"], stock["found"]) == (1, users - 1)
    assert ours["steps"] == stock["steps"]
    assert ours["blocks"] == stock["blocks"] < before["blocks"]
    assert before["loaded"] > 1, "a rule that sees only who was loaded"


def test_who_comes_alone_is_loaded_and_the_burst_behind_it_costs_one_prefill(healing):
    donor, prompts = make_prompts(30, 24)
    healing.ask(donor)
    start_requests(healing, prompts[:1], name="first")
    healing.llm.llm_engine.step()
    assert len(healing.loads) == 1, "in its first step"
    _, found = serve_burst(healing, prompts[1:])
    healing.settle()
    assert len(healing.loads) == 1
    assert (found["loaded"], found["computed"], found["found"]) == (1, 1, 22)


@pytest.mark.parametrize("chunk", [64, 96, 128, 256])
def test_those_who_come_while_the_prefix_is_computed_in_chunks_wait_for_it(healing, chunk):
    donor, prompts = make_prompts(5)
    cold = [read_answer(healing.cold(prompt)) for prompt in prompts]
    healing.scheduler.scheduler_config.long_prefill_token_threshold = chunk
    healing.ask(donor)
    start_requests(healing, prompts)
    outputs, _ = finish_requests(healing)
    receipts = [healing.receipt(outputs[f"user-{number}"]) for number in range(USERS)]
    bought = [receipt["reason"] for receipt in receipts].index("shared_prefix")
    assert len(healing.loads) == bought, "nobody is loaded after it"
    assert {receipt["exact_tokens"] for receipt in receipts[bought + 1 :]} == {SHARED}
    assert [read_answer(outputs[f"user-{n}"]) for n in range(bought, USERS)] == cold[bought:]


def test_who_waits_for_a_prefill_that_is_aborted_is_served_all_the_same(healing):
    donor, prompts = make_prompts(6)
    healing.scheduler.scheduler_config.long_prefill_token_threshold = 64
    healing.ask(donor)
    start_requests(healing, prompts)
    engine, books = healing.llm.llm_engine, healing.half.healing.accounts
    while not books._waits:
        engine.step()
    (owner,) = books._owners
    engine.abort_request([owner.rpartition("-")[0]])
    outputs, _ = finish_requests(healing)
    assert len(outputs) == USERS - 1
    assert not books._waits
    assert not books._owners


def compare_with_a_prefix_of_the_same_step(world):
    """How far the KV of a load is off when another request of its first step computes the exact blocks before it."""
    rng = random.Random(7)
    head, document = make_tokens(rng, 3 * BLOCK), make_tokens(rng, 300)
    target = head + document + make_tokens(rng, QUESTION)
    world.ask(make_tokens(rng, 20) + document)
    world.ask(head + make_tokens(rng, 40), opt_out=True)
    (alone,) = world.ask(target)
    kv = world.kv_of(alone)
    assert world.loads[-1].exact_tokens == len(head)
    world.forget_prefixes()
    world.half.shares.clear()
    poison_everything(world)
    _, together = world.ask(head + make_tokens(rng, 200), target)
    assert world.loads[-1].exact_tokens == len(head)
    return worst(world.kv_of(together), kv)


def test_a_load_reads_the_exact_blocks_in_front_of_it_when_they_are_computed(any_world):
    assert compare_with_a_prefix_of_the_same_step(any_world) < 1e-3


def test_where_a_load_is_not_held_back_the_same_check_fails(small_world, monkeypatch):
    monkeypatch.setattr(PendingLoads, "_may_read", lambda *_: True)
    assert compare_with_a_prefix_of_the_same_step(small_world) > 1
