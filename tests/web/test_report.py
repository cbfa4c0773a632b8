"""The shell of written pages and pictures: one place makes them, and no text gets out of its place."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from semblend.web.charts import Axis, Drawing, Figure, begin_plot, draw_both, spread_out, write_plain_style
from semblend.web.report import (
    Strong,
    Tile,
    render_document,
    render_figure,
    render_head,
    render_table,
    render_tiles,
)
from semblend.web.site import read_static, write_icon

ROOT = Path(__file__).parents[2]
texts = st.text(alphabet=st.sampled_from("<>&\"'/=`{}$ scriptonerror\n\ud800\x00"), min_size=1, max_size=40)


class Tags(HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}


def render_page(words: str) -> str:
    def draw(width: float) -> Drawing:
        drawing, x, y = begin_plot(width, 200, Axis(0, 1, str), Axis(0, 1, str), words)
        drawing.add_curve([(x(0), y(0)), (x(1), y(1))], "curve", words)
        return drawing

    figure = Figure("name", words, draw_both(draw, words), (("curve", words),), words, (words,), ((words,),))
    parts = [
        render_head(words, (words,), words), render_tiles([Tile(words, words, words, "bad")]),
        render_figure(figure), render_table((words, words), [(words, Strong(words))], classes={1: "key"}),
    ]  # fmt: skip
    return render_document(words, parts)


@given(texts)
def test_no_text_makes_a_tag_or_an_attribute(words: str) -> None:
    plain, hostile = Tags(render_page("x")), Tags(render_page(words))
    assert [tag for tag in hostile.tags if tag != "wbr"] == plain.tags
    assert hostile.attributes == plain.attributes


def test_a_page_needs_nothing_but_itself() -> None:
    page = render_page("x")
    assert "default-src 'none'; style-src 'unsafe-inline'" in page
    assert page.count(write_icon()) == 1  # a picture inside the page
    assert not re.search(r"https?://|url\(|@import|src=|href=|<script", page.replace(write_icon(), ""))


def test_a_picture_is_a_file_of_its_own_that_names_no_variable() -> None:
    drawing = Drawing(100, 50)
    drawing.add_text(1, 2, "a < b & c")
    picture = drawing.render('the "label"', write_plain_style())
    root = ElementTree.fromstring(picture)
    assert root.attrib["aria-label"] == 'the "label"'
    assert "var(" not in picture
    assert "light-dark" not in picture


def test_every_colour_of_a_report_has_a_name_in_the_palette() -> None:
    sheet = read_static("base.css", "report.css", "chart.css")
    assert set(re.findall(r"var\((--[a-z0-9-]+)", sheet)) <= set(re.findall(r"(--[a-z0-9-]+):", sheet))


def test_pages_are_made_in_one_place() -> None:
    own = re.compile(r"<html|<!doctype|<style|<svg", re.IGNORECASE)
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "bench").glob("*.py"), *(ROOT / "tools").rglob("*.py")]
    makers = {path.relative_to(ROOT).as_posix() for path in files if own.search(path.read_text(encoding="utf-8"))}
    assert makers == {"src/semblend/web/report.py", "src/semblend/web/charts.py"}


@given(st.lists(st.floats(0, 200), min_size=1, max_size=12).map(sorted))
def test_names_that_are_moved_apart_keep_their_order_and_their_distance(places: list[float]) -> None:
    moved = spread_out(places, 14.0, 200.0)
    assert moved[-1] <= 200.0
    assert all(after - before >= 14.0 - 1e-6 for before, after in itertools.pairwise(moved))
