"""Donor KV on disk: one file a donor, memory-mapped when it is read, and served only if its checksum is right.

A file is ``magic, length of the header, header (JSON), K bytes, V bytes``. Files live in a folder of their own for each
process, mode 0700, removed when the process closes it; a folder whose owner died (its lock is free) is removed by the
next one that starts beside it. KV on disk is an overflow, not a store: what must survive a restart is the donor's
tokens, and those are kept elsewhere.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semblend.errors import StoreError

MAGIC = b"SBKV0001"
ALIGNMENT = 64  # tensors start at a multiple of this, so that a mapped view is aligned for every dtype
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
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StoreError(
                f"donor KV cannot be kept in {parent}: {error.strerror}", hint="name a writable folder"
            ) from error
        self._serial = 0

    def write(self, k: Tensor, v: Tensor, about: Mapping[str, Any]) -> KvFile:
        """Writes both tensors; raises OSError (disk full, limit reached) and then leaves nothing behind."""
        payload = [_bytes_of(k), _bytes_of(v)]
        header = {
            **about,
            "dtype": str(k.dtype).removeprefix("torch."),
            "k_shape": list(k.shape),
            "v_shape": list(v.shape),
            "checksum": _checksum(*payload),
        }
        head = json.dumps(header).encode()
        start = _align(len(MAGIC) + 8 + len(head))
        head = head.ljust(start - len(MAGIC) - 8)
        self._serial += 1
        path = self.folder / f"{self._serial:08d}.kv"
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(descriptor, "wb") as out:
                out.write(MAGIC + len(head).to_bytes(8, "little") + head)
                for part in payload:
                    out.write(part.data)
                    out.write(b"\0" * (_align(part.nbytes) - part.nbytes))
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return KvFile(path, path.stat().st_size)

    def load(self, file: KvFile, about: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Both tensors as views of the mapped file; raises StoreError when the file is not what was written."""
        try:
            return _load(file, about)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"donor file {file.path.name} is damaged: {error}", hint="it is dropped") from error

    def remove(self, file: KvFile) -> None:
        """Frees the space; views that are still mapped stay readable until they are let go."""
        file.path.unlink(missing_ok=True)

    def files(self) -> frozenset[Path]:
        """Donor files that are really there."""
        return frozenset(self.folder.glob("*.kv"))

    def close(self) -> None:
        """Removes every file; safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _load(file: KvFile, about: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    if file.path.stat().st_size != file.nbytes:
        raise ValueError(f"{file.path.stat().st_size} bytes instead of {file.nbytes}")
    # Copy on write: torch wants writable memory, and a stray write must not reach the file.
    mapped = np.memmap(file.path, np.uint8, mode="c")
    if mapped[: len(MAGIC)].tobytes() != MAGIC:
        raise ValueError("it does not begin as a donor file")
    start = len(MAGIC) + 8 + int.from_bytes(mapped[len(MAGIC) : len(MAGIC) + 8].tobytes(), "little")
    header = json.loads(mapped[len(MAGIC) + 8 : start].tobytes())
    if any(header[name] != value for name, value in about.items()):
        raise ValueError("it holds another donor")
    dtype: torch.dtype = getattr(torch, header["dtype"])
    parts, views = [], []
    for name in ("k_shape", "v_shape"):
        nbytes = int(np.prod(header[name], dtype=np.int64)) * dtype.itemsize
        parts.append(mapped[start : start + nbytes])
        views.append(torch.from_numpy(parts[-1]).view(dtype).view(header[name]))
        start += _align(nbytes)
    if _checksum(*parts) != header["checksum"]:
        raise ValueError("its checksum is wrong")
    return views[0], views[1]


@contextmanager
def _hold(parent: Path) -> Iterator[None]:
    """Keep other processes from sweeping, or making a folder, in ``parent`` meanwhile."""
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
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
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its owner lives
        finally:
            os.close(descriptor)


def _bytes_of(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return flat


def _checksum(*parts: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.data)
    return digest.hexdigest()


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
