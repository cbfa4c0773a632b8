"""vLLM under load: what long prompts that share a document do to everybody else's decoding, with reuse and without.

32 requests decode, or 100. Prompts of 24,000 shared tokens arrive: one a second, four a second, at random moments, or
eight at once; in one load nothing of them can be reused. Measured are the time to first token of those prompts and the
time between two tokens (ITL) of the requests that decode meanwhile.

    python bench/vllm_load.py --measured-on "one H200, vLLM 0.26.0" --out bench/results/vllm_load_h200.json
    python bench/vllm_load.py --finished-only --rows rows.jsonl ...    # only print what a file of rows holds
    python bench/vllm_load.py --quick                                  # two cores: shows that it works
"""

from __future__ import annotations

import lib.reporting as reporting  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from lib.vllm_loads import BY_VALUE, DOCUMENTS, ITL_GOAL_MS, LOADS, TTFT_GOAL_MS, LoadRun
from lib.vllm_runs import (
    Budget,
    Rows,
    add_engine_arguments,
    make_task,
    read_arguments,
    run_engines,
    take_turn,
    write_report,
)

from semblend.materialize.donors.places import MOST_HOST

ENGINES = {"stock": ("stock",), "default": ("balanced-default", "fast-default"), "device": ("fast", "balanced"),
           "host": ("balanced-host", "fast-host")}  # fmt: skip
"""One process each, and the kinds that it measures: a request says its mode."""
KINDS = {
    "stock": "stock vLLM",
    "balanced-default": "balanced, nothing set",
    "fast-default": "fast, nothing set",
    "balanced-host": "balanced",
    "fast-host": "fast",
    "balanced": "balanced, donors on the GPU",
    "fast": "fast, donors on the GPU",
}
"""In the order of the table. With nothing set, donors lie on the GPU and in host memory as the connector decides."""
COLUMNS = (
    "load", "engine", "donor_device_bytes", "TTFT p50 ms", "TTFT p99 ms", "TTFT max ms", "ITL p50 ms", "ITL p99 ms",
    "ITL max ms", "decode tokens/s", "of these in time", "arrivals in time", "arrivals",
)  # fmt: skip
OVERLOAD = 1.1
"""Times as long as the arrivals of a load are apart: an engine that takes longer for each falls behind."""
FIELDS = ("ttft_p50", "ttft_p99", "ttft_max", "itl_p50", "itl_p99", "itl_max", "decode_tok_s", "good_tok_s",
          "good_share", "n")  # fmt: skip


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The measurements of a load in a file of rows; other lines are skipped."""
    names = {load.name for load in LOADS}
    return [row for row in Rows(path).rows if row.get("what") == "load" and row["name"] in names]


def tabulate(rows: list[dict[str, Any]], donor_bytes: int) -> list[list[Any]]:
    """One line for each load and engine; where one was measured again, the last measurement counts."""
    found = {(row["name"], row["kind"]): row for row in rows}
    on_device = {**dict.fromkeys(ENGINES["host"], 0), **dict.fromkeys(ENGINES["device"], donor_bytes)}
    return [
        [load.name, words, on_device.get(kind), *(found[load.name, kind].get(field) for field in FIELDS)]
        for load in LOADS
        for kind, words in KINDS.items()
        if (load.name, kind) in found
    ]


def describe_overload(rows: list[dict[str, Any]]) -> list[str]:
    """A sentence for each load that stock vLLM cannot keep up with: its times to first token have no limit."""
    notes = []
    for row in rows:
        share = row["wall_s"] / row["n"] / row["every"] if row["every"] else 0.0
        if row["kind"] == "stock" and share > OVERLOAD:
            notes.append(
                f"{row['name']}: prompts come {share:.1f} times as fast as stock vLLM computes them, for "
                f"{row['n'] * row['every']:.0f} s; its TTFT grows with every second that this lasts"
            )
    return notes


def describe_memory(args: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """Where donors lay in these rows, and how many documents the connector would hold by itself at most."""
    from lib.vllm_engine import SHAPES

    if not any(row["kind"] in ENGINES["host"] for row in rows):
        return "nothing set: the connector decides how many donors lie on the GPU and in host memory; its log says it"
    given, held = args.donor_bytes / 1e9, MOST_HOST // (args.document * count_kv_bytes(SHAPES[args.shape]))
    return (
        f"donor_device_bytes 0: donors lie in host memory. donor_host_bytes was {given:.0f} GB: a load "
        f"has {DOCUMENTS} documents; the most that the connector takes by itself, {MOST_HOST >> 30} GiB, holds {held}"
    )


def count_kv_bytes(config: dict[str, Any]) -> int:
    """Bytes of KV that a token takes in 16 bits."""
    head = config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head * 2)


def measure(args: argparse.Namespace) -> None:
    """Append the rows of one engine that are not there yet, the most telling first."""
    from lib.vllm_engine import Engine

    rows = Rows(args.rows)
    wanted = [(name, kind) for name in BY_VALUE for kind in ENGINES[args.engine] if kind in args.kinds]
    missing = [(name, kind) for name, kind in wanted if name in args.loads and not rows.find(name=name, kind=kind)]
    if not missing:
        return
    most = max(load.decoders for load in LOADS) if args.decoders is None else args.decoders
    task = make_task(args, args.document + 1600, max_requests=most + 28)
    serving = LoadRun(Engine(args.engine, task), args.document, args.decode_prompt)
    for _ in range(2):
        serving.engine.ask(serving.engine.tokens(args.decode_prompt))
    serving.make_donors()
    for kind in {kind for _, kind in missing}:  # warm
        for number in range(3):
            serving.engine.ask(serving.make_arrival(number), **_ask_for(kind))
    with take_turn(args.turn):
        serve_loads(serving, missing, rows, args)


def serve_loads(serving: LoadRun, missing: list[tuple[str, str]], rows: Rows, args: argparse.Namespace) -> None:
    """A row for each load and kind, while there is time."""
    budget, loads = Budget(args.budget_s), {load.name: load for load in LOADS}
    for name, kind in missing:
        if budget.is_used_up:
            break
        load = loads[name]
        if args.decoders is not None:
            load = replace(load, decoders=args.decoders, arrivals=args.arrivals)
        rows.add({"kind": kind, **serving.run(load, _ask_for(kind))})
        if not load.reusable and kind != "stock":  # its prompts are donors now, in place of those that others reuse
            serving.make_donors()
        reporting.progress(f"{kind}: {name}")


def _ask_for(kind: str) -> dict[str, Any]:
    return {} if kind == "stock" else {"quality": kind.partition("-")[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser, "vllm_load")
    names = [load.name for load in LOADS]
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["stock", *ENGINES["default"]])
    parser.add_argument("--loads", nargs="+", choices=names, default=names)
    parser.add_argument("--document", type=int, default=24_000, help="shared tokens of an arrival")
    parser.add_argument("--decode-prompt", type=int, default=1024, help="tokens of a prompt that then decodes")
    parser.add_argument("--decoders", type=int, default=None, help="in every load so many decode")
    parser.add_argument("--arrivals", type=int, default=None, help="with --decoders: so many arrive")
    args = read_arguments(parser, document=300, decode_prompt=32, decoders=2, arrivals=2)
    if args.engine:
        measure(args)
        return 0
    engines = [engine for engine, kinds in ENGINES.items() if set(kinds) & set(args.kinds)]
    failed = 0 if args.finished_only else run_engines(engines, args.turn)
    report = reporting.Report("vllm_load", args)
    rows = read_rows(args.rows)
    lines = tabulate(rows, int(args.donor_bytes))
    report.table("vLLM under load: long prompts arrive while others decode", COLUMNS, lines)
    shared, shape = f"{args.document:,}", f"shape {args.shape}, random weights, {args.dtype}"
    write_report(
        report,
        args,
        f"prompts that share {shared} tokens with a donor; 32 requests decode, where the load says no other; {shape}",
        f"max_num_batched_tokens {args.step_tokens:,}, prefix caching on",
        *describe_overload(rows),
        describe_memory(args, rows),
        "balanced repairs 10 % of the reused tokens, scattered at random, and accepts; a real model may ask for more",
        "ITL: time between two tokens of a request that decodes, while arrivals are served",
        f"in time: an arrival's first token within {TTFT_GOAL_MS:.0f} ms (share of all), "
        f"a decode token within {ITL_GOAL_MS:.0f} ms of the one before it (tokens/s)",
        "eight at once and nothing reusable: two rounds; every other load: one; times are over all arrivals of a load",
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
