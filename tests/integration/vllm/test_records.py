"""Which requests a step has to look at: with many that decode, those few must be found without looking at all."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from semblend import Namespace, Prompt
from semblend.integration.vllm.scheduler.records import Record, RecordBook, keep_block_tables

PROMPT = Prompt([1, 2, 3], namespace=Namespace(model="m"))
FLAGS = st.fixed_dictionaries(
    {name: st.booleans() for name in ("served", "admitted")}
    | {"claim_end": st.sampled_from([0, 3]), "salted": st.sampled_from([None, object()])}
)


@given(flags=st.lists(FLAGS, max_size=12))
def test_a_request_stays_open_while_it_is_unserved_or_salted_or_holds_donors_without_blocks(flags):
    book = RecordBook()
    for number, fields in enumerate(flags):
        book.add(str(number), Record(SimpleNamespace(request_id=str(number)), PROMPT, "fast", **fields))
    book.settle()
    wants = {
        name
        for name, record in book.items()
        if not record.served or record.salted is not None or (record.claim_end and not record.admitted)
    }
    assert set(book.open) == wants
    assert book.any_unserved == any(not record.served for record in book.values())


def test_a_removed_request_is_neither_known_nor_open():
    book = RecordBook()
    kept = book.add("a", Record(SimpleNamespace(request_id="a"), PROMPT, "fast"))
    assert book.remove("a") is kept
    assert (dict(book), book.open, book.remove("a")) == ({}, {}, None)


def test_blocks_of_a_resumed_request_are_not_added_to_its_old_table():
    record = Record(SimpleNamespace(request_id="a"), PROMPT, "fast", block_ids=[1])
    cached = SimpleNamespace(req_ids=["a", "b"], new_block_ids=[([2],), ([3],)], resumed_req_ids={"a"})
    keep_block_tables(cached, {"a": record})
    assert record.block_ids == [1]
