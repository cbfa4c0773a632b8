"""What the semantic prefix hook must do in every cache: one test a rule, over a fixture ``seam`` for its cache.

The rules are those of the first proposal (sgl-project/sglang pull request 20806): when a provider is asked, what
becomes of its answer, and when it is told that a request is cached.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from semblend.integration.sglang.semantic_prefix import (
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

    def wait(self, cache: Any) -> None:
        """Until it has heard all it was told of: one thread calls it, one call after the other."""
        cache._guarded_provider.on_prefix_miss("barrier", [])
        self.calls = [call for call in self.calls if call[:2] != ("miss", "barrier")]

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]


class Sleeper(Recorder):
    """Sleeps until it is woken."""

    def __init__(self) -> None:
        super().__init__(SemanticPrefixResult(DONOR))
        self.woken = threading.Event()

    def on_prefix_miss(self, rid: str, token_ids: Sequence[int]) -> SemanticPrefixResult | None:
        self.woken.wait(60)
        return super().on_prefix_miss(rid, token_ids)


def register(cache: Any, provider: SemanticPrefixProvider) -> None:
    """With a deadline that a busy machine does not miss."""
    cache.set_semantic_provider(provider, deadline_ms=60_000)


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
    register(cache, provider)
    assert cache._semantic_provider is provider
    assert provider.calls == [("init",)]


def test_none_clears_the_provider_and_shuts_it_down_once(cache):
    provider = Recorder()
    register(cache, provider)
    cache.set_semantic_provider(None)
    cache.set_semantic_provider(None)
    assert cache._semantic_provider is None
    assert provider.calls == [("init",), ("shutdown",)]


def test_a_replaced_provider_is_shut_down_and_the_new_one_initialised(cache):
    first, second = Recorder(), Recorder()
    register(cache, first)
    register(cache, second)
    assert first.calls == [("init",), ("shutdown",)]
    assert second.calls == [("init",)]


def test_each_registration_of_one_provider_is_initialised(cache):
    provider = Recorder()
    for _ in range(2):
        register(cache, provider)
    assert provider.calls == [("init",), ("shutdown",), ("init",)]


def test_two_caches_have_providers_of_their_own(cache, seam):
    other, provider = seam.make(), Recorder()
    register(cache, provider)
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
    register(cache, provider)
    seam.match(cache, OTHER, rid="r-1")
    assert provider.named("miss") == [("miss", "r-1", OTHER)]


@pytest.mark.parametrize("hit", [len(DONOR), 5])
def test_a_provider_is_not_asked_after_a_hit_whole_or_partial(cache, seam, hit):
    provider = Recorder()
    register(cache, provider)
    seam.insert(cache, DONOR)
    assert seam.match(cache, DONOR[:hit] + OTHER, rid="r") == hit
    assert not provider.named("miss")


def test_a_provider_is_not_asked_without_a_request(cache, seam):
    provider = Recorder()
    register(cache, provider)
    assert seam.match(cache, OTHER, rid=None) == 0
    assert not provider.named("miss")


def test_none_means_a_cold_prefill(cache, seam):
    seam.insert(cache, DONOR)
    register(cache, Recorder(None))
    assert seam.match(cache, OTHER, rid="r") == 0


def test_alternate_tokens_that_are_not_the_prompts_are_never_served(cache, seam):
    seam.insert(cache, DONOR)
    register(cache, Recorder(SemanticPrefixResult(DONOR, num_cached_tokens=len(DONOR))))
    assert seam.match(cache, OTHER, rid="r") == 0


def test_only_the_unsafe_flag_serves_another_texts_kv(verbatim, seam):
    seam.insert(verbatim, DONOR)
    register(verbatim, Recorder(SemanticPrefixResult(DONOR)))
    assert seam.match(verbatim, OTHER, rid="r") == len(DONOR)


def test_another_texts_kv_never_covers_more_than_the_prompt(verbatim, seam):
    seam.insert(verbatim, DONOR)
    register(verbatim, Recorder(SemanticPrefixResult(DONOR)))
    assert seam.match(verbatim, OTHER[:7], rid="r") == 7


def test_alternate_tokens_that_are_not_cached_are_a_miss(verbatim, seam):
    register(verbatim, Recorder(SemanticPrefixResult(DONOR, num_cached_tokens=40)))
    assert seam.match(verbatim, OTHER, rid="r") == 0


def test_the_extra_key_of_the_request_is_kept(verbatim, seam):
    seam.insert(verbatim, DONOR, extra_key="anna")
    register(verbatim, Recorder(SemanticPrefixResult(DONOR)))
    assert seam.match(verbatim, OTHER, rid="r", extra_key="ben") == 0
    assert seam.match(verbatim, OTHER, rid="r") == 0
    assert seam.match(verbatim, OTHER, rid="r", extra_key="anna") == len(DONOR)


def test_empty_alternate_tokens_are_a_miss(verbatim, seam):
    register(verbatim, Recorder(SemanticPrefixResult([])))
    assert seam.match(verbatim, OTHER, rid="r") == 0


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit("broken")])
def test_a_provider_that_raises_costs_a_cold_prefill_and_the_log_says_why(cache, seam, caplog, error):
    register(cache, Recorder(error=error))
    with caplog.at_level(logging.WARNING):
        assert seam.match(cache, OTHER, rid="r") == 0
    assert "failed for r" in caplog.text
    assert "broken" in caplog.text


def test_a_provider_that_sleeps_beyond_its_deadline_is_not_waited_for(cache, seam, caplog):
    sleeper = Sleeper()
    cache.set_semantic_provider(sleeper, deadline_ms=1)
    with caplog.at_level(logging.WARNING):
        assert seam.match(cache, OTHER, rid="r") == 0, "this thread goes on while the provider sleeps"
    assert "late for r" in caplog.text
    assert not sleeper.woken.is_set()
    sleeper.woken.set()


@pytest.mark.parametrize("lie", [5, "text", None, [1.5], [2**70], [None], [-1] * 9, [10**18]], ids=str)
@pytest.mark.parametrize("unsafe", [False, True])
def test_a_provider_that_lies_costs_a_cold_prefill(seam, lie, unsafe):
    undo = install_hooks(seam.cache_class, unsafe_verbatim=unsafe)
    try:
        cache = seam.make()
        seam.insert(cache, DONOR)
        register(cache, Recorder(SemanticPrefixResult(lie, num_cached_tokens=10**9)))
        assert seam.match(cache, OTHER, rid="r") == 0
        register(cache, Recorder({"alternate_token_ids": DONOR}))
        assert seam.match(cache, OTHER, rid="r") == 0
    finally:
        undo()


@pytest.mark.parametrize("hook", ["on_init", "on_request_cached", "on_shutdown"])
def test_no_other_hook_of_a_provider_raises_into_the_cache(cache, seam, hook, caplog):
    provider = Recorder()
    setattr(provider, hook, _fail)
    with caplog.at_level(logging.WARNING):
        register(cache, provider)
        seam.finish(cache, seam.request("r", DONOR))
        assert seam.match(cache, OTHER, rid="r") == 0
        cache.set_semantic_provider(None)
    assert f"failed in {hook}" in caplog.text


def test_on_a_stock_cache_a_safe_provider_cannot_hit(cache, seam):
    """Its tokens are cut to those that equal the prompt's beginning, and the exact lookup has just missed these."""
    seam.insert(cache, DONOR)
    for alternate in (DONOR, OTHER, OTHER[:5] + DONOR, DONOR + OTHER):
        register(cache, Recorder(SemanticPrefixResult(alternate)))
        assert seam.match(cache, OTHER, rid="r") == 0


def test_the_source_is_logged(verbatim, seam, caplog):
    seam.insert(verbatim, DONOR)
    register(verbatim, Recorder(SemanticPrefixResult(DONOR, source_id="donor-17")))
    with caplog.at_level(logging.INFO, logger="sglang.semblend"):
        seam.match(verbatim, OTHER, rid="r")
    assert "donor-17" in caplog.text


def test_skip_insert_keeps_the_request_out_of_the_tree(verbatim, seam):
    seam.insert(verbatim, DONOR)
    register(verbatim, Recorder(SemanticPrefixResult(DONOR, skip_insert=True)))
    request = seam.request("r", OTHER)
    seam.match(verbatim, OTHER, request=request)
    assert request.skip_radix_cache_insert


# -- the exact lookup ------------------------------------------------------------------------------------------------


def test_the_exact_lookup_never_asks_the_provider(cache, seam):
    provider = Recorder(SemanticPrefixResult(DONOR))
    register(cache, provider)
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
    register(cache, provider)
    seam.finish(cache, seam.request("r-9", DONOR))
    provider.wait(cache)
    assert provider.named("cached") == [("cached", "r-9", DONOR)]
    assert seam.match(cache, DONOR, rid=None) == len(DONOR)


def test_a_provider_is_not_told_of_a_request_that_skips_the_tree(cache, seam):
    provider = Recorder()
    register(cache, provider)
    request = seam.request("r", DONOR)
    request.skip_radix_cache_insert = True
    seam.finish(cache, request)
    provider.wait(cache)
    assert not provider.named("cached")


def test_a_provider_is_not_told_of_a_request_that_goes_on(cache, seam):
    provider = Recorder()
    register(cache, provider)
    seam.finish(cache, seam.request("r", DONOR, finished=False))
    provider.wait(cache)
    assert not provider.named("cached")


def test_nobody_is_told_without_a_provider(cache, seam):
    seam.finish(cache, seam.request("r", DONOR))
    assert seam.match(cache, DONOR, rid=None) == len(DONOR)


def test_nobody_is_told_where_the_insert_fails(cache, seam, monkeypatch):
    provider = Recorder()
    register(cache, provider)
    monkeypatch.setattr(cache, "insert", _fail)
    with pytest.raises(RuntimeError):
        seam.finish(cache, seam.request("r", DONOR))
    provider.wait(cache)
    assert not provider.named("cached")


def _fail(*args: Any, **more: Any) -> None:
    raise RuntimeError("no room")


# -- several requests ------------------------------------------------------------------------------------------------


def test_requests_are_asked_for_one_by_one(cache, seam):
    provider = Recorder()
    register(cache, provider)
    for rid in ("a", "b"):
        seam.match(cache, OTHER, rid=rid)
    assert [call[1] for call in provider.named("miss")] == ["a", "b"]


def test_after_a_replacement_the_new_provider_alone_is_asked(cache, seam):
    first, second = Recorder(), Recorder()
    register(cache, first)
    register(cache, second)
    seam.match(cache, OTHER, rid="r")
    assert not first.named("miss")
    assert len(second.named("miss")) == 1


def test_undo_leaves_the_class_as_it_was(seam):
    before = dict(vars(seam.cache_class))
    install_hooks(seam.cache_class)()
    assert dict(vars(seam.cache_class)) == before
