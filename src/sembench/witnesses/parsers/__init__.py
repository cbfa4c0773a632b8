"""One log parser for each engine; all of them return the same events. A parser never guesses from user text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from sembench.witnesses.parsers.event import EngineEvent, EngineEventKind, LogParser
from sembench.witnesses.parsers.lmcache import LmcacheParser
from sembench.witnesses.parsers.semblend import SemblendParser
from sembench.witnesses.parsers.sglang import SglangParser
from sembench.witnesses.parsers.trtllm import TrtllmParser
from sembench.witnesses.parsers.vllm import VllmParser

PARSERS: Mapping[str, Callable[[str], LogParser]] = MappingProxyType(
    {
        "vllm": VllmParser,
        "sglang": lambda _: SglangParser(),
        "trtllm": TrtllmParser,
        "lmcache": lambda _: LmcacheParser(),
        "semblend": SemblendParser,
    }
)

__all__ = ["PARSERS", "EngineEvent", "EngineEventKind", "LogParser"]
