"""What is seen while a prompt is prepared: attention of the question, deviation, divergence, and the canary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_features import BFLOAT16
from hypothesis import given
from hypothesis import strategies as st

from semblend.engine.model.model import DecoderModel, PooledModel
from semblend.engine.model.spec import ModelSpec
from semblend.materialize.contract import Observer, Rows, StopPass
from semblend.materialize.gate import observers
from semblend.materialize.gate.observers import (
    CANARY_TOLERANCE,
    AttentionMass,
    KvDeviation,
    RepairedDeviation,
    canary_positions,
    compute_deviation,
    count_question_rows,
    measure_canary,
)
from semblend.materialize.gate.thresholds import UNBOUNDED_RISK, bound_risk, next_token_kl
from semblend.materialize.kv.layout import LatentLayout
from semblend.materialize.kv.moves import DonorTensors, Move, packed_shapes
from semblend.materialize.kv.rope import RopeSpec
from semblend.materialize.kv.splice import pack_donor, splice

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


def model_of(dtype=torch.float32, **changes):
    return DecoderModel.random(ModelSpec.from_hf_config({**CONFIG, **changes}), seed=3, dtype=dtype)


def placed(model, tokens, length=None):
    pool = model.new_pool(2 * len(tokens) + 64)
    context = pool.slots_of(pool.allocate(pool.blocks_for(len(tokens))), 0, len(tokens))
    model.forward(Rows.of(tokens, torch.arange(len(tokens)), context), pool)
    return pool, context


def tokens_of(n, seed=0):
    return torch.randint(0, 101, (n,), generator=torch.Generator().manual_seed(seed))


def test_the_mass_is_what_a_plain_softmax_says():
    model, tokens = model_of(), tokens_of(40)
    pool, context = placed(model, tokens)
    seen = []

    class Plain(Observer):
        def on_layer(self, layer, q, rows, layout):
            keys = pool.k[layer, context].repeat_interleave(2, dim=1)
            scores = torch.einsum("nhd,thd->hnt", q[-5:], keys) / 4.0
            hidden = torch.arange(40) > rows.positions[-5:, None]
            seen.append(scores.masked_fill(hidden, -torch.inf).softmax(-1).mean((0, 1)))

    watch = AttentionMass(most_rows=5)
    for observer in (Plain(), watch):
        model.forward(Rows.of(tokens[10:], torch.arange(10, 40), context), pool, observer)
    assert torch.allclose(watch.mass, sum(seen), atol=1e-5)
    assert watch.mass.sum() == pytest.approx(3.0, abs=1e-4)  # one for each layer


def test_only_the_last_run_asks_and_it_sees_nothing_behind_itself():
    model, tokens = model_of(), tokens_of(40)
    pool, context = placed(model, tokens)
    watch = AttentionMass()
    rows = torch.tensor([2, 3, 20, 28, 29])
    model.forward(Rows.of(tokens[rows], rows, context), pool, watch)
    assert (watch.mass[30:] == 0).all()
    assert (watch.mass[:30] > 0).all()


class OwnWeights(AttentionMass):
    """Computes the weights itself, as it must where attention shows none."""

    reads_weights = False


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 3, 20, 28, 29], [0, *range(5, 300, 3), *range(330, 395)]])
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_mass_is_the_same_whoever_computes_the_weights(dtype, rows, shuffled):
    model, tokens = model_of(dtype), tokens_of(400)
    pool = model.new_pool(500)
    blocks = pool.allocate(pool.blocks_for(400))
    context = pool.slots_of(blocks[::-1] if shuffled else blocks, 0, 400)
    model.forward(Rows.of(tokens, torch.arange(400), context), pool)
    at = torch.tensor(rows)
    shared, own = AttentionMass(), OwnWeights()
    for watch in (shared, own):
        model.forward(Rows.of(tokens[at], at, context), pool, watch)
    assert torch.allclose(shared.mass, own.mass, atol=1e-6)
    assert own.mass.sum() == pytest.approx(3.0, abs=1e-4)
    assert (own.mass[rows[-1] + 1 :] == 0).all()


def test_layers_beside_are_left_out_whether_seen_one_by_one_or_when_the_pass_is_over():
    model, tokens = model_of(), tokens_of(40)
    pool, context = placed(model, tokens)
    rows, asked = Rows.of(tokens[30:], torch.arange(30, 40), context), []

    class Keeps(Observer):
        def on_layer(self, layer, q, rows, layout):
            asked.append(q.clone())

    one_by_one, at_the_end, middle = (OwnWeights(beside=layers) for layers in ({0, 2}, {0, 2}, ()))
    for observer in (Keeps(), one_by_one):
        model.forward(rows, pool, observer)
    at_the_end.on_queries(torch.stack(asked), rows, pool.layout)
    middle.on_layer(1, asked[1], rows, pool.layout)
    assert one_by_one.mass.sum() == pytest.approx(1.0, abs=1e-4)
    for watch in (at_the_end, middle):
        assert torch.allclose(watch.mass, one_by_one.mass, atol=1e-6)


@pytest.mark.parametrize("kind", [AttentionMass, OwnWeights])
def test_the_mass_is_of_the_last_part_of_a_pass_only(kind):
    model, tokens = model_of(), tokens_of(40)
    pool, context = placed(model, tokens)
    whole, last_part = kind(), kind()
    for watch, parts in ((whole, (torch.arange(10), torch.arange(20, 40))), (last_part, (torch.arange(20, 40),))):
        for part in parts:  # a prompt's beginning is attended without weights
            model.forward(Rows.of(tokens[part], part, context), pool, watch)
    assert torch.equal(whole.mass, last_part.mass)
    assert torch.equal(whole.mass, last_part.mass)  # asked again
    assert whole.mass[39] > 0


def test_the_mass_is_the_same_where_all_queries_are_told_when_the_pass_is_over():
    model, tokens = model_of(), tokens_of(40)
    pool, context = placed(model, tokens)
    queries, part = [], torch.arange(20, 40)

    class Keeps(Observer):
        def on_layer(self, layer, q, rows, layout):
            queries.append(q[-16:].clone())

    rows, now, later = Rows.of(tokens[part], part, context), OwnWeights(), OwnWeights()
    for watch in (Keeps(), now):
        model.forward(rows, pool, watch)
    kept = torch.stack(queries)
    now.most_rows = later.most_rows = 16
    now._rows = None
    model.forward(rows, pool, now)
    RepairedDeviation(later).on_queries(kept, rows, pool.layout)
    kept.zero_()  # as the next pass does
    assert torch.equal(now.mass, later.mass)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16, torch.float16])
@pytest.mark.parametrize("at_once", [1, 700, 1 << 26])
def test_attention_in_parts_is_a_plain_softmax(dtype, at_once, monkeypatch):
    monkeypatch.setattr(observers, "_SCORES_AT_ONCE", (at_once, at_once))
    q, k = torch.randn(7, 6, 16).to(dtype), torch.randn(50, 2, 16).to(dtype)
    total = torch.ones(60)
    observers.add_attention(total, q, k)
    scores = torch.einsum("nhd,thd->hnt", q.float(), k.float().repeat_interleave(3, dim=1)) / 4.0
    hidden = torch.arange(50) > torch.arange(43, 50)[:, None]
    want = scores.masked_fill(hidden, -torch.inf).softmax(-1).mean((0, 1))
    assert torch.allclose(total[:50] - 1, want, atol=1e-6 if dtype == torch.float32 else 2e-3)
    assert (total[50:] == 1).all()


@given(st.lists(st.integers(0, 60), min_size=1, max_size=40, unique=True).map(sorted), st.integers(1, 20))
def test_the_question_is_the_last_unbroken_run(positions, most):
    expected = 1
    while expected < len(positions) and positions[-expected] - positions[-expected - 1] == 1:
        expected += 1
    assert count_question_rows(torch.tensor(positions), most) == min(most, expected)


def test_layer_1_deviation_is_zero_on_exact_kv_and_not_on_another_context():
    model, tokens = model_of(), tokens_of(40)
    pool, context = placed(model, tokens)
    for exact in (True, False):
        if not exact:
            pool.k[1, context[20:]] += 0.5
        look = KvDeviation(layer=1)
        with pytest.raises(StopPass):
            model.forward(Rows.of(tokens[10:], torch.arange(10, 40), context), pool, look)
        assert look.relative.shape == look.squared.shape == (30,)
        assert (look.relative[:10] < 1e-4).all()
        assert bool((look.relative[10:] < 1e-4).all()) == exact
        assert bool((look.squared[10:] > 0.1).all()) != exact


class SeesWrites(Observer):
    """The plain twin of `RepairedDeviation`: compares what a layer is about to write with what it overwrites."""

    def __init__(self):
        self.seen = []

    def before_write(self, layer, k, v, rows, layout):
        if layer == 2:
            self.seen.append(compute_deviation(k, v, layout.gather(layer, rows.slots)))


@pytest.mark.parametrize("rows", [list(range(10, 40)), [3, 8, 21, 22, 30, 39]], ids=["a run", "scattered"])
def test_what_a_repair_changed_is_seen_before_and_after_the_pass_as_while_it_runs(rows):
    model, tokens = model_of(), tokens_of(40)
    found = []
    for observer in (SeesWrites(), RepairedDeviation()):
        pool, context = placed(model, tokens)
        pool.k[2, context[5:25]] += 0.5
        for part in (torch.tensor(rows[:3]), torch.tensor(rows[3:])):
            there = Rows.of(tokens[part], part, context)
            observer.on_begin(there, pool.layout)
            model.forward(there, pool, observer)
            observer.on_end(there, pool.layout)
        found.append(observer)
    twin, repaired = found
    at, weight = np.ones(len(rows), dtype=bool), np.arange(1.0, len(rows) + 1)
    expected = float((torch.cat(twin.seen).numpy() * weight).sum() / weight.sum())
    assert expected > 0.01
    assert repaired.mean_over(at, weight) == pytest.approx(expected, rel=1e-5)
    assert repaired.after_pass, "a recorded pass serves it"


def test_divergence_is_the_textbook_sum_and_never_negative():
    now, before = torch.randn(50), torch.randn(50)
    p, q = now.double().softmax(0), before.double().softmax(0)
    assert next_token_kl(now, before) == pytest.approx(float((p * (p / q).log()).sum()))
    assert next_token_kl(now, now + 3) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_unbounded_risk(bad):
    broken = torch.tensor([1.0, bad, 0.0])
    for pair in ((broken, torch.zeros(3)), (torch.zeros(3), broken)):
        assert next_token_kl(*pair) == UNBOUNDED_RISK


def test_a_token_that_became_impossible_is_an_unbounded_risk_and_one_that_stays_so_is_none():
    never = torch.tensor([0.0, 1.0, -torch.inf])
    assert next_token_kl(torch.zeros(3), never) == UNBOUNDED_RISK
    assert next_token_kl(never, never) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16, torch.float16])
@pytest.mark.parametrize(
    "kind", [{}, {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6}]
)
@pytest.mark.parametrize("shift", [-95, 0, 37])
def test_the_canary_passes_moved_keys_and_sees_a_shift_off_by_one_and_a_wrong_token_ten_times_over(dtype, kind, shift):
    model, tokens = model_of(dtype, **kind), tokens_of(200)
    if kind:  # keys that all share a large bias, as trained Qwen2 models have them
        model.weights.layers[0].qkv_bias.mul_(50)
    pool, context = placed(model, tokens)
    other = pool.slots_of(pool.allocate(pool.blocks_for(240)), 0, 240)
    donor = torch.arange(100, 200)
    target, rope = donor + shift, model.spec.rope

    def error(by=shift, asked=tokens):
        pool.k[0, other[target]] = rope.relocate(pool.k[0, context[donor]], by)
        pool.v[0, other[target]] = pool.v[0, context[donor]]
        return measure_canary(PooledModel(model, pool), Rows.of(asked[donor], target, other))

    tolerance = CANARY_TOLERANCE[dtype]
    assert error() < tolerance / 3
    assert error(by=shift + 1) > 10 * tolerance
    assert error(by=shift - 1) > 10 * tolerance
    assert error(asked=tokens.roll(1)) > 10 * tolerance


def test_the_canary_sees_values_too_writes_nothing_and_treats_nan_as_wrong():
    model, tokens = model_of(), tokens_of(64)
    pool, context = placed(model, tokens)
    before = pool.k.clone(), pool.v.clone()
    at = torch.arange(64)
    assert measure_canary(PooledModel(model, pool), Rows.of(tokens, at, context)) < 1e-5
    assert torch.equal(pool.k, before[0])
    assert torch.equal(pool.v, before[1])
    pool.v[0, context[7]] *= 1.1
    assert float(measure_canary(PooledModel(model, pool), Rows.of(tokens, at, context))) == pytest.approx(0.1, rel=0.05)
    pool.k[0, context[7]] = torch.nan
    assert bound_risk(float(measure_canary(PooledModel(model, pool), Rows.of(tokens, at, context)))) == UNBOUNDED_RISK


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90)), min_size=1, max_size=5), st.integers(0, 5))
def test_every_block_of_every_span_is_sampled_and_nothing_outside(pieces, seed):
    starts, ends, at = [], [], 0
    for gap, length in pieces:
        starts.append(at + gap)
        ends.append(at + gap + length)
        at = ends[-1]
    chosen = set(canary_positions(torch.tensor(starts), torch.tensor(ends), seed=seed).tolist())
    covered = {p for start, end in zip(starts, ends, strict=True) for p in range(start, end)}
    assert chosen <= covered
    assert {p // 16 for p in covered} == {p // 16 for p in chosen}
    assert set(starts) <= chosen
    assert {end - 1 for end in ends} <= chosen
    assert np.all(
        np.array(sorted(chosen)) == canary_positions(torch.tensor(starts), torch.tensor(ends), seed=seed).numpy()
    )


DEEPSEEK = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 163840}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("rotation", [YARN, {"rope_type": "default", "rope_theta": 1e6}], ids=["yarn", "base 1e6"])
@pytest.mark.parametrize("bits", [16, 8])
def test_the_canary_sees_what_is_wrong_with_latents_whatever_bits_donors_have(rotation, bits):
    """Random vectors in the size of DeepSeek's; a latent alone wrong, in either half, is seen too."""
    rope = RopeSpec.from_hf_config(DEEPSEEK | {"rope_parameters": rotation})
    drawn = torch.Generator().manual_seed(4)
    cache = torch.zeros(64, 4, 1, 576, dtype=torch.bfloat16)
    layout = LatentLayout((cache[..., 288:],), (cache[..., :288],))
    slots, (v, k) = torch.arange(256), torch.randn(2, 256, 1, 288, generator=drawn).bfloat16()
    wide = {"k": rope.relocate(k, -700)[None], "v": v[None]}
    held = DonorTensors.of_parts(wide)
    if bits == 8:
        parts = {name: torch.empty(shape, dtype=kind) for name, (shape, kind) in packed_shapes(1, 256, 1, 288).items()}
        pack_donor(wide, parts)
        held = DonorTensors.of_parts(parts)

    def look(shift=700, k=k, v=v):
        splice([Move(held, 0, 256, slots, shift)], layout, rope)
        canary = observers.Canary(rope)
        with pytest.raises(StopPass):
            canary.before_write(0, k, v, Rows.of(slots, slots, slots), layout)
        return canary.found

    tolerance = observers.find_tolerance(torch.bfloat16, bits, latents=True)
    assert tolerance >= 2 * observers.find_tolerance(torch.bfloat16)
    assert look().max() < tolerance / 2
    assert look(shift=701).min() > 1.5 * tolerance
    assert look(v=v.roll(1, 0)).min() > 5 * tolerance
    wrong = torch.cat((k.roll(1, 0)[..., : rope.rotary_start], k[..., rope.rotary_start :]), dim=-1)
    assert look(k=wrong).min() > 5 * tolerance
