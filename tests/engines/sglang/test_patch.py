"""`patch_radix_cache` on a real SGLang: our cache without a flag, once, and gone after undo."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace

import pytest

from semblend.config import read_engine_variable
from semblend.errors import SemBlendError
from semblend.integration.sglang.radix_patcher import patch_radix_cache


@pytest.fixture
def registry(engine):
    from sglang.srt.mem_cache import registry

    return registry


def make_context(engine):
    """What SGLang's scheduler has handed to the factory of this engine's cache."""
    scheduler = engine.scheduler
    return SimpleNamespace(
        server_args=scheduler.server_args,
        tp_worker=scheduler.tp_worker,
        model_config=scheduler.model_config,
        is_hybrid_swa=False,
        is_hybrid_ssm=False,
        is_dsa=False,
        enable_hierarchical_cache=False,
        disable_radix_cache=False,
    )


def test_a_patch_is_applied_once_tells_children_and_is_taken_back(registry):
    from sglang.srt.mem_cache.radix_cache import RadixCache

    stock = registry.default_radix_cache_factory
    patch = patch_radix_cache()
    try:
        patched = registry.default_radix_cache_factory
        assert patched is not stock
        assert patch_radix_cache() is patch
        assert registry.default_radix_cache_factory is patched
        assert read_engine_variable("sglang") == {"patch": True}
        assert hasattr(RadixCache, "set_semantic_provider")
    finally:
        patch.undo()
    assert registry.default_radix_cache_factory is stock
    assert read_engine_variable("sglang") == {}
    assert not hasattr(RadixCache, "set_semantic_provider")
    assert not patch.is_applied


def test_a_scheduler_process_that_is_started_after_a_patch_patches_itself(registry, monkeypatch):
    """SGLang calls our plug-in in each process that it starts; the parent's variable is there."""
    from semblend.integration.sglang.plugin import register

    stock = registry.default_radix_cache_factory
    monkeypatch.setenv("SEMBLEND_SGLANG", '{"patch": true}')
    register()
    try:
        assert registry.default_radix_cache_factory is not stock
    finally:
        patch_radix_cache().undo()


def test_an_engine_that_cannot_be_served_gets_sglangs_own_cache(registry, engine, monkeypatch):
    asked = []
    monkeypatch.setattr(registry, "default_radix_cache_factory", asked.append)
    patch = patch_radix_cache()
    try:
        context = make_context(engine)
        context.is_hybrid_ssm = True
        registry.default_radix_cache_factory(context)
    finally:
        patch.undo()
    assert asked == [context]


def test_an_unknown_version_is_not_patched(registry, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.99")
    with pytest.raises(SemBlendError) as stopped:
        patch_radix_cache()
    assert "0.5.23" in str(stopped.value.hint)


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("tp_size", 2, "ranks"),
        ("pp_size", 2, "pipeline"),
        ("dp_size", 2, "data parallel"),
        ("attn_cp_size", 2, "context parallel"),
        ("speculative_algorithm", "EAGLE", "draft"),
        ("enable_lora", True, "adapters"),
        ("lora_paths", ["a=b"], "adapters"),
        ("disaggregation_mode", "prefill", "other engines"),
    ],
)
def test_what_we_cannot_serve_is_refused_with_a_reason(engine, flag, value, says, monkeypatch):
    from semblend.integration.sglang import start

    context = make_context(engine)
    assert start.refusal(context, "0.5.23") is None
    resolved = start.read_flags(context.server_args)

    class Changed:
        def __getattr__(self, name):
            return value if name == flag else getattr(resolved, name)

    monkeypatch.setattr(start, "read_flags", lambda server_args: Changed())
    assert says in (start.refusal(context, "0.5.23") or "")
