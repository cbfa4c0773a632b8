"""What is known of Dynamo's workers: bounded, kept apart by namespace, corrected by what answers report."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from semantickv.routing.router import EngineReuse
from semantickv.routing.worker_evidence import WorkerEvidence
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
        assert state.key == B or (state.prefix_tokens or 0) >= 64
        assert found.known_tokens >= 64
