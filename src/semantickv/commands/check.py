"""``semantickv check``: test that everything the other commands need is here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from semantickv.analysis.experiments import CONFIG_FOLDER, SIX, list_configs, load_experiment
from semantickv.simulator.capacity import Capacity
from semantickv.simulator.policies import POLICIES
from semantickv.simulator.simulate import simulate
from semantickv.workloads.families import generate_workload
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import table

APPLICATIONS = ("telemetry_proxy", "locality_router", "simulation_api")


def add(commands: Commands) -> None:
    parser = add_command(commands, "check", run, "check the installation, in a few seconds")
    parser.add_argument("--config-dir", default=str(CONFIG_FOLDER), metavar="DIR", help="folder of the configurations")


def run(args: argparse.Namespace) -> int:
    """Check packages, policies and experiment configurations without running the experiments; exit 1 if one fails."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("policies", _check_policies),
        ("simulator", _check_simulator),
        ("configurations", lambda: _check_configurations(Path(args.config_dir))),
        ("plots", lambda: _check_package("matplotlib")),
        ("YAML", lambda: _check_package("yaml")),
        ("compiled simulator", lambda: _check_package("numba")),
        ("applications", _check_applications),
    ]
    rows, failed = [], 0
    for name, check in checks:
        try:
            rows.append(("ok", name, check()))
        except ModuleNotFoundError as error:  # an extra that nobody asked for is no fault
            rows.append(("note", name, str(error)))
        except Exception as error:  # whatever is wrong is what this command is there to tell
            failed += 1
            rows.append(("FAILED", name, str(error)))
    print(table(rows, head=("", "what", "found")))
    return 1 if failed else 0


def _check_policies() -> str:
    """Check that the six policies of the source text exist; return their number in words."""
    missing = [name for name in SIX if name not in POLICIES]
    if missing:
        raise LookupError(f"no policy {', '.join(missing)}")
    return f"{len(POLICIES)} policies"


def _check_simulator() -> str:
    """Simulate a tiny workload whose hits are known; raise ArithmeticError if they differ."""
    trace = generate_workload(["repeated_system"], sessions=2, requests=2, seed=0)
    done = simulate(trace, "lru", Capacity.tokens(10_000), engine="plain")  # compiling would take longer than all else
    if done.block_hits != 3:
        raise ArithmeticError(f"3 of 8 blocks should hit, {done.block_hits} did")
    return "3 of 8 blocks hit, as they should (simulated)"


def _check_configurations(folder: Path) -> str:
    """Load every experiment configuration of a folder; return their ids."""
    found = list_configs(folder)
    if not found:
        raise LookupError(f"no .yaml under {folder}")
    return ", ".join(load_experiment(path).experiment_id for path in found)


def _check_applications() -> str:
    """Import the ASGI applications; none of them reads a setting before it is started."""
    for name in APPLICATIONS:
        try:
            application = import_module(f"semantickv.apps.{name}").app
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{name} needs {error.name}: pip install 'semblend-suite[edge]'") from None
        if not callable(application):
            raise TypeError(f"{name}.app is no application")
    return ", ".join(APPLICATIONS)


def _check_package(name: str) -> str:
    """Check that a Python package is installed."""
    if find_spec(name) is None:
        raise ModuleNotFoundError(f"the package {name} is not installed: pip install 'semblend-suite[lab]'")
    return name
