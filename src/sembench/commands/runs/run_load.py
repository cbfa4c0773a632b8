"""``sembench run-load``: send requests at their times, whether or not the server keeps up."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from typing import Any

from sembench.backends.base import PromptCall
from sembench.backends.http_client import check_url, open_client
from sembench.commands.runs.live_flags import add_server_flags, make_backend, parse_non_negative, parse_positive
from sembench.files import make_folder_of, write_text
from sembench.live.arrivals import RequestArrival, draw_arrivals, list_prompts, read_trace
from sembench.live.load import TimedAnswer, list_details, parse_slo, play, summarize_load
from sembench.live.session import verify_model
from sembench.manifests.cases import read_manifest
from sembench.provenance import describe_environment, get_utc_time
from sembench.witnesses.prometheus import Scraper, pair_snapshots
from sembench.witnesses.prometheus import summarize_deltas as counters
from semblend.cli.output import Progress, say
from semblend.errors import InputError


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "run-load",
        help="open-loop load: Poisson or trace-timed arrivals, goodput under promises",
        description="Send requests at their times and report throughput, latencies and goodput.",
    )
    work = parser.add_mutually_exclusive_group(required=True)
    work.add_argument("--manifest", metavar="FILE", help="donors and recipients of these cases")
    work.add_argument("--trace", metavar="FILE", help="a Mooncake (.jsonl) or Azure (.csv) trace; prompts are made up")
    parser.add_argument("--output", required=True, metavar="FILE", help="the result, JSON")
    add_server_flags(parser, default="gateway", names=("--base-url", "--gateway-url"))
    parser.add_argument("--model", required=True, help="the model that the server must serve")
    parser.add_argument("--request-rate", type=float, default=math.inf, metavar="R", help="a second (default: inf)")
    parser.add_argument("--burstiness", type=float, default=1.0, metavar="B", help="1 is Poisson, below 1 bursts")
    parser.add_argument("--time-scale", type=float, default=1.0, metavar="F", help="2 plays a trace at double speed")
    parser.add_argument("--num-prompts", type=parse_positive, metavar="N", help="only the first N requests")
    parser.add_argument(
        "--max-concurrency", type=parse_positive, metavar="N", help="at most N under way (default: no limit)"
    )
    parser.add_argument("--max-tokens", type=parse_positive, default=32, metavar="N", help="of an answer (default: 32)")
    parser.add_argument("--max-prompt-tokens", type=parse_positive, metavar="N", help="cut the prompts of a trace")
    parser.add_argument("--no-donors", action="store_true", help="send recipients only")
    parser.add_argument(
        "--slo", "--goodput", nargs="+", default=[], metavar="NAME:MS", help="ttft:500 tpot:50 e2el:3000"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals (default: 0)")
    parser.add_argument(
        "--warmup-requests", type=parse_non_negative, default=2, metavar="N", help="thrown away (default: 2)"
    )
    parser.add_argument("--metrics-url", nargs="+", action="extend", default=[], metavar="URL", help="Prometheus text")
    parser.add_argument("--tenant", default="tenant-a", help="sent as x-tenant-id (default: tenant-a)")
    parser.add_argument("--timeout-seconds", type=float, default=900.0, metavar="S", help="limit of one request")
    parser.add_argument("--save-detailed", action="store_true", help="also one list a quantity")
    parser.add_argument("--skip-verify", action="store_true", help="do not ask the server which model it serves")


def run(args: argparse.Namespace) -> int:
    make_folder_of(args.output)
    slo = parse_slo(args.slo)
    arrivals = build_arrivals(args)
    timed, duration_s, engine = asyncio.run(_play(args, arrivals))
    found = summarize_load(timed, duration_s, slo)
    result = _describe_run(args, arrivals, slo) | found | {"engine": engine}
    result |= list_details(timed) if args.save_detailed else {}
    write_text(args.output, json.dumps(result, indent=1, allow_nan=False) + "\n")
    _print_warnings(timed, found)
    wanted = ("completed", "failed", "request_throughput", "request_goodput", "mean_ttft_ms", "p99_ttft_ms")
    print(json.dumps({"output": args.output} | {name: found[name] for name in wanted}))
    return 0 if found["completed"] else 1


def build_arrivals(args: argparse.Namespace) -> list[RequestArrival]:
    if args.trace:
        if math.isfinite(args.request_rate):
            raise InputError("a trace brings its own times", hint="leave --request-rate out; see --time-scale")
        return read_trace(
            args.trace, time_scale=args.time_scale, limit=args.num_prompts, most_tokens=args.max_prompt_tokens
        )
    prompts = list_prompts(read_manifest(args.manifest), with_donors=not args.no_donors)
    found = draw_arrivals(
        prompts, args.request_rate, burstiness=args.burstiness, seed=args.seed, limit=args.num_prompts
    )
    if not found:
        raise InputError(f"{args.manifest} holds no cases", hint="build it first")
    return found


async def _play(
    args: argparse.Namespace, arrivals: list[RequestArrival]
) -> tuple[list[TimedAnswer], float, dict[str, Any]]:
    async with open_client(args.timeout_seconds) as client:
        backend = make_backend(args, client, args.model)
        if not args.skip_verify:
            await verify_model(backend, args.model)
        scraper = Scraper(client, args.metrics_url or [f"{check_url(args.base_url, '--base-url')}/metrics"])
        if not args.metrics_url:
            await scraper.keep_working_ones()
        for number in range(args.warmup_requests):
            call = PromptCall(text=f"Warm up {number}.", max_tokens=4, request_id=f"sb-w-{number}", tenant=args.tenant)
            await backend.ask(call)
        before, progress = await scraper.take_snapshot(), Progress()

        def show(done: int) -> None:
            if progress.due():
                progress.show(f"{done}/{len(arrivals)} answered")

        timed, duration_s = await play(
            backend,
            arrivals,
            output_tokens=args.max_tokens,
            max_concurrency=args.max_concurrency,
            tenant=args.tenant,
            on_done=show,
        )
        progress.clear()
        after = await scraper.take_snapshot()
    pairs = pair_snapshots(before, after)
    delta = counters(pairs, failed=len(before) - len(pairs)) if before else None
    return timed, duration_s, {"prometheus": None if delta is None else {"delta": delta}}


def _describe_run(args: argparse.Namespace, arrivals: list[RequestArrival], slo: dict[str, float]) -> dict[str, Any]:
    return {
        "date": get_utc_time(),
        "endpoint_type": args.engine,
        "model_id": args.model,
        "num_prompts": len(arrivals),
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "time_scale": args.time_scale if args.trace else None,
        "workload": args.trace or args.manifest,
        "seed": args.seed,
        "slo": slo,
        "environment": describe_environment(),
    }


def _print_warnings(timed: list[TimedAnswer], found: dict[str, Any]) -> None:
    errors = [one.answer.error for one in timed if one.answer.error]
    if errors:
        say(f"warning: {len(errors)} of {len(timed)} requests failed, the first with: {errors[0]}")
    if (found["p99_late_ms"] or 0.0) > 100.0:
        say(f"note: requests left up to {found['p99_late_ms']:.0f} ms late; lateness is part of their times")
