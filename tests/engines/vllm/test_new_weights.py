"""Donors end with the weights that made them, and with vLLM's own prefix cache, however that is emptied."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def make_prompts(world, seed):
    """A donor, and a prompt with the same document under another instruction."""
    document = world.document(seed)
    return world.instruction(1) + document + world.question(), world.instruction(5) + document + world.question()


@pytest.fixture
def weights(world):
    """A parameter of the running model, which is itself again afterwards."""
    norm = world.worker._model._model.model.layers[3].input_layernorm.weight
    kept = norm.data.clone()
    yield norm
    norm.data.copy_(kept)
    for prompt in make_prompts(world, 60):  # the second is a load, and so a look at the weights
        world.ask(prompt)


def test_an_update_in_place_without_any_reset_is_noticed_before_donor_kv_is_used(world, weights):
    donor, target = make_prompts(world, 61)
    world.ask(donor)
    before = world.half.facts.namespace
    weights.data.mul_(1.5)
    (answer,) = world.ask(target, tokens=8)
    receipt = world.receipt(answer)
    assert (receipt["reused_tokens"], receipt["reason"]) == (0, "stale")
    assert world.half.semblend.donors() == ()
    assert world.half.facts.namespace != before
    cold = world.cold(target, tokens=8)
    assert answer.outputs[0].token_ids == cold.outputs[0].token_ids
    world.ask(donor)
    (again,) = world.ask(target)
    assert world.receipt(again)["reused_tokens"] > 0, "donors of the new weights serve"


def test_without_the_look_at_the_weights_the_same_check_fails(world, weights, monkeypatch):
    monkeypatch.setattr(world.worker._weights, "have_changed", lambda look: False)
    donor, target = make_prompts(world, 61)
    world.ask(donor)
    weights.data.mul_(1.5)
    (answer,) = world.ask(target, tokens=8)
    assert world.receipt(answer)["reused_tokens"] > 0


@pytest.mark.parametrize("arguments", [{}, {"reset_connector": True}], ids=["plain", "with the connector"])
def test_any_reset_of_the_prefix_cache_drops_every_donor(world, arguments):
    donor, target = make_prompts(world, 62)
    world.ask(donor)
    assert len(world.half.semblend.donors()) == 1
    assert world.llm.llm_engine.reset_prefix_cache(**arguments)
    (answer,) = world.ask(target)
    assert world.receipt(answer)["reused_tokens"] == 0
    assert len(world.half.semblend.donors()) == 1, "the new one"
    assert not world.worker.donor_kv.holds(donor_id_of(world, donor), 1)


def donor_id_of(world, prompt):
    """The donor that this prompt was, by the events."""
    return next(event.fields["donor_id"] for event in world.events if event.kind == "donor_registered")


def test_the_weights_are_part_of_every_namespace(world):
    world.ask(make_prompts(world, 63)[0])
    assert f"weights:{world.worker._weights.digest}" in world.half.facts.namespace.revision
