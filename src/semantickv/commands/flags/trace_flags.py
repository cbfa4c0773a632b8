"""Flags that the commands over traces share, and the values they give."""

from __future__ import annotations

import argparse

from semantickv.analysis.calibration import Calibration, Observations, calibrate, read_observations
from semantickv.analysis.latency import LatencyModel
from semantickv.traces.formats import FORMATS
from semantickv.traces.trace import Trace
from semblend.cli.output import say
from semblend.errors import InputError


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that name a trace and say how to read it."""
    parser.add_argument(
        "--trace",
        required=True,
        metavar="FILE",
        help="trace of requests to read, plain or gzip; semantickv collect writes one",
    )
    parser.add_argument(
        "--format", choices=("auto", *FORMATS), default="auto", help="format of the trace (default: what it looks like)"
    )
    parser.add_argument(
        "--block-tokens", type=int, metavar="N", help="tokens in a block, where the format does not say"
    )
    parser.add_argument("--skip-bad", action="store_true", help="skip bad lines and count them")
    parser.add_argument("--sort", action="store_true", help="sort the requests by time of arrival")
    parser.add_argument("--max-requests", type=int, metavar="N", help="use the first N requests only")


def add_latency_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the latency line."""
    parser.add_argument(
        "--base-ms",
        type=float,
        metavar="MS",
        help="time to first token of an empty prompt, in ms (default: 80, or by model and GPU)",
    )
    parser.add_argument(
        "--ms-per-uncached-token",
        type=float,
        metavar="MS",
        help="prefill time of a token, in ms (default: 0.08, or by model and GPU)",
    )
    parser.add_argument(
        "--calibrate-from-trace",
        action="store_true",
        help="fit --base-ms and --ms-per-uncached-token to the times in the trace",
    )


def read_trace(args: argparse.Namespace) -> Trace:
    """Read the trace that the flags name; report skipped lines on standard error."""
    trace = Trace.read(args.trace, args.format, block_tokens=args.block_tokens, skip_bad=args.skip_bad, sort=args.sort)
    if args.max_requests is not None:
        if args.max_requests < 1:
            raise InputError("--max-requests must be at least 1")
        trace = trace.take_first(args.max_requests)
    if trace.skipped:
        say(f"skipped {trace.skipped} bad line{'s' if trace.skipped > 1 else ''} of {args.trace}")
    return trace


def choose_latency(
    args: argparse.Namespace, trace: Trace, default: LatencyModel | None = None
) -> tuple[LatencyModel, Calibration | None, Observations | None]:
    """Choose the latency line: calibrated from the trace, given by flags, or ``default`` (80 ms and 0.08 ms a token).

    The calibration and its observations are None unless it was calibrated.
    """
    given = args.base_ms is not None or args.ms_per_uncached_token is not None
    if args.calibrate_from_trace:
        if given:
            raise InputError(
                "--calibrate-from-trace and a given latency exclude each other",
                hint="drop --base-ms and --ms-per-uncached-token",
            )
        seen = read_observations(args.trace, trace)
        fitted = calibrate(seen)
        return fitted.model, fitted, seen
    default = default or LatencyModel()
    if not given:
        return default, None, None
    return (
        LatencyModel(
            default.base_ttft_ms if args.base_ms is None else args.base_ms,
            default.token_latency_ms if args.ms_per_uncached_token is None else args.ms_per_uncached_token,
            "given",
        ),
        None,
        None,
    )
