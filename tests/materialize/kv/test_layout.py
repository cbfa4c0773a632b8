"""One meaning of a slot over the layouts of several engines."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="layouts are torch tensors")

from semblend.errors import InputError  # noqa: E402
from semblend.materialize.kv.layout import KvLayout, record_launches  # noqa: E402

LAYERS, BLOCKS, BLOCK, HEADS, DIM = 3, 6, 4, 2, 8
SLOTS = BLOCKS * BLOCK


def numbered(*shape: int):
    """A tensor in which no two elements are equal."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def ours():
    k, v = numbered(2, LAYERS, SLOTS, HEADS, DIM)
    return KvLayout.of_pool(k, v), lambda layer, s, h, d: (k[layer, s, h, d], v[layer, s, h, d])


def parted(caches, axis):
    """vLLM's caches, one tensor a layer, as views; keys and values part at ``axis``."""
    return KvLayout(*(tuple(cache.select(axis, side) for cache in caches) for side in (0, 1)))


def vllm_keys_first():
    caches = [numbered(2, BLOCKS, BLOCK, HEADS, DIM) + 1e4 * layer for layer in range(LAYERS)]

    def at(layer, s, h, d):
        return tuple(caches[layer][side, s // BLOCK, s % BLOCK, h, d] for side in (0, 1))

    return parted(caches, 0), at


def vllm_side_by_side():
    caches = [numbered(BLOCKS, 2, BLOCK, HEADS, DIM) + 1e4 * layer for layer in range(LAYERS)]

    def at(layer, s, h, d):
        return tuple(caches[layer][s // BLOCK, side, s % BLOCK, h, d] for side in (0, 1))

    return parted(caches, 1), at


def vllm_heads_outside():
    stored = [numbered(2, BLOCKS, HEADS, BLOCK, DIM) + 1e4 * layer for layer in range(LAYERS)]

    def at(layer, s, h, d):
        return tuple(stored[layer][side, s // BLOCK, h, s % BLOCK, d] for side in (0, 1))

    return parted([cache.transpose(2, 3) for cache in stored], 0), at


def sglang():
    k, v = ([numbered(SLOTS, HEADS, DIM) + 1e4 * (2 * layer + side) for layer in range(LAYERS)] for side in (0, 1))
    return KvLayout.of_rows(k, v), lambda layer, s, h, d: (k[layer][s, h, d], v[layer][s, h, d])


ALL = [ours, vllm_keys_first, vllm_side_by_side, vllm_heads_outside, sglang]


@pytest.mark.parametrize("make", ALL)
def test_a_slot_is_found_where_its_engine_keeps_it(make):
    layout, at = make()
    assert (layout.layers, layout.slots, layout.kv_heads, layout.head_dim) == (LAYERS, SLOTS, HEADS, DIM)
    slots = torch.tensor([0, 17, 5, 23])
    for layer in range(LAYERS):
        k, v = layout.gather(layer, slots)
        assert k.shape == v.shape == (4, HEADS, DIM)
        for row, slot in enumerate(slots.tolist()):
            assert (k[row, 1, 3], v[row, 1, 3]) == at(layer, slot, 1, 3)


@pytest.mark.parametrize("make", ALL)
def test_what_is_scattered_is_in_the_engines_own_tensors_and_nowhere_else(make):
    layout, at = make()
    before = [layout.gather(layer, torch.arange(SLOTS)) for layer in range(LAYERS)]
    slots = torch.tensor([9, 2, 20])
    k, v = torch.randn(2, 3, HEADS, DIM)
    layout.scatter(1, slots, k, v)
    assert at(1, 2, 1, 5) == (k[1, 1, 5], v[1, 1, 5])
    untouched = torch.tensor(sorted(set(range(SLOTS)) - set(slots.tolist())))
    for layer in range(LAYERS):
        keys, values = layout.gather(layer, torch.arange(SLOTS))
        kept = untouched if layer == 1 else torch.arange(SLOTS)
        assert torch.equal(keys[kept], before[layer][0][kept])
        assert torch.equal(values[kept], before[layer][1][kept])


@pytest.mark.parametrize("make", ALL)
def test_layer_starts_lead_from_the_first_layer_to_every_other(make):
    layout, _ = make()
    size = layout.dtype.itemsize
    for layer in range(LAYERS):
        for side, tensor in enumerate((layout.k[layer], layout.v[layer])):
            assert layout.k[0].data_ptr() + int(layout.layer_starts[layer, side]) * size == tensor.data_ptr()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KvLayout((), ()), "0 key and 0 value"),
        (lambda: KvLayout.of_pool(numbered(1, 8, 2, 4), numbered(2, 8, 2, 4)), "1 key and 2 value"),
        (lambda: KvLayout.of_pool(numbered(1, 8, 2, 4), numbered(1, 8, 2, 6)), "layers differ"),
        (lambda: KvLayout.of_pool(numbered(1, 0, 2, 4), numbered(1, 0, 2, 4)), "KV of shape"),
        (lambda: KvLayout.of_pool(*(numbered(1, 8, 2, 4).to(torch.int8) for _ in range(2))), "int8 cannot be spliced"),
        (lambda: KvLayout.of_pool(*(numbered(1, 8, 2, 4).transpose(2, 3) for _ in range(2))), "not adjacent"),
        (lambda: KvLayout.of_rows([numbered(8, 2)], [numbered(8, 2)]), r"a layer of shape \[8, 2\]"),
    ],
)
def test_tensors_that_are_no_kv_cache_are_refused_with_a_hint(make, words):
    with pytest.raises(InputError, match=words) as caught:
        make()
    assert caught.value.hint


class FakeGraph:
    """Counts; what was recorded is in the memory of the tensors, and stays there."""

    def __init__(self):
        self.replays, self.begun, self.ended = 0, 0, 0

    def capture_begin(self, **_how):
        self.begun += 1

    def capture_end(self):
        self.ended += 1

    def replay(self):
        self.replays += 1


@pytest.fixture
def graph(monkeypatch):
    made, stream = FakeGraph(), SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "CUDAGraph": lambda: made,
        "Stream": lambda: stream,
        "stream": lambda one: nullcontext(),
        "current_stream": lambda: stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return made


def test_what_a_recording_reads_stays_in_memory_as_long_as_the_recording(graph):
    read = torch.ones(3)
    seen = weakref.ref(read)
    repeat = record_launches(lambda read=read: read + 1)
    del read
    gc.collect()
    assert seen() is not None, "a graph knows addresses and holds no tensors"
    first, second = repeat(), repeat()
    assert graph.replays == 2
    assert first.data_ptr() != second.data_ptr(), "each answer is a copy"


def test_a_recording_that_fails_is_ended(graph):
    calls = []

    def fail_in_the_recording():
        calls.append(len(calls))
        if len(calls) == 2:
            raise RuntimeError("not permitted")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="not permitted"):
        record_launches(fail_in_the_recording)
    assert (graph.begun, graph.ended) == (1, 1)
