"""Who computes what in the next step: continuous batching over a pool of blocks, in order of arrival.

A step has a budget of tokens. Running answers come first, one token each, so that a long prompt never stops them;
then prompts that are under way, a chunk each; then waiting requests are admitted, oldest first, while there is
budget and room. A request that does not fit is not overtaken by a younger one that would.

A request whose beginning is just being computed for another one waits until that is done, and then finds it in the
exact cache: of many equal prompts that come at once, one is computed. Younger requests may go ahead meanwhile; since
the tokens it waits for are being computed before any of its own could be, it loses one step at most.

The scheduler decides and moves blocks; it computes nothing. A sequence that may run on donor KV (``to_fill``) gets its
piece like any other: the runner tries to fill it, and computes the piece where that is declined.

Room is made by evicting the exact cache. When an answer needs a block and there is none left, the youngest running
sequence gives up its blocks and goes back to the head of the queue; it will be recomputed, and continues with the
same tokens. The oldest therefore always gets on, and because no sequence is longer than the pool, everything ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from semblend.engine.core.config import EngineConfig
from semblend.engine.core.radix import RadixCache
from semblend.engine.core.sequence import QueueFull, Sequence
from semblend.engine.model.paged_kv import KvPool

MOST_OVERTAKEN = 16
"""So many waiting requests may be passed over in a step because another computes their beginning."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions ``[start, end)`` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def completes(self) -> bool:
        """Whether the next token can be sampled afterwards."""
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step: pieces to compute, and sequences whose prompt was filled from donors."""

    pieces: tuple[Piece, ...] = ()
    filled: tuple[Sequence, ...] = ()

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return (*(piece.sequence for piece in self.pieces), *self.filled)

    @property
    def tokens(self) -> int:
        return sum(piece.end - piece.start for piece in self.pieces)

    def split(self) -> tuple[Batch, ...]:
        """One batch for each sequence."""
        pieces = (Batch(pieces=(piece,)) for piece in self.pieces)
        return (*pieces, *(Batch(filled=(sequence,)) for sequence in self.filled))


class Scheduler:
    """Owns the queue, the running sequences and their blocks."""

    def __init__(self, pool: KvPool, radix: RadixCache, config: EngineConfig) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0
        self._pool = pool
        self._radix = radix
        self._config = config

    def refuse_if_full(self, arriving: int = 0) -> None:
        """Back-pressure: raise `QueueFull` where another request, besides those arriving, would wait too long."""
        waiting = len(self.waiting) + arriving
        if waiting >= self._config.max_waiting:
            raise QueueFull(f"{waiting} requests are waiting", hint="try again later, or raise max_waiting")

    def add(self, sequence: Sequence) -> None:
        """Take a new request to the end of the queue."""
        self.refuse_if_full()
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence at any moment of its life; its blocks are freed."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def schedule(self) -> Batch:
        """The next step's work; empty only when there is nothing to do."""
        preempted = self.preemptions
        pieces = self._schedule_decodes()
        budget = self._config.step_tokens - len(pieces)
        for sequence in self.running:
            if sequence.in_prefill and budget > 0:
                pieces.append(_cut_piece(sequence, budget))
                budget -= pieces[-1].end - pieces[-1].start
        # After a preemption nobody is admitted: the one who just left would come straight back.
        while budget > 0 and self.waiting and preempted == self.preemptions:
            admitted = self._admit()
            if admitted is None:
                break
            pieces.append(_cut_piece(admitted, budget))
            budget -= pieces[-1].end - pieces[-1].start
        return Batch(tuple(pieces))

    # -- parts -----------------------------------------------------------------------------------------------------

    def _schedule_decodes(self) -> list[Piece]:
        """One token for each running answer that has room for it; whoever is preempted on the way has none."""
        pieces: list[Piece] = []
        for sequence in list(self.running):
            if sequence.in_prefill or not sequence.blocks:
                continue
            if self._grow(sequence):
                pieces.append(Piece(sequence, sequence.computed, len(sequence.tokens)))
        return pieces

    def _grow(self, sequence: Sequence) -> bool:
        """A block for the newest token; preempts the youngest, in the end the sequence itself."""
        needed = self._pool.blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        while not self._make_room(needed):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        sequence.blocks += self._pool.allocate(needed)
        return True

    def _admit(self) -> Sequence | None:
        """Give the oldest waiting sequence blocks for all its tokens, exact ones where the cache has them."""
        if len(self.running) >= self._config.max_running:
            return None
        place = self._find_next()
        if place is None:
            return None
        sequence = self.waiting[place]
        known = self._radix.match(sequence.namespace.digest, sequence.tokens[:-1])  # the last one is always computed
        for block in known:
            self._pool.share(block)
        needed = self._pool.blocks_for(len(sequence.tokens)) - len(known)
        # One block for each running answer stays free, or the next steps would preempt the newcomer again.
        if not self._make_room(needed + len(self.running)):
            self._pool.free(known)
            return None
        del self.waiting[place]
        sequence.blocks = known + self._pool.allocate(needed)
        sequence.computed = len(known) * self._pool.block_tokens
        if sequence.receipt is None:
            sequence.exact_tokens = sequence.computed
        self.running.append(sequence)
        return sequence

    def _find_next(self) -> int | None:
        """The place in line of the oldest request that has nothing to wait for; looks at the first few only."""
        computing = [
            one
            for one in self.running
            if one.in_prefill and one.receipt is None and one.exact_until >= one.prompt_tokens
        ]
        for place in range(min(len(self.waiting), MOST_OVERTAKEN + 1)):
            if not any(self._is_worth_waiting(self.waiting[place], ahead) for ahead in computing):
                return place
        return None

    def _is_worth_waiting(self, sequence: Sequence, ahead: Sequence) -> bool:
        """Whether ``ahead`` computes at least half of what ``sequence`` would have to compute."""
        if sequence.namespace.digest != ahead.namespace.digest:
            return False
        size = self._pool.block_tokens
        usable = min(_count_common_prefix(sequence, ahead), len(sequence.tokens) - 1) // size * size
        if 2 * usable < len(sequence.tokens):  # cheap, and most pairs end here
            return False
        known = len(self._radix.match(sequence.namespace.digest, sequence.tokens[:-1])) * size
        return usable > known and 2 * (usable - known) >= len(sequence.tokens) - known

    def _make_room(self, n_blocks: int) -> bool:
        missing = n_blocks - self._pool.free_blocks
        if missing > 0:
            self._radix.evict(missing)
        return self._pool.free_blocks >= n_blocks

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._pool.free(sequence.blocks)
        sequence.drop_kv()


def _count_common_prefix(one: Sequence, other: Sequence) -> int:
    """How many tokens two prompts begin with alike."""
    length = min(one.prompt_tokens, other.prompt_tokens)
    differ = np.flatnonzero(one.prompt.token_ids[:length] != other.prompt.token_ids[:length])
    return int(differ[0]) if len(differ) else length


def _cut_piece(sequence: Sequence, budget: int) -> Piece:
    return Piece(sequence, sequence.computed, min(len(sequence.tokens), sequence.computed + budget))
