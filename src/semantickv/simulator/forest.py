"""A trace prepared for one mode: every block access becomes the number of a node.

In prefix mode a node is a block *behind a certain beginning*: nodes form a forest with one tree for each tenant and
first block, and a request is a path from a root. In block mode a node is a block at any position, without parents.
Tenants never share nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from semantickv.traces.trace import Trace
from semblend.errors import InputError

Mode = Literal["prefix", "block"]
MODES: tuple[Mode, ...] = ("prefix", "block")


@dataclass(frozen=True, eq=False)
class Forest:
    """Nodes are numbered in order of first appearance; ``parent`` is -1 for a root and in block mode."""

    trace: Trace
    mode: Mode
    node: npt.NDArray[np.int32]  # per block access
    parent: npt.NDArray[np.int32]  # per node, as are the rest
    tokens: npt.NDArray[np.int32]
    types: npt.NDArray[np.int16]
    depth: npt.NDArray[np.int32]
    tail: npt.NDArray[np.bool_]  # per access: the last block of its request

    @property
    def nodes(self) -> int:
        return len(self.parent)

    def get_sizes(self, unit: str) -> npt.NDArray[np.int32]:
        """Return how much of the capacity each node takes, in ``unit``."""
        return self.tokens if unit == "tokens" else np.ones(self.nodes, np.int32)

    @cached_property
    def next_use(self) -> npt.NDArray[np.int32]:
        """For every access, the next request that uses its node; the number of requests if none does."""
        from semantickv.simulator.kernels import find_next_uses

        found: npt.NDArray[np.int32] = find_next_uses(self.node, self.trace.starts, self.nodes)
        return found


def build_forest(trace: Trace, mode: Mode = "prefix", *, share_tenants: bool = False) -> Forest:
    """Number the nodes of a trace for one mode."""
    from semantickv.simulator.kernels import number_nodes

    if mode not in MODES:
        raise InputError(f"unknown mode {mode!r}", hint="prefix or block")
    tenants = np.zeros(len(trace), np.int32) if share_tenants else trace.tenant
    accesses = trace.block_accesses
    slots = np.full(1 << max(4, int(accesses * 1.5).bit_length()), -1, np.int32)
    above, ids = np.empty(accesses, np.int32), np.empty(accesses, np.int64)
    node, count = number_nodes(trace.ids, trace.starts, tenants, mode == "prefix", above, ids, slots)
    return _assemble_forest(trace, mode, node, int(count))


def _assemble_forest(trace: Trace, mode: Mode, node: npt.NDArray[np.int32], count: int) -> Forest:
    """Build the forest from the node of every access.

    The facts of a node come from its first access; its size from its largest, so that a node never grows.
    """
    first = np.full(count, -1, np.int64)
    first[node[::-1]] = np.arange(len(node) - 1, -1, -1)
    tokens = np.zeros(count, np.int32)
    np.maximum.at(tokens, node, trace.tokens)
    depth = trace.place[first]
    parent = np.full(count, -1, np.int32)
    if mode == "prefix":
        below = depth > 0
        parent[below] = node[first[below] - 1]
    tail = np.zeros(len(node), bool)
    tail[trace.starts[1:][np.diff(trace.starts) > 0] - 1] = True
    return Forest(trace, mode, node, parent, tokens, trace.types[first], depth, tail)
