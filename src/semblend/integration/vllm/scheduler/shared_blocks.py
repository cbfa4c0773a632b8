"""Equal prompts share approximate blocks: what was loaded for one is found by the next, and nobody else finds it.

The blocks lie in vLLM's prefix cache under hashes that are salted with a key (`prefix_locks.salt`). The key is made
from the namespace, the mode, the whole prompt and the spans, with a secret of this process: another prompt, another
tenant or another mode has another key, and none can be worked out from outside. The whole prompt counts, the question
too: in mode balanced the gate chose and judged for it. vLLM counts the blocks' users and evicts them as it does with
all others.

An equal prompt that arrives while the first is being loaded waits for it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Mapping

from semblend.integration.vllm.scheduler.prefix_locks import PrefixLocks
from semblend.integration.vllm.scheduler.records import Record, Share
from semblend.plan.reuse_plan import ReusePlan
from semblend.session.session import NEVER, LoadResult

MAX_SHARES = 4096


class SharedBlocks:
    """What was loaded lately, by prompt. The least recently used is forgotten: then its blocks are found no more."""

    def __init__(self, locks: PrefixLocks, block_tokens: int, most: int = MAX_SHARES) -> None:
        self._locks, self._block_tokens, self._most = locks, block_tokens, most
        self._secret = secrets.token_bytes(32)
        self._shares: OrderedDict[bytes, Share] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shares)

    # -- the first of equal prompts --------------------------------------------------------------------------------

    def begin(self, record: Record, plan: ReusePlan) -> bytes:
        """A load for this prompt begins; returns the key to lock its blocks with."""
        name = self._name(record)
        spans = repr([(s.donor_id, s.generation, s.donor_start, s.target_start, s.length) for s in plan.spans])
        key = hashlib.blake2b(name + spans.encode(), key=self._secret).digest()
        self._shares[name] = Share(name, key, record.request_id, plan)
        self._shares.move_to_end(name)
        if len(self._shares) > self._most:
            self._shares.popitem(last=False)
        return key

    def note_loaded(self, record: Record, result: LoadResult) -> None:
        """Its blocks are filled, and vLLM enters them when it schedules the request."""
        share = self._shares.get(self._name(record))
        if share is not None and share.owner == record.request_id:
            share.result = result

    # -- the next ones ---------------------------------------------------------------------------------------------

    def join(self, record: Record, local_tokens: int, records: Mapping[str, Record]) -> bool:
        """Whether vLLM shall ask again in its next step: an equal prompt's blocks will be there, or are.

        In the second case the request's hashes are salted like theirs, so that vLLM's next look finds them.
        """
        share = self._shares.get(self._name(record)) if self._shares else None
        if share is None:
            return False
        self._shares.move_to_end(share.prompt)
        if share.result is None:
            owner = records.get(share.owner)
            return owner is not None and owner.is_loading and owner is not record
        first = share.plan.spans[0].target_start
        if local_tokens > first // self._block_tokens * self._block_tokens:
            return False  # more of it is exact by now
        record.withdraw()
        record.exact_tokens, record.decision, record.share = local_tokens, share.plan, share
        self._locks.lock(record, first, share.key)
        return True

    def find_blocks(self, record: Record, found_tokens: int) -> bool:
        """vLLM has looked with the salted hashes; where the blocks are gone, the request is like any other again.

        So it is where donors were reset since: blocks that were made from them may still be there.
        """
        known = record.share is not None and self._shares.get(record.share.prompt) is record.share
        if known and found_tokens > record.first_block * self._block_tokens:
            record.found_tokens = found_tokens
            return True
        self.drop_of(record)
        self.leave(record)
        return False

    def take(self, record: Record) -> None:
        """The request was admitted with these blocks: what donors hold in them is reused once more.

        Their other tokens were computed for the equal prompt. They are no donor's, and count as prefill here too.
        """
        share = record.share
        if share is not None and share.result is not None:
            reused = sum(span.length for span in share.plan.until(record.found_tokens).spans)
            result = LoadResult(
                share.plan.spans[0].target_start,
                reused,
                risk=share.result.risk,
                escalations=share.result.escalations,
                canary=share.result.canary,
            )
            record.share_kv(share.plan, result)

    def leave(self, record: Record) -> None:
        """The request goes its own way, under its own hashes."""
        if record.share is not None:
            self._locks.unlock(record)
            record.share = record.decision = None
            record.epoch = NEVER

    # -- the end ---------------------------------------------------------------------------------------------------

    def drop_of(self, record: Record) -> None:
        """What this request has filled, or has not found, is shared no more."""
        share = self._shares.get(record.name) if record.name is not None else None
        if share is not None and (record.share is share or share.owner == record.request_id):
            del self._shares[share.prompt]

    def drop_donor(self, donor_id: str) -> None:
        """A donor turned out to be wrong: what was made from it is shared no more."""
        for share in [one for one in self._shares.values() if donor_id in one.plan.donor_ids]:
            del self._shares[share.prompt]

    def clear(self) -> None:
        self._shares.clear()

    def _name(self, record: Record) -> bytes:
        """The prompt, its namespace and mode in a few bytes; worked out once for a request."""
        if record.name is None:
            prompt = record.prompt
            digest = hashlib.blake2b(f"{prompt.namespace.digest}/{record.mode}/".encode(), key=self._secret)
            digest.update(prompt.token_ids.tobytes())
            record.name = digest.digest()
        return record.name
