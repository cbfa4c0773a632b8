"""The semantic prefix hook on a cache that needs no SGLang, and what protects a scheduler from a provider."""

from __future__ import annotations

import sys
import threading
import time
from array import array
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from provider_behaviours import *  # noqa: F403  (the rules)
from provider_behaviours import DONOR, OTHER, Recorder

from semblend.integration.sglang.fake_radix import FakeKey, FakeMatchParams, FakeRadixCache, FakeRequest
from semblend.integration.sglang.semantic_prefix import GuardedProvider, SemanticPrefixResult, count_hit


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
        self.go = threading.Event()

    def on_prefix_miss(self, rid, token_ids):
        self.go.wait(10)
        return super().on_prefix_miss(rid, token_ids)


def test_a_late_provider_means_a_cold_prefill_and_is_left_alone_until_it_is_done():
    slow = Slow()
    guarded = GuardedProvider(slow, deadline_ms=1)
    assert guarded.on_prefix_miss("a", OTHER) is None
    started = time.perf_counter()
    for _ in range(100):
        assert guarded.on_prefix_miss("b", OTHER) is None
    assert time.perf_counter() - started < 5, "nobody waits for it a second time"
    slow.go.set()
    guarded.on_shutdown()
    assert all(call[1] == "a" for call in slow.named("miss"))


def test_a_guarded_provider_gives_what_comes_in_time():
    guarded = GuardedProvider(Recorder(SemanticPrefixResult(DONOR, source_id="d")), deadline_ms=5000)
    found = guarded.on_prefix_miss("r", OTHER)
    assert found is not None
    assert found.source_id == "d"
    guarded.on_shutdown()


def test_a_guarded_provider_refuses_an_answer_of_another_type():
    guarded = GuardedProvider(Recorder({"alternate_token_ids": DONOR}), deadline_ms=5000)  # type: ignore[arg-type]
    assert guarded.on_prefix_miss("r", OTHER) is None
    guarded.on_shutdown()


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
