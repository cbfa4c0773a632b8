"""Our connector beside another one, which stores every prompt it sees: vLLM's ExampleConnector, and LMCache."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PLAIN = {"kv_connector": "MultiConnector"}
GUARDED = PLAIN | {"kv_connector_module_path": "semblend.integration.vllm.multi_connector"}
BOTH = GUARDED | {
    "kv_load_failure_policy": "recompute"
}  # what ExampleConnector and LMCache load, they load in the step
KINDS = ("exact", "reused", "recomputed", "prefill")


def whole_blocks(answer):
    return (answer["prompt"] - 1) // 32 * 32


def adds_up(answer):
    return sum(answer["receipt"][f"{kind}_tokens"] for kind in KINDS) == answer["prompt"]


@pytest.fixture(scope="module", params=[True, False], ids=["ours first", "ours second"])
def guarded(apart, tmp_path_factory, request):
    storage = str(tmp_path_factory.mktemp("stored"))
    return apart("beside", outer=BOTH, ours_first=request.param, storage=storage, failing=True)


def test_both_serve_and_every_receipt_adds_up(guarded):
    donor, shifted, again = guarded["donor"], guarded["shifted"], guarded["donor again"]
    assert shifted["receipt"]["outcome"] == "backend_materialized_reuse"
    assert shifted["receipt"]["reused_tokens"] > 0.5 * shifted["prompt"]
    # What the other connector holds is exact, so it wins, and it is counted as exact.
    assert again["receipt"]["outcome"] == "exact_prefix_route"
    assert again["receipt"]["exact_tokens"] == again["cached"] == whole_blocks(again)
    assert again["tokens"] == donor["tokens"]
    assert all(adds_up(guarded[name]) for name in ("donor", "shifted", "without us", "without us again", "donor again"))


def test_the_other_connector_never_stores_what_we_served(guarded):
    assert guarded["stored"] == [1, 1, 2, 2, 2], "the donor, then nothing, then the prompt that vLLM computed itself"
    assert guarded["without us"]["cached"] == 0
    assert guarded["without us again"]["cached"] == whole_blocks(guarded["without us again"])
    assert guarded["without us again"]["tokens"] == guarded["without us"]["tokens"]


def test_a_request_for_a_decode_engine_is_left_to_the_other_connector(guarded):
    receipt = guarded["handed on"]["receipt"]
    assert (receipt["reused_tokens"], receipt["reason"]) == (0, "unsupported_mode")
    assert "do_remote_decode" in receipt["detail"]
    assert guarded["stored of it"] == 1, "the other connector saw it and stored it, exact as it is"


def test_nothing_is_left_and_a_reset_drops_our_donors(guarded):
    assert (guarded["records"], guarded["hidden"]) == (0, 0)
    assert guarded["donors"] > 0
    assert guarded["reset"] is True
    assert guarded["donors after reset"] == 0
    assert guarded["policy"] is True, "blocks that we could not fill are computed, not failed"


def test_our_load_waits_until_the_other_connector_has_loaded_what_stands_in_front_of_it(guarded):
    assert guarded["first"] > 128, "the other connector brought it"
    second = guarded["second"]
    assert (second["exact_tokens"], second["outcome"]) == (128, "backend_materialized_reuse")
    assert guarded["loads"] == ["other", "ours"]


def test_kv_that_the_other_connector_failed_to_load_is_computed_and_makes_no_donor(guarded):
    assert "Recovered from KV load failure" in guarded["log"]
    assert guarded["failed"]["tokens"] == guarded["cold"]["tokens"]
    assert guarded["failed"]["receipt"]["exact_tokens"] == 0
    assert guarded["donors of it"] == []
    assert guarded["behind it"]["receipt"]["reused_tokens"] == 0
    assert guarded["behind it"]["tokens"] == guarded["behind it, cold"]["tokens"]


def test_a_load_failure_policy_of_others_is_left_alone_and_we_reuse_nothing_under_it(apart, tmp_path):
    told = apart("beside", outer=GUARDED, ours_first=False, storage=str(tmp_path))
    assert told["policy"] is False, "vLLM's default, fail, is what the other connector runs with"
    receipt = told["shifted"]["receipt"]
    assert (receipt["reused_tokens"], receipt["reason"]) == (0, "unsupported_mode")
    assert "kv_load_failure_policy" in receipt["detail"]
    assert "ExampleConnector may load KV in the step" in told["log"]
    assert told["donor again"]["cached"] == whole_blocks(told["donor again"]), "it serves as without us"


@pytest.fixture(scope="module", params=[True, False], ids=["ours first", "ours second"])
def beside_lmcache(apart, request):
    folder = os.environ.get("SEMBLEND_TEST_LMCACHE", "")
    if not Path(folder, "lmcache").is_dir():
        pytest.skip("SEMBLEND_TEST_LMCACHE names no folder with LMCache: .ci/engines/vllm-cpu makes one")
    return apart("beside", outer=BOTH, ours_first=request.param, lmcache=folder)


def chunks(answer):
    return (answer["prompt"] - 1) // 64


def test_lmcache_serves_what_it_has_stored_and_we_the_rest(beside_lmcache):
    donor, shifted, again = (beside_lmcache[name] for name in ("donor", "shifted", "donor again"))
    assert shifted["receipt"]["outcome"] == "backend_materialized_reuse"
    assert shifted["receipt"]["reused_tokens"] > 0.5 * shifted["prompt"]
    assert again["receipt"]["outcome"] == "exact_prefix_route"
    assert again["receipt"]["exact_tokens"] == again["cached"] == 64 * chunks(again)
    assert again["tokens"] == donor["tokens"]
    assert all(adds_up(told) for told in beside_lmcache.values() if isinstance(told, dict) and "receipt" in told)


def test_lmcache_never_stores_what_we_served(beside_lmcache):
    donor, cold, again = (beside_lmcache[name] for name in ("donor", "without us", "without us again"))
    one, both = chunks(donor), chunks(donor) + chunks(cold)
    assert beside_lmcache["stored"] == [one, one, both, both, both]
    assert cold["cached"] == 0
    assert again["cached"] == 64 * chunks(again)
    assert again["tokens"] == cold["tokens"]
    assert (beside_lmcache["records"], beside_lmcache["hidden"]) == (0, 0)


def test_in_a_plain_multi_connector_we_reuse_nothing_and_the_other_works(apart, tmp_path):
    told = apart("beside", outer=PLAIN, ours_first=False, storage=str(tmp_path))
    assert told["shifted"]["receipt"]["reused_tokens"] == 0
    assert "MultiConnector" in told["shifted"]["receipt"]["detail"]
    assert told["without us"]["cached"] == whole_blocks(told["without us"]), "stored when it was computed exactly"
    assert told["without us"]["tokens"] == told["shifted"]["tokens"]


def test_without_that_refusal_approximate_kv_is_stored_as_exact(apart, tmp_path):
    """The negative control: it is why we refuse there."""
    told = apart("beside", outer=PLAIN, ours_first=False, storage=str(tmp_path), unguarded=True)
    assert told["shifted"]["receipt"]["reused_tokens"] > 0
    assert told["stored"][1] == 2
    assert told["without us"]["cached"] == whole_blocks(told["without us"])


def test_a_hidden_request_is_in_no_part_of_a_step_that_others_see():
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    from semblend.integration.vllm.multi_connector import without

    output = SchedulerOutput.make_empty()
    output.num_scheduled_tokens = {"a": 5, "b": 1, "c": 1}
    output.total_num_scheduled_tokens = 7
    output.scheduled_new_reqs = [SimpleNamespace(req_id="a")]
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=["b", "c"],
        resumed_req_ids={"b"},
        new_token_ids=[],
        all_token_ids={"b": [1, 2]},
        new_block_ids=[([4],), None],
        num_computed_tokens=[10, 20],
        num_output_tokens=[1, 2],
    )
    shown = without(output, {"a", "b"})
    assert (shown.num_scheduled_tokens, shown.total_num_scheduled_tokens) == ({"c": 1}, 1)
    assert shown.scheduled_new_reqs == []
    cached = shown.scheduled_cached_reqs
    assert (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens) == (["c"], [None], [20])
    assert (cached.resumed_req_ids, cached.all_token_ids, cached.new_token_ids) == (set(), {}, [])
    assert output.scheduled_cached_reqs.req_ids == ["b", "c"], "ours sees the whole step"
    assert without(output, {"z"}) is output


@pytest.mark.parametrize("refusal", [None, "a model that we decline"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_the_engines_settings_change_where_we_serve_and_then_the_log_says_so(refusal, policy, monkeypatch):
    from vllm.config import KVTransferConfig

    from semblend.integration.vllm import connector_v1

    logged = []
    monkeypatch.setattr(connector_v1.log, "info", lambda text, *given: logged.append(text % given))
    made = connector_v1.SemBlendConnectorV1.__new__(connector_v1.SemBlendConnectorV1)
    made._scheduler = SimpleNamespace(facts=SimpleNamespace(refusal=refusal))
    settings = KVTransferConfig(kv_connector="SemBlendConnectorV1", kv_role="kv_both", kv_load_failure_policy=policy)
    made.adapt(settings)
    assert settings.kv_load_failure_policy == ("recompute" if refusal is None else policy)
    assert len(logged) == (refusal is None and policy == "fail")
    assert all("kv_load_failure_policy from fail to recompute" in line for line in logged)
    assert settings.is_kv_consumer == (refusal is None), "vLLM delays freeing blocks for one that consumes"
