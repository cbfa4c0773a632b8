"""Every way to attend gives what its plain twin gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from plain_attention import attend_plain as attend_rows  # noqa: E402

from semblend.engine.model import attention  # noqa: E402
from semblend.engine.model.attention import (  # noqa: E402
    RowBatch,
    attend,
)
from semblend.engine.model.paged_kv import KvPool  # noqa: E402
from semblend.errors import InputError  # noqa: E402
from semblend.materialize.contract import Rows  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = {  # positions computed, how much context there is beyond the last of them
    "whole prompt": (range(70), 0),
    "later chunk": (range(33, 70), 0),
    "later chunk with room behind it": (range(33, 70), 9),
    "one token": ([41], 0),
    "first token": ([0], 5),
    "scattered": ([0, 1, 5, 6, 7, 20, 44, 69], 0),
    "every other": (range(0, 70, 2), 3),
}


def attend_plain(q: Any, layer: int, rows: RowBatch, pool: KvPool) -> Any:
    """All segments, each by the plain twin of attention."""
    found = [
        attend_rows(q[at], rows.positions[at], segment.context, pool.k[layer], pool.v[layer], q.shape[2] ** -0.5)
        for segment in rows.segments
        for at in [slice(segment.start, segment.end)]
    ]
    return torch.cat(found).view(len(q), -1)


def world(
    heads: int = 6, kv_heads: int = 2, dim: int = 16, device: str = "cpu", dtype: Any = None, seed: int = 0
) -> KvPool:
    torch.manual_seed(seed)
    pool = KvPool(layers=2, kv_heads=kv_heads, head_dim=dim, blocks=40, device=device, dtype=dtype or torch.float32)
    pool.k.normal_()
    pool.v.normal_()
    return pool


def rows_at(pool: KvPool, positions: Any, more: int = 0, scrambled: bool = True) -> RowBatch:
    length = max(positions) + 1 + more
    blocks = pool.allocate(pool.blocks_for(length))
    context = pool.slots_of(blocks[::-1] if scrambled else blocks, 0, length)
    return RowBatch.of(Rows.of(torch.zeros(len(positions), dtype=torch.long), list(positions), context))


def join(batches: list[RowBatch]) -> RowBatch:
    return RowBatch.of([part for batch in batches for part in batch.parts])


def assert_like_twin(pool: KvPool, rows: RowBatch, heads: int = 6) -> None:
    rows.check()
    q = torch.randn(len(rows), heads, pool.k.shape[3], device=pool.device, dtype=pool.dtype)
    for layer in (0, 1):
        got, want = attend(q, layer, rows, pool), attend_plain(q, layer, rows, pool)
        assert got.shape == (len(rows), heads * pool.k.shape[3])
        assert (got.float() - want.float()).abs().max() <= TOLERANCE[pool.dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("scrambled", [False, True], ids=["in one run", "scrambled blocks"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_segment_of_any_shape_is_like_its_twin(shape: str, scrambled: bool, dtype: Any, device: str) -> None:
    pool = world(device=device, dtype=dtype)
    positions, more = SHAPES[shape]
    assert_like_twin(pool, rows_at(pool, positions, more, scrambled))


@pytest.mark.parametrize("device", DEVICES)
def test_segments_of_all_shapes_in_one_pass_are_like_their_twin(device: str) -> None:
    pool = world(device=device)
    assert_like_twin(pool, join([rows_at(pool, list(positions), more) for positions, more in SHAPES.values()]))


@pytest.mark.parametrize("heads", [2, 4, 8])
def test_groups_of_any_size_are_like_their_twin(heads: int) -> None:
    pool = world()
    assert_like_twin(pool, rows_at(pool, [0, 3, 9, 50]), heads)
    assert_like_twin(pool, rows_at(pool, range(20)), heads)
    assert_like_twin(pool, rows_at(pool, [30]), heads)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("elements", [1, 100, 700])
def test_small_tiles_and_small_decode_batches_change_nothing(
    elements: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DECODE_ROWS", "TILE_SCORES"):
        monkeypatch.setattr(attention, name, elements)
    for dtype in TOLERANCE:
        pool = world(device=device, dtype=dtype)
        assert_like_twin(pool, rows_at(pool, [0, 1, 5, 30, 31, 32, 33, 60]))
        assert_like_twin(pool, rows_at(pool, range(30, 50)))
        assert_like_twin(pool, join([rows_at(pool, [at]) for at in (3, 40, 17, 25)]))


def test_more_rows_than_a_tile_takes_are_like_their_twin() -> None:
    pool = world()
    assert_like_twin(pool, rows_at(pool, range(1, 230)))
    assert_like_twin(pool, rows_at(pool, [0, *range(90, 300, 2), *range(300, 340)], more=5))


@given(
    positions=st.sets(st.integers(0, 4000), min_size=1, max_size=300).map(sorted),
    heads=st.integers(1, 40),
    scores=st.sampled_from([1, 5000, 1 << 21]),
)
def test_tiles_hold_every_row_once_and_hide_exactly_what_it_must_not_see(
    positions: list[int], heads: int, scores: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "TILE_SCORES", scores)
        tiles = list(attention._cut(positions, torch.tensor(positions), heads))
    assert [at for tile in tiles for at in range(tile.start, tile.end)] == list(range(len(positions)))
    for tile in tiles:
        held = positions[tile.start : tile.end]
        assert (tile.seen, tile.reach) == (held[0] + 1, held[-1] + 1)
        assert len(held) == 1 or len(held) * heads * tile.reach <= scores
        assert len(held) <= attention.MAX_TILE_ROWS
        hidden = [0] * len(held) if tile.mask is None else (tile.mask == -torch.inf).sum(1).tolist()
        assert [tile.reach - count - 1 for count in hidden] == held
        if tile.mask is not None:
            assert bool(((tile.mask == 0) | (tile.mask == -torch.inf)).all())
            assert bool((tile.mask[:, 1:] <= tile.mask[:, :-1]).all())  # what is hidden lies at the end


@pytest.mark.parametrize("scores", [300, 1 << 21])
def test_weights_that_are_shown_are_those_of_a_plain_softmax(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE_SCORES", scores)
    pool = world()
    rows = rows_at(pool, [0, 1, 5, 6, 7, 20, 44, 67, 68, 69], more=3)
    q = torch.randn(len(rows), 6, 16)
    shown = torch.zeros(6, len(rows), 73)

    def look(weights: Any, start: int) -> None:
        shown[:, start : start + weights.shape[1], : weights.shape[2]] += weights

    assert attention.shows_weights(q, rows)
    out = attend(q, 1, rows, pool, look)
    keys = pool.k[1, rows.segments[0].context].repeat_interleave(3, dim=1)
    plain = torch.einsum("nhd,thd->hnt", q, keys) / 4.0
    plain = plain.masked_fill(torch.arange(73) > rows.positions[:, None], -torch.inf).softmax(-1)
    assert (shown - plain).abs().max() <= 2e-6
    assert torch.equal(out, attend(q, 1, rows, pool))


def test_no_weights_are_promised_where_none_are_computed() -> None:
    pool = world()
    whole, one, some = (rows_at(pool, at) for at in (range(20), [30], [3, 9]))
    two = join([some, rows_at(pool, [4, 6])])
    for rows in (whole, one, two):
        assert not attention.shows_weights(torch.zeros(len(rows), 6, 16), rows)
    assert not attention.shows_weights(torch.zeros(2, 6, 16, dtype=torch.bfloat16), some)
    assert attention.shows_weights(torch.zeros(2, 6, 16), some)


@settings(max_examples=60)
@given(st.lists(st.sets(st.integers(0, 63), min_size=1, max_size=64).map(sorted), min_size=1, max_size=5))
def test_any_rows_are_like_their_twin(sequences: list[list[int]]) -> None:
    pool = world()
    assert_like_twin(pool, join([rows_at(pool, positions) for positions in sequences]))


def test_padded_decode_batches_are_like_their_twin() -> None:
    """The way of a GPU, run on the CPU."""
    pool = world()
    rows = join([rows_at(pool, [at], more) for at, more in ((3, 0), (60, 4), (0, 0), (17, 1))])
    q = torch.randn(len(rows), 6, 16)
    out = torch.empty_like(q)
    attention._decode_batches(q, out, 1, rows, [0, 1, 2, 3], pool)
    assert (out.view(4, -1) - attend_plain(q, 1, rows, pool)).abs().max() <= 2e-5


def test_the_lower_right_way_is_like_its_twin() -> None:
    """The way of a GPU for a later chunk, run on the CPU."""
    pool = world()
    rows = rows_at(pool, range(33, 70))
    q = torch.randn(len(rows), 6, 16)
    slots = rows.segments[0].context
    got = attention._lower_right(q, pool.k[0, slots], pool.v[0, slots])
    assert (got.reshape(len(rows), -1) - attend_plain(q, 0, rows, pool)).abs().max() <= 2e-5


def test_rows_that_break_their_rules_are_named() -> None:
    pool = world()
    (good,) = rows_at(pool, [1, 4, 6]).parts
    RowBatch.of(good).check()
    with pytest.raises(InputError, match="ascend"):
        RowBatch.of(Rows.of([1, 1], [4, 2], good.context)).check()
    with pytest.raises(InputError, match="not its position's"):
        RowBatch.of(replace(good, slots=good.slots + 1)).check()
    with pytest.raises(InputError, match="length"):
        RowBatch.of(replace(good, tokens=good.tokens[:2])).check()
    with pytest.raises(InputError, match="beyond"):
        RowBatch.of(replace(good, context=good.context[:4])).check()
