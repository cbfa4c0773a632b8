"""Donors on disk: one SQLite file, one transaction for each change.

SQLite gives what a log of our own would have to prove: after a kill at any moment a change is whole or absent, a full
disk leaves the file as it was, several processes may share it. Each row carries a checksum of all its columns; a row
that fails it is never served. The file holds token ids, so only its owner may read it (mode 0600).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sqlite3
import stat
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from pathlib import Path

import numpy as np

from semblend.discover.donor import Donor
from semblend.errors import NamespaceError, StoreError, StoreProblem
from semblend.prompt import Namespace, TokenArray

log = logging.getLogger("semblend")
APPLICATION_ID = 0x53454D42  # "SEMB"
VERSION = 1
GENERATIONS_AT_ONCE = 1024
TOUCHES_KEPT = 256
BUSY_S = 10.0
"""How long another process may hold the file before opening or writing it fails."""
# Bytes that SQLite's connections hold locks on: of the log's index while one is open, of the file during a change.
_LOCKED_BYTES = (("-shm", 128, 1), ("", 1 << 30, 512))
_SNAPSHOTS = itertools.count()  # two threads may write snapshots at once

_SCHEMA = """
CREATE TABLE IF NOT EXISTS donors (
    generation INTEGER PRIMARY KEY, donor_id TEXT NOT NULL UNIQUE, namespace TEXT NOT NULL, tokens BLOB NOT NULL,
    checksum INTEGER NOT NULL, created REAL NOT NULL, expires REAL, used REAL NOT NULL);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT OR IGNORE INTO counters VALUES ('generation', 0);
"""
# Above every generation in use as well: a damaged counter must not hand one out again.
_TAKE_GENERATIONS = """
UPDATE counters SET value = max(value, (SELECT ifnull(max(generation), -1) + 1 FROM donors)) + ?
WHERE name = 'generation' RETURNING value
"""


class SqliteJournal:
    """An open store file. Not thread-safe by itself: the donor store calls it under its lock."""

    def __init__(self, path: str | Path, *, create: bool = True, single_file: bool = False) -> None:
        self.path = Path(path)
        self.bad_rows = 0
        self._generations: Iterator[int] = iter(())
        self._touched: dict[int, float] = {}
        self._process = os.getpid()
        if not create and not os.path.exists(self.path):
            raise StoreError(f"{self.path} does not exist", hint="check the path, or register a donor first")
        self._make_private()
        with self._report_errors("open"):
            self._db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            # A damaged name must fail its row's checksum, not stop the reading of all others.
            self._db.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
            try:
                self._prepare(single_file)
                _tighten_mode(self.path)
            except BaseException:
                self._db.close()
                raise

    def _make_private(self) -> None:
        """Create the file, or take an empty one, so that only its owner may read it."""
        try:
            if not os.path.exists(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            elif os.path.isfile(self.path) and os.path.getsize(self.path) == 0:
                os.chmod(self.path, 0o600)
        except OSError as error:
            raise StoreError(
                f"cannot create {self.path}: {error.strerror}", hint="choose a folder you can write to"
            ) from None

    def _prepare(self, single_file: bool) -> None:
        """Check that the file is a donor store of this version, or make an empty one into it."""
        (application,) = self._db.execute("PRAGMA application_id").fetchone()
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and application != APPLICATION_ID:
            raise StoreError(f"{self.path} is not a donor store", hint="choose another file; nothing was changed")
        if tables and version != VERSION:
            raise StoreError(
                f"{self.path} has format {version}, this version reads {VERSION}",
                hint="open it with the version that wrote it; nothing was changed",
                problem=StoreProblem.NEWER,
            )
        self._db.execute(f"PRAGMA journal_mode = {'DELETE' if single_file else 'WAL'}")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA secure_delete = ON")  # forgotten tokens leave the file, not just the table
        if not tables:
            self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version = {VERSION}")
            self._db.executescript(_SCHEMA)

    def load(self, max_donors: int = 1 << 62, max_tokens: int = 1 << 62) -> Iterator[tuple[Donor, TokenArray]]:
        """Yield the most recently used donors that fit, oldest of them first; damaged rows are counted and left out."""
        chosen: list[int] = []
        with self._report_errors("read"):
            rows = "SELECT generation, ifnull(length(tokens), 0) / 4 FROM donors ORDER BY used DESC, generation DESC"
            for generation, tokens in self._db.execute(rows):
                max_tokens -= tokens
                if len(chosen) == max_donors or max_tokens < 0:
                    break
                chosen.append(generation)
        for generation in reversed(chosen):
            donor = self.fetch(generation)
            if donor is not None:
                yield donor

    def drop_expired(self, unix_s: float) -> None:
        """Delete the donors that expired by ``unix_s``, in this process or while none ran."""
        with self._report_errors("write"), self._begin_transaction():
            self._db.execute("DELETE FROM donors WHERE expires <= ?", (unix_s,))

    def scrub(self) -> None:
        """Fold the write-ahead log into the file and empty it: until then it still holds forgotten tokens."""
        with self._report_errors("write"):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def fetch(self, generation: int) -> tuple[Donor, TokenArray] | None:
        """Read one donor; None if it is gone or its row fails the checksum."""
        columns = "generation, donor_id, namespace, tokens, checksum, created, expires"
        with self._report_errors("read"):
            row = self._db.execute(f"SELECT {columns} FROM donors WHERE generation = ?", (generation,)).fetchone()
        donor = None if row is None else _parse_row(row)
        self.bad_rows += row is not None and donor is None
        return donor

    def list_generations(self) -> set[int]:
        """Return the generations in the file, with other processes' changes."""
        with self._report_errors("read"):
            return {generation for (generation,) in self._db.execute("SELECT generation FROM donors")}

    def take_generation(self) -> int:
        """Take a generation that no process sharing the file has used; read from the file in blocks."""
        generation = next(self._generations, None)
        if generation is None:
            with self._report_errors("write"):
                row = self._db.execute(_TAKE_GENERATIONS, (GENERATIONS_AT_ONCE,)).fetchone()
                if row is None or not isinstance(row[0], int):
                    raise sqlite3.DatabaseError("the counter of generations is malformed")
            self._generations = iter(range(row[0] - GENERATIONS_AT_ONCE, row[0]))
            generation = next(self._generations)
        return generation

    def record(self, added: tuple[Donor, TokenArray] | None, removed: list[Donor]) -> None:
        """Add and remove donors in one transaction: all of it is in the file, or none."""
        with self._report_errors("write"), self._begin_transaction():
            self._flush_touches()
            self._db.executemany("DELETE FROM donors WHERE generation = ?", [(d.generation,) for d in removed])
            if added is not None:
                self._db.execute("INSERT OR REPLACE INTO donors VALUES (?,?,?,?,?,?,?,?)", _build_row(*added))

    def touch(self, generations: list[int], unix_s: float) -> None:
        """Note a use of donors; written with the next change, or when enough of them wait."""
        self._touched.update(dict.fromkeys(generations, unix_s))
        if len(self._touched) >= TOUCHES_KEPT:
            with self._report_errors("write"), self._begin_transaction():
                self._flush_touches()

    def close(self) -> None:
        """Write the waiting uses and close the file."""
        if os.getpid() != self._process:
            return  # the parent's connection: closing it here could end the parent's work on the file
        try:
            if self._touched:
                with self._report_errors("write"), self._begin_transaction():
                    self._flush_touches()
        finally:
            self._db.close()

    def _flush_touches(self) -> None:
        """Write the waiting uses."""
        updates = [(unix_s, generation) for generation, unix_s in self._touched.items()]
        self._db.executemany("UPDATE donors SET used = ? WHERE generation = ?", updates)
        self._touched.clear()

    @contextlib.contextmanager
    def _begin_transaction(self) -> Iterator[None]:
        """Begin a transaction; commit it at the end, roll it back on an error."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _report_errors(self, doing: str) -> Iterator[None]:
        """Turn SQLite's errors into `StoreError`; refuse a connection from before a fork."""
        if os.getpid() != self._process:  # its locks and its block of generations belong to the parent
            raise StoreError(
                f"{self.path} was opened before this process was forked", hint="make a SemBlend in each process"
            )
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter from a damaged name in SQLite's own tables
            raise StoreError(
                f"cannot {doing} {self.path}: {error}",
                hint=_suggest_next_step(str(error)),
                problem=StoreProblem.DAMAGED if _is_damage(str(error)) else None,
            ) from error


def write_snapshot(path: str | Path, donors: Iterable[tuple[Donor, TokenArray]]) -> int:
    """Write a new store file with these donors; the old file at ``path`` stays until the new one is whole."""
    path = Path(os.path.realpath(path))
    _check_replaceable(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{next(_SNAPSHOTS)}.tmp")
    temporary.unlink(missing_ok=True)  # of a process with this number that was killed
    count = 0
    try:
        journal = SqliteJournal(temporary, single_file=True)
        try:
            with journal._report_errors("write"), journal._begin_transaction():
                highest = 0
                for donor, tokens in donors:
                    journal._db.execute("INSERT INTO donors VALUES (?,?,?,?,?,?,?,?)", _build_row(donor, tokens))
                    highest = max(highest, donor.generation + 1)
                    count += 1
                journal._db.execute("UPDATE counters SET value = ?", (highest,))
        finally:
            journal.close()
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}", hint="the file that was there is untouched"
        ) from None
    finally:
        for leftover in (temporary, temporary.with_name(temporary.name + "-journal")):
            leftover.unlink(missing_ok=True)
    return count


def set_aside(path: str | Path) -> Path | None:
    """Rename a store that cannot be used, with its log; returns the new name, None where a process still uses it."""
    path = Path(os.path.realpath(path))
    if _is_in_use(path):
        return None
    stem = f"{path.name}.set-aside-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem, *(f"{stem}-{number}" for number in range(1, 1000)))
    target = next(path.with_name(name) for name in names if not os.path.exists(path.with_name(name)))
    try:
        for suffix in ("", "-wal", "-shm"):
            if os.path.exists(f"{path}{suffix}"):
                os.rename(f"{path}{suffix}", f"{target}{suffix}")
    except OSError:
        return None
    return target


def _is_in_use(path: Path) -> bool:
    """Whether another process has the store open, or changes it at this moment."""
    import fcntl  # only where there is POSIX

    for suffix, start, length in _LOCKED_BYTES:
        try:
            with open(f"{path}{suffix}", "r+b") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except FileNotFoundError:
            continue
        except OSError:
            return True
    return False


def _tighten_mode(path: Path) -> None:
    """Take a store's other readers away and say so; one that is not ours is only told."""
    status = os.stat(path)
    if os.name != "posix" or not status.st_mode & 0o077:
        return
    told = f"others could read {path}, which holds tokens of prompts"
    if status.st_uid != os.geteuid():
        log.warning("%s (hint: its owner can chmod it to 0600)", told)
        return
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.chmod(f"{path}{suffix}", stat.S_IRUSR | stat.S_IWUSR)
    log.warning("%s; its mode is 0600 now", told)


def _check_replaceable(path: Path) -> None:
    """Raise StoreError if ``path`` is no file or a store that is in use."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise StoreError(f"cannot write {path}: it is not a file", hint="name a file")
    # SQLite would play the old file's log into the new file and ruin it.
    if os.path.exists(f"{path}-wal"):
        raise StoreError(
            f"cannot write {path}: it is a store in use, or one that was not closed",
            hint="save to another file; a store that nobody uses is closed properly by semblend donors --store FILE",
        )


def _build_row(donor: Donor, tokens: TokenArray) -> tuple[object, ...]:
    """Build the row of a donor, with its checksum."""
    namespace = json.dumps(astuple(donor.namespace))
    blob = tokens.astype("<i4").tobytes()
    checksum = _compute_checksum(
        donor.generation, donor.donor_id, namespace, blob, donor.created_unix_s, donor.expires_unix_s
    )
    return (donor.generation, donor.donor_id, namespace, blob, checksum, donor.created_unix_s, donor.expires_unix_s,
            donor.created_unix_s)  # fmt: skip


def _parse_row(row: tuple[int, str, str, bytes, int, float, float | None]) -> tuple[Donor, TokenArray] | None:
    """Build the donor of a row; None if the row is damaged."""
    generation, donor_id, namespace, blob, checksum, created, expires = row
    try:  # damage may have changed the type of a column, too
        if _compute_checksum(generation, donor_id, namespace, blob, created, expires) != checksum:
            return None
        parsed = Namespace(*json.loads(namespace))
        tokens = np.frombuffer(blob, "<i4").astype(np.int32)
    except (ValueError, TypeError, NamespaceError):
        return None
    return Donor(donor_id, parsed, generation, len(tokens), created, expires), tokens


def _compute_checksum(
    generation: int, donor_id: str, namespace: str, blob: bytes, created: float, expires: float | None
) -> int:
    """Compute the checksum of all that a row says."""
    head = json.dumps([generation, donor_id, namespace, created, expires]).encode()
    return zlib.crc32(blob, zlib.crc32(head))


def _is_damage(message: str) -> bool:
    return any(word in message for word in ("not a database", "malformed", "no such", "decode"))


def _suggest_next_step(message: str) -> str:
    """Choose the hint for an error message of SQLite."""
    if "full" in message or "I/O error" in message:
        return "free disk space; nothing that was saved before is lost"
    if "locked" in message:
        return "another process holds the file for long: wait, or stop it"
    if _is_damage(message):
        return "the file is damaged: move it aside and start anew, or restore a copy made by save()"
    if "unable to open" in message or "readonly" in message:
        return "check the file's owner and permissions"
    return "check the file and its folder"
