"""Candidates → Alignment: token-equal spans, the best cover of the prompt that donors can give."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from semblend.align import compose, exact
from semblend.align.chain import Piece, chain
from semblend.align.exact import MatchArray, Scan
from semblend.align.guards import check_pieces
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
        self._scheme = scheme
        self._min_span = min_span_tokens
        self._shortest = max(min_span_tokens, scheme.k)
        self._scan: Callable[[TokenArray, Candidates, int, float], tuple[MatchArray, int, int]]
        self._cover: Callable[[MatchArray, int], list[tuple[int, int, int]]]
        if isinstance(store.index, FlatIndex):
            self._scan, self._cover = self._scan_compiled, self._cover_compiled
        else:
            self._scan, self._cover = self._scan_plain, compose.cover

    def align(
        self, prompt: Prompt, candidates: Candidates, *, exact_tokens: int = 0, deadline: float = 0.0
    ) -> Alignment:
        """``exact_tokens`` are held by the engine already; ``deadline`` is on `time.perf_counter`, 0 = none."""
        tokens = prompt.token_ids
        found, examined, seeds_done = self._scan(tokens, candidates, exact_tokens, deadline)
        matches = compose.undominated(found)
        pieces = [
            Piece(start, end, int(matches[i, 2]), int(matches[i, 3]) + start - int(matches[i, 0]))
            for start, end, i in self._cover(matches, self._shortest)
        ]
        if self._min_span < self._scheme.guaranteed_tokens and pieces:
            donors = {piece.slot: self._store.log.view(piece.slot) for piece in pieces}
            pieces = chain(tokens, pieces, donors, self._min_span, exact_tokens)
        check_pieces(tokens, pieces, self._store, candidates.namespace_id)
        total = len(candidates.fingerprint)
        complete = seeds_done == total
        return Alignment(
            spans=tuple(self._span(piece) for piece in pieces),
            seeds=total,
            seeds_held=len(candidates),
            runs_examined=examined,
            matches=len(matches),
            scanned_tokens=len(tokens) if complete else int(candidates.fingerprint.positions[seeds_done]),
            complete=complete,
        )

    def _span(self, piece: Piece) -> Span:
        donor = self._store.at(piece.slot)
        return Span(donor.donor_id, piece.donor_start, piece.start, piece.end - piece.start, donor.generation)

    def _slices(self, seeds: int, deadline: float) -> list[tuple[int, int]]:
        step = SEEDS_PER_SLICE if deadline else max(seeds, 1)
        return [(at, min(at + step, seeds)) for at in range(0, seeds, step)]

    def _scan_compiled(
        self, tokens: TokenArray, candidates: Candidates, floor: int, deadline: float
    ) -> tuple[MatchArray, int, int]:
        from semblend.align import kernels

        store, index = self._store, self._store.index
        assert isinstance(index, FlatIndex)
        seeds = len(candidates.fingerprint)
        state = np.array([floor, -1, 0, 0, 0, 0], np.int64)
        out = np.empty((2 * len(candidates), 4), np.int64)
        done = 0
        for seed_from, seed_to in self._slices(seeds, deadline):
            kernels.extend(
                tokens, candidates.fingerprint.positions, candidates.first, seed_from, seed_to, floor,
                self._shortest, self._scheme.k, self._scheme.guaranteed_tokens, index.postings,
                store.log.tokens, store.log.starts, store.log.lengths, store.namespace_of, store.expires,
                candidates.namespace_id, store.now(), state, out,
            )  # fmt: skip
            done = seed_to
            if deadline and time.perf_counter() > deadline:
                break
        return out[: state[kernels.MATCHES]], int(state[kernels.CANDIDATES]), done

    def _cover_compiled(self, matches: MatchArray, shortest: int) -> list[tuple[int, int, int]]:
        from semblend.align import kernels

        pieces = np.empty((len(matches), 3), np.int64)
        count = kernels.cover(matches, shortest, compose.SEAM, pieces)
        return [(start, end, i) for start, end, i in pieces[:count][::-1].tolist()]

    def _scan_plain(
        self, tokens: TokenArray, candidates: Candidates, floor: int, deadline: float
    ) -> tuple[MatchArray, int, int]:
        scan = Scan(floor=floor, shortest=self._shortest, covered=floor)
        done = 0
        for seed_from, seed_to in self._slices(len(candidates.fingerprint), deadline):
            exact.extend(
                scan, tokens, candidates, self._store, seed_from, seed_to,
                self._scheme.k, self._scheme.guaranteed_tokens, self._store.now(),
            )  # fmt: skip
            done = seed_to
            if deadline and time.perf_counter() > deadline:
                break
        return np.array(scan.matches, np.int64).reshape(-1, 4), scan.candidates, done
