"""What must hold in a real SGLang scheduler whatever goes wrong: slots come back, and answers are as without us."""

from __future__ import annotations

import random

import pytest

from semblend.materialize.blend.passes import PassRunner
from semblend.plan.reuse_plan import DeclineReason


@pytest.fixture
def world(engine):
    engine.flush()
    engine.events.clear()
    return engine


@pytest.fixture
def free(world):
    """Slots that are free when nobody has asked anything."""
    return world.count_free()


def donate(world, seed: int, items: int = 64) -> list[int]:
    document = world.document(seed, items)
    world.ask(world.instruction(1) + document + world.question())
    return document


def test_slots_come_back_when_the_tree_is_emptied(world, free):
    document = donate(world, 101)
    world.ask(*(world.instruction(n) + document + world.question() for n in (2, 3, 4)), quality="fast")
    world.flush()
    assert world.count_free() == free


def test_requests_at_once_each_get_the_answer_they_get_alone(world, monkeypatch):
    # Which rows deep layers are judged by is drawn for each request, and those are computed: without them loads of one
    # prompt are alike.
    monkeypatch.setattr(PassRunner, "_make_deep_look", lambda *_: None)
    documents = [donate(world, 111), donate(world, 112)]
    prompts = [world.instruction(n) + documents[n % 2] + world.question() for n in range(2, 6)]
    alone = [world.ask(prompt, quality="fast")[0] for prompt in prompts]
    world.forget_prefixes()
    at_once = world.ask(*prompts, quality="fast")
    assert [one.tokens for one in at_once] == [one.tokens for one in alone]
    assert all(world.receipt(one).reused_tokens for one in at_once)


def test_a_load_waits_for_its_next_step_while_others_decode(world, free):
    document = donate(world, 121, 96)
    world.sessions.settings, kept = _with_short_steps(world), world.sessions.settings
    try:
        running = world.send(world.instruction(6) + world.question(), tokens=24)
        world.step()
        waiting = world.send(world.instruction(3) + document + world.question(), quality="fast")
        steps = 0
        while not world.answers[waiting].done:
            world.step()
            steps += 1
            assert steps < 200
        loading_steps = world.count_steps_of_load
        assert world.receipt(world.answers[waiting]).reused_tokens > 0
        assert loading_steps > 1, "the load was to take several steps"
        while not world.answers[running].done:
            world.step()
    finally:
        world.sessions.settings = kept
    world.flush()
    assert world.count_free() == free


def test_an_abort_in_the_middle_of_a_load_gives_its_slots_back(world, free):
    document = donate(world, 131, 96)
    world.sessions.settings, kept = _with_short_steps(world), world.sessions.settings
    try:
        running = world.send(world.instruction(6) + world.question(), tokens=16)
        world.step()
        doomed = world.send(world.instruction(3) + document + world.question(), quality="fast")
        world.step()
        assert world.sessions.find(doomed).is_loading
        world.abort(doomed)
        assert world.sessions.find(doomed) is None
        while not world.answers[running].done:
            world.step()
    finally:
        world.sessions.settings = kept
    world.flush()
    assert world.count_free() == free
    assert world.sessions.donors.kv.holders == 0


def test_an_abort_between_planning_and_allocation_leaves_nothing(world, free):
    document = donate(world, 137)
    held = world.count_free()
    doomed = world.send(world.instruction(3) + document + world.question(), quality="fast")
    (request,) = world.scheduler.waiting_queue
    request.init_next_round_input(world.cache)
    assert request.host_hit_length > 0, "it was planned"
    assert world.sessions.find(doomed) is not None
    world.abort(doomed)
    assert world.sessions.find(doomed) is None
    assert world.count_free() == held
    world.flush()
    assert world.count_free() == free
    assert world.sessions.donors.kv.holders == 0


def test_an_aborted_request_that_runs_leaves_no_slot_and_no_claim(world, free):
    document = donate(world, 141)
    name = world.send(world.instruction(3) + document + world.question(), tokens=64, quality="fast")
    for _ in range(4):
        world.step()
    world.abort(name)
    world.flush()
    assert world.count_free() == free
    assert not len(world.sessions)


@pytest.mark.parametrize("where", ["offer", "load", "work", "note_prompt", "_get_blender"])
def test_a_failure_of_ours_costs_time_and_never_the_answer(world, free, where, monkeypatch):
    document = donate(world, 151)
    prompt = world.instruction(4) + document + world.question()
    cold = world.cold(prompt)

    def fail(*args, **more):
        raise RuntimeError("as if a disk were full")

    monkeypatch.setattr(world.sessions, where, fail)
    (answer,) = world.ask(prompt, quality="fast")
    monkeypatch.undo()
    assert answer.tokens == cold.tokens
    world.flush()
    assert world.count_free() == free


def test_poisoned_donor_kv_is_refused_and_its_donor_forgotten(world):
    document = donate(world, 161)
    prompt = world.instruction(4) + document + world.question()
    cold = world.cold(prompt)
    world.poison_donors()
    (answer,) = world.ask(prompt, quality="fast")
    receipt = world.receipt(answer)
    assert answer.tokens == cold.tokens
    assert receipt.reused_tokens == 0
    assert receipt.reason is DeclineReason.VALIDATION_FAILED
    assert len(world.sessions.donors.kv) <= 1, "the poisoned donor is gone; the prompt that was computed may be one"


def test_a_donor_that_leaves_between_offer_and_load_costs_a_cold_prefill(world):
    document = donate(world, 171)
    prompt = world.instruction(4) + document + world.question()
    cold = world.cold(prompt)
    decide = world.sessions._sessions._decide

    def decide_and_lose(record):
        found = decide(record)
        world.sessions.donors.kv.drop_all()
        return found

    world.sessions._sessions._decide = decide_and_lose
    try:
        (answer,) = world.ask(prompt, quality="fast")
    finally:
        del world.sessions._sessions._decide
    assert answer.tokens == cold.tokens
    assert world.receipt(answer).reason is DeclineReason.STALE


def test_new_weights_drop_every_donor(world):
    document = donate(world, 181)
    weight = world.model.module.model.layers[0].self_attn.qkv_proj.weight
    weight.data.add_(1e-3)
    try:
        (answer,) = world.ask(world.instruction(4) + document + world.question(), quality="fast")
        assert world.receipt(answer).reused_tokens == 0
    finally:
        weight.data.sub_(1e-3)
        world.flush()
        world.sessions._watch.have_changed()


def test_a_flush_of_the_cache_drops_donors(world):
    document = donate(world, 191)
    world.flush()
    (answer,) = world.ask(world.instruction(4) + document + world.question(), quality="fast")
    assert world.receipt(answer).reused_tokens == 0


@pytest.mark.parametrize("seed", [1])
def test_a_storm_of_aborts_at_any_moment_leaves_no_slot_no_claim_and_right_answers(world, free, seed):
    """SessionRequest, loading in pieces, in a batch, decoding: an abort comes whenever it comes."""
    rng = random.Random(seed)
    documents = [donate(world, 311), donate(world, 312)]
    prompts = [world.instruction(n) + documents[n % 2] + world.question() for n in range(2, 6)]
    alone = [world.ask(prompt, quality="fast")[0].tokens for prompt in prompts]
    world.forget_prefixes()
    world.sessions.settings, kept = _with_short_steps(world), world.sessions.settings
    alive, aborted = {}, 0
    try:
        for _ in range(24):
            number = rng.randrange(len(prompts))
            alive[world.send(prompts[number], quality="fast")] = number
            for _ in range(rng.randrange(4)):
                world.step()
            while alive and rng.random() < 0.6:
                name = rng.choice(sorted(alive))
                aborted += not world.answers[name].done
                world.abort(name)
                del alive[name]
        while not all(world.answers[name].done for name in alive):
            world.step()
    finally:
        world.sessions.settings = kept
    assert aborted >= 6, "it was a storm"
    assert all(world.answers[name].tokens == alone[number] for name, number in alive.items())
    world.flush()
    assert world.count_free() == free
    assert not len(world.sessions)
    assert world.sessions.donors.kv.holders == 0


def _with_short_steps(world):
    """Settings under which a step does one piece of a load."""
    from dataclasses import replace

    return replace(world.sessions.settings, step_work_ms=1e-6)


def test_an_id_that_two_requests_have_at_once_mixes_nothing_up(world):
    """SGLang refuses that in one tokenizer process; several do not know of each other."""
    document, stranger = donate(world, 301), world.document(302)
    target = world.instruction(4) + document + world.question()
    other = world.instruction(6) + stranger + world.question()
    cold = world.cold(other, tokens=8)
    name = world.send(target, tokens=12, quality="fast")
    while not any(event.request_id == name and "receipt" in event.fields for event in world.events):
        world.step()
    world._count -= 1
    assert world.send(other, tokens=8, quality="fast") == name
    world.settle()
    assert world.exact_hit(target) < len(world.instruction(4)) + 40, "moved KV is not in the tree"
    world.forget_prefixes()
    (again,) = world.ask(other, tokens=8, quality="fast")
    assert again.tokens == cold.tokens, "no donor has the tokens of one and the KV of the other"
