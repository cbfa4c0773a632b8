"""A backend's word on what it did with a plan: the only source from which reuse is counted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from semblend.confirm.outcome import Outcome
from semblend.errors import ReceiptError
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.prompt import Namespace
from semblend.span import Span

JsonObject = dict[str, Any]

TEXT_LIMIT = 500
"""Longest free text in an event, in characters: room for a reason, too little for a prompt."""

TOKEN_KINDS = ("exact", "reused", "recomputed", "prefill")
"""Every token of a prompt is one of these four."""

CALLER_DETAILS: Mapping[DeclineReason, str | None] = MappingProxyType(
    {
        DeclineReason.TOO_SHORT: None,
        DeclineReason.UNSUPPORTED_MODE: None,
        DeclineReason.NOTHING_SHARED: "no donor shares enough tokens with this prompt",
        DeclineReason.BELOW_BREAK_EVEN: "reuse would cost more than it saves",
        DeclineReason.LOW_REUSE_RATIO: "donors hold too small a share of this prompt",
        DeclineReason.OVER_BUDGET: "the lookup took too long",
        DeclineReason.QUALITY_RISK: "the quality gate computed every token",
        DeclineReason.SHARED_PREFIX: "requests load this prefix so often that it was computed exactly, once",
        DeclineReason.CONTROL: "a few requests are computed without reuse, to compare",
        DeclineReason.DISABLED: "reuse is switched off for this request or for the server",
        DeclineReason.ERROR: "reuse failed; the prompt was computed",
        DeclineReason.STALE: "the donor was replaced or evicted",
        DeclineReason.NAMESPACE_MISMATCH: "the donor belongs to another namespace",
        DeclineReason.CAPACITY: "the donor's KV was not in memory yet, or had no room",
        DeclineReason.VALIDATION_FAILED: "donor KV failed its check; the prompt was computed",
    }
)
"""What a caller reads as ``detail``. None: the receipt's own text, which tells about the request and the engine only.

The own text of every other reason may name donors, lengths of shared runs or paths of the server.
"""

GOES_ON = "it goes on from an earlier prompt; the risk is that prompt's"
"""What a caller reads where tokens were reused and the receipt says more than that."""

_OPERATOR_FIELDS = ("namespace", "spans", "service_ms", "kind", "expected_ms", "expected_cold_ms")
_TIMES = ("lookup_ms", "load_ms", "compute_ms", "ttft_ms", "service_ms", "expected_ms", "expected_cold_ms")
_SINCE = ("service_ms", "kind", "expected_ms", "expected_cold_ms")
"""Fields that records of earlier versions lack."""
_DIGEST_LENGTH = 32
_SPAN_KEYS = ("donor_id", "generation", "donor_start", "target_start", "length")


def _row(kind: str, help: str) -> Mapping[str, str]:
    """A row of the reference page; ``kind`` is a type of ``tools.reference.event_schema``, with ``?`` for "or null"."""
    return {"type": kind, "help": help}


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What one request really cost and reused; it refuses to exist when it contradicts itself.

    None means "not measured", which is not zero.

    >>> receipt = Receipt(
    ...     request_id="r", engine="semblend", namespace="0" * 32, outcome=Outcome.BACKEND_MATERIALIZED_REUSE,
    ...     prompt_tokens=100, exact_tokens=10, reused_tokens=60, recomputed_tokens=4, prefill_tokens=26,
    ...     spans=(Span("donor", donor_start=0, target_start=20, length=64),))
    >>> receipt.reuse_ratio
    0.6
    """

    request_id: str = field(metadata=_row("name", "The request that this answers."))
    engine: str = field(metadata=_row("name", "Who served it: vllm, sglang, trtllm, semblend, …"))
    engine_version: str = field(default="", metadata=_row("string", "Version of the engine; empty where unknown."))
    namespace: str = field(metadata=_row("digest", "Digest of the namespace; the salt cannot be read from it."))
    outcome: Outcome = field(metadata=_row("outcome", "How the request was served."))
    mode: str = field(
        default="",
        metadata=_row("string", "Quality: exact, fast, balanced, or a number of nats; empty where none applied."),
    )
    prompt_tokens: int = field(metadata=_row("count", "Length of the prompt; the sum of the four kinds below."))
    exact_tokens: int = field(default=0, metadata=_row("count", "Served by the engine's own exact prefix cache."))
    reused_tokens: int = field(default=0, metadata=_row("count", "Served from donor KV that was moved into place."))
    recomputed_tokens: int = field(
        default=0, metadata=_row("count", "Held by a donor, yet computed again for quality.")
    )
    prefill_tokens: int = field(default=0, metadata=_row("count", "Held by nobody, computed."))
    spans: tuple[Span, ...] = field(default=(), metadata=_row("spans", "Where donor KV went, in target order."))
    risk: float | None = field(
        default=None,
        metadata=_row("measure?", "Expected divergence from a cold answer, in nats a token; null where not probed."),
    )
    escalations: int = field(
        default=0, metadata=_row("count", "How often more tokens were recomputed because the risk was too high.")
    )
    canary: float | None = field(
        default=None,
        metadata=_row("measure?", "Largest relative error of the integrity check on layer-0 keys; null where not run."),
    )
    lookup_ms: float | None = field(default=None, metadata=_row("measure?", "Time to find and plan."))
    load_ms: float | None = field(default=None, metadata=_row("measure?", "Time to load and relocate donor KV."))
    compute_ms: float | None = field(
        default=None, metadata=_row("measure?", "Time the model computed tokens of the prompt.")
    )
    ttft_ms: float | None = field(default=None, metadata=_row("measure?", "Time to the first output token."))
    service_ms: float | None = field(
        default=None, metadata=_row("measure?", "Time from when the engine took it up to its first output token.")
    )
    kind: str = field(
        default="", metadata=_row("string", "Kind of plan that it had, by which costs are compared; empty for none.")
    )
    expected_ms: float | None = field(
        default=None,
        metadata=_row("measure?", "What service_ms was expected to be with reuse; null before times are known."),
    )
    expected_cold_ms: float | None = field(default=None, metadata=_row("measure?", "The same without reuse."))
    reason: DeclineReason | None = field(
        default=None, metadata=_row("decline reason?", "Why reuse was declined; null where it was not.")
    )
    detail: str = field(default="", metadata=_row("text", "One line for people."))

    def __post_init__(self) -> None:
        self._check_words()
        self._check_numbers()
        self._check_spans()
        self._check_outcome()

    @property
    def tokens(self) -> Mapping[str, int]:
        """Tokens by kind; they sum to ``prompt_tokens``."""
        counts = (self.exact_tokens, self.reused_tokens, self.recomputed_tokens, self.prefill_tokens)
        return MappingProxyType(dict(zip(TOKEN_KINDS, counts, strict=True)))

    @property
    def span_tokens(self) -> int:
        """Tokens inside the spans, reused and recomputed ones together."""
        return sum(span.length for span in self.spans)

    @property
    def reuse_ratio(self) -> float:
        """Share of the prompt that ran on donor KV, in [0, 1]."""
        return self.reused_tokens / self.prompt_tokens

    @property
    def donor_ids(self) -> tuple[str, ...]:
        """Donors in order of first use, each once."""
        return tuple(dict.fromkeys(span.donor_id for span in self.spans))

    def to_dict(self) -> JsonObject:
        """Plain JSON values under the names of the fields."""
        record: JsonObject = {name: getattr(self, name) for name in _NAMES}
        record["outcome"] = str(self.outcome)
        record["reason"] = None if self.reason is None else str(self.reason)
        record["spans"] = [span_to_dict(span) for span in self.spans]
        return record

    def to_caller_dict(self) -> JsonObject:
        """What the caller of the request may see: `to_dict` without spans and namespace, with a general ``detail``.

        Donor ids, starts and lengths would tell one caller which text stands in another caller's prompt. They stay in
        the audit stream and in local use of the library.
        """
        record = {name: value for name, value in self.to_dict().items() if name not in _OPERATOR_FIELDS}
        goes_on = self.detail and self.outcome is Outcome.BACKEND_MATERIALIZED_REUSE
        general = (GOES_ON if goes_on else "") if self.reason is None else CALLER_DETAILS[self.reason]
        return record if general is None else {**record, "detail": general}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Receipt:
        """The receipt that `to_dict` wrote; every key must be there that earlier versions had, and no unknown one."""
        _check_keys("receipt", record, _NAMES)
        values = dict(record)
        values["outcome"] = _word(Outcome, "outcome", record["outcome"])
        if record["reason"] is not None:
            values["reason"] = _word(DeclineReason, "reason", record["reason"])
        if not isinstance(record["spans"], (list, tuple)):
            _refuse("spans is not a list", "write spans as a list of objects")
        values["spans"] = tuple(span_from_dict(span) for span in record["spans"])
        return cls(**values)

    def _check_words(self) -> None:
        for name in ("request_id", "engine", "engine_version", "namespace", "mode", "detail", "kind"):
            if not isinstance(getattr(self, name), str):
                _refuse(f"{name} is {type(getattr(self, name)).__name__}, not str", f"pass {name} as a string")
        for name in ("request_id", "engine"):
            if not getattr(self, name):
                _refuse(f"{name} is empty", "a receipt names its request and its engine")
        # A digest and nothing else: a tenant's name or a salt must not slip into an audit stream here.
        if len(self.namespace) != _DIGEST_LENGTH or not set(self.namespace) <= set("0123456789abcdef"):
            _refuse("namespace is not a digest of 32 hex digits", "pass prompt.namespace.digest")
        if not isinstance(self.outcome, Outcome):
            _refuse(f"outcome is {self.outcome!r}", "pass a member of Outcome")
        if self.reason is not None and not isinstance(self.reason, DeclineReason):
            _refuse(f"reason is {self.reason!r}", "pass a member of DeclineReason, or None")

    def _check_numbers(self) -> None:
        for name in ("prompt_tokens", *(f"{kind}_tokens" for kind in TOKEN_KINDS), "escalations"):
            _check_count(name, getattr(self, name))
        for name in ("risk", "canary", *_TIMES):
            _check_measure(name, getattr(self, name))
        if self.prompt_tokens < 1:
            _refuse("prompt_tokens is 0", "a prompt has at least one token")
        total = sum(self.tokens.values())
        if total != self.prompt_tokens:
            parts = " + ".join(f"{kind} {count}" for kind, count in self.tokens.items())
            _refuse(f"{parts} = {total}, but the prompt has {self.prompt_tokens} tokens", "count every token once")

    def _check_spans(self) -> None:
        if not isinstance(self.spans, tuple) or not all(isinstance(span, Span) for span in self.spans):
            _refuse("spans is not a tuple of Span", "pass spans=tuple(...)")
        end = 0
        for span in self.spans:
            if span.length < 1 or span.donor_start < 0:
                _refuse(f"a span of {span.length} tokens from donor token {span.donor_start}", "leave empty spans out")
            if span.target_start < end:
                _refuse(
                    f"the span at {span.target_start} starts before the one ahead of it ends ({end})",
                    "give spans in target order, not overlapping",
                )
            end = span.target_end
        if end > self.prompt_tokens:
            _refuse(f"a span ends at {end}, the prompt at {self.prompt_tokens}", "spans lie inside the prompt")
        if self.reused_tokens > self.span_tokens:
            _refuse(
                f"{self.reused_tokens} tokens reused, but the spans hold {self.span_tokens}",
                "every reused token belongs to a span",
            )

    def _check_outcome(self) -> None:
        materialized = self.outcome is Outcome.BACKEND_MATERIALIZED_REUSE
        if materialized != (self.reused_tokens > 0):
            _refuse(
                f"outcome is {self.outcome} with {self.reused_tokens} tokens reused",
                "backend_materialized_reuse and only it reuses tokens",
            )
        if self.outcome is Outcome.BACKEND_DECLINED_REUSE and self.reason is None:
            _refuse("a decline without a reason", "pass a member of DeclineReason as reason")


_NAMES = tuple(f.name for f in fields(Receipt))


def span_to_dict(span: Span) -> JsonObject:
    """A span as JSON values."""
    numbers = {name: int(getattr(span, name)) for name in _SPAN_KEYS[1:]}  # aligners may hand over numpy integers
    return {"donor_id": span.donor_id, **numbers}


def span_from_dict(record: Any) -> Span:
    """The span that `span_to_dict` wrote."""
    if not isinstance(record, Mapping):
        _refuse(f"a span is {type(record).__name__}, not an object", "write spans as a list of objects")
    _check_keys("span", record, _SPAN_KEYS)
    if not isinstance(record["donor_id"], str):
        _refuse("donor_id of a span is not a string", "donors are named by strings")
    for name in _SPAN_KEYS[1:]:
        _check_count(f"{name} of a span", record[name])
    return Span(**record)


def _check_keys(what: str, record: Mapping[str, Any], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in record and name not in _SINCE]
    unknown = [repr(name) for name in record if name not in names]
    if missing:
        _refuse(f"{what} lacks {', '.join(missing)}", "write it with to_dict()")
    if unknown:
        _refuse(f"{what} has unknown keys {', '.join(unknown)}", f"known are {', '.join(names)}")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        _refuse(f"{name} is {value!r}, not a whole number of 0 or more", "convert numpy values with int(...)")


def _check_measure(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        _refuse(f"{name} is {value!r}, not a finite number of 0 or more", "pass None where it was not measured")


WordT = TypeVar("WordT", Outcome, DeclineReason)


def _word(kind: type[WordT], name: str, value: Any) -> WordT:
    try:
        return kind(value)
    except ValueError:
        _refuse(f"{name} is {value!r}", "one of " + ", ".join(str(word) for word in kind))


def _refuse(what: str, hint: str) -> NoReturn:
    raise ReceiptError(f"receipt refused: {what}", hint=hint)


# -- The one place that turns what an engine knows about a request into its receipt.
#
# The embedded engine, the vLLM adapter and the fake engine all call `build_receipt`, so the same facts give the same
# outcome in each of them.


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What an engine knows about a request when its first token is out, besides the work of a backend.

    ``decision`` is what the library handed out. ``compute_ms`` counts where no backend did any work.
    """

    request_id: str
    engine: str
    engine_version: str
    namespace: Namespace
    mode: str
    prompt_tokens: int
    exact_tokens: int
    decision: ReusePlan | Decline | None
    lookup_ms: float | None = None
    compute_ms: float | None = None
    ttft_ms: float | None = None
    service_ms: float | None = None
    kind: str = ""
    expected_ms: float | None = None
    expected_cold_ms: float | None = None


_WORK = ("reused_tokens", "recomputed_tokens", "risk", "escalations", "canary", "load_ms", "compute_ms")
_AS_THEY_ARE = (
    *("request_id", "engine", "engine_version", "mode", "prompt_tokens", "exact_tokens"),
    *("lookup_ms", "compute_ms", "ttft_ms", *_SINCE),
)


def build_receipt(facts: RequestFacts, work: Any = None, refusal: Decline | None = None) -> Receipt:
    """Build the receipt from the facts, the backend's ``work`` and its ``refusal``, where there is one.

    ``work`` has its numbers under the names of a receipt's fields; ``compute_ms`` is then the backend's. Without it no
    reuse is counted, whatever was planned. Tokens that are neither exact, reused nor recomputed are prefill.

    >>> facts = RequestFacts(request_id="r", engine="semblend", engine_version="1", namespace=Namespace(), mode="fast",
    ...                      prompt_tokens=9, exact_tokens=4, decision=None)
    >>> receipt = build_receipt(facts)
    >>> str(receipt.outcome), receipt.prefill_tokens
    ('exact_prefix_route', 5)
    """
    values: JsonObject = {name: getattr(facts, name) for name in _AS_THEY_ARE}
    if work is not None:
        values |= {name: getattr(work, name) for name in _WORK}
    reused, recomputed = values.get("reused_tokens", 0), values.get("recomputed_tokens", 0)
    outcome, why = _find_outcome(facts, reused, refusal)
    return Receipt(
        **values,
        namespace=facts.namespace.digest,
        outcome=outcome,
        prefill_tokens=facts.prompt_tokens - facts.exact_tokens - reused - recomputed,
        spans=facts.decision.spans if reused + recomputed and isinstance(facts.decision, ReusePlan) else (),
        reason=why.reason if why else None,
        detail=why.detail if why else getattr(work, "detail", ""),
    )


def _find_outcome(facts: RequestFacts, reused: int, refusal: Decline | None) -> tuple[Outcome, Decline | None]:
    """What became of the request, and why nothing was reused."""
    if reused:
        return Outcome.BACKEND_MATERIALIZED_REUSE, None
    if refusal is not None:
        return Outcome.BACKEND_DECLINED_REUSE, refusal
    not_planned = facts.decision if isinstance(facts.decision, Decline) else None
    if facts.exact_tokens:
        return Outcome.EXACT_PREFIX_ROUTE, not_planned
    if not_planned is not None and not_planned.discovery_only:
        return Outcome.SEMANTIC_DISCOVERY_ONLY, not_planned
    return Outcome.COLD_FALLBACK, not_planned
