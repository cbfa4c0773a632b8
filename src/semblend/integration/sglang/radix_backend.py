"""`SemBlendRadixCache`: SGLang's own radix cache, and donor KV behind its exact hits. An adapter over `LocalSessions`.

SGLang's scheduler asks a cache for the prefix of a request, for what of it must be loaded first, for the slots of the
prefix, and tells it when KV is complete and when a request goes. Each of these hooks calls SGLang's own and then the
sessions. A hook of ours that fails says so in the log and in an event, and answers as SGLang's own cache would.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, InitLoadBackParams, MatchPrefixParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import EvictLayer
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from torch import Tensor

from semblend.eviction.policy import make_policy
from semblend.integration.sglang.eviction_strategy import BLOCK_TOKENS, BlockChain, PolicyStrategy
from semblend.integration.sglang.requests import build_namespace, join_salts, read_request, show_receipt
from semblend.integration.sglang.semantic_prefix import (
    GuardedProvider,
    SemanticPrefixProvider,
    copy_key,
    set_semantic_provider,
)
from semblend.prompt import Namespace, Prompt
from semblend.reporting import report_policy_failure
from semblend.session.local import LocalSessions, SlotPool

log = logging.getLogger("sglang.semblend")
OWN_PAGES = "SGLang loads an exact prefix from its own pages"
Answer = TypeVar("Answer")


class ValuedFull(FullComponent):
    """SGLang's part of the tree for full attention; tells our eviction strategy what leaves the device."""

    def evict_component(self, node: Any, *args: Any, target: Any = EvictLayer.DEVICE, **more: Any) -> Any:
        strategy = self.tree_core.eviction_strategy
        if EvictLayer.DEVICE in target and isinstance(strategy, PolicyStrategy):
            strategy.forget(node)
        return super().evict_component(node, *args, target=target, **more)


def prepare_tree(params: Any) -> None:
    """Let SGLang build a tree that asks a strategy in Python: the one in Rust has its policies compiled in."""
    params.tree_core_backend = "python"
    parts = params.component_registry_override or {}
    params.component_registry_override = {**parts, ComponentType.FULL: ValuedFull}


class SemBlendRadixCache(UnifiedRadixCache):
    """Without sessions it is SGLang's own cache; `open_sessions` makes it ours."""

    _sessions: LocalSessions | None = None
    _namespace = Namespace()
    _guarded_provider: GuardedProvider | None = None
    _semantic_provider: SemanticPrefixProvider | None = None
    _last_load_is_ours = False
    _strategy: PolicyStrategy | None = None

    def value_leaves(self, name: str) -> None:
        """Let the eviction policy of this name say which leaf of the tree leaves first."""
        blocks = max(1, int(self.token_to_kv_pool_allocator.size) // BLOCK_TOKENS)
        self._strategy = PolicyStrategy(
            lambda: make_policy(name, blocks), lambda: self.tree_core.evictable_device_leaves, self._note_failure
        )
        self.tree_core.eviction_strategy = self._strategy

    def _note_failure(self, error: BaseException) -> None:
        self._guard("evict", "", lambda sessions: report_policy_failure(sessions.semblend.events, error), None)

    def open_sessions(self, make: Callable[[SlotPool], LocalSessions], namespace: Namespace) -> None:
        """Serve requests from now on."""
        pool = SlotPool(self._take_slots, self.token_to_kv_pool_allocator.free, int(self.page_size))
        self._sessions, self._namespace = make(pool), namespace

    # -- a request that waits ----------------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> Any:
        found = super().match_prefix(params)
        if self._sessions is None or params.req is None or params.req.kv.holds_kv:
            return found
        params.req.semblend_offered = 0
        return self._guard("match", params.req.rid, lambda sessions: self._offer(sessions, params, found), found)

    def set_semantic_provider(self, provider: SemanticPrefixProvider | None, *, deadline_ms: float = 5.0) -> None:
        """Ask a provider where the tree has nothing; None clears it. It can neither raise nor hold up a step."""
        set_semantic_provider(self, provider, deadline_ms=deadline_ms)

    def _match_prefix_exact(self, params: MatchPrefixParams) -> Any:
        """The lookup of SGLang's own cache; asks nobody else."""
        return super().match_prefix(params)

    def _ask_provider(self, sessions: LocalSessions, params: MatchPrefixParams) -> bool:
        """Let a provider name a donor, once a request; whether it wants nothing of the request published."""
        req = params.req
        if self._guarded_provider is None or sessions.find_source(req.rid) is not None or self.ongoing_load_back:
            return False
        answer = self._guarded_provider.on_prefix_miss(req.rid, list(req.origin_input_ids))
        if answer is None:
            return False
        log.info("semantic prefix for %s: source_id=%s", req.rid, answer.source_id)
        try:
            self._adopt(sessions, params, answer.alternate_token_ids)
        except Exception as error:  # what it says may be anything; our own search goes on
            log.warning(
                "the semantic provider's proposal for %s is of no use: %s: %s", req.rid, type(error).__name__, error
            )
        return bool(answer.skip_insert)

    def _adopt(self, sessions: LocalSessions, params: MatchPrefixParams, alternate: Sequence[int]) -> None:
        """Make a donor of other tokens, as far as the exact tree holds them: the lookup then finds equal runs."""
        longest = int(self.req_to_token_pool.req_to_token.shape[1])  # no request has more
        found = self._match_prefix_exact(MatchPrefixParams(key=copy_key(params.key, alternate[:longest])))
        length = int(found.device_prefix_len)
        if length < sessions.settings.config.min_span_tokens:
            return
        lock = self.lock(found.last_device_node)
        try:
            root = self.root_node_handle(params.req.extra_key)
            slots = self.tree_core.collect_full_device_indices(found.last_device_node, root)
            self._wait_for_step()
            namespace = build_namespace(join_salts(params.req), self._namespace)
            sessions.donors.adopt(
                Prompt(np.array(alternate[:length], dtype=np.int64), namespace=namespace), slots[:length]
            )
        finally:
            self.unlock(lock)

    def _offer(self, sessions: LocalSessions, params: MatchPrefixParams, found: Any) -> Any:
        salted = sessions.settings.require_cache_salt
        request = sessions.find_request(params.req.rid, params.req) or read_request(
            params.req, len(params.key), self._namespace, require_cache_salt=salted
        )
        params.req.semblend_opted_out = request.opt_out
        if found.host_hit_length:  # SGLang's own pages come first: they are exact
            sessions.stand_back(request, int(found.device_prefix_len + found.host_hit_length), OWN_PAGES)
            return found
        missed = not found.device_prefix_len and not request.unsupported and not request.opt_out
        private = missed and self._ask_provider(sessions, params)
        offered = sessions.offer(request, int(found.device_prefix_len))
        if private:
            sessions.keep_private(params.req.rid)
        params.req.semblend_offered = offered
        return found._replace(host_hit_length=offered) if offered > 0 else found

    def init_load_back(self, params: InitLoadBackParams) -> Any:
        """Load what was offered: (tokens, node) when it is over, None while it goes on; then SGLang asks again.

        A hit in HiCache's host memory is SGLang's own to load. A request has one or the other.
        """
        self._last_load_is_ours = self._sessions is not None and getattr(params.req, "semblend_offered", 0) > 0
        if self._last_load_is_ours:
            cold = (0, params.req.last_node)
            return self._guard("load", params.req.rid, lambda sessions: self._load(sessions, params.req), cold)
        found = super().init_load_back(params)
        if found is not None and not found[0]:  # SGLang computes what it had promised to load
            self._guard("load", params.req.rid, lambda sessions: self._note_not_loaded(sessions, params.req), None)
        return found

    def _note_not_loaded(self, sessions: LocalSessions, req: Any) -> None:
        request = sessions.find_request(req.rid, req)
        if request is not None:
            sessions.stand_back(request, int(req.prefix_len), OWN_PAGES)

    def prefetch_from_storage(
        self, request: Any, last_host_node_id: Any, new_input_tokens: Any, *more: Any,
        matched_prefix_tokens: Any = None, **named: Any,
    ) -> Any:  # fmt: skip
        """Seek pages behind what the tree holds: SGLang takes what we have offered for a part of that."""
        if matched_prefix_tokens is not None:
            sought = (new_input_tokens, matched_prefix_tokens)
            new_input_tokens, matched_prefix_tokens = self._guard(
                "prefetch",
                request.rid,
                lambda sessions: self._leave_out_offered(sessions, request.rid, *sought),
                sought,
            )
        return super().prefetch_from_storage(
            request, last_host_node_id, new_input_tokens, *more, matched_prefix_tokens=matched_prefix_tokens, **named
        )

    def _leave_out_offered(self, sessions: LocalSessions, request_id: str, new: Any, matched: Any) -> tuple[Any, Any]:
        req = sessions.find_source(request_id)
        offered = getattr(req, "semblend_offered", 0)
        if req is None or not offered:
            return new, matched
        held = len(matched) - offered
        found = matched[held:] + new, matched[:held]
        req.storage_prefetch_last_match_len = held
        return found

    def _load(self, sessions: LocalSessions, req: Any) -> Any:
        if sessions.find_source(req.rid) is not req:
            return 0, req.last_node
        if self.ongoing_load_back:  # slots of the exact prefix may be under way from HiCache's host memory
            return None
        self._wait_for_step()
        sessions.load(req.rid, lambda: self._path_slots(req))
        loaded = sessions.work(req.rid, busy=self._is_busy())
        if loaded:  # the request itself keeps it: what stands under its id may go before its row does
            req.semblend_exact_until = sessions.find_exact_until(req.rid)
        return None if loaded is None else (loaded, req.last_node)

    def load_back_is_cache_owned(self) -> bool:
        """What we load belongs to the request, never to the tree. SGLang asks after each load, for that one."""
        return False if self._last_load_is_ours else bool(super().load_back_is_cache_owned())

    def release_aborted_request(self, request: Any) -> None:
        self._guard("abort", request.rid, lambda sessions: self._forget_waiting(sessions, request.rid), None)
        super().release_aborted_request(request)

    def _forget_waiting(self, sessions: LocalSessions, request_id: str) -> None:
        """A request that waits is gone. One that has a row is another one with this id, or `on_release` follows."""
        source = sessions.find_source(request_id)
        if source is not None and not source.kv.holds_kv:
            sessions.forget(request_id)

    # -- a request that runs -----------------------------------------------------------------------------------------

    def prefix_device_indices(self, req: Any) -> Tensor:
        tail = (
            self._sessions.find_tail(req.rid) if self._sessions and self._sessions.find_source(req.rid) is req else None
        )
        if tail is None:
            slots: Tensor = super().prefix_device_indices(req)
            return slots
        return torch.cat([self._path_slots(req)[: req.prefix_len - len(tail)], tail])

    def checkpoint(self, req: Any, *, up_to: int, **more: Any) -> None:
        """Publish what is exact, and nothing behind it; nothing new where nobody can say what is exact."""
        self._guard("prompt", req.rid, lambda sessions: self._note_prompt(sessions, req, up_to), None)
        exact_until = getattr(req, "semblend_exact_until", None)
        if self._sessions is not None:
            held: int | None = int(req.kv.cache_protected_len)  # what the tree has of it already
            exact_until = self._guard("publish", req.rid, lambda sessions: self._find_exact_until(sessions, req), held)
        published = up_to if exact_until is None else min(up_to, exact_until)
        super().checkpoint(req, up_to=published, **more)
        self._guard("publish", req.rid, lambda _: self._note_published(req, published, whole=exact_until is None), None)
        if req.finished():
            self._guard("answer", req.rid, lambda sessions: self._note_answered(sessions, req, up_to), None)

    def _note_published(self, req: Any, published: int, *, whole: bool) -> None:
        self._note_use(req, published)
        told = whole and not getattr(req, "semblend_opted_out", False)
        if self._guarded_provider is not None and told and req.finished():
            self._guarded_provider.on_request_cached(req.rid, list(req.full_untruncated_fill_ids[:published]))

    def _note_use(self, req: Any, published: int) -> None:
        """Tell the eviction policy of the blocks that a request has in the tree."""
        if self._strategy is None:
            return
        chain: BlockChain | None = getattr(req, "semblend_chain", None)
        if chain is None:
            chain = req.semblend_chain = BlockChain(req.extra_key, req.cache_salt)
        chain.grow(req.full_untruncated_fill_ids[:published])
        self._strategy.note_use(chain)

    def _find_exact_until(self, sessions: LocalSessions, req: Any) -> int | None:
        """Up to where the KV of a request is exact, by the request's own mark and its session; None for all."""
        known = sessions.find_exact_until(req.rid) if sessions.find_source(req.rid) is req else None
        ends = [end for end in (getattr(req, "semblend_exact_until", None), known) if end is not None]
        return min(ends, default=None)

    def _note_prompt(self, sessions: LocalSessions, req: Any, up_to: int) -> None:
        length = len(req.origin_input_ids)
        if up_to >= length and sessions.find_source(req.rid) is req:
            self._wait_for_step()
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :length]
            show_receipt(req, sessions.note_prompt(req.rid, row.long()))

    def _note_answered(self, sessions: LocalSessions, req: Any, up_to: int) -> None:
        prompt, tokens = len(req.origin_input_ids), list(req.full_untruncated_fill_ids[:up_to])
        if len(tokens) > prompt and sessions.find_source(req.rid) is req:
            self._wait_for_step()
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(tokens)]
            rows = self.req_to_token_pool
            others = rows.size - rows.available_size() > 1
            sessions.note_answered(req.rid, row.long(), tokens[prompt:], busy=others)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        req.semblend_exact_until = None  # a retracted request begins again
        self._guard("release", req.rid, lambda sessions: self._forget_released(sessions, req), None)

    def _forget_released(self, sessions: LocalSessions, req: Any) -> None:
        if sessions.find_source(req.rid) is req:
            sessions.forget(req.rid)

    # -- the cache as a whole ----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Empty the tree and drop our donors. If they cannot be dropped, nothing is served from them any more."""
        if self._sessions is not None and not self._guard("reset", "", self._reset_sessions, False):
            log.warning("SemBlend reuses nothing in this engine until a restart: its donors could not be dropped")
            self._sessions = None
        super().reset()
        if self._strategy is not None:
            self._strategy.begin_again()

    @staticmethod
    def _reset_sessions(sessions: LocalSessions) -> bool:
        sessions.reset()
        return True

    def evictable_size(self) -> int:
        """Tokens that SGLang may count on beside the free ones: a load that waits gives its slots back too.

        Otherwise admission would wait for slots that a request in the queue holds, and no load would ever go on.
        """
        return int(super().evictable_size()) + self._guard(
            "evict", "", lambda sessions: sessions.count_waiting_slots(), 0
        )

    def evict_for_alloc(self, params: EvictParams, *args: Any, **more: Any) -> EvictResult:
        """SGLang needs slots: a load that waits gives its own back when the tree has not enough."""
        before = self.token_to_kv_pool_allocator.available_size()
        result = super().evict_for_alloc(params, *args, **more)
        if self.token_to_kv_pool_allocator.available_size() - before < params.num_tokens:
            self._guard("evict", "", lambda sessions: sessions.stop_loads(), False)
        return result

    def release_host_resources(self) -> None:
        self.set_semantic_provider(None)
        super().release_host_resources()

    def _path_slots(self, req: Any) -> Tensor:
        root = self.root_node_handle(req.extra_key)
        slots: Tensor = self.tree_core.collect_full_device_indices(req.last_node, root)
        return slots

    def _take_slots(self, count: int) -> Tensor | None:
        evict_from_tree_cache(self, count)
        slots: Tensor | None = self.token_to_kv_pool_allocator.alloc(count)
        return slots

    def _wait_for_step(self) -> None:
        """Let the device finish what SGLang has launched.

        With the overlap schedule SGLang plans a step while the last one still runs on another stream, and that one may
        write slots that we read, or that were freed and are ours now. Such a step is not overlapped; others are.
        """
        device = torch.device(self.token_to_kv_pool_allocator.device)
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()

    def _is_busy(self) -> bool:
        """Whether any request has a row: it runs, and would wait for a load."""
        rows = self.req_to_token_pool
        return bool(rows.available_size() < rows.size)

    def _guard(self, where: str, request_id: str, hook: Callable[[LocalSessions], Answer], otherwise: Answer) -> Answer:
        """The border: whatever fails behind it costs the request time, never its answer."""
        if self._sessions is None:
            return otherwise
        sessions = self._sessions
        return sessions.guard(where, request_id, lambda: hook(sessions), otherwise)
