"""The owner of one writer's donors in the directory: it publishes records, keeps the budget, cleans up after the dead.

One object an engine, in the process that knows the prompts; the engine's workers write the KV files (`DirectoryKv`).

A writer removes only what it owns. When a process dies, what it left is whole (files get their names last) and stays
readable; the next writer that looks takes over its lease and owns its donors from then on: they count against that
writer's budget and leave it first, by their last use. What is not whole is removed. So whoever crashes however often,
all writers together hold at most the sum of their budgets once each has looked.

A full budget makes room by tenant (`semblend.shares`): the tenant that holds most gives first, what it has not used for
longest. A burst of one tenant takes nothing from a tenant that has its share or less.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Set
from contextlib import closing, suppress
from dataclasses import dataclass

from semblend.errors import InputError
from semblend.materialize.donors.shared.directory_listing import DirectoryListing, Snapshot
from semblend.materialize.donors.shared.donor_record import (
    LARGEST_RECORD,
    DonorRecord,
    Listed,
    is_part,
    kv_name,
    make_key,
    record_name,
    withdrawn_name,
)
from semblend.materialize.donors.shared.lease import Lease
from semblend.materialize.donors.shared.private_folder import PrivateFolder
from semblend.prompt import Prompt
from semblend.shares import FairLru

log = logging.getLogger("semblend.donors")
LOOK_EVERY_S = 5.0
"""How often the folder is looked over for dead writers, withdrawn records and donors that never became whole."""
MANY = 64
"""Donors; a writer that owns more removes some more than it has to."""
MOST_LOOKS = 4
"""How often the order is made anew because neighbours have used donors meanwhile."""
UNFINISHED_S = 60.0
"""A donor whose KV files are not all there after this long will not be: a rank could not write it."""


@dataclass(slots=True)
class _Owned:
    nbytes: int
    ranks: int
    tenant: str
    published: float  # by the monotonic clock
    last_used: float = 0.0  # the record's time of change when it was last asked for: it may have moved since


class DirectoryWriter:
    """Publishes at most ``budget_bytes`` in ``folder``, of an engine with ``ranks`` tensor-parallel ranks.

    ``listing`` lists the folder; without one, or without a thread of its own, it is listed in every `look_over`. Not
    thread-safe: a scheduler calls it between its steps.
    """

    def __init__(
        self,
        folder: PrivateFolder,
        budget_bytes: int,
        *,
        listing: DirectoryListing | None = None,
        ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        if budget_bytes < 0 or ranks < 1:
            raise InputError(f"budget_bytes={budget_bytes}, ranks={ranks}", hint="bytes from 0, ranks from 1")
        self.budget_bytes, self.ranks = budget_bytes, ranks
        self._folder, self._clock, self._wall_clock = folder, clock, wall_clock
        self._listing = DirectoryListing(folder) if listing is None else listing
        self._serial = 0
        self._owned: dict[str, _Owned] = {}
        self._used_bytes = 0
        self._unfinished: set[str] = set()  # own donors of which not all files were there yet
        self._ends: list[tuple[float, str]] = []  # a heap: when each donor expires that does
        self._adopted: dict[str, Lease] = {}
        self._taken_in: dict[str, frozenset[str]] = {}  # what of each adopted writer was looked at
        self._lease = Lease.begin(folder)
        self._looked = -LOOK_EVERY_S
        self.look_over()

    @property
    def writer(self) -> str:
        return self._lease.writer

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def owned(self) -> Set[str]:
        """The keys of all donors that this writer may remove."""
        return self._owned.keys()

    def owns(self, key: str) -> bool:
        return key in self._owned

    def publish(self, prompt: Prompt, donor_id: str, nbytes: int, *, ttl_s: float = 0.0) -> DonorRecord | None:
        """Write the record of a donor whose KV files will have ``nbytes`` in sum; None when it does not fit.

        Others find it once every rank has written its file.
        """
        tenant = prompt.namespace.tenant
        if nbytes > self.budget_bytes or not self._make_room(nbytes, tenant):
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
        last_used = self._read_last_use(record.key)
        self._add(record, _Owned(nbytes + len(content), self.ranks, tenant, self._clock(), last_used))
        self._unfinished.add(record.key)
        return record

    def remove(self, key: str) -> bool:
        """Remove an own donor; False for one that is not ours. Whoever reads it now reads on."""
        owned = self._owned.pop(key, None)
        if owned is None:
            return False
        self._used_bytes -= owned.nbytes
        self._unfinished.discard(key)
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
        snapshot = self._listing.take()
        self._adopt(snapshot)
        for key in snapshot.keys_of.get(self.writer, frozenset()) - self._owned.keys():
            for name in snapshot.find(key).names:  # a rank was still writing when its donor was removed
                if not is_part(name):
                    self._folder.remove(name)
        self._finish(snapshot)
        self._remove_lost(snapshot)
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

    def _adopt(self, snapshot: Snapshot) -> None:
        for writer in snapshot.writers - {self.writer}:
            if writer not in self._adopted:
                lease = Lease.take_over(self._folder, writer)
                if lease is not None:
                    self._adopted[writer] = lease
                elif Lease.exists(self._folder, writer):  # asked anew: the listing may be older than the lease
                    continue  # it lives, or another has adopted it
            self._take_in(writer, snapshot)

    def _take_in(self, writer: str, snapshot: Snapshot) -> None:
        """Own the whole donors of a dead writer and remove its other files; the lease goes with the last."""
        keys = snapshot.keys_of.get(writer, frozenset())
        if keys and self._taken_in.get(writer) is keys:  # nothing has changed
            return
        self._taken_in[writer] = keys
        left = 0
        for key in keys:
            one = snapshot.find(key)
            left += one.complete
            if one.complete and key not in self._owned:
                self._own(key, one)
            for name in one.names:
                if is_part(name) or not one.complete:
                    self._folder.remove(name)
        for name in snapshot.loose.get(writer, ()):
            self._folder.remove(name)
        if not left:
            self._taken_in.pop(writer, None)
            lease = self._adopted.pop(writer, None)
            if lease is not None:
                lease.end()

    def _own(self, key: str, one: Listed) -> None:
        try:
            record = DonorRecord.decode(self._folder.read(record_name(key), LARGEST_RECORD), key)
            nbytes = self._measure(key, one.ranks)
            owned = _Owned(nbytes, one.ranks, record.namespace.tenant, self._clock(), self._read_last_use(key))
        except (OSError, ValueError, KeyError, TypeError):
            self._owned[key] = _Owned(0, one.ranks, "", self._clock())
            self.remove(key)
            return
        self._add(record, owned)

    def _add(self, record: DonorRecord, owned: _Owned) -> None:
        self._owned[record.key] = owned
        self._used_bytes += owned.nbytes
        if record.expires_unix_s is not None:
            heapq.heappush(self._ends, (record.expires_unix_s, record.key))

    def _measure(self, key: str, ranks: int) -> int:
        """Bytes of a donor's files; raises OSError where one is missing."""
        names = [record_name(key), *(kv_name(key, rank, ranks) for rank in range(ranks))]
        return sum(self._folder.stat(name).st_size for name in names)

    def _finish(self, snapshot: Snapshot) -> None:
        """Measure own donors that have become whole; remove those that will not."""
        for key in list(self._unfinished):
            owned = self._owned[key]
            if snapshot.find(key).complete:
                with suppress(OSError):  # withdrawn since it was listed: the next look finds out
                    nbytes = self._measure(key, owned.ranks)
                    self._used_bytes += nbytes - owned.nbytes
                    owned.nbytes = nbytes
                    self._unfinished.discard(key)
            elif self._clock() - owned.published > UNFINISHED_S:
                self.remove(key)

    def _remove_lost(self, snapshot: Snapshot) -> None:
        """Remove what has expired, and what was whole and is not any more: withdrawn, or somebody took a file."""
        whole = frozenset().union(*snapshot.complete.values())
        for key in self._owned.keys() - whole - self._unfinished:
            self.remove(key)
        for key in self._unfinished & snapshot.keys.keys():
            if snapshot.find(key).withdrawn:
                self.remove(key)
        now = self._wall_clock()
        while self._ends and self._ends[0][0] <= now:
            self.remove(heapq.heappop(self._ends)[1])

    def _make_room(self, nbytes: int, tenant: str = "") -> bool:
        """Remove donors until ``nbytes`` of ``tenant`` fit; removes nothing where they would not fit all the same."""
        excess = self._used_bytes + nbytes - self.budget_bytes
        if excess <= 0:
            return True
        # Putting them in order takes a while where there are many: that must not happen for every donor.
        spare = self.budget_bytes // 20 if len(self._owned) > MANY else 0
        leaving, freed = self._choose_leavers(nbytes, tenant, excess + spare)
        if freed < excess:
            return False
        for key in leaving:
            self.remove(key)
        return True

    def _choose_leavers(self, nbytes: int, tenant: str, wanted: int) -> tuple[list[str], int]:
        """Who leaves so that ``wanted`` bytes are free, and how many are: fewer where others keep their shares.

        The last use of a donor is asked for when it is its turn: neighbours use it without a word to us.
        """
        leaving, freed = list[str](), 0
        for _ in range(MOST_LOOKS):
            moved, leaving, freed = False, [], 0
            order = FairLru[str]()
            for key in sorted(self._owned, key=lambda key: self._owned[key].last_used):
                order.add(key, self._owned[key].tenant, self._owned[key].nbytes)
            with closing(order.order_leavers(tenant, nbytes, self.budget_bytes)) as leavers:
                for key in leavers:
                    last_used = self._read_last_use(key)
                    if last_used > self._owned[key].last_used:
                        self._owned[key].last_used, moved = last_used, True
                    leaving.append(key)
                    freed += self._owned[key].nbytes
                    if freed >= wanted:
                        break
            if not moved:
                break
        return leaving, freed

    def _read_last_use(self, key: str) -> float:
        try:
            return self._folder.stat(record_name(key)).st_mtime
        except OSError:
            return 0.0
