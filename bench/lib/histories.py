"""Agents that edit their history: real runs, the prompt of a call behind an edit, and the call before it as the donor.

    cleared      tool results but the last two became a placeholder
    dropped      the oldest half of the turns is gone
    compacted    the oldest half became a summary (the first words of each message)
    stripped     the reasoning of earlier turns is gone
    handed_over  another agent goes on: another system message

The donor is the exact, unedited prompt one call before; kept messages stay in their order. What a prefix cache holds
anyway (whole blocks of the donor's beginning) counts as exact. Each edit has a second wording: a prompt that the same
agent might have sent as well. How far a cold answer moves between the two is what users of the edit live with already.

Runs: tau-bench (gpt-4o, airline), mini-SWE-agent, Magentic-One. Only the first keeps whole message lists. Of
mini-SWE-agent the messages are a run's observations with the answer that was given to each; of Magentic-One what each
call's input had new, and its output, call by call. Where a run is shorter than three quarters of the length asked for,
the messages of other runs of the same half stand in front of it, and the data set is called "joined".
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lib.real_texts import read_jsonl

BLOCK_TOKENS = 16
"""A prefix cache holds whole blocks."""
LEAST_MESSAGES = 6
CALLS_OF_A_RUN = 3
"""Prompts of one run, at different calls, for each length."""
KEPT_RESULTS = 2
DEPTHS = (2, 5, 10)
"""So many edits in a row lie behind some prompts: the last exact one is that many calls back."""
CLEARED = ("[old tool result cleared]", "(This result was removed to save space.)")
SUMMARY = ("Summary of the conversation so far:\n", "What happened before, in short:\n")
SUMMARY_WORDS = (14, 8)
NO_REASONING = ("", "(reasoning removed)")
OTHER_AGENT = (
    "You take over a task that another agent has led so far. Read what was said and done, keep to what was agreed, "
    "and go on with the next step. Be brief and polite.",
    "A colleague hands this task over to you in the middle of the work. Go through the messages below, respect what "
    "was promised, then do what comes next. Answer shortly.",
)
REASONING = re.compile(r'THOUGHT:.*?(?=```)|"reason(?:ing)?":\s*"(?:[^"\\]|\\.)*",?\s*', re.DOTALL)
CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)|```(?:bash|sh)\n(.*?)(?:```|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Run:
    """One agent's messages. ``cluster``: what bootstraps draw; trials of one task are one cluster."""

    name: str
    cluster: str
    dataset: str
    messages: tuple[Message, ...]

    @property
    def half(self) -> bool:
        """As `Case.held_out`."""
        return is_held_out(self.cluster)

    @property
    def calls(self) -> list[int]:
        """Where the agent was asked: the messages before each index were its prompt."""
        return [i for i, one in enumerate(self.messages) if one.role == "assistant" and i >= LEAST_MESSAGES]


def count_common(one: Sequence[object], other: Sequence[object]) -> int:
    """How long both are the same from the beginning.

    >>> count_common("abcd", "abx")
    2
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def is_held_out(cluster: str) -> bool:
    """Half of all clusters, by a hash of their names."""
    return hashlib.sha256(cluster.encode()).digest()[0] % 2 == 1


# -- Runs as message lists -------------------------------------------------------------------------------------------


def read_runs(folder: Path) -> list[Run]:
    """The three collections take turns, so that a run cut short has some of each."""
    turns = zip_longest(_read_tau(folder), _read_swe(folder), _read_magentic(folder))
    return [run for turn in turns for run in turn if run is not None]


def _read_tau(folder: Path) -> Iterator[Run]:
    for row in read_jsonl(folder / "taubench_gpt4o_airline_even.jsonl.gz"):
        messages = tuple(map(_read_message, row["traj"]))
        yield Run(f"tau-{row['task_id']}-{row['trial']}", f"tau-{row['task_id']}", "tau-bench", messages)


def _read_message(record: dict[str, Any]) -> Message:
    text, role = record.get("content") or "", record["role"]
    if role == "tool":
        return Message("tool", f"<tool_response>\n{text}\n</tool_response>")
    for call in record.get("tool_calls") or ():
        function = call["function"]
        text += f'\n<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
    return Message(role, text.strip())


def _read_sessions(path: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    sessions: dict[str, list[dict[str, Any]]] = {}
    for row in read_jsonl(path):
        sessions.setdefault(row["session"], []).append(row)
    for name, rows in sessions.items():
        yield name[:8], sorted(rows, key=lambda row: int(row["step"]))


def _read_swe(folder: Path) -> Iterator[Run]:
    """Inputs hold the task and all observations so far: the output to an input with so many is their answer."""
    for name, rows in _read_sessions(folder / "miniswe.jsonl.gz"):
        longest = max((str(row["input"]) for row in rows), key=len)
        parts = re.split(r"\n\n(?=<returncode>)", longest)
        answers: dict[int, str] = {}
        for row in rows:
            if longest.startswith(row["input"]):
                answers.setdefault(len(re.findall(r"\n\n<returncode>", row["input"])), row["output"])
        messages = []
        for number, part in enumerate(parts):
            messages.append(Message("tool" if number else "user", part))
            if number in answers:
                messages.append(Message("assistant", answers[number]))
        yield Run(f"swe-{name}", f"swe-{name}", "mini-SWE-agent", tuple(messages))


def _read_magentic(folder: Path) -> Iterator[Run]:
    for name, rows in _read_sessions(folder / "magagent.jsonl.gz"):
        seen: list[str] = []
        messages = []
        for row in rows:
            known = max((count_common(row["input"], one) for one in seen), default=0)
            if new := row["input"][known:].strip():
                messages.append(Message("tool" if seen else "user", new))
            seen.append(row["input"])
            if row["output"].strip():
                messages.append(Message("assistant", row["output"]))
        yield Run(f"mag-{name}", f"mag-{name}", "Magentic-One", tuple(messages))


# -- Edits: a history as it was, and in which of two wordings -> the history that is sent ------------------------------


def clear(messages: Sequence[Message], wording: int) -> list[Message]:
    old = [i for i, one in enumerate(messages) if one.role == "tool"][:-KEPT_RESULTS]
    return [replace(one, text=CLEARED[wording]) if i in old else one for i, one in enumerate(messages)]


def drop(messages: Sequence[Message], wording: int) -> list[Message]:
    """The second wording keeps a turn more."""
    start = _count_lead(messages)
    return [*messages[:start], *messages[start + (len(messages) - start) // 2 - 2 * wording :]]


def compact(messages: Sequence[Message], wording: int) -> list[Message]:
    start = _count_lead(messages)
    middle = start + (len(messages) - start) // 2
    lines = (" ".join(one.text.split()[: SUMMARY_WORDS[wording]]) for one in messages[start:middle])
    summary = SUMMARY[wording] + "\n".join(f"- {line}" for line in lines)
    return [*messages[:start], Message("user", summary), *messages[middle:]]


def strip(messages: Sequence[Message], wording: int) -> list[Message]:
    return [
        replace(one, text=REASONING.sub(NO_REASONING[wording], one.text)) if one.role == "assistant" else one
        for one in messages
    ]


def hand_over(messages: Sequence[Message], wording: int) -> list[Message]:
    kept = messages[1:] if messages[0].role == "system" else messages
    return [Message("system", OTHER_AGENT[wording]), *kept]


def _count_lead(messages: Sequence[Message]) -> int:
    """The system message, or the task: no edit touches it."""
    return 1 if messages[0].role in ("system", "user") else 0


Edit = Callable[[Sequence[Message], int], list[Message]]
EDITS: dict[str, Edit] = {
    "cleared": clear,
    "dropped": drop,
    "compacted": compact,
    "stripped": strip,
    "handed_over": hand_over,
}


# -- Prompts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EditedPrompt:
    """A prompt behind an edit, the exact prompt before it, and the same prompt in the edit's other wording, as text of
    messages; each ends where the agent answers."""

    name: str
    run: Run
    dataset: str
    before: tuple[Message, ...]
    now: tuple[Message, ...]
    reworded: tuple[Message, ...]


def edited_prompts(
    runs: Sequence[Run], how: str, count_tokens: Callable[[Message], int], length: int, depth: int = 1
) -> Iterator[EditedPrompt]:
    """Prompts of about ``length`` tokens before the edit, one run after the other, then their next calls.

    ``depth``: the last exact prompt lies so many calls back, as where each of them was edited.

    >>> talk = [Message("user" if i % 2 else "assistant", f"{i}") for i in range(1, 13)]
    >>> run = Run("r", "r", "made up", (Message("system", "be kind"), *talk))
    >>> found = next(edited_prompts([run], "dropped", lambda message: 10, 100))
    >>> [one.text for one in found.now]
    ['be kind', '5', '6', '7', '8', '9']
    """
    for turn in range(CALLS_OF_A_RUN):
        for number, run in enumerate(runs):
            others = [one for one in (*runs[number + 1 :], *runs[:number]) if one.half == run.half]
            others = [one for one in others if one.dataset == run.dataset and one.cluster != run.cluster]
            filled, own = fill(run, others, count_tokens, length)
            found = _cut(filled, how, count_tokens, length, turn, own, depth)
            if found is not None:
                dataset = f"{run.dataset}, joined" if own else run.dataset
                name = how if depth == 1 else f"{how} {depth} times"
                yield EditedPrompt(f"{name}/{run.name}/{length}/{turn}", run, dataset, *found)


def fill(run: Run, others: Sequence[Run], count: Callable[[Message], int], length: int) -> tuple[Run, int]:
    """The run, behind others of its data set where it is too short; where its own messages begin, 0 where they do."""
    lead, size = _count_lead(run.messages), sum(map(count, run.messages))
    front: list[Message] = []
    for other in others:
        if size >= 0.75 * length:
            break
        room = other.messages[_count_lead(other.messages) :]
        if size + (more := sum(map(count, room))) <= length:
            front += room
            size += more
    messages = (*run.messages[:lead], *front, *run.messages[lead:])
    return replace(run, messages=messages), lead + len(front) if front else 0


def _cut(
    run: Run, how: str, count: Callable[[Message], int], length: int, turn: int, own: int, depth: int
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]] | None:
    """Before, now, and now in other words, at a call that has room; None where the edit changes nothing there.

    It is one of the run's own calls: of two runs behind the same others, earlier ones would be one prompt.
    """
    sizes, total = [], 0
    for message in run.messages:
        total += count(message)
        sizes.append(total)
    calls = [call for call in run.calls if sizes[call - 1] <= length]
    at = len(calls) - 1 - 2 * turn
    if at < depth or calls[at - 1] <= own or sizes[calls[at] - 1] < length / 3:
        return None
    history = run.messages[: calls[at]]
    now, reworded = (tuple(EDITS[how](history, wording)) for wording in (0, 1))
    if now in (history, reworded):
        return None
    return run.messages[: calls[at - depth]], now, reworded


def find_call(text: str) -> str:
    """The first tool call of an answer, name and arguments or a command, in one spelling; empty where there is none.

    A call that the answer's end cuts off is compared as far as it goes.

    >>> find_call('Sure. <tool_call>{"name":"book", "arguments": {"b": 1, "a": 2}}</tool_call>')
    '{"arguments": {"a": 2, "b": 1}, "name": "book"}'
    >>> find_call("THOUGHT: look.\\n```bash\\nls  -a\\n```"), find_call("Hello")
    ('ls -a', '')
    """
    found = CALL.search(text)
    if found is None:
        return ""
    inner = next(group for group in found.groups() if group is not None)
    try:
        return json.dumps(json.loads(inner), sort_keys=True)
    except json.JSONDecodeError:
        return " ".join(inner.split())
