"""``sembench verify-endpoint``: check that a server answers and serves the expected model."""

from __future__ import annotations

import argparse
import asyncio
import json

from sembench.backends import PromptCall, SglangBackend, check_url, open_client
from sembench.commands.runs.live_flags import add_server_flags, make_backend, parse_keys
from semblend.cli.output import say

MISMATCH = 3

EXAMPLES = ("sembench verify-endpoint --base-url http://127.0.0.1:8000 --expect-model smollm2-135m",)


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "verify-endpoint",
        help="see whether a server answers and serves the expected model",
        description="Ask for the models and one short answer. Exit code 3 when something is not as expected.",
    )
    add_server_flags(parser, default="gateway")
    parser.add_argument("--expect-model", default="", metavar="NAME", help="the model that it must serve")
    parser.add_argument(
        "--timeout-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that one request may take (default: 60)",
    )


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
        # SGLang's way of listing models asks OpenAI's path first, so it works for both kinds of server.
        names, problem = await SglangBackend(client, base, keys=keys).list_models()
        model = args.expect_model or (names[0] if names else "")
        if problem is None and args.expect_model and args.expect_model not in names:
            problem = f"the server serves {', '.join(names) or 'no model'}, not {args.expect_model}"
        answer = None
        if problem is None:
            call = PromptCall(text="Say yes.", max_tokens=1, request_id="sb-verify")
            answer = await make_backend(args, client, model).ask(call)
            problem = answer.error
    return {
        "base_url": base,
        "models": list(names),
        "ttft_ms": None if answer is None else answer.ttft_ms,
        "reports_cached_tokens": None if answer is None else answer.cached_tokens is not None,
        "gives_receipts": None if answer is None else answer.receipt is not None,
        "problem": problem,
    }
