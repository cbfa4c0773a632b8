"""The advice for people: sentences made from the numbers of an `Advice`, one figure, and the page around them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from semantickv.analysis.advice import (
    DRAWS,
    ENGINES,
    MIN_HOURS,
    MIN_UNITS,
    NOISE,
    STABLE_TIMES,
    Advice,
    TierChoice,
    count_hits_by_type,
    list_engines_with,
)
from semantickv.analysis.latency import BOUNDS
from semantickv.analysis.tiers import DECODE_MS
from semblend.cli.output import write_json, write_text
from semblend.formatting import format_gib, format_hours
from semblend.web.charts import (
    WIDE,
    Axis,
    Drawing,
    Figure,
    begin_plot,
    draw_both,
    is_narrow,
    thin_out,
    write_plain_style,
)
from semblend.web.report import Strong, Tile, render_document, render_figure, render_table, render_tiles

SIMULATED = "Simulated: a cache of metadata replayed this trace. No model ran, and no GPU was measured for it."


def format_headline(advice: Advice) -> str:
    """Write the advice in one sentence: what to add or to leave, and the hit rate, or why there is none."""
    if not advice.can_tell:
        return "This trace cannot tell whether a cache would help"
    if advice.ceiling.token_hit_rate < NOISE:
        if advice.sureness is None:
            return "Trace too short to tell whether a prefix cache would help"
        return "A prefix cache would not help this traffic"
    choice = advice.choice
    own = f"{choice.own.token_hit_rate:.0%} of prompt tokens from cache"
    if choice.adds and not advice.is_too_short:
        return (
            f"{format_policy(choice.policy)} with {format_gib(advice.to_gib(choice.added_tokens))} of "
            f"{_name_memory(choice)} added: {choice.point.token_hit_rate:.0%} of prompt tokens from cache, "
            f"{choice.own.token_hit_rate:.0%} without"
        )
    if not choice.adds and choice.policy != "lru" and not advice.is_too_short:
        rate = f"{choice.point.token_hit_rate:.0%} of prompt tokens from cache"
        return f"{format_policy(choice.policy)} in the memory that the GPU has: {rate}, {own.split()[0]} with LRU"
    if advice.surely_helps_to_add:
        return (
            f"Add {_name_memory(choice)}: {own} without it, up to {advice.ceiling.token_hit_rate:.0%} with it. "
            "The trace is too short to say how much"
        )
    if advice.engine and ENGINES[advice.engine].default_tokens and not advice.is_too_short:
        return f"A pool of {format_gib(advice.to_gib(advice.pool_tokens))}: {own}"
    told = f"Leave the engine's memory as it is: {own}"
    if advice.spare is not None:
        size = format_gib(advice.to_gib(advice.spare.added_tokens))
        told += f", {advice.spare.point.token_hit_rate:.0%} with {size} of {_name_memory(choice)} that stand unused"
    return f"Trace too short to choose more. {told}" if advice.is_too_short else told


def format_lead(advice: Advice) -> str:
    """Compare the advised point with unlimited memory, with LRU and with the bound, in words."""
    if not advice.can_tell:
        return (
            "It says how long prompts were and not what they held, so nothing is known about what they share. Collect "
            "one with `semantickv collect`, or log the engine's requests with their tokens."
        )
    choice, ceiling = advice.choice, advice.ceiling
    if ceiling.token_hit_rate < NOISE:
        shared = f"Even with room for everything, {ceiling.token_hit_rate:.1%} of the prompt tokens would come from it."
        if advice.sureness is None:
            return f"{shared} But it has {advice.facts['requests']:,} requests; {_say_how_many_are_enough()}."
        return shared
    words = [
        f"The engine has about {format_gib(advice.to_gib(advice.room.pool))} for KV on {_count_gpus(advice)}, of which "
        f"running requests need {format_gib(advice.to_gib(advice.room.running))} at "
        f"the busiest moment. Any amount of memory would give {ceiling.token_hit_rate:.0%}; all of the trace fits into "
        f"{format_gib(advice.to_gib(ceiling.tokens))}."
    ]
    if advice.room.is_short:
        words.append(
            "These requests and one of full length do not fit into it at once: requests wait, and the traffic wants "
            "more GPUs before it wants a cache."
        )
    if choice.adds and advice.is_too_short:
        more = [
            f"{format_gib(advice.to_gib(advice.room.add_requests(point.tokens)))} {point.token_hit_rate:.0%}"
            for point in advice.curves[choice.policy]
            if point.tokens > advice.room.cache
        ]
        words.append(f"On this trace alone {_name_memory(choice)} beside it would give: {', '.join(more)}.")
    if choice.policy == "lru":
        of = f" that {advice.engine} has" if advice.engine else ""
        words.append(f"No other policy{of} beats LRU there by more than {NOISE:.1%}, so the simplest one is advised.")
    else:
        lru = advice.get_advised_point("lru")
        words.append(f"LRU would give {lru.token_hit_rate:.1%} in the same memory.")
    bound = next((name for name in reversed(BOUNDS) if name in advice.curves), None)
    if bound and advice.get_advised_point(bound).token_hit_rate > choice.point.token_hit_rate:
        words.append(f"Knowing the future ({bound}) would give {advice.get_advised_point(bound).token_hit_rate:.1%}.")
    return " ".join(words)


def describe_how_to_set_it(advice: Advice) -> str:
    """Say what to type for the chosen engine, or why nothing needs to be typed."""
    if not advice.can_tell or advice.ceiling.token_hit_rate < NOISE:
        return "Nothing to set."
    choice = advice.choice
    if advice.is_too_short:
        if not advice.surely_helps_to_add:
            return "A longer trace must tell whether there is anything to set."
        return (
            f"More memory than the engine has surely helps; how much of it to buy, a longer trace must tell. For "
            f"{_name_memory(choice)} that stands unused: `--memory {choice.costs.tier.name} --gib-hour-cost 0`, and "
            "`--gib` with its size."
        )
    words = []
    if advice.command:
        words.append(f"In {advice.engine}: `{advice.command}`.")
        if choice.adds:
            words.append(_describe_flag(advice, choice))
    elif advice.engine or not choice.adds:
        name = advice.engine or "an engine"
        begin = f"Nothing to set: {name}" if advice.spare is None else name
        words.append(f"{begin} takes the GPU's free memory by itself, and it costs nothing extra.")
    if not advice.engine and (choice.adds or choice.policy != "lru"):
        engines = [
            name for name in list_engines_with(choice.policy) if choice.adds <= ("dram" in ENGINES[name].memories)
        ]
        if engines:
            have = "have" if len(engines) > 1 else "has"
            words.append(
                f"{format_policy(choice.policy)} is what {', '.join(engines)} {have}; `--engine` prints the flags."
            )
        else:
            words.append(
                f"No engine that we know has {format_policy(choice.policy)}: `--engine {'|'.join(ENGINES)}` advises "
                "what one of them has."
            )
    if advice.spare is not None:
        words.append(_describe_spare(advice, advice.spare))
    return " ".join(words)


def _describe_flag(advice: Advice, choice: TierChoice) -> str:
    """Say what the size in a flag is made of."""
    cache, running, longest = (
        format_gib(advice.to_gib(tokens)) for tokens in (choice.point.tokens, advice.room.running, advice.room.longest)
    )
    return f"That is {cache} of cache, {running} for running requests and {longest} for one of full length."


def _describe_spare(advice: Advice, spare: TierChoice) -> str:
    """Say what memory that the machine has unused would give, where to buy it is not worth it."""
    size = format_gib(advice.to_gib(spare.added_tokens))
    told = (
        f"At these prices {_name_memory(spare)} costs more than it saves. Where {size} stand unused, they give "
        f"{spare.point.token_hit_rate:.0%} of the prompt tokens"
    )
    command = advice.write_command(spare)
    return f"{told}: `{command}`." if command else f"{told}; `--engine` prints the flags."


def _say_how_many_are_enough() -> str:
    return f"{MIN_UNITS} sessions or {MIN_UNITS**2} requests are the least that can tell"


def _count_gpus(advice: Advice) -> str:
    gpus, name = advice.costs.rate.gpus, advice.costs.gpu.name
    return f"one {name}" if gpus == 1 else f"{gpus} {name}"


def build_cards(advice: Advice) -> list[tuple[str, str]]:
    """Build the key figures, each with its explanation; none where nothing can be told."""
    if not advice.can_tell or advice.is_too_short:
        return []
    sure, choice, currency = advice.sureness, advice.choice, advice.costs.currency
    between = f", 95 %: {sure.hit_rate.low:.1%} to {sure.hit_rate.high:.1%}" if sure else ""
    added = f"{format_gib(advice.to_gib(choice.added_tokens))} of {_name_memory(choice)}" if choice.adds else "nothing"
    found = [
        (added, f"to add to the GPU's {format_gib(advice.to_gib(advice.room.pool))}"),
        (f"{choice.point.token_hit_rate:.1%}", "of prompt tokens from cache" + between),
        (f"{advice.ttft_ms:.0f} ms", f"average TTFT, {advice.ttft_cold_ms:.0f} ms without a cache"),
    ]
    if advice.by_price:
        paid = "memory paid" if choice.adds else "in memory that is there"
        found.append(
            (
                f"{choice.net_a_day:,.2f} {currency}",
                f"left a day: {format_hours(choice.gpu_hours_a_day)} of {advice.costs.gpu.name} saved, {paid}",
            )
        )
    return found


def describe_money(advice: Advice) -> str:
    """Say what the advice saves and costs in a day, and how sure that is; why not, for a trace under an hour."""
    if not advice.can_tell or advice.is_too_short or advice.ceiling.token_hit_rate < NOISE:
        return ""
    if not advice.by_price:
        return f"No money: the trace is {_format_length(advice)} long, and a day needs {MIN_HOURS:g} h at least."
    choice, costs, sure = advice.choice, advice.costs, advice.sureness
    between = f" (95 %: {sure.net_a_day.low:,.2f} to {sure.net_a_day.high:,.2f})" if sure and sure.net_a_day else ""
    saved = f"{format_hours(choice.gpu_hours_a_day)} of {costs.gpu.name} ({choice.saved_a_day:,.2f} {costs.currency})"
    if not choice.adds:
        return f"A day of this traffic saves {saved}{between} in memory that is there: it costs nothing extra."
    return (
        f"The added memory saves {saved} in a day of this traffic and costs {choice.memory_a_day:,.2f}; "
        f"{choice.net_a_day:,.2f} are left{between}."
    )


def build_tier_rows(advice: Advice) -> list[tuple[str, ...]]:
    """Build the table of what each kind of memory would add; empty where money says nothing."""
    if not advice.can_tell or not advice.by_price or advice.is_too_short:
        return []

    def format_row(name: str, one: TierChoice) -> tuple[str, ...]:
        price = "0" if name == "hbm" else f"{one.costs.tier.gib_hour:.4f}"
        if name != "hbm" and not one.adds:
            return (name.upper(), price, "none pays", *[""] * 5)
        tokens = one.added_tokens if one.adds else one.room.pool
        return (
            name.upper(), price, format_gib(one.costs.compute_gib(tokens)), format_policy(one.policy),
            f"{one.point.token_hit_rate:.1%}", format_hours(one.gpu_hours_a_day), f"{one.memory_a_day:,.2f}",
            f"{one.net_a_day:,.2f}",
        )  # fmt: skip

    return [format_row(name, one) for name, one in advice.tiers.items()]


TIER_HEADS = ("memory", "GiB-hour", "size", "policy", "hits", "GPU time a day", "memory a day", "left a day")


def describe_reuse_at_any_position(advice: Advice) -> str:
    """Describe how many tokens reuse of blocks at any position would add."""
    if not advice.can_tell:
        return "This trace cannot tell."
    if not advice.anywhere:
        return (
            "This trace cannot tell: its ids stand for a block and everything before it. Collect one with "
            "`semantickv collect` to see it."
        )
    if advice.sureness is None:
        return ""
    here, there = advice.get_advised_point(advice.policy), advice.anywhere[advice.chosen]
    gain = there.token_hit_rate - here.token_hit_rate
    if gain <= NOISE:
        return (
            f"Reuse of blocks at any position would add {gain:+.1%} of the prompt tokens at this size: prefixes are "
            "all that is shared."
        )
    more = advice.costs.compute_gpu_hours(there.tokens_saved - here.tokens_saved)
    a_day = ""
    if advice.by_price:
        a_day = f", another {format_hours(more * 24 / advice.hours)} of {advice.costs.gpu.name} a day"
    return (
        f"If blocks could be reused at any position, {there.token_hit_rate:.1%} of the prompt tokens would come from "
        f"the cache in the same memory: {gain * 100:.1f} points more{a_day}. "
        "An upper bound: it counts every equal block, and pays nothing for moving it or for checking its quality."
    )


def describe_arranging(advice: Advice) -> str:
    """Describe what passages in the order of earlier prompts would add; empty where none can move."""
    if advice.arranged is None or not advice.can_tell:
        return ""
    here = advice.at_chosen.token_hit_rate
    gain = (advice.arranged.token_hit_rate - here) * 100
    return (
        f"If retrieved passages that stand side by side may change places, arranging them would give "
        f"{advice.arranged.token_hit_rate:.1%} from the cache: {gain:+.1f} points, in exact prefixes."
    )


def describe_stability(advice: Advice) -> str:
    """Say whether the first half of the trace, on its own, asks for the same memory."""
    half = "no more memory" if advice.half is None else f"a cache of {format_gib(advice.to_gib(advice.half))}"
    if advice.is_stable:
        return f"The first half of the trace, on its own, asks for {half}: about the same."
    if not advice.is_too_short:
        return f"The first half of the trace, on its own, asks for {half}."
    return f"The trace is too short to choose a size: its first half, on its own, asks for {half}."


def describe_sureness(advice: Advice) -> str:
    """Say what the bootstrap over sessions found, and whether it agrees with the advice."""
    sure = advice.sureness
    if sure is None:
        return f"The trace is too short for intervals: {_say_how_many_are_enough()}."
    told = f"Intervals are 95 % of {DRAWS} draws of {sure.units:,} {sure.unit}"
    if not advice.choice.adds:
        return f"{told}. In {sure.share_without:.0%} of the draws nothing is added."
    short = "The trace is too short" if advice.is_too_short else "It costs nothing, so its size need not be exact"
    if sure.share_without > 0.05:
        return f"{told}. {short}: in {sure.share_without:.0%} of the draws nothing is added."
    if sure.sizes is None:
        return f"{told}."
    low, high = (format_gib(advice.to_gib(one)) for one in (sure.sizes.low, sure.sizes.high))
    if advice.is_sure:
        return f"{told}. They ask for a cache of {low} to {high}."
    return f"{told}. {short}: they ask for a cache of {low} to {high}."


def list_limits(advice: Advice) -> list[str]:
    """List what the figures do not say, one sentence each."""
    return [*(_list_limits_of_figures(advice) if advice.can_tell else ()), *_list_limits_of_trace(advice)]


def _list_limits_of_figures(advice: Advice) -> list[str]:
    """List what the curves, prices and times leave out."""
    latency, costs = advice.latency, advice.costs
    several = f" on {costs.rate.gpus} {costs.gpu.name} together" if costs.rate.gpus > 1 else ""
    found = [
        SIMULATED,
        f"TTFT = {latency.base_ttft_ms:.1f} ms + uncached tokens x {latency.token_latency_ms:.4f} ms{several} "
        f"({latency.source}): no queue, no batch, no growth with the length of the prompt.",
    ]
    if costs.load_ms_per_token and advice.choice.adds:
        found.append(
            f"A hit token is loaded from {costs.tier.name.upper()} in {costs.load_ms_per_token:.4f} ms "
            f"({costs.tier.load_source}); TTFT and savings count that."
        )
    if advice.by_price:
        found.append(
            f"An hour of {costs.gpu.name} costs {costs.gpu.hour:.2f} {costs.currency} ({costs.gpu.hour_source}), a GiB "
            f"of {costs.tier.name.upper()} {costs.tier.gib_hour:.4f} an hour ({costs.tier.gib_hour_source}). "
            "Memory that the GPU has, or that you own and do not use, costs nothing: give your own prices."
        )
    else:
        found.append(
            f"The trace is {_format_length(advice)} long. Money a day needs {MIN_HOURS:g} h, so a size is the knee "
            "of the curve, not what leaves most."
        )
    found += [
        _describe_running(advice),
        f"Hit rates within {NOISE:.1%} of each other are called equal, sizes within {STABLE_TIMES:g} times too. Belady "
        "knows the future and is no policy to run; with blocks of different length it is a guide, not a strict bound.",
        describe_stability(advice),
        describe_sureness(advice),
    ]
    if advice.choice.adds and advice.chosen == len(advice.sizes) - 1:
        found.append("This is the largest size that was tried: a larger one may give more (`--gib`).")
    if advice.by_price and advice.hours < 24:
        found.append(f"A day is taken to be {24 / advice.hours:,.1f} times this trace of {_format_length(advice)}.")
    if advice.rate < 1:
        worst = max(point.error for points in advice.curves.values() for point in points)
        found.append(
            f"The curves come from samples of {advice.rate:.1%} of the blocks (standard error up to {worst:.1%}); "
            "block hit rates stand for token hit rates."
        )
    return found


def _describe_running(advice: Advice) -> str:
    """Say what the engine's own memory was taken to be."""
    return (
        f"The engine's own memory was computed: {advice.costs.gpu.name} less weights and a tenth for activations, "
        "unless `--pool-tokens` gave it. Running requests were counted without a queue for the GPU, with "
        f"{DECODE_MS:g} ms for a token of the answer; what they hold is not counted as cache."
    )


def _list_limits_of_trace(advice: Advice) -> list[str]:
    """List what the trace itself leaves out, and what its engine says."""
    found = []
    if advice.trace.format == "kv_events":
        found.append("Requests that the engine served from its cache alone published no event: hit rates are too low.")
    if advice.trace.engine_hit_rate is not None:
        found.append(
            f"By the engine's own log {advice.trace.engine_hit_rate:.1%} of the prompt tokens came from its cache."
        )
    if advice.trace.skipped:
        found.append(f"{advice.trace.skipped:,} bad lines of the trace were skipped.")
    return found


def describe_traffic(advice: Advice) -> str:
    """Describe the trace: requests, hours, tokens and block accesses."""
    facts = advice.facts
    over = f" over {_format_length(advice)}"
    return (
        f"{facts['requests']:,} requests{over}, {facts['prompt_tokens']:,} prompt tokens, "
        f"{facts['block_accesses']:,} block accesses."
    )


def _name_memory(choice: TierChoice) -> str:
    return {"hbm": "memory", "dram": "host memory", "ssd": "disk"}[choice.costs.tier.name]


def _format_length(advice: Advice) -> str:
    """Format how long the trace is: seconds, minutes or hours."""
    seconds = advice.hours * 3600
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{advice.hours:,.1f} h"


def format_policy(policy: str) -> str:
    """Write well-known acronyms in capitals."""
    return policy.upper() if policy in ("lru", "fifo", "lfu", "arc", "gdsf") else policy


ANYWHERE = "at any position"
_NAMES, _STEP = 210.0, 15.0  # room for the names at the right, and from one to the next, in pixels


def build_figure(advice: Advice) -> Figure:
    """Build the token hit rates of all policies against memory, with the advised size and reuse at any position."""
    kinds = {_choose_kind(name, advice): name for name in [*advice.curves, *([ANYWHERE] if advice.anywhere else [])]}
    words = {
        "curve warm": advice.policy, "curve cold": "lru", "curve bound": "knows the future",
        "curve anywhere": "reuse at any position", "curve other": "other policies",
    }  # fmt: skip
    return Figure(
        "curves",
        "Prompt tokens from cache, against memory",
        draw_both(lambda width: draw_curves(advice, width), _write_label(advice)),
        tuple((kind, told) for kind, told in words.items() if kind in kinds),
        f"Simulated: {advice.trace.name}, prefix semantics; memory is {advice.model} {advice.dtype} KV.",
    )


def write_picture(advice: Advice) -> str:
    """Return the figure as an SVG file."""
    return draw_curves(advice, WIDE).render(_write_label(advice), write_plain_style())


def draw_curves(advice: Advice, width: float) -> Drawing:
    """Draw a curve for each policy; on a wide page names stand at the right, the best at the advised size first."""
    memory = [advice.to_gib(size) for size in advice.sizes]
    rates = {name: [point.token_hit_rate for point in points] for name, points in advice.curves.items()}
    if advice.anywhere:
        rates[ANYWHERE] = [point.token_hit_rate for point in advice.anywhere]
    narrow = is_narrow(width)
    top = max(0.01, *(max(values) for values in rates.values())) * 1.08
    ticks = thin_out(memory, 4 if narrow else 8)
    x = Axis(memory[0], max(memory[-1], memory[0] * 1.01), format_gib, log=True, ticks=ticks)
    y = Axis(0.0, top, lambda rate: f"{rate:.0%}")
    height = 300.0 if narrow else max(380.0, 80 + _STEP * len(rates))
    right = 18.0 if narrow else _NAMES
    drawing, across, up = begin_plot(width, height, x, y, "memory for cached prompts", left=46, right=right)
    here = across(memory[advice.chosen])
    drawing.add_line(here, up.end, here, up.start, "rule")
    late = here > (across.start + across.end) / 2
    told = f"{'with what is added' if advice.choice.adds else 'the engine has'}: {format_gib(memory[advice.chosen])}"
    drawing.add_text(here - 5 if late else here + 5, up.start - 8, told, "tick", "end" if late else "start")
    loud_last = sorted(rates, key=lambda name: (_choose_kind(name, advice) != "curve other", name == advice.policy))
    for name in loud_last:
        points = [(across(size), up(rate)) for size, rate in zip(memory, rates[name], strict=True)]
        drawing.add_curve(points, _choose_kind(name, advice), name)
    best = rates[advice.policy][advice.chosen]
    drawing.add_dot(here, up(best), 5.5, "warm", f"{advice.policy}, {format_gib(memory[advice.chosen])}: {best:.1%}")
    if not narrow:
        _name_curves(drawing, advice, {name: values[advice.chosen] for name, values in rates.items()}, across.end + 14)
    return drawing


def _name_curves(drawing: Drawing, advice: Advice, rates: dict[str, float], left: float) -> None:
    """Write the names with their rates at the advised size, the highest first."""
    for row, name in enumerate(sorted(rates, key=lambda name: -rates[name])):
        y = 18 + _STEP * row
        drawing.add_curve([(left, y), (left + 22, y)], _choose_kind(name, advice))
        drawing.add_text(left + 28, y + 4, f"{name} {rates[name]:.1%}", "strong" if name == advice.policy else "label")
    size = format_gib(advice.to_gib(advice.sizes[advice.chosen]))
    drawing.add_text(left + 28, 22 + _STEP * len(rates), f"at {size}", "tick")


def _choose_kind(name: str, advice: Advice) -> str:
    if name == advice.policy:
        return "curve warm"
    if name == ANYWHERE:
        return "curve anywhere"
    return "curve bound" if name in BOUNDS else "curve cold" if name == "lru" else "curve other"


def _write_label(advice: Advice) -> str:
    return f"Curves: share of prompt tokens from cache against memory, one for each of {len(advice.curves)} policies"


FIGURE = "hit_rate_against_memory.svg"
TYPE_HEADS = ("type", "prompt tokens", "from cache")


def write_advice(advice: Advice, folder: Path) -> None:
    """Write advice.html, advice.md, advice.json and, where the trace can tell, the figure into ``folder``."""
    write_json(folder / "advice.json", advice.as_json())
    if advice.can_tell:
        write_text(folder / FIGURE, write_picture(advice))
    write_text(folder / "advice.md", format_markdown(advice))
    write_text(folder / "advice.html", format_html(advice))


def build_policy_rows(advice: Advice, strong: Callable[[str], str] = "**{}**".format) -> list[tuple[str, ...]]:
    """Build the table: each policy with its token hit rates at some sizes; best first, bounds last.

    At each size the best policy that does not know the future is written as ``strong``.
    """
    columns = choose_columns(advice)
    order = sorted(
        advice.curves, key=lambda p: (p in BOUNDS, -advice.curves[p][advice.chosen].token_hit_rate, p != "lru")
    )
    tops = [max(points[at].token_hit_rate for p, points in advice.curves.items() if p not in BOUNDS) for at in columns]

    def format_cell(policy: str, at: int, top: float) -> str:
        rate = advice.curves[policy][at].token_hit_rate
        text = f"{rate:.1%}"
        best = policy not in BOUNDS and rate >= top - 1e-4 and at != len(advice.sizes) - 1  # at the end all are equal
        return strong(text) if best else text

    return [(p, *(format_cell(p, at, top) for at, top in zip(columns, tops, strict=True))) for p in order]


def choose_columns(advice: Advice) -> list[int]:
    """Choose the indices of the sizes to show: both ends, the engine's own and those around the advised one."""
    last, here = len(advice.sizes) - 1, advice.chosen
    own = advice.sizes.index(advice.room.cache)
    return sorted({0, own, max(0, here - 1), here, min(last, here + 1), last})


def format_markdown(advice: Advice) -> str:
    """Format the whole advice as Markdown."""
    limits = [f"- {limit}" for limit in list_limits(advice)]
    if not advice.can_tell:
        lead = [f"# {format_headline(advice)}", "", format_lead(advice), "", *limits, ""]
        return "\n".join([*lead, f"{advice.trace.name}: {describe_traffic(advice)}"]) + "\n"
    lines = [
        f"# {format_headline(advice)} (simulated)",
        "",
        f"{advice.trace.name}: {describe_traffic(advice)}",
        "",
        format_lead(advice),
        "",
        *(f"- **{value}** {told}" for value, told in build_cards(advice)),
        "",
        f"![Hit rate against memory]({FIGURE})",
        "",
    ]
    for title, told in _list_sections(advice):
        lines += [f"## {title}", "", told, ""]
    rows = build_tier_rows(advice)
    if rows:
        lines += ["## By kind of memory", "", *_format_table(TIER_HEADS, rows), ""]
    lines += ["## Token hit rate by policy and memory", ""]
    lines += [*_format_table(_list_heads(advice), build_policy_rows(advice)), "", "## By type", ""]
    lines += [*_format_table(TYPE_HEADS, _list_types(advice)), "", "## What this does not say", ""]
    return "\n".join([*lines, *limits]) + "\n"


def _list_heads(advice: Advice) -> list[str]:
    sizes = [format_gib(advice.to_gib(advice.sizes[at])) + _name_size(advice, at) for at in choose_columns(advice)]
    return ["policy", *sizes]


def _name_size(advice: Advice, at: int) -> str:
    if advice.sizes[at] == advice.room.cache:
        return " (the GPU's own)"
    return " (with what is added)" if at == advice.chosen else ""


def _list_types(advice: Advice) -> list[tuple[str, str, str]]:
    return [
        (name, f"{total:,}", f"{hit / total:.0%}" if total else "0%")
        for name, (total, hit) in count_hits_by_type(advice).items()
    ]


def _list_sections(advice: Advice) -> list[tuple[str, str]]:
    """The sections that are one paragraph each, with their titles."""
    found = [
        ("How to set it", describe_how_to_set_it(advice)),
        ("What it saves", describe_money(advice)),
        ("Beyond prefixes", describe_reuse_at_any_position(advice)),
        ("Arranging", describe_arranging(advice)),
    ]
    return [(title, told) for title, told in found if told]


def _format_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(heads) + " |",
        "|---|" + "---:|" * (len(heads) - 1),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def format_html(advice: Advice) -> str:
    """Format the whole advice as one self-contained HTML file."""
    title = format_headline(advice)
    body = [
        '<div class="tag">Simulated</div>',
        f'<h1>{escape(title)}</h1><p class="verdict">{_mark_code(format_lead(advice))}</p>',
        *(_list_figures(advice) if advice.can_tell else ()),
        f"<ul>{''.join(f'<li>{_mark_code(limit)}</li>' for limit in list_limits(advice))}</ul>",
        f"<footer>{escape(advice.trace.name)}: {escape(describe_traffic(advice))} Made by semantickv advise.</footer>",
    ]
    return render_document(title, body)


def _list_figures(advice: Advice) -> list[str]:
    """The figure, the sections and the tables, in HTML."""
    rows, tiers = build_policy_rows(advice, Strong), build_tier_rows(advice)
    marks = {at: "best" if row[0] == advice.policy else "bound" for at, row in enumerate(rows)
             if row[0] == advice.policy or row[0] in BOUNDS}  # fmt: skip
    tier = {at: "best" for at, row in enumerate(tiers) if row[0].lower() == advice.costs.tier.name}
    kinds = (
        f"<h2>By kind of memory, each alone beside the GPU's ({escape(advice.costs.currency)})</h2>" if tiers else ""
    )
    return [
        render_tiles(Tile(value, told) for value, told in build_cards(advice)),
        render_figure(build_figure(advice)),
        *(f"<h2>{escape(title)}</h2><p>{_mark_code(told)}</p>" for title, told in _list_sections(advice)),
        kinds + (render_table(TIER_HEADS, tiers, marks=tier) if tiers else ""),
        "<h2>Token hit rate by policy and memory (best of a size in bold)</h2>",
        render_table(_list_heads(advice), rows, marks=marks),
        f"<h2>What hits, by type, at {format_gib(advice.to_gib(advice.sizes[advice.chosen]))}</h2>",
        render_table(TYPE_HEADS, _list_types(advice)),
        "<h2>What this page does not say</h2>",
    ]


def _mark_code(text: str) -> str:
    """Escape text and put what stands between backticks into code elements."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
