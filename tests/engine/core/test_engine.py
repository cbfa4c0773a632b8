"""The engine on small random models: the same tokens however the work is cut, and never a block too many."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import Characters

from semblend import SemBlend, SemBlendConfig
from semblend.confirm.outcome import Outcome
from semblend.confirm.sinks import MemorySink
from semblend.engine.core.assemble import assemble
from semblend.engine.core.config import EngineConfig
from semblend.engine.core.engine import Engine
from semblend.engine.core.sequence import Completion, QueueFull
from semblend.engine.core.stops import AnswerText, NoText
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.spec import ModelSpec
from semblend.engine.server.local_engine import LocalEngine
from semblend.errors import InputError, SemBlendError
from semblend.materialize.contract import Rows
from semblend.plan.reuse_plan import Decline, DeclineReason
from semblend.prompt import Namespace, Prompt
from semblend.wire.answer import Chunk, FinishReason
from semblend.wire.request import Request
from semblend.wire.sampling import Sampling

VOCAB = 96


FIVE = Sampling(max_tokens=5)


def make_model(architecture: str = "llama", seed: int = 0) -> DecoderModel:
    config = {
        "model_type": architecture,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "eos_token_id": None,
    }
    return DecoderModel.random(ModelSpec.from_hf_config(config), seed)


@pytest.fixture(scope="module")
def model() -> DecoderModel:
    return make_model()


@pytest.fixture
def sink() -> MemorySink:
    return MemorySink()


def make_engine(model: DecoderModel, tokens: int = 2048, **config: Any) -> Engine:
    detokenizer = config.pop("detokenizer", None)
    return Engine(model, model.new_pool(tokens), config=EngineConfig(**config), detokenizer=detokenizer)


def make_reusing(model: DecoderModel, sink: MemorySink, tokens: int = 2048, **config: Any) -> Engine:
    library = SemBlend(SemBlendConfig(embedder="none", metrics=False), sinks=[sink])
    return assemble(model, pool_tokens=tokens, semblend=library, config=EngineConfig(**config))


def prompts(n: int, seed: int = 0, longest: int = 90) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(VOCAB) for _ in range(chance.randint(1, longest))] for _ in range(n)]


def text_of(tokens: list[int], tenant: str = "") -> Prompt:
    return Prompt(tokens, namespace=Namespace(tenant=tenant))


def tokens_of(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.tokens for completion in completions]


def alone(model: DecoderModel, asked: list[list[int]], sampling: Sampling) -> list[tuple[int, ...]]:
    """Each prompt by itself in a fresh engine, in one chunk: the plainest way there is."""
    return [tokens_of(make_engine(model, step_tokens=4096).generate([prompt], sampling))[0] for prompt in asked]


class Letters(NoText):
    """A tokenizer of one letter a token."""

    def add(self, token):
        return chr(ord("a") + token % 26)


# -- the same tokens however the work is cut -----------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_batch_says_what_its_prompts_say_alone(architecture):
    model = make_model(architecture, seed=3)
    asked, sampling = prompts(20), Sampling(max_tokens=12)
    engine = make_engine(model, step_tokens=64)
    assert tokens_of(engine.generate(asked, sampling)) == alone(model, asked, sampling)
    engine.check()


@pytest.mark.parametrize("step_tokens", [1, 7, 16, 33])
def test_prompts_in_chunks_say_what_they_say_in_one_piece(model, step_tokens):
    asked, sampling = prompts(5, seed=1), Sampling(max_tokens=6)
    engine = make_engine(model, step_tokens=step_tokens)
    assert tokens_of(engine.generate(asked, sampling)) == alone(model, asked, sampling)


def test_drawn_tokens_depend_on_the_seed_and_not_on_the_company(model):
    asked = prompts(8, seed=2)
    requests = [
        Request(f"r{i}", Prompt(p), Sampling(max_tokens=8, temperature=1.0, seed=i)) for i, p in enumerate(asked)
    ]
    together = tokens_of(make_engine(model).generate(requests))
    assert together == [tokens_of(make_engine(model).generate([request]))[0] for request in requests]
    assert len(set(together)) > 1


def test_a_preempted_request_goes_on_with_the_same_tokens(model):
    asked = prompts(10, seed=4, longest=40)
    greedy = Sampling(max_tokens=40)
    drawn = [Request(f"d{i}", Prompt(p), Sampling(max_tokens=40, temperature=1.0, seed=i)) for i, p in enumerate(asked)]
    expected = alone(model, asked, greedy)
    expected_drawn = tokens_of(make_engine(model).generate(drawn))
    engine = make_engine(model, tokens=256)
    assert tokens_of(engine.generate(asked, greedy)) == expected
    assert tokens_of(engine.generate(drawn)) == expected_drawn
    assert engine.load.preemptions > 0
    engine.check()


# -- the exact cache -----------------------------------------------------------------------------------------------


def test_an_identical_prompt_is_served_from_the_exact_cache(model):
    prompt = prompts(1, seed=5, longest=90)[0] * 3
    engine = make_engine(model)
    cold, warm = (engine.generate([prompt], Sampling(max_tokens=8, logprobs=5))[0] for _ in range(2))
    assert cold.receipt.exact_tokens == 0
    assert cold.receipt.outcome is Outcome.COLD_FALLBACK
    assert warm.receipt.exact_tokens == (len(prompt) - 1) // 16 * 16
    assert warm.receipt.outcome is Outcome.EXACT_PREFIX_ROUTE
    assert warm.receipt.prefill_tokens == len(prompt) - warm.receipt.exact_tokens
    assert warm.tokens == cold.tokens
    for one, other in zip(cold.logprobs, warm.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [best.token_id for best in one.top] == [best.token_id for best in other.top]
        assert len(one.top) == 5


def test_the_answer_is_a_prefix_for_the_next_turn(model):
    engine = make_engine(model)
    first = list(range(40))
    answer = list(engine.generate([first], Sampling(max_tokens=30))[0].tokens)
    turn = engine.generate([[*first, *answer, 1, 2, 3]], Sampling(max_tokens=2))[0]
    assert turn.receipt.exact_tokens == 64  # of the 70, the last of which has no KV


def test_namespaces_and_salts_never_share(model):
    engine = make_engine(model)
    prompt = list(range(64))

    def exact(request_id: str, tenant: str = "", salt: str = "") -> int:
        request = Request(request_id, text_of(prompt, tenant), Sampling(max_tokens=1), cache_salt=salt)
        return engine.generate([request])[0].receipt.exact_tokens

    assert [exact("a"), exact("b", "t"), exact("c", "t", "s"), exact("d", "t", "other")] == [0, 0, 0, 0]
    assert [exact("e"), exact("f", "t"), exact("g", "t", "s"), exact("h", "t", "other")] == [48, 48, 48, 48]


def test_a_reset_cache_holds_nothing(model):
    engine = make_engine(model)
    engine.generate([list(range(64))], Sampling(max_tokens=1))
    assert engine.reset_prefix_cache() == 4
    assert engine.generate([list(range(64))], Sampling(max_tokens=1))[0].receipt.exact_tokens == 0
    engine.check()


# -- the end of an answer ------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_answer_across_token_boundaries(model):
    prompt = list(range(30))
    whole = make_engine(model, detokenizer=Letters()).generate([prompt], Sampling(max_tokens=20))[0]
    assert (len(whole.text), whole.finish_reason) == (20, FinishReason.LENGTH)
    stop = whole.text[5:8]  # three tokens long
    at = whole.text.index(stop)
    request = Request("stopped", Prompt(prompt), Sampling(max_tokens=20, stop=("never said", stop)))
    engine = make_engine(model, detokenizer=Letters())
    stopped = engine.generate([request])[0]
    assert (stopped.text, stopped.finish_reason) == (whole.text[:at], FinishReason.STOP)
    assert stopped.tokens == whole.tokens[: at + 3]


def test_text_that_only_looked_like_a_stop_string_is_said_after_all(model):
    prompt = list(range(30))
    whole = make_engine(model, detokenizer=Letters()).generate([prompt], Sampling(max_tokens=20))[0]
    request = Request("r", Prompt(prompt), Sampling(max_tokens=20, stop=(whole.text[-2:] + "!", whole.text[3:5] + "?")))
    assert make_engine(model, detokenizer=Letters()).generate([request])[0].text == whole.text


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(1, 4))
def test_text_in_pieces_ends_where_the_whole_text_would(whole, stops, size):
    class Parts(NoText):
        def add(self, token):
            return whole[token * size : (token + 1) * size]

    text = AnswerText(Parts(), stops)
    said = ""
    for token in range(-(-len(whole) // size)):
        said += text.push(token)
        if text.matched:
            break
    said += text.flush()
    # The first stop string to be complete ends the answer, so a longer one that begins earlier may come too late.
    for end in range(0, len(whole) + size, size):
        found = [whole[:end].index(stop) for stop in stops if stop in whole[:end]]
        if found:
            assert said == whole[: min(found)]
            return
    assert (said, text.matched) == (whole, None)


def test_a_stop_id_ends_the_answer_and_gives_no_text(model):
    prompt = list(range(30))
    whole = make_engine(model, detokenizer=Letters()).generate([prompt], Sampling(max_tokens=20))[0]
    last = whole.tokens[6]
    at = whole.tokens.index(last)
    request = Request("r", Prompt(prompt), Sampling(max_tokens=20, stop_token_ids=(last,)))
    found = make_engine(model, detokenizer=Letters()).generate([request])[0]
    assert (found.tokens, found.text) == (whole.tokens[: at + 1], whole.text[:at])


def test_an_answer_ends_where_the_context_ends(model):
    found = make_engine(model, max_context=40).generate([list(range(30))], Sampling(max_tokens=500))[0]
    assert (len(found.tokens), found.finish_reason) == (10, FinishReason.LENGTH)


# -- limits and faults ---------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_a_free_place_is_taken_again(model):
    engine = make_engine(model, max_waiting=2, max_running=1)
    requests = [Request(f"r{i}", Prompt([1, 2, 3])) for i in range(4)]
    streams = [engine.submit(request) for request in requests[:2]]
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        engine.submit(requests[2])
    engine.step()
    engine.submit(requests[2])
    with pytest.raises(QueueFull):
        engine.submit(requests[3])
    while engine.has_work:
        engine.step()
    assert all(stream.finished for stream in streams)


@pytest.mark.parametrize(
    ("tokens", "message"), [(list(range(90)) * 12, "takes 1023 at most"), ([VOCAB], "outside the model's vocabulary")]
)
def test_a_prompt_that_can_never_be_answered_is_refused(model, tokens, message):
    with pytest.raises(InputError, match=message):
        make_engine(model).submit(Request("r", Prompt(tokens)))


def test_a_request_id_that_is_under_way_is_refused(model):
    engine = make_engine(model)
    engine.submit(Request("r", Prompt([1])))
    with pytest.raises(InputError, match="under way"):
        engine.submit(Request("r", Prompt([2])))


class Failing:
    """A model that fails when its ``when`` says so."""

    def __init__(self, model: DecoderModel, when: Callable[[Rows], bool], *, nan: bool = False) -> None:
        self.spec = model.spec
        self._model, self._when, self._nan = model, when, nan

    def forward(self, rows: Rows, pool: Any, *, stop: Any = None) -> torch.Tensor:
        hidden = self._model.forward(rows, pool)
        if self._when(rows):
            if not self._nan:
                raise RuntimeError("out of memory")
            hidden = hidden * float("nan")
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden)


@pytest.mark.parametrize("nan", [False, True])
def test_a_failing_pass_ends_its_requests_and_the_next_one_is_right(model, nan):
    engine = Engine(Failing(model, lambda rows: 13 in rows.tokens.tolist(), nan=nan), model.new_pool(512))
    broken, fine = engine.generate([[13] * 40], Sampling(max_tokens=4))[0], [[1, 2, 3]]
    assert broken.finish_reason is FinishReason.ERROR
    assert "out of memory" in broken.detail or "not finite" in broken.detail
    assert tokens_of(engine.generate(fine, Sampling(max_tokens=4))) == alone(model, fine, Sampling(max_tokens=4))
    assert len(engine.radix) == 0
    engine.check()


@pytest.mark.parametrize("nan", [False, True])
def test_a_token_that_breaks_the_pass_ends_its_own_request_only(model, nan):
    bad, victims = [5, 13, 7], [[1, 2, 3], [4] * 30, [9, 8]]
    hidden_rows = {}

    class BreaksRow(Failing):
        """Raises for a pass with token 13, or makes NaN of that sequence's rows alone."""

        def forward(self, rows: Rows, pool: Any, *, stop: Any = None) -> torch.Tensor:
            hidden = self._model.forward(rows, pool)
            for segment in rows.segments:
                if 13 in rows.tokens[segment.start : segment.end].tolist():
                    hidden_rows[len(rows.segments)] = True
                    if not nan:
                        raise RuntimeError("index out of range")
                    hidden[segment.start : segment.end] = float("nan")
            return hidden

    for sampling in (Sampling(max_tokens=6), Sampling(max_tokens=6, temperature=1.0, seed=3)):
        engine = Engine(BreaksRow(model, lambda rows: False), model.new_pool(512))
        expected = make_engine(model, 512).generate([*victims, [5]], sampling)[:3]
        assert all(13 not in completion.tokens for completion in expected)  # or a victim would break the pass itself
        *fine, broken = engine.generate([*victims, bad], sampling)
        assert tokens_of(fine) == tokens_of(expected)
        assert broken.finish_reason is FinishReason.ERROR
        engine.check()
    assert 4 in hidden_rows  # all four were in one batch


def test_a_failed_draw_is_made_again_with_the_same_random_numbers(model, monkeypatch):
    from semblend.engine.core import runner as module

    asked = [
        Request(f"r{i}", Prompt(p), Sampling(max_tokens=8, temperature=1.0, seed=i))
        for i, p in enumerate(prompts(3, seed=2))
    ]
    expected = make_engine(model).generate(asked)
    real, calls = module.sample, []

    def fails_after_drawing(logits: torch.Tensor, draws: Any) -> Any:
        found = real(logits, draws)
        calls.append(len(draws))
        if len(calls) in (1, 9):
            raise RuntimeError("no memory for the answer")
        return found

    monkeypatch.setattr(module, "sample", fails_after_drawing)
    engine = make_engine(model)
    assert tokens_of(engine.generate(asked)) == tokens_of(expected)
    assert calls[:4] == [3, 1, 1, 1]
    engine.check()


@pytest.mark.parametrize("token", [-1, VOCAB, 1 << 40])
def test_a_token_outside_the_vocabulary_ends_its_own_request_only(model, monkeypatch, token):
    from semblend.engine.core import runner as module

    asked, sampling = [[1, 2, 3], [7] * 20, [9, 8]], Sampling(max_tokens=6)
    expected = make_engine(model).generate(asked, sampling)
    real = module.sample

    def bends(logits: torch.Tensor, draws: Any) -> Any:
        found = real(logits, draws)
        for at, draw in enumerate(draws):
            if list(draw.seen[:2]) == [7, 7] and len(draw.seen) == 22:
                found[at] = module.Sampled(token)
        return found

    monkeypatch.setattr(module, "sample", bends)
    engine = make_engine(model)
    first, bad, last = engine.generate(asked, sampling)
    assert tokens_of([first, last]) == tokens_of([expected[0], expected[2]])
    assert bad.finish_reason is FinishReason.ERROR
    assert "vocabulary" in bad.detail
    assert bad.tokens == expected[1].tokens[:2]
    engine.check()


def test_a_broken_listener_costs_its_own_request_only(model):
    def listener(chunk: Chunk) -> None:
        raise ValueError("gone")

    engine = make_engine(model)
    heard = engine.submit(Request("a", Prompt([1, 2]), Sampling(max_tokens=5)))
    engine.submit(Request("b", Prompt([1, 2]), Sampling(max_tokens=5)), listener)
    while engine.has_work:
        engine.step()
    assert len(heard.completion().tokens) == 5
    engine.check()


def test_check_sees_a_leaked_block(model):
    engine = make_engine(model)
    engine.pool.allocate(1)
    with pytest.raises(SemBlendError, match="leaked"):
        engine.check()


def test_many_mixed_requests_with_cancellations_leave_no_block_behind(model, sink, is_long):
    chance, count = random.Random(7), 300 if is_long else 120
    engine = make_reusing(model, sink, tokens=640, step_tokens=48, max_running=8, quality="fast")
    documents = prompts(6, seed=8, longest=120)
    open_ids: list[str] = []
    streams = []
    submitted = 0
    while submitted < count or engine.has_work:
        if submitted < count and chance.random() < 0.6:
            parts = [*chance.sample(documents, chance.randint(1, 3)), [chance.randrange(VOCAB)]]
            prompt = [token for part in parts for token in part]
            sampling = Sampling(max_tokens=chance.choice([1, 5, 60]), temperature=chance.choice([0, 1]), seed=submitted)
            request = Request(
                f"r{submitted}",
                text_of(prompt, chance.choice(["", "a", "b"])),
                sampling,
                quality=chance.choice([None, "exact", "balanced"]),
                opt_out=chance.random() < 0.1,
            )
            streams.append(engine.submit(request))
            open_ids.append(request.request_id)
            submitted += 1
        if open_ids and chance.random() < 0.1:
            engine.cancel(chance.choice(open_ids))
        engine.step()
        if chance.random() < 0.05:
            engine.check()
        if chance.random() < 0.01:
            engine.reset_prefix_cache()
    engine.check()
    assert all(stream.finished for stream in streams)
    ends = {stream.chunks[-1].finish_reason for stream in streams}
    assert ends <= {FinishReason.LENGTH, FinishReason.CANCELLED}
    kinds = {stream.completion().receipt.outcome for stream in streams if stream.completion().receipt}
    assert {Outcome.COLD_FALLBACK, Outcome.EXACT_PREFIX_ROUTE, Outcome.BACKEND_MATERIALIZED_REUSE} <= kinds
    assert not [event for event in sink.events if event.kind == "error"]
    assert engine.load.preemptions > 0
    assert engine.reuse.semblend._claims == {}
    engine.reuse._blender.donor_kv.check()
    engine.reset_prefix_cache()
    assert engine.pool.used_blocks == 0


# -- semantic reuse ------------------------------------------------------------------------------------------------


def shifted(seed: int = 11) -> tuple[list[int], list[int]]:
    """A prompt, and another that holds the same document behind another beginning."""
    chance = random.Random(seed)
    document = [chance.randrange(VOCAB) for _ in range(160)]
    return [1, 2, 3, *document, 4, 5], [9, 8, 7, 6, 5, 4, 6, *document, 7, 7, 7]


@pytest.mark.parametrize("quality", ["fast", "balanced"])
def test_a_shifted_document_is_reused_and_the_receipt_says_so(model, sink, quality):
    engine = make_reusing(model, sink, quality=quality)
    first, second = shifted()
    donor = engine.generate([Request("donor", Prompt(first), FIVE)])[0]
    assert donor.receipt.outcome is Outcome.COLD_FALLBACK
    receipt = engine.generate([Request("target", Prompt(second))])[0].receipt
    assert receipt.mode == quality
    assert receipt.prompt_tokens == len(second)
    assert receipt.reused_tokens + receipt.recomputed_tokens == 160
    assert (receipt.outcome is Outcome.BACKEND_MATERIALIZED_REUSE) == (receipt.reused_tokens > 0)
    assert [span.donor_id for span in receipt.spans] == ["donor"]
    assert receipt.ttft_ms > 0
    assert receipt.lookup_ms > 0
    assert engine.reuse.semblend.totals().tokens["reused"] == receipt.reused_tokens
    engine.check()


def moved(number: int) -> Prompt:
    """The document of `shifted` behind a beginning that no other number has."""
    return Prompt([number, number, number + 1, *shifted()[0][3:163], number])


def test_scheduling_looks_for_no_donor_and_computes_nothing(model, sink, monkeypatch):
    engine = make_reusing(model, sink, quality="fast")
    engine.generate([Request("donor", Prompt(shifted()[0]), FIVE)])
    for owner, name in (
        (engine.reuse.semblend, "lookup"),
        (engine.reuse._blender, "prepare_in_pieces"),
        (model, "forward"),
    ):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("called while scheduling"))
    engine.submit(Request("target", moved(50)))
    engine._take_in()
    batch = engine.scheduler.schedule()
    assert [piece.sequence.request_id for piece in batch.pieces] == ["target"]
    monkeypatch.undo()
    engine.runner.run(batch)


def test_one_prompt_a_step_is_filled_and_those_behind_it_are_filled_next(model, sink):
    engine = make_reusing(model, sink, quality="fast", step_work_ms=1e9)
    engine.generate([Request("donor", Prompt(shifted()[0]), FIVE)])
    streams = [engine.submit(Request(f"target{n}", moved(50 + n), Sampling(max_tokens=2))) for n in range(3)]
    first_heard = [{chunk.request_id for chunk in engine.step() if chunk.receipt} for _ in range(3)]
    assert first_heard == [{"target0"}, {"target1"}, {"target2"}]
    engine.check()
    while engine.has_work:
        engine.step()
    receipts = [stream.completion().receipt for stream in streams]
    assert [receipt.outcome for receipt in receipts] == [Outcome.BACKEND_MATERIALIZED_REUSE] * 3
    assert engine.reuse.semblend._claims == {}


def test_a_declined_prompt_is_computed_in_the_step_that_looked_for_donors(model, sink):
    engine = make_reusing(model, sink, quality="fast")
    engine.submit(Request("cold", Prompt([1, 2, 3] * 20), Sampling(max_tokens=1)))
    assert [chunk.receipt.reason for chunk in engine.step()] == [DeclineReason.NOTHING_SHARED]


def test_a_prompt_that_is_preempted_before_its_turn_is_filled_when_it_comes_back(model, sink):
    engine = make_reusing(model, sink, quality="fast")
    engine.generate([Request("donor", Prompt(shifted()[0]), FIVE)])
    streams = [engine.submit(Request(f"target{n}", moved(50 + n), Sampling(max_tokens=2))) for n in range(2)]
    engine.step()
    waits = engine.scheduler.running[-1]
    assert (waits.request_id, waits.to_fill, waits.computed) == ("target1", True, 0)
    engine.scheduler._preempt(waits)
    engine.check()
    while engine.has_work:
        engine.step()
    assert streams[1].completion().receipt.outcome is Outcome.BACKEND_MATERIALIZED_REUSE
    engine.check()


def test_approximate_kv_never_enters_the_exact_cache_and_becomes_no_donor(model, sink):
    engine = make_reusing(model, sink, quality="fast")
    first, second = shifted()
    engine.generate([Request("donor", Prompt(first), FIVE)])
    blocks = len(engine.radix)
    engine.generate([Request("target", Prompt(second), Sampling(max_tokens=40))])
    assert len(engine.radix) == blocks + 2  # its first donor token is the eighth, and 32 from there on were computed
    assert [donor.donor_id for donor in engine.reuse.semblend.donors()] == ["donor"]
    again = engine.generate([Request("exact", Prompt(second), quality="exact")])[0]
    assert again.receipt.exact_tokens == 32
    assert again.tokens == alone(model, [second], Sampling())[0]


def test_a_mode_or_a_wish_of_the_request_keeps_donors_away(model, sink):
    engine = make_reusing(model, sink, quality="fast")
    first, second = shifted()
    engine.generate([Request("donor", Prompt(first), FIVE)])
    exact = engine.generate([Request("exact", Prompt(second), quality="exact", cache_salt="1")])[0].receipt
    assert (exact.outcome, exact.mode, exact.lookup_ms) == (Outcome.COLD_FALLBACK, "exact", None)
    declined = engine.generate([Request("private", Prompt(second), opt_out=True)])[0].receipt
    assert (declined.outcome, declined.reason) == (Outcome.COLD_FALLBACK, DeclineReason.DISABLED)
    assert "private" not in {donor.donor_id for donor in engine.reuse.semblend.donors()}


def test_a_donor_of_another_tenant_is_not_used(model, sink):
    engine = make_reusing(model, sink, quality="fast")
    first, second = shifted()
    engine.generate([Request("donor", text_of(first, "a"))])
    receipt = engine.generate([Request("target", text_of(second, "b"))])[0].receipt
    assert receipt.reason is DeclineReason.NOTHING_SHARED


class BadBlender:
    """Writes rubbish into the prompt's slots, then fails or declines."""

    def __init__(self, engine: Engine, answer: Decline | Exception) -> None:
        self.donor_kv = engine.reuse._blender.donor_kv
        self._pool, self._answer = engine.pool, answer

    def prepare_in_pieces(self, sequence, plan, *, mode=None):
        yield
        slots = sequence.slots[plan.exact_tokens : plan.prompt_tokens]
        self._pool.k[:, slots] = 1e9
        self._pool.v[:, slots] = 1e9
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ZeroDivisionError("bug"), DeclineReason.ERROR),
        (Decline(DeclineReason.VALIDATION_FAILED, "canary"), DeclineReason.VALIDATION_FAILED),
    ],
)
def test_a_failing_blender_costs_time_and_never_an_answer(model, sink, answer, reason):
    engine = make_reusing(model, sink, quality="fast")
    first, second = shifted()
    engine.generate([Request("donor", Prompt(first), FIVE)])
    engine.reuse._blender = BadBlender(engine, answer)
    found = engine.generate([Request("target", Prompt(second), Sampling(max_tokens=10))])[0]
    assert found.tokens == alone(model, [second], Sampling(max_tokens=10))[0]
    assert (found.receipt.outcome, found.receipt.reason) == (Outcome.BACKEND_DECLINED_REUSE, reason)
    assert [e.fields["where"] for e in sink.events if e.kind == "error"] == ["materialize"] * isinstance(
        answer, Exception
    )
    warm = engine.generate([Request("warm", Prompt(second), quality="exact")])[0]
    assert warm.receipt.exact_tokens > 0  # it was computed in full, so it is exact
    assert warm.tokens[:10] == found.tokens
    engine.check()


def test_a_donor_whose_kv_is_gone_is_declined_and_forgotten(model, sink):
    engine = make_reusing(model, sink, quality="fast")
    first, second = shifted()
    engine.generate([Request("donor", Prompt(first), FIVE)])
    engine.reuse._blender.donor_kv.drop("donor")
    found = engine.generate([Request("target", Prompt(second), Sampling(max_tokens=5))])[0]
    assert found.receipt.reason is DeclineReason.STALE
    assert found.tokens == alone(model, [second], Sampling(max_tokens=5))[0]
    assert [donor.donor_id for donor in engine.reuse.semblend.donors()] == ["target"]


def test_blocks_before_the_first_donor_token_are_exact_and_cached(model, sink):
    engine = make_reusing(model, sink, quality="fast")
    first, second = shifted()
    engine.generate([Request("donor", Prompt(first), FIVE)])
    blocks = len(engine.radix)
    longer = [*prompts(1, seed=12)[0][:3], *([5, 6] * 20), *second]
    reused = engine.generate([Request("target", Prompt(longer))])[0].receipt
    computed = reused.spans[0].target_start + 32  # and the head of the first span
    assert len(engine.radix) == blocks + computed // 16 > blocks
    again = engine.generate([Request("exact", Prompt(longer), quality="exact")])[0]
    assert again.receipt.exact_tokens == computed // 16 * 16
    assert again.tokens == alone(model, [longer], Sampling())[0]


def test_a_request_that_fails_after_its_claim_gives_it_up(model, sink, monkeypatch):
    engine = make_reusing(model, sink, quality="fast")
    first, second = shifted()
    engine.generate([Request("donor", Prompt(first), FIVE)])
    monkeypatch.setattr(engine.reuse, "read_first_logits", lambda sequence: 1 / 0)
    assert engine.generate([Request("target", Prompt(second))])[0].finish_reason is FinishReason.ERROR
    assert engine.reuse.semblend._claims == {}
    engine.check()


def test_a_request_cancelled_before_it_ran_is_gone_at_the_next_step(model, sink):
    engine = make_reusing(model, sink, quality="fast")
    engine.submit(Request("r", Prompt(shifted()[0])))
    engine.cancel("r")
    assert [chunk.finish_reason for chunk in engine.step()] == [FinishReason.CANCELLED]
    assert not engine.has_work
    engine.check()


def test_a_capture_that_fails_leaves_no_donor_to_be_found(model, sink):
    engine = make_reusing(model, sink, quality="fast")

    class Full:
        def capture(self, *args, **named):
            raise MemoryError("host memory")

        def holds(self, donor_id, generation):
            return False

    engine.reuse._blender.donor_kv = Full()
    assert engine.generate([Prompt(shifted()[0])], FIVE)[0].finish_reason is FinishReason.LENGTH
    assert engine.reuse.semblend.donors() == ()
    assert [event.fields["where"] for event in sink.events if event.kind == "error"] == ["capture"]


# -- asyncio -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def running(inner: Engine) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(inner, Characters())
    engine.start()
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.close)


async def complete(engine: LocalEngine, request: Request) -> Completion:
    return Completion.of([chunk async for chunk in engine.stream(request)])


async def call(engine: LocalEngine, verb: Callable[[Engine], Any]) -> Any:
    return await asyncio.wrap_future(engine.call_soon(verb))


def test_many_readers_share_one_engine_and_who_leaves_frees_the_slot(model):
    asked = prompts(12, seed=9)

    async def leave_after(engine: LocalEngine, i: int, n: int) -> list[int]:
        heard: list[int] = []
        stream = engine.stream(Request(f"leaves{i}", Prompt(asked[i]), Sampling(max_tokens=900, ignore_eos=True)))
        async for chunk in stream:
            heard.extend(chunk.token_ids)
            if len(heard) == n:
                break
        await stream.aclose()
        return heard

    async def main() -> tuple[list[Completion], list[list[int]]]:
        async with running(make_engine(model, tokens=4096)) as engine:
            stay = [complete(engine, Request(f"r{i}", Prompt(p), Sampling(max_tokens=9))) for i, p in enumerate(asked)]
            leave = [leave_after(engine, i, 3) for i in range(4)]
            both = await asyncio.gather(asyncio.gather(*stay), asyncio.gather(*leave))
            while await call(engine, lambda e: e.has_work):
                await asyncio.sleep(0)
            await call(engine, Engine.check)
            assert (await call(engine, lambda e: e.load)).running == 0
            return both

    stayed, left = asyncio.run(main())
    expected = alone(model, asked, Sampling(max_tokens=9))
    assert tokens_of(stayed) == expected
    assert [tuple(heard) for heard in left] == [tokens[:3] for tokens in expected[:4]]


def test_a_cancelled_task_cancels_its_request(model):
    async def main() -> FinishReason | None:
        async with running(make_engine(model)) as engine:
            request = Request("r", Prompt([1, 2, 3]), Sampling(max_tokens=1000))
            started = asyncio.Event()

            async def read() -> None:
                async for _ in engine.stream(request):
                    started.set()

            task = asyncio.create_task(read())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while await call(engine, lambda e: e.has_work):
                await asyncio.sleep(0)
            return (await complete(engine, Request("next", Prompt([1]), Sampling(max_tokens=2)))).finish_reason

    assert asyncio.run(main()) is FinishReason.LENGTH


def test_closing_ends_every_stream_and_takes_no_more(model):
    async def main() -> Chunk:
        engine = LocalEngine(make_engine(model), Characters())
        engine.start()
        stream = engine.stream(Request("r", Prompt([1, 2, 3]), Sampling(max_tokens=1000)))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        *_, last = [chunk async for chunk in stream]
        with pytest.raises(SemBlendError, match="closed"):
            engine.stream(Request("late", Prompt([1])))
        with pytest.raises(SemBlendError, match="closed"):
            await call(engine, Engine.check)
        return last

    assert asyncio.run(main()).finish_reason is FinishReason.CANCELLED


# -- neighbours ----------------------------------------------------------------------------------------------------


class Interrupted(Failing):
    """A model that lets a neighbour come in while it computes its first long pass."""

    def __init__(self, model: DecoderModel) -> None:
        super().__init__(model, lambda rows: False)
        self.come: Callable[[], Any] | None = None
        self.passes: list[int] = []

    def forward(self, rows: Rows, pool: Any, *, stop: Any = None) -> torch.Tensor:
        self.passes.append(len(rows))
        if len(rows) > 100 and self.come is not None:
            come, self.come = self.come, None
            come()
        return self._model.forward(rows, pool, stop=stop)


def test_a_tenants_long_pass_is_given_up_for_a_neighbour_that_has_nothing_running(model):
    watched = Interrupted(model)
    engine = Engine(watched, model.new_pool(2048), config=EngineConfig(step_tokens=512))
    long, short = [n % VOCAB for n in range(400)], [3, 1, 4, 1, 5]
    sampling = Sampling(max_tokens=3)
    late: list[Any] = []
    watched.come = lambda: late.append(engine.submit(Request("late", text_of(short, "bolt"), sampling)))
    first = engine.submit(Request("long", text_of(long, "acme"), sampling))
    assert engine.step() == ()  # nothing was heard of the pass that was given up
    assert not first.chunks
    assert {chunk.request_id for chunk in engine.step()} >= {"late"}
    while engine.has_work:
        engine.step()
        engine.check()
    assert watched.passes[0] == 400  # it would have been computed in one pass
    expected = [alone(model, [tokens], sampling)[0] for tokens in (long, short)]
    assert [first.completion().tokens, late[0].completion().tokens] == expected


def test_a_tenants_own_next_request_does_not_make_it_compute_a_pass_twice(model):
    watched = Interrupted(model)
    engine = Engine(watched, model.new_pool(2048), config=EngineConfig(step_tokens=512))
    sampling = Sampling(max_tokens=2)
    watched.come = lambda: engine.submit(Request("own", text_of([3, 1, 4], "acme"), sampling))
    engine.submit(Request("long", text_of([n % VOCAB for n in range(400)], "acme"), sampling))
    assert [chunk.request_id for chunk in engine.step()] == ["long"]


@pytest.mark.parametrize("quality", ["fast", "balanced"])
def test_a_prompt_is_filled_in_pieces_while_a_neighbours_answer_gets_a_token_each_step(model, sink, quality):
    def run(step_work_ms: float, neighbour: bool) -> tuple[Completion, list[tuple[str, ...]]]:
        engine = make_reusing(model, sink, quality=quality, step_work_ms=step_work_ms)
        engine.generate([Request("donor", text_of(shifted()[0], "acme"))])
        if neighbour:
            engine.submit(Request("beside", text_of([5, 6, 7], "bolt"), Sampling(max_tokens=200, ignore_eos=True)))
            engine.step()
        target = engine.submit(Request("target", text_of(shifted()[1], "acme"), Sampling(max_tokens=4)))
        heard = []
        while not target.finished:
            heard.append(tuple(chunk.request_id for chunk in engine.step()))
            engine.check()
        assert engine.reuse.donor_kv.holders == 0
        assert len(engine.reuse.semblend._claims) == 0
        return target.completion(), heard

    whole, at_once = run(1e9, neighbour=False)
    pieces, heard = run(1e-6, neighbour=True)
    assert whole.receipt.outcome is Outcome.BACKEND_MATERIALIZED_REUSE
    assert at_once[0] == ("target",)  # alone it is filled in its first step
    assert all("beside" in step for step in heard)
    assert heard[0] == ("beside",)  # the filling goes on behind it
    assert pieces.receipt.tokens == whole.receipt.tokens
    assert pieces.tokens == whole.tokens


@pytest.mark.parametrize("ends", ["cancelled", "preempted"])
def test_a_filling_that_is_cut_off_lets_go_of_its_donors(model, sink, ends):
    engine = make_reusing(model, sink, quality="fast", step_work_ms=1e-6)
    engine.generate([Request("donor", text_of(shifted()[0], "acme"))])
    engine.submit(Request("beside", text_of([5, 6, 7], "bolt"), Sampling(max_tokens=200, ignore_eos=True)))
    engine.step()
    target = engine.submit(Request("target", text_of(shifted()[1], "acme"), Sampling(max_tokens=4)))
    engine.step()
    assert engine.reuse.donor_kv.holders == 1
    if ends == "cancelled":
        engine.cancel("target")
        engine.step()
    else:
        (sequence,) = [one for one in engine.scheduler.running if one.request_id == "target"]
        engine.scheduler._preempt(sequence)
    assert engine.reuse.donor_kv.holders == 0
    engine.check()
    while not target.finished:
        engine.step()
    if ends == "preempted":
        assert target.completion().finish_reason is FinishReason.LENGTH
        assert target.completion().receipt.outcome is Outcome.BACKEND_MATERIALIZED_REUSE
    assert len(engine.reuse.semblend._claims) == 0
