"""Writes the prompts of `one_pass.py` as tokens: quality cases of real texts, and agents' histories that were edited.

    python research/one_pass/prepare.py MODEL.gguf DATA OUT.pkl.gz

An agent's prompt: a real run of tau-bench (gpt-4o, airline) up to one of its calls. The donor is the prompt one call
before, unedited. `cleared`: tool results but the last two became a placeholder; `dropped`: the older half of the messages
behind the system message is gone; `handoff`: another system message.
"""

from __future__ import annotations

import gzip
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from _quality_cases import cases, choose_chat_form

from semblend import Prompt, ReusePlan, SemBlend, SemBlendConfig
from semblend.engine.model.tokenizer import ModelTokenizer

SCENARIOS = ("one_document", "edits", "code", "several", "reordered")
OTHER_AGENT = (
    "You take over a conversation that another agent of the airline has led so far. Read what was said and done, keep to "
    "the policy that was agreed with the customer, and go on with the next step. Be brief and polite.\n"
)


def render(message: dict[str, Any]) -> str:
    body = message.get("content") or json.dumps(message.get("tool_calls") or "")
    return f"<|im_start|>{message['role']}\n{body}<|im_end|>\n"


def edit(messages: list[dict[str, Any]], how: str) -> list[dict[str, Any]]:
    if how == "handoff":
        return [{"role": "system", "content": OTHER_AGENT}, *messages[1:]]
    if how == "dropped":
        return [messages[0], *messages[1 + (len(messages) - 1) // 2 :]]
    tools = [i for i, message in enumerate(messages) if message["role"] == "tool"][:-2]
    return [{**m, "content": "[old result cleared]"} if i in tools else m for i, m in enumerate(messages)]


def agent_cases(folder: Path, encode: Callable[[str], list[int]], how: str, most: int) -> Iterator[dict[str, Any]]:
    with gzip.open(folder / "agent_traces" / "taubench_gpt4o_airline_even.jsonl.gz", "rt") as lines:
        runs = [json.loads(line) for line in lines]
    made = 0
    for number, run in enumerate(runs):
        calls = [i for i, message in enumerate(run["traj"]) if message["role"] == "assistant"]
        if len(calls) < 8 or made >= most:
            continue
        last = calls[-2 - number % 3]
        before = run["traj"][: calls[calls.index(last) - 1]]
        target = encode("".join(map(render, edit(run["traj"][:last], how))) + "<|im_start|>assistant\n")
        donor = encode("".join(map(render, before)) + "<|im_start|>assistant\n")
        with SemBlend(SemBlendConfig(embedder="none")) as sb:
            sb.register(Prompt(donor), donor_id="0")
            plan = sb.lookup(Prompt(target))
        if not isinstance(plan, ReusePlan):
            continue
        made += 1
        yield {
            "case": f"{how}/{run['task_id']}/{run['trial']}", "scenario": how, "cluster": f"tau-{run['task_id']}",
            "tokens": target, "donors": [donor], "answer_tokens": 32,
            "spans": [(s.donor_id, s.donor_start, s.target_start, s.length) for s in plan.spans],
        }  # fmt: skip


def main(model: str, data: str, out: str) -> None:
    tokenizer = ModelTokenizer.load(model)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    found: list[dict[str, Any]] = []
    form = choose_chat_form(encode)
    for case in cases(Path(data), encode, scenarios=SCENARIOS, prompts=40, tokens=4000, seed=7, form=form):
        found.append(
            {
                "case": case.case_id, "scenario": case.scenario, "cluster": case.cluster, "tokens": list(case.tokens),
                "donors": [list(d) for d in case.donors], "answer_tokens": case.answer_tokens,
                "spans": [(s.donor_id, s.donor_start, s.target_start, s.length) for s in case.spans],
            }
        )  # fmt: skip
    for how in ("cleared", "dropped", "handoff"):
        found += agent_cases(Path(data), encode, how, 40)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        by_kind.setdefault(one["scenario"], []).append(one)
    turns = [kind[i] for i in range(40) for kind in by_kind.values() if i < len(kind)]
    with gzip.open(out, "wb") as file:
        pickle.dump(turns, file)
    for name, kind in by_kind.items():
        lengths = sorted(len(one["tokens"]) for one in kind)
        print(name, len(kind), "prompts of", lengths[0], "to", lengths[-1], "tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
