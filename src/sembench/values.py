"""Reads single values out of foreign JSON. A value of the wrong type is None, never an error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def read_text(value: Any) -> str | None:
    """Return a text that is not empty, else None."""
    return value if isinstance(value, str) and value else None


def read_float(value: Any) -> float | None:
    """Return a finite number, else None; true and false are no numbers.

    >>> read_float(3), read_float(True), read_float("3"), read_float(10**400), read_float(float("nan"))
    (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON may hold whole numbers of any length
        return None
    return number if math.isfinite(number) else None


def read_count(value: Any) -> int | None:
    """Return a whole number of 0 or more, else None.

    >>> read_count(3.0), read_count(-1), read_count(0.5), read_count(float("nan"))
    (3, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        return None
    return int(value) if isinstance(value, int) or value.is_integer() else None


def find_bad_counts(part: Mapping[str, Any], name: str) -> list[str]:
    """Return one line for each field of ``part`` that ends in ``_tokens`` and holds no count; null is allowed.

    >>> find_bad_counts({"prompt_tokens": float("nan"), "cached_tokens": 3, "model": "m"}, "usage")
    ['usage.prompt_tokens is NaN, not a count']
    """
    return [
        f"{name}.{field} is {_format_foreign(value)}, not a count"
        for field, value in part.items()
        if field.endswith("_tokens") and value is not None and read_count(value) is None
    ]


def _format_foreign(value: Any) -> str:
    try:
        return json.dumps(value)[:40]
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__
