"""Files as every command treats them: gzip by name, folders made, and a good file never half overwritten."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from semblend.errors import InputError

_CHUNK_BYTES = 1 << 20


def open_text(path: str | Path) -> TextIO:
    """A text file for reading, unpacked when its name ends in ``.gz``; a missing one is a person's mistake."""
    try:
        if str(path).endswith(".gz"):
            return cast(TextIO, gzip.open(path, "rt", encoding="utf-8"))
        return open(path, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}", hint="check the path") from None


def make_folder_of(path: str | Path) -> None:
    """Make the folder that a file is about to be written to: the README's first command may be somebody's first."""
    try:
        Path(path).expanduser().absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}", hint="check the folder and its permissions"
        ) from None


@contextmanager
def replacing(path: str | Path) -> Iterator[TextIO]:
    """A text file that takes the place of ``path`` only when the block ends well.

    Packed when the name ends in ``.gz``, without a time stamp, so that equal content gives equal bytes.
    """
    make_folder_of(path)
    target = Path(os.path.realpath(Path(path).expanduser()))
    handle, temporary = -1, ""
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        with (
            os.fdopen(handle, "wb") as raw,
            _packed(raw, target) as plain,
            io.TextIOWrapper(plain, encoding="utf-8", newline="\n") as stream,
        ):
            yield stream
        Path(temporary).chmod(0o644)  # mkstemp makes it private; a result is meant to be read
        os.replace(temporary, target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise InputError(
            f"cannot write {path}: {error.strerror or error}", hint="check the folder and its permissions"
        ) from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _packed(raw: BinaryIO, target: Path) -> BinaryIO:
    if not target.name.endswith(".gz"):
        return raw
    return cast(BinaryIO, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0))


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes as they lie on disk, in hex."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="check the path") from None
    return digest.hexdigest()
