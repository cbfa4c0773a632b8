"""The locks on vLLM's prefix cache, for all requests with approximate KV; see `hash_chain` for what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from semblend.integration.vllm.scheduler.hash_chain import keep_out, list_hashes, restore, salt, silence
from semblend.integration.vllm.scheduler.records import EngineFacts, Record

ReportFailure = Callable[[str, str, str], None]


class PrefixLocks:
    """``block_pool`` and ``cached_counts`` are vLLM's, as far as the version hands them over."""

    def __init__(self, facts: EngineFacts, report_failure: ReportFailure) -> None:
        self._facts, self._report_failure = facts, report_failure
        self.block_pool: Any = None
        self.cached_counts: list[dict[str, int]] = []

    @property
    def can_share(self) -> bool:
        """Whether approximate blocks may lie in the prefix cache: where each has one hash, which can be checked."""
        return self._facts.hash_block_tokens == self._facts.block_tokens

    def lock(self, record: Record, first_token: int, key: bytes | None) -> None:
        """From the block of ``first_token`` on, only requests with the same key find this one's blocks."""
        first = first_token // self._facts.hash_block_tokens
        record.first_block = first_token // self._facts.block_tokens
        record.own_hashes = frozenset(map(bytes, record.source.block_hashes[first:]))
        record.salted = salt(record.source, first, key)

    def unlock(self, record: Record) -> None:
        """Its own hashes again: nothing approximate is in its blocks, or it has none."""
        if record.salted is not None:
            restore(record.source, record.salted)
            record.salted = None

    def keep_private(self, records: Iterable[Record]) -> None:
        """When vLLM has entered blocks: none is in under an exact hash, none of an answer, and nothing is announced."""
        for record in records:
            if record.salted is None or record.block_ids is None or self.block_pool is None:
                continue
            try:
                self._keep_private(record)
            except Exception as error:  # the salted hashes still keep these blocks from being found
                self._report_failure("withdraw", f"{type(error).__name__}: {error}", record.request_id)

    def _keep_private(self, record: Record) -> None:
        assert record.salted is not None
        assert record.block_ids is not None
        if record.kept_out and self.cached_counts:
            return  # nothing more of it enters: running requests cost a step nothing
        pool, blocks, name = self.block_pool, record.block_ids, record.request_id
        # Before 0.30 vLLM enters blocks as they fill: those since, and two that were filling.
        since = max(record.kept_out - 2, record.first_block)
        first_hash = since if self.can_share else record.salted.first
        if pool.kv_event_queue:
            silence(pool, list_hashes(pool, record.source, first_hash, blocks[since:]))
        if record.is_loading:
            return
        if not self.can_share or record.own_hashes & list_hashes(pool, None, 0, blocks[since:]):
            keep_out(pool, self.cached_counts, name, blocks[since:])
            if self.can_share:
                self._report_failure("withdraw", "approximate blocks were under exact hashes", name)
        elif record.entered:
            answer = len(record.prompt) // self._facts.block_tokens
            keep_out(pool, self.cached_counts, name, blocks[max(since, answer) :])
        if record.entered:
            record.kept_out = len(blocks)
