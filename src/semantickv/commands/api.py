"""``semantickv api``: the cache simulator behind HTTP."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from semantickv.settings import ApiSettings
from semblend.cli.output import say

ABOUT = """Serve the simulator: POST /v1/simulate/request and the rest; /docs lists all paths. The server has no tenants
and no keys, and whoever reaches it shares one simulated cache: keep it on your own machine."""


def add(subparsers: Any) -> None:
    """Declare the flags of ``semantickv api``."""
    parser = subparsers.add_parser("api", help="serve the cache simulator", description=ABOUT)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        metavar="PORT",
        help="port to listen on; 0 takes any free one (default: %(default)s)",
    )
    parser.add_argument("--policy", metavar="NAME", help="eviction policy (default: SEMANTICKV_CACHE_POLICY, else lru)")
    parser.add_argument(
        "--cache-token-budget", type=int, metavar="TOKENS", help="size of the cache in tokens (default: 50000)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes; return the exit code."""
    from semantickv.apps.run_server import run_server
    from semantickv.apps.simulation_api import build_api

    settings = ApiSettings.read()
    settings = replace(
        settings,
        policy=args.policy or settings.policy,
        capacity_tokens=args.cache_token_budget or settings.capacity_tokens,
    )
    app = build_api(settings)

    def announce(url: str) -> None:
        say(f"simulation API on {url}; every number it gives is simulated; stop with Ctrl-C")

    return run_server(app, args.host, args.port, announce=announce, drain_s=5)
