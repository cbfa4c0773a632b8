"""Collected traces: what was asked for in hashes and lengths, when it was answered, and not a word of it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from edge_servers import serve

from semantickv.apps.collecting import CollectingApp
from semantickv.traces.collection import Collector, has_content
from semantickv.traces.segmentation import Segmenter
from semantickv.traces.trace import Trace
from semantickv.traces.trace_writer import MAX_HELD, TraceWriter
from semantickv.workloads.mock_traffic import collect_mock
from semblend.errors import ConfigError, InputError
from semblend.http.connections import Deadlines

SECRET = "the launch code is heliotrope"
BODY = {"model": "m", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SECRET}]}
USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_wrapped_stream_is_timed_at_its_first_word_and_no_text_is_kept(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "t.jsonl"

    def handler(body: dict[str, Any], **_: Any) -> Iterator[dict[str, Any]]:
        clock.now += 0.01
        yield {"choices": [{"delta": {"role": "assistant"}}]}  # says nothing yet
        clock.now += 0.04
        yield {"choices": [{"delta": {"content": "ok"}}]}
        clock.now += 0.2
        yield {"choices": [], "usage": USAGE}

    with TraceWriter(path) as writer:
        watched = Collector(writer, clock=clock).wrap(handler)
        assert len(list(watched(BODY, session="visitor 9", tenant="acme"))) == 3
    (line,) = read(path)
    assert line["observed_ttft_ms"] == pytest.approx(50)
    assert line["observed_total_latency_ms"] == pytest.approx(250)
    assert (line["observed_prefix_hit_tokens"], line["observed_prefill_tokens"], line["output_tokens"]) == (4, 8, 3)
    assert [block["semantic_type"] for block in line["blocks"]] == ["system", "user"]
    for word in ("heliotrope", "brief", "visitor", "acme"):
        assert word not in path.read_text()
    trace = Trace.read(path)
    assert trace.ttft_ms.tolist() == [pytest.approx(50)]


def test_plain_async_and_async_stream_handlers_are_watched_too(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"

    def plain(body: Any) -> dict[str, Any]:
        return {"usage": USAGE}

    async def later(body: Any) -> dict[str, Any]:
        return {"usage": USAGE}

    async def parts(body: Any) -> Any:
        yield {"choices": [{"text": "a"}]}

    async def all_of_them(collector: Collector) -> None:
        await collector.wrap(later)(BODY)
        async for _ in collector.wrap(parts)(BODY):
            pass

    with TraceWriter(path) as writer:
        collector = Collector(writer)
        assert collector.wrap(plain)(BODY) == {"usage": USAGE}
        asyncio.run(all_of_them(collector))
    first, second, third = read(path)
    # The time of a whole answer is not the time to its first token.
    assert "observed_ttft_ms" not in first
    assert "observed_ttft_ms" not in second
    assert third["observed_ttft_ms"] >= 0


def test_a_request_that_fails_leaves_no_line_and_the_error_passes(tmp_path: Path) -> None:
    def broken(body: Any) -> None:
        raise RuntimeError("down")

    with TraceWriter(tmp_path / "t.jsonl") as writer:
        with pytest.raises(RuntimeError, match="down"):
            Collector(writer).wrap(broken)(BODY)
        with pytest.raises(InputError):
            Collector(writer).wrap(broken)({"model": "m"})
    assert read(writer.path) == []


def test_lines_are_in_order_of_arrival_whatever_ends_first(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        tickets = [writer.take_ticket() for _ in range(4)]
        writer.put(tickets[2], {"n": 2})
        writer.put(tickets[1], None)
        assert writer.written == 0
        writer.put(tickets[0], {"n": 0})
        assert writer.written == 2
        writer.put(tickets[3], {"n": 3})
    assert [line["n"] for line in read(writer.path)] == [0, 2, 3]


def test_a_request_that_hangs_does_not_hold_the_others_for_ever(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        hanging = writer.take_ticket()
        for _ in range(MAX_HELD + 1):
            writer.put(writer.take_ticket(), {})
        assert writer.written == MAX_HELD + 1
        writer.put(hanging, {})
        assert writer.dropped == 1


def test_a_request_that_ends_after_the_writer_closed_is_dropped_quietly(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t.jsonl")
    late = writer.take_ticket()
    writer.close()
    writer.close()
    writer.put(late, {})
    assert (writer.written, writer.dropped) == (0, 1)


def test_half_a_character_in_a_models_name_costs_nothing(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        Collector(writer, redact=False).wrap(lambda body: None)({**BODY, "model": "\ud800", "user": "\udfff"})
    assert read(writer.path)[0]["model_name"] == "\ud800"
    assert writer.dropped == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_costs_lines_and_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.jsonl").symlink_to("/dev/full")
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        handler = Collector(writer).wrap(lambda body: "the answer")
        assert [handler(BODY) for _ in range(3)] == ["the answer"] * 3
    assert (writer.written, writer.dropped) == (0, 3)
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == ["trace lines are lost"]


WRITE_UNTIL_FULL = """
import resource, sys
from semantickv.traces.trace_writer import TraceWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
with TraceWriter(sys.argv[1]) as writer:
    for number in range(30):
        writer.put(writer.take_ticket(), {"number": number, "text": "x" * 60})
    lost = writer.dropped
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.put(writer.take_ticket(), {"number": "room again"})
print(writer.written, lost)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of files")
def test_a_disk_that_fills_up_leaves_whole_lines_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    command = [sys.executable, "-c", WRITE_UNTIL_FULL, str(path)]
    written, lost = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    numbers = [line["number"] for line in read(path)]
    assert numbers == [*range(written - 1), "room again"]
    assert written - 1 + lost == 30
    assert lost > 10


def test_no_next_file_can_be_begun_so_the_first_one_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TraceWriter(tmp_path / "t.jsonl", most_bytes=10) as writer:

        def refuse(path: Path) -> Any:
            raise InputError(f"cannot write {path}", hint="")

        monkeypatch.setattr(writer, "_open", refuse)
        for number in range(3):
            writer.put(writer.take_ticket(), {"number": number, "text": "x" * 60})
    assert [line["number"] for line in read(tmp_path / "t.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize("body", [
    {"messages": [{"role": "user", "content": "Hi", "tool_calls": 5}]},
    {"messages": [{"role": "user", "content": "Hi", "tool_calls": {"a": 1}}]},
])  # fmt: skip
def test_tool_calls_that_are_no_list_are_no_text(tmp_path: Path, body: dict[str, Any]) -> None:
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        Collector(writer).wrap(lambda body: None)(body)
    assert len(read(writer.path)[0]["blocks"]) == 1


@pytest.mark.parametrize("choices", [5, "text", None, {}, [5], [{"delta": 3}]])
def test_a_part_of_an_answer_in_another_shape_carries_nothing(choices: Any) -> None:
    assert not has_content({"choices": choices})


def test_text_is_kept_only_on_request(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        Collector(writer, redact=False).wrap(lambda body: None)(BODY)
    assert SECRET in writer.path.read_text()


def test_the_same_prompt_has_the_same_hashes_in_two_traces_and_others_under_a_key(tmp_path: Path) -> None:
    hashes = []
    for number, key in enumerate(("", "", "secret")):
        with TraceWriter(tmp_path / f"{number}.jsonl") as writer:
            Collector(writer, Segmenter(key=key)).wrap(lambda body: None)(BODY)
        hashes.append([block["content_hash"] for block in read(writer.path)[0]["blocks"]])
    assert hashes[0] == hashes[1]
    assert not set(hashes[0]) & set(hashes[2])


def test_made_up_traffic_is_the_same_for_a_seed_and_says_what_it_is(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with TraceWriter(tmp_path / name) as writer:
            collect_mock(writer, requests=30, seed=3)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert all(line["metadata"] == {"mock": True} for line in read(tmp_path / "a"))
    assert len(Trace.read(tmp_path / "a")) == 30


# -- the proxy -------------------------------------------------------------------------------------------------------


class Upstream(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, b'{"data": []}', "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body.get("model") == "broken":
            self._answer(500, b'{"error": "no"}', "application/json")
        elif body.get("stream"):
            parts = ({"choices": [{"delta": {"content": "ok"}}]}, {"choices": [], "usage": USAGE})
            events = b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n"
            self._answer(200, events, "text/event-stream")
        else:
            self._answer(200, json.dumps({"choices": [], "usage": USAGE}).encode(), "application/json")

    def _answer(self, status: int, text: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def upstream() -> Iterator[int]:
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Upstream)) as port:
        yield port


@contextmanager
def collecting(app: CollectingApp, **known: Any) -> Iterator[int]:
    with serve(app, **known) as (url, _):
        yield int(url.rpartition(":")[2])


def ask(port: int, body: object, path: str = "/v1/chat/completions", method: str = "POST") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request(method, path, None if method == "GET" else json.dumps(body), {"X-Session-ID": "s1"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_the_proxy_passes_answers_on_and_records_what_was_served(tmp_path: Path, upstream: int) -> None:
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        proxy = CollectingApp(f"http://127.0.0.1:{upstream}", Collector(writer))
        with collecting(proxy) as port:
            status, text = ask(port, BODY | {"stream": True})
            assert status == 200
            assert text.endswith(b"data: [DONE]\n\n")
            assert json.loads(ask(port, BODY)[1])["usage"] == USAGE
            assert ask(port, BODY | {"model": "broken"}) == (500, b'{"error": "no"}')
            assert ask(port, None, "/v1/models", "GET") == (200, b'{"data": []}')
            assert ask(port, {"model": "m"})[0] == 200  # cannot be recorded, is answered all the same
    streamed, whole = read(tmp_path / "t.jsonl")
    assert streamed["observed_ttft_ms"] > 0
    assert streamed["observed_prefill_tokens"] == 8
    assert "observed_ttft_ms" not in whole
    assert streamed["session_id"] == whole["session_id"] != "s1"
    assert proxy.unrecorded == 1
    assert "heliotrope" not in (tmp_path / "t.jsonl").read_text()


def test_an_upstream_that_is_not_there_is_told_and_not_recorded(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        with collecting(CollectingApp("http://127.0.0.1:9", Collector(writer))) as port:
            status, text = ask(port, BODY)
        assert status == 502
        assert b"did not answer" in text
    assert read(writer.path) == []


def test_an_upstream_that_is_no_address_is_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.jsonl") as writer, pytest.raises(ConfigError, match="not the address"):
        CollectingApp("localhost:8000", Collector(writer))


@pytest.mark.parametrize("length", ["²", "-1", "1e3", "9" * 5000, "", "0x10"])
def test_a_length_that_is_no_number_is_refused_in_words(tmp_path: Path, upstream: int, length: str) -> None:
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        proxy = CollectingApp(f"http://127.0.0.1:{upstream}", Collector(writer))
        with collecting(proxy) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as wire:
            wire.sendall(
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode("latin-1")
            )
            assert b" 400 " in wire.recv(4096)


def test_half_a_request_never_reaches_the_upstream(tmp_path: Path, upstream: int) -> None:
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        proxy = CollectingApp(f"http://127.0.0.1:{upstream}", Collector(writer))
        with collecting(proxy) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as wire:
            wire.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"prompt": "Hi"}')
            wire.shutdown(socket.SHUT_WR)
            assert wire.recv(4096) == b""


def test_a_silent_client_of_the_proxy_is_let_go(tmp_path: Path, upstream: int) -> None:
    soon = Deadlines(header_s=0.05, idle_s=0.05, write_s=1.0)
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        proxy = CollectingApp(f"http://127.0.0.1:{upstream}", Collector(writer))
        with (
            collecting(proxy, deadlines=soon) as port,
            socket.create_connection(("127.0.0.1", port), timeout=60) as wire,
        ):
            assert wire.recv(4096) == b""


def test_a_body_of_any_depth_is_forwarded_and_such_an_answer_too(tmp_path: Path) -> None:
    deep = b"[" * 100_000

    class Deep(Upstream):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(200, deep, "application/json")

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Deep)) as engine, TraceWriter(tmp_path / "t.jsonl") as writer:
        proxy = CollectingApp(f"http://127.0.0.1:{engine}", Collector(writer))
        with collecting(proxy) as port:
            for body in (deep, json.dumps({"prompt": "x", "model": "m"})):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
                connection.request("POST", "/v1/completions", body)
                assert connection.getresponse().read() == deep
                connection.close()
    assert (proxy.unrecorded, writer.written) == (1, 1)
