"""What would reuse save on these prompts? Replay them in order and count, from tokens alone.

Two caches see the same prompts with the same donors behind them: an exact-prefix cache, which shares whole
blocks from the first token on (as engines do today), and any-offset reuse, which is the exact-prefix cache
plus the spans that `SemBlend.lookup` finds. No model runs and no KV exists: the result
is an estimate, not a measurement, and only an engine's receipt can confirm any of it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from semblend.config import SemBlendConfig
from semblend.confirm.events import Event, EventKind
from semblend.confirm.sinks import CallbackSink
from semblend.errors import CapacityError
from semblend.facade import SemBlend
from semblend.plan.reuse_plan import ReusePlan
from semblend.prompt import Namespace, Prompt, TokenArray
from semblend.span import Span

BUCKET_EDGES = (256, 1024, 4096, 16_384, 65_536)
MOST_TENANTS = 1000
PERCENTILES = (10, 50, 90)
SHARE_EDGES = (0.0, 0.25, 0.5, 0.75)
ROOMY_BYTES = 2 * 1024**3
ALL_DONORS = 1 << 30
_REQUEST = "estimate"


class PrefixIndex:
    """Which blocks, chained from the first token, some donor holds: the exact-prefix cache of the comparison.

    A block's key is the digest of itself and everything before it, so equal keys mean equal prefixes.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._holders: dict[bytes, int] = {}
        self._chains: dict[str, list[bytes]] = {}
        self._first = lru_cache(maxsize=4096)(_first_state)

    def chain(self, tokens: TokenArray, namespace: Namespace) -> list[bytes]:
        """The keys of all whole blocks of a prompt."""
        step = self.block_tokens * tokens.itemsize
        packed = tokens.tobytes()
        state = self._first(namespace).copy()
        keys = []
        for end in range(step, len(packed) + 1, step):
            state.update(packed[end - step : end])
            keys.append(state.digest())
        return keys

    def count_held_tokens(self, chain: list[bytes]) -> int:
        """How many leading tokens are held."""
        blocks = next((at for at, key in enumerate(chain) if key not in self._holders), len(chain))
        return blocks * self.block_tokens

    def add(self, donor_id: str, chain: list[bytes]) -> None:
        self.remove(donor_id)
        self._chains[donor_id] = chain
        for key in chain:
            self._holders[key] = self._holders.get(key, 0) + 1

    def remove(self, donor_id: str) -> None:
        for key in self._chains.pop(donor_id, ()):
            left = self._holders[key] - 1
            if left:
                self._holders[key] = left
            else:
                del self._holders[key]


@dataclass(frozen=True, slots=True)
class RequestEstimate:
    """One prompt's share: ``reused_tokens`` contain the ``prefix_tokens``."""

    prompt_tokens: int
    prefix_tokens: int
    reused_tokens: int
    seam_tokens: int


@dataclass(slots=True)
class EstimateTally:
    """Sums over prompts. ``reused_*`` is any-offset reuse, which contains the exact prefix."""

    prompts: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    prefix_hits: int = 0
    reused_tokens: int = 0
    reused_hits: int = 0
    seam_tokens: int = 0

    def add(self, one: RequestEstimate) -> None:
        self.prompts += 1
        self.prompt_tokens += one.prompt_tokens
        self.prefix_tokens += one.prefix_tokens
        self.prefix_hits += one.prefix_tokens > 0
        self.reused_tokens += one.reused_tokens
        self.reused_hits += one.reused_tokens > 0
        self.seam_tokens += one.seam_tokens

    def to_dict(self) -> dict[str, Any]:
        """The sums, and the shares that follow from them (null where there is nothing to divide by)."""
        return asdict(self) | {
            "prefix_share": ratio(self.prefix_tokens, self.prompt_tokens),
            "reused_share": ratio(self.reused_tokens, self.prompt_tokens),
            "prefix_hit_rate": ratio(self.prefix_hits, self.prompts),
            "reused_hit_rate": ratio(self.reused_hits, self.prompts),
        }


@dataclass(frozen=True, slots=True)
class EstimateOptions:
    """How to replay. Without limits every prompt stays a donor, up to about 240 million tokens."""

    block_tokens: int = 16
    max_donors: int = ALL_DONORS
    max_bytes: int = ROOMY_BYTES

    def config(self) -> SemBlendConfig:
        return SemBlendConfig(embedder="none", metrics=False, max_donors=self.max_donors, max_bytes=self.max_bytes)


@dataclass(slots=True)
class Estimator:
    """Takes prompts one by one; the answer so far is in ``to_dict``."""

    options: EstimateOptions = field(default_factory=EstimateOptions)
    total: EstimateTally = field(default_factory=EstimateTally, init=False)
    tenants: OrderedDict[str, EstimateTally] = field(default_factory=OrderedDict, init=False)
    buckets: list[EstimateTally] = field(init=False)
    too_large: int = field(default=0, init=False)
    evicted: int = field(default=0, init=False)
    _shares: array[float] = field(default_factory=lambda: array("f"), init=False)
    _prefix: PrefixIndex = field(init=False)
    _semblend: SemBlend = field(init=False)

    def __post_init__(self) -> None:
        self.buckets = [EstimateTally() for _ in range(len(BUCKET_EDGES) + 1)]
        self._prefix = PrefixIndex(self.options.block_tokens)
        # Both caches live on the same donors: what one has to let go, the other loses too.
        self._semblend = SemBlend(self.options.config(), sinks=[CallbackSink(self._follow)])

    def __enter__(self) -> Estimator:
        return self

    def __exit__(self, *_: object) -> None:
        self._semblend.close()

    def add(self, prompt: Prompt) -> RequestEstimate:
        """Count what both caches hold of the prompt, then make it a donor of both."""
        chain = self._prefix.chain(prompt.token_ids, prompt.namespace)
        # An engine computes at least the last token, to have something to continue from.
        most = len(prompt) - 1
        prefix_tokens = min(
            self._prefix.count_held_tokens(chain), most // self._prefix.block_tokens * self._prefix.block_tokens
        )
        decision = self._semblend.lookup(prompt)
        spans: tuple[Span, ...] = ()
        if isinstance(decision, ReusePlan):
            spans = decision.spans
            self._semblend.claim(decision, _REQUEST)  # donors that were of use count as recently used
            self._semblend.release(_REQUEST)
        one = self._count(len(prompt), prefix_tokens, spans)
        self._record(prompt.namespace.tenant, one)
        self._remember(prompt, chain)
        return one

    def _follow(self, event: Event) -> None:
        if event.kind is EventKind.DONOR_EVICTED:
            self._prefix.remove(event.fields["donor_id"])
            self.evicted += 1

    def _count(self, prompt_tokens: int, prefix_tokens: int, spans: tuple[Span, ...]) -> RequestEstimate:
        reused, seams = prefix_tokens, 0
        seam = self._semblend.config.seam_tokens
        for span in spans:
            fresh = min(span.target_end, prompt_tokens - 1) - max(span.target_start, prefix_tokens)
            if fresh <= 0:
                continue
            reused += fresh
            if span.target_start > 0 or span.shift != 0:  # tokens that moved, or stand behind tokens that differ
                seams += min(seam, fresh)
        return RequestEstimate(prompt_tokens, prefix_tokens, reused, seams)

    def _record(self, tenant: str, one: RequestEstimate) -> None:
        self.total.add(one)
        self.buckets[int(np.searchsorted(BUCKET_EDGES, one.prompt_tokens, side="right"))].add(one)
        self.tenants.setdefault(tenant, EstimateTally()).add(one)
        self._shares.append(one.reused_tokens / one.prompt_tokens)

    def _remember(self, prompt: Prompt, chain: list[bytes]) -> None:
        donor_id = f"prompt-{self.total.prompts}"
        try:
            self._semblend.register(prompt, donor_id=donor_id)
        except CapacityError:
            self.too_large += 1
            return
        self._prefix.add(donor_id, chain)

    def to_dict(self) -> dict[str, Any]:
        """The whole answer as data."""
        names = bucket_names()
        largest = sorted(self.tenants.items(), key=lambda item: -item[1].prompt_tokens)[:MOST_TENANTS]
        return {
            "kind": "estimate",
            "measured": False,
            "options": asdict(self.options),
            "total": self.total.to_dict(),
            "by_length": {name: tally.to_dict() for name, tally in zip(names, self.buckets, strict=True)},
            "by_tenant": {name: tally.to_dict() for name, tally in largest},
            "tenants": len(self.tenants),
            "reused_share_percentiles": self.percentiles(),
            "reused_share_histogram": self.histogram(),
            "donors_evicted": self.evicted,
            "prompts_too_large_to_keep": self.too_large,
        }

    def percentiles(self) -> dict[str, float | None]:
        """Share of a prompt that any-offset reuse covers, over prompts."""
        if not self._shares:
            return {f"p{p}": None for p in PERCENTILES}
        values = np.percentile(np.frombuffer(self._shares, dtype=np.float32), PERCENTILES)
        return {f"p{p}": round(float(value), 4) for p, value in zip(PERCENTILES, values, strict=True)}

    def histogram(self) -> dict[str, int]:
        """How many prompts had nothing, up to a quarter, up to a half ... of themselves reusable."""
        shares = np.frombuffer(self._shares, dtype=np.float32) if self._shares else np.zeros(0, np.float32)
        at = np.searchsorted(SHARE_EDGES, shares, side="left")
        counts = np.bincount(at, minlength=len(SHARE_EDGES) + 1)
        names = ("nothing", "up to 25 %", "25-50 %", "50-75 %", "over 75 %")
        return {name: int(number) for name, number in zip(names, counts, strict=True)}


def _first_state(namespace: Namespace) -> hashlib.blake2b:
    return hashlib.blake2b(namespace.digest.encode(), digest_size=16)


def bucket_names() -> list[str]:
    """Names of the prompt length buckets.

    >>> bucket_names()[:2]
    ['under 256', '256-1023']
    """
    middle = [f"{low}-{high - 1}" for low, high in pairwise(BUCKET_EDGES)]
    return [f"under {BUCKET_EDGES[0]}", *middle, f"{BUCKET_EDGES[-1]} and more"]


def ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
