"""Publishes donors in a thread of its own: a step of the engine does not wait for a file."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from semblend.errors import SemBlendError

log = logging.getLogger("semblend.donors")
MOST_WAITING = 64
"""Donors; one that comes on top of so many is not published."""


@dataclass(frozen=True, slots=True)
class Publication:
    """Write the KV of a captured donor into the directory, under ``key``."""

    donor_id: str
    generation: int
    key: str
    tokens_digest: str


class Publishable(Protocol):
    """What a publisher needs of `DonorKv`."""

    def publish(self, donor_id: str, generation: int, key: str, tokens_digest: str) -> int: ...


class Publisher:
    """Writes publications one after the other. A failure costs the neighbours a donor, and nothing else."""

    def __init__(self, donors: Publishable) -> None:
        self._donors = donors
        self._waiting: queue.Queue[tuple[Publication, Callable[[], bool]] | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self.last_failure: Exception | None = None

    def submit(self, publication: Publication, is_valid: Callable[[], bool] = lambda: True) -> bool:
        """Take it, or say that too many wait; never blocks. ``is_valid`` is asked when it is its turn."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="donor-publish")
            self._thread.start()
        try:
            self._waiting.put_nowait((publication, is_valid))
        except queue.Full:
            log.info("donor %s is not published: %d wait already", publication.donor_id, MOST_WAITING)
            return False
        return True

    def flush(self) -> None:
        """Wait until everything that was submitted is written or given up."""
        self._waiting.join()

    def close(self) -> None:
        """Drop what waits, finish what is being written."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        while not self._waiting.empty():
            try:
                self._waiting.get_nowait()
                self._waiting.task_done()
            except queue.Empty:
                break
        self._waiting.put(None)
        thread.join()

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            one, is_valid = waiting
            try:
                if is_valid():
                    self._donors.publish(one.donor_id, one.generation, one.key, one.tokens_digest)
                else:
                    log.warning("donor %s is not published: the weights have changed", one.donor_id)
            except (OSError, SemBlendError, RuntimeError, MemoryError) as error:
                self.last_failure = error
                log.warning("donor %s is not published: %s", one.donor_id, error)
            finally:
                self._waiting.task_done()
        self._waiting.task_done()
