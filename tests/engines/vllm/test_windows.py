"""Models that mix sliding windows and full attention, in engines without vLLM's hybrid KV manager: served like others.

Their layers differ in more than the window: in Gemma 3 they rotate by other frequencies, in EXAONE 4 full layers do not
rotate, Gemma 2 caps its scores, gpt-oss has sinks and experts. Each is held against transformers, and against the rules
of the contract, with prompts of several windows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import small_folders
import torch
from vllm_world import MODEL, make_world, serve

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))

import behaviours
from behaviours import *  # noqa: F403  (the rules of the contract)

from semblend.materialize.contract import Rows, slots_of_blocks
from semblend.materialize.kv.moves import DonorTensors, Move
from semblend.materialize.kv.splice import copy_layers, splice

pytestmark = pytest.mark.filterwarnings("ignore")
APART = "sinks, layers told apart"
UNLIKE = ["parts of heads", "sizes of heads"]
KINDS = ["sinks", "hybrid", "soft cap", "no rope", *UNLIKE, APART]
WINDOW = 64


@pytest.fixture(scope="module", params=KINDS)
def windowed_engine(request, small_model, tmp_path_factory):
    from vllm.distributed import parallel_state

    folder = small_folders.write(request.param.split(",")[0], tmp_path_factory.mktemp("windows") / "model", MODEL)
    if parallel_state._TP is not None and parallel_state._EP is None:
        # vLLM makes the group of experts with the first engine of a process, and only where that has experts.
        parallel_state._EP = parallel_state._TP
    with pytest.MonkeyPatch.context() as patched:
        if request.param == APART:  # vLLM 0.26 on a GPU: it does not merge what layers with and without a window keep
            patched.setattr("vllm.v1.core.kv_cache_utils.is_kv_cache_spec_uniform", lambda specs: False)
        made = make_world(str(folder), {"disable_hybrid_kv_cache_manager": True}, **small_model[1])
    assert len(made.worker._model._kinds) == 1 + (request.param in (APART, *UNLIKE))
    made.folder = folder
    yield made
    made.core.shutdown()


@pytest.fixture
def windowed(windowed_engine):
    yield from serve(windowed_engine)


@pytest.fixture
def world(windowed_engine):
    """For the contract: nobody asks vLLM anything meanwhile."""
    windowed_engine.start()
    model = windowed_engine.worker._model
    windowed_engine.worker.load, windowed_engine.worker.capture = (
        windowed_engine._real[name] for name in ("load", "capture")
    )
    yield behaviours.World(model, model.block_tokens, vocabulary=40_000, tolerance=5e-3)
    windowed_engine.half.reset()
    windowed_engine.forget_prefixes()


def load_theirs(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def test_keys_moved_in_the_engine_are_those_of_transformers_in_every_layer(windowed):
    model, count, shift = windowed.worker._model, 3 * WINDOW + 8, 700
    assert model.capabilities.windowed == {0, 2}
    tokens = torch.randint(100, 40_000, (1, count), generator=torch.Generator().manual_seed(1))
    here, there = (slots_of_blocks(range(first, first + 7), 32, count) for first in (1, 11))
    model.forward(Rows.of(tokens[0], range(count), here))
    layout = model.layout
    donor = copy_layers(layout, range(4), here)
    splice([Move(DonorTensors(*donor), 0, count, there, shift)], layout, model.rope)
    theirs = load_theirs(windowed.folder)
    for start, slots in ((0, here), (shift, there)):
        with torch.inference_mode():
            made = theirs(tokens, position_ids=torch.arange(start, start + count)[None], use_cache=True).past_key_values
        for layer, cached in enumerate(made.layers):
            kept = cached.keys.shape[2]  # behind a window transformers keeps no more than that
            for ours, other in zip(layout.gather(layer, slots), (cached.keys, cached.values), strict=True):
                want = other[0].transpose(0, 1)
                error = (ours[-kept:] - want).abs().max() / want.abs().max()
                assert error < 2e-3, f"layer {layer} from {start} is off by {error:.1e}"


def test_a_prompt_of_several_windows_reuses_a_document_and_leaves_the_exact_cache_as_it_was(windowed):
    document = windowed.document(1, 90)
    donor = windowed.instruction(1) + document + windowed.question()
    target = windowed.instruction(6) + document + windowed.question()
    cold = windowed.cold(target).outputs[0].token_ids
    windowed.ask(donor)
    (reused,) = windowed.ask(target)
    receipt = windowed.receipt(reused)
    assert receipt["outcome"] == "backend_materialized_reuse"
    assert receipt["reused_tokens"] > 4 * WINDOW
    assert receipt["canary"] < 1e-3
    (again,) = windowed.ask(target, opt_out=True)
    assert again.outputs[0].token_ids == cold, "vLLM's own cache holds nothing of what was reused"
    (exact,) = windowed.ask(target, opt_out=True)
    assert exact.num_cached_tokens == (len(target) - 1) // 32 * 32, "its own prefixes it finds as with full attention"
    assert exact.outputs[0].token_ids == cold


def test_what_is_computed_among_donor_kv_is_what_a_plain_pass_computes(windowed):
    """The rows behind a document that was moved see no further than their window, at their true positions."""
    document = windowed.document(2, 90)
    windowed.ask(windowed.instruction(1) + document + windowed.question())
    target = windowed.instruction(6) + document + windowed.question("Which words come twice, and which of them last?")
    (reused,) = windowed.ask(target)
    assert windowed.receipt(reused)["reused_tokens"] > 4 * WINDOW
    kept, model, count = windowed.kv_of(reused), windowed.worker._model, len(target)
    slots = slots_of_blocks(range(1, 1 + -(-count // 32)), 32, count)
    for layer, (k, v) in enumerate(kept):
        model.layout.scatter(layer, slots, k[:count], v[:count])
    at = list(range(count - 8, count))
    model.forward(Rows.of([target[p] for p in at], at, slots))
    for layer, before in enumerate(kept):
        for now, was in zip(model.layout.gather(layer, slots), before, strict=True):
            torch.testing.assert_close(now[-8:], was[count - 8 : count], rtol=5e-3, atol=5e-3)
