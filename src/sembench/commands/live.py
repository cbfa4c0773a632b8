"""Commands that replay a manifest on a server: run-live-sglang and run-live-gateway."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sembench.backends import (
    GatewayBackend,
    ServerBackend,
    SglangBackend,
    check_url,
    open_client,
    read_identity,
    verify_model,
)
from sembench.files import hash_file, make_folder_of, open_text, write_json
from sembench.live.judge import judge_answers
from sembench.live.run import ISOLATIONS, PAIRED_ARMS, LiveRun, LiveSettings, ResumeLog
from sembench.manifests.cases import choose_cases, count_cases, read_manifest
from sembench.result import RequestRecord, Result, describe_run, get_unix_time, write_result
from sembench.scoring.aggregate import build_result
from sembench.scoring.answers import QUALITY_F1_FLOOR, QUALITY_THRESHOLD
from sembench.scoring.statistics import compute_mean, compute_percentile
from sembench.witnesses.audit import AuditLog
from sembench.witnesses.prometheus import Scraper
from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, say
from semblend.cli.shared_flags import MANY
from semblend.errors import InputError

if TYPE_CHECKING:
    from aiohttp import ClientSession


def add(commands: Commands) -> None:
    _add_run_live_sglang(commands)
    _add_run_live_gateway(commands)


# -- flags that they share -------------------------------------------------------------------------------------------

API_KEY: dict[str, Any] = {
    "action": "append",
    "default": [],
    "metavar": "[TENANT=]KEY",
    "help": "API key, of one tenant or of all; @FILE reads it from a file",
}
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
    keys("--api-key", **API_KEY)
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
    same = {field.name for field in fields(LiveSettings)} & vars(args).keys()  # most settings are flags of that name
    own |= {"arms": arms, "top_logprobs": args.top_logprobs_num if args.capture_logprobs else None}
    return LiveSettings(**{name: getattr(args, name) for name in same} | {"reuse": not args.no_reuse, **own})


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTarget:
    """What a command runs against. ``make`` builds the backend on an open client; the metrics are its default ones."""

    engine: str
    servers: Sequence[str]
    metrics_urls: Sequence[str]
    make: Callable[[ClientSession], ServerBackend]
    timeout_s: float
    throughput_output: str = ""


def run_live(args: argparse.Namespace, target: LiveTarget, **own: Any) -> int:
    """Run a live command, write the result and return the exit code. ``own`` are the settings that the command sets.

    The exit code is 1 where not a single request was answered. After an interruption, the log of finished cases stays.
    """
    settings, engine = build_settings(args, **own), read_engine_flags(args)
    try:
        result = asyncio.run(_run(args, target, settings, engine))
    except KeyboardInterrupt:
        say("hint: the same command with --resume goes on where this stopped")
        raise
    print(json.dumps(summarize_result(result, args.output)))
    return 1 if result.requests and all(record.error for record in result.requests) else 0


async def _run(
    args: argparse.Namespace, target: LiveTarget, settings: LiveSettings, engine: Mapping[str, Any]
) -> Result:
    make_folder_of(args.output)
    # What is wrong with the flags is reported before the measuring starts.
    metrics = [check_url(url, "--metrics-url") for url in args.metrics_url]
    judge_url = check_url(args.judge_url, "--judge-url") if args.judge_url else ""
    judge_headers = _authorize(args.judge_api_key)
    for path in args.connector_audit:
        open_text(path).close()
    total = count_cases(args.manifest, settings.max_items, one_version=not args.skip_verify)
    what: dict[str, Any] = {"manifest_sha256": hash_file(args.manifest), "model": args.model}
    what |= {"servers": list(target.servers), **_describe_settings(settings)}
    del what["max_items"]  # a run may be continued with more cases
    async with open_client(target.timeout_s, _authorize(args.admin_key)) as client:
        backend = target.make(client)
        if not args.skip_verify:
            await verify_model(backend, args.model)
        scraper = Scraper(client, metrics or target.metrics_urls)
        if not metrics:
            await scraper.keep_working_ones()
        what["server_identity"] = [await read_identity(client, url) for url in target.servers]
        opened = {"started_unix_s": get_unix_time(), "servers": what["server_identity"]}
        log = ResumeLog(args.output, what, resume=args.resume, session=opened)
        if log.done:
            say(f"{len(log.done)} cases are done already; going on with the rest")
        audit = (lambda: AuditLog.read(args.connector_audit)) if args.connector_audit else None
        live = LiveRun(
            backend, settings, scraper, log, audit=audit, progress=_ProgressBar(total, quiet=args.quiet).show
        )
        finished, started = False, time.perf_counter()
        try:
            records = await live.run(choose_cases(args.manifest, settings.max_items))
            wall_s = time.perf_counter() - started
            if judge_url:  # with a client of its own, so that the judge never gets the keys of the measured server
                say(f"judging {len(records)} answers")
                questions = {case.item_id: (case.input, case.answers) for case in read_manifest(args.manifest)}
                async with open_client(target.timeout_s, judge_headers) as judge:
                    name = args.judge_model or args.model
                    records = await judge_answers(judge, judge_url, name, records, questions)
            delta = live.compute_engine_delta() if scraper.urls else None
            last = {"finished_unix_s": get_unix_time(), "process_start_unix_s": live.process_start_unix_s}
            facts = {
                "request_prefix": f"sb-{log.run_name}",
                "servers": list(target.servers),
                "server_identity": what["server_identity"],
                "sessions": [*log.sessions[:-1], {**log.sessions[-1], **last}],
            }
            config = {name: value for name, value in vars(args).items() if name not in NOT_CONFIG}
            measured = {"isolation_verified": live.isolation_verified, "metrics_urls": list(scraper.urls)}
            result = build_result(
                records,
                run={**_describe_run(args, target.engine, settings), **describe_window(records), **facts},
                config={**config, **_describe_settings(settings), "mode": "live", **measured},
                engine={**engine, "prometheus": None if delta is None else {"delta": delta}},
            )
            write_result(args.output, result)
            if target.throughput_output:
                write_json(target.throughput_output, compute_throughput(records, live, settings, wall_s))
            finished = not any(record.error for record in records)  # else --resume asks the failed cases again
        finally:
            log.close(finished=finished)
    _print_warnings(live, records, scraper.urls, settings)
    return result


def _authorize(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {read_secret(key)}"} if key else {}


def _describe_settings(settings: LiveSettings) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}


def _describe_run(args: argparse.Namespace, engine: str, settings: LiveSettings) -> dict[str, Any]:
    return describe_run(
        engine=engine,
        manifest_path=args.manifest,
        manifest_sha256=hash_file(args.manifest),
        arm="paired" if len(settings.arms) > 1 else settings.arms[0],
        run_id=args.run_id or None,
        backend_id=args.backend_id or None,
        baseline_id=args.baseline_id or None,
        engine_version=args.engine_version or None,
    )


def describe_window(records: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Return when the first request was sent and the last answer ended: the time that evidence must come from."""
    sent = [record.sent_unix_s for record in records if record.sent_unix_s is not None]
    ended = [record.finished_unix_s for record in records if record.finished_unix_s is not None]
    return {"first_sent_unix_s": min(sent, default=None), "last_finished_unix_s": max(ended, default=None)}


def compute_throughput(
    records: Sequence[RequestRecord], live: LiveRun, settings: LiveSettings, wall_s: float
) -> dict[str, Any]:
    """Return requests and tokens per second, with and without the pauses that the settings ask for."""
    idle = len(records) * (settings.post_donor_delay_ms + settings.cooldown_ms) / 1000 / settings.concurrency
    requests = len(records) + len(live.donor_ttft_ms)
    output = sum(record.output_tokens or 0 for record in records)
    busy = max(wall_s - idle, 1e-9)
    return {
        "requests": requests,
        "items": len({record.item_id for record in records}),
        "errors": sum(record.error is not None for record in records),
        "concurrency": settings.concurrency,
        "wall_seconds": wall_s,
        "settle_seconds_est": idle,
        "idle_seconds": idle,
        "settle_excluded_basis": "post_donor_delay_ms and cooldown_ms, shared by the concurrent requests",
        "requests_per_second": requests / wall_s,
        "requests_per_second_excluding_settle": requests / busy,
        "output_tokens_per_second": output / wall_s,
        "donor_ttft_ms": _summarize_times(live.donor_ttft_ms),
        "recipient_ttft_ms": _summarize_times([record.ttft_ms for record in records if record.ttft_ms is not None]),
        "recipient_latency_ms": _summarize_times(
            [record.latency_ms for record in records if record.latency_ms is not None]
        ),
    }


def summarize_result(result: Result, output: str) -> dict[str, Any]:
    """Return the line that goes to standard output."""
    names = (
        "request_count", "error_count", "contradiction_count", "backend_confirmed_tokens",
        "backend_confirmed_block_rate", "negative_control_backend_confirmed_rate", "quality_pass_rate", "mean_ttft_ms",
    )  # fmt: skip
    found: dict[str, Any] = {"output": output} | {name: result.aggregate.get(name) for name in names}
    if result.paired is not None:
        wanted = ("pairs_used", "hit_rate", "blended_ttft_speedup_median", "hit_only_ttft_speedup_median")
        found |= {name: result.paired[name] for name in wanted}
    return found


def _print_warnings(
    live: LiveRun, records: Sequence[RequestRecord], urls: Sequence[str], settings: LiveSettings
) -> None:
    """Print what a person should know before they trust the numbers."""
    errors = [record.error for record in records if record.error]
    contradicted = [record for record in records if record.contradictions]
    if live.isolation_verified is False:
        say("warning: the cache was not empty between cases; times and reuse are not to be trusted")
    if live.isolation_verified is None and settings.isolation != "none":
        say("note: the server does not report cached tokens, so an empty cache could not be verified")
    if not urls:
        say("note: no metrics endpoint answered; counters confirm nothing in this run")
    if errors:
        say(f"warning: {len(errors)} of {len(records)} requests failed, the first with: {errors[0]}")
        say("hint: the same command with --resume asks the failed cases again and writes the result anew")
    if contradicted:
        first = contradicted[0]
        say(f"warning: {len(contradicted)} requests do not add up, {first.item_id}: {first.contradictions[0]}")


BAR = 24


class _ProgressBar:
    """A bar on standard error with an estimate of the time left."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        self._total = total
        self._progress = Progress(quiet)
        self._first: tuple[int, float] | None = None

    def show(self, done: int, record: RequestRecord) -> None:
        now = time.monotonic()
        first, since = self._first = self._first or (done, now)
        if done >= self._total:
            self._progress.clear()
        elif self._progress.due():
            full = math.floor(BAR * done / self._total)
            bar = "#" * full + "-" * (BAR - full)
            left = (now - since) / (done - first) * (self._total - done) if done > first else None
            rest = "" if left is None else f"  {left:.0f} s left"
            self._progress.show(f"[{bar}] {done}/{self._total}  {record.transform}{rest}")


def _summarize_times(values: Sequence[float]) -> dict[str, float | None]:
    shares = {f"p{share}": compute_percentile(values, share) for share in (50, 90, 99)}
    return shares | {"mean": compute_mean(values)}


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


def read_engine_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return how the engine was started, by the flags that tell it; refuse an unfair start where that is asked for."""
    command = args.engine_serve_command
    if args.engine_serve_command_file:
        command = read_text(args.engine_serve_command_file)
    flags = describe_engine_flags(command, args.engine_env)
    if args.require_phase0_flags:
        require_fair_flags(flags)
    return flags


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
    entries = list(dict.fromkeys([gateway, *([donor] if donor else [])]))
    target = LiveTarget(
        engine="gateway",
        servers=list(dict.fromkeys([*entries, *workers])),
        metrics_urls=[f"{url}/metrics" for url in dict.fromkeys(workers or entries)],
        make=lambda client: GatewayBackend(
            client, gateway, args.model, donor_url=donor, reset_urls=resets, keys=keys, tokenizer=args.tokenizer
        ),
        timeout_s=args.timeout_seconds or GATEWAY_TIMEOUT_S,
        throughput_output=args.throughput_output,
    )
    lengths = {"donor_tokens": args.donor_max_tokens, "recipient_tokens": args.recipient_max_tokens}
    return run_live(args, target, isolation=isolation, **lengths)


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
    target = LiveTarget(
        engine="sglang",
        servers=[base],
        metrics_urls=[f"{base}/metrics"],
        make=lambda client: SglangBackend(client, base, keys=keys),
        timeout_s=args.timeout_seconds or SGLANG_TIMEOUT_S,
    )
    lengths = {"donor_tokens": args.donor_max_new_tokens, "recipient_tokens": args.recipient_max_new_tokens}
    return run_live(args, target, isolation=isolation, **lengths)
