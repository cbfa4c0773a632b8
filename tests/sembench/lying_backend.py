"""A small OpenAI-compatible server that can be honest, and many ways of lying about reuse.

Words are its tokens and sleeping is its prefill. It keeps earlier prompts by ``cache_salt``; what a prompt shares with
one of them it may call reused. ``Lie`` says what it does instead.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SLOW_S, FAST_S = 0.06, 0.002
SHARED_RUN = 32
CODE = re.compile(r"The code of the harbour is (\w+)\.")


class Lie(StrEnum):
    NONE = "none"
    CLAIMS = "claims"
    """The receipt claims reuse; nothing was reused, and usage and counters were not told."""
    CLAIMS_EVERYWHERE = "claims_everywhere"
    """Receipt, usage and counters all claim reuse, for any prompt behind any other; every token is computed."""
    WRONG_DONOR = "wrong_donor"
    """The answer comes from the donor's text: its KV was served as it was."""
    LUCKY = "lucky"
    """Nothing is reused, and it says so; but whatever comes second is fast."""
    LEAKS_TENANTS = "leaks_tenants"
    """Looks for donors among all tenants."""
    ECHO = "echo"
    """Answers with the prompt itself, which holds every gold answer; receipt, usage and counters agree."""
    SHORT_ECHO = "short_echo"
    """The same, cut to the length that was asked for."""
    RECEIPTS_ONLY = "receipts_only"
    """The receipt claims what the texts share, at the pace of reuse; there is no other witness."""
    USAGE_ONLY = "usage_only"
    """The usage object claims it; there is no receipt and no counter."""
    SAVES_NOTHING = "saves_nothing"
    """Receipt, usage and counters claim what the texts share; every token is computed."""
    NAN = "nan"
    """Counts are NaN and infinity, log-probabilities null."""
    REMEMBERS = "remembers"
    """Salts are ignored: every cache is one cache."""


@dataclass
class LyingBackend:
    """The server's state. ``die_after`` requests it drops connections; ``cut_after`` events it drops the stream."""

    lie: Lie = Lie.NONE
    die_after: int | None = None
    cut_after: int | None = None
    refuse_salt: bool = False
    slow_s: float = SLOW_S
    route: str = ""
    url: str = ""
    answered: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    earlier: dict[str, list[str]] = field(default_factory=dict)
    seen_tenants: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, body: dict[str, Any], tenant: str) -> tuple[list[dict[str, Any]], float]:
        """The events of a stream, and the seconds before the first."""
        text = body["messages"][0]["content"]
        words = text.split()
        space = self._space(body, tenant)
        with self.lock:
            donors = list(self.earlier.get(space, []))
            self.earlier.setdefault(space, []).append(text)
        reused, computed = self._reuse(text, donors), len(words)
        claimed = reused
        if self.lie in (Lie.CLAIMS, Lie.CLAIMS_EVERYWHERE):
            claimed, reused = (int(0.8 * len(words)) if donors else 0), 0
        if self.lie is Lie.LUCKY:
            claimed = reused = 0
        computed -= reused
        cached = claimed if self.lie is not Lie.CLAIMS else 0
        if self.lie is Lie.SAVES_NOTHING:
            reused = 0
        with self.lock:
            self.counters["requests"] += 1
            self.counters["reused"] += claimed if self.lie is not Lie.CLAIMS else 0
        if self.lie is Lie.NAN:
            return _say_nonsense(), SLOW_S
        fast = reused > 0 or (self.lie is Lie.LUCKY and donors)
        source = donors[0] if self.lie is Lie.WRONG_DONOR and donors and reused else text
        found = CODE.search(source)
        receipt = {
            "outcome": "backend_materialized_reuse" if claimed else "cold_fallback",
            "exact_tokens": 0,
            "reused_tokens": claimed,
            "recomputed_tokens": 0,
            "prefill_tokens": len(words) - claimed,
            "donors": ["d0"] if claimed else [],
        }
        usage = {
            "prompt_tokens": len(words),
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        events = [
            _event({"role": "assistant", "content": ""}),
            _event({"content": self._say(text, found.group(1) if found else "nothing", body["max_tokens"])}),
            {"choices": [], "usage": usage, "semblend": receipt},
        ]
        if self.lie is Lie.RECEIPTS_ONLY:
            usage.pop("prompt_tokens_details")
        if self.lie is Lie.USAGE_ONLY:
            usage["prompt_tokens_details"]["semantic_tokens"] = cached
            events[-1].pop("semblend")
        return events, FAST_S if fast else self.slow_s

    def _say(self, prompt: str, answer: str, most: int) -> str:
        if self.lie is Lie.ECHO:
            return prompt
        return " ".join(prompt.split()[:most]) if self.lie is Lie.SHORT_ECHO else answer

    def _space(self, body: dict[str, Any], tenant: str) -> str:
        salt = "" if self.lie is Lie.REMEMBERS else body.get("cache_salt", "")
        return salt if self.lie is Lie.LEAKS_TENANTS else f"{tenant}/{salt}"

    def _reuse(self, text: str, donors: list[str]) -> int:
        """Words of the recipient inside a run of 32 that a donor has too, the last word never among them."""
        words, held = text.split(), set()
        known = {tuple(d[at : at + SHARED_RUN]) for one in donors if (d := one.split()) for at in range(len(d))}
        for at in range(len(words) - SHARED_RUN + 1):
            if tuple(words[at : at + SHARED_RUN]) in known:
                held.update(range(at, at + SHARED_RUN))
        return len(held - {len(words) - 1})

    def metrics(self) -> str:
        return (
            f'semblend_requests_total{{outcome="x",engine="y"}} {self.counters["requests"]}\n'
            f'semblend_tokens_total{{kind="reused"}} {self.counters["reused"]}\n'
        )

    @contextmanager
    def serving(self) -> Iterator[LyingBackend]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _say_nonsense() -> list[dict[str, Any]]:
    nan = float("nan")
    usage = {"prompt_tokens": nan, "completion_tokens": float("inf"), "prompt_tokens_details": {"cached_tokens": -3}}
    event = _event({"content": "yes"})
    event["choices"][0]["logprobs"] = {"content": [{"token": "yes", "logprob": None, "top_logprobs": [None, 3]}, None]}
    receipt = {"reused_tokens": nan, "ttft_ms": nan, "risk": float("inf"), "outcome": 7, "donors": 3, "request_id": 9}
    return [event, {"choices": [], "usage": usage, "semblend": receipt, "metrics": {"queue_time": nan}}]


def _event(delta: dict[str, Any]) -> dict[str, Any]:
    return {"id": "chatcmpl-x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def _handler(state: LyingBackend) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/metrics" and state.lie not in (Lie.RECEIPTS_ONLY, Lie.USAGE_ONLY):
                self._whole(200, state.metrics().encode(), "text/plain")
            else:
                self._whole(200, json.dumps({"data": [{"id": "liar"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or "{}")
            state.paths.append(self.path)
            if self.path == "/reset_prefix_cache":
                state.earlier.clear()
                self._whole(200, b"{}")
                return
            state.answered += 1
            if state.die_after is not None and state.answered > state.die_after:
                self.close_connection = True
                self.connection.close()
                return
            if state.refuse_salt and "cache_salt" in body:
                self._whole(400, b'{"error": {"message": "unknown field cache_salt"}}')
                return
            tenant = self.headers.get("x-tenant-id", "")
            state.seen_tenants.append(tenant)
            events, wait_s = state.answer(body, tenant)
            time.sleep(wait_s)
            self._stream(events)

        def _whole(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _stream(self, events: list[dict[str, Any]]) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            if state.route:
                self.send_header("x-semantic-route", state.route)
            self.end_headers()
            for at, event in enumerate(events):
                if state.cut_after is not None and at >= state.cut_after:
                    self.close_connection = True
                    return
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True

    return Handler
