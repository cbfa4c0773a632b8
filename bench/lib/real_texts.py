"""Reads the real texts: documents with questions, chats, and agent runs, in the order of the files.

Every reader names the file and line of a record that it cannot read, and stops: a benchmark over half of its
data is another benchmark.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lib.reporting as reporting

LONGBENCH = ("2wikimqa", "gov_report", "hotpotqa", "lcc", "multi_news", "multifieldqa_en", "musique", "qasper",
             "qmsum", "repobench-p")  # fmt: skip
LEVAL = ("coursera", "financial_qa", "gov_report_summ", "legal_contract_qa", "meeting_summ", "multidoc_qa",
         "natural_question", "news_summ", "paper_assistant", "quality", "review_summ")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Document:
    """A real text that people ask questions about. ``parts`` are its own paragraphs or passages, if it says so."""

    source: str
    doc_id: str
    text: str
    questions: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """Prompts that one conversation or one agent sent, in order; ``arrivals`` are seconds, where known."""

    source: str
    session_id: str
    prompts: tuple[str, ...]
    arrivals: tuple[float, ...] = ()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """One object a line from a gzip file; a bad line ends the run with its number."""
    if not path.is_file():
        reporting.fail(f"{path.name} is missing in {path.parent.name}/", hint="check --data-dir")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                reporting.fail(f"{path.name} line {number} is not JSON: {error.msg}", hint="check --data-dir")


def longbench(folder: Path) -> list[Document]:
    found = []
    for name in LONGBENCH:
        for row in read_jsonl(folder / "longbench" / f"{name}.jsonl.gz"):
            questions = (row["input"],) if row["input"] else ()
            parts = tuple(_passages(row["context"]))
            found.append(Document(f"longbench/{name}", row["_id"], row["context"], questions, parts))
    return found


def leval(folder: Path) -> list[Document]:
    return [
        Document(f"leval/{name}", row["_id"], row["context"], tuple(row["questions"]))
        for name in LEVAL
        for row in read_jsonl(folder / "leval" / f"{name}.jsonl.gz")
    ]


def qmsum(folder: Path) -> list[Document]:
    return [
        Document("qmsum", row["_id"], row["context"], tuple(row["questions"]))
        for row in read_jsonl(folder / "qmsum" / "qmsum_val.jsonl.gz")
    ]


def rag(folder: Path, name: str) -> list[Document]:
    """A question with its retrieved passages; the text is the passages as a RAG prompt shows them."""
    found = []
    for number, row in enumerate(read_jsonl(folder / "rag" / f"{name}.jsonl.gz")):
        if "docs" in row:
            parts = tuple(row["docs"])
        else:
            parts = tuple(f"{ctx['title']}\n{ctx['text']}".strip() for ctx in row["ctxs"])
        question = row.get("question") or row["query"]
        doc_id = row.get("_id", f"{name}-{number}")
        found.append(Document(f"rag/{name}", doc_id, "\n\n".join(parts), (question,), parts))
    return found


def articles(folder: Path) -> list[Document]:
    """News with no question: XSum and CNN/DailyMail."""
    found = []
    for number, row in enumerate(read_jsonl(folder / "summ" / "xsum.jsonl.gz")):
        text = row["prompt"].split("Article:", 1)[-1].rsplit("Summarize", 1)[0].strip()
        found.append(Document("summ/xsum", row.get("_id", f"xsum-{number}"), text))
    rows = read_jsonl(folder / "summ" / "cnndm_realsumm.jsonl.gz")
    return found + [Document("summ/cnndm", row["_id"], row["article"]) for row in rows]


def dialogues(folder: Path) -> list[Document]:
    rows = read_jsonl(folder / "dialogue" / "samsum.jsonl.gz")
    found = [Document("dialogue/samsum", f"samsum-{row['id']}", row["dialogue"]) for row in rows]
    rows = read_jsonl(folder / "dialogue" / "dialogsum_dev.jsonl.gz")
    return found + [Document("dialogue/dialogsum", row["fname"], row["dialogue"]) for row in rows]


def chats(folder: Path) -> list[Session]:
    """A chat as its server sees it: every user turn is a request that carries all turns before it."""
    found = []
    for row in read_jsonl(folder / "chat" / "sharegpt_multiturn.jsonl.gz"):
        shown, prompts = "", []
        for turn in row["conversations"]:
            shown += f"{turn['role']}: {turn['content']}\n\n"
            if turn["role"] == "user":
                prompts.append(shown + "assistant:")
        found.append(Session("chat/sharegpt", row["id"], tuple(prompts)))
    return found


def agents(folder: Path, name: str) -> list[Session]:
    """Runs of one agent; sessions in the order of their first call."""
    calls: dict[str, list[tuple[float, int, str]]] = {}
    for row in read_jsonl(folder / "agent_traces" / f"{name}.jsonl.gz"):
        calls.setdefault(row["session"], []).append((row["timestamp"] / 1e6, row["step"], row["input"]))
    found = []
    for session_id, steps in calls.items():
        steps.sort(key=lambda call: call[:2])
        found.append(Session(f"agent/{name}", session_id, tuple(c[2] for c in steps), tuple(c[0] for c in steps)))
    return found


def _passages(context: str) -> list[str]:
    """LongBench marks its passages ("Passage 3:"); without marks there are none."""
    pieces = context.split("Passage ")
    return [piece.partition(":")[2].strip() for piece in pieces[1:]] if len(pieces) > 2 else []
