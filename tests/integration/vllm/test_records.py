"""Which requests a step has to look at: with many that decode, those few must be found without looking at all."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from semblend import Namespace, Prompt
from semblend.integration.vllm.scheduler.records import Record, RecordBook, keep_block_tables
from semblend.session.session import SessionRequest, State

PROMPT = Prompt([1, 2, 3], namespace=Namespace(model="m"))


def make(name, **fields):
    return Record(SessionRequest(name, PROMPT), "fast", **fields)


FLAGS = st.fixed_dictionaries(
    {"state": st.sampled_from(State), "salted": st.sampled_from([None, object()]), "claim_end": st.sampled_from([0, 3])}
)


@given(flags=st.lists(FLAGS, max_size=12))
def test_a_request_stays_open_until_it_has_answered_and_while_it_is_salted(flags):
    book = RecordBook()
    for number, fields in enumerate(flags):
        book.add(str(number), make(str(number), **fields))
    book.settle()
    answered = (State.ANSWERED, State.KEPT)
    wants = {name for name, one in book.items() if one.state not in answered or one.salted is not None}
    assert set(book.open) == wants
    assert book.any_unanswered == any(one.state not in answered for one in book.values())


def test_a_removed_request_is_neither_known_nor_open():
    book = RecordBook()
    kept = book.add("a", make("a"))
    assert book.remove("a") is kept
    assert (dict(book), book.open, book.remove("a")) == ({}, {}, None)


def test_blocks_of_a_resumed_request_are_not_added_to_its_old_table():
    record = make("a", block_ids=[1])
    cached = SimpleNamespace(req_ids=["a", "b"], new_block_ids=[([2],), ([3],)], resumed_req_ids={"a"})
    keep_block_tables(cached, {"a": record})
    assert record.block_ids == [1]
