"""Fleets of many replicas: by columns everything is decided as it is one by one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantickv.edge.upstream_call import EngineAddress, Upstream
from semantickv.routing import router as routing
from semantickv.routing.fingerprint import PromptPieces
from semantickv.routing.holders import HolderIndex
from semantickv.routing.locality import Overlap, ReplicaMemory
from semantickv.routing.policies import POLICIES
from semantickv.routing.replica import Health, Replica
from semantickv.routing.router import EngineReuse, RouteDecision, Router, RouteRequest
from semantickv.routing.standings import MOST_SHOWN

keys = st.integers(1, 40)
prompts = st.lists(keys, min_size=1, max_size=12).map(
    lambda values: PromptPieces(
        tuple(values),
        tuple(1000 + sum(values[: n + 1]) for n in range(len(values))),
        (64,) * len(values),
        (1.0,) * len(values),
    )
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_index_says_of_every_replica_what_its_own_memory_says(data):
    count = data.draw(st.sampled_from([1, 3, 30]))
    memories, index = [ReplicaMemory(1500) for _ in range(count)], HolderIndex(count)
    early = data.draw(st.booleans())
    if early:
        for row, memory in enumerate(memories):
            memory.join(index, row)
    for _ in range(data.draw(st.integers(0, 25))):
        memory = memories[data.draw(st.integers(0, count - 1))]
        act = data.draw(st.sampled_from(["note", "note", "note", "add", "drop", "clear", "learn"]))
        if act == "note":
            memory.note(data.draw(prompts))
        elif act == "add":
            memory.add(data.draw(keys), 64)
        elif act == "drop":
            memory.drop(data.draw(keys))
        elif act == "learn":
            memory.learn(1000, 0)
        else:
            memory.clear()
    if not early:
        for row, memory in enumerate(memories):
            memory.join(index, row)
    asked = data.draw(prompts)
    prefix, anywhere = index.match(asked)
    assert [memory.match(asked) for memory in memories] == [
        Overlap(*pair) for pair in zip(prefix.tolist(), anywhere.tolist(), strict=True)
    ]
    assert len(index) == len({key for memory in memories for key, _ in memory.list_recent(10**6)})


def make_router(policy: str, reuse: EngineReuse, count: int = 40) -> Router:
    pool = Upstream(EngineAddress("http", "nowhere", 1))
    return Router([Replica(f"r{n}", pool, ReplicaMemory(4000)) for n in range(count)], policy, reuse=reuse)


def make_prompt(chance: random.Random) -> PromptPieces:
    document = chance.randrange(60)
    values = [
        chance.randrange(5),
        *(1000 * document + n for n in range(chance.randrange(1, 12))),
        chance.getrandbits(60),
    ]
    chains, chain = [], 0
    for value in values:
        chain = hash((chain, value)) & ((1 << 64) - 1)
        chains.append(chain)
    return PromptPieces(tuple(values), tuple(chains), (64,) * len(values), (1.0,) * len(values))


@pytest.mark.parametrize("reuse", list(EngineReuse))
@pytest.mark.parametrize("policy", POLICIES)
def test_by_columns_and_one_by_one_the_same_replica_is_chosen(policy, reuse, monkeypatch):
    columns = make_router(policy, reuse)
    monkeypatch.setattr(routing, "MANY_REPLICAS", 1000)
    plain = make_router(policy, reuse)
    assert columns._index is not None
    assert plain._index is None
    chance, running = random.Random(7), []
    for step in range(400):
        request = RouteRequest(pieces=make_prompt(chance))
        monkeypatch.setattr(routing, "MANY_REPLICAS", 24)
        one = columns.choose(request, columns.replicas[:2] if step % 9 == 0 else ())
        monkeypatch.setattr(routing, "MANY_REPLICAS", 1000)
        two = plain.choose(request, plain.replicas[:2] if step % 9 == 0 else ())
        assert isinstance(one, RouteDecision)
        assert isinstance(two, RouteDecision)
        assert (one.replica.id, one.overlap, one.new_tokens) == (two.replica.id, two.overlap, two.new_tokens)
        assert one.standings[0] == two.standings[two.candidates.index(two.replica)]
        assert len(one.standings) == len(one.candidates) <= MOST_SHOWN + 1
        for router, decision in ((columns, one), (plain, two)):
            router.start(decision, request)
            router.remember(decision, request)
        running.append((one, two))
        if len(running) > 30:
            for router, decision in zip((columns, plain), running.pop(chance.randrange(20)), strict=True):
                router.end(decision, had_first_byte=False)
                decision.replica.note_end(None)
        if step % 50 == 49:
            for router in (columns, plain):
                changed = router.replicas[step % 40]
                changed.health = Health.UP if changed.health is Health.DOWN else Health.DOWN


def test_few_replicas_keep_no_index():
    assert make_router("semantic_locality", EngineReuse.SPANS, 4)._index is None
