"""Candidates → Alignment: token-equal spans, and of them the best cover of the prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semblend.discover.slots import EXPIRES, LENGTH, NAMESPACE
from semblend.discover.store import Candidates, DonorStore
from semblend.fingerprint.hashes import HashScheme
from semblend.prompt import Prompt, TokenArray
from semblend.span import Span

MatchArray = npt.NDArray[np.int64]  # rows (start, end, slot, donor_start); target positions

MAX_CANDIDATES = 8  # donors compared for one seed, newest first; 16 recovered no more on the recall corpus
FREE_WORK = 65_536  # token comparisons that every lookup may spend
WORK_PER_TOKEN = 16  # and what each scanned token adds to that: bounds the time on repetitive text
COST_OF_A_LOOK = 16  # comparisons charged for touching a candidate at all (a cache miss or two)
LIMITS = (MAX_CANDIDATES, FREE_WORK, WORK_PER_TOKEN, COST_OF_A_LOOK)
SEAM = 1  # tokens that a further piece must add: of equal covers the one with fewer pieces wins
LOOK_BACK = 32  # overlapping matches considered as predecessor of a match
NEARLY_ALL = 0.95  # of what all donors hold of an edited prompt, for its base to be taken alone
MAX_EDIT = 12  # tokens replaced, inserted or deleted between two runs
SEEDS_PER_SLICE = 2048  # about 18k tokens between two looks at the clock


class GuardError(Exception):
    """A mistake of ours: a span that must not be served. The request runs cold and an event says why."""


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
    """Grows seeds into matches and composes them. The caller holds the store's lock.

    Where spans may be shorter than the seeds guarantee, the short runs between two small edits are taken too, beside a
    piece that was found and of the same donor: there is never a short run alone.
    """

    def __init__(self, store: DonorStore, scheme: HashScheme, *, min_span_tokens: int) -> None:
        from semblend.align import kernels

        self._kernels, self._store, self._scheme = kernels, store, scheme
        self._bridges_edits = min_span_tokens < scheme.guaranteed_tokens
        self._min_span = min_span_tokens
        self._shortest = max(min_span_tokens, scheme.k)

    def align(
        self,
        prompt: Prompt,
        candidates: Candidates,
        *,
        exact_tokens: int = 0,
        deadline: float = 0.0,
        base: int | None = None,
    ) -> Alignment:
        """Find the spans of the prompt that donors hold.

        The engine holds the first ``exact_tokens`` already; ``deadline`` is a time of `time.perf_counter`, 0 for none.
        ``base``: the slot of the donor that the prompt was edited from. It is taken alone where it holds nearly all:
        what it holds was computed in one context.
        """
        tokens, store = prompt.token_ids, self._store
        found, examined, seeds_done = self._extend_seeds(tokens, candidates, exact_tokens, deadline)
        matches = self._kernels.drop_dominated(found)
        pieces = self._kernels.choose_cover(matches, self._shortest, SEAM, LOOK_BACK)
        if base is not None:
            own, *_ = self._extend_seeds(tokens, candidates, exact_tokens, deadline, only=base)
            alone = self._kernels.choose_cover(self._kernels.drop_dominated(own), self._shortest, SEAM, LOOK_BACK)
            pieces = alone if count_tokens(alone) >= NEARLY_ALL * count_tokens(pieces) else pieces
        log, rows = store.log.tokens, store.slots.rows
        if self._bridges_edits and len(pieces):
            pieces = self._kernels.bridge(tokens, pieces, log, rows, self._min_span, exact_tokens, MAX_EDIT)
        check_pieces(tokens, pieces, store, candidates.namespace_id, candidates.now)
        if (wrong := self._kernels.find_first_unequal(tokens, pieces, log, rows)) >= 0:
            raise GuardError(f"span at {pieces[wrong, 0]} is not token-equal to its donor")
        seeds = len(candidates.fingerprint)
        complete = seeds_done == seeds
        return Alignment(
            spans=tuple(self._build_span(*piece) for piece in pieces.tolist()),
            seeds=seeds,
            seeds_held=len(candidates),
            runs_examined=examined,
            matches=len(matches),
            scanned_tokens=len(tokens) if complete else int(candidates.fingerprint.positions[seeds_done]),
            complete=complete,
        )

    def _extend_seeds(
        self, tokens: TokenArray, candidates: Candidates, floor: int, deadline: float, only: int = -1
    ) -> tuple[MatchArray, int, int]:
        """Extend all seeds to maximal matches, or as many as the deadline allows; with the donor in one slot ``only``.

        Returns the matches, how many runs were examined, and how many seeds were extended.
        """
        store, scheme, seeds, done = self._store, self._scheme, len(candidates.fingerprint), 0
        state = np.array([floor, -1, 0, 0, 0, 0], np.int64)
        found = np.empty((2 * len(candidates), 4), np.int64)
        while done < seeds and (done == 0 or time.perf_counter() < deadline):
            following = min(done + SEEDS_PER_SLICE, seeds) if deadline else seeds
            self._kernels.extend(
                tokens, candidates.fingerprint.positions, candidates.first, done, following, floor,
                self._shortest, scheme.k, scheme.guaranteed_tokens, LIMITS, store.index.postings,
                store.log.tokens, store.slots.rows, candidates.namespace_id, candidates.now, only, state, found,
            )  # fmt: skip
            done = following
        return found[: state[self._kernels.MATCHES]], int(state[self._kernels.EXAMINED]), done

    def _build_span(self, start: int, end: int, slot: int, donor_start: int) -> Span:
        """Build the span of one piece."""
        donor = self._store.get_at(slot)
        return Span(donor.donor_id, donor_start, start, end - start, donor.generation)


def count_tokens(pieces: MatchArray) -> int:
    return int((pieces[:, 1] - pieces[:, 0]).sum())


def check_pieces(tokens: TokenArray, pieces: MatchArray, store: DonorStore, namespace_id: int, now: int) -> None:
    """Raise GuardError unless pieces are ordered, apart, inside prompt and donor, of the namespace and not expired.

    The last check before a plan leaves, by other code than the code that found the pieces.
    """
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
