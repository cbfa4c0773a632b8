"""How much the next-token distribution may still move after a repair, by model: data, with where it comes from.

The gate compares the distributions before and after recomputing 10, 20 and 40 % of the reused tokens. At or below the
threshold the prompt is answered; above it, more is recomputed. `semblend.materialize.calibrate` measures a table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from semblend.errors import ConfigError

SCHEMA = "semblend.thresholds.v1"
STEPS = (10, 20, 40)
"""Percent of the reused tokens that are computed again before the gate looks."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Largest KL, in nats, that passes after each step; ``provenance`` says who measured it, on what, and when.

    >>> Thresholds(.01, .02, .02).after(20)
    0.02
    """

    kl_10: float
    kl_20: float
    kl_40: float
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for step in STEPS:
            if not math.isfinite(self.after(step)) or self.after(step) < 0:
                raise ConfigError(f"the threshold for {step} % is {self.after(step)}", hint="give nats of 0 or more")

    def after(self, step: int) -> float:
        """The threshold once ``step`` percent were computed again; between steps the stricter neighbour holds."""
        known = {10: self.kl_10, 20: self.kl_20, 40: self.kl_40}
        return known[step] if step in known else min(self.kl_10, self.kl_20, self.kl_40)

    def to_json(self) -> str:
        """One JSON object, for a file that `read` takes back."""
        record = asdict(self)
        record["provenance"] = dict(self.provenance)
        return json.dumps({"schema": SCHEMA, **record}, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, *, source: str = "thresholds") -> Thresholds:
        try:
            record = json.loads(text)
            if record["schema"] != SCHEMA:
                raise ValueError(f"schema {record['schema']!r}")
            values = {f"kl_{step}": float(record[f"kl_{step}"]) for step in STEPS}
            return cls(**values, provenance=dict(record.get("provenance", {})))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{source} cannot be read: {error}", hint="write it with `semblend calibrate`") from error

    @classmethod
    def read(cls, path: str | Path) -> Thresholds:
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"), source=str(path))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="check the path") from error


DEFAULT = Thresholds(0.01, 0.01, 0.01, {"note": "strictest value that was measured for any model; unknown models"})

KNOWN: Mapping[str, Thresholds] = {
    "qwen2.5-coder-1.5b": Thresholds(
        0.01, 0.02, 0.02, {"date": "2026-11-15", "prompts": 119, "note": "QA over documents, one H200, bfloat16"}
    ),
}
"""By a part of the model's name, lower case."""


def thresholds_for(model_name: str) -> Thresholds:
    """The measured table of a model, found by its name; the default, which is stricter, for every other.

    >>> thresholds_for("Qwen/Qwen2.5-Coder-1.5B-Instruct").kl_20
    0.02
    >>> thresholds_for("someone/unheard-of") is DEFAULT
    True
    """
    name = model_name.lower()
    found = [part for part in KNOWN if part in name]
    return KNOWN[max(found, key=len)] if found else DEFAULT
