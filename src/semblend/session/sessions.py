"""What every engine decides about a request in the same way.

An adapter calls, for each request:

    offer        how many tokens behind the exact hit shall we provide? Asked again as long as the request waits
    begin_load   it has room for them: the donors are claimed, or the request runs cold
    finish_load  what became of that
    answer       its prompt is complete: how much of it is to be kept as a donor
    confirm      the receipt, once its first token is out
    restart      the engine took its KV back
    end          it was answered, or aborted: no claim of it is left

Nothing in here moves KV.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from semblend.config import SemBlendConfig
from semblend.confirm import events
from semblend.confirm.receipt import Receipt, RequestFacts, build_receipt
from semblend.errors import SemBlendError
from semblend.facade import SemBlend
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.gate import OutcomeMemory, name_kind
from semblend.materialize.gate.thresholds import PlanShape
from semblend.plan.cost import explain_lost_donor
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.plan.selection import keep_in_order, leave_out_repetitions
from semblend.plan.times import AT_ONCE, EDITED, NOTHING, PASSES, PAYS_BELOW, Forecast, Timed, TimeModel, Work
from semblend.quality import choose_quality, read_nats
from semblend.session.edit_debts import EditDebts, EditedHistory
from semblend.session.lineage import Lineage
from semblend.session.session import NEVER, Expectation, LoadResult, ReuseSession, SessionRequest, State
from semblend.session.trial import KindSwitches, Trial

log = logging.getLogger("semblend.session")

_LOOKED_UP = {  # donors were looked for, and none of them would do
    DeclineReason.NOTHING_SHARED,
    DeclineReason.BELOW_BREAK_EVEN,
    DeclineReason.QUALITY_RISK,
}
SHORT_TAIL = 128
"""Tokens behind the last span that we compute in mode fast too: a pass of ours runs in any case, and what is left to
the engine is then as quick as decoding. Tails of 32 were measured."""

NEW_PART = 16
"""A prompt becomes a donor where at least one in so many tokens is no donor's yet: a hundred users of one document are
one donor, and a conversation becomes one again when it has grown by so much."""

MIN_ANSWER = 64
"""Tokens of an answer for which prompt and answer are copied together."""

ACTIVE_S = 600.0
"""For so long after a turn a conversation's donor leaves after others: tools and people take their time."""

MAX_CHOICES = 12
"""Of a plan with more spans, only so many ways to cut it short are compared."""

MAX_BEGINNINGS = 3
"""How often a load may begin that loses its slots or its prefix to other requests; then the engine computes it."""


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """What of an engine matters to a decision; ``name`` and ``version`` stand in receipts.

    ``page_tokens``: claims are made in whole pages behind the exact tokens. ``samples``: the first token is sampled
    from our logits, so a claim covers the whole prompt; other engines compute the last token themselves.
    ``computes_gaps``: in mode fast the engine computes what lies between spans, at its own price. ``keeps_donors``:
    requests become donors, where ``donor_min_new_tokens`` of them are new.
    """

    name: str
    version: str
    page_tokens: int = 1
    samples: bool = False
    computes_gaps: bool = False
    keeps_donors: bool = True
    donor_min_new_tokens: int = 32


class HeldDonors(Protocol):
    """The donors whose KV an engine has. ``epoch`` moves when they come or go: an older decision may be wrong."""

    @property
    def epoch(self) -> int: ...
    def look_around(self) -> None:
        """Take in what neighbours have published."""

    def list_missing(self, plan: ReusePlan) -> list[str]:
        """Donors of a plan whose KV is not there."""
        ...

    def find_beginning(self, session: ReuseSession) -> str | None:
        """The longest donor that a prompt begins with: that of the conversation's turns so far."""
        ...

    def keep_first(self, donor_id: str, seconds: float) -> None:
        """A conversation goes on from this donor: for so long it leaves after the others of its tenant."""


class Sessions:
    """See the module. ``config`` says what a request without a word of its own gets; ``quality`` what passes cost."""

    def __init__(
        self,
        semblend: SemBlend,
        traits: EngineTraits,
        donors: HeldDonors,
        *,
        config: SemBlendConfig | None = None,
        quality: QualitySettings | None = None,
        outcomes: OutcomeMemory | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.semblend, self.traits, self.donors = semblend, traits, donors
        self.config = semblend.config if config is None else config
        self.quality = QualitySettings() if quality is None else quality
        self.outcomes = OutcomeMemory() if outcomes is None else outcomes
        self.times, self.trial, self.read_clock = TimeModel(), Trial(self.config.control_share), clock
        self.switches, self.lineage, self.debts = KindSwitches(), Lineage(), EditDebts()

    def note_start(self, times: Sequence[Timed]) -> None:
        """How long a pass over few rows, one over many, and a load took when the engine started."""
        if self.config.learn_costs and times:
            self.times.warm_up(PASSES, *times)

    def make(self, request: SessionRequest) -> ReuseSession:
        return ReuseSession(request, choose_mode(self.config, request.quality, request.prompt.namespace.tenant))

    # -- a request that waits ----------------------------------------------------------------------------------------

    def offer(self, session: ReuseSession, exact_tokens: int, *, goes_on_from: int = 0) -> int:
        """Tokens behind the ``exact_tokens`` of the engine that we shall provide; 0 for none.

        ``goes_on_from``: so many tokens the engine holds from an earlier edit of the same history, to go on from.
        """
        if not session.is_open:
            return 0
        session.goes_on_from = goes_on_from
        session.taken_up = self.read_clock()
        self.donors.look_around()
        if session.epoch == self.donors.epoch and session.exact_tokens == exact_tokens:
            return session.offered_tokens
        session.withdraw()
        if session.loads_begun:
            self.semblend.release(session.request_id)
        session.exact_tokens = exact_tokens
        if exact_tokens >= len(session.prompt) - (0 if self.traits.samples else 1):
            return 0
        session.epoch = self.donors.epoch
        decision = session.decision = self._decide(session)
        if isinstance(decision, ReusePlan) and (end := self.find_claim_end(session, decision)) > exact_tokens:
            session.offer(decision, end)
        return session.offered_tokens

    def goes_on(self, session: ReuseSession) -> bool:
        """Whether a request goes on from an earlier edit, which is quicker than what was decided for it.

        Not where it is computed for a reason: to become a donor, to compare, or because it wants no reuse.
        """
        decision = session.decision
        is_cold = session.heals or (isinstance(decision, Decline) and decision.reason not in _LOOKED_UP)
        if is_cold or not session.goes_on_from:
            return False
        alone = self._expect_prefill(session, session.exact_tokens)
        offered = session.expected.forecast.reuse if session.offered_tokens and session.expected else alone
        return self._expect_prefill(session, session.goes_on_from) < PAYS_BELOW * min(offered, alone)

    def _expect_prefill(self, session: ReuseSession, begun: int) -> float:
        """What the engine's own prefill is expected to take behind the ``begun`` tokens that it holds."""
        prefill = Work.of_prefill(len(session.prompt), begun)
        return self.times.expect(session.path, NOTHING, NOTHING, prefill).cold

    def stand_back(self, session: ReuseSession, exact_tokens: int, why: str | None) -> None:
        """The engine computes what lies behind its ``exact_tokens``; nothing is offered until it asks again."""
        if session.state in (State.LOADING, State.FILLED):
            session.restart()
        elif session.is_open:
            session.withdraw()
        session.exact_tokens, session.epoch = exact_tokens, NEVER
        session.decision = None if why is None else Decline(DeclineReason.UNSUPPORTED_MODE, why)

    def explain_no_reuse(self, session: ReuseSession) -> str | None:
        """Why a request like this is computed without donors; None where it need not be."""
        if session.restarted or session.request.answered:
            return session.request.unsupported or "the request was preempted and goes on with the tokens it has said"
        return session.request.unsupported or None

    def opts_out(self, session: ReuseSession) -> bool:
        return session.request.opt_out or session.mode == "exact"

    def _decide(self, session: ReuseSession) -> ReusePlan | Decline:
        if why := self.explain_no_reuse(session):
            return Decline(DeclineReason.UNSUPPORTED_MODE, why)
        if why := self._explain_no_lookup(session):
            return Decline(DeclineReason.BELOW_BREAK_EVEN, why)
        started = time.perf_counter()
        decision = self.semblend.lookup(
            session.prompt,
            request_id=session.request_id,
            exact_tokens=session.exact_tokens,
            opt_out=self.opts_out(session),
            base=self._find_base(session),
        )
        if isinstance(decision, ReusePlan):
            decision = self.judge(session, decision)
        session.lookup_ms = (time.perf_counter() - started) * 1e3
        return decision

    def _find_base(self, session: ReuseSession) -> str:
        """The donor that holds what the request says it was edited from; whoever names another's is not heard."""
        wall = session.prompt.namespace

        def is_there(donor_id: str) -> bool:
            donor = self.semblend.get_donor(donor_id)
            return donor is not None and donor.namespace == wall

        return self.lineage.find(session.request.base, is_there) or ""

    def _explain_no_lookup(self, session: ReuseSession) -> str | None:
        """Why no donor could pay: so much of the prompt is exact that a pass over the rest costs less than any reuse.

        Many users of one document are like that. A lookup reads the whole prompt, 2 ms for 8,192 tokens.
        """
        tokens, exact = len(session.prompt), session.exact_tokens
        if not exact or self.opts_out(session):
            return None
        least = Work(min(tokens - exact, self.quality.first_seam_tokens), 0)
        forecast = self.times.expect(session.path, least, NOTHING, Work.of_prefill(tokens, exact))
        return None if forecast.pays else f"{tokens - exact} tokens to compute: {forecast.describe()}"

    def judge(self, session: ReuseSession, plan: ReusePlan) -> ReusePlan | Decline:
        """The plan, or as much of it as saves most; a decline where it would cost more than it saves."""
        if not plan.until(self.find_claim_end(session, plan)).spans:
            end = "what donors hold is the end of the prompt, which the engine computes itself"
            return Decline(DeclineReason.BELOW_BREAK_EVEN, end)
        plan, expected = self._choose_spans(session, leave_out_repetitions(plan))
        if self.traits.keeps_donors and (lost := explain_lost_donor(plan)):
            return Decline(DeclineReason.BELOW_BREAK_EVEN, lost)
        session.expected = expected
        if not session.judged:
            session.judged = True
            session.predicted_loss = self._predict_loss(session, plan, expected)
        return session.predicted_loss or plan

    def _predict_loss(self, session: ReuseSession, plan: ReusePlan, expected: Expectation) -> Decline | None:
        """Why a plan is not begun: it does not pay, or its request was drawn to compare; None where it is begun."""
        rows, alone = expected.work.rows, plan.prompt_tokens - plan.exact_tokens
        if expected.path in (AT_ONCE, EDITED) and rows > self.quality.most_work * alone:  # the gate would look in vain
            return Decline(DeclineReason.BELOW_BREAK_EVEN, f"a repair would compute {rows:,} of {alone:,} tokens")
        session.edited = _find_edited(session, plan)
        if session.edited is not None and (why := self.debts.settle(session.edited, self._choose_way(session))):
            session.heals = True
            return Decline(DeclineReason.BELOW_BREAK_EVEN, why)
        verdict = self.outcomes.judge(plan, session.prompt.namespace, expected.forecast, session.mode)
        if verdict.decline is None or verdict.is_by_cost:
            switched = self.switches.note(expected.kind, begun=verdict.decline is None)
            if switched is not None:
                self._tell_switch(session, expected.kind, verdict.forecast, on=switched)
        if verdict.decline is not None:
            return verdict.decline
        if self.trial.draws_control():
            return Decline(
                DeclineReason.CONTROL, f"drawn as one of {self.trial.share:.1%} that reuse nothing, to compare"
            )
        return None

    def _choose_way(self, session: ReuseSession) -> Forecast:
        """What an edited prompt is expected to take in the cheaper way: from donors, or from the edit before it."""
        assert session.expected is not None, "its plan was chosen"
        forecast = session.expected.forecast
        if not session.goes_on_from:
            return forecast
        goes_on = self._expect_prefill(session, session.goes_on_from)
        return replace(forecast, reuse=goes_on if session.shares else min(goes_on, forecast.reuse))

    def _choose_spans(self, session: ReuseSession, plan: ReusePlan) -> tuple[ReusePlan, Expectation]:
        """The first spans of a plan, as many as save most, and what that is expected to take.

        Behind the last one the engine goes on by itself. The gate, and an engine that computes gaps, take them all.
        """
        count = len(plan.spans)
        counts = {count}
        if not (session.is_gated or self.traits.computes_gaps):  # some of many: each of them is worked out
            counts |= {1 + number * count // MAX_CHOICES for number in range(MAX_CHOICES)} if count > 1 else set()
        best: tuple[ReusePlan, Expectation] | None = None
        repair = self.outcomes.choose_repair(plan, session.prompt.namespace, session.mode)
        plan = replace(plan, repair=repair) if repair else plan
        for count in sorted(counts):
            part = plan if count == len(plan.spans) else replace(plan, spans=plan.spans[:count], saving_ms=None)
            expected = self._expect(session, part)
            if best is None or expected.forecast.reuse <= best[1].forecast.reuse:
                best = part, expected
        assert best is not None, "a plan has spans"
        return best

    def _expect(self, session: ReuseSession, plan: ReusePlan) -> Expectation:
        """What a plan makes us and the engine compute, and how long that is expected to take."""
        tokens, exact = plan.prompt_tokens, plan.exact_tokens
        end = tokens if self.traits.samples else min(tokens, self.find_claim_end(session, plan) + 1)
        repaired = max(self.quality.steps[0].percent, plan.repair) if session.is_gated else 0
        path = self.outcomes.foresee_path(plan, session.mode)
        work = count_work(plan.until(end), self.quality, repaired / 100, at_once=path in (AT_ONCE, EDITED))
        tail = Work.of_prefill(tokens, end) if end < tokens else NOTHING
        forecast = self.times.expect(path, work, tail, Work.of_prefill(tokens, exact))
        return Expectation(work, tail, forecast, name_kind(plan, read_nats(session.mode)), path)

    def _tell_switch(self, session: ReuseSession, kind: str, forecast: Forecast, *, on: bool) -> None:
        log.warning(
            "SemBlend: reuse is %s for prompts of a kind (%s): %s", "on" if on else "off", kind, forecast.describe()
        )
        if self.semblend.events:
            self.semblend.events.emit(
                events.reuse_switched(
                    session.request_id,
                    kind,
                    on,
                    expected_ms=forecast.reuse if forecast.timed else None,
                    expected_cold_ms=forecast.cold if forecast.timed else None,
                    detail=forecast.describe(),
                    engine=self.traits.name,
                )
            )

    def find_claim_end(self, session: ReuseSession, plan: ReusePlan) -> int:
        """Where the claim ends, in whole pages behind the exact tokens.

        The gate has to see what the question does, so with it we compute what is behind the last span.
        """
        if self.traits.samples:
            return len(session.prompt)
        last, held = len(session.prompt) - 1, plan.spans[-1].target_end
        end = last if session.is_gated or last - held <= SHORT_TAIL else held
        if session.request.longest_prefix is not None:
            end = min(end, session.request.longest_prefix)
        behind = max(0, end - session.exact_tokens)
        return session.exact_tokens + behind // self.traits.page_tokens * self.traits.page_tokens

    def count_plan_tokens(self, session: ReuseSession) -> int:
        """Tokens that a load works on: the gate wants the distribution behind the prompt's last one too."""
        return len(session.prompt) if session.is_gated else session.claim_end

    # -- a load ------------------------------------------------------------------------------------------------------

    def begin_load(self, session: ReuseSession) -> ReusePlan | Decline:
        """Claim the donors of what was offered, until the receipt; where that fails the request runs cold."""
        plan = session.decision
        assert isinstance(plan, ReusePlan), "only what was offered can be loaded"
        session.loads_begun += 1
        claimed: ReusePlan | Decline
        if session.loads_begun > MAX_BEGINNINGS:
            claimed = Decline(DeclineReason.CAPACITY, f"its load was stopped {MAX_BEGINNINGS} times")
        else:
            claimed = self.semblend.claim(plan, session.request_id)
        if isinstance(claimed, ReusePlan) and (missing := self.donors.list_missing(plan)):
            self.semblend.release(session.request_id)
            for donor_id in missing:  # known to the library and not there: as after a restart with a store file
                self.semblend.forget(donor_id, reason="engine")
            claimed = Decline(DeclineReason.STALE, f"the KV of donor {missing[0]} is not there")
        if isinstance(claimed, Decline):
            session.run_cold(claimed)
            return claimed
        session.taken_up = self.read_clock()
        session.begin_load(plan.until(self.count_plan_tokens(session)))
        assert session.plan is not None
        return session.plan

    def stop_load(self, session: ReuseSession) -> None:
        """A load was given up and may begin again; its donors may go meanwhile."""
        session.stop_load()
        self.semblend.release(session.request_id)

    def finish_load(self, session: ReuseSession, result: LoadResult) -> None:
        """A load is over. A donor whose KV is not what its tokens ask for goes."""
        if not result.failed:
            session.fill(result)
        else:
            session.run_cold(result.decline or Decline(DeclineReason.ERROR, "its load failed"), result)
        if result.exact_until is None:  # there is nothing of a donor in it
            self.semblend.release(session.request_id)
        if result.reason is DeclineReason.VALIDATION_FAILED and session.plan is not None:
            for donor_id in result.faulty_donors or session.plan.donor_ids:
                self.semblend.forget(donor_id, reason="engine")
        elif result.reason is DeclineReason.ERROR:
            self.report_failure("materialize", result.detail, session.request_id)

    def run_cold(self, session: ReuseSession, why: Decline) -> None:
        """The engine computes it, and its donors are free."""
        self.semblend.release(session.request_id)
        if session.state is not State.COLD:
            session.run_cold(why)

    # -- a request that runs -----------------------------------------------------------------------------------------

    def answer(self, session: ReuseSession) -> int:
        """Its prompt is complete: tokens of it that are to be kept as a donor, 0 for none."""
        if session.state is State.OFFERED:
            session.withdraw()
        session.answer()
        return self.count_donor_tokens(session)

    def count_donor_tokens(self, session: ReuseSession, tokens: int | None = None) -> int:
        """Tokens from the beginning of a request that are exact, if enough of them are new; 0 for no donor.

        ``tokens``: how many the engine holds of it, where that is more than the prompt: an answer, after it.
        What lies in front of a reused document, such as its instruction, is no donor unless it is long itself.
        """
        request, whole = session.request, len(session.prompt) if tokens is None else tokens
        wanted = self.traits.keeps_donors and self.config.enabled and not request.opt_out
        if not wanted or request.unsupported or request.answered:
            return 0
        exact, least = whole, self.traits.donor_min_new_tokens
        if session.exact_until is not None:
            exact, least = min(session.exact_until, len(session.prompt)), max(least, len(session.prompt) // NEW_PART)
            if session.plan is not None:
                exact = min(exact, session.plan.spans[0].target_start)  # the computed head of a span is in its donor
        return exact if exact - max(session.exact_tokens, session.kept_tokens) >= least else 0

    def count_answered_tokens(self, session: ReuseSession, tokens: int) -> int:
        """As `count_donor_tokens`, of a request that has ended and of which the engine holds ``tokens``.

        All of it is copied again, so its answer has to be worth that; the prompt may be a donor already.
        """
        if not session.has_answered or session.exact_until is not None or tokens - len(session.prompt) < MIN_ANSWER:
            return 0
        kept = self.count_donor_tokens(session, tokens)
        news = kept - max(session.exact_tokens, session.kept_tokens)
        return kept if news * NEW_PART >= kept else 0

    def confirm(
        self,
        session: ReuseSession,
        *,
        ttft_ms: float | None = None,
        compute_ms: float | None = None,
        answered_at: float | None = None,
    ) -> Receipt | None:
        """The receipt, written once, when the first token is out (``answered_at``, or now); only it counts as reuse."""
        if session.receipt is not None or session.request.answered:
            return None
        result, refusal = session.result, session.cold
        work = None if result is None or result.failed else result
        if result is not None:
            refusal = result.decline or refusal
        if work is not None and work.compute_ms is None:
            work = replace(work, compute_ms=compute_ms)
        answered_at = self.read_clock() if answered_at is None else answered_at
        service_ms = None if session.taken_up is None else (answered_at - session.taken_up) * 1e3
        expected = session.expected
        timed = expected is not None and expected.forecast.timed
        facts = RequestFacts(
            request_id=session.request_id,
            engine=self.traits.name,
            engine_version=self.traits.version,
            namespace=session.prompt.namespace,
            mode=session.mode,
            prompt_tokens=len(session.prompt),
            exact_tokens=session.exact_tokens,
            decision=session.plan or session.decision or self._explain_opt_out(session),
            lookup_ms=session.lookup_ms,
            compute_ms=compute_ms,
            ttft_ms=ttft_ms,
            service_ms=service_ms,
            kind="" if expected is None else expected.kind,
            expected_ms=expected.forecast.reuse if expected is not None and timed else None,
            expected_cold_ms=expected.forecast.cold if expected is not None and timed else None,
        )
        session.receipt = build_receipt(facts, work or _strip(result), refusal)
        if service_ms is not None and not session.restarted:
            self._learn(session, service_ms)
        self.record(session.receipt)
        self._note_lineage(session)
        return session.receipt

    def _explain_opt_out(self, session: ReuseSession) -> Decline | None:
        """Why nobody looked for donors; an engine may know that before it asks."""
        if not self.opts_out(session):
            return None
        asked = "the request opted out" if session.request.opt_out else "mode exact takes exact prefixes only"
        return Decline(DeclineReason.DISABLED, asked)

    def _note_lineage(self, session: ReuseSession) -> None:
        """A conversation goes on, exactly or edited: its donor is wanted again, and known by this request's name."""
        if self.opts_out(session):
            return
        donor_id = None
        if session.plan is not None and (session.goes_on_from or not session.shares):
            if session.edited is not None or PlanShape.of(session.plan).revises:
                donor_id = session.plan.donor_ids[0]
                if session.edited is not None and session.exact_until is not None:
                    self.debts.note(session.edited, self._choose_way(session))
        elif session.exact_tokens >= self.traits.donor_min_new_tokens:
            donor_id = self.donors.find_beginning(session)
        if donor_id is not None:
            self.lineage.note(session.request_id, donor_id)
            self.donors.keep_first(donor_id, ACTIVE_S)

    def _learn(self, session: ReuseSession, ms: float) -> None:
        """Take in how long a request took from when the engine took it up; what it shares, another has paid for."""
        expected, result = session.expected, session.result
        rows = len(session.prompt) - session.exact_tokens
        if session.loads_begun == 0 and not session.shares:
            if rows and self.config.learn_costs:
                self.times.note_cold(Work.of_prefill(len(session.prompt), session.exact_tokens), ms)
            is_control = isinstance(session.decision, Decline) and session.decision.reason is DeclineReason.CONTROL
            if is_control and expected is not None and expected.forecast.timed:
                found = self.trial.note(expected.kind, ms, expected.forecast.cold, control=True)
                if found is not None:
                    self.semblend.metrics.compared(found.kind, found.ratio, found.low, found.high)
        elif session.loads_begun == 1 and expected is not None and result is not None and not session.shares:
            forecast = expected.forecast
            as_expected = not session.is_gated or (result.passes == 1) == (expected.path in (AT_ONCE, EDITED))
            if not result.failed and result.reason is None and as_expected and self.config.learn_costs:
                self.times.note_reuse(expected.path, expected.work, expected.tail, ms)
            if session.plan is not None and (session.is_gated or forecast.timed):
                took = ms if forecast.timed else result.work * forecast.cold
                namespace = session.prompt.namespace
                self.outcomes.learn(
                    session.plan,
                    namespace,
                    forecast,
                    session.mode,
                    took=took,
                    reason=result.reason,
                    escalations=result.escalations,
                )
            if forecast.timed:
                self.trial.note(expected.kind, ms, forecast.cold, control=False)

    def record(self, receipt: Receipt) -> None:
        """Hand a receipt to the library; one that it refuses costs no answer."""
        try:
            self.semblend.confirm(receipt)
        except SemBlendError as error:  # such as a request id that was used before
            self.semblend.release(receipt.request_id)
            self.report_failure("confirm", str(error), receipt.request_id)

    def restart(self, session: ReuseSession) -> None:
        """The engine took its KV back: the claim goes, and it begins again."""
        self.semblend.release(session.request_id)
        session.restart()

    def end(self, session: ReuseSession) -> None:
        """The request is gone, and so is its claim."""
        self.semblend.release(session.request_id)
        if session.state is not State.ENDED:
            session.end()

    def report_failure(self, where: str, message: str, request_id: str = "") -> None:
        """Something of ours failed; the request is computed cold or was already."""
        if self.semblend.events:
            self.semblend.events.emit(events.error(where, message, request_id or None, engine=self.traits.name))


def choose_mode(config: SemBlendConfig, asked: str | None, tenant: str) -> str:
    """The quality of a request: the one it asked for, its tenant's, or the engine's; exact where it has to forget."""
    if config.forgets(tenant):
        return "exact"
    return choose_quality(asked, config.find_tenant_quality(tenant), config.quality)


def count_work(plan: ReusePlan, settings: QualitySettings, repaired: float = 0.0, *, at_once: bool = False) -> Work:
    """Rows that passes of ours compute for a plan: what no donor holds, the heads of spans and the prompt's end.

    ``repaired``: the share of the reused tokens that a second pass computes, with all that lies behind the first span;
    or the first and only pass, ``at_once``.

    >>> from semblend.span import Span
    >>> count_work(ReusePlan((Span("d", 0, 10, 80),), 100), QualitySettings(first_seam_tokens=4))
    Work(rows=42, keys=1831, moved=80)
    """
    rows, keys = plan.prompt_tokens - plan.exact_tokens, _sum_keys(plan.exact_tokens, plan.prompt_tokens)
    moved = moved_keys = 0
    kept = keep_in_order(plan.spans, settings.moved_ahead_share)
    for span in kept:
        seam = settings.first_seam_tokens if span is kept[0] else settings.seam_tokens
        start = span.target_start + min(max(seam, settings.seam_tokens), span.length)
        end = max(start, min(span.target_end, plan.prompt_tokens - settings.question_tokens))
        rows -= end - start
        keys -= _sum_keys(start, end)
        moved, moved_keys = moved + span.length, moved_keys + _sum_keys(span.target_start, span.target_end)
    first = Work(rows, keys, moved)
    if not repaired:
        return first
    repair = Work(round(repaired * moved), round(repaired * moved_keys))
    if at_once:
        return first + repair
    before = kept[0].target_start - plan.exact_tokens  # exact, whatever is repaired behind it
    again = Work(rows - before, keys - _sum_keys(plan.exact_tokens, kept[0].target_start))
    return first + again + repair


def _find_edited(session: ReuseSession, plan: ReusePlan) -> EditedHistory | None:
    return EditedHistory.of(plan, session.prompt.token_ids) if PlanShape.of(plan).revises else None


def _sum_keys(start: int, end: int) -> int:
    """Positions that the rows from ``start`` to ``end`` attend to, in sum."""
    return (end * (end + 1) - start * (start + 1)) // 2


def _strip(result: LoadResult | None) -> LoadResult | None:
    """A load that failed counts no tokens; what the gate has seen and what it took still stands in the receipt."""
    return None if result is None else replace(result, reused_tokens=0, recomputed_tokens=0)
