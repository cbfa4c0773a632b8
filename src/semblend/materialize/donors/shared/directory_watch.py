"""What other writers have published: which donors came, which went. Cheap enough to be asked before every lookup.

The folder is listed at most once a second, and not at all while it has not changed. A record is read once, because a
key never names two donors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from semblend.materialize.donors.shared.donor_record import LARGEST_RECORD, DonorRecord, list_keys, record_name
from semblend.materialize.donors.shared.private_folder import PrivateFolder
from semblend.prompt import Namespace

log = logging.getLogger("semblend.donors")
SETTLED_NS = 100_000_000
"""A folder's time of change is no finer than a tick of the kernel: only one that is older than this is trusted."""


@dataclass(frozen=True, slots=True)
class DonorChanges:
    """Since the last poll: donors that can be used now, and keys of those that no longer can."""

    came: tuple[DonorRecord, ...] = ()
    went: tuple[str, ...] = ()


class DirectoryWatch:
    """Donors in ``folder`` that an engine of namespace ``engine`` with ``ranks`` ranks can use; not thread-safe.

    A request adds its salt, its tenant and its adapter to the engine's namespace, so those may be any.
    """

    def __init__(
        self,
        folder: PrivateFolder,
        engine: Namespace,
        *,
        ranks: int = 1,
        every_s: float = 1.0,
        at_once: int = 16,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._engine, self._ranks = folder, _strip_request(engine), ranks
        self._every_s, self._at_once, self._clock, self._wall_clock = every_s, at_once, clock, wall_clock
        self._hidden: set[str] = set()
        self._refused: set[str] = set()
        self._void: set[str] = set()  # refused, whatever the engine's namespace is
        self._there: set[str] = set()  # complete in the last listing
        self._shown: dict[str, DonorRecord] = {}
        self._listed_s = -every_s
        self._listed_ns = -1

    def poll(self) -> DonorChanges:
        """What changed; reads at most ``at_once`` records, so that the first poll of a full folder is short too."""
        self._list()
        now = self._wall_clock()
        gone = [key for key, record in self._shown.items() if not self._may_show(key) or record.has_expired(now)]
        for key in gone:
            if self._shown.pop(key).has_expired(now):
                self._refused.add(key)
        waiting = sorted(key for key in self._there if key not in self._shown and self._may_show(key))
        came = []
        for key in waiting[: self._at_once]:
            record = self._read(key)
            if record is None or record.has_expired(now):
                self._refused.add(key)  # at least while the engine's namespace is this one
            else:
                self._shown[key] = record
                came.append(record)
        return DonorChanges(tuple(came), tuple(gone))

    def follow(self, engine: Namespace) -> None:
        """The engine's namespace is another now, as with new weights: other donors can be used than before."""
        if _strip_request(engine) != self._engine:
            self._engine = _strip_request(engine)
            self._refused &= self._void
            shown = self._shown.items()
            self._refused |= {key for key, record in shown if _strip_request(record.namespace) != self._engine}

    def refuse(self, key: str) -> None:
        """Never show this donor again: its KV cannot be used here."""
        self._void.add(key)
        self._refused.add(key)
        self._shown.pop(key, None)

    def refuse_all(self) -> None:
        """Never show again what is there now."""
        self._listed_ns, self._listed_s = -1, -self._every_s
        self._list()
        for key in self._there:
            self.refuse(key)

    def hide(self, key: str) -> None:
        """Do not show this donor for now: this engine has published it and still holds it itself."""
        self._hidden.add(key)

    def forget_hidden(self, owned: Callable[[str], bool]) -> None:
        """Forget which donors are hidden of those that are not ``owned`` any more: they are not there."""
        self._hidden = {key for key in self._hidden if owned(key)}

    def unhide(self, key: str) -> None:
        """Show it again: this engine's own copy is gone."""
        self._hidden.discard(key)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _may_show(self, key: str) -> bool:
        return key in self._there and key not in self._refused and key not in self._hidden

    def _list(self) -> None:
        if self._clock() - self._listed_s < self._every_s:
            return
        self._listed_s = self._clock()
        changed = self._folder.changed_ns
        if changed == self._listed_ns:
            return
        self._there = {
            key
            for key, one in list_keys(self._folder.list_names()).items()
            if one.complete and one.ranks == self._ranks
        }
        self._refused &= self._there
        self._void &= self._there
        # A change within the same tick as this listing would not move the time: list again next time.
        self._listed_ns = changed if time.time_ns() - changed > SETTLED_NS else -1

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
