"""The embedded engine does not begin a reuse that the gate refused for prompts of the same kind."""

from __future__ import annotations

import math
from typing import Any

import pytest
from small_models import draw_tokens, make_small_model

from semblend import SemBlend, SemBlendConfig
from semblend.confirm.outcome import Outcome
from semblend.engine.core.assemble import assemble
from semblend.engine.core.config import EngineConfig
from semblend.engine.core.engine import Engine
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.gate import MAX_SKIPPED, MIN_SKIPPED
from semblend.materialize.gate.thresholds import STEPS, DialTable, PassageOrder, Thresholds
from semblend.plan.reuse_plan import DeclineReason
from semblend.prompt import Namespace, Prompt
from semblend.wire.request import Request
from semblend.wire.sampling import Sampling

DOCUMENT = 400
NEVER, ALWAYS = Thresholds(0.0, 0.0, 0.0), Thresholds(1e9, 1e9, 1e9)
MODEL = make_small_model()


class World:
    """An engine, and prompts that hold a document of an earlier one behind another head."""

    def __init__(self, thresholds: Thresholds, tenant_quality: str = "", **config: Any) -> None:
        library = SemBlend(SemBlendConfig(embedder="none", metrics=False, tenant_quality=tenant_quality))
        self.engine: Engine = assemble(
            MODEL,
            pool_tokens=8192,
            semblend=library,
            config=EngineConfig(**config),
            quality=QualitySettings(thresholds=thresholds, most_work=10),
        )
        self.passes = 0
        prepare = self.engine.reuse._blender.prepare_in_pieces

        def count(*args: Any, **named: Any) -> Any:
            self.passes += 1
            return prepare(*args, **named)

        self.engine.reuse._blender.prepare_in_pieces = count  # type: ignore[method-assign]
        self.number = 0

    def ask(self, ids: list[int], *, tenant: str = "", quality: str | None = None) -> Any:
        self.number += 1
        prompt = Prompt(ids, namespace=Namespace(tenant=tenant))
        request = Request(f"r{self.number}", prompt, Sampling(max_tokens=2, temperature=0.0), quality=quality)
        (done,) = self.engine.generate([request])
        return done

    def hit(self, seed: int, *, tenant: str = "", quality: str | None = None) -> Any:
        """A new document, then a prompt that holds it behind another head."""
        document = draw_tokens(DOCUMENT, seed)
        self.ask(draw_tokens(60, seed + 1000) + document, tenant=tenant, quality="exact")
        return self.ask(
            draw_tokens(20, seed + 2000) + document + draw_tokens(12, seed + 3000), tenant=tenant, quality=quality
        )


def test_the_second_prompt_of_a_kind_is_not_begun_where_the_gate_refused_the_first():
    world = World(NEVER)
    first = world.hit(1).receipt
    assert (first.reason, first.outcome) == (DeclineReason.QUALITY_RISK, Outcome.BACKEND_DECLINED_REUSE)
    assert first.escalations > 0
    second = world.hit(2).receipt
    assert world.passes == 1
    assert (second.reason, second.outcome) == (DeclineReason.QUALITY_RISK, Outcome.COLD_FALLBACK)
    assert second.detail.startswith("such prompts cost")
    assert second.escalations == second.recomputed_tokens == 0
    assert second.load_ms is None


def test_a_prompt_that_was_not_begun_is_answered_as_cold_and_becomes_a_donor():
    world, cold = World(NEVER), World(NEVER, quality="exact")
    for seed in (1, 2, 3):
        assert world.hit(seed).tokens == cold.hit(seed).tokens
    held = {donor.donor_id: donor.token_count for donor in world.engine.reuse.semblend.donors()}
    assert held["r4"] == 20 + DOCUMENT + 12


def test_prompts_that_are_served_stay_served():
    world = World(ALWAYS)
    for seed in range(12):
        receipt = world.hit(seed).receipt
        assert (receipt.outcome, receipt.reason) == (Outcome.BACKEND_MATERIALIZED_REUSE, None)
    assert world.passes == 12


def test_a_tenant_does_not_learn_from_another():
    world = World(NEVER)
    world.hit(1, tenant="acme")
    world.hit(2, tenant="bolt")
    assert world.passes == 2
    world.hit(3, tenant="acme")
    world.hit(4, tenant="bolt")
    assert world.passes == 2


def test_a_kind_is_tried_again_after_a_while():
    world = World(NEVER)
    for seed in range(2 + MAX_SKIPPED):
        world.hit(seed)
    assert 2 <= world.passes <= 2 + MAX_SKIPPED // MIN_SKIPPED


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_mode_without_a_gate_is_not_concerned(mode):
    world = World(NEVER)
    world.hit(1)
    receipt = world.hit(2, quality=mode).receipt
    assert (receipt.reused_tokens > 0) == (mode == "fast")
    for seed in range(3, 6):
        world.hit(seed, quality="fast")
    assert world.hit(9).receipt.reason is DeclineReason.QUALITY_RISK


def test_a_request_goes_before_its_tenant_a_tenant_before_the_engine_and_the_receipt_says_the_number():
    world = World(ALWAYS, tenant_quality="acme=0.3 bolt=exact", quality="fast")
    assert world.hit(1).receipt.mode == "fast"
    served = world.hit(2, tenant="acme").receipt
    assert served.mode == "0.3"
    assert served.reused_tokens > 0
    assert served.risk is not None
    assert world.hit(3, tenant="acme", quality="0.05").receipt.mode == "0.05"
    refused = world.hit(4, tenant="bolt").receipt
    assert (refused.mode, refused.reused_tokens) == ("exact", 0)
    assert world.hit(5, tenant="bolt", quality="fast").receipt.reused_tokens > 0


def test_a_number_that_no_way_can_keep_is_a_prefill_at_once_and_a_larger_one_is_served():
    dial = DialTable(
        {PassageOrder.IN_ORDER: {0: 0.2, 10: 0.1, 20: 0.08, 40: 0.06}},
        dict.fromkeys(STEPS, (0.0,) * 4 + (-4.0,)),  # exp(-4) = .018, whatever a repair shows
    )
    world = World(Thresholds(0.0, 0.0, 0.0, dial=dial))
    refused = world.hit(1, quality="0.05").receipt
    assert (refused.reason, world.passes) == (DeclineReason.QUALITY_RISK, 0)
    assert refused.detail == "at best 0.06 nats are expected, 0.05 are allowed"
    served = world.hit(2, quality="0.1").receipt
    assert served.reused_tokens > 0
    assert served.risk == pytest.approx(math.exp(-4))
    assert world.hit(3, quality="exact").receipt.reused_tokens == 0


def test_no_claim_is_held_for_a_prompt_that_was_not_begun():
    world = World(NEVER)
    world.hit(1)
    world.hit(2)
    assert world.engine.reuse.semblend._claims == {}
    world.engine.check()
