"""Stock SGLang and SGLang with our cache, both with the overlap schedule: where nothing is moved, answers are equal.

The second server is started by a program that has called `patch_radix_cache`, so its scheduler is a process of its own
that nobody has patched by hand.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from http_server import FLAGS, STOCK, Server

from sembench.witnesses.engine_events import summarize_file

OVERLAPPED = [flag for flag in FLAGS if flag != "--disable-overlap-schedule"]
PATCHED = [sys.executable, str(Path(__file__).with_name("patched_server.py"))]
ROWS = {
    topic: " ".join(f"{topic} {n} weighs {7 * n + 3} grams." for n in range(14)) for topic in ("Pear", "Bolt", "Cup")
}
ASK = "\nQuestion: which one weighs most?\nAnswer:"
ALONE = ["The capital of France is", *(rows + ASK for rows in ROWS.values())]
AGAIN = [ROWS["Pear"] + ASK, ROWS["Pear"] + "\nQuestion: how many are there?\nAnswer:"]
MOVED = "You read lists with care and never guess.\n" + ROWS["Bolt"] + ASK


def ask_all(server: Server) -> list[dict]:
    """Every prompt alone, then again with its prefix in the tree, then four at once."""
    answers = [server.generate(text, max_new_tokens=16) for text in [*ALONE, *AGAIN]]
    with ThreadPoolExecutor(4) as at_once:
        answers += at_once.map(lambda text: server.generate(text + " Well", max_new_tokens=16), ALONE)
    return answers


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """The answers of both servers, and what the second one says about a document at another place."""
    base, found = tmp_path_factory.mktemp("both"), {}
    for name, command in (("stock", STOCK), ("ours", PATCHED)):
        server = Server(base / f"{name}.log", command=command, flags=OVERLAPPED, SEMBLEND_QUALITY="fast")
        try:
            found[name] = ask_all(server)
            found[f"{name} moved"] = server.generate(MOVED)
        finally:
            server.stop()
        found[f"{name} log"] = server.log.read_text()
    return found


def test_answers_on_exact_paths_are_those_of_stock_sglang(lives):
    assert [one["text"] for one in lives["ours"]] == [one["text"] for one in lives["stock"]]


def test_exact_hits_are_those_of_stock_sglang(lives):
    alone = len(ALONE) + len(AGAIN)  # at once, what is in the tree depends on the order of arrival
    ours, stock = (
        [(one["meta_info"]["prompt_tokens"], one["meta_info"]["cached_tokens"]) for one in lives[name][:alone]]
        for name in ("ours", "stock")
    )
    assert ours == stock
    assert ours[len(ALONE)][1] > 100, "the second time a prompt is in the tree"


def test_a_patch_reaches_the_scheduler_that_sglang_spawns(lives):
    assert "SemBlend serves this engine" in lives["ours log"]
    assert lives["ours moved"]["meta_info"]["cached_tokens_details"]["host"] > 100
    assert "SemBlend" not in lives["stock log"]
    assert lives["stock moved"]["meta_info"]["cached_tokens"] < 10


def test_sembench_reads_what_sglang_itself_prints(lives, tmp_path):
    found = {}
    for name in ("stock", "ours"):
        (tmp_path / f"{name}.log").write_text(lives[f"{name} log"])
        found[name] = summarize_file("sglang", str(tmp_path / f"{name}.log"))
    assert (found["stock"]["materialization_events"], found["stock"]["semantic_hits"]) == (0, 0)
    assert found["ours"]["materialized_tokens"] > 100
    for name, told in found.items():
        # SGLang asks its own server to freeze the garbage collector, and on a slow machine it asks before it listens.
        own = lives[f"{name} log"].count("post-warmup freeze_gc failed")
        assert told["errors"] == own, told["error_examples"]
    assert found["stock"]["last_time_unix_s"] <= found["ours"]["first_time_unix_s"] + 1


def test_the_answer_has_its_receipt(lives):
    (receipt,) = lives["ours moved"]["meta_info"]["semblend"]
    assert receipt["reused_tokens"] > 100
    assert receipt["prompt_tokens"] == lives["ours moved"]["meta_info"]["prompt_tokens"]
    (cold,) = lives["ours"][1]["meta_info"]["semblend"]
    assert cold["reused_tokens"] == 0
    assert "semblend" not in lives["stock moved"]["meta_info"]
