"""Control tokens of a tokenizer, and a twin of the tokenizer in which no text can spell them.

Every token that a tokenizer's authors added by name is a control token here (special or not: ``<|im_end|>``,
``<tool_call>``, ``</think>``), except those of blanks alone. The twin has the same vocabulary, ids and rules; only the
names of these tokens are secret. So text that holds ``<|im_end|>`` is ordinary text to it, whatever is done to the text
before tokens are looked for: normalization, merges, entries of the vocabulary that look the same.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from semblend.engine.model.chat_template import Marks
from semblend.errors import InputError

_BLANK = "▁"  # how sentencepiece writes a blank


class ControlTokens:
    """The control tokens of one `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {token.content: at for at, token in added.items() if token.content.replace(_BLANK, " ").strip()}
        self._all = frozenset(self._ids.values())
        secret = secrets.token_hex(16)  # nobody outside can write one of these names
        self._names = {content: f"{secret}{at:08x}" for content, at in self._ids.items()}
        self._marked = _compile_marked(self._ids, self.marks)

    @cached_property
    def marks(self) -> Marks:
        return Marks(self._ids)

    @cached_property
    def twin(self) -> Any:
        """The tokenizer with secret names; None where it cannot be built with the same ids."""
        return _build_twin(self._tokenizer, self._names)

    @cached_property
    def _unknown(self) -> int | None:
        """The id that stands for what the vocabulary lacks; the twin gives it for such text only."""
        model = json.loads(self._tokenizer.to_str())["model"]
        name = model.get("unk_token")
        found: int | None = self._tokenizer.token_to_id(name) if name else model.get("unk_id")
        return found

    def pick(self, ids: Sequence[int]) -> list[int]:
        """The control tokens among token ids, in order."""
        return [token for token in ids if token in self._all]

    def equal(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Whether two lists of tokens have the same control tokens, the unknown token aside."""
        first, second = ([token for token in self.pick(ids) if token != self._unknown] for ids in (one, other))
        return first == second

    def find(self, marked: str) -> list[int]:
        """The control tokens that a template wrote into a text with marks, in order."""
        return [self._ids[self.marks.take_off(match.group())] for match in self._marked.finditer(marked)]

    def name(self, marked: str) -> str:
        """A text with marks for the twin: what the template wrote has its secret name, all else its own letters."""
        named = self._marked.sub(lambda match: self._names[self.marks.take_off(match.group())], marked)
        return self.marks.take_off(named)

    def encode_apart(self, text: str, wanted: Sequence[int], *, add_special: bool) -> list[int]:
        """Token ids by the twin. `InputError` where their control tokens are not the ``wanted`` ones."""
        if self.twin is None:
            raise refuse_control_text()
        ids = encode_text(self.twin, text, add_special=add_special)
        if not self.equal(ids, wanted):
            raise refuse_control_text()
        return ids

    def could_come_from(self, texts: Sequence[str]) -> bool:
        """Whether texts hold control tokens, also after normalization, or two letters of one where they could touch."""
        for text in texts:
            ids = encode_text(self._tokenizer, text, add_special=False)
            if not self.equal(ids, ()) or self._touches(text.strip()):
                return True
        return False

    def _touches(self, text: str) -> bool:
        heads, tails, longest = self._fragments
        cuts = range(2, min(longest, len(text) + 1))
        if any(text[-cut:] in heads or text[:cut] in tails for cut in cuts):
            return True
        return 1 < len(text) < longest and any(text in token for token in self._ids)

    @cached_property
    def _fragments(self) -> tuple[frozenset[str], frozenset[str], int]:
        """How control tokens begin, how they end (two letters at least, not all), and the length of the longest."""
        heads = frozenset(token[:cut] for token in self._ids for cut in range(2, len(token)))
        tails = frozenset(token[-cut:] for token in self._ids for cut in range(2, len(token)))
        return heads, tails, max(map(len, self._ids), default=0)


def encode_text(tokenizer: Any, text: str, *, add_special: bool) -> list[int]:
    """Token ids by a `tokenizers.Tokenizer`. Its batch call lets other threads run meanwhile, its plain call does not.

    (700,000 digits: every other thread stood still for 2.1 s with the one, 0.01 s with the other.)
    """
    try:
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
    except (UnicodeEncodeError, TypeError):  # which one depends on the version of the binding
        raise InputError("the text has lone surrogates", hint="send valid Unicode") from None
    return ids


def refuse_control_text() -> InputError:
    return InputError(
        "the text holds control tokens of the model, and they cannot be told from its chat template's own",
        hint="take tokens such as <|im_end|> out of the text",
    )


def _compile_marked(ids: Mapping[str, int], marks: Marks) -> re.Pattern[str]:
    """Finds tokens whose first and last character a template wrote.

    What is between may be a message's role: some templates write ``'<|' + role + '|>'``.
    """
    longest_first = sorted(ids, key=len, reverse=True)
    return re.compile("|".join(_spell(token, marks.twins) for token in longest_first) or r"(?!)")


def _spell(token: str, twins: Mapping[str, str]) -> str:
    def inner(char: str) -> str:
        return f"[{re.escape(char)}{twins[char]}]" if char in twins else re.escape(char)

    first, last = twins.get(token[0], token[0]), twins.get(token[-1], token[-1])
    return first if len(token) == 1 else first + "".join(map(inner, token[1:-1])) + last


def _build_twin(tokenizer: Any, names: Mapping[str, str]) -> Any:
    made = json.loads(tokenizer.to_str())
    model, added = made["model"], made["added_tokens"]
    if not isinstance(model["vocab"], dict):  # Unigram: pairs of piece and score, and the place is the id
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    for token in added:
        content = token["content"]
        token["content"] = names.get(content, content)
        if isinstance(model["vocab"], dict):  # with its id: a tokenizer numbers what is not here by itself
            model["vocab"].pop(content, None)
            model["vocab"][token["content"]] = token["id"]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [merge for merge in model["merges"] if not _makes_one_of(merge, names)]
    twin = type(tokenizer).from_str(json.dumps(made))
    right = all(twin.token_to_id(token["content"]) == token["id"] for token in added)
    return twin if right and all(twin.token_to_id(content) is None for content in names) else None


def _makes_one_of(merge: Sequence[str], names: Mapping[str, str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names
