"""``sembench verify-endpoint``: is the server there, and does it serve what is about to be measured."""

from __future__ import annotations

import argparse
import asyncio
import json

from sembench.backends.base import Backend, Call
from sembench.backends.gateway import GatewayBackend
from sembench.backends.http_client import check_url, open_client
from sembench.backends.sglang import SglangBackend
from sembench.commands.runs.live_flags import parse_keys
from semblend.cli.output import say

MISMATCH = 3


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "verify-endpoint",
        help="see whether a server answers and serves the expected model",
        description="Ask for the models and one short answer. Exit code 3 when something is not as expected.",
    )
    parser.add_argument("--engine", choices=["sglang", "gateway"], default="gateway", help="how it is spoken to")
    parser.add_argument("--base-url", required=True, metavar="URL", help="the server")
    parser.add_argument("--expect-model", default="", metavar="NAME", help="the model that it must serve")
    parser.add_argument("--timeout-seconds", type=float, default=60.0, metavar="S", help="default: 60")
    parser.add_argument("--api-key", action="append", default=[], metavar="[TENANT=]KEY", help="@FILE reads it")


def run(args: argparse.Namespace) -> int:
    found = asyncio.run(_verify(args))
    print(json.dumps(found))
    if found["problem"]:
        say(f"error: {found['problem']}")
        say("hint: check --base-url, --engine and --expect-model")
        return MISMATCH
    return 0


async def _verify(args: argparse.Namespace) -> dict[str, object]:
    base, keys = check_url(args.base_url, "--base-url"), parse_keys(args.api_key)
    async with open_client(args.timeout_seconds) as client:
        asking: Backend = SglangBackend(client, base, keys=keys)
        names, problem = await asking.list_models()
        model = args.expect_model or (names[0] if names else "")
        if problem is None and args.expect_model and args.expect_model not in names:
            problem = f"the server serves {', '.join(names) or 'no model'}, not {args.expect_model}"
        if args.engine == "gateway":
            asking = GatewayBackend(client, base, model, keys=keys)
        answer = None
        if problem is None:
            answer = await asking.ask(Call(text="Say yes.", max_tokens=1, request_id="sb-verify"))
            problem = answer.error
    return {
        "base_url": base,
        "models": list(names),
        "ttft_ms": None if answer is None else answer.ttft_ms,
        "reports_cached_tokens": None if answer is None else answer.cached_tokens is not None,
        "gives_receipts": None if answer is None else answer.receipt is not None,
        "problem": problem,
    }
