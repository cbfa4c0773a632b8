"""Clients that are slow, silent, endless or many, on real sockets; and TLS in front of the edge and behind it."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time

import httpx
import pytest
from edge_servers import PATIENCE_S, EngineThread, serve

from semantickv.apps.build import build_proxy
from semantickv.edge import upstream_call
from semantickv.settings import EdgeSettings
from semblend.errors import ConfigError
from semblend.http.connections import Deadlines
from semblend.http.server import TlsFiles
from tests.fakes.scripted_engine import answer_json, stream

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
SOON = Deadlines(header_s=1.0, idle_s=2.0, write_s=1.0)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"


def connect(url: str) -> socket.socket:
    host, _, port = url.partition("://")[2].partition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def read_all(sock: socket.socket) -> bytes:
    """Read until the server closes."""
    found = b""
    while True:
        try:
            piece = sock.recv(65_536)
        except ConnectionResetError:
            return found
        if not piece:
            return found
        found += piece


@pytest.fixture
def engine():
    with EngineThread() as one:
        yield one


@pytest.fixture
def proxy(engine):
    with serve(build_proxy(EdgeSettings(upstream=engine.url, trace=False)), deadlines=SOON) as (url, _):
        yield url


def test_headers_that_drip_are_given_up_and_everybody_else_is_served(proxy):
    with connect(proxy) as slow:
        for byte in HEAD:
            try:
                slow.send(bytes([byte]))
            except OSError:
                break
            time.sleep(0.03)
        assert httpx.post(proxy + CHAT, json=BODY, timeout=PATIENCE_S).json() == {"ok": True}
        assert read_all(slow).startswith(b"HTTP/1.1 408")


def test_a_client_that_says_nothing_is_let_go_without_a_word(proxy):
    with connect(proxy) as silent:
        assert read_all(silent) == b""


def test_headers_without_end_are_refused(proxy, engine):
    with connect(proxy) as greedy:
        greedy.sendall(HEAD + b"x-more: " + b"a" * 200_000)
        assert read_all(greedy).startswith(b"HTTP/1.1 431")
    assert not engine.requests


def test_a_second_request_on_a_connection_has_its_own_deadline(proxy):
    with connect(proxy) as client:
        client.sendall(HEAD + b"\r\n{}")
        answer = client.recv(65_536)
        while b'{"ok": true}' not in answer:
            answer += client.recv(65_536)
        assert b"200 OK" in answer
        client.sendall(HEAD[:40])
        assert read_all(client).startswith(b"HTTP/1.1 408")


def test_a_client_that_does_not_read_is_let_go():
    pieces = [b"x" * 65_536] * 400
    with EngineThread(stream(*pieces)) as engine:
        app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
        with serve(app, deadlines=SOON) as (url, _), connect(url) as idle:
            idle.sendall(HEAD + b"\r\n{}")
            for _ in range(PATIENCE_S * 20):
                if app.intake.running == 0 and engine.requests:
                    break
                time.sleep(0.05)
            assert app.intake.running == 0
            assert len(read_all(idle)) < sum(map(len, pieces))


def test_when_all_places_are_taken_the_longest_silent_client_goes():
    with EngineThread() as engine:
        app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
        patient = Deadlines(header_s=60, idle_s=60, write_s=60)
        with serve(app, deadlines=patient, connections=3) as (url, server):
            silent = [connect(url) for _ in range(3)]
            while len(server.connections) < 3:
                time.sleep(0.01)
            assert httpx.post(url + CHAT, json=BODY, timeout=PATIENCE_S).json() == {"ok": True}
            assert read_all(silent[0]) == b""
            for one in silent:
                one.close()


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no openssl command that makes certificates")
    return TlsFiles(str(cert), str(key))


def test_tls_in_front_and_behind(certificate, monkeypatch):
    trusting = ssl.create_default_context(cafile=certificate.certificate)
    monkeypatch.setattr(upstream_call, "_default_tls", lambda: trusting)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate.certificate, certificate.key)
    events = [f"data: {n}\n\n".encode() for n in range(20)]
    with EngineThread(stream(*events), default=answer_json({"ok": 1}), tls=serving) as engine:
        assert engine.url.startswith("https://")
        app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
        with (
            serve(app, tls=certificate) as (url, _),
            httpx.Client(base_url=url, verify=trusting, timeout=PATIENCE_S) as client,
        ):
            assert client.post(CHAT, json=BODY).content == b"".join(events)
            assert [client.post(CHAT, json=BODY).json() for _ in range(3)] == [{"ok": 1}] * 3


def test_an_engine_whose_certificate_nobody_vouches_for_gets_nothing(certificate):
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate.certificate, certificate.key)
    with EngineThread(tls=serving) as engine:
        app = build_proxy(EdgeSettings(upstream=engine.url, trace=False))
        with serve(app) as (url, _):
            answer = httpx.post(url + CHAT, json=BODY, timeout=PATIENCE_S)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "refused")
        assert not engine.requests


def test_files_that_are_no_certificate_are_named_before_the_server_starts(tmp_path):
    (tmp_path / "cert.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"cert\.pem"):
        TlsFiles(str(tmp_path / "cert.pem")).check()
    with pytest.raises(ConfigError, match=r"missing\.pem"):
        TlsFiles(str(tmp_path / "missing.pem")).check()


def test_a_hundred_slow_clients_do_not_slow_a_quick_one(proxy):
    slow = [connect(proxy) for _ in range(100)]
    for one in slow:
        one.sendall(HEAD[:20])
    done = threading.Event()

    def ask() -> None:
        for _ in range(5):
            httpx.post(proxy + CHAT, json=BODY, timeout=PATIENCE_S)
        done.set()

    threading.Thread(target=ask, daemon=True).start()
    assert done.wait(PATIENCE_S)
    for one in slow:
        assert read_all(one).startswith(b"HTTP/1.1 408")
        one.close()
