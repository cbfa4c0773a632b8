"""`SemanticPrefixProvider`: anybody's idea of where an exact miss may find its KV, and the hook that asks for it.

A provider is asked when the exact lookup of a request has found nothing. It answers with the tokens of another request
whose KV may be resident, or with None. What is done with that answer:

    in the cache ``semblend``  the tokens are searched for runs that are equal to the prompt's, at any offset; equal
                               runs are moved into slots of the request, checked, and never published
    in a patched stock cache   equal tokens at the beginning are looked up; a stock cache cannot move KV. The exact
                               lookup has just missed them, so this hits only where another request has put them there
                               meanwhile
    with ``unsafe_verbatim``   the other request's KV is used as if its tokens were the prompt's. The first proposal
                               of this interface did that; the answer may be about another text

`install_hooks` puts the hook into a class with SGLang's cache interface.
Each cache asks a `GuardedProvider`: a provider that raises, is late or answers with nonsense costs a cold prefill.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

__all__ = ["GuardedProvider", "SemanticPrefixProvider", "SemanticPrefixResult", "install_hooks"]

CLOSING = ("shutdown", "release_host_resources")
"""What SGLang calls when a cache goes."""

MAX_WAITING = 64
"""Finished requests that a provider may be behind; each holds its tokens."""

MAX_TOKENS, MAX_NAME_CHARS = 1 << 22, 200
"""Of a proposal: more tokens than any request has, and characters of a name in the log."""

DEADLINE_MS = 5.0
"""How long a scheduler step waits for a provider, unless it is told otherwise."""

CLOSE_S = 1.0
"""How long a cache that goes waits for a provider that is at work."""

log = logging.getLogger("sglang.semblend")


@dataclass(frozen=True, slots=True)
class SemanticPrefixResult:
    """Whose KV may be reused.

    ``alternate_token_ids`` are that request's tokens, ``num_cached_tokens`` how many of them the provider believes to
    be resident (a hint, nothing trusts it). ``skip_insert``: SGLang shall keep nothing of the new request in its tree.
    ``metadata`` is the provider's own, ``source_id`` names the other request in logs.
    """

    alternate_token_ids: Sequence[int]
    num_cached_tokens: int = 0
    skip_insert: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    source_id: str | None = None


class SemanticPrefixProvider(ABC):
    """Finds another request for one that the exact cache does not know. Called inside a scheduler step: be quick."""

    def on_init(self) -> None:  # noqa: B027  (a provider need not care)
        """It was registered with a cache; called once for each registration."""

    @abstractmethod
    def on_prefix_miss(self, rid: str, token_ids: Sequence[int]) -> SemanticPrefixResult | None:
        """The exact lookup of request ``rid`` has found nothing; None lets it be computed."""

    def on_request_cached(self, rid: str, token_ids: Sequence[int]) -> None:  # noqa: B027  (a provider need not care)
        """These tokens of a finished request are in the exact tree now: it can be a donor."""

    def on_shutdown(self) -> None:  # noqa: B027  (a provider need not care)
        """It was replaced or cleared, or the cache goes; called once for each registration."""


class GuardedProvider(SemanticPrefixProvider):
    """A provider of somebody else that can neither raise into a scheduler step nor hold it up.

    All its methods are called by one thread of its own, one after the other. ``on_prefix_miss`` has ``deadline_ms``;
    what comes later is thrown away, and while it is still at work nothing else is asked of it: such requests are
    computed. Nobody waits for ``on_request_cached``; a provider that is `MAX_WAITING` requests behind is not told.
    """

    def __init__(self, provider: SemanticPrefixProvider, deadline_ms: float = DEADLINE_MS) -> None:
        self._provider, self._deadline_s = provider, deadline_ms / 1e3
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="semantic-prefix")
        self._asked: Future[SemanticPrefixResult | None] | None = None
        self._told: list[Future[None]] = []

    def on_init(self) -> None:
        self._thread.submit(self._call, "on_init").result()

    def on_prefix_miss(self, rid: str, token_ids: Sequence[int]) -> SemanticPrefixResult | None:
        if self._asked is not None and not self._asked.done():
            return None
        try:
            self._asked = self._thread.submit(self._ask, rid, token_ids)
            return self._asked.result(timeout=self._deadline_s)
        except TooLate:
            assert self._asked is not None, "somebody was asked"
            self._asked.cancel()  # if it has not begun, it need not
            log.warning("the semantic provider was late for %s: it is computed", rid)
            return None
        except RuntimeError as error:  # its thread is gone
            log.warning("the semantic provider cannot be asked for %s: %s", rid, error)
            return None

    def _ask(self, rid: str, token_ids: Sequence[int]) -> SemanticPrefixResult | None:
        """Ask, and copy the answer while the deadline runs: its parts may be anything too, and take any time."""
        try:
            found: Any = self._provider.on_prefix_miss(rid, token_ids)
            if found is None:
                return None
            if isinstance(found, SemanticPrefixResult):
                return _copy_answer(found)
            log.warning("the semantic provider answered with a %s for %s", type(found).__name__, rid)
        except BaseException as error:  # its thread is ours; sys.exit() in it must not end the engine
            log.warning("the semantic provider failed for %s: %s: %s", rid, type(error).__name__, error)
        return None

    def on_request_cached(self, rid: str, token_ids: Sequence[int]) -> None:
        self._told = [one for one in self._told if not one.done()]
        if len(self._told) >= MAX_WAITING:
            log.warning("the semantic provider is %d requests behind: it is not told of %s", len(self._told), rid)
            return
        try:
            self._told.append(self._thread.submit(self._call, "on_request_cached", rid, token_ids))
        except RuntimeError as error:  # its thread is gone
            log.warning("the semantic provider cannot be told of %s: %s", rid, error)

    def on_shutdown(self) -> None:
        for one in self._told:
            one.cancel()
        try:
            self._thread.submit(self._call, "on_shutdown").result(timeout=CLOSE_S)
        except TooLate:
            log.warning("the semantic provider is at work: it is told later that it goes")
        except RuntimeError as error:  # its thread is gone: it was closed before, or Python ends
            log.warning("the semantic provider cannot be told that it goes: %s", error)
        self._thread.shutdown(wait=False)

    def _call(self, name: str, *args: Any) -> None:
        try:
            getattr(self._provider, name)(*args)
        except BaseException as error:  # as in `_ask`
            log.warning("the semantic provider failed in %s: %s: %s", name, type(error).__name__, error)


def _copy_answer(found: SemanticPrefixResult) -> SemanticPrefixResult:
    """The same answer of plain values: 64-bit tokens, no more than a request can have, and a name of one line."""
    name = None if found.source_id is None else repr(str(found.source_id)[:MAX_NAME_CHARS])[1:-1]
    return SemanticPrefixResult(
        array("q", islice(iter(found.alternate_token_ids), MAX_TOKENS)),
        num_cached_tokens=int(found.num_cached_tokens),
        skip_insert=bool(found.skip_insert),
        metadata=found.metadata,
        source_id=name,
    )


def install_hooks(cache_class: type, *, unsafe_verbatim: bool = False) -> Callable[[], None]:
    """Give a cache class `set_semantic_provider` and ask the provider in its `match_prefix`; returns an undo.

    Without a provider the class does what it did. `_match_prefix_exact` is the lookup as it was. The last two names of
    the first proposal live on: `cache_finished_req` is `checkpoint` of a finished request.
    """
    exact, checkpoint = cache_class.match_prefix, cache_class.checkpoint  # type: ignore[attr-defined]

    def match_prefix(self: Any, params: Any) -> Any:
        found = exact(self, params)
        if self._guarded_provider is None or params.req is None or count_hit(found):
            return found
        try:
            return _ask_provider(self, exact, params, found, unsafe_verbatim)
        except Exception as error:  # what it proposes may be anything, also to SGLang's own lookup
            log.warning(
                "the semantic provider's proposal for %s is of no use: %s: %s",
                params.req.rid,
                type(error).__name__,
                error,
            )
            return found

    def checkpoint_and_tell(self: Any, req: Any, *, up_to: int, **more: Any) -> None:
        checkpoint(self, req, up_to=up_to, **more)
        if self._guarded_provider is not None and req.finished() and not req.skip_radix_cache_insert:
            self._guarded_provider.on_request_cached(req.rid, list(req.full_untruncated_fill_ids[:up_to]))

    def cache_finished_req(self: Any, req: Any) -> None:
        if not req.skip_radix_cache_insert:
            self.checkpoint(req, up_to=req.owned_kv_len())

    def close_with(close: Any) -> Any:
        def close_and_tell(self: Any, *args: Any, **more: Any) -> Any:
            self.set_semantic_provider(None)
            return close(self, *args, **more)

        return close_and_tell

    closing = {name: close_with(getattr(cache_class, name)) for name in CLOSING if hasattr(cache_class, name)}
    names = closing | {
        "_semantic_provider": None,
        "_guarded_provider": None,
        "_match_prefix_exact": exact,
        "match_prefix": match_prefix,
        "checkpoint": checkpoint_and_tell,
        "cache_finished_req": cache_finished_req,
        "set_semantic_provider": set_semantic_provider,
    }
    own = {name: vars(cache_class)[name] for name in names if name in vars(cache_class)}
    for name, value in names.items():
        setattr(cache_class, name, value)

    def undo() -> None:
        for name in names:
            if name in own:
                setattr(cache_class, name, own[name])
            elif name in vars(cache_class):
                delattr(cache_class, name)

    return undo


def set_semantic_provider(
    cache: Any, provider: SemanticPrefixProvider | None, *, deadline_ms: float = DEADLINE_MS
) -> None:
    """Register a provider with a cache, replace the one it has, or clear it with None.

    A provider can neither raise into a scheduler step nor hold it up for more than ``deadline_ms``.
    """
    before, cache._guarded_provider, cache._semantic_provider = cache._guarded_provider, None, None
    if before is not None:
        before.on_shutdown()
    if provider is not None:
        guarded = provider if isinstance(provider, GuardedProvider) else GuardedProvider(provider, deadline_ms)
        guarded.on_init()
        cache._guarded_provider, cache._semantic_provider = guarded, provider


def count_hit(found: Any) -> int:
    """Tokens that an exact lookup has found on the device.

    Before 0.5.23 SGLang's results had the slots themselves.
    """
    length = getattr(found, "device_prefix_len", None)
    return len(found.device_indices) if length is None else int(length)


def _ask_provider(cache: Any, exact: Any, params: Any, found: Any, unsafe_verbatim: bool) -> Any:
    prompt = params.key.token_ids  # all of it, though a prefix may cover less
    answer = cache._guarded_provider.on_prefix_miss(params.req.rid, list(prompt))
    if answer is None:
        return found
    if answer.source_id:
        log.info("semantic prefix for %s: source_id=%s", params.req.rid, answer.source_id)
    if answer.skip_insert:
        params.req.skip_radix_cache_insert = True
    alternate = answer.alternate_token_ids
    if not unsafe_verbatim:
        alternate = alternate[: count_equal(prompt, alternate)]
    if not len(alternate):
        return found
    key = params.key
    limit = len(key) if unsafe_verbatim else None  # a prefix never covers more than SGLang lets it
    return exact(cache, replace(params, key=copy_key(key, alternate, limit)))


def copy_key(key: Any, token_ids: Sequence[int], limit: int | None = None) -> Any:
    """Other tokens in the namespace of a key: whoever has an ``extra_key`` or a salt sees its own donors only."""
    return type(key)(
        array("q", token_ids), extra_key=key.extra_key, is_bigram=key.is_bigram, limit=limit, cache_salt=key.cache_salt
    )


def count_equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens at the beginning are the same.

    >>> count_equal([1, 2, 3], [1, 2, 4, 5])
    2
    """
    length = 0
    for one, other in zip(ours, theirs, strict=False):
        if one != other:
            break
        length += 1
    return length
