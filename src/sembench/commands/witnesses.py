"""Commands that collect evidence from engines: logs, counters, logs from Kubernetes. None of them changes a result."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sembench.backends import check_url, get_text, open_client
from sembench.files import open_output, read_float, write_json, write_text
from sembench.result import ARMS, get_unix_time, get_utc_time, read_result
from sembench.witnesses.engine_events import ENGINES, summarize_file
from sembench.witnesses.prometheus import (
    SNAPSHOT_VERSION,
    compare_snapshots,
    parse_samples,
    read_snapshot,
    read_snapshot_time,
)
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import say
from semblend.cli.shared_flags import MANY
from semblend.errors import InputError, MissingDependencyError


def add(commands: Commands) -> None:
    _add_engine_snapshot(commands)
    _add_engine_window(commands)
    _add_summarize_engine_events(commands)
    _add_collect_k8s_engine_events(commands)


# -- engine-snapshot -------------------------------------------------------------------------------------------------


def _add_engine_snapshot(commands: Commands) -> None:
    parser = add_command(
        commands,
        "engine-snapshot",
        engine_snapshot,
        "save the counters of an engine; with --before, what they did since",
    )
    flag = parser.add_argument
    flag("--metrics-url", **MANY, required=True, metavar="URL", help="addresses of Prometheus metrics")
    flag("--output", required=True, metavar="FILE", help="snapshot to write, JSON")
    flag("--before", default="", metavar="FILE", help="an earlier snapshot")
    flag("--timeout-seconds", type=float, default=30.0, metavar="S", help="seconds that one request may take")


def engine_snapshot(args: argparse.Namespace) -> int:
    """Scrape Prometheus endpoints. With --before, subtract an earlier snapshot of the same endpoints."""
    urls = [check_url(url, "--metrics-url") for url in args.metrics_url]
    endpoints = asyncio.run(_scrape(urls, args.timeout_seconds))
    snapshot: dict[str, Any] = {
        "snapshot_version": SNAPSHOT_VERSION,
        "created_at_utc": get_utc_time(),
        "taken_unix_s": get_unix_time(),
        "endpoints": endpoints,
    }
    if args.before:
        snapshot["delta"] = compare_snapshots(read_snapshot(args.before), endpoints)
    write_json(args.output, snapshot)
    failed = sum(one["error"] is not None for one in endpoints.values())
    print(json.dumps({"output": args.output, "endpoints": len(urls), "failed": failed} | snapshot.get("delta", {})))
    return 1 if failed == len(urls) else 0


async def _scrape(urls: list[str], timeout_s: float) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    async with open_client(timeout_s) as client:
        for url in urls:
            text, error = await get_text(client, url)
            samples = [] if text is None else parse_samples(text).items()
            found[url] = {
                "error": error,
                "samples": [[name, dict(labels), value] for (name, labels), value in samples if value == value],
            }
    return found


# -- engine-window ---------------------------------------------------------------------------------------------------


WINDOW_VERSION = "sembench.engine_window.v1"


def _add_engine_window(commands: Commands) -> None:
    parser = add_command(commands, "engine-window", engine_window, "what counters did between two snapshots")
    flag = parser.add_argument
    flag("--before", required=True, metavar="FILE", help="snapshot at the start")
    flag("--after", required=True, metavar="FILE", help="snapshot at the end")
    flag("--output", required=True, metavar="FILE", help="the window, JSON")
    flag("--result", default="", metavar="FILE", help="the run that was made in between")
    flag("--arm", choices=ARMS, default=None, help="only this arm of the result (default: all)")


def engine_window(args: argparse.Namespace) -> int:
    """What an engine's counters did between two snapshots; with --result, whether they bear out what receipts claim.

    Exit code 1 when the counters moved by less than the receipts of that arm add up to, or when the snapshots were not
    taken around the run.
    """
    window: dict[str, Any] = {
        "window_version": WINDOW_VERSION,
        "created_at_utc": get_utc_time(),
        "arm": args.arm,
        "before": args.before,
        "after": args.after,
        "delta": compare_snapshots(read_snapshot(args.before), read_snapshot(args.after)),
    }
    problem = None
    if args.result:
        window |= _sum_claims(args.result, args.arm)
        problem = _find_wrong_time(args) or _find_problem(window["claimed_tokens"], window["delta"])
        window["borne_out"] = None if window["claimed_tokens"] is None else problem is None
    write_json(args.output, window)
    told = {name: value for name, value in window.items() if name in ("claimed_tokens", "borne_out")}
    print(json.dumps({"output": args.output, **told, **window["delta"]}))
    if problem:
        say(f"error: {problem}")
        return 1
    return 0


def _sum_claims(path: str, arm: str | None) -> dict[str, Any]:
    records = [record for record in read_result(path).requests if arm is None or record.arm == arm]
    told = [record.reused_tokens for record in records if record.reused_tokens is not None]
    return {"result": path, "requests": len(records), "claimed_tokens": sum(told) if told else None}


def _find_wrong_time(args: argparse.Namespace) -> str | None:
    """Return why the snapshots are not this run's, or None if the first was taken before it and the last after it."""
    run = read_result(args.result).run or {}
    first, last = read_float(run.get("first_sent_unix_s")), read_float(run.get("last_finished_unix_s"))
    before, after = read_snapshot_time(args.before), read_snapshot_time(args.after)
    if first is None or last is None or before is None or after is None:
        return "the run or the snapshots do not say when they were made, so that nothing ties them together"
    return None if before <= first and last <= after else "the snapshots were not taken around this run"


def _find_problem(claimed: int | None, delta: dict[str, Any]) -> str | None:
    """Return why the counters contradict the claims, or None if they agree or nobody claimed anything."""
    if not claimed:
        return None
    if delta["counter_reset_detected"]:
        return "the engine was restarted between the snapshots: its counters prove nothing"
    known = [delta[name] for name in ("semblend_reused_tokens_delta", "external_prefix_cache_hits_delta")]
    moved = next((value for value in known if value is not None), None)
    if moved is None:
        return f"receipts claim {claimed} reused tokens, the engine has no counter for them"
    return f"receipts claim {claimed} reused tokens, the counters moved by {moved:.0f}" if moved < claimed else None


# -- summarize-engine-events -----------------------------------------------------------------------------------------


def _add_summarize_engine_events(commands: Commands) -> None:
    parser = add_command(
        commands,
        "summarize-engine-events",
        summarize_engine_events,
        "count reuse and errors in an engine's log or audit file",
    )
    flag = parser.add_argument
    flag("--engine", required=True, choices=ENGINES, help="whose lines these are")
    flag("--input", required=True, metavar="FILE", help="log or audit JSONL to read; .gz is unpacked")
    flag("--output", metavar="FILE", help="write the summary here; without it, to standard output")
    flag("--skip-bad", action="store_true", help="count broken audit lines and go on")


def summarize_engine_events(args: argparse.Namespace) -> int:
    """Count donors, hits, loads, materialized KV and errors in an engine's log, each event once."""
    summary = summarize_file(args.engine, args.input, skip_bad=args.skip_bad)
    write_summary(summary, args.output)
    return 0


def write_summary(summary: dict[str, Any], output: str | None) -> None:
    """Write the summary to a file and one line to standard error; without a file, all of it to standard output."""
    text = json.dumps(summary, indent=2, ensure_ascii=True)
    if output is None:
        print(text)
        return
    write_text(output, text + "\n")
    say(format_summary(summary))
    print(json.dumps({"output": output, "materialized_tokens": summary["materialized_tokens"]}))


def format_summary(summary: dict[str, Any]) -> str:
    return (
        f"{summary['engine']}: {summary['lines']} lines, {summary['donor_registrations']} donors, "
        f"{summary['semantic_hits']} hits, {summary['materialization_events']} materializations with "
        f"{summary['materialized_tokens']} tokens, {summary['errors']} errors"
    )


# -- a pod's log -----------------------------------------------------------------------------------------------------

DEFAULT_TAIL = 2000
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(h|m|s)")
_UNIT_S = {"h": 3600.0, "m": 60.0, "s": 1.0}


@dataclass(frozen=True, slots=True)
class PodLogQuery:
    """Which lines of which container. ``tail`` None means all of them."""

    namespace: str
    pod: str
    container: str | None = None
    tail: int | None = DEFAULT_TAIL
    since_s: float | None = None
    since_time: datetime | None = None
    previous: bool = False
    context: str | None = None
    kubeconfig: str | None = None
    timeout_s: float = 300.0

    @property
    def name(self) -> str:
        return f"pod {self.namespace}/{self.pod}" + (f" container {self.container}" if self.container else "")


def read_pod_log(query: PodLogQuery) -> Iterator[str]:
    """Yield the lines of the log without line breaks. A refusal of the cluster becomes a one-line error with a hint."""
    if shutil.which("kubectl") is None:
        raise MissingDependencyError("kubectl is not installed", hint="put kubectl on the PATH")
    with tempfile.TemporaryFile() as written:
        try:
            done = subprocess.run(
                build_command(query), stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.PIPE,
                timeout=query.timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise InputError(
                f"kubectl gave no log of {query.name} within {query.timeout_s:g} s", hint="check the connection"
            ) from None
        if done.returncode:
            raise _make_pod_error(query, done.stderr.decode("utf-8", "replace"))
        written.seek(0)
        for line in written:
            yield line.decode("utf-8", "replace").rstrip("\r\n")


def build_command(query: PodLogQuery) -> list[str]:
    """Return the kubectl command line. Every value is one word, so that no name can become a flag."""
    command = ["kubectl", "--namespace", query.namespace, "logs", f"pod/{query.pod}"]
    command += [f"--tail={-1 if query.tail is None else query.tail}"]
    if query.container:
        command += ["--container", query.container]
    if query.since_time is not None:
        command += [f"--since-time={query.since_time.astimezone(UTC).isoformat().replace('+00:00', 'Z')}"]
    if query.since_s is not None:
        command += [f"--since={max(1, round(query.since_s))}s"]
    if query.previous:
        command += ["--previous"]
    if query.context:
        command += ["--context", query.context]
    if query.kubeconfig:
        command += ["--kubeconfig", query.kubeconfig]
    return command


def parse_duration(duration: str) -> float:
    """Convert a duration as kubectl writes it into seconds.

    >>> parse_duration("1h30m")
    5400.0
    """
    parts = _DURATION.findall(duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise InputError(f"--since {duration!r} is no duration", hint="write it like 90s, 15m or 1h30m")
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)


def parse_time(text: str) -> datetime:
    """Read a time with its zone, as RFC 3339 writes it.

    >>> parse_time("2026-06-22T18:00:00Z").isoformat()
    '2026-06-22T18:00:00+00:00'
    """
    try:
        # Python reads microseconds at most; containers write nanoseconds.
        found = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
    except ValueError:
        found = None
    if found is None or found.tzinfo is None or "T" not in text.upper():
        raise InputError(
            f"--since-time {text!r} is no RFC 3339 time", hint="write it like 2026-06-22T18:00:00Z, with its zone"
        )
    return found


def _make_pod_error(query: PodLogQuery, said: str) -> InputError:
    """Turn the last line that kubectl wrote to standard error into an error with a hint."""
    lines = said.strip().splitlines()
    why = re.sub(r"^(?:error:|Error from server[^:]*:)\s*", "", lines[-1]) if lines else "no reason given"
    text = why.lower()
    if "container name must be specified" in text or ("container" in text and "not valid" in text):
        hint = "name one with --container"
    elif "not found" in text:
        hint = "check --namespace, --pod and --context"
    elif "forbidden" in text or "unauthorized" in text:
        hint = "the account needs the right to get pods/log in this namespace"
    elif "refused" in text or "timeout" in text or "no such host" in text:
        hint = "check --context, --kubeconfig and the connection"
    else:
        hint = "run kubectl logs by hand to see more"
    return InputError(f"cannot read the log of {query.name}: {why}", hint=hint)


# -- collect-k8s-engine-events ---------------------------------------------------------------------------------------


def _add_collect_k8s_engine_events(commands: Commands) -> None:
    parser = add_command(
        commands,
        "collect-k8s-engine-events",
        collect_k8s_engine_events,
        "fetch an engine's log from Kubernetes and summarize it",
    )
    flag = parser.add_argument
    flag("--engine", required=True, choices=ENGINES, help="whose lines these are")
    flag("--namespace", required=True, help="the pod's namespace")
    flag("--pod", required=True, help="the pod")
    flag("--container", help="the container, where the pod has several")
    flag(
        "--tail",
        type=int,
        metavar="N",
        help=f"only the last N lines, -1 for all; {DEFAULT_TAIL}, or all with --since or --since-time",
    )
    flag("--since", metavar="DURATION", help="only lines younger than this, like 15m")
    flag("--since-time", metavar="TIME", help="only lines from this time on, like 2026-06-22T18:00:00Z")
    flag("--previous", action="store_true", help="the container before its last restart")
    flag("--output-log", required=True, metavar="FILE", help="write the log here")
    flag("--output-summary", metavar="FILE", help="write the summary here; without it, to stdout")
    flag(
        "--client",
        choices=("auto", "python", "kubectl"),
        default="auto",
        help="ignored, kept for old scripts: kubectl is always used",
    )
    flag("--context", help="context of the kubeconfig")
    flag("--kubeconfig", metavar="FILE", help="kubeconfig to use")
    flag("--timeout-seconds", type=float, default=300.0, metavar="S", help="give up after this")


def collect_k8s_engine_events(args: argparse.Namespace) -> int:
    """Fetch a pod's log with kubectl and summarize it."""
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
