"""A provider of your own for SGLang: it proposes the earlier request that shares most with one the cache does not know.

    semblend-sglang --semblend-provider semantic_provider:SharedPieces --model-path … (with this folder on PYTHONPATH)

The cache searches the proposed tokens for runs that are equal to the prompt's, at any offset, and moves only those.
A bad proposal costs time and never an answer. Run this file to see the provider asked, without SGLang.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from semblend.integration.sglang.semantic_prefix import SemanticPrefixProvider, SemanticPrefixResult

PIECE, STRIDE, LOOKS, KEPT = 8, 4, 128, 256


class SharedPieces(SemanticPrefixProvider):
    """Keeps the last requests and an index of their pieces of 8 tokens."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, list[int]] = OrderedDict()
        self._owners: dict[tuple[int, ...], str] = {}

    def on_request_cached(self, rid: str, token_ids: Sequence[int]) -> None:
        self._requests[rid] = list(token_ids)
        self._owners |= {tuple(token_ids[at : at + PIECE]): rid for at in range(0, len(token_ids) - PIECE, STRIDE)}
        if len(self._requests) > KEPT:
            gone, _ = self._requests.popitem(last=False)
            self._owners = {piece: owner for piece, owner in self._owners.items() if owner != gone}

    def on_prefix_miss(self, rid: str, token_ids: Sequence[int]) -> SemanticPrefixResult | None:
        del rid
        step = max(STRIDE, len(token_ids) // LOOKS)  # a provider has 5 ms, whatever the prompt's length
        places = (at + more for at in range(0, len(token_ids) - PIECE, step) for more in range(STRIDE))
        votes = Counter(self._owners.get(tuple(token_ids[at : at + PIECE])) for at in places)
        del votes[None]  # pieces that nobody has
        if not votes:
            return None
        source, shared = votes.most_common(1)[0]
        return SemanticPrefixResult(self._requests[source], num_cached_tokens=shared * step, source_id=source)


if __name__ == "__main__":
    provider, document = SharedPieces(), list(range(1000, 1080))
    provider.on_request_cached("first", [1, 2, 3, *document])  # as the cache calls it when a request has ended
    proposal = provider.on_prefix_miss("second", [7, 8, *document])
    print(f"for the second request: {proposal.source_id if proposal else None}")
