"""What a prompt looks like, from its text alone: pieces cut where the content says so, each with a hash.

A cut depends on the 32 bytes before it and on nothing else, so that a passage is cut alike wherever it stands. Beside
the hash of each piece there is the hash of everything up to its end: equal beginnings have equal chains. Placement
only: these hashes never authorize reuse.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import mul

from semantickv.routing.pieces import Cuts, cut_plainly
from semantickv.routing.prompt_view import PromptPart
from semantickv.simulator.policies import TYPE_WEIGHTS

MOST_BYTES = 1 << 20
"""Of a prompt, so much is looked at: 250k tokens."""
BYTES_PER_TOKEN = 4
log = logging.getLogger("semantickv")


@dataclass(frozen=True, slots=True)
class PromptPieces:
    """A prompt's pieces in order: hash of each, hash of the prompt up to its end, tokens (estimated), weight.

    >>> pieces = cut_prompt([PromptPart("system", b"Be brief. " * 400)], b"tenant")
    >>> len(pieces.hashes) == len(pieces.chains) == len(pieces.tokens) > 0, pieces.total_tokens
    (True, 1000)
    """

    hashes: tuple[int, ...]
    chains: tuple[int, ...]
    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    total_tokens: int = field(init=False)
    worths: tuple[float, ...] = field(init=False)
    """Tokens times weight, of each piece."""
    total_worth: float = field(init=False)

    def __post_init__(self) -> None:
        worths = tuple(map(mul, self.tokens, self.weights))
        object.__setattr__(self, "total_tokens", sum(self.tokens))
        object.__setattr__(self, "worths", worths)
        object.__setattr__(self, "total_worth", sum(worths))


NO_PIECES = PromptPieces((), (), (), ())


def cut_prompt(parts: Sequence[PromptPart], namespace: bytes) -> PromptPieces:
    """Cut a prompt into pieces. ``namespace`` keys the hashes: equal texts of two tenants have nothing in common."""
    data, ends, weights = _join_parts(parts)
    if not data:
        return NO_PIECES
    seed = int.from_bytes(hashlib.blake2b(namespace, digest_size=8).digest(), "little")
    cuts, hashes, chains = load_cutter()(data, ends, seed)
    tokens = [(end - start) // BYTES_PER_TOKEN or 1 for start, end in zip([0, *cuts[:-1]], cuts, strict=True)]
    weight_of = weights * len(cuts) if len(ends) == 1 else [weights[bisect_left(ends, cut)] for cut in cuts]
    return PromptPieces(tuple(hashes), tuple(chains), tuple(tokens), tuple(weight_of))


@cache
def load_cutter() -> Callable[[bytes, Sequence[int], int], Cuts]:
    """Load the compiled cutter, or the plain one where numba is absent or does not work: 40 times the time."""
    from semantickv.routing import kernels

    if not kernels.COMPILED:
        return cut_plainly
    kernels.cut_compiled(b"warm up", [7], 0)
    return kernels.cut_compiled


def _join_parts(parts: Sequence[PromptPart]) -> tuple[bytes, list[int], list[float]]:
    """Join the parts; return the bytes, where each part ends, and what a byte of it weighs."""
    taken, ends, weights, length = [], [], [], 0
    for part in parts:
        data = part.data[: MOST_BYTES - length]
        if data:
            taken.append(data)
            length += len(data)
            ends.append(length)
            weights.append(TYPE_WEIGHTS.get(part.type, TYPE_WEIGHTS["other"]))
    return b"".join(taken), ends, weights
