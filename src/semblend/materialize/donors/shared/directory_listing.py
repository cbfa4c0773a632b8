"""Which files lie in the donor directory. The folder is listed by a thread, and only names that came or went are read.

Thousands of donors are tens of thousands of names: reading all of them takes tens of milliseconds, which a scheduler
does not have between two steps. What it gets is a `Snapshot` that never changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from semblend.materialize.donors.shared.donor_record import Listed, describe_files, is_part, writer_of
from semblend.materialize.donors.shared.private_folder import PrivateFolder

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
