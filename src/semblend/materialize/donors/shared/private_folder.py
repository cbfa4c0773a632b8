"""A folder that only its owner may enter, and its files: whole or absent, never followed through a link.

Everything goes through a descriptor of the folder, so that renaming it under us changes nothing. A file is written
under a temporary name and renamed when it is whole: who opens a name finds all of it. Nothing is flushed to a disk:
after a kill of the process the kernel still has it, after a power cut its checksum is wrong.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from semblend.errors import StoreError
from semblend.materialize.donors.file_lock import take_lock

PART = ".part"
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class PrivateFolder:
    """The folder at ``path``, made with mode 0700 where it is missing; raises StoreError when others may enter it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        try:
            with suppress(FileExistsError):
                os.makedirs(self.path.parent, exist_ok=True)
                os.mkdir(self.path, 0o700)
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | _NO_LINKS)
        except OSError as error:
            raise StoreError(
                f"the donor directory {self.path} cannot be used: {error.strerror}",
                hint="name a folder of your own, not a link to one",
            ) from None
        try:
            self._check_owner()
        except StoreError:
            self.close()
            raise

    def _check_owner(self) -> None:
        status = os.fstat(self._descriptor)
        if status.st_uid != os.geteuid():
            raise StoreError(
                f"the donor directory {self.path} belongs to user {status.st_uid}",
                hint="name a folder of the user that runs the engine",
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise StoreError(
                f"the donor directory {self.path} has mode {stat.S_IMODE(status.st_mode):04o}: others may read prompts",
                hint=f"chmod 700 {self.path}",
            )

    def hold(self) -> bool:
        """Hold the folder until it is closed or the process ends; False where somebody else holds it."""
        try:
            take_lock(self._descriptor)
        except BlockingIOError:
            return False
        return True

    @property
    def changed_ns(self) -> int:
        """When a name was last added or removed."""
        return os.fstat(self._descriptor).st_mtime_ns

    def list_names(self) -> list[str]:
        """All names, in no order."""
        return os.listdir(self._descriptor)

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> int:
        """Make the file ``name`` with what ``fill`` writes; returns its size. Raises OSError and leaves nothing."""
        temporary = f"{name}.{secrets.token_hex(4)}{PART}"
        descriptor = self._create(temporary)
        try:
            with os.fdopen(descriptor, "wb") as out:
                fill(out)
                size = out.tell()
            os.rename(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            self.remove(temporary)
            raise
        return size

    def create(self, name: str, prepare: Callable[[int], object]) -> int:
        """Make an empty file, hand its descriptor to ``prepare``, then give it its name; returns the descriptor."""
        temporary = f"{name}.{secrets.token_hex(4)}{PART}"
        descriptor = self._create(temporary)
        try:
            prepare(descriptor)
            os.rename(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            os.close(descriptor)
            self.remove(temporary)
            raise
        return descriptor

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor of a plain file of ours that nobody else may read; raises OSError for anything else."""
        descriptor = os.open(name, flags | _NO_LINKS | os.O_NONBLOCK, dir_fd=self._descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            os.close(descriptor)
            raise PermissionError(f"{name} is not a private file of this user")
        return descriptor

    def read(self, name: str, most: int) -> bytes:
        """A small file; raises OSError where it is missing, foreign or larger than ``most``."""
        with os.fdopen(self.open(name), "rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise OSError(f"{name} is larger than {most} bytes")
        return content

    def stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def touch(self, name: str) -> None:
        """Make a file the most recently used; one that is gone stays gone."""
        with suppress(OSError):
            os.utime(name, dir_fd=self._descriptor, follow_symlinks=False)

    def rename(self, name: str, new: str) -> None:
        with suppress(FileNotFoundError):
            os.rename(name, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def remove(self, name: str) -> None:
        """Unlink a file; who has it mapped keeps its bytes. Missing is fine, and so is what is no file."""
        with suppress(OSError):
            os.unlink(name, dir_fd=self._descriptor)

    def close(self) -> None:
        """Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _create(self, name: str) -> int:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | _NO_LINKS
        return os.open(name, flags, 0o600, dir_fd=self._descriptor)
