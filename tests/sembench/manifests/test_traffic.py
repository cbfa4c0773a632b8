"""Your own logs become a manifest and conversations, whatever shape they have."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sembench.cli import main
from sembench.manifests.cases import Case, read_manifest
from sembench.manifests.traffic import (
    NEGATIVE,
    NEXT_TURN,
    OWN_TRAFFIC,
    TrafficBuilder,
    TrafficOptions,
    group_conversations,
    read_traffic,
)

DOCUMENT = " ".join(f"pier {at} holds {at * 7 % 50} boats in the year {1900 + at}," for at in range(40))
OTHER = " ".join(f"mountain {at} rises {at * 13} metres above the fjord;" for at in range(40))


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def build(folder: Path, *rows: dict[str, Any], flags: tuple[str, ...] = ()) -> list[Case]:
    log, output = write(folder / "own.jsonl", *rows), folder / "cases.jsonl"
    assert main(["build", "--profile", "jsonl", "--input", log, "--output", str(output), "--quiet", *flags]) == 0
    return list(read_manifest(output))


def chat(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]


def test_a_prompt_that_shares_text_with_an_earlier_one_gets_it_as_its_donor(tmp_path: Path) -> None:
    cases = build(
        tmp_path, {"prompt": f"Read this. {DOCUMENT} How many boats?"}, {"prompt": f"Geography. {OTHER} How high?"},
        {"prompt": f"Another question about it: {DOCUMENT} Which year?"}, flags=("--negatives", "2"),
    )  # fmt: skip
    own = [case for case in cases if case.transform == OWN_TRAFFIC]
    assert [case.donor_prompts[0].text[:10] for case in own] == ["Read this."]
    negatives = [case for case in cases if case.negative_control]
    assert len(negatives) == 2
    assert negatives[0].recipient_prompt.startswith("Geography.")  # shares nothing with any other
    assert {case.transform for case in negatives} == {NEGATIVE}
    assert main(["audit-manifest", "--manifest", str(tmp_path / "cases.jsonl")]) == 0


def test_a_tenants_prompt_is_no_donor_for_another(tmp_path: Path) -> None:
    rows = [{"prompt": f"Read this. {DOCUMENT}", "user": "a"}, {"prompt": f"Please read. {DOCUMENT}", "user": "b"}]
    cases = build(tmp_path, *rows, flags=("--negatives", "0"))
    assert cases == []


def test_messages_and_tools_are_kept_as_they_were_logged(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    called = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]}  # fmt: skip
    first = chat(f"Find the boats. {DOCUMENT}")
    later = [*first, called, {"role": "tool", "tool_call_id": "c1", "content": "seven boats"}]
    rows = [{"messages": first, "tools": tools}, {"request": {"messages": later, "tools": tools}, "response": "7"}]
    (case,) = build(tmp_path, *rows, flags=("--negatives", "0"))
    assert case.transform == NEXT_TURN
    assert case.metadata["messages"] == later
    assert case.metadata["tools"] == tools
    assert case.donor_prompts[0].metadata["messages"] == first
    assert case.metadata["logged_answer"] == "7"


def test_sharegpt_conversations_become_turns(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": f"Read. {DOCUMENT}"}, {"from": "gpt", "value": "Done."},
            {"from": "human", "value": "How many boats?"}, {"from": "gpt", "value": "Seven."}]  # fmt: skip
    log = write(tmp_path / "share.jsonl", {"id": "x1", "conversations": talk})
    (turns,) = group_conversations(read_traffic([log]))
    assert [len(turn.messages) for turn in turns] == [1, 3]
    cases = build(tmp_path, {"id": "x1", "conversations": talk}, flags=("--negatives", "0"))
    assert [(case.transform, case.source_id) for case in cases] == [(NEXT_TURN, "x1")]


def test_turns_are_joined_by_their_messages_and_gaps_come_from_the_log(tmp_path: Path) -> None:
    one, two = chat("a"), chat("b")
    rows = [
        {"messages": one, "timestamp": 100.0}, {"messages": two, "timestamp": 101.0},
        {"messages": chat("a", "yes", "more"), "timestamp": 104.5},
        {"messages": chat("b", "no", "less"), "timestamp": "2026-11-16T10:00:00Z"},
        {"prompt": "text alone"},
    ]  # fmt: skip
    found = group_conversations(read_traffic([write(tmp_path / "log.jsonl", *rows)]))
    assert [len(turns) for turns in found] == [2, 2, 1]
    assert [turn.gap_s for turn in found[0]] == [None, 4.5]


def test_a_packed_log_is_read_and_equal_lines_have_names_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl.gz"
    with gzip.open(path, "wt") as stream:
        stream.writelines(json.dumps({"prompt": f"Read this. {DOCUMENT}"}) + "\n" for _ in range(3))
    cases = list(TrafficBuilder(TrafficOptions(negatives=0)).build_cases(read_traffic([str(path)])))
    assert len({case.item_id for case in cases}) == len(cases) == 2
    both = list(TrafficBuilder(TrafficOptions(negatives=0)).build_cases(read_traffic([str(path), str(path)])))
    assert len({case.item_id for case in both}) == len(both) == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"no": "prompt"}\n', "no prompt in it"),
        ("", "holds no prompt"),
        ('{"token_ids": [1, 2, 3]}\n', "token ids, not text"),
        ("{broken\n", "not JSON"),
    ],
)
def test_a_log_without_prompts_is_refused_with_its_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "bad.jsonl"
    log.write_text(text)
    assert main(["build", "--profile", "jsonl", "--input", str(log), "--output", str(tmp_path / "x.jsonl")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "hint: " in said


def test_the_flags_of_the_profiles_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--profile", "jsonl", "--output", str(tmp_path / "x.jsonl")]) == 2
    assert "--input FILE" in capsys.readouterr().err
    assert main(["build", "--profile", "fixture", "--input", "x", "--output", str(tmp_path / "x.jsonl")]) == 2
    assert "--profile jsonl does" in capsys.readouterr().err
