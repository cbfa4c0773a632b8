"""Tables that only the reference pages show: what each engine serves, and what names mean.

What declines an engine at its start stands in each integration's own checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sembench.trust import Doubt
from semblend.integration.dynamo.placement import PlacementReason


class SupportLevel(StrEnum):
    """How far a feature is served."""

    YES = "yes"
    PER_REQUEST = "declined by request"
    NO = "declined by engine"


@dataclass(frozen=True, slots=True)
class Feature:
    """One row. ``test``: where it is shown, a path in this repository."""

    what: str
    served: SupportLevel
    note: str
    test: str = ""


_VLLM_ENGINES = "tests/engines/vllm"
_VLLM_START = "tests/integration/vllm/test_start.py"

VLLM: tuple[Feature, ...] = (
    Feature(
        "full attention with rotary positions (Llama, Qwen, Mistral without a window, …)",
        SupportLevel.YES,
        "float32, bfloat16 and float16. The families whose keys we know how to move, each held against its own model "
        "in transformers, are [a table](models.md#families)",
        f"{_VLLM_ENGINES}/test_reuse.py",
    ),
    Feature(
        "models with experts (Qwen3-MoE, Mixtral, OLMoE, Granite MoE, GLM-4.5, MiniMax-M2, Hy3)",
        SupportLevel.YES,
        "small ones with random weights run in the tests, the shape of Qwen3-30B-A3B on an H200. Two tensor parallel "
        "ranks of a small Mixtral answered and accounted as one does. Expert parallel with tensor parallel is not "
        "refused and was never run: vLLM's CPU package dies of it without us too. All ranks make each pass together",
        f"{_VLLM_ENGINES}/test_families.py",
    ),
    Feature(
        "quantised weights",
        SupportLevel.YES,
        "the stock model computes our passes too, and its KV is as wide as ever. 4-bit weights (compressed-tensors) of "
        "SmolLM2-135M run in the tests, fast and balanced. GPTQ and AWQ go the same way and were never run: vLLM's CPU "
        "package has no kernel for them on ARM (cpu_gemm_wna16)",
        f"{_VLLM_ENGINES}/test_number_types.py",
    ),
    Feature(
        "tensor parallel",
        SupportLevel.YES,
        "ranks agree on what they see; two ranks on a CPU answer and account as one. Several GPUs were never run",
        f"{_VLLM_ENGINES}/test_tensor_parallel.py",
    ),
    Feature(
        "sliding windows beside full attention (Gemma 2 to 4, gpt-oss, Cohere 2, EXAONE 4, Olmo 3, Mellum 2, Trinity, "
        "Laguna, Step 3.5) with --disable-hybrid-kv-cache-manager",
        SupportLevel.YES,
        "vLLM then keeps the KV of every position in every layer. Small models with random weights, in the shapes of "
        "Gemma 2, 3 and 4, EXAONE 4, gpt-oss and Laguna, on a CPU; never run on a GPU. Real weights: Gemma 3 270M",
        f"{_VLLM_ENGINES}/test_windows.py",
    ),
    Feature(
        "the same without that flag, models with a window in every layer, and those with recurrent layers",
        SupportLevel.NO,
        "run as without us, with vLLM's hybrid KV manager on: answers and prefix hits of a model with both kinds of "
        "layers are compared with an engine without a connector",
        f"{_VLLM_ENGINES}/test_as_without_us.py",
    ),
    Feature(
        "attention within chunks (Llama 4)",
        SupportLevel.NO,
        "which tokens a token sees depends on where its chunk begins, and a passage that moved had another beginning",
        _VLLM_START,
    ),
    Feature(
        "models with recurrent layers (Mamba, linear attention, short convolutions)",
        SupportLevel.NO,
        "never: a recurrent state sums up all tokens in front of it and cannot be moved. `semblend estimate`, "
        "`semblend arrange` and the router still help. Answers, prefix hits and blocks are as without a connector",
        f"{_VLLM_ENGINES}/test_as_without_us.py",
    ),
    Feature(
        "latent attention (MLA): DeepSeek-V2, V3 and R1, Kimi K2, GLM-4.7-Flash",
        SupportLevel.YES,
        "run on a CPU, with random weights in the shapes of DeepSeek-V2 and V3, and of V2-Lite on an H200. Each engine "
        "checks at its start that its backend attends as our passes ask, and is declined if not. So it is with MLA "
        "switched off, an 8-bit cache, sparse attention (index_topk) and other model types",
        f"{_VLLM_ENGINES}/test_latents.py",
    ),
    Feature(
        "layers that share the KV of other layers",
        SupportLevel.NO,
        "a donor would hold it twice or not at all (num_kv_shared_layers, kv_sharing_fast_prefill). The small Gemma 4 "
        "are such models, and vLLM 0.32 does not start them without its hybrid KV manager, with us or without",
        _VLLM_START,
    ),
    Feature(
        "text in models that read images: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Mistral Small 3, GLM-4.1V, GLM-4.5V, "
        "Kimi K2.5; Gemma 3 and 4 with --disable-hybrid-kv-cache-manager",
        SupportLevel.YES,
        "a request with an image is computed without us and becomes no donor. Qwen3-VL, GLM-4.5V, Mistral3, Gemma 3, "
        "Gemma 4 and Kimi K2.5 with random weights run in the tests, beside requests with images too (all but Kimi's "
        "need torchvision); Qwen2-VL, Qwen2.5-VL and GLM-4.1V ran once; Gemma 4 12B has a class of its own that "
        "computes text as the others' does, not run. Only eager, on a CPU, where vLLM has no mask by which tokens of "
        "Gemma's images see each other: that our passes are described without it is tested",
        f"{_VLLM_ENGINES}/test_families.py",
    ),
    Feature(
        "other models for images or sound",
        SupportLevel.NO,
        "what a class keeps in the model while a step runs has to be known. Llama 4 attends within chunks. Mistral's "
        "own format (params.json) names no family: load the Hugging Face format",
        _VLLM_START,
    ),
    Feature(
        "KV cache in fp8 with a scale for each layer (fp8, fp8_e4m3)",
        SupportLevel.YES,
        "run on a CPU with AVX-512; never on a GPU. Each engine checks at its start that its backend reads what we "
        "read, and is declined if not. A value is copied byte for byte, a moved key is rotated wide and rounded to 8 "
        "bits again; the canary has a tolerance of its own. Donors hold numbers of the model's type, twice the cache's "
        "bytes, unless donor_bits is 8. On a GPU short passes are not recorded and keys are moved layer by layer",
        f"{_VLLM_ENGINES}/test_quantised.py",
    ),
    Feature(
        "other quantised KV caches (fp8_e5m2, scales for each head or token, int8, nvfp4, turboquant), fp8 latents",
        SupportLevel.NO,
        "scales or packings that our passes do not read, and rounding that no check was calibrated for; over e5m2 mode "
        "fast was five times as far from cold as over 16 bits (four prompts). So it is with "
        "layers left out (kv_cache_dtype_skip_layers) and scales that the first request sets (calculate_kv_scales)",
        _VLLM_START,
    ),
    Feature(
        "LoRA",
        SupportLevel.NO,
        "vLLM writes down once a step which adapter each row of its batch has, and its kernels read that. A pass of "
        "ours in the same step would run with the batch's adapters, and setting others would leave the batch with "
        "ours. Base model and adapters answer as without us",
        f"{_VLLM_ENGINES}/test_lora.py",
    ),
    Feature(
        "speculative decoding (n-gram, suffix, Medusa, MLP speculators, draft models, EAGLE, MTP)",
        SupportLevel.YES,
        "the served model checks every guess, so answers are those without speculation. Donors hold no KV of a draft: "
        "it guesses worse on a prompt that was loaded. n-gram, a draft model, EAGLE, EAGLE 3 and MTP ran on a CPU; "
        "suffix needs arctic-inference and was read, as were the others. n-gram ran on an H200 too",
        f"{_VLLM_ENGINES}/test_speculation.py",
    ),
    Feature(
        "parallel drafting (DFlash, DSpark, P-EAGLE, PARD), chains of MTP modules, other ways of speculation",
        SupportLevel.NO,
        "their guesses lie in the prompt's blocks in layouts of their own, or its last tokens are computed again after "
        "we may have copied them; a draft in a KV cache group of its own is declined too",
        _VLLM_START,
    ),
    Feature("pipeline parallel", SupportLevel.NO, "no rank has all layers, and a pass of ours needs them", _VLLM_START),
    Feature(
        "data parallel dense models",
        SupportLevel.YES,
        "each rank is an engine of its own with its own donors; read in vLLM's sources, never run",
    ),
    Feature(
        "data parallel experts",
        SupportLevel.NO,
        "all ranks wait for every pass, and ours is one rank's own",
        _VLLM_START,
    ),
    Feature("decode and prefill context parallel", SupportLevel.NO, "a prompt's KV lies on several ranks", _VLLM_START),
    Feature(
        "fused quantised attention output (fuse_attn_quant)",
        SupportLevel.NO,
        "the attention of our passes writes plain numbers",
        _VLLM_START,
    ),
    Feature(
        "sleep mode",
        SupportLevel.NO,
        "it takes memory away from all that was allocated beside the KV cache, donors and recorded passes too",
        _VLLM_START,
    ),
    Feature(
        "weight updates (update_weights, reload_weights, anything else)",
        SupportLevel.YES,
        "a digest of sampled weights is part of the namespace and is compared before every load; every reset of the "
        "prefix cache drops donors, with reset_connector or without",
        f"{_VLLM_ENGINES}/test_new_weights.py",
    ),
    Feature(
        "prefill and decode engines",
        SupportLevel.PER_REQUEST,
        "requests with do_remote_decode, do_remote_prefill or disagg_spec are computed without us and are no donors; "
        "an engine where our kv_role, or that of a connector beside us, is not kv_both declines as a whole",
        f"{_VLLM_ENGINES}/test_beside_others.py",
    ),
    Feature(
        "images in a request, prompt embeddings, pooling, prompt logprobs, streaming input",
        SupportLevel.PER_REQUEST,
        "computed without us",
        "tests/integration/vllm/test_scheduler_connector.py",
    ),
)

_SGLANG_ENGINES = "tests/engines/sglang"
_SGLANG_PATCH = f"{_SGLANG_ENGINES}/test_patch.py"
_SGLANG_REFUSED = f"{_SGLANG_ENGINES}/test_refused.py"

SGLANG: tuple[Feature, ...] = (
    Feature(
        "Llama, Mistral, Qwen2, Qwen3 with full attention",
        SupportLevel.YES,
        "float32, bfloat16, float16; a Llama (SmolLM2-135M) in float32 on a CPU was run, nothing else",
        f"{_SGLANG_ENGINES}/test_reuse.py",
    ),
    Feature(
        "page size above 1",
        SupportLevel.YES,
        "what is provided ends at a page; SGLang computes the rest",
        f"{_SGLANG_ENGINES}/test_server.py",
    ),
    Feature(
        "overlap schedule",
        SupportLevel.YES,
        "a load waits until the step under way is over. Run on a CPU, where a step is computed when it is launched; "
        "on a GPU, where two streams would meet, it was never run",
        f"{_SGLANG_ENGINES}/test_differential.py",
    ),
    Feature(
        "tensor parallel",
        SupportLevel.NO,
        "each rank has a scheduler of its own, and all must admit the same requests in the same step. When a load of "
        "ours is over depends on a clock, and so do lookups that are late and donors that expire",
        _SGLANG_REFUSED,
    ),
    Feature(
        "pipeline parallel", SupportLevel.NO, "no rank has all layers, and a pass of ours needs them", _SGLANG_PATCH
    ),
    Feature(
        "data parallel", SupportLevel.NO, "data parallel attention waits for every pass of all ranks", _SGLANG_PATCH
    ),
    Feature("context parallel", SupportLevel.NO, "a prompt's KV is on several ranks", _SGLANG_PATCH),
    Feature(
        "HiCache",
        SupportLevel.YES,
        "its pages come first: a request that loads pages from host memory or storage moves no document in that step. "
        "Not with hicache_host_memory_mode buffer_only. "
        "Its pages can be kept by us: [guide](../guides/sglang.md#keep-sglangs-own-pages)",
        f"{_SGLANG_ENGINES}/test_hicache.py",
    ),
    Feature(
        "external linkers, LMCache, FlexKV",
        SupportLevel.NO,
        "they own the loads of their requests, and would store moved KV as exact",
        _SGLANG_PATCH,
    ),
    Feature("MLA", SupportLevel.NO, "there is no key to rotate: a token has one compressed vector", _SGLANG_REFUSED),
    Feature(
        "sliding windows, Mamba",
        SupportLevel.NO,
        "not every layer has a key and a value for every token",
        _SGLANG_REFUSED,
    ),
    Feature("quantised KV caches", SupportLevel.NO, "a moved key would be rounded again", _SGLANG_REFUSED),
    Feature(
        "speculative decoding",
        SupportLevel.NO,
        "a draft model has KV of its own, which donors do not hold",
        _SGLANG_PATCH,
    ),
    Feature("LoRA", SupportLevel.NO, "a pass of ours would run with the adapters of SGLang's own batch", _SGLANG_PATCH),
    Feature("disaggregation", SupportLevel.NO, "other engines would take approximate KV as exact", _SGLANG_PATCH),
    Feature(
        "images, embeddings, sessions, beam search, prompt log probabilities, retracted requests",
        SupportLevel.PER_REQUEST,
        "they are computed without us",
        "tests/integration/sglang/test_requests.py",
    ),
)

_TRTLLM_TESTS = "tests/integration/trtllm"
_TRTLLM_CONNECTOR = f"{_TRTLLM_TESTS}/test_connector.py"
_TRTLLM_INTERFACE = f"{_TRTLLM_TESTS}/test_interface.py"

TRTLLM: tuple[Feature, ...] = (
    Feature(
        "Llama, Qwen2 and Qwen3 with full attention, PyTorch backend",
        SupportLevel.YES,
        "on the fake engine only. Weights and KV cache in float32, bfloat16 or float16",
        _TRTLLM_CONNECTOR,
    ),
    Feature(
        "requests with a salt of their own",
        SupportLevel.YES,
        "`cache_salt` from `make_one_time_salt(tenant)`: nobody else finds their blocks in the reuse tree",
        _TRTLLM_CONNECTOR,
    ),
    Feature(
        "requests with another salt, or none",
        SupportLevel.PER_REQUEST,
        "computed; they become donors. With `enable_block_reuse: false` they are served too, by versions that ask a "
        "connector then",
        _TRTLLM_CONNECTOR,
    ),
    Feature(
        "requests for which the engine has found a prefix of its own",
        SupportLevel.PER_REQUEST,
        "its blocks are not known before the claim",
        _TRTLLM_CONNECTOR,
    ),
    Feature("chunked prefill", SupportLevel.YES, "on the fake engine only", _TRTLLM_CONNECTOR),
    Feature("tensor parallel", SupportLevel.NO, "a rank cannot answer before the claim is made", _TRTLLM_INTERFACE),
    Feature(
        "pipeline parallel, attention DP, context parallel",
        SupportLevel.NO,
        "no rank has a whole prompt",
        _TRTLLM_INTERFACE,
    ),
    Feature(
        "quantised weights or KV cache", SupportLevel.NO, "the twin computes plain numbers only", _TRTLLM_INTERFACE
    ),
    Feature(
        "speculative decoding",
        SupportLevel.NO,
        "a draft model has KV of its own, which donors do not hold",
        _TRTLLM_INTERFACE,
    ),
    Feature(
        "LoRA", SupportLevel.NO, "an adapter changes what tokens compute, and the twin has none", _TRTLLM_INTERFACE
    ),
    Feature("sliding windows", SupportLevel.NO, "not every token has a block", _TRTLLM_INTERFACE),
    Feature(
        "disaggregated serving", SupportLevel.NO, "other engines would take approximate KV as exact", _TRTLLM_INTERFACE
    ),
    Feature("beam search", SupportLevel.NO, "beams share blocks of a prompt", _TRTLLM_INTERFACE),
    Feature(
        "images, prompt embeddings, context logits",
        SupportLevel.PER_REQUEST,
        "computed without us",
        _TRTLLM_INTERFACE,
    ),
    Feature("engines built with the TensorRT backend", SupportLevel.NO, "they have no Python connector"),
)

_DYNAMO_REAL = "tests/engines/dynamo/test_placement.py"
_DYNAMO_DEATHS = "tests/engines/dynamo/test_deaths.py"
_DYNAMO_SHARED = "tests/engines/dynamo/test_several_routers.py"
_DYNAMO_FAKE = "tests/integration/dynamo/test_router.py"

DYNAMO: tuple[Feature, ...] = (
    Feature("documents behind other beginnings", SupportLevel.YES, "pinned where they were computed", _DYNAMO_REAL),
    Feature(
        "equal beginnings", SupportLevel.YES, "Dynamo's index of KV events says which worker has them", _DYNAMO_REAL
    ),
    Feature(
        "prompts that nobody has seen", SupportLevel.YES, "sent without a pin: Dynamo's KvRouter chooses", _DYNAMO_REAL
    ),
    Feature(
        "a home with too much to do", SupportLevel.YES, "sent without a pin; load as Dynamo counts it", _DYNAMO_REAL
    ),
    Feature(
        "a worker that dies", SupportLevel.YES, "before the first token: sent again, without a pin", _DYNAMO_DEATHS
    ),
    Feature(
        "an answer that breaks off",
        SupportLevel.NO,
        "the error goes to the frontend, which may migrate it",
        _DYNAMO_FAKE,
    ),
    Feature(
        "cache salts, LoRA adapters",
        SupportLevel.YES,
        "a namespace each (mockers themselves ignore salts)",
        _DYNAMO_REAL,
    ),
    Feature("data-parallel ranks", SupportLevel.YES, "each rank counts as a worker; shown with a fake", _DYNAMO_FAKE),
    Feature(
        "routing constraints, priorities",
        SupportLevel.PER_REQUEST,
        "a request with some is Dynamo's alone",
        _DYNAMO_FAKE,
    ),
    Feature(
        "images, audio, embeddings",
        SupportLevel.PER_REQUEST,
        "equal token ids do not mean equal prompts there",
        _DYNAMO_FAKE,
    ),
    Feature(
        "prefill and decode apart", SupportLevel.PER_REQUEST, "what was prefilled elsewhere is not moved", _DYNAMO_FAKE
    ),
    Feature(
        "several of our routers", SupportLevel.YES, "what one places, the others know, through a Redis", _DYNAMO_SHARED
    ),
)

DYNAMO_REASONS: Mapping[PlacementReason, str] = {
    PlacementReason.DONORS: "Pinned: the worker has computed parts of this prompt before.",
    PlacementReason.SPREAD: "Pinned: most of this prompt is new, and the worker got little of late.",
    PlacementReason.UNKNOWN: "Dynamo's choice: no worker has seen enough of it.",
    PlacementReason.LOAD: "Dynamo's choice: whoever has seen it has too much to do.",
    PlacementReason.CONSTRAINED: "Dynamo's choice: the request carries routing rules or media of its own.",
    PlacementReason.FAULT: "Dynamo's choice: something of ours failed, or the pinned worker did.",
}

DOUBTS: Mapping[Doubt, str] = {
    Doubt.TENANT_LEAK: "One tenant was served another tenant's tokens.",
    Doubt.WRONG_KV: "Only the warm answer states what stands in the donor's text alone.",
    Doubt.REUSE_ON_NEGATIVES: "Reuse was claimed where donor and recipient share nothing.",
    Doubt.EDITED_RESULT: "The file is not what was measured: no requests, no digest, or one that does not fit.",
    Doubt.IMPOSSIBLE_NUMBERS: "A request holds numbers that no request can have.",
    Doubt.MIXED_SERVERS: "The sessions of the run were measured on different servers.",
    Doubt.FOREIGN_EVIDENCE: "An engine log, a manifest or a calibration that does not belong to this run.",
    Doubt.MALFORMED_COUNTS: "The server sent counts that are none, such as NaN.",
    Doubt.CONTRADICTED: "Witnesses contradict each other, or what the prompts make possible.",
    Doubt.OVERLONG_ANSWERS: "Answers are longer than was asked for.",
    Doubt.ECHO: "Answers are the beginning of their prompts.",
    Doubt.SPEED_WITHOUT_REUSE: "Requests that reused nothing were faster than cold ones, beyond luck.",
    Doubt.HITS_SAVE_NOTHING: "Requests with confirmed reuse were not faster than cold ones.",
    Doubt.ONE_WITNESS: "Reuse is claimed, but too few independent channels say so.",
    Doubt.ANSWERS_LEFT_COLD: "Reuse changed answers more than running cold twice does.",
    Doubt.NOTHING_CONFIRMED: "No request reused anything that was confirmed.",
    Doubt.NOT_PAIRED: "Without cold, warm and rerun arms nobody can say what reuse saved.",
    Doubt.NO_NEGATIVES: "No unrelated pair was answered, so that reuse where none may be was not looked for.",
    Doubt.REQUESTS_FAILED: "More than one request of twenty failed, so that the rest may be a lucky choice.",
}

EXTRAS: dict[str, str] = {
    "embedder": "`SEMBLEND_EMBEDDER=minilm` or `static`: paraphrase evidence on the CPU",
    "onnx-gpu": "`SEMBLEND_EMBEDDER=onnx_gpu`: paraphrase evidence on a GPU",
    "gpu": "`semblend serve` on a GPU: the Triton kernels",
    "local": "`semblend serve`, `demo` and `calibrate`: the embedded engine, its API and its dashboard",
    "vllm": "running beside vLLM; no command of this version needs it",
    "sglang": "`semblend-sglang`, which knows SGLang 0.5.23",
    "trtllm": "`semblend-trtllm`, whose integration was never run on the real engine",
    "transformers": "`semblend.integration.transformers`: reuse around `model.generate()`",
    "dynamo": "`semantickv dynamo-router`, which knows Dynamo 1.6.1; `dynamo-pin` needs `edge` alone",
    "langchain": "`semblend.integration.langchain`: a document transformer that arranges",
    "langchain-agents": "`semblend.integration.langchain_agents`: a middleware that edits histories in batches",
    "llama-index": "`semblend.integration.llama_index`: a node postprocessor that arranges",
    "benchmarks": "all that `sembench` may need: live runs, tokenizers",
    "tokenizer": "`semblend estimate`, `explain` and `explore` with `--tokenizer` other than `stable`",
    "longbench": "`sembench build --profile longbench-v1` or `longbench-v2` from the hub; a local folder needs nothing",
    "live": "`sembench run-live-sglang`, `run-live-gateway`, `run-load` and what else speaks to a server",
    "telemetry": "`SEMBLEND_METRICS`, `SEMBLEND_NATS_URL` and OpenTelemetry spans, in every command and in the library",
    "edge": "`semantickv proxy`, `router`, `dynamo-pin`, `api`; pyzmq, msgspec for KV events, redis for more routers",
    "lab": "`semblend demo --plot`: its picture",
    "k8s": "`sembench collect-k8s-engine-events`: it needs `kubectl` and no package",
    "docs": "`make docs`: the site of the documentation, and its tests",
    "dev": "`make test`",
}
"""What each extra is for; a test fails when one is missing here."""
