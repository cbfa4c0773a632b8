"""The KV pool: one pair of tensors for all layers, cut to blocks that sequences own and share."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from semblend.errors import CapacityError, InputError, StoreError
from semblend.fairness import TenantUsage
from semblend.materialize.kv.layout import KvLayout

if TYPE_CHECKING:
    from semblend.engine.model.spec import ModelSpec

BLOCK_TOKENS = 16
SCRATCH_BLOCK = 0


class KvPool:
    """``k`` and ``v`` are ``[layers, slots, kv_heads, head_dim]``; ``slot = block * block_tokens + offset``.

    Block 0 is scratch: padding rows may be written there, and it is never handed out. A block is freed
    when the last of its owners lets go. ``held`` counts the blocks in use by tenant: a block stays its tenant's from
    `allocate` on, because nothing crosses namespaces. Not thread-safe: the engine's step loop is its only user.

    >>> pool = KvPool(layers=1, kv_heads=1, head_dim=4, blocks=3, block_tokens=2)
    >>> mine = pool.allocate(2)
    >>> pool.slots_of(mine, 1, 4).tolist(), pool.free_blocks
    ([3, 4, 5], 0)
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        blocks: int,
        block_tokens: int = BLOCK_TOKENS,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if blocks < 2 or block_tokens < 1:
            raise InputError(
                f"a pool of {blocks} blocks of {block_tokens} tokens holds nothing", hint="give it at least 2 blocks"
            )
        self.block_tokens = block_tokens
        self.blocks = blocks
        shape = (layers, blocks * block_tokens, kv_heads, head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)  # zeros: a stray NaN would spread through masks
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.layout = KvLayout.of_pool(self.k, self.v)
        self.held = TenantUsage()
        self._owners = [0] * blocks
        self._tenants = [""] * blocks
        self._free = list(range(1, blocks))  # a heap: low blocks first keeps sequences in one run of slots

    @classmethod
    def for_model(
        cls,
        spec: ModelSpec,
        *,
        tokens: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        block_tokens: int = BLOCK_TOKENS,
    ) -> KvPool:
        """A pool that holds ``tokens`` tokens of a model, and the scratch block."""
        return cls(
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            blocks=1 + -(-tokens // block_tokens),
            block_tokens=block_tokens,
            device=device,
            dtype=dtype,
        )

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        return self.blocks - 1 - len(self._free)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def bytes_per_token(self) -> int:
        return self.nbytes // (self.blocks * self.block_tokens)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-tokens // self.block_tokens)

    def allocate(self, n_blocks: int, tenant: str = "") -> list[int]:
        """Blocks of a tenant with one owner each, ascending; all of them or none."""
        if n_blocks < 0:
            raise InputError(f"cannot allocate {n_blocks} blocks", hint="ask for 0 or more")
        if n_blocks > len(self._free):
            raise CapacityError(
                f"{n_blocks} KV blocks wanted, {len(self._free)} of {self.blocks - 1} free",
                hint="free or evict blocks first, or make the pool larger",
            )
        taken = [heapq.heappop(self._free) for _ in range(n_blocks)]
        for block in taken:
            self._owners[block] = 1
            self._tenants[block] = tenant
        self.held.add(tenant, n_blocks)
        return taken

    def share(self, block: int) -> int:
        """One more owner of a block in use; returns the block."""
        self._check_owned(block)
        self._owners[block] += 1
        return block

    def free(self, blocks: Iterable[int]) -> None:
        """One owner less of each; a block without owners can be handed out again."""
        freed: Counter[str] = Counter()
        try:
            for block in blocks:
                self._check_owned(block)
                self._owners[block] -= 1
                if not self._owners[block]:
                    heapq.heappush(self._free, block)
                    freed[self._tenants[block]] += 1
        finally:
            for tenant, count in freed.items():
                self.held.add(tenant, -count)

    def owners(self, block: int) -> int:
        return self._owners[block]

    def tenant_of(self, block: int) -> str:
        return self._tenants[block]

    def slots_of(self, blocks: Sequence[int], start: int, end: int) -> Tensor:
        """Slots of positions ``[start, end)`` of a sequence that lies in these blocks, in this order."""
        size = self.block_tokens
        if not 0 <= start <= end <= len(blocks) * size:
            raise InputError(
                f"positions {start} to {end} do not lie in {len(blocks)} blocks", hint="allocate more blocks"
            )
        first, last = start // size, -(-end // size)
        table = torch.tensor(blocks[first:last], dtype=torch.long)
        slots = (table[:, None] * size + torch.arange(size)).flatten()
        return slots[start - first * size : end - first * size].to(self.device, non_blocking=True)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put rows ``[n, kv_heads, head_dim]`` into their slots of one layer."""
        self.k[layer].index_copy_(0, slots, k)
        self.v[layer].index_copy_(0, slots, v)

    def check(self) -> None:
        """Raise `StoreError` where the books do not add up: a leak, a block free and owned, scratch handed out."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise StoreError("a KV block is in the free list twice", hint="report this: it is a bug")
        if SCRATCH_BLOCK in free or self._owners[SCRATCH_BLOCK]:
            raise StoreError("the scratch KV block was handed out", hint="report this: it is a bug")
        for block in range(1, self.blocks):
            if (block in free) == (self._owners[block] > 0):
                raise StoreError(
                    f"KV block {block} has {self._owners[block]} owners and is {'' if block in free else 'not '}free",
                    hint="report this: it is a bug",
                )
        held = Counter(self._tenants[block] for block in range(1, self.blocks) if self._owners[block])
        if held != self.held.to_dict():
            raise StoreError("KV blocks are booked for the wrong tenants", hint="report this: it is a bug")

    def _check_owned(self, block: int) -> None:
        if not 0 < block < self.blocks or not self._owners[block]:
            raise StoreError(f"KV block {block} is not in use", hint="a block was freed twice, or never allocated")
