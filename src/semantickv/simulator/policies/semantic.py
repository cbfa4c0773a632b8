"""The policy with fixed weights for block types, set by hand. `policies.adaptive` learns them instead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from semantickv.simulator.forest import Forest
from semantickv.simulator.plain import Block, PlainPolicy

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


class StaticSemantic(PlainPolicy):
    """Value = weight of the type x log of the uses x prefill time saved / square root of the tokens.

    New and cached blocks are valued in the same unit (milliseconds at 0.08 a token). A new block that is worth less
    than everything cached is refused.
    """

    bypass = True

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        self.type_weights = options["type_weights"]

    def priority(self, block: Block) -> float:
        fame = max(1.0, math.log(1.0 + block.uses))
        weight: float = self.type_weights.get(block.type, 1.0)
        return weight * fame * max(1.0, block.tokens * 0.08) / math.sqrt(block.tokens)

    def report_weights(self) -> dict[str, float]:
        return dict(self.type_weights)
