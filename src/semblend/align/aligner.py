"""Candidates → Alignment: token-equal spans, the best cover of the prompt that donors can give."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from semblend.align import compose, exact, guards
from semblend.align.chain import Piece, chain
from semblend.align.exact import MatchArray, Scan
from semblend.discover.flat_index import FlatIndex
from semblend.discover.search import Candidates
from semblend.discover.store import DonorStore
from semblend.fingerprint.hashes import HashScheme
from semblend.prompt import Prompt, TokenArray
from semblend.span import Span

SEEDS_PER_SLICE = 2048  # about 18k tokens between two looks at the clock


@dataclass(frozen=True, slots=True)
class Alignment:
    """What donors hold of a prompt. ``complete`` is False when the time budget ended the scan early."""

    spans: tuple[Span, ...]
    seeds: int = 0
    seeds_held: int = 0
    runs_examined: int = 0
    matches: int = 0
    scanned_tokens: int = 0
    complete: bool = True

    @property
    def shared_tokens(self) -> int:
        return sum(span.length for span in self.spans)


class Aligner:
    """Grows seeds into matches and composes them. The caller holds the store's lock."""

    def __init__(self, store: DonorStore, scheme: HashScheme, *, min_span_tokens: int) -> None:
        self._store = store
        self._bridges_edits = min_span_tokens < scheme.guaranteed_tokens
        self._min_span = min_span_tokens
        shortest = max(min_span_tokens, scheme.k)
        compiled = isinstance(store.index, FlatIndex)
        self._steps: _Steps = (_CompiledSteps if compiled else _PlainSteps)(store, scheme, shortest)

    def align(
        self, prompt: Prompt, candidates: Candidates, *, exact_tokens: int = 0, deadline: float = 0.0
    ) -> Alignment:
        """``exact_tokens`` are held by the engine already; ``deadline`` is on `time.perf_counter`, 0 = none."""
        tokens = prompt.token_ids
        found, examined, seeds_done = self._steps.extend(tokens, candidates, exact_tokens, deadline)
        matches, pieces = self._steps.compose(found)
        if self._bridges_edits and len(pieces):
            pieces = self._bridged(tokens, pieces, exact_tokens)
        guards.check_pieces(tokens, pieces, self._store, candidates.namespace_id)
        if (wrong := self._steps.first_unequal(tokens, pieces)) >= 0:
            raise guards.GuardError(f"span at {pieces[wrong, 0]} is not token-equal to its donor")
        total = len(candidates.fingerprint)
        complete = seeds_done == total
        return Alignment(
            spans=tuple(self._span(*piece) for piece in pieces.tolist()),
            seeds=total,
            seeds_held=len(candidates),
            runs_examined=examined,
            matches=matches,
            scanned_tokens=len(tokens) if complete else int(candidates.fingerprint.positions[seeds_done]),
            complete=complete,
        )

    def _span(self, start: int, end: int, slot: int, donor_start: int) -> Span:
        donor = self._store.at(slot)
        return Span(donor.donor_id, donor_start, start, end - start, donor.generation)

    def _bridged(self, tokens: TokenArray, pieces: MatchArray, floor: int) -> MatchArray:
        known = [Piece(*piece) for piece in pieces.tolist()]
        donors = {piece.slot: self._store.log.view(piece.slot) for piece in known}
        return np.array(chain(tokens, known, donors, self._min_span, floor), np.int64)


class _Steps(ABC):
    """The three heavy steps; one class runs them compiled, one in plain Python."""

    def __init__(self, store: DonorStore, scheme: HashScheme, shortest: int) -> None:
        self._store, self._scheme, self._shortest = store, scheme, shortest

    def extend(
        self, tokens: TokenArray, candidates: Candidates, floor: int, deadline: float
    ) -> tuple[MatchArray, int, int]:
        """Maximal matches, how many runs were looked at, and how many seeds were done before the deadline."""
        seeds = len(candidates.fingerprint)
        step = SEEDS_PER_SLICE if deadline else max(seeds, 1)
        self._begin(candidates, floor)
        done = 0
        while done < seeds:
            following = min(done + step, seeds)
            self._extend(tokens, candidates, floor, done, following)
            done = following
            if deadline and time.perf_counter() > deadline:
                break
        return *self._found(), done

    @abstractmethod
    def _begin(self, candidates: Candidates, floor: int) -> None: ...

    @abstractmethod
    def _extend(self, tokens: TokenArray, candidates: Candidates, floor: int, seed_from: int, seed_to: int) -> None: ...

    @abstractmethod
    def _found(self) -> tuple[MatchArray, int]: ...

    @abstractmethod
    def compose(self, found: MatchArray) -> tuple[int, MatchArray]:
        """How many matches stand beside each other, and the pieces of them that cover most."""

    @abstractmethod
    def first_unequal(self, tokens: TokenArray, pieces: MatchArray) -> int: ...


class _CompiledSteps(_Steps):
    def __init__(self, store: DonorStore, scheme: HashScheme, shortest: int) -> None:
        from semblend.align import kernels

        super().__init__(store, scheme, shortest)
        assert isinstance(store.index, FlatIndex)
        self._index = store.index
        self._kernels = kernels

    def _begin(self, candidates: Candidates, floor: int) -> None:
        self._state = np.array([floor, -1, 0, 0, 0, 0], np.int64)
        self._out = np.empty((2 * len(candidates), 4), np.int64)

    def _extend(self, tokens: TokenArray, candidates: Candidates, floor: int, seed_from: int, seed_to: int) -> None:
        store, scheme = self._store, self._scheme
        self._kernels.extend(
            tokens, candidates.fingerprint.positions, candidates.first, seed_from, seed_to, floor,
            self._shortest, scheme.k, scheme.guaranteed_tokens, self._index.postings, store.log.tokens,
            store.slots.rows, candidates.namespace_id, store.now(), self._state, self._out,
        )  # fmt: skip

    def _found(self) -> tuple[MatchArray, int]:
        k = self._kernels
        return self._out[: self._state[k.MATCHES]], int(self._state[k.CANDIDATES])

    def compose(self, found: MatchArray) -> tuple[int, MatchArray]:
        matches = self._kernels.undominated(found)
        return len(matches), self._kernels.cover(matches, self._shortest, compose.SEAM)

    def first_unequal(self, tokens: TokenArray, pieces: MatchArray) -> int:
        return int(self._kernels.first_unequal(tokens, pieces, self._store.log.tokens, self._store.slots.rows))


class _PlainSteps(_Steps):
    def _begin(self, candidates: Candidates, floor: int) -> None:
        self._scan = Scan(floor=floor, shortest=self._shortest, covered=floor)

    def _extend(self, tokens: TokenArray, candidates: Candidates, floor: int, seed_from: int, seed_to: int) -> None:
        store, scheme = self._store, self._scheme
        exact.extend(
            self._scan, tokens, candidates, store, seed_from, seed_to, scheme.k, scheme.guaranteed_tokens, store.now()
        )

    def _found(self) -> tuple[MatchArray, int]:
        return np.array(self._scan.matches, np.int64).reshape(-1, 4), self._scan.candidates

    def compose(self, found: MatchArray) -> tuple[int, MatchArray]:
        matches = compose.undominated(found)
        return len(matches), compose.cover(matches, self._shortest)

    def first_unequal(self, tokens: TokenArray, pieces: MatchArray) -> int:
        return guards.first_unequal(tokens, pieces, self._store)
