"""The semantic prefix hook on a cache that needs no SGLang, and what protects a scheduler from a provider."""

from __future__ import annotations

import sys
import threading
from array import array
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from provider_behaviours import *  # noqa: F403  (the rules)
from provider_behaviours import DONOR, OTHER, Recorder

from semblend.integration.sglang.semantic_prefix import (
    MAX_TOKENS,
    MAX_WAITING,
    GuardedProvider,
    SemanticPrefixResult,
    count_hit,
)
from tests.fakes.fake_radix import FakeKey, FakeMatchParams, FakeRadixCache, FakeRequest


class FakeSeam:
    cache_class = FakeRadixCache

    def make(self):
        return FakeRadixCache.create_simulated()

    def request(self, rid, tokens, finished=True):
        return FakeRequest(rid, array("q", tokens), is_finished=finished)

    def insert(self, cache, tokens, extra_key=None):
        cache.insert(FakeKey(array("q", tokens), extra_key))

    def match(self, cache, tokens, rid=None, extra_key=None, request=None, exact=False):
        request = request or (self.request(rid, tokens) if rid else None)
        params = FakeMatchParams(FakeKey(array("q", tokens), extra_key), request)
        found = cache._match_prefix_exact(params) if exact else cache.match_prefix(params)
        return count_hit(found)

    def finish(self, cache, request):
        cache.cache_finished_req(request)


@pytest.fixture
def seam():
    return FakeSeam()


class Slow(Recorder):
    """Answers when it is let go."""

    def __init__(self) -> None:
        super().__init__(SemanticPrefixResult(DONOR))
        self.begun, self.go = threading.Event(), threading.Event()

    def on_prefix_miss(self, rid, token_ids):
        self.begun.set()
        self.go.wait(300)
        return super().on_prefix_miss(rid, token_ids)


def test_a_late_provider_means_a_cold_prefill_and_is_left_alone_until_it_is_done():
    slow = Slow()
    guarded = GuardedProvider(slow, deadline_ms=1)
    while not slow.begun.is_set():  # its thread may come too late to begin at all
        assert guarded.on_prefix_miss("a", OTHER) is None
    for _ in range(100):
        assert guarded.on_prefix_miss("b", OTHER) is None
    slow.go.set()
    guarded.on_shutdown()
    assert [call[1] for call in slow.named("miss")] == ["a"]


def test_a_guarded_provider_gives_what_comes_in_time():
    guarded = GuardedProvider(Recorder(SemanticPrefixResult(DONOR, source_id="d")), deadline_ms=60_000)
    found = guarded.on_prefix_miss("r", OTHER)
    assert found is not None
    assert found.source_id == "d"
    guarded.on_shutdown()


def test_a_guarded_provider_refuses_an_answer_of_another_type():
    guarded = GuardedProvider(Recorder({"alternate_token_ids": DONOR}), deadline_ms=60_000)  # type: ignore[arg-type]
    assert guarded.on_prefix_miss("r", OTHER) is None
    guarded.on_shutdown()


def never_ends():
    while True:
        yield 1


def raises():
    yield 1
    raise ValueError("half way")


NO_TOKENS = {
    "none": None,
    "one": 5,
    "text": "text",
    "half": [1.5],
    "huge": [2**70],
    "nones": [None],
    "raises": raises(),
}


@pytest.mark.parametrize("name", NO_TOKENS)
def test_a_guarded_provider_may_name_anything_as_tokens(name, caplog):
    guarded = GuardedProvider(Recorder(SemanticPrefixResult(NO_TOKENS[name])), deadline_ms=60_000)
    assert guarded.on_prefix_miss("r", OTHER) is None
    assert "failed for r" in caplog.text


def test_tokens_without_end_are_cut_in_the_providers_own_time():
    answer = SemanticPrefixResult(never_ends(), source_id="two\nlines" + "x" * 1000)
    found = GuardedProvider(Recorder(answer), deadline_ms=60_000).on_prefix_miss("r", OTHER)
    assert len(found.alternate_token_ids) == MAX_TOKENS
    assert found.source_id.startswith("two\\nlinesxx")
    assert len(found.source_id) < 300


def test_a_provider_that_leaves_the_program_leaves_only_its_own_thread(caplog):
    guarded = GuardedProvider(Recorder(error=SystemExit(3)), deadline_ms=60_000)
    guarded.on_init()
    assert guarded.on_prefix_miss("r", OTHER) is None
    assert "SystemExit" in caplog.text
    guarded.on_shutdown()
    assert guarded.on_prefix_miss("r", OTHER) is None, "its thread is gone"


@pytest.mark.parametrize("hook", ["on_init", "on_shutdown"])
def test_no_hook_of_a_guarded_provider_raises(hook):
    class Broken(Recorder):
        def on_init(self):
            raise OSError("no disk")

        on_shutdown = on_init

    getattr(GuardedProvider(Broken()), hook)()


def test_a_result_of_an_older_sglang_is_counted_by_its_slots():
    class Old:
        device_indices = (1, 2, 3)

    assert count_hit(Old()) == 3


class SlowToLearn(Recorder):
    """Takes its time with every finished request, as one would that computes an embedding."""

    def __init__(self, result=None) -> None:
        super().__init__(result)
        self.go = threading.Event()
        self.threads: set[str] = set()

    def on_prefix_miss(self, rid, token_ids):
        self.threads.add(threading.current_thread().name)
        return super().on_prefix_miss(rid, token_ids)

    def on_request_cached(self, rid, token_ids):
        self.threads.add(threading.current_thread().name)
        self.go.wait(300)
        super().on_request_cached(rid, token_ids)


def test_nobody_waits_for_a_provider_that_is_slow_to_learn():
    slow = SlowToLearn(SemanticPrefixResult(DONOR))
    guarded = GuardedProvider(slow, deadline_ms=1)
    for number in range(MAX_WAITING + 20):
        guarded.on_request_cached(f"r{number}", DONOR)
    assert not slow.named("cached"), "it is still at the first one, and this thread is not"
    assert guarded.on_prefix_miss("a", OTHER) is None, "late: the request is computed"
    slow.go.set()
    guarded.on_shutdown()
    assert len(slow.named("cached")) <= MAX_WAITING, "what waits for it has a bound"


def test_a_provider_is_called_by_one_thread_and_in_order():
    slow = SlowToLearn(SemanticPrefixResult(DONOR))
    guarded = GuardedProvider(slow, deadline_ms=60_000)
    slow.go.set()
    guarded.on_init()
    guarded.on_request_cached("r", DONOR)
    assert guarded.on_prefix_miss("a", OTHER) is not None
    guarded.on_shutdown()
    assert [call[0] for call in slow.calls] == ["init", "cached", "miss", "shutdown"]
    assert len(slow.threads) == 1


def test_a_request_that_was_late_and_never_begun_is_not_asked_for_later():
    slow = SlowToLearn(SemanticPrefixResult(DONOR))
    guarded = GuardedProvider(slow, deadline_ms=1)
    guarded.on_request_cached("r", DONOR)
    assert guarded.on_prefix_miss("a", OTHER) is None
    slow.go.set()
    guarded.on_shutdown()
    assert not slow.named("miss")


def test_a_provider_that_has_gone_is_neither_asked_nor_told_and_nothing_raises(caplog):
    provider = Recorder(SemanticPrefixResult(DONOR))
    guarded = GuardedProvider(provider, deadline_ms=60_000)
    guarded.on_shutdown()
    guarded.on_request_cached("r", DONOR)
    guarded.on_shutdown()
    assert guarded.on_prefix_miss("r", OTHER) is None
    assert provider.calls == [("shutdown",)]
    assert "cannot be told of r" in caplog.text
