"""A pass of ours computes what the user's model computes, for every served type, and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from tiny_models import draw, make_model

from semblend.errors import InputError, SemBlendError
from semblend.integration.transformers.model_access import TransformersModel
from semblend.integration.transformers.refusals import SERVED_TYPES
from semblend.integration.transformers.reuse import TransformersReuse
from semblend.materialize.contract import Observer, Rows
from semblend.materialize.kv.moves import DonorTensors, Move
from semblend.materialize.kv.splice import splice, splice_plain


@pytest.mark.parametrize("kind", SERVED_TYPES)
def test_a_pass_of_ours_is_the_models_own(kind):
    assert TransformersModel(make_model(kind)).measure_disagreement() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_served(dtype):
    TransformersReuse(make_model("qwen2").to(dtype)).close()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_moved_keys_are_the_ones_that_the_model_computes_at_the_new_place(kind):
    """Layer 0 depends on token and position alone: what splice moves must be what transformers rotates there."""
    model = TransformersModel(make_model(kind))
    tokens, shift = torch.tensor(draw(40, seed=1)), 100
    here, there = torch.arange(40), torch.arange(40) + shift
    model.lay_out(model.make_layout(200))
    model.forward(Rows.of(tokens, here, torch.arange(200)))
    donor = DonorTensors(
        *(torch.stack(part) for part in zip(*(model.layout.gather(n, here) for n in range(3)), strict=True))
    )
    assert donor.tokens == 40
    for carry in (splice, splice_plain):
        moved = model.make_layout(200)
        carry([Move(donor, 0, 40, there, shift)], moved, model.rope)
        model.lay_out(model.make_layout(200))
        model.forward(Rows.of(tokens, there, torch.arange(200)))
        torch.testing.assert_close(moved.gather(0, there), model.layout.gather(0, there), atol=1e-5, rtol=1e-4)


def test_the_models_own_attention_comes_back_also_behind_a_failure():
    class Breaks(Observer):
        def on_layer(self, *_):
            raise RuntimeError("an observer broke")

    module = make_model()
    before = module.config._attn_implementation
    model = TransformersModel(module)
    model.lay_out(model.make_layout(8))
    with pytest.raises(RuntimeError, match="broke"):
        model.forward(Rows.of([5, 6], [0, 1], torch.arange(8)), Breaks())
    assert module.config._attn_implementation == before


def test_a_call_of_the_model_in_the_middle_of_a_pass_fails_loudly():
    """It would attend without its mask: an error is better than a wrong answer."""

    class CallsBack(Observer):
        def on_layer(self, *_):
            module(torch.tensor([[5, 6, 7]]))

    module = make_model()
    model = TransformersModel(module)
    model.lay_out(model.make_layout(8))
    with pytest.raises(SemBlendError, match="was called while SemBlend prepares"):
        model.forward(Rows.of([5, 6], [0, 1], torch.arange(8)), CallsBack())


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("cohere", {}, "was never run"),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}, "learned absolute positions"),
        ("mistral", {"sliding_window": 16}, "sliding window"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(kind, changes, why):
    with pytest.raises(InputError, match=why):
        TransformersReuse(make_model(kind, **changes))


def test_a_model_that_attends_in_another_way_is_found_out(monkeypatch):
    module = make_model()
    for layer in module.model.layers:
        layer.self_attn.scaling *= 2
    assert TransformersModel(module).measure_disagreement() < 1e-4, "its own scale is told to us"
    monkeypatch.setattr(TransformersModel, "measure_disagreement", lambda self: 0.3)
    with pytest.raises(InputError, match=r"differs from the model's own by 0\.3"):
        TransformersReuse(module)
    with pytest.raises(InputError, match="not a causal language model"):
        TransformersReuse(module.model)
