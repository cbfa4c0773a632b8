"""llama.cpp beside us: the cases, what each engine's counts mean, and a run that goes on after an interruption."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import llamacpp_reuse

THEIRS = llamacpp_reuse.name_llamacpp("1", 32)


def make_theirs(case: int, computed: int, text: str = "same") -> dict[str, Any]:
    cold = {"text": "same", "computed_tokens": 100, "cached_tokens": 0}
    warm = {"text": text, "computed_tokens": computed, "cached_tokens": 100 - computed}
    return {"engine": THEIRS, "case": case, "shape": "the head grows", "cold": cold, "warm": warm}


def make_ours(case: int, **counts: int) -> dict[str, Any]:
    cold = dict.fromkeys(llamacpp_reuse.KINDS, 0) | {"prefill": 100, "text": "same"}
    warm = dict.fromkeys(llamacpp_reuse.KINDS, 0) | counts | {"text": "same"}
    return {"engine": "ours, fast", "case": case, "shape": "the head grows", "cold": cold, "warm": warm}


def test_each_edit_has_a_case_of_every_document_with_its_own_number() -> None:
    cases = llamacpp_reuse.build_cases(2, 40)
    assert [case["number"] for case in cases] == list(range(8))
    assert len({case["shape"] for case in cases}) == 4
    assert all(case["donor"] != case["recipient"] for case in cases)


def test_what_is_not_computed_comes_from_each_engines_own_counts() -> None:
    rows = [make_theirs(0, 40), make_theirs(1, 100, "other"), make_ours(0, exact=16, reused=50, prefill=34)]
    lines = llamacpp_reuse.tabulate(rows)
    assert lines == [
        [THEIRS, "the head grows", 2, 200, 60, 0.3, "1 of 2"],
        ["ours, fast", "the head grows", 1, 100, 66, 0.66, "0 of 1"],
    ]


def test_a_case_that_was_asked_again_after_an_interruption_counts_once() -> None:
    lines = llamacpp_reuse.tabulate([make_theirs(0, 90), make_theirs(0, 40)])
    assert lines == [[THEIRS, "the head grows", 1, 100, 60, 0.6, "0 of 1"]]
