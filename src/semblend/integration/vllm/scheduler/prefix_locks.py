"""Approximate KV must never be found as exact: the chain of hashes by which vLLM finds blocks.

vLLM keeps the chain with each request and enters a request's blocks under it when their KV is complete. So before that
the hashes from the first approximate block on are replaced by ones that only requests with the same key have (`salt`).
Under a key the answer's blocks go on in the same way: a prompt that goes on from the answer finds them, if it has the
key. Without one nobody could find them, and they do not enter the cache at all (`keep_out`). What vLLM announces of all
these blocks is taken back, because a router would read tokens from it, not hashes (`silence`).

If the request turns out to be computed exactly, or starts again, `restore` gives it its own hashes back.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from semblend.integration.vllm.scheduler.records import EngineFacts, Record, Salted

_NEVER_AGAIN = 1 << 62
"""As the number of blocks that are already cached: then no further one is."""
_PIECE = 64
"""Hashes that are encrypted with one piece of the stream."""


def salt(request: Any, first: int, key: bytes | None = None) -> Salted:
    """Make the request's hashes from index ``first`` on its own, those of blocks that are not full yet included.

    With a ``key``, which has to be a secret, equal hashes become equal ones for whoever has the same key: those of the
    prompt, and those of the answer in a later prompt.
    """
    exact, hasher = list(request.block_hashes), request._block_hasher
    given = _unheard_of(exact[first:]) if key is None else _encrypt(exact[first:], key, first)
    request.block_hashes[first:] = given

    def continue_chain(asked: Any) -> list[bytes]:
        """Hashes of the blocks that have filled since, from the exact ones before."""
        salted, asked.block_hashes = asked.block_hashes, exact
        try:
            more = hasher(asked)
        finally:
            asked.block_hashes = salted
        made = _unheard_of(more) if key is None else _encrypt(more, key, len(exact))
        exact.extend(more)
        given.extend(made)
        return made

    if hasher is not None:
        request._block_hasher = continue_chain
    return Salted(first, exact, given, hasher, key is not None)


def restore(request: Any, salted: Salted) -> None:
    """Undo `salt`."""
    request._block_hasher = salted.hasher
    request.block_hashes[salted.first :] = salted.exact[salted.first :]
    request.update_block_hashes()


def _unheard_of(hashes: Sequence[bytes]) -> list[bytes]:
    """As many, as long, drawn at random; hashing each again would take milliseconds of a long prompt."""
    size = len(hashes[0]) if hashes else 0
    drawn = secrets.token_bytes(size * len(hashes))
    return [drawn[at : at + size] for at in range(0, len(drawn), size)] if size else []


def _encrypt(hashes: Sequence[bytes], key: bytes, start: int) -> list[bytes]:
    """Each with its part of a stream that only the key gives: as hard to guess as the key, and equal for equal ones.

    ``start``: the index of the first; the stream is made in pieces, so that a block of an answer costs one of them.
    """
    if not hashes:
        return []
    whole, size = b"".join(hashes), len(hashes[0])
    pieces = range(start // _PIECE, (start + len(hashes) - 1) // _PIECE + 1)
    stream = b"".join(hashlib.shake_256(key + piece.to_bytes(8, "big")).digest(_PIECE * size) for piece in pieces)
    stream = stream[start % _PIECE * size :][: len(whole)]
    mixed = (int.from_bytes(whole, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(whole), "big")
    return [mixed[at : at + size] for at in range(0, len(mixed), size)]


def keep_out(pool: Any, cached_counts: Sequence[dict[str, int]], request_id: str, block_ids: Iterable[int]) -> None:
    """Take blocks of a request out of the prefix cache, and keep its later ones out.

    ``cached_counts`` are vLLM's books of how many blocks of each request are in the cache; without them (before 0.30)
    later blocks still go in, under salted hashes that nobody finds, and have to be taken out again.
    """
    if not pool.enable_caching:
        return
    pool.evict_blocks(set(block_ids))
    for counts in cached_counts:
        counts[request_id] = _NEVER_AGAIN


def silence(pool: Any, hashes: set[bytes]) -> None:
    """Take back what vLLM is about to announce of blocks with these hashes, as the pool or a request has them."""
    events = pool.kv_event_queue
    if events and hashes:
        events[:] = [kept for event in events if (kept := _drop_blocks(event, hashes)) is not None]


def list_hashes(pool: Any, request: Any, first_hash: int, block_ids: Iterable[int]) -> set[bytes]:
    """Hashes of these blocks in the pool, and of a request from an index on, without the number of the cache group."""
    kept = (pool.blocks[block].block_hash for block in block_ids)
    # The pool appends the number of the cache group, 4 bytes, to its keys.
    found = {bytes(h)[:-4] for h in kept if h is not None}
    return found if request is None else found | {bytes(h) for h in request.block_hashes[first_hash:]}


def _drop_blocks(event: Any, hashes: set[bytes]) -> Any:
    """The event without blocks of these hashes; None when nothing is left of it."""
    listed = getattr(event, "block_hashes", None)
    if not listed or not hashes:
        return event
    # Events carry 64 bits of a hash or all of it.
    numbers = {int.from_bytes(h, "big") & ((1 << 64) - 1) for h in hashes}
    keep = [i for i, h in enumerate(listed) if (h not in hashes if isinstance(h, bytes) else h not in numbers)]
    if len(keep) == len(listed):
        return event
    if not keep:
        return None
    event.block_hashes = [listed[i] for i in keep]
    if getattr(event, "token_ids", None) is not None:
        size = event.block_size
        event.token_ids = [t for i in keep for t in event.token_ids[i * size : (i + 1) * size]]
        if getattr(event, "extra_keys", None):
            event.extra_keys = [event.extra_keys[i] for i in keep]
    return event


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
        record.first_block = first_token // self._facts.block_tokens
        record.salted = salt(record.source, first_token // self._facts.hash_block_tokens, key)

    def unlock(self, record: Record) -> None:
        """Its own hashes again: nothing approximate is in its blocks, or it has none."""
        if record.salted is not None:
            restore(record.source, record.salted)
            record.salted = None

    def end_caching(self, record: Record) -> None:
        """No further block of a request enters the prefix cache, as far as the version lets us say so."""
        if self.block_pool is not None:
            keep_out(self.block_pool, self.cached_counts, record.request_id, ())

    def keep_private(self, records: Iterable[Record]) -> None:
        """When vLLM has entered blocks: they are in under hashes that we gave them only, and nothing is announced."""
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
        # Only full blocks enter. A request that speculates has blocks ahead of those, and fills several in a step.
        full = len(record.source.block_hashes) * self._facts.hash_block_tokens // self._facts.block_tokens
        if record.checked_blocks and self._has_no_news(record, full):
            return
        pool, blocks, name, salted = self.block_pool, record.block_ids, record.request_id, record.salted
        # Those that have filled since, and two that may have had their hash before their KV.
        since = max(record.checked_blocks - 2, record.first_block)
        first_hash = since if self.can_share else salted.first
        if pool.kv_event_queue:
            silence(pool, list_hashes(pool, record.source, first_hash, blocks[since:]))
        if record.is_loading:
            return
        given = salted.given[since - salted.first :]
        if not self.can_share or not list_hashes(pool, None, 0, blocks[since:]).issubset(given):
            keep_out(pool, self.cached_counts, name, blocks[since:])
            if self.can_share:
                self._report_failure("withdraw", "approximate blocks were under hashes that are not ours", name)
        elif record.entered and not salted.has_key:
            answer = len(record.prompt) // self._facts.block_tokens
            keep_out(pool, self.cached_counts, name, blocks[max(since, answer) :])
        if record.entered:
            record.checked_blocks = min(full, len(blocks))

    def _has_no_news(self, record: Record, full_blocks: int) -> bool:
        """Whether nothing of a request can have entered since the last look: one that runs costs a step nothing."""
        assert record.salted is not None
        if record.salted.has_key:
            return full_blocks == record.checked_blocks and not self.block_pool.kv_event_queue
        return bool(self.cached_counts)
