"""Tiers against a plain twin that recounts everything at every step, and the three things that tiers are about."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantickv.analysis.tiers import Speed, Tier, replay_tiers
from semantickv.cli import main
from semantickv.simulator.capacity import Capacity
from semantickv.simulator.forest import Forest, build_forest
from semantickv.simulator.simulate import simulate
from semantickv.traces.trace import Trace, TraceRequest
from semblend.errors import InputError

SPEED = Speed(5.0, 1.0, 10.0)


def make_forest(requests: list[tuple[float, list[int], int]]) -> Forest:
    """Requests of (arrival in s, block ids of 10 tokens, tokens of the answer)."""
    made = [
        TraceRequest(str(at), when, tuple(ids), (10,) * len(ids), ("user",) * len(ids), output_tokens=answer)
        for at, (when, ids, answer) in enumerate(requests)
    ]
    return build_forest(Trace.from_requests(made), "prefix")


def replay_by_brute_force(forest: Forest, tiers: list[Tier], speed: Speed) -> list[tuple[list[int], float, float]]:
    """Hits by tier, wait and TTFT of every request. State is a list of past requests; everything is counted anew."""
    trace, size = forest.trace, forest.tokens.tolist()
    past: list[tuple[float, list[int], int]] = []  # end, blocks, answer
    device: list[int] = []  # blocks on the device; what is not held is in the order in which it goes
    lower: list[list[int]] = [[] for _ in tiers[1:]]
    ended: set[int] = set()
    clock, results = 0.0, []

    def end_requests(now: float) -> None:
        due = sorted((end, at) for at, (end, _, _) in enumerate(past) if end <= now and at not in ended)
        for _, at in due:
            ended.add(at)
            still = {one for n, (_, blocks, _) in enumerate(past) if n not in ended for one in blocks}
            for one in reversed(past[at][1]):
                if one not in still:
                    device.remove(one)
                    device.append(one)

    def list_held() -> set[int]:
        return {one for n, (_, blocks, _) in enumerate(past) if n not in ended for one in blocks}

    def count_answers() -> int:
        return sum(answer for n, (_, _, answer) in enumerate(past) if n not in ended)

    for r in range(len(trace)):
        chain = forest.node[trace.starts[r] : trace.starts[r + 1]].tolist()
        answer, arrival = int(trace.output_tokens[r]), float(trace.arrival_s[r]) * 1000
        if sum(size[one] for one in chain) + answer > tiers[0].tokens:
            results.append(([0] * len(tiers), 0.0, np.nan))
            continue
        now = max(clock, arrival)
        end_requests(now)
        while sum(size[one] for one in list_held() | set(chain)) + count_answers() + answer > tiers[0].tokens:
            now = max(now, min(end for n, (end, _, _) in enumerate(past) if n not in ended))
            end_requests(now)
        clock = now
        hits = [0] * len(tiers)
        for one in chain:
            places = [at for at, held in enumerate([device, *lower]) if one in held]
            if not places:
                break
            hits[places[0]] += size[one]
        computed = sum(size[one] for one in chain) - sum(hits)
        load = sum(tier.load_ms_per_token * hit for tier, hit in zip(tiers, hits, strict=True))
        ttft = now - arrival + speed.base_ms + load + speed.prefill_ms * computed
        past.append((arrival + ttft + speed.decode_ms * answer, chain, answer))
        device += [one for one in chain if one not in device]
        held = list_held()
        while sum(size[one] for one in device) + count_answers() > tiers[0].tokens:
            device.remove(next(one for one in device if one not in held))
        for tier, blocks in zip(tiers[1:], lower, strict=True):
            for one in reversed(chain):
                if one in blocks:
                    blocks.remove(one)
                blocks.append(one)
            while sum(size[one] for one in blocks) > tier.tokens:
                blocks.pop(0)
        results.append((hits, now - arrival, ttft))
    return results


CHAINS = st.lists(st.integers(0, 3), min_size=1, max_size=5)
TRACES = st.lists(st.tuples(st.floats(0, 0.3), CHAINS, st.integers(0, 30)), min_size=1, max_size=25)


@settings(max_examples=120, deadline=None)
@given(steps=TRACES, device=st.integers(20, 120), host=st.integers(0, 150), disk=st.integers(0, 300))
def test_hits_waits_and_times_are_those_of_the_plain_twin(
    steps: list[tuple[float, list[int], int]], device: int, host: int, disk: int
) -> None:
    now, requests = 0.0, []
    for pause, ids, answer in steps:
        now += pause
        requests.append((now, ids, answer))
    tiers = [Tier("device", device)]
    tiers += [Tier("host", host, 0.25)] if host else []
    tiers += [Tier("disk", disk, 0.5)] if disk else []
    forest = make_forest(requests)
    found = replay_tiers(forest, tiers, SPEED)
    for at, (hits, wait, ttft) in enumerate(replay_by_brute_force(forest, tiers, SPEED)):
        assert found.hit_tokens[at].tolist() == hits
        assert found.wait_ms[at] == pytest.approx(wait)
        assert found.ttft_ms[at] == pytest.approx(ttft, nan_ok=True)


@settings(max_examples=60, deadline=None)
@given(chains=st.lists(CHAINS, min_size=1, max_size=30), room=st.integers(5, 20))
def test_a_device_alone_whose_requests_never_meet_is_the_simulators_lru(chains: list[list[int]], room: int) -> None:
    forest = make_forest([(at * 1000.0, ids, 0) for at, ids in enumerate(chains)])
    found = replay_tiers(forest, [Tier("device", room * 10)], SPEED)
    lru = simulate(forest, "lru", Capacity.tokens(room * 10))
    assert found.hit_tokens[:, 0].tolist() == lru.hit_tokens_by_request.tolist()


def test_a_running_request_holds_its_blocks_and_the_next_one_waits() -> None:
    forest = make_forest([(0.0, [1, 2, 3], 10), (0.01, [4, 5, 6], 10)])
    small, large = (replay_tiers(forest, [Tier("device", room)], SPEED) for room in (60, 100))
    ends = 5 + 30 + 10 * 10  # base, prefill, answer
    assert small.wait_ms.tolist() == [0, ends - 10]
    assert large.wait_ms.tolist() == [0, 0]
    assert small.most_held_tokens == 40
    assert large.most_held_tokens == 80


def test_a_hit_on_the_host_costs_its_load_and_not_its_prefill() -> None:
    forest = make_forest([(0.0, [1, 2], 0), (10.0, [3, 4], 0), (20.0, [1, 2], 0)])
    alone = replay_tiers(forest, [Tier("device", 20)], SPEED)
    beside = replay_tiers(forest, [Tier("device", 20), Tier("host", 100, 0.1)], SPEED)
    assert alone.ttft_ms.tolist() == [25, 25, 25]
    assert beside.ttft_ms.tolist() == [25, 25, pytest.approx(7)]
    assert beside.hit_rates == {"device": 0.0, "host": pytest.approx(1 / 3)}


def test_a_prompt_that_never_fits_is_counted_and_takes_no_room() -> None:
    found = replay_tiers(make_forest([(0.0, [1, 2, 3], 0), (1.0, [1], 0)]), [Tier("device", 20)], SPEED)
    assert (found.too_large, found.as_json()["too_large"]) == (1, 1)
    assert np.isnan(found.ttft_ms[0])
    assert found.ttft_ms[1] == 15


def test_the_command_prints_a_row_for_each_tier_that_is_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(Path(__file__).parents[3] / "examples" / "traces" / "rag_serving_trace.jsonl")
    sizes = ["--device-gib", "0.3", "--host-gib", "2", "--disk-gib", "20"]
    assert main(["tiers", "--trace", trace, *sizes, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [list(one["tiers"]) for one in runs] == [["device"], ["device", "host"], ["device", "host", "disk"]]
    rates = [one["token_hit_rate"] for one in runs]
    assert rates == sorted(rates)
    assert main(["tiers", "--trace", trace, *sizes]) == 0
    assert "device + host + disk" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--device-gib", "0"], ["--device-gib", "1", "--host-gib", "-1"]])
def test_sizes_that_are_none_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(Path(__file__).parents[3] / "examples" / "traces" / "rag_serving_trace.jsonl")
    assert main(["tiers", "--trace", trace, *flags]) == 2
    assert "must be above 0" in capsys.readouterr().err
    with pytest.raises(InputError):
        Tier("device", 0)
