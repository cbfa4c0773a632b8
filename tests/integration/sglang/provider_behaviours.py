"""What the semantic prefix hook must do in every cache: one test a rule, over a fixture ``seam`` for its cache.

The rules are those of the first proposal (sgl-project/sglang pull request 20806): when a provider is asked, what
becomes of its answer, and when it is told that a request is cached.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from semblend.integration.sglang.semantic_prefix import (
    GuardedProvider,
    SemanticPrefixProvider,
    SemanticPrefixResult,
    install_hooks,
)

DONOR = list(range(100, 140))
OTHER = list(range(500, 540))


class Recorder(SemanticPrefixProvider):
    """Answers as it is told to, and writes down every call."""

    def __init__(self, answer: SemanticPrefixResult | None = None, error: Exception | None = None) -> None:
        self.answer, self.error = answer, error
        self.calls: list[tuple[Any, ...]] = []

    def on_init(self) -> None:
        self.calls.append(("init",))

    def on_prefix_miss(self, rid: str, token_ids: Sequence[int]) -> SemanticPrefixResult | None:
        self.calls.append(("miss", rid, list(token_ids)))
        if self.error is not None:
            raise self.error
        return self.answer

    def on_request_cached(self, rid: str, token_ids: Sequence[int]) -> None:
        self.calls.append(("cached", rid, list(token_ids)))

    def on_shutdown(self) -> None:
        self.calls.append(("shutdown",))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]


@pytest.fixture
def cache(seam):
    """A cache with hooks, safe; the class is as before when the test is over."""
    undo = install_hooks(seam.cache_class)
    yield seam.make()
    undo()


@pytest.fixture
def verbatim(seam):
    """A cache with hooks that hands out another text's KV."""
    undo = install_hooks(seam.cache_class, unsafe_verbatim=True)
    yield seam.make()
    undo()


# -- registration ----------------------------------------------------------------------------------------------------


def test_a_new_cache_has_no_provider(cache):
    assert cache._semantic_provider is None


def test_a_registered_provider_is_initialised_once(cache):
    provider = Recorder()
    cache.set_semantic_provider(provider)
    assert cache._semantic_provider is provider
    assert provider.calls == [("init",)]


def test_none_clears_the_provider_and_shuts_it_down_once(cache):
    provider = Recorder()
    cache.set_semantic_provider(provider)
    cache.set_semantic_provider(None)
    cache.set_semantic_provider(None)
    assert cache._semantic_provider is None
    assert provider.calls == [("init",), ("shutdown",)]


def test_a_replaced_provider_is_shut_down_and_the_new_one_initialised(cache):
    first, second = Recorder(), Recorder()
    cache.set_semantic_provider(first)
    cache.set_semantic_provider(second)
    assert first.calls == [("init",), ("shutdown",)]
    assert second.calls == [("init",)]


def test_each_registration_of_one_provider_is_initialised(cache):
    provider = Recorder()
    for _ in range(2):
        cache.set_semantic_provider(provider)
    assert provider.calls == [("init",), ("shutdown",), ("init",)]


def test_two_caches_have_providers_of_their_own(cache, seam):
    other, provider = seam.make(), Recorder()
    cache.set_semantic_provider(provider)
    assert other._semantic_provider is None


# -- without a provider ----------------------------------------------------------------------------------------------


def test_without_a_provider_a_hit_is_a_hit(cache, seam):
    seam.insert(cache, DONOR)
    assert seam.match(cache, [*DONOR, 7], rid="r") == len(DONOR)


def test_without_a_provider_a_miss_is_a_miss(cache, seam):
    seam.insert(cache, DONOR)
    assert seam.match(cache, OTHER, rid="r") == 0


def test_without_a_provider_a_partial_hit_is_a_partial_hit(cache, seam):
    seam.insert(cache, DONOR)
    assert seam.match(cache, DONOR[:10] + OTHER, rid="r") == 10


# -- a miss ----------------------------------------------------------------------------------------------------------


def test_a_provider_is_asked_at_a_miss_with_the_request_and_its_tokens(cache, seam):
    provider = Recorder()
    cache.set_semantic_provider(provider)
    seam.match(cache, OTHER, rid="r-1")
    assert provider.named("miss") == [("miss", "r-1", OTHER)]


@pytest.mark.parametrize("hit", [len(DONOR), 5])
def test_a_provider_is_not_asked_after_a_hit_whole_or_partial(cache, seam, hit):
    provider = Recorder()
    cache.set_semantic_provider(provider)
    seam.insert(cache, DONOR)
    assert seam.match(cache, DONOR[:hit] + OTHER, rid="r") == hit
    assert not provider.named("miss")


def test_a_provider_is_not_asked_without_a_request(cache, seam):
    provider = Recorder()
    cache.set_semantic_provider(provider)
    assert seam.match(cache, OTHER, rid=None) == 0
    assert not provider.named("miss")


def test_none_means_a_cold_prefill(cache, seam):
    seam.insert(cache, DONOR)
    cache.set_semantic_provider(Recorder(None))
    assert seam.match(cache, OTHER, rid="r") == 0


def test_alternate_tokens_that_are_not_the_prompts_are_never_served(cache, seam):
    seam.insert(cache, DONOR)
    cache.set_semantic_provider(Recorder(SemanticPrefixResult(DONOR, num_cached_tokens=len(DONOR))))
    assert seam.match(cache, OTHER, rid="r") == 0


def test_only_the_unsafe_flag_serves_another_texts_kv(verbatim, seam):
    seam.insert(verbatim, DONOR)
    verbatim.set_semantic_provider(Recorder(SemanticPrefixResult(DONOR)))
    assert seam.match(verbatim, OTHER, rid="r") == len(DONOR)


def test_another_texts_kv_never_covers_more_than_the_prompt(verbatim, seam):
    seam.insert(verbatim, DONOR)
    verbatim.set_semantic_provider(Recorder(SemanticPrefixResult(DONOR)))
    assert seam.match(verbatim, OTHER[:7], rid="r") == 7


def test_alternate_tokens_that_are_not_cached_are_a_miss(verbatim, seam):
    verbatim.set_semantic_provider(Recorder(SemanticPrefixResult(DONOR, num_cached_tokens=40)))
    assert seam.match(verbatim, OTHER, rid="r") == 0


def test_the_extra_key_of_the_request_is_kept(verbatim, seam):
    seam.insert(verbatim, DONOR, extra_key="anna")
    verbatim.set_semantic_provider(Recorder(SemanticPrefixResult(DONOR)))
    assert seam.match(verbatim, OTHER, rid="r", extra_key="ben") == 0
    assert seam.match(verbatim, OTHER, rid="r") == 0
    assert seam.match(verbatim, OTHER, rid="r", extra_key="anna") == len(DONOR)


def test_empty_alternate_tokens_are_a_miss(verbatim, seam):
    verbatim.set_semantic_provider(Recorder(SemanticPrefixResult([])))
    assert seam.match(verbatim, OTHER, rid="r") == 0


def test_the_bare_hook_lets_a_providers_exception_through(cache, seam):
    cache.set_semantic_provider(Recorder(error=ValueError("broken")))
    with pytest.raises(ValueError, match="broken"):
        seam.match(cache, OTHER, rid="r")


def test_a_guarded_provider_never_raises_and_the_request_runs_cold(cache, seam, caplog):
    cache.set_semantic_provider(GuardedProvider(Recorder(error=ValueError("broken")), deadline_ms=5000))
    with caplog.at_level(logging.WARNING):
        assert seam.match(cache, OTHER, rid="r") == 0
    assert "broken" in caplog.text


def test_the_source_is_logged(verbatim, seam, caplog):
    seam.insert(verbatim, DONOR)
    verbatim.set_semantic_provider(Recorder(SemanticPrefixResult(DONOR, source_id="donor-17")))
    with caplog.at_level(logging.INFO, logger="sglang.semblend"):
        seam.match(verbatim, OTHER, rid="r")
    assert "donor-17" in caplog.text


def test_skip_insert_keeps_the_request_out_of_the_tree(verbatim, seam):
    seam.insert(verbatim, DONOR)
    verbatim.set_semantic_provider(Recorder(SemanticPrefixResult(DONOR, skip_insert=True)))
    request = seam.request("r", OTHER)
    seam.match(verbatim, OTHER, request=request)
    assert request.skip_radix_cache_insert


# -- the exact lookup ------------------------------------------------------------------------------------------------


def test_the_exact_lookup_never_asks_the_provider(cache, seam):
    provider = Recorder(SemanticPrefixResult(DONOR))
    cache.set_semantic_provider(provider)
    assert seam.match(cache, OTHER, rid="r", exact=True) == 0
    assert not provider.named("miss")


def test_the_exact_lookup_finds_what_match_prefix_finds(cache, seam):
    seam.insert(cache, DONOR)
    assert seam.match(cache, DONOR, rid="r", exact=True) == seam.match(cache, DONOR, rid="r") == len(DONOR)


def test_the_exact_lookup_works_without_a_provider(cache, seam):
    assert seam.match(cache, OTHER, rid=None, exact=True) == 0


# -- a request that is cached ----------------------------------------------------------------------------------------


def test_a_provider_is_told_of_a_finished_request_with_its_tokens(cache, seam):
    provider = Recorder()
    cache.set_semantic_provider(provider)
    seam.finish(cache, seam.request("r-9", DONOR))
    assert provider.named("cached") == [("cached", "r-9", DONOR)]
    assert seam.match(cache, DONOR, rid=None) == len(DONOR)


def test_a_provider_is_not_told_of_a_request_that_skips_the_tree(cache, seam):
    provider = Recorder()
    cache.set_semantic_provider(provider)
    request = seam.request("r", DONOR)
    request.skip_radix_cache_insert = True
    seam.finish(cache, request)
    assert not provider.named("cached")


def test_a_provider_is_not_told_of_a_request_that_goes_on(cache, seam):
    provider = Recorder()
    cache.set_semantic_provider(provider)
    seam.finish(cache, seam.request("r", DONOR, finished=False))
    assert not provider.named("cached")


def test_nobody_is_told_without_a_provider(cache, seam):
    seam.finish(cache, seam.request("r", DONOR))
    assert seam.match(cache, DONOR, rid=None) == len(DONOR)


def test_nobody_is_told_where_the_insert_fails(cache, seam, monkeypatch):
    provider = Recorder()
    cache.set_semantic_provider(provider)
    monkeypatch.setattr(cache, "insert", _fail)
    with pytest.raises(RuntimeError):
        seam.finish(cache, seam.request("r", DONOR))
    assert not provider.named("cached")


def _fail(*args: Any, **more: Any) -> None:
    raise RuntimeError("no room")


# -- several requests ------------------------------------------------------------------------------------------------


def test_requests_are_asked_for_one_by_one(cache, seam):
    provider = Recorder()
    cache.set_semantic_provider(provider)
    for rid in ("a", "b"):
        seam.match(cache, OTHER, rid=rid)
    assert [call[1] for call in provider.named("miss")] == ["a", "b"]


def test_after_a_replacement_the_new_provider_alone_is_asked(cache, seam):
    first, second = Recorder(), Recorder()
    cache.set_semantic_provider(first)
    cache.set_semantic_provider(second)
    seam.match(cache, OTHER, rid="r")
    assert not first.named("miss")
    assert len(second.named("miss")) == 1


def test_undo_leaves_the_class_as_it_was(seam):
    before = dict(vars(seam.cache_class))
    install_hooks(seam.cache_class)()
    assert dict(vars(seam.cache_class)) == before
