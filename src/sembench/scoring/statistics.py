"""Means, medians and intervals: Wilson's for shares of requests, a bootstrap over documents for the rest.

Cases cut from one document are not independent draws; resampling documents instead of cases keeps the intervals from
looking tighter than they are. The bootstrap is seeded: the same records give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

RESAMPLES = 1000
_SEED = 20261107
_AT_ONCE = 50  # resamples a step: bounds the memory at 50 x clusters
_Z95 = 1.959963984540054

T = TypeVar("T")
Interval = list[float]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval and the number of requests behind it."""

    value: float | None
    ci: Sequence[float] | None = None
    n: int | None = None

    def to_fields(self, name: str) -> dict[str, Any]:
        """Return the three keys that a result file has for a metric."""
        return {name: self.value, f"{name}_n": self.n, f"{name}_ci": self.ci}


def group_by(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    """Group items by a name, in the order of first appearance.

    >>> group_by(["ab", "c", "de"], lambda word: str(len(word)))
    {'2': ['ab', 'de'], '1': ['c']}
    """
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def estimate_mean(samples: Iterable[tuple[float | None, Hashable]]) -> Estimate:
    """Estimate the mean of (value, cluster) pairs; a value of None was not observed and is left out.

    >>> estimate_mean([(1.0, "a"), (None, "b")])
    Estimate(value=1.0, ci=None, n=1)
    """
    known = [(float(value), cluster) for value, cluster in samples if value is not None]
    values = [value for value, _ in known]
    return Estimate(compute_mean(values), bootstrap_mean([cluster for _, cluster in known], values), len(values))


def compute_wilson_interval(hits: int, n: int) -> Interval | None:
    """Return the 95 % interval of a share, which also works at 0 and at 1; None without a sample.

    >>> [round(x, 3) for x in compute_wilson_interval(0, 10)]
    [0.0, 0.278]
    """
    if n <= 0:
        return None
    share, z2 = hits / n, _Z95 * _Z95
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return [max(0.0, middle - half) if hits else 0.0, min(1.0, middle + half) if hits < n else 1.0]


def _number_clusters(clusters: Sequence[Hashable]) -> npt.NDArray[np.int64]:
    """Return for each name the number of its first appearance."""
    places: dict[Hashable, int] = {}
    return np.fromiter((places.setdefault(name, len(places)) for name in clusters), dtype=np.int64, count=len(clusters))


def sum_clusters(clusters: Sequence[Hashable], rows: npt.ArrayLike) -> FloatArray:
    """Return the sum of the rows of each cluster, one row for each cluster."""
    values, at = np.asarray(rows, dtype=np.float64), _number_clusters(clusters)
    sums = np.zeros((int(at.max(initial=-1)) + 1, values.shape[1]))
    np.add.at(sums, at, values)
    return sums


def _draw_weights(count: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield how often each cluster is drawn, for a few resamples at a time."""
    rng = np.random.default_rng(_SEED)
    even = np.full(count, 1.0 / count)
    for start in range(0, RESAMPLES, _AT_ONCE):
        yield rng.multinomial(count, even, size=min(_AT_ONCE, RESAMPLES - start))


def resample_sums(sums: FloatArray) -> FloatArray:
    """Return the totals of every column for each resample of clusters."""
    return np.concatenate([weights @ sums for weights in _draw_weights(len(sums))])


def compute_interval(draws: FloatArray) -> Interval | None:
    """Return the middle 95 % of the draws that are finite; None if there are none."""
    kept = draws[np.isfinite(draws)]
    if not len(kept):
        return None
    low, high = np.percentile(kept, [2.5, 97.5])
    return [float(low), float(high)]


def bootstrap_ratio(clusters: Sequence[Hashable], tops: Sequence[float], bottoms: Sequence[float]) -> Interval | None:
    """Return the clustered 95 % interval of sum(tops) / sum(bottoms); None with fewer than two clusters."""
    if len(set(clusters)) < 2:
        return None
    totals = resample_sums(sum_clusters(clusters, np.column_stack([tops, bottoms])))
    with np.errstate(divide="ignore", invalid="ignore"):
        return compute_interval(totals[:, 0] / totals[:, 1])


def bootstrap_mean(clusters: Sequence[Hashable], values: Sequence[float]) -> Interval | None:
    """Return the clustered 95 % interval of a mean; None with fewer than two clusters.

    >>> bootstrap_mean(["a", "a"], [0.0, 1.0]) is None
    True
    """
    return bootstrap_ratio(clusters, values, [1.0] * len(values))


def bootstrap_median(clusters: Sequence[Hashable], values: Sequence[float]) -> Interval | None:
    """Return the clustered 95 % interval of a median; None with fewer than two clusters.

    >>> bootstrap_median(["a", "b", "b"], [1.0, 1.0, 1.0])
    [1.0, 1.0]
    """
    if len(set(clusters)) < 2:
        return None
    numbers, at = np.asarray(values, dtype=np.float64), _number_clusters(clusters)
    order = np.argsort(numbers, kind="stable")
    numbers, at = numbers[order], at[order]
    found = []
    for weights in _draw_weights(int(at.max()) + 1):
        below = np.cumsum(weights[:, at], axis=1)  # how many drawn values lie at or below each value
        total = below[:, -1:]
        lower = np.argmax(below > (total - 1) // 2, axis=1)
        upper = np.argmax(below > total // 2, axis=1)
        found.append((numbers[lower] + numbers[upper]) / 2)
    return compute_interval(np.concatenate(found))


def compute_percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which ``share`` percent of the values lie; None without values.

    >>> compute_percentile([1.0, 2.0, 3.0], 50)
    2.0
    """
    return float(np.percentile(np.asarray(values, dtype=np.float64), share)) if len(values) else None


def compute_mean(values: Sequence[float]) -> float | None:
    """Return the mean; None without values."""
    return float(np.mean(np.asarray(values, dtype=np.float64))) if len(values) else None


def compute_median(values: Sequence[float]) -> float | None:
    """Return the median; None without values."""
    return compute_percentile(values, 50)
