"""The report: one page that needs nothing, shows no number that nobody measured, and lets no text out of its place."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verdict_samples import changed, live_records, result_of, written

from sembench.cli import main
from sembench.report import ReportView, build_report, build_view
from sembench.report.charts import FIGURES
from sembench.report.story import build_tiles, list_absent, write_headline
from sembench.result import RequestRecord
from sembench.witnesses.engine_events import summarize_file
from semblend.web.charts import Scale, choose_even_ticks, list_doublings, thin_out
from semblend.web.site import write_icon

FIXTURES = Path(__file__).parent.parent / "fixtures"
VOID = {"meta", "br", "hr", "img", "input", "link", "line", "wbr"}


class Balance(HTMLParser):
    """Fails on a tag that is closed in the wrong order; collects tags and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(page: str) -> Balance:
    balance = Balance()
    balance.feed(page)
    balance.close()
    assert balance.open == []
    return balance


@pytest.fixture(scope="module")
def live() -> ReportView:
    return build_view(result_of(live_records(4), aggregate={}, by_transform={}, paired=None))


def offline_records() -> list[RequestRecord]:
    blank = {
        "arm": "single", "backend_confirmed_blocks": None, "backend_confirmed_tokens": None, "ttft_ms": None,
        "confirmation_sources": (), "cold_f1": None, "cold_kl_topk": None, "quality_pass": None, "quality_score": None,
        "wrong_tokens": 0,
    }  # fmt: skip
    return changed([r for r in live_records(3) if r.arm == "warm"], lambda r: True, **blank)


@pytest.fixture(scope="module")
def offline() -> ReportView:
    return build_view(result_of(offline_records(), aggregate={}, by_transform={}, paired=None))


def test_the_page_needs_nothing_but_itself(live: ReportView) -> None:
    page = build_report(live, "A run").html.replace(write_icon(), "")  # a picture inside the page
    seen = parsed(page)
    assert not {tag for tag, _ in seen.tags} & {"script", "link", "img", "iframe", "object", "embed"}
    assert not re.search(r"https?://|url\(|@import|src=|href=", page)


def test_the_page_says_what_it_shows_to_those_who_do_not_see_it(live: ReportView) -> None:
    seen = parsed(build_report(live, "A run").html)
    drawings = [attrs for tag, attrs in seen.tags if tag == "svg" and attrs.get("aria-hidden") != "true"]
    assert len(drawings) == 2 * sum(figure(live) is not None for figure in FIGURES)
    assert all(attrs["role"] == "img" and len(str(attrs["aria-label"])) > 20 for attrs in drawings)
    assert dict(seen.tags)["html"] == {"lang": "en"}
    assert [tag for tag, _ in seen.tags].count("h1") == 1


def test_a_live_result_has_every_plot_and_each_plot_its_numbers(live: ReportView) -> None:
    figures = [figure(live) for figure in FIGURES]
    names = [figure.name for figure in figures if figure]
    assert names == ["ttft-transform", "ttft-length", "ladder", "quality", "divergence", "negatives"]
    assert all(len(row) == len(figure.head) for figure in figures if figure for row in figure.rows)
    assert all(figure.rows and figure.caption and figure.legend for figure in figures if figure)


def test_what_was_not_measured_is_said_and_not_drawn(offline: ReportView) -> None:
    ladder = next(found for figure in FIGURES if (found := figure(offline)) and found.name == "ladder")
    assert 'class="rung-confirmed"' not in ladder.drawings[0]
    assert "Not measured in this run: confirmed" in ladder.caption
    assert ladder.rows[0][-1] == "not measured"
    assert "Nothing was confirmed: no backend ran." in write_headline(offline)
    assert any(line.startswith("Confirmed reuse") for line in list_absent(offline))
    assert not any("faster" in tile.label for tile in build_tiles(offline))


def test_a_result_without_requests_still_makes_a_page() -> None:
    view = build_view(result_of([], aggregate={}, by_transform={}, paired=None))
    parsed(build_report(view, "empty").html)
    assert write_headline(view).startswith("Do not believe this result")
    assert all(figure(view) is None for figure in FIGURES)


HOSTILE = "<script>alert('x')</script> & \"quotes\" | `pipe` \n</td></table><img src=x>"


def test_text_of_servers_and_models_stays_text() -> None:
    records = changed(
        live_records(2),
        lambda r: True,
        output_text=HOSTILE,
        contradictions=(HOSTILE,),
        transform=HOSTILE,
        dataset=HOSTILE,
    )
    records = [record for record in records if record.arm != "rerun"]
    view = build_view(
        result_of(records, config={"mode": HOSTILE, "model": HOSTILE}, aggregate={}, by_transform={}, paired=None)
    )
    seen = parsed(build_report(view, HOSTILE, [{"engine": HOSTILE, "caveat": HOSTILE}]).html)
    assert not {tag for tag, _ in seen.tags} & {"script", "img"}
    assert any("alert('x')" in text for text in seen.text)
    page = build_report(view, HOSTILE).markdown
    assert "<script>" not in page
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_the_gravest_request_stands_first() -> None:
    def warm(name: str) -> Any:
        return lambda record: record.arm == "warm" and record.item_id == name

    records = changed(live_records(2), warm("rag_reorder-0"), ttft_ms=9e6)
    records = changed(records, warm("rag_reorder-1"), cold_kl_topk=0.5)
    records = changed(records, warm("fuzzy_edit-0"), donor_fact_answered=True)
    records = changed(records, warm("negative_control-1"), backend_confirmed_tokens=64)
    records = changed(records, warm("fuzzy_edit-1"), contradictions=("receipt 64, usage 0",))
    view = build_view(result_of(records, aggregate={}, by_transform={}, paired=None))
    assert [row.record.item_id for row in view.worst] == [
        "fuzzy_edit-0", "negative_control-1", "fuzzy_edit-1", "rag_reorder-1", "rag_reorder-0"
    ]  # fmt: skip
    assert view.worst[3].reasons == ("false safe: KL 0.500",)
    assert "1 of 2 unrelated pairs reused anything" in write_headline(view)
    assert [tile.tone for tile in build_tiles(view)][-3:] == ["bad", "bad", "bad"]


def test_a_run_that_is_no_faster_says_so(live: ReportView) -> None:
    assert write_headline(live).startswith("Warm requests reached their first token ")
    slow = [r for r in live_records(3, reuse=0.0) if r.transform in ("fuzzy_edit", "negative_control")]
    view = build_view(result_of(slow, aggregate={}, by_transform={}, paired=None))
    assert write_headline(view).startswith("Nothing was confirmed to be reused, so no speed-up is stated.")
    assert not any("faster" in tile.label for tile in build_tiles(view))


def negative(record: RequestRecord) -> bool:
    return record.negative_control and record.arm == "warm"


def test_unrelated_pairs_that_nobody_observed_are_drawn_as_unknown() -> None:
    records = changed(live_records(2), negative, backend_confirmed_tokens=None, backend_confirmed_blocks=None)
    view = build_view(result_of(records, aggregate={}, by_transform={}, paired=None))
    figure = next(found for one in FIGURES if (found := one(view)) and found.name == "negatives")
    assert figure.drawings[0].count('class="unknown"') == 2
    assert ("unknown", "nobody says what it reused: 2") in figure.legend
    assert ("cold", "ran cold, as it must: 0") in figure.legend
    assert "Nobody says what 2 unrelated pairs reused" in write_headline(view)
    assert any(tile.value == "not measured" for tile in build_tiles(view))


def test_speed_that_unrelated_pairs_have_too_is_no_headline() -> None:
    records = changed(live_records(2), negative, ttft_ms=1.0)
    view = build_view(result_of(records, aggregate={}, by_transform={}, paired=None))
    assert "so no speed-up is stated" in write_headline(view)


def test_many_pairs_make_a_page_of_bounded_size() -> None:
    view = build_view(result_of(live_records(90), aggregate={}, by_transform={}, paired=None))
    page = build_report(view, "large").html
    assert len(page) < 2_000_000
    assert "of 630 pairs are drawn" in page


numbers = st.floats(0.001, 1e7)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(1, 10**6), numbers, numbers, st.floats(0, 5)), min_size=1, max_size=8))
def test_every_mark_lies_inside_its_drawing(rows: list[tuple[int, float, float, float]]) -> None:
    cold = live_records(1)[0]
    made = [
        record
        for at, (length, cold_ms, warm_ms, kl) in enumerate(rows)
        for record in changed(
            [r for r in live_records(1) if r.item_id == cold.item_id and r.arm != "rerun"], lambda r: True,
            item_id=f"i{at}", pair_id=f"i{at}", prompt_tokens=length, total_blocks=length // 16, cold_kl_topk=kl,
            negative_control=at % 3 == 2,
        )
    ]  # fmt: skip
    times = {f"i{at}": row for at, row in enumerate(rows)}
    made = [changed([r], lambda r: True, ttft_ms=times[r.item_id][1 if r.arm == "cold" else 2])[0] for r in made]
    view = build_view(result_of(made, aggregate={}, by_transform={}, paired=None))
    for figure in FIGURES:
        found = figure(view)
        for drawing in found.drawings if found else ():
            width, height = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing).groups())  # type: ignore[union-attr]
            xs = [float(x) for x in re.findall(r' (?:cx|x|x1|x2)="(-?[\d.]+)"', drawing)]
            ys = [float(y) for y in re.findall(r' (?:cy|y|y1|y2)="(-?[\d.]+)"', drawing)]
            assert all(-1 <= x <= width + 1 for x in xs)
            assert all(-1 <= y <= height + 1 for y in ys)
            assert "nan" not in drawing
            assert "inf" not in drawing


@given(st.floats(0.001, 1e5), st.floats(1.001, 1e5), st.booleans())
def test_ticks_are_few_inside_and_in_order(low: float, factor: float, log: bool) -> None:
    scale = Scale(low, low * factor, 0, 100, log)
    ticks = scale.choose_ticks()
    assert 1 <= len(ticks) <= 13
    assert ticks == sorted(ticks)
    assert all(low * 0.99 <= tick <= low * factor * 1.01 for tick in ticks)
    assert all(math.isfinite(scale(tick)) and -1 <= scale(tick) <= 101 for tick in ticks)


def test_small_helpers() -> None:
    assert choose_even_ticks(0, 100, 5) == [0, 20, 40, 60, 80, 100]
    assert len(list_doublings(1, 2**20)) <= 8
    assert len(thin_out(list(range(1000)), 10)) <= 10
    assert thin_out([], 10) == []


def test_the_command_writes_both_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = written(tmp_path / "run.json", live_records(2), by_transform={}, paired=None)
    summary = tmp_path / "engine.json"
    summary.write_text(json.dumps(summarize_file("lmcache", str(FIXTURES / "lmcache.log"))))
    flags = ["report", "--result", result, "--engine-summary", str(summary)]
    assert main(flags) == 0
    assert json.loads(capsys.readouterr().out) == {"html": str(tmp_path / "run.html")}
    page = (tmp_path / "run.html").read_text()
    assert "What the engines logged" in page
    assert "do not tell an exact prefix" in page
    assert main([*flags, "--markdown", str(tmp_path / "new" / "run.md"), "--title", "Mine"]) == 0
    assert (tmp_path / "new" / "run.md").read_text().startswith("# Mine\n")
    assert main([*flags, "--output", result]) == 2
    assert "is the result itself" in capsys.readouterr().err
