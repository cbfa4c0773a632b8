"""What can go wrong with a donor in vLLM, on purpose.

    noise           the donor's KV is overwritten with random numbers
    truncated       half of the donor's KV is there
    evicted         the worker loses the donor after the scheduler has planned with it
    exception       our own pass over the model raises
    out of memory   our own pass over the model finds no memory
    unnoticed       noise is put into a request's blocks after its load was found right. The control: whoever compares
                    answers must see this one

Everything here happens inside one process: ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from semblend.materialize.contract import slots_of_blocks

NAMES = ("noise", "truncated", "evicted", "exception", "out of memory")
CONTROL = "unnoticed"
REASONS = {
    "noise": "validation_failed",
    "truncated": "validation_failed",
    "evicted": "stale",
    "exception": "error",
    "out of memory": "error",
}
"""What the receipt says."""


class Faults:
    """Both halves of an engine's connector, and how to spoil what they rely on."""

    def __init__(self, scheduler_connector: Any, worker_connector: Any) -> None:
        self._connector, self._worker = scheduler_connector, worker_connector._worker

    @contextmanager
    def spoil(self, name: str, make_donors: Callable[[], Any]) -> Iterator[None]:
        """Make donors, of which one thing is wrong then; what is not KV is whole again in the end."""
        donor_kv, model = self._worker.donor_kv, self._worker._model
        kept = [(donor_kv, "capture"), (model, "forward"), (self._connector, "build_connector_meta")]
        kept += [(self._worker, "take_finished")]
        real = [(owner, attribute, getattr(owner, attribute)) for owner, attribute in kept]
        try:
            if name == "truncated":
                donor_kv.capture = self._cut_captures(donor_kv.capture)
            make_donors()
            donor_kv.capture = real[0][2]
            if name == "noise":
                self.overwrite_donors()
            elif name == "evicted":
                self._connector.build_connector_meta = self._drop_after(self._connector.build_connector_meta)
            elif name in ("exception", "out of memory"):
                model.forward = self._fail(name)
            elif name == CONTROL:
                self._spoil_when_finished()
            yield
        finally:
            for owner, attribute, method in real:
                setattr(owner, attribute, method)

    def overwrite_donors(self) -> None:
        """Noise in place of every donor's KV, in whatever memory it is."""
        donor_kv = self._worker.donor_kv
        for entry in list(donor_kv._books.current.values()):
            held = donor_kv.acquire(entry.donor_id, entry.generation)
            with torch.inference_mode():
                for tensor in (held.k, held.v):
                    tensor.normal_() if tensor.is_floating_point() else tensor.random_(-120, 120)
            donor_kv.release(held)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _cut_captures(self, capture: Any) -> Any:
        def cut(donor_id: str, generation: int, layout: Any, slots: Any, *rest: Any, **named: Any) -> Any:
            return capture(donor_id, generation, layout, slots[: max(1, len(slots) // 2)], *rest, **named)

        return cut

    def _drop_after(self, build: Any) -> Any:
        def build_and_drop(scheduler_output: Any) -> Any:
            metadata = build(scheduler_output)
            if metadata.orders.loads:
                for donor_id in list(self._worker.donor_kv._books.current):
                    self._worker.donor_kv.drop(donor_id)
            return metadata

        return build_and_drop

    def _spoil_when_finished(self) -> None:
        loads: dict[str, Any] = {}
        build, take = self._connector.build_connector_meta, self._worker.take_finished

        def build_and_note(scheduler_output: Any) -> Any:
            metadata = build(scheduler_output)
            loads.update({load.request_id: load for load in metadata.orders.loads})
            return metadata

        def take_and_spoil() -> Any:
            finished = take()
            for load in [loads[name] for name in finished & loads.keys()]:
                self._overwrite_blocks(load)
            return finished

        self._connector.build_connector_meta, self._worker.take_finished = build_and_note, take_and_spoil

    def _overwrite_blocks(self, load: Any) -> None:
        layout, size = self._worker._model.layout, self._worker._block_tokens
        # What lies before the first donor token is exact, and other requests may find it in vLLM's cache.
        approximate = max(load.exact_tokens, min(span.target_start for span in load.spans))
        slots = slots_of_blocks(load.block_ids, size, load.claim_end, layout.device)[approximate:]
        for layer in range(layout.layers):
            k, v = layout.gather(layer, slots)
            layout.scatter(layer, slots, torch.randn_like(k), torch.randn_like(v))

    def _fail(self, name: str) -> Any:
        def forward(*args: Any, **named: Any) -> Any:
            del args, named
            if name == "exception":
                raise RuntimeError("broken on purpose")
            raise torch.OutOfMemoryError("no memory on purpose")

        return forward
