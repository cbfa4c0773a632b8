"""What an engine must offer so that KV can be reused in it: a layout, a model that runs rows, and observers' calls.

    Layout     where the key and value of a slot lie in the engine's cache; `KvLayout` is one
    Rows       some positions of one prompt, and the slots their KV is written to: what one pass computes
    Model      the engine's own model over its own cache; it runs rows and may be watched by an observer
    Observer   looks on while a pass runs: what is about to be written, what each layer asks for

An adapter for an engine is a `Model` and the hooks that call `semblend.materialize.blend.blender.Blender`. The suite in
``tests/contract`` says what each part must do; ``tests/naive_engine.py`` is the shortest engine that passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from semblend.errors import InputError
from semblend.materialize.kv.layout import KvLayout, Layout, copy_to_device
from semblend.materialize.kv.rope import RopeSpec

__all__ = [
    "Capabilities",
    "KvLayout",
    "Layout",
    "Model",
    "Observer",
    "Rows",
    "StopPass",
    "find_runs",
    "slots_of_blocks",
]

QUESTION_ROWS = 64
"""Observers look at no more than this many rows at the end of a pass; an engine keeps the queries of so many."""


def find_runs(positions: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Ascending positions as half-open runs without a hole.

    >>> find_runs(np.array([2, 3, 7]))
    ((2, 4), (7, 8))
    """
    if not len(positions):
        return ()
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    starts, ends = np.append(0, cuts), np.append(cuts, len(positions))
    return tuple(zip(positions[starts].tolist(), (positions[ends - 1] + 1).tolist(), strict=True))


def slots_of_blocks(
    block_ids: Sequence[int], block_tokens: int, tokens: int, device: torch.device | str = "cpu"
) -> Tensor:
    """The slots of positions 0 … ``tokens`` of a prompt that lies in these blocks.

    >>> slots_of_blocks([5, 2], block_tokens=4, tokens=6).tolist()
    [20, 21, 22, 23, 8, 9]
    """
    blocks = copy_to_device(torch.from_numpy(np.array(block_ids, dtype=np.int64)), torch.device(device))
    slots = blocks[:, None] * block_tokens + torch.arange(block_tokens, device=device)
    return slots.flatten()[:tokens]


@dataclass(frozen=True)
class Rows:
    """Positions of one prompt, ascending, with their tokens and the slots their KV is written to.

    Position ``p`` of the prompt lies in slot ``context[p]``. A row attends to every position up to its own. Rows may be
    scattered over the prompt, so this one meaning covers prefill, chunked prefill, decode and selective recompute.
    Tensors lie on the device of ``context``.

    >>> Rows.of([7, 9, 9], [0, 2, 3], torch.arange(8)).runs
    ((0, 1), (2, 4))
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    context: Tensor

    @classmethod
    def of(cls, tokens: Sequence[int] | Tensor, positions: Sequence[int] | Tensor, context: Tensor) -> Rows:
        """Rows that are written to the slots which the context names for their positions.

        >>> Rows.of([7, 9], [0, 3], torch.tensor([16, 17, 18, 19])).slots.tolist()
        [16, 19]
        """
        tokens = copy_to_device(torch.as_tensor(tokens, dtype=torch.long), context.device)
        on_host = torch.as_tensor(positions, dtype=torch.long)
        there = copy_to_device(on_host, context.device)
        rows = cls(tokens, there, context[there], context)
        if on_host.device.type == "cpu":
            rows.__dict__["host_positions"] = on_host  # known already: no wait for a GPU to say it
        return rows

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def host_positions(self) -> Tensor:
        """Positions in host memory; on a GPU this waits for the device once per pass, not once per layer."""
        return self.positions.cpu()

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Positions without a hole between them, half-open: each run is a stretch of ordinary chunked prefill."""
        return find_runs(self.host_positions.numpy())

    @cached_property
    def reach(self) -> int:
        """How many positions the last row attends to."""
        return int(self.host_positions[-1]) + 1

    def check(self) -> None:
        """Raise `InputError` where the rows contradict their own rules; for tests and for debugging."""
        positions = self.positions
        if not len(positions) == len(self.slots) == len(self.tokens) > 0:
            raise InputError("tokens, positions and slots differ in length", hint="one of each per row")
        if bool((positions[1:] <= positions[:-1]).any()) or int(positions[0]) < 0:
            raise InputError("positions of a prompt must ascend", hint="sort the rows by position")
        if int(positions[-1]) >= len(self.context):
            raise InputError("a row lies beyond its context", hint="context needs a slot for every position")
        if not torch.equal(self.context[positions], self.slots):
            raise InputError("a row is written to a slot that is not its position's", hint="use Rows.of")


class StopPass(Exception):  # noqa: N818  (it ends a pass early; nothing went wrong)
    """Raised in a pass whose layers above need not be computed: an observer has seen enough, or others wait."""


class Observer:
    """Looks on while a model runs rows; ``q``, ``k``, ``v`` are ``[rows, heads, head_dim]``, already rotated.

    The class variables tell the model what this observer needs, so that nobody has to look for methods.
    """

    stops_early: ClassVar[bool] = False
    """It raises `StopPass` before the last layer: a compiled or recorded model would be of no use."""
    records: ClassVar[bool] = False
    """What it does in `before_write` is a function of tensors, with no wait: a model may record it, and give it what
    that has found (``found``) in place of the call."""
    found: Tensor
    after_pass: bool = False
    """`on_queries` may be called in place of `on_layer`, when the pass is over, with the last rows' queries only."""
    reads_weights: bool = False
    """`on_weights` may be called in place of `on_layer`, by a model that computes attention weights anyway."""

    def on_begin(self, rows: Rows, layout: Layout) -> None:
        """Nothing of the rows is computed yet; told by whoever calls `Model.forward`, not by the model."""

    def on_end(self, rows: Rows, layout: Layout) -> None:
        """The rows' K and V of all layers are in the cache, or queued to be; told by the same."""

    def before_write(self, layer: int, k: Tensor, v: Tensor, rows: Rows, layout: Layout) -> None:
        """The rows' new K and V are computed; the cache still holds what was there before."""

    def on_layer(self, layer: int, q: Tensor, rows: Rows, layout: Layout) -> None:
        """The rows' K and V are in the cache; attention comes next."""

    def on_queries(self, q: Tensor, rows: Rows, layout: Layout) -> None:
        """Queries of the last rows, ``[layers, rows, heads, head_dim]``; the next pass overwrites them."""

    def on_weights(self, weights: Tensor, start: int, rows: Rows) -> None:
        """Attention weights of a layer, ``[heads, rows from start on, keys]``; read now, the buffer is used again."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a model can do beyond running one unbroken run of rows. What it cannot do is done another way or declined.

    ``scattered_rows``: rows with holes between them run in one pass; without it each run is a pass of its own.
    ``observers``: observers are called; without it mode balanced is declined, and so is every load, for the check of
    donor KV (the canary) is an observer too. ``ranks``: how many processes hold parts of the model and call alike;
    ``rank``: which of them this one is, where the engine says so.
    ``native_spans``: the engine computes the gaps between donor spans itself, in the chunks of its own scheduler, where
    ``strict_prefix_boundary`` is off; without it a claim is one prefix-shaped range, and its gaps are computed by us.
    ``windowed``: layers that attend through a sliding window. Their KV is complete all the same, and a row there sees
    few of the keys before it: where the question looks, and what another text in front has changed, full layers tell.
    ``narrow``: the type of 8 bits that KV has in the cache, where it is read in a wider one.
    """

    scattered_rows: bool = True
    observers: bool = True
    ranks: int = 1
    rank: int | None = None
    native_spans: bool = False
    windowed: frozenset[int] = frozenset()
    narrow: torch.dtype | None = None


class Model(Protocol):
    """The engine's own model over its own KV cache.

    `forward` runs rows through all layers, writes their K and V to their slots before attention of the same layer, and
    returns hidden states ``[len(rows), hidden]``, which the next call may overwrite. Work may be queued on a device:
    nobody waits. `logits` turns hidden states into float logits ``[n, vocabulary]``. `agree` gives every rank the mean
    or the largest (``how`` is "mean" or "max") of what all ranks pass in; with one rank it returns its argument.
    """

    @property
    def layout(self) -> Layout: ...
    @property
    def rope(self) -> RopeSpec: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def capabilities(self) -> Capabilities: ...
    def forward(self, rows: Rows, observer: Observer | None = None) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def agree(self, values: Tensor, how: str) -> Tensor: ...
