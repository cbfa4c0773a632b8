"""The engine's own weights, computed by our model in slots of our own: its twin.

TensorRT-LLM's attention is one fused operation that shows neither queries nor keys, so no observer can look on while
its model runs. Our model reads the very same parameters, so the twin takes no memory for weights. Whether it computes
what the engine computes is not believed but measured, with every prompt that becomes a donor (`reuse_service`).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from semblend.engine.model.model import DecoderModel
from semblend.engine.model.spec import ModelSpec
from semblend.engine.model.weights import LayerWeights, Weights
from semblend.errors import SemBlendError
from semblend.materialize.contract import Layout, Model, Rows
from semblend.materialize.gate.observers import find_tolerance
from semblend.materialize.kv.layout import DTYPES

NO_TWIN = "such an engine runs without reuse"
CHECKED_TOKENS = 32
"""Tokens at the beginning of a prompt that the twin computes again, through all layers."""
DEPTH_TOLERANCE = 5.0
"""Errors of rounding grow with the layers; the canary's tolerance is of the first."""


def find_model_of_caller(most: int = 8) -> torch.nn.Module:
    """The model of the executor that is calling us: TensorRT-LLM hands a connector the KV pool and no model."""
    frame = inspect.currentframe()
    for _ in range(most):
        frame = frame.f_back if frame is not None else None
        if frame is None:
            break
        engine = getattr(frame.f_locals.get("self"), "model_engine", None)
        found = getattr(engine, "model", None)
        if isinstance(found, torch.nn.Module):
            return found
    raise SemBlendError("the executor's model was not found", hint=NO_TWIN)


def make_twin(module: torch.nn.Module) -> DecoderModel:
    """Our model over the parameters of the engine's; raises where it is none that we can compute."""
    config: Any = getattr(module, "config", None)
    if config is None:
        raise SemBlendError(f"{type(module).__name__} has no configuration", hint=NO_TWIN)
    spec = ModelSpec.from_hf_config(config.to_dict())
    held = dict(module.named_parameters(remove_duplicate=False))
    width = spec.head_dim
    rows = (spec.heads + 2 * spec.kv_heads) * width

    def read(name: str, *shape: int) -> Tensor:
        found = held.get(name)
        if found is None:
            raise SemBlendError(f"{type(module).__name__} has no parameter {name}", hint=NO_TWIN)
        if tuple(found.shape) != shape or found.dtype not in DTYPES:
            what = f"{list(found.shape)} of type {found.dtype}"
            raise SemBlendError(f"{name} is {what} and not {list(shape)} of plain numbers", hint=NO_TWIN)
        return found.detach()

    def read_layer(number: int) -> LayerWeights:
        layer, norm = f"model.layers.{number}", (spec.hidden,)
        return LayerWeights(
            attention_norm=read(f"{layer}.input_layernorm.weight", *norm),
            qkv=read(f"{layer}.self_attn.qkv_proj.weight", rows, spec.hidden),
            qkv_bias=read(f"{layer}.self_attn.qkv_proj.bias", rows) if spec.qkv_bias else None,
            q_norm=read(f"{layer}.self_attn.q_norm.weight", width) if spec.qk_norm else None,
            k_norm=read(f"{layer}.self_attn.k_norm.weight", width) if spec.qk_norm else None,
            output=read(f"{layer}.self_attn.o_proj.weight", spec.hidden, spec.heads * width),
            mlp_norm=read(f"{layer}.post_attention_layernorm.weight", *norm),
            gate_up=read(f"{layer}.mlp.gate_up_proj.weight", 2 * spec.intermediate, spec.hidden),
            down=read(f"{layer}.mlp.down_proj.weight", spec.hidden, spec.intermediate),
        )

    table = read("model.embed_tokens.weight", spec.vocab, spec.hidden)
    head = table if spec.tied_embeddings else read("lm_head.weight", spec.vocab, spec.hidden)
    layers = tuple(read_layer(number) for number in range(spec.layers))
    return DecoderModel(spec, Weights(table, layers, read("model.norm.weight", spec.hidden), head))


def measure_disagreement(twin: Model, tokens: Tensor, scratch: Tensor, held: Layout, slots: Tensor) -> float:
    """How far the twin's KV of the first tokens is from what the engine holds in ``slots``, as a relative error.

    It is the largest of all layers, of keys and of values. The twin computes in ``scratch``.
    """
    count = min(CHECKED_TOKENS, len(tokens), len(scratch))
    twin.forward(Rows.of(tokens[:count], torch.arange(count), scratch))
    worst = 0.0
    for layer in range(held.layers):
        mine = twin.layout.gather(layer, scratch[:count])
        theirs = held.gather(layer, slots[:count])
        for computed, found in zip(mine, theirs, strict=True):
            size = computed.float().norm().clamp_min(1e-30)
            error = float((computed.float() - found.float()).norm() / size)
            worst = max(worst, error if error == error else float("inf"))
    return worst


def find_trusted_error(dtype: torch.dtype) -> float:
    """The largest disagreement that still is rounding.

    >>> find_trusted_error(torch.float32), find_trusted_error(torch.bfloat16)
    (0.005, 0.1)
    """
    return DEPTH_TOLERANCE * find_tolerance(dtype)
