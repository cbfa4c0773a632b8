"""A figure inside a sentence of the README, a guide or a research page is that of its result file.

`bench/publish.py` fills whole tables; a figure inside a sentence is compared here: each fragment is written from the
result file and must stand on the page as it is.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from lib.reporting import find_result, read_lines_of  # noqa: E402

README = (ROOT / "README.md").read_text("utf-8")
FIRST_WORDS = README.partition("![")[0]
COMPARISON = README.partition("## How it compares")[2].partition("## Limits")[0]
LIMITS = README.partition("## Limits")[2].partition("## Rules it keeps")[0]
Row = dict[str, Any]


def read_rows(name: str, title: str = "") -> list[Row]:
    """The rows of the first table of a result whose title holds ``title``, by column."""
    return read_lines_of(json.loads(find_result(name).read_text("utf-8")), title)


def read_page(name: str) -> str:
    """A page with its lines joined, so that a sentence is found wherever it breaks."""
    return re.sub(r"\s+", " ", (ROOT / "docs" / name).read_text("utf-8"))


def share(value: float, places: int = 3) -> str:
    """A share as the README writes it: 0.410, and 1.000."""
    return f"{value:.{places}f}"


def percent(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")


def first_number(cell: object) -> float:
    """Of a cell that may carry its interval: ``0.906 [0.85, 0.95]``."""
    return float(str(cell).split()[0])


def write_load() -> Iterator[str]:
    four = {row["engine"]: row for row in read_rows("vllm_load_h200") if row["load"] == "four a second"}
    yield f"TTFT {four['stock vLLM']['TTFT p50 ms']:,.0f} ms, growing"
    yield f"for {four['stock vLLM']['arrivals'] / 4:.0f} s:"
    assert four["balanced"]["donor_device_bytes"] == four["fast"]["donor_device_bytes"] == 0
    yield f"{four['balanced']['TTFT p50 ms']:.0f} ms `balanced`, {four['fast']['TTFT p50 ms']:.0f} ms `fast`"


def write_peers() -> Iterator[str]:
    found = {row["system"]: share(float(row["all"])) for row in read_rows("peers", "Share of the reusable")}
    cost = {row["system"]: share(float(row["CPU ms p50"])) for row in read_rows("peers", "Costs and mistakes")}
    chunks = "LMCache 0.5.6 matcher, chunk {}".format
    yield "a Python stand-in, blocks of 16: [found](docs/research/peers.md#finding-what-can-be-reused) "
    yield f"{found['prefix blocks of 16']}; vLLM 0.26, ["
    yield f"found {found[chunks(256)]} (chunk 256), {found[chunks(32)]} (chunk 32)"
    yield f"the 256 matcher is faster: {cost[chunks(256)]} ms of CPU"
    yield f"found {found['this project']} in {cost['this project']} ms"
    yield f"found {found['semblend 0.3.25, perfect embedder']}; in SGLang"


def write_handed_tokens() -> Iterator[str]:
    rows = read_rows("sglang_peer", "handed behind")
    for system, words in (("semblend", "{} of {} tokens are KV of another token"), ("this project", "{} of {}")):
        own = [row for row in rows if row["system"].startswith(system)]
        yield words.format(*(f"{sum(row[key] for row in own):,}" for key in ("not equal", "tokens handed")))


def write_arranging() -> Iterator[str]:
    (pilot,) = [row for row in read_rows("arrange_contextpilot", "Beside") if row["stream"] == "cacheblend_musique_s"]
    yield f"{percent(pilot['their exact'])} exact, {pilot['their p50 µs'] / 1000:.1f} ms a prompt"
    yield f"{percent(pilot['our exact'])}, {share(pilot['our p50 µs'] / 1000, 2)} ms"


def write_rules() -> Iterator[str]:
    rules = {row["rule"]: row for row in read_rows("peer_rules", "Another run")[1:7]}
    of = {
        name: (percent(row["FLOPs of cold"]), share(first_number(row["F1 against cold"]), 2))
        for name, row in rules.items()
    }
    yield "{} of the FLOPs, F1 {} against cold".format(*of["CacheBlend-15"])
    yield "`fast` {}, {}; `balanced` {}, {}".format(*of["fast"], *of["balanced"])


def write_llamacpp() -> Iterator[str]:
    rows = {
        (row["engine"].partition(" (")[0], row["engine"][-2:], row["edit"]): row["share"]
        for row in read_rows("llamacpp_reuse")
    }
    theirs = {edit: value for (engine, size, edit), value in rows.items() if engine == "llama.cpp" and size == "32"}
    ours = {
        mode: {e: v for (engine, _, e), v in rows.items() if engine == f"ours, {mode}"} for mode in ("fast", "balanced")
    }
    moved, grows, shrinks = "passages change places", "the head grows", "the head shrinks"
    yield f"passages moved {share(theirs[moved], 2)} of the tokens, another head {share(theirs[grows], 2)}"
    for mode, cells in ours.items():
        low, high = sorted((cells[grows], cells[shrinks]))
        yield f"`{mode}` {share(cells[moved], 2)}, and {share(low, 2)} to {share(high, 2)}"


def write_quality() -> Iterator[str]:
    tables = json.loads(find_result("quality_h200").read_text("utf-8"))["tables"]
    recipes = [table for table in tables if table["columns"][0] == "recipe"]
    at = {name: recipes[0]["columns"].index(name) for name in ("n", "FLOPs", "F1 vs cold")}
    yield f"{sum(next(row for row in table['rows'] if row[0] == 'balanced')[at['n']] for table in recipes)} prompts"
    one = {row[0]: row for row in recipes[0]["rows"]}
    kept = {name: share(first_number(one[name][at["F1 vs cold"]])) for name in ("balanced", "rerun")}
    yield f"word F1 {kept['balanced']} against the"
    yield f"with {percent(one['balanced'][at['FLOPs']])} of the FLOPs, where a cold rerun has {kept['rerun']}"


MOVED = ("several", "reordered")


def count_prefilled() -> tuple[int, int]:
    """Of the prompts whose passages moved, how many mode balanced prefilled, and how many were asked."""
    tables = json.loads(find_result("quality_h200").read_text("utf-8"))["tables"]
    lines = [
        dict(zip(table["columns"], row, strict=True))
        for table in tables
        if table["columns"][0] == "recipe" and table["title"].startswith(MOVED)
        for row in table["rows"]
    ]
    prompts = sum(line["n"] for line in lines if line["recipe"] == "balanced")
    served = sum(row["served"] for row in read_rows("quality_h200", "let pass") if row["setting"] in MOVED)
    return prompts - served, prompts


def write_what_the_default_prefills() -> Iterator[str]:
    prefilled, prompts = count_prefilled()
    rows = read_rows("vllm_quality_h200", "1.5b: greedy answers")
    served = [row for row in rows if row["setting"] in MOVED and row["arm"] == "balanced"]
    asked, reused = (sum(row[name] for row in served) for name in ("n", "with reuse"))
    yield f"({prefilled} of {prompts} with a 1.5B; through vLLM {asked - reused} of {asked})"


def write_served_quality() -> Iterator[str]:
    tables = json.loads(find_result("vllm_quality_h200").read_text("utf-8"))["tables"]
    answers = [table for table in tables if "greedy answers" in table["title"]]
    at = {name: answers[0]["columns"].index(name) for name in ("arm", "n")}
    asked = sum(row[at["n"]] for table in answers for row in table["rows"] if row[at["arm"]] == "cold")
    yield f"through `vllm serve`, [{asked:,} prompts](docs/research/vllm.md)"


def test_what_the_default_prefills_is_that_of_its_result_files() -> None:
    for fragment in write_what_the_default_prefills():
        assert fragment in FIRST_WORDS


def read_readme_table(marker: str) -> list[list[str]]:
    """The rows of a table that `bench/publish.py` fills, cell by cell."""
    body = README.partition(f"<!-- numbers:{marker} -->\n")[2].partition("<!-- /numbers -->")[0]
    lines = [line for line in body.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_load_table_shows_the_default_first_and_names_every_setting() -> None:
    settings = {
        (row["load"], row["engine"], f"{row['TTFT p50 ms']:,.0f}"): row["donor_device_bytes"]
        for row in read_rows("vllm_load_h200")
    }
    rows = read_readme_table("vllm_load_h200")
    assert len(rows) > 10
    by_load: dict[str, list[int | None]] = {}
    for load, engine, ttft, *_ in rows:
        given = settings[load, engine, ttft]
        by_load.setdefault(load, []).append(given)
        assert ("donors on the GPU" in engine) is bool(given), (
            "what needs donor_device_bytes says so, nothing else does"
        )
    for given in by_load.values():
        assert given[:3] == [None, 0, 0], "stock vLLM, then both modes with donors on the host"


def test_the_table_of_a_real_model_is_of_the_defaults() -> None:
    result = json.loads((ROOT / "bench" / "results" / "vllm_pays_h200.json").read_text("utf-8"))
    assert result["arguments"]["settings"] == "{}"
    rows = {(f"{row['tokens']:,}", f"{row['p50 ms']:.0f}") for row in read_rows("vllm_pays_h200")}
    shown = read_readme_table("vllm_pays_h200")
    assert len(shown) == 4 * 6
    assert {(row[0], row[4]) for row in shown} <= rows


def test_the_default_memory_holds_as_many_donors_as_the_pages_say() -> None:
    from lib.ttft_vllm import QWEN2_5_7B
    from vllm_load import count_kv_bytes

    from semblend.materialize.donors.places import MOST_HOST

    held = MOST_HOST // (24_000 * count_kv_bytes(QWEN2_5_7B))
    assert (held, MOST_HOST) == (12, 16 << 30)
    guide = (ROOT / "docs" / "guides" / "vllm.md").read_text("utf-8")
    assert "at most 16 GiB, which hold 12 donors of 24,000 tokens of a 7B" in README
    assert f"{count_kv_bytes(QWEN2_5_7B) // 1024} KiB" in guide
    assert "16 GiB hold 12 prompts of 24,000 tokens" in guide


@pytest.mark.parametrize(
    "write", [write_load, write_peers, write_handed_tokens, write_arranging, write_rules, write_llamacpp],
    ids=lambda write: write.__name__.removeprefix("write_"),
)  # fmt: skip
def test_a_figure_of_the_comparison_is_that_of_its_result_file(write: Any) -> None:
    for fragment in write():
        assert fragment in COMPARISON


def test_a_figure_of_the_limits_is_that_of_its_result_file() -> None:
    for fragment in (*write_quality(), *write_served_quality()):
        assert fragment in LIMITS


def test_every_row_of_the_comparison_names_the_script_that_makes_its_figures() -> None:
    rows = [line for line in COMPARISON.splitlines() if line.startswith("| ") and "alternative" not in line]
    assert len(rows) > 5
    for row in rows:
        scripts = re.findall(r"\(((?:bench|research)/[\w/]+\.py)\)", row)
        assert scripts or "not run" in row, row
        assert all((ROOT / script).exists() for script in scripts)


def test_the_comparison_would_notice_a_wrong_figure() -> None:
    assert all(fragment not in COMPARISON.replace("5,966", "5,967") for fragment in list(write_load())[:1])


def to_tenths(value: float) -> str:
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
    yield f"{cold / host:.1f} times sooner than cold; {device:.0f} ms and {cold / device:.1f} times from the GPU)"
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
    yield f"it took {to_tenths(worst[4096])} longer than a prompt that was opted out, at 4,096 tokens, and "
    yield f"and {to_tenths(worst[24576])} at 24,576"
    most = max(row["overhead"] for row in read_rows("vllm_ttft_h200", "What a miss costs"))
    yield f"took {to_tenths(most)} longer than in stock vLLM at most in the first of these runs"
    (http,) = [row for row in read_rows("vllm_http_gaps_h200", "by length") if row["arm"] == "miss"]
    yield f"misses took {to_tenths(http['mean over cold'] - 1)} longer on average at 8,192 tokens"


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
