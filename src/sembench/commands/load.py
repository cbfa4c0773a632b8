"""``sembench run-load``: load a server at given rates."""

from __future__ import annotations

import argparse
import asyncio
import csv
import io
import json
import math
from collections.abc import Callable
from typing import Any

from sembench.backends import PromptCall, check_url, open_client, read_identity, verify_model
from sembench.commands.endpoint import add_server_flags, make_backend
from sembench.commands.live import parse_non_negative, parse_positive
from sembench.files import hash_file, make_folder_of, write_text
from sembench.live.load import (
    RequestArrival,
    SweepSettings,
    TimedAnswer,
    draw_arrivals,
    draw_conversations,
    list_details,
    list_prompts,
    open_sweep_log,
    parse_slo,
    read_trace,
    run_sweep,
)
from sembench.manifests.cases import read_manifest
from sembench.manifests.traffic import group_conversations, read_traffic
from sembench.result import LoadPoint, LoadResult, describe_environment, get_utc_time, make_run_id, write_load_result
from sembench.witnesses.prometheus import Scraper
from semblend._version import __version__
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, say
from semblend.cli.shared_flags import MANY
from semblend.errors import InputError
from semblend.text.log_formats import FORMATS

LATE_MS = 100.0


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "run-load",
        run_load,
        "load a server at given rates: a manifest, your logs or a trace; how many answers keep their limits",
        examples=[
            "sembench run-load --log prompts.jsonl --base-url http://127.0.0.1:8000 --model smollm2-135m"
            " --request-rate 1 2 4 --slo ttft:500 --output load.json"
        ],
    )
    flag = parser.add_argument
    work = parser.add_mutually_exclusive_group(required=True).add_argument
    work("--manifest", metavar="FILE", help="donors and recipients of these cases")
    work("--log", nargs="+", metavar="FILE", help="your own logs; conversations are replayed turn by turn")
    work("--trace", metavar="FILE", help="a Mooncake (.jsonl) or Azure (.csv) trace; prompts are made up")
    flag("--output", required=True, metavar="FILE", help="result file to write, JSON")
    flag("--csv", default="", metavar="FILE", help="write one row for each point of the sweep here, too")
    add_server_flags(parser, default="gateway", names=("--base-url", "--gateway-url"))
    flag("--model", required=True, metavar="NAME", help="the model that the server must serve")
    _add_sweep_flags(parser)
    _add_work_flags(parser)
    flag(
        "--slo",
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="limits of a good answer, in ms: ttft (first token), tpot (each further token), e2el (whole answer); "
        "such as ttft:500 tpot:50",
    )
    flag(
        "--warmup-requests", type=parse_non_negative, default=2, metavar="N", help="requests sent first and thrown away"
    )
    flag("--metrics-url", **MANY, metavar="URL", help="addresses of Prometheus metrics")
    flag("--tenant", default="tenant-a", metavar="NAME", help="tenant, sent as x-tenant-id")
    flag("--timeout-seconds", type=float, default=900.0, metavar="S", help="seconds that one request may take")
    flag("--save-detailed", action="store_true", help="write the times of every request of the last point, too")
    flag("--resume", action="store_true", help="go on with the points that an interrupted run lacks")
    flag("--skip-verify", action="store_true", help="do not ask the server which model it serves")
    flag("--quiet", action="store_true", help="no progress")


def _add_sweep_flags(parser: argparse.ArgumentParser) -> None:
    sweep = parser.add_argument_group("the sweep: every rate with every concurrency").add_argument
    sweep(
        "--request-rate",
        type=float,
        nargs="+",
        default=[math.inf],
        metavar="R",
        help="requests a second; inf sends all at once (default: inf)",
    )
    sweep(
        "--max-concurrency",
        type=parse_positive,
        nargs="+",
        default=[None],
        metavar="N",
        help="requests under way, at most (default: no limit)",
    )
    sweep(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="1 draws Poisson arrivals, below 1 they come in bursts",
    )
    sweep("--seed", type=int, default=0, metavar="N", help="seed of the arrivals")
    sweep(
        "--isolation",
        choices=["auto", "salt", "flush", "none"],
        default="auto",
        help="how a point gets an empty cache (default: auto, none for one point, else salt, or flush for sglang)",
    )
    sweep(
        "--reset-url",
        **MANY,
        metavar="URL",
        help="addresses to POST to, to empty caches",
    )


def _add_work_flags(parser: argparse.ArgumentParser) -> None:
    work = parser.add_argument_group("the requests").add_argument
    work("--num-prompts", type=parse_positive, metavar="N", help="only the first N requests")
    work("--max-tokens", type=parse_positive, default=32, metavar="N", help="tokens of an answer")
    work("--no-donors", action="store_true", help="with --manifest: send recipients only")
    work(
        "--format",
        choices=("auto", *FORMATS[:-1]),
        default="auto",
        help="format of --log (default: what it looks like)",
    )
    work(
        "--think-time",
        type=float,
        default=None,
        metavar="S",
        help="mean pause before a next turn, in seconds (default: the logged one, where the log has times)",
    )
    work("--max-think-time", type=float, default=60.0, metavar="S", help="longest pause, in seconds")
    work("--time-scale", type=float, default=1.0, metavar="F", help="speed of --trace; 2 plays it twice as fast")
    work(
        "--max-prompt-tokens",
        type=parse_positive,
        metavar="N",
        help="cut longer prompts of --trace, in tokens (default: never)",
    )


def run_load(args: argparse.Namespace) -> int:
    """Send requests at their times, whether or not the server keeps up: one rate, or a sweep over rates and
    concurrencies.

    The work is a manifest, your own logs (conversations turn by turn, with think times) or a trace without text.
    """
    make_folder_of(args.output)
    settings = build_sweep(args)
    make_arrivals = choose_work(args)
    points, timed, run_facts = asyncio.run(_run(args, settings, make_arrivals))
    result = LoadResult(
        run=run_facts,
        config=_describe_settings(args, settings),
        environment=describe_environment(),
        points=tuple(points),
    )
    more = list_details(timed) if args.save_detailed else {}
    write_load_result(args.output, result, date=run_facts["timestamp_utc"], model_id=args.model, **more)
    if args.csv:
        write_text(args.csv, format_csv(points))
    last = points[-1].summary
    _print_warnings(points)
    wanted = ("completed", "failed", "request_throughput", "request_goodput", "mean_ttft_ms", "p99_ttft_ms")
    print(json.dumps({"output": args.output, "points": len(points)} | {name: last[name] for name in wanted}))
    return 0 if all(point.summary["completed"] for point in points) else 1


def build_sweep(args: argparse.Namespace) -> SweepSettings:
    """Return the points that the flags ask for, and how the cache is emptied before each."""
    if args.think_time is not None and args.think_time < 0:
        raise InputError(f"--think-time {args.think_time:g} is below 0", hint="seconds, 0 for none")
    several = len(args.request_rate) * len(args.max_concurrency) > 1
    isolation = args.isolation
    if isolation == "auto":
        flushes = args.engine == "sglang" or args.reset_url
        isolation = "none" if not several else "flush" if flushes else "salt"
    if isolation == "flush" and args.engine != "sglang" and not args.reset_url:
        raise InputError("a gateway cannot be flushed", hint="give --reset-url http://engine:port/reset_prefix_cache")
    return SweepSettings(
        rates=list(dict.fromkeys(args.request_rate)),
        concurrencies=list(dict.fromkeys(args.max_concurrency)),
        output_tokens=args.max_tokens,
        tenant=args.tenant,
        isolation=isolation,
        slo=parse_slo(args.slo),
    )


def choose_work(args: argparse.Namespace) -> Callable[[float], list[RequestArrival]]:
    """Return a function that makes the requests of a point from its rate; the same requests for every point."""
    if args.trace:
        if len(args.request_rate) > 1 or math.isfinite(args.request_rate[0]):
            raise InputError("a trace brings its own times", hint="leave --request-rate out; see --time-scale")
        found = read_trace(
            args.trace, time_scale=args.time_scale, limit=args.num_prompts, most_tokens=args.max_prompt_tokens
        )
        return lambda _: found
    drawn = {"burstiness": args.burstiness, "seed": args.seed, "limit": args.num_prompts}
    if args.log:
        talks = group_conversations(read_traffic(args.log, args.format))
        pauses = {"think_s": args.think_time, "longest_think_s": args.max_think_time}
        return lambda rate: draw_conversations(talks, rate, **drawn, **pauses)
    prompts = list(list_prompts(read_manifest(args.manifest), with_donors=not args.no_donors))
    if not prompts:
        raise InputError(f"{args.manifest} holds no cases", hint="build it first")
    return lambda rate: draw_arrivals(prompts, rate, **drawn)


async def _run(
    args: argparse.Namespace, settings: SweepSettings, make_arrivals: Callable[[float], list[RequestArrival]]
) -> tuple[list[LoadPoint], list[TimedAnswer], dict[str, Any]]:
    base = check_url(args.base_url, "--base-url")
    async with open_client(args.timeout_seconds) as client:
        own = {"reset_urls": args.reset_url} if args.engine != "sglang" else {}
        backend = make_backend(args, client, args.model, **own)
        if not args.skip_verify:
            await verify_model(backend, args.model)
        scraper = Scraper(client, args.metrics_url or [f"{base}/metrics"])
        if not args.metrics_url:
            await scraper.keep_working_ones()
        identity = await read_identity(client, base)
        what = _describe_settings(args, settings) | {"server_identity": identity}
        log = open_sweep_log(args.output, what, resume=args.resume)
        if log.done:
            say(f"{len(log.done)} points are done already; going on with the rest")
        for number in range(args.warmup_requests):
            call = PromptCall(text=f"Warm up {number}.", max_tokens=4, request_id=f"sb-w-{number}", tenant=args.tenant)
            await backend.ask(call)
        progress = Progress(args.quiet)

        def show(done: int, total: int) -> None:
            if progress.due():
                progress.show(f"{done}/{total} answered")

        points, timed = await run_sweep(backend, scraper, settings, make_arrivals, log, show)
        progress.clear()
        log.close(finished=True)
    facts = {"run_id": make_run_id("load"), "timestamp_utc": get_utc_time(), "sembench_version": __version__}
    return points, timed, facts | {"server_identity": identity, "metrics_urls": list(scraper.urls)}


def _describe_settings(args: argparse.Namespace, settings: SweepSettings) -> dict[str, Any]:
    """Return what makes two load runs comparable: the work, the sweep, the promises."""
    work = args.log or [args.trace or args.manifest]
    return {
        "mode": "load",
        "endpoint_type": args.engine,
        "server": check_url(args.base_url, "--base-url"),
        "model": args.model,
        "workload": work,
        "workload_sha256": [hash_file(path) for path in work],
        "request_rates": [rate if math.isfinite(rate) else "inf" for rate in settings.rates],
        "max_concurrencies": list(settings.concurrencies),
        "burstiness": args.burstiness,
        "num_prompts": args.num_prompts,
        "max_tokens": args.max_tokens,
        "with_donors": not args.no_donors,
        "think_time_s": args.think_time,
        "time_scale": args.time_scale if args.trace else None,
        "isolation": settings.isolation,
        "seed": args.seed,
        "slo": dict(settings.slo),
    }


def format_csv(points: list[LoadPoint]) -> str:
    """Return one row for each point, with the names of ``vllm bench serve``."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    names = list(points[0].summary)
    writer.writerow(["request_rate", "max_concurrency", *names, "prefix_cache_hit_rate"])
    for point in points:
        rate = "inf" if point.request_rate is None else point.request_rate
        values = [point.summary.get(name) for name in names]
        writer.writerow([rate, point.max_concurrency, *values, point.engine.get("prefix_cache_hit_rate")])
    return stream.getvalue()


def _print_warnings(points: list[LoadPoint]) -> None:
    for point in points:
        errors = [one.error for one in point.requests if one.error]
        if errors:
            say(f"warning: {point.name}: {len(errors)} of {len(point.requests)} failed, the first with: {errors[0]}")
        if (point.summary["p99_late_ms"] or 0.0) > LATE_MS:
            late = f"{point.summary['p99_late_ms']:.0f} ms late; lateness is part of their times"
            say(f"note: {point.name}: requests left up to {late}")
