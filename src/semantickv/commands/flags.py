"""Flags that several servers share, and the values that they give."""

from __future__ import annotations

import argparse
from dataclasses import replace

from semantickv.apps.tls import TlsFiles
from semantickv.settings import EdgeSettings
from semblend.errors import InputError


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
