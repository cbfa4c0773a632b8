"""When requests arrive: drawn from a random process, or taken from a trace.

The loop is open: a request is sent at its time, whether or not earlier ones were answered. A closed loop, where the
next request waits for the last answer, hides the queue in front of a slow server.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sembench.files import open_text
from sembench.manifests.cases import Case
from sembench.manifests.traffic import ConversationTurn
from semblend.errors import InputError

BLOCK_TOKENS = 512
"""Tokens that one hash id of a Mooncake trace stands for."""
_SYLLABLES = ("ba", "ko", "ri", "mu", "te", "sa", "lo", "ni", "fa", "du", "pe", "gi", "wa", "zo", "hu", "ya")


@dataclass(frozen=True, slots=True)
class RequestArrival:
    """A prompt, its arrival time in seconds, and the length of its answer in tokens (None: the run's default).

    A later ``turn`` of a ``conversation`` is due ``think_s`` seconds after the answer of the turn before it.
    """

    at_s: float
    text: str
    output_tokens: int | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()
    conversation: int | None = None
    turn: int = 0
    think_s: float = 0.0


def draw_arrivals(
    prompts: Iterable[str], rate: float, *, burstiness: float = 1.0, seed: int = 0, limit: int | None = None
) -> list[RequestArrival]:
    """Return arrivals at ``rate`` a second. Gaps are gamma distributed: ``burstiness`` 1 is Poisson, below 1 is bursty.

    >>> [arrival.at_s for arrival in draw_arrivals(["a", "b"], math.inf)]
    [0.0, 0.0]
    """
    if not rate > 0 or not burstiness > 0:
        raise InputError(f"rate {rate:g} and burstiness {burstiness:g} must be above 0", hint="inf sends all at once")
    drawn, now, arrivals = random.Random(seed), 0.0, []
    for text in itertools.islice(prompts, limit):
        arrivals.append(RequestArrival(now, text))
        if math.isfinite(rate):
            now += drawn.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return arrivals


def draw_conversations(
    conversations: Sequence[Sequence[ConversationTurn]],
    rate: float,
    *,
    burstiness: float = 1.0,
    think_s: float | None = None,
    longest_think_s: float = 60.0,
    seed: int = 0,
    limit: int | None = None,
) -> list[RequestArrival]:
    """Return the turns of conversations that begin at ``rate`` a second.

    The pause before a later turn is exponential with the mean ``think_s``; None takes the logged gap, where the log has
    times, and no pause where it has not. No pause is longer than ``longest_think_s``. ``limit`` counts requests.
    """
    begins = draw_arrivals([""] * len(conversations), rate, burstiness=burstiness, seed=seed)
    drawn, arrivals = random.Random(seed + 1), []
    for number, (turns, begin) in enumerate(zip(conversations, begins, strict=True)):
        for at, turn in enumerate(turns):
            pause = drawn.expovariate(1.0 / think_s) if think_s else (turn.gap_s or 0.0) if think_s is None else 0.0
            arrivals.append(
                RequestArrival(
                    begin.at_s, turn.text, None, turn.messages, turn.tools, number, at, min(pause, longest_think_s)
                )
            )
    return arrivals[:limit]


def list_prompts(cases: Iterable[Case], *, with_donors: bool = True) -> Iterator[str]:
    """Yield donors and recipients in the order of the cases."""
    for case in cases:
        if with_donors:
            yield from (donor.text for donor in case.donor_prompts)
        yield case.recipient_prompt


def read_trace(
    path: str, *, time_scale: float = 1.0, limit: int | None = None, most_tokens: int | None = None
) -> list[RequestArrival]:
    """Return the arrivals of a Mooncake (JSON Lines) or an Azure (CSV) trace; the first one is at 0 seconds.

    ``time_scale`` 2 plays it at double speed. Traces hold no text: prompts are made up, and equal hash ids of a
    Mooncake trace become equal text, so that what was shared stays shared. ``most_tokens`` cuts long prompts.
    """
    if not time_scale > 0:
        raise InputError(f"--time-scale {time_scale:g} must be above 0", hint="2 plays the trace at double speed")
    name = path.removesuffix(".gz")
    with open_text(path) as stream:
        rows = _read_azure(stream, path) if name.endswith(".csv") else _read_mooncake(stream, path)
        taken = list(itertools.islice(rows, limit))
    if not taken:
        raise InputError(f"{path} holds no requests", hint="pass a Mooncake JSON Lines or an Azure CSV trace")
    first = min(row.at_s for row in taken)
    arrivals = []
    for number, row in enumerate(taken):
        tokens = row.input_tokens if most_tokens is None else min(row.input_tokens, most_tokens)
        arrivals.append(
            RequestArrival((row.at_s - first) / time_scale, _make_text(row, tokens, number), row.output_tokens)
        )
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


@dataclass(frozen=True, slots=True)
class _TraceRow:
    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()


def _read_mooncake(lines: Iterable[str], path: str) -> Iterator[_TraceRow]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield _TraceRow(
                row["timestamp"] / 1000, row["input_length"], row["output_length"], row.get("hash_ids") or ()
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} line {number} is no request of a Mooncake trace: {error}",
                hint="a line has timestamp, input_length, output_length and hash_ids",
            ) from None


def _read_azure(lines: Iterable[str], path: str) -> Iterator[_TraceRow]:
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp()
            yield _TraceRow(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path} line {number} is no request of an Azure trace: {error}",
                hint="the columns are TIMESTAMP, ContextTokens, GeneratedTokens",
            ) from None


def _make_text(row: _TraceRow, tokens: int, number: int) -> str:
    """Make up text of about ``tokens`` tokens. A made-up word takes one to three tokens: two words count as three."""
    blocks = row.blocks or [-number - 1 - at * 1_000_003 for at in range(math.ceil(tokens / BLOCK_TOKENS))]
    words: list[str] = []
    for block in blocks:
        words.extend(_make_words(block))
        if len(words) >= tokens // 2:
            break
    return " ".join(words[: max(tokens // 2, 1)])


def _make_words(block: int) -> Iterator[str]:
    digest = hashlib.shake_128(str(block).encode()).digest(BLOCK_TOKENS // 2)
    for value in digest:
        yield _SYLLABLES[value >> 4] + _SYLLABLES[value & 15]
