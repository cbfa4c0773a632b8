"""Short passes as CUDA graphs: a gap of sixty tokens is four milliseconds of work and twenty of launching it.

One graph for each of a few sizes, recorded once over the stock model with our attention kernel, which reads where every
row stands from the device. A pass copies its rows to the end of the graph's own inputs and replays; the rows before
them have no slot, so nothing of them is written, and look at the first key only. The queries of the last rows are kept,
layer by layer: an observer of the question's attention looks at them when the pass is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from semblend.materialize.contract import QUESTION_ROWS, Rows

Run = Callable[[Rows, Tensor], Tensor]
"""Computes rows into hidden states; copies the last rows' queries of every layer into the second argument."""

SIZES = (64, 128, 256, 384, 512)
"""Rows. With more of them the work hides its launches; a tenth of 4,096 tokens, a first repair, is one of these."""

MOST_KEYS = 6 << 20
"""Rows times tokens of the context. Our kernel reads the context again for every few rows: 2,500 rows among 24,576
tokens took 171 ms in recorded passes of at most 512, and 82 in one pass (H200, the shape of Qwen2.5-7B)."""


@dataclass(frozen=True, slots=True)
class _Graph:
    recorded: torch.cuda.CUDAGraph
    hidden: Tensor


class RecordedPasses:
    """Recorded when it is made; ``run`` computes rows of a prompt of at most ``longest`` tokens, unwatched."""

    def __init__(self, run: Run, longest: int, queries: tuple[int, int, int], like: Tensor) -> None:
        """``queries``: layers, heads and head size of the model; ``like``: a tensor of its type on its device."""
        layers, heads, head_dim = queries
        self.queries = like.new_zeros((layers, QUESTION_ROWS, heads, head_dim))
        self._tokens = torch.zeros(SIZES[-1], dtype=torch.int32, device=like.device)
        self._positions = torch.zeros(SIZES[-1], dtype=torch.int64, device=like.device)
        self._slots = torch.full((SIZES[-1],), -1, dtype=torch.int64, device=like.device)
        self._context = torch.zeros(longest, dtype=torch.int64, device=like.device)
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs = {size: self._record(run, size) for size in reversed(SIZES)}

    def run(self, rows: Rows) -> Tensor | None:
        """Hidden states, which the next run overwrites; None where the rows are too many, or see too much."""
        count = len(rows)
        size = next((size for size in SIZES if count <= size), None)
        if size is None or len(rows.context) > len(self._context) or count * rows.reach > MOST_KEYS:
            return None
        self._positions[-size:-count].zero_()
        self._slots[-size:-count].fill_(-1)
        for mine, theirs in ((self._tokens, rows.tokens), (self._positions, rows.positions), (self._slots, rows.slots)):
            mine[-count:].copy_(theirs)
        self._context[: len(rows.context)].copy_(rows.context)
        graph = self._graphs[size]
        graph.recorded.replay()
        return graph.hidden[-count:]

    def _record(self, run: Run, size: int) -> _Graph:
        rows = Rows(self._tokens[-size:], self._positions[-size:], self._slots[-size:], self._context)
        run(rows, self.queries)  # compiles what has to be compiled; with no slots, nothing is written
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        # Other threads of the engine may use the GPU meanwhile: their calls are none of the recording's business.
        with torch.cuda.graph(recorded, pool=self._memory, capture_error_mode="thread_local"):
            hidden = run(rows, self.queries)
        return _Graph(recorded, hidden)
