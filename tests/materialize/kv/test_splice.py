"""Splice through its one door, on the plain path; the kernel is held to the same twin in ``kernel_cases.py``."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch", reason="splice moves torch tensors")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from plain_attention import attend_plain  # noqa: E402

from semblend.errors import InputError  # noqa: E402
from semblend.materialize.kv import splice as splicing  # noqa: E402
from semblend.materialize.kv.layout import KvLayout, UnlikeLayout  # noqa: E402
from semblend.materialize.kv.moves import DonorTensors, Move, packed_shapes  # noqa: E402
from semblend.materialize.kv.rope import RopeSpec  # noqa: E402
from semblend.materialize.kv.splice import (  # noqa: E402
    copy_layers,
    gather_packed,
    gather_plain,
    gather_staged,
    splice,
    splice_plain,
    stage_on_device,
)

LAYERS, HEADS, DIM, SLOTS = 3, 2, 8, 48
ROPE = RopeSpec.plain(DIM)


def pool() -> KvLayout:
    return KvLayout.of_pool(*torch.full((2, LAYERS, SLOTS, HEADS, DIM), 77.0))


def held(tokens: int = 20, seed: int = 0) -> DonorTensors:
    return DonorTensors(*torch.randn(2, LAYERS, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed)))


def test_a_spliced_key_is_the_key_computed_at_the_target_position():
    hidden = torch.randn(LAYERS, 20, HEADS, DIM)
    at_donor = ROPE.rotate(hidden, *ROPE.cos_sin(torch.arange(100, 120)))
    values = torch.randn(LAYERS, 20, HEADS, DIM)
    layout, slots = pool(), torch.randperm(SLOTS)[:12]
    assert splice([Move(DonorTensors(at_donor, values), 5, 12, slots, -90)], layout, ROPE) == 12
    at_target = ROPE.rotate(hidden[:, 5:17], *ROPE.cos_sin(torch.arange(15, 27)))
    for layer in range(LAYERS):
        k, v = layout.gather(layer, slots)
        torch.testing.assert_close(k, at_target[layer], rtol=0, atol=2e-6)
        assert torch.equal(v, values[layer, 5:17])


def test_slots_that_no_move_names_are_left_alone():
    layout = pool()
    splice([Move(held(), 0, 4, torch.tensor([3, 9, 8, 40]), 7)], layout, ROPE)
    others = torch.tensor([s for s in range(SLOTS) if s not in (3, 9, 8, 40)])
    for layer in range(LAYERS):
        assert all((part == 77.0).all() for part in layout.gather(layer, others))


@pytest.mark.parametrize("staged_layers", [0, 1, 2, 9])
@pytest.mark.parametrize("layers", [None, [2, 0]])
def test_gathering_a_few_layers_at_a_time_equals_layer_by_layer(staged_layers, layers, monkeypatch):
    layout, slots = KvLayout.of_pool(*torch.randn(2, LAYERS, SLOTS, HEADS, DIM)), torch.randperm(SLOTS)[:11]
    monkeypatch.setattr(splicing, "STAGED_BYTES", staged_layers * 2 * 11 * HEADS * DIM * 4)
    shape = (LAYERS if layers is None else len(layers), 11, HEADS, DIM)
    expected, got = ([torch.empty(shape) for _ in range(2)] for _ in range(2))
    gather_plain(layout, slots, *expected, layers)
    gather_staged(layout, slots, *got, layers)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


NARROW, WIDE = RopeSpec.plain(DIM), RopeSpec.plain(2 * DIM, theta=1e6)
UNLIKE = dataclasses.replace(
    WIDE, inv_freq=NARROW.inv_freq, rotary_dim=DIM, others=(WIDE.inv_freq,), layer_kinds=(0, 1, 0), sizes=(8, 16, 8)
)
"""Three heads of 8 dimensions, one of 16, three of 8: a row of a donor has 24 numbers."""


def unlike_pool(seed: int) -> UnlikeLayout:
    generator = torch.Generator().manual_seed(seed)
    narrow = KvLayout.of_pool(*torch.randn(2, 2, SLOTS, 3, DIM, generator=generator))
    wide = KvLayout.of_pool(*torch.randn(2, 1, SLOTS, 1, 2 * DIM, generator=generator))
    return UnlikeLayout(((narrow, 0), (wide, 0), (narrow, 1)))


@pytest.mark.parametrize("packed", [False, True])
def test_layers_with_unlike_heads_are_captured_and_spliced_as_each_would_be_alone(packed):
    ours, alone, slots = unlike_pool(0), unlike_pool(0), torch.randperm(SLOTS)
    here, there = slots[:20], slots[20:40]
    wide = copy_layers(ours, range(3), here)
    assert wide[0].shape == (3, 20, 1, 24)
    whole = DonorTensors(*wide)
    if packed:
        shapes = packed_shapes(3, 20, 1, 24)
        parts = {name: torch.empty(shape, dtype=kind) for name, (shape, kind) in shapes.items()}
        gather_packed(ours, here, parts)
        whole = DonorTensors.of_parts(parts)
    assert splice([Move(whole, 2, 18, there[2:], -7)], ours, UNLIKE) == 18
    for number, (part, at) in enumerate(alone.parts):
        k, v = part.gather(at, here[2:])
        part.scatter(at, there[2:], (WIDE if number == 1 else NARROW).relocate(k, -7), v)
        every = torch.arange(SLOTS)
        for have, want in zip(ours.gather(number, every), alone.gather(number, every), strict=True):
            torch.testing.assert_close(have, want, rtol=0, atol=0.05 if packed else 2e-6)
        assert ours.keys(number, here).shape[1:] == (part.kv_heads, part.head_dim)


def test_a_rotation_of_other_heads_than_the_layout_has_is_refused():
    whole = DonorTensors(*copy_layers(unlike_pool(0), range(3), torch.arange(4)))
    for other in (NARROW, dataclasses.replace(UNLIKE, sizes=(8, 8, 16))):
        with pytest.raises(InputError, match="is for heads of"):
            splice([Move(whole, 0, 4, torch.arange(4), 1)], unlike_pool(1), other)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 8), st.integers(-5000, 5000)), max_size=5))
def test_moves_in_one_call_equal_moves_one_by_one(wanted):
    order, used, moves = torch.randperm(SLOTS), 0, []
    for index, (start, length, shift) in enumerate(wanted):
        moves.append(Move(held(seed=index), start, length, order[used : used + length], shift))
        used += length
    together, apart = pool(), pool()
    assert splice(moves, together, ROPE) == used
    for move in moves:
        splice([move], apart, ROPE)
    for one, other in zip((*together.k, *together.v), (*apart.k, *apart.v), strict=True):
        assert torch.equal(one, other)


def test_a_donor_is_never_changed():
    donor = held()
    before = donor.k.clone(), donor.v.clone()
    splice([Move(donor, 0, 20, torch.arange(20), 3)], pool(), ROPE)
    assert torch.equal(donor.k, before[0])
    assert torch.equal(donor.v, before[1])


def test_a_donor_that_lies_otherwise_in_memory_is_staged_with_the_same_rows():
    donor = held()
    swapped = DonorTensors(donor.k.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3), donor.v)
    staged = stage_on_device(Move(swapped, 4, 9, torch.arange(9), 1), torch.device("cpu"))
    assert staged.donor_start == 0
    assert torch.equal(staged.donor.k, donor.k[:, 4:13])
    assert torch.equal(staged.donor.v, donor.v[:, 4:13])
    ready = Move(donor, 4, 9, torch.arange(9), 1)
    assert stage_on_device(ready, torch.device("cpu")) is ready


def test_half_precision_pools_take_half_precision_donors():
    donor = held()
    half = DonorTensors(donor.k.bfloat16(), donor.v.bfloat16())
    layout = KvLayout.of_pool(*torch.zeros(2, LAYERS, SLOTS, HEADS, DIM, dtype=torch.bfloat16))
    splice([Move(half, 0, 20, torch.arange(20), 150_000)], layout, ROPE)
    exact = ROPE.relocate(half.k[0].double(), 150_000)
    assert (layout.gather(0, torch.arange(20))[0].double() - exact).abs().max() < 0.02


def good(**changes) -> Move:
    return dataclasses.replace(Move(held(), 0, 4, torch.arange(4), 1), **changes)


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (good(donor_start=17), "donor tokens 17..21 of 20"),
        (good(donor_start=-1), "donor tokens -1..3"),
        (good(length=-1), "donor tokens"),
        (good(length=5), "5 tokens go to slots"),
        (good(target_slots=torch.zeros(2, 2, dtype=torch.int64)), "slots of shape"),
        (good(target_slots=torch.zeros(4)), "float32"),
        (good(target_slots=torch.tensor([0, 1, 2, SLOTS])), f"of {SLOTS}"),
        (good(target_slots=torch.tensor([0, 1, 2, -1])), "-1..3"),
        (good(shift=1.5), "shift of 1.5"),
        (good(donor=DonorTensors(held().k, held(21).v)), "donor keys"),
        (good(donor=DonorTensors(held().k[:2], held().v[:2])), "does not fit"),
        (good(donor=DonorTensors(held().k[:, :, :1], held().v[:, :, :1])), "does not fit"),
        (good(donor=DonorTensors(held().k.half(), held().v.half())), "float16 does not fit"),
        (good(donor_rope=RopeSpec.plain(DIM, theta=500.0)), "different rotary frequencies"),
    ],
)
def test_a_move_that_does_not_fit_is_refused_before_a_byte_is_written(move, words):
    layout = pool()
    with pytest.raises(InputError, match=words) as caught:
        splice([good(), move], layout, ROPE)
    assert caught.value.hint
    assert all((tensor == 77.0).all() for tensor in (*layout.k, *layout.v))


def test_dynamic_frequencies_need_the_donors_own_rotation():
    dynamic = dataclasses.replace(ROPE, dynamic=True)
    with pytest.raises(InputError, match="donor's own rotation"):
        splice([good()], pool(), dynamic)
    assert splice([good(donor_rope=dynamic)], pool(), dynamic) == 4


def test_a_rotation_of_another_model_is_refused():
    with pytest.raises(InputError, match="heads of 16"):
        splice([good()], pool(), RopeSpec.plain(16))


def test_nothing_to_move_moves_nothing():
    assert splice([], pool(), ROPE) == 0
    assert splice([good(length=0, target_slots=torch.empty(0, dtype=torch.int64))], pool(), ROPE) == 0
    splice_plain([], pool(), ROPE)


def test_scattered_attention_in_plain_torch_is_causal_attention_at_the_chosen_rows():
    total, heads = 30, 6
    made = torch.Generator().manual_seed(8)
    q = torch.randn(total, heads, DIM, generator=made)
    k, v = torch.randn(2, total, 2, DIM, generator=made)
    repeated = (x.repeat_interleave(3, 1).transpose(0, 1) for x in (k, v))
    full = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), *repeated, is_causal=True)
    rows, order = torch.tensor([0, 3, 4, 18, 29]), torch.randperm(total, generator=made)
    pool_k, pool_v = torch.empty_like(k), torch.empty_like(v)
    pool_k[order], pool_v[order] = k, v
    some = attend_plain(q[rows], rows, order, pool_k, pool_v, DIM**-0.5)
    torch.testing.assert_close(some, full.transpose(0, 1)[rows], rtol=1e-5, atol=1e-5)


# -- dynamic scaling: the rotation depends on the length of the prompt ---------------------------------------------

DYNAMIC = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "max_position_embeddings": 64, "rope_theta": 10_000.0,
    "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
}  # fmt: skip


def keys_of_transformers(model, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of every layer, [layers, tokens, heads, dim]."""
    with torch.no_grad():
        cache = model(tokens[None], use_cache=True).past_key_values
    layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    return tuple(torch.stack([pair[part].transpose(0, 1) for pair in layers]) for part in range(2))


@pytest.mark.parametrize(("donor_tokens", "target_tokens"), [(50, 60), (50, 120), (150, 60), (150, 100), (100, 180)])
def test_keys_move_between_prompts_of_any_length_under_dynamic_scaling(donor_tokens, target_tokens):
    transformers = pytest.importorskip("transformers", reason="the reference is transformers' model")
    torch.manual_seed(0)
    passage = torch.randint(0, 96, (30,))
    donor_ids, target_ids = (torch.randint(0, 96, (size,)) for size in (donor_tokens, target_tokens))
    donor_ids[7:37], target_ids[21:51] = passage, passage
    # A fresh model each: transformers keeps the longest rotation it has seen.
    (donor_k, donor_v), (target_k, target_v) = (
        keys_of_transformers(dynamic_model(transformers), ids) for ids in (donor_ids, target_ids)
    )
    theirs, ours = (RopeSpec.from_hf_config(DYNAMIC, size) for size in (donor_tokens, target_tokens))
    layout = KvLayout.of_pool(*(torch.zeros(2, 64, 2, 8) for _ in range(2)))
    move = Move(DonorTensors(donor_k, donor_v, "d", 1, theirs), 7, 30, torch.arange(5, 35), 14)
    assert splice([move], layout, ours) == 30
    k, v = layout.gather(0, torch.arange(5, 35))
    # Layer 0 depends on the token and its position alone; there a moved key is the computed one.
    assert torch.allclose(k, target_k[0, 21:51], atol=1e-4)
    assert torch.allclose(v, target_v[0, 21:51], atol=1e-5)


def dynamic_model(transformers):
    torch.manual_seed(1)
    given = {name: value for name, value in DYNAMIC.items() if name not in ("model_type", "rope_theta", "rope_scaling")}
    rope = {"rope_theta": 10_000.0, **DYNAMIC["rope_scaling"]}
    config = transformers.LlamaConfig(**given, rope_parameters=rope, attn_implementation="eager")
    return transformers.LlamaForCausalLM(config).eval()


def test_other_frequencies_without_dynamic_scaling_are_another_model():
    with pytest.raises(InputError, match="different rotary frequencies"):
        splice([good(donor_rope=RopeSpec.plain(DIM, theta=5e5))], pool(), ROPE)
