"""Numbers for people, in one form everywhere. What was not observed is written as "not measured", not as zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

DASH = "–"
UNKNOWN = "not measured"


def format_percent(value: float | None, digits: int = 0) -> str:
    """Format a share as a percentage.

    >>> format_percent(0.615), format_percent(None)
    ('62 %', 'not measured')
    """
    return UNKNOWN if value is None else f"{value * 100:.{digits}f} %"


def format_share(share: float) -> str:
    """Format a share as a percentage; small ones keep a digit.

    >>> format_share(0.2361), format_share(0.0123), format_share(0.0)
    ('24 %', '1.2 %', '0 %')
    """
    return format_percent(share, 0 if abs(share) >= 0.0995 or share == 0 else 1)


def format_ratio(value: float | None) -> str:
    """Format a ratio, such as a speed-up."""
    return UNKNOWN if value is None else f"{value:.2f}×" if value < 10 else f"{value:.0f}×"


def format_number(value: float | int | None, digits: int = 3) -> str:
    """Format a number; whole numbers get thousands separators."""
    if value is None:
        return DASH
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}f}"


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


# -- sizes and money -------------------------------------------------------------------------------------------------


def format_count(tokens: float) -> str:
    """Format a number of tokens to three digits.

    >>> format_count(950), format_count(12_345), format_count(3_836_509), format_count(2_100_000_000)
    ('950', '12.3 k', '3.84 M', '2.1 G')
    """
    for size, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if abs(tokens) >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:g}"


def format_tokens(value: float) -> str:
    """Format a number of tokens for an axis, in powers of two where it is one.

    >>> format_tokens(1024), format_tokens(16384), format_tokens(300), format_tokens(1500)
    ('1k', '16k', '300', '1.5k')
    """
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1024:.0f}k" if value % 1024 == 0 else f"{value / 1000:.3g}k"


def format_gib(gib: float) -> str:
    """Format a size in GiB; below 0.1 GiB in MiB.

    >>> format_gib(0.004), format_gib(1.234), format_gib(140.2)
    ('4.1 MiB', '1.2 GiB', '140 GiB')
    """
    if gib < 0.1:
        return f"{gib * 1024:.1f} MiB"
    return f"{gib:.1f} GiB" if gib < 100 else f"{gib:,.0f} GiB"


def format_price(price: float, whole: float) -> str:
    """Format money with as many digits as a thousandth of ``whole`` needs, so that a column has one form.

    >>> format_price(1234.5, 20_000), format_price(0.00432, 0.08), format_price(0.0, 0.08)
    ('1,234', '0.00432', '0.00000')
    """
    digits = max(0, min(8, 3 - math.floor(math.log10(whole)))) if whole > 0 else 2
    return f"{price:,.{0 if whole >= 1000 else digits}f}"


# -- times -----------------------------------------------------------------------------------------------------------


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


def format_tick_ms(value: float) -> str:
    """Format the tick of an axis of times.

    >>> format_tick_ms(500.0), format_tick_ms(20_000.0)
    ('500 ms', '20 s')
    """
    return f"{value:g} ms" if value < 1000 else f"{value / 1000:g} s"


def format_seconds(seconds: float) -> str:
    """Format a time in seconds; from ten minutes on in hours.

    >>> format_seconds(0.31), format_seconds(72.2), format_seconds(5400.0)
    ('0.31 s', '72 s', '1.5 h')
    """
    if abs(seconds) >= 600:
        return f"{seconds / 3600:.3g} h"
    return f"{seconds:.0f} s" if abs(seconds) >= 10 else f"{seconds:.2g} s"


def format_hours(hours: float) -> str:
    """Format a time in hours; below one hour in minutes.

    >>> format_hours(0.02), format_hours(3.21)
    ('1.2 min', '3.2 h')
    """
    return f"{hours:,.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"


def format_moment(timestamp_utc: str) -> str:
    """Format an ISO timestamp in UTC to the minute; nothing where there is none.

    >>> format_moment("2026-11-17T06:33:27Z"), format_moment("")
    ('2026-11-17 06:33 UTC', '')
    """
    return f"{timestamp_utc.replace('T', ' ')[:16]} UTC" if timestamp_utc else ""
