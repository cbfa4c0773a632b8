"""Reuse on a CPU with the embedded engine: the same document under another instruction, in three qualities.

python examples/reuse_on_cpu.py

The model is small and random: its answers mean nothing, its receipts and its next-token distributions do.
"""

import sys
from importlib.util import find_spec

if find_spec("torch") is None:
    sys.exit("the package torch is not installed\nhint: pip install '.[local]' in the checkout")

from semblend import SemBlend, SemBlendConfig
from semblend.engine.core.assemble import assemble
from semblend.engine.core.config import EngineConfig
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.spec import ModelSpec

SHAPE = {
    "model_type": "qwen2", "num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096,
    "eos_token_id": None,
}  # fmt: skip
DOCUMENT = [(7 * n * n + 3 * n) % 509 + 2 for n in range(1200)]


def main() -> None:
    model = DecoderModel.random(ModelSpec.from_hf_config(SHAPE), seed=3)
    for quality in ("exact", "fast", "balanced"):
        library = SemBlend(SemBlendConfig(embedder="none", quality=quality))
        engine = assemble(model, pool_tokens=8192, config=EngineConfig(quality=quality), semblend=library)
        engine.generate([[5, 6, 7, *DOCUMENT, 9]])  # somebody asked about the document before
        (answer,) = engine.generate([[11, 12, 13, 14, *DOCUMENT, 15, 16]])
        tokens = ", ".join(f"{count} {kind}" for kind, count in answer.receipt.tokens.items() if count)
        print(f"{quality:9} {answer.receipt.outcome}: {tokens}")
        engine.close()


if __name__ == "__main__":
    main()
