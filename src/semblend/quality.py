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
from dataclasses import dataclass
from functools import lru_cache
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


INHERITED = 2.0
"""KV may answer another question than the one it was judged with if so many times its risk would still do."""


def explain_no_room(risk: float | None, quality: str, *, any_question: bool = False) -> str | None:
    """Why KV of this expected divergence may not answer a question that the gate has not seen; None where it may.

    ``any_question``: it was neither repaired nor judged by a question, so the next one is as good as the first.

    >>> explain_no_room(0.005, "balanced"), explain_no_room(None, "fast")
    (None, None)
    >>> explain_no_room(0.015, "balanced")
    'it was judged with another question: 2 times 0.015 nats are more than 0.02'
    >>> explain_no_room(0.015, "balanced", any_question=True)
    """
    nats = read_nats(quality)
    if nats == math.inf:
        return None
    if risk is None:
        return "it was not judged"
    times = 1.0 if any_question else INHERITED
    if times * risk <= nats:
        return None
    return f"it was judged with another question: {times:g} times {risk:.3g} nats are more than {nats:g}"


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


# -- Which quality a request has: its own, its tenant's, or the server's.


@lru_cache(maxsize=64)
def parse_tenant_qualities(text: str) -> Mapping[str, str]:
    """Qualities by tenant from ``TENANT=QUALITY`` pairs with spaces between them.

    >>> dict(parse_tenant_qualities("acme=0.05 bolt=exact"))
    {'acme': '0.05', 'bolt': 'exact'}
    """
    found: dict[str, str] = {}
    for pair in text.split():
        tenant, sign, quality = pair.rpartition("=")
        if not sign or not tenant:
            raise InputError(f"{show_value(pair)} is no TENANT=QUALITY pair", hint="acme=0.05 bolt=exact")
        if tenant in found:
            raise InputError(f"tenant {show_value(tenant)} has two qualities", hint="give each tenant one")
        found[tenant] = parse_quality(quality)
    return MappingProxyType(found)


def choose_quality(own: str | None, tenant: str | None, server: str) -> str:
    """The quality of a request: its own, else its tenant's, else the server's.

    >>> choose_quality(None, "0.05", "balanced"), choose_quality("fast", "0.05", "balanced")
    ('0.05', 'fast')
    """
    return own or tenant or server


# -- What a caller asks of reuse inside an engine's own request, where a mistake cannot be refused.
#
# What we cannot read never loosens anything: such a quality is exact, and an opt-out (or a wish to forget) that is
# neither true nor false is one.


MAX_ID_CHARS = 256
EDIT_HEADER = "x-semblend-edit"
"""The base of an edit, for callers who can add a header and not a field."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """``{"opt_out": true, "quality": 0.05}`` of a request; None where it says nothing of its quality.

    ``forget``: nothing may be reused that was computed with other text in view, so its quality is exact. ``base``: the
    request that this one was edited from, where its caller says so (``{"edit": {"base": "..."}}``).
    """

    opt_out: bool = False
    quality: str | None = None
    forget: bool = False
    base: str = ""


def read_request_options(given: object) -> RequestOptions:
    """Read a caller's options. Unknown fields are ignored; nothing in there may fail an answer.

    >>> read_request_options({"quality": 0.05, "colour": "red"})
    RequestOptions(opt_out=False, quality='0.05', forget=False, base='')
    >>> read_request_options({"quality": "exakt"}).quality, read_request_options({"opt_out": "yes"}).opt_out
    ('exact', True)
    >>> read_request_options({"quality": "fast", "forget": True})
    RequestOptions(opt_out=False, quality='exact', forget=True, base='')
    """
    if given is None:
        return RequestOptions()
    if not isinstance(given, Mapping):
        return RequestOptions(quality="exact")
    opt_out, forget = (_is_wished(given.get(name)) for name in ("opt_out", "forget"))
    quality = "exact" if forget else _read_quality(given.get("quality"))
    return RequestOptions(opt_out, quality, forget, read_base(given.get("edit")))


def read_base(edit: object) -> str:
    """The request that a declared edit begins from; empty where it names none. Which ranges it names does not matter:
    tokens are compared, whatever is declared.

    >>> read_base({"base": "chatcmpl-7f", "ranges": [{"start": 2, "end": 4, "action": "delete"}]}), read_base("me")
    ('chatcmpl-7f', '')
    """
    base = edit.get("base") if isinstance(edit, Mapping) else None
    return base if isinstance(base, str) and len(base) <= MAX_ID_CHARS else ""


def _is_wished(given: object) -> bool:
    return given is not None and given is not False


def _read_quality(asked: object) -> str | None:
    if asked is None:
        return None
    try:
        return parse_quality(asked)
    except InputError:
        return "exact"
