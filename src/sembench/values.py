"""Reads single values out of foreign JSON. A value of the wrong type is None, never an error."""

from __future__ import annotations

from typing import Any


def read_text(value: Any) -> str | None:
    """Return a text that is not empty, else None."""
    return value if isinstance(value, str) and value else None


def read_float(value: Any) -> float | None:
    """Return a number, else None; true and false are no numbers.

    >>> read_float(3), read_float(True), read_float("3"), read_float(10**400)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # JSON may hold whole numbers of any length
        return None


def read_count(value: Any) -> int | None:
    """Return a whole number of 0 or more, else None.

    >>> read_count(3.0), read_count(-1), read_count(0.5), read_count(float("nan"))
    (3, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        return None
    return int(value) if isinstance(value, int) or value.is_integer() else None
