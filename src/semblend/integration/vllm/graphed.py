"""Short passes as CUDA graphs: a gap of sixty tokens is four milliseconds of work and twenty of launching it.

One graph for each of a few sizes, recorded once over the stock model with our attention kernel, which reads where every
row stands from the device. A pass copies its rows into the graph's own inputs, pads them to the size (padded rows have
no slot, so nothing of them is written, and look at the first key only), and replays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from semblend.integration.adapter import EngineRows

Run = Callable[[EngineRows], Tensor]
SIZES = (64, 128, 256)
"""Rows. With more of them the work hides its launches."""


@dataclass(frozen=True, slots=True)
class _Graph:
    recorded: torch.cuda.CUDAGraph
    hidden: Tensor


class GraphedPasses:
    """Recorded when it is made; ``run`` computes rows of a prompt of at most ``longest`` tokens, unwatched."""

    def __init__(self, run: Run, longest: int, device: torch.device) -> None:
        self._tokens = torch.zeros(SIZES[-1], dtype=torch.int32, device=device)
        self._positions = torch.zeros(SIZES[-1], dtype=torch.int64, device=device)
        self._slots = torch.full((SIZES[-1],), -1, dtype=torch.int64, device=device)
        self._context = torch.zeros(longest, dtype=torch.int64, device=device)
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs = {size: self._recorded(run, size) for size in reversed(SIZES)}

    def run(self, rows: EngineRows) -> Tensor | None:
        """Hidden states, which the next run overwrites; None where the rows are too many."""
        count = len(rows)
        size = next((size for size in SIZES if count <= size), None)
        if size is None or len(rows.context) > len(self._context):
            return None
        self._tokens[:count].copy_(rows.tokens)
        self._positions[:count].copy_(rows.positions)
        self._positions[count:size].zero_()
        self._slots[:count].copy_(rows.slots)
        self._slots[count:size].fill_(-1)
        self._context[: len(rows.context)].copy_(rows.context)
        graph = self._graphs[size]
        graph.recorded.replay()
        return graph.hidden[:count]

    def _recorded(self, run: Run, size: int) -> _Graph:
        rows = EngineRows(self._tokens[:size], self._positions[:size], self._slots[:size], self._context)
        run(rows)  # compiles what has to be compiled; with no slots, nothing is written
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        # Other threads of the engine may use the GPU meanwhile: their calls are none of the recording's business.
        with torch.cuda.graph(recorded, pool=self._memory, capture_error_mode="thread_local"):
            hidden = run(rows)
        return _Graph(recorded, hidden)
