"""A team's documents: text files of a folder, or one JSON object a line; and which of them were retrieved together."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from semblend.errors import InputError
from semblend.text.log_lines import open_log, read_lines

TEXT_FIELDS = ("text", "content", "page_content", "passage", "body")
NAME_FIELDS = ("id", "_id", "doc_id", "document_id", "name")
RETRIEVED_FIELDS = ("passages", "documents", "docs", "contexts", "ctxs", "retrieved")
TEXT_FILES = (".txt", ".md", ".rst", ".html", ".csv", ".json", ".xml", ".log")
MAX_FILE_BYTES = 64 << 20
SAMPLE_CHARS = 20_000
LOOK_BYTES = 8192
"""So much of a file is looked at for zero bytes, as git does: text in UTF-8 has none."""


@dataclass(frozen=True, slots=True)
class CorpusDocument:
    """One document: its text, and the name by which a log may speak of it."""

    name: str
    text: str


def read_corpus(path: str | Path) -> list[CorpusDocument]:
    """The documents of a folder (text files, in the order of their paths) or of a JSONL file; equal texts once."""
    source = Path(path).expanduser()
    if source.is_dir():
        found = list(_read_folder(source))
    elif source.is_file():
        found = list(_read_rows(source))
    else:
        raise InputError(f"there is no corpus {source}", hint="name a folder of text files, or a JSONL file")
    documents = list({document.text: document for document in reversed(found) if document.text.strip()}.values())[::-1]
    if not documents:
        raise InputError(
            f"{source} holds no documents",
            hint="text files (" + ", ".join(TEXT_FILES) + "), or JSON lines with one of " + ", ".join(TEXT_FIELDS),
        )
    return documents


def read_retrievals(path: str | Path, documents: Sequence[CorpusDocument]) -> list[tuple[int, ...]]:
    """Which documents each line of a log retrieved, by their place in ``documents``; others are left out.

    A line holds a list under one of `RETRIEVED_FIELDS`: texts, names, or objects with a text or a name.
    """
    place = {document.name: number for number, document in enumerate(documents)}
    place |= {document.text.strip(): number for number, document in enumerate(documents)}
    found = []
    for number, row in _read_json(Path(path).expanduser()):
        listed = next((row[name] for name in RETRIEVED_FIELDS if isinstance(row.get(name), list)), None)
        if listed is None:
            raise InputError(
                f"{path}, line {number} names no documents", hint="a list under one of " + ", ".join(RETRIEVED_FIELDS)
            )
        known = [place[name] for one in listed if (name := _name_retrieved(one, place)) is not None]
        if known:
            found.append(tuple(dict.fromkeys(known)))
    return found


def split_text(text: str, count: Callable[[str], int], most: int) -> list[str]:
    """A text in pieces of at most ``most`` by ``count``, cut at the end of a paragraph, line or word.

    A long text is cut by its characters first, as many as its beginning has for ``most``, so that it is counted about
    once: halving one of 10 MB counted all of it eleven times, which took minutes.

    >>> split_text("one two three four", lambda text: len(text.split()), 2)
    ['one two ', 'three four']
    """
    sample = text[:SAMPLE_CHARS]
    stretch = max(2, int(0.9 * most * len(sample) / max(1, count(sample))))
    pieces, start = [], 0
    while len(text) - start > 2 * stretch:
        end = _find_cut(text, start, start + stretch)
        pieces += _halve(text[start:end], count, most)
        start = end
    return [*pieces, *_halve(text[start:], count, most)]


def _halve(text: str, count: Callable[[str], int], most: int) -> list[str]:
    if count(text) <= most or len(text) < 2:
        return [text]
    cut = _find_cut(text, 0, len(text) // 2)
    return [*_halve(text[:cut], count, most), *_halve(text[cut:], count, most)]


def _find_cut(text: str, start: int, end: int) -> int:
    """Behind the last paragraph, line or word that ends in the second half of ``start`` to ``end``; else ``end``."""
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark, start + (end - start) // 2, end)
        if found > start:
            return found + len(mark)
    return end


def _name_retrieved(one: Any, place: dict[str, int]) -> str | None:
    values = [one] if not isinstance(one, dict) else [one.get(name) for name in (*NAME_FIELDS, *TEXT_FIELDS)]
    texts = (str(value).strip() for value in values if isinstance(value, (str, int)))
    return next((text for text in texts if text in place), None)


def _read_folder(folder: Path) -> Iterator[CorpusDocument]:
    def refuse(error: OSError) -> NoReturn:
        raise InputError(f"cannot read {error.filename}: {error.strerror}", hint="check its permissions") from None

    for root, folders, names in os.walk(folder, onerror=refuse):  # follows no links to folders
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(root, name)
            if name.startswith(".") or file.suffix.lower() not in TEXT_FILES or not file.is_file():
                continue
            try:
                raw = file.read_bytes() if file.stat().st_size <= MAX_FILE_BYTES else None
            except OSError as error:
                raise InputError(f"cannot read {file}: {error.strerror}", hint="check its permissions") from None
            if raw is None:
                raise InputError(f"{file} is larger than 64 MiB", hint="split it, or leave it out of the folder")
            if b"\0" in raw[:LOOK_BYTES]:
                raise InputError(f"{file} is not text", hint="leave it out of the folder, or give it another ending")
            yield CorpusDocument(str(file.relative_to(folder)), raw.decode("utf-8", "replace"))


def _read_rows(file: Path) -> Iterator[CorpusDocument]:
    for number, row in _read_json(file):
        text = next((row[name] for name in TEXT_FIELDS if isinstance(row.get(name), str)), None)
        if text is None:
            raise InputError(f"{file}, line {number} has no text", hint="a text under one of " + ", ".join(TEXT_FIELDS))
        title = row.get("title")
        named = next((str(row[name]) for name in NAME_FIELDS if isinstance(row.get(name), (str, int))), str(number))
        yield CorpusDocument(named, f"{title}\n{text}" if isinstance(title, str) and title else text)


def _read_json(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_log(file) as stream:
        for number, line in read_lines(stream):
            try:
                row = json.loads(line or b"")
            except (ValueError, RecursionError):
                raise InputError(f"{file}, line {number} is not JSON", hint="one object a line, in UTF-8") from None
            if not isinstance(row, dict):
                raise InputError(f"{file}, line {number} is no object", hint='like {"text": "..."}')
            yield number, row
