"""In a real Dynamo: a killed worker costs no request, through the router and through the pin."""

from __future__ import annotations


def test_a_killed_worker_is_gone_around_at_once_and_forgotten(dynamo, documents):
    homes = [dynamo.ask("One. " + document).worker for document in documents]
    pinned = [dynamo.ask("Two. " + document, "stock", through_pin=True).worker for document in documents]
    dynamo.kill_worker(homes[0])
    # Dynamo goes on listing it for its lease of ten seconds.
    assert homes[0] in dynamo.list_workers()
    after = [dynamo.ask("Three, after the death. " + document) for document in documents]
    beside = [dynamo.ask("Four. " + document, "stock", through_pin=True) for document in documents]
    assert {answer.status for answer in [*after, *beside]} == {200}, [*after, *beside]
    assert homes[0] not in {answer.worker for answer in [*after, *beside]}
    moved = [answer for answer, home in zip(after, homes, strict=True) if home == homes[0]]
    assert all(answer.reason in ("fault", "unknown") for answer in moved)
    assert {answer.reason for answer in after} & {"fault"}
    kept = [answer.worker for answer, home in zip(beside, pinned, strict=True) if home != homes[0]]
    assert kept == [home for home in pinned if home != homes[0]]
    # The documents have new homes.
    for document, answer in zip(documents, after, strict=True):
        again = dynamo.ask("Five, some other words. " + document)
        assert (again.worker, again.reason) == (answer.worker, "donors")


def test_a_worker_that_comes_anew_gets_work_again(dynamo, documents):
    dynamo.wait_for_workers(2)
    before = set(dynamo.list_workers())
    dynamo.start_worker(7)
    dynamo.wait_for_workers(3)
    (new,) = set(dynamo.list_workers()) - before
    assert dynamo.ask(documents[0], "stock", pin_to=new).worker == new
    assert dynamo.ask(documents[0] + " And?").worker == new
    assert dynamo.ask("Behind something else: " + documents[0]).worker == new


def test_a_dead_router_is_dynamos_to_report_and_the_stock_model_serves_on(dynamo, documents):
    dynamo.processes["router"].kill()
    assert dynamo.ask(documents[0]).status >= 500
    assert dynamo.ask(documents[0], "stock").status == 200
