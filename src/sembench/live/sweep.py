"""A sweep: the same requests at several rates and concurrencies, each point with an empty cache, and resumable.

Every finished point is written to ``<output>.partial.jsonl`` at once, so that an interruption costs one point at most.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sembench.backends.base import ServerBackend
from sembench.files import open_output
from sembench.live.arrivals import RequestArrival
from sembench.live.load import TimedAnswer, play
from sembench.load_result import LoadPoint, dump_point, parse_point
from sembench.scoring.load_summary import summarize_load
from sembench.witnesses.prometheus import LOCAL_HITS, LOCAL_QUERIES, Scraper, merge_deltas, pair_snapshots
from sembench.witnesses.prometheus import summarize_deltas as summarize_counters
from semblend.cli.output import say
from semblend.errors import InputError

FORMAT = "sembench.load.partial.v1"


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


class SweepLog:
    """The finished points of a sweep. A log of other settings or of another server is not continued."""

    def __init__(self, output: str, what: Mapping[str, Any], *, resume: bool) -> None:
        self.path = Path(f"{output}.partial.jsonl")
        self.points: list[LoadPoint] = self._read(what) if resume and self.path.exists() else []
        self._what = json.loads(json.dumps(what))
        self._write()

    def add(self, point: LoadPoint) -> None:
        self.points.append(point)
        self._write()

    def find(self, rate: float, most: int | None) -> LoadPoint | None:
        wanted = rate if math.isfinite(rate) else None
        return next((p for p in self.points if p.request_rate == wanted and p.max_concurrency == most), None)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        with open_output(self.path) as stream:
            stream.write(json.dumps({"partial_version": FORMAT, "what": self._what}) + "\n")
            stream.writelines(json.dumps(dump_point(point)) + "\n" for point in self.points)

    def _read(self, what: Mapping[str, Any]) -> list[LoadPoint]:
        try:
            header, *rest = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
            earlier = header["what"] if header["partial_version"] == FORMAT else None
        except (ValueError, KeyError, TypeError):
            earlier = None
        if not isinstance(earlier, dict):
            raise InputError(f"{self.path} is no interrupted load run", hint="start without --resume")
        for name, value in json.loads(json.dumps(what)).items():
            if earlier.get(name) != value:
                raise InputError(
                    f"{self.path} was begun with {name} {earlier.get(name)!r}, now it is {value!r}",
                    hint="use the same arguments, or start without --resume",
                )
        return [parse_point(value, f"{self.path} line {at}") for at, value in enumerate(rest, start=2)]


async def run_sweep(
    backend: ServerBackend,
    scraper: Scraper,
    settings: SweepSettings,
    make_arrivals: Callable[[float], list[RequestArrival]],
    log: SweepLog,
    on_done: Callable[[int, int], None],
) -> tuple[list[LoadPoint], list[TimedAnswer]]:
    """Run every point that the log does not hold yet. Return all points, and the answers of the last one."""
    points: list[LoadPoint] = []
    timed: list[TimedAnswer] = []
    for rate, most in settings.list_points():
        known = log.find(rate, most)
        if known is None:
            known, timed = await _run_point(backend, scraper, settings, make_arrivals(rate), rate, most, on_done)
            log.add(known)
            say(_describe(known))
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


def _describe(point: LoadPoint) -> str:
    found = point.summary
    ttft = "no answer" if found["median_ttft_ms"] is None else f"TTFT {found['median_ttft_ms']:.0f} ms at the median"
    good = "" if found["goodput_share"] is None else f", {found['goodput_share']:.0%} within the promises"
    return f"{point.name}: {found['completed']} answered, {found['failed']} failed, {ttft}{good}"
