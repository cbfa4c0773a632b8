"""What the gate goes by, for each model: data, with where it comes from.

After recomputing 10, 20 or 40 % of the reused tokens the gate estimates how far the answer would be from a cold one
(`materialize.gate.risk`). At or below the threshold the prompt is answered; above it, more is recomputed. Where a
glance at layer 1 already shows how far donor KV is off, the small steps are left out: they would be lost work.
`semblend.materialize.calibrate` measures a table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files as files_of
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from semblend.errors import ConfigError
from semblend.materialize.gate.dial import DialTable
from semblend.materialize.gate.plan_shape import PassageOrder
from semblend.materialize.gate.risk import RiskFeatures, RiskModel

SCHEMA = "semblend.thresholds.v2"
STEPS = (10, 20, 40)
"""Percent of the reused tokens that are computed again before the gate looks."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Largest expected divergence, in nats, that passes after each step; ``provenance`` says who measured it, and when.

    Layer-1 deviation of the most attended donor tokens from which on the gate begins with 20 %, with 40 %, or with a
    prefill: ``begin_20``, ``begin_40``, ``begin_prefill``.

    These hold in mode balanced, at .02 nats; at another number they are scaled. ``dial``: what was measured for every
    number, which then counts instead. ``borrowed_dial``: that of other models, for orders of passages that ``dial``
    does not know; no part of a file, who chooses a table lends it (`gate.chosen_table`).

    ``expected_costs``: by kind of plan (`PlanShape.kind`) what mode balanced cost on average; 1 is a cold prefill.

    >>> Thresholds(.01, .02, .02).after(20)
    0.02
    >>> Thresholds(.01, .02, .02, begin_40=.03, begin_prefill=.05).first_step(.04)
    40
    """

    kl_10: float
    kl_20: float
    kl_40: float
    begin_20: float = math.inf
    begin_40: float = math.inf
    begin_prefill: float = math.inf
    risk: RiskModel = field(default_factory=lambda: RiskModel({}))
    dial: DialTable = field(default_factory=DialTable)
    borrowed_dial: DialTable = field(default_factory=DialTable)
    expected_costs: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for step in STEPS:
            if not math.isfinite(self.after(step)) or self.after(step) < 0:
                raise ConfigError(f"the threshold for {step} % is {self.after(step)}", hint="give nats of 0 or more")
        for name in ("begin_20", "begin_40", "begin_prefill"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give a deviation of 0 or more")
        for kind, cost in self.expected_costs.items():
            if not math.isfinite(cost) or cost < 0:
                raise ConfigError(f"the expected cost of {kind!r} is {cost}", hint="give a share of a cold prefill")

    @property
    def glances(self) -> bool:
        """Whether a look at layer 1 can change anything."""
        return min(self.begin_20, self.begin_40, self.begin_prefill) < math.inf

    def first_step(self, deviation: float) -> int | None:
        """The percentage to begin with; None: a prefill. What is no number is the worst."""
        if not deviation < self.begin_prefill and self.begin_prefill < math.inf:
            return None
        if not deviation < self.begin_40 and self.begin_40 < math.inf:
            return 40
        return 20 if not deviation < self.begin_20 and self.begin_20 < math.inf else 10

    def after(self, step: int) -> float:
        """The threshold once ``step`` percent were computed again; between steps the stricter neighbour holds."""
        known = {10: self.kl_10, 20: self.kl_20, 40: self.kl_40}
        return known[step] if step in known else min(self.kl_10, self.kl_20, self.kl_40)

    def find_dial(self, order: PassageOrder) -> DialTable | None:
        """The dial that knows prompts of this order; None: they are judged by thresholds."""
        return next((dial for dial in (self.dial, self.borrowed_dial) if dial.knows(order)), None)

    def expect(self, step: int, features: RiskFeatures) -> float:
        """Divergence from cold that an answer would have now."""
        return self.risk.expect(step, features)

    def to_json(self) -> str:
        """One JSON object, for a file that `from_json` takes back."""
        record: dict[str, Any] = {f"kl_{step}": self.after(step) for step in STEPS}
        for name in ("begin_20", "begin_40", "begin_prefill"):
            value = getattr(self, name)
            record[name] = value if math.isfinite(value) else None
        record["risk"] = {str(step): list(weights) for step, weights in self.risk.weights.items()}
        record["dial"] = self.dial.to_record()
        record["expected_costs"] = dict(self.expected_costs)
        record["provenance"] = dict(self.provenance)
        return json.dumps({"schema": SCHEMA, **record}, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, *, source: str = "thresholds") -> Thresholds:
        try:
            record = json.loads(text)
            if record["schema"] != SCHEMA:
                raise ValueError(f"schema {record['schema']!r}, not {SCHEMA!r}")
            values = {f"kl_{step}": float(record[f"kl_{step}"]) for step in STEPS}
            for name in ("begin_20", "begin_40", "begin_prefill"):
                values[name] = math.inf if record.get(name) is None else float(record[name])
            weights = {int(step): tuple(map(float, row)) for step, row in record.get("risk", {}).items()}
            costs = {str(kind): float(cost) for kind, cost in record.get("expected_costs", {}).items()}
            return cls(
                **values,
                risk=RiskModel(weights),
                dial=DialTable.from_record(record.get("dial", {})),
                borrowed_dial=DialTable(),
                expected_costs=costs,
                provenance=dict(record.get("provenance", {})),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"{source} cannot be read: {error}", hint="write it with `semblend calibrate`") from error

    @classmethod
    def read(cls, path: str | Path) -> Thresholds:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="check the path") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} cannot be read: it is no UTF-8", hint="check the path") from error
        return cls.from_json(text, source=str(path))


_FILES = files_of("semblend.materialize.gate")


def _read_file(file: Traversable) -> Thresholds:
    return Thresholds.from_json(file.read_text(encoding="utf-8"), source=file.name)


DEFAULT = _read_file(_FILES / "default.json")
"""For models that nobody measured: strict thresholds for passages in order, and one dial for passages that moved.

By thresholds alone, passages that moved were served too: 10 of 66 were false safes on two models, and a prefill would
have been as cheap (1.18 and .94 of its work). Of passages in order, none of 182 was (decision 0133).
"""


@cache
def read_known() -> Mapping[str, Thresholds]:
    """The tables that come with the package, by a part of the model's name, lower case.

    Each is a file that `semblend calibrate` could have written, with what was measured in its ``provenance``.
    """
    files = [file for file in (_FILES / "known").iterdir() if file.name.endswith(".json")]
    return {file.name.removesuffix(".json"): _read_file(file) for file in files}


def find_known(model_name: str) -> tuple[str, Thresholds] | None:
    """The name and the table of the known model that ``model_name`` contains; the longest such name.

    >>> find_known("Qwen/Qwen2.5-Coder-1.5B-Instruct")[0]
    'qwen2.5-coder-1.5b'
    """
    name = model_name.lower()
    found = [part for part in read_known() if part in name]
    return (best := max(found, key=len), read_known()[best]) if found else None
