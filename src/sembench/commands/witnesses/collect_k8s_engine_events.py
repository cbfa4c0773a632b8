"""``sembench collect-k8s-engine-events``: fetch a pod's log and summarize it."""

from __future__ import annotations

import argparse

from sembench.commands.witnesses.summarize_engine_events import write_summary
from sembench.files import open_output
from sembench.witnesses.engine_events import ENGINES, summarize_file
from sembench.witnesses.kubernetes_logs import DEFAULT_TAIL, PodLogQuery, parse_duration, parse_time, read_pod_log
from semblend.cli.output import say
from semblend.errors import InputError


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "collect-k8s-engine-events",
        help="fetch an engine's log from Kubernetes and summarize it",
        description="Fetch a pod's log with kubectl and summarize it.",
    )
    parser.add_argument("--engine", required=True, choices=ENGINES, help="whose lines these are")
    parser.add_argument("--namespace", required=True, help="the pod's namespace")
    parser.add_argument("--pod", required=True, help="the pod")
    parser.add_argument("--container", help="the container, where the pod has several")
    parser.add_argument(
        "--tail", type=int, metavar="N",
        help=f"only the last N lines, -1 for all; {DEFAULT_TAIL}, or all with --since or --since-time",
    )  # fmt: skip
    parser.add_argument("--since", metavar="DURATION", help="only lines younger than this, like 15m")
    parser.add_argument("--since-time", metavar="TIME", help="only lines from this time on, like 2026-06-22T18:00:00Z")
    parser.add_argument("--previous", action="store_true", help="the container before its last restart")
    parser.add_argument("--output-log", required=True, metavar="FILE", help="write the log here")
    parser.add_argument("--output-summary", metavar="FILE", help="write the summary here; without it, to stdout")
    parser.add_argument(
        "--client", choices=("auto", "python", "kubectl"), default="auto",
        help="ignored, kept for old scripts: kubectl is always used",
    )  # fmt: skip
    parser.add_argument("--context", help="context of the kubeconfig")
    parser.add_argument("--kubeconfig", metavar="FILE", help="kubeconfig to use")
    parser.add_argument("--timeout-seconds", type=float, default=300.0, metavar="S", help="give up after this (300)")


def run(args: argparse.Namespace) -> int:
    query = parse_query(args)
    lines = 0
    with open_output(args.output_log) as stream:
        for line in read_pod_log(query):
            stream.write(line + "\n")
            lines += 1
    say(f"{query.name}: {lines} lines to {args.output_log}")
    if lines == 0:
        say("hint: no line in this range; check --since-time, --container and the clock")
    if query.tail is not None and lines >= query.tail:
        say(f"hint: exactly {lines} lines came, so older ones may be cut; raise --tail, or --tail -1 for all")
    # A pod's log mixes streams, and its first line may be half a record, so bad lines are counted and skipped.
    write_summary(summarize_file(args.engine, args.output_log, skip_bad=True), args.output_summary)
    return 0


def parse_query(args: argparse.Namespace) -> PodLogQuery:
    """Read the flags. A name that kubectl would read as a flag is refused before anything runs."""
    for flag in ("namespace", "pod", "container", "context"):
        value = getattr(args, flag)
        if value is not None and (not value.strip() or value.startswith("-")):
            raise InputError(f"--{flag} {value!r} is no name", hint=f"pass the {flag}'s name")
    if args.since and args.since_time:
        raise InputError("--since and --since-time are both given", hint="pass one of them")
    ranged = bool(args.since or args.since_time)
    tail = args.tail if args.tail is not None else (-1 if ranged else DEFAULT_TAIL)
    if tail == 0 or tail < -1:
        raise InputError(f"--tail {tail} asks for no line", hint="pass a positive number, or -1 for all")
    if args.timeout_seconds <= 0:
        raise InputError(f"--timeout-seconds {args.timeout_seconds:g} is not positive", hint="pass seconds, like 300")
    return PodLogQuery(
        namespace=args.namespace,
        pod=args.pod,
        container=args.container,
        tail=None if tail == -1 else tail,
        since_s=parse_duration(args.since) if args.since else None,
        since_time=parse_time(args.since_time) if args.since_time else None,
        previous=args.previous,
        context=args.context,
        kubeconfig=args.kubeconfig,
        timeout_s=args.timeout_seconds,
    )
