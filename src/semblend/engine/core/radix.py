"""The exact prefix cache: which blocks of KV already hold the beginning of a prompt.

A tree over tokens (the usual radix tree) may split an edge at any token, and then has to share, copy or cut blocks.
Here an edge is one full block of tokens: 16 tokens lead to the one block that holds their KV, given everything before
them. A prompt matches block by block until its tokens differ, and what is left over inside a block is computed anew:
at most 15 tokens, for a tree without splits, without copies and with one reference a block.

- The digest of the namespace is the root's key. Two namespaces have two trees; there is nothing to share by mistake.
- Only exact KV may enter. A sequence that ran on relocated KV says from which position on (``exact_until``), and a
  block beyond it is refused.
- The tree holds one reference to each of its blocks, each running sequence that uses a block holds one more. A block
  that only the tree holds can be evicted, leaves first: of the tenant that holds most of the pool, in the tree and in
  running sequences together, the one that the eviction policy values least, among equals the least recently used one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from semblend.engine.model.paged_kv import KvPool
from semblend.errors import SemBlendError
from semblend.eviction.policy import EvictionPolicy

Tokens = Sequence[int] | npt.NDArray[np.int32]
Entry = tuple[float, int, int, "_Node"]  # what the leaf is worth, its last use, a number of its own


class _Node:
    """One block. The root of a namespace is a node without a block (-1)."""

    __slots__ = ("block", "children", "key", "last_used", "name", "parent")

    def __init__(self, parent: _Node | None, key: bytes, block: int, name: int = 0) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        self.children: dict[bytes, _Node] = {}
        self.last_used = 0
        self.name = name  # the block's content and all before it, as the eviction policy knows it


class RadixCache:
    """Exact prefixes by full blocks. Not thread-safe: it belongs to the engine's thread."""

    def __init__(self, pool: KvPool, policy: EvictionPolicy | None = None) -> None:
        self._pool = pool
        self._policy = policy
        self._epoch = self._told = 0  # the policy's epoch and the blocks it heard of since the leaves were last priced
        self._roots: dict[str, _Node] = {}
        self._clock = itertools.count(1)
        # By tenant a heap by worth and age; entries that are out of date are skipped.
        self._leaves: dict[str, list[Entry]] = {}
        self._entry = itertools.count()
        self._size = 0

    def __len__(self) -> int:
        """Blocks in the tree."""
        return self._size

    def match(self, namespace: str, tokens: Tokens) -> list[int]:
        """Blocks that hold the longest known beginning of ``tokens``, which count as just used.

        The caller shares them before anything else is evicted; the tree may drop them otherwise.
        """
        root = self._roots.get(namespace)
        if root is None:
            return []
        path = self._walk(root, self._keys(tokens))
        self._touch(path)
        return [node.block for node in path]

    def insert(
        self, namespace: str, tokens: Tokens, blocks: Sequence[int], *, exact_until: int, offered: int = 0
    ) -> int:
        """Remember that ``blocks`` hold the KV of ``tokens``, one full block each; returns how many were new.

        Where another sequence was first, its block stays and the caller keeps its own copy. ``offered``: so many of the
        blocks were offered before for the same request, whose answer has grown since.
        """
        size = self._pool.block_tokens
        covered = len(blocks) * size
        if covered > exact_until:
            raise SemBlendError(
                f"{covered} tokens offered to the exact cache, but the sequence is exact only up to {exact_until}",
                hint="offer whole blocks before exact_until only",
            )
        if covered > len(tokens):
            raise SemBlendError(f"{len(blocks)} blocks for {len(tokens)} tokens", hint="offer full blocks only")
        if not blocks:
            return 0
        node = self._roots.setdefault(namespace, _Node(None, namespace.encode(), -1, hash(namespace)))
        path: list[_Node] = []
        added = 0
        for key, block in zip(self._keys(tokens), blocks, strict=False):
            child = node.children.get(key)
            if child is None:
                name = hash((node.name, key)) if self._policy else 0
                child = node.children[key] = _Node(node, key, block, name)
                self._pool.share(block)
                added += 1
            path.append(child)
            node = child
        self._size += added
        if self._policy is not None and offered < len(path):
            self._policy.use([one.name for one in path], told=offered)
            self._told += len(path) - offered
        self._touch(path)
        return added

    def evict(self, n_blocks: int, tenant: str = "", spare: int = 0) -> int:
        """Free up to ``n_blocks`` blocks that nobody else holds, for ``tenant``; returns how many were freed.

        The tenant that holds most gives first, its least valued leaf first. Other tenants keep ``spare`` blocks each.
        """
        self._price_again()
        freed = 0
        held, spent = self._pool.held, set[str]()
        aside: list[tuple[str, Entry]] = []
        while freed < n_blocks and (payer := held.find_largest(spent)) is not None:
            if payer != tenant and held[payer] <= spare:
                if tenant in spent or not held[tenant]:
                    break
                payer = tenant
            leaf = self._pop_leaf(payer, aside)
            if leaf is None:
                spent.add(payer)
            else:
                self._remove(leaf)
                freed += 1
        for owner, entry in aside:
            heapq.heappush(self._leaves.setdefault(owner, []), entry)
        return freed

    def reset(self) -> int:
        """Drop the whole tree; returns how many blocks it let go. Running sequences keep theirs."""
        blocks = list(self.blocks())
        self._pool.free(blocks)
        self._roots.clear()
        self._leaves.clear()
        self._size = 0
        return len(blocks)

    def blocks(self) -> Iterator[int]:
        """Every block in the tree, each once."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node.block

    def check(self) -> None:
        """Raise if the tree contradicts itself or the pool; for tests and the engine's own `check`."""
        entries = [(owner, entry) for owner, heap in self._leaves.items() for entry in heap]
        listed = {id(entry[3]) for owner, entry in entries if self._is_current(entry)}
        for owner, entry in entries:
            known = not self._is_current(entry) or self._pool.tenant_of(entry[3].block) == owner
            _require(known, f"block {entry[3].block} is listed for another tenant")
        seen: set[int] = set()
        stack = [(root, child) for root in self._roots.values() for child in root.children.values()]
        while stack:
            parent, node = stack.pop()
            _require(node.parent is parent, f"block {node.block} does not know its parent")
            _require(len(node.key) == 4 * self._pool.block_tokens, f"block {node.block} is not full")
            _require(node.block not in seen, f"block {node.block} stands in the tree twice")
            _require(self._pool.owners(node.block) >= 1, f"block {node.block} was freed under the tree")
            _require(parent.parent is None or parent.last_used >= node.last_used, "a parent is older than its child")
            _require(bool(node.children) or id(node) in listed, f"leaf {node.block} can never be evicted")
            seen.add(node.block)
            stack.extend((node, child) for child in node.children.values())
        _require(len(seen) == self._size, f"{len(seen)} blocks in the tree, {self._size} counted")

    # -- parts -----------------------------------------------------------------------------------------------------

    def _keys(self, tokens: Tokens) -> Iterator[bytes]:
        """The tokens of each full block as bytes: the key is the tokens themselves, so nothing can collide."""
        width = 4 * self._pool.block_tokens
        raw = np.asarray(tokens, dtype=np.int32).tobytes()
        return (raw[at : at + width] for at in range(0, len(raw) - width + 1, width))

    def _walk(self, node: _Node, keys: Iterator[bytes]) -> list[_Node]:
        path: list[_Node] = []
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _touch(self, path: list[_Node]) -> None:
        now = next(self._clock)
        for node in path:
            node.last_used = now
        if path and not path[-1].children:
            self._list_leaf(path[-1])

    def _list_leaf(self, node: _Node) -> None:
        tenant = self._pool.tenant_of(node.block)
        leaves = self._leaves.setdefault(tenant, [])
        worth = self._policy.price([node.name])[0] if self._policy else 0.0
        heapq.heappush(leaves, (worth, node.last_used, next(self._entry), node))
        if len(leaves) > 64 + 4 * self._pool.held[tenant]:  # every touch leaves an outdated entry behind
            leaves[:] = [entry for entry in leaves if self._is_current(entry)]
            heapq.heapify(leaves)

    def _price_again(self) -> None:
        """Ask the policy what every leaf is worth, where it has learned or as many blocks were used as are leaves."""
        if self._policy is None or (
            self._policy.epoch == self._epoch and self._told < sum(map(len, self._leaves.values()))
        ):
            return
        for leaves in self._leaves.values():
            nodes = list({id(entry[3]): entry[3] for entry in leaves if self._is_current(entry)}.values())
            prices = self._policy.price([node.name for node in nodes])
            leaves[:] = [
                (price, node.last_used, next(self._entry), node) for price, node in zip(prices, nodes, strict=True)
            ]
            heapq.heapify(leaves)
        self._epoch, self._told = self._policy.epoch, 0

    def _pop_leaf(self, tenant: str, aside: list[tuple[str, Entry]]) -> _Node | None:
        """The tenant's least valued leaf that only the tree holds; those that are in use go to ``aside``."""
        leaves = self._leaves.get(tenant, [])
        while leaves:
            entry = heapq.heappop(leaves)
            if not self._is_current(entry):
                continue
            if self._pool.owners(entry[3].block) == 1:
                return entry[3]
            aside.append((tenant, entry))
        self._leaves.pop(tenant, None)
        return None

    def _is_current(self, entry: Entry) -> bool:
        _, last_used, _, node = entry
        return node.parent is not None and not node.children and node.last_used == last_used

    def _remove(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.parent = None
        if self._policy is not None:
            self._policy.forget(node.name)
        self._pool.free([node.block])
        self._size -= 1
        if parent.parent is None:
            if not parent.children:
                del self._roots[parent.key.decode()]
        elif not parent.children:
            self._list_leaf(parent)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise SemBlendError(f"the exact cache is broken: {what}", hint="please report this with the log")
