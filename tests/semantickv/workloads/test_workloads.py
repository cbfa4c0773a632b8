"""Made-up traffic has the shape that its family states; text traffic is the text."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantickv.workloads.families import (
    FAMILIES,
    ONCE,
    PROCESSES,
    SESSION,
    Arrivals,
    generate_requests,
    generate_workload,
)
from semantickv.workloads.from_text import TEXT_WORKLOADS, TextSource, generate_text_workload
from semblend.errors import InputError

DATA = os.environ.get("SEMBLEND_TEST_DATA")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_traffic_and_another_one_does_not(family: str) -> None:
    one, again, other = (list(generate_requests(family, sessions=4, requests=3, seed=seed)) for seed in (1, 1, 2))
    assert one == again
    assert one != other


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_has_one_length_and_one_type_wherever_it_stands(family: str) -> None:
    seen: dict[int, tuple[int, str]] = {}
    for request in generate_requests(family, sessions=6, requests=4, seed=3):
        for number, tokens, kind in zip(request.block_ids, request.block_tokens, request.block_types, strict=True):
            assert seen.setdefault(number, (tokens, kind)) == (tokens, kind)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_off_blocks_come_once_and_session_blocks_stay_in_their_session(family: str) -> None:
    places: dict[int, set[str]] = {}
    counts: dict[int, int] = {}
    requests = list(generate_requests(family, sessions=6, requests=4, seed=3))
    for request in requests:
        for number in request.block_ids:
            places.setdefault(number, set()).add(request.session)
            counts[number] = counts.get(number, 0) + 1
    scopes = {spec.scope for phase in FAMILIES[family].phases for spec in phase.specs}
    if ONCE in scopes:
        assert all(counts[request.block_ids[-1]] == 1 for request in requests)  # the question comes last
    if SESSION in scopes:
        assert any(counts[number] > 1 and len(where) == 1 for number, where in places.items())


@given(process=st.sampled_from(PROCESSES), seed=st.integers(0, 50), rate=st.floats(0.1, 50))
@settings(max_examples=40, deadline=None)
def test_sessions_begin_in_order_from_zero(process: str, seed: int, rate: float) -> None:
    starts = list(Arrivals(process, rate=rate).draw_starts(30, seed))
    assert starts[0] == 0
    assert all(a <= b for a, b in itertools.pairwise(starts))


@pytest.mark.parametrize("process", ["poisson", "gamma"])
def test_the_rate_is_kept_on_average(process: str) -> None:
    starts = list(Arrivals(process, rate=5.0).draw_starts(4000, seed=1))
    assert 4000 / starts[-1] == pytest.approx(5.0, rel=0.12)


def test_gamma_arrivals_come_in_bursts() -> None:
    def spread(process: str) -> float:
        gaps = np.diff(list(Arrivals(process, rate=5.0, burstiness=0.2).draw_starts(4000, seed=1)))
        return float(gaps.std() / gaps.mean())

    assert spread("poisson") == pytest.approx(1.0, abs=0.1)
    assert spread("gamma") > 1.8


def test_a_mixture_is_in_order_of_arrival_and_holds_all_families() -> None:
    mixed = generate_workload(["repeated_system", "coding_assistant"], sessions=5, requests=3, seed=1,
                     arrivals=Arrivals("poisson", rate=2.0, think_s=5.0))  # fmt: skip
    assert len(mixed) == 30
    assert np.all(np.diff(mixed.arrival_s) >= 0)


def test_tenants_are_named() -> None:
    assert len(generate_workload(["repeated_system"], sessions=30, requests=1, seed=1, tenants=3).tenant_names) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda: list(generate_requests("no_such", sessions=1, requests=1, seed=0)),
        lambda: list(generate_requests("repeated_system", sessions=0, requests=1, seed=0)),
        lambda: Arrivals("weekly"),
        lambda: Arrivals("poisson", rate=0),
        lambda: Arrivals("poisson", think_s=-1),
    ],
)
def test_impossible_traffic_is_refused(call: object) -> None:
    with pytest.raises(InputError):
        call()  # type: ignore[operator]


def test_a_folder_without_the_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sharegpt"):
        generate_text_workload("chats", TextSource(tmp_path))


@pytest.mark.data
@pytest.mark.skipif(not DATA, reason="SEMBLEND_TEST_DATA is not set")
@pytest.mark.parametrize("name", TEXT_WORKLOADS)
def test_real_text_becomes_traffic_with_reuse_in_it(name: str) -> None:
    source = TextSource(Path(str(DATA)), seed=1, sessions=20)
    trace, again = generate_text_workload(name, source), generate_text_workload(name, source)
    assert np.array_equal(trace.ids, again.ids)
    assert np.all(np.diff(trace.arrival_s) >= 0)
    assert trace.tokens.max() <= 3 * source.block_tokens
    assert len(np.unique(trace.ids)) < 0.95 * trace.block_accesses
