"""The loops of `semantickv.simulator.forest`, compiled. Importing this module imports numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from semblend.fingerprint.kernels import mix64, njit


@njit(nogil=True)
def number_nodes(ids: Any, starts: Any, tenant: Any, prefix: bool, above_of: Any, id_of: Any, slots: Any) -> Any:
    """Number the (parent, id) pairs in order of first appearance, in an open-addressed hash table."""
    mask = len(slots) - 1
    node = np.empty(len(ids), np.int32)
    count = 0
    for r in range(len(starts) - 1):
        root = -1 - tenant[r]
        above = root
        for i in range(starts[r], starts[r + 1]):
            mixed = mix64(np.uint64(ids[i]) + mix64(np.uint64(above + 0x40000000)))
            slot = np.int64(mixed & np.uint64(mask))
            while True:
                found = slots[slot]
                if found < 0:
                    slots[slot] = count
                    above_of[count] = above
                    id_of[count] = ids[i]
                    found = count
                    count += 1
                    break
                if above_of[found] == above and id_of[found] == ids[i]:
                    break
                slot = (slot + 1) & mask
            node[i] = found
            above = found if prefix else root
    return node, count


@njit(nogil=True)
def find_next_uses(node: Any, starts: Any, nodes: int) -> Any:
    """Find for every access the next request that uses its node; the number of requests if none does."""
    never = len(starts) - 1
    later = np.full(nodes, never, np.int32)
    out = np.empty(len(node), np.int32)
    for r in range(never - 1, -1, -1):
        for i in range(starts[r], starts[r + 1]):
            out[i] = later[node[i]]
        for i in range(starts[r], starts[r + 1]):
            later[node[i]] = r
    return out
