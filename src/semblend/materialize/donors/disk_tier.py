"""Donor KV on disk: one file a donor, memory-mapped when it is read, and served only if its checksums are right.

`donor_file` says what stands in a file. Files live in a folder of their own for each
process, mode 0700, removed when the process closes it; a folder whose owner died (its lock is free) is removed by the
next one that starts beside it. KV on disk is an overflow, not a store: what must survive a restart is the donor's
tokens, and those are kept elsewhere.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from semblend.errors import StoreError
from semblend.materialize.donors.donor_file import map_tensors, read_header, verify_payload, write_donor_file
from semblend.materialize.donors.file_lock import take_lock

log = logging.getLogger("semblend.donors")

_PREFIX = "donor-kv-"
_LOCK = "lock"


@dataclass(frozen=True, slots=True)
class KvFile:
    """One written donor: where it is and how long the file must be."""

    path: Path
    nbytes: int


class DiskTier:
    """Writes, maps and removes donor files. One thread at a time may write or load; any may remove."""

    def __init__(self, folder: str | Path) -> None:
        parent = Path(folder).expanduser()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with _hold(parent):  # a folder whose lock is not taken yet must not look like one of a dead process
                _sweep(parent)
                self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
                self._lock = os.open(self.folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
                take_lock(self._lock)
        except OSError as error:
            raise StoreError(
                f"donor KV cannot be kept in {parent}: {error.strerror}", hint="name a writable folder"
            ) from error
        self._serial, self._has_warned = 0, False

    def write(self, parts: Mapping[str, Tensor], about: Mapping[str, Any]) -> KvFile:
        """Writes the tensors; raises OSError (disk full, limit reached) and then leaves nothing behind."""
        self._serial += 1
        path = self.folder / f"{self._serial:08d}.kv"
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "wb") as out:
                write_donor_file(out, parts, about)
        except OSError:
            self.remove(KvFile(path, 0))
            raise
        return KvFile(path, path.stat().st_size)

    def load(self, file: KvFile, about: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors as views of the mapped file; raises StoreError when the file is not what was written."""
        try:
            return _load(file, about)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"donor file {file.path.name} is damaged: {error}", hint="it is dropped") from error

    def remove(self, file: KvFile) -> bool:
        """Frees the space; views that are still mapped stay readable until they are let go. False where it cannot."""
        try:
            file.path.unlink(missing_ok=True)
        except OSError as error:  # a disk that went read-only: donors are dropped all the same
            if not self._has_warned:
                log.warning("donor files cannot be removed from %s: %s", self.folder, error.strerror)
            self._has_warned = True
            return False
        self._has_warned = False
        return True

    def files(self) -> frozenset[Path]:
        """Donor files that are really there."""
        return frozenset(self.folder.glob("*.kv"))

    def close(self) -> None:
        """Removes every file; safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _load(file: KvFile, about: Mapping[str, Any]) -> dict[str, Tensor]:
    descriptor = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        header = read_header(descriptor)
        if header["about"] != about:
            raise ValueError("it holds another donor")
        verify_payload(descriptor, header)
        return map_tensors(descriptor, header)
    finally:
        os.close(descriptor)


@contextmanager
def _hold(parent: Path) -> Iterator[None]:
    """Keep other processes from sweeping, or making a folder, in ``parent`` meanwhile."""
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        take_lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def _sweep(parent: Path) -> None:
    """Remove the folders of processes that died: their lock is free, or they had not come to make one.

    Only real folders of our own user are touched: in a folder that many may write to, somebody could plant others.
    """
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            status = os.lstat(folder)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        except OSError:
            continue  # being removed by its owner
        try:
            take_lock(descriptor)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its owner lives
        finally:
            os.close(descriptor)
