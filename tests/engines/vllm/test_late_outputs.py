"""The engine that hears of each step one step late, as on a GPU: it answers as the other, and shows what is late."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def tokens_of(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def make_prompts(world):
    """Three that share nothing, the last longer than a step."""
    return [world.instruction(n) + world.document(900 + n, items) + world.question() for n, items in
            ((1, 10), (2, 24), (3, 130))]  # fmt: skip


def test_the_next_step_is_scheduled_before_the_last_ones_output_is_processed(any_world, watch_verdicts):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    watch = watch_verdicts(any_world)
    any_world.ask(make_prompts(any_world)[0], tokens=4, opt_out=True)
    any_world.settle()
    late = isinstance(any_world.scheduler, AsyncScheduler)
    assert watch.ahead == (1 if late else 0)


def test_without_reuse_both_engines_say_the_same_tokens(small_world, late_world):
    prompts = make_prompts(small_world)
    small_world.take_turn()
    in_time = [tokens_of([small_world.cold(prompt, tokens=24)])[0] for prompt in prompts]
    late_world.take_turn()
    assert [tokens_of([late_world.cold(prompt, tokens=24)])[0] for prompt in prompts] == in_time
    together = late_world.ask(*prompts, tokens=24, opt_out=True)
    assert tokens_of(together) == in_time


@pytest.mark.parametrize("loads", ["sync", "async"])
def test_a_verdict_that_comes_with_the_steps_output_is_too_late_for_sync_loads(any_world, watch_verdicts, loads):
    """vLLM recovers a rejected sync load only if outputs are processed in time. This is why our loads are async."""
    from noise_connector import put_noise_into
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    prompt = make_prompts(any_world)[1]
    cold = tokens_of([any_world.cold(prompt, tokens=24)])
    with put_noise_into(any_world, loads_async=loads == "async") as double:
        watch = watch_verdicts(any_world)
        answer = tokens_of(any_world.ask(prompt, tokens=24))
        watch.close()
        assert double.spoiled > 2
    any_world.forget_prefixes()
    assert bool(watch.too_early) == (loads == "sync")
    late = isinstance(any_world.scheduler, AsyncScheduler)
    assert (answer == cold) == (loads == "async" or not late)


def list_steps_before_the_first_token(world, prompt, monkeypatch):
    """How many tokens each scheduler step computes, from the request's first to the one that computes its last token,
    and how many loads the workers had done after the first."""
    engine, schedule, scheduled, loads = world.llm.llm_engine, world.scheduler.schedule, [], []

    def watch(*args, **named):
        if scheduled and not loads:
            loads.append(len(world.loads))
        output = schedule(*args, **named)
        scheduled.append(sum(output.num_scheduled_tokens.values()))
        return output

    world.settle()
    world.loads.clear()
    with monkeypatch.context() as patched:
        patched.setattr(world.scheduler, "schedule", watch)
        world.ask(prompt, tokens=2)
    world.settle()
    assert not engine.has_unfinished_requests()
    first = next(number for number, tokens in enumerate(scheduled) if tokens)
    return scheduled[: first + 1], loads[0]


def test_a_request_on_an_idle_engine_takes_the_steps_that_vllm_needs_and_no_more(any_world, monkeypatch):
    """A load runs in the step that claims it, and is told with that step's output. vLLM schedules the request in the
    first step after it has processed that output: where it schedules ahead, one empty step lies between."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    ahead = 1 if isinstance(any_world.scheduler, AsyncScheduler) else 0
    document = any_world.document(950)
    any_world.ask(any_world.instruction(1) + document + any_world.question())
    hit = any_world.instruction(2) + document + any_world.question()
    steps, loads = list_steps_before_the_first_token(any_world, hit, monkeypatch)
    assert (steps, loads) == ([0, *[0] * ahead, 1], 1)
    steps, loads = list_steps_before_the_first_token(any_world, hit, monkeypatch)
    assert (steps[:-1], loads) == ([0], 0), "an equal prompt: vLLM looks again, with the hashes of the shared blocks"
    exact = any_world.instruction(3) + any_world.document(951) + any_world.question()
    steps, _ = list_steps_before_the_first_token(any_world, exact, monkeypatch)
    assert steps == [len(exact)]
    steps, _ = list_steps_before_the_first_token(any_world, exact, monkeypatch)
    assert len(steps) == 1, "an exact hit"
