"""What a body may hold is counted while it comes: against a plain count of the parsed JSON, however it is cut."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.wire.errors import ApiError
from semblend.wire.json_limits import LONGEST_NUMBER, MAX_DEPTH, JsonLimits, JsonMeter

TEXTS = st.text(max_size=6) | st.sampled_from(
    ['"', "\\", '\\"', '[{,"', "\\\\", "a\\", "é\ud83d", "NaN", "]]", "\u2028"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def count(value: Any) -> tuple[int, int, int, int]:
    """Commas, lists and objects, the depth and the keys of a value, by walking it."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    parts = [count(one) for one in inner]
    container = isinstance(value, (dict, list))
    commas = sum(part[0] for part in parts) + max(len(parts) - 1, 0)
    depth = container + max((part[2] for part in parts), default=0)
    keys = len(value) if isinstance(value, dict) else 0
    return commas, container + sum(part[1] for part in parts), depth, keys + sum(part[3] for part in parts)


def feed(text: bytes, cuts: list[int], limits: JsonLimits) -> None:
    meter = JsonMeter(limits)
    at = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, end in pairwise(at):
        meter.feed(text[start:end])


def is_refused(text: bytes, cuts: list[int], limits: JsonLimits) -> bool:
    try:
        feed(text, cuts, limits)
    except ApiError:
        return True
    return False


@given(JSON, st.lists(st.integers(0, 10**6), max_size=8), st.booleans(), st.sampled_from([None, 2]))
def test_the_meter_counts_what_a_parser_would_make_however_the_bytes_are_cut(value, cuts, ascii_only, indent):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    commas, containers, depth, keys = count(value)
    exact = JsonLimits(values=commas + 1, containers=containers, depth=depth, keys=keys)
    feed(text, cuts, exact)
    for name, counted in (("values", commas), ("containers", containers), ("depth", depth), ("keys", keys)):
        if counted:
            assert is_refused(text, cuts, replace(exact, **{name: getattr(exact, name) - 1})), name


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_bytes_that_are_no_json_never_break_the_meter(text, cuts):
    is_refused(text, cuts, JsonLimits())


@pytest.mark.parametrize("cut", [1, 30, LONGEST_NUMBER, 64 * 1024])
def test_a_long_number_is_refused_wherever_the_bytes_are_cut(cut):
    for text, refused in (
        (b'{"a": ' + b"9" * (LONGEST_NUMBER + 1) + b"}", True),
        (b'{"a": -0.' + b"3" * LONGEST_NUMBER + b"}", True),
        (b'{"a": ' + b"9" * LONGEST_NUMBER + b"}", False),
        (b'{"a": "' + b"9" * 500 + b'"}', False),  # text may be long
        (b"[" + b"123456789," * 50 + b"1]", False),
    ):
        assert is_refused(text, list(range(0, len(text), cut)), JsonLimits()) is refused, text[:20]


@pytest.mark.parametrize("constant", [b"NaN", b"Infinity", b"-Infinity"])
def test_constants_that_json_does_not_have_are_refused_outside_of_strings(constant):
    assert is_refused(b'{"a": ' + constant + b"}", [], JsonLimits())
    assert not is_refused(b'{"a": "' + constant + b'"}', [], JsonLimits())


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_ends_at_its_limit(opening):
    assert not is_refused(opening * MAX_DEPTH, [], JsonLimits())
    assert is_refused(opening * (MAX_DEPTH + 1), [], JsonLimits())
