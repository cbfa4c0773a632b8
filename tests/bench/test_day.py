"""The checks of the day find what they are for: a tenant that got another's KV, a code in a wrong answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from _day_page import render_day
from _day_stream import TENANTS, Ask
from day import Day, Served, check_answers, check_tenants, describe_documents, make_body, read_answer


def make_served(number: int, tenant: str, saved: int = 0, answer: str = "", document: str = "document 1") -> Served:
    return Served(
        number, tenant, "document", (document,), float(number), 0, 1.0, 200, replica=f"r{number % 2}",
        prompt_tokens=500, reused_tokens=saved, answer=answer,
    )  # fmt: skip


def test_reuse_in_a_first_question_about_a_document_of_others_is_found():
    day = Day(served=[make_served(0, "acme"), make_served(1, "bolt", 20), make_served(2, "corva", 300)])
    assert check_tenants(day) == {"first_questions": 2, "with_reuse": [2], "answers_with_a_foreign_code": []}


def test_reuse_of_ones_own_document_is_no_fault():
    day = Day(served=[make_served(0, "acme"), make_served(1, "acme", 400)])
    assert check_tenants(day)["first_questions"] == 0


def test_a_code_counts_in_answers_to_others_only():
    own, other = make_served(0, "acme", answer=TENANTS["acme"]), make_served(1, "bolt", answer=f"see {TENANTS['acme']}")
    assert check_tenants(Day(served=[own, other]))["answers_with_a_foreign_code"] == [1]


def test_an_answer_that_differs_from_the_cold_one_is_found():
    class Cold:
        def ask_cold(self, ask: Ask, replica: str) -> str:
            assert replica == "r1"
            return "cold"

    asked = [Ask(n, "acme", "document", (("user", "?"),), ("d",)) for n in range(2)]
    day = Day(served=[make_served(0, "acme"), make_served(1, "acme", 300, "warm")])
    (one,) = check_answers(Cold(), asked, day, every=1)  # type: ignore[arg-type]
    assert (one["number"], one["equal"], one["cold"]) == (1, False, "cold")


@pytest.mark.parametrize(
    "place", [lambda receipt: {"semblend": receipt}, lambda receipt: {"kv_transfer_params": {"semblend": receipt}}]
)
def test_the_receipt_is_read_from_either_engine(place):
    body = {
        "choices": [{"message": {"content": "so"}}],
        "usage": {"prompt_tokens": 90},
        **place({"exact_tokens": 16, "reused_tokens": 40, "outcome": "backend_materialized_reuse"}),
    }
    served = make_served(3, "acme")
    read_answer({"headers": {"X-Replica-Id": "r2"}, "body": body, "status": 200}, served)
    assert (served.replica, served.saved_tokens, served.answer) == ("r2", 56, "so")


def test_the_page_shows_a_request_without_an_answer_and_a_crossing():
    lost = make_served(1, "bolt")
    lost.status, lost.replica = 502, ""
    served = [make_served(0, "acme"), lost]
    result = {
        "requests": [vars(one) for one in served],
        "events": [(0.5, "redis is killed")],
        "checks": {
            "tenants": {"first_questions": 1, "with_reuse": [1], "answers_with_a_foreign_code": []},
            "answers": [],
        },
        "tables": [{"title": "By replica", "columns": ["", "requests"], "rows": [["r0 (embedded-0)", 1]]}],
        "notes": ["a <note>"],
        "provenance": {"command": "c", "date": "2026-11-16", "cpu_model": "x", "cpu_cores": 2},
    }
    page = render_day(result)
    assert "1 of them had no answer" in page
    assert "1 CROSSED BETWEEN TENANTS" in page
    assert "a &lt;note&gt;" in page


def test_documents_are_listed_with_the_engines_that_answered():
    day = Day(served=[make_served(n, "acme") for n in range(4)])
    assert describe_documents(day) == [["acme, document 1", 4, 2, "r0 2, r1 2"]]


def test_a_body_asks_for_a_greedy_answer():
    body = make_body(Ask(0, "acme", "document", (("user", "?"),), ()), "m")
    assert (body["temperature"], body["messages"]) == (0, [{"role": "user", "content": "?"}])
