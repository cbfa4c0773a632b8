"""Load: arrivals, promises, and the names that others use for the same numbers."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_cases import manifest, positive
from lying_backend import LyingBackend

from sembench.backends import ServerAnswer
from sembench.cli import main
from sembench.live.load import (
    RequestArrival,
    TimedAnswer,
    draw_arrivals,
    list_details,
    list_prompts,
    parse_slo,
    play,
    read_trace,
)
from sembench.scoring.aggregate import summarize_load
from semblend.errors import InputError


@given(st.floats(0.5, 50), st.floats(0.2, 4), st.integers(0, 5))
def test_arrivals_never_go_back_and_come_at_their_rate(rate, burstiness, seed):
    arrivals = draw_arrivals(["x"] * 400, rate, burstiness=burstiness, seed=seed)
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert 399 / times[-1] == pytest.approx(rate, rel=0.5)
    assert draw_arrivals(["x"] * 400, rate, burstiness=burstiness, seed=seed) == arrivals


def test_gaps_of_a_poisson_process_vary_as_much_as_their_mean():
    times = [arrival.at_s for arrival in draw_arrivals(["x"] * 4000, 10.0)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    centre = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - centre) ** 2 for gap in gaps) / len(gaps))
    assert spread / centre == pytest.approx(1.0, abs=0.1)


def test_traffic_brings_donors_before_their_recipient():
    case = positive(1)
    assert list(list_prompts([case])) == [case.donor_prompts[0].text, case.recipient_prompt]
    assert list(list_prompts([case], with_donors=False)) == [case.recipient_prompt]


def mooncake(tmp_path, *rows):
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def row(at, blocks, length=1024):
    return {"timestamp": at, "input_length": length, "output_length": 5, "hash_ids": blocks}


def test_a_mooncake_trace_keeps_its_times_and_what_its_prompts_share(tmp_path):
    path = mooncake(tmp_path, row(27000, [1, 2]), row(30000, [1, 3]))
    first, second = read_trace(path, time_scale=3)
    assert (first.at_s, second.at_s, second.output_tokens) == (0.0, 1.0, 5)
    words = 512 // 2
    assert first.text.split()[:words] == second.text.split()[:words]
    assert first.text.split()[words:] != second.text.split()[words:]
    assert len(first.text.split()) == 512
    assert len(read_trace(path, most_tokens=100)[0].text.split()) == 50


def test_an_azure_trace_is_read_and_its_prompts_share_nothing(tmp_path):
    path = tmp_path / "azure.csv"
    day = "2023-11-16 18:15"
    rows = f"{day}:46.6805900,374,44\n{day}:47.6805900,374,9\n"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    first, second = read_trace(str(path))
    assert second.at_s - first.at_s == pytest.approx(1.0)
    assert first.output_tokens == 44
    assert first.text.split()[0] != second.text.split()[0]


@pytest.mark.parametrize("text", ['{"timestamp": 1}\n', "oops\n", ""])
def test_a_broken_trace_names_its_line(tmp_path, text):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=r"line 1: |no request in it"):
        read_trace(str(path))


@pytest.mark.data
def test_real_traces_are_read(data_dir):
    for name in ("mooncake_conversation_first_half.jsonl.gz", "azure_llm_2023_conv.csv.gz"):
        arrivals = read_trace(str(data_dir / "traces" / name), limit=50)
        assert len(arrivals) == 50
        assert all(arrival.text for arrival in arrivals)


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "speed:5", "tpot:-1", "ttft:0"])
def test_a_promise_that_makes_no_sense_is_refused(text):
    with pytest.raises(InputError, match="is no promise"):
        parse_slo([text])


def timed(ttft, gaps=(10.0, 10.0), late=0.0, error=None):
    answer = ServerAnswer(ttft_ms=ttft, latency_ms=ttft + sum(gaps), inter_token_ms=tuple(gaps), prompt_tokens=100,
                    output_tokens=len(gaps) + 1, error=error)  # fmt: skip
    return TimedAnswer(answer, 0.0, late, 1.0).to_request()


def test_the_numbers_have_the_names_of_vllm_bench_serve():
    found = summarize_load([timed(100.0), timed(300.0), timed(1.0, error="no")], 2.0, {"ttft": 200.0, "tpot": 50.0})
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", f"p99_{name}_ms"} <= set(found)
    assert (found["completed"], found["failed"], found["duration"]) == (2, 1, 2.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (200, 6)
    assert (found["request_throughput"], found["output_throughput"], found["request_goodput"]) == (1.0, 3.0, 0.5)
    assert (found["mean_ttft_ms"], found["mean_tpot_ms"], found["mean_itl_ms"], found["mean_e2el_ms"]) == (
        200,
        10,
        10,
        220,
    )
    assert found["goodput_share"] == pytest.approx(1 / 3)


def test_waiting_for_a_place_is_part_of_the_wait():
    assert timed(100.0, late=400.0).ttft_ms == 500.0
    assert not timed(100.0, late=400.0).meets({"ttft": 200.0})


def test_without_promises_there_is_no_goodput_and_without_answers_no_times():
    found = summarize_load([timed(1.0, error="no")], 1.0, {})
    assert found["request_goodput"] is None
    assert found["mean_ttft_ms"] is None
    assert found["completed"] == 0


class Counting:
    """Answers after a moment, or when ``crowd`` wait at once; remembers how many did at most."""

    name = "counting"

    def __init__(self, crowd=0):
        self.now = self.most = 0
        self.crowd, self.is_crowded = crowd, asyncio.Event()

    async def ask(self, call, *, donor=False):
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now == self.crowd:
            self.is_crowded.set()
        await (self.is_crowded.wait() if self.crowd else asyncio.sleep(0.01))
        self.now -= 1
        return ServerAnswer(text=call.text, ttft_ms=10.0, latency_ms=10.0, output_tokens=1)


@pytest.mark.parametrize(("limit", "most"), [(2, 2), (None, 6)])
def test_no_more_are_under_way_than_allowed(limit, most):
    backend = Counting()
    arrivals = [RequestArrival(0.0, str(at)) for at in range(6)]
    found, _ = asyncio.run(play(backend, arrivals, output_tokens=1, max_concurrency=limit))
    assert backend.most == most
    assert [one.answer.text for one in found] == [str(at) for at in range(6)]
    assert limit is None or found[-1].late_ms > 15  # two answers came before it
    assert list_details(found)["errors"] == [""] * 6


def test_an_open_loop_does_not_wait_for_answers():
    backend, arrivals = Counting(crowd=5), [RequestArrival(0.001 * at, "x") for at in range(5)]
    asyncio.run(asyncio.wait_for(play(backend, arrivals, output_tokens=1), 120))
    assert backend.most == 5


def test_the_command_writes_what_it_measured(tmp_path, capsys):
    output = tmp_path / "load.json"
    with LyingBackend().serving() as server:
        words = ["run-load", "--manifest", manifest(tmp_path), "--output", output, "--base-url", server.url, "--model"]
        words += ["liar", "--request-rate", "50", "--slo", "ttft:10000", "--save-detailed", "--max-concurrency", "4"]
        assert main([str(word) for word in words]) == 0
    found = json.loads(output.read_text())
    assert json.loads(capsys.readouterr().out)["completed"] == found["completed"] == found["num_prompts"] == 10
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["reused_tokens"] > 0
    assert found["engine"]["prometheus"]["delta"]["semblend_reused_tokens_delta"] == found["reused_tokens"]
    assert len(found["ttfts"]) == 10


def test_a_trace_brings_its_own_times(tmp_path, capsys):
    words = ["run-load", "--trace", mooncake(tmp_path, row(0, [1])), "--output", str(tmp_path / "x.json")]
    words += ["--base-url", "http://127.0.0.1:9", "--model", "m", "--request-rate", "5"]
    assert main(words) == 2
    assert "--time-scale" in capsys.readouterr().err
