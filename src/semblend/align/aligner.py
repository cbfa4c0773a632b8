"""Candidates → Alignment: token-equal spans, and of them the best cover of the prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from semblend.align import plain
from semblend.align.plain import MatchArray
from semblend.discover.index import FlatIndex
from semblend.discover.search import Candidates
from semblend.discover.slots import EXPIRES, LENGTH, NAMESPACE
from semblend.discover.store import DonorStore
from semblend.fingerprint.hashes import HashScheme
from semblend.prompt import Prompt, TokenArray
from semblend.span import Span

# -- The last check before a plan leaves: every span is checked again, by other code than the code that found it.


class GuardError(Exception):
    """A mistake of ours: a span that must not be served. The request runs cold and an event says why."""


def check_pieces(tokens: TokenArray, pieces: MatchArray, store: DonorStore, namespace_id: int, now: int) -> None:
    """Raise GuardError unless pieces are ordered, apart, inside prompt and donor, of the namespace and not expired."""
    if len(pieces) == 0:
        return
    starts, ends, slots, donor_starts = pieces.T
    donors = store.slots.rows[slots]
    if (starts >= ends).any() or (starts[1:] < ends[:-1]).any() or starts[0] < 0 or ends[-1] > len(tokens):
        raise GuardError(f"spans overlap or leave the prompt of {len(tokens)} tokens")
    if (donor_starts < 0).any() or (donor_starts + ends - starts > donors[:, LENGTH]).any():
        raise GuardError("a span reaches outside its donor")
    if (donors[:, NAMESPACE] != namespace_id).any() or (donors[:, EXPIRES] <= now).any():
        raise GuardError("a span of a donor that has expired or belongs to another namespace")


def find_first_unequal(tokens: TokenArray, pieces: MatchArray, store: DonorStore) -> int:
    """Return the index of the first piece whose tokens are not the donor's, -1 if all are equal."""
    for i, (start, stop, slot, donor_start) in enumerate(pieces.tolist()):
        donor = store.log.view(slot)[donor_start : donor_start + stop - start]
        if not np.array_equal(tokens[start:stop], donor):
            return i
    return -1


# -- The heavy steps of alignment, compiled or in plain Python, behind one interface.


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
        """Return the pieces with the short runs beside them, see `semblend.align.plain`."""

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
        return len(matches), self.kernels.choose_cover(matches, self.shortest, plain.SEAM, plain.LOOK_BACK)

    def bridge(self, tokens: TokenArray, pieces: MatchArray, shortest: int, floor: int) -> MatchArray:
        log, rows = self.store.log.tokens, self.store.slots.rows
        bridged: MatchArray = self.kernels.bridge(tokens, pieces, log, rows, shortest, floor, plain.MAX_EDIT)
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
            backend.shortest, scheme.k, scheme.guaranteed_tokens, plain.LIMITS, backend.index.postings,
            store.log.tokens, store.slots.rows, candidates.namespace_id, candidates.now, self._state, self._out,
        )  # fmt: skip

    def get_matches(self) -> tuple[MatchArray, int]:
        kernels = self._backend.kernels
        return self._out[: self._state[kernels.MATCHES]], int(self._state[kernels.EXAMINED])


class PlainBackend:
    """Calls the twins in `semblend.align.plain`."""

    def __init__(self, store: DonorStore, scheme: HashScheme, shortest: int) -> None:
        self.store, self.scheme, self.shortest = store, scheme, shortest

    def scan(self, tokens: TokenArray, candidates: Candidates, floor: int) -> Scan:
        return plain.PlainScan(
            tokens, candidates, self.store, floor, self.shortest, self.scheme.k, self.scheme.guaranteed_tokens
        )

    def compose(self, found: MatchArray) -> tuple[int, MatchArray]:
        matches = plain.drop_dominated(found)
        return len(matches), plain.choose_cover(matches, self.shortest)

    def bridge(self, tokens: TokenArray, pieces: MatchArray, shortest: int, floor: int) -> MatchArray:
        known = [plain.ChainPiece(*piece) for piece in pieces.tolist()]
        donors = {piece.slot: self.store.log.view(piece.slot) for piece in known}
        return np.array(plain.chain_pieces(tokens, known, donors, shortest, floor), np.int64)

    def find_first_unequal(self, tokens: TokenArray, pieces: MatchArray) -> int:
        return find_first_unequal(tokens, pieces, self.store)


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
        self._backend = make_backend(store, scheme, shortest=max(min_span_tokens, scheme.k))

    def align(
        self, prompt: Prompt, candidates: Candidates, *, exact_tokens: int = 0, deadline: float = 0.0
    ) -> Alignment:
        """Find the spans of the prompt that donors hold.

        The engine holds the first ``exact_tokens`` already; ``deadline`` is a time of `time.perf_counter`, 0 for none.
        """
        tokens = prompt.token_ids
        scan = self._backend.scan(tokens, candidates, exact_tokens)
        total = len(candidates.fingerprint)
        seeds_done = _extend_seeds(scan, total, deadline)
        found, examined = scan.get_matches()
        matches, pieces = self._backend.compose(found)
        if self._bridges_edits and len(pieces):
            pieces = self._backend.bridge(tokens, pieces, self._min_span, exact_tokens)
        check_pieces(tokens, pieces, self._store, candidates.namespace_id, candidates.now)
        if (wrong := self._backend.find_first_unequal(tokens, pieces)) >= 0:
            raise GuardError(f"span at {pieces[wrong, 0]} is not token-equal to its donor")
        complete = seeds_done == total
        return Alignment(
            spans=tuple(self._build_span(*piece) for piece in pieces.tolist()),
            seeds=total,
            seeds_held=len(candidates),
            runs_examined=examined,
            matches=matches,
            scanned_tokens=len(tokens) if complete else int(candidates.fingerprint.positions[seeds_done]),
            complete=complete,
        )

    def _build_span(self, start: int, end: int, slot: int, donor_start: int) -> Span:
        """Build the span of one piece."""
        donor = self._store.get_at(slot)
        return Span(donor.donor_id, donor_start, start, end - start, donor.generation)


def _extend_seeds(scan: Scan, seeds: int, deadline: float) -> int:
    """Extend all seeds, or as many as the deadline allows; return how many."""
    if not deadline:
        scan.extend(0, seeds)
        return seeds
    done = 0
    while done < seeds and (done == 0 or time.perf_counter() < deadline):
        following = min(done + SEEDS_PER_SLICE, seeds)
        scan.extend(done, following)
        done = following
    return done
