"""In a real Dynamo: requests arrive where their documents were computed, and Dynamo chooses for all others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

WAYS = pytest.mark.parametrize("through_pin", [False, True], ids=["router", "pin"])


def model_for(through_pin: bool) -> str:
    """Our router serves a model of its own name; the pin stands in front of the stock one."""
    return "stock" if through_pin else "semantic"


@WAYS
def test_shifted_documents_arrive_where_they_were_computed(dynamo, documents, through_pin):
    def ask(text):
        return dynamo.ask(text, model_for(through_pin), through_pin=through_pin)

    # Held apart by hand: on an idle machine Dynamo would put all three on one worker.
    homes = {}
    for document, worker in zip(documents, dynamo.list_workers(), strict=True):
        homes[document] = dynamo.ask("One. " + document, "stock", through_pin=through_pin, pin_to=worker).worker
    assert len(set(homes.values())) == 3
    first = {document: ask("Two, behind something else. " + document) for document in documents}
    for round_number in range(3):
        for document in documents:
            again = ask(f"Question {round_number}, " * (round_number + 2) + document)
            assert (again.status, again.reason) == (200, "donors")
            assert again.outcome == "semantic_placement"
            assert again.worker == first[document].worker


@WAYS
def test_an_unknown_prompt_follows_dynamos_choice(dynamo, documents, through_pin):
    """Dynamo's own index knows a beginning that was never sent through us; a free request goes where that is."""
    home = list(dynamo.list_workers())[1]
    assert dynamo.ask(documents[0][:40], "stock", pin_to=home).worker == home  # two blocks, too short for us
    found = dynamo.ask(documents[0][:40] + documents[1], model_for(through_pin), through_pin=through_pin)
    assert (found.status, found.reason, found.outcome) == (200, "unknown", "cold_fallback")
    assert found.worker == home


def test_a_beginning_that_only_dynamo_knows_is_an_exact_route(dynamo, documents):
    home = list(dynamo.list_workers())[2]
    dynamo.ask(documents[0], "stock", pin_to=home)
    found = dynamo.ask(documents[0] + " And?")
    assert (found.worker, found.outcome) == (home, "exact_prefix_route")
    assert found.cached_tokens >= 1900  # the mocker's own report


def test_two_salts_know_nothing_of_each_other(dynamo, documents):
    """In our evidence and in the question that we ask Dynamo's index. The mockers' own caches ignore salts."""
    first = dynamo.ask(documents[0] + " Salted.", cache_salt="a")
    again = dynamo.ask("Elsewhere. " + documents[0], cache_salt="a")
    assert (first.reason, again.reason, again.worker) == ("unknown", "donors", first.worker)
    assert dynamo.ask(documents[0] + " Salted.", cache_salt="b").reason == "unknown"


def test_load_sends_a_request_elsewhere(dynamo, documents):
    """Long answers on one worker: the guard leaves the next request for its document to Dynamo."""
    first = dynamo.ask("One. " + documents[0])
    with ThreadPoolExecutor(24) as pool:
        # Each occupies its worker for seconds; Dynamo's own count of active requests is what the guard reads.
        waiting = [pool.submit(dynamo.ask, f"Number {n}. " + documents[0], answer_tokens=3000) for n in range(20)]
        answers = [one.result() for one in waiting]
    reasons = {answer.reason for answer in answers}
    assert {answer.status for answer in answers} == {200}
    assert reasons == {"donors", "load"}
    moved = {answer.worker for answer in answers if answer.reason == "load"}
    assert moved - {first.worker}
    # A worker to which Dynamo moved the document has it from then on.
    assert {answer.worker for answer in answers if answer.reason == "donors"} <= moved | {first.worker}


def test_a_client_that_leaves_frees_its_worker(dynamo, documents):
    """Twenty clients leave in the middle of long answers, one after the other; if the books still held them, the guard
    would see a load, and another worker would get the document."""
    home = dynamo.ask("One. " + documents[0]).worker
    for number in range(20):
        dynamo.ask_and_leave(f"Number {number}. " + documents[0])
    deadline = time.monotonic() + 120
    while (answer := dynamo.ask("Later. " + documents[0])).reason != "donors" and time.monotonic() < deadline:
        time.sleep(0.5)
    assert (answer.reason, answer.worker) == ("donors", home)


def test_an_operator_can_ask_why_requests_went_where_they_went(dynamo, documents):
    dynamo.ask("One. " + documents[0])
    dynamo.ask("Two. " + documents[0])
    script = Path(__file__).with_name("ask_status.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script], env=dynamo.make_environment(), capture_output=True, timeout=400
    )
    counts = json.loads(done.stdout.splitlines()[-1])
    assert min(counts["unknown"], counts["donors"]) >= 1


def test_a_pin_to_nobody_is_dynamos_to_refuse(dynamo):
    assert dynamo.ask("Hello?", "stock", pin_to=12345).status == 400
