from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from semblend.discover import similarity as module
from semblend.discover.similarity import BruteForceIndex, SimilarityIndex, SimilarityStats, UsearchIndex
from semblend.errors import MissingDependencyError
from semblend.fingerprint.embedder import LexicalEmbedder, NullEmbedder
from semblend.plan.reuse_plan import Similar
from semblend.prompt import Namespace, Prompt

WAIT_S = 120.0


class FakeEmbedder:
    """The first three token ids are the vector; can be held at a gate, made to fail, or made to seem slow."""

    name = "fake"
    dimension = 3

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.calls = 0

    def embed(self, prompt: Prompt) -> np.ndarray | None:
        self.calls += 1
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        if prompt.text == "fails":
            raise RuntimeError("the model fell over")
        if prompt.text == "nothing":
            return None
        if prompt.text == "wrong shape":
            return np.ones(7, dtype=np.float32)
        vector = prompt.token_ids[:3].astype(np.float32)
        return np.asarray(vector / np.linalg.norm(vector))


@contextmanager
def evidence_of(embedder: Any, **settings: Any) -> Iterator[SimilarityIndex]:
    evidence = SimilarityIndex(embedder, **{"min_similarity": 0.6, **settings})
    try:
        yield evidence
    finally:
        if isinstance(embedder, FakeEmbedder):
            embedder.gate.set()
        evidence.close(WAIT_S)


def added(evidence: SimilarityIndex, **donors: list[int]) -> None:
    for donor_id, vector in donors.items():
        evidence.add(donor_id, Prompt(vector))
    assert evidence.flush(WAIT_S)


def ids(found: tuple[Similar, ...]) -> list[str]:
    return [likeness.donor_id for likeness in found]


def test_similar_donors_come_best_first_with_their_source() -> None:
    with evidence_of(FakeEmbedder()) as evidence:
        added(evidence, near=[10, 1, 0], same=[10, 0, 0], far=[0, 0, 10])
        found = evidence.find_similar(Prompt([5, 0, 0]))
        assert ids(found) == ["same", "near"]
        assert found[0] == Similar("same", 1.0, "fake")
        assert found[1].similarity == pytest.approx(10 / 101**0.5)


def test_equally_similar_donors_come_in_the_order_of_their_ids() -> None:
    with evidence_of(FakeEmbedder()) as evidence:
        added(evidence, c=[1, 0, 0], a=[2, 0, 0], b=[3, 0, 0])
        assert ids(evidence.find_similar(Prompt([4, 0, 0]))) == ["a", "b", "c"]
        assert len(evidence.find_similar(Prompt([4, 0, 0]), limit=2)) == 2
        assert evidence.find_similar(Prompt([4, 0, 0]), limit=0) == ()


def test_below_the_minimum_nothing_is_evidence() -> None:
    with evidence_of(FakeEmbedder(), min_similarity=0.9) as evidence:
        added(evidence, half=[1, 1, 0])
        assert evidence.find_similar(Prompt([1, 0, 0])) == ()


def test_evidence_never_crosses_a_namespace() -> None:
    ours, theirs = Namespace(tenant="a"), Namespace(tenant="b")
    with evidence_of(FakeEmbedder(), fuzzy=True) as evidence:
        evidence.add("ours", Prompt([1, 2, 3], namespace=ours))
        evidence.add("theirs", Prompt([1, 2, 3], namespace=theirs))
        evidence.add("nobody's", Prompt([1, 2, 3]))
        assert evidence.flush(WAIT_S)
        assert ids(evidence.find_similar(Prompt([1, 2, 3], namespace=ours))) == ["ours"]
        assert ids(evidence.find_similar(Prompt([1, 2, 3], namespace=theirs))) == ["theirs"]
        assert ids(evidence.find_similar(Prompt([1, 2, 3]))) == ["nobody's"]
        assert evidence.find_similar(Prompt([1, 2, 3], namespace=Namespace(tenant="c"))) == ()


def test_a_donor_registered_again_elsewhere_leaves_its_old_namespace() -> None:
    with evidence_of(FakeEmbedder()) as evidence:
        evidence.add("d", Prompt([1, 0, 0], namespace=Namespace(tenant="a")))
        added(evidence, d=[1, 0, 0])
        assert evidence.find_similar(Prompt([1, 0, 0], namespace=Namespace(tenant="a"))) == ()
        assert ids(evidence.find_similar(Prompt([1, 0, 0]))) == ["d"]


def test_a_removed_donor_is_gone() -> None:
    with evidence_of(FakeEmbedder(), fuzzy=True) as evidence:
        added(evidence, a=[1, 0, 0], b=[1, 0, 0])
        evidence.remove("a")
        evidence.remove("never there")
        assert ids(evidence.find_similar(Prompt([1, 0, 0]))) == ["b"]
        evidence.remove("b")
        assert evidence.find_similar(Prompt([1, 0, 0])) == ()
        assert evidence.stats.donors == 0


def test_a_removal_that_overtakes_a_queued_add_wins() -> None:
    embedder = FakeEmbedder()
    with evidence_of(embedder) as evidence:
        embedder.gate.clear()
        evidence.add("being embedded", Prompt([1, 0, 0]))
        assert embedder.entered.acquire(timeout=WAIT_S)
        evidence.add("still queued", Prompt([1, 0, 0]))
        evidence.add("kept", Prompt([1, 0, 0]))
        evidence.remove("being embedded")
        evidence.remove("still queued")
        embedder.gate.set()
        assert evidence.flush(WAIT_S)
        assert ids(evidence.find_similar(Prompt([1, 0, 0]))) == ["kept"]


def test_a_donor_registered_again_while_queued_shows_only_its_latest_prompt() -> None:
    embedder = FakeEmbedder()
    with evidence_of(embedder) as evidence:
        embedder.gate.clear()
        evidence.add("d", Prompt([1, 0, 0]))
        assert embedder.entered.acquire(timeout=WAIT_S)
        evidence.add("d", Prompt([0, 1, 0]))
        embedder.gate.set()
        assert evidence.flush(WAIT_S)
        assert evidence.find_similar(Prompt([1, 0, 0])) == ()
        assert ids(evidence.find_similar(Prompt([0, 1, 0]))) == ["d"]


def test_registering_again_hides_the_old_prompt_at_once() -> None:
    embedder = FakeEmbedder()
    with evidence_of(embedder) as evidence:
        added(evidence, d=[1, 0, 0], other=[1, 0, 0])
        embedder.gate.clear()
        evidence.add("d", Prompt([0, 1, 0]))
        query = threading.Timer(0, embedder.gate.set)
        query.start()
        assert ids(evidence.find_similar(Prompt([1, 0, 0]))) == ["other"]
        query.join()


def test_a_full_queue_drops_the_newcomer_and_never_blocks() -> None:
    embedder = FakeEmbedder()
    with evidence_of(embedder, max_queued=2) as evidence:
        embedder.gate.clear()
        evidence.add("first", Prompt([1, 0, 0]))
        assert embedder.entered.acquire(timeout=WAIT_S)  # the queue is empty again
        for donor_id in ("second", "third", "fourth", "fifth"):
            evidence.add(donor_id, Prompt([1, 0, 0]))
        assert evidence.stats.dropped == 2
        assert evidence.stats.queued == 3
        embedder.gate.set()
        assert evidence.flush(WAIT_S)
        assert ids(evidence.find_similar(Prompt([1, 0, 0]))) == ["first", "second", "third"]


def test_a_donor_whose_newest_prompt_was_dropped_does_not_show_the_old_one() -> None:
    embedder = FakeEmbedder()
    with evidence_of(embedder, max_queued=1) as evidence:
        added(evidence, d=[1, 0, 0])
        embedder.gate.clear()
        evidence.add("x", Prompt([0, 0, 1]))
        assert embedder.entered.acquire(timeout=WAIT_S)
        assert embedder.entered.acquire(timeout=WAIT_S)
        evidence.add("y", Prompt([0, 0, 1]))
        evidence.add("d", Prompt([0, 1, 0]))
        embedder.gate.set()
        assert evidence.flush(WAIT_S)
        assert evidence.find_similar(Prompt([1, 0, 0])) == ()


def test_adding_waits_for_no_embedder_even_when_it_hangs() -> None:
    embedder = FakeEmbedder()
    with evidence_of(embedder) as evidence:
        embedder.gate.clear()
        for i in range(200):
            evidence.add(f"d{i}", Prompt([1, 0, i]))
        assert evidence.find_similar(Prompt([1, 0, 0])) == ()  # none of them is there yet


def test_an_embedder_that_fails_costs_only_its_own_donor() -> None:
    with evidence_of(FakeEmbedder()) as evidence:
        evidence.add("bad", Prompt([1, 0, 0], text="fails"))
        evidence.add("worse", Prompt([1, 0, 0], text="wrong shape"))
        added(evidence, good=[1, 0, 0])
        assert ids(evidence.find_similar(Prompt([1, 0, 0]))) == ["good"]
        assert evidence.stats.errors == 2
        assert isinstance(evidence.last_error, ValueError)
        assert evidence.find_similar(Prompt([1, 0, 0], text="fails")) == ()
        assert evidence.stats.errors == 3
        assert str(evidence.last_error) == "the model fell over"


def test_an_index_that_fails_costs_only_the_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fall_over(*_: Any) -> None:
        raise RuntimeError("the index fell over")

    with evidence_of(FakeEmbedder()) as evidence:
        added(evidence, d=[1, 0, 0])
        monkeypatch.setattr(BruteForceIndex, "search", fall_over)
        assert evidence.find_similar(Prompt([1, 0, 0])) == ()
        assert str(evidence.last_error) == "the index fell over"


def test_a_prompt_that_cannot_be_embedded_is_counted_and_left_out() -> None:
    with evidence_of(FakeEmbedder()) as evidence:
        evidence.add("textless", Prompt([1, 0, 0], text="nothing"))
        added(evidence, d=[1, 0, 0])
        assert evidence.stats == SimilarityStats(
            donors=1, embedded=1, without_vector=1, mean_embed_ms=evidence.stats.mean_embed_ms
        )
        assert evidence.find_similar(Prompt([1, 0, 0], text="nothing")) == ()


def test_a_vector_of_nan_is_no_evidence() -> None:
    with evidence_of(FakeEmbedder()) as evidence:
        added(evidence, d=[1, 0, 0])
        with np.errstate(invalid="ignore"):
            assert evidence.find_similar(Prompt([0, 0, 0])) == ()


def test_an_embedder_over_budget_is_not_asked() -> None:
    embedder = FakeEmbedder()
    with evidence_of(embedder) as evidence:
        added(evidence, d=[1, 0, 0])
        evidence._clock.mean_ms = 50.0
        asked = embedder.calls
        assert evidence.find_similar(Prompt([1, 0, 0]), budget_ms=10.0) == ()
        assert embedder.calls == asked
        assert evidence.stats.over_budget == 1
        assert ids(evidence.find_similar(Prompt([1, 0, 0]), budget_ms=100.0)) == ["d"]
        assert ids(evidence.find_similar(Prompt([1, 0, 0]))) == ["d"]


def test_sketches_still_answer_when_the_embedder_is_over_budget() -> None:
    with evidence_of(FakeEmbedder(), fuzzy=True) as evidence:
        added(evidence, d=list(range(1, 200)))
        evidence._clock.mean_ms = 50.0
        assert evidence.find_similar(Prompt(range(1, 200)), budget_ms=1.0) == (Similar("d", 1.0, "simhash"),)


def test_the_first_embedding_includes_loading_and_is_forgotten() -> None:
    clock = module._EmbedClock()
    clock.record(5000.0)
    assert clock.mean_ms == 5000.0
    clock.record(10.0)
    assert clock.mean_ms == 10.0
    clock.record(20.0)
    assert clock.mean_ms == pytest.approx(12.0)


def test_near_duplicates_are_evidence_only_when_fuzzy() -> None:
    tokens = np.random.default_rng(1).integers(0, 50_000, 2000)
    edited = tokens.copy()
    edited[::20] = 3
    for fuzzy, expected in ((True, [("d", "simhash")]), (False, [])):
        with evidence_of(NullEmbedder(), fuzzy=fuzzy) as evidence:
            added(evidence, d=tokens.tolist())
            assert [(found.donor_id, found.source) for found in evidence.find_similar(Prompt(edited))] == expected


def test_a_donor_found_by_both_is_named_once_with_the_higher_figure() -> None:
    tokens = np.random.default_rng(1).integers(0, 50_000, 2000)
    edited = tokens.copy()
    edited[::20] = 3
    with evidence_of(LexicalEmbedder(), fuzzy=True) as evidence:
        added(evidence, d=tokens.tolist())
        (found,) = evidence.find_similar(Prompt(edited))
        assert found.source == "lexical"
        assert found.similarity > 0.9


def test_without_an_embedder_no_thread_is_started() -> None:
    with evidence_of(NullEmbedder()) as evidence:
        evidence.add("d", Prompt([1, 2, 3]))
        assert evidence._worker is None
        assert evidence.find_similar(Prompt([1, 2, 3])) == ()
        assert evidence.flush(0)


def test_an_idle_thread_goes_home_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.0)
    with evidence_of(FakeEmbedder()) as evidence:
        evidence.add("a", Prompt([1, 0, 0]))
        first = evidence._worker
        if first is not None:
            first.join(WAIT_S)
        assert evidence._worker is None
        added(evidence, b=[1, 0, 0])
        assert ids(evidence.find_similar(Prompt([1, 0, 0]))) == ["a", "b"]


def test_a_closed_evidence_is_silent() -> None:
    evidence = SimilarityIndex(FakeEmbedder(), min_similarity=0.0)
    added(evidence, d=[1, 0, 0])
    evidence.close()
    evidence.add("late", Prompt([1, 0, 0]))
    evidence.remove("d")
    evidence.close()
    assert evidence.find_similar(Prompt([1, 0, 0])) == ()
    assert evidence.flush(0)


def test_flush_says_when_the_time_was_not_enough() -> None:
    embedder = FakeEmbedder()
    with evidence_of(embedder) as evidence:
        embedder.gate.clear()
        evidence.add("d", Prompt([1, 0, 0]))
        assert not evidence.flush(0)
        embedder.gate.set()
        assert evidence.flush(WAIT_S)


def random_prompts(count: int, seed: int = 0) -> list[Prompt]:
    return [Prompt(row) for row in np.random.default_rng(seed).integers(1, 1000, (count, 3))]


def test_a_large_shelf_moves_to_usearch_and_finds_the_same() -> None:
    pytest.importorskip("usearch")
    prompts = random_prompts(120)
    with evidence_of(FakeEmbedder(), use_usearch_from=100) as graph, evidence_of(FakeEmbedder()) as exact:
        for i, prompt in enumerate(prompts):
            graph.add(f"d{i}", prompt)
            exact.add(f"d{i}", prompt)
        graph.flush(WAIT_S)
        exact.flush(WAIT_S)
        (shelf,) = graph._shelves.values()
        assert isinstance(shelf.vectors, UsearchIndex)
        for i in range(0, 120, 2):
            graph.remove(f"d{i}")
            exact.remove(f"d{i}")
        same = 0
        for query in prompts:
            found = ids(graph.find_similar(query))
            assert all(int(donor_id[1:]) % 2 for donor_id in found)
            same += len(set(found) & set(ids(exact.find_similar(query))))
        assert same >= 0.95 * 5 * len(prompts)


def test_a_donor_removed_while_the_graph_is_built_stays_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("usearch")
    with evidence_of(FakeEmbedder(), use_usearch_from=3) as evidence:

        def add_and_remove(index: UsearchIndex, key: int, vector: Any) -> None:
            add_really(index, key, vector)
            evidence.remove("a")

        add_really = UsearchIndex.add
        monkeypatch.setattr(UsearchIndex, "add", add_and_remove)
        added(evidence, a=[1, 0, 0], b=[2, 0, 0], c=[3, 0, 0])
        (shelf,) = evidence._shelves.values()
        assert len(shelf.vectors) == 2
        assert ids(evidence.find_similar(Prompt([1, 0, 0]))) == ["b", "c"]


def test_without_usearch_a_large_shelf_stays_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any) -> None:
        raise MissingDependencyError("usearch is not installed")

    monkeypatch.setattr(module, "UsearchIndex", absent)
    with evidence_of(FakeEmbedder(), use_usearch_from=2) as evidence:
        added(evidence, a=[1, 0, 0], b=[1, 0, 0], c=[1, 0, 0])
        assert ids(evidence.find_similar(Prompt([1, 0, 0]))) == ["a", "b", "c"]
        assert evidence.stats.errors == 0


def test_many_threads_may_add_remove_and_search_at_once() -> None:
    prompts = random_prompts(50)
    faults: list[BaseException] = []
    with evidence_of(FakeEmbedder(), use_usearch_from=30, max_queued=10_000, fuzzy=True) as evidence:

        def work(worker: int) -> None:
            try:
                for i, prompt in enumerate(prompts):
                    evidence.add(f"w{worker}-{i}", prompt)
                    evidence.find_similar(prompt)
                    if i % 2:
                        evidence.remove(f"w{worker}-{i}")
            except BaseException as fault:
                faults.append(fault)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert evidence.flush(WAIT_S)
        assert faults == []
        assert evidence.last_error is None
        assert evidence.stats.donors == 4 * 25
        found = {donor_id for prompt in prompts for donor_id in ids(evidence.find_similar(prompt, limit=100))}
        assert found
        assert all(int(donor_id.split("-")[1]) % 2 == 0 for donor_id in found)
