"""Who gives when a memory that tenants share is full: the fast order against a plain one, and what always holds."""

from __future__ import annotations

from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.fairness import IDLE_PART, EvictionOrder, TenantUsage

TENANTS = ["acme", "bolt", "coil", "dune"]


def order_plainly(items: list[tuple[int, str, int]], tenant: str, amount: int, capacity: int) -> list[int]:
    """The same order as `EvictionOrder.order_leavers`, by looking at everything each time. ``items`` by age."""
    items, order = list(items), []
    share = capacity // len({owner for _, owner, _ in items} | {tenant})
    while True:
        held = {owner: sum(size for _, one, size in items if one == owner) for _, owner, _ in items}
        held[tenant] = held.get(tenant, 0) + amount
        payers = [
            owner
            for owner in held
            if (owner == tenant or held[owner] > share) and any(one == owner for _, one, _ in items)
        ]
        if not payers:
            room = capacity // IDLE_PART
            for number, _, size in items:  # by age, whoever's it is
                room -= size
                if room < 0:
                    break
                order.append(number)
            return order
        payer = max(payers, key=lambda owner: (held[owner], [-ord(letter) for letter in owner]))
        leaver = next(item for item in items if item[1] == payer)
        items.remove(leaver)
        order.append(leaver[0])


owned = st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 9)), max_size=25)


@given(owned, st.sampled_from(TENANTS), st.integers(1, 9), st.integers(10, 60))
def test_items_leave_in_the_order_of_the_plain_rule(items, tenant, amount, capacity):
    lru = EvictionOrder[int]()
    for number, (owner, size) in enumerate(items):
        lru.add(number, owner, size)
    before = lru.usage.to_dict()
    numbered = [(number, owner, size) for number, (owner, size) in enumerate(items)]
    assert list(lru.order_leavers(tenant, amount, capacity)) == order_plainly(numbered, tenant, amount, capacity)
    assert lru.usage.to_dict() == before  # asking changes nothing


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 20), st.booleans()), max_size=80))
def test_who_is_within_its_share_gives_to_one_that_has_nothing_else_and_only_what_is_old(arrivals):
    capacity, lru, sizes, pinned = 60, EvictionOrder[int](), {}, set()
    for number, (tenant, size, pin) in enumerate(arrivals):
        gone = []
        excess = sum(lru.usage.to_dict().values()) + size - capacity
        share = capacity // lru.usage.count_with(tenant)
        with closing(lru.order_leavers(tenant, size, capacity, lambda one: one not in pinned)) as leavers:
            while excess > 0 and (leaver := next(leavers, None)) is not None:
                gone.append(leaver)
                excess -= sizes[leaver][1]
        if excess > 0:
            continue  # what is pinned stands in the way: the newcomer is not taken in
        own_stays = any(owner == tenant and one not in gone for one, (owner, _) in sizes.items())
        from_the_idle = 0
        for leaver in gone:
            owner, taken = sizes.pop(leaver)
            if owner != tenant and lru.usage[owner] <= share:
                from_the_idle += taken
                assert not own_stays
                assert from_the_idle <= capacity // IDLE_PART
            lru.remove(leaver)
        lru.add(number, tenant, size)
        sizes[number] = (tenant, size)
        if pin:
            pinned.add(number)
        assert sum(lru.usage.to_dict().values()) <= capacity
    assert len(lru) == len(sizes)


def test_one_tenant_alone_may_have_everything_and_leaves_by_age():
    lru = EvictionOrder[str]()
    for item in "abc":
        lru.add(item, "acme", 1)
    lru.touch("a")
    assert list(lru.order_leavers("acme", 1, 3)) == ["b", "c", "a"]


def test_a_flood_takes_back_its_own_and_leaves_the_neighbour_its_share():
    lru = EvictionOrder[int]()
    lru.add(-1, "quiet", 5)
    for number in range(100):
        with closing(lru.order_leavers("loud", 1, 10)) as leavers:
            if sum(lru.usage.to_dict().values()) + 1 > 10:
                lru.remove(next(leavers))
        lru.add(number, "loud", 1)
    assert lru.usage.to_dict() == {"quiet": 5, "loud": 5}


def test_idle_tenants_make_room_for_a_large_item_by_age():
    """Sixty tenants with a sixtieth each, and a donor of 705 MB for 4 GiB: before, it found no room for ever."""
    lru = EvictionOrder[int]()
    for number in range(60):
        lru.add(number, f"idle {number}", 66)
    lru.touch(0)
    leavers = list(lru.order_leavers("newcomer", 705, 4096))
    assert leavers == list(range(1, 32))  # at most half of the capacity, and what was used last stays
    assert 66 * len(leavers) >= 705


def test_who_still_holds_something_takes_nothing_from_tenants_within_their_share():
    lru = EvictionOrder[str]()
    lru.add("quiet", "quiet", 5)
    lru.add("mine", "loud", 5)
    assert list(lru.order_leavers("loud", 5, 10, lambda one: one != "mine")) == []
    assert list(lru.order_leavers("loud", 5, 10)) == ["mine", "quiet"]


def test_nobody_can_hold_less_than_nothing():
    with pytest.raises(ValueError, match="would hold -1"):
        TenantUsage().add("acme", -1)


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 50)), max_size=200))
def test_the_largest_is_found_after_any_changes(changes):
    usage, plain = TenantUsage(), dict.fromkeys(TENANTS, 0)
    for tenant, amount in changes:
        usage.add(tenant, amount - plain[tenant])
        plain[tenant] = amount
        most = max(plain.values())
        found = usage.find_largest()
        assert (found is None) == (most == 0)
        assert found is None or plain[found] == most
        rest = usage.find_largest(without=["acme"])
        assert rest is None or plain[rest] == max(plain[name] for name in TENANTS[1:])
    assert usage.to_dict() == {tenant: amount for tenant, amount in plain.items() if amount}


def test_what_is_kept_leaves_after_the_others_of_its_tenant_for_so_long():
    now = [0.0]
    order = EvictionOrder[str](clock=lambda: now[0])
    for item, tenant in (("a1", "acme"), ("a2", "acme"), ("a3", "acme"), ("b1", "bolt")):
        order.add(item, tenant, 1)
    order.keep("a1", 10.0)
    assert list(order.order_leavers("acme", 1, capacity=8))[:3] == ["a2", "a3", "a1"]
    now[0] = 11.0
    order.touch("a2")
    assert list(order.order_leavers("acme", 1, capacity=8))[:3] == ["a3", "a1", "a2"]
    order.keep("gone", 10.0)
    order.keep("a3", 10.0)
    order.remove("a3")
    assert list(order.order_leavers("acme", 1, capacity=8))[:2] == ["a1", "a2"]


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 5), st.booleans()), min_size=1, max_size=20),
    st.integers(4, 60),
)
def test_of_all_that_is_kept_only_half_of_a_share_leaves_late_and_everything_leaves_once(items, capacity):
    order = EvictionOrder[int](clock=lambda: 0.0)
    for item, (tenant, amount, _) in enumerate(items):
        order.add(item, tenant, amount)
    for item, (*_, kept) in enumerate(items):
        if kept:
            order.keep(item, 1.0)
    share = capacity // order.usage.count_with("a")
    for tenant in {tenant for tenant, *_ in items}:
        leaving = [item for item, _ in order._order_items(tenant, share)]
        assert sorted(leaving) == [item for item, (owner, *_) in enumerate(items) if owner == tenant]
        late = order._list_kept(tenant, share // 2)
        assert sum(items[item][1] for item in late) <= share // 2
        assert leaving[len(leaving) - len(late) :] == list(late)
        assert all(items[item][2] for item in late)
