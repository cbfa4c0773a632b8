"""Small logs of chats with a date, tools and marked passages, and their replay; for the tests of the estimate."""

from __future__ import annotations

from typing import Any

from semblend.arrange import VolatileField
from semblend.estimate.answer import LogFacts, build_answer, find_rates
from semblend.estimate.replay import Replay, ReplayOptions
from semblend.estimate.steps import ArrangePassages, DropRepeats, MoveFields, SortTools
from semblend.text.chat import list_chat_parts
from semblend.text.logs import LoggedPrompt
from semblend.text.parts import join_parts
from semblend.text.tokenization import StableTokenizer

DATE = VolatileField("date", "Date: ", "\n", 6, 2, ("1", "2"))
RULES = "Be brief and kind, and say where each fact comes from. " * 6
PASSAGES = [f"Port {name} has {number} ferries a day, " * 8 for number, name in enumerate("abcde", start=3)]
TOOLS = [{"name": name, "description": f"{name} " * 30} for name in ("search", "read", "write")]
ENCODE = StableTokenizer().encode


def make_prompt(line: int, body: dict[str, Any], tenant: str = "", answer: str = "") -> LoggedPrompt:
    parts = tuple(list_chat_parts(body["messages"], tools=body.get("tools")))
    return LoggedPrompt(line, text=join_parts(parts), parts=parts, tenant=tenant, answer=answer, is_chat=True)


def ask(date: int, order: list[int], tools: list[int], question: str) -> dict[str, Any]:
    documents = [{"type": "text", "text": PASSAGES[at], "semblend": {"commutes": "documents"}} for at in order]
    return {
        "tools": [TOOLS[at] for at in tools],
        "messages": [
            {"role": "system", "content": f"Date: {date}\n{RULES}"},
            {"role": "user", "content": [*documents, {"type": "text", "text": question}]},
        ],
    }


def replay(prompts: list[LoggedPrompt], **options: Any) -> tuple[Replay, dict[str, Any]]:
    given = {"cache_tokens": 320, "donor_tokens": 600, "factors": (2, 4), "pass_tokens": 32} | options
    steps = [MoveFields((DATE,)), SortTools(), DropRepeats(), ArrangePassages(given["cache_tokens"])]
    with Replay(steps, StableTokenizer(), ReplayOptions(**given)) as found:
        for prompt in prompts:
            found.add(prompt)
        return found, build_answer(found, find_rates(), (DATE,), LogFacts("log", "openai"), 1.0)
