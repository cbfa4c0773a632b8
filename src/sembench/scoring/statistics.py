"""Means, percentiles and intervals that draw whole documents; and which changes are more than noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

# -- estimates -------------------------------------------------------------------------------------------------------
# Means, medians and intervals: Wilson's for shares of requests, a bootstrap over documents for the rest.
#
# Cases cut from one document are not independent draws; resampling documents instead of cases keeps the intervals from
# looking tighter than they are. The bootstrap is seeded: the same records give the same interval.

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


# -- more than noise -------------------------------------------------------------------------------------------------
# Decides whether paired differences are more than noise, for many metrics at once.
#
# A comparison looks at some twenty metrics. If each were judged alone at 5 %, two equal servers would differ in at
# least one of them in most comparisons. So each metric gets a p-value from the means of its documents (Student's t),
# and Holm's procedure keeps the chance of even one false alarm among all of them below 1 %, however they depend on each
# other.

FAMILY_ERROR = 0.01
"""The chance of one or more false alarms in a whole comparison."""
_LEAST_SPREAD = 1e-3
"""Differences that are the same in every document have no spread at all; this share of their mean is taken instead."""
_STEPS = 300
_TINY = 1e-300


def compute_p_value(clusters: Sequence[Hashable], differences: Sequence[float]) -> float | None:
    """Return the two-sided p-value of "no difference" over the means of documents; None with fewer than two documents.

    >>> compute_p_value(["a", "b"], [0.0, 0.0]), compute_p_value(["a"], [1.0])
    (1.0, None)
    """
    sums = sum_clusters(clusters, np.column_stack([differences, np.ones(len(differences))]))
    count = len(sums)
    if count < 2:
        return None
    means = sums[:, 0] / sums[:, 1]
    centre = float(means.mean())
    if centre == 0.0:
        return 1.0
    spread = max(float(means.std(ddof=1)), _LEAST_SPREAD * abs(centre))
    return compute_t_tail(centre / (spread / math.sqrt(count)), count - 1)


def compute_t_tail(t: float, freedom: int) -> float:
    """Return the probability that Student's t with ``freedom`` degrees lies further from 0 than ``t``.

    >>> round(compute_t_tail(2.228, 10), 3), compute_t_tail(0.0, 5)
    (0.05, 1.0)
    """
    return compute_beta_share(freedom / 2, 0.5, freedom / (freedom + t * t))


def compute_beta_share(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b), by its continued fraction (Lentz)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1.0 - compute_beta_share(b, a, 1.0 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1.0 / _keep_from_zero(1.0 - (a + b) * x / (a + 1))
    found = d
    for m in range(1, _STEPS):
        for part in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _keep_from_zero(1.0 + part * d)
            c = _keep_from_zero(1.0 + part / c)
            found *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return front * found


def _keep_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def select_significant(p_values: Sequence[float | None], error: float = FAMILY_ERROR) -> list[bool]:
    """Return which of these p-values are significant by Holm's procedure; None never is.

    >>> select_significant([0.004, 0.5, 0.0001, None])
    [True, False, True, False]
    """
    known = sorted((value, at) for at, value in enumerate(p_values) if value is not None)
    found = [False] * len(p_values)
    for rank, (value, at) in enumerate(known):
        if value > error / (len(known) - rank):
            break
        found[at] = True
    return found
