"""Candidates → Alignment: token-equal spans, and of them the best cover of the prompt."""

from __future__ import annotations

import time
from dataclasses import dataclass

from semblend.align import guards
from semblend.align.backends import Scan, make_backend
from semblend.discover.search import Candidates
from semblend.discover.store import DonorStore
from semblend.fingerprint.hashes import HashScheme
from semblend.prompt import Prompt
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
        guards.check_pieces(tokens, pieces, self._store, candidates.namespace_id, candidates.now)
        if (wrong := self._backend.find_first_unequal(tokens, pieces)) >= 0:
            raise guards.GuardError(f"span at {pieces[wrong, 0]} is not token-equal to its donor")
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
