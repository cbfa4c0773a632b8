"""One reader for each engine's log; they all answer with the same events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from sembench.parsers.event import EngineEvent, EngineEventKind, Parser
from sembench.parsers.lmcache import LmcacheParser
from sembench.parsers.semblend import SemblendParser
from sembench.parsers.sglang import SglangParser
from sembench.parsers.trtllm import TrtllmParser
from sembench.parsers.vllm import VllmParser

PARSERS: Mapping[str, Callable[[str], Parser]] = MappingProxyType(
    {
        "vllm": VllmParser,
        "sglang": lambda _: SglangParser(),
        "trtllm": TrtllmParser,
        "lmcache": lambda _: LmcacheParser(),
        "semblend": SemblendParser,
    }
)

__all__ = ["PARSERS", "EngineEvent", "EngineEventKind", "Parser"]
