"""Load: send requests at their times, or the turns of conversations one after the other.

Times start at the moment a request was due, so waiting for a free slot under ``max_concurrency`` counts. The first turn
of a conversation is due at its time, whatever else is under way; the next one a think time after the answer before it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sembench.backends.base import PromptCall, ServerAnswer, ServerBackend
from sembench.live.arrivals import RequestArrival
from sembench.load_result import LoadRequest
from sembench.values import read_count
from semblend.errors import InputError

PROMISES = ("ttft", "tpot", "e2el")
_DIGITS = 3


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer of a load run. ``late_ms`` is how long after its time it was sent; all times are in milliseconds."""

    answer: ServerAnswer
    due_s: float
    late_ms: float
    finished_s: float
    number: int = 0
    request_id: str = ""
    conversation: int | None = None
    turn: int = 0

    @property
    def output_tokens(self) -> int:
        counted = self.answer.output_tokens
        return counted if counted is not None else len(self.answer.inter_token_ms) + 1

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        rest = self.output_tokens - 1
        return ((self.answer.latency_ms or 0.0) - (self.answer.ttft_ms or 0.0)) / rest if rest > 0 else None

    def to_request(self) -> LoadRequest:
        """Return the request as a result file keeps it, times to a microsecond."""
        answer = self.answer
        receipt = answer.receipt or {}
        ok = answer.error is None and answer.ttft_ms is not None
        return LoadRequest(
            number=self.number,
            request_id=self.request_id,
            due_s=round(self.due_s, 6),
            finished_s=round(self.finished_s, 6),
            late_ms=round(self.late_ms, _DIGITS),
            ttft_ms=round((answer.ttft_ms or 0.0) + self.late_ms, _DIGITS) if ok else None,
            e2el_ms=round((answer.latency_ms or 0.0) + self.late_ms, _DIGITS) if ok else None,
            tpot_ms=None if not ok or self.tpot_ms is None else round(self.tpot_ms, _DIGITS),
            itl_ms=tuple(round(gap, _DIGITS) for gap in answer.inter_token_ms) if ok else (),
            prompt_tokens=answer.prompt_tokens,
            output_tokens=self.output_tokens if ok else None,
            cached_tokens=answer.cached_tokens,
            reused_tokens=read_count(receipt.get("reused_tokens")),
            conversation=self.conversation,
            turn=self.turn,
            error=answer.error or (None if ok else "an answer without text"),
        )


def parse_slo(texts: Sequence[str]) -> dict[str, float]:
    """Parse limits such as ``ttft:500``, in milliseconds.

    >>> parse_slo(["ttft:500", "tpot:50"])
    {'ttft': 500.0, 'tpot': 50.0}
    """
    limits: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            limits[name] = float(limit)
        except ValueError:
            limits[name] = -1.0
        if name not in PROMISES or not limits[name] > 0:
            raise InputError(f"--slo {text!r} is no promise", hint="write ttft:500 tpot:50 e2el:3000, in milliseconds")
    return limits


async def play(
    backend: ServerBackend,
    arrivals: Sequence[RequestArrival],
    *,
    output_tokens: int,
    max_concurrency: int | None = None,
    tenant: str = "",
    salt: str = "",
    on_done: Callable[[int], None] | None = None,
) -> tuple[list[TimedAnswer], float]:
    """Send every request at its time. Return the answers in order of arrival and the duration in seconds."""
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    run, done, started = uuid.uuid4().hex[:8], 0, time.perf_counter()

    async def send_one(number: int, arrival: RequestArrival, due_s: float) -> TimedAnswer:
        nonlocal done
        await asyncio.sleep(max(due_s - (time.perf_counter() - started), 0))
        call = PromptCall(
            text=arrival.text,
            max_tokens=arrival.output_tokens or output_tokens,
            request_id=f"sb-{run}-{number}",
            tenant=tenant,
            salt=salt,
            messages=arrival.messages,
            tools=arrival.tools,
        )
        if slots is None:
            sent, answer = time.perf_counter(), await backend.ask(call)
        else:
            async with slots:
                sent, answer = time.perf_counter(), await backend.ask(call)
        done += 1
        if on_done is not None:
            on_done(done)
        late = 1000 * max(sent - started - due_s, 0.0)
        ended = time.perf_counter() - started
        return TimedAnswer(answer, due_s, late, ended, number, call.request_id, arrival.conversation, arrival.turn)

    async def send_all(turns: Sequence[tuple[int, RequestArrival]]) -> list[TimedAnswer]:
        """Send the turns of one conversation; after a failed turn the rest is left out, as a user would."""
        found: list[TimedAnswer] = []
        for number, arrival in turns:
            due = found[-1].finished_s + arrival.think_s if found else arrival.at_s
            found.append(await send_one(number, arrival, due))
            if found[-1].answer.error is not None:
                break
        return found

    tasks = [asyncio.create_task(send_all(turns)) for turns in _group_turns(arrivals)]
    try:
        timed = [one for found in await asyncio.gather(*tasks) for one in found]
    finally:
        for task in tasks:
            task.cancel()
    return sorted(timed, key=lambda one: one.number), time.perf_counter() - started


def _group_turns(arrivals: Sequence[RequestArrival]) -> list[list[tuple[int, RequestArrival]]]:
    """Return the numbered requests of each conversation; a request of no conversation is one by itself."""
    groups: dict[tuple[str, int], list[tuple[int, RequestArrival]]] = {}
    for number, arrival in enumerate(arrivals):
        key = ("request", number) if arrival.conversation is None else ("conversation", arrival.conversation)
        groups.setdefault(key, []).append((number, arrival))
    return list(groups.values())


def list_details(timed: Sequence[TimedAnswer]) -> dict[str, Any]:
    """Return one list for each quantity, in order of arrival, as ``vllm bench serve --save-detailed`` does; seconds."""
    requests = [one.to_request() for one in timed]
    return {
        "input_lens": [one.prompt_tokens for one in requests],
        "output_lens": [one.output_tokens or 0 for one in requests],
        "ttfts": [None if one.ttft_ms is None else one.ttft_ms / 1000 for one in requests],
        "itls": [[gap / 1000 for gap in one.itl_ms] for one in requests],
        "start_times": [one.due_s + one.late_ms / 1000 for one in requests],
        "generated_texts": [one.answer.text for one in timed],
        "errors": [one.answer.error or "" for one in timed],
    }
