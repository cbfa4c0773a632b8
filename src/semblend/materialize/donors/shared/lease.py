"""Leases: how processes of a machine know which writers of the directory live.

A lease is a file that every process of a writer (scheduler and workers) holds a shared lock on. The kernel lets go of
a lock when a process ends, however it ends, so a lease that can be locked for oneself alone belongs to a dead writer.
No clock and no process id is asked: both lie across containers that share a folder. Whoever gets that lock owns what
the dead writer left, until it dies itself.
"""

from __future__ import annotations

import os

from semblend.errors import StoreError
from semblend.materialize.donors.file_lock import take_lock
from semblend.materialize.donors.shared.donor_record import lease_name, new_writer_id
from semblend.materialize.donors.shared.private_folder import PrivateFolder


class Lease:
    """A lock on a writer's lease; ``close`` lets go of it, and so does the end of the process."""

    def __init__(self, folder: PrivateFolder, writer: str, descriptor: int) -> None:
        self.writer, self._folder, self._descriptor = writer, folder, descriptor

    @classmethod
    def begin(cls, folder: PrivateFolder) -> Lease:
        """A new writer. It is locked before it has its name, so that nobody takes it for a dead one."""
        for _ in range(8):  # a neighbour that sweeps may remove a temporary file
            writer = new_writer_id()
            try:
                descriptor = folder.create(lease_name(writer), lambda file: _fill(file))
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreError(
                    f"the donor directory {folder.path} cannot be written: {error.strerror}",
                    hint="free some space, or name another folder",
                ) from None
            return cls(folder, writer, descriptor)
        raise StoreError(f"no lease can be made in {folder.path}", hint="is somebody removing its files?")

    @classmethod
    def join(cls, folder: PrivateFolder, writer: str) -> Lease | None:
        """Another process of a living writer; None when the writer is gone."""
        return cls._lock(folder, writer, shared=True)

    @classmethod
    def take_over(cls, folder: PrivateFolder, writer: str) -> Lease | None:
        """The lease of a dead writer; None when it lives, or somebody else was faster."""
        return cls._lock(folder, writer, shared=False)

    @staticmethod
    def exists(folder: PrivateFolder, writer: str) -> bool:
        """Whether a writer has a lease, locked or not."""
        try:
            folder.stat(lease_name(writer))
        except OSError:
            return False
        return True

    @classmethod
    def _lock(cls, folder: PrivateFolder, writer: str, *, shared: bool) -> Lease | None:
        try:
            descriptor = folder.open(lease_name(writer), os.O_RDWR)
        except OSError:
            return None
        try:
            take_lock(descriptor, shared=shared)
            if os.fstat(descriptor).st_nlink:
                return cls(folder, writer, descriptor)
        except OSError:
            pass
        os.close(descriptor)
        return None

    def end(self) -> None:
        """Remove the lease: nothing of this writer is left."""
        self._folder.remove(lease_name(self.writer))
        self.close()

    def close(self) -> None:
        """Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _fill(descriptor: int) -> None:
    take_lock(descriptor, shared=True)
    os.write(descriptor, f"pid {os.getpid()}\n".encode())  # for people: nothing reads it
