"""Which of the text models that came into vLLM's recipes in 2026 are served: by their architecture, and as written.

    PYTHONPATH=src python research/vllm/recipes.py OUT.jsonl --checkout RECIPES   (a git folder; needs node and PyYAML)
    PYTHONPATH=src python research/vllm/recipes.py ROWS.jsonl                     (rows that are there, judged again)

A command is what the page of a recipe shows when it is opened: its own code (src/lib/command-synthesis.js) puts it
together, for the default variant, hardware, strategy and features. What a model is stands in recipe_models.jsonl: of
configs only what decides, of layers one period, and where it is known from. The verdicts are those of
`semblend.integration.vllm.refusals`, which decides at an engine's start. Facts are taken of the recipes, no text; they
are at https://github.com/vllm-project/recipes, Apache-2.0.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shlex
import subprocess
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from semblend.integration.vllm import refusals

MODELS = Path(__file__).with_name("recipe_models.jsonl")
SINCE = "2026-01-01"
KINDS = ("full attention", "windows beside full", "latent (MLA)", "sparse", "recurrent", "recurrent and latent")
VERDICTS = ("architecture", "as written", "with one flag", "with fp8 KV", "with both", "with both and its speculation")
SHOW = """
import * as page from './page.mjs'; import fs from 'fs';
const {recipes, strategies, taxonomy} = JSON.parse(fs.readFileSync('all.json')), out = {};
for (const [name, one] of Object.entries(recipes)) {
  const variant = one.variants?.default || {}, machines = taxonomy.hardware_profiles;
  const machine = page.pickDefaultHardware(machines, variant, one);
  const strategy = page.recommendStrategy(one, machines[machine], 1);
  const off = new Set([...(one.opt_in_features || []), ...((one.hardware_opt_in_features || {})[machine] || [])]);
  for (const feature of Object.keys(variant.default_modes || {})) off.delete(feature);
  const all = Object.keys(one.features || {});
  const show = on => page.resolveCommand(one, 'default', strategy, machine, on, strategies, taxonomy).command;
  const asked = all.includes('spec_decoding') ? [...new Set([...all.filter(f => !off.has(f)), 'spec_decoding'])] : null;
  out[name] = {machine, strategy, command: show(all.filter(f => !off.has(f))), speculating: asked && show(asked)};
}
console.log(JSON.stringify(out));
"""


def read_recipes(checkout: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """The commit, and of each text model since `SINCE`: when it came, and the commands of its page."""
    import yaml

    def git(*words: str) -> bytes:
        return subprocess.run(["git", "-C", str(checkout), *words], check=True, capture_output=True).stdout

    commit = git("rev-parse", "HEAD").decode().strip()
    found: dict[str, Any] = {"recipes": {}, "strategies": {}}
    with tempfile.TemporaryDirectory() as name, tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as tree:
        folder = Path(name)
        tree.extractall(folder, filter="data")
        for kind, place in (("recipes", folder / "models"), ("strategies", folder / "strategies")):
            for file in place.rglob("*.yaml"):
                found[kind][str(file.relative_to(place)).removesuffix(".yaml")] = yaml.safe_load(file.read_text())
        found["taxonomy"] = yaml.safe_load((folder / "taxonomy.yaml").read_text())
        dates = {}
        for path, one in list(found["recipes"].items()):
            date = one["meta"].get("date_added")
            if date is None:  # nobody wrote it down: when the file came
                date = git("log", "--diff-filter=A", "--format=%as", "--", f"models/{path}.yaml").decode().split()[-1]
            if str(date) < SINCE or "text" not in (one["meta"].get("tasks") or ()):
                del found["recipes"][path]
            dates[path] = str(date)
        (folder / "page.mjs").write_bytes((folder / "src/lib/command-synthesis.js").read_bytes())
        (folder / "all.json").write_text(json.dumps(found, default=str))
        (folder / "show.mjs").write_text(SHOW)
        shown = subprocess.run(["node", "show.mjs"], cwd=folder, check=True, capture_output=True).stdout
    return commit, {path: {"added": dates[path], **one} for path, one in json.loads(shown).items()}


def read_flags(command: str | None) -> dict[str, Any] | None:
    """What of a command decides, the last of each flag: the type of the KV cache, speculation, ranks."""
    if command is None:
        return None
    flags: dict[str, str] = {}
    words = shlex.split(command.replace("\\\n", " "))
    for at, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            behind = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else ""
            flags[name] = value if equals else behind
    draft = json.loads(flags.get("--speculative-config") or "null")
    method = flags.get("--speculative-config.method") or (draft and (draft.get("method") or "draft_model"))
    ranks = {kind: int(flags.get(f"--{kind}-parallel-size") or 1) for kind in ("tensor", "pipeline", "data")}
    return {
        "kv": flags.get("--kv-cache-dtype") or "auto",
        "speculation": "mtp" if method and method.endswith("mtp") else method,  # vLLM calls them all so
        "ranks": {kind: count for kind, count in ranks.items() if count > 1},
        "expert parallel": "--enable-expert-parallel" in flags,
    }


def name_kind(config: dict[str, Any]) -> str:
    text = config.get("text_config") or config
    latent = bool(text.get("kv_lora_rank"))
    if refusals.refuse_config(config) == refusals.NEVER_RECURRENT:
        return "recurrent and latent" if latent else "recurrent"
    if text.get("index_topk"):
        return "sparse"
    return "latent (MLA)" if latent else KINDS["sliding_attention" in (text.get("layer_types") or ())]


def list_groups(kind: str, mixed: bool) -> list[Any]:
    """The KV groups of an engine: of windows beside full layers two, where vLLM's hybrid KV manager is on."""

    def group(name: str, **more: Any) -> Any:
        spec = type(name, (), {"page_size_bytes": 1, "block_size": 16, **more})()
        return SimpleNamespace(kv_cache_spec=spec, layer_names=[name])

    if kind == "latent (MLA)":
        return [group("MLAAttentionSpec")]
    window = [group("SlidingWindowSpec", sliding_window=512)] if kind == "windows beside full" and mixed else []
    return [group("FullAttentionSpec"), *window]


def refuse(config: dict[str, Any], flags: dict[str, Any], *, one_flag: bool = False, fp8: bool = False) -> str | None:
    """Why an engine that is started so is not served."""
    if why := refusals.refuse_config(config):
        return why
    plain = fp8 and flags["kv"].startswith("fp8")
    method = flags["speculation"]
    parallel = {f"{kind}_parallel_size": flags["ranks"].get(kind, 1) for kind in ("tensor", "pipeline", "data")}
    draft = SimpleNamespace(method=method, parallel_drafting=method in ("dflash", "dspark")) if method else None
    engine = SimpleNamespace(
        lora_config=None,
        speculative_config=draft,
        cache_config=SimpleNamespace(cache_dtype="auto" if plain else flags["kv"]),
        model_config=SimpleNamespace(max_model_len=32768),
    )
    return (
        refusals._refuse_ranks(SimpleNamespace(**parallel))
        or refusals._refuse_features(engine)
        or refusals._refuse_cache(engine, list_groups(name_kind(config), mixed=not one_flag))
    )


def judge(row: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """A row with its verdicts: "yes", or why not."""
    flags, speculating = row["flags"], row["flags, speculating"] or row["flags"]
    said = (
        refusals.refuse_config(config),
        refuse(config, flags),
        refuse(config, flags, one_flag=True),
        refuse(config, flags, fp8=True),
        refuse(config, flags, one_flag=True, fp8=True),
        refuse(config, speculating, one_flag=True, fp8=True),
    )
    text = config.get("text_config") or config
    named = {"class": config["architectures"][0], "model_type": text["model_type"], "layers": name_kind(config)}
    return row | named | {name: why or "yes" for name, why in zip(VERDICTS, said, strict=True)}


def render(rows: list[dict[str, Any]]) -> str:
    def share(some: list[dict[str, Any]], name: str) -> str:
        count = sum(row[name] == "yes" for row in some)
        return f"{count}" if some is not rows else f"{count} ({count / len(rows):.0%})"

    lines = ["| layers | models | " + " | ".join(VERDICTS) + " |", "|---|--:" * 1 + "|--:" * len(VERDICTS) + "|"]
    for kind in KINDS:
        some = [row for row in rows if row["layers"] == kind]
        lines.append(f"| {kind} | {len(some)} | " + " | ".join(share(some, name) for name in VERDICTS) + " |")
    lines.append(f"| all | {len(rows)} | " + " | ".join(share(rows, name) for name in VERDICTS) + " |")
    reasons = Counter(re.sub(r"how \S+, a class", "how this one, a class", row["architecture"]) for row in rows)
    lines += ["", "Declined by architecture:", ""]
    lines += [f"- {count}: {why}" for why, count in reasons.most_common() if why != "yes"]
    kv = sum(row["flags"]["kv"] != "auto" for row in rows)
    draft = sum(bool(row["flags"]["speculation"]) for row in rows)
    offered = sum(bool((row["flags, speculating"] or row["flags"])["speculation"]) for row in rows)
    return "\n".join([*lines, "", f"KV type set: {kv}; speculate as written: {draft}, with a box ticked: {offered}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--checkout", type=Path)
    args = parser.parse_args()
    facts = [json.loads(line) for line in MODELS.read_text().splitlines()]
    known = {model: fact for fact in facts for model in fact["models"]}
    if args.checkout:
        commit, found = read_recipes(args.checkout)
        rows = [
            {"model": name, "added": one["added"], "recipes": commit[:10], "machine": one["machine"],
             "strategy": one["strategy"], "flags": read_flags(one["command"]),
             "flags, speculating": read_flags(one["speculating"]),
             "config from": known[name]["from"], "note": known[name].get("note", "")}
            for name, one in sorted(found.items(), key=lambda item: item[0].lower())
        ]  # fmt: skip
    else:
        rows = [json.loads(line) for line in args.rows.read_text().splitlines()]
    rows = [judge(row, known[row["model"]]["config"]) for row in rows]
    args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(render(rows))


if __name__ == "__main__":
    main()
