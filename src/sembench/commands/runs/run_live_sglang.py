"""``sembench run-live-sglang``: replay a manifest on a server that speaks SGLang's native API."""

from __future__ import annotations

import argparse

from sembench.backends import SglangBackend, check_url
from sembench.commands.runs.live_flags import (
    add_confirmation_flags,
    add_measuring_flags,
    add_run_flags,
    parse_keys,
    parse_positive,
    run_live,
)

TIMEOUT_S = 3600.0
EXAMPLES = (
    "sembench build --profile synthetic-v1 --output cases.jsonl",
    "sembench run-live-sglang --manifest cases.jsonl --base-url http://127.0.0.1:8000 --model smollm2-135m"
    " --output result.json --paired",
)


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "run-live-sglang",
        help="replay a manifest on an SGLang server, or the embedded one",
        description="Send donors, then the prompts that should reuse them (recipients), over /generate, and check what "
        "the server says about reuse.",
    )
    add_run_flags(parser)
    parser.add_argument(
        "--base-url", required=True, metavar="URL", help="address of the server, such as http://127.0.0.1:30000"
    )
    parser.add_argument(
        "--donor-max-new-tokens",
        type=parse_positive,
        default=1,
        metavar="N",
        help="tokens to generate for a donor (default: 1)",
    )
    parser.add_argument(
        "--recipient-max-new-tokens",
        type=parse_positive,
        default=16,
        metavar="N",
        help="tokens to generate for a recipient (default: 16)",
    )
    parser.add_argument("--no-flush-per-item", action="store_true", help="do not empty the cache between cases")
    parser.add_argument("--tenant", default="", metavar="NAME", help="tenant, sent as x-tenant-id (default: none)")
    add_measuring_flags(parser)
    add_confirmation_flags(parser)


def run(args: argparse.Namespace) -> int:
    base = check_url(args.base_url, "--base-url")
    isolation = args.isolation
    if isolation == "auto":
        isolation = "none" if args.no_flush_per_item else "flush"
    keys = parse_keys(args.api_key)
    session = {
        "engine": "sglang",
        "servers": [base],
        "metrics_urls": [f"{base}/metrics"],
        "make": lambda client: SglangBackend(client, base, keys=keys),
        "timeout_s": args.timeout_seconds or TIMEOUT_S,
    }
    settings = {
        "isolation": isolation,
        "donor_tokens": args.donor_max_new_tokens,
        "recipient_tokens": args.recipient_max_new_tokens,
        "tenant": args.tenant,
    }
    return run_live(args, session, settings)
