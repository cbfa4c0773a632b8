"""Whatever goes wrong with a load costs time: the answer is the cold one, token by token, and nothing wrong stays."""

from __future__ import annotations

import pytest
from faults import CONTROL, NAMES, REASONS, Faults
from vllm_world import worst

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LONG = 24
MODES = ("fast", "balanced")


def tokens_of(output):
    return list(output.outputs[0].token_ids)


@pytest.fixture
def poisoned(any_world, monkeypatch):
    """An engine, its faults, and a memory that never says that a reuse would be in vain."""
    monkeypatch.setattr(any_world.half.sessions, "_predict_loss", lambda *plan: None)
    return any_world, Faults(any_world.connector, any_world.worker_connector)


def make_prompts(world, seed):
    """A donor, and a prompt that shares its document."""
    document = world.document(seed)
    return world.instruction(1) + document + world.question(), world.instruction(5) + document + world.question()


def assert_nothing_wrong_is_cached(world, prompt, cold):
    """vLLM alone, with its prefix cache as it is."""
    (later,) = world.ask(prompt, tokens=LONG, opt_out=True)
    assert worst(world.kv_of(later), world.kv_of(cold)) < 1e-3
    assert tokens_of(later) == tokens_of(cold)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", NAMES)
def test_a_load_that_fails_changes_no_token(poisoned, watch_verdicts, fault, mode):
    world, faults = poisoned
    donor, target = make_prompts(world, 700 + NAMES.index(fault))
    cold = world.cold(target, tokens=LONG)
    watch = watch_verdicts(world)
    with faults.spoil(fault, lambda: world.ask(donor)):
        (answer,) = world.ask(target, tokens=LONG, quality=mode)
        receipt = world.receipt(answer)
        assert tokens_of(answer) == tokens_of(cold)
        assert list(watch.loads.values()) == [1], "claimed once, and never again after its load was rejected"
        assert not watch.too_early, "a token was computed before the verdict was known"
        assert (receipt["reason"], receipt["reused_tokens"]) == (REASONS[fault], 0)
    assert_nothing_wrong_is_cached(world, target, cold)


@pytest.mark.parametrize("mode", MODES)
def test_noise_that_nobody_notices_does_change_tokens(poisoned, mode):
    """The control: if this passed as equal, none of these tests would show anything."""
    world, faults = poisoned
    donor, target = make_prompts(world, 710)
    cold = world.cold(target, tokens=LONG)
    with faults.spoil(CONTROL, lambda: world.ask(donor)):
        (answer,) = world.ask(target, tokens=LONG, quality=mode)
    assert world.receipt(answer)["reused_tokens"] > 0
    assert tokens_of(answer) != tokens_of(cold)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", ["noise", "truncated"])
def test_a_donor_that_failed_its_check_is_not_offered_again(poisoned, fault, mode):
    world, faults = poisoned
    donor, target = make_prompts(world, 720)
    again = world.instruction(3) + target[len(world.instruction(5)) :]
    cold = [tokens_of(world.cold(prompt, tokens=LONG)) for prompt in (target, again)]
    with faults.spoil(fault, lambda: world.ask(donor, tokens=1)):
        (spoiled,) = world.half.semblend.donors()
        (first,) = world.ask(target, tokens=LONG, quality=mode)
        assert world.receipt(first)["reason"] == "validation_failed"
        world.forget_prefixes()
        (second,) = world.ask(again, tokens=LONG, quality=mode)
    assert tokens_of(first) == cold[0]
    offered = {span["donor_id"] for span in world.audited(second)["spans"]}
    assert spoiled.donor_id not in offered
    assert spoiled.donor_id not in {donor.donor_id for donor in world.half.semblend.donors()}
    if not offered:  # the answer before it may have become a donor, because it was computed in full
        assert tokens_of(second) == cold[1]


def test_others_of_the_same_step_answer_as_ever(poisoned, watch_verdicts):
    """Two rejected loads, one that is right, and one request without a donor, all at once."""
    world, faults = poisoned
    donor, target = make_prompts(world, 730)
    other_donor, other = make_prompts(world, 731)
    right_donor, right = make_prompts(world, 732)
    alone = world.instruction(2) + world.document(733) + world.question()
    cold = [tokens_of(world.cold(prompt, tokens=LONG)) for prompt in (target, other, alone)]
    with faults.spoil("noise", lambda: world.ask(donor, other_donor)):
        world.ask(right_donor)
        (reused,) = world.ask(right, tokens=LONG)
        world.forget_prefixes()
        watch = watch_verdicts(world)
        answers = world.ask(target, right, other, alone, tokens=LONG)
    assert [tokens_of(answers[n]) for n in (0, 2, 3)] == cold
    assert tokens_of(answers[1]) == tokens_of(reused)
    assert world.receipt(answers[1])["reused_tokens"] > 0
    assert not watch.too_early
    assert set(watch.loads.values()) == {1}


# -- while a load is under way -----------------------------------------------------------------------------------------


class Slow:
    """Somebody decodes, so that a load gets a piece of each step, and ``target`` is in the middle of its own."""

    def __init__(self, world, monkeypatch, target, mode):
        import dataclasses

        from vllm import SamplingParams

        monkeypatch.setattr(world.half, "settings", dataclasses.replace(world.half.settings, step_work_ms=0.01))
        self.world, self.engine, self.outputs = world, world.llm.llm_engine, {}
        self.decoding = world.instruction(4) + world.document(799, 8)
        wish = {"kv_transfer_params": {"semblend": {"opt_out": True}}}
        params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, extra_args=wish)
        self.engine.add_request("decoding", {"prompt_token_ids": self.decoding}, params)
        for _ in range(4):
            self.step()
        wish = {"kv_transfer_params": {"semblend": {"quality": mode}}}
        params = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True, extra_args=wish)
        self.engine.add_request("target", {"prompt_token_ids": target}, params)
        for _ in range(6):
            self.step()
            if len(world.worker._loads):
                return
        raise AssertionError("no load is under way")

    def step(self):
        for output in self.engine.step():
            self.outputs[output.request_id] = output

    def finish(self):
        while self.engine.has_unfinished_requests():
            self.step()
        self.world.settle()
        return self.outputs.get("target")


@pytest.mark.parametrize("mode", MODES)
def test_a_load_in_pieces_that_fails_at_the_end_changes_no_token(poisoned, watch_verdicts, monkeypatch, mode):
    world, faults = poisoned
    donor, target = make_prompts(world, 740)
    cold = world.cold(target, tokens=LONG)
    with faults.spoil("noise", lambda: world.ask(donor)):
        watch = watch_verdicts(world)
        answer = Slow(world, monkeypatch, target, mode).finish()
    assert tokens_of(answer) == tokens_of(cold)
    assert world.receipt(answer)["reason"] == "validation_failed"
    assert not watch.too_early
    assert_nothing_wrong_is_cached(world, target, cold)


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_is_aborted_while_it_loads_gives_everything_back(poisoned, monkeypatch, mode):
    """That its blocks, its record and its claim are gone is checked behind every test."""
    world, faults = poisoned
    donor, target = make_prompts(world, 750)
    cold = world.cold(target, tokens=LONG)
    with faults.spoil("noise", lambda: world.ask(donor)):
        slow = Slow(world, monkeypatch, target, mode)
        with monkeypatch.context() as held:
            held.setattr(world.worker._loads, "work", lambda budget_ms: [])  # it does not end by itself
            world.llm.llm_engine.abort_request(["target"])
            slow.step()
            assert not len(world.worker._loads), "the worker has heard that nobody waits for it any more"
            assert world.worker.donor_kv.holders == 0
        slow.finish()
    assert_nothing_wrong_is_cached(world, target, cold)


@pytest.mark.parametrize("mode", MODES)
def test_a_reset_while_a_prompt_loads_changes_no_token(poisoned, watch_verdicts, monkeypatch, mode):
    world, faults = poisoned
    donor, target = make_prompts(world, 760)
    cold = world.cold(target, tokens=LONG)
    with faults.spoil("noise", lambda: world.ask(donor)):
        (spoiled,) = world.half.semblend.donors()
        watch = watch_verdicts(world)
        slow = Slow(world, monkeypatch, target, mode)
        world.llm.reset_prefix_cache(reset_connector=True)
        answer = slow.finish()
    assert tokens_of(answer) == tokens_of(cold)
    assert world.receipt(answer)["reused_tokens"] == 0
    assert not watch.too_early
    assert_nothing_wrong_is_cached(world, target, cold)
    assert spoiled.donor_id not in {donor.donor_id for donor in world.half.semblend.donors()}
