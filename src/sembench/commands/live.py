"""Commands that ask a server: replay a manifest on it, measure its noise, see whether it answers."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sembench.backends import (
    GatewayBackend,
    PromptCall,
    ServerAnswer,
    ServerBackend,
    SglangBackend,
    check_url,
    open_client,
)
from sembench.files import make_folder_of, write_json
from sembench.live.run import ISOLATIONS, PAIRED_ARMS, LiveSettings
from sembench.live.session import LiveSession, run_session, summarize_result, verify_model
from sembench.manifests.cases import Case, choose_cases
from sembench.result import get_utc_time
from sembench.scoring.answers import (
    QUALITY_F1_FLOOR,
    QUALITY_THRESHOLD,
    compute_rouge_l,
    compute_token_f1,
    find_first_divergence,
)
from sembench.scoring.statistics import bootstrap_mean, compute_mean, compute_percentile
from sembench.trust import CALIBRATION_VERSION
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, say
from semblend.cli.shared_flags import MANY
from semblend.errors import InputError

if TYPE_CHECKING:
    from aiohttp import ClientSession


def add(commands: Commands) -> None:
    _add_verify_endpoint(commands)
    _add_calibrate_noise_floor(commands)
    _add_run_live_sglang(commands)
    _add_run_live_gateway(commands)


# -- flags that they share -------------------------------------------------------------------------------------------

SECRET = ("api_key", "admin_key", "judge_api_key")
NOT_CONFIG = (*SECRET, "run", "command", "debug", "manifest", "output", "resume", "quiet")


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for what is run and for how the result names itself."""
    flag = parser.add_argument
    flag("--manifest", required=True, metavar="FILE", help="cases to run, from sembench build")
    flag("--output", required=True, metavar="FILE", help="result file to write, JSON")
    flag("--model", required=True, metavar="NAME", help="the model that the server must serve")
    flag("--max-items", type=parse_positive, metavar="N", help="run N cases, every transform in turn (default: all)")
    flag("--block-size", type=parse_positive, default=16, metavar="N", help="tokens in a KV block of the engine")
    flag("--tokenizer", default="", metavar="NAME", help="name of the tokenizer, sent to routers (default: the model)")
    flag(
        "--timeout-seconds",
        type=float,
        default=None,
        metavar="S",
        help="seconds that one request may take (default: 3600 for run-live-sglang, 900 for run-live-gateway)",
    )
    flag("--resume", action="store_true", help="go on where an interrupted run stopped")
    flag("--skip-verify", action="store_true", help="do not ask the server which model it serves")
    flag("--quiet", action="store_true", help="no progress bar")
    names = parser.add_argument_group("what the result says of itself").add_argument
    names("--run-id", default="", metavar="NAME", help="name of the run (default: one is made up)")
    names("--backend-id", default="", metavar="NAME", help="name of the backend, for comparisons")
    names("--baseline-id", default="", metavar="NAME", help="name of the run to compare with")
    names("--engine-version", default="", metavar="TEXT", help="version of the engine, to be kept in the result")


def add_measuring_flags(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how it is measured").add_argument
    how(
        "--paired",
        action="store_true",
        help="run every case cold, warm (with its donors) and cold again, in random order",
    )
    how("--no-rerun", action="store_true", help="with --paired: leave the second cold arm out")
    how(
        "--arm",
        choices=["single", "cold", "warm"],
        default="single",
        help="run cold or warm alone, for sembench merge-results; single: warm, unpaired",
    )
    how("--seed", type=int, default=0, metavar="N", help="seed of the order of arms")
    how(
        "--isolation",
        choices=["auto", *ISOLATIONS],
        default="auto",
        help="how a case gets an empty cache: flush, or a cache_salt of its own (default: auto, what the server can)",
    )
    how(
        "--warmup-requests", type=parse_non_negative, default=2, metavar="N", help="requests sent first and thrown away"
    )
    how("--cooldown-ms", type=float, default=0.0, metavar="MS", help="pause after each request, in ms")
    how("--post-donor-delay-ms", type=float, default=0.0, metavar="MS", help="pause after the donors of a case, in ms")
    how("--capture-logprobs", action="store_true", help="ask for log-probabilities, for KL divergence and perplexity")
    how(
        "--top-logprobs-num",
        type=parse_positive,
        default=8,
        metavar="N",
        help="log-probabilities to ask for at each token",
    )
    how(
        "--quality-threshold",
        type=float,
        default=QUALITY_THRESHOLD,
        metavar="SHARE",
        help="share of the gold answer that must be met for an answer to pass (default: 0.60)",
    )
    how(
        "--quality-f1-floor",
        type=float,
        default=QUALITY_F1_FLOOR,
        metavar="F1",
        help="token F1 below which an answer never passes",
    )
    how("--no-reuse", action="store_true", help="ask the backend not to reuse: the baseline")
    how(
        "--tenant-pairs",
        type=parse_non_negative,
        default=0,
        metavar="N",
        help="ask N prompts as another tenant, too: nothing may be reused",
    )
    how("--other-tenant", default="tenant-b", metavar="NAME", help="name of that other tenant")
    how("--tenant-salt", action="store_true", help="give each tenant a cache_salt of its own, too")


def add_confirmation_flags(parser: argparse.ArgumentParser) -> None:
    who = parser.add_argument_group("who confirms").add_argument
    who(
        "--metrics-url",
        **MANY,
        metavar="URL",
        help="addresses of Prometheus metrics (default: /metrics of each server)",
    )
    who(
        "--connector-audit",
        **MANY,
        metavar="FILE",
        help="audit files that the connector wrote, JSONL",
    )
    who(
        "--engine-serve-command",
        default="",
        metavar="TEXT",
        help="command that started the engine, to be kept in the result",
    )
    who("--engine-serve-command-file", default="", metavar="FILE", help="the same, from a file")
    who(
        "--engine-env",
        **MANY,
        metavar="NAME=VALUE",
        help="variables of the engine, to be kept in the result",
    )
    who(
        "--require-phase0-flags",
        action="store_true",
        help="refuse an engine whose command switches off what the baseline needs, such as prefix caching",
    )
    keys = parser.add_argument_group("keys and judge").add_argument
    keys(
        "--api-key",
        action="append",
        default=[],
        metavar="[TENANT=]KEY",
        help="API key, of one tenant or of all; @FILE reads it from a file",
    )
    keys("--admin-key", default="", metavar="KEY", help="key for flushing and metrics; @FILE reads it from a file")
    keys("--judge-url", default="", metavar="URL", help="an OpenAI endpoint that judges the answers")
    keys("--judge-model", default="", metavar="NAME", help="model of that endpoint")
    keys("--judge-api-key", default="", metavar="KEY", help="key of that endpoint; @FILE reads it from a file")


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
    flag = parser.add_argument
    flag(
        "--engine",
        choices=["sglang", "gateway"],
        default=default,
        help="API of the server: SGLang's own, or OpenAI's (gateway)",
    )
    flag(*names, required=True, metavar="URL", help="address of the server, such as http://127.0.0.1:8000")
    flag(
        "--api-key",
        action="append",
        default=[],
        metavar="[TENANT=]KEY",
        help="API key, of one tenant or of all; @FILE reads it from a file",
    )


def make_backend(args: argparse.Namespace, client: ClientSession, model: str, **own: Any) -> ServerBackend:
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


# -- how the engine was started --------------------------------------------------------------------------------------

UNFAIR_FLAGS = {
    "--no-enable-prefix-caching": "the exact prefix cache is off",
    "--disable-radix-cache": "the exact prefix cache is off",
    "--disable-log-stats": "the engine counts nothing",
    "--speculative-config": "speculative decoding is on",
    "--speculative-algorithm": "speculative decoding is on",
}

HIDDEN = "***"
_SECRET = re.compile(r"(?:^|[-_])(?:key|token|secret|password|credentials?)$", re.IGNORECASE)


def describe_engine_flags(command: str, env: Sequence[str]) -> dict[str, Any]:
    """Return the ``engine`` object of a result from the command line. Keys and tokens are not kept.

    >>> describe_engine_flags("vllm serve m --port 1 --disable-log-stats", [])["phase0_flag_violations"]
    ['--disable-log-stats: the engine counts nothing']
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"the engine's command cannot be read: {error}", hint="quote it as a shell would") from None
    words = _hide_secrets(words)
    flags: dict[str, Any] = {}
    for at, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            follows = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else True
            flags[name] = value if equals else follows
    settings = {}
    for pair in env:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise InputError(f"--engine-env {pair!r} is not NAME=VALUE", hint="for example --engine-env A=1")
        settings[name] = HIDDEN if _SECRET.search(name) else value
    violations = [f"{name}: {why}" for name, why in UNFAIR_FLAGS.items() if name in flags]
    return {
        "command": shlex.join(words) or None,
        "flags": flags if command else None,
        "env": settings,
        "phase0_flag_violations": violations,
        "phase0_flags_ok": not violations if command else None,
    }


def _hide_secrets(words: Sequence[str]) -> list[str]:
    """Return the words with the values of ``--api-key``, ``NAME_TOKEN=`` and the like replaced.

    >>> _hide_secrets(["HF_TOKEN=x", "vllm", "--api-key", "y", "--admin-key=z", "--max-tokens", "5"])
    ['HF_TOKEN=***', 'vllm', '--api-key', '***', '--admin-key=***', '--max-tokens', '5']
    """
    kept: list[str] = []
    for word in words:
        name, equals, _ = word.partition("=")
        if equals and _SECRET.search(name):
            kept.append(f"{name}={HIDDEN}")
        elif kept and kept[-1].startswith("--") and "=" not in kept[-1] and _SECRET.search(kept[-1]):
            kept.append(HIDDEN)
        else:
            kept.append(word)
    return kept


def require_fair_flags(flags: dict[str, Any]) -> None:
    """Refuse an engine whose command is unknown or unfair (``--require-phase0-flags``)."""
    if flags["flags"] is None:
        raise InputError("the engine's flags are not known", hint="give --engine-serve-command")
    if flags["phase0_flag_violations"]:
        raise InputError(
            "the engine was started unfairly: " + "; ".join(flags["phase0_flag_violations"]),
            hint="start it without these flags",
        )


# -- run-live-gateway ------------------------------------------------------------------------------------------------

GATEWAY_TIMEOUT_S = 900.0
RESET = "/reset_prefix_cache"


def _add_run_live_gateway(commands: Commands) -> None:
    parser = add_command(
        commands,
        "run-live-gateway",
        run_live_gateway,
        "replay a manifest through an OpenAI-compatible gateway",
        examples=[
            "sembench run-live-gateway --manifest cases.jsonl --gateway-url http://127.0.0.1:8000 --model Qwen2.5-7B"
            " --output result.json --paired"
        ],
    )
    flag = parser.add_argument
    add_run_flags(parser)
    flag("--gateway-url", "--base-url", required=True, metavar="URL", help="address that recipients are sent to")
    flag("--donor-url", default="", metavar="URL", help="address that donors are sent to (default: the gateway)")
    flag("--worker-url", **MANY, metavar="URL", help="addresses of the engines behind it, for their metrics")
    flag("--reset-url", **MANY, metavar="URL", help=f"addresses to POST to, to empty caches (path: {RESET})")
    flag("--tenant", default="tenant-a", metavar="NAME", help="tenant, sent as x-tenant-id")
    flag(
        "--template",
        default="rag-template-v1",
        metavar="NAME",
        help="name of the chat template, sent as x-chat-template-id",
    )
    flag("--donor-max-tokens", type=parse_positive, default=1, metavar="N", help="tokens to generate for a donor")
    flag(
        "--recipient-max-tokens",
        type=parse_positive,
        default=256,
        metavar="N",
        help="tokens to generate for a recipient",
    )
    flag("--concurrency", type=parse_positive, default=1, metavar="N", help="requests at once")
    flag(
        "--min-donor-gap-requests",
        type=parse_non_negative,
        default=0,
        metavar="N",
        help="cases whose donors are sent before a recipient is asked",
    )
    flag("--throughput-output", default="", metavar="FILE", help="file for the requests a second, JSON")
    add_measuring_flags(parser)
    add_confirmation_flags(parser)


def run_live_gateway(args: argparse.Namespace) -> int:
    """Send donors to --donor-url, then the prompts that should reuse them (recipients) through --gateway-url, and
    check what comes back about reuse.
    """
    gateway = check_url(args.gateway_url, "--gateway-url")
    donor = check_url(args.donor_url, "--donor-url") if args.donor_url else ""
    workers = [check_url(url, "--worker-url") for url in args.worker_url]
    resets = [_complete_reset_url(check_url(url, "--reset-url")) for url in args.reset_url]
    isolation = args.isolation
    if isolation == "auto":
        isolation = "flush" if resets else "salt"
    if isolation == "flush" and not resets:
        raise InputError("a gateway cannot be flushed", hint=f"give --reset-url http://engine:port{RESET}")
    keys = parse_keys(args.api_key)
    session = {
        "engine": "gateway",
        "servers": list(dict.fromkeys([gateway, *([donor] if donor else []), *workers])),
        "metrics_urls": [f"{url}/metrics" for url in dict.fromkeys(workers or [gateway, *([donor] if donor else [])])],
        "make": lambda client: GatewayBackend(
            client, gateway, args.model, donor_url=donor, reset_urls=resets, keys=keys, tokenizer=args.tokenizer
        ),
        "timeout_s": args.timeout_seconds or GATEWAY_TIMEOUT_S,
        "throughput_output": args.throughput_output,
    }
    names = ("tenant", "template", "concurrency", "min_donor_gap_requests")
    settings = {
        "isolation": isolation,
        "donor_tokens": args.donor_max_tokens,
        "recipient_tokens": args.recipient_max_tokens,
        **{name: getattr(args, name) for name in names},
    }
    return run_live(args, session, settings)


def _complete_reset_url(url: str) -> str:
    """Add the usual path of the engine to a URL without a path."""
    return url if urlsplit(url).path.strip("/") else url + RESET


# -- run-live-sglang -------------------------------------------------------------------------------------------------

SGLANG_TIMEOUT_S = 3600.0


def _add_run_live_sglang(commands: Commands) -> None:
    parser = add_command(
        commands,
        "run-live-sglang",
        run_live_sglang,
        "replay a manifest on an SGLang server, or the embedded one",
        examples=[
            "sembench build --profile synthetic-v1 --output cases.jsonl",
            "sembench run-live-sglang --manifest cases.jsonl --base-url http://127.0.0.1:8000 --model smollm2-135m"
            " --output result.json --paired",
        ],
    )
    flag = parser.add_argument
    add_run_flags(parser)
    flag("--base-url", required=True, metavar="URL", help="address of the server, such as http://127.0.0.1:30000")
    flag("--donor-max-new-tokens", type=parse_positive, default=1, metavar="N", help="tokens to generate for a donor")
    flag(
        "--recipient-max-new-tokens",
        type=parse_positive,
        default=16,
        metavar="N",
        help="tokens to generate for a recipient",
    )
    flag("--no-flush-per-item", action="store_true", help="do not empty the cache between cases")
    flag("--tenant", default="", metavar="NAME", help="tenant, sent as x-tenant-id (default: none)")
    add_measuring_flags(parser)
    add_confirmation_flags(parser)


def run_live_sglang(args: argparse.Namespace) -> int:
    """Send donors, then the prompts that should reuse them (recipients), over /generate, and check what the server
    says about reuse.
    """
    base = check_url(args.base_url, "--base-url")
    isolation = args.isolation
    if isolation == "auto":
        isolation = "none" if args.no_flush_per_item else "flush"
    keys = parse_keys(args.api_key)
    session = {
        "engine": "sglang",
        "servers": [base],
        "metrics_urls": [f"{base}/metrics"],
        "make": lambda client: SglangBackend(client, base, keys=keys),
        "timeout_s": args.timeout_seconds or SGLANG_TIMEOUT_S,
    }
    settings = {
        "isolation": isolation,
        "donor_tokens": args.donor_max_new_tokens,
        "recipient_tokens": args.recipient_max_new_tokens,
        "tenant": args.tenant,
    }
    return run_live(args, session, settings)


# -- verify-endpoint -------------------------------------------------------------------------------------------------

MISMATCH = 3


def _add_verify_endpoint(commands: Commands) -> None:
    parser = add_command(
        commands,
        "verify-endpoint",
        verify_endpoint,
        "see whether a server answers and serves the expected model",
        examples=["sembench verify-endpoint --base-url http://127.0.0.1:8000 --expect-model smollm2-135m"],
    )
    add_server_flags(parser, default="gateway")
    parser.add_argument("--expect-model", default="", metavar="NAME", help="the model that it must serve")
    parser.add_argument(
        "--timeout-seconds", type=float, default=60.0, metavar="S", help="seconds that one request may take"
    )


def verify_endpoint(args: argparse.Namespace) -> int:
    """Ask for the models and one short answer. Exit code 3 when something is not as expected."""
    found = asyncio.run(_verify(args))
    print(json.dumps(found))
    if found["problem"]:
        say(f"error: {found['problem']}")
        say("hint: check --base-url, --engine and --expect-model")
        return MISMATCH
    return 0


async def _verify(args: argparse.Namespace) -> dict[str, object]:
    base, keys = check_url(args.base_url, "--base-url"), parse_keys(args.api_key)
    async with open_client(args.timeout_seconds) as client:
        # SGLang's way of listing models asks OpenAI's path first, so it works for both kinds of server.
        names, problem = await SglangBackend(client, base, keys=keys).list_models()
        model = args.expect_model or (names[0] if names else "")
        if problem is None and args.expect_model and args.expect_model not in names:
            problem = f"the server serves {', '.join(names) or 'no model'}, not {args.expect_model}"
        answer = None
        if problem is None:
            call = PromptCall(text="Say yes.", max_tokens=1, request_id="sb-verify")
            answer = await make_backend(args, client, model).ask(call)
            problem = answer.error
    return {
        "base_url": base,
        "models": list(names),
        "ttft_ms": None if answer is None else answer.ttft_ms,
        "reports_cached_tokens": None if answer is None else answer.cached_tokens is not None,
        "gives_receipts": None if answer is None else answer.receipt is not None,
        "problem": problem,
    }


# -- calibrate-noise-floor -------------------------------------------------------------------------------------------

BANDS = (("2k", 2048), ("4k", 4096), ("8k", 8192), ("12k", 12288), ("16k", 1 << 60))


def _add_calibrate_noise_floor(commands: Commands) -> None:
    parser = add_command(
        commands, "calibrate-noise-floor", calibrate_noise_floor, "measure how far two cold answers lie apart"
    )
    flag = parser.add_argument
    flag("--manifest", required=True, metavar="FILE", help="cases to ask, from sembench build")
    flag("--output", required=True, metavar="FILE", help="calibration to write, JSON")
    add_server_flags(parser, default="sglang")
    flag("--engine-version", default="", metavar="TEXT", help="version of the engine, to be kept in the result")
    flag("--model", required=True, metavar="NAME", help="the model that the server must serve")
    flag("--max-items", type=parse_positive, default=200, metavar="N", help="cases to ask")
    flag("--max-new-tokens", type=parse_positive, default=64, metavar="N", help="tokens to generate")
    flag("--cooldown-ms", type=float, default=0.0, metavar="MS", help="pause after each request, in ms")
    flag(
        "--warmup-requests", type=parse_non_negative, default=2, metavar="N", help="requests sent first and thrown away"
    )
    flag("--timeout-seconds", type=float, default=900.0, metavar="S", help="seconds that one request may take")
    flag("--reset-url", **MANY, metavar="URL", help="addresses to POST to, to empty the caches behind a gateway")
    flag("--skip-verify", action="store_true", help="do not ask the server which model it serves")


def calibrate_noise_floor(args: argparse.Namespace) -> int:
    """Ask every prompt twice with an empty cache. What differs between the two answers is noise, and reuse is judged
    by it.
    """
    make_folder_of(args.output)
    pairs = asyncio.run(_measure_pairs(args))
    found = build_calibration(pairs, engine=args.engine, engine_version=args.engine_version, model=args.model)
    found["server"] = check_url(args.base_url, "--base-url")
    write_json(args.output, found)
    wanted = ("n_pairs", "pairs_contaminated", "pairs_errored", "rouge_l_mean", "ttft_ratio_p95")
    print(json.dumps({"output": args.output} | {name: found[name] for name in wanted}))
    return 0 if found["n_pairs"] else 1


ColdPair = tuple[Case, ServerAnswer, ServerAnswer]


async def _measure_pairs(args: argparse.Namespace) -> list[ColdPair]:
    async with open_client(args.timeout_seconds) as client:
        backend = make_backend(args, client, args.model, reset_urls=args.reset_url)
        if not args.skip_verify:
            await verify_model(backend, args.model)
        flushes = args.engine == "sglang" or bool(args.reset_url)
        for number in range(args.warmup_requests):
            await backend.ask(PromptCall(text=f"Warm up {number}.", max_tokens=4, request_id=f"sb-warmup-{number}"))
        progress = Progress()
        pairs: list[ColdPair] = []
        for case in choose_cases(args.manifest, args.max_items):
            answers = [await _ask(backend, case, at, flushes, args) for at in range(2)]
            pairs.append((case, answers[0], answers[1]))
            if progress.due():
                progress.show(f"{len(pairs)} pairs")
        progress.clear()
    return pairs


async def _ask(backend: ServerBackend, case: Case, at: int, flushes: bool, args: argparse.Namespace) -> ServerAnswer:
    name = f"sb-noise-{case.item_id}-{at}"
    if flushes:
        error = await backend.flush()
        if error is not None:
            raise InputError(f"the cache cannot be emptied: {error}", hint="check --base-url and --reset-url")
    salt = "" if flushes else name
    call = PromptCall(text=case.recipient_prompt, max_tokens=args.max_new_tokens, request_id=name, salt=salt)
    answer = await backend.ask(call)
    await asyncio.sleep(args.cooldown_ms / 1000)
    return answer


def build_calibration(pairs: Sequence[ColdPair], *, engine: str, engine_version: str, model: str) -> dict[str, Any]:
    """Return the calibration of these pairs. A pair counts if both answers came and neither used a cache."""
    errored = [pair for pair in pairs if pair[1].error or pair[2].error]
    contaminated = [pair for pair in pairs if pair not in errored and any(a.cached_tokens for a in pair[1:])]
    used = [pair for pair in pairs if pair not in errored and pair not in contaminated]
    scores = [compute_rouge_l(second.text, first.text) for _, first, second in used]
    sources = [case.source_id for case, _, _ in used]
    ratios = [a.ttft_ms / b.ttft_ms for _, a, b in used if a.ttft_ms and b.ttft_ms]
    interval = bootstrap_mean(sources, scores)
    return {
        "calibration_version": CALIBRATION_VERSION,
        "created_at_utc": get_utc_time(),
        "engine": engine,
        "engine_version": engine_version or None,
        "model": model,
        "n_pairs": len(used),
        "pairs_contaminated": len(contaminated),
        "pairs_errored": len(errored),
        "per_length_band": _score_by_length(used, scores),
        "rouge_l_mean": compute_mean(scores),
        "rouge_l_ci": None
        if interval is None
        else {"lo": interval[0], "hi": interval[1], "point": compute_mean(scores)},
        "rouge_l_p05": compute_percentile(scores, 5),
        "rouge_l_p50": compute_percentile(scores, 50),
        "f1_mean": compute_mean([compute_token_f1(second.text, first.text) for _, first, second in used]),
        "identical_share": compute_mean(
            [find_first_divergence(a.output_units, b.output_units) is None for _, a, b in used]
        ),
        "ttft_ratio_p05": compute_percentile(ratios, 5),
        "ttft_ratio_p50": compute_percentile(ratios, 50),
        "ttft_ratio_p95": compute_percentile(ratios, 95),
    }


def _score_by_length(pairs: Sequence[ColdPair], scores: Sequence[float]) -> dict[str, Any]:
    groups: dict[str, list[float]] = {name: [] for name, _ in BANDS}
    for (_, first, _), score in zip(pairs, scores, strict=True):
        if first.prompt_tokens is not None:
            groups[next(name for name, most in BANDS if first.prompt_tokens <= most)].append(score)
    return {name: {"mean": compute_mean(values), "n": len(values)} for name, values in groups.items()}
