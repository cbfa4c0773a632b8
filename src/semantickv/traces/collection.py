"""Traces from live traffic: cut each prompt into typed blocks, keep hashes and lengths, write one JSON line a request.

By default no text is kept: a line has hashes, token counts, types and times. Hashes of short texts can be guessed by
trying; a ``key`` prevents that. This module only records: nothing here decides what a backend caches.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from semantickv.traces.segmentation import Segmenter, TextBlock
from semantickv.traces.trace_writer import Json, TraceWriter
from semblend.errors import InputError


def build_trace_line(
    blocks: tuple[TextBlock, ...], *, request_id: str, at_ms: float, redact: bool = True, **known: Any
) -> Json:
    """Build one line of a trace, in the names that `semantickv replay` reads; values of None are left out."""
    written = []
    for place, block in enumerate(blocks):
        entry: Json = {
            "content_hash": block.content_hash,
            "semantic_type": block.type,
            "token_count": block.tokens,
            "position": place,
        }
        written.append(entry if redact else entry | {"text": block.text})
    line: Json = {"request_id": request_id, "timestamp_ms": round(at_ms, 3), "blocks": written}
    return line | {name: value for name, value in known.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A request to write down: its body, when it came, and what is known about its answer."""

    body: bytes
    began_s: float
    ended_s: float
    first_token_s: float | None
    session: str
    tenant: str
    usage: dict[str, Any]
    metadata: dict[str, Any]


@dataclass
class Collector:
    """Records requests. Use `begin` and the `Recording` it returns, or `wrap` a handler.

    ``clock`` returns seconds and never jumps; times in the trace count from the first request.
    """

    writer: TraceWriter
    segmenter: Segmenter = field(default_factory=Segmenter)
    redact: bool = True
    clock: Callable[[], float] = time.monotonic
    metadata: Mapping[str, Any] = field(default_factory=dict)
    _began: float | None = field(default=None, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def begin(self, body: Mapping[str, Any], *, session: str = "", tenant: str = "") -> Recording:
        """Begin to record a request that has just arrived; ``body`` is the OpenAI request."""
        with self._lock:  # ticket and time together: the order of lines is the order of their times
            now = self.clock()
            self._began = now if self._began is None else self._began
            ticket = self.writer.take_ticket()
        try:
            blocks = self._cut_prompt(body)
        except BaseException:
            self.writer.put(ticket, None)
            raise
        return Recording(
            self, ticket, now, blocks, self._hash_name(session), self._hash_name(tenant), str(body.get("model", ""))
        )

    def describe(self, ticket: int, job: TraceJob) -> Json:
        """Build the line of a request that is over; its times count from the beginning of the trace, in seconds."""
        body = json.loads(job.body)
        names = self._hash_name(job.session), self._hash_name(job.tenant), str(body.get("model", ""))
        recording = Recording(self, ticket, job.began_s, self._cut_prompt(body), *names, job.first_token_s, job.usage)
        return recording.build_line(job.ended_s, job.metadata)

    def _cut_prompt(self, body: Mapping[str, Any]) -> tuple[TextBlock, ...]:
        """Cut the prompt of an OpenAI request into blocks, tool definitions first."""
        if body.get("messages") is not None:
            tools = self.segmenter.cut_text(json.dumps(body["tools"]), "tools") if body.get("tools") else ()
            return (*tools, *self.segmenter.cut_messages(body["messages"]))
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]
        if not isinstance(prompt, str) or not prompt:
            raise InputError("the request has neither messages nor a prompt of text", hint="see the OpenAI API")
        return self.segmenter.cut_text(prompt)

    def _hash_name(self, name: str) -> str:
        """Hash the name of a session or tenant, because it may name a person; keep it if text is kept."""
        if not name or not self.redact:
            return name
        key = self.segmenter.key.encode()[:64]
        return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=6, key=key).hexdigest()

    def wrap(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        """Return the handler with recording added; it may be plain, async or a generator.

        The handler takes the request's body first. ``session`` and ``tenant`` given to it as keywords are recorded and
        passed on.
        """

        def answer(body: Any, *rest: Any, **known: Any) -> Any:
            with self._start(body, known) as recording:
                return recording.note_answer(handler(body, *rest, **known))

        async def answer_later(body: Any, *rest: Any, **known: Any) -> Any:
            with self._start(body, known) as recording:
                return recording.note_answer(await handler(body, *rest, **known))

        def stream(body: Any, *rest: Any, **known: Any) -> Any:
            with self._start(body, known) as recording:
                for part in handler(body, *rest, **known):
                    recording.note_part(part)
                    yield part

        async def stream_later(body: Any, *rest: Any, **known: Any) -> Any:
            with self._start(body, known) as recording:
                async for part in handler(body, *rest, **known):
                    recording.note_part(part)
                    yield part

        if inspect.isgeneratorfunction(handler):
            return functools.wraps(handler)(stream)
        if inspect.isasyncgenfunction(handler):
            return functools.wraps(handler)(stream_later)
        return functools.wraps(handler)(answer_later if inspect.iscoroutinefunction(handler) else answer)

    def _start(self, body: Any, known: Mapping[str, Any]) -> Recording:
        """Begin a recording with the session and tenant that the handler was given."""
        return self.begin(body, session=str(known.get("session", "")), tenant=str(known.get("tenant", "")))


@dataclass
class Recording:
    """One request under way; leaving its ``with`` block writes the line, an error gives it up."""

    collector: Collector
    ticket: int
    began: float
    blocks: tuple[TextBlock, ...]
    session: str
    tenant: str
    model: str
    first_s: float | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.collector.writer.put(self.ticket, None if kind is not None else self.build_line())

    def note_part(self, part: Any) -> None:
        """Note a part of a streamed answer: the first one with text or a tool call sets the time to first token."""
        if not isinstance(part, Mapping):
            if self.first_s is None and part:
                self.first_s = self.collector.clock()
            return
        if self.first_s is None and has_content(part):
            self.first_s = self.collector.clock()
        self._note_usage(part)

    def note_answer(self, answer: Any) -> Any:
        """Note a whole answer and return it. It has no time to first token: total time is something else."""
        if isinstance(answer, Mapping):
            self._note_usage(answer)
        return answer

    def _note_usage(self, answer: Mapping[str, Any]) -> None:
        """Keep the usage of an answer that has one."""
        if isinstance(answer.get("usage"), Mapping):
            self.usage = answer["usage"]

    def build_line(self, ended: float | None = None, metadata: Mapping[str, Any] | None = None) -> Json:
        """Build the line of this request, which ended now or at ``ended``."""
        collector = self.collector
        ended = collector.clock() if ended is None else ended
        prompt, cached = self.usage.get("prompt_tokens"), None
        details = self.usage.get("prompt_tokens_details")
        if isinstance(details, Mapping) and isinstance(details.get("cached_tokens"), int):
            cached = details["cached_tokens"]
        computed = prompt - cached if isinstance(prompt, int) and cached is not None else None
        return build_trace_line(
            self.blocks,
            request_id=f"r{self.ticket:08d}",
            at_ms=(self.began - (collector._began or 0.0)) * 1000,
            redact=collector.redact,
            session_id=self.session or None,
            tenant_id=self.tenant or None,
            model_name=self.model or None,
            output_tokens=_read_count(self.usage.get("completion_tokens")),
            observed_ttft_ms=None if self.first_s is None else round((self.first_s - self.began) * 1000, 3),
            observed_total_latency_ms=round((ended - self.began) * 1000, 3),
            observed_prefix_hit_tokens=cached,
            observed_prefill_tokens=computed if computed is not None and computed >= 0 else None,
            metadata={**collector.metadata, **(metadata or {})} or None,
        )


def _read_count(value: Any) -> int | None:
    """Return the value if it is a whole number from 0 on, else None."""
    return value if isinstance(value, int) and value >= 0 else None


def has_content(part: Mapping[str, Any]) -> bool:
    """Whether a part of a streamed answer carries text or a tool call."""
    choices = part.get("choices")
    for choice in choices if isinstance(choices, list | tuple) else ():
        if not isinstance(choice, Mapping):
            continue
        delta = choice.get("delta")
        said = delta if isinstance(delta, Mapping) else choice
        if any(said.get(name) for name in ("content", "text", "tool_calls", "reasoning_content", "reasoning")):
            return True
    return False
