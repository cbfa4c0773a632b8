"""Which donors a prompt begins with, token for token: the earlier turns of a conversation.

For each donor one number is kept that stands for all its tokens in order. Those of all beginnings of a prompt come out
of one running sum, so to look takes the time of the sum and of one question for each length that some donor has. A
number may stand for other tokens too: whoever asks compares them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from semblend.prompt import TokenArray

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
Sums = npt.NDArray[np.uint64]


class Beginnings:
    """Slots by namespace, length and number.

    >>> known = Beginnings()
    >>> known.add(7, 0, np.array([1, 2, 3], np.int32))
    >>> list(known.find(0, np.array([1, 2, 3, 4], np.int32))), list(known.find(0, np.array([1, 2, 4, 3], np.int32)))
    ([7], [])
    """

    def __init__(self) -> None:
        self._slots: dict[int, dict[int, dict[int, set[int]]]] = {}
        self._places: dict[int, tuple[int, int, int]] = {}
        self._powers: Sums = np.ones(1, np.uint64)

    def __len__(self) -> int:
        return len(self._places)

    def add(self, slot: int, namespace_id: int, tokens: TokenArray) -> None:
        length, number = len(tokens), int(self._sum(tokens)[-1])
        self._places[slot] = namespace_id, length, number
        self._slots.setdefault(namespace_id, {}).setdefault(length, {}).setdefault(number, set()).add(slot)

    def remove(self, slot: int) -> None:
        """Forget a slot that was added."""
        namespace_id, length, number = self._places.pop(slot)
        by_length = self._slots[namespace_id]
        by_length[length][number].discard(slot)
        if not by_length[length][number]:
            del by_length[length][number]
        if not by_length[length]:
            del by_length[length]
        if not by_length:
            del self._slots[namespace_id]

    def find(self, namespace_id: int, tokens: TokenArray) -> Iterator[int]:
        """Slots whose donors these tokens probably begin with, the longest first."""
        by_length = self._slots.get(namespace_id)
        if not by_length:
            return
        sums = self._sum(tokens)
        for length in sorted((one for one in by_length if one <= len(tokens)), reverse=True):
            yield from by_length[length].get(int(sums[length - 1]), ())

    def _sum(self, tokens: TokenArray) -> Sums:
        """One number for each beginning; they wrap around."""
        if len(tokens) > len(self._powers):
            self._powers = np.cumprod(np.full(max(len(tokens), 2 * len(self._powers)), _FACTOR), dtype=np.uint64)
        return np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * self._powers[: len(tokens)], dtype=np.uint64)
