"""A simulated cache that takes one request after another: what each would find, what is cached now, the sums so far.

The latest requests are kept, and the cache is replayed over them with every new one. So a request's result is that of
the batch simulator, and the memory is bounded; what came before the kept requests is forgotten, which the answer says.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from semantickv.analysis.latency import BOUNDS, LatencyModel
from semantickv.simulator.capacity import Capacity
from semantickv.simulator.forest import Forest, build_forest
from semantickv.simulator.policies import POLICIES
from semantickv.simulator.simulate import SimulationResult, simulate
from semantickv.traces.segmentation import TextBlock
from semantickv.traces.trace import Trace, TraceRequest
from semblend.errors import InputError

MAX_REQUESTS = 256
MAX_BLOCKS = 512
LIVE_POLICIES = tuple(name for name in POLICIES if name not in BOUNDS)
"""Those that know the future have none here."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """What one request found in the simulated cache; nothing was measured."""

    request_id: str
    prompt_tokens: int
    hit_tokens: int
    hit_blocks: int
    blocks: tuple[TextBlock, ...]
    estimated_ttft_ms: float
    replayed_requests: int


class LiveSimulation:
    """One policy over one cache, in prefix mode. Safe to use from several threads."""

    def __init__(
        self, policy: str, capacity_tokens: int, latency: LatencyModel | None = None, most: int = MAX_REQUESTS
    ) -> None:
        if policy not in LIVE_POLICIES:
            raise InputError(f"no policy {policy!r}", hint="one of " + ", ".join(LIVE_POLICIES))
        self.policy = policy
        self.capacity = Capacity.tokens(capacity_tokens)
        self.latency = latency or LatencyModel()
        self._kept: deque[TraceRequest] = deque(maxlen=most)
        self._lock = threading.Lock()
        self._seen = self._hit_tokens = self._prompt_tokens = 0
        self._ttft_ms = 0.0

    def add(
        self, blocks: Sequence[TextBlock], *, request_id: str, session: str = "", tenant: str = ""
    ) -> SimulatedRequest:
        """Simulate one more request."""
        if not 0 < len(blocks) <= MAX_BLOCKS:
            raise InputError(f"the prompt has {len(blocks)} blocks, not 1 to {MAX_BLOCKS}", hint="send less text")
        with self._lock:
            asked = TraceRequest(
                request_id,
                float(self._seen),
                tuple(block.content_id for block in blocks),
                tuple(block.tokens for block in blocks),
                tuple(block.type for block in blocks),
                tenant=tenant or "default",
                session=session,
            )
            self._kept.append(asked)
            _, done = self._replay()
            hit_tokens, hit_blocks = int(done.hit_tokens_by_request[-1]), int(done.hit_blocks_by_request[-1])
            ttft_ms = float(self.latency.estimate_ttft_ms(asked.tokens - hit_tokens))  # type: ignore[arg-type]
            self._seen += 1
            self._hit_tokens += hit_tokens
            self._prompt_tokens += asked.tokens
            self._ttft_ms += ttft_ms
            return SimulatedRequest(
                request_id, asked.tokens, hit_tokens, hit_blocks, tuple(blocks), ttft_ms, len(self._kept)
            )

    def describe_cache(self) -> dict[str, Any]:
        """What is cached now."""
        by_type: dict[str, int] = {}
        blocks = 0
        with self._lock:
            if self._kept:
                forest, done = self._replay()
                held = done.cached_nodes
                blocks = int(held.sum())
                for kind, tokens in zip(forest.types[held].tolist(), forest.tokens[held].tolist(), strict=True):
                    name = forest.trace.type_names[kind]
                    by_type[name] = by_type.get(name, 0) + tokens
        return {
            "simulated": True,
            "policy": self.policy,
            "capacity_tokens": self.capacity.size,
            "used_tokens": sum(by_type.values()),
            "blocks": blocks,
            "tokens_by_type": by_type,
        }

    def summarize(self) -> dict[str, Any]:
        """The sums since the start."""
        seen = self._seen
        return {
            "simulated": True,
            "policy": self.policy,
            "requests": seen,
            "prompt_tokens": self._prompt_tokens,
            "tokens_saved": self._hit_tokens,
            "token_hit_rate": self._hit_tokens / self._prompt_tokens if self._prompt_tokens else None,
            "avg_ttft_ms": round(self._ttft_ms / seen, 3) if seen else None,
        }

    def _replay(self) -> tuple[Forest, SimulationResult]:
        """Run the kept requests through a new cache."""
        first = self._kept[0].arrival_s
        kept = [replace(request, arrival_s=request.arrival_s - first) for request in self._kept]
        forest = build_forest(Trace.from_requests(kept), "prefix")
        return forest, simulate(forest, self.policy, self.capacity)
