"""The table of policies: name, one line, plain version, compiled version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from semantickv.simulator.plain import PlainPolicy
from semantickv.simulator.policies import adaptive, aged, classic, modern, optimal, semantic, serving
from semblend.errors import InputError


@dataclass(frozen=True)
class Policy:
    """A policy by name. ``kernel`` names its compiled twin; without one it runs in plain Python.

    ``bypass``: all blocks of a request are inserted, then the least valuable of all are evicted: a new block may be
    refused.
    """

    name: str
    summary: str
    plain: Callable[[], PlainPolicy]
    kernel: str | None = None
    bypass: bool = False
    offline: bool = False
    refuses: bool = False  # has an admission rule of its own


_TABLE: Final = (
    Policy("fifo", "the longest cached goes first", classic.Fifo, "priority:FIFO"),
    Policy("lru", "the longest unused goes first", classic.Lru, "priority:LRU"),
    Policy("lfu", "the least often used goes first", classic.Lfu, "priority:LFU"),
    Policy("lfu_all", "the least often used of all time goes first", classic.LfuAll, "priority:LFU_ALL"),
    Policy("lru2", "the longest since its last use but one goes first", classic.Lru2, "priority:LRU2"),
    Policy("slru", "lru, first among what was used once", serving.Slru, "priority:SLRU"),
    Policy("tlru", "lru, first among the ends of long prompts", serving.Tlru, "priority:TLRU"),
    Policy("lhd", "fewest expected hits for space and time", aged.Lhd, "aged:LHD", True),
    Policy("workload_aware", "least likely to be used soon", aged.WorkloadAware, "aged:WORKLOAD_AWARE", True),
    Policy("size_aware_lru", "last use divided by tokens", classic.SizeAwareLru, "priority:SIZE_LRU"),
    Policy("static_semantic", "fixed worth of a type, uses and size", semantic.StaticSemantic, "priority:STATIC", True),
    Policy("adaptive_semantic", "learns what comes back, and when", adaptive.AdaptiveSemantic, "adaptive:", True),
    Policy("sieve", "a hand passes over what was used", modern.Sieve, "queues:SIEVE"),
    Policy("s3fifo", "a small queue for newcomers, a main one", modern.S3Fifo, "queues:S3FIFO"),
    Policy("gdsf", "uses per unit of space, with ageing", classic.Gdsf, "priority:GDSF"),
    Policy("lfuda", "uses, with ageing", classic.Lfuda, "priority:LFUDA"),
    Policy("arc", "recent and frequent, with a border that learns", modern.Arc, "queues:ARC"),
    Policy("tinylfu", "lru behind admission by frequency", modern.TinyLfu, "priority:TINY", refuses=True),
    Policy("belady", "needed furthest in the future goes first", optimal.Belady, "priority:BELADY", offline=True),
    Policy(
        "belady_bypass",
        "as belady, and may refuse blocks",
        optimal.BeladyBypass,
        "priority:BELADY",
        bypass=True,
        offline=True,
    ),
)
POLICIES: Final[Mapping[str, Policy]] = MappingProxyType({entry.name: entry for entry in _TABLE})


def find_policy(name: str | Policy) -> Policy:
    """Return the policy of this name; a `Policy` of your own is returned as it is."""
    if isinstance(name, Policy):
        return name
    if name not in POLICIES:
        raise InputError(f"unknown policy {name!r}", hint="one of " + ", ".join(POLICIES))
    return POLICIES[name]
