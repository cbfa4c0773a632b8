"""What a donor that was computed ahead must look like: one document group, many kinds of donor, the same question.

    python bench/warm_donors.py --out bench/results/warm_donors.json

For each question its passages stand in a prompt under an instruction. The same passages, in the same order, were
computed before in one of several donors. They differ in one thing at a time: what stands in front of the passages, and
whether other documents stand between that and them. Spans come from `SemBlend.lookup`, KV from the blender; the answer
is compared with the cold one: greedy tokens, and mean KL(cold, ours) per token along the cold answer.
"""

from __future__ import annotations

import _report  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _documents import rag
from _quality_cases import Case
from _quality_lab import Lab, Prepared, Recipe
from _report import Report, add_common_arguments, data_dir, progress
from _streams import Ranking, find_words
from _vllm_runs import Rows

from semblend import Prompt, ReusePlan, SemBlend, SemBlendConfig
from semblend.engine.core.threads import prepare_cpu
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.chosen_table import choose_table
from semblend.models import resolve

ASKED = (
    "Answer the question with the passages below.\n\n",
    "You are a careful assistant of a library. Use only the documents that follow, and say so if they do not hold the "
    "answer. Keep to one sentence, in the language of the question.\n\n",
    "Context:\n\n",
    "### Sources for the helpdesk, as found by the search engine on Monday\n\n",
)
"""What stands in front of the passages in questions; question by question in turn."""
ARCHIVE = "Here is what the archive holds. Read all of it, then write one sentence about it.\n\n"
COLLEAGUE = (
    "You work for a large archive. Read everything that is handed to you before you say a word, quote the passage that "
    "supports each statement, keep a neutral tone, and do not guess. A reader left the material below. Go through it "
    "with care; a colleague will ask for a summary later.\n\n"
)
LABEL = "Documents:\n\n"
NEUTRAL = "Here are some documents.\n\n"
READ = "Read the documents below. You will be asked about them.\n\n"
ANSWER = "Use the documents below to answer the question that follows them.\n\n"
JOIN = "\n\n"


@dataclass(frozen=True, slots=True)
class Group:
    """A question and its passages; ``other`` are the passages of another question."""

    number: int
    question: str
    passages: tuple[str, ...]
    other: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Texts:
    """How prompts are written: as plain text (completions), or by the model's chat template."""

    tokenizer: ModelTokenizer
    is_chat: bool

    def ask(self, group: Group) -> list[int]:
        before = ASKED[group.number % len(ASKED)]
        return self.write(before + JOIN.join(group.passages) + f"\n\nQuestion: {group.question}\nAnswer:")

    def write(self, text: str) -> list[int]:
        """As users send it."""
        return self.in_chat(text) if self.is_chat else self.plain(text)

    def plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, control=False)

    def in_chat(self, text: str) -> list[int]:
        return self.tokenizer.encode_chat([{"role": "user", "content": text}])


def _join(group: Group) -> str:
    return JOIN.join(group.passages)


def _join_second(group: Group) -> str:
    return JOIN.join([*group.other, *group.passages])


def _join_between(group: Group) -> str:
    return JOIN.join(text for pair in zip(group.other, group.passages, strict=True) for text in pair)


DONORS: dict[str, Callable[[Group, Texts], list[list[int]]]] = {
    "traffic": lambda g, t: [t.write(ARCHIVE + _join(g) + "\n\nSentence:")],
    "traffic, long instruction": lambda g, t: [t.write(COLLEAGUE + _join(g) + "\n\nSentence:")],
    "nothing": lambda g, t: [t.plain(_join(g))],
    "nothing, behind another group": lambda g, t: [t.plain(_join_second(g))],
    "first token": lambda g, t: [[t.tokenizer.token_id("<|im_start|>") or 0, *t.plain(JOIN + _join(g))]],
    "Documents:": lambda g, t: [t.plain(LABEL + _join(g))],
    "Here are": lambda g, t: [t.plain(NEUTRAL + _join(g))],
    "Read": lambda g, t: [t.plain(READ + _join(g))],
    "Use to answer": lambda g, t: [t.plain(ANSWER + _join(g))],
    "chat head": lambda g, t: [t.in_chat(JOIN + _join(g))],
    "chat head, Read": lambda g, t: [t.in_chat(READ + _join(g))],
    "Read, behind another group": lambda g, t: [t.plain(READ + _join_second(g))],
    "Read, strangers between": lambda g, t: [t.plain(READ + _join_between(g))],
    "Read, each passage alone": lambda g, t: [t.plain(READ + passage) for passage in g.passages],
}


def main() -> int:
    args = parse_arguments()
    rows = Rows(args.rows)
    if not args.finished_only:
        measure_all(args, rows)
    report = Report("warm_donors", args)
    tabulate(report, rows, args)
    report.write(args.out)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser, "warm_donors")
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--rows", default="", help="a second run goes on from them (default: beside --out)")
    add("--finished-only", action="store_true", help="measure nothing, print the rows")
    add("--measured-on", default="", help="the machine, in words")
    add("--source", default="hotpotqa_distractor", help="a file of rag/: questions with passages")
    add("--questions", type=int, default=24)
    add("--top", type=int, default=3, help="passages of a question")
    add("--chat", action="store_true", help="questions are written by the model's chat template")
    add("--kinds", nargs="+", choices=DONORS, default=list(DONORS))
    add("--answer-tokens", type=int, default=16)
    args = parser.parse_args()
    args.questions = 2 if args.quick else args.questions
    args.rows = args.rows or str(Path(args.out or "warm_donors.json").with_suffix(".rows.jsonl"))
    return args


def choose_groups(args: argparse.Namespace) -> list[Group]:
    """Questions with the passages that BM25 finds; no passage belongs to two of them."""
    items = rag(data_dir(args), args.source)
    corpus = tuple(dict.fromkeys(part for item in items for part in item.parts))
    ranking, used = Ranking(corpus), set[int]()
    found: list[tuple[str, tuple[str, ...]]] = []
    for question in dict.fromkeys(item.questions[0] for item in items):
        best = ranking.find_best(find_words(question), args.top)
        if len(found) <= args.questions and not used & set(best):
            used |= set(best)
            found.append((question, tuple(corpus[number] for number in best)))
    return [
        Group(number, *one, other=found[(number + 1) % len(found)][1])
        for number, one in enumerate(found[: args.questions])
    ]


def measure_all(args: argparse.Namespace, rows: Rows) -> None:
    prepare_cpu(1)
    path = resolve(args.model)
    model = DecoderModel.load(path, "cuda" if torch.cuda.is_available() else "cpu", None)
    tokenizer = ModelTokenizer.load(path)
    texts = Texts(tokenizer, args.chat)
    recipes = (
        Recipe("fast", QualitySettings(mode="fast")),
        Recipe("balanced", QualitySettings(thresholds=choose_table(args.model).thresholds)),
    )
    groups = choose_groups(args)
    longest = max(len(texts.in_chat(_join_second(group) + COLLEAGUE)) for group in groups)
    lab = DonorLab(model, tokenizer, recipes * len(args.kinds), longest)
    for group in groups:
        if rows.find(number=group.number, chat=args.chat, source=args.source):
            continue
        for row in lab.compare(group, texts, args):
            rows.add({"number": group.number, "chat": args.chat, "source": args.source, **row})
        progress(f"question {group.number + 1} of {len(groups)}")


class DonorLab(Lab):
    """A question beside all kinds of donors of its passages."""

    def compare(self, group: Group, texts: Texts, args: argparse.Namespace) -> list[dict[str, Any]]:
        blocks: list[int] = []
        try:
            return self._compare(group, texts, args, blocks)
        finally:
            self.pool.free(blocks)

    def _compare(self, group: Group, texts: Texts, args: argparse.Namespace, blocks: list[int]) -> list[dict[str, Any]]:
        tokens = tuple(texts.ask(group))
        case = Case(
            str(group.number), "one_document", args.source, "", tokens, (), (), answer_tokens=args.answer_tokens
        )
        cold = Prepared("cold", self._room(case, blocks), torch.empty(0), 1.0)
        cold.logits = self._prefill(tokens, cold.slots)
        made, kinds, shares = [cold], [("cold", "")], [0.0]
        for kind in args.kinds:
            donors = DONORS[kind](group, texts)
            plan = find_plan(tokens, donors)
            if plan is None:
                progress(f"{kind}: no plan for question {group.number}")
                continue
            kv = self._captured(donors)
            for recipe in self.recipes[:2]:
                (done,) = self._prepare(recipe, replace(case, spans=plan.spans), plan, kv, cold, blocks)
                made.append(done)
                kinds.append((kind, recipe.name))
                shares.append(sum(span.length for span in plan.spans) / len(tokens))
            kv.close()
        answers = self._answers(made, case)
        forced = self._forced(made, case, answers[0] or [next(iter(self.stop))])
        nll = torch.zeros(len(made))
        rows = [self._record(case, one, answers, at, forced, nll) for at, one in enumerate(made)]
        wanted = ("flops", "kl", "kl_first", "top1", "f1", "changed", "decision", "risk", "answer", "tokens")
        return [
            {"kind": kind, "mode": mode, "found": share, **{name: row[name] for name in wanted}}
            for (kind, mode), share, row in zip(kinds, shares, rows, strict=True)
        ]


def find_plan(tokens: Sequence[int], donors: Sequence[Sequence[int]]) -> ReusePlan | None:
    """What the library finds of a prompt in these donors; they are named "0", "1", …, generation 0."""
    with SemBlend(SemBlendConfig(embedder="none", metrics=False)) as library:
        for number, donor in enumerate(donors):
            library.register(Prompt(list(donor)), donor_id=str(number))
        plan = library.lookup(Prompt(list(tokens)))
    if not isinstance(plan, ReusePlan):
        return None
    return ReusePlan(tuple(replace(span, generation=0) for span in plan.spans), len(tokens))


def tabulate(report: Report, rows: Rows, args: argparse.Namespace) -> None:
    """One table for each form of prompts and mode that there are rows of."""
    for form, mode in itertools.product((True, False), ("fast", "balanced")):
        found = {kind: rows.find(kind=kind, mode=mode, chat=form, source=args.source) for kind in DONORS}
        lines = [[kind, len(some), *summarize(some)] for kind, some in found.items() if some]
        if lines:
            columns = ["donor", "n", "found", "FLOPs", "KL mean", "KL p50", "KL p90", "changed", "F1 against cold",
                       "prefilled"]  # fmt: skip
            report.table(f"Mode {mode}, prompts as {'messages' if form else 'text'}", columns, lines)
    report.note(f"{args.top} passages of {args.source}; four instructions in front of them in turn, one a question")
    report.note(f"an answer is {args.answer_tokens} greedy tokens; KL: nats a token, teacher-forced on the cold answer")
    report.note("rows with fewer n are of the first questions alone")


def summarize(some: Sequence[dict[str, Any]]) -> list[Any]:
    kls = sorted(row["kl"] for row in some)
    found, flops, f1 = (statistics.fmean(row[name] for row in some) for name in ("found", "flops", "f1"))
    middle = [statistics.fmean(kls), statistics.median(kls), _report.percentile(kls, 90)]
    refused = sum(row["decision"] in (None, "prefill") for row in some)
    return [found, flops, *middle, sum(row["changed"] for row in some), f1, refused]


if __name__ == "__main__":
    sys.exit(main())
