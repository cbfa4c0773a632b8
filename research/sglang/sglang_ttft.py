"""Claim: over HTTP, SGLang with our cache starts to answer sooner than stock SGLang, and says nearly the same.

    .ci/engines/sglang-cpu python bench/sglang_ttft.py --engine sglang --model FOLDER --data-dir DATA
    .ci/engines/vllm-cpu python bench/sglang_ttft.py --engine vllm --model FOLDER --data-dir DATA
    python bench/sglang_ttft.py --finished-only --measured-on "two cores, ..."

The prompts of `bench/quality.py`: a document under another instruction (one_document), with edits, passages of three
earlier prompts (several), passages in another order (reordered). Both servers of an engine, stock and ours, are alive,
and each case asks them in turn:

    cold       stock
    exact      stock, the same prompt once more: a prefix hit on all of it, the floor of this engine
    rerun      stock again under another salt, every fourth case: what is not equal here is the engine's own noise
    fast       ours, after the case's donors
    balanced   ours, after the same donors under another salt
    miss       ours under a salt that nobody has used, every fourth case: all the work of looking, nothing found

TTFT is wall time at the client. On a shared machine it tells little, so CPU time of the server until the first token
stands beside it. Computed tokens: of the receipt, or what the engine says it had not cached. FOLDER is a Hugging Face
folder. Rows go to --rows as they come; a second run goes on from them.
"""

from __future__ import annotations

import _report  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import contextlib
import fcntl
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from _quality_cases import SCENARIOS, Case, cases
from _quality_lab import word_f1
from _sglang_server import CPU_FLAGS, SglangServer
from _vllm_runs import Budget, Rows, write_report
from _vllm_server import Answer, VllmServer

ENGINES = ("sglang", "vllm")
ARMS = ("cold", "exact", "rerun", "miss", "fast", "balanced")
STOCK = ARMS[:3]
SHOWN = {"cold": "stock", "exact": "stock, exact hit", "rerun": "stock, again", "miss": "ours, nothing to find",
         "fast": "ours, fast",
         "balanced": "ours, balanced"}  # fmt: skip
FIELDS = ("outcome", "reason", "exact_tokens", "reused_tokens", "recomputed_tokens", "prefill_tokens")
EVERY = 4
ROOM = 8192
"""Tokens of the KV cache of each server."""


class Asks(Protocol):
    """A pair of servers of one engine."""

    def ask(self, arm: str, tokens: tuple[int, ...], count: int, name: str, salt: str, **asked: Any) -> dict[str, Any]:
        """One request of ``arm`` to the stock server (`STOCK`) or to ours; what came back and what it cost."""

    def stop(self) -> None:
        """End both."""


class SglangPair:
    def __init__(self, model: str, longest: int, folder: Path) -> None:
        flags = [*CPU_FLAGS, "--context-length", str(longest), "--max-total-tokens", str(ROOM), "--sleep-on-idle",
                 "--max-running-requests", "8", "--enable-cache-report"]  # fmt: skip
        self.stock = SglangServer(model, folder / "stock", flags)
        self.ours = SglangServer(model, folder / "ours", flags, {})
        wait_for(self, self.stock, self.ours)

    def ask(self, arm: str, tokens: tuple[int, ...], count: int, name: str, salt: str, **asked: Any) -> dict[str, Any]:
        server = self.stock if arm in STOCK else self.ours
        answer = server.stream(tokens, count, name, salt, **asked)
        return {"ttft_ms": answer.ttft_ms, "cpu_ms": answer.cpu_ms, "text": answer.text, "cached": answer.cached_tokens,
                "details": answer.facts.get("cached_tokens_details"), **pick(server.find_receipt(name))}  # fmt: skip

    def stop(self) -> None:
        self.stock.stop()
        self.ours.stop()


class TimedVllmServer(VllmServer):
    """Notes the CPU time of the server when the first token comes."""

    first_cpu_ms = 0.0

    def _read_chunk(self, chunk: dict[str, Any], answer: Answer, begun: float) -> None:  # type: ignore[override]
        waited = answer.ttft_ms is None
        super()._read_chunk(chunk, answer, begun)
        if waited and answer.ttft_ms is not None:
            self.first_cpu_ms = self.read_cpu_ms()


class VllmPair:
    def __init__(self, model: str, longest: int, folder: Path) -> None:
        flags = ["--dtype", "float32", "--max-model-len", str(longest), "--max-num-batched-tokens", str(longest),
                 "--enforce-eager", "--max-num-seqs", "8", "--gpu-memory-utilization", "0.15",
                 "--kv-cache-memory-bytes", str(ROOM * 46080)]  # fmt: skip
        self.stock = TimedVllmServer(model, folder / "stock", flags)
        self.ours = TimedVllmServer(model, folder / "ours", flags, {"donor_host_bytes": 4 << 30})
        wait_for(self, self.stock, self.ours)

    def ask(self, arm: str, tokens: tuple[int, ...], count: int, name: str, salt: str, **asked: Any) -> dict[str, Any]:
        server = self.stock if arm in STOCK else self.ours
        more = {"kv_transfer_params": {"semblend": asked}} if server is self.ours else {}
        begun = server.read_cpu_ms()
        answer = server.stream(tokens, count, name, cache_salt=salt, **more)
        return {"ttft_ms": answer.ttft_ms, "cpu_ms": server.first_cpu_ms - begun, "text": answer.text,
                "cached": answer.cached_tokens or 0, **pick(server.find_receipt(name))}  # fmt: skip

    def stop(self) -> None:
        self.stock.stop()
        self.ours.stop()


def wait_for(pair: Asks, *servers: SglangServer | VllmServer) -> None:
    """Until both answer; one that does not come up takes the other with it."""
    try:
        for server in servers:
            server.wait()
    except BaseException:
        pair.stop()
        raise


def pick(receipt: dict[str, Any]) -> dict[str, Any]:
    return {name: receipt.get(name) for name in FIELDS}


def run_case(pair: Asks, case: Case, number: int, tokens: int) -> dict[str, Any]:
    """All arms of one case, each with donors of its own."""
    name, checked = case.case_id.replace("/", "-"), number % EVERY == 0
    beginning = max(count_common(donor, case.tokens) for donor in case.donors)
    found: dict[str, Any] = {"tokens": len(case.tokens), "common_beginning": beginning, "number": number,
                             "spans": len(case.spans), "donors": len(case.donors)}  # fmt: skip
    found["cold"] = pair.ask("cold", case.tokens, tokens, f"{name}-cold", f"{name} cold")
    found["exact"] = pair.ask("exact", case.tokens, 1, f"{name}-exact", f"{name} cold")
    for mode in ("fast", "balanced"):  # a salt each: the exact head of one answer would be a prefix hit of the other
        for at, donor in enumerate(case.donors):
            pair.ask("donor", donor, 1, f"{name}-{mode}-donor-{at}", f"{name} {mode}", quality="exact")
        found[mode] = pair.ask(mode, case.tokens, tokens, f"{name}-{mode}", f"{name} {mode}", quality=mode)
    if checked:
        found["rerun"] = pair.ask("rerun", case.tokens, tokens, f"{name}-rerun", f"{name} rerun")
        found["miss"] = pair.ask("miss", case.tokens, tokens, f"{name}-miss", f"{name} miss")
    return found


def count_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@contextlib.contextmanager
def hold(lock: str) -> Iterator[None]:
    """Hold the lock alone, or after half a minute together with others who share it."""
    if not lock:
        yield
        return
    with open(lock, "a") as file:
        for _ in range(30):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(1)
        else:
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def measure(args: argparse.Namespace) -> None:
    """Append a row for each case that is not there yet."""
    from tokenizers import Tokenizer

    rows, budget = Rows(args.rows), Budget(args.budget_s)
    tokenizer = Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))
    made = cases(
        _report.data_dir(args), lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        scenarios=args.scenarios, prompts=args.prompts, tokens=args.tokens, seed=args.seed,
    )  # fmt: skip
    missing = [
        (number, case) for number, case in enumerate(made) if not rows.find(engine=args.engine, case=case.case_id)
    ]
    if not missing:
        return
    pair: Asks = {"sglang": SglangPair, "vllm": VllmPair}[args.engine](
        args.model, args.tokens * 2 + 600, Path(tempfile.mkdtemp(prefix=f"{args.engine}-ttft-"))
    )
    try:
        with hold(args.lock):
            pair.ask("cold", tuple(range(100, 400)), 2, "warm-stock", "warm")
            pair.ask("fast", tuple(range(100, 400)), 2, "warm-ours", "warm")
            pair.ask("fast", (7, *range(100, 400)), 2, "warm-fast", "warm", quality="fast")
            pair.ask("balanced", (8, 9, *range(100, 400)), 2, "warm-balanced", "warm", quality="balanced")
        for number, case in missing:
            if budget.is_used_up:
                break
            with hold(args.lock):
                begun = time.perf_counter()
                found = run_case(pair, case, number, args.answer)
            rows.add({"engine": args.engine, "case": case.case_id, "scenario": case.scenario, **found})
            _report.progress(f"{args.engine} {number} {case.case_id}: {time.perf_counter() - begun:.0f} s")
    finally:
        pair.stop()


def count_computed(row: dict[str, Any], arm: str) -> int:
    """Prompt tokens that a model computed: of the receipt, or those that the engine had not cached."""
    answer, tokens = row[arm], row["tokens"]
    if answer.get("reused_tokens") is None:
        return int(tokens - answer["cached"])
    return int(answer["recomputed_tokens"] + answer["prefill_tokens"])


def tabulate(rows: list[dict[str, Any]], scenarios: list[str]) -> list[list[Any]]:
    """A line for each engine, setting and arm."""
    lines = []
    for engine in ENGINES:
        for scenario in scenarios:
            some = [
                row for row in rows if row["engine"] == engine and (scenario == "all" or row["scenario"] == scenario)
            ]
            picked = {arm: [row for row in some if arm in row] for arm in ARMS}
            lines += [[engine, scenario, SHOWN[arm], *describe(rows, arm)] for arm, rows in picked.items() if rows]
    return lines


def describe(rows: list[dict[str, Any]], arm: str) -> list[Any]:
    """n, hits, tokens, share reused, share computed, times with their spread, speed-up, answers against cold."""
    total = sum(row["tokens"] for row in rows)
    wall = _report.spread([row[arm]["ttft_ms"] for row in rows])
    cpu = _report.spread([row[arm]["cpu_ms"] for row in rows])
    faster = statistics.median(row["cold"]["cpu_ms"] / max(row[arm]["cpu_ms"], 1.0) for row in rows)
    f1 = statistics.fmean(word_f1(row[arm]["text"], row["cold"]["text"]) for row in rows)
    equal = sum(row[arm]["text"] == row["cold"]["text"] for row in rows)
    shown = arm not in ("cold", "exact")  # of an exact hit only the first token is asked for
    reused = sum(row[arm].get("reused_tokens") or 0 for row in rows)
    return [
        len(rows), sum(bool(row[arm].get("reused_tokens")) for row in rows), reused / total,
        sum(count_computed(row, arm) for row in rows) / total, wall["p50"], wall["p05"], wall["p95"], cpu["p50"],
        faster if arm != "cold" else None, f1 if shown else None, equal if shown else None,
    ]  # fmt: skip


COLUMNS = ["engine", "setting", "arm", "n", "hits", "reused", "computed", "TTFT p50 ms", "p05", "p95", "CPU p50 ms",
           "cold/this, CPU", "F1 against cold", "equal answers"]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "sglang_ttft_cpu")
    parser.add_argument("--engine", choices=ENGINES, help="measure this one, in whose environment this runs")
    parser.add_argument("--model", default=os.environ.get("SEMBLEND_TEST_SGLANG_MODEL", ""), help="a folder")
    parser.add_argument("--rows", default="bench/results/sglang_ttft_cpu.rows.jsonl", help="a second run goes on")
    parser.add_argument("--finished-only", action="store_true", help="measure nothing, print the rows")
    parser.add_argument("--measured-on", default="")
    parser.add_argument("--note", action="append", default=[], help="what a reader must know about these rows")
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS),
                        default=["one_document", "edits", "several", "reordered"])  # fmt: skip
    parser.add_argument("--prompts", type=int, default=15, help="cases of each setting")
    parser.add_argument("--tokens", type=int, default=900, help="tokens of a document, at most")
    parser.add_argument("--answer", type=int, default=12, help="tokens of an answer")
    parser.add_argument("--budget-s", type=float, default=0.0, help="begin no case after this long; 0: no limit")
    parser.add_argument("--lock", default="", help="hold this file's lock for each case, where others measure too")
    if "--quick" in sys.argv:
        parser.set_defaults(prompts=1, tokens=300, answer=4)
    args = parser.parse_args()
    if args.engine and not args.finished_only:
        if not args.model:
            _report.fail("no weights given", hint="--model is a Hugging Face folder")
        measure(args)
    report = _report.Report("sglang_ttft_cpu", args)
    rows = Rows(args.rows).rows
    report.table("Over HTTP, all settings", COLUMNS, tabulate(rows, ["all"]))
    report.table("Over HTTP, by setting", COLUMNS, tabulate(rows, args.scenarios))
    args.lock = ""
    beginning = max((row["common_beginning"] for row in rows), default=0)
    write_report(
        report, args,
        "hits: answers whose receipt says that donor KV was used; reused: share of all prompt tokens; computed: share "
        "of all prompt tokens that a model computed, repairs counted in",
        "CPU: of all processes of the server until the first token; cold/this: median over prompts, same prompt",
        f"answers of {args.answer} greedy tokens; F1 and equality against stock's answer to the same prompt",
        f"the longest common beginning of a prompt and a donor is {beginning} tokens: all that a prefix cache reuses",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
