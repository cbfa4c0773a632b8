"""How replicas stand to a request: one by one, and by columns where there are many. Both give the same numbers.

One by one, a thousand replicas take 8 ms and more; by columns half a millisecond. For a handful it is the other way
round, so both are used, and a test compares them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from semantickv.routing.fingerprint import PromptPieces
from semantickv.routing.holders import Column
from semantickv.routing.locality import Overlap
from semantickv.routing.policies import Priority, Standing
from semantickv.routing.replica import Replica

ANSWER_TOKENS = 256
"""What a request costs a replica beside its prompt, in tokens of prefill: the tokens of its answer are dear."""
NEW_SHARE = 0.5
"""A prompt of which no replica has so much is new: it goes where little was sent of late."""
RECENT_TOKENS = 512
"""What a recent request weighs against a replica when a new prompt is placed."""
MOST_SHOWN = 8
"""Of many replicas, so many are shown beside a decision: those that know most."""
_FIRST, _SECOND, _MASK = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, (1 << 64) - 1


def describe_replicas(
    replicas: Sequence[Replica], overlaps: Sequence[Overlap], pieces: PromptPieces, head: int | None
) -> list[Standing]:
    """Each replica's standing. ``head``: the hash of the prompt's beginning, where a policy ranks by it."""
    most = max(max(overlap.prefix_tokens, overlap.any_tokens) for overlap in overlaps)
    least = min(replica.recent_requests for replica in replicas)
    recent_tokens = RECENT_TOKENS if is_new(most, pieces) else 0
    return [
        Standing(
            running=replica.all_running,
            last_turn=replica.last_turn,
            waiting_tokens=replica.waiting_tokens
            + replica.waiting_elsewhere
            + ANSWER_TOKENS * replica.all_running
            + round(recent_tokens * (replica.recent_requests - least)),
            prompt_tokens=pieces.total_tokens,
            prefix_tokens=overlap.prefix_tokens,
            any_tokens=overlap.any_tokens,
            hash_rank=0 if head is None else rank_replica(head, hash_id(replica.id)),
            slowness=replica.slowness,
        )
        for replica, overlap in zip(replicas, overlaps, strict=True)
    ]


def describe_columns(
    replicas: Sequence[Replica], prefix: Column, anywhere: Column, pieces: PromptPieces, ranks: npt.NDArray[np.uint64]
) -> Standing:
    """The same, a column a fact."""
    running = np.array([replica.running + replica.running_elsewhere for replica in replicas])
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


def rank_replica(head: int, id_hash: int) -> int:
    """How high a replica ranks for a prompt's beginning (rendezvous hashing)."""
    value = head ^ id_hash
    value = (value ^ value >> 30) * _FIRST & _MASK
    value = (value ^ value >> 27) * _SECOND & _MASK
    return value ^ value >> 31


def rank_columns(head: int, id_hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`rank_replica` of every replica.

    >>> ids = np.array([hash_id("r0"), hash_id("r1")], np.uint64)
    >>> rank_columns(7, ids).tolist() == [rank_replica(7, hash_id("r0")), rank_replica(7, hash_id("r1"))]
    True
    """
    values = id_hashes ^ np.uint64(head)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))
