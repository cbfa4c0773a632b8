"""``sembench engine-snapshot``: save the counters of an engine, and subtract an earlier snapshot."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from sembench.backends import check_url, get_text, open_client
from sembench.files import write_json
from sembench.result import get_unix_time, get_utc_time
from sembench.witnesses.prometheus import SNAPSHOT_VERSION, compare_snapshots, parse_samples, read_snapshot


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "engine-snapshot",
        help="save the counters of an engine; with --before, what they did since",
        description="Scrape Prometheus endpoints. With --before, subtract an earlier snapshot of the same endpoints.",
    )
    parser.add_argument(
        "--metrics-url",
        nargs="+",
        action="extend",
        required=True,
        metavar="URL",
        help="addresses of Prometheus metrics",
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="snapshot to write, JSON")
    parser.add_argument("--before", default="", metavar="FILE", help="an earlier snapshot")
    parser.add_argument(
        "--timeout-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that one request may take (default: 30)",
    )


def run(args: argparse.Namespace) -> int:
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
