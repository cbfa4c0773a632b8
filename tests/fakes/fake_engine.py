"""An engine without a model: real lookups, real receipts, no KV. For tests, and to look at the dashboard.

What it says of discovery is true: token ids go through the real `SemBlend`, so outcomes, spans and donors are
those that an engine would see. What it says of time is arithmetic over two rates, and the answer is the sentence
of the prompt that shares most words with its first lines.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from semblend._version import __version__
from semblend.confirm.receipt import Receipt, RequestFacts, build_receipt
from semblend.discover.donor import Donor
from semblend.facade import SemBlend
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.prompt import Namespace, Prompt, TokenArray
from semblend.quality import GATED_MODE, choose_quality, find_path
from semblend.session.trial import Comparison
from semblend.span import Span
from semblend.text.chat import render_chat
from semblend.text.token_budget import TokenBudget
from semblend.text.tokenization import StableTokenizer
from semblend.wire.answer import Chunk, FinishReason, Logprob
from semblend.wire.request import Request

BLOCK_TOKENS = 16
FIRST_SEAM, SEAM, ATTENDED_STEP = 32, 16, 10
MOST_PREFIXES = 512


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the fake pretends to be; zeros make it answer at once."""

    prefill_tokens_per_s: float = 0.0
    load_tokens_per_s: float = 0.0
    overhead_s: float = 0.0
    token_s: float = 0.0

    def ttft_s(self, computed: int, moved: int) -> float:
        prefill = computed / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0
        load = moved / self.load_tokens_per_s if self.load_tokens_per_s else 0.0
        return self.overhead_s + prefill + load


@dataclass(frozen=True, slots=True)
class FakeWork:
    """What the fake pretends to have done: ``held_tokens`` in ``spans`` spans, some of them computed again."""

    held_tokens: int = 0
    recomputed_tokens: int = 0
    spans: int = 0
    prompt_tokens: int = 1
    compute_ms: float | None = None
    load_ms: float | None = None
    canary: float | None = None
    escalations: int = 0

    @property
    def reused_tokens(self) -> int:
        return self.held_tokens - self.recomputed_tokens

    @property
    def risk(self) -> float | None:
        """A number that grows with the reused share and the spans, as a real probe's does; None without spans."""
        share = self.reused_tokens / self.prompt_tokens
        return round(0.002 + 0.006 * share * self.spans / (self.spans + 2), 5) if self.spans else None


LIKE_A_SMALL_MODEL = Pace(prefill_tokens_per_s=2500, load_tokens_per_s=150_000, overhead_s=0.015, token_s=0.03)


class FakeEngine:
    """A `ServingEngine`. ``hold`` stops every answer before its next token until it is set again."""

    def __init__(
        self,
        semblend: SemBlend | None = None,
        *,
        model: str = "fake",
        max_context: int = 32_768,
        pace: Pace | None = None,
    ) -> None:
        self.semblend = SemBlend() if semblend is None else semblend
        self.model = model
        self.max_context = max_context
        self.vocab = 2**31
        self.longest_token_chars = StableTokenizer.longest_piece
        self.pace = Pace() if pace is None else pace
        self.hold = asyncio.Event()
        self.hold.set()
        self.running: set[str] = set()
        self.cancelled: list[str] = []
        self.comparisons: list[Comparison] = []
        self.semblend.warm_up()
        self._tokenizer = StableTokenizer()
        self._pieces: dict[int, str] = {}
        self._prefixes: list[tuple[Namespace, TokenArray]] = []

    # -- what the server asks --------------------------------------------------------------------------------------

    def namespace(self, tenant: str, salt: str) -> Namespace:
        return Namespace(tenant=tenant, model=self.model, tokenizer=self._tokenizer.name, salt=salt)

    def encode(self, text: str, *, control: bool = False, budget: TokenBudget | None = None) -> Sequence[int]:
        """Its tokenizer has no control tokens: ``control`` changes nothing."""
        del control
        if budget is not None:
            budget.refuse_longer(text, lambda part: len(self._tokenizer.encode(part)))
        ids: list[int] = self._tokenizer.encode(text).tolist()
        self._pieces.update(zip(ids, self._tokenizer.pieces(text), strict=True))
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, budget: TokenBudget | None = None) -> Sequence[int]:
        text = render_chat([dict(message) for message in messages]) + "\n<|assistant|>\n"
        return self.encode(text, budget=budget)

    def on_evicted(self, listener: Callable[[str], None]) -> None:
        self.semblend.on_evicted(lambda eviction: listener(eviction.donor.donor_id))

    def donors(self) -> Sequence[Donor]:
        return self.semblend.donors()

    def count_donors(self, tenant: str | None) -> tuple[int, int]:
        return self.semblend.count_donors(tenant)

    def stats(self) -> Mapping[str, Any]:
        stats = self.semblend.stats()
        return {
            "engine": "fake",
            "running": len(self.running),
            "donor_tokens": stats.tokens,
            "donor_bytes": stats.used_bytes,
            "donor_budget_bytes": stats.budget_bytes,
        }

    def compare_reuse(self) -> Sequence[Comparison]:
        return self.comparisons

    def reset(self) -> int:
        self._prefixes.clear()
        return self.semblend.clear()

    def cancel(self, request_id: str) -> None:
        if request_id in self.running:
            self.running.discard(request_id)
            self.cancelled.append(request_id)
            self.semblend.release(request_id)

    async def submit(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.running.add(request.request_id)
        try:
            receipt, recomputed = self._prefill(request)
            await asyncio.sleep((receipt.ttft_ms or 0.0) / 1000)
            yield Chunk(receipt=receipt, recomputed=recomputed)
            async for chunk in self._speak(request):
                yield chunk
            self._keep(request.request_id, request.prompt, receipt)
        finally:
            self.cancel(request.request_id)  # nothing to cancel where the answer was told to its end

    # -- the pretence ----------------------------------------------------------------------------------------------

    def _prefill(self, request: Request) -> tuple[Receipt, tuple[tuple[int, int], ...]]:
        prompt, started = request.prompt, time.perf_counter()
        exact = self._find_exact_prefix(prompt)
        config = self.semblend.config
        mode = choose_quality(request.quality, config.find_tenant_quality(prompt.namespace.tenant), config.quality)
        plan: ReusePlan | Decline = self.semblend.lookup(
            prompt,
            request_id=request.request_id,
            exact_tokens=exact,
            opt_out=request.opt_out or mode == "exact",
        )
        if isinstance(plan, ReusePlan):
            plan = self.semblend.claim(plan, request.request_id)
        lookup_ms = 1000 * (time.perf_counter() - started)
        spans = _drop_last_token(plan.spans, len(prompt)) if isinstance(plan, ReusePlan) else ()
        recomputed = _choose_recomputed(spans, balanced=find_path(mode) == GATED_MODE)
        held = sum(span.length for span in spans)
        counts = FakeWork(held, sum(end - start for start, end in recomputed), len(spans), len(prompt))
        if counts.reused_tokens > 0 and isinstance(plan, ReusePlan):
            plan = replace(plan, spans=spans)
        else:
            counts = FakeWork(prompt_tokens=len(prompt))
            plan = plan if isinstance(plan, Decline) else Decline(DeclineReason.BELOW_BREAK_EVEN)
        computed = len(prompt) - exact - counts.reused_tokens
        facts = RequestFacts(
            request_id=request.request_id,
            engine="fake",
            engine_version=__version__,
            namespace=prompt.namespace,
            mode=mode,
            prompt_tokens=len(prompt),
            exact_tokens=exact,
            decision=plan,
            lookup_ms=lookup_ms,
            ttft_ms=1000 * self.pace.ttft_s(computed, counts.reused_tokens) + lookup_ms,
        )
        counts = replace(counts, compute_ms=1000 * self.pace.ttft_s(computed, 0))
        return self.semblend.confirm(build_receipt(facts, counts)), recomputed

    def _find_exact_prefix(self, prompt: Prompt) -> int:
        """Whole blocks that an earlier prompt of this namespace begins with too; the last token is never among them."""
        longest = 0
        for namespace, tokens in self._prefixes:
            if namespace != prompt.namespace:
                continue
            shared = min(len(tokens), len(prompt) - 1)
            unequal = np.flatnonzero(tokens[:shared] != prompt.token_ids[:shared])
            longest = max(longest, int(unequal[0]) if len(unequal) else shared)
        return longest // BLOCK_TOKENS * BLOCK_TOKENS

    def _keep(self, request_id: str, prompt: Prompt, receipt: Receipt) -> None:
        self.running.discard(request_id)
        if receipt.reused_tokens == 0:  # KV that was moved never becomes a donor, nor an exact prefix
            self.semblend.register(prompt, donor_id=request_id)
            self._prefixes = [*self._prefixes[-MOST_PREFIXES + 1 :], (prompt.namespace, prompt.token_ids)]

    async def _speak(self, request: Request) -> AsyncGenerator[Chunk, None]:
        sampling = request.sampling
        pieces = self._answer(request.prompt, sampling.ignore_eos, sampling.max_tokens or 16)
        for index in range(sampling.n):
            finish = FinishReason.LENGTH if len(pieces) >= (sampling.max_tokens or 16) else FinishReason.STOP
            text, matched = "", None
            for piece in pieces:
                await self.hold.wait()
                await asyncio.sleep(self.pace.token_s)
                if request.request_id not in self.running:
                    return
                stop = next((one for one in sampling.stop if one in text + piece), None)
                if stop is not None:
                    kept = (text + piece).index(stop)
                    piece, finish, matched = (text + piece)[len(text) : max(kept, len(text))], FinishReason.STOP, stop
                text += piece
                yield Chunk(
                    index=index,
                    text=piece,
                    token_ids=tuple(self.encode(piece)[:1]) or (0,),
                    logprobs=() if sampling.logprobs is None else (_make_logprob(piece, sampling.logprobs),),
                )
                if matched is not None:
                    break
            yield Chunk(index=index, finish_reason=finish, matched=matched)

    def _answer(self, prompt: Prompt, endless: bool, most: int) -> list[str]:
        text = "".join(self._pieces.get(int(token), "") for token in prompt.token_ids)
        words = set(re.findall(r"[a-z]{4,}", text[:240].lower()))
        sentences = [one.strip() for one in re.split(r"(?<=[.!?])\s+|\n+", text) if len(one.split()) > 5]
        asked = [one for one in sentences if one.endswith("?")]
        words = set(re.findall(r"[a-z]{4,}", asked[0].lower())) if asked else words
        told = [one for one in sentences if not one.endswith("?")] or ["This engine has no model and says so."]
        best = max(told, key=lambda one: len(words & set(re.findall(r"[a-z]{4,}", one.lower()))))
        pieces = self._tokenizer.pieces(best[:600])
        while endless and len(pieces) < most:
            pieces = [*pieces, " …", *pieces]
        return pieces[:most]


def _drop_last_token(spans: tuple[Span, ...], prompt_tokens: int) -> tuple[Span, ...]:
    """The last token is always computed: its logits are the answer's first token."""
    last = spans[-1]
    if last.target_end < prompt_tokens:
        return spans
    cut = Span(last.donor_id, last.donor_start, last.target_start, last.length - 1, last.generation)
    return (*spans[:-1], cut) if cut.length else spans[:-1]


def _choose_recomputed(spans: Sequence[Span], *, balanced: bool) -> tuple[tuple[int, int], ...]:
    """The seams, and in balanced mode a tenth of the rest in short runs, as a model would choose by attention."""
    ranges: list[tuple[int, int]] = []
    for number, span in enumerate(spans):
        seam = min(FIRST_SEAM if number == 0 else SEAM, span.length)
        ranges.append((span.target_start, span.target_start + seam))
        if balanced:
            starts = range(span.target_start + seam + 60, span.target_end - 4, 4 * ATTENDED_STEP)
            ranges.extend((start, start + 4) for start in starts)
    return tuple(ranges)


def _make_logprob(piece: str, top: int) -> Logprob:
    share = 0.5 + int.from_bytes(hashlib.blake2b(piece.encode(), digest_size=2).digest(), "big") / 2**17
    others = tuple(Logprob(f"{piece}~{rank}", rank, math.log((1 - share) / (rank + 1))) for rank in range(1, top))
    drawn = Logprob(piece, 0, math.log(share))
    return Logprob(piece, 0, drawn.logprob, (drawn, *others) if top else ())
