"""The random lives of the contract (tests/contract/lifecycle.py) in a real SGLang scheduler.

SGLang takes rows back by itself where the pool is too small for all answers, and begins those requests again.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "contract")]
from lifecycle import Engine, live  # noqa: E402

SEQUENCES, LONG = 25, 500


class SglangLives(Engine):
    def __init__(self, world: Any, seed: int) -> None:
        super().__init__()
        self.world, self.rng, self.names, self.asked = world, random.Random(seed), {}, []
        world.flush()
        world.events.clear()
        self.free = world.count_free()

    def submit(self, name: str, tokens: list[int], mode: str, salt: str) -> None:
        """Every request has an id of its own here: SGLang's front refuses one that is under way."""
        sent = self.world.send(tokens, tokens=self.rng.randrange(1, 5), salt=salt or None, quality=mode)
        self.names[sent] = name
        self.asked.append((tokens, salt))

    def step(self) -> None:
        self.world.step()

    def abort(self, rng: random.Random) -> None:
        if waiting := [name for name in self.names if not self.world.answers[name].done]:
            self.world.abort(rng.choice(waiting))

    def preempt(self, rng: random.Random) -> None:
        """Take the rows of all that run, as SGLang does when the pool is full."""
        scheduler = self.world.scheduler
        batch = scheduler.running_batch
        if batch.is_empty() or not hasattr(batch, "retract_all"):
            return
        scheduler.waiting_queue.extend(batch.retract_all(scheduler.server_args))
        scheduler.last_batch = None

    def reset(self) -> None:
        self.world.sessions.reset()

    def forget_donor(self, rng: random.Random) -> None:
        if donors := self.world.sessions.semblend.donors():
            self.world.sessions.semblend.forget(rng.choice(donors).donor_id)

    def fail_next_load(self) -> None:
        sessions = self.world.sessions
        if "_get_blender" in vars(sessions):
            return

        def fail(mode: str) -> Any:
            del sessions._get_blender
            raise RuntimeError("it fails")

        sessions._get_blender = fail

    def change_weights(self) -> None:
        """As the watch sees it: every donor goes."""
        self.world.sessions.reset()

    @property
    def is_idle(self) -> bool:
        waiting = self.world.scheduler.waiting_queue
        idle = all(self.world.answers[name].done for name in self.names) and not waiting
        if idle:
            self.world.settle()
            self.answered.clear()
            self.receipts.clear()
            for sent in self.names:
                told = [event for event in self.world.events if event.request_id == sent]
                self.answered[sent] = int(bool(self.world.answers[sent].tokens))
                self.receipts[sent] = sum(event.fields.get("receipt") is not None for event in told)
                if not self.answered[sent]:  # aborted: its first token may have been on the way
                    self.answered[sent] = self.receipts[sent] = 0
        return idle

    def list_remains(self) -> list[str]:
        vars(self.world.sessions).pop("_get_blender", None)
        for tokens, salt in self.asked[-2:]:
            if salt or not self.world.exact_hit(tokens):
                continue
            held = self.world.read_tree(tokens)
            self.world.forget_prefixes()
            self.world.ask(tokens, opt_out=True)
            cold = self.world.read_tree(tokens)
            for ours, theirs in zip(held, cold, strict=True):
                for part, other in zip(ours, theirs, strict=True):
                    if not torch.allclose(part, other[: len(part)], atol=1e-3, rtol=1e-2):
                        self.faults.append("KV in SGLang's tree is not what it computes")
        sessions = self.world.sessions
        found = {
            "claims": len(sessions.semblend._claims),
            "sessions": len(sessions),
            "loads": len(sessions._loads),
            "holds": sessions.donors.kv.holders,
        }
        self.world.flush()
        found["slots"] = self.free - self.world.count_free()
        return [f"{count} {what}" for what, count in found.items() if count] + self.faults


def test_whatever_happens_to_requests_in_sglang_the_contract_holds(engine, is_long, monkeypatch):
    monkeypatch.setattr("semblend.plan.times.ROW_PRICE", 0.0)  # however little it saves, it is begun
    reused = 0
    for seed in range(LONG if is_long else SEQUENCES):
        live(SglangLives(engine, seed), seed, events=12)
        told = [event.fields.get("receipt") for event in engine.events]
        reused += sum(receipt.reused_tokens for receipt in told if receipt is not None)
    assert reused > 200, "the lives have led past every load"
