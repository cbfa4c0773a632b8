"""The scheduler's half without vLLM: claims, books, receipts, over stand-ins for requests and steps."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import zlib
from itertools import takewhile
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend import Namespace, SemBlend, SemBlendConfig
from semblend.confirm.sinks import MemorySink
from semblend.integration.vllm.orders import Report
from semblend.integration.vllm.scheduler.admin import DonorAdmin
from semblend.integration.vllm.scheduler.prefix_locks import restore, salt
from semblend.integration.vllm.scheduler.records import EngineFacts
from semblend.integration.vllm.scheduler.scheduler_connector import SchedulerConnector
from semblend.integration.vllm.scheduler.worker_donors import HeldPrefixes, ResetWatch
from semblend.integration.vllm.settings import ConnectorSettings
from semblend.plan.reuse_plan import DeclineReason
from semblend.plan.times import Timed, Work
from semblend.session.session import LoadResult, State

BLOCK = 16
DOCUMENT = list(range(1000, 1200))


class FakeRequest:
    """What the half reads of vLLM's request; hashes are made from the ones before, as there."""

    def __init__(self, name, tokens, salt=None, **rest):
        self.request_id, self.prompt_token_ids, self.cache_salt = name, list(tokens), salt
        self.lora_request = self.prompt_embeds = self.pooling_params = self.kv_transfer_params = None
        self.mm_features, self.arrival_time = [], 0.0
        self.skip_reading_prefix_cache = self.resumable = False
        self.said, self.num_output_tokens = [], 1  # vLLM takes tokens in before it hands us a step's report
        vars(self).update(rest)
        self.block_hashes = []
        self._block_hasher = self.hashed
        self.update_block_hashes()

    @staticmethod
    def hashed(self):
        tokens, made, chain = self.prompt_token_ids + self.said, [], list(self.block_hashes)
        for start in range(len(chain) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
            parent = chain[-1] if chain else b""
            chain.append(hashlib.sha256(repr((parent, tokens[start : start + BLOCK])).encode()).digest())
            made.append(chain[-1])
        return made

    def update_block_hashes(self):
        self.block_hashes.extend(self._block_hasher(self))

    def say(self, count):
        self.said += range(5000, 5000 + count)
        self.update_block_hashes()

    @property
    def all_token_ids(self):
        return self.prompt_token_ids + self.said

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    @property
    def num_computed_tokens(self):
        return self.num_tokens  # as where a step is scheduled ahead: the last token's KV is not there yet


class World:
    """A scheduler's half and the calls that vLLM makes to it."""

    def __init__(self, refusal=None, **config):
        self.sink = MemorySink()
        config = {
            "quality": "fast",
            "metrics": False,
            "embedder": "none",
            "learn_costs": False,
            "control_share": 0.0,
        } | config
        settings = ConnectorSettings(config=SemBlendConfig(**config))
        semblend = SemBlend(settings.config, sinks=[self.sink])
        facts = EngineFacts("0.32.0", Namespace(model="m"), BLOCK, BLOCK, refusal)
        self.half = SchedulerConnector(facts, settings, semblend, clock=lambda: 1.0)
        self.blocks = 0
        self.requests = {}

    def step(self, new=(), cached=(), preempted=()):
        """``new``: (request, computed, scheduled); ``cached``: (request id, computed, scheduled, new block ids)."""
        scheduled = {request.request_id: count for request, _, count in new} | {row[0]: row[2] for row in cached}
        return self.half.build_orders(
            SimpleNamespace(
                scheduled_new_reqs=[
                    SimpleNamespace(req_id=request.request_id, num_computed_tokens=computed)
                    for request, computed, _ in new
                ],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[row[0] for row in cached],
                    num_computed_tokens=[row[1] for row in cached],
                    new_block_ids=[(list(row[3]),) if row[3] else None for row in cached],
                    resumed_req_ids=set(),
                ),
                num_scheduled_tokens=scheduled,
                preempted_req_ids=set(preempted),
            )
        )

    def admit(self, request, local=0, tokens=None):
        """From the waiting queue into a step; returns the claim and the step's orders: to load it, or to compute it."""
        claimed = self.half.count_matched(request, local)
        computed = local + claimed
        count = 0 if claimed else len(request.prompt_token_ids) - computed if tokens is None else tokens
        self.allocate(request, computed + count, claimed)
        return claimed, self.step(new=[] if claimed else [(request, computed, count)])

    def allocate(self, request, tokens, claimed=0):
        needed = -(-tokens // BLOCK)
        self.half.note_allocated(request, list(range(self.blocks, self.blocks + needed)), claimed)
        self.blocks += needed
        self.requests[request.request_id] = request

    def loaded(self, orders, **loaded):
        """The worker has done the loads; a load with a reason was refused."""
        report = Report()
        for load in orders.loads:
            reused = sum(span.length for span in load.spans)
            told = {"reused_tokens": reused, **loaded}
            is_exact = told.pop("exact", False)
            told.setdefault("failed", "reason" in told)
            if load.spans and not told["failed"] and not is_exact:
                told.setdefault("exact_until", load.spans[0].target_start)
            report.loaded[load.request_id] = LoadResult(**told)
        self.half.note_report(report)

    def schedule(self, load):
        """A request whose load is over is computed: what is behind the claim, or behind what was exact before."""
        request = self.requests[load.request_id]
        record = self.half._records[load.request_id]
        computed = load.exact_tokens if record.state is State.COLD else load.claim_end
        if record.state is State.COLD and not computed:
            assert self.half.count_matched(request, 0) == 0, "a refused request is not claimed again"
        self.allocate(request, len(request.prompt_token_ids))
        return self.step(new=[(request, computed, len(request.prompt_token_ids) - computed)])

    def served(self, orders, **loaded):
        """The worker did all of it, and what was loaded was computed to its end; the last step's orders."""
        self.loaded(orders, **loaded)
        for load in orders.loads:
            orders = self.schedule(load)
        self.told(orders)
        return orders

    def told(self, orders):
        report = Report(served=list(orders.served))
        report.captured = {(c.donor_id, c.generation) for c in orders.captures}
        self.half.note_report(report)

    def donor(self, name="donor", document=DOCUMENT, *, lead=40, **rest):
        request = FakeRequest(name, [*range(lead), *document], **rest)
        _, orders = self.admit(request)
        self.served(orders)
        self.half.finish(name)
        return request

    def errors(self):
        return [event for event in self.sink.events if event.kind == "error"]


@pytest.fixture
def world():
    return World()


def target(name="target", lead=17, tail=10, question=None, **rest):
    """Prompts of other names ask other questions."""
    last = zlib.crc32((question or name).encode()) % 1_000_000_000 + 20_000
    return FakeRequest(name, [*range(2000, 2000 + lead), *DOCUMENT, *range(3000, 2999 + tail), last], **rest)


def test_a_prompt_becomes_a_donor_only_when_the_worker_has_its_kv(world):
    request = FakeRequest("donor", [*range(40), *DOCUMENT])
    _, orders = world.admit(request)
    assert [capture.tokens for capture in orders.captures] == [240]
    assert world.half.count_matched(target("early"), 0) == 0
    world.served(orders)
    assert world.half.count_matched(target(), 0) == 226


def test_a_donor_that_one_rank_could_not_keep_is_not_registered(world):
    _, orders = world.admit(FakeRequest("donor", [*range(40), *DOCUMENT]))
    key = (orders.captures[0].donor_id, orders.captures[0].generation)
    world.half.note_report(Report(captured={key}).merge(Report(not_captured={key})))
    assert world.half.semblend.donors() == ()


def test_a_claim_ends_before_the_last_token_or_in_mode_fast_before_a_long_rest(world):
    world.donor()
    asked = {"semblend": {"quality": "balanced"}}
    assert world.half.count_matched(target("fast"), 0) == 17 + 200 + 10 - 1
    assert world.half.count_matched(target("balanced", kv_transfer_params=asked), 0) == 17 + 200 + 10 - 1
    assert world.half.count_matched(target("long", tail=129), 0) == 17 + 200 + 129 - 1
    assert world.half.count_matched(target("longer", tail=130), 0) == 17 + 200


def test_the_order_to_load_names_the_blocks_and_the_workers_generation(world):
    world.donor("other")
    world.donor("donor")
    _, orders = world.admit(target())
    (load,) = orders.loads
    assert (load.exact_tokens, load.claim_end, len(load.block_ids)) == (0, 226, -(-227 // BLOCK))
    assert [span.generation for span in load.spans] == [world.half.donors.find_generation(load.spans[0].donor_id)]


def test_exact_tokens_are_not_claimed_again(world):
    world.donor()
    request = target()
    claimed, orders = world.admit(request, local=64)
    assert claimed == 226 - 64
    assert orders.loads[0].spans[0].target_start == 64


def test_reuse_is_counted_from_the_workers_word_only(world):
    world.donor()
    request = target()
    _, orders = world.admit(request)
    world.served(orders, reused_tokens=150, recomputed_tokens=50)
    receipt = world.half.finish("target")
    assert (receipt.reused_tokens, receipt.recomputed_tokens, receipt.prefill_tokens) == (150, 50, 27)
    assert world.half.semblend.totals().tokens["reused"] == 150


def test_a_request_that_ends_before_the_report_gets_its_receipt_when_it_comes(world):
    world.donor()
    _, orders = world.admit(target())
    world.loaded(orders)
    orders = world.schedule(orders.loads[0])
    assert world.half.finish("target") is None
    world.told(orders)
    assert world.half.semblend.totals().tokens["reused"] == 200
    assert world.half._records == {}


def test_a_backends_decline_keeps_its_reason(world):
    world.donor()
    _, orders = world.admit(target())
    world.served(orders, reused_tokens=0, reason=DeclineReason.STALE, detail="gone")
    receipt = world.half.finish("target")
    assert (receipt.outcome, receipt.reason) == ("backend_declined_reuse", "stale")


def test_a_reused_prompt_is_never_captured(world):
    world.donor()
    _, orders = world.admit(target())
    orders = world.served(orders)
    assert orders.served == ["target"]
    assert orders.captures == []


def test_hashes_from_the_first_approximate_block_on_are_the_requests_own(world):
    world.donor()
    request, twin = target(lead=40), target("twin", lead=40)
    world.admit(request)
    request.say(40)
    twin.say(40)
    same = [ours == theirs for ours, theirs in zip(request.block_hashes, twin.block_hashes, strict=True)]
    assert same == [True] * (40 // BLOCK) + [False] * (len(same) - 40 // BLOCK)


def test_a_block_that_fills_up_later_is_salted_too():
    """The approximate tokens begin in the last, unfinished block of the prompt: its hash does not exist yet."""
    request, twin = (FakeRequest(name, range(40)) for name in ("target", "twin"))
    salted = salt(request, 2)
    request.say(40)
    twin.say(40)
    assert request.block_hashes[:2] == twin.block_hashes[:2]
    assert len(request.block_hashes) == len(twin.block_hashes) == 5
    assert not set(request.block_hashes[2:]) & set(twin.block_hashes[2:])
    restore(request, salted)
    assert request.block_hashes == twin.block_hashes
    request.say(16)
    twin.say(16)
    assert request.block_hashes == twin.block_hashes


def test_a_request_that_gets_no_blocks_keeps_its_hashes_holds_no_donor_and_asks_no_second_lookup(world):
    world.donor()
    request = target()
    before = list(request.block_hashes)
    for _ in range(3):
        assert world.half.count_matched(request, 0) == 226
        world.step()
        assert request.block_hashes == before
        assert world.half.semblend._claims == {}
    lookups = [event for event in world.sink.events if event.kind == "lookup" and event.request_id == "target"]
    assert len(lookups) == 1


def test_a_waiting_request_looks_again_when_a_new_donor_is_there(world):
    waiting = target("waiting")
    assert world.half.count_matched(waiting, 0) == 0
    world.donor()
    assert world.half.count_matched(waiting, 0) == 226


def test_mode_fast_leaves_a_span_behind_a_long_gap_to_vllm(world):
    world.donor()
    far = [*range(3000, 3000 + 40 * BLOCK)]
    world.donor("other", document := [*range(7000, 7100)])
    target = FakeRequest("target", [7, *DOCUMENT, *far, *document, 8, 9])
    claimed, orders = world.admit(target)
    assert claimed == 1 + len(DOCUMENT)
    assert [span.donor_id for span in orders.loads[0].spans] == ["donor"]


def test_how_long_passes_take_on_this_machine_is_told_by_the_workers_and_declines_small_reuses():
    world = World(learn_costs=True)
    world.donor()
    few, many = Timed(Work.of_prefill(32), 6.0), Timed(Work.of_prefill(4096), 40.0)
    world.half.note_report(Report(times=(few, many, Timed(Work(0, 0, 4096), 3.0))))
    claimed, _ = world.admit(FakeRequest("target", [7, *DOCUMENT, 8, 9]))
    assert claimed == 0
    decision = world.half._records["target"].decision
    assert decision.reason is DeclineReason.BELOW_BREAK_EVEN
    assert re.match(r"reuse is expected to take [\d.]+ ms, a prefill [\d.]+ ms", decision.detail)


def test_a_preempted_request_starts_over_without_donors_under_its_own_hashes(world):
    world.donor()
    request = target()
    before = list(request.block_hashes)
    _, orders = world.admit(request)
    world.served(orders)
    assert request.block_hashes != before
    world.step(preempted=["target"])
    assert request.block_hashes == before
    assert world.half.count_matched(request, 0) == 0
    assert world.half.semblend._claims == {}


def test_chunks_of_a_long_prompt_are_captured_with_all_their_blocks(world):
    request = FakeRequest("donor", [*range(40), *DOCUMENT])
    _, first = world.admit(request, tokens=100)
    assert first.captures == []
    second = world.step(cached=[("donor", 100, 140, range(70, 78))])
    (capture,) = second.captures
    assert capture.block_ids == (*range(7), *range(70, 78))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("lora_request", SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="p")),
        ("mm_features", ["image"]),
        ("prompt_embeds", np.ones((2, 3), np.float32)),  # as a tensor, it cannot be compared with one value
        ("pooling_params", "embed"),
        ("skip_reading_prefix_cache", True),
        ("resumable", True),
    ],
)
def test_kinds_of_requests_that_we_cannot_serve_are_declined_with_a_reason(world, kind, value):
    world.donor()
    claimed, orders = world.admit(target(**{kind: value}))
    assert claimed == 0
    assert orders.captures == []
    world.served(orders)
    assert world.half.finish("target").reason == "unsupported_mode"


@pytest.mark.parametrize("flag", ["do_remote_decode", "do_remote_prefill", "disagg_spec"])
def test_a_request_between_prefill_and_decode_engines_is_never_claimed_and_never_a_donor(world, flag):
    world.donor()
    value = {"req_id": "r", "receiver_host": "h"} if flag == "disagg_spec" else True
    request = target(kv_transfer_params={flag: value, "remote_engine_id": "e"})
    claimed, orders = world.admit(request)
    assert (claimed, orders.loads, orders.captures) == (0, [], [])
    world.served(orders)
    receipt = world.half.finish("target")
    assert (receipt.outcome, receipt.reason) == ("cold_fallback", "unsupported_mode")
    assert flag in receipt.detail
    assert [donor.donor_id for donor in world.half.semblend.donors()] == ["donor"]


@pytest.mark.parametrize("left", [False, True])
def test_kv_of_another_engine_is_no_donor_though_its_connector_clears_the_flag(world, left):
    request = target(kv_transfer_params={"do_remote_prefill": True})
    if left:
        world.half.leave_to_another(request, 100)
    else:
        assert world.half.count_matched(request, 0) == 0
    request.kv_transfer_params["do_remote_prefill"] = False  # as NIXL and Mooncake do when blocks are allocated
    world.half.note_allocated(request, list(range(15)), 0)
    orders = world.step(new=[(request, 0, 227)])
    assert orders.served == ["target"]
    assert orders.captures == []


@pytest.mark.parametrize("off", [{"do_remote_decode": False}, {"do_remote_prefill": False}, {"disagg_spec": None}])
def test_a_flag_that_is_off_declines_nothing(world, off):
    world.donor()
    assert world.half.count_matched(target(kv_transfer_params=off), 0) == 226


def test_an_engine_that_we_cannot_serve_keeps_no_donors():
    world = World(refusal="tensor parallel")
    world.donor()
    assert world.half.semblend.donors() == ()
    assert world.half.count_matched(target(), 0) == 0


class Unread(list):
    """Token ids that nobody may look at."""

    def __iter__(self):
        raise AssertionError("a request was converted")

    __getitem__ = __iter__


@pytest.mark.parametrize("left", [False, True], ids=["asked", "left to another"])
def test_an_engine_that_we_cannot_serve_never_reads_a_prompt_and_its_receipt_says_why(left):
    world = World(refusal="tensor parallel")
    request = target(num_output_tokens=3)
    request.prompt_token_ids = Unread(request.prompt_token_ids)
    if left:
        world.half.leave_to_another(request, 64)
    else:
        assert world.half.count_matched(request, 64) == 0
    world.half.note_allocated(request, list(range(15)), 0)
    orders = world.step(new=[(request, 64, 163)])
    assert (orders.served, orders.captures, orders.loads) == ([], [], [])
    assert world.half._records == {}
    receipt = world.half.finish_refused(request)
    assert (receipt.reason, receipt.detail) == ("unsupported_mode", "tensor parallel")
    assert (receipt.exact_tokens, receipt.prefill_tokens) == (64, 163)
    assert world.half._refused == {}
    assert world.half.semblend.totals().tokens["prefill"] == 163


def test_an_aborted_request_of_an_engine_that_we_cannot_serve_leaves_nothing():
    world = World(refusal="tensor parallel")
    request = target(num_output_tokens=0)
    world.half.count_matched(request, 0)
    assert world.half.finish_refused(request) is None
    assert world.half._refused == {}


@pytest.mark.parametrize(("donor", "asking"), [("a", "b"), ("a", None), (None, "b")])
def test_a_donor_never_crosses_a_cache_salt(world, donor, asking):
    world.donor(salt=donor)
    assert world.half.count_matched(target("foreign", salt=asking), 0) == 0
    assert world.half.count_matched(target("own", salt=donor), 0) > 0


def test_discovery_only_claims_nothing_and_still_tells():
    world = World(discovery_only=True)
    world.donor()
    request = target()
    before = list(request.block_hashes)
    claimed, orders = world.admit(request)
    world.served(orders)
    assert claimed == 0
    assert request.block_hashes == before
    assert world.half.finish("target").outcome == "semantic_discovery_only"


def test_an_evicted_donor_is_dropped_at_the_worker_and_the_other_way_round(world):
    world.donor("one")
    _, orders = world.admit(FakeRequest("two", range(9000, 9200)))
    world.served(orders)
    world.half.semblend.forget("one")
    assert [donor_id for donor_id, _ in world.step().drops] == ["one"]
    world.half.note_report(Report(evicted={("two", world.half.donors.find_generation("two"))}))
    assert world.half.semblend.donors() == ()


def test_a_late_word_about_a_donor_that_was_reset_drops_it(world):
    _, orders = world.admit(FakeRequest("donor", [*range(40), *DOCUMENT]))
    world.half.reset()
    world.served(orders)
    assert world.half.semblend.donors() == ()
    assert [donor_id for donor_id, _ in world.step().drops] == ["donor"]


def test_an_aborted_request_releases_its_donors(world):
    world.donor()
    world.half.count_matched(target(), 0)
    world.half.finish("target")
    assert world.half.semblend._claims == {}
    assert world.half._records == {}


def receipts(world):
    return [event.request_id for event in world.sink.events if event.fields.get("receipt") is not None]


@pytest.mark.parametrize("reused", [False, True])
def test_a_request_that_is_aborted_while_its_first_token_is_computed_has_no_receipt(world, reused):
    """An engine that schedules ahead throws that token away: there is no answer to write a receipt for."""
    world.donor()
    before = receipts(world)
    request = target() if reused else FakeRequest("target", [*range(9000, 9100)])
    request.num_output_tokens = 0
    claimed, orders = world.admit(request)
    assert bool(claimed) is reused
    if reused:
        world.loaded(orders)
        orders = world.schedule(orders.loads[0])
    assert orders.served == ["target"]
    assert world.half.finish("target", range(20)) is None
    assert world.half._records == {}
    assert world.half.semblend._claims == {}
    world.told(orders)
    assert receipts(world) == before
    assert world.half._answered == {}
    assert world.errors() == []
    again = target(question="another")  # the id is free
    world.served(world.admit(again)[1])
    assert world.half.finish("target").reused_tokens == 200


def test_an_answer_that_a_reset_throws_away_has_no_receipt_and_the_one_after_it_has(world):
    request = FakeRequest("target", [*range(40), *DOCUMENT])
    request.num_output_tokens = 0
    _, thrown_away = world.admit(request)
    world.half.count_matched(request, 0)  # preempted while it was computed, and asked about again
    world.told(thrown_away)
    _, orders = world.admit(request)
    assert world.half._records["target"].receipt is None
    request.num_output_tokens = 1
    world.told(orders)
    assert world.half.finish("target").prompt_tokens == 240
    assert receipts(world) == ["target"]


def test_a_request_that_ends_before_its_preemption_is_told_is_no_failure(world):
    request = FakeRequest("target", [*range(40), *DOCUMENT])
    _, orders = world.admit(request)
    assert world.half.finish("target") is None, "its receipt comes with the report"
    other = FakeRequest("other", range(9000, 9100))
    claimed = world.half.count_matched(other, 0)
    world.allocate(other, 100, claimed)
    assert world.step(new=[(other, 0, 100)], preempted=["target"]).served == ["other"]
    world.told(orders)
    assert receipts(world) == ["target"]


def test_the_hit_is_split_into_what_donors_hold_and_what_we_compute(world):
    world.donor()
    claimed, _ = world.admit(target())
    assert world.half.count_hit_sources("target", claimed) == (200, 26)


def test_a_plan_whose_two_passes_cost_more_than_a_prefill_is_declined_before_the_claim():
    world = World()
    world.donor()
    pieces = [
        token for i in range(4) for token in [*DOCUMENT[i * 50 : i * 50 + 32], *range(7000 + i * 90, 7090 + i * 90)]
    ]
    asked = {"semblend": {"quality": "balanced"}}
    claimed, orders = world.admit(FakeRequest("target", pieces, kv_transfer_params=asked))
    assert claimed == 0
    world.served(orders)
    assert world.half.finish("target").reason == "below_break_even"


@pytest.mark.parametrize(("seam_tokens", "served"), [(0, True), (48, False)])
def test_wide_seams_that_the_settings_ask_for_count_before_the_claim(seam_tokens, served):
    world = World(seam_tokens=seam_tokens)
    world.donor()
    turned = [*DOCUMENT[150:], *DOCUMENT[100:150], *DOCUMENT[50:100], *DOCUMENT[:50]]
    asked = {"semblend": {"quality": "balanced"}}
    assert (world.half.count_matched(FakeRequest("target", turned, kv_transfer_params=asked), 0) > 0) == served


def test_memory_of_requests_stays_flat(world):
    world.donor()
    for number in range(200):
        _, orders = world.admit(target(f"target-{number}"))
        world.served(orders)
        world.half.finish(f"target-{number}")
    assert not world.half._records
    assert not world.half.donors._on_the_way
    assert world.half.semblend.totals().requests["backend_materialized_reuse"] == 200


def test_settings_of_the_library_may_stand_in_the_connectors_configuration():
    from semblend.errors import ConfigError
    from semblend.integration.vllm.settings import connector_settings

    settings = connector_settings({"quality": "fast", "donor_host_bytes": 5}, {"SEMBLEND_MIN_SPAN_TOKENS": "64"})
    assert (settings.config.quality, settings.config.min_span_tokens, settings.donor_host_bytes) == ("fast", 64, 5)
    assert connector_settings({"SEMBLEND_DISCOVERY_ONLY": "1"}, {}).config.discovery_only
    with pytest.raises(ConfigError, match="unknown setting 'qualty'"):
        connector_settings({"qualty": "fast"}, {})
    with pytest.raises(ConfigError, match="donor_host_bytes"):
        connector_settings({"donor_host_bytes": -2}, {})
    assert dataclasses.asdict(settings)["receipts"] is True


def test_the_worker_hears_when_blocks_that_it_copies_from_change_hands(world):
    request = FakeRequest("donor", DOCUMENT)
    _, orders = world.admit(request)
    assert [capture.donor_id for capture in orders.captures] == ["donor"]
    assert orders.freed == []
    world.served(orders)
    world.half.finish("donor")
    assert world.step().freed == ["donor"]
    assert world.step().freed == [], "once"


@pytest.mark.parametrize("wish", [{"opt_out": True}, {"quality": "exact"}])
def test_the_tokens_of_a_request_that_may_not_reuse_are_not_even_read_before_its_answer(world, wish, monkeypatch):
    read = []
    monkeypatch.setattr("semblend.prompt.as_token_array", lambda ids: read.append(ids) or np.array(ids, np.int32))
    request = FakeRequest("mine", [1, *DOCUMENT], kv_transfer_params={"semblend": wish})
    claimed, orders = world.admit(request)
    assert (claimed, orders.served, read) == (0, ["mine"], [])
    world.half.note_report(Report(served=["mine"]))
    receipt = world.half.finish("mine")
    assert (receipt.prompt_tokens, receipt.reason) == (201, DeclineReason.DISABLED)
    assert read == []


def test_a_request_that_was_not_captured_frees_nothing_that_is_read(world):
    request = FakeRequest("short", range(8))
    _, orders = world.admit(request)
    world.served(orders)
    world.half.finish("short")
    assert world.step().freed == []


def test_a_request_that_decodes_is_closed_and_its_block_table_goes_on(world):
    request = FakeRequest("decodes", [*range(40), *DOCUMENT])
    _, orders = world.admit(request)
    world.served(orders)
    record = world.half._records["decodes"]
    held = len(record.block_ids)
    world.step(cached=[("decodes", 240, 1, (900,))])
    world.step(cached=[("decodes", 241, 1, ())])
    assert "decodes" not in world.half._records.open
    assert record.block_ids[held:] == [900]


def test_a_request_that_is_admitted_again_before_its_preemption_is_told_stays_locked(world):
    world.donor()
    request = target()
    claimed = world.half.count_matched(request, 0)
    world.allocate(request, claimed, claimed)
    world.loaded(world.step())
    assert world.half.count_matched(request, 0) is None, (
        "a reset took its blocks: are those that it filled still there?"
    )
    assert world.half.count_matched(request, 0) == claimed
    world.allocate(request, claimed, claimed)
    orders = world.step(preempted=["target"])
    record = world.half._records["target"]
    assert [load.request_id for load in orders.loads] == ["target"]
    assert record.is_loading
    assert record.salted is not None, "what is written into its blocks is not exact"


def test_a_closed_request_that_is_preempted_is_opened_again(world):
    request = FakeRequest("decodes", [*range(40), *DOCUMENT])
    _, orders = world.admit(request)
    world.served(orders)
    assert world.step(preempted=["decodes"]).freed == ["decodes"]
    world.half.count_matched(request, 0)
    assert world.half._records["decodes"].restarted


def test_a_preempted_donor_gives_its_blocks_away_too(world):
    request = FakeRequest("donor", DOCUMENT)
    _, orders = world.admit(request)
    world.served(orders)
    assert world.step(preempted=["donor"]).freed == ["donor"]


def test_what_stands_before_moved_kv_becomes_a_donor_and_the_rest_does_not(world):
    ending = list(range(7000, 7300))
    world.served(world.admit(FakeRequest("first", [*range(40), *ending]))[1])
    new = FakeRequest("second", [*DOCUMENT, *ending])
    claimed, orders = world.admit(new)
    assert claimed
    orders = world.served(orders)
    (capture,) = orders.captures
    assert (capture.tokens, len(capture.block_ids)) == (len(DOCUMENT), -(-len(DOCUMENT) // BLOCK))
    (donor,) = [donor for donor in world.half.semblend.donors() if donor.donor_id == "second"]
    assert donor.token_count == len(DOCUMENT)
    _, later = world.admit(target())
    assert [span.donor_id for load in later.loads for span in load.spans] == ["second"]


def test_a_small_piece_is_not_worth_a_donor(world):
    instruction = list(range(7000, 7040))
    world.served(world.admit(FakeRequest("first", [*range(60), *instruction]))[1])
    new = FakeRequest("second", [1, 2, *instruction, *range(10_000, 10_500)])
    claimed, orders = world.admit(new)
    assert claimed == 0
    assert [capture.tokens for capture in orders.captures] == [542]
    world.served(orders)
    assert "becoming a donor" in world.half.finish("second").detail


BALANCED = {"kv_transfer_params": {"semblend": {"quality": "balanced"}}}
REFUSED = {"reused_tokens": 0, "recomputed_tokens": 200, "reason": DeclineReason.QUALITY_RISK}


def test_the_second_request_of_a_kind_is_not_claimed_where_the_gate_refused_the_first(world):
    world.donor()
    claimed, orders = world.admit(target("first", **BALANCED))
    assert claimed == 226
    world.served(orders, **REFUSED, work=1.4)
    request = target("second", lead=18, **BALANCED)
    before = list(request.block_hashes)
    claimed, orders = world.admit(request)
    assert (claimed, orders.loads) == (0, [])
    assert request.block_hashes == before  # its KV is vLLM's own, and enters the prefix cache
    assert [capture.tokens for capture in orders.captures] == [228]
    world.served(orders)
    receipt = world.half.finish("second")
    assert (receipt.reason, receipt.outcome) == ("quality_risk", "cold_fallback")
    assert receipt.detail.startswith("such prompts cost 1.4")


def test_a_request_that_waits_for_blocks_is_judged_once():
    world = World()
    world.donor()
    _, orders = world.admit(target("first", **BALANCED))
    world.served(orders, **REFUSED, work=1.05)
    waiting = target("waiting", **BALANCED)
    for number in range(50):  # vLLM asks in every step, and donors come and go meanwhile
        world.half.donors.epoch += 1
        assert world.half.count_matched(waiting, 0) == 0, number


def test_a_kind_that_the_worker_serves_is_claimed_each_time(world):
    world.donor()
    for number in range(20):
        claimed, orders = world.admit(target(f"target-{number}", **BALANCED))
        assert claimed
        world.served(orders, work=0.3)
        world.half.finish(f"target-{number}")


def test_another_salt_does_not_learn_from_it(world):
    world.donor()
    world.donor("other", salt="x")
    _, orders = world.admit(target("first", **BALANCED))
    world.served(orders, **REFUSED, work=1.4)
    assert world.half.count_matched(target("second", salt="x", **BALANCED), 0) > 0


def test_a_load_that_failed_says_nothing_about_its_kind(world):
    world.donor()
    for name in ("first", "second"):
        claimed, orders = world.admit(target(name, **BALANCED))
        assert claimed
        world.served(orders, reused_tokens=0, reason=DeclineReason.STALE)


# -- loads that other requests do not wait for -------------------------------------------------------------------------


def test_a_claimed_request_is_loaded_before_anything_of_it_is_computed(world):
    world.donor()
    claimed, orders = world.admit(target())
    assert claimed
    assert [load.request_id for load in orders.loads] == ["target"]
    assert (orders.served, orders.captures) == ([], [])
    assert world.step().loads == [], "it is ordered once"


def test_loads_have_a_budget_while_others_are_computed_and_none_where_nobody_waits(world):
    world.donor()
    _, alone = world.admit(target())
    assert alone.work_ms is None
    assert world.step(cached=[("other", 10, 1, None)]).work_ms == world.half.settings.step_work_ms


@pytest.mark.parametrize("reason", [DeclineReason.QUALITY_RISK, DeclineReason.STALE, DeclineReason.VALIDATION_FAILED])
def test_a_refused_request_has_its_hashes_back_before_it_is_scheduled_and_is_never_claimed_again(world, reason):
    world.donor()
    request = target()
    before = list(request.block_hashes)
    _, orders = world.admit(request)
    assert request.block_hashes != before
    world.loaded(orders, reused_tokens=0, reason=reason)
    assert request.block_hashes == before
    assert world.half.semblend._claims == {}
    orders = world.schedule(orders.loads[0])
    assert orders.loads == []
    assert [capture.tokens for capture in orders.captures] == [227], "it is computed exactly, and so becomes a donor"
    world.told(orders)
    receipt = world.half.finish("target")
    assert (receipt.outcome, receipt.reason, receipt.reused_tokens) == ("backend_declined_reuse", reason, 0)


def test_a_prompt_that_the_worker_computed_to_the_last_token_is_exact(world):
    world.donor()
    request = target(**BALANCED)
    before = list(request.block_hashes)
    _, orders = world.admit(request)
    told = {**REFUSED, "exact": True, "failed": False}
    world.loaded(orders, **told)
    assert request.block_hashes == before
    (capture,) = world.schedule(orders.loads[0]).captures
    assert capture.tokens == 227


def test_a_donor_whose_kv_was_wrong_is_offered_to_nobody_again(world):
    world.donor()
    _, orders = world.admit(target())
    world.loaded(orders, reused_tokens=0, reason=DeclineReason.VALIDATION_FAILED)
    assert world.half.semblend.donors() == ()
    assert [donor_id for donor_id, _ in world.step().drops] == ["donor"]
    assert world.half.count_matched(target("next"), 0) == 0


OTHER = list(range(7000, 7200))


def test_a_donor_that_was_right_is_kept_when_another_of_the_same_load_was_wrong(world):
    world.donor("right")
    _, orders = world.admit(FakeRequest("wrong", [*range(500, 540), *OTHER]))
    world.served(orders)
    _, orders = world.admit(FakeRequest("target", [*range(2000, 2017), *DOCUMENT, *OTHER, 1, 2]))
    assert {span.donor_id for span in orders.loads[0].spans} == {"right", "wrong"}
    world.loaded(orders, reused_tokens=0, reason=DeclineReason.VALIDATION_FAILED, faulty_donors=("wrong",))
    assert [donor.donor_id for donor in world.half.semblend.donors()] == ["right"]


def test_what_any_rank_has_found_wrong_is_wrong():
    ranks = [Report(loaded={"r": LoadResult(failed=True, faulty_donors=faulty)}) for faulty in ((), ("b",), ("a",))]
    assert ranks[0].merge(ranks[1]).merge(ranks[2]).loaded["r"].faulty_donors == ("a", "b")


def test_a_request_that_is_aborted_while_it_is_loaded_is_cancelled_once_and_frees_its_donors(world):
    world.donor()
    world.admit(target())
    world.half.finish("target")
    assert world.half.semblend._claims == {}
    assert world.step().cancels == ["target"]
    assert world.step().cancels == []
    assert world.half._records == {}


def test_a_word_about_a_load_that_was_cancelled_is_no_matter(world):
    world.donor()
    _, orders = world.admit(target())
    world.half.finish("target")
    world.loaded(orders)
    assert world.half._records == {}


def test_a_claim_that_fails_when_it_has_its_blocks_is_refused_so_that_vllm_does_not_wait_for_it(world):
    world.donor()
    request = target()
    before = list(request.block_hashes)
    claimed = world.half.count_matched(request, 0)
    world.half.refuse_claim(request, [3, 4, 5], claimed)
    (load,) = world.step().loads
    assert (load.request_id, load.spans, load.block_ids, load.claim_end) == ("target", (), (3, 4, 5), claimed)
    assert request.block_hashes == before
    assert world.half.semblend._claims == {}


# -- equal prompts -----------------------------------------------------------------------------------------------------


def find_blocks(request, other):
    """Tokens of one request's blocks that vLLM finds for another, by their hashes."""
    pairs = enumerate(zip(request.block_hashes, other.block_hashes, strict=False))
    shorter = min(len(request.block_hashes), len(other.block_hashes))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), shorter) * BLOCK


def test_an_equal_prompt_shares_the_blocks_and_computes_only_what_is_behind_them(world):
    world.donor()
    one, other = target("one", question="same"), target("other", question="same")
    _, orders = world.admit(one)
    world.served(orders, risk=0.01)
    assert world.half.count_matched(other, BLOCK) is None, "its hashes are salted now, and vLLM looks again"
    found = find_blocks(one, other)
    assert found == 227 // BLOCK * BLOCK
    assert world.half.count_matched(other, found) == 0
    world.allocate(other, 227)
    orders = world.step(new=[(other, found, 227 - found)])
    assert (orders.loads, orders.captures) == ([], [])
    world.told(orders)
    receipt = world.half.finish("other")
    assert (receipt.exact_tokens, receipt.reused_tokens, receipt.prefill_tokens) == (16, 200, 11)
    assert (receipt.outcome, receipt.risk) == ("backend_materialized_reuse", 0.01)
    assert not world.errors()
    assert world.half.semblend.totals().requests["backend_materialized_reuse"] == 2


def test_an_equal_prompt_that_comes_while_the_first_is_loaded_waits_for_it(world):
    world.donor()
    one, other = target("one", question="same"), target("other", question="same")
    _, orders = world.admit(one)
    before = list(other.block_hashes)
    for _ in range(3):
        assert world.half.count_matched(other, 0) is None
        assert other.block_hashes == before
        world.step()
    world.loaded(orders)
    world.schedule(orders.loads[0])
    assert world.half.count_matched(other, BLOCK) is None
    assert find_blocks(one, other) > BLOCK


@pytest.mark.parametrize("end", ["refused", "aborted"])
def test_an_equal_prompt_does_not_wait_for_a_load_that_came_to_nothing(world, end):
    world.donor()
    one, other = target("one", question="same"), target("other", question="same")
    _, orders = world.admit(one)
    assert world.half.count_matched(other, 0) is None
    if end == "refused":
        world.loaded(orders, reused_tokens=0, reason=DeclineReason.STALE)
    else:
        world.half.finish("one")
    assert world.half.count_matched(other, 0) == 226


def test_an_equal_prompt_whose_blocks_were_evicted_meanwhile_is_loaded_itself(world):
    world.donor()
    one, other = target("one", question="same"), target("other", question="same")
    world.served(world.admit(one)[1])
    before = list(other.block_hashes)
    assert world.half.count_matched(other, 0) is None
    assert world.half.count_matched(other, 0) == 226, "vLLM found nothing"
    assert other.block_hashes == before
    assert [load.request_id for load in world.admit(other)[1].loads] == ["other"]


@pytest.mark.parametrize(
    "differs",
    [
        {"question": "another"},
        {"salt": "tenant"},
        {"kv_transfer_params": {"semblend": {"quality": "balanced"}}},
        {"kv_transfer_params": {"semblend": {"opt_out": True}}},
        {"lora_request": SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="p")},
    ],
)
def test_only_equal_prompts_of_one_namespace_and_mode_share(world, differs):
    world.donor()
    world.donor("theirs", salt="tenant")
    one = target("one", question="same")
    world.served(world.admit(one)[1])
    other = target("other", **{"question": "same", **differs})
    world.admit(other)
    assert not set(one.block_hashes[2:]) & set(other.block_hashes[2:])


def test_a_shared_block_is_never_found_under_the_exact_hashes_and_never_captured(world):
    world.donor()
    one, other, exact = (target(name, question="same") for name in ("one", "other", "exact"))
    world.served(world.admit(one)[1])
    world.half.count_matched(other, 0)
    assert find_blocks(exact, one) == find_blocks(exact, other) == BLOCK


def test_with_sharing_off_two_equal_requests_have_no_approximate_block_in_common():
    world = World()
    world.half.settings = dataclasses.replace(world.half.settings, share_equal_prompts=False)
    world.donor()
    one, other = target("one", question="same"), target("other", question="same")
    for request in (one, other):
        claimed, _ = world.admit(request)
        assert claimed
    assert one.block_hashes[:1] == other.block_hashes[:1], "the instruction is exact"
    assert not set(one.block_hashes[1:]) & set(other.block_hashes[1:])
    assert len(set(one.block_hashes)) == len(one.block_hashes)


def test_a_reset_ends_all_sharing(world):
    world.donor()
    world.served(world.admit(target("one", question="same"))[1])
    world.half.reset()
    assert world.half.count_matched(target("other", question="same"), 0) == 0


def test_another_process_salts_equal_prompts_otherwise():
    hashes = []
    for _ in range(2):
        world = World()
        world.donor()
        request = target()
        world.admit(request)
        hashes.append(request.block_hashes)
    assert not set(hashes[0][1:]) & set(hashes[1][1:])


def watched_pool(world):
    """vLLM's pool as far as a reset shows in it."""
    pool = SimpleNamespace(cached_block_hash_to_block={})
    world.half.donors.resets = ResetWatch(pool)
    return pool


def test_when_vllm_empties_its_prefix_cache_every_donor_goes_before_the_next_lookup(world):
    pool = watched_pool(world)
    world.donor()
    pool.cached_block_hash_to_block = {}
    assert world.half.count_matched(target(), 0) == 0
    assert world.step().drops == [("donor", 1)]
    assert world.half.semblend.donors() == ()


def test_a_donor_on_its_way_when_the_prefix_cache_is_emptied_never_arrives(world):
    pool = watched_pool(world)
    _, orders = world.admit(FakeRequest("donor", [*range(40), *DOCUMENT]))
    pool.cached_block_hash_to_block = {}
    world.told(orders)
    assert world.half.semblend.donors() == ()
    assert world.step().drops == [("donor", 1)]


def test_donors_that_were_ordered_before_the_workers_named_their_weights_serve_afterwards(world):
    world.admit(FakeRequest("donor", [*range(40), *DOCUMENT]))
    report = Report(served=["donor"], captured={("donor", 1)}, weights="aa")
    world.half.note_report(report)
    assert world.half.facts.namespace.revision == " weights:aa"
    assert world.half.count_matched(target(), 0) > 0


def test_new_weights_void_donors_and_what_has_begun_becomes_none(world):
    world.half.note_report(Report(weights="aa"))
    world.donor()
    begun = FakeRequest("begun", range(5000, 5200))
    world.admit(begun, tokens=100)
    world.half.note_report(Report(weights="bb"))
    assert world.half.semblend.donors() == ()
    assert world.half.count_matched(target(), 0) == 0
    orders = world.step(cached=[("begun", 100, 100, [])])
    assert (orders.served, orders.captures) == (["begun"], [])
    world.donor("of the new weights")
    assert world.half.count_matched(target("later"), 0) > 0
    assert {donor.namespace.revision for donor in world.half.semblend.donors()} == {" weights:bb"}


def test_a_load_that_is_refused_for_new_weights_is_computed_and_its_donor_gone(world):
    world.half.note_report(Report(weights="aa"))
    world.donor()
    request = target()
    claimed, orders = world.admit(request)
    assert claimed
    refused = {"target": LoadResult(reason=DeclineReason.STALE, failed=True)}
    world.half.note_report(Report(loaded=refused, weights="bb"))
    orders = world.schedule(orders.loads[0])
    world.told(orders)
    receipt = world.half.finish("target")
    assert (receipt.reused_tokens, str(receipt.reason)) == (0, "stale")
    assert world.half.semblend.donors() == ()


def test_an_operators_pin_reaches_store_and_workers_once_and_ends_with_the_donor(world):
    world.donor()
    books = world.half.donors
    books.admin = DonorAdmin(world.half.semblend, books.act, patience_s=0)
    for _ in range(2):
        books.admin.answer({"action": "pin", "everything": True})
    assert world.step().pins == [("donor", 1, True)]
    assert [donor.pinned for donor in world.half.semblend.donors()] == [True]
    books.admin.answer({"action": "unpin", "donor_id": "donor"})
    assert world.step().pins == [("donor", 1, False)]
    assert [donor.pinned for donor in world.half.semblend.donors()] == [False]
    books.admin.answer({"action": "pin", "everything": True})
    books.admin.answer({"action": "forget", "everything": True})
    orders = world.step()
    assert orders.drops == [("donor", 1)]
    assert books._pinned == set()


def test_an_operators_forgetting_comes_before_the_next_lookup(world):
    world.donor()
    world.half.donors.admin = DonorAdmin(world.half.semblend, world.half.donors.act, patience_s=0)
    assert world.half.donors.admin.answer({"action": "forget", "everything": True})["queued"]
    assert world.half.count_matched(target(), 0) == 0


def test_blocks_that_were_made_before_a_reset_are_not_taken_though_vllm_still_finds_them(world):
    world.donor()
    one, other = target("one", question="same"), target("other", question="same")
    world.served(world.admit(one)[1])
    assert world.half.count_matched(other, BLOCK) is None
    world.half.reset()
    before = target("before", question="same").block_hashes
    assert world.half.count_matched(other, find_blocks(one, other)) == 0
    assert other.block_hashes == before


class CountingPool:
    """A block pool that counts who looks at its blocks."""

    enable_caching, kv_event_queue = True, ()

    def __init__(self):
        self.looks, self.evicted = 0, set()

    @property
    def blocks(self):
        self.looks += 1
        return [SimpleNamespace(block_hash=None)] * 1000

    def evict_blocks(self, block_ids):
        self.evicted |= block_ids


@pytest.mark.parametrize("shared", [True, False])
def test_a_running_request_with_approximate_blocks_costs_later_steps_no_look_at_them(world, shared):
    world.half.settings = dataclasses.replace(world.half.settings, share_equal_prompts=shared)
    world.half.locks.block_pool, world.half.locks.cached_counts = CountingPool(), [{}]
    world.donor()
    world.served(world.admit(target())[1])
    kept_out = "target" in world.half.locks.cached_counts[0]
    assert kept_out is not shared, "an answer's blocks enter where a next turn finds them"
    world.half.locks.block_pool.looks = 0
    for number in range(10):
        world.step(cached=[("target", 227 + number, 1, None)])
    assert world.half.locks.block_pool.looks == 0


LONG = list(range(10_000, 10_800))
SHARED = (17 + len(LONG)) // BLOCK * BLOCK


def user(name, **rest):
    """One instruction, one long document, and a question of their own."""
    question = zlib.crc32(name.encode()) % 1_000_000_000 + 20_000
    return FakeRequest(name, [*range(2000, 2017), *LONG, *range(3000, 3010), question], **rest)


@pytest.fixture
def healing(world):
    """A donor holds the document, and prefixes that many load are computed."""
    world.half.healing.on = True
    for name, tenant in (("donor", None), ("theirs", "tenant")):
        world.served(world.admit(FakeRequest(name, [*range(40), *LONG], salt=tenant))[1])
        world.half.finish(name)
    return world


def load_until_due(world, **rest):
    """Users are loaded until the next one is to be computed; returns how many were."""
    for number in range(100):
        request = user(f"user-{number}", **rest)
        claimed = world.half.count_matched(request, 0)
        if not claimed:
            return request, number
        world.allocate(request, claimed, claimed)
        world.served(world.step())
        world.half.finish(request.request_id)
    raise AssertionError("nobody was computed")


def test_a_prefix_whose_loads_have_cost_a_prefill_is_computed_once_under_its_own_hashes(healing):
    request, loads = load_until_due(healing)
    assert loads == 10, "each counts a tenth of the 768 tokens up to the last mark; 817 have to be paid"
    own = list(request.block_hashes)
    healing.allocate(request, len(request.prompt_token_ids))
    orders = healing.step(new=[(request, 0, len(request.prompt_token_ids))])
    assert orders.loads == []
    assert [capture.tokens for capture in orders.captures] == [len(request.prompt_token_ids)]
    assert request.block_hashes == own
    healing.told(orders)
    receipt = healing.half.finish(request.request_id)
    assert (receipt.outcome, receipt.reason) == ("cold_fallback", DeclineReason.SHARED_PREFIX)
    assert healing.half.count_matched(user("next"), SHARED) == 0, "it has an exact hit"
    assert healing.half.count_matched(user("later"), 0) > 0, "evicted since: the account starts again"
    assert not healing.errors()


def test_a_request_that_computes_a_shared_prefix_is_counted_once_and_told(healing, monkeypatch):
    counted = []
    monkeypatch.setattr(healing.half.semblend.metrics, "declined", counted.append)
    request, _ = load_until_due(healing)
    for _ in range(3):
        assert healing.half.count_matched(request, 0) == 0, "it waits for blocks"
        healing.donor(f"donor-{_}", lead=41 + _)
    healing.allocate(request, len(request.prompt_token_ids))
    healing.told(healing.step(new=[(request, 0, len(request.prompt_token_ids))]))
    healing.half.finish(request.request_id)
    assert counted.count(DeclineReason.SHARED_PREFIX) == 1
    (event,) = [e for e in healing.sink.events if e.request_id == request.request_id and e.kind == "fallback"]
    assert event.fields["receipt"].reason is DeclineReason.SHARED_PREFIX


def test_no_first_token_waits_for_its_receipt_which_says_when_it_was_out(world):
    now = [0.0]
    world.half.sessions.read_clock = lambda: now[0]
    _, orders = world.admit(FakeRequest("one", DOCUMENT))
    now[0] = 0.25
    world.told(orders)
    assert not [event for event in world.sink.events if event.kind == "fallback"]
    now[0] = 9.0
    world.step()
    assert not [event for event in world.sink.events if event.kind == "fallback"], "it is sent meanwhile"
    world.half.note_report(Report())
    (event,) = [event for event in world.sink.events if event.kind == "fallback"]
    assert event.fields["receipt"].service_ms == 250


def test_a_receipt_that_fails_costs_its_own_request_reuse_and_no_other(world, monkeypatch):
    confirm = world.half.sessions.confirm

    def fail_for_one(record, **rest):
        if record.request_id == "one":
            raise RuntimeError("broken")
        return confirm(record, **rest)

    monkeypatch.setattr(world.half.sessions, "confirm", fail_for_one)
    requests = [FakeRequest(name, [number, *DOCUMENT]) for number, name in enumerate(("one", "two"))]
    for request in requests:
        world.half.count_matched(request, 0)
        world.allocate(request, len(request.prompt_token_ids))
    world.told(world.step(new=[(request, 0, len(request.prompt_token_ids)) for request in requests]))
    world.half.note_report(Report())
    assert [event.request_id for event in world.errors()] == ["one"]
    assert world.half.finish("one") is None
    assert world.half.finish("two") is not None


@pytest.mark.parametrize(("lead", "kept"), [(36, []), (200, ["asked"])])
def test_a_short_instruction_in_front_of_a_reused_document_becomes_no_donor(world, lead, kept):
    world.donor()
    claimed, orders = world.admit(FakeRequest("asked", [*range(7000, 7000 + lead), *DOCUMENT * 3, 1, 2]))
    assert claimed
    assert [capture.donor_id for capture in world.served(orders).captures] == kept


def test_where_healing_is_off_every_user_is_loaded(healing):
    healing.half.healing.on = False
    with pytest.raises(AssertionError, match="nobody was computed"):
        load_until_due(healing)


def test_tenants_do_not_pay_into_one_account(healing):
    request, _ = load_until_due(healing)
    healing.half.finish(request.request_id)
    assert load_until_due(healing, salt="tenant")[1] == 10


@pytest.mark.parametrize("end", ["computed", "aborted", "preempted", "given up"])
def test_who_comes_while_the_prefix_is_computed_waits_for_it_and_no_longer(healing, end):
    request, _ = load_until_due(healing)
    healing.allocate(request, 256)
    healing.step(new=[(request, 0, 256)])
    waiting = user("waiting")
    for _ in range(3):
        assert healing.half.count_matched(waiting, 256) is None
        healing.step()
    assert healing.half.semblend._claims == {}
    found = 256
    if end == "computed":
        healing.step(cached=[(request.request_id, 256, len(request.prompt_token_ids) - 256, range(900, 940))])
        found = SHARED
    elif end == "aborted":
        healing.half.finish(request.request_id)
    elif end == "preempted":
        healing.step(preempted=[request.request_id])
    else:
        healing.half.give_up(request.request_id)
    claimed = healing.half.count_matched(waiting, found)
    assert claimed == (0 if end == "computed" else len(waiting.prompt_token_ids) - 1 - 256)


def test_a_prefill_that_vllm_has_no_blocks_for_makes_nobody_wait(healing):
    load_until_due(healing)
    assert healing.half.count_matched(user("next"), 0) > 0


def test_users_who_come_together_are_not_loaded_one_of_them_is_computed_and_the_others_wait(healing, monkeypatch):
    users = [user(f"user-{number}") for number in range(12)]
    for request in users:
        healing.half.note_arrival(request)
    assert healing.half.count_matched(users[0], 0) == 0
    healing.allocate(users[0], 256)
    healing.step(new=[(users[0], 0, 256)])
    with monkeypatch.context() as while_they_wait:
        while_they_wait.setattr(healing.half.semblend, "lookup", None)  # nobody looks anything up
        assert [healing.half.count_matched(request, 256) for request in users[1:]] == [None] * 11
    healing.half.finish("user-0")
    assert healing.half.count_matched(users[1], 256) == 0, "it is the next one to compute it"
    for request in users[1:]:
        healing.half.finish(request.request_id)
    assert not len(healing.half.healing.accounts.waiting)
    assert not healing.errors()


@pytest.mark.parametrize("kind", [{"kv_transfer_params": {"semblend": {"opt_out": True}}}, {"salt": "tenant"}])
def test_who_would_not_load_this_prefix_does_not_count(healing, kind):
    for number in range(12):
        healing.half.note_arrival(user(f"user-{number}", **kind))
    healing.half.note_arrival(user("first"))
    assert healing.half.count_matched(user("first"), 0) > 0


def test_equal_prompts_that_come_together_are_loaded_once(healing):
    users = [user("same") for _ in range(12)]
    for number, request in enumerate(users):
        request.request_id = f"user-{number}"
        healing.half.note_arrival(request)
    claimed = healing.half.count_matched(users[0], 0)
    assert claimed > 0
    healing.allocate(users[0], claimed, claimed)
    assert [healing.half.count_matched(request, 0) for request in users[1:]] == [None] * 11


def test_an_arrival_in_an_engine_that_we_refuse_is_not_looked_at():
    world = World(refusal="for a test")
    world.half.note_arrival(None)


def test_a_failure_of_the_books_is_told_once_and_everybody_is_loaded(healing, monkeypatch):
    monkeypatch.setattr(healing.half.healing.accounts, "must_compute", lambda *_: 1 / 0)
    with pytest.raises(AssertionError, match="nobody was computed"):
        load_until_due(healing)
    (error,) = healing.errors()
    assert error.fields["where"] == "healing"


def test_a_load_whose_exact_blocks_are_computed_in_this_step_is_ordered_with_the_next(world):
    world.donor()
    other, request = FakeRequest("other", range(2000, 2100)), target(lead=64)
    world.half.count_matched(other, 0)
    world.half.note_allocated(other, [1, 2, 3, 4, 5, 6, 7], 0)
    claimed = world.half.count_matched(request, 48)
    world.half.note_allocated(request, [1, 2, 3, *range(20, 40)], claimed)
    assert world.step(new=[(other, 0, 100)]).loads == []
    assert [load.request_id for load in world.step(cached=[("other", 100, 1, None)]).loads] == ["target"]
    assert world.step().loads == []


def test_a_load_whose_exact_blocks_were_computed_before_is_ordered_at_once(world):
    world.donor()
    other, request = FakeRequest("other", range(2000, 2100)), target(lead=64)
    world.half.count_matched(other, 0)
    world.half.note_allocated(other, [1, 2, 3, 4, 5, 6, 7], 0)
    world.step(new=[(other, 0, 60)])
    claimed = world.half.count_matched(request, 48)
    world.half.note_allocated(request, [1, 2, 3, *range(20, 40)], claimed)
    assert len(world.step(cached=[("other", 60, 40, None)]).loads) == 1


def test_a_request_that_is_aborted_while_its_load_is_held_back_is_cancelled_behind_it(world):
    world.donor()
    other, request = FakeRequest("other", range(2000, 2100)), target(lead=64)
    world.half.count_matched(other, 0)
    world.half.note_allocated(other, [1, 2, 3, 4, 5, 6, 7], 0)
    world.half.note_allocated(request, [1, 2, 3, *range(20, 40)], world.half.count_matched(request, 48))
    world.step(new=[(other, 0, 100)])
    world.half.finish("target")
    orders = [world.step() for _ in range(3)]
    assert [(len(one.loads), one.cancels) for one in orders] == [(1, []), (0, ["target"]), (0, [])]


def test_where_a_step_computes_something_unknown_loads_behind_exact_blocks_wait_for_the_next(world):
    world.donor()
    world.half.note_allocated(
        request := target(lead=64), [1, 2, 3, *range(20, 40)], world.half.count_matched(request, 48)
    )
    assert world.step(new=[(FakeRequest("unknown", range(10)), 0, 10)]).loads == []
    assert len(world.half.build_least_orders(()).loads) == 1


def bring(world, request, local, exact, block_ids):
    """Another connector brings the tokens of a request from ``local`` to ``exact``, into its blocks."""
    world.half.leave_to_another(request, exact, local)
    world.half.note_allocated(request, block_ids, 0)


def test_a_load_whose_exact_blocks_another_connector_loads_in_this_step_is_ordered_with_the_next(world):
    world.donor()
    other, request = FakeRequest("other", range(2000, 2100)), target(lead=64)
    bring(world, other, 16, 64, [1, 2, 3, 4, 5, 6, 7])
    claimed = world.half.count_matched(request, 48)
    world.half.note_allocated(request, [1, 2, 3, *range(20, 40)], claimed)
    assert world.step(new=[(other, 64, 36)]).loads == []
    assert [load.request_id for load in world.step(cached=[("other", 100, 1, None)]).loads] == ["target"]


def test_a_load_whose_exact_blocks_are_in_front_of_what_another_connector_loads_is_ordered_at_once(world):
    world.donor()
    other, request = FakeRequest("other", range(2000, 2100)), target(lead=64)
    bring(world, other, 48, 64, [1, 2, 3, 4, 5, 6, 7])
    world.half.note_allocated(request, [1, 2, 3, *range(20, 40)], world.half.count_matched(request, 48))
    assert len(world.step(new=[(other, 64, 36)]).loads) == 1


def test_what_another_connector_has_loaded_holds_up_no_later_load(world):
    world.donor()
    other, request = FakeRequest("other", range(2000, 2100)), target(lead=64)
    bring(world, other, 0, 64, [1, 2, 3, 4, 5, 6, 7])
    world.step(new=[(other, 64, 30)])
    world.half.note_allocated(request, [1, 2, 3, *range(20, 40)], world.half.count_matched(request, 48))
    assert len(world.step(cached=[("other", 94, 6, None)]).loads) == 1


def test_a_request_whose_other_connector_lost_its_kv_meanwhile_loads_nothing_in_its_step(world):
    """It was left to another, got no blocks, and when vLLM asks again nobody holds it."""
    world.donor()
    other, request = FakeRequest("other", range(2000, 2100)), target(lead=64)
    world.half.leave_to_another(other, 64, 0)
    assert world.half.count_matched(other, 48) == 0
    world.half.note_allocated(other, [1, 2, 3, 4, 5, 6, 7], 0)
    world.half.note_allocated(request, [1, 2, 3, *range(20, 40)], world.half.count_matched(request, 48))
    assert len(world.step(new=[(other, 48, 52)]).loads) == 1


@pytest.mark.parametrize("ended", [False, True], ids=["computed anew", "failed by vLLM"])
def test_no_donor_is_made_of_kv_that_another_connector_failed_to_load(world, ended):
    request, neighbour = FakeRequest("request", [*range(64), *DOCUMENT]), FakeRequest("neighbour", range(64))
    neighbour.prompt_token_ids += range(8000, 8100)
    bring(world, request, 0, 64, list(range(17)))
    bring(world, neighbour, 64, 64, [0, 1, 2, 3, *range(20, 27)])  # vLLM has found the blocks of the first one
    bystander = FakeRequest("bystander", range(5000, 5200))
    world.half.count_matched(bystander, 0)
    world.half.note_allocated(bystander, list(range(40, 53)), 0)
    orders = world.step(new=[(request, 64, 200), (neighbour, 64, 100), (bystander, 0, 200)])
    assert [capture.donor_id for capture in orders.captures] == ["request", "neighbour", "bystander"]
    if ended:  # where vLLM fails the request, it says so before it tells about the step
        world.half.finish("request")
    world.half.note_failed_loads({2, 3})
    world.told(orders)
    assert [donor.donor_id for donor in world.half.semblend.donors()] == ["bystander"]
    assert world.half.count_matched(target(), 0) == 0
    assert {donor_id for donor_id, _ in world.step().drops} == {"request", "neighbour"}, "the workers drop it too"
    if not ended:
        assert world.half.finish("request").exact_tokens == 32, "the two blocks that were loaded"


def test_a_long_prompt_whose_first_part_failed_to_load_is_no_donor_when_its_last_part_is_computed(world):
    request = FakeRequest("request", [*range(64), *DOCUMENT])
    bring(world, request, 0, 64, list(range(17)))
    world.step(new=[(request, 64, 100)])
    world.half.note_failed_loads({1})
    orders = world.step(cached=[("request", 16, 248, None)])
    assert (orders.served, orders.captures) == (["request"], [])


@pytest.mark.parametrize("when", ["while it is loaded", "when its load has ended"])
def test_a_load_behind_kv_that_another_connector_failed_to_load_has_come_to_nothing(world, when):
    world.donor()
    request = target(lead=64)
    before = list(request.block_hashes)
    claimed, orders = world.admit(request, local=48)
    assert claimed
    blocks = world.half._records["target"].block_ids
    if when == "while it is loaded":
        world.half.note_failed_loads({blocks[1]})
        world.loaded(orders)
    else:
        world.loaded(orders)
        world.half.note_failed_loads({blocks[1]})
    assert request.block_hashes == before, "vLLM computes it, under its own hashes"
    assert world.half.count_matched(request, 0) == 0
    world.allocate(request, len(request.prompt_token_ids))
    orders = world.step(new=[(request, 16, len(request.prompt_token_ids) - 16)])
    assert orders.captures == []
    world.told(orders)
    receipt = world.half.finish("target")
    assert (receipt.reused_tokens, receipt.exact_tokens, receipt.reason) == (0, 16, "error")
    assert len(world.half.shares) == 0


def test_blocks_of_a_load_that_we_refuse_ourselves_spoil_nothing(world):
    world.donor()
    request = target(lead=64)
    _, orders = world.admit(request, local=48)
    world.half.note_failed_loads(set(orders.loads[0].block_ids[3:]))
    world.served(orders, reason=DeclineReason.STALE, reused_tokens=0)
    assert "target" in [donor.donor_id for donor in world.half.semblend.donors()], "it was computed, and is exact"


@pytest.mark.parametrize("way", ["finished", "preempted"])
def test_the_least_that_a_step_orders_names_blocks_that_change_hands_while_they_are_copied(world, way, monkeypatch):
    request = FakeRequest("donor", DOCUMENT)
    world.admit(request)
    if way == "finished":
        world.half.finish("donor")
    monkeypatch.setattr(world.half, "_catch_up", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        world.step(preempted=["donor"] if way == "preempted" else ())
    orders = world.half.build_least_orders({"donor"} if way == "preempted" else ())
    assert orders.freed == ["donor"]
    assert world.half.build_least_orders(()).freed == [], "once"


PAGES = list(range(1000, 3000))


def compute(world, name, tokens, found=0, **rest):
    """A request of which vLLM's own cache holds ``found`` tokens; whether it becomes a donor."""
    request = FakeRequest(name, tokens, **rest)
    _, orders = world.admit(request, found)
    world.served(orders)
    world.half.finish(name)
    return [one.donor_id for one in orders.captures] == [name]


def test_many_users_of_one_document_are_one_donor(world):
    assert compute(world, "first", [*PAGES, *range(40)])
    assert not any(compute(world, f"user-{n}", [*PAGES, *range(100 * n, 100 * n + 40)], 2000) for n in range(1, 6))
    assert compute(world, "another tenant", [*PAGES, *range(40)], salt="tenant")
    assert compute(world, "much that is new", [*PAGES, *range(700, 900)], 2000)


def test_a_conversation_becomes_a_donor_again_when_it_has_grown_by_a_sixteenth(world):
    kept = []
    for turn in range(12):
        tokens = [*PAGES, *range(5000, 5000 + 40 * turn)]
        if compute(world, f"turn-{turn}", tokens, len(tokens) - 40 if turn else 0):
            kept.append(turn)
    assert kept == [0, 3, 7, 10]


@pytest.mark.parametrize("end", ["forgotten", "lost", "not captured", "reset"])
def test_when_its_donor_is_gone_the_next_user_of_a_document_becomes_one(world, end):
    if end == "not captured":
        request = FakeRequest("first", [*PAGES, *range(40)])
        _, orders = world.admit(request)
        (order,) = orders.captures
        world.half.note_report(Report(served=["first"], not_captured={(order.donor_id, order.generation)}))
    else:
        assert compute(world, "first", [*PAGES, *range(40)])
        generation = world.half.donors.find_generation("first")
        if end == "forgotten":
            world.half.semblend.forget("first")
        elif end == "lost":
            world.half.note_report(Report(evicted={("first", generation)}))
        else:
            world.half.reset()
    assert compute(world, "next", [*PAGES, *range(300, 340)], 2000)
    assert not compute(world, "the one after", [*PAGES, *range(400, 440)], 2000)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.booleans()), max_size=20))
def test_how_much_of_a_prompt_donors_hold_is_what_comparing_all_of_them_says(history):
    """Prompts are beginnings of four texts that part after eight blocks; blocks have 16 tokens, marks 64."""
    texts = [[f"{0 if at < 8 else text}/{at}".encode() for at in range(20)] for text in range(4)]
    prefixes, held = HeldPrefixes(16), {}
    for number, (text, blocks, stays) in enumerate(history):
        prefixes.add(("d", number), "space", texts[text][:blocks])
        held[number] = texts[text][:blocks]
        if not stays:
            prefixes.remove(("d", number))
            del held[number]
    for text in texts:
        shared = (sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, one, strict=False)))
                  for one in held.values())  # fmt: skip
        assert prefixes.count_tokens("space", text) == max((count // 4 * 64 for count in shared), default=0)
        assert prefixes.count_tokens("another", text) == 0
        whole = {number: len(one) // 4 * 4 for number, one in held.items() if one[: len(one) // 4 * 4]}
        begun = [size for number, size in whole.items() if held[number][:size] == text[:size]]
        found = prefixes.find_beginning("space", text)
        assert (0 if found is None else whole[found[1]]) == max(begun, default=0)
        assert prefixes.find_beginning("another", text) is None
    for number in list(held):
        prefixes.remove(("d", number))
    assert not len(prefixes)


def test_nothing_is_left_of_a_request_that_ends_before_anybody_asks_about_it(world):
    world.donor()
    gone, asked = target("gone"), target("asked")
    for request in (gone, asked):
        world.half.note_arrival(request)
    assert world.half.finish("gone") is None
    assert world.half.count_matched(asked, 0) > 0
    assert not world.half._arrived
    assert list(world.half._records) == ["asked"]


def test_a_request_that_arrived_under_old_weights_reuses_nothing_of_them(world):
    world.half.note_report(Report(weights="aa"))
    world.donor()
    late = target("late")
    world.half.note_arrival(late)
    world.half.note_report(Report(weights="bb"))
    assert world.half.count_matched(late, 0) == 0
    assert world.half._records["late"].prompt.namespace.revision.endswith("weights:bb")


@pytest.mark.parametrize("asked", [{"forget": True}, {"forget": True, "quality": "fast"}])
def test_a_request_that_forgets_takes_nothing_of_donors_and_becomes_one(world, asked):
    world.donor()
    forgets = target("forgets", kv_transfer_params={"semblend": asked})
    claimed, orders = world.admit(forgets)
    assert claimed == 0
    assert [capture.donor_id for capture in orders.captures] == ["forgets"]
    world.told(orders)
    receipt = world.half.finish("forgets")
    assert (receipt.mode, receipt.reason) == ("exact", "disabled")
    assert world.admit(target("other"))[0] > 0


def test_a_hint_that_says_forget_goes_before_the_requests_own_quality(world):
    world.donor()
    hints = SimpleNamespace(actions=[SimpleNamespace(action_type="semblend.reuse", payload={"forget": True})])
    asked = target("asked", kv_transfer_params={"semblend": {"quality": "fast"}}, kv_hints=hints)
    assert world.half.count_matched(asked, 0) == 0


def test_tenants_of_a_server_that_forgets_reuse_nothing_whatever_they_ask():
    world = World(forget="*")
    world.donor()
    asked = target("asked", kv_transfer_params={"semblend": {"quality": "fast"}})
    assert world.half.count_matched(asked, 0) == 0
