"""Donor KV in a real SGLang: moved, spliced, edited, at once with others, and never in the exact tree."""

from __future__ import annotations

import pytest


@pytest.fixture
def world(engine):
    engine.flush()
    engine.desk.settings  # the engine is served, or nothing below means anything
    return engine


def test_a_document_behind_another_instruction_is_reused(world):
    document = world.document(1)
    donor = world.instruction(1) + document + world.question()
    target = world.instruction(5) + document + world.question("Name the third word.")
    cold = world.cold(target)
    world.ask(donor)
    (answer,) = world.ask(target, quality="fast")
    receipt = world.receipt(answer)
    assert receipt.reused_tokens > len(document) // 2
    assert answer.tokens == cold.tokens
    assert answer.cached == len(target) - 1
