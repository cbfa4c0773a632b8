"""How much JSON may hold, measured while its bytes arrive and before any object is made of them.

A parser holds Python's interpreter lock until it is done: 16 MB of ``[1],[1],…`` took 9 s, and every other request
waited. Text is cheap to parse (5 ns a byte at worst); values are not. So they are counted first, piece by piece.
"""

from __future__ import annotations

from dataclasses import dataclass

from semblend.wire.errors import ApiError

MAX_DEPTH = 64
MAX_CONTAINERS = 16_384
"""Lists and objects in one body: 4,096 messages of one part each have 12,289."""
MAX_KEYS = 4 * MAX_CONTAINERS
"""A parser takes some 350 ns for each."""
LONGEST_NUMBER = 64
_OPENING, _CLOSING = b"[{", b"]}"
_NOT_BRACKETS = bytes(set(range(256)) - set(_OPENING + _CLOSING))
_NUMBERS = bytes(0x30 if byte in b"0123456789+-.eE" else byte for byte in range(256))
_HINT = "send a JSON object in UTF-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLimits:
    """Most values (numbers, strings, lists, objects) of one body, lists and objects, names of fields, and nesting."""

    values: int = 1 << 17
    containers: int = MAX_CONTAINERS
    keys: int = MAX_KEYS
    depth: int = MAX_DEPTH


class JsonMeter:
    """Counts what lies outside of strings. `ApiError` 400 as soon as a limit is passed; mistakes are for the parser.

    >>> meter = JsonMeter(JsonLimits(depth=2))
    >>> meter.feed(b'{"text": "[[[[ is fine in a string", "a": ')
    >>> meter.feed(b'[[1]]}')
    Traceback (most recent call last):
    semblend.wire.errors.ApiError: the body is not JSON that can be served: nested more than 2 deep (hint: send less nesting)
    """  # noqa: E501

    def __init__(self, limits: JsonLimits) -> None:
        self._limits = limits
        self._values = 1
        self._containers = 0
        self._keys = 0
        self._depth = 0
        self._in_string = False
        self._backslash = b""
        self._number = b""

    def feed(self, part: bytes | bytearray) -> None:
        """Take the next bytes; in pieces of some 64 kB, so that no other request waits long."""
        outside = self._strip_strings(part)
        if not outside:
            return
        if b"N" in outside or b"I" in outside:
            raise ApiError(400, "the body is not JSON: NaN and Infinity are not JSON numbers", hint=_HINT)
        brackets = outside.translate(None, _NOT_BRACKETS)
        self._values += outside.count(b",")
        self._keys += outside.count(b":")
        self._containers += sum(brackets.count(one) for one in (b"[", b"{"))
        if self._values > self._limits.values:
            self._refuse(f"more than {self._limits.values} values", "send fewer values")
        if self._keys > self._limits.keys:
            self._refuse(f"more than {self._limits.keys} names of fields", "send fewer fields")
        for bracket in brackets:
            self._depth += 1 if bracket in _OPENING else -1
            if self._depth > self._limits.depth:
                self._refuse(f"nested more than {self._limits.depth} deep", "send less nesting")
        if self._containers > self._limits.containers:
            self._refuse(f"more than {self._limits.containers} lists and objects", "send fewer of them")
        digits = self._number + outside.translate(_NUMBERS)
        if b"0" * (LONGEST_NUMBER + 1) in digits:
            self._refuse(f"a number has more than {LONGEST_NUMBER} characters", "send shorter numbers")
        self._number = digits[-LONGEST_NUMBER:]

    def _strip_strings(self, part: bytes | bytearray) -> bytes:
        """The bytes outside of strings. Escapes are taken away first: then every quote begins or ends a string."""
        plain = (self._backslash + part).replace(rb"\\", b"")
        self._backslash = b"\\" if plain.endswith(b"\\") else b""
        if self._backslash:
            plain = plain[:-1]
        pieces = plain.replace(rb"\"", b"").split(b'"')
        outside = b'"'.join(pieces[self._in_string :: 2])
        self._in_string ^= len(pieces) % 2 == 0
        return outside

    def _refuse(self, problem: str, hint: str) -> None:
        raise ApiError(400, f"the body is not JSON that can be served: {problem}", hint=hint, code="body_too_complex")
