"""The semantic prefix hook on SGLang's own cache classes, and a provider in the cache that a real scheduler uses."""

from __future__ import annotations

import sys
import time
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "integration" / "sglang"))

from provider_behaviours import *  # noqa: F403  (the rules)
from provider_behaviours import Recorder

from semblend.integration.sglang.semantic_prefix import SemanticPrefixResult


class RealSeam:
    """One of SGLang's cache classes over small pools of its own."""

    def __init__(self, cache_class) -> None:
        self.cache_class = cache_class

    def make(self):
        import torch
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        kv = MHATokenToKVPool(
            size=512,
            page_size=1,
            dtype=torch.float32,
            head_num=1,
            head_dim=4,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
            enable_alt_stream=False,
        )
        return self.cache_class(
            CacheInitParams(
                disable=False,
                req_to_token_pool=ReqToTokenPool(size=8, max_context_len=128, device="cpu", enable_memory_saver=False),
                token_to_kv_pool_allocator=TokenToKVPoolAllocator(
                    512, dtype=torch.float32, device="cpu", kvcache=kv, need_sort=False
                ),
                page_size=1,
                tree_components=(ComponentType.FULL,),
            )
        )

    def request(self, rid, tokens, finished=True):
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        ids = array("q", tokens)
        return SimpleNamespace(
            rid=rid,
            extra_key=None,
            cache_salt=None,
            session=None,
            session_id=None,
            streaming=False,
            priority=0,
            kv=ReqKvInfo(),
            kv_rotation_base=None,
            skip_radix_cache_insert=False,
            origin_input_ids=ids,
            full_untruncated_fill_ids=ids,
            last_node=None,
            lock=None,
            finished=lambda: finished,
            owned_kv_len=lambda: len(ids),
        )

    def insert(self, cache, tokens, extra_key=None):
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        slots = cache.token_to_kv_pool_allocator.alloc(len(tokens))
        cache.insert(InsertParams(key=RadixKey(array("q", tokens), extra_key), value=slots))

    def match(self, cache, tokens, rid=None, extra_key=None, request=None, exact=False):
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        request = request or (self.request(rid, tokens) if rid else None)
        params = MatchPrefixParams(key=RadixKey(array("q", tokens), extra_key), req=request)
        found = cache._match_prefix_exact(params) if exact else cache.match_prefix(params)
        return int(found.device_prefix_len)

    def finish(self, cache, request):
        """What SGLang does when a request is over: its row is in the pool, and the tree takes it."""
        request.kv.req_pool_idx = 1
        slots = cache.token_to_kv_pool_allocator.alloc(request.owned_kv_len())
        cache.req_to_token_pool.write((1, slice(0, len(slots))), slots)
        cache.cache_finished_req(request)


@pytest.fixture(params=["RadixCache", "UnifiedRadixCache"])
def seam(request, engine):
    """The engine has read SGLang's configuration, which the classes ask for."""
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    return RealSeam({"RadixCache": RadixCache, "UnifiedRadixCache": UnifiedRadixCache}[request.param])


@pytest.mark.parametrize("with_provider", [True, False])
def test_a_simulated_cache_works_with_and_without_a_provider(engine, with_provider):
    from sglang.srt.mem_cache.radix_cache import RadixCache

    seam, undo = RealSeam(RadixCache), install_hooks(RadixCache)  # noqa: F405
    try:
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        cache, provider = RadixCache.create_simulated(), Recorder()
        if with_provider:
            cache.set_semantic_provider(provider)
        cache.insert(InsertParams(key=RadixKey(array("q", [1, 2, 3])), value=torch.tensor([7, 8, 9])))
        assert seam.match(cache, [1, 2, 3, 4], rid="r") == 3
        assert seam.match(cache, [5, 6], rid="r") == 0
        assert len(provider.named("miss")) == with_provider
    finally:
        undo()


@pytest.fixture
def world(engine):
    engine.flush()
    engine.events.clear()
    yield engine
    engine.cache.set_semantic_provider(None)


def forget_donors(world) -> None:
    """Donors go; the exact tree stays, as where a provider knows what we do not."""
    world.sessions.semblend.clear()


def test_equal_runs_of_a_providers_tokens_are_moved_at_any_offset_and_never_served_verbatim(world):
    document = world.document(201, 64)
    source = world.ids("An unusual opening. ") + document + world.question()
    world.ask(source)
    forget_donors(world)
    target = document + world.question("Name the third word.")
    assert world.exact_hit(target) == 0
    provider = Recorder(SemanticPrefixResult(source, source_id="them"))
    world.cache.set_semantic_provider(provider, deadline_ms=60_000)
    (answer,) = world.ask(target, quality="fast")
    receipt = world.receipt(answer)
    assert receipt.reused_tokens > 0
    assert all(target[s.target_start : s.target_end] == source[s.donor_start : s.donor_end] for s in receipt.spans)
    assert world.exact_hit(target) <= receipt.spans[0].target_start + 32 + 1  # of the look at deep layers


def test_tokens_of_a_provider_that_are_not_the_prompts_reuse_nothing(world):
    source = world.ids("An unusual opening. ") + world.document(211) + world.question()
    world.ask(source)
    forget_donors(world)
    world.cache.set_semantic_provider(Recorder(SemanticPrefixResult(source)), deadline_ms=60_000)
    target = world.document(212)
    cold = world.cold(target)
    (answer,) = world.ask(target, quality="fast")
    assert answer.tokens == cold.tokens
    assert world.receipt(answer).reused_tokens == 0


def test_a_provider_cannot_reach_the_kv_of_another_salt(world):
    document = world.document(221)
    source = world.ids("An unusual opening. ") + document
    world.ask(source, salt="anna")
    forget_donors(world)
    world.cache.set_semantic_provider(Recorder(SemanticPrefixResult(source)), deadline_ms=60_000)
    (answer,) = world.ask(document + world.question(), salt="ben", quality="fast")
    assert world.receipt(answer).reused_tokens == 0


def test_a_provider_is_asked_once_a_request_and_told_when_it_is_cached(world):
    provider = Recorder()
    world.cache.set_semantic_provider(provider, deadline_ms=60_000)
    prompt = world.document(231)
    (answer,) = world.ask(prompt)
    assert provider.named("miss") == [("miss", answer.request_id, prompt)]
    end = time.monotonic() + 60
    while not (told := provider.named("cached")) and time.monotonic() < end:
        time.sleep(0.01)  # a thread of its own tells it
    assert [call[1] for call in told] == [answer.request_id]
    assert told[0][2][: len(prompt)] == prompt


def test_skip_insert_of_a_provider_keeps_the_request_out_of_the_tree(world):
    source = world.ids("An unusual opening. ") + world.document(241)
    world.ask(source)
    world.cache.set_semantic_provider(Recorder(SemanticPrefixResult(source, skip_insert=True)), deadline_ms=60_000)
    target = world.document(242)
    world.ask(target)
    assert world.exact_hit(target) == 0


def test_a_provider_that_fails_or_is_late_costs_an_answer_nothing(world):
    class Late(Recorder):
        def on_prefix_miss(self, rid, token_ids):
            time.sleep(0.2)
            return super().on_prefix_miss(rid, token_ids)

    prompt = world.document(251)
    cold = world.cold(prompt)
    for provider, deadline_ms in ((Recorder(error=OSError("gone")), 5000), (Late(SemanticPrefixResult(prompt)), 1)):
        world.forget_prefixes()
        world.cache.set_semantic_provider(provider, deadline_ms=deadline_ms)
        (answer,) = world.ask(prompt, quality="exact")
        assert answer.tokens == cold.tokens


@pytest.mark.parametrize(
    "nonsense",
    [["a", "b"], [1.5, 2.5], [2**70], [-1] * 400, [10**9] * 400, [None], 7, None, "text", range(10**7), iter([1])],
    ids=["text", "floats", "too large", "negative", "no token", "none", "a number", "nothing", "a string", "endless",
         "a generator"],
)  # fmt: skip
def test_a_provider_that_proposes_nonsense_costs_neither_the_answer_nor_our_own_reuse(world, nonsense):
    document = world.document(261, 64)
    target = document + world.question("Name the third word.")
    cold = world.cold(target)
    world.ask(world.ids("An unusual opening. ") + document + world.question())
    world.cache.set_semantic_provider(Recorder(SemanticPrefixResult(nonsense)), deadline_ms=60_000)
    (answer,) = world.ask(target, quality="fast")
    assert answer.tokens == cold.tokens
    assert world.receipt(answer).reused_tokens > 0, "the donors that we know ourselves are used all the same"


def test_a_provider_that_answers_with_another_type_is_ignored(world):
    class Other(Recorder):
        def on_prefix_miss(self, rid, token_ids):
            super().on_prefix_miss(rid, token_ids)
            return {"alternate_token_ids": list(token_ids)}

    provider, prompt = Other(), world.document(271)
    cold = world.cold(prompt)
    world.cache.set_semantic_provider(provider, deadline_ms=60_000)
    (answer,) = world.ask(prompt)
    assert answer.tokens == cold.tokens
    assert len(provider.named("miss")) == 1


def test_a_provider_neither_sees_nor_learns_of_a_request_that_opts_out(world):
    provider = Recorder()
    world.cache.set_semantic_provider(provider, deadline_ms=60_000)
    world.ask(world.document(281), opt_out=True)
    (told,) = world.ask(world.document(282))
    end = time.monotonic() + 60
    while not provider.named("cached") and time.monotonic() < end:
        time.sleep(0.01)
    assert {call[1] for call in provider.named("miss") + provider.named("cached")} == {told.request_id}
