"""A few rows on a CPU go through compiled kernels: they compute what the torch pass computes, in any company."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from semblend.engine.model import model as model_module  # noqa: E402
from semblend.engine.model.attention import RowBatch  # noqa: E402
from semblend.engine.model.model import (  # noqa: E402
    MAX_SMALL_ROWS,
    DecoderModel,
    SmallBatch,
)
from semblend.engine.model.paged_kv import KvPool  # noqa: E402
from semblend.engine.model.spec import ModelSpec  # noqa: E402
from semblend.materialize.contract import Rows  # noqa: E402

TOLERANCE = 2e-4


CONFIG = {
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 70,
    "vocab_size": 101,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
FIRST_PASS = f"""
import torch
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.spec import ModelSpec

torch.set_num_threads(1)
decoder = DecoderModel.random(ModelSpec.from_hf_config({CONFIG!r}))
decoder.logits(torch.zeros(1, decoder.spec.hidden))
print(torch.get_num_threads())
"""


def spec_of(architecture: str, **changes: Any) -> ModelSpec:
    return ModelSpec.from_hf_config({**CONFIG, "model_type": architecture, **changes})


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def decoder(request: pytest.FixtureRequest) -> DecoderModel:
    return DecoderModel.random(spec_of(request.param), seed=3)


def filled_pool(decoder: DecoderModel, tokens: int = 2048) -> KvPool:
    torch.manual_seed(0)
    pool = decoder.new_pool(tokens)
    pool.k.normal_()
    pool.v.normal_()
    return pool


def rows_at(pool: KvPool, positions: list[int], seed: int = 0) -> Rows:
    length = max(positions) + 1
    blocks = pool.allocate(pool.blocks_for(length))[::-1]
    tokens = [(7 * at + seed) % 101 for at in positions]
    return Rows.of(tokens, positions, pool.slots_of(blocks, 0, length))


def run_both(decoder: DecoderModel, pool: KvPool, parts: list[Rows], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Logits and the pool's KV, by the kernels and by torch."""
    found = []
    k, v = pool.k.clone(), pool.v.clone()
    for most in (MAX_SMALL_ROWS, 0):
        monkeypatch.setattr(model_module, "MAX_SMALL_ROWS", most)
        pool.k.copy_(k)
        pool.v.copy_(v)
        logits = decoder.logits(decoder.forward(RowBatch.of(parts), pool))
        found.append((logits, pool.k.clone(), pool.v.clone()))
    return found


@pytest.mark.parametrize(
    "positions",
    [[[0]], [[300]], [[63], [64], [65]], [[5, 6, 7]], [[2, 9, 130]], [[1], [200, 201], [0], [511]]],
    ids=str,
)
def test_the_kernels_compute_what_torch_computes(
    decoder: DecoderModel, positions: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = filled_pool(decoder)
    parts = [rows_at(pool, one, seed=at) for at, one in enumerate(positions)]
    for ours, torchs in zip(*run_both(decoder, pool, parts, monkeypatch), strict=True):
        assert (ours - torchs).abs().max() <= TOLERANCE


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=MAX_SMALL_ROWS), st.sampled_from([1, 2]))
def test_a_row_is_the_same_to_the_bit_in_any_company_and_with_any_threads(positions: list[int], threads: int) -> None:
    decoder = DecoderModel.random(spec_of("qwen3"), seed=3)
    pool = filled_pool(decoder, tokens=MAX_SMALL_ROWS * 216)
    parts = [rows_at(pool, [position], seed=at) for at, position in enumerate(positions)]
    before = torch.get_num_threads()
    try:
        together = decoder.logits(decoder.forward(RowBatch.of(parts), pool))
        torch.set_num_threads(threads)
        for at, part in enumerate(parts):
            alone = decoder.logits(decoder.forward(part, pool))
            assert torch.equal(alone[0], together[at])
    finally:
        torch.set_num_threads(before)


def test_the_first_pass_of_a_process_leaves_torch_the_threads_that_it_was_given() -> None:
    env = os.environ | {"NUMBA_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", FIRST_PASS], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]


def test_nan_and_infinity_reach_the_logits_of_their_own_row_alone() -> None:
    decoder = DecoderModel.random(spec_of("llama"), seed=3)
    pool = filled_pool(decoder)
    parts = [rows_at(pool, [at + 3], seed=at) for at in range(3)]
    fine = decoder.logits(decoder.forward(RowBatch.of(parts), pool))
    pool.v[0, parts[1].context[0]] = float("nan")
    pool.k[1, parts[2].context[0]] = float("inf")
    harmed = decoder.logits(decoder.forward(RowBatch.of(parts), pool))
    assert torch.equal(harmed[0], fine[0])
    assert not torch.isfinite(harmed[1]).any()
    assert not torch.isfinite(harmed[2]).any()


@pytest.mark.parametrize("reason", ["dtype", "rope", "numba"])
def test_what_the_kernels_cannot_do_is_left_to_torch(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if reason == "dtype" else torch.float32
    decoder = DecoderModel.random(spec_of("llama"), seed=3, dtype=dtype)
    spec = decoder.spec
    if reason == "rope":
        spec = replace(spec, rope=replace(spec.rope, style="interleaved"))
    if reason == "numba":
        import sys

        monkeypatch.setitem(sys.modules, "semblend.engine.model.kernels", None)
    assert SmallBatch.of(spec, decoder.weights) is None


def test_more_rows_than_the_kernels_take_go_through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = DecoderModel.random(spec_of("llama"), seed=3)
    monkeypatch.setattr(decoder._small_batch, "forward", None)  # to call it would fail
    pool = filled_pool(decoder)
    hidden = decoder.forward(rows_at(pool, list(range(MAX_SMALL_ROWS + 1))), pool)
    assert np.isfinite(decoder.logits(hidden).numpy()).all()


def test_warming_up_leaves_nothing_to_compile() -> None:
    decoder = DecoderModel.random(spec_of("llama"), seed=3)
    decoder.warm_up()
    from semblend.engine.model import kernels

    compiled = len(kernels.project.signatures), len(kernels.attend.signatures)
    decoder.logits(decoder.forward(rows_at(pool := filled_pool(decoder), [5]), pool))
    assert (len(kernels.project.signatures), len(kernels.attend.signatures)) == compiled


@pytest.mark.parametrize("broken", ["attend", "project"])
def test_kernels_that_fail_cost_time_and_no_answer(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, twin = (DecoderModel.random(spec_of("llama"), seed=3) for _ in range(2))
    twin._small_batch = None
    pool, other = filled_pool(decoder), filled_pool(twin)

    def fail(*_: object) -> None:
        raise RuntimeError("no threads")

    monkeypatch.setattr(f"semblend.engine.model.kernels.{broken}", fail)
    found = decoder.logits(decoder.forward(rows_at(pool, [5]), pool))
    assert torch.equal(found, twin.logits(twin.forward(rows_at(other, [5]), other)))
    assert torch.equal(pool.k, other.k)
