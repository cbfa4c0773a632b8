"""Moved documents in an engine with HiCache: `test_beside_hicache` runs these in a process of their own.

What HiCache loads from host memory is exact and belongs to the tree; what we move belongs to the request. Each load
must be told apart from the other, in whatever order they come.
"""

from __future__ import annotations

import pytest


@pytest.fixture
def world(engine):
    assert engine.cache.cache_controller is not None, "HiCache is on"
    engine.flush()
    engine.events.clear()
    return engine


def demote(world) -> None:
    """Let HiCache write every page to host memory, then take the tree's slots on the device away."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    for _ in range(20):
        world.step()
    world.cache.evict(EvictParams(num_tokens=world.scheduler.token_to_kv_pool_allocator.size))


def ask_one(world, prompt, **asked):
    (answer,) = world.ask(prompt, **asked)
    return answer


def test_pages_of_host_memory_are_loaded_by_sglang_and_stay_the_trees(world):
    prompt = world.instruction(1) + world.document(501, 64) + world.question()
    cold, free = world.cold(prompt), world.count_free()
    ask_one(world, prompt)
    demote(world)
    assert world.count_free() == free, "nothing is on the device"
    again = ask_one(world, prompt, quality="fast")
    assert again.tokens == cold.tokens
    assert again.cached > 100, "HiCache had it"
    receipt = world.receipt(again)
    assert (receipt.reused_tokens, receipt.exact_tokens) == (0, again.cached)
    assert world.exact_hit(prompt) >= again.cached, "what was loaded is the tree's again"
    world.flush()
    assert world.count_free() == free


def test_a_document_is_moved_after_host_pages_were_loaded_and_pages_are_loaded_after_a_move(world):
    document, free = world.document(511, 64), world.count_free()
    first = world.instruction(1) + document + world.question()
    moved = world.instruction(4) + document + world.question()
    cold = world.cold(moved)
    ask_one(world, first)
    demote(world)
    assert ask_one(world, first).cached > 100, "a load of HiCache"
    reused = ask_one(world, moved, quality="fast")
    assert world.receipt(reused).reused_tokens > 100, "a load of ours"
    assert reused.tokens == cold.tokens
    exact_until = world.receipt(reused).spans[0].target_start
    assert world.exact_hit(moved) <= exact_until + 32, "moved KV is not in the tree"
    demote(world)
    assert ask_one(world, first).cached > 100, "and one of HiCache again"
    world.flush()
    assert world.count_free() == free


def test_moved_kv_never_reaches_host_memory(world):
    document = world.document(521, 64)
    moved = world.instruction(4) + document + world.question()
    cold = world.cold(moved)
    ask_one(world, world.instruction(1) + document + world.question())
    receipt = world.receipt(ask_one(world, moved, quality="fast"))
    assert receipt.reused_tokens > 100
    world.sessions.semblend.clear()
    demote(world)
    again = ask_one(world, moved, opt_out=True)
    assert again.cached <= receipt.spans[0].target_start + 32 + 1  # of the look at deep layers
    assert again.tokens == cold.tokens


def test_both_kinds_at_once_give_each_request_the_answer_it_gets_alone(world):
    free = world.count_free()
    documents = [world.document(531 + n, 64) for n in range(3)]
    firsts = [world.instruction(1) + one + world.question() for one in documents]
    moved = [world.instruction(4) + one + world.question() for one in documents]
    cold = [world.cold(prompt).tokens for prompt in (*firsts, *moved)]
    world.ask(*firsts)
    demote(world)
    mixed = [prompt for pair in zip(firsts, moved, strict=True) for prompt in pair]
    answers = world.ask(*mixed, quality="fast")
    assert [one.tokens for one in answers] == [tokens for n in range(3) for tokens in (cold[n], cold[3 + n])]
    assert sum(bool(world.receipt(one).reused_tokens) for one in answers) == len(moved)
    world.flush()
    assert world.count_free() == free


def test_a_load_of_ours_waits_until_pages_under_way_have_arrived(world, monkeypatch):
    document = world.document(541, 64)
    ask_one(world, world.instruction(1) + document + world.question())
    monkeypatch.setitem(world.cache.ongoing_load_back, -7, None)
    name = world.send(world.instruction(4) + document + world.question(), quality="fast")
    for _ in range(5):
        world.step()
        assert not world.sessions.find(name).is_loading
    monkeypatch.undo()
    while not world.answers[name].done:
        world.step()
    assert world.receipt(world.answers[name]).reused_tokens > 100


def test_host_pages_that_could_not_be_loaded_are_not_counted_as_exact(world, monkeypatch):
    prompt = world.instruction(1) + world.document(551, 64) + world.question()
    cold = world.cold(prompt)
    ask_one(world, prompt)
    demote(world)
    monkeypatch.setattr(world.cache, "load_back", lambda *args, **more: False)
    again = ask_one(world, prompt, quality="fast")
    assert again.tokens == cold.tokens
    receipt = world.receipt(again)
    assert receipt.exact_tokens == again.cached < 100
    assert receipt.exact_tokens + receipt.reused_tokens + receipt.recomputed_tokens + receipt.prefill_tokens == len(
        prompt
    )
