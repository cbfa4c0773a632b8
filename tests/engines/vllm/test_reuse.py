"""What the connector reuses in a real vLLM, and that its KV is what it must be."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from vllm_world import in_pieces, worst

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def relative(ours, theirs):
    distance = sum(
        float((a - b).square().sum()) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)
    )
    return (distance / sum(float(b.square().sum()) for y in theirs for b in y)) ** 0.5


def adds_up(receipt):
    kinds = sum(receipt[f"{kind}_tokens"] for kind in ("exact", "reused", "recomputed", "prefill"))
    return kinds == receipt["prompt_tokens"]


def test_a_document_under_another_instruction_is_reused(world):
    document = world.document(1)
    donor = world.instruction(1) + document + world.question()
    target = world.instruction(5) + document + world.question("How many words are there?")
    cold = world.cold(target)
    world.ask(donor)
    (output,) = world.ask(target)
    receipt = world.receipt(output)
    assert receipt["outcome"] == "backend_materialized_reuse"
    assert receipt["reused_tokens"] > 0.8 * len(document)
    span = world.audited(output)["spans"][0]
    assert span["target_start"] != span["donor_start"]
    assert adds_up(receipt)
    assert output.num_cached_tokens == world.loads[-1].claim_end
    # Poisoned blocks (1000.0) all got KV, and it is near what a cold prefill computes.
    assert relative(world.kv_of(output), world.kv_of(cold)) < 0.2
    assert output.outputs[0].token_ids[:1] == cold.outputs[0].token_ids[:1]


def test_a_prompt_whose_last_token_begins_a_block_is_reused_in_mode_balanced(world):
    """vLLM gives a load blocks for what it claims; the gate looks at the last token too, which vLLM computes."""
    document, block = world.document(61), world.worker._block_tokens
    world.ask(world.instruction(1) + document + world.question())
    target = world.instruction(5) + document + world.question("How many words are there?")
    target = target[: len(target) // block * block + 1]
    (output,) = world.ask(target, quality="balanced")
    receipt = world.receipt(output)
    assert receipt["outcome"] == "backend_materialized_reuse", receipt["detail"]
    assert adds_up(receipt)
    (again,) = world.ask(target, opt_out=True)
    assert output.outputs[0].token_ids[:1] == again.outputs[0].token_ids[:1]


def test_moved_keys_of_layer_0_are_exact_and_copied_values_are_bitwise(world):
    document = world.document(2)
    target = world.instruction(4) + document + world.question()
    cold = world.cold(target)
    world.ask(world.instruction(2) + document + world.question())
    (output,) = world.ask(target)
    (k, v), (cold_k, cold_v) = world.kv_of(output)[0], world.kv_of(cold)[0]
    (span,) = world.audited(output)["spans"]
    inside = slice(span["target_start"] + 32, span["target_start"] + span["length"] - 1)
    assert torch.equal(v[inside], cold_v[inside])
    assert float((k - cold_k).abs().max()) < 1e-3


def test_the_same_prompt_at_the_same_place_is_bitwise_equal(world):
    prompt = world.instruction(3) + world.document(3) + world.question()
    (first,) = world.ask(prompt)
    world.forget_prefixes()  # or vLLM's own exact hit would win
    (second,) = world.ask(prompt)
    assert world.receipt(second)["reused_tokens"] > 0.7 * len(prompt)
    assert worst(world.kv_of(second), world.kv_of(first), slice(0, len(prompt) - 1)) == 0.0
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_holes_between_spans_are_computed_bitwise_as_in_a_cold_prefill(world, monkeypatch):
    prompt = world.instruction(3) + world.document(3) + world.question()
    (first,) = world.ask(prompt)
    world.forget_prefixes()
    monkeypatch.setattr(world.half.semblend, "lookup", in_pieces(world.half.semblend.lookup))
    (second,) = world.ask(prompt)
    assert world.receipt(second)["detail"] == ""
    assert len(world.audited(second)["spans"]) == 3
    assert world.receipt(second)["prefill_tokens"] >= 21 + 22
    assert worst(world.kv_of(second), world.kv_of(first), slice(0, len(prompt) - 1)) == 0.0


def test_without_the_computed_rows_the_same_check_fails(world, monkeypatch):
    """The negative control of the two tests above: poison stays where nothing is computed."""
    prompt = world.instruction(3) + world.document(3) + world.question()
    (first,) = world.ask(prompt)
    world.forget_prefixes()
    monkeypatch.setattr(world.half.semblend, "lookup", in_pieces(world.half.semblend.lookup))
    engine = world.worker._model
    monkeypatch.setattr(engine, "forward", lambda rows, observer=None: torch.zeros(len(rows), 576))
    (second,) = world.ask(prompt, tokens=1)
    assert worst(world.kv_of(second), world.kv_of(first), slice(0, len(prompt) - 1)) > 100


def test_an_exact_hit_wins(world):
    prompt = world.instruction(1) + world.document(4) + world.question()
    world.ask(prompt)
    (again,) = world.ask(prompt)
    receipt = world.receipt(again)
    assert receipt["outcome"] == "exact_prefix_route"
    assert receipt["exact_tokens"] == (len(prompt) - 1) // 32 * 32
    assert receipt["reused_tokens"] == 0
    assert not world.loads


def test_passages_in_another_order_are_reused(world):
    first, second = world.document(5, 30), world.document(6, 30)
    world.ask(world.instruction(1) + first + second + world.question())
    (output,) = world.ask(world.instruction(2) + second + first + world.question())
    receipt = world.receipt(output)
    starts = [span["donor_start"] for span in world.audited(output)["spans"]]
    assert len(starts) == 2
    assert starts[0] > starts[1]
    assert adds_up(receipt)


def test_passages_of_several_donors_are_reused(world):
    first, second = world.document(7, 30), world.document(8, 30)
    (one,) = world.ask(world.instruction(1) + first + world.question())
    (two,) = world.ask(world.instruction(2) + second + world.question())
    (output,) = world.ask(world.instruction(3) + first + second + world.question())
    donors = {span["donor_id"] for span in world.audited(output)["spans"]}
    assert {name.split("-")[0] for name in donors} == {one.request_id.split("-")[0], two.request_id.split("-")[0]}


def test_an_edited_token_is_computed_not_reused(world):
    document = world.document(9, 60)
    middle = len(document) // 2
    edited = [*document[:middle], *world.ids(" seventeen"), *document[middle + 1 :]]
    target = world.instruction(2) + edited + world.question()
    cold = world.cold(target)
    world.ask(world.instruction(1) + document + world.question())
    (output,) = world.ask(target)
    spans = world.audited(output)["spans"]
    at = len(world.instruction(2)) + middle
    assert len(spans) == 2
    assert not any(span["target_start"] <= at < span["target_start"] + span["length"] for span in spans)
    # Layer 0 depends on the token alone: at the edited place it is the new token's, bit for bit.
    assert torch.equal(world.kv_of(output)[0][1][at], world.kv_of(cold)[0][1][at])


def test_the_gate_recomputes_what_the_question_reads_and_reports_its_risk(world):
    document = world.document(10)
    target = world.instruction(5) + document + world.question()
    cold = world.cold(target)
    world.ask(world.instruction(1) + document + world.question())
    (fast,) = world.ask(target, quality="fast")
    (balanced,) = world.ask(target, quality="balanced")
    receipt = world.receipt(balanced)
    assert receipt["mode"] == "balanced"
    assert receipt["risk"] is not None
    assert receipt["recomputed_tokens"] > world.receipt(fast)["recomputed_tokens"]
    assert relative(world.kv_of(balanced), world.kv_of(cold)) < relative(world.kv_of(fast), world.kv_of(cold))


def test_a_gate_that_trusts_nothing_computes_everything_and_equals_cold(world, monkeypatch):
    document = world.document(11)
    target = world.instruction(5) + document + world.question()
    cold = world.cold(target)
    world.ask(world.instruction(1) + document + world.question())
    blender = world.worker._get_blender("balanced")
    strict = type(blender.settings.thresholds)(0.0, 0.0, 0.0)
    settings = dataclasses.replace(blender.settings, thresholds=strict)
    monkeypatch.setattr(blender, "settings", settings)
    (output,) = world.ask(target, quality="balanced")
    receipt = world.receipt(output)
    assert (receipt["outcome"], receipt["reason"]) == ("backend_declined_reuse", "quality_risk")
    assert receipt["reused_tokens"] == 0
    assert worst(world.kv_of(output), world.kv_of(cold)) < 1e-2
    assert output.outputs[0].token_ids == cold.outputs[0].token_ids


def test_requests_of_one_batch_answer_as_they_do_alone(world):
    document = world.document(12, 40)
    shifted = [world.instruction(n) + document + world.question() for n in (4, 5)]
    other = world.instruction(2) + world.document(13, 40) + world.question()
    world.ask(world.instruction(1) + document + world.question())
    alone = [world.ask(prompt)[0].outputs[0].token_ids for prompt in shifted]
    cold = world.cold(other).outputs[0].token_ids
    world.forget_prefixes()
    together = world.ask(shifted[0], other, shifted[1])
    assert [output.outputs[0].token_ids for output in together] == [alone[0], cold, alone[1]]
    reused = [world.receipt(output)["reused_tokens"] for output in together]
    assert reused[0] > 0
    assert reused[1] == 0
    assert reused[2] > 0


def test_a_prompt_longer_than_a_step_is_a_donor_and_a_target(world):
    document = world.document(14, 130)
    donor = world.instruction(1) + document + world.question()
    target = world.instruction(6) + document + world.question()
    assert len(donor) > 512, "one step takes 512 tokens"
    cold = world.cold(target)
    world.ask(donor)
    (output,) = world.ask(target)
    assert world.receipt(output)["reused_tokens"] > 0.8 * len(document)
    assert relative(world.kv_of(output), world.kv_of(cold)) < 0.2


def test_an_aborted_request_leaves_no_claim_behind(world):
    from vllm import SamplingParams

    document = world.document(15)
    (donor,) = world.ask(world.instruction(1) + document + world.question())
    target = world.instruction(2) + document + world.question()
    engine = world.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    for steps in (0, 1, 3):
        name = f"aborted-{steps}"
        engine.add_request(name, {"prompt_token_ids": target}, params)
        for _ in range(steps):
            engine.step()
        engine.abort_request([name])
        while engine.has_unfinished_requests():
            engine.step()
    engine.step()
    assert world.half.semblend._claims == {}
    assert not world.half._records
    (output,) = world.ask(target)
    assert world.audited(output)["spans"][0]["donor_id"].startswith(donor.request_id)


def test_a_preempted_request_goes_on_exactly(world):
    from vllm import SamplingParams

    document = world.document(16)
    target = world.instruction(2) + document + world.question()
    world.ask(world.instruction(1) + document + world.question())
    engine = world.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add_request("preempted", {"prompt_token_ids": target}, params)
    for _ in range(2):
        engine.step()
    world.scheduler.reset_prefix_cache(reset_running_requests=True)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(outputs[-1].outputs[0].token_ids) == 6
    # It started over without donors, so what it left in the prefix cache is exact.
    cached = world.ask(target, opt_out=True)[0]
    assert cached.num_cached_tokens == (len(target) - 1) // 32 * 32
    assert worst(world.kv_of(cached), world.kv_of(world.cold(target))) < 1e-3


def test_several_answers_to_one_prompt_each_have_their_own_receipt(world):
    from vllm import SamplingParams

    document = world.document(17)
    world.ask(world.instruction(1) + document + world.question())
    target = world.instruction(2) + document + world.question()
    params = SamplingParams(n=2, temperature=0.8, seed=3, max_tokens=3)
    (output,) = world.llm.generate([{"prompt_token_ids": target}], params, use_tqdm=False)
    assert len(output.outputs) == 2
    confirmed = [event for event in world.events if event.kind == "reuse_confirmed"]
    assert len(confirmed) == 2
