"""Attention of chosen rows by torch's own kernels: the same as the plain twin, however the rows lie."""

from __future__ import annotations

import pytest
import torch
from plain_attention import attend_plain

from semblend.materialize.attention_runs import SHORT_RUN, TILE_ROWS, attend_runs
from semblend.materialize.contract import Rows

POSITIONS = {
    "one row": [40],
    "from the first on": list(range(60)),
    "one long stretch": list(range(20, 60)),
    "two long stretches": [*range(5, 5 + SHORT_RUN), *range(30, 30 + SHORT_RUN)],
    "every third": list(range(0, 60, 3)),
    "more than a tile": list(range(4, 4 + TILE_ROWS + 9)),
    "more than a tile, apart": list(range(0, 2 * TILE_ROWS + 40, 2)),
}


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_rows_attend_to_what_lies_before_them_and_nothing_behind(positions, heads, kv_heads):
    torch.manual_seed(0)
    length = max(positions) + 5
    context = torch.randperm(length)
    k, v = torch.randn(2, length, kv_heads, 8)
    rows = Rows.of([0] * len(positions), positions, context)
    q = torch.randn(len(positions), heads, 8)
    reach = context[: rows.reach]
    found = attend_runs(q, rows, k[reach], v[reach], 0.3)
    torch.testing.assert_close(found, attend_plain(q, rows.positions, context, k, v, 0.3), rtol=1e-4, atol=1e-5)
