"""A model's own tokenizer and chat template, from a folder's tokenizer.json or a GGUF file's metadata."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from semblend.engine.model.weights import read_header, read_json, special_tokens
from semblend.errors import InputError, MissingDependencyError
from semblend.models import resolve
from semblend.text.token_budget import TokenBudget
from semblend.text.tokenization import find_tokenizer_file, open_tokenizer_file

# -- A model's chat template: Jinja text that comes with the model, so it runs in a sandbox.
#
# A control token such as ``<|im_start|>`` counts where the template wrote it, and is plain text where it came with a
# message. Both look alike once a conversation is rendered. So the template is compiled a second time with *marked*
# literals: in them, each character that begins or ends a control token is replaced by a twin, a Unicode noncharacter.
# Messages pass through unchanged: a template that trims a content, splits it or looks into it does what it always did.


# Noncharacters: Unicode keeps them for use inside a program. A message that holds one is not encoded this way.
_TWINS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
# What looks into a text. Literals that are handed to these do not reach the output.
_LOOKING = {
    "split", "rsplit", "startswith", "endswith", "find", "rfind", "index", "rindex", "count", "strip", "lstrip",
    "rstrip", "partition", "rpartition", "removeprefix", "removesuffix", "get", "attr", "select", "reject",
    "selectattr", "rejectattr", "groupby", "sort",
}  # fmt: skip


class Marks:
    """The twins of the characters at the edges of some tokens; false where there are more edges than twins.

    >>> marks = Marks(["<s>", "</s>"])
    >>> marks.take_off(marks.put_on("<s>")) == "<s>" != marks.put_on("<s>")
    True
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        edges = sorted({edge for token in tokens for edge in (token[0], token[-1])})
        self._complete = len(edges) <= len(_TWINS)
        self.twins = dict(zip(edges, _TWINS, strict=False))
        self._put_on = str.maketrans(self.twins)
        self._take_off = str.maketrans({twin: edge for edge, twin in self.twins.items()})

    def __bool__(self) -> bool:
        return self._complete

    def put_on(self, text: str) -> str:
        return text.translate(self._put_on)

    def take_off(self, text: str) -> str:
        return text.translate(self._take_off)

    def mark_template(self, tree: Any) -> Any:
        """Mark, in place, all text of a parsed template that can reach its output; returns the tree."""
        self._mark(tree, True)
        return tree

    def _mark(self, node: Any, flows: bool) -> None:
        """``flows``: the node's value can become output. What only decides something is left as it is."""
        from jinja2 import nodes

        if isinstance(node, nodes.TemplateData):
            node.data = self.put_on(node.data)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str) and flows:
            node.value = self.put_on(node.value)
        for name, value in node.iter_fields():
            children = value if isinstance(value, list) else [value]
            for place, child in enumerate(children):
                if isinstance(child, nodes.Node):
                    self._mark(child, flows and not _only_decides(node, name, place))


def _only_decides(node: Any, field: str, place: int) -> bool:
    """Whether a child, by its field and its place there, is looked at and never printed."""
    from jinja2 import nodes

    if isinstance(node, (nodes.Compare, nodes.Test, nodes.Not)):
        return True
    if isinstance(node, nodes.Getitem):
        return field == "arg"
    if isinstance(node, nodes.Pair):
        return field == "key"
    if isinstance(node, nodes.Filter):
        called = node.name
    elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        called = node.node.attr
    else:
        return False
    if field not in ("args", "kwargs"):
        return False
    return called in _LOOKING or (called == "replace" and place == 0)


class ChatTemplate:
    """Messages to the text that the model was trained on."""

    def __init__(self, source: str, tokens: Mapping[str, str], where: str) -> None:
        self._where = where
        self._tokens = dict(tokens)
        self._source = source
        self._compiled: dict[Marks | None, Any] = {None: _compile(source, where, None)}

    @classmethod
    def of(cls, found: Any, tokens: Mapping[str, str], where: str) -> ChatTemplate | None:
        """From what a model's files hold: a template, or a list of named ones, or nothing."""
        if isinstance(found, list):  # [{"name": ..., "template": ...}]
            found = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, Mapping)}
        if isinstance(found, Mapping):
            found = found.get("default")
        return cls(found, tokens, where) if isinstance(found, str) and found else None

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of a conversation; by default it ends where the assistant is to speak.

        >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}", {}, "here")
        >>> template.render([{"role": "user", "content": "hi"}])
        'user: hi;'
        """
        return "".join(self.write(messages, **options))

    def write(
        self, messages: Sequence[Mapping[str, Any]], *, marks: Marks | None = None, **options: Any
    ) -> Iterator[str]:
        """The text of a conversation piece by piece. With ``marks``, the template's own text has them."""
        from jinja2 import TemplateError

        if marks not in self._compiled:
            self._compiled[marks] = _compile(self._source, self._where, marks)
        tokens = self._tokens if marks is None else {name: marks.put_on(text) for name, text in self._tokens.items()}
        values = {**tokens, "tools": None, "documents": None, "add_generation_prompt": True, **options}
        try:
            yield from self._compiled[marks].generate(**values, messages=self._show_calls(messages))
        except (TemplateError, TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
            raise InputError(
                f"the chat template of {self._where} refuses these messages: {error}",
                hint="messages are a list of {role, content}; some models take no system role or no tools",
            ) from None

    def _show_calls(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A template that knows nothing of calls shows them as text, a JSON object to a line behind the content."""
        shown = [dict(message) for message in messages]
        for message in shown if "tool_calls" not in self._source else ():
            calls = [_to_json(call["function"]) for call in message.pop("tool_calls", None) or ()]
            message["content"] = "\n".join(filter(None, (message["content"], *calls)))
        return shown


def _compile(source: str, where: str, marks: Marks | None) -> Any:
    try:
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise MissingDependencyError(
            "chat templates need the package jinja2", hint="pip install 'semblend-suite[local]'"
        ) from None

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's words for training; here they are only printed."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source if marks is None else marks.mark_template(environment.parse(source)))
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"the chat template of {where} is not valid: {error}", hint="pull the model again") from None


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as models saw it in training: not escaped for HTML, which Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


# -- Control tokens of a tokenizer, and a twin of the tokenizer in which no text can spell them.
#
# Every token that a tokenizer's authors added by name is a control token here (special or not: ``<|im_end|>``,
# ``<tool_call>``, ``</think>``), except those of blanks alone. The twin has the same vocabulary, ids and rules; only
# the names of these tokens are secret. So text that holds ``<|im_end|>`` is ordinary text to it, whatever is done to
# the text before tokens are looked for: normalization, merges, entries of the vocabulary that look the same.


BLANK = "▁"  # how sentencepiece writes a blank


class ControlTokens:
    """The control tokens of one `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {token.content: at for at, token in added.items() if token.content.replace(BLANK, " ").strip()}
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


# -- A tokenizer from a GGUF file: byte-level BPE (GPT-2, Qwen, Llama 3) or SentencePiece BPE (Llama 2).


# How byte-level BPE families cut text before merging, by the name that GGUF gives them. None: cut as GPT-2 does.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Cutting:
    """One family's rules before the merges."""

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


_CUTTINGS = {
    "gpt-2": _Cutting(),
    "default": _Cutting(),
    "smollm": _Cutting(single_digits=True),
    "qwen2": _Cutting(pattern=_WORDS % r"\p{N}", nfc=True),
    "llama-bpe": _Cutting(pattern=_WORDS % r"\p{N}{1,3}", ignore_merges=True, adds_bos=True),
}


def tokenizer_of_gguf(metadata: Mapping[str, Any], path: Path) -> Any:
    """A `tokenizers.Tokenizer` of the file's vocabulary."""
    kind, cutting = metadata.get("tokenizer.ggml.model"), str(metadata.get("tokenizer.ggml.pre", "default"))
    if kind == "llama":
        return _build_sentence_piece(metadata, path)
    if kind == "gpt2" and cutting in _CUTTINGS:
        return _build_byte_level(metadata, _CUTTINGS[cutting], path)
    raise InputError(
        f"{path}: tokenizer {kind!r} with pre-tokenizer {cutting!r} is not known",
        hint="use the model's safetensors folder, which carries a tokenizer.json",
    )


def _build_byte_level(metadata: Mapping[str, Any], cutting: _Cutting, path: Path) -> Any:
    """Bytes are letters; the file has the merges."""
    pieces, merges = _read_list(metadata, "tokens", path), _read_list(metadata, "merges", path)
    library = import_tokenizers(path)
    tokenizer = library.Tokenizer(
        library.models.BPE(
            {piece: at for at, piece in enumerate(pieces)},
            [tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=cutting.ignore_merges,
        )
    )
    if cutting.nfc:
        tokenizer.normalizer = library.normalizers.NFC()
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(_cutters(library, cutting))
    tokenizer.decoder = library.decoders.ByteLevel()
    _add_special(library, tokenizer, metadata)
    _add_first_token(library, tokenizer, metadata, default=cutting.adds_bos)
    return tokenizer


def _build_sentence_piece(metadata: Mapping[str, Any], path: Path) -> Any:
    """Blanks are letters, and what no piece spells is written in bytes; merges follow from the scores of the pieces."""
    pieces, scores = _read_list(metadata, "tokens", path), _read_list(metadata, "scores", path)
    if len(scores) != len(pieces):
        raise InputError(f"{path} has {len(pieces)} tokens and {len(scores)} scores", hint="pull the model again")
    library = import_tokenizers(path)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = library.Tokenizer(
        library.models.BPE(
            {piece: at for at, piece in enumerate(pieces)},
            find_merges(pieces, scores),
            unk_token=pieces[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    in_front = metadata.get("tokenizer.ggml.add_space_prefix", True)
    normalizers = [library.normalizers.Prepend(BLANK)] if in_front else []
    tokenizer.normalizer = library.normalizers.Sequence([*normalizers, library.normalizers.Replace(" ", BLANK)])
    decoders = [library.decoders.Replace(BLANK, " "), library.decoders.ByteFallback(), library.decoders.Fuse()]
    tokenizer.decoder = library.decoders.Sequence(
        [*decoders, library.decoders.Strip(" ", 1, 0)] if in_front else decoders
    )
    _add_special(library, tokenizer, metadata)
    _add_first_token(library, tokenizer, metadata, default=True)
    return tokenizer


def find_merges(pieces: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The pairs of pieces that make a piece, best score first: SentencePiece merges the best pair that it sees.

    Of two ways to make one piece, that of the better halves comes first; it decides nothing but must not change.
    """
    known = {piece: at for at, piece in enumerate(pieces)}
    found: list[tuple[float, int, int, int]] = []
    for made, piece in enumerate(pieces):
        for cut in range(1, len(piece)):
            left, right = known.get(piece[:cut]), known.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[made], made, left, right))
    return [(pieces[left], pieces[right]) for _, _, left, right in sorted(found)]


def _read_list(metadata: Mapping[str, Any], name: str, path: Path) -> Sequence[Any]:
    found: Sequence[Any] | None = metadata.get(f"tokenizer.ggml.{name}")
    if found is None or (name == "tokens" and not found):
        raise InputError(f"{path} holds no {name} of a tokenizer", hint="the file was made without a tokenizer")
    return found


def _cutters(library: Any, cutting: _Cutting) -> list[Any]:
    cutters = []
    if cutting.single_digits:
        cutters.append(library.pre_tokenizers.Digits(individual_digits=True))
    if cutting.pattern is not None:
        cutters.append(library.pre_tokenizers.Split(library.Regex(cutting.pattern), "isolated"))
    by_gpt2 = cutting.pattern is None
    return [*cutters, library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_gpt2)]


def _add_special(library: Any, tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    control: list[Any] = []
    defined: list[Any] = []
    for at, text in special_tokens(metadata):
        token = library.AddedToken(text, normalized=False, special=kinds[at] == 3)
        (control if kinds[at] == 3 else defined).append(token)
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(defined)


def _add_first_token(library: Any, tokenizer: Any, metadata: Mapping[str, Any], *, default: bool) -> None:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is None or not metadata.get("tokenizer.ggml.add_bos_token", default):
        return
    text = metadata["tokenizer.ggml.tokens"][bos]
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single=[text, "$A"], pair=[text, "$A", text, "$B"], special_tokens=[(text, bos)]
    )


def import_tokenizers(path: Path) -> Any:
    """The library, or what to install."""
    try:
        import tokenizers
    except ImportError:
        raise MissingDependencyError(
            f"the tokenizer of {path} needs the package tokenizers", hint="pip install 'semblend-suite[local]'"
        ) from None
    return tokenizers


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
    tokenizer = open_tokenizer_file(find_tokenizer_file(folder))
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
