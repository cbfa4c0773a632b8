"""Texts of the demo, written for it, and a chronicle that goes on as long as it is asked to."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from importlib import resources
from typing import Any

_DATA: dict[str, Any] = tomllib.loads((resources.files(__package__) / "texts.toml").read_text(encoding="utf-8"))
LIGHTHOUSE: str = _DATA["lighthouse"]
LEASE: str = _DATA["lease"]
ORCHESTRA: str = _DATA["orchestra"]
GLASSWORKS: str = _DATA["glassworks"]
BEES: str = _DATA["bees"]
EXPEDITION: str = _DATA["expedition"]
_WHO, _DID, _WHAT, _WHERE, _SKY, _AFTER = (_DATA[name] for name in ("who", "did", "what", "where", "sky", "after"))


def write_chronicle(seed: int, words: int) -> str:
    """About ``words`` words of a daybook; the same for a seed, always, and for another seed another.

    >>> write_chronicle(1, 40) == write_chronicle(1, 40) != write_chronicle(2, 40)
    True
    """
    lines, count = ["From the daybook", ""], 0
    for entry in _write_entries(seed):
        lines.append(entry)
        count += len(entry.split())
        if count >= words:
            break
    return "\n".join(lines) + "\n"


def lengthen(text: str, seed: int, words: int) -> str:
    """``text`` and, where it has fewer than ``words`` words, a chronicle behind it."""
    lacking = words - len(text.split())
    return f"{text}\n{write_chronicle(seed, lacking)}" if lacking > 0 else text


def _write_entries(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    day = rng.randint(1, 40)
    while True:
        day += rng.randint(1, 3)
        what = rng.sample(_WHAT, 2)
        who = rng.sample(_WHO, 2)
        yield (
            f"Day {day}. {rng.choice(_SKY)} {who[0]} {rng.choice(_DID)} {what[0]} {rng.choice(_WHERE)}. "
            f"{rng.choice(_AFTER).format(n=rng.randint(2, 60))} "
            f"{who[1]} {rng.choice(_DID)} {what[1]} {rng.choice(_WHERE)}."
        )
