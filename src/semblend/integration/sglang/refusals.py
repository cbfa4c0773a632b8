"""Why an engine is not served, in one line for its log. Such an engine runs exactly as without us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from semblend.integration.sglang.model_access import read_rope_config
from semblend.integration.versions import SGLANG
from semblend.materialize.kv.layout import DTYPES
from semblend.materialize.kv.rope import refusal as rope_refusal

MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Model classes whose ``model`` and ``lm_head`` a pass of ours may call."""


def refusal(context: Any, version: str) -> str | None:
    """Why this engine cannot be served; None when it can. ``context`` is SGLang's `TreeCacheBuildContext`."""
    row = SGLANG.find(version)
    if not row.is_known:
        return row.note
    args, runner = read_flags(context.server_args), context.tp_worker.model_runner
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _refuse_cache(context, args),
        lambda: _refuse_ranks(args),
        lambda: _refuse_features(args),
        lambda: _refuse_model(runner),
        lambda: _refuse_pool(runner.token_to_kv_pool),
        lambda: rope_refusal(read_rope_config(context.model_config)),
    )
    return next((why for check in checks if (why := check())), None)


def read_flags(server_args: Any) -> Any:
    """The flags as SGLang has resolved them: some follow from others, and those that were given do not say so."""
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def _refuse_cache(context: Any, args: Any) -> str | None:
    if context.disable_radix_cache:
        return "the radix cache is off (--disable-radix-cache)"
    if context.is_hybrid_swa or context.is_hybrid_ssm or context.is_dsa:
        return "the model does not have one kind of full attention in all layers"
    for name in ("enable_unified_cache_external_linker", "enable_lmcache", "enable_flexkv"):
        if getattr(args, name, False):
            return f"an external cache owns the loads of its requests, and would store moved KV as exact ({name})"
    if context.enable_hierarchical_cache and getattr(args, "hicache_host_memory_mode", "cache") == "buffer_only":
        return "HiCache without pages in host memory stages its loads itself (hicache_host_memory_mode buffer_only)"
    return None


def _refuse_ranks(args: Any) -> str | None:
    for name, why in (
        ("tp_size", "all ranks must admit the same requests in the same step, and our loads go by each rank's clock"),
        ("pp_size", "in a pipeline no rank has all layers, and a pass of ours needs them"),
        ("dp_size", "data parallel attention waits for every pass of all ranks"),
        ("attn_cp_size", "context parallel engines keep a prompt's KV on several ranks"),
        ("dcp_size", "context parallel engines keep a prompt's KV on several ranks"),
    ):
        if (getattr(args, name, 1) or 1) != 1:
            return f"{why} ({name})"
    return None


def _refuse_features(args: Any) -> str | None:
    for name, why in (
        ("speculative_algorithm", "a draft model has KV of its own, which donors do not hold"),
        ("enable_lora", "a pass of ours would run with the adapters of SGLang's own batch"),
        ("lora_paths", "a pass of ours would run with the adapters of SGLang's own batch"),
        ("enable_memory_saver", "memory is taken away from all that was allocated beside the KV cache"),
        ("dllm_algorithm", "a diffusion model computes its tokens in another order"),
        ("enable_two_batch_overlap", "two half batches share the state of a pass"),
    ):
        if getattr(args, name, None):
            return f"{why} ({name})"
    if getattr(args, "disaggregation_mode", "null") not in ("null", None):
        return "KV goes to or comes from other engines, which take approximate KV as exact (disaggregation_mode)"
    return None


def _refuse_model(runner: Any) -> str | None:
    model, kind = runner.model, type(runner.model).__name__
    if getattr(runner, "lora_manager", None) is not None:
        return "a pass of ours would run with the adapters of SGLang's own batch (LoRA)"
    if kind not in MODELS:
        return f"{kind} was never looked at; served are {', '.join(MODELS)}"
    if getattr(runner.model_config, "is_multimodal", False):
        return "a model for images or sound computes from embeddings, which token ids do not determine"
    logits = model.logits_processor
    if getattr(logits, "logit_scale", None) is not None or getattr(logits, "final_logit_softcapping", None):
        return "the logits are scaled or capped, which our passes do not do"
    for layer in find_attention(model):
        if getattr(layer, "sliding_window_size", -1) > -1 or layer.logit_cap or layer.is_cross_attention:
            return "the model does not have one kind of full attention in all layers"
        if layer.qk_head_dim != layer.v_head_dim or layer.k_scale is not None:
            return "keys and values differ in size or are scaled"
    return None


def find_attention(model: Any) -> list[Any]:
    """The attention modules, bottom up."""
    return [module for module in model.modules() if type(module).__name__ == "RadixAttention"]


def _refuse_pool(pool: Any) -> str | None:
    if type(pool).__name__ != "MHATokenToKVPool":
        return f"KV in a {type(pool).__name__} is not one key and one value a token and layer"
    if pool.get_key_buffer(pool.start_layer).dtype not in DTYPES:
        return f"a KV cache of type {pool.get_key_buffer(pool.start_layer).dtype} cannot be moved"
    return None
