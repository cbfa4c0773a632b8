"""What a pass costs beside its rows: launching kernels, or reading all weights once. Measured when an engine starts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from semblend.materialize.contract import Model, Rows

MANY_ROWS = {"cpu": 64, "cuda": 4096}
"""Rows of the long pass: enough for the device to be busy with rows."""
MOST_PASS_ROWS = 4096
_REPEATS = 3


def measure_pass_rows(model: Model, slots: Tensor, *, clock: Callable[[], float] = time.perf_counter) -> int:
    """Measure the time of a pass with one row, in rows of a long pass: 29 for SmolLM2-135M on two cores.

    ``slots`` belong to nobody and are written to. The best of three counts, so that a busy moment does not.
    """
    many = min(MANY_ROWS.get(model.device.type, 64), len(slots))
    if many < 2:
        return 0

    def time_pass(rows: int) -> float:
        at = torch.arange(rows)
        best = float("inf")
        for _ in range(_REPEATS):
            started = clock()
            model.logits(model.forward(Rows.of(torch.zeros_like(at), at, slots))[-1:])
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, clock() - started)
        return best

    one = time_pass(1)
    each = (time_pass(many) - one) / (many - 1)
    return min(MOST_PASS_ROWS, round(one / each)) if each > 0 else MOST_PASS_ROWS
