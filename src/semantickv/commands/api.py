"""``semantickv api``: the cache simulator behind HTTP."""

from __future__ import annotations

import argparse
from dataclasses import replace

from semantickv.settings import ApiSettings
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import say


def add(commands: Commands) -> None:
    parser = add_command(commands, "api", run, "serve the cache simulator")
    flag = parser.add_argument
    flag("--host", default="127.0.0.1", help="address to listen on")
    flag("--port", type=int, default=8000, metavar="PORT", help="port to listen on; 0 takes any free one")
    flag("--policy", metavar="NAME", help="eviction policy (default: SEMANTICKV_CACHE_POLICY, else lru)")
    flag("--cache-token-budget", type=int, metavar="TOKENS", help="size of the cache in tokens (default: 50000)")


def run(args: argparse.Namespace) -> int:
    """Serve the simulator: POST /v1/simulate/request and the rest; /docs lists all paths. The server has no tenants and
    no keys, and whoever reaches it shares one simulated cache: keep it on your own machine.
    """
    from semantickv.apps.simulation_api import build_api
    from semblend.http.server import run_server

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
