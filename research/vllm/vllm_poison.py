"""Claim: whatever goes wrong with a donor, vLLM answers as it does without us, and no token is computed on its KV.

    python bench/vllm_poison.py --measured-on "one H200, vLLM 0.26.0"   # the shape of Qwen2.5-7B, or --model FOLDER
    python bench/vllm_poison.py --quick                                 # two cores: shows that it works

Faults: see `_vllm_faults.py`; modes fast and balanced. Each trial has a document of its own: a cold answer (opted out)
of 24 greedy tokens, and again from vLLM's own prefix cache, whose sums are rounded in another order; its donor under
another instruction; the fault; the answer with reuse; the cold answer again, with whatever vLLM's prefix cache holds by
then, which must be one of the first two. Quiet: nothing else runs, and all of them must be equal. Busy: others decode
all the while, which changes the rounding of a GPU's sums, so a second cold answer says how many tokens agree then;
``VLLM_BATCH_INVARIANT=1`` takes that away where vLLM has it. `_vllm_verdicts.py` watches the scheduler: no token of a
request may be scheduled before the verdict on its load is known.
"""

from __future__ import annotations

import _report  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from _vllm_runs import Budget, Rows, add_engine_arguments, make_task, read_arguments, run_engines, write_report

MODES, LOADS = ("fast", "balanced"), ("quiet", "busy")
FAULTS = ("none", "unnoticed", "noise", "truncated", "evicted", "exception", "out of memory")
HEAD, OTHER_HEAD, QUESTION = 64, 40, 32


class Poison:
    """An engine with our connector, one trial at a time."""

    def __init__(self, args: argparse.Namespace) -> None:
        from _vllm_engine import Engine
        from _vllm_faults import Faults
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.args = args
        task = make_task(args, args.document + 200, max_requests=args.decoders + 8)
        self.engine = Engine("host" if args.donors == "host" else "device", task)
        self.core = self.engine.llm.llm_engine
        self.scheduler = self.core.engine_core.engine_core.scheduler
        self.faults = Faults(self.scheduler.connector, get_kv_transfer_group())
        self._count = 0

    def ask(self, ids: list[int], tokens: int, **asked: Any) -> tuple[list[int], dict[str, Any]]:
        """The answer's tokens and its receipt, while whatever else runs goes on."""
        self._count += 1
        name = f"asked-{self._count}"
        self.core.add_request(name, {"prompt_token_ids": ids}, self.engine.params(tokens, **asked))
        while True:
            for output in self.core.step():
                if output.request_id == name and output.finished:
                    receipt = (output.kv_transfer_params or {}).get("semblend") or {}
                    return list(output.outputs[0].token_ids), receipt

    def forget(self) -> None:
        """Take every block out of vLLM's prefix cache; other requests may hold theirs."""
        pool = self.scheduler.kv_cache_manager.block_pool
        pool.evict_blocks(set(range(len(pool.blocks))))

    @contextmanager
    def load(self, name: str) -> Iterator[None]:
        """Requests that decode as long as this lasts, if it is a busy one."""
        self._count += 1
        names = [f"decode-{self._count}-{n}" for n in range(self.args.decoders if name == "busy" else 0)]
        for one in names:
            ids = self.engine.tokens(self.args.decode_prompt)
            self.core.add_request(one, {"prompt_token_ids": ids}, self.engine.params(self.args.longest, opt_out=True))
        for _ in range(len(names) + 8 if names else 0):
            self.core.step()
        try:
            yield
        finally:
            self.core.abort_request(names)
            for _ in range(4):
                self.core.step()

    def run(self, load: str, fault: str, mode: str) -> dict[str, Any]:
        """One trial: how many of the first tokens agree with the first cold answer, and what was seen."""
        from _vllm_verdicts import VerdictWatch

        document, count = self.engine.tokens(self.args.document), self.args.tokens
        target = self.engine.tokens(OTHER_HEAD) + document + self.engine.tokens(QUESTION)
        donor = self.engine.tokens(HEAD) + document + self.engine.tokens(QUESTION)
        answers = {}
        with self.load(load):
            for name in ("cold", "cold again"):
                answers[name], _ = self.ask(target, count, opt_out=True)
                if name == "cold again":
                    hit, _ = self.ask(target, count, opt_out=True)
                self.forget()
            watch = VerdictWatch(self.scheduler)
            with self.faults.spoil(fault, lambda: self.ask(donor, 2)):
                answers["reused"], receipt = self.ask(target, count, quality=mode)
            watch.close()
            answers["cold later"], _ = self.ask(target, count, opt_out=True)
            self.forget()
        cold = answers.pop("cold")
        if answers["cold later"] == hit:
            answers["cold later"] = cold
        return {
            "load": load, "fault": fault, "mode": mode, "tokens": count,
            **{f"equal {name}": _count_equal(cold, answer) for name, answer in answers.items()},
            "equal cold hit": _count_equal(cold, hit),
            "loads": sum(watch.loads.values()), "too early": len(watch.too_early),
            **{name: receipt.get(name) for name in ("outcome", "reason", "reused_tokens")},
        }  # fmt: skip


def _count_equal(one: list[int], other: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def measure(args: argparse.Namespace) -> None:
    """Append a row for each trial that is not there yet."""
    rows, budget, poison = Rows(args.rows), Budget(args.budget_s), Poison(args)
    poison.run("quiet", "none", "fast")  # warm
    trials = [
        (trial, load, fault, mode) for trial in range(args.trials) for load in args.loads for mode in MODES
        for fault in args.faults
    ]  # fmt: skip
    for trial, load, fault, mode in trials:
        key = {"donors": args.donors, "trial": trial, "load": load, "fault": fault, "mode": mode}
        if rows.find(**key):
            continue
        if budget.is_used_up:
            break
        rows.add(key | poison.run(load, fault, mode))
        _report.progress(" ".join(map(str, key.values())))


def tabulate(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """One line for each load, mode and fault."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["load"], row["mode"], row["fault"]].append(row)
    order = {key: (LOADS.index(key[0]), MODES.index(key[1]), FAULTS.index(key[2])) for key in groups}
    return [
        [*key, len(found), *(sum(row[f"equal {name}"] == row["tokens"] for row in found) for name in
                             ("cold again", "reused", "cold later")),
         min(row["equal reused"] for row in found), sum(row["loads"] for row in found),
         sum(row["too early"] for row in found), ", ".join(sorted({str(row["reason"]) for row in found}))]
        for key, found in sorted(groups.items(), key=lambda item: order[item[0]])
    ]  # fmt: skip


def find_failures(rows: list[dict[str, Any]]) -> list[str]:
    """What breaks the claim: a quiet answer that differs, a busy one that does oftener than cold, an early token."""
    failures = []
    for load, mode, fault, count, again, reused, later, _, loads, early, _ in tabulate(rows):
        if fault == "unnoticed" and reused == count:
            failures.append(f"{load}, {mode}: noise that nobody noticed changed no answer, so this model shows nothing")
        if fault in ("none", "unnoticed"):
            continue
        least = count if load == "quiet" else again
        name = f"{load}, {mode}, {fault}"
        if reused < least or later < least:
            failures.append(
                f"{name}: {reused} answers with a fault and {later} later ones of {count} equal the cold one"
            )
        if early:
            failures.append(f"{name}: {early} requests were scheduled before their verdict was known")
        if not loads:
            failures.append(f"{name}: nothing was loaded, so nothing was tested")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser, "vllm_poison")
    parser.add_argument("--trials", type=int, default=3, help="of each load, mode and fault")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    parser.add_argument("--document", type=int, default=6000, help="shared tokens")
    parser.add_argument("--donors", choices=("device", "host"), default="device")
    parser.add_argument("--decoders", type=int, default=32, help="requests that decode under load")
    parser.add_argument("--decode-prompt", type=int, default=512)
    parser.add_argument("--longest", type=int, default=4000, help="tokens that those may decode")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    small = {"trials": 1, "document": 400, "donors": "host", "decoders": 2, "decode_prompt": 64, "longest": 400}
    args = read_arguments(parser, **small)
    if args.engine:
        measure(args)
        return 0
    failed = 0 if args.finished_only else run_engines(["ours"])
    report, rows = _report.Report("vllm_poison", args), Rows(args.rows).rows
    report.table(
        "Greedy answers after a fault, against the cold answer",
        ["load", "mode", "fault", "n", "cold again equal", "with the fault equal", "cold later equal",
         "fewest equal tokens", "loads", "scheduled too early", "reason"],
        tabulate(rows),
    )  # fmt: skip
    failures = find_failures(rows)
    report.add("failures", failures)
    write_report(
        report, args, f"answers of {args.tokens} tokens; equal: all of them; fault none: reuse is an approximation",
        "unnoticed: noise behind our checks, the control; its answers must differ",
        "cold later equal: as the cold answer, or as the one from vLLM's own prefix cache before the fault",
        f"busy: {args.decoders} other requests decode", *(f"FAILED {failure}" for failure in failures),
    )  # fmt: skip
    return 1 if failed or failures else 0


if __name__ == "__main__":
    sys.exit(main())
