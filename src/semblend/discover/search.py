"""Fingerprint → Candidates: which seeds of the prompt the donors of its namespace hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semblend.discover.store import DonorStore, compute_namespace_key
from semblend.fingerprint.fingerprinter import Fingerprint
from semblend.prompt import Namespace


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """For each seed its newest posting, 0 where no donor has it; older postings follow in the index's chains.

    ``now`` is the one moment at which a whole lookup asks who has expired: a donor may not expire halfway through.
    """

    fingerprint: Fingerprint
    first: npt.NDArray[np.uint32]
    namespace_id: int
    now: int

    def __len__(self) -> int:
        """Seeds that some donor holds."""
        return int(np.count_nonzero(self.first))


_NO_POSTINGS = np.zeros(0, np.uint32)
_NO_FINGERPRINT = Fingerprint(np.empty(0, np.int64), np.empty(0, np.uint64))


class Search:
    """Searches the index. The caller holds the store's lock for as long as it uses the candidates."""

    def __init__(self, store: DonorStore) -> None:
        self._store = store

    def find_candidates(self, fingerprint: Fingerprint, within: Namespace) -> Candidates:
        """Find the seeds of a fingerprint that donors of the namespace ``within`` hold."""
        namespace_id = self._store.find_namespace_id(within)
        if namespace_id is None:
            return Candidates(_NO_FINGERPRINT, _NO_POSTINGS, -2, self._store.read_clock())
        first = self._store.index.probe(fingerprint.hashes, compute_namespace_key(namespace_id))
        return Candidates(fingerprint, first, namespace_id, self._store.read_clock())
