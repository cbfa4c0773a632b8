"""`semblend estimate` on 100,000 logged prompts: CPU time, wall time, peak memory, and what each row saves.

The log is made from real text (``--data-dir``): retrieval prompts whose passages come from neighbourhoods of the 2Wiki
corpus, asked for by Zipf, in random order behind a line with the time; agents whose tools come in any order and who
read a text twice; conversations that grow. A real log (agent traces) is read beside it. The command runs as users
run it, in a process of its own.

    python bench/estimate.py --prompts 100000 --out bench/results/estimate.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import lib.reporting as reporting
from lib.real_texts import read_jsonl

NEIGHBOURS, PASSAGES = 14, 8
ZIPF = 1.1
TENANTS = 4
START = datetime(2026, 11, 16, tzinfo=UTC)
RULES = (
    "You answer questions for the customers of a library. Use only the documents that follow. If they do not hold the "
    "answer, say so. Cite the numbers of the documents that you used, in square brackets. Answer in one paragraph, in "
    "the language of the question, and do not repeat the question. Never give legal or medical advice. "
)


def make_log(folder: Path, target: Path, prompts: int, seed: int) -> None:
    """Write a log of ``prompts`` OpenAI requests; the same seed gives the same log."""
    pick = random.Random(seed)
    corpus = [f"{one['title']}\n{one['text']}" for one in read_jsonl(folder / "rag" / "2wiki_corpus.jsonl.gz")]
    chats = [one["conversations"] for one in read_jsonl(folder / "chat" / "sharegpt_multiturn.jsonl.gz")]
    running: list[Iterator[list[dict[str, str]]]] = []
    with target.open("w", encoding="utf-8") as stream:
        for number in range(prompts):
            kind = pick.random()
            if kind < 0.6:
                body = _ask_documents(corpus, pick, number)
            elif kind < 0.8:
                body = _ask_agent(corpus, pick)
            else:
                body = {"messages": _continue_chat(chats, running, pick)}
            body |= {"model": "m", "user": f"tenant-{pick.randrange(TENANTS) if kind < 0.6 else 0}"}
            stream.write(json.dumps({"custom_id": f"r{number}", "body": body}) + "\n")


def _choose_centre(corpus: list[str], pick: random.Random) -> int:
    return (int(pick.paretovariate(ZIPF - 0.1)) * 7919) % len(corpus)


def _ask_documents(corpus: list[str], pick: random.Random, number: int) -> dict[str, Any]:
    centre = _choose_centre(corpus, pick)
    near = [corpus[(centre + away) % len(corpus)] for away in range(NEIGHBOURS)]
    chosen = pick.sample(near, PASSAGES)
    now = START + timedelta(seconds=number)
    documents = "\n".join(f"Document {at + 1}: {text}" for at, text in enumerate(chosen))
    question = f"Question {pick.randrange(10**6)}: what do these say about {near[0].splitlines()[0]}?"
    return {
        "messages": [
            {"role": "system", "content": f"Current time: {now:%Y-%m-%d %H:%M:%S}\n{RULES * 2}"},
            {"role": "user", "content": f"{documents}\n\n{question}"},
        ]
    }


def _ask_agent(corpus: list[str], pick: random.Random) -> dict[str, Any]:
    names = ["search", "read_file", "write_file", "run", "list_folder", "ask_user", "send_mail", "open_ticket"]
    tools = [
        {"type": "function", "function": {"name": name, "description": f"{name}: {corpus[at][:300]}"}}
        for at, name in enumerate(names)
    ]
    pick.shuffle(tools)
    centre = _choose_centre(corpus, pick)
    text = "\n".join(corpus[(centre + away) % len(corpus)] for away in range(4))
    turns = [{"role": "system", "content": RULES}, {"role": "user", "content": f"Look into {text[:40]!r}."}]
    for call in range(pick.randrange(1, 4)):
        turns += [{"role": "assistant", "content": f"I read it ({call})."}, {"role": "tool", "content": text}]
    return {"messages": turns, "tools": tools}


def _continue_chat(chats: list[Any], running: list[Iterator[Any]], pick: random.Random) -> list[dict[str, str]]:
    """The next turn of one of fifty conversations."""
    while True:
        while len(running) < 50:
            running.append(_list_turns(pick.choice(chats)))
        chosen = pick.randrange(50)
        turn = next(running[chosen], None)
        if turn is not None:
            return list(turn)
        running.pop(chosen)


def _list_turns(chat: list[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    for end, turn in enumerate(chat, start=1):
        if turn["role"] == "user":
            yield chat[:end]


def measure(log: Path, flags: list[str]) -> dict[str, Any]:
    """Run the command once; its answer, seconds of CPU and wall, and the largest resident memory in MiB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "semblend.cli.main",
        "estimate",
        str(log),
        "--json",
        "-",
        "--quiet",
        "--redact",
        "--skip-bad",
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"answer": json.loads(done.stdout), "wall_s": wall, "cpu_s": cpu, "peak_mib": after.ru_maxrss / 1024}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reporting.add_common_arguments(parser, "estimate")
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--flags", default="", help="more flags for the command, in one string")
    args = parser.parse_args()
    data = reporting.data_dir(args)
    report = reporting.Report("estimate", args)
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.jsonl"
        make_log(data, made, 2_000 if args.quick else args.prompts, args.seed)
        # The small one first: the peak of all children is the largest one so far.
        for name, log in (("agent traces", data / "agent_traces" / "magagent.jsonl.gz"), ("made", made)):
            found = measure(log, ["--tokenizer", args.tokenizer, *args.flags.split()])
            answer = found.pop("answer")
            total, megabytes = answer["total"], log.stat().st_size / 1e6
            costs.append([name, total["prompts"], total["prompt_tokens"], megabytes, *found.values()])
            columns = ["step", "tokens saved", "of all", "seconds", answer["rates"]["currency"]]
            steps = [
                [row["title"], row["saved_tokens"], row["saved_share"], row["saved_s"], row["saved_price"]]
                for row in answer["rows"]
            ]
            report.table(f"Log: {name}", columns, steps)
            report.add(name, answer)
    report.table("Cost", ["log", "prompts", "tokens", "MB", "wall s", "CPU s", "peak MiB"], costs)
    report.note("one process, one thread; peak is the largest resident set of the process")
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
