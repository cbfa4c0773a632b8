"""The classes of SGLang's pull request 31057: how close are answers with reuse to cold ones, and how much sooner.

    python bench/sglang_classes.py --data-dir DATA --model smollm2-135m --lengths 2000 4000
    python bench/sglang_classes.py --data-dir DATA --model FILE.gguf --device cuda --dtype bfloat16 --lengths 8000 16000
    .ci/engines/sglang-cpu python bench/sglang_classes.py --engine sglang --model FOLDER --data-dir DATA --lengths 2000

The pull request publishes an A/B at 8K and 16K and not its prompts, so they are built as it describes them, of
CNN/DailyMail and XSum articles (it took WikiHow, which is not at hand). A donor is an instruction, articles and a
question. A query is

    exact        the donor's prompt again
    partial_N    N % of the articles, in their order, among others; the first article is always another one
    paraphrase   the same articles, about one word in twelve replaced, added or left out
    diverse      other articles

asked cold, cold again (the noise floor), and with reuse in modes fast and balanced, each with a donor that nobody else
uses. Answers are greedy. Rows go to --rows as they come; a second run goes on from them. What the pull request says of
itself stands beside it, as published.
"""

from __future__ import annotations

import lib.reporting as reporting  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from lib import real_texts
from lib.embedded_server import EmbeddedArms, Reply
from lib.sglang_server import CPU_FLAGS, SglangServer
from lib.transforms import edited
from lib.vllm_runs import Budget, Rows, write_report

CLASSES = ("exact", "partial_60", "partial_80", "paraphrase", "diverse")
RECEIPT = ("reused_tokens", "exact_tokens", "outcome", "reason")
ARMS = ("rerun", "fast", "balanced")
ENGINES = {"embedded": "embedded engine", "sglang": "SGLang 0.5.23"}
DATASETS = {"CNN/DailyMail": "summ/cnndm", "XSum": "summ/xsum"}
INSTRUCTION = "<|im_start|>user\nRead the following articles with care.\n\n"
QUESTION = "\n\nSummarize the articles above in a few sentences.<|im_end|>\n<|im_start|>assistant\n"
PUBLISHED = {
    "exact": (None, 3264, 44, 0.941, 0.955),
    "partial_60": (0.88, 3254, 646, 0.547, 0.587),
    "partial_80": (0.58, 3257, 1700, 0.449, 0.490),
    "paraphrase": (0.76, 3262, 1034, 0.478, 0.525),
    "diverse": (0.00, 3262, 3318, 0.878, 0.898),
}
"""Of the pull request's text: share cached, ms cold, ms with reuse, ROUGE-L and token F1 against cold."""


class Serves(Protocol):
    """An engine over HTTP."""

    def ask(self, prompt: list[int], tokens: int, *, name: str, salt: str, quality: str = "") -> Reply:
        """An answer, computed cold where no quality is named: no reuse, and no donor is kept."""

    def stop(self) -> None: ...


class ServedSglang:
    """SGLang on a CPU with our cache."""

    def __init__(self, model: str, longest: int, folder: Path) -> None:
        flags = [*CPU_FLAGS, "--context-length", str(longest), "--max-total-tokens", str(4 * longest)]
        self.server = SglangServer(model, folder, flags, {})
        self.server.wait()

    def ask(self, prompt: list[int], tokens: int, *, name: str, salt: str, quality: str = "") -> Reply:
        asked = {"quality": quality} if quality else {"opt_out": True}
        answer = self.server.stream(prompt, tokens, name, salt, timeout=3600, **asked)
        return Reply(answer.text, answer.ttft_ms or 0.0, answer.cpu_ms or 0.0, receipt=self.server.find_receipt(name))

    def stop(self) -> None:
        self.server.kill()


def start_engine(args: argparse.Namespace) -> Serves:
    """The server that ``args`` name, with room for some prompts of the longest kind."""
    longest = max(args.lengths) + args.answer + 64
    folder = Path(tempfile.mkdtemp(prefix="classes-"))
    if args.engine == "sglang":
        return ServedSglang(args.model, longest, folder)
    flags = ["--donor-bytes", str(4 << 30)]
    flags += ["--device", args.device] if args.device else []
    flags += ["--dtype", args.dtype] if args.dtype else []
    if args.device == "cuda":  # donors beside the pool, and steps that fill the device: cold is as fast as it can be
        flags += ["--donor-device-bytes", str(8 << 30), "--step-tokens", "4096"]
    server = EmbeddedArms(args.model, folder, stock=False, pool_tokens=4 * longest, flags=flags)
    try:
        server.wait()
    except BaseException:
        server.kill()
        raise
    return server


def make_encoder(args: argparse.Namespace) -> Callable[[str], list[int]]:
    """Text to tokens of the model, control tokens included."""
    if args.engine == "sglang":  # its environment has no package of ours but the adapter's
        from tokenizers import Tokenizer

        known = Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))
        return lambda text: list(known.encode(text, add_special_tokens=False).ids)
    from semblend.engine.model.tokenizer import ModelTokenizer

    own = ModelTokenizer.load(args.model)
    return lambda text: own.encode(text, add_special=False)


def build(
    texts: list[str], encode: Callable[[str], list[int]], length: int, rng: random.Random
) -> tuple[list[int], dict[str, list[int]]]:
    """The donor's prompt, and the query of every class, cut at ``length`` tokens."""
    order = rng.sample(texts, len(texts))
    head, tail = encode(INSTRUCTION), encode(QUESTION)
    room = length - len(head) - len(tail)

    def fill(count: int = 0, held: int = 0) -> list[str]:
        """Articles that nobody has yet: as many, or as fill a prompt that holds so many tokens."""
        found: list[str] = []
        while len(found) < count if count else held < room:
            found.append(order.pop() + "\n\n")
            held += len(encode(found[-1]))
        return found

    def put(articles: list[str]) -> list[int]:
        within = [token for one in articles for token in encode(one)]
        more = [token for one in fill(held=len(within)) for token in encode(one)]
        return [*head, *(within + more)[:room], *tail]

    articles = fill()
    queries = {"exact": put(articles), "paraphrase": put([edited(one, 12, rng) + "\n\n" for one in articles])}
    for share in (60, 80):
        replaced = {0, *rng.sample(range(1, len(articles)), max(0, round(len(articles) * (1 - share / 100)) - 1))}
        others = fill(len(replaced))
        queries[f"partial_{share}"] = put([others.pop() if at in replaced else one for at, one in enumerate(articles)])
    queries["diverse"] = put(fill())
    return put(articles), queries


def run_class(
    engine: Serves, donor: list[int], query: list[int], name: str, tokens: int, *, floor: bool
) -> dict[str, Any]:
    """Cold, cold again, and both modes, each under a salt of its own."""
    found: dict[str, Any] = {"tokens": len(query)}
    for arm in ("cold", "rerun") if floor else ("cold",):
        found[arm] = to_row(engine.ask(query, tokens, name=f"{name}-{arm}", salt=f"{name} {arm}"))
    for mode in ("fast", "balanced"):  # a salt each: the exact head of one answer would be a prefix hit of the other
        salt = f"{name} {mode}"
        engine.ask(donor, 1, name=f"{name}-{mode}-donor", salt=salt, quality="exact")
        found[mode] = to_row(engine.ask(query, tokens, name=f"{name}-{mode}", salt=salt, quality=mode))
    return found


def to_row(reply: Reply) -> dict[str, Any]:
    """What is kept of an answer."""
    return {"text": reply.text, "ttft_ms": reply.ttft_ms, "cpu_ms": reply.cpu_ms,
            **{field: reply.receipt.get(field) for field in RECEIPT}}  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    """Append a row for every class of every cluster that is not there yet."""
    rows, budget, encode = Rows(args.rows), Budget(args.budget_s), make_encoder(args)
    documents = real_texts.articles(reporting.data_dir(args))
    texts = {name: [one.text for one in documents if one.source == source] for name, source in DATASETS.items()}
    same = {"engine": ENGINES[args.engine], "model": args.model_name or Path(args.model).stem,
            "device": args.device or "cpu", "dtype": args.dtype or "float32"}  # fmt: skip
    planned = [(number, length) for number in range(args.clusters) for length in args.lengths]
    if all(rows.find(**same, length=length, number=number, **{"class": kind})
           for number, length in planned for kind in args.classes):  # fmt: skip
        return
    engine = start_engine(args)
    try:
        engine.ask(list(range(100, 1100)), 2, name="warm", salt="warm", quality="fast")
        engine.ask(list(range(90, 1100)), 2, name="warm-up", salt="warm", quality="balanced")
        for number, length in planned:
            dataset = list(DATASETS)[number % len(DATASETS)]
            donor, queries = build(texts[dataset], encode, length, random.Random(f"{args.seed} {number} {length}"))
            for kind in args.classes:
                key = same | {"length": length, "number": number, "class": kind}
                if rows.find(**key) or budget.is_used_up:
                    continue
                name = f"{number}-{length}-{kind}"
                found = run_class(engine, donor, queries[kind], name, args.answer, floor=number < args.floor)
                rows.add(key | {"dataset": dataset, **found})
                reporting.progress(name)
    finally:
        engine.stop()


def rouge_l(one: str, other: str) -> float:
    """F of the longest common subsequence of words.

    >>> rouge_l("a b c d", "a c d e")
    0.75
    """
    a, b = one.lower().split(), other.lower().split()
    if not a or not b:
        return float(a == b)
    row = [0] * (len(b) + 1)
    for word in a:
        last = 0
        for at, known in enumerate(b, start=1):
            last, row[at] = row[at], last + 1 if word == known else max(row[at], row[at - 1])
    return 2 * row[-1] / (len(a) + len(b))


def word_overlap(one: str, other: str) -> float:
    """Token F1 as the pull request names it: words, without their order.

    >>> word_overlap("the red house", "the red roof")
    0.6666666666666666
    """
    a, b = one.lower().split(), other.lower().split()
    shared = sum(min(a.count(word), b.count(word)) for word in set(a))
    return 2 * shared / (len(a) + len(b)) if a and b else float(a == b)


COLUMNS = ["engine", "model", "device", "tokens", "class", "arm", "n", "reused", "exact", "cold TTFT ms", "TTFT ms",
           "cold/this, TTFT", "cold/this, CPU", "ROUGE-L", "token F1", "equal"]  # fmt: skip


def tabulate(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """A line for each engine, model, device, length, class and arm."""
    lines = []
    groups = ("engine", "model", "device", "length")
    for group in sorted({tuple(row[name] for name in groups) for row in rows}):
        for kind in CLASSES:
            some = [row for row in rows if (*(row[name] for name in groups), row["class"]) == (*group, kind)]
            for arm in ARMS:
                picked = [row for row in some if arm in row]
                if picked:
                    shown = "cold again" if arm == "rerun" else arm
                    lines.append([*group, kind, shown, *describe(picked, arm, on_cpu=group[2] == "cpu")])
    return lines


def describe(rows: list[dict[str, Any]], arm: str, *, on_cpu: bool) -> list[Any]:
    """n, shares reused and exact, medians of times and of their ratios, answers against cold ones."""
    total = sum(row["tokens"] for row in rows)
    pairs = [(row[arm]["text"], row["cold"]["text"]) for row in rows]

    def compare(field: str) -> float:
        return float(statistics.median(row["cold"][field] / max(row[arm][field], 1.0) for row in rows))

    return [
        len(rows), sum(row[arm]["reused_tokens"] or 0 for row in rows) / total,
        sum(row[arm]["exact_tokens"] or 0 for row in rows) / total,
        statistics.median(row["cold"]["ttft_ms"] for row in rows),
        statistics.median(row[arm]["ttft_ms"] for row in rows), compare("ttft_ms"),
        compare("cpu_ms") if on_cpu else None, statistics.fmean(rouge_l(*pair) for pair in pairs),
        statistics.fmean(word_overlap(*pair) for pair in pairs), sum(one == other for one, other in pairs),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reporting.add_common_arguments(parser, "sglang_classes")
    add = parser.add_argument
    add("--engine", choices=list(ENGINES), default="embedded")
    add("--model", default="smollm2-135m", help="a name, folder or GGUF file; a folder for SGLang")
    add("--model-name", default="", help="as it stands in the tables; of the file without it")
    add("--device", default="", choices=["", "cpu", "cuda"], help="of the embedded engine")
    add("--dtype", default="", help="of the embedded engine")
    add("--lengths", type=int, nargs="+", default=[4096, 8000])
    add("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    add("--clusters", type=int, default=2, help="donors of each length; every second one of the other dataset")
    add("--floor", type=int, default=1, help="ask cold twice in so many clusters")
    add("--answer", type=int, default=32, help="tokens of an answer")
    add("--rows", default="bench/results/sglang_classes.rows.jsonl")
    add("--budget-s", type=float, default=0.0, help="begin nothing after this long; 0: no limit")
    add("--finished-only", action="store_true", help="measure nothing, print the rows")
    add("--measured-on", default="")
    add("--note", action="append", default=[])
    args = parser.parse_args()
    if not args.finished_only:
        measure(args)
    report = reporting.Report("sglang_classes", args)
    report.table("Ours", COLUMNS, tabulate(Rows(args.rows).rows))
    report.table(
        "Pull request 31057, as published by its author (not measured here; another model, a GPU, other prompts)",
        ["class", "cached", "cold TTFT ms", "TTFT ms", "cold/this", "ROUGE-L", "token F1"],
        [
            [kind, cached, cold, warm, cold / warm, rouge, f1]
            for kind, (cached, cold, warm, rouge, f1) in PUBLISHED.items()
        ],
    )
    write_report(
        report, args, "ROUGE-L, token F1, equal: of the answer against the cold answer to the same prompt",
        f"answers of {args.answer} greedy tokens; TTFT: at the client; CPU: of the server until the first token",
        "reused, exact: shares of the prompt's tokens; cold/this: median over prompts, same prompt",
        "as published, the pull request's noise floor (cold twice, with batching) is 0.88 and 0.90",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
