"""What the kernels need to know of a donor, one row of four numbers a slot: a look at a candidate is one cache line."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

START, LENGTH, NAMESPACE, EXPIRES = 0, 1, 2, 3
NOWHERE = -1
NEVER = 1 << 62  # microseconds


def microseconds(unix_s: float | None) -> int:
    """A moment as the kernels compare it; None is never."""
    return NEVER if unix_s is None else int(min(unix_s * 1e6, NEVER))


class SlotTable:
    """Rows (start in the token log, length, namespace id, expiry in microseconds); grows by doubling."""

    def __init__(self) -> None:
        self.rows: npt.NDArray[np.int64] = self._empty(1024)

    def ensure(self, slot: int) -> None:
        """Make room for a slot."""
        if slot >= len(self.rows):
            self.rows = np.concatenate([self.rows, self._empty(max(slot + 1 - len(self.rows), len(self.rows)))])

    def clear(self, slot: int) -> None:
        self.rows[slot] = (NOWHERE, 0, NOWHERE, 0)

    @staticmethod
    def _empty(count: int) -> npt.NDArray[np.int64]:
        rows = np.zeros((count, 4), np.int64)
        rows[:, (START, NAMESPACE)] = NOWHERE
        return rows
