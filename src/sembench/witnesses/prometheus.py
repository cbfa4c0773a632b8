"""Counters of a serving engine: scraped before and after, subtracted, and a restart in between noticed.

Only counters can be subtracted. A counter that went down was reset; its difference is unknown, not negative.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sembench.backends.http_client import get_text
from semblend.errors import InputError

if TYPE_CHECKING:
    import httpx

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"\s*,?\s*')
_ESCAPED = re.compile(r"\\(.)")

Labels = tuple[tuple[str, str], ...]
Snapshot = Mapping[tuple[str, Labels], float]

# What the three families of servers call the same things. Names are tried with and without "_total".
REUSED_TOKENS = (("semblend_tokens_total", ("kind", "reused")),)
EXACT_TOKENS = (("semblend_tokens_total", ("kind", "exact")),)
EXTERNAL_QUERIES = ("vllm:external_prefix_cache_queries",)
EXTERNAL_HITS = ("vllm:external_prefix_cache_hits",)
LOCAL_HITS = ("vllm:prefix_cache_hits", "sglang:cached_tokens")
LOCAL_QUERIES = ("vllm:prefix_cache_queries", "sglang:prompt_tokens")
EXTERNAL_TRANSFER = ("vllm:external_kv_transfer_prompt_tokens", "vllm:prompt_tokens_by_source")
REQUESTS = ("semblend_requests_total", "vllm:request_success", "sglang:num_requests")


def parse_samples(text: str) -> dict[tuple[str, Labels], float]:
    """Samples of the Prometheus text format by name and sorted labels.

    >>> parse_samples('a_total{kind="x"} 3')
    {('a_total', (('kind', 'x'),)): 3.0}
    """
    found: dict[tuple[str, Labels], float] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        sample = _SAMPLE.match(line)
        if sample is None:
            raise InputError(
                f"line {number} of the metrics is not a sample: {line[:80]!r}",
                hint="the URL must answer with Prometheus text",
            )
        name, labels, value = sample.groups()
        try:
            found[name, tuple(sorted(_labels(labels or "")))] = float(value)
        except ValueError:
            raise InputError(
                f"line {number} of the metrics has the value {value[:40]!r}", hint="a sample is a number"
            ) from None
    return found


def _labels(text: str) -> Iterator[tuple[str, str]]:
    for name, value in _LABEL.findall(text):
        yield name, _ESCAPED.sub(lambda match: "\n" if match.group(1) == "n" else match.group(1), value)


@dataclass(frozen=True, slots=True)
class CounterDelta:
    """What counters did between two scrapes. None: the server has no such counter, or it was reset."""

    before: Snapshot
    after: Snapshot

    @property
    def reset_detected(self) -> bool:
        """Whether a counter went down, or was there before and is gone: the server was restarted."""
        return any(
            _is_counter(name) and self.after.get((name, labels), -math.inf) < value
            for (name, labels), value in self.before.items()
        )

    def compute_rise(self, *names: str | tuple[str, tuple[str, str]]) -> float | None:
        """By how much the first of these counters that exists went up, over all its other labels.

        A counter with a label may appear with its first count, so a family that exists counts as 0 before.

        >>> delta = CounterDelta(parse_samples('t_total{kind="a"} 1'), parse_samples('t_total{kind="a"} 4'))
        >>> delta.compute_rise(("t_total", ("kind", "a"))), delta.compute_rise("absent")
        (3.0, None)
        """
        for wanted in names:
            name, label = (wanted, None) if isinstance(wanted, str) else wanted
            for spelled in (name, f"{name}_total"):
                if not any(key[0] == spelled for key in self.after):
                    continue
                rise = _sum_samples(self.after, spelled, label) - _sum_samples(self.before, spelled, label)
                return rise if rise >= 0 else None
        return None


def _sum_samples(snapshot: Snapshot, name: str, label: tuple[str, str] | None) -> float:
    return sum(
        value
        for (other, labels), value in snapshot.items()
        if other == name and (label is None or label in labels) and math.isfinite(value)
    )


def _is_counter(name: str) -> bool:
    return name.endswith(("_total", "_count", "_sum", "_bucket"))


def merge_deltas(deltas: Sequence[CounterDelta]) -> CounterDelta:
    """Several endpoints as one: samples of the same name add up."""
    before: dict[tuple[str, Labels], float] = {}
    after: dict[tuple[str, Labels], float] = {}
    for delta in deltas:
        for target, source in ((before, delta.before), (after, delta.after)):
            for key, value in source.items():
                target[key] = target.get(key, 0.0) + value
    return CounterDelta(before, after)


def summarize_deltas(deltas: Sequence[CounterDelta], failed: int = 0) -> dict[str, float | int | bool | None]:
    """The ``engine.prometheus.delta`` object of a result."""
    all_of_them = merge_deltas(deltas)
    queries, hits = all_of_them.compute_rise(*EXTERNAL_QUERIES), all_of_them.compute_rise(*EXTERNAL_HITS)
    return {
        "external_prefix_cache_queries_delta": queries,
        "external_prefix_cache_hits_delta": hits,
        "external_kv_transfer_prompt_tokens_delta": all_of_them.compute_rise(*EXTERNAL_TRANSFER),
        "external_prefix_cache_hit_ratio": hits / queries if hits is not None and queries else None,
        "prefix_cache_queries_delta": all_of_them.compute_rise(*LOCAL_QUERIES),
        "prefix_cache_hits_delta": all_of_them.compute_rise(*LOCAL_HITS),
        "semblend_reused_tokens_delta": all_of_them.compute_rise(*REUSED_TOKENS),
        "semblend_exact_tokens_delta": all_of_them.compute_rise(*EXACT_TOKENS),
        "requests_delta": all_of_them.compute_rise(*REQUESTS),
        "counter_reset_detected": any(delta.reset_detected for delta in deltas),
        "endpoints_paired": len(deltas),
        "endpoints_failed": failed,
    }


class Scraper:
    """Scrapes a fixed set of endpoints. One that fails keeps failing the count, never the run."""

    def __init__(self, client: httpx.AsyncClient, urls: Sequence[str]) -> None:
        self._client = client
        self.urls = tuple(dict.fromkeys(urls))

    async def take_snapshot(self) -> list[Snapshot | None]:
        """One snapshot an endpoint, None where it did not answer with metrics."""
        found: list[Snapshot | None] = []
        for url in self.urls:
            text, _ = await get_text(self._client, url)
            try:
                found.append(None if text is None else parse_samples(text))
            except InputError:
                found.append(None)
        return found

    async def keep_working_ones(self) -> None:
        """Leave out the endpoints that have no metrics: asked for once, before the run."""
        answers = await self.take_snapshot()
        self.urls = tuple(url for url, answer in zip(self.urls, answers, strict=True) if answer is not None)


def pair_snapshots(before: Sequence[Snapshot | None], after: Sequence[Snapshot | None]) -> list[CounterDelta]:
    """The endpoints that answered both times."""
    pairs = zip(before, after, strict=True)
    return [CounterDelta(first, last) for first, last in pairs if first is not None and last is not None]
