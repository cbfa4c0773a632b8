"""Chooses a replica for a request: who can serve, the session's home, the policy, the load guard.

A decision is a value with its reason. What the router remembers is bounded: pieces by tokens, sessions by number.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from semantickv.routing.fingerprint import NO_PIECES, PromptPieces
from semantickv.routing.locality import NO_OVERLAP, Column, HolderIndex, Overlap
from semantickv.routing.policies import (
    POLICIES,
    Standing,
    describe_replicas,
    find_best,
    hash_id,
    list_shown,
    pick_row,
    rank_replicas,
)
from semantickv.routing.replica import Health, Replica
from semblend.confirm.outcome import Outcome
from semblend.errors import ConfigError

MOST_SESSIONS = 100_000
RECENT_PLACED = 16
"""The recent past, in requests that a replica gets on average. In requests of the whole fleet it would be nothing for a
thousand replicas: all new prompts went to the few that had their first lines (decisions/placement.md)."""
KEPT_RATES = 128
"""Measured speeds of the whole fleet that say how long an answer may take to begin."""
MIN_RATE_TOKENS = 256
"""A shorter prompt counts as this long: a request has a cost of its own."""
COMPARE_EVERY = 8
MIN_SLOWNESS, MAX_SLOWNESS = 2.0, 16.0
OVERDUE_S = 1.0
LEAST_OVERLAP_TOKENS = 64
"""Less than this in common is chance: a greeting, a role name."""


class EngineReuse(StrEnum):
    """What the engines behind the router can reuse."""

    PREFIX = "prefix"
    """Equal beginnings only: stock vLLM, SGLang, TensorRT-LLM."""
    SPANS = "spans"
    """Equal passages anywhere: engines with semblend in them."""

    @classmethod
    def parse(cls, word: str) -> EngineReuse:
        """Read SEMANTICKV_ENGINE_REUSE; `ConfigError` for a word that is none of these."""
        if word not in list(cls):
            raise ConfigError(f"SEMANTICKV_ENGINE_REUSE={word} is unknown", hint="one of " + ", ".join(cls))
        return cls(word)

    def describe(self) -> str:
        """What a router assumes about its engines, and what to set if they are others; for its start."""
        if self is EngineReuse.PREFIX:
            return (
                "engines are taken to reuse equal beginnings only (engine reuse: prefix); "
                "with semblend in them: --engine-reuse spans"
            )
        return (
            "engines are taken to reuse equal passages anywhere, as with semblend in them (engine reuse: spans); "
            "for stock vLLM or SGLang: --engine-reuse prefix, or SEMANTICKV_ENGINE_REUSE=prefix"
        )


class RouteReason(StrEnum):
    """Why a request went where it went."""

    POLICY = "policy"
    SESSION = "session"
    ONLY_ONE = "only_one"


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What is known about a request before it is placed. ``namespace`` keeps tenants apart."""

    namespace: bytes = b""
    session: str = ""
    pieces: PromptPieces = NO_PIECES
    is_arranged: bool = False
    """Its passages will be put in the replica's order: then they count wherever they stand."""


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """A replica, and why. ``new_tokens`` is what it will have to compute of the prompt, as far as the router knows."""

    replica: Replica
    outcome: Outcome
    reason: RouteReason
    overlap: Overlap
    prompt_tokens: int
    new_tokens: int
    candidates: Sequence[Replica] = ()
    """The replicas that were compared; of many, the chosen one and those that know most."""
    standings: Sequence[Standing] = ()
    """How each of them stood; empty where no policy was asked."""

    @property
    def score(self) -> float:
        """Share of the prompt that the replica has seen, in [0, 1]."""
        return (
            max(self.overlap.prefix_tokens, self.overlap.any_tokens) / self.prompt_tokens if self.prompt_tokens else 0.0
        )


@dataclass(frozen=True, slots=True)
class NoReplica:
    """Nobody can serve: all are down, or all have been tried."""

    tried: int


@dataclass(frozen=True, slots=True)
class LoadGuard:
    """A replica may have ``factor`` times the mean of the running requests, and ``slack`` more."""

    factor: float = 1.5
    slack: int = 6

    def compute_limit(self, running: Sequence[int]) -> int:
        """Most requests that a replica may have before this one is added."""
        return math.ceil(self.factor * (sum(running) + 1) / len(running)) + self.slack


class Router:
    """For one event loop. After a `choose` that names a replica come `start`, `remember` and, in the end, `end`."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        policy: str = "semantic_locality",
        *,
        reuse: EngineReuse = EngineReuse.SPANS,
        keep_sessions: bool = True,
        guard: LoadGuard | None = None,
        hang_s: float = 10.0,
    ) -> None:
        if not replicas:
            raise ConfigError("there is no replica to route to", hint="SEMANTICKV_REPLICAS=http://a:8101,http://b:8102")
        if policy not in POLICIES:
            raise ConfigError(f"no routing policy {policy!r}", hint="one of " + ", ".join(POLICIES))
        self.policy = policy
        self.reuse = reuse
        self.hang_s = hang_s
        self._keep_sessions = keep_sessions
        self._guard = guard or LoadGuard()
        self._turn = 0
        self._homes: OrderedDict[int, Replica] = OrderedDict()
        self._rates: dict[bool, deque[float]] = {True: deque(maxlen=KEPT_RATES), False: deque(maxlen=KEPT_RATES)}
        self._measured = 0
        self._set_replicas(replicas)

    def _set_replicas(self, replicas: Sequence[Replica]) -> None:
        self.replicas = tuple(replicas)
        self._fading = 1 - 1 / (RECENT_PLACED * len(self.replicas))
        self._row_of = {replica: row for row, replica in enumerate(self.replicas)}
        self._id_hashes = np.array([hash_id(replica.id) for replica in self.replicas], np.uint64)
        self._index = HolderIndex(len(self.replicas))
        for replica, row in self._row_of.items():
            replica.memory.join(self._index, row)

    def add_replica(self, replica: Replica) -> None:
        """Send requests to this replica too, from now on."""
        self._set_replicas((*self.replicas, replica))

    def remove_replica(self, replica: Replica) -> None:
        """Send this replica no more requests; those that run there end there. The last one cannot go."""
        rest = [one for one in self.replicas if one is not replica]
        if not rest:
            raise ConfigError("the last replica cannot be removed", hint="add another one first")
        self._set_replicas(rest)
        replica.memory.join(None, 0)

    @property
    def arranges(self) -> bool:
        """Whether marked passages are put in a replica's order here."""
        return self.replicas[0].arranger is not None

    @property
    def needs_pieces(self) -> bool:
        """Whether the policy looks at prompts at all; to read and cut one of 8k tokens takes 0.1 ms."""
        return len(self.replicas) > 1 and self.policy not in ("round_robin", "least_loaded")

    @property
    def sessions(self) -> int:
        return len(self._homes)

    # -- how fast replicas are -----------------------------------------------------------------------------------------

    def note_speed(self, decision: RouteDecision, seconds: float, tokens_ahead: int, is_stream: bool) -> None:
        """A replica began an answer: it took so long for the tokens that it had to compute first."""
        replica = decision.replica
        replica.first_byte_at = time.perf_counter()
        rate = seconds / max(tokens_ahead, MIN_RATE_TOKENS)
        self._rates[is_stream].append(rate)
        (replica.stream_speed if is_stream else replica.whole_speed).add(rate)
        self._measured += 1
        if self._measured % COMPARE_EVERY == 0:
            self._compare_speeds()

    def _compare_speeds(self) -> None:
        """Say of each replica how slow it is beside the fastest one. Less than twice as slow is chance."""
        for kind in ("whole_speed", "stream_speed"):  # where both are known, streams tell more of prefill
            known = [one for one in self.replicas if getattr(one, kind).is_known]
            if len(known) < 2:
                continue
            fastest = min(getattr(one, kind).seconds_per_token for one in known)
            for one in known:
                times = getattr(one, kind).seconds_per_token / max(fastest, 1e-9)
                one.slowness = 1.0 if times < MIN_SLOWNESS else min(times, MAX_SLOWNESS)

    def _expect_s(self, tokens_ahead: int, is_stream: bool) -> float | None:
        """The longest that an answer took to begin of late, for so many tokens; None where nothing was measured."""
        rates = self._rates[is_stream] or self._rates[not is_stream]
        return max(rates) * max(tokens_ahead, MIN_RATE_TOKENS) if rates else None

    def is_overdue(self, waited_s: float, tokens_ahead: int, is_stream: bool) -> bool:
        """Whether a request has waited much longer for its first byte than others did of late."""
        expected = self._expect_s(tokens_ahead, is_stream)
        return expected is not None and waited_s > OVERDUE_S + 2 * expected

    def is_hung(self, silent_s: float, tokens_ahead: int, is_stream: bool) -> bool:
        """Whether a replica that has begun no answer for so long, although a request waits there, hangs."""
        expected = self._expect_s(tokens_ahead, is_stream)
        return expected is not None and silent_s > self.hang_s + 3 * expected

    # -- where a request goes ------------------------------------------------------------------------------------------

    def choose(self, request: RouteRequest, tried: Collection[Replica] = ()) -> RouteDecision | NoReplica:
        """Choose a replica that was not tried yet. Changes nothing."""
        down = Health.DOWN if len(self.replicas) > 1 else None  # where there is no choice, a slow /health stops nobody
        able = [one for one in self.replicas if one.health is not down and one.breaker.may_pass and one not in tried]
        if not able:
            # Breakers never shut everybody out: who answers health checks and does not hang is asked all the same.
            able = [one for one in self.replicas if one.health is Health.UP and not one.is_hung and one not in tried]
        if not able:
            return NoReplica(len(tried))
        if len(able) == 1:
            return _decide(able[0], RouteReason.ONLY_ONE, request, self._match(able[0], request))
        running = [replica.running + replica.running_elsewhere for replica in able]
        limit = self._guard.compute_limit(running)
        free = [one for one, has in zip(able, running, strict=True) if has < limit] if max(running) >= limit else able
        free = free or able
        home = self._homes.get(self.find_home_key(request)) if request.session else None
        if home is not None and home in free:
            return _decide(home, RouteReason.SESSION, request, self._match(home, request))
        rows = None if len(free) == len(self.replicas) else np.array([self._row_of[replica] for replica in free])
        prefix, anywhere = self._match_all(request)
        ranks = np.zeros_like(self._id_hashes)
        if self.policy == "prefix_hash":
            ranks = rank_replicas(_find_head(request), self._id_hashes)
        if rows is not None:
            prefix, anywhere, ranks = prefix[rows], anywhere[rows], ranks[rows]
        standing = describe_replicas(free, prefix, anywhere, request.pieces, ranks)
        best = find_best(POLICIES[self.policy](standing))
        overlap = Overlap(int(prefix[best]), int(anywhere[best]))
        shown = list_shown(standing, best)
        candidates, standings = [free[at] for at in shown], [pick_row(standing, at) for at in shown]
        return _decide(free[best], RouteReason.POLICY, request, overlap, candidates, standings)

    def start(self, decision: RouteDecision, request: RouteRequest) -> None:
        """Count a request to its replica. `remember` its prompt there soon: the next one like it may come at once."""
        replica = decision.replica
        self._turn += 1
        for one in self.replicas:
            one.recent_requests *= self._fading
        replica.last_turn = self._turn
        replica.running += 1
        replica.waiting_tokens += decision.new_tokens
        replica.recent_requests += 1
        replica.breaker.note_start()
        self._set_home(self.find_home_key(request), replica)

    def find_home_key(self, request: RouteRequest) -> int:
        """The key of a request's session among all sessions of all tenants; 0 if it has none."""
        if not request.session or not self._keep_sessions:
            return 0
        data = request.namespace + request.session.encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) or 1

    def note_placed_elsewhere(self, replica: Replica, pieces: PromptPieces, home_key: int) -> None:
        """Another router sent a prompt to a replica: it will have its KV, and the session, from now on."""
        replica.memory.note(pieces)
        replica.recent_requests += 1
        self._set_home(home_key, replica)

    def _set_home(self, key: int, replica: Replica) -> None:
        if not key or not self._keep_sessions:
            return
        self._homes[key] = replica
        self._homes.move_to_end(key)
        if len(self._homes) > MOST_SESSIONS:
            self._homes.popitem(last=False)

    def remember(self, decision: RouteDecision, request: RouteRequest) -> list[int]:
        """Remember that the replica has seen this prompt; return what is new there, for `forget`."""
        return decision.replica.memory.note(request.pieces)

    def forget(self, decision: RouteDecision, new: Sequence[int]) -> None:
        """The replica refused a prompt: what it alone brought is not there. Its session stays with the replica."""
        decision.replica.memory.forget(new)

    def note_first_byte(self, decision: RouteDecision) -> None:
        """The prompt is computed: what is left is the answer."""
        decision.replica.waiting_tokens -= decision.new_tokens

    def end(self, decision: RouteDecision, *, had_first_byte: bool) -> None:
        """Take a request off its replica. What its end says of the replica is told by `Replica.note_end`."""
        replica = decision.replica
        replica.running -= 1
        if not had_first_byte:
            replica.waiting_tokens -= decision.new_tokens

    @property
    def _ignores_prompts(self) -> bool:
        return self.policy in ("round_robin", "least_loaded", "prefix_hash")

    def _counts_beginnings_only(self, request: RouteRequest) -> bool:
        return (self.reuse is EngineReuse.PREFIX or self.policy == "cache_aware") and not request.is_arranged

    def _match(self, replica: Replica, request: RouteRequest) -> Overlap:
        """What a replica has of the prompt that its engine could reuse."""
        if not request.pieces.hashes or self._ignores_prompts:
            return NO_OVERLAP
        overlap = replica.memory.match(request.pieces)
        if self._counts_beginnings_only(request):
            return Overlap(overlap.prefix_tokens, overlap.prefix_tokens)
        return overlap

    def _match_all(self, request: RouteRequest) -> tuple[Column, Column]:
        """The same of all replicas."""
        if not request.pieces.hashes or self._ignores_prompts:
            nothing = np.zeros(len(self.replicas), np.int64)
            return nothing, nothing
        prefix, anywhere = self._index.match(request.pieces)
        return (prefix, prefix) if self._counts_beginnings_only(request) else (prefix, anywhere)


def _decide(
    replica: Replica,
    reason: RouteReason,
    request: RouteRequest,
    overlap: Overlap,
    candidates: Sequence[Replica] = (),
    standings: Sequence[Standing] = (),
) -> RouteDecision:
    total = request.pieces.total_tokens
    new = max(0, total - max(overlap.prefix_tokens, overlap.any_tokens))
    return RouteDecision(replica, name_outcome(overlap), reason, overlap, total, new, candidates, standings)


def name_outcome(overlap: Overlap) -> Outcome:
    """Name a placement in the words that everyone uses; where a request ran says nothing about what it reused."""
    if max(overlap.prefix_tokens, overlap.any_tokens) < LEAST_OVERLAP_TOKENS:
        return Outcome.COLD_FALLBACK
    if 2 * overlap.prefix_tokens >= overlap.any_tokens:
        return Outcome.EXACT_PREFIX_ROUTE
    return Outcome.SEMANTIC_PLACEMENT


def _find_head(request: RouteRequest) -> int:
    """The hash of a prompt's beginning, by which ``prefix_hash`` places it; 0 where nothing is known of it."""
    chains = request.pieces.chains
    return chains[min(3, len(chains) - 1)] if chains else 0
