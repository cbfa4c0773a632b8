"""The tables of the texts that this project follows, with our figures beside theirs; nothing is measured here.

    PYTHONPATH=src:bench python bench/source_tables.py [--out bench/results/source_tables.json]

Theirs are the figures that the README and the 0.1.0 package of semblend state: Qwen2.5-7B-AWQ on an A10G with vLLM
0.14.1 and LMCache. Ours are read from bench/results, and every row says on which machine and model. Where several runs
measured a row, the newest one counts, better or worse, and the row names it. Ratios may be compared across machines
with care, milliseconds may not: a faster GPU has less to save.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from _report import RESULTS, Report, get_day, progress, read_lines_of, read_results

A10G = "A10G, Qwen2.5-7B-AWQ, vLLM 0.14.1 + LMCache"
H200_SHAPE = "H200, shape of Qwen2.5-7B, vLLM 0.26.0"
H200_HTTP = "H200, Qwen2.5-Coder-1.5B, vLLM 0.26.0, HTTP"
H200_ENGINE = "H200, Qwen2.5-Coder-1.5B, embedded engine"
PLACES = {"host": "donors in host memory", "device": "donors on the GPU"}
VLLM_TTFT = "Time to first token in vLLM"
HTTP_DATA_SETS = "through an HTTP server, by data set"
CPU = "2 cores, SmolLM2-135M, semblend serve"

# -- what the texts state -------------------------------------------------------------------------------------------
TTFT = {4096: (2102, 433, 4.9), 8192: (3816, 539, 7.1), 12288: (5655, 648, 8.7), 16384: (7635, 760, 10.0),
        24576: (11977, 972, 12.3)}  # fmt: skip
OLD_TTFT = {4096: (1859, 801, 2.3), 8192: (3193, 817, 3.9), 16384: (5852, 871, 6.7), 32768: (15418, 1288, 12.0)}
OLD_MISSES = {4096: (1859, 1864), 8192: (3193, 3315), 16384: (5852, 6064)}
SPEEDUP = {("XSum", 8192): 7.1, ("XSum", 16384): 10.0, ("XSum", 24576): 12.3, ("CNN/DailyMail", 8192): 7.1,
           ("CNN/DailyMail", 16384): 9.4, ("CNN/DailyMail", 24576): 12.2, ("MultiNews", 16384): 9.3}  # fmt: skip
OLD_PPL = {"XSum": 1.025, "CNN/DailyMail": 1.006, "MultiNews": 1.007, "WikiHow": 1.012}
PPL = {"XSum": "1.018-1.054", "CNN/DailyMail": "1.011-1.049", "MultiNews": "0.958-1.064", "SAMSum": "1.140-1.198",
       "WikiHow": "0.987-1.037"}  # fmt: skip
JUDGED = {"XSum": (0.84, 0.84), "CNN/DailyMail": (0.87, 0.86), "WikiHow": (0.82, 0.84), "MultiNews": (0.79, 0.78),
          "SAMSum": (0.78, 0.86)}  # fmt: skip
HIT_RATES = {"CNN/DailyMail": (0.50, 2.29, 2.39), "MultiNews": (0.75, 2.23, 2.23), "SAMSum": (0.88, 2.37, 2.37)}
CHATS = (("WildChat, 4k characters or more", 250, 0.292, 1.63), ("WildChat, 8k characters or more", 150, 0.300, 1.88))
TURNS = {"turn 1": (None, 1.0), "turn 2": (0.995, 5.1), "turn 3": (0.995, 5.1)}
ENGINE_NAMES = {"XSum": "xsum", "CNN/DailyMail": "cnndm", "MultiNews": "multi_news", "SAMSum": "samsum"}


def read_table(name: str, words: str) -> list[dict[str, Any]]:
    """Return the rows of the first table of a result whose title has these words; none where nobody measured it."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        progress(f"{path.name} is not here; its rows are left out")
        return []
    result = json.loads(path.read_text(encoding="utf-8"))
    for table in result["tables"]:
        if words in table["title"]:
            return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    return []


def read_newest(words: str, keys: tuple[str, ...]) -> dict[tuple[Any, ...], tuple[str, dict[str, Any]]]:
    """Of all results with such a table, each row by these columns, as the newest run has it, with that run's name."""
    found = {}
    for name, result in read_results(words, RESULTS).items():  # the oldest first
        for row in read_lines_of(result, words):
            found[tuple(row[key] for key in keys)] = f"{name}, {get_day(result)[:10]}", row
    return found


def show_ttft(report: Report) -> None:
    rows: list[list[Any]] = [[tokens, "theirs", A10G, *own, "README"] for tokens, own in TTFT.items()]
    rows += [[tokens, "theirs, 0.1.0", A10G, *own, "0.1.0"] for tokens, own in OLD_TTFT.items()]
    found = read_newest(VLLM_TTFT, ("tokens", "engine", "arm"))
    for (tokens, engine, arm), (run, row) in found.items():
        if tokens in {*TTFT, *OLD_TTFT} and engine in PLACES and arm in ("fast", "balanced"):
            cold = row["p50 ms"] * row["times faster than stock cold"]
            rows.append(
                [tokens, f"ours, {arm}, {PLACES[engine]}", H200_SHAPE, cold, row["p50 ms"], cold / row["p50 ms"], run]
            )
    rows.sort(key=lambda row: (row[0], "theirs" not in row[1], PLACES["device"] in row[1]))
    columns = ["tokens", "whose", "machine and model", "cold ms", "hit ms", "times faster", "run"]
    report.table("Time to first token by length", columns, rows)
    report.note("host memory is the default; donors on the GPU need donor_device_bytes")
    report.note("cold in the run vllm_ttft_pieces_h200 is our engine, opted out; in the other it is stock vLLM")


def show_misses(report: Report) -> None:
    rows: list[list[Any]] = [
        [tokens, "theirs, 0.1.0", A10G, cold, miss, miss / cold - 1, "0.1.0"]
        for tokens, (cold, miss) in OLD_MISSES.items()
    ]
    for (tokens, engine, arm), (run, row) in read_newest(VLLM_TTFT, ("tokens", "engine", "arm")).items():
        if arm == "miss" and engine in PLACES:
            cold = row["p50 ms"] * row["times faster than stock cold"]
            rows.append([tokens, f"ours, p50, {PLACES[engine]}", H200_SHAPE, cold, row["p50 ms"],
                         row["p50 ms"] / cold - 1, run])  # fmt: skip
    arms = read_newest("through an HTTP server, by length", ("tokens", "arm"))
    for (tokens, arm), (run, row) in arms.items():
        for key in ("p50", "mean", "p90") if arm == "miss" else ():
            cold, miss = (arms[tokens, name][1][f"{key} ms"] for name in ("cold", "miss"))
            rows.append(
                [tokens, f"ours, {key}, {PLACES[row['donors in']]}", H200_HTTP, cold, miss, miss / cold - 1, run]
            )
    rows.sort(key=lambda row: (row[0], "theirs" not in row[1]))
    columns = ["tokens", "whose", "machine and model", "cold ms", "miss ms", "overhead", "run"]
    report.table("What a prompt costs that finds nothing", columns, rows)
    report.note("misses over HTTP: other texts of the same data set, of which some shared a little with the donor")


def show_data_sets(report: Report) -> None:
    rows = []
    found = read_newest(HTTP_DATA_SETS, ("data set", "tokens", "mode"))
    for name in ENGINE_NAMES:
        for tokens in (8192, 16384, 24576):
            ours = {mode: found[name, tokens, mode] for mode in ("fast", "balanced") if (name, tokens, mode) in found}
            if not ours:
                continue
            lines = {mode: row for mode, (_, row) in ours.items()}
            hits = [f"{lines[mode]['hits']} of {lines[mode]['n']}" for mode in lines]
            cells = {key: [row[key] for row in lines.values()]
                     for key in ("hit-only speed-up", "overall speed-up", "PPL ratio")}  # fmt: skip
            rows.append([name, tokens, SPEEDUP.get((name, tokens)), *cells["hit-only speed-up"], *hits,
                         *cells["overall speed-up"], PPL[name], *cells["PPL ratio"], ours["fast"][0]])  # fmt: skip
    columns = ["data set", "tokens", "hits alone, times faster: theirs", "ours, fast", "ours, balanced", "hits, fast",
               "hits, balanced", "all prompts, times faster: ours, fast", "ours, balanced", "PPL ratio: theirs, range",
               "ours, fast", "ours, balanced", "run"]  # fmt: skip
    title = f"Hits alone and PPL ratio by data set. Theirs: {A10G}. Ours: {H200_HTTP}"
    report.table(title, columns, rows)
    report.note("all prompts: every second one has a donor; below 1 is slower than without us")


def show_quality(report: Report) -> None:
    rows: list[list[Any]] = []
    found = read_table("quality_h200", "By data set")
    for name in PPL:
        own = [row for row in found if row["data set"] == ENGINE_NAMES.get(name)]
        cells = {row["recipe"]: row for row in own}
        ours = [cells[mode]["PPL ratio"] if mode in cells else None for mode in ("rerun", "fast", "balanced")]
        faithful = [cells[mode]["faithful"] if mode in cells else None for mode in ("fast", "balanced")]
        tokens = round(cells["cold"]["tokens"]) if cells else None
        rows.append([name, PPL[name], OLD_PPL.get(name), *JUDGED[name], tokens, *ours, *faithful])
    columns = ["data set", "PPL ratio: theirs", "PPL ratio: 0.1.0", "judge, cold: theirs", "judge, reuse: theirs",
               "tokens: ours", "PPL, cold again", "PPL, fast", "PPL, balanced", "faithful, fast",
               "faithful, balanced"]  # fmt: skip
    report.table(f"Quality by data set, short prompts. Ours: {H200_ENGINE}", columns, rows)
    report.note("faithful (ours): KL of the answer from cold at most 0.1, word F1 against cold at least 0.5")
    report.note(
        "SAMSum and MultiNews are the hard shapes here: dialogues from three earlier prompts, articles in another "
        "order; XSum and CNN/DailyMail are one article under another instruction"
    )
    report.note(
        "WikiHow is left out: its makers hand the texts out as a file to fetch by hand, so no script can bring it; an "
        "article under another instruction is the class of XSum and CNN/DailyMail"
    )


def show_hit_rates(report: Report) -> None:
    rows: list[list[Any]] = [[name, "theirs", A10G, *own, "0.1.0"] for name, own in HIT_RATES.items()]
    for (name, tokens, mode), (run, row) in read_newest(HTTP_DATA_SETS, ("data set", "tokens", "mode")).items():
        if tokens == 8192 and name in HIT_RATES:
            share = row["hits"] / (2 * row["n"])
            cells = [share, row["overall speed-up"], row["hit-only speed-up"], run]
            rows.append([name, f"ours, {mode}", H200_HTTP, *cells])
    rows.sort(key=lambda row: row[0])
    columns = ["data set", "whose", "machine and model", "hit rate", "overall", "hits alone", "run"]
    report.table("Hit rate and times faster at 8k tokens", columns, rows)
    report.note("ours: every second prompt has a donor, so a hit rate of 0.5 is all that can be had")


def show_chats(report: Report) -> None:
    theirs: list[list[Any]] = [[name, "theirs", A10G, n, rate, None, speed, None] for name, n, rate, speed in CHATS]
    theirs += [[f"dialogue, {turn}", "theirs", A10G, None, rate, None, speed, None]
               for turn, (rate, speed) in TURNS.items()]  # fmt: skip
    ours = []
    for row in read_table("chats", "ShareGPT"):
        name = "ShareGPT, all requests" if row["request"] == "all" else f"ShareGPT, {row['request']}"
        ours.append([name, "ours, balanced", CPU, row["n"], row["exact hits"], row["moved hits"],
                     row["TTFT, hits alone"], row["CPU time, hits alone"]])  # fmt: skip
    columns = ["requests", "whose", "machine and model", "n", "hit rate (ours: prefix cache)", "hit rate (ours: moved)",
               "TTFT, hits alone", "CPU time, hits alone"]  # fmt: skip
    report.table("Real chats and dialogue by turn", columns, [*theirs, *ours])
    report.note(
        "theirs counts a request as a hit where an earlier prompt looks alike (cosine 0.6 or more); ours counts tokens "
        "that are equal, by the receipt, and tells the prefix cache's hits from moved ones"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(Path("bench/results/source_tables.json")), help="'' writes none")
    args = parser.parse_args()
    report = Report("source_tables", args)
    for show in (show_ttft, show_misses, show_data_sets, show_quality, show_hit_rates, show_chats):
        show(report)
    report.write(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
