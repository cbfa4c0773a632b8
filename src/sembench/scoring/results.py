"""Builds a result: the records, their aggregates, and where and when they were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sembench.provenance import describe_environment, get_utc_time
from sembench.result import RequestRecord, Result
from sembench.scoring.aggregate import aggregate, aggregate_by_transform
from sembench.scoring.paired import summarize_pairs


def build_result(
    records: Sequence[RequestRecord],
    *,
    run: Mapping[str, Any],
    config: Mapping[str, Any],
    engine: Mapping[str, Any] | None = None,
) -> Result:
    """Return the result of these records, with aggregates, and with pairs where there are both arms."""
    return Result(
        created_at_utc=get_utc_time(),
        run=run,
        config=config,
        engine=engine,
        environment=describe_environment(),
        aggregate=aggregate(records),
        paired=summarize_pairs(records),
        by_transform=aggregate_by_transform(records),
        requests=tuple(records),
    )
