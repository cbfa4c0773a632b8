"""Sessions of an engine that schedules and computes in one process: slots for loads, KV that is moved, donors kept.

    offer        how many tokens behind the exact hit shall we provide? Asked again as long as the request waits
    load         it is next and gets slots; donor KV will be moved in, gaps computed, and the gate looks at it
    work         a step's share of the load. The request waits until it is over, and others go on
    note_prompt  its prompt is complete: what is exact in it becomes a donor, and its receipt is written
    forget       it was released, or aborted while it waited

A load that waits for its next step holds slots, but no more firmly than a cache does: `count_waiting_slots` says how
many the engine may count as free, and `stop_loads` gives them back when it needs them. The load then begins again.

Nothing approximate may enter the exact tree: `find_exact_until` says how much of a request is as a cold prefill has it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from semblend.confirm.log_lines import LogFormat, LogSink
from semblend.confirm.receipt import Receipt
from semblend.discover.donor import Eviction
from semblend.errors import CapacityError
from semblend.facade import SemBlend
from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.quality import Blended, Pieces, Placed, QualitySettings, Rejected
from semblend.materialize.contract import Model
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.gate.gate import OutcomeMemory
from semblend.materialize.gate.thresholds import choose_table
from semblend.materialize.weights_watch import WeightsWatch
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.prompt import Prompt
from semblend.reporting import report_policy_failure
from semblend.session.session import LoadResult, ReuseSession, SessionRequest, State
from semblend.session.sessions import EngineTraits, Sessions
from semblend.session.settings import LocalSettings

# -- The donors of an engine: their KV in memory of our own, and what the library knows of them.


log = logging.getLogger("semblend.session")
Key = tuple[str, int]
"""A donor and the generation of its KV."""


class KeptDonors:
    """``epoch`` counts changes: a decision of an earlier epoch may name donors that are gone, or miss new ones."""

    def __init__(self, semblend: SemBlend, model: Model, settings: LocalSettings, engine: str) -> None:
        self._semblend, self._model, self._engine = semblend, model, engine
        self.kv = DonorKv(
            settings.donor_device_bytes,
            settings.donor_host_bytes,
            on_evicted=self._note_lost,
            device_type=model.device.type,
            rope=model.rope,
            eviction=settings.config.eviction,
            on_policy_failure=partial(report_policy_failure, semblend.events),
        )
        self.generations: dict[str, int] = {}
        self._adopted: dict[tuple[str, bytes], str] = {}
        self._made, self.epoch = 0, 0
        self.on_kept: Callable[[str, Prompt], None] | None = None  # told of every new donor
        self.on_superseded: Callable[[Key, Key], None] | None = None  # told of a donor that is gone, and of its heir
        for donor in semblend.donors():  # a store file brings back donors, not their KV
            semblend.forget(donor.donor_id, reason="engine")
        semblend.on_evicted(self._note_evicted)

    def keep(self, prompt: Prompt, slots: Tensor) -> str | None:
        """Copy KV and make it a donor; None where there is no room for it.

        Its name is ours: a caller chooses request ids, and must not replace donors.
        """
        self._made += 1
        donor_id = f"{self._engine}-{self._made}"
        try:
            tenant = prompt.namespace.tenant
            handle = self.kv.capture(donor_id, self._made, self._model.layout, slots, tenant=tenant)
            if handle.arrives is not None:
                handle.arrives.wait()
            self.generations[donor_id] = self._made
            self._semblend.register(prompt, donor_id)
            self._supersede(donor_id)
        except CapacityError as error:
            self.generations.pop(donor_id, None)
            log.debug("SemBlend keeps no donor of %d tokens: %s", len(prompt), error)
            return None
        self.epoch += 1
        if self.on_kept is not None:
            self.on_kept(donor_id, prompt)
        return donor_id

    def adopt(self, prompt: Prompt, slots: Tensor) -> bool:
        """Make a donor of KV that somebody else proposes; False where it is one already, or finds no room."""
        known = (prompt.namespace.digest, hashlib.sha256(prompt.token_ids.tobytes()).digest())
        if self._adopted.get(known) in self.generations:
            return False
        self._adopted = {key: donor for key, donor in self._adopted.items() if donor in self.generations}
        donor_id = self.keep(prompt, slots)
        if donor_id is not None:
            self._adopted[known] = donor_id
        return donor_id is not None

    def name_generations(self, plan: ReusePlan) -> ReusePlan:
        """The plan with the generations of our KV, where the library has its own; -1 for a donor that is gone."""
        spans = tuple(replace(span, generation=self.generations.get(span.donor_id, -1)) for span in plan.spans)
        return replace(plan, spans=spans)

    def find_beginning(self, session: ReuseSession) -> str | None:
        donor = self._semblend.find_beginning(session.prompt)
        return None if donor is None else donor.donor_id

    def keep_first(self, donor_id: str, seconds: float) -> None:
        self._semblend.keep(donor_id, seconds)
        self.kv.keep(donor_id, self.generations.get(donor_id, -1), seconds)

    def _supersede(self, donor_id: str) -> None:
        """Earlier turns of a conversation are in its newest donor."""
        before, own = dict(self.generations), (donor_id, self.generations[donor_id])
        for older in self._semblend.supersede(donor_id):
            if self.on_superseded is not None:
                self.on_superseded((older.donor_id, before.get(older.donor_id, -1)), own)

    def look_around(self) -> None:
        """Nobody publishes to these engines."""

    def list_missing(self, plan: ReusePlan) -> list[str]:
        return [donor_id for donor_id in plan.donor_ids if donor_id not in self.generations]

    def drop_all(self) -> None:
        """Nothing of what was kept is true any more."""
        self.epoch += 1
        self._semblend.clear()
        self.kv.drop_all()
        self.generations.clear()
        self._adopted.clear()

    def _note_lost(self, donor_id: str, generation: int, reason: str) -> None:
        log.debug("donor %s left memory: %s", donor_id, reason)
        if self.generations.get(donor_id) == generation:
            self._semblend.forget(donor_id, reason="engine")

    def _note_evicted(self, eviction: Eviction) -> None:
        self.generations.pop(eviction.donor.donor_id, None)
        self.kv.drop(eviction.donor.donor_id)
        self.epoch += 1


Answer = TypeVar("Answer")

WAITS = ("match", "load")
"""Hooks that are called while a request waits."""


@dataclass(frozen=True, slots=True)
class SlotPool:
    """The engine's slots: ``take`` gives so many or None, ``give_back`` frees them. Both work in whole pages."""

    take: Callable[[int], Tensor | None]
    give_back: Callable[[Tensor], None]
    page_tokens: int = 1

    def round_up(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens) * self.page_tokens


@dataclass(slots=True, eq=False)
class Load:
    """The slots of a load, and what the blender has still to do; ``prefix``: the exact slots that it began with.

    ``is_handed_over``: the engine has asked for the slots, to write them into the request's row, and frees them.
    """

    slots: Tensor
    prefix: Tensor
    pieces: Pieces[Blended | Rejected | Decline] | None = None
    is_handed_over: bool = False


class LocalSessions:
    """See the module. ``semblend`` finds, ``model`` computes, ``pool`` gives slots; receipts name the ``engine``."""

    def __init__(
        self,
        model: Model,
        semblend: SemBlend,
        pool: SlotPool,
        settings: LocalSettings,
        quality: QualitySettings,
        *,
        engine: str,
        engine_version: str,
        watch: WeightsWatch | None = None,
    ) -> None:
        self.semblend, self.settings = semblend, settings
        self._model, self._pool, self._quality, self._watch = model, pool, quality, watch
        self.donors = KeptDonors(semblend, model, settings, engine)
        self._sessions = Sessions(
            semblend,
            EngineTraits(
                engine, engine_version, page_tokens=pool.page_tokens, donor_min_new_tokens=settings.donor_min_new_tokens
            ),
            self.donors,
            config=settings.config,
            quality=quality,
            outcomes=OutcomeMemory(quality.thresholds),
        )
        self._blenders: dict[str, Blender] = {}
        self.donors.on_superseded = self._note_superseded
        self._book: dict[str, ReuseSession] = {}
        self._loads: dict[str, Load] = {}
        self._loading: ReuseSession | None = None  # one load waits at most

    def __len__(self) -> int:
        return len(self._book)

    def find(self, request_id: str) -> ReuseSession | None:
        return self._book.get(request_id)

    # -- a request that waits ----------------------------------------------------------------------------------------

    def find_request(self, request_id: str, source: Any) -> SessionRequest | None:
        """What was read of a request before; None for one that is new, also under an id that was used before."""
        session = self.find(request_id)
        if session is None or session.request.source is source:
            return None if session is None else session.request
        self.forget(request_id)
        return None

    def find_source(self, request_id: str) -> Any:
        """The engine's request that stands under an id now, or None. Two requests may have one id at once."""
        session = self.find(request_id)
        return None if session is None else session.request.source

    def offer(self, request: SessionRequest, exact_tokens: int) -> int:
        """Tokens behind the ``exact_tokens`` of the exact tree that we shall provide; 0 for none."""
        session = self._open(request)
        if session.state is State.LOADING:
            if exact_tokens == session.exact_tokens and session.epoch == self.donors.epoch:
                return session.offered_tokens
            self._stop_load(session)
        elif not session.is_open:  # refused once; or loaded, and then not admitted; or released untold
            self._take_back(session)
            return 0
        return self._sessions.offer(session, exact_tokens)

    def stand_back(self, request: SessionRequest, exact_tokens: int, why: str) -> None:
        """The engine computes this request behind its ``exact_tokens``. Nothing is offered; it may become a donor."""
        session = self._open(request)
        self._stop_load(session)
        self._take_back(session)
        self._sessions.stand_back(session, exact_tokens, why)

    def load(self, request_id: str, exact_slots: Callable[[], Tensor]) -> None:
        """Begin the load of a request: take slots for it. One that has begun goes on, if its exact prefix is in place.

        The prefix may leave while a load waits, as any other: nobody holds it. Then the load begins again.
        """
        session = self.find(request_id)
        if session is None or session.state not in (State.OFFERED, State.LOADING):
            return
        prefix = exact_slots()[: session.exact_tokens]
        if session.state is State.LOADING and torch.equal(prefix, self._loads[request_id].prefix):
            return
        self.stop_loads()
        if self._drop_old_weights():
            session.run_cold(Decline(DeclineReason.STALE, "the weights of the model have changed"))
            return
        plan = self._sessions.begin_load(session)
        if isinstance(plan, Decline):
            return
        slots = self._pool.take(self._pool.round_up(plan.prompt_tokens - session.exact_tokens))
        if slots is None:
            self._sessions.run_cold(session, Decline(DeclineReason.CAPACITY, "there are no slots left for it"))
            return
        load = self._loads[request_id] = Load(slots, prefix)
        context = torch.cat([prefix, slots])[: plan.prompt_tokens]
        tokens = torch.from_numpy(session.prompt.token_ids[: plan.prompt_tokens].astype(np.int64))
        load.pieces = self._get_blender(session.path).prepare_in_pieces(
            Placed(tokens, context), self.donors.name_generations(plan), mode=session.mode
        )
        self._loading = session

    def work(self, request_id: str, *, busy: bool) -> int | None:
        """Go on with a load for a step's share of time, to its end where nobody else runs.

        Gives the tokens that are provided now, 0 where the engine has to compute them, None where the load goes on.
        """
        session, load = self.find(request_id), self._loads.get(request_id)
        started = time.perf_counter()
        while session is not None and load is not None and load.pieces is not None:
            try:
                next(load.pieces)
            except StopIteration as done:
                load.pieces = self._loading = None
                self._finish_load(session, describe_outcome(done.value))
                break
            spent_ms = (time.perf_counter() - started) * 1e3
            if busy and spent_ms + self._quality.piece_ms / 2 > self.settings.step_work_ms:
                return None
        return session.offered_tokens if session is not None and session.state is State.FILLED else 0

    def keep_private(self, request_id: str) -> None:
        """Nothing of this request is to be published, though some of it is exact."""
        session = self.find(request_id)
        if session is not None:
            session.private = True

    # -- a request that runs -----------------------------------------------------------------------------------------

    def find_tail(self, request_id: str) -> Tensor | None:
        """The slots behind the exact prefix that are loaded; None where there are none."""
        session, load = self.find(request_id), self._loads.get(request_id)
        if session is None or load is None or session.state is State.LOADING:
            return None
        load.is_handed_over = True
        return load.slots

    def find_exact_until(self, request_id: str) -> int | None:
        """Up to where the KV of a request is exact; None where all of it is."""
        session = self.find(request_id)
        return None if session is None else session.exact_until

    def note_prompt(self, request_id: str, slots: Tensor | None, answered: Sequence[int] = ()) -> Receipt | None:
        """The prompt is complete and lies in ``slots``: its exact part becomes a donor. Its receipt, the first time.

        ``answered``: tokens behind the prompt whose KV lies in ``slots`` too. Without ``slots`` there is no donor.
        """
        session = self.find(request_id)
        if session is None or session.has_answered or session.request.answered:
            return None
        self._stop_load(session)
        self._sessions.answer(session)
        tokens = self._sessions.count_donor_tokens(session, len(session.prompt) + len(answered))
        if slots is not None and tokens:
            self._capture(session, slots[:tokens], answered)
        return self._sessions.confirm(session)

    def note_answered(self, request_id: str, slots: Tensor, answered: Sequence[int], *, busy: bool) -> None:
        """It has ended; prompt and ``answered`` lie in ``slots``, and become one donor where the answer is worth it.

        ``busy``: others run, and would wait for a copy that leaves the device.
        """
        session = self.find(request_id)
        if session is None or session.request.answered:
            return
        tokens = self._sessions.count_answered_tokens(session, len(session.prompt) + len(answered))
        if tokens and (not busy or self.donors.kv.has_room_on_device(self._model.layout, tokens)):
            self._capture(session, slots[:tokens], answered)

    def forget(self, request_id: str) -> None:
        """The request is gone, whatever fails. Slots of a load go back; those in its row are the engine's to free."""
        session = self._book.pop(request_id, None)
        if session is not None:
            try:
                self._stop_load(session)
            finally:
                self._give_slots_back(session)
                self._sessions.end(session)

    def give_up(self, request_id: str, where: str, error: BaseException) -> None:
        """A hook failed for this request: it is computed cold, and an event says why."""
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        log.warning("SemBlend: %s failed for %s: %s", where, request_id, message, exc_info=error)
        session = self.find(request_id)
        if session is not None and where in WAITS:  # it has no row yet, so whatever slots it has are ours
            try:
                self._stop_load(session)
            finally:
                self._give_slots_back(session)
                self._sessions.run_cold(session, Decline(DeclineReason.ERROR, message))
        self._sessions.report_failure(where, message, request_id)

    def guard(self, where: str, request_id: str, hook: Callable[[], Answer], otherwise: Answer) -> Answer:
        """The border to an engine: what fails in a hook costs the request time, never its answer."""
        try:
            return hook()
        except Exception as error:
            try:
                self.give_up(request_id, where, error)
            except Exception:
                log.warning("SemBlend: %s failed for %s, and giving up did too", where, request_id, exc_info=True)
            return otherwise

    def count_waiting_slots(self) -> int:
        """Slots of a load that waits for its next step: `stop_loads` gives them back."""
        return 0 if self._loading is None else len(self._loads[self._loading.request_id].slots)

    def stop_loads(self) -> bool:
        """Give up the load that waits, because the engine needs its slots; whether there was one."""
        return self._loading is not None and self._stop_load(self._loading)

    def reset(self) -> None:
        """Drop every donor and every load: the engine has emptied its cache, or the model has other weights."""
        self.stop_loads()
        self.donors.drop_all()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _open(self, request: SessionRequest) -> ReuseSession:
        """The session of a request; a new one where its id stood for another request before."""
        session = self._book.get(request.request_id)
        if session is not None and request.source is not None and session.request.source is not request.source:
            self.forget(request.request_id)
            session = None
        if session is None:
            session = self._book[request.request_id] = self._sessions.make(request)
        return session

    def _get_blender(self, mode: str) -> Blender:
        """In mode fast only the engine needs the end of the prompt; the gate of mode balanced looks at it."""
        if mode not in self._blenders:
            quality = replace(self._quality, question_tokens=1) if mode == "fast" else self._quality
            self._blenders[mode] = Blender(self._model, self.donors.kv, quality)
        return self._blenders[mode]

    def _note_superseded(self, donor: Key, heir: Key) -> None:
        self._sessions.lineage.note(donor[0], heir[0])
        for blender in self._blenders.values():
            blender.note_heir(donor, heir)

    def _finish_load(self, session: ReuseSession, result: LoadResult) -> None:
        """What is behind the claim is the engine's to compute; without KV to use, all of it is."""
        self._sessions.finish_load(session, result)
        if session.state is not State.FILLED:
            self._give_slots_back(session)
            return
        load, provided = self._loads[session.request_id], session.offered_tokens
        if len(load.slots) > provided:
            self._pool.give_back(load.slots[provided:])
            load.slots = load.slots[:provided]

    def _stop_load(self, session: ReuseSession) -> bool:
        """Give up a load under way; it may begin again. A load that is over is left alone."""
        load = self._loads.get(session.request_id)
        if load is None or load.pieces is None:
            return False
        pieces, load.pieces, self._loading = load.pieces, None, None
        try:
            pieces.close()
        finally:
            self._give_slots_back(session)
        self._sessions.stop_load(session)
        return True

    def _give_slots_back(self, session: ReuseSession) -> None:
        load = self._loads.pop(session.request_id, None)
        if self._loading is session:
            self._loading = None
        if load is not None and not load.is_handed_over:
            self._pool.give_back(load.slots)

    def _take_back(self, session: ReuseSession) -> None:
        """A load that the engine has not used: its slots go back, and no receipt may count it."""
        load = self._loads.get(session.request_id)
        if load is not None and not load.is_handed_over and session.state is State.FILLED:
            why = "the engine did not admit it with what was loaded"
            self._sessions.run_cold(session, Decline(DeclineReason.CAPACITY, why))
        self._give_slots_back(session)

    def _drop_old_weights(self) -> bool:
        if self._watch is None or not self._watch.have_changed():
            return False
        log.warning("SemBlend: the model has new weights; the donors of the old ones are dropped")
        self.reset()
        return True

    def _capture(self, session: ReuseSession, slots: Tensor, answered: Sequence[int]) -> None:
        prompt = session.prompt
        if len(slots) != len(prompt):
            tokens = np.concatenate((prompt.token_ids, np.asarray(answered, dtype=np.int32)))
            prompt = Prompt(tokens[: len(slots)], namespace=prompt.namespace)
        if (donor_id := self.donors.keep(prompt, slots)) is not None:
            session.keep(len(slots))
            self._sessions.lineage.note(session.request_id, donor_id)


def open_sessions(
    model: Model,
    pool: SlotPool,
    settings: LocalSettings,
    *,
    engine: LogFormat,
    engine_version: str,
    model_name: str,
    module: torch.nn.Module,
    engine_log: logging.Logger,
    **quality: Any,
) -> LocalSessions:
    """The sessions of an engine that does its prefills itself; the library tells the engine's own log what it does."""
    semblend = SemBlend(settings.config, sinks=[LogSink(engine_log, engine)])
    semblend.warm_up()
    gate = choose_table(model_name)
    engine_log.info("SemBlend's quality gate: %s", gate.describe())
    return LocalSessions(
        model,
        semblend,
        pool,
        settings,
        QualitySettings.of_config(settings.config, gate.thresholds, prefills=False, **quality),
        engine=engine,
        engine_version=engine_version,
        watch=WeightsWatch(module),
    )


def describe_outcome(outcome: Blended | Rejected | Decline) -> LoadResult:
    """What a blender did with a plan, as plain values."""
    if isinstance(outcome, Decline):
        return LoadResult.refuse(outcome)
    measured = {
        name: getattr(outcome, name)
        for name in ("risk", "escalations", "canary", "load_ms", "compute_ms", "work", "exact_until")
    }
    if isinstance(outcome, Rejected):  # the engine's prefill comes on top
        measured |= {"work": outcome.work + 1, "exact_until": None}
        why = "the gate wants the prompt computed in full"
        return LoadResult(**measured, reason=DeclineReason.QUALITY_RISK, detail=why, failed=True)
    if not outcome.approximate:
        measured["exact_until"] = None
    all_computed = not outcome.reused_tokens
    return LoadResult(
        **measured,
        reused_tokens=outcome.reused_tokens,
        recomputed_tokens=outcome.recomputed_tokens,
        passes=sum(one.layers == outcome.passes[-1].layers for one in outcome.passes),
        reason=DeclineReason.QUALITY_RISK if all_computed else None,
        detail=f"all {outcome.recomputed_tokens} donor tokens were computed after all" if all_computed else "",
        recomputed_runs=outcome.recomputed_runs,
    )
