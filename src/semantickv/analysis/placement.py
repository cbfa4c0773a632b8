"""Routing policies over one trace: what each would find in the caches of the replicas that it chooses. Simulated.

Requests come when the trace says, whether or not earlier ones have ended, in simulated time: the same run gives the
same numbers, and nobody waits. Each replica has a cache of its own, apart from what the router remembers. It computes
what it lacks of one prompt after another, and decodes answers side by side. So this compares where policies send
requests under load; it says nothing about the time of a real engine.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from semantickv.edge.upstream_call import EngineAddress, Upstream
from semantickv.routing.fingerprint import PromptPieces
from semantickv.routing.locality import ReplicaMemory
from semantickv.routing.policies import POLICIES
from semantickv.routing.replica import Replica
from semantickv.routing.router import EngineReuse, RouteDecision, Router, RouteRequest
from semantickv.simulator.policies import TYPE_WEIGHTS
from semantickv.traces.segmentation import hash_content
from semantickv.traces.trace import Trace, TraceRequest

PREFILL_TOKENS_S = 10_000.0
"""Prompt tokens that a simulated replica computes in a second, of one request at a time."""
TOKEN_S = 0.012
"""Seconds between two tokens of an answer: these two are the order of a 7B model on a GPU of a data centre."""
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


def place_trace(
    trace: Trace,
    policy: str,
    *,
    replicas: int,
    cache_tokens: int,
    speed: float = 1.0,
    reuse: EngineReuse = EngineReuse.SPANS,
) -> PlacementResult:
    """Send a trace through one policy, ``speed`` times as fast as it was recorded, to engines with this ``reuse``."""
    pool = Upstream(EngineAddress("http", "nowhere", 1))  # never connected: requests end where they are placed
    router = Router([Replica(f"r{n}", pool, ReplicaMemory(cache_tokens)) for n in range(replicas)], policy, reuse=reuse)
    caches = {replica.id: ReplicaMemory(cache_tokens) for replica in router.replicas}
    homes: defaultdict[int, set[str]] = defaultdict(set)
    uses: defaultdict[int, int] = defaultdict(int)
    prefix = anywhere = total = 0
    clock = _Clock(router)
    for asked in trace.iter_requests():
        now_s = asked.arrival_s / speed
        clock.advance(now_s)
        request = RouteRequest(
            asked.tenant.encode("utf-8", "surrogatepass"), "", read_pieces(asked)
        )  # a session would hide the policy
        decision = router.choose(request)
        assert isinstance(decision, RouteDecision)
        router.start(decision, request)
        router.remember(decision, request)
        overlap = caches[decision.replica.id].match(request.pieces)
        caches[decision.replica.id].note(request.pieces)
        reused = overlap.prefix_tokens if reuse is EngineReuse.PREFIX else overlap.any_tokens
        clock.add(decision, now_s, asked.tokens - reused, asked.output_tokens)
        prefix, anywhere, total = prefix + overlap.prefix_tokens, anywhere + overlap.any_tokens, total + asked.tokens
        for block in asked.block_ids:
            homes[block].add(decision.replica.id)
            uses[block] += 1
    clock.advance(math.inf)
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


class _Clock:
    """The requests that run in simulated time. Each replica computes prompts in the order in which they came."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._free_s = dict.fromkeys((replica.id for replica in router.replicas), 0.0)
        """When each replica has computed every prompt that it has."""
        self._events: list[tuple[float, int, bool, RouteDecision]] = []
        self._count = 0

    def add(self, decision: RouteDecision, arrival_s: float, new_tokens: int, output_tokens: int) -> None:
        """Begin a request: its first byte comes after its prompt is computed, its end after its answer."""
        began_s = max(arrival_s, self._free_s[decision.replica.id])
        first_s = self._free_s[decision.replica.id] = began_s + new_tokens / PREFILL_TOKENS_S
        for at_s, is_end in ((first_s, False), (first_s + output_tokens * TOKEN_S, True)):
            self._count += 1
            heapq.heappush(self._events, (at_s, self._count, is_end, decision))

    def advance(self, now_s: float) -> None:
        """Tell the router of every first byte and every end up to ``now_s``."""
        while self._events and self._events[0][0] <= now_s:
            _, _, is_end, decision = heapq.heappop(self._events)
            if is_end:
                self._router.end(decision, had_first_byte=True)
                decision.replica.note_end(None)
            else:
                self._router.note_first_byte(decision)


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
