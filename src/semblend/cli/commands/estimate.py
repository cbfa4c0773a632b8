"""Tell what reuse would have saved on logged prompts.

Replays the prompts in order and compares an exact-prefix cache with any-offset reuse. It is an estimate from
tokens alone, not measured reuse.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from semblend.cli.output import Progress, check_target, print_json, say, table, write_json
from semblend.cli.shared_flags import LOG_HELP, add_tokenizer, parse_count, parse_rate
from semblend.errors import InputError

if TYPE_CHECKING:
    from semblend.estimate import Estimator
    from semblend.prompt import Prompt
    from semblend.text.logs import LoggedPrompt, PromptLog
    from semblend.text.tokenization import Tokenizer

TENANTS_SHOWN = 10
CAVEAT = (
    "This is an estimate from tokens alone, not measured reuse. It assumes that every earlier prompt's KV is\n"
    "still held; an engine may hold less, decline a span, or recompute more of it for quality."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", required=True, metavar="FILE", help=LOG_HELP)
    add_tokenizer(parser)
    parser.add_argument(
        "--block-size",
        type=parse_count,
        default=16,
        metavar="N",
        help="tokens in a block of the prefix cache (default: 16)",
    )
    parser.add_argument("--max-donors", type=parse_count, metavar="N", help="keep at most N donors (default: all)")
    parser.add_argument(
        "--max-bytes",
        type=parse_count,
        metavar="N",
        help="memory for donors, such as 512M (default: 2G, about 240M tokens)",
    )
    tenants = parser.add_mutually_exclusive_group()
    tenants.add_argument(
        "--tenant-field", default="", metavar="F", help="field that names the tenant, such as metadata.customer"
    )
    tenants.add_argument("--no-tenants", action="store_true", help="treat all prompts as one tenant's")
    parser.add_argument(
        "--prefill-tokens-per-s",
        type=parse_rate,
        metavar="R",
        help="your engine's prefill rate, to turn tokens into seconds",
    )
    parser.add_argument("--json", metavar="FILE", help="write the whole answer here; - prints it instead of the tables")
    parser.add_argument("--skip-bad", action="store_true", help="count malformed lines and go on")
    parser.add_argument("--limit", type=parse_count, metavar="N", help="stop after N prompts")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(args: argparse.Namespace) -> int:
    from semblend.estimate import EstimateOptions, Estimator
    from semblend.text.logs import PromptLog
    from semblend.text.tokenization import load_tokenizer

    if args.json:
        check_target(args.json)
    tokenizer = load_tokenizer(args.tokenizer)
    log = PromptLog(args.prompts, tenant_field=None if args.no_tenants else args.tenant_field, skip_bad=args.skip_bad)
    limits = {name: getattr(args, name) for name in ("max_donors", "max_bytes") if getattr(args, name) is not None}
    with Estimator(EstimateOptions(args.block_size, **limits)) as estimator:
        seconds = _replay(estimator, log, tokenizer, args)
        if not estimator.total.prompts:
            raise InputError(
                f"{log.label} holds no prompt", hint="see docs/guides/estimate.md for the fields it may have"
            )
        answer = _answer(estimator, log, tokenizer, args, seconds)
    if args.json == "-":
        print_json(answer)
    else:
        print(render(answer))
        if args.json:
            write_json(args.json, answer)
            say(f"wrote {args.json}")
    return 0


def _replay(estimator: Estimator, log: PromptLog, tokenizer: Tokenizer, args: argparse.Namespace) -> float:
    progress = Progress(args.quiet)
    started = time.perf_counter()
    for logged in log:
        estimator.add(to_prompt(logged, tokenizer))
        if progress.due():
            done = estimator.total
            speed = done.prompt_tokens / (time.perf_counter() - started)
            progress.show(f"{done.prompts:,} prompts, {done.prompt_tokens:,} tokens, {speed:,.0f} tokens/s")
        if args.limit and estimator.total.prompts >= args.limit:
            break
    progress.clear()
    for example in log.skipped_examples:
        say(f"skipped: {example}")
    if log.skipped > len(log.skipped_examples):
        say(f"skipped: {log.skipped - len(log.skipped_examples):,} more lines")
    return time.perf_counter() - started


def to_prompt(logged: LoggedPrompt, tokenizer: Tokenizer) -> Prompt:
    """KV is never shared between tenants or models, so both are part of the namespace."""
    from semblend.prompt import Namespace, Prompt

    ids = tokenizer.encode(logged.text) if logged.text is not None else logged.token_ids
    return Prompt(ids, namespace=Namespace(tenant=logged.tenant, model=logged.model))


def _answer(
    estimator: Estimator, log: PromptLog, tokenizer: Tokenizer, args: argparse.Namespace, seconds: float
) -> dict[str, Any]:
    from semblend._version import __version__

    total = estimator.total
    answer: dict[str, Any] = {
        "semblend": __version__,
        "source": log.label,
        "tokenizer": tokenizer.name,
        **estimator.to_dict(),
        "lines_skipped": log.skipped,
        "replay_s": round(seconds, 3),
        "replay_tokens_per_s": round(total.prompt_tokens / seconds) if seconds else None,
        "prefill_s": None,
    }
    if args.prefill_tokens_per_s:
        per_second = args.prefill_tokens_per_s
        answer["prefill_s"] = {
            "tokens_per_s": per_second,
            "without_cache": total.prompt_tokens / per_second,
            "saved_by_prefix": total.prefix_tokens / per_second,
            "saved_by_reuse": (total.reused_tokens - total.seam_tokens) / per_second,
        }
    return answer


def render(answer: dict[str, Any]) -> str:
    """The answer for people; everything in it comes from the answer as data."""
    total = answer["total"]
    parts = [
        f"{total['prompts']:,} prompts, {total['prompt_tokens']:,} tokens "
        f"(tokenizer {answer['tokenizer']}, blocks of {answer['options']['block_tokens']}, {_donors(answer)})",
        _comparison(total),
        _seconds(answer["prefill_s"]),
        _tallies("prompt length", answer["by_length"]),
    ]
    if answer["tenants"] > 1:
        shown = dict(list(answer["by_tenant"].items())[:TENANTS_SHOWN])
        of = (
            f"tenant (largest {TENANTS_SHOWN} of {answer['tenants']:,})"
            if answer["tenants"] > TENANTS_SHOWN
            else "tenant"
        )
        parts.append(_tallies(of, shown))
    parts += [_distribution(answer), CAVEAT]
    return "\n\n".join(part for part in parts if part)


def _donors(answer: dict[str, Any]) -> str:
    if answer["donors_evicted"]:
        return f"{answer['donors_evicted']:,} donors evicted for room"
    return "every prompt kept as a donor"


def _comparison(total: dict[str, Any]) -> str:
    prefix, reused = total["prefix_tokens"], total["reused_tokens"]
    gained_share = total["reused_share"] - total["prefix_share"]
    rows = [
        ("exact-prefix cache", f"{prefix:,}", _format_percent(total["prefix_share"]), _hits(total, "prefix")),
        ("any-offset reuse", f"{reused:,}", _format_percent(total["reused_share"]), _hits(total, "reused")),
        ("difference", f"+{reused - prefix:,}", f"+{_format_percent(gained_share)}", ""),
    ]
    text = table(rows, head=("", "tokens not prefilled", "of all", "prompts with a hit"), right=(1, 2, 3))
    seams = f"Of the difference, {total['seam_tokens']:,} tokens at the heads of moved spans would be recomputed."
    return f"{text}\n{seams}" if total["seam_tokens"] else text


def _hits(total: dict[str, Any], kind: str) -> str:
    return f"{total[f'{kind}_hits']:,} ({_format_percent(total[f'{kind}_hit_rate'])})"


def _seconds(prefill: dict[str, float] | None) -> str:
    if prefill is None:
        return ""
    return (
        f"prefill at {prefill['tokens_per_s']:,.0f} tokens/s takes {prefill['without_cache']:,.1f} s without a cache; "
        f"exact-prefix saves {prefill['saved_by_prefix']:,.1f} s, any-offset {prefill['saved_by_reuse']:,.1f} s"
    )


def _tallies(name: str, tallies: dict[str, dict[str, Any]]) -> str:
    rows = [
        (
            key or "(none)",
            f"{one['prompts']:,}",
            f"{one['prompt_tokens']:,}",
            _format_percent(one["prefix_share"]),
            _format_percent(one["reused_share"]),
        )
        for key, one in tallies.items()
        if one["prompts"]
    ]
    head = (f"by {name}", "prompts", "tokens", "exact-prefix", "any-offset")
    return table(rows, head=head, right=(1, 2, 3, 4))


def _distribution(answer: dict[str, Any]) -> str:
    histogram = answer["reused_share_histogram"]
    total = answer["total"]["prompts"]
    rows = [(name, f"{number:,}", _format_percent(number / total)) for name, number in histogram.items()]
    shown = ", ".join(f"{name} {_format_percent(value)}" for name, value in answer["reused_share_percentiles"].items())
    return table(rows, head=("share reusable", "prompts", ""), right=(1, 2)) + f"\npercentiles over prompts: {shown}"


def _format_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
