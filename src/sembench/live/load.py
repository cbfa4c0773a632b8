"""Load: when requests arrive, how they are sent at their times, and sweeps over rates and concurrencies."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from semantickv.traces.formats import TraceFile
from sembench.backends import PromptCall, ServerAnswer, ServerBackend
from sembench.files import read_count
from sembench.live.run import PartialLog
from sembench.manifests.cases import Case
from sembench.manifests.traffic import ConversationTurn
from sembench.result import LoadPoint, LoadRequest, dump_point, parse_point
from sembench.scoring.aggregate import summarize_load
from sembench.witnesses.prometheus import LOCAL_HITS, LOCAL_QUERIES, Scraper, merge_deltas, pair_snapshots
from sembench.witnesses.prometheus import summarize_deltas as summarize_counters
from semblend.cli.output import say
from semblend.errors import InputError

# -- arrivals --------------------------------------------------------------------------------------------------------
# The loop is open: a request is sent at its time, whether or not earlier ones were answered. A closed loop, where the
# next request waits for the last answer, hides the queue in front of a slow server.

BLOCK_TOKENS = 512
"""Tokens that one hash id of a Mooncake trace stands for."""
_SYLLABLES = ("ba", "ko", "ri", "mu", "te", "sa", "lo", "ni", "fa", "du", "pe", "gi", "wa", "zo", "hu", "ya")


@dataclass(frozen=True, slots=True)
class RequestArrival:
    """A prompt, its arrival time in seconds, and the length of its answer in tokens (None: the run's default).

    A later ``turn`` of a ``conversation`` is due ``think_s`` seconds after the answer of the turn before it.
    """

    at_s: float
    text: str
    output_tokens: int | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()
    conversation: int | None = None
    turn: int = 0
    think_s: float = 0.0


def draw_arrivals(
    prompts: Iterable[str], rate: float, *, burstiness: float = 1.0, seed: int = 0, limit: int | None = None
) -> list[RequestArrival]:
    """Return arrivals at ``rate`` a second. Gaps are gamma distributed: ``burstiness`` 1 is Poisson, below 1 is bursty.

    >>> [arrival.at_s for arrival in draw_arrivals(["a", "b"], math.inf)]
    [0.0, 0.0]
    """
    if not rate > 0 or not burstiness > 0:
        raise InputError(f"rate {rate:g} and burstiness {burstiness:g} must be above 0", hint="inf sends all at once")
    drawn, now, arrivals = random.Random(seed), 0.0, []
    for text in itertools.islice(prompts, limit):
        arrivals.append(RequestArrival(now, text))
        if math.isfinite(rate):
            now += drawn.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return arrivals


def draw_conversations(
    conversations: Sequence[Sequence[ConversationTurn]],
    rate: float,
    *,
    burstiness: float = 1.0,
    think_s: float | None = None,
    longest_think_s: float = 60.0,
    seed: int = 0,
    limit: int | None = None,
) -> list[RequestArrival]:
    """Return the turns of conversations that begin at ``rate`` a second.

    The pause before a later turn is exponential with the mean ``think_s``; None takes the logged gap, where the log has
    times, and no pause where it has not. No pause is longer than ``longest_think_s``. ``limit`` counts requests.
    """
    begins = draw_arrivals([""] * len(conversations), rate, burstiness=burstiness, seed=seed)
    drawn, arrivals = random.Random(seed + 1), []
    for number, (turns, begin) in enumerate(zip(conversations, begins, strict=True)):
        for at, turn in enumerate(turns):
            pause = drawn.expovariate(1.0 / think_s) if think_s else (turn.gap_s or 0.0) if think_s is None else 0.0
            arrivals.append(
                RequestArrival(
                    begin.at_s, turn.text, None, turn.messages, turn.tools, number, at, min(pause, longest_think_s)
                )
            )
    return arrivals[:limit]


def list_prompts(cases: Iterable[Case], *, with_donors: bool = True) -> Iterator[str]:
    """Yield donors and recipients in the order of the cases."""
    for case in cases:
        if with_donors:
            yield from (donor.text for donor in case.donor_prompts)
        yield case.recipient_prompt


def read_trace(
    path: str, *, time_scale: float = 1.0, limit: int | None = None, most_tokens: int | None = None
) -> list[RequestArrival]:
    """Return the arrivals of a trace, such as Mooncake's or Azure's (`semantickv.traces.formats`), from 0 seconds on.

    ``time_scale`` 2 plays it at double speed. Traces hold no text: prompts are made up, and equal blocks become equal
    text, so that what was shared stays shared. ``most_tokens`` cuts long prompts.
    """
    if not time_scale > 0:
        raise InputError(f"--time-scale {time_scale:g} must be above 0", hint="2 plays the trace at double speed")
    taken = list(itertools.islice(TraceFile(path, any_order=True).read_requests(), limit))
    first = min(request.arrival_s for request in taken)
    arrivals = []
    for request in taken:
        tokens = request.tokens if most_tokens is None else min(request.tokens, most_tokens)
        text = _make_text(request.block_ids, tokens)
        arrivals.append(RequestArrival((request.arrival_s - first) / time_scale, text, request.output_tokens))
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _make_text(blocks: Sequence[int], tokens: int) -> str:
    """Make up text of about ``tokens`` tokens. A made-up word takes one to three tokens: two words count as three."""
    words: list[str] = []
    for block in blocks:
        words.extend(_make_words(block))
        if len(words) >= tokens // 2:
            break
    return " ".join(words[: max(tokens // 2, 1)])


def _make_words(block: int) -> Iterator[str]:
    digest = hashlib.shake_128(str(block).encode()).digest(BLOCK_TOKENS // 2)
    for value in digest:
        yield _SYLLABLES[value >> 4] + _SYLLABLES[value & 15]


# -- requests at their times -----------------------------------------------------------------------------------------
# Times start at the moment a request was due, so waiting for a free slot under ``max_concurrency`` counts. The first
# turn of a conversation is due at its time, whatever else is under way; the next one a think time after the answer
# before it.

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


# -- sweeps ----------------------------------------------------------------------------------------------------------
# The same requests at several rates and concurrencies, each point with an empty cache. Every finished point is written
# to a log at once, so that an interruption costs one point at most.


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """What is swept, and how. A rate of infinity sends all at once; ``isolation`` empties the cache before a point."""

    rates: Sequence[float]
    concurrencies: Sequence[int | None]
    output_tokens: int
    tenant: str
    isolation: str
    slo: Mapping[str, float]

    def list_points(self) -> list[tuple[float, int | None]]:
        return [(rate, most) for most in self.concurrencies for rate in self.rates]


def open_sweep_log(output: str, what: Mapping[str, Any], *, resume: bool) -> PartialLog[LoadPoint]:
    """Open the log of a sweep's finished points. One of other settings or of another server is not continued."""
    return PartialLog(output, what, dump_point, parse_point, resume=resume)


async def run_sweep(
    backend: ServerBackend,
    scraper: Scraper,
    settings: SweepSettings,
    make_arrivals: Callable[[float], list[RequestArrival]],
    log: PartialLog[LoadPoint],
    on_done: Callable[[int, int], None],
) -> tuple[list[LoadPoint], list[TimedAnswer]]:
    """Run every point that the log does not hold yet. Return all points, and the answers of the last one."""
    points: list[LoadPoint] = []
    timed: list[TimedAnswer] = []
    for rate, most in settings.list_points():
        name = f"{rate} {most}"
        known = log.done.get(name)
        if known is None:
            known, timed = await _run_point(backend, scraper, settings, make_arrivals(rate), rate, most, on_done)
            log.add(name, known)
            say(_describe_point(known))
        points.append(known)
    return points, timed


async def _run_point(
    backend: ServerBackend,
    scraper: Scraper,
    settings: SweepSettings,
    arrivals: Sequence[RequestArrival],
    rate: float,
    most: int | None,
    on_done: Callable[[int, int], None],
) -> tuple[LoadPoint, list[TimedAnswer]]:
    if settings.isolation == "flush":
        error = await backend.flush()
        if error is not None:
            raise InputError(f"the cache cannot be emptied: {error}", hint="check the URL, or --isolation none")
    before = await scraper.take_snapshot()
    timed, duration_s = await play(
        backend,
        arrivals,
        output_tokens=settings.output_tokens,
        max_concurrency=most,
        tenant=settings.tenant,
        salt=uuid.uuid4().hex if settings.isolation == "salt" else "",
        on_done=lambda done: on_done(done, len(arrivals)),
    )
    after = await scraper.take_snapshot()
    requests = tuple(one.to_request() for one in timed)
    point = LoadPoint(
        request_rate=rate if math.isfinite(rate) else None,
        max_concurrency=most,
        duration_s=duration_s,
        summary=summarize_load(requests, duration_s, settings.slo),
        requests=requests,
        engine=_describe_counters(before, after),
    )
    return point, timed


def _describe_counters(before: Sequence[Any], after: Sequence[Any]) -> dict[str, Any]:
    """Return how the server's counters rose, and the hit rate of its own prefix cache by them."""
    if not before:
        return {"prometheus": None, "prefix_cache_hit_rate": None}
    pairs = pair_snapshots(before, after)
    merged = merge_deltas(pairs)
    hits, queries = merged.compute_rise(*LOCAL_HITS), merged.compute_rise(*LOCAL_QUERIES)
    return {
        "prometheus": {"delta": summarize_counters(pairs, failed=len(before) - len(pairs))},
        "prefix_cache_hit_rate": hits / queries if hits is not None and queries else None,
    }


def _describe_point(point: LoadPoint) -> str:
    found = point.summary
    ttft = "no answer" if found["median_ttft_ms"] is None else f"TTFT {found['median_ttft_ms']:.0f} ms at the median"
    good = "" if found["goodput_share"] is None else f", {found['goodput_share']:.0%} within the promises"
    return f"{point.name}: {found['completed']} answered, {found['failed']} failed, {ttft}{good}"
