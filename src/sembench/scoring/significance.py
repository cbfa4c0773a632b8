"""Decides whether paired differences are more than noise, for many metrics at once.

A comparison looks at some twenty metrics. If each were judged alone at 5 %, two equal servers would differ in at least
one of them in most comparisons. So each metric gets a p-value from the means of its documents (Student's t), and Holm's
procedure keeps the chance of even one false alarm among all of them below 1 %, however they depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

from sembench.scoring.statistics import sum_clusters

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
