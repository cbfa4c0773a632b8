"""``sembench run-live-gateway``: replay a manifest through any OpenAI-compatible gateway."""

from __future__ import annotations

import argparse
from urllib.parse import urlsplit

from sembench.backends import GatewayBackend, check_url
from sembench.commands.runs.live_flags import (
    add_confirmation_flags,
    add_measuring_flags,
    add_run_flags,
    parse_keys,
    parse_non_negative,
    parse_positive,
    run_live,
)
from semblend.errors import InputError

TIMEOUT_S = 900.0
RESET = "/reset_prefix_cache"
EXAMPLES = (
    "sembench run-live-gateway --manifest cases.jsonl --gateway-url http://127.0.0.1:8000 --model Qwen2.5-7B"
    " --output result.json --paired",
)


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "run-live-gateway",
        help="replay a manifest through an OpenAI-compatible gateway",
        description="Send donors to --donor-url, then the prompts that should reuse them (recipients) through "
        "--gateway-url, and check what comes back about reuse.",
    )
    add_run_flags(parser)
    parser.add_argument(
        "--gateway-url", "--base-url", required=True, metavar="URL", help="address that recipients are sent to"
    )
    parser.add_argument(
        "--donor-url", default="", metavar="URL", help="address that donors are sent to (default: the gateway)"
    )
    parser.add_argument(
        "--worker-url",
        nargs="+",
        action="extend",
        default=[],
        metavar="URL",
        help="addresses of the engines behind it, for their metrics",
    )
    parser.add_argument(
        "--reset-url",
        nargs="+",
        action="extend",
        default=[],
        metavar="URL",
        help=f"addresses to POST to, to empty caches (path: {RESET})",
    )
    parser.add_argument(
        "--tenant", default="tenant-a", metavar="NAME", help="tenant, sent as x-tenant-id (default: tenant-a)"
    )
    parser.add_argument(
        "--template",
        default="rag-template-v1",
        metavar="NAME",
        help="name of the chat template, sent as x-chat-template-id",
    )
    parser.add_argument(
        "--donor-max-tokens",
        type=parse_positive,
        default=1,
        metavar="N",
        help="tokens to generate for a donor (default: 1)",
    )
    parser.add_argument(
        "--recipient-max-tokens",
        type=parse_positive,
        default=256,
        metavar="N",
        help="tokens to generate for a recipient (default: 256)",
    )
    parser.add_argument(
        "--concurrency", type=parse_positive, default=1, metavar="N", help="requests at once (default: 1)"
    )
    parser.add_argument(
        "--min-donor-gap-requests",
        type=parse_non_negative,
        default=0,
        metavar="N",
        help="cases whose donors are sent before a recipient is asked",
    )
    parser.add_argument("--throughput-output", default="", metavar="FILE", help="file for the requests a second, JSON")
    add_measuring_flags(parser)
    add_confirmation_flags(parser)


def run(args: argparse.Namespace) -> int:
    gateway = check_url(args.gateway_url, "--gateway-url")
    donor = check_url(args.donor_url, "--donor-url") if args.donor_url else ""
    workers = [check_url(url, "--worker-url") for url in args.worker_url]
    resets = [_complete_reset_url(check_url(url, "--reset-url")) for url in args.reset_url]
    isolation = args.isolation
    if isolation == "auto":
        isolation = "flush" if resets else "salt"
    if isolation == "flush" and not resets:
        raise InputError("a gateway cannot be flushed", hint=f"give --reset-url http://engine:port{RESET}")
    keys = parse_keys(args.api_key)
    session = {
        "engine": "gateway",
        "servers": list(dict.fromkeys([gateway, *([donor] if donor else []), *workers])),
        "metrics_urls": [f"{url}/metrics" for url in dict.fromkeys(workers or [gateway, *([donor] if donor else [])])],
        "make": lambda client: GatewayBackend(
            client, gateway, args.model, donor_url=donor, reset_urls=resets, keys=keys, tokenizer=args.tokenizer
        ),
        "timeout_s": args.timeout_seconds or TIMEOUT_S,
        "throughput_output": args.throughput_output,
    }
    names = ("tenant", "template", "concurrency", "min_donor_gap_requests")
    settings = {
        "isolation": isolation,
        "donor_tokens": args.donor_max_tokens,
        "recipient_tokens": args.recipient_max_tokens,
        **{name: getattr(args, name) for name in names},
    }
    return run_live(args, session, settings)


def _complete_reset_url(url: str) -> str:
    """Add the usual path of the engine to a URL without a path."""
    return url if urlsplit(url).path.strip("/") else url + RESET
