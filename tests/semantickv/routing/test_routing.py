"""Where requests go: fingerprints that find passages anywhere, policies, the load guard, breakers, bounded memory."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantickv.edge.upstream_call import EngineAddress, Fault, FaultKind, Upstream
from semantickv.routing import kernels
from semantickv.routing.fingerprint import NO_PIECES, PromptPieces, cut_prompt
from semantickv.routing.health import HealthWatch
from semantickv.routing.locality import ReplicaMemory
from semantickv.routing.pieces import cut_plainly, hash_piece
from semantickv.routing.policies import POLICIES, Standing
from semantickv.routing.prompt_view import PromptPart, read_prompt
from semantickv.routing.replica import (
    BreakerLimits,
    BreakerState,
    CircuitBreaker,
    Health,
    Replica,
)
from semantickv.routing.router import EngineReuse, LoadGuard, NoReplica, RouteDecision, Router, RouteRequest
from semantickv.settings import EdgeSettings
from semblend.confirm.outcome import Outcome
from tests.fakes.scripted_engine import ScriptedEngine, answer_json

FIRST_PAUSE_S, LONGEST_PAUSE_S = BreakerLimits().first_pause_s, BreakerLimits().longest_pause_s
PROBES_TO_CHANGE = EdgeSettings().health_failures
WORDS = ["river", "stone", "cloud", "engine", "paper", "market", "tax", "law", "cell", "gene"]
REFUSED = Fault(FaultKind.REFUSED)


def make_text(seed: int, words: int = 1200) -> str:
    chance = random.Random(seed)
    return " ".join(chance.choice(WORDS) + str(chance.randrange(999)) for _ in range(words))


def cut(*texts: str, namespace: bytes = b"n") -> PromptPieces:
    return cut_prompt([PromptPart("user", text.encode()) for text in texts], namespace)


def make_router(count: int, policy: str = "semantic_locality", *, tokens: int = 100_000, **known) -> Router:
    address = EngineAddress.parse("http://127.0.0.1:9")
    clock = known.pop("clock", lambda: 0.0)
    replicas = [
        Replica(f"r{n}", Upstream(address), ReplicaMemory(tokens), CircuitBreaker(clock=clock)) for n in range(count)
    ]
    return Router(replicas, policy, **known)


def end_call(router: Router, decision: RouteDecision, fault: Fault | None, *, had_first_byte: bool) -> None:
    router.end(decision, had_first_byte=had_first_byte)
    decision.replica.note_end(fault)


def place(router: Router, request: RouteRequest = RouteRequest(), *, end: bool = True) -> RouteDecision:  # noqa: B008
    decision = router.choose(request)
    assert isinstance(decision, RouteDecision)
    router.start(decision, request)
    router.remember(decision, request)
    if end:
        router.note_first_byte(decision)
        end_call(router, decision, None, had_first_byte=True)
    return decision


# -- fingerprints ------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=300), st.integers(0, 50), st.text(max_size=300))
def test_a_long_passage_is_recognised_wherever_it_stands(before, seed, after):
    passage = make_text(seed)
    donor, other = cut(passage), cut(before + " " + passage + after)
    memory = ReplicaMemory(1_000_000)
    memory.note(donor)
    assert memory.match(other).any_tokens >= 0.75 * sum(donor.tokens)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=900), max_size=4), st.integers(0, 2**64 - 1), st.integers(1, 40))
def test_the_compiled_cutter_and_its_plain_twin_agree(parts, seed, repeats):
    data, ends = b"", []
    for part in parts:
        data += part * repeats
        ends += [len(data)] if part else []
    data, ends = data + b"end", [*ends, len(data) + 3]
    assert kernels.cut_compiled(data, ends, seed) == cut_plainly(data, ends, seed)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=64), st.binary(max_size=64), st.integers(0, 2**64 - 1))
def test_pieces_that_differ_have_different_hashes_whatever_stands_at_their_ends(one, two, seed):
    assert (hash_piece(one, seed) == hash_piece(two, seed)) == (one == two)


@pytest.mark.parametrize("text", [b'{"a": NaN}', b'{"a": "\\ud800"}'])
def test_a_body_is_read_as_python_reads_it_where_the_fast_parser_is_stricter(text):
    assert repr(read_prompt(text).fields) == repr(json.loads(text))


def test_a_body_that_no_parser_reads_is_routed_by_load_alone():
    for body in (b"", b"[1]", b"{", b"\xff", b"[" * 3000, b'{"prompt": [1, "a"]}', b'{"prompt": [-1]}'):
        assert read_prompt(body).list_parts() == ()


def test_texts_that_share_nothing_overlap_nowhere():
    memory = ReplicaMemory(1_000_000)
    memory.note(cut(make_text(1)))
    assert memory.match(cut(make_text(2))).any_tokens == 0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.binary(max_size=3000), max_size=6))
def test_pieces_cover_a_prompt_once_whatever_it_holds(parts):
    pieces = cut_prompt([PromptPart("user", data) for data in parts], b"n")
    total = sum(map(len, parts))
    assert len(pieces.hashes) == len(pieces.chains) == len(pieces.tokens) == len(pieces.weights)
    assert len(pieces.hashes) <= total // 32 + len(parts) + 1
    assert total // 4 - len(pieces.hashes) <= sum(pieces.tokens) <= total // 4 + len(pieces.hashes)


def test_two_namespaces_have_no_hash_in_common():
    one, two = cut(make_text(1), namespace=b"a"), cut(make_text(1), namespace=b"b")
    assert not set(one.hashes + one.chains) & set(two.hashes + two.chains)


def test_equal_beginnings_have_equal_chains_and_later_ones_do_not():
    one, two = cut("system", make_text(1), "a?"), cut("system", make_text(1), "b?")
    assert one.chains[:-1] == two.chains[:-1]
    assert one.chains[-1] != two.chains[-1]


@pytest.mark.parametrize("letter", ["a", " ", "\0", "é", "ab"])
def test_a_run_of_one_letter_is_few_pieces(letter):
    assert len(cut(letter * 200_000).hashes) < 60


def test_messages_are_read_with_their_types():
    body = (
        b'{"model": "m", "stream": true, "tools": [{"a": 1}], "messages": [{"role": "system", "content": "S"},'
        b'{"role": "user", "content": [{"type": "text", "text": "T"}, {"type": "image_url"}]},'
        b'{"role": "assistant", "content": null, "tool_calls": [{"id": "c"}]}, {"role": "tool", "content": "R"}]}'
    )
    view = read_prompt(body)
    assert [part.type for part in view.list_parts()] == ["template", "system", "user", "assistant", "tool_output"]
    assert view.model == "m"


def test_token_ids_are_a_prompt_too():
    assert read_prompt(b'{"prompt": [1, 2, 3]}').list_parts()[0].data == bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])


# -- policies ----------------------------------------------------------------------------------------------------------


def test_round_robin_takes_turns():
    router = make_router(3, "round_robin")
    assert [place(router).replica.id for _ in range(6)] == ["r0", "r1", "r2"] * 2


def test_least_loaded_prefers_the_replica_with_fewest_requests():
    router = make_router(3, "least_loaded")
    busy = place(router, end=False).replica.id
    assert {place(router).replica.id for _ in range(6)} == {"r0", "r1", "r2"} - {busy}


def test_prefix_hash_sends_equal_beginnings_to_one_replica_and_moves_few_when_one_goes():
    router = make_router(4, "prefix_hash")
    requests = [RouteRequest(pieces=cut(make_text(seed), "a question")) for seed in range(40)]
    homes = [place(router, request).replica.id for request in requests]
    assert len(set(homes)) == 4
    router.replicas[0].health = Health.DOWN
    moved = [place(router, request).replica.id for request in requests]
    assert all(new == old for new, old in zip(moved, homes, strict=True) if old != "r0")


def test_cache_aware_follows_beginnings_and_semantic_locality_follows_passages():
    passage = make_text(1)
    for policy, follows in (("cache_aware", False), ("semantic_locality", True)):
        router = make_router(8, policy)
        first = place(router, RouteRequest(pieces=cut("Instruction one.", passage)))
        shifted = place(router, RouteRequest(pieces=cut("Another instruction.", passage)))
        assert (shifted.replica is first.replica) == follows, policy


def test_an_outcome_says_how_the_prompt_was_recognised():
    router = make_router(2)
    outcomes = [
        place(router, RouteRequest(pieces=cut(*texts))).outcome
        for texts in (("one", make_text(1)), ("one", make_text(1)), ("two", make_text(1)), ("three", make_text(2)))
    ]
    assert outcomes == [
        Outcome.COLD_FALLBACK,
        Outcome.EXACT_PREFIX_ROUTE,
        Outcome.SEMANTIC_PLACEMENT,
        Outcome.COLD_FALLBACK,
    ]


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 6), st.integers(10, 80))
def test_one_document_for_all_does_not_put_everything_on_one_replica(count, requests):
    router = make_router(count)
    request = RouteRequest(pieces=cut(make_text(1)))
    for _ in range(requests):
        place(router, request, end=False)
    running = [replica.running for replica in router.replicas]
    assert max(running) <= LoadGuard().compute_limit(running) + 1


def test_a_document_stays_on_one_replica_while_nobody_waits_there():
    router = make_router(4)
    request = RouteRequest(pieces=cut(make_text(1)))
    assert len({place(router, request).replica for _ in range(100)}) == 1


def test_new_documents_go_where_little_was_sent_of_late():
    router = make_router(4)
    hot = RouteRequest(pieces=cut(make_text(0)))
    home = place(router, hot).replica
    for seed in range(1, 31):
        assert place(router, hot).replica is home
        assert place(router, RouteRequest(pieces=cut(make_text(seed)))).replica is not home
    served = [replica.served for replica in router.replicas if replica is not home]
    assert max(served) - min(served) <= 1


def test_a_policy_is_a_pure_function_of_a_standing():
    standing = Standing(1, 5, 100, 400, 300, 350, 9)
    for policy in POLICIES.values():
        assert policy(standing) == policy(standing)
    better = replace(standing, any_tokens=400)
    assert POLICIES["semantic_locality"](better) > POLICIES["semantic_locality"](standing)
    assert POLICIES["cache_aware"](better) == POLICIES["cache_aware"](standing)


def test_engines_with_prefix_caches_only_are_weighed_by_prefix():
    router = make_router(4, reuse=EngineReuse.PREFIX)
    place(router, RouteRequest(pieces=cut("one", make_text(1))))
    assert place(router, RouteRequest(pieces=cut("two", make_text(1)))).outcome is Outcome.COLD_FALLBACK


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_a_session_follows_its_home_until_that_is_down_or_too_busy():
    router = make_router(3, "round_robin")
    request = RouteRequest(b"n", "s")
    home = place(router, request).replica
    assert {place(router, request).replica for _ in range(5)} == {home}
    home.health = Health.DOWN
    moved = place(router, request).replica
    assert moved is not home
    home.health = Health.UP
    assert place(router, request).replica is moved


def test_a_session_of_another_tenant_is_another_session():
    router = make_router(2, "round_robin")
    assert place(router, RouteRequest(b"a", "s")).replica is not place(router, RouteRequest(b"b", "s")).replica


# -- health and breakers -----------------------------------------------------------------------------------------------


def test_a_breaker_opens_after_three_faults_and_lets_one_trial_through():
    now = [0.0]
    breaker = CircuitBreaker(clock=lambda: now[0])
    for _ in range(3):
        assert breaker.may_pass
        breaker.note_fault()
    assert not breaker.may_pass
    now[0] = FIRST_PAUSE_S
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.note_start()
    assert not breaker.may_pass  # one trial at a time
    breaker.note_fault()
    now[0] += FIRST_PAUSE_S
    assert breaker.state is BreakerState.OPEN  # the pause has doubled
    now[0] += FIRST_PAUSE_S
    breaker.note_start()
    breaker.note_success()
    assert breaker.state is BreakerState.CLOSED


def test_a_pause_has_an_end_however_often_the_trial_fails():
    now = [0.0]
    breaker = CircuitBreaker(clock=lambda: now[0])
    for _ in range(3):
        breaker.note_fault()
    for _ in range(20):
        now[0] += LONGEST_PAUSE_S
        assert breaker.may_pass
        breaker.note_start()
        breaker.note_fault()


def test_a_trial_whose_client_left_is_no_verdict():
    now = [0.0]
    breaker = CircuitBreaker(clock=lambda: now[0])
    for _ in range(3):
        breaker.note_fault()
    now[0] = FIRST_PAUSE_S
    breaker.note_start()
    breaker.note_nothing()
    assert breaker.may_pass


def test_faults_of_the_client_do_not_open_a_breaker():
    router = make_router(1)
    for _ in range(10):
        decision = router.choose(RouteRequest())
        router.start(decision, RouteRequest())
        router.remember(decision, RouteRequest())
        end_call(router, decision, Fault(FaultKind.CLIENT_LEFT), had_first_byte=False)
    assert router.replicas[0].can_serve


def test_without_a_replica_the_answer_is_a_value():
    router = make_router(2)
    for replica in router.replicas:
        for _ in range(3):
            replica.note_end(REFUSED)
    assert isinstance(router.choose(RouteRequest()), NoReplica)


def test_a_replica_that_was_down_comes_back_with_an_empty_memory():
    replica = make_router(1).replicas[0]
    replica.note_probe(True)
    replica.memory.note(cut(make_text(1)))
    for _ in range(PROBES_TO_CHANGE):
        assert replica.is_up
        replica.note_probe(False)
    assert (replica.is_up, len(replica.memory)) == (False, 0)
    replica.note_probe(True)
    assert replica.is_up


def test_health_checks_find_a_replica_that_died_and_one_that_came_back():
    async def test():
        async with ScriptedEngine() as engine:
            engine.default = answer_json({})
            replica = Replica("r", Upstream(EngineAddress.parse(engine.url)), ReplicaMemory(100))
            seen: list[str] = []

            async def sleep(_: float) -> None:
                seen.append(replica.health.value)
                if len(seen) == 1:
                    await engine.stop()
                if len(seen) == 3:
                    await engine.start()
                if len(seen) == 4:
                    raise asyncio.CancelledError

            with pytest.raises(asyncio.CancelledError):
                await HealthWatch(Router([replica]), EdgeSettings()).run(sleep)
            assert seen == ["up", "unknown", "down", "up"]

    asyncio.run(test())


def test_a_replica_that_misses_one_check_is_still_up_and_one_that_refuses_is_not():
    replica = make_router(2).replicas[0]
    replica.note_probe(True)
    replica.note_probe(False)  # slow
    assert replica.is_up
    replica.note_end(REFUSED)
    assert (replica.health, replica.can_serve) == (Health.UNKNOWN, True)
    replica.note_end(None)
    assert replica.is_up


def test_a_replica_is_unknown_until_it_has_answered_and_may_be_tried_meanwhile():
    router = make_router(2)
    assert [(one.health, one.is_up, one.can_serve) for one in router.replicas] == [(Health.UNKNOWN, False, True)] * 2
    served = place(router).replica
    assert [one.is_up for one in router.replicas] == [one is served for one in router.replicas]


def test_an_only_replica_is_tried_even_if_its_health_checks_fail():
    router = make_router(1)
    for _ in range(PROBES_TO_CHANGE):
        router.replicas[0].note_probe(False)
    assert not router.replicas[0].is_up
    assert place(router).replica is router.replicas[0]


# -- bounds ------------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=60))
def test_the_memory_of_a_replica_stays_within_its_bound(seeds):
    memory = ReplicaMemory(2000)
    for seed in seeds:
        memory.note(cut(make_text(seed, 100)))
        assert memory.tokens <= 2000
        assert len(memory) <= 500
    assert memory.tokens == sum(memory._seen.values())


def test_many_short_pieces_do_not_outgrow_the_bound():
    memory = ReplicaMemory(4000)
    for at in range(50):
        memory.note(cut(*(f"{at} {n}" for n in range(200))))
    assert len(memory) <= 1000


def test_the_least_recently_seen_prompt_is_forgotten_first():
    memory = ReplicaMemory(3500)
    old, new = cut(make_text(1)), cut(make_text(2))
    memory.note(old)
    memory.note(new)
    assert memory.match(new).prefix_tokens > memory.match(old).prefix_tokens


def test_nothing_is_left_on_a_replica_when_all_requests_have_ended():
    router = make_router(3)
    chance = random.Random(0)
    running: list[tuple[RouteDecision, bool]] = []
    for seed in range(300):
        request = RouteRequest(b"n", f"s{seed % 7}" if seed % 2 else "", cut(make_text(seed % 20, 80)))
        decision = router.choose(request)
        assert isinstance(decision, RouteDecision)
        router.start(decision, request)
        router.remember(decision, request)
        has_begun = chance.random() < 0.7
        if has_begun:
            router.note_first_byte(decision)
        running.append((decision, has_begun))
        if chance.random() < 0.8:
            done, begun = running.pop(chance.randrange(len(running)))
            end_call(router, done, None if begun else Fault(FaultKind.CLIENT_LEFT), had_first_byte=begun)
    for done, begun in running:
        end_call(router, done, None, had_first_byte=begun)
    assert all(one.running == one.waiting_tokens == 0 for one in router.replicas)


def test_an_empty_prompt_is_routed_by_load():
    router = make_router(2)
    assert place(router, RouteRequest(pieces=NO_PIECES)).outcome is Outcome.COLD_FALLBACK


def test_text_that_repeats_itself_is_cut_and_known_again_in_part():
    zeros = "0, " * 20_000
    long, short = cut(zeros + make_text(1)), cut(zeros + make_text(2))
    memory = ReplicaMemory(100_000)
    memory.note(long)
    assert memory.match(short).prefix_tokens > 10_000


def test_a_replica_that_is_four_times_slower_gets_few_of_the_new_prompts():
    router = make_router(4)
    for number in range(200):
        request = RouteRequest(pieces=cut(make_text(1000 + number, 300)))
        decision = place(router, request)
        slow = 4 if decision.replica.id == "r0" else 1
        router.note_speed(decision, 0.1 * slow, 600, True)
    assert router.replicas[0].slowness == pytest.approx(4, rel=0.2)
    busy: list[RouteDecision] = []
    to_slow = 0
    for number in range(100):  # as many run at once as a fleet of this speed has
        busy.append(place(router, RouteRequest(pieces=cut(make_text(5000 + number, 300))), end=False))
        to_slow += busy[-1].replica.id == "r0"
        if len(busy) > 12:
            end_call(router, busy.pop(0), None, had_first_byte=False)
    assert to_slow < 20  # an even share would be 25


def test_breakers_never_shut_everybody_out():
    router = make_router(3)
    for one in router.replicas:
        one.note_probe(True)
        for _ in range(3):
            one.note_end(Fault(FaultKind.CUT_OFF, is_mid_answer=True))
        assert not one.can_serve
    assert isinstance(router.choose(RouteRequest()), RouteDecision)
    router.replicas[0].note_hung(1.0)
    chosen = router.choose(RouteRequest(), tried=router.replicas[1:])
    assert isinstance(chosen, NoReplica)


def test_a_replica_joins_and_leaves_a_router_that_runs():
    router = make_router(30)
    pieces = cut(make_text(1))
    gone = place(router, RouteRequest(pieces=pieces)).replica
    joined = Replica("new", Upstream(EngineAddress.parse("http://127.0.0.1:9")), ReplicaMemory(100_000))
    router.add_replica(joined)
    router.remove_replica(gone)
    decision = place(router, RouteRequest(pieces=pieces))
    assert decision.replica is not gone
    assert decision.outcome is Outcome.COLD_FALLBACK
    assert joined in router.replicas
