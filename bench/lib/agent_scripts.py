"""Agents' requests in the order in which they are sent: real runs whose history is edited on the way, as tokens.

A script is what one agent sends, step by step. Answers are those of the recorded run, whatever an engine says.

    one edit    two exact steps, one behind an edit of some kind, and the step after it
    ten edits   an exact step, then ten at which another old tool result is cleared
    whole run   every step of a run; a `HistoryEditor` shortens it in batches
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path

from lib.histories import EDITS, Message, Run, fill, read_runs
from semblend.arrange.arranger import CHARS_PER_TOKEN
from semblend.arrange.history import HistoryEditor

Encode = Callable[[Message], list[int]]
EDITS_IN_A_ROW = 10


@dataclass(frozen=True, slots=True)
class Step:
    """One request. ``what``: first, grown (the one before it and what is new), edited, next (grown behind an edit)."""

    what: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Script:
    name: str
    kind: str
    dataset: str
    length: int
    steps: list[Step]


def write_scripts(scripts: Sequence[Script], path: Path) -> None:
    with gzip.open(path, "wt") as file:
        json.dump([asdict(one) for one in scripts], file)


def read_scripts(path: Path) -> list[Script]:
    with gzip.open(path, "rt") as file:
        return [Script(**one | {"steps": [Step(**step) for step in one["steps"]]}) for one in json.load(file)]


def make_scripts(folder: Path, encode: Encode, asked: list[int], lengths: Sequence[int], each: int) -> list[Script]:
    """``each`` scripts of every kind and length; runs and kinds take turns, so that a part of them has some of each."""
    runs, made = read_runs(folder), []
    for length in lengths:
        filled = list(_fill_all(runs, encode, length))
        makers = [*(partial(_edit_once, how=how) for how in EDITS), _edit_often, _run_whole]
        for make in makers:
            found = (make(run, encode=encode, asked=asked, length=length) for run in filled)
            made.append(list(islice((one for one in found if one is not None), each)))
    return [one for turn in zip_longest(*made) for one in turn if one is not None]


def _fill_all(runs: Sequence[Run], encode: Encode, length: int) -> Iterator[Run]:
    for number, run in enumerate(runs):
        others = [one for one in (*runs[number + 1 :], *runs[:number]) if one.dataset == run.dataset]
        yield fill(run, [one for one in others if one.cluster != run.cluster], lambda one: len(encode(one)), length)[0]


def _calls(run: Run, encode: Encode, length: int) -> list[int]:
    """Where the agent was asked with a prompt of at most ``length`` tokens."""
    sizes, total = [], 0
    for message in run.messages:
        total += len(encode(message))
        sizes.append(total)
    return [call for call in run.calls if sizes[call - 1] <= length]


def _join(messages: Sequence[Message], encode: Encode, asked: list[int]) -> list[int]:
    return [token for message in messages for token in encode(message)] + asked


def _edit_once(run: Run, how: str, encode: Encode, asked: list[int], length: int) -> Script | None:
    calls, messages = _calls(run, encode, length), run.messages
    if len(calls) < 4:
        return None
    first, grown, edited, after = calls[-4:]
    now = EDITS[how](messages[:edited], 0)
    if tuple(now) == messages[:edited] or len(_join(messages[:edited], encode, [])) < length / 2:
        return None
    steps = [("first", messages[:first]), ("grown", messages[:grown]), ("edited", now),
             ("next", [*now, *messages[edited:after]])]  # fmt: skip
    return Script(
        f"{how}/{run.name}/{length}", how, run.dataset, length,
        [Step(what, _join(sent, encode, asked)) for what, sent in steps],
    )  # fmt: skip


def _edit_often(run: Run, encode: Encode, asked: list[int], length: int) -> Script | None:
    """The last calls that had a tool result to clear since the one before; those between them are left out."""
    messages, sent = run.messages, list[Sequence[Message]]()
    for call in _calls(run, encode, length):
        now = EDITS["cleared"](messages[:call], 0)
        if not sent or tuple(now[: len(sent[-1])]) != tuple(sent[-1]):
            sent.append(now)
    if len(sent) <= EDITS_IN_A_ROW:
        return None
    steps = _name_steps(sent[-EDITS_IN_A_ROW - 1 :], encode, asked)
    return Script(f"ten edits/{run.name}/{length}", "ten edits", run.dataset, length, steps)


def _run_whole(run: Run, encode: Encode, asked: list[int], length: int) -> Script | None:
    """Its budget is three fifths of the run: it is edited once or twice."""
    calls, messages = _calls(run, encode, length), run.messages
    if len(calls) < 6:
        return None
    told = [{"role": one.role, "content": one.text} for one in messages]
    chars = sum(len(one["content"]) for one in told[: calls[-1]])
    editor = HistoryEditor(budget_tokens=max(2, chars // CHARS_PER_TOKEN * 3 // 5), keep_results=2)
    sent = [[Message(one["role"], one["content"]) for one in editor.edit(told[:call]).messages] for call in calls]
    steps = _name_steps(sent, encode, asked)
    if all(step.what != "edited" for step in steps):
        return None
    return Script(f"whole run/{run.name}/{length}", "whole run", run.dataset, length, steps)


def _name_steps(sent: Sequence[Sequence[Message]], encode: Encode, asked: list[int]) -> list[Step]:
    """First, grown or edited, by whether each begins with the one before it."""
    steps: list[Step] = []
    before: list[int] = []
    for messages in sent:
        ids = _join(messages, encode, [])
        what = "first" if not steps else "grown" if ids[: len(before)] == before else "edited"
        steps.append(Step(what, ids + asked))
        before = ids
    return steps
