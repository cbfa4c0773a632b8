"""Rows of the tables that every engine's integration has: its versions and features, and how each is known."""

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


class Served(StrEnum):
    """How far."""

    YES = "yes"
    PER_REQUEST = "declined by request"
    NO = "declined by engine"


@dataclass(frozen=True, slots=True)
class Feature:
    """One row. ``test``: where it is shown, a path in this repository."""

    what: str
    served: Served
    note: str
    test: str = ""
