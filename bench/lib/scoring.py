"""How an answer is scored against the oracle: the same rules for us, for the peers and for the plain baselines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import lib.reporting as reporting
from lib.oracle import Mask, Tokens

# (donor id, start in the donor, start in the query, length): what any system says that it could reuse.
RawSpan = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Score:
    """One query. ``wrong`` counts tokens that a span claims and its donor does not hold there."""

    query_id: str
    kind: str
    tokens: int
    oracle_tokens: int
    recovered_tokens: int
    beyond_tokens: int
    wrong_tokens: int
    overlapping_tokens: int
    spans: int
    cpu_ms: float

    @property
    def claimed_tokens(self) -> int:
        return self.recovered_tokens + self.beyond_tokens + self.wrong_tokens


def score(
    query_id: str,
    kind: str,
    tokens: Tokens,
    covered: Mask,
    spans: Iterable[RawSpan],
    donors: dict[str, Tokens],
    cpu_ms: float,
) -> Score:
    """Checks every token of every span against its donor; only equal tokens count as recovered."""
    right = np.zeros(len(tokens), bool)
    claims = np.zeros(len(tokens), np.int32)
    wrong = count = 0
    for donor_id, donor_start, target_start, length in spans:
        count += 1
        donor = donors.get(donor_id)
        if donor is None or not _fits(donor_start, length, donor) or not _fits(target_start, length, tokens):
            wrong += max(length, 1)  # out of range, or a donor that nobody registered
            continue
        here = slice(target_start, target_start + length)
        same = donor[donor_start : donor_start + length] == tokens[here]
        wrong += int(np.count_nonzero(~same))
        right[here] |= same
        claims[here] += 1
    return Score(
        query_id,
        kind,
        tokens=len(tokens),
        oracle_tokens=int(np.count_nonzero(covered)),
        recovered_tokens=int(np.count_nonzero(right & covered)),
        beyond_tokens=int(np.count_nonzero(right & ~covered)),
        wrong_tokens=wrong,
        overlapping_tokens=int(np.sum(np.maximum(claims - 1, 0))),
        spans=count,
        cpu_ms=cpu_ms,
    )


def _fits(start: int, length: int, tokens: Tokens) -> bool:
    return start >= 0 and length > 0 and start + length <= len(tokens)


def share(part: int, whole: int) -> float | None:
    """None where there is nothing to share: missing is not zero."""
    return part / whole if whole else None


def by_kind(scores: Sequence[Score]) -> dict[str, list[Score]]:
    kinds: dict[str, list[Score]] = {}
    for item in scores:
        kinds.setdefault(item.kind, []).append(item)
    return kinds


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """One class, or all: tokens are pooled, so that a long prompt counts for its length."""
    cpu = reporting.spread([item.cpu_ms for item in scores])
    oracle = sum(item.oracle_tokens for item in scores)
    shares = [s for item in scores if (s := share(item.recovered_tokens, item.oracle_tokens)) is not None]
    return {
        "n": len(scores),
        "tokens": sum(item.tokens for item in scores),
        "oracle_tokens": oracle,
        "recovered": share(sum(item.recovered_tokens for item in scores), oracle),
        "worst_query": min(shares, default=None),
        "beyond_tokens": sum(item.beyond_tokens for item in scores),
        "wrong_tokens": sum(item.wrong_tokens for item in scores),
        "overlapping_tokens": sum(item.overlapping_tokens for item in scores),
        "found": share(sum(item.spans > 0 for item in scores), len(scores)),
        "spans_p50": reporting.spread([item.spans for item in scores])["p50"],
        "cpu_ms": cpu,
    }
