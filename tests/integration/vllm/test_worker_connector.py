"""The worker's half without vLLM, over the fake engine: what it writes, what it refuses, what it reports."""

from __future__ import annotations

import errno
import logging
import pathlib
from dataclasses import replace

import pytest
import torch
from naive_engine import NaiveEngine

from semblend.errors import RankError
from semblend.integration.versions import VLLM, VersionEvidence
from semblend.integration.vllm.metrics import MetricsTally, merge, replay
from semblend.integration.vllm.orders import Capture, Load, Orders
from semblend.integration.vllm.worker import worker_connector
from semblend.integration.vllm.worker.cache_layout import IndexedLayout, StridedLayout, probe_layout
from semblend.integration.vllm.worker.worker_connector import FailureLog, RefusingConnector, WorkerConnector
from semblend.materialize.blend.quality import QualitySettings, Step
from semblend.materialize.contract import Capabilities, Rows, slots_of_blocks
from semblend.materialize.donors.directory import Publication
from semblend.materialize.gate.thresholds import Thresholds
from semblend.materialize.kv.layout import KvLayout
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

    def __init__(self, **settings):
        self.engine = Engine.make(slots=64 * BLOCK, vocabulary=1000)
        # Random weights make values whose mean is zero: where those are empty they are off by 1 at most.
        settings = {"deep_tolerance": 0.75, **settings}
        quality = QualitySettings(mode="fast", first_seam_tokens=4, seam_tokens=4, prefills=False, **settings)
        self.half = WorkerConnector(self.engine, BLOCK, quality, host_bytes=1 << 24)

    def donor(self, tokens, name="d"):
        self.engine.cold(tokens, range(20))
        blocks = tuple(range(-(-len(tokens) // BLOCK)))
        self.half.capture(Orders(captures=[Capture(name, 1, len(tokens), blocks)], served=[name]))
        self.half.before_step(Orders())
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


def test_an_answer_does_not_wait_for_its_capture_and_the_next_owner_of_its_blocks_does(worker):
    tokens = [1, 2, 3, *DOCUMENT]
    computed = worker.engine.cold(tokens, range(20))
    worker.half.capture(Orders(captures=[Capture("d", 1, len(tokens), tuple(range(6)))], served=["d"]))
    report = worker.half.take_report()
    assert (report.served, report.captured) == (["d"], set()), "the receipt goes out, and nobody finds the donor yet"
    assert not len(worker.half.donor_kv)

    worker.half.before_step(Orders(freed=["d"]))
    worker.engine.cold([9] * len(tokens), range(20))  # the blocks are another's now
    assert worker.half.take_report().captured == {("d", 1)}
    held = worker.half.donor_kv.acquire("d", 1)
    assert torch.equal(held.k, torch.stack([k for k, _ in computed]))
    assert torch.equal(held.v, torch.stack([v for _, v in computed]))


def test_a_capture_waits_until_the_first_token_was_read_unless_nothing_runs(worker):
    tokens, orders = [1, 2, 3, *DOCUMENT], Capture("d", 1, 83, tuple(range(6)))
    worker.engine.cold(tokens, range(20))
    for steps, busy in ((2, 40.0), (1, None)):
        worker.half.capture(Orders(captures=[orders]))
        taken = []
        for _ in range(steps):
            worker.half.before_step(Orders(work_ms=busy))
            worker.half.capture(Orders(work_ms=busy))
            report = worker.half.take_report()
            taken.append(report is not None and ("d", 1) in report.captured)
        assert taken == [False, True][-steps:]
        worker.half.donor_kv.drop_all()


def test_a_capture_whose_blocks_may_have_been_written_is_none(worker):
    worker.engine.cold(DOCUMENT, range(20))
    worker.half.capture(Orders(captures=[Capture("late", 1, 80, tuple(range(5)))]))
    worker.half.capture(Orders())  # the step after it, in which `before_step` has failed
    worker.half.before_step(Orders())
    report = worker.half.take_report()
    assert (report.captured, report.not_captured) == (set(), {("late", 1)})


def test_an_answer_is_copied_before_its_blocks_are_given_away_where_nobody_waits_for_that(worker):
    tokens, order = [1, 2, 3, *DOCUMENT], Capture("d+answer", 2, 83, tuple(range(6)))
    computed = worker.engine.cold(tokens, range(20))
    worker.half.before_step(Orders(work_ms=40.0, ended=[order]))
    assert worker.half.take_report().not_captured == {("d+answer", 2)}, "others decode: no step waits for the host"
    worker.half.before_step(Orders(ended=[order]))
    worker.engine.cold([9] * len(tokens), range(20))
    assert worker.half.take_report().captured == {("d+answer", 2)}
    held = worker.half.donor_kv.acquire("d+answer", 2)
    assert torch.equal(held.k, torch.stack([k for k, _ in computed]))


def test_an_answer_whose_step_breaks_before_its_copy_is_told_as_not_captured(worker, monkeypatch):
    order = Capture("d+answer", 2, 83, tuple(range(6)))
    monkeypatch.setattr(worker.half.donor_kv, "has_room_on_device", None)
    orders = Orders(work_ms=40.0, ended=[order])
    with pytest.raises(TypeError):
        worker.half.before_step(orders)
    worker.half.capture(orders)
    assert worker.half.take_report().not_captured == {("d+answer", 2)}


def test_moved_kv_is_exact_where_context_does_not_matter(worker):
    worker.donor([1, 2, 3, *DOCUMENT])
    tokens = [7, 8, 9, 10, 11, *DOCUMENT, 12]
    loaded = worker.load(tokens, [Span("d", 3, 5, len(DOCUMENT), generation=1)])
    cold = worker.engine.cold(tokens, range(40, 60))
    assert loaded.reason is None
    assert loaded.reused_tokens + loaded.recomputed_tokens == len(DOCUMENT)
    ours = worker.kv(tokens)
    torch.testing.assert_close(ours[0], cold[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(ours[1][0], cold[1][0], atol=1e-4), "above layer 0 it is an approximation"


def test_only_gaps_seams_the_end_and_a_sample_for_the_canary_are_computed(worker):
    worker.donor([1, 2, 3, *DOCUMENT])
    tokens = [7, 8, 9, 10, 11, *DOCUMENT, 12]
    worker.engine.passes.clear()
    worker.load(tokens, [Span("d", 3, 5, len(DOCUMENT), generation=1)])
    computed = worker.engine.passes[0]
    assert {*range(9), len(tokens) - 1} < set(computed)
    assert len(computed) == 10 + 8, "eight tokens to compare deep layers by"


@pytest.mark.parametrize("generation", [0, 2])
def test_a_replaced_donor_is_refused_and_the_prompt_left_to_vllm(worker, generation):
    worker.donor([1, 2, 3, *DOCUMENT])
    tokens = [7, 8, *DOCUMENT]
    loaded = worker.load(tokens, [Span("d", 3, 2, len(DOCUMENT), generation=generation)])
    assert loaded.reason == "stale"
    assert (loaded.reused_tokens, loaded.failed) == (0, True)
    assert worker.half.take_invalid_blocks() == set(range(20, 26))
    assert worker.half.take_finished() == {"r"}


def spoil_deep(held, change):
    """Layer 0 stays as it was."""
    for part in (held.k, held.v):
        part[1:] = change(part[1:])


POISONS = {
    "deep layers are noise": lambda held: spoil_deep(
        held, lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(0)) * x.std()
    ),
    "deep layers of other tokens": lambda held: spoil_deep(held, lambda x: x.roll(16, dims=1)),
    "deep layers are swapped": lambda held: spoil_deep(held, lambda x: x.flip(0)),
    "deep layers are empty": lambda held: spoil_deep(held, torch.zeros_like),
    "most of the deep layers is empty": lambda held: held.v[1:, 25:].zero_(),
    "the last layer is noise": lambda held: held.v[-1].normal_(generator=torch.Generator().manual_seed(0)),
    "deep layers are no numbers": lambda held: held.v[1:].fill_(float("nan")),
    "wrong keys": lambda held: held.k.copy_(torch.roll(held.k, 7, dims=1)),
    "noise": lambda held: held.v.normal_(generator=torch.Generator().manual_seed(0)),
    "numbers that are none": lambda held: held.v.fill_(float("nan")),
}


@pytest.mark.parametrize("mode", ["fast", "balanced"])
@pytest.mark.parametrize("poison", POISONS)
def test_the_verdict_on_wrong_donor_kv_and_its_invalid_blocks_come_with_the_end_of_the_load(worker, poison, mode):
    worker.donor([1, 2, 3, *DOCUMENT])
    held = worker.half.donor_kv.acquire("d", 1)
    POISONS[poison](held)
    worker.half.donor_kv.release(held)
    tokens = [7, 8, *range(500, 514), 9, *DOCUMENT, 12]
    loaded = worker.load(tokens, [Span("d", 3, 17, 80, generation=1)], exact=16, mode=mode)
    named = ("validation_failed",) if mode == "fast" else ("validation_failed", "quality_risk")  # by canary, or by gate
    assert loaded.reason in named
    assert (loaded.failed, loaded.reused_tokens) == (True, 0)
    assert worker.half.take_finished() == {"r"}
    assert worker.half.take_invalid_blocks() == set(range(21, 27)), "what was exact before is not called invalid"
    assert worker.half.donor_kv.holders == 0


@pytest.mark.parametrize("poison", [name for name in POISONS if name != "deep layers are no numbers"])  # they spread
@pytest.mark.parametrize("wrong", ["one", "two"])
def test_only_the_donor_whose_kv_was_wrong_is_named(worker, poison, wrong):
    other = list(range(300, 380))
    worker.donor([1, 2, 3, *DOCUMENT], "one")
    worker.donor([4, *other], "two")
    held = worker.half.donor_kv.acquire(wrong, 1)
    POISONS[poison](held)
    worker.half.donor_kv.release(held)
    spans = [Span("one", 3, 2, 40, generation=1), Span("two", 1, 42, 80, generation=1),
             Span("one", 43, 122, 40, generation=1)]  # fmt: skip
    loaded = worker.load([7, 8, *DOCUMENT[:40], *other, *DOCUMENT[40:], 12], spans)
    assert (loaded.reason, loaded.faulty_donors) == ("validation_failed", (wrong,))


def test_a_donor_that_is_too_short_is_named(worker):
    worker.donor([1, 2, 3, *DOCUMENT], "one")
    worker.donor([4, 5], "two")
    spans = [Span("one", 3, 2, 80, generation=1), Span("two", 0, 82, 9, generation=1)]
    loaded = worker.load([7, 8, *DOCUMENT, *range(9), 12], spans)
    assert (loaded.reason, loaded.faulty_donors) == ("validation_failed", ("two",))


def test_a_prompt_that_the_gate_wants_computed_is_left_to_vllm_with_what_is_exact():
    worker = Worker(thresholds=Thresholds(0.0, 0.0, 0.0), most_work=10.0, steps=(Step(1, "at_random"),))
    worker.donor([1, 2, 3, *DOCUMENT])
    tokens = [*range(200, 240), *DOCUMENT, *range(300, 330)]
    loaded = worker.load(tokens, [Span("d", 3, 40, 80, generation=1)], mode="balanced")
    assert (loaded.reason, loaded.failed, loaded.reused_tokens) == ("quality_risk", True, 0)
    assert loaded.work > 1, "the passes in vain, and the prefill that is to come"
    assert worker.half.take_invalid_blocks() == set(range(22, 30)), "40 exact tokens fill two blocks"
    context = slots_of_blocks(range(20, 22), BLOCK, 32)
    cold = worker.engine.cold(tokens, range(40, 60))
    for ours, theirs in zip(worker.engine.kv_in(context), cold, strict=True):
        torch.testing.assert_close(ours, tuple(part[:32] for part in theirs), rtol=1e-5, atol=1e-5)


def test_when_a_pass_fails_the_blocks_are_called_invalid(worker):
    worker.donor([1, 2, 3, *DOCUMENT])
    worker.engine.broken = True
    loaded = worker.load([7, 8, *DOCUMENT], [Span("d", 3, 2, 80, generation=1)])
    assert loaded.failed
    assert worker.half.take_invalid_blocks() == set(range(20, 26))
    assert worker.half.take_invalid_blocks() == set()
    assert worker.half.take_finished() == {"r"}


def test_a_load_that_could_not_be_ordered_is_refused(worker):
    loaded = worker.load([], [])
    assert (loaded.reason, loaded.failed) == ("error", True)
    assert worker.half.take_finished() == {"r"}


def make_loads(worker, count):
    worker.donor([1, 2, 3, *DOCUMENT])
    tokens = [7, 8, 9, *DOCUMENT, 12]
    spans = (Span("d", 3, 3, 80, generation=1),)
    return [Load(f"r{n}", tuple(tokens), tuple(range(20, 40)), 0, len(tokens), spans, "fast") for n in range(count)]


def test_a_step_does_its_share_of_the_loads_and_the_oldest_is_finished_first():
    worker = Worker(piece_ms=1e-6)
    loads = make_loads(worker, 3)
    worker.half.load(Orders(loads=loads, work_ms=1e-6))
    finished = [worker.half.take_finished()]
    while not finished[-1] & {"r2"}:
        worker.half.load(Orders(work_ms=1e-6))
        finished.append(worker.half.take_finished())
        assert len(finished) < 20
    assert len(finished) > 3, "a load takes more than one step, and none of them stands still"
    assert [name for one in finished for name in sorted(one)] == ["r0", "r1", "r2"]


def test_where_nothing_else_runs_a_load_is_finished_at_once_and_the_first_is_answered_first():
    worker = Worker(piece_ms=1e-6)
    worker.half.load(Orders(loads=make_loads(worker, 3), work_ms=None))
    finished = [worker.half.take_finished()]
    for _ in range(2):
        worker.half.load(Orders())
        finished.append(worker.half.take_finished())
    assert finished == [{"r0"}, {"r1"}, {"r2"}]


def test_rows_are_cut_into_pieces_only_where_others_have_work():
    passes = {}
    for work_ms in (1e-6, None):
        worker = Worker(piece_ms=1e-6)
        worker.donor([1, 2, 3, *DOCUMENT])
        tokens = [*range(500, 720), *DOCUMENT, 12]
        load = Load(
            "r", tuple(tokens), tuple(range(20, 40)), 0, len(tokens), (Span("d", 3, 220, 80, generation=1),), "fast"
        )
        worker.engine.passes.clear()
        worker.half.load(Orders(loads=[load], work_ms=work_ms))
        while not worker.half.take_finished():
            worker.half.load(Orders(work_ms=work_ms))
        passes[work_ms] = [rows for rows in worker.engine.passes if len(rows) > 20]
    assert len(passes[1e-6]) == 2
    assert len(passes[None]) == 1
    assert [row for rows in passes[1e-6] for row in rows] == passes[None][0], "cut, and nothing else"


def test_a_load_in_pieces_fills_the_same_blocks_as_one_at_once():
    at_once, in_pieces = Worker(), Worker(piece_ms=1e-6)
    for worker in (at_once, in_pieces):
        (load,) = make_loads(worker, 1)
        worker.half.load(Orders(loads=[load], work_ms=1e-6))
        while not worker.half.take_finished():
            worker.half.load(Orders(work_ms=1e-6))
    told, expected = (worker.half.take_report().loaded["r0"] for worker in (in_pieces, at_once))
    for name in ("reused_tokens", "recomputed_tokens", "exact_until", "canary", "reason"):
        assert getattr(told, name) == getattr(expected, name), name
    for ours, theirs in zip(in_pieces.kv(load.tokens), at_once.kv(load.tokens), strict=True):
        assert torch.equal(ours[0], theirs[0])


def test_a_cancelled_load_frees_its_donors_and_is_told_once():
    worker = Worker(piece_ms=1e-6)
    worker.half.load(Orders(loads=make_loads(worker, 2), work_ms=1e-6))
    assert worker.half.donor_kv.holders == 1
    worker.half.load(Orders(cancels=["r0", "r1", "never begun"], work_ms=1e-6))
    assert worker.half.donor_kv.holders == 0
    assert worker.half.take_finished() == {"r0", "r1"}
    worker.half.load(Orders(cancels=["r0"], work_ms=None))
    assert worker.half.take_finished() == set(), "vLLM has freed its blocks, and knows it no more"


def test_a_queue_that_breaks_leaves_no_request_waiting(worker, monkeypatch):
    def breaks(budget_ms):
        raise RuntimeError("the clock stood still")

    loads = make_loads(worker, 2)
    monkeypatch.setattr(worker.half._loads, "work", breaks)
    worker.half.load(Orders(loads=loads))
    assert worker.half.take_finished() == {"r0", "r1"}
    assert worker.half.take_invalid_blocks()
    report = worker.half.take_report()
    assert all(loaded.failed for loaded in report.loaded.values())
    assert any("stood still" in message for _, message, _ in report.errors)


def test_a_good_load_of_mode_fast_is_one_pass_and_the_canary(worker):
    worker.donor([1, 2, 3, *DOCUMENT])
    worker.engine.passes.clear()
    loaded = worker.load([7, 8, *DOCUMENT, 12], [Span("d", 3, 2, 80, generation=1)])
    assert (worker.half.take_invalid_blocks(), loaded.reason) == (set(), None)
    assert loaded.reused_tokens > 0
    assert sum(len(rows) > 1 for rows in worker.engine.passes) <= 2, "the pass and the canary's rows, no more"


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
    worker.half.before_step(Orders())
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
    tally.compared("documents", 0.5, 0.4, 0.6)
    tally.donors(2, 100, "host")
    first = tally.take()
    tally.donors(3, 150, "host")
    data = json.loads(json.dumps(merge(first, tally.take())))
    replay(data, PrometheusMetrics(registry))
    assert registry.get_sample_value("semblend_lookup_seconds_count") == 1
    assert registry.get_sample_value("semblend_declines_total", {"reason": "too_short"}) == 1
    assert registry.get_sample_value("semblend_donor_bytes", {"tier": "host"}) == 150
    assert tally.take() == {}
    low = {"kind": "documents", "bound": "low"}
    assert registry.get_sample_value("semblend_reuse_time_ratio", low) == 0.4


def test_versions_that_nobody_looked_at_are_named_so():
    assert VLLM.find("0.32.0+cpu").evidence is VersionEvidence.RUN
    assert VLLM.find("1.0.0").evidence is VersionEvidence.NONE
    assert all(row.note for row in VLLM.rows)


def test_a_renamed_argument_in_vllm_is_named(tmp_path):
    from semblend.integration.vllm.source_check import CONTRACT, missing

    assert len(missing(tmp_path)) == sum(not need.optional for need in CONTRACT), "an empty folder meets nothing"
    (tmp_path / "forward_context.py").write_text("def set_forward_context(attn_metadata, config, num_tokens): ...\n")
    (line,) = [line for line in missing.__wrapped__(tmp_path) if "set_forward_context" in line]
    assert line.endswith("lacks vllm_config, slot_mapping, skip_compiled (passes of our own)")


class Weights:
    """Weights that change when they are told to."""

    digest, changed, looks = "aa", False, 0

    def have_changed(self, look=None):
        self.looks += 1
        changed, self.changed = self.changed if look is None else look(), False
        return changed

    def begin_look(self):
        changed = self.changed
        return lambda: changed


@pytest.fixture
def weights(worker):
    worker.half._watch_weights = Weights
    worker.half.load(Orders())
    worker.half.take_report()
    return worker.half._weights


def test_new_weights_refuse_every_load_and_drop_every_donor(worker, weights):
    worker.donor([1, 2, 3, *DOCUMENT])
    tokens, span = [7, 8, *DOCUMENT, 12], Span("d", 3, 2, len(DOCUMENT), generation=1)
    weights.changed, weights.digest = True, "bb"
    order = Load("r", tuple(tokens), tuple(range(20, 40)), 0, len(tokens), (span,), "fast")
    worker.half.load(Orders(loads=[order]))
    report = worker.half.take_report()
    assert (report.weights, report.loaded["r"].reason, report.loaded["r"].failed) == ("bb", "stale", True)
    assert worker.half.take_invalid_blocks() == set(range(20, 26))
    assert worker.half.take_finished() == {"r"}
    assert not worker.half.donor_kv.holds("d", 1)
    # A step that was scheduled before anybody heard of it: its donor is gone too.
    assert worker.load(tokens, [span]).reason == "stale"


def test_weights_are_looked_at_when_a_load_ends_and_at_no_other_time(worker, weights):
    worker.donor([1, 2, 3, *DOCUMENT])
    worker.half.load(Orders())
    assert weights.looks == 0
    assert worker.load([7, 8, *DOCUMENT, 12], [Span("d", 3, 2, len(DOCUMENT), generation=1)]).reason is None
    assert weights.looks == 1


def test_a_load_in_pieces_costs_one_look_and_is_refused_whenever_the_weights_changed():
    for change_in in (0, 1, None):
        worker = Worker(piece_ms=1e-6)
        worker.half._watch_weights = Weights
        (load,) = make_loads(worker, 1)
        pieces = 0
        while not worker.half.take_finished():
            if pieces == change_in:
                worker.half._weights.changed = True
            worker.half.load(Orders(loads=[load] if not pieces else [], work_ms=1e-6))
            pieces += 1
        assert pieces > 1
        assert worker.half._weights.looks == 1
        assert worker.half.take_report().loaded["r0"].reason == (None if change_in is None else "stale")


def test_a_look_that_fails_refuses_the_load_and_raises_nothing(worker, weights):
    worker.donor([1, 2, 3, *DOCUMENT])
    weights.have_changed = lambda look: 1 / 0
    loaded = worker.load([7, 8, *DOCUMENT, 12], [Span("d", 3, 2, len(DOCUMENT), generation=1)])
    assert (loaded.reason, loaded.reused_tokens) == ("stale", 0)


def test_weights_that_were_told_at_the_start_are_told_again_only_where_they_have_changed(worker):
    worker.half._watch_weights = Weights
    assert worker.half.tell_weights() == "aa"
    worker.half.load(Orders())
    assert worker.half.take_report() is None
    other = Worker()
    other.half._watch_weights = Weights
    assert other.half.tell_weights() == "aa"
    other.half._weights.changed, other.half._weights.digest = True, "bb"
    other.half.load(Orders())
    assert other.half.take_report().weights == "bb"


def test_the_weights_are_named_before_the_first_step_and_not_again():
    worker = Worker()
    worker.half._watch_weights = Weights
    worker.half.load(Orders())
    assert worker.half.take_report().weights == "aa"
    worker.half.load(Orders())
    assert worker.half.take_report() is None


def test_weights_that_cannot_be_looked_at_make_no_donors():
    worker = Worker()
    worker.half._watch_weights = lambda: 1 / 0
    report = worker.donor([1, 2, 3, *DOCUMENT])
    assert (report.captured, report.not_captured) == (set(), {("d", 1)})
    assert "ZeroDivisionError" in report.errors[0][1]


def test_a_pinned_donor_is_held_until_it_is_unpinned_or_dropped(worker):
    worker.donor([1, 2, 3, *DOCUMENT])
    books = worker.half.donor_kv._books
    worker.half.load(Orders(pins=[("d", 1, True), ("unknown", 1, True), ("d", 2, False)]))
    assert not books.held, "the last word counts"
    worker.half.load(Orders(pins=[("d", 1, True)]))
    assert len(books.held) == 1
    worker.half.load(Orders(pins=[("d", 1, True)]))
    assert [entry.refs for entry in books.held.values()] == [1]
    worker.half.load(Orders(drops=[("d", 1)]))
    assert not books.held
    assert not worker.half.donor_kv.holds("d", 1)


# -- faults: whatever fails inside a hook, vLLM does not hear of it

TARGET = [7, 8, *range(500, 514), 9, *DOCUMENT, 12]


class Arrives:
    """A copy that a capture has queued."""

    def wait(self):
        """It is there."""

    def query(self):
        return True


class SteadyWeights:
    """A model's weights that never change."""

    digest = "w"

    def have_changed(self, look=None):
        return False

    def begin_look(self):
        return lambda: False


class Busy(Worker):
    """A worker that holds a donor, a pinned one, and a load under way, so that every hook has something to do."""

    def __init__(self):
        self.engine = Engine.make(slots=64 * BLOCK, vocabulary=1000)
        quality = QualitySettings(mode="fast", first_seam_tokens=4, seam_tokens=4, prefills=False)
        self.half = WorkerConnector(self.engine, BLOCK, quality, host_bytes=1 << 24, watch_weights=SteadyWeights)
        self.donor([1, 2, 3, *DOCUMENT])
        self.donor([4, 5, 6, *DOCUMENT], name="pinned")
        self.donor([9, 5, 6, *DOCUMENT], name="forgotten")
        self.half.load(Orders(pins=[("pinned", 1, True)]))
        self.half._loads.add(self.order("under way"))
        self.half._reading["freed"] = Arrives()
        self.half._reading["copied"] = Arrives()
        self.half.take_report()

    def order(self, name):
        span = Span("d", 3, 17, len(DOCUMENT), generation=1)
        return Load(name, tuple(TARGET), tuple(range(20, 40)), 16, len(TARGET), (span,), "fast")

    def step(self):
        """Everything that vLLM asks of a worker in a step, with every kind of order; the report."""
        orders = Orders(
            loads=[self.order("r")],
            cancels=["under way"],
            captures=[Capture("new", 1, 83, tuple(range(6)), Publication("new", 1, "key", "digest"))],
            drops=[("forgotten", 1)],
            served=["new"],
            freed=["freed"],
            pins=[("pinned", 1, False)],
            publications=[Publication("pinned", 1, "key", "digest")],
            heirs=[(("forgotten", 1), ("pinned", 1))],
            kept_first=[("pinned", 1, 600.0)],
            ended=[Capture("ended", 1, 83, tuple(range(6)))],
        )
        self.half.before_step(orders)
        self.half.load(orders)
        self.half.capture(orders)
        self.half.before_step(Orders())
        return orders, self.half.take_report()


def fail(*_args, **_named):
    raise OSError(errno.EIO, "the disk is gone")


PIECES = {
    "waiting for a copy": lambda w: {"wait": fail},
    "looking at copies": lambda w: {"query": fail},
    "looking at the weights": lambda w: (w.half._weights, "have_changed"),
    "naming the weights": lambda w: (w.half, "_name_weights"),
    "looking a donor up": lambda w: (w.half.donor_kv, "holds"),
    "dropping a donor": lambda w: (w.half.donor_kv, "drop"),
    "unpinning": lambda w: (w.half.donor_kv, "release"),
    "holding a donor": lambda w: (w.half.donor_kv, "acquire"),
    "cancelling": lambda w: (w.half._loads, "cancel"),
    "queueing a load": lambda w: (w.half._loads, "add"),
    "working on loads": lambda w: (w.half._loads, "work"),
    "placing a load": lambda w: (w.half, "_place"),
    "making a blender": lambda w: (w.half, "_get_blender"),
    "keeping donors": lambda w: (w.half, "_keep_donors"),
    "computing": lambda w: (w.engine, "forward"),
    "copying KV out": lambda w: (w.half.donor_kv, "capture"),
    "handing to the publisher": lambda w: (w.half._publisher, "submit"),
    "counting": lambda w: (type(w.half.donor_kv), "used_bytes"),
    "telling a verdict": lambda w: (worker_connector, "describe_outcome"),
}


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_that_fails_costs_reuse_and_never_a_step(piece, monkeypatch):
    worker = Busy()
    where = PIECES[piece](worker)
    if isinstance(where, dict):
        for arrival in worker.half._reading.values():
            for name, broken in where.items():
                monkeypatch.setattr(arrival, name, broken, raising=False)
    elif where[1] == "used_bytes":
        monkeypatch.setattr(*where, property(fail))
    else:
        monkeypatch.setattr(*where, fail)
    orders, report = worker.step()
    monkeypatch.undo()
    if piece == "cancelling":  # what could not be given up is done first
        assert "under way" in report.loaded
        worker.half.load(Orders())
        report.loaded |= worker.half.take_report().loaded

    assert "r" in worker.half.take_finished(), "vLLM waits for every load that it has ordered"
    loaded = report.loaded["r"]
    assert loaded.reused_tokens + loaded.recomputed_tokens <= len(TARGET)
    if loaded.failed:
        assert worker.half.take_invalid_blocks() >= set(range(21, 27)), "vLLM computes them"
    assert report.served == ["new"]
    assert ("new", 1) in report.captured | report.not_captured
    assert not report.captured & report.not_captured
    assert ("ended", 1) in report.captured | report.not_captured
    assert not any((orders.loads, orders.cancels, orders.captures, orders.served, orders.freed, orders.ended))
    assert sum(worker.half.failures.counts.values()) >= 1 or loaded.failed or piece == "naming the weights"

    if piece == "looking at the weights":  # who cannot look has to take them for others: the donors are gone
        assert loaded.reason == "stale"
        return
    worker.half.load(Orders(loads=[worker.order("later")]))
    later = worker.half.take_report().loaded["later"]
    assert later.reason is None, "the next load is as if nothing had been"
    assert later.reused_tokens > 0


@pytest.mark.parametrize("part", ["_publisher", "donor_kv"])
def test_a_part_that_cannot_be_closed_does_not_keep_the_engine_from_ending(part, monkeypatch):
    worker = Busy()
    monkeypatch.setattr(getattr(worker.half, part), "close", fail)
    worker.half.close()
    assert sum(worker.half.failures.counts.values()) == 1


def test_a_cancelled_load_is_over_for_vllm_though_its_donors_cannot_be_let_go(monkeypatch):
    worker = Busy()

    def hold_forever(load):
        try:
            yield
        finally:
            fail()

    monkeypatch.setattr(worker.half._loads, "_begin", hold_forever)
    worker.half._loads.abandon()
    worker.half._loads.add(worker.order("stuck"))
    next(worker.half._loads._take_turn().pieces)
    worker.half.load(Orders(cancels=["stuck"]))
    assert "stuck" in worker.half.take_finished()
    assert worker.half.take_report().errors == [("cancel", "OSError: [Errno 5] the disk is gone", "stuck")]


def test_a_file_that_cannot_be_removed_drops_its_donor_all_the_same(tmp_path, monkeypatch, caplog):
    engine = Engine.make(slots=64 * BLOCK, vocabulary=1000)
    engine.cold([1, 2, 3, *DOCUMENT], range(20))
    one = 2 * engine.layout.layers * 83 * 2 * 8 * 4
    quality = QualitySettings(mode="fast", prefills=False)
    half = WorkerConnector(
        engine, BLOCK, quality, host_bytes=int(one * 1.5), disk_path=str(tmp_path), disk_bytes=1 << 24
    )
    for name in ("a", "b"):
        half.capture(Orders(captures=[Capture(name, 1, 83, tuple(range(6)))], served=[name]))
        half.copy_out()
        half.donor_kv.flush()
    assert half.donor_kv.used_bytes["disk"] > 0

    def is_read_only(self, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr(pathlib.Path, "unlink", is_read_only)
        for _ in range(3):
            half.load(Orders(drops=[("a", 1), ("b", 1)]))
            half.donor_kv.flush()
    assert not half.donor_kv.holds("a", 1)
    assert half.donor_kv.used_bytes["disk"] == 0
    assert sum("cannot be removed" in line.message for line in caplog.records) == 1, "one line, not one a step"
    half.load(Orders(drops=[("c", 1)]))
    half.donor_kv.drop("nobody")
    half.donor_kv.flush()
    assert not list(tmp_path.rglob("*.kv")), "it is tried again"


def test_a_failure_that_comes_again_and_again_is_counted_and_logged_once_a_minute(caplog):
    now = [0.0]
    failures = FailureLog(clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for step in range(1000):
            now[0] = step * 0.1
            failures.note("load", OSError("no"), "")
    assert failures.counts == {"load": 1000}
    assert [line.message for line in caplog.records] == [
        "SemBlend: load failed for a step: OSError: no",
        "SemBlend: load failed for a step: OSError: no (600 times since the last line)",
    ]


def test_without_a_worker_connector_a_load_is_refused_and_a_capture_is_none():
    half = RefusingConnector(BLOCK)
    span = Span("d", 3, 17, len(DOCUMENT), generation=1)
    load = Load("r", tuple(TARGET), tuple(range(20, 40)), 16, len(TARGET), (span,), "fast")
    order = Capture("new", 1, 83, tuple(range(6)))
    orders = Orders(loads=[load], captures=[order], ended=[replace(order, generation=2)], served=["new"])
    half.before_step(orders)
    half.load(orders)
    half.capture(orders)
    report = half.take_report()
    assert (report.loaded["r"].reason, report.loaded["r"].failed) == ("error", True)
    assert (report.not_captured, report.captured, report.served) == ({("new", 1), ("new", 2)}, set(), ["new"])
    assert half.take_finished() == {"r"}
    assert half.take_invalid_blocks() == set(range(21, 27))
    assert half.take_report() is None


class RankOfTwo(Engine):
    """One rank whose neighbour says what it says."""

    def agree(self, values, how):
        return values.float()


def test_on_one_of_several_ranks_a_failure_in_a_pass_reaches_the_engine():
    worker = Worker()
    worker.donor([1, 2, 3, *DOCUMENT])
    engine = RankOfTwo(**vars(worker.engine))
    engine.capabilities = Capabilities(ranks=2, rank=1)
    quality = QualitySettings(mode="fast", first_seam_tokens=4, seam_tokens=4, prefills=False)
    half = WorkerConnector(engine, BLOCK, quality, host_bytes=1 << 24)
    half.capture(Orders(captures=[Capture("d", 1, 83, tuple(range(6)))], served=["d"]))
    half.before_step(Orders())
    engine.broken = True
    span = Span("d", 3, 17, len(DOCUMENT), generation=1)
    load = Load("r", tuple(TARGET), tuple(range(20, 40)), 16, len(TARGET), (span,), "fast")
    with pytest.raises(RankError, match=r"rank 1 of 2 failed .* RuntimeError: broken on purpose") as raised:
        half.load(Orders(loads=[load]))
    assert raised.value.hint
