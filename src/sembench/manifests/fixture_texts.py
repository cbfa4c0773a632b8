"""The documents of the fixture, written for it: eleven subjects, each with facts that a question can ask for.

The texts themselves are data: ``fixture_texts.toml``.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class FixtureFact:
    """A question that the document answers, and the answer in the words of the text."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class FixtureText:
    """One document. ``held_out`` texts never become donors: negative controls are made of them."""

    name: str
    domain: str
    paragraphs: tuple[str, ...]
    facts: tuple[FixtureFact, ...]
    held_out: bool = False


def _read_texts() -> tuple[FixtureText, ...]:
    """The documents of ``fixture_texts.toml``, which lies beside this module."""
    data = tomllib.loads((resources.files(__package__) / "fixture_texts.toml").read_text(encoding="utf-8"))
    return tuple(
        FixtureText(
            text["name"],
            text["domain"],
            tuple(text["paragraphs"]),
            tuple(FixtureFact(**fact) for fact in text["facts"]),
            text.get("held_out", False),
        )
        for text in data["text"]
    )


TEXTS = _read_texts()
