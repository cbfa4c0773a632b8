"""Any-offset reuse beside an exact prefix cache, replayed under the rules that the vLLM connector follows.

For each prompt: the exact cache gives its leading blocks, `SemBlend.lookup` finds spans in donors behind them, and the
mode says what of a span is computed again.

- KV that was moved is approximate. It enters neither the exact cache nor the donors: a prompt that reused something
  leaves its exact beginning behind, and blocks that only an equal prompt finds.
- Healing: where loads of one beginning have cost as much as computing it, the next prompt is computed in full, and
  is exact again.
- A plan that saves fewer tokens than a pass costs (``pass_tokens``) is not begun; in mode balanced also none that
  computes more than `MAX_SHARE` of what a prefill does.
- What mode balanced computes again cannot be replayed without a model. It is taken from measurements, by the order in
  which a prompt holds the reused tokens: from one donor in order, `BALANCED_SHARE` of them; otherwise everything,
  because the gate sent 219 of 247 such prompts to a prefill (docs/research/decisions/break-even.md).
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from semblend.config import SemBlendConfig
from semblend.discover.store import BYTES_PER_TOKEN
from semblend.errors import CapacityError
from semblend.estimate.prefix_cache import KeyArray, PrefixCache
from semblend.facade import SemBlend
from semblend.materialize.gate.thresholds import PassageOrder, PlanShape
from semblend.plan.reuse_plan import DeclineReason, ReusePlan
from semblend.prompt import Prompt
from semblend.span import Span

Mode = Literal["balanced", "fast"]
BALANCED_SHARE = 0.12
"""Of the reused tokens, computed again by mode balanced in the easy class. On held-out documents under another
instruction it took .141 of a prompt's FLOPs in all, .02 of which were tokens that no donor had."""
MAX_SHARE = 0.7
PASS_TOKENS = 600
"""What a pass costs beside its rows: measured on an H200 with a model of the Qwen2.5-7B shape."""
MAX_SHARES = 4096
_MIN_BYTES = 1 << 16
_REQUEST = "estimate"


@dataclass(frozen=True, slots=True)
class ReuseCount:
    """Tokens of one prompt: exact ones, moved ones that are not computed, and computed ones. They add up.

    ``below_tokens`` of the computed ones would be moved if a pass cost nothing: a plan that saves less is not begun.
    They are counted on demand (``counts_below``), because it takes a lookup of every short prompt.
    """

    exact_tokens: int
    moved_tokens: int
    computed_tokens: int
    below_tokens: int = 0


class AnyOffsetReplay:
    """One mode with one amount of memory: so many tokens for the exact cache, so many for donors."""

    def __init__(
        self,
        mode: Mode,
        *,
        cache_tokens: int,
        donor_tokens: int,
        block_tokens: int,
        max_donors: int = 1 << 30,
        pass_tokens: int = PASS_TOKENS,
        counts_below: bool = False,
    ) -> None:
        self.mode = mode
        self._counts_below = counts_below
        self.too_large = self.failed_lookups = 0
        self.first_failure = ""
        self._block_tokens, self._pass_tokens, self._donor_tokens = block_tokens, pass_tokens, donor_tokens
        self._cache, self._loaded = (PrefixCache([max(1, cache_tokens // block_tokens)]) for _ in range(2))
        self._shares: OrderedDict[bytes, None] = OrderedDict()
        self._debts: OrderedDict[int, int] = OrderedDict()
        room = max(_MIN_BYTES, math.ceil(donor_tokens * BYTES_PER_TOKEN))
        config = SemBlendConfig(embedder="none", metrics=False, max_donors=max_donors, max_bytes=room)
        self._semblend = SemBlend(config)
        self._seam, self._shortest = config.seam_tokens, config.min_span_tokens
        self._number = 0

    def close(self) -> None:
        self._semblend.close()

    def add(self, prompt: Prompt, keys: KeyArray, asked: int, *, wanted: bool = True) -> ReuseCount:
        """Count what is reused of a prompt, then keep of it what an engine would keep.

        ``keys`` are the blocks of the prompt and of the answer behind it; ``asked`` of them may be hit. A prompt for
        which reuse is not ``wanted`` has the exact cache alone, and is no donor.
        """
        tokens, size = len(prompt), self._block_tokens
        exact = self._cache.replay(keys, asked, 0)[0] * size
        if not wanted:
            self._cache.replay(keys, 0)
            return ReuseCount(exact, 0, tokens - exact)
        moved: tuple[Span, ...] = ()
        below = 0
        if tokens - exact > self._shortest + self._pass_tokens:
            if self._find_equal(prompt, keys, asked):
                return ReuseCount(exact, asked * size - exact, tokens - asked * size)
            plan = self._look_up(prompt)
            if plan is not None:
                before, (exact, moved) = exact, self._divide(plan, exact)
                if moved or exact > before:
                    self._touch(plan)
                below = self._count_below(moved)
        elif self._counts_below and tokens - exact > self._shortest:
            plan = self._look_up(prompt)
            below = 0 if plan is None else self._count_below(self._divide(plan, exact)[1])
        again = self._count_again(moved, tokens, exact)
        if again is None or self._heals(moved, keys, asked, exact, again):
            self._cache.replay(keys, 0)
            if tokens - exact >= self._shortest:  # less of its own makes no donor that is worth anything
                self._register(prompt)
            return ReuseCount(exact, 0, tokens - exact, below)
        self._keep(prompt, keys, moved[0].target_start // size)
        reused = sum(span.length for span in moved) - again
        return ReuseCount(exact, reused, tokens - exact - reused)

    def _look_up(self, prompt: Prompt) -> ReusePlan | None:
        decision = self._semblend.lookup(prompt)
        if isinstance(decision, ReusePlan):
            return decision
        if decision.reason is DeclineReason.ERROR:
            self.failed_lookups += 1
            self.first_failure = self.first_failure or decision.detail
        return None

    def _find_equal(self, prompt: Prompt, keys: KeyArray, asked: int) -> bool:
        """Whether the blocks of an equal prompt are there; then they were used once more."""
        name = _name(prompt)
        if name not in self._shares:
            return False
        salted = keys ^ np.uint64(int.from_bytes(name[:8], "big"))
        if self._cache.replay(salted, asked, 0)[0] < asked:
            return False
        self._cache.replay(salted, 0)
        self._shares.move_to_end(name)
        return True

    def _keep(self, prompt: Prompt, keys: KeyArray, exact_blocks: int) -> None:
        """Blocks that only an equal prompt finds, and in front of them those that are exact."""
        name = _name(prompt)
        self._cache.replay(keys ^ np.uint64(int.from_bytes(name[:8], "big")), 0)
        self._cache.replay(keys, 0, exact_blocks)
        self._loaded.replay(keys, 0)
        self._shares[name] = None
        if len(self._shares) > MAX_SHARES:
            self._shares.popitem(last=False)

    def _heals(self, moved: Sequence[Span], keys: KeyArray, asked: int, exact: int, again: int) -> bool:
        """Whether loads of this prompt's beginning have cost as much as computing it does."""
        size = self._block_tokens
        end, start = self._loaded.replay(keys, asked, 0)[0] * size, exact // size
        if end <= exact or start >= len(keys):
            return False
        held = sum(max(0, min(span.target_end, end) - span.target_start) for span in moved)
        debt = self._debts.pop(int(keys[start]), 0) + min(end - exact, end - exact - held + again)
        if debt >= end - exact:
            return True
        self._debts[int(keys[start])] = debt
        if len(self._debts) > MAX_SHARES:
            self._debts.popitem(last=False)
        return False

    def _divide(self, plan: ReusePlan, exact: int) -> tuple[int, tuple[Span, ...]]:
        """Exact tokens and moved spans: a donor's own beginning is exact, and the last token is always computed."""
        last = plan.prompt_tokens - 1
        for span in plan.spans:
            if span.target_start == 0 and span.donor_start == 0 and min(span.length, last) > exact:
                exact = min(span.length, last)
        moved = []
        for span in plan.spans:
            start, end = max(span.target_start, exact), min(span.target_end, last)
            if end - start >= self._shortest:
                cut = start - span.target_start
                moved.append(replace(span, donor_start=span.donor_start + cut, target_start=start, length=end - start))
        return exact, tuple(moved)

    def _count_again(self, moved: tuple[Span, ...], tokens: int, exact: int) -> int | None:
        """Reused tokens that are computed again; None where the prompt is prefilled instead."""
        reused = sum(span.length for span in moved)
        again = sum(min(self._seam, span.length) for span in moved)
        if self.mode == "balanced" and moved:
            shape = PlanShape.of(ReusePlan(moved, tokens, exact))
            if shape.order is not PassageOrder.IN_ORDER or shape.in_part:
                return None
            again = min(reused, max(again, math.ceil(BALANCED_SHARE * reused)))
            if tokens - exact - reused + again > MAX_SHARE * (tokens - exact):
                return None
        return again if reused - again > self._pass_tokens else None

    def _count_below(self, moved: tuple[Span, ...]) -> int:
        """Tokens that a plan would save if a pass cost nothing, where they are too few for one."""
        saved = sum(max(0, span.length - self._seam) for span in moved)
        return saved if saved <= self._pass_tokens else 0

    def _touch(self, plan: ReusePlan) -> None:
        """Donors that were of use count as recently used."""
        self._semblend.claim(plan, _REQUEST)
        self._semblend.release(_REQUEST)

    def _register(self, prompt: Prompt) -> None:
        if len(prompt) > self._donor_tokens:
            self.too_large += 1
            return
        self._number += 1
        try:
            self._semblend.register(prompt, donor_id=f"prompt-{self._number}")
        except CapacityError:
            self.too_large += 1


def _name(prompt: Prompt) -> bytes:
    return hashlib.blake2b(prompt.token_ids.tobytes(), digest_size=16, key=prompt.namespace.digest.encode()).digest()
