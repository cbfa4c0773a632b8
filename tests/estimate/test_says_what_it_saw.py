"""The estimate tells what it did not recognise, did not count or did not reuse; nothing is lost in silence."""

from __future__ import annotations

import json
import random
import runpy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.cli.main import main
from semblend.estimate.page import render_page
from semblend.estimate.replay import Replay, ReplayOptions
from semblend.estimate.steps import ArrangePassages
from semblend.text.chat import list_chat_parts
from semblend.text.logs import LoggedPrompt
from semblend.text.parts import Part, join_parts, split_parts
from semblend.text.tokenization import StableTokenizer

ROOT = Path(__file__).parents[2]
WORDS = [
    f"{a}{b}" for a in ("fer", "har", "tic", "gul", "sal", "moor") for b in ("ry", "bour", "ket", "ls", "t", "ing")
]


def make_text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choice(WORDS) + str(chance.randrange(50)) for _ in range(words))


def write_rag_log(path: Path, write: Callable[[list[str]], str], requests: int = 30) -> Path:
    """Questions over four of ten documents in an order drawn by chance; ``write`` makes the list of passages."""
    chance = random.Random(5)
    documents = [make_text(chance, 150) for _ in range(10)]
    lines = []
    for n in range(requests):
        listed = write(chance.sample(documents, 4))
        lines.append({"prompt": f"Answer from the passages.\n\n{listed}\n\nQuestion: {make_text(chance, 8)} {n}?"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def estimate(path: Path, *flags: str) -> dict[str, Any]:
    target = path.with_suffix(".answer.json")
    assert main(["estimate", str(path), "--json", str(target), "--quiet", *flags]) == 0
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def get_row(answer: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in answer["rows"] if row["name"] == name)


FORMS: dict[str, Callable[[list[str]], str]] = {
    "Passage:": lambda found: "\n\n".join(f"Passage: {one}" for one in found),
    "Passage: on a line": lambda found: "\n".join(f"Passage:\n{one}" for one in found),
    "**Document:**": lambda found: "\n\n".join(f"**Document:** {one}" for one in found),
    "Source:": lambda found: "\n".join(f"Source: {one}" for one in found),
    "Context:": lambda found: "\n\n".join(f"Context:\n{one}" for one in found),
    "Title:": lambda found: "\n\n".join(f"Title: {one[:20]}\nText: {one}" for one in found),
    "headings": lambda found: "\n\n".join(f"### Document\n{one}" for one in found),
    "rules": lambda found: "---\n" + "\n---\n".join(found) + "\n---\n",
    "tags": lambda found: "\n".join(f"<kb_entry>\n{one}\n</kb_entry>" for one in found),
    "nested tags": lambda found: (
        "<documents>\n"
        + "\n".join(f'<document id="{n}">\n<title>{one[:9]}</title>\n{one}\n</document>' for n, one in enumerate(found))
        + "\n</documents>"
    ),
    "numbers": lambda found: "\n\n".join(f"Passage {n}: {one}" for n, one in enumerate(found, 1)),
}


@pytest.mark.parametrize("form", FORMS)
def test_passages_are_recognised_however_they_are_labelled(form: str, tmp_path: Path) -> None:
    answer = estimate(write_rag_log(tmp_path / "log.jsonl", FORMS[form]))
    assert answer["passages"]["assumed"] >= 2 * 30
    arrange, fast = get_row(answer, "arrange"), get_row(answer, "fast")
    assert arrange["saved_tokens"] > 0.1 * answer["total"]["prompt_tokens"]
    assert arrange["saved_tokens"] > fast["saved_tokens"]
    assert arrange["note"] == ""


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(f"User: {'hello there ' * 9}\nAssistant: {'good day to you ' * 9}" for _ in range(4)),
        "\n".join(f"Question: {'what is it ' * 9}\nAnswer: {'it is that ' * 9}" for _ in range(4)),
        "\n".join(f"<turn>{'we spoke of it ' * 9}</turn>" for _ in range(4)),
        "\n".join(f"<p>{'a paragraph of a page ' * 9}</p>" for _ in range(4)),
        f"## Task\n{'do it ' * 30}\n## Rules\n{'so and so ' * 30}\n## Form\n{'as JSON ' * 30}\n",
        f"Context: {'one text only ' * 20}\n\nQuestion: why?",
        "\n".join(f"ANNA: {'we spoke of it ' * 9}\nBERT: {'so we did ' * 9}" for _ in range(4)),
        "\n---\n".join(f"### {n}. Facts\n{'so it is ' * 20}" for n in range(5)),
    ],
    ids=["turns", "questions", "turn tags", "markup", "sections", "one", "a play", "ruled sections"],
)
def test_what_has_an_order_of_its_own_is_not_taken_for_passages(text: str) -> None:
    parts = split_parts((Part(text),), "auto")
    assert [part.kind for part in parts] == ["text"]


@given(
    st.lists(
        st.sampled_from([*"ab: \n", "Passage: ", "---\n", "<doc>", "</doc>", "### Source\n", "x" * 50]), max_size=40
    )
)
def test_splitting_loses_no_character(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert join_parts(split_parts((Part(text),), "auto")) == text


def test_a_log_without_passages_is_told_so_in_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_rag_log(tmp_path / "log.jsonl", "\n\n".join)
    answer = estimate(log)
    told = "No passages recognised; --passages paragraphs splits at blank lines"
    assert told in capsys.readouterr().out
    assert told in get_row(answer, "arrange")["note"]
    assert "none recognised" in get_row(answer, "arrange")["title"]
    assert render_page(answer).count(told) >= 1
    split = estimate(log, "--passages", "paragraphs")
    assert get_row(split, "arrange")["saved_tokens"] > 0
    assert get_row(split, "arrange")["note"] == ""


# -- more memory never saves less ------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), arranged=st.booleans(), cache=st.sampled_from([320, 800, 1600, 3200]))
@settings(max_examples=12, deadline=None)
def test_more_memory_never_saves_less(seed: int, arranged: bool, cache: int) -> None:
    chance = random.Random(seed)
    documents = [make_text(chance, chance.randrange(30, 120)) for _ in range(12)]
    options = ReplayOptions(
        cache_tokens=cache,
        donor_tokens=chance.choice([800, 3200]),
        pass_tokens=chance.choice([0, 100]),
        factors=(2, 4, 8),
    )
    steps = [ArrangePassages(cache)] if arranged else []
    with Replay(steps, StableTokenizer(), options) as replay:
        for n in range(40):
            found = chance.sample(documents, chance.randrange(1, 4))
            parts = (Part("Answer.\n"), *(Part(one, "passage", "g") for one in found), Part(f"\nWhy {n}?"))
            replay.add(LoggedPrompt(n, text=join_parts(parts), parts=parts))
        computed = dict(replay.list_computed())
        used = [computed[name] for name in ("fast", "memory x2", "memory x4", "memory x8")]
        assert used == sorted(used, reverse=True)
        curves = replay.list_curves()
        assert curves["as_it_is"] == sorted(curves["as_it_is"])
        assert all(loss > 0 for loss in replay.list_unused().values())


def test_memory_that_does_not_help_is_said_to_stand_unused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the memory once saved a negative number: more is moved, and what is moved makes no exact prefix."""
    chance = random.Random(17)
    documents = [make_text(chance, chance.randrange(30, 120)) for _ in range(12)]
    for seed in range(40):
        log, draw = tmp_path / f"{seed}.jsonl", random.Random(seed)
        prompts = ["\n".join([*draw.sample(documents, draw.randrange(1, 4)), f"Why {n}?"]) for n in range(40)]
        log.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        answer = estimate(log, "--cache-tokens", "800", "--break-even-tokens", "1")
        rows = [row for row in answer["rows"] if row["name"].startswith("memory")]
        assert min(row["saved_tokens"] for row in rows) >= 0
        noted = [row for row in rows if row["note"]]
        if noted:
            assert "takes the best size up to this one" in noted[0]["note"]
            assert noted[0]["note"] in capsys.readouterr().out
            return
    pytest.fail("no log in which more memory computes more")


# -- no content is lost ----------------------------------------------------------------------------------------------


def list_kinds(content: Iterable[Any]) -> tuple[str, list[str]]:
    parts = list_chat_parts([{"role": "user", "content": list(content)}])
    return join_parts(parts), [part.group for part in parts if part.kind == "omitted"]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "tool_result", "tool_use_id": "t", "content": "the ferry sails at nine"},
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "the ferry sails at nine"}]},
        {"type": "document", "source": {"type": "text", "data": "the ferry sails at nine"}},
        {
            "type": "document",
            "source": {"type": "content", "content": [{"type": "text", "text": "the ferry sails at nine"}]},
        },
        {"type": "tool_use", "id": "t", "name": "look_up", "input": {"what": "the ferry sails at nine"}},
        {
            "type": "search_result",
            "source": "https://x",
            "content": [{"type": "text", "text": "the ferry sails at nine"}],
        },
        {"type": "thinking", "thinking": "the ferry sails at nine"},
        {"type": "refusal", "refusal": "the ferry sails at nine"},
        {"type": "function_call_output", "output": "the ferry sails at nine"},
        {"type": "something_new", "text": "the ferry sails at nine"},
    ],
    ids=lambda block: block["type"],
)
def test_the_text_of_a_block_is_counted_whatever_its_type(block: dict[str, Any]) -> None:
    text, left_out = list_kinds([{"type": "text", "text": "Read this."}, block])
    assert "the ferry sails at nine" in text
    assert left_out == []


def test_documents_of_a_request_count_with_all_of_their_tokens(tmp_path: Path) -> None:
    """Documents of 2,000 tokens once counted as a placeholder."""
    chance = random.Random(1)
    documents = [make_text(chance, 500) for _ in range(3)]
    blocks = [{"type": "document", "source": {"type": "text", "data": one}} for one in documents]
    log = tmp_path / "log.jsonl"
    body = {"messages": [{"role": "user", "content": [*blocks, {"type": "text", "text": "When?"}]}]}
    log.write_text(json.dumps(body) + "\n" + json.dumps(body) + "\n")
    count = len(StableTokenizer().encode(" ".join(documents)))
    assert estimate(log)["total"]["prompt_tokens"] >= 2 * count


def test_what_has_no_text_is_counted_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    linked = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    scan = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
    sound = {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}
    shown = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a map"}, image]}
    log = tmp_path / "log.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]},
        {"messages": [{"role": "user", "content": [linked, scan, sound, {"type": "text", "text": "And that?"}]}]},
        {"messages": [{"role": "user", "content": [shown, {"type": "text", "text": "And there?"}]}]},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = estimate(log)
    told = "3 images and 1 file and 1 sound left out: their tokens are not counted"
    assert answer["left_out"] == {"image": 3, "file": 1, "sound": 1}
    assert told in capsys.readouterr().out
    assert told in render_page(answer)


def test_arguments_of_tool_calls_are_text() -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "nine"}'}}],
    }
    assert "nine" in join_parts(list_chat_parts([{"role": "user", "content": "Hi"}, call]))


# -- what is too little to reuse -------------------------------------------------------------------------------------


def test_what_the_break_even_hides_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(2)
    document = make_text(chance, 120)
    log = tmp_path / "log.jsonl"
    fronts = [make_text(chance, words) for words in (3, 90, 40, 70)]  # too different to be a field that could be moved
    log.write_text("".join(json.dumps({"prompt": f"{front}\n{document}\n{front}"}) + "\n" for front in fronts))
    hidden, shown = estimate(log), estimate(log, "--break-even-tokens", "1")
    assert get_row(hidden, "fast")["saved_tokens"] == get_row(hidden, "balanced")["saved_tokens"] == 0
    saved = get_row(shown, "fast")["saved_tokens"] + get_row(shown, "balanced")["saved_tokens"]
    assert hidden["below_break_even"]["prompts"] == 3
    assert hidden["below_break_even"]["tokens"] == pytest.approx(saved, rel=0.3)
    note = get_row(hidden, "fast")["note"]
    assert f"{hidden['below_break_even']['tokens']:,} tokens in 3 prompts" in note
    assert "600 tokens that a pass costs (--break-even-tokens)" in note
    assert note in capsys.readouterr().out
    assert note in render_page(hidden).replace("&#x27;", "'")
    assert "break-even" not in get_row(shown, "fast")["note"]


def test_a_prompt_that_shares_most_of_its_tokens_is_not_called_new(tmp_path: Path) -> None:
    chance = random.Random(3)
    document = make_text(chance, 100)
    log = tmp_path / "log.jsonl"
    prompts = [f"First.\n{document}", f"Tell me something else now.\n{document}", make_text(chance, 90)]
    log.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    breaks = estimate(log)["breaks"]
    assert breaks["nothing like it before"]["prompts"] == 2  # the first and the last
    assert breaks["same text elsewhere, too little for a pass"]["examples"][0]["line"] == 2


def test_the_example_and_the_command_tell_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = ROOT / "examples" / "data" / "ferry_desk.jsonl"
    target = tmp_path / "answer.json"
    assert main(["estimate", str(log), "--json", str(target), "--quiet"]) == 0
    answer = json.loads(target.read_text())
    capsys.readouterr()
    before = sys.argv
    sys.argv = ["estimate_log.py"]
    try:
        runpy.run_path(str(ROOT / "examples" / "estimate_log.py"), run_name="__main__")
    finally:
        sys.argv = before
    told = capsys.readouterr().out
    total = answer["total"]["prompt_tokens"]
    reused = sum(get_row(answer, name)["saved_tokens"] for name in ("balanced", "fast"))
    assert (
        f"of {total} tokens, an exact prefix cache holds {answer['rows'][0]['saved_tokens']}; reuse at any offset adds "
        f"{reused}\n{answer['below_break_even']['tokens']} more stand in donors" in told
    )
    assert answer["below_break_even"]["tokens"] > 0


# -- logs of other forms ---------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "When does it sail?"}]


@pytest.mark.parametrize("write", [json.dumps, repr])
def test_messages_that_a_gateway_wrote_as_text_are_read(write: Callable[[Any], str], tmp_path: Path) -> None:
    one, other = tmp_path / "text.jsonl", tmp_path / "list.jsonl"
    one.write_text(json.dumps({"model": "m", "messages": write(CHAT)}) + "\n")
    other.write_text(json.dumps({"model": "m", "messages": CHAT}) + "\n")
    assert estimate(one)["total"]["prompt_tokens"] == estimate(other)["total"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"type": "user", "sessionId": "s", "uuid": "u", "message": CHAT[0]}, "a transcript of Claude Code"),
        ({"type": "response_item", "timestamp": "t", "payload": {"type": "message"}}, "a transcript of Codex"),
        ({"type": "message", "timestamp": "t", "message": CHAT[0]}, "a transcript of a coding agent"),
        ({"traj": CHAT, "task_id": 1}, "a trajectory of an agent"),
        ({"id": "b", "custom_id": "r", "response": {"status_code": 200, "body": {"choices": []}}}, "a batch output"),
    ],
    ids=["claude code", "codex", "coding agent", "trajectory", "batch output"],
)
def test_a_log_that_holds_no_requests_is_named(
    record: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(record) + "\n")
    assert main(["estimate", str(log), "--quiet"]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 2
    assert named in told[0]
    assert told[1].startswith("hint: ")


@pytest.mark.parametrize(
    ("second", "named"),
    [
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, "sharegpt"),
        ("DEBUG Request r-1 details: prompt: 'Hi', prompt_token_ids: [1, 2]", "vllm"),
    ],
)
def test_a_line_of_another_format_is_named(
    second: Any, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    line = second if isinstance(second, str) else json.dumps(second)
    log.write_text(json.dumps({"messages": CHAT}) + "\n" + line + "\n")
    assert main(["estimate", str(log), "--quiet"]) == 2
    told = capsys.readouterr().err
    assert "the log began as openai" in told
    assert f"hint: this line looks like {named}" in told
