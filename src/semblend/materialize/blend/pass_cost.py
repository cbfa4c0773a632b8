"""What a pass costs beside its rows: launching kernels, reading all weights, products too small for the machine.

Measured once, when an engine starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from semblend.materialize.contract import Model, Rows

FEW_ROWS = 32
"""A repair has about as many at least. One row alone takes other kernels: on ARM it said 5 where passes cost 48."""
MANY_ROWS = {"cpu": 128, "cuda": 4096}
"""Rows of the long pass: enough for the device to be busy with rows."""
MOST_PASS_ROWS = {"cpu": 64, "cuda": 2048}
"""What is measured above this is taken for a busy moment: it must not keep long prompts from being reused."""
_REPEATS = 2


def measure_pass_rows(model: Model, slots: Tensor, *, clock: Callable[[], float] = time.perf_counter) -> int:
    """Measure what a pass costs however few its rows are, in rows: where the line through two passes begins.

    ``slots`` belong to nobody and are written to. The best of two counts, so that a busy moment does not.
    """
    many = min(MANY_ROWS.get(model.device.type, MANY_ROWS["cpu"]), len(slots))
    if many <= FEW_ROWS:
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

    few = time_pass(FEW_ROWS)
    each = (time_pass(many) - few) / (many - FEW_ROWS)
    most = MOST_PASS_ROWS.get(model.device.type, MOST_PASS_ROWS["cpu"])
    return max(0, min(most, round(few / each) - FEW_ROWS)) if each > 0 else most
