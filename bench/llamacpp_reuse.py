"""Claim: what llama.cpp's cache reuse keeps of a prompt depends on the direction of the edit; ours does not.

    python bench/llamacpp_reuse.py --setup                                     # once: .peers/llamacpp, from PyPI
    PYTHONPATH=src:bench python bench/llamacpp_reuse.py [--quick] [--model FILE.gguf]

Both engines load the same GGUF file, run on one thread and get the same prompts as text. Each case asks its donor, then
its recipient; the recipient is also asked of an empty cache. llama.cpp runs with ``n_cache_reuse`` 0 (its prefix cache
alone) and 32. Tokens are each engine's own counts. An answer is changed where its text is not that of the same engine's
empty cache.
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


def build_cases(count: int, words: int) -> list[dict[str, str]]:
    """Return cases of four edits: the head grows, the head shrinks, text appears inside, passages change places."""
    from sembench.manifests.writer import write_document

    cases = []
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
            cases.append({"shape": shape, **{name: CHAT.format(text=text) for name, text in texts.items()}})
    return cases


def run_llamacpp(model: str, cases: list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        fail("llama.cpp is not installed", hint="python bench/llamacpp_reuse.py --setup")
    work = {"model": model, "reuse": list(REUSE), "max_tokens": max_tokens, "context": CONTEXT, "cases": cases}
    done = subprocess.run(
        [str(python), str(ADAPTER)], input=json.dumps(work), capture_output=True, text=True, check=False
    )
    if done.returncode:
        fail(f"llama.cpp failed: {done.stderr[-300:]}", hint="run the adapter by hand")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def run_ours(model: str, cases: list[dict[str, str]], max_tokens: int, quality: str) -> list[dict[str, Any]]:
    """Ask the embedded engine the same, over its own HTTP routes in this process."""
    import httpx

    from semblend.config import SemBlendConfig
    from semblend.engine.server.config import ServeConfig
    from semblend.engine.server.launch import Launch
    from semblend.engine.server.routes import create_app

    config = SemBlendConfig(embedder="none", quality=quality)
    engine = Launch(ServeConfig(model=model, device="cpu", pool_tokens=2 * CONTEXT)).engine(config)
    engine.start()
    rows = []
    transport = httpx.ASGITransport(create_app(engine))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=600) as http:

            async def ask(prompt: str, tokens: int) -> dict[str, Any]:
                body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
                answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
                receipt = answer["semblend"]
                return {"text": answer["choices"][0]["text"], **{n: receipt[f"{n}_tokens"] for n in KINDS}}

            for number, case in enumerate(cases):
                (await http.post("/flush_cache")).raise_for_status()
                cold = await ask(case["recipient"], max_tokens)
                (await http.post("/flush_cache")).raise_for_status()
                await ask(case["donor"], 1)
                rows.append({"case": number, "cold": cold, "warm": await ask(case["recipient"], max_tokens)})
                progress(f"ours, {quality}: {number + 1} of {len(cases)}")
    finally:
        engine.close()
    return rows


KINDS = ("exact", "reused", "recomputed", "prefill")


def tabulate(name: str, shapes: list[str], rows: Iterable[tuple[int, int, int, bool]]) -> list[list[Any]]:
    """Return a row for each direction: tokens of the prompts, tokens not computed, their share, answers changed."""
    sums: dict[str, list[int]] = {}
    for case, total, kept, changed in rows:
        own = sums.setdefault(shapes[case], [0, 0, 0, 0])
        for at, value in enumerate((1, total, kept, int(changed))):
            own[at] += value
    return [
        [name, shape, count, total, kept, kept / total, f"{changed} of {count}"]
        for shape, (count, total, kept, changed) in sums.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="install llama.cpp below .peers/ and stop")
    parser.add_argument("--model", default="", metavar="FILE", help=f"a GGUF file (default: the pulled {MODEL})")
    parser.add_argument("--documents", type=int, default=4, metavar="N", help="cases of each direction (default: 4)")
    parser.add_argument("--words", type=int, default=300, metavar="N", help="words of a document (default: 300)")
    parser.add_argument("--max-tokens", type=int, default=16, metavar="N", help="of an answer (default: 16)")
    parser.add_argument("--quick", action="store_true", help="one short case of each direction")
    parser.add_argument("--out", default="bench/results/llamacpp_reuse.json", help="JSON result file; '' writes none")
    args = parser.parse_args()
    if args.setup:
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        subprocess.run([str(ENVIRONMENT / "bin" / "pip"), "install", "-q", PACKAGE], check=True)
        return 0
    report = Report("llamacpp_reuse", args)
    cases = build_cases(1 if args.quick else args.documents, 80 if args.quick else args.words)
    shapes = [case.pop("shape") for case in cases]
    model = args.model or find_gguf()
    theirs = run_llamacpp(model, cases, args.max_tokens)
    rows: list[list[Any]] = []
    for reuse in REUSE:
        name = f"llama.cpp ({theirs['version']}), n_cache_reuse {reuse}"
        rows += tabulate(name, shapes, (_read_theirs(run) for run in theirs["runs"] if run["reuse"] == reuse))
    for quality in ("balanced", "fast"):
        ours = asyncio.run(run_ours(args.model or MODEL, cases, args.max_tokens, quality))
        rows += tabulate(f"ours, {quality}", shapes, (_read_ours(run) for run in ours))
    columns = ["engine", "edit", "cases", "prompt tokens", "not computed", "share", "answers changed"]
    report.table(f"One GGUF ({Path(model).name}), the same prompts", columns, rows)
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


def _read_theirs(run: dict[str, Any]) -> tuple[int, int, int, bool]:
    cold, warm = run["cold"], run["warm"]
    total = cold["computed_tokens"] + cold["cached_tokens"]
    return run["case"], total, total - warm["computed_tokens"], warm["text"] != cold["text"]


def _read_ours(run: dict[str, Any]) -> tuple[int, int, int, bool]:
    cold, warm = run["cold"], run["warm"]
    kept = warm["exact"] + warm["reused"]
    return run["case"], sum(cold[kind] for kind in KINDS), kept, warm["text"] != cold["text"]


if __name__ == "__main__":
    raise SystemExit(main())
