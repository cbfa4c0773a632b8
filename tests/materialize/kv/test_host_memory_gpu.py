"""Copies of donors beside computation, on a real GPU: who may overtake whom."""

from __future__ import annotations

import pytest
import torch

from semblend.integration.vllm.worker.cuda_graphs import SIZES, RecordedPasses
from semblend.materialize.contract import KvLayout, Rows
from semblend.materialize.donors.tiers import DonorKv

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
LAYERS, SLOTS, HEADS, DIM = 8, 16_384, 4, 128


class Pool:
    def __init__(self) -> None:
        self.k, self.v = (torch.randn(LAYERS, SLOTS, HEADS, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.layout = KvLayout.of_pool(self.k, self.v)
        self.bytes = 2 * self.k.numel() * 2


@pytest.fixture
def pool():
    return Pool()


@pytest.mark.parametrize("tier", ["host", "device"])
@pytest.mark.parametrize("reserved", [True, False])
def test_slots_that_are_written_after_a_capture_do_not_change_the_donor(pool, tier, reserved):
    device = torch.device("cuda")
    kv = DonorKv(pool.bytes if tier == "device" else 0, pool.bytes)
    if reserved:
        kv.reserve(device)
        assert tier in kv.memory.arenas
    slots = torch.randperm(SLOTS)
    expected = pool.k[:, slots].cpu()
    handle = kv.capture("d", 1, pool.layout, slots)
    pool.k.zero_()
    assert handle.tier == tier
    held = kv.acquire("d", 1)
    torch.cuda.synchronize()
    assert torch.equal(held.k.cpu(), expected)
    kv.release(held)
    kv.close()


def test_a_capture_does_not_make_the_host_wait(pool):
    kv = DonorKv(0, pool.bytes)
    kv.reserve(torch.device("cuda"))
    busy = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(40):
        busy = busy @ busy * 1e-4
    handle = kv.capture("d", 1, pool.layout, torch.arange(SLOTS), slots_stay=True)
    assert handle.arrives is not None
    assert not handle.arrives.query(), "the copy waits for what was queued before it, and we do not"
    handle.arrives.synchronize()
    held = kv.acquire("d", 1)
    assert torch.equal(held.v.cpu(), pool.v.cpu())
    kv.release(held)
    kv.close()


@pytest.mark.parametrize("how", sorted(SIZES))
def test_a_recorded_pass_computes_its_rows_and_writes_nothing_for_the_padding(how):
    """The "model" doubles tokens, adds positions, and writes hidden states to slots."""
    device, most = torch.device("cuda"), SIZES["groups"][-1] + 1
    cache = torch.zeros(most + 1, device=device)

    def run(rows, asked):
        hidden = rows.tokens.float() * 2 + rows.positions + rows.context[rows.positions]
        kept = torch.where(rows.slots >= 0, rows.slots, most)
        cache.scatter_(0, kept, torch.where(rows.slots >= 0, hidden, cache[-1]))
        asked[0].copy_(hidden[-asked.shape[1] :, None, None].expand_as(asked[0]))
        return hidden[:, None]

    graphs = RecordedPasses(dict.fromkeys({"kernel", how}, run), most, (1, 1, 2), like=cache)
    context = torch.arange(most, device=device)
    for count in (1, SIZES[how][0], SIZES[how][0] + 1, SIZES[how][-1]):
        at = torch.arange(count)
        hidden = graphs.run(Rows.of(at + 5, at, context))
        expected = (at + 5) * 2.0 + at + at
        assert torch.equal(hidden[:, 0].cpu(), expected)
        assert torch.equal(cache[:count].cpu(), expected)
        assert float(cache[-1]) == 0.0
        last = min(count, graphs.queries.shape[1])
        assert torch.equal(graphs.queries[0, -last:, 0, 0].cpu(), expected[-last:])
    too_many = torch.arange(SIZES[how][-1] + 1)
    assert graphs.run(Rows.of(too_many, too_many, context)) is None
