"""What the kernels need to know of a donor: one row of four numbers for each slot, in one cache line."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

START, LENGTH, NAMESPACE, EXPIRES = 0, 1, 2, 3
NOWHERE = -1
NEVER = 1 << 62  # microseconds


def to_microseconds(unix_s: float | None) -> int:
    """Convert a Unix time in seconds to the microseconds that kernels compare; None means never."""
    return NEVER if unix_s is None else int(min(unix_s * 1e6, NEVER))


class SlotTable:
    """Rows (start in the token log, length, namespace id, expiry in microseconds); grows by doubling."""

    def __init__(self) -> None:
        self.rows: npt.NDArray[np.int64] = self._make_rows(1024)

    def ensure(self, slot: int) -> None:
        """Make room for a slot."""
        if slot >= len(self.rows):
            self.rows = np.concatenate([self.rows, self._make_rows(max(slot + 1 - len(self.rows), len(self.rows)))])

    def clear(self, slot: int) -> None:
        """Mark a slot as empty."""
        self.rows[slot] = (NOWHERE, 0, NOWHERE, 0)

    @staticmethod
    def _make_rows(count: int) -> npt.NDArray[np.int64]:
        """Make ``count`` empty rows."""
        rows = np.zeros((count, 4), np.int64)
        rows[:, (START, NAMESPACE)] = NOWHERE
        return rows
