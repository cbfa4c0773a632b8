"""Start-up: what the engine is, whether we can work in it, and the cache that SGLang's scheduler gets."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from semblend.config import read_engine_variable
from semblend.errors import ConfigError
from semblend.integration.sglang.model_access import SglangModel, read_rope_config
from semblend.integration.sglang.semantic_prefix import SemanticPrefixProvider
from semblend.integration.sglang.settings import SglangSettings, sglang_settings
from semblend.integration.versions import SGLANG
from semblend.materialize.kv.layout import DTYPES
from semblend.materialize.kv.rope import refusal as rope_refusal
from semblend.prompt import Namespace
from semblend.session.local import LocalSessions, SlotPool, open_sessions

NOT_SETTINGS = ("patch", "provider")
"""What else stands in the variable of the SGLang integration."""

log = logging.getLogger("sglang.semblend")


def make_cache(context: Any) -> Any:
    """The radix cache of an engine: SGLang's own, and ours behind it where this engine can be served."""
    import sglang
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    from semblend.integration.sglang.radix_backend import SemBlendRadixCache

    settings, why = _read_settings(context, sglang.__version__)
    valued = settings is not None and _prepare_tree(context, settings)
    cache = create_unified_radix_cache(context, cache_class=SemBlendRadixCache)
    if settings is not None:
        try:
            cache.open_sessions(
                lambda pool: make_sessions(context, settings, pool, sglang.__version__), build_engine(context)
            )
            if valued:
                cache.value_leaves(settings.config.eviction)
            if path := read_engine_variable("sglang").get("provider"):
                cache.set_semantic_provider(make_provider(str(path)), deadline_ms=settings.provider_deadline_ms)
        except Exception as error:  # an engine that we cannot serve must start
            log.warning("SemBlend could not be started", exc_info=True)
            why = f"{type(error).__name__}: {error}"
    if why is not None or settings is None:
        log.warning("SemBlend reuses nothing in this engine: %s", why)
    else:
        log.info("SemBlend serves this engine: SGLang %s, quality %s", sglang.__version__, settings.config.quality)
    return cache


def _read_settings(context: Any, version: str) -> tuple[SglangSettings | None, str | None]:
    """The settings of an engine that can be served, or why it cannot."""
    try:
        why = refusal(context, version)
        own = {name: value for name, value in read_engine_variable("sglang").items() if name not in NOT_SETTINGS}
        return (sglang_settings(own), None) if why is None else (None, why)
    except Exception as error:  # an engine that we cannot serve must start
        log.warning("SemBlend could not be started", exc_info=True)
        return None, f"{type(error).__name__}: {error}"


def _prepare_tree(context: Any, settings: SglangSettings) -> bool:
    """Make SGLang's tree one that asks our eviction policy, where the settings name one; whether it does."""
    from semblend.integration.sglang.radix_backend import prepare_tree

    name, own = settings.config.eviction, str(context.params.eviction_policy).lower()
    if name == "lru":
        return False
    if own != "lru":
        log.warning("SGLang evicts by --radix-eviction-policy %s; SEMBLEND_EVICTION=%s is for donors only", own, name)
        return False
    prepare_tree(context.params)
    return True


def make_sessions(context: Any, settings: SglangSettings, pool: SlotPool, version: str) -> LocalSessions:
    """The sessions of an engine that can be served."""
    model = SglangModel(context.tp_worker.model_runner)
    return open_sessions(
        model,
        pool,
        settings,
        engine="sglang",
        engine_version=version,
        model_name=str(context.server_args.model_path),
        module=model.module,
        engine_log=log,
        chunk_tokens=max(int(context.server_args.chunked_prefill_size or 0), 512),
        piece_ms=settings.step_work_ms / 2,
    )


def make_provider(path: str) -> SemanticPrefixProvider:
    """The provider that ``package.module:Name`` stands for: a class or a function without arguments."""
    module, colon, name = path.partition(":")
    if not colon:
        raise ConfigError(f"{path!r} names no provider", hint="write package.module:Name")
    provider = getattr(importlib.import_module(module), name)()
    if not isinstance(provider, SemanticPrefixProvider):
        raise ConfigError(f"{path} makes a {type(provider).__name__}", hint="it must be a SemanticPrefixProvider")
    return provider


def build_engine(context: Any) -> Namespace:
    """What every request of this engine has in common."""
    args, model = context.server_args, context.model_config
    return Namespace(
        model=str(args.model_path),
        revision=str(args.revision or ""),
        tokenizer=str(args.tokenizer_path or ""),
        kv_dtype=f"{model.dtype}/{args.kv_cache_dtype}",
        rope=str(read_rope_config(model).get("rope_parameters") or ""),
    )


# -- Why an engine is not served, in one line for its log. Such an engine runs exactly as without us.


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
