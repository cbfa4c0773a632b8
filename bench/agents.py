"""Claim: behind an edit of its history an agent is answered sooner than by an engine with a prefix cache alone.

    python bench/agents.py scripts --model FOLDER --data-dir DATA --scripts FILE [--lengths 4096 12288 24576]
    python bench/agents.py --engine vllm --model FOLDER --scripts FILE --measured-on "one H200, vLLM 0.26.0"
    python bench/agents.py --engine embedded|sglang ...

What agents send step by step (`lib.agent_scripts`), to two servers in turns: `stock`, with its prefix cache, and `ours`
with nothing set; there mode fast has steps of its own. Each arm of a script has a salt of its own. In the end `stock`
gets the step behind the edit once more: that is an exact hit, the limit of any reuse.

Tokens computed: by stock those that it did not find in its cache; by ours those that receipts count as computed.
"""

from __future__ import annotations

import lib.reporting as reporting  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lib.agent_scripts import Script, make_scripts, read_scripts, write_scripts
from lib.embedded_server import EmbeddedArms
from lib.quality_cases import choose_chat_form
from lib.run_picture import ONE_RUN
from lib.sglang_server import CPU_FLAGS, SglangServer
from lib.vllm_runs import Budget, Rows, add_engine_arguments, read_arguments, take_turn, write_report
from lib.vllm_server import VllmServer

ANSWER_TOKENS = 16
ARMS = {"stock": "", "ours": "balanced", "fast": "fast"}
RECEIPT = ("reason", "detail", "risk", "mode", "kind", "exact_tokens", "reused_tokens", "recomputed_tokens",
           "prefill_tokens", "lookup_ms", "load_ms", "compute_ms", "service_ms", "expected_ms",
           "expected_cold_ms")  # fmt: skip
Ask = Callable[[str, Sequence[int], str, str], dict[str, Any]]


class Engine:
    """Two servers of one engine; `ask` gives what is measured at once, `finish` adds what receipts say."""

    def __init__(self, args: argparse.Namespace, longest: int) -> None:
        self._args, self._servers = args, dict[str, Any]()
        folder = Path(tempfile.mkdtemp(prefix="agents-"))
        for name in ("stock", "ours"):
            (folder / name).mkdir()
            self._servers[name] = getattr(self, f"_start_{args.engine}")(folder / name, longest, name == "stock")

    def wait(self) -> None:
        for name, server in self._servers.items():
            server.wait()
            reporting.progress(f"{name} answers")

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()

    def ask(self, arm: str, ids: Sequence[int], name: str, salt: str) -> dict[str, Any]:
        server = self._servers["stock" if arm == "stock" else "ours"]
        wish = {} if ARMS[arm] in ("", "balanced") else {"quality": ARMS[arm]}
        if self._args.engine == "vllm":
            more = {"kv_transfer_params": {"semblend": wish}} if wish else {}
            answer = server.stream(ids, ANSWER_TOKENS, name, cache_salt=salt, **more)
            return {"ttft_ms": answer.ttft_ms, "cached": answer.cached_tokens, "answer": answer.text}
        if self._args.engine == "sglang":
            answer = server.stream(ids, ANSWER_TOKENS, name, salt=salt, **wish)
            return {"ttft_ms": answer.ttft_ms, "cached": answer.cached_tokens, "answer": answer.text}
        reply = server.ask(list(ids), ANSWER_TOKENS, name=name, salt=salt, quality=ARMS[arm])
        used = reply.usage.get("prompt_tokens_details") or {}
        found = {"ttft_ms": reply.ttft_ms, "cached": used.get("cached_tokens", 0), "answer": reply.text}
        return found | ({} if arm == "stock" else {field: reply.receipt.get(field) for field in RECEIPT})

    def finish(self, rows: list[dict[str, Any]]) -> None:
        """vLLM and SGLang tell whole receipts in their events."""
        if self._args.engine == "embedded":
            return
        server = self._servers["ours"]
        receipts = server.read_receipts() if self._args.engine == "vllm" else {}
        for row in rows:
            if row["arm"] == "stock":
                continue
            if self._args.engine == "vllm":
                mine = next((one for name, one in receipts.items() if f"{row['request']}-" in f"{name}-"), {})
            else:
                mine = server.find_receipt(row["request"])
            row |= {field: mine.get(field) for field in RECEIPT}

    def _start_vllm(self, folder: Path, longest: int, is_stock: bool) -> VllmServer:
        args = self._args
        flags = ["--dtype", args.dtype, "--max-model-len", str(longest), "--gpu-memory-utilization", str(args.memory),
                 *(["--enforce-eager"] if args.eager else []),
                 *(["--kv-cache-memory-bytes", str(int(args.kv_bytes))] if args.kv_bytes else [])]  # fmt: skip
        return VllmServer(args.model, folder, flags, None if is_stock else {})

    def _start_sglang(self, folder: Path, longest: int, is_stock: bool) -> SglangServer:
        flags = [*CPU_FLAGS, "--max-total-tokens", str(8 * longest), "--context-length", str(longest)]
        return SglangServer(self._args.model, folder, flags, None if is_stock else {})

    def _start_embedded(self, folder: Path, longest: int, is_stock: bool) -> EmbeddedArms:
        return EmbeddedArms(self._args.model, folder, stock=is_stock, pool_tokens=8 * longest)


def run_script(engine: Engine, script: Script) -> list[dict[str, Any]]:
    """All steps of a script in every arm, in turns; the whole run and ten edits by the default alone."""
    rows = []
    arms = list(ARMS) if script.kind in ("ten edits",) or len(script.steps) == 4 else ["stock", "ours"]

    def ask(arm: str, number: int, what: str, ids: Sequence[int]) -> None:
        salt = f"{script.name}-{arm}".replace("/", "-").replace(" ", "-")  # vLLM takes no slashes
        name = f"{salt}-{number}"
        row = {"script": script.name, "kind": script.kind, "dataset": script.dataset, "length": script.length,
               "arm": arm, "step": number, "what": what, "tokens": len(ids), "request": name}  # fmt: skip
        rows.append(row | engine.ask(arm, ids, name, salt))

    for number, step in enumerate(script.steps):
        for arm in arms if number % 2 else arms[::-1]:
            ask(arm, number, step.what, step.ids)
    if len(script.steps) == 4:
        ask("stock", 4, "exact hit", script.steps[2].ids)
    engine.finish(rows)
    return rows


def measure(args: argparse.Namespace) -> None:
    scripts = [one for one in read_scripts(args.scripts) if not args.lengths or one.length in args.lengths]
    scripts = [one for one in scripts if not args.kinds or one.kind in args.kinds]
    longest = max(len(step.ids) for one in scripts for step in one.steps) + ANSWER_TOKENS + 32
    engine, rows = Engine(args, longest), Rows(args.rows)
    try:
        engine.wait()
        with take_turn(args.turn):
            budget = Budget(args.budget_s)
            for number, script in enumerate(scripts[: args.most or None]):
                if budget.is_used_up:
                    break
                if rows.find(script=script.name, engine=args.engine):
                    continue
                for row in run_script(engine, script):
                    rows.add(row | {"engine": args.engine, "model": Path(args.model).name})
                reporting.progress(f"script {number + 1} of {len(scripts)}")
    finally:
        engine.stop()


def count_computed(row: dict[str, Any]) -> int:
    """Tokens of a prompt that were computed: at least the last one."""
    if row["arm"] == "stock" or row.get("prefill_tokens") is None or "goes on from" in (row.get("detail") or ""):
        return max(1, row["tokens"] - (row["cached"] or 0))
    return max(1, row["prefill_tokens"] + (row.get("recomputed_tokens") or 0))


def tabulate_steps(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """By length and step: times of both, tokens computed, and what of the gap to an exact hit is closed."""
    lines = []
    once = [row for row in rows if row["kind"] not in ("ten edits", "whole run")]
    for length in sorted({row["length"] for row in once if row["what"] == "exact hit"}):
        mine = [row for row in once if row["length"] == length]
        by_step = {(row["script"], row["what"], row["arm"]): row for row in mine}
        names = [script for script, what, arm in by_step if (what, arm) == ("exact hit", "stock")]
        exact = [by_step[script, "exact hit", "stock"]["ttft_ms"] for script in names]
        for what in ("grown", "edited", "next"):
            stock = [by_step[script, what, "stock"] for script in names]
            for arm in ARMS:
                found = [by_step[script, what, arm] for script in names]
                times = [row["ttft_ms"] for row in found]
                share = sum(map(count_computed, found)) / sum(map(count_computed, stock))
                gap = statistics.median([row["ttft_ms"] for row in stock]) - statistics.median(exact)
                closed = (statistics.median([row["ttft_ms"] for row in stock]) - statistics.median(times)) / gap
                same = statistics.fmean(a["answer"] == b["answer"] for a, b in zip(found, stock, strict=True))
                served = statistics.fmean(bool(row.get("reused_tokens")) for row in found)
                p90 = float(np.percentile(times, 90))
                lines.append(
                    [length, what, arm, len(found), served, statistics.median(times), statistics.fmean(times), p90,
                     statistics.median(exact), closed if what == "edited" else None, share, same]
                )  # fmt: skip
    return lines


def tabulate_kinds(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Behind the edit, by kind: served share, tokens computed, same answer."""
    lines = []
    edited = [row for row in rows if row["what"] == "edited" and row["kind"] not in ("ten edits", "whole run")]
    for kind in dict.fromkeys(row["kind"] for row in edited):
        stock = {row["script"]: row for row in edited if row["kind"] == kind and row["arm"] == "stock"}
        for arm in ("ours", "fast"):
            found = [row for row in edited if row["kind"] == kind and row["arm"] == arm and row["script"] in stock]
            if found:
                pairs = [(row, stock[row["script"]]) for row in found]
                share = sum(count_computed(a) for a, _ in pairs) / sum(count_computed(b) for _, b in pairs)
                ttft = statistics.median(a["ttft_ms"] / b["ttft_ms"] for a, b in pairs)
                served = statistics.fmean(bool(row.get("reused_tokens")) for row in found)
                same = statistics.fmean(a["answer"] == b["answer"] for a, b in pairs)
                lines.append([kind, arm, len(found), served, share, ttft, same])
    return lines


def tabulate_depth(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Ten edits in a row: what each of them computes, and where a history was computed once, exactly."""
    lines = []
    mine = [row for row in rows if row["kind"] == "ten edits"]
    for step in sorted({row["step"] for row in mine}):
        stock = {row["script"]: row for row in mine if row["step"] == step and row["arm"] == "stock"}
        for arm in ("ours", "fast"):
            found = [row for row in mine if row["step"] == step and row["arm"] == arm and row["script"] in stock]
            if step and found:
                pairs = [(row, stock[row["script"]]) for row in found]
                share = sum(count_computed(a) for a, _ in pairs) / sum(count_computed(b) for _, b in pairs)
                healed = statistics.fmean("computed once" in (row.get("detail") or "") for row in found)
                served = statistics.fmean(bool(row.get("reused_tokens")) for row in found)
                same = statistics.fmean(a["answer"] == b["answer"] for a, b in pairs)
                ttft = statistics.median(a["ttft_ms"] / b["ttft_ms"] for a, b in pairs)
                lines.append([step, arm, len(found), served, healed, share, ttft, same])
    return lines


def tabulate_runs(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Whole runs: tokens sent and computed, and steps with the same answer."""
    lines = []
    whole = [row for row in rows if row["kind"] == "whole run"]
    for engine, dataset in dict.fromkeys((row["engine"], row["dataset"]) for row in whole):
        mine = [row for row in whole if (row["engine"], row["dataset"]) == (engine, dataset)]
        stock = {(row["script"], row["step"]): row for row in mine if row["arm"] == "stock"}
        ours = {(row["script"], row["step"]): row for row in mine if row["arm"] == "ours"}
        both = [(ours[key], stock[key]) for key in ours if key in stock]
        edits = sum(a["what"] == "edited" for a, _ in both)
        sent, computed, less = (sum(map(count, rows)) for count, rows in (
            (lambda row: row["tokens"], [b for _, b in both]), (count_computed, [b for _, b in both]),
            (count_computed, [a for a, _ in both])))  # fmt: skip
        same = statistics.fmean(a["answer"] == b["answer"] for a, b in both)
        behind = [(a, b) for a, b in both if a["what"] == "edited"]
        at_edits = sum(count_computed(a) for a, _ in behind) / max(1, sum(count_computed(b) for _, b in behind))
        lines.append([engine, dataset, len({key[0] for key in ours}), len(both), edits, sent, computed, less,
                      less / computed, at_edits, same])  # fmt: skip
    return lines


def tabulate_one_run(rows: list[dict[str, Any]]) -> tuple[str, list[list[Any]]]:
    """Of the longest whole runs the middle one, by what its edited steps gain: its name, and a line for each step."""
    runs: dict[str, dict[int, dict[str, dict[str, Any]]]] = {}
    for row in rows:
        if row["kind"] == "whole run":
            runs.setdefault(row["script"], {}).setdefault(row["step"], {})[row["arm"]] = row
    longest = max((step["stock"]["length"] for steps in runs.values() for step in steps.values()), default=0)
    ranked = sorted(
        (sum(step["ours"]["ttft_ms"] for step in edited) / sum(step["stock"]["ttft_ms"] for step in edited), script)
        for script, steps in runs.items()
        if (edited := [step for step in steps.values() if step["stock"]["what"] == "edited"])
        and edited[0]["stock"]["length"] == longest
    )
    if not ranked:
        return "", []
    script = ranked[len(ranked) // 2][1]
    both = [step for _, step in sorted(runs[script].items())]
    return script, [
        [number, step["stock"]["what"], step["stock"]["tokens"], step["stock"]["ttft_ms"], step["ours"]["ttft_ms"],
         count_computed(step["stock"]), count_computed(step["ours"]), step["ours"].get("reason") or ""]
        for number, step in enumerate(both, 1)
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser, "agents")
    parser.add_argument("do", nargs="?", choices=("scripts", "measure"), default="measure")
    parser.add_argument("--scripts", type=Path, default=Path("agents.json.gz"), help="file of what agents send")
    parser.add_argument("--lengths", type=int, nargs="*", default=[], help="tokens of the longest prompt")
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--each", type=int, default=25, help="scripts of each kind and length")
    parser.add_argument("--most", type=int, default=0, help="scripts to measure; 0: all")
    parser.set_defaults(engine="vllm")
    args = read_arguments(parser, lengths=[1024], each=1, memory=0.15)
    if args.do == "scripts":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model)

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        form = choose_chat_form(lambda text: tuple(encode(text)))
        held: dict[Any, list[int]] = {}

        def encode_message(message: Any) -> list[int]:
            if message not in held:
                role = "user" if message.role == "tool" else message.role
                held[message] = encode(form.message.format(role=role, text=message.text))
            return held[message]

        asked = encode(form.end.partition("\n")[2])
        lengths = args.lengths or [4096, 12288, 24576]
        scripts = make_scripts(reporting.data_dir(args) / "agent_traces", encode_message, asked, lengths, args.each)
        write_scripts(scripts, args.scripts)
        reporting.progress(f"{len(scripts)} scripts, {sum(len(one.steps) for one in scripts)} steps in {args.scripts}")
        return 0
    if not args.finished_only:
        measure(args)
    report, rows = reporting.Report("agents", args), Rows(args.rows).rows
    report.table(
        "Steps of agents that edit their history once",
        ["tokens", "step", "arm", "n", "reused", "p50 ms", "mean ms", "p90 ms", "exact hit p50 ms",
         "of the gap closed", "tokens computed / stock's", "same answer as stock"],
        tabulate_steps(rows),
    )  # fmt: skip
    report.table(
        "The step behind an edit, by kind",
        ["edit", "arm", "n", "reused", "tokens computed / stock's", "TTFT / stock's", "same answer as stock"],
        tabulate_kinds(rows),
    )
    report.table(
        "Ten edits in a row",
        ["edit", "arm", "n", "reused", "computed once", "tokens computed / stock's", "TTFT / stock's",
         "same answer as stock"],
        tabulate_depth(rows),
    )  # fmt: skip
    report.table(
        "Whole runs",
        ["engine", "agent", "runs", "steps", "edits", "tokens sent", "stock computes", "ours computes", "ours / stock",
         "behind edits", "same answer as stock"],
        tabulate_runs(rows),
    )  # fmt: skip
    script, lines = tabulate_one_run(rows)
    if lines:
        report.table(
            f"{ONE_RUN}: {script}",
            ["number", "step", "tokens", "stock ms", "ours ms", "stock computes", "ours computes", "reason"],
            lines,
        )  # fmt: skip
    write_report(report, args, "answers: greedy, 16 tokens; their history is the recorded one, whatever was answered")
    return 0


if __name__ == "__main__":
    sys.exit(main())
