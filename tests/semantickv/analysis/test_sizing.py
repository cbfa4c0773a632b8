"""The size that pays, and how sure it is: every figure against a plain count."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from semantickv.analysis.advice import MIN_UNITS, Costs, resample
from semantickv.analysis.advise import Question, advise
from semantickv.analysis.latency import LatencyModel
from semantickv.cli import main
from semantickv.output import advise as advise_output
from semantickv.simulator.capacity import Capacity, count_kv_bytes_per_token
from semantickv.simulator.simulate import simulate
from semantickv.traces.trace import Trace, TraceRequest
from semantickv.workloads.families import generate_workload
from semblend.errors import InputError
from semblend.prices import load_price_book

BOOK = load_price_book()


def find_costs(tier: str = "dram", model: str = "llama-3.1-8b", **given: object) -> Costs:
    token_bytes = count_kv_bytes_per_token(model, "bf16")
    return Costs.find(BOOK, model=model, gpu="h200", tier=tier, token_bytes=token_bytes, **given)  # type: ignore[arg-type]


def make_trace(sessions: int, seed: int = 1, turns: int = 4) -> Trace:
    """Chats whose turns grow, one chat after the other in random order, two hours in all."""
    chance = random.Random(seed)
    order = [session for session in range(sessions) for _ in range(turns)]
    chance.shuffle(order)
    turn = [0] * sessions
    requests = []
    for at, session in enumerate(order):
        turn[session] += 1
        ids = tuple(session * 100 + n for n in range(3 * turn[session]))
        requests.append(
            TraceRequest(
                str(at), at * 7200 / len(order), ids, (512,) * len(ids), ("user",) * len(ids), session=f"s{session}"
            )
        )
    return Trace.from_requests(requests)


def test_money_is_gpu_hours_less_memory() -> None:
    costs = find_costs(hour=2.0, gib_hour=0.01)
    rate = BOOK.find_prefill("llama-3.1-8b", "h200").tokens_per_s
    load_s = costs.token_bytes / 2**30 / 51.0
    saved_s = 1_000_000 * (1 / rate - load_s)
    expected = saved_s / 3600 * 2.0 / 0.5 - 10_000 * costs.token_bytes / 2**30 * 0.01
    assert costs.compute_net(10_000, 1_000_000, 0.5) == pytest.approx(expected)


def test_a_hit_on_disk_saves_less_than_one_in_host_memory_and_that_less_than_one_on_the_gpu() -> None:
    hbm, dram, ssd = (find_costs(tier).saved_gpu_ms_per_token for tier in ("hbm", "dram", "ssd"))
    assert hbm > dram > ssd > 0


def test_a_calibrated_line_replaces_the_rate() -> None:
    costs = find_costs("hbm", latency=LatencyModel(7.0, 0.5, "calibrated"))
    assert costs.saved_gpu_ms_per_token == pytest.approx(0.5)
    assert costs.latency == LatencyModel(7.0, 0.5, "calibrated")


@pytest.mark.parametrize("price", [-1.0, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(price: float) -> None:
    with pytest.raises(InputError):
        find_costs(hour=price)


def test_the_added_size_leaves_most_of_all_sizes_in_every_kind_of_memory() -> None:
    trace = make_trace(60)
    made = advise(trace, Question(model="llama-3.1-70b", pool_tokens=20_000), policies=("lru",))
    assert made.by_price
    own = simulate(trace, "lru", Capacity.tokens(made.room.cache)).token_hits
    for tier in ("dram", "ssd"):
        one, left = made.tiers[tier], {}
        for at, size in enumerate(made.sizes):
            if size > made.room.cache:
                gained = simulate(trace, "lru", Capacity.tokens(size)).token_hits - own
                earned = gained * find_costs(tier, "llama-3.1-70b").saved_gpu_ms_per_token / 3.6e6 * 3.0 / made.hours
                memory = made.to_gib(size + made.room.running + made.room.longest)
                left[at] = earned - memory * BOOK.find_tier(tier, "h200").gib_hour
        if one.at is None:
            assert max(left.values()) <= 0
        else:
            assert left[one.at] == pytest.approx(max(left.values()))
            assert one.net_a_day == pytest.approx(24 * max(left.values()))
    assert made.tiers["hbm"].memory_a_day == 0
    best = max(one.net_a_day for one in made.tiers.values() if one.adds)
    assert made.choice.net_a_day == best


def test_a_larger_model_makes_the_same_hits_worth_more() -> None:
    trace = make_trace(40)
    small, large = (
        advise(trace, Question(model=f"llama-3.1-{size}b", memory="hbm"), policies=("lru",)) for size in (8, 70)
    )
    ratio = large.costs.saved_gpu_ms_per_token / small.costs.saved_gpu_ms_per_token
    assert ratio == pytest.approx(70.6 / 8.03, rel=0.02)


def test_sessions_are_drawn_whole_and_runs_where_there_are_none() -> None:
    trace = make_trace(30)
    drawn = resample(trace)
    assert drawn is not None
    assert (drawn.unit, drawn.units) == ("sessions", 30)
    by_session: dict[str, int] = {}
    for name, member in zip(trace.sessions, drawn.members.tolist(), strict=True):
        assert by_session.setdefault(name, member) == member
    assert (drawn.weights.sum(axis=1) == 30).all()
    nameless = Trace.from_requests([TraceRequest(str(n), n, (n,), (9,), ("user",)) for n in range(150)])
    runs = resample(nameless)
    assert runs is not None
    assert (runs.unit, runs.units) == ("runs of requests", 13)
    assert (np.diff(runs.members) >= 0).all()


def test_a_draw_sums_what_its_sessions_have() -> None:
    trace = make_trace(20)
    drawn = resample(trace, draws=5)
    assert drawn is not None
    values = np.arange(len(trace))
    for row, total in zip(drawn.weights, drawn.sum_units(values), strict=True):
        assert total == sum(row[member] * value for member, value in zip(drawn.members, values, strict=True))


def test_the_same_seed_draws_the_same_and_more_sessions_narrow_the_interval() -> None:
    small = Question(pool_tokens=20_000)
    few, many = (advise(make_trace(count), small, policies=("lru",)).sureness for count in (15, 240))
    assert few is not None
    assert many is not None
    assert many.hit_rate.high - many.hit_rate.low < few.hit_rate.high - few.hit_rate.low
    assert advise(make_trace(15), small, policies=("lru",)).sureness == few


def test_the_interval_holds_the_hit_rate_of_the_whole_trace() -> None:
    made = advise(make_trace(60), policies=("lru",))
    assert made.sureness is not None
    assert made.sureness.hit_rate.holds(made.get_advised_point("lru").token_hit_rate)


def test_too_few_sessions_are_too_short_and_the_headline_says_so() -> None:
    made = advise(make_trace(MIN_UNITS - 1), policies=("lru",))
    assert made.sureness is None
    assert made.is_too_short
    assert advise_output.format_headline(made).startswith("Trace too short")
    assert not made.command
    assert made.as_json()["advice"]["trace_too_short"] is True


def test_a_price_of_memory_needs_to_know_of_which() -> None:
    with pytest.raises(InputError) as told:
        Question(gib_hour_cost=0.1)
    assert "--memory" in told.value.hint


def test_running_requests_that_fill_the_gpu_are_told() -> None:
    made = advise(make_trace(60), Question(model="llama-3.1-8b", pool_tokens=7_000), policies=("lru",))
    assert made.room.is_short
    assert "wants more GPUs before it wants a cache" in advise_output.format_lead(made)
    large = advise(make_trace(60), Question(model="llama-3.1-8b"), policies=("lru",))
    pool = (0.9 * 131 - 2 * 8.03e9 / 2**30) * 2**30 / large.token_bytes
    assert large.room.pool == pytest.approx(pool, abs=1)
    assert "more GPUs" not in advise_output.format_lead(large)


def test_memory_that_an_engines_flags_do_not_set_is_refused() -> None:
    with pytest.raises(InputError, match="semblend keeps no cache in dram"):
        Question(engine="semblend", memory="dram")
    with pytest.raises(InputError, match="vllm keeps no cache in ssd"):
        Question(engine="vllm", memory="ssd")
    with pytest.raises(InputError, match="of which kind"):
        Question(memory="hbm", gib_hour_cost=0.1)
    assert Question(engine="lmcache").tier == "dram"
    assert Question(engine="vllm").tier == "dram"


def test_a_trace_without_duration_has_its_knee_and_no_money() -> None:
    trace = generate_workload(["rag_shared_corpus"], sessions=20, requests=2, seed=1)
    at_once = Trace.from_requests(
        [
            TraceRequest(one.request_id, 0.0, one.block_ids, one.block_tokens, one.block_types)
            for one in trace.iter_requests()
        ]
    )
    made = advise(at_once, policies=("lru",))
    assert made.as_json()["advice"]["size_chosen_by"] == "knee"
    assert "USD" not in advise_output.describe_money(made)
    assert not advise_output.build_tier_rows(made)
    assert any("knee" in limit for limit in advise_output.list_limits(made))


def test_the_command_takes_prices_from_a_file_and_refuses_a_wrong_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(Path(__file__).parents[3] / "examples" / "traces" / "rag_serving_trace.jsonl")
    prices = tmp_path / "mine.toml"
    prices.write_text('[gpu.h100]\nhour = 7.5\n[prefill.h100."llama-3.1-8b"]\ntokens_per_s = 10_000\n')
    asked = ["advise", "--trace", trace, "--policies", "lru", "--model", "llama-3.1-8b", "--gpu", "h100", "--json"]
    assert main([*asked, "--prices", str(prices), "--output-dir", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["advice"]["gpu_hour"], told["advice"]["gpu_hour_source"]) == (7.5, "given")
    assert told["latency"]["token_latency_ms"] == pytest.approx(0.1)
    prices.write_text("[gpu.h100]\nhour = -1\n")
    assert main([*asked, "--prices", str(prices)]) == 2
    assert "hint: 0 or more" in capsys.readouterr().err
