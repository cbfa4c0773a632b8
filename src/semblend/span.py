"""Which tokens correspond: the one currency that every layer above trades in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` tokens of a donor, from ``donor_start``, equal the prompt's from ``target_start``.

    Half-open, in tokens. ``generation`` says which registration of the donor was seen: a splice must
    refuse a span whose donor was replaced or evicted since.

    >>> Span("req-1", donor_start=100, target_start=40, length=64).shift
    -60
    """

    donor_id: str
    donor_start: int
    target_start: int
    length: int
    generation: int = 0

    @property
    def donor_end(self) -> int:
        return self.donor_start + self.length

    @property
    def target_end(self) -> int:
        return self.target_start + self.length

    @property
    def shift(self) -> int:
        """How far the tokens move: 0 means the same position as in the donor."""
        return self.target_start - self.donor_start
