"""Does arranging passages cost answers, and does reuse after it: multi-document questions with gold answers.

    python bench/arranged_answers.py --model qwen2.5-coder-1.5b.gguf --device cuda --dtype bfloat16 --questions 320
    python bench/arranged_answers.py --tables-only ROWS ROWS --out bench/results/arranged_answers.json

An earlier prompt had the question's passages in another order, with some others among them (--between). `Arranger`
lays the new prompt out in that order. Measured on the same questions: the task score of the arranged prompt less that
of the retrieval order, both computed cold (paired, 95 % interval by bootstrap over questions), and what reuse of the
earlier prompt does to the arranged one: divergence from cold of the same order, FLOPs, F1, answers changed, task score.
Beside them: cold again in chunks (rerun), and cold in a third order (order noise).

--best says what becomes of the passage that was retrieved first:

    free         it moves like the others
    first        it stays in front
    first-anew   the same, and it is computed there, not taken from the earlier prompt
    last         it stands behind the others, next to the question, and is computed there
    again        it moves like the others, and stands once more next to the question, computed there
    named        it moves like the others, and a sentence before the question says how it begins

Rows go to --rows as they come; a second run goes on from there.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import _report  # first: it sets the number of threads
from _arranged_tables import ARRANGED, show_arranged
from _dial_runs import RowFile, add_run_arguments, load_model, read_rows, run_cases
from _quality_cases import DONOR_SYSTEM, DONOR_TASK, MIN_SPAN, SYSTEM, TASK, Case
from _quality_lab import Lab, recipes
from _questions import Question, questions

from semblend.arrange import Arranger, Keep
from semblend.materialize.gate.thresholds import Thresholds
from semblend.span import Span

REUSES = ("fast", "attended-10")
BEST = ("free", "first", "first-anew", "last", "again", "named")
NAMED_WORDS = 8
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Arranged:
    """One question in retrieval order and arranged, with the earlier prompt behind both."""

    retrieval: Case
    arranged: Case

    @property
    def case_id(self) -> str:
        return self.retrieval.case_id

    @property
    def digest(self) -> str:
        return self.arranged.digest

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.arranged.tokens


def make_cases(
    asked: Iterator[Question],
    encode: Encode,
    *,
    most: int,
    passage_tokens: int,
    passages: int,
    between: int,
    best: str,
    seed: int,
) -> Iterator[Arranged]:
    """Questions of three passages or more; passages are cut to ``passage_tokens``."""
    filler: list[tuple[int, ...]] = []
    made = 0
    for question in asked:
        if made >= most:
            return
        texts = question.passages[:passages]
        pieces = [tuple(encode(text + "\n\n")[:passage_tokens]) for text in texts]
        if len(pieces) < 3 or min(map(len, pieces)) < MIN_SPAN or len(set(pieces)) < len(pieces):
            continue
        rng = random.Random(f"{seed}/{question.question_id}")
        others, filler = filler[:between], list(pieces)
        made += 1
        yield _arrange(question, texts, pieces, others, encode, rng, best)


def _arrange(
    question: Question, texts: tuple[str, ...], pieces: list[tuple[int, ...]], others: list[tuple[int, ...]],
    encode: Encode, rng: random.Random, best: str,
) -> Arranged:  # fmt: skip
    before = tuple(encode(f"<|im_start|>system\n{DONOR_SYSTEM}<|im_end|>\n<|im_start|>user\n{DONOR_TASK}"))
    head = tuple(encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{TASK}"))
    earlier = list(range(len(pieces)))
    while earlier == sorted(earlier):
        rng.shuffle(earlier)
    donor, starts = list(before), {}
    between = rng.sample(range(len(pieces)), min(len(pieces), len(others)))
    for place, number in enumerate(earlier):
        if place in between:
            donor += others[between.index(place)]
        starts[number] = len(donor)
        donor += pieces[number]
    anew = {"first-anew": 0, "last": len(pieces) - 1, "again": len(pieces)}.get(best)  # the place of what is computed

    def lay_out(name: str, order: Sequence[int], hint: str = "", anew: int | None = None) -> Case:
        tokens, spans = list(head), []
        for place, number in enumerate(order):
            span = Span("0", starts[number], len(tokens), len(pieces[number]))
            last = spans[-1] if spans else None
            if place == anew:
                pass
            elif last and last.donor_end == span.donor_start and last.target_end == span.target_start:
                spans[-1] = Span("0", last.donor_start, last.target_start, last.length + span.length)
            else:
                spans.append(span)
            tokens += pieces[number]
        tokens += encode(f"\n\n{hint}Question: {question.text}<|im_end|>\n<|im_start|>assistant\n")
        return Case(question.question_id, name, question.dataset, question.question_id, tuple(tokens),
                    (tuple(donor),), tuple(spans), question.golds)  # fmt: skip

    hint = f'The passage that begins with "{" ".join(texts[0].split()[:NAMED_WORDS])}" was ranked first.\n\n'
    return Arranged(
        lay_out("retrieval", range(len(pieces))),
        lay_out("arranged", _choose_order(texts, earlier, best), hint if best == "named" else "", anew),
    )


def _choose_order(texts: tuple[str, ...], earlier: list[int], best: str) -> list[int]:
    """The arranged order: that of the earlier prompt, as far as ``best`` lets passages move."""
    arranger = Arranger()
    arranger.record(arranger.arrange([texts[number] for number in earlier]))
    listed = [*range(1, len(texts)), 0] if best == "last" else list(range(len(texts)))
    keep = Keep(first=int(best in ("first", "first-anew")), last=int(best == "last"))
    order = [listed[i] for i in arranger.arrange([texts[i] for i in listed], keep=keep).order]
    return [*order, 0] if best == "again" else order


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_run_arguments(parser, "arranged_answers")
    parser.add_argument("--questions", type=int, default=320)
    parser.add_argument("--passage-tokens", type=int, default=300, help="of a passage, at most")
    parser.add_argument("--passages", type=int, default=10, help="of a question, at most")
    parser.add_argument("--between", type=int, default=3, help="others that the earlier prompt had among them, at most")
    parser.add_argument("--best", choices=BEST, default="free", help="the passage that was retrieved first")
    parser.add_argument("--arranged-only", action="store_true", help="leave the retrieval order to another run's rows")
    args = parser.parse_args()
    if args.quick:
        args.questions, args.passage_tokens = 3, 60
    return args


def main() -> None:
    args = arguments()
    report = _report.Report("arranged_answers", args)
    rows = read_rows(args.tables_only) if args.tables_only else run(args)
    show_arranged(report, rows)
    if args.measured_on:
        report.note(f"measured on {args.measured_on}")
    report.write(args.out)


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    began = time.perf_counter()
    model, tokenizer, name = load_model(args)
    rows = RowFile(args.rows)
    chosen = [recipe for recipe in recipes(Thresholds(1e9, 1e9, 1e9)) if recipe.name in REUSES]
    longest = args.passage_tokens * (args.passages + args.between + 1) + 400
    lab = Lab(model, tokenizer, chosen, longest, other_order=True)

    def work(pair: Arranged) -> list[dict[str, Any]]:
        """Of the retrieval order: cold and its yardsticks. Of the arranged: cold, and what reuse makes of it."""
        lab.recipes = ()
        cold = [] if args.arranged_only else lab.run(pair.retrieval)
        lab.recipes = chosen
        reused = [row for row in lab.run(pair.arranged) if row["recipe"] not in ("rerun", "other order")]
        return [{**row, "recipe": f"{row['scenario']} {row['recipe']}"} for row in (*cold, *reused)]

    made = make_cases(
        questions(_report.data_dir(args)), lambda text: tokenizer.encode(text, add_special=False),
        most=args.questions, passage_tokens=args.passage_tokens, passages=args.passages, between=args.between,
        best=args.best, seed=args.seed,
    )  # fmt: skip
    for _ in run_cases(made, rows, args, model=name, phase=f"{ARRANGED} {args.best}", work=work, began=began):
        pass
    return rows.rows


if __name__ == "__main__":
    main()
