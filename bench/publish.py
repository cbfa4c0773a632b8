"""Put measured figures between the markers in README, guides and research pages, and draw the README's picture.

    python bench/publish.py                   # rewrite the pages
    python bench/publish.py --check           # exit 1 when a page does not say what the results say
    python bench/publish.py --show NAME       # every table of one result file

The figures come from bench/results/*.json and, of experiments that were run once, from research/*/results/*.json.
No figure in those places is typed by hand: a test holds the pages to the result files.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any

from lib.load_picture import date_note, draw_load
from lib.reporting import REPO, find_result, format_table, get_day, read_lines_of

PICTURE = REPO / "docs" / "images" / "vllm_load.svg"
PAGES = (
    REPO / "README.md",
    *sorted((REPO / "docs").glob("guides/*.md")),
    *sorted((REPO / "docs").glob("research/*.md")),
)
PEERS = {
    "this project", "semblend 0.3.25, perfect embedder", "LMCache 0.5.6 matcher, chunk 256",
    "LMCache 0.5.6 matcher, chunk 32", "prefix blocks of 16", "content blocks of 16", "dict of 16-grams",
}  # fmt: skip
SHORT_LOADS = ("four a second", "eight at once", "nothing reusable, one a second")  # measured as the default is set up
LONGEST_TABLE = 40  # rows; a longer one is named and stays in its result file
MARKER = re.compile(r"(<!-- numbers:(\w+)(:all)? -->\n).*?(<!-- /numbers -->)", re.DOTALL)

Result = dict[str, Any]


def shorten(command: str) -> str:
    """A command without the flags whose words stand beside it on the page: where it was measured, and the notes.

    >>> shorten("python bench/ttft.py --rows a.jsonl --measured-on one H200 --note a busy machine --out b.json")
    'python bench/ttft.py --rows a.jsonl --out b.json'
    """
    return re.sub(r" --(?:note|measured-on|measured-at)(?: (?!--)\S+)+", "", command)


def source(result: Result) -> str:
    """Which command, which machine, when."""
    made = result["provenance"]
    command = shorten(made["command"])
    count = result.get("arguments", {}).get("threads", 1)
    threads = "one thread" if count == 1 else f"{count} threads"
    if measured_on := result.get("arguments", {}).get("measured_on"):
        return f"Measured on {measured_on}, {get_day(result)[:10]}; printed by `{command}`."
    commit = f", commit `{made['git_sha'][:10]}`" if made["git_sha"] else ""  # a copy without its repository has none
    return (
        f"`{command}`, {made['date'][:10]}, {made['cpu_model']}, {made['cpu_cores']} cores, {threads}, "
        f"Python {made['python']}{commit}."
    )


def show_table(table: dict[str, Any], name: str, longest: float = LONGEST_TABLE) -> str:
    """One table with its title; of a very long one only the title and the number of rows."""
    if len(table["rows"]) > longest:
        return f"**{table['title']}**: {len(table['rows'])} rows, in `{find_result(name).relative_to(REPO)}`."
    return f"**{table['title']}**\n\n{format_table(table['columns'], table['rows'])}"


def everything(result: Result, name: str, longest: float = LONGEST_TABLE) -> str:
    parts = [show_table(table, name, longest) for table in result["tables"]]
    notes = "\n".join(f"- {note}" for note in result["notes"])
    return "\n\n".join([*parts, notes, source(result)])


def columns(table: dict[str, Any], wanted: list[str]) -> str:
    at = [table["columns"].index(name) for name in wanted]
    return format_table(wanted, [[row[i] for i in at] for row in table["rows"]])


def find(result: Result, words: str) -> dict[str, Any]:
    return next(table for table in result["tables"] if words in table["title"])


def first_table(result: Result) -> str:
    table = result["tables"][0]
    return f"{table['title']}.\n\n{format_table(table['columns'], table['rows'])}\n\n{source(result)}"


def peers(result: Result) -> str:
    """A line for each system in `PEERS`: what it finds and what a lookup costs."""
    found = find(result, "Share of the reusable tokens")
    costs = find(result, "Costs and mistakes")
    cost_at, wrong_at = costs["columns"].index("CPU ms p50"), costs["columns"].index("wrong tokens")
    cost = {row[0]: (row[cost_at], row[wrong_at]) for row in costs["rows"]}
    rows = [[row[0], row[-1], *cost[row[0]]] for row in found["rows"] if row[0] in PEERS]
    return f"{format_table(['system', 'found', 'CPU ms p50', 'wrong tokens'], rows)}\n\n{source(result)}"


def ttft(result: Result) -> str:
    """Beside vLLM, donors on the device."""
    table = find(result, "Beside vLLM")
    kept = {**table, "rows": [row for row in table["rows"] if row[table["columns"].index("tier")] == "device"]}
    wanted = ["tokens", "vLLM cold", "vLLM exact hit", "cold", "fast", "balanced", "vLLM cold / fast"]
    return f"{table['title']}.\n\n{columns(kept, wanted)}\n\n{source(result)}"


def vllm_ttft(result: Result) -> str:
    """A line for each length: stock vLLM, and our arms by where donors lie, host memory (the default) first."""
    table = find(result, "Time to first token")
    at = {name: table["columns"].index(name) for name in ("tokens", "engine", "arm", "p50 ms")}
    found = {(row[at["tokens"]], row[at["engine"]], row[at["arm"]]): row[at["p50 ms"]] for row in table["rows"]}
    arms = [("stock", "cold"), ("stock", "exact"), ("host", "fast"), ("device", "fast"), ("device", "balanced")]
    rows = []
    for tokens in sorted({key[0] for key in found}):
        ms = [found[tokens, *arm] for arm in arms]
        rows.append([tokens, *ms, *(ms[0] / one for one in ms[2:])])
    names = ["tokens", "stock cold", "stock exact hit", "fast", "fast, on the GPU", "balanced, on the GPU",
             "cold / fast", "cold / fast, on the GPU", "cold / balanced, on the GPU"]  # fmt: skip
    setting = "Donors lie in host memory; *on the GPU* with `donor_device_bytes`."
    return f"{format_table(names, rows)}\n\n{setting}\n\n{source(result)}"


def vllm_load(result: Result) -> str:
    """A line for each load and engine, in whole milliseconds, of the loads that were measured with host memory.

    All loads and all notes are on the full page.
    """
    wanted = ["load", "engine", "TTFT p50 ms", "TTFT max ms", "in time", "ITL p99 ms", "decode tokens/s"]
    rows = []
    for row in read_lines_of(result, "vLLM under load"):
        if row["load"] in SHORT_LOADS and not (row["donor_device_bytes"] and row["load"].startswith("nothing")):
            row["in time"] = f"{round(row['arrivals in time'] * row['arrivals'])} of {row['arrivals']}"
            rows.append([cell if isinstance(cell, str) else round(cell) for cell in (row[name] for name in wanted)])
    kept = ("prompts that share", "four a second:", "donor_device_bytes", "balanced repairs")
    notes = [date_note(note) for note in result["notes"] if note.startswith(kept)]
    notes.append(
        "donors on the GPU: all of them, 30 GB. By default those that were used last are there, the others on the host"
    )
    return "\n\n".join([format_table(wanted, rows), "\n".join(f"- {note}" for note in notes), source(result)])


ARM_WORDS = {
    "stock:cold": "stock vLLM", "stock:exact": "stock vLLM, exact hit", "ours:miss": "nothing to reuse",
    "ours:balanced": "`balanced`, second question", "ours:later": "`balanced`, third question", "ours:fast": "`fast`",
}  # fmt: skip


def vllm_pays(result: Result) -> str:
    """Of each length what a user gets with the defaults, beside stock vLLM."""
    rows = read_lines_of(result, "against stock vLLM")
    cold = {row["tokens"]: row["mean ms"] for row in rows if row["arm"] == "stock:cold"}
    names = ["tokens", "prompt", "n", "with reuse", "p50 ms", "mean ms", "p90 ms", "mean over stock"]
    shown = [
        [row["tokens"], ARM_WORDS[row["arm"]], row["n"], f"{row['reused']:.2f}",
         *(round(row[name]) for name in ("p50 ms", "mean ms", "p90 ms")), f"{row['mean ms'] / cold[row['tokens']]:.2f}"]
        for row in rows
        if row["arm"] in ARM_WORDS
    ]  # fmt: skip
    return f"{format_table(names, shown)}\n\n{source(result)}"


def quality(result: Result) -> str:
    """What is computed and what is kept, a line for each setting."""
    rows = []
    for table in result["tables"]:
        if "F1 vs cold" not in table["columns"] or table["columns"][0] != "recipe":
            continue
        at = {name: table["columns"].index(name) for name in ("n", "FLOPs", "KL answer", "F1 vs cold")}
        lines = {row[0]: row for row in table["rows"]}
        shown = [lines[name] for name in ("fast", "balanced", "rerun")]
        rows.append([
            table["title"], shown[1][at["n"]], *(row[at["FLOPs"]] for row in shown[:2]),
            *(str(row[at["KL answer"]]).split(" ")[0] for row in shown[:2]),
            *(str(row[at["F1 vs cold"]]).split(" ")[0] for row in shown),
        ])  # fmt: skip
    names = ["setting", "prompts", "FLOPs, fast", "balanced", "KL, fast", "balanced", "F1, fast", "balanced", "rerun"]
    return f"{format_table(names, rows)}\n\n{source(result)}"


def quality_with_floors(result: Result) -> str:
    """Both noise floors, the rules of peers and ours, a line for each setting and recipe."""
    wanted = ("rerun", "other order", "fast", "CacheBlend-15", "EPIC-16", "attended-10", "product-40", "balanced")
    names = ["n", "FLOPs", "KL answer", "F1 vs cold", "task F1", "harmed"]
    rows = []
    for table in result["tables"]:
        if table["columns"][0] == "recipe":
            lines = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
            kept = [name for name in wanted if name in lines]
            rows += [[table["title"], name, *(lines[name][key] for key in names)] for name in kept]
    return f"{format_table(['setting', 'recipe', *names], rows)}\n\n{source(result)}"


def edited_quality(result: Result) -> str:
    """By edit: how far from cold are other words for it, `fast`, and 10 % in one pass, and what the last costs."""
    names = ["edit", "prompts", "runs", "rerun", "other wording", "`fast`", "10 % in one pass", "20 %", "40 %",
             "10 %: above 0.1", "10 %: F1 against cold", "10 %: of a prefix cache's FLOPs"]  # fmt: skip
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in read_lines_of(result, "Edited histories (FLOPs"):
        found.setdefault(row["edit"], {})[row["recipe"]] = row
    shown = []
    for edit, lines in found.items():
        ten = lines["at-once-10"]
        ways = ("rerun", "other wording", "fast", "at-once-10", "at-once-20", "at-once-40")
        name = edit.replace("_x5", ", five edits since the donor").replace("_x10", ", ten").replace("_", " ")
        shown.append([
            name, ten["n"], ten["runs"],
            *(lines[way]["KL answer"].split(" ")[0] for way in ways), round(ten["KL > 0.1"] * ten["n"]),
            ten["F1 vs cold"].split(" ")[0], ten["of a prefix cache's"],
        ])  # fmt: skip
    return f"{format_table(names, shown)}\n\n{source(result)}"


SHORT: dict[str, Callable[[Result], str]] = {
    "quality_edits_h200": edited_quality,
    "peers": peers, "ttft_h200": ttft, "quality_h200": quality, "vllm_ttft_h200": vllm_ttft,
    "vllm_load_h200": vllm_load, "vllm_pays_h200": vllm_pays, "quality_tinyllama_h200": quality_with_floors,
    "quality_qwen05_h200": quality_with_floors,
}  # fmt: skip


def filled(page: str) -> str:
    """The page with every marked place filled from its result file."""

    def fill(match: re.Match[str]) -> str:
        opening, name, everywhere, closing = match.groups()
        result = json.loads(find_result(name).read_text(encoding="utf-8"))
        body = everything(result, name) if everywhere else SHORT.get(name, first_table)(result)
        return f"{opening}{body}\n{closing}"

    return MARKER.sub(fill, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--show", metavar="NAME", help="print every table of bench/results or research/*/results")
    args = parser.parse_args()
    if args.show:
        print(everything(json.loads(find_result(args.show).read_text(encoding="utf-8")), args.show, math.inf))
        return 0
    stale = []
    wanted = {path: filled(path.read_text(encoding="utf-8")) for path in PAGES}
    wanted[PICTURE] = draw_load(json.loads(find_result("vllm_load_h200").read_text(encoding="utf-8")))
    for path, fresh in wanted.items():
        if not path.exists() or path.read_text(encoding="utf-8") != fresh:
            stale.append(path.name)
            if not args.check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(fresh, encoding="utf-8")
    print(f"{'stale' if args.check else 'rewrote'}: {', '.join(stale) or 'nothing'}", file=sys.stderr)
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
