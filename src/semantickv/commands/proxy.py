"""``semantickv proxy``: forward OpenAI-compatible traffic to one engine and record it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from semantickv.commands.flags.serve_flags import add_serve_flags, apply_trace_flags, read_tls
from semantickv.settings import EdgeSettings
from semblend.cli.output import say

ABOUT = """Forward OpenAI-compatible requests to one engine, byte for byte, and record each: times, tokens, what the
engine reused. Traces hold hashes, counts and times; text only with --keep-text. Every setting is a SEMANTICKV_*
variable; flags stand in for the common ones."""

EXAMPLES = ("semantickv proxy --upstream http://127.0.0.1:8000",)


def add(subparsers: Any) -> None:
    """Declare the flags of ``semantickv proxy``."""
    parser = subparsers.add_parser("proxy", help="forward requests to one engine and record them", description=ABOUT)
    parser.add_argument(
        "--upstream",
        metavar="URL",
        help="engine to forward to, such as http://127.0.0.1:8000 (default: SEMANTICKV_UPSTREAM_BASE_URL)",
    )
    add_serve_flags(parser, port=8010)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes; return the exit code."""
    from semantickv.apps.build import build_proxy
    from semantickv.apps.run_server import run_server

    settings = apply_trace_flags(EdgeSettings.read(), args)
    settings = replace(settings, upstream=args.upstream or settings.upstream)
    app = build_proxy(settings)
    tls = read_tls(args)

    def announce(url: str) -> None:
        say(f"proxy on {url}, forwarding to {settings.upstream}; stop with Ctrl-C")

    return run_server(app, args.host, args.port, announce=announce, drain_s=args.drain, tls=tls)
