"""Commands that listen: proxy, router, dynamo-router, dynamo-pin and api; each is one application behind one server."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from semantickv.settings import ApiSettings, EdgeSettings
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import say
from semblend.errors import InputError

if TYPE_CHECKING:
    from semantickv.routing.router import EngineReuse
    from semantickv.shared_state.sync import SharedEvidence

DEMO_FAMILIES = ("rag_shared_corpus", "support_agent", "coding_assistant")
DEMO_CACHE_TOKENS = 4000


def add(commands: Commands) -> None:
    """Declare the commands of this module."""
    _add_proxy(commands)
    _add_router(commands)
    _add_dynamo_router(commands)
    _add_dynamo_pin(commands)
    _add_api(commands)


def _add_proxy(commands: Commands) -> None:
    parser = add_command(
        commands,
        "proxy",
        run_proxy,
        "forward requests to one engine and record them",
        examples=("semantickv proxy --upstream http://127.0.0.1:8000",),
    )
    parser.add_argument(
        "--upstream",
        metavar="URL",
        help="engine to forward to, such as http://127.0.0.1:8000 (default: SEMANTICKV_UPSTREAM_BASE_URL)",
    )
    _add_listen_flags(parser, port=8010)
    _add_trace_flags(parser)


def run_proxy(args: argparse.Namespace) -> int:
    """Forward OpenAI-compatible requests to one engine, byte for byte, and record each: times, tokens, what the engine
    reused. Traces hold hashes, counts and times; text only with --keep-text. Every setting is a SEMANTICKV_*
    variable; flags stand in for the common ones.
    """
    from semantickv.apps.build import build_proxy

    settings = _apply_flags(EdgeSettings.read(), args)
    return _serve(args, build_proxy(settings), lambda url: [f"proxy on {url}, forwarding to {settings.upstream}"])


def _add_router(commands: Commands) -> None:
    parser = add_command(
        commands,
        "router",
        run_router,
        "choose an engine for each request",
        examples=(
            "semantickv router --replicas http://127.0.0.1:8000,http://127.0.0.1:8001",
            "semantickv router --replicas http://127.0.0.1:8000,http://127.0.0.1:8001 --engine-reuse prefix",
            "semantickv router --demo",
        ),
    )
    flag = parser.add_argument
    flag(
        "--replicas",
        metavar="URLS",
        type=_split,
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
    _add_engine_reuse_flag(parser)
    _add_listen_flags(parser, port=8020)
    _add_trace_flags(parser)
    for name, (long, text) in _FAULT_FLAGS.items():
        kind = type(getattr(EdgeSettings, name))
        flag(long, dest=name, type=kind, metavar="N" if kind is int else "SECONDS", help=text)
    flag("--demo", action="store_true", help="compare the policies on made-up traffic, and end")
    flag("--demo-replicas", type=int, default=4, metavar="N", help="engines of --demo")
    flag("--seed", type=int, default=11, metavar="N", help="seed of the traffic of --demo")


def run_router(args: argparse.Namespace) -> int:
    """Choose among engines for every OpenAI-compatible request: by turns, by load, by the hash of the prompt's
    beginning, or by what each engine has seen of the prompt. With --demo, nothing is served: made-up traffic goes
    through every policy and a comparison is written (simulated). Every setting is a SEMANTICKV_* variable; flags
    stand in for the common ones.
    """
    if args.demo:
        return _run_demo(args)
    from semantickv.apps.build import build_router

    for name, (long, _) in _FAULT_FLAGS.items():
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise InputError(f"{long} {value} is too small", hint="a number above 0")
    settings = _apply_flags(EdgeSettings.read(), args)
    app = build_router(settings)

    def announce(url: str) -> list[str]:
        told = [f"router on {url}, {settings.policy} over {len(app.router.replicas)} replicas"]
        if app.router.policy == "semantic_locality":  # the others look at equal beginnings, or at no prompt
            told.append(app.router.reuse.describe())
        return told

    return _serve(args, app, announce)


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
        "cache tokens": DEMO_CACHE_TOKENS,
        "seed": args.seed,
    }
    results = compare_policies(trace, replicas=args.demo_replicas, cache_tokens=DEMO_CACHE_TOKENS)
    folder = write_placement(args.trace_dir or "outputs/routing", results, setup)
    say("\n".join(format_placement_summary(results, setup)[4:]))
    print(folder)
    return 0


def _add_dynamo_router(commands: Commands) -> None:
    parser = add_command(
        commands, "dynamo-router", run_dynamo_router, "place requests on the workers of a Dynamo deployment"
    )
    flag = parser.add_argument
    flag("--model-name", required=True, metavar="NAME", help="the model, as clients will call it")
    flag("--model-path", required=True, metavar="DIR", help="its folder or hub name, for the tokenizer")
    flag("--endpoint", default="dynamo.backend.generate", help="where the workers serve, under another model name")
    flag("--block-size", type=int, default=16, metavar="TOKENS", help="the workers' block size")
    _add_engine_reuse_flag(parser)


def run_dynamo_router(args: argparse.Namespace) -> int:
    """Serve a model inside a Dynamo deployment. The frontend sends its requests here, and each goes on to the worker
    that has computed most of its passages, as long as that one has room. Dynamo's own KvRouter chooses for all
    others. Discovery, request plane and event plane are Dynamo's: the DYN_* variables of the deployment. Several of
    these routers share what they know through SEMANTICKV_REDIS_URL.
    """
    from semantickv.routing.fingerprint import load_cutter
    from semantickv.routing.worker_evidence import WorkerEvidence
    from semantickv.shared_state import open_link
    from semblend.integration.dynamo import serve as dynamo

    options = dynamo.RouterOptions(
        args.model_name, args.model_path, args.endpoint.removeprefix("dyn://"), args.block_size
    )
    settings = EdgeSettings.read()
    reuse = _read_reuse(args, settings)
    say(dynamo.read_version())
    say(reuse.describe())
    load_cutter()  # takes seconds the first time; no request waits for it
    known: dict[str, Any] = {"reuse": reuse, "secret": settings.hash_key}

    def share() -> SharedEvidence:
        from semantickv.shared_state.sync import SharedEvidence

        return SharedEvidence(settings.max_tracked_tokens, **known)

    link = open_link(settings, share)
    if link is None:
        dynamo.run_router(options, WorkerEvidence(settings.max_tracked_tokens, **known))
    else:
        dynamo.run_router(options, link.sync, link)
    return 0


def _add_dynamo_pin(commands: Commands) -> None:
    parser = add_command(commands, "dynamo-pin", run_dynamo_pin, "pin requests behind a stock Dynamo frontend")
    parser.add_argument("--frontend", required=True, metavar="URL", help="Dynamo's frontend, http://127.0.0.1:8000")
    parser.add_argument("--endpoint", default="dynamo.backend.generate", help="where the workers serve")
    _add_engine_reuse_flag(parser)
    _add_listen_flags(parser, port=8030)


def run_dynamo_pin(args: argparse.Namespace) -> int:
    """Stand in front of a Dynamo frontend and pin every request to the worker that has computed most of its passages,
    by Dynamo's own header. Needs nothing of Dynamo but its HTTP. Load is what went through here; where Dynamo's own
    loads and KV events should count, run dynamo-router instead.
    """
    from semantickv.apps.dynamo_pin import PinGateway
    from semantickv.edge.upstream_call import EngineAddress, Upstream
    from semantickv.routing.worker_evidence import WorkerEvidence

    settings = EdgeSettings.read()
    pool = Upstream(EngineAddress.parse(args.frontend), connect_timeout_s=settings.connect_timeout_s)
    reuse = _read_reuse(args, settings)
    evidence = WorkerEvidence(settings.max_tracked_tokens, reuse=reuse)
    app = PinGateway(settings, pool, evidence, args.endpoint.removeprefix("dyn://"))
    return _serve(args, app, lambda url: [f"pinning on {url}, in front of {pool.address.url}", reuse.describe()])


def _add_api(commands: Commands) -> None:
    parser = add_command(commands, "api", run_api, "serve the cache simulator")
    flag = parser.add_argument
    flag("--host", default="127.0.0.1", help="address to listen on")
    flag("--port", type=int, default=8000, metavar="PORT", help="port to listen on; 0 takes any free one")
    flag("--policy", metavar="NAME", help="eviction policy (default: SEMANTICKV_CACHE_POLICY, else lru)")
    flag("--cache-token-budget", type=int, metavar="TOKENS", help="size of the cache in tokens (default: 50000)")


def run_api(args: argparse.Namespace) -> int:
    """Serve the simulator: POST /v1/simulate/request and the rest; /docs lists all paths. The server has no tenants and
    no keys, and whoever reaches it shares one simulated cache: keep it on your own machine.
    """
    from semantickv.apps.simulation_api import build_api
    from semblend.http.server import run_server

    settings = ApiSettings.read()
    settings = replace(
        settings,
        cache_policy=args.policy or settings.cache_policy,
        capacity_tokens=args.cache_token_budget or settings.capacity_tokens,
    )
    app = build_api(settings)

    def announce(url: str) -> None:
        say(f"simulation API on {url}; every number it gives is simulated; stop with Ctrl-C")

    return run_server(app, args.host, args.port, announce=announce, drain_s=5)


# -- what they share --------------------------------------------------------------------------------------------------

_FAULT_FLAGS = {
    "health_s": ("--health-seconds", "time between two health checks of a replica (default: 5)"),
    "health_timeout_s": ("--health-timeout", "time that a health check may take (default: 2)"),
    "health_failures": ("--health-failures", "failed checks in a row that take a replica out (default: 2)"),
    "hang_s": ("--hang-seconds", "time without any answer that takes a replica out (default: 10)"),
    "max_attempts": ("--max-attempts", "replicas that a request is sent to before it fails (default: 3)"),
    "breaker_faults": ("--breaker-faults", "faults in a row after which a replica pauses (default: 3)"),
    "breaker_s": ("--breaker-seconds", "its first pause, doubled after failed trials (default: 1)"),
    "breaker_max_s": ("--breaker-max-seconds", "its longest pause (default: 60)"),
}


def _add_listen_flags(parser: argparse.ArgumentParser, *, port: int) -> None:
    """Declare where to listen, and how."""
    flag = parser.add_argument
    flag("--host", default="127.0.0.1", help="address to listen on")
    flag("--port", type=int, default=port, metavar="PORT", help="port to listen on; 0 takes any free one")
    flag(
        "--drain",
        "--drain-seconds",
        type=int,
        default=30,
        metavar="SECONDS",
        help="seconds for running requests after a stop signal",
    )
    flag("--tls-cert", metavar="FILE", help="serve HTTPS with this certificate (PEM, with its chain)")
    flag("--tls-key", metavar="FILE", help="its private key (default: in the certificate's file)")


def _add_trace_flags(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    flag("--no-trace", dest="trace", action="store_false", default=None, help="write no traces")
    flag(
        "--keep-text",
        dest="redact_text",
        action="store_false",
        default=None,
        help="write the prompts' text into the traces",
    )
    flag("--output-dir", dest="trace_dir", metavar="DIR", help="folder of the traces (default: outputs/live_traces)")


def _add_engine_reuse_flag(parser: argparse.ArgumentParser) -> None:
    """Declare what the engines behind a router can reuse."""
    parser.add_argument(
        "--engine-reuse",
        choices=("spans", "prefix"),
        help="what the engines reuse: spans, equal passages anywhere (engines with semblend in them), or prefix, equal "
        "beginnings only (stock vLLM, SGLang and others) (default: SEMANTICKV_ENGINE_REUSE, else spans)",
    )


def _read_reuse(args: argparse.Namespace, settings: EdgeSettings) -> EngineReuse:
    from semantickv.routing.router import EngineReuse

    return EngineReuse.parse(args.engine_reuse or settings.engine_reuse)


def _split(text: str) -> tuple[str, ...]:
    """An argparse type: words between commas."""
    return tuple(one.strip() for one in text.split(",") if one.strip())


def _apply_flags(settings: EdgeSettings, args: argparse.Namespace) -> EdgeSettings:
    """Return the settings with what the flags of the same names give in their places."""
    given = {one.name: getattr(args, one.name, None) for one in fields(settings)}
    return replace(settings, **{name: value for name, value in given.items() if value not in (None, "", ())})


def _serve(args: argparse.Namespace, app: Any, describe: Callable[[str], list[str]]) -> int:
    """Run an application until a signal stops it; ``describe`` says what listens at an address, first line first."""
    from semblend.http.server import TlsFiles, run_server

    if args.tls_key and not args.tls_cert:
        raise InputError("--tls-key without --tls-cert", hint="name the certificate too")
    tls = TlsFiles(args.tls_cert, args.tls_key) if args.tls_cert else None

    def announce(url: str) -> None:
        first, *rest = describe(url)
        for line in (f"{first}; stop with Ctrl-C", *rest):
            say(line)

    return run_server(app, args.host, args.port, announce=announce, drain_s=args.drain, tls=tls, date_header=False)
