"""Load: send requests at their times, and report times under the names of ``vllm bench serve``.

Times start at the moment a request was due, so waiting for a free slot under ``max_concurrency`` counts.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sembench.backends.base import PromptCall, ServerAnswer, ServerBackend
from sembench.live.arrivals import RequestArrival
from sembench.scoring.statistics import compute_mean, compute_median, compute_percentile
from semblend.errors import InputError

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One answer of a load run. ``late_ms`` is how long after its time it was sent; all times are in milliseconds."""

    answer: ServerAnswer
    due_s: float
    late_ms: float
    finished_s: float

    @property
    def ok(self) -> bool:
        return self.answer.error is None and self.answer.ttft_ms is not None

    @property
    def output_tokens(self) -> int:
        counted = self.answer.output_tokens
        return counted if counted is not None else len(self.answer.inter_token_ms) + 1

    @property
    def ttft_ms(self) -> float:
        return (self.answer.ttft_ms or 0.0) + self.late_ms

    @property
    def e2el_ms(self) -> float:
        return (self.answer.latency_ms or 0.0) + self.late_ms

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        rest = self.output_tokens - 1
        return ((self.answer.latency_ms or 0.0) - (self.answer.ttft_ms or 0.0)) / rest if rest > 0 else None

    def meets(self, slo: Mapping[str, float]) -> bool:
        values = {"ttft": self.ttft_ms, "tpot": self.tpot_ms or 0.0, "e2el": self.e2el_ms}
        return all(values[name] <= limit for name, limit in slo.items())


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
        if name not in ("ttft", "tpot", "e2el") or not limits[name] > 0:
            raise InputError(f"--slo {text!r} is no promise", hint="write ttft:500 tpot:50 e2el:3000, in milliseconds")
    return limits


async def play(
    backend: ServerBackend,
    arrivals: Sequence[RequestArrival],
    *,
    output_tokens: int,
    max_concurrency: int | None = None,
    tenant: str = "",
    on_done: Callable[[int], None] | None = None,
) -> tuple[list[TimedAnswer], float]:
    """Send every request at its time. Return the answers in order of arrival and the duration in seconds."""
    slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    run, done, started = uuid.uuid4().hex[:8], 0, time.perf_counter()

    async def send_one(number: int, arrival: RequestArrival) -> TimedAnswer:
        nonlocal done
        await asyncio.sleep(max(arrival.at_s - (time.perf_counter() - started), 0))
        call = PromptCall(
            text=arrival.text,
            max_tokens=arrival.output_tokens or output_tokens,
            request_id=f"sb-{run}-{number}",
            tenant=tenant,
        )
        if slots is None:
            sent, answer = time.perf_counter(), await backend.ask(call)
        else:
            async with slots:
                sent, answer = time.perf_counter(), await backend.ask(call)
        done += 1
        if on_done is not None:
            on_done(done)
        late = 1000 * max(sent - started - arrival.at_s, 0.0)
        return TimedAnswer(answer, arrival.at_s, late, time.perf_counter() - started)

    tasks = [asyncio.create_task(send_one(number, arrival)) for number, arrival in enumerate(arrivals)]
    try:
        timed = list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
    return timed, time.perf_counter() - started


def summarize_load(timed: Sequence[TimedAnswer], duration_s: float, slo: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of ``vllm bench serve``; times are None if nothing was answered."""
    good = [one for one in timed if one.ok]
    inputs = [one.answer.prompt_tokens for one in good if one.answer.prompt_tokens is not None]
    output = sum(one.output_tokens for one in good)
    found: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(timed) - len(good),
        "total_input_tokens": sum(inputs) if inputs else None,
        "total_output_tokens": output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": sum(one.meets(slo) for one in good) / duration_s if slo else None,
        "goodput_share": sum(one.meets(slo) for one in good) / len(timed) if slo and timed else None,
        "output_throughput": output / duration_s,
        "total_token_throughput": (sum(inputs) + output) / duration_s if inputs else None,
        "max_concurrent_requests": _count_most_at_once(timed),
        "mean_late_ms": compute_mean([one.late_ms for one in timed]),
        "p99_late_ms": compute_percentile([one.late_ms for one in timed], 99),
    }
    series = {
        "ttft": [one.ttft_ms for one in good],
        "tpot": [value for one in good if (value := one.tpot_ms) is not None],
        "itl": [gap for one in good for gap in one.answer.inter_token_ms],
        "e2el": [one.e2el_ms for one in good],
    }
    for name in METRICS:
        found |= _summarize_times(name, series[name])
    return found | _sum_reuse(good)


def _summarize_times(name: str, values: Sequence[float]) -> dict[str, float | None]:
    centre = compute_mean(values)
    found = {f"mean_{name}_ms": centre, f"median_{name}_ms": compute_median(values)}
    spread = None if centre is None else (sum((value - centre) ** 2 for value in values) / len(values)) ** 0.5
    return (
        found | {f"std_{name}_ms": spread} | {f"p{at}_{name}_ms": compute_percentile(values, at) for at in PERCENTILES}
    )


def _sum_reuse(good: Sequence[TimedAnswer]) -> dict[str, Any]:
    """Return what the backend reports as reused under load; None if it reports nothing."""
    receipts = [one.answer.receipt for one in good if one.answer.receipt is not None]
    cached = [one.answer.cached_tokens for one in good if one.answer.cached_tokens is not None]
    return {
        "reused_tokens": sum(int(receipt.get("reused_tokens") or 0) for receipt in receipts) if receipts else None,
        "cached_tokens": sum(cached) if cached else None,
        "receipts": len(receipts),
    }


def _count_most_at_once(timed: Sequence[TimedAnswer]) -> int:
    """Return the number of requests under way at the busiest moment."""
    moments = [(one.due_s + one.late_ms / 1000, 1) for one in timed] + [(one.finished_s, -1) for one in timed]
    now = most = 0
    for _, step in sorted(moments):
        now += step
        most = max(most, now)
    return most


def list_details(timed: Sequence[TimedAnswer]) -> dict[str, Any]:
    """Return one list for each quantity, in order of arrival, as ``vllm bench serve --save-detailed`` does; seconds."""
    return {
        "input_lens": [one.answer.prompt_tokens for one in timed],
        "output_lens": [one.output_tokens if one.ok else 0 for one in timed],
        "ttfts": [one.ttft_ms / 1000 if one.ok else None for one in timed],
        "itls": [[gap / 1000 for gap in one.answer.inter_token_ms] for one in timed],
        "start_times": [one.due_s + one.late_ms / 1000 for one in timed],
        "generated_texts": [one.answer.text for one in timed],
        "errors": [one.answer.error or "" for one in timed],
    }
