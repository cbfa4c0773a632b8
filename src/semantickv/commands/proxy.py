"""``semantickv proxy``: forward OpenAI-compatible traffic to one engine and record it."""

from __future__ import annotations

import argparse
from dataclasses import replace

from semantickv.commands.flags import add_serve_flags, apply_trace_flags, read_tls
from semantickv.settings import EdgeSettings
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import say

EXAMPLES = ("semantickv proxy --upstream http://127.0.0.1:8000",)


def add(commands: Commands) -> None:
    parser = add_command(commands, "proxy", run, "forward requests to one engine and record them", examples=EXAMPLES)
    parser.add_argument(
        "--upstream",
        metavar="URL",
        help="engine to forward to, such as http://127.0.0.1:8000 (default: SEMANTICKV_UPSTREAM_BASE_URL)",
    )
    add_serve_flags(parser, port=8010)


def run(args: argparse.Namespace) -> int:
    """Forward OpenAI-compatible requests to one engine, byte for byte, and record each: times, tokens, what the engine
    reused. Traces hold hashes, counts and times; text only with --keep-text. Every setting is a SEMANTICKV_*
    variable; flags stand in for the common ones.
    """
    from semantickv.apps.build import build_proxy
    from semblend.http.server import run_server

    settings = apply_trace_flags(EdgeSettings.read(), args)
    settings = replace(settings, upstream=args.upstream or settings.upstream)
    app = build_proxy(settings)
    tls = read_tls(args)

    def announce(url: str) -> None:
        say(f"proxy on {url}, forwarding to {settings.upstream}; stop with Ctrl-C")

    return run_server(app, args.host, args.port, announce=announce, drain_s=args.drain, tls=tls, date_header=False)
