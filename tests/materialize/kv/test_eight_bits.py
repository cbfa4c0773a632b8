"""KV at 8 bits: half the bytes, an error that is known, and the same splice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semblend.errors import InputError
from semblend.materialize.contract import KvLayout
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.gate.observers import CANARY_TOLERANCE, EIGHT_BIT_TOLERANCE, find_tolerance
from semblend.materialize.kv.moves import (
    LARGEST,
    SCALES,
    DonorTensors,
    Move,
    Scales,
    count_bytes,
    pack,
    packed_shapes,
    unpack_rows,
)
from semblend.materialize.kv.rope import RopeSpec
from semblend.materialize.kv.splice import pack_donor, splice

LAYERS, HEADS, DIM = 2, 3, 16


def pool(slots=200, seed=0, dtype=torch.float32):
    made = torch.Generator().manual_seed(seed)
    return KvLayout.of_pool(*(torch.randn(LAYERS, slots, HEADS, DIM, generator=made).to(dtype) for _ in range(2)))


def unpack(numbers, scale, scales):
    return unpack_rows(numbers, scale, slice(0, len(numbers)), scales.group_tokens)


@given(
    st.integers(1, 150),
    st.integers(1, 3),
    st.sampled_from([1, 7, 16]),
    st.sampled_from([Scales(64, True), Scales(1, False), Scales(64, False), Scales(5, True)]),
    st.floats(-30, 30),
    st.integers(0, 1000),
)
def test_no_number_is_off_by_more_than_half_a_step_of_its_scale(n, heads, dim, scales, size, seed):
    x = torch.randn(n, heads, dim, generator=torch.Generator().manual_seed(seed)) * 2.0**size
    numbers, scale = pack(x, scales)
    assert numbers.shape == x.shape
    assert scale.shape == scales.shape(1, *x.shape)[1:]
    steps = scale.float()[torch.arange(n) // scales.group_tokens]
    assert bool(((unpack(numbers, scale, scales) - x).abs() <= steps / 2 * 1.001).all())
    assert int(numbers.abs().max()) <= LARGEST


def test_a_large_dimension_of_keys_does_not_cost_the_others_their_precision():
    """As in models with key biases: one dimension a hundred times as large as the rest."""
    x = torch.randn(64, 1, 16)
    x[..., 3] += 300
    by_dimension = unpack(*pack(x, SCALES["k"]), SCALES["k"])
    shared = Scales(64, False)
    by_head = unpack(*pack(x, shared), shared)
    others = [at for at in range(16) if at != 3]
    error = [(found - x)[..., others].norm() / x[..., others].norm() for found in (by_dimension, by_head)]
    assert error[0] < 0.01
    assert error[1] > 0.3


@pytest.mark.parametrize("value", [0.0, 1e-38, 3.3e38])
def test_extreme_values_stay_finite(value):
    x = torch.full((5, 2, 4), value)
    for scales in SCALES.values():
        found = unpack(*pack(x, scales), scales)
        assert bool(found.isfinite().all())
        torch.testing.assert_close(found, x, rtol=0.02, atol=1e-37)


def test_a_donor_at_8_bits_takes_about_half_the_bytes_of_one_at_16():
    assert 0.5 < count_bytes(packed_shapes(28, 24_000, 4, 128)) / (2 * 28 * 24_000 * 4 * 128 * 2) < 0.52


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [0, 5, -1000])
def test_a_splice_from_8_bits_is_the_splice_of_what_8_bits_stand_for(dtype, shift):
    source, rope = pool(dtype=dtype), RopeSpec.plain(DIM)
    kv = DonorKv(0, 1 << 24, bits=8)
    kv.capture("d", 1, source, torch.arange(150))
    packed = kv.acquire("d", 1)
    parts = {
        name: torch.stack([packed.read_rows(name, layer, slice(0, 150)) for layer in range(LAYERS)])
        for name in ("k", "v")
    }
    one, two = pool(seed=9, dtype=dtype), pool(seed=9)
    for target, donor in ((one, packed), (two, DonorTensors(parts["k"], parts["v"]))):
        splice([Move(donor, 61, 80, torch.arange(20, 100), shift)], target, rope)
    found, wanted = ([part.flatten(0, 1)[20:100] for part in (*made.k, *made.v)] for made in (one, two))
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(found, wanted, strict=True)), "rounded once"
    before = source.v[0].flatten(0, 1)[61:141].float()
    assert 0 < float((found[LAYERS].float() - before).norm() / before.norm()) < 0.01


def test_models_whose_frequencies_change_take_donors_at_8_bits_too():
    rope = RopeSpec(DIM, DIM, "half", tuple(0.5**i for i in range(DIM // 2)), dynamic=True)
    slower = RopeSpec(DIM, DIM, "half", tuple(0.9 * 0.5**i for i in range(DIM // 2)), dynamic=True)
    source = pool()
    found = []
    for bits in (16, 8):
        kv, target = DonorKv(0, 1 << 24, rope=rope, bits=bits), pool(seed=9)
        kv.capture("d", 1, source, torch.arange(150))
        splice([Move(kv.acquire("d", 1), 61, 80, torch.arange(80), 7)], target, slower)
        found.append(target.k[1].flatten(0, 1)[:80])
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 0.01


def test_what_a_donor_at_8_bits_lacks_or_has_wrong_is_refused():
    wide = DonorTensors(torch.randn(LAYERS, 70, HEADS, DIM), torch.randn(LAYERS, 70, HEADS, DIM))
    parts = {name: torch.empty(shape, dtype=kind) for name, (shape, kind) in packed_shapes(*wide.k.shape).items()}
    pack_donor(wide.parts, parts)
    good = DonorTensors.of_parts(parts)
    splice([Move(good, 0, 70, torch.arange(70), 3)], pool(), RopeSpec.plain(DIM))
    for broken in (
        {name: part for name, part in parts.items() if name != "v_scale"},
        {name: part for name, part in parts.items() if not name.endswith("_scale")},
        parts | {"k_scale": parts["k_scale"][:, :1]},
        parts | {"k_scale": parts["k_scale"].float()},
        parts | {"k": parts["k"].to(torch.int16)},
    ):
        with pytest.raises(InputError):
            splice([Move(DonorTensors.of_parts(broken), 0, 70, torch.arange(70), 3)], pool(), RopeSpec.plain(DIM))


def test_a_donor_is_packed_when_it_leaves_the_device_and_stays_so(tmp_path):
    source = pool()
    wide = 2 * LAYERS * 64 * HEADS * DIM * 4
    packed = count_bytes(packed_shapes(LAYERS, 64, HEADS, DIM))
    kv = DonorKv(wide, packed, tmp_path, budget_disk_bytes=4 * packed, device_type="cpu", bits=8)
    for number, name in enumerate("abc"):
        kv.capture(name, number, source, torch.arange(64) + number)
        kv.check()
    assert kv.used_bytes == {"device": wide, "host": packed, "disk": 2 * packed}
    assert kv.acquire("a", 0) is None
    assert not kv.await_rise("a", 0, timeout_s=300.0)
    lowest = kv.acquire("a", 0)
    assert lowest.packed
    assert torch.equal(lowest.k, pack_all(source, 0)["k"])
    assert torch.equal(lowest.v_scale, pack_all(source, 0)["v_scale"])
    kv.release(lowest)
    kv.check()
    kv.close()


def pack_all(source, first):
    parts = {
        name: torch.empty(shape, dtype=kind) for name, (shape, kind) in packed_shapes(LAYERS, 64, HEADS, DIM).items()
    }
    rows = slice(first, first + 64)
    wide = {name: torch.stack([layer.flatten(0, 1)[rows] for layer in getattr(source, name)]) for name in ("k", "v")}
    pack_donor(wide, parts)
    return parts


def test_other_numbers_of_bits_are_refused():
    with pytest.raises(InputError, match="4 bits"):
        DonorKv(0, 1, bits=4)


def test_the_canary_follows_the_bits():
    for dtype, tolerance in CANARY_TOLERANCE.items():
        assert find_tolerance(dtype, 16) == tolerance
        assert find_tolerance(dtype, 8) == EIGHT_BIT_TOLERANCE > tolerance
