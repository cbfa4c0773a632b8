"""The decision as a value: a plan, or a decline that carries its reason."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from semblend.span import Span


class DeclineReason(StrEnum):
    """Why nothing is reused; the same words in values, events, metrics and receipts."""

    TOO_SHORT = "too_short"
    NOTHING_SHARED = "nothing_shared"
    BELOW_BREAK_EVEN = "below_break_even"
    LOW_REUSE_RATIO = "low_reuse_ratio"
    OVER_BUDGET = "over_budget"
    QUALITY_RISK = "quality_risk"
    SHARED_PREFIX = "shared_prefix"
    CONTROL = "control"
    DISABLED = "disabled"
    ERROR = "error"
    # The five below come from a backend that looked at a plan and would not follow it.
    STALE = "stale"
    NAMESPACE_MISMATCH = "namespace_mismatch"
    CAPACITY = "capacity"
    UNSUPPORTED_MODE = "unsupported_mode"
    VALIDATION_FAILED = "validation_failed"


@dataclass(frozen=True, slots=True)
class Similar:
    """Evidence, never permission: a donor that looks alike. ``similarity`` is a cosine or an overlap in [0, 1]."""

    donor_id: str
    similarity: float
    source: str


@dataclass(frozen=True, slots=True)
class Decline:
    """Nothing is reused, and this is why.

    ``discovery_only``: donors were found and reported, but the settings say to hand no plan to an engine.
    ``faulty_donors``: those whose KV was found wrong; empty where nobody knows which it was.

    >>> match Decline(DeclineReason.TOO_SHORT, "12 tokens"):
    ...     case Decline(reason, detail): print(reason, "|", detail)
    too_short | 12 tokens
    """

    reason: DeclineReason
    detail: str = ""
    evidence: tuple[Similar, ...] = ()
    discovery_only: bool = False
    faulty_donors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """Spans worth reusing, in target order, not overlapping, every one token-equal to its donor.

    ``exact_tokens`` are held by the engine already (its own prefix hit) and are not part of the spans.
    ``saving_ms`` is an estimate, and None until the engine's rates are known.
    ``repair``: a first repair computes so many percent of the reused tokens again, where the gate asks for less.
    ``moved_back``: tokens that no span holds although a donor does: they stood in front of what now precedes them.
    """

    spans: tuple[Span, ...]
    prompt_tokens: int
    exact_tokens: int = 0
    saving_ms: float | None = None
    evidence: tuple[Similar, ...] = field(default=())
    repair: int = 0
    moved_back: int = 0

    @property
    def reused_tokens(self) -> int:
        return sum(span.length for span in self.spans)

    @property
    def prefill_tokens(self) -> int:
        """Tokens that no donor holds and the engine must compute."""
        return self.prompt_tokens - self.exact_tokens - self.reused_tokens

    @property
    def reuse_ratio(self) -> float:
        """Share of the prompt that donors hold, in [0, 1]."""
        return self.reused_tokens / self.prompt_tokens

    @property
    def donor_ids(self) -> tuple[str, ...]:
        """Donors in order of first use, each once."""
        return tuple(dict.fromkeys(span.donor_id for span in self.spans))

    def until(self, end: int) -> ReusePlan:
        """The plan for the first ``end`` tokens of the prompt.

        >>> ReusePlan((Span("d", 0, 4, 6),), 12).until(7).spans[0].length
        3
        """
        spans = tuple(
            replace(span, length=min(span.length, end - span.target_start))
            for span in self.spans
            if span.target_start < end
        )
        return replace(self, spans=spans, prompt_tokens=end)
