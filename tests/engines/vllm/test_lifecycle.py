"""The random lives of the contract (tests/contract/lifecycle.py) in a real vLLM."""

from __future__ import annotations

from vllm_lives import live_all

SEQUENCES, LONG = 50, 1_000


def test_whatever_happens_to_requests_in_vllm_the_contract_holds(any_world, is_long, monkeypatch):
    monkeypatch.setattr("semblend.plan.times.ROW_PRICE", 0.0)  # however little it saves, it is begun
    assert live_all(any_world, LONG if is_long else SEQUENCES) > 200, "the lives have led past every load"
