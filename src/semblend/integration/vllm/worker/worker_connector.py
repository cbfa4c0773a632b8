"""Our side in vLLM's worker: it copies donor KV out, and brings it back to other positions.

    load      donor KV into the request's blocks, then what has to be computed, by the stock model, watched by the gate;
              piece by piece, a part of each step (`LoadQueue`), before the step's forward pass. A load that is refused
              or fails is told as invalid blocks, in the step in which it ends: vLLM has computed nothing on them, and
              prefills the prompt itself
    capture   exact prompts become donors, under a byte budget. They are copied when the step after next begins, or
              sooner if their blocks are given away, before anything of that step is computed (`before_step`): nobody
              has written their blocks. The next step would be too soon: an engine that schedules ahead launches it
              before it reads the first token. On a GPU the copies are queued beside the next steps; a request that
              ends before its copy has arrived gives its blocks away, and the step that gets them is ordered behind it

Nothing raises: what failed stands in the report and in the log, a load that was ordered is refused, and a capture is
told as not captured. The one exception is a `RankError`: a failure on one of several tensor-parallel ranks, while all
of them compute reused KV, has to end the engine.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from semblend.errors import CapacityError, RankError, SemBlendError
from semblend.fairness import FairClock, TenantLine
from semblend.integration.vllm.orders import Capture, Load, Orders, Report
from semblend.materialize.blend.blender import STAGED_BYTES, Blender
from semblend.materialize.blend.passes import MANY_ROWS, Ranks, run_rare_passes, time_best, time_passes
from semblend.materialize.blend.quality import Blended, Pace, Pieces, Placed, QualitySettings, Rejected
from semblend.materialize.contract import Model, slots_of_blocks
from semblend.materialize.donors.directory import Publication
from semblend.materialize.donors.directory_kv import DirectoryKv, Publisher
from semblend.materialize.donors.memory import Arrival
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.kv.moves import DonorTensors, Move
from semblend.materialize.kv.splice import splice
from semblend.materialize.weights_watch import Look, WeightsWatch
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.plan.times import Timed, Work
from semblend.quality import find_path
from semblend.session.local import describe_outcome
from semblend.session.session import LoadResult

log = logging.getLogger("vllm.semblend")

SAY_AGAIN_S = 60.0
"""A failure of the same kind is logged once in this time, with how often it came; every one of them is reported."""
NOBODYS = 0
"""The first block of vLLM's pool holds no request's KV: its slots may be written."""


class FailureLog:
    """Logs failures of the worker without flooding the log, and counts them by where they happened."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._clock, self._said = clock, dict[tuple[str, str], tuple[float, int]]()

    def note(self, where: str, error: BaseException, request_id: str = "") -> str:
        """Count it, log it unless the same was logged just now; returns it as one line."""
        message = (f"{type(error).__name__}: {error}".splitlines() or [type(error).__name__])[0]
        self.counts[where] += 1
        key, now = (where, type(error).__name__), self._clock()
        said_at, count = self._said.get(key, (-SAY_AGAIN_S, 0))
        if now - said_at < SAY_AGAIN_S:
            return message
        self._said[key] = now, self.counts[where]
        more = f" ({self.counts[where] - count} times since the last line)" if count else ""
        log.warning("SemBlend: %s failed for %s: %s%s", where, request_id or "a step", message, more, exc_info=error)
        return message


class RefusingConnector:
    """What the worker's side tells vLLM: loads that are over, blocks to compute, the report.

    Alone it stands where no `WorkerConnector` could be made: a load is refused and no donor is kept. Of several ranks
    either all have a `WorkerConnector` or none, or one would wait for the others in its first load.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens, self._report = block_tokens, Report()
        self._finished: set[str] = set()
        self._invalid: set[int] = set()

    def before_step(self, orders: Orders) -> None:
        """No capture is under way."""

    def copy_out(self) -> None:
        """There is nothing to copy."""

    def load(self, orders: Orders) -> None:
        loads, orders.loads = orders.loads, []
        for load in loads:
            why = Decline(DeclineReason.ERROR, "this engine's worker has no part of SemBlend")
            self._tell(load, why, LoadResult.refuse(why))

    def capture(self, orders: Orders) -> None:
        lost = (*orders.captures, *orders.ended)
        self._report.not_captured.update((order.donor_id, order.generation) for order in lost)
        self._report.served.extend(orders.served)
        orders.captures, orders.served, orders.publications, orders.ended = [], [], [], []

    def tell_weights(self) -> str:
        return ""

    def take_report(self) -> Report | None:
        """What happened since the last call; None where nothing did."""
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
        """There is nothing to let go."""

    def _tell(self, load: Load, outcome: Outcome, result: LoadResult) -> None:
        """A load is over: the blocks from the first on that is not exact are vLLM's to compute."""
        self._finished.add(load.request_id)
        if not isinstance(outcome, Blended):
            exact_until = outcome.exact_until if isinstance(outcome, Rejected) else load.exact_tokens
            self._invalid |= find_invalid_blocks(load, exact_until, self._block_tokens)
        self._report.loaded[load.request_id] = result


class WorkerConnector(RefusingConnector):
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
        super().__init__(block_tokens)
        self._model, self._warm_up_model = model, warm_up_model
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
        self._fresh: list[Capture] = []  # ordered in the last step
        self._due: list[Capture] = []  # ordered before it
        self._is_between_steps = True
        self._reading: dict[str, Arrival] = {}
        self._blenders: dict[str, Blender] = {}
        self._pace = Pace(quality.piece_ms)
        self._loads = LoadQueue(
            self._begin, self._pace, agree=Ranks(model).mean, wait=self._wait_for_device, tell=self._note_failure
        )
        self._watch_weights, self._ranks = watch_weights, Ranks(model)
        self._weights: WeightsWatch | None = None
        self._has_named = False
        self._pinned: dict[str, DonorTensors] = {}
        self.own_bytes = 0  # of the device: buffers and recorded passes
        self._pins: list[tuple[str, int, bool]] = []  # of donors that are read from a file
        self.failures = FailureLog()

    def warm_up(self) -> None:
        """Everything that a first request would wait for. Only on a GPU; a failure leaves it to that request."""
        if self._model.device.type != "cuda":
            return
        try:
            free = torch.cuda.mem_get_info(self._model.device)[0]
            # Taken once and left with the allocator: what donors in host memory are brought through, piece by piece.
            torch.empty(STAGED_BYTES, dtype=torch.uint8, device=self._model.device)
            self._warm_up_model()
            rows = min(MANY_ROWS["cuda"], self._quality.chunk_tokens)
            nobodys = torch.full((rows,), NOBODYS * self._block_tokens, dtype=torch.int64)
            self.own_bytes = max(0, free - torch.cuda.mem_get_info(self._model.device)[0])
            load = self._time_load(nobodys)
            nobodys = nobodys.to(self._model.device)
            passes = time_passes(self._model, nobodys)
            if passes is not None:
                self._report.times = passes if load is None else (*passes, load)
            run_rare_passes(self._model, nobodys)
        except Exception as error:
            self._ranks.raise_if_several(error)  # the others are in a pass that this one has left
            log.warning("SemBlend was not warmed up: %s", error, exc_info=True)

    @property
    def device(self) -> torch.device:
        return self._model.device

    def _time_load(self, slots: torch.Tensor) -> Timed | None:
        """How long it takes to bring a donor of so many tokens from where donors are kept."""
        self.donor_kv.capture("", 0, self._model.layout, slots)
        donor = self.donor_kv.acquire("", 0)
        try:
            if donor is None:
                return None
            move = Move(donor, 0, len(slots), slots.to(self._model.device), shift=1)
            run = lambda: splice([move], self._model.layout, self._model.rope)  # noqa: E731
            return Timed(Work(0, 0, len(slots)), time_best(run, self._model.device))
        finally:
            if donor is not None:
                self.donor_kv.release(donor)
            self.donor_kv.drop("")

    def before_step(self, orders: Orders) -> None:
        """Before anything of a step is computed: captures that are due, and the wait for those that still read blocks
        which have a new owner."""
        freed, orders.freed = orders.freed, []
        is_idle = orders.work_ms is None  # nobody waits, and there may be no step after this one
        later = [order for order in self._fresh if not is_idle and order.donor_id not in freed]
        self._due += [order for order in self._fresh if is_idle or order.donor_id in freed]
        self._fresh = []
        ended, is_named = list(orders.ended), self._has_named or self._watch_weights is None
        while orders.ended:  # a prompt's own copy comes first: what it becomes a part of takes its place
            order = orders.ended[0]
            if is_named and (is_idle or self.donor_kv.has_room_on_device(self._model.layout, order.tokens)):
                self._due.append(order)
            else:  # the step would wait for a copy to the host; or a rank for others, to agree about the weights
                self._report.not_captured.add((order.donor_id, order.generation))
            del orders.ended[0]
        self._copy_due()
        self._due, self._is_between_steps = later, False
        freed = [*freed, *(order.donor_id for order in ended)]
        for request_id in freed:
            with self._guard("wait for a capture", request_id):
                if (arrival := self._reading.pop(request_id, None)) is not None:
                    arrival.wait()
        if self._reading:
            with self._guard("look at captures"):
                self._reading = {name: arrival for name, arrival in self._reading.items() if not arrival.query()}

    def load(self, orders: Orders) -> None:
        """Before the step's forward pass: the step's share of all loads under way. In the end each has a verdict."""
        try:
            self._load(orders)
        except Exception as error:
            self._ranks.raise_if_several(error)
            self._note_failure("load", error)
            why = Decline(DeclineReason.ERROR, f"{type(error).__name__}: {error}")
            loads, orders.loads = orders.loads, []
            for load in (*self._loads.abandon(), *loads):
                self._finish(load, why)

    def _load(self, orders: Orders) -> None:
        self._name_weights_if_possible()
        with self._guard("donors"):
            self._keep_donors(orders)
        cancels, orders.cancels = orders.cancels, []
        for request_id in cancels:
            with self._guard("cancel", request_id):
                if self._loads.cancel(request_id):
                    self._finished.add(request_id)  # vLLM keeps its blocks until it hears this
        for load in orders.loads:
            self._loads.add(load)
        orders.loads = []
        for load, outcome in self._work_and_look(orders.work_ms):
            self._finish(load, outcome)

    def capture(self, orders: Orders) -> None:
        """After the step's forward pass: what to copy is noted, and copied before a later one (`before_step`)."""
        if self._is_between_steps:  # nobody has said whose blocks were given away: they may be written by now
            lost = (*self._due, *self._fresh, *orders.ended)
            self._report.not_captured.update((order.donor_id, order.generation) for order in lost)
            self._due, orders.ended = [], []
        self._is_between_steps = True
        self._fresh, orders.captures = orders.captures, []
        publications, orders.publications = orders.publications, []
        served, orders.served = orders.served, []
        self._report.served.extend(served)
        for publication in publications:
            self._publish(publication)

    def copy_out(self) -> None:
        """Copy at once all that was ordered."""
        self._due, self._fresh = [*self._due, *self._fresh], []
        self._copy_due()

    def _copy_due(self) -> None:
        captures, self._due = self._due, []
        for order in captures:
            key = (order.donor_id, order.generation)
            try:
                self._capture(order)
                self._report.captured.add(key)
            except CapacityError as error:  # budgets and back-pressure at work
                self._report.not_captured.add(key)
                log.debug("SemBlend does not keep %s as a donor: %s", order.donor_id, error)
                continue
            except RankError:
                raise
            except Exception as error:  # a donor less; the answer goes on
                self._report.not_captured.add(key)
                self._note_failure("capture", error, order.donor_id)
                continue
            if order.publication is not None:
                self._publish(order.publication)
        if captures:
            with self._guard("count donors"):
                self._report.donor_bytes = dict(self.donor_kv.used_bytes)

    def take_report(self) -> Report | None:
        while self._evicted:
            self._report.evicted.add(self._evicted.popleft())
        return super().take_report()

    def close(self) -> None:
        self._due = [order for order in (*self._due, *self._fresh) if order.publication is not None]
        self._fresh = []
        if self._due:  # an engine that has no step after its last answer publishes too
            with self._guard("capture"):
                self.copy_out()
                self._publisher.flush()
        with self._guard("close the publisher"):
            self._publisher.close()
        with self._guard("close the donors"):
            self.donor_kv.close()

    # -- parts -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _guard(self, where: str, request_id: str = "") -> Iterator[None]:
        """The border to vLLM: what fails in here is told and costs reuse, and the step goes on."""
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            self._note_failure(where, error, request_id)

    def _finish(self, load: Load, outcome: Outcome) -> None:
        """Tell the verdict on a load. Whatever fails here, vLLM hears that it is over and computes its blocks."""
        try:
            result = describe_outcome(outcome)
        except Exception as error:
            outcome = Decline(DeclineReason.ERROR, self.failures.note("verdict", error))
            result = LoadResult.refuse(outcome)
        self._tell(load, outcome, result)

    def _keep_donors(self, orders: Orders) -> None:
        """Let go of donors that are forgotten; hold those that an operator has pinned, keep those of conversations."""
        drops, orders.drops = orders.drops, []
        heirs, kept_first, orders.heirs, orders.kept_first = orders.heirs, orders.kept_first, [], []
        for donor, heir in heirs:
            for blender in self._blenders.values():
                blender.note_heir(donor, heir)
        for donor_id, generation, seconds in kept_first:
            self.donor_kv.keep(donor_id, generation, seconds)
        pins = {donor_id: (donor_id, generation, on) for donor_id, generation, on in (*self._pins, *orders.pins)}
        orders.pins, self._pins = [], []
        for donor_id, generation in drops:
            with self._guard("drop", donor_id):
                if self.donor_kv.holds(donor_id, generation):
                    self._unpin(donor_id)
                    self.donor_kv.drop(donor_id)
        for donor_id, generation, on in pins.values():
            with self._guard("pin", donor_id):
                self._unpin(donor_id)
                if on and (held := self.donor_kv.acquire(donor_id, generation)) is not None:
                    self._pinned[donor_id] = held
                elif on and self.donor_kv.is_rising(donor_id, generation):
                    self._pins.append((donor_id, generation, on))  # tried again in the next step

    def _unpin(self, donor_id: str) -> None:
        if (held := self._pinned.pop(donor_id, None)) is not None:
            self.donor_kv.release(held)

    def _work_and_look(self, budget_ms: float | None) -> list[tuple[Load, Outcome]]:
        """What was finished in this step; nothing of it counts where the model has other weights than before.

        The look is queued in front of the work, and its answer read behind the wait for a verdict: it is no wait of its
        own. That of the step in which a load ends is enough, because no token is computed on a load before its end.
        """
        if self._watch_weights is None or not len(self._loads):
            return self._work(budget_ms)
        look = self._begin_look()
        ended = self._work(budget_ms)
        changed = bool(ended) and self._have_weights_changed(look)
        if not self._ranks.mean(float(changed)):  # one rank may see what another does not
            return ended
        log.warning("SemBlend: the model has new weights; the donors of the old ones are dropped")
        self._drop_old_weights()
        why = Decline(DeclineReason.STALE, "the weights of the model have changed")
        return [(load, why) for load in (*(load for load, _ in ended), *self._loads.abandon())]

    def _drop_old_weights(self) -> None:
        for donor_id in list(self._pinned):
            with self._guard("drop", donor_id):
                self._unpin(donor_id)
        with self._guard("drop"):
            self.donor_kv.drop_all()
        with self._guard("weights"):
            if self._weights is not None:
                self._report.weights = self._weights.digest
                self.donor_kv.name_weights(self._weights.digest)

    def _begin_look(self) -> Look | None:
        """Queue a look at the weights; None where nobody can."""
        try:
            return None if self._weights is None else self._weights.begin_look()
        except Exception as error:
            self._note_failure("weights", error)
            return None

    def _have_weights_changed(self, look: Look | None = None) -> bool:
        """The answer of a ``look`` that was begun, or of a new one; whoever cannot look has to take them for others."""
        try:
            return self._weights is None or self._weights.have_changed(look)
        except Exception as error:
            self._note_failure("weights", error)
            return True

    def _publish(self, publication: Publication) -> None:
        """Hand a donor to the publisher, with a look at the weights that is over by the time that it writes.

        A donor that was computed with new weights, which nobody has noticed yet, must not go out under the old name.
        """
        with self._guard("publish", publication.donor_id):
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
            self._ranks.raise_if_several(error)
            self._note_failure("materialize", error)
            why = Decline(DeclineReason.ERROR, f"{type(error).__name__}: {error}")
            return [(load, why) for load in self._loads.abandon()]

    def _begin(self, load: Load) -> Pieces[Outcome]:
        if not load.spans:
            return Decline(DeclineReason.ERROR, "the load could not be ordered")
        try:
            blender, placed = self._get_blender(load.mode), self._place(load)
        except Exception as error:  # the other ranks are about to begin together
            self._ranks.raise_if_several(error)
            raise
        return (yield from blender.prepare_in_pieces(*placed, mode=load.mode))

    def _place(self, load: Load) -> tuple[Placed, ReusePlan]:
        """vLLM has given blocks for what was claimed, which is all but the last token. The gate looks at that one too:
        where it begins a block, it goes into the first of vLLM's pool, which is nobody's.
        """
        blocks, given = load.block_ids, len(load.block_ids) * self._block_tokens
        if given == load.plan_tokens - 1:
            blocks = (*blocks, NOBODYS)
        context = slots_of_blocks(blocks, self._block_tokens, load.plan_tokens, self._model.device)
        # Widened by numpy: torch wakes all its threads for so many numbers, which takes milliseconds.
        tokens = torch.from_numpy(np.array(load.tokens, dtype=np.int64))
        plan = ReusePlan(
            load.spans, load.plan_tokens, load.exact_tokens, repair=load.repair, moved_back=load.moved_back
        )
        return Placed(tokens, context), plan

    def _wait_for_device(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.current_stream(self._model.device).synchronize()

    def tell_weights(self) -> str:
        """The digest of the weights, for the scheduler before the first request; empty where nobody can look."""
        if self._weights is None and self._watch_weights is not None:
            self._weights = self._watch_weights()
            self.donor_kv.name_weights(self._weights.digest)
        return self._weights.digest if self._weights is not None else ""

    def _name_weights_if_possible(self) -> None:
        """Whoever cannot look at the weights makes no donors: `_capture` looks again, and tells."""
        try:
            self._name_weights()
        except RankError:
            raise
        except Exception as error:
            log.debug("SemBlend cannot look at the weights: %s", error)

    def _name_weights(self) -> None:
        """Look at the weights before the first step: they may be written after the engine was made.

        Told before and others now: the donors that a first request has found are of other weights, and are refused.
        Ranks agree, so that all of them look again where one could not.
        """
        if self._has_named or self._watch_weights is None:
            return
        told, changed = self._weights is not None, False
        problem: Exception | None = None
        try:
            self.tell_weights()
            changed = not told or self._have_weights_changed()
        except Exception as error:
            problem = error
        failed = self._ranks.mean(float(problem is not None))
        changed = bool(self._ranks.mean(float(changed)))
        if problem is not None:
            raise problem
        if failed or self._weights is None:
            raise SemBlendError("another rank cannot look at its weights", hint="its log says why")
        self._has_named = True
        if changed:
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

    def _note_failure(self, where: str, error: BaseException, request_id: str = "") -> None:
        self._report.errors.append((where, self.failures.note(where, error, request_id), request_id))


def find_invalid_blocks(load: Load, exact_until: int, block_tokens: int) -> set[int]:
    """The blocks of a load's claim from the first on that is not exact: vLLM computes them."""
    return set(load.block_ids[exact_until // block_tokens : -(-load.claim_end // block_tokens)])


Outcome = Blended | Rejected | Decline
Begin = Callable[[Load], Pieces[Outcome]]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    load: Load
    pieces: Pieces[Outcome]

    def advance(self) -> Outcome | None:
        """Do the next piece; the outcome when it was the last, None before."""
        try:
            next(self.pieces)
        except StopIteration as done:
            outcome: Outcome = done.value
            return outcome
        except RankError:
            raise
        except Exception as error:  # the blender itself does not raise; what is around it may
            return Decline(DeclineReason.ERROR, f"{type(error).__name__}: {error}")
        return None


class LoadQueue:
    """Loads under way, worked on for a part of each step, one after the other, in turns by tenant (`FairClock`).

    vLLM waits for a load as it waits for KV from another machine: the request holds its blocks and is not scheduled,
    and what is running goes on. So a load may take several steps, and its verdict is known before the first token is
    computed on it. A step gives all loads together a number of milliseconds. A piece is as long as what is left of
    them, because large passes cost less a row than small ones; with less than half of them left the next one waits for
    the next step. Where nothing else runs a step ends with the first load that does, so that it is answered while the
    next one loads.

    ``pace`` is that of the pieces; if it is 0, a load is one piece. ``agree`` makes one number of what several ranks
    have measured, because all of them have to stop behind the same piece. ``wait`` waits for what the device has to do
    already. ``tell`` hears of a load whose donors could not be let go.
    """

    def __init__(
        self,
        begin: Begin,
        pace: Pace | None = None,
        *,
        agree: Callable[[float], float] = lambda ms: ms,
        wait: Callable[[], None] = lambda: None,
        tell: Callable[[str, Exception, str], None] = lambda *_: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._begin, self._agree, self._wait, self._clock, self._tell = begin, agree, wait, clock, tell
        self._pace = Pace() if pace is None else pace
        self._in_pieces = self._pace.piece_ms > 0
        self._line, self._turns = TenantLine[_Job](), FairClock()
        self._current: _Job | None = None
        self._ended: list[tuple[Load, Outcome]] = []

    def __len__(self) -> int:
        return len(self._line) + (self._current is not None)

    def add(self, load: Load) -> None:
        if not self._line.count(load.tenant):
            self._turns.join(load.tenant)
        self._line.append(load.tenant, _Job(load, self._begin(load)))

    def cancel(self, request_id: str) -> bool:
        """Give up a load and release its donors; False where it is over already."""
        job = next((job for job in self._list_jobs() if job.load.request_id == request_id), None)
        if job is None:
            return False
        if job is self._current:
            self._current = None
        else:
            self._line.remove(job.load.tenant, job)
        self._close(job)
        return True

    def work(self, budget_ms: float | None) -> list[tuple[Load, Outcome]]:
        """Go on for about so long; what was finished. None: until a load ends, because nobody else has work."""
        if not len(self):
            return []
        if budget_ms is not None:
            self._wait()
        started, spent = self._clock(), 0.0
        while (job := self._take_turn()) is not None:
            self._pace.piece_ms = budget_ms - spent if self._in_pieces and budget_ms is not None else 0.0
            outcome = job.advance()
            if outcome is not None:
                self._ended.append((job.load, outcome))
                self._current = None
            if budget_ms is not None:
                spent = self._agree((self._clock() - started) * 1e3)
            if self._ended if budget_ms is None else spent > budget_ms / 2:
                break
        ended, self._ended = self._ended, []
        return ended

    def abandon(self) -> list[Load]:
        """Give up everything; also what was finished in a `work` that did not return."""
        ended, jobs = self._ended, self._list_jobs()
        self._ended, self._line, self._current = [], TenantLine(), None
        for job in jobs:
            self._close(job)
        return [*(load for load, _ in ended), *(job.load for job in jobs)]

    def _take_turn(self) -> _Job | None:
        """The load that has begun, else the first one of the tenant whose turn it is."""
        if self._current is None and (tenant := self._turns.choose(self._line.tenants)) is not None:
            self._current = self._line.pop(tenant)
            load = self._current.load
            self._turns.serve(tenant, max(1, load.plan_tokens - load.exact_tokens))
            self._turns.forget_idle(self._line.tenants)
        return self._current

    def _list_jobs(self) -> list[_Job]:
        return [*([] if self._current is None else [self._current]), *self._line]

    def _close(self, job: _Job) -> None:
        try:
            job.pieces.close()
        except Exception as error:  # the load is over all the same
            self._tell("cancel", error, job.load.request_id)
