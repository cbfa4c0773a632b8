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
    """A size of KV in the units that engines ask for, and the GPUs that share it."""

    tokens: int
    bytes: int
    gpus: int = 1

    @property
    def gib(self) -> int:
        """Whole GiB, rounded up."""
        return -(-self.bytes // GIB)

    def divide(self, unit_bytes: int) -> int:
        """Return each GPU's share in whole units, rounded up."""
        return -(-self.bytes // (unit_bytes * self.gpus))


Write = Callable[[str, KvMemory], str]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """``policies``: those that can be set, by our names. The rest is what an operator types, made of policy and memory.

    ``write_host`` asks for host memory beside the GPU's; ``write_own`` is for the GPU's memory alone: empty where the
    engine takes all of it by itself and has one policy. ``default_tokens``: the pool without a flag, where that is not
    all that the GPU has; ``least_host_bytes``: what it takes of the host without a flag. ``memories`` are the kinds
    that can be set.
    """

    policies: tuple[str, ...]
    write_own: Write
    write_host: Write | None = None
    memories: tuple[str, ...] = ("hbm", "dram")
    default_tokens: int | None = None
    least_host_bytes: int = 0


def _write_sglang(policy: str) -> str:
    return f"python -m sglang.launch_server --model-path MODEL --radix-eviction-policy {policy}"


ENGINES: Final[Mapping[str, EngineChoice]] = MappingProxyType(
    {
        "vllm": EngineChoice(
            ("lru",), lambda *_: "", lambda _, memory: f"vllm serve MODEL --kv-offloading-size {memory.gib}"
        ),
        "sglang": EngineChoice(
            ("lru", "lfu"),
            lambda policy, _: "" if policy == "lru" else _write_sglang(policy),
            lambda policy, memory: (
                f"{_write_sglang(policy)} --enable-hierarchical-cache --hicache-size {memory.divide(10**9)}"
            ),
        ),
        "lmcache": EngineChoice(
            ("lru", "lfu", "fifo"),
            lambda *_: "",
            lambda policy, memory: (
                f"LMCACHE_CACHE_POLICY={policy.upper()} LMCACHE_LOCAL_CPU=true "
                f"LMCACHE_MAX_LOCAL_CPU_SIZE={memory.divide(GIB)}"
            ),
            ("dram",),
            least_host_bytes=5 * GIB,
        ),
        "semblend": EngineChoice(
            ("lru",),
            lambda _, memory: f"semblend serve --model MODEL --pool-tokens {memory.tokens}",
            memories=("hbm",),
            default_tokens=32_768,
        ),
    }
)


def list_engines_with(policy: str) -> tuple[str, ...]:
    """Name the engines that have a policy.

    >>> list_engines_with("lfu"), list_engines_with("gdsf")
    (('sglang', 'lmcache'), ())
    """
    return tuple(name for name, engine in ENGINES.items() if policy in engine.policies)
