"""How the embedded engine behaves: typed values, checked where they are made. The environment is read elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from semblend.errors import ConfigError, InputError
from semblend.quality import parse_quality

MAX_RUNNING, MAX_WAITING, STEP_TOKENS, STEP_WORK_MS = 32, 256, 512, 40.0
"""Defaults of the engine, of the server and of the flags of `semblend serve`."""
PATIENCE = 4
"""A tenant's own answers, and a neighbour that may come back, wait for steps of so many ``step_work_ms``: 16 rows at a
time take twice as long a row as 64 (two Neoverse-N1 cores, 135M parameters)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Limits and defaults of an `Engine`.

    ``step_tokens`` is what one step may compute: decodes take one each, the rest goes to pieces of prompts. While
    answers of other tenants run, a step works on prompts for about ``step_work_ms``, by the speed of the steps before;
    beside answers of its own, or where a neighbour was here lately, a tenant's prompts get four times as long
    (see `scheduler`). ``max_context`` of 0 means the model's own limit;
    the KV pool's size is a limit too. ``seed`` makes requests without a seed repeatable; None draws them at random.
    ``donor_min_new_tokens``: a prompt that the exact cache held already, but for fewer tokens than this, is not kept
    as a donor, because whoever could use it can use the earlier one.

    >>> EngineConfig(step_tokens=0)
    Traceback (most recent call last):
    semblend.errors.ConfigError: step_tokens=0 is not a whole number of 1 or more (hint: see EngineConfig)
    """

    model_name: str = ""
    max_running: int = MAX_RUNNING
    max_waiting: int = MAX_WAITING
    step_tokens: int = STEP_TOKENS
    step_work_ms: float = STEP_WORK_MS
    max_context: int = 0
    quality: str = "balanced"
    keep_donors: bool = True
    donor_min_new_tokens: int = 32
    seed: int | None = None

    def __post_init__(self) -> None:
        lowest = {"max_running": 1, "max_waiting": 1, "step_tokens": 1, "max_context": 0, "donor_min_new_tokens": 0}
        for name, low in lowest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name}={value!r} is not a whole number of {low} or more", hint="see EngineConfig")
        if isinstance(self.step_work_ms, bool) or not self.step_work_ms > 0:  # NaN fails too
            raise ConfigError(f"step_work_ms={self.step_work_ms!r} is not above 0", hint="40 is the default")
        try:
            object.__setattr__(self, "quality", parse_quality(self.quality))
        except InputError as error:
            raise ConfigError(error.message, hint=error.hint) from None
