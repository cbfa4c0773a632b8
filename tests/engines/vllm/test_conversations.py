"""A conversation that was answered from reused KV goes on from that KV in a real vLLM, and nobody else finds it."""

from __future__ import annotations

import pytest

from semblend.quality import explain_no_room

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def worst(ours, theirs, tokens):
    return max(
        float((a[:tokens] - b[:tokens]).abs().max())
        for pair, other in zip(ours, theirs, strict=True)
        for a, b in zip(pair, other, strict=True)
    )


def stored(world):
    """The tokens of every block that KV events announced."""
    return {
        tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
        for event in world.kv_events
        if type(event).__name__ == "BlockStored"
        for i in range(len(event.block_hashes))
    }


def begin(world, seed, tokens=40, **asked):
    """A donor of another instruction, then the first turn; the turn, its output and the words so far."""
    document = world.document(seed)
    world.ask(world.instruction(1) + document + world.question(), **asked)
    turn = world.instruction(5) + document + world.question("What is the second word?")
    (output,) = world.ask(turn, tokens=tokens, **asked)
    assert world.receipt(output)["reused_tokens"] > 0
    return turn, output, turn + list(output.outputs[0].token_ids)


def count_found(words):
    """The last token of an answer is never computed."""
    return (len(words) - 1) // 32 * 32


@pytest.mark.parametrize("books", ["bound", "not bound"])
def test_three_turns_load_once_and_compute_only_what_is_new(world, monkeypatch, books):
    if books == "not bound":  # as before 0.30
        monkeypatch.setattr(world.half.locks, "cached_counts", [])
    turn, before, words = begin(world, 51)
    first = world.audited(before)["spans"][0]["target_start"]
    for number in range(2):
        said = count_found(words)
        turn = words + world.question(f"And word number {number}?")
        (output,) = world.ask(turn, tokens=40)
        receipt = world.receipt(output)
        assert len(world.loads) == 1
        assert output.num_cached_tokens == said > len(before.prompt_token_ids)
        assert (
            receipt["reused_tokens"]
            == world.receipt(before)["reused_tokens"] + world.receipt(before)["recomputed_tokens"]
        )
        assert "earlier prompt" in receipt["detail"]
        computed = len(before.prompt_token_ids) // 32 * 32
        assert worst(world.kv_of(output), world.kv_of(before), computed) == 0.0, "the same blocks"
        words, before = turn + list(output.outputs[0].token_ids), output
    announced = stored(world)
    approximate = {tuple(words[i : i + 32]) for i in range(first // 32 * 32, len(words) - 31, 32)}
    assert not announced & approximate, "nothing of it is announced"
    assert [donor.donor_id for donor in world.half.semblend.donors()].count(output.request_id) == 0
    cold = world.cold(turn)
    assert output.outputs[0].token_ids[:1] == cold.outputs[0].token_ids[:1]


def test_nobody_else_finds_what_a_conversation_has_computed(world):
    turn, output, words = begin(world, 52)
    later = words + world.question("And the third?")
    cold = world.cold(later)  # empties vLLM's own cache, so the conversation begins again
    (output,) = world.ask(turn, tokens=40)
    (next_turn,) = world.ask(later)
    assert next_turn.num_cached_tokens > len(turn)
    first = world.audited(output)["spans"][0]["target_start"]
    (exact,) = world.ask(later, opt_out=True)
    assert exact.num_cached_tokens <= first
    assert worst(world.kv_of(exact), world.kv_of(cold), len(later)) == 0.0
    assert exact.outputs[0].token_ids == cold.outputs[0].token_ids
    (theirs,) = world.ask(later, salt="another tenant")
    assert theirs.num_cached_tokens == 0
    assert world.receipt(theirs)["reused_tokens"] == 0


def test_a_turn_that_takes_several_steps_is_found_whole_by_the_next(any_world):
    world = any_world
    _, _, words = begin(world, 53)
    turn = words + world.document(54, 130) + world.question()
    assert len(turn) - len(words) > 512
    (second,) = world.ask(turn, tokens=40)
    assert second.num_cached_tokens == count_found(words)
    words = turn + list(second.outputs[0].token_ids)
    (third,) = world.ask(words + world.question("And then?"))
    assert third.num_cached_tokens == count_found(words)
    assert len(world.loads) == 1


@pytest.mark.parametrize("quality", ["balanced", "1e+12"])
def test_a_gated_turn_goes_on_where_the_risk_leaves_room(any_world, quality):
    world = any_world
    _, output, words = begin(world, 55, quality=quality)
    risk = world.receipt(output)["risk"]
    (second,) = world.ask(words + world.question("And then?"), quality=quality)
    goes_on = explain_no_room(risk, quality) is None
    assert goes_on is (quality != "balanced"), "the gate trusts everything here, and sees what it trusts"
    assert ("earlier prompt" in world.receipt(second)["detail"]) is goes_on
    if goes_on:
        assert len(world.loads) == 1
        assert world.receipt(second)["risk"] == risk


def test_after_a_reset_of_the_prefix_cache_a_conversation_is_computed(any_world):
    world = any_world
    _, _, words = begin(world, 56)
    world.settle()
    assert world.llm.reset_prefix_cache()
    (second,) = world.ask(words + world.question("And then?"))
    assert second.num_cached_tokens == 0
    assert world.receipt(second)["reused_tokens"] == 0


def test_turns_of_many_conversations_at_once_keep_apart(any_world):
    world = any_world
    document = world.document(57)
    world.ask(world.instruction(1) + document + world.question())
    turns = [world.instruction(5) + document + world.question(f"Word {number}?") for number in range(4)]
    first = world.ask(*turns, tokens=40)
    loads = len(world.loads)
    words = [turn + list(output.outputs[0].token_ids) for turn, output in zip(turns, first, strict=True)]
    second = world.ask(*(said + world.question("And then?") for said in words), tokens=8)
    alone = [world.ask(said + world.question("And then?"), tokens=8)[0] for said in words]
    assert len(world.loads) == loads
    for said, output, again in zip(words, second, alone, strict=True):
        assert output.num_cached_tokens == count_found(said)
        assert output.outputs[0].token_ids == again.outputs[0].token_ids


def test_an_edited_history_finds_what_was_answered_and_its_kv_is_what_the_model_computes(world):
    first = world.instruction(1) + world.document(61) + world.question()
    (output,) = world.ask(first, tokens=120)
    words = first + list(output.outputs[0].token_ids)
    world.settle()  # in the step behind its last one the answer is copied
    (donor,) = world.half.semblend.donors()
    assert donor.donor_id == f"{world.receipt(output)['request_id']}+answer", "the whole conversation is one donor"
    assert donor.token_count == len(words) - 1
    cut = len(world.instruction(1)) + 32
    edited = words[:cut] + words[cut + 64 :] + world.question("And now?")
    cold = world.cold(edited)
    (second,) = world.ask(edited)
    spans = world.audited(second)["spans"]
    assert max(span["donor_start"] + span["length"] for span in spans) > len(first) + 80
    (_, v), (_, cold_v) = world.kv_of(second)[0], world.kv_of(cold)[0]
    (last,) = [span for span in spans if span["donor_start"] + span["length"] > len(first)]
    inside = slice(last["target_start"] + 32, last["target_start"] + last["length"] - 1)
    # What decoding computed for a token and what a prefill does are the same but for rounding.
    assert float((v[inside] - cold_v[inside]).abs().max()) < 1e-4
