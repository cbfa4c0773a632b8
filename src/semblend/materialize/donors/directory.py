"""The donor directory: one folder in which all engine processes of a machine publish donors and find the others'.

This is the scheduler's side, which knows prompts: records and leases in the folder, the listing that follows it, what
this engine publishes (`DirectoryWriter`) and what its neighbours have published (`DirectoryWatch`), joined by
`SharedDonors`. The workers' side, which has the KV, is `directory_kv`.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from semblend.discover.donor import EvictionReason
from semblend.errors import InputError, StoreError
from semblend.fairness import EvictionOrder
from semblend.materialize.donors.background import Background
from semblend.materialize.donors.store import PART, PrivateFolder, take_lock
from semblend.prompt import Namespace, Prompt, TokenArray

GENERATION = 0
"""Of every donor of the directory: its key is never used twice. Engines count their own captures from 1."""


@dataclass(frozen=True, slots=True)
class Publication:
    """Write the KV of a captured donor into the directory, under ``key``."""

    donor_id: str
    generation: int
    key: str
    tokens_digest: str


# -- The record of a published donor: what it holds, for whom it may be used, who wrote it.
#
# A donor in the directory is one record and one KV file for each tensor-parallel rank, in no order: it counts once
# all of them are there. Names say all that a listing needs to know:
#
#     <writer>.lease                    locked while a process of the writer lives
#     <writer>-<serial>.donor           the record
#     <writer>-<serial>.<r>of<n>.kv     KV of rank r of n
#     <writer>-<serial>.gone            a record that was withdrawn: its owner removes the donor
#     *.part                            not whole yet
#
# A writer's id is random and a serial is given once, so a key never names two donors.


MAGIC = b"SBDR0001"
LARGEST_RECORD = 64 << 20
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{8})\.(donor|gone|(\d{1,4})of(\d{1,4})\.kv)")
_WRITER = re.compile(r"([0-9a-f]{16})(?:\.lease|-[0-9a-f]{8}\.)")


@dataclass(frozen=True, slots=True, eq=False)
class DonorRecord:
    """One published donor. ``expires_unix_s``: nobody uses it from then on; None for never."""

    key: str
    donor_id: str
    namespace: Namespace
    tokens: TokenArray
    ranks: int
    created_unix_s: float
    expires_unix_s: float | None = None

    @property
    def prompt(self) -> Prompt:
        return Prompt(self.tokens, namespace=self.namespace)

    @property
    def tokens_digest(self) -> str:
        """What a KV file repeats, so that it cannot be taken for that of another prompt."""
        return digest_tokens(self.namespace, self.tokens)

    def has_expired(self, now_unix_s: float) -> bool:
        return self.expires_unix_s is not None and self.expires_unix_s <= now_unix_s

    def count_ttl_s(self, now_unix_s: float) -> float | None:
        """For how long a store may keep it that takes it in now; None for ever."""
        return None if self.expires_unix_s is None else max(1.0, self.expires_unix_s - now_unix_s)

    def encode(self) -> bytes:
        """The whole file: magic, SHA-256 of the rest, length of the head, head (JSON), token ids."""
        head = {
            "key": self.key,
            "donor_id": self.donor_id,
            "namespace": asdict(self.namespace),
            "namespace_digest": self.namespace.digest,
            "ranks": self.ranks,
            "created_unix_s": self.created_unix_s,
            "expires_unix_s": self.expires_unix_s,
        }
        packed = json.dumps(head).encode()
        body = len(packed).to_bytes(4, "little") + packed + self.tokens.astype("<i4").tobytes()
        return MAGIC + hashlib.sha256(body).digest() + body

    @classmethod
    def decode(cls, content: bytes, key: str) -> DonorRecord:
        """The record of ``key``; raises ValueError when it is damaged, or another's."""
        body = content[len(MAGIC) + 32 :]
        if content[: len(MAGIC)] != MAGIC or hashlib.sha256(body).digest() != content[len(MAGIC) : len(MAGIC) + 32]:
            raise ValueError("the record is damaged")
        end = 4 + int.from_bytes(body[:4], "little")
        head: dict[str, Any] = json.loads(body[4:end])
        namespace = Namespace(**head["namespace"])
        if head["key"] != key or namespace.digest != head["namespace_digest"]:
            raise ValueError("the record is of another donor")
        tokens = np.frombuffer(body[end:], "<i4").astype(np.int32)
        expires = head["expires_unix_s"]
        return cls(key, head["donor_id"], namespace, tokens, head["ranks"], head["created_unix_s"], expires)


@dataclass(frozen=True, slots=True)
class Listed:
    """What a listing shows of one key; ``names`` are all its files, temporary ones too.

    ``ranks``: of the engine that wrote it, by the names of its KV files; 0 where there are none, or they do not agree.
    """

    names: frozenset[str] = frozenset()
    ranks: int = 0
    withdrawn: bool = False
    complete: bool = False


def digest_tokens(namespace: Namespace, tokens: TokenArray) -> str:
    """A short digest of a prompt in its namespace."""
    return hashlib.sha256(namespace.digest.encode() + tokens.astype("<i4").tobytes()).hexdigest()[:32]


def new_writer_id() -> str:
    return secrets.token_hex(8)


def make_key(writer: str, serial: int) -> str:
    return f"{writer}-{serial:08x}"


def writer_of(name: str) -> str | None:
    """Whose file this is, temporary ones included; None for a name that is not of the directory."""
    found = _WRITER.match(name)
    return found[1] if found else None


def record_name(key: str) -> str:
    return f"{key}.donor"


def withdrawn_name(key: str) -> str:
    return f"{key}.gone"


def kv_name(key: str, rank: int, ranks: int) -> str:
    return f"{key}.{rank}of{ranks}.kv"


def lease_name(writer: str) -> str:
    return f"{writer}.lease"


def is_key(text: str) -> bool:
    """Whether a donor id names a donor of the directory.

    >>> is_key("00112233aabbccdd-0000002a"), is_key("cmpl-17")
    (True, False)
    """
    return _NAME.fullmatch(f"{text}.donor") is not None


def describe_files(names: Iterable[str]) -> Listed:
    """What files of one key amount to.

    >>> describe_files(["00112233aabbccdd-00000001.donor", "00112233aabbccdd-00000001.0of1.kv"]).complete
    True
    """
    kept, kinds, parts, ranks = frozenset(names), set[str](), 0, set[int]()
    for name in kept:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        kinds.add(match[3])
        if match[5] is not None:
            parts += 1
            ranks.add(int(match[5]) if int(match[4]) < int(match[5]) else 0)
    count = ranks.pop() if len(ranks) == 1 else 0
    withdrawn = "gone" in kinds
    return Listed(kept, count, withdrawn, "donor" in kinds and not withdrawn and 0 < count == parts)


def is_part(name: str) -> bool:
    """Whether a file of that name is not whole yet."""
    return name.endswith(PART)


# -- Leases: how processes of a machine know which writers of the directory live.
#
# A lease is a file that every process of a writer (scheduler and workers) holds a shared lock on. The kernel lets go of
# a lock when a process ends, however it ends, so a lease that can be locked for oneself alone belongs to a dead writer.
# No clock and no process id is asked: both lie across containers that share a folder. Whoever gets that lock owns what
# the dead writer left, until it dies itself.


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


# -- Which files lie in the donor directory. The folder is listed by a thread, and only names that came or went are
# read.
#
# Thousands of donors are tens of thousands of names: reading all of them takes tens of milliseconds, which a
# scheduler does not have between two steps. What it gets is a `Snapshot` that never changes.


SETTLED_NS = 100_000_000
"""A folder's time of change is no finer than a tick of the kernel: only one that is older than this is trusted."""
K = TypeVar("K")
_NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One listing.

    ``keys``: what is there of each donor. ``complete``: keys of donors of which nothing is missing, by the number of
    their ranks. ``keys_of``: the keys of each writer. ``leases``: writers that have one. ``loose``: temporary files of
    leases, by writer.
    """

    keys: Mapping[str, Listed] = field(default_factory=dict)
    complete: Mapping[int, frozenset[str]] = field(default_factory=dict)
    keys_of: Mapping[str, frozenset[str]] = field(default_factory=dict)
    leases: frozenset[str] = _NONE
    loose: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def find(self, key: str) -> Listed:
        return self.keys.get(key, Listed())

    @property
    def writers(self) -> set[str]:
        """Everybody of whom there is a file."""
        return {*self.keys_of, *self.leases, *self.loose}

    def list_complete(self, ranks: int) -> frozenset[str]:
        return self.complete.get(ranks, _NONE)


class DirectoryListing:
    """Lists ``folder`` when it is asked to, or in a thread of its own after `start`. Thread-safe."""

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._names: set[str] = set()
        self._snapshot = Snapshot()
        self._listed_ns = -1
        self._failure: OSError | None = None
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def start(self, every_s: float) -> None:
        """List the folder in a daemon thread, once in ``every_s``, until `close`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(every_s,), daemon=True, name="donor-list")
            self._thread.start()

    def take(self) -> Snapshot:
        """The newest snapshot: the thread's, or, where none runs, one of now. Raises OSError as a listing does."""
        if not self.is_running:
            return self.refresh()
        if self._failure is not None:
            raise self._failure
        return self._snapshot

    def refresh(self) -> Snapshot:
        """List the folder now, unless nothing has changed in it."""
        with self._lock:
            changed = self._folder.changed_ns
            if changed != self._listed_ns:
                names = set(self._folder.list_names())
                if names != self._names:
                    self._snapshot = _follow(self._snapshot, names - self._names, self._names - names)
                    self._names = names
                # A change within the same tick as this listing would not move the time: list again next time.
                self._listed_ns = changed if time.time_ns() - changed > SETTLED_NS else -1
            return self._snapshot

    def close(self) -> None:
        """Ends the thread; safe to call twice."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, every_s: float) -> None:
        while not self._ends.wait(every_s):
            try:
                self.refresh()
            except OSError as error:  # the folder went away: whoever asks next is told
                self._failure = error
                return


def _follow(before: Snapshot, came: Iterable[str], went: Iterable[str]) -> Snapshot:
    """The next snapshot; what did not change is copied as a whole, which takes a tenth of a microsecond a donor."""
    files: dict[str, set[str]] = {}
    loose: dict[str, set[str]] = {}
    leases = set(before.leases)
    for names, is_there in ((went, False), (came, True)):
        for name in names:
            writer = writer_of(name)
            if writer is None:
                continue
            if name[16:17] == "-":
                _change(files.setdefault(name[:25], set(before.find(name[:25]).names)), name, is_there)
            elif is_part(name):
                _change(loose.setdefault(writer, set(before.loose.get(writer, ()))), name, is_there)
            else:
                _change(leases, writer, is_there)
    keys, complete = dict(before.keys), {ranks: set(found) for ranks, found in before.complete.items()}
    keys_of: dict[str, set[str]] = {}
    for key, names in files.items():
        complete.get(before.find(key).ranks, set()).discard(key)
        keys[key] = one = describe_files(names)
        if one.complete:
            complete.setdefault(one.ranks, set()).add(key)
        if not names:
            del keys[key]
        _change(keys_of.setdefault(key[:16], set(before.keys_of.get(key[:16], ()))), key, bool(names))
    return Snapshot(
        keys, _join({}, complete), _join(before.keys_of, keys_of), frozenset(leases), _join(before.loose, loose)
    )


def _join(before: Mapping[K, frozenset[str]], changed: Mapping[K, set[str]]) -> dict[K, frozenset[str]]:
    """The sets of before, with those that have changed in their place; empty ones go."""
    joined = {**before, **{name: frozenset(found) for name, found in changed.items()}}
    return {name: found for name, found in joined.items() if found}


def _change(names: set[str], name: str, is_there: bool) -> None:
    if is_there:
        names.add(name)
    else:
        names.discard(name)


# -- What other writers have published: which donors came, which went. Cheap enough to be asked before every lookup.
#
# Donors are looked at when a new listing is there, or something else has changed. A record is read once, because a key
# never names two donors. A long prompt's takes milliseconds: where there is a thread, that reads it.


log = logging.getLogger("semblend.donors")


TOKENS_AT_ONCE = 1 << 16
"""A poll takes no further record behind so many tokens: whoever polls registers them, 0.045 ms a thousand."""


class RecordReader:
    """Records by key: read at once, or by ``thread``, and then whoever asks first is given nothing yet.

    Not thread-safe: its owner calls it, and the thread only puts down what it has read.
    """

    def __init__(self, folder: PrivateFolder, thread: Background | None) -> None:
        self._folder, self._thread = folder, thread
        self._asked: set[str] = set()
        self._read: dict[str, DonorRecord | Exception] = {}

    def take(self, key: str) -> DonorRecord | Exception | None:
        """A record, why there is none, or None while it is read: ask again."""
        if self._thread is None:
            return self._try(key)
        if key in self._read:
            self._asked.discard(key)
            return self._read.pop(key)
        if key not in self._asked and self._thread.submit(lambda: self._read.update({key: self._try(key)})):
            self._asked.add(key)
        return None

    def forget_others(self, keys: Set[str]) -> None:
        """Nobody will take what is not one of these."""
        for key in (self._asked - keys) & self._read.keys():
            self._asked.discard(key)
            del self._read[key]

    def _try(self, key: str) -> DonorRecord | Exception:
        try:
            return DonorRecord.decode(self._folder.read(record_name(key), LARGEST_RECORD), key)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not isinstance(error, FileNotFoundError):  # that one was evicted since it was listed
                log.warning("published donor %s is refused: %s", key, error)
            return error


@dataclass(frozen=True, slots=True)
class DonorChanges:
    """Since the last poll: donors that can be used now, and keys of those that no longer can."""

    came: tuple[DonorRecord, ...] = ()
    went: tuple[str, ...] = ()


class DirectoryWatch:
    """Donors in ``folder`` that an engine of namespace ``engine`` with ``ranks`` ranks can use; not thread-safe.

    A request adds its salt, its tenant and its adapter to the engine's namespace, so those may be any. ``listing``
    lists the folder; where it has no thread, it is asked to once in ``every_s``. ``thread`` reads records.
    """

    def __init__(
        self,
        folder: PrivateFolder,
        engine: Namespace,
        *,
        listing: DirectoryListing | None = None,
        thread: Background | None = None,
        ranks: int = 1,
        every_s: float = 1.0,
        at_once: int = 16,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine, self._ranks, self._records = _strip_request(engine), ranks, RecordReader(folder, thread)
        self._every_s, self._at_once, self._clock, self._wall_clock = every_s, at_once, clock, wall_clock
        self._listing = DirectoryListing(folder) if listing is None else listing
        self._hidden: set[str] = set()
        self._refused: set[str] = set()
        self._void: set[str] = set()  # refused, whatever the engine's namespace is
        self._snapshot: Snapshot | None = None
        self._there: frozenset[str] = frozenset()  # complete in the last listing
        self._shown: dict[str, DonorRecord] = {}
        self._listed_s = -every_s
        self._settled = False  # nothing comes or goes while listing, clock and refusals stand still
        self._next_end_s: float | None = None  # when the first of those that are shown expires

    @property
    def is_settled(self) -> bool:
        """Whether the last poll has looked at all that was listed."""
        return self._settled

    def poll(self) -> DonorChanges:
        """What changed; takes at most ``at_once`` records, so that the first poll of a full folder is short too."""
        self._look()
        now = self._wall_clock()
        if self._settled and (self._next_end_s is None or now < self._next_end_s):
            return DonorChanges()
        expired = {key for key, record in self._shown.items() if record.has_expired(now)}
        gone = expired | (self._shown.keys() - self._there) | (self._shown.keys() & (self._refused | self._hidden))
        self._refused |= expired
        for key in gone:
            del self._shown[key]
        waiting = sorted(self._there - self._shown.keys() - self._refused - self._hidden)
        came, unread = list[DonorRecord](), max(0, len(waiting) - self._at_once)
        for key in waiting[: self._at_once]:
            is_enough = sum(len(record.tokens) for record in came) >= TOKENS_AT_ONCE
            record = None if is_enough else self._records.take(key)
            if record is None:
                unread += 1
            elif isinstance(record, Exception) or not self._can_use(record) or record.has_expired(now):
                self._refused.add(key)  # at least while the engine's namespace is this one
            else:
                self._shown[key] = record
                came.append(record)
        self._settled = not unread
        ends = (record.expires_unix_s for record in self._shown.values())
        self._next_end_s = min((end for end in ends if end is not None), default=None)
        return DonorChanges(tuple(came), tuple(sorted(gone)))

    def follow(self, engine: Namespace) -> None:
        """The engine's namespace is another now, as with new weights: other donors can be used than before."""
        if _strip_request(engine) != self._engine:
            self._engine = _strip_request(engine)
            self._refused &= self._void
            shown = self._shown.items()
            self._refused |= {key for key, record in shown if _strip_request(record.namespace) != self._engine}
            self._settled = False

    def refuse(self, key: str) -> None:
        """Never show this donor again: its KV cannot be used here."""
        self._void.add(key)
        self._refused.add(key)
        self._shown.pop(key, None)

    def refuse_all(self) -> None:
        """Never show again what is there now."""
        self._listing.refresh()
        self._listed_s = -self._every_s
        self._look()
        for key in self._there:
            self.refuse(key)

    def hide(self, key: str) -> None:
        """Do not show this donor for now: this engine has published it and still holds it itself."""
        self._hidden.add(key)
        self._settled = self._settled and key not in self._shown

    def forget_hidden(self, owned: Set[str]) -> None:
        """Forget which donors are hidden of those that are not ``owned`` any more: they are not there."""
        self._hidden &= owned

    def unhide(self, key: str) -> None:
        """Show it again: this engine's own copy is gone."""
        self._hidden.discard(key)
        self._settled = False

    # -- parts -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        if not self._listing.is_running:
            if self._clock() - self._listed_s < self._every_s:
                return
            self._listed_s = self._clock()
        snapshot = self._listing.take()
        if snapshot is self._snapshot:
            return
        self._snapshot, self._settled = snapshot, False
        self._there = snapshot.list_complete(self._ranks)
        self._refused &= self._there
        self._void &= self._there
        self._records.forget_others(self._there)

    def _can_use(self, record: DonorRecord) -> bool:
        """Asked when a record is taken, not when it is read: the engine's namespace may be another by then."""
        same = _strip_request(record.namespace) == self._engine and record.ranks == self._ranks
        return same and len(record.tokens) > 0


def _strip_request(namespace: Namespace) -> Namespace:
    """What of a namespace is the engine's: a request adds its salt, its tenant and its adapter."""
    return replace(namespace, salt="", tenant="", adapter="")


# -- The owner of one writer's donors in the directory: it publishes records, keeps the budget, cleans up after the
# dead.
#
# One object an engine, in the process that knows the prompts; the engine's workers write the KV files
# (`DirectoryKv`).
#
# A writer removes only what it owns. When a process dies, what it left is whole (files get their names last) and
# stays readable; the next writer that looks takes over its lease and owns its donors from then on: they count
# against that writer's budget and leave it first, by their last use. What is not whole is removed. So whoever
# crashes however often, all writers together hold at most the sum of their budgets once each has looked.
#
# A full budget makes room by tenant (`semblend.fairness`): the tenant that holds most gives first, what it has not
# used for longest. A burst of one tenant takes nothing from a tenant that has its share or less.


LOOK_EVERY_S = 5.0
"""How often the folder is looked over for dead writers, withdrawn records and donors that never became whole."""
MANY = 64
"""Donors; a writer that owns more removes some more than it has to."""
MAX_LOOKS = 4
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

    ``listing`` lists the folder; without one, or without a thread of its own, it is listed in every `look_over`.
    ``thread`` removes KV files, which takes the kernel 0.1 ms a megabyte, and reads the records of dead writers; what
    it was still to remove when the process died is no whole donor, and removed by the next writer. Not thread-safe: a
    scheduler calls it between its steps.
    """

    def __init__(
        self,
        folder: PrivateFolder,
        budget_bytes: int,
        *,
        listing: DirectoryListing | None = None,
        thread: Background | None = None,
        ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        if budget_bytes < 0 or ranks < 1:
            raise InputError(f"budget_bytes={budget_bytes}, ranks={ranks}", hint="bytes from 0, ranks from 1")
        self.budget_bytes, self.ranks = budget_bytes, ranks
        self._folder, self._clock, self._wall_clock = folder, clock, wall_clock
        self._thread, self._records = thread, RecordReader(folder, thread)
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
        self._remove_files(*(kv_name(key, rank, owned.ranks) for rank in range(owned.ranks)), withdrawn_name(key))
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
            # A rank was still writing when its donor was removed, or too many files waited to be removed.
            self._remove_files(*(name for name in snapshot.find(key).names if not is_part(name)))
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
        left, unread = 0, 0
        for key in keys:
            one = snapshot.find(key)
            left += one.complete
            if one.complete and key not in self._owned:
                unread += not self._own(key, one)
            self._remove_files(*(name for name in one.names if is_part(name) or not one.complete))
        self._remove_files(*snapshot.loose.get(writer, ()))
        if not unread:
            self._taken_in[writer] = keys
        if not left:
            self._taken_in.pop(writer, None)
            lease = self._adopted.pop(writer, None)
            if lease is not None:
                lease.end()

    def _own(self, key: str, one: Listed) -> bool:
        """Own a donor that a dead writer left, or remove it where it is damaged; False while its record is read."""
        record = self._records.take(key)
        if record is None:
            return False
        try:
            if isinstance(record, Exception):
                raise record
            nbytes = self._measure(key, one.ranks)
            owned = _Owned(nbytes, one.ranks, record.namespace.tenant, self._clock(), self._read_last_use(key))
        except (OSError, ValueError, KeyError, TypeError):
            self._owned[key] = _Owned(0, one.ranks, "", self._clock())
            self.remove(key)
            return True
        self._add(record, owned)
        return True

    def _remove_files(self, *names: str) -> None:
        """By the thread, where there is one; what it does not take is found again by `look_over`."""

        def remove() -> None:
            for name in names:
                self._folder.remove(name)

        if self._thread is None:
            remove()
        elif names:
            self._thread.submit(remove)

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
        for _ in range(MAX_LOOKS):
            moved, leaving, freed = False, [], 0
            order = EvictionOrder[str]()
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


# -- The scheduler's side of the donor directory: what this engine publishes, and what its neighbours have published.
#
# An own donor is hidden from this engine while its workers hold its KV, and shown again, under its key, once they do
# not: it is then read back from the directory as a neighbour would read it.


MAX_FILES = 1024
"""Records to read and donors to remove that wait for their turn; the rest is found again by the next look."""
HEADER_BYTES = 4096
"""Of a KV file, at most, where keys rotate alike for all prompts; the true size replaces it once a file is there."""


class SharedDonors:
    """Publishes donors of one engine and follows those of the others. Not thread-safe: the scheduler calls it."""

    def __init__(
        self,
        path: str,
        budget_bytes: int,
        engine: Namespace,
        *,
        token_bytes: float,
        ranks: int = 1,
        ttl_s: float = 0.0,
        every_s: float = 1.0,
    ) -> None:
        """``token_bytes``: what the KV of one token takes in files, all ranks in sum.

        The folder is listed once in ``every_s``, by a thread, and another reads records and removes files; where that
        is 0, everything is done in `poll`.
        """
        self._folder = PrivateFolder(path)
        self._token_bytes = token_bytes
        self._listing = DirectoryListing(self._folder)
        self._thread = Background("donor-directory", MAX_FILES) if every_s else None
        common: dict[str, Any] = {"listing": self._listing, "thread": self._thread, "ranks": ranks}
        self._writer = DirectoryWriter(self._folder, budget_bytes, **common)
        self._watch = DirectoryWatch(self._folder, engine, every_s=every_s, **common)
        if every_s:
            self._listing.start(every_s)
        self._ttl_s = ttl_s
        self._keys: dict[str, str] = {}  # donor -> the key it was published under
        self._resetting = False
        self.knows_weights = False

    def publish(self, donor_id: str, generation: int, prompt: Prompt) -> Publication | None:
        """The order for every rank to write its part of a donor; None where it does not fit."""
        nbytes = math.ceil(self._token_bytes * len(prompt)) + HEADER_BYTES * self._writer.ranks
        record = self._writer.publish(prompt, donor_id, nbytes, ttl_s=self._ttl_s)
        if record is None:
            return None
        self._keys[donor_id] = record.key
        self._watch.hide(record.key)
        return Publication(donor_id, generation, record.key, record.tokens_digest)

    def take_back(self, donor_id: str) -> None:
        """An own donor could not be captured: its record goes."""
        if (key := self._keys.pop(donor_id, None)) is not None:
            self._writer.remove(key)

    def has_published(self, donor_id: str) -> bool:
        return donor_id in self._keys

    def refuse(self, key: str) -> None:
        """Do not show this donor again."""
        self._watch.refuse(key)

    def poll(self) -> DonorChanges:
        """Donors of the directory that came and went; lists the folder once a second at most."""
        if self._writer.look_over():
            self._watch.forget_hidden(self._writer.owned)
        return self._watch.poll()

    @property
    def is_settled(self) -> bool:
        """Whether the last poll has looked at all that was listed; a poll reads few records."""
        return self._watch.is_settled

    def follow(self, engine: Namespace) -> None:
        """The engine's namespace is another now, as with new weights."""
        self.knows_weights = True
        self._watch.follow(engine)

    def touch(self, donor_id: str) -> None:
        """A donor is used: it stays in the directory for longer."""
        key = donor_id if is_key(donor_id) else self._keys.get(donor_id)
        if key is not None:
            self._writer.touch(key)

    def note_eviction(self, donor_id: str, reason: EvictionReason) -> None:
        """A donor left this engine's store.

        ``engine``: its KV is gone here; an own one may still be read from the directory, one of the directory may not.
        ``forgotten``: somebody wants it gone, so it goes from the directory too, whoever wrote it. ``superseded``: all
        of it stands in a newer donor, which is published in its place.
        """
        own = self._keys.pop(donor_id, None)
        key = own or (donor_id if is_key(donor_id) else None)
        if key is None or self._resetting:
            return
        if reason == "forgotten":
            self._writer.withdraw(key)
        elif own is not None and reason in ("expired", "superseded"):
            self._writer.remove(key)
        elif own is not None and reason in ("engine", "replaced"):
            self._watch.unhide(key)
        elif own is None:
            self._watch.refuse(key)

    def reset(self, forget_all: Callable[[], object]) -> None:
        """This engine drops every donor: its own leave the directory, the neighbours' are not looked at again."""
        for key in self._keys.values():
            self._writer.remove(key)
        self._keys.clear()
        self._watch.refuse_all()
        self._resetting = True  # what is forgotten now is forgotten here only
        try:
            forget_all()
        finally:
            self._resetting = False

    def flush(self) -> None:
        """Wait until the records that the last poll missed are read, and what is to be removed is."""
        if self._thread is not None:
            self._thread.flush()

    def close(self) -> None:
        """Donors stay for the neighbours and for the next start."""
        self._listing.close()
        if self._thread is not None:
            self._thread.flush()
            self._thread.close()
        self._writer.close()
        self._folder.close()
