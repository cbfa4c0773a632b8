"""The kernels against their plain twins: on a GPU where there is one, else in Triton's interpreter.

``test_kernels.py`` runs this file in a process of its own, because Triton decides at import whether it interprets.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the twins need torch")
pytest.importorskip("triton", reason="the kernels need triton")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from plain_attention import attend_plain  # noqa: E402

from semblend.errors import InputError  # noqa: E402
from semblend.integration.vllm.worker import pass_attention  # noqa: E402
from semblend.materialize.contract import Rows  # noqa: E402
from semblend.materialize.gate.observers import add_attention  # noqa: E402
from semblend.materialize.kv import attention_kernels  # noqa: E402
from semblend.materialize.kv.attention_kernels import Attended, scattered_attention  # noqa: E402
from semblend.materialize.kv.kernels import gather_rows, splice_moves  # noqa: E402
from semblend.materialize.kv.layout import KvLayout, LatentLayout  # noqa: E402
from semblend.materialize.kv.moves import (  # noqa: E402
    DonorTensors,
    Move,
    packed_shapes,
)
from semblend.materialize.kv.rope import RopeSpec  # noqa: E402
from semblend.materialize.kv.splice import check_moves, gather_plain, pack_donor, splice_plain, stage_on_device  # noqa: E402  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def parted(caches: list[torch.Tensor], axis: int) -> KvLayout:
    """vLLM's caches, one tensor a layer, as views; keys and values part at ``axis``."""
    k, v = (tuple(cache.select(axis, side) for cache in caches) for side in (0, 1))
    return KvLayout(k, v)


def pool(kind: str, layers: int, slots: int, heads: int, d: int, dtype: torch.dtype, block: int = 4) -> KvLayout:
    """A pool of the named engine, filled with a value that no splice writes."""

    def full(*shape: int) -> torch.Tensor:
        return torch.full(shape, 77.0, dtype=dtype, device=DEVICE)

    blocks = slots // block
    if kind == "ours":
        return KvLayout.of_pool(full(layers, slots, heads, d), full(layers, slots, heads, d))
    if kind == "vllm keys first":
        return parted([full(2, blocks, block, heads, d) for _ in range(layers)], 0)
    if kind == "vllm side by side":
        return parted([full(blocks, 2, block, heads, d) for _ in range(layers)], 1)
    if kind == "vllm heads outside":
        return parted([full(2, blocks, heads, block, d).transpose(2, 3) for _ in range(layers)], 0)
    buffers = [[full(slots, heads, d) for _ in range(layers)] for _ in range(2)]
    return KvLayout.of_rows(*buffers)


KINDS = ["ours", "vllm keys first", "vllm side by side", "vllm heads outside", "sglang"]


def rope_of(style: str, d: int, rotary: int, start: int = 0) -> RopeSpec:
    return RopeSpec(d, rotary, style, tuple(1e4 ** (-i / rotary) for i in range(0, rotary, 2)), rotary_start=start)


def donor(layers: int, tokens: int, heads: int, d: int, dtype: torch.dtype, seed: int) -> DonorTensors:
    made = torch.Generator().manual_seed(seed)
    return DonorTensors(*(torch.randn(layers, tokens, heads, d, generator=made).to(DEVICE, dtype) for _ in range(2)))


def assert_same_splice(moves: list[Move], kind: str, layers: int, slots: int, heads: int, rope: RopeSpec) -> None:
    dtype = moves[0].donor.k.dtype
    expected, got = (pool(kind, layers, slots, heads, rope.head_dim, dtype) for _ in range(2))
    check_moves(moves, got, rope)
    splice_plain(moves, expected, rope)
    splice_moves([stage_on_device(move, got.device) for move in moves], got, rope)
    tolerance = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    for want, have in zip((*expected.k, *expected.v), (*got.k, *got.v), strict=True):
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)
    for want, have in zip(expected.v, got.v, strict=True):
        assert torch.equal(have, want), "values are copied, not computed"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_splice_equals_its_twin_in_every_layout_style_and_type(kind, style, dtype):
    layers, slots, heads, d = 2, 96, 2, 16
    rope = rope_of(style, d, d)
    where = torch.randperm(slots, generator=torch.Generator().manual_seed(5))
    one, two = donor(layers, 50, heads, d, dtype, 1), donor(layers, 40, heads, d, dtype, 2)
    moves = [
        Move(one, 3, 41, where[:41], 1234),
        Move(two, 0, 40, where[41:81].int(), -77),
        Move(one, 49, 1, where[81:82], 0),
    ]
    assert_same_splice(moves, kind, layers, slots, heads, rope)


@pytest.mark.parametrize("rotary", [12, 16, 4])
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_that_rotate_differently_or_not_at_all_are_spliced_as_the_twin_does(style, dtype, rotary):
    layers, slots, heads, d = 4, 96, 2, 16
    others = (tuple(1e6 ** (-i / rotary) / 8 for i in range(0, rotary, 2)), (0.0,) * 6)
    rope = replace(rope_of(style, d, 12), others=others, layer_kinds=(1, 0, 2, 1))
    where = torch.randperm(slots, generator=torch.Generator().manual_seed(5))
    held = donor(layers, 50, heads, d, dtype, 1)
    moves = [Move(held, 3, 41, where[:41], 1234), Move(held, 1, 9, where[41:50], -1), Move(held, 0, 1, where[50:51], 0)]
    assert_same_splice(moves, "vllm side by side", layers, slots, heads, rope)
    got = pool("ours", layers, slots, heads, d, dtype)
    splice_moves(moves[:1], got, rope)
    assert torch.equal(got.k[2].squeeze(1)[where[:41]], held.k[2, 3:44]), "a layer that does not rotate is copied"


def packed_donor(layers: int, tokens: int, heads: int, d: int, dtype: torch.dtype, seed: int) -> DonorTensors:
    wide = donor(layers, tokens, heads, d, dtype, seed)
    shapes = packed_shapes(layers, tokens, heads, d)
    parts = {name: torch.empty(shape, dtype=kind, device=DEVICE) for name, (shape, kind) in shapes.items()}
    pack_donor(wide.parts, parts)
    return DonorTensors.of_parts(parts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_donors_at_8_bits_are_spliced_as_the_twin_does(kind, style, dtype):
    layers, slots, heads, d, rotary = 2, 256, 3, 16, 12
    rope = rope_of(style, d, rotary)
    where = torch.randperm(slots, generator=torch.Generator().manual_seed(5))
    one, two = packed_donor(layers, 150, heads, d, dtype, 1), packed_donor(layers, 64, heads, d, dtype, 2)
    moves = [
        Move(one, 61, 80, where[:80], 1234),
        Move(two, 0, 64, where[80:144].int(), -77),
        Move(one, 149, 1, where[144:145], 0),
    ]
    expected, got = (pool(kind, layers, slots, heads, d, dtype) for _ in range(2))
    check_moves(moves, got, rope)
    splice_plain(moves, expected, rope)
    splice_moves([stage_on_device(move, got.device) for move in moves], got, rope)
    tolerance = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    for want, have in zip((*expected.k, *expected.v), (*got.k, *got.v), strict=True):
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)  # the interpreter cuts off in bfloat16


@pytest.mark.parametrize(("heads", "d", "rotary"), [(1, 80, 32), (3, 24, 24), (5, 10, 4), (2, 9, 6), (4, 64, 64)])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_splice_handles_partial_rotation_and_sizes_that_are_no_powers_of_two(heads, d, rotary, style):
    held = donor(1, 30, heads, d, torch.float32, 3)
    moves = [Move(held, 2, 28, torch.arange(5, 33), 200_000)]
    assert_same_splice(moves, "ours", 1, 40, heads, rope_of(style, d, rotary))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("heads", "d", "rotary", "start"), [(1, 36, 8, 28), (2, 12, 4, 3), (1, 288, 64, 224)])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_splice_rotates_dimensions_that_are_not_the_first(heads, d, rotary, start, style, packed):
    held = (packed_donor if packed else donor)(1, 30, heads, d, torch.float32, 3)
    moves = [Move(held, 2, 28, torch.arange(5, 33), 200_000)]
    rope = rope_of(style, d, rotary, start)
    expected, got = (pool("ours", 1, 40, heads, d, torch.float32) for _ in range(2))
    splice_plain(moves, expected, rope)
    splice_moves([stage_on_device(move, got.device) for move in moves], got, rope)
    for want, have in zip((*expected.k, *expected.v), (*got.k, *got.v), strict=True):
        torch.testing.assert_close(have, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_of_latents_are_spliced_and_gathered_where_they_lie(dtype):
    caches = [torch.full((12, 4, 1, 48), 77.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    layout = LatentLayout(tuple(c[..., 24:] for c in caches), tuple(c[..., :24] for c in caches))
    held, rope = donor(2, 30, 1, 24, dtype, 3), rope_of("interleaved", 24, 16, 8)
    where = torch.randperm(48, generator=torch.Generator().manual_seed(5))[:28]
    splice_moves([stage_on_device(Move(held, 2, 28, where, -9), layout.device)], layout, rope)
    k, v = (torch.empty(2, 28, 1, 24, dtype=dtype, device=DEVICE) for _ in range(2))
    gather_rows(layout, where.to(DEVICE), k, v)
    tolerance = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(k, rope.relocate(held.k[:, 2:], -9), rtol=tolerance, atol=tolerance)
    assert torch.equal(v, held.v[:, 2:])
    whole = torch.cat((v, k), dim=-1)
    for layer, cache in enumerate(caches):
        assert torch.equal(layout.keys(layer, where.to(DEVICE)), whole[layer])
        assert torch.equal(cache.flatten(0, 2)[where], whole[layer, :, 0])
        assert int((cache == 77.0).all(-1).sum()) == 48 - 28


def test_splice_reads_donors_that_lie_strangely_in_memory():
    plain = donor(2, 30, 2, 8, torch.float32, 4)
    swapped = DonorTensors(plain.k.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3), plain.v)
    flat = torch.randn(2 * 30 * 2 * 8 + 1, device=DEVICE)
    odd = DonorTensors(flat[1:].view(2, 30, 2, 8), flat[1:].view(2, 30, 2, 8).clone())  # starts off every alignment
    for held in (swapped, odd):
        assert_same_splice([Move(held, 7, 20, torch.arange(20), -3)], "ours", 2, 24, 2, rope_of("half", 8, 8))


def test_a_splice_of_shift_zero_changes_no_bit():
    held = donor(1, 8, 2, 8, torch.bfloat16, 6)
    held.k[0, 0, 0, :] = -0.0
    got = pool("ours", 1, 8, 2, 8, torch.bfloat16)
    splice_moves([Move(held, 0, 8, torch.arange(8), 0)], got, rope_of("half", 8, 8))
    assert torch.equal(got.k[0].squeeze(1).view(torch.int16), held.k[0].view(torch.int16))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_set_of_moves_is_spliced_as_the_twin_does(data):
    heads, slots = data.draw(st.integers(1, 5)), 64
    rope = rope_of("half", 8, 8)
    order = data.draw(st.permutations(range(slots)))
    moves, used = [], 0
    for _ in range(data.draw(st.integers(1, 4))):
        held = donor(1, 40, heads, 8, torch.float32, data.draw(st.integers(0, 9)))
        start = data.draw(st.integers(0, 39))
        length = data.draw(st.integers(1, max(1, min(40 - start, 16))))
        shift = data.draw(st.integers(-200_000, 200_000))
        moves.append(Move(held, start, length, torch.tensor(order[used : used + length]), shift))
        used += length
    assert_same_splice(moves, "vllm side by side", 1, slots, heads, rope)


def attention_case(
    rows: list[int], total: int, heads: int, kv_heads: int, d: int, dtype: torch.dtype, block: int = 1, seed: int = 0
):
    made = torch.Generator().manual_seed(len(rows) + total + seed)
    slots = ((total + 8) // block + 1) * block
    k, v = (torch.randn(slots, kv_heads, d, generator=made).to(DEVICE, dtype) for _ in range(2))
    if block > 1:
        k, v = (x.view(-1, block, kv_heads, d) for x in (k, v))
    context = torch.randperm(slots, generator=made)[:total].to(DEVICE)
    q = torch.randn(len(rows), heads, d, generator=made).to(DEVICE, dtype)
    return q, torch.tensor(rows, device=DEVICE), context, k, v, d**-0.5


def assert_same_attention(case, parts: int | None = None) -> None:
    want, have = attend_plain(*case), scattered_attention(*case, parts=parts)
    assert have.shape == want.shape
    assert have.dtype == want.dtype
    tolerance = 2e-5 if want.dtype == torch.float32 else 4 * torch.finfo(want.dtype).eps
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "d"), [(1, 16), (3, 10), (4, 64)])
def test_gathering_equals_its_twin_in_every_layout(kind, heads, d):
    layout = pool(kind, 3, 32, heads, d, torch.float32)
    for number, page in enumerate((*layout.k, *layout.v)):
        page.copy_(torch.randn(page.shape, generator=torch.Generator().manual_seed(number)))
    slots = torch.tensor([31, 0, 5, 17, 6, 7, 8], device=DEVICE)
    expected, got = ([torch.zeros(3, len(slots), heads, d, device=DEVICE) for _ in range(2)] for _ in range(2))
    gather_plain(layout, slots, *expected)
    gather_rows(layout, slots, *got)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    gather_rows(layout, slots, got[0][:2], got[1][:2], layers=[2, 0])
    assert torch.equal(got[0][:2], expected[0][[2, 0]])
    assert torch.equal(got[1][:2], expected[1][[2, 0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (7, 1)])
def test_scattered_attention_equals_its_twin(dtype, heads, kv_heads):
    rows = [0, 1, 2, 17, 18, 40, 41, 42, 90, 119]
    assert_same_attention(attention_case(rows, 120, heads, kv_heads, 16, dtype))


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_a_context_cut_into_parts_gives_the_same_rows(parts):
    assert_same_attention(attention_case([0, 3, 64, 65, 200, 299], 300, 4, 2, 16, torch.float32), parts)


def attended_before(case, first: list[int]) -> Attended:
    """What each row has of the keys before its ``first``, in plain torch."""
    q, _, context, k, v, scale = case
    _, kv_heads, d = k.shape
    keys, values = k[context].float(), v[context].float()
    scores = torch.einsum("nhgd,thd->nhgt", q.float().view(len(q), kv_heads, -1, d), keys) * scale
    ahead = torch.arange(len(context), device=DEVICE)[None] >= torch.tensor(first, device=DEVICE)[:, None]
    scores = scores.masked_fill(ahead[:, None, None], float("-inf"))
    out = torch.einsum("nhgt,thd->nhgd", scores.softmax(-1), values).flatten(1, 2).to(q.dtype)
    return Attended(torch.tensor(first, device=DEVICE), out.flip(0), scores.logsumexp(-1).flatten(1, 2).flip(0).T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [[1] * 8, [1, 1, 4, 4, 4, 91, 91, 91], [1, 2, 4, 18, 41, 91, 92, 120]])
@pytest.mark.parametrize("part_tokens", [32, 512])
def test_rows_go_on_from_what_was_attended_before(dtype, first, part_tokens, monkeypatch):
    monkeypatch.setattr(attention_kernels, "NEAR_PART_TOKENS", part_tokens)  # in several parts, and in one
    case = attention_case([0, 3, 17, 40, 90, 91, 100, 119], 120, 6, 2, 16, dtype)
    want, have = attend_plain(*case), scattered_attention(*case, after=attended_before(case, first))
    tolerance = 2e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


def flash_attention_in_plain_torch(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, softmax_scale, causal, block_table,
    return_softmax_lse, fa_version,
):  # fmt: skip
    """What vLLM's FlashAttention computes without a mask, over pages; it asks for what the real one relies on."""
    assert (causal, return_softmax_lse, fa_version) == (False, True, 3)
    assert {t.dtype for t in (cu_seqlens_q, seqused_k, block_table)} == {torch.int32}
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert max_seqlen_k >= int(seqused_k.max())
    assert int(cu_seqlens_q[-1]) == len(q)
    outs, sums = [], []
    for number, reach in enumerate(seqused_k.tolist()):
        asked = q[cu_seqlens_q[number] : cu_seqlens_q[number + 1]].float()
        keys, values = (x[block_table[number].long()].flatten(0, 1)[:reach].float() for x in (k, v))
        scores = torch.einsum("nhgd,thd->nhgt", asked.view(len(asked), keys.shape[1], -1, q.shape[2]), keys)
        scores *= softmax_scale
        outs.append(torch.einsum("nhgt,thd->nhgd", scores.softmax(-1), values).flatten(1, 2).to(q.dtype))
        sums.append(scores.logsumexp(-1).flatten(1, 2).T)
    return torch.cat(outs), torch.cat(sums, 1)


@pytest.fixture
def fa_utils(monkeypatch):
    theirs = ModuleType("vllm.v1.attention.backends.fa_utils")
    theirs.flash_attn_varlen_func = flash_attention_in_plain_torch
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    return theirs


def layer_of(scale, window=None, sinks=None):
    """What vLLM's attention module says of itself."""
    impl = SimpleNamespace(scale=scale, vllm_flash_attn_version=3, sinks=sinks)
    return SimpleNamespace(sliding_window=window, impl=impl)


def half_precision_layer(**impl):
    impl = {"scale": 0.25, "vllm_flash_attn_version": 3, "sliding_window": (-1, -1)} | impl
    layer = SimpleNamespace(
        num_heads=4, num_kv_heads=2, head_size=16, sliding_window=None, impl=SimpleNamespace(**impl)
    )
    return layer, SimpleNamespace(block_tokens=4, device=torch.device(DEVICE), dtype=torch.float16)


def test_vllms_attention_is_used_where_it_gives_what_ours_does(fa_utils):
    assert pass_attention.can_group_rows(*half_precision_layer())
    assert not pass_attention.can_group_rows(*half_precision_layer(vllm_flash_attn_version=2))
    assert not pass_attention.can_group_rows(*half_precision_layer(sliding_window=(100, 0)))
    assert not pass_attention.can_group_rows(*half_precision_layer(sinks=torch.zeros(4)))


def test_where_vllms_attention_fails_or_is_another_ours_does_it_all(fa_utils):
    def wrong(**named):
        out, sums = flash_attention_in_plain_torch(**named)
        return out * 1.5, sums

    fa_utils.flash_attn_varlen_func = wrong
    assert not pass_attention.can_group_rows(*half_precision_layer())
    fa_utils.flash_attn_varlen_func = lambda q, k: None
    assert not pass_attention.can_group_rows(*half_precision_layer())


@pytest.mark.parametrize("chosen", [range(0, 200, 7), range(200), [*range(3), *range(90, 140), 199]])
@pytest.mark.parametrize("part_tokens", [32, 512])
def test_vllms_attention_for_far_keys_and_ours_for_near_ones_are_attention(chosen, part_tokens, fa_utils, monkeypatch):
    monkeypatch.setattr(attention_kernels, "NEAR_PART_TOKENS", part_tokens)
    monkeypatch.setattr(pass_attention, "GROUP_ROWS", 8)
    at, blocks = torch.tensor(list(chosen)), torch.randperm(60)[:50]
    q, _, _, k, v, scale = attention_case(at.tolist(), 232, 6, 2, 16, torch.float32, block=4)
    rows = Rows.of(at, at, (blocks[:, None] * 4 + torch.arange(4)).flatten().to(DEVICE))
    layers = [layer_of(scale)]
    want = attend_plain(q, rows.positions, rows.context, k, v, scale)
    torch.testing.assert_close(
        pass_attention.attend_in_groups(rows, KvLayout((k,), (v,)), layers)(0, q), want, rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize("chosen", [range(0, 200, 9)[-16:], [50] * 5 + [*range(50, 61)], range(176, 200)])
def test_a_recorded_pass_reads_its_groups_from_the_device(chosen, fa_utils, monkeypatch):
    monkeypatch.setattr(pass_attention, "GROUP_ROWS", 8)
    at, blocks = torch.tensor(list(chosen)), torch.randperm(60)[:50]
    q, positions, _, k, v, scale = attention_case(at.tolist(), 232, 6, 2, 16, torch.float32, block=4)
    context = (blocks[:, None] * 4 + torch.arange(4)).flatten().to(DEVICE)
    rows = Rows(at.to(DEVICE), positions, context[positions], context)
    layers = [layer_of(scale)]
    want = attend_plain(q, positions, context, k, v, scale)
    have = pass_attention.attend_in_recorded_groups(rows, KvLayout((k,), (v,)), layers)(0, q)
    torch.testing.assert_close(have, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 7, 64, 500])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("parts", [1, 5])
def test_windows_and_sinks_are_attended_as_the_twin_does(dtype, window, sinks, parts, monkeypatch):
    monkeypatch.setattr(attention_kernels, "NEAR_PART_TOKENS", 32)
    monkeypatch.setattr(attention_kernels, "NEAR_PARTS", parts)
    rows = [0, 3, 4, 5, 40, 77, 78, 150, 199]
    q, positions, context, k, v, scale = attention_case(rows, 200, 6, 2, 16, dtype)
    sink = torch.linspace(-2, 3, 6, device=DEVICE).to(dtype) if sinks else None
    attend = pass_attention.attend_scattered(
        positions, context, KvLayout.of_rows((k,), (v,)), [layer_of(scale, window, sink)]
    )
    want = attend_plain(q, positions, context, k, v, scale, window=window, sinks=sink)
    tolerance = 2e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(attend(0, q), want, rtol=tolerance, atol=tolerance)


def test_in_groups_a_layer_with_a_window_is_left_to_our_kernel(fa_utils, monkeypatch):
    monkeypatch.setattr(pass_attention, "GROUP_ROWS", 8)
    at, blocks = torch.arange(0, 200, 7), torch.randperm(60)[:50]
    q, _, _, k, v, scale = attention_case(at.tolist(), 232, 6, 2, 16, torch.float32, block=4)
    rows = Rows.of(at, at, (blocks[:, None] * 4 + torch.arange(4)).flatten().to(DEVICE))
    layers = [layer_of(scale), layer_of(scale, window=30), layer_of(scale, sinks=torch.ones(6, device=DEVICE))]
    attend = pass_attention.attend_in_groups(rows, KvLayout((k,) * 3, (v,) * 3), layers)
    for number, layer in enumerate(layers):
        named = {"window": layer.sliding_window, "sinks": layer.impl.sinks}
        want = attend_plain(q, rows.positions, rows.context, k, v, scale, **named)
        torch.testing.assert_close(attend(number, q), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "total"), [(1, 2, 2, 1), (5, 6, 2, 70), (30, 7, 1, 200)])
def test_the_mass_of_a_question_in_all_layers_equals_its_twin(
    dtype, rows, heads, kv_heads, total, layers, block, monkeypatch
):
    monkeypatch.setattr(attention_kernels, "parts_of", lambda *_: 3)
    cases = [attention_case([0] * rows, total, heads, kv_heads, 16, dtype, block, seed=seed) for seed in range(layers)]
    context = cases[0][2]
    q = torch.stack([case[0] for case in cases])
    pools = [attention_kernels.as_blocks(case[3]) for case in cases]  # anywhere in memory
    have = attention_kernels.measure_question_mass(q, context, KvLayout(tuple(pools), tuple(pools)))
    want = torch.zeros(total, device=DEVICE)
    for queries, k in zip(q, pools, strict=True):
        add_attention(want, queries.float(), k.reshape(-1, kv_heads, 16)[context].float())
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
    assert abs(float(have.sum()) - layers) < 1e-2


@pytest.mark.parametrize("d", [8, 24, 80, 160])
def test_scattered_attention_handles_head_sizes_that_are_no_powers_of_two(d):
    assert_same_attention(attention_case([5, 33, 34], 40, 2, 1, d, torch.float32))


def test_scattered_attention_reads_pools_in_blocks_and_queries_with_strides():
    q, *rest = attention_case([0, 9, 31], 32, 4, 2, 16, torch.float32, block=4)
    assert_same_attention((q, *rest))
    assert_same_attention((q.transpose(0, 1).contiguous().transpose(0, 1), *rest))
    assert_same_attention((q.transpose(1, 2).contiguous().transpose(1, 2), *rest))


def test_a_row_never_sees_a_later_position():
    q, positions, context, k, v, scale = attention_case([4, 20], 32, 2, 1, 16, torch.float32)
    before = scattered_attention(q, positions, context, k, v, scale)
    k[context[21:]], v[context[21:]] = 1e4, float("nan")
    assert torch.equal(scattered_attention(q, positions, context, k, v, scale), before)
    v[context[20]] += 1.0
    after = scattered_attention(q, positions, context, k, v, scale)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


@pytest.mark.parametrize("parts", [1, 2])
def test_a_single_row_is_attended(parts):
    assert_same_attention(attention_case([70], 80, 2, 2, 16, torch.float32), parts)
    assert_same_attention(attention_case([0], 1, 1, 1, 16, torch.float32), parts)


def test_no_rows_give_no_rows():
    q, _, context, k, v, scale = attention_case([1], 4, 2, 1, 16, torch.float32)
    assert scattered_attention(q[:0], torch.empty(0, dtype=torch.int64, device=DEVICE), context, k, v, scale).shape == (
        0,
        2,
        16,
    )


@settings(max_examples=15, deadline=None)
@given(st.sets(st.integers(0, 79), min_size=1, max_size=40), st.sampled_from([1, 2, 3]), st.sampled_from([None, 2]))
def test_any_choice_of_rows_is_attended_as_the_twin_does(rows, group, parts):
    assert_same_attention(attention_case(sorted(rows), 80, 2 * group, 2, 16, torch.float32), parts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(2, 3, 8)}, "heads are a multiple"),
        ({"q": torch.zeros(2, 4, 9)}, "over keys"),
        ({"q": torch.zeros(2, 4, 8).half()}, "float16"),
        ({"q": torch.zeros(2, 4)}, "queries"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, "2 rows, positions"),
        ({"positions": torch.zeros(2)}, "2 rows, positions"),
        ({"v": torch.zeros(5, 2, 8)}, "values"),
    ],
)
def test_attention_over_shapes_that_do_not_fit_is_refused(change, words):
    case = {
        "q": torch.zeros(2, 4, 8),
        "positions": torch.arange(2),
        "context": torch.arange(6),
        "k": torch.zeros(6, 2, 8),
        "v": torch.zeros(6, 2, 8),
    }
    with pytest.raises(InputError, match=words):
        scattered_attention(**(case | change), scale=1.0)
