"""What a caller asks of reuse inside an engine's own request, where a mistake cannot be refused.

What we cannot read never loosens anything: such a quality is exact, and an opt-out that is neither true nor false is
an opt-out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from semblend.errors import InputError
from semblend.quality.scale import parse_quality


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """``{"opt_out": true, "quality": 0.05}`` of a request; None where it says nothing of its quality."""

    opt_out: bool = False
    quality: str | None = None


def read_request_options(given: object) -> RequestOptions:
    """Read a caller's options. Unknown fields are ignored; nothing in there may fail an answer.

    >>> read_request_options({"quality": 0.05, "colour": "red"})
    RequestOptions(opt_out=False, quality='0.05')
    >>> read_request_options({"quality": "exakt"}).quality, read_request_options({"opt_out": "yes"}).opt_out
    ('exact', True)
    """
    if given is None:
        return RequestOptions()
    if not isinstance(given, Mapping):
        return RequestOptions(quality="exact")
    opt_out, quality = given.get("opt_out"), given.get("quality")
    return RequestOptions(opt_out is not None and opt_out is not False, _read_quality(quality))


def _read_quality(asked: object) -> str | None:
    if asked is None:
        return None
    try:
        return parse_quality(asked)
    except InputError:
        return "exact"
