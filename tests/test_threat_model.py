"""The threat model names a test for each line, and each of them is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "concepts" / "threat-model.md"
NAMED = sorted(set(re.findall(r"`(tests/[\w/.]+?\.py(?:::\w+)?)`", PAGE.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("named", NAMED)
def test_a_test_that_the_page_names_is_there(named: str) -> None:
    path, _, name = named.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(rf"def {name}\(" if name else r"def test_", text)


def test_every_line_of_an_attack_names_a_test() -> None:
    rows = re.findall(r"^\| (?!attempt|who|---)(.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    attacks = [row for row in rows if row.count(" | ") == 2 and not row.startswith(("stranger", "tenant"))]
    defended = [row for row in attacks if "`tests/" in row]
    roles = PAGE.read_text(encoding="utf-8").partition("## Whose text is it")[0]
    assert len(defended) >= 20
    assert [row for row in attacks if row not in defended and row not in roles] == []
