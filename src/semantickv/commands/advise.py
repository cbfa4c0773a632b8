"""``semantickv advise``: which policy and how much memory for this traffic. Simulated."""

from __future__ import annotations

import argparse
from typing import Any

from semantickv.analysis.advise import advise
from semantickv.analysis.engines import ENGINES
from semantickv.commands import trace_flags
from semantickv.output import advise_page
from semantickv.output.files import make_folder
from semantickv.simulator.capacity import DTYPE_BYTES, KV_SHAPES, count_kv_bytes_per_token
from semantickv.simulator.policies import POLICIES
from semblend.cli.output import print_json, say
from semblend.errors import InputError

ABOUT = """Hit rate against memory for all policies on your own trace, the knee, what reuse at any position would
add, and what it would save: one page to print. Everything on it is simulated."""


def add(subparsers: Any) -> None:
    """Declare the flags of ``semantickv advise``."""
    parser = subparsers.add_parser("advise", help="which policy, how much memory: one page", description=ABOUT)
    trace_flags.add_trace_flags(parser)
    parser.add_argument("--policies", nargs="+", metavar="NAME", help="policies to compare (default: all)")
    parser.add_argument("--model", choices=sorted(KV_SHAPES), default="qwen2.5-7b", help="whose KV fills the memory")
    parser.add_argument("--dtype", choices=sorted(DTYPE_BYTES), default="bf16", help="of that KV (%(default)s)")
    parser.add_argument("--gib", nargs="+", type=float, metavar="GIB", help="sizes to try (default: ten, chosen)")
    parser.add_argument("--hour-cost", type=float, metavar="PRICE", help="price of an hour of prefill, any currency")
    parser.add_argument("--gib-hour-cost", type=float, metavar="PRICE", help="price of a GiB of KV memory for an hour")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="", help="advise only what this engine has")
    trace_flags.add_latency_flags(parser)
    parser.add_argument("--seed", type=int, default=0, help="for policies that draw (default: %(default)s)")
    parser.add_argument("--output-dir", default="outputs/advise", metavar="DIR", help="parent (default: %(default)s)")
    parser.add_argument("--output-name", default="advice", metavar="NAME", help="end of the folder's name")
    parser.add_argument("--json", action="store_true", help="print the advice as JSON")


def run(args: argparse.Namespace) -> int:
    """Simulate the policies on the trace, write the advice page and print its headline; return the exit code."""
    for name in args.policies or ():
        if name not in POLICIES:
            raise InputError(f"unknown policy {name!r}", hint="one of " + ", ".join(POLICIES))
    if args.gib_hour_cost is not None and args.hour_cost is None:
        raise InputError("--gib-hour-cost needs --hour-cost", hint="memory is weighed against hours of prefill")
    trace = trace_flags.read_trace(args)
    latency, _, _ = trace_flags.choose_latency(args, trace)
    sizes = None
    if args.gib:
        sizes = [int(gib * 2**30) // count_kv_bytes_per_token(args.model, args.dtype) for gib in args.gib]
    advice = advise(
        trace,
        policies=args.policies,
        latency=latency,
        model=args.model,
        dtype=args.dtype,
        sizes=sizes,
        hour_cost=args.hour_cost,
        gib_hour_cost=args.gib_hour_cost,
        engine=args.engine,
        seed=args.seed,
        progress=say,
    )
    folder = make_folder(args.output_dir, args.output_name)
    advise_page.write_advice(advice, folder)
    if args.json:
        print_json(advice.as_json())
    else:
        print(f"{advise_page.format_headline(advice)} (simulated)")
        print(advise_page.format_lead(advice))
        print(advise_page.describe_how_to_set_it(advice))
        print(advise_page.describe_reuse_at_any_position(advice))
    say(f"wrote {folder / 'advice.html'}")
    return 0
