"""Our connector beside vLLM's OffloadingConnector, whose copies of blocks are not done when their request has ended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

GUARDED = {
    "kv_connector": "MultiConnector",
    "kv_connector_module_path": "semblend.integration.vllm.multi_connector",
}


def test_what_it_has_yet_to_copy_is_copied_before_our_load_or_our_answer_writes_it(apart):
    told = apart("beside_offloading", outer=GUARDED)
    pairs = told["pairs"]
    assert all(pair["shifted"]["receipt"]["reused_tokens"] > 0.5 * pair["shifted"]["prompt"] for pair in pairs)
    assert told["grown"][0] > 0, "a request that we served grew while others ended"
    assert told["flushed"] > 0
    assert told["torn"] == 0, "no block has changed between the order to copy it and the copy"
    assert told["stored"] >= sum(pair["donor"]["prompt"] // 32 for pair in pairs)
    for pair in pairs:
        assert pair["donor again"]["cached"] == (pair["donor again"]["prompt"] - 1) // 32 * 32, "from its copies"
        assert pair["donor again"]["tokens"] == pair["donor"]["tokens"]
    assert told["hidden"] == 0


def make_output(**changes):
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = CachedRequestData.make_empty()
    for name, value in changes.items():
        owner = output.scheduled_cached_reqs if name in ("req_ids", "new_block_ids") else output
        setattr(owner, name, value)
    return output


def make_multi_connector(hidden=()):
    """Ours beside one that says which blocks it was told of when its step was built."""
    from semblend.integration.vllm.connector_v1 import SemBlendConnectorV1
    from semblend.integration.vllm.multi_connector import MultiConnector

    seen = []

    class Offloading:
        def __init__(self):
            self.connector_scheduler = SimpleNamespace(_current_batch_allocated_block_ids=set())

        def build_connector_meta(self, output):
            seen.append((set(output.num_scheduled_tokens), self.connector_scheduler._current_batch_allocated_block_ids))
            self.connector_scheduler._current_batch_allocated_block_ids = set()

    class Ours(SemBlendConnectorV1):
        def __init__(self):
            """Nothing of an engine."""

        def holds_approximate(self, request_id):
            return False

        def update_state_after_alloc(self, request, blocks, num_external_tokens):
            """Nothing to do."""

        def build_connector_meta(self, output):
            return None

    made = MultiConnector.__new__(MultiConnector)
    inner = SimpleNamespace(_connectors=[Offloading()], build_connector_meta=lambda output: None)
    inner.build_connector_meta = inner._connectors[0].build_connector_meta
    made._connectors, made._our_index, made._hidden, made._given = [Offloading(), Ours(), inner], 1, set(hidden), set()
    made._requests_to_connector, made._extra_async_saves = {}, {}
    return made, seen


def blocks(*groups):
    return SimpleNamespace(get_block_ids=lambda: tuple(list(group) for group in groups))


def test_blocks_of_a_claim_are_announced_in_the_step_that_loads_it_though_it_is_in_no_step():
    made, seen = make_multi_connector()
    made._requests_to_connector["claimed"] = 1
    made.update_state_after_alloc(SimpleNamespace(request_id="claimed"), blocks([5, 6, 0]), 64)
    made.build_connector_meta(make_output())
    made.build_connector_meta(make_output())
    assert [told for _, told in seen] == [{5, 6}, {5, 6}, set(), set()], "both parts, and not again"


def test_blocks_of_hidden_requests_that_begin_go_on_or_resume_are_announced_and_those_of_others_are_not():
    made, seen = make_multi_connector(hidden={"new", "running", "resumed"})
    made.build_connector_meta(
        make_output(
            num_scheduled_tokens={"new": 5, "other": 3, "running": 1, "resumed": 9, "plain": 1},
            scheduled_new_reqs=[
                SimpleNamespace(req_id="new", block_ids=([1, 2],)),
                SimpleNamespace(req_id="other", block_ids=([3],)),
            ],
            req_ids=["running", "resumed", "plain", "running"],
            new_block_ids=[([4],), ([5, 6],), ([7],), None],
        )
    )
    names, told = seen[0]
    assert "new" not in names
    assert told == {1, 2, 4, 5, 6}


def test_every_version_that_we_read_keeps_the_blocks_it_was_told_of_where_we_announce_them():
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

    from semblend.integration.vllm.connector_v1 import PACKAGE
    from semblend.integration.vllm.source_check import missing

    assert "_current_batch_allocated_block_ids" in OffloadingConnectorScheduler.build_connector_meta.__code__.co_names
    assert not [line for line in missing(PACKAGE, optional=True) if "OffloadingConnector" in line]
