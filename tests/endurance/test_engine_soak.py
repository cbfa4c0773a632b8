"""The soak and the storm over a random model, with a small pool and small donor budgets."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("fastapi", reason="the server needs fastapi")
pytest.importorskip("uvicorn", reason="a real socket needs uvicorn")

from endurance import engine_soak as soak


def small(tmp_path: Path, **changes: int):
    return soak.build(str(tmp_path), **({"pool_tokens": 1024, "donor_tokens": 1600} | changes))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_mixed_requests_over_a_small_pool_leak_nothing_and_stay_right(tmp_path, seed, is_long):
    engine, tokenizer, sink = small(tmp_path)
    seen = soak.soak(
        engine, soak.Asker(tokenizer.encode, seed, longest=300), requests=1000 if is_long else 200, seed=seed
    )
    seen.count(sink.events)
    assert seen.wrong == []
    assert not seen.errors
    # The mix is one that can break something: every path was taken.
    assert seen.preemptions > 0
    assert seen.evicted["engine"] > 10
    assert seen.compared >= 3
    assert {"length", "stop", "cancelled"} <= set(seen.finished)
    assert seen.outcomes["backend_materialized_reuse"] > 5
    assert all(seen.tokens[kind] for kind in ("exact", "reused", "recomputed", "prefill"))
    engine.reuse.donor_kv.close()


def test_a_leak_does_not_pass_the_soak(tmp_path):
    engine, tokenizer, _ = small(tmp_path)
    engine.reuse.semblend.register(engine_prompt(tokenizer), "held")
    engine.reuse.donor_kv.capture("held", 1, engine.pool.layout, soak_slots())
    engine.reuse.donor_kv.acquire("held", 1)
    engine.pool.allocate(1)
    seen = soak.soak(engine, soak.Asker(tokenizer.encode, 3, longest=100), requests=5, seed=3)
    assert any("leaked" in problem for problem in seen.wrong)
    assert any("holds on donors" in problem for problem in seen.wrong)


def engine_prompt(tokenizer):
    from semblend.prompt import Prompt

    return Prompt(tokenizer.encode("a text that nobody asks about " * 4))


def soak_slots():
    import torch

    return torch.arange(16, 32)


def test_clients_that_come_and_go_at_random_break_nothing(tmp_path, is_long):
    engine, tokenizer, _ = small(tmp_path)
    asker, clients = soak.Asker(tokenizer.encode, 4, longest=200), 500 if is_long else 60
    seen, wrong = soak.weather(
        engine,
        tokenizer,
        asker,
        clients=clients,
        seed=4,
        patience_s=900 if is_long else 20,
        max_running=4,
        max_waiting=8,
    )
    assert wrong == []
    assert seen.statuses["429"] > 0  # back-pressure was felt
    assert seen.statuses["200"] > 10
    assert sum(seen.ways.values()) == clients
    assert len(seen.ways) == 5
    engine.reuse.donor_kv.close()
