"""The last check before a plan leaves: every span is checked again, by other code than the code that found it."""

from __future__ import annotations

import numpy as np

from semblend.align.exact import MatchArray
from semblend.discover.slots import EXPIRES, LENGTH, NAMESPACE
from semblend.discover.store import DonorStore
from semblend.prompt import TokenArray


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
