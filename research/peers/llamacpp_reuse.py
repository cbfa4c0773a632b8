"""Claim: what llama.cpp's cache reuse keeps of a prompt depends on the direction of the edit; ours does not.

    python bench/llamacpp_reuse.py --setup                                     # once: .peers/llamacpp, from PyPI
    PYTHONPATH=src:bench python bench/llamacpp_reuse.py [--quick] [--model FILE.gguf]

Both engines load the same GGUF file, run on one thread and get the same prompts as text. Each case asks its donor, then
its recipient; the recipient is also asked of an empty cache. llama.cpp runs with ``n_cache_reuse`` 0 (its prefix cache
alone) and 32. Tokens are each engine's own counts. An answer is changed where its text is not that of the same engine's
empty cache. Each case is a row of ``--rows`` as soon as an engine is done with it; a second run goes on from there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _report import REPO, Report, fail, progress  # first: it holds the numeric libraries to one thread

# isort: split
from _vllm_runs import Rows

ADAPTER = REPO / "bench" / "peer_adapters" / "llamacpp.py"
ENVIRONMENT = REPO / ".peers" / "llamacpp"
PACKAGE = "xllamacpp==2026.10.11549"
MODEL = "smollm2-135m"
REUSE = (0, 32)
CONTEXT = 4096
SHORT = "Read this.\n"
LONG = "You are an archivist. Read the following text with care, line by line, and answer the question at its end.\n"
MIDDLE = "Note: the text was checked by two readers and is complete.\n"
CHAT = "<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def build_cases(count: int, words: int) -> list[dict[str, Any]]:
    """Return cases of four edits: the head grows, the head shrinks, text appears inside, passages change places."""
    from sembench.manifests.datasets import write_document

    cases: list[dict[str, Any]] = []
    for number in range(count):
        first, second = (write_document(f"llamacpp:{number}:{at}", words) for at in range(2))
        one, two = first.context, second.context
        question = f"\n\n{first.facts[0][0]}"
        other = write_document(f"llamacpp:other:{number}", 60).context
        shapes = {
            "the head grows": (SHORT + one + question, LONG + one + question),
            "the head shrinks": (LONG + one + question, SHORT + one + question),
            "text appears inside": (SHORT + one + "\n" + two + question, SHORT + one + "\n" + MIDDLE + two + question),
            "passages change places": (SHORT + one + "\n" + two + question, SHORT + two + "\n" + one + question),
        }
        for shape, (donor, recipient) in shapes.items():
            texts = {"donor": donor, "recipient": recipient, "other": other}
            prompts = {name: CHAT.format(text=text) for name, text in texts.items()}
            cases.append({"number": len(cases), "words": words, "shape": shape, **prompts})
    return cases


def run_llamacpp(model: str, cases: list[dict[str, Any]], max_tokens: int, rows: Rows) -> None:
    """Give llama.cpp the cases that it has no row of, and add a row for each as it comes."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        fail("llama.cpp is not installed", hint="python bench/llamacpp_reuse.py --setup")
    known = {row["case"] for row in rows.rows if row.get("reuse") == REUSE[-1]}
    left = [case for case in cases if case["number"] not in known]
    if not left:
        return
    work = {"model": model, "reuse": list(REUSE), "max_tokens": max_tokens, "context": CONTEXT, "cases": left}
    with subprocess.Popen([str(python), str(ADAPTER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True) as peer:  # fmt: skip
        assert peer.stdin is not None
        assert peer.stdout is not None
        with peer.stdin as stdin:
            json.dump(work, stdin)
        for line in peer.stdout:
            run = json.loads(line)
            rows.add({"engine": name_llamacpp(run["version"], run["reuse"]), **_label(cases[run["case"]]), **run})
            progress(f"llama.cpp, n_cache_reuse {run['reuse']}: case {run['case']} of {len(cases)}")
    if peer.returncode:
        fail(f"llama.cpp ended with {peer.returncode}", hint=f"run {ADAPTER.name} by hand")


def name_llamacpp(version: str, reuse: int) -> str:
    return f"llama.cpp ({version}), n_cache_reuse {reuse}"


async def run_ours(model: str, cases: list[dict[str, Any]], max_tokens: int, quality: str, rows: Rows) -> None:
    """Ask the embedded engine the same, over its own HTTP routes in this process."""
    import httpx

    from semblend.config import SemBlendConfig
    from semblend.engine.server.config import ServeConfig
    from semblend.engine.server.launch import Launch
    from semblend.engine.server.routes import create_app

    config = SemBlendConfig(embedder="none", quality=quality)
    engine = Launch(ServeConfig(model=model, device="cpu", pool_tokens=2 * CONTEXT)).engine(config)
    engine.start()
    transport = httpx.ASGITransport(create_app(engine))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=600) as http:

            async def ask(prompt: str, tokens: int) -> dict[str, Any]:
                body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
                answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
                receipt = answer["semblend"]
                return {"text": answer["choices"][0]["text"], **{n: receipt[f"{n}_tokens"] for n in KINDS}}

            for case in cases:
                asked = {"engine": f"ours, {quality}", "case": case["number"]}
                if rows.find(**asked):
                    continue
                (await http.post("/flush_cache")).raise_for_status()
                cold = await ask(case["recipient"], max_tokens)
                (await http.post("/flush_cache")).raise_for_status()
                await ask(case["donor"], 1)
                warm = await ask(case["recipient"], max_tokens)
                rows.add({**asked, **_label(case), "cold": cold, "warm": warm})
                progress(f"ours, {quality}: {case['number'] + 1} of {len(cases)}")
    finally:
        engine.close()


def _label(case: dict[str, Any]) -> dict[str, Any]:
    return {"case": case["number"], "words": case["words"], "shape": case["shape"]}


KINDS = ("exact", "reused", "recomputed", "prefill")


def tabulate(rows: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """Return a line for each engine and edit: tokens of the prompts, those not computed, answers changed."""
    sums: dict[tuple[str, str], list[int]] = {}
    last = {(row["engine"], row["case"]): row for row in rows}  # an interrupted case is asked again
    for row in last.values():
        total, kept = _count_ours(row) if row["engine"].startswith("ours") else _count_theirs(row)
        own = sums.setdefault((row["engine"], row["shape"]), [0, 0, 0, 0])
        for at, value in enumerate((1, total, kept, int(row["warm"]["text"] != row["cold"]["text"]))):
            own[at] += value
    return [
        [engine, shape, count, total, kept, kept / total, f"{changed} of {count}"]
        for (engine, shape), (count, total, kept, changed) in sorted(sums.items(), key=lambda one: one[0][0])
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="install llama.cpp below .peers/ and stop")
    parser.add_argument("--model", default="", metavar="FILE", help=f"a GGUF file (default: the pulled {MODEL})")
    parser.add_argument("--documents", type=int, default=4, metavar="N", help="cases of each direction (default: 4)")
    parser.add_argument("--words", type=int, default=120, metavar="N", help="words of a document (default: 120)")
    parser.add_argument("--max-tokens", type=int, default=12, metavar="N", help="of an answer (default: 12)")
    parser.add_argument("--quick", action="store_true", help="one short case of each direction")
    parser.add_argument(
        "--rows", default="bench/results/llamacpp_reuse.rows.jsonl", help="a second run goes on from it"
    )
    parser.add_argument("--tables-only", action="store_true", help="ask nobody, read the rows")
    parser.add_argument("--out", default="bench/results/llamacpp_reuse.json", help="JSON result file; '' writes none")
    args = parser.parse_args()
    if args.setup:
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        subprocess.run([str(ENVIRONMENT / "bin" / "pip"), "install", "-q", PACKAGE], check=True)
        return 0
    if args.quick:
        args.documents, args.words, args.rows, args.out = 1, 80, "/dev/null", ""
    report, rows = Report("llamacpp_reuse", args), Rows(args.rows)
    rows.rows = rows.find(words=args.words)  # prompts of another length are other prompts
    model = args.model or find_gguf()
    if not args.tables_only:
        cases = build_cases(args.documents, args.words)
        run_llamacpp(model, cases, args.max_tokens, rows)
        for quality in ("balanced", "fast"):
            asyncio.run(run_ours(args.model or MODEL, cases, args.max_tokens, quality, rows))
    columns = ["engine", "edit", "cases", "prompt tokens", "not computed", "share", "answers changed"]
    report.table(f"One GGUF ({Path(model).name}), the same prompts", columns, tabulate(rows.rows))
    report.note(
        "n_cache_reuse looks for the rest of the prompt further on in the slot, so it moves what follows a deletion; "
        "not computed counts exact and moved tokens"
    )
    report.write(args.out)
    return 0


def find_gguf() -> str:
    from semblend.models import find_model, find_pulled_path, is_pulled

    found = find_model(MODEL)
    if not is_pulled(found):
        fail(f"{MODEL} is not here", hint=f"semblend models pull {MODEL}, or --model FILE.gguf")
    return str(find_pulled_path(found))


def _count_theirs(row: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens of the prompt and those that were not computed."""
    total = row["cold"]["computed_tokens"] + row["cold"]["cached_tokens"]
    return total, total - row["warm"]["computed_tokens"]


def _count_ours(row: dict[str, Any]) -> tuple[int, int]:
    return sum(row["cold"][kind] for kind in KINDS), row["warm"]["exact"] + row["warm"]["reused"]


if __name__ == "__main__":
    raise SystemExit(main())
