"""Figures inside sentences of guides and research pages are those of the result files, or of the table above them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def read_page(name: str) -> str:
    """A page with its lines joined, so that a sentence is found wherever it breaks."""
    return re.sub(r"\s+", " ", (ROOT / "docs" / name).read_text("utf-8"))


def read_rows(name: str, title: str = "") -> list[dict[str, Any]]:
    """The rows of the first table of a result whose title holds ``title``, by column."""
    tables = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text("utf-8"))["tables"]
    table = next(one for one in tables if title in one["title"])
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def percent(value: float) -> str:
    return f"{value:.1%}".replace("%", " %")


def write_users() -> Iterator[str]:
    own = {row["engine"]: row["TTFT p50 ms"] for row in read_rows("vllm_users_h200") if row["questions"] == "their own"}
    fast, balanced = (own[f"{mode}, prefixes healed"] for mode in ("fast", "balanced"))  # as by default
    yield f"{fast:.0f} ms instead of {own['stock vLLM']:.0f} in mode `fast` and {balanced:.0f} in `balanced`"


def write_lost_tokens() -> Iterator[str]:
    rows = [row for row in read_rows("vllm_load_h200") if row["load"].startswith("nothing reusable")]
    rates = {row["engine"]: row["decode tokens/s"] for row in rows}
    lost = {name: 1 - rate / rates["stock vLLM"] for name, rate in rates.items()}
    yield f"32 decoding requests made {lost['balanced']:.0%} fewer tokens than in stock vLLM, and ".replace("%", " %")
    yield f"and {lost['balanced, donors on the GPU']:.0%} fewer with donors on the GPU".replace("%", " %")


def write_first_tokens() -> Iterator[str]:
    found = {(row["tokens"], row["engine"], row["arm"]): row["p50 ms"] for row in read_rows("vllm_ttft_h200")}
    cold, host, device = (found[24576, *arm] for arm in (("stock", "cold"), ("host", "fast"), ("device", "fast")))
    yield f"{host - device:.0f} ms more on an H200 than from the device, in mode `fast` ({host:.0f} ms, "
    yield f"{cold / host:.1f} times sooner than cold; {device:.0f} ms and {cold / device:.1f} times with `donor_device"
    short, long = (found[tokens, "device", "balanced"] for tokens in (4096, 24576))
    yield f"it took {short:.0f} ms instead of {found[4096, 'stock', 'cold']:.0f} at 4,096 tokens"
    yield f"and {long:.0f} instead of {cold:.0f} at 24,576"


def write_kept_first() -> Iterator[str]:
    for model, words in (
        ("1.5b", "it cost {0} of the score** (95 %: {1} to {2};"),
        ("0.5b", "a 0.5B {0}, {1} to {2})"),
    ):
        rows = read_rows("arranged_kept_h200", f"{model} bfloat16: task F1 less")
        (own,) = [row for row in rows if (row["prompt"], row["set"]) == ("arranged, cold", "longbench")]
        yield words.format(f"{-own['difference']:.3f}", f"{own['low']:.3f}", f"{own['high']:.3f}")
        yield f"the {own['n']} questions of LongBench"


def write_misses() -> Iterator[str]:
    cells = {(row["tokens"], row["arm"]): row["p50 ms"] for row in read_rows("vllm_ttft_pieces_h200")}
    worst = {tokens: cells[tokens, "miss"] / cells[tokens, "cold"] - 1 for tokens in (4096, 24576)}
    yield f"it took {percent(worst[4096])} longer than a prompt that was opted out, at 4,096 tokens, and "
    yield f"and {percent(worst[24576])} at 24,576"
    most = max(row["overhead"] for row in read_rows("vllm_ttft_h200", "What a miss costs"))
    yield f"took {percent(most)} longer than in stock vLLM at most in the first of these runs"
    (http,) = [row for row in read_rows("vllm_http_gaps_h200", "by length") if row["arm"] == "miss"]
    yield f"misses took {percent(http['mean over cold'] - 1)} longer on average at 8,192 tokens"


@pytest.mark.parametrize(
    ("page", "write"),
    [
        ("guides/vllm.md", write_users),
        ("guides/vllm.md", write_lost_tokens),
        ("guides/vllm.md", write_first_tokens),
        ("guides/arrange.md", write_kept_first),
        ("research/vllm.md", write_misses),
    ],
    ids=lambda value: getattr(value, "__name__", "").removeprefix("write_") or None,
)
def test_a_figure_of_a_sentence_is_that_of_its_result_file(page: str, write: Any) -> None:
    text = read_page(page)
    for fragment in write():
        assert fragment in text


def test_what_the_lab_says_of_an_experiment_is_what_its_table_says() -> None:
    text = (ROOT / "docs" / "research" / "lab.md").read_text("utf-8")
    tables, _, prose = text.partition("<!-- end of tables -->")
    (row,) = [line for line in tables.splitlines() if line.startswith("| low_memory_rag_stress | +")]
    source, block, prefix = (cell.strip().replace("%", " %") for cell in row.strip("|").split("|")[1:4])
    (told,) = re.findall(r"^- `low_memory_rag_stress`:.*?(?=^- `)", prose, re.DOTALL | re.MULTILINE)
    for figure in (source, block, prefix):
        assert figure in told
    written = set(re.findall(r"[+-]\d+\.\d\d %", prose))
    assert written <= {cell.replace("%", " %") for cell in re.findall(r"[+-]\d+\.\d\d%", tables)}
