"""Prompts for bench/rejected.py: of kinds that the gate refuses, and of kinds that it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import _quality_cases
import numpy as np
from _documents import read_jsonl

Tokens = list[int]
Encode = Callable[[str], Tokens]
SHORT = 215
"""Tokens of the short prompts, as in the review of the server that found 1.8 times a cold prefill."""


def short_prompts(folder: Path, encode: Encode) -> Iterator[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """A paragraph in a prompt of 215 tokens, and the earlier prompt that held it behind another instruction."""
    before, after = encode(f"{_quality_cases.DONOR_SYSTEM}\n\n"), encode("Read:\n")
    question = encode("\n\nIn one word, the topic:")
    for row in read_jsonl(folder / "summ" / "xsum.jsonl.gz"):
        text = row.get("article") or row["prompt"].split("Article:", 1)[-1].rsplit("Summarize", 1)[0].strip()
        ids = encode(text)[: SHORT - len(after) - len(question)]
        if len(after) + len(ids) + len(question) == SHORT:
            yield (*after, *ids, *question), ((*before, *ids),)


def draw_random(
    scenario: str, vocab: int, *, prompts: int, tokens: int, seed: int
) -> list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """The same shapes of random tokens, for models without a tokenizer: one text, or ten passages of three donors."""
    rng = np.random.default_rng(seed)

    def tell(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(10, vocab - 10, count).tolist())

    made = []
    for _ in range(prompts):
        pieces = [tell(SHORT - 15)] if scenario == "short" else [tell(tokens // 10) for _ in range(10)]
        shares = {"several": [pieces[i::3] for i in range(3)], "reordered": [pieces[::-1]]}.get(scenario, [pieces])
        donors = tuple(tuple(t for piece in share for t in (*tell(20), *piece)) for share in shares)
        made.append(((*tell(5), *(t for piece in pieces for t in piece), *tell(10)), donors))
    return made


def draw(
    scenario: str, folder: Path, encode: Encode, *, prompts: int, tokens: int, seed: int
) -> list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """So many prompts of a scenario, each with the prompts that were answered before it."""
    if scenario == "short":
        return list(islice(short_prompts(folder, encode), prompts))
    made = _quality_cases.cases(folder, encode, scenarios=[scenario], prompts=prompts, tokens=tokens, seed=seed)
    return [(case.tokens, case.donors) for case in islice(made, prompts)]
