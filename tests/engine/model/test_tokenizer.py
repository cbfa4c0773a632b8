"""Text to tokens and back as the model's authors meant it, piece by piece too."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from semblend.engine.model.tokenizer import (  # noqa: E402
    ChatTemplate,
    ModelTokenizer,
    tokenizer_of_gguf,
)
from semblend.errors import InputError  # noqa: E402

CORPUS = ["the cat and the hat, it's 2024 and 12345", "café naïve ß 日本語 🎉🎉", "def f(x):\n\treturn x ** 2\n"] * 3
HERE = Path("model.gguf")


def trained_bpe() -> tuple[list[str], list[str]]:
    """Tokens and merges of a small byte-level vocabulary."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(merge) for merge in model["merges"]]


TOKENS, MERGES = trained_bpe()


def metadata(pre: str = "qwen2", **more: Any) -> dict[str, Any]:
    tokens = [*TOKENS, "<|im_start|>", "<|im_end|>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [1] * len(TOKENS) + [3, 3, 4],
        "tokenizer.ggml.bos_token_id": len(TOKENS),
        "tokenizer.ggml.eos_token_id": len(TOKENS) + 1,
    } | more


def byte_level(pre: str = "qwen2", **more: Any) -> ModelTokenizer:
    return ModelTokenizer(tokenizer_of_gguf(metadata(pre, **more), HERE), None, "here")


def with_blanks_in_front() -> ModelTokenizer:
    """The other kind of tokenizer: ▁ for a blank, the first one dropped, bytes for what is not in the vocabulary."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁b", "a", "b", "c"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({piece: at for at, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    decoders = tokenizers.decoders
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return ModelTokenizer(tokenizer, None, "here")


BYTE_LEVEL, BLANKS = byte_level(), with_blanks_in_front()


@given(st.text())
def test_decoding_gives_back_what_was_encoded(text: str) -> None:
    plain = byte_level("smollm")
    if not any("\ud800" <= char <= "\udfff" for char in text):
        assert plain.decode(plain.encode(text), keep_special=True) == text


@given(st.lists(st.integers(0, BYTE_LEVEL._tokenizer.get_vocab_size() - 1), max_size=30))
def test_streamed_text_is_the_decoded_text(ids: list[int]) -> None:
    """For any tokens, also such as no text would give: halves of characters, stray bytes, special tokens."""
    for keep in (False, True):
        stream = BYTE_LEVEL.stream(keep_special=keep)
        pieces = [stream.add(token) for token in ids]
        assert "".join([*pieces, stream.finish()]) == BYTE_LEVEL.decode(ids, keep_special=keep)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BLANKS], ids=["byte level", "blank in front"])
@given(st.text(alphabet="日本🎉é a▁b👩\u200d👧", max_size=20))
def test_no_piece_of_a_valid_text_holds_half_a_character(tokenizer: ModelTokenizer, text: str) -> None:
    stream, ids = tokenizer.stream(), tokenizer.encode(text)
    pieces = [stream.add(token) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.finish() == ""
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_stream_gives_text_as_early_as_it_is_certain() -> None:
    stream = BLANKS.stream()
    names = {"a": "▁a", "blank b": "▁b"}
    assert [stream.add(BLANKS.token_id(name) or 0) for name in names.values()] == ["a", " b"]


def test_special_tokens_are_one_token_each_and_left_out_of_text() -> None:
    ids = BYTE_LEVEL.encode("<|im_start|>the<|im_end|>")
    assert ids[0] == len(TOKENS)
    assert ids[-1] == len(TOKENS) + 1
    assert BYTE_LEVEL.decode(ids) == "the"
    assert BYTE_LEVEL.decode(ids, keep_special=True) == "<|im_start|>the<|im_end|>"
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("<tool>")) == "<tool>"


def test_a_first_token_is_added_where_the_model_wants_one() -> None:
    first = len(TOKENS)
    with_first = byte_level(**{"tokenizer.ggml.add_bos_token": True})
    assert with_first.encode("the")[0] == first
    assert with_first.encode("the", add_special=False)[0] != first
    assert BYTE_LEVEL.encode("the")[0] != first
    assert byte_level("llama-bpe").encode("the")[0] == first


def test_digits_are_cut_as_each_family_cuts_them() -> None:
    def pieces(pre: str) -> list[str]:
        cutter = tokenizer_of_gguf(metadata(pre), HERE).pre_tokenizer
        return [piece for piece, _ in cutter.pre_tokenize_str("x 12345")]

    assert pieces("smollm") == ["x", "Ġ", "1", "2", "3", "4", "5"]
    assert pieces("qwen2") == ["x", "Ġ", "1", "2", "3", "4", "5"]
    assert pieces("llama-bpe") == ["x", "Ġ", "123", "45"]
    assert pieces("gpt-2") == ["x", "Ġ12345"]


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.model": "llama"},
        {"tokenizer.ggml.pre": "unheard-of"},
        {"tokenizer.ggml.tokens": []},
        {"tokenizer.ggml.merges": None},
    ],
)
def test_a_vocabulary_that_cannot_be_built_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        tokenizer_of_gguf(metadata() | changes, HERE)


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InputError, match="surrogates"):
        BYTE_LEVEL.encode("a\ud800")


def write_folder(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text("{}")
    tokenizer_of_gguf(metadata(), HERE).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_gives_tokenizer_and_template(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    folder = write_folder(
        tmp_path, chat_template=template, bos_token={"content": "<|im_start|>"}, eos_token="<|im_end|>"
    )
    loaded = ModelTokenizer.load(folder)
    messages = [{"role": "user", "content": "the"}]
    assert loaded.has_chat_template
    assert loaded.chat_text(messages) == "<|im_start|>the<|im_end|>"
    assert loaded.encode_chat(messages) == BYTE_LEVEL.encode("<|im_start|>the<|im_end|>")
    (folder / "chat_template.jinja").write_text("newer")
    assert ModelTokenizer.load(folder).chat_text(messages) == "newer"


def test_a_folder_without_template_or_tokenizer_says_so(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    with pytest.raises(InputError, match="no chat template"):
        ModelTokenizer.load(folder).chat_text([])
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="not a readable"):
        ModelTokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"holds no tokenizer\.json"):
        ModelTokenizer.load(folder)


def rendered(source: Any, messages: Any = (), **options: Any) -> str:
    template = ChatTemplate.of(source, {"bos_token": "<s>"}, "here")
    assert template is not None
    return template.render(messages, **options)


def test_templates_get_what_transformers_gives_them() -> None:
    assert rendered("{{ bos_token }}{% if add_generation_prompt %}A:{% endif %}") == "<s>A:"
    assert rendered("x{% if add_generation_prompt %}A{% endif %}", add_generation_prompt=False) == "x"
    assert rendered("{{ tools | tojson }}", tools=[{"n": "é<"}]) == '[{"n": "é<"}]'
    assert rendered("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert rendered("{% generation %}said{% endgeneration %}") == "said"
    assert rendered("  {% if true %}\nyes\n  {% endif %}\n") == "yes\n"
    assert rendered("{{ thinking }}", thinking=True) == "True"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    assert rendered(named) == "plain"
    assert ChatTemplate.of(None, {}, "here") is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0]['missing']['deeper'] }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_that_refuses_or_reaches_out_is_an_input_error(source: str) -> None:
    with pytest.raises(InputError, match="refuses these messages"):
        rendered(source, [{"role": "user"}])


def test_calls_are_written_by_a_template_that_knows_them_and_stand_as_json_in_one_that_does_not() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"day": 9}}}
    asked = [{"role": "assistant", "content": "Let me look.", "tool_calls": [call]}]
    plain = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {}, "here")
    knowing = ChatTemplate("{% for m in messages %}{{ m.tool_calls[0].function.name }}{% endfor %}", {}, "here")
    assert plain.render(asked) == '[Let me look.\n{"name": "find", "arguments": {"day": 9}}]'
    assert plain.render([asked[0] | {"content": ""}]) == '[{"name": "find", "arguments": {"day": 9}}]'
    assert knowing.render(asked) == "find"


def test_calls_that_are_nested_too_deeply_to_be_written_are_an_input_error() -> None:
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"a": nested}
    call = {"function": {"name": "find", "arguments": nested}}
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {}, "here")
    with pytest.raises(InputError, match="refuses these messages"):
        template.render([{"role": "assistant", "content": "", "tool_calls": [call]}])


def test_a_broken_template_is_named() -> None:
    with pytest.raises(InputError, match="not valid"):
        rendered("{% for %}")


def test_the_longest_token_bounds_the_characters_that_a_number_of_tokens_can_stand_for():
    for loaded in (byte_level(), with_blanks_in_front()):
        pieces = [loaded.token_text(token) for token in range(loaded._tokenizer.get_vocab_size())]
        assert max(map(len, pieces)) <= loaded.longest_token_chars
        for text in ("the cat and the hat", "<|im_start|>" * 9, "日本語 🎉🎉" * 5, "a b c" * 7):
            assert len(text) <= len(loaded.encode(text)) * loaded.longest_token_chars
    assert byte_level().longest_token_chars == len("<|im_start|>")


SPELT = ["▁", *"abct", "▁a", "▁c", "at", "ab", "▁ca", "tat", "cat", "▁cat", "bat", "abc", "▁at"]
"""Letters first; the further back a longer piece stands, the later it is merged."""


def sentence_piece(**more: Any) -> ModelTokenizer:
    """A small vocabulary as a Llama 2 file has it: scores in place of merges, bytes for other letters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPELT]
    described = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(at) for at in range(len(SPELT))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(SPELT),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return ModelTokenizer(tokenizer_of_gguf(described | more, HERE), None, "here")


def merge_plainly(text: str) -> list[str]:
    """SentencePiece's rule by the letter: of all neighbours that make a piece, join the best, until none do."""
    parts = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        pairs = [(SPELT.index(a + b), at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in SPELT]
        if not pairs:
            return parts
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(st.text(alphabet="abct ", max_size=40))
def test_pieces_of_a_llama_2_file_are_merged_by_their_scores(text: str) -> None:
    tokenizer = sentence_piece()
    found = [259 + SPELT.index(part) for part in merge_plainly(text)]
    assert tokenizer.encode(text) == [1, *found]
    assert tokenizer.decode(found) == text


def test_letters_that_no_piece_spells_are_written_in_bytes() -> None:
    tokenizer = sentence_piece()
    assert tokenizer.decode(tokenizer.encode("a日🎉 b")) == "a日🎉 b"
    assert 0 not in tokenizer.encode("日")


def test_a_file_may_ask_for_no_blank_and_no_first_token_in_front() -> None:
    plain = sentence_piece(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False})
    assert plain.encode("cat") == [259 + SPELT.index("cat")]
    assert plain.decode(plain.encode(" cat")) == " cat"


def test_scores_that_do_not_fit_the_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="scores"):
        sentence_piece(**{"tokenizer.ggml.scores": [0.0]})
