"""Finds donors that *look* like a prompt: evidence for placement and telemetry, never permission to reuse.

Embedding takes milliseconds to seconds, so one background thread embeds the donors: `SimilarityIndex.add` only queues.
A full queue drops the new donor and counts it, because a slow embedder may cost evidence and must never cost a request.
Each namespace has indexes of its own: a search cannot see another namespace, however similar two tenants' prompts are.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from semblend.errors import MissingDependencyError
from semblend.fingerprint.embedder import Embedder
from semblend.fingerprint.simhash import Sketch, count_differing_bits, estimate_overlap, make_sketch
from semblend.plan.reuse_plan import Similar
from semblend.prompt import Namespace, Prompt

Vector = npt.NDArray[np.float32]
Keys = npt.NDArray[np.int64]
Found = tuple[Keys, Vector]  # keys and their cosines, best first, equal cosines by key

# 20 of 64 bits stand for a cosine of 0.56. One unrelated prompt in 800 passes (32 bits differ, give or take 4).
MAX_DIFFERING_BITS = 20
MAX_SETTLED = 64  # sketches compared in full per search
_FIRST_ROWS = 64


class _KeyedRows:
    """Rows of one array by key; doubled when full, and a removal moves the last row. The owner locks it."""

    def __init__(self, empty: npt.NDArray[Any]) -> None:
        self._rows = empty
        self._keys: Keys = np.zeros(len(empty), dtype=np.int64)
        self._row_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._row_of)

    def add(self, key: int, row: Any) -> None:
        """Keep a row under a key; a key that is already there is replaced."""
        at = self._row_of.get(key, len(self))
        if at == len(self._keys):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
            self._keys = np.concatenate([self._keys, np.zeros_like(self._keys)])
        self._rows[at], self._keys[at], self._row_of[key] = row, key, at

    def remove(self, key: int) -> bool:
        """Remove a key; return whether it was there."""
        at = self._row_of.pop(key, None)
        if at is None:
            return False
        last = len(self)
        if at != last:
            self._rows[at], self._keys[at] = self._rows[last], self._keys[last]
            self._row_of[int(self._keys[at])] = at
        return True


class BruteForceIndex(_KeyedRows):
    """The nearest unit vectors by cosine, exactly: compares every vector in one matrix product."""

    def __init__(self, dimension: int) -> None:
        super().__init__(np.zeros((_FIRST_ROWS, dimension), dtype=np.float32))

    def search(self, vector: Vector, k: int) -> Found:
        """Return the ``k`` nearest."""
        count = len(self)
        k = min(k, count)
        if k <= 0:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        cosines = self._rows[:count] @ vector
        worst = np.partition(cosines, count - k)[count - k]
        near = np.flatnonzero(cosines >= worst)  # more than k where cosines tie: the sort below decides by key
        return sort_best_first(self._keys[near], cosines[near], k)

    def copy_items(self) -> tuple[Keys, Vector]:
        """Return copies of all keys and vectors."""
        return self._keys[: len(self)].copy(), self._rows[: len(self)].copy()


class UsearchIndex:
    """An HNSW graph (usearch): search in logarithmic time, nearly always the true neighbours.

    Vectors are kept in half precision: half the bytes at no measurable loss (docs/research/decisions/evidence.md).
    """

    def __init__(self, dimension: int) -> None:
        try:
            from usearch.index import Index
        except ImportError:
            raise MissingDependencyError(
                "usearch is not installed", hint="pip install 'semblend-suite[embedder]'"
            ) from None
        self._index: Any = Index(ndim=dimension, metric="cos", dtype="f16")

    def __len__(self) -> int:
        return len(self._index)

    def add(self, key: int, vector: Vector) -> None:
        """Keep a vector under a key; a key that is already there is replaced."""
        self.remove(key)
        self._index.add(key, vector, threads=1)

    def remove(self, key: int) -> bool:
        """Remove a key; return whether it was there."""
        if key not in self._index:
            return False
        self._index.remove(key)
        return True

    def search(self, vector: Vector, k: int) -> Found:
        """Return the ``k`` nearest."""
        if k <= 0 or not len(self):
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
        matches = self._index.search(vector, min(k, len(self)), threads=1)
        keys = np.asarray(matches.keys, dtype=np.int64)
        cosines = 1.0 - np.asarray(matches.distances, dtype=np.float32)
        return sort_best_first(keys, cosines, k)


def sort_best_first(keys: Keys, cosines: Vector, k: int) -> Found:
    """Return the ``k`` highest cosines with their keys, highest first; equal cosines by key."""
    order = np.lexsort((keys, -cosines))[:k]
    return keys[order], cosines[order]


class SketchIndex(_KeyedRows):
    """Near-duplicate prompts: simhash filters all donors at once, min-hash decides about those that pass."""

    def __init__(self) -> None:
        super().__init__(np.zeros(_FIRST_ROWS, dtype=np.uint64))
        self._sketches: dict[int, Sketch] = {}

    def add(self, key: int, row: Sketch) -> None:
        super().add(key, row.simhash)
        self._sketches[key] = row

    def remove(self, key: int) -> bool:
        self._sketches.pop(key, None)
        return super().remove(key)

    def search(self, sketch: Sketch, k: int) -> tuple[tuple[int, float], ...]:
        """Return the ``k`` keys with the largest overlap, as (key, overlap), best first, equal overlaps by key."""
        differing = count_differing_bits(sketch.simhash, self._rows[: len(self)])
        near = np.flatnonzero(differing <= MAX_DIFFERING_BITS)
        nearest = near[np.lexsort((self._keys[near], differing[near]))[:MAX_SETTLED]]
        settled = [(key, estimate_overlap(sketch, self._sketches[key])) for key in self._keys[nearest].tolist()]
        return tuple(sorted(settled, key=lambda pair: (-pair[1], pair[0]))[:k])


SIMHASH = "simhash"
IDLE_S = 5.0


@dataclass(frozen=True, slots=True)
class SimilarityStats:
    """Counters since the start, and the present sizes."""

    donors: int = 0
    queued: int = 0
    embedded: int = 0
    dropped: int = 0  # the queue was full
    without_vector: int = 0  # the embedder had nothing to embed, such as a text model and a prompt without text
    over_budget: int = 0  # searches that did not embed because it would take too long
    errors: int = 0
    mean_embed_ms: float | None = None


@dataclass(slots=True)
class _Shelf:
    """All that is kept for one namespace. A key is the ticket number under which a donor was added."""

    vectors: BruteForceIndex | UsearchIndex
    sketches: SketchIndex = field(default_factory=SketchIndex)
    donor_of: dict[int, str] = field(default_factory=dict)


class _Job(NamedTuple):
    donor_id: str
    ticket: int
    prompt: Prompt


class SimilarityIndex:
    """Finds similar donors within a namespace, at ``min_similarity`` or above.

    >>> from semblend.fingerprint.embedder import LexicalEmbedder
    >>> evidence = SimilarityIndex(LexicalEmbedder(), min_similarity=0.6)
    >>> evidence.add("req-1", Prompt(range(100)))
    >>> evidence.flush(timeout=10)
    True
    >>> [(found.donor_id, found.source) for found in evidence.find_similar(Prompt(range(5, 100)))]
    [('req-1', 'lexical')]
    >>> evidence.close()
    """

    def __init__(
        self,
        embedder: Embedder,
        *,
        min_similarity: float,
        fuzzy: bool = False,
        use_usearch_from: int = 5000,
        max_queued: int = 256,
    ) -> None:
        """``fuzzy``: near-duplicates by token sketches count too."""
        self._embedder = embedder
        self._min_similarity = min_similarity
        self._fuzzy = fuzzy
        self._use_usearch_from = use_usearch_from
        self._max_queued = max_queued
        self._idle = not fuzzy and embedder.dimension == 0  # nothing could ever be found
        self._changed = threading.Condition()  # guards everything below
        self._shelves: dict[Namespace, _Shelf] = {}
        self._wanted: dict[str, tuple[int, Namespace]] = {}  # donor -> its latest ticket, queued or on a shelf
        self._queue: deque[_Job] = deque()
        self._working = False
        self._closed = False
        self._next_ticket = 0
        self._worker: threading.Thread | None = None
        self._clock = _EmbedClock()
        self._counts = SimilarityStats()
        self.last_error: BaseException | None = None

    @property
    def stats(self) -> SimilarityStats:
        """Counters and sizes at this moment."""
        with self._changed:
            donors = sum(len(shelf.donor_of) for shelf in self._shelves.values())
            queued = len(self._queue) + self._working
            return replace(self._counts, donors=donors, queued=queued, mean_embed_ms=self._clock.mean_ms)

    def add(self, donor_id: str, prompt: Prompt) -> None:
        """Queue a donor; what was known under the same id is removed at once. Returns without waiting."""
        if self._idle:
            return
        with self._changed:
            self._forget(donor_id)
            if self._closed:
                return
            if len(self._queue) >= self._max_queued:
                self._count("dropped")
                return
            self._next_ticket += 1
            self._wanted[donor_id] = (self._next_ticket, prompt.namespace)
            self._queue.append(_Job(donor_id, self._next_ticket, prompt))
            if self._worker is None or not self._worker.is_alive():  # not alive: this process was forked
                self._working = False
                self._worker = threading.Thread(target=self._work, name="semblend-evidence", daemon=True)
                self._worker.start()
            self._changed.notify_all()

    def remove(self, donor_id: str) -> None:
        """Forget a donor, also one that is queued or being embedded right now."""
        with self._changed:
            self._forget(donor_id)

    def find_similar(self, prompt: Prompt, limit: int = 5, *, budget_ms: float | None = None) -> tuple[Similar, ...]:
        """Find the most similar donors of the prompt's namespace, best first, equal ones by donor id.

        An embedder whose mean time exceeds ``budget_ms`` is not called. Never raises for an embedder's fault: it is
        counted, kept in ``last_error``, and there is less evidence.
        """
        with self._changed:
            shelf = self._shelves.get(prompt.namespace)
            wants_vector = shelf is not None and len(shelf.vectors) > 0 and self._can_afford(budget_ms)
        if shelf is None or limit < 1:
            return ()
        vector = self._try_embed(prompt) if wants_vector else None
        query_sketch = make_sketch(prompt.token_ids) if self._fuzzy else None
        with self._changed:  # a shelf that was emptied meanwhile finds nothing, and that is right
            try:
                found = self._search(shelf, vector, query_sketch, limit)
            except Exception as error:  # an index's fault, like an embedder's, costs evidence and not the request
                self._record_error(error)
                return ()
        found.sort(key=lambda similar: (-similar.similarity, similar.donor_id))
        return tuple(found[:limit])

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the queue is empty; False if ``timeout`` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._working, timeout)

    def close(self, timeout: float | None = 5.0) -> None:
        """Stop the thread and drop everything; later calls do nothing and find nothing."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._wanted.clear()
            self._shelves.clear()
            self._changed.notify_all()
            worker = self._worker
        if worker is not None and worker is not threading.current_thread():
            worker.join(timeout)

    # The background thread.

    def _work(self) -> None:
        """Take jobs until none is left: the loop of the background thread."""
        while (job := self._take_job()) is not None:
            try:
                self._take_in(job)
            except Exception as error:  # a fault of an embedder or an index costs this donor's evidence, no more
                self._record_error(error)
                with self._changed:
                    if self._is_wanted(job):
                        self._forget(job.donor_id)
            finally:
                with self._changed:
                    self._working = False
                    self._changed.notify_all()

    def _take_job(self) -> _Job | None:
        """Wait for the next job; None if the thread should end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed, IDLE_S)
            if self._closed or not self._queue:
                self._worker = None  # the next `add` starts another; an unused one keeps no thread
                return None
            self._working = True
            return self._queue.popleft()

    def _take_in(self, job: _Job) -> None:
        """Embed one donor and add it to its namespace, unless it was removed meanwhile."""
        if not self._is_wanted(job):
            return
        job_sketch = make_sketch(job.prompt.token_ids) if self._fuzzy else None
        vector = self._try_embed(job.prompt) if self._embedder.dimension else None
        with self._changed:
            if not self._is_wanted(job):  # removed or replaced while it was embedded
                return
            if vector is None and job_sketch is None:
                del self._wanted[job.donor_id]
                return
            self._shelve(job, vector, job_sketch)
        self._move_to_usearch_if_large(job.prompt.namespace)

    def _is_wanted(self, job: _Job) -> bool:
        """Whether a job's donor has been neither removed nor replaced."""
        with self._changed:
            return self._wanted.get(job.donor_id) == (job.ticket, job.prompt.namespace)

    def _shelve(self, job: _Job, vector: Vector | None, job_sketch: Sketch | None) -> None:
        """Add a donor's vector and sketch to its namespace."""
        shelf = self._shelves.get(job.prompt.namespace)
        if shelf is None:
            shelf = self._shelves[job.prompt.namespace] = _Shelf(BruteForceIndex(self._embedder.dimension))
        if vector is not None:
            shelf.vectors.add(job.ticket, vector)
        if job_sketch is not None:
            shelf.sketches.add(job.ticket, job_sketch)
        shelf.donor_of[job.ticket] = job.donor_id  # last: a search shows only donors that are on this list

    def _move_to_usearch_if_large(self, namespace: Namespace) -> None:
        """Move a large namespace to usearch. Only this thread adds, so the slow building needs no lock."""
        with self._changed:
            shelf = self._shelves.get(namespace)
            if shelf is None or len(shelf.vectors) < self._use_usearch_from:
                return
            if not isinstance(shelf.vectors, BruteForceIndex):
                return
            keys, vectors = shelf.vectors.copy_items()
        try:
            index = UsearchIndex(self._embedder.dimension)
        except MissingDependencyError:
            self._use_usearch_from = 2**63  # the exact search stays: slower with many donors, never wrong
            return
        for key, vector in zip(keys.tolist(), vectors, strict=True):
            index.add(key, vector)
        with self._changed:
            for key in keys.tolist():
                if key not in shelf.donor_of:  # removed while the graph was built
                    index.remove(key)
            shelf.vectors = index

    # Shared; those without a lock of their own are called with `_changed` held.

    def _search(self, shelf: _Shelf, vector: Vector | None, query_sketch: Sketch | None, limit: int) -> list[Similar]:
        """Search both indexes of a namespace; return the better result of each donor."""
        best: dict[str, Similar] = {}
        offers: list[tuple[int, float, str]] = []
        if query_sketch is not None:
            offers += [(key, share, SIMHASH) for key, share in shelf.sketches.search(query_sketch, limit)]
        if vector is not None:
            keys, cosines = shelf.vectors.search(vector, limit)
            offers += [(k, c, self._embedder.name) for k, c in zip(keys.tolist(), cosines.tolist(), strict=True)]
        for key, similarity, source in offers:
            donor_id = shelf.donor_of.get(key)
            if donor_id is None or not similarity >= self._min_similarity:  # NaN is no evidence either
                continue
            if donor_id not in best or best[donor_id].similarity < similarity:
                best[donor_id] = Similar(donor_id, min(similarity, 1.0), source)
        return list(best.values())

    def _forget(self, donor_id: str) -> None:
        """Remove a donor from the queue's list and from its namespace."""
        ticket, namespace = self._wanted.pop(donor_id, (0, None))
        shelf = self._shelves.get(namespace) if namespace is not None else None
        if shelf is None or shelf.donor_of.pop(ticket, None) is None:
            return
        shelf.vectors.remove(ticket)
        shelf.sketches.remove(ticket)
        if not shelf.donor_of and namespace is not None:
            del self._shelves[namespace]

    def _can_afford(self, budget_ms: float | None) -> bool:
        """Whether embedding fits into the time budget; counts a search that does not."""
        mean_ms = self._clock.mean_ms
        if budget_ms is None or mean_ms is None or mean_ms <= budget_ms:
            return True
        self._count("over_budget")
        return False

    def _try_embed(self, prompt: Prompt) -> Vector | None:
        """Embed a prompt; None if the embedder fails or has nothing to embed."""
        start = time.perf_counter()
        try:
            vector = self._embedder.embed(prompt)
        except Exception as error:  # any embedder, any fault: evidence is missing, the request goes on
            self._record_error(error)
            return None
        with self._changed:
            self._count("without_vector" if vector is None else "embedded")
            if vector is not None:
                self._clock.record((time.perf_counter() - start) * 1000.0)
        return vector

    def _record_error(self, error: BaseException) -> None:
        """Count a fault and keep it."""
        with self._changed:
            self._count("errors")
            self.last_error = error

    def _count(self, name: str) -> None:
        """Add one to a counter."""
        self._counts = replace(self._counts, **{name: getattr(self._counts, name) + 1})


class _EmbedClock:
    """A moving mean of embedding times. The first one includes loading the model and is dropped."""

    weight = 0.2

    def __init__(self) -> None:
        self.mean_ms: float | None = None
        self._seen = 0

    def record(self, ms: float) -> None:
        """Add one embedding time in ms."""
        self._seen += 1
        if self.mean_ms is None or self._seen == 2:
            self.mean_ms = ms
        else:
            self.mean_ms += self.weight * (ms - self.mean_ms)
