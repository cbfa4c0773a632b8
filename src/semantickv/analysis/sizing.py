"""How much memory: the knee of a curve, or, with prices, the size whose last GiB still earns what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from semblend.errors import InputError


@dataclass(frozen=True, slots=True)
class Prices:
    """In one currency: an hour of prefill, and a GiB of KV memory kept for an hour."""

    prefill_hour: float
    gib_hour: float

    def __post_init__(self) -> None:
        for name in ("prefill_hour", "gib_hour"):
            if not getattr(self, name) >= 0:
                raise InputError(f"a price of {getattr(self, name)}", hint="0 or more")


def find_knee(sizes: Sequence[int], rates: Sequence[float]) -> int:
    """Return the index at which the curve is highest above the straight line from no memory to all of it.

    >>> find_knee([1, 2, 4, 8, 16], [0.1, 0.3, 0.5, 0.52, 0.53])
    2
    """
    if not rates or rates[-1] <= 0:
        return 0
    top = max(rates)
    above = [rate / top - size / sizes[-1] for size, rate in zip(sizes, rates, strict=True)]
    return int(np.argmax(above))


def find_paying_size(gib: Sequence[float], earned: Sequence[float], gib_hour: float) -> int | None:
    """Return the index of the size that earns most after its memory is paid; None where none earns what it costs.

    ``earned``: what each size saves in an hour. Of equal sizes the smallest is taken.

    >>> find_paying_size([1, 2, 4], [3.0, 4.0, 4.5], 0.5)
    1
    >>> find_paying_size([1, 2, 4], [3.0, 4.0, 4.5], 9.0) is None
    True
    """
    left = [saved - size * gib_hour for size, saved in zip(gib, earned, strict=True)]
    best = int(np.argmax(left))
    return best if left[best] > 0 else None
