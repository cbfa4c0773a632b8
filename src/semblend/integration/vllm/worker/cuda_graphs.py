"""Short passes as CUDA graphs: a gap of sixty tokens is four milliseconds of work and twenty of launching it.

One graph for each of a few sizes, recorded once over the stock model with our attention, which reads where every row
stands from the device. A pass copies its rows to the end of the graph's own inputs and replays; the rows before them
have no slot, so nothing of them is written. The queries of the last rows are kept, layer by layer: an observer of the
question's attention looks at them when the pass is over.

Few rows are recorded with our kernel, which reads the context again for every few of them; more rows with
FlashAttention for whole groups (`pass_attention`), where that runs. A repair in pieces is a few of the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from semblend.integration.vllm.worker.pass_attention import GROUP_ROWS
from semblend.materialize.contract import QUESTION_ROWS, Rows
from semblend.materialize.kv.layout import Record, record_launches

Run = Callable[[Rows, Tensor], Tensor]
"""Computes rows into hidden states; copies the last rows' queries of every layer into the second argument."""

SIZES = {"kernel": (64, 128, 256, 384, 448), "groups": tuple(GROUP_ROWS * count for count in range(4, 11))}
"""Rows, by how they attend: with fewer than four groups FlashAttention leaves much of a GPU idle (448 rows among 24,576
tokens: 23.6 ms with our kernel and 27.1 in groups; 512: 24.4 and 24.8; H200, the shape of Qwen2.5-7B). With more rows
than these the work hides its launches."""


@dataclass(frozen=True, slots=True)
class _Graph:
    recorded: torch.cuda.CUDAGraph
    hidden: Tensor


class RecordedPasses:
    """Recorded when it is made; ``run`` computes rows of a prompt of at most ``longest`` tokens, unwatched."""

    def __init__(self, runs: Mapping[str, Run], longest: int, queries: tuple[int, int, int], like: Tensor) -> None:
        """``runs``: by how they attend. ``queries``: layers, heads and head size of the model; ``like``: its type."""
        layers, heads, head_dim = queries
        most = max(SIZES[how][-1] for how in runs)
        self.queries = like.new_zeros((layers, QUESTION_ROWS, heads, head_dim))
        self._tokens = torch.zeros(most, dtype=torch.int32, device=like.device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=like.device)
        self._slots = torch.full((most,), -1, dtype=torch.int64, device=like.device)
        self._context = torch.zeros(longest, dtype=torch.int64, device=like.device)
        self._grouped, self._memory = "groups" in runs, torch.cuda.graph_pool_handle()
        sizes = sorted(((size, how) for how in runs for size in SIZES[how]), reverse=True)  # the first takes most
        self._graphs = {(size, how): self._record(runs[how], size) for size, how in sizes}

    def run(self, rows: Rows) -> Tensor | None:
        """Hidden states, which the next run overwrites; None where the rows are too many."""
        count = len(rows)
        size, how = choose_graph(count, self._grouped)
        if not size or len(rows.context) > len(self._context):
            return None
        graph = self._graphs[size, how]
        # A row before the real ones costs nothing where it sees one key only; in a group it must see what all see.
        self._positions[-size:-count].copy_(rows.positions[0] * (how == "groups"))
        self._slots[-size:-count].fill_(-1)
        for mine, theirs in ((self._tokens, rows.tokens), (self._positions, rows.positions), (self._slots, rows.slots)):
            mine[-count:].copy_(theirs)
        self._context[: len(rows.context)].copy_(rows.context)
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


LOOK_SIZES = (128, 256, 512, 1024, 2048)
"""Rows of a recorded look: one in 16 tokens of a donor, so the last serves 32,000 tokens. More take milliseconds."""


class RecordedLooks:
    """A look at layer 0 of scattered rows (the canary) as graphs, recorded when it is made: 3.3 ms of launches as one.

    ``look`` gives a number a row, by its token, its position and what lies in its slot. Rows behind the real ones stay
    from an earlier look, or are of slot 0, which is nobody's; what is found there is left out. ``record`` makes a
    function that does again what it was given. Raises RuntimeError where that is not what ``look`` finds.
    """

    def __init__(self, look: Callable[[Rows], Tensor], device: torch.device, record: Record | None = None) -> None:
        if record is None:
            record = partial(record_launches, pool=torch.cuda.graph_pool_handle())
        self._rows = torch.zeros((3, LOOK_SIZES[-1]), dtype=torch.int64, device=device)
        nowhere = self._rows[0, :1]  # rows of a look attend to nothing

        def make(size: int) -> Callable[[], Tensor]:
            tokens, positions, slots = self._rows[:, :size]
            rows = Rows(tokens, positions, slots, nowhere)
            return record(lambda: look(rows))

        self._looks = {size: make(size) for size in reversed(LOOK_SIZES)}  # the first takes most memory
        for size in LOOK_SIZES:
            self._check(look, size)

    def _check(self, look: Callable[[Rows], Tensor], size: int) -> None:
        """Raise RuntimeError where a recording finds something else than the look itself; KV must be in slot 0."""
        numbers = torch.arange(size, device=self._rows.device) % 64
        rows = Rows(numbers, numbers, torch.zeros_like(numbers), self._rows[0, :1])
        found = self.run(rows)
        if found is None or not torch.allclose(found, look(rows), rtol=1e-3, atol=1e-4, equal_nan=True):
            raise RuntimeError(f"recorded for {size} rows, it finds something else")

    def run(self, rows: Rows) -> Tensor | None:
        """What was found for each of the rows; None where they are too many."""
        count = len(rows)
        size = next((size for size in LOOK_SIZES if count <= size), 0)
        if not size:
            return None
        for mine, theirs in zip(self._rows, (rows.tokens, rows.positions, rows.slots), strict=True):
            mine[:count].copy_(theirs)
        return self._looks[size]()[:count]


def choose_graph(rows: int, grouped: bool) -> tuple[int, str]:
    """Size and kind of the graph for so many rows; a size of 0 where there is none.

    >>> choose_graph(60, grouped=True), choose_graph(450, grouped=True), choose_graph(450, grouped=False)
    ((64, 'kernel'), (512, 'groups'), (0, 'kernel'))
    """
    how = "groups" if grouped and rows > SIZES["kernel"][-1] else "kernel"
    return next((size for size in SIZES[how] if rows <= size), 0), how
