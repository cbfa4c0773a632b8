"""Donor KV in a real SGLang scheduler: moved, spliced, edited, at once with others, and never in the exact tree."""

from __future__ import annotations

import pytest
import torch

from semblend.plan.reuse_plan import DeclineReason


@pytest.fixture
def world(engine):
    engine.flush()
    engine.events.clear()
    return engine


def put_behind(world, number: int, *parts: list[int], question: str = "What is the first word?") -> list[int]:
    """A prompt: an instruction of its own, the parts, and a question."""
    return world.instruction(number) + [token for part in parts for token in part] + world.question(question)


def test_a_document_behind_another_instruction_is_moved_and_only_the_rest_is_computed(world):
    document = world.document(1)
    target = put_behind(world, 5, document, question="Name the third word.")
    cold = world.cold(target)
    world.ask(put_behind(world, 1, document))
    (answer,) = world.ask(target, quality="fast")
    receipt = world.receipt(answer)
    assert receipt.reused_tokens > len(document) - 50
    assert receipt.exact_tokens + receipt.reused_tokens + receipt.recomputed_tokens + receipt.prefill_tokens == len(
        target
    )
    assert answer.cached == len(target) - 1
    assert answer.tokens == cold.tokens


def test_approximate_kv_never_enters_the_exact_tree(world):
    document = world.document(2)
    target = put_behind(world, 4, document)
    world.ask(put_behind(world, 1, document))
    for _ in range(2):
        (answer,) = world.ask(target, quality="fast")
        reused = world.receipt(answer).spans[0]
        # The head of the span is computed, perhaps a row that deep layers are judged by lies next to it, and no more.
        assert world.exact_hit(target) <= reused.target_start + 32 + 1
        assert world.receipt(answer).reused_tokens > 0


def test_without_the_cut_approximate_kv_would_be_in_the_tree(world, monkeypatch):
    """The control of the test above: it can see what it looks for."""
    document = world.document(2)
    target = put_behind(world, 4, document)
    world.ask(put_behind(world, 1, document))
    monkeypatch.setattr(world.sessions, "find_exact_until", lambda request_id: None)
    world.ask(target, quality="fast")
    assert world.exact_hit(target) == len(target)
    world.flush()


def test_what_was_published_of_a_reusing_request_is_what_a_cold_prefill_computes(world):
    document = world.document(3)
    target = put_behind(world, 6, document)
    world.ask(put_behind(world, 2, document))
    world.ask(target, quality="fast")
    published = world.exact_hit(target)
    assert published > len(world.instruction(6))
    ours = world.read_tree(target[:published])
    world.cold(target)  # empties the tree
    world.ask(target, opt_out=True)
    for (k, v), (cold_k, cold_v) in zip(ours, world.read_tree(target[:published]), strict=True):
        torch.testing.assert_close(k, cold_k, rtol=1e-3, atol=2e-3)
        torch.testing.assert_close(v, cold_v, rtol=1e-3, atol=2e-3)


def test_passages_in_another_order_are_all_reused_and_gaps_are_computed(world):
    one, two, three = (world.document(seed, 32) for seed in (11, 12, 13))
    world.ask(put_behind(world, 1, one, two, three))
    target = put_behind(world, 3, three, world.ids("Between them stands a new line."), one, two)
    (answer,) = world.ask(target, quality="fast")
    receipt = world.receipt(answer)
    assert len(receipt.spans) >= 2
    assert receipt.reused_tokens > (len(one) + len(two) + len(three)) // 2


def test_passages_of_two_donors_are_joined(world):
    one, two = world.document(21), world.document(22)
    world.ask(put_behind(world, 1, one))
    world.ask(put_behind(world, 2, two))
    (answer,) = world.ask(put_behind(world, 5, two, one), quality="fast")
    assert len(world.receipt(answer).donor_ids) == 2


def test_a_changed_number_is_computed_and_not_reused(world):
    document = world.document(31, 64)
    world.ask(put_behind(world, 1, document))
    edited = list(document)
    edited[len(edited) // 2] = document[3] if document[3] != edited[len(edited) // 2] else document[5]
    prompt = put_behind(world, 4, edited)
    (answer,) = world.ask(prompt, quality="fast")
    receipt = world.receipt(answer)
    changed = len(world.instruction(4)) + len(edited) // 2
    assert receipt.reused_tokens > 0
    assert all(not span.target_start <= changed < span.target_end for span in receipt.spans)


def test_balanced_reuses_what_its_gate_accepts_and_prefills_what_it_rejects(world):
    document = world.document(41, 96)
    target = put_behind(world, 5, document, question="Name the second word.")
    cold = world.cold(target)
    world.ask(put_behind(world, 1, document))
    (answer,) = world.ask(target, quality="balanced")
    receipt = world.receipt(answer)
    assert receipt.reused_tokens or receipt.reason is DeclineReason.QUALITY_RISK
    if not receipt.reused_tokens:
        assert answer.tokens == cold.tokens
        assert world.exact_hit(target) >= len(target) - 1, "what SGLang computed in full is exact"


def test_a_donor_is_not_seen_by_another_salt(world):
    document = world.document(51)
    world.ask(put_behind(world, 1, document), salt="anna")
    (other,) = world.ask(put_behind(world, 3, document), salt="ben", quality="fast")
    (same,) = world.ask(put_behind(world, 4, document), salt="anna", quality="fast")
    assert world.receipt(other).reused_tokens == 0
    assert world.receipt(same).reused_tokens > 0


def test_an_opted_out_request_neither_reuses_nor_donates(world):
    document = world.document(61)
    world.ask(put_behind(world, 1, document), opt_out=True)
    (after,) = world.ask(put_behind(world, 2, document), quality="fast")
    assert world.receipt(after).reused_tokens == 0
    (out,) = world.ask(put_behind(world, 3, document), opt_out=True)
    assert world.receipt(out).reused_tokens == 0


def test_a_conversation_is_one_donor_with_its_answer_and_an_edited_one_finds_both(world):
    first = put_behind(world, 1, world.document(71))
    (answer,) = world.ask(first, tokens=120)
    (donor,) = world.sessions.semblend.donors()
    assert donor.token_count == len(first) + 119, "the last token was said, not computed"
    words = [*first, *answer.tokens]
    cut = len(world.instruction(1)) + 32
    edited = [*words[:cut], *words[cut + 64 :], *world.question("And now?")]
    cold = world.cold(edited)
    (second,) = world.ask(edited, quality="fast")
    spans = world.receipt(second).spans
    assert {span.donor_id for span in spans} == {donor.donor_id}
    assert max(span.donor_start + span.length for span in spans) > len(first) + 80
    assert second.tokens[:1] == cold.tokens[:1]
