"""Reuse KV in your own script with transformers: the same document under another instruction.

python examples/transformers_generate.py [folder or name of a Llama or Qwen2 model]

Without a model it takes a small random one: its answers mean nothing, its receipts do.
"""

from __future__ import annotations

import sys
import time

try:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
except ModuleNotFoundError as error:
    sys.exit(f"the package {error.name} is not installed\nhint: pip install '.[transformers]' in the checkout")

from semblend.integration.transformers.reuse import TransformersReuse

TEXT = "\n".join(f"Shelf {n}: {n * 37 % 90} boxes of goods, counted on day {n * 11 % 28}." for n in range(60))


def load(name: str | None):
    """A model, and a function from text to token ids."""
    if name:
        tokenizer = AutoTokenizer.from_pretrained(name)
        return AutoModelForCausalLM.from_pretrained(name), lambda text: tokenizer(text, return_tensors="pt").input_ids
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model("qwen2", vocab_size=256, num_key_value_heads=2, eos_token_id=None, **shape)
    return AutoModelForCausalLM.from_config(config), lambda text: torch.tensor([list(text.encode())])


model, encode = load(sys.argv[1] if len(sys.argv) > 1 else None)
model.eval()
with TransformersReuse(model, quality="fast") as reuse:
    for note, instruction, question in (
        ("first", "You are brief.", "Which shelf holds most?"),
        ("the same instruction", "You are brief.", "How many boxes are on shelf 7?"),
        ("another instruction", "You are a careful archivist.", "Which shelf was counted last?"),
    ):
        prompt = encode(f"{instruction}\n\n{TEXT}\n\n{question}")
        begun = time.perf_counter()
        answer = reuse.generate(prompt, max_new_tokens=8, do_sample=False)
        tokens = ", ".join(f"{count} {kind}" for kind, count in answer.receipt.tokens.items())
        print(f"{note:21} {tokens}", file=sys.stdout)
        print(f"{time.perf_counter() - begun:.2f} s", file=sys.stderr)
    print("in all:", dict(reuse.semblend.totals().tokens))
