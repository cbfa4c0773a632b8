"""Sums over groups of prompts: by length and by tenant."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

BUCKET_EDGES = (256, 1024, 4096, 16_384, 65_536)
MOST_TENANTS = 1000
OTHERS = "(other tenants)"


@dataclass(slots=True)
class GroupTally:
    """Tokens of the prompts of a group: in all, saved by the exact prefix cache, saved by every step up to balanced."""

    prompts: int = 0
    prompt_tokens: int = 0
    prefix_saved_tokens: int = 0
    saved_tokens: int = 0


class GroupTallies:
    """Tallies by prompt length and by tenant; tenants beyond the first thousand share one."""

    def __init__(self) -> None:
        self._buckets = [GroupTally() for _ in range(len(BUCKET_EDGES) + 1)]
        self._tenants: dict[str, GroupTally] = {}

    def add(self, tenant: str, tokens: int, computed_prefix: int, computed: int) -> None:
        if tenant not in self._tenants and len(self._tenants) >= MOST_TENANTS:
            tenant = OTHERS
        for tally in (
            self._buckets[bisect_right(BUCKET_EDGES, tokens)],
            self._tenants.setdefault(tenant, GroupTally()),
        ):
            tally.prompts += 1
            tally.prompt_tokens += tokens
            tally.prefix_saved_tokens += tokens - computed_prefix
            tally.saved_tokens += tokens - computed

    def list_lengths(self) -> dict[str, dict[str, Any]]:
        return {name: asdict(tally) for name, tally in zip(bucket_names(), self._buckets, strict=True)}

    def list_tenants(self) -> dict[str, dict[str, Any]]:
        """The largest first."""
        largest = sorted(self._tenants.items(), key=lambda item: -item[1].prompt_tokens)
        return {name: asdict(tally) for name, tally in largest}


def bucket_names() -> list[str]:
    """Names of the prompt length buckets.

    >>> bucket_names()[:2]
    ['under 256', '256-1023']
    """
    middle = [f"{low}-{high - 1}" for low, high in pairwise(BUCKET_EDGES)]
    return [f"under {BUCKET_EDGES[0]}", *middle, f"{BUCKET_EDGES[-1]} and more"]
