"""``semantickv collect``: record OpenAI-compatible traffic as a redacted trace."""

from __future__ import annotations

import argparse
import asyncio
from datetime import UTC, datetime
from pathlib import Path

from semantickv import settings
from semantickv.engine_state.subscriber import EventSource
from semantickv.traces.collection import Collector
from semantickv.traces.kv_events import EventCollector
from semantickv.traces.segmentation import Classifier, Segmenter, load_rules
from semantickv.traces.trace_writer import TraceWriter
from semantickv.workloads.mock_traffic import collect_mock
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import say
from semblend.errors import InputError

EXAMPLES = (
    "semantickv collect --upstream http://127.0.0.1:8000 --output trace.jsonl",
    "semantickv collect --mock --output trace.jsonl",
)


def add(commands: Commands) -> None:
    parser = add_command(commands, "collect", run, "record OpenAI-compatible traffic as a trace", examples=EXAMPLES)
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


def run(args: argparse.Namespace) -> int:
    """Record traffic as a trace for replay and advise. With --upstream, a small proxy forwards every request as it is
    and writes one line for each; with --kv-events, requests are put together from what an engine publishes; with
    --mock, made-up traffic is written. No text is kept without --keep-text.
    """
    other = args.mock or args.kv_events
    upstream = args.upstream or ("" if other else settings.read_variable("SEMANTICKV_UPSTREAM_BASE_URL"))
    if not upstream and not other:
        raise InputError("collect needs --upstream, --kv-events or --mock", hint="--upstream http://127.0.0.1:8001")
    if args.requests is not None and args.requests < 1:
        raise InputError("--requests must be at least 1")
    redact = settings.read_flag("SEMANTICKV_REDACT_TEXT", True) and not args.keep_text
    key = settings.read_variable("SEMANTICKV_HASH_KEY")
    path = _choose_path(args)
    if path.exists() and path.stat().st_size:
        raise InputError(f"{path} is there already", hint="pass another --output: times begin again in every trace")
    with TraceWriter(path) as writer:
        if args.mock:
            collect_mock(writer, requests=args.requests or 50, seed=args.seed, redact=redact, key=key)
        elif args.kv_events:
            _listen(args, EventCollector(EventSource.parse(args.kv_events), writer, key=key))
        else:
            classifier = Classifier().with_rules(load_rules(args.rules)) if args.rules else Classifier()
            _run_proxy(args, upstream, Collector(writer, Segmenter(classifier, key=key), redact))
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


def _run_proxy(args: argparse.Namespace, upstream: str, collector: Collector) -> None:
    """Run the recording proxy until the wanted number of requests or Ctrl-C."""
    from semantickv.apps.collecting import CollectingApp
    from semblend.http.server import HttpServer, run_server

    timeout_s = settings.read_number("SEMANTICKV_PROXY_TIMEOUT_SECONDS", 600.0)
    app = CollectingApp(upstream, collector, timeout_s=timeout_s)

    def stop_when_enough(server: HttpServer) -> None:
        def look() -> None:
            if args.requests is not None and collector.writer.written >= args.requests:
                server.stop()

        app.on_recorded = look

    def announce(url: str) -> None:
        say(f"listening on {url}, forwarding to {upstream}; stop with Ctrl-C")

    run_server(app, args.host, args.port, announce=announce, drain_s=5, date_header=False, on_start=stop_when_enough)


def _choose_path(args: argparse.Namespace) -> Path:
    """Choose the path of the trace: --output, or a dated name in the output folder."""
    if args.output:
        return Path(args.output)
    folder = args.output_dir or settings.read_variable("SEMANTICKV_TRACE_OUTPUT_DIR") or "outputs/live_traces"
    return Path(folder) / f"{datetime.now(UTC).strftime('%Y%m%d_%H%M%S')}_{args.output_name}.jsonl"
