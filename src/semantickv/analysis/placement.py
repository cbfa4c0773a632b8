"""Routing policies over one trace: what each would find in the caches of the replicas that it chooses. Simulated.

Each replica has a cache of its own, apart from what the router remembers, and requests come one after another. So this
compares where policies send requests; it says nothing about time.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from semantickv.edge.addresses import EngineAddress
from semantickv.edge.pool import ConnectionPool
from semantickv.routing.fingerprint import PromptPieces
from semantickv.routing.locality import ReplicaMemory
from semantickv.routing.policies import POLICIES
from semantickv.routing.replica import Replica
from semantickv.routing.router import RouteDecision, Router, RouteRequest
from semantickv.simulator.policies.semantic import TYPE_WEIGHTS
from semantickv.traces.request import TraceRequest
from semantickv.traces.segmentation import hash_content
from semantickv.traces.trace import Trace

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class PlacementResult:
    """What one policy did with a trace. Shares are of the prompts' tokens; a copy is a replica that saw a block."""

    policy: str
    requests: int
    prefix_share: float
    any_offset_share: float
    copies_per_shared_block: float
    busiest_over_mean: float
    requests_by_replica: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; they say that they are simulated."""
        return asdict(self) | {"simulated": True}


def compare_policies(trace: Trace, *, replicas: int, cache_tokens: int) -> list[PlacementResult]:
    """Send a trace through every policy, each over ``replicas`` empty caches of ``cache_tokens`` tokens."""
    return [place_trace(trace, policy, replicas=replicas, cache_tokens=cache_tokens) for policy in POLICIES]


def place_trace(trace: Trace, policy: str, *, replicas: int, cache_tokens: int) -> PlacementResult:
    """Send a trace through one policy."""
    pool = ConnectionPool(EngineAddress("http", "nowhere", 1))  # never connected: requests end where they are placed
    router = Router([Replica(f"r{n}", pool, ReplicaMemory(cache_tokens)) for n in range(replicas)], policy)
    caches = {replica.id: ReplicaMemory(cache_tokens) for replica in router.replicas}
    homes: defaultdict[int, set[str]] = defaultdict(set)
    uses: defaultdict[int, int] = defaultdict(int)
    prefix = anywhere = total = 0
    for asked in trace.iter_requests():
        request = RouteRequest(
            asked.tenant.encode("utf-8", "surrogatepass"), "", read_pieces(asked)
        )  # a session would hide the policy
        decision = router.choose(request)
        assert isinstance(decision, RouteDecision)
        router.start(decision, request)
        router.remember(decision, request)
        router.end(decision, None, had_first_byte=False)
        overlap = caches[decision.replica.id].match(request.pieces)
        caches[decision.replica.id].note(request.pieces)
        prefix, anywhere, total = prefix + overlap.prefix_tokens, anywhere + overlap.any_tokens, total + asked.tokens
        for block in asked.block_ids:
            homes[block].add(decision.replica.id)
            uses[block] += 1
    shared = [len(homes[block]) for block, count in uses.items() if count > 1]
    served = tuple(replica.served for replica in router.replicas)
    return PlacementResult(
        policy,
        len(trace),
        prefix / total if total else 0.0,
        anywhere / total if total else 0.0,
        sum(shared) / len(shared) if shared else 0.0,
        max(served) * len(served) / max(1, sum(served)),
        served,
    )


def read_pieces(request: TraceRequest) -> PromptPieces:
    """Read the blocks of a request as the pieces of a prompt. Tenants have no hash in common."""
    salt = hash_content(request.tenant)
    hashes, chains, chain = [], [], salt
    for block in request.block_ids:
        value = (block * 0x9E3779B97F4A7C15 + salt) & _MASK
        chain = ((chain ^ value) * 0xBF58476D1CE4E5B9 + 1) & _MASK
        hashes.append(value)
        chains.append(chain)
    weights = tuple(TYPE_WEIGHTS.get(kind, TYPE_WEIGHTS["other"]) for kind in request.block_types)
    return PromptPieces(tuple(hashes), tuple(chains), request.block_tokens, weights)
