"""An operator at the socket of a running engine."""

from __future__ import annotations

import threading

import pytest

from semblend.integration.vllm.scheduler.admin import ask
from semblend.prompt import name_tenant

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def door(world):
    return world.connector._admin.path


def test_a_tenants_donors_are_listed_and_forgotten_and_the_others_stay(world, door):
    document = world.document(71)
    prompt, target = world.instruction(1) + document + world.question(), world.instruction(5) + document
    for salt in ("alice", "bob"):
        world.ask(prompt, salt=salt)
    listed = ask(door, {"action": "list"})
    assert {donor["tenant"] for donor in listed["donors"]} == {name_tenant("alice"), name_tenant("bob")}
    answer = ask(door, {"action": "forget", "tenant": name_tenant("alice")})
    assert answer["queued"], "nothing runs"
    (alice,) = world.ask(target, salt="alice")
    (bob,) = world.ask(target, salt="bob")
    assert world.receipt(alice)["reused_tokens"] == 0
    assert world.receipt(bob)["reused_tokens"] > 0


def test_commands_while_requests_run_disturb_no_answer(world, door):
    document = world.document(72)
    prompts = [world.instruction(n) + document + world.question() for n in range(6)]
    alone = [output.outputs[0].token_ids for output in (world.cold(prompt, tokens=12) for prompt in prompts)]
    stop, answers = threading.Event(), []

    def pester():
        commands = [{"action": "list"}, *({"action": do, "everything": True} for do in ("pin", "forget"))]
        while not stop.is_set():
            answers.extend(ask(door, command) for command in commands)

    thread = threading.Thread(target=pester)
    thread.start()
    found = [output for prompt in prompts for output in world.ask(prompt, tokens=12)]
    stop.set()
    world.ask(world.document(73), opt_out=True)  # a step, for a command that waits for one
    thread.join(300)
    assert not thread.is_alive()
    assert answers
    assert all(answer["ok"] for answer in answers)
    cold = [output for output, tokens in zip(found, alone, strict=True) if output.outputs[0].token_ids == tokens]
    assert len(cold) >= 1
    assert all(world.receipt(output)["outcome"] for output in found)


def test_a_pinned_donor_outlives_a_flood(world, door, monkeypatch):
    document = world.document(74)
    world.ask(world.instruction(1) + document + world.question())
    assert ask(door, {"action": "pin", "everything": True})["queued"]
    world.ask(world.document(75), opt_out=True)
    (pinned,) = [donor for donor in ask(door, {"action": "list"})["donors"] if donor["pinned"]]
    books = world.worker.donor_kv._books
    monkeypatch.setitem(books.budget, "host", books.used["host"] * 3)
    for seed in range(80, 86):
        world.ask(world.instruction(seed) + world.document(seed))
    assert pinned["donor_id"] in {donor["donor_id"] for donor in ask(door, {"action": "list"})["donors"]}
    (later,) = world.ask(world.instruction(5) + document + world.question())
    assert world.receipt(later)["reused_tokens"] > 0
    ask(door, {"action": "unpin", "everything": True})
    world.ask(world.document(76), opt_out=True)
    assert not [donor for donor in ask(door, {"action": "list"})["donors"] if donor["pinned"]]
