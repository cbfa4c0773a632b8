"""The estimate counts what both caches hold, from tokens alone, and promises no more than that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend import Namespace, Prompt
from semblend.cli.main import main
from semblend.estimate import EstimateOptions, Estimator, PrefixIndex, RequestEstimate, bucket_names

RANDOM = np.random.default_rng(11)
DOCUMENT = RANDOM.integers(1000, 30_000, 400).tolist()
SHIFTED = [*range(1, 21), *DOCUMENT]
OTHER = RANDOM.integers(40_000, 60_000, 300).tolist()


def estimate(*prompts: list[int], tenants: tuple[str, ...] = (), **options: Any) -> list[RequestEstimate]:
    names = tenants or ("",) * len(prompts)
    with Estimator(EstimateOptions(**options)) as estimator:
        return [
            estimator.add(Prompt(ids, namespace=Namespace(tenant=tenant)))
            for ids, tenant in zip(prompts, names, strict=True)
        ]


def test_the_first_prompt_has_nothing_to_reuse() -> None:
    assert estimate(DOCUMENT) == [RequestEstimate(400, 0, 0, 0)]


def test_a_repeated_prompt_is_all_prefix_but_for_the_last_block_that_an_engine_must_compute() -> None:
    _, again = estimate(DOCUMENT, DOCUMENT)
    assert again.prefix_tokens == 384  # 400 tokens are 25 blocks; the last token is computed, so 24 blocks are held
    assert again.reused_tokens == 399
    assert again.seam_tokens == 0


def test_a_shifted_document_is_missed_by_the_prefix_cache_and_found_at_its_offset() -> None:
    _, moved = estimate(DOCUMENT, SHIFTED)
    assert moved.prefix_tokens == 0
    assert moved.reused_tokens == 399
    assert moved.seam_tokens == 16


def test_a_donor_of_another_tenant_is_invisible_to_both_caches() -> None:
    _, foreign = estimate(DOCUMENT, DOCUMENT, tenants=("a", "b"))
    assert (foreign.prefix_tokens, foreign.reused_tokens) == (0, 0)


def test_with_room_for_one_donor_both_caches_forget_the_older_one() -> None:
    *_, last = estimate(DOCUMENT, OTHER, DOCUMENT, max_donors=1)
    assert (last.prefix_tokens, last.reused_tokens) == (0, 0)
    *_, kept = estimate(DOCUMENT, OTHER, DOCUMENT, max_donors=2)
    assert kept.prefix_tokens == 384


def test_a_donor_that_was_of_use_outlives_an_older_one() -> None:
    third = RANDOM.integers(70_000, 90_000, 300).tolist()
    *_, last = estimate(DOCUMENT, OTHER, SHIFTED, third, SHIFTED, max_donors=3)
    assert last.reused_tokens > 400  # OTHER had to go, not what SHIFTED used


def test_a_prompt_too_large_for_the_budget_is_counted_and_the_replay_goes_on() -> None:
    with Estimator(EstimateOptions(max_bytes=1 << 16)) as estimator:
        estimator.add(Prompt(np.arange(60_000)))
        estimator.add(Prompt(DOCUMENT))
        assert estimator.add(Prompt(DOCUMENT)).prefix_tokens == 384
        assert estimator.to_dict()["prompts_too_large_to_keep"] == 1


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 2), max_size=40).map(lambda ids: [7, *ids]), min_size=1, max_size=6), st.data())
def test_the_prefix_index_agrees_with_comparing_the_prompts_themselves(prompts: list[list[int]], data: Any) -> None:
    index = PrefixIndex(4)
    held: dict[str, list[int]] = {}
    for number, ids in enumerate(prompts):
        chain = index.chain(Prompt(ids).token_ids, Namespace())
        expected = max((_common_blocks(ids, other, 4) for other in held.values()), default=0)
        assert index.count_held_tokens(chain) == expected
        index.add(str(number), chain)
        held[str(number)] = ids
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(held)))
            index.remove(gone)
            del held[gone]


def _common_blocks(one: list[int], other: list[int], size: int) -> int:
    blocks = 0
    while (end := (blocks + 1) * size) <= min(len(one), len(other)) and one[:end] == other[:end]:
        blocks += 1
    return blocks * size


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(30, 300)), min_size=1, max_size=6))
def test_what_is_reused_holds_the_prefix_and_never_the_whole_prompt(cuts: list[tuple[int, int]]) -> None:
    for one in estimate(*[DOCUMENT[start : start + length] or [1] for start, length in cuts]):
        assert 0 <= one.prefix_tokens <= one.reused_tokens < one.prompt_tokens
        assert 0 <= one.seam_tokens <= one.reused_tokens - one.prefix_tokens


def test_the_parts_add_up_to_the_total() -> None:
    with Estimator() as estimator:
        for number in range(20):
            ids = [number, *DOCUMENT[: 20 * number + 1]]
            estimator.add(Prompt(ids, namespace=Namespace(tenant="ab"[number % 2])))
        answer = estimator.to_dict()
    for parts in (answer["by_length"], answer["by_tenant"]):
        for key in ("prompts", "prompt_tokens", "prefix_tokens", "reused_tokens", "seam_tokens"):
            assert sum(part[key] for part in parts.values()) == answer["total"][key]
    assert sum(answer["reused_share_histogram"].values()) == 20
    assert list(answer["by_length"]) == bucket_names()
    assert answer["measured"] is False


# -- the command ---------------------------------------------------------------------------------------------------


def write_log(path: Path) -> str:
    lines = [
        {"token_ids": DOCUMENT, "user": "a"},
        {"token_ids": SHIFTED, "user": "a"},
        {"token_ids": SHIFTED, "user": "b"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_the_command_prints_tables_and_says_that_nothing_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "--prompts", write_log(tmp_path / "l.jsonl"), "--prefill-tokens-per-s", "1000"]) == 0
    shown = capsys.readouterr().out
    assert "3 prompts, 1,240 tokens" in shown
    assert "any-offset reuse" in shown
    assert "takes 1.2 s without a cache; exact-prefix saves 0.0 s, any-offset 0.4 s" in shown
    assert "not measured reuse" in shown
    assert "by tenant" in shown


def test_json_goes_to_the_file_whole_or_to_standard_output_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, target = write_log(tmp_path / "l.jsonl"), tmp_path / "out.json"
    assert main(["estimate", "--prompts", log, "--json", str(target), "--no-tenants"]) == 0
    capsys.readouterr()
    assert main(["estimate", "--prompts", log, "--json", "-", "--no-tenants"]) == 0
    printed = json.loads(capsys.readouterr().out)
    written = json.loads(target.read_text())
    assert printed["total"] == written["total"]
    assert written["total"]["reused_tokens"] == 399 + 419
    assert written["prefill_s"] is None  # not asked for is not zero
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_the_tenant_field_and_the_limit_are_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_log(tmp_path / "l.jsonl")
    assert main(["estimate", "--prompts", log, "--json", "-", "--tenant-field", "user", "--limit", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["total"]["prompts"] == 2
    assert list(answer["by_tenant"]) == ["a"]


def test_a_bad_line_stops_the_estimate_unless_it_may_be_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "l.jsonl"
    write_log(path)
    path.write_text(path.read_text() + '{"messages": 4}\n')
    assert main(["estimate", "--prompts", str(path), "--json", str(tmp_path / "o.json")]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "l.jsonl, line 4, field messages" in told.err
    assert not (tmp_path / "o.json").exists()
    assert main(["estimate", "--prompts", str(path), "--skip-bad", "--json", "-"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["lines_skipped"] == 1
    assert "skipped: " in told.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--limit", "0"], "'0' is not above 0"),
        (["--block-size", "x"], "'x' is not a whole number"),
        (["--prefill-tokens-per-s", "nan"], "'nan' is not a number above 0"),
        (["--max-bytes", "5"], "max_bytes=5 is outside"),
        (["--json", "/no/such/folder/o.json"], "cannot write /no/such/folder/o.json: No such file or directory"),
    ],
)
def test_mistakes_are_one_line_and_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["estimate", "--prompts", write_log(tmp_path / "l.jsonl"), *flags]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "hint: " in told
    assert "Traceback" not in told


def test_an_empty_log_is_a_mistake_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.jsonl").write_text("\n")
    assert main(["estimate", "--prompts", str(tmp_path / "e.jsonl")]) == 2
    assert "holds no prompt" in capsys.readouterr().err


@pytest.mark.data
def test_agents_that_repeat_themselves_gain_over_the_prefix_cache(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = data_dir / "agent_traces" / "magagent.jsonl.gz"
    assert main(["estimate", "--prompts", str(log), "--skip-bad", "--quiet", "--json", "-"]) == 0
    total = json.loads(capsys.readouterr().out)["total"]
    assert total["reused_tokens"] > total["prefix_tokens"] > 0
