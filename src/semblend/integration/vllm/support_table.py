"""Which models and features of vLLM are served: a table for the docs. What declines an engine stands in `refusals`."""

from __future__ import annotations

from semblend.integration.version_support import Feature, Served

_ENGINES = "tests/engines/vllm"
_START = "tests/integration/vllm/test_start.py"

FEATURES: tuple[Feature, ...] = (
    Feature(
        "full attention with rotary positions (Llama, Qwen, Mistral without a window, …)",
        Served.YES,
        "float32, bfloat16 and float16",
        f"{_ENGINES}/test_reuse.py",
    ),
    Feature(
        "quantised weights",
        Served.YES,
        "the stock model computes our passes too, and its KV is as wide as ever. 4-bit weights (compressed-tensors) of "
        "SmolLM2-135M run in the tests, fast and balanced. GPTQ and AWQ go the same way and were never run: vLLM's CPU "
        "package has no kernel for them on ARM (cpu_gemm_wna16)",
        f"{_ENGINES}/test_number_types.py",
    ),
    Feature(
        "tensor parallel",
        Served.YES,
        "ranks agree on what they see; two ranks on a CPU answer and account as one. Several GPUs were never run",
        f"{_ENGINES}/test_tensor_parallel.py",
    ),
    Feature(
        "hybrid and sliding-window models",
        Served.NO,
        "run as without us, with vLLM's hybrid KV manager on: answers and prefix hits of a model with both kinds of "
        "layers are compared with an engine without a connector",
        f"{_ENGINES}/test_as_without_us.py",
    ),
    Feature(
        "MLA, Mamba and other caches that are not one key and one value a token",
        Served.NO,
        "moving KV means rotating keys, and these have none",
        _START,
    ),
    Feature(
        "layers that share the KV of other layers",
        Served.NO,
        "a donor would hold it twice or not at all (num_kv_shared_layers, kv_sharing_fast_prefill)",
        _START,
    ),
    Feature(
        "vision and audio models",
        Served.NO,
        "with M-RoPE or without: they compute from embeddings, which token ids do not determine",
        _START,
    ),
    Feature(
        "KV cache in fp8 or another quantised type",
        Served.NO,
        "a moved key is read with the layer's scale, rotated and rounded to 8 bits a second time. That needs scales "
        "in the splice kernel, our own attention over 8-bit KV, and a canary and quality thresholds calibrated with "
        "it on a GPU: vLLM runs fp8 KV on no ARM CPU (it wants AVX-512 or AMX), so nothing of it could be shown here",
        _START,
    ),
    Feature(
        "LoRA",
        Served.NO,
        "vLLM writes down once a step which adapter each row of its batch has, and its kernels read that. A pass of "
        "ours in the same step would run with the batch's adapters, and setting others would leave the batch with "
        "ours. Base model and adapters answer as without us",
        f"{_ENGINES}/test_lora.py",
    ),
    Feature("speculative decoding", Served.NO, "a draft model has KV of its own, which donors do not hold", _START),
    Feature("pipeline parallel", Served.NO, "no rank has all layers, and a pass of ours needs them", _START),
    Feature(
        "data parallel dense models",
        Served.YES,
        "each rank is an engine of its own with its own donors; read in vLLM's sources, never run",
    ),
    Feature("data parallel experts", Served.NO, "all ranks wait for every pass, and ours is one rank's own", _START),
    Feature("decode and prefill context parallel", Served.NO, "a prompt's KV lies on several ranks", _START),
    Feature(
        "fused quantised attention output (fuse_attn_quant)",
        Served.NO,
        "the attention of our passes writes plain numbers",
        _START,
    ),
    Feature(
        "sleep mode",
        Served.NO,
        "it takes memory away from all that was allocated beside the KV cache, donors and recorded passes too",
        _START,
    ),
    Feature(
        "weight updates (update_weights, reload_weights, anything else)",
        Served.YES,
        "a digest of sampled weights is part of the namespace and is compared before every load; every reset of the "
        "prefix cache drops donors, with reset_connector or without",
        f"{_ENGINES}/test_new_weights.py",
    ),
    Feature(
        "prefill and decode engines",
        Served.PER_REQUEST,
        "requests with do_remote_decode, do_remote_prefill or disagg_spec are computed without us and are no donors; "
        "an engine where our kv_role, or that of a connector beside us, is not kv_both declines as a whole",
        f"{_ENGINES}/test_beside_others.py",
    ),
    Feature(
        "images in a request, prompt embeddings, pooling, prompt logprobs, streaming input",
        Served.PER_REQUEST,
        "computed without us",
        "tests/integration/vllm/test_scheduler_half.py",
    ),
)
