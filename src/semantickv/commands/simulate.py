"""Commands that simulate: experiment, replay, tiers, advise, policies, and check, which tests the installation."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from semantickv.analysis.advice import DEFAULT_GPU, ENGINES, Costs
from semantickv.analysis.advise import Question, advise
from semantickv.analysis.experiments import (
    CHAINED_NOTE,
    CONFIG_FOLDER,
    DEFAULT_POLICIES,
    Experiment,
    ExperimentOutcome,
    list_configs,
    load_experiment,
    replay,
    run_experiment,
)
from semantickv.analysis.latency import (
    Calibration,
    LatencyModel,
    Observations,
    calibrate,
    compute_gain,
    read_observations,
)
from semantickv.analysis.tiers import DECODE_MS, Speed, Tier, TieredRun, replay_tiers
from semantickv.output import advise as advise_output
from semantickv.output import files
from semantickv.output.files import check_parent, describe_calibration, make_folder, write_replay
from semantickv.simulator.capacity import DTYPE_BYTES, KV_SHAPES, Capacity, count_kv_bytes_per_token
from semantickv.simulator.forest import build_forest
from semantickv.simulator.plain import PlainPolicy
from semantickv.simulator.policies import POLICIES, Policy
from semantickv.simulator.simulate import simulate
from semantickv.traces.formats import FORMATS
from semantickv.traces.trace import Trace
from semantickv.workloads.families import generate_workload
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, print_json, say, table
from semblend.errors import InputError
from semblend.prices import TIERS, load_price_book

EXPERIMENT_EXAMPLES = ("semantickv experiment run --config low_memory_rag_stress", "semantickv experiment all")


def add(commands: Commands) -> None:
    """Declare the commands of this module."""
    _add_experiment(commands)
    _add_replay(commands)
    _add_tiers(commands)
    _add_advise(commands)
    _add_policies(commands)
    _add_check(commands)


def _add_experiment(commands: Commands) -> None:
    parser = add_command(
        commands,
        "experiment",
        run_experiments,
        "run experiments from YAML configurations",
        examples=EXPERIMENT_EXAMPLES,
    )
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


def run_experiments(args: argparse.Namespace) -> int:
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
    _print_outcomes(done, as_json=args.json)
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


def _print_outcomes(done: list[tuple[ExperimentOutcome, Path]], *, as_json: bool) -> None:
    """Print one row for each experiment, mode and policy, or everything as JSON."""
    if as_json:
        print_json([outcome.as_json() | {"folder": str(folder)} for outcome, folder in done])
        return
    rows = [
        (outcome.experiment.experiment_id, mode, *row)
        for outcome, _ in done
        for mode, records in outcome.records.items()
        for row in _format_records(records)
    ]
    print(table(rows, head=("experiment", "mode", *_RECORD_HEAD), right=tuple(range(3, 9))))
    for _, folder in done:
        say(f"wrote {folder}")


REPLAY_EXAMPLES = ("semantickv replay --trace trace.jsonl --cache-gib 40 --policies lru adaptive_semantic",)


def _add_replay(commands: Commands) -> None:
    parser = add_command(
        commands, "replay", run_replay, "replay a trace through several policies", examples=REPLAY_EXAMPLES
    )
    flag = parser.add_argument
    add_trace_flags(parser)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--cache-token-budget", type=int, metavar="N", help="size of the cache in tokens")
    size.add_argument("--cache-block-budget", type=int, metavar="N", help="size of the cache in blocks")
    size.add_argument("--cache-gib", type=float, metavar="GIB", help="size of the cache in GiB of --model's KV")
    _add_kv_flags(parser)
    flag(
        "--policies",
        nargs="+",
        default=list(DEFAULT_POLICIES),
        metavar="NAME",
        help=f"policies to compare (default: {' '.join(DEFAULT_POLICIES)}); see semantickv policies",
    )
    flag(
        "--mode",
        choices=("prefix", "block"),
        default="prefix",
        help="prefix: a block hits if all before it hit; block: each by itself",
    )
    add_latency_flags(parser)
    flag("--no-plots", action="store_true", help="write no pictures")
    _add_output_flags(parser, "outputs/traces", "replay")


def run_replay(args: argparse.Namespace) -> int:
    """Replay a trace (our JSONL, Mooncake, Bailian, Azure, logs and KV events of engines; plain or gzip) through
    several cache policies. The cache holds metadata and times follow a straight line: everything reported is
    simulated.
    """
    capacity = _read_capacity(args)
    if "/" in args.output_name or not args.output_name:
        raise InputError(f"--output-name {args.output_name!r} is no name", hint="the folder goes into --output-dir")
    check_parent(args.output_dir)
    trace = read_trace(args)
    latency, fitted, seen = choose_latency(args, trace)
    with Progress() as progress:
        result = replay(
            trace, capacity, args.policies, mode=args.mode, latency=latency, seed=args.seed, progress=progress.show
        )
    result = replace(result, calibration=fitted, observed=seen)
    folder = make_folder(args.output_dir, args.output_name)
    write_replay(result, folder, pictures=not args.no_plots)
    if args.json:
        print_json(result.as_json())
    else:
        print(table(_format_records(result.records), head=_RECORD_HEAD, right=tuple(range(1, 7))))
    if trace.chained and args.mode == "block":
        say(CHAINED_NOTE)
    for line in describe_calibration(fitted) if fitted else ():
        say(f"calibration {line}")
    say(f"wrote {folder}")
    return 0


def _read_capacity(args: argparse.Namespace) -> Capacity:
    """Read the cache size from whichever flag was given."""
    for name in ("cache_token_budget", "cache_block_budget", "cache_gib"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 2**62:
            raise InputError(f"--{name.replace('_', '-')} {value} must be above 0")
    if args.cache_gib is not None:
        return Capacity.bytes(int(args.cache_gib * 2**30), args.model, args.dtype)
    if args.cache_block_budget is not None:
        return Capacity.blocks(args.cache_block_budget)
    return Capacity.tokens(args.cache_token_budget)


_RECORD_HEAD = (
    "policy", "block hits", "token hits", "tokens saved", "evictions", "avg TTFT ms (simulated)", "against LRU"
)  # fmt: skip


def _format_records(records: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Format one row for each policy."""
    gains = [compute_gain(records, record["policy"]) for record in records]
    return [
        (
            record["policy"],
            f"{record['block_hit_rate']:.2%}",
            f"{record['token_hit_rate']:.2%}",
            f"{record['tokens_saved']:,}",
            f"{record['evictions']:,}",
            f"{record['avg_ttft_ms']:.2f}",
            "" if gain is None else f"{gain:+.2%}",
        )
        for record, gain in zip(records, gains, strict=True)
    ]


TIER_NAMES = {"device": "hbm", "host": "dram", "disk": "ssd"}

TIERS_EXAMPLES = ("semantickv tiers --trace trace.jsonl --device-gib 20 --host-gib 200",)


def _add_tiers(commands: Commands) -> None:
    parser = add_command(
        commands,
        "tiers",
        run_tiers,
        "simulate a cache on device, host and disk: hits and times to first token",
        examples=TIERS_EXAMPLES,
    )
    flag = parser.add_argument
    add_trace_flags(parser)
    _add_kv_flags(parser)
    _add_price_flags(parser)
    flag("--device-gib", type=float, required=True, metavar="GIB", help="KV memory of the device, in GiB")
    flag("--host-gib", type=float, default=0.0, metavar="GIB", help="KV memory of the host, in GiB (default: none)")
    flag("--disk-gib", type=float, default=0.0, metavar="GIB", help="KV memory of the disk, in GiB (default: none)")
    flag("--decode-ms", type=float, default=DECODE_MS, metavar="MS", help="time of a token of the answer, in ms")
    flag("--json", action="store_true", help="print the results as JSON")


def run_tiers(args: argparse.Namespace) -> int:
    """Replay a trace through a cache on the device, the host and the disk: hits by tier, and times to first token from
    prefill rates and bandwidths. Running requests hold their blocks, and a request that finds no room waits. The
    policy is LRU. Everything reported is simulated.
    """
    if not 0 <= args.decode_ms < float("inf"):
        raise InputError(f"--decode-ms {args.decode_ms:g} must be finite and not negative")
    book = load_price_book(args.prices)
    token_bytes = count_kv_bytes_per_token(args.model, args.dtype)
    tiers = []
    for name, kind in TIER_NAMES.items():
        gib = getattr(args, f"{name}_gib")
        if not 0 <= gib < 2**40 or (name == "device" and not gib):
            raise InputError(f"--{name}-gib {gib:g} must be above 0")
        costs = Costs.find(book, model=args.model, gpu=args.gpu, tier=kind, token_bytes=token_bytes)
        if gib:
            tiers.append(Tier(name, int(gib * 2**30) // token_bytes, costs.load_ms_per_token))
    rate = book.find_prefill(args.model, args.gpu)
    speed = Speed(rate.base_ms, rate.ms_per_token, args.decode_ms)
    trace = read_trace(args)
    if not trace.holds_content:
        raise InputError(
            f"{trace.name} says how long prompts were and not what they held", hint="see semantickv collect"
        )
    forest = build_forest(trace, "prefix")
    runs = []
    with Progress() as progress:
        for count in range(1, len(tiers) + 1):
            progress.show(f"{' and '.join(tier.name for tier in tiers[:count])}: {len(trace):,} requests")
            runs.append(replay_tiers(forest, tiers[:count], speed))
    if args.json:
        print_json({"prefill_source": rate.source, "runs": [one.as_json() for one in runs]})
    else:
        print(table([_format_tiers(one) for one in runs], head=_TIER_HEAD, right=tuple(range(1, len(_TIER_HEAD)))))
        say(f"prefill {rate.tokens_per_s:,.0f} tokens/s a GPU ({rate.source})")
        say("simulated: no queue for the GPU, no batch")
    return 0


_TIER_HEAD = ("tiers", "device hits", "host", "disk", "avg TTFT ms", "p50", "p95", "waited for memory", "too large")


def _format_tiers(run: TieredRun) -> tuple[str, ...]:
    found = run.as_json()
    rates = run.hit_rates
    return (
        " + ".join(tier.name for tier in run.tiers),
        *(f"{rates[name]:.1%}" if name in rates else "" for name in TIER_NAMES),
        *(f"{found[name]:.1f}" for name in ("avg_ttft_ms", "p50_ttft_ms", "p95_ttft_ms")),
        f"{found['requests_that_waited_for_memory']:,}",
        f"{found['too_large']:,}",
    )


ADVISE_EXAMPLES = (
    "semantickv advise --trace trace.jsonl",
    "semantickv advise --trace trace.jsonl --model llama-3.1-8b --engine vllm --gpu-hour 4.00",
)


def _add_advise(commands: Commands) -> None:
    parser = add_command(
        commands,
        "advise",
        run_advise,
        "tell which eviction policy and how much memory your traffic wants: one page",
        examples=ADVISE_EXAMPLES,
    )
    flag = parser.add_argument
    add_trace_flags(parser)
    flag("--policies", nargs="+", metavar="NAME", help="policies to compare (default: all)")
    _add_kv_flags(parser)
    _add_price_flags(parser)
    flag(
        "--gib",
        nargs="+",
        type=float,
        metavar="GIB",
        help="cache sizes to try, in GiB, beside what the engine has (default: ten, chosen by the trace)",
    )
    flag(
        "--pool-tokens",
        type=int,
        metavar="N",
        help="tokens of KV that the engine holds on the GPU, as it says when it starts "
        "(default: what the weights leave)",
    )
    flag(
        "--memory",
        "--memory-kind",
        choices=TIERS,
        default="",
        help="memory to add to the GPU; hbm: none (default: what the engine can)",
    )
    flag(
        "--hour-cost",
        "--gpu-hour",
        type=float,
        metavar="USD",
        help="price of an hour of the GPU (default: of --gpu, an assumption)",
    )
    flag(
        "--gib-hour-cost",
        type=float,
        metavar="USD",
        help="price of a GiB of --memory for an hour, 0 if it stands unused (default: of the package, an assumption)",
    )
    flag(
        "--engine", choices=tuple(ENGINES), default="", help="advise only policies that this engine has (default: all)"
    )
    add_latency_flags(parser)
    _add_output_flags(parser, "outputs/advise", "advice")


def run_advise(args: argparse.Namespace) -> int:
    """Hit rate against memory for all policies on your own trace: what the memory that the GPU has gives, what host
    memory beside it would add and whether it pays, what reuse at any position would add, and how sure all that is.
    One page to print. Everything on it is simulated.
    """
    for name in args.policies or ():
        if name not in POLICIES:
            raise InputError(f"unknown policy {name!r}", hint="one of " + ", ".join(POLICIES))
    book = load_price_book(args.prices)
    rate = book.find_prefill(args.model, args.gpu)
    check_parent(args.output_dir)
    trace = read_trace(args)
    latency, _, _ = choose_latency(args, trace, LatencyModel(rate.base_ms, rate.ms_per_token, rate.source))
    sizes = None
    if args.gib:
        sizes = [int(gib * 2**30) // count_kv_bytes_per_token(args.model, args.dtype) for gib in args.gib]
    given = {one.name: getattr(args, one.name) for one in fields(Question) if hasattr(args, one.name)}
    question = Question(**given, latency=latency, book=book)
    with Progress() as progress:
        advice = advise(trace, question, policies=args.policies, sizes=sizes, seed=args.seed, progress=progress.show)
    folder = make_folder(args.output_dir, args.output_name)
    advise_output.write_advice(advice, folder)
    if args.json:
        print_json(advice.as_json())
    else:
        print(f"{advise_output.format_headline(advice)} (simulated)")
        for told in (
            advise_output.format_lead(advice),
            advise_output.describe_how_to_set_it(advice),
            advise_output.describe_money(advice),
            advise_output.describe_sureness(advice) if advice.can_tell else "",
            advise_output.describe_reuse_at_any_position(advice),
            advise_output.describe_arranging(advice),
        ):
            if told:
                print(told)
    say(f"wrote {folder / 'advice.html'}")
    return 0


def _add_policies(commands: Commands) -> None:
    parser = add_command(commands, "policies", run_policies, "list the eviction policies")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_policies(args: argparse.Namespace) -> int:
    """List the eviction policies that replay, experiment and advise know."""
    if args.json:
        print_json([{"policy": name, "summary": policy.summary} for name, policy in POLICIES.items()])
    else:
        print(table([(name, policy.summary) for name, policy in POLICIES.items()], head=("policy", "what goes first")))
    return 0


APPLICATIONS = ("telemetry_proxy", "locality_router", "simulation_api")


def _add_check(commands: Commands) -> None:
    parser = add_command(commands, "check", run_check, "check the installation, in a few seconds")
    parser.add_argument("--config-dir", default=str(CONFIG_FOLDER), metavar="DIR", help="folder of the configurations")


def run_check(args: argparse.Namespace) -> int:
    """Check packages, policies and experiment configurations without running the experiments; exit 1 if one fails."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("policies", lambda: f"{len(POLICIES)} policies"),
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


def _check_simulator() -> str:
    """Simulate a tiny workload whose hits are known; raise ArithmeticError if they differ."""
    trace = generate_workload(["repeated_system"], sessions=2, requests=2, seed=0)
    lru = Policy("lru", "the longest unused goes first", PlainPolicy)  # compiling one would take longer than all else
    done = simulate(trace, lru, Capacity.tokens(10_000))
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
            import_module(f"semantickv.apps.{name}")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{name} needs {error.name}: pip install 'semblend-suite[edge]'") from None
    return ", ".join(APPLICATIONS)


def _check_package(name: str) -> str:
    """Check that a Python package is installed."""
    if find_spec(name) is None:
        raise ModuleNotFoundError(f"the package {name} is not installed: pip install 'semblend-suite[lab]'")
    return name


# -- what these commands share ----------------------------------------------------------------------------------------


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that name a trace and say how to read it."""
    flag = parser.add_argument
    flag(
        "--trace",
        required=True,
        metavar="FILE",
        help="trace of requests to read, plain or gzip; semantickv collect writes one",
    )
    flag(
        "--format", choices=("auto", *FORMATS), default="auto", help="format of the trace (default: what it looks like)"
    )
    flag("--block-tokens", type=int, metavar="N", help="tokens in a block, where the format does not say")
    flag("--skip-bad", action="store_true", help="skip bad lines and count them")
    flag("--sort", action="store_true", help="sort the requests by time of arrival")
    flag("--max-requests", type=int, metavar="N", help="use the first N requests only")


def _add_kv_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--model", choices=sorted(KV_SHAPES), default="qwen2.5-7b", help="model whose KV fills the memory")
    flag("--dtype", choices=sorted(DTYPE_BYTES), default="bf16", help="number type of that KV")


def _add_price_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--gpu", default=DEFAULT_GPU, metavar="NAME", help="GPU whose rate and price are used")
    flag("--prices", metavar="FILE", help="TOML that replaces prices and rates of the package")


def _add_output_flags(parser: argparse.ArgumentParser, folder: str, name: str) -> None:
    flag = parser.add_argument
    flag("--seed", type=int, default=0, metavar="N", help="seed of policies that choose at random")
    flag("--output-dir", default=folder, metavar="DIR", help="folder under which a new folder is made")
    flag("--output-name", default=name, metavar="NAME", help="end of the new folder's name")
    flag("--json", action="store_true", help="print the results as JSON")


def add_latency_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the latency line."""
    flag = parser.add_argument
    flag(
        "--base-ms",
        type=float,
        metavar="MS",
        help="time to first token of an empty prompt, in ms (default: 80, or by model and GPU)",
    )
    flag(
        "--ms-per-uncached-token",
        type=float,
        metavar="MS",
        help="prefill time of a token, in ms (default: 0.08, or by model and GPU)",
    )
    flag(
        "--calibrate-from-trace",
        action="store_true",
        help="fit --base-ms and --ms-per-uncached-token to the times in the trace",
    )


def read_trace(args: argparse.Namespace) -> Trace:
    """Read the trace that the flags name; report skipped lines on standard error."""
    trace = Trace.read(args.trace, args.format, block_tokens=args.block_tokens, skip_bad=args.skip_bad, sort=args.sort)
    if args.max_requests is not None:
        if args.max_requests < 1:
            raise InputError("--max-requests must be at least 1")
        trace = trace.take_first(args.max_requests)
    if trace.skipped:
        say(f"skipped {trace.skipped} bad line{'s' if trace.skipped > 1 else ''} of {args.trace}")
    return trace


def choose_latency(
    args: argparse.Namespace, trace: Trace, default: LatencyModel | None = None
) -> tuple[LatencyModel, Calibration | None, Observations | None]:
    """Choose the latency line: calibrated from the trace, given by flags, or ``default`` (80 ms and 0.08 ms a token).

    The calibration and its observations are None unless it was calibrated.
    """
    given = args.base_ms is not None or args.ms_per_uncached_token is not None
    if args.calibrate_from_trace:
        if given:
            raise InputError(
                "--calibrate-from-trace and a given latency exclude each other",
                hint="drop --base-ms and --ms-per-uncached-token",
            )
        seen = read_observations(trace)
        fitted = calibrate(seen)
        return fitted.model, fitted, seen
    default = default or LatencyModel()
    if not given:
        return default, None, None
    return (
        LatencyModel(
            default.base_ttft_ms if args.base_ms is None else args.base_ms,
            default.token_latency_ms if args.ms_per_uncached_token is None else args.ms_per_uncached_token,
            "given",
        ),
        None,
        None,
    )
