"""Every sentence on the page of `semantickv advise`, against a count by brute force. One that nobody checks fails here.

LRU, money, halves, draws and times are counted again in plain Python. The other policies and blocks at any position
come from the simulator's plain twin, which has brute-force tests of its own.
"""

from __future__ import annotations

import html
import random
import re
from dataclasses import dataclass

import numpy as np
import pytest

from semantickv.analysis.advice import Advice
from semantickv.analysis.advise import Question, advise
from semantickv.output import advise as advise_output
from semantickv.output.advise import SIMULATED
from semantickv.simulator.capacity import Capacity
from semantickv.simulator.simulate import simulate
from semantickv.traces.trace import Trace, TraceRequest
from semblend.formatting import format_gib, format_hours
from semblend.prices import load_price_book

TOKENS = 512
KV_BYTES = 2 * 32 * 8 * 128 * 2  # llama-3.1-8b in bfloat16
RATE = 989e12 * 0.63 / (2 * 8.03e9)  # tokens a second: 63 % of an H200's peak
LOAD_MS = {"hbm": 0.0, "dram": KV_BYTES / 2**30 / 51 * 1000, "ssd": KV_BYTES / 2**30 / 5 * 1000}
GIB_HOUR = {"dram": 2e-5, "ssd": 0.0002}
SIZES = [TOKENS * count for count in (8, 16, 32, 64, 400)]
POOL = 13 * TOKENS
HOURS = 1.5
COMPUTED = "computed: 2 FLOP a parameter and token at the share of the peak that was measured on an H200 (63%)"
LOAD_SOURCES = {
    "dram": "measured: H200 over PCIe 5, bench/results/vllm_ttft_h200.json, donors on the host against donors on the "
    "device at 32,768 tokens",
    "ssd": "assumption: one NVMe drive of PCIe 4, sequential reads",
}


def make_requests(sessions: int, hours: float, seed: int) -> list[TraceRequest]:
    """Chats with one instruction; a document that others have too, at another place; turns that grow."""
    chance = random.Random(seed)
    order = [session for session in range(sessions) for _ in range(3)]
    chance.shuffle(order)
    turn = [0] * sessions
    requests = []
    for at, session in enumerate(order):
        turn[session] += 1
        own = [1000 + session * 10 + n for n in range(turn[session])]
        ids = [1, *own[:1], 500 + session % 4, *own[1:]]
        kinds = ["system", "user", "retrieved_context", *["user"] * (len(own) - 1)]
        when = at * hours * 3600 / (len(order) - 1)
        requests.append(
            TraceRequest(
                str(at), when, tuple(ids), (TOKENS,) * len(ids), tuple(kinds), 10 * (at % 7), session=f"chat {session}"
            )
        )
    return requests


def count_lru_hits(requests: list[TraceRequest], size: int) -> list[int]:
    """Hit tokens of every request with LRU and room for ``size`` tokens. The list holds beginnings, oldest first."""
    held: list[tuple[int, ...]] = []
    hits = []
    for request in requests:
        begins = [request.block_ids[: n + 1] for n in range(len(request.block_ids))]
        found = 0
        while found < len(begins) and begins[found] in held:
            found += 1
        hits.append(found * TOKENS)
        held = [one for one in held if one not in begins] + begins[::-1]
        held = held[max(0, len(held) - size // TOKENS) :]
    return hits


def count_running(requests: list[TraceRequest], prefill_ms: float) -> int:
    """The most tokens that requests hold at a time: beginnings of prompts, each once, and answers."""
    seen: set[tuple[int, ...]] = set()
    ends: list[float] = []
    for request in requests:
        begins = [request.block_ids[: n + 1] for n in range(len(request.block_ids))]
        new = sum(one not in seen for one in begins) * TOKENS
        seen |= set(begins)
        ends.append(request.arrival_s * 1000 + 15 + new * prefill_ms + request.output_tokens * 20)
    most = 0
    for at, request in enumerate(requests):
        running = [one for n, one in enumerate(requests[: at + 1]) if ends[n] > request.arrival_s * 1000 or n == at]
        held = {one.block_ids[: n + 1] for one in running for n in range(len(one.block_ids))}
        most = max(most, len(held) * TOKENS + sum(one.output_tokens for one in running))
    return most


@dataclass(frozen=True)
class Counted:
    """What brute force found for a trace, in the terms of the page."""

    requests: list[TraceRequest]

    own: int  # tokens of cache that the engine has at the busiest moment
    more: int  # running requests and the longest one, in tokens

    @property
    def hours(self) -> float:
        return (self.requests[-1].arrival_s - self.requests[0].arrival_s) / 3600

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.requests)

    @property
    def sizes(self) -> list[int]:
        return sorted({*SIZES, self.own})

    def compute_net(self, tier: str, size: int, gained: float) -> float:
        """USD left in an hour."""
        saved_h = gained * (1000 / RATE - LOAD_MS[tier]) / 3.6e6
        return saved_h * 3.0 / self.hours - (size + self.more) * KV_BYTES / 2**30 * GIB_HOUR[tier]

    def choose(self, tier: str, hits: list[float]) -> int | None:
        own = self.sizes.index(self.own)
        gains = [(at, hits[at] - hits[own]) for at in range(own + 1, len(hits))]
        if tier == "hbm" or not gains or max(gain for _, gain in gains) <= 0.005 * self.tokens:
            return None
        left = {at: self.compute_net(tier, self.sizes[at], gain) for at, gain in gains}
        best = max(left, key=lambda at: left[at])
        return best if left[best] > 0 else None

    def list_hits(self) -> list[float]:
        return [float(sum(count_lru_hits(self.requests, size))) for size in self.sizes]

    def draw(self, tier: str) -> tuple[list[float], list[float], list[int | None]]:
        """Hit rates and money a day at the chosen size, and the size chosen, in each of 400 draws of chats."""
        names = list(dict.fromkeys(one.session for one in self.requests))
        by_request = [count_lru_hits(self.requests, size) for size in self.sizes]
        own, found = self.sizes.index(self.own), self.choose(tier, self.list_hits())
        here = own if found is None else found
        weights = np.random.default_rng(0).multinomial(len(names), [1 / len(names)] * len(names), size=400)
        rates, money, chosen = [], [], []
        for row in weights.tolist():
            often = dict(zip(names, row, strict=True))
            asked = sum(often[one.session] * one.tokens for one in self.requests)
            hits = [
                sum(often[one.session] * hit for one, hit in zip(self.requests, of_size, strict=True))
                for of_size in by_request
            ]
            scaled = [hit * self.tokens / asked for hit in hits]
            rates.append(hits[here] / asked)
            if found is None:
                money.append(24 * scaled[here] * (1000 / RATE - LOAD_MS[tier]) / 3.6e6 * 3.0 / self.hours)
            else:
                money.append(24 * self.compute_net(tier, self.sizes[here], scaled[here] - scaled[own]))
            chosen.append(self.choose(tier, scaled))
        return rates, money, chosen


def count_for(requests: list[TraceRequest], part: list[TraceRequest] | None = None) -> Counted:
    """Count a part of the requests beside the engine's memory as the whole of them leaves it."""
    running = count_running(requests, 1000 / RATE)
    longest = max(one.tokens + one.output_tokens for one in requests)
    return Counted(part or requests, max(1, POOL - running, min(POOL, longest)), running + longest)


def list_sentences(page: str) -> list[str]:
    """Everything on the Markdown page that is no heading, no table and no picture."""
    lines = [line.strip().removeprefix("- ") for line in page.splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "|", "!["))]


def percent(value: float) -> str:
    return f"{value:.1%}"


def gib(tokens: float) -> str:
    return format_gib(tokens * KV_BYTES / 2**30)


@pytest.fixture(scope="module")
def requests() -> list[TraceRequest]:
    return make_requests(24, HOURS, 3)


@pytest.fixture(scope="module", params=["hbm", "dram"])
def made(request: pytest.FixtureRequest, requests: list[TraceRequest]) -> Advice:
    book = load_price_book()
    book.tables["memory"]["dram"]["gib_hour"] = GIB_HOUR["dram"]
    asked = Question(model="llama-3.1-8b", memory=request.param, pool_tokens=POOL, book=book)
    return advise(Trace.from_requests(requests), asked, policies=("lru", "fifo", "belady_bypass"), sizes=SIZES)


def test_every_sentence_is_what_brute_force_counts(made: Advice, requests: list[TraceRequest]) -> None:
    all_of, tier = count_for(requests), made.costs.tier.name
    hits = all_of.list_hits()
    found, own = all_of.choose(tier, hits), all_of.sizes.index(all_of.own)
    assert (found is None) == (tier == "hbm")
    here = own if found is None else found
    rate, own_rate, size = hits[here] / all_of.tokens, hits[own] / all_of.tokens, all_of.sizes[here]
    begins = {one.block_ids[: n + 1] for one in requests for n in range(len(one.block_ids))}
    room = len(begins) * TOKENS
    ceiling = sum(count_lru_hits(requests, room)) / all_of.tokens
    trace = Trace.from_requests(requests)

    def simulate_plainly(policy: str, mode: str = "prefix") -> float:
        done = simulate(trace, policy, Capacity.tokens(size), mode=mode)  # type: ignore[arg-type]
        return done.token_hits / all_of.tokens

    assert simulate_plainly("fifo") <= rate + 0.005  # so LRU is advised
    future, anywhere = simulate_plainly("belady_bypass"), simulate_plainly("lru", "block")
    assert anywhere > rate + 0.005

    rates, money, chosen = all_of.draw(tier)
    low, high = np.percentile(rates, [2.5, 97.5])
    poor, rich = np.percentile(money, [2.5, 97.5])
    adding = [all_of.sizes[at] for at in chosen if at is not None]
    first = count_for(requests, requests[: len(requests) // 2])
    half = first.choose(tier, first.list_hits())
    is_too_short, is_stable = False, half is None
    asks = f"In {1 - len(adding) / 400:.0%} of the draws nothing is added."
    if found is not None:
        least, most = np.percentile(adding, [2.5, 97.5])
        is_sure = len(adding) >= 380 and most <= 1.5 * size and size <= 1.5 * least
        is_stable = half is not None and first.sizes[half] <= 1.5 * size and size <= 1.5 * first.sizes[half]
        is_too_short = not (is_sure and is_stable)
        between = f"{gib(least)} to {gib(most)}."
        asks = (
            f"They ask for a cache of {between}"
            if is_sure
            else f"The trace is too short: they ask for a cache of {between}"
        )
    assert not is_too_short

    gpu_ms, load = 1000 / RATE, LOAD_MS[tier]
    mean = all_of.tokens / len(requests)
    cold, warm = 15 + gpu_ms * mean, 15 + gpu_ms * mean * (1 - rate) + load * mean * (rate - own_rate)
    gained = hits[here] - (0 if found is None else hits[own])
    saved = gained * (gpu_ms - load) / 3.6e6 * 24 / all_of.hours
    added = 0 if found is None else size + all_of.more
    memory = added * KV_BYTES / 2**30 * GIB_HOUR.get(tier, 0) * 24
    more = (anywhere - rate) * all_of.tokens * (gpu_ms - load) / 3.6e6 * 24 / all_of.hours
    running = count_running(requests, gpu_ms)

    told = f"LRU with {gib(added)} of host memory added: {rate:.0%} of prompt tokens from cache, {own_rate:.0%} without"
    if found is None:
        told = f"Leave the engine's memory as it is: {own_rate:.0%} of prompt tokens from cache"
    page = advise_output.format_markdown(made)
    assert page.splitlines()[0] == f"# {told} (simulated)"

    bound = f" Knowing the future (belady_bypass) would give {percent(future)}." if future > rate else ""
    short = (
        " These requests and one of full length do not fit into it at once: requests wait, and the traffic wants more "
        "GPUs before it wants a cache."
    )
    lead = (
        f"The engine has about {gib(POOL)} for KV on one h200, of which running requests need {gib(running)} at the "
        f"busiest moment. Any amount of memory would give {ceiling:.0%}; all of the trace fits into {gib(room)}."
        f"{short if all_of.more > POOL else ''} No other policy beats LRU there by more than 0.5%, so the simplest one "
        f"is advised.{bound}"
    )
    span = f"(95 %: {poor:,.2f} to {rich:,.2f})"
    money_told = (
        f"A day of this traffic saves {format_hours(saved)} of h200 ({saved * 3:,.2f} USD) {span} in memory that is "
        "there: it costs nothing extra."
        if found is None
        else f"The added memory saves {format_hours(saved)} of h200 ({saved * 3:,.2f} USD) in a day of this traffic "
        f"and costs {memory:,.2f}; {saved * 3 - memory:,.2f} are left {span}."
    )
    price = {"hbm": 3.0 / 131, "dram": GIB_HOUR["dram"]}[tier]
    source = {
        "hbm": "computed: the hour of the GPU divided by its memory",
        "dram": "assumption: after list prices of 2025, 16 GiB more in a machine of 4 cores (AWS r7i.xlarge 0.2646, "
        "m7i.xlarge 0.2016)",
    }[tier]
    sentences = {
        f"trace: {len(requests)} requests over {HOURS} h, {all_of.tokens:,} prompt tokens, "
        f"{sum(len(one.block_ids) for one in requests)} block accesses.",
        lead,
        f"**{'nothing' if found is None else gib(added) + ' of host memory'}** to add to the GPU's {gib(POOL)}",
        f"**{percent(rate)}** of prompt tokens from cache, 95 %: {percent(low)} to {percent(high)}",
        f"**{warm:.0f} ms** average TTFT, {cold:.0f} ms without a cache",
        f"**{saved * 3 - memory:,.2f} USD** left a day: {format_hours(saved)} of h200 saved, "
        + ("in memory that is there" if found is None else "memory paid"),
        "Nothing to set: an engine takes the GPU's free memory by itself, and it costs nothing extra."
        if found is None
        else "LRU is what vllm, sglang, lmcache have; `--engine` prints the flags.",
        money_told,
        f"If blocks could be reused at any position, {percent(anywhere)} of the prompt tokens would come from "
        f"the cache "
        f"in the same memory: {(anywhere - rate) * 100:.1f} points more, another {format_hours(more)} of h200 "
        f"a day. An upper "
        "bound: it counts every equal block, and pays nothing for moving it or for checking its quality.",
        SIMULATED,
        f"TTFT = 15.0 ms + uncached tokens x {gpu_ms:.4f} ms ({COMPUTED}): no queue, no batch, no growth with "
        f"the length "
        "of the prompt.",
        f"An hour of h200 costs 3.00 USD (an assumption, not a quote), a GiB of {tier.upper()} {price:.4f} an "
        f"hour ({source}). Memory that the GPU has, or that you own and do not use, costs nothing: give your own "
        "prices.",
        "The engine's own memory was computed: h200 less weights and a tenth for activations, unless `--pool-tokens` "
        "gave it. Running requests were counted without a queue for the GPU, with 20 ms for a token of the answer; "
        "what they hold is not counted as cache.",
        "Hit rates within 0.5% of each other are called equal, sizes within 1.5 times too. Belady knows the "
        "future and is "
        "no policy to run; with blocks of different length it is a guide, not a strict bound.",
        f"The first half of the trace, on its own, asks for "
        f"{'no more memory' if half is None else 'a cache of ' + gib(first.sizes[half])}"
        + (": about the same." if is_stable else "."),
        f"Intervals are 95 % of 400 draws of 24 sessions. {asks}",
        f"A day is taken to be {24 / all_of.hours:,.1f} times this trace of {HOURS} h.",
    }
    if load:
        sentences.add(
            f"A hit token is loaded from {tier.upper()} in {load:.4f} ms ({LOAD_SOURCES[tier]}); TTFT and savings "
            f"count that."
        )
    if found == len(all_of.sizes) - 1:
        sentences.add("This is the largest size that was tried: a larger one may give more (`--gib`).")
    shown = list_sentences(page)
    assert [one for one in shown if one not in sentences] == []
    assert [one for one in sentences if one not in shown] == []


def test_the_tables_are_what_brute_force_counts(made: Advice, requests: list[TraceRequest]) -> None:
    all_of = count_for(requests)
    hits = all_of.list_hits()
    own = all_of.sizes.index(all_of.own)
    page = advise_output.format_markdown(made)
    row = next(line for line in page.splitlines() if line.startswith("| HBM |"))
    assert row.startswith(f"| HBM | 0 | {gib(POOL)} | LRU | {percent(hits[own] / all_of.tokens)} |")
    for tier in ("dram", "ssd"):
        at = all_of.choose(tier, hits)
        row = next(line for line in page.splitlines() if line.startswith(f"| {tier.upper()} |"))
        assert f"| {GIB_HOUR[tier]:.4f} |" in row
        if at is None:
            assert "none pays" in row
            continue
        net = 24 * all_of.compute_net(tier, all_of.sizes[at], hits[at] - hits[own])
        assert f"| {gib(all_of.sizes[at] + all_of.more)} | LRU | {percent(hits[at] / all_of.tokens)} |" in row
        assert row.endswith(f"| {net:,.2f} |")
    lru = next(line for line in page.splitlines() if line.startswith("| lru |")).replace("*", "").removesuffix(" |")
    assert lru.split(" | ")[1:] == [percent(hits[at] / all_of.tokens) for at in advise_output.choose_columns(made)]
    by_request = count_lru_hits(requests, made.choice.point.tokens)
    for kind in ("system", "user", "retrieved_context"):
        total = sum(TOKENS for one in requests for name in one.block_types if name == kind)
        hit = sum(
            TOKENS
            for one, found in zip(requests, by_request, strict=True)
            for name in one.block_types[: found // TOKENS]
            if name == kind
        )
        assert f"| {kind} | {total:,} | {hit / total:.0%} |" in page


def test_the_html_says_what_the_markdown_says(made: Advice) -> None:
    text = html.unescape(
        re.sub(r"<(?!svg)[^>]+>", "", re.sub(r"<svg.*?</svg>", "", advise_output.format_html(made), flags=re.S))
    )
    for sentence in list_sentences(advise_output.format_markdown(made)):
        if not sentence.startswith("**"):
            assert sentence.replace("`", "") in text


def test_where_nothing_pays_the_page_says_so_and_no_more(requests: list[TraceRequest]) -> None:
    asked = Question(model="llama-3.1-8b", memory="dram", gib_hour_cost=1e6, pool_tokens=POOL)
    made = advise(Trace.from_requests(requests), asked, policies=("lru",), sizes=SIZES)
    page = advise_output.format_markdown(made)
    all_of = count_for(requests)
    hits = dict(zip(all_of.sizes, all_of.list_hits(), strict=True))
    own = hits[all_of.own] / all_of.tokens
    assert made.spare is not None
    size = made.spare.point.tokens
    assert page.startswith(
        f"# Leave the engine's memory as it is: {own:.0%} of prompt tokens from cache, "
        f"{hits[size] / all_of.tokens:.0%} with {gib(size + all_of.more)} of host memory that stand unused (simulated)"
    )
    assert "Nothing to set" not in page
    assert (
        f"At these prices host memory costs more than it saves. Where {gib(size + all_of.more)} stand unused, they "
        f"give {hits[size] / all_of.tokens:.0%} of the prompt tokens; `--engine` prints the flags." in page
    )
    assert "In 100% of the draws nothing is added." in page
    assert "| DRAM | 1000000.0000 | none pays |" in page
