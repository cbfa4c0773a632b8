"""Blending: what is served is what the model would compute, or is measured, or is not served."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import Receipt
from semblend.engine.model.model import DecoderModel, PooledModel
from semblend.engine.model.spec import ModelSpec
from semblend.errors import ConfigError, InputError
from semblend.materialize.blend.blender import AttendedTokens, Blender
from semblend.materialize.blend.quality import Placed, QualitySettings, Step
from semblend.materialize.calibrate import CalibrationPrompt, Pair, choose, list_pairs, measure_prompt, table_of
from semblend.materialize.contract import Capabilities, Rows
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.gate.thresholds import (
    DEFAULT,
    STEPS,
    DialTable,
    PassageOrder,
    RiskFeatures,
    RiskModel,
    Thresholds,
    fit_weights,
    next_token_kl,
)
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.span import Span

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
MODEL = DecoderModel.random(ModelSpec.from_hf_config(CONFIG), seed=5)
NEVER = Thresholds(0.0, 0.0, 0.0)
ALWAYS = Thresholds(1e9, 1e9, 1e9)


def tokens_of(n, seed=0):
    return torch.randint(1, 101, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


class World:
    """A model, a pool, donors, and prompts in slots."""

    def __init__(self, model=MODEL, **changes):
        self.model = model
        self.pool = model.new_pool(20_000)
        self.kv = DonorKv(0, 1 << 28)
        self.blender = Blender(PooledModel(model, self.pool), self.kv, QualitySettings(**changes))

    def slots(self, n):
        return self.pool.slots_of(self.pool.allocate(self.pool.blocks_for(n)), 0, n)

    def cold(self, tokens, slots=None):
        slots = self.slots(len(tokens)) if slots is None else slots
        hidden = self.model.forward(Rows.of(tokens, torch.arange(len(tokens)), slots), self.pool)
        return self.model.logits(hidden[-1:])[0], slots

    def donate(self, donor_id, tokens, generation=0):
        _, slots = self.cold(tokens)
        self.kv.capture(donor_id, generation, self.pool.layout, slots)

    def prepare(self, tokens, spans, *, exact=0, **asked):
        target = Placed(tokens, self.slots(len(tokens)))
        if exact:
            head = torch.arange(exact)
            self.model.forward(Rows.of(torch.tensor(tokens)[head], head, target.slots), self.pool)
        return self.blender.prepare(target, ReusePlan(tuple(spans), len(tokens), exact), **asked), target

    def kv_of(self, slots):
        return self.pool.k[:, slots], self.pool.v[:, slots]

    def poison(self, donor_id, change):
        tensors = self.kv.acquire(donor_id, 0)
        change(tensors)
        self.kv.release(tensors)


def one_document(world, document=200, head=20, seed=0):
    """A donor with the document behind a long head; a prompt with it behind a short one and a question."""
    text = tokens_of(document, seed)
    world.donate("d", tokens_of(50, seed + 1) + text + tokens_of(10, seed + 2))
    prompt = tokens_of(head, seed + 3) + text + tokens_of(12, seed + 4)
    return prompt, [Span("d", 50, head, document)]


def assert_cold(world, blended, target, tokens):
    logits, slots = world.cold(tokens)
    assert torch.allclose(blended.logits_last, logits, atol=1e-4)
    for ours, theirs in zip(world.kv_of(target.slots), world.kv_of(slots), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def first_passage_kept(world):
    """A donor with a passage behind the others; a prompt with it in front of them."""
    moved, others = tokens_of(40, 7), tokens_of(200, 8)
    world.donate("d", tokens_of(30, 9) + others + moved)
    prompt = tokens_of(20, 10) + moved + others + tokens_of(12, 11)
    return prompt, [Span("d", 230, 20, 40), Span("d", 30, 60, 200)]


def test_a_passage_that_moved_ahead_is_computed_as_if_its_donor_did_not_hold_it():
    world = World(mode="fast", deep_tolerance=0)
    prompt, spans = first_passage_kept(world)
    done, alone = (world.prepare(prompt, held)[0] for held in (spans, spans[1:]))
    assert torch.allclose(done.logits_last, alone.logits_last, atol=1e-5)
    assert done.recomputed_tokens - alone.recomputed_tokens == 40


@pytest.mark.parametrize("mode", ["fast", "balanced"])
def test_a_passage_that_moved_ahead_is_what_a_cold_prefill_computes(mode):
    world = World(mode=mode, thresholds=ALWAYS)
    prompt, spans = first_passage_kept(world)
    done, target = world.prepare(prompt, spans)
    assert done.exact_until >= 60
    ours, theirs = world.kv_of(target.slots[:60]), world.kv_of(world.cold(prompt)[1][:60])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours, theirs, strict=True))


def test_with_all_tokens_selected_the_result_is_a_cold_prefill():
    world = World(mode="fast", seam_tokens=10_000, first_seam_tokens=10_000)
    prompt, spans = one_document(world)
    blended, target = world.prepare(prompt, spans)
    assert_cold(world, blended, target, prompt)
    assert (blended.reused_tokens, blended.recomputed_tokens, blended.approximate) == (0, 200, False)


def test_a_donor_with_the_same_left_context_gives_what_cold_gives():
    world = World(mode="fast", deep_tolerance=0)
    prompt = tokens_of(160)
    world.donate("d", prompt[:140] + tokens_of(30, 9))
    blended, target = world.prepare(prompt, [Span("d", 0, 0, 140)])
    assert blended.reused_tokens == 140 - 32
    assert_cold(world, blended, target, prompt)


def test_fast_differs_from_cold_but_less_than_keys_that_were_not_moved():
    world = World(mode="fast")
    prompt, spans = one_document(world)
    logits, _ = world.cold(prompt)
    blended, _ = world.prepare(prompt, spans)
    unmoved = World(mode="fast", canary_tolerance=1e9, deep_tolerance=1e9)
    one_document(unmoved)
    unmoved.poison("d", lambda held: held.k.copy_(unmoved.model.spec.rope.relocate(held.k, 30)))
    wrong, _ = unmoved.prepare(prompt, spans)
    assert 0 < next_token_kl(logits, blended.logits_last) < next_token_kl(logits, wrong.logits_last)


def test_a_swapped_fact_is_computed_never_taken_from_the_donor():
    world = World(mode="fast")
    text = tokens_of(200, 1)
    donor = list(text)
    donor[90:93] = [(token + 7) % 101 for token in text[90:93]]
    world.donate("d", tokens_of(30, 2) + donor)
    prompt = tokens_of(10, 3) + text + tokens_of(12, 4)
    blended, target = world.prepare(prompt, [Span("d", 30, 10, 90), Span("d", 123, 103, 107)])
    assert blended.prefill_tokens == 10 + 3 + 12
    _, cold = world.cold(prompt)
    edited = slice(100, 103)
    ours, theirs = world.kv_of(target.slots[edited]), world.kv_of(cold[edited])
    assert torch.allclose(ours[0][0], theirs[0][0], atol=1e-5)  # layer 0 knows the token itself
    assert torch.allclose(ours[1][0], theirs[1][0], atol=1e-5)


def computed_positions(world, tokens, spans, blended, target):
    """Positions whose KV is not the donor's, at any layer."""
    k, _ = world.kv_of(target.slots)
    stale = np.zeros(len(tokens), bool)
    for span in spans:
        held = world.kv.acquire(span.donor_id, span.generation)
        moved = world.model.spec.rope.relocate(held.k[:, span.donor_start : span.donor_end], span.shift)
        same = (k[2:, span.target_start : span.target_end] == moved[2:]).all(-1).all(-1).all(0)
        stale[span.target_start : span.target_end] = same.numpy()
        world.kv.release(held)
    assert stale.sum() == blended.reused_tokens
    return np.flatnonzero(~stale)


@pytest.mark.parametrize("exact", [0, 7])
def test_after_every_escalation_each_computed_row_is_what_the_model_computes_over_what_lies_before_it(exact):
    for steps in range(1, 4):
        plan_of = tuple(Step(percent, rule) for percent, rule in
                        ((10, "attended"), (20, "attended_and_deviating"), (40, "at_random")))[:steps]  # fmt: skip
        world = World(steps=plan_of, thresholds=NEVER, over_budget="accept", most_work=10)
        prompt, spans = one_document(world, head=20)
        blended, target = world.prepare(prompt, spans, exact=exact)
        assert blended.decision == "prefill"
        seen = [one.name for one in blended.passes if one.name != "deviation"]
        assert seen == ["fast", *(f"repair {step.percent} %" for step in plan_of), "prefill"]
        assert_cold(world, blended, target, prompt)

        # the gate goes on to a full prefill: stop it there by calling time
        world.blender._passes.is_affordable = lambda state, rows: rows < 150
        blended, target = world.prepare(prompt, spans, exact=exact)
        assert blended.decision == "over_budget"
        rows = computed_positions(world, prompt, spans, blended, target)
        rows = rows[rows >= exact]
        before = [part.clone() for part in world.kv_of(target.slots)]
        world.model.forward(Rows.of(torch.tensor(prompt)[rows], torch.from_numpy(rows), target.slots), world.pool)
        for ours, again in zip(before, world.kv_of(target.slots), strict=True):
            assert torch.allclose(ours, again, atol=1e-5)


def test_gap_rows_before_the_first_repair_are_not_computed_again():
    world = World(thresholds=ALWAYS, most_work=10)
    prompt, spans = one_document(world, head=120)
    blended, _ = world.prepare(prompt, spans)
    fast, repair = blended.passes
    assert fast.rows == 120 + 32 + 12 + 4
    assert repair.rows <= 20 + 32 + 12 + 4
    assert blended.decision == "accepted"
    assert blended.escalations == 0


def test_each_step_adds_to_the_one_before_and_the_question_is_in_every_pass():
    world = World(thresholds=NEVER, most_work=10)
    prompt, spans = one_document(world, document=400)
    blended, target = world.prepare(prompt, spans)
    names = [one.name for one in blended.passes]
    assert names == ["fast", "repair 10 %", "repair 20 %", "deviation", "repair 40 %", "prefill"]
    rows = [one.rows for one in blended.passes]
    for percent, added, found in ((10, 40, rows[1]), (20, 40, rows[2]), (40, 80, rows[4])):
        assert added + 16 <= found <= 4 * percent + rows[0]  # what is new and the question; never more than all
    assert rows[5] == 400 + 12
    assert blended.escalations == 3
    assert blended.risk == blended.features.settled == blended.passes[4].kl
    assert blended.features.moved != blended.features.settled
    assert_cold(world, blended, target, prompt)


def test_without_refresh_only_the_question_is_computed_again_and_nothing_is_called_exact():
    world = World(thresholds=ALWAYS, refresh=False)
    prompt, spans = one_document(world)
    blended, _ = world.prepare(prompt, spans)
    assert blended.passes[1].rows == 20 + 16
    assert blended.exact_until == 20


def test_the_first_position_that_is_not_exact_is_named():
    world = World(mode="fast")
    prompt, spans = one_document(world)
    blended, target = world.prepare(prompt, spans)
    assert blended.exact_until == 20 + 32
    _, cold = world.cold(prompt)
    for ours, theirs in zip(world.kv_of(target.slots[:52]), world.kv_of(cold[:52]), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("mode", ["fast", "balanced"])
def test_the_canary_forces_cold_on_a_poisoned_block_and_on_a_shift_off_by_one(mode):
    def poisoned(held):
        held.k[0, 96:112] = held.k[0, 200:216].clone()

    def off_by_one(held):
        held.k[:, 60:] = MODEL.spec.rope.relocate(held.k[:, 60:], 1)

    def values(held):
        held.v[0, 96:112] = 0

    for change in (poisoned, off_by_one, values):
        world = World(mode=mode)
        prompt, spans = one_document(world)
        good, _ = world.prepare(prompt, spans)
        assert good.canary < 1e-4
        world.poison("d", change)
        match world.prepare(prompt, spans)[0]:
            case Decline(reason, detail):
                assert reason is DeclineReason.VALIDATION_FAILED
                assert "layer-0" in detail
            case other:
                pytest.fail(f"{other} was served")


def test_tokens_that_differ_from_the_donors_force_cold():
    world = World()
    prompt, _ = one_document(world)
    prompt[111] = (prompt[111] + 1) % 100
    refused = [world.prepare(prompt, [Span("d", 50, 20, 200)])[0] for _ in range(60)]
    # one token in 16 is looked at, another one each time: in 60 requests the wrong one is met
    assert any(isinstance(one, Decline) for one in refused)


@pytest.mark.parametrize("mode", ["fast", "balanced"])
def test_donor_kv_that_is_no_number_above_the_canarys_layer_forces_cold(mode):
    world = World(mode=mode)
    prompt, spans = one_document(world)
    world.poison("d", lambda held: held.v[2, 100:140].fill_(torch.nan))
    declined, _ = world.prepare(prompt, spans)
    assert declined.reason is DeclineReason.VALIDATION_FAILED


def test_a_replaced_donor_is_stale_and_nothing_stays_held():
    world = World()
    prompt, _ = one_document(world)
    assert world.prepare(prompt, [Span("gone", 50, 20, 200)])[0].reason is DeclineReason.STALE
    world.donate("e", tokens_of(100))
    both = [Span("e", 0, 0, 15), Span("d", 50, 20, 200, generation=4)]
    assert world.prepare(prompt, both)[0].reason is DeclineReason.STALE
    assert world.kv.drop("d")
    assert world.kv.drop("e")
    assert world.kv.used_bytes["host"] == 0


def test_a_model_that_fails_is_a_decline_and_nothing_stays_held():
    world = World()
    prompt, spans = one_document(world)

    def fails(*_):
        raise RuntimeError("out of memory\nwith a long story")

    world.blender._passes.model = SimpleNamespace(
        forward=fails, layout=world.pool.layout, capabilities=Capabilities(), logits=MODEL.logits
    )
    declined, _ = world.prepare(prompt, spans)
    assert declined == Decline(DeclineReason.ERROR, "RuntimeError: out of memory")
    world.kv.drop("d")
    assert world.kv.used_bytes["host"] == 0


@pytest.mark.parametrize(
    "spans",
    [
        [Span("d", 50, 20, 500)],
        [Span("d", 50, 20, 50), Span("d", 60, 60, 50)],
        [Span("d", 50, 2, 50)],
        [Span("d", 230, 20, 100)],
        [Span("d", 50, 20, 0)],
    ],
)
def test_a_plan_that_does_not_fit_is_declined(spans):
    world = World()
    prompt, _ = one_document(world)
    declined, _ = world.prepare(prompt, spans, exact=8)
    assert isinstance(declined, Decline)


def test_exact_mode_takes_nothing_from_donors():
    world = World(mode="exact")
    prompt, spans = one_document(world)
    blended, target = world.prepare(prompt, spans, exact=16)
    assert (blended.exact_tokens, blended.prefill_tokens, blended.canary) == (16, len(prompt) - 16, None)
    assert_cold(world, blended, target, prompt)


def test_chunks_change_nothing():
    whole, cut = World(thresholds=NEVER), World(thresholds=NEVER, chunk_tokens=24)
    results = []
    for world in (whole, cut):
        prompt, spans = one_document(world)
        logits = []
        blended, _ = world.prepare(prompt, spans, on_pass=lambda one, last, kept=logits: kept.append(last))
        results.append((blended, logits))
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
    assert [one.rows for one in results[0][0].passes] == [one.rows for one in results[1][0].passes]


@pytest.mark.parametrize(("policy", "decision"), [("accept", "over_budget"), ("prefill", "prefill")])
def test_when_time_is_up_no_repair_is_begun(policy, decision):
    world = World(thresholds=NEVER, latency_budget_ms=1e-3, over_budget=policy)
    prompt, spans = one_document(world)
    blended, target = world.prepare(prompt, spans)
    assert blended.decision == decision
    assert [one.name for one in blended.passes] == (["fast"] if policy == "accept" else ["fast", "prefill"])
    if policy == "prefill":
        assert_cold(world, blended, target, prompt)


def test_settings_that_mean_nothing_are_refused():
    for wrong in ({"mode": "best"}, {"over_budget": "panic"}, {"steps": (Step(10, "astrology"),)}):
        with pytest.raises(InputError):
            QualitySettings(**wrong)
    world = World()
    prompt, spans = one_document(world)
    assert world.prepare(prompt, spans, mode="best")[0].reason is DeclineReason.UNSUPPORTED_MODE


layouts = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(layouts, st.integers(0, 12), st.integers(0, 8), st.sampled_from(["exact", "fast", "balanced"]),
       st.sampled_from([NEVER, ALWAYS, DEFAULT]))  # fmt: skip
def test_every_token_is_counted_once_and_a_receipt_can_be_written(pieces, tail, exact, mode, thresholds):
    world = World(mode=mode, thresholds=thresholds)
    donor = tokens_of(120, 7)
    world.donate("d", donor)
    prompt, spans = tokens_of(exact, 8), []
    for gap, length, start in pieces:
        prompt += tokens_of(gap, 9)
        spans.append(Span("d", start, len(prompt), length))
        prompt += donor[start : start + length]
    prompt += tokens_of(tail, 10)
    blended, _ = world.prepare(prompt, spans, exact=exact)
    if isinstance(blended, Decline):
        at_once = blended.reason is DeclineReason.QUALITY_RISK and thresholds is DEFAULT  # its dial knows moved pieces
        assert mode == "balanced"
        assert at_once or blended.reason is DeclineReason.BELOW_BREAK_EVEN
        return
    counts = (blended.exact_tokens, blended.reused_tokens, blended.recomputed_tokens, blended.prefill_tokens)
    assert sum(counts) == len(prompt)
    assert blended.approximate == (blended.reused_tokens > 0)
    assert torch.isfinite(blended.logits_last).all()
    Receipt(
        request_id="r", engine="semblend", namespace="0" * 32, mode=mode, prompt_tokens=len(prompt),
        outcome=Outcome.BACKEND_MATERIALIZED_REUSE if blended.reused_tokens else Outcome.COLD_FALLBACK,
        exact_tokens=counts[0], reused_tokens=counts[1], recomputed_tokens=counts[2], prefill_tokens=counts[3],
        spans=tuple(spans), risk=blended.risk, escalations=blended.escalations, canary=blended.canary,
        load_ms=blended.load_ms, compute_ms=blended.compute_ms,
    )  # fmt: skip


def test_the_threshold_is_the_largest_that_lets_few_bad_prompts_pass():
    pairs = [(0.001, 0.0), (0.002, 0.1), (0.003, 0.0), (0.01, 0.0), (0.5, 1.0)]
    assert choose(pairs, harm=0.02, false_safe=0.0).threshold == 0.001
    assert choose(pairs, harm=0.02, false_safe=0.25).threshold == 0.01
    assert choose(pairs, harm=2.0, false_safe=0.0).threshold == 0.5
    assert choose(pairs[1:2], harm=0.02, false_safe=0.0).threshold == 0.0
    assert choose([], harm=0.02, false_safe=0.0).threshold == 0.0


def test_calibration_measures_signals_against_cold_and_survives_a_file(tmp_path):
    prompts = []
    for seed in range(3):
        text = tokens_of(120, seed)
        donor = tuple(tokens_of(40, seed + 10) + text)
        prompts.append(
            CalibrationPrompt(
                tuple(tokens_of(9, seed + 20) + text + tokens_of(8, seed + 30)), (donor,), (Span("0", 40, 9, 120),)
            )
        )
    pool = MODEL.new_pool(2048)
    model = PooledModel(MODEL, pool)
    measures = [measure_prompt(model, one, pool=pool, answer_tokens=1, yardsticks=False) for one in prompts]
    pairs = [pair for one in measures for pair in list_pairs(one)]
    table = table_of(pairs, pool=pool, model_name="tiny", prompts=3, tokens=1000, harm=1e9, false_safe=0.0)
    assert table.kl_10 > 0
    assert table.provenance["prompts"] == 3
    assert table.provenance["model"] == "tiny"
    path = tmp_path / "t.json"
    path.write_text(table.to_json())
    assert Thresholds.read(path) == table


@pytest.mark.parametrize(
    ("expected", "passes"),
    [
        ({0: 0.0, 10: 0.01}, ["fast", "repair 10 %"]),  # at balanced nothing is served unprobed
        ({10: 0.03, 20: 0.01}, ["fast", "repair 20 %"]),
        ({10: 0.03, 20: 0.03, 40: 0.02}, ["fast", "deviation", "repair 40 %"]),
    ],
)
def test_the_dial_tells_from_the_plan_which_step_to_begin_with(expected, passes):
    accepts = (0.0, 0.0, 0.0, 0.0, -20.0)
    dial = DialTable({PassageOrder.IN_ORDER: expected}, dict.fromkeys(STEPS, accepts))
    world = World(thresholds=replace(NEVER, dial=dial), most_work=10)
    prompt, spans = one_document(world, document=400)
    blended, _ = world.prepare(prompt, spans)
    assert [one.name for one in blended.passes] == passes
    assert blended.decision == "accepted"


def test_the_first_layers_of_all_tokens_can_be_computed_and_are_cold_then():
    step = (Step(20, "attended_and_deviating"),)
    world = World(thresholds=ALWAYS, steps=step, layer_share=0.5, most_work=10)
    prompt, spans = one_document(world, document=300)
    cold = world.slots(len(prompt))
    world.cold(prompt, cold)
    blended, target = world.prepare(prompt, spans)
    assert [one.layers for one in blended.passes if one.name == "deviation"] == [2]
    pool = world.pool
    for layer in range(2):
        assert torch.allclose(pool.k[layer, target.slots], pool.k[layer, cold], atol=1e-4)
    assert not torch.allclose(pool.k[3, target.slots], pool.k[3, cold], atol=1e-4)


def test_no_repair_is_begun_that_would_make_a_refused_gate_cost_much_more_than_a_prefill():
    world = World(thresholds=NEVER, most_work=0.5)
    prompt, spans = one_document(world, document=400)
    blended, _ = world.prepare(prompt, spans)
    *before, last = blended.passes
    assert last.name == "prefill"
    assert sum(one.rows for one in before if one.layers > 1) <= 0.5 * last.rows
    assert blended.decision == "prefill"
    assert not blended.reused_tokens


def test_the_deviation_of_repaired_tokens_is_nought_where_the_donor_had_the_same_left_context():
    world = World(thresholds=ALWAYS)
    text = tokens_of(300, 5)
    world.donate("d", text)
    same, _ = world.prepare(text + tokens_of(20, 6), [Span("d", 0, 0, 300)])
    assert same.features.deviation < 1e-4
    assert same.features.moved < 1e-6
    prompt, spans = one_document(world, document=300)
    moved, _ = world.prepare(prompt, spans)
    assert moved.features.deviation > 0.01


def test_weights_are_found_again_from_signs_that_follow_them():
    rng = np.random.default_rng(3)
    weights = (0.4, 1.5, 0.3, -1.0)
    seen = []
    for _ in range(60):
        signs = RiskFeatures(*np.exp(rng.normal(-3, 1, 3)), rng.uniform(0, 5))
        seen.append((signs, RiskModel({10: weights}).expect(10, signs)))
    assert fit_weights(seen) == pytest.approx(weights, abs=0.05)


def test_calibration_with_enough_prompts_weighs_the_signs_and_no_prompt_judges_itself(tmp_path):
    rng = np.random.default_rng(0)
    pairs = []
    for step, _ in itertools.product(STEPS, range(40)):
        deviation = float(np.exp(rng.normal(-3, 1)))
        signs = RiskFeatures(deviation, deviation, deviation, 1.0)
        pairs.append(Pair(step, signs, deviation * step / 40))
    table = table_of(pairs, pool=MODEL.new_pool(64), model_name="made", prompts=40, tokens=1)
    assert set(table.risk.weights) == set(STEPS)
    for step in STEPS:
        signs = RiskFeatures(0.05, 0.05, 0.05, 1.0)
        assert table.expect(step, signs) == pytest.approx(0.05 * step / 40, rel=0.1)
    (tmp_path / "t.json").write_text(table.to_json())
    assert Thresholds.read(tmp_path / "t.json") == table


def test_a_bad_table_is_named(tmp_path):
    long_number = '{"schema": "semblend.thresholds.v2", "kl_10": 1' + "0" * 400 + "}"
    broken = ("[]", '{"schema": "other"}', '{"schema": "semblend.thresholds.v2", "kl_10": "x"}', "no json", long_number)
    for text in (*broken, "[" * 100_000, "\xff"):
        (tmp_path / "t.json").write_text(text, encoding="latin-1")
        with pytest.raises(ConfigError, match="cannot be read"):
            Thresholds.read(tmp_path / "t.json")
    with pytest.raises(ConfigError):
        Thresholds(float("nan"), 1, 1)


def dial_that(begin=10, *, accepts=STEPS):
    """A dial that begins with a step, and takes what these steps leave."""
    means = {step: 0.03 if step < begin else 0.01 for step in STEPS}
    weights = {step: (0.0, 0.0, 0.0, 0.0, -20.0 if step in accepts else 20.0) for step in STEPS}
    return replace(NEVER, dial=DialTable(dict.fromkeys(PassageOrder, means), weights))


def ask(document, head, question, seed=0):
    """Another instruction and another question around the document of `one_document`."""
    text = tokens_of(document, seed)
    return tokens_of(head, question) + text + tokens_of(12, question + 1), [Span("d", 50, head, document)]


@pytest.mark.parametrize("begin", [10, 20])
def test_a_second_question_to_a_donor_is_answered_in_one_pass(begin):
    world = World(thresholds=dial_that(begin), most_work=10)
    first, _ = world.prepare(*one_document(world, document=400))
    prompt, spans = ask(400, 30, question=70)
    second, target = world.prepare(prompt, spans)
    assert [one.name for one in first.passes] == ["fast", f"repair {begin} %"]
    assert [one.name for one in second.passes] == [f"repair {begin} %"]
    assert second.decision == "accepted"
    assert second.passes[0].rows == 30 + 32 + 4 * begin + 12 + 4  # gap, head of the span, repair, question of 16 rows
    assert second.canary is not None
    assert second.risk is not None
    assert world.kv.holders == 0
    # What it computed is what the model computes over the KV that lies before it.
    again = world.slots(len(prompt))
    for part in (world.pool.k, world.pool.v):
        part[:, again] = part[:, target.slots]
    computed = np.flatnonzero([not any(s <= at < e for s, e in find_held(second, spans)) for at in range(len(prompt))])
    at = torch.from_numpy(computed)
    world.model.forward(Rows.of(torch.tensor(prompt)[at], at, again), world.pool)
    for ours, theirs in zip(world.kv_of(target.slots), world.kv_of(again), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def find_held(blended, spans):
    """Runs of the prompt that still hold a donor's KV."""
    held = np.zeros(spans[-1].target_end, dtype=bool)
    for span in spans:
        held[span.target_start : span.target_end] = True
    for start, end in blended.recomputed_runs:
        held[start:end] = False
    return [(at, at + 1) for at in np.flatnonzero(held)]


def test_one_pass_that_the_gate_does_not_take_is_followed_by_the_next_step_and_by_a_prefill():
    world = World(thresholds=dial_that(accepts=(20,)), most_work=10)
    world.prepare(*one_document(world, document=400))
    done, _ = world.prepare(*ask(400, 30, question=70))
    assert [one.name for one in done.passes] == ["repair 10 %", "repair 20 %"]
    assert done.escalations == 1
    world = World(thresholds=dial_that(accepts=()), most_work=10)
    world.prepare(*one_document(world, document=400))
    prompt, spans = ask(400, 30, question=70)
    done, target = world.prepare(prompt, spans)
    assert [one.name for one in done.passes][-1] == "prefill"
    assert done.escalations == 3
    assert_cold(world, done, target, prompt)


@pytest.mark.parametrize(
    "changed",
    [
        {"thresholds": ALWAYS},  # no dial: the gate compares two passes
        {"thresholds": dial_that(), "spans": [Span("d", 40, 20, 410)]},  # ten tokens that nobody has asked about
        {"thresholds": dial_that(), "generation": 1},
    ],
)
def test_what_no_earlier_question_has_shown_is_looked_at_first(changed):
    world = World(thresholds=changed["thresholds"], most_work=10)
    world.prepare(*one_document(world, document=400))
    prompt, spans = ask(400, 30, question=70)
    if "spans" in changed:
        prompt, spans = tokens_of(50, 1)[40:] + prompt[30:], [Span("d", 40, 0, 410)]
    if "generation" in changed:
        world.donate("d", tokens_of(50, 1) + tokens_of(400, 0) + tokens_of(10, 2), generation=1)
        spans = [replace(span, generation=1) for span in spans]
    done, _ = world.prepare(prompt, spans)
    assert [one.name for one in done.passes] == ["fast", "repair 10 %"]


def test_in_one_pass_wrong_donor_kv_is_refused_as_it_is_in_two():
    world = World(thresholds=dial_that())
    world.prepare(*one_document(world, document=400))
    world.poison("d", lambda tensors: tensors.k.mul_(1.5))
    done, _ = world.prepare(*ask(400, 30, question=70))
    assert isinstance(done, Decline)
    assert done.reason is DeclineReason.VALIDATION_FAILED
    assert done.faulty_donors == ("d",)


def edit_dial_that(**kept):
    return replace(ALWAYS, dial=dial_that().dial, edit_dial=dial_that(**kept).dial)


def edited_history(world):
    """The donor is a conversation; of the prompt, 40 tokens behind 50 exact ones were cleared, and 60 are new."""
    talk = tokens_of(450, 1)
    world.donate("d", talk)
    prompt = talk[:50] + tokens_of(10, 3) + talk[90:240] + tokens_of(10, 4) + talk[280:450] + tokens_of(60, 2)
    return prompt, [Span("d", 90, 60, 150), Span("d", 280, 220, 170)]


def test_an_edited_history_is_repaired_in_one_pass_without_a_look_at_the_question():
    world = World(thresholds=edit_dial_that(), most_work=10, deep_tolerance=0)
    prompt, spans = edited_history(world)
    done, target = world.prepare(prompt, spans, exact=50)
    assert [(one.name, one.layers) for one in done.passes] == [("deviation", 1), ("repair 10 %", 4)]
    assert done.passes[1].rows == 10 + 32 + 10 + 16 + 60 + 32  # gaps, heads of spans, what is new, 10 %
    assert done.decision == "accepted"
    assert done.canary is not None
    assert np.isnan(done.features.moved)
    assert done.features.deviation > 0
    assert done.exact_until < spans[0].target_end
    # What it computed is what the model computes over the KV that lies before it.
    again = world.slots(len(prompt))
    for part in (world.pool.k, world.pool.v):
        part[:, again] = part[:, target.slots]
    held = [at for at, _ in find_held(done, spans)]
    at = torch.from_numpy(np.setdiff1d(np.arange(50, len(prompt)), held))
    world.model.forward(Rows.of(torch.tensor(prompt)[at], at, again), world.pool)
    for ours, theirs in zip(world.kv_of(target.slots), world.kv_of(again), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_an_edited_history_that_the_gate_refuses_is_computed_as_a_cold_prompt_is():
    world = World(thresholds=edit_dial_that(accepts=()), most_work=10)
    prompt, spans = edited_history(world)
    done, target = world.prepare(prompt, spans, exact=50)
    assert done.passes[-1].name == "prefill"
    assert_cold(world, done, target, prompt)


@pytest.mark.parametrize("layers", [slice(0, 1), slice(2, 4)])
def test_wrong_donor_kv_of_an_edited_history_is_refused_in_the_first_layer_and_in_deep_ones(layers):
    world = World(thresholds=edit_dial_that())
    prompt, spans = edited_history(world)
    world.poison("d", lambda tensors: tensors.k[layers].mul_(-3.0))
    done, _ = world.prepare(prompt, spans, exact=50)
    assert isinstance(done, Decline)
    assert done.reason is DeclineReason.VALIDATION_FAILED
    assert done.faulty_donors == ("d",)


def test_where_no_edits_were_measured_an_edited_history_is_looked_at_like_any_prompt():
    world = World(thresholds=dial_that(), most_work=10)
    done, _ = world.prepare(*edited_history(world), exact=50)
    assert done.passes[0].name == "fast"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.integers(1, 30)), max_size=8))
def test_what_was_attended_to_is_recalled_by_the_donors_own_tokens(noted):
    attended, seen = AttendedTokens(), {}
    for number, (name, start, length) in enumerate(noted):
        mass = np.arange(100.0) + number
        attended.note([Span(name, start, 5, length)], mass)
        for at in range(length):
            now, before = mass[5 + at], seen.get((name, start + at))
            seen[name, start + at] = now if before is None else (before + now) / 2
    for name, start, length in noted:
        found = attended.recall([Span(name, start, 7, length)], 50)
        assert found[7 : 7 + length] == pytest.approx([seen[name, start + at] for at in range(length)])
        assert not found[:7].any()
        assert not found[7 + length :].any()
        assert attended.recall([Span(name, start, 0, length), Span("unheard of", 0, length, 1)], 80) is None


def test_of_many_donors_those_asked_about_last_are_remembered():
    attended = AttendedTokens(most_tokens=100)
    for name in "abcd":
        attended.note([Span(name, 0, 0, 40)], np.ones(40))
        attended.recall([Span("a", 0, 0, 40)], 40)
    known = [name for name in "abcd" if attended.recall([Span(name, 0, 0, 40)], 40) is not None]
    assert known == ["a", "d"]


def test_what_needs_no_repair_is_answered_after_one_pass_that_samples_deep_layers():
    dial = DialTable({PassageOrder.IN_ORDER: {0: 0.01, 10: 0.001}}, {10: (0.0, 0.0, 0.0, 0.0, -20.0)})
    world = World(thresholds=replace(NEVER, dial=dial), mode="0.05", deep_tolerance=1e9)
    done, _ = world.prepare(*one_document(world, document=400))
    assert [one.name for one in done.passes] == ["fast"]
    assert done.decision == "accepted"
    assert done.risk == 0.01
    assert done.deep is not None
