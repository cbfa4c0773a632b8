"""Weighs what a backend reports about reuse, and finds contradictions.

The four witnesses are the receipt in the answer, the usage object, the counters of the server and its audit stream.
Time is no witness: an answer can be fast for many reasons. If witnesses disagree, the least favourable number counts:
the smallest for a case that may reuse, the largest for one that must not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sembench.backends import ServerAnswer
from sembench.files import read_count, read_float
from sembench.witnesses.prometheus import (
    EXACT_TOKENS,
    EXTERNAL_HITS,
    LOCAL_HITS,
    REQUESTS,
    REUSED_TOKENS,
    CounterDelta,
)

MATERIALIZED = "backend_materialized_reuse"
WINDOW_CHARS = 32
"""Reuse comes in runs of 32 tokens or more, and a token has at least a character."""
SLACK_SHARE = 1.25
SLACK_TOKENS = 64
"""Characters are not tokens and chat templates repeat: what is claimed may exceed what is shared by this much."""
WORDS_SLACK = 1.5
"""A word has at least one token. Some vocabularies hold pairs of words, so half as many more are let pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What we know about a request before the backend answers.

    ``donor_tokens`` is the length of the primed donors as the server counted it. ``shared`` is the share of the
    recipient's text that a donor contains too: the most that can be reused. ``alone`` means that no other request
    ran between the two readings of the counters. ``max_tokens`` is the longest answer that was asked for.
    """

    must_be_cold: bool = False
    may_reuse: bool = True
    other_tenant: bool = False
    donor_tokens: int | None = None
    shared: float | None = None
    alone: bool = True
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """The verdict on one request, under the names of its record.

    ``backend_confirmed_tokens`` is None if there was no witness of reuse.
    """

    backend_confirmed_tokens: int | None = None
    exact_tokens: int | None = None
    reused_tokens: int | None = None
    recomputed_tokens: int | None = None
    prefill_tokens: int | None = None
    risk: float | None = None
    external_confirmed_tokens: int | None = None
    fuzzy_confirmed_tokens: int | None = None
    confirmation_sources: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    flush_contaminated: bool | None = None


def confirm(answer: ServerAnswer, expected: Expectation, delta: CounterDelta | None = None) -> Confirmation:
    """Weigh the witnesses of one answer. The audit stream is joined later, by `audit.join_audit`."""
    receipt = answer.receipt or {}
    parts = {kind: read_count(receipt.get(f"{kind}_tokens")) for kind in ("exact", "reused", "recomputed", "prefill")}
    counters = _CounterMovement.from_delta(delta, expected.alone)
    said = {
        "receipt": parts["reused"],
        "usage": answer.cached_semantic if answer.cached_tokens != 0 else 0,
        "prometheus": counters.reused if counters.believable else None,
    }
    statements = {source: tokens for source, tokens in said.items() if tokens is not None}
    exact = parts["exact"]
    if exact is None:
        exact = answer.cached_exact
    if exact is None and counters.believable:
        exact = counters.exact
    if exact is None and answer.cached_tokens is not None and "receipt" not in statements:
        exact = max(answer.cached_tokens - max(statements.values(), default=0), 0)
    if exact is None and not statements.get("receipt"):
        exact = counters.local  # a stock server without usage details still counts its prefix hits
    contradictions = [
        *answer.malformed,
        *_check_length(answer, expected.max_tokens),
        *_check_receipt(receipt, parts, answer),
        *_check_against_usage(parts, answer),
        *_check_against_counters("receipt", parts["reused"], counters),
        *_check_against_counters("usage object", answer.cached_semantic, counters),
        *_check_against_expectation(statements, exact, answer, expected),
    ]
    external = int(counters.external) if counters.external is not None and counters.believable else None
    cached = max(exact or 0, answer.cached_tokens or 0, *(statements.values() or (0,)))
    known = exact is not None or answer.cached_tokens is not None or bool(statements)
    return Confirmation(
        backend_confirmed_tokens=_decide_confirmed(statements.values(), exact, answer.cached_tokens, expected),
        exact_tokens=exact,
        reused_tokens=parts["reused"],
        recomputed_tokens=parts["recomputed"],
        prefill_tokens=parts["prefill"],
        risk=read_float(receipt.get("risk")),
        external_confirmed_tokens=external,
        fuzzy_confirmed_tokens=answer.cached_semantic,
        confirmation_sources=_list_sources(statements, answer),
        contradictions=tuple(contradictions),
        flush_contaminated=(cached > 0 if known else None) if expected.must_be_cold else None,
    )


def _decide_confirmed(
    statements: Iterable[int], exact: int | None, cached: int | None, expected: Expectation
) -> int | None:
    numbers = list(statements)
    if expected.other_tenant:  # another tenant's exact prefix is a leak as well
        return None if exact is None and not numbers else max(numbers, default=0) + (exact or 0)
    if not numbers:
        return None
    if not expected.may_reuse:
        return max(numbers)
    return min(numbers) if cached is None else min(*numbers, cached)


def _list_sources(statements: Mapping[str, int], answer: ServerAnswer) -> tuple[str, ...]:
    named = list(statements)
    if answer.cached_tokens is not None and "usage" not in named:
        named.append("usage")
    return tuple(source for source in ("receipt", "usage", "prometheus") if source in named)


@dataclass(frozen=True, slots=True)
class _CounterMovement:
    """How the server's counters moved during a request. ``believable``: they counted this request and no other."""

    reused: int | None = None
    exact: int | None = None
    external: float | None = None
    requests: float | None = None
    believable: bool = False
    local: int | None = None

    @classmethod
    def from_delta(cls, delta: CounterDelta | None, alone: bool) -> _CounterMovement:
        if delta is None or delta.reset_detected or not alone:
            return cls()
        requests = delta.compute_rise(*REQUESTS)
        reused, external = delta.compute_rise(*REUSED_TOKENS), delta.compute_rise(*EXTERNAL_HITS)
        moved = reused if reused is not None else external
        exact, local = delta.compute_rise(*EXACT_TOKENS), delta.compute_rise(*LOCAL_HITS)
        return cls(
            None if moved is None else int(moved),
            None if exact is None else int(exact),
            external,
            requests,
            believable=moved is not None and requests in (None, 1),
            local=int(local) if local is not None and requests in (None, 1) else None,
        )


def _check_length(answer: ServerAnswer, most: int | None) -> Iterable[str]:
    """Find an answer beyond what was asked for: by its own count, or by its words, which a server can't count away."""
    if most is None:
        return
    words = len(answer.text.split())
    if answer.output_tokens is not None and answer.output_tokens > most:
        yield f"the answer has {answer.output_tokens} tokens, {most} were asked for"
    elif words > most * WORDS_SLACK + 8:
        yield f"the answer has {words} words, {most} tokens were asked for"


def _check_receipt(receipt: Mapping[str, Any], parts: Mapping[str, int | None], answer: ServerAnswer) -> Iterable[str]:
    reused = parts["reused"]
    if reused is None:
        if receipt:
            yield "the receipt does not say how many tokens were reused"
        return
    if None not in parts.values() and answer.prompt_tokens is not None:
        total = sum(value or 0 for value in parts.values())
        if total != answer.prompt_tokens:
            yield f"the receipt's parts sum to {total}, the prompt has {answer.prompt_tokens} tokens"
    outcome = receipt.get("outcome")
    if outcome is not None and (outcome == MATERIALIZED) != (reused > 0):
        yield f"the receipt says {outcome} with {reused} tokens reused"
    if reused > 0 and "donors" in receipt and not receipt["donors"]:
        yield f"the receipt claims {reused} reused tokens and names no donor"


def _check_against_usage(parts: Mapping[str, int | None], answer: ServerAnswer) -> Iterable[str]:
    if parts["reused"] is None or answer.cached_tokens is None:
        return
    held = (parts["exact"] or 0) + parts["reused"]
    if answer.cached_tokens < held:
        yield f"usage counts {answer.cached_tokens} cached tokens, the receipt {held}"
    # an engine that claims one range and fills its gaps counts recomputed tokens as cached; that is allowed
    elif answer.cached_tokens > held + (parts["recomputed"] or 0):
        yield f"usage counts {answer.cached_tokens} cached tokens, the receipt only {held}"
    if answer.cached_semantic is not None and answer.cached_semantic != parts["reused"]:
        yield f"usage counts {answer.cached_semantic} semantic tokens, the receipt {parts['reused']}"


def _check_against_counters(who: str, reused: int | None, counters: _CounterMovement) -> Iterable[str]:
    if reused is None or counters.reused is None:
        return
    if counters.requests == 0 and reused > 0:
        yield f"the {who} claims {reused} reused tokens, the counters saw no request"
    elif counters.believable and counters.reused != reused:
        moved = f"moved by {counters.reused}" if counters.reused else "did not move"
        yield f"the {who} claims {reused} reused tokens, the counters {moved}"


def _check_against_expectation(
    statements: Mapping[str, int], exact: int | None, answer: ServerAnswer, expected: Expectation
) -> Iterable[str]:
    reused = max(statements.values(), default=0)
    if expected.must_be_cold:
        cached = max(exact or 0, answer.cached_tokens or 0)
        if reused > 0:
            yield f"{reused} tokens reused where no donor was primed"
        elif cached > 0:
            yield f"{cached} tokens cached right after the cache was emptied"
        return
    if expected.other_tenant:
        held = max(answer.cached_tokens or 0, (exact or 0) + reused)
        if held > 0:
            yield f"{held} tokens of another tenant were served"
        return
    if expected.donor_tokens is not None and reused > expected.donor_tokens:
        yield f"{reused} tokens reused of donors that hold {expected.donor_tokens}"
    if expected.shared is not None and answer.prompt_tokens:
        most = expected.shared * answer.prompt_tokens * SLACK_SHARE + SLACK_TOKENS
        if reused > most:
            share = f"donors share {expected.shared:.0%} of the text"
            yield f"{reused} of {answer.prompt_tokens} tokens reused, but {share}"


def measure_shared_text(recipient: str, donors: Sequence[str]) -> float:
    """Return the share of the recipient's characters inside 32-character windows of a donor: the most that can be
    reused.

    >>> measure_shared_text("x" * 10, ["x" * 10]), round(measure_shared_text("q" * 32 + "a" * 64, ["a" * 64]), 2)
    (0.0, 0.67)
    """
    if len(recipient) < WINDOW_CHARS:
        return 0.0
    known = {donor[at : at + WINDOW_CHARS] for donor in donors for at in range(len(donor) - WINDOW_CHARS + 1)}
    covered, end = 0, 0
    for at in range(len(recipient) - WINDOW_CHARS + 1):
        if recipient[at : at + WINDOW_CHARS] in known:
            covered += at + WINDOW_CHARS - max(end, at)
            end = at + WINDOW_CHARS
    return covered / len(recipient)
