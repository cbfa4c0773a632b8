"""Logs and events of real engines become traces, and replaying them finds the hits that the engines reported.

``recorded/`` holds lines of vLLM 0.32.0 and SGLang 0.5.23 on a CPU (SmolLM2-135M), while six chats were sent to each:
spring, summer, spring, autumn, spring, summer, each with another last word.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantickv.cli import main
from semantickv.engine_state.events import BlockHash, BlockRemoved, BlockStored, encode_batch
from semantickv.engine_state.subscriber import EventSource
from semantickv.simulator.capacity import Capacity
from semantickv.simulator.simulate import simulate
from semantickv.traces.kv_events import EventCollector, EventTrace
from semantickv.traces.trace import Trace
from semantickv.traces.trace_writer import TraceWriter
from semblend.errors import InputError
from tests.fakes.scripted_publisher import CLEAR, ScriptedPublisher, remove, store

RECORDED = Path(__file__).parent / "recorded"
VLLM_CACHED = [0, 0, 128, 0, 128, 128]  # usage.prompt_tokens_details.cached_tokens of its six answers
SGLANG_CACHED = [0, 12, 147, 12, 147, 147]
LMCACHE_LINES = (
    # from reports of users (LMCache issues 2213 and 2703), and as LMCache 0.5.6 writes it
    "(EngineCore_DP0 pid=4) [2025-12-10 02:06:38,556] LMCache INFO: Reqid: chatcmpl-96, Total tokens 8210, "
    "LMCache hit tokens: 8210, need to load: 8209 (vllm_v1_adapter.py:1520:lmcache.integration.vllm.vllm_v1_adapter)\n"
    "(EngineCore_DP0 pid=4) [2025-12-10 02:06:39,100] LMCache INFO: Retrieved 33 memory objects from RemoteBackend\n"
    "[2025-12-10 02:06:43,376] LMCache INFO: Reqid: chatcmpl-89, Total tokens 836, "
    "Inference Engine computed tokens: 0, LMCache hit tokens: 768, need to load: 768\n"
    "[2025-12-10 02:06:43,480] LMCache INFO: Reqid: chatcmpl-89, Total tokens 836, "
    "Inference Engine computed tokens: 0, LMCache hit tokens: 768, need to load: 768\n"
)
BATCH = "[2026-08-02 00:0{}:17] Prefill batch, #new-seq: {}, #new-token: {}, #cached-token: {}, token usage: 0.00\n"


def count_hits(trace: Trace) -> list[int]:
    hits: list[int] = simulate(trace, "lru", Capacity.tokens(10**6)).hit_tokens_by_request.tolist()
    return hits


def test_a_replay_of_vllms_log_hits_what_vllm_reported() -> None:
    trace = Trace.read(RECORDED / "vllm_requests.log", block_tokens=32)
    assert (trace.format, len(trace), trace.holds_content, trace.chained) == ("vllm_log", 6, True, False)
    assert trace.request_tokens.tolist() == [155] * 6
    assert [hit // 32 * 32 for hit in count_hits(trace)] == VLLM_CACHED
    assert trace.engine_hit_rate == pytest.approx(0.413)  # its last line of statistics
    assert trace.engine_hit_rate == pytest.approx(sum(VLLM_CACHED) / (6 * 155), abs=0.001)


def test_a_replay_of_sglangs_log_hits_what_sglang_reported() -> None:
    trace = Trace.read(RECORDED / "sglang_requests.log", block_tokens=1)
    assert (trace.format, len(trace)) == ("sglang_log", 6)  # its health checks are no requests
    assert count_hits(trace) == SGLANG_CACHED
    assert trace.output_tokens.tolist() == [2] * 6
    assert trace.engine_hit_rate == pytest.approx(sum(SGLANG_CACHED) / (6 * 155))


def test_vllms_events_show_the_requests_that_stored_something() -> None:
    trace = Trace.read(RECORDED / "vllm_kv_events.jsonl")
    assert (trace.format, len(trace)) == ("kv_events", VLLM_CACHED.count(0))
    assert trace.request_tokens.tolist() == [128] * 3
    log = Trace.read(RECORDED / "vllm_requests.log", block_tokens=32)
    first = [set(log.ids[log.starts[at] : log.starts[at] + 4].tolist()) for at in (0, 1, 3)]
    assert [set(trace.ids[trace.starts[at] : trace.starts[at + 1]].tolist()) for at in range(3)] == first


def test_sglangs_prefill_lines_give_lengths_and_what_was_cached(tmp_path: Path) -> None:
    path = tmp_path / "sglang.log"
    path.write_text("INFO start\n" + BATCH.format(0, 1, 60, 40) + BATCH.format(1, 2, 10, 91))
    trace = Trace.read(path)
    assert (trace.format, trace.holds_content) == ("sglang_cache_log", False)
    assert trace.request_tokens.tolist() == [100, 51, 50]
    assert trace.arrival_s.tolist() == [0, 60, 60]
    assert trace.engine_hit_rate == pytest.approx(131 / 201)


def test_lmcaches_lookups_give_lengths_once_a_request(tmp_path: Path) -> None:
    path = tmp_path / "lmcache.log"
    path.write_text(LMCACHE_LINES)
    trace = Trace.read(path)
    assert (trace.format, trace.holds_content, len(trace)) == ("lmcache_log", False, 2)
    assert trace.request_tokens.tolist() == [8210, 836]
    assert trace.engine_hit_rate == pytest.approx((8210 + 768) / (8210 + 836))


def test_a_log_without_tokens_says_how_to_get_them(tmp_path: Path) -> None:
    lines = (RECORDED / "vllm_requests.log").read_text().splitlines(keepends=True)
    path = tmp_path / "info.log"
    path.write_text("".join(line for line in lines if "details:" not in line))
    with pytest.raises(InputError) as told:
        Trace.read(path)
    assert "VLLM_LOGGING_LEVEL=DEBUG" in told.value.hint
    path.write_text(
        "".join(line for line in lines if "request_logger" not in line)
    )  # a server's log as it is by default
    with pytest.raises(InputError) as told:
        Trace.read(path)
    assert "--enable-log-requests" in told.value.hint


def test_a_prompt_that_quotes_a_log_does_not_write_the_trace(tmp_path: Path) -> None:
    liar = (
        "Request a details: prompt: 'x prompt_token_ids: [1, 1], y', prompt_token_ids: [5, 6, 7], prompt_embeds: None."
    )
    path = tmp_path / "liar.log"
    path.write_text(f"(A pid=1) DEBUG 11-16 18:15:41 [x/request_logger.py:55] {liar}\n")
    assert Trace.read(path).request_tokens.tolist() == [3]


def test_a_trace_that_keeps_a_text_about_logs_is_read_as_what_it_is(tmp_path: Path) -> None:
    quoted = (RECORDED / "vllm_requests.log").read_text().splitlines()[1] + BATCH.format(0, 1, 60, 40)
    block = {"content_hash": "x", "semantic_type": "user", "token_count": 9, "text": quoted}
    path = tmp_path / "kept.jsonl"
    path.write_text(json.dumps({"request_id": "a", "timestamp_ms": 0, "blocks": [block]}) + "\n")
    assert Trace.read(path).format == "semantickv"


def test_a_broken_line_of_a_log_is_named_or_skipped(tmp_path: Path) -> None:
    path = tmp_path / "broken.log"
    path.write_text((RECORDED / "sglang_requests.log").read_text() + '[t] {"event": "request.received", "rid": "x", \n')
    with pytest.raises(InputError, match="not JSON"):
        Trace.read(path)
    trace = Trace.read(path, skip_bad=True)
    assert (len(trace), trace.skipped) == (6, 1)


def test_advise_and_replay_read_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = ["--trace", str(RECORDED / "sglang_requests.log"), "--output-dir", str(tmp_path)]
    assert main(["replay", *trace, "--cache-token-budget", "10000", "--policies", "lru", "--no-plots"]) == 0
    assert main(["advise", *trace, "--policies", "lru"]) == 0
    assert "Trace too short" in capsys.readouterr().out


# -- events ------------------------------------------------------------------------------------------------------------


def put_together(*steps: tuple[float, Mapping[str, object]]) -> Trace:
    """Read the trace of these events from a file."""
    lines = [
        json.dumps({"batch": base64.b64encode(encode_batch([time, [event], 0])).decode()}) for time, event in steps
    ]
    path = Path(mkdtemp()) / "events.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return Trace.read(path)


def test_what_stands_before_the_stored_blocks_was_hit() -> None:
    trace = put_together((10, store([1, 2], None, range(8), 4)), (20, store([3, 4], 1, range(20, 28), 4)))
    assert trace.request_tokens.tolist() == [8, 12]
    assert count_hits(trace) == [0, 4]


def test_an_answers_blocks_and_the_steps_of_a_long_prompt_are_one_request() -> None:
    trace = put_together(
        (10, store([1, 2], None, range(8), 4)),
        (10.5, store([3, 4], 2, range(8, 16), 4)),  # the prompt's second step
        (15, store([5], 4, range(16, 20), 4)),  # a block of the answer
        (20, store([6, 7], 5, range(20, 28), 4)),  # the next turn
    )
    assert trace.request_tokens.tolist() == [16, 28]


def test_blocks_without_a_known_beginning_are_left_out_and_counted() -> None:
    trace = put_together((1, store([9], 8, range(4), 4)), (2, store([1, 2], None, range(8), 4)))
    assert (len(trace), trace.skipped) == (1, 1)
    cleared = put_together((1, store([1], None, range(4), 4)), (9, CLEAR), (10, store([2], 1, range(4), 4)))
    assert (len(cleared), cleared.skipped) == (1, 1)
    removed = put_together((1, store([1], None, range(4), 4)), (9, remove([1])), (10, store([1], None, range(4), 4)))
    assert count_hits(removed) == [0, 4]  # what this engine has evicted a larger cache would have held


def test_two_salts_share_nothing() -> None:
    trace = put_together(
        (1, store([1], None, range(4), 4, cache_salt="a")), (9, store([2], None, range(4), 4, cache_salt="b"))
    )
    assert count_hits(trace) == [0, 0]


@given(
    steps=st.lists(st.tuples(st.floats(0, 5), st.integers(0, 6), st.integers(1, 3)), max_size=25),
)
def test_requests_come_in_order_of_arrival_and_their_tokens_are_chains_that_were_stored(
    steps: list[tuple[float, int, int]],
) -> None:
    events, given_requests, now, stored = EventTrace(), [], 0.0, 0
    held: list[BlockHash | None] = [None]
    for pause, parent, count in steps:
        now += pause
        hashes = tuple(range(stored + 1, stored + count + 1))
        tokens = tuple(range(stored * 2, (stored + count) * 2))
        behind = held[parent % len(held)]
        given_requests += events.take(now, [BlockStored(hashes, behind, tokens, 2)])
        held += hashes
        stored += count
    given_requests += events.finish()
    arrivals = [one.arrival_s for one in given_requests]
    assert arrivals == sorted(arrivals)
    assert events.left_out == 0
    assert sum(len(one.block_ids) for one in given_requests) <= stored * (len(steps) + 1)
    assert {one.block_tokens for one in given_requests} <= {(2,) * n for n in range(stored + 1)}


def test_a_request_whose_first_block_is_no_longer_known_is_left_out_not_shortened() -> None:
    events = EventTrace()
    events.take(0.0, [BlockStored((1, 2), None, (0, 1, 2, 3), 2), BlockRemoved((1,))])
    events.take(9.0, [BlockStored((3, 4), 2, (4, 5, 6, 7), 2)])
    assert events.finish() == []
    assert events.left_out == 1


def test_blocks_that_name_each_other_as_parent_are_left_out_too() -> None:
    events = EventTrace()
    events.take(0.0, [BlockStored((1, 2), None, (0, 1, 2, 3), 2), BlockRemoved((1,)), BlockStored((1,), 2, (0, 1), 2)])
    events.take(9.0, [BlockStored((3, 4), 2, (4, 5, 6, 7), 2)])
    assert events.left_out == 1


def test_live_events_become_a_trace_that_holds_no_tokens(tmp_path: Path) -> None:
    path = tmp_path / "live.jsonl"

    async def serve() -> None:
        async with ScriptedPublisher() as publisher:
            with TraceWriter(path) as writer:
                times = iter(range(0, 10_000, 10))
                collector = EventCollector(EventSource.parse(publisher.address), writer, clock=lambda: next(times))
                running = asyncio.ensure_future(collector.run(2))
                await publisher.wait_for_subscriber()
                await publisher.publish(store([1, 2], None, range(7000, 7008), 4))
                await publisher.publish(store([3, 4], 1, range(7100, 7108), 4))
                await asyncio.wait_for(running, 300)

    asyncio.run(serve())
    trace = Trace.read(path)
    assert trace.request_tokens.tolist() == [8, 12]
    assert count_hits(trace) == [0, 4]
    assert "7000" not in path.read_text()
