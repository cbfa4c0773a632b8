"""Hit rate against cache size, exact or from samples. Simulated.

A sample has a share of the blocks, and its cache is smaller in proportion. A hash of its number decides whether a block
is in the sample, so all its uses are. In prefix mode the parent of a sampled block is its nearest sampled ancestor. The
error is the standard error over several disjoint samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from semantickv.simulator.capacity import Capacity, Unit
from semantickv.simulator.forest import Forest
from semantickv.simulator.policies import Policy, find_policy
from semantickv.simulator.simulate import simulate
from semblend.errors import InputError
from semblend.fingerprint.hashes import mix64

FULL_ACCESSES: Final = 2_000_000  # up to here nothing is gained by sampling


@dataclass(frozen=True, eq=False)
class Curve:
    """Block hit rates of one policy at several sizes."""

    policy: str
    unit: Unit
    sizes: npt.NDArray[np.int64]
    hit_rates: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]  # standard error; zero for a full run
    method: Literal["full", "miniature"]
    rate: float
    simulated: Literal[True] = True


def simulate_curve(
    forest: Forest,
    policy: str | Policy,
    sizes: Sequence[int],
    *,
    unit: Unit = "blocks",
    rate: float | None = None,
    samples: int = 3,
    seed: int = 0,
) -> Curve:
    """Compute the block hit rates of a policy at several cache sizes in ``unit``.

    ``rate`` is the share of blocks to sample (default: as many as leave at most two million accesses).
    """
    chosen = find_policy(policy)
    if rate is None:
        rate = min(1.0, FULL_ACCESSES / max(1, len(forest.node)))
    if not 0 < rate <= 1:
        raise InputError(f"a sampling rate of {rate:g}", hint="more than 0, at most 1")
    wanted = np.asarray(sizes, np.int64)
    if rate == 1:
        rates = simulate_rates(forest, chosen, wanted, unit, seed)
        return Curve(chosen.name, unit, wanted, rates, np.zeros(len(wanted)), "full", 1.0)
    samples = max(1, min(samples, int(1 / rate)))
    small = np.maximum(1, np.round(wanted * rate)).astype(np.int64)
    parts = (sample_forest(forest, rate, seed, number) for number in range(samples))
    table = np.array([simulate_rates(part, chosen, small, unit, seed, rate, len(forest.node)) for part in parts])
    error = table.std(axis=0, ddof=1) / np.sqrt(samples) if samples > 1 else np.full(len(wanted), np.nan)
    return Curve(chosen.name, unit, wanted, table.mean(axis=0), error, "miniature", rate)


def simulate_rates(
    forest: Forest,
    policy: Policy,
    sizes: npt.NDArray[np.int64],
    unit: Unit,
    seed: int = 0,
    rate: float = 1.0,
    accesses: int | None = None,
) -> npt.NDArray[np.float64]:
    """Simulate one run for each size and return its block hit rates.

    A sample holds more or fewer accesses than its share. The difference is counted as hits, because a few very popular
    blocks cause most of it.
    At a rate below 1, policies that learn are told the rate so that they scale their evidence.
    """
    expected = len(forest.node) if accesses is None else accesses * rate
    missing = expected - len(forest.node)
    scaled: dict[str, Any] = {"share": rate} if rate < 1 else {}
    hits = np.array([simulate(forest, policy, Capacity(unit, int(n)), seed=seed, **scaled).block_hits for n in sizes])
    return np.clip((hits + missing) / max(1.0, expected), 0.0, 1.0)


def sample_forest(forest: Forest, rate: float, seed: int = 0, number: int = 0) -> Forest:
    """Return the accesses of a share of the nodes; samples of different ``number`` have no node in common.

    ``number`` is below 1 / rate.
    """
    draw = _hash_to_uniform(forest.nodes, seed)
    kept = (draw >= number * rate) & (draw < (number + 1) * rate)
    renumbered = np.cumsum(kept, dtype=np.int64) - 1
    parent = forest.parent.copy()
    while True:  # climb to the nearest sampled ancestor
        lost = (parent >= 0) & ~kept[parent]
        if not lost.any():
            break
        parent[lost] = forest.parent[parent[lost]]
    access = kept[forest.node]
    before = np.concatenate(([0], np.cumsum(access))).astype(np.int64)
    part = forest.trace.select(access, slice(None), before[forest.trace.starts])
    above = parent[kept]
    above = np.where(above >= 0, renumbered[above], -1).astype(np.int32)
    node = renumbered[forest.node[access]].astype(np.int32)
    return Forest(
        part, forest.mode, node, above, forest.tokens[kept], forest.types[kept], forest.depth[kept], forest.tail[access]
    )


def _hash_to_uniform(count: int, seed: int) -> npt.NDArray[np.float64]:
    """Hash each node number to a number in [0, 1), the same in every run."""
    mixed = np.arange(count, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15 * (seed + 1) % 2**64)
    return (mix64(mixed) >> np.uint64(11)).astype(np.float64) / 2.0**53
