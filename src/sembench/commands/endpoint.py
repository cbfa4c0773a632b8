"""Commands that ask one server a few things: whether it answers, and how far two cold answers lie apart."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sembench.backends import (
    GatewayBackend,
    PromptCall,
    ServerAnswer,
    ServerBackend,
    SglangBackend,
    check_url,
    open_client,
    verify_model,
)
from sembench.commands.live import API_KEY, parse_keys, parse_non_negative, parse_positive
from sembench.files import make_folder_of, write_json
from sembench.manifests.cases import Case, choose_cases
from sembench.result import get_utc_time
from sembench.scoring.answers import compute_rouge_l, compute_token_f1, find_first_divergence
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
    flag("--api-key", **API_KEY)


def make_backend(args: argparse.Namespace, client: ClientSession, model: str, **own: Any) -> ServerBackend:
    """Return the backend that ``--engine``, ``--base-url`` and ``--api-key`` ask for."""
    base, keys = check_url(args.base_url, "--base-url"), parse_keys(args.api_key)
    if args.engine == "sglang":
        return SglangBackend(client, base, keys=keys)
    return GatewayBackend(client, base, model, keys=keys, **own)


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
