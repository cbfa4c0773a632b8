"""The lives of `lifecycle` on the smallest engine, and for each rule an error that it catches."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from lifecycle import SymbolicEngine, live

from semblend.session.local import KeptDonors, LocalSessions
from semblend.session.session import LoadResult, ReuseSession
from semblend.session.sessions import Sessions

SEQUENCES, LONG = 500, 100_000  # each error of MUTATIONS shows within the first fifty
PARTS = 2


@pytest.fixture(autouse=True)
def no_log():
    """A hundred loads fail on purpose."""
    logging.getLogger("semblend.session").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("semblend.session").setLevel(logging.NOTSET)


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_happens_to_requests_the_contract_holds(part, is_long):
    for seed in range(part, LONG if is_long else SEQUENCES, PARTS):
        live(SymbolicEngine(seed), seed)


def lose_slots(patch):
    patch.setattr(LocalSessions, "_give_slots_back", lambda self, session: self._loads.pop(session.request_id, None))


def keep_claims(patch):
    patch.setattr(Sessions, "end", lambda self, session: session.end())
    patch.setattr(Sessions, "stop_load", lambda self, session: session.stop_load())


def call_moved_kv_exact(patch):
    fill = ReuseSession.fill

    def fill_and_forget(self, result):
        fill(self, result)
        self.approximate_from = None

    patch.setattr(ReuseSession, "fill", fill_and_forget)


def write_no_receipt_for_cold_requests(patch):
    confirm = Sessions.confirm
    patch.setattr(Sessions, "confirm", lambda self, one, **more: None if one.cold else confirm(self, one, **more))


def write_a_receipt_again(patch):
    confirm = Sessions.confirm

    def confirm_again(self, session, **more):
        session.receipt, session.request = None, replace(session.request, answered=False)
        return confirm(self, session, **more)

    patch.setattr(Sessions, "confirm", confirm_again)
    patch.setattr(ReuseSession, "has_answered", property(lambda self: False))
    patch.setattr(ReuseSession, "answer", lambda self: None)
    patch.setattr(ReuseSession, "keep", lambda self, tokens: None)
    note = SymbolicEngine.finish

    def ask_again(self, one):
        self.note_receipt(one.request.request_id, self.sessions.note_prompt(one.request.request_id, None))
        note(self, one)

    patch.setattr(SymbolicEngine, "finish", ask_again)


def count_plans_as_reuse(patch):
    cold = ReuseSession.run_cold

    def run_cold(self, why, result=None):
        cold(self, why, LoadResult(reused_tokens=self.plan.reused_tokens) if self.plan else result)

    patch.setattr(ReuseSession, "run_cold", run_cold)


def never_end_a_load(patch):
    patch.setattr(LocalSessions, "work", lambda self, name, busy: None)


def forget_to_close_a_load(patch):
    left_open = []

    class Unclosed:
        def __init__(self, pieces):
            left_open.append(pieces)

        def close(self):
            pass

    stop = LocalSessions._stop_load

    def stop_without_closing(self, session):
        load = self._loads.get(session.request_id)
        if load is not None and load.pieces is not None:
            load.pieces = Unclosed(load.pieces)
        return stop(self, session)

    patch.setattr(LocalSessions, "_stop_load", stop_without_closing)


def leave_sessions_in_the_book(patch):
    forget = LocalSessions.forget

    def forget_but_keep(self, request_id):
        session = self.find(request_id)
        forget(self, request_id)
        if session is not None:
            self._book[request_id] = session

    patch.setattr(LocalSessions, "forget", forget_but_keep)


def keep_moved_kv_as_a_donor(patch):
    patch.setattr(Sessions, "count_donor_tokens", lambda self, session, tokens=None: len(session.prompt))


def keep_donors_of_old_weights(patch):
    patch.setattr(KeptDonors, "drop_all", lambda self: None)


def publish_all(patch):
    patch.setattr(LocalSessions, "find_exact_until", lambda self, request_id: None)


def cross_namespaces(patch):
    make = Sessions.make

    def make_without_salt(self, request):
        prompt = type(request.prompt)(request.prompt.token_ids)
        return make(self, replace(request, prompt=prompt))

    patch.setattr(Sessions, "make", make_without_salt)


MUTATIONS = [
    lose_slots, keep_claims, call_moved_kv_exact, write_no_receipt_for_cold_requests, write_a_receipt_again,
    count_plans_as_reuse, never_end_a_load, forget_to_close_a_load, leave_sessions_in_the_book,
    keep_moved_kv_as_a_donor, keep_donors_of_old_weights, publish_all, cross_namespaces,
]  # fmt: skip


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda one: one.__name__)
def test_an_engine_that_breaks_a_rule_is_caught(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        live_often(SEQUENCES)


def live_often(sequences):
    for seed in range(sequences):
        live(SymbolicEngine(seed), seed)
