"""One of two ranks of a real vLLM fails in a pass of ours: a scenario of `apart`, for `test_tensor_parallel`.

It prints how long the engine took to stop, and why it did.
`FailingConnector` is what vLLM loads in its workers; the connector's settings name the rank that is to fail.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

FAILS_AT_ROWS = 8
"""A pass over fewer rows is no reuse of ours."""


def __getattr__(name: str) -> Any:
    """The connector, made when vLLM asks for it: the script above needs no vLLM to be read."""
    if name != "FailingConnector":
        raise AttributeError(name)
    from semblend.integration.vllm.connector_v1 import SemBlendConnectorV1

    class FailingConnector(SemBlendConnectorV1):
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            self._failing_rank = extra.pop("failing_rank", None)
            super().__init__(vllm_config, role, kv_cache_config)

        def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
            super().register_kv_caches(kv_caches)
            model = self._worker._model
            if model.rank == self._failing_rank:
                real = model.forward

                def fail_in_pass(rows: Any, observer: Any = None) -> Any:
                    if len(rows) >= FAILS_AT_ROWS:
                        print(f"failed at {time.time()}", flush=True)
                        raise MemoryError("no memory left, on this rank only")
                    return real(rows, observer)

                model.forward = fail_in_pass

    return FailingConnector


def fail(rank: int, folder: Path) -> None:
    from small_model import write_small_model
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    if not (folder / "config.json").exists():
        write_small_model(folder)
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=2048,
        max_num_batched_tokens=2048, kv_cache_memory_bytes=64 << 20, max_num_seqs=4, block_size=32,
        tensor_parallel_size=2,
        kv_transfer_config=KVTransferConfig(
            kv_connector="FailingConnector",
            kv_connector_module_path="failing_rank",
            kv_role="kv_both",
            kv_connector_extra_config={"failing_rank": rank, "deep_tolerance": 0},
        ),
    )  # fmt: skip
    rng = random.Random(0)

    def ask(ids: list[int], quality: str) -> Any:
        extra = {"kv_transfer_params": {"semblend": {"quality": quality}}}
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, extra_args=extra)
        return llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)

    document = [rng.randrange(10, 990) for _ in range(400)]
    ask([*range(10, 50), *document, 5], "exact")
    print("a donor is kept", flush=True)
    try:
        ask([*range(60, 77), *document, 5], "fast")
        print("answered", flush=True)
    except Exception as error:
        print(f"stopped at {time.time()}: {type(error).__name__}: {error}".replace("\n", " "), flush=True)
