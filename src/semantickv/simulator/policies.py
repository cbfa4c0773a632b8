"""Policies by name, and what their compiled loops in `semantickv.simulator.kernels` are given.

A policy of your own is a `PlainPolicy` and runs in plain Python; ``tests/plain_policies.py`` has every policy of the
table in that form, short enough to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from semantickv.simulator.forest import Forest
from semantickv.simulator.plain import PlainPolicy
from semblend.errors import InputError
from semblend.eviction.plan import AdaptivePlan, limit_history

TAIL_TOKENS: Final = 2048  # the end of a prompt that may be computed again within the time to the first token
FIRST_SESSION: Final = 1 << 40  # numbers of sessions begin here, so that none is the number of a node
TYPE_WEIGHTS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "system": 2.4,
        "template": 2.0,
        "code": 1.6,
        "legal_evidence": 1.4,
        "retrieved_context": 1.4,
        "tool_output": 1.1,
        "assistant": 1.0,
        "other": 0.8,
        "user": 0.7,
    }
)


@dataclass(frozen=True)
class Policy:
    """A policy by name: of your own (``plain``), or a compiled one (``kernel``).

    ``bypass``: all blocks of a request are inserted, then the least valuable of all are evicted: a new block may be
    refused.
    """

    name: str
    summary: str
    plain: Callable[[], PlainPolicy] | None = None
    kernel: str = ""
    bypass: bool = False
    offline: bool = False
    refuses: bool = False  # has an admission rule of its own


_TABLE: Final = (
    Policy("fifo", "the longest cached goes first", kernel="priority:FIFO"),
    Policy("lru", "the longest unused goes first", kernel="priority:LRU"),
    Policy("lfu", "the least often used goes first", kernel="priority:LFU"),
    Policy("lfu_all", "the least often used of all time goes first", kernel="priority:LFU_ALL"),
    Policy("lru2", "the longest since its last use but one goes first", kernel="priority:LRU2"),
    Policy("slru", "lru, first among what was used once", kernel="priority:SLRU"),
    Policy("tlru", "lru, first among the ends of long prompts", kernel="priority:TLRU"),
    Policy("lhd", "fewest expected hits for space and time", kernel="aged:LHD", bypass=True),
    Policy("workload_aware", "least likely to be used soon", kernel="aged:WORKLOAD_AWARE", bypass=True),
    Policy("size_aware_lru", "last use divided by tokens", kernel="priority:SIZE_LRU"),
    Policy("static_semantic", "fixed worth of a type, uses and size", kernel="priority:STATIC", bypass=True),
    Policy("adaptive_semantic", "learns what comes back, and when", kernel="adaptive:", bypass=True),
    Policy("sieve", "a hand passes over what was used", kernel="queues:SIEVE"),
    Policy("s3fifo", "a small queue for newcomers, a main one", kernel="queues:S3FIFO"),
    Policy("gdsf", "uses per unit of space, with ageing", kernel="priority:GDSF"),
    Policy("lfuda", "uses, with ageing", kernel="priority:LFUDA"),
    Policy("arc", "recent and frequent, with a border that learns", kernel="queues:ARC"),
    Policy("tinylfu", "lru behind admission by frequency", kernel="priority:TINY", refuses=True),
    Policy("belady", "needed furthest in the future goes first", kernel="priority:BELADY", offline=True),
    Policy("belady_bypass", "as belady, and may refuse blocks", kernel="priority:BELADY", bypass=True, offline=True),
)
POLICIES: Final[Mapping[str, Policy]] = MappingProxyType({entry.name: entry for entry in _TABLE})


def find_policy(name: str | Policy) -> Policy:
    """Return the policy of this name; a `Policy` of your own is returned as it is."""
    if isinstance(name, Policy):
        return name
    if name not in POLICIES:
        raise InputError(f"unknown policy {name!r}", hint="one of " + ", ".join(POLICIES))
    return POLICIES[name]


def count_tokens_to_end(forest: Forest) -> npt.NDArray[np.int32]:
    """Count for every access the tokens from the beginning of its block to the end of its request."""
    trace = forest.trace
    total = np.concatenate(([0], np.cumsum(trace.tokens, dtype=np.int64)))
    ends = np.repeat(total[trace.starts[1:]], np.diff(trace.starts))
    return (ends - total[:-1]).astype(np.int32)


def build_edges(capacity: int) -> list[float]:
    """Build the limits of the ages, those of the learning policy."""
    edges: list[float] = AdaptivePlan.build(max(1, capacity)).edges.tolist()
    return edges


def build_plan(capacity: int, forest: Forest, options: dict[str, Any]) -> AdaptivePlan:
    """Build the plan of one run; a trace shorter than the history needs no more room than its accesses and sessions."""
    history = int(options.get("history", limit_history(capacity)))
    shortest = max(1024, len(forest.node) + len(forest.trace))
    return AdaptivePlan.build(capacity, share=float(options.get("share", 1.0)), history=min(history, shortest))


def number_sessions(forest: Forest) -> npt.NDArray[np.int64]:
    """Number the sessions of a trace, by request; 0 where a request has none."""
    names = forest.trace.sessions
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(name, FIRST_SESSION + len(numbers)) if name else 0 for name in names]
    return np.array(found or [0] * len(forest.trace), np.int64)
