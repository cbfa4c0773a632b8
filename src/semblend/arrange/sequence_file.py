"""The file in which an arranger's memory survives: a header, then a checked entry for each sequence sent or forgotten.

Entries are appended and never changed. Reading stops at the first entry that is torn or damaged: after a kill that is
the last one. When the file holds twice what may be remembered, it is written anew beside the old one and renamed. It
holds digests of passages: whoever has a passage could see that it was sent. So only its owner may read it (mode 0600).
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from semblend.arrange.memory import Sent
from semblend.errors import StoreError

log = logging.getLogger("semblend.arrange")
HEADER = b"semblend.arrange 2\n"
KEY_BYTES = 16
LONGEST_ENTRY = 64 << 20
MIN_PASSAGES = 1_024
_FRAME = struct.Struct("<II")  # bytes of the entry, their CRC-32
_COUNTS = struct.Struct("<HHI")  # bytes of owner and scope, passages


class SequenceFile:
    """Sequences on disk, in the order in which they were sent. Not safe for threads: the arranger holds a lock.

    A file that cannot be understood is set aside and told in a warning. One that cannot be written any more is told
    once, and the arranger goes on without it: that costs the next start its orders, and nothing else.
    """

    def __init__(self, path: str | Path, most_passages: int) -> None:
        self.path = Path(path).expanduser()
        self._most = max(most_passages, MIN_PASSAGES)
        self._file: BinaryIO | None = None
        self._written = 0
        self._guard = self._lock()

    def load(self) -> list[Sent]:
        """What the file holds, the longest unused first; nothing, and a warning, where it cannot be used."""
        try:
            raw = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise _refuse("read", self.path, error) from None
        if raw and not raw.startswith(HEADER):
            known = raw.startswith(HEADER.split(b" ")[0])
            self._set_aside("was written by another version" if known else "is no memory of an arranger")
            raw = b""
        found: dict[bytes, Sent] = {}
        end = len(HEADER)
        for entry, after in _read_entries(raw, end):
            end = after
            found.pop(entry if isinstance(entry, bytes) else entry.name, None)
            if isinstance(entry, Sent):
                found[entry.name] = entry
        if len(raw) > end:
            log.warning(
                "%s is damaged %d bytes before its end; %d sequences in front of that are kept (hint: a kill tears the "
                "last entry, anything more is the disk)", self.path, len(raw) - end, len(found)
            )  # fmt: skip
        self._written = sum(len(sent.keys) for sent in found.values())
        if raw and len(raw) == end:
            self._attempt(self._open)
        else:
            self.write_anew(found.values())
        return list(found.values())

    def add(self, sent: Sent) -> None:
        """Append a sequence."""
        self._written += len(sent.keys)
        self._append(_pack_sent(sent))

    def remove(self, names: Iterable[bytes]) -> None:
        """Append that sequences were forgotten."""
        for name in names:
            self._written += 1
            self._append(_frame(b"-" + name))

    @property
    def is_full(self) -> bool:
        """Whether it is time to `write_anew`."""
        return self._file is not None and self._written > 2 * self._most

    def write_anew(self, sequences: Iterable[Sent]) -> None:
        """Put these in place of all that the file holds; the old file stays until the new one is whole."""
        kept = list(sequences)
        self._written = sum(len(sent.keys) for sent in kept)
        self._attempt(lambda: self._replace(kept))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._guard.close()

    def _replace(self, sequences: Iterable[Sent]) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        temporary.unlink(missing_ok=True)  # whoever left it there, a link too
        try:
            with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                file.write(HEADER)
                file.writelines(map(_pack_sent, sequences))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
        self._open()

    def _open(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115

    def _append(self, entry: bytes) -> None:
        if self._file is not None:
            file = self._file
            self._attempt(lambda: _write_whole(file, entry))

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            log.warning("%s is not written any more: %s (hint: orders are kept in memory only)", self.path, error)
            if self._file is not None:
                self._file.close()
                self._file = None

    def _lock(self) -> BinaryIO:
        import fcntl  # only where there is POSIX

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            guard = open(os.open(f"{self.path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600), "wb")  # noqa: SIM115
        except OSError as error:
            raise _refuse("use", self.path, error) from None
        try:
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            guard.close()
            raise StoreError(f"{self.path} is used by another arranger", hint="give each its own file") from None
        return guard

    def _set_aside(self, why: str) -> None:
        aside = self.path.with_name(f"{self.path.name}.set-aside-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        try:
            os.rename(self.path, aside)
        except OSError as error:
            raise _refuse("set aside", self.path, error) from None
        log.warning("%s %s; it was set aside as %s, and a new one is begun", self.path, why, aside.name)


def _write_whole(file: BinaryIO, entry: bytes) -> None:
    """A full disk takes a part of an entry and says so by its length alone; what is written behind it would be lost."""
    if file.write(entry) != len(entry):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _refuse(doing: str, path: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot {doing} {path}: {error.strerror}", hint="name a file that you may read and write")


def _frame(entry: bytes) -> bytes:
    return _FRAME.pack(len(entry), zlib.crc32(entry)) + entry


def _pack_sent(sent: Sent) -> bytes:
    count = len(sent.keys)
    head = b"+" + _COUNTS.pack(len(sent.owner), len(sent.scope), count) + sent.owner + sent.scope + sent.root
    return _frame(head + b"".join(sent.keys) + struct.pack(f"<{count}q", *sent.sizes))


def _read_entries(raw: bytes, at: int) -> Iterator[tuple[Sent | bytes, int]]:
    """Entries that are whole, with where each ends: a sequence, or the name of one that was forgotten."""
    while at + _FRAME.size <= len(raw):
        length, checksum = _FRAME.unpack_from(raw, at)
        entry = raw[at + _FRAME.size : at + _FRAME.size + length]
        at += _FRAME.size + length
        if length > LONGEST_ENTRY or len(entry) < length or zlib.crc32(entry) != checksum:
            return
        try:
            yield (entry[1:] if entry[:1] == b"-" else _unpack_sent(entry)), at
        except (struct.error, ValueError):
            return


def _unpack_sent(entry: bytes) -> Sent:
    owner, scope, count = _COUNTS.unpack_from(entry, 1)
    at = 1 + _COUNTS.size
    parts = []
    for length in (owner, scope, KEY_BYTES):
        parts.append(entry[at : at + length])
        at += length
    keys = tuple(entry[start : start + KEY_BYTES] for start in range(at, at + count * KEY_BYTES, KEY_BYTES))
    sizes = struct.unpack_from(f"<{count}q", entry, at + count * KEY_BYTES)
    if entry[:1] != b"+" or len(entry) != at + count * (KEY_BYTES + 8):
        raise ValueError("an entry of another length")
    return Sent(parts[0], parts[1], parts[2], keys, sizes)
