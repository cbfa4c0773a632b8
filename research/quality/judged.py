"""A judged run with the judge named: every arm of a run of sembench against the gold answers, and the judge itself.

    PYTHONPATH=src:bench python bench/sembench_embedded.py --keep result.json
    PYTHONPATH=src:bench python bench/judged.py --result result.json --judge FILE.gguf
    semblend serve --model FILE.gguf --quality exact     # or any OpenAI server that gives log-probabilities
    PYTHONPATH=src:bench python bench/judged.py --result result.json --yes-url URL --judge NAME --rows ROWS

llama.cpp serves the judge (``python bench/llamacpp_reuse.py --setup`` installs it). It gets question, gold answer and
answer in the prompt of `sembench run-live-gateway --judge-url` and gives 0 to 10 points; it sees no names of arms. With
--yes-url no grade is generated: the judge is asked whether the answer says the same as the gold answer, and its
probability of *Yes* beside *No* is the score. Controls say what a score is worth: the gold answer itself deserves all
points, the gold answer of another case none, both alone and inside a sentence, and the gold answer asked again shows
whether the judge agrees with itself. A judge whose controls lie close together can't tell arms apart either.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from _report import REPO, Report, fail, progress  # first: it holds the numeric libraries to one thread

# isort: split
import httpx
import numpy as np
from _vllm_runs import Rows

from sembench.backends import CHAT, PromptCall, build_chat_answer, build_chat_body, post_stream
from sembench.live.session import MATERIAL, judge_answers
from sembench.manifests.cases import read_manifest
from sembench.result import RequestRecord, read_result

LLAMACPP = REPO / ".peers" / "llamacpp" / "bin" / "python"
ADAPTER = REPO / "bench" / "peer_adapters" / "llamacpp_judge.py"
ARMS = ("cold", "warm", "rerun")
GOLD, OTHER, AGAIN = "gold answer", "another case's gold answer", "gold answer, asked again"
GOLD_SAID, OTHER_SAID = "gold answer in a sentence", "another case's gold answer in a sentence"
CONTROLS = (GOLD, OTHER, AGAIN, GOLD_SAID, OTHER_SAID)
DIFFERENCES = (("warm", "cold"), ("rerun", "cold"), (AGAIN, GOLD), (GOLD, OTHER), (GOLD_SAID, OTHER_SAID))
SENTENCE = "The material says that it is {}."
YES, NO = "yes", "no"
LEAST_SAID = 0.5
"""Where *Yes* and *No* together are less probable than this, the judge would have said something else."""
TOP_LOGPROBS = 20
YES_PROMPT = MATERIAL + "Does the answer say the same as the reference? Reply with one word, Yes or No."
RESAMPLES = 2000

Questions = dict[str, tuple[str, Sequence[str]]]


@contextlib.contextmanager
def judging(model: str) -> Iterator[str]:
    """Serve the judge and give its address."""
    if not LLAMACPP.exists():
        fail("llama.cpp is not installed", hint="python bench/llamacpp_reuse.py --setup")
    judge = subprocess.Popen(
        [str(LLAMACPP), str(ADAPTER), model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert judge.stdin is not None
    assert judge.stdout is not None
    try:
        url = judge.stdout.readline().strip()
        if not url:
            fail("the judge did not start", hint=f"run {ADAPTER.name} {model} by hand")
        yield url
    finally:
        judge.stdin.close()  # it ends when nobody is there
        judge.wait(60)


def read_questions() -> Questions:
    """Return question and gold answers of each case of the fixture, which is the same bytes everywhere."""
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "fixture.jsonl"
        command = [sys.executable, "-m", "sembench", "build", "--profile", "fixture", "--output", str(manifest)]
        subprocess.run([*command, "--quiet"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return {case.item_id: (case.input, case.answers) for case in read_manifest(manifest)}


def choose_records(records: Sequence[RequestRecord], questions: Questions, count: int) -> list[RequestRecord]:
    """Return the answers of all arms of ``count`` cases that have a gold answer and donors, and their controls."""
    asked = [one for one in records if not one.negative_control and not one.cross_tenant and one.error is None]
    cases = [item for item in dict.fromkeys(one.item_id for one in asked) if questions.get(item, ("", ()))[1]][:count]
    chosen = []
    for at, item in enumerate(cases):
        own = {one.arm: one for one in asked if one.item_id == item}
        if not set(ARMS) <= own.keys():
            continue
        other = questions[next((c for c in cases[at + 1 :] + cases if not _same(c, item, questions)), item)]
        right, wrong = questions[item][1][0], other[1][0]
        gold = {GOLD: right, OTHER: wrong, AGAIN: right}
        gold |= {GOLD_SAID: SENTENCE.format(right), OTHER_SAID: SENTENCE.format(wrong)}
        chosen += [own[arm] for arm in ARMS]
        chosen += [replace(own["cold"], arm=name, output_text=gold[name]) for name in CONTROLS]
    return chosen


def _same(one: str, other: str, questions: Questions) -> bool:
    return questions[one][1][0] == questions[other][1][0]


def read_yes(top: Mapping[str, float]) -> float | None:
    """Return the probability of *Yes* beside *No* from the log-probabilities of a reply's first token, or None.

    >>> read_yes({"Yes": -0.1054, " no": -2.303, "Maybe": -9.0})
    0.9
    """
    said = {word: sum(math.exp(p) for t, p in top.items() if t.strip().lower() == word) for word in (YES, NO)}
    both = said[YES] + said[NO]
    return round(said[YES] / both, 3) if both >= LEAST_SAID else None


async def ask_yes(
    client: httpx.AsyncClient, url: str, model: str, record: RequestRecord, questions: Questions
) -> float | None:
    """Ask whether the answer says the same as the gold answer; None where the judge says neither word."""
    question, golds = questions[record.item_id]
    text = YES_PROMPT.format(question=question, reference=golds[0], answer=record.output_text or "")
    call = PromptCall(text=text, max_tokens=1, request_id=f"{record.item_id}-{record.arm}", top_logprobs=TOP_LOGPROBS)
    answer = build_chat_answer(await post_stream(client, url + CHAT, build_chat_body(call, model), {}), call)
    if answer.error:
        fail(f"the judge failed: {answer.error}", hint=f"check that {url} serves {model}")
    if not answer.top_logprobs:
        fail("the judge gives no log-probabilities", hint="semblend serve, vLLM and llama.cpp give them")
    return read_yes(answer.top_logprobs[0])


async def judge_all(
    url: str, model: str, records: Sequence[RequestRecord], questions: Questions, rows: Rows, *, by_yes: bool
) -> None:
    """Ask the judge about every answer that it has not been asked about yet; rows are on disk as they come."""
    async with httpx.AsyncClient(timeout=600) as client:
        for number, record in enumerate(records, start=1):
            known = rows.find(judge=model, case=record.item_id, arm=record.arm)
            if any(row["points"] is not None for row in known):
                continue
            if by_yes:
                points = await ask_yes(client, url, model, record, questions)
            else:
                points = (await judge_answers(client, url, model, [record], questions))[0].judge_score
            rows.add({"judge": model, "by": YES if by_yes else "points", "case": record.item_id,
                      "transform": record.transform, "arm": record.arm, "gold": questions[record.item_id][1][0],
                      "answer": record.output_text,
                      "points": points})  # fmt: skip
            progress(f"{number} of {len(records)}: {record.arm} {points}")


def tabulate(report: Report, rows: Sequence[dict[str, Any]], judge: str, seed: int) -> None:
    """Mean points of each arm with an interval by a bootstrap over cases; then differences, in pairs."""
    points: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["points"] is not None:
            points.setdefault(row["arm"], {})[row["case"]] = row["points"]
    lines: list[list[Any]] = []
    for arm in (*ARMS, *CONTROLS):
        own = points.get(arm)
        if not own:
            continue  # a control that this run did not have
        lines.append([arm, len(own), *summarize(list(own.values()), seed), None])
    for arm, base in DIFFERENCES:
        both = sorted(points.get(arm, {}).keys() & points.get(base, {}).keys())
        if not both:
            continue
        values = [points[arm][case] - points[base][case] for case in both]
        lines.append(
            [f"{arm}, minus {base}", len(values), *summarize(values, seed), sum(value != 0 for value in values)]
        )
    columns = ["answers", "cases", "mean", "95 % from", "to", "cases that differ"]
    what = "Probability of Yes beside No" if any(row.get("by") == YES for row in rows) else "Share of ten points"
    report.table(f"{what} by the judge {judge}", columns, lines)


def summarize(values: Sequence[float], seed: int) -> list[float | None]:
    """Return the mean and the 95 % interval of a bootstrap."""
    if not values:
        return [None, None, None]
    drawn = np.asarray(values)[np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))].mean(1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return [float(np.mean(values)), float(low), float(high)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", default="", metavar="FILE", help="a paired result of sembench on the fixture")
    parser.add_argument("--judge", default="", metavar="FILE", help="a GGUF file; with --yes-url its name there")
    parser.add_argument("--yes-url", default="", metavar="URL", help="an OpenAI server: its probability of Yes counts")
    parser.add_argument("--cases", type=int, default=12, metavar="N", help="cases at most (default: 12)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the bootstrap")
    parser.add_argument("--rows", default="bench/results/judged.rows.jsonl", help="a second run goes on from it")
    parser.add_argument("--tables-only", action="store_true", help="ask nobody, read the rows")
    parser.add_argument("--out", default="bench/results/judged.json", help="JSON result file; '' writes none")
    args = parser.parse_args()
    report, rows = Report("judged", args), Rows(args.rows)
    if not args.tables_only:
        if not args.result or not args.judge:
            fail("no result or no judge given", hint="--result of bench/sembench_embedded.py --keep, --judge FILE.gguf")
        questions = read_questions()
        chosen = choose_records(read_result(args.result).requests, questions, args.cases)
        if not chosen:
            fail("the result has no case of the fixture with all arms", hint="bench/sembench_embedded.py --keep FILE")
        if args.yes_url:
            asyncio.run(judge_all(args.yes_url, args.judge, chosen, questions, rows, by_yes=True))
        else:
            with judging(args.judge) as url:
                asyncio.run(judge_all(url, Path(args.judge).stem, chosen, questions, rows, by_yes=False))
    for judge in dict.fromkeys(row["judge"] for row in rows.rows):
        tabulate(report, rows.find(judge=judge), judge, args.seed)
    report.note("answers of SmolLM2-135M in the paired run of bench/sembench_embedded.py, eight tokens at most")
    report.note("replies without a number, or without Yes and No, are left out; intervals: bootstrap over cases")
    report.write(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
