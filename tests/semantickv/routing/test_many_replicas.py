"""By columns everything is decided as it is one by one, for few replicas and for many."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantickv.edge.upstream_call import EngineAddress, Upstream
from semantickv.routing.fingerprint import PromptPieces
from semantickv.routing.locality import HolderIndex, Overlap, ReplicaMemory
from semantickv.routing.policies import ANSWER_TOKENS, MOST_SHOWN, POLICIES, RECENT_TOKENS, Standing, hash_id, is_new
from semantickv.routing.replica import Health, Replica
from semantickv.routing.router import EngineReuse, RouteDecision, Router, RouteRequest

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


def describe_plainly(router: Router, replicas: list[Replica], request: RouteRequest) -> list[Standing]:
    """What the columns hold, replica by replica."""
    pieces, overlaps = request.pieces, [router._match(replica, request) for replica in replicas]
    most = max(max(overlap.prefix_tokens, overlap.any_tokens) for overlap in overlaps)
    least = min(replica.recent_requests for replica in replicas)
    recent_tokens = RECENT_TOKENS if is_new(most, pieces) else 0
    head = pieces.chains[min(3, len(pieces.chains) - 1)]
    return [
        Standing(
            running=replica.all_running,
            last_turn=replica.last_turn,
            waiting_tokens=replica.waiting_tokens
            + replica.waiting_elsewhere
            + ANSWER_TOKENS * replica.all_running
            + round(recent_tokens * (replica.recent_requests - least)),
            prompt_tokens=pieces.total_tokens,
            prefix_tokens=overlap.prefix_tokens,
            any_tokens=overlap.any_tokens,
            hash_rank=rank_plainly(head, hash_id(replica.id)) if router.policy == "prefix_hash" else 0,
            slowness=replica.slowness,
        )
        for replica, overlap in zip(replicas, overlaps, strict=True)
    ]


def rank_plainly(head: int, id_hash: int) -> int:
    mask, value = (1 << 64) - 1, head ^ id_hash
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return value ^ value >> 31


@pytest.mark.parametrize("count", [5, 40])
@pytest.mark.parametrize("reuse", list(EngineReuse))
@pytest.mark.parametrize("policy", POLICIES)
def test_by_columns_and_one_by_one_the_same_replica_is_chosen(policy, reuse, count):
    router = make_router(policy, reuse, count)
    chance, running = random.Random(7), []
    for step in range(400):
        request, tried = RouteRequest(pieces=make_prompt(chance)), router.replicas[:1] if step % 9 == 0 else ()
        decision = router.choose(request, tried)
        assert isinstance(decision, RouteDecision)
        if decision.standings:
            able = [one for one in router.replicas if one.can_serve and one not in tried]
            limit = router._guard.compute_limit([one.all_running for one in able])
            free = [one for one in able if one.all_running < limit] or able
            plain = describe_plainly(router, free, request)
            best = max(range(len(free)), key=lambda at: POLICIES[policy](plain[at]))
            assert decision.replica is free[best]
            assert decision.standings[0] == plain[best]
            assert len(decision.standings) == len(decision.candidates) <= MOST_SHOWN + 1
        router.start(decision, request)
        router.remember(decision, request)
        running.append(decision)
        if len(running) > 30:
            done = running.pop(chance.randrange(20))
            router.end(done, had_first_byte=False)
            done.replica.note_end(None)
        if step % 50 == 49:
            changed = router.replicas[count // 2 + step % (count // 2)]
            changed.health = Health.UP if changed.health is Health.DOWN else Health.DOWN
