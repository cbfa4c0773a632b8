"""Writes SmolLM2-135M-Instruct as a folder that vLLM loads: ``python hf_folder.py TARGET``.

The weights are those of the embedded engine's tests (a Q4_1 GGUF file), dequantised to float32.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def write_folder(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from semblend.models import pull

    gguf = pull("smollm2-135m")
    scratch = target.with_name(target.name + ".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain float32 by now, but the model is still marked as quantised and refuses to be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(scratch)
    tokenizer.save_pretrained(scratch)
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]))
