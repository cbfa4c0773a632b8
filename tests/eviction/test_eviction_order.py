"""What a policy values least leaves first, inside the shares of tenants; a policy that fails leaves by age."""

from __future__ import annotations

from contextlib import closing

from hypothesis import given
from hypothesis import strategies as st

from semblend.eviction.policy import GuardedPolicy, Lfu, make_policy
from semblend.fairness import IDLE_PART, EvictionOrder

TENANTS = ["acme", "bolt", "coil"]
steps = st.lists(
    st.tuples(st.sampled_from(["add", "touch", "remove", "ask"]), st.sampled_from(TENANTS), st.integers(0, 12)),
    max_size=120,
)


class Uses(Lfu):
    """Counts how often it is asked for prices of many."""

    asked = 0

    def price(self, keys):
        self.asked += len(keys) > 1
        return super().price(keys)


def order_plainly(held: dict[int, tuple[str, int, int, int]], tenant: str, amount: int, capacity: int) -> list[int]:
    """The whole order by looking at everything each time; ``held``: tenant, size, uses and last use of each item."""
    left, order = dict(held), []
    share = capacity // len({owner for owner, *_ in left.values()} | {tenant})
    while True:
        sums = {tenant: amount}
        for owner, size, *_ in left.values():
            sums[owner] = sums.get(owner, 0) + size
        payers = [
            owner
            for owner in sums
            if (owner == tenant or sums[owner] > share) and any(one == owner for one, *_ in left.values())
        ]
        if not payers:
            return order + order_by_age(left, tenant, capacity)
        payer = max(payers, key=lambda owner: (sums[owner], [-ord(letter) for letter in owner]))
        leaver = min((item for item in left if left[item][0] == payer), key=lambda item: left[item][2:])
        del left[leaver]
        order.append(leaver)


def order_by_age(left: dict[int, tuple[str, int, int, int]], tenant: str, capacity: int) -> list[int]:
    """What tenants within their share give to one that has nothing else."""
    order, room = [], capacity // IDLE_PART
    for item in sorted(left, key=lambda item: left[item][3]):
        room -= left[item][1]
        if room < 0:
            break
        order.append(item)
    return order


@given(steps)
def test_items_leave_by_share_then_worth_then_age_as_the_plain_rule_says(steps):
    policy = Lfu()
    order = EvictionOrder(policy, lambda item: item + 1000)
    held: dict[int, tuple[str, int, int, int]] = {}
    for now, (step, tenant, item) in enumerate(steps):
        if step == "add" and item not in held:
            policy.use([item + 1000])
            order.add(item, tenant, item + 1)
            held[item] = (tenant, item + 1, 1, now)
        elif step == "touch" and item in held:
            policy.use([item + 1000])
            order.touch(item)
            held[item] = (*held[item][:2], held[item][2] + 1, now)
        elif step == "remove":
            order.remove(item)
            if held.pop(item, None):
                policy.forget(item + 1000)
        else:
            expected = order_plainly(held, tenant, 3, 40)
            assert list(order.order_leavers(tenant, 3, 40)) == expected
            with closing(order.order_leavers(tenant, 3, 40)) as leavers:  # left half way: nothing has changed
                assert [next(leavers) for _ in expected[:2]] == expected[:2]
    assert len(order) == len(held)
    assert sum(order.usage.to_dict().values()) == sum(size for _, size, *_ in held.values())


@given(steps)
def test_a_policy_that_failed_leaves_the_order_of_lru(steps):
    class Broken(Lfu):
        def price(self, keys):
            raise RuntimeError("out of order")

    failures: list[BaseException] = []
    policy = GuardedPolicy(Broken(), failures.append)
    order, plain = EvictionOrder(policy, lambda item: item), EvictionOrder[int]()
    for step, tenant, item in steps:
        for one in (order, plain):
            if step == "add" and (item not in one._tenant_of):
                one.add(item, tenant, 1)
            elif step == "touch":
                one.touch(item)
            elif step == "remove":
                one.remove(item)
        assert list(order.order_leavers(tenant, 1, 9)) == list(plain.order_leavers(tenant, 1, 9))
    assert len(failures) <= 1


def test_a_thousand_touches_of_ten_items_keep_no_thousand_entries():
    policy = Uses()
    order = EvictionOrder(policy, lambda item: item)
    for item in range(10):
        order.add(item, "acme", 1)
    for touch in range(1000):
        order.touch(touch % 10)
    assert len(order._heaps["acme"]) <= 64 + 4 * 10 + 1
    assert next(order.order_leavers("acme", 1, 10)) == 0


def test_items_are_priced_again_after_as_many_changes_as_there_are_items_not_at_every_question():
    policy = Uses()
    order = EvictionOrder(policy, lambda item: item)
    for item in range(50):
        order.add(item, "acme", 1)
    for _ in range(20):
        list(order.order_leavers("acme", 1, 50))
    assert policy.asked == 1


def test_what_the_learning_policy_has_learned_changes_the_order():
    policy = make_policy("adaptive", 8, chained=False)
    assert policy is not None
    order = EvictionOrder(policy, lambda item: item)
    for item in range(8):
        policy.use([item])
        order.add(item, "acme", 1)
    for round_ in range(200):  # items 0 to 3 come back all the time, others never
        policy.use([round_ % 4])
        order.touch(round_ % 4)
        policy.use([100 + round_])
    assert set(list(order.order_leavers("acme", 1, 8))[:4]) == {4, 5, 6, 7}
