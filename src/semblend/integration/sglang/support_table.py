"""Which models and features of SGLang are served: a table for the docs. What declines an engine is in `refusals`."""

from __future__ import annotations

from semblend.integration.version_support import Feature, Served

_ENGINES = "tests/engines/sglang"
_PATCH = f"{_ENGINES}/test_patch.py"
_REFUSED = f"{_ENGINES}/test_refused.py"

FEATURES: tuple[Feature, ...] = (
    Feature(
        "Llama, Mistral, Qwen2, Qwen3 with full attention",
        Served.YES,
        "float32, bfloat16, float16; a Llama (SmolLM2-135M) in float32 on a CPU was run, nothing else",
        f"{_ENGINES}/test_reuse.py",
    ),
    Feature(
        "page size above 1",
        Served.YES,
        "what is provided ends at a page; SGLang computes the rest",
        f"{_ENGINES}/test_server.py",
    ),
    Feature(
        "overlap schedule",
        Served.YES,
        "a load waits until the step under way is over. Run on a CPU, where a step is computed when it is launched; "
        "on a GPU, where two streams would meet, it was never run",
        f"{_ENGINES}/test_differential.py",
    ),
    Feature(
        "tensor parallel",
        Served.NO,
        "each rank has a scheduler of its own, and all must admit the same requests in the same step. When a load of "
        "ours is over depends on a clock, and so do lookups that are late and donors that expire",
        _REFUSED,
    ),
    Feature("pipeline parallel", Served.NO, "no rank has all layers, and a pass of ours needs them", _PATCH),
    Feature("data parallel", Served.NO, "data parallel attention waits for every pass of all ranks", _PATCH),
    Feature("context parallel", Served.NO, "a prompt's KV is on several ranks", _PATCH),
    Feature(
        "HiCache",
        Served.YES,
        "its pages come first: a request that loads pages from host memory or storage moves no document in that step. "
        "Not with hicache_host_memory_mode buffer_only. "
        "Its pages can be kept by us: [guide](../guides/sglang.md#keep-sglangs-own-pages)",
        f"{_ENGINES}/test_hicache.py",
    ),
    Feature(
        "external linkers, LMCache, FlexKV",
        Served.NO,
        "they own the loads of their requests, and would store moved KV as exact",
        _PATCH,
    ),
    Feature("MLA", Served.NO, "there is no key to rotate: a token has one compressed vector", _REFUSED),
    Feature("sliding windows, Mamba", Served.NO, "not every layer has a key and a value for every token", _REFUSED),
    Feature("quantised KV caches", Served.NO, "a moved key would be rounded again", _REFUSED),
    Feature("speculative decoding", Served.NO, "a draft model has KV of its own, which donors do not hold", _PATCH),
    Feature("LoRA", Served.NO, "a pass of ours would run with the adapters of SGLang's own batch", _PATCH),
    Feature("disaggregation", Served.NO, "other engines would take approximate KV as exact", _PATCH),
    Feature(
        "images, embeddings, sessions, beam search, prompt log probabilities, retracted requests",
        Served.PER_REQUEST,
        "they are computed without us",
        "tests/integration/sglang/test_requests.py",
    ),
)
