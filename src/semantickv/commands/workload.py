"""``semantickv workload``: write made-up or text-based traffic as a trace."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from semantickv.traces.trace import Trace, TraceRequest, describe_trace
from semantickv.workloads.families import FAMILIES, PROCESSES, Arrivals, generate_workload
from semantickv.workloads.from_text import BLOCK_TOKENS, TEXT_WORKLOADS, TextSource, generate_text_workload
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import check_target, print_json, say
from semblend.errors import InputError

EXAMPLES = ("semantickv workload support_agent --output trace.jsonl",)


def add(commands: Commands) -> None:
    parser = add_command(commands, "workload", run, "write a trace of made-up or text-based traffic", examples=EXAMPLES)
    flag = parser.add_argument
    flag("family", choices=(*TEXT_WORKLOADS, *FAMILIES), help="kind of traffic")
    flag("--output", required=True, metavar="FILE", help="trace to write (.jsonl or .jsonl.gz)")
    flag("--data-dir", metavar="DIR", help="folder with chat, agent_traces and rag, for real text")
    flag("--sessions", type=int, metavar="N", help="sessions (default: 50, or all of the text)")
    flag("--requests", type=int, default=6, metavar="N", help="requests of a made-up session")
    flag("--seed", type=int, default=0, metavar="N", help="seed of what is drawn")
    flag("--arrivals", choices=PROCESSES, default="poisson", help="process that draws the times of arrival")
    flag("--rate", type=float, default=0.5, metavar="R", help="sessions that begin in a second")
    flag(
        "--think-s",
        type=float,
        default=20.0,
        metavar="S",
        help="mean pause between two requests of a session, in seconds",
    )
    flag("--burstiness", type=float, default=0.3, metavar="B", help="below 1, gamma arrivals come in bursts")
    flag("--block-tokens", type=int, default=BLOCK_TOKENS, metavar="N", help="tokens in a block of text, at most")
    flag("--tenants", type=int, default=1, metavar="N", help="tenants of a made-up family")


def run(args: argparse.Namespace) -> int:
    """Write a trace: one of the made-up families, or real text (chats, agents, rag) from --data-dir with drawn
    arrivals. Traces hold hashes and lengths, no text.
    """
    check_target(args.output)
    arrivals = Arrivals(args.arrivals, rate=args.rate, think_s=args.think_s, burstiness=args.burstiness)
    if args.sessions is not None and args.sessions < 1:
        raise InputError("--sessions must be at least 1")
    if args.family in TEXT_WORKLOADS:
        if not args.data_dir:
            raise InputError(f"{args.family} is real text and needs --data-dir", hint="a folder with chat, rag, ...")
        if args.block_tokens < 8:
            raise InputError("--block-tokens must be at least 8")
        source = TextSource(Path(args.data_dir), args.seed, args.sessions, arrivals, args.block_tokens)
        trace = generate_text_workload(args.family, source)
    else:
        trace = generate_workload([args.family], sessions=args.sessions or 50, requests=args.requests, seed=args.seed,
                         arrivals=arrivals, tenants=args.tenants)  # fmt: skip
    write_trace(trace, args.output)
    print_json(describe_trace(trace))
    say(f"wrote {args.output}")
    return 0


def write_trace(trace: Trace, path: str) -> None:
    """Write a trace as JSON Lines; a name that ends in .gz is compressed."""
    try:
        with _open(path) as stream:
            for line in _format_lines(trace):
                stream.write(line + "\n")
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}", hint="check the folder and its permissions"
        ) from None


def _open(path: str) -> IO[str]:
    """Open a text file to write, compressed if its name ends in .gz."""
    return gzip.open(path, "wt", encoding="utf-8") if path.endswith(".gz") else Path(path).open("w", encoding="utf-8")


def _format_lines(trace: Trace) -> Iterator[str]:
    """Format each request as one line of JSON."""
    for request in trace.iter_requests():
        yield json.dumps(_format_request(request), separators=(",", ":"))


def _format_request(request: TraceRequest) -> dict[str, Any]:
    """Build the JSON object of one request."""
    blocks = zip(request.block_ids, request.block_tokens, request.block_types, strict=True)
    line: dict[str, Any] = {
        "request_id": request.request_id,
        "timestamp_ms": round(request.arrival_s * 1000, 3),
        "session_id": request.session,
        "tenant_id": request.tenant,
        "output_tokens": request.output_tokens,
        "blocks": [
            {"content_hash": number, "semantic_type": kind, "token_count": tokens} for number, tokens, kind in blocks
        ],
    }
    return line if request.ttft_ms is None else line | {"observed_ttft_ms": request.ttft_ms}
