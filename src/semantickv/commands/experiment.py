"""``semantickv experiment``: run the configured experiments and write their files. Simulated."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from semantickv.analysis.experiments import (
    CONFIG_FOLDER,
    Experiment,
    ExperimentOutcome,
    list_configs,
    load_experiment,
    run_experiment,
)
from semantickv.analysis.latency import compute_gain
from semantickv.output import files
from semantickv.output.files import check_parent, make_folder
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, print_json, say, table
from semblend.errors import InputError

EXAMPLES = ("semantickv experiment run --config low_memory_rag_stress", "semantickv experiment all")


def add(commands: Commands) -> None:
    parser = add_command(commands, "experiment", run, "run experiments from YAML configurations", examples=EXAMPLES)
    flag = parser.add_argument
    flag("what", choices=("run", "all"), help="run: those of --config; all: every file of --config-dir, with a summary")
    flag(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="a YAML file, or the name of one in --config-dir, or 'all'; may be given several times",
    )
    flag("--config-dir", default=str(CONFIG_FOLDER), metavar="DIR", help="folder of the configurations")
    flag("--output-dir", metavar="DIR", help="parent of the result folders (default: the configuration's)")
    flag("--policies", nargs="+", metavar="NAME", help="other policies than the configuration's")
    flag("--seed", type=int, metavar="N", help="another seed than the configuration's")
    flag("--no-plots", action="store_true", help="write no pictures")
    flag("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> int:
    """Run experiments on made-up workloads: several policies, block mode and prefix mode, files and plots.

    Everything is simulated.
    """
    everything = args.what == "all" or "all" in args.config
    experiments = [_apply_flags(load_experiment(path), args) for path in _choose_configs(args, everything)]
    for experiment in experiments:
        check_parent(experiment.output_dir)
    done: list[tuple[ExperimentOutcome, Path]] = []
    for experiment in experiments:
        with Progress() as progress:
            outcome = run_experiment(experiment, progress=progress.show)
        folder = make_folder(experiment.output_dir, experiment.experiment_id)
        files.write_experiment(outcome, folder, pictures=not args.no_plots)
        done.append((outcome, folder))
    if everything:
        parent = Path(args.output_dir or experiments[0].output_dir)
        files.write_aggregate([outcome for outcome, _ in done], parent)
        say(f"wrote {parent / 'aggregate_summary.csv'} and .md")
    _print_results(done, as_json=args.json)
    return 0


def _choose_configs(args: argparse.Namespace, everything: bool) -> list[str | Path]:
    """Return the configuration files that the flags ask for."""
    named = [config for config in args.config if config != "all"]
    if not everything:
        if not named:
            raise InputError("experiment run needs --config", hint="--config configs/experiments/NAME.yaml, or all")
        inside = {name: Path(args.config_dir) / f"{name}.yaml" for name in named}
        return [inside[name] if not Path(name).exists() and inside[name].exists() else name for name in named]
    if named:
        raise InputError("--config and all exclude each other", hint="name files, or run all of them")
    found: list[str | Path] = [*list_configs(Path(args.config_dir))]
    if not found:
        raise InputError(f"{args.config_dir} holds no .yaml files", hint="pass --config-dir")
    return found


def _apply_flags(experiment: Experiment, args: argparse.Namespace) -> Experiment:
    """Return the experiment with the values that the flags give in place of the configuration's."""
    changes: dict[str, Any] = {}
    if args.output_dir:
        changes["output_dir"] = args.output_dir
    if args.policies:
        changes["policies"] = tuple(args.policies)
    if args.seed is not None:
        changes["seed"] = args.seed
    return replace(experiment, **changes)


def _print_results(done: list[tuple[ExperimentOutcome, Path]], *, as_json: bool) -> None:
    """Print one row for each experiment, mode and policy, or everything as JSON."""
    if as_json:
        print_json([outcome.as_json() | {"folder": str(folder)} for outcome, folder in done])
        return
    rows = []
    for outcome, _ in done:
        for mode, records in outcome.records.items():
            for record in records:
                gain = compute_gain(records, record["policy"])
                rows.append(
                    (
                        outcome.experiment.experiment_id,
                        mode,
                        record["policy"],
                        f"{record['block_hit_rate']:.2%}",
                        f"{record['avg_ttft_ms']:.2f}",
                        "" if gain is None else f"{gain:+.2%}",
                    )
                )
    head = ("experiment", "mode", "policy", "block hits", "avg TTFT ms (simulated)", "against LRU")
    print(table(rows, head=head, right=(3, 4, 5)))
    for _, folder in done:
        say(f"wrote {folder}")
