"""The search of `semblend.arrange.search`, written as its docstrings say it and with no thought of speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from semblend.arrange.memory import Node, SequenceMemory
from semblend.arrange.order_limits import OrderLimits
from semblend.arrange.search import MAX_HOLDERS, MAX_LOOKS, MAX_PAIRS


def find_order(
    memory: SequenceMemory, keys: Sequence[bytes], sizes: Sequence[int], scope: bytes, root: bytes, keep: OrderLimits
) -> tuple[list[int], int]:
    """The order of the passages, and how many of them are the longest path."""
    path = find_path(memory.find_root(root), keys, sizes, keep, memory.oldest)
    ranked = rank(memory, [keys[at] for at in range(len(keys)) if at not in path], keys, sizes, scope)
    order = list(path)
    while len(order) < len(keys):
        allowed = [at for at in range(len(keys)) if at not in order and can_finish([*order, at], len(keys), keep)]
        order.append(min(allowed, key=lambda at: (ranked.index(keys[at]) if keys[at] in ranked else len(keys), at)))
    return order, len(path)


def find_path(
    root: Node | None, keys: Sequence[bytes], sizes: Sequence[int], keep: OrderLimits, oldest: int
) -> list[int]:
    """Depth first, the most used child first, until so many branches were looked at; the first of the largest."""
    best: list[int] = []
    looks = 0
    for path, node in walk([], root, keys, keep, oldest) if root is not None else ():
        if looks >= MAX_LOOKS:
            break
        if sum(sizes[at] for at in path) > sum(sizes[at] for at in best):
            best = path
        looks += 1 + min(len(node.children), len(keys))
    return best


def walk(
    path: list[int], node: Node, keys: Sequence[bytes], keep: OrderLimits, oldest: int
) -> Iterator[tuple[list[int], Node]]:
    yield path, node
    for key, child in sorted(node.children.items(), key=lambda item: (item[1].uses, item[0]), reverse=True):
        at = next((at for at in range(len(keys)) if keys[at] == key and at not in path), None)
        if at is not None and child.sent_at >= oldest and can_finish([*path, at], len(keys), keep):
            yield from walk([*path, at], child, keys, keep, oldest)


def can_finish(begun: list[int], count: int, keep: OrderLimits) -> bool:
    """Whether an order that begins like this can still obey ``keep``: with the rest in the caller's order."""
    first, last = min(keep.first, count), max(count - keep.last, min(keep.first, count))
    within = count if keep.within is None else keep.within
    order = [*begun, *(at for at in range(count) if at not in begun)]
    fixed = all((place < first or place >= last) <= (place == at) for place, at in enumerate(order))
    return fixed and all(abs(place - at) <= within for place, at in enumerate(order))


def rank(
    memory: SequenceMemory, rest: list[bytes], keys: Sequence[bytes], sizes: Sequence[int], scope: bytes
) -> list[bytes]:
    """Passages by the prompt that holds most of what is left, in its order; the first of equals."""
    size_of = dict(zip(keys, sizes, strict=True))
    left = list(dict.fromkeys(rest))
    most = max(1, min(MAX_HOLDERS, MAX_PAIRS // max(len(left), 1)))
    held: dict[bytes, list[bytes]] = {}
    donors = {}
    for key in left:
        for sent in list(memory.find_holders(scope).get(key, {}))[::-1][:most]:
            held.setdefault(sent.name, []).append(key)
            donors[sent.name] = sent
    ranked: list[bytes] = []
    while any(key not in ranked for mine in held.values() for key in mine):
        new = {name: [key for key in mine if key not in ranked] for name, mine in held.items()}
        name = max((one for one in new if new[one]), key=lambda one: sum(size_of[key] for key in new[one]))
        ranked += [key for key in dict.fromkeys(donors[name].keys) if key in new[name]]
    return ranked
