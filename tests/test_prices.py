"""Prices and rates are data: they say where they come from, a user replaces any, and a wrong file is refused."""

from __future__ import annotations

import json
import math
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from semblend.errors import InputError
from semblend.estimate.answer import find_rates
from semblend.kv_shapes import KV_SHAPES
from semblend.prices import TIERS, load_price_book

BOOK = load_price_book()


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_every_number_says_where_it_comes_from() -> None:
    tables = tomllib.loads((resources.files("semblend.prices") / "prices.toml").read_text())
    sources = [text for one in tables["memory"].values() for name, text in one.items() if name.endswith("source")]
    sources += [text for one in tables["gpu"].values() for name, text in one.items() if name.endswith("source")]
    sources += [one["source"] for models in tables["prefill"].values() for one in models.values()]
    kinds = ("measured: ", "data sheet", "computed: ", "assumption", "an assumption", "a hit in GPU memory")
    assert all(text.startswith(kinds) for text in sources), sources


def test_what_was_measured_names_a_result_that_is_there() -> None:
    root = Path(__file__).parents[1]
    text = (resources.files("semblend.prices") / "prices.toml").read_text()
    named = {word.strip('(),"') for word in text.split() if "bench/results/" in word}
    assert named
    assert all((root / name).is_file() for name in named), named


def test_a_70b_costs_more_than_an_8b_and_every_known_model_has_a_rate() -> None:
    for gpu in BOOK.gpus:
        small, large = (BOOK.find_prefill(name, gpu) for name in ("llama-3.1-8b", "llama-3.1-70b"))
        assert large.gpu_ms_per_token == pytest.approx(small.gpu_ms_per_token * 70.6 / 8.03, rel=0.01)
        assert large.gpus >= small.gpus
        for model in KV_SHAPES:
            assert BOOK.find_prefill(model, gpu).tokens_per_s > 0


def test_a_model_is_spread_over_as_many_gpus_as_its_weights_need() -> None:
    rate = BOOK.find_prefill("llama-3.1-70b", "l4")
    assert 0.9 * rate.gpus * BOOK.find_gpu("l4").memory_gib >= rate.weights_gib > 0.9 * rate.gpus / 2 * 22.4
    assert rate.ms_per_token == pytest.approx(rate.gpu_ms_per_token / rate.gpus)


def test_the_computed_share_is_the_one_that_was_measured() -> None:
    for model, share in (("qwen2.5-7b", "share"), ("qwen2.5-1.5b", "small_share")):
        reached = 2e9 * BOOK.find_parameters(model) * BOOK.find_prefill(model, "h200").tokens_per_s
        assert reached / (BOOK.find_gpu("h200").peak_tflops * 1e12) == pytest.approx(
            BOOK.tables["computed"][share], abs=0.02
        )


def test_dearer_memory_is_nearer_to_the_gpu() -> None:
    hbm, dram, ssd = (BOOK.find_tier(name, "h200") for name in TIERS)
    assert hbm.gib_hour > dram.gib_hour > ssd.gib_hour > 0
    assert hbm.load_gib_s == math.inf > dram.load_gib_s > ssd.load_gib_s
    assert hbm.compute_load_ms(2**30) == 0


def test_a_users_file_replaces_single_numbers_and_their_sources(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '[gpu.h200]\nhour = 9.0\n[memory.dram]\ngib_hour = 0\n[prefill.h100."llama-3.1-8b"]\ntokens_per_s = 5000\n',
    )
    book = load_price_book(path)
    assert (book.find_gpu("h200").hour, book.find_gpu("h200").hour_source) == (9.0, "given")
    assert book.find_gpu("h200").memory_gib == BOOK.find_gpu("h200").memory_gib
    assert book.find_tier("hbm", "h200").gib_hour == pytest.approx(3 * BOOK.find_tier("hbm", "h200").gib_hour)
    assert book.find_tier("dram", "h200").gib_hour == 0
    assert book.find_prefill("llama-3.1-8b", "h100").tokens_per_s == 5000
    assert book.find_gpu("l4") == BOOK.find_gpu("l4")


def test_a_gpu_and_a_model_that_the_package_does_not_know_can_be_added(tmp_path: Path) -> None:
    path = write(tmp_path, '[gpu.mine]\nhour = 1\nmemory_gib = 40\npeak_tflops = 200\n[parameters_b]\n"my-model" = 5\n')
    assert load_price_book(path).find_prefill("my-model", "mine").gpus == 1
    with pytest.raises(InputError, match="no price of the GPU 'mine'"):
        BOOK.find_gpu("mine")


@pytest.mark.parametrize(
    "text",
    [
        "not toml", "[gpu.h200]\nhour = -1", "[gpu.h200]\nhour = nan", '[gpu.h200]\nhour = "3"',
        "[gpu.h200]\npeak_tflops = 0",
        "[gpus.h200]\nhour = 1", "gpu = 3", "[gpu.new]\nhour = 1", "[gpu.h200]\nhour = true",
        "[memory.tape]\ngib_hour = 1",
        '[prefill.h200."x"]\nbase_ms = 1',
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_a_hint(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as told:
        load_price_book(write(tmp_path, text))
    assert told.value.hint


def test_estimate_and_advise_read_the_same_book(tmp_path: Path) -> None:
    assert find_rates("qwen2.5-7b").prefill_tokens_per_s == BOOK.find_prefill("qwen2.5-7b", "h200").tokens_per_s
    dear = load_price_book(write(tmp_path, "[gpu.h200]\nhour = 6.0\n"))
    assert find_rates(book=dear).price_per_million == pytest.approx(2 * find_rates().price_per_million)


def test_the_line_of_ttft_is_as_far_from_the_measured_times_as_the_guide_says() -> None:
    root = Path(__file__).parents[1]
    rows = json.loads((root / "bench" / "results" / "vllm_ttft_h200.json").read_text())["tables"][0]["rows"]
    measured = {row[0]: row[4] for row in rows if row[1:3] == ["stock", "cold"]}
    rate = BOOK.find_prefill("qwen2.5-7b", "h200")
    off = {tokens: (rate.base_ms + tokens * rate.ms_per_token) / ms - 1 for tokens, ms in measured.items()}
    guide = " ".join((root / "docs" / "guides" / "lab.md").read_text().split())
    assert f"{off[4096]:.0%} too high at 4,096 tokens, {off[8192]:.0%} at 8,192".replace("%", " %") in guide
    assert f"{-off[16384]:.0%} too low at 16,384 and {-off[32768]:.0%} at 32,768".replace("%", " %") in guide
