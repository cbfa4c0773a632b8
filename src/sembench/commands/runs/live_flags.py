"""The flags that the live commands share, and how they become settings, sessions and backends."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sembench.backends import GatewayBackend, ServerBackend, SglangBackend, check_url
from sembench.live.run import ISOLATIONS, PAIRED_ARMS, LiveSettings
from sembench.live.session import LiveSession, run_session, summarize_result
from sembench.scoring.answers import QUALITY_F1_FLOOR, QUALITY_THRESHOLD
from sembench.witnesses.engine_flags import describe_engine_flags, require_fair_flags
from semblend.errors import InputError

if TYPE_CHECKING:
    import httpx

SECRET = ("api_key", "admin_key", "judge_api_key")
NOT_CONFIG = (*SECRET, "run", "command", "debug", "manifest", "output", "resume", "quiet")


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for what is run and for how the result names itself."""
    parser.add_argument("--manifest", required=True, metavar="FILE", help="cases to run, from sembench build")
    parser.add_argument("--output", required=True, metavar="FILE", help="result file to write, JSON")
    parser.add_argument("--model", required=True, metavar="NAME", help="the model that the server must serve")
    parser.add_argument(
        "--max-items", type=parse_positive, metavar="N", help="run N cases, every transform in turn (default: all)"
    )
    parser.add_argument(
        "--block-size",
        type=parse_positive,
        default=16,
        metavar="N",
        help="tokens in a KV block of the engine (default: 16)",
    )
    parser.add_argument(
        "--tokenizer", default="", metavar="NAME", help="name of the tokenizer, sent to routers (default: the model)"
    )
    parser.add_argument(
        "--timeout-seconds",
        type=float,
        default=None,
        metavar="S",
        help="seconds that one request may take (default: 3600 for run-live-sglang, 900 for run-live-gateway)",
    )
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted run stopped")
    parser.add_argument("--skip-verify", action="store_true", help="do not ask the server which model it serves")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    names = parser.add_argument_group("what the result says of itself")
    names.add_argument("--run-id", default="", metavar="NAME", help="name of the run (default: one is made up)")
    names.add_argument("--backend-id", default="", metavar="NAME", help="name of the backend, for comparisons")
    names.add_argument("--baseline-id", default="", metavar="NAME", help="name of the run to compare with")
    names.add_argument(
        "--engine-version", default="", metavar="TEXT", help="version of the engine, to be kept in the result"
    )


def add_measuring_flags(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how it is measured")
    how.add_argument(
        "--paired",
        action="store_true",
        help="run every case cold, warm (with its donors) and cold again, in random order",
    )
    how.add_argument("--no-rerun", action="store_true", help="with --paired: leave the second cold arm out")
    how.add_argument(
        "--arm",
        choices=["single", "cold", "warm"],
        default="single",
        help="run cold or warm alone, for sembench merge-results; single: warm, unpaired (default: single)",
    )
    how.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the order of arms (default: 0)")
    how.add_argument(
        "--isolation",
        choices=["auto", *ISOLATIONS],
        default="auto",
        help="how a case gets an empty cache: flush, or a cache_salt of its own (default: auto, what the server can)",
    )
    how.add_argument(
        "--warmup-requests",
        type=parse_non_negative,
        default=2,
        metavar="N",
        help="requests sent first and thrown away (default: 2)",
    )
    how.add_argument(
        "--cooldown-ms", type=float, default=0.0, metavar="MS", help="pause after each request, in ms (default: 0)"
    )
    how.add_argument(
        "--post-donor-delay-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="pause after the donors of a case, in ms (default: 0)",
    )
    how.add_argument(
        "--capture-logprobs", action="store_true", help="ask for log-probabilities, for KL divergence and perplexity"
    )
    how.add_argument(
        "--top-logprobs-num",
        type=parse_positive,
        default=8,
        metavar="N",
        help="log-probabilities to ask for at each token (default: 8)",
    )
    how.add_argument(
        "--quality-threshold",
        type=float,
        default=QUALITY_THRESHOLD,
        metavar="SHARE",
        help="share of the gold answer that must be met for an answer to pass (default: 0.60)",
    )
    how.add_argument(
        "--quality-f1-floor",
        type=float,
        default=QUALITY_F1_FLOOR,
        metavar="F1",
        help="token F1 below which an answer never passes (default: %(default)s)",
    )
    how.add_argument("--no-reuse", action="store_true", help="ask the backend not to reuse: the baseline")
    how.add_argument(
        "--tenant-pairs",
        type=parse_non_negative,
        default=0,
        metavar="N",
        help="ask N prompts as another tenant, too: nothing may be reused (default: 0)",
    )
    how.add_argument(
        "--other-tenant", default="tenant-b", metavar="NAME", help="name of that other tenant (default: tenant-b)"
    )
    how.add_argument("--tenant-salt", action="store_true", help="give each tenant a cache_salt of its own, too")


def add_confirmation_flags(parser: argparse.ArgumentParser) -> None:
    who = parser.add_argument_group("who confirms")
    who.add_argument(
        "--metrics-url",
        nargs="+",
        action="extend",
        default=[],
        metavar="URL",
        help="addresses of Prometheus metrics (default: /metrics of each server)",
    )
    who.add_argument(
        "--connector-audit",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="audit files that the connector wrote, JSONL",
    )
    who.add_argument(
        "--engine-serve-command",
        default="",
        metavar="TEXT",
        help="command that started the engine, to be kept in the result",
    )
    who.add_argument("--engine-serve-command-file", default="", metavar="FILE", help="the same, from a file")
    who.add_argument(
        "--engine-env",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="variables of the engine, to be kept in the result",
    )
    who.add_argument(
        "--require-phase0-flags",
        action="store_true",
        help="refuse an engine whose command switches off what the baseline needs, such as prefix caching",
    )
    keys = parser.add_argument_group("keys and judge")
    keys.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="[TENANT=]KEY",
        help="API key, of one tenant or of all; @FILE reads it from a file",
    )
    keys.add_argument(
        "--admin-key", default="", metavar="KEY", help="key for flushing and metrics; @FILE reads it from a file"
    )
    keys.add_argument("--judge-url", default="", metavar="URL", help="an OpenAI endpoint that judges the answers")
    keys.add_argument("--judge-model", default="", metavar="NAME", help="model of that endpoint")
    keys.add_argument(
        "--judge-api-key", default="", metavar="KEY", help="key of that endpoint; @FILE reads it from a file"
    )


def build_settings(args: argparse.Namespace, **own: Any) -> LiveSettings:
    """Return the settings that the shared flags ask for; ``own`` are the fields that the command sets itself."""
    arms: tuple[str, ...] = (args.arm,)
    if args.paired:
        if args.arm != "single":
            raise InputError(f"--paired runs all arms, --arm {args.arm} one", hint="leave one of them out")
        arms = PAIRED_ARMS[:2] if args.no_rerun else PAIRED_ARMS
    if len(arms) > 1 and own.get("isolation") == "none":
        raise InputError("a cold arm needs an empty cache", hint="leave --isolation and --no-flush-per-item out")
    return LiveSettings(
        arms=arms,
        post_donor_delay_ms=args.post_donor_delay_ms,
        cooldown_ms=args.cooldown_ms,
        warmup_requests=args.warmup_requests,
        block_size=args.block_size,
        top_logprobs=args.top_logprobs_num if args.capture_logprobs else None,
        quality_threshold=args.quality_threshold,
        quality_f1_floor=args.quality_f1_floor,
        tenant_pairs=args.tenant_pairs,
        other_tenant=args.other_tenant,
        tenant_salt=args.tenant_salt,
        reuse=not args.no_reuse,
        seed=args.seed,
        max_items=args.max_items,
        **own,
    )


def build_session(args: argparse.Namespace, *, engine: str, metrics_urls: Sequence[str], **own: Any) -> LiveSession:
    command = args.engine_serve_command
    if args.engine_serve_command_file:
        command = read_text(args.engine_serve_command_file)
    flags = describe_engine_flags(command, args.engine_env)
    if args.require_phase0_flags:
        require_fair_flags(flags)
    admin = read_secret(args.admin_key)
    return LiveSession(
        manifest=args.manifest,
        output=args.output,
        model=args.model,
        metrics_urls=[check_url(url, "--metrics-url") for url in args.metrics_url] or metrics_urls,
        metrics_required=bool(args.metrics_url),
        headers={"Authorization": f"Bearer {admin}"} if admin else {},
        audit_paths=args.connector_audit,
        verify=not args.skip_verify,
        resume=args.resume,
        engine=flags,
        identity={
            "engine": engine,
            "run_id": args.run_id or None,
            "backend_id": args.backend_id or None,
            "baseline_id": args.baseline_id or None,
            "engine_version": args.engine_version or None,
        },
        config={name: value for name, value in vars(args).items() if name not in NOT_CONFIG},
        judge_url=check_url(args.judge_url, "--judge-url") if args.judge_url else "",
        judge_model=args.judge_model,
        judge_key=read_secret(args.judge_api_key),
        quiet=args.quiet,
        **own,
    )


def run_live(args: argparse.Namespace, session: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """Run a live command and return its exit code. ``session`` and ``settings`` are the command's own fields.

    The exit code is 1 where not a single request was answered.
    """
    result = run_session(build_session(args, **session), build_settings(args, **settings))
    print(json.dumps(summarize_result(result, args.output)))
    return 1 if result.requests and all(record.error for record in result.requests) else 0


def add_server_flags(parser: argparse.ArgumentParser, *, default: str, names: Sequence[str] = ("--base-url",)) -> None:
    """Add the flags of a command that talks to one server of either kind."""
    parser.add_argument(
        "--engine",
        choices=["sglang", "gateway"],
        default=default,
        help="API of the server: SGLang's own, or OpenAI's (gateway) (default: %(default)s)",
    )
    parser.add_argument(
        *names, required=True, metavar="URL", help="address of the server, such as http://127.0.0.1:8000"
    )
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="[TENANT=]KEY",
        help="API key, of one tenant or of all; @FILE reads it from a file",
    )


def make_backend(args: argparse.Namespace, client: httpx.AsyncClient, model: str, **own: Any) -> ServerBackend:
    """Return the backend that ``--engine``, ``--base-url`` and ``--api-key`` ask for."""
    base, keys = check_url(args.base_url, "--base-url"), parse_keys(args.api_key)
    if args.engine == "sglang":
        return SglangBackend(client, base, keys=keys)
    return GatewayBackend(client, base, model, keys=keys, **own)


def parse_keys(pairs: Sequence[str]) -> Mapping[str, str]:
    """Return API keys by tenant; a key without a tenant is for everyone.

    >>> parse_keys(["acme=k1", "k2"])
    {'acme': 'k1', '': 'k2'}
    """
    found = {}
    for pair in pairs:
        tenant, equals, key = pair.partition("=")
        found[tenant if equals else ""] = read_secret(key if equals else pair)
    return found


def read_secret(text: str) -> str:
    """Return a key, or the content of the file named after ``@``: other users can read a command line."""
    return read_text(text[1:]).strip() if text.startswith("@") else text


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint="check the path") from None


def parse_positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def parse_non_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)
