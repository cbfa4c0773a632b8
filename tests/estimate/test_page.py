"""The page needs nothing, shows what the answer holds, and lets no text out of its place."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from estimate_logs import ask, make_prompt, replay
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.cli.commands.estimate import render_tables
from semblend.estimate.page import render_page
from semblend.text.logs import LoggedPrompt
from semblend.text.parts import Part

EVIL = "</title></style></span><script>alert(1)</script><img src=x onerror=alert(1)>\"'&lt;javascript:alert(1)"
ALLOWED = re.compile(
    "html|head|meta|link|title|style|body|main|h[123]|p|ul|li|b|span|div|figure|figcaption|svg|line|text|rect|circle|path|"
    "table|thead|tbody|tr|th|td|details|summary|section"
)


class Checker(HTMLParser):
    """Collects tags and attributes; a tag that does not close is an error."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "link":  # the page's icon, which it holds itself
            assert dict(attrs)["rel"] == "icon"
            assert dict(attrs)["href"].startswith("data:image/svg+xml,")
            return
        self.attributes |= {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check(page: str) -> Checker:
    found = Checker()
    found.feed(page)
    found.close()
    assert found.open == []
    assert all(ALLOWED.fullmatch(tag) for tag in found.tags)
    assert not {name for name in found.attributes if name.startswith("on") or name in ("src", "href", "action")}
    return found


def make_answer(words: str = "Why?", tenant: str = "", **options: Any) -> dict[str, Any]:
    prompts = [make_prompt(at, ask(at, [at % 3, 3, 4], [at % 2, 2], f"{words} {at}"), tenant=tenant) for at in range(6)]
    prompts.append(
        LoggedPrompt(99, text=words or "x", parts=(Part(words or "x"),), request_id=words, tenant=tenant + "2")
    )
    return replay(prompts, **options)[1]


def test_the_page_shows_every_row_and_what_it_assumes() -> None:
    answer = make_answer(cache_tokens=100_000)
    text = " ".join("".join(check(render_page(answer)).text).split())
    for row in answer["rows"]:
        assert row["title"] in text
        assert f"{row['saved_tokens']:+,}" in text
        assert row["assumes"] in text
    for kind, one in answer["breaks"].items():
        assert kind in text
        assert f"{one['prompts']:,} prompt{'s' * (one['prompts'] != 1)}" in text
    assert "replayed, not measured" in text
    assert answer["rates"]["prefill_source"] in text


@pytest.mark.parametrize("words", [EVIL, "\x00\ud800\u202e", "<" * 200, "]]>--><!--"])
def test_hostile_prompts_stay_text(words: str) -> None:
    answer = make_answer(words, tenant=words, cache_tokens=100_000)
    page = render_page(answer)
    check(page)
    assert "<script" not in page
    assert "<img" not in page


@settings(max_examples=15, deadline=None)
@given(st.text(alphabet=st.sampled_from("<>&\"'/=scriptonerror \n"), max_size=60))
def test_no_text_makes_a_tag(words: str) -> None:
    check(render_page(make_answer(words, tenant=words, factors=())))


def test_the_page_loads_nothing() -> None:
    page = render_page(make_answer())
    assert "default-src 'none'" in page
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page


def test_a_log_of_tokens_has_a_page_without_quotes() -> None:
    prompts = [
        LoggedPrompt(at, token_ids=ids, parts=(Part("", token_ids=ids),)) for at, ids in enumerate(_token_lists())
    ]
    answer = replay(prompts)[1]
    assert "The log holds no text." in "".join(check(render_page(answer)).text)


def _token_lists() -> list[Any]:
    return [np.arange(at, at + 300, dtype=np.int32) for at in range(3)]


def test_a_terminal_gets_no_control_codes() -> None:
    shown = render_tables(make_answer("\x1b[31mred\x1b[0m\r\x07", tenant="\x1b]0;evil\x07", cache_tokens=100_000))
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert "costs more than it saves" in shown or "all of it" in shown
