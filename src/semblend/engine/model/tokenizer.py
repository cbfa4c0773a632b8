"""A model's own tokenizer and chat template, from a folder's tokenizer.json or a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from semblend.engine.model.chat_template import ChatTemplate
from semblend.engine.model.control_tokens import ControlTokens, encode_text, refuse_control_text
from semblend.engine.model.gguf_tokenizer import import_tokenizers, tokenizer_of_gguf
from semblend.engine.model.gguf_weights import read_header
from semblend.engine.model.weights import read_json
from semblend.errors import InputError
from semblend.models import resolve
from semblend.text.token_budget import TokenBudget

TOKENIZER_FILE = "tokenizer.json"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
PATIENCE = 8  # tokens: a character has four bytes at most
_GGUF_TOKENS = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}


class ModelTokenizer:
    """Text to token ids and back, and messages to the text that the model was trained on."""

    def __init__(self, tokenizer: Any, template: ChatTemplate | None, where: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._where = where

    @classmethod
    def load(cls, path: str | Path) -> ModelTokenizer:
        """The tokenizer of a model folder, a GGUF file, or a model in the local Hugging Face cache."""
        found = resolve(path)
        return _from_gguf(found) if found.is_file() else _from_folder(found)

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def longest_token_chars(self) -> int:
        """Most characters of text that one token stands for, by the longest entry of the vocabulary.

        A byte-level vocabulary writes each byte as a character, so this is never too low for it. Rules outside the
        vocabulary can put more characters into one token: an unknown token for a whole word, a normalizer that drops
        blanks. A text that fills the context with such tokens alone is refused although it would fit.
        """
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(
        self, text: str, *, add_special: bool = True, control: bool = True, budget: TokenBudget | None = None
    ) -> list[int]:
        """Token ids; ``add_special`` puts a first token where the model wants one (not for chat text, which has it).

        Without ``control``, text such as ``<|im_end|>`` is encoded as the letters it is made of. A ``budget`` refuses a
        text that is too long after the first part of it, and can stop the work.
        """
        if budget is not None:
            budget.refuse_longer(text, lambda part: len(encode_text(self._tokenizer, part, add_special=False)))
        ids = encode_text(self._tokenizer, text, add_special=add_special)
        if control:
            return ids
        wanted = self._controls.pick(encode_text(self._tokenizer, "", add_special=add_special))
        if self._controls.pick(ids) == wanted:
            return ids
        return self._controls.encode_apart(text, wanted, add_special=add_special)

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not keep_special))

    def token_id(self, token: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_text(self, token: int) -> str:
        """The text of one token on its own, special tokens included; partial characters become U+FFFD."""
        return self.decode([token], keep_special=True)

    def stream(self, *, keep_special: bool = False) -> TextStream:
        """Text of one answer, token by token."""
        return TextStream(self, keep_special=keep_special)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Messages through the model's chat template; ``options`` such as tools reach the template."""
        return self._template_or_refuse().render(messages, **options)

    def _template_or_refuse(self) -> ChatTemplate:
        if self._template is None:
            raise InputError(f"{self._where} has no chat template", hint="send a prompt instead of messages")
        return self._template

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, budget: TokenBudget | None = None, **options: Any
    ) -> list[int]:
        """Token ids of a conversation. Control tokens come from the template alone, never from what a message says."""
        if budget is None:
            text = self.chat_text(messages, **options)
        else:
            most_chars = budget.most_tokens * self.longest_token_chars
            text = budget.join(self._template_or_refuse().write(messages, **options), most_chars)
        ids = self.encode(text, add_special=False, budget=budget)
        controls = self._controls
        marked = self._write_marked(messages, text, options)
        if marked is None:
            if controls.could_come_from(_texts_in([*messages, options])):
                raise refuse_control_text()
            return ids
        wanted = controls.find(marked)
        if controls.pick(ids) == wanted:
            return ids
        return controls.encode_apart(controls.name(marked), wanted, add_special=False)

    def prepare(self) -> bool:
        """Build what `encode` without control tokens needs; else the first such text pays for it (half a second).

        False where text that spells a control token will be refused, because it cannot be told from the template's.
        """
        return self._controls.twin is not None and (self._template is None or self._marks_work)

    def _write_marked(self, messages: Sequence[Mapping[str, Any]], text: str, options: Mapping[str, Any]) -> str | None:
        """The conversation with marks on the template's own text; None where marks do not tell it from messages.

        That is so where a message holds the marks themselves, and with a template that keeps a literal in a variable
        and then looks for it in a message.
        """
        marks = self._controls.marks
        if not self._marks_work:
            return None
        marked = self._template_or_refuse().render(messages, marks=marks, **options)
        return marked if marks.take_off(marked) == text else None  # a mark in a message is taken off, too: not equal

    @cached_property
    def _controls(self) -> ControlTokens:
        return ControlTokens(self._tokenizer)

    @cached_property
    def _marks_work(self) -> bool:
        """Whether marks show every control token that the template writes, tried with one message."""
        controls, template = self._controls, self._template_or_refuse()
        harmless = [{"role": "user", "content": "a"}]
        try:
            written = controls.find(template.render(harmless, marks=controls.marks))
        except InputError:  # a template that wants other messages
            return False
        ids = encode_text(self._tokenizer, template.render(harmless), add_special=False)
        return bool(controls.marks) and controls.equal(written, ids)


def _texts_in(value: Any) -> list[str]:
    """All texts in messages and options, however deep."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for key, one in value.items() if key != "role" for text in _texts_in(one)]
    return [text for one in value for text in _texts_in(one)] if isinstance(value, (list, tuple)) else []


class TextStream:
    """Gives out text as tokens come, never half a character: joined, the pieces are what `decode` gives for all.

    (A tokenizer with byte tokens decodes a run of them that is not UTF-8 as a whole; only there can pieces differ.)
    A token can end inside a character (shown as U+FFFD at the end until the rest comes), and some tokenizers drop
    the blank before a first word; so tokens are decoded together with those of the last piece given out.
    """

    def __init__(self, tokenizer: ModelTokenizer, *, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._window: list[int] = []
        self._settled = 0
        self._sent = 0

    def add(self, token: int) -> str:
        """The text that this token makes certain; often empty inside a character."""
        self._window.append(token)
        text = self._text()
        if text.endswith(REPLACEMENT):
            if len(self._window) - self._settled < PATIENCE:
                return ""
            return self._give(text[:-1])  # bytes that are no text; only the last can still become some
        piece = self._give(text)
        if piece:
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
            self._sent = len(self._text())
        return piece

    def finish(self) -> str:
        """What is left when no more tokens come."""
        return self._give(self._text())

    def _give(self, text: str) -> str:
        piece, self._sent = text[self._sent :], max(self._sent, len(text))
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, keep_special=self._keep_special)


def _from_folder(folder: Path) -> ModelTokenizer:
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise InputError(f"{folder} holds no {TOKENIZER_FILE}", hint="point at the folder of a fast tokenizer")
    library = import_tokenizers(path)
    try:
        tokenizer = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception for a bad file
        raise InputError(f"{path} is not a readable tokenizer.json: {error}", hint="pull the model again") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    template_file = folder / "chat_template.jinja"
    template: Any = config.get("chat_template")
    if template_file.is_file():  # the newer home of templates
        template = template_file.read_text(encoding="utf-8")
    tokens = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return ModelTokenizer(tokenizer, ChatTemplate.of(template, tokens, str(folder)), str(folder))


def _content(token: Any) -> str:
    """Special tokens are written as text, or as an object that holds the text."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token or "")


def _from_gguf(path: Path) -> ModelTokenizer:
    metadata = read_header(path).metadata
    tokenizer = tokenizer_of_gguf(metadata, path)
    pieces = metadata["tokenizer.ggml.tokens"]
    tokens = {}
    for theirs, ours in _GGUF_TOKENS.items():
        at = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        tokens[ours] = pieces[at] if at is not None and at < len(pieces) else ""
    template = ChatTemplate.of(metadata.get("tokenizer.chat_template"), tokens, str(path))
    return ModelTokenizer(tokenizer, template, str(path))
