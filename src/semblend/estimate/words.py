"""Numbers and sentences of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def format_share(share: float) -> str:
    """Format a share; small ones keep a digit.

    >>> format_share(0.2361), format_share(0.0123), format_share(0.0)
    ('24 %', '1.2 %', '0 %')
    """
    percent = 100 * share
    return f"{percent:.0f} %" if abs(percent) >= 9.95 or percent == 0 else f"{percent:.1f} %"


def format_count(tokens: float) -> str:
    """Format a number of tokens.

    >>> format_count(950), format_count(12_345), format_count(3_836_509), format_count(2_100_000_000)
    ('950', '12.3 k', '3.84 M', '2.1 G')
    """
    for size, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if abs(tokens) >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:g}"


def format_number(number: int, noun: str) -> str:
    """
    >>> format_number(1, "prompt"), format_number(1234, "prompt")
    ('1 prompt', '1,234 prompts')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """Format a time; from ten minutes on in hours.

    >>> format_seconds(0.31), format_seconds(72.2), format_seconds(5400.0)
    ('0.31 s', '72 s', '1.5 h')
    """
    if abs(seconds) >= 600:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds:.0f} s" if abs(seconds) >= 10 else f"{seconds:.2g} s"


def format_price(price: float, whole: float) -> str:
    """Format money with as many digits as a thousandth of ``whole`` needs, so that a column has one form.

    >>> format_price(1234.5, 20_000), format_price(0.00432, 0.08), format_price(0.0, 0.08)
    ('1,234', '0.00432', '0.00000')
    """
    digits = max(0, min(8, 3 - math.floor(math.log10(whole)))) if whole > 0 else 2
    return f"{price:,.{0 if whole >= 1000 else digits}f}"


def write_headline(answer: Mapping[str, Any]) -> str:
    """Say what the cache does now, which two steps help most, and which ones hurt."""
    rows = answer["rows"]
    first, steps = rows[0], rows[1:]
    if answer["total"]["prompts"] < 2:
        return "One prompt has nothing to share with: replay a longer log."
    words = [f"As it is, an exact prefix cache holds {format_share(first['saved_share'])} of the prompt tokens."]
    best = sorted((row for row in steps if row["saved_share"] >= 0.005), key=lambda row: -row["saved_tokens"])[:2]
    if best:
        named = " and ".join(f"“{row['title']}” ({_add_sign(row['saved_share'])})" for row in best)
        words.append(f"What adds most: {named}.")
    else:
        words.append("No step adds as much as half a percent: leave things as they are.")
    worse = [row["title"] for row in steps if row["saved_share"] <= -0.005]
    if worse:
        words.append(f"Leave out what computes more than it saves: {', '.join(f'“{title}”' for title in worse)}.")
    return " ".join(words)


def _add_sign(share: float) -> str:
    return f"+{format_share(share)}" if share > 0 else format_share(share)
