"""What every engine adapter must do: one test a rule of `semblend.materialize.contract`, over a fixture ``world``.

A test module makes ``world`` for its engine and imports the tests::

    from behaviours import *  # the rules
    from behaviours import World

    @pytest.fixture
    def world():
        return World(my_model, block_tokens=16, vocabulary=32_000)

Rules that need a capability skip where the model does not declare it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.quality import Blended, Placed, QualitySettings, Rejected, Step, finish
from semblend.materialize.contract import Model, Observer, Rows, StopPass, slots_of_blocks
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.gate.observers import DEEP_TOLERANCE
from semblend.materialize.gate.thresholds import Thresholds
from semblend.materialize.kv.layout import LatentLayout
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.span import Span

Kv = list[tuple[Tensor, Tensor]]
DOCUMENT, HEAD, QUESTION = 90, 7, 5


@dataclass
class World:
    """An engine's model, slots that nobody uses, and donors. ``tolerance`` is what rounding may do to KV of size 1.

    ``deep_tolerance`` is large for a model whose weights are drawn at random: good donors are far off above layer 0.
    """

    model: Model
    block_tokens: int
    vocabulary: int
    tolerance: float = 2e-4
    first_block: int = 1
    deep_tolerance: float = DEEP_TOLERANCE
    donors: DonorKv = field(init=False)

    def __post_init__(self) -> None:
        self.donors = DonorKv(0, 1 << 28, rope=self.model.rope)

    def tokens(self, n: int, seed: int) -> list[int]:
        return torch.randint(1, self.vocabulary, (n,), generator=torch.Generator().manual_seed(seed)).tolist()

    def take_slots(self, n: int) -> Tensor:
        """Whole blocks that nobody has taken before, in no order, as an engine would hand them out."""
        count = -(-n // self.block_tokens)
        blocks = np.random.default_rng(self.first_block).permutation(count) + self.first_block
        self.first_block += count
        assert self.first_block * self.block_tokens <= self.model.layout.slots, "the engine of this test is too small"
        return slots_of_blocks(blocks.tolist(), self.block_tokens, n, self.model.device)

    def run(self, tokens: list[int], positions: list[int], context: Tensor, observer: Observer | None = None) -> Tensor:
        return self.model.forward(Rows.of([tokens[p] for p in positions], positions, context), observer)

    def prefill(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Computed cold: the slots, and the logits of the last token."""
        context = self.take_slots(len(tokens))
        hidden = self.run(tokens, list(range(len(tokens))), context)
        return context, self.model.logits(hidden[-1:].clone())[0]

    def kv(self, slots: Tensor) -> Kv:
        layout = self.model.layout
        return [tuple(part.clone() for part in layout.gather(layer, slots)) for layer in range(layout.layers)]  # type: ignore[misc]

    def donate(self, donor_id: str, tokens: list[int]) -> None:
        context, _ = self.prefill(tokens)
        self.donors.capture(donor_id, 0, self.model.layout, context)

    def blender(self, **changes: object) -> Blender:
        settings = QualitySettings(
            first_seam_tokens=4, seam_tokens=4, question_tokens=2, deep_tolerance=self.deep_tolerance
        )
        return Blender(self.model, self.donors, replace(settings, **changes))  # type: ignore[arg-type]

    def shifted(self, seed: int = 0) -> tuple[list[int], ReusePlan]:
        """A prompt whose document a donor holds at another position, behind another head."""
        document = self.tokens(DOCUMENT, seed)
        self.donate("d", self.tokens(3 * HEAD, seed + 1) + document)
        prompt = self.tokens(HEAD, seed + 2) + document + self.tokens(QUESTION, seed + 3)
        return prompt, ReusePlan((Span("d", 3 * HEAD, HEAD, DOCUMENT),), len(prompt))

    def assert_same(self, ours: Kv, theirs: Kv, what: str = "KV") -> None:
        for layer, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            for name, a, b in zip("KV", mine, other, strict=True):
                size = b.float().square().mean().sqrt().clamp_min(1e-6)
                off = float((a.float() - b.float()).abs().max() / size)
                assert off <= self.tolerance, f"{what}: {name} of layer {layer} is off by {off:.3g} of its size"

    def assert_same_logits(self, ours: Tensor, theirs: Tensor) -> None:
        off = float((ours.float() - theirs.float()).abs().max() / theirs.float().square().mean().sqrt())
        assert off <= 10 * self.tolerance, f"logits are off by {off:.3g} of their size"

    def differs(self, ours: Kv, theirs: Kv) -> bool:
        try:
            self.assert_same(ours, theirs)
        except AssertionError:
            return True
        return False

    def require(self, capability: str) -> None:
        if not getattr(self.model.capabilities, capability):
            pytest.skip(f"this engine does not declare {capability}")


class Seen(Observer):
    """Keeps what an observer is shown; ``stop_at`` ends the pass before that layer writes."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.calls: list[tuple[str, int]] = []
        self.before: Kv = []
        self.new: Kv = []
        self.after: Kv = []

    def before_write(self, layer, k, v, rows, layout):
        self.calls.append(("before_write", layer))
        self.before.append(tuple(part.clone() for part in layout.gather(layer, rows.slots)))
        self.new.append((k.clone(), v.clone()))
        if layer == self.stop_at:
            raise StopPass

    def on_layer(self, layer, q, rows, layout):
        self.calls.append(("on_layer", layer))
        assert q.shape[0] == len(rows)
        self.after.append(tuple(part.clone() for part in layout.gather(layer, rows.slots)))


class StopsEarly(Seen):
    stops_early = True


# -- layout ----------------------------------------------------------------------------------------------------------


def test_what_is_scattered_is_gathered_and_nothing_else_changes(world):
    layout, slots = world.model.layout, world.take_slots(40)
    neighbours = world.take_slots(40)
    for layer in (0, layout.layers - 1):
        shape = layout.gather(layer, slots)[0].shape
        k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(layout.dtype) for n in (1, 2))
        k, v = k.to(layout.device), v.to(layout.device)
        before = [part.clone() for part in layout.gather(layer, neighbours)]
        layout.scatter(layer, slots, k, v)
        assert torch.equal(layout.gather(layer, slots)[0], k)
        assert torch.equal(layout.gather(layer, slots)[1], v)
        met = torch.cat((v, k), dim=-1) if isinstance(layout, LatentLayout) else k
        assert torch.equal(layout.keys(layer, slots), met), "what queries meet: of latents, both halves"
        order = torch.randperm(len(slots))
        assert torch.equal(layout.keys(layer, slots[order]), met[order])
        for was, part in zip(before, layout.gather(layer, neighbours), strict=True):
            assert torch.equal(was, part), "a slot that nobody named was written"


# -- passes ----------------------------------------------------------------------------------------------------------


def test_a_prefill_in_chunks_is_a_prefill(world):
    tokens = world.tokens(70, 1)
    whole, logits = world.prefill(tokens)
    context = world.take_slots(len(tokens))
    for start, end in ((0, 33), (33, 34), (34, 70)):
        hidden = world.run(tokens, list(range(start, end)), context)
    world.assert_same(world.kv(context), world.kv(whole), "a prefill in three chunks")
    world.assert_same_logits(world.model.logits(hidden[-1:].clone())[0], logits)


def test_a_row_sees_what_lies_before_it_and_nothing_behind(world):
    tokens = world.tokens(50, 2)
    first, _ = world.prefill(tokens)
    other, _ = world.prefill(tokens[:30] + world.tokens(20, 3))
    world.assert_same(world.kv(first[:30]), world.kv(other[:30]), "rows before a change")
    changed, _ = world.prefill([tokens[0] % (world.vocabulary - 1) + 1, *tokens[1:]])
    assert world.differs(world.kv(first[1:]), world.kv(changed[1:])), "rows do not see what lies before them"


def test_scattered_rows_equal_a_plain_pass(world):
    world.require("scattered_rows")
    tokens = world.tokens(80, 4)
    context, logits = world.prefill(tokens)
    cold = world.kv(context)
    chosen = [3, 17, 18, 19, 40, 64, 77, 78, 79]
    for layer in range(world.model.layout.layers):
        k, v = (part.clone() for part in world.model.layout.gather(layer, context[chosen]))
        world.model.layout.scatter(layer, context[chosen], k.fill_(9.0), v.fill_(9.0))
    hidden = world.run(tokens, chosen, context)
    world.assert_same(world.kv(context), cold, "nine scattered rows")
    world.assert_same_logits(world.model.logits(hidden[-1:].clone())[0], logits)


def test_a_pass_writes_its_rows_and_no_others(world):
    tokens = world.tokens(60, 5)
    context, _ = world.prefill(tokens)
    aside = world.take_slots(32)
    untouched = torch.cat((context[:50], aside))
    before = world.kv(untouched)
    world.run(world.tokens(60, 6), list(range(50, 60)), context)
    for was, now in zip(before, world.kv(untouched), strict=True):
        assert torch.equal(was[0], now[0])
        assert torch.equal(was[1], now[1])


# -- observers -------------------------------------------------------------------------------------------------------


def test_an_observer_sees_every_layer_before_and_after_it_is_written(world):
    world.require("observers")
    tokens = world.tokens(40, 7)
    context, _ = world.prefill(tokens)
    old = world.kv(context[20:30])
    seen = Seen()
    other = world.tokens(40, 8)
    world.run(other, list(range(20, 30)), context, seen)
    layers = range(world.model.layout.layers)
    assert seen.calls == [(name, layer) for layer in layers for name in ("before_write", "on_layer")]
    world.assert_same(seen.before, old, "what was there before")
    world.assert_same(seen.after, world.kv(context[20:30]), "what is there after")
    world.assert_same(seen.new, seen.after, "what was about to be written")


def test_an_observer_that_stops_at_the_first_layer_leaves_the_cache_as_it_was(world):
    world.require("observers")
    tokens = world.tokens(40, 9)
    context, _ = world.prefill(tokens)
    before = world.kv(context)
    with pytest.raises(StopPass):
        world.run(world.tokens(40, 10), list(range(5, 25)), context, StopsEarly(stop_at=0))
    for was, now in zip(before, world.kv(context), strict=True):
        assert torch.equal(was[0], now[0])
        assert torch.equal(was[1], now[1])


def test_an_observer_does_not_change_the_pass(world):
    world.require("observers")
    tokens = world.tokens(40, 11)
    cold, _ = world.prefill(tokens)
    context = world.take_slots(len(tokens))
    world.run(tokens, list(range(len(tokens))), context, Seen())
    world.assert_same(world.kv(context), world.kv(cold), "a pass that was watched")


# -- reuse -----------------------------------------------------------------------------------------------------------


def test_relocation_is_exact_at_layer_0_and_approximate_above(world):
    world.require("observers")
    prompt, plan = world.shifted()
    target = Placed(prompt, world.take_slots(len(prompt)))
    blended = world.blender().prepare(target, plan, mode="fast")
    assert isinstance(blended, Blended)
    cold, _ = world.prefill(prompt)
    ours, theirs = world.kv(target.slots), world.kv(cold)
    world.assert_same(ours[:1], theirs[:1], "relocated KV at layer 0")
    assert world.differs(ours[1:], theirs[1:]), "above layer 0 donor KV carries its old context"
    assert DOCUMENT - 4 - 8 <= blended.reused_tokens < DOCUMENT - 4, "a few are computed for the canary"


def test_a_donor_with_the_same_left_context_gives_what_cold_gives(world):
    world.require("observers")
    prompt = world.tokens(HEAD + DOCUMENT, 20)
    world.donate("same", prompt + world.tokens(9, 21))
    prompt += world.tokens(QUESTION, 22)
    target = Placed(prompt, world.take_slots(len(prompt)))
    plan = ReusePlan((Span("same", 0, 0, HEAD + DOCUMENT),), len(prompt))
    assert isinstance(world.blender().prepare(target, plan, mode="fast"), Blended)
    cold, _ = world.prefill(prompt)
    world.assert_same(world.kv(target.slots), world.kv(cold), "a donor with the same left context")


def test_a_gate_that_trusts_nothing_gives_what_cold_gives(world):
    world.require("observers")
    prompt, plan = world.shifted(30)
    target = Placed(prompt, world.take_slots(len(prompt)))
    blender = world.blender(thresholds=Thresholds(0.0, 0.0, 0.0), most_work=10.0, steps=(Step(1, "at_random"),))
    blended = blender.prepare(target, plan, mode="balanced")
    assert isinstance(blended, Blended)
    assert (blended.decision, blended.reused_tokens) == ("prefill", 0)
    cold, logits = world.prefill(prompt)
    world.assert_same(world.kv(target.slots), world.kv(cold), "a prompt that was computed in full")
    world.assert_same_logits(blended.logits_last, logits)


def test_a_gate_that_accepts_repairs_what_it_chose_and_says_so(world):
    world.require("observers")
    prompt, plan = world.shifted(40)
    target = Placed(prompt, world.take_slots(len(prompt)))
    accepting = Thresholds(1e9, 1e9, 1e9)
    blended = world.blender(thresholds=accepting, most_work=10.0).prepare(target, plan, mode="balanced")
    assert isinstance(blended, Blended)
    assert blended.decision == "accepted"
    assert 0 < blended.reused_tokens < DOCUMENT - 4
    kinds = blended.exact_tokens + blended.reused_tokens + blended.recomputed_tokens + blended.prefill_tokens
    assert kinds == len(prompt)
    computed = {position for start, end in blended.recomputed_runs for position in range(start, end)}
    first_kept = next(position for position in range(HEAD, len(prompt)) if position not in computed)
    assert blended.exact_until <= first_kept, "approximate KV must never be called exact"


def test_wrong_donor_kv_is_refused(world):
    world.require("observers")
    prompt, plan = world.shifted(50)
    held = world.donors.acquire("d", 0)
    held.v[0].mul_(1.5)
    world.donors.release(held)
    for mode in ("fast", "balanced"):
        found = world.blender().prepare(Placed(prompt, world.take_slots(len(prompt))), plan, mode=mode)
        assert isinstance(found, Decline)
        assert found.reason is DeclineReason.VALIDATION_FAILED
    assert world.donors.holders == 0


def test_a_failure_leaves_the_request_computable(world, monkeypatch):
    prompt, plan = world.shifted(60)
    target = Placed(prompt, world.take_slots(len(prompt)))
    blender, forward = world.blender(), type(world.model).forward
    calls = []

    def fails_late(model, rows, observer=None):
        forward(model, rows, observer)  # it has written something by then
        calls.append(len(rows))
        raise RuntimeError("the device gave up")

    monkeypatch.setattr(type(world.model), "forward", fails_late)
    found = blender.prepare(target, plan, mode="fast")
    monkeypatch.undo()
    assert isinstance(found, Decline)
    assert calls or not world.model.capabilities.observers
    assert world.donors.holders == 0, "a donor stays held"
    world.run(prompt, list(range(len(prompt))), target.slots)
    cold, _ = world.prefill(prompt)
    world.assert_same(world.kv(target.slots), world.kv(cold), "a prompt that was computed after a failure")


def test_a_prompt_that_is_given_up_frees_its_donors(world):
    world.require("observers")
    prompt, plan = world.shifted(70)
    target = Placed(prompt, world.take_slots(len(prompt)))
    begun = world.blender(piece_ms=1e-6).prepare_in_pieces(target, plan, mode="fast")
    next(begun)
    assert world.donors.holders == 1, "donors are held while the device may read them"
    begun.close()
    assert world.donors.holders == 0
    assert world.donors.drop("d")
    assert sum(world.donors.used_bytes.values()) == 0


def test_a_donor_that_is_gone_is_declined_before_anything_is_written(world):
    prompt, plan = world.shifted(80)
    world.donors.drop("d")
    target = Placed(prompt, world.take_slots(len(prompt)))
    before = world.kv(target.slots)
    found = world.blender().prepare(target, plan, mode="fast")
    assert isinstance(found, Decline)
    expected = {DeclineReason.STALE} if world.model.capabilities.observers else {DeclineReason.UNSUPPORTED_MODE}
    assert found.reason in expected
    for was, now in zip(before, world.kv(target.slots), strict=True):
        assert torch.equal(was[0], now[0])


def test_in_pieces_or_at_once_is_the_same_result(world):
    world.require("observers")
    prompt, plan = world.shifted(90)
    accepting = {"thresholds": Thresholds(1e9, 1e9, 1e9), "most_work": 10.0}
    for mode in ("fast", "balanced"):
        one, other = (Placed(prompt, world.take_slots(len(prompt))) for _ in range(2))
        at_once = world.blender(**accepting).prepare(one, plan, mode=mode)
        begun, stops = world.blender(**accepting, piece_ms=1e-6).prepare_in_pieces(other, plan, mode=mode), 0
        while True:
            try:
                next(begun)
                stops += 1
            except StopIteration as done:
                in_pieces = done.value
                break
        assert stops >= 1
        assert isinstance(at_once, Blended)
        assert isinstance(in_pieces, Blended)
        world.assert_same(world.kv(one.slots), world.kv(other.slots), "in pieces and at once")
        assert (at_once.reused_tokens, at_once.prefill_tokens) == (in_pieces.reused_tokens, in_pieces.prefill_tokens)


def test_a_prompt_that_the_engine_prefills_itself_is_rejected_with_what_it_cost(world):
    world.require("observers")
    prompt, plan = world.shifted(95)
    target = Placed(prompt, world.take_slots(len(prompt)))
    doubting = {"thresholds": Thresholds(0.0, 0.0, 0.0), "most_work": 10.0, "steps": (Step(1, "at_random"),)}
    found = finish(world.blender(**doubting, prefills=False).prepare_in_pieces(target, plan, mode="balanced"))
    assert isinstance(found, Rejected)
    assert found.work > 0
    cold, _ = world.prefill(prompt)
    until = found.exact_until
    world.assert_same(
        world.kv(target.slots[:until]), world.kv(cold[:until]), "what stands before the first donor token"
    )
