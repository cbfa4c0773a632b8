"""How far an answer may be from a cold one: a mode, or a number of nats.

The number is the largest expected divergence: the mean over the tokens of the cold answer of KL(cold || ours), the
answer given (teacher-forced). The modes are points of the same scale:

    exact      0: nothing is taken from donors
    balanced   0.02
    fast       unbounded: nothing is measured

A quality has one spelling, a text, so that settings, requests, messages between processes and receipts carry the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from semblend.errors import InputError

QUALITY_MODES = ("exact", "fast", "balanced")
MODE_NATS: Mapping[str, float] = MappingProxyType({"exact": 0.0, "fast": math.inf, "balanced": 0.02})
"""The modes as numbers."""
GATED_MODE = "balanced"
"""The mode whose passes a number takes: donor KV, then repairs until the answer is expected to be close enough."""
QUALITY_HINT = "exact, fast, balanced, or the largest expected divergence from cold in nats, such as 0.05"
_NUMBER = re.compile(r"[0-9]{0,20}(\.[0-9]{0,20})?([eE][-+]?[0-9]{1,3})?", re.ASCII)


def parse_quality(value: object) -> str:
    """The one spelling of a mode's name, a number or a number's text; `InputError` for anything else.

    >>> [parse_quality(one) for one in ("fast", 0.05, "5e-2", 0, 0.02)]
    ['fast', '0.05', '0.05', 'exact', 'balanced']
    """
    if isinstance(value, str) and value in QUALITY_MODES:
        return value
    nats = _read_number(value)
    if nats is None or not math.isfinite(nats) or nats < 0:
        raise InputError(f"quality={show_value(value)} is neither a mode nor a number of nats", hint=QUALITY_HINT)
    for mode, point in MODE_NATS.items():
        if nats == point:
            return mode
    return f"{nats:.6g}"


def read_nats(quality: str) -> float:
    """The largest expected divergence of a quality as `parse_quality` spells it, in nats a token.

    >>> [read_nats(one) for one in ("exact", "0.05", "balanced", "fast")]
    [0.0, 0.05, 0.02, inf]
    """
    known = MODE_NATS.get(quality)
    return float(quality) if known is None else known


def find_path(quality: str) -> str:
    """The mode whose passes a quality takes: its own, and a number that of balanced.

    >>> [find_path(one) for one in ("exact", "0.05", "fast")]
    ['exact', 'balanced', 'fast']
    """
    return quality if quality in MODE_NATS else GATED_MODE


def _read_number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:  # a whole number of thousands of digits
            return None
    if not isinstance(value, str):
        return None
    text = value.strip()
    if not _NUMBER.fullmatch(text) or not any(sign.isdigit() for sign in text.partition("e")[0]):
        return None
    try:
        return float(text)
    except ValueError:
        return None


def show_value(value: object) -> str:
    """A value, as a message may hold it: short, whatever was sent."""
    text = repr(value) if isinstance(value, (str, int, float)) and not _is_huge(value) else type(value).__name__
    return text if len(text) <= 40 else text[:37] + "..."


def _is_huge(value: object) -> bool:
    """A whole number that Python would refuse to print."""
    return isinstance(value, int) and value.bit_length() > 1024
