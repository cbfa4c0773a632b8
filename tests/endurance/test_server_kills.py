"""SIGTERM and kill -9 under load, with a real model and real clients."""

from __future__ import annotations

import json

import pytest
from endurance.kill_rounds import TOKENS, WAYS, judge, run_rounds

MODEL = "smollm2-135m"


@pytest.mark.slow
def test_signals_under_load_leave_nothing_half_served_and_nothing_on_disk(tmp_path, is_long):
    models = pytest.importorskip("semblend.models", reason="the engine's extras are not installed")
    if not models.is_pulled(models.find_model(MODEL)):
        pytest.skip(f"semblend models pull {MODEL}")
    count = 25 if is_long else 3
    rounds = run_rounds(tmp_path, count, model=MODEL, seed=13)
    assert {way: sum(one.how == way for one in rounds) for way in WAYS} == dict.fromkeys(WAYS, count)
    assert [one.problems for one in rounds] == [[]] * (2 * count)
    assert sum(one.ends["whole"] for one in rounds) >= 6
    assert sum(one.ends["told"] for one in rounds) >= 1


def chunked(*parts: str, end: bool = True) -> bytes:
    body = b"".join(f"{len(part.encode()):x}\r\n{part}\r\n".encode() for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + (b"0\r\n\r\n" if end else b"")


def event(**fields: object) -> str:
    return f"data: {json.dumps(fields)}\n\n"


USED, DONE = event(usage={"completion_tokens": TOKENS}), "data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (b"", "nothing"),
        (b"HTTP/1.1 200 OK\r\nTransf", "cut"),
        (chunked(event(text="a"), end=False), "cut"),
        (chunked(event(text="a"), USED, DONE), "whole"),
        (chunked(event(text="a"), USED), "wrong"),
        (chunked(event(text="a"), event(usage={"completion_tokens": TOKENS - 1}), DONE), "wrong"),
        (chunked(event(text="a"), event(error={"code": "shutting_down"}), DONE), "told"),
        (b'HTTP/1.1 503 x\r\nContent-Length: 24\r\n\r\n{"error": {"hint": "x"}}', "told"),
        (b'HTTP/1.1 503 x\r\nContent-Length: 25\r\n\r\n{"error": {"hint": "x"}}', "cut"),
    ],
)
def test_an_answer_is_judged_by_its_bytes(answer, end):
    assert judge(answer, stream=True) == end
