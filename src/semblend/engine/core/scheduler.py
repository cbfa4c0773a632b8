"""Who computes what in the next step: continuous batching over a pool of blocks, in fair order between tenants.

A step has a budget of tokens, and one of time. Running answers come first, one token each; while several tenants have
some, or prompts, those of one tenant take turns where they are many. What prompts may add to
their step is ``step_work_ms`` while answers of another tenant run, by the speed of the steps before (`StepPace`), so
that a long prompt never stops them; four times as long beside a tenant's own answers, and where a neighbour was here
lately; any time where a tenant is alone: such a pass is given up for a newcomer (see `Runner`).

The budget is shared between the tenants that have prompts to compute (`semblend.fairness`): the tenant that was served
least gets the next piece, for its prompts under way first, then for its oldest waiting request. While several tenants
share a step, it is no longer than the first one's prompt (and a quarter of a step, or ``step_work_ms``, at least): a
short prompt does not wait for a step that a neighbour's long one fills. While several tenants had prompts lately, a
step that one of them has for itself is half a step at most: whoever comes back waits for that. Inside a tenant a
request that does not fit is not overtaken by a younger one that would; other tenants wait for it only where its tenant
has nothing running, so that nobody starves.

A request whose beginning is just being computed for another one waits until that is done, and then finds it in the
exact cache: of many equal prompts that come at once, one is computed. Younger requests may go ahead meanwhile; since
the tokens it waits for are being computed before any of its own could be, it loses one step at most.

The scheduler decides and moves blocks; it computes nothing. A sequence that may run on donor KV (``to_fill``) gets its
piece like any other: the runner tries to fill it, and computes the piece where that is declined. `charge` then counts
what was really computed.

Room is made by evicting the exact cache, of the tenant that holds most first; half of the pool, divided between the
other tenants, stays theirs. When an answer needs a block and there is none left, the tenant that holds most gives: its
youngest running sequence goes back to the head of its line; it will be recomputed, and continues with the same tokens.
The longest running sequence of all is never preempted, and alone it may evict everything. It therefore always gets on,
and because no sequence is longer than the pool, everything ends. A tenant that would stay within its share of the
pool is let in by preempting others that are above theirs, but never the oldest of another tenant.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from semblend.engine.core.config import PATIENCE, EngineConfig
from semblend.engine.core.radix import RadixCache
from semblend.engine.core.sequence import QueueFull, Sequence
from semblend.engine.model.paged_kv import KvPool
from semblend.fairness import FairClock, TenantLine, may_start
from semblend.prompt import count_common_prefix

MIN_WORK = 8.0
"""Rows of a step's prompts, at least, however slow they are: prompts get on beside answers."""

MIN_DECODES = 8
"""Answers of a tenant that get on in a step, at least, where it has so many."""

MAX_OVERTAKEN = 16
"""So many waiting requests may be passed over in a step because another computes their beginning."""

LATELY = 100
"""Steps with prompts, after which a tenant that had none in them no longer counts as a neighbour."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions ``[start, end)`` of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def rows(self) -> int:
        """How many tokens are computed; the others hold donor KV."""
        return self.sequence.count_missing(self.start, self.end)

    @property
    def completes(self) -> bool:
        """Whether the next token can be sampled afterwards."""
        return self.end == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step: pieces to compute, and sequences whose prompt was filled from donors.

    ``work_ms`` is how long it may work on prompts; None: nobody else waits.
    """

    pieces: tuple[Piece, ...] = ()
    filled: tuple[Sequence, ...] = ()
    work_ms: float | None = None

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        return (*(piece.sequence for piece in self.pieces), *self.filled)

    @property
    def tokens(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    def split(self) -> tuple[Batch, ...]:
        """One batch for each sequence."""
        pieces = (Batch(pieces=(piece,)) for piece in self.pieces)
        return (*pieces, *(Batch(filled=(sequence,)) for sequence in self.filled))


class StepPace:
    """How fast prompts are computed: work a millisecond, by the steps done last.

    Work is counted in rows without context: a row that attends to ``attention_tokens`` others counts twice. A step's
    decodes are not the prompts' time: what they take is known from steps without prompts.

    >>> pace = StepPace(attention_tokens=1000)
    >>> pace.note(0, decodes=1, ms=30.0); pace.note(128, decodes=1, ms=94.0)
    >>> pace.rate, pace.count_rows(20.0, 0), pace.count_rows(20.0, 1000)
    (2.0, 20, 10)
    """

    def __init__(self, attention_tokens: float = math.inf) -> None:
        self.rate = 0.0
        self._attention_tokens = attention_tokens
        self._decodes, self._decode_ms = 0, 0.0

    @property
    def decode_ms(self) -> float:
        """What an answer's token takes in a step without prompts; 0 where there was none yet."""
        return self._decode_ms / self._decodes if self._decodes else 0.0

    def weigh(self, start: int, rows: int) -> float:
        """The work of ``rows`` from position ``start`` on."""
        return rows * (1 + (start + rows / 2) / self._attention_tokens)

    def count_rows(self, work: float, start: int) -> int:
        """Rows from position ``start`` on that make up so much work; one at least where there is some."""
        return math.ceil(work / (1 + start / self._attention_tokens)) if work > 0 else 0

    def note(self, work: float, decodes: int, ms: float) -> None:
        """A step took so long."""
        if not work:
            known = self._decode_ms if decodes == self._decodes else ms
            self._decodes, self._decode_ms = decodes, (known + ms) / 2
            return
        share = min(1.0, decodes / self._decodes) if self._decodes else 0.0
        rate = work / max(ms - share * self._decode_ms, ms / 4, 1e-6)
        self.rate = (self.rate + rate) / 2 if self.rate else rate


class Scheduler:
    """Owns the queue, the running sequences and their blocks."""

    def __init__(self, pool: KvPool, radix: RadixCache, config: EngineConfig, pace: StepPace | None = None) -> None:
        self.waiting: TenantLine[Sequence] = TenantLine()
        self.running: list[Sequence] = []  # in the order of admission
        self.preemptions = 0
        self.pace = StepPace() if pace is None else pace
        self._pool = pool
        self._radix = radix
        self._config = config
        self._clock = FairClock()
        self._backlogged: set[str] = set()  # tenants with prompts to compute, as of the last step
        self._prompt_steps = 0  # steps with prompts to compute
        self._last_here: dict[str, int] = {}  # tenant -> the last of these steps that it had a prompt in
        self._turn = 0  # of answers that take turns
        self._preempted_before = 0  # preemptions when the step began

    def refuse_if_full(self, arriving: int = 0) -> None:
        """Back-pressure: raise `QueueFull` where another request, besides those arriving, would wait too long."""
        waiting = len(self.waiting) + arriving
        if waiting >= self._config.max_waiting:
            raise QueueFull(f"{waiting} requests are waiting", hint="try again later, or raise max_waiting")

    def add(self, sequence: Sequence) -> None:
        """Take a new request to the end of its tenant's line."""
        self.refuse_if_full()
        self.take_in([sequence])

    def take_in(self, sequences: Iterable[Sequence]) -> None:
        """Take new requests, in order, that were not refused."""
        for sequence in sequences:
            self.waiting.append(sequence.tenant, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence at any moment of its life; its blocks are freed."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence.tenant, sequence)
        self._release(sequence)

    def schedule(self) -> Batch:
        """The next step's work; empty only when there is nothing to do."""
        self._note_backlog()
        self._preempted_before = self.preemptions
        decodes = self._schedule_decodes()
        if self._backlogged:  # while nobody waits for prompts, answers cost nobody anything
            for piece in decodes:
                self._clock.charge(piece.sequence.tenant, 1)
        work_ms = self._find_work_ms({piece.sequence.tenant for piece in decodes})
        prompts = self._share_out(self._config.step_tokens - len(decodes), work_ms)
        # Who was preempted after it got its piece has no blocks to compute it in.
        return Batch(tuple(piece for piece in (*decodes, *prompts) if piece.sequence.blocks), work_ms=work_ms)

    def learn(self, batch: Batch, ms: float) -> None:
        """Note how long the pieces of a batch took, before their sequences go on."""
        prompts = [piece for piece in batch.pieces if piece.sequence.in_prefill]
        work = sum(self.pace.weigh(piece.start, piece.rows) for piece in prompts)
        self.pace.note(work, len(batch.pieces) - len(prompts), ms)

    def charge(self, batch: Batch) -> None:
        """Correct what tenants were charged for a batch, after it ran and before its sequences end.

        A prompt that waited because another one was filled, or whose pass was given up, computed nothing. One that was
        filled took its passes.
        """
        for piece in batch.pieces:
            one, charged = piece.sequence, piece.rows
            if one.receipt is None and one.blended is not None:
                self._clock.charge(one.tenant, sum(made.rows for made in one.blended.passes) - charged)
            elif one.to_fill or one.computed < piece.end:
                self._clock.charge(one.tenant, -charged)

    # -- parts -----------------------------------------------------------------------------------------------------

    @property
    def _admits(self) -> bool:
        """After a preemption nobody is admitted in that step: the one who just left would come straight back."""
        return self.preemptions == self._preempted_before

    def _note_backlog(self) -> None:
        backlogged = {*self.waiting.tenants, *(one.tenant for one in self.running if one.in_prefill)}
        for tenant in sorted(backlogged - self._backlogged):
            self._clock.join(tenant)
        self._backlogged = backlogged
        self._clock.forget_idle(backlogged)
        self._prompt_steps += bool(backlogged)
        self._last_here.update(dict.fromkeys(backlogged, self._prompt_steps))
        since = self._prompt_steps - LATELY
        self._last_here = {tenant: at for tenant, at in self._last_here.items() if at > since}

    def _schedule_decodes(self) -> list[Piece]:
        """One token for each answer whose turn it is and that has room; whoever is preempted on the way has none."""
        grown = [sequence for sequence in self._choose_answers() if sequence.blocks and self._grow(sequence)]
        return [Piece(sequence, sequence.computed, len(sequence.tokens)) for sequence in grown]

    def _choose_answers(self) -> list[Sequence]:
        """Running answers that get on in this step: all, unless other tenants have fewer, or prompts to compute.

        A tenant then has as many in a step as take ``step_work_ms``, or as the tenant with fewest; they take turns.
        """
        answers: dict[str, list[Sequence]] = {}
        for sequence in self.running:
            if not sequence.in_prefill:
                answers.setdefault(sequence.tenant, []).append(sequence)
        tenants = self._backlogged.union(answers)
        if len(tenants) < 2:
            return [one for own in answers.values() for one in own]
        fit = int(self._config.step_work_ms / self.pace.decode_ms) if self.pace.decode_ms else MIN_DECODES
        most = max(MIN_DECODES, fit, min(len(answers.get(tenant, ())) for tenant in tenants))
        self._turn += most
        chosen = []
        for own in answers.values():
            start = self._turn % len(own) if len(own) > most else 0
            chosen += [*own[start:], *own[:start]][:most]
        return chosen

    def _find_work_ms(self, answering: Collection[str]) -> float | None:
        """How long prompts may take in a step beside answers of these tenants; None where nobody waits for it."""
        if answering and len(self._backlogged.union(answering)) > 1:
            return self._config.step_work_ms
        return PATIENCE * self._config.step_work_ms if answering or len(self._last_here) > 1 else None

    def _share_out(self, budget: int, work_ms: float | None) -> list[Piece]:
        """Pieces of prompts for at most ``budget`` tokens and ``work_ms``, in fair order between tenants."""
        under_way = self._list_under_way()
        ready = dict.fromkeys((*under_way, *(self.waiting.tenants if self._admits else ())))
        budget, work = self._bound_step(budget, work_ms, ready, under_way)
        granted: dict[Sequence, int] = {}
        completed: set[str] = set()
        while budget > 0 and work > 0 and (tenant := self._clock.choose(ready)) is not None:
            if not under_way.get(tenant) and not self._start_next(tenant, under_way, ready):
                ready.pop(tenant, None)
                continue
            sequence = under_way[tenant][0]
            if not sequence.blocks:  # preempted a moment ago, for another tenant's request
                under_way[tenant].popleft()
                continue
            if sequence.to_fill and completed - {tenant}:
                # Filling takes passes of its own; a neighbour that speaks after this step would wait for them.
                del ready[tenant]
                continue
            rest = sequence.missing_tokens - granted.get(sequence, 0)
            tokens = min(rest, budget, max(1, self._config.step_tokens // 8) if len(ready) > 1 else budget)
            start = sequence.computed + granted.get(sequence, 0)
            if work < math.inf:
                tokens = min(tokens, self.pace.count_rows(work, start))
                work -= self.pace.weigh(start, tokens)
            granted[sequence] = granted.get(sequence, 0) + tokens
            self._clock.serve(tenant, tokens)
            budget -= tokens
            if tokens == rest:
                under_way[tenant].popleft()
                completed.add(tenant)
        return [Piece(one, one.computed, one.find_end(tokens)) for one, tokens in granted.items()]

    def _list_under_way(self) -> dict[str, deque[Sequence]]:
        """Running sequences whose prompt is not computed yet, by tenant, in the order of admission."""
        under_way: dict[str, deque[Sequence]] = {}
        for sequence in self.running:
            if sequence.in_prefill:
                under_way.setdefault(sequence.tenant, deque()).append(sequence)
        return under_way

    def _bound_step(
        self, budget: int, work_ms: float | None, ready: dict[str, None], under_way: dict[str, deque[Sequence]]
    ) -> tuple[int, float]:
        """How many tokens, and how much work, prompts of the tenants that are ``ready`` may take in this step."""
        first = self._clock.choose(ready)
        if first is None:
            return 0, 0.0
        head = under_way[first][0] if first in under_way else self.waiting.look(first)
        head_work = self.pace.weigh(head.computed, head.missing_tokens)
        rate = 0.0 if work_ms is None else self.pace.rate  # until a step was measured, tokens alone bound the next
        work = max(MIN_WORK, rate * work_ms) if rate and work_ms else math.inf
        if len(ready) > 1:
            budget = min(budget, max(head.missing_tokens, self._config.step_tokens // 4))
            work = min(work, max(head_work, MIN_WORK, rate * self._config.step_work_ms)) if rate else work
        elif len(self._last_here) > 1:  # a neighbour that comes back waits for the step that runs then
            budget = min(budget, max(1, self._config.step_tokens // 2))
        if work < head_work <= 2 * work:  # a short prompt is not worth two steps
            work = head_work
        return budget, work

    def _start_next(self, tenant: str, under_way: dict[str, deque[Sequence]], ready: dict[str, None]) -> bool:
        """Admit the tenant's next request, if that can be; a tenant with nothing running makes the others wait."""
        if not self._admits or not self.waiting.count(tenant):
            return False
        own = sum(one.tenant == tenant for one in self.running)
        if not may_start(len(self.running), self._config.max_running, own):
            return False
        place = self._find_next(tenant)
        if place is None:
            return False
        if not self._admit(tenant, place, alone=not own):
            if not own:  # what is left to others is what they have under way
                for other in list(ready):
                    if not under_way.get(other):
                        del ready[other]
            return False
        under_way[tenant] = deque([self.running[-1]])
        return True

    def _admit(self, tenant: str, place: int, *, alone: bool) -> bool:
        """Give a waiting sequence blocks for all its tokens, exact ones where the cache has them."""
        sequence = self.waiting.look(tenant, place)
        known = self._radix.match(sequence.namespace.digest, sequence.tokens[:-1])  # the last one is always computed
        for block in known:
            self._pool.share(block)
        needed = self._pool.blocks_for(len(sequence.tokens)) - len(known)
        # One block for each running answer stays free, or the next steps would preempt the newcomer again.
        reserve = len(self.running)
        if not (
            self._make_room(needed + reserve, tenant)
            or self._take_back(needed, reserve, tenant)
            or (alone and self._make_room(needed + reserve, tenant, all_of_it=True))
        ):
            self._pool.free(known)
            return False
        self.waiting.pop(tenant, place)
        sequence.blocks = known + self._pool.allocate(needed, sequence.tenant)
        sequence.computed = len(known) * self._pool.block_tokens
        if sequence.receipt is None:
            sequence.session.exact_tokens = sequence.computed
        self.running.append(sequence)
        return True

    def _find_next(self, tenant: str) -> int | None:
        """The place in its line of the oldest request that has nothing to wait for; looks at the first few only."""
        computing = [
            one
            for one in self.running
            if one.in_prefill and one.receipt is None and one.exact_until >= one.prompt_tokens
        ]
        for place in range(min(self.waiting.count(tenant), MAX_OVERTAKEN + 1)):
            sequence = self.waiting.look(tenant, place)
            if not any(self._is_worth_waiting(sequence, ahead) for ahead in computing):
                return place
        return None

    def _is_worth_waiting(self, sequence: Sequence, ahead: Sequence) -> bool:
        """Whether ``ahead`` computes at least half of what ``sequence`` would have to compute."""
        if sequence.namespace.digest != ahead.namespace.digest:
            return False
        size = self._pool.block_tokens
        usable = (
            min(count_common_prefix(sequence.prompt.token_ids, ahead.prompt.token_ids), len(sequence.tokens) - 1)
            // size
            * size
        )
        if 2 * usable < len(sequence.tokens):  # cheap, and most pairs end here
            return False
        known = len(self._radix.match(sequence.namespace.digest, sequence.tokens[:-1])) * size
        return usable > known and 2 * (usable - known) >= len(sequence.tokens) - known

    # -- room ------------------------------------------------------------------------------------------------------

    def _grow(self, sequence: Sequence) -> bool:
        """A block for the newest token; preempts others for it, in the end the sequence itself."""
        needed = self._pool.blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        while not self._make_room(needed, sequence.tenant, all_of_it=len(self.running) == 1):
            victim = self._choose_victim()
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self._pool.allocate(needed, sequence.tenant)
        return True

    def _make_room(self, n_blocks: int, tenant: str, *, all_of_it: bool = False) -> bool:
        """Evict until so many blocks are free; spares what other tenants may keep, unless ``all_of_it`` may go."""
        missing = n_blocks - self._pool.free_blocks
        if missing > 0:
            others = self._pool.held.count_with(tenant) - 1
            self._radix.evict(missing, tenant, 0 if all_of_it or not others else (self._pool.blocks - 1) // 2 // others)
        return self._pool.free_blocks >= n_blocks

    def _choose_victim(self) -> Sequence:
        """The youngest running sequence of the tenant that holds most blocks; never the one that runs longest."""
        held = self._pool.held
        candidates = self.running[1:] or self.running
        return max(enumerate(candidates), key=lambda one: (held[one[1].tenant], one[0]))[1]

    def _take_back(self, needed: int, reserve: int, tenant: str) -> bool:
        """Preempt for a tenant that stays within its share those who are above theirs; nobody where that is no help."""
        held = self._pool.held.to_dict()
        share = (self._pool.blocks - 1) // self._pool.held.count_with(tenant)
        if held.get(tenant, 0) + needed > share:
            return False
        oldest = {id(one) for one in {one.tenant: one for one in reversed(self.running)}.values()}
        missing, victims = needed + reserve - self._pool.free_blocks, []
        for one in reversed(self.running):
            if missing > 0 and one.tenant != tenant and id(one) not in oldest and held[one.tenant] > share:
                # held by it alone, or by it and the exact cache, which lets go of them next
                gain = sum(self._pool.owners(block) <= 2 for block in one.blocks)
                held[one.tenant] -= gain
                missing -= gain
                victims.append(one)
        if missing > 0:
            return False
        for victim in victims:
            self._preempt(victim)
        return self._make_room(needed + reserve - len(victims), tenant)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.put_first(sequence.tenant, sequence)

    def _release(self, sequence: Sequence) -> None:
        self._pool.free(sequence.blocks)
        sequence.drop_kv()
