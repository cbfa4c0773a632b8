"""``semantickv replay``: one trace, several policies, and what each would have saved. Simulated."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from semantickv.analysis.latency import compute_gain
from semantickv.analysis.replay import CHAINED_NOTE, DEFAULT_POLICIES, replay
from semantickv.commands import flags
from semantickv.output.files import check_parent, describe_calibration, make_folder, write_replay
from semantickv.simulator.capacity import DTYPE_BYTES, KV_SHAPES, Capacity
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, print_json, say, table
from semblend.errors import InputError

EXAMPLES = ("semantickv replay --trace trace.jsonl --cache-gib 40 --policies lru adaptive_semantic",)


def add(commands: Commands) -> None:
    parser = add_command(commands, "replay", run, "replay a trace through several policies", examples=EXAMPLES)
    flag = parser.add_argument
    flags.add_trace_flags(parser)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--cache-token-budget", type=int, metavar="N", help="size of the cache in tokens")
    size.add_argument("--cache-block-budget", type=int, metavar="N", help="size of the cache in blocks")
    size.add_argument("--cache-gib", type=float, metavar="GIB", help="size of the cache in GiB of --model's KV")
    flag("--model", choices=sorted(KV_SHAPES), default="qwen2.5-7b", help="model whose KV --cache-gib counts")
    flag("--dtype", choices=sorted(DTYPE_BYTES), default="bf16", help="number type of that KV")
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
    flags.add_latency_flags(parser)
    flag("--seed", type=int, default=0, metavar="N", help="seed of policies that choose at random")
    flag("--output-dir", default="outputs/traces", metavar="DIR", help="folder under which a new folder is made")
    flag("--output-name", default="replay", metavar="NAME", help="end of the new folder's name")
    flag("--no-plots", action="store_true", help="write no pictures")
    flag("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> int:
    """Replay a trace (our JSONL, Mooncake, Bailian, Azure, logs and KV events of engines; plain or gzip) through
    several cache policies. The cache holds metadata and times follow a straight line: everything reported is
    simulated.
    """
    capacity = _read_capacity(args)
    if "/" in args.output_name or not args.output_name:
        raise InputError(f"--output-name {args.output_name!r} is no name", hint="the folder goes into --output-dir")
    check_parent(args.output_dir)
    trace = flags.read_trace(args)
    latency, fitted, seen = flags.choose_latency(args, trace)
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
        _print_records(result.records)
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


def _print_records(records: list[dict[str, Any]]) -> None:
    """Print one row for each policy."""
    rows = []
    for record in records:
        gain = compute_gain(records, record["policy"])
        rows.append(
            (
                record["policy"],
                f"{record['block_hit_rate']:.2%}",
                f"{record['token_hit_rate']:.2%}",
                f"{record['tokens_saved']:,}",
                f"{record['evictions']:,}",
                f"{record['avg_ttft_ms']:.2f}",
                "" if gain is None else f"{gain:+.2%}",
            )
        )
    head = ("policy", "block hits", "token hits", "tokens saved", "evictions", "avg TTFT ms (simulated)", "against LRU")
    print(table(rows, head=head, right=(1, 2, 3, 4, 5, 6)))
