"""Experiments: a workload made from a seed, several policies, and the files that tell how they compare. Simulated.

Every experiment runs in two modes: *block*, where each block may hit by itself (what the source text simulates, and
what position-independent reuse could give), and *prefix*, where a block hits only if everything before it hits (what
prefix caches do). Its configuration is YAML with the fields of `Experiment`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from semantickv.analysis.latency import BOUNDS, LatencyModel, policy_record
from semantickv.simulator.capacity import Capacity
from semantickv.simulator.forest import Forest, Mode, plant
from semantickv.simulator.simulate import Simulated, simulate
from semantickv.traces.trace import Trace, describe_trace
from semantickv.workloads.arrivals import Arrivals
from semantickv.workloads.families import FAMILIES, workload
from semblend.errors import InputError, MissingDependencyError

SIX: Final = ("fifo", "lru", "lfu", "size_aware_lru", "static_semantic", "adaptive_semantic")
MODES: Final[tuple[Mode, ...]] = ("block", "prefix")
CONFIG_FOLDER = Path("configs/experiments")
SHIPPED_CONFIGS = Path(__file__).parents[1] / "configs"  # the same files, for an installation without the checkout
CHECKPOINTS = 24
_HINT = "see configs/experiments for complete files"


@dataclass(frozen=True)
class Experiment:
    """One experiment: which traffic, how much room, which policies.

    >>> Experiment("x", ("repeated_system",), sessions=2, requests=2, capacity_tokens=500).trace().block_accesses
    8
    """

    experiment_id: str
    workload_families: tuple[str, ...]
    sessions: int
    requests: int
    capacity_tokens: int
    seed: int = 0
    policies: tuple[str, ...] = SIX
    modes: tuple[Mode, ...] = MODES
    latency: LatencyModel = LatencyModel()  # noqa: RUF009  # frozen
    arrivals: Arrivals = Arrivals()  # noqa: RUF009  # frozen
    tenants: int = 1
    output_dir: str = "outputs/experiments"
    policy_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def simulated(self, forest: Forest, policy: str) -> Simulated:
        """One policy over this experiment's traffic, or over the first part of it."""
        capacity = Capacity.tokens(self.capacity_tokens)
        return simulate(forest, policy, capacity, seed=self.seed, **self.policy_options.get(policy, {}))

    def trace(self) -> Trace:
        return workload(
            self.workload_families,
            sessions=self.sessions,
            requests=self.requests,
            seed=self.seed,
            arrivals=self.arrivals,
            tenants=self.tenants,
        )


@dataclass(frozen=True)
class Outcome:
    """What an experiment gave: one record a policy for each mode, and how things moved over time."""

    experiment: Experiment
    trace: Trace
    records: Mapping[str, list[dict[str, Any]]]
    weights_over_time: Mapping[str, Mapping[str, tuple[list[float], list[float]]]]
    utilization_over_time: Mapping[str, Mapping[str, tuple[list[float], list[float]]]]

    def as_json(self) -> dict[str, Any]:
        spec = asdict(self.experiment) | {"latency": self.experiment.latency.as_json()}
        return {
            "simulated": True,
            "experiment_id": self.experiment.experiment_id,
            "config": spec | {"metadata": dict(self.experiment.metadata)},
            "workload": describe_trace(self.trace),
            "modes": self.records,
            "weights_over_time": _series(self.weights_over_time),
            "utilization_over_time": _series(self.utilization_over_time),
        }


def run(experiment: Experiment, *, over_time: bool = True) -> Outcome:
    """Simulate every policy in every mode; the same experiment gives the same numbers on every machine."""
    trace = experiment.trace()
    records: dict[str, list[dict[str, Any]]] = {}
    weights: dict[str, Any] = {}
    used: dict[str, Any] = {}
    for mode in experiment.modes:
        forest = plant(trace, mode)
        done = [experiment.simulated(forest, policy) for policy in experiment.policies]
        records[mode] = [policy_record(trace, one, experiment.latency) for one in done]
        weights[mode], used[mode] = _over_time(experiment, trace, mode) if over_time else ({}, {})
    return Outcome(experiment, trace, records, weights, used)


def _over_time(experiment: Experiment, trace: Trace, mode: Mode) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and use of memory after each part of the trace.

    A run over the first part of a trace is the first part of the run, so both follow from runs of growing length.
    """
    ends = sorted({max(1, len(trace) * step // CHECKPOINTS) for step in range(1, CHECKPOINTS + 1)})
    weights: dict[str, tuple[list[float], list[float]]] = {}
    policies = [policy for policy in experiment.policies if policy not in BOUNDS]  # a shorter future is another one
    used: dict[str, tuple[list[float], list[float]]] = {policy: ([], []) for policy in policies}
    filled = dict.fromkeys(policies, 0.0)
    before = 0
    for end in ends:
        forest = plant(trace.head(end), mode)
        for policy in policies:
            done = experiment.simulated(forest, policy)
            total = done.utilization * end
            used[policy][0].append(end)
            used[policy][1].append(max(0.0, (total - filled[policy]) / (end - before)))
            filled[policy] = total
            if policy == "adaptive_semantic":
                for kind, weight in done.weights.items():
                    at, values = weights.setdefault(kind, ([], []))
                    at.append(end)
                    values.append(weight)
        before = end
    present = {trace.type_names[kind] for kind in np.unique(trace.types)}
    return {kind: line for kind, line in weights.items() if kind in present or kind not in trace.type_names}, used


def _series(panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]]) -> dict[str, Any]:
    return {
        mode: {name: [[x, round(y, 6)] for x, y in zip(*line, strict=True)] for name, line in lines.items()}
        for mode, lines in panels.items()
    }


# -- configurations --------------------------------------------------------------------------------------------------


def config_files(folder: Path) -> list[Path]:
    """The configurations in a folder; those that ship with the package where the usual folder is not there."""
    if folder == CONFIG_FOLDER and not folder.is_dir():
        folder = SHIPPED_CONFIGS
    return sorted(folder.glob("*.yaml"))


def find_config(path: str | Path) -> Path:
    """A YAML file by path, or by name: under configs/experiments, then among those that ship with the package."""
    given = Path(path)
    if given.exists() or given.parent not in (Path(), CONFIG_FOLDER):
        return given
    name = f"{given.name.removesuffix('.yaml')}.yaml"
    return next((folder / name for folder in (CONFIG_FOLDER, SHIPPED_CONFIGS) if (folder / name).exists()), given)


def load(path: str | Path) -> Experiment:
    """An experiment from a YAML file, or from the name of one; see `find_config`."""
    file = find_config(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InputError(f"cannot read {file}: {what}", hint=_HINT) from None
    yaml = _yaml()
    try:
        table = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{file} is not YAML: {' '.join(str(error).split())}", hint=_HINT) from None
    return parse(table, str(file))


def parse(table: Any, where: str = "configuration") -> Experiment:
    """An experiment from what a YAML file holds; every complaint names the field."""
    if not isinstance(table, Mapping):
        raise InputError(f"{where} holds no fields", hint=_HINT)
    known = {
        "experiment_id", "seed", "policies", "workload_families", "num_sessions", "requests_per_session",
        "cache_capacity_tokens", "token_latency_ms", "base_ttft_ms", "output_dir", "metadata", "semantic_classifier",
        "modes", "arrivals", "tenants", "policy_options",
    }  # fmt: skip
    unknown = sorted(set(table) - known)
    if unknown:
        raise InputError(f"{where}: unknown field {unknown[0]}", hint=f"fields: {', '.join(sorted(known))}")
    read = _Fields(where, table)
    families = read.names("workload_families")
    for family in families:
        if family not in FAMILIES:
            raise InputError(
                f"{where}, field workload_families: no family {family!r}", hint=f"one of {', '.join(FAMILIES)}"
            )
    modes = read.names("modes", MODES)
    if not set(modes) <= set(MODES):
        raise InputError(f"{where}, field modes: {', '.join(modes)}", hint="block, prefix or both")
    return Experiment(
        experiment_id=read.text("experiment_id"),
        workload_families=families,
        sessions=read.whole("num_sessions"),
        requests=read.whole("requests_per_session"),
        capacity_tokens=read.whole("cache_capacity_tokens"),
        seed=read.whole("seed", 0, least=0),
        policies=read.names("policies", SIX),
        modes=tuple(mode for mode in MODES if mode in modes),
        latency=LatencyModel(read.real("base_ttft_ms", 80.0), read.real("token_latency_ms", 0.08), "configuration"),
        arrivals=read.arrivals(),
        tenants=read.whole("tenants", 1),
        output_dir=read.text("output_dir", "outputs/experiments"),
        policy_options=read.options(),
        metadata=read.table.get("metadata") or {},
    )


class _Fields:
    """Typed access to a table, with messages that name file and field."""

    def __init__(self, where: str, table: Mapping[str, Any]) -> None:
        self.where, self.table = where, table

    def _bad(self, name: str, what: str) -> InputError:
        return InputError(f"{self.where}, field {name}: {what}", hint=_HINT)

    def _get(self, name: str, default: Any) -> Any:
        value = self.table.get(name, default)
        if value is None:
            raise self._bad(name, "is missing")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str) or not value or ("/" in value and name == "experiment_id"):
            raise self._bad(name, f"{value!r} is no name")
        return value

    def names(self, name: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        value = self._get(name, default)
        if not isinstance(value, list | tuple) or not value or not all(isinstance(word, str) for word in value):
            raise self._bad(name, "is not a list of names")
        return tuple(value)

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._bad(name, f"{value!r} is not a whole number from {least} on")
        return value

    def real(self, name: str, default: float) -> float:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._bad(name, f"{value!r} is not a number")
        return float(value)

    def options(self) -> dict[str, dict[str, Any]]:
        """Numbers by policy and name, passed to the policy."""
        value = self.table.get("policy_options") or {}
        if not isinstance(value, Mapping) or not all(isinstance(one, Mapping) for one in value.values()):
            raise self._bad("policy_options", "is not a table of tables: policy, option, number")
        for policy, options in value.items():
            for name, number in options.items():
                if isinstance(number, bool) or not isinstance(number, int | float):
                    raise self._bad(f"policy_options.{policy}.{name}", f"{number!r} is not a number")
        return {policy: dict(options) for policy, options in value.items()}

    def arrivals(self) -> Arrivals:
        value = self.table.get("arrivals") or {}
        allowed = {one.name for one in fields(Arrivals)}
        if not isinstance(value, Mapping) or not set(value) <= allowed:
            raise self._bad("arrivals", f"fields are {', '.join(sorted(allowed))}")
        try:
            return Arrivals(**value)
        except (TypeError, InputError) as error:
            raise self._bad("arrivals", error.message if isinstance(error, InputError) else str(error)) from None


def _yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ModuleNotFoundError:
        raise MissingDependencyError(
            "experiment configurations need the package yaml", hint="pip install 'semblend-suite[lab]'"
        ) from None
