"""The page of a load run: every line has a name, every axis a unit, and no drawing is broken."""

from __future__ import annotations

import html
import re

import pytest

from sembench.report import build_load_report
from sembench.result import LoadPoint, LoadResult


def make_point(rate: float | None, limit: int | None, ttft_ms: float = 1500.0, throughput: float = 0.5) -> LoadPoint:
    summary = {
        "completed": 8, "failed": 0, "request_throughput": throughput, "goodput_share": 0.25,
        "median_ttft_ms": ttft_ms, "p99_ttft_ms": 4 * ttft_ms, "median_tpot_ms": 20.0, "p99_e2el_ms": 9000.0,
    }  # fmt: skip
    return LoadPoint(request_rate=rate, max_concurrency=limit, duration_s=10.0, summary=summary, requests=())


def render(*points: LoadPoint, **slo: float) -> str:
    run = {"timestamp_utc": "2026-11-17T06:33:27Z"}
    result = LoadResult(run=run, config={"model": "m", "slo": slo}, environment={}, points=points)
    return html.unescape(build_load_report(result, "A load").html).replace("\xa0", " ")


def read_legends(page: str) -> list[list[str]]:
    found = re.findall(r'<ul class="legend">(.*?)</ul>', page, re.DOTALL)
    return [re.findall(r"([^>]+)</li>", legend) for legend in found]


def test_lines_are_named_by_what_tells_them_apart() -> None:
    one = read_legends(render(make_point(0.5, None), make_point(2.0, None), ttft=500.0))
    assert one == [["median", "99th percentile", "promised: 500 ms"], ["answered", "asked for"]]
    both = read_legends(render(make_point(2.0, 4), make_point(2.0, 8), ttft=2000.0))
    limits = ["4 under way", "8 under way"]
    assert both == [[*limits, "median", "99th percentile", "promised: 2 s"], limits, [*limits, "asked for"]]


def test_axes_are_written_with_their_units() -> None:
    page = render(make_point(0.5, None, ttft_ms=200.0), make_point(2.0, None, ttft_ms=9000.0), ttft=500.0)
    ticks = re.findall(r'class="tick"[^>]*>([^<]+)<', page)
    assert any(tick.endswith(" ms") for tick in ticks)
    assert {"10 s", "100 %"} <= set(ticks), ticks
    assert "2026-11-17 06:33 UTC" in page


@pytest.mark.parametrize("rates", [(None,), (1.0,), (1.0, None), (0.5, 1.0, 2.0)])
@pytest.mark.parametrize("ttft_ms", [0.0, 1.0, 1e6])
def test_every_line_has_points(rates: tuple[float | None, ...], ttft_ms: float) -> None:
    page = render(*(make_point(rate, None, ttft_ms) for rate in rates))
    paths = re.findall(r'<path d="([^"]*)"', page)
    assert paths
    assert all(re.match(r"M[\d.]+ [\d.]+", path) for path in paths)
    assert (">asked for<" in page) is any(rate is not None for rate in rates)
