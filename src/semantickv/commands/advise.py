"""``semantickv advise``: which policy and how much memory for this traffic. Simulated."""

from __future__ import annotations

import argparse

from semantickv.analysis.advice import DEFAULT_GPU, ENGINES
from semantickv.analysis.advise import Question, advise
from semantickv.analysis.latency import LatencyModel
from semantickv.commands import flags
from semantickv.output import advise as advise_output
from semantickv.output.files import check_parent, make_folder
from semantickv.simulator.capacity import DTYPE_BYTES, KV_SHAPES, count_kv_bytes_per_token
from semantickv.simulator.policies import POLICIES
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, print_json, say
from semblend.errors import InputError
from semblend.prices import TIERS, load_price_book

EXAMPLES = (
    "semantickv advise --trace trace.jsonl",
    "semantickv advise --trace trace.jsonl --model llama-3.1-8b --engine vllm --gpu-hour 4.00",
)


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "advise",
        run,
        "tell which eviction policy and how much memory your traffic wants: one page",
        examples=EXAMPLES,
    )
    flag = parser.add_argument
    flags.add_trace_flags(parser)
    flag("--policies", nargs="+", metavar="NAME", help="policies to compare (default: all)")
    flag(
        "--model",
        choices=sorted(KV_SHAPES),
        default="qwen2.5-7b",
        help="model whose KV fills the memory and whose prefill is saved",
    )
    flag("--dtype", choices=sorted(DTYPE_BYTES), default="bf16", help="number type of that KV")
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
    flag("--gpu", default=DEFAULT_GPU, metavar="NAME", help="GPU whose hours are saved")
    flag(
        "--memory",
        "--memory-kind",
        choices=TIERS,
        default="",
        help="memory to add to the GPU; hbm: none (default: what the engine can)",
    )
    flag("--prices", metavar="FILE", help="TOML that replaces prices and rates of the package")
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
    flags.add_latency_flags(parser)
    flag("--seed", type=int, default=0, metavar="N", help="seed of policies that choose at random")
    flag("--output-dir", default="outputs/advise", metavar="DIR", help="folder under which a new folder is made")
    flag("--output-name", default="advice", metavar="NAME", help="end of the new folder's name")
    flag("--json", action="store_true", help="print the advice as JSON")


def run(args: argparse.Namespace) -> int:
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
    trace = flags.read_trace(args)
    latency, _, _ = flags.choose_latency(args, trace, LatencyModel(rate.base_ms, rate.ms_per_token, rate.source))
    sizes = None
    if args.gib:
        sizes = [int(gib * 2**30) // count_kv_bytes_per_token(args.model, args.dtype) for gib in args.gib]
    question = Question(
        model=args.model,
        dtype=args.dtype,
        gpu=args.gpu,
        memory=args.memory,
        engine=args.engine,
        pool_tokens=args.pool_tokens,
        hour_cost=args.hour_cost,
        gib_hour_cost=args.gib_hour_cost,
        latency=latency,
        book=book,
    )
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
