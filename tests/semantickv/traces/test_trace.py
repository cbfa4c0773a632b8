"""Reading traces: four formats, and what is said about lines that can't be used."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantickv.simulator.forest import Forest, build_forest
from semantickv.traces import formats as trace_formats
from semantickv.traces.trace import Trace, TraceRequest
from semblend.errors import InputError

MOONCAKE = {"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]}
# made by hand after the published description; no real sample is at hand
BAILIAN = {
    "chat_id": 3,
    "parent_chat_id": -1,
    "timestamp": 2.5,
    "input_length": 20,
    "output_length": 4,
    "type": "text",
    "turn": 1,
    "hash_ids": [1, 2],
}
OURS = {
    "request_id": "a",
    "timestamp_ms": 10,
    "session_id": "s",
    "tenant_id": "t",
    "blocks": [{"content_hash": "abc", "semantic_type": "system", "token_count": 12}],
    "observed_ttft_ms": 80.5,
}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,600,44\n2023-11-16 18:15:50.0,1,9\n"


def written(tmp_path: Path, *records: object, name: str = "trace.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


@pytest.mark.parametrize(
    ("record", "format", "arrival", "tokens", "types"),
    [
        (MOONCAKE, "mooncake", 1.5, [512, 188], ["other", "other"]),
        (BAILIAN, "bailian", 2.5, [16, 4], ["text", "text"]),
        (OURS, "semantickv", 0.01, [12], ["system"]),
    ],
)
def test_a_format_is_recognised_and_read(tmp_path, record, format, arrival, tokens, types):
    trace = Trace.read(written(tmp_path, record))
    assert (trace.format, trace.arrival_s[0]) == (format, pytest.approx(arrival))
    assert trace.tokens.tolist() == tokens
    assert [trace.type_names[kind] for kind in trace.types] == types


def test_azure_requests_share_nothing_and_count_time_from_the_first(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(AZURE)
    trace = Trace.read(path)
    assert (trace.format, trace.tokens.tolist()) == ("azure", [512, 88, 1])
    assert len(set(trace.ids.tolist())) == 3
    assert trace.arrival_s[1] == pytest.approx(3.319, abs=1e-3)


def test_gzip_is_read_whatever_the_name(tmp_path):
    path = tmp_path / "trace.bin"
    path.write_bytes(gzip.compress(json.dumps(MOONCAKE).encode()))
    assert len(Trace.read(path)) == 1
    path.write_bytes(gzip.compress(json.dumps(MOONCAKE).encode() * 99)[:-12])
    with pytest.raises(InputError, match=r"trace\.bin is a damaged gzip file"):
        Trace.read(path, format="mooncake")


@pytest.mark.parametrize(
    ("bad", "field", "problem"),
    [
        ({**MOONCAKE, "timestamp": -1}, "timestamp", "negative"),
        ({**MOONCAKE, "timestamp": "soon"}, "timestamp", "not a number"),
        ({**MOONCAKE, "timestamp": 10**400}, "timestamp", "not a number"),
        ({**MOONCAKE, "input_length": -(10**400)}, "input_length", "not a number"),
        ({k: v for k, v in MOONCAKE.items() if k != "input_length"}, "input_length", "missing"),
        ({**MOONCAKE, "input_length": 5000}, "hash_ids", "can't hold"),
        ({**MOONCAKE, "hash_ids": [1, "x"]}, "hash_ids[1]", "not an integer"),
        ({**MOONCAKE, "timestamp": 3}, "timestamp", "earlier"),
        (BAILIAN, "line", "looks like bailian"),
        ("{", "line", "not JSON"),
        ("[1]", "line", "not a JSON object"),
        ("[" * 100_000, "line", "not JSON"),
    ],
)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path, bad, field, problem):
    path = written(tmp_path, MOONCAKE, bad, {**MOONCAKE, "timestamp": 9000})
    with pytest.raises(InputError) as caught:
        Trace.read(path, format="mooncake")
    assert f"trace.jsonl: line 2: field {field!r}" in str(caught.value)
    assert problem in str(caught.value)
    assert caught.value.hint
    trace = Trace.read(path, skip_bad=True)
    assert (len(trace), trace.skipped) == (2, 1)


def test_a_name_with_half_a_character_is_a_name(tmp_path):
    blocks = [{"content_hash": "\ud800", "semantic_type": "\udfff", "token_count": 5}]
    path = written(tmp_path, {"timestamp_ms": 0, "blocks": blocks}, {"timestamp_ms": 1, "blocks": blocks})
    first, second = trace_formats.TraceFile(path).read_requests()
    assert first.block_ids == second.block_ids


def test_a_line_too_long_to_hold_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_formats, "MAX_LINE_BYTES", 1000)
    path = written(tmp_path, MOONCAKE, "x" * 5_000_000, {**MOONCAKE, "timestamp": 9000})
    with pytest.raises(InputError, match="line 2: field 'line': longer than"):
        Trace.read(path)
    assert Trace.read(path, skip_bad=True).skipped == 1


def test_an_unsorted_trace_can_be_sorted_on_request(tmp_path):
    path = written(tmp_path, {**MOONCAKE, "hash_ids": [1, 2]}, {**MOONCAKE, "timestamp": 3, "hash_ids": [5, 6]})
    trace = Trace.read(path, sort=True)
    assert trace.ids.tolist() == [5, 6, 1, 2]
    assert (np.diff(trace.arrival_s) >= 0).all()


def test_sorting_keeps_the_facts_of_a_request_together(tmp_path):
    later = {**OURS, "request_id": "late", "timestamp_ms": 90, "session_id": "second", "observed_ttft_ms": 7.0}
    first, second = Trace.read(written(tmp_path, later, OURS), sort=True).iter_requests()
    assert (first.request_id, first.session, first.ttft_ms) == ("a", "s", 80.5)
    assert (second.request_id, second.session, second.ttft_ms) == ("late", "second", 7.0)


@pytest.mark.parametrize("text", ["", "\n\n", "nonsense\n"])
def test_a_file_without_requests_says_so(tmp_path, text):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(InputError):
        Trace.read(path)
    with pytest.raises(InputError, match="no request in it"):
        Trace.read(path, skip_bad=True)


def test_a_missing_file_and_an_unknown_format_are_said(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        Trace.read(tmp_path / "none")
    with pytest.raises(InputError, match="unknown trace format 'csv'"):
        Trace.read(tmp_path / "none", format="csv")


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), max_size=10))
@settings(max_examples=50, deadline=None)
def test_requests_come_out_as_they_went_in(lists):
    requests = [
        TraceRequest(str(n), float(n), tuple(ids), (3,) * len(ids), ("mine",) * len(ids), 7, f"t{n % 2}", "s", 1.5)
        for n, ids in enumerate(lists)
    ]
    trace = Trace.from_requests(requests)
    assert list(trace.iter_requests()) == requests
    assert list(trace.skip_first(2).iter_requests()) == requests[2:]
    assert list(trace.take_first(2).iter_requests()) == requests[:2]
    assert trace.place.tolist() == [place for ids in lists for place in range(len(ids))]


def number_plainly(trace, tenants, prefix):
    """What `build_forest` numbers."""
    lookup: dict[tuple[int, int], int] = {}
    node = np.empty(trace.block_accesses, np.int32)
    starts, ids = trace.starts.tolist(), trace.ids.tolist()
    for r, tenant in enumerate(tenants.tolist()):
        root = above = -1 - tenant
        for i in range(starts[r], starts[r + 1]):
            number = lookup.setdefault((above, ids[i]), len(lookup))
            node[i] = number
            above = number if prefix else root
    return node, len(lookup)


def find_next_use_plainly(forest: Forest):
    """What `Forest.next_use` holds."""
    never = len(forest.trace)
    later = np.full(forest.nodes, never, np.int32)
    out = np.empty(len(forest.node), np.int32)
    starts, node = forest.trace.starts, forest.node
    for r in range(never - 1, -1, -1):
        mine = node[starts[r] : starts[r + 1]]
        out[starts[r] : starts[r + 1]] = later[mine]
        later[mine] = r
    return out


@given(st.lists(st.tuples(st.lists(st.integers(-3, 3), max_size=5), st.sampled_from("ab")), max_size=20), st.booleans())
@settings(max_examples=80, deadline=None)
def test_nodes_are_numbered_alike_compiled_and_plain(lists, prefix):
    trace = Trace.from_requests(
        TraceRequest(str(n), 0.0, tuple(ids), (3,) * len(ids), ("other",) * len(ids), tenant=tenant)
        for n, (ids, tenant) in enumerate(lists)
    )
    forest = build_forest(trace, "prefix" if prefix else "block")
    node, count = number_plainly(trace, trace.tenant, prefix)
    assert forest.nodes == count
    assert np.array_equal(forest.node, node)
    assert np.array_equal(forest.next_use, find_next_use_plainly(forest))


def test_a_block_without_tokens_is_refused():
    with pytest.raises(InputError, match="no tokens"):
        TraceRequest("r", 0.0, (1,), (0,), ("user",))


@pytest.mark.data
def test_the_real_traces_are_read():
    data = os.environ.get("SEMBLEND_TEST_DATA")
    if not data:
        pytest.skip("SEMBLEND_TEST_DATA is not set")
    mooncake = Trace.read(Path(data) / "traces" / "mooncake_conversation_first_half.jsonl.gz")
    azure = Trace.read(Path(data) / "traces" / "azure_llm_2023_conv.csv.gz")
    assert (len(mooncake), mooncake.block_accesses, len(azure)) == (6015, 153002, 19366)
