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
from dataclasses import asdict, dataclass, field, fields
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


def parse_experiment(table: Any, where: str = "configuration") -> Experiment:
    """Check what a YAML file holds and build the experiment; an error names file and field."""
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
    config = _Fields(where, table)
    families = config.read_names("workload_families")
    for family in families:
        if family not in FAMILIES:
            raise InputError(
                f"{where}, field workload_families: no family {family!r}", hint=f"one of {', '.join(FAMILIES)}"
            )
    modes = config.read_names("modes", EXPERIMENT_MODES)
    if not set(modes) <= set(EXPERIMENT_MODES):
        raise InputError(f"{where}, field modes: {', '.join(modes)}", hint="block, prefix or both")
    return Experiment(
        experiment_id=config.read_text("experiment_id"),
        workload_families=families,
        sessions=config.read_whole("num_sessions"),
        requests=config.read_whole("requests_per_session"),
        capacity_tokens=config.read_whole("cache_capacity_tokens"),
        seed=config.read_whole("seed", 0, least=0),
        policies=config.read_names("policies", SIX),
        modes=tuple(mode for mode in EXPERIMENT_MODES if mode in modes),
        latency=LatencyModel(
            config.read_real("base_ttft_ms", 80.0), config.read_real("token_latency_ms", 0.08), "configuration"
        ),
        arrivals=config.read_arrivals(),
        tenants=config.read_whole("tenants", 1),
        output_dir=config.read_text("output_dir", "outputs/experiments"),
        policy_options=config.read_options(),
        metadata=config.table.get("metadata") or {},
    )


class _Fields:
    """Reads typed fields of a table; an error names file and field."""

    def __init__(self, where: str, table: Mapping[str, Any]) -> None:
        self.where, self.table = where, table

    def _build_error(self, name: str, what: str) -> InputError:
        """Build the error for one field."""
        return InputError(f"{self.where}, field {name}: {what}", hint=_HINT)

    def _get(self, name: str, default: Any) -> Any:
        """Return a field or its default; raise InputError if there is neither."""
        value = self.table.get(name, default)
        if value is None:
            raise self._build_error(name, "is missing")
        return value

    def read_text(self, name: str, default: str | None = None) -> str:
        """Read a name; an experiment id may not hold a slash."""
        value = self._get(name, default)
        if not isinstance(value, str) or not value or ("/" in value and name == "experiment_id"):
            raise self._build_error(name, f"{value!r} is no name")
        return value

    def read_names(self, name: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """Read a list of names that is not empty."""
        value = self._get(name, default)
        if not isinstance(value, list | tuple) or not value or not all(isinstance(word, str) for word in value):
            raise self._build_error(name, "is not a list of names")
        return tuple(value)

    def read_whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Read a whole number of at least ``least``."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._build_error(name, f"{value!r} is not a whole number from {least} on")
        return value

    def read_real(self, name: str, default: float) -> float:
        """Read a number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._build_error(name, f"{value!r} is not a number")
        return float(value)

    def read_options(self) -> dict[str, dict[str, Any]]:
        """Read the options of policies: numbers by policy and name."""
        value = self.table.get("policy_options") or {}
        if not isinstance(value, Mapping) or not all(isinstance(one, Mapping) for one in value.values()):
            raise self._build_error("policy_options", "is not a table of tables: policy, option, number")
        for policy, options in value.items():
            for name, number in options.items():
                if isinstance(number, bool) or not isinstance(number, int | float):
                    raise self._build_error(f"policy_options.{policy}.{name}", f"{number!r} is not a number")
        return {policy: dict(options) for policy, options in value.items()}

    def read_arrivals(self) -> Arrivals:
        """Read the arrival process."""
        value = self.table.get("arrivals") or {}
        allowed = {one.name for one in fields(Arrivals)}
        if not isinstance(value, Mapping) or not set(value) <= allowed:
            raise self._build_error("arrivals", f"fields are {', '.join(sorted(allowed))}")
        try:
            return Arrivals(**value)
        except (TypeError, InputError) as error:
            raise self._build_error(
                "arrivals", error.message if isinstance(error, InputError) else str(error)
            ) from None


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
