"""Both halves of the connector over a fake of TensorRT-LLM's side: what is provided, what never is, what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import fake_trtllm
import pytest
import torch
from fake_trtllm import FakeExecutor
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend.config import SemBlendConfig
from semblend.confirm.sinks import MemorySink
from semblend.engine.model.spec import ModelSpec
from semblend.errors import SemBlendError
from semblend.facade import SemBlend
from semblend.integration.trtllm import halves
from semblend.integration.trtllm.engine_support import TrtllmSettings
from semblend.integration.trtllm.halves import SchedulerHalf, WorkerHalf
from semblend.integration.trtllm.reuse_service import HAS_PREFIX, NOT_PRIVATE, NOT_SEEN
from semblend.integration.trtllm.salts import make_one_time_salt
from semblend.session import local

SHAPE = {
    "model_type": "qwen2",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
DOCUMENT = [(7 * n * n + 3 * n) % 89 + 1 for n in range(160)]
DONOR = [3, 1, 4, 1, 5, *DOCUMENT, 9, 9]
TARGET = [2, 7, 1, 8, 2, 8, 1, 8, 2, *DOCUMENT, 5, 6]


class Scheduler(SchedulerHalf, fake_trtllm.KvCacheConnectorScheduler):
    """Ours over the fake's base class."""


class Worker(WorkerHalf, fake_trtllm.KvCacheConnectorWorker):
    """Ours over the fake's base class."""


@dataclass(eq=False)
class World:
    engine: FakeExecutor
    sink: MemorySink
    worker: Any

    def serve(self, tokens, tenant: str | None = "acme", **more):
        return self.engine.serve(tokens, None if tenant is None else make_one_time_salt(tenant), **more)

    def receipts(self):
        return [event.fields["receipt"] for event in self.sink.events if event.fields.get("receipt") is not None]

    @property
    def service(self):
        return self.worker._service

    @property
    def free_staging(self) -> int:
        return self.service.parts.model.pool.free_blocks


def build_world(patch, *, model=None, own=None, damage=None, **engine) -> World:
    """An engine with both halves; ``damage`` puts another model in the place of the one that the twin is made of."""
    config, sink = SemBlendConfig(quality="fast", metrics=False), MemorySink()
    made = TrtllmSettings(config=config, staging_tokens=1024, **(own or {}))
    patch.setattr(halves, "trtllm_settings", lambda _: made)
    patch.setattr(local, "SemBlend", lambda given, sinks: SemBlend(given, sinks=[sink]))
    if damage is not None:
        patch.setattr(halves, "find_model_of_caller", damage)
    reuses = engine.get("reuses_blocks", True)
    args = SimpleNamespace(model="m", kv_cache_config=SimpleNamespace(enable_block_reuse=reuses))
    scheduler, worker = Scheduler(args), Worker(args)
    executor = FakeExecutor(scheduler, worker, ModelSpec.from_hf_config(SHAPE | (model or {})), **engine)
    return World(executor, sink, worker)


@pytest.fixture
def make_world(monkeypatch):
    return lambda **more: build_world(monkeypatch, **more)


def compute_cold(make_world, tokens, **engine):
    """What an engine answers that nobody helps."""
    return make_world(**engine).engine.serve(tokens).logits


@pytest.mark.parametrize("order", ["heads first", "tokens first"])
@pytest.mark.parametrize("chunk_tokens", [16, 1 << 30])
def test_a_document_at_another_place_is_provided_in_whole_blocks_and_the_answer_is_nearly_cold(
    make_world, order, chunk_tokens
):
    cold = compute_cold(make_world, TARGET)
    world = make_world(order=order, chunk_tokens=chunk_tokens)
    assert world.serve(DONOR).provided_tokens == 0
    answer = world.serve(TARGET)
    assert answer.provided_tokens == (len(TARGET) - 1) // 8 * 8
    _, receipt = world.receipts()
    assert receipt.reused_tokens > 100
    assert sum(receipt.tokens.values()) == len(TARGET)
    assert torch.nn.functional.kl_div(answer.logits.log_softmax(0), cold.softmax(0), reduction="sum") < 0.1


def test_an_equal_prompt_gets_its_own_kv_back_and_the_answer_is_the_cold_one(make_world):
    cold = compute_cold(make_world, DONOR)
    world = make_world()
    world.serve(DONOR)
    answer = world.serve(DONOR)
    assert answer.provided_tokens > 100
    assert torch.allclose(answer.logits, cold, atol=1e-4)


def test_nothing_approximate_is_under_a_key_of_the_reuse_tree_that_another_request_can_have(make_world):
    world = make_world()
    for tokens, tenant in ((DONOR, "acme"), (TARGET, "acme"), (DONOR, None), (TARGET, None)):
        world.serve(tokens, tenant)
    fresh = make_world()
    for (salt, tokens), block in world.engine.tree.items():
        if salt is not None and salt.startswith("semblend:"):
            continue
        fresh.engine.serve([*tokens, 1])
        there = fresh.engine.tree[None, tokens]
        assert torch.allclose(world.engine.pool[block], fresh.engine.pool[there], atol=1e-4)
    salted = {salt for salt, _ in world.engine.tree if salt is not None}
    assert len(salted) == 2, "each request has a salt of its own"


def test_a_request_whose_blocks_others_find_is_computed_and_still_becomes_a_donor(make_world):
    world = make_world()
    assert world.serve(DONOR, None).provided_tokens == 0
    assert world.serve([9, *TARGET], None).provided_tokens == 0
    assert NOT_PRIVATE in world.receipts()[-1].detail
    assert world.serve(TARGET, "").provided_tokens > 100, "no tenant is a tenant too"


def test_without_a_reuse_tree_no_salt_is_needed(make_world):
    world = make_world(reuses_blocks=False)
    world.serve(DONOR, None)
    assert world.serve(TARGET, None).provided_tokens > 100


def test_a_tenant_sees_no_donor_of_another(make_world):
    world = make_world()
    world.serve(DONOR, "acme")
    assert world.serve(TARGET, "bolt").provided_tokens == 0
    assert world.serve(TARGET, "acme").provided_tokens > 100


def test_a_salt_that_was_used_before_gets_the_engines_own_hit_and_nothing_of_ours(make_world):
    world = make_world()
    salt = make_one_time_salt("acme")
    world.engine.serve(DONOR, salt)
    answer = world.engine.serve(DONOR, salt)
    assert (answer.hit_tokens > 0, answer.provided_tokens) == (True, 0)
    assert HAS_PREFIX in world.receipts()[-1].detail


def make_other_weights():
    return fake_trtllm.name_as_tensorrt_llm(fake_trtllm.DecoderModel.random(ModelSpec.from_hf_config(SHAPE), seed=4))


def test_a_twin_that_computes_something_else_is_found_out_before_anything_is_offered(make_world):
    world = make_world(damage=make_other_weights)
    for _ in range(3):
        assert world.serve(DONOR).provided_tokens == 0
    assert world.serve(TARGET).provided_tokens == 0
    assert NOT_SEEN in world.receipts()[-1].detail
    assert not world.service.sessions.semblend.donors()


def test_weights_that_change_take_the_donors_with_them(make_world):
    world = make_world()
    world.serve(DONOR)
    with torch.no_grad():
        for parameter in world.engine.model_engine.model.parameters():
            parameter.mul_(1.01)
    cold = make_world()
    with torch.no_grad():
        for parameter in cold.engine.model_engine.model.parameters():
            parameter.mul_(1.01)
    answer = world.serve(TARGET)
    assert answer.provided_tokens == 0
    assert torch.allclose(answer.logits, cold.engine.serve(TARGET).logits, atol=1e-4)


def test_a_cancelled_request_gives_its_slots_back_and_leaves_no_donor(make_world):
    world = make_world()
    world.serve(DONOR)
    free, donors = world.free_staging, len(world.service.sessions.semblend.donors())
    assert world.serve(TARGET, answers=False).provided_tokens > 100
    assert (world.free_staging, len(world.service.sessions.semblend.donors())) == (free, donors)
    assert world.serve(TARGET).provided_tokens > 100


def test_a_prompt_longer_than_the_staged_slots_is_computed(make_world):
    world = make_world(own={"donor_min_new_tokens": 1}, blocks=512)
    long = [n % 89 + 1 for n in range(1500)]
    assert world.serve(long).provided_tokens == 0
    assert world.serve([5, *long]).provided_tokens == 0
    assert not world.service.sessions.semblend.donors()


def test_what_was_prepared_and_is_gone_fails_the_step_and_never_answers(make_world, monkeypatch):
    world = make_world()
    world.serve(DONOR)
    monkeypatch.setattr(type(world.service.sessions), "find_tail", lambda self, name: None)
    with pytest.raises(SemBlendError, match="promised"):
        world.serve(TARGET)


@pytest.mark.parametrize("name", ["lookup", "claim"])
def test_a_failure_of_ours_costs_the_reuse_and_not_the_answer(make_world, monkeypatch, name):
    cold = compute_cold(make_world, TARGET)
    world = make_world()
    world.serve(DONOR)
    semblend = world.service.sessions.semblend

    def fail(*args, **more):
        raise RuntimeError("broken")

    monkeypatch.setattr(semblend, name, fail)
    answer = world.serve(TARGET)
    assert answer.provided_tokens == 0
    assert torch.allclose(answer.logits, cold, atol=1e-4)
    assert [event for event in world.sink.events if event.kind == "error"]


def test_an_engine_that_cannot_be_served_starts_and_runs_as_without_us(make_world, caplog):
    world = make_world(model={"model_type": "qwen3", "head_dim": 16}, damage=lambda: torch.nn.Linear(2, 2))
    assert "reuses nothing in this engine" in caplog.text
    assert world.serve(DONOR).provided_tokens == world.serve(TARGET).provided_tokens == 0


@pytest.mark.parametrize("model", [{"model_type": "llama"}, {"model_type": "qwen3", "head_dim": 16}])
def test_the_twin_reads_every_family_that_our_model_computes(make_world, model):
    world = make_world(model=model)
    world.serve(DONOR)
    assert world.serve(TARGET).provided_tokens > 100


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_staging_never_leaks_and_tokens_always_add_up(data):
    with pytest.MonkeyPatch.context() as patch:
        world = build_world(patch, blocks=256)
        free = world.free_staging
        for _ in range(data.draw(st.integers(2, 6))):
            start = data.draw(st.integers(0, 60))
            head = data.draw(st.lists(st.integers(1, 90), max_size=12))
            tenant = data.draw(st.sampled_from(["acme", "bolt", None]))
            world.serve([*head, *DOCUMENT[start:], 1, 2], tenant, answers=data.draw(st.booleans()))
            assert world.free_staging == free
        for receipt in world.receipts():
            assert sum(receipt.tokens.values()) == receipt.prompt_tokens
