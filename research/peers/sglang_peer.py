"""Claim: we reuse more than semblend 0.3.25's patch of SGLang, and never KV of a token that is not the prompt's.

    pip install --no-deps --target PEERS/semblend-0.3.25 semblend==0.3.25
    pip install --no-deps --target PEERS/sglang-0.5.12 sglang==0.5.12
    python bench/sglang_peer.py --data-dir DATA --model FOLDER --peers PEERS --python .engines/sglang/bin/python \\
        --minilm FOLDER-OF-all-MiniLM-L6-v2

In SGLang 0.5.23 the hooks that the patch overrides are gone: the first table says which, and what happens. So its
cache is driven in SGLang 0.5.12, whose hooks it fits, on SGLang's own RadixCache without a model: donors
finish, queries come, and each slot that a query is handed is compared with the query's token at that place. Its
embeddings are its own (MiniLM). Ours is the lookup that the SGLang integration asks, for the same donors and queries.
Queries: the prompts of `bench/quality.py`, and for each document one whose donor nobody registered.
"""

from __future__ import annotations

import _report  # first: it holds the numeric libraries to one thread

# isort: split
import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from _oracle import SharedRuns
from _quality_cases import Case, cases

from semblend import Prompt, ReusePlan, SemBlend, SemBlendConfig

SETTINGS = ["one_document", "edits", "several", "reordered"]
STRANGER = "no donor"
SAMPLE = 2000
"""Tokens that the package decodes for an embedding, of a longer prompt."""


def read_cases(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Donors and queries; the last case of each setting is asked without its donors."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))
    made: dict[str, dict[str, Case]] = defaultdict(dict)
    for case in cases(
        _report.data_dir(args), lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        scenarios=SETTINGS, prompts=args.prompts * 5, tokens=args.tokens, seed=args.seed,
    ):  # fmt: skip
        if len(made[case.scenario]) <= args.prompts:  # one for each document
            made[case.scenario].setdefault(case.cluster, case)
    donors, queries = [], []
    for scenario, found in made.items():
        *known, stranger = found.values()
        donors += [
            {"id": f"{case.case_id}#{at}", "tokens": list(donor)}
            for case in known
            for at, donor in enumerate(case.donors)
        ]
        queries += [{"id": case.case_id, "kind": scenario, "tokens": list(case.tokens)} for case in known]
        queries.append({"id": stranger.case_id, "kind": STRANGER, "tokens": list(stranger.tokens)})
    for prompt in [*donors, *queries]:
        prompt["text"] = tokenizer.decode(sample(prompt["tokens"]), skip_special_tokens=True)
    return donors, queries


def sample(tokens: list[int]) -> list[int]:
    """The tokens that the package embeds: all, or head, middle and tail."""
    if len(tokens) <= SAMPLE:
        return tokens
    head, middle = int(SAMPLE * 0.4), int(SAMPLE * 0.3)
    start = (len(tokens) - middle) // 2
    return tokens[:head] + tokens[start : start + middle] + tokens[-(SAMPLE - head - middle) :]


def embed(args: argparse.Namespace, prompts: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The package's own embedder, over the weights in ``--minilm``; kept in a file, it takes seconds a prompt."""
    path = Path(args.vectors)
    known: dict[str, list[float]] = json.loads(path.read_text()) if path.exists() else {}
    missing = [prompt for prompt in prompts if name_of(prompt["tokens"]) not in known]
    if missing:
        sys.path.append(str(Path(args.peers) / "semblend-0.3.25"))
        from semblend_core.embedder import MiniLMEmbedder

        sys.path.pop()  # our library refuses to work beside that distribution
        MiniLMEmbedder.MODEL_NAME = args.minilm
        embedder = MiniLMEmbedder()
        for number, prompt in enumerate(missing):
            vector = embedder.embed(prompt["text"])
            if vector is None:
                _report.fail("MiniLM cannot be loaded", hint="--minilm is a folder for sentence-transformers")
            known[name_of(prompt["tokens"])] = [float(value) for value in vector]
            path.write_text(json.dumps(known))
            _report.progress(f"embedded {number + 1} of {len(missing)}")
    return known


def name_of(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def run_peer(args: argparse.Namespace, given: dict[str, Any], *folders: str, probe: bool = False) -> dict[str, Any]:
    """The adapter in SGLang's environment, with these folders of ``--peers`` found first."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, out = Path(folder, "cases.json"), Path(folder, "found.json")
        wanted.write_text(json.dumps(given))
        paths = [str(Path(args.peers).resolve() / name) for name in folders]
        adapter = Path(__file__).resolve().parent / "peer_adapters" / "semblend_0325_radix.py"
        command = [args.python, "-W", "ignore", str(adapter), "--cases", str(wanted), "--out", str(out)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "SGLANG_PLUGINS": "none"}
        subprocess.run([*command, *(["--probe"] if probe else [])], env=environment, check=True, stdout=sys.stderr)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def read_peer(answer: dict[str, Any]) -> dict[str, list[tuple[str, int, int]]]:
    """For each query: (donor, place in the donor, place in the query) of every token it is handed behind exact hits."""
    return {
        query["id"]: [(donor, at, place) for place, (donor, at) in enumerate(query["slots"]) if place >= query["exact"]]
        for query in answer["queries"]
    }


def ask_ours(donors: list[dict[str, Any]], queries: list[dict[str, Any]]) -> dict[str, list[tuple[str, int, int]]]:
    """The same from our lookup."""
    blend = SemBlend(SemBlendConfig(embedder="none", max_donors=len(donors) + 1, max_bytes=4 << 30))
    for donor in donors:
        blend.register(Prompt(donor["tokens"]), donor_id=donor["id"])
    found = {}
    for query in queries:
        plan = blend.lookup(Prompt(query["tokens"]))
        spans = plan.spans if isinstance(plan, ReusePlan) else ()
        found[query["id"]] = [
            (span.donor_id, span.donor_start + at, span.target_start + at)
            for span in spans
            for at in range(span.length)
        ]
    return found


def tabulate(
    name: str,
    found: dict[str, list[tuple[str, int, int]]],
    donors: list[dict[str, Any]],
    queries: list[dict[str, Any]],
) -> list[list[Any]]:
    """A line for each kind of query."""
    tokens = {donor["id"]: donor["tokens"] for donor in donors}
    runs = SharedRuns([np.array(donor["tokens"], np.int32) for donor in donors])
    lines = []
    for kind in [*SETTINGS, STRANGER]:
        asked = [query for query in queries if query["kind"] == kind]
        handed = equal = shared = total = hits = 0
        for query in asked:
            claims = found[query["id"]]
            same = sum(tokens[donor][at] == query["tokens"][place] for donor, at, place in claims)
            handed, equal, hits = handed + len(claims), equal + same, hits + bool(claims)
            shared += int(np.count_nonzero(runs.covered(np.array(query["tokens"], np.int32))))
            total += len(query["tokens"])
        lines.append([name, kind, len(asked), total, shared, hits, handed, equal, handed - equal])
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _report.add_common_arguments(parser, "sglang_peer")
    parser.add_argument("--model", required=True, help="a Hugging Face folder; only its tokenizer is read")
    parser.add_argument("--peers", required=True, help="folder with semblend-0.3.25 and sglang-0.5.12")
    parser.add_argument("--python", required=True, help="the interpreter of an environment with SGLang 0.5.23")
    parser.add_argument("--minilm", required=True, help="folder of all-MiniLM-L6-v2 for sentence-transformers")
    parser.add_argument("--vectors", default=str(Path(tempfile.gettempdir()) / "sglang_peer_vectors.json"))
    parser.add_argument("--prompts", type=int, default=6, help="documents of each setting that have donors")
    parser.add_argument("--tokens", type=int, default=900)
    args = parser.parse_args()
    donors, queries = read_cases(args)
    given = {"donors": donors, "queries": queries, "vectors": embed(args, [*donors, *queries])}
    report = _report.Report("sglang_peer", args)
    facts = run_peer(args, given, "semblend-0.3.25", probe=True)
    report.table(
        f"semblend 0.3.25's patch on SGLang {facts['sglang']}",
        ["what was looked at", "what was found"],
        [[name, value] for name, value in facts["found"].items()],
    )
    driven = run_peer(args, given, "sglang-0.5.12", "semblend-0.3.25")
    report.table(
        f"What a query is handed behind exact hits, of {len(donors)} donors",
        ["system", "queries", "n", "tokens", "shared with a donor", "served", "tokens handed", "equal", "not equal"],
        [
            *tabulate(
                f"semblend 0.3.25 on SGLang {driven['sglang']}'s RadixCache",
                read_peer(driven["found"]),
                donors,
                queries,
            ),
            *tabulate("this project's lookup", ask_ours(donors, queries), donors, queries),
        ],
    )
    report.add("peer_stats", driven["found"]["stats"])
    report.note("shared with a donor: tokens in runs of 32 or more that some donor holds, at any place")
    report.note("equal: the KV that is handed over is of the query's own token; not equal: of another token")
    report.note("a RadixCache of SGLang without a model: no answer was computed, slots were compared")
    report.write(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
