"""The worker's half without vLLM, over the fake engine: what it writes, what it refuses, what it reports."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from semblend import SemBlendConfig
from semblend.integration.vllm.metrics import MetricsTally, merge, replay
from semblend.integration.vllm.orders import Capture, Load, Orders
from semblend.integration.vllm.settings import ConnectorSettings
from semblend.integration.vllm.startup_checks import make_worker_half
from semblend.integration.vllm.versions import SUPPORTED, VersionEvidence, support
from semblend.integration.vllm.worker.cache_layout import IndexedLayout, StridedLayout, probe_layout
from semblend.integration.vllm.worker.worker_half import WorkerHalf
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.contract import Rows, slots_of_blocks
from semblend.materialize.kv.layout import KvLayout
from semblend.materialize.naive_engine import NaiveEngine
from semblend.span import Span

BLOCK = 16
DOCUMENT = list(range(100, 180))


class Engine(NaiveEngine):
    """The naive engine with a switch that breaks it."""

    broken = False
    block_tokens = BLOCK

    def warm_up(self):
        """Nothing to compile."""

    def forward(self, rows, observer=None):
        if self.broken:
            raise RuntimeError("broken on purpose")
        return super().forward(rows, observer)

    def cold(self, tokens, blocks):
        at = torch.arange(len(tokens))
        context = slots_of_blocks(blocks, BLOCK, len(tokens))
        super().forward(Rows.of(tokens, at, context))
        return self.kv_in(context)

    def kv_in(self, context):
        return [tuple(part.clone() for part in self.layout.gather(n, context)) for n in range(self.layout.layers)]


class Worker:
    """A worker's half on the fake engine; blocks 0–19 belong to a donor, 20–39 to the prompt, 40–59 to a cold twin."""

    def __init__(self, queues=False, **settings):
        self.engine = Engine.make(slots=64 * BLOCK, vocabulary=1000)
        quality = QualitySettings(mode="fast", first_seam_tokens=4, seam_tokens=4, **settings)
        self.half = WorkerHalf(self.engine, BLOCK, quality, host_bytes=1 << 24, queues=queues)

    def donor(self, tokens):
        self.engine.cold(tokens, range(20))
        blocks = tuple(range(-(-len(tokens) // BLOCK)))
        self.half.capture(Orders(captures=[Capture("d", 1, len(tokens), blocks)], served=["d"]))
        return self.half.take_report()

    def load(self, tokens, spans, exact=0, mode="fast"):
        order = Load("r", tuple(tokens), tuple(range(20, 40)), exact, len(tokens), tuple(spans), mode)
        self.half.load(Orders(loads=[order]))
        return self.half.take_report().loaded["r"]

    def kv(self, tokens):
        context = slots_of_blocks(range(20, 40), BLOCK, len(tokens))
        return self.engine.kv_in(context)


@pytest.fixture
def worker():
    return Worker()


def test_a_capture_is_reported_with_what_it_takes(worker):
    report = worker.donor([1, 2, 3, *DOCUMENT])
    assert report.captured == {("d", 1)}
    assert report.served == ["d"]
    assert report.donor_bytes["host"] == worker.half.donor_kv.used_bytes["host"] > 0


def test_moved_kv_is_exact_where_context_does_not_matter(worker):
    worker.donor([1, 2, 3, *DOCUMENT])
    tokens = [7, 8, 9, 10, 11, *DOCUMENT, 12]
    loaded = worker.load(tokens, [Span("d", 3, 5, len(DOCUMENT), generation=1)])
    cold = worker.engine.cold(tokens, range(40, 60))
    assert loaded.reason is None
    assert loaded.reused_tokens + loaded.recomputed_tokens == len(DOCUMENT)
    assert loaded.prefill_tokens == 6
    ours = worker.kv(tokens)
    torch.testing.assert_close(ours[0], cold[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(ours[1][0], cold[1][0], atol=1e-4), "above layer 0 it is an approximation"


def test_only_gaps_seams_and_the_end_are_computed(worker):
    worker.donor([1, 2, 3, *DOCUMENT])
    tokens = [7, 8, 9, 10, 11, *DOCUMENT, 12]
    worker.engine.passes.clear()
    worker.load(tokens, [Span("d", 3, 5, len(DOCUMENT), generation=1)])
    assert worker.engine.passes[0] == [*range(9), len(tokens) - 1]


@pytest.mark.parametrize("generation", [0, 2])
def test_a_replaced_donor_is_refused_and_the_prompt_computed_exactly(worker, generation):
    worker.donor([1, 2, 3, *DOCUMENT])
    tokens = [7, 8, *DOCUMENT]
    loaded = worker.load(tokens, [Span("d", 3, 2, len(DOCUMENT), generation=generation)])
    assert loaded.reason == "stale"
    assert (loaded.reused_tokens, loaded.prefill_tokens, loaded.failed) == (0, len(tokens), False)
    for ours, cold in zip(worker.kv(tokens), worker.engine.cold(tokens, range(40, 60)), strict=True):
        assert torch.equal(ours[0], cold[0])
        assert torch.equal(ours[1], cold[1])


def test_wrong_donor_kv_is_refused_and_the_prompt_computed(worker):
    worker.donor([1, 2, 3, *DOCUMENT])
    tokens = [7, 8, *reversed(DOCUMENT)]
    loaded = worker.load(tokens, [Span("d", 3, 2, len(DOCUMENT), generation=1)])
    assert loaded.reason == "validation_failed"
    assert torch.equal(worker.kv(tokens)[2][0], worker.engine.cold(tokens, range(40, 60))[2][0])


def test_when_no_pass_works_the_blocks_are_called_invalid(worker):
    worker.donor([1, 2, 3, *DOCUMENT])
    worker.engine.broken = True
    order = Load("r", (7, 8, *DOCUMENT), tuple(range(20, 40)), 0, 82, (Span("d", 3, 2, 80, generation=1),), "fast")
    worker.half.load(Orders(loads=[order]))
    report = worker.half.take_report()
    assert report.loaded["r"].failed
    assert worker.half.take_invalid_blocks() == set(range(20, 26))
    assert worker.half.take_invalid_blocks() == set()
    assert any("on purpose" in message for _, message, _ in report.errors)


def test_a_queued_load_fills_the_same_blocks_and_is_told_after_the_step():
    at_once, queued = Worker(), Worker(queues=True)
    tokens = [7, 8, 9, *DOCUMENT, 12]
    order = Load("r", tuple(tokens), tuple(range(20, 40)), 0, len(tokens), (Span("d", 3, 3, 80, generation=1),), "fast")
    for worker in (at_once, queued):
        worker.donor([1, 2, 3, *DOCUMENT])
        worker.half.load(Orders(loads=[order]))
    assert queued.half.take_report() is None, "its verdict is read after the step"
    assert queued.half.donor_kv.holders == 1
    queued.half.capture(Orders())
    told, expected = queued.half.take_report().loaded["r"], at_once.half.take_report().loaded["r"]
    for name in ("reused_tokens", "recomputed_tokens", "prefill_tokens", "canary", "reason"):
        assert getattr(told, name) == getattr(expected, name), name
    for ours, theirs in zip(queued.kv(tokens), at_once.kv(tokens), strict=True):
        assert torch.equal(ours[0], theirs[0])
    assert queued.half.donor_kv.holders == 0
    assert queued.half.take_invalid_blocks() == set()


def test_a_queued_load_that_turns_out_wrong_makes_its_blocks_invalid():
    worker = Worker(queues=True)
    worker.donor([1, 2, 3, *DOCUMENT])
    tokens = (7, 8, *reversed(DOCUMENT))
    order = Load("r", tokens, tuple(range(20, 40)), 16, 82, (Span("d", 19, 18, 64, generation=1),), "fast")
    worker.half.load(Orders(loads=[order]))
    assert worker.half.take_invalid_blocks() == set(range(21, 26)), "vLLM asks before it hears the report"
    loaded = worker.half.take_report().loaded["r"]
    assert (loaded.reason, loaded.failed, loaded.reused_tokens) == ("validation_failed", True, 0)
    assert worker.half.donor_kv.holders == 0


POISONS = {
    "wrong keys": lambda held: held.k.copy_(torch.roll(held.k, 7, dims=1)),
    "numbers that are none": lambda held: held.v.fill_(float("nan")),
}


class StepOfVllm:
    """The hooks of one step in vLLM's order, on a worker that `make_worker_half` made for an engine."""

    def __init__(self, async_scheduling, use_v2_model_runner):
        config = SimpleNamespace(
            device_config=SimpleNamespace(device_type="cuda"),
            scheduler_config=SimpleNamespace(async_scheduling=async_scheduling, max_num_batched_tokens=48),
            use_v2_model_runner=use_v2_model_runner,
            model_config=SimpleNamespace(model="m"),
        )
        self.worker = Worker()
        settings = ConnectorSettings(config=SemBlendConfig(quality="fast"), donor_host_bytes=1 << 24)
        self.worker.half = make_worker_half(self.worker.engine, settings, config)

    def poison(self, how):
        held = self.worker.half.donor_kv.acquire("d", 1)
        POISONS[how](held)
        self.worker.half.donor_kv.release(held)

    def run(self, load):
        """Returns the prompt's KV as vLLM's forward pass finds it, and the blocks that the step then calls invalid."""
        orders = Orders(loads=[load], served=["r"])
        self.worker.half.before_step(orders)
        self.worker.half.load(orders)
        seen = self.worker.kv(load.tokens)
        self.worker.half.capture(orders)
        return seen, self.worker.half.take_invalid_blocks()


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(("async_scheduling", "runner_v2"), [(True, False), (False, True), (True, True), (None, None)])
def test_a_rejected_fast_load_is_refilled_before_the_forward_pass(async_scheduling, runner_v2, poison):
    step = StepOfVllm(async_scheduling, runner_v2)
    step.worker.donor([1, 2, 3, *DOCUMENT])
    step.poison(poison)
    tokens = (7, 8, *DOCUMENT, 12)
    order = Load("r", tokens, tuple(range(20, 40)), 0, len(tokens), (Span("d", 3, 2, 80, generation=1),), "fast")
    seen, invalid = step.run(order)
    assert invalid == set(), "with this setting vLLM does not recover from invalid blocks"
    loaded = step.worker.half.take_report().loaded["r"]
    assert (loaded.reason, loaded.failed, loaded.reused_tokens) == ("validation_failed", False, 0)
    assert loaded.prefill_tokens == len(tokens)
    cold = step.worker.engine.cold(list(tokens), range(40, 60))
    for ours, theirs in zip(seen, cold, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert step.worker.half.donor_kv.holders == 0


def test_a_good_fast_load_is_one_pass_and_reports_no_invalid_block_with_async_scheduling():
    step = StepOfVllm(async_scheduling=True, use_v2_model_runner=True)
    step.worker.donor([1, 2, 3, *DOCUMENT])
    step.worker.engine.passes.clear()
    tokens = (7, 8, *DOCUMENT, 12)
    order = Load("r", tokens, tuple(range(20, 40)), 0, len(tokens), (Span("d", 3, 2, 80, generation=1),), "fast")
    _, invalid = step.run(order)
    loaded = step.worker.half.take_report().loaded["r"]
    assert (invalid, loaded.reason) == (set(), None)
    assert loaded.reused_tokens > 0
    assert sum(len(rows) > 1 for rows in step.worker.engine.passes) <= 2, "the pass and the canary's rows, no more"


def test_with_synchronous_scheduling_vllm_computes_a_rejected_fast_load_again():
    step = StepOfVllm(async_scheduling=False, use_v2_model_runner=False)
    step.worker.donor([1, 2, 3, *DOCUMENT])
    step.poison("wrong keys")
    tokens = (7, 8, *DOCUMENT, 12)
    order = Load("r", tokens, tuple(range(20, 40)), 0, len(tokens), (Span("d", 3, 2, 80, generation=1),), "fast")
    _, invalid = step.run(order)
    assert invalid == set(range(20, 26))


@pytest.mark.parametrize("queues", [False, True])
def test_blocks_that_could_not_be_filled_are_no_donor(queues):
    worker = Worker(queues=queues)
    worker.donor([1, 2, 3, *DOCUMENT])
    worker.engine.broken = True
    gap = list(range(200, 240))
    tokens = (*gap, *DOCUMENT)
    order = Load("r", tokens, tuple(range(20, 40)), 0, 120, (Span("d", 3, 40, 80, generation=1),), "fast")
    keep = Capture("r", 2, len(gap), tuple(range(20, 23)))
    orders = Orders(loads=[order], captures=[keep], served=["r"])
    worker.half.load(orders)
    worker.half.capture(orders)
    report = worker.half.take_report()
    assert report.loaded["r"].failed
    assert (report.captured, report.not_captured) == (set(), {("r", 2)})
    assert not worker.half.donor_kv.holds("r", 2)


def test_a_queued_load_that_is_refused_at_once_is_computed_at_once():
    worker = Worker(queues=True)
    tokens = (7, 8, *DOCUMENT)
    order = Load("r", tokens, tuple(range(20, 40)), 0, 82, (Span("gone", 3, 2, 80, generation=1),), "fast")
    worker.half.load(Orders(loads=[order]))
    loaded = worker.half.take_report().loaded["r"]
    assert (loaded.reason, loaded.failed) == ("stale", False)
    assert torch.equal(worker.kv(tokens)[2][0], worker.engine.cold(list(tokens), range(40, 60))[2][0])


def test_blocks_that_change_hands_wait_for_the_capture_that_reads_them(worker):
    waited = []

    class Arrival:
        def __init__(self, name):
            self.name = name

        def wait(self):
            waited.append(self.name)

        def query(self):
            return self.name == "arrived"

    worker.half._reading = {name: Arrival(name) for name in ("mine", "other", "arrived")}
    worker.half.before_step(Orders(freed=["mine", "never captured"]))
    assert waited == ["mine"]
    assert list(worker.half._reading) == ["other"]


def test_evicted_donors_are_told(worker):
    worker.half.donor_kv._books.budget["host"] = 2 * worker.donor(DOCUMENT).donor_bytes["host"] - 1
    worker.engine.cold(DOCUMENT, range(20))
    worker.half.capture(Orders(captures=[Capture("e", 2, 80, tuple(range(5)))]))
    report = worker.half.take_report()
    assert report.captured == {("e", 2)}
    assert report.evicted == {("d", 1)}


def transposed_writer(block, heads, dim):
    """As on a CPU: keys of a head transposed, then its values."""

    def write(k, v, cache, slots):
        for row, slot in enumerate(slots.tolist()):
            page = cache[slot // block].reshape(heads, 2, block * dim)
            page[:, 0].view(heads, dim, block)[:, :, slot % block] = k[row]
            page[:, 1].view(heads, block, dim)[:, slot % block] = v[row]

    return write


def tiled_writer(block, heads, dim):
    """No stride describes it: dimensions are stored in a scattered order."""
    order = torch.randperm(dim, generator=torch.Generator().manual_seed(0))

    def write(k, v, cache, slots):
        for row, slot in enumerate(slots.tolist()):
            page = cache[slot // block].view(2, block, heads, dim)
            page[0, slot % block], page[1, slot % block] = k[row][:, order], v[row][:, order]

    return write


def plain_writer(block, heads, dim):
    def write(k, v, cache, slots):
        for row, slot in enumerate(slots.tolist()):
            page = cache[slot // block].view(block, heads, 2, dim)
            page[slot % block, :, 0], page[slot % block, :, 1] = k[row], v[row]

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("writer", "kind"), [(plain_writer, KvLayout), (transposed_writer, StridedLayout), (tiled_writer, IndexedLayout)]
)
def test_the_layout_is_what_the_backends_writer_does(writer, kind, dtype):
    blocks, block, heads, dim = 5, 16, 3, 8
    caches = [torch.zeros(blocks, heads, block, 2 * dim, dtype=dtype) for _ in range(2)]
    write = writer(block, heads, dim)
    layout = probe_layout(caches, block, heads, dim, write)
    assert type(layout) is kind
    slots = torch.tensor([3, 70, 17, 40])
    k, v = torch.randn(2, 4, heads, dim).to(dtype)
    write(k, v, caches[1], slots)
    found_k, found_v = layout.gather(1, slots)
    assert torch.equal(found_k, k)
    assert torch.equal(found_v, v)
    layout.scatter(0, slots, k, v)
    assert torch.equal(caches[0], caches[1])
    assert (layout.layers, layout.slots, layout.kv_heads, layout.head_dim) == (2, 80, heads, dim)


def test_a_backend_that_changes_what_it_stores_is_refused():
    from semblend.errors import InputError

    def halved(k, v, cache, slots):
        plain_writer(16, 3, 8)(k / 2, v, cache, slots)

    with pytest.raises(InputError, match="changes or drops"):
        probe_layout([torch.zeros(5, 3, 16, 16)], 16, 3, 8, halved)


def test_metrics_cross_processes_as_plain_data():
    import json

    from prometheus_client import CollectorRegistry

    from semblend.confirm.metrics import PrometheusMetrics
    from semblend.plan.reuse_plan import DeclineReason

    tally, registry = MetricsTally(), CollectorRegistry()
    tally.lookup(0.001)
    tally.declined(DeclineReason.TOO_SHORT)
    tally.donors(2, 100, "host")
    first = tally.take()
    tally.donors(3, 150, "host")
    data = json.loads(json.dumps(merge(first, tally.take())))
    replay(data, PrometheusMetrics(registry))
    assert registry.get_sample_value("semblend_lookup_seconds_count") == 1
    assert registry.get_sample_value("semblend_declines_total", {"reason": "too_short"}) == 1
    assert registry.get_sample_value("semblend_donor_bytes", {"tier": "host"}) == 150
    assert tally.take() == {}


def test_versions_that_nobody_looked_at_are_named_so():
    assert support("0.32.0+cpu").evidence is VersionEvidence.RUN
    assert support("1.0.0").evidence is VersionEvidence.NONE
    assert all(row.note for row in SUPPORTED)


def test_a_renamed_argument_in_vllm_is_named(tmp_path):
    from semblend.integration.vllm.source_check import CONTRACT, missing

    assert len(missing(tmp_path)) == sum(not need.optional for need in CONTRACT), "an empty folder meets nothing"
    (tmp_path / "forward_context.py").write_text("def set_forward_context(attn_metadata, config, num_tokens): ...\n")
    (line,) = [line for line in missing.__wrapped__(tmp_path) if "set_forward_context" in line]
    assert line.endswith("lacks vllm_config, slot_mapping, skip_compiled (passes of our own)")
