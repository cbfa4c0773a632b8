"""The classes of pull request 31057: prompts hold what their class says, arms share no donor, a second run goes on."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import sglang_classes  # noqa: E402
from lib.embedded_server import Reply  # noqa: E402
from lib.vllm_runs import Rows  # noqa: E402

TEXTS = [" ".join(f"a{number}w{at}" for at in range(40)) for number in range(60)]


def encode(text: str) -> list[int]:
    return [hash(word) & 0xFFFFFF for word in text.split()]


class FakeEngine:
    """Answers with its count of requests, and notes who asked under which salt."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str]] = []

    def ask(self, prompt: list[int], tokens: int, *, name: str, salt: str, quality: str = "") -> Reply:
        self.asked.append((name, salt, quality))
        return Reply("an answer", 10.0, 5.0, receipt={"reused_tokens": 3, "exact_tokens": 1})

    def stop(self) -> None:
        self.asked.append(("stop", "", ""))


def make_args(tmp_path: Path, **more: object) -> argparse.Namespace:
    given = {"engine": "embedded", "model": "m.gguf", "model_name": "", "device": "", "dtype": "", "lengths": [300],
             "classes": ["partial_80", "diverse"], "clusters": 2, "floor": 1, "answer": 4, "seed": 1, "budget_s": 0.0,
             "rows": str(tmp_path / "rows.jsonl"), "data_dir": str(tmp_path)}  # fmt: skip
    return argparse.Namespace(**given | more)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    found = FakeEngine()
    documents = [SimpleNamespace(text=text, source=source) for source in ("summ/cnndm", "summ/xsum") for text in TEXTS]
    monkeypatch.setattr(sglang_classes, "start_engine", lambda args: found)
    monkeypatch.setattr(sglang_classes, "make_encoder", lambda args: encode)
    monkeypatch.setattr(sglang_classes.real_texts, "articles", lambda folder: documents)
    return found


@pytest.mark.parametrize("length", [200, 900])
def test_a_query_shares_with_its_donor_what_its_class_says(length: int) -> None:
    donor, queries = sglang_classes.build(TEXTS, encode, length, random.Random(3))
    assert set(queries) == set(sglang_classes.CLASSES)
    assert all(len(query) == length for query in (donor, *queries.values()))
    assert queries["exact"] == donor
    frame = len(encode(sglang_classes.INSTRUCTION)) + len(encode(sglang_classes.QUESTION))
    shared = {name: (len(set(query) & set(donor)) - frame) / length for name, query in queries.items()}
    assert shared["diverse"] <= 0 < shared["partial_60"] < shared["partial_80"] < 1
    assert queries["partial_80"][20] != donor[20], "the first article is another one"


def test_no_arm_finds_what_another_arm_left_behind(tmp_path: Path, engine: FakeEngine) -> None:
    sglang_classes.measure(make_args(tmp_path))
    of_arms = [(salt, quality) for name, salt, quality in engine.asked if name.startswith(("0-", "1-"))]
    cold = [salt for salt, quality in of_arms if not quality]
    assert len(set(cold)) == len(cold), "a cold run never comes after another one of its salt"
    reusing = [salt for salt, quality in of_arms if quality in ("fast", "balanced")]
    assert len(set(reusing)) == len(reusing)
    assert not set(cold) & set(reusing)
    assert engine.asked[-1][0] == "stop"


def test_a_second_run_measures_only_what_is_missing_and_starts_nothing_for_nothing(
    tmp_path: Path, engine: FakeEngine
) -> None:
    sglang_classes.measure(make_args(tmp_path, clusters=1))
    before = len(engine.asked)
    sglang_classes.measure(make_args(tmp_path, clusters=1))
    assert len(engine.asked) == before
    sglang_classes.measure(make_args(tmp_path))
    rows = Rows(tmp_path / "rows.jsonl").rows
    assert [(row["number"], row["class"]) for row in rows] == [
        (0, "partial_80"), (0, "diverse"), (1, "partial_80"), (1, "diverse"),
    ]  # fmt: skip
    assert ["rerun" in row for row in rows] == [True, True, False, False]
    lines = sglang_classes.tabulate(rows)
    assert all(len(line) == len(sglang_classes.COLUMNS) for line in lines)


def test_other_models_and_devices_are_lines_of_their_own(tmp_path: Path, engine: FakeEngine) -> None:
    sglang_classes.measure(make_args(tmp_path, clusters=1, classes=["diverse"]))
    sglang_classes.measure(make_args(tmp_path, clusters=1, classes=["diverse"], device="cuda", dtype="bfloat16"))
    lines = sglang_classes.tabulate(Rows(tmp_path / "rows.jsonl").rows)
    assert {line[2] for line in lines} == {"cpu", "cuda"}
    by_cpu = sglang_classes.COLUMNS.index("cold/this, CPU")
    assert all((line[by_cpu] is None) == (line[2] == "cuda") for line in lines), "CPU time says nothing of a GPU"
