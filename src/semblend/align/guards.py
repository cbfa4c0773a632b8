"""The last look before a plan leaves: every span is checked again, by other code than found it."""

from __future__ import annotations

import numpy as np

from semblend.align.exact import MatchArray
from semblend.discover.slots import EXPIRES, LENGTH, NAMESPACE
from semblend.discover.store import DonorStore
from semblend.prompt import TokenArray


class GuardError(Exception):
    """Our own mistake: a span that must not be served. The request runs cold and an event says why."""


def check_pieces(tokens: TokenArray, pieces: MatchArray, store: DonorStore, namespace_id: int, now: int) -> None:
    """Target order, no overlap, inside prompt and donor, of the right namespace and alive."""
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


def first_unequal(tokens: TokenArray, pieces: MatchArray, store: DonorStore) -> int:
    """Index of the first piece whose tokens are not the donor's, -1 when all are equal."""
    for i, (start, stop, slot, donor_start) in enumerate(pieces.tolist()):
        donor = store.log.view(slot)[donor_start : donor_start + stop - start]
        if not np.array_equal(tokens[start:stop], donor):
            return i
    return -1
