"""Why a model, or one call of generate(), is not served, in one sentence. Such a call runs as without us."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from semblend.integration.versions import TRANSFORMERS
from semblend.materialize.gate.observers import find_tolerance
from semblend.materialize.kv.layout import DTYPES
from semblend.materialize.kv.rope import refusal as rope_refusal

SERVED_TYPES: tuple[str, ...] = (
    *("arcee", "ernie4_5", "gemma", "glm", "glm4", "helium", "llama", "mistral", "mixtral", "olmo", "olmo2", "olmoe"),
    *("phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "starcoder2"),
)
"""Values of ``config.model_type`` whose models were run through the contract of `semblend.materialize`."""
DEPTH_TOLERANCE = 5.0
"""Errors of rounding grow with the layers; the canary's tolerance is of the first."""


def refuse_model(model: Any, version: str) -> str | None:
    """Why no KV can be reused in this model; None when it can."""
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _refuse_version(version),
        lambda: _refuse_class(model),
        lambda: _refuse_adapters(model),
        lambda: rope_refusal(model.config.to_dict()),
        lambda: _refuse_type(model.config),
        lambda: _refuse_weights(model),
    )
    return next((why for check in checks if (why := check())), None)


def _refuse_version(version: str) -> str | None:
    return TRANSFORMERS.find(version).note if is_too_old(version) else None


def is_too_old(version: str) -> bool:
    """Whether a version is older than every one that was run.

    >>> is_too_old("4.30.0"), is_too_old("5.1.0"), is_too_old("not a version")
    (True, False, False)
    """
    oldest = TRANSFORMERS.rows[0].version
    try:
        first, this = (tuple(int(part) for part in text.split(".")[:2]) for text in (oldest, version))
    except ValueError:
        return False
    return this < first


def _refuse_class(model: Any) -> str | None:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        return f"{type(model).__name__} is not a causal language model of transformers"
    return None


def _refuse_adapters(model: Any) -> str | None:
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        return "an adapter can be switched on and off, and its KV looks like that of the model alone (PEFT)"
    return None


def _refuse_type(config: Any) -> str | None:
    if config.model_type not in SERVED_TYPES:
        return f"model type {config.model_type!r} was never run; served are {', '.join(SERVED_TYPES)}"
    scaling = config.to_dict().get("rope_parameters") or {}
    if isinstance(scaling, Mapping) and scaling.get("rope_type") == "dynamic":
        return "the rotation (dynamic) changes with the length of what was said so far"
    return None


def refuse_disagreement(error: float, dtype: torch.dtype) -> str | None:
    """Why a pass of ours is not what this model computes, by the ``error`` between them; None when it is."""
    if error <= DEPTH_TOLERANCE * find_tolerance(dtype):
        return None
    return f"a pass of ours differs from the model's own by {error:.2g}, so its attention is not the one we know"


def _refuse_weights(model: Any) -> str | None:
    places = {(one.device, one.dtype) for one in model.parameters() if one.is_floating_point()}
    if len({device for device, _ in places}) != 1 or any(device.type == "meta" for device, _ in places):
        return "the model is on several devices, or not in memory"
    if {dtype for _, dtype in places} - set(DTYPES):
        return f"weights of type {', '.join(sorted({str(dtype) for _, dtype in places}))} are not plain numbers"
    return None


def refuse_call(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, options: Options) -> str | None:
    """Why one call of generate() is not served; None when it is."""
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        return f"{list(input_ids.shape)} tokens are a batch, and a cache of ours is for one prompt"
    if attention_mask is not None and not bool(attention_mask.bool().all()):
        return "some tokens are masked, so that positions are not what they seem"
    return next(_list_odd_options(options), None)


class Options:
    """What a call of generate() asks for: its own arguments, then its generation config, then the model's."""

    def __init__(self, arguments: Mapping[str, Any], model: Any) -> None:
        self.arguments = arguments
        self._configs = (arguments.get("generation_config"), getattr(model, "generation_config", None))

    def get(self, name: str) -> Any:
        """The value of an option; None where nobody says anything."""
        if self.arguments.get(name) is not None:
            return self.arguments[name]
        found = (getattr(config, name, None) for config in self._configs)
        return next((value for value in found if value is not None), None)


def _list_odd_options(options: Options) -> Iterator[str]:
    for name in ("num_beams", "num_return_sequences"):
        if (options.get(name) or 1) != 1:
            yield f"a cache of ours is for one answer ({name})"
    for name in ("past_key_values", "inputs_embeds", "assistant_model", "prompt_lookup_num_tokens"):
        if options.arguments.get(name) is not None:
            yield f"the call brings KV, or tokens, that we do not see ({name})"
    if options.get("cache_implementation") not in (None, "dynamic"):
        yield "the call asks for another kind of cache (cache_implementation)"
    if options.get("use_cache") is False:
        yield "the call wants no cache (use_cache)"
    if (options.get("guidance_scale") or 1) != 1:
        yield "a second prompt runs through the model at every token (guidance_scale)"
