"""The last look before a plan leaves: every span is checked again, by other code than found it."""

from __future__ import annotations

import numpy as np

from semblend.align.exact import MatchArray
from semblend.discover.slots import LENGTH
from semblend.discover.store import DonorStore
from semblend.prompt import TokenArray


class GuardError(Exception):
    """Our own mistake: a span that must not be served. The request runs cold and an event says why."""


def check_pieces(tokens: TokenArray, pieces: MatchArray, store: DonorStore, namespace_id: int) -> None:
    """Target order, no overlap, inside prompt and donor, right namespace, alive, and equal token by token."""
    now = store.now()
    end = 0
    for start, stop, slot, donor_start in pieces.tolist():
        if start < end or stop > len(tokens) or start >= stop:
            raise GuardError(f"span [{start}, {stop}) overlaps or leaves the prompt of {len(tokens)} tokens")
        if donor_start < 0 or donor_start + stop - start > store.slots.rows[slot, LENGTH]:
            raise GuardError(f"span [{start}, {stop}) reaches outside its donor")
        if not store.is_served(slot, namespace_id, now):
            raise GuardError("span of a donor that has expired or belongs to another namespace")
        end = stop


def first_unequal(tokens: TokenArray, pieces: MatchArray, store: DonorStore) -> int:
    """Index of the first piece whose tokens are not the donor's, -1 when all are equal."""
    for i, (start, stop, slot, donor_start) in enumerate(pieces.tolist()):
        donor = store.log.view(slot)[donor_start : donor_start + stop - start]
        if not np.array_equal(tokens[start:stop], donor):
            return i
    return -1
