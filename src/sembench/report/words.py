"""Formats numbers for people. What was not observed is written as "not measured", not as zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from semblend.web.tables import DASH

__all__ = [
    "DASH",
    "UNKNOWN",
    "format_interval",
    "format_milliseconds",
    "format_moment",
    "format_number",
    "format_percent",
    "format_plural",
    "format_ratio",
    "format_title",
    "format_tokens",
]

UNKNOWN = "not measured"


def format_percent(value: float | None, digits: int = 0) -> str:
    """Format a share as a percentage.

    >>> format_percent(0.615), format_percent(None)
    ('62 %', 'not measured')
    """
    return UNKNOWN if value is None else f"{value * 100:.{digits}f} %"


def format_ratio(value: float | None) -> str:
    """Format a ratio, such as a speed-up."""
    return UNKNOWN if value is None else f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def format_milliseconds(value: float | None) -> str:
    """Format a time in milliseconds; from a second on, in seconds.

    >>> format_milliseconds(3.25), format_milliseconds(1234.0)
    ('3.2 ms', '1.23 s')
    """
    if value is None:
        return UNKNOWN
    if value >= 1000:
        return f"{value / 1000:.2f} s" if value < 10_000 else f"{value / 1000:.1f} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms"


def format_moment(timestamp_utc: str) -> str:
    """Format an ISO timestamp in UTC to the minute; nothing where there is none.

    >>> format_moment("2026-11-17T06:33:27Z"), format_moment("")
    ('2026-11-17 06:33 UTC', '')
    """
    return f"{timestamp_utc.replace('T', ' ')[:16]} UTC" if timestamp_utc else ""


def format_number(value: float | int | None, digits: int = 3) -> str:
    """Format a number; whole numbers get thousands separators."""
    if value is None:
        return DASH
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}f}"


def format_tokens(value: float) -> str:
    """Format a number of tokens for an axis.

    >>> format_tokens(1024), format_tokens(16384), format_tokens(300), format_tokens(1500)
    ('1k', '16k', '300', '1.5k')
    """
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1024:.0f}k" if value % 1024 == 0 else f"{value / 1000:.3g}k"


def format_interval(ci: Sequence[float] | None, show: Callable[[float], str] | None = None) -> str:
    """Format an interval with the formatter of its value."""
    if not ci:
        return "no interval"
    write = show or format_number
    return f"{write(ci[0])} to {write(ci[1])}"


def format_plural(count: int, word: str) -> str:
    """Format a count with its noun.

    >>> format_plural(1, "request"), format_plural(3, "reply")
    ('1 request', '3 replies')
    """
    if count == 1:
        return f"1 {word}"
    return f"{count:,} {word[:-1]}ies" if word.endswith("y") else f"{count:,} {word}s"


def format_title(name: str) -> str:
    """Return a transform's name without underscores."""
    return name.replace("_", " ")
