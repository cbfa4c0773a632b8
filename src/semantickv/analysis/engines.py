"""What engines can be told: which policies each has, and the exact words that set one and its memory.

As of vLLM 0.32, SGLang 0.5.23, LMCache 0.5.6 and this project's own engine. Policies that an engine has and the
simulator does not know (SGLang: priority; LMCache: MRU) are not here, nor are those that nobody has compared with the
engine's (SGLang: slru, tlru; this project: lfu, slru, lru2, and adaptive, which learns from less than the simulator's).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

GIB = 2**30


@dataclass(frozen=True, slots=True)
class KvMemory:
    """A size of KV, in both units that engines ask for."""

    tokens: int
    bytes: int

    @property
    def gib(self) -> float:
        return self.bytes / GIB


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """``policies``: those that can be set, by our names. ``write``: policy and memory to what an operator types.

    ``memories`` are the kinds that the words set (tiers of the price book, the usual one first), ``tier`` is how the
    page calls them.
    """

    policies: tuple[str, ...]
    write: Callable[[str, KvMemory], str]
    tier: str
    memories: tuple[str, ...] = ("hbm",)


ENGINES: Final[Mapping[str, EngineChoice]] = MappingProxyType(
    {
        "vllm": EngineChoice(
            ("lru",), lambda _, memory: f"vllm serve MODEL --kv-cache-memory-bytes {memory.bytes}", "GPU"
        ),
        "sglang": EngineChoice(
            ("lru", "lfu"),
            lambda policy, memory: (
                f"python -m sglang.launch_server --model-path MODEL --radix-eviction-policy {policy} "
                f"--max-total-tokens {memory.tokens}"
            ),
            "GPU",
        ),
        "lmcache": EngineChoice(
            ("lru", "lfu", "fifo"),
            lambda policy, memory: (
                f"LMCACHE_CACHE_POLICY={policy.upper()} LMCACHE_LOCAL_CPU=true "
                f"LMCACHE_MAX_LOCAL_CPU_SIZE={memory.bytes / 1e9:.1f}"
            ),
            "host",
            ("dram",),
        ),
        "semblend": EngineChoice(
            ("lru",),
            lambda _, memory: f"semblend serve --model MODEL --pool-tokens {memory.tokens}",
            "GPU or host",
            ("hbm", "dram"),
        ),
    }
)


def list_engines_with(policy: str) -> tuple[str, ...]:
    """Name the engines that have a policy.

    >>> list_engines_with("lfu"), list_engines_with("gdsf")
    (('sglang', 'lmcache'), ())
    """
    return tuple(name for name, engine in ENGINES.items() if policy in engine.policies)
