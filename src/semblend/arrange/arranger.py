"""`Arranger`: remembers in which order passages were sent, and finds an order that meets it again."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence

from semblend.arrange.arrangement import Arrangement, Expected
from semblend.arrange.keep import FREE, Keep, Room, measure_displaced
from semblend.arrange.memory import Sent, SequenceMemory
from semblend.arrange.search import find_longest_path, order_rest
from semblend.errors import InputError
from semblend.prompt import Namespace

MOST_PASSAGES = 200_000


class Arranger:
    """Orders of passages by namespace. Thread-safe; `arrange` changes nothing.

    ``count`` gives the size of a passage: what the longest path is long by. Characters do; a tokenizer is exact.
    ``most_passages``: of all remembered sequences together, about 300 bytes each.
    """

    def __init__(self, *, count: Callable[[str], int] = len, most_passages: int = MOST_PASSAGES) -> None:
        if most_passages < 1:
            raise InputError(f"most_passages={most_passages} remembers nothing", hint="1 or more")
        self._count = count
        self._memory = SequenceMemory(most_passages)
        self._lock = threading.Lock()

    def arrange(
        self,
        passages: Sequence[str],
        *,
        namespace: Namespace | None = None,
        before: str = "",
        keep: Keep = FREE,
        scores: Sequence[float] | None = None,
    ) -> Arrangement:
        """An order of the passages that earlier prompts had, as far as ``keep`` allows.

        ``before`` is what stands in front of them in the prompt: an exact prefix begins there. ``scores`` are the
        passages' relevance, for ``keep.displaced``.
        """
        _check(passages, keep, scores)
        keys = tuple(_digest(passage) for passage in passages)
        sizes = tuple(self._count(passage) for passage in passages)
        scope = (namespace or Namespace()).digest.encode()
        root = _digest(before, scope)
        with self._lock:
            order, exact = self._find_order(keys, sizes, scope, root, keep, scores)
            seen = {key for key in keys if self._memory.find_holders(scope, key)}
        expected = Expected(
            exact=sum(sizes[index] for index in order[:exact]),
            elsewhere=sum(sizes[index] for index in order[exact:] if keys[index] in seen),
            unseen=sum(size for key, size in zip(keys, sizes, strict=True) if key not in seen),
        )
        put = [keys[index] for index in order]
        return Arrangement(
            tuple(order), _find_repeats(keys), expected, scope, root, tuple(put), tuple(sizes[i] for i in order)
        )

    def record(self, arrangement: Arrangement) -> None:
        """The prompt was sent in this order."""
        with self._lock:
            self._memory.add(Sent(arrangement.scope, arrangement.root, arrangement.keys, arrangement.sizes))

    def forget(self, passages: Sequence[str], *, namespace: Namespace | None = None, before: str = "") -> bool:
        """The engine has evicted the prompt with these passages in this order; False where it was not remembered."""
        scope = (namespace or Namespace()).digest.encode()
        keys = tuple(_digest(passage) for passage in passages)
        with self._lock:
            return self._memory.drop(Sent(scope, _digest(before, scope), keys, ()))

    def __len__(self) -> int:
        """Sequences that are remembered."""
        with self._lock:
            return len(self._memory)

    def _find_order(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        scope: bytes,
        root: bytes,
        keep: Keep,
        scores: Sequence[float] | None,
    ) -> tuple[list[int], int]:
        """The order, and how many passages of it are an exact prefix; moves less where too much was displaced."""
        reach = keep.within
        while True:
            room = Room(len(keys), keep, reach)
            path = find_longest_path(self._memory.find_root(root), keys, sizes, room)
            order = order_rest(path, keys, sizes, self._memory, scope, room)
            if scores is None or keep.displaced is None or measure_displaced(order, scores) <= keep.displaced:
                return order, len(path)
            reach = (len(keys) if reach is None else min(reach, len(keys))) // 2


def _check(passages: Sequence[str], keep: Keep, scores: Sequence[float] | None) -> None:
    if isinstance(passages, str) or not all(isinstance(passage, str) for passage in passages):
        raise InputError("passages is a list of texts", hint='arrange(["...", "..."])')
    if scores is not None and (len(scores) != len(passages) or any(not score >= 0 for score in scores)):
        raise InputError(f"{len(scores)} scores for {len(passages)} passages", hint="one number of 0 or more for each")
    if keep.displaced is not None and scores is None:
        raise InputError("keep.displaced needs scores", hint="arrange(passages, scores=[...])")


def _digest(text: str, scope: bytes = b"") -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=scope[:64]).digest()


def _find_repeats(keys: Sequence[bytes]) -> tuple[tuple[int, int], ...]:
    first: dict[bytes, int] = {}
    repeats = []
    for index, key in enumerate(keys):
        if key in first:
            repeats.append((index, first[key]))
        else:
            first[key] = index
    return tuple(repeats)
