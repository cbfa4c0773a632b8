"""Saved counters of an engine, and how they moved between two snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sembench.files import read_json_object
from sembench.values import read_float
from sembench.witnesses.prometheus import CounterDelta, Labels, summarize_deltas
from semblend.errors import InputError

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
