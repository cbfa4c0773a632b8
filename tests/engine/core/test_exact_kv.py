"""What lies in the exact cache and in donors is what a cold prefill computes, whatever became of the request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import draw_tokens, make_small_model

from semblend import SemBlend, SemBlendConfig
from semblend.engine.core.assemble import assemble
from semblend.engine.core.config import EngineConfig
from semblend.engine.core.engine import Engine
from semblend.materialize.blend.quality import QualitySettings, Step
from semblend.materialize.contract import Rows
from semblend.materialize.gate.thresholds import Thresholds
from semblend.plan.reuse_plan import DeclineReason
from semblend.prompt import Prompt
from semblend.wire.request import Request
from semblend.wire.sampling import Sampling

BLOCK, DOCUMENT = 16, 300
NEVER, ALWAYS = Thresholds(0.0, 0.0, 0.0), Thresholds(1e9, 1e9, 1e9)
MODEL = make_small_model(seed=7, num_hidden_layers=3)


def make_engine(thresholds: Thresholds = NEVER, tokens: int = 8192, **changes: Any) -> Engine:
    library = SemBlend(SemBlendConfig(embedder="none", metrics=False))
    quality = QualitySettings(**{"thresholds": thresholds, "most_work": 10, **changes})
    return assemble(MODEL, pool_tokens=tokens, semblend=library, config=EngineConfig(step_tokens=64), quality=quality)


def request(name: str, ids: list[int], *, quality: str | None = None, answer: int = 3) -> Request:
    return Request(name, Prompt(ids), Sampling(max_tokens=answer, temperature=0.0), quality=quality)


def hit(seed: int) -> tuple[list[int], list[int]]:
    """A donor, and a prompt that holds its document behind another head."""
    document = draw_tokens(DOCUMENT, seed)
    return draw_tokens(60, seed + 1) + document, draw_tokens(20, seed + 2) + document + draw_tokens(12, seed + 3)


def compute_cold(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    pool = MODEL.new_pool(len(ids) + BLOCK)
    slots = pool.slots_of(pool.allocate(pool.blocks_for(len(ids))), 0, len(ids))
    MODEL.forward(Rows.of(ids, torch.arange(len(ids)), slots), pool)
    return pool.k[:, slots], pool.v[:, slots]


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    off = float((ours - theirs).abs().max())
    assert off <= 1e-4 * float(theirs.abs().max()), f"{what} is off by {off:.3g}"


def iterate_cached(engine: Engine) -> Iterator[tuple[list[int], list[int]]]:
    """Every way from a root of the exact cache to a leaf: tokens and blocks."""
    stack = [(root, [], []) for root in engine.radix._roots.values()]
    while stack:
        node, tokens, blocks = stack.pop()
        for key, child in node.children.items():
            path = tokens + np.frombuffer(key, dtype=np.int32).tolist(), [*blocks, child.block]
            stack.append((child, *path))
            if not child.children:
                yield path


def assert_cache_is_cold(engine: Engine) -> int:
    """Every block of the exact cache holds what a cold prefill computes; returns how many tokens were compared."""
    compared = 0
    for tokens, blocks in iterate_cached(engine):
        slots = engine.pool.slots_of(blocks, 0, len(tokens))
        for name, ours, theirs in zip("KV", (engine.pool.k, engine.pool.v), compute_cold(tokens), strict=True):
            assert_same(ours[:, slots], theirs, f"{name} of {len(tokens)} cached tokens")
        compared += len(tokens)
    return compared


def assert_donors_are_cold(engine: Engine) -> None:
    library, kept = engine.reuse.semblend, engine.reuse.donor_kv
    assert library is not None
    for donor in library.donors():
        tokens = library.donor_tokens(donor.donor_id).tolist()
        held = kept.acquire(donor.donor_id, donor.generation)
        for name, ours, theirs in zip("KV", (held.k, held.v), compute_cold(tokens), strict=True):
            assert_same(ours, theirs, f"{name} of donor {donor.donor_id}")
        kept.release(held)


def donor_tokens(engine: Engine, name: str) -> int:
    return {donor.donor_id: donor.token_count for donor in engine.reuse.semblend.donors()}.get(name, 0)


def serve(engine: Engine, seed: int = 1, **asked: Any) -> Any:
    """The donor, then the prompt; returns the prompt's completion."""
    donor, prompt = hit(seed)
    engine.generate([request("donor", donor, quality="exact")])
    (done,) = engine.generate([request("prompt", prompt, **asked)])
    return done


def assert_exact_and_a_donor(engine: Engine, seed: int = 1) -> None:
    """The whole prompt is in the exact cache and a donor, and the same prompt again is an exact hit."""
    _, prompt = hit(seed)
    assert assert_cache_is_cold(engine) > 0
    assert_donors_are_cold(engine)
    assert donor_tokens(engine, "prompt") == len(prompt)
    (again,) = engine.generate([request("again", prompt)])
    assert again.receipt.exact_tokens == (len(prompt) - 1) // BLOCK * BLOCK
    engine.check()


def test_a_prompt_that_the_gate_computed_in_full_is_exact_and_becomes_a_donor():
    engine = make_engine(NEVER)
    done = serve(engine)
    assert (done.receipt.reason, done.receipt.reused_tokens) == (DeclineReason.QUALITY_RISK, 0)
    assert_exact_and_a_donor(engine)


def test_a_prompt_whose_reused_tokens_were_all_repaired_is_exact_and_becomes_a_donor():
    engine = make_engine(NEVER, steps=(Step(10, "attended"), Step(100, "attended")))
    prefill = engine.reuse._blender._passes.prefill
    engine.reuse._blender._passes.prefill = lambda state: pytest.fail("a repair has computed every token already")
    done = serve(engine)
    engine.reuse._blender._passes.prefill = prefill
    assert (done.receipt.reused_tokens, done.receipt.recomputed_tokens) == (0, DOCUMENT)
    assert_exact_and_a_donor(engine)


def test_a_prompt_that_was_not_begun_is_exact_and_becomes_a_donor():
    engine = make_engine(NEVER)
    donor, prompt = hit(900)
    engine.generate([request("other donor", donor, quality="exact")])
    engine.generate([request("refused", prompt)])
    done = serve(engine)
    assert done.receipt.detail.startswith("such prompts cost")
    assert_exact_and_a_donor(engine)


@pytest.mark.parametrize("where", ["prepare_in_pieces", "begin", "go_on", "splice"])
def test_a_prompt_whose_reuse_failed_in_the_middle_is_exact_and_becomes_a_donor(where, monkeypatch):
    engine = make_engine(NEVER)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    blender = engine.reuse._blender
    if where == "splice":
        monkeypatch.setattr("semblend.materialize.blend.blender.splice", fail)
    else:
        monkeypatch.setattr(blender if where == "prepare_in_pieces" else blender._repair, where, fail)
    done = serve(engine)
    assert done.receipt.reason is DeclineReason.ERROR
    assert_exact_and_a_donor(engine)


def test_a_prompt_with_wrong_donor_kv_is_exact_and_becomes_a_donor():
    engine = make_engine(ALWAYS)
    donor, prompt = hit(1)
    engine.generate([request("donor", donor, quality="exact")])
    kept = engine.reuse.donor_kv
    held = kept.acquire("donor", engine.reuse.semblend.donors()[0].generation)
    held.v[0].mul_(3)
    (done,) = engine.generate([request("prompt", prompt)])
    held.v[0].div_(3)
    kept.release(held)
    assert done.receipt.reason is DeclineReason.VALIDATION_FAILED
    assert_exact_and_a_donor(engine)


@pytest.mark.parametrize("quality", ["fast", "balanced"])
def test_of_a_prompt_on_moved_kv_only_the_exact_beginning_is_kept(quality):
    engine = make_engine(ALWAYS)
    done = serve(engine, quality=quality, answer=40)
    assert done.receipt.reused_tokens > 0
    assert_cache_is_cold(engine)
    assert_donors_are_cold(engine)
    assert donor_tokens(engine, "prompt") == 0  # 20 tokens are new and exact: too few
    _, prompt = hit(1)
    (again,) = engine.generate([request("again", prompt, quality="exact")])
    assert again.receipt.exact_tokens == (20 + 32) // BLOCK * BLOCK
    engine.check()


@pytest.mark.parametrize("quality", ["fast", "balanced"])
def test_a_prompt_that_was_preempted_after_a_reuse_is_computed_exact_and_becomes_a_donor(quality):
    engine = make_engine(ALWAYS)
    donor, prompt = hit(1)
    engine.generate([request("donor", donor, quality="exact")])
    stream = engine.submit(request("prompt", prompt, quality=quality, answer=8))
    while not stream.chunks:
        engine.step()
    assert donor_tokens(engine, "prompt") == 0
    (sequence,) = engine.scheduler.running
    engine.scheduler._preempt(sequence)
    while engine.has_work:
        engine.step()
    assert stream.completion().receipt.reused_tokens > 0  # of its first token, which was said already
    assert_exact_and_a_donor(engine)


def test_a_prompt_that_was_preempted_twice_is_captured_once_more_only():
    engine = make_engine(ALWAYS)
    stream = engine.submit(request("prompt", draw_tokens(200, 5), answer=30))
    generations = []
    for _ in range(3):
        said = len(stream.chunks)
        while len(stream.chunks) == said:
            engine.step()
        generations.append(engine.reuse.semblend.donors()[0].generation)
        engine.scheduler._preempt(engine.scheduler.running[0])
    assert len(set(generations)) == 1
    while engine.has_work:
        engine.step()


kinds, modes = st.sampled_from(["new", "hit", "again", "turned"]), st.sampled_from(["fast", "balanced"])
steps = st.lists(st.tuples(kinds, st.integers(0, 5), modes, st.booleans()), min_size=2, max_size=9)


def test_whatever_is_asked_the_exact_cache_and_the_donors_hold_what_a_cold_prefill_computes(is_long):
    @settings(max_examples=25 if is_long else 10, deadline=None)
    @given(steps, st.sampled_from([NEVER, ALWAYS, Thresholds(0.02, 0.02, 0.02)]))
    def check(asked, thresholds):
        engine = make_engine(thresholds, tokens=1536)
        for number, (what, seed, quality, preempted) in enumerate(asked):
            donor, prompt = hit(10 * seed)
            turned = prompt[:20] + prompt[170:320] + prompt[20:170] + prompt[320:]
            ids = {"new": donor, "hit": prompt, "again": prompt, "turned": turned}[what]
            stream = engine.submit(request(f"r{number}", ids, quality=quality, answer=20))
            while preempted and engine.has_work and not stream.chunks:
                engine.step()
            if preempted and engine.scheduler.running:
                engine.scheduler._preempt(engine.scheduler.running[-1])
            while engine.has_work:
                engine.step()
        assert_cache_is_cold(engine)
        assert_donors_are_cold(engine)
        engine.check()

    check()
