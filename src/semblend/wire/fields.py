"""Reading a JSON object field by field, with an error that names the field, the value and the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from semblend.wire.errors import ApiError

_MISSING = object()


class Fields:
    """The fields of one object. ``null`` counts as absent, as it does for OpenAI.

    >>> Fields({"top_p": 2}).number("top_p", 1.0, 0.0, 1.0)
    Traceback (most recent call last):
    semblend.wire.errors.ApiError: top_p is 2, outside [0, 1] (hint: leave it out for 1.0)
    """

    def __init__(self, body: Any, where: str = "") -> None:
        if not isinstance(body, Mapping):
            what = where.rstrip(".") or "the body"
            raise ApiError(400, f"{what} is not a JSON object", hint='send an object such as {"model": "..."}')
        self._body = body
        self._where = where

    def raw(self, name: str) -> Any:
        return self._body.get(name)

    def has(self, name: str) -> bool:
        return self._body.get(name) is not None

    def text(self, name: str, default: str = "", *, longest: int | None = None) -> str:
        value = self._body.get(name)
        if value is None:
            return default
        text = self.check_text(name, value)
        if longest is not None and len(text) > longest:
            self.refuse(name, f"has {len(text)} characters, more than {longest}", "send a shorter one")
        return text

    def check_text(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            self.refuse(name, f"is {show(value)}, not a string", "send text")
        if not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError:
                self.refuse(name, "holds half a surrogate pair", "send valid UTF-8 text")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, f"is {show(value)}, not true or false", f"leave it out for {str(default).lower()}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self._body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(name, f"is {show(value)}, not a number", f"leave it out for {default}")
        if not low <= value <= high:
            self.refuse(name, f"is {show(value)}, outside [{low:g}, {high:g}]", f"leave it out for {default}")
        return float(value)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        value = self._body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(name, f"is {show(value)}, not a whole number", "send an integer, or leave it out")
        if not low <= value <= high:
            self.refuse(name, f"is {show(value)}, outside [{low}, {high}]", "send a value in that range")
        return int(value)

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A string, or a list of at most ``most`` non-empty ones."""
        value = self._body.get(name)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if len(values) > most:
            self.refuse(name, f"has {len(values)} entries, more than {most}", f"send at most {most}")
        texts = tuple(self.check_text(name, one) for one in values)
        if not all(texts):
            self.refuse(name, "holds an empty string", "leave empty strings out")
        return texts

    def token_ids(self, name: str, value: Any = _MISSING) -> tuple[int, ...]:
        value = self._body.get(name) if value is _MISSING else value
        if value is None:
            return ()
        if not isinstance(value, list):
            self.refuse(name, f"is {show(value)}, not a list of token ids", "send one flat list of integers")
        for at, one in enumerate(value):
            if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < 2**31:
                self.refuse(name, f"holds {show(one)} at index {at}, not a token id", "ids are integers, 0 or more")
        return tuple(value)

    def child(self, name: str) -> Fields | None:
        value = self._body.get(name)
        return None if value is None else Fields(value, self.path(f"{name}."))

    def path(self, name: str) -> str:
        """The field as seen from the whole body: ``messages[0].content``."""
        return f"{self._where}{name}"

    def refuse(self, name: str, what: str, hint: str) -> NoReturn:
        where = self.path(name)
        raise ApiError(400, f"{where} {what}", hint=hint, param=where)


def show(value: Any) -> str:
    """A value for an error line: short, on one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
