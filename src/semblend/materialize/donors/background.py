"""Work on files, beside the steps of an engine: a step, and a scheduler between two steps, wait for no file."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger("semblend.donors")

MAX_WAITING = 64
"""Jobs that wait for their turn; one that comes on top of so many is refused."""

NICE = 5
"""What computes goes first: on two busy cores a capture beside a file that is written took 0.4 s with it, 0.6 without.
At 10 it took 0.33, but a thread that is put off so often keeps Python's lock for up to 0.2 s."""


class Background:
    """Does jobs one after the other in a daemon thread, which the first one starts. Any thread may call any method.

    A job that fails is logged, and the next one is done.
    """

    def __init__(self, name: str, most: int = MAX_WAITING) -> None:
        self._name, self._closed = name, False
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(most)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, job: Callable[[], object]) -> bool:
        """Take a job, or say that too many wait; never blocks."""
        with self._lock:
            if self._closed:
                return False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name=self._name)
                self._thread.start()
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                return False
            return True

    def flush(self) -> None:
        """Wait until everything that was submitted is done."""
        self._jobs.join()

    def close(self) -> None:
        """Drop what waits, finish what is being done; safe to call twice."""
        with self._lock:
            thread, self._thread, self._closed = self._thread, None, True
        if thread is None:
            return
        with suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
                self._jobs.task_done()
        self._jobs.put(None)
        thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # the border of a thread of ours: what it did costs a donor, no request
                log.warning("%s: %s: %s", self._name, type(error).__name__, error, exc_info=True)
            finally:
                del job
                self._jobs.task_done()
        self._jobs.task_done()
