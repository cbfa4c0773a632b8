"""Loads on their way to the workers, and those that are held back for a step.

The workers work on loads before a step's forward pass, and a load reads the exact blocks in front of it. vLLM enters
blocks into its prefix cache when it schedules them, so a request may be given blocks that are computed in this very
step. Its load is ordered with the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import numpy as np

from semblend.integration.vllm.orders import Load, Orders
from semblend.integration.vllm.scheduler.records import Record
from semblend.span import Span


class PendingLoads:
    """See the module."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._waiting: list[Load] = []
        self._held: set[str] = set()
        self._cancels: list[str] = []

    @property
    def has_any(self) -> bool:
        """Whether a load waits to be ordered."""
        return bool(self._waiting)

    def add(self, record: Record, plan_tokens: int, spans: Iterable[Span]) -> None:
        """A request was given its blocks; ``spans`` carry the workers' generations."""
        assert record.block_ids is not None, "vLLM has just told them"
        self._waiting.append(
            Load(
                record.request.request_id,
                record.prompt.token_ids[:plan_tokens].astype(np.int32),
                tuple(record.block_ids),
                record.exact_tokens,
                record.claim_end,
                tuple(spans),
                record.mode,
            )
        )

    def refuse(self, record: Record, block_ids: Iterable[int], claimed_tokens: int) -> None:
        """Order a load that the workers refuse, in place of the one that was to be ordered."""
        name, exact = record.request.request_id, record.exact_tokens
        self._waiting = [load for load in self._waiting if load.request_id != name]
        nothing = np.zeros(0, dtype=np.int32)
        self._waiting.append(Load(name, nothing, tuple(block_ids), exact, exact + claimed_tokens, (), record.mode))

    def cancel(self, request_id: str) -> None:
        """The request has ended while it was being loaded."""
        self._cancels.append(request_id)

    def take(self, work_ms: float | None, computed_now: Set[int] | None) -> Orders:
        """The orders of a step that computes these blocks, None for unknown ones; they may take ``work_ms``.

        A load waits for one step at most. Workers look at cancels first: one follows its load by a step.
        """
        if not self._waiting and not self._cancels:
            return Orders(work_ms=work_ms)
        ready = [load for load in self._waiting if load.request_id in self._held or self._may_read(load, computed_now)]
        names = {load.request_id for load in self._waiting}
        self._waiting = [load for load in self._waiting if load not in ready]
        self._held = {load.request_id for load in self._waiting}
        orders = Orders(loads=ready, cancels=[name for name in self._cancels if name not in names], work_ms=work_ms)
        self._cancels = [name for name in self._cancels if name in names]
        return orders

    def _may_read(self, load: Load, computed_now: Set[int] | None) -> bool:
        """Whether the exact blocks in front of a load are computed by now; one that is refused reads none."""
        if not load.exact_tokens or not load.spans:
            return True
        exact_blocks = load.block_ids[: -(-load.exact_tokens // self._block_tokens)]
        return computed_now is not None and computed_now.isdisjoint(exact_blocks)
