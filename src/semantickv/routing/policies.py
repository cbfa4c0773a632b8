"""Routing policies. A policy is a priority: a function of one replica's standing; the highest goes first.

A standing may also hold a column of numbers for each fact, a row a replica: a policy then gives columns.

The two that follow caches count in tokens: what waits on a replica already, plus what it would have to compute of this
prompt, which weighs eight times as much. So a replica with the prompt in its cache wins until eight times the work that
the cache saves waits there: a token computed a second time delays everyone, and takes the room of another one. What a
replica that is measured to be slow has to do counts by its own time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

WORK_WEIGHT = 8
"""Waiting tokens that are as bad as one to compute. With 1, routers of 4 engines computed up to 60 % more tokens, and
requests waited up to 50 % longer (docs/research/decisions/placement.md)."""


Numbers = Any
"""A number, or a column of numbers."""


@dataclass(frozen=True, slots=True)
class Standing:
    """One replica, seen from one request. ``last_turn`` is the number of the request that it got last."""

    running: Numbers
    last_turn: Numbers
    waiting_tokens: Numbers
    prompt_tokens: int
    prefix_tokens: Numbers
    any_tokens: Numbers
    hash_rank: Numbers
    slowness: Numbers = 1.0
    """Times as slow as the fastest replica."""

    def _cost(self, new: Numbers) -> Numbers:
        """Tokens that wait and tokens to compute, in tokens of the fastest replica's time."""
        new = new * (new > 0)
        return self.slowness * (self.waiting_tokens + new) + (WORK_WEIGHT - 1) * new

    @property
    def cost_after_prefix(self) -> Numbers:
        """What placing the request here costs, in tokens that wait, if only its beginning is reused."""
        return self._cost(self.prompt_tokens - self.prefix_tokens)

    @property
    def cost_after_any(self) -> Numbers:
        """The same, if equal passages are reused wherever they stand."""
        more = self.any_tokens - self.prefix_tokens
        return self._cost(self.prompt_tokens - self.prefix_tokens - more * (more > 0))


Priority = tuple[Numbers, ...]
RoutingPolicy = Callable[[Standing], Priority]


def round_robin(standing: Standing) -> Priority:
    """In turn."""
    return (-standing.last_turn,)


def least_loaded(standing: Standing) -> Priority:
    """The replica with the least work."""
    return (-standing.running, -standing.waiting_tokens, -standing.last_turn)


def prefix_hash(standing: Standing) -> Priority:
    """The replica that the hash of the prompt's beginning names (rendezvous hashing: few move when one goes)."""
    return (standing.hash_rank,)


def cache_aware(standing: Standing) -> Priority:
    """The replica that has most of the prompt's beginning, weighed against its work."""
    return (-standing.cost_after_prefix, -standing.last_turn)


def semantic_locality(standing: Standing) -> Priority:
    """The replica that has most of the prompt's passages, wherever they stand, weighed against its work."""
    return (-standing.cost_after_any, standing.prefix_tokens, -standing.last_turn)


POLICIES: Mapping[str, RoutingPolicy] = MappingProxyType(
    {policy.__name__: policy for policy in (round_robin, least_loaded, prefix_hash, cache_aware, semantic_locality)}
)
