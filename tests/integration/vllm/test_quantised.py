"""A cache of 8-bit floats without vLLM: where bytes lie, what is read of them, and that a copy is the same bytes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from semblend.errors import InputError, SemBlendError
from semblend.integration.vllm.worker import pass_attention
from semblend.integration.vllm.worker.cache_layout import Digits, IndexedLayout, StridedLayout, probe_layout
from semblend.integration.vllm.worker.quantised import QuantisedLayout, attend_plain, check_scales, widen_queries
from semblend.materialize.contract import Rows
from semblend.materialize.gate.observers import NARROW_TOLERANCE, find_tolerance
from semblend.materialize.kv.moves import DonorTensors, Move
from semblend.materialize.kv.rope import RopeSpec
from semblend.materialize.kv.splice import gather, splice

BLOCKS, BLOCK, HEADS, DIM = 5, 16, 3, 8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = [(E4M3, False), (E4M3, True), (E5M2, False), (E5M2, True)]


def round_nearest(x, kind):
    return x.clamp(-torch.finfo(kind).max, torch.finfo(kind).max).to(kind)


def cut_off(x, kind):
    """As vLLM's writer on CPUs: what does not fit is dropped."""
    every = torch.arange(256, dtype=torch.uint8).view(kind).float()
    every = every[every.isfinite() & (every >= 0)].unique()
    at = torch.searchsorted(every, x.float().abs().contiguous(), right=True) - 1
    return (every[at] * x.float().sign()).to(kind)


def make_writer(kind, scales, cuts, tiled):
    order = torch.randperm(DIM, generator=torch.Generator().manual_seed(0)) if tiled else torch.arange(DIM)

    def write(k, v, cache, slots):
        k, v = ((cut_off if cuts else round_nearest)(x.float() / s, kind) for x, s in zip((k, v), scales, strict=True))
        for row, slot in enumerate(slots.tolist()):
            page = cache[slot // BLOCK].view(2, BLOCK, HEADS, DIM)
            page[0, slot % BLOCK] = k[row][:, order].view(torch.uint8)
            page[1, slot % BLOCK] = v[row][:, order].view(torch.uint8)

    return write


def make(kind=E4M3, dtype=torch.bfloat16, scales=(1.0, 1.0), cuts=False, tiled=False):
    caches = [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=torch.uint8) for _ in range(2)]
    write = make_writer(kind, scales, cuts, tiled)
    codes = probe_layout(caches, BLOCK, HEADS, DIM, write, Digits(dtype, kind, scales))
    return QuantisedLayout(codes, kind, dtype, lambda layer: scales), caches, write


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.013, 3.7)])
@pytest.mark.parametrize(("kind", "cuts"), KINDS)
def test_what_the_backend_wrote_is_read_and_copied_byte_for_byte(kind, cuts, scales, dtype, tiled):
    if (kind, dtype, scales) == (E5M2, torch.float16, (0.013, 3.7)):
        pytest.skip("such numbers are not held exactly: see below")
    layout, caches, write = make(kind, dtype, scales, cuts, tiled)
    assert type(layout.codes) is (IndexedLayout if tiled else StridedLayout)
    slots = torch.tensor([3, 70, 17, 40])
    k, v = torch.randn(2, 4, HEADS, DIM).to(dtype)
    write(k, v, caches[1], slots)
    found = layout.gather(1, slots)
    assert torch.equal(layout.keys(1, slots), found[0])
    for got, wrote in zip(found, (k, v), strict=True):
        assert got.dtype == dtype
        assert float((got - wrote).abs().max() / wrote.abs().max()) < (0.13 if kind is E4M3 else 0.25)
    layout.scatter(0, slots, *found)
    assert torch.equal(caches[0], caches[1])


def test_a_type_that_does_not_hold_every_8_bit_number_exactly_is_refused():
    with pytest.raises(InputError, match="is not held exactly"):
        make(E5M2, torch.float16, (1e-4, 1.0))


def test_a_writer_with_another_scale_than_we_read_is_refused():
    caches = [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=torch.uint8)]
    with pytest.raises(InputError, match="changes or drops"):
        probe_layout(
            caches,
            BLOCK,
            HEADS,
            DIM,
            make_writer(E4M3, (2.0, 1.0), cuts=False, tiled=False),
            Digits(torch.bfloat16, E4M3),
        )


def test_what_is_too_large_for_8_bits_becomes_the_largest_number_and_what_is_none_stays_none():
    layout, _, _ = make()
    slots, large = torch.arange(2), torch.full((2, HEADS, DIM), 1e6, dtype=torch.bfloat16)
    layout.scatter(0, slots, large, -large * float("nan"))
    k, v = layout.gather(0, slots)
    assert bool((k == torch.finfo(E4M3).max).all())
    assert bool(v.isnan().all())


@pytest.mark.parametrize("cuts", [False, True])
def test_a_moved_key_is_rotated_wide_and_rounded_once_and_a_value_is_copied(cuts):
    layout, caches, write = make(cuts=cuts)
    config = {"model_type": "qwen2", "hidden_size": 24, "num_attention_heads": 3, "rope_theta": 1e4}
    rope, here, there = RopeSpec.from_hf_config(config), torch.arange(20), torch.arange(40, 60)
    k, v = torch.randn(2, 20, HEADS, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    for cache in caches:
        write(k, v, cache, here)
    donor = [torch.empty(2, 20, HEADS, DIM, dtype=torch.bfloat16) for _ in range(2)]
    gather(layout, here, *donor)
    for shift in (0, 9):
        splice([Move(DonorTensors(*donor), 0, 20, there, shift)], layout, rope)
        codes = layout.codes.gather(0, here), layout.codes.gather(0, there)
        assert torch.equal(codes[0][1], codes[1][1]), "values byte for byte"
        assert torch.equal(codes[0][0], codes[1][0]) is (shift == 0)
    moved, exact = layout.gather(0, there)[0].float(), rope.relocate(donor[0][0].float(), 9)
    off = (moved - exact).abs() / exact.abs().clamp_min(2.0**-6)
    assert float(off.max()) < 2**-4 + 2**-8, "half a step of three bits"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"_k_scale": torch.ones(4)}, "for each head"),
        ({"_v_scale": torch.tensor(2.0)}, "two scales"),
    ],
)
def test_a_layer_must_have_one_scale_for_keys_and_one_for_values(changes, words):
    layer = {"_k_scale": torch.tensor(1.0), "_v_scale": torch.tensor(1.0), "_k_scale_float": 1.0, "_v_scale_float": 1.0}
    check_scales(SimpleNamespace(**layer))
    with pytest.raises(SemBlendError, match=words):
        check_scales(SimpleNamespace(**layer | changes))


def test_an_observer_is_shown_queries_that_a_backend_wants_in_8_bits_as_they_were():
    layer, q = SimpleNamespace(_q_scale_float=0.5), torch.randn(3, 2, DIM)
    assert widen_queries(layer, q, torch.bfloat16) is q
    shown = widen_queries(layer, (q / 0.5).to(E4M3), torch.bfloat16)
    assert shown.dtype == torch.bfloat16
    assert float((shown.float() - q).abs().max() / q.abs().max()) < 2**-4


def test_a_kernel_that_reads_wide_numbers_attends_over_what_is_read_of_8_bits(monkeypatch):
    """The kernel is for GPUs: what it is handed is looked at, by a plain twin in its place."""
    layout, _, _ = make(scales=(0.5, 0.25))
    k, v = torch.randn(2, 4 * BLOCK, HEADS, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    context = torch.arange(4 * BLOCK).view(4, BLOCK).flip(0).flatten()
    layout.scatter(1, context, k, v)
    impl = SimpleNamespace(scale=0.3, logits_soft_cap=0, alibi_slopes=None)
    layer = SimpleNamespace(impl=impl, num_heads=HEADS, num_kv_heads=HEADS, sliding_window=None)

    def attend(q, positions, slots, k, v, scale, parts, after):
        assert (scale, after) == (0.3, None)
        return attend_plain(layer, q, positions, k.flatten(0, 1)[slots], v.flatten(0, 1)[slots]).to(q.dtype)

    monkeypatch.setattr(pass_attention, "_kernel", lambda: attend)
    at = torch.tensor([3, 17, 40])
    q = torch.randn(3, HEADS, DIM).bfloat16()
    rows = Rows.of(at, at, context)
    found = pass_attention.attend_widened(rows, layout, [None, layer])(1, q)
    wanted = attend_plain(layer, q, at, *layout.gather(1, context))
    torch.testing.assert_close(found.float(), wanted, rtol=0.02, atol=0.02)
    assert pass_attention.choose_attention(rows, layout, [layer], grouped=False) is None, "not on a CPU"
    monkeypatch.setattr(pass_attention, "runs_kernels", lambda *_: True)
    assert pass_attention.choose_attention(rows, layout, [layer], grouped=False) is not None


def test_the_canary_follows_the_type_of_the_cache():
    for narrow, tolerance in NARROW_TOLERANCE.items():
        for bits in (16, 8):
            assert find_tolerance(torch.bfloat16, bits, narrow=narrow) == tolerance
        assert tolerance < 0.226, "a shift by one position"
