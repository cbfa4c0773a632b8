"""SGLang's radix cache lets go first what one of our eviction policies values least.

SGLang asks a strategy for the priority of every leaf that may leave; which leaves may (nobody runs on them, nothing
hangs below them) stays its own. A leaf holds many tokens and may be split at any of them, a policy knows blocks of
`BLOCK_TOKENS` by their content and all before it: a leaf is worth what its blocks are worth on average.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from semblend.eviction.policy import EvictionPolicy

BLOCK_TOKENS = 16
ASKED_BLOCKS = 8
"""Blocks of a leaf that are priced, evenly spaced; the others are of the same requests."""


@dataclass(frozen=True, slots=True)
class NodeBlocks:
    """The blocks that end inside a node of the tree."""

    length: int  # of the node, in tokens: after a split it is another one
    name: int  # of the last full block up to the node's end
    rest: array[int]  # the tokens behind that block
    names: tuple[int, ...]


class BlockChain:
    """Names of a request's full blocks, each by its content and all before it; grows with the request."""

    def __init__(self, extra_key: str | None, salt: str | None) -> None:
        self._name = hash((extra_key, salt))
        self.names: list[int] = []
        self.told = 0

    def grow(self, tokens: array[int]) -> None:
        """Name the full blocks of a request whose tokens are these, and more than before."""
        for begin in range(len(self.names) * BLOCK_TOKENS, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            self._name = _name_block(self._name, tokens[begin : begin + BLOCK_TOKENS])
            self.names.append(self._name)


class PolicyStrategy:
    """What SGLang's tree asks: `get_priority` of a node, the smallest leaves first. It never raises."""

    def __init__(
        self,
        make: Callable[[], EvictionPolicy | None],
        list_leaves: Callable[[], Collection[Any]],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._make, self._list_leaves, self._on_failure = make, list_leaves, on_failure
        self._version = 0
        self.begin_again()

    def begin_again(self) -> None:
        """The tree was emptied: a new policy, since the old one would remember blocks that never left one by one."""
        self._epoch, self._told = -1, 0  # nothing is priced yet
        self._version += 1
        try:
            self._policy = self._make()
        except Exception as error:
            self._policy = None
            self._on_failure(error)

    def note_use(self, chain: BlockChain) -> None:
        """Hear that a request used the blocks of its chain; those that were told before are no second use."""
        if self._policy is None or chain.told >= len(chain.names):
            return
        try:
            self._policy.use(chain.names, told=chain.told)
            self._told += len(chain.names) - chain.told
            chain.told = len(chain.names)
        except Exception as error:
            self._give_up(error)

    def get_priority(self, node: Any) -> tuple[float, float]:
        """Return what a node is worth, then its last use."""
        try:
            return self._find_worth(node), node.last_access_time
        except Exception as error:
            self._give_up(error)
            return 0.0, node.last_access_time

    def forget(self, node: Any) -> None:
        """A node left the device."""
        if self._policy is None:
            return
        try:
            for name in find_blocks(node).names:
                self._policy.forget(name)
        except Exception as error:
            self._give_up(error)

    def _find_worth(self, node: Any) -> float:
        if self._policy is None:
            return 0.0
        leaves = self._list_leaves()
        if self._policy.epoch != self._epoch or self._told >= len(leaves):
            self._epoch, self._told = self._policy.epoch, 0
            self._version += 1
            self._price(list(leaves))
        if getattr(node, "semblend_worth", (0, 0, 0.0))[:2] != (self._version, node.last_access_time):
            self._price([node])
        return float(node.semblend_worth[2])

    def _price(self, nodes: list[Any]) -> None:
        """Ask the policy once for all nodes, and note at each what it is worth and when that was true."""
        if self._policy is None:
            return
        asked = [_choose_blocks(find_blocks(node)) for node in nodes]
        prices = iter(self._policy.price([name for names in asked for name in names]))
        for node, names in zip(nodes, asked, strict=True):
            worth = sum(next(prices) for _ in names) / max(1, len(names))
            node.semblend_worth = (self._version, node.last_access_time, worth)

    def _give_up(self, error: BaseException) -> None:
        if self._policy is not None:
            self._policy = None
            self._on_failure(error)


def find_blocks(node: Any) -> NodeBlocks:
    """Find the blocks of a node from its tokens and those above it; kept at the node until it is split."""
    path = []
    while node.parent is not None:
        known: NodeBlocks | None = getattr(node, "semblend_blocks", None)
        if known is not None and known.length == len(node.key):
            break
        path.append(node)
        node = node.parent
    found: NodeBlocks | None = None if node.parent is None else node.semblend_blocks
    for below in reversed(path):
        if found is None:
            found = NodeBlocks(0, hash((below.key.extra_key, below.key.cache_salt)), array("q"), ())
        name, rest, names = found.name, found.rest + array("q", below.key.raw_token_ids()), list[int]()
        for begin in range(0, len(rest) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            name = _name_block(name, rest[begin : begin + BLOCK_TOKENS])
            names.append(name)
        found = NodeBlocks(len(below.key), name, rest[len(names) * BLOCK_TOKENS :], tuple(names))
        below.semblend_blocks = found
    assert found is not None
    return found


def _choose_blocks(blocks: NodeBlocks) -> tuple[int, ...]:
    """The blocks that stand for a node: some of its own, or the last one in front of a node that has none."""
    step = -(-len(blocks.names) // ASKED_BLOCKS)
    return blocks.names[::step] if blocks.names else (blocks.name,)


def _name_block(before: int, tokens: array[int]) -> int:
    return hash((before, tokens.tobytes()))
