"""The lives of `lifecycle` on the embedded engine and around transformers' generate().

Here exactness is seen from outside: whatever was cached or kept on the way, a prompt that asks for exact KV is answered
as a fresh engine answers it. vLLM and SGLang live them in tests/engines.
"""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lifecycle import Engine, live
from small_models import make_small_model

from semblend import SemBlend, SemBlendConfig
from semblend.engine.core.assemble import assemble
from semblend.engine.core.config import EngineConfig
from semblend.engine.core.engine import Engine as EmbeddedEngine
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.thresholds import Thresholds
from semblend.prompt import Namespace, Prompt
from semblend.wire.request import Request
from semblend.wire.sampling import Sampling

SEQUENCES, LONG = 50, 2_000
MODEL = make_small_model(seed=7, num_hidden_layers=3)


@pytest.fixture(autouse=True)
def no_log():
    """Loads fail on purpose."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def fail_once(owner: Any, name: str) -> None:
    """The next call of a method fails in its middle."""
    real = getattr(owner, name)

    def fail(*args: Any, **more: Any) -> Any:
        setattr(owner, name, real)
        made = real(*args, **more)
        if hasattr(made, "close"):
            made.close()
        raise RuntimeError("it fails")

    setattr(owner, name, fail)


class EmbeddedLives(Engine):
    """``pool_tokens`` hold two requests and not five: some are preempted without being asked to."""

    def __init__(self, seed: int, *, strict: bool, pool_tokens: int = 400) -> None:
        super().__init__()
        self.rng, self.asked = random.Random(seed), []
        self.engine = self.make(strict, pool_tokens)

    @staticmethod
    def make(strict: bool, pool_tokens: int) -> EmbeddedEngine:
        config = SemBlendConfig(metrics=False, min_span_tokens=16, strict_prefix_boundary=strict)
        thresholds = Thresholds(1e9, 1e9, 1e9)
        quality = QualitySettings(thresholds=thresholds, deep_tolerance=0, first_seam_tokens=4, seam_tokens=4)
        limits = EngineConfig(quality="fast", step_tokens=48, step_work_ms=0.5, donor_min_new_tokens=8)
        return assemble(MODEL, pool_tokens=pool_tokens, semblend=SemBlend(config), config=limits, quality=quality)

    def submit(self, name: str, tokens: list[int], mode: str, salt: str) -> None:
        if name not in self.engine._active:
            prompt = Prompt(tokens, namespace=Namespace(salt=salt))
            sampling = Sampling(max_tokens=self.rng.randrange(1, 5), temperature=0.0)
            self.asked.append((tokens, salt, self.engine.submit(Request(name, prompt, sampling, quality=mode))))

    def step(self) -> None:
        self.engine.step()

    def abort(self, rng: random.Random) -> None:
        if names := sorted(self.engine._active):
            self.engine.cancel(rng.choice(names))

    def preempt(self, rng: random.Random) -> None:
        if running := self.engine.scheduler.running:
            self.engine.scheduler._preempt(rng.choice(running))

    def reset(self) -> None:
        self.engine.reuse.forget_donors()

    def forget_donor(self, rng: random.Random) -> None:
        library = self.engine.reuse.semblend
        assert library is not None
        if donors := library.donors():
            library.forget(rng.choice(donors).donor_id)

    def fail_next_load(self) -> None:
        blender = self.engine.reuse._blender
        for name in ("prepare_in_pieces", "place"):
            if name not in vars(blender):
                fail_once(blender, name)

    def change_weights(self) -> None:
        """The weights of this engine are read once."""

    @property
    def is_idle(self) -> bool:
        return not self.engine.has_work

    def list_remains(self) -> list[str]:
        self.engine.check()
        for tokens, salt, _ in self.asked[-4:]:
            prompt = Prompt(tokens, namespace=Namespace(salt=salt))
            request = Request("check", prompt, Sampling(max_tokens=3, temperature=0.0), quality="exact")
            found, cold = (one.generate([request])[0].tokens for one in (self.engine, self.make(True, 400)))
            if found != cold:
                self.faults.append("a prompt that wants exact KV is not answered as by a fresh engine")
        reuse = self.engine.reuse
        assert reuse.semblend is not None
        found = {"claims": len(reuse.semblend._claims), "holds": reuse.donor_kv.holders}  # type: ignore[union-attr]
        return [f"{count} {what}" for what, count in found.items() if count] + self.faults


def live_and_count(lives: EmbeddedLives, seed: int) -> int:
    """One sequence; answers and receipts are counted from what the engine said. Tokens that it reused."""
    idle, reused = type(lives).is_idle, 0

    def count(self: EmbeddedLives) -> bool:
        self.answered.clear()
        self.receipts.clear()
        for _, _, stream in self.asked:
            chunks = stream.chunks
            self.answered[stream.request_id] += any(chunk.token_ids for chunk in chunks)
            self.receipts[stream.request_id] += sum(chunk.receipt is not None for chunk in chunks)
        return bool(idle.fget(self))  # type: ignore[attr-defined, misc]

    counting = type("Counting", (type(lives),), {"is_idle": property(count)})
    lives.__class__ = counting
    live(lives, seed)
    for _, _, stream in lives.asked:
        reused += sum(chunk.receipt.reused_tokens for chunk in stream.chunks if chunk.receipt is not None)
    return reused


@pytest.mark.parametrize("strict", [True, False], ids=["our gaps", "the scheduler's gaps"])
def test_the_embedded_engine_keeps_the_contract(strict, is_long):
    seeds = range(LONG if is_long else SEQUENCES)
    reused = sum(live_and_count(EmbeddedLives(seed, strict=strict), seed) for seed in seeds)
    assert reused > 10 * len(seeds), "the lives have led past every load"


def test_an_embedded_engine_that_publishes_moved_kv_is_caught(monkeypatch):
    from semblend.engine.core.sequence import EXACT_TO_THE_END, Sequence

    monkeypatch.setattr(Sequence, "exact_until", property(lambda self: EXACT_TO_THE_END))
    with pytest.raises(AssertionError, match="seed"):
        sum(live_and_count(EmbeddedLives(seed, strict=True), seed) for seed in range(SEQUENCES))


class TransformersLives(Engine):
    """One prompt after the other: prepared and dropped, prepared and lost, or answered."""

    def __init__(self, seed: int, model: Any) -> None:
        from semblend.integration.transformers.reuse import TransformersReuse

        super().__init__()
        self.rng, self.model, self.waiting, self.asked = random.Random(seed), model, [], []
        config = SemBlendConfig(metrics=False, min_span_tokens=16, quality="fast")
        self.reuse = TransformersReuse(model, config=config)
        self.reused = 0

    def submit(self, name: str, tokens: list[int], mode: str, salt: str) -> None:
        self.waiting.append((name, torch.tensor([tokens]), mode, salt))

    def step(self) -> None:
        if self.waiting:
            name, tokens, mode, salt = self.waiting.pop(0)
            answer = self.reuse.generate(tokens, quality=mode, salt=salt, max_new_tokens=3, do_sample=False)
            self.asked.append((tokens, salt))
            self.answered[name] += 1
            self.note_receipt(name, answer.receipt)
            self.reused += answer.receipt.reused_tokens if answer.receipt is not None else 0

    def abort(self, rng: random.Random) -> None:
        if self.waiting:
            _, tokens, mode, salt = self.waiting.pop(rng.randrange(len(self.waiting)))
            self.reuse.drop(self.reuse.prepare(tokens, quality=mode, salt=salt))

    def preempt(self, rng: random.Random) -> None:
        """A script loses its cache and begins again."""
        if self.waiting:
            _, tokens, mode, salt = rng.choice(self.waiting)
            self.reuse.prepare(tokens, quality=mode, salt=salt)

    def reset(self) -> None:
        self.reuse.clear()

    def forget_donor(self, rng: random.Random) -> None:
        if donors := self.reuse.semblend.donors():
            self.reuse.semblend.forget(rng.choice(donors).donor_id)

    def fail_next_load(self) -> None:
        owner = self.reuse._sessions
        if "_get_blender" not in vars(owner):
            fail_once(owner, "_get_blender")

    def change_weights(self) -> None:
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.mul_(1.01)
        self.asked.clear()

    @property
    def is_idle(self) -> bool:
        return not self.waiting

    def list_remains(self) -> list[str]:
        for tokens, salt in self.asked[-3:]:
            found = self.reuse.generate(tokens, quality="exact", salt=salt, max_new_tokens=3, do_sample=False)
            cold = self.model.generate(tokens, max_new_tokens=3, do_sample=False)
            if not torch.equal(found.sequences, cold):
                self.faults.append("a prompt that wants exact KV is not answered as without us")
        sessions = self.reuse._sessions
        while self.reuse._abandoned:
            sessions.forget(self.reuse._abandoned.pop())
        found = {
            "sessions": len(sessions), "claims": len(self.reuse.semblend._claims), "holds": sessions.donors.kv.holders
        }  # fmt: skip
        return [f"{count} {what}" for what, count in found.items() if count] + self.faults


@pytest.mark.slow
def test_reuse_around_generate_keeps_the_contract(is_long):
    pytest.importorskip("transformers")
    sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "transformers"))
    from tiny_models import make_model

    reused, seeds = 0, range(LONG if is_long else SEQUENCES)
    for seed in seeds:
        lives = TransformersLives(seed, make_model("llama"))
        live(lives, seed)
        reused += lives.reused
    assert reused > 10 * len(seeds), "the lives have led past every load"
