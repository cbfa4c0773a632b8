"""Faults inside: no memory for donors, a full disk, a blender that fails at random, books that break. The request is
answered, an event says why, and the next request is right."""

from __future__ import annotations

import asyncio
import errno
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine needs torch")

from small_models import Characters  # noqa: E402

from semblend import SemBlend, SemBlendConfig  # noqa: E402
from semblend.confirm.outcome import Outcome  # noqa: E402
from semblend.confirm.sinks import MemorySink  # noqa: E402
from semblend.engine.core.assemble import assemble  # noqa: E402
from semblend.engine.core.config import EngineConfig  # noqa: E402
from semblend.engine.core.engine import Engine  # noqa: E402
from semblend.engine.model.model import DecoderModel  # noqa: E402
from semblend.engine.model.spec import ModelSpec  # noqa: E402
from semblend.engine.server.local_engine import LocalEngine  # noqa: E402
from semblend.errors import InputError, SemBlendError  # noqa: E402
from semblend.prompt import Prompt  # noqa: E402
from semblend.wire.answer import FinishReason  # noqa: E402
from semblend.wire.request import Request  # noqa: E402
from semblend.wire.sampling import Sampling  # noqa: E402

VOCAB = 96
SHAPE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 1024,
    "rope_theta": 10_000.0,
}  # fmt: skip
DOCUMENT = [random.Random(3).randrange(VOCAB) for _ in range(160)]
FIVE = Sampling(max_tokens=5)


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return DecoderModel.random(ModelSpec.from_hf_config(SHAPE))


@pytest.fixture
def sink() -> MemorySink:
    return MemorySink()


def reusing(model: DecoderModel, sink: MemorySink, tokens: int = 2048, quality: str = "fast", **parts: Any) -> Engine:
    library = SemBlend(SemBlendConfig(embedder="none", metrics=False), sinks=[sink])
    return assemble(model, pool_tokens=tokens, semblend=library, config=EngineConfig(quality=quality), **parts)


def about(head: int) -> Prompt:
    """A question of a few tokens, then the document."""
    return Prompt([head, head + 1, head + 2, *DOCUMENT, head])


def cold(model: DecoderModel, prompt: Prompt) -> tuple[int, ...]:
    engine = Engine(model, model.new_pool(2048))
    return engine.generate([prompt], FIVE)[0].tokens


def errors(sink: MemorySink) -> list[tuple[str, str]]:
    return [(event.fields["where"], event.fields["message"]) for event in sink.events if event.kind == "error"]


# -- the donor tier ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("CUDA out of memory"), MemoryError("no memory")])
def test_no_memory_for_a_donor_costs_the_donor_and_an_event_says_so(model, sink, monkeypatch, error):
    engine = reusing(model, sink)

    def full(*given: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(engine.reuse.donor_kv.memory, "take", full)
        first = engine.generate([Request("first", about(1), FIVE)])[0]
    assert first.tokens == cold(model, about(1))
    ((where, message),) = errors(sink)
    assert where == "capture"
    assert "no memory" in message
    assert engine.reuse.semblend.donors() == ()
    again = engine.generate([Request("second", about(5), FIVE)])[0]
    assert again.tokens == cold(model, about(5))
    assert again.receipt.outcome is Outcome.COLD_FALLBACK
    third = engine.generate([Request("third", about(9), FIVE)])[0]
    assert third.receipt.outcome is Outcome.BACKEND_MATERIALIZED_REUSE  # memory is there again, and so is reuse
    engine.check()
    engine.reuse.donor_kv.check()


def test_a_full_disk_costs_the_donors_that_should_go_there(model, sink, tmp_path, monkeypatch):
    size = model.new_pool(16).bytes_per_token * len(about(1))
    engine = reusing(model, sink, donor_host_bytes=size, donor_disk_bytes=10 * size, donor_dir=tmp_path)

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(engine.reuse.donor_kv._disk, "write", full)
    for head in (1, 5, 9):
        done = engine.generate([Request(f"r{head}", about(head), FIVE, quality="exact")])[0]
        assert done.tokens == cold(model, about(head))
        engine.reuse.donor_kv.flush()
    # Each one pushed the one before it out; the library knows the last alone.
    assert [donor.donor_id for donor in engine.reuse.semblend.donors()] == ["r9"]
    gone = [event.fields["donor_id"] for event in sink.events if event.kind == "donor_evicted"]
    assert gone == ["r1", "r5"]
    reused = engine.generate([Request("next", about(20), FIVE)])[0]
    assert reused.receipt.donor_ids == ("r9",)
    engine.reuse.donor_kv.check()


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("CUDA out of memory"), OSError(errno.EIO, "I/O error")])
def test_a_donor_that_cannot_be_brought_back_costs_time_and_never_an_answer(model, sink, monkeypatch, error):
    engine = reusing(model, sink)
    engine.generate([Request("donor", about(1), FIVE)])

    def fails(*given: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(engine.reuse.donor_kv, "acquire", fails)
        done = engine.generate([Request("target", about(5), FIVE)])[0]
    assert done.tokens == cold(model, about(5))
    assert done.receipt.outcome is Outcome.BACKEND_DECLINED_REUSE
    assert type(error).__name__ in done.receipt.detail
    assert engine.reuse.donor_kv.holders == 0
    engine.check()


# -- the blender ---------------------------------------------------------------------------------------------------


class Moody:
    """Fails at random, before or after it wrote rubbish; otherwise the real thing."""

    def __init__(self, inner: Any, pool: Any, seed: int) -> None:
        self._inner, self._pool = inner, pool
        self._chance = random.Random(seed)
        self.failed = self.served = 0

    @property
    def donor_kv(self) -> Any:
        return self._inner.donor_kv

    def prepare_in_pieces(self, sequence: Any, plan: Any, *, mode: str | None = None) -> Any:
        mood = self._chance.choice(["fine", "early", "late", "rubbish"])
        if mood == "early":
            self.failed += 1
            raise RuntimeError("at once")
        blended = yield from self._inner.prepare_in_pieces(sequence, plan, mode=mode)
        if mood == "fine":
            self.served += 1
            return blended
        self.failed += 1
        if mood == "rubbish":
            slots = sequence.slots[plan.exact_tokens : plan.prompt_tokens]
            self._pool.k[:, slots] = float("nan")
            self._pool.v[:, slots] = float("nan")
        raise torch.cuda.OutOfMemoryError("afterwards")


@pytest.mark.parametrize("quality", ["fast", "balanced"])
def test_a_blender_that_fails_at_random_costs_time_and_never_an_answer(model, sink, quality):
    engine = reusing(model, sink, quality=quality)
    moody = Moody(engine.reuse._blender, engine.pool, seed=8)
    engine.reuse._blender = moody
    for number in range(30):
        prompt = about(number * 2)
        done = engine.generate([Request(f"r{number}", prompt, FIVE)])[0]
        assert done.finish_reason is FinishReason.LENGTH
        if done.receipt.outcome is not Outcome.BACKEND_MATERIALIZED_REUSE:
            assert done.tokens == cold(model, prompt)
        engine.check()
        engine.reset_prefix_cache()
    assert moody.failed > 5
    assert moody.served > 2
    assert [where for where, _ in errors(sink)] == ["materialize"] * moody.failed
    assert engine.reuse.donor_kv.holders == 0
    assert engine.reuse.semblend._claims == {}
    assert engine.pool.used_blocks == 0
    # NaN that a failed blender left in blocks that were freed does not reach whoever gets them next.
    engine.reuse._blender = moody._inner
    assert engine.generate([Request("last", about(90), FIVE, quality="exact")])[0].tokens == cold(model, about(90))


# -- the engine's own books ----------------------------------------------------------------------------------------


def test_a_sequence_that_cannot_be_settled_is_let_go_all_the_same(model, monkeypatch):
    engine = Engine(model, model.new_pool(2048), config=EngineConfig())

    def broken(*given: Any, **more: Any) -> None:
        raise SemBlendError("the cache is broken", hint="none")

    streams = [engine.submit(Request(name, about(1), Sampling(max_tokens=n))) for name, n in (("a", 1), ("b", 3))]
    with monkeypatch.context() as patched:
        patched.setattr(engine.radix, "insert", broken)
        for _ in range(20):
            engine.step()
    assert not engine.has_work
    assert all(stream.finished for stream in streams)
    assert engine.pool.used_blocks == 0
    engine.check()
    assert engine.generate([about(5)], FIVE)[0].tokens == cold(model, about(5))


def test_equal_prompts_that_come_at_once_are_computed_once_and_answered_alike(model, sink):
    engine = reusing(model, sink)
    done = engine.generate([Request(f"r{n}", about(1), FIVE) for n in range(6)])
    assert {one.tokens for one in done} == {cold(model, about(1))}
    assert sum(one.receipt.prefill_tokens == len(about(1)) for one in done) == 1
    assert all(one.receipt.exact_tokens == 160 for one in done[1:])
    engine.check()


def test_a_bias_on_a_token_that_the_model_lacks_is_refused(model):
    engine = Engine(model, model.new_pool(256))
    with pytest.raises(InputError, match="logit_bias names token 96"):
        engine.submit(Request("r", Prompt([1, 2]), Sampling(logit_bias=((VOCAB, 1.0),))))


def test_a_call_after_the_end_is_refused_and_one_before_it_is_run(model):
    async def talk() -> None:
        engine = LocalEngine(Engine(model, model.new_pool(256)), Characters())
        engine.start()
        early = engine.call_soon(lambda inner: inner.load.blocks)
        await asyncio.to_thread(engine.close)
        assert early.result(300) == 16
        with pytest.raises(SemBlendError, match="closed"):
            engine.call_soon(lambda inner: None)

    asyncio.run(asyncio.wait_for(talk(), 600))


# -- rotations that depend on the prompt ---------------------------------------------------------------------------


def test_a_model_with_dynamic_scaling_reuses_its_donors(sink):
    shape = SHAPE | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    engine = reusing(DecoderModel.random(ModelSpec.from_hf_config(shape)), sink)
    engine.generate([Request("donor", about(1), FIVE)])
    found = engine.generate([Request("target", about(5), FIVE)])[0].receipt
    assert found.outcome is Outcome.BACKEND_MATERIALIZED_REUSE
    assert found.donor_ids == ("donor",)


# -- what is told ----------------------------------------------------------------------------------------------------


def test_the_runs_that_a_blender_recomputed_come_with_the_receipt(model, sink):
    engine = reusing(model, sink)
    real = engine.reuse._blender

    class Telling:
        donor_kv = real.donor_kv

        def prepare_in_pieces(self, sequence: Any, plan: Any, *, mode: str | None = None) -> Any:
            blended = yield from real.prepare_in_pieces(sequence, plan, mode=mode)
            return Told(blended, ((3, 35), (150, 160)))

    class Told:
        def __init__(self, inner: Any, runs: tuple[tuple[int, int], ...]) -> None:
            self._inner, self.recomputed_runs = inner, runs

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    engine.generate([Request("donor", about(1), FIVE)])
    engine.reuse._blender = Telling()
    stream = engine.submit(Request("target", about(5), FIVE))
    while not stream.finished:
        engine.step()
    assert stream.chunks[0].recomputed == ((3, 35), (150, 160))
    assert all(chunk.recomputed == () for chunk in stream.chunks[1:])
