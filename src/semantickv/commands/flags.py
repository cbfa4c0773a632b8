"""Flags that several commands share, and the values that they give."""

from __future__ import annotations

import argparse
from dataclasses import replace

from semantickv.analysis.calibration import Calibration, Observations, calibrate, read_observations
from semantickv.analysis.latency import LatencyModel
from semantickv.settings import EdgeSettings
from semantickv.traces.formats import FORMATS
from semantickv.traces.trace import Trace
from semblend.cli.output import say
from semblend.errors import InputError
from semblend.http.server import TlsFiles

# -- traces ----------------------------------------------------------------------------------------------------------


def add_trace_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that name a trace and say how to read it."""
    flag = parser.add_argument
    flag(
        "--trace",
        required=True,
        metavar="FILE",
        help="trace of requests to read, plain or gzip; semantickv collect writes one",
    )
    flag(
        "--format", choices=("auto", *FORMATS), default="auto", help="format of the trace (default: what it looks like)"
    )
    flag("--block-tokens", type=int, metavar="N", help="tokens in a block, where the format does not say")
    flag("--skip-bad", action="store_true", help="skip bad lines and count them")
    flag("--sort", action="store_true", help="sort the requests by time of arrival")
    flag("--max-requests", type=int, metavar="N", help="use the first N requests only")


def add_latency_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the latency line."""
    flag = parser.add_argument
    flag(
        "--base-ms",
        type=float,
        metavar="MS",
        help="time to first token of an empty prompt, in ms (default: 80, or by model and GPU)",
    )
    flag(
        "--ms-per-uncached-token",
        type=float,
        metavar="MS",
        help="prefill time of a token, in ms (default: 0.08, or by model and GPU)",
    )
    flag(
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


# -- servers ---------------------------------------------------------------------------------------------------------


def add_listen_flags(parser: argparse.ArgumentParser, *, port: int) -> None:
    """Declare where to listen, and how."""
    flag = parser.add_argument
    flag("--host", default="127.0.0.1", help="address to listen on")
    flag("--port", type=int, default=port, metavar="PORT", help="port to listen on; 0 takes any free one")
    flag(
        "--drain",
        "--drain-seconds",
        type=int,
        default=30,
        metavar="SECONDS",
        help="seconds for running requests after a stop signal",
    )
    flag("--tls-cert", metavar="FILE", help="serve HTTPS with this certificate (PEM, with its chain)")
    flag("--tls-key", metavar="FILE", help="its private key (default: in the certificate's file)")


def add_serve_flags(parser: argparse.ArgumentParser, *, port: int) -> None:
    """Declare where to listen and what to write down."""
    flag = parser.add_argument
    add_listen_flags(parser, port=port)
    flag("--no-trace", action="store_true", help="write no traces")
    flag("--keep-text", action="store_true", help="write the prompts' text into the traces")
    flag("--output-dir", metavar="DIR", help="folder of the traces (default: outputs/live_traces)")


def add_engine_reuse_flag(parser: argparse.ArgumentParser) -> None:
    """Declare what the engines behind a router can reuse."""
    parser.add_argument(
        "--engine-reuse",
        choices=("spans", "prefix"),
        help="what the engines reuse: spans, equal passages anywhere (engines with semblend in them), or prefix, equal "
        "beginnings only (stock vLLM, SGLang and others) (default: SEMANTICKV_ENGINE_REUSE, else spans)",
    )


_FAULT_FLAGS = {
    "health_s": ("--health-seconds", float, "SECONDS", "time between two health checks of a replica (default: 5)"),
    "health_timeout_s": ("--health-timeout", float, "SECONDS", "time that a health check may take (default: 2)"),
    "health_failures": ("--health-failures", int, "N", "failed checks in a row that take a replica out (default: 2)"),
    "hang_s": ("--hang-seconds", float, "SECONDS", "time without any answer that takes a replica out (default: 10)"),
    "max_attempts": ("--max-attempts", int, "N", "replicas that a request is sent to before it fails (default: 3)"),
    "breaker_faults": ("--breaker-faults", int, "N", "faults in a row after which a replica pauses (default: 3)"),
    "breaker_s": ("--breaker-seconds", float, "SECONDS", "its first pause, doubled after failed trials (default: 1)"),
    "breaker_max_s": ("--breaker-max-seconds", float, "SECONDS", "its longest pause (default: 60)"),
}


def add_fault_flags(parser: argparse.ArgumentParser) -> None:
    """Declare when a replica is taken out, and how often a request is tried; each stands in for its variable."""
    for name, (flag, kind, word, text) in _FAULT_FLAGS.items():
        parser.add_argument(flag, dest=name, type=kind, metavar=word, help=text)


def apply_fault_flags(settings: EdgeSettings, args: argparse.Namespace) -> EdgeSettings:
    """Return the settings with the limits that flags name."""
    given = {name: getattr(args, name) for name in _FAULT_FLAGS if getattr(args, name) is not None}
    for name, value in given.items():
        if not value > 0:
            raise InputError(f"{_FAULT_FLAGS[name][0]} {value} is too small", hint="a number above 0")
    return replace(settings, **given)


def read_tls(args: argparse.Namespace) -> TlsFiles | None:
    """The files for HTTPS, or None where the flags name none."""
    if args.tls_key and not args.tls_cert:
        raise InputError("--tls-key without --tls-cert", hint="name the certificate too")
    return TlsFiles(args.tls_cert, args.tls_key) if args.tls_cert else None


def apply_trace_flags(settings: EdgeSettings, args: argparse.Namespace) -> EdgeSettings:
    """Return the settings with what the flags change."""
    return replace(
        settings,
        trace=settings.trace and not args.no_trace,
        redact_text=settings.redact_text and not args.keep_text,
        trace_dir=args.output_dir or settings.trace_dir,
    )
