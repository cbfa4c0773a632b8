"""What other writers have published: which donors came, which went. Cheap enough to be asked before every lookup.

Donors are looked at when a new listing is there, or something else has changed. A record is read once, because a key
never names two donors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from semblend.materialize.donors.shared.directory_listing import DirectoryListing, Snapshot
from semblend.materialize.donors.shared.donor_record import LARGEST_RECORD, DonorRecord, record_name
from semblend.materialize.donors.shared.private_folder import PrivateFolder
from semblend.prompt import Namespace

log = logging.getLogger("semblend.donors")


@dataclass(frozen=True, slots=True)
class DonorChanges:
    """Since the last poll: donors that can be used now, and keys of those that no longer can."""

    came: tuple[DonorRecord, ...] = ()
    went: tuple[str, ...] = ()


class DirectoryWatch:
    """Donors in ``folder`` that an engine of namespace ``engine`` with ``ranks`` ranks can use; not thread-safe.

    A request adds its salt, its tenant and its adapter to the engine's namespace, so those may be any. ``listing``
    lists the folder; where it has no thread, it is asked to once in ``every_s``.
    """

    def __init__(
        self,
        folder: PrivateFolder,
        engine: Namespace,
        *,
        listing: DirectoryListing | None = None,
        ranks: int = 1,
        every_s: float = 1.0,
        at_once: int = 16,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._engine, self._ranks = folder, _strip_request(engine), ranks
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
        """What changed; reads at most ``at_once`` records, so that the first poll of a full folder is short too."""
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
        came = []
        for key in waiting[: self._at_once]:
            record = self._read(key)
            if record is None or record.has_expired(now):
                self._refused.add(key)  # at least while the engine's namespace is this one
            else:
                self._shown[key] = record
                came.append(record)
        self._settled = len(waiting) <= self._at_once
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

    def _read(self, key: str) -> DonorRecord | None:
        try:
            record = DonorRecord.decode(self._folder.read(record_name(key), LARGEST_RECORD), key)
        except FileNotFoundError:  # evicted since it was listed
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("published donor %s is refused: %s", key, error)
            return None
        usable = _strip_request(record.namespace) == self._engine and record.ranks == self._ranks
        return record if usable and len(record.tokens) else None


def _strip_request(namespace: Namespace) -> Namespace:
    """What of a namespace is the engine's: a request adds its salt, its tenant and its adapter."""
    return replace(namespace, salt="", tenant="", adapter="")
