"""Rows of the table that every engine's integration has: its versions, and how each is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class VersionEvidence(StrEnum):
    """How a version was looked at."""

    RUN = "run"
    STATIC = "static"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Support:
    """One row of the table."""

    version: str
    evidence: VersionEvidence
    note: str


def find_support(version: str, rows: Sequence[Support], engine: str) -> Support:
    """The row of a version such as ``0.32.0+cpu``; evidence ``none``, and what to do next, where there is none."""
    minor = ".".join(version.split("+")[0].split(".")[:2])
    for row in rows:
        if row.version == minor:
            return row
    first, last = rows[0].version, rows[-1].version
    return Support(
        minor,
        VersionEvidence.NONE,
        f"{engine} {version} was never looked at, and this SemBlend knows {first} to {last}; "
        f"install a newer semblend-suite, or {engine} {last}",
    )
