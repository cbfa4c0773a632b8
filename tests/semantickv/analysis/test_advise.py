"""Advice: the knee, the modest choice of a policy, and a page that says what it is."""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantickv.analysis.advice import ENGINES, Advice, Point, count_hits_by_type, find_knee, find_paying_size
from semantickv.analysis.advise import Question, advise, choose_policy
from semantickv.cli import main
from semantickv.output import advise as advise_output
from semantickv.simulator.policies import POLICIES
from semantickv.traces.trace import Trace, TraceRequest
from semantickv.workloads.families import generate_workload
from semblend.errors import InputError


@pytest.fixture(scope="module")
def advice() -> Advice:
    trace = generate_workload(["rag_shared_corpus"], sessions=40, requests=3, seed=1)
    return advise(trace, policies=("lru", "s3fifo", "static_semantic", "belady"))


def curve(*rates: float) -> tuple[Point, ...]:
    return tuple(Point(10 * 2**at, rate, rate, int(1000 * rate)) for at, rate in enumerate(rates))


def take_knee(points: Sequence[Point]) -> int:
    return find_knee([point.tokens for point in points], [point.token_hit_rate for point in points])


def test_lru_is_advised_unless_another_is_better_by_more_than_noise() -> None:
    lru, equal, better = curve(0.1, 0.3, 0.4), curve(0.1, 0.303, 0.4), curve(0.2, 0.39, 0.4)
    assert choose_policy({"lru": lru, "arc": equal}, None, take_knee)[0] == "lru"
    assert choose_policy({"lru": lru, "arc": better}, None, take_knee)[0] == "arc"


def test_what_knows_the_future_is_never_advised() -> None:
    assert choose_policy({"lru": curve(0.1, 0.2, 0.3), "belady": curve(0.3, 0.4, 0.5)}, None, take_knee)[0] == "lru"


@given(rates=st.lists(st.floats(0, 1), min_size=1, max_size=12).map(sorted))
def test_the_knee_is_one_of_the_sizes_and_never_beyond_where_the_curve_is_flat(rates: list[float]) -> None:
    sizes = [2**at for at in range(len(rates))]
    knee = find_knee(sizes, rates)
    assert 0 <= knee < len(sizes)
    assert knee == 0 or rates[knee] > rates[knee - 1]  # the last step up to it still paid


def test_hit_rates_grow_with_memory_and_reach_the_ceiling(advice: Advice) -> None:
    rates = [point.token_hit_rate for point in advice.curves["lru"]]
    assert rates == sorted(rates)
    ends = [points[-1].token_hit_rate for points in advice.curves.values()]
    assert max(ends) == pytest.approx(advice.ceiling.token_hit_rate)


def test_any_position_adds_where_documents_come_in_another_order(advice: Advice) -> None:
    assert advice.anywhere[advice.chosen].token_hit_rate > advice.get_advised_point(advice.policy).token_hit_rate + 0.1
    assert "any position" in advise_output.describe_reuse_at_any_position(advice)


def test_tokens_by_type_add_up_to_the_prompts_and_the_hits(advice: Advice) -> None:
    found = count_hits_by_type(advice).values()
    assert sum(total for total, _ in found) == advice.facts["prompt_tokens"]
    assert sum(hit for _, hit in found) == advice.at_chosen.tokens_saved


def test_the_page_leads_with_the_advice_and_says_simulated(advice: Advice, tmp_path: Path) -> None:
    advise_output.write_advice(advice, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "advice.html", "advice.md", "advice.json", advise_output.FIGURE,
    }  # fmt: skip
    page = (tmp_path / "advice.html").read_text()
    assert ">Simulated<" in page
    assert html.escape(advise_output.format_headline(advice)) in page
    assert "<svg" in page
    assert not re.search(r"(src|href)=\"https?://", page)  # one file, no network
    assert "(simulated)" in (tmp_path / "advice.md").read_text().splitlines()[0]
    stored = json.loads((tmp_path / "advice.json").read_text())
    assert stored["simulated"] is True
    assert set(stored["curves"]) == {"lru", "s3fifo", "static_semantic", "belady"}


def test_traffic_without_reuse_is_told_so() -> None:
    requests = [TraceRequest(str(n), float(n), (n,), (100,), ("user",)) for n in range(120)]
    none = advise(Trace.from_requests(requests), policies=("lru",))
    assert "would not help" in advise_output.format_headline(none)
    assert "0.0%" in advise_output.format_lead(none)


def test_the_ceiling_is_computed_whatever_sizes_were_tried() -> None:
    trace = generate_workload(["rag_shared_corpus"], sessions=40, requests=3, seed=1)
    small = advise(trace, Question(pool_tokens=500), policies=("lru",), sizes=[500, 1000])
    large = advise(trace, policies=("lru",))
    assert small.ceiling == large.ceiling
    assert large.ceiling.tokens_saved == large.curves["lru"][-1].tokens_saved
    assert small.ceiling.token_hit_rate > small.curves["lru"][-1].token_hit_rate + 0.1
    seen: set[tuple[int, ...]] = set()  # by brute force: all beginnings of all prompts so far
    hit = 0
    for at in range(len(trace)):
        part = slice(trace.starts[at], trace.starts[at + 1])
        ids, tokens = trace.ids[part].tolist(), trace.tokens[part].tolist()
        hit += sum(tokens[n] for n in range(len(ids)) if tuple(ids[: n + 1]) in seen)
        seen |= {tuple(ids[: n + 1]) for n in range(len(ids))}
    assert small.ceiling.tokens_saved == hit
    assert f"would give {small.ceiling.token_hit_rate:.0%};" in advise_output.format_lead(small)


def test_a_trace_of_lengths_alone_is_told_that_it_cannot_tell(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,4000,10\n2024-05-10 00:00:01,900,5\n"
    )
    made = advise(Trace.read(trace), policies=("lru",))
    assert "cannot tell" in advise_output.format_headline(made)
    assert "would not help" not in advise_output.format_markdown(made)
    assert made.as_json()["advice"] is None
    page = advise_output.format_html(made)
    assert "0.0%" not in page  # no figure and no table that look like a result
    assert "<svg" not in page
    advise_output.write_advice(made, tmp_path)


def test_the_command_writes_the_page_for_the_sizes_that_were_asked_for(tmp_path: Path, capsys) -> None:
    trace = Path(__file__).parents[3] / "examples" / "traces" / "rag_serving_trace.jsonl"
    sizes = ["--gib", "0.5", "2", "--policies", "lru", "--json", "--output-dir", str(tmp_path)]
    assert main(["advise", "--trace", str(trace), *sizes]) == 0
    found = json.loads(capsys.readouterr().out)
    own = found["advice"]["gib_of_the_engines_own_memory"] - found["advice"]["gib_of_running_requests"]
    assert [point["gib"] for point in found["curves"]["lru"]] == pytest.approx([0.5, 2, own], rel=1e-3)
    assert list(tmp_path.glob("*/advice.html"))


def test_only_what_the_engine_has_is_advised() -> None:
    curves = {"lru": curve(0.1, 0.3, 0.4), "lfu": curve(0.1, 0.35, 0.4), "gdsf": curve(0.2, 0.39, 0.4)}
    assert choose_policy(curves, None, take_knee)[0] == "gdsf"
    assert choose_policy(curves, ENGINES["sglang"].policies, take_knee)[0] == "lfu"
    assert choose_policy(curves, ENGINES["vllm"].policies, take_knee)[0] == "lru"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_page_prints_the_flags_of_the_chosen_engine(engine: str, advice: Advice) -> None:
    free = None if engine == "semblend" else 0.0
    asked = Question(engine=engine, pool_tokens=20_000, gib_hour_cost=free)
    made = advise(advice.trace, asked, policies=("lru",))
    size = made.pool_tokens if engine == "semblend" else made.room.add_requests(made.choice.point.tokens)
    units = {"vllm": 2**30, "sglang": 10**9, "lmcache": 2**30}
    number = (
        size if engine == "semblend" else max(-(-size * made.token_bytes // units[engine]), 5 * (engine == "lmcache"))
    )
    assert re.findall(r"\d+", made.command)[-1] == str(number)
    assert made.command in html.unescape(advise_output.format_html(made))
    assert made.as_json()["advice"]["command"] == made.command


def test_a_policy_that_no_engine_has_is_called_so(advice: Advice) -> None:
    assert "No engine" in advise_output.describe_how_to_set_it(
        replace(advice, choice=replace(advice.choice, policy="s3fifo"))
    )


@given(left=st.lists(st.floats(-100, 100), min_size=1, max_size=10))
def test_the_paying_size_is_the_one_that_leaves_most(left: list[float]) -> None:
    found = find_paying_size(left)
    if found is None:
        assert max(left) <= 0
    else:
        assert left[found] == max(left) > 0


def test_dear_memory_is_not_advised_and_unused_memory_is_all_taken(advice: Advice) -> None:
    hour = Trace.from_requests(replace(one, arrival_s=60.0 * n) for n, one in enumerate(advice.trace.iter_requests()))

    def by_price(gib_hour: float) -> Advice:
        asked = Question(memory="dram", pool_tokens=10_000, hour_cost=3.0, gib_hour_cost=gib_hour)
        return advise(hour, asked, policies=("lru",))

    dear, unused = by_price(1e9), by_price(0.0)
    assert not dear.choice.adds
    assert "costs more than it saves" in advise_output.describe_how_to_set_it(dear)
    best = unused.curves["lru"][-1].token_hit_rate
    assert unused.choice.point.token_hit_rate >= best - 0.005
    assert unused.curves["lru"][unused.chosen - 1].token_hit_rate < best - 0.005
    assert dear.as_json()["advice"]["size_chosen_by"] == "price"


def test_a_trace_whose_half_asks_for_another_size_is_called_too_short(advice: Advice) -> None:
    made = advise(advice.trace, Question(pool_tokens=10_000), policies=("lru",))
    assert made.choice.adds
    here = made.choice.point.tokens
    for half in (3 * here, here // 3, None):
        far = replace(made, half=half)
        assert "too short" in advise_output.describe_stability(far)
        assert advise_output.describe_stability(far) in advise_output.list_limits(far)
        assert not replace(far, engine="vllm").command
    assert "too short" not in advise_output.describe_stability(replace(made, half=here))


def test_memory_that_only_the_length_of_the_trace_asks_for_shows() -> None:
    """Half of the requests bring a new document, half return to an old one: the longer the trace, the more fits."""
    chance = random.Random(1)
    ids = [number if number % 2 == 0 else 2 * chance.randrange(number // 2 + 1) for number in range(600)]
    requests = [TraceRequest(str(n), float(n), (one,), (1000,), ("doc",)) for n, one in enumerate(ids)]
    growing = advise(Trace.from_requests(requests), Question(pool_tokens=10_000), policies=("lru",))
    assert growing.half is not None
    assert growing.half < growing.choice.point.tokens
    assert "too short" in advise_output.describe_stability(growing)
    assert advise_output.format_headline(growing).startswith("Add host memory: ")


def test_all_policies_are_compared_by_default() -> None:
    small = generate_workload(["repeated_system"], sessions=3, requests=2, seed=1)
    assert set(advise(small).curves) == set(POLICIES)


def test_names_in_the_trace_cannot_write_into_the_page(tmp_path: Path) -> None:
    requests = [TraceRequest(str(n), float(n), (1,), (100,), ("<script>x</script>",)) for n in range(4)]
    made = advise(Trace.from_requests(requests, name="<img src=x>"), policies=("lru",))
    page = advise_output.format_html(made)
    assert "<script>" not in page
    assert "<img" not in page


def test_a_long_trace_is_sampled_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch, advice: Advice) -> None:
    monkeypatch.setattr(
        "semantickv.analysis.advise.MAX_ACCESSES", advice.trace.block_accesses * len(advice.sizes) * 3 // 2
    )
    sampled = advise(advice.trace, policies=("lru", "s3fifo"))
    assert sampled.rate == pytest.approx(0.5)
    assert any("samples of 50.0% of the blocks" in limit for limit in advise_output.list_limits(sampled))
    for found, full in zip(sampled.curves["lru"], advice.curves["lru"], strict=True):
        assert found.block_hit_rate == pytest.approx(full.block_hit_rate, abs=0.12)


def test_an_unknown_model_or_size_is_refused() -> None:
    small = generate_workload(["repeated_system"], sessions=2, requests=2, seed=1)
    with pytest.raises(InputError, match="unknown model"):
        advise(small, Question(model="gpt-9"), policies=("lru",))
    with pytest.raises(InputError, match="at least one token"):
        advise(small, sizes=[0], policies=("lru",))


def test_the_figure_draws_every_policy_and_names_the_advised_one_first(advice: Advice) -> None:
    figure = advise_output.build_figure(advice)
    wide, narrow = figure.drawings
    for name in advice.curves:
        assert f"<title>{name}</title>" in wide
        assert f"<title>{name}</title>" in narrow
        assert f">{name} " in wide
    assert figure.legend[0] == ("curve warm", advice.policy)
    assert wide.count('class="curve warm"') == 2  # the curve and its mark beside the name
    assert narrow.count('class="curve warm"') == 1
