"""A radix cache with the interface of SGLang's, in a page of Python: for tests of providers without SGLang."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from semblend.integration.sglang.semantic_prefix import count_equal


class FakeKey:
    """Tokens and the namespace they count in, as SGLang's ``RadixKey``."""

    def __init__(
        self,
        token_ids: array[int],
        extra_key: str | None = None,
        is_bigram: bool = False,
        limit: int | None = None,
        cache_salt: str | None = None,
    ) -> None:
        self.token_ids, self.extra_key, self.is_bigram = token_ids, extra_key, is_bigram
        self.limit, self.cache_salt = limit, cache_salt

    def raw_token_ids(self) -> array[int]:
        return self.token_ids if self.limit is None else self.token_ids[: self.limit]

    def __len__(self) -> int:
        return len(self.raw_token_ids())


@dataclass(frozen=True, slots=True)
class FakeMatchParams:
    key: FakeKey
    req: Any = None


class FakeMatch(NamedTuple):
    device_prefix_len: int


@dataclass
class FakeRequest:
    """What a cache looks at in a request."""

    rid: str
    full_untruncated_fill_ids: array[int]
    extra_key: str | None = None
    cache_salt: str | None = None
    skip_radix_cache_insert: bool = False
    is_finished: bool = True

    def finished(self) -> bool:
        return self.is_finished

    def owned_kv_len(self) -> int:
        return len(self.full_untruncated_fill_ids)


@dataclass
class FakeRadixCache:
    """Prompts by namespace; a lookup finds the longest common beginning."""

    page_size: int = 1
    prompts: dict[tuple[str | None, str | None], list[Sequence[int]]] = field(default_factory=dict)

    @classmethod
    def create_simulated(cls, page_size: int = 1) -> FakeRadixCache:
        return cls(page_size)

    def insert(self, key: FakeKey) -> None:
        self.prompts.setdefault((key.extra_key, key.cache_salt), []).append(list(key.raw_token_ids()))

    def match_prefix(self, params: FakeMatchParams) -> FakeMatch:
        wanted, longest = params.key.raw_token_ids(), 0
        for known in self.prompts.get((params.key.extra_key, params.key.cache_salt), []):
            longest = max(longest, count_equal(wanted, known) // self.page_size * self.page_size)
        return FakeMatch(longest)

    def checkpoint(self, req: FakeRequest, *, up_to: int) -> None:
        self.insert(FakeKey(req.full_untruncated_fill_ids[:up_to], req.extra_key, cache_salt=req.cache_salt))
