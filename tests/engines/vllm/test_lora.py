"""An engine with LoRA: we decline as a whole, and it answers as without us."""

from __future__ import annotations

import json
import os

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A random adapter on every layer's query and value projection, strong enough to change answers."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("adapter")
    with open(os.path.join(os.environ["SEMBLEND_TEST_VLLM_MODEL"], "config.json"), encoding="utf-8") as file:
        shape = json.load(file)
    width = shape["hidden_size"]
    kv_width = width // shape["num_attention_heads"] * shape["num_key_value_heads"]
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, out in (("q_proj", width), ("v_proj", kv_width)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, width, generator=generator) * 0.05
            weights[f"{at}.lora_B.weight"] = torch.randn(out, 8, generator=generator) * 0.05
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_an_engine_with_lora_declines_and_answers_as_without_us(apart, adapter):
    ours, theirs = (apart("lora", adapter=adapter, connected=connected) for connected in (True, False))
    assert "LoRA" in ours["refusal"]
    assert ours["donors"] == 0
    asked = [f"{who} {when}" for when in ("first", "second") for who in ("base", "adapter")]
    assert [ours[name]["tokens"] for name in asked] == [theirs[name]["tokens"] for name in asked]
    assert theirs["base first"]["tokens"] != theirs["adapter first"]["tokens"], "the adapter does something"
    for name in asked:
        assert ours[name]["receipt"]["reason"] == "unsupported_mode"
        assert "LoRA" in ours[name]["receipt"]["detail"]
        assert ours[name]["cached"] == theirs[name]["cached"]
