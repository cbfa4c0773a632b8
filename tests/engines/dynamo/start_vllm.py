"""Starts ``python -m dynamo.vllm`` on vLLM for CPUs, with two things that it imports and that a text model never uses.

Dynamo 1.6.1 is made for vLLM 0.31. A function that it imports for workers of embeddings is gone in 0.32, with which all
our other tests run. And torchvision without its compiled operators needs their names. vLLM starts its processes from
this file again, so that both are there in each of them.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "sglang" / "cpu_shim"))
import torchvision_ops_shim  # noqa: F401
import vllm.v1.engine.utils as engine_utils

if not hasattr(engine_utils, "get_engine_zmq_addresses"):
    engine_utils.get_engine_zmq_addresses = None

if __name__ == "__main__":
    sys.argv[0] = "dynamo.vllm"
    runpy.run_module("dynamo.vllm", run_name="__main__")
