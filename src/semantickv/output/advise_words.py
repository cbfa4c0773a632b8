"""The advice in sentences, each made from the numbers of an `Advice` and nothing else."""

from __future__ import annotations

from semantickv.analysis.advice import NOISE, STABLE_TIMES, Advice, TierChoice
from semantickv.analysis.engines import ENGINES, list_engines_with
from semantickv.analysis.intervals import DRAWS
from semantickv.analysis.latency import BOUNDS
from semantickv.analysis.tiers import DECODE_MS

SIMULATED = "Simulated: a cache of metadata replayed this trace. No model ran, and no GPU was measured for it."


def format_headline(advice: Advice) -> str:
    """Write the advice in one sentence: policy, memory and hit rate, or why there is none."""
    if not advice.can_tell:
        return "This trace cannot tell whether a cache would help"
    if advice.ceiling.token_hit_rate < NOISE:
        return "A prefix cache would not help this traffic"
    if not advice.pays:
        kind = _name_memory(advice) if any(one.at is not None for one in advice.tiers.values()) else "memory"
        told = f"At these prices no {kind} for a cache pays"
    else:
        rate = advice.get_advised_point(advice.policy).token_hit_rate
        memory = format_gib(advice.to_gib(advice.sizes[advice.chosen]))
        told = (
            f"{format_policy(advice.policy)} with {memory} of {_name_memory(advice)}: "
            f"{rate:.0%} of prompt tokens from cache"
        )
    return f"Trace too short. On it alone: {told}" if advice.is_too_short else told


def format_lead(advice: Advice) -> str:
    """Compare the advised point with unlimited memory, with LRU and with the bound, in words."""
    if not advice.can_tell:
        return (
            "It says how long prompts were and not what they held, so nothing is known about what they share. Collect "
            "one with `semantickv collect`, or log the engine's requests with their tokens."
        )
    here, lru, ceiling = advice.get_advised_point(advice.policy), advice.get_advised_point("lru"), advice.ceiling
    if ceiling.token_hit_rate < NOISE:
        return f"Even with room for everything, {ceiling.token_hit_rate:.1%} of the prompt tokens would come from it."
    if not advice.pays:
        return (
            f"The smallest size that was tried, {format_gib(advice.to_gib(here.tokens))}, would give "
            f"{here.token_hit_rate:.1%} of the prompt tokens; any amount of memory {ceiling.token_hit_rate:.0%}."
        )
    words = [
        f"That is {format_share(here.token_hit_rate, ceiling.token_hit_rate)} of what any amount of memory could give "
        f"({ceiling.token_hit_rate:.0%}; all of the trace fits into {format_gib(advice.to_gib(ceiling.tokens))})."
    ]
    if advice.policy == "lru":
        of = f" that {advice.engine} has" if advice.engine else ""
        words.append(f"No other policy{of} beats LRU there by more than {NOISE:.1%}, so the simplest one is advised.")
    else:
        words.append(f"LRU would give {lru.token_hit_rate:.1%} in the same memory.")
    bound = next((name for name in reversed(BOUNDS) if name in advice.curves), None)
    if bound and advice.get_advised_point(bound).token_hit_rate > here.token_hit_rate:
        words.append(f"Knowing the future ({bound}) would give {advice.get_advised_point(bound).token_hit_rate:.1%}.")
    return " ".join(words)


def describe_how_to_set_it(advice: Advice) -> str:
    """Say what to type for the chosen engine, or which engines have the advised policy."""
    if not advice.can_tell or advice.ceiling.token_hit_rate < NOISE or not advice.pays:
        return "Nothing to set."
    if advice.engine:
        return f"In {advice.engine} ({ENGINES[advice.engine].tier} memory): `{advice.command}`."
    engines = list_engines_with(advice.policy)
    if not engines:
        return (
            f"No engine that we know has {format_policy(advice.policy)}: "
            f"`--engine {'|'.join(ENGINES)}` advises what one of them has."
        )
    have = "have" if len(engines) > 1 else "has"
    return f"{format_policy(advice.policy)} is what {', '.join(engines)} {have}; `--engine` prints the flags."


def build_cards(advice: Advice) -> list[tuple[str, str]]:
    """Build the four key figures, each with its explanation; none where nothing is advised."""
    if not advice.can_tell or not advice.pays:
        return []
    sure, choice, currency = advice.sureness, advice.choice, advice.costs.currency
    between = f", 95 %: {sure.hit_rate.low:.1%} to {sure.hit_rate.high:.1%}" if sure else ""
    found = [
        (
            format_gib(advice.to_gib(advice.sizes[advice.chosen])),
            f"{advice.sizes[advice.chosen]:,} tokens of {advice.model} KV",
        ),
        (f"{advice.get_advised_point(advice.policy).token_hit_rate:.1%}", "of prompt tokens from cache" + between),
        (f"{advice.ttft_ms:.0f} ms", f"average TTFT, {advice.ttft_cold_ms:.0f} ms without a cache"),
    ]
    if advice.is_by_price:
        found.append(
            (
                f"{choice.net_a_day:,.2f} {currency}",
                f"left a day: {format_hours(choice.gpu_hours_a_day)} of {advice.costs.gpu.name} saved, memory paid",
            )
        )
    return found


def describe_money(advice: Advice) -> str:
    """Say what the advised memory saves and costs in a day, and how sure that is."""
    if not advice.can_tell or not advice.is_by_price or not advice.pays:
        return ""
    choice, costs, sure = advice.choice, advice.costs, advice.sureness
    words = [
        f"A day of this traffic saves {format_hours(choice.gpu_hours_a_day)} of {costs.gpu.name} "
        f"({choice.saved_a_day:,.2f} {costs.currency}); the memory costs {choice.memory_a_day:,.2f}; "
        f"{choice.net_a_day:,.2f} are left"
        + (f" (95 %: {sure.net_a_day.low:,.2f} to {sure.net_a_day.high:,.2f})." if sure else ".")
    ]
    if costs.tier.name == "hbm" and costs.free_gib_per_gpu > 0:
        gpus, each = advice.to_gib(choice.point.tokens) / costs.free_gib_per_gpu, format_gib(costs.free_gib_per_gpu)
        if gpus <= 1:
            words.append(f"One {costs.gpu.name} has room for it beside the weights ({each}).")
        else:
            words.append(f"So much memory is what {gpus:,.1f} {costs.gpu.name} leave beside the weights ({each} each).")
    return " ".join(words)


def build_tier_rows(advice: Advice) -> list[tuple[str, ...]]:
    """Build the table of what each kind of memory, alone, would be advised for; empty where prices decide nothing."""
    if not advice.can_tell or not advice.is_by_price:
        return []

    def format_row(name: str, one: TierChoice) -> tuple[str, ...]:
        price = f"{one.costs.tier.gib_hour:.4f}"
        if one.at is None:
            return (name.upper(), price, "none pays", *[""] * 5)
        return (
            name.upper(), price, format_gib(one.costs.compute_gib(one.point.tokens)), format_policy(one.policy),
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
    here, there = advice.get_advised_point(advice.policy), advice.anywhere[advice.chosen]
    gain = there.token_hit_rate - here.token_hit_rate
    if gain <= NOISE:
        return (
            f"Reuse of blocks at any position would add {gain:+.1%} of the prompt tokens at this size: prefixes are "
            "all that is shared."
        )
    more = advice.costs.compute_gpu_hours(there.tokens_saved - here.tokens_saved)
    a_day = ""
    if advice.hours:
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
    half = "no memory at all" if advice.half is None else format_gib(advice.to_gib(advice.half))
    if advice.is_stable:
        return f"The first half of the trace, on its own, asks for {half}: about the same."
    return f"The trace is too short to choose a size: its first half, on its own, asks for {half}."


def describe_sureness(advice: Advice) -> str:
    """Say what the bootstrap over sessions found, and whether it agrees with the advice."""
    sure = advice.sureness
    if sure is None:
        return "The trace is too short for intervals: it has fewer than ten sessions or runs of requests to draw from."
    told = f"Intervals are 95 % of {DRAWS} draws of {sure.units:,} {sure.unit}"
    if not advice.pays:
        return f"{told}. In {sure.share_without:.0%} of the draws no memory pays."
    if sure.share_without > 0.05:
        return f"{told}. The trace is too short: in {sure.share_without:.0%} of the draws no memory pays."
    if sure.sizes is None:
        return f"{told}."
    low, high = (format_gib(advice.to_gib(one)) for one in (sure.sizes.low, sure.sizes.high))
    if advice.is_sure:
        return f"{told}. They ask for {low} to {high}."
    return f"{told}. The trace is too short to choose a size: they ask for {low} to {high}."


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
    if costs.load_ms_per_token:
        found.append(
            f"A hit token is loaded from {costs.tier.name.upper()} in {costs.load_ms_per_token:.4f} ms "
            f"({costs.tier.load_source}); TTFT and savings count that."
        )
    if advice.is_by_price:
        found.append(
            f"An hour of {costs.gpu.name} costs {costs.gpu.hour:.2f} {costs.currency} ({costs.gpu.hour_source}), a GiB "
            f"of {costs.tier.name.upper()} {costs.tier.gib_hour:.4f} an hour ({costs.tier.gib_hour_source}). "
            "Memory that you own and do not use costs you nothing: give your own prices."
        )
    else:
        found.append("The trace has no duration, so prices cannot choose the size: it is the knee of the curve.")
    found += [
        _describe_running(advice),
        f"Hit rates within {NOISE:.1%} of each other are called equal, sizes within {STABLE_TIMES:g} times too. Belady "
        "knows the future and is no policy to run; with blocks of different length it is a guide, not a strict bound.",
        describe_stability(advice),
        describe_sureness(advice),
    ]
    if advice.pays and advice.is_by_price and len(advice.sizes) > 1 and advice.chosen in (0, len(advice.sizes) - 1):
        end, other = ("smallest", "smaller") if advice.chosen == 0 else ("largest", "larger")
        found.append(f"This is the {end} size that was tried: a {other} one may leave more (`--gib`).")
    if 0 < advice.hours < 24:
        found.append(
            f"A day is taken to be {24 / advice.hours:,.0f} times this trace of {advice.hours * 60:,.0f} minutes."
        )
    if advice.rate < 1:
        worst = max(point.error for points in advice.curves.values() for point in points)
        found.append(
            f"The curves come from samples of {advice.rate:.1%} of the blocks (standard error up to {worst:.1%}); "
            "block hit rates stand for token hit rates."
        )
    return found


def _describe_running(advice: Advice) -> str:
    """Say how much memory running requests need beside the cache."""
    told = "Capacity is counted for cached prompts only: running requests need their own KV"
    if advice.running is None:
        return f"{told}."
    return (
        f"{told}, on this trace {format_gib(advice.to_gib(advice.running))} at the busiest moment (no queue for the "
        f"GPU, answers of {DECODE_MS:g} ms a token)."
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
    over = f" over {advice.hours:.1f} h" if advice.hours >= 0.1 else ""
    return (
        f"{facts['requests']:,} requests{over}, {facts['prompt_tokens']:,} prompt tokens, "
        f"{facts['block_accesses']:,} block accesses."
    )


def _name_memory(advice: Advice) -> str:
    return {"hbm": "GPU memory", "dram": "host memory", "ssd": "disk"}[advice.costs.tier.name]


def format_policy(policy: str) -> str:
    """Write well-known acronyms in capitals."""
    return policy.upper() if policy in ("lru", "fifo", "lfu", "arc", "gdsf") else policy


def format_gib(gib: float) -> str:
    """Format a size in GiB; below 0.1 GiB in MiB.

    >>> format_gib(0.004), format_gib(1.234), format_gib(140.2)
    ('4.1 MiB', '1.2 GiB', '140 GiB')
    """
    if gib < 0.1:
        return f"{gib * 1024:.1f} MiB"
    return f"{gib:.1f} GiB" if gib < 100 else f"{gib:,.0f} GiB"


def format_hours(hours: float) -> str:
    """Format a time in hours; below one hour in minutes.

    >>> format_hours(0.02), format_hours(3.21)
    ('1.2 min', '3.2 h')
    """
    return f"{hours:,.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"


def format_share(some: float, total: float) -> str:
    """Format ``some`` as a percentage of ``total``."""
    return f"{some / total:.0%}" if total else "0%"
