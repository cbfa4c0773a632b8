"""Random lives of requests (tests/contract/lifecycle.py) in a real vLLM."""

from __future__ import annotations

import contextlib
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_world import worst

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "contract")]
from lifecycle import Engine, live  # noqa: E402


class VllmLives(Engine):
    """Requests in the engine of the tests. Donors and prefixes of one life are gone before the next."""

    def __init__(self, world: Any, seed: int) -> None:
        super().__init__()
        self.world, self.engine, self.rng = world, world.llm.llm_engine, random.Random(seed)
        self.seed, self.under_way, self.silent, self.asked = seed, set(), set(), []
        world.forget_prefixes()
        world.half.reset()
        world.events.clear()
        world.settle()
        self.free = world.count_free_blocks()

    def submit(self, name: str, tokens: list[int], mode: str, salt: str) -> None:
        from vllm import SamplingParams

        name = f"s{self.seed}{name}"
        if name in self.under_way:
            return
        extra = {"kv_transfer_params": {"semblend": {"quality": mode}}}
        answer = self.rng.randrange(1, 5)
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, extra_args=extra)
        given = {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {})
        self.engine.add_request(name, given, params)
        self.under_way.add(name)
        self.silent.add(name)
        self.asked.append((tokens, salt))

    def step(self) -> None:
        for output in self.engine.step():
            name = output.request_id
            if output.outputs[0].token_ids and name in self.silent:
                self.silent.discard(name)
                self.answered[name] += 1
            if output.finished:
                self.under_way.discard(name)
        self.count_receipts()

    def count_receipts(self) -> None:
        told = [event for event in self.world.events if event.fields.get("receipt") is not None]
        self.receipts.clear()
        for event in told:
            self.receipts[event.request_id.rpartition("-")[0]] += 1

    def abort(self, rng: random.Random) -> None:
        if self.under_way:
            name = rng.choice(sorted(self.under_way))
            self.engine.abort_request([name])
            self.under_way.discard(name)
            self.count_receipts()

    def preempt(self, rng: random.Random) -> None:
        """vLLM takes the blocks of all that run; its prefix cache goes with it, our donors stay.

        Where a load holds blocks it cannot empty the cache and says so; the others are preempted all the same.
        """
        with contextlib.suppress(RuntimeError):
            self.world.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.world.half.donors.resets.was_reset()

    def reset(self) -> None:
        self.world.half.reset()

    def forget_donor(self, rng: random.Random) -> None:
        if donors := self.world.half.semblend.donors():
            self.world.half.semblend.forget(rng.choice(donors).donor_id)

    def fail_next_load(self) -> None:
        worker = self.world.worker
        if "_get_blender" in vars(worker):
            return

        def fail(mode: str) -> Any:
            del worker._get_blender
            raise RuntimeError("it fails")

        worker._get_blender = fail

    def change_weights(self) -> None:
        """Told as the workers tell it: donors of the old ones go, and so must prefixes."""
        self.preempt(self.rng)
        self.world.half.reset()

    @property
    def is_idle(self) -> bool:
        return not self.engine.has_unfinished_requests() and not self.under_way

    def list_remains(self) -> list[str]:
        self.world.settle()
        vars(self.world.worker).pop("_get_blender", None)
        for tokens, salt in self.asked[-2:]:
            (cached,) = self.world.ask(tokens, opt_out=True, salt=salt or None)
            if not worst(self.world.kv_of(cached), self.world.kv_of(self.world.cold(tokens))) < 1e-3:
                self.faults.append("KV that vLLM has cached is not what it computes")
        half = self.world.half
        found = {
            "claims": len(half.semblend._claims),
            "records": len(half._records),
            "blocks": self.free - self.world.count_free_blocks(),
            "loads": len(self.world.worker._loads),
        }
        return [f"{count} {what}" for what, count in found.items() if count] + self.faults


def live_all(world: Any, sequences: int) -> int:
    """Every life, and the tokens that were reused in them. What can be reused is, however slow the machine is: nothing
    is learned of times."""
    from semblend.plan.times import TimeModel

    reused, sessions = 0, world.half.sessions
    kept = sessions.config, sessions.times
    sessions.config, sessions.times = replace(sessions.config, learn_costs=False), TimeModel()
    try:
        for seed in range(sequences):
            lives = VllmLives(world, seed)
            live(lives, seed)
            told = [event.fields.get("receipt") for event in world.events]
            reused += sum(receipt.reused_tokens for receipt in told if receipt is not None)
    finally:
        sessions.config, sessions.times = kept
    return reused
