"""Commands about traces: write made-up traffic, show how a prompt is cut."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from semantickv.traces.segmentation import Classifier, Segmenter, TextBlock, load_rules
from semantickv.traces.trace import Trace, TraceRequest, describe_trace
from semantickv.workloads.families import FAMILIES, PROCESSES, Arrivals, generate_workload
from semantickv.workloads.from_text import BLOCK_TOKENS, TEXT_WORKLOADS, TextSource, generate_text_workload
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import check_target, print_json, say, table
from semblend.errors import InputError


def add(commands: Commands) -> None:
    """Declare the commands of this module."""
    _add_workload(commands)
    _add_segment(commands)


WORKLOAD_EXAMPLES = ("semantickv workload support_agent --output trace.jsonl",)


def _add_workload(commands: Commands) -> None:
    parser = add_command(
        commands, "workload", run_workload, "write a trace of made-up or text-based traffic", examples=WORKLOAD_EXAMPLES
    )
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


def run_workload(args: argparse.Namespace) -> int:
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
        with _open_output(path) as stream:
            for line in _format_lines(trace):
                stream.write(line + "\n")
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}", hint="check the folder and its permissions"
        ) from None


def _open_output(path: str) -> IO[str]:
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


def _add_segment(commands: Commands) -> None:
    parser = add_command(commands, "segment", run_segment, "show a prompt's typed blocks")
    flag = parser.add_argument
    flag("prompt", nargs="?", default="-", metavar="FILE", help="text or JSON; - reads standard input (default: -)")
    flag("--rules", metavar="FILE", help="TOML file with more rules; they come before the built-in ones")
    flag(
        "--max-block-tokens", type=int, default=0, metavar="N", help="cut longer blocks, in tokens (default: 0, never)"
    )
    flag("--show-rules", action="store_true", help="print the rules in their order, and nothing else")
    flag("--json", action="store_true", help="print JSON")


def run_segment(args: argparse.Namespace) -> int:
    """Cut a prompt (text, chat messages or an OpenAI request) into typed blocks with lengths and hashes."""
    classifier = Classifier().with_rules(load_rules(args.rules)) if args.rules else Classifier()
    if args.show_rules:
        _show_rules(classifier, as_json=args.json)
        return 0
    blocks = _cut_prompt(
        _read_prompt(args.prompt), Segmenter(classifier, max_block_tokens=max(0, args.max_block_tokens))
    )
    if args.json:
        print_json([{"semantic_type": b.type, "token_count": b.tokens, "content_hash": b.content_hash} for b in blocks])
    else:
        rows = [(b.type, b.tokens, b.content_hash, _shorten(b.text)) for b in blocks]
        print(table(rows, head=("type", "tokens", "hash", "text"), right=(1,)))
    return 0


def _show_rules(classifier: Classifier, *, as_json: bool) -> None:
    """Print the classification rules in their order."""
    rules = [
        {
            "name": rule.name,
            "type": rule.type,
            "roles": list(rule.roles),
            "labels": list(rule.labels),
            "pattern": rule.pattern,
            "min_hits": rule.min_hits,
            "min_words": rule.min_words,
        }
        for rule in classifier.rules
    ]
    if as_json:
        print_json(rules)
        return
    rows = []
    for rule in classifier.rules:
        conditions = [
            f"role {' | '.join(rule.roles)}" if rule.roles else "",
            f"label {' | '.join(rule.labels)}" if rule.labels else "",
            f"{rule.min_hits} x /{rule.pattern}/" if rule.pattern else "",
            f"at least {rule.min_words} words" if rule.min_words else "",
        ]
        rows.append((rule.name, rule.type, _shorten(", ".join(filter(None, conditions)), 100)))
    print(table(rows, head=("rule", "type", "when")))


def _read_prompt(source: str) -> str:
    """Read a file, or standard input for ``-``."""
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror}", hint="check the path") from None
    except UnicodeDecodeError:
        raise InputError(f"{source} is not UTF-8 text") from None


def _cut_prompt(text: str, segmenter: Segmenter) -> tuple[TextBlock, ...]:
    """Cut text, a list of messages or an OpenAI request into blocks."""
    if not text.strip():
        raise InputError("the prompt is empty", hint="pass a file, or text on standard input")
    try:
        value = json.loads(text)
    except ValueError:
        return segmenter.cut_text(text)
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return segmenter.cut_messages(value["messages"])
    if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        return segmenter.cut_messages(value)
    return segmenter.cut_text(text)


def _shorten(text: str, most: int = 60) -> str:
    """Put a text on one line of at most ``most`` characters."""
    one = " ".join(text.split())
    return one if len(one) <= most else one[: most - 1] + "…"
