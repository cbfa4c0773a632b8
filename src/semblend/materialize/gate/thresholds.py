"""What the gate goes by, for each model: data, with where it comes from.

After recomputing 10, 20 or 40 % of the reused tokens the gate estimates how far the answer would be from a cold one
(`RiskModel`). At or below the threshold the prompt is answered; above it, more is recomputed.
`semblend.materialize.calibrate` measures a table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cache
from importlib.resources import files as files_of
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from semblend.errors import ConfigError
from semblend.plan.reuse_plan import ReusePlan
from semblend.quality import MODE_NATS

if TYPE_CHECKING:
    from torch import Tensor  # `semblend estimate` reads the shape of a plan where no torch is installed

# -- The shape of a plan: what is known of it before anything is computed, and the kind of prompt that it stands for.


SMALL_SHARE = 0.1
"""A donor, or an order, that concerns less than this share of the reused tokens does not make a kind of its own."""


NEW_SHARE = 0.15
"""Where more of a prompt is new, two passes over that and a repair of 10 % come to half of a prefill."""
MIN_BEGINNING = 48
"""So many tokens at the beginning are a system prompt, and no chat template's header."""


class PassageOrder(StrEnum):
    """In which order the prompt holds the reused tokens: this decides most of what the gate will say.

    Mode balanced served 346 of 349 prompts with one donor in order, 9 of 122 reordered ones and 19 of 125 with several
    donors (docs/research/decisions/break-even.md).
    """

    IN_ORDER = "one donor in order"
    REORDERED = "one donor reordered"
    SEVERAL = "several donors"


@dataclass(frozen=True, slots=True)
class PlanShape:
    """Counts of a plan, in tokens but for ``spans``.

    ``tokens`` would be computed without reuse. ``foreign_tokens`` come from other donors than the one that holds most.
    ``turned_tokens`` stand in the prompt behind tokens that come after them in that donor. ``among_tokens`` lie between
    two spans of it, left out of the donor or new in the prompt, whichever are more, or moved back and are computed.
    ``exact_tokens``, which the engine has anyway, count as the donor's first span where there are many: most often
    they are its beginning.

    >>> from semblend.span import Span
    >>> PlanShape.of(ReusePlan((Span("d", 200, 0, 100), Span("d", 0, 100, 100)), 220)).kind
    'one donor reordered, 128+ tokens, 2+ spans'
    """

    tokens: int
    reused_tokens: int
    spans: int
    foreign_tokens: int
    turned_tokens: int
    among_tokens: int
    exact_tokens: int = 0

    @classmethod
    def of(cls, plan: ReusePlan) -> PlanShape:
        held: dict[str, int] = {}
        for span in plan.spans:
            held[span.donor_id] = held.get(span.donor_id, 0) + span.length
        main = max(held, key=lambda donor_id: held[donor_id], default="")
        reached = turned = 0
        among = plan.moved_back
        before = (plan.exact_tokens, plan.exact_tokens) if plan.exact_tokens >= MIN_BEGINNING else None
        for span in plan.spans:
            if span.donor_id == main:
                turned += span.length if span.donor_start < reached else 0
                reached = max(reached, span.donor_end)
                if before is not None:
                    among += max(0, span.donor_start - before[0], span.target_start - before[1])
                before = span.donor_end, span.target_end
        reused, tokens = plan.reused_tokens, plan.prompt_tokens - plan.exact_tokens
        return cls(tokens, reused, len(plan.spans), reused - held.get(main, 0), turned, among, plan.exact_tokens)

    @property
    def order(self) -> PassageOrder:
        few = SMALL_SHARE * self.reused_tokens
        if self.foreign_tokens > few:
            return PassageOrder.SEVERAL
        return PassageOrder.REORDERED if self.turned_tokens > few else PassageOrder.IN_ORDER

    @property
    def in_part(self) -> bool:
        """Whether passages were left out or put in among those of one donor in order."""
        return self.order is PassageOrder.IN_ORDER and self.among_tokens > SMALL_SHARE * self.reused_tokens

    @property
    def revises(self) -> bool:
        """Whether a prompt goes on with a donor's tokens in part, or in order with much that is new."""
        has_much_new = self.tokens - self.reused_tokens > NEW_SHARE * self.tokens
        return self.in_part or (self.order is PassageOrder.IN_ORDER and has_much_new)

    @property
    def is_edited(self) -> bool:
        """Whether such a prompt begins with what the engine has, too: an agent that edited its history keeps the system
        prompt. Passages of a donor under another instruction, of which some were left out, are further from cold, and
        are none."""
        return self.exact_tokens >= MIN_BEGINNING and self.revises

    @property
    def kind(self) -> str:
        """Prompts of one kind have the same order, and are alike in length and number of spans within a factor of 2."""
        order = f"{self.order}, edited" if self.is_edited else self.order
        return f"{order}, {_round_down(self.tokens)}+ tokens, {_round_down(self.spans)}+ spans"


def _round_down(count: int) -> int:
    """The largest power of two that is not above ``count``."""
    return 1 << max(0, count.bit_length() - 1)


# -- From what passes show of themselves to the divergence that an answer is likely to have.
#
# Three features, all of them by-products of a repair: how far it moved the next-token distribution, how far the donor's
# KV of the tokens just computed had been off, and how undecided the model is. Alone, the first ranks true damage worse
# than the three together (docs/research/decisions/quality-gate.md). How they weigh is measured for each model.


UNBOUNDED_RISK = 1e6
"""Stands for a risk that is not a number: logits with NaN or infinities must never pass a gate."""
_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class RiskFeatures:
    """What a repair shows, in nats but for ``deviation``, which is relative to the size of KV.

    ``moved`` is the divergence of the next-token distribution now from that of the first look, ``settled`` from that of
    the pass before; both are no number where the first pass was the repair.
    """

    moved: float
    settled: float
    deviation: float
    entropy: float

    @property
    def seen_at_once(self) -> tuple[float, float]:
        """What one pass shows of itself, without another before it."""
        return math.log(max(self.deviation, _LEAST)), self.entropy

    @property
    def logs(self) -> tuple[float, float, float, float]:
        """Logarithms of what spans decades, and a one for the constant."""
        return math.log(max(self.moved, _LEAST)), math.log(max(self.deviation, _LEAST)), self.entropy, 1.0


@dataclass(frozen=True, slots=True)
class RiskModel:
    """Expected divergence from cold, in nats: ``exp(weights . features)``, weights for each step in percent.

    A step without weights is judged by whether the distribution still moves.

    >>> RiskModel({10: (1.0, 0.0, 0.0, 0.0)}).expect(10, RiskFeatures(moved=.25, settled=.2, deviation=.1, entropy=2.0))
    0.25
    """

    weights: Mapping[int, tuple[float, ...]]

    def __post_init__(self) -> None:
        for step, weights in self.weights.items():
            if len(weights) != 4 or not all(map(math.isfinite, weights)):
                raise ConfigError(f"the risk model for {step} % has weights {weights}", hint="give four numbers")

    def expect(self, step: int, features: RiskFeatures) -> float:
        weights = self.weights.get(step)
        if weights is None or not math.isfinite(features.moved):
            return features.settled
        return math.exp(min(20.0, sum(w * f for w, f in zip(weights, features.logs, strict=True))))


def fit_weights(seen: Sequence[tuple[RiskFeatures, float]], ridge: float = 1e-3) -> tuple[float, ...]:
    """Weights by least squares on the logarithm of the true divergence."""
    features = np.array([features.logs for features, _ in seen])
    target = np.log(np.array([true for _, true in seen]) + 1e-5)
    weights = np.linalg.solve(features.T @ features + ridge * np.eye(features.shape[1]), features.T @ target)
    return tuple(float(w) for w in weights)


def compute_entropy(logits: Tensor) -> float:
    """Of one distribution, in nats.

    >>> import torch
    >>> round(compute_entropy(torch.zeros(4)) / math.log(4), 6)
    1.0
    """
    logs = logits.float().log_softmax(-1)
    return float(-(logs.exp() * logs).nan_to_num().sum())


def bound_risk(risk: float) -> float:
    """The same, or `UNBOUNDED_RISK` for what is not a number."""
    return risk if math.isfinite(risk) else UNBOUNDED_RISK


def next_token_kl(now: Tensor, before: Tensor) -> float:
    """KL divergence in nats of the next-token distribution ``now`` from ``before``, both logits of one row.

    >>> import torch
    >>> next_token_kl(torch.tensor([1., 2.]), torch.tensor([2., 3.]))
    0.0
    >>> next_token_kl(torch.tensor([1., float("nan")]), torch.tensor([2., 3.])) == UNBOUNDED_RISK
    True
    """
    p, q = (logits.reshape(-1).double().log_softmax(-1) for logits in (now, before))
    risk = float((p.exp() * (p - q)).masked_fill(p == -math.inf, 0.0).sum())
    return max(0.0, bound_risk(risk))


# -- The dial: of the ways to fill a prompt, the cheapest one that is expected to stay below a number of nats.
#
# The ways, by rising cost: donor KV with its seams and gaps computed (0 %), then 10, 20 or 40 % of the reused tokens
# computed again, then a prefill. A `DialTable` holds what `semblend calibrate` measured for a model: how far the answer
# of each way is from a cold one, as it can be expected at two moments.
#
#     the plan is known    the mean by the order of its passages says with which way to begin; where no way is below
#                          the number: a prefill at once
#     after a repair       what the repair changed says whether it was enough; if not, the next way follows
#
# A larger number never chooses a dearer way, and no way is chosen whose expected divergence is above the number.


RECOMPUTE_LEVELS = (0, 10, 20, 40)
"""Percent of the reused tokens that each way computes again."""
NUMBERS = (0.003, 0.01, 0.02, 0.05, 0.1, 0.3)
"""Where calibration and benchmarks look at the dial."""
FALSE_SAFE_TIMES = 5.0
"""A prompt that was served with more than so many times the number is a false safe."""
MAX_UNPROBED = MODE_NATS["balanced"]
"""Up to this number nothing is served that no repair has probed.

A repair is a measurement of the prompt itself; before it there is only what other prompts have shown. And splices alone
change words: KL .007, but F1 .885 against cold for one document under another instruction
(decisions/divergence-budget.md).
"""
MIN_OF_AN_ORDER = 8
"""Prompts of an order of passages, below which nothing is expected of it."""
_ORDERS = tuple(PassageOrder)


@dataclass(frozen=True, slots=True)
class RecomputeLevel:
    """What the gate does next: compute ``percent`` of the reused tokens again (0: nothing more), None: a prefill.

    ``expected``: divergence from cold of the chosen way, in nats; for a prefill, that of the best way there was.
    """

    percent: int | None
    expected: float
    reason: str


def choose_level(expected: Mapping[int, float], nats: float, *, unprobed: bool = True) -> RecomputeLevel:
    """The cheapest way that is expected to stay below ``nats``; ``expected`` by percent.

    ``unprobed``: whether donor KV alone may be served, at a number above `MAX_UNPROBED`.

    >>> choose_level({0: .2, 10: .04, 20: .03}, .05).percent
    10
    >>> choose_level({0: .2, 10: .04}, .01).reason
    'at best 0.04 nats are expected, 0.01 are allowed'
    """
    allowed = [percent for percent in sorted(expected) if percent or (unprobed and nats > MAX_UNPROBED)]
    for percent in allowed:
        if bound_risk(expected[percent]) <= nats:
            return RecomputeLevel(percent, expected[percent], f"{expected[percent]:.3g} of {nats:g} nats are expected")
    best = min((bound_risk(expected[percent]) for percent in allowed), default=bound_risk(math.inf))
    return RecomputeLevel(None, best, f"at best {best:.3g} nats are expected, {nats:g} are allowed")


@dataclass(frozen=True, slots=True)
class DialTable:
    """Expected divergence from cold by way, in nats; empty where nothing was measured.

    ``means``: by order of passages and way, the mean of what was measured.
    ``repair``: by way, weights of `RiskFeatures.seen_at_once`, of each order but the usual one, and a constant.
    Weights give the logarithm of the expected divergence. How far the next-token distribution moved has none: beside
    the deviation it says nothing (fits on three models gave it 0 to .14), and it takes a pass more to see.
    """

    means: Mapping[PassageOrder, Mapping[int, float]] = field(default_factory=dict)
    repair: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for percent, weights in self.repair.items():
            if len(weights) != 2 + len(_ORDERS) or not all(map(math.isfinite, weights)):
                raise ConfigError(
                    f"the dial's row for {percent} % has weights {weights}",
                    hint=f"give {2 + len(_ORDERS)} numbers, as `semblend calibrate` writes them",
                )
        for order, row in self.means.items():
            if any(not (math.isfinite(nats) and nats >= 0) for nats in row.values()):
                raise ConfigError(f"the dial's means of {order} are {dict(row)}", hint="give nats of 0 or more")

    def knows(self, order: PassageOrder) -> bool:
        """Whether prompts of this order were measured."""
        return bool(self.means.get(order)) and bool(self.repair)

    def begin(self, order: PassageOrder, nats: float) -> RecomputeLevel:
        """The way to begin with, before anything is computed. Passages that moved are never served unprobed."""
        return choose_level(self.means[order], nats, unprobed=order is PassageOrder.IN_ORDER)

    def expect_by_repair(self, order: PassageOrder, percent: int, features: RiskFeatures) -> float:
        """Of the way that was taken."""
        weights = self.repair.get(percent)
        if weights is None or not all(map(math.isfinite, features.seen_at_once)):
            return bound_risk(math.inf)
        return _expect(weights, make_repair_features(order, features))

    def scale(self, margin: float) -> DialTable:
        """The same table that expects ``margin`` times as much."""
        more = math.log(margin)
        return DialTable(
            {order: {percent: nats * margin for percent, nats in row.items()} for order, row in self.means.items()},
            {percent: (*weights[:-1], weights[-1] + more) for percent, weights in self.repair.items()},
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DialTable:
        """Raises what a wrong record raises: `Thresholds.from_json` says which file it is."""
        means = {
            PassageOrder(order): {int(percent): float(nats) for percent, nats in row.items()}
            for order, row in record.get("means", {}).items()
        }
        repair = {int(percent): tuple(map(float, row)) for percent, row in record.get("repair", {}).items()}
        return cls(means, repair)


def make_repair_features(order: PassageOrder, features: RiskFeatures) -> tuple[float, ...]:
    """What the weights of `DialTable.repair` weigh."""
    return (*features.seen_at_once, *_mark_order(order))


def _mark_order(order: PassageOrder) -> tuple[float, ...]:
    """1 for an order that is not the usual one, and a constant."""
    return (*(float(order is one) for one in _ORDERS[1:]), 1.0)


def _expect(weights: Sequence[float], features: Sequence[float]) -> float:
    return math.exp(min(20.0, sum(w * f for w, f in zip(weights, features, strict=True))))


SCHEMA = "semblend.thresholds.v3"
STEPS = (10, 20, 40)
"""Percent of the reused tokens that are computed again before the gate looks."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Largest expected divergence, in nats, that passes after each step; ``provenance`` says who measured it, and when.

    These hold in mode balanced, at .02 nats; at another number they are scaled. ``dial``: what was measured for every
    number, which then counts instead. ``edit_dial``: the same for edited histories and parts of a donor
    (`PlanShape.is_edited`). ``borrowed_dial``: that of other models, for orders of passages that ``dial`` does not
    know; no part of a file, who chooses a table lends it (`choose_table`).

    >>> Thresholds(.01, .02, .02).after(20)
    0.02
    """

    kl_10: float
    kl_20: float
    kl_40: float
    risk: RiskModel = field(default_factory=lambda: RiskModel({}))
    dial: DialTable = field(default_factory=DialTable)
    edit_dial: DialTable = field(default_factory=DialTable)
    borrowed_dial: DialTable = field(default_factory=DialTable)
    provenance: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for step in STEPS:
            if not math.isfinite(self.after(step)) or self.after(step) < 0:
                raise ConfigError(f"the threshold for {step} % is {self.after(step)}", hint="give nats of 0 or more")

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

    def tighten(self, times: float) -> Thresholds:
        """For where everything moves answers ``times`` as far as it did where this was measured.

        >>> Thresholds(.01, .02, .02).tighten(2).after(20)
        0.01
        """
        dials = {name: getattr(self, name).scale(times) for name in ("dial", "edit_dial", "borrowed_dial")}
        return replace(self, kl_10=self.kl_10 / times, kl_20=self.kl_20 / times, kl_40=self.kl_40 / times, **dials)

    def to_json(self) -> str:
        """One JSON object, for a file that `from_json` takes back."""
        record = asdict(self)
        del record["borrowed_dial"]
        record["risk"] = record["risk"]["weights"]
        return json.dumps({"schema": SCHEMA, **record}, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, *, source: str = "thresholds") -> Thresholds:
        try:
            record = json.loads(text)
            if record["schema"] != SCHEMA:
                raise ValueError(f"schema {record['schema']!r}, not {SCHEMA!r}")
            values = {f"kl_{step}": float(record[f"kl_{step}"]) for step in STEPS}
            weights = {int(step): tuple(map(float, row)) for step, row in record.get("risk", {}).items()}
            return cls(
                **values,
                risk=RiskModel(weights),
                dial=DialTable.from_record(record.get("dial", {})),
                edit_dial=DialTable.from_record(record.get("edit_dial", {})),
                borrowed_dial=DialTable(),
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
"""For models that nobody measured: one dial that was fitted on three, and strict thresholds for parts of a donor.

Fitted on two of them it judged the third without a false safe (decisions/divergence-budget.md).
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


# -- Which table the gate of a model goes by, and why: a user's file, else the model's own by its name, else the
# default.
#
# Decided once, where an engine starts, which says it in one line (`ChosenTable.describe`).


class TableSource(StrEnum):
    """Where a table comes from."""

    FILE = "calibration file"
    KNOWN = "known model"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class ChosenTable:
    """A table for one model. ``name``: the file, the known model's name, or for the default what nothing is known of.

    ``thresholds`` have a dial for every order in which passages can move: their own, or the default's.
    """

    thresholds: Thresholds
    source: TableSource
    name: str

    @property
    def borrows(self) -> bool:
        """Whether passages that moved are judged by other models' measurements, although this table has its own."""
        return self.source is not TableSource.DEFAULT and bool(self.thresholds.borrowed_dial.means)

    def describe(self) -> str:
        """One line for a log.

        >>> choose_table("unheard-of").describe()
        "default thresholds: no table is known of 'unheard-of' (hint: semblend calibrate measures one)"
        """
        if self.source is TableSource.DEFAULT:
            return f"default thresholds: no table is known of {self.name!r} (hint: semblend calibrate measures one)"
        whose = f"thresholds of {self.source} {self.name}" + self._describe_measurement()
        return whose + ("; passages that moved go by the default dial" if self.borrows else "")

    def _describe_measurement(self) -> str:
        measured = self.thresholds.provenance
        facts = [
            f"on {measured['prompts']} prompts" if "prompts" in measured else "",
            f"of {measured['model']}" if "model" in measured else "",
        ]
        said = " ".join(filter(None, facts))
        return f" (measured {said})" if said else ""


def choose_table(*model_names: str, file: str | Path = "") -> ChosenTable:
    """The table of ``file`` where one is given, else of the first name that is known, else the default.

    >>> choose_table("my-model", "Qwen/Qwen2.5-Coder-1.5B-Instruct").name
    'qwen2.5-coder-1.5b'
    """
    if file:
        return ChosenTable(borrow_dial(Thresholds.read(file)), TableSource.FILE, str(file))
    for model_name in model_names:
        if (known := find_known(model_name)) is not None:
            name, table = known
            return ChosenTable(borrow_dial(table), TableSource.KNOWN, name)
    return ChosenTable(DEFAULT, TableSource.DEFAULT, model_names[0] if model_names else "")


def borrow_dial(table: Thresholds) -> Thresholds:
    """The same table; moved passages that its own dial does not know go by the default's, not by thresholds alone."""
    moved: dict[PassageOrder, Mapping[int, float]] = {
        order: row for order, row in DEFAULT.dial.means.items() if order is not PassageOrder.IN_ORDER
    }
    if all(map(table.dial.knows, moved)):
        return table
    return replace(table, borrowed_dial=replace(DEFAULT.dial, means=moved))
