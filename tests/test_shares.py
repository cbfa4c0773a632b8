"""Who gives when a memory that tenants share is full: the fast order against a plain one, and what always holds."""

from __future__ import annotations

from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend.shares import FairLru, Shares

TENANTS = ["acme", "bolt", "coil", "dune"]


def order_plainly(items: list[tuple[int, str, int]], tenant: str, amount: int, capacity: int) -> list[int]:
    """The same order as `FairLru.order_leavers`, by looking at everything each time. ``items`` by age."""
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
            return order
        payer = max(payers, key=lambda owner: (held[owner], [-ord(letter) for letter in owner]))
        leaver = next(item for item in items if item[1] == payer)
        items.remove(leaver)
        order.append(leaver[0])


owned = st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 9)), max_size=25)


@given(owned, st.sampled_from(TENANTS), st.integers(1, 9), st.integers(10, 60))
def test_items_leave_in_the_order_of_the_plain_rule(items, tenant, amount, capacity):
    lru = FairLru[int]()
    for number, (owner, size) in enumerate(items):
        lru.add(number, owner, size)
    before = lru.shares.to_dict()
    numbered = [(number, owner, size) for number, (owner, size) in enumerate(items)]
    assert list(lru.order_leavers(tenant, amount, capacity)) == order_plainly(numbered, tenant, amount, capacity)
    assert lru.shares.to_dict() == before  # asking changes nothing


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 20), st.booleans()), max_size=80))
def test_nobody_within_its_share_ever_loses_anything_to_another(arrivals):
    capacity, lru, sizes, pinned = 60, FairLru[int](), {}, set()
    for number, (tenant, size, pin) in enumerate(arrivals):
        gone = []
        excess = sum(lru.shares.to_dict().values()) + size - capacity
        share = capacity // lru.shares.count_with(tenant)
        with closing(lru.order_leavers(tenant, size, capacity, lambda one: one not in pinned)) as leavers:
            while excess > 0 and (leaver := next(leavers, None)) is not None:
                gone.append(leaver)
                excess -= sizes[leaver][1]
        if excess > 0:
            continue  # what is pinned stands in the way: the newcomer is not taken in
        for leaver in gone:
            owner, _ = sizes.pop(leaver)
            assert owner == tenant or lru.shares[owner] > share
            lru.remove(leaver)
        lru.add(number, tenant, size)
        sizes[number] = (tenant, size)
        if pin:
            pinned.add(number)
        assert sum(lru.shares.to_dict().values()) <= capacity
    assert len(lru) == len(sizes)


def test_one_tenant_alone_may_have_everything_and_leaves_by_age():
    lru = FairLru[str]()
    for item in "abc":
        lru.add(item, "acme", 1)
    lru.touch("a")
    assert list(lru.order_leavers("acme", 1, 3)) == ["b", "c", "a"]


def test_a_flood_takes_back_its_own_and_leaves_the_neighbour_its_share():
    lru = FairLru[int]()
    lru.add(-1, "quiet", 5)
    for number in range(100):
        with closing(lru.order_leavers("loud", 1, 10)) as leavers:
            if sum(lru.shares.to_dict().values()) + 1 > 10:
                lru.remove(next(leavers))
        lru.add(number, "loud", 1)
    assert lru.shares.to_dict() == {"quiet": 5, "loud": 5}


def test_nobody_can_hold_less_than_nothing():
    with pytest.raises(ValueError, match="would hold -1"):
        Shares().add("acme", -1)


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 50)), max_size=200))
def test_the_largest_is_found_after_any_changes(changes):
    shares, plain = Shares(), dict.fromkeys(TENANTS, 0)
    for tenant, amount in changes:
        shares.add(tenant, amount - plain[tenant])
        plain[tenant] = amount
        most = max(plain.values())
        found = shares.find_largest()
        assert (found is None) == (most == 0)
        assert found is None or plain[found] == most
        rest = shares.find_largest(without=["acme"])
        assert rest is None or plain[rest] == max(plain[name] for name in TENANTS[1:])
    assert shares.to_dict() == {tenant: amount for tenant, amount in plain.items() if amount}
