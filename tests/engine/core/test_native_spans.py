"""strict_prefix_boundary: on, we compute the gaps between donor spans; off, the engine's own scheduler does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_engine import NaiveEngine
from small_models import draw_tokens, make_small_model

from semblend import SemBlend, SemBlendConfig
from semblend.engine.core.assemble import assemble
from semblend.engine.core.config import EngineConfig
from semblend.engine.core.engine import Engine
from semblend.engine.model.model import DecoderModel
from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.quality import Placed, QualitySettings
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.gate.thresholds import Thresholds
from semblend.plan.reuse_plan import DeclineReason, ReusePlan
from semblend.prompt import Prompt
from semblend.span import Span
from semblend.wire.request import Request
from semblend.wire.sampling import Sampling

STEP = 64
MODEL = make_small_model(seed=7, num_hidden_layers=3)


class Watched(DecoderModel):
    """Remembers how many rows each pass had; those of one layer (the canary's) are not passes."""

    def __init__(self, model: DecoderModel) -> None:
        super().__init__(model.spec, model.weights)
        self.rows: list[int] = []

    def forward(self, rows: Any, pool: Any, observer: Any = None, *, stop: Any = None) -> Any:
        found = super().forward(rows, pool, observer)
        self.rows.append(len(rows))
        return found


def make_engine(*, strict: bool, tokens: int = 8192, **config: Any) -> Engine:
    library = SemBlend(SemBlendConfig(embedder="none", metrics=False, strict_prefix_boundary=strict))
    # Rows that a pass of ours computes for the canary have no like where the engine computes the gaps itself.
    quality = QualitySettings(thresholds=Thresholds(1e9, 1e9, 1e9), deep_tolerance=0)
    engine_config = EngineConfig(**{"quality": "fast", "step_tokens": STEP, "step_work_ms": 1e9, **config})
    return assemble(Watched(MODEL), pool_tokens=tokens, semblend=library, config=engine_config, quality=quality)


def request(name: str, ids: list[int], **asked: Any) -> Request:
    return Request(name, Prompt(ids), Sampling(max_tokens=asked.pop("answer", 6), temperature=0.0), **asked)


DONOR = draw_tokens(60, 1) + draw_tokens(700, 2)
DOCUMENT = DONOR[60:]
PROMPT = draw_tokens(20, 3) + DOCUMENT[:300] + draw_tokens(200, 4) + DOCUMENT[300:] + draw_tokens(30, 5)


def serve(engine: Engine, prompt: list[int] = PROMPT, **asked: Any) -> Any:
    engine.generate([request("donor", DONOR, quality="exact")])
    engine.model.rows.clear()  # type: ignore[attr-defined]
    (done,) = engine.generate([request("prompt", prompt, **asked)])
    return done


def test_both_ways_reuse_and_answer_alike():
    ours, theirs = (serve(make_engine(strict=strict)) for strict in (True, False))
    assert ours.tokens == theirs.tokens
    for kind in ("exact", "reused", "recomputed", "prefill"):
        assert ours.receipt.tokens[kind] == theirs.receipt.tokens[kind]
    assert ours.receipt.spans == theirs.receipt.spans
    assert theirs.receipt.reused_tokens > 600
    assert theirs.receipt.canary is not None


def test_off_the_gaps_are_computed_in_the_chunks_of_the_scheduler():
    strict, native = make_engine(strict=True), make_engine(strict=False)
    serve(strict)
    serve(native)
    assert max(strict.model.rows) > 200  # all gaps at once, while running answers wait
    assert max(native.model.rows) <= STEP
    assert sum(native.model.rows) == sum(strict.model.rows)


def test_off_a_running_answer_speaks_while_the_gaps_are_computed():
    engine = make_engine(strict=False)
    engine.generate([request("donor", DONOR, quality="exact")])
    running = engine.submit(request("running", draw_tokens(30, 9), answer=40, quality="exact"))
    while not running.chunks:
        engine.step()
    filled = engine.submit(request("prompt", PROMPT))
    said = len(running.chunks)
    while not filled.chunks:
        engine.step()
    assert len(running.chunks) - said >= 4


def test_off_the_gate_still_computes_the_gaps_of_mode_balanced():
    engine = make_engine(strict=False)
    receipt = serve(engine, quality="balanced").receipt
    assert receipt.risk is not None
    assert receipt.reused_tokens > 0


def test_off_only_the_exact_beginning_enters_the_cache_and_becomes_a_donor():
    engine = make_engine(strict=False)
    serve(engine, answer=40)
    held = {donor.donor_id: donor.token_count for donor in engine.reuse.semblend.donors()}
    assert "prompt" not in held  # 20 tokens are new and exact: too few
    (again,) = engine.generate([request("again", PROMPT, quality="exact")])
    assert again.receipt.exact_tokens == 48
    cold = make_engine(strict=False)
    assert again.tokens == cold.generate([request("cold", PROMPT, quality="exact")])[0].tokens
    engine.check()


@pytest.mark.parametrize(("layer", "value"), [(0, 0.0), (2, torch.nan)])
def test_off_wrong_donor_kv_costs_time_and_never_the_answer(layer, value):
    engine = make_engine(strict=False)
    engine.generate([request("donor", DONOR, quality="exact")])
    held = engine.reuse.donor_kv.acquire("donor", engine.reuse.semblend.donors()[0].generation)
    held.v[layer, 100:140].fill_(value)
    engine.reuse.donor_kv.release(held)
    (done,) = engine.generate([request("prompt", PROMPT)])
    assert done.receipt.reason is DeclineReason.VALIDATION_FAILED
    assert done.receipt.reused_tokens == 0
    (cold,) = make_engine(strict=False).generate([request("cold", PROMPT, quality="exact")])
    assert done.tokens == cold.tokens
    assert {donor.donor_id: donor.token_count for donor in engine.reuse.semblend.donors()}["prompt"] == len(PROMPT)
    engine.check()


def test_off_a_prompt_that_is_preempted_among_its_gaps_is_filled_again():
    engine = make_engine(strict=False)
    engine.generate([request("donor", DONOR, quality="exact")])
    stream = engine.submit(request("prompt", PROMPT))
    engine.step()
    (sequence,) = engine.scheduler.running
    assert sequence.held is not None
    engine.scheduler._preempt(sequence)
    while engine.has_work:
        engine.step()
    done = stream.completion()
    assert done.receipt.reused_tokens > 600
    assert sequence.session.loads_begun == 2
    assert done.tokens == serve(make_engine(strict=False)).tokens
    engine.check()


def test_an_engine_that_takes_no_spans_declines_them():
    engine = NaiveEngine.make(slots=64)
    blender = Blender(engine, DonorKv(0, 1 << 20))
    declined = blender.place(Placed(list(range(40)), torch.arange(40)), ReusePlan((Span("d", 0, 0, 32),), 40))
    assert declined.reason is DeclineReason.UNSUPPORTED_MODE


pieces = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 600), st.integers(40, 100)), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(pieces, st.integers(1, 60), st.sampled_from([16, 40, 512]))
def test_whatever_the_gaps_the_engine_computes_what_the_blender_computes(parts, tail, step):
    prompt: list[int] = []
    for number, (gap, start, length) in enumerate(parts):
        prompt += draw_tokens(gap, 50 + number) + DOCUMENT[start : start + length]
    prompt += draw_tokens(tail, 99)
    ours = serve(make_engine(strict=True, step_tokens=step), prompt)
    native = make_engine(strict=False, step_tokens=step)
    theirs = serve(native, prompt)
    assert ours.tokens == theirs.tokens
    assert dict(ours.receipt.tokens) == dict(theirs.receipt.tokens) or theirs.receipt.reason is not None
    native.check()
