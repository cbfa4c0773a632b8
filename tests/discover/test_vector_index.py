from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from semblend.discover.similarity import BruteForceIndex, UsearchIndex
from semblend.errors import MissingDependencyError

DIMENSION = 32


def units(count: int, dimension: int = DIMENSION, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(count, dimension))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def clustered(count: int, dimension: int, seed: int) -> np.ndarray:
    """Vectors around ``count / 20`` centres, as donors are: many prompts, few subjects."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(100, dimension))
    rows = centres[rng.integers(0, 100, count)] + 0.5 * rng.normal(size=(count, dimension))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=np.float32)


def add_all(index: BruteForceIndex | UsearchIndex, keys: range, vectors: np.ndarray) -> None:
    for key, vector in zip(keys, vectors, strict=True):
        index.add(key, vector)


def make(kind: str) -> BruteForceIndex | UsearchIndex:
    if kind == "brute":
        return BruteForceIndex(DIMENSION)
    pytest.importorskip("usearch")
    return UsearchIndex(DIMENSION)


both = pytest.mark.parametrize("kind", ["brute", "usearch"])


@both
def test_an_empty_index_finds_nothing(kind: str) -> None:
    keys, cosines = make(kind).search(units(1)[0], 5)
    assert (keys.tolist(), cosines.tolist()) == ([], [])


@both
def test_a_vector_finds_itself_first(kind: str) -> None:
    index, rows = make(kind), units(200)
    add_all(index, range(1000, 1200), rows)
    for i in (0, 57, 199):
        keys, cosines = index.search(rows[i], 3)
        assert keys[0] == 1000 + i
        assert cosines[0] == pytest.approx(1.0, abs=1e-3)
        assert cosines.tolist() == sorted(cosines.tolist(), reverse=True)


@both
def test_no_more_is_found_than_there_is_or_than_was_asked(kind: str) -> None:
    index = make(kind)
    add_all(index, range(3), units(3))
    assert len(index.search(units(1)[0], 10)[0]) == 3
    assert len(index.search(units(1)[0], 2)[0]) == 2
    assert len(index.search(units(1)[0], 0)[0]) == 0


@both
def test_a_removed_key_is_never_found_again(kind: str) -> None:
    index, rows = make(kind), units(300)
    add_all(index, range(300), rows)
    for key in range(0, 300, 2):
        assert index.remove(key)
    assert len(index) == 150
    found = {int(key) for row in rows for key in index.search(row, 20)[0]}
    assert found
    assert all(key % 2 for key in found)


@both
def test_removing_an_unknown_key_says_so(kind: str) -> None:
    assert not make(kind).remove(7)


@both
def test_adding_a_key_again_replaces_its_vector(kind: str) -> None:
    index, rows = make(kind), units(2)
    index.add(1, rows[0])
    index.add(1, rows[1])
    assert len(index) == 1
    keys, cosines = index.search(rows[1], 5)
    assert keys.tolist() == [1]
    assert cosines[0] == pytest.approx(1.0, abs=1e-3)


def test_equal_cosines_come_in_the_order_of_their_keys() -> None:
    index, row = BruteForceIndex(DIMENSION), units(1)[0]
    for key in (9, 3, 7, 1, 5):
        index.add(key, row)
    assert index.search(row, 3)[0].tolist() == [1, 3, 5]


@given(st.integers(1, 60), st.integers(1, 70), st.integers(0, 1000))
def test_brute_force_agrees_with_a_full_sort(count: int, k: int, seed: int) -> None:
    rows, query = units(count, 8, seed), units(1, 8, seed + 5000)[0]
    index = BruteForceIndex(8)
    add_all(index, range(count), rows)
    expected = sorted(range(count), key=lambda i: (-(rows @ query)[i], i))[:k]
    assert index.search(query, k)[0].tolist() == expected


class BruteForceMatchesADictionary(RuleBasedStateMachine):
    """Any mixture of adds and removals leaves what a dictionary would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BruteForceIndex(4)
        self.model: dict[int, np.ndarray] = {}

    @rule(key=st.integers(0, 200), seed=st.integers(0, 1000))
    def add(self, key: int, seed: int) -> None:
        self.model[key] = units(1, 4, seed)[0]
        self.index.add(key, self.model[key])

    @rule(first=st.integers(0, 200), count=st.integers(50, 90))
    def add_many(self, first: int, count: int) -> None:
        for key in range(first, first + count):
            self.add(key=key, seed=key)

    @rule(key=st.integers(0, 200))
    def remove(self, key: int) -> None:
        assert self.index.remove(key) == (self.model.pop(key, None) is not None)

    @invariant()
    def the_same_is_held(self) -> None:
        keys, rows = self.index.copy_items()
        assert len(self.index) == len(self.model)
        assert {int(key): row.tolist() for key, row in zip(keys, rows, strict=True)} == {
            key: row.tolist() for key, row in self.model.items()
        }


BruteForceMatchesADictionary.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestBruteForce = BruteForceMatchesADictionary.TestCase


def recall_and_error() -> tuple[float, float]:
    """Share of the true five neighbours that usearch finds among 2,000 clustered vectors, and its worst cosine."""
    pytest.importorskip("usearch")
    dimension, rows, queries = 384, clustered(2000, 384, 1), clustered(50, 384, 2)
    exact, graph = BruteForceIndex(dimension), UsearchIndex(dimension)
    add_all(exact, range(2000), rows)
    add_all(graph, range(2000), rows)
    hits, worst = 0, 0.0
    for query in queries:
        keys, cosines = graph.search(query, 5)
        hits += len(set(keys.tolist()) & set(exact.search(query, 5)[0].tolist()))
        worst = max(worst, float(np.abs(rows[keys] @ query - cosines).max()))
    return hits / (5 * len(queries)), worst


def test_usearch_finds_what_brute_force_finds() -> None:
    recall, worst = recall_and_error()
    assert recall >= 0.95
    assert worst < 1e-3


def test_without_usearch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "usearch.index", None)
    with pytest.raises(MissingDependencyError, match="usearch is not installed") as caught:
        UsearchIndex(8)
    assert "semblend-suite[embedder]" in caught.value.hint
