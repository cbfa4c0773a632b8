"""Runs one case through every recipe of the quality benchmark, and measures each against cold."""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lib.histories import count_common, find_call
from lib.quality_cases import Case
from semblend import Prompt, SemBlend, SemBlendConfig
from semblend.engine.model.attention import RowBatch
from semblend.engine.model.model import DecoderModel, PooledModel
from semblend.engine.model.paged_kv import KvPool
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.quality import Blended, Pass, Placed, QualitySettings, Rejected, Step
from semblend.materialize.calibrate import CalibrationPrompt, reorder_passages
from semblend.materialize.contract import QUESTION_ROWS, Rows
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.gate.gate import OutcomeMemory
from semblend.materialize.gate.thresholds import DialTable, PassageOrder, Thresholds
from semblend.materialize.kv.moves import Move
from semblend.materialize.kv.splice import splice
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.plan.selection import leave_out_repetitions, list_reused_positions
from semblend.plan.times import Work
from semblend.quality import GATED_MODE, find_path
from semblend.session.session import SessionRequest
from semblend.session.sessions import EngineTraits, Sessions

LOOKS = ("deviation",)
"""Passes that end early."""
RERUN_CHUNK, RERUN_CHUNKS = 1000, 3
"""A rerun is computed in chunks of at most so many tokens, and in at least so many chunks: a short prompt too."""
REFERENCE_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a prompt is prepared.

    ``one_pass``: a baseline that needs no look first, so it is charged for one pass. ``extra``: an experiment that a
    run does only when it is named. ``all_spans``: with pieces of a history that its new messages repeat.
    """

    name: str
    settings: QualitySettings
    alone: bool = False
    unmoved: bool = False
    one_pass: bool = False
    extra: bool = False
    bits: int = 16
    all_spans: bool = False


def _fast(first: int, seam: int) -> QualitySettings:
    return QualitySettings(mode="fast", first_seam_tokens=first, seam_tokens=seam, question_tokens=1, deep_tolerance=0)


def recipes(thresholds: Thresholds) -> tuple[Recipe, ...]:
    balanced = QualitySettings(thresholds=thresholds)
    always = Thresholds(1e9, 1e9, 1e9, risk=thresholds.risk)

    def fixed(percent: int, rule: str, seams: bool = True) -> QualitySettings:
        bare = {} if seams else {"first_seam_tokens": 0, "seam_tokens": 0, "deep_tolerance": 0}
        return QualitySettings(thresholds=always, steps=(Step(percent, rule, "", ""),), most_work=10, **bare)

    def at_once(percent: int) -> QualitySettings:
        """In one pass where the gate would take one for an edited history; else as `attended`."""
        accepts = DialTable({PassageOrder.IN_ORDER: {percent: 0.0}}, {percent: (0.0, 0.0, 0.0, 0.0, -20.0)})
        step = Step(percent, "attended")
        return QualitySettings(thresholds=replace(always, edit_dial=accepts), steps=(step,), most_work=10)

    def product(percent: int) -> QualitySettings:
        return fixed(percent, "attended_and_deviating")

    return (
        Recipe("no correction", _fast(0, 0), unmoved=True),
        Recipe("relocate", _fast(0, 0)),
        Recipe("fast", QualitySettings(mode="fast")),
        Recipe("EPIC-16", _fast(16, 16), alone=True),
        Recipe("random-10", fixed(10, "at_random", seams=False), one_pass=True),
        Recipe("CacheBlend-15", fixed(15, "cacheblend", seams=False), one_pass=True),
        Recipe("CacheBlend-30", fixed(30, "cacheblend", seams=False), one_pass=True),
        Recipe("attended-10", fixed(10, "attended")),
        Recipe("product-20", product(20)),
        Recipe("product-40", product(40)),
        Recipe("balanced", balanced),
        Recipe("fast, all spans", QualitySettings(mode="fast"), extra=True, all_spans=True),
        Recipe("attended-20", fixed(20, "attended"), extra=True),
        *(Recipe(f"at-once-{percent}", at_once(percent), extra=True) for percent in (10, 15, 20, 40)),
        Recipe("product-10", product(10), extra=True),
        Recipe("product-60", product(60), extra=True),
        Recipe("deep4-25", replace(product(25), layer_share=0.2), extra=True),
        Recipe("deep8-25", replace(product(25), layer_share=0.55), extra=True),
    )


@dataclass(slots=True)
class Prepared:
    """One recipe's KV of so many ``tokens``, with room for the answer behind it.

    ``declined``: why an engine would not begin the plan.
    """

    name: str
    slots: Tensor
    logits: Tensor
    flops: float
    tokens: int
    blended: Blended | None = None
    declined: str | None = None


class Lab:
    """A model with a pool, and cases run through it."""

    def __init__(
        self,
        model: DecoderModel,
        tokenizer: ModelTokenizer,
        chosen: Sequence[Recipe],
        longest: int,
        *,
        other_order: bool = False,
        keeps_prefix: bool = False,
    ) -> None:
        """``other_order``: passages that moved are also computed cold in a third order, the yardstick of users.
        ``keeps_prefix``: what a prompt begins with like the first one is not computed again: for slow machines."""
        self.model, self.tokenizer, self.recipes, self.other_order = model, tokenizer, chosen, other_order
        self.pool: KvPool = model.new_pool((len(chosen) + 5) * (longest + 64))
        self.stop = set(model.spec.eos_ids)
        self._prefix, self._prefix_tokens = self.pool.slots_of([], 0, 0), tuple[int, ...]()
        self._kept = (self._prefix, self._prefix_tokens) if keeps_prefix else None

    def run(self, case: Case) -> list[dict[str, Any]]:
        """One record for each recipe, cold first."""
        blocks: list[int] = []
        try:
            return self._run(case, blocks)
        finally:
            self.pool.free(blocks)

    def _run(self, case: Case, blocks: list[int]) -> list[dict[str, Any]]:
        self._prefix, self._prefix_tokens = self._kept or (self._prefix[:0], ())
        cold = self._prefilled("cold", case, case.tokens, blocks)
        if self._kept is not None and not self._kept[1]:
            self._kept = cold.slots[: len(case.tokens)], case.tokens
            blocks.clear()  # never freed
        self._prefix = cold.slots[: case.exact_tokens]  # a prefix cache shares it, and nothing below writes it
        self._prefix_tokens = case.tokens[: case.exact_tokens]
        chunk = min(RERUN_CHUNK, (len(case.tokens) - case.exact_tokens) // RERUN_CHUNKS + 1)
        made = [cold, self._prefilled("rerun", case, case.tokens, blocks, chunk)]
        prompt = CalibrationPrompt(case.tokens, case.donors, case.spans)
        if case.other:
            made.append(self._prefilled("other wording", case, case.other, blocks))
        elif self.other_order and (moved := reorder_passages(prompt)) is not None:
            made.append(self._prefilled("other order", case, moved, blocks))
        for alone, bits in itertools.product((False, True), (16, 8)):
            donors, spans = case.alone if alone else (case.donors, case.spans)
            chosen = [recipe for recipe in self.recipes if (recipe.alone, recipe.bits) == (alone, bits)]
            if chosen:
                kv = self._captured(donors, bits)
                plan = ReusePlan(spans, len(case.tokens), case.exact_tokens)
                for recipe in chosen:
                    made += self._prepare(recipe, case, plan, kv, blocks)
        answers = self._answers(made, case)
        forced = self._forced(made, answers[0] or [next(iter(self.stop))])
        reference = self._reference(case, answers[0])
        nll = self._nll(self._forced(made, reference), reference)
        return [self._record(case, one, answers, i, forced, nll) for i, one in enumerate(made)]

    # -- preparing -------------------------------------------------------------------------------------------------

    def _prefilled(
        self, name: str, case: Case, tokens: Sequence[int], blocks: list[int], chunk: int = 1 << 30
    ) -> Prepared:
        exact = self._count_shared(tokens)
        slots = torch.cat([self._prefix[:exact], self._room(case, blocks, len(tokens) - exact)])
        return Prepared(name, slots, self._prefill(tokens, slots, chunk, exact), 1.0, len(tokens))

    def _count_shared(self, tokens: Sequence[int]) -> int:
        """Leading tokens that the prefix cache holds; the last one of a prompt is computed in any case."""
        return min(count_common(tokens, self._prefix_tokens), len(tokens) - 1)

    def _room(self, case: Case, blocks: list[int], tokens: int) -> Tensor:
        return self._slots(tokens + max(case.answer_tokens, REFERENCE_TOKENS), blocks)

    def _slots(self, tokens: int, blocks: list[int]) -> Tensor:
        mine = self.pool.allocate(self.pool.blocks_for(tokens))
        blocks += mine
        return self.pool.slots_of(mine, 0, tokens)

    def _prefill(self, tokens: Sequence[int], slots: Tensor, chunk: int = 1 << 30, exact: int = 0) -> Tensor:
        ids = torch.tensor(tokens, device=slots.device)
        hidden = torch.empty(0)
        for start in range(exact, len(tokens), chunk):
            at = torch.arange(start, min(start + chunk, len(tokens)), device=slots.device)
            hidden = self.model.forward(Rows.of(ids[at], at, slots), self.pool)
        return self.model.logits(hidden[-1:])[0]

    def _captured(self, donors: Sequence[Sequence[int]], bits: int = 16) -> DonorKv:
        kv = DonorKv(1 << 62 if bits == 16 else 0, 1 << 62, bits=bits)
        for number, donor in enumerate(donors):
            blocks: list[int] = []
            exact = self._count_shared(donor)
            slots = torch.cat([self._prefix[:exact], self._slots(len(donor) - exact, blocks)])
            self._prefill(donor, slots, exact=exact)
            kv.capture(str(number), 0, self.pool.layout, slots)
            self.pool.free(blocks)
        return kv

    def _prepare(self, recipe: Recipe, case: Case, plan: ReusePlan, kv: DonorKv, blocks: list[int]) -> list[Prepared]:
        tokens, exact = len(case.tokens), case.exact_tokens
        slots = torch.cat([self._prefix, self._room(case, blocks, tokens - exact)])
        if recipe.unmoved:
            return [self._unmoved(recipe, case, plan, kv, slots)]
        decision = self._decide(recipe, case, plan)
        if isinstance(decision, Decline):
            done: Blended | Rejected | Decline = decision
        else:
            blender = Blender(PooledModel(self.model, self.pool), kv, recipe.settings)
            done = blender.prepare(Placed(case.tokens, slots), decision)
        if isinstance(done, Decline) and done.reason in (DeclineReason.BELOW_BREAK_EVEN, DeclineReason.QUALITY_RISK):
            logits = self._prefill(case.tokens, slots, exact=exact)
            return [Prepared(recipe.name, slots, logits, self._prefix_flops(case), tokens, declined=done.detail)]
        if not isinstance(done, Blended):
            raise SystemExit(f"{case.case_id}: {recipe.name} declined: {done}")
        return [Prepared(recipe.name, slots, done.logits_last, self._flops(recipe, done.passes, tokens), tokens, done)]

    def _decide(self, recipe: Recipe, case: Case, plan: ReusePlan) -> ReusePlan | Decline:
        """What an engine would begin: the default goes by costs too, where a prefix cache is part of the comparison."""
        if not plan.spans:
            return Decline(DeclineReason.BELOW_BREAK_EVEN, "donors hold nothing that is worth moving")
        if not case.is_history or recipe.all_spans:
            return plan
        if recipe.name == "balanced":
            return decide(plan, recipe.settings)
        return leave_out_repetitions(plan)

    def _unmoved(self, recipe: Recipe, case: Case, plan: ReusePlan, kv: DonorKv, slots: Tensor) -> Prepared:
        """The control: donor KV where it is wanted, keys as they were."""
        for span in plan.spans:
            held = kv.acquire(span.donor_id, span.generation)
            assert held is not None
            move = Move(held, span.donor_start, span.length, slots[span.target_start : span.target_end], 0)
            splice([move], self.pool.layout, self.model.spec.rope)
            kv.release(held)
        computed = np.setdiff1d(np.arange(case.exact_tokens, len(case.tokens)), list_reused_positions(plan.spans))
        computed = np.union1d(computed, [len(case.tokens) - 1])
        at = torch.from_numpy(computed).to(slots.device)
        tokens = torch.tensor(case.tokens, device=slots.device)[at]
        hidden = self.model.forward(Rows.of(tokens, at, slots), self.pool)
        flops = self._pass_flops(len(computed), int((computed + 1).sum())) / self._cold_flops(len(case.tokens))
        return Prepared(recipe.name, slots, self.model.logits(hidden[-1:])[0], flops, len(case.tokens))

    # -- floating-point operations ---------------------------------------------------------------------------------

    def _pass_flops(self, rows: int, keys: int, layers: float | None = None) -> float:
        spec = self.model.spec
        weights = spec.hidden * spec.head_dim * 2 * (spec.heads + spec.kv_heads) + 3 * spec.hidden * spec.intermediate
        return (spec.layers if layers is None else layers) * (
            2 * rows * weights + 4 * spec.heads * spec.head_dim * keys
        )

    def _cold_flops(self, tokens: int) -> float:
        return self._pass_flops(tokens, tokens * (tokens + 1) // 2)

    def _prefix_flops(self, case: Case) -> float:
        """What a prefix cache alone computes, as a share of a full prefill."""
        work = Work.of_prefill(len(case.tokens), case.exact_tokens)
        return self._pass_flops(work.rows, work.keys) / self._cold_flops(len(case.tokens))

    def _flops(self, recipe: Recipe, passes: Sequence[Pass], tokens: int) -> float:
        """All passes; the observation of attention after each but the last of all, which nobody looks at."""
        total, spec = 0.0, self.model.spec
        gated = find_path(recipe.settings.mode) == GATED_MODE and not recipe.one_pass
        for number, one in enumerate(passes):
            if recipe.one_pass and one.name == "fast":
                continue
            # a look ends after the projections of the next layer, about a fifth of it
            total += self._pass_flops(one.rows, one.keys, one.layers + 0.2 if one.name in LOOKS else None)
            if gated and number < len(passes) - 1 and one.name not in LOOKS:
                total += 2 * spec.layers * spec.heads * spec.head_dim * min(QUESTION_ROWS, one.rows) * tokens
        return total / self._cold_flops(tokens)

    # -- answering -------------------------------------------------------------------------------------------------

    def _answers(self, made: Sequence[Prepared], case: Case) -> list[list[int]]:
        """Greedy answers of all recipes, decoded together."""
        current = torch.stack([one.logits for one in made]).argmax(-1)
        said = [current]
        ended = self._ends(current)
        for step in range(case.answer_tokens - 1):
            if bool(ended.all()):
                break
            rows = RowBatch.of(
                [Rows.of(current[i : i + 1], [one.tokens + step], one.slots) for i, one in enumerate(made)]
            )
            current = self.model.logits(self.model.forward(rows, self.pool)).argmax(-1)
            said.append(current)
            ended |= self._ends(current)
        lines = torch.stack(said, 1).tolist()
        return [line[: next((i for i, token in enumerate(line) if token in self.stop), None)] for line in lines]

    def _ends(self, tokens: Tensor) -> Tensor:
        return torch.isin(tokens, torch.tensor(sorted(self.stop), device=tokens.device))

    def _forced(self, made: Sequence[Prepared], answer: list[int]) -> Tensor:
        """Log-probabilities [recipes, tokens of the answer, vocabulary] along one answer."""
        rows = RowBatch.of(
            [Rows.of(answer, list(range(one.tokens, one.tokens + len(answer))), one.slots) for one in made]
        )
        hidden = self.model.forward(rows, self.pool)
        kept = []
        for number, one in enumerate(made):
            mine = hidden[number * len(answer) : (number + 1) * len(answer) - 1]
            kept.append(torch.cat([one.logits[None], self.model.logits(mine)]).log_softmax(-1))
        return torch.stack(kept)

    def _reference(self, case: Case, said: list[int]) -> list[int]:
        text = next((gold for gold in case.golds if gold.strip()), "")
        return self.tokenizer.encode(text, add_special=False)[:REFERENCE_TOKENS] or said or [next(iter(self.stop))]

    def _nll(self, forced: Tensor, answer: list[int]) -> Tensor:
        at = torch.tensor(answer, device=forced.device)[None, :, None].expand(len(forced), -1, 1)
        return -forced.gather(2, at)[..., 0].mean(-1)

    def _record(
        self, case: Case, one: Prepared, answers: list[list[int]], i: int, forced: Tensor, nll: Tensor
    ) -> dict[str, Any]:
        kl = (forced[0].exp() * (forced[0] - forced[i])).sum(-1).clamp_min(0)
        text, reference = (self.tokenizer.decode(answers[j]) for j in (i, 0))
        score = next_line_similarity if case.scenario == "code" else word_f1
        done, call = one.blended, find_call(reference) if case.is_history else ""
        return {
            "case": case.case_id, "prompt": case.digest, "scenario": case.scenario, "dataset": case.dataset,
            "cluster": case.cluster, "held_out": case.held_out, "recipe": one.name, "tokens": len(case.tokens),
            "spans": len(case.spans), "flops": one.flops, "kl_first": float(kl[0]), "kl": float(kl.mean()),
            "top1": float((forced[i].argmax(-1) == forced[0].argmax(-1)).float().mean()),
            "f1": score(text, reference), "task": max((score(text, gold) for gold in case.golds), default=None),
            "ppl_log": float(nll[i] - nll[0]), "answer": "" if case.is_history else text,
            "fact": (case.code in text) if case.code else None,
            "donor_fact": (case.donor_code in text) if case.donor_code else None,
            "risk": done.risk if done else None, "decision": done.decision if done else None,
            "escalations": done.escalations if done else None, "canary": done.canary if done else None,
            "changed": answers[i] != answers[0], "work": done.work if done else None,
            "features": asdict(done.features) if done and done.features else None,
            "exact": case.exact_tokens, "prefix_flops": self._prefix_flops(case), "declined": one.declined,
            "passes": [[p.name, p.rows, p.layers] for p in done.passes] if done else None,
            "same_call": find_call(text) == call if call else None,
        }  # fmt: skip


def decide(plan: ReusePlan, settings: QualitySettings) -> ReusePlan | Decline:
    """What an engine that was not timed yet does with a plan."""
    config = SemBlendConfig(embedder="none", control_share=0.0)
    with SemBlend(config) as semblend:
        sessions = Sessions(
            semblend, EngineTraits("bench", "", samples=True), DonorKv(0, 0), config=config, quality=settings,
            outcomes=OutcomeMemory(settings.thresholds),
        )  # fmt: skip
        request = SessionRequest("", Prompt([0] * plan.prompt_tokens), quality=settings.mode)
        return sessions.judge(sessions.make(request), plan)


def word_f1(text: str, reference: str) -> float:
    """Overlap of words, as question answering scores it.

    >>> word_f1("the red house", "a red roof")
    0.5
    """
    ours, theirs = (re.sub(r"\b(a|an|the)\b|[^\w\s]", " ", t.lower()).split() for t in (text, reference))
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * sum((Counter(ours) & Counter(theirs)).values()) / (len(ours) + len(theirs))


def next_line_similarity(text: str, reference: str) -> float:
    """Edit similarity of the first lines that hold anything.

    >>> next_line_similarity("\\n  return x\\n}", "return x")
    1.0
    """
    ours, theirs = (next((line.strip() for line in t.split("\n") if line.strip()), "") for t in (text, reference))
    return difflib.SequenceMatcher(None, ours, theirs, autojunk=False).ratio()
