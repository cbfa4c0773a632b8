"""``semantickv router``: send each request to the replica that has most of its prompt."""

from __future__ import annotations

import argparse
from dataclasses import replace

from semantickv.commands.flags import (
    add_engine_reuse_flag,
    add_fault_flags,
    add_serve_flags,
    apply_fault_flags,
    apply_trace_flags,
    read_tls,
)
from semantickv.settings import EdgeSettings
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import say
from semblend.errors import InputError

DEMO_FAMILIES = ("rag_shared_corpus", "support_agent", "coding_assistant")
DEMO_CACHE_TOKENS = 4000

EXAMPLES = (
    "semantickv router --replicas http://127.0.0.1:8000,http://127.0.0.1:8001",
    "semantickv router --replicas http://127.0.0.1:8000,http://127.0.0.1:8001 --engine-reuse prefix",
    "semantickv router --demo",
)


def add(commands: Commands) -> None:
    parser = add_command(commands, "router", run, "choose an engine for each request", examples=EXAMPLES)
    flag = parser.add_argument
    flag(
        "--replicas",
        metavar="URLS",
        help="addresses of the engines, separated by commas (default: SEMANTICKV_REPLICAS)",
    )
    flag(
        "--replicas-file",
        metavar="FILE",
        help="file with one engine a line, followed while the router runs (default: SEMANTICKV_REPLICAS_FILE)",
    )
    flag(
        "--policy",
        metavar="NAME",
        help="how to choose: round_robin, least_loaded, prefix_hash, cache_aware or semantic_locality",
    )
    add_engine_reuse_flag(parser)
    add_serve_flags(parser, port=8020)
    add_fault_flags(parser)
    flag("--demo", action="store_true", help="compare the policies on made-up traffic, and end")
    flag("--demo-replicas", type=int, default=4, metavar="N", help="engines of --demo")
    flag("--seed", type=int, default=11, metavar="N", help="seed of the traffic of --demo")


def run(args: argparse.Namespace) -> int:
    """Choose among engines for every OpenAI-compatible request: by turns, by load, by the hash of the prompt's
    beginning, or by what each engine has seen of the prompt. With --demo, nothing is served: made-up traffic goes
    through every policy and a comparison is written (simulated). Every setting is a SEMANTICKV_* variable; flags
    stand in for the common ones.
    """
    if args.demo:
        return _run_demo(args)
    from semantickv.apps.build import build_router
    from semblend.http.server import run_server

    settings = apply_fault_flags(apply_trace_flags(EdgeSettings.read(), args), args)
    named = tuple(one.strip() for one in (args.replicas or "").split(",") if one.strip())
    settings = replace(
        settings,
        replicas=named or settings.replicas,
        replicas_file=args.replicas_file or settings.replicas_file,
        policy=args.policy or settings.policy,
        engine_reuse=args.engine_reuse or settings.engine_reuse,
    )
    app = build_router(settings)
    tls = read_tls(args)

    def announce(url: str) -> None:
        say(f"router on {url}, {settings.policy} over {len(app.router.replicas)} replicas; stop with Ctrl-C")
        if app.router.policy == "semantic_locality":  # the others look at equal beginnings, or at no prompt
            say(app.router.reuse.describe())

    return run_server(app, args.host, args.port, announce=announce, drain_s=args.drain, tls=tls, date_header=False)


def _run_demo(args: argparse.Namespace) -> int:
    """Compare all policies on made-up traffic and write outputs/routing/<time>_demo/."""
    from semantickv.analysis.placement import compare_policies
    from semantickv.output.files import format_placement_summary, write_placement
    from semantickv.workloads.families import generate_workload

    if args.demo_replicas < 2:
        raise InputError("--demo-replicas must be at least 2", hint="4 is the default")
    trace = generate_workload(DEMO_FAMILIES, sessions=40, requests=6, seed=args.seed)
    setup = {
        "families": " ".join(DEMO_FAMILIES),
        "replicas": args.demo_replicas,
        "cache tokens": 4000,
        "seed": args.seed,
    }
    results = compare_policies(trace, replicas=args.demo_replicas, cache_tokens=4000)
    folder = write_placement(args.output_dir or "outputs/routing", results, setup)
    say("\n".join(format_placement_summary(results, setup)[4:]))
    print(folder)
    return 0
