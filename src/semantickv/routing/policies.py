"""Routing policies. A policy is a priority: a function of the replicas' standing; the highest goes first.

A standing holds a column of numbers for each fact, a row a replica, and a policy gives columns: a thousand replicas
take half a millisecond, where one by one they would take 8 ms and more.

The two that follow caches count in tokens: what waits on a replica already, plus what it would have to compute of this
prompt, which weighs eight times as much. So a replica with the prompt in its cache wins until eight times the work that
the cache saves waits there: a token computed a second time delays everyone, and takes the room of another one. What a
replica that is measured to be slow has to do counts by its own time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from semantickv.routing.fingerprint import PromptPieces
from semantickv.routing.locality import Column
from semantickv.routing.replica import Replica

WORK_WEIGHT = 8
"""Waiting tokens that are as bad as one to compute. With 1, routers of 4 engines computed up to 60 % more tokens, and
requests waited up to 50 % longer (docs/research/decisions/placement.md)."""


Numbers = Any
"""A number, or a column of numbers."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Replicas, seen from one request. ``last_turn`` is the number of the request that each got last."""

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

ANSWER_TOKENS = 256
"""What a request costs a replica beside its prompt, in tokens of prefill: the tokens of its answer are dear."""
NEW_SHARE = 0.5
"""A prompt of which no replica has so much is new: it goes where little was sent of late."""
RECENT_TOKENS = 512
"""What a recent request weighs against a replica when a new prompt is placed."""
MOST_SHOWN = 8
"""Of many replicas, so many are shown beside a decision: those that know most."""
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def describe_replicas(
    replicas: Sequence[Replica], prefix: Column, anywhere: Column, pieces: PromptPieces, ranks: npt.NDArray[np.uint64]
) -> Standing:
    """How replicas stand to a request. ``ranks``: of each for the prompt's beginning, where a policy asks."""
    running = np.array([replica.all_running for replica in replicas])
    waiting = np.array([replica.waiting_tokens + replica.waiting_elsewhere for replica in replicas])
    waiting += ANSWER_TOKENS * running
    if is_new(max(int(prefix.max()), int(anywhere.max())), pieces):
        recent = np.array([replica.recent_requests for replica in replicas])
        waiting += np.rint(RECENT_TOKENS * (recent - recent.min())).astype(np.int64)
    last_turn = np.array([replica.last_turn for replica in replicas])
    slowness = np.array([replica.slowness for replica in replicas])
    return Standing(running, last_turn, waiting, pieces.total_tokens, prefix, anywhere, ranks, slowness)


def is_new(most_known: int, pieces: PromptPieces) -> bool:
    """Whether little of a prompt is known to anybody, if the replica that knows most knows so many tokens of it.

    The longest piece does not count: where a document stands behind another instruction, the piece across its edge is
    unknown, and most of it may be the document.

    >>> seen = PromptPieces((1, 2, 3), (1, 2, 3), (400, 90, 30), (1.0, 1.0, 1.0))
    >>> is_new(120, seen), is_new(50, seen), is_new(0, seen)
    (False, True, True)
    """
    return most_known == 0 or most_known < NEW_SHARE * (pieces.total_tokens - max(pieces.tokens))


def find_best(priority: Priority) -> int:
    """The first row whose priority is the highest, as `max` over tuples finds it.

    >>> find_best((np.array([1, 2, 2]), np.array([9, 3, 4])))
    2
    """
    rows = np.arange(len(priority[0]))
    for column in priority:
        column = column[rows]
        rows = rows[column == column.max()]
        if len(rows) == 1:
            break
    return int(rows[0])


def list_shown(columns: Standing, best: int) -> list[int]:
    """Rows to show beside a decision: the chosen one, then those that know most."""
    known = np.maximum(columns.prefix_tokens, columns.any_tokens)
    most = min(MOST_SHOWN, len(known))
    rows = np.argpartition(-known, most - 1)[:most]
    return [best, *(int(row) for row in rows if row != best)]


def pick_row(columns: Standing, row: int) -> Standing:
    """One replica's standing out of columns."""
    return Standing(
        running=int(columns.running[row]),
        last_turn=int(columns.last_turn[row]),
        waiting_tokens=int(columns.waiting_tokens[row]),
        prompt_tokens=columns.prompt_tokens,
        prefix_tokens=int(columns.prefix_tokens[row]),
        any_tokens=int(columns.any_tokens[row]),
        hash_rank=int(columns.hash_rank[row]),
        slowness=float(columns.slowness[row]) if isinstance(columns.slowness, np.ndarray) else columns.slowness,
    )


def hash_id(replica_id: str) -> int:
    """64 bits that stand for a replica, the same in every process."""
    return int.from_bytes(hashlib.blake2b(replica_id.encode(), digest_size=8).digest())


def rank_replicas(head: int, id_hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """How high each replica ranks for the hash of a prompt's beginning (rendezvous hashing)."""
    values = id_hashes ^ np.uint64(head)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))
