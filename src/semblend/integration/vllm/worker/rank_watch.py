"""Several ranks of one model: they begin together, and where one fails in work of ours the engine stops at once.

An exception alone does not stop it. vLLM's executor reads the ranks' answers in order, and those before the failed one
may wait for it in a collective, for five minutes. So the failed rank ends its process a moment after its exception. The
executor notices that, and would end the ranks that still wait by signals, after nine seconds; they end themselves.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from semblend.errors import RankError

log = logging.getLogger("vllm.semblend")

STOP_AFTER_S = 0.5
"""A rank ends so long after its exception: by then vLLM has logged it, and told it where that rank is asked."""


def meet_ranks(failed: bool, vllm_config: Any) -> tuple[bool, list[int]]:
    """Whether any rank has failed so far, and the other ranks' processes on this machine; all ranks call it at once."""
    if int(vllm_config.parallel_config.tensor_parallel_size) == 1:
        return failed, []
    import torch.distributed
    from vllm.distributed import get_tp_group

    ours = (socket.gethostname(), os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else "")
    group = get_tp_group().cpu_group
    said: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(said, (failed, ours, os.getpid()), group=group)
    others = [pid for _, place, pid in said if place == ours and pid != os.getpid()]
    return any(one for one, _, _ in said), others


class RankWatch:
    """Ends this process where another rank's ends while this one is in work that they do together."""

    def __init__(self, others: Sequence[int] = ()) -> None:
        self._works = False
        if others and hasattr(os, "pidfd_open"):
            threading.Thread(target=self._watch, args=(others,), name="semblend-ranks", daemon=True).start()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Work that ranks do together. A `RankError` in it ends the process soon, whoever catches it."""
        self._works = True
        try:
            yield
        except RankError as error:
            log.error("SemBlend: %s", error)
            threading.Thread(target=_end_soon, name="semblend-stop", daemon=True).start()
            raise
        finally:
            self._works = False

    def _watch(self, others: Sequence[int]) -> None:
        ended = select.poll()
        try:
            for pid in others:
                ended.register(os.pidfd_open(pid), select.POLLIN)
        except OSError as error:
            log.info("SemBlend cannot watch the other ranks: %s", error)
            return
        ended.poll()
        time.sleep(STOP_AFTER_S)
        if self._works:
            log.error("SemBlend: another rank has ended in the middle of a load: this one ends too")
            _end_soon()


def _end_soon() -> None:
    time.sleep(STOP_AFTER_S)
    logging.shutdown()
    os._exit(1)
