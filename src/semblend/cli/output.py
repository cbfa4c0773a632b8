"""What commands share: data goes to standard output, talk to standard error, files appear whole or not at all."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from semblend.errors import InputError

_HALF_CHARACTERS = "backslashreplace"
CHECK_FOLDER = "check the folder and its permissions"


def say(text: str) -> None:
    """Talk: anything that is not the answer itself."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=True))


def table(rows: Sequence[Sequence[object]], *, head: Sequence[str], right: Sequence[int] = ()) -> str:
    """Columns of text under a head; those in ``right`` are flush right.

    >>> print(table([("a", 5), ("long", 12)], head=("name", "n"), right=(1,)))
    name   n
    a      5
    long  12
    """
    cells = [tuple(head), *(tuple(str(cell) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = []
    for row in cells:
        padded = [c.rjust(w) if at in right else c.ljust(w) for at, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def check_target(path: str) -> None:
    """Complain about a place that cannot be written before the long work, not after it."""
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise InputError(f"cannot write {path}: No such file or directory", hint="make the folder first")
    if os.path.isdir(path):
        raise InputError(f"cannot write {path}: Is a directory", hint="name a file in it")
    device = os.path.exists(path) and not os.path.isfile(path)  # written in place; a file is replaced in its folder
    if not os.access(path if device else folder, os.W_OK):
        raise InputError(f"cannot write {path}: Permission denied", hint=CHECK_FOLDER)


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` to ``path`` as JSON; the file appears whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=True) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path``; the file appears whole or not at all."""
    with open_atomic(path) as stream:
        stream.write(text)


@contextmanager
def open_atomic(path: str | Path) -> Iterator[TextIO]:
    """Open a text file that takes the place of ``path`` when the block ends, and only if it ends without an error.

    A name that ends in ``.gz`` is packed without a time stamp, so that equal content gives equal bytes. Half a
    character (a lone surrogate) is written as ``\\udXXX``, which JSON reads back as it was.
    """
    temporary = ""
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe: renaming would replace it
            with open(path, "w", encoding="utf-8", errors=_HALF_CHARACTERS) as stream:
                yield stream
            return
        target = Path(os.path.realpath(path))
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        with (
            os.fdopen(handle, "wb") as raw,
            _pack(raw, target) as packed,
            io.TextIOWrapper(packed, encoding="utf-8", errors=_HALF_CHARACTERS, newline="\n") as stream,
        ):
            yield stream
        Path(temporary).chmod(0o644)  # mkstemp makes it private; a report is meant to be read
        os.replace(temporary, target)
        temporary = ""
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}", hint=CHECK_FOLDER) from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def _pack(raw: BinaryIO, target: Path) -> BinaryIO:
    if not target.name.endswith(".gz"):
        return raw
    return cast(BinaryIO, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0))


class Progress:
    """A line on standard error that moves while work goes on. Where standard error is no terminal, nothing is shown.

    Used as a context, it removes the line at the end.
    """

    INTERVAL_S = 0.2

    def __init__(self, quiet: bool = False) -> None:
        self._live = not quiet and sys.stderr.isatty()
        self._next = time.monotonic() + self.INTERVAL_S
        self._drawn = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def due(self) -> bool:
        """Whether it is time for `show`; cheap enough for every item."""
        return self._live and time.monotonic() >= self._next

    def show(self, text: str) -> None:
        """Show a text in place of the last one, cut at the width of the terminal: a second line would stay."""
        if not self._live:
            return
        self._next = time.monotonic() + self.INTERVAL_S
        sys.stderr.write(f"\r\x1b[2K{text[: _read_columns() - 1]}")
        sys.stderr.flush()
        self._drawn = True

    def clear(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._drawn = False


def _read_columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:  # a terminal that does not tell
        return 80
