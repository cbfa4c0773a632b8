"""Flags that several servers share, and the values that they give."""

from __future__ import annotations

import argparse
from dataclasses import replace

from semantickv.settings import EdgeSettings
from semblend.errors import InputError
from semblend.http.server import TlsFiles


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
