"""Models with experts, and models that read images: what is reused of text in them is what they compute themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_folders import EXPERTS, PICTURES

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def assert_text_is_reused_exactly(world: Any) -> None:
    """Keys of layer 0 that moved are those that the model computes there; whatever did not move is so in all layers."""
    document = world.document(2)
    target = world.instruction(4) + document + world.question()
    cold = world.cold(target)
    world.ask(world.instruction(2) + document + world.question())
    (output,) = world.ask(target)
    receipt = world.receipt(output)
    assert receipt["outcome"] == "backend_materialized_reuse", receipt
    assert receipt["reused_tokens"] > 0.8 * len(document)
    assert 0 < receipt["canary"] < 1e-4
    (span,) = world.audited(output)["spans"]
    assert span["target_start"] != span["donor_start"]
    (k, v), (cold_k, cold_v) = world.kv_of(output)[0], world.kv_of(cold)[0]
    assert float((k - cold_k).abs().max()) < 1e-4 * float(cold_k.abs().max())
    assert float((v - cold_v).abs().max()) < 1e-4 * float(cold_v.abs().max())

    again = world.instruction(3) + world.document(3) + world.question()
    (first,) = world.ask(again)
    world.forget_prefixes()
    (second,) = world.ask(again)
    assert world.receipt(second)["reused_tokens"] > 0.7 * len(again)
    for ours, theirs in zip(world.kv_of(second), world.kv_of(first), strict=True):
        for mine, own in zip(ours, theirs, strict=True):  # poisoned before the load: experts of a batch may round apart
            assert float((mine - own).abs().max()) < 1e-4 * float(own.abs().max())
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("expert_world", sorted(EXPERTS), indirect=True)
def test_a_model_with_experts_is_served(expert_world):
    assert_text_is_reused_exactly(expert_world)


MARKS = {
    **{"[IMG]": "[IMG]", "<start_of_image>": "<start_of_image> is it"},
    "<|media_pad|>": "<|media_begin|>image<|media_pad|><|media_end|>",
    "<|image|>": "<|begin_of_image|><|image|><|end_of_image|>",
    "<|image>": "<|image>",
    **{"<|image_pad|>": "<|vision_start|><|image_pad|><|vision_end|>"},
}
"""What stands for an image in a prompt, by a token that only its model has. Gemma 3's processor loses an image with a
newline right behind it."""


def show(world: Any, before: list[int], after: list[int], seed: int) -> dict[str, Any]:
    """A prompt with an image in its text."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (56, 56, 3), dtype=np.uint8)
    known = world.tokenizer.get_added_vocab()
    marks = world.ids(next(text for token, text in MARKS.items() if token in known))
    image: Any = Image.fromarray(pixels)
    data = {"image": image}
    if "<|media_pad|>" in known:  # Kimi reads images as pieces of video
        data = {"vision_chunk": {"type": "image", "image": image, "uuid": None}}
    return {"prompt_token_ids": before + marks + after, "multi_modal_data": data}


@pytest.mark.parametrize("picture_world", sorted(PICTURES), indirect=True)
def test_a_model_that_reads_images_is_served_where_it_reads_none(picture_world, monkeypatch):
    world = picture_world
    assert_text_is_reused_exactly(world)

    # A request with an image neither reuses nor becomes a donor, not even for its own text.
    document = world.document(5)
    pictured = show(world, world.instruction(1), document + world.question(), seed=1)
    donors = len(world.half.semblend.donors())
    (alone,) = world.ask(pictured)
    (other,) = world.ask(world.instruction(2) + document + world.question())
    assert world.receipt(alone)["reason"] == "unsupported_mode"
    assert world.receipt(other)["reused_tokens"] == 0
    assert len(world.half.semblend.donors()) == donors + 1, "the one without an image"
    world.forget_prefixes()
    (again,) = world.ask(show(world, world.instruction(4), document + world.question(), seed=2))
    assert world.receipt(again)["reused_tokens"] == 0

    # In a step that reads an image, what it adds to the model is not in what we compute, and stays for the step. The
    # image comes in the second step of its prompt, in which the other one's load is done.
    seen = watch_masks(world, monkeypatch)
    late = show(world, world.instruction(1) + world.document(6, 125), world.question(), seed=1)
    assert len(late["prompt_token_ids"]) > 512
    (alone,) = world.ask(late)
    target = world.instruction(4) + document + world.question()
    world.forget_prefixes()
    (expected,) = world.ask(target)
    world.forget_prefixes()
    (ours, theirs) = world.ask(target, late)
    assert world.receipt(ours)["reused_tokens"] == world.receipt(expected)["reused_tokens"] > 0
    assert worst(world, ours, expected) < 1e-3
    assert worst(world, theirs, alone) < 1e-3
    is_prefix_lm = world.llm.llm_engine.model_config.is_mm_prefix_lm
    assert {ours for ours, mask in seen if mask} == ({False} if is_prefix_lm else set()), "never in a pass of ours"
    assert True in {ours for ours, _ in seen}
    if getattr(world.worker._model.module, "deepstack_input_embeds", None):
        monkeypatch.setattr(type(world.worker._model._inputs), "holds_images", False)  # without this they would be
        world.forget_prefixes()
        (ours, theirs) = world.ask(target, late)
        assert worst(world, ours, expected) > 1e-2
        assert worst(world, theirs, alone) > 1e-2


def watch_masks(world: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Of everything that is described to the backend: whether by us, and whether tokens of an image see each other.

    The attention of vLLM's CPU package reads no such mask; that of GPUs takes it from this description.
    """
    seen, mine = [], [builder for builder, _ in world.worker._model._get_builders()]
    kind = type(mine[0])
    build = kind.build

    def watched(self: Any, prefix: int, described: Any, **named: Any) -> Any:
        ranges = getattr(described, "mm_req_doc_ranges", None) or {}
        seen.append((any(self is one for one in mine), any(ranges.values())))
        return build(self, prefix, described, **named)

    monkeypatch.setattr(kind, "build", watched)
    return seen


def worst(world: Any, one: Any, other: Any) -> float:
    pairs = zip(world.kv_of(one), world.kv_of(other), strict=True)
    return max(float((a - b).abs().max()) for pair in pairs for a, b in zip(*pair, strict=True))
