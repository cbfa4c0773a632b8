"""The last look before a plan leaves: every span is checked again, by other code than found it."""

from __future__ import annotations

import numpy as np

from semblend.align.chain import Piece
from semblend.discover.store import DonorStore
from semblend.prompt import TokenArray


class GuardError(Exception):
    """Our own mistake: a span that must not be served. The request runs cold and an event says why."""


def check_pieces(tokens: TokenArray, pieces: list[Piece], store: DonorStore, namespace_id: int) -> None:
    """Target order, no overlap, inside prompt and donor, right namespace, alive, and equal token by token."""
    now = store.now()
    end = 0
    for piece in pieces:
        donor = store.log.view(piece.slot)
        if piece.start < end or piece.end > len(tokens) or piece.start >= piece.end:
            raise GuardError(f"span [{piece.start}, {piece.end}) overlaps or leaves the prompt of {len(tokens)} tokens")
        if piece.donor_start < 0 or piece.donor_end > len(donor):
            raise GuardError(f"span reaches outside its donor of {len(donor)} tokens")
        if store.namespace_of[piece.slot] != namespace_id:
            raise GuardError("span crosses a namespace")
        if store.expires[piece.slot] <= now:
            raise GuardError("span of an expired donor")
        if not np.array_equal(tokens[piece.start : piece.end], donor[piece.donor_start : piece.donor_end]):
            raise GuardError(f"span at {piece.start} is not token-equal to its donor")
        end = piece.end
