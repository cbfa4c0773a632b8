"""llama.cpp in a process of its own (PyPI ``xllamacpp``): what its cache reuse keeps, and what it answers.

A JSON object on standard input: ``model`` (a GGUF file), ``reuse`` (values of ``n_cache_reuse``), ``max_tokens``,
``context`` and ``cases`` of ``number``, ``donor``, ``recipient`` and ``other``. On standard output one JSON line for
each case and value, as soon as it is measured: the answer of an empty cache, the answer after the donor, and
llama.cpp's own counts of both.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from importlib.metadata import version
from typing import Any


def start(model: str, reuse: int, context: int) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = context
    params.n_parallel = 1
    params.n_cache_reuse = reuse
    params.cache_ram_mib = 0  # earlier prompts are not kept beside the slot: what is reused lies in the slot
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.port = 0
    return xllamacpp.Server(params)


def ask(server: Any, prompt: str, max_tokens: int, *, cached: bool) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0, "cache_prompt": cached, "seed": 1}
    request = urllib.request.Request(
        f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        found = json.loads(answer.read())
    timings = found["timings"]
    return {
        "text": found["content"],
        "computed_tokens": timings["prompt_n"],
        "cached_tokens": timings.get("cache_n", 0),
        "prefill_ms": timings["prompt_ms"],
    }


def main() -> int:
    work = json.load(sys.stdin)
    servers = {reuse: start(work["model"], reuse, work["context"]) for reuse in work["reuse"]}
    for case in work["cases"]:
        cold = ask(next(iter(servers.values())), case["recipient"], work["max_tokens"], cached=False)
        for reuse, server in servers.items():
            ask(server, case["other"], 1, cached=True)  # the slot holds an unrelated prompt now
            ask(server, case["donor"], 1, cached=True)
            warm = ask(server, case["recipient"], work["max_tokens"], cached=True)
            run = {"reuse": reuse, "case": case["number"], "cold": cold, "warm": warm, "version": version("xllamacpp")}
            print(json.dumps(run), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
