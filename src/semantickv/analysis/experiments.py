"""Several policies over one trace: experiments on generated workloads, and replays of recorded traces. Simulated.

An experiment runs in two modes. In *block* mode each block may hit by itself: the source text simulates this, and it is
what position-independent reuse could give. In *prefix* mode a block hits only if everything before it hits, as in a
prefix cache. Its configuration is a YAML file with the fields of `Experiment`.

A fair sentence about a replay: "on replay of the same trace, this policy would have kept more reusable tokens, under
this latency model". It is not a measurement of a server.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from semantickv.analysis.latency import (
    BOUNDS,
    SIMULATED_NOTE,
    Calibration,
    LatencyModel,
    Observations,
    build_policy_record,
    estimate_request_ttfts_ms,
)
from semantickv.simulator.capacity import Capacity
from semantickv.simulator.forest import Forest, Mode, build_forest
from semantickv.simulator.simulate import SimulationResult, simulate
from semantickv.traces.trace import Trace, describe_trace
from semantickv.workloads.families import FAMILIES, Arrivals, generate_workload
from semblend.errors import InputError, MissingDependencyError

SIX: Final = ("fifo", "lru", "lfu", "size_aware_lru", "static_semantic", "adaptive_semantic")
EXPERIMENT_MODES: Final[tuple[Mode, ...]] = ("block", "prefix")
CONFIG_FOLDER = Path("configs/experiments")
SHIPPED_CONFIGS = Path(__file__).parents[1] / "configs"  # the same files, for an installation without the checkout
CHECKPOINTS = 24
_HINT = "see configs/experiments for complete files"


@dataclass(frozen=True)
class Experiment:
    """One experiment: which traffic, how much room, which policies.

    >>> Experiment("x", ("repeated_system",), sessions=2, requests=2, capacity_tokens=500).build_trace().block_accesses
    8
    """

    experiment_id: str
    workload_families: tuple[str, ...]
    sessions: int
    requests: int
    capacity_tokens: int
    seed: int = 0
    policies: tuple[str, ...] = SIX
    modes: tuple[Mode, ...] = EXPERIMENT_MODES
    latency: LatencyModel = LatencyModel()  # noqa: RUF009  # frozen
    arrivals: Arrivals = Arrivals()  # noqa: RUF009  # frozen
    tenants: int = 1
    output_dir: str = "outputs/experiments"
    policy_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def simulate_policy(self, forest: Forest, policy: str) -> SimulationResult:
        """Simulate one policy over this experiment's traffic, or over the first part of it."""
        capacity = Capacity.tokens(self.capacity_tokens)
        return simulate(forest, policy, capacity, seed=self.seed, **self.policy_options.get(policy, {}))

    def build_trace(self) -> Trace:
        """Generate the requests of this experiment from its seed."""
        return generate_workload(
            self.workload_families,
            sessions=self.sessions,
            requests=self.requests,
            seed=self.seed,
            arrivals=self.arrivals,
            tenants=self.tenants,
        )


@dataclass(frozen=True)
class ExperimentOutcome:
    """The result of an experiment: one record for each policy and mode, and how values changed over time."""

    experiment: Experiment
    trace: Trace
    records: Mapping[str, list[dict[str, Any]]]
    weights_over_time: Mapping[str, Mapping[str, tuple[list[float], list[float]]]]
    utilization_over_time: Mapping[str, Mapping[str, tuple[list[float], list[float]]]]

    def as_json(self) -> dict[str, Any]:
        """Return the result in the names of results.json."""
        spec = asdict(self.experiment) | {"latency": self.experiment.latency.as_json()}
        return {
            "simulated": True,
            "experiment_id": self.experiment.experiment_id,
            "config": spec | {"metadata": dict(self.experiment.metadata)},
            "workload": describe_trace(self.trace),
            "modes": self.records,
            "weights_over_time": _list_points(self.weights_over_time),
            "utilization_over_time": _list_points(self.utilization_over_time),
        }


def run_experiment(
    experiment: Experiment, *, over_time: bool = True, progress: Callable[[str], None] | None = None
) -> ExperimentOutcome:
    """Simulate every policy in every mode; the same experiment gives the same numbers on every machine."""
    trace = experiment.build_trace()
    records: dict[str, list[dict[str, Any]]] = {}
    weights: dict[str, Any] = {}
    used: dict[str, Any] = {}
    for mode in experiment.modes:
        if progress is not None:
            progress(f"{experiment.experiment_id}: {len(experiment.policies)} policies in {mode} mode")
        forest = build_forest(trace, mode)
        done = [experiment.simulate_policy(forest, policy) for policy in experiment.policies]
        records[mode] = [build_policy_record(trace, one, experiment.latency) for one in done]
        weights[mode], used[mode] = _simulate_growing_parts(experiment, trace, mode) if over_time else ({}, {})
    return ExperimentOutcome(experiment, trace, records, weights, used)


def _simulate_growing_parts(experiment: Experiment, trace: Trace, mode: Mode) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the learned weights and the used share of the cache after each part of the trace, for one mode.

    A run over the first part of a trace equals the first part of the run, so both come from runs of growing length.
    """
    ends = sorted({max(1, len(trace) * step // CHECKPOINTS) for step in range(1, CHECKPOINTS + 1)})
    weights: dict[str, tuple[list[float], list[float]]] = {}
    policies = [policy for policy in experiment.policies if policy not in BOUNDS]  # a shorter future is another one
    used: dict[str, tuple[list[float], list[float]]] = {policy: ([], []) for policy in policies}
    filled = dict.fromkeys(policies, 0.0)
    before = 0
    for end in ends:
        forest = build_forest(trace.take_first(end), mode)
        for policy in policies:
            done = experiment.simulate_policy(forest, policy)
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


def _list_points(panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]]) -> dict[str, Any]:
    """Convert curves to lists of [x, y] pairs, rounded for JSON."""
    return {
        mode: {name: [[x, round(y, 6)] for x, y in zip(*line, strict=True)] for name, line in lines.items()}
        for mode, lines in panels.items()
    }


# -- configurations --------------------------------------------------------------------------------------------------


def list_configs(folder: Path) -> list[Path]:
    """List the YAML files in a folder; if the usual folder is missing, those that ship with the package."""
    if folder == CONFIG_FOLDER and not folder.is_dir():
        folder = SHIPPED_CONFIGS
    return sorted(folder.glob("*.yaml"))


def find_config(path: str | Path) -> Path:
    """Find a YAML file by path, or by its name under configs/experiments or in the package."""
    given = Path(path)
    if given.exists() or given.parent not in (Path(), CONFIG_FOLDER):
        return given
    name = f"{given.name.removesuffix('.yaml')}.yaml"
    return next((folder / name for folder in (CONFIG_FOLDER, SHIPPED_CONFIGS) if (folder / name).exists()), given)


def load_experiment(path: str | Path) -> Experiment:
    """Load an experiment from a YAML file, or from the name of one; see `find_config`."""
    file = find_config(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not UTF-8"
        shipped = ", ".join(one.stem for one in sorted(SHIPPED_CONFIGS.glob("*.yaml")))
        raise InputError(f"cannot read {file}: {what}", hint=f"a YAML file, or one of {shipped}") from None
    yaml = _import_yaml()
    try:
        table = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{file} is not YAML: {' '.join(str(error).split())}", hint=_HINT) from None
    return parse_experiment(table, str(file))


def _is_whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(word, str) for word in value)


_WHOLE, _NAMES = (_is_whole, "is not a whole number from 1 on"), (_are_names, "is not a list of names")
_REAL, _TABLE = (_is_real, "is not a number"), (lambda value: isinstance(value, Mapping), "is not a table")
_FIELDS: Final[Mapping[str, tuple[str, tuple[Callable[[Any], bool], str]]]] = {
    "experiment_id": ("experiment_id", (lambda value: _is_name(value) and "/" not in value, "is no name")),
    "workload_families": ("workload_families", _NAMES),
    "num_sessions": ("sessions", _WHOLE),
    "requests_per_session": ("requests", _WHOLE),
    "cache_capacity_tokens": ("capacity_tokens", _WHOLE),
    "seed": ("seed", (lambda value: _is_whole(value, 0), "is not a whole number from 0 on")),
    "policies": ("policies", _NAMES),
    "modes": ("modes", _NAMES),
    "base_ttft_ms": ("base_ttft_ms", _REAL),
    "token_latency_ms": ("token_latency_ms", _REAL),
    "arrivals": ("arrivals", _TABLE),
    "tenants": ("tenants", _WHOLE),
    "output_dir": ("output_dir", (_is_name, "is no name")),
    "policy_options": ("policy_options", _TABLE),
    "metadata": ("metadata", _TABLE),
    "semantic_classifier": ("", (lambda _: True, "")),  # the source text's files name one
}
"""What a configuration may hold: the field of `Experiment` that it gives, and what its value must be."""
_NEEDED: Final = (
    "experiment_id", "workload_families", "num_sessions", "requests_per_session", "cache_capacity_tokens"
)  # fmt: skip


def parse_experiment(table: Any, where: str = "configuration") -> Experiment:
    """Check what a YAML file holds and build the experiment; an error names file and field."""
    if not isinstance(table, Mapping):
        raise InputError(f"{where} holds no fields", hint=_HINT)
    for name in [*sorted(set(table) - set(_FIELDS)), *(name for name in _NEEDED if table.get(name) is None)]:
        told = f"field {name}: is missing" if name in _FIELDS else f"unknown field {name}"
        raise InputError(f"{where}, {told}", hint=f"fields: {', '.join(sorted(_FIELDS))}")
    given: dict[str, Any] = {}
    for name, (known, (holds, words)) in _FIELDS.items():
        value = table.get(name)
        if value is not None and not holds(value):
            raise InputError(f"{where}, field {name}: {value!r} {words}", hint=_HINT)
        if value is not None and known:
            given[known] = tuple(value) if isinstance(value, list) else value
    for name, known_names in (("workload_families", FAMILIES), ("modes", EXPERIMENT_MODES)):
        other = next((one for one in given.get(name, ()) if one not in known_names), None)
        if other is not None:
            raise InputError(f"{where}, field {name}: no {other!r}", hint=f"one of {', '.join(known_names)}")
    for policy, options in given.get("policy_options", {}).items():
        values = options if isinstance(options, Mapping) else {"": options}
        for name in (name for name, value in values.items() if not (name and _is_real(value))):
            raise InputError(f"{where}, field policy_options.{policy}.{name}: is not a number", hint=_HINT)
    try:
        given["arrivals"] = Arrivals(**given.get("arrivals", {}))
    except (TypeError, InputError) as error:
        told = error.message if isinstance(error, InputError) else str(error)
        raise InputError(f"{where}, field arrivals: {told}", hint=_HINT) from None
    base, each = float(given.pop("base_ttft_ms", 80.0)), float(given.pop("token_latency_ms", 0.08))
    modes = tuple(mode for mode in EXPERIMENT_MODES if mode in given.pop("modes", EXPERIMENT_MODES))
    return Experiment(modes=modes, latency=LatencyModel(base, each, "configuration"), **given)


def _import_yaml() -> Any:
    """Import the yaml package, or raise an error that says how to install it."""
    try:
        return importlib.import_module("yaml")
    except ModuleNotFoundError:
        raise MissingDependencyError(
            "experiment configurations need the package yaml", hint="pip install 'semblend-suite[lab]'"
        ) from None


DEFAULT_POLICIES = ("lru", "adaptive_semantic", "static_semantic")
CHAINED_NOTE = (
    "This trace's ids stand for a block and everything before it: it cannot show what reuse independent of position "
    "would add, and block mode over it equals prefix mode up to evicted beginnings."
)


@dataclass(frozen=True, eq=False)
class Replay:
    """Every policy's record, the simulated time of every request, and where the latency line came from."""

    trace: Trace
    capacity: Capacity
    mode: Mode
    latency: LatencyModel
    records: list[dict[str, Any]]
    ttft_ms: Mapping[str, npt.NDArray[np.float64]]
    calibration: Calibration | None = None
    observed: Observations | None = field(default=None, repr=False)

    def as_json(self) -> dict[str, Any]:
        """Return the result in the names of replay_results.json."""
        return {
            "simulated": True,
            "note": SIMULATED_NOTE,
            "trace": describe_trace(self.trace) | {"format": self.trace.format, "skipped_lines": self.trace.skipped},
            "capacity": {"size": self.capacity.size, "unit": self.capacity.unit, "label": self.capacity.label},
            "mode": self.mode,
            "latency": self.latency.as_json(),
            "calibration": None if self.calibration is None else self.calibration.as_json(),
            "policies": self.records,
        }


def replay(
    trace: Trace,
    capacity: Capacity,
    policies: Sequence[str] = DEFAULT_POLICIES,
    *,
    mode: Mode = "prefix",
    latency: LatencyModel | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Replay:
    """Simulate the same requests, in order, with each policy, and estimate their times to first token."""
    model = latency or LatencyModel()
    forest = build_forest(trace, mode)
    done = []
    for number, policy in enumerate(policies):
        if progress is not None:
            progress(f"{policy}: {number + 1} of {len(policies)} policies, {len(trace):,} requests")
        done.append(simulate(forest, policy, capacity, seed=seed))
    return Replay(
        trace,
        capacity,
        mode,
        model,
        [build_policy_record(trace, one, model) for one in done],
        {one.policy: estimate_request_ttfts_ms(trace, one, model) for one in done},
    )
