"""The scheduler's side of the donor directory: what this engine publishes, and what its neighbours have published.

An own donor is hidden from this engine while its workers hold its KV, and shown again, under its key, once they do not:
it is then read back from the directory as a neighbour would read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from semblend.discover.donor import EvictionReason
from semblend.materialize.donors.shared.directory_kv import GENERATION
from semblend.materialize.donors.shared.directory_listing import DirectoryListing
from semblend.materialize.donors.shared.directory_watch import DirectoryWatch, DonorChanges
from semblend.materialize.donors.shared.directory_writer import DirectoryWriter
from semblend.materialize.donors.shared.donor_record import is_key
from semblend.materialize.donors.shared.private_folder import PrivateFolder
from semblend.materialize.donors.shared.publisher import Publication
from semblend.prompt import Namespace, Prompt

__all__ = ["GENERATION", "SharedDonors"]
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

        The folder is listed once in ``every_s``, by a thread; where that is 0, in every `poll`.
        """
        self._folder = PrivateFolder(path)
        self._token_bytes = token_bytes
        self._listing = DirectoryListing(self._folder)
        self._writer = DirectoryWriter(self._folder, budget_bytes, listing=self._listing, ranks=ranks)
        self._watch = DirectoryWatch(self._folder, engine, listing=self._listing, ranks=ranks, every_s=every_s)
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
        ``forgotten``: somebody wants it gone, so it goes from the directory too, whoever wrote it.
        """
        own = self._keys.pop(donor_id, None)
        key = own or (donor_id if is_key(donor_id) else None)
        if key is None or self._resetting:
            return
        if reason == "forgotten":
            self._writer.withdraw(key)
        elif own is not None and reason == "expired":
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

    def close(self) -> None:
        """Donors stay for the neighbours and for the next start."""
        self._listing.close()
        self._writer.close()
        self._folder.close()
