"""The lines of a log: plain or gzip, a file or standard input, one JSON value a line or one JSON list in all."""

from __future__ import annotations

import gzip
import os
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from semblend.errors import InputError

STDIN = "-"
MAX_LINE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_MARKS = re.compile(rb'["\\{}\[\],]')


@contextmanager
def open_log(source: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """The file as bytes, unpacked where its name ends in .gz or its first bytes are those of gzip."""
    if source == STDIN:
        yield sys.stdin.buffer
        return
    path = Path(source)
    try:
        with path.open("rb") as plain:
            if path.suffix != ".gz" and plain.peek(2)[:2] != b"\x1f\x8b":
                yield plain
                return
            with gzip.GzipFile(fileobj=plain) as unpacked:
                yield unpacked  # type: ignore[misc]  # it reads like any binary file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(
            f"{source} is a damaged gzip file: {error}", hint="copy it again, or unpack it first"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror}", hint="check the path and the permissions") from None


def read_lines(stream: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines that are not blank; None for one beyond the limit. The values of a JSON list count as lines."""
    number = 0
    while raw := stream.readline(max_bytes + 1):
        number += 1
        if number == 1 and raw.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[" and _begins_list(raw):
            yield from _read_values(raw, stream, max_bytes)
            return
        if len(raw) > max_bytes:
            while raw and not raw.endswith(b"\n"):
                raw = stream.readline(max_bytes)
            yield number, None
        elif raw.strip():
            yield number, raw


def _begins_list(raw: bytes) -> bool:
    """Whether a first line opens a list of objects: a server's log may begin with a bracket, too."""
    return raw.lstrip(b"\xef\xbb\xbf \t\r\n")[1:].lstrip()[:1] in (b"", b"{")


def _read_values(first: bytes, stream: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """The values of one JSON list, cut at the commas between them; what is wrong inside one is for its reader."""
    number, depth, in_string, escaped = 1, 0, False, False
    value, too_long = bytearray(), False
    chunk = first
    while chunk:
        begin, skip = 0, 0 if escaped else -1
        for match in _MARKS.finditer(chunk):
            place, mark = match.start(), match.group()
            if place == skip:
                continue
            if in_string:
                skip = place + 1 if mark == b"\\" else skip
                in_string = mark != b'"'
                continue
            in_string = mark == b'"'
            depth += (mark in b"{[") - (mark in b"}]")
            if depth == 1 and mark == b"[":
                begin = place + 1
            elif depth == 0 or (depth == 1 and mark == b","):
                value += chunk[begin:place]
                if too_long or value.strip():
                    yield number, None if too_long else bytes(value)
                number, begin, too_long = number + 1, place + 1, False
                value.clear()
            if depth == 0:
                return
        escaped = in_string and skip == len(chunk)
        value += chunk[begin:]
        if len(value) > max_bytes:
            value.clear()
            too_long = True
        chunk = stream.read(_CHUNK_BYTES)
    if too_long or value.strip():
        yield number, None if too_long else bytes(value)
