"""Approximate KV must never be found as exact: two locks on vLLM's prefix cache.

vLLM finds blocks by a chain of hashes that it keeps with each request, and enters a request's blocks under them when it
allocates them, before our connector has written a byte. So

1. before the allocation the hashes from the first approximate block on are replaced by ones that no other request can
   have (`salt`). Hashes of later blocks, those of the answer too, are made from the ones before, and so are salted;
2. after it, blocks that went in all the same are taken out, none of this request goes in later, and the events that
   announced them are withdrawn, because a router would read tokens from them, not hashes (`withdraw`).

If the request is not admitted after all, or starts again after a preemption, `restore` gives it its own hashes back.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_NEVER_AGAIN = 1 << 62
"""As the number of blocks that are already cached: then no further one is."""


@dataclass(frozen=True, slots=True)
class Salted:
    """What `restore` needs: the index of the first salted hash, what stood there, and the request's own hasher."""

    first: int
    hashes: tuple[bytes, ...]
    hasher: Any


def salt(request: Any, first: int) -> Salted:
    """Make the request's hashes from index ``first`` on its own, those of blocks that are not full yet included."""
    kept, hasher = tuple(request.block_hashes[first:]), request._block_hasher
    request.block_hashes[first:] = _unheard_of(kept)
    if not kept and hasher is not None:  # the first approximate block fills up later: its parent's hash is an exact one
        request._block_hasher = lambda asked: _unheard_of(hasher(asked))
    return Salted(first, kept, hasher)


def restore(request: Any, salted: Salted) -> None:
    """Undo `salt`; blocks that were filled since get their hashes anew, from the exact ones."""
    request._block_hasher = salted.hasher
    request.block_hashes[salted.first :] = salted.hashes
    request.update_block_hashes()


def _unheard_of(hashes: Sequence[bytes]) -> list[bytes]:
    """As many, as long, drawn at random; hashing each again would take milliseconds of a long prompt."""
    size = len(hashes[0]) if hashes else 0
    drawn = secrets.token_bytes(size * len(hashes))
    return [drawn[at : at + size] for at in range(0, len(drawn), size)] if size else []


def withdraw(
    pool: Any, cached_counts: Sequence[dict[str, int]], request_id: str, first_block: int, block_ids: list[int]
) -> None:
    """Take the request's blocks from ``first_block`` on out of the prefix cache, and keep its later ones out.

    ``cached_counts`` are vLLM's books of how many blocks of each request are in the cache; without them (before 0.30)
    later blocks still go in, under salted hashes that nobody finds, and have to be withdrawn again.
    """
    if not pool.enable_caching:
        return
    hashes = {bytes(h) for b in block_ids[first_block:] if (h := pool.blocks[b].block_hash) is not None}
    pool.evict_blocks(set(block_ids[first_block:]))
    for counts in cached_counts:
        counts[request_id] = _NEVER_AGAIN
    events = pool.kv_event_queue
    if events:
        events[:] = [kept for event in events if (kept := _drop_blocks(event, hashes)) is not None]


def _drop_blocks(event: Any, hashes: set[bytes]) -> Any:
    """The event without blocks of these hashes; None when nothing is left of it."""
    listed = getattr(event, "block_hashes", None)
    if not listed or not hashes:
        return event
    # Events carry 64 bits of a hash or all of it; the pool appends the number of the cache group, 4 bytes, to its keys.
    salted = {h[:-4] for h in hashes}
    numbers = {int.from_bytes(h, "big") & ((1 << 64) - 1) for h in salted}
    keep = [i for i, h in enumerate(listed) if (h not in salted if isinstance(h, bytes) else h not in numbers)]
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
