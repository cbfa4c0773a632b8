"""``semantickv tiers``: a cache on the device, the host and the disk, with requests that run. Simulated."""

from __future__ import annotations

import argparse

from semantickv.analysis.advice import DEFAULT_GPU, Costs
from semantickv.analysis.tiers import DECODE_MS, Speed, Tier, TieredRun, replay_tiers
from semantickv.commands import flags
from semantickv.simulator.capacity import DTYPE_BYTES, KV_SHAPES, count_kv_bytes_per_token
from semantickv.simulator.forest import build_forest
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, print_json, say, table
from semblend.errors import InputError
from semblend.prices import load_price_book

NAMES = {"device": "hbm", "host": "dram", "disk": "ssd"}

EXAMPLES = ("semantickv tiers --trace trace.jsonl --device-gib 20 --host-gib 200",)


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "tiers",
        run,
        "simulate a cache on device, host and disk: hits and times to first token",
        examples=EXAMPLES,
    )
    flag = parser.add_argument
    flags.add_trace_flags(parser)
    flag("--model", choices=sorted(KV_SHAPES), default="qwen2.5-7b", help="model whose KV fills the memory")
    flag("--dtype", choices=sorted(DTYPE_BYTES), default="bf16", help="number type of that KV")
    flag("--gpu", default=DEFAULT_GPU, metavar="NAME", help="GPU whose prefill rate is used")
    flag("--device-gib", type=float, required=True, metavar="GIB", help="KV memory of the device, in GiB")
    flag("--host-gib", type=float, default=0.0, metavar="GIB", help="KV memory of the host, in GiB (default: none)")
    flag("--disk-gib", type=float, default=0.0, metavar="GIB", help="KV memory of the disk, in GiB (default: none)")
    flag("--decode-ms", type=float, default=DECODE_MS, metavar="MS", help="time of a token of the answer, in ms")
    flag("--prices", metavar="FILE", help="TOML that replaces rates and bandwidths of the package")
    flag("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> int:
    """Replay a trace through a cache on the device, the host and the disk: hits by tier, and times to first token from
    prefill rates and bandwidths. Running requests hold their blocks, and a request that finds no room waits. The
    policy is LRU. Everything reported is simulated.
    """
    if not 0 <= args.decode_ms < float("inf"):
        raise InputError(f"--decode-ms {args.decode_ms:g} must be finite and not negative")
    book = load_price_book(args.prices)
    token_bytes = count_kv_bytes_per_token(args.model, args.dtype)
    tiers = []
    for name, kind in NAMES.items():
        gib = getattr(args, f"{name}_gib")
        if not 0 <= gib < 2**40 or (name == "device" and not gib):
            raise InputError(f"--{name}-gib {gib:g} must be above 0")
        costs = Costs.find(book, model=args.model, gpu=args.gpu, tier=kind, token_bytes=token_bytes)
        if gib:
            tiers.append(Tier(name, int(gib * 2**30) // token_bytes, costs.load_ms_per_token))
    rate = book.find_prefill(args.model, args.gpu)
    speed = Speed(rate.base_ms, rate.ms_per_token, args.decode_ms)
    trace = flags.read_trace(args)
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
        print(table([_format_row(one) for one in runs], head=_HEAD, right=tuple(range(1, len(_HEAD)))))
        say(f"prefill {rate.tokens_per_s:,.0f} tokens/s a GPU ({rate.source})")
        say("simulated: no queue for the GPU, no batch")
    return 0


_HEAD = ("tiers", "device hits", "host", "disk", "avg TTFT ms", "p50", "p95", "waited for memory", "too large")


def _format_row(run: TieredRun) -> tuple[str, ...]:
    found = run.as_json()
    rates = run.hit_rates
    return (
        " + ".join(tier.name for tier in run.tiers),
        *(f"{rates[name]:.1%}" if name in rates else "" for name in NAMES),
        *(f"{found[name]:.1f}" for name in ("avg_ttft_ms", "p50_ttft_ms", "p95_ttft_ms")),
        f"{found['requests_that_waited_for_memory']:,}",
        f"{found['too_large']:,}",
    )
