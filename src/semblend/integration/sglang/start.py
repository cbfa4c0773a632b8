"""Start-up: what the engine is, whether we can work in it, and the cache that SGLang's scheduler gets."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from semblend.config import read_engine_variable
from semblend.errors import ConfigError
from semblend.integration.sglang.model_access import SglangModel, read_rope_config
from semblend.integration.sglang.refusals import refusal
from semblend.integration.sglang.semantic_prefix import SemanticPrefixProvider
from semblend.integration.sglang.settings import SglangSettings, sglang_settings
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
