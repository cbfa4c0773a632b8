"""Whether a connector's verdict on a load was known to the scheduler before it scheduled any token behind that load."""

from __future__ import annotations

from typing import Any


class VerdictWatch:
    """Watches a scheduler and its connector.

    ``loads``: how often each request got blocks to load into. ``too_early``: requests of which tokens were scheduled
    before their load was over, so that a token may have been computed on KV that is rejected later. ``ahead``: the
    largest number of steps that were under way when another one was scheduled.
    """

    def __init__(self, scheduler: Any) -> None:
        self.loads: dict[str, int] = {}
        self.too_early: set[str] = set()
        self.invalid_blocks: set[int] = set()
        self.ahead = 0
        self._under_way = 0
        self._waiting: set[str] = set()
        self._scheduler, self._connector = scheduler, scheduler.connector
        self._names = ((scheduler, "schedule"), (scheduler, "update_from_output"))
        self._names += ((self._connector, "update_state_after_alloc"), (self._connector, "update_connector_output"))
        self._kept = [getattr(owner, name) for owner, name in self._names]
        for (owner, name), real in zip(self._names, self._kept, strict=True):
            setattr(owner, name, getattr(self, f"_{name}")(real))

    def close(self) -> None:
        for (owner, name), real in zip(self._names, self._kept, strict=True):
            setattr(owner, name, real)

    def _schedule(self, real: Any) -> Any:
        def schedule(*args: Any, **named: Any) -> Any:
            self.ahead = max(self.ahead, self._under_way)
            output = real(*args, **named)
            self._under_way += 1
            self.too_early |= self._waiting & output.num_scheduled_tokens.keys()
            return output

        return schedule

    def _update_from_output(self, real: Any) -> Any:
        def update_from_output(scheduler_output: Any, model_output: Any) -> Any:
            self._under_way -= 1
            found = model_output.kv_connector_output
            self.invalid_blocks |= set((found and found.invalid_block_ids) or ())
            return real(scheduler_output, model_output)

        return update_from_output

    def _update_state_after_alloc(self, real: Any) -> Any:
        def update_state_after_alloc(request: Any, blocks: Any, tokens: int) -> None:
            if tokens:
                name = request.request_id
                self.loads[name] = self.loads.get(name, 0) + 1
                self._waiting.add(name)
            real(request, blocks, tokens)

        return update_state_after_alloc

    def _update_connector_output(self, real: Any) -> Any:
        def update_connector_output(found: Any) -> None:
            self._waiting -= set(found.finished_recving or ())
            real(found)

        return update_connector_output
