"""The half that lives beside vLLM's worker: it copies donor KV out, and brings it back to other positions.

    load      donor KV into the request's blocks, then what has to be computed, by the stock model, watched by the gate.
              Whatever goes wrong, the request's blocks are filled by a plain pass over all its tokens, before vLLM's
              forward pass of the step; if that fails too, vLLM is told that the blocks are invalid
    capture   after the step's forward pass: exact prompts become donors, in host memory, under a byte budget. On a GPU
              the copies are queued beside the next steps; a request that ends before its copy has arrived gives its
              blocks away, and the step that gets them is ordered behind the copy (`before_step`)

Nothing raises. What failed stands in the report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from semblend.errors import CapacityError
from semblend.integration.vllm.orders import Capture, Load, Loaded, Orders, Report
from semblend.materialize.blend.blender import Blender, PendingBlend
from semblend.materialize.blend.quality import Blended, Placed, QualitySettings
from semblend.materialize.contract import Model, Rows, slots_of_blocks
from semblend.materialize.donors.donor_kv import DonorKv
from semblend.materialize.kv.host_memory import Arrival
from semblend.materialize.kv.moves import Move
from semblend.materialize.kv.splice import splice
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan

log = logging.getLogger("vllm.semblend")


class WorkerHalf:
    """Loads and captures KV in the cache of ``model``, whose blocks hold ``block_tokens`` tokens; see the module.

    The model's layout is asked for at the first use: vLLM's backend is not ready before. ``warm_up_model`` compiles
    what a first request would wait for.

    ``queues``: loads of mode fast are left to the device and their verdict is read after the step. Only where vLLM
    recovers from a verdict that late: see `semblend.integration.vllm.startup_checks.may_queue_loads`.
    """

    def __init__(
        self,
        model: Model,
        block_tokens: int,
        quality: QualitySettings,
        *,
        host_bytes: int,
        device_bytes: int = 0,
        queues: bool = False,
        warm_up_model: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._block_tokens, self._warm_up_model = model, block_tokens, warm_up_model
        self._quality = quality
        self.donor_kv = DonorKv(
            device_bytes,
            host_bytes,
            on_evicted=self._on_evicted,
            device_type=model.device.type,
            rope=model.rope,
        )
        self.donor_kv.reserve(model.device)
        self._reading: dict[str, Arrival] = {}
        self._queues = queues
        self._under_way: list[tuple[Load, PendingBlend]] = []
        self._blenders: dict[str, Blender] = {}
        self._report = Report()
        self._invalid: set[int] = set()

    def warm_up(self) -> None:
        """Everything that a first request would wait for. Only on a GPU; a failure leaves it to that request.

        The first block of vLLM's pool is nobody's: its slots may be written.
        """
        if self._model.device.type != "cuda":
            return
        try:
            self._warm_up_model()
            self.donor_kv.capture("", 0, self._model.layout, torch.tensor([0]))
            donor = self.donor_kv.acquire("", 0)
            if donor is not None:
                there = torch.zeros(1, dtype=torch.int64, device=self._model.device)
                splice([Move(donor, 0, 1, there, shift=1)], self._model.layout, self._model.rope)
                self.donor_kv.release(donor)
            self.donor_kv.drop("")
        except Exception as error:
            log.warning("SemBlend was not warmed up: %s", error, exc_info=True)

    def before_step(self, orders: Orders) -> None:
        """Before anything of a step is computed: blocks that have a new owner may still be read by a capture."""
        for request_id in orders.freed:
            if (arrival := self._reading.pop(request_id, None)) is not None:
                arrival.wait()
        orders.freed = []
        if self._reading:
            self._reading = {name: arrival for name, arrival in self._reading.items() if not arrival.query()}

    def load(self, orders: Orders) -> None:
        """Before the step's forward pass."""
        for donor_id, generation in orders.drops:
            if self.donor_kv.holds(donor_id, generation):
                self.donor_kv.drop(donor_id)
        orders.drops = []  # a step calls us once before and, without loads, once after its forward pass
        for load in orders.loads:
            begun = self._begin(load)
            if self._queues and isinstance(begun, PendingBlend):
                self._under_way.append((load, begun))
            else:
                found = begun.finish() if isinstance(begun, PendingBlend) else begun
                self._report.loaded[load.request_id] = self._settle(load, found)
        orders.loads = []

    def finish_loads(self) -> None:
        """After the step's forward pass was queued: what became of the loads that it was queued behind."""
        under_way, self._under_way = self._under_way, []
        for load, begun in under_way:
            found = begun.finish()
            self._report.loaded[load.request_id] = (
                _report_load(load, found) if isinstance(found, Blended) else self._give_up(load, found)
            )

    def capture(self, orders: Orders) -> None:
        """After the step's forward pass."""
        self.finish_loads()
        for order in orders.captures:
            key = (order.donor_id, order.generation)
            loaded = self._report.loaded.get(order.donor_id)
            if loaded is not None and loaded.failed:  # its blocks hold nothing to keep: vLLM computes them again
                self._report.not_captured.add(key)
                continue
            try:
                self._capture(order)
                self._report.captured.add(key)
            except CapacityError as error:  # budgets and back-pressure at work
                self._report.not_captured.add(key)
                log.debug("SemBlend does not keep %s as a donor: %s", order.donor_id, error)
            except Exception as error:  # a donor less; the answer goes on
                self._report.not_captured.add(key)
                self._log_failure("capture", error, order.donor_id)
        if orders.captures:
            self._report.donor_bytes = dict(self.donor_kv.used_bytes)
        self._report.served.extend(orders.served)
        orders.captures, orders.served = [], []

    def take_report(self) -> Report | None:
        """What happened since the last call; None where nothing did."""
        report, self._report = self._report, Report()
        return report or None

    def take_invalid_blocks(self) -> set[int]:
        """Blocks that neither donors nor a pass of ours could fill: vLLM computes them."""
        self.finish_loads()
        invalid, self._invalid = self._invalid, set()
        return invalid

    def close(self) -> None:
        self.donor_kv.close()

    # -- parts -----------------------------------------------------------------------------------------------------

    def _get_blender(self, mode: str) -> Blender:
        """In mode fast only vLLM needs the end of the prompt; the gate of mode balanced looks at it."""
        if mode not in self._blenders:
            quality = replace(self._quality, question_tokens=1) if mode == "fast" else self._quality
            self._blenders[mode] = Blender(self._model, self.donor_kv, quality)
        return self._blenders[mode]

    def _begin(self, load: Load) -> PendingBlend | Blended | Decline:
        """Start a load: mode fast is queued on the device as one piece of work, every other mode is done at once."""
        try:
            blender = self._get_blender(load.mode)
            if load.mode == "fast":
                return blender.begin(*self._place(load))
            return blender.prepare(*self._place(load), mode=load.mode)
        except Exception as error:  # the blender itself does not raise; what is around it may
            log.warning("SemBlend: a load failed for %s: %s", load.request_id, error, exc_info=True)
            return Decline(DeclineReason.ERROR, f"{type(error).__name__}: {error}")

    def _settle(self, load: Load, found: Blended | Decline) -> Loaded:
        """Report a load that is right; fill the blocks of one that is not by a plain pass, before vLLM reads them."""
        if isinstance(found, Blended):
            return _report_load(load, found)
        if found.reason is DeclineReason.ERROR:
            self._report.errors.append(("materialize", found.detail, load.request_id))
        return self._compute_cold(load, found)

    def _place(self, load: Load) -> tuple[Placed, ReusePlan]:
        context = slots_of_blocks(load.block_ids, self._block_tokens, load.plan_tokens, self._model.device)
        # Widened by numpy: torch wakes all its threads for so many numbers, which takes milliseconds.
        tokens = torch.from_numpy(np.array(load.tokens, dtype=np.int64))
        return Placed(tokens, context), ReusePlan(load.spans, load.plan_tokens, load.exact_tokens)

    def _give_up(self, load: Load, why: Decline) -> Loaded:
        """Found out after vLLM went on with it: its blocks are invalid, and vLLM computes them again."""
        self._report.errors.append(("materialize", why.detail, load.request_id))
        return self._invalidate(load, why)

    def _invalidate(self, load: Load, why: Decline, compute_ms: float | None = None) -> Loaded:
        first = load.exact_tokens // self._block_tokens
        self._invalid.update(load.block_ids[first : -(-load.claim_end // self._block_tokens)])
        return Loaded(
            load.request_id,
            exact_tokens=load.exact_tokens,
            prefill_tokens=load.plan_tokens - load.exact_tokens,
            compute_ms=compute_ms,
            reason=why.reason,
            detail=why.detail,
            failed=True,
        )

    def _compute_cold(self, load: Load, why: Decline) -> Loaded:
        """No donor KV after all: compute every claimed token, as vLLM would have."""
        started = time.perf_counter()
        try:
            context = slots_of_blocks(load.block_ids, self._block_tokens, load.claim_end, self._model.device)
            tokens = torch.as_tensor(load.tokens[: load.claim_end])
            for start in range(load.exact_tokens, load.claim_end, self._quality.chunk_tokens):
                at = torch.arange(start, min(start + self._quality.chunk_tokens, load.claim_end))
                self._model.forward(Rows.of(tokens[at], at, context))
        except Exception as error:  # the last resort is vLLM's own recomputation
            self._log_failure("fallback", error, load.request_id)
            return self._invalidate(load, why, (time.perf_counter() - started) * 1e3)
        return Loaded(
            load.request_id,
            exact_tokens=load.exact_tokens,
            prefill_tokens=load.plan_tokens - load.exact_tokens,
            compute_ms=(time.perf_counter() - started) * 1e3,
            reason=why.reason,
            detail=why.detail,
        )

    def _capture(self, order: Capture) -> None:
        slots = slots_of_blocks(order.block_ids, self._block_tokens, order.tokens)  # to a GPU without waiting for it
        handle = self.donor_kv.capture(order.donor_id, order.generation, self._model.layout, slots, slots_stay=True)
        if handle.arrives is not None:
            self._reading[order.donor_id] = handle.arrives

    def _on_evicted(self, donor_id: str, generation: int, reason: str) -> None:
        log.debug("donor %s left the worker: %s", donor_id, reason)
        self._report.evicted.add((donor_id, generation))

    def _log_failure(self, where: str, error: BaseException, request_id: str) -> None:
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        log.warning("SemBlend: %s failed for %s: %s", where, request_id, message, exc_info=True)
        self._report.errors.append((where, message, request_id))


def _report_load(load: Load, blended: Blended) -> Loaded:
    all_computed = blended.reused_tokens == 0
    return Loaded(
        load.request_id,
        exact_tokens=blended.exact_tokens,
        reused_tokens=blended.reused_tokens,
        recomputed_tokens=blended.recomputed_tokens,
        prefill_tokens=blended.prefill_tokens,
        risk=blended.risk,
        escalations=blended.escalations,
        canary=blended.canary,
        load_ms=blended.load_ms,
        compute_ms=blended.compute_ms,
        reason=DeclineReason.QUALITY_RISK if all_computed else None,
        detail=f"all {blended.recomputed_tokens} donor tokens were computed after all" if all_computed else "",
        work=blended.work,
    )
