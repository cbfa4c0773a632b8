"""A load that waits for its next step in a real SGLang scheduler whose pool is small: nobody waits for its slots.

SGLang's admission asks for all slots of a request again, also for those that its own load holds already, and evicts
nothing for that; the requests behind it wait until it is admitted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

ANSWER, ROOM = 32, 20
"""Tokens of a long prompt's answer, and of a pool beside the prompt twice: the prompt and its answer fit in once."""


@pytest.fixture
def world(engine):
    """Each step does one piece of a load."""
    engine.events.clear()
    kept, engine.sessions.settings = engine.sessions.settings, replace(engine.sessions.settings, step_work_ms=1e-6)
    yield engine
    engine.sessions.settings = kept
    engine.flush()


def make_prompts(world, seed: int) -> tuple[list[int], list[int]]:
    """A prompt that becomes a donor, and a longer one about the same document."""
    document = world.document(seed, 48)
    return world.instruction(1) + document + world.question(), world.instruction(6) + document + world.question()


def begin_load(world, target: list[int]) -> tuple[str, str]:
    """A small request that runs, and a long one whose load has begun and waits for its next step."""
    running = world.send(world.instruction(2) + world.question(), tokens=12)
    world.step()
    waiting = world.send(target, tokens=ANSWER, quality="fast")
    world.step()
    assert world.sessions.find(waiting).is_loading, "the load was to take several steps"
    return running, waiting


def test_a_long_prompt_whose_load_waits_does_not_stop_the_server(world):
    donor, target = make_prompts(world, 401)
    with world.shrink_pool(2 * len(target) + ROOM):
        world.ask(donor)
        running, waiting = begin_load(world, target)
        behind = world.send(world.instruction(3) + world.question())
        steps = world.step_until_answered(running, waiting, behind)
        done = [world.answers[name].done for name in (running, waiting, behind)]
        assert done == [True] * 3, f"{len(world.scheduler.waiting_queue)} requests wait after {steps} steps"
        assert world.receipt(world.answers[waiting]).reused_tokens > 0
        assert world.count_steps_of_load > 1


@pytest.mark.parametrize("exact", [False, True], ids=["", "whose exact prefix is in the tree"])
def test_a_request_that_is_put_in_front_gets_the_slots_of_a_load_that_waits(world, exact):
    """As a scheduler does that goes by priority: the load loses what it has, and begins again."""
    donor, target = make_prompts(world, 411)
    other = world.document(412, 64)
    with world.shrink_pool(2 * len(target) + ROOM):
        world.ask(target[: len(world.instruction(6)) + 40] if exact else world.question(), opt_out=not exact)
        world.ask(donor)
        running, waiting = begin_load(world, target)
        first = world.send(other, tokens=ANSWER)
        queue = world.scheduler.waiting_queue
        queue.insert(0, queue.pop())
        assert queue[0].rid == first
        world.step_until_answered(running, waiting, first)
        assert [world.answers[name].done for name in (running, waiting, first)] == [True] * 3


def test_slots_of_a_load_that_waits_are_in_sglangs_books(world):
    donor, target = make_prompts(world, 421)
    with world.shrink_pool(3 * len(target)):
        world.ask(donor)
        running, waiting = begin_load(world, target)
        world.scheduler.invariant_checker.self_check_during_busy()
        assert world.step_until_answered(running, waiting, check=True) < 300


def test_an_answer_that_grows_takes_the_slots_of_a_load_that_waits_and_nobody_is_retracted(world, monkeypatch):
    donor, target = make_prompts(world, 431)
    with world.shrink_pool(2 * len(target) + ROOM):
        world.ask(donor)
        running, waiting = begin_load(world, target)
        free = world.count_free() + world.cache.tree_core.evictable_size()
        world.cache.evict_for_alloc(make_params(free + 5))
        assert not world.sessions.find(waiting).is_loading
        world.scheduler.invariant_checker.self_check_during_busy()
        assert world.step_until_answered(running, waiting, check=True) < 300


def make_params(tokens: int):
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    return EvictParams(num_tokens=tokens)


def test_an_abort_of_a_load_that_waits_lets_the_next_one_in(world):
    donor, target = make_prompts(world, 441)
    with world.shrink_pool(2 * len(target) + ROOM):
        world.ask(donor)
        running, doomed = begin_load(world, target)
        behind = world.send(world.ids("Once more. ") + target, tokens=ANSWER, quality="fast")
        world.abort(doomed)
        assert world.step_until_answered(running, behind, check=True) < 300
        assert world.receipt(world.answers[behind]).reused_tokens > 0


def test_a_flush_of_a_paused_engine_stops_a_load_that_waits(world):
    """SGLang flushes while requests wait when it is paused, as for new weights."""
    donor, target = make_prompts(world, 451)
    world.ask(donor)
    running, waiting = begin_load(world, target)
    world.abort(running)
    while world.scheduler.running_batch.reqs or world.scheduler.last_batch:
        world.sessions.work, work = lambda *args, **more: None, world.sessions.work  # the load stays where it is
        world.step()
        world.sessions.work = work
    assert world.sessions.find(waiting).is_loading
    world.scheduler._engine_paused = True
    try:
        assert world.scheduler.flush_cache()
    finally:
        world.scheduler._engine_paused = False
    assert not world.sessions.find(waiting).is_loading
    assert world.step_until_answered(waiting) < 300
    assert world.receipt(world.answers[waiting]).reused_tokens == 0, "the donors went with the flush"
