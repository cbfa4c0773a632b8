"""Notices that vLLM has emptied its prefix cache.

vLLM tells a connector so only where the caller asks for that (``reset_connector``). A plain ``reset_prefix_cache`` is
what people call after new weights too, so donors must go with it. The pool is looked at instead: a reset gives it a
new table of hashes, in every version that we know.
"""

from __future__ import annotations

from typing import Any


class ResetWatch:
    """Looks at vLLM's block pool; a reset that failed, because blocks were in use, changed nothing and is not seen."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        # The table itself, not its id: the id of a table that is gone may be given to its successor.
        self._table = self._find_table()

    def was_reset(self) -> bool:
        """Whether the prefix cache was emptied since the last call."""
        before, self._table = self._table, self._find_table()
        return self._table is not before

    def _find_table(self) -> Any:
        return getattr(self._pool, "cached_block_hash_to_block", None)
