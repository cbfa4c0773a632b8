"""The rows of one step of the engine: those of several prompts, side by side in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from semblend.materialize.contract import Rows


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``[start, end)`` of a batch: those of one prompt, whose position ``p`` lies in pool slot ``context[p]``.

    ``first`` and ``last`` are positions, known on the host without asking the device again. ``slots_from`` is the first
    slot of the context where its slots ascend one by one, so that its K and V need no gathering; None elsewhere.
    """

    start: int
    end: int
    context: Tensor
    first: int
    last: int
    slots_from: int | None

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def reach(self) -> int:
        """How many positions the segment's last row attends to."""
        return self.last + 1

    @property
    def unbroken(self) -> bool:
        """No gaps between the rows: prefill, a later chunk of a prefill, or a decode step."""
        return self.last - self.first + 1 == len(self)


@dataclass(frozen=True)
class RowBatch:
    """The rows of one or more prompts, one after another; each prompt's rows ascend by position."""

    parts: tuple[Rows, ...]

    @classmethod
    def of(cls, parts: Rows | Sequence[Rows]) -> RowBatch:
        """The rows of one prompt, or those of several in this order."""
        return cls((parts,) if isinstance(parts, Rows) else tuple(parts))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def tokens(self) -> Tensor:
        return self._join([part.tokens for part in self.parts])

    @cached_property
    def positions(self) -> Tensor:
        return self._join([part.positions for part in self.parts])

    @cached_property
    def slots(self) -> Tensor:
        return self._join([part.slots for part in self.parts])

    @cached_property
    def host_positions(self) -> Tensor:
        """Positions in host memory; on a GPU this waits for the device once per pass, not once per layer."""
        return self._join([part.host_positions for part in self.parts])

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """One per prompt."""
        found, start = [], 0
        for part in self.parts:
            first, last = int(part.host_positions[0]), part.reach - 1
            end = start + len(part)
            found.append(Segment(start, end, part.context, first, last, _slots_from(part.context[: last + 1])))
            start = end
        return tuple(found)

    @property
    def last_rows(self) -> list[int]:
        """The row of each prompt that predicts the next token."""
        return [segment.end - 1 for segment in self.segments]

    @cached_property
    def scratch(self) -> dict[object, object]:
        """What attention makes once a pass and uses in every layer."""
        return {}

    def check(self) -> None:
        """Raise `InputError` where the rows contradict their own rules; for tests and for debugging."""
        for part in self.parts:
            part.check()

    def _join(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))


def _slots_from(context: Tensor) -> int | None:
    """The first slot where the context is one ascending run of slots: then its K and V need no gathering."""
    if context.device.type != "cpu":  # asking a GPU would cost more than the copy it saves
        return None
    first = int(context[0])
    if int(context[-1]) - first != len(context) - 1:
        return None
    return first if bool((context[1:] - context[:-1] == 1).all()) else None
