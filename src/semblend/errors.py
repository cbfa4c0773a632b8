"""Every error that semblend raises on purpose.

::

    SemBlendError               base: carries a message and a hint
    ├── InputError              what the caller handed us cannot be used   (exit code 2)
    │   ├── TokenError          token ids: wrong type, negative, too large, nested, empty
    │   ├── NamespaceError      a namespace field has the wrong type
    │   └── ConfigError         a setting is unknown, unreadable or out of range
    ├── CapacityError           a donor can't fit, even after evicting all that may be evicted
    ├── StoreError              the persistent store: locked, unreadable, foreign version, disk full
    ├── ReceiptError            a receipt contradicts itself or the plan it answers
    ├── RankError               one of several ranks failed where they compute together: the engine has to stop
    └── MissingDependencyError  an optional package or model file is not installed

A hint tells the next step, not the cause again.
"""

from __future__ import annotations

from enum import StrEnum


class SemBlendError(Exception):
    """Base of every error raised on purpose; ``str(error)`` is one line, ``hint`` the next step."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message


class InputError(SemBlendError, ValueError):
    """The caller's input cannot be used as it is."""

    exit_code = 2


class TokenError(InputError):
    """Token ids must be a flat, non-empty sequence of integers in [0, 2**31)."""


class NamespaceError(InputError):
    """A namespace field must be a string."""


class ConfigError(InputError):
    """A setting is unknown, unreadable or out of its range."""


class CapacityError(SemBlendError):
    """The donor does not fit in the store."""


class StoreProblem(StrEnum):
    """What is wrong with a store file, where starting anew without it would help."""

    DAMAGED = "damaged"
    NEWER = "newer"


class StoreError(SemBlendError):
    """The persistent donor store cannot be read or written."""

    def __init__(self, message: str, *, hint: str = "", problem: StoreProblem | None = None) -> None:
        super().__init__(message, hint=hint)
        self.problem = problem


class ReceiptError(SemBlendError, ValueError):
    """A receipt contradicts itself or the plan it answers."""


class RankError(SemBlendError):
    """One of several ranks failed inside work that all of them do together; the others wait for it.

    No rank can decline alone from there, so this is the only error of ours that may reach an engine: it has to stop.
    """


class MissingDependencyError(SemBlendError, ImportError):
    """An optional package or a model's files are missing."""

    exit_code = 2
