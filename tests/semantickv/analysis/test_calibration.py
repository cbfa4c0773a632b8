"""The latency line is found through noise and stragglers, with an interval that holds the truth."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantickv.analysis.latency import Observations, calibrate, read_observations
from semantickv.traces.trace import Trace
from semblend.errors import InputError


def made(base: float, slope: float, *, noise: float = 0.0, stragglers: int = 0, count: int = 120) -> Observations:
    drawn = np.random.default_rng(5)
    tokens = drawn.uniform(50, 4000, count)
    times = base + slope * tokens + drawn.normal(0, noise, count) if noise else base + slope * tokens
    times[:stragglers] += drawn.uniform(500, 3000, stragglers)
    return Observations(tokens, times)


def test_stragglers_move_least_squares_and_not_this() -> None:
    fitted = calibrate(made(60.0, 0.05, noise=4.0, stragglers=12))
    assert fitted.base_ttft_ms == pytest.approx(60, abs=4)
    assert fitted.token_latency_ms == pytest.approx(0.05, rel=0.04)
    assert abs(fitted.least_squares[0] - 60) > 20
    assert fitted.outliers >= 12


def test_the_intervals_hold_the_truth_and_shrink_with_more_requests() -> None:
    few, many = (calibrate(made(60.0, 0.05, noise=10.0, count=count)) for count in (30, 600))
    for fitted in (few, many):
        assert fitted.base_interval_ms[0] <= 60 <= fitted.base_interval_ms[1]
        assert fitted.token_interval_ms[0] <= 0.05 <= fitted.token_interval_ms[1]
    assert np.ptp(many.token_interval_ms) < np.ptp(few.token_interval_ms)


@given(base=st.floats(0, 500), slope=st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_a_line_without_noise_is_found_and_nothing_is_negative(base: float, slope: float) -> None:
    fitted = calibrate(made(base, slope, count=20))
    assert fitted.base_ttft_ms == pytest.approx(base, abs=1e-3 * max(1, base, 4000 * slope))
    assert fitted.token_latency_ms == pytest.approx(slope, abs=1e-4)
    assert fitted.base_ttft_ms >= 0 <= fitted.token_latency_ms


def test_times_that_fall_with_length_give_no_negative_slope() -> None:
    tokens = np.arange(100, 1100, 20.0)
    fitted = calibrate(Observations(tokens, 500 - 0.2 * tokens))
    assert fitted.token_latency_ms == 0
    assert fitted.base_ttft_ms > 0


@pytest.mark.parametrize(
    ("tokens", "said"), [(np.arange(3.0), "3 requests"), (np.full(50, 128.0), "computed 128 tokens")]
)
def test_too_little_is_refused(tokens: np.ndarray, said: str) -> None:
    with pytest.raises(InputError, match=said):
        calibrate(Observations(tokens, tokens + 5))


def record(number: int, **known: object) -> dict[str, object]:
    block = {"content_hash": f"h{number}", "semantic_type": "user", "token_count": 100}
    return {"request_id": f"r{number}", "timestamp_ms": number, "blocks": [block, block | {"token_count": 50}], **known}


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_computed_tokens_are_read_from_the_trace_and_guessed_only_where_it_is_silent(tmp_path: Path, name: str) -> None:
    records = (
        record(1, observed_ttft_ms=10, observed_prefill_tokens=40),
        record(2, observed_ttft_ms=20, observed_prefix_hit_tokens=30),
        record(3, observed_ttft_ms=30),
        record(4),
    )
    text = "".join(json.dumps(one) + "\n" for one in records)
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    seen = read_observations(Trace.read(path))
    assert seen.prefill_tokens.tolist() == [40, 120, 150]
    assert seen.ttft_ms.tolist() == [10, 20, 30]
    assert seen.assumed_cold == 1


def test_a_trace_without_times_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(record(1)) + "\n")
    with pytest.raises(InputError, match="no observed time"):
        read_observations(Trace.read(path))
