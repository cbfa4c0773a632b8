"""Parts of prompts to token ids. Every part is tokenized by itself: equal parts have equal ids wherever they stand.

A tokenizer may join letters over the border of two parts, which the counts then miss: at most a token for each part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from semblend.prompt import TokenArray
from semblend.text.parts import Part
from semblend.text.tokenization import Tokenizer

MOST_CACHED_TOKENS = 8_000_000


class PartTokens:
    """Token ids of parts, remembered while there is room: passages and templates come again and again."""

    def __init__(self, tokenizer: Tokenizer, most_tokens: int = MOST_CACHED_TOKENS) -> None:
        self.tokenizer = tokenizer
        self.texts_encoded = 0
        self._known: OrderedDict[str, TokenArray] = OrderedDict()
        self._held = 0
        self._most = most_tokens

    def encode(self, parts: Sequence[Part]) -> TokenArray:
        """The token ids of a prompt."""
        arrays = [part.token_ids if part.token_ids is not None else self._encode(part.text) for part in parts]
        if len(arrays) == 1:
            return arrays[0]
        return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)

    def _encode(self, text: str) -> TokenArray:
        tokens = self._known.get(text)
        if tokens is not None:
            self._known.move_to_end(text)
            return tokens
        self.texts_encoded += 1
        tokens = self.tokenizer.encode(text)
        self._known[text] = tokens
        self._held += len(tokens)
        while self._held > self._most:
            _, gone = self._known.popitem(last=False)
            self._held -= len(gone)
        return tokens
