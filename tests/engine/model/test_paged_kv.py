from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule  # noqa: E402

from semblend.engine.model.paged_kv import SCRATCH_BLOCK, KvPool  # noqa: E402
from semblend.errors import CapacityError, InputError, StoreError  # noqa: E402


def pool_of(blocks: int, block_tokens: int = 4) -> KvPool:
    return KvPool(layers=2, kv_heads=2, head_dim=8, blocks=blocks, block_tokens=block_tokens)


def test_the_scratch_block_is_never_handed_out() -> None:
    pool = pool_of(5)
    assert SCRATCH_BLOCK not in pool.allocate(4)
    pool.check()


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    pool = pool_of(5)
    with pytest.raises(CapacityError, match="5 KV blocks wanted, 4 of 4 free"):
        pool.allocate(5)
    assert pool.free_blocks == 4
    pool.check()


def test_a_shared_block_is_freed_by_its_last_owner() -> None:
    pool = pool_of(3)
    (block, _) = pool.allocate(2)
    assert pool.share(block) == block
    pool.free([block])
    assert (pool.owners(block), pool.free_blocks) == (1, 0)
    pool.free([block])
    assert (pool.owners(block), pool.free_blocks) == (0, 1)
    pool.check()


@pytest.mark.parametrize("block", [0, 2, 99, -1])
def test_a_block_that_is_not_in_use_can_be_neither_freed_nor_shared(block: int) -> None:
    pool = pool_of(4)
    pool.allocate(1)
    with pytest.raises(StoreError, match="not in use"):
        pool.free([block])
    with pytest.raises(StoreError, match="not in use"):
        pool.share(block)


def test_check_finds_a_block_that_is_both_free_and_owned() -> None:
    pool = pool_of(4)
    (block,) = pool.allocate(1)
    pool._free.append(block)
    with pytest.raises(StoreError, match="owners"):
        pool.check()
    pool._free.append(block)
    with pytest.raises(StoreError, match="twice"):
        pool.check()


def test_check_finds_a_leak_and_a_used_scratch_block() -> None:
    pool = pool_of(4)
    pool._free.remove(2)
    with pytest.raises(StoreError, match="block 2"):
        pool.check()
    pool._free.append(0)
    with pytest.raises(StoreError, match="scratch"):
        pool.check()


def test_slots_follow_the_order_of_the_blocks() -> None:
    pool = pool_of(8)
    assert pool.slots_of([3, 1], 2, 7).tolist() == [14, 15, 4, 5, 6]
    assert pool.slots_of([3, 1], 5, 5).tolist() == []
    for start, end in ((0, 9), (3, 2), (-1, 2)):
        with pytest.raises(InputError, match="do not lie"):
            pool.slots_of([3, 1], start, end)


def test_written_rows_lie_in_their_slots_of_their_layer_only() -> None:
    pool = pool_of(4)
    slots = pool.slots_of([3, 1], 2, 6)
    k, v = torch.randn(2, 4, 2, 8)
    pool.write(1, slots, k, v)
    assert torch.equal(pool.k[1, slots], k)
    assert torch.equal(pool.v[1, slots], v)
    assert not pool.k[0].any()
    assert int((pool.k[1] != 0).any(-1).any(-1).sum()) == 4


def test_a_pool_for_a_number_of_tokens_holds_them_all() -> None:
    pool = pool_of(4)
    assert [pool.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert pool.bytes_per_token == 2 * 2 * 2 * 8 * 4
    with pytest.raises(InputError):
        pool_of(1)


class PoolLife(RuleBasedStateMachine):
    """Whatever sequences do, no block is lost and none has two unrelated owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(9)
        self.held: list[list[int]] = []

    @rule(n=st.integers(0, 5))
    def allocate(self, n: int) -> None:
        free = self.pool.free_blocks
        if n > free:
            with pytest.raises(CapacityError):
                self.pool.allocate(n)
            return
        got = self.pool.allocate(n)
        assert not set(got) & {block for blocks in self.held for block in blocks}
        self.held.append(got)

    @rule(at=st.integers(0, 50))
    def share(self, at: int) -> None:
        if self.held:
            self.held.append([self.pool.share(block) for block in self.held[at % len(self.held)]])

    @rule(at=st.integers(0, 50))
    def free(self, at: int) -> None:
        if self.held:
            self.pool.free(self.held.pop(at % len(self.held)))

    @invariant()
    def the_books_add_up(self) -> None:
        self.pool.check()
        in_use = {block for blocks in self.held for block in blocks}
        assert self.pool.used_blocks == len(in_use)
        assert all(self.pool.owners(b) == sum(b in blocks for blocks in self.held) for b in in_use)


TestPoolLife = PoolLife.TestCase
