"""What an operator may ask of the donors of a running engine: list them, keep some, forget some, by tenant.

A tenant of vLLM is a ``cache_salt``. It is shown as `name_tenant` shows it, never as it is.

Lists come from the donor store, which is safe for threads. Whatever changes donors is put in a queue that the scheduler
half empties in its own thread, before it looks anything up and once a step: so no command meets a step halfway.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from typing import Any

from semblend.discover.donor import Donor
from semblend.errors import InputError, SemBlendError
from semblend.facade import SemBlend

ACTIONS = ("list", "tenants", "pin", "unpin", "forget")
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class DonorCommand:
    """One of `ACTIONS`, for one donor, for the donors of one tenant (``""``: those without a salt), or for all."""

    action: str
    tenant: str | None = None
    donor_id: str | None = None
    everything: bool = False
    limit: int = 50

    @classmethod
    def parse(cls, given: Any) -> DonorCommand:
        """A command as it comes over the wire; unknown words in it are an error."""
        if not isinstance(given, Mapping) or not set(given) <= set(cls.__slots__):
            raise InputError("a command is an object with the known fields", hint=f"fields: {', '.join(cls.__slots__)}")
        command = cls(**{"action": "", **given})
        words = (command.tenant, command.donor_id)
        if command.action not in ACTIONS:
            raise InputError(f"unknown action {command.action!r}", hint=f"one of {', '.join(ACTIONS)}")
        if not all(word is None or isinstance(word, str) for word in words) or type(command.limit) is not int:
            raise InputError("tenant and donor_id are strings, limit is a whole number", hint="see docs/guides/vllm.md")
        if command.changes and sum((*(word is not None for word in words), command.everything is True)) != 1:
            raise InputError(f"{command.action} needs one of tenant, donor_id, everything", hint="say which donors")
        return command

    @property
    def changes(self) -> bool:
        return self.action in ("pin", "unpin", "forget")

    def chooses(self, donor: Donor) -> bool:
        """Whether the command is about this donor."""
        by_tenant = self.tenant is None or donor.namespace.tenant == self.tenant
        return by_tenant and (self.donor_id is None or donor.donor_id == self.donor_id)


class AdminDesk:
    """Takes commands from other threads; ``act`` does one to one donor, in the scheduler's thread.

    ``patience_s``: how long a caller waits for the scheduler. An idle engine has no steps: its caller is told that the
    command is queued, and it is done before anything else happens.
    """

    def __init__(
        self,
        semblend: SemBlend,
        act: Callable[[str, str], bool],
        *,
        patience_s: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._semblend, self._act, self._patience_s, self._clock = semblend, act, patience_s, clock
        self._queue: queue.SimpleQueue[tuple[DonorCommand, Future[int]]] = queue.SimpleQueue()

    def answer(self, given: Any) -> Answer:
        """What to tell whoever sent this; a mistake is an answer too. From any thread."""
        try:
            command = DonorCommand.parse(given)
            if command.changes:
                return {"ok": True, **self._order(command)}
            return {"ok": True, **(self._list(command) if command.action == "list" else self._sum_up())}
        except SemBlendError as error:
            return {"ok": False, "error": error.message, "hint": error.hint or ""}
        except Exception as error:
            return {"ok": False, "error": f"{type(error).__name__}: {error}", "hint": "the engine's log may say more"}

    def work_off(self) -> None:
        """Do what is queued; in the scheduler's thread."""
        while not self._queue.empty():
            command, done = self._queue.get()
            try:
                chosen = [donor.donor_id for donor in self._semblend.donors() if command.chooses(donor)]
                done.set_result(sum(self._act(command.action, donor_id) for donor_id in chosen))
            except Exception as error:  # it is the operator's to hear, not the scheduler's
                done.set_exception(error)

    def _order(self, command: DonorCommand) -> Answer:
        done: Future[int] = Future()
        self._queue.put((command, done))
        try:
            return {"action": command.action, "donors": done.result(self._patience_s), "queued": False}
        except NotYet:
            matching = sum(command.chooses(donor) for donor in self._semblend.donors())
            return {"action": command.action, "donors": matching, "queued": True}

    def _list(self, command: DonorCommand) -> Answer:
        chosen = [donor for donor in self._semblend.donors() if command.chooses(donor)]
        shown = chosen[-command.limit :] if command.limit > 0 else chosen
        return {"donors": [self._show(donor) for donor in reversed(shown)], "total": len(chosen)}

    def _show(self, donor: Donor) -> Answer:
        return {
            "donor_id": donor.donor_id,
            "tenant": donor.namespace.tenant,
            "namespace": donor.namespace.digest,
            "tokens": donor.token_count,
            "age_s": round(max(0.0, self._clock() - donor.created_unix_s), 1),
            "pinned": donor.pinned,
        }

    def _sum_up(self) -> Answer:
        return {"tenants": [{"tenant": name, **counts} for name, counts in _count(self._semblend.donors()).items()]}


def _count(donors: Iterable[Donor]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for donor in donors:
        counts = found.setdefault(donor.namespace.tenant, {"donors": 0, "tokens": 0, "pinned": 0})
        counts["donors"] += 1
        counts["tokens"] += donor.token_count
        counts["pinned"] += donor.pinned
    return found
