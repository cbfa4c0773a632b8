"""Commands that make traces and show what is in them: collect, workload, segment."""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from semantickv.engine_state.subscriber import EventSource
from semantickv.settings import EdgeSettings
from semantickv.traces.collection import Collector
from semantickv.traces.kv_events import EventCollector
from semantickv.traces.segmentation import Classifier, Segmenter, TextBlock, load_rules
from semantickv.traces.trace import Trace, describe_trace
from semantickv.traces.trace_writer import TraceWriter
from semantickv.workloads.families import FAMILIES, PROCESSES, Arrivals, generate_workload
from semantickv.workloads.from_text import BLOCK_TOKENS, TEXT_WORKLOADS, TextSource, generate_text_workload
from semantickv.workloads.mock_traffic import collect_mock
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import check_target, print_json, say, table
from semblend.errors import InputError


def add(commands: Commands) -> None:
    """Declare the commands of this module."""
    _add_collect(commands)
    _add_workload(commands)
    _add_segment(commands)


COLLECT_EXAMPLES = (
    "semantickv collect --upstream http://127.0.0.1:8000 --output trace.jsonl",
    "semantickv collect --mock --output trace.jsonl",
)


def _add_collect(commands: Commands) -> None:
    parser = add_command(
        commands, "collect", run_collect, "record OpenAI-compatible traffic as a trace", examples=COLLECT_EXAMPLES
    )
    flag = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--upstream",
        metavar="URL",
        help="engine to forward to, such as http://127.0.0.1:8000 (default: SEMANTICKV_UPSTREAM_BASE_URL)",
    )
    source.add_argument(
        "--kv-events", metavar="ADDRESS", help="listen to vLLM's or SGLang's KV events (tcp://HOST:PORT)"
    )
    source.add_argument("--mock", action="store_true", help="made-up traffic on a made-up clock; every line says so")
    flag("--host", default="127.0.0.1", help="address that the proxy listens on")
    flag("--port", type=int, default=8010, metavar="PORT", help="port of the proxy; 0 takes any free one")
    flag("--requests", type=int, metavar="N", help="stop after N requests (default: 50 with --mock, else never)")
    flag("--seed", type=int, default=7, metavar="N", help="seed of the made-up traffic")
    flag("--keep-text", action="store_true", help="write the prompts' text into the trace")
    flag("--rules", metavar="FILE", help="TOML file with more classification rules")
    flag("--output-dir", metavar="DIR", help="folder of the trace (default: outputs/live_traces)")
    flag("--output-name", default="trace", metavar="NAME", help="end of the file's name")
    flag("--output", metavar="FILE", help="the trace's whole path, in place of the two above")


def run_collect(args: argparse.Namespace) -> int:
    """Record traffic as a trace for replay and advise. With --upstream, a small proxy forwards every request as it is
    and writes one line for each; with --kv-events, requests are put together from what an engine publishes; with
    --mock, made-up traffic is written. No text is kept without --keep-text.
    """
    settings = EdgeSettings.read()
    other = args.mock or args.kv_events
    upstream = args.upstream or ("" if other else settings.upstream)
    if not upstream and not other:
        raise InputError("collect needs --upstream, --kv-events or --mock", hint="--upstream http://127.0.0.1:8001")
    if args.requests is not None and args.requests < 1:
        raise InputError("--requests must be at least 1")
    redact, key = settings.redact_text and not args.keep_text, settings.hash_key
    stamp = datetime.now(UTC).strftime("%Y%m%d_%H%M%S")
    path = Path(args.output or f"{args.output_dir or settings.trace_dir}/{stamp}_{args.output_name}.jsonl")
    if path.exists() and path.stat().st_size:
        raise InputError(f"{path} is there already", hint="pass another --output: times begin again in every trace")
    with TraceWriter(path) as writer:
        if args.mock:
            collect_mock(writer, requests=args.requests or 50, seed=args.seed, redact=redact, key=key)
        elif args.kv_events:
            _listen(args, EventCollector(EventSource.parse(args.kv_events), writer, key=key))
        else:
            classifier = Classifier().with_rules(load_rules(args.rules)) if args.rules else Classifier()
            collector = Collector(writer, Segmenter(classifier, key=key), redact)
            _run_proxy(args, upstream, collector, settings.timeout_s)
    print(path)
    say(f"{writer.written} requests recorded" + (" (mock: made up)" if args.mock else ""))
    return 0


def _listen(args: argparse.Namespace, collector: EventCollector) -> None:
    """Write what the events show until the wanted number of requests or Ctrl-C."""
    say(f"listening to {args.kv_events}; stop with Ctrl-C")
    try:
        asyncio.run(collector.run(args.requests))
    except KeyboardInterrupt:
        say("stopping")
    say("requests that the engine served from its cache alone publish nothing and are not in the trace")
    if collector.left_out:
        say(f"{collector.left_out} stored blocks had a beginning that was not seen: left out")


def _run_proxy(args: argparse.Namespace, upstream: str, collector: Collector, timeout_s: float) -> None:
    """Run the recording proxy until the wanted number of requests or Ctrl-C."""
    from semantickv.apps.collecting import CollectingApp
    from semblend.http.server import HttpServer, run_server

    app = CollectingApp(upstream, collector, timeout_s=timeout_s)

    def stop_when_enough(server: HttpServer) -> None:
        def look() -> None:
            if args.requests is not None and collector.writer.written >= args.requests:
                server.stop()

        app.on_recorded = look

    def announce(url: str) -> None:
        say(f"listening on {url}, forwarding to {upstream}; stop with Ctrl-C")

    run_server(app, args.host, args.port, announce=announce, drain_s=5, date_header=False, on_start=stop_when_enough)


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
        opened = gzip.open if path.endswith(".gz") else open
        with opened(path, "wt", encoding="utf-8") as out:
            for request in trace.iter_requests():
                out.write(json.dumps(request.as_json(), separators=(",", ":")) + "\n")
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror}", hint="check the folder and its permissions"
        ) from None


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
    if as_json:
        print_json([asdict(rule) for rule in classifier.rules])
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
