"""Policies of serving engines: SLRU and T-LRU as SGLang has them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from semantickv.simulator.forest import Forest
from semantickv.simulator.plain import Block, PlainPolicy

SEGMENT: Final = 1 << 40  # one segment's distance from the next, in accesses
TAIL_TOKENS: Final = 2048  # the end of a prompt that may be computed again within the time to the first token


def count_tokens_to_end(forest: Forest) -> npt.NDArray[np.int32]:
    """Count for every access the tokens from the beginning of its block to the end of its request."""
    trace = forest.trace
    total = np.concatenate(([0], np.cumsum(trace.tokens, dtype=np.int64)))
    ends = np.repeat(total[trace.starts[1:]], np.diff(trace.starts))
    return (ends - total[:-1]).astype(np.int32)


class Slru(PlainPolicy):
    """LRU in two segments: what was used once since it came leaves before what was used again."""

    def priority(self, block: Block) -> float:
        return block.used + (SEGMENT if block.uses > 1 else 0)


class Tlru(PlainPolicy):
    """Tail-optimized LRU (arXiv:2510.15152): the last ``tail_tokens`` of the longest prompt through a block go first.

    Computing them again keeps the next turn within its time to the first token. With 0 it is LRU.
    """

    def begin(self, capacity: int, forest: Forest, options: dict[str, Any]) -> None:
        super().begin(capacity, forest, options)
        self.tail = int(options["tail_tokens"])
        self.to_end = count_tokens_to_end(forest)
        self.longest: dict[int, int] = {}

    def on_request(self, r: int, nodes: list[int], first: int) -> None:  # noqa: ARG002
        self.first = {node: first + place for place, node in reversed(list(enumerate(nodes)))}

    def priority(self, block: Block) -> float:
        to_end = int(self.to_end[self.first[block.node]])
        self.longest[block.node] = max(self.longest.get(block.node, 0), to_end)
        return block.used - (SEGMENT if self.longest[block.node] <= self.tail else 0)
