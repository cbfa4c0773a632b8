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
from semantickv.output import advise_page
from semantickv.output.advise_words import SIMULATED, format_gib, format_hours
from semantickv.simulator.capacity import Capacity
from semantickv.simulator.simulate import simulate
from semantickv.traces.trace import Trace, TraceRequest

TOKENS = 512
KV_BYTES = 2 * 32 * 8 * 128 * 2  # llama-3.1-8b in bfloat16
RATE = 989e12 * 0.63 / (2 * 8.03e9)  # tokens a second: 63 % of an H200's peak
LOAD_MS = {"hbm": 0.0, "dram": KV_BYTES / 2**30 / 51 * 1000, "ssd": KV_BYTES / 2**30 / 5 * 1000}
GIB_HOUR = {"hbm": 3.0 / 131, "dram": 0.0039, "ssd": 0.0002}
SIZES = [TOKENS * count for count in (8, 16, 32, 64, 400)]
COMPUTED = "computed: 2 FLOP a parameter and token at the share of the peak that was measured on an H200 (63%)"
SOURCES = {
    "hbm": "computed: the hour of the GPU divided by its memory",
    "dram": "assumption: after list prices of 2025, 16 GiB more in a machine of 4 cores (AWS r7i.xlarge 0.2646, "
    "m7i.xlarge 0.2016)",
    "ssd": "assumption: after list prices of 2025, a local NVMe drive of 237 GB (AWS m6id.xlarge 0.2373, m6i.xlarge "
    "0.192)",
}
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

    @property
    def hours(self) -> float:
        return (self.requests[-1].arrival_s - self.requests[0].arrival_s) / 3600

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.requests)

    def compute_net(self, tier: str, size: int, hits: float) -> float:
        """USD left in an hour."""
        saved_h = hits * (1000 / RATE - LOAD_MS[tier]) / 3.6e6
        return saved_h * 3.0 / self.hours - size * KV_BYTES / 2**30 * GIB_HOUR[tier]

    def choose(self, tier: str, hits: list[float]) -> int | None:
        left = [self.compute_net(tier, size, one) for size, one in zip(SIZES, hits, strict=True)]
        return left.index(max(left)) if max(left) > 0 else None

    def list_hits(self) -> list[float]:
        return [float(sum(count_lru_hits(self.requests, size))) for size in SIZES]

    def draw(self, tier: str) -> tuple[list[float], list[float], list[int | None]]:
        """Hit rates and money a day at the chosen size, and the size chosen, in each of 400 draws of chats."""
        names = list(dict.fromkeys(one.session for one in self.requests))
        by_request = [count_lru_hits(self.requests, size) for size in SIZES]
        here = self.choose(tier, self.list_hits())
        assert here is not None
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
            money.append(24 * self.compute_net(tier, SIZES[here], scaled[here]))
            chosen.append(self.choose(tier, scaled))
        return rates, money, chosen


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
    return make_requests(24, 0.004, 3)


@pytest.fixture(scope="module", params=["hbm", "dram"])
def made(request: pytest.FixtureRequest, requests: list[TraceRequest]) -> Advice:
    asked = Question(model="llama-3.1-8b", memory=request.param)
    return advise(Trace.from_requests(requests), asked, policies=("lru", "fifo", "belady_bypass"), sizes=SIZES)


def test_every_sentence_is_what_brute_force_counts(made: Advice, requests: list[TraceRequest]) -> None:
    all_of, tier = Counted(requests), made.costs.tier.name
    hits = all_of.list_hits()
    here = all_of.choose(tier, hits)
    assert here is not None
    rate, size = hits[here] / all_of.tokens, SIZES[here]
    begins = {one.block_ids[: n + 1] for one in requests for n in range(len(one.block_ids))}
    room = len(begins) * TOKENS
    ceiling = sum(count_lru_hits(requests, room)) / all_of.tokens
    trace = Trace.from_requests(requests)

    def simulate_plainly(policy: str, mode: str = "prefix") -> float:
        done = simulate(trace, policy, Capacity.tokens(size), mode=mode, engine="plain")  # type: ignore[arg-type]
        return done.token_hits / all_of.tokens

    assert simulate_plainly("fifo") <= rate + 0.005  # so LRU is advised
    future, anywhere = simulate_plainly("belady_bypass"), simulate_plainly("lru", "block")
    assert future > rate
    assert anywhere > rate + 0.005

    rates, money, chosen = all_of.draw(tier)
    low, high = np.percentile(rates, [2.5, 97.5])
    poor, rich = np.percentile(money, [2.5, 97.5])
    paying = [SIZES[at] for at in chosen if at is not None]
    least, most = np.percentile(paying, [2.5, 97.5])
    is_sure = len(paying) >= 380 and most <= 1.5 * size and size <= 1.5 * least
    first = Counted(requests[: len(requests) // 2])
    half = first.choose(tier, first.list_hits())
    is_stable = half is not None and SIZES[half] <= 1.5 * size and size <= 1.5 * SIZES[half]

    gpu_ms, load = 1000 / RATE, LOAD_MS[tier]
    mean = all_of.tokens / len(requests)
    cold, warm = 15 + gpu_ms * mean, 15 + gpu_ms * mean * (1 - rate) + load * mean * rate
    saved = hits[here] * (gpu_ms - load) / 3.6e6 * 24 / all_of.hours
    memory = size * KV_BYTES / 2**30 * GIB_HOUR[tier] * 24
    more = (anywhere - rate) * all_of.tokens * (gpu_ms - load) / 3.6e6 * 24 / all_of.hours
    free = 0.9 * 131 - 2 * 8.03e9 / 2**30

    kind = {"hbm": "GPU memory", "dram": "host memory"}[tier]
    told = f"LRU with {gib(size)} of {kind}: {rate:.0%} of prompt tokens from cache"
    if not (is_sure and is_stable):
        told = f"Trace too short. On it alone: {told}"
    page = advise_page.format_markdown(made)
    assert page.splitlines()[0] == f"# {told} (simulated)"

    sentences = {
        f"trace: {len(requests)} requests, {all_of.tokens:,} prompt tokens, "
        f"{sum(len(one.block_ids) for one in requests)} block accesses.",
        f"That is {rate / ceiling:.0%} of what any amount of memory could give ({ceiling:.0%}; all of the trace fits "
        f"into {gib(room)}). No other policy beats LRU there by more than 0.5%, so the simplest one is "
        f"advised. Knowing the "
        f"future (belady_bypass) would give {percent(future)}.",
        f"**{gib(size)}** {size:,} tokens of llama-3.1-8b KV",
        f"**{percent(rate)}** of prompt tokens from cache, 95 %: {percent(low)} to {percent(high)}",
        f"**{warm:.0f} ms** average TTFT, {cold:.0f} ms without a cache",
        f"**{saved * 3 - memory:,.2f} USD** left a day: {format_hours(saved)} of h200 saved, memory paid",
        "LRU is what vllm, sglang, lmcache, semblend have; `--engine` prints the flags.",
        f"A day of this traffic saves {format_hours(saved)} of h200 ({saved * 3:,.2f} USD); the memory costs "
        f"{memory:,.2f}; {saved * 3 - memory:,.2f} are left (95 %: {poor:,.2f} to {rich:,.2f})."
        + (f" One h200 has room for it beside the weights ({format_gib(free)})." if tier == "hbm" else ""),
        f"If blocks could be reused at any position, {percent(anywhere)} of the prompt tokens would come from "
        f"the cache "
        f"in the same memory: {(anywhere - rate) * 100:.1f} points more, another {format_hours(more)} of h200 "
        f"a day. An upper "
        "bound: it counts every equal block, and pays nothing for moving it or for checking its quality.",
        SIMULATED,
        f"TTFT = 15.0 ms + uncached tokens x {gpu_ms:.4f} ms ({COMPUTED}): no queue, no batch, no growth with "
        f"the length "
        "of the prompt.",
        f"An hour of h200 costs 3.00 USD (an assumption, not a quote), a GiB of {tier.upper()} {GIB_HOUR[tier]:.4f} an "
        f"hour ({SOURCES[tier]}). Memory that you own and do not use costs you nothing: give your own prices.",
        "Capacity is counted for cached prompts only: running requests need their own KV, on this trace "
        f"{gib(count_running(requests, gpu_ms))} at the busiest moment (no queue for the GPU, answers of 20 ms a "
        "token).",
        "Hit rates within 0.5% of each other are called equal, sizes within 1.5 times too. Belady knows the "
        "future and is "
        "no policy to run; with blocks of different length it is a guide, not a strict bound.",
        f"The first half of the trace, on its own, asks for "
        f"{'no memory at all' if half is None else gib(SIZES[half])}: "
        "about the same."
        if is_stable
        else "The trace is too short to choose a size: its first half, on its own, asks for "
        f"{'no memory at all' if half is None else gib(SIZES[half])}.",
        "Intervals are 95 % of 400 draws of 24 sessions. "
        + ("They ask for" if is_sure else "The trace is too short to choose a size: they ask for")
        + f" {gib(least)} to {gib(most)}.",
        f"A day is taken to be {24 / all_of.hours:,.0f} times this trace of {all_of.hours * 60:,.0f} minutes.",
    }
    if load:
        sentences.add(
            f"A hit token is loaded from {tier.upper()} in {load:.4f} ms ({LOAD_SOURCES[tier]}); TTFT and savings "
            f"count that."
        )
    if here in (0, len(SIZES) - 1):
        end = "smallest size that was tried: a smaller" if here == 0 else "largest size that was tried: a larger"
        sentences.add(f"This is the {end} one may leave more (`--gib`).")
    shown = list_sentences(page)
    assert [one for one in shown if one not in sentences] == []
    assert [one for one in sentences if one not in shown] == []


def test_the_tables_are_what_brute_force_counts(made: Advice, requests: list[TraceRequest]) -> None:
    all_of = Counted(requests)
    hits = all_of.list_hits()
    page = advise_page.format_markdown(made)
    for tier in ("hbm", "dram", "ssd"):
        at = all_of.choose(tier, hits)
        row = next(line for line in page.splitlines() if line.startswith(f"| {tier.upper()} |"))
        assert f"| {GIB_HOUR[tier]:.4f} |" in row
        if at is None:
            assert "none pays" in row
            continue
        net = 24 * all_of.compute_net(tier, SIZES[at], hits[at])
        assert f"| {gib(SIZES[at])} | LRU | {percent(hits[at] / all_of.tokens)} |" in row
        assert row.endswith(f"| {net:,.2f} |")
    lru = next(line for line in page.splitlines() if line.startswith("| lru |")).replace("*", "")
    assert lru.split(" | ")[1:] == [
        percent(hits[at] / all_of.tokens) + (" |" if at == len(SIZES) - 1 else "")
        for at in advise_page.choose_columns(made)
    ]
    by_request = count_lru_hits(requests, made.sizes[made.chosen])
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
        re.sub(r"<(?!svg)[^>]+>", "", re.sub(r"<svg.*?</svg>", "", advise_page.format_html(made), flags=re.S))
    )
    for sentence in list_sentences(advise_page.format_markdown(made)):
        if not sentence.startswith("**"):
            assert sentence.replace("`", "") in text


def test_where_nothing_pays_the_page_says_so_and_no_more(requests: list[TraceRequest]) -> None:
    asked = Question(model="llama-3.1-8b", memory="dram", gib_hour_cost=1e6)
    made = advise(Trace.from_requests(requests), asked, policies=("lru",), sizes=SIZES)
    page = advise_page.format_markdown(made)
    hits = Counted(requests).list_hits()[0] / Counted(requests).tokens
    assert page.startswith("# At these prices no host memory for a cache pays (simulated)")
    assert (
        f"The smallest size that was tried, {gib(SIZES[0])}, would give {percent(hits)} of the prompt tokens;" in page
    )
    assert "In 100% of the draws no memory pays." in page
    assert "left a day" not in page.split("## By kind of memory")[0]
    assert "Nothing to set." in page
