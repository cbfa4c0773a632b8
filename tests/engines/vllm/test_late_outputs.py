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
