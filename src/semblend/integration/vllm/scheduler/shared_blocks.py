"""Who shares approximate blocks: what was loaded for one prompt is found by equal ones and by those that go on from it.

The blocks lie in vLLM's prefix cache under hashes that are salted with a key (`prefix_locks.salt`), drawn for each
load. A request gets the key if its prompt begins with all tokens of the one that was loaded, in the same namespace and
mode: it is equal, or it is the next turn of that conversation. All turns have one key, so a turn also finds what the
one before has computed and answered, and computes only what is new. vLLM counts the blocks' users and evicts them as it
does with all others.

The whole prompt counts, the question too: in mode balanced the gate chose and judged for it. A next turn asks another
question, so it goes on only where the risk leaves room for that (`explain_no_room`), else it is planned for itself.
An edited history is repaired where its tokens deviate, whatever is asked: its next turn has the risk of the first.

A prompt that was edited once more begins like the one that was loaded, up to the edit (`join_part`). Nobody holds that
beginning exactly, so it goes on from there where that is quicker than what donors offer (`Sessions.goes_on`).

A prompt that arrives while what it could share is being loaded waits for it.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from semblend.integration.vllm.scheduler.prefix_locks import PrefixLocks
from semblend.integration.vllm.scheduler.records import Record, Share
from semblend.plan.reuse_plan import ReusePlan
from semblend.plan.times import EDITED
from semblend.quality import explain_no_room
from semblend.session.session import NEVER, LoadResult

MAX_SHARES = 4096
MARK_TOKENS = 256
"""Beginnings are told apart in steps of so many tokens, or of a block where that is more."""
NEW_IN_COMMON = 64
"""Tokens that no donor held and both have are a sign of one conversation; users of one document have only that."""
MAX_MARKS = 4096
"""Of one load and those who go on from it; a conversation that outgrows them begins anew with its next load."""
MIN_FOUND = 0.5
"""Of the donors' tokens so many have to be there still. The others are computed; loading all again costs less than a
prefill of half of them."""


class SharedBlocks:
    """What was loaded lately, by prompt. The least recently used is forgotten: then its blocks are found no more."""

    def __init__(self, locks: PrefixLocks, block_tokens: int, most: int = MAX_SHARES) -> None:
        self._locks, self._block_tokens, self._most = locks, block_tokens, most
        self._step = max(1, MARK_TOKENS // block_tokens)  # in blocks
        self._shares: OrderedDict[tuple[Any, ...], Share] = OrderedDict()
        self._ends: dict[bytes, list[Share]] = {}
        self._begun: dict[bytes, Share] = {}  # by marks, the newest

    def __len__(self) -> int:
        return len(self._shares)

    # -- whose blocks are shared -----------------------------------------------------------------------------------

    def begin(self, record: Record, plan: ReusePlan) -> bytes:
        """A load for this prompt begins; returns the key to lock its blocks with."""
        tokens, full, key = record.source.prompt_token_ids, record.source.block_hashes, secrets.token_bytes(32)
        if not full:  # nobody finds a block that is not full
            return key
        rest = tuple(tokens[len(full) * self._block_tokens :])
        namespace = record.prompt.namespace.digest
        is_edited = record.expected is not None and record.expected.path == EDITED
        end, owner = bytes(full[-1]), record.request_id
        share = Share(end, rest, namespace, record.mode, key, owner, plan, len(tokens), is_edited)
        self._drop(self._shares.get(share.name))
        self._shares[share.name] = record.lent = share
        self._ends.setdefault(share.end, []).append(share)
        self._mark(share, full)
        if len(self._shares) > self._most:
            self._drop(next(iter(self._shares.values())))
        return key

    def note_loaded(self, record: Record, result: LoadResult) -> None:
        """Its blocks are filled, and vLLM enters them when it schedules the request."""
        if record.lent is not None:
            record.lent.result = result

    # -- who shares them -------------------------------------------------------------------------------------------

    def join(self, record: Record, local_tokens: int, records: Mapping[str, Record]) -> bool:
        """Whether vLLM shall ask again in its next step: blocks that this prompt may share will be there, or are.

        In the second case the request's hashes are salted like theirs, so that vLLM's next look finds them.
        """
        for share in self._find(record):
            if share.result is None:
                owner = records.get(share.owner)
                if owner is not None and owner.is_loading and owner is not record:
                    return True
            elif self._is_exact_further(share, local_tokens):
                continue
            elif share.prompt_tokens == len(record.prompt) or _has_room(share, record.mode):
                self._join(record, share, local_tokens, share.prompt_tokens)
                return True
        return False

    def find_edited(self, record: Record, local_tokens: int) -> tuple[Share | None, int]:
        """An earlier edit of the same conversation whose beginning this prompt may share, and how long that is."""
        share, common = self._find_part(record)
        if share is None or share.result is None or self._is_exact_further(share, local_tokens):
            return None, 0
        held, begun = share.plan.until(common).reused_tokens, share.plan.spans[0].target_start
        is_same = held > 0 and common - begun - held >= NEW_IN_COMMON
        return (share, common) if is_same and _has_room(share, record.mode) else (None, 0)

    def join_part(self, record: Record, local_tokens: int, share: Share, common_tokens: int) -> None:
        """As `join`, for a prompt that begins like one that was loaded: `find_edited` says how far."""
        self._join(record, share, local_tokens, common_tokens)

    def _is_exact_further(self, share: Share, local_tokens: int) -> bool:
        """Whether more of a prompt is exact by now than of the one that shares its blocks."""
        return local_tokens > share.plan.spans[0].target_start // self._block_tokens * self._block_tokens

    def _join(self, record: Record, share: Share, local_tokens: int, common_tokens: int) -> None:
        self._shares.move_to_end(share.name)
        record.withdraw()
        record.exact_tokens, record.decision, record.share = local_tokens, share.plan, share
        record.common_tokens = common_tokens
        record.goes_on_from = common_tokens if common_tokens < share.prompt_tokens else 0
        self._locks.lock(record, share.plan.spans[0].target_start, share.key)

    def _find_part(self, record: Record) -> tuple[Share | None, int]:
        """Who has the longest beginning in common with this prompt, and how long that is."""
        full, asked = record.source.block_hashes, (record.prompt.namespace.digest, record.mode)
        for count in range(len(full) // self._step * self._step, 0, -self._step):
            share = self._begun.get(bytes(full[count - 1]))
            if share is not None and (share.namespace, share.mode) == asked:
                return share, count * self._block_tokens
        return None, 0

    def _mark(self, share: Share, hashes: Sequence[bytes]) -> None:
        is_there = self._shares.get(share.name) is share
        for mark in map(bytes, hashes[self._step - 1 :: self._step] if is_there else ()):
            if len(share.marks) < MAX_MARKS:
                share.marks[mark] = None
                self._begun[mark] = share

    def _find(self, record: Record) -> Iterator[Share]:
        """Shares of the prompts that this one begins with, the longest first."""
        tokens, full = record.source.prompt_token_ids, record.source.block_hashes
        if self._ends.keys().isdisjoint(full):
            return
        asked = (record.prompt.namespace.digest, record.mode)
        for count in range(len(full), 0, -1):
            if shares := self._ends.get(full[count - 1]):
                rest = tuple(tokens[count * self._block_tokens : (count + 1) * self._block_tokens])
                found = [one for one in shares if one.rest == rest[: len(one.rest)]]
                found = [one for one in found if (one.namespace, one.mode) == asked]
                yield from sorted(found, key=lambda one: -one.prompt_tokens)

    def find_blocks(self, record: Record, found_tokens: int) -> bool:
        """vLLM has looked with the salted hashes; where the blocks are gone, the request is like any other again.

        So it is where donors were reset since: blocks that were made from them may still be there.
        """
        share = record.share
        if share is not None and self._shares.get(share.name) is share:
            found = share.plan.until(found_tokens).reused_tokens
            if found and found >= MIN_FOUND * share.plan.until(record.common_tokens).reused_tokens:
                record.found_tokens = found_tokens
                return True
        self.drop_of(record)
        self.leave(record)
        return False

    def take(self, record: Record) -> None:
        """The request was admitted with these blocks: what donors hold in them is reused once more.

        Their other tokens were computed for the prompt that it shares with. They are no donor's, and count as prefill
        here too.
        """
        share = record.share
        if share is not None and share.result is not None:
            plan = share.plan.until(record.found_tokens)
            goes_on = f"goes on from {record.found_tokens} tokens of an earlier prompt, whose risk this is"
            result = LoadResult(
                plan.spans[0].target_start,
                plan.reused_tokens,
                risk=share.result.risk,
                escalations=share.result.escalations,
                canary=share.result.canary,
                detail="" if record.common_tokens == len(record.prompt) else goes_on,
            )
            record.share_kv(plan, result)
            if record.salted is not None:
                self._mark(share, record.salted.exact[: len(record.prompt) // self._block_tokens])

    def leave(self, record: Record) -> None:
        """The request goes its own way, under its own hashes."""
        if record.share is not None:
            self._locks.unlock(record)
            record.share = record.decision = None
            record.epoch = NEVER

    # -- the end ---------------------------------------------------------------------------------------------------

    def drop_of(self, record: Record) -> None:
        """What this request has filled, or has not found, is shared no more."""
        self._drop(record.share)
        self._drop(record.lent)

    def drop_donors(self, donor_ids: Collection[str]) -> None:
        """Donors turned out to be wrong, or an operator forgot them: what was made from them is shared no more."""
        gone = set(donor_ids)
        for share in list(self._shares.values()) if gone else ():
            if not gone.isdisjoint(share.plan.donor_ids):
                self._drop(share)

    def clear(self) -> None:
        self._shares.clear()
        self._ends.clear()
        self._begun.clear()

    def _drop(self, share: Share | None) -> None:
        if share is None or self._shares.get(share.name) is not share:
            return
        del self._shares[share.name]
        self._ends[share.end].remove(share)
        if not self._ends[share.end]:
            del self._ends[share.end]
        for mark in share.marks:
            if self._begun.get(mark) is share:
                del self._begun[mark]


def _has_room(share: Share, mode: str) -> bool:
    """Whether what was loaded for one question may answer another."""
    result = share.result
    assert result is not None, "it was loaded"
    any_question = share.is_edited and result.passes == 1  # nothing hung on the question
    return explain_no_room(result.risk, mode, any_question=any_question) is None
