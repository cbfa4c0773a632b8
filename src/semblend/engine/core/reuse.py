"""The semantic half of the engine: what happens to a request besides computing it.

Before prefill: look for donors, claim the plan, let the blender put their KV in place. After the first token: the
receipt. Then, if everything the prompt holds was computed exactly: keep it as a donor. Where a request is in that
stands in its session; what is decided, `Sessions` decides. Nothing in here raises: what fails is told as an event, and
the request is computed as if there were no donors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from semblend._version import __version__
from semblend.config import SemBlendConfig
from semblend.confirm.receipt import Receipt
from semblend.discover.donor import ANSWERED, Donor
from semblend.engine.core.config import PATIENCE, EngineConfig
from semblend.engine.core.directory_donors import DirectoryDonors
from semblend.engine.core.sequence import Sequence
from semblend.engine.model.paged_kv import KvPool
from semblend.facade import SemBlend
from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.quality import Blended, Pace, Rejected, Spliced
from semblend.materialize.donors.directory import SharedDonors, is_key
from semblend.materialize.donors.directory_kv import DirectoryKv, Publisher
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.gate.gate import OutcomeMemory
from semblend.materialize.kv.moves import count_bytes
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.prompt import Namespace, Prompt
from semblend.session.local import describe_outcome
from semblend.session.session import LoadResult, ReuseSession, SessionRequest
from semblend.session.sessions import EngineTraits, Sessions
from semblend.wire.request import Request

ENGINE_NAME = "semblend"
log = logging.getLogger("semblend.engine")


class Reuse:
    """Fill, confirm, capture: one verb each, called by the engine in this order for every request."""

    epoch = 0
    """A request is asked about when it has its blocks, and not again: changes of donors are no concern of it."""

    def __init__(
        self,
        semblend: SemBlend | None,
        blender: Blender | None,
        pool: KvPool,
        config: EngineConfig,
        outcomes: OutcomeMemory | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Without a library and a blender every request is computed. ``pace`` is that of the blender's pieces."""
        self.semblend = semblend or SemBlend(SemBlendConfig(enabled=False, metrics=False))
        self.directory: DirectoryDonors | None = None  # where donors are shared with other engines
        self._blender = blender
        self._pool = pool
        self._config = config
        self._pace = Pace() if pace is None else pace
        library = self.semblend
        traits = EngineTraits(
            ENGINE_NAME,
            __version__,
            samples=True,
            computes_gaps=not library.config.strict_prefix_boundary,
            keeps_donors=config.keep_donors,
            donor_min_new_tokens=config.donor_min_new_tokens,
        )
        settings = replace(library.config, quality=config.quality)
        self.sessions = Sessions(library, traits, self, config=settings, outcomes=outcomes)

    @property
    def donor_kv(self) -> DonorKv | None:
        return None if self._blender is None else self._blender.donor_kv

    def close(self) -> None:
        """Remove donor KV from disk, and close the store of donors."""
        for part in (self.directory, self.donor_kv, self.semblend):
            if part is not None:
                part.close()

    def open(self, request: Request, prompt: Prompt) -> ReuseSession:
        """The session of a request that has come."""
        asked = SessionRequest(
            request.request_id, prompt, quality=request.quality, opt_out=request.opt_out, base=request.base
        )
        return self.sessions.make(asked)

    def may_fill(self, session: ReuseSession) -> bool:
        """Whether donors are looked for at all; looks at the settings only."""
        return self._blender is not None and session.mode != "exact"

    def fill(self, sequence: Sequence, work_ms: float | None = None, is_awaited: Callable[[], bool] = bool) -> bool:
        """Put donor KV in place for a sequence that has its blocks; False where the engine has to compute, all or some.

        It works for about ``work_ms``, or until ``is_awaited``; where it is not done then, the sequence stays
        ``to_fill`` and the next call goes on. A sequence that is preempted before its first token is tried again.
        """
        session, sequence.to_fill = sequence.session, False
        assert self._blender is not None, "see may_fill"
        try:
            if sequence.filling is None:
                if not self.sessions.offer(session, session.exact_tokens):
                    return False
                plan = self.sessions.begin_load(session)
                if isinstance(plan, Decline):
                    return False
                plan = plan if self.directory is None else self.directory.name_generations(plan)
                sequence.slots_in(self._pool)
                if self.sessions.traits.computes_gaps and not session.is_gated:  # the gate needs passes of its own
                    return self._splice(sequence, self._blender.place(sequence, plan))
                sequence.filling = self._blender.prepare_in_pieces(sequence, plan, mode=session.mode)
            return self._go_on(sequence, work_ms, is_awaited)
        except Exception as error:  # a failure of ours costs the request time, never its answer
            self._report_failure("materialize", sequence, error)
            self._start_over(sequence, Decline(DeclineReason.ERROR, f"{type(error).__name__}: {error}"))
        return False

    def compute_instead(self, sequence: Sequence) -> bool:
        """Compute a sequence cold whose first logits over donor KV are not numbers; False where donors have no part."""
        if sequence.held is None or sequence.receipt is not None:
            return False
        self._start_over(sequence, Decline(DeclineReason.VALIDATION_FAILED, "logits over donor KV are not numbers"))
        return True

    def read_first_logits(self, sequence: Sequence) -> Tensor:
        """What the blender computed after the prompt's last token, [1, vocab]."""
        assert sequence.blended is not None, "only a filled sequence has logits before it ran"
        return sequence.blended.logits_last.reshape(1, -1)

    def confirm(self, sequence: Sequence) -> Receipt | None:
        """The receipt, at the moment of the first token; only it counts as reuse. None where it was written before."""
        session = sequence.session
        if not session.has_answered:
            self.sessions.answer(session)
        if session.receipt is not None:
            return None
        ttft_ms = (time.perf_counter() - sequence.submitted) * 1e3
        try:
            return self.sessions.confirm(session, ttft_ms=ttft_ms, compute_ms=sequence.compute_ms)
        except Exception as error:  # the answer goes on
            self._report_failure("confirm", sequence, error)
            return session.receipt

    def list_recomputed(self, sequence: Sequence) -> tuple[tuple[int, int], ...]:
        """Runs of the prompt that a donor held and that were computed again; empty where the blender does not tell."""
        result = sequence.session.result
        return result.recomputed_runs if result else ()

    def capture(self, sequence: Sequence) -> None:
        """Keep the prompt's KV as a donor, as far as it is exact, if enough of that is new.

        A prompt that was preempted and computed again may be exact further than before; it takes its donor's place.
        """
        self._keep(sequence, self.sessions.count_donor_tokens(sequence.session), sequence.request_id)

    def capture_answered(self, sequence: Sequence, *, busy: bool) -> None:
        """It has ended: where its answer is exact, prompt and answer become one donor, under a name of its own.

        ``busy``: others run, and would wait for a copy that leaves the device.
        """
        tokens = self.sessions.count_answered_tokens(sequence.session, sequence.computed)
        if not busy or (self.donor_kv is not None and self.donor_kv.has_room_on_device(self._pool.layout, tokens)):
            self._keep(sequence, tokens, f"{sequence.request_id}{ANSWERED}")

    def _keep(self, sequence: Sequence, tokens: int, donor_id: str) -> None:
        donors, session, prompt = self.donor_kv, sequence.session, sequence.prompt
        if donors is None or not tokens:
            return
        if self.directory is not None and not self.directory.may_keep(donor_id):
            return
        if tokens != sequence.prompt_tokens:
            prompt = Prompt(sequence.tokens[:tokens], namespace=prompt.namespace)
        try:
            donor = self.semblend.register(prompt, donor_id)
            try:
                slots = sequence.slots_in(self._pool)[:tokens]
                donors.capture(donor_id, donor.generation, self._pool.layout, slots, tenant=prompt.namespace.tenant)
            except Exception:
                self.semblend.forget(donor_id, reason="engine")  # a donor without KV must not be found
                raise
            session.keep(tokens)
            self.sessions.lineage.note(sequence.request_id, donor_id)
            self._supersede(donor)
            if self.directory is not None:
                self.directory.publish(donor_id, donor.generation, prompt)
            for tier, used in donors.used_bytes.items():
                self.semblend.metrics.donors(self.semblend.stats().donors, used, tier)
        except Exception as error:  # a donor less; the answer goes on
            self._report_failure("capture", sequence, error)

    def share_donors(self, kv: DirectoryKv, path: str, budget_bytes: int, *, every_s: float = 1.0) -> None:
        """Publish at most ``budget_bytes`` of donors in ``path``, and find others' there, whose KV is in ``kv``."""
        assert self.donor_kv is not None, "their KV is kept here"
        namespace = Namespace(model=self._config.model_name, kv_dtype=str(self._pool.dtype).removeprefix("torch."))
        shared = SharedDonors(
            path,
            budget_bytes,
            namespace,
            token_bytes=self.count_token_bytes(),
            ttl_s=self.semblend.config.donor_ttl_s,
            every_s=every_s,
        )
        kv.verify_ahead()
        self.directory = DirectoryDonors(self.semblend, shared, kv, Publisher(self.donor_kv))
        self.directory.take_in_all()

    def count_token_bytes(self) -> float:
        """What the KV of one token takes in a file."""
        assert self.donor_kv is not None, "their KV is kept here"
        (layers, _, kv_heads, head_dim), tokens = self._pool.k.shape, 6400
        shape = (layers, tokens, kv_heads, head_dim)
        return count_bytes(self.donor_kv.memory.list_shapes("host", shape, self._pool.dtype)) / tokens

    def forget_donors(self) -> int:
        """Drop every donor and its KV; returns how many went."""
        if self.donor_kv is not None:
            for donor in self.semblend.donors():
                self.donor_kv.drop(donor.donor_id)
        if self.directory is not None:
            return self.directory.forget_all(self.semblend.clear)
        return self.semblend.clear()

    def release(self, sequence: Sequence) -> None:
        """A sequence ended; let go of its claim if no receipt did."""
        sequence.blended = None
        self.sessions.end(sequence.session)

    # -- the donors that this engine holds, for its sessions ---------------------------------------------------------

    def look_around(self) -> None:
        if self.directory is not None:
            self.directory.look_around()

    def list_missing(self, plan: ReusePlan) -> list[str]:
        """Donors that the library knows, but whose KV is not here: as after a restart with a store file."""
        donors = self.donor_kv
        named = plan if self.directory is None else self.directory.name_generations(plan)
        held = dict.fromkeys((span.donor_id, span.generation) for span in named.spans)
        return [] if donors is None else [donor_id for donor_id, made in held if not donors.holds(donor_id, made)]

    def find_beginning(self, session: ReuseSession) -> str | None:
        donor = self.semblend.find_beginning(session.prompt)
        return None if donor is None else donor.donor_id

    def keep_first(self, donor_id: str, seconds: float) -> None:
        donor, donors = self.semblend.get_donor(donor_id), self.donor_kv
        if donor is not None and donors is not None:
            self.semblend.keep(donor_id, seconds)
            donors.keep(donor_id, donor.generation, seconds)

    # -- parts -------------------------------------------------------------------------------------------------------

    def _supersede(self, donor: Donor) -> None:
        """Earlier turns of a conversation are in its newest donor; the directory's go when their writers say so."""
        for older in self.semblend.supersede(donor.donor_id, lambda name: not is_key(name)):
            self.sessions.lineage.note(older.donor_id, donor.donor_id)
            if self._blender is not None:
                self._blender.note_heir((older.donor_id, older.generation), (donor.donor_id, donor.generation))

    def _splice(self, sequence: Sequence, spliced: Spliced | Decline) -> bool:
        """Donor KV is in place, the rest is left to the scheduler: strict_prefix_boundary is off."""
        if isinstance(spliced, Decline):
            return self._compute_declined(sequence, spliced)
        sequence.held = spliced.held
        result = LoadResult(
            int(spliced.held[0]),
            spliced.reused_tokens,
            spliced.recomputed_tokens,
            canary=spliced.canary,
            load_ms=spliced.load_ms,
            recomputed_runs=spliced.recomputed_runs,
        )
        self.sessions.finish_load(sequence.session, result)
        return False

    def _go_on(self, sequence: Sequence, work_ms: float | None, is_awaited: Callable[[], bool]) -> bool:
        """Let the blender work for about ``work_ms``, or until it is done or somebody else waits."""
        assert sequence.filling is not None
        allowed, started = work_ms or PATIENCE * self._config.step_work_ms, time.perf_counter()
        self._pace.piece_ms = allowed
        while True:
            try:
                next(sequence.filling)
            except StopIteration as done:
                blended: Blended | Rejected | Decline = done.value
                break
            spent = (time.perf_counter() - started) * 1e3
            if spent > allowed / 2 if work_ms is not None else is_awaited():
                sequence.to_fill = True
                return False
            self._pace.piece_ms = allowed - spent if work_ms is not None else allowed
        sequence.filling = None
        assert not isinstance(blended, Rejected), "this engine's blender prefills"
        if isinstance(blended, Decline):
            return self._compute_declined(sequence, blended)
        sequence.blended = blended
        sequence.computed = sequence.prompt_tokens
        self.sessions.finish_load(sequence.session, describe_outcome(blended))
        return True

    def _compute_declined(self, sequence: Sequence, why: Decline) -> bool:
        self.sessions.finish_load(sequence.session, LoadResult.refuse(why))
        self._compute_over(sequence)
        return False

    def _start_over(self, sequence: Sequence, why: Decline) -> None:
        self.sessions.run_cold(sequence.session, why)
        self._compute_over(sequence)

    def _compute_over(self, sequence: Sequence) -> None:
        """Compute everything behind the exact prefix, over whatever a blender left there: that is exact again."""
        sequence.blended = sequence.held = None
        sequence.stop_filling()
        sequence.computed = sequence.session.exact_tokens

    def _report_failure(self, where: str, sequence: Sequence, error: BaseException) -> None:
        message = f"{type(error).__name__}: {error}"
        log.warning("%s failed for request %s: %s", where, sequence.request_id, message)
        self.sessions.report_failure(where, message, sequence.request_id)
