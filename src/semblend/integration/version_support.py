"""How well a version of an engine is known: the row of each engine's table of versions."""

from __future__ import annotations

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
