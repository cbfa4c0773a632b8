"""A fair subset of a manifest: every transform gets its turn, negative controls too.

The first lines of a manifest may hold no negative control. A run over them could never fail the most important gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sembench.manifests.cases import BadLine, Case, read_manifest
from semblend.errors import InputError

NEGATIVE = "negative_control"


def take_turns(transforms: Iterable[str], most: int) -> list[int]:
    """Return the positions of at most ``most`` items, one of each transform in turn, in ascending order.

    Each transform starts at another of its items, so that a short run is not about one document only. Negative
    controls come second, so that a run of two cases has one.

    >>> take_turns(["a", "b", "a", "b", "c"], 3), take_turns(["a", "a", "a", "b"], 3)
    ([0, 3, 4], [0, 1, 3])
    >>> take_turns(["a", "b", "negative_control"], 2)
    [0, 2]
    """
    found: dict[str, list[int]] = {}
    for at, transform in enumerate(transforms):
        found.setdefault(transform, []).append(at)
    order = sorted(found, key=lambda name: 0.5 if name == NEGATIVE else list(found).index(name))
    places = {name: found[name] for name in order}
    chosen: list[int] = []
    for depth in range(max((len(group) for group in places.values()), default=0)):
        for number, group in enumerate(places.values()):
            if depth < len(group):
                chosen.append(group[(depth + number) % len(group)])
        if len(chosen) >= most:
            break
    return sorted(chosen[:most])


def choose_cases(manifest: str, most: int | None, on_bad: BadLine | None = None) -> Iterator[Case]:
    """Yield all cases, or ``most`` of them. The manifest is read twice, so that it need not fit in memory."""
    if most is None:
        yield from read_manifest(manifest, on_bad=on_bad)
        return
    wanted = set(take_turns((case.transform for case in read_manifest(manifest, on_bad=on_bad)), most))
    yield from (case for at, case in enumerate(read_manifest(manifest, on_bad=on_bad)) if at in wanted)


def check_versions(manifest: str, versions: Iterable[str]) -> None:
    """Refuse a manifest without cases, or with cases of different benchmark versions."""
    found = sorted(set(versions))
    if not found:
        raise InputError(f"{manifest} holds no cases", hint="build it again")
    if len(found) > 1:
        raise InputError(
            f"{manifest} mixes the benchmark versions {', '.join(found)}", hint="rebuild it, or pass --skip-verify"
        )


def count_cases(manifest: str, most: int | None, *, one_version: bool) -> int:
    """Count the cases of a run. Every line is read, so that a bad one is reported before the measuring starts."""
    versions: set[str] = set()
    total = 0
    for case in read_manifest(manifest):
        total += 1
        versions.add(case.benchmark_version)
    check_versions(manifest, versions if one_version else list(versions)[:1])
    return total if most is None else min(total, most)
