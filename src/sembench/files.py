"""Reads and writes files for all commands: gzip by name, folders made, a good file never half overwritten.

JSON is read here too: our own files into dataclasses, where a wrong field is an error that names it; and single values
of foreign ones, where a value of the wrong type is None.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, TextIO, cast

from semblend.cli.output import CHECK_FOLDER, check_target, open_atomic
from semblend.errors import InputError

_CHUNK_BYTES = 1 << 20
_MOST_DIGITS = 300


def open_text(path: str | Path) -> TextIO:
    """Open a text file for reading; it is unpacked when its name ends in ``.gz``."""
    try:
        if str(path).endswith(".gz"):
            return cast(TextIO, gzip.open(path, "rt", encoding="utf-8"))
        return open(path, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}", hint="check the path") from None


def make_folder_of(path: str | Path) -> None:
    """Make the folder of a file that is about to be written."""
    try:
        Path(path).expanduser().absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}", hint=CHECK_FOLDER) from None
    check_target(os.path.expanduser(path))


@contextmanager
def open_output(path: str | Path) -> Iterator[TextIO]:
    """Make the folder of ``path`` and open the file; it appears whole when the block ends, or not at all."""
    make_folder_of(path)
    with open_atomic(Path(path).expanduser()) as stream:
        yield stream


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all; its folder is made where it is missing."""
    with open_output(path) as stream:
        stream.write(text)


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` to ``path`` as JSON, whole or not at all; its folder is made where it is missing."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_json_object(path: str | Path, *, hint: str) -> dict[str, Any]:
    """Read a file that holds one JSON object; ``hint`` tells the user what to do about any other file."""
    with open_text(path) as stream:
        try:
            value = json.load(stream, parse_int=_read_whole_number)
        except (ValueError, EOFError, OSError, RecursionError) as error:
            raise InputError(f"{path} is not a whole JSON file: {error}", hint=hint) from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no JSON object", hint=hint)
    return value


def _read_whole_number(digits: str) -> int:
    """A whole number that fits into a float: anything longer would fail wherever it is computed with."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


_JSON_TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a string"),
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "tuple": ((list, tuple), "a list"),
    "Mapping": ((dict,), "an object"),
}


def read_fields(
    kind: type, value: Any, where: str, hint: str, *, required: Sequence[str] | None = None, filled: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the fields of a dataclass that parsed JSON holds, each of its declared type; unknown keys are left out.

    ``required`` are by default the fields without a default. Those in ``filled`` must not be empty. The error about a
    field names ``where`` and the field.
    """
    if not isinstance(value, dict):
        raise InputError(f"{where} is {_name_kind(value)}, not an object", hint=hint)
    declared, needed = _list_declared(kind)
    required = needed if required is None else required
    wrong = next((f"{name} is missing" for name in required if name not in value), "")
    found = {}
    for name in () if wrong else [name for name in declared if name in value]:
        found[name], wrong = _read_typed(name, value[name], declared[name], name in required)
        if wrong:
            break
    wrong = wrong or next((f"{name} is empty" for name in filled if not found[name]), "")
    if wrong:
        raise InputError(f"{where}: field {wrong}", hint=hint)
    return found


@cache
def _list_declared(kind: type) -> tuple[dict[str, str], list[str]]:
    """Return the declared type of each field of a dataclass, and the fields without a default."""
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    return {f.name: str(f.type) for f in fields(kind)}, needed


def _read_typed(name: str, value: Any, declared: str, required: bool) -> tuple[Any, str]:
    """Return the value of a field as its declared type has it, and what is wrong with it."""
    given: Any = value  # the check below would narrow it to an object that cannot be iterated
    if value is None and declared.endswith("None"):
        return None, ""
    base, _, inner = declared.removesuffix(" | None").rstrip("]").partition("[")
    if value is None and base == "tuple" and not required:
        return (), ""
    if base not in _JSON_TYPES:  # Any, or a dataclass that the caller reads
        return value, ""
    types, word = _JSON_TYPES[base]
    if not isinstance(value, types) or (isinstance(value, bool) and base != "bool"):
        return None, f"{name} is {_name_kind(value)}, not {word}"
    if base != "tuple":
        return value, ""
    inner = inner.partition(",")[0]
    if inner in _JSON_TYPES and {type(item) for item in given} <= set(_JSON_TYPES[inner][0]):  # thousands of token ids
        return tuple(given), ""
    items = [_read_typed(f"{name}[{at}]", item, inner, True) for at, item in enumerate(given)]
    return tuple(item for item, _ in items), next((wrong for _, wrong in items if wrong), "")


_KINDS: Mapping[type, str] = {
    type(None): "null", str: "a string", bool: "true or false", int: "a number", float: "a number", list: "a list",
    dict: "an object",
}  # fmt: skip


def _name_kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def hash_file(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes on disk, in hex."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
    return digest.hexdigest()


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
