"""What is known of Dynamo's workers: bounded, kept apart by namespace, corrected by what answers report."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from semantickv.routing.locality import ReplicaMemory
from semantickv.routing.policies import Standing, semantic_locality
from semantickv.routing.router import EngineReuse, LoadGuard
from semantickv.routing.worker_evidence import MOST_WORKERS, WorkerEvidence
from semblend.confirm.outcome import Outcome
from semblend.integration.dynamo.placement import PlacementReason, WorkerKey, WorkerState
from semblend.prompt import Namespace

A, B, C = WorkerKey(1), WorkerKey(2), WorkerKey(2, 1)
IDLE = [WorkerState(A), WorkerState(B), WorkerState(C)]
DOCUMENT = np.random.default_rng(1).integers(0, 50_000, 2000).tolist()
NOWHERE = Namespace()


def test_a_document_is_found_behind_another_beginning():
    evidence = WorkerEvidence(100_000)
    evidence.note_placed(evidence.read([1, *DOCUMENT], NOWHERE), C)
    found = evidence.choose(evidence.read([*range(100), *DOCUMENT], NOWHERE), IDLE)
    assert (found.worker, found.outcome) == (C, Outcome.SEMANTIC_PLACEMENT)
    assert 1500 < found.known_tokens <= 2100


def test_the_same_beginning_is_an_exact_route():
    evidence = WorkerEvidence(100_000)
    prompt = evidence.read(DOCUMENT, NOWHERE)
    evidence.note_placed(prompt, A)
    assert evidence.choose(prompt, IDLE).outcome is Outcome.EXACT_PREFIX_ROUTE


def test_what_dynamos_index_says_counts_where_nothing_was_sent_by_us():
    evidence = WorkerEvidence(100_000)
    states = [WorkerState(A), WorkerState(B, prefix_tokens=1600)]
    found = evidence.choose(evidence.read(DOCUMENT, NOWHERE), states)
    assert (found.worker, found.outcome, found.expected_prefix_tokens) == (B, Outcome.EXACT_PREFIX_ROUTE, 0)


def test_engines_that_reuse_beginnings_only_are_not_sent_shifted_documents():
    evidence = WorkerEvidence(100_000, reuse=EngineReuse.PREFIX)
    evidence.note_placed(evidence.read([1, *DOCUMENT], NOWHERE), A)
    found = evidence.choose(evidence.read([*range(100), *DOCUMENT], NOWHERE), IDLE)
    assert found.reason is PlacementReason.UNKNOWN


def test_a_few_tokens_in_common_are_chance():
    evidence = WorkerEvidence(100_000)
    evidence.note_placed(evidence.read([1, *DOCUMENT[:40]], NOWHERE), A)
    assert evidence.choose(evidence.read([2, *DOCUMENT[:40]], NOWHERE), IDLE).worker is None


def test_new_documents_behind_one_instruction_are_spread_and_then_stay():
    """Dynamo would send all of them to the worker that has the instruction in its cache."""
    evidence = WorkerEvidence(1_000_000)
    instruction = list(range(200))
    evidence.note_placed(evidence.read([*instruction, *DOCUMENT], NOWHERE), A)
    homes = {}
    for seed in range(12):
        tokens = np.random.default_rng(100 + seed).integers(0, 50_000, 2000).tolist()
        prompt = evidence.read([*instruction, *tokens], NOWHERE)
        homes[seed] = evidence.choose(prompt, IDLE)
        evidence.note_placed(prompt, homes[seed].worker)
        assert evidence.choose(prompt, IDLE).worker == homes[seed].worker
    counts = Counter(found.worker for found in homes.values())
    assert set(counts) == {A, B, C}
    assert max(counts.values()) <= 6
    assert PlacementReason.SPREAD in {found.reason for found in homes.values()}


def test_a_short_document_behind_another_instruction_stays_though_the_piece_across_its_edge_is_unknown():
    """Pieces are long: of a document of a few hundred tokens the one across its edge may be the greater part."""
    for seed in range(30):
        evidence = WorkerEvidence(1_000_000)
        document = np.random.default_rng(seed).integers(0, 50_000, 500).tolist()
        evidence.note_placed(evidence.read([7, *document], NOWHERE), A)
        for _ in range(5):  # A got much of late
            evidence.note_placed(evidence.read(DOCUMENT, NOWHERE), A)
        found = evidence.choose(evidence.read([8, 9, 10, *document], NOWHERE), IDLE)
        assert found.worker in (A, None)  # None: the whole document was one piece
        assert (found.worker is None) == (found.reason is PlacementReason.UNKNOWN)


def test_no_worker_at_all_is_left_to_dynamo():
    evidence = WorkerEvidence(100_000)
    prompt = evidence.read(DOCUMENT, NOWHERE)
    evidence.note_placed(prompt, A)
    evidence.note_workers([])  # an empty list says nothing
    assert evidence.choose(prompt, []).reason is PlacementReason.UNKNOWN
    assert evidence.choose(prompt, IDLE).worker == A


def test_a_worker_whose_cache_is_smaller_than_thought_is_remembered_less():
    evidence = WorkerEvidence(100_000)
    prompt = evidence.read(DOCUMENT, NOWHERE)
    evidence.note_placed(prompt, A)
    for _ in range(60):
        evidence.note_answer(evidence.choose(prompt, IDLE), cached_tokens=0)
    assert evidence.tracked_tokens[A] < 2000


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([A, B, C])), max_size=60))
def test_memory_stays_within_its_bound(placed):
    evidence = WorkerEvidence(3000)
    for seed, worker in placed:
        tokens = np.random.default_rng(seed).integers(0, 50_000, 700).tolist()
        evidence.note_placed(evidence.read(tokens, NOWHERE), worker)
    assert all(tokens <= 3000 for tokens in evidence.tracked_tokens.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            WorkerState,
            st.sampled_from([A, B, C]),
            st.integers(0, 50),
            st.integers(0, 100_000),
            st.one_of(st.none(), st.integers(0, 2000)),
        ),
        unique_by=lambda state: state.key,
    )
)
def test_a_pin_names_a_listed_worker_that_has_seen_the_prompt(states):
    evidence = WorkerEvidence(100_000)
    prompt = evidence.read(DOCUMENT, NOWHERE)
    evidence.note_placed(prompt, B)
    before = evidence.tracked_tokens
    found = evidence.choose(prompt, states)
    assert evidence.tracked_tokens == before
    if found.worker is None:
        assert found.reason in (PlacementReason.UNKNOWN, PlacementReason.LOAD)
    else:
        state = next(one for one in states if one.key == found.worker)
        assert state.key == B or (state.prefix_tokens or 0) >= 64 or found.reason is PlacementReason.SPREAD
        assert found.known_tokens >= 64 or found.reason is PlacementReason.SPREAD


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=25),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40_000), st.integers(0, 600)), min_size=4, max_size=4),
)
def test_the_choice_is_that_of_one_worker_after_the_other(placed, loads):
    """By columns, for a thousand workers; the plain twin asks a memory for each worker and takes the best."""
    workers = [WorkerState(WorkerKey(at), *load) for at, load in enumerate(loads)]
    evidence, plain = WorkerEvidence(4000), [ReplicaMemory(4000) for _ in workers]
    turns = [0] * len(workers)
    recent = [0.0] * len(workers)

    def fade(at, turn):
        return recent[at] * (1 - 1 / (16 * max(1, sum(map(bool, turns))))) ** (turn - turns[at])

    for turn, (seed, at) in enumerate(placed, start=1):
        pieces = evidence.read(np.random.default_rng(seed).integers(0, 50_000, 600).tolist(), NOWHERE)
        evidence.note_placed(pieces, WorkerKey(at))
        plain[at].note(pieces)
        recent[at] = 1 + (fade(at, turn) if turns[at] else 0)
        turns[at] = turn
    asked = [3, 1, *np.random.default_rng(2).integers(0, 50_000, 600).tolist()]
    prompt = evidence.read(asked, NOWHERE)
    limit = LoadGuard().compute_limit([one.running for one in workers])
    own = [memory.match(prompt) for memory in plain]
    prefixes = [max(has.prefix_tokens, one.prefix_tokens) for has, one in zip(own, workers, strict=True)]
    knowns = [max(prefix, has.any_tokens) for prefix, has in zip(prefixes, own, strict=True)]
    most, faded = max(knowns), [fade(at, len(placed)) for at in range(len(workers))]
    is_new = most == 0 or most < 0.5 * (prompt.total_tokens - max(prompt.tokens))
    best = None
    for at, one in enumerate(workers):
        prefix, known = prefixes[at], knowns[at]
        waiting = one.waiting_tokens + 256 * one.running + is_new * round(512 * (faded[at] - min(faded)))
        rank = semantic_locality(Standing(one.running, turns[at], waiting, prompt.total_tokens, prefix, known, 0))
        if one.running < limit and (best is None or rank > best[0]):
            best = (rank, one.key, known)
    found = evidence.choose(prompt, workers)
    if most < 64:
        assert found.reason is PlacementReason.UNKNOWN
    elif best is None or (best[2] < 64 and not is_new):
        assert found.reason is PlacementReason.LOAD
    else:
        assert (found.worker, found.known_tokens) == best[1:]
        assert found.reason is (PlacementReason.DONORS if best[2] >= 64 else PlacementReason.SPREAD)


def test_rows_of_workers_that_come_and_go_are_used_again():
    evidence = WorkerEvidence(10_000)
    prompt = evidence.read(DOCUMENT, NOWHERE)
    for at in range(3 * MOST_WORKERS):
        evidence.note_placed(prompt, WorkerKey(at))
        evidence.note_workers([WorkerKey(at)])
    last = WorkerKey(3 * MOST_WORKERS - 1)
    assert evidence.choose(prompt, [WorkerState(last), WorkerState(WorkerKey(0))]).worker == last
    assert list(evidence.tracked_tokens) == [last]


def test_more_workers_than_rows_are_dynamos():
    evidence = WorkerEvidence(10_000)
    short = evidence.read(DOCUMENT[:300], NOWHERE)
    for at in range(MOST_WORKERS + 1):
        evidence.note_placed(short, WorkerKey(at))
    assert evidence.choose(short, [WorkerState(WorkerKey(MOST_WORKERS))]).worker is None
    assert evidence.choose(short, [WorkerState(WorkerKey(MOST_WORKERS - 1))]).worker is not None
