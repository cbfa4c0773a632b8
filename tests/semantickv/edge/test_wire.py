"""The proxy on real sockets: whatever clients and engines put on the wire, each gets its own answer and no more."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import httpx
import pytest
from edge_servers import PATIENCE_S, EngineThread, serve

from semantickv.apps.build import build_proxy, build_router
from semantickv.apps.gateway import RoutedCall
from semantickv.edge.intake import IntakeLimits
from semantickv.settings import EdgeSettings
from tests.fakes.scripted_engine import EngineSide, answer_json, die_after, hang, send_raw, stream

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def post(body: bytes = b"{}", *headers: str, path: str = CHAT, version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: x", *headers]
    if not any("transfer-encoding" in one.lower() for one in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def connect(url: str) -> socket.socket:
    host, _, port = url.partition("://")[2].partition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def read_until(sock: socket.socket, end: bytes) -> bytes:
    """Read until ``end`` has come, or the server closes."""
    found = b""
    while end not in found:
        piece = sock.recv(65_536)
        if not piece:
            break
        found += piece
    return found


def wait_until(check) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def engine():
    with EngineThread() as one:
        yield one


@pytest.fixture
def app(engine):
    return build_proxy(EdgeSettings(upstream=engine.url, trace=False))


@pytest.fixture
def url(app):
    with serve(app) as (address, _):
        yield address


def is_at_rest(app) -> bool:
    replicas = app.router.replicas
    return (
        app.intake.running == app.intake.held_bytes == 0
        and not app.running
        and all(one.running == one.waiting_tokens == one.pool.open == 0 for one in replicas)
    )


async def echo(side: EngineSide) -> None:
    """Answer with the request's own body."""
    body = side.request.body
    await side.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))


def test_answers_come_in_the_order_of_requests_that_were_sent_at_once(engine, url, app):
    engine.default = echo
    with connect(url) as client:
        client.sendall(b"".join(post(b"%d" % n, f"X-Request-ID: r{n}") for n in range(5)) + b"GET /health HTTP/1.1\r\n")
        client.sendall(b"Host: x\r\n\r\n")
        found = read_until(client, b"replicas_up")
    bodies = [part.partition(b"\r\n\r\n")[2][:1] for part in found.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies[:5] == [b"0", b"1", b"2", b"3", b"4"]
    assert [one.body for one in engine.requests] == [b"0", b"1", b"2", b"3", b"4"]
    wait_until(lambda: is_at_rest(app))


def test_a_body_in_chunks_reaches_the_engine_with_its_length(engine, url):
    with connect(url) as client:
        client.sendall(post(b"2\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"))
        assert b"200 OK" in read_until(client, b"}")
    assert (engine.requests[0].body, engine.requests[0].headers["content-length"]) == (b"{}", "2")


TRAILERS = b"Authorization: Bearer eve\r\nX-Tenant-ID: eve\r\nX-Other: 1\r\n"


@pytest.mark.parametrize("expect", [(), ("Expect: 100-continue",)], ids=["at once", "after 100 Continue"])
def test_a_trailer_names_no_caller_and_does_not_reach_the_engine(engine, expect):
    """With a trailer a client behind a front that checks headers could choose whose cache salt it gets."""
    app = build_proxy(EdgeSettings(upstream=engine.url, trace=False, salt_secret="s"))
    chunked = b"%x\r\n%b\r\n0\r\n" % (len(b'{"prompt": "Hi"}'), b'{"prompt": "Hi"}')
    with serve(app) as (url, _), connect(url) as client:
        for trailers in (b"", TRAILERS):
            client.sendall(post(chunked + trailers + b"\r\n", "Transfer-Encoding: chunked", *expect))
            assert b"200 OK" in read_until(client, b'{"ok": true}')
    plain, trailed = engine.requests
    assert "authorization" not in trailed.headers
    assert "x-other" not in trailed.headers
    assert trailed.body == plain.body  # the salt is that of a caller without a key
    assert b"cache_salt" in plain.body


ROOT = Path(__file__).parents[3]


def test_every_page_that_starts_it_under_uvicorn_names_a_parser_that_drops_trailers_too(engine):
    paths = [*(ROOT / "docs" / "guides").glob("*.md"), *(ROOT / "src" / "semantickv" / "apps").glob("*.py")]
    started = re.compile(r"uvicorn semantickv\.apps\.(?:telemetry_proxy|locality_router):app(?: --http (\w+))?")
    named = [parser for path in paths for parser in started.findall(path.read_text("utf-8"))]
    assert len(named) == 6
    assert set(named) == {"h11"}
    app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
    with serve(app) as (url, _), connect(url) as client:
        client.sendall(post(b"2\r\n{}\r\n0\r\n" + TRAILERS + b"\r\n", "Transfer-Encoding: chunked"))
        assert b"200 OK" in read_until(client, b"}")
    assert "authorization" not in engine.requests[0].headers


def test_a_request_behind_one_with_trailers_has_its_own_headers(engine, url):
    engine.default = echo
    with connect(url) as client:
        chunked = post(b"2\r\n{}\r\n0\r\n" + TRAILERS + b"\r\n", "Transfer-Encoding: chunked")
        client.sendall(chunked + post(b"next", "Authorization: Bearer ann"))
        read_until(client, b"next")
    first, second = engine.requests
    assert "authorization" not in first.headers
    assert second.headers["authorization"] == "Bearer ann"


def test_a_body_that_comes_byte_by_byte_is_one_request(engine, url):
    with connect(url) as client:
        for byte in post(b'{"a": 1}'):
            client.sendall(bytes([byte]))
        assert b"200 OK" in read_until(client, b"}")
    assert [one.body for one in engine.requests] == [b'{"a": 1}']


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_above_the_limit_is_refused_and_the_next_request_is_served(engine, url, app, announced):
    app.intake.limits = IntakeLimits(body_bytes=1000)
    body = b"x" * 2000
    with connect(url) as client:
        if announced:
            client.sendall(post(body))
        else:
            client.sendall(post(b"7d0\r\n" + body + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked"))
        assert b"413" in read_until(client, b"}}")
    with connect(url) as client:
        client.sendall(post())
        assert b"200 OK" in read_until(client, b"}")
    assert len(engine.requests) == 1
    wait_until(lambda: is_at_rest(app))


def test_a_body_that_does_not_come_is_given_up(engine, url, app):
    app.intake.limits = IntakeLimits(body_s=0.2)
    with connect(url) as client:
        client.sendall(post(b"x" * 10)[:-5])
        assert b"408" in read_until(client, b"}}")
    assert not engine.requests
    wait_until(lambda: is_at_rest(app))


def test_a_client_that_leaves_before_its_body_is_whole_is_counted_and_holds_no_place(engine, url, app):
    with connect(url) as client:
        client.sendall(post(b"x" * 10)[:-5])
        wait_until(lambda: app.intake.running == 1)
    wait_until(lambda: is_at_rest(app))
    assert 'status="499"} 1.0' in app.metrics.write().decode()
    assert not engine.requests


@pytest.mark.parametrize("pieces", [(), (b"data: 1\n\n",)], ids=["before the first byte", "in mid stream"])
def test_a_client_that_leaves_stops_its_engine(engine, url, app, pieces):
    engine.plan(hang(*pieces))
    with connect(url) as client:
        client.sendall(post())
        wait_until(lambda: engine.requests)
        if pieces:
            read_until(client, b"data: 1")
    wait_until(engine.left.is_set)
    wait_until(lambda: is_at_rest(app))
    assert 'kind="client_left"} 1.0' in app.metrics.write().decode()


def test_an_engine_that_dies_in_mid_stream_leaves_the_client_an_unfinished_answer(engine, url, app):
    engine.plan(die_after(b"data: 1\n\n"))
    with connect(url) as client:
        client.sendall(post())
        found = read_until(client, b"never")
    assert found.endswith(b"data: 1\n\n\r\n")  # one chunk, and not the last one
    wait_until(lambda: is_at_rest(app))


def test_a_stream_arrives_as_it_comes_and_its_end_is_no_packet_of_its_own(engine, url):
    events = [f"data: {n}\n\n".encode() for n in range(50)]
    engine.plan(stream(*events))
    with httpx.stream("POST", url + CHAT, json=BODY, timeout=PATIENCE_S) as answer:
        assert b"".join(answer.iter_raw()) == b"".join(events)


def test_a_client_that_wants_its_connection_closed_gets_that(url):
    with connect(url) as client:
        client.sendall(post(b"{}", "Connection: close"))
        found = read_until(client, b"never")
    assert b"connection: close" in found.lower()
    assert found.endswith(b'{"ok": true}')


@pytest.mark.parametrize("headers", [("Expect: 100-continue",), ("Connection: Upgrade", "Upgrade: h2c")])
def test_what_is_rare_is_answered_too(url, headers):
    with connect(url) as client:
        client.sendall(post(b"", *headers))
        assert b"200 OK" in read_until(client, b'"ok": true')


def test_an_old_client_is_answered_too(url):
    with connect(url) as client:
        client.sendall(post(b"{}", version="1.0"))
        assert read_until(client, b"never").endswith(b'{"ok": true}')


def test_a_status_that_is_none_is_the_engines_fault(engine, url):
    engine.default = send_raw(b"HTTP/1.1 799 Odd\r\ncontent-length: 2\r\n\r\nok")
    with connect(url) as client:
        client.sendall(post())
        assert read_until(client, b"garbage").startswith(b"HTTP/1.1 502 ")


def test_an_answer_without_a_body_has_none(engine, url):
    engine.plan(send_raw(b"HTTP/1.1 204 No Content\r\n\r\n", close=False))
    with connect(url) as client:
        client.sendall(post() + post())
        found = read_until(client, b'"ok": true')
    assert found.startswith(b"HTTP/1.1 204 No Content\r\n")
    assert b"chunked" not in found.partition(b"\r\n\r\n")[0]


@pytest.mark.parametrize(
    "lie",
    [
        b"HTTP/1.1 200 OK\r\nx-a: 1\r\n x-b: 2\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nx-a: 1\rx-b: 2\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nx-a: 1\nx-b: 2\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nx-a: 1\x00\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nx a: 1\r\ncontent-length: 2\r\n\r\nok",
    ],
    ids=["folded", "bare CR", "bare LF", "zero", "a blank in a name"],
)
def test_an_engine_cannot_slip_a_line_into_the_head_that_a_client_reads(engine, url, lie):
    engine.plan(send_raw(lie))
    with connect(url) as client:
        client.sendall(post(b"{}", "Connection: close"))
        head = read_until(client, b"never").partition(b"\r\n\r\n")[0]
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b": ")
        assert name
        assert not any(mark in name for mark in b" \t\r\n\x00")
        assert not any(mark in value for mark in b"\r\n\x00")


def test_a_defect_of_ours_costs_one_request(url, app, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(type(app.opener), "open", lambda *_: 1 / 0)
        assert httpx.post(url + CHAT, json=BODY, timeout=PATIENCE_S).status_code == 500
    assert httpx.post(url + CHAT, json=BODY, timeout=PATIENCE_S).status_code == 200
    wait_until(lambda: is_at_rest(app))
    assert "ZeroDivisionError" in caplog.text


def test_a_defect_while_an_answer_passes_costs_that_answer(url, app, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RoutedCall, "take_head", lambda *_, **__: 1 / 0)
        assert httpx.post(url + CHAT, json=BODY, timeout=PATIENCE_S).status_code == 500
    assert httpx.post(url + CHAT, json=BODY, timeout=PATIENCE_S).status_code == 200
    wait_until(lambda: is_at_rest(app))


def test_a_server_that_stops_counts_what_it_cuts(engine):
    engine.plan(hang(b"data: 1\n\n"))
    app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
    with serve(app, drain_s=1) as (url, server):
        client = connect(url)
        client.sendall(post())
        read_until(client, b"data: 1")
        server.stop()
        assert b"shutting_down" in read_until(client, b"never")  # a client must not take half an answer for a whole one
        client.close()
    assert 'semantickv_faults_total{kind="stopped"} 1.0' in app.metrics.write().decode()
    assert is_at_rest(app)


def test_a_busy_engine_is_passed_over_and_its_connection_stays():
    full, free = answer_json({"error": "full"}, status=503), answer_json({"ok": True})

    async def refuse_posts(side: EngineSide) -> None:
        await (full if side.request.method == "POST" else free)(side)

    with EngineThread(default=refuse_posts) as one, EngineThread() as two:
        app = build_router(EdgeSettings(replicas=(one.url, two.url), trace=False, policy="round_robin"))
        with serve(app) as (url, _), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            assert [client.post(CHAT, json=BODY).status_code for _ in range(10)] == [200] * 10
            assert sum(seen.method == "POST" for seen in one.requests) >= 4
            assert one.connections <= 2  # health checks are asked beside requests
            two.default = refuse_posts
            assert client.post(CHAT, json=BODY).json() == {"error": "full"}  # the last one's own answer
