"""Whatever of ours fails behind a hook that SGLang's scheduler calls: the step goes on, and the answer is as ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest

FAULTS = [
    *(
        "sessions.find_request",
        "sessions.offer",
        "sessions.load",
        "sessions.work",
        "sessions.find_exact_until",
        "sessions.note_prompt",
    ),
    *(
        "sessions.forget",
        "sessions.stop_loads",
        "sessions.count_waiting_slots",
        "sessions._get_blender",
        "sessions._pool.take",
    ),
    *("sessions.semblend.lookup", "sessions.semblend.claim", "sessions.semblend.release", "sessions.semblend.confirm"),
    *(
        "sessions.semblend.register",
        "sessions.semblend.events.emit",
        "sessions.donors.keep",
        "sessions.donors.name_generations",
    ),
    *("sessions.donors.kv.capture", "sessions.donors.kv.acquire", "sessions.donors.kv.release"),
    *("cache._offer", "cache._note_prompt", "cache._path_slots", "cache._wait_for_step", "cache._is_busy"),
    *("cache._note_use", "cache._forget_waiting", "cache._forget_released"),
    *(
        "sessions.offer sessions.give_up",
        "sessions.work sessions.give_up",
        "sessions.note_prompt sessions.give_up",
        "sessions.work sessions._stop_load",
    ),
]
"""What fails, by its place in the world; two words are two failures at once. Lookups in a dictionary are not here."""


def fail(*args: Any, **more: Any) -> Any:
    raise RuntimeError("as if memory or a disk had run out")


@pytest.fixture
def world(engine):
    """Each step does one piece of a load."""
    engine.flush()
    engine.events.clear()
    kept, engine.sessions.settings = engine.sessions.settings, replace(engine.sessions.settings, step_work_ms=1e-6)
    yield engine
    engine.sessions.settings = kept
    engine.cache._sessions = engine.sessions
    for name in list(engine.sessions._book):  # what could not be forgotten while that was broken
        engine.sessions.forget(name)
    engine.flush()


@pytest.fixture(scope="module")
def prompts(engine) -> tuple[list[int], list[int]]:
    """A prompt that becomes a donor, and one about the same document."""
    document = engine.document(501, 32)
    return engine.instruction(1) + document + engine.question(), engine.instruction(2) + document + engine.question()


@pytest.fixture(scope="module")
def usual(engine, prompts) -> list[list[int]]:
    """What the second prompt is answered with, computed and with reuse."""
    engine.flush()
    cold = engine.cold(prompts[1]).tokens
    engine.ask(prompts[0])
    (reused,) = engine.ask(prompts[1], quality="fast")
    assert engine.receipt(reused).reused_tokens > 0
    return [cold, reused.tokens]


def live(world, prompts) -> str:
    """A request that runs, one whose load waits, one that is aborted meanwhile, and room that is asked for."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    running = world.send(world.instruction(3), tokens=8)
    world.step()
    waiting = world.send(prompts[1], quality="fast")
    doomed = world.send(world.instruction(4) + prompts[1], quality="fast")
    world.step()
    world.cache.evict_for_alloc(EvictParams(num_tokens=world.count_free() + 1))
    world.abort(doomed)
    assert world.step_until_answered(running, waiting) < 300, "somebody waits for ever"
    return waiting


def break_all(monkeypatch, world, places: str, how: Callable[..., Any] = fail) -> None:
    for place in places.split():
        owner, _, name = place.rpartition(".")
        monkeypatch.setattr(reduce(getattr, owner.split("."), world), name, how)


@pytest.mark.parametrize("places", FAULTS)
def test_a_failure_behind_a_hook_reaches_no_scheduler_step(world, prompts, usual, places, monkeypatch):
    free = world.count_free()
    world.ask(prompts[0])
    if places == "sessions._pool.take":
        world.sessions._pool, kept = replace(world.sessions._pool, take=fail), world.sessions._pool
    else:
        break_all(monkeypatch, world, places)
    try:
        waiting = live(world, prompts)
    finally:
        monkeypatch.undo()
        if places == "sessions._pool.take":
            world.sessions._pool = kept
    assert world.answers[waiting].tokens in usual
    world.flush()
    assert world.count_free() == free
    if places == "sessions.donors.kv.release":
        world.sessions.donors.kv._books.held.clear()  # for the tests that follow


def test_without_a_failure_the_document_is_reused(world, prompts, usual):
    """So that the failures above have something to break."""
    world.ask(prompts[0])
    waiting = live(world, prompts)
    assert world.receipt(world.answers[waiting]).reused_tokens > 0
    assert world.count_steps_of_load > 1


@pytest.mark.parametrize("place", ["sessions.reset", "sessions.donors.drop_all", "sessions.semblend.clear"])
def test_donors_that_cannot_be_dropped_are_never_used_again(world, prompts, usual, place, monkeypatch):
    world.ask(prompts[0])
    break_all(monkeypatch, world, place)
    world.flush()
    monkeypatch.undo()
    (answer,) = world.ask(prompts[1], quality="fast")
    assert answer.tokens == usual[0]
    assert answer.cached == 0


def test_a_storage_that_cannot_be_asked_around_what_we_offer_is_asked_as_ever(world, monkeypatch):
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    asked = []
    monkeypatch.setattr(UnifiedRadixCache, "prefetch_from_storage", lambda *args, **more: asked.append((args, more)))
    break_all(monkeypatch, world, "sessions.find_source")
    handle = type("Handle", (), {"rid": "r"})()
    world.cache.prefetch_from_storage(handle, 7, [3, 4], matched_prefix_tokens=[1, 2])
    ((args, more),) = asked
    assert args[1:] == (handle, 7, [3, 4])
    assert more == {"matched_prefix_tokens": [1, 2]}
