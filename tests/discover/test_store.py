"""Who stays, who goes, and that nothing stale is ever served."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import assert_token_equal, spans_of, tokens

from semblend import CapacityError, Decline, Namespace, Prompt, ReusePlan, SemBlend, SemBlendConfig
from semblend.confirm.outcome import Outcome
from semblend.confirm.receipt import Receipt
from semblend.confirm.sinks import MemorySink


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make(**settings_: object) -> SemBlend:
    return SemBlend(SemBlendConfig(embedder="none", metrics=False, **settings_))  # type: ignore[arg-type]


def ids(sb: SemBlend) -> list[str]:
    return [donor.donor_id for donor in sb.donors()]


def test_the_least_recently_used_donor_leaves_first():
    sb = make(max_donors=3)
    for name in "abc":
        sb.register(Prompt(tokens(ord(name), 100)), donor_id=name)
    plan = sb.lookup(Prompt(tokens(ord("a"), 100)))
    assert isinstance(plan, ReusePlan)
    assert ids(sb) == ["a", "b", "c"], "a lookup alone moves nothing"
    sb.claim(plan, "request")
    sb.release("request")
    sb.register(Prompt(tokens(ord("d"), 100)), donor_id="d")
    assert ids(sb) == ["c", "a", "d"]


def test_registering_again_replaces_and_raises_the_generation(sb):
    first = sb.register(Prompt(tokens(1, 100)), donor_id="a")
    second = sb.register(Prompt(tokens(2, 100)), donor_id="a")
    assert second.generation > first.generation
    assert isinstance(sb.lookup(Prompt(tokens(1, 100))), Decline)
    assert spans_of(sb.lookup(Prompt(tokens(2, 100))))[0].generation == second.generation
    assert len(sb.donors()) == 1


def test_a_plan_made_before_a_replacement_cannot_be_claimed(sb):
    sb.register(Prompt(tokens(1, 100)), donor_id="a")
    plan = sb.lookup(Prompt(tokens(1, 100)))
    sb.register(Prompt(tokens(1, 100)), donor_id="a")
    assert sb.claim(plan, "r").reason == "stale"


def test_a_plan_whose_donor_was_evicted_cannot_be_claimed_and_pins_nothing(sb):
    for name in "ab":
        sb.register(Prompt(tokens(ord(name), 100)), donor_id=name)
    plan = sb.lookup(Prompt(np.concatenate([tokens(ord("a"), 100), tokens(ord("b"), 100)])))
    sb.forget("b")
    assert sb.claim(plan, "r").reason == "stale"
    assert not any(donor.pinned for donor in sb.donors())


def test_a_claimed_donor_survives_until_its_request_is_released():
    sb = make(max_donors=2)
    sb.register(Prompt(tokens(1, 100)), donor_id="claimed")
    sb.claim(sb.lookup(Prompt(tokens(1, 100))), "r")
    for i in range(5):
        sb.register(Prompt(tokens(10 + i, 100)), donor_id=f"other{i}")
    assert ids(sb) == ["claimed", "other4"]
    sb.release("r")
    sb.register(Prompt(tokens(20, 100)), donor_id="last")
    assert "claimed" not in ids(sb)


def test_when_everything_is_pinned_registering_fails_and_changes_nothing():
    sb = make(max_donors=1)
    sb.register(Prompt(tokens(1, 100)), donor_id="a")
    assert sb.pin("a")
    with pytest.raises(CapacityError, match="pinned") as caught:
        sb.register(Prompt(tokens(2, 100)), donor_id="b")
    assert caught.value.hint
    assert ids(sb) == ["a"]
    sb.unpin("a")
    sb.register(Prompt(tokens(2, 100)), donor_id="b")
    assert ids(sb) == ["b"]


def test_a_prompt_larger_than_the_budget_is_refused_with_the_size_to_ask_for():
    sb = make(max_bytes=1 << 16)
    sb.register(Prompt(tokens(1, 500)), donor_id="small")
    with pytest.raises(CapacityError) as caught:
        sb.register(Prompt(tokens(2, 100_000)), donor_id="large")
    assert "SEMBLEND_MAX_BYTES" in caught.value.hint
    assert ids(sb) == ["small"]
    asked = int(caught.value.hint.rsplit(" ", 1)[1])
    make(max_bytes=asked).register(Prompt(tokens(2, 100_000)), donor_id="large")


def test_a_budget_that_cannot_be_reserved_is_an_error_with_a_hint(monkeypatch):
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("semblend.discover.store.TokenLog", refuse)
    with pytest.raises(CapacityError, match="cannot reserve") as caught:
        make()
    assert "SEMBLEND_MAX_BYTES" in caught.value.hint


def test_an_expired_donor_is_never_served_and_makes_room_first():
    clock = Clock()
    sb = SemBlend(SemBlendConfig(embedder="none", metrics=False, max_donors=2), clock=clock)
    sb.register(Prompt(tokens(1, 100)), donor_id="brief", ttl_s=10)
    sb.register(Prompt(tokens(2, 100)), donor_id="lasting")
    plan = sb.lookup(Prompt(tokens(1, 100)))
    assert isinstance(plan, ReusePlan)
    clock.now += 11
    assert isinstance(sb.lookup(Prompt(tokens(1, 100))), Decline)
    assert sb.claim(plan, "r").reason == "stale"
    assert ids(sb) == ["lasting"]
    sb.register(Prompt(tokens(3, 100)), donor_id="new")
    assert ids(sb) == ["lasting", "new"]


def test_a_donor_that_expires_during_a_lookup_is_served_whole_or_not_at_all():
    moments = iter([1000.0] * 4)
    with SemBlend(SemBlendConfig(embedder="none", metrics=False), clock=lambda: next(moments, 1004.9)) as sb:
        sb.register(Prompt(tokens(1, 200)), donor_id="a", ttl_s=5)
        ticking = iter(1004.9 + i / 20 for i in range(100))
        sb._store._clock = lambda: next(ticking)
        reasons = {str(getattr(sb.lookup(Prompt(tokens(1, 200))), "reason", "plan")) for _ in range(20)}
    assert reasons == {"plan", "nothing_shared"}


def test_evictions_are_told_with_their_reason():
    sink, clock = MemorySink(), Clock()
    sb = SemBlend(SemBlendConfig(embedder="none", metrics=False, max_donors=2), sinks=[sink], clock=clock)
    sb.register(Prompt(tokens(1, 100)), donor_id="a", ttl_s=5)
    sb.register(Prompt(tokens(2, 100)), donor_id="b")
    sb.register(Prompt(tokens(2, 101)), donor_id="b")
    clock.now += 6
    sb.register(Prompt(tokens(3, 100)), donor_id="c")
    sb.register(Prompt(tokens(4, 100)), donor_id="d")
    sb.forget("d")
    sb.forget("c", reason="engine")
    told = [(e.fields["donor_id"], e.fields["reason"]) for e in sink.events if e.kind == "donor_evicted"]
    assert told == [("b", "replaced"), ("a", "expired"), ("b", "capacity"), ("d", "forgotten"), ("c", "engine")]


def test_a_flood_of_one_tenant_evicts_its_own_donors_and_leaves_the_neighbour_its_share():
    sb = make(max_donors=6)
    for number in range(3):
        sb.register(Prompt(tokens(number, 100), namespace=Namespace(tenant="quiet")), donor_id=f"q{number}")
    for number in range(20):
        sb.register(Prompt(tokens(100 + number, 100), namespace=Namespace(tenant="loud")), donor_id=f"l{number}")
    assert ids(sb) == ["q0", "q1", "q2", "l17", "l18", "l19"]
    sb.register(Prompt(tokens(50, 100), namespace=Namespace(tenant="third")), donor_id="t")
    assert ids(sb) == ["q0", "q1", "q2", "l18", "l19", "t"]


def test_many_tiny_donors_count_as_much_as_the_place_they_take():
    """By tokens alone the tenant with one long donor would hold most, and would lose it to a flood of short ones."""
    sb = make(max_donors=8)
    sb.register(Prompt(tokens(1, 4000), namespace=Namespace(tenant="long")), donor_id="long")
    for number in range(40):
        sb.register(Prompt(tokens(100 + number, 40), namespace=Namespace(tenant="tiny")), donor_id=f"t{number}")
    assert "long" in ids(sb)


def test_donors_are_counted_by_tenant_without_listing_them():
    sb = make(max_donors=6)
    for number in range(12):
        namespace = Namespace(tenant="abc"[number % 3], salt=str(number))
        sb.register(Prompt(tokens(number, 50 + number), namespace=namespace), donor_id=f"d{number % 8}")
        donors = sb.donors()
        for tenant in (None, "a", "b", "c", "nobody"):
            mine = [one for one in donors if tenant in (None, one.namespace.tenant)]
            assert sb.count_donors(tenant) == (len(mine), sum(one.token_count for one in mine))
    sb.clear()
    assert sb.count_donors() == sb.count_donors("a") == (0, 0)


def test_a_store_without_tenants_is_plain_least_recently_used_whatever_the_salt():
    sb = make(max_donors=2)
    for name in "abc":
        sb.register(Prompt(tokens(ord(name), 100), namespace=Namespace(salt=name)), donor_id=name)
    assert ids(sb) == ["b", "c"]


def test_donors_are_forgotten_by_tenant_and_by_age():
    clock = Clock()
    sb = SemBlend(SemBlendConfig(embedder="none", metrics=False), clock=clock)
    for i, tenant in enumerate(["a", "b", "a", "b"]):
        sb.register(Prompt(tokens(i, 100), namespace=Namespace(tenant=tenant)), donor_id=str(i))
        clock.now += 100
    assert sb.forget_where(tenant="a", older_than_s=300) == 1
    assert ids(sb) == ["1", "2", "3"]
    assert sb.forget_where(older_than_s=250) == 1
    assert sb.forget_where(tenant="b") == 1
    assert ids(sb) == ["2"]
    assert sb.clear() == 1


def test_the_byte_budget_holds_for_donors_of_any_size():
    sb = make(max_bytes=1 << 20)
    rng = np.random.default_rng(0)
    for i in range(400):
        sb.register(Prompt(rng.integers(0, 50_000, int(rng.integers(50, 20_000)))), donor_id=str(i))
        stats = sb.stats()
        assert stats.used_bytes <= stats.budget_bytes
    assert sb.stats().tokens > 50_000, "the budget is used, not only kept"


@given(st.lists(st.tuples(st.sampled_from("rrrlfp"), st.integers(0, 7), st.integers(0, 5)), max_size=60))
@settings(max_examples=120)
def test_whatever_happens_only_present_donors_are_served_and_truly(steps):
    sb = make(max_donors=4, max_bytes=1 << 16)
    texts = [tokens(i, 150 + 100 * i) for i in range(6)]
    present: dict[str, int] = {}
    for step, name, text in steps:
        donor_id = str(name)
        if step == "r":
            sb.register(Prompt(texts[text]), donor_id=donor_id)
            present[donor_id] = text
        elif step == "f":
            sb.forget(donor_id)
        elif step == "p" and sb.pin(donor_id):
            sb.unpin(donor_id)
        alive = set(ids(sb))
        decision = sb.lookup(Prompt(texts[text]))
        assert_token_equal(sb, Prompt(texts[text]), decision)
        assert {span.donor_id for span in spans_of(decision)} <= alive
        holders = {d for d in alive if present.get(d) == text}
        assert isinstance(decision, ReusePlan) == bool(holders)


def reuse(sb: SemBlend, seed: int, request_id: str) -> None:
    """Claim and confirm the donor of these tokens, as an engine does."""
    prompt = Prompt(tokens(seed, 100))
    plan = sb.lookup(prompt)
    assert isinstance(plan, ReusePlan)
    sb.claim(plan, request_id)
    counts = {"prompt_tokens": len(prompt), "reused_tokens": plan.reused_tokens}
    cold = len(prompt) - plan.reused_tokens
    known = {
        "engine": "test",
        "namespace": prompt.namespace.digest,
        "outcome": Outcome.BACKEND_MATERIALIZED_REUSE,
        "spans": plan.spans,
    }
    sb.confirm(Receipt(request_id=request_id, prefill_tokens=cold, **counts, **known))  # type: ignore[arg-type]


@pytest.mark.parametrize("eviction", ["lfu", "slru", "lru2"])
def test_a_donor_that_was_reused_outlives_newer_ones_that_were_not(eviction):
    sb = make(max_donors=4, eviction=eviction)
    sb.register(Prompt(tokens(1, 100)), donor_id="famous")
    for number in range(150):
        if number % 6 == 0 or number < 30:  # then by age it would be gone each time
            reuse(sb, 1, f"r{number}")
        sb.register(Prompt(tokens(1000 + number, 100)), donor_id=str(number))
    assert "famous" in ids(sb)
    assert len(sb.donors()) == 4


def test_the_learning_policy_keeps_donors_that_come_back_where_lru_does_not():
    found = {}
    for eviction in ("lru", "adaptive"):
        sb, found[eviction] = make(max_donors=8, eviction=eviction), 0
        draw = np.random.default_rng(5)
        for number in range(500):
            seed = int(draw.integers(0, 4)) if number % 4 == 0 else 1000 + number  # three of four never come back
            if seed < 1000 and isinstance(sb.lookup(Prompt(tokens(seed, 100))), ReusePlan):
                reuse(sb, seed, f"r{number}")
                found[eviction] += 1
            else:
                sb.register(Prompt(tokens(seed, 100)), donor_id=str(number))
    assert found["adaptive"] > 1.1 * found["lru"]


def test_a_claim_that_is_never_confirmed_is_no_use():
    sb = make(max_donors=2, eviction="lfu")
    for name in (1, 2):
        sb.register(Prompt(tokens(name, 100)), donor_id=str(name))
    reuse(sb, 2, "r")
    for again in range(5):
        sb.claim(sb.lookup(Prompt(tokens(1, 100))), f"c{again}")
        sb.release(f"c{again}")
    sb.register(Prompt(tokens(3, 100)), donor_id="3")
    assert ids(sb) == ["2", "3"]


def test_a_failing_eviction_policy_leaves_lru_and_one_event(monkeypatch):
    monkeypatch.setattr("semblend.eviction.policy.Lfu.price", lambda *_: [float("nan")])
    sink = MemorySink()
    sb = SemBlend(SemBlendConfig(embedder="none", metrics=False, max_donors=2, eviction="lfu"), sinks=[sink])
    for name in "abcd":
        sb.register(Prompt(tokens(ord(name), 100)), donor_id=name)
    assert ids(sb) == ["c", "d"]
    assert [event.fields["where"] for event in sink.events if event.kind == "error"] == ["eviction"]
