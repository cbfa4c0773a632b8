"""The heavy steps of alignment, compiled or in plain Python, behind one interface."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from semblend.align import chain, compose, exact, guards
from semblend.align.exact import MatchArray
from semblend.discover.flat_index import FlatIndex
from semblend.discover.search import Candidates
from semblend.discover.store import DonorStore
from semblend.fingerprint.hashes import HashScheme
from semblend.prompt import TokenArray


class Scan(Protocol):
    """The seeds of one prompt being extended to matches; can stop between any two seeds."""

    def extend(self, seed_from: int, seed_to: int) -> None: ...

    def get_matches(self) -> tuple[MatchArray, int]:
        """Return the maximal matches so far, and how many runs were examined."""


class Backend(Protocol):
    """The steps of alignment that must be fast."""

    def scan(self, tokens: TokenArray, candidates: Candidates, floor: int) -> Scan: ...

    def compose(self, found: MatchArray) -> tuple[int, MatchArray]:
        """Return the number of matches not inside another, and the pieces of them that cover most."""

    def bridge(self, tokens: TokenArray, pieces: MatchArray, shortest: int, floor: int) -> MatchArray:
        """Return the pieces with the short runs beside them, see `semblend.align.chain`."""

    def find_first_unequal(self, tokens: TokenArray, pieces: MatchArray) -> int:
        """Return the index of the first piece whose tokens are not the donor's, -1 if all are equal."""


def make_backend(store: DonorStore, scheme: HashScheme, shortest: int) -> Backend:
    """Make the compiled backend if the store's index is compiled, else the plain one."""
    if isinstance(store.index, FlatIndex):
        return CompiledBackend(store, store.index, scheme, shortest)
    return PlainBackend(store, scheme, shortest)


class CompiledBackend:
    """Calls `semblend.align.kernels`."""

    def __init__(self, store: DonorStore, index: FlatIndex, scheme: HashScheme, shortest: int) -> None:
        from semblend.align import kernels

        self.kernels, self.store, self.index, self.scheme, self.shortest = kernels, store, index, scheme, shortest

    def scan(self, tokens: TokenArray, candidates: Candidates, floor: int) -> Scan:
        return _CompiledScan(self, tokens, candidates, floor)

    def compose(self, found: MatchArray) -> tuple[int, MatchArray]:
        matches = self.kernels.drop_dominated(found)
        return len(matches), self.kernels.choose_cover(matches, self.shortest, compose.SEAM, compose.LOOK_BACK)

    def bridge(self, tokens: TokenArray, pieces: MatchArray, shortest: int, floor: int) -> MatchArray:
        log, rows = self.store.log.tokens, self.store.slots.rows
        bridged: MatchArray = self.kernels.bridge(tokens, pieces, log, rows, shortest, floor, chain.MAX_EDIT)
        return bridged

    def find_first_unequal(self, tokens: TokenArray, pieces: MatchArray) -> int:
        return int(self.kernels.find_first_unequal(tokens, pieces, self.store.log.tokens, self.store.slots.rows))


class _CompiledScan:
    def __init__(self, backend: CompiledBackend, tokens: TokenArray, candidates: Candidates, floor: int) -> None:
        self._backend, self._tokens, self._candidates, self._floor = backend, tokens, candidates, floor
        self._state = np.array([floor, -1, 0, 0, 0, 0], np.int64)
        self._out = np.empty((2 * len(candidates), 4), np.int64)

    def extend(self, seed_from: int, seed_to: int) -> None:
        backend, candidates = self._backend, self._candidates
        store, scheme = backend.store, backend.scheme
        backend.kernels.extend(
            self._tokens, candidates.fingerprint.positions, candidates.first, seed_from, seed_to, self._floor,
            backend.shortest, scheme.k, scheme.guaranteed_tokens, exact.LIMITS, backend.index.postings,
            store.log.tokens, store.slots.rows, candidates.namespace_id, candidates.now, self._state, self._out,
        )  # fmt: skip

    def get_matches(self) -> tuple[MatchArray, int]:
        kernels = self._backend.kernels
        return self._out[: self._state[kernels.MATCHES]], int(self._state[kernels.EXAMINED])


class PlainBackend:
    """Calls the twins in `semblend.align.exact`, `compose`, `chain` and `guards`."""

    def __init__(self, store: DonorStore, scheme: HashScheme, shortest: int) -> None:
        self.store, self.scheme, self.shortest = store, scheme, shortest

    def scan(self, tokens: TokenArray, candidates: Candidates, floor: int) -> Scan:
        return exact.PlainScan(
            tokens, candidates, self.store, floor, self.shortest, self.scheme.k, self.scheme.guaranteed_tokens
        )

    def compose(self, found: MatchArray) -> tuple[int, MatchArray]:
        matches = compose.drop_dominated(found)
        return len(matches), compose.choose_cover(matches, self.shortest)

    def bridge(self, tokens: TokenArray, pieces: MatchArray, shortest: int, floor: int) -> MatchArray:
        known = [chain.ChainPiece(*piece) for piece in pieces.tolist()]
        donors = {piece.slot: self.store.log.view(piece.slot) for piece in known}
        return np.array(chain.chain_pieces(tokens, known, donors, shortest, floor), np.int64)

    def find_first_unequal(self, tokens: TokenArray, pieces: MatchArray) -> int:
        return guards.find_first_unequal(tokens, pieces, self.store)
