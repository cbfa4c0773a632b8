"""What the connector must never do to a real vLLM: pollute its exact cache, cross a wall, fail a request."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from vllm_world import worst

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def shifted(world, seed, **asked):
    """A donor, and a prompt that shares its document; what vLLM alone computes for the latter."""
    document = world.document(seed)
    target = world.instruction(5) + document + world.question()
    cold = world.cold(target)
    world.ask(world.instruction(1) + document + world.question(), **asked)
    return target, cold


def stored(world):
    """The tokens of every block that KV events announced."""
    return [
        tuple(event.token_ids[i * event.block_size : (i + 1) * event.block_size])
        for event in world.kv_events
        if type(event).__name__ == "BlockStored"
        for i in range(len(event.block_hashes))
    ]


def test_approximate_kv_never_enters_the_prefix_cache(world):
    target, cold = shifted(world, 21)
    (approximate,) = world.ask(target, tokens=40)  # long enough to fill blocks of the answer too
    assert world.receipt(approximate)["reused_tokens"] > 0
    assert worst(world.kv_of(approximate), world.kv_of(cold)) > 1e-3, "it is an approximation"
    (later,) = world.ask(target, opt_out=True)  # vLLM alone, with its prefix cache on
    first = world.audited(approximate)["spans"][0]["target_start"]
    assert later.num_cached_tokens <= first
    assert worst(world.kv_of(later), world.kv_of(cold)) == 0.0
    assert later.outputs[0].token_ids == cold.outputs[0].token_ids
    answer = target + list(approximate.outputs[0].token_ids)
    (further,) = world.ask(answer, opt_out=True)
    assert further.num_cached_tokens <= len(target)


def no_salt(request, first, key=None):
    from semblend.integration.vllm.scheduler.prefix_locks import Salted

    return Salted(first, list(request.block_hashes), [], request._block_hasher)


def test_without_our_two_locks_the_same_check_fails(world, monkeypatch):
    from semblend.integration.vllm.scheduler import prefix_locks

    monkeypatch.setattr(prefix_locks, "salt", no_salt)
    monkeypatch.setattr(world.half.locks, "keep_private", lambda records: None)
    target, cold = shifted(world, 21)
    world.ask(target, tokens=40)
    (later,) = world.ask(target, opt_out=True)
    assert later.num_cached_tokens > len(target) // 2
    assert worst(world.kv_of(later), world.kv_of(cold)) > 1e-3


@pytest.mark.parametrize("lock", ["salt", "keep_private"])
def test_each_of_the_two_locks_alone_is_enough(world, monkeypatch, lock):
    from semblend.integration.vllm.scheduler import prefix_locks

    if lock == "salt":
        monkeypatch.setattr(world.half.locks, "keep_private", lambda records: None)
    else:
        monkeypatch.setattr(prefix_locks, "salt", no_salt)
    target, cold = shifted(world, 22)
    (approximate,) = world.ask(target, tokens=40)
    assert world.receipt(approximate)["reused_tokens"] > 0
    (later,) = world.ask(target, opt_out=True)
    assert later.num_cached_tokens <= world.audited(approximate)["spans"][0]["target_start"]
    assert worst(world.kv_of(later), world.kv_of(cold)) == 0.0


def test_an_equal_prompt_shares_the_approximate_blocks_and_nobody_else_finds_them(world):
    target, cold = shifted(world, 36)
    (first,) = world.ask(target, tokens=8)
    (second,) = world.ask(target, tokens=8)
    (other_salt,) = world.ask(target, tokens=1, salt="another tenant")
    assert len(world.loads) == 1
    receipt = world.receipt(second)
    assert receipt["outcome"] == "backend_materialized_reuse"
    assert second.num_cached_tokens == (len(target) - 1) // 32 * 32
    found = second.num_cached_tokens
    ours, theirs = ([(k[:found], v[:found]) for k, v in world.kv_of(one)] for one in (second, first))
    assert worst(ours, theirs) == 0.0, "the same blocks"
    assert other_salt.num_cached_tokens == 0
    (exact,) = world.ask(target, opt_out=True)
    assert worst(world.kv_of(exact), world.kv_of(cold)) == 0.0


def test_equal_prompts_that_come_at_once_are_loaded_once(world):
    target, _ = shifted(world, 37)
    outputs = world.ask(target, target, target, tokens=6)
    assert len(world.loads) == 1
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert all(world.receipt(output)["reused_tokens"] > 0 for output in outputs)


@pytest.mark.parametrize("books", ["bound", "not bound"])
def test_kv_events_announce_no_approximate_block(world, monkeypatch, books):
    if books == "not bound":  # as before 0.30
        monkeypatch.setattr(world.half.locks, "cached_counts", [])
    target, _ = shifted(world, 23)
    world.kv_events.clear()
    (output,) = world.ask(target, tokens=40)
    first = world.audited(output)["spans"][0]["target_start"]
    sequence = target + list(output.outputs[0].token_ids)
    blocks = [tuple(sequence[i : i + 32]) for i in range(0, len(sequence) - 31, 32)]
    assert set(stored(world)) <= set(blocks[: first // 32])
    world.cold(target)
    assert set(blocks[first // 32 : len(target) // 32]) <= set(stored(world)), "exact blocks are announced as ever"


def test_a_caller_learns_nothing_about_another_callers_prompt(world):
    target, _ = shifted(world, 33)
    (output,) = world.ask(target)
    seen, whole = world.receipt(output), world.audited(output)
    assert seen["reused_tokens"] > 0
    assert not {"spans", "namespace"} & seen.keys()
    assert whole["spans"][0]["donor_id"] not in json.dumps(seen)
    for donor in world.half.semblend.donors():
        world.worker.donor_kv.drop(donor.donor_id)
    (declined,) = world.ask(world.instruction(6) + world.document(33) + world.question())
    seen, whole = world.receipt(declined), world.audited(declined)
    assert (seen["reason"], whole["reason"]) == ("stale", "stale")
    assert "generation" in whole["detail"], "the operator reads which donor is gone"
    assert seen["detail"] == "the donor was replaced or evicted"


def test_a_reused_prompt_never_becomes_a_donor(world):
    target, _ = shifted(world, 24)
    before = {donor.donor_id for donor in world.half.semblend.donors()}
    (output,) = world.ask(target)
    assert world.receipt(output)["reused_tokens"] > 0
    assert {donor.donor_id for donor in world.half.semblend.donors()} == before


@pytest.mark.parametrize(("donor", "asking"), [("a", "b"), ("a", None), (None, "b")])
def test_a_donor_never_crosses_a_cache_salt(world, donor, asking):
    document = world.document(25)
    world.ask(world.instruction(1) + document + world.question(), salt=donor)
    (foreign,) = world.ask(world.instruction(2) + document + world.question(), salt=asking)
    assert world.receipt(foreign)["reused_tokens"] == 0
    assert world.receipt(foreign)["reason"] == "nothing_shared"
    (own,) = world.ask(world.instruction(3) + document + world.question(), salt=donor)
    assert world.receipt(own)["reused_tokens"] > 0


def test_a_request_may_opt_out(world):
    target, cold = shifted(world, 26)
    (output,) = world.ask(target, opt_out=True)
    assert world.receipt(output)["reason"] == "disabled"
    assert output.outputs[0].token_ids == cold.outputs[0].token_ids
    assert not world.loads


def test_discovery_only_changes_nothing_but_telemetry(world):
    world.half.semblend.config = dataclasses.replace(world.half.semblend.config, discovery_only=True)
    target, cold = shifted(world, 27)
    (output,) = world.ask(target)
    receipt = world.receipt(output)
    assert receipt["outcome"] == "semantic_discovery_only"
    assert output.num_cached_tokens == 0
    assert worst(world.kv_of(output), world.kv_of(cold)) == 0.0
    assert any(event.kind == "lookup" and event.fields["reusable_tokens"] for event in world.events)
    (again,) = world.ask(target, opt_out=True)
    assert again.num_cached_tokens == (len(target) - 1) // 32 * 32, "exact KV stays in the prefix cache"


def test_a_donor_that_the_worker_lost_is_computed_instead(world):
    target, cold = shifted(world, 28)
    for donor in world.half.semblend.donors():
        world.worker.donor_kv.drop(donor.donor_id)
    (output,) = world.ask(target)
    receipt = world.receipt(output)
    assert (receipt["outcome"], receipt["reason"]) == ("backend_declined_reuse", "stale")
    assert worst(world.kv_of(output), world.kv_of(cold)) < 1e-3
    assert output.outputs[0].token_ids == cold.outputs[0].token_ids


@pytest.mark.parametrize("mode", ["fast", "balanced"])
def test_wrong_donor_kv_is_caught_by_the_canary_and_its_donor_offered_no_more(world, mode, monkeypatch):
    monkeypatch.setattr(world.half.sessions, "_predict_loss", lambda *plan: None)  # whatever became of earlier prompts
    target, cold = shifted(world, 29)
    donors = world.half.semblend.donors()
    for donor in donors:
        held = world.worker.donor_kv.acquire(donor.donor_id, world.half.donors.find_generation(donor.donor_id))
        with torch.inference_mode():
            held.k[0, 60:110] = torch.roll(held.k[0, 60:110], 1, dims=0)  # whole blocks: none escapes
        world.worker.donor_kv.release(held)
    (output,) = world.ask(target, quality=mode)
    assert world.receipt(output)["reason"] == "validation_failed"
    assert output.outputs[0].token_ids == cold.outputs[0].token_ids
    left = {donor.donor_id for donor in world.half.semblend.donors()}
    assert not left & {donor.donor_id for donor in donors}
    (later,) = world.ask(target, opt_out=True)
    assert later.num_cached_tokens == (len(target) - 1) // 32 * 32, "it was computed exactly, and is found"
    assert worst(world.kv_of(later), world.kv_of(cold)) < 1e-3


def broken(*args, **named):
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize("part", ["_get_blender", "layout.scatter"])
def test_a_failing_worker_never_fails_a_request(world, monkeypatch, part):
    target, cold = shifted(world, 30)
    if part == "_get_blender":
        monkeypatch.setattr(world.worker, "_get_blender", broken)
    else:
        from semblend.materialize.blend import blender as blend

        monkeypatch.setattr(blend, "splice", broken)
    (output,) = world.ask(target)
    assert output.outputs[0].token_ids == cold.outputs[0].token_ids
    assert world.receipt(output)["reason"] == "error"
    assert any(event.kind == "error" and "on purpose" in event.fields["message"] for event in world.events)


def test_when_our_passes_fail_vllm_computes_the_blocks(world, monkeypatch):
    target, cold = shifted(world, 31)
    monkeypatch.setattr(world.worker._model, "forward", broken)
    (output,) = world.ask(target)
    assert output.outputs[0].token_ids == cold.outputs[0].token_ids
    receipt = world.receipt(output)
    assert receipt["outcome"] == "backend_declined_reuse"
    assert receipt["reused_tokens"] == 0
    assert any(event.kind == "error" and event.fields["where"] == "materialize" for event in world.events)
    monkeypatch.undo()
    (later,) = world.ask(target, opt_out=True)
    assert worst(world.kv_of(later), world.kv_of(cold)) == 0.0


@pytest.mark.parametrize("hook", ["count_matched", "note_allocated", "build_orders", "note_report", "finish"])
def test_a_failing_scheduler_connector_never_fails_a_request_and_pollutes_nothing(world, monkeypatch, hook):
    target, cold = shifted(world, 32)
    monkeypatch.setattr(world.half, hook, broken)
    world.worker.load, world.worker.capture = world._real["load"], world._real["capture"]
    (output,) = world.ask(target, tokens=1)
    assert output.outputs[0].token_ids[:1] == cold.outputs[0].token_ids[:1]
    assert any(event.kind == "error" for event in world.events)
    monkeypatch.undo()
    world.watch()
    world.half._records.clear()  # of hooks that were broken
    (later,) = world.ask(target, opt_out=True)
    assert worst(world.kv_of(later), world.kv_of(cold)) < 1e-3


def test_a_capture_that_fails_costs_a_donor_and_nothing_else(world, monkeypatch):
    monkeypatch.setattr(world.worker.donor_kv, "capture", broken)
    (output,) = world.ask(world.instruction(1) + world.document(33) + world.question())
    assert len(output.outputs[0].token_ids) == 4
    assert world.half.semblend.donors() == ()


def test_donors_stay_within_their_bytes_and_evicted_ones_are_forgotten(world):
    for seed in range(40, 48):
        world.ask(world.instruction(1) + world.document(seed, 100) + world.question(), tokens=1)
    used = world.worker.donor_kv.used_bytes["host"]
    assert used <= 256 << 20
    assert len(world.half.semblend.donors()) == len(world.worker.donor_kv)
    assert world.half.donors._held.keys() == {donor.donor_id for donor in world.half.semblend.donors()}


def test_resetting_the_connector_drops_every_donor(world):
    target, _ = shifted(world, 34)
    assert world.connector.reset_cache()
    (output,) = world.ask(target)
    assert world.receipt(output)["reused_tokens"] == 0
    assert len(world.worker.donor_kv) == 1, "the prompt just served; the one from before is gone"


def test_what_vllm_counts_and_what_receipts_say_adds_up(world):
    target, _ = shifted(world, 35)
    before = world.half.semblend.totals().tokens
    (output,) = world.ask(target)
    receipt = world.receipt(output)
    after = world.half.semblend.totals().tokens
    assert {kind: after[kind] - before[kind] for kind in after} == {
        kind: receipt[f"{kind}_tokens"] for kind in ("exact", "reused", "recomputed", "prefill")
    }
    claim = output.num_cached_tokens - receipt["exact_tokens"]
    held = sum(span["length"] for span in world.audited(output)["spans"])
    assert receipt["reused_tokens"] + receipt["recomputed_tokens"] == held <= claim
    assert claim == world.loads[-1].claim_end - receipt["exact_tokens"]


HOOKS = {
    "bind_connector_metadata, before anything": "before_step",
    "bind_connector_metadata, a load": "load",
    "wait_for_save": "capture",
    "get_finished": "take_finished",
    "get_block_ids_with_load_errors": "take_invalid_blocks",
    "build_connector_worker_meta": "take_report",
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_of_the_worker_that_fails_never_reaches_vllm(world, monkeypatch, hook):
    prompt = world.instruction(2) + world.document(61) + world.question()
    cold = world.cold(prompt)

    def fail(*_given):
        raise OSError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(world.worker, HOOKS[hook], fail)
        (output,) = world.ask(prompt)
    world.settle()
    assert output.outputs[0].token_ids == cold.outputs[0].token_ids
    assert sum(world.worker_connector._failures.counts.values()) > 0
    (later,) = world.ask(prompt)
    assert later.outputs[0].token_ids == cold.outputs[0].token_ids


def test_a_load_that_fails_inside_is_computed_by_vllm_as_cold(world, monkeypatch):
    target, cold = shifted(world, 62)
    with monkeypatch.context() as broken:
        broken.setattr(world.worker._loads, "work", lambda budget: 1 / 0)
        (output,) = world.ask(target)
    assert output.outputs[0].token_ids == cold.outputs[0].token_ids
    receipt = world.receipt(output)
    assert (receipt["reused_tokens"], receipt["reason"]) == (0, "error")
