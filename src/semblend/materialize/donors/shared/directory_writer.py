"""The owner of one writer's donors in the directory: it publishes records, keeps the budget, cleans up after the dead.

One object an engine, in the process that knows the prompts; the engine's workers write the KV files (`DirectoryKv`).

A writer removes only what it owns. When a process dies, what it left is whole (files get their names last) and stays
readable; the next writer that looks takes over its lease and owns its donors from then on: they count against that
writer's budget and leave it first, by their last use. What is not whole is removed. So whoever crashes however often,
all writers together hold at most the sum of their budgets once each has looked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from semblend.errors import InputError
from semblend.materialize.donors.shared.donor_record import (
    LARGEST_RECORD,
    DonorRecord,
    Listed,
    is_part,
    kv_name,
    list_keys,
    make_key,
    record_name,
    withdrawn_name,
    writer_of,
)
from semblend.materialize.donors.shared.lease import Lease
from semblend.materialize.donors.shared.private_folder import PrivateFolder
from semblend.prompt import Prompt

log = logging.getLogger("semblend.donors")
LOOK_EVERY_S = 5.0
"""How often the folder is looked over for dead writers, withdrawn records and donors that never became whole."""
MANY = 64
"""Donors; a writer that owns more removes some more than it has to."""
UNFINISHED_S = 60.0
"""A donor whose KV files are not all there after this long will not be: a rank could not write it."""


@dataclass(slots=True)
class _Owned:
    nbytes: int
    ranks: int
    published: float  # by the monotonic clock
    complete: bool = False
    expires_unix_s: float | None = None


class DirectoryWriter:
    """Publishes at most ``budget_bytes`` in ``folder``, of an engine with ``ranks`` tensor-parallel ranks.

    Not thread-safe: a scheduler calls it between its steps.
    """

    def __init__(
        self,
        folder: PrivateFolder,
        budget_bytes: int,
        *,
        ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        if budget_bytes < 0 or ranks < 1:
            raise InputError(f"budget_bytes={budget_bytes}, ranks={ranks}", hint="bytes from 0, ranks from 1")
        self.budget_bytes, self.ranks = budget_bytes, ranks
        self._folder, self._clock, self._wall_clock = folder, clock, wall_clock
        self._serial = 0
        self._owned: dict[str, _Owned] = {}
        self._adopted: dict[str, Lease] = {}
        self._lease = Lease.begin(folder)
        self._looked = -LOOK_EVERY_S
        self.look_over()

    @property
    def writer(self) -> str:
        return self._lease.writer

    @property
    def used_bytes(self) -> int:
        return sum(one.nbytes for one in self._owned.values())

    def owns(self, key: str) -> bool:
        return key in self._owned

    def publish(self, prompt: Prompt, donor_id: str, nbytes: int, *, ttl_s: float = 0.0) -> DonorRecord | None:
        """Write the record of a donor whose KV files will have ``nbytes`` in sum; None when it does not fit.

        Others find it once every rank has written its file.
        """
        if nbytes > self.budget_bytes or not self._make_room(nbytes):
            return None
        self._serial += 1
        now = self._wall_clock()
        record = DonorRecord(
            make_key(self.writer, self._serial),
            donor_id,
            prompt.namespace,
            prompt.token_ids,
            self.ranks,
            now,
            now + ttl_s if ttl_s else None,
        )
        content = record.encode()
        if len(content) > LARGEST_RECORD:
            return None
        try:
            self._folder.write(record_name(record.key), lambda out: out.write(content))
        except OSError as error:
            log.warning("donor %s is not published: %s", donor_id, error)
            return None
        owned = _Owned(nbytes + len(content), self.ranks, self._clock(), expires_unix_s=record.expires_unix_s)
        self._owned[record.key] = owned
        return record

    def remove(self, key: str) -> bool:
        """Remove an own donor; False for one that is not ours. Whoever reads it now reads on."""
        owned = self._owned.pop(key, None)
        if owned is None:
            return False
        self._folder.remove(record_name(key))  # first: nobody finds the rest without it
        for rank in range(owned.ranks):
            self._folder.remove(kv_name(key, rank, owned.ranks))
        self._folder.remove(withdrawn_name(key))
        return True

    def withdraw(self, key: str) -> None:
        """Take a donor from everybody, whoever owns it: it is damaged, or somebody has to be forgotten."""
        if not self.remove(key):
            self._folder.rename(record_name(key), withdrawn_name(key))

    def touch(self, key: str) -> None:
        """A donor was used: it leaves later, whoever owns it."""
        self._folder.touch(record_name(key))

    def look_over(self) -> bool:
        """Own what dead writers left, remove what is withdrawn, expired or never became whole; once in 5 s at most.

        False when it is not time yet.
        """
        if self._clock() - self._looked < LOOK_EVERY_S:
            return False
        self._looked = self._clock()
        names = self._folder.list_names()
        listed = list_keys(names)
        self._adopt(names, listed)
        for name in names:  # a rank was still writing when its donor was removed
            own = writer_of(name) == self.writer and name[16:17] == "-" and not is_part(name)
            if own and name[:25] not in self._owned:
                self._folder.remove(name)
        for key, owned in list(self._owned.items()):
            self._check(key, owned, listed.get(key, Listed()))
        self._make_room(0)
        return True

    def close(self) -> None:
        """Let go of the leases. Donors stay: the next writer owns them. An empty writer leaves nothing."""
        for lease in (self._lease, *self._adopted.values()):
            if any(key.startswith(lease.writer) for key in self._owned):
                lease.close()
            else:
                lease.end()
        self._adopted.clear()
        self._owned.clear()

    # -- parts -----------------------------------------------------------------------------------------------------

    def _adopt(self, names: Iterable[str], listed: dict[str, Listed]) -> None:
        by_writer: dict[str, list[str]] = {}
        for name in names:
            if (writer := writer_of(name)) is not None and writer != self.writer:
                by_writer.setdefault(writer, []).append(name)
        for writer, files in by_writer.items():
            if writer not in self._adopted:
                lease = Lease.take_over(self._folder, writer)
                if lease is not None:
                    self._adopted[writer] = lease
                elif Lease.exists(self._folder, writer):  # asked anew: the listing may be older than the lease
                    continue  # it lives, or another has adopted it
            self._take_in(writer, files, listed)

    def _take_in(self, writer: str, files: list[str], listed: dict[str, Listed]) -> None:
        """Own the whole donors of a dead writer and remove its other files; the lease goes with the last."""
        left = 0
        for key in {name[:25] for name in files if name[16:17] == "-"}:
            one = listed.get(key, Listed())
            if one.complete:
                left += 1
                if key not in self._owned:
                    self._own(key, one)
        for name in files:
            key = name[:25]
            if is_part(name) or (name[16:17] == "-" and not listed.get(key, Listed()).complete):
                self._folder.remove(name)
        if not left:
            lease = self._adopted.pop(writer, None)
            if lease is not None:
                lease.end()

    def _own(self, key: str, one: Listed) -> None:
        try:
            record = DonorRecord.decode(self._folder.read(record_name(key), LARGEST_RECORD), key)
            nbytes = self._measure(key, one.ranks)
        except (OSError, ValueError, KeyError, TypeError):
            self._owned[key] = _Owned(0, one.ranks, self._clock())
            self.remove(key)
            return
        self._owned[key] = _Owned(nbytes, one.ranks, self._clock(), True, record.expires_unix_s)

    def _measure(self, key: str, ranks: int) -> int:
        """Bytes of a donor's files; raises OSError where one is missing."""
        names = [record_name(key), *(kv_name(key, rank, ranks) for rank in range(ranks))]
        return sum(self._folder.stat(name).st_size for name in names)

    def _check(self, key: str, owned: _Owned, one: Listed) -> None:
        late = not one.complete and (owned.complete or self._clock() - owned.published > UNFINISHED_S)
        expired = owned.expires_unix_s is not None and owned.expires_unix_s <= self._wall_clock()
        if late or expired or one.withdrawn:
            self.remove(key)
        elif one.complete and not owned.complete:
            with suppress(OSError):  # withdrawn since it was listed: the next look finds out
                owned.complete, owned.nbytes = True, self._measure(key, owned.ranks)

    def _make_room(self, nbytes: int) -> bool:
        """Remove what was not used for longest until ``nbytes`` fit."""
        excess = self.used_bytes + nbytes - self.budget_bytes
        if excess > 0:
            # All records are asked for their last use: where there are many, that must not happen for every donor.
            excess += self.budget_bytes // 20 if len(self._owned) > MANY else 0
            for key in sorted(self._owned, key=self._last_used):
                excess -= self._owned[key].nbytes
                self.remove(key)
                if excess <= 0:
                    break
        return self.used_bytes + nbytes <= self.budget_bytes

    def _last_used(self, key: str) -> float:
        try:
            return self._folder.stat(record_name(key)).st_mtime
        except OSError:
            return 0.0
