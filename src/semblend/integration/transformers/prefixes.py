"""Which donor begins with the same tokens as a prompt: its KV of that prefix is what a prefill would compute.

Tokens are hashed in a chain of blocks, as prefix caches do, and the longest known chain names a donor. Then its tokens
are compared, so that a hash proposes and equality decides, and the prefix may end inside a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from semblend.prompt import Prompt, TokenArray

BLOCK_TOKENS = 16


class PrefixIndex:
    """Donors by the beginning of their tokens.

    >>> index = PrefixIndex()
    >>> index.add("d", Prompt(range(100)))
    >>> index.find(Prompt([*range(40), 7, 7, 7])), index.find(Prompt([*range(10), 7, 7, 7]))
    (('d', 40), None)
    """

    def __init__(self) -> None:
        self._donors: dict[bytes, dict[str, None]] = {}
        self._tokens: dict[str, Prompt] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, donor_id: str, prompt: Prompt) -> None:
        """A donor of these tokens, in the namespace of ``prompt``, can be found from now on."""
        self.remove(donor_id)
        self._tokens[donor_id] = prompt
        for key in hash_blocks(prompt):
            self._donors.setdefault(key, {})[donor_id] = None

    def remove(self, donor_id: str) -> None:
        """Forget a donor, if it was known."""
        prompt = self._tokens.pop(donor_id, None)
        for key in hash_blocks(prompt) if prompt is not None else ():
            holders = self._donors.get(key, {})
            holders.pop(donor_id, None)
            if not holders:
                self._donors.pop(key, None)

    def clear(self) -> None:
        self._donors.clear()
        self._tokens.clear()

    def find(self, prompt: Prompt) -> tuple[str, int] | None:
        """The donor with the longest common prefix, the newest of equals, and the prefix in tokens; None for none."""
        holders: dict[str, None] = {}
        for key in hash_blocks(prompt):
            if key not in self._donors:
                break
            holders = self._donors[key]
        best: tuple[str, int] | None = None
        for donor_id in reversed(holders):
            donor = self._tokens[donor_id]
            if donor.namespace != prompt.namespace:
                continue
            shared = count_common(donor.token_ids, prompt.token_ids)
            if shared >= BLOCK_TOKENS and (best is None or shared > best[1]):
                best = donor_id, shared
        return best


def hash_blocks(prompt: Prompt) -> Iterator[bytes]:
    """One hash a full block, of its tokens, all before them, and the namespace."""
    digest = hashlib.blake2b(prompt.namespace.digest.encode(), digest_size=16)
    for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
        digest.update(prompt.token_ids[end - BLOCK_TOKENS : end].tobytes())
        yield digest.digest()


def count_common(one: TokenArray, other: TokenArray) -> int:
    """How many leading tokens are equal.

    >>> count_common(Prompt([1, 2, 3]).token_ids, Prompt([1, 2, 4, 5]).token_ids)
    2
    """
    most = min(len(one), len(other))
    differ = one[:most] != other[:most]
    return int(differ.argmax()) if differ.any() else most
