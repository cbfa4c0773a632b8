"""What one forward pass computes: rows of tokens, and for each the sequence it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from semblend.errors import InputError
from semblend.materialize.kv.host_memory import sent


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``[start, end)`` belong to one sequence, whose position ``p`` lies in pool slot ``context[p]``."""

    start: int
    end: int
    context: Tensor

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a segment's rows lie in their sequence, known on the host without asking the device again."""

    first: int
    last: int
    rows: int
    slots_from: int | None

    @property
    def reach(self) -> int:
        """How many positions the segment's last row attends to."""
        return self.last + 1

    @property
    def unbroken(self) -> bool:
        """No gaps between the rows: prefill, a later chunk of a prefill, or a decode step."""
        return self.last - self.first + 1 == self.rows


@dataclass(frozen=True)
class Rows:
    """Rows of one forward pass.

    ``slots`` says where each row's K and V are written, before attention of the same layer. A row attends
    to every position of its sequence up to its own. The rows of a segment ascend by position and may be
    scattered, so this one meaning covers prefill, chunked prefill, decode and selective recompute.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, tokens: Sequence[int] | Tensor, positions: Sequence[int] | Tensor, context: Tensor) -> Rows:
        """Rows of one sequence, written to the slots that its context names.

        >>> Rows.of([7, 9], [0, 3], torch.tensor([16, 17, 18, 19])).slots.tolist()
        [16, 19]
        """
        tokens = sent(torch.as_tensor(tokens, dtype=torch.long), context.device)
        at = torch.as_tensor(positions, dtype=torch.long)
        there = sent(at, context.device)
        rows = cls(tokens, there, context[there], (Segment(0, len(tokens), context),))
        if at.device.type == "cpu":
            rows.__dict__["host_positions"] = at  # known already: no wait for a GPU to say it
        return rows

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """One pass over the rows of several sequences."""
        if len(parts) == 1:
            return parts[0]
        segments, offset = [], 0
        for part in parts:
            segments += [replace(s, start=s.start + offset, end=s.end + offset) for s in part.segments]
            offset += len(part)
        return cls(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.positions for part in parts]),
            torch.cat([part.slots for part in parts]),
            tuple(segments),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def last_rows(self) -> list[int]:
        """The row of each segment that predicts the next token."""
        return [segment.end - 1 for segment in self.segments]

    @cached_property
    def host_positions(self) -> Tensor:
        """Positions in host memory; on a GPU this waits for the device once per pass, not once per layer."""
        return self.positions.cpu()

    @cached_property
    def extents(self) -> tuple[Extent, ...]:
        """One per segment."""
        positions = self.host_positions
        found = []
        for segment in self.segments:
            first, last = int(positions[segment.start]), int(positions[segment.end - 1])
            found.append(Extent(first, last, len(segment), _slots_from(segment.context[: last + 1])))
        return tuple(found)

    def check(self) -> None:
        """Raise `InputError` where the rows contradict their own rules; for tests and for debugging."""
        n = len(self)
        if not len(self.positions) == len(self.slots) == n:
            raise InputError("tokens, positions and slots differ in length", hint="one of each per row")
        end = 0
        for segment in self.segments:
            if segment.start != end or segment.end <= segment.start:
                raise InputError("segments must tile the rows in order", hint="no gaps, no overlap, none empty")
            end = segment.end
            positions = self.positions[segment.start : segment.end]
            if bool((positions[1:] <= positions[:-1]).any()) or int(positions[0]) < 0:
                raise InputError("positions of a segment must ascend", hint="sort the rows by position")
            if int(positions[-1]) >= len(segment.context):
                raise InputError("a row lies beyond its context", hint="context needs a slot for every position")
            if not torch.equal(segment.context[positions], self.slots[segment.start : segment.end]):
                raise InputError("a row is written to a slot that is not its position's", hint="use Rows.of")
        if end != n:
            raise InputError("rows are left that belong to no segment", hint="segments must tile the rows")


def _slots_from(context: Tensor) -> int | None:
    """The first slot where the context is one ascending run of slots: then its K and V need no gathering."""
    if context.device.type != "cpu":  # asking a GPU would cost more than the copy it saves
        return None
    first = int(context[0])
    if int(context[-1]) - first != len(context) - 1:
        return None
    return first if bool((context[1:] - context[:-1] == 1).all()) else None
