"""Counters of a serving engine: read before and after, subtracted; a restart in between is noticed.

Only counters can be subtracted. A counter that went down was reset; its difference is unknown, not negative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sembench.backends import LONGEST_ERROR, get_text
from sembench.files import read_float, read_json_object
from semblend.errors import InputError, MissingDependencyError

if TYPE_CHECKING:
    from aiohttp import ClientSession

Labels = tuple[tuple[str, str], ...]
Snapshot = Mapping[tuple[str, Labels], float]

# The names that the servers have for the same counter. Each is tried with and without "_total".
REUSED_TOKENS = (("semblend_tokens_total", ("kind", "reused")),)
EXACT_TOKENS = (("semblend_tokens_total", ("kind", "exact")),)
EXTERNAL_QUERIES = ("vllm:external_prefix_cache_queries",)
EXTERNAL_HITS = ("vllm:external_prefix_cache_hits",)
LOCAL_HITS = ("vllm:prefix_cache_hits", "sglang:cached_tokens")
LOCAL_QUERIES = ("vllm:prefix_cache_queries", "sglang:prompt_tokens")
EXTERNAL_TRANSFER = ("vllm:external_kv_transfer_prompt_tokens", "vllm:prompt_tokens_by_source")
REQUESTS = ("semblend_requests_total", "vllm:request_success", "sglang:num_requests")


def parse_samples(text: str) -> dict[tuple[str, Labels], float]:
    """Read the Prometheus text format into values by name and sorted labels.

    >>> parse_samples('a_total{kind="x"} 3')
    {('a_total', (('kind', 'x'),)): 3.0}
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise MissingDependencyError(
            "reading metrics needs the package prometheus-client", hint="pip install 'semblend-suite[live]'"
        ) from None
    try:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    except (ValueError, IndexError, KeyError, TypeError) as error:  # which of them depends on the damage
        why = " ".join(str(error).split())[:LONGEST_ERROR] or type(error).__name__
        raise InputError(
            f"the metrics are not Prometheus text: {why}", hint="the URL must answer with Prometheus text"
        ) from None


@dataclass(frozen=True, slots=True)
class CounterDelta:
    """Two readings of the counters. A rise is None if the server has no such counter, or if it was reset."""

    before: Snapshot
    after: Snapshot

    @property
    def reset_detected(self) -> bool:
        """Whether a counter went down or disappeared: the server was restarted."""
        return any(
            _is_counter(name) and self.after.get((name, labels), -math.inf) < value
            for (name, labels), value in self.before.items()
        )

    def compute_rise(self, *names: str | tuple[str, tuple[str, str]]) -> float | None:
        """Return how much the first of these counters that exists rose, summed over its other labels.

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
    """Merge several endpoints into one: samples of the same name are added."""
    before: dict[tuple[str, Labels], float] = {}
    after: dict[tuple[str, Labels], float] = {}
    for delta in deltas:
        for target, source in ((before, delta.before), (after, delta.after)):
            for key, value in source.items():
                target[key] = target.get(key, 0.0) + value
    return CounterDelta(before, after)


def summarize_deltas(deltas: Sequence[CounterDelta], failed: int = 0) -> dict[str, float | int | bool | None]:
    """Return the ``engine.prometheus.delta`` object of a result."""
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
    """Reads a fixed set of endpoints. One that fails is counted; it never stops the run."""

    def __init__(self, client: ClientSession, urls: Sequence[str]) -> None:
        self._client = client
        self.urls = tuple(dict.fromkeys(urls))

    async def take_snapshot(self) -> list[Snapshot | None]:
        """Return one reading for each endpoint; None if it did not answer with metrics."""
        found: list[Snapshot | None] = []
        for url in self.urls:
            text, _ = await get_text(self._client, url)
            try:
                found.append(None if text is None else parse_samples(text))
            except InputError:
                found.append(None)
        return found

    async def keep_working_ones(self) -> None:
        """Leave out the endpoints that have no metrics; called once, before the run."""
        answers = await self.take_snapshot()
        self.urls = tuple(url for url, answer in zip(self.urls, answers, strict=True) if answer is not None)


def find_process_start(snapshots: Sequence[Snapshot | None]) -> float | None:
    """Return when the process behind the first endpoint that tells it was started, in Unix seconds."""
    names = (("process_start_time_seconds", ()),)
    found = (snapshot.get(name) for snapshot in snapshots if snapshot for name in names)
    return next((value for value in found if value is not None and math.isfinite(value)), None)


def pair_snapshots(before: Sequence[Snapshot | None], after: Sequence[Snapshot | None]) -> list[CounterDelta]:
    """Return the readings of the endpoints that answered both times."""
    pairs = zip(before, after, strict=True)
    return [CounterDelta(first, last) for first, last in pairs if first is not None and last is not None]


# -- snapshots -------------------------------------------------------------------------------------------------------
# Saved counters of an engine, and how they moved between two snapshots.

SNAPSHOT_VERSION = "sembench.engine_snapshot.v1"
Endpoints = Mapping[str, Mapping[str, Any]]


def read_snapshot(path: str) -> Endpoints:
    """Return the endpoints of a saved snapshot by URL."""
    hint = "pass a file of sembench engine-snapshot"
    value = read_json_object(path, hint=hint)
    if value.get("snapshot_version") != SNAPSHOT_VERSION:
        raise InputError(f"{path} is no {SNAPSHOT_VERSION}", hint=hint)
    endpoints = value.get("endpoints")
    if not isinstance(endpoints, dict):
        raise InputError(f"{path}: endpoints is not an object", hint=hint)
    return endpoints


def read_snapshot_time(path: str) -> float | None:
    """Return when a snapshot was taken, in Unix seconds; None for one of an older version."""
    return read_float(read_json_object(path, hint="pass a file of sembench engine-snapshot").get("taken_unix_s"))


def compare_snapshots(before: Endpoints, after: Endpoints) -> dict[str, Any]:
    """Return how the counters moved, over the endpoints that answered both times."""
    both = [url for url in after if after[url]["error"] is None and before.get(url, {}).get("error", "") is None]
    deltas = [CounterDelta(_read_samples(before[url]), _read_samples(after[url])) for url in both]
    return summarize_deltas(deltas, failed=len(after) - len(both))


def _read_samples(endpoint: Mapping[str, Any]) -> dict[tuple[str, Labels], float]:
    return {(name, tuple(sorted(labels.items()))): value for name, labels, value in endpoint["samples"]}
