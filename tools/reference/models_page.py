"""The page about models: which engine serves which family and feature, with what each was run, where quality is known.

Whether a family is served, the functions behind ``semblend doctor CONFIG.json`` say, of a config that has what decides.
Whether a feature is, the rows of each engine's own page. Only what was run, and where, is written here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from semblend.cli.commands.doctor import MODEL_LOOKS
from semblend.materialize.gate.thresholds import read_known
from semblend.materialize.kv.rope import FAMILIES, LATENT_FAMILIES
from tools.reference.support_tables import DYNAMO, SGLANG, VLLM, Feature, SupportLevel

SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
}
SHAPE |= {"vocab_size": 1000, "intermediate_size": 2048, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 1024}
LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
RECURRENT = {"layer_types": ["linear_attention", "full_attention"] * 2}
UNLIKE = WINDOWS | {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": part}
        for kind, part in (("full_attention", 0.5), ("sliding_attention", 1.0))
    }
}
LONG = {
    name: [1.0] * (SHAPE["hidden_size"] // SHAPE["num_attention_heads"] // 2)
    for name in ("short_factor", "long_factor")
}
LONG_ROPE = {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 4096} | LONG}
DECIDES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("gemma2", "gemma3_text", "gpt_oss", "cohere2", "exaone4", "olmo3", "mellum", "afmoe"), WINDOWS),
    **dict.fromkeys(LATENT_FAMILIES, LATENTS),
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"] * 2, "attention_chunk_size": 1024},
    "minimax_m2": {"head_dim": 128, "rotary_dim": 64},
    "laguna": {"layer_types": ["full_attention"] * 4},
    "mistral (a window in all layers)": {"sliding_window": 1024},
    "phi3 (longrope)": LONG_ROPE,
    **dict.fromkeys(("step3p5", "gemma4_text", "gemma4_unified_text"), UNLIKE),
    "laguna (windows)": UNLIKE,
    "gemma4_text (layers share KV)": UNLIKE | {"num_kv_shared_layers": 2},
    "glm_moe_dsa": LATENTS | {"index_topk": 2048},
    "deepseek_v4": {"index_topk": 512},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), RECURRENT),
    "nemotron_h": {"ssm_state_size": 128},
    "lfm2": {"conv_L_cache": 3},
}  # fmt: skip
"""Of a config what decides beside its sizes; also of families and kinds of configs that are declined everywhere."""
CLASSES: Mapping[str, str] = {
    **{kind: f"{kind.capitalize()}ForCausalLM" for kind in ("llama", "mistral", "qwen2", "qwen3")},
    "qwen2_vl_text": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl_text": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl_text": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe_text": "Qwen3VLMoeForConditionalGeneration",
    "glm4v_text": "Glm4vForConditionalGeneration",
    "glm4v_moe_text": "Glm4vMoeForConditionalGeneration",
    "llama4_text": "Llama4ForConditionalGeneration",
    "gemma3_text": "Gemma3ForConditionalGeneration",
    "gemma4_text": "Gemma4ForConditionalGeneration",
    "gemma4_unified_text": "Gemma4UnifiedForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForConditionalGeneration",
    "aria_text": "AriaForConditionalGeneration",
}
"""Where an engine decides by the class; a family ``…_text`` here stands in a model that reads images too."""
NAMES: Mapping[str, str] = {
    "llama": "Llama 2 to 3.3, SmolLM2, TinyLlama", "qwen2": "Qwen2, Qwen2.5", "qwen3_moe": "Qwen3-30B-A3B, Qwen3-Coder",
    "glm4_moe": "GLM-4.5 to 4.7", "glm4_moe_lite": "GLM-4.7-Flash", "glm_moe_dsa": "GLM-5", "afmoe": "Trinity",
    "deepseek_v2": "DeepSeek-V2", "deepseek_v3": "DeepSeek-V3, R1", "kimi_k2": "Kimi K2 to K2.7", "hy_v3": "Hy3",
    "mistral (a window in all layers)": "Mistral 7B v0.1", "phi3 (longrope)": "Phi-4-mini", "cohere2": "Command A",
    "laguna": "Laguna M.1", "laguna (windows)": "Laguna XS and S", "lfm2": "LFM2.5", "mellum": "Mellum 2",
    "qwen3_5_text": "Qwen3.5 to 3.8", "nemotron_h": "Nemotron 3", "gemma3_text": "Gemma 3, TranslateGemma",
    "gemma4_text": "Gemma 4 26B-A4B and 31B", "gemma4_unified_text": "Gemma 4 12B",
    "gemma4_text (layers share KV)": "Gemma 4 E2B and E4B", "step3p5": "Step 3.5 Flash", "phi3": "Phi-4",
    "minimax_m2": "MiniMax-M2 to M2.7", "gpt_oss": "gpt-oss",
}  # fmt: skip
CPU = "random weights, CPU"
RUN: Mapping[str, str] = {
    "llama": "vLLM, SGLang, embedded: SmolLM2-135M, CPU; embedded: TinyLlama-1.1B, H200",
    "qwen2": "vLLM, embedded: Qwen2.5-Coder 0.5B and 1.5B, CPU and H200; vLLM: shape of 7B, random weights, H200",
    "qwen3": f"embedded: {CPU}",
    "qwen3_moe": f"vLLM: {CPU}; shape of 30B-A3B, random weights, H200",
    **dict.fromkeys(
        ("mixtral", "olmoe", "granitemoe", "glm4_moe", "minimax_m2", "hy_v3", "gemma2", "exaone4"), f"vLLM: {CPU}"
    ),
    "glm": f"vLLM, by the class of transformers: {CPU}",
    "gemma4_text": f"vLLM: {CPU}, alone and with requests with images beside",
    "laguna (windows)": f"vLLM: {CPU}, without experts",
    "phi3 (longrope)": f"vLLM: {CPU}",
    "gemma3_text": f"vLLM: 270M, CPU; {CPU}, alone and with requests with images beside; shape of 12B, random weights, "
    "H200",
    "gpt_oss": f"vLLM: {CPU}, compiled too; of 20B nothing was reused on the H200, for a defect that is mended since",
    "deepseek_v2": f"vLLM: {CPU}; shape of V2-Lite, random weights, H200",
    "deepseek_v3": f"vLLM: {CPU}",
    **dict.fromkeys(
        ("qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_moe_text"), f"vLLM: {CPU}, requests with images beside"
    ),
    "kimi_k2": f"vLLM: {CPU}, as the text of Kimi K2.5, requests with images beside",
    "mistral": f"vLLM: {CPU}, as the text of Mistral Small 3",
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text"), f"vLLM: once, {CPU}"),
    "mistral (a window in all layers)": f"vLLM: {CPU}, as without us",
    "lfm2": f"vLLM: {CPU}, as without us",
}
"""Whole engines, by tests/engines and the results of research and bench."""
MEASURED = {"qwen2.5": "qwen2", "smollm2": "llama", "tinyllama": "llama"}
SHORT: Mapping[str, str] = {
    "never served": "recurrent state", "never looked at": "class not known", "never run": "type never run",
    "class for images": "class for images", "within chunks": "chunks", "chunked_attention": "chunks",
    "no layer has full": "windows only", "sliding window": "windows", "attends to latents": "latents",
    "index_topk": "sparse attention", "linear_attention": "recurrent state", "conv": "recurrent state",
    "no architecture": "no such class", "longrope": "longrope", "rotates its keys is not known": "type not known",
    "different frequencies": "layers rotate differently", "share the KV": "layers share KV",
    "no rotary": "no rotation", "reads images": "class for images", "M-RoPE": "class for images",
}  # fmt: skip
"""A reason of doctor's by a part of it, in a few words; a reason that is not here stops the page."""
NO, ONE, NONE = SupportLevel.NO, SupportLevel.PER_REQUEST, "–"
FEATURES: tuple[tuple[str, str, str, str, str, str], ...] = (
    ("weights of 4 or 8 bits", "quantised weights", "not refused, never run", NO, "GGUF, as plain numbers", ""),
    ("KV cache in 8 bits", "KV cache in fp8", "quantised KV caches", ONE, NONE, ""),
    ("windows beside full layers", "the same without that flag", "sliding windows", NO, NO, ""),
    ("the same with `--disable-hybrid-kv-cache-manager`", "sliding windows beside", NONE, NONE, NONE, ""),
    ("latent attention (MLA)", "latent attention", "MLA", NO, NO, ""),
    ("speculation: n-gram, draft models, EAGLE, MTP", "speculative decoding", "speculative decoding", ONE, NONE, ""),
    ("parallel drafting (DFlash, DSpark, …)", "parallel drafting", "speculative decoding", NONE, NONE, ""),
    ("LoRA", "LoRA", "LoRA", NO, NONE, "cache salts, LoRA"),
    ("images in a request", "images in a request", "images, embeddings", ONE, NONE, "images, audio"),
    ("tensor parallel", "tensor parallel", "tensor parallel", NO, NONE, ""),
    ("expert parallel, over tensor parallel ranks", "not refused, never run", NO, NONE, NONE, ""),
    ("data parallel, dense", "data parallel dense", "data parallel", NONE, NONE, "data-parallel ranks"),
    ("data parallel, experts", "data parallel experts", "data parallel", NONE, NONE, "data-parallel ranks"),
    ("pipeline parallel", "pipeline parallel", "pipeline parallel", NO, NONE, ""),
    ("prefill and decode apart", "prefill and decode", "disaggregation", NONE, NONE, "prefill and decode apart"),
    ("CUDA graphs, compiled layers", "yes", "never run", NONE, NONE, ""),
    ("chunked prefill", "yes", "yes", NONE, "yes", ""),
    ("asynchronous scheduling", "yes", "overlap schedule", NONE, NONE, ""),
)
"""Each with how its row on an engine's page begins; what is no beginning of a row is the cell itself."""


def make_config(family: str) -> dict[str, Any]:
    """A config of a family, with what decides whether it is served."""
    kind = family.partition(" ")[0]
    config = {**SHAPE, "model_type": kind, **DECIDES.get(family, {})}
    if kind.endswith("_text") and kind in CLASSES:
        config = {"model_type": kind.removesuffix("_text"), "text_config": config, "vision_config": {}}
    return {**config, "architectures": [CLASSES.get(kind, f"{kind}ForCausalLM")]}


def show_verdict(engine: str, config: Mapping[str, Any]) -> str:
    why, how = MODEL_LOOKS[engine](config)
    if why is None:
        return "with a flag" if how else "yes"
    return f"no: {next(short for part, short in SHORT.items() if part in why)}"


def list_families() -> Iterator[tuple[str, ...]]:
    """The rows: a family, the verdict of each engine, with what it was run, where quality was measured."""
    for family in dict.fromkeys((*FAMILIES, *LATENT_FAMILIES, *DECIDES)):
        verdicts = [show_verdict(engine, make_config(family)) for engine in MODEL_LOOKS]
        known = [(name, one) for name, one in sorted(read_known().items()) if MEASURED[name.split("-")[0]] == family]
        told = [name + ("" if one.dial.means else " (no dial)") for name, one in known]
        run = [RUN[family]] if family in RUN else []
        if verdicts[list(MODEL_LOOKS).index("transformers")] == "yes":
            run.append(f"transformers: {CPU}")
        yield family, *verdicts, "; ".join(run) or "never", ", ".join(told) or "no"


def models_markdown() -> str:
    lines = [
        "# Models and features, by engine",
        "",
        "`semblend doctor CONFIG.json` says the same of one model, with each reason in full. *Served* and *measured* "
        "differ: without a measurement default thresholds decide; `semblend calibrate` makes one. The pages of "
        "[vLLM](vllm.md#models-and-features) and [SGLang](sglang.md#models-and-features) say how a feature is known, "
        "[research](../research/quality.md) what was measured.",
        "",
        "## Families",
        "",
        "By `model_type` of a config.json; of a model that reads images, of its text. *With a flag*: vLLM's "
        "`--disable-hybrid-kv-cache-manager`. *Run*: a whole engine; the rotation of every family that vLLM serves is "
        "held against its model in transformers, and each engine of vLLM tries at its start that its own layers rotate "
        "so. Behind Dynamo an engine serves what it serves alone; vLLM was run "
        "there with SmolLM2-135M on a CPU. TensorRT-LLM's integration was [never run](trtllm.md).",
        "",
        "| family | vLLM | SGLang | transformers | embedded | run | quality measured |",
        "|---" * 7 + "|",
    ]
    rows = sorted(list_families(), key=lambda row: (row[-1] == "no", _rank(row), row[1:]))
    for cells, alike in groupby(rows, key=lambda row: row[1:]):
        names = [f"`{one[0]}`" + (f" ({NAMES[one[0]]})" if one[0] in NAMES else "") for one in alike]
        lines.append(f"| {', '.join(names)} | {' | '.join(cells)} |")
    lines += ["", "## Features", "", "| feature | vLLM | SGLang | transformers | embedded | Dynamo |"]
    lines.append("|---" * 6 + "|")
    for what, vllm, sglang, *others, dynamo in FEATURES:
        own = "Dynamo's own choice" if dynamo and _read(DYNAMO, dynamo) == ONE else "as its engine"
        lines.append(f"| {' | '.join((what, _read(VLLM, vllm), _read(SGLANG, sglang), *others, own))} |")
    lines += [
        "",
        f"*{ONE}*: computed without us, others of the engine are served. *Dynamo's own choice*: our router does not "
        f"place such a request. {NONE}: the engine has no such thing. On an H200 vLLM was run with CUDA graphs, "
        "compiled layers, chunked prefill, asynchronous scheduling, an fp8 cache and n-gram speculation; tensor "
        "parallel, quantised weights and other speculation on a CPU alone. SGLang and transformers never saw a GPU, "
        "the embedded one did.",
    ]
    return "\n".join(lines)


def _rank(row: tuple[str, ...]) -> int:
    """Less for what more engines serve, vLLM above all."""
    return 4 * ("yes", "with a flag", "no").index(row[1].partition(":")[0]) - row.count("yes")


def _read(table: tuple[Feature, ...], begins: str) -> str:
    return next((row.served for row in table if row.what.startswith(begins)), begins)
