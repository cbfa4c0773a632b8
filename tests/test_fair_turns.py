"""Fair order between tenants: what must hold whatever comes, against a clock that remembers everybody."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semblend.fairness import MAX_REMEMBERED, FairClock, TenantLine, count_places, may_start

TENANTS = ["acme", "bolt", "coil"]


def serve_backlog(clock: FairClock, backlog: dict[str, list[int]]) -> list[tuple[str, int]]:
    """Serve everything in fair order; what was served, piece by piece."""
    served = []
    while waiting := [name for name in backlog if backlog[name]]:
        chosen = clock.choose(waiting)
        served.append((chosen, backlog[chosen].pop(0)))
        clock.serve(*served[-1])
    return served


pieces = st.lists(st.integers(1, 100), min_size=1, max_size=30)


@given(pieces, pieces)
def test_no_tenant_lags_another_by_more_than_one_piece_while_both_wait(left, right):
    clock = FairClock()
    for name in ("left", "right"):
        clock.join(name)
    sums, remaining = {"left": 0, "right": 0}, {"left": len(left), "right": len(right)}
    for name, tokens in serve_backlog(clock, {"left": list(left), "right": list(right)}):
        if not all(remaining.values()):
            break
        sums[name] += tokens
        remaining[name] -= 1
        assert abs(sums["left"] - sums["right"]) <= max(*left, *right)


@given(st.integers(0, 10_000), pieces, st.integers(1, 100))
def test_a_newcomer_waits_for_one_piece_of_a_backlog_at_most(before, backlog, tokens):
    clock = FairClock()
    clock.join("loud")
    clock.serve("loud", before)
    for piece in backlog:
        clock.serve("loud", piece)
    clock.join("quiet")
    assert clock.choose(["loud", "quiet"]) == "quiet"
    clock.serve("quiet", tokens)


@given(st.integers(1, 1000), pieces)
def test_time_away_earns_no_credit(away, backlog):
    """Who comes back is not served for as long as it was away: it starts with the others."""
    clock = FairClock()
    for name in ("acme", "bolt"):
        clock.join(name)
    clock.serve("bolt", 1)
    for piece in [away] * 20:
        clock.serve("acme", piece)
    clock.join("bolt")
    assert clock.read("acme") - clock.read("bolt") <= away


def test_who_had_more_while_others_waited_comes_later_and_only_by_that():
    clock = FairClock()
    clock.join("acme")
    clock.charge("acme", 50)  # answers, that were not chosen
    clock.join("bolt")
    assert [name for name, _ in serve_backlog(clock, {"acme": [10] * 3, "bolt": [10] * 8})][:6] == ["bolt"] * 5 + [
        "acme"
    ]


def test_only_tenants_without_debt_or_with_the_least_are_forgotten():
    clock = FairClock()
    clock.join("busy")
    for number in range(2 * MAX_REMEMBERED + 10):
        clock.charge(f"t{number}", number)
    clock.forget_idle(["busy"])
    assert len(clock) == MAX_REMEMBERED + 1
    assert clock.read(f"t{2 * MAX_REMEMBERED}") == 2 * MAX_REMEMBERED
    assert clock.read("t5") == clock.now
    clock.forget_idle([])
    assert len(clock) == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(TENANTS)), max_size=80))
def test_a_line_is_a_list_for_each_tenant(events):
    line, plain = TenantLine[int](), {name: [] for name in TENANTS}
    for number, (kind, tenant) in enumerate(events):
        mine = plain[tenant]
        if kind == 0:
            line.append(tenant, number)
            mine.append(number)
        elif kind == 1:
            line.put_first(tenant, number)
            mine.insert(0, number)
        elif kind == 2 and mine:
            assert (line.look(tenant), line.pop(tenant)) == (mine[0], mine.pop(0))
        elif kind == 3 and mine:
            assert line.pop_newest(tenant) == mine.pop()
        elif kind == 4:
            gone = mine.pop(len(mine) // 2) if mine else -1
            assert line.remove(tenant, gone) == (gone >= 0)
        assert {name: line.count(name) for name in TENANTS} == {name: len(ones) for name, ones in plain.items()}
        assert sorted(line) == sorted(one for ones in plain.values() for one in ones)
        assert len(line) == sum(map(len, plain.values()))
        assert set(line.tenants) == {name for name, ones in plain.items() if ones}


def test_places_for_newcomers_are_a_quarter_more_and_one_at_least():
    assert [count_places(most) for most in (1, 4, 8, 32)] == [2, 5, 10, 40]
    assert not may_start(32, 32, 1)
    assert may_start(39, 32, 0)
    assert not may_start(40, 32, 0)
