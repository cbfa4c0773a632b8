"""``semblend estimate``."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from semblend.cli.commandline import Commands, add_command
from semblend.cli.output import Progress, check_target, print_json, say, table, write_json, write_text
from semblend.cli.shared_flags import add_tokenizer, parse_count, parse_rate
from semblend.errors import InputError
from semblend.estimate.answer import describe_history, describe_left_out, list_history, list_rows, list_tallies
from semblend.formatting import format_percent, format_plural, format_price
from semblend.kv_shapes import KV_SHAPES
from semblend.text.log_formats import FORMATS
from semblend.text.parts import SPLITTERS

if TYPE_CHECKING:
    from semblend.arrange import VolatileField
    from semblend.estimate import Replay, ReplayOptions
    from semblend.text.logs import LoggedPrompt, PromptLog

LEARNED_PROMPTS = 2_000
LEARNED_CHARS = 32_000_000
SAMPLE_RUN = 1_000
INTERRUPTED = 130

EXAMPLES = (
    "semblend estimate prompts.jsonl --html page.html",
    "semblend estimate requests.jsonl --tokenizer tokenizer.json --model llama-3.1-8b --gpu-hour 4.00",
    "zcat vllm.log.gz | semblend estimate - --format vllm --limit 10000",
)


def add(commands: Commands) -> None:
    parser = add_command(commands, "estimate", run, examples=EXAMPLES)
    parser.add_argument("log", nargs="?", metavar="LOG", help="file of logged prompts, .gz too; - reads standard input")
    parser.add_argument("--prompts", metavar="FILE", help="the same as LOG")
    parser.add_argument(
        "--format", choices=("auto", *FORMATS), default="auto", help="format of the log (default: what it looks like)"
    )
    add_tokenizer(parser)
    _add_memory(parser)
    _add_rates(parser)
    _add_reading(parser)
    parser.add_argument(
        "--passages",
        choices=SPLITTERS,
        default="auto",
        help="which texts may change places: marked ones or, in their absence, what looks like a list of passages "
        "(auto), marked ones only, long paragraphs, or none",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the whole answer here; without a name or with - it is printed instead of the tables",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page to look at and to hand on; it loads nothing")
    parser.add_argument("--redact", action="store_true", help="show no text of prompts and no tenant names")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--block-size",
        type=parse_count,
        default=16,
        metavar="N",
        help="tokens in a block of the prefix cache (default: 16)",
    )
    parser.add_argument(
        "--cache-tokens",
        type=parse_count,
        metavar="N",
        help="size of the prefix cache, as vLLM prints it at start (default: what fits into --memory)",
    )
    parser.add_argument(
        "--memory", type=parse_count, metavar="BYTES", help="bytes of KV in the prefix cache, such as 40G (the default)"
    )
    parser.add_argument(
        "--more-memory",
        type=_parse_factors,
        default=(2, 4),
        metavar="LIST",
        help="times the memory of the last rows (default: 2,4; none for no such rows)",
    )
    parser.add_argument(
        "--donor-tokens", type=parse_count, metavar="N", help="tokens of donors (default: as many as the prefix cache)"
    )
    parser.add_argument("--max-donors", type=parse_count, metavar="N", help="keep at most N donors (default: all)")
    parser.add_argument(
        "--break-even-tokens",
        type=parse_count,
        metavar="N",
        help="reuse at an offset only what saves more than N tokens (default: 600, what a pass costs on an H200)",
    )
    parser.add_argument("--max-bytes", type=parse_count, metavar="N", help="--donor-tokens in bytes of the donor store")
    parser.add_argument(
        "--history-tokens",
        type=parse_count,
        default=0,
        metavar="N",
        help="edit an agent's history in batches when it has more than N tokens (default: the longest prompt so far)",
    )


def _add_rates(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        choices=sorted(KV_SHAPES),
        default="qwen2.5-7b",
        metavar="NAME",
        help="model whose KV size and rates are used (default: qwen2.5-7b); one of " + ", ".join(sorted(KV_SHAPES)),
    )
    parser.add_argument("--gpu", default="h200", metavar="NAME", help="GPU whose rate and price are used (%(default)s)")
    parser.add_argument("--prices", metavar="FILE", help="TOML that replaces prices and rates of the package")
    parser.add_argument(
        "--prefill-tokens-per-s", type=parse_rate, metavar="R", help="your engine's prefill rate (default: by model)"
    )
    parser.add_argument(
        "--gpu-hour",
        type=parse_rate,
        metavar="USD",
        help="price of an hour of your GPUs (default: by GPU, an assumption)",
    )
    parser.add_argument(
        "--price-per-million", type=parse_rate, metavar="USD", help="price of a million prompt tokens, instead"
    )


def _add_reading(parser: argparse.ArgumentParser) -> None:
    tenants = parser.add_mutually_exclusive_group()
    tenants.add_argument(
        "--tenant-field", default="", metavar="F", help="field that names the tenant, such as metadata.customer"
    )
    tenants.add_argument("--no-tenants", action="store_true", help="treat all prompts as one tenant's")
    parser.add_argument("--skip-bad", action="store_true", help="count malformed lines and go on")
    parser.add_argument("--limit", type=parse_count, metavar="N", help="stop after N prompts")
    parser.add_argument(
        "--sample",
        type=_parse_share,
        default=1.0,
        metavar="SHARE",
        help=f"replay only this share of the log, in runs of {SAMPLE_RUN:,} prompts, such as 0.1",
    )


def run(args: argparse.Namespace) -> int:
    """Tell what each step would have saved on logged prompts, in tokens, seconds and money.

    Replays the log through caches of bounded size: the exact prefix cache as it is, then with volatile fields moved,
    tools sorted, repeats dropped and passages arranged, then with reuse at any offset, then with more memory. No model
    runs.
    """
    from semblend.text.logs import PromptLog

    if args.html == "-":
        raise InputError("--html needs the name of a file", hint="--html estimate.html")
    for target in (args.json, args.html):
        if target and target != "-":
            check_target(target)
    if (args.log is None) == (args.prompts is None):
        raise InputError("give one log", hint="semblend estimate LOG")
    log = PromptLog(
        args.log or args.prompts,
        tenant_field=None if args.no_tenants else args.tenant_field,
        skip_bad=args.skip_bad,
        format=args.format,
    )
    answer = _estimate(log, args)
    if args.html:
        from semblend.estimate.page import render_page

        write_text(args.html, render_page(answer))
        say(f"wrote {args.html}")
    if args.json == "-":
        print_json(answer)
    else:
        print(render_tables(answer))
        if args.json:
            write_json(args.json, answer)
            say(f"wrote {args.json}")
    return INTERRUPTED if answer["stopped"] == "interrupted" else 0


def _estimate(log: PromptLog, args: argparse.Namespace) -> dict[str, Any]:
    from semblend.estimate.answer import LogFacts, build_answer, find_rates
    from semblend.estimate.replay import Replay
    from semblend.estimate.steps import ArrangePassages, DropRepeats, MoveFields, SortTools, Step
    from semblend.prices import load_price_book
    from semblend.text.tokenization import load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer)
    rates = find_rates(
        args.model,
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        gpu_hour=args.gpu_hour,
        price_per_million=args.price_per_million,
        gpu=args.gpu,
        book=load_price_book(args.prices),
    )
    options = _choose_options(args, rates.kv_bytes_per_token)
    started = time.perf_counter()
    progress = Progress(args.quiet)
    damage: list[str] = []
    prompts, fields = _learn(_sample(_read(log, args.skip_bad, damage), args.sample, args.limit))
    arrange = ArrangePassages(options.cache_tokens)
    steps: list[Step] = [MoveFields(fields), SortTools(), DropRepeats(), arrange]
    with Replay(steps, tokenizer, options) as replay:
        interrupted = not _replay(replay, prompts, progress, started)
        _tell_skipped(log, damage)
        if not replay.prompts:
            raise InputError(f"{log.label} holds no prompt", hint=log.hint)
        stopped = "interrupted" if interrupted else "damaged" if damage else ""
        facts = LogFacts(log.label, log.found_format, log.skipped, tuple(log.skipped_examples), stopped, args.sample)
        return build_answer(replay, rates, fields, facts, time.perf_counter() - started)


def _choose_options(args: argparse.Namespace, kv_bytes: int) -> ReplayOptions:
    from semblend.discover.store import BYTES_PER_TOKEN
    from semblend.estimate.answer import DEFAULT_KV_BYTES
    from semblend.estimate.replay import ReplayOptions

    if args.cache_tokens and args.memory:
        raise InputError("--cache-tokens and --memory say the same", hint="give one of them")
    cache = args.cache_tokens or (args.memory or DEFAULT_KV_BYTES) // kv_bytes
    donors = args.donor_tokens or (int(args.max_bytes / BYTES_PER_TOKEN) if args.max_bytes else cache)
    given = {"max_donors": args.max_donors, "pass_tokens": args.break_even_tokens}
    return ReplayOptions(
        cache_tokens=cache,
        donor_tokens=donors,
        block_tokens=args.block_size,
        factors=args.more_memory,
        splitter=args.passages,
        redacted=args.redact,
        history_tokens=args.history_tokens,
        **{name: value for name, value in given.items() if value is not None},
    )


def _read(log: PromptLog, skip_bad: bool, damage: list[str]) -> Iterator[LoggedPrompt]:
    """The prompts of a log, with ``skip_bad`` up to where it is damaged: the end of a packed log often is."""
    found = False
    try:
        for logged in log:
            found = True
            yield logged
    except InputError as error:
        if not (skip_bad and found):
            raise
        damage.append(error.message)


def _sample(log: Iterable[LoggedPrompt], share: float, limit: int | None) -> Iterator[LoggedPrompt]:
    """Runs of neighbouring prompts, evenly over the log: prompts that belong together stay together."""
    taken = itertools.islice(log, limit)
    if share >= 1:
        return taken
    every = max(1, round(1 / share))
    return (logged for number, logged in enumerate(taken) if number // SAMPLE_RUN % every == 0)


def _learn(prompts: Iterator[LoggedPrompt]) -> tuple[Iterator[LoggedPrompt], tuple[VolatileField, ...]]:
    """The same prompts, and the volatile fields of the first ones."""
    from semblend.arrange import find_volatile_fields
    from semblend.estimate.steps import MoveFields

    first: list[LoggedPrompt] = []
    chars = 0
    for logged in prompts:
        first.append(logged)
        chars += len(logged.text or "")
        if len(first) >= LEARNED_PROMPTS or chars > LEARNED_CHARS:
            break
    found = find_volatile_fields([logged.text for logged in first if logged.text is not None])
    # What stands in a tool or a passage stays there: only fields that can be moved are named.
    fields = tuple(one for one in found if any(MoveFields((one,)).moves(logged.parts) for logged in first))
    return itertools.chain(first, prompts), fields


def _replay(replay: Replay, prompts: Iterator[LoggedPrompt], progress: Progress, started: float) -> bool:
    """Whether the log was replayed to its end; interrupted, what was counted so far stands."""
    try:
        for logged in prompts:
            replay.add(logged)
            if progress.due():
                speed = replay.prompts / (time.perf_counter() - started)
                progress.show(f"{replay.prompts:,} prompts, {replay.prompt_tokens:,} tokens, {speed:,.0f} prompts/s")
    except KeyboardInterrupt:
        progress.clear()
        if not replay.prompts:
            raise
        say(f"stopped after {replay.prompts:,} prompts; the answer is about these")
        return False
    progress.clear()
    return True


def _tell_skipped(log: PromptLog, damage: list[str]) -> None:
    for message in damage:
        say(f"the log could not be read to its end: {message}")
    for example in log.skipped_examples:
        say(f"skipped: {example}")
    if log.skipped > len(log.skipped_examples):
        say(f"skipped: {log.skipped - len(log.skipped_examples):,} more lines")


def _parse_factors(text: str) -> tuple[int, ...]:
    """An argparse type: growing whole numbers from 2 on, with commas; none for no number."""
    if text.strip().lower() == "none":
        return ()
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 2,4,8") from None


def _parse_share(text: str) -> float:
    """An argparse type: a share above 0, at most 1."""
    value = parse_rate(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of the log, at most 1")
    return value


TENANTS_SHOWN = 10
CAVEAT = (
    "A replay of tokens, not a measurement: no model ran. Seconds are prefilled tokens over the rate above, without\n"
    "queues and batches. Each row stands on those before it. Only an engine's receipt counts as reuse."
)


def render_tables(answer: dict[str, Any]) -> str:
    """The tables, with what they assume."""
    parts = [
        _describe(answer), _render_rows(answer), _render_history(answer), _render_breaks(answer["breaks"]),
        _render_groups(answer), CAVEAT,
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part)


def _describe(answer: dict[str, Any]) -> str:
    total, rates, options = answer["total"], answer["rates"], answer["options"]
    about = " (an approximation)" if answer["tokens_are_approximate"] else ""
    part = "" if answer["sample"] == 1 else f", a sample of {answer['sample']:.1%}"
    stopped = "" if answer["complete"] else "; stopped before the end of the log"
    gigabytes = options["cache_tokens"] * rates["kv_bytes_per_token"] / 1e9
    return "\n".join(
        [
            f"{format_plural(total['prompts'], 'prompt')}, {format_plural(total['prompt_tokens'], 'token')} "
            f"(log format {answer['format']}, tokenizer {answer['tokenizer']}{about}{part}{stopped})",
            f"prefix cache: {options['cache_tokens']:,} tokens, {gigabytes:.1f} GB of {rates['model']} KV, "
            f"blocks of {options['block_tokens']}, LRU; donors: {options['donor_tokens']:,} tokens more",
            "what is full forgets what was used longest ago; passages are arranged for that size (exact_size)",
            f"prefill: {rates['prefill_tokens_per_s']:,.0f} tokens/s ({rates['prefill_source']})",
            f"price: {rates['price_per_million']:.4g} {rates['currency']} a million tokens ({rates['price_source']})",
            *([make_printable(describe_left_out(answer["left_out"]))] if answer["left_out"] else []),
        ]
    )


def _render_rows(answer: dict[str, Any]) -> str:
    total, currency = answer["total"], answer["rates"]["currency"]
    rows = [
        (
            f"{number}. {make_printable(row['title'])}" if row["name"] else row["title"],
            f"{row['saved_tokens']:+,}",
            format_percent(row["saved_share"], 1),
            f"{row['saved_s']:+,.1f}",
            format_price(row["saved_price"], total["price"]),
            "" if row["rank"] is None else row["rank"],
        )
        for number, row in enumerate(list_rows(answer), start=1)
    ]
    head = ("each step on top of those before it", "tokens saved", "of all", "prefill s", currency, "rank")
    cost = (
        f"Without any cache this log takes {total['prefill_s']:,.1f} s of prefill and "
        f"{format_price(total['price'], total['price'])} {currency}."
    )
    found = [row for row in answer["rows"] if row["name"] == "arrange" and row["saved_tokens"]]
    notes = [f"arrange: {row['assumes']}" for row in found if answer["passages"]["assumed"]]
    notes += [f"{row['name']}: {row['note']}" for row in answer["rows"] if row["note"]]
    worse = [row["title"] for row in answer["rows"] if row["saved_tokens"] < 0]
    notes += [f"costs more than it saves here: {', '.join(map(make_printable, worse))}"] if worse else []
    if failed := answer["failed_lookups"]:
        notes.append(f"{failed:,} lookups failed, so reuse is counted too low: {answer['first_failure']}")
    return "\n".join([table(rows, head=head, right=(1, 2, 3, 4, 5)), cost, *notes])


def _render_history(answer: dict[str, Any]) -> str:
    rows = list_history(answer, lambda share: format_percent(share, 1))
    if not rows:
        return ""
    head = ("edits of histories", "tokens", "of all", "prefill s", answer["rates"]["currency"])
    return f"{table(rows, head=head, right=(1, 2, 3, 4))}\n{describe_history(answer)}"


def _render_breaks(breaks: dict[str, Any]) -> str:
    if not breaks:
        return ""
    rows = []
    for kind, one in breaks.items():
        first = one["examples"][0]
        shown = ""
        if first["position_chars"] is not None:
            before = make_printable(first["before"])[-24:]
            shown = f"line {first['line']}: …{before}⟨{make_printable(first['here'])[:32]}⟩"
        rows.append((kind, f"{one['prompts']:,}", f"{one['tokens']:,}", shown))
    head = ("what ended the hit", "prompts", "tokens", "the first one: … the same ⟨then different⟩")
    return table(rows, head=head, right=(1, 2))


def _render_groups(answer: dict[str, Any]) -> str:
    parts = [_render_tallies("prompt length", answer["by_length"])]
    tenants = answer["by_tenant"]
    if len(tenants) > 1:
        shown = dict(list(tenants.items())[:TENANTS_SHOWN])
        of = f"tenant (largest {TENANTS_SHOWN} of {len(tenants):,})" if len(tenants) > TENANTS_SHOWN else "tenant"
        parts.append(_render_tallies(of, shown))
    return "\n\n".join(parts)


def _render_tallies(name: str, tallies: dict[str, dict[str, Any]]) -> str:
    rows = [
        (make_printable(key), *rest) for key, *rest in list_tallies(tallies, lambda share: format_percent(share, 1))
    ]
    return table(rows, head=(f"by {name}", "prompts", "tokens", "prefix cache", "up to balanced"), right=(1, 2, 3, 4))


def make_printable(text: str) -> str:
    """A text of strangers for a terminal: no line ends, no control codes.

    >>> make_printable("a\\x1b[31m\\nb")
    'a·[31m b'
    """
    return "".join(char if char.isprintable() else " " if char in "\n\r\t" else "·" for char in text)
