"""The half that lives beside vLLM's worker: it copies donor KV out, and brings it back to other positions.

    load      donor KV into the request's blocks, then what has to be computed, by the stock model, watched by the gate;
              piece by piece, a part of each step (`load_queue`), before the step's forward pass. A load that is refused
              or fails is told as invalid blocks, in the step in which it ends: vLLM has computed nothing on them, and
              prefills the prompt itself
    capture   after the step's forward pass: exact prompts become donors, in host memory, under a byte budget. On a GPU
              the copies are queued beside the next steps; a request that ends before its copy has arrived gives its
              blocks away, and the step that gets them is ordered behind the copy (`before_step`)

Nothing raises. What failed stands in the report.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch

from semblend.errors import CapacityError
from semblend.integration.vllm.orders import Capture, Load, Loaded, Orders, Report
from semblend.integration.vllm.worker.load_queue import LoadQueue, Outcome
from semblend.materialize.blend.blender import STAGED_BYTES, Blender
from semblend.materialize.blend.pass_cost import MANY_ROWS, measure_pass_rows
from semblend.materialize.blend.pieces import Pace, Pieces
from semblend.materialize.blend.quality import Blended, Placed, QualitySettings, Rejected
from semblend.materialize.blend.ranks import Ranks
from semblend.materialize.contract import Model, slots_of_blocks
from semblend.materialize.donors.donor_kv import DonorKv
from semblend.materialize.donors.shared.directory_kv import DirectoryKv
from semblend.materialize.donors.shared.publisher import Publication, Publisher
from semblend.materialize.kv.host_memory import Arrival
from semblend.materialize.kv.moves import DonorTensors, Move
from semblend.materialize.kv.splice import splice
from semblend.materialize.weights_watch import WeightsWatch
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.quality import find_path

log = logging.getLogger("vllm.semblend")

PASSES_OF_A_LOAD = 2
"""A load costs a pass, and about as much again: a step of the engine around it, and the look at the donor's KV."""


class WorkerHalf:
    """Loads and captures KV in the cache of ``model``, whose blocks hold ``block_tokens`` tokens; see the module.

    The model's layout is asked for at the first use: vLLM's backend is not ready before. ``warm_up_model`` compiles
    what a first request would wait for.

    With ``quality.piece_ms`` loads are done in pieces; how long those are, a step's orders say.
    """

    def __init__(
        self,
        model: Model,
        block_tokens: int,
        quality: QualitySettings,
        *,
        host_bytes: int,
        device_bytes: int = 0,
        disk_path: str = "",
        disk_bytes: int = 0,
        donor_bits: int = 16,
        directory: DirectoryKv | None = None,
        eviction: str = "lru",
        warm_up_model: Callable[[], None] = lambda: None,
        watch_weights: Callable[[], WeightsWatch] | None = None,
    ) -> None:
        self._model, self._block_tokens, self._warm_up_model = model, block_tokens, warm_up_model
        self._quality = quality
        self.donor_kv = DonorKv(
            device_bytes,
            host_bytes,
            disk_path or None,
            budget_disk_bytes=disk_bytes,
            on_evicted=self._on_evicted,
            device_type=model.device.type,
            rope=model.rope,
            bits=donor_bits,
            directory=directory,
            eviction=eviction,
        )
        self._publisher = Publisher(self.donor_kv)
        self._evicted: deque[tuple[str, int]] = deque()  # also by the publisher's thread
        if directory is not None:
            directory.verify_ahead()
        self.donor_kv.reserve(model.device)
        self._reading: dict[str, Arrival] = {}
        self._blenders: dict[str, Blender] = {}
        self._pace = Pace(quality.piece_ms)
        self._loads = LoadQueue(self._begin, self._pace, agree=Ranks(model).mean, wait=self._wait_for_device)
        self._finished: set[str] = set()
        self._watch_weights, self._ranks = watch_weights, Ranks(model)
        self._weights: WeightsWatch | None = None
        self._has_named = False
        self._pinned: dict[str, DonorTensors] = {}
        self._report = Report()
        self._invalid: set[int] = set()

    def warm_up(self) -> None:
        """Everything that a first request would wait for. Only on a GPU; a failure leaves it to that request.

        The first block of vLLM's pool is nobody's: its slots may be written.
        """
        if self._model.device.type != "cuda":
            return
        try:
            # Taken once and left with the allocator: what donors in host memory are brought through, piece by piece.
            torch.empty(STAGED_BYTES, dtype=torch.uint8, device=self._model.device)
            self._warm_up_model()
            self.donor_kv.capture("", 0, self._model.layout, torch.tensor([0]))
            donor = self.donor_kv.acquire("", 0)
            if donor is not None:
                there = torch.zeros(1, dtype=torch.int64, device=self._model.device)
                splice([Move(donor, 0, 1, there, shift=1)], self._model.layout, self._model.rope)
                self.donor_kv.release(donor)
            self.donor_kv.drop("")
            nobodys = torch.zeros(min(MANY_ROWS["cuda"], self._quality.chunk_tokens), dtype=torch.int64)
            self._report.pass_rows = PASSES_OF_A_LOAD * measure_pass_rows(self._model, nobodys.to(self._model.device))
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
        """Before the step's forward pass: the step's share of all loads under way."""
        with suppress(Exception):  # whoever cannot look makes no donors: `_capture` looks again, and tells
            self._name_weights()
        self._keep_donors(orders)
        for request_id in orders.cancels:
            if self._loads.cancel(request_id):
                self._finished.add(request_id)  # vLLM keeps its blocks until it hears this
        orders.cancels = []
        for load in orders.loads:
            self._loads.add(load)
        orders.loads = []
        for load, outcome in self._work_and_look(orders.work_ms):
            self._finished.add(load.request_id)
            self._report.loaded[load.request_id] = (
                _report_load(load, outcome) if isinstance(outcome, Blended) else self._refuse(load, outcome)
            )

    def capture(self, orders: Orders) -> None:
        """After the step's forward pass."""
        for order in orders.captures:
            key = (order.donor_id, order.generation)
            try:
                self._capture(order)
                self._report.captured.add(key)
                if order.publication is not None:
                    self._publish(order.publication)
            except CapacityError as error:  # budgets and back-pressure at work
                self._report.not_captured.add(key)
                log.debug("SemBlend does not keep %s as a donor: %s", order.donor_id, error)
            except Exception as error:  # a donor less; the answer goes on
                self._report.not_captured.add(key)
                self._log_failure("capture", error, order.donor_id)
        for publication in orders.publications:
            self._publish(publication)
        if orders.captures:
            self._report.donor_bytes = dict(self.donor_kv.used_bytes)
        self._report.served.extend(orders.served)
        orders.captures, orders.served, orders.publications = [], [], []

    def take_report(self) -> Report | None:
        """What happened since the last call; None where nothing did."""
        while self._evicted:
            self._report.evicted.add(self._evicted.popleft())
        if not self._report:
            return None
        report, self._report = self._report, Report()
        return report

    def take_finished(self) -> set[str]:
        """Requests whose load is over, well or not: vLLM schedules them now, or frees their blocks if they ended."""
        finished, self._finished = self._finished, set()
        return finished

    def take_invalid_blocks(self) -> set[int]:
        """Blocks of loads that were refused: vLLM computes them."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def close(self) -> None:
        self._publisher.close()
        self.donor_kv.close()

    # -- parts -----------------------------------------------------------------------------------------------------

    def _keep_donors(self, orders: Orders) -> None:
        """Let go of donors that are forgotten; hold those that an operator has pinned."""
        for donor_id, generation in orders.drops:
            if self.donor_kv.holds(donor_id, generation):
                self._unpin(donor_id)
                self.donor_kv.drop(donor_id)
        for donor_id, generation, on in orders.pins:
            self._unpin(donor_id)
            if on and (held := self.donor_kv.acquire(donor_id, generation)) is not None:
                self._pinned[donor_id] = held
        orders.drops, orders.pins = [], []

    def _unpin(self, donor_id: str) -> None:
        if (held := self._pinned.pop(donor_id, None)) is not None:
            self.donor_kv.release(held)

    def _work_and_look(self, budget_ms: float | None) -> list[tuple[Load, Outcome]]:
        """What was finished in this step; nothing of it counts where the model has other weights than before.

        The weights are looked at when a load has ended, behind the wait for its verdict: the look is no wait of its own
        then, and one is enough, because no token is computed on a load before its end.
        """
        under_way = len(self._loads)
        ended = self._work(budget_ms)
        if self._watch_weights is None or not under_way:
            return ended
        changed = bool(ended) and self._have_weights_changed()
        if not self._ranks.mean(float(changed)):  # one rank may see what another does not
            return ended
        log.warning("SemBlend: the model has new weights; the donors of the old ones are dropped")
        if self._weights is not None:
            self._report.weights = self._weights.digest
            self.donor_kv.name_weights(self._weights.digest)
        for donor_id in list(self._pinned):
            self._unpin(donor_id)
        self.donor_kv.drop_all()
        why = Decline(DeclineReason.STALE, "the weights of the model have changed")
        return [(load, why) for load in (*(load for load, _ in ended), *self._loads.abandon())]

    def _have_weights_changed(self) -> bool:
        """Whoever cannot look has to take them for others."""
        try:
            return self._weights is None or self._weights.have_changed()
        except Exception as error:
            self._log_failure("weights", error, "")
            return True

    def _publish(self, publication: Publication) -> None:
        """Hand a donor to the publisher, with a look at the weights that is over by the time that it writes.

        A donor that was computed with new weights, which nobody has noticed yet, must not go out under the old name.
        """
        changed = self._weights.begin_look() if self._weights is not None else None
        self._publisher.submit(publication, (lambda: not changed()) if changed is not None else (lambda: True))

    def _get_blender(self, mode: str) -> Blender:
        """In mode fast only vLLM needs the end of the prompt; the gate of mode balanced looks at it, at any number."""
        mode = find_path(mode)
        if mode not in self._blenders:
            quality = replace(self._quality, question_tokens=1) if mode == "fast" else self._quality
            self._blenders[mode] = Blender(self._model, self.donor_kv, quality, self._pace)
        return self._blenders[mode]

    def _work(self, budget_ms: float | None) -> list[tuple[Load, Outcome]]:
        """What was finished in this step; whatever goes wrong, no request waits for its load forever."""
        try:
            return self._loads.work(budget_ms)
        except Exception as error:
            self._log_failure("materialize", error, "")
            why = Decline(DeclineReason.ERROR, f"{type(error).__name__}: {error}")
            return [(load, why) for load in self._loads.abandon()]

    def _begin(self, load: Load) -> Pieces[Outcome]:
        if not load.spans:
            return Decline(DeclineReason.ERROR, "the load could not be ordered")
        blender = self._get_blender(load.mode)
        return (yield from blender.prepare_in_pieces(*self._place(load), mode=load.mode))

    def _place(self, load: Load) -> tuple[Placed, ReusePlan]:
        context = slots_of_blocks(load.block_ids, self._block_tokens, load.plan_tokens, self._model.device)
        # Widened by numpy: torch wakes all its threads for so many numbers, which takes milliseconds.
        tokens = torch.from_numpy(np.array(load.tokens, dtype=np.int64))
        return Placed(tokens, context), ReusePlan(load.spans, load.plan_tokens, load.exact_tokens)

    def _refuse(self, load: Load, why: Rejected | Decline) -> Loaded:
        """No donor KV after all: the blocks from the first on that is not exact are invalid, and vLLM computes them."""
        rejected = why if isinstance(why, Rejected) else None
        exact_until = rejected.exact_until if rejected else load.exact_tokens
        if isinstance(why, Rejected):
            why = Decline(DeclineReason.QUALITY_RISK, "the gate wants the prompt computed in full")
        elif why.reason is DeclineReason.ERROR:
            self._report.errors.append(("materialize", why.detail, load.request_id))
        first = exact_until // self._block_tokens
        self._invalid.update(load.block_ids[first : -(-load.claim_end // self._block_tokens)])
        return Loaded(
            load.request_id,
            exact_tokens=load.exact_tokens,
            prefill_tokens=load.plan_tokens - load.exact_tokens,
            risk=rejected.risk if rejected else None,
            escalations=rejected.escalations if rejected else 0,
            canary=rejected.canary if rejected else None,
            load_ms=rejected.load_ms if rejected else None,
            compute_ms=rejected.compute_ms if rejected else None,
            reason=why.reason,
            detail=why.detail,
            failed=True,
            work=1.0 + rejected.work if rejected else 0.0,
            faulty_donors=why.faulty_donors,
        )

    def _wait_for_device(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.current_stream(self._model.device).synchronize()

    def tell_weights(self) -> str:
        """The digest of the weights, for the scheduler before the first request; empty where nobody can look."""
        if self._weights is None and self._watch_weights is not None:
            self._weights = self._watch_weights()
            self.donor_kv.name_weights(self._weights.digest)
        return self._weights.digest if self._weights is not None else ""

    def _name_weights(self) -> None:
        """Look at the weights before the first step: they may be written after the engine was made.

        Told before and others now: the donors that a first request has found are of other weights, and are refused.
        """
        if self._has_named or self._watch_weights is None:
            return
        told = self._weights is not None
        self.tell_weights()
        self._has_named = True
        assert self._weights is not None, "it was looked at just now"
        if not told or self._ranks.mean(float(self._have_weights_changed())):
            self._report.weights = self._weights.digest
            self.donor_kv.name_weights(self._weights.digest)

    def _capture(self, order: Capture) -> None:
        self._name_weights()
        slots = slots_of_blocks(order.block_ids, self._block_tokens, order.tokens)  # to a GPU without waiting for it
        handle = self.donor_kv.capture(
            order.donor_id, order.generation, self._model.layout, slots, slots_stay=True, tenant=order.tenant
        )
        if handle.arrives is not None:
            self._reading[order.donor_id] = handle.arrives

    def _on_evicted(self, donor_id: str, generation: int, reason: str) -> None:
        log.debug("donor %s left the worker: %s", donor_id, reason)
        self._evicted.append((donor_id, generation))

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
        exact=not blended.approximate,
        work=blended.work,
    )
